"""Counters of shared experts as lines for people."""

from __future__ import annotations

from typing import Any


def expert_lines(e: dict[str, Any]) -> list[str]:
    """Lines of `Model.stats()["experts"]`."""
    n, tiers = e["entries"], e["tiers"]
    hits, link, cpu = (count / max(sum(n.values()), 1) for count in (n["hits"], n["link"], n["cpu"]))
    windows = max(e["windows"], 1)
    parts = ", ".join(f"{name} {us:.0f}" for name, us in e["window_parts_us"].items())
    waited = ", ".join(f"{name} {count}" for name, count in e["waited_for"].items())
    layers = e["layers"]["join_us"]
    return [
        f"experts    {tiers['resident']} of {tiers['slots']} slots filled, RAM {e['mode']}, {e['threads']} threads, "
        f"share of the link {e['pcie_share']:.2f}",
        f"entries    {hits:.1%} hits, {link:.1%} over the link, {cpu:.1%} on the CPU; hits of those not over the link "
        f"{e['hit_rate_without_share']:.1%}",
        f"bytes      {e['link_bytes'] / windows / 1e6:.2f} MB over the link, {e['cpu_bytes'] / windows / 1e6:.2f} MB "
        f"by the CPU a window, {e['windows']} windows of {e['rows'] / windows:.2f} rows",
        f"us         {e['window_us']:.0f} a window, of which {parts}",
        f"waited for {waited} layers; slowest layer {layers['max_layer']} with {layers['max']:.0f} us, mean "
        f"{layers['mean']:.0f}",
        f"swaps      {tiers['copies']} experts copied, {tiers['in_flight']} under way",
    ]
