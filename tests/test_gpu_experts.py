"""Products of experts on the GPU's code, run on the CPU: whole experts by the definition, whatever shares a block."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from strata.base import arithmetic
from strata.base.errors import BadArgument
from strata.base.program import NOT_FINITE
from strata.gpu.activations import Activations
from strata.gpu.error_word import where
from strata.gpu.experts_ends import combine, swiglu
from strata.gpu.gemv import Entries, Hidden, Place, product, relayout
from strata.pack.formats import BlockFormat, by_name
from strata.pack.lanes import gemv as exact
from tests.block_data import random_rows
from tests.canonical import experts as reference
from tests.canonical.call import LAYER, assert_same, check_guards, plain, room
from tests.gpu.run_on_cpu import ActivationArea, ErrorWord, address, needs_compiler, run_all
from tests.test_gpu_gemv import aligned, area_of

pytestmark = needs_compiler
WHERE = where(4, LAYER)
HERE, ELSEWHERE = 1, 0


def quantised(format: BlockFormat):
    """A product as tests.canonical.experts takes it."""

    def run(w: np.ndarray, x: np.ndarray) -> np.ndarray:
        codes, scales, _ = arithmetic.quantise(x, format.group)
        return exact(format, w, codes, scales)

    return run


@dataclass
class Layer:
    """E experts with gate, up (F, D) and down (D, F), raw and relaid, all in one piece of memory or by a table."""

    names: tuple[str, str, str]
    E: int = 5
    D: int = 256
    F: int = 64
    scaled: bool = False
    by_table: bool = False
    mode: str = "plain"

    def __post_init__(self):
        self.formats = tuple(by_name(n) for n in self.names)
        shapes = ((self.F, self.D), (self.F, self.D), (self.D, self.F))
        self.raw = [[random_rows(f, *shapes[p], self.mode, seed=97 * p + e) for e in range(self.E)]
                    for p, f in enumerate(self.formats)]  # fmt: skip
        self.factors = np.random.default_rng(0).uniform(0.5, 2, (3, self.E)).astype(np.float32)
        relaid = [[relayout(f, m) for m in part] for f, part in zip(self.formats, self.raw, strict=True)]
        self.strides = [-(-part[0].size // 256) * 256 for part in relaid]
        self.memory = []
        for part, stride in zip(relaid, self.strides, strict=True):
            padded = np.zeros((self.E, stride), np.uint8)
            padded[:, : part[0].size] = part
            self.memory.append(aligned(padded.reshape(-1)))
        self.table = np.zeros((self.E, 3), np.uint64)

    def place(self, part: int, expert: int | None = None) -> Place:
        if expert is not None:
            return Place(address(self.memory[part]) + expert * self.strides[part])
        if self.by_table:
            for p in range(3):
                self.table[:, p] = np.uint64(address(self.memory[p])) + np.arange(self.E, dtype=np.uint64) * np.uint64(
                    self.strides[p]
                )
            return Place(table=address(self.table), part=part)
        return Place(address(self.memory[part]), self.strides[part])

    def outputs(self, x: np.ndarray, ids: np.ndarray | None, decisions=None, together=True, reverse=False, expert=None):
        """(entries, D) outputs before factors of down and weights, and what was reported."""
        T = len(x)
        n = T if ids is None else ids.size
        gate, up, down = self.formats
        x_areas = {f.group: area_of(x, f.group) for f in (gate, up)}
        h, out, error = ActivationArea(n, self.F, down.group), room(n, self.D), ErrorWord()
        entries = None
        if ids is not None:
            entries = Entries(address(ids), n, T, 0 if decisions is None else address(decisions), 1 << HERE)
        factors = address(self.factors) if self.scaled and ids is not None else 0
        launches = []
        if together:
            hidden = Hidden(self.place(1, expert), h.places, error.address, WHERE, factors, self.E)
            launches += product(
                gate, self.place(0, expert), self.F, x_areas[gate.group].places, entries=entries, hidden=hidden
            )
        else:
            g, u = room(n, self.F), room(n, self.F)
            for part, side in ((0, g), (1, u)):
                f = self.formats[part]
                launches += product(
                    f, self.place(part, expert), self.F, x_areas[f.group].places, address(side), entries=entries
                )
            launches += swiglu(address(g), address(u), n, self.F, h.places, error.address, WHERE,
                               ids=0 if ids is None else address(ids), g_scales=factors,
                               u_scales=factors and factors + 4 * self.E)  # fmt: skip
        launches += product(down, self.place(2, expert), self.D, h.places, address(out), entries=entries)
        run_all(launches, reverse=reverse)
        check_guards(out)
        return out, error.reported

    def wanted(self, x: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """(T, K, D)."""
        products = [quantised(f) for f in self.formats]
        out = np.empty((*ids.shape, self.D), np.float32)
        for t, row in enumerate(ids):
            for j, e in enumerate(row):
                s = self.factors[:, e] if self.scaled else (1, 1, 1)
                out[t, j] = reference.expert(x[t], [part[e] for part in self.raw], products, s)
        return out


def draw(T: int, K: int, E: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.stack([rng.permutation(E)[:K] for _ in range(T)]).astype(np.int32)


TOGETHER = [
    ("Q4_K", "Q4_K", "IQ4_NL"),
    ("IQ3_XXS", "IQ3_XXS", "Q2_0"),
    ("Q8_0", "Q8_0", "Q8_0"),
    ("Q5_1", "Q5_1", "MXFP4"),
]


@pytest.mark.parametrize("names", TOGETHER, ids="-".join)
@pytest.mark.parametrize("T", [1, 2, 4, 8])
def test_experts(names, T):
    """Five experts for three choices: groups of one row and of many, up to more than four."""
    layer = Layer(names, by_table=T == 4)
    x, ids = plain(np.random.default_rng(T), T, layer.D), draw(T, 3, layer.E, T)
    out, reported = layer.outputs(x, ids, reverse=T == 2)
    assert reported is None
    assert_same(out.reshape(T, 3, -1), layer.wanted(x, ids))


@pytest.mark.parametrize(
    "names", [("Q4_K", "Q5_K", "Q5_0"), ("Q6_K", "Q6_K", "Q4_K"), ("Q8_0", "Q4_K", "Q3_K")], ids="-".join
)
@pytest.mark.parametrize("T", [1, 5])
def test_experts_in_steps(names, T):
    """Formats that differ, or a down product with groups of 256."""
    layer = Layer(names, F=256, scaled=T == 5)
    x, ids = plain(np.random.default_rng(T), T, layer.D), draw(T, 3, layer.E, T)
    out, reported = layer.outputs(x, ids, together=False)
    assert reported is None
    assert_same(out.reshape(T, 3, -1), layer.wanted(x, ids))


@pytest.mark.parametrize("together", [True, False])
def test_factors_of_experts(together):
    layer = Layer(("NVFP4", "NVFP4", "NVFP4"), scaled=True)
    x, ids = plain(np.random.default_rng(2), 3, layer.D), draw(3, 4, layer.E)
    assert_same(layer.outputs(x, ids, together=together)[0].reshape(3, 4, -1), layer.wanted(x, ids))


@pytest.mark.parametrize("T", [1, 3, 6])
def test_one_expert_for_all_rows(T):
    """The shared expert, and what every row gets from it alone."""
    layer = Layer(("IQ4_XS", "IQ4_XS", "Q5_0"), E=2, F=96)
    x = plain(np.random.default_rng(T), T, layer.D)
    out, reported = layer.outputs(x, None, expert=1)
    assert reported is None
    assert_same(out, layer.wanted(x, np.ones((T, 1), np.int32))[:, 0])
    for t in range(T):
        assert_same(layer.outputs(x[t : t + 1], None, expert=1)[0][0], out[t], f"row {t} alone")


@pytest.mark.parametrize("E", [3, 40])
def test_rows_do_not_see_each_other(E):
    """All rows with nearly the same experts, and hardly any shared: a row alone, another order of rows."""
    layer = Layer(("Q4_0", "Q4_0", "Q4_1"), E=E, D=64, F=32)
    x, ids = plain(np.random.default_rng(E), 8, 64), draw(8, 3, E)
    whole = layer.outputs(x, ids)[0].reshape(8, 3, -1)
    for t in (0, 5):
        assert_same(layer.outputs(x[t : t + 1], ids[t : t + 1])[0], whole[t])
    order = np.random.default_rng(1).permutation(8)
    mixed = layer.outputs(np.ascontiguousarray(x[order]), np.ascontiguousarray(ids[order]))[0]
    assert_same(mixed.reshape(8, 3, -1), whole[order])


def test_more_entries_than_a_warp():
    layer = Layer(("Q4_0", "Q4_0", "Q4_0"), E=30, D=64, F=32)
    x, ids = plain(np.random.default_rng(3), 7, 64), draw(7, 25, 30)
    assert_same(layer.outputs(x, ids)[0].reshape(7, 25, -1), layer.wanted(x, ids))


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("T", [1, 4])
def test_entries_decided_elsewhere(T, together):
    """What is computed here and what elsewhere add up to the same bits, whatever the decisions."""
    layer = Layer(("Q4_K", "Q4_K", "IQ4_NL"), D=256)
    rng = np.random.default_rng(T)
    x, ids, K = plain(rng, T, layer.D), draw(T, 4, layer.E, T), 4
    weights, gate, shared = rng.uniform(0, 1, (T, K)).astype(np.float32), plain(rng, T), plain(rng, T, layer.D)
    wanted = layer.wanted(x, ids)
    expected = np.stack([reference.combine(weights[t], wanted[t], [1] * K, gate[t], shared[t])[0] for t in range(T)])
    for seed in range(3):
        decisions = np.random.default_rng(seed).integers(0, 2, (T, K)).astype(np.uint8)
        out, reported = layer.outputs(x, ids, decisions, together)
        assert reported is None
        out = out.reshape(T, K, -1)
        assert_same(out[decisions == HERE], wanted[decisions == HERE])
        assert not out[decisions == ELSEWHERE].any()
        terms = arithmetic.combine_terms(weights[..., None], wanted)[0]
        extra = np.ascontiguousarray(np.where(decisions[..., None] == ELSEWHERE, terms, 0).sum(1))
        y, error = room(T, layer.D), ErrorWord()
        places = (address(a) for a in (out, ids, weights, shared, gate, y))
        more = {"mine": address(decisions), "extra": address(extra)}
        run_all(combine(*places, T, K, layer.D, error.address, WHERE, **more))
        assert error.reported is None
        assert_same(y, expected)


def test_a_value_that_is_not_finite_names_its_expert():
    layer = Layer(("Q8_0", "Q8_0", "Q8_0"), D=64, F=32)
    x, ids = plain(np.random.default_rng(1), 2, 64), np.array([[3, 1], [1, 2]], np.int32)
    x[1] *= np.float32(1e35)
    for part in range(2):  # gate and up of expert 2 overflow, those of expert 1 too, as row 1 is so large
        layer.raw[part][2].reshape(32, 2, 34)[5, :, :2] = np.array([60000], np.float16).view(np.uint8)
        relaid = relayout(layer.formats[part], layer.raw[part][2])
        layer.memory[part][2 * layer.strides[part] :][: relaid.size] = relaid
    assert layer.outputs(x, ids)[1] in ((NOT_FINITE, LAYER, 1), (NOT_FINITE, LAYER, 2))
    assert layer.outputs(x[:1], ids[:1])[1] is None


def test_refusals():
    x, q8, k4 = Activations.at(1 << 20, 2, 256, 256), by_name("Q8_0"), by_name("Q4_K")
    hidden = Hidden(Place(64), Activations.at(1 << 21, 2, 256, 256), 64, WHERE)
    with pytest.raises(BadArgument, match="gate and up"):
        product(k4, Place(64), 256, x, hidden=hidden)
    with pytest.raises(BadArgument, match="table"):
        product(k4, Place(table=64), 256, x, 64)
    with pytest.raises(BadArgument, match="goes"):
        product(k4, Place(64), 256, x)
    with pytest.raises(BadArgument, match="columns"):
        product(q8, Place(64), 256, Activations.at(1 << 20, 2, 64, 32), 64, entries=Entries(64, 5, 2))
