"""Down products of experts with short rows: the kernel of its own, run on the CPU, against the lane rules."""

import ctypes
import mmap

import numpy as np
import pytest

from strata.gpu import early_launch, mailbox
from strata.gpu.gemv import Entries, Place, choices, product, relayout
from strata.gpu.gemv.sources import SHORT_VALUES
from strata.pack.formats import by_name
from strata.pack.lanes import gemv as exact
from tests.block_data import MODES, random_activations, random_rows
from tests.canonical.call import assert_same, check_guards, room
from tests.gpu.run_on_cpu import ON_DEVICE, address, mirrors, needs_compiler, run_all
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
        self.format, self.K = by_name(name), SHORT_VALUES[name]
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
@pytest.mark.parametrize("name", sorted(SHORT_VALUES))
def test_same_bits(name, mode, monkeypatch):
    """Experts of one, two, three and four rows of a window, found by a table or by a stride, whatever a block takes."""
    down = Down(name, mode)
    for T in (1, 2, 4, 6):
        ids = draw(T, 3, E, T)
        x = random_activations(ids.size, down.K, mode, seed=T)
        monkeypatch.setattr(choices, "SHORT_PAIRS_OF_ONE", 3)
        monkeypatch.setattr(choices, "SHORT_PAIRS", (16, 5)[T // 2 % 2])
        y = room(ids.size, ROWS)
        _area, launches = down.launches(x, ids, y, by_table=T == 2, experts=E)
        assert [one.kernel.partition("<")[0] for one in launches] == ["short_rows"]
        run_all(launches, reverse=T == 4)
        check_guards(y)
        assert_same(y, down.wanted(x, ids), f"{name}, T {T}, {mode}")


PAGE, GAP = 1 << 16, 1 << 20
FAR = 1 << 28
"""An id so far out of range that a look at what a table has for it ends the process."""


def before_a_gap(a: np.ndarray) -> np.ndarray:
    """A copy at the end of a page: a look at one of 2^18 words behind it ends the process too."""
    pages = mmap.mmap(-1, PAGE + GAP)
    memory = np.frombuffer(pages, np.uint8, PAGE)
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(memory.ctypes.data + PAGE), ctypes.c_size_t(GAP), 0) == 0
    copy = memory[PAGE - a.nbytes :].view(a.dtype).reshape(a.shape)
    copy[:] = a
    return copy


@pytest.mark.parametrize("by_table", [False, True])
@pytest.mark.parametrize("T", [1, 3, 4])
@pytest.mark.parametrize("seen", [0, 3, E, -1, FAR, -FAR])
def test_guesses(seen, T, by_table):
    """A look at ids in front of the wait sees the right ones, others, or what was in memory before there were any."""
    down = Down("IQ4_NL")
    for expert in (0, 3):
        ids = np.full((T, 1), expert, np.int32)
        x, y = random_activations(T, down.K, "plain", seed=T), room(T, ROWS)
        _area, launches = down.launches(x, ids, y, by_table, experts=E)
        run_all(launches, peeked=seen)
        check_guards(y)
        assert_same(y, down.wanted(x, ids))


@pytest.mark.parametrize("kernel", ["short_rows", "product"])
@pytest.mark.parametrize("seen", [1, E, -1, FAR | 3, -FAR, FAR | 0xFFFF])
def test_guesses_by_a_table(kernel, seen, monkeypatch):
    """One column, jobs among them: their list may be old too. And nobody guesses who does not know how many experts
    there are."""
    down, ids = Down("IQ4_NL"), before_a_gap(np.array([[3, 0, 2]], np.int32))
    if kernel == "product":
        monkeypatch.setattr(choices, "SHORT_COLUMNS", 0)
    x, jobs = random_activations(3, down.K, "plain", seed=1), np.array([3, 0, 1, 2], np.int32)
    for experts, by_jobs in ((E, False), (0, False), (E, True)):
        y = room(3, ROWS)
        more = {"jobs": address(jobs), "most_jobs": 3} if by_jobs else {}
        _area, launches = down.launches(x, ids, y, True, experts=experts, **more)
        assert [one.kernel.partition("<")[0] for one in launches] == [kernel]
        run_all(launches, peeked=seen)
        check_guards(y)
        assert_same(y, down.wanted(x, ids))


@pytest.mark.gpu
@pytest.mark.skipif(not ON_DEVICE, reason="needs a GPU: STRATA_TEST_DEVICE=cuda")
@pytest.mark.parametrize("T", [3, 4])
def test_ids_that_were_others_a_moment_ago(T):
    """Blocks look at ids before the kernel in front has written them, which waits for a long copy."""
    device = mirrors().device
    if early_launch.problem(device.arch, 13000):
        pytest.skip(f"{device.name} starts no kernel early")
    down, n = Down("IQ4_NL"), 1 << 22
    final, long = draw(T, 3, E, T), np.zeros((2, n), np.float32)
    x = random_activations(final.size, down.K, "plain", seed=T)
    for before in (final, final[:, ::-1], (final + 1) % E, np.full_like(final, 2), final - 3, final * 1 << 24):
        ids, y = before.copy(), room(final.size, ROWS)
        _area, launches = down.launches(x, ids, y, experts=E)
        front = mailbox.copy_values(address(long[0]), address(long[1]), n)
        front += mailbox.copy_values(address(final), address(ids), final.size)
        device.graph(front + launches)()
        mirrors().run([])
        assert_same(ids, final)
        assert_same(y, down.wanted(x, final))


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
    monkeypatch.setattr(choices, "SHORT_PAIRS_OF_ONE", 3)
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
    monkeypatch.setattr(choices, "SHORT_COLUMNS", 0)
    _area, (off,) = down.launches(x, ids, y)
    assert [k.kernel.partition("<")[0] for k in (one, odd, off)] == ["short_rows", "product", "product"]
