"""Expert tiers: swap decisions against a plain reading of the rules, and residency under any schedule."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.base.errors import BadArgument, FileError, StrataError
from strata.pack.profile import ExpertProfile, read_profile, write_profile
from strata.replay import skewed_ids
from strata.runtime.simulate import ReplaySlots
from strata.runtime.swaps import (
    SwapRules,
    copy_budget_bytes,
    counted_profile,
    fill_order,
    moves_to_lend,
    plan_swaps,
    ranking,
    tail_slots,
)
from strata.runtime.tiers import ExpertTiers

# ---- decisions


def plain_swaps(usage, resident, empty, sizes, rules, budget):
    """The rules as they are told: layer by layer with lists, then all gains in order."""
    found = []
    for layer in range(len(usage)):
        u = usage[layer]
        comes = sorted((e for e in range(len(u)) if not resident[layer, e] and u[e] >= np.float32(rules.least)),
                       key=lambda e: (-u[e], e))  # fmt: skip
        goes = sorted((e for e in range(len(u)) if resident[layer, e]), key=lambda e: (u[e], e))
        for e in comes[: empty[layer]]:
            found.append((u[e], layer, e, -1))
        for e, victim in zip(comes[empty[layer] :], goes, strict=False):
            if u[e] < u[victim] + np.float32(rules.margin):
                break
            found.append((u[e] - u[victim], layer, e, victim))
    found.sort(key=lambda swap: -swap[0])  # stable: equal gains stay in the order of layers
    kept, n_bytes = [], 0
    for swap in found[: rules.most]:
        n_bytes += sizes[swap[1]]
        if n_bytes > budget:
            break
        kept.append(swap[1:])
    return kept


@st.composite
def situations(draw):
    L, E = draw(st.integers(1, 5)), draw(st.integers(1, 12))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    usage = rng.choice([0, 0.5, 1.4, 2, 2.5, 3.5, 4, 5.25, 9], (L, E)).astype(np.float32)
    resident = rng.random((L, E)) < rng.random()
    empty = np.array([rng.integers(0, E - r + 1) for r in resident.sum(axis=1)])
    sizes = rng.integers(1, 5, L)
    most = draw(st.sampled_from([0, 1, 3, 7, 96]))
    budget = draw(st.sampled_from([0.0, 1.0, 7.5, 20.0, float("inf")]))
    return usage, resident, empty, sizes, SwapRules(most=most), budget


@given(situations())
@settings(max_examples=300)
def test_swaps_are_those_of_the_rules(situation):
    usage, resident, empty, sizes, rules, budget = situation
    before = usage.copy()
    s = plan_swaps(usage, resident, empty, sizes, rules, budget)
    got = list(zip(s.layers.tolist(), s.incoming.tolist(), s.victims.tolist(), strict=True))
    assert got == plain_swaps(usage, resident, empty, sizes, rules, budget)
    assert (usage == before).all()
    gone = np.where(s.victims >= 0, usage[s.layers, s.victims], 0)
    assert (s.gains == usage[s.layers, s.incoming] - gone).all() and (np.diff(s.gains) <= 0).all()
    again = plan_swaps(usage, resident, empty, sizes, rules, budget)
    assert (again.incoming == s.incoming).all() and (again.victims == s.victims).all()


def test_the_thresholds_and_the_caps():
    usage = np.array([[9, 1.5, 0, 3.5], [1.9, 0, 0, 0]], np.float32)
    resident = np.array([[0, 1, 1, 0], [0, 1, 1, 1]], bool)
    one = np.ones(2, np.int64)
    s = plan_swaps(usage, resident, np.zeros(2, np.int64), one, SwapRules())
    assert s.incoming.tolist() == [0, 3] and s.victims.tolist() == [2, 1] and s.gains.tolist() == [9, 2]
    usage[0, 3] = 2.9375  # 1.5 + 1.4375: below the margin
    assert len(plan_swaps(usage, resident, np.zeros(2, np.int64), one, SwapRules())) == 1
    assert len(plan_swaps(usage, resident, np.array([0, 1]), one, SwapRules())) == 1, "1.9 is below 2, also for free"
    assert copy_budget_bytes(SwapRules(), 25.0, 5.0) == pytest.approx(100e6)
    assert copy_budget_bytes(SwapRules(), None, 5.0) == copy_budget_bytes(SwapRules(), 25.0, None) == float("inf")
    for bad in ({"decay": 1.0}, {"every": 0}, {"least": 0.0}, {"link_share": 0.0}, {"long_weight": -1.0}):
        with pytest.raises(BadArgument):
            SwapRules(**bad)


@given(st.integers(1, 6), st.integers(1, 9), st.data())
def test_fill_order(layers, experts, data):
    flat = data.draw(st.lists(st.integers(0, layers * experts - 1), unique=True))
    n_slots = [data.draw(st.integers(0, experts)) for _ in range(layers)]
    ranked = np.array([divmod(f, experts) for f in flat], np.uint16).reshape(-1, 2)
    used = [0] * layers
    expected = []
    for layer, e in ranked.tolist():
        if used[layer] < n_slots[layer]:  # a full layer leaves out this pair, not those behind it
            expected.append([layer, e, used[layer]])
            used[layer] += 1
    order = fill_order(ExpertProfile(layers, experts, len(flat), ranked), n_slots)
    assert order.tolist() == expected
    for n in range(sum(n_slots) + 1):
        lent = tail_slots(n_slots, order, n).tolist()
        assert len({tuple(x) for x in lent}) == n
        kept = {(layer, s) for layer, count in enumerate(n_slots) for s in range(count)} - {tuple(x) for x in lent}
        for layer in range(layers):  # a tail of every layer
            stay = [s for at, s in kept if at == layer]
            assert stay == [] or max(stay) == len(stay) - 1
        filled = [tuple(x[::2]) for x in expected]
        cut = [i for i, pair in enumerate(filled) if list(pair) in lent]
        assert cut == list(range(len(filled) - len(cut), len(filled))), "the hottest stay longest"
    with pytest.raises(BadArgument, match="slots to lend"):
        tail_slots(n_slots, order, sum(n_slots) + 1)


@given(st.lists(st.tuples(st.sampled_from([-1.0, 0.0, 1.0, 2.0, 5.0]), st.booleans()), max_size=12))
def test_slots_to_lend_become_the_coldest(slots):
    heat = np.array([h for h, _ in slots], np.float32)
    lent = np.array([l for _, l in slots], bool)
    moves = moves_to_lend(heat, lent)
    after = heat.copy()
    for source, target in moves:
        assert lent[source] and not lent[target] and heat[source] > heat[target]
        after[source], after[target] = heat[target], heat[source]
    assert sorted(after[lent]) == sorted(heat)[: lent.sum()]
    assert len({s for move in moves for s in move}) == 2 * len(moves)


def test_ranking_order():
    counts = np.array([[5, 9, 0], [9, 0, 0]])
    resident = np.array([[1, 0, 0], [0, 0, 1]], bool)
    prior = ExpertProfile(2, 3, 6, np.array([[1, 1], [0, 2]], np.uint16))
    assert ranking(counts, resident, prior).tolist() == [[0, 0], [1, 2], [0, 1], [1, 0], [1, 1], [0, 2]]
    assert ranking(counts).tolist() == [[0, 1], [1, 0], [0, 0], [0, 2], [1, 1], [1, 2]]


# ---- residency


class StrictSlots(ReplaySlots):
    """Slots whose copies land when the test says, and that refuse what real ones refuse. shown: what windows see."""

    def __init__(self, n_slots, E):
        super().__init__(n_slots)
        self.table = np.zeros((len(n_slots), E), bool)
        self.shown = self.table.copy()
        self.ready = self.unsent = 0

    def fill(self, order):
        n = super().fill(order)
        for layer, row in enumerate(self.expert_of):
            self.table[layer, row[row >= 0]] = True
        self.publish()
        return n

    def place(self, layer, expert, slot):
        assert self.expert_of[layer][slot] == -1 and expert not in self.expert_of[layer]
        assert (self.shown <= self.table).all(), "a copy began while windows still see what was evicted"
        super().place(layer, expert, slot)
        self.unsent += 1

    def evict(self, layer, expert):
        assert self.table[layer, expert]
        self.table[layer, expert] = False
        return super().evict(layer, expert)

    def move(self, layer, expert, slot):
        assert self.table[layer, expert] and self.expert_of[layer][slot] == -1 and expert in self.expert_of[layer]
        super().move(layer, expert, slot)

    def landed(self):
        out, self._coming = self._coming[: self.ready], self._coming[self.ready :]
        for layer, expert in out:
            self.table[layer, expert] = True
        return out

    def wait_landed(self):
        self.ready = len(self._coming)
        return self.landed()

    def publish(self):
        self.shown, self.unsent = self.table.copy(), 0


def profile_of(L, E, seed=0):
    return counted_profile(np.random.default_rng(seed).integers(0, 9, (L, E)))


@given(st.integers(0, 2**32), st.booleans())
@settings(max_examples=60)
def test_residency_under_any_schedule(seed, ranked):
    """Any routing, landing, loans and link rates: what windows see is what the tiers say, slots hold one expert each,
    swaps stay in their layer, and a second run of the same inputs decides the same."""

    def run():
        rng = np.random.default_rng(seed)
        L, E, K = 3, int(rng.integers(4, 24)), 3
        n_slots = rng.integers(0, E + 1, L).tolist()
        slots = StrictSlots(n_slots, E)
        tiers = ExpertTiers(slots, profile_of(L, E) if ranked else None, n_experts=E, expert_bytes=[7, 9, 11],
                            rules=SwapRules(least=1.0, margin=0.5))  # fmt: skip
        assert tiers.fill() == (sum(n_slots) if ranked else 0)
        seen, loan = [], False
        for _ in range(40):
            T = int(rng.integers(1, 9))
            ids = rng.integers(0, max(2, int(E * rng.random())), (L, T, K)).astype(np.int32)
            hits = slots.shown[np.arange(L)[:, None, None], ids].sum()
            before = tiers.stats()["hits"]
            tiers.observe(ids, int(rng.integers(0, T + 1)))
            assert tiers.stats()["hits"] - before == hits
            tiers.link_gbps, tiers.hidden_ms = rng.choice([(None, None), (1e-6, 30.0)])
            slots.ready = int(rng.integers(0, 5))
            free = [int((row < 0).sum()) for row in slots.expert_of]
            begun = tiers.between_windows()
            assert begun == 0 or not loan
            assert not slots.unsent, "copies leave while the window runs, not in front of the next one"
            if begun and tiers.link_gbps is not None:
                assert sum(7 + 2 * layer for layer, _ in slots._coming) <= 24
            assert [int((row < 0).sum()) for row in slots.expert_of] <= free
            if not loan and rng.random() < 0.2:
                loan = True
                tiers.settle()
                held, heat = tiers.resident, tiers.usage.score().copy()
                empty = [int((row < 0).sum()) for row in slots.expert_of]
                lent = tiers.lend(int(rng.integers(0, sum(n_slots) + 1)))
                for layer in range(L):
                    stays, goes = tiers.resident[layer], held[layer] & ~tiers.resident[layer]
                    assert goes.sum() == max(0, (lent[:, 0] == layer).sum() - empty[layer]), "empty slots first"
                    assert not (goes.any() and stays.any()) or heat[layer, goes].max() <= heat[layer, stays].min()
                assert all(slots.expert_of[layer][slot] == -1 for layer, slot in lent)
                assert not slots._coming and len(lent) == tiers.lent
            elif loan and rng.random() < 0.5:
                loan = False
                assert tiers.give_back() == len(slots._coming)
            assert (slots.shown == tiers.resident).all()
            held = [row[row >= 0] for row in slots.expert_of]
            assert all(len(set(h.tolist())) == len(h) for h in held)
            assert len(slots._coming) == tiers.stats()["in_flight"]
            seen.append((tiers.resident.tobytes(), tuple(slots._coming)))
        tiers.give_back()
        tiers.settle()
        assert (slots.shown == tiers.resident).all() and tiers.stats()["in_flight"] == 0
        return seen, tiers.learned_profile().ranked.tobytes()

    assert run() == run()


def test_a_cap_in_bytes_binds_beside_that_of_the_link():
    slots = StrictSlots([4], 16)
    tiers = ExpertTiers(slots, counted_profile(np.arange(16)[None, ::-1].copy()), n_experts=16, expert_bytes=[10],
                        rules=SwapRules(every=1, least=1.0, margin=0.0, long_weight=0.0))  # fmt: skip
    tiers.fill()
    for most_bytes, begun in ((9.0, 0), (29.0, 2)):
        tiers.most_bytes = most_bytes
        tiers.observe(np.array([[[12, 13, 14]]], np.int32), 1)
        assert tiers.between_windows() == begun


def test_swaps_follow_the_routing_and_wait_for_copies():
    slots = StrictSlots([2], 4)
    tiers = ExpertTiers(slots, counted_profile(np.array([[9, 8, 1, 0]])), n_experts=4, expert_bytes=[10],
                        rules=SwapRules(long_weight=0.0))  # fmt: skip
    tiers.fill()
    ids = np.array([[[2, 3]]], np.int32)
    for window in range(4):
        tiers.observe(ids, 1)
        assert tiers.between_windows() == (2 if window == 3 else 0)
    assert not slots.shown.any(), "what goes is a miss at once, what comes only when it has landed"
    for _ in range(8):
        tiers.observe(ids, 1)
        assert tiers.between_windows() == 0, "no new swaps before the last ones landed"
    slots.ready = 1
    tiers.between_windows()
    assert slots.shown.tolist() == [[False, False, True, False]] and tiers.stats()["in_flight"] == 1
    slots.ready = 9
    tiers.between_windows()
    assert slots.shown.tolist() == [[False, False, True, True]]
    assert tiers.hit_rate == 0 and tiers.stats()["copies"] == 2
    tiers.observe(ids, 1)
    assert tiers.stats()["hits"] == 2


def test_rejected_rows_do_not_count():
    tiers = ExpertTiers(ReplaySlots([1]), None, n_experts=4, expert_bytes=[1])
    tiers.observe(np.array([[[0, 1], [2, 3]]], np.int32), 1)
    assert tiers.counts.tolist() == [[1, 1, 0, 0]] and tiers.stats()["lookups"] == 4


def test_without_a_profile_what_is_missed_moves_in():
    slots = StrictSlots([2, 2], 8)
    tiers = ExpertTiers(slots, None, n_experts=8, expert_bytes=[1, 1])
    assert tiers.fill() == 0
    tiers.observe(np.array([[[5, 3]], [[1, 1]]], np.int32), 1)
    assert tiers.between_windows() == 3
    slots.ready = 9
    tiers.observe(np.array([[[6, 7]], [[1, 2]]], np.int32), 1)
    assert tiers.between_windows() == 1, "one free slot is left"
    tiers.settle()
    assert [np.flatnonzero(row).tolist() for row in slots.shown] == [[3, 5], [1, 2]]


def test_a_tier_takes_over_what_slots_hold():
    slots = StrictSlots([3], 5)
    slots.fill([(0, 4), (0, 2)])
    tiers = ExpertTiers(slots, None, n_experts=5, expert_bytes=[1])
    assert np.flatnonzero(tiers.resident[0]).tolist() == [2, 4]
    tiers.observe(np.array([[[4, 2, 0]]], np.int32), 1)
    assert tiers.stats()["hits"] == 2 and tiers.between_windows() == 1
    assert slots.expert_of[0].tolist() == [4, 2, 0]


def test_exchange_keeps_every_expert_somewhere():
    slots = StrictSlots([2], 4)
    ram = {2, 3}

    def exchange(layer, incoming, slot):
        victim = int(slots.expert_of[layer][slot])
        assert incoming in ram
        slots.evict(layer, victim)
        slots.publish()
        slots.place(layer, incoming, slot)
        slots.wait_landed()
        ram.symmetric_difference_update({victim, incoming})
        return victim

    slots.fill([(0, 0), (0, 1)])
    tiers = ExpertTiers(slots, None, n_experts=4, expert_bytes=[1], exchange=exchange,
                        rules=SwapRules(every=1, long_weight=0))  # fmt: skip

    for _ in range(3):
        tiers.observe(np.array([[[3, 3, 3, 1]]], np.int32), 1)
        tiers.between_windows()
        assert ram | set(slots.expert_of[0].tolist()) == {0, 1, 2, 3}
        assert (slots.shown == tiers.resident).all()
    assert slots.expert_of[0].tolist() == [3, 1] and ram == {0, 2}
    with pytest.raises(BadArgument, match="slots cannot be lent"):
        tiers.lend(1)


def test_learned_profile_is_saved_whole(tmp_path):
    slots = StrictSlots([1, 2], 4)
    tiers = ExpertTiers(slots, profile_of(2, 4), n_experts=4, expert_bytes=[1, 1])
    tiers.fill()
    held = tiers.resident
    tiers.observe(np.array([[[1, 2]], [[3, 3]]], np.int32), 1)
    lent = tiers.lend(2)
    path = tmp_path / "learned.strp"
    tiers.save_profile(path)
    got = read_profile(path, 2, 4)
    expected = ranking(tiers.counts, held, tiers.profile)
    assert (got.ranked == expected).all() and len(got.ranked) == 8
    assert {tuple(p) for p in got.ranked[:3].tolist()} == {tuple(p) for p in np.argwhere(held).tolist()}
    assert len(lent) == 2 and [p.name for p in tmp_path.iterdir()] == ["learned.strp"]
    again = ExpertTiers(StrictSlots([1, 2], 4), got, n_experts=4, expert_bytes=[1, 1])
    again.fill()
    assert (again.resident == held).all()


def test_refusals(tmp_path):
    slots = ReplaySlots([2, 2])
    with pytest.raises(BadArgument, match=r"another model.*found 3 layers x 4 experts.*needed 2 layers x 4 experts"):
        ExpertTiers(slots, profile_of(3, 4), n_experts=4, expert_bytes=[1, 1])
    write_profile(tmp_path / "p", profile_of(2, 5))
    with pytest.raises(FileError, match="another model"):
        read_profile(tmp_path / "p", 2, 4)
    with pytest.raises(BadArgument, match="more slots than experts"):
        ExpertTiers(ReplaySlots([5, 2]), None, n_experts=4, expert_bytes=[1, 1])
    tiers = ExpertTiers(slots, None, n_experts=4, expert_bytes=[1, 1])
    for ids in (np.zeros((3, 1, 2), np.int32), np.zeros((2, 1, 2), np.int64), np.zeros((2, 2), np.int32)):
        with pytest.raises(BadArgument, match="routed ids"):
            tiers.observe(ids, 1)
    for bad in (-1, 4):
        with pytest.raises(StrataError, match=f"id {bad} in layer 1"):
            tiers.observe(np.array([[[0, 1]], [[2, bad]]], np.int32), 1)
    assert tiers.counts.sum() == 0 and tiers.stats()["windows"] == 0
    with pytest.raises(BadArgument, match="rows to count"):
        tiers.observe(np.zeros((2, 1, 2), np.int32), 2)
    tiers.lend(1)
    with pytest.raises(BadArgument, match="lent already"):
        tiers.lend(1)
    assert tiers.give_back() == 0 and tiers.give_back() == 0


def test_decisions_take_little_time():
    L, E = 48, 512
    tiers = ExpertTiers(ReplaySlots([75] * L), profile_of(L, E), n_experts=E, expert_bytes=[1 << 20] * L)
    tiers.fill()
    ids = skewed_ids(8 * 48, L, E, 10, seed=3)
    observed, adapted = [], []
    for w in range(48):
        window = np.ascontiguousarray(ids[8 * w : 8 * w + 8].transpose(1, 0, 2))
        began = time.thread_time()
        tiers.observe(window, 8)
        between = time.thread_time()
        if tiers.between_windows():
            adapted.append(time.thread_time() - between)
        observed.append(between - began)
    assert len(adapted) >= 8
    # A few times what it takes, so that a slow machine passes and a loop in Python does not.
    assert np.median(observed) < 150e-6 and np.median(adapted) < 6e-3
