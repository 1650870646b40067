"""strata bench: speed on this machine, measured."""

from __future__ import annotations

import typer

from strata.cli.bench import decode

app = typer.Typer(rich_markup_mode=None, add_completion=False, no_args_is_help=True)
app.command("decode", context_settings={"help_option_names": ["-h", "--help"]})(decode.command)


@app.callback()
def _every_bench() -> None:
    """Measure speed on this machine."""
