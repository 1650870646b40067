"""strata bench prefill: tokens/s of reading prompts, by their length, and where a chunk's time goes."""

from __future__ import annotations

import json
import statistics
import sys
from importlib.resources import files
from typing import TYPE_CHECKING, Annotated, Any

import typer

from strata.base.errors import need
from strata.base.geometry import CELL_ROWS, CONTEXT_RESERVE
from strata.cli import flags
from strata.cli.bench.numbers import count, numbers, spread
from strata.cli.output import Bar, working

if TYPE_CHECKING:
    from strata.chunk_speed import PrefillSpeed
    from strata.measure import Speed

DECODED = 64
"""Tokens decoded in a repeat, for comparison."""

OF_A_FILE = ("model", "tokens", "context", "pin", "kv", "prefill", "device", "vram_gib")
OF_A_MADE_MODEL = ("layers", "chunks", "where", "position")
"""Parameters that one kind of measurement takes and the other does not."""


def command(
    ctx: typer.Context,
    model: flags.Model = None,
    tokens: Annotated[str, typer.Option(help="Lengths of the prompts, in tokens.")] = "256,1024,4096",
    repeat: Annotated[int, typer.Option("--repeat", "-r", help="Repeats; medians and spread are reported.")] = 3,
    ops: Annotated[bool, typer.Option("--ops", help="Add the time of each kind of op in a chunk.")] = False,
    made: Annotated[
        str | None, typer.Option(help="Types of experts, as Q4_K/IQ4_NL: measure chunks of a model made in memory.")
    ] = None,
    layers: Annotated[int, typer.Option(help="Layers of the made model; the real one has 48.")] = 12,
    chunks: Annotated[str, typer.Option(help="Rows of its chunks.")] = "512,2048,8192",
    where: Annotated[str, typer.Option(help="Its experts: resident, ram, both in turn, or pageable.")] = "both",
    position: Annotated[int, typer.Option(help="Tokens that its session has read.")] = 0,
    context: flags.Context = None,
    threads: flags.Threads = None,
    pin: flags.Pin = False,
    kv: flags.Kv = "auto",
    prefill: flags.Prefill = "auto",
    device: flags.Device = None,
    vram_gib: flags.VramGib = None,
    json_: flags.Json = False,
) -> None:
    """Measure how fast prompts of a stored text are read into an empty session, and how fast single tokens are decoded.

    chunk: most rows that are read at once. times decode: tokens/s over those of decoding one token at a time, which is
    what reading by chunks gains. floor: the time in which a device reads its weights once for every chunk, at the rate
    of its memory; no prompt is read faster. --ops runs the ops of the longest prompt's chunks one by one. On a GPU
    chunks are read once more under events: shares of GPU, copies and waiting, and the floors of link and tensor cores.

    --made measures single chunks of a model of the real widths on the first GPU instead, with replayed routing: experts
    all on the device, and all in pinned memory, from where each crosses the link once a chunk; pageable: in memory that
    is not pinned, through pieces that threads fill.
    """
    if made is not None:
        from strata.cli.bench.made_chunks import measure_made

        flags.refuse_idle(ctx, OF_A_FILE, "with --made")
        measure_made(made, layers, chunks, where, position, repeat, ops, threads, json_)
        return
    flags.refuse_idle(ctx, OF_A_MADE_MODEL, "without --made")
    if prefill == "windows":
        flags.refuse_idle(ctx, ("ops",), "with --prefill windows")
    lengths = numbers("--tokens", tokens)
    count("--repeat", repeat, 1)
    need(not ops or lengths[-1] >= CELL_ROWS, "--ops needs a prompt that fills a chunk", found=f"--tokens {tokens}",
         needed=f"a length >= {CELL_ROWS}")  # fmt: skip
    cells = max(*lengths, 2 * DECODED) + CONTEXT_RESERVE + 1
    context = context if context is not None else -(-cells // CELL_ROWS) * CELL_ROWS
    need(context >= cells, "--context is too small for this bench", found=context, needed=f">= {cells}")
    options = {"context": context, "threads": threads, "pin": pin, "kv": kv, "prefill": prefill}
    with flags.loaded(model, **options, device=device, vram_gib=vram_gib) as loaded:
        from strata.measure import Speed

        bench = Speed(loaded, files("strata.cli.bench").joinpath("prompt.txt").read_text(encoding="utf-8"))
        with working("warming up"):
            bench.decode(DECODED // 4, profile=False)
            for n in lengths:
                bench.prefill(n)
        decode, reading = [], {n: [] for n in lengths}
        with Bar("measuring", "prompts") as bar:
            for i in range(repeat):
                decode.append(1e6 / bench.decode(DECODED, profile=False).wall_us)
                for j, n in enumerate(lengths):
                    bar.update(i * len(lengths) + j, repeat * len(lengths))
                    reading[n].append(bench.prefill(n))
        stats = loaded.stats()
        report = {
            "command": " ".join(["strata", *sys.argv[1:]]),
            "model": str(stats["file"]),
            "backend": stats["backend"],
            "device": stats["device"],
            "threads": stats["threads"],
            "kv": loaded.kv,
            "context": loaded.context,
            "chunk_rows": 0 if loaded.windows_only else bench.inner.chunk_rows,
            "decode_tokens_per_s": spread(decode),
            "prompts": [_prompt(bench, n, reading[n], statistics.median(decode)) for n in lengths],
            "chunks": (parts := bench.prompt_parts(lengths, repeat)) and parts.record(),
            "ops_ms": bench.chunk_ops(lengths[-1]) if ops else {},
        }
    typer.echo(json.dumps(report, indent=2) if json_ else "\n".join(_text(report, parts)))


def _prompt(bench: Speed, n: int, rates: list[float], decode: float) -> dict[str, Any]:
    median = statistics.median(rates)
    return {
        "tokens": n,
        "ms": round(1e3 * n / median, 2),
        "tokens_per_s": spread(rates),
        "times_decode": round(median / decode, 2),
        "floor_ms": bench.prefill_floor_ms(n),
    }


def _text(report: dict[str, Any], parts: PrefillSpeed | None) -> list[str]:
    rows, decode = report["chunk_rows"], report["decode_tokens_per_s"]
    lines = [
        f"command    {report['command']}",
        f"model      {report['model']}",
        f"backend    {report['backend']} on {report['device']}, {report['threads']} threads, kv {report['kv']}, "
        f"context {report['context']}",
        f"chunk      {f'{rows:,} rows' if rows else 'none: by windows of 8 rows'}",
        f"decode     {decode['median']:.1f} tokens/s",
        "",
        "prompt tokens        ms    tokens/s (from    to)   times decode   floor ms",
    ]
    for p in report["prompts"]:
        rate = p["tokens_per_s"]
        floor = "-" if p["floor_ms"] is None else f"{p['floor_ms']:.2f}"
        lines.append(f"{p['tokens']:>13,}{p['ms']:>10.1f}{rate['median']:>12.1f} ({rate['min']:.1f} {rate['max']:.1f})"
                     f"{p['times_decode']:>12.2f}{floor:>11}")  # fmt: skip
    if parts is not None:
        from strata.cli.bench.made_chunks import text

        lines += ["", *text(parts)]
    if report["ops_ms"]:
        whole = sum(report["ops_ms"].values())
        lines += ["", f"op of {report['prompts'][-1]['tokens']:,} tokens in chunks"]
        lines += [f"  {kind:<16}{ms:>10.2f} ms {100 * ms / whole:>5.1f} %" for kind, ms in report["ops_ms"].items()]
    return lines
