"""strata score: how well a model predicts a text."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from strata.base.errors import BadArgument, need
from strata.cli import flags
from strata.cli.output import Bar
from strata.cli.texts import name_of, read_text, tokens_of


@flags.takes(load=flags.LOAD)
def command(
    file: Annotated[
        Path, typer.Argument(parser=flags.path_of, metavar="FILE", help='A UTF-8 text; "-" reads stdin.',
                             show_default=False)
    ],
    model: flags.Model = None,
    window: Annotated[int | None, typer.Option(help="Tokens read from each empty state; default: the context.")] = None,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", "-n", help="Use only the first tokens.")] = None,
    special: Annotated[bool, typer.Option("--special", help="Control tokens in the text are control tokens.")] = False,
    *,
    load: flags.Options,
    json_: flags.Json = False,
) -> None:
    """Measure nats per token and perplexity of a text.

    The text is cut into windows, each read from an empty state; the first token of a window is not predicted.
    """
    text = read_text(file)
    for name, value, least in (("--window", window, 2), ("--max-tokens", max_tokens, 2)):
        need(value is None or value >= least, f"{name} is too small", found=value, needed=f">= {least}")
    with flags.loaded(model, **load) as loaded:
        if window is not None and window > loaded.context:
            raise BadArgument("--window exceeds the context", found=window, needed=f"<= {loaded.context}")
        tokens = tokens_of(loaded, text, name_of(file), special, least=2)[:max_tokens]
        size = min(window or loaded.context, len(tokens))
        began = time.perf_counter()
        predicted, total = 0, 0.0
        parts = [tokens[i : i + size] for i in range(0, len(tokens), size)]
        with Bar("scoring", "tokens") as bar:
            bar.update(0, len(tokens))
            for i, part in enumerate(parts):
                if len(part) > 1:  # a last window of one token has nothing to predict
                    found = loaded.score(np.asarray(part))
                    predicted, total = predicted + found.tokens, total + found.tokens * found.nats
                bar.update(min((i + 1) * size, len(tokens)), len(tokens))
        seconds = time.perf_counter() - began
        report = {
            "file": str(file),
            "model": str(loaded.stats()["file"]),
            "tokens": len(tokens),
            "window": size,
            "windows": len(parts),
            "predicted_tokens": predicted,
            "nats_per_token": total / predicted,
            "perplexity": math.exp(total / predicted),
            "seconds": round(seconds, 3),
            "tokens_per_s": round(len(tokens) / seconds, 1),
        }
    if json_:
        typer.echo(json.dumps(report))
        return
    typer.echo(f"tokens            {report['tokens']} in {len(parts)} window(s) of {size}, {predicted} predicted")
    typer.echo(f"nats per token    {report['nats_per_token']:.6f}")
    typer.echo(f"perplexity        {report['perplexity']:.4f}")
    typer.echo(f"speed             {report['tokens_per_s']:.1f} tokens/s")
