"""What sharing experts between GPU, link and CPU takes, where VRAM does not hold all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from strata.base.doorbell import Mailbox
from strata.base.geometry import WINDOW_ROWS
from strata.cpu.miss_server import MissServer
from strata.cpu.weights import Weights
from strata.gpu import hybrid
from strata.gpu.download import blob_bytes, download_bytes
from strata.gpu.expert_store import place_bytes
from strata.gpu.link_fetch import field_map
from strata.pack.experts import ExpertLayout
from strata.pack.tensors import Tensors
from strata.planner.vram_bytes import aligned

Form = tuple[bool, bool]
"""Whether any layer has slots, and whether experts may come over the link."""

FORMS: tuple[Form, ...] = ((False, False), (False, True), (True, False), (True, True))


@dataclass(frozen=True)
class SplitFacts:
    """Bytes besides slots and places of experts.

    exchange         by link or not: decisions, lists, times in VRAM
    staging          places in VRAM for experts over the link
    tables           in VRAM: how experts over the link are laid out
    pinned           in RAM: requests to the CPU and its sums, times
    service          in RAM: scratch of the CPU's side
    swap             VRAM and RAM of experts on their way back, where RAM holds only what VRAM does not
    places           by layer: RAM of one expert in memory of its own
    private, drafted by form: what ops of windows ask for besides buffers; with the draft layer's
    """

    exchange: Mapping[bool, int]
    staging: int
    tables: int
    pinned: int
    service: int
    swap: tuple[int, int]
    places: tuple[int, ...]
    private: Mapping[Form, int]
    drafted: Mapping[Form, int]


def split_facts(
    tensors: Tensors, layout: ExpertLayout, K: int, private: Mapping[Form, int], drafted: Mapping[Form, int]
) -> SplitFacts:
    """From the file's headers. private, drafted: see `SplitFacts`."""
    box, parts = Mailbox(WINDOW_ROWS, K, layout.D), [p for layer in layout.layers for p in layer.projections]
    by_link = {link: _by_line(layout, K, hybrid.STAGING_BLOBS if link else 0) for link in (False, True)}
    formats = {(p.format.name, p.columns): p.format for p in parts if p.format.group}
    return SplitFacts(
        exchange={link: lines["expert exchange"] for link, lines in by_link.items()},
        staging=by_link[True]["link staging"],
        tables=sum(aligned(field_map(format, columns)[1].nbytes) for (_, columns), format in formats.items()),
        pinned=by_link[False]["exchange"],
        service=MissServer.scratch_bytes(Weights(tensors, layout), box),
        swap=(download_bytes(layout), blob_bytes(layout)),
        places=tuple(place_bytes(layout, l) for l in range(layout.n_layers)),
        private=dict(private),
        drafted=dict(drafted),
    )


def _by_line(layout: ExpertLayout, K: int, staging_blobs: int) -> dict[str, int]:
    return {a.line: a.n_bytes for a in hybrid.needs(layout, K, staging_blobs)}
