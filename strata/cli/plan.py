"""strata plan: price a load before it happens, for this machine or one described by options."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from strata.base.errors import BadArgument, StrataError
from strata.cli import flags
from strata.cli.locate import find_model
from strata.planner.cards import GIB
from strata.planner.machine import Machine
from strata.planner.of_load import plan_file

USAGE, REFUSED = 2, 1


def command(
    ctx: typer.Context,
    given: flags.ModelFile = None,
    gpu: Annotated[str | None, typer.Option(help='Plan for a known card, as "RTX 5070".')] = None,
    vram_gib: Annotated[float | None, typer.Option(help="Plan for a card with this much memory.")] = None,
    vram_gbps: Annotated[float | None, typer.Option(help="Memory bandwidth of that card, GB/s.")] = None,
    link_gbps: Annotated[float | None, typer.Option(help="Rate of its link, GB/s.")] = None,
    ram_gib: Annotated[float | None, typer.Option(help="Plan for a machine with this much RAM.")] = None,
    ram_gbps: Annotated[float | None, typer.Option(help="Memory read rate, GB/s.")] = None,
    cores: Annotated[int | None, typer.Option(help="Physical cores.")] = None,
    cpu_tier: Annotated[str | None, typer.Option(help="portable, avx2 or avx512.")] = None,
    context: Annotated[
        int | None, typer.Option(help="Cells per session; default: the largest that fits, up to the trained one.")
    ] = None,
    sessions: Annotated[int, typer.Option(help="Session states to allocate.")] = 1,
    kv: Annotated[str, typer.Option(help="auto, f16 or int8.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda:N.")] = "auto",
    experts: Annotated[str, typer.Option(help="auto, mapped, pinned or resident.")] = "auto",
    slots: flags.Slots = None,
    pcie_share: Annotated[float | None, typer.Option(help="Share of the others over PCIe; default: by cost.")] = None,
    prefill: Annotated[str, typer.Option(help="auto, windows or rows of a chunk.")] = "auto",
    draft: Annotated[
        str, typer.Option(help="off, auto, lookup, a draft layer's file or folder, or mtp: one that is not here.")
    ] = "off",
    draft_vocabulary: Annotated[int | None, typer.Option(help="Head rows that drafts are scored on.")] = None,
    checkpoints: Annotated[int, typer.Option(help="Recurrent states kept in RAM.")] = 6,
    reserve_mib: Annotated[float | None, typer.Option(help="VRAM left free, MiB.")] = None,
    hit_rate: Annotated[float | None, typer.Option(help="Share of routed experts found in VRAM, if known.")] = None,
    profile: Annotated[
        Path | None, typer.Option(parser=flags.path_of, metavar="PATH", help="Expert profile file.")
    ] = None,
    ngram: Annotated[str, typer.Option(help="How rows of the n-gram table are read: auto, mapped or direct.")] = "auto",
    threads: Annotated[int | None, typer.Option(help="CPU workers.")] = None,
    measure: Annotated[bool, typer.Option("--measure", help="Time this machine's kernels, no listed rates.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Say what a load takes, whether it fits, what bounds its speed and what to change.

    The plan is the one that a load executes, here or on the machine described. Reads headers only; a partly downloaded
    file will do. Exit status: 0 fits, 1 does not, cannot be read or asks for a GPU that is not there, 2 usage.
    """
    options = {
        "context": context,
        "sessions": sessions,
        "kv": kv,
        "device": device,
        "experts": experts,
        "pcie_share": pcie_share,
        "prefill": int(prefill) if flags.is_count(prefill) else prefill,
        "draft": draft,
        "draft_vocabulary": draft_vocabulary,
        "checkpoints": checkpoints,
        "reserve_mib": reserve_mib,
        "hit_rate": hit_rate,
        "profile": profile,
        "ngram": ngram,
        "threads": threads,
    }
    described = {
        "gpu": gpu,
        "vram_gib": vram_gib,
        "vram_gbps": vram_gbps,
        "link_gbps": link_gbps,
        "ram_gib": ram_gib,
        "ram_gbps": ram_gbps,
        "cores": cores,
        "cpu_tier": cpu_tier,
    }
    try:
        if draft in ("off", "lookup"):
            flags.refuse_idle(ctx, {"draft_vocabulary"}, f"with --draft {draft}")
        if measure:
            flags.refuse_idle(ctx, {"cpu_tier"}, "with --measure")
        if device == "cpu":
            flags.refuse_idle(ctx, {"hit_rate", "reserve_mib", "profile"}, "with --device cpu")
        file = find_model(given, "the argument")
        asked = flags.slots(slots)
        plan = plan_file(file, machine=_machine(file, described), measure=measure, slots=asked, **options)
    except BadArgument as error:
        typer.echo(f"strata plan: {error}", err=True)
        raise typer.Exit(USAGE) from None
    except StrataError as error:
        typer.echo(f"strata plan: {error}", err=True)
        raise typer.Exit(REFUSED) from None
    typer.echo(json.dumps(plan.to_json(), indent=2) if json_ else plan.table())
    raise typer.Exit(0 if plan.fits else REFUSED)


def _machine(file: Path, described: dict[str, object]) -> Machine:
    """This machine, or a described one that takes what was not said from this one (but no card)."""
    given = {k: v for k, v in described.items() if v is not None}
    here = Machine.here(
        file if os.path.exists(file) else None, measure="ram_gbps" not in given and "ram_gib" not in given
    )
    if not given:
        return here
    base: dict[str, object] = {
        "cores": here.usable_cores,
        "cpu_tier": here.kernel_tier,
        "ram_gib": here.ram_total_bytes / GIB,
    }
    if "ram_gib" not in given:
        base |= {"ram_available_gib": here.ram_available_bytes / GIB, "ram_gbps": given.get("ram_gbps", here.ram_gbps)}
    return Machine.describe(**{**base, **given})
