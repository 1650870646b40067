"""Options that several verbs share, and how they become keyword arguments of the library.

A flag that is not given is not handed on, so every default is the library's own.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from strata.base.errors import BadArgument, need
from strata.base.numbers import shown
from strata.cli.locate import find_model
from strata.cli.output import LoadLines, progress_text, quiet_interrupt, working

if TYPE_CHECKING:
    from strata.model import Model as LoadedModel

Option = typer.Option

Json = Annotated[bool, Option("--json", help="Print one JSON record instead.")]

# ---- loading


def path_of(text: str) -> Path:
    """A path of the command line. An empty one, as of a variable that is not set, would mean the current folder."""
    if not text:
        raise typer.BadParameter("the path is empty")
    return Path(text)


_MODEL_HELP = "GGUF file or its folder; default: STRATA_MODEL, or the bundled model of a checkout."
Model = Annotated[Path | None, Option("--model", "-m", parser=path_of, metavar="PATH", help=_MODEL_HELP)]
ModelFile = Annotated[
    Path | None, typer.Argument(parser=path_of, metavar="FILE", help=_MODEL_HELP, show_default=False)
]
GgufFile = Annotated[
    Path,
    typer.Argument(parser=path_of, metavar="FILE", help="A GGUF file or its folder.", show_default=False),
]
Context = Annotated[int | None, Option(help="Cells for prompt and answer; default: the trained context, or what fits.")]
Threads = Annotated[int | None, Option(help="CPU threads; default: one per physical core.")]
Pin = Annotated[bool, Option("--pin", help="Bind workers to cores.")]
Kv = Annotated[str, Option(help="auto, f16 or int8.")]
Prefill = Annotated[str, Option(help="auto: chunks of 256 rows, more on a GPU; windows: 8 rows at a time.")]

Device = Annotated[
    str | None, Option(help="auto (the first GPU, if it can be used and holds the model), cpu, cuda or cuda:N.")
]
VramGib = Annotated[float | None, Option(help="Most to take of the GPU's memory, GiB; default: what is free.")]

Slots = Annotated[str | None, Option(help="Experts that the GPU holds: a number, or all; default: what fits.")]
Experts = Annotated[str | None, Option(help="Where RAM holds the others: auto, mapped, pinned or resident.")]
PcieShare = Annotated[
    float | None, Option(help="Share of missing experts that the GPU reads over PCIe, 0 to 1; default: by cost.")
]
_PROFILE_HELP = "Expert profile: which experts the GPU holds first."
Profile = Annotated[Path | None, Option(parser=path_of, metavar="PATH", help=_PROFILE_HELP)]

Draft = Annotated[str | None, Option(help="off, auto, lookup, or a draft layer's file or folder.")]
Ngram = Annotated[str | None, Option(help="How rows of the n-gram table are read: auto, mapped or direct.")]

Group = Mapping[str, tuple[Any, Any]]
"""Options that belong together: name -> (annotation, default)."""

Options = Mapping[str, Any]
"""Values of a group's options, as a command gets them."""

LOAD: Group = {
    "context": (Context, None),
    "threads": (Threads, None),
    "pin": (Pin, False),
    "kv": (Kv, "auto"),
    "prefill": (Prefill, "auto"),
    "device": (Device, None),
    "vram_gib": (VramGib, None),
    "slots": (Slots, None),
    "experts": (Experts, None),
    "pcie_share": (PcieShare, None),
    "profile": (Profile, None),
    "ngram": (Ngram, None),
}
"""Of `strata.load`, where the command does not choose."""

LOAD_AND_DRAFT: Group = LOAD | {"draft": (Draft, None)}

# ---- answering

MaxTokens = Annotated[int | None, Option("--max-tokens", "-n", help="Longest answer; default: what is left.")]
Temperature = Annotated[float | None, Option("--temperature", "-t", help="0: greedy, the default.")]
TopK = Annotated[int | None, Option(help="Keep the k most likely tokens.")]
TopP = Annotated[float | None, Option(help="Keep the most likely tokens that reach this mass.")]
MinP = Annotated[float | None, Option(help="Keep tokens at least this many times as likely as the best.")]
RepetitionPenalty = Annotated[float | None, Option(help="Divides positive logits of tokens seen; 1 is off.")]
PresencePenalty = Annotated[float | None, Option(help="Subtracted from the logits of tokens seen.")]
FrequencyPenalty = Annotated[float | None, Option(help="Subtracted once per occurrence.")]
PenaltyLastN = Annotated[int | None, Option(help="Latest tokens that count as seen.")]
LogitBias = Annotated[
    list[str] | None, Option(metavar="ID=BIAS", help="Add to a token's logit; -inf bans it. Repeatable.")
]
Seed = Annotated[int | None, Option(help="Repeats a sampled answer.")]
Stop = Annotated[list[str] | None, Option(help="End the answer before this text. Repeatable.")]
DraftAcceptance = Annotated[str | None, Option(help="Of sampled drafts: exact or rejection.")]
IgnoreEos = Annotated[bool, Option("--ignore-eos", help="Go on after stop tokens.")]

ANSWER: Group = {
    "max_tokens": (MaxTokens, None),
    "temperature": (Temperature, None),
    "top_k": (TopK, None),
    "top_p": (TopP, None),
    "min_p": (MinP, None),
    "repetition_penalty": (RepetitionPenalty, None),
    "presence_penalty": (PresencePenalty, None),
    "frequency_penalty": (FrequencyPenalty, None),
    "penalty_last_n": (PenaltyLastN, None),
    "logit_bias": (LogitBias, None),
    "seed": (Seed, None),
    "stop": (Stop, None),
    "draft_acceptance": (DraftAcceptance, None),
}
"""Of `generate` and `chat`."""


def takes(**groups: Group) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator of a command: its parameter of a group's name becomes the group's options, and gets their values as one
    dict."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        shown: list[inspect.Parameter] = []
        for own in inspect.signature(command, eval_str=True).parameters.values():
            options = groups.get(own.name, {own.name: (own.annotation, own.default)})
            shown += [own.replace(name=n, annotation=kind, default=value) for n, (kind, value) in options.items()]

        @functools.wraps(command)
        def run(**given: Any) -> None:
            grouped = {group: {name: given.pop(name) for name in names} for group, names in groups.items()}
            command(**given, **grouped)

        run.__signature__ = inspect.Signature(shown)  # what Typer reads, and the hints
        run.__annotations__ = {one.name: one.annotation for one in shown}
        del run.__wrapped__
        return run

    return decorate


def refuse_idle(context: typer.Context, names: Iterable[str], where: str) -> None:
    """BadArgument for the first of these parameters of a command whose option was given, though it does nothing there.

    where  as "with --check"
    """
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name)
        if parameter.name in names and source is not None and source.name not in ("DEFAULT", "DEFAULT_MAP"):
            raise BadArgument(f"{parameter.opts[0]} does nothing {where}", found=parameter.opts[0],
                              needed="a command without it")  # fmt: skip


OF_SAMPLING = ("top_k", "top_p", "min_p", "seed", "draft_acceptance")
"""Options that choose among the likely tokens: the most likely one needs none of them."""

PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")


def refuse_idle_answers(context: typer.Context, answer: Options, draft: str | None) -> None:
    """`refuse_idle` for options of an answer without those that they go with. Beside --temperature 0, a penalty that is
    none or --draft off they are accepted: a program that always gives all of them has said what it means."""
    if answer["temperature"] is None:
        refuse_idle(context, OF_SAMPLING, "without a --temperature above 0")
    if draft is None:
        refuse_idle(context, ("draft_acceptance",), "without --draft")
    if all(answer[name] is None for name in PENALTIES):
        refuse_idle(context, ("penalty_last_n",), "without a penalty")


def slots(text: str | None) -> int | str | None:
    """The value of --slots for a load. BadArgument if it is neither a number nor "all"."""
    if text is None or text == "all":
        return text
    need(is_count(text), "--slots cannot be read", found=shown(text), needed="a number, or all")
    return int(text)


def is_count(text: str) -> bool:
    """Whether a text is a whole number in plain digits, not longer than any option's."""
    return text.isascii() and text.isdigit() and len(text) <= 18


@contextlib.contextmanager
def loaded(given: Path | None, **options: Any) -> Iterator[LoadedModel]:
    """The model of a command, loaded with those options that are not None and closed at the end. slots: a text."""
    options["slots"] = slots(options.get("slots"))
    idle = options.get("device") == "cpu" and options.get("profile") is not None
    need(not idle, "--profile does nothing with --device cpu", found="--profile", needed="a command without it")
    path = find_model(given)
    with working(f"loading {path.name}") as status, quiet_interrupt():
        # Here, because it takes a second: wrong usage is told at once.
        from strata.model import load

        lines = LoadLines(f"loading {path.name}")
        told = lines.update if status is None else lambda p: status(f"loading {path.name}: {progress_text(p)}")
        model = load(path, on_progress=told, **{name: value for name, value in options.items() if value is not None})
    with model:
        yield model


def answer_options(*, logit_bias: Sequence[str] | None = None, **flags: Any) -> dict[str, Any]:
    """Keyword arguments of generate and chat: the flags that were given. Raises BadArgument for a bad value, before a
    model is loaded."""
    from strata.options import generate_options

    given = {name: value for name, value in flags.items() if not (value is None or value is False or value == [])}
    if logit_bias:
        given["logit_bias"] = biases(logit_bias)
    generate_options(given, vocab=1 << 31)
    return given


def biases(items: Sequence[str]) -> Mapping[int, float]:
    """ID=BIAS texts as token id -> bias."""
    found: dict[int, float] = {}
    for item in items:
        text, _, bias = item.partition("=")
        try:
            token, value = int(text), float(bias)
        except ValueError:
            raise BadArgument("a logit bias cannot be read", found=repr(item), needed="ID=BIAS, as 42=-1.5") from None
        need(token not in found, "a token has two logit biases", found=f"{found.get(token)} and {item!r}",
             needed="one for each token")  # fmt: skip
        found[token] = value
    return found
