"""Which kernels this machine runs: 512 (AVX-512 with VNNI, VBMI and BITALG), 256 (AVX2) or 0 (portable).

The tier follows from the instruction sets that Numba compiles for, not from the processor: NUMBA_CPU_NAME and
NUMBA_CPU_FEATURES may restrict them, and an instruction that they lack would end the process. All tiers give the same
bits. STRATA_CPU_TIER=512, 256 or 0, or a name of NAMES, asks for a lower one.
"""

from __future__ import annotations

import os
from collections.abc import Collection

from numba.core.registry import cpu_target

from strata.base.errors import BadArgument
from strata.base.numbers import shown

PORTABLE = 0
"""The tier that runs everywhere."""

VARIABLE = "STRATA_CPU_TIER"

_AVX2 = frozenset({"avx2", "fma", "f16c"})
_NEEDS: dict[int, frozenset[str]] = {
    PORTABLE: frozenset(),
    256: _AVX2,
    512: _AVX2 | {f"avx512{part}" for part in ("f", "bw", "dq", "vl", "vnni", "vbmi", "bitalg")},
}

NAMES = {"portable": PORTABLE, "avx2": 256, "avx512": 512}
"""Tiers as users may call them."""

FASTEST = "Unset the variable to take the fastest tier."
"""What to do about a variable that asks for a tier that cannot be had."""

TIERS: tuple[int, ...] = tuple(sorted(_NEEDS))
"""All tiers, slowest first."""


def target_features() -> frozenset[str]:
    """Instruction sets that Numba compiles for, as LLVM names them."""
    names = cpu_target.target_context.codegen().magic_tuple()[2]
    return frozenset(name[1:] for name in names.split(",") if name.startswith("+"))


def needs_asking() -> bool:
    """Whether kernels of one activation row must prefetch every format to stream from memory.

    Measured from memory on one core: without prefetches a Xeon (AVX-512) reaches 0.5 to 0.65 of its streaming rate,
    with them 0.9; a Zen 4 follows by itself, and prefetches cost it 5 to 20 % in most formats. Compiled functions are
    kept apart by processor name, so the choice may be part of them.
    """
    return not cpu_target.target_context.codegen().magic_tuple()[1].startswith("znver")


def tiers_of(features: Collection[str]) -> tuple[int, ...]:
    """Tiers that a target with these instruction sets runs, slowest first."""
    return tuple(tier for tier in TIERS if _NEEDS[tier] <= set(features))


def available_tiers() -> tuple[int, ...]:
    """Tiers that run here, slowest first."""
    return tiers_of(target_features())


def chosen_tier(available: Collection[int], wanted: str | None) -> int:
    """The fastest of the available tiers, or the one that `wanted` (the variable's text, or None) names.

    BadArgument if that is no tier, or one that does not run here.
    """
    if wanted is None or not wanted.strip():
        return max(available)
    text = wanted.strip().lower()
    known = NAMES | {str(tier): tier for tier in TIERS}
    if text not in known:
        raise BadArgument(f"{VARIABLE} names no kernel tier", found=shown(wanted), needed=f"one of {', '.join(known)}",
                          advice=FASTEST)  # fmt: skip
    tier = known[text]
    if tier not in available:
        missing = sorted(_NEEDS[tier] - target_features())
        raise BadArgument(
            f"{VARIABLE} asks for a kernel tier that this machine does not run",
            found=f"tier {tier}" + (f", without {', '.join(missing)}" if missing else ""),
            needed=f"one of {', '.join(map(str, sorted(available)))}",
            advice=FASTEST,
        )
    return tier


def best_tier() -> int:
    """The fastest tier of this machine, or the lower one that STRATA_CPU_TIER asks for."""
    return chosen_tier(available_tiers(), os.environ.get(VARIABLE))
