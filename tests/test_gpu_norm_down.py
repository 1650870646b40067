"""The norm of hyper-connection streams with its products in one kernel: the bits of the ops one by one."""

import numpy as np
import pytest

from strata.base import arithmetic
from strata.base.errors import BadArgument
from strata.base.program import NOT_FINITE
from strata.gpu.error_word import where
from strata.gpu.float_gemv import FloatMatrix
from strata.gpu.launch import Launch
from strata.gpu.norm_down import fits, norm_down, norm_down_cluster
from tests.canonical import hyper_connection as reference
from tests.canonical.call import LAYER, assert_same, check_guards, guarded, plain, room
from tests.gpu.run_on_cpu import ErrorWord, address, needs_clusters, needs_compiler, run_all
from tests.test_gpu_float_gemv import stored

pytestmark = needs_compiler
EPS = 1e-6


class Inputs:
    """Streams, a branch, and one or two matrices; `run` gives what the kernel wrote."""

    def __init__(self, rng, T, C, D, rows, kinds):
        self.T, self.C, self.D, self.rows = T, C, D, rows
        self.x, self.y, self.a, self.w = plain(rng, T, C, D), plain(rng, T, D), plain(rng, T, C), plain(rng, C, D)
        pairs = [stored(plain(rng, n, C * D), kind) for n, kind in zip(rows, kinds, strict=True)]
        self.data, self.values = zip(*pairs, strict=True)
        self.kinds, self.error = kinds, ErrorWord()

    def run(self, add: bool, squeeze: int, reverse: bool = False, launcher=norm_down):
        streams = guarded(self.x)
        normed, out = room(self.T, self.C, self.D), [room(self.T, n) for n in self.rows]
        matrices = [
            FloatMatrix(kind, address(data), n, address(y), 0 if i else squeeze)
            for i, (kind, data, n, y) in enumerate(zip(self.kinds, self.data, self.rows, out, strict=True))
        ]
        more = {"y": address(self.y), "a": address(self.a)} if add else {}
        run_all(launcher(address(streams), address(self.w), address(normed), self.T, self.C, self.D, EPS, matrices,
                         self.error.address, where(3, LAYER), where(5, LAYER), **more), reverse=reverse)  # fmt: skip
        for array in (streams, normed, *out):
            check_guards(array)
        assert_same(streams, self.x, "the streams themselves")
        return normed, out

    def wanted(self, add: bool, squeeze: int):
        x = reference.add(self.x, self.y, self.a) if add else self.x
        normed = reference.norm(x, self.w, EPS)
        flat = normed.reshape(self.T, -1)
        out = [arithmetic.dot_float(v[None], flat[:, None]) for v in self.values]
        if squeeze:
            out[0] = reference.squeeze(out[0], squeeze)
        return normed, out

    def check(self, add: bool, squeeze: int, reverse: bool = False, launcher=norm_down):
        normed, out = self.run(add, squeeze, reverse, launcher)
        expected, products = self.wanted(add, squeeze)
        assert_same(normed, expected)
        for y, wanted in zip(out, products, strict=True):
            assert_same(y, wanted)
        assert self.error.reported is None


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize(("T", "C", "D", "rows", "kinds"), [
    (1, 4, 256, (32, 4), ("BF16", "BF16")),
    (2, 4, 256, (7, 3), ("F16", "F32")),
    (3, 3, 256, (2,), ("F32",)),
    (1, 1, 256, (1, 1), ("BF16", "F16")),
    (1, 4, 2560, (20, 4), ("BF16", "BF16")),
    (2, 2, 2560, (5,), ("F16",)),
    (2, 4, 2560, (5, 4), ("BF16", "BF16")),
    (1, 3, 256, (4, 2), ("F32", "BF16")),
])  # fmt: skip
def test_same_bits(add, T, C, D, rows, kinds):
    inputs = Inputs(np.random.default_rng(T + C + D), T, C, D, rows, kinds)
    inputs.check(add, C if T < 3 else 0, reverse=T == 2)


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize(("C", "rows", "kinds"), [
    (4, (20, 4), ("BF16", "BF16")),
    (2, (5, 4), ("F16", "F32")),
    (3, (4,), ("BF16",)),
    (1, (3, 1), ("F32", "BF16")),
])  # fmt: skip
def test_same_bits_with_weights_in_registers(add, C, rows, kinds):
    inputs = Inputs(np.random.default_rng(C), 1, C, 2560, rows, kinds)
    launches: list[Launch] = []

    def launcher(*given, **more):
        launches.extend(norm_down(*given, near=True, **more))
        return launches

    inputs.check(add, C, launcher=launcher)
    assert [one.kernel for one in launches] == ["norm_down<10>" if kinds[0] == "F32" else "norm_down<10, true>"]


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize(("T", "D", "rows"), [
    (3, 256, (32, 4)),
    (4, 256, (11,)),
    (8, 256, (12, 13)),
    (1, 256, (1, 1)),
    (4, 2560, (26, 4)),
    (5, 2560, (5,)),
])  # fmt: skip
def test_same_bits_by_clusters(add, T, D, rows):
    needs_clusters()
    C = 4
    inputs = Inputs(np.random.default_rng(T + C + D), T, C, D, rows, ["BF16"] * len(rows))
    inputs.check(add, C if T != 3 else 0, reverse=T == 4, launcher=norm_down_cluster)


@pytest.mark.parametrize("launcher", [norm_down, norm_down_cluster])
def test_errors_name_their_op_and_row(launcher):
    if launcher is norm_down_cluster:
        needs_clusters()
    inputs = Inputs(np.random.default_rng(1), 2, 4, 256, (8, 4), ("BF16", "BF16"))
    inputs.x[1, 2, 40] = np.inf
    inputs.run(False, 4, launcher=launcher)
    assert inputs.error.reported == (NOT_FINITE, LAYER, 1)
    assert int(inputs.error.word[0]) >> 48 == 3
    inputs = Inputs(np.random.default_rng(1), 2, 4, 256, (8,), ("BF16",))
    inputs.data[0][5, 9] = 0x7F80  # infinite
    inputs.run(True, 4, launcher=launcher)
    assert inputs.error.reported == (NOT_FINITE, LAYER, 0) and int(inputs.error.word[0]) >> 48 == 5


def test_shapes():
    assert fits(4, 2560, 2) and not fits(5, 2560, 2) and not fits(4, 512, 1) and not fits(4, 2560, 3)
    with pytest.raises(BadArgument, match="streams"):
        norm_down(64, 64, 64, 1, 4, 96, EPS, [FloatMatrix("F32", 64, 1, 64)], 64, where(0, 0), where(1, 0))
    with pytest.raises(BadArgument, match="y and a"):
        norm_down(64, 64, 64, 1, 4, 256, EPS, [FloatMatrix("F32", 64, 1, 64)], 64, where(0, 0), where(1, 0), y=64)
