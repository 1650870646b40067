"""strata bench ngram: reads of n-gram rows from this machine's disk, past the page cache and through it."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from strata.base.errors import FileError, need
from strata.cli import flags
from strata.cli.bench.numbers import numbers
from strata.cli.output import working

MOST_ROWS = 1 << 16

_WIDTHS = (10, 8, 9, 12, 12, 12, 10)


def command(
    folder: Annotated[
        Path | None,
        typer.Option(parser=flags.path_of, metavar="PATH", help="Where the table lies; default: the temporary one."),
    ] = None,
    gib: Annotated[float, typer.Option(help="Size of the table, GiB; beyond the disk's own cache to mean much.")] = 1.0,
    depths: Annotated[str, typer.Option(help="Page reads in flight.")] = "1,16,64",
    rows: Annotated[str, typer.Option(help="Rows asked for at once: a token has 16, a window up to 128.")] =
    "1,16,128,4096",
    seconds: Annotated[float, typer.Option(help="Length of each measurement.")] = 2.0,
    workers: Annotated[bool, typer.Option("--workers", help="A thread a read instead of the system's queue.")] = False,
    json_: flags.Json = False,
) -> None:
    """Write a table of random rows, read rows of it at random places, and remove it.

    Times are those of windows: from asking until every row is there, dequantised. caller: the part for which the caller
    waits; direct reads go on while it works. Mapped readings start with an empty page cache and ask for all pages of a
    window ahead, as a model does.
    """
    from strata.pack.ngram_reader import MOST_READS_IN_FLIGHT
    from strata.pack.ngram_speed import measure, write_table

    need(0.01 <= gib <= 1024, "--gib is out of range", found=gib, needed="0.01 to 1024")
    need(0 < seconds <= 600, "--seconds is out of range", found=seconds, needed="above 0, at most 600")
    in_flight, sizes = numbers("--depths", depths, MOST_READS_IN_FLIGHT), numbers("--rows", rows, MOST_ROWS)

    n_bytes = int(gib * (1 << 30))
    with _place_of(folder, n_bytes) as place:
        path = place / "table.gguf"
        with working(f"writing {gib:g} GiB"):
            write_table(path, n_bytes)
        with working("reading"):
            found = list(measure(path, in_flight, sizes, seconds, queued=not workers))
    if json_:
        report = {"command": " ".join(["strata", *sys.argv[1:]]), "gib": gib, "readings": [asdict(r) for r in found]}
        typer.echo(json.dumps(report, indent=2))
        return
    columns = ("in flight", "rows", "windows", "median us", "99 % us", "caller us", "rows/s")
    typer.echo(f"{'mode':<8}" + "".join(f"{name:>{w}}" for name, w in zip(columns, _WIDTHS, strict=True)))
    for r in found:
        times = (f"{us:,.1f}" for us in (r.median_us, r.p99_us, r.caller_us))
        cells = (str(r.depth or "-"), f"{r.rows:,}", f"{r.windows:,}", *times, f"{r.rows_per_s:,.0f}")
        typer.echo(f"{r.mode:<8}" + "".join(f"{cell:>{w}}" for cell, w in zip(cells, _WIDTHS, strict=True)))


@contextlib.contextmanager
def _place_of(folder: Path | None, n_bytes: int) -> Iterator[Path]:
    """A new folder in `folder` or the temporary one, removed at the end. FileError where it cannot be made or filled.
    """
    where = folder or Path(tempfile.gettempdir())
    try:
        free = shutil.disk_usage(where).free
        if free < n_bytes:
            raise FileError(f"'{where}' has no room for the table", found=f"{free / (1 << 30):.2f} GiB free",
                            needed=f"{n_bytes / (1 << 30):.2f} GiB",
                            advice="Give a smaller --gib, or another --folder.")  # fmt: skip
        with tempfile.TemporaryDirectory(dir=where) as place:
            yield Path(place)
    except OSError as error:
        raise FileError(f"the table cannot be kept in '{where}'", found=error.strerror or str(error),
                        needed="a folder that can be written", advice="Give another --folder.") from error  # fmt: skip
