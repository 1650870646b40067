"""The experts op as launches where device memory holds some of the experts: hits, link and CPU side by side.

    post -> { hit products } beside { link fetch, its products } beside { shared expert, then wait } -> combine

`post` decides for every routed entry. What counts (tables of resident experts, share of the link) lies in device
memory, so that it may change between windows; the captured graph stays. It has no branch for the link where a share
of 0 sends nothing over it: four nodes that do nothing take 5 us of every layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from strata.base.doorbell import HIT, LINK
from strata.base.errors import ModelError
from strata.base.program import Op
from strata.gpu import doorbell as bells
from strata.gpu.experts_ends import combine
from strata.gpu.experts_sides import Side, add_side, quantise_inputs, shared_side
from strata.gpu.gemv import Place, columns_of
from strata.gpu.link_fetch import Part, Parts, blob_of, field_map, link_fetch
from strata.gpu.lower import Lowering
from strata.gpu.weights import Weights


@dataclass(frozen=True)
class Split:
    """What the experts ops of a model's layers share. Addresses.

    raws         by layer: uint64 (E, 3), where the device reads experts in the host's memory; 0 if it cannot read any
    staging      `places` of experts that come over the link, 0 if none ever does
    stamps       int64 (L, STAMP_WORDS); with `stamp_branches` the ends of the hits and of the link are stamped too, by
                 nodes that nothing waits for
    log          int32 (L, T, K) of the window's rows T: routed ids, for whoever counts them; 0: not kept
    copy_sums    the wait brings the CPU's sums into device memory; else the combine reads them in the host's
    """

    doorbell: bells.Doorbell
    raws: Callable[[int], int]
    staging: int
    places: int
    stamps: int
    stamp_branches: bool = True
    copy_sums: bool = True
    log: int = 0


def layer_parts(weights: Weights, layer: int) -> Parts:
    """Gate, up and down of a layer's experts, with their tables of relayout among the weights."""
    E = weights.experts
    parts = []
    for part, (rows, columns) in enumerate(((E.F, E.D), (E.F, E.D), (E.D, E.F))):
        format = weights.expert_format(layer, part)
        field, table = field_map(format, columns)
        address = weights.array(f"relayout.{format.name}.{columns}.{field}", "tables", table)
        parts.append(Part(format, rows, columns, address, field))
    return tuple(parts)


def lower_split(c: Lowering, op: Op, split: Split) -> None:
    k, T, layer = op.consts, c.T, op.layer
    D, K, F, ids, d = k["D"], k["K"], k["F"], c.at(op, "ids"), split.doorbell
    factors, formats = c.weights.expert_scales(layer), tuple(c.weights.expert_format(layer, p) for p in range(3))
    for format in formats:
        if not format.group:
            raise ModelError(
                f"layer {layer} has experts in {format.name}",
                found="a float format",
                needed="a quantised format, to hold a part of them on the device",
                advice="Use a quantised file, or a device that holds all experts.",
            )
    slots, raws = c.weights.slots.table_address(layer), split.raws(layer) if split.staging else 0
    stamps = split.stamps + 8 * bells.STAMP_WORDS * layer

    def side(name: str, table: int, decision: int, jobs: int, experts: int) -> Side:
        places = tuple(Place(table=table, part=part) for part in range(3))
        most_jobs = min(T * K, experts * -(-T // columns_of(T)))
        return Side(name, T * K, T, F, formats, places, ids, factors, d.decisions, 1 << decision, jobs, most_jobs,
                    k["E"])  # fmt: skip

    def end_of_branch(word: int) -> None:
        if split.stamp_branches:
            c.add(bells.stamp(stamps + 8 * word), aside=True)

    n_slots = c.weights.slots.counts[layer]
    hits, shared = side("routed", slots, HIT, d.jobs, n_slots), shared_side(c, op)
    parts = layer_parts(c.weights, layer) if raws else None
    blob = blob_of(parts) if parts else bells.Blob(0, 0, 0)
    c.add(bells.post(d, ids, c.at(op, "weights"), c.at(op, "x"), slots, raws, split.staging, blob, T, layer, c.error,
                     stamps, split.log and split.log + 4 * T * K * layer))  # fmt: skip
    quantise_inputs(c, op, hits, shared)
    outputs = linked = 0
    if n_slots:
        c.branch()
        outputs = add_side(c, op, hits)
        end_of_branch(bells.HITS_END)
    if parts:
        c.branch()
        c.add(link_fetch(d.work, raws, split.staging, parts))
        linked = add_side(c, op, side("linked", d.staged, LINK, d.link_jobs, split.places))
        end_of_branch(bells.LINK_END)
    c.branch()
    shared_outputs = add_side(c, op, shared)
    # Behind the shared expert: an answer takes longer than that, and where nobody rang the hits do.
    sums = c.scratch("experts.sums", 8 * T * D) if split.copy_sums else 0
    c.add(bells.wait_reply(d, sums, T, c.error, c.where(op), stamps))
    c.join()
    places = (outputs, ids, c.at(op, "weights"), shared_outputs, c.at(op, "shared_gate"), c.at(op, "y"))
    more = {"mine": d.decisions, "linked": linked, "extra": sums or d.host + d.mailbox.sums}
    c.add(combine(*places, T, K, D, c.error, c.where(op), down_scales=factors[2], stamp=stamps + 8 * bells.JOINED,
                  **more))  # fmt: skip
