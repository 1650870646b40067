"""Expert tiers: which experts VRAM holds, kept in step with what is asked for, between windows and never waiting.

What a tier holds changes where an expert is computed, never the result: a window has the same bits for any residency.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import numpy as np

from strata.base.compiled import c_function
from strata.base.errors import BadArgument, StrataError, need
from strata.cpu.machine_code import ld8, ld32, ld64, ldf32, st64, stf32
from strata.pack.profile import ExpertProfile, write_profile
from strata.runtime.swaps import (
    SwapChooser,
    SwapRules,
    Usage,
    copy_budget_bytes,
    counted_profile,
    fill_order,
    moves_to_lend,
    tail_slots,
)

MOST_EXPERTS = 1 << 16

MOST_EXCHANGES = 8
"""Swaps of one adaptation where each is an exchange: bytes go both ways, and the next window waits for them."""

LOOKUPS, HITS, BAD = range(3)


class Slots(Protocol):
    """The memory of a tier; see `strata.gpu.slots`.

    expert_of  by layer int32 (slots,): the expert that a slot holds or awaits, or -1
    """

    expert_of: Sequence[np.ndarray]

    def fill(self, order: Iterable[tuple[int, int]]) -> int:
        """Fill free slots, lowest first, with (layer, expert) pairs; waits and publishes. Returns how many."""

    def place(self, layer: int, expert: int, slot: int) -> None:
        """Begin to copy an expert into a slot that holds none."""

    def evict(self, layer: int, expert: int) -> int:
        """The expert is a miss from the next publish on; its slot, which is returned, is free."""

    def move(self, layer: int, expert: int, slot: int) -> None:
        """Bring an expert that windows find to a free slot of its layer; its old one is free, and may be written by
        whatever is queued from now on."""

    def landed(self) -> list[tuple[int, int]]:
        """(layer, expert) of copies that ended since the last call; does not wait."""

    def wait_landed(self) -> list[tuple[int, int]]:
        """The same for all copies under way."""

    def publish(self) -> object:
        """Windows launched from now on see evictions and what has landed."""


Exchange = Callable[[int, int, int], int]
"""exchange(layer, incoming, slot) -> the expert that was there: swaps an expert in a slot with one in RAM, where RAM
holds only what no slot holds. Both have their places when it returns, and nothing is published."""


@c_function(10)
def _count(ids, L, T, K, n_keep, E, usage, counts, resident, tally):
    """Count a window. ids (L, T, K) int32; usage float32, counts int64, resident uint8, each (L, E); tally int64:
    entries looked up, entries found, 1 if an id is no expert (then nothing is counted)."""
    for i in range(L * T * K):
        e = ld32(ids + 4 * i)
        if e < 0 or e >= E:
            st64(tally + 16, 1)
            return
    hits = 0
    at = ids
    for layer in range(L):
        base = layer * E
        for row in range(T):
            for _ in range(K):
                pair = base + ld32(at)
                at += 4
                hits += ld8(resident + pair)
                if row < n_keep:
                    stf32(usage + 4 * pair, ldf32(usage + 4 * pair) + np.float32(1))
                    st64(counts + 8 * pair, ld64(counts + 8 * pair) + 1)
    st64(tally, ld64(tally) + L * T * K)
    st64(tally + 8, ld64(tally + 8) + hits)


class ExpertTiers:
    """Residency of every (layer, expert), counted and adapted.

    Call `fill` once after loading, `observe` after every window, `between_windows` before the next one. All calls come
    from the thread that runs the windows.

    slots         memory of the tier; what it holds already, with no copy under way, is taken over
    profile       ranking to fill by; None: experts move in as they are missed, until every slot is used
    link_gbps     rate of copies, hidden_ms time between adaptations that copies may hide in: together they cap the
                  bytes of an adaptation; either None: no cap. Both may be set anew at any time, as they are measured,
                  and so may `most_bytes`, a cap of its own
    n_experts     experts a layer, E
    expert_bytes  (L,) bytes of one expert by layer
    exchange      where RAM holds only what no slot holds: swaps go through it, one after another, and wait
    """

    def __init__(
        self,
        slots: Slots,
        profile: ExpertProfile | None = None,
        link_gbps: float | None = None,
        hidden_ms: float | None = None,
        *,
        n_experts: int,
        expert_bytes: Sequence[int],
        rules: SwapRules | None = None,
        exchange: Exchange | None = None,
    ):
        L, E = len(slots.expert_of), n_experts
        need(L >= 1 and 1 <= E <= MOST_EXPERTS, "layers and experts are out of range", found=(L, E),
             needed=f">= 1 and 1 to {MOST_EXPERTS}")  # fmt: skip
        need(len(expert_bytes) == L, "expert_bytes has another number of layers", found=len(expert_bytes), needed=L)
        if profile is not None and (profile.n_layers, profile.n_experts) != (L, E):
            raise BadArgument("the profile is of another model",
                              found=f"{profile.n_layers} layers x {profile.n_experts} experts",
                              needed=f"{L} layers x {E} experts",
                              advice="Make one for this model with `strata profile`.")  # fmt: skip
        self.slots, self.profile, self.rules, self._exchange = slots, profile, rules or SwapRules(), exchange
        if exchange is not None:
            self.rules = replace(self.rules, most=min(self.rules.most, MOST_EXCHANGES))
        self.link_gbps, self.hidden_ms, self.most_bytes = link_gbps, hidden_ms, float("inf")
        self.n_slots = tuple(len(row) for row in slots.expert_of)
        need(all(s <= E for s in self.n_slots), "a layer has more slots than experts", found=max(self.n_slots),
             needed=f"<= {E}")  # fmt: skip
        self.usage = Usage(L, E, self.rules)
        self.counts = np.zeros((L, E), np.int64)
        self._resident = np.zeros((L, E), np.uint8)
        self._slot_of = np.full((L, E), -1, np.int32)
        self._free: list[list[int]] = []
        self._bytes = np.asarray(expert_bytes, np.int64)
        self._order = np.zeros((0, 3), np.int64) if profile is None else fill_order(profile, self.n_slots)
        self._in_flight: set[tuple[int, int]] = set()
        self._lent: list[tuple[int, int, int]] | None = None
        self._chooser = SwapChooser(L, E, self.rules.most)
        # An empty slot is better filled by any expert that was missed than left; nothing goes for it.
        self._filling = replace(self.rules, least=1.0, margin=float("inf"))
        self._tally = np.zeros(3, np.int64)
        self._windows = self._since = self._copies = 0
        _count.address  # noqa: B018  compiles or loads from disk: nothing compiles after load
        self._take_over()

    # ---- facts

    @property
    def resident(self) -> np.ndarray:
        """(L, E) bool: experts that the next window finds in VRAM."""
        return self._resident.astype(bool)

    @property
    def hit_rate(self) -> float:
        """Share of routed entries observed so far that were found in VRAM; 0 before the first window."""
        return float(self._tally[HITS] / self._tally[LOOKUPS]) if self._tally[LOOKUPS] else 0.0

    @property
    def lent(self) -> int:
        """Slots that are lent now."""
        return 0 if self._lent is None else len(self._lent)

    def stats(self) -> dict[str, float | int]:
        """Counters since the start: windows, lookups and hits (routed entries), hit_rate, copies; and the state now:
        slots, resident, in_flight, lent."""
        return {
            "windows": self._windows,
            "lookups": int(self._tally[LOOKUPS]),
            "hits": int(self._tally[HITS]),
            "hit_rate": self.hit_rate,
            "copies": self._copies,
            "slots": sum(self.n_slots),
            "resident": int(self._resident.sum()),
            "in_flight": len(self._in_flight),
            "lent": self.lent,
        }

    # ---- work

    def _take_over(self) -> None:
        """Read what the slots hold."""
        self._resident[:], self._slot_of[:], self._free = 0, -1, []
        for layer, row in enumerate(self.slots.expert_of):
            held = np.asarray(row)
            full = np.flatnonzero(held >= 0)
            self._slot_of[layer, held[full]] = full
            self._resident[layer, held[full]] = 1
            self._free.append(np.flatnonzero(held < 0)[::-1].tolist())

    def fill(self) -> int:
        """Place the profile's hottest experts in the free slots, wait, and return how many. Once, at load."""
        n = self.slots.fill(self._order[:, :2].tolist()) if len(self._order) else 0
        self._take_over()
        if self.profile is not None:
            self.usage.favour(self._resident.view(bool))
        return n

    def observe(self, layer_ids: np.ndarray, n_keep: int) -> None:
        """Count the routing of a window: layer_ids (L, T, K) int32. Its first n_keep rows count as usage; rows that
        were rejected belong to a text that never came. StrataError, with nothing counted, for an id that is no expert.
        """
        L, E = self.counts.shape
        if layer_ids.ndim != 3 or layer_ids.shape[0] != L or layer_ids.dtype != np.int32:
            raise BadArgument("routed ids", found=f"{layer_ids.dtype} {layer_ids.shape}", needed=f"int32 ({L}, T, K)")
        ids = np.ascontiguousarray(layer_ids)
        _, T, K = ids.shape
        need(0 <= n_keep <= T, "rows to count are out of range", found=n_keep, needed=f"0 to {T}")
        _count.held(ids.ctypes.data, L, T, K, n_keep, E, self.usage.fresh.ctypes.data, self.counts.ctypes.data,
                    self._resident.ctypes.data, self._tally.ctypes.data)  # fmt: skip
        if self._tally[BAD]:
            self._tally[BAD] = 0
            bad = np.argwhere((ids < 0) | (ids >= E))[0].tolist()
            raise StrataError("a window was routed to no expert", found=f"id {ids[tuple(bad)]} in layer {bad[0]}",
                              needed=f"0 to {E - 1}")  # fmt: skip
        self._windows += 1
        self._since += 1

    def observe_chunk(self, counts: np.ndarray, rows: int) -> None:
        """Count a chunk of a prompt: int32 (L, E) entries of its rows. They are no lookups, and the next
        `between_windows` may swap."""
        L, E = self.counts.shape
        if counts.shape != (L, E) or counts.dtype != np.int32 or rows < 1:
            raise BadArgument("counts of a chunk", found=f"{counts.dtype} {counts.shape}, {rows} rows",
                              needed=f"int32 ({L}, {E}), a row or more")  # fmt: skip
        self.counts += counts
        self.usage.read(counts, rows)
        self._since = self.rules.every

    def between_windows(self) -> int:
        """Admit what has landed; every few windows decide what to swap, and begin to copy it. Waits only for an
        `exchange`. Returns the number of copies begun."""
        changed, begun = self._admit(self.slots.landed() if self._in_flight else []), 0
        if self._lent is None and not self._in_flight:
            if self._since >= self.rules.every:
                self._since = 0
                begun = self._adapt(self.rules)
                self.usage.age()
            elif self.profile is None and any(self._free):
                begun = self._adapt(self._filling)
        if changed and not begun:
            self.slots.publish()
        return begun

    def _adapt(self, rules: SwapRules) -> int:
        """Plan swaps and begin them; returns how many."""
        empty = [len(free) for free in self._free]
        budget = min(copy_budget_bytes(rules, self.link_gbps, self.hidden_ms), self.most_bytes)
        budget /= 1 if self._exchange is None else 2
        swaps = self._chooser.choose(self.usage.score(), self._resident, empty, self._bytes, rules, budget)
        moves = list(zip(swaps.layers.tolist(), swaps.incoming.tolist(), swaps.victims.tolist(), strict=True))
        if self._exchange is not None:
            return self._swap_in_ram(moves)
        for layer, _, victim in moves:
            if victim >= 0:
                self._evict(layer, victim)
        if moves:
            # Before the first copy: no window may find an expert in a slot that is being overwritten.
            self.slots.publish()
        for layer, incoming, _ in moves:
            self._place(layer, incoming, self._free[layer].pop())
        if moves:
            # Now, and not in front of the next window: all copies leave, and cross the link while this one runs.
            self.slots.publish()
        return len(moves)

    def _swap_in_ram(self, moves: list[tuple[int, int, int]]) -> int:
        """The moves where RAM holds only what no slot holds. Empty slots stay empty: each expert has one place."""
        done = 0
        for layer, incoming, victim in moves:
            if victim < 0:
                continue
            slot = int(self._slot_of[layer, victim])
            went = self._exchange(layer, incoming, slot)
            if went != victim:
                raise StrataError("an exchange took another expert", found=f"expert {went} of layer {layer}",
                                  needed=f"expert {victim}")  # fmt: skip
            self._resident[layer, victim], self._slot_of[layer, victim] = 0, -1
            self._resident[layer, incoming], self._slot_of[layer, incoming] = 1, slot
            done += 1
        self._copies += done
        if done:
            self.slots.publish()
        return done

    def _evict(self, layer: int, expert: int) -> None:
        slot = self.slots.evict(layer, expert)
        self._resident[layer, expert], self._slot_of[layer, expert] = 0, -1
        self._free[layer].append(slot)

    def _place(self, layer: int, expert: int, slot: int) -> None:
        self.slots.place(layer, expert, slot)
        self._slot_of[layer, expert] = slot
        self._in_flight.add((layer, expert))
        self._copies += 1

    def _admit(self, landed: list[tuple[int, int]]) -> bool:
        """Take in what has landed; True if anything did."""
        for layer, expert in landed:
            self._in_flight.discard((layer, expert))
            self._resident[layer, expert] = 1
        return bool(landed)

    def settle(self) -> None:
        """Wait until every copy has landed, and publish."""
        if self._in_flight and self._admit(self.slots.wait_landed()):
            self.slots.publish()

    # ---- lending

    def lend(self, which: int | np.ndarray) -> np.ndarray:
        """Empty slots for another use until `give_back`: those of (n, 2) int64 rows (layer, slot), or that many, which
        the profile filled last. Returns such rows.

        What becomes a miss are the experts of each layer that are used least now: where a slot to lend holds another,
        it changes places. Waits for copies under way; nothing is swapped meanwhile. BadArgument where RAM holds only
        what no slot holds: there an expert would be lost.
        """
        need(self._exchange is None, "slots cannot be lent", found="RAM without a copy of what they hold",
             needed="all experts in RAM")  # fmt: skip
        need(self._lent is None, "slots are lent already", found=self.lent, needed="none")
        chosen = which if isinstance(which, np.ndarray) else tail_slots(self.n_slots, self._order, which)
        self.settle()
        self._lent = []
        heat = self.usage.score()
        for layer in np.unique(chosen[:, 0]).tolist():
            self._lend(layer, chosen[chosen[:, 0] == layer, 1], heat[layer])
        self.slots.publish()
        return chosen

    def _lend(self, layer: int, slots: np.ndarray, heat: np.ndarray) -> None:
        """Empty these slots of a layer; heat (E,) says which of its experts stay."""
        held, lent = np.full(self.n_slots[layer], -1), np.zeros(self.n_slots[layer], bool)
        experts = np.flatnonzero(self._slot_of[layer] >= 0)
        held[self._slot_of[layer, experts]], lent[slots] = experts, True
        to = dict(moves_to_lend(np.where(held >= 0, heat[held], np.float32(-1)), lent))
        for slot in slots.tolist():
            stays = to.get(slot, slot)
            goes = int(held[stays])
            if goes >= 0:
                self._evict(layer, goes)
            if stays != slot:
                self.slots.move(layer, int(held[slot]), stays)
                self._slot_of[layer, held[slot]] = stays
            self._free[layer].remove(stays)
            self._lent.append((layer, goes, slot))

    def give_back(self) -> int:
        """End the loan: the experts that were there are copied back, and are hits once they have landed (`settle` waits
        for that). Returns how many; 0 when nothing is lent."""
        for _ in range(self.lent):
            layer, expert, slot = self._lent[0]
            if expert >= 0 and self._slot_of[layer, expert] < 0:  # unless an interrupt came behind it
                self._place(layer, expert, slot)
            elif expert < 0:
                self._free[layer].append(slot)
            del self._lent[0]
        self._lent = None
        self.slots.publish()  # what an interrupt of `lend` left
        return len(self._in_flight)

    # ---- profile

    def learned_profile(self) -> ExpertProfile:
        """Every pair ranked: experts in VRAM first (also those whose slots are lent or whose copies are under way),
        then by routing counted, then as the profile ranked them."""
        held = self._slot_of >= 0
        for layer, expert, _ in self._lent or []:
            if expert >= 0:
                held[layer, expert] = True
        return counted_profile(self.counts, held, self.profile)

    def save_profile(self, path: str | Path) -> None:
        """Write `learned_profile` to a file; a reader sees the old file or the whole new one."""
        write_profile(path, self.learned_profile())
