"""Where the buffers of a prefill chunk lie: one arena in which buffers that are never needed at the same time overlap.

A chunk's buffers have thousands of rows, and most live for a few ops of one layer, so sharing places by lifetime makes
the arena about a third of their sum. Places are found once, for the largest chunk; a smaller one uses the starts of the
same areas. Like `Memory`, an arena is first measured with made-up addresses.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from strata.base.program import Buffer, Op, Program
from strata.gpu.memory import MADE_UP, Memory, aligned
from strata.gpu.qsa_wide import POSITION_ROWS

OUTPUTS = {
    "embed": ("y",),
    "hc_norm": ("y",),
    "hc_mix": ("u", "a"),
    "gdn_conv": ("conv",),
    "gdn_heads": ("y",),
    "qsa_append": ("q_out",),
    "qsa_select": ("blocks",),
    "qsa_attend": ("y",),
    "ngram_mix": ("conv_rows",),
    "router": ("ids", "weights"),
    "experts": ("y",),
}
"""Ports that an op writes without reading them: a buffer's life begins there. The outputs of `linear` are y0, y1, .."""

OUTSIDE = ("streams", "ngram.ticket")
"""Buffers that do not lie in the arena: heads and the draft layer read the streams of a chunk when it has ended; its
n-gram rows are uploaded before the op that waits for them."""


def written(op: Op) -> set[str]:
    """Names of the buffers that an op writes without reading them."""
    ports = [f"y{i}" for i in range(op.consts["n"])] if op.kind == "linear" else OUTPUTS.get(op.kind, ())
    names = {op.buffers[p] for p in ports if p in op.buffers}
    return names - {name for port, name in op.buffers.items() if port not in ports}


def lives(program: Program, names: Iterable[str]) -> dict[str, list[tuple[int, int]]]:
    """name -> (first op, last op) of every stretch in which the buffer holds something that is still read.

    A buffer that the first op to name it does not write comes from outside: it lives from op 0 on.
    """
    out: dict[str, list[tuple[int, int]]] = {name: [] for name in names}
    for index, op in enumerate(program.ops):
        fresh = written(op)
        last = min(index + (op.kind == "hc_add"), len(program.ops) - 1)  # an hc_add is done by the norm behind it
        for name in set(op.buffers.values()):
            if name not in out:
                continue
            if name in fresh or not out[name]:
                out[name].append((index if name in fresh else 0, last))
            else:
                out[name][-1] = (out[name][-1][0], last)
    return out


@dataclass
class Area:
    """A place in the arena: n_bytes, and the stretches of ops in which it is in use."""

    name: str
    n_bytes: int
    spans: list[tuple[int, int]] = field(default_factory=list)
    start: int = 0

    @property
    def when(self) -> int:
        """The ops at which it is in use, a bit for each."""
        bits = 0
        for first, last in self.spans:
            bits |= (2 << last) - (1 << first)
        return bits

    def meets(self, other: Area) -> bool:
        """Whether both are in use at the same time."""
        return bool(self.when & other.when)


def meetings(areas: Sequence[Area]) -> list[set[int]]:
    """For each area the numbers of those that are in use at some time when it is, its own included."""
    when = [area.when for area in areas]
    return [{i for i, other in enumerate(when) if own & other} for own in when]


def place(areas: Sequence[Area], met: Sequence[set[int]] | None = None) -> int:
    """Give every area its start, large ones first, each at the lowest place that is free while it lives.

    met: their `meetings`, if they are known. Returns the bytes of the arena.
    """
    placed: dict[int, tuple[int, int]] = {}
    end = 0
    met = meetings(areas) if met is None else met
    for i in sorted(range(len(areas)), key=lambda i: (-areas[i].n_bytes, areas[i].name)):
        area, n_bytes = areas[i], aligned(areas[i].n_bytes)
        area.start = 0
        for start, stop in sorted([placed[j] for j in met[i] if j in placed]):
            if area.start + n_bytes <= start:
                break
            area.start = max(area.start, stop)
        placed[i] = area.start, area.start + n_bytes
        end = max(end, placed[i][1])
    return end


class ChunkMemory:
    """Addresses by name for the lowering of a chunk program; what is not in the arena is the backend's `memory`.

    Besides the program's buffers: `pos`, int64 positions of rows 0, 64, .., and `rows`, the int64 number of rows.
    elsewhere: addresses of buffers that lie outside of both; they may be changed between lowerings. filled: tables that
    lie in the arena; they are filled before every run.
    """

    def __init__(
        self, program: Program, memory: Memory, elsewhere: Mapping[str, int] | None = None, filled: tuple[str, ...] = ()
    ):
        self.program, self.memory, self.elsewhere = program, memory, dict(elsewhere or {})
        inside = {
            name: b
            for name, b in program.buffers.items()
            if (b.role in ("io", "scratch") or name in filled) and name not in OUTSIDE and name not in self.elsewhere
        }
        self._areas = {name: Area(name, b.n_bytes, spans) for name, b, spans in self._with_lives(inside)}
        self._areas["pos"] = Area("pos", 8 * (program.T // POSITION_ROWS), [(0, len(program.ops))])
        self._areas["rows"] = Area("rows", 8, [(0, len(program.ops))])
        self._private: dict[str, Area] = {}
        self.measuring = True
        self._base = self.n_bytes = 0

    def _with_lives(self, inside: dict[str, Buffer]) -> list[tuple[str, Buffer, list[tuple[int, int]]]]:
        spans = lives(self.program, inside)
        for name, b in inside.items():  # what the host fills before the first op
            if b.role != "scratch":
                spans[name] = [(0, spans[name][-1][1])]
        return [(name, b, spans[name]) for name, b in inside.items()]

    @property
    def areas(self) -> list[Area]:
        """Everything that lies in the arena, in the order in which it was asked for."""
        return [*self._areas.values(), *self._private.values()]

    def measured(self) -> int:
        """End measuring; returns the bytes of the arena."""
        self.measuring = False
        self.n_bytes = place(self.areas)
        return self.n_bytes

    def lie_at(self, address: int) -> None:
        """The arena's memory: n_bytes of the device from `address` on."""
        self._base = address

    @property
    def base(self) -> int:
        """Where the arena lies."""
        return self._base

    def address(self, name: str) -> int:
        if name in self.elsewhere:
            return self.elsewhere[name]
        if name in self._areas:
            return self._areas[name].start + (MADE_UP if self.measuring else self._base)
        return self.memory.address(name)

    def slot(self, name: str) -> int:
        return self.memory.slot(name)

    def scratch(self, name: str, n_bytes: int, first: int, last: int) -> int:
        """Private scratch in use from op `first` to op `last`. Ops that use one name share the place."""
        if not self.measuring:
            assert n_bytes <= self._private[name].n_bytes
            return self._private[name].start + self._base
        area = self._private.setdefault(name, Area(name, 0))
        area.n_bytes = max(area.n_bytes, n_bytes)
        if not area.spans or area.spans[-1][1] < first:
            area.spans.append((first, last))
        else:
            area.spans[-1] = (area.spans[-1][0], max(area.spans[-1][1], last))
        return MADE_UP

    @property
    def error(self) -> int:
        return self.memory.error

    def buffer(self, name: str) -> Buffer:
        return self.program.buffers[name]
