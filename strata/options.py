"""Arguments of generate, stream and chat: aliases, unknown names, prompts."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from strata.base.errors import BadArgument, need
from strata.base.numbers import one_of, shown, truth_value, whole_number
from strata.runtime.sampling import SamplingParams
from strata.text.stop import stop_strings

ALIASES = {"max_new_tokens": "max_tokens", "repeat_penalty": "repetition_penalty"}
SAMPLING = tuple(f.name for f in fields(SamplingParams))


def refuse_unknown(given: Iterable[str], known: Iterable[str], where: str) -> None:
    """Raise BadArgument for the first name that is not known, naming the closest one."""
    known = sorted(known)
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
            advice = f"Did you mean {close[0]}?" if close else f"Known: {', '.join(known)}."
            raise BadArgument(f"{where} has no argument {name}", found=name, needed="one that it has", advice=advice)


@dataclass(frozen=True)
class GenerateOptions:
    """Checked options of one generation."""

    params: SamplingParams
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    wait: bool = False
    drafts: bool = True
    draft_acceptance: str = "exact"


OWN_ARGUMENTS = {
    "generate": ("on_progress",),
    "stream": ("on_progress",),
    "chat": ("tools", "thinking", "reasoning_effort", "stream", "template_variables", "on_progress"),
}
"""Arguments that these calls take themselves; they are named when an unknown one is close to them."""


def generate_options(options: Mapping[str, Any], vocab: int, where: str = "generate") -> GenerateOptions:
    """Check names and values of keyword arguments. Aliases: max_new_tokens, repeat_penalty.

    Raises BadArgument for unknown names, a name given with its alias, and values out of range.
    """
    named: dict[str, Any] = {}
    for name, value in options.items():
        real = ALIASES.get(name, name)
        need(real not in named, f"{real} is given twice", found=f"{real} and its alias", needed="one of them")
        named[real] = value
    own = ("max_tokens", "stop", "ignore_eos", "wait", "drafts", "draft_acceptance")
    known = (*SAMPLING, *own, *ALIASES, *OWN_ARGUMENTS.get(where, ()))
    refuse_unknown(named, known, where)
    max_tokens, stop = named.pop("max_tokens", None), named.pop("stop", None)
    ignore_eos, wait = named.pop("ignore_eos", False), named.pop("wait", False)
    drafts, acceptance = named.pop("drafts", True), named.pop("draft_acceptance", "exact")
    most = None
    if max_tokens is not None:
        most = whole_number(max_tokens)
        need(most is not None and most >= 1, "max_tokens is out of range", found=shown(max_tokens),
             needed="an integer >= 1, or None for what is left")  # fmt: skip
    strings = stop_strings(stop)
    ignore_eos, wait, drafts = truth("ignore_eos", ignore_eos), truth("wait", wait), truth("drafts", drafts)
    if named.get("logit_bias") is None:
        named.pop("logit_bias", None)
    if whole_number(named.get("top_logprobs")):
        named.setdefault("logprobs", True)
    need(one_of(acceptance, ("exact", "rejection")), "draft_acceptance is unknown", found=shown(acceptance),
         needed='"exact" or "rejection"')  # fmt: skip
    params = SamplingParams(**named)
    params.validate(vocab)
    return GenerateOptions(params.seeded(), most, strings, ignore_eos, wait, drafts, str(acceptance))


def truth(name: str, value: object) -> bool:
    """The bool that an argument is, numpy's included. BadArgument for everything else."""
    found = truth_value(value)
    need(found is not None, f"{name} is no truth value", found=shown(value), needed="True or False")
    return bool(found)


def token_ids(tokens: Sequence[int] | np.ndarray, vocab: int, what: str = "prompt") -> np.ndarray:
    """(n,) int32 ids. Raises BadArgument for an empty list, another shape or type, and ids outside the vocabulary."""
    raw = isinstance(tokens, bytes | bytearray | memoryview)
    need(not raw, f"the {what} is neither text nor a list of token ids", found=type(tokens).__name__,
         needed="str, or integers (n,)", advice="Decode bytes first.")  # fmt: skip
    try:
        ids = np.asarray(tokens)
    except ValueError as error:  # lists of several lengths
        raise BadArgument(f"the {what} is neither text nor a list of token ids", found=str(error),
                          needed="integers (n,)") from error  # fmt: skip
    need(ids.size > 0, f"the {what} is empty", found="0 tokens", needed="at least 1 token")
    good = ids.ndim == 1 and ids.dtype.kind in "iu"
    need(
        good,
        f"the {what} is neither text nor a list of token ids",
        found=f"{ids.dtype} {ids.shape}",
        needed="integers (n,)",
    )
    bad = np.flatnonzero((ids < 0) | (ids >= vocab))
    if bad.size:
        i = int(bad[0])
        raise BadArgument(
            f"token {i} of the {what} is outside the vocabulary", found=int(ids[i]), needed=f"0..{vocab - 1}"
        )
    return ids.astype(np.int32)
