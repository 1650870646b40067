"""The two written forms of a plan: a table for people, plain values for programs."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from strata.base.plan import Estimate, Plan

DEVICE_NAMES = {"vram": "VRAM", "ram": "RAM"}


def _size(n_bytes: float) -> str:
    if 0 < n_bytes < 100 << 10:
        return f"{n_bytes / 1024:,.1f} KiB"
    return f"{n_bytes / (1 << 20):,.1f} MiB" if n_bytes < 100 << 20 else f"{n_bytes / (1 << 20):,.0f} MiB"


def _file_size(n_bytes: int) -> str:
    return f"{n_bytes / 1e9:.1f} GB" if n_bytes >= 1e9 else f"{n_bytes / 1e6:.1f} MB"


def plan_table(p: Plan) -> str:
    """Lines in order of allocation by device, then what they mean; no colours, at most one line per allocation."""
    out = [
        f"{p.model}: {_file_size(p.file_bytes)}, experts {p.expert_types}",
        f"on {p.machine}, device {p.device}, {p.threads} thread{'s' if p.threads > 1 else ''}",
        f"context {p.context:,} x {p.sessions} session{'s' if p.sessions > 1 else ''}, KV {p.kv}, experts {p.experts}, "
        f"prefill {f'{p.prefill_rows:,} rows' if p.prefill_rows else 'by windows'}, draft {p.draft}",
    ]
    if p.missing_bytes:
        out.append(f"TRUNCATED: {p.missing_bytes:,} bytes of this file are missing")
    for device in ("vram", "ram"):
        lines = [line for line in p.lines if line.device == device]
        if not lines:
            continue
        out += ["", f"{DEVICE_NAMES[device]}"]
        for line in lines:
            shown = _size(line.n_bytes)
            mark = {
                "reserve": " (kept free)",
                "later": " (while running)",
                "driver": " (driver)",
                "lent": " (lent)",
                "map": f" ({_size(line.held_bytes)} held)",
            }.get(line.kind, "")
            out.append(f"  {line.line:<28}{shown:>14}  {line.reason}{mark}")
        total, free = p.total_bytes(device), p.free_bytes[device]
        out.append(f"  {'= in all':<28}{_size(total):>14}  of {_size(free)} free")
    if p.disk:
        out += ["", "disk, per token"]
        out += [
            f"  {d.what:<28}{_size(d.bytes_per_token):>14}  {d.reads_per_token:,.1f} reads of the {d.where}, "
            f"{d.ms_per_token:,.2f} ms"
            for d in p.disk
        ]
    if p.estimate is not None:
        out += ["", *_estimate_lines(p, p.estimate)]
    out += [f"  note: {note}" for note in p.notes]
    out += ["", f"verdict: {p.verdict}{_once_complete(p)}"]
    out += [f"  {s}" for s in p.shortfalls]
    out += [f"  remedy: {r}" for r in p.remedies]
    return "\n".join(out)


def _once_complete(p: Plan) -> str:
    """What the verdict depends on where a part of the file is not here."""
    if p.complete:
        return ""
    lacks = [f"{n_bytes:,} bytes of {names} are missing" for names, n_bytes in p.missing_shards]
    so_far = ", once the file is complete: " if p.fits else "; besides, the file is incomplete: "
    return so_far + ", ".join(lacks or [f"{p.missing_bytes:,} bytes are missing"])


def _estimate_lines(p: Plan, e: Estimate) -> list[str]:
    out = ["decode, one row a window, no drafts, full context"]
    for name, ms in e.terms.items():
        out.append(f"  {name:<40}{ms:>11.3f} ms")
    places = [f"{e.ram_rate:.1%} in RAM"]
    if p.n_slots:
        places.insert(0, f"{e.hit_rate:.1%} in VRAM ({e.hit_source})")
    if e.disk_rate > 0:
        places.append(f"{e.disk_rate:.1%} on disk")
    if e.pcie_share:
        places.append(f"{e.pcie_share:.0%} of the misses over PCIe")
    out.append(f"  bound {e.decode_ms:.2f} ms = {e.tokens_per_s:.1f} tokens/s, limited by {e.limit}")
    out.append("  routed experts: " + ", ".join(places))
    if p.fits:
        more = f"; {p.slots_per_gib:,} more slots per further GiB of VRAM" if p.slots_per_gib else ""
        out.append(f"  largest context that fits: {p.largest_context:,}{more}")
    if e.assumptions:
        out.append("  assumed: " + "; ".join(e.assumptions))
    return out


def plan_json(p: Plan) -> dict:
    """Everything the plan holds and what follows from it, as lists, dicts, numbers and text."""
    values = {"strata_plan": p.version, "verdict": p.verdict, "fits": p.fits, "complete": p.complete}
    values["n_slots"] = p.n_slots
    values |= {k: v for k, v in asdict(p).items() if k != "version"}
    for written, line in zip(values["lines"], p.lines, strict=True):
        written["held_bytes"] = line.held_bytes
        del written["held"]
    for written, s in zip(values["shortfalls"], p.shortfalls, strict=True):
        written["missing_bytes"] = s.missing_bytes
    if p.estimate is not None:
        values["estimate"]["tokens_per_s"] = p.estimate.tokens_per_s
    values["total_bytes"] = {device: p.total_bytes(device) for device in p.free_bytes}
    return values
