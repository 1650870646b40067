"""How often experts are asked for, by windows and by prompts: two memories that fade."""

from __future__ import annotations

import numpy as np
import pytest

from strata.base.errors import BadArgument
from strata.runtime.simulate import ReplaySlots
from strata.runtime.swaps import SwapRules, Usage, counted_profile
from strata.runtime.tiers import ExpertTiers


def test_usage_fades_once_an_adaptation_and_has_two_memories():
    plain = Usage(1, 2, SwapRules(long_weight=0.0))
    both = Usage(1, 2, SwapRules(long_weight=1.0))
    for usage in (plain, both):
        usage.fresh[0] = 4, 0
        usage.age()
        usage.fresh[0] = 0, 1
    assert plain.score().tolist() == [[np.float32(4) * np.float32(0.7), 1]]
    extra = both.score() - plain.score()
    assert extra[0] == pytest.approx([4 * 0.99 * 0.01 / 0.3, 0.01 / 0.3], rel=1e-5)
    for _ in range(200):
        plain.age()
    assert (plain.score() == 0).all(), "what is forgotten is zero, not subnormal"
    both.favour(np.array([[False, True]]))
    assert both.score()[0, 1] > 1
    steady = Usage(1, 1, SwapRules(long_weight=1.0))
    for _ in range(2000):
        steady.fresh[:] = 3
        steady.age()
    assert steady._short[0, 0] == pytest.approx(7, rel=1e-3) and steady.score()[0, 0] == pytest.approx(16.9, rel=1e-2)


def test_a_prompt_counts_as_its_rows_would_one_by_one():
    rows, rng = 400, np.random.default_rng(3)
    each = rng.integers(0, 5, (2, 7)).astype(np.float32)  # of four rows
    told, counted = Usage(2, 7, SwapRules()), Usage(2, 7, SwapRules())
    for usage in (told, counted):
        usage.fresh[:] = 11
        usage.age()
    for _ in range(rows // 4):
        counted.fresh[:] = each
        counted.age()
    told.read((each * (rows // 4)).astype(np.int32), rows)
    assert told.score() == pytest.approx(counted.score(), rel=1e-4, abs=1e-4)


def test_a_chunk_is_followed_by_swaps():
    profile = counted_profile(np.arange(16).reshape(2, 8) % 5)
    tiers = ExpertTiers(ReplaySlots([2, 2]), profile, n_experts=8, expert_bytes=[1, 1])
    tiers.fill()
    counts = np.zeros((2, 8), np.int32)
    counts[0, [1, 6]] = 512
    tiers.observe_chunk(counts, 256)
    assert tiers.between_windows() > 0
    tiers.settle()
    assert np.flatnonzero(tiers.resident[0]).tolist() == [1, 6]
    assert tiers.counts[0, 6] == 512 and tiers.stats()["lookups"] == 0
    for bad in (counts.astype(np.int64), counts[:1]):
        with pytest.raises(BadArgument, match="counts of a chunk"):
            tiers.observe_chunk(bad, 256)
