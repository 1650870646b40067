"""Which kernel tier is chosen, and that a forced or restricted one computes the same."""

import os
import subprocess
import sys

import pytest

from strata.base.errors import BadArgument
from strata.cpu.gemv import table
from strata.cpu.tiers import TIERS, VARIABLE, available_tiers, best_tier, chosen_tier, target_features, tiers_of

AVX2 = {"avx2", "fma", "f16c"}
AVX512 = AVX2 | {f"avx512{part}" for part in ("f", "bw", "dq", "vl", "vnni", "vbmi", "bitalg")}

needs_avx2 = pytest.mark.skipif(256 not in available_tiers(), reason="this machine has no AVX2")


def test_tiers_follow_from_features():
    assert tiers_of(set()) == (0,) and tiers_of({"neon", "sse4.2"}) == (0,)
    assert tiers_of(AVX2) == (0, 256) and tiers_of(AVX512) == (0, 256, 512)
    for part in AVX512 - AVX2:
        assert tiers_of(AVX512 - {part}) == (0, 256), part
    for part in AVX2:
        assert tiers_of(AVX512 - {part}) == (0,), part


def test_choice(monkeypatch):
    assert chosen_tier((0, 256, 512), None) == 512 and chosen_tier((0, 256), "") == 256 and chosen_tier((0,), None) == 0
    for tier in TIERS:
        assert chosen_tier(TIERS, f" {tier} ") == tier
    assert [chosen_tier(TIERS, name) for name in ("portable", "AVX2", "avx512")] == [0, 256, 512]
    monkeypatch.setenv(VARIABLE, "0")
    assert best_tier() == 0
    monkeypatch.delenv(VARIABLE)
    assert best_tier() == max(available_tiers()) == table.TIERS[-1]


def test_refusals():
    for wanted in ("128", "avx", "-1", "512.0", "1024"):
        with pytest.raises(BadArgument, match=r"names no kernel tier.*one of portable, avx2, avx512, 0, 256, 512"):
            chosen_tier(TIERS, wanted)
    with pytest.raises(BadArgument, match=r"does not run.*found tier 512.*needed one of 0, 256"):
        chosen_tier((0, 256), "512")
    with pytest.raises(BadArgument, match="does not run"):
        chosen_tier((0,), "256")


def test_features_are_those_of_numba():
    assert tiers_of(target_features()) == available_tiers()


_SAME_BITS = """
import numpy as np
from strata.base import arithmetic as A
from strata.cpu.gemv import float_simd, small512
from strata.cpu.tiers import best_tier
from strata.pack.formats import by_name
from strata.pack.lanes import gemv
from tests.block_data import bits, random_activations, random_rows
from tests.simd_cases import product, records_of

n = 0
for name in small512.FORMATS + float_simd.FORMATS:
    format, x = by_name(name), random_activations(3, 704, "mid")
    raw = random_rows(format, 33, 704, "mid")
    found = product(format, raw, records_of(format, x, None)[0], 704, None)
    if format.group:
        codes, scales, _ = A.quantise(x, 32)
        wanted = [gemv(format, raw, c, d) for c, d in zip(codes, scales)]
    else:
        wanted = [A.dot_float(format.dequantise(raw), row) for row in x]
    assert (bits(found) == bits(np.stack(wanted))).all(), name
    n += found.size
print("tier", best_tier(), "outputs", n)
"""

HASWELL = {
    "NUMBA_CPU_NAME": "haswell",
    "NUMBA_CPU_FEATURES": "+avx,+avx2,+bmi,+bmi2,+f16c,+fma,+lzcnt,+movbe,+popcnt,+sse4.1,+sse4.2,+ssse3",
}


def run(script, **environment):
    clean = {k: v for k, v in os.environ.items() if k != VARIABLE and not k.startswith("NUMBA_CPU")}
    return subprocess.run(
        [sys.executable, "-c", script], env=clean | environment, capture_output=True, text=True, timeout=300
    )


@needs_avx2
@pytest.mark.parametrize("tier", ["256", "0"])
def test_forced_tier_in_a_process(tier):
    done = run(_SAME_BITS, **{VARIABLE: tier})
    assert done.returncode == 0 and f"tier {tier} " in done.stdout, done.stderr[-2000:]


@needs_avx2
def test_a_processor_without_avx512():
    """Code for a real AVX2 target, on which no wider instruction may appear."""
    done = run(_SAME_BITS, **HASWELL)
    assert done.returncode == 0 and "tier 256 " in done.stdout, done.stderr[-2000:]
    done = run("from strata.cpu.tiers import best_tier; best_tier()", **HASWELL, **{VARIABLE: "512"})
    assert done.returncode != 0 and "without avx512bitalg" in done.stderr


def test_a_wrong_name_is_refused_in_a_process():
    done = run("from strata.cpu.gemv import table; table.best_tier()", **{VARIABLE: "fast"})
    assert done.returncode != 0 and "names no kernel tier" in done.stderr
