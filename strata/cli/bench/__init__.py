"""strata bench: speed on this machine, measured."""

from __future__ import annotations

import typer

from strata.cli.bench import cpu_kernels, decode, synth, versus

app = typer.Typer(rich_markup_mode=None, add_completion=False, no_args_is_help=True)

for _name, _verb in {"decode": decode, "cpu-kernels": cpu_kernels, "synth": synth, "versus": versus}.items():
    app.command(_name, context_settings={"help_option_names": ["-h", "--help"]})(_verb.command)


@app.callback()
def _every_bench() -> None:
    """Measure speed on this machine."""
