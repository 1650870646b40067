"""strata bench cpu-kernels and versus: what is timed is the work it is said to be, and reports carry its figures."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from strata.base import arithmetic
from strata.base.errors import SelfTestFailed, StrataError
from strata.cli import app
from strata.cli.bench import chunk_rows, ggml, layer_phases, reading_forms
from strata.cli.bench.float_cases import Builder, cases
from strata.cpu import expert_record as rec
from strata.cpu.gemv.table import wide_kernel
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


def test_float_ops():
    """One op as a command, and that its case computes what it is named for."""
    done = RUNNER.invoke(app, ["bench", "float-ops", "--only", "swiglu", "--rows", "1", "--seconds", "0.01", "--json"])
    assert (done.exit_code, done.stderr) == (0, ""), done.output
    (found,) = json.loads(done.stdout)["ops"]
    assert (found["op"], found["T"]) == ("swiglu", 1) and found["us"] > 0 and found["floor_us"] > 0
    assert found["of_floor"] == pytest.approx(found["floor_us"] / found["us"], rel=0.02, abs=0.01)
    made = []

    class Kept(Builder):
        def floats(self, *shape):
            made.append(super().floats(*shape))
            return made[-1]

    (case,) = cases(Kept(0, 1), 2, "swiglu")
    assert case.walk.run() < 0
    g, u, h = made
    assert h.shape == (2, 10, 640) and np.abs(h - arithmetic.swiglu(g, u)).max() == 0


def test_text_and_layers():
    arguments = ["bench", "cpu-kernels", "--layer", "--rows", "1", "--mb", "8", "-r", "1", "--threads", "1,2"]
    said = RUNNER.invoke(app, [*arguments, "--experts", "Q2_0/Q2_0"]).stdout
    assert "layer of ten experts and the shared one, Q2_0/Q2_0" in said
    assert "1 rows, one core" in said and "1 rows, 2 threads" in said


def test_phases_of_a_layer():
    arguments = ["bench", "cpu-kernels", "--layer", "--phases", "--rows", "1", "--mb", "8", "-r", "1"]
    words = ["--threads", "1,2", "--experts", "Q2_0/Q2_0", "--run-kb", "64,512", "--huge", "--json"]
    done = RUNNER.invoke(app, [*arguments, *words])
    assert (done.exit_code, done.stderr) == (0, ""), done.output
    (found,) = json.loads(done.stdout)["phases"]
    assert [run["threads"] for run in found["runs"]] == [1, 2]
    for run in found["runs"]:
        assert run["read_gbps"] > 0 and run["read_all_gbps"] > 0 and run["read_huge_gbps"] > 0
        assert [(r["run_kb"], r["huge"]) for r in run["runs"]] == [(64, False), (64, True), (512, False), (512, True)]
        for r in run["runs"]:
            assert r["gbps"] > 0 and 0 < r["busy"] <= 1 and r["slowest"] >= 1 and r["chunks"] >= 22
            assert r["layer_us"] > r["group_us"] and r["layer_us"] >= max(r["up_us"], r["down_us"]) > 0
    fine, coarse = (found["runs"][1]["runs"][i]["chunks"] for i in (0, 2))
    assert fine > coarse, "shorter runs are more chunks"


def test_huge_pages_hold_the_same_experts():
    """The layer's result from the copy is that from the file."""
    with LayerBench("Q8_0/Q8_0", best_tier(), 1 << 20) as bench, Pool(1) as pool:
        layer = bench.layer(1, pool)
        layer.pass_over()
        wanted = layer._memory.arrays["y"].copy()
        (record,) = layer.records("experts", rec.WORDS)
        keep, places = layer_phases._huge_copy(bench)
        record[rec.ROUTED + rec.TABLE] = places.ctypes.data
        layer._memory.arrays["y"][:] = 0
        layer.pass_over()
        assert np.array_equal(layer._memory.arrays["y"], wanted) and wanted.any() and len(keep) > 20 * 640 * 2560


def test_rows_of_chunks():
    arguments = ["bench", "cpu-kernels", "--types", "BF16,Q4_K,Q8_0", "--chunk-rows", "5,16", "--matrix-rows", "16"]
    done = RUNNER.invoke(app, [*arguments, "--columns", "256", "-r", "2", "--json"])
    if best_tier() == 0:
        assert done.exit_code == 2 and "no kernel for any number of rows" in done.stderr
        return
    assert (done.exit_code, done.stderr) == (0, ""), done.output
    report = json.loads(done.stdout)
    assert report["threads"] == 1 and {f["type"] for f in report["chunk_rows"]} >= {"BF16"}
    for f in report["chunk_rows"]:
        assert f["rows"] in (5, 16) and f["matrix"] == [16, 256] and f["taken_from_rows"] >= 2
        assert f["four_ns"] > 0 and f["any_number_ns"] > 0 and f["times"] > 0
    said = RUNNER.invoke(app, [*arguments, "--columns", "256", "-r", "1"]).stdout
    assert "ns an output on one core" in said and "16 x 256" in said


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["0"], "--chunk-rows cannot be read"),
        (["8", "--matrix-rows", "0"], "--matrix-rows is out of range"),
        (["8", "--types", "Q4_K", "--columns", "64"], "--columns does not fit Q4_K"),
        (["8", "--types", "Q4_K", "--tier", "0"], "no kernel for any number of rows"),
    ],
)
def test_rows_of_chunks_are_refused(more, message):
    done = RUNNER.invoke(app, ["bench", "cpu-kernels", "--chunk-rows", *more])
    assert (done.exit_code, done.stdout) == (2, "") and message in done.stderr


def test_forms_that_differ_are_refused(monkeypatch):
    """The same kernels on other activations are not compared as equal."""
    if wide_kernel(by_name("BF16"), best_tier()) is None:
        pytest.skip("this processor has no kernel for any number of rows")
    real, made = chunk_rows.Product, []

    def product(address, row_bytes, rows, columns, kernels, records, out):
        made.append(out)
        return real(address, row_bytes, rows - (len(made) - 1), columns, kernels, records, out)

    def multiplying_fewer(products, R, pieces):
        pieces = pieces.copy()
        pieces[:, 2] = products[0].rows
        return multiplying(products, R, pieces)

    monkeypatch.setattr(chunk_rows, "Product", product)
    monkeypatch.setattr(chunk_rows, "multiplying", multiplying_fewer)
    with pytest.raises(StrataError, match="of any number of rows of BF16 is wrong"):
        chunk_rows.compare(by_name("BF16"), best_tier(), 16, 64, 5, 1)


@pytest.mark.parametrize("name", reading_forms.FORMS)
def test_every_form_reads_every_line(name):
    area = np.random.default_rng(1).integers(0, 256, 3 * reading_forms.CHUNK_BYTES, dtype=np.uint8)
    job = reading_forms.job_of(reading_forms.FORMS[name], area)
    with Pool(2) as pool:
        job.run(pool)
    assert (job.n_chunks, job.n_bytes) == (3, area.size)
    wanted = area.view(np.int32).reshape(3, -1, 16).sum(axis=1, dtype=np.int32)
    assert np.array_equal(job.keep[1], wanted)


def test_reading():
    arguments = ["bench", "cpu-kernels", "--reading", "--threads", "1,2", "--mb", "8", "-r", "2"]
    done = RUNNER.invoke(app, [*arguments, "--json"])
    assert (done.exit_code, done.stderr) == (0, ""), done.output
    found = json.loads(done.stdout)["reading"]
    assert [(f["threads"], f["form"]) for f in found] == [(n, name) for n in (1, 2) for name in reading_forms.FORMS]
    assert all(0 < f["gbps"]["min"] <= f["gbps"]["median"] <= f["gbps"]["max"] for f in found)
    said = RUNNER.invoke(app, arguments).stdout.splitlines()
    assert len(said) == 4 + 1 + 1 + len(reading_forms.FORMS) and said[-1].startswith(list(reading_forms.FORMS)[-1])


def _extension() -> str:
    xllamacpp = pytest.importorskip("xllamacpp", reason="xllamacpp is not installed")
    return str(next(Path(xllamacpp.__file__).parent.glob("xllamacpp*.so")))


def test_beside_ggml():
    arguments = ["bench", "cpu-kernels", "--ggml", _extension(), "--mb", "8", "-r", "2", "--rows", "1,4"]
    done = RUNNER.invoke(app, [*arguments, "--types", "Q4_K,IQ4_NL,Q5_1", "--json"])
    assert (done.exit_code, done.stderr) == (0, ""), done.output
    report = json.loads(done.stdout)
    found = report["beside_ggml"]
    assert report["threads"] == 1 and "kernels" not in report
    assert [(f["type"], f["rows"]) for f in found] == [(t, R) for t in ("Q4_K", "IQ4_NL", "Q5_1") for R in (1, 4)]
    for f in found:
        assert 0 < f["difference"] < ggml.MOST_DIFFERENCE and f["gbps"] > 0 and f["ggml_gbps"] > 0
        assert f["ratio"]["min"] <= f["ratio"]["median"] <= f["ratio"]["max"]


def test_a_result_that_is_not_ggml_s_is_refused(monkeypatch):
    library = ggml.open_library(_extension())
    monkeypatch.setattr(ggml, "MOST_DIFFERENCE", 1e-9)
    with KernelBench(best_tier(), 1, 1 << 20) as bench, pytest.raises(StrataError, match="Q8_0 differ"):
        ggml.compare(library, bench, by_name("Q8_0"), 1, 1)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--types", "Q9"], "no block format"),
        (["--types", "I8"], "no products"),
        (["--rows", "9"], "--rows cannot be read"),
        (["--tier", "7"], "does not run the tier"),
        (["--threads", "1,2"], "takes one number"),
        (["--layer", "--experts", "Q4_K"], "cannot be read"),
        (["--phases"], "--phases does nothing without --layer"),
        (["--layer", "--huge"], "--huge does nothing without --phases"),
        (["--layer", "--phases", "--run-kb", "0"], "--run-kb cannot be read"),
        (["--matrix-rows", "8"], "--matrix-rows does nothing without --chunk-rows"),
        (["--reading", "--rows", "1"], "--rows does nothing with --reading"),
        (["--chunk-rows", "8"], "--mb does nothing with --chunk-rows"),
        (["--ggml", "nothing.so", "--threads", "2"], "--threads does nothing with --ggml"),
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
