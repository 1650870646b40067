"""HeadRows of a window from the logits on the device: they are summarised there, and small results come back."""

from __future__ import annotations

import numpy as np

from strata.base.errors import NotFinite, need
from strata.base.geometry import WINDOW_ROWS
from strata.base.window import CANDIDATES, SUMMARY_TOP, HeadRequest, HeadRows
from strata.gpu import head_rows
from strata.gpu.device import Device
from strata.gpu.launch import Launch
from strata.gpu.mailbox import outbox
from strata.gpu.memory import HEAD_AREA, Memory

NO_TOKENS = np.empty(0, np.int32)
SCRATCH = ("tops", "lanes", "modified", "counts", "history", "rows", "bias ids", "bias")


def place(name: str) -> str:
    """Name of a head's scratch in `Memory`."""
    return f"head.{name}"


class Head:
    """Summaries of up to 8 rows of V logits. `host_out` is the host's copy of the outbox.

    An area of the outbox holds ids (8, 64) int32, values (8, 64) float32, sums (8,) float64, status (8,) int32: one of
    the logits as they are, one after penalties and bias.
    """

    @staticmethod
    def measure(memory: Memory, V: int, context: int) -> None:
        """Scratch that summaries need."""
        rows = WINDOW_ROWS * V
        sizes = {
            "tops": 4 * WINDOW_ROWS * head_rows.runs_of(V),
            "lanes": head_rows.lane_bytes(WINDOW_ROWS),
            "modified": 4 * rows,
            "counts": 4 * rows,
            "history": 4 * context,
            "rows": 4 * WINDOW_ROWS,
            "bias ids": 4 * V,
            "bias": 8 * V,
        }
        for name in SCRATCH:
            memory.scratch(place(name), sizes[name])

    def __init__(self, memory: Memory, device: Device, V: int, context: int, host_out: np.ndarray):
        self.memory, self.device, self.V, self.context, self._host_out = memory, device, V, context, host_out
        self._logits = memory.address("logits")
        self._at = {name: memory.scratch(place(name), 0) for name in SCRATCH}
        self._full = np.empty((WINDOW_ROWS, V), np.float32)

    @property
    def host_bytes(self) -> int:
        """Of full logits on the host."""
        return self._full.nbytes

    # ---- places

    def _area(self, modified: bool) -> tuple[int, int, int, int]:
        """Device addresses of ids, values, sums, status."""
        at = self.memory.address("outbox") + (HEAD_AREA[1] if modified else HEAD_AREA[0])
        return at, at + 2048, at + 4096, at + 4160

    def _results(self, modified: bool, T: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """The host's copies of ids, values, sums, status of T rows."""
        at = HEAD_AREA[1] if modified else HEAD_AREA[0]
        area = self._host_out[at : at + 4192]
        ids = area[:2048].view(np.int32).reshape(WINDOW_ROWS, CANDIDATES)
        values = area[2048:4096].view(np.float32).reshape(WINDOW_ROWS, CANDIDATES)
        return ids[:T], values[:T], area[4096:4160].view(np.float64)[:T], area[4160:].view(np.int32)[:T]

    def _top(self, modified: bool, T: int, n: int) -> list[Launch]:
        ids, values, _, status = self._area(modified)
        logits = self._at["modified"] if modified else self._logits
        return head_rows.top(logits, self._at["tops"], ids, values, status, T, self.V, n, bans=modified)

    def _sums(self, modified: bool, T: int) -> list[Launch]:
        _, values, sums, _ = self._area(modified)
        logits = self._at["modified"] if modified else self._logits
        return head_rows.log_sum_exp(logits, values, self._at["lanes"], sums, T, self.V)

    def argmax_launches(self, T: int) -> list[Launch]:
        """What the graph of a head adds behind the logits: the largest of every row."""
        return self._top(False, T, 1)

    # ---- summaries

    def summarise(self, T: int, request: HeadRequest) -> HeadRows:
        """HeadRows of the T rows whose logits and argmax the head's graph has just left.

        Raises NotFinite for NaN or infinite logits (naming row and id), BadArgument for unknown tokens.
        """
        ids, _, _, status = self._results(False, T)
        for j in range(T):
            if status[j] >= 0:
                self._refuse(j, int(status[j]))
        out = HeadRows(ids[:, 0].copy())
        modified, with_sums = request.modified, request.summary or request.full
        launches: list[Launch] = []
        n = 0
        if not request.greedy or request.summary or modified:
            need(
                self.V >= CANDIDATES,
                "the vocabulary is smaller than the list of candidates",
                found=self.V,
                needed=CANDIDATES,
            )
        if (request.summary or not modified) and not (request.greedy and not request.summary):
            n = SUMMARY_TOP if request.greedy or modified else CANDIDATES
            launches += self._top(False, T, n) + (self._sums(False, T) if with_sums else [])
        if modified:
            launches += self._modify(T, request) + self._top(True, T, CANDIDATES)
            launches += self._sums(True, T) if with_sums else []
        if launches:
            self.device.run(
                [*launches, *outbox(self.memory.address("outbox"), self._host_out.ctypes.data, len(self._host_out))]
            )
            self.device.synchronize()
        if n:
            ids, values, sums, _ = (a.copy() for a in self._results(False, T))
            if request.summary:
                out.logsumexp, out.top_ids, out.top_logits = sums, ids[:, :SUMMARY_TOP], values[:, :SUMMARY_TOP]
            if n == CANDIDATES:
                out.mod_ids, out.mod_logits, out.mod_logsumexp = ids, values, sums if with_sums else None
        if modified:
            ids, values, sums, status = (a.copy() for a in self._results(True, T))
            for j in range(T):
                if status[j] >= 0 or values[j, 0] == -np.inf:
                    raise NotFinite(
                        f"after penalties and bias row {j} of the window has an infinite logit or no token left",
                        found=f"{values[j, 0]} as the largest of them",
                        needed="finite logits",
                        advice="Use milder penalties or biases.",
                    )
            out.mod_ids, out.mod_logits, out.mod_logsumexp = ids, values, sums if with_sums else None
        if request.full:
            self.device.download(self._logits, self._full[:T])
            out.full = self._full[:T]
        return out

    def _refuse(self, j: int, token: int) -> None:
        value = np.empty(1, np.float32)
        self.device.download(self._logits + 4 * (j * self.V + token), value)
        raise NotFinite(f"row {j} of the window has logits that are not finite", found=f"{value[0]} at id {token}",
                        needed="finite numbers", advice="The weights or the file may be damaged.")  # fmt: skip

    def _known(self, tokens: np.ndarray) -> None:
        bad = tokens[(tokens < 0) | (tokens >= self.V)]
        need(bad.size == 0, "a penalised or biased token is not in the vocabulary",
             found=int(bad[0]) if bad.size else None, needed=f"0..{self.V - 1}")  # fmt: skip

    def _modify(self, T: int, request: HeadRequest) -> list[Launch]:
        n_history, at = -1, self._at
        if (request.repetition, request.presence, request.frequency) != (1.0, 0.0, 0.0):
            history = NO_TOKENS if request.history is None else np.ascontiguousarray(request.history, np.int32)
            rows = NO_TOKENS if request.rows is None else np.ascontiguousarray(request.rows, np.int32)
            need(
                rows.size == T, "penalties need the window's tokens", found=f"{rows.size} tokens", needed=f"{T} tokens"
            )
            need(
                history.size <= self.context, "tokens that count for penalties", found=history.size, needed=self.context
            )
            self._known(history)
            self._known(rows)
            n_history = history.size
            self.device.upload(at["history"], history)
            self.device.upload(at["rows"], rows)
        ids = np.array(list(request.bias), np.int64)
        self._known(ids)
        if ids.size:
            self.device.upload(at["bias ids"], ids.astype(np.int32))
            self.device.upload(at["bias"], np.array(list(request.bias.values()), np.float64))
        return head_rows.modify(self._logits, at["modified"], at["counts"], at["history"], n_history, at["rows"],
                                request.last_n, float(request.repetition), float(request.presence),
                                float(request.frequency), at["bias ids"], at["bias"], ids.size, T, self.V)  # fmt: skip
