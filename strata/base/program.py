"""The records an architecture emits: ops over named buffers, gathered into programs.

An op names its kind, its buffers by port and its constants. Shapes are static per number of rows T; no Python depends
on a value. A backend turns a program into something it can run in one go: the CPU into an array of (function address,
argument record), the GPU into a captured graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

import numpy as np

ROLES = ("io", "scratch", "table", "recurrent", "cells", "ring")
"""io: written or read by the host each window. scratch: lives within one window and its commit. table: made once at
load. recurrent: session state that only commit (or a prefill chunk) advances; checkpoints copy it. cells: session state
addressed by position, appended by windows; checkpoints do not copy it. ring: session state addressed by position modulo
its length, of which only a few rows matter at a time; no copy of a session holds it. Ports that name no buffer name a
tensor of the file."""


@dataclass(frozen=True)
class Buffer:
    """A named array. shape in elements, C order; dtype a numpy name."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    role: str

    @property
    def n_bytes(self) -> int:
        return prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Op:
    """One step. `buffers` maps port to buffer or tensor name, `consts` are numbers, `layer` is -1 outside layers."""

    kind: str
    layer: int
    buffers: Mapping[str, str]
    consts: Mapping[str, int | float] = field(default_factory=dict)


@dataclass(frozen=True)
class Program:
    """Ops in order for windows of exactly T rows. `name` is one of trunk, commit, head (and mtp parts)."""

    name: str
    T: int
    ops: tuple[Op, ...]
    buffers: Mapping[str, Buffer]


@dataclass(frozen=True)
class Allocation:
    """One priced piece of memory. device is "ram", "vram" or "disk"; line is the plan line it belongs to."""

    line: str
    device: str
    n_bytes: int
    reason: str


# Error word: four int64 (code, op index, layer, detail). The first op in list order that sets it wins.
ERROR_WORDS = 4
OK, NOT_FINITE, COMBINE_OVERFLOW, NGRAM_TIMEOUT, NGRAM_FAILED, EXPERTS_TIMEOUT, EXPERTS_FAILED = range(7)
ERROR_TEXT = {
    NOT_FINITE: "a non-finite value",
    COMBINE_OVERFLOW: "an expert output that is not finite or beyond 2^24",
    NGRAM_TIMEOUT: "no n-gram rows within the limit",
    NGRAM_FAILED: "an I/O error while reading n-gram rows",
    EXPERTS_TIMEOUT: "no answer of the CPU's experts within the limit",
    EXPERTS_FAILED: "a failure of the CPU's experts",
}


@dataclass(frozen=True)
class DraftPrograms:
    """Programs of a draft layer: `appends` store K and V of T = 1..8 cells, `step` takes one cell to its logits.

    chunk: an append for many cells, lowered for any number up to its rows; None where chunks are read cell by cell
    """

    appends: Mapping[int, Program]
    step: Program
    chunk: Program | None = None

    def all(self) -> list[Program]:
        return [*self.appends.values(), self.step]


@dataclass(frozen=True)
class ProgramSet:
    """All programs of one model at one context and KV format.

    windows  trunk for T = 1..8 rows      heads    logits of T = 1..8 rows
    commit   advance by n_keep <= 8       prefill  trunk over a whole cell that advances in place
    states   every buffer a session holds, the draft layer's included
    draft    programs of the draft layer, or None
    chunk    trunk over the rows of the largest prefill chunk, which advances in place; lowered for any number of whole
             cells up to that. None where prompts are read cell by cell. Not among all()
    """

    windows: Mapping[int, Program]
    heads: Mapping[int, Program]
    commit: Program
    prefill: Program
    states: tuple[Buffer, ...]
    draft: DraftPrograms | None = None
    chunk: Program | None = None

    def all(self) -> list[Program]:
        draft = self.draft.all() if self.draft else []
        return [*self.windows.values(), *self.heads.values(), self.commit, self.prefill, *draft]
