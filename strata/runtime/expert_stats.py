"""Counters of windows whose experts are shared between GPU, link and CPU: who computed what, and who was waited for."""

from __future__ import annotations

from typing import Any

import numpy as np

from strata.base.compiled import c_function
from strata.cpu.machine_code import f64_view, i64_view
from strata.gpu import doorbell as bells

SUMMED = ("rows", "cpu_entries", "hit_entries", "link_entries", "cpu_experts", "link_experts")
"""Counts of a layer, in the order of its stamps."""

BRANCHES = ("hits", "link", "cpu")
TIMES = ("post", *BRANCHES, "join")


@c_function(6)
def _add(stamps, L, counts, us, last, waits):
    """Add a window: stamps int64 (L, STAMP_WORDS); the others are those of `ExpertStats`."""
    for layer in range(L):
        s = i64_view(stamps + 8 * bells.STAMP_WORDS * layer, bells.STAMP_WORDS)
        counted, spent = i64_view(counts + 48 * layer, 6), f64_view(us + 40 * layer, 5)
        for i in range(6):
            counted[i] += s[bells.N_ROWS + i]
        posted = s[bells.POSTED]
        spent[0] += (posted - s[bells.BEGAN]) / 1e3
        joined = max(s[bells.JOINED] - posted, 0) / 1e3
        spent[4] += joined
        at, until, most = 0, 0.0, -1e30
        for i in range(3):
            end, n = s[bells.HITS_END], s[bells.N_HIT]
            if i == 1:
                end, n = s[bells.LINK_END], s[bells.N_LINK_EXPERTS]
            elif i == 2:
                end, n = s[bells.WAIT_END], s[bells.N_CPU]
            if n <= 0:
                continue
            took = min(max(end - posted, 0) / 1e3, joined)  # it has ended when the join begins, its stamp perhaps not
            spent[1 + i] += took
            rank = joined - bells.START_NS / 1e3 if i < 2 and end >= s[bells.JOINED] else took
            if rank >= most:
                at, until, most = i, took, rank
        i64_view(last + 24 * layer, 3)[at] += 1
        f64_view(waits + 24 * layer, 3)[at] += until


class ExpertStats:
    """Sums over windows, by layer. Adding a window takes a microsecond or two.

    counts   int64 (L, 6) of SUMMED     us  float64 (L, 5) of TIMES, each from the decision on, `post` up to it
    last     int64 (L, 3): windows in which a branch of BRANCHES ended last     waits  float64 (L, 3), us until it did
    """

    def __init__(self, n_layers: int, expert_bytes: np.ndarray):
        self.windows = self.rows = 0
        self.window_us = 0.0
        self.counts = np.zeros((n_layers, len(SUMMED)), np.int64)
        self.us = np.zeros((n_layers, len(TIMES)))
        self.last = np.zeros((n_layers, len(BRANCHES)), np.int64)
        self.waits = np.zeros((n_layers, len(BRANCHES)))
        self._bytes = np.asarray(expert_bytes, np.int64)
        self._layers = np.arange(n_layers)
        _add.address  # noqa: B018  compiles or loads from disk

    def add(self, stamps: np.ndarray, window_us: float) -> None:
        """stamps: int64 (L, STAMP_WORDS) of a window that has ended well; window_us: what it took, launch to end."""
        self.windows += 1
        self.rows += int(stamps[0, bells.N_ROWS])
        self.window_us += window_us
        held = np.ascontiguousarray(stamps)
        _add.held(held.ctypes.data, len(self._layers), self.counts.ctypes.data, self.us.ctypes.data,
                  self.last.ctypes.data, self.waits.ctypes.data)  # fmt: skip

    def copy(self) -> ExpertStats:
        """The sums of now, for a difference later."""
        other = ExpertStats(len(self._layers), self._bytes)
        other += self
        return other

    def __iadd__(self, other: ExpertStats) -> ExpertStats:
        return self._take(other, 1)

    def __isub__(self, other: ExpertStats) -> ExpertStats:
        return self._take(other, -1)

    def _take(self, other: ExpertStats, sign: int) -> ExpertStats:
        self.windows += sign * other.windows
        self.rows += sign * other.rows
        self.window_us += sign * other.window_us
        for mine, theirs in ((self.counts, other.counts), (self.us, other.us), (self.last, other.last),
                             (self.waits, other.waits)):  # fmt: skip
            mine += sign * theirs
        return self

    # ---- facts

    def hit_rates(self) -> tuple[float, float]:
        """Hits as a share of all routed entries, and of those that were no part of the link's share."""
        cpu, hits, link = (int(self.counts[:, i].sum()) for i in (1, 2, 3))
        return hits / max(hits + link + cpu, 1), hits / max(hits + cpu, 1)

    def layer_us(self) -> dict[str, float]:
        """us of a window, all its layers: the decision, then what was waited for by the branch that ended last, then
        the join. Together they are the time from the decisions to the combines."""
        n = max(self.windows, 1)
        waits = self.waits.sum(axis=0) / n
        out = {"post": float(self.us[:, 0].sum() / n)}
        out |= {f"wait for {b}": float(w) for b, w in zip(BRANCHES, waits, strict=True)}
        return out | {"join": float(self.us[:, 4].sum() / n - waits.sum())}

    def record(self) -> dict[str, Any]:
        """Plain values."""
        n = max(self.windows, 1)
        rate, without = self.hit_rates()
        total = dict(zip(SUMMED, self.counts.sum(axis=0).tolist(), strict=True))
        return {
            "windows": self.windows,
            "rows": self.rows,
            "hit_rate": rate,
            "hit_rate_without_share": without,
            "entries": {"hits": total["hit_entries"], "link": total["link_entries"], "cpu": total["cpu_entries"]},
            "experts": {"link": total["link_experts"], "cpu": total["cpu_experts"]},
            "link_bytes": int(self.counts[:, 5] @ self._bytes),
            "cpu_bytes": int(self.counts[:, 4] @ self._bytes),
            "window_us": self.window_us / n,
            "us_per_window": {k: float(v) for k, v in zip(TIMES, self.us.sum(axis=0) / n, strict=True)},
            "window_parts_us": self.layer_us(),
            "waited_for": dict(zip(BRANCHES, self.last.sum(axis=0).tolist(), strict=True)),
            "layers": self._by_layer(n),
        }

    def _by_layer(self, n: int) -> dict[str, dict[str, float | int]]:
        """The least, mean and largest layer, and which one that is."""
        entries = np.maximum(self.counts[:, 1:4].sum(axis=1), 1)
        columns = {"hit_rate": self.counts[:, 2] / entries, "cpu_experts": self.counts[:, 4] / n,
                   "link_experts": self.counts[:, 5] / n, "cpu_us": self.us[:, 3] / n, "link_us": self.us[:, 2] / n,
                   "join_us": self.us[:, 4] / n}  # fmt: skip
        return {
            name: {"min": float(v.min()), "mean": float(v.mean()), "max": float(v.max()), "max_layer": int(v.argmax())}
            for name, v in columns.items()
        }
