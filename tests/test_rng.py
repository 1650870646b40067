"""The counter-based generator: known answers of Philox4x32-10, what a draw depends on, uniformity."""

import numpy as np
import pytest

from strata.base.errors import BadArgument
from strata.runtime.rng import ACCEPT, DRAFT, MAX_POSITION, PICK, RESIDUAL, philox4x32, uniform, uniforms


@pytest.mark.parametrize(
    "counter, key, answer",
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter, key, answer):
    assert philox4x32(counter, key) == answer


def test_uniform_reads_seed_position_and_stream():
    seed, position = 0x0123456789ABCDEF, 5 + (7 << 32)
    a, b, _, _ = philox4x32((5, 7 + (1 << 30), 0, 0), (0x89ABCDEF, 0x01234567))
    assert uniform(seed, position, ACCEPT) == ((b << 32 | a) >> 11) / 2**53
    values = {uniform(s, p, stream) for s in (0, 1, 2**64 - 1) for p in (0, 1, MAX_POSITION)
              for stream in (PICK, DRAFT, ACCEPT, RESIDUAL)}  # fmt: skip
    assert len(values) == 36
    many = uniforms(9, np.arange(100_000), DRAFT)
    assert many[777] == uniform(9, 777, DRAFT) and many.min() >= 0 and many.max() < 1
    counts = np.bincount((many * 64).astype(int), minlength=64)
    expected = counts.sum() / 64
    assert ((counts - expected) ** 2 / expected).sum() < 103.442  # 99.9 % point for 63 degrees of freedom
    for bad in (np.array([-1]), np.array([2**61]), np.array([0.5])):
        with pytest.raises(BadArgument):
            uniforms(1, bad)
