"""Matrices of different formats in one launch: the bits of each product alone."""

import numpy as np
import pytest

from strata.base import arithmetic
from strata.base.errors import BadArgument
from strata.gpu.gemv import relayout
from strata.gpu.gemv.mixed import KINDS, Part, mixed
from strata.pack.formats import by_name
from tests.block_data import random_activations, random_rows
from tests.canonical.call import assert_same, check_guards, room
from tests.gpu.run_on_cpu import address, needs_compiler, run_all
from tests.test_gpu_float_gemv import aligned as aligned_floats
from tests.test_gpu_float_gemv import stored
from tests.test_gpu_gemv import aligned, area_of, wanted

pytestmark = needs_compiler
QUANTISED = [name for name in KINDS if by_name(name).group]


def check(shapes: list[tuple[str, int]], T: int, K: int, reverse: bool = False) -> None:
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
    run_all(mixed(address(x), T, K, {g: a.places for g, a in areas.items()}, parts), reverse=reverse)
    for (name, rows), y, w in zip(shapes, outputs, expected, strict=True):
        check_guards(y)
        assert_same(y, w, f"{name}, {rows} rows, T {T}")


@pytest.mark.parametrize("T", [1, 2, 3, 4, 7, 8])
def test_lists_of_releases(T):
    check([("BF16", 6), ("BF16", 6), ("IQ4_XS", 40), ("Q4_K", 24)], T, 768)
    check([("F32", 1), ("F16", 9), ("Q6_K", 7), ("Q5_K", 8), ("Q8_0", 33)], T, 512, reverse=True)


@pytest.mark.parametrize("name", QUANTISED)
def test_every_format(name):
    for T in (1, 2, 4):
        check([(name, 13), (name, 5)], T, 2560 if T == 1 else 512)


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
