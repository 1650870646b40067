"""strata bench gpu-kernels: parts of the GPU's work alone, at the real widths, on the first CUDA device."""

from __future__ import annotations

import contextlib
import json
import mmap
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from strata.base.errors import need
from strata.cli import flags
from strata.cli.bench.numbers import count, numbers, words

if TYPE_CHECKING:
    from strata.cli.bench.gpu_kernels.timer import Figure, Timer

PARTS = {"ops": ("rows", "groups"), "products": ("types", "rows", "tensor_from"), "wide": ("rows",),
         "nodes": ("blocks",), "uploads": ("types", "mib")}  # fmt: skip
"""Part -> parameters that it takes."""
ROWS = {"ops": "1,4", "products": "1,2,4,8", "wide": "2048"}
GROUPS = ("floats", "small", "delta", "head", "attention")


def command(
    ctx: typer.Context,
    part: Annotated[str, typer.Argument(help=f"{', '.join(PARTS)}.")],
    rows: Annotated[str, typer.Option(help="ops, products, wide: rows; default: 1,4 or 1,2,4,8 or 2048.")] = "",
    types: Annotated[str, typer.Option(help="products, uploads: formats, comma-separated; default: some.")] = "",
    groups: Annotated[str, typer.Option(help=f"ops: which, of {', '.join(GROUPS)}; default: all.")] = "",
    tensor_from: Annotated[
        int | None, typer.Option(help="products: rows from which tensor cores take them; 99: never.")
    ] = None,
    blocks: Annotated[str, typer.Option(help="nodes: blocks of a kernel.")] = "1,74,132,320,1072",
    mib: Annotated[int, typer.Option(help="uploads: MiB of the host's memory.")] = 1024,
    json_: flags.Json = False,
) -> None:
    """Time parts of the GPU's work, each alone, over more data than a cache holds.

    ops: kernels of a window other than quantised products. products: quantised products of windows, dense and of
    experts; before they are timed, every bit is compared with numpy. wide: products of chunks on tensor cores, by step.
    nodes: a node of a graph, plain and starting early. uploads: from the host's memory, with and without the device's
    layout, swaps, and registering memory. Percentages are of a copy on the device in the same run, read and written.
    """
    from strata.pack.formats import by_name

    need(part in PARTS, "no such part of gpu-kernels", found=repr(part), needed=", ".join(PARTS))
    flags.refuse_idle(ctx, sorted({p for own in PARTS.values() for p in own} - set(PARTS[part])), f"with {part}")
    chosen = numbers("--rows", rows or ROWS.get(part, "1"), 8 if part != "wide" else 1 << 16)
    formats = words("--types", types)
    for name in formats:
        need(by_name(name).group > 0, f"{name} has no quantised products", found=name, needed="a quantised format")
    wanted = words("--groups", groups) or GROUPS
    need(set(wanted) <= set(GROUPS), "--groups cannot be read", found=repr(groups), needed=", ".join(GROUPS))
    count("--tensor-from", tensor_from, 2)
    count("--mib", mib, 1, 1 << 16)
    places = numbers("--blocks", blocks, 1 << 20)
    found: list[Figure] = []
    report: dict[str, Any] = {"command": " ".join(["strata", *sys.argv[1:]])}

    def on_found(figure: Figure) -> None:
        found.append(figure)
        if not json_:
            typer.echo(figure.line())

    def timing(what: Callable[[Timer], Any]) -> Any:
        with _timer(part, on_found) as t:
            if "device" not in report:
                report.update(device=t.device.name, copy_gbps=round(t.copy_gbps, 1))
                if not json_:
                    typer.echo(f"{t.device.name}: copies at {t.copy_gbps:.0f} GB/s, read and written")
            return what(t)

    if part == "ops":
        from strata.cli.bench.gpu_kernels.ops import GROUPS as OPS

        for T in chosen:
            for name in wanted:  # each on a device of its own: attention's cells fill one
                timing(lambda t, T=T, name=name: OPS[name](t, T))
    elif part == "products":
        from strata.cli.bench.gpu_kernels import products

        report["values_compared"] = timing(lambda t: products.check(t, formats))
        if not json_:
            typer.echo(f"{report['values_compared']:,} values compared with numpy, every bit: 0 differ")
        with products.tensor_cores_from(tensor_from):
            for one in products.timings(formats, chosen):  # each on a device of its own, for memory
                timing(one)
    elif part == "wide":
        from strata.cli.bench.gpu_kernels import wide

        for T in chosen:
            timing(lambda t, T=T: wide.measure(t, T))
    elif part == "nodes":
        from strata.cli.bench.gpu_kernels import nodes

        report["not_early"] = timing(lambda t: nodes.refusal(t))
        if report["not_early"] and not json_:
            typer.echo(f"no early starts: {report['not_early']}")
        timing(lambda t: nodes.measure(t, places))
    else:
        from strata.cli.bench.gpu_kernels import uploads

        n_bytes = (mib << 20) // mmap.PAGESIZE * mmap.PAGESIZE
        timing(lambda t: uploads.measure(t, n_bytes, tuple(formats) or uploads.FORMATS))
    if json_:
        typer.echo(json.dumps(report | {"figures": [asdict(f) for f in found]}, indent=2))


@contextlib.contextmanager
def _timer(part: str, on_found: Callable[[Figure], None]) -> Iterator[Timer]:
    """The first CUDA device, closed behind the block."""
    from strata import gpu_speed
    from strata.cli.bench.gpu_kernels.timer import Timer
    from strata.required_device import required_device

    effort = gpu_speed.DEFAULT_EFFORT
    if part == "wide":  # milliseconds a launch
        effort = replace(effort, nodes=min(effort.nodes, 12))
    with contextlib.closing(required_device("a measurement of a GPU's kernels")) as device:
        yield Timer(device, effort, on_found, part)
