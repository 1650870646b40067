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
from strata.cli.output import Bar, first_interrupt, is_terminal, note, write

if TYPE_CHECKING:
    from strata.model import Model
    from strata.records import Result
    from strata.streams import TextStream

BAR_TOKENS = 512
"""Prompts from this length on show how far they are read."""


def command(
    prompt: Annotated[str, typer.Argument(help='The text to continue; "-" reads it from stdin.', show_default=False)],
    model: flags.Model = None,
    max_tokens: flags.MaxTokens = None,
    temperature: flags.Temperature = None,
    top_k: flags.TopK = None,
    top_p: flags.TopP = None,
    min_p: flags.MinP = None,
    repetition_penalty: flags.RepetitionPenalty = None,
    presence_penalty: flags.PresencePenalty = None,
    frequency_penalty: flags.FrequencyPenalty = None,
    penalty_last_n: flags.PenaltyLastN = None,
    logit_bias: flags.LogitBias = None,
    seed: flags.Seed = None,
    stop: flags.Stop = None,
    ignore_eos: flags.IgnoreEos = False,
    logprobs: Annotated[bool, typer.Option("--logprobs", help="Report log-probabilities (with --json).")] = False,
    top_logprobs: Annotated[int | None, typer.Option(help="And of this many most likely tokens, up to 20.")] = None,
    context: flags.Context = None,
    threads: flags.Threads = None,
    pin: flags.Pin = False,
    kv: flags.Kv = "auto",
    prefill: flags.Prefill = "auto",
    device: flags.Device = None,
    vram_gib: flags.VramGib = None,
    slots: flags.Slots = None,
    experts: flags.Experts = None,
    pcie_share: flags.PcieShare = None,
    profile: flags.Profile = None,
    draft: flags.Draft = None,
    draft_acceptance: flags.DraftAcceptance = None,
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
        max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
        repetition_penalty=repetition_penalty, presence_penalty=presence_penalty, frequency_penalty=frequency_penalty,
        penalty_last_n=penalty_last_n, logit_bias=logit_bias, seed=seed, stop=stop, ignore_eos=ignore_eos,
        draft_acceptance=draft_acceptance,
        logprobs=logprobs or top_logprobs is not None, top_logprobs=top_logprobs,
    )  # fmt: skip
    text = sys.stdin.read() if prompt == "-" else prompt
    if check:
        _check(model, text, context, kv, threads, device, json_)
        return
    with flags.loaded(
        model, context=context, threads=threads, pin=pin, kv=kv, prefill=prefill, draft=draft, device=device,
        vram_gib=vram_gib, slots=flags.slots(slots), experts=experts, pcie_share=pcie_share, profile=profile,
    ) as loaded:  # fmt: skip
        tokens = loaded.tokenize(text)
        with Bar("reading the prompt", "tokens") as bar:
            stream = loaded.stream(tokens, progress=bar.update if len(tokens) >= BAR_TOKENS else None, **options)
            interrupted = _answer(stream, json_)
        result = stream.result
        counters = loaded.stats()["experts"] if stats else None
        if json_:
            typer.echo(json.dumps(record(loaded, result) | ({"experts": counters} if stats else {})))
        else:
            note(summary(result))
        if stats and not json_:
            none = ["experts are not shared: one device holds them all"]
            note("\n".join(expert_lines(counters) if counters else none))
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
    with Bar("checking", "tokens") as bar:
        report = checking.check(find_model(given), text, context=context, kv="f16" if kv == "auto" else kv,
                                threads=threads, index=index, progress=bar.update)  # fmt: skip
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
