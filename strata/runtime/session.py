"""SessionState: tokens, memory and checkpoints of one conversation, and how tokens are read into it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import zip_longest
from typing import TYPE_CHECKING, Protocol

import numpy as np

from strata.base.errors import BadArgument
from strata.base.geometry import Geometry
from strata.base.state import State
from strata.base.window import HeadRequest, HeadRows
from strata.runtime.checkpoints import Checkpoint, Ledger
from strata.runtime.reading import Piece, checkpoint_marks, common_prefix, pieces
from strata.spec.mtp import DraftSlot, MtpDrafter

if TYPE_CHECKING:
    from strata.runtime.speculation import Speculator

log = logging.getLogger("strata")

AUTOMATIC_CHECKPOINTS = 6


class Backend(Protocol):
    """What a session needs of the machine; see `strata.cpu.backend.CpuBackend`.

    chunk_rows  most rows, in whole cells, that one call of prefill reads
    """

    geometry: Geometry
    chunk_rows: int

    def new_state(self) -> State: ...
    def window(self, state: State, tokens: np.ndarray, previous: tuple[int, int]) -> None: ...
    def prefill(
        self, state: State, tokens: np.ndarray, previous: tuple[int, int], following: np.ndarray | None = None
    ) -> None: ...
    def head(self, first_row: int, T: int, request: HeadRequest) -> HeadRows: ...
    def commit(self, state: State, n_keep: int) -> None: ...


class SessionState:
    """One conversation on a backend. Not thread-safe by itself: the model's turn lock is held around every call, but
    for `read`, which may take it piece by piece.

    context  cells of the session          tokens  int32 tokens whose rows the state holds
    mtp      driver of the draft layer, or None; speculator  who drafts for its windows, or None
    """

    def __init__(
        self,
        backend: Backend,
        context: int,
        checkpoints: int = AUTOMATIC_CHECKPOINTS,
        mtp: MtpDrafter | None = None,
    ):
        self.backend, self.context, self.mtp = backend, context, mtp
        self.speculator: Speculator | None = None
        self.state = backend.new_state()
        self.ledger = Ledger(self.state, checkpoints)
        self._tokens = np.zeros(context, np.int32)
        if mtp is not None:
            mtp.follow(self.state, self._tokens)

    @property
    def rows(self) -> int:
        return self.state.rows

    @property
    def tokens(self) -> np.ndarray:
        """(rows,) int32 view of the tokens read so far."""
        return self._tokens[: self.state.rows]

    def text(self, pending: int) -> np.ndarray:
        """(rows + 1,) int32 view of the tokens read so far and the one that is read next; good until that is done."""
        n = self.state.rows
        self._tokens[n] = pending
        return self._tokens[: n + 1]

    @property
    def previous(self) -> tuple[int, int]:
        """The last two tokens, -1 where there is none: what the n-gram hash of the next row looks back on."""
        n = self.state.rows
        return (int(self._tokens[n - 1]) if n > 0 else -1, int(self._tokens[n - 2]) if n > 1 else -1)

    # ---- windows

    def window(self, tokens: np.ndarray) -> None:
        """Run rows behind the current position; nothing is committed."""
        self.ledger.wrote(self.state.rows)
        self.backend.window(self.state, tokens, self.previous)

    def commit(self, tokens: np.ndarray, n_keep: int, eager: bool = False) -> None:
        """Keep the first n_keep rows of the window just run with `tokens`; eager: the drafter follows at once."""
        at = self.state.rows
        self._tokens[at : at + n_keep] = tokens[:n_keep]
        try:
            self.backend.commit(self.state, n_keep)
        except BaseException:  # an interrupt in the middle: nobody knows which layers have advanced
            self.clear()
            raise
        if eager and self.mtp is not None:  # the backend has kept the streams of the rows
            self.mtp.catch_up(self.state)

    def prefill(self, tokens: np.ndarray, following: np.ndarray | None = None) -> None:
        """Read a chunk of whole cells; following: the chunk that will be read after it, if that is known."""
        at = self.state.rows
        self.ledger.wrote(at)
        previous = self.previous
        self._tokens[at : at + len(tokens)] = tokens
        self.backend.prefill(self.state, tokens, previous, following)
        if self.mtp is not None:
            self.mtp.chunk_kept(self.state, tokens)

    def read(
        self,
        tokens: np.ndarray,
        *,
        turn_starts: Sequence[int] = (),
        windows_only: bool = False,
        after: Callable[[Piece], None] | None = None,
        behind: Callable[[Piece], None] | None = None,
        check: Callable[[], None] | None = None,
        turn: Callable[[], AbstractContextManager] = nullcontext,
    ) -> None:
        """Read tokens[rows:] so that the state holds all of `tokens`; tokens[:rows] must be what it holds now.

        after  called after each piece, when its rows' streams are still in the backend (for logits)
        behind called when a piece is kept and the backend is free again: it may use other sessions
        check  called before each piece; it may raise to cancel, and what was read until then stays
        turn   holds the backend for a piece; between two of them it is free for other sessions
        """
        rows, chunk_rows = self.state.rows, self.backend.chunk_rows
        marks = checkpoint_marks(rows, len(tokens), turn_starts, chunk_rows)
        cut = list(pieces(rows, len(tokens), marks, windows_only, chunk_rows))
        for piece, following in zip_longest(cut, cut[1:]):
            if check is not None:
                check()
            part = tokens[piece.start : piece.start + piece.n]
            with turn():
                if piece.cell:
                    goes_on = following is not None and following.cell
                    self.prefill(part, tokens[following.start : following.start + following.n] if goes_on else None)
                else:
                    self.window(part)
                if after is not None:
                    after(piece)
                if not piece.cell:
                    self.commit(part, piece.n, eager=True)
                if self.state.rows in marks:
                    self.ledger.take(self.tokens, self._drafter_slot())
            if behind is not None:
                behind(piece)

    # ---- reuse

    def clear(self) -> None:
        """Forget the conversation; checkpoints stay until their cells are written again."""
        self.state.clear()
        if self.mtp is not None:
            self.mtp.clear()

    def hold(self, tokens: np.ndarray) -> None:
        """Note the tokens of a conversation whose memory was written from outside."""
        self._tokens[: len(tokens)] = tokens
        self.state.rows = len(tokens)

    def _drafter_slot(self) -> DraftSlot | None:
        return None if self.mtp is None else self.mtp.snapshot(self.state)

    def renew(self) -> None:
        """Clear for another owner: no checkpoint that the last one took can be restored any more."""
        self.clear()
        self.ledger.disown()

    def rewind(self, prompt: np.ndarray) -> int:
        """Go to the longest state that is a prefix of the prompt and leaves at least its last token to read.

        Returns the rows reused. Logs why the match ended where it did.
        """
        limit = len(prompt) - 1
        held = self.tokens
        common = common_prefix(held, prompt)
        if common == len(held) and common <= limit:
            return common
        found = self.ledger.longest(prompt, limit)
        if common < len(held) and common < len(prompt):
            why = f"position {common}: held token {held[common]}, prompt token {prompt[common]}"
        else:
            why = f"the prompt ends at {len(prompt)} and its last token must be read"
        if found is None:
            if len(held):
                log.info("prefix reuse ended at %s; no checkpoint, reading from the start", why)
            self.clear()
            return 0
        log.info("prefix reuse ended at %s; going back to the checkpoint at %d", why, found.rows)
        self._restore(found)
        return found.rows

    def checkpoint(self) -> Checkpoint:
        """A checkpoint of the current position that the caller owns."""
        return self.ledger.give(self.tokens, self._drafter_slot())

    def restore(self, checkpoint: Checkpoint) -> None:
        """Back to a checkpoint of this session; BadArgument if it is not its own or its cells were overwritten."""
        if not self.ledger.owns(checkpoint):
            raise BadArgument("this checkpoint belongs to another session", found=f"one at {checkpoint.rows} tokens",
                              needed="one of this session", advice="Restore it where it was taken.")  # fmt: skip
        if not checkpoint.alive:
            raise BadArgument(
                f"the checkpoint at {checkpoint.rows} tokens is dead",
                found="cells before its end were written again",
                needed="one whose cells are as they were",
                advice="Read its tokens again, or take checkpoints before going back.",
            )
        self._restore(checkpoint)

    def _restore(self, checkpoint: Checkpoint) -> None:
        rows, state, tokens = checkpoint.rows, self.state, self._tokens
        # Nothing is called from here on, so an interrupt comes before or after all of it.
        state.recurrent[:] = checkpoint.recurrent
        tokens[:rows] = checkpoint.tokens
        state.rows = rows
        if self.mtp is not None:
            self.mtp.restore(state, checkpoint.drafter)
