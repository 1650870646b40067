"""Known graphics cards: memory, bandwidth and link by name, for machines one does not have and rates a driver does
not tell."""

from __future__ import annotations

import difflib
import json
import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from strata.base.errors import BadArgument
from strata.base.numbers import shown

GIB = 1 << 30

LANE_GBPS = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
"""Nominal GB/s of one PCIe lane by generation, one direction."""

LINK_EFFICIENCY = 0.82
"""Share of the nominal link rate that large pinned copies reach (52-55 of 63 GB/s at generation 5 x16)."""


@dataclass(frozen=True)
class Card:
    """A known card. vram_bytes as sold; bandwidth_gbps of its memory; link = (PCIe generation, lanes);
    multiprocessors: how many."""

    name: str
    vram_bytes: int
    bandwidth_gbps: float
    link: tuple[int, int]
    capability: tuple[int, int]
    multiprocessors: int

    @property
    def link_gbps(self) -> float:
        return link_gbps(*self.link)


def link_gbps(generation: int, lanes: int) -> float:
    """Expected GB/s of large pinned copies over a PCIe link, one direction."""
    return LANE_GBPS.get(generation, LANE_GBPS[3]) * lanes * LINK_EFFICIENCY


@cache
def known_cards() -> tuple[Card, ...]:
    """Every card of the data file."""
    text = files("strata.planner").joinpath("cards.json").read_text(encoding="utf-8")
    return tuple(
        Card(
            name=c["name"],
            vram_bytes=int(c["vram_gib"] * GIB),
            bandwidth_gbps=float(c["bandwidth_gbps"]),
            link=(c["link"][0], c["link"][1]),
            capability=(int(c["capability"].split(".")[0]), int(c["capability"].split(".")[1])),
            multiprocessors=int(c["multiprocessors"]),
        )
        for c in json.loads(text)["cards"]
    )


def _words(name: str) -> tuple[str, ...]:
    text = re.sub(r"nvidia|geforce|tesla|quadro|graphics|generation", " ", name.lower())
    text = re.sub(r"(\d)\s*g(?:i?b)?\b", r"\1gb", text)
    text = re.sub(r"\b(rtx|gtx)(\d)", r"\1 \2", text)
    text = re.sub(r"(\d{4})(ti|super)\b", r"\1 \2", text)
    return tuple(w for w in re.split(r"[^a-z0-9]+", text) if w)


def find_card(name: str, vram_bytes: int | None = None) -> Card | None:
    """The card of that name, or None. Vendor words and spacing do not matter.

    With `vram_bytes` (a driver's total) the version of the card with the nearest memory is taken, and a card whose
    memory differs by more than a quarter is not taken at all.
    """
    want = set(_words(name))
    if vram_bytes is None:
        exact = [c for c in known_cards() if set(_words(c.name)) == want]
        return exact[0] if exact else None
    bare = {w for w in want if not w.endswith("gb")}
    same = [c for c in known_cards() if {w for w in _words(c.name) if not w.endswith("gb")} == bare]
    if not same:  # data-centre names carry form factors ("H200 NVL", "A100-SXM4-80GB")
        same = [c for c in known_cards() if {w for w in _words(c.name) if not w.endswith("gb")} < bare]
        longest = max((len(_words(c.name)) for c in same), default=0)
        same = [c for c in same if len(_words(c.name)) >= min(longest, 2)] or same
    near = [c for c in same if abs(c.vram_bytes - vram_bytes) <= c.vram_bytes // 4]
    return min(near, key=lambda c: abs(c.vram_bytes - vram_bytes), default=None)


OTHER_CARD = "For any other card give its memory: vram_gib (--vram-gib), and vram_gbps and link_gbps where known."
"""Advice for who describes a machine, in Python or to `strata plan`."""


def card_by_name(name: str, advice: str = OTHER_CARD) -> Card:
    """The card of that name. Raises BadArgument naming the closest known ones and the list of all, and the advice."""
    card = find_card(name)
    if card is None:
        close = difflib.get_close_matches(name.lower(), [c.name.lower() for c in known_cards()], n=3, cutoff=0.3)
        names = [c.name for c in known_cards() if c.name.lower() in close]
        names = names or [c.name for c in known_cards()][:6]
        whole = files("strata.planner").joinpath("cards.json")
        raise BadArgument(
            "unknown card",
            found=shown(name),
            needed=f"one of {len(known_cards())}, as {', '.join(names)}",
            advice=f"All are listed in {whole}. {advice}",
        )
    return card
