"""Float products on the GPU's code, run on the CPU: bits of the definition and of the CPU kernels."""

import numpy as np
import pytest

from strata.base import arithmetic
from strata.base.errors import BadArgument
from strata.base.program import NOT_FINITE
from strata.gpu import float_gemv as floats
from strata.gpu.error_word import where
from strata.gpu.float_gemv import TILED_FROM, Branch, FloatMatrix, float_gemv, float_grouped
from tests.canonical import hyper_connection
from tests.canonical.call import assert_same, check_guards, guarded, plain, room, spiked
from tests.gpu.run_on_cpu import ErrorWord, address, needs_compiler, run_all

pytestmark = needs_compiler


def stored(values: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """(bytes as the file has them, 16-byte aligned; the float32 values they stand for)."""
    if kind == "F32":
        data = values
    elif kind == "F16":
        data = values.astype(np.float16)
        values = data.astype(np.float32)
    else:
        data = (values.view(np.uint32) >> 16).astype(np.uint16)
        values = (data.astype(np.uint32) << 16).view(np.float32)
    return aligned(data), values


def aligned(data: np.ndarray) -> np.ndarray:
    raw = np.zeros(data.nbytes + 16, np.uint8)
    start = -raw.ctypes.data % 16
    out = raw[start : start + data.nbytes].view(data.dtype).reshape(data.shape)
    out[...] = data
    return out


def check(rng, T: int, K: int, rows: dict[str, int], draw=plain, reverse=False) -> None:
    x = aligned(draw(rng, T, K))
    matrices, wanted, outputs, keep = [], [], [], []
    for kind, n in rows.items():
        with np.errstate(over="ignore"):
            data, values = stored(draw(rng, n, K), kind.split()[0])
        y = room(T, n)
        keep.append(data)
        matrices.append(FloatMatrix(kind.split()[0], address(data), n, address(y)))
        wanted.append(arithmetic.dot_float(values[None], x[:, None]))
        outputs.append(y)
    run_all(float_gemv(address(x), T, K, matrices), reverse=reverse)
    for y, w in zip(outputs, wanted, strict=True):
        check_guards(y)
        assert_same(y, w, f"T {T}, K {K}")


@pytest.mark.parametrize("K", [8, 16, 24, 32, 40, 64, 256, 264, 320, 504, 512, 640, 2560])
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_short_rows(K, kind):
    rng = np.random.default_rng(K)
    for T in (1, 3):
        check(rng, T, K, {kind: 5}, reverse=T == 3)


@pytest.mark.parametrize("K", [4096, 4104, 6144])
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_long_rows(K, kind):
    rng = np.random.default_rng(K)
    for T in (1, 4):
        check(rng, T, K, {kind: 3}, reverse=T == 4)


@pytest.mark.parametrize("T", range(1, 9))
def test_every_number_of_rows(T):
    rng = np.random.default_rng(T)
    check(rng, T, 264, {"BF16": 9, "F32": 4})
    check(rng, T, 320, {"BF16": 41})
    check(rng, T, 4096, {"BF16": 2})


@pytest.mark.parametrize("T", [17, 32])
def test_more_rows_than_a_window(T):
    check(np.random.default_rng(T), T, 256, {"BF16": 10})


def test_several_matrices_are_one_list_of_rows():
    rng = np.random.default_rng(7)
    check(rng, 2, 64, {"BF16": 3, "F16": 1, "F32": 9, "BF16 b": 4, "F32 b": 2, "F16 b": 17})


@pytest.mark.parametrize("K", [64, 320, 4096])
def test_spiked_values(K):
    check(np.random.default_rng(1), 2, K, {"F32": 8, "BF16": 8, "F16": 8}, spiked)


@pytest.mark.parametrize("K", [256, 264, 320])
@pytest.mark.parametrize("T", [TILED_FROM, 4, 7])
def test_short_rows_four_columns_at_a_time(K, T):
    one = float_gemv(64, T, K, [FloatMatrix("BF16", 64, 37, 64)])
    assert [m.kernel for m in one] == ["float_gemv_tile<BF16_VALUES>"]
    check(np.random.default_rng(K + T), T, K, {"BF16": 37}, spiked, reverse=T == 4)


@pytest.mark.parametrize("few", [True, False])
@pytest.mark.parametrize("T", [1, 2, 3, 4, 5, 9])
def test_rows_that_are_held_before_their_inputs_are_there(T, few, monkeypatch):
    if not few:
        monkeypatch.setattr(floats, "HELD_FEW", 0)
    K, rng = floats.HELD_VALUES[0], np.random.default_rng(T)
    at_once = "1, 4" if few else f"{T if T < 3 else 4}, 1"
    kernel = f"float_gemv_held<{K}, {at_once}>"
    for rows in ({"BF16": 8}, {"BF16": 13, "BF16 b": 1}, {"BF16": 2, "BF16 b": 3}):
        one = float_gemv(64, T, K, [FloatMatrix("BF16", 64, n, 64) for n in rows.values()])
        assert [m.kernel for m in one] == [kernel]
        check(rng, T, K, rows, spiked, reverse=T % 2 == 0)
    for name in ("HELD_FROM", "HELD_FEW_FROM"):
        monkeypatch.setattr(floats, name, 99)
    assert float_gemv(64, T, K, [FloatMatrix("BF16", 64, 8, 64)])[0].kernel.startswith("float_gemv_long")


def test_what_is_not_held():
    K, n = floats.HELD_VALUES[0], floats.HELD_FEW + 1000
    others = (
        (K + 256, [FloatMatrix("BF16", 64, n, 64)]),
        (K, [FloatMatrix("F16", 64, n, 64)]),
        (K, [FloatMatrix("BF16", 64, n, 64), FloatMatrix("F32", 64, 1, 64)]),
        (K, [FloatMatrix("BF16", 64, n, 64)] * 3),
        (K, [FloatMatrix("BF16", 64, n, 64, squeeze=4)]),
    )
    for columns, matrices in others:
        assert "held" not in float_gemv(64, 4, columns, matrices, error=64)[0].kernel


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("per_row", [1, 3])
def test_grouped(kind, per_row):
    rng = np.random.default_rng(per_row)
    n_x, K, rows, ids = 2, 96, 11, np.array([3, 0, 3, 1, 2, 0], np.int32)[: 2 * per_row]
    x = aligned(plain(rng, n_x, K))
    data, values = stored(plain(rng, 4, rows, K), kind)
    y = room(len(ids), rows)
    run_all(float_grouped(kind, address(data), data.nbytes // 4, rows, address(ids), len(ids), address(x), n_x, K,
                          address(y)), reverse=True)  # fmt: skip
    check_guards(y)
    wanted = arithmetic.dot_float(values[ids], x[np.arange(len(ids)) // per_row][:, None])
    assert_same(y, wanted)


@pytest.mark.parametrize("K", [64, 4096])
def test_squeezed_outputs(K):
    rng, T, C = np.random.default_rng(K), 3, 4
    x, w, other = aligned(plain(rng, T, K)), aligned(plain(rng, 9, K)), aligned(plain(rng, 4, K))
    low, y, error = room(T, 9), room(T, 4), ErrorWord()
    matrices = [FloatMatrix("F32", address(w), 9, address(low), C), FloatMatrix("F32", address(other), 4, address(y))]
    run_all(float_gemv(address(x), T, K, matrices, error.address, where(1, 7)))
    check_guards(low)
    assert_same(low, hyper_connection.squeeze(arithmetic.dot_float(w[None], x[:, None]), C))
    assert_same(y, arithmetic.dot_float(other[None], x[:, None]))
    assert error.reported is None
    x[1, 5] = np.inf
    run_all(
        float_gemv(address(x), T, K, [FloatMatrix("F32", address(w), 9, address(low), C)], error.address, where(1, 7))
    )
    assert error.reported == (NOT_FINITE, 7, 1)


@pytest.mark.parametrize(("kind", "K"), [("BF16", 320), ("F16", 264), ("BF16", 32), ("F32", 320)])
@pytest.mark.parametrize("T", [1, 2, 6])
def test_a_branch_is_added_beside_a_product(kind, K, T):
    C, D = 4, 24
    rng = np.random.default_rng(K + T)
    x, streams, y, a = aligned(plain(rng, T, K)), plain(rng, T, C, D), plain(rng, T, D), plain(rng, T, C)
    data, values = stored(plain(rng, C * D, K), kind)
    out, held = room(T, C * D), guarded(streams)
    branch = Branch(address(held), address(y), address(a), D)
    run_all(float_gemv(address(x), T, K, [FloatMatrix(kind, address(data), C * D, address(out))], branch=branch),
            reverse=T == 2)  # fmt: skip
    check_guards(out)
    check_guards(held)
    assert_same(out, arithmetic.dot_float(values[None], x[:, None]))
    assert_same(held, hyper_connection.add(streams, y, a))


def test_products_that_take_no_branch():
    branch = Branch(64, 64, 64, 24)
    for K, rows in ((2560, (96,)), (320, (95,)), (320, (96, 4))):
        with pytest.raises(BadArgument, match="branch"):
            float_gemv(64, 1, K, [FloatMatrix("BF16", 64, n, 64) for n in rows], branch=branch)
