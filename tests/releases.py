"""The released sizes of the model: shapes, published bytes, and type maps drawn from the sets that each one uses."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache

from strata.pack.formats import by_name

MULTIPLIERS = (23703573157769, 20109073645365, 8052911324071)
MODULI = (
    20000003,
    20000023,
    20000033,
    20000047,
    20000059,
    20000063,
    20000069,
    20000077,
    20000081,
    20000093,
    20000107,
    20000147,
    20000153,
    20000159,
    20000161,
    20000171,
)
TABLE_ROWS = 320_001_536

GATE_UP = ("IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")
DOWN = ("Q2_0", "IQ4_NL")


@dataclass(frozen=True)
class Shape:
    """Sizes of a model; the defaults are the real ones."""

    L: int = 48
    D: int = 2560
    V: int = 248320
    C: int = 4
    rank: int = 320
    H: int = 24
    Hkv: int = 2
    dh: int = 256
    rotary: int = 64
    Hk: int = 16
    Hv: int = 48
    dk: int = 128
    taps: int = 4
    E: int = 512
    K: int = 10
    F: int = 640
    shared: int = 640
    Hi: int = 4
    di: int = 128
    budget: int = 2048
    block: int = 4
    period: int = 4
    row_width: int = 160
    context: int = 262144
    table_rows: int = TABLE_ROWS

    @property
    def CD(self) -> int:
        return self.C * self.D


@dataclass(frozen=True)
class Release:
    """One released size. bytes1 and bytes2: published sizes of shard 1 and of the table's shard; None = not published.

    dense maps tensor groups to types, cycled over layers.
    """

    name: str
    bytes1: float | None
    bytes2: float | None
    gate_up: tuple[str, ...]
    down: tuple[str, ...]
    expert_average: float
    dense: dict[str, tuple[str, ...]]
    shape: Shape = field(default_factory=Shape)
    table: str = "IQ4_NL"
    shards: int = 2


_SMALL = {"hc": ("BF16",), "router": ("BF16",), "alpha": ("BF16",), "indexer": ("BF16",), "ple_value": ("BF16",)}
_LEAN = {
    "embed": ("Q3_K",),
    "qkv": ("IQ4_XS", "Q3_K"),
    "gate": ("IQ4_XS", "Q4_K"),
    "out": ("Q4_K", "Q3_K"),
    "q": ("IQ4_XS",),
    "k": ("Q6_K",),
    "v": ("Q5_K",),
    "o": ("Q4_K", "Q3_K"),
    "shared_up": ("Q2_0", "Q3_K", "IQ4_XS"),
    "shared_down": ("Q2_0", "Q5_0"),
    "head": ("Q5_K",),
    "ple_key": ("Q2_0",),
    **_SMALL,
}
_RICH = {
    "embed": ("Q5_K",),
    "qkv": ("Q4_K", "Q5_K"),
    "gate": ("Q4_K",),
    "out": ("Q5_K",),
    "q": ("Q5_K",),
    "k": ("Q6_K",),
    "v": ("Q6_K",),
    "o": ("Q5_K",),
    "shared_up": ("Q5_K", "IQ4_XS"),
    "shared_down": ("Q8_0", "Q5_0"),
    "head": ("Q5_K",),
    "ple_key": ("BF16",),
    **_SMALL,
}
_UD = {
    "embed": ("Q8_0",),
    "qkv": ("Q8_0",),
    "gate": ("Q8_0",),
    "out": ("Q8_0",),
    "q": ("Q8_0",),
    "k": ("Q8_0",),
    "v": ("Q8_0",),
    "o": ("Q8_0",),
    "shared_up": ("Q8_0",),
    "shared_down": ("Q8_0",),
    "head": ("Q8_0",),
    "ple_key": ("Q8_0",),
    "hc": ("Q8_0",),
    "router": ("F32",),
    "alpha": ("F32",),
    "indexer": ("BF16",),
    "ple_value": ("Q8_0",),
}

RELEASES = {
    r.name: r
    for r in (
        Release("Q2_0", 37_623_740_192, 28_800_138_432, ("Q2_0",), ("Q2_0",), 1_382_400, _LEAN),
        Release(
            "IQ2_XS",
            39.2e9,
            28_800_138_432,
            GATE_UP,
            DOWN,
            1_440_000,
            {**_LEAN, "head": ("IQ4_XS",), "ple_key": ("BF16",)},
        ),
        Release("IQ3_XXS", 47.0e9, 28_800_138_432, GATE_UP, DOWN, 42_912_972_800 / 24_576, _RICH),
        Release("IQ3_S", 54.8e9, 28_800_138_432, GATE_UP, DOWN, 2_060_000, _RICH),
        Release(
            "Coder-IQ1_M",
            29.6e9,
            28_800_138_432,
            ("IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_XS"),
            DOWN,
            2_085_000,
            _RICH,
            replace(Shape(), E=256),
        ),
        Release("UD-Q4_K_XL", None, None, ("Q4_K", "Q5_K"), ("Q5_1", "Q8_0"), 3_110_000, _UD, shards=4),
    )
}


def type_bytes(kind: str, values: int, rows: int) -> int:
    return by_name(kind).row_bytes(values) * rows


@cache
def expert_types(name: str) -> tuple[tuple[str, str], ...]:
    """(gate and up, down) types of each layer: cumulative size follows the release's average, neighbours differ."""
    r = RELEASES[name]
    if name == "UD-Q4_K_XL":
        heavy = {2, 4, 30, 46, 47}
        return tuple(("Q5_K" if l == 2 else "Q4_K", "Q8_0" if l in heavy else "Q5_1") for l in range(r.shape.L))
    s, chosen, total = r.shape, [], 0.0
    choices = [(a, b) for a in r.gate_up for b in r.down]
    for l in range(s.L):
        pool = [c for c in choices if not chosen or c != chosen[-1]] or choices
        want = r.expert_average * (l + 1) - total

        def distance(c, want=want):
            return abs(type_bytes(c[0], s.D, 2 * s.F) + type_bytes(c[1], s.F, s.D) - want)

        best = min(pool, key=distance)
        chosen.append(best)
        total += type_bytes(best[0], s.D, 2 * s.F) + type_bytes(best[1], s.F, s.D)
    return tuple(chosen)
