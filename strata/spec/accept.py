"""Acceptance: which drafts of a verified window stay, and the token that follows them.

A window of T rows holds the last token and T - 1 drafts; row t gives the distribution of the token after it. Every rule
returns the accepted drafts and one more token, so a window commits at least one token:

greedy     a draft stays if it is the row's argmax: bit for bit what one-token decoding gives
exact      a draft stays if it equals the row's own draw: what one-token decoding draws with the same seed
rejection  a draft stays with probability min(1, p / q): the target's distribution, but other tokens for a seed
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from strata.base.errors import BadArgument, need

MODES = ("greedy", "exact", "rejection")

Distribution = tuple[np.ndarray, np.ndarray]
"""ids (n,) int32 and probabilities (n,) float64 that sum to 1."""


def accept_greedy(drafts: Sequence[int], argmax: Sequence[int] | np.ndarray) -> list[int]:
    """Tokens that a window commits when the most likely token is always taken.

    drafts  (T - 1) drafted tokens, row t + 1 of the window being drafts[t]
    argmax  (T,) most likely token after each row, after penalties and bias
    """
    need(len(argmax) == len(drafts) + 1, "drafts and rows do not belong together",
         found=f"{len(drafts)} drafts, {len(argmax)} rows", needed="one row more than drafts")  # fmt: skip
    return accept_exact(drafts, argmax.__getitem__)


def accept_exact(drafts: Sequence[int], draw: Callable[[int], int]) -> list[int]:
    """Tokens that a window commits when a draft is accepted only if it equals the target's own draw.

    drafts  the window's drafted tokens, row t + 1 of the window being drafts[t]
    draw    t -> the token drawn after row t; called for t = 0, 1, ... until the first that is no accepted draft
    The result is the accepted drafts and one more token: exactly what one-token decoding draws.
    """
    tokens = []
    for t, draft in enumerate(drafts):
        tokens.append(int(draw(t)))
        if tokens[-1] != draft:
            return tokens
    tokens.append(int(draw(len(drafts))))
    return tokens


def accept_rejection(p_ids: np.ndarray, p_probs: np.ndarray, draft: int, q_ids: np.ndarray | None,
                     q_probs: np.ndarray | None, u_accept: float, u_residual: float) -> tuple[bool, int]:  # fmt: skip
    """Rejection rule for one draft: (accepted, token). The token has exactly the distribution p.

    p_ids, p_probs  target distribution after the chain (`row_distribution`)
    q_ids, q_probs  distribution the draft was drawn from; None = the drafter proposes this token for sure
    u_accept        uniform of stream ACCEPT: accept if u q(d) < p(d)
    u_residual      uniform of stream RESIDUAL: after a rejection draw from max(0, p - q); if that is empty, accept
    """
    at = np.flatnonzero(p_ids == draft)
    p_draft = float(p_probs[at[0]]) if at.size else 0.0
    if q_ids is None:
        q_draft, rest = 1.0, np.where(p_ids == draft, 0.0, p_probs)
    else:
        place = np.flatnonzero(q_ids == draft)
        q_draft = float(q_probs[place[0]]) if place.size else 0.0
        need(q_draft > 0, "the draft cannot come from its own distribution", found=f"q({draft}) = {q_draft}",
             needed="q(draft) > 0")  # fmt: skip
        order = np.argsort(q_ids)
        nearest = order[np.minimum(np.searchsorted(q_ids[order], p_ids), order.size - 1)]
        rest = np.maximum(p_probs - np.where(q_ids[nearest] == p_ids, q_probs[nearest], 0.0), 0.0)
    if u_accept * q_draft < p_draft:
        return True, int(draft)
    edges = np.cumsum(rest)
    if edges[-1] <= 0:
        return True, int(draft)
    place = int(np.searchsorted(edges, u_residual * edges[-1], side="right"))
    return False, int(p_ids[min(place, int(np.flatnonzero(rest)[-1]))])


def accept_window(
    mode: str,
    drafts: Sequence[int],
    draw: Callable[[int], int],
    distribution: Callable[[int], Distribution] | None = None,
    uniforms: Callable[[int], tuple[float, float]] | None = None,
    proposals: Sequence[Distribution | None] | None = None,
) -> list[int]:
    """Tokens that a verified window commits: the accepted drafts and one more.

    mode          "greedy", "exact" or "rejection"
    drafts        (T - 1) drafted tokens
    draw          t -> the token that one-token decoding takes after row t (argmax, or the draw of stream PICK)
    distribution  t -> distribution of the token after row t, after the sampling chain; rejection mode only
    uniforms      t -> (u_accept, u_residual) of row t's position, in [0, 1); rejection mode only
    proposals     the distribution that each draft was drawn from, None for a draft that was not drawn (lookup, the
                  drafter's most likely token); None: no draft was drawn; rejection mode only
    Rows are asked in ascending order, and none behind the first rejected draft. The last token of a window whose
    drafts are all accepted is `draw(T - 1)`.
    """
    if mode not in MODES:
        raise BadArgument("unknown acceptance mode", found=repr(mode), needed=", ".join(MODES))
    if mode != "rejection":
        return accept_exact(drafts, draw)
    need(distribution is not None and uniforms is not None, "rejection sampling needs more than draws",
         found="draws alone", needed="distribution and uniforms")  # fmt: skip
    need(proposals is None or len(proposals) == len(drafts), "drafts and proposals do not belong together",
         found=f"{len(drafts)} drafts, {len(proposals or ())} proposals", needed="one each")  # fmt: skip
    tokens = []
    for t, draft in enumerate(drafts):
        p_ids, p_probs = distribution(t)
        q_ids, q_probs = (proposals[t] if proposals is not None else None) or (None, None)
        accepted, token = accept_rejection(p_ids, p_probs, draft, q_ids, q_probs, *uniforms(t))
        tokens.append(token)
        if not accepted:
            return tokens
    tokens.append(int(draw(len(drafts))))
    return tokens
