"""strata bench prefill --made: chunks of a model of the real widths, made in memory, on the first CUDA device."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
import typer

from strata.base.errors import BadArgument, need
from strata.base.geometry import CELL_ROWS, CONTEXT_RESERVE
from strata.base.numbers import shown
from strata.cli import flags
from strata.cli.bench.numbers import count
from strata.cli.output import Bar, working
from strata.cpu.cores import MOST_THREADS

if TYPE_CHECKING:
    from strata.chunk_speed import PrefillSpeed

MOST_ROWS = 8192
REPLAYED_TOKENS = 1024
VOCABULARY = 32_768
"""Of the made model: no token's logits are computed."""


def measure_made(
    made: str, layers: int, chunks: str, where: str, position: int, repeat: int, ops: bool, threads: int | None,
    json_: bool,
) -> None:  # fmt: skip
    """Make the model, measure, print. Raises BadArgument for what cannot be measured."""
    from strata.cli.bench.gpu import DISTINCT_PIECES, model_path
    from strata.required_device import required_device
    from strata.synth import SynthSpec

    rows, places = _rows(chunks), _places(where)
    count("--repeat", repeat, 1)
    count("--threads", threads, 1, MOST_THREADS)
    count("--position", position, 0)
    need(position % CELL_ROWS == 0, "--position is not on the grid", found=position,
         needed=f"a multiple of {CELL_ROWS}")  # fmt: skip
    spec = SynthSpec.of_types(made, layers=layers, vocabulary=VOCABULARY, distinct_pieces=DISTINCT_PIECES)
    device = required_device("a measurement of a GPU's speed")
    began = time.perf_counter()
    with model_path(None, spec, threads) as path:
        from strata.chunk_speed import measure_chunks, open_chunks
        from strata.replay import routing_facts, skewed_ids

        made_s, began = time.perf_counter() - began, time.perf_counter()
        context = position + max(rows) + CONTEXT_RESERVE
        with contextlib.ExitStack() as stack:
            with working("loading"):
                opened = open_chunks(path, context, "int8", max(rows), places, device)
                backend = stack.enter_context(opened)
            load_s, g = time.perf_counter() - began, backend.geometry
            some = skewed_ids(min(REPLAYED_TOKENS, max(rows)), g.L, g.E, g.K)
            ids = np.resize(some, (max(rows), g.L, g.K))
            with Bar("measuring", "chunks") as bar:
                speed = measure_chunks(backend, ids, rows=rows, places=places, position=position, repeats=repeat,
                                       ops=ops, on_progress=bar.update)  # fmt: skip
            facts = routing_facts(some, g.E)
    report: dict[str, Any] = {"command": " ".join(["strata", *sys.argv[1:]]), "spec": asdict(spec),
                              "made_s": round(made_s, 2), "load_s": round(load_s, 2), "routing": asdict(facts),
                              **speed.record()}  # fmt: skip
    head = f"model      {spec.name}, made in {made_s:.1f} s, loaded in {load_s:.1f} s; routing: {facts}"
    typer.echo(json.dumps(report, indent=2) if json_ else "\n".join([head, *text(speed)]))


def _rows(chunks: str) -> list[int]:
    parts = [part.strip() for part in chunks.split(",")]
    good = all(flags.is_count(p) and 0 < int(p) <= MOST_ROWS and int(p) % CELL_ROWS == 0 for p in parts)
    need(good, "--chunks cannot be read", found=shown(chunks),
         needed=f"rows of chunks, multiples of {CELL_ROWS} up to {MOST_ROWS}, as 512,2048")  # fmt: skip
    return [int(part) for part in parts]


def _places(where: str) -> tuple[str, ...]:
    if where == "both":
        return ("resident", "ram")
    if where in ("resident", "ram", "pageable"):
        return (where,)
    raise BadArgument("--where is unknown", found=shown(where), needed="both, resident, ram or pageable")


def text(s: PrefillSpeed) -> list[str]:
    """Lines of a table."""
    link = f"link {s.link_gbps:.1f} GB/s, " if s.link_gbps else ""
    lines = [
        f"device     {s.device}: {link}tensor cores {s.tensor_tops:.0f} int8 TOP/s",
        f"chunks     {s.layers} layers, from position {s.position}; ms are medians",
        "",
        "experts    rows       ms (from   to)  tokens/s     host      gpu     wait     copy   GB copied"
        "   floor: link  tensor  reached   shares: gpu  wait  copy",
    ]
    for c in s.chunks:
        lines.append(
            f"{c.where:<9}{c.rows:>6,}{c.ms:>9.2f} ({c.least_ms:.1f} {c.most_ms:.1f}){c.tokens_per_s:>10,.0f}"
            f"{c.host_ms:>9.2f}{c.gpu_ms:>9.2f}{c.wait_ms:>9.2f}{c.copy_ms:>9.2f}{c.copy_bytes / 1e9:>12.2f}"
            f"{c.link_floor_ms:>14.2f}{c.tensor_floor_ms:>8.2f}{100 * c.floor_share:>8.0f}%"
            f"{c.share(c.gpu_ms):>13.0f}%{c.share(c.wait_ms):>5.0f}%{c.share(c.copy_ms):>5.0f}%"
        )
    for where, kinds in s.ops_ms.items():
        whole = sum(kinds.values())
        lines += ["", f"op of {max(c.rows for c in s.chunks):,} rows, one after the other, experts {where}"]
        for kind, ms in sorted(kinds.items(), key=lambda item: -item[1]):
            lines.append(f"  {kind:<16}{ms:>10.2f} ms {100 * ms / whole:>5.1f} %")
    lines += [
        "",
        "host: until all was queued. gpu: the main stream without wait, its time of waiting for experts. copy: the",
        "link is busy. floor: experts over the link's rate; products with matrices over that of tensor cores.",
        "shares: of the time; copies run beside the rest.",
    ]
    return lines
