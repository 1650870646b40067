"""strata calibrate: find faster settings for a model on this machine, and remember them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from strata.base.errors import need
from strata.base.trials import LEAST_GAIN, LEAST_TURNS
from strata.cli import flags
from strata.cli.locate import find_model
from strata.cli.output import note

if TYPE_CHECKING:
    from strata.planner.remembered import Settings


def command(
    ctx: typer.Context,
    file: flags.GgufFile,
    windows: Annotated[int, typer.Option(help="Windows of a turn.")] = 16,
    turns: Annotated[int, typer.Option(help=f"Turns of each comparison, {LEAST_TURNS} or more; medians count.")] = 7,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda:N.")] = "auto",
    forget: Annotated[bool, typer.Option("--forget", help="Drop what is remembered, and measure nothing.")] = False,
    json_: flags.Json = False,
) -> None:
    """Measure experts, memory and link, try the settings they suggest, and remember what is faster: by 3 % or more, and
    by more than the turns of the comparison differ.

    What is remembered holds for this machine and this file. Loads take the share of the link from
    there. Without a GPU, fewer CPU threads are tried; loads take their number only where --threads gives it.
    """
    for name, value, least in (("--windows", windows, 1), ("--turns", turns, LEAST_TURNS)):
        need(value >= least, f"{name} is too small", found=value, needed=f">= {least}")
    if forget:
        flags.refuse_idle(ctx, ("windows", "turns", "device"), "with --forget")
    path = find_model(file, "the argument")
    from strata.planner import remembered
    from strata.planner.machine import Machine

    if forget:
        dropped = remembered.forget(Machine.here(path), path)
        typer.echo(json.dumps({"file": str(path), "forgotten": dropped}) if json_ else
                   "forgotten" if dropped else "nothing is remembered for this machine and file")  # fmt: skip
        return
    remembered.require_place()
    note("measuring; other work on this machine disturbs")
    from strata.calibration import calibrate

    machine = Machine.here(path, measure=True)
    found = calibrate(path, machine=machine, windows=windows, turns=turns, device=device, say=note)
    record = found.record()
    where = remembered.remember(machine, path, found.settings, record)
    record |= {"cpu": machine.cpu_name, "remembered_in": str(where)}
    typer.echo(json.dumps(record) if json_ else "\n".join(_text(record, found.settings)))


def _text(r: dict[str, Any], settings: Settings) -> list[str]:
    e = r["experts"]
    lines = [
        f"CPU         {r['cpu']}, {e['threads']} threads",
        f"an expert   {e['one_us']:.1f} us for one row, {e['eight_us']:.1f} us for eight",
        f"RAM         {r['memory_gbps']:.1f} GB/s",
        f"link        {'not measured' if r['link_gbps'] is None else format(r['link_gbps'], '.1f') + ' GB/s'}",
    ]
    if r["split"]:
        lines.append(f"suggested   {r['split']['pcie_num']}/256 of the misses over the link")
    for t in r["trials"]:
        base, ms, gain, spread = t["base_ms"], t["candidate_ms"], 100 * t["gain"], 100 * t["spread"]
        noise = t["gain"] >= LEAST_GAIN and not t["kept"]
        verdict = "kept" if t["kept"] else f"not kept{': the turns differ by more' if noise else ''}"
        lines.append(f"{_name(t['candidate']):<11} {ms:.3f} ms a window, against {base:.3f}: {gain:+.1f} %, turns "
                     f"within {spread:.1f} %, {verdict}")  # fmt: skip
    lines += [f"note        {text}" for text in r["notes"]]
    if r["trials"] and not any(t["kept"] for t in r["trials"]):
        lines.append(f"nothing is kept: no setting was faster by {100 * LEAST_GAIN:g} % and by more than its turns "
                     "differ")  # fmt: skip
    lines.append(f"settings    {_name(vars(settings))}")
    if settings.pcie_num is not None:
        lines.append(f"kept in     {r['remembered_in']}, from where loads take the share of the link")
    if settings.threads is not None:
        lines.append(f"kept in     {r['remembered_in']}; loads take the number of threads only where it is given, as "
                     f"--threads {settings.threads}")  # fmt: skip
    if settings.pcie_num is None and settings.threads is None:
        lines.append(f"measured    is written to {r['remembered_in']}; loads choose as they did without it")
    return lines


def _name(settings: dict[str, int | None]) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items() if value is not None) or "as planned"
