"""strata bench cpu-kernels and versus: what is timed is the work it is said to be, and reports carry its figures."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from strata.base.errors import SelfTestFailed
from strata.cli import app
from strata.cpu.pool import Pool
from strata.cpu.tiers import available_tiers, best_tier
from strata.kernel_speed import KernelBench, Product, activation_records, kernels_of, multiplying, reading
from strata.layer_speed import LayerBench
from strata.pack.formats import by_name
from strata.pack.random_blocks import random_rows

RUNNER = CliRunner()


def test_reading_touches_every_word():
    area = np.random.default_rng(1).integers(0, 256, 5 << 16, dtype=np.uint8)
    job = reading(area)
    with Pool(2) as pool:
        job.run(pool)
    assert job.n_bytes == area.size
    assert int(job.keep[1].sum()) == int(area.view(np.int64).sum())


@pytest.mark.parametrize("name", ["Q4_K", "IQ4_NL", "BF16"])
@pytest.mark.parametrize("R", [1, 3, 8])
def test_a_job_multiplies_every_row(name, R):
    """Against float64 of the dequantised weights: the int8 activations cost less than 2 %."""
    format, tier = by_name(name), best_tier()
    raw = random_rows(format, 300, 2560, 0.02, np.random.default_rng(2))
    out = np.zeros((R, 300), np.float32)
    records = activation_records(format, 2560, R, tier)
    product = Product(raw.ctypes.data, raw.shape[1], 300, 2560, kernels_of(format, tier), records, out)
    job = multiplying([product], R)
    with Pool(1) as pool:
        job.run(pool)
    x = np.random.default_rng(R).standard_normal((R, 2560)).astype(np.float32)
    wanted = x.astype(np.float64) @ format.dequantise(raw).astype(np.float64).T
    assert np.abs(out - wanted).std() < 0.02 * wanted.std()
    assert job.n_bytes == raw.size


def test_rates_of_a_small_area():
    with KernelBench(best_tier(), 2, 4 << 20) as bench:
        found = bench.measure(by_name("Q8_0"), [1, 4], 2)
    assert [r.R for r in found] == [1, 4]
    for r in found:
        figures = [r.cold, r.hot, r.all_threads, r.stream, r.stream_all]
        assert all(len(f) == 2 and min(f) > 0 for f in figures)


def test_a_wrong_kernel_is_not_timed(monkeypatch):
    def refuse(format, tier):
        raise SelfTestFailed(f"the {format.name} kernel", found=tier)

    monkeypatch.setattr("strata.kernel_speed.check_format", refuse)
    with KernelBench(best_tier(), 1, 1 << 20) as bench, pytest.raises(SelfTestFailed, match="Q8_0"):
        bench.measure(by_name("Q8_0"), [1], 1)


def test_layer_is_the_op_and_its_kernels():
    with LayerBench("Q4_K/IQ4_NL", best_tier(), 1 << 20) as bench:
        assert bench.spec.experts == 20
        assert sorted(bench.sets.reshape(-1).tolist()) == list(range(20))
        with Pool(1) as pool:
            layer, jobs = bench.layer(2, pool), bench.kernels(2)
            layer.pass_over()
            y = layer._memory.arrays["y"].copy()
            for job in jobs:
                job.run(pool)
        assert np.isfinite(y).all() and (y[0] != y[1]).any() and y.std() > 0
        expert = 2 * 640 * 1440 + 2560 * 360
        info = bench.tensors.info
        shared = sum(info(f"blk.0.ffn_{p}_shexp.weight").n_bytes for p in ("gate", "up", "down"))
        assert [job.n_bytes for job in jobs] == [10 * expert + shared] * 2
        times = bench.one_core(1, 2)
        assert times.n_bytes == jobs[0].n_bytes
        assert len(times.layer_us) == len(times.kernels_us) == 2 and min(times.layer_us + times.kernels_us) > 0


def test_layer_gives_the_arithmetic_s_result():
    """One row against numpy: ten experts and the shared one, in float64 from dequantised weights."""
    with LayerBench("Q8_0/Q8_0", best_tier(), 1 << 20) as bench, Pool(1) as pool:
        layer = bench.layer(1, pool)
        layer.pass_over()
        arrays, chosen = layer._memory.arrays, bench.sets[-1]
        x = arrays["u"][0].astype(np.float64)
        values = {p: bench.tensors.values(f"blk.0.ffn_{p}_exps.weight") for p in ("gate", "up", "down")}
        shared = {p: bench.tensors.values(f"blk.0.ffn_{p}_shexp.weight") for p in ("gate", "up", "down")}

        def expert(gate, up, down):
            g = gate @ x
            return down @ (g / (1 + np.exp(-g)) * (up @ x))

        wanted = sum(0.1 * expert(*(values[p][e] for p in ("gate", "up", "down"))) for e in chosen)
        wanted = wanted + 0.5 * expert(*(shared[p] for p in ("gate", "up", "down")))
        assert np.abs(arrays["y"][0] - wanted).std() < 0.03 * wanted.std()


@pytest.mark.parametrize("tier", available_tiers())
def test_report(tier):
    arguments = ["bench", "cpu-kernels", "--types", "Q4_K,F16", "--rows", "1,4", "--mb", "8", "-r", "2", "--threads"]
    done = RUNNER.invoke(app, [*arguments, "2", "--tier", str(tier), "--json"])
    assert (done.exit_code, done.stderr) == (0, ""), done.output
    found = json.loads(done.stdout)
    assert (found["tier"], found["threads"], found["cold_mb"]) == (tier, 2, 8)
    assert [(k["type"], k["rows"]) for k in found["kernels"]] == [("Q4_K", 1), ("Q4_K", 4), ("F16", 1), ("F16", 4)]
    for k in found["kernels"]:
        assert k["cold_gbps"]["min"] <= k["cold_gbps"]["median"] <= k["cold_gbps"]["max"]
        assert k["cold_share"] > 0


def test_text_and_layers():
    arguments = ["bench", "cpu-kernels", "--layer", "--rows", "1", "--mb", "8", "-r", "1", "--threads", "1,2"]
    said = RUNNER.invoke(app, [*arguments, "--experts", "Q2_0/Q2_0"]).stdout
    assert "layer of ten experts and the shared one, Q2_0/Q2_0" in said
    assert "1 rows, one core" in said and "1 rows, 2 threads" in said


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--types", "Q9"], "no block format"),
        (["--types", "I8"], "no products"),
        (["--rows", "9"], "--rows cannot be read"),
        (["--tier", "7"], "does not run the tier"),
        (["--threads", "1,2"], "takes one number"),
        (["--layer", "--experts", "Q4_K"], "cannot be read"),
    ],
)
def test_refusals(more, message):
    done = RUNNER.invoke(app, ["bench", "cpu-kernels", "--mb", "8", *more])
    assert (done.exit_code, done.stdout) == (2, "")
    assert message in done.stderr


def test_versus(tiny_path: Path):
    pytest.importorskip("xllamacpp", reason="xllamacpp is not installed")
    arguments = ["bench", "versus", "--model", str(tiny_path), "-n", "4", "-r", "1", "--threads", "1", "--json"]
    done = RUNNER.invoke(app, arguments)
    assert done.exit_code == 0, done.output
    (found,) = json.loads(done.stdout)["results"]
    ours, theirs = found["strata_tokens_per_s"]["median"], found["llama_tokens_per_s"]["median"]
    assert found["ratio"] == pytest.approx(ours / theirs, rel=0.02)
    assert found["llama_cpu_ms"]["median"] > 0


def test_versus_needs_one_model(tiny_path: Path):
    done = RUNNER.invoke(app, ["bench", "versus", "--model", str(tiny_path), "--synth", "Q4_K/IQ4_NL"])
    assert (done.exit_code, done.stdout) == (2, "")
    assert "exclude each other" in done.stderr
