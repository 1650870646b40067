"""strata run: continue a prompt."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from strata.base.errors import need
from strata.cli import FAILED, INTERRUPTED, flags
from strata.cli.experts_text import expert_lines
from strata.cli.locate import find_model
from strata.cli.output import (
    Bar,
    LoadLines,
    first_interrupt,
    is_terminal,
    note,
    progress_text,
    quiet_interrupt,
    working,
    write,
)
from strata.cli.texts import STDIN, tokens_of, typed_text

if TYPE_CHECKING:
    from strata.model import Model
    from strata.records import Result
    from strata.streams import TextStream

BAR_TOKENS = 512
"""Prompts from this length on show how far they are read."""

CHECKED = frozenset(("context", "kv", "threads", "device"))
"""Options that --check looks at."""


@flags.takes(answer=flags.ANSWER, load=flags.LOAD_AND_DRAFT)
def command(
    ctx: typer.Context,
    prompt: Annotated[str, typer.Argument(help='The text to continue; "-" reads it from stdin.', show_default=False)],
    model: flags.Model = None,
    *,
    answer: flags.Options,
    ignore_eos: flags.IgnoreEos = False,
    logprobs: Annotated[bool, typer.Option("--logprobs", help="Report log-probabilities (with --json).")] = False,
    top_logprobs: Annotated[int | None, typer.Option(help="And of this many most likely tokens, up to 20.")] = None,
    load: flags.Options,
    check: Annotated[
        bool, typer.Option("--check", help="Compare the GPU with the CPU on the prompt, bit by bit, and stop.")
    ] = False,
    stats: Annotated[
        bool, typer.Option("--stats", help="Say how GPU and CPU shared experts (with --json: the counters).")
    ] = False,
    json_: flags.Json = False,
) -> None:
    """Continue a prompt. The answer streams to stdout, and nothing else does.

    Ctrl-C ends the answer at the next token, with exit status 130; a second one ends the program at once.
    """
    options = flags.answer_options(
        **answer, ignore_eos=ignore_eos, logprobs=logprobs or top_logprobs is not None, top_logprobs=top_logprobs
    )
    if check:
        idle = {*flags.ANSWER, *flags.LOAD_AND_DRAFT, "ignore_eos", "logprobs", "top_logprobs", "stats"} - CHECKED
        flags.refuse_idle(ctx, idle, "with --check")
    else:
        flags.refuse_idle_answers(ctx, answer, load["draft"])
        if not json_:
            flags.refuse_idle(ctx, {"logprobs", "top_logprobs"}, "without --json")
    text = typed_text() if prompt == "-" else prompt
    if check:
        _check(model, text, load["context"], load["kv"], load["threads"], load["device"], json_)
        return
    with flags.loaded(model, **load) as loaded:
        tokens = tokens_of(loaded, text, STDIN) if prompt == "-" else loaded.tokenize(text)
        with Bar("reading the prompt", "tokens") as bar:
            stream = loaded.stream(tokens, on_progress=bar.update if len(tokens) >= BAR_TOKENS else None, **options)
            interrupted = _answer(stream, json_)
        result = stream.result
        counters = loaded.stats()["experts"] if stats else None
        if json_:
            typer.echo(json.dumps(record(loaded, result) | ({"experts": counters} if stats else {})))
        else:
            note(summary(result))
        if stats and not json_:
            none = ["experts are not shared: one device holds them all"]
            typer.echo("\n".join(expert_lines(counters) if counters else none), err=True)
    if interrupted:
        raise typer.Exit(INTERRUPTED)


def _check(
    given: Path | None, text: str, context: int | None, kv: str, threads: int | None, device: str | None, json_: bool
) -> None:
    """Every op on the GPU against the CPU; exit status 1 at the first difference."""
    from strata import checking
    from strata.planner.options import check_device_name

    check_device_name(device or "auto")
    need(device != "cpu", "--check compares a GPU with the CPU", found="--device cpu", needed="cuda or cuda:N")
    index = int((device or "").partition(":")[2] or 0)
    path = find_model(given)
    with working(f"checking {path.name}") as status, quiet_interrupt():
        tell, lines = status or (lambda text: None), LoadLines(f"checking {path.name}")
        report = checking.check(
            path, text, context=context, kv="f16" if kv == "auto" else kv, threads=threads, index=index,
            on_progress=lambda done, n: tell(f"checking {path.name}: {done} of {n} tokens"),
            loading=lambda p: tell(f"checking {path.name}: {progress_text(p)}") if status else lines.update(p),
        )  # fmt: skip
    typer.echo(json.dumps(report.record()) if json_ else str(report))
    if report.difference is not None:
        raise typer.Exit(FAILED)


def _answer(stream: TextStream, silent: bool) -> bool:
    """Write the stream's text as it comes; True if Ctrl-C ended it."""
    from strata.runtime.generate import Cancelled

    ended = ""
    with first_interrupt(stream.close) as interrupt, stream:
        try:
            for chunk in stream:
                if not silent and chunk.text:
                    write(chunk.text)
                    ended = chunk.text
        except Cancelled:
            pass  # the prompt was being read
    if not silent and is_terminal(sys.stdout) and not ended.endswith("\n"):
        write("\n")
    return interrupt.hit


def record(model: Model, result: Result) -> dict[str, Any]:
    """A result as plain data; tokens of logprobs come with their texts."""
    found = dataclasses.asdict(result)
    found["usage"]["total_tokens"] = result.usage.total_tokens
    if result.logprobs is not None:
        found["logprobs"] = [
            {
                "token": entry.token,
                "text": model.detokenize([entry.token]),
                "logprob": entry.logprob,
                "top": [{"token": t, "text": model.detokenize([t]), "logprob": p} for t, p in entry.top],
            }
            for entry in result.logprobs
        ]
    return {"model": str(model.stats()["file"]), "load_s": round(model.load_seconds, 3), **found}


def summary(result: Result) -> str:
    """An answer's numbers in one line."""
    u, t = result.usage, result.timings
    read = f"{u.prompt_tokens} prompt tokens" + (f" ({u.reused_tokens} reused)" if u.reused_tokens else "")
    if t.prompt_tokens_per_s:
        read += f" at {t.prompt_tokens_per_s:.0f} tokens/s"
    drafted = f", {result.drafts['committed_per_window']:.2f} a window" if result.drafts else ""
    return (
        f"[{read}; {u.output_tokens} tokens at {t.decode_tokens_per_s:.1f} tokens/s{drafted}; {result.finish_reason}]"
    )
