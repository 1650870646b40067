"""strata convert-mtp: a draft layer from safetensors to the files it is loaded from without conversion."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

from strata.cli import flags
from strata.cli.locate import is_there
from strata.cli.output import Bar


def command(
    source: Annotated[
        Path,
        typer.Argument(parser=flags.path_of, metavar="SOURCE", show_default=False,
                       help="Safetensors file with the tensors mtp.*, or a folder of shards."),
    ],
    out: Annotated[
        Path,
        typer.Argument(parser=flags.path_of, metavar="OUT", show_default=False,
                       help='Folder to write; "mtp/rt" beside a model is found by it.'),
    ],
    experts: Annotated[str, typer.Option(help="Format of the experts: q2_0, q8_0 or bf16.")] = "q2_0",
    force: Annotated[bool, typer.Option("--force", help="Replace an rt folder that is already there.")] = False,
    json_: flags.Json = False,
) -> None:
    """Convert a draft layer (MTP) into an rt folder: smaller, mapped where it can be, nothing to quantise at load.

    The folder appears complete or not at all.
    """
    is_there(source, "the draft layer cannot be looked at", "safetensors: a file or a folder")
    is_there(out, "the output cannot be looked at", "a folder that can be made there")
    # Here, because it takes a second: wrong usage is told at once.
    from strata.pack.mtp.convert import convert

    with Bar("converting", "experts") as bar:
        done = convert(source, out, experts, force, bar.update)
    if json_:
        typer.echo(json.dumps({"folder": str(out), **dataclasses.asdict(done)}))
        return
    notes = {"dense.bin": f"{done.tensors} tensors", "experts.bin": f"{done.experts} experts, {done.format_name}"}
    for name, n_bytes in done.files.items():
        typer.echo(f"{name:<16}{n_bytes / 2**20:>12,.2f} MiB  {notes.get(name, '')}".rstrip())
    typer.echo(f"{'total':<16}{sum(done.files.values()) / 2**20:>12,.2f} MiB  in {out}")
