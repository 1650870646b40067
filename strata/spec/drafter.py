"""Drafts and who makes them: the record, the protocol of a user's own drafter, and the guard around one."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol, runtime_checkable

import numpy as np

from strata.base.errors import BadArgument, StrataError, need

log = logging.getLogger("strata")

SOURCES = ("mtp", "lookup", "chain", "user")
"""mtp: the model's own draft layer. lookup: earlier text. chain: earlier text after the drafts of a drafter. user: a
drafter given by the caller."""


@dataclass(frozen=True)
class Draft:
    """Tokens proposed for a window, in order.

    tokens         drafted token ids
    probabilities  the drafter's own probability of each token in [0, 1], or None
    source         one of SOURCES
    match_length   lookup and chain: tokens that matched before the drafts
    start          drafts of other sources before this one in the window
    distributions  what each token was drawn from, (ids, probabilities) each; None: not drawn, a point mass
    """

    tokens: tuple[int, ...]
    probabilities: tuple[float, ...] | None = None
    source: str = "user"
    match_length: int = 0
    start: int = 0
    distributions: tuple[tuple[np.ndarray, np.ndarray] | None, ...] | None = None

    def agreement(self, committed: Sequence[int]) -> tuple[int, bool]:
        """(tokens that came out as drafted, whether the next one came out otherwise).

        committed  the tokens of the window this draft was made for. Also meaningful for drafts that were not verified:
                   nothing is compared behind the committed tokens. The caller sees to it that the `start` drafts
                   before this one came out as drafted.
        """
        agreed = 0
        for drafted, token in zip(self.tokens, committed[self.start :], strict=False):
            if drafted != token:
                return agreed, True
            agreed += 1
        return agreed, False


NO_DRAFT = Draft(())


@runtime_checkable
class Drafter(Protocol):
    """What a user's own drafter offers.

    `propose(tokens, k)` returns at most k token ids that may follow `tokens`, or a tuple (ids, probabilities) with the
    drafter's own probability of each. Fewer or none are fine. It is called once per round at most, before the window.

    tokens  (n,) int32, read-only: prompt and accepted tokens, the latest last
    k       1..7

    Proposals cannot change the text, only the speed: every one is verified by the model.
    """

    def propose(
        self, tokens: np.ndarray, k: int
    ) -> Sequence[int] | tuple[Sequence[int], Sequence[float]]:  # pragma: no cover
        ...


class DrafterGuard:
    """Calls a user's drafter and checks what it returns; a drafter that misbehaves is switched off, with one warning.

    drafter  object with the method of `Drafter`
    vocab    size of the vocabulary: ids are 0..vocab - 1
    disabled why it was switched off, or None
    """

    def __init__(self, drafter: Drafter, vocab: int):
        usable = isinstance(drafter, Drafter) and not isinstance(drafter, type)
        need(usable, "a drafter needs a method propose(tokens, k)", found=type(drafter).__name__,
             needed="an object that has it", advice="See docs/drafting.md.")  # fmt: skip
        self.drafter, self.vocab = drafter, vocab
        self.disabled: str | None = None

    def propose(self, tokens: np.ndarray, k: int) -> Draft:
        """The drafter's proposal as a Draft of source "user"; an empty one when it is switched off."""
        if self.disabled is not None or k <= 0:
            return NO_DRAFT
        tokens = np.ascontiguousarray(tokens, np.int32).view()
        tokens.flags.writeable = False
        try:
            return self._checked(self.drafter.propose(tokens, k), k)
        except StrataError as wrong:
            self.disabled = str(wrong)
        except Exception as failure:
            self.disabled = f"propose raised {type(failure).__name__}: {failure}"
        log.warning("the drafter %s is switched off: %s", type(self.drafter).__name__, self.disabled)
        return NO_DRAFT

    def _checked(self, answer: object, k: int) -> Draft:
        probabilities = None
        if isinstance(answer, tuple) and len(answer) == 2 and hasattr(answer[0], "__len__"):
            answer, probabilities = answer
        ids = list(islice(answer, k + 1))
        for token in ids:
            good = isinstance(token, int | np.integer) and not isinstance(token, bool) and 0 <= token < self.vocab
            if not good:
                raise BadArgument("a proposed token is not in the vocabulary", found=repr(token),
                                  needed=f"an integer from 0 to {self.vocab - 1}")  # fmt: skip
        need(len(ids) <= k, "it proposed more tokens than asked for", found=f"over {k}", needed=f"at most {k}")
        if probabilities is None:
            return Draft(tuple(map(int, ids)))
        values = [float(p) for p in probabilities]
        need(len(values) == len(ids), "it gave another number of probabilities than of tokens",
             found=f"{len(ids)} tokens, {len(values)} probabilities", needed="one for each")  # fmt: skip
        wrong = [p for p in values if not (math.isfinite(p) and 0 <= p <= 1)]
        need(not wrong, "a probability is out of range", found=wrong[:1], needed="0 to 1")
        return Draft(tuple(map(int, ids)), tuple(values))
