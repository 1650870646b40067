"""The draft layer on the device: rows wait there, drafts are chosen there, and a chain of them is queued as one.

Streams never come to the host but for a checkpoint. A commit keeps its rows' streams in the session's ring by a node of
its graph. A step takes its input from the ring or from the step before, and leaves the best token with its probability;
so a chain of steps is waited for once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from strata.base.errors import NotFinite, need
from strata.base.program import DraftPrograms, Program
from strata.gpu import draft_rows
from strata.gpu.device import Device
from strata.gpu.draft_rows import CHAIN_BYTES, MOST_STEPS, RECORD
from strata.gpu.head import place
from strata.gpu.head_rows import lane_bytes, runs_of
from strata.gpu.launch import Launch
from strata.gpu.lower import Lowering
from strata.gpu.mailbox import copy_values
from strata.gpu.memory import DRAFT_AREA, Memory
from strata.gpu.prefill_draft import DraftChunks
from strata.gpu.state import DeviceState

RING = "mtp.waiting"
KEEP, STEP = 0, 2
"""Places of the words that the host writes: position and number of rows to keep; token, position and first cell."""


@dataclass(frozen=True)
class Host:
    """What a backend shares with its draft layer: its inbox (bytes, and by name), its outbox, and its own doings.

    lower  program -> its launches; bind  makes a session the one that graphs work on; check  raises for an error word
    """

    inbox: np.ndarray
    fields: Mapping[str, np.ndarray]
    outbox: np.ndarray
    lower: Callable[[Program], Lowering]
    bind: Callable[[DeviceState], None]
    check: Callable[[Lowering, int, int], None]


class GpuDraft:
    """The draft layer of a backend; the interface is that of `strata.cpu.draft.CpuDraft`.

    ids      (rows of the draft head,) int32 tokens, or None where they are the whole vocabulary
    keeping  whether commits keep their rows; off while a prompt's cell is read as windows
    wide     for the cells of a prefill chunk, or None
    """

    def __init__(
        self, programs: DraftPrograms, memory: Memory, device: Device, host: Host, ids: np.ndarray | None = None
    ):
        self.programs, self.memory, self.device, self._host = programs, memory, device, host
        self.keeping = True
        self.wide: DraftChunks | None = None
        buffers = programs.step.buffers
        self._ring_rows, self._values = buffers[RING].shape
        self._V = buffers["mtp.logits"].shape[1]
        need(ids is None or len(ids) == self._V, "tokens of a draft head's rows",
             found=None if ids is None else len(ids), needed=self._V)  # fmt: skip
        self.ids_bytes = 0 if ids is None else ids.nbytes
        self._ids = 0
        if ids is not None:
            self._ids = device.alloc(ids.nbytes)
            device.upload(self._ids, np.ascontiguousarray(ids, np.int32))
        self._words = device.host(64).view(np.int64)
        self._append_error = device.host(8).view(np.uint64)
        self._chain = memory.address("outbox") + DRAFT_AREA
        self._records = host.outbox[DRAFT_AREA:][: MOST_STEPS * RECORD.itemsize].view(RECORD)
        self._made = 0  # steps of the chain so far
        self._unchecked: tuple[Lowering, int] | None = None  # an append whose error word was not looked at
        self._queued = False  # that append may not have ended
        self._graphs: dict[str, tuple[Lowering, Callable[[], None], int]] = {}
        for T, program in programs.appends.items():
            self._capture(f"append T={T}", program, self._append_launches)
        self._capture("step", programs.step, lambda low: self._step_launches(low, False))
        self._capture("further step", programs.step, lambda low: self._step_launches(low, True))

    # ---- graphs

    def _capture(self, name: str, program: Program, launches_of: Callable[[Lowering], list[Launch]]) -> None:
        lowering = self._host.lower(program)
        launches = launches_of(lowering)
        self._graphs[name] = lowering, self.device.graph(launches), len(launches)

    def _word(self, place: int) -> int:
        return self._words.ctypes.data + 8 * place

    def _append_launches(self, low: Lowering) -> list[Launch]:
        """Its error word goes to a place of its own, where no later graph overwrites it."""
        at = self.memory.address
        first, *rest = low.graph_launches(
            self._host.inbox.ctypes.data, (at("outbox"), self._append_error.ctypes.data, 8)
        )
        rows = draft_rows.rows(self.memory.slot(RING), self._ring_rows, at("mtp.pos"), at("mtp.x"), low.T, self._values)
        return [first, *rows, *rest]

    def _step_launches(self, low: Lowering, goes_on: bool) -> list[Launch]:
        """A further step leaves the error word as it is: the first one that failed in a chain counts."""
        at, scratch, V = self.memory.address, self.memory.scratch, self._V
        first, *body, last = low.graph_launches(
            self._host.inbox.ctypes.data, (at("outbox"), self._host.outbox.ctypes.data, DRAFT_AREA + CHAIN_BYTES)
        )
        start = draft_rows.start(self._word(STEP), self.memory.slot(RING), self._ring_rows, at("mtp.streams"),
                                 self._chain, at("mtp.x"), at("mtp.tokens"), at("mtp.pos"), at("mtp.first"),
                                 self._values, goes_on=goes_on)  # fmt: skip
        tops, lanes = scratch(place("tops"), 4 * runs_of(V)), scratch(place("lanes"), lane_bytes(1))
        choice = draft_rows.choice(at("mtp.logits"), tops, lanes, self._chain, self._ids, V)
        return [*([] if goes_on else [first]), *start, *body, *choice, last]

    def keep_launches(self) -> list[Launch]:
        """What the graph of a commit adds."""
        return draft_rows.keep(self._word(KEEP), self.memory.address("streams"), self.memory.slot(RING),
                               self._ring_rows, self._values)  # fmt: skip

    def launch_counts(self) -> dict[str, int]:
        """Nodes of every graph."""
        return {f"draft {name}": n for name, (_, _, n) in self._graphs.items()}

    # ---- rows that wait

    def committed(self, position: int, n: int) -> None:
        """Before a commit is queued: its first n rows, from `position` on, are to be kept."""
        self._words[KEEP], self._words[KEEP + 1] = position, n if self.keeping else 0

    def keep(self, state: DeviceState, first_row: int, n: int, position: int) -> None:
        """Keep n rows of the last window or chunk, from row first_row on; they are the session's from `position` on."""
        streams, ring, row_bytes = self.memory.address("streams"), state.addresses_of[RING], 4 * self._values
        while n:
            at = position % self._ring_rows
            part = min(n, self._ring_rows - at)
            source = streams + first_row * row_bytes
            self.device.run(copy_values(source, ring + at * row_bytes, part * self._values))
            first_row, position, n = first_row + part, position + part, n - part

    def row(self, state: DeviceState, position: int) -> np.ndarray:
        """(C*D,) float32: a copy of a row that waits."""
        out = np.empty(self._values, np.float32)
        self.device.download(state.addresses_of[RING] + 4 * self._values * (position % self._ring_rows), out)
        self._settle()
        return out

    def set_row(self, state: DeviceState, position: int, x: np.ndarray) -> None:
        """Put back what `row` gave."""
        at = state.addresses_of[RING] + 4 * self._values * (position % self._ring_rows)
        self.device.upload(at, np.ascontiguousarray(x, np.float32))

    # ---- work

    def append(self, state: DeviceState, tokens: np.ndarray, position: int) -> None:
        """Store the draft layer's K and V of T <= 8 cells whose rows wait, from `position` on.

        tokens (T,) int32: the tokens after them. It is queued; NotFinite may come with a later call.
        """
        if self._queued:
            self.device.synchronize()
        self._settle()
        self._host.bind(state)
        self._host.fields["mtp.tokens"][: len(tokens)] = tokens
        self._host.fields["mtp.pos"][0] = position
        lowering, launch, _ = self._graphs[f"append T={len(tokens)}"]
        self._unchecked, self._queued = (lowering, position), True
        launch()

    def append_chunk(self, state: DeviceState, first_row: int, tokens: np.ndarray, position: int) -> bool:
        """Store the draft layer's K and V of many cells from `position` on, whose streams the last chunk has left.

        first_row: row of the chunk of the first cell; tokens (n,) int32: the tokens after the cells. False, and nothing
        is done, if this backend reads no chunks.
        """
        if self.wide is None:
            return False
        self._host.bind(state)
        lowering = self.wide.run(first_row, tokens, position)[-1]
        self._host.check(lowering, int(self._host.outbox[:8].view(np.uint64)[0]), position)
        return True

    def steps(
        self, state: DeviceState, token: int | None, position: int, first: int, n: int
    ) -> tuple[list[int], list[float]]:
        """n greedy drafts, each from the one before, and their softmax probabilities over the draft head's rows.

        token: what follows the row that waits at `position`; None: the chain of the last call goes on, whose next cell
        is `position`. Cells from `first` on are attended. At most 8 drafts a chain. Raises NotFinite.
        """
        self._host.bind(state)
        goes_on = token is None
        if not goes_on:
            self._words[STEP], self._words[STEP + 1], self._words[STEP + 2] = token, position, first
            self._made = 0
        need(1 <= n <= MOST_STEPS - self._made, "drafts of one chain", found=n, needed=f"1..{MOST_STEPS - self._made}")
        lowering, launch, _ = self._graphs["step"]
        further = self._graphs["further step"][1]
        for j in range(n):
            (further if j or goes_on else launch)()
        self.device.synchronize()
        self._settle()
        self._host.check(lowering, int(self._host.outbox[:8].view(np.uint64)[0]), position)
        made = self._records[self._made : self._made + n]
        self._made += n
        ids, probabilities = made["id"].tolist(), made["probability"].tolist()
        if min(ids) < 0:
            raise NotFinite("draft logits are not finite", found=f"draft {ids.index(min(ids))} of {n}",
                            needed="finite numbers", advice="The draft layer's file may be damaged.")  # fmt: skip
        return ids, probabilities

    def close(self) -> None:
        """Drop graphs and what shows the backend's pinned memory; the device is closed."""
        self._graphs.clear()
        self.wide = self._host = self._words = self._append_error = self._records = None

    def waited(self) -> None:
        """All that was queued has ended."""
        self._queued = False

    def _settle(self) -> None:
        """Raise what an append reported, once it has ended."""
        self._queued = False
        if self._unchecked is not None:
            (lowering, position), self._unchecked = self._unchecked, None
            self._host.check(lowering, int(self._append_error[0]), position)
