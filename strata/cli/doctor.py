"""strata doctor: what this machine has and what of it will be slow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from strata.base.errors import FileError
from strata.cli.flags import path_of
from strata.cli.locate import is_there
from strata.planner.health import examine


def command(
    path: Annotated[
        Path | None,
        typer.Argument(parser=path_of, metavar="PATH", help="A model file or its folder; default: here.",
                       show_default=False),
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Say which parts of this machine will be slow, why, and what to do about it."""
    what, needed = "doctor has nothing to look at", "a model file, its folder, or nothing"
    if path is not None and not is_there(path, what, needed):
        raise FileError(what, found=f"no file or folder '{path}'", needed=needed)
    report = examine(path)
    typer.echo(json.dumps(report.to_json(), indent=2) if json_ else report.text())
