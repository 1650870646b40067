"""strata inspect: what a GGUF file holds, from its headers alone."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import typer

from strata.arch import architecture_of
from strata.base.geometry import Geometry
from strata.cli import flags
from strata.cli.locate import find_model
from strata.pack.experts import PARTS, LayerExperts, expert_layout
from strata.pack.gguf_file import GgufFile
from strata.planner.facts import ModelFacts, model_facts
from strata.planner.missing import assume_table
from strata.planner.state_bytes import KV_FORMATS, KV_GROUP, kv_cell_bytes, pooled_key_bytes, recurrent_bytes


def command(
    file: flags.ModelFile = None,
    json_: flags.Json = False,
) -> None:
    """Show geometry, types and bytes per class, and the experts of every layer.

    Reads headers only; a partly downloaded file will do, and a missing shard if it holds the n-gram table alone.
    """
    report = inspect_file(find_model(file, "the argument"))
    typer.echo(json.dumps(report, indent=2) if json_ else "\n".join(_text(report)))


def inspect_file(path: Path) -> dict[str, Any]:
    """The report as plain data; sizes in bytes. Raises FileError or ModelError."""
    with GgufFile(path, headers_only=True) as gguf:
        arch, assumed = architecture_of(gguf), assume_table(gguf)
        geometry = arch.read_geometry(gguf)
        facts = model_facts(gguf, geometry)
        parameters = sum(t.rows * t.shape[-1] for t in gguf.tensors.values())
        shards = [
            {"file": s.path.name, "bytes": s.file_bytes, "needed_bytes": s.needed_bytes, "tensors": s.n_tensors}
            for s in gguf.shards
        ]
        missing = [p.name for p in gguf.missing_shards]
        experts = [_layer_experts(i, layer) for i, layer in enumerate(expert_layout(gguf, geometry.L).layers)]
        return {
            "name": gguf.metadata.get("general.name"),
            "file": str(path),
            "architecture": geometry.architecture,
            "parameters": parameters,
            "shards": shards,
            "missing_shards": missing,
            "missing_bytes": gguf.missing_bytes,
            "assumed": assumed,
            "tensor_bytes": gguf.total_bytes,
            "bits_per_parameter": round(8 * gguf.total_bytes / parameters, 3),
            "geometry": _geometry(geometry),
            "classes": _classes(gguf, facts),
            "experts": experts,
            "routed_bytes_per_token": facts.routed_bytes_per_token,
            "state": _state(geometry),
        }


def _geometry(g: Geometry) -> dict[str, Any]:
    found = dataclasses.asdict(g)
    found.pop("layer_names")
    found["gdn_layers"], found["qsa_layers"] = len(g.gdn_layers), len(g.qsa_layers)
    return found


def _classes(gguf: GgufFile, facts: ModelFacts) -> list[dict[str, Any]]:
    """Classes of weights in the order of the file's use; together they are all tensors."""
    rows = [_class(c.name, c.n_tensors, c.by_type) for c in (facts.embedding, *facts.dense, facts.head)]
    known = {"routed experts": "_exps.", "n-gram table": "per_layer_token_embd"}
    layers = {f"blk.{layer}." for layer in range(facts.geometry.L)}
    for name, mark in known.items():
        tensors = [t for t in gguf.tensors.values() if mark in t.name and not _is_draft(t.name, layers)]
        rows.append(_class(name, len(tensors), _by_type((t.format.name, t.n_bytes) for t in tensors)))
    draft = [t for t in gguf.tensors.values() if _is_draft(t.name, layers)]
    rows.append(_class("draft layer", len(draft), _by_type((t.format.name, t.n_bytes) for t in draft)))
    return [row for row in rows if row["tensors"]]


def _is_draft(name: str, layers: set[str]) -> bool:
    """A tensor of a block behind the trunk's."""
    return name.startswith("blk.") and name[: name.index(".", 4) + 1] not in layers


def _by_type(items: Iterable[tuple[str, int]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for kind, n_bytes in items:
        found[kind] = found.get(kind, 0) + n_bytes
    return found


def _class(name: str, n_tensors: int, by_type: dict[str, int]) -> dict[str, Any]:
    order = dict(sorted(by_type.items(), key=lambda item: -item[1]))
    return {"name": name, "tensors": n_tensors, "bytes": sum(by_type.values()), "types": order}


def _layer_experts(index: int, layer: LayerExperts) -> dict[str, Any]:
    parts = zip(PARTS, layer.projections, strict=True)
    sizes = {part: {"type": p.format.name, "bytes": p.n_bytes} for part, p in parts}
    return {"layer": index, "expert_bytes": layer.blob_bytes, **sizes}


def _state(g: Geometry) -> dict[str, Any]:
    """Bytes a session takes: per token of context, and apart from it."""
    layers = len(g.qsa_layers)
    cell = {kv: layers * kv_cell_bytes(g, kv) for kv in KV_FORMATS if kv == "f16" or g.dh % KV_GROUP == 0}
    # Keys are one float32 row per block of cells, so one token's share may be a fraction.
    keys = pooled_key_bytes(g, g.block_cells) / g.block_cells if g.block_cells else 0.0
    return {"kv_bytes_per_token": cell, "pooled_key_bytes_per_token": keys, "recurrent_bytes": recurrent_bytes(g)}


# ---- text


def size_text(n: float) -> str:
    """Bytes in words: the largest binary unit that leaves at least 1."""
    for unit in ("bytes", "KiB", "MiB"):
        if n < 1024:
            return f"{n:.0f} {unit}" if unit == "bytes" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.2f} GiB"


def _text(report: dict[str, Any]) -> list[str]:
    g = report["geometry"]
    shards = len(report["shards"]) + len(report["missing_shards"])
    lines = [
        f"{report['name'] or report['file']} ({report['architecture']})",
        f"{report['parameters']:,} parameters, {size_text(report['tensor_bytes'])}, "
        f"{report['bits_per_parameter']:.2f} bits each, {shards} file(s)",
    ]
    if report["missing_bytes"]:
        names = f" (no {', '.join(report['missing_shards'])})" if report["missing_shards"] else ""
        lines.append(f"INCOMPLETE: at least {report['missing_bytes']:,} bytes are missing{names}")
        lines += [f"  {report['assumed']}"] if report["assumed"] else []
        cut = [s for s in report["shards"] if s["bytes"] < s["needed_bytes"]]
        lines += [f"  {s['file']}: found {s['bytes']:,} bytes, needed {s['needed_bytes']:,}" for s in cut]
    attention = f"{g['H']} heads, {g['Hkv']} KV heads of {g['dh']}, {g['rotary_dims']} rotary"
    sparse = f"blocks of {g['block_cells']} cells, {g['budget_cells']} attended" if g["block_cells"] else "dense"
    keys = f"{g['gdn_key_heads']} key heads of {g['gdn_key_dim']}"
    gdn = f"{keys}, {g['gdn_value_heads']} value heads of {g['gdn_value_dim']}"
    lines += _table(
        ("geometry", ""),
        [
            ("layers", f"{g['L']} ({g['gdn_layers']} GDN, {g['qsa_layers']} attention)"),
            ("hidden size", f"{g['D']} in {g['C']} streams, hyper-connections of rank {g['hc_rank']}"),
            ("vocabulary", f"{g['V']:,}"),
            ("trained context", f"{g['trained_context']:,}"),
            ("attention", f"{attention}; {sparse}"),
            ("GDN", f"{gdn}, conv over {g['gdn_conv_taps']}"),
            ("experts", f"{g['E']} a layer, {g['K']} routed, width {g['F']}; shared width {g['shared_width']}"),
            ("n-gram block", _ngram_text(g["ngram"])),
        ],
    )
    total = report["tensor_bytes"]
    lines += _table(
        ("class", "bytes", "share", "tensors", "types"),
        [
            (c["name"], f"{c['bytes']:,}", f"{100 * c['bytes'] / total:.1f} %", c["tensors"], _types_text(c["types"]))
            for c in report["classes"]
        ],
        right=(1, 2, 3),
    )
    lines += _table(
        ("layers", "expert bytes", *PARTS), [_layers_row(*run) for run in _runs(report["experts"])], right=(1,)
    )
    lines.append(f"one token reads {size_text(report['routed_bytes_per_token'])} of routed experts")
    state = report["state"]
    per_token = ", ".join(f"{n:,} bytes as {kv}" for kv, n in state["kv_bytes_per_token"].items())
    lines.append(f"KV per token: {per_token}; pooled keys {state['pooled_key_bytes_per_token']:g} bytes")
    lines.append(f"recurrent state of a session: {size_text(state['recurrent_bytes'])}")
    return lines


def _ngram_text(n: dict[str, Any] | None) -> str:
    if n is None:
        return "none"
    heads = (n["order"] - 1) * n["heads_per_order"]
    return f"layer {n['layer']}, order {n['order']}, {heads} rows of {n['row_width']} a token"


def _types_text(types: dict[str, int]) -> str:
    return ", ".join(kind if len(types) == 1 else f"{kind} {size_text(n)}" for kind, n in types.items())


def _runs(experts: Sequence[dict[str, Any]]) -> list[tuple[int, int, dict[str, Any]]]:
    """(first, last, record) of neighbouring layers whose experts are alike."""
    runs: list[tuple[int, int, dict[str, Any]]] = []
    for record in experts:
        alike = {k: v for k, v in record.items() if k != "layer"}
        if runs and runs[-1][2] == alike:
            runs[-1] = (runs[-1][0], record["layer"], alike)
        else:
            runs.append((record["layer"], record["layer"], alike))
    return runs


def _layers_row(first: int, last: int, record: dict[str, Any]) -> tuple[str, ...]:
    layers = str(first) if first == last else f"{first}-{last}"
    parts = (f"{record[p]['type']} {record[p]['bytes']:,}" for p in PARTS)
    return (layers, f"{record['expert_bytes']:,}", *parts)


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]], right: Sequence[int] = ()) -> list[str]:
    """Aligned columns below a head, an empty line before."""
    cells = [[str(c) for c in row] for row in (head, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]

    def line(row: Sequence[str]) -> str:
        columns = enumerate(zip(row, widths, strict=True))
        return "  ".join(c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in columns).rstrip()

    return ["", *map(line, cells)]
