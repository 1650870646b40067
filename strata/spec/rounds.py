"""What the draft policy is asked, what it answers, and what it is told afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from strata.base.geometry import WINDOW_ROWS
from strata.spec.drafter import Draft

MAX_DRAFTS = WINDOW_ROWS - 1


class RoundFacts(NamedTuple):
    """What can be drafted this round.

    room           most drafts the window may hold (context and tokens left), 0..7
    drafter        whether a drafter can be asked: the model's draft layer, or a user's
    stepwise       it makes one draft a call (draft layer); False: one call makes all (user's)
    lookup_tokens  tokens that suffix lookup proposes, with the length of their match
    """

    room: int = MAX_DRAFTS
    drafter: bool = False
    stepwise: bool = True
    lookup_tokens: int = 0
    match_length: int = 0


class Choice(NamedTuple):
    """What the window holds: n_drafts of the drafter, then n_lookup looked-up tokens; reason for records and logs.

    From `choose`, n_drafts > 0 is the most that may be made; `settle` says how many of those made are verified.
    planned: from `choose`, how many of n_drafts are likely to be made; None: all.
    """

    n_drafts: int
    n_lookup: int
    reason: str
    planned: int | None = None


class Outcome(NamedTuple):
    """What a round brought.

    rows       T of the window
    ms         milliseconds of verification and commit, without drafting
    draft_ms   milliseconds of the drafter's calls, 0 if there were none
    committed  the tokens that the window committed
    drafts     every Draft made this round, verified or not (a lookup's proposal costs nothing to judge). Sources
               "mtp" and "user" are the drafter's; "lookup" starts at 0; "chain" starts after the drafter's drafts.
               A drafter that was asked and had nothing is an empty Draft
    other_ms   milliseconds that tell nothing about windows of this size or about one draft: asking the policy itself,
               a drafter that catches up after a pause. They count as time spent
    """

    rows: int
    ms: float
    draft_ms: float
    committed: Sequence[int]
    drafts: Sequence[Draft] = ()
    other_ms: float = 0.0
