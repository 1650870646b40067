"""Prefetches of the product kernels: their text, what is emitted, that results and compiled files do not mix."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llvmlite import ir
from typer.testing import CliRunner

from strata.base.compiled import CFunction
from strata.base.errors import BadArgument, SelfTestFailed
from strata.cli import app
from strata.cpu.gemv import frame, super_kernels, table
from strata.cpu.gemv.prefetch import FAR, HINTS, NEAR, Ahead, asks_far, emit_prefetch, prefetch_of, suffix_of, text_of
from strata.cpu.simd import emitted
from strata.kernel_speed import KernelBench
from strata.layer_speed import LayerBench
from strata.pack.formats import by_name
from strata.prefetch_speed import AGAIN, OWN, Turns, in_turns, time_kernels, time_layers
from tests.simd_cases import SIMD_TIERS, call_address, records_of

simd = pytest.mark.skipif(not SIMD_TIERS, reason="no kernels with prefetches here")
AHEADS = st.builds(
    Ahead, st.integers(1, 3), st.integers(1, 1 << 14).map(lambda n: 64 * n), st.sampled_from([0, 1, 2, 4, 64])
)


@settings(deadline=None, max_examples=60)
@given(st.lists(AHEADS, max_size=3).map(tuple), st.lists(AHEADS, max_size=3).map(tuple))
def test_texts_stand_for_prefetches(one, other):
    assert prefetch_of(text_of(one)) == one
    assert re.fullmatch(r"\w+", suffix_of(text_of(one)))
    assert (suffix_of(text_of(one)) == suffix_of(text_of(other))) == (one == other)


@pytest.mark.parametrize("text", ["", "2", "2:", "8192", "2:8192+", "0:64", "4:64", "2:0", "2:100", "1:2097152",
                                  "1:64/0", "1:64/3", "1:64/", "1:-64", "x:64", "1:٦٤", "none+1:64"])  # fmt: skip
def test_other_texts_are_refused(text):
    with pytest.raises(BadArgument, match=r"prefetch|cache level"):
        prefetch_of(text)


def _calls(prefetch, step_bytes):
    """(offset, locality) of the prefetches in the code of one step, in order."""
    module = ir.Module()

    def emit(s):
        emit_prefetch(s, prefetch, s.pointer(s.args[0]), s.args[1], step_bytes)

    emitted(module, "asks", 2, emit)
    text = str(module)
    offsets = {name: int(n) for name, n in re.findall(r'(%\S+) = getelementptr.*i64 (\d+)', text)}
    calls = re.findall(r'call void @"?llvm.prefetch.p0"?\(i8\* (%\S+), i32 0, i32 (\d), i32 1\)', text)
    return [(offsets[place], int(locality)) for place, locality in calls], "icmp" in text


def test_every_line_and_one_in_many():
    assert _calls(NEAR, 144) == ([(4096, 3), (4160, 3), (4224, 3)], False)
    assert _calls(FAR, 72) == ([(8192, 2), (8256, 2), (1024, 3), (1088, 3)], False)
    assert _calls(HINTS, 144) == ([(2048, 2)], True)
    assert _calls((), 144) == ([], False)


def test_what_a_step_asks_for():
    step = frame.Step(256, 1, 144, 320, None, None)
    choices = [step, replace(step, far=True), replace(step, asks=False, far=True),
               replace(step, asks=False, hints=True), replace(step, asks=False)]  # fmt: skip
    assert [c.prefetch(1) for c in choices] == [NEAR, FAR, FAR, HINTS, ()]
    assert all(c.prefetch(R) == NEAR for c in choices for R in (2, 3, 4))


@pytest.mark.parametrize("asking", [True, False])
def test_far_is_for_processors_where_it_was_measured(monkeypatch, asking):
    monkeypatch.setattr("strata.cpu.gemv.prefetch.needs_asking", lambda: asking)
    names = ("Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4", "Q3_K", "Q2_0", "IQ3_S")
    far = {"Q4_K", "Q5_K", "Q6_K", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4"} if asking else {"Q4_K", "Q5_K", "IQ4_XS"}
    assert {name for name in names if asks_far(name)} == far


@simd
@pytest.mark.parametrize("name", ["Q4_K", "IQ2_S", "IQ4_NL"])
@pytest.mark.parametrize("R", [1, 3])
def test_results_do_not_depend_on_prefetches(name, R):
    format, tier, rng = by_name(name), SIMD_TIERS[-1], np.random.default_rng(R)
    raw = rng.integers(0, 256, (7, format.row_bytes(768)), dtype=np.uint8)
    records, _ = records_of(format, rng.standard_normal((R, 768)).astype(np.float32), tier)
    found = []
    for prefetch in (None, (), FAR, (Ahead(2, 128, 2), Ahead(3, 1 << 20))):
        out = np.full((R, 7), 7, np.float32)
        address = table.kernel_function(format, R, tier, prefetch).address
        call_address(address, raw.ctypes.data, raw.shape[1], 7, records.ctypes.data, 768, out.ctypes.data, 28)
        found.append(out.tobytes())
    assert len(set(found)) == 1


@simd
def test_compiled_files_are_kept_apart(monkeypatch, tmp_path):
    monkeypatch.setenv("STRATA_CACHE", str(tmp_path))
    monkeypatch.setattr("numba.config.CACHE_DIR", "")
    tier = SIMD_TIERS[-1]

    def made(asked) -> CFunction:
        return super_kernels.super_kernel.__wrapped__("Q2_K", 1, asked, tier=tier)

    first, again = ({asked: made(asked) for asked in ("", "2:8192", "2:8192/1")} for _ in range(2))
    assert len({f.address for f in first.values()}) == 3
    assert not any(f.from_cache for f in first.values())
    assert len({path.name.partition("-")[0] for path in tmp_path.rglob("*.nbi")}) == 3
    assert all(f.address and f.from_cache for f in again.values())


@simd
def test_kernels_without_prefetches_refuse_them():
    for name, tier in (("BF16", SIMD_TIERS[-1]), ("Q4_K", table.PORTABLE)):
        with pytest.raises(BadArgument, match="cannot be chosen"):
            table.kernel_function(by_name(name), 1, tier, FAR)


# ---- measuring


def test_turns_and_verdicts():
    seen = []

    def timed(name, seconds):
        return lambda: seen.append(name) or seconds

    gbps = in_turns({OWN: timed(OWN, 2.0), AGAIN: timed(AGAIN, 2.0), "2:64": timed("2:64", 1.0)}, 4 * 10**9, 8)
    assert gbps == {OWN: [2.0] * 8, AGAIN: [2.0] * 8, "2:64": [4.0] * 8}
    rounds = [tuple(seen[i : i + 3]) for i in range(0, len(seen), 3)]
    assert len(rounds) == 9 and all(sorted(r) == sorted(gbps) for r in rounds) and len(set(rounds)) > 2

    turns = Turns("Q4_K", 1, 1, {OWN: [10.0] * 4, AGAIN: [9.8, 10.0, 10.0, 10.2], "far": [10.9, 11.0, 11.1, 9.0],
                                 "near": [9.1, 9.0, 8.9, 11.0], "same": [9.7, 10.1, 10.4, 10.0]})  # fmt: skip
    assert [turns.verdict(name) for name in (AGAIN, "same", "far", "near")] == ["", "", "better", "worse"]
    assert turns.ratio("far").median == pytest.approx(1.095)


@simd
def test_kernels_and_layers_in_turns():
    tier, wanted = SIMD_TIERS[-1], [(), prefetch_of("2:8192+1:1024")]
    names = [OWN, AGAIN, "none", "2:8192+1:1024"]
    with KernelBench(tier, 1, 2 << 20) as bench:
        kernels = time_kernels(bench, by_name("Q4_K"), 1, [1, 2], wanted, 2)
    with LayerBench("Q4_K/IQ4_NL", tier, 1 << 20) as bench:
        own = {t: bench.weights.kernels(by_name(t).ggml_id).copy() for t in ("Q4_K", "IQ4_NL")}
        layers = time_layers(bench, 1, [1, 2], wanted, 2)
        assert all((bench.weights.kernels(by_name(t).ggml_id) == own[t]).all() for t in own)
        assert bench.pass_bytes == sum(job.n_bytes for job in bench.kernels(1))
    for found, what in ((kernels, "Q4_K"), (layers, "Q4_K/IQ4_NL")):
        assert [(t.what, t.R, t.threads) for t in found] == [(what, 1, 1), (what, 1, 2)]
        assert all(list(t.gbps) == names and all(len(g) == 2 and min(g) > 0 for g in t.gbps.values()) for t in found)


@simd
def test_a_prefetch_that_changed_results_is_not_timed(monkeypatch):
    other = table.kernel_function(by_name("Q4_K"), 1, SIMD_TIERS[-1]).address
    wrong = table.kernel_function(by_name("Q5_K"), 1, SIMD_TIERS[-1])
    assert wrong.address != other
    monkeypatch.setattr("strata.prefetch_speed.kernel_function", lambda *_: wrong)
    with KernelBench(SIMD_TIERS[-1], 1, 1 << 20) as bench, pytest.raises(SelfTestFailed, match="prefetch none"):
        time_kernels(bench, by_name("Q4_K"), 1, [1], [()], 1)


def _bench(*words):
    return CliRunner().invoke(app, ["bench", "cpu-kernels", "--mb", "8", *words])


@simd
@pytest.mark.parametrize("layer", [False, True])
def test_report(layer):
    types = ["--layer", "--experts", "Q4_K/IQ4_NL"] if layer else ["--types", "Q4_K,IQ4_NL"]
    words = [*types, "--prefetch", "2:8192+1:1024,none", "-r", "2", "--threads", "1,2"]
    done = _bench(*words, "--json")
    assert (done.exit_code, done.stderr) == (0, ""), done.output
    found = json.loads(done.stdout)["prefetches"]
    what = ["Q4_K/IQ4_NL"] if layer else ["Q4_K", "IQ4_NL"]
    assert [(f["what"], f["rows"], f["threads"]) for f in found] == [(w, 1, n) for w in what for n in (1, 2)]
    for one in found:
        assert list(one["prefetches"]) == [OWN, AGAIN, "2:8192+1:1024", "none"]
        assert one["prefetches"][OWN]["ratio"] == {"median": 1.0, "low": 1.0, "high": 1.0}
    said = _bench(*words).stdout
    assert re.search(r"2:8192\+1:1024 +\d+\.\d +\d\.\d{3} \(\d\.\d{3} to \d\.\d{3}\)", said)
    assert "1 thread\n" in said and "2 threads\n" in said and f"worse of {len(what)}" in said


@simd
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--prefetch", "2:100"], "prefetch distance is out of range"),
        (["--prefetch", "2:8192", "--rows", "8"], "--rows is out of range"),
        (["--prefetch", "2:8192", "--tier", "0"], "does nothing in tier 0"),
        (["--prefetch", "2:8192", "--types", "Q4_K", "--columns", "640"], "--columns does not fit Q4_K"),
        (["--prefetch", "2:8192", "--layer", "--phases"], "--phases does nothing with --prefetch"),
        (["--prefetch", "2:8192", "--ggml", "x.so"], "--ggml does nothing with --prefetch"),
        (["--prefetch", "2:8192", "--types", "Q4_K,F16"], "is for quantised matrices"),
        (["--prefetch", "2:8192", "--layer", "--experts", "BF16/Q8_0"], "is for quantised matrices"),
    ],
)
def test_refusals(words, message):
    done = _bench(*words)
    assert (done.exit_code, done.stdout) == (2, "")
    assert message in done.stderr
