"""strata bench doorbell: either side of the exchange, that what is timed is what it is said to be, what is refused.

Kernels run on the CPU through the shim, or on a GPU with STRATA_TEST_DEVICE=cuda.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

from strata.base.errors import BadArgument, StrataError
from strata.cli import app
from strata.cli.bench.doorbell import cpu_side, gpu_side, stand
from strata.cli.bench.doorbell.stand import Experts, Sizes, Stand
from strata.cpu.tiers import best_tier
from strata.gpu import device
from strata.layer_speed import LayerBench
from tests.gpu.host_device import HostDevice
from tests.gpu.run_on_cpu import ON_DEVICE, needs_compiler

SMALL = Sizes(D=128, F=64, K=4)


def bench(*words: str):
    return CliRunner().invoke(app, ["bench", "doorbell", *words])


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(stand, "SIZES", SMALL)
    for name, value in {"BLOCKS": (2, 3), "FETCHED": (1, 4), "ROUNDS": 1, "FETCH_ROUNDS": 1, "LATE_US": 500}.items():
        monkeypatch.setattr(gpu_side, name, value)
    if not ON_DEVICE:
        monkeypatch.setattr(device, "CupyDevice", lambda index: HostDevice())


# ---- the GPU's side


@needs_compiler
def test_the_gpu_s_side(quick):
    done = bench("--rows", "1,2", "--layers", "2", "--n-experts", "16", "--types", "Q4_0/Q8_0", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert (found["layers"], found["K"]) == (2, 4)
    assert found["expert_bytes"] == 2 * 64 * 128 // 32 * 18 + 128 * 64 // 32 * 34
    assert [b["rows"] for b in found["bells"]] == [1, 2]
    assert all(min(b["silent_us"], b["one_us"], b["one_in_place_us"]) > 0 for b in found["bells"])
    assert [f["experts"] for f in found["fetches"]] == [1, 4]
    assert all(set(f["gbps"]) == {"2", "3"} and min(f["gbps"].values()) > 0 for f in found["fetches"])
    kinds = [(r["hits"], r["link"], r["cpu"], r["answer_us"], r["form"]) for r in found["shared"] if r["rows"] == 2]
    assert kinds == [
        (4, 0, 0, 0, "no doorbell"),
        (4, 0, 0, 0, ""), (2, 0, 2, 0, ""), (2, 0, 2, 20, ""), (2, 1, 1, 20, ""), (2, 2, 0, 0, ""), (0, 2, 2, 40, ""),
        (0, 0, 4, 0, ""), (0, 2, 2, 100, ""), (0, 4, 0, 0, ""),
        (2, 0, 2, 500, ""), (2, 0, 2, 500, "copy_sums off"), (2, 0, 2, 500, "stamp_branches off"),
        (2, 0, 2, 500, "staging off"),
    ]  # fmt: skip
    for r in found["shared"]:
        assert r["us"] >= r["answer_us"] and (r["form"] == "no doorbell") == (not r["parts_us"])


@needs_compiler
def test_a_stand_serves_what_it_holds():
    """Rows that are alike get the same sum, wherever their experts are; all resident, that is the definition's."""
    opened = device.CupyDevice() if ON_DEVICE else HostDevice()
    made = Stand(opened, Experts(("Q8_0", "Q8_0", "Q8_0"), 1, 8, SMALL.F, SMALL.D), SMALL.K)
    results = []
    for split, hits in ((None, 4), (made.hybrid.split, 4), (made.hybrid.split, 2)):
        low, first = made.lowering(1, split)
        made.hold(hits)
        made.hybrid.set_share(0 if hits == 4 else 1)
        opened.graph([*first, *low.launches])()
        made.check(low.error)
        y = np.empty((1, SMALL.D), np.float32)
        opened.download(low.memory.address("y"), y)
        results.append(y)
    assert np.isfinite(results[0]).all() and results[0].any()
    assert np.array_equal(results[0], results[1]) and np.array_equal(results[0], results[2]), "hits, and over the link"
    opened.upload(low.error, np.array([5], np.uint64))
    with pytest.raises(BadArgument, match="without an error"):
        made.check(low.error)
    made.close()
    opened.close()


@needs_compiler
def test_what_people_read(quick):
    done = bench("--rows", "1", "--layers", "1", "--n-experts", "16", "--types", "Q4_0/Q8_0")
    assert done.exit_code == 0, done.output
    text = done.stdout.splitlines()
    assert "1 layers, 4 experts" in text[0] and sum("no doorbell" in line for line in text) == 1
    assert len(text) == 2 + 2 + 1 + 3 + 1 + 2 + 1 + 9 + 4


# ---- the CPU's side


@pytest.fixture
def brief(monkeypatch):
    sizes = {"SHORTEST_REQUESTS": 5, "WINDOW_REQUESTS": 3, "WINDOWS": 6, "SERVED": ((1, 1), (1, 3), (4, 10))}
    for name, value in sizes.items():
        monkeypatch.setattr(cpu_side, name, value)


def test_the_cpu_s_side(brief, tiny_path: Path):
    arguments = ["--cpu", "--model", str(tiny_path), "--threads", "1", "--mb", "8", "-r", "1", "--types", "Q8_0/Q8_0"]
    done = bench(*arguments, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert [s["entries"] for s in found["shortest"]] == [0, 1, 4]
    assert all(0 < s["least_us"] <= s["us"] <= s["p99_us"] for s in found["shortest"])
    kinds = [(s["types"], s["rows"], s["experts"], s["threads"]) for s in found["requests"]]
    assert kinds == [("Q8_0/Q8_0", *k) for k in ((1, 1, 1), (1, 3, 1), (4, 10, 1))]
    for s in found["requests"]:
        assert s["us"] > 0 and s["products_us"] > 0 and s["products_share"] > 0
        assert s["gbps"] == pytest.approx(s["experts"] * 3 * 640 * 2560 // 32 * 34 / s["us"] / 1e3)
    said = cpu_side.lines(found)
    assert len(said) == 3 + 3 and "products alone" in said[-1]


def test_windows_beside_python(brief, tiny_path: Path):
    done = bench("--cpu", "--model", str(tiny_path), "--threads", "1", "--busy-python", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)["busy"]
    assert [b["interval_s"] for b in found] == [0.0, 0.005, *cpu_side.INTERVALS]
    assert all(b["window_ms"] > b["requests_ms"] > 0 for b in found)


def test_products_are_those_of_the_request():
    """The stand-in's request has the products' bytes, and an answer that fails is no figure."""
    with LayerBench("Q8_0/Q8_0", best_tier(), 1 << 20) as made:
        job = cpu_side._products(made, made.sets[0][:3])
        assert job.n_bytes == 3 * made.weights.experts.blob_bytes(0)

    silent = SimpleNamespace(ask=lambda n, seed: SimpleNamespace(replied=n - 1, statuses=0, mean_us=1.0))
    with pytest.raises(StrataError, match="does not answer"):
        cpu_side._asked(silent, 3)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--threads", "2"], "--threads does nothing without --cpu"),
        (["--cpu", "--rows", "1"], "--rows does nothing with --cpu"),
        (["--cpu", "--busy-python", "--mb", "8"], "--mb does nothing with --busy-python"),
        (["--types", "Q4_K"], "types of the experts cannot be read"),
        (["--types", "Q4_K/F32"], "experts are not shared"),
        (["--rows", "9"], "--rows cannot be read"),
        (["--n-experts", "5"], "--n-experts is out of range"),
        (["--cpu", "--mb", "1"], "--mb is out of range"),
    ],
)
def test_refusals(words, message):
    done = bench(*words)
    assert done.exit_code == 2 and message in done.stderr, done.output


@pytest.mark.skipif(ON_DEVICE, reason="describes a machine without a GPU")
def test_the_gpu_s_side_needs_a_gpu(monkeypatch):
    def none(index):
        raise StrataError("no driver")

    monkeypatch.setattr(device, "CupyDevice", none)
    done = bench()
    assert done.exit_code == 1 and "needs a GPU" in done.stderr
