"""The sum over experts made by the last blocks of their down product, on the GPU's code run on the CPU: the bits of the
definition, whatever the formats, and memory that is as before."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.base.errors import BadArgument
from strata.base.program import COMBINE_OVERFLOW
from strata.gpu.activations import Activations
from strata.gpu.error_word import where
from strata.gpu.gemv import Combine, Entries, Hidden, Place, combine_bytes, combines, product, relayout
from strata.pack.formats import by_name
from tests.block_data import random_rows
from tests.canonical import experts as reference
from tests.canonical.call import LAYER, assert_same, check_guards, plain, room
from tests.gpu.run_on_cpu import ErrorWord, address, needs_compiler, run_all
from tests.test_gpu_experts import draw, quantised
from tests.test_gpu_gemv import aligned, area_of

pytestmark = needs_compiler
WHERE = where(4, LAYER)
FORMATS = ("IQ4_NL", "Q4_1", "Q8_0", "Q5_1", "NVFP4", "MXFP4", "Q2_0", "IQ4_XS", "Q6_K", "IQ3_XXS", "IQ1_M")


@dataclass
class Down:
    """Down matrices (D, F) of E experts, raw and relaid, all in one piece of memory or by a table."""

    name: str
    E: int
    D: int
    F: int
    scaled: bool = False
    by_table: bool = False
    mode: str = "plain"

    def __post_init__(self):
        self.format = by_name(self.name)
        self.raw = [random_rows(self.format, self.D, self.F, self.mode, seed=e) for e in range(self.E)]
        self.factors = np.random.default_rng(0).uniform(0.5, 2, self.E).astype(np.float32)
        relaid = [relayout(self.format, m) for m in self.raw]
        self.stride = -(-relaid[0].size // 256) * 256
        padded = np.zeros((self.E, self.stride), np.uint8)
        padded[:, : relaid[0].size] = relaid
        self.memory, self.table = aligned(padded.reshape(-1)), np.zeros((self.E, 3), np.uint64)

    def place(self) -> Place:
        if not self.by_table:
            return Place(address(self.memory), self.stride)
        self.table[:, 2] = address(self.memory) + np.arange(self.E, dtype=np.uint64) * np.uint64(self.stride)
        return Place(table=address(self.table), part=2)


class Window:
    """A row that wants K experts: inputs of the down product, and the op's result by the definition."""

    def __init__(self, layer: Down, K: int, seed: int = 0):
        rng = np.random.default_rng(seed)
        self.layer, self.K = layer, K
        self.ids, self.h = draw(1, K, layer.E, seed), plain(rng, K, layer.F)
        self.weights = rng.uniform(0, 1, K).astype(np.float32)
        self.shared, self.gate = plain(rng, layer.D), plain(rng, 1)
        n_sums, n_counters = combine_bytes(layer.D)
        self.sums, self.arrived = room(layer.D, dtype="int64"), np.zeros(n_counters // 4, np.uint32)
        assert self.sums.nbytes == n_sums
        self.sums[:] = 0

    def run(self, reverse: bool = False) -> tuple[np.ndarray, ErrorWord]:
        layer, format = self.layer, self.layer.format
        y, error, h = room(layer.D), ErrorWord(), area_of(self.h, format.group)
        factors = address(layer.factors) if layer.scaled else 0
        sums, arrived, to = address(self.sums), address(self.arrived), address(y)
        ends = Combine(sums, arrived, address(self.weights), address(self.shared), address(self.gate), error.address,
                       WHERE, factors)  # fmt: skip
        entries = Entries(address(self.ids), self.K, 1)
        run_all(product(format, layer.place(), layer.D, h.places, to, entries=entries, combine=ends), reverse=reverse)
        check_guards(y)
        check_guards(self.sums)
        assert not self.sums.any() and not self.arrived.any(), "zeros again"
        return y, error

    def wanted(self) -> np.ndarray:
        layer, multiply, ids = self.layer, quantised(self.layer.format), self.ids[0]
        outputs = np.stack([multiply(layer.raw[e], self.h[j]) for j, e in enumerate(ids)])
        own = layer.factors[ids] if layer.scaled else np.ones(self.K, np.float32)
        return reference.combine(self.weights, outputs, own, self.gate[0], self.shared)[0]


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("by_table", [False, True])
def test_windows_in_a_row(scaled, by_table):
    layer = Down("IQ4_NL", E=5, D=104, F=128, scaled=scaled, by_table=by_table)
    for seed in (1, 21):
        window = Window(layer, 3, seed)
        y, error = window.run(reverse=seed > 20)
        assert error.reported is None
        assert_same(y, window.wanted())


@pytest.mark.parametrize("reverse", [False, True])
def test_short_rows(reverse):
    """Rows of 640 values have a kernel of their own; the last block of a column has fewer rows."""
    window = Window(Down("IQ4_NL", E=4, D=152, F=640, scaled=reverse), 3, 1)
    assert_same(window.run(reverse)[0], window.wanted())


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("mode", ["plain", "mid"])
def test_formats(name, mode):
    layer = Down(name, E=4, D=40, F=256, scaled=name in ("NVFP4", "Q8_0"), mode=mode)
    window = Window(layer, 2, 1)
    assert_same(window.run(reverse=mode == "mid")[0], window.wanted())


@settings(max_examples=12, deadline=None)
@given(K=st.integers(1, 40), D=st.integers(1, 90), seed=st.integers(0, 99))
def test_shapes(K, D, seed):
    """Row tiles that are not full, and more entries than a warp has lanes."""
    layer = Down("Q4_0", E=K + seed % 3, D=D, F=64, scaled=seed % 2 == 1, by_table=seed % 5 == 1)
    window = Window(layer, K, seed)
    assert_same(window.run(reverse=seed % 4 == 1)[0], window.wanted())


@pytest.mark.parametrize("which", ["routed", "shared", "gate"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, 2.0**25])
def test_a_term_beyond_the_limit_counts_as_zero(which, bad):
    layer = Down("Q8_0", E=5, D=24, F=64)
    window = Window(layer, 2)
    window.gate[:] = 50
    if which == "routed":
        window.weights[1] = np.float32(bad) * 1000
    elif which == "shared":
        window.shared[5] = bad
    else:
        window.gate[0] = bad
    y, error = window.run()
    fine = which == "gate" and bad == 2.0**25
    assert error.reported == (None if fine else (COMBINE_OVERFLOW, LAYER, 0)) and np.isfinite(y).all()
    if which == "shared":
        with np.errstate(all="ignore"):
            wanted = window.wanted()
        wanted[5] = y[5]
        assert_same(y, wanted)


def test_which_products_can():
    iq4, q4k, q8, f32 = map(by_name, ("IQ4_NL", "Q4_K", "Q8_0", "F32"))
    assert all(combines(f, 1, 512) for f in (iq4, q4k, q8))
    assert not any(combines(f, T, 512) for f in (iq4, q4k, q8) for T in (2, 4, 8)), "several rows make too many sums"
    assert not combines(f32, 1, 512) and not combines(q8, 1, 12032), "no column in shared memory"


def test_refusals():
    q8, x = by_name("Q8_0"), Activations.at(1 << 20, 4, 64, 32)
    ends = Combine(8, 8, 8, 8, 8, 8, WHERE)
    entries = Entries(64, 4, 1)
    assert len(product(q8, Place(64, 64), 32, x, 64, entries=entries, combine=ends)) == 1
    hidden = Hidden(Place(64, 64), Activations.at(1 << 21, 4, 32, 32), 64, WHERE)
    for more in ({}, {"entries": entries, "hidden": hidden}, {"entries": Entries(64, 4, 1, decisions=64)},
                 {"entries": Entries(64, 4, 1, jobs=64, most_jobs=2)}, {"entries": Entries(64, 4, 2)}):  # fmt: skip
        with pytest.raises(BadArgument, match="combines"):
            product(q8, Place(64, 64), 32, x, 64, combine=ends, **more)
    with pytest.raises(BadArgument, match="combines"):
        product(q8, Place(64, 64), 32, x, 64, 33, entries=entries, combine=ends)
    with pytest.raises(BadArgument, match="terms of one sum"):
        many = Activations.at(1 << 20, 127, 64, 32)
        product(q8, Place(64, 64), 32, many, 64, entries=Entries(64, 127, 1), combine=ends)
