"""strata bench ngram: reads of n-gram rows from this machine's disk, past the page cache and through it."""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from strata.base.errors import need
from strata.cli import flags
from strata.cli.output import working


def command(
    folder: Annotated[Path | None, typer.Option(help="Where the table is written; default: the temporary folder.")] =
    None,
    gib: Annotated[float, typer.Option(help="Size of the table, GiB; beyond the disk's own cache to mean much.")] = 1.0,
    depths: Annotated[str, typer.Option(help="Page reads in flight.")] = "1,16,64",
    rows: Annotated[str, typer.Option(help="Rows asked for at once: a token has 16, a window up to 128.")] =
    "1,16,128,4096",
    seconds: Annotated[float, typer.Option(help="Length of each measurement.")] = 2.0,
    json_: flags.Json = False,
) -> None:
    """Write a table of random rows, read rows of it at random places, and remove it.

    Times are those of windows: from asking until every row is there, dequantised. caller: the part for which the caller
    waits; direct reads go on while it works. Mapped readings start with an empty page cache and ask for all pages of a
    window ahead, as a model does.
    """
    need(0.01 <= gib <= 1024, "--gib is out of range", found=gib, needed="0.01 to 1024")
    need(seconds > 0, "--seconds is out of range", found=seconds, needed="above 0")
    from strata.pack.ngram_speed import measure, write_table

    with tempfile.TemporaryDirectory(dir=folder) as place:
        path = Path(place) / "table.gguf"
        with working(f"writing {gib:g} GiB"):
            write_table(path, int(gib * (1 << 30)))
        with working("reading"):
            found = list(measure(path, _numbers("--depths", depths), _numbers("--rows", rows), seconds))
    if json_:
        report = {"command": " ".join(["strata", *sys.argv[1:]]), "gib": gib, "readings": [asdict(r) for r in found]}
        typer.echo(json.dumps(report, indent=2))
        return
    typer.echo(
        f"{'mode':<8}{'in flight':>10}{'rows':>8}{'windows':>9}{'median us':>12}{'99 % us':>12}{'caller us':>12}{'rows/s':>10}"
    )
    for r in found:
        typer.echo(
            f"{r.mode:<8}{r.depth or '-':>10}{r.rows:>8,}{r.windows:>9,}{r.median_us:>12,.1f}{r.p99_us:>12,.1f}"
            f"{r.caller_us:>12,.1f}{r.rows_per_s:>10,.0f}"
        )


def _numbers(name: str, text: str) -> list[int]:
    """Numbers out of "1,16". Raises BadArgument."""
    parts = [part.strip() for part in text.split(",")]
    good = all(part.isdigit() and int(part) > 0 for part in parts)
    need(good, f"{name} cannot be read", found=repr(text), needed="numbers above 0, as 1,16,64")
    return [int(part) for part in parts]
