"""strata profile: which experts a model asks for, ranked for the cache, and what a cache would hit."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from strata.base.errors import FileError, need
from strata.base.numbers import shown
from strata.cli import flags
from strata.cli.locate import find_model, is_there
from strata.cli.output import Bar
from strata.cli.texts import name_of, read_text, tokens_of
from strata.pack.gguf_file import shard_paths

if TYPE_CHECKING:
    from strata.profiling import CacheSize
    from strata.runtime.simulate import RoutedWindow


OF_TEXTS = ("rows", "max_tokens", "special", "context", "threads")
"""Parameters that a trace has no use for."""


def command(
    ctx: typer.Context,
    file: flags.GgufFile,
    texts: Annotated[
        list[Path] | None,
        typer.Argument(parser=flags.path_of, metavar="TEXT", help='UTF-8 texts that the model reads; "-" is stdin.',
                       show_default=False),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", parser=flags.path_of, metavar="PATH", help="Write the profile (.strp)."),
    ] = None,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Rank by the first part, replay the rest: hit rates of cache policies.")
    ] = False,
    trace: Annotated[
        Path | None, typer.Option(parser=flags.path_of, metavar="PATH", help="Write the routing of the texts.")
    ] = None,
    from_trace: Annotated[
        list[Path] | None,
        typer.Option(parser=flags.path_of, metavar="PATH",
                     help="Take the routing of a trace, without running the model. Repeatable."),
    ] = None,
    slots: Annotated[
        list[int] | None, typer.Option(help="Cache size to simulate, in experts. Repeatable; default: 1/16 to 1/2.")
    ] = None,
    held_out: Annotated[float, typer.Option(help="Share of the routing that the simulation replays.")] = 0.5,
    rows: Annotated[int, typer.Option(help="Rows of the windows that texts are cut into for simulation.")] = 1,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", "-n", help="Use only the first of a text.")] = None,
    special: Annotated[bool, typer.Option("--special", help="Control tokens in a text are control tokens.")] = False,
    context: flags.Context = None,
    threads: flags.Threads = None,
    json_: flags.Json = False,
) -> None:
    """Rank the experts of a model by how often texts ask for them.

    The model reads the texts on the CPU; texts of the kind it will work on make the best profile. The expert cache and
    `strata plan --profile` use it. A simulation needs the routing alone, and no GPU.
    """
    need(out is not None or simulate or trace is not None, "there is nothing to do", found="no result asked for",
         needed="-o, --simulate or --trace")  # fmt: skip
    need(bool(texts) != bool(from_trace), "routing comes from texts or from traces",
         found="both" if texts else "neither", needed="one of TEXT... and --from-trace")  # fmt: skip
    need(trace is None or bool(texts), "--trace writes the routing of texts", found="--from-trace", needed="TEXT...")
    if from_trace:
        flags.refuse_idle(ctx, OF_TEXTS, "with --from-trace")
    if not simulate:
        flags.refuse_idle(ctx, ("slots", "held_out"), "without --simulate")
        if trace is None:
            flags.refuse_idle(ctx, ("rows",), "without --simulate or --trace")
    need(1 <= rows <= 8, "--rows is out of range", found=rows, needed="1 to 8")
    need(max_tokens is None or max_tokens >= 1, "--max-tokens is too small", found=max_tokens, needed=">= 1")
    need(0 < held_out < 1, "--held-out is out of range", found=held_out, needed="above 0, and below 1")
    path = find_model(file, "the argument")
    taken = [*shard_paths(path), *(texts or ()), *(from_trace or ())]
    for place in filter(None, (out, trace)):
        _check_place(place)
        _check_kept(place, taken)
        taken.append(place)
    layers, experts, expert_bytes = _experts(path)
    for n in slots or ():
        need(0 <= n <= layers * experts, "--slots is out of range", found=n, needed=f"0 to {layers * experts:,}")
    if from_trace:
        from strata.runtime.simulate import trace_windows

        parts = [trace_windows(one, layers, experts) for one in from_trace]
    else:
        parts = _read_texts(path, texts, rows, max_tokens, special, context, threads)
    windows = [w for part in parts for w in part]
    if not windows:  # texts have some
        raise FileError("the traces hold no routing", found="0 windows", needed="1 or more")
    report = {"file": str(path), "sources": [str(p) for p in from_trace or texts], "layers": layers, "experts": experts}
    report |= _facts(windows, experts)
    if trace is not None:
        from strata.profiling import write_trace

        write_trace(trace, parts)
        report["trace"] = str(trace)
    if out is not None:
        from strata.pack.profile import write_profile
        from strata.profiling import profile_of

        write_profile(out, profile_of(windows, layers, experts))
        report["profile"] = str(out)
    if simulate:
        from strata.profiling import simulate_sizes

        found = simulate_sizes(windows, expert_bytes, experts, slots, held_out)
        replayed = found[0].replays[0].windows
        report["simulation"] = {"windows": len(windows) - replayed, "held_out_windows": replayed,
                                "sizes": [_size(size) for size in found]}  # fmt: skip
    typer.echo(json.dumps(report) if json_ else "\n".join(_text(report)))


def _check_place(place: Path) -> None:
    """FileError for a file that could not be written after the texts have been read, which may take hours."""
    folder, needed = place.parent, "a file in a writable folder that exists"
    there = is_there(place, f"cannot write {shown(str(place))}", needed)
    if place.name == "" or (there and place.is_dir()):
        found = "a folder"
    elif not folder.is_dir():
        found = f"no folder '{folder}'"
    elif not os.access(folder, os.W_OK):
        found = f"'{folder}' is not writable"
    else:
        return
    raise FileError(f"cannot write {shown(str(place))}", found=found, needed=needed)


def _check_kept(place: Path, others: list[Path]) -> None:
    """BadArgument for a result that would take the place of a file that is read, or of the other result."""
    for other in others:
        same = place.samefile(other) if place.exists() and other.exists() else place.resolve() == other.resolve()
        need(not same, "a result would replace a file of this command", found=f"'{place}', which is '{other}'",
             needed="a file of its own for each result")  # fmt: skip


def _experts(path: Path) -> tuple[int, int, tuple[int, ...]]:
    """(layers, experts a layer, bytes of one expert by layer), from headers."""
    from strata.arch import architecture_of
    from strata.pack.experts import expert_layout
    from strata.pack.gguf_file import GgufFile

    with GgufFile(path, headers_only=True) as gguf:
        layout = expert_layout(gguf, architecture_of(gguf).read_geometry(gguf).L)
        return layout.n_layers, layout.E, tuple(layout.blob_bytes(layer) for layer in range(layout.n_layers))


def _read_texts(
    path: Path, texts: list[Path], rows: int, max_tokens: int | None, special: bool, context: int | None,
    threads: int | None,
) -> list[list[RoutedWindow]]:  # fmt: skip
    """The windows of each text. Files are read before the model is loaded, so that a missing one is told at once."""
    contents = [read_text(text) for text in texts]
    with flags.loaded(path, context=context, threads=threads, device="cpu") as model, Bar("reading", "tokens") as bar:
        from strata.profiling import route_text
        from strata.runtime.simulate import cut_windows

        named = zip(contents, map(name_of, texts), strict=True)
        tokens = [tokens_of(model, content, name, special)[:max_tokens] for content, name in named]
        total, parts, done = sum(map(len, tokens)), [], 0
        for ids in tokens:
            routed = route_text(model, ids, lambda read, _, before=done: bar.update(before + read, total))
            parts.append(cut_windows(routed, rows))
            done += len(ids)
    return parts


def _facts(windows: list[RoutedWindow], experts: int) -> dict[str, Any]:
    import numpy as np

    from strata.replay import routing_facts

    ids = np.concatenate([w.ids[:, : w.n_keep] for w in windows], axis=1).transpose(1, 0, 2)
    return {"tokens": len(ids), "routing": asdict(routing_facts(ids, experts)) if len(ids) >= 2 else None}


def _size(size: CacheSize) -> dict[str, Any]:
    policies = {r.policy: {"hit_rate": r.hit_rate, "copies_per_window": r.copies_per_window} for r in size.replays}
    return {"slots": size.slots, "bytes": size.n_bytes, "policies": policies}


def _text(report: dict[str, Any]) -> list[str]:
    lines = [f"routing    {report['tokens']} tokens, {report['layers']} layers x {report['experts']} experts"]
    if facts := report["routing"]:
        from strata.replay import RoutingFacts

        lines.append(f"           {RoutingFacts(**facts)}")
    lines += [f"{name:<10} {report[name]}" for name in ("trace", "profile") if name in report]
    if found := report.get("simulation"):
        names = list(found["sizes"][0]["policies"])
        lines += ["", f"hit rates of {found['held_out_windows']} held-out windows, profile of the "
                  f"{found['windows']} before; in brackets experts copied a window"]  # fmt: skip
        lines.append(f"{'slots':>7} {'MiB':>9}  " + "".join(f"{name:>16}" for name in names))
        for size in found["sizes"]:
            cells = (f"{100 * p['hit_rate']:.1f} % ({p['copies_per_window']:.1f})" for p in size["policies"].values())
            lines.append(f"{size['slots']:>7} {size['bytes'] / 2**20:>9,.1f}  " + "".join(f"{c:>16}" for c in cells))
    return lines
