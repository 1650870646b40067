"""strata bench: speed on this machine, measured."""

from __future__ import annotations

import typer

from strata.cli.bench import (
    cpu_kernels,
    decode,
    doorbell,
    draft,
    experts,
    float_ops,
    gpu,
    gpu_kernels,
    load,
    ngram,
    plan,
    prefill,
    synth,
    versus,
)

app = typer.Typer(rich_markup_mode=None, add_completion=False, no_args_is_help=True)

_VERBS = {
    "decode": decode,
    "doorbell": doorbell,
    "draft": draft,
    "cpu-kernels": cpu_kernels,
    "experts": experts,
    "float-ops": float_ops,
    "gpu": gpu,
    "gpu-kernels": gpu_kernels,
    "load": load,
    "ngram": ngram,
    "plan": plan,
    "prefill": prefill,
    "synth": synth,
    "versus": versus,
}
for _name, _verb in _VERBS.items():
    app.command(_name, context_settings={"help_option_names": ["-h", "--help"]})(_verb.command)


@app.callback()
def _every_bench() -> None:
    """Measure speed on this machine."""
