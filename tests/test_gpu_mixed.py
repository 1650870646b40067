"""Matrices of different formats in one launch: the bits of each product alone."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from strata.base import arithmetic
from strata.base.errors import BadArgument
from strata.gpu.gemv import choices, relayout
from strata.gpu.gemv.mixed import HELD_K, HELD_SUM_BYTES, KINDS, Q6_MOST_ROWS, Part, mixed
from strata.gpu.launch import Launch, Source
from strata.pack.formats import by_name
from tests.block_data import random_activations, random_rows
from tests.canonical.call import assert_same, check_guards, room
from tests.gpu.run_on_cpu import ON_DEVICE, address, needs_compiler, run, run_all
from tests.test_gpu_float_gemv import aligned as aligned_floats
from tests.test_gpu_float_gemv import stored
from tests.test_gpu_gemv import aligned, area_of, wanted

pytestmark = needs_compiler
QUANTISED = [name for name in KINDS if by_name(name).group]


def check(
    shapes: list[tuple[str, int]], T: int, K: int, reverse: bool = False, races: bool = False, other: Path | None = None
) -> Launch:
    """other: a text with the kernels as cards without background copies have them."""
    x = aligned_floats(random_activations(T, K, "mid", seed=T))
    groups = {by_name(name).group for name, _ in shapes} - {0}
    areas = {g: area_of(x, g) for g in groups}
    parts, expected, outputs, keep = [], [], [], []
    for i, (name, rows) in enumerate(shapes):
        format, y = by_name(name), room(T, rows)
        if format.group:
            raw = random_rows(format, rows, K, "mid", seed=i)
            data = aligned(relayout(format, raw))
            expected.append(wanted(format, raw, x))
        else:
            data, values = stored(np.random.default_rng(i).standard_normal((rows, K), np.float32), name)
            expected.append(arithmetic.dot_float(values[None], x[:, None]))
        keep.append(data)
        outputs.append(y)
        parts.append(Part(format, address(data), rows, address(y)))
    (launch,) = mixed(address(x), T, K, {g: a.places for g, a in areas.items()}, parts)
    if other:
        run(replace(launch, source=Source(str(other), launch.source.instances), ring_bytes=0,
                    shared_bytes=launch.shared_bytes - launch.ring_bytes), races=races)  # fmt: skip
    elif races:
        run(launch, races=True)
    else:
        run_all([launch], reverse=reverse)
    for (name, rows), y, w in zip(shapes, outputs, expected, strict=True):
        check_guards(y)
        assert_same(y, w, f"{name}, {rows} rows, T {T}")
    return launch


@pytest.mark.parametrize("T", [1, 2, 3, 4, 7, 8])
def test_lists_of_releases(T):
    check([("BF16", 6), ("BF16", 6), ("IQ4_XS", 40), ("Q4_K", 24)], T, 768)
    check([("F32", 1), ("F16", 9), ("Q6_K", 7), ("Q5_K", 8), ("Q8_0", 33)], T, 512, reverse=True)


@pytest.mark.parametrize("name", QUANTISED)
def test_every_format(name):
    for T in (1, 2, 4):
        check([(name, 13), (name, 5)], T, 2560 if T == 1 else 512)


@pytest.mark.parametrize("T", [2, 3, 4, 5, 8])
def test_tensor_cores(T):
    """Matrices of every format that goes there anywhere in a list, units behind the last row of a matrix."""
    lists = (
        [("BF16", 3), ("F32", 9), ("Q4_K", 77)],
        [("Q4_K", 5), ("F32", 13), ("Q4_K", 66), ("F16", 1), ("Q4_K", 70)],
        [("BF16", 6), ("IQ4_XS", 80), ("BF16", 17), ("Q3_K", 66), ("Q4_K", 18)],
        [("Q6_K", 35), ("Q5_K", 9), ("F32", 1), ("IQ4_XS", 65)],
        [("Q6_K", 1), ("Q3_K", 129), ("Q6_K", 4)],
    )
    for i, shapes in enumerate(lists):
        launch = check(shapes, T, 512 if i else 1280, reverse=i == T % 3)
        assert launch.block[0] == 256 and launch.shared_bytes >= 10240
        blocks = sum(-(-rows // {"Q6_K": 32, "F32": 16, "F16": 16, "BF16": 16}.get(name, 64)) for name, rows in shapes)
        assert launch.grid[:2] == (-(-T // 4), blocks)


@pytest.mark.parametrize("T", [2, 3, 4, 6, 8])
def test_held_rows(T):
    """BF16 of the width that blocks hold in registers: rows that fill a block or end in it, others beside them."""
    launch = check([("BF16", 20), ("BF16", 6), ("IQ4_XS", 9), ("BF16", 64), ("Q4_K", 5)], T, HELD_K, reverse=T == 6)
    assert launch.grid[1] == 2 + 1 + 1 + 4 + 1
    launch = check([("BF16", 4), ("F16", 4), ("IQ4_XS", 5)], T, HELD_K)
    assert launch.shared_bytes - launch.ring_bytes == HELD_SUM_BYTES


def test_tensor_cores_or_not(monkeypatch):
    """One column, long rows, other formats and much of Q6_K stay as they are; all if no columns are enough."""
    shapes = [("BF16", 6), ("Q4_K", 24)]
    assert check(shapes, 4, 5120).shared_bytes > 40000
    assert check(shapes, 2, 768).kernel == "mixed<4, true>" and check(shapes, 1, 768).kernel == "mixed<1>"
    assert check(shapes, 4, 5376).shared_bytes == 0
    assert check([("BF16", 6), ("Q8_0", 9), ("Q4_K", 24)], 4, 768).shared_bytes == 0
    assert check([("BF16", 6), ("Q3_K", 24)], 4, 768).shared_bytes == check([("Q3_K", 24)], 4, 5632).shared_bytes == 0
    assert check([("IQ4_XS", 24)], 4, 5376).shared_bytes == check([("Q5_K", 9)], 4, 4864).shared_bytes == 0
    assert check([("BF16", 6), ("Q6_K", 9)], 4, 768).shared_bytes == 0
    assert check([("Q6_K", Q6_MOST_ROWS + 1), ("Q4_K", 8)], 4, 256).shared_bytes == 0
    assert check([("BF16", 6), ("F32", 9)], 4, 768).shared_bytes == 0
    monkeypatch.setattr(choices, "HALF_FROM", 99)
    assert check(shapes, 4, 768).shared_bytes == check([("IQ4_XS", 24)], 4, 768).shared_bytes == 0


@pytest.mark.skipif(ON_DEVICE, reason="a kernel as older cards have it")
def test_two_stages_as_turing_has_them(tmp_path):
    """Every format on tensor cores in half of the rings' memory, rows of fewer chunks than that and of more."""
    text = tmp_path / "mixed.cu"
    text.write_text('#define HALF_STAGES 2\n#include "gemv/mixed.cu"\n')
    for K in (512, 1536, HELD_K):
        check([("BF16", 20), ("Q3_K", 70), ("IQ4_XS", 9), ("Q6_K", 5)], 3, K, races=True, other=text)
        check([("Q4_K", 21), ("BF16", 3), ("Q5_K", 66)], 7, K, races=True, other=text)


@pytest.mark.skipif(ON_DEVICE, reason="the device does not tell races")
def test_threads_do_not_race():
    check([("BF16", 6), ("Q4_K", 40), ("F32", 20), ("Q4_K", 7)], 7, 512, races=True)
    check([("BF16", 6), ("Q3_K", 40), ("Q6_K", 20), ("IQ4_XS", 7)], 7, 512, races=True)
    check([("BF16", 20), ("IQ4_XS", 7)], 3, HELD_K, races=True)


def test_many_units_and_one_part():
    check([("F32", 70), ("Q8_0", 1)], 1, 64)
    check([("Q3_K", 1030)], 1, 256)


def test_refusals():
    q8, x = by_name("Q8_0"), 64
    with pytest.raises(BadArgument, match="list of matrices"):
        mixed(x, 1, 256, {}, [Part(by_name("IQ3_XXS"), 64, 4, 64)])
    with pytest.raises(BadArgument, match="list of matrices"):
        mixed(x, 1, 256, {}, [Part(by_name("F32"), 64, 4, 64)] * 6)
    with pytest.raises(BadArgument, match="activations"):
        mixed(x, 1, 256, {}, [Part(q8, 64, 4, 64)])
    with pytest.raises(BadArgument, match="aligned"):
        mixed(x + 4, 1, 256, {}, [Part(by_name("F32"), 64, 4, 64)])
