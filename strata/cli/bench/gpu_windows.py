"""strata bench gpu --compare and --check-early: the same windows under other choices of the lowering.

Of one loaded model, windows are captured again for every choice, with replayed routing. Times: rounds alternate between
the choices, so that drift meets all of them. Bits: streams of windows that are read and committed one after the other.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from strata import gpu_speed
from strata.base.errors import BadArgument
from strata.base.geometry import WINDOW_ROWS
from strata.gpu import early_launch, experts_op, float_gemv, hc_ops, ops, qsa_append, route
from strata.gpu.backend import GpuBackend
from strata.gpu.gemv import choices as products
from strata.gpu_speed import Effort, replayed, window_us

PLACES = {
    "norm": (hc_ops, "NORM_DOWN_ROWS"),
    "near": (hc_ops, "NEAR_ROWS"),
    "clusters": (hc_ops, "CLUSTERED_ROWS"),
    "tiles": (float_gemv, "TILED_FROM"),
    "mixed": (ops, "MIXED_ROWS"),
    "early": (early_launch, "START_EARLY"),
    "shared out": (products, "HALF_SPLIT_FROM"),
    "scores": (qsa_append, "SCORED_ROWS"),
    "rings": (products, "RING_ROWS"),
    "combine": (experts_op, "COMBINED_ROWS"),
    "router": (route, "ROUTED_ROWS"),
    "ahead": (ops, "NGRAM_AHEAD"),
    "whole rows": (products, "AHEAD_FROM"),
    "held": (float_gemv, "HELD_FROM"),
    "held logits": (float_gemv, "HELD_FEW_FROM"),
    "alone": (products, "ALONE_ROWS"),
    "short": (products, "SHORT_COLUMNS"),
    "pairs of one": (products, "SHORT_PAIRS_OF_ONE"),
    "pairs": (products, "SHORT_PAIRS"),
    "half": (products, "HALF_FROM"),
}
"""Constants of the lowering that choices set."""
CHOICES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "norms alone": {"norm": 0, "clusters": ()},
    "norms in products: weights later": {"near": 0},
    "norms in products: all rows": {"norm": 8, "clusters": ()},
    "hyper-connections: before": {"clusters": (), "tiles": 99},
    "hyper-connections: no clusters": {"clusters": ()},
    "hyper-connections: up row by row": {"tiles": 99},
    "products in branches": {"mixed": 0},
    "products apart without rings": {"mixed": 0, "rings": 65536},
    "scores of blocks apart": {"scores": 0},
    "n-gram rows in line": {"ahead": False},
    "combine apart": {"combine": 0},
    "n-gram products as other ones": {"whole rows": 99, "held": 99},
    "n-gram keys as other products": {"whole rows": 99},
    "n-gram values row by row": {"held": 99},
    "logits row by row": {"held logits": 99},
    "router apart": {"router": 0},
    "experts: every entry alone": {"alone": tuple(range(2, WINDOW_ROWS + 1))},
    "experts: entries together": {"alone": ()},
    "tensor cores: few rows as before": {"shared out": 99},
    "short rows: never": {"short": 0},
    "short rows: blocks of twice as many": {"pairs of one": 8, "pairs": 16},
    "short rows: blocks of three times as many": {"pairs of one": 12, "pairs": 24},
    "half: never": {"half": 99},
    "early: off": {"early": early_launch.OFF},
    "early: main chain": {"early": early_launch.MAIN_CHAIN},
    "early: side chains too": {"early": early_launch.CHAINS},
    "early: behind forks too": {"early": early_launch.FORKS},
    "early: behind joins too": {"early": early_launch.JOINS},
    "early: joins and norms alone": {"early": early_launch.JOINS, "norm": 0, "clusters": ()},
    "all off": {"norm": 0, "clusters": (), "mixed": 0, "early": early_launch.OFF},
}
LEVELS = {name: values["early"] for name, values in CHOICES.items() if tuple(values) == ("early",)}
"""Where kernels start early, "off" first."""
ROUNDS = 3


@dataclass(frozen=True)
class Choice:
    """Windows of `rows` rows under a choice: median us on the device, and nodes of their graph."""

    name: str
    rows: int
    us: float
    nodes: int


@dataclass(frozen=True)
class Kept:
    """Windows of `rows` rows whose kernels start early at a level: how many were compared with plain launches, and the
    numbers of those whose streams differ."""

    name: str
    rows: int
    windows: int
    differ: tuple[int, ...]


def chosen(text: str) -> dict[str, dict[str, Any]]:
    """The choices that "early,norms alone" names, by names or by parts of them, or all; "as it is" is always there."""
    words = [w.strip() for w in text.split(",") if w.strip()]
    if words == ["all"]:
        return CHOICES
    found = {"as it is"}
    for word in words or [""]:
        named = {word} if word in CHOICES else {name for name in CHOICES if word and word in name}
        if not named or word == "all":
            raise BadArgument("--compare names no choice", found=repr(word),
                              needed="all, or parts of: " + "; ".join(CHOICES))  # fmt: skip
        found |= named
    return {name: values for name, values in CHOICES.items() if name in found}


@contextmanager
def lowered_with(values: dict[str, int]) -> Iterator[None]:
    """The lowering's constants with these values while the block runs."""
    before = {name: getattr(*PLACES[name]) for name in values}
    for name, value in values.items():
        setattr(*PLACES[name], value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(*PLACES[name], value)


def compare(
    backend: GpuBackend,
    table: np.ndarray,
    rows: Sequence[int],
    position: int,
    choices: dict[str, dict[str, Any]],
    *,
    effort: Effort | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Choice]:
    """Times of windows of these rows at a position under every choice."""
    effort = effort or gpu_speed.DEFAULT_EFFORT
    times: dict[tuple[str, int], list[float]] = {(name, T): [] for name in choices for T in rows}
    nodes: dict[tuple[str, int], int] = {}
    state, done = backend.new_state(), 0
    state.rows = position
    for _ in range(ROUNDS):
        for name, values in choices.items():
            with lowered_with(values), replayed(backend, table, rows) as rewind:
                for T in rows:
                    times[name, T].append(window_us(backend, state, T, rewind, effort)[0])
                    nodes[name, T] = len(backend._graphs[id(backend.programs.windows[T])].lowering.launches) + 2
            done += 1
            on_progress(done, ROUNDS * len(choices))
    return [Choice(name, T, statistics.median(us), nodes[name, T]) for (name, T), us in times.items()]


def check_early(
    backend: GpuBackend,
    table: np.ndarray,
    rows: Sequence[int],
    position: int,
    windows: int,
    seed: int = 1,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Kept]:
    """Whether `windows` windows of each of these rows keep their bits at every level of early starts. A driver that
    refuses them is an error."""
    rng, found = np.random.default_rng(seed), []
    tokens = rng.integers(0, backend.geometry.V, (windows, max(rows))).astype(np.int32)
    wanted: dict[int, list[bytes]] = {}
    before = early_launch.REFUSAL_IS_ERROR
    early_launch.REFUSAL_IS_ERROR = True
    try:
        for number, (name, level) in enumerate(LEVELS.items()):
            with lowered_with({"early": level}), replayed(backend, table, rows) as rewind:
                for T in rows:
                    rewind()
                    state, streams = backend.new_state(), []
                    state.rows = position
                    for i in range(windows):
                        backend.window(state, tokens[i, :T], (1, 2))
                        streams.append(backend.streams[:T].tobytes())
                        backend.commit(state, T)
                    wanted.setdefault(T, streams)
                    differ = tuple(i for i, (a, b) in enumerate(zip(streams, wanted[T], strict=True)) if a != b)
                    found.append(Kept(name, T, windows, differ))
            on_progress(number + 1, len(LEVELS))
    finally:
        early_launch.REFUSAL_IS_ERROR = before
    return found


# ---- text


def choice_lines(found: Sequence[Choice]) -> list[str]:
    """A table: choices down, rows across."""
    rows = sorted({c.rows for c in found})
    by_name: dict[str, dict[int, Choice]] = {}
    for c in found:
        by_name.setdefault(c.name, {})[c.rows] = c
    lines = [f"{'us, nodes of a window':<36}" + "".join(f"{f'{T} rows' if T > 1 else '1 row':>17}" for T in rows)]
    for name, cells in by_name.items():
        lines.append(f"{name:<36}" + "".join(f"{cells[T].us:>11.1f}{cells[T].nodes:>6}" for T in rows))
    return lines


def kept_lines(found: Sequence[Kept]) -> list[str]:
    """One line a level and number of rows."""
    return [
        f"{k.name:<26} {k.rows} rows: {len(k.differ)} of {k.windows} windows differ {list(k.differ[:8]) or ''}".rstrip()
        for k in found
    ]
