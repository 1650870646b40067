"""Down products of experts with short rows: the kernel of its own, run on the CPU, against the lane rules."""

import numpy as np
import pytest

from strata.gpu import gemv as package
from strata.gpu.gemv import SHORT_ROWS, Entries, Place, product, relayout
from strata.pack.formats import by_name
from strata.pack.lanes import gemv as exact
from tests.block_data import MODES, random_activations, random_rows
from tests.canonical.call import assert_same, check_guards, room
from tests.gpu.run_on_cpu import address, needs_compiler, run_all
from tests.test_gpu_combine import Down as Matrices
from tests.test_gpu_combine import Window
from tests.test_gpu_experts import ELSEWHERE, HERE, draw
from tests.test_gpu_gemv import aligned, area_of

pytestmark = needs_compiler
E, ROWS = 5, 8 * 21
"""Rows: tiles that are full, and one whose last warps have nothing to do."""


class Down:
    """E down matrices of a format with a kernel for its short rows."""

    def __init__(self, name: str, mode: str = "plain"):
        self.format, self.K = by_name(name), SHORT_ROWS[name]
        self.raw = [random_rows(self.format, ROWS, self.K, mode, seed=e) for e in range(E)]
        relaid = [relayout(self.format, raw) for raw in self.raw]
        self.stride = -(-relaid[0].size // 256) * 256
        self.memory = aligned(np.concatenate([np.resize(r, self.stride) for r in relaid]))
        self.table = np.zeros((E, 3), np.uint64)

    def place(self, by_table: bool) -> Place:
        """Addresses as they are for the next run, on a device too."""
        if not by_table:
            return Place(address(self.memory), self.stride)
        self.table[:, 2] = address(self.memory) + np.arange(E, dtype=np.uint64) * np.uint64(self.stride)
        return Place(table=address(self.table), part=2)

    def launches(self, x, ids, y, by_table=False, **more):
        area = area_of(x, self.format.group)
        entries = Entries(address(ids), ids.size, len(ids), **more)
        return area, product(self.format, self.place(by_table), ROWS, area.places, address(y), entries=entries)

    def wanted(self, x, ids) -> np.ndarray:
        area = area_of(x, self.format.group)
        return np.stack([exact(self.format, self.raw[e], c, s)
                         for e, c, s in zip(ids.reshape(-1), area.codes, area.scales, strict=True)])  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", sorted(SHORT_ROWS))
def test_same_bits(name, mode, monkeypatch):
    """Experts of one, two, three and four rows of a window, found by a table or by a stride, whatever a block takes."""
    down = Down(name, mode)
    for T in (1, 2, 4, 6):
        ids = draw(T, 3, E, T)
        x = random_activations(ids.size, down.K, mode, seed=T)
        monkeypatch.setattr(package, "SHORT_PAIRS_OF_ONE", 3)
        monkeypatch.setattr(package, "SHORT_PAIRS", (16, 5)[T // 2 % 2])
        y = room(ids.size, ROWS)
        _area, launches = down.launches(x, ids, y, by_table=T == 2)
        assert [one.kernel.partition("<")[0] for one in launches] == ["short_rows"]
        run_all(launches, reverse=T == 4)
        check_guards(y)
        assert_same(y, down.wanted(x, ids), f"{name}, T {T}, {mode}")


@pytest.mark.parametrize("T", [1, 4])
def test_entries_that_do_not_count(T):
    """Outputs of entries computed elsewhere are zeros; what has no job is left as it is."""
    down = Down("IQ4_NL")
    ids = draw(T, 4, E, T)
    x = random_activations(ids.size, down.K, "plain", seed=T)
    wanted, n = down.wanted(x, ids), ids.size
    for seed in range(3):
        decisions = np.random.default_rng(seed).integers(0, 2, n).astype(np.uint8)
        mine = decisions == HERE
        y = room(n, ROWS)
        _area, launches = down.launches(x, ids, y, decisions=address(decisions), take=1 << HERE)
        run_all(launches)
        check_guards(y)
        assert_same(y[mine], wanted[mine])
        assert (decisions[~mine] == ELSEWHERE).all() and not y[~mine].any()

        first = {int(e): i for i, e in reversed(list(enumerate(ids.reshape(-1)))) if e % 2}
        jobs = np.array([len(first), *first.values(), *[7] * (n - len(first))], np.int32)
        y = room(n, ROWS)
        _area, launches = down.launches(x, ids, y, jobs=address(jobs), most_jobs=n)
        run_all(launches)
        check_guards(y)
        odd = ids.reshape(-1) % 2 == 1
        assert_same(y[odd], wanted[odd])
        assert (y[~odd].view(np.uint8) == 0x5A).all()


@pytest.mark.parametrize("scaled", [False, True])
def test_sums_over_experts(scaled, monkeypatch):
    """Tiles of other sizes than blocks have rows for, and the result of all experts."""
    monkeypatch.setattr(package, "SHORT_PAIRS_OF_ONE", 3)
    window = Window(Matrices("IQ4_NL", E, D=160, F=640, scaled=scaled), 3, seed=1)
    for reverse in (False, True):
        y, error = window.run(reverse)
        assert error.reported is None
        assert_same(y, window.wanted())


def test_other_shapes_take_the_common_kernel(monkeypatch):
    down = Down("IQ4_NL")
    ids, y = draw(1, 3, E), room(3, ROWS)
    x = random_activations(3, down.K, "plain", seed=0)
    area, (one,) = down.launches(x, ids, y)
    entries = Entries(address(ids), 3, 1)
    (odd,) = product(down.format, down.place(False), ROWS - 4, area.places, address(y), entries=entries)
    monkeypatch.setattr(package, "SHORT_COLUMNS", 0)
    _area, (off,) = down.launches(x, ids, y)
    assert [k.kernel.partition("<")[0] for k in (one, odd, off)] == ["short_rows", "product", "product"]
