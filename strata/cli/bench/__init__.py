"""strata bench: speed on this machine, measured."""

from __future__ import annotations

import typer

from strata.cli.bench import cpu_kernels, decode, draft, experts, float_ops, gpu, ngram, prefill, synth, versus

app = typer.Typer(rich_markup_mode=None, add_completion=False, no_args_is_help=True)

_VERBS = {
    "decode": decode,
    "draft": draft,
    "cpu-kernels": cpu_kernels,
    "experts": experts,
    "float-ops": float_ops,
    "gpu": gpu,
    "ngram": ngram,
    "prefill": prefill,
    "synth": synth,
    "versus": versus,
}
for _name, _verb in _VERBS.items():
    app.command(_name, context_settings={"help_option_names": ["-h", "--help"]})(_verb.command)


@app.callback()
def _every_bench() -> None:
    """Measure speed on this machine."""
