"""Loading executes the plan: what was planned is what is taken, and what does not fit is refused before it is taken."""

import logging
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import strata
from strata import loading
from strata.base.errors import BadArgument, DoesNotFit, FileError
from strata.base.plan import MIB, NEEDS_DISK
from strata.cpu.backend import CpuBackend
from strata.cpu.cores import core_facts, usable_cores
from strata.loading import LoadOptions, find_draft_layer, plan_load
from strata.pack.gguf_file import GgufFile
from strata.pack.mtp.convert import convert
from strata.pack.mtp_files import read_draft
from strata.planner import needs
from strata.planner.draft import MEMORY, STANDARD, draft_tensors, facts_of_tensors, vocabulary_rows
from strata.planner.machine import Machine
from strata.planner.memory import plan, read_facts
from strata.planner.of_load import plan_of_load
from strata.spec.suffix import SuffixLookup
from tests.draft_probe import draft_alone, with_nextn
from tests.header_maker import make_release
from tests.model_maker import make_wide_model

HERE = Machine.here


@pytest.fixture(scope="module")
def big(tmp_path_factory) -> Path:
    """Headers of a released size of 66 GB."""
    return make_release(tmp_path_factory.mktemp("big"), "Q2_0")


def _this_machine(monkeypatch, **facts) -> None:
    """Let loading find a machine with other facts than this one has."""
    monkeypatch.setattr(loading.Machine, "here", classmethod(lambda cls, *a, **k: replace(HERE(*a, **k), **facts)))


def _matches(model: strata.Model) -> None:
    """Every line of the plan was taken as planned, and nothing else was."""
    report = model.stats()["plan"]
    assert model.mismatches == [] and report["mismatches"] == []
    planned = {x.line: x.n_bytes for x in model.plan.lines if x.kind in ("allocate", "map")}
    taken = {line: v["taken_bytes"] for line, v in report["lines"].items()}
    assert taken.keys() == planned.keys()
    for line, n_bytes in taken.items():
        assert n_bytes == pytest.approx(planned[line], rel=0.01), line
    assert taken == model.stats()["memory_bytes"] and report["verdict"] == model.plan.verdict


# ---- what was planned is what is taken


@pytest.mark.parametrize("kv", ["f16", "int8"])
@pytest.mark.parametrize(("sessions", "checkpoints", "threads"), [(1, 6, 1), (3, 2, 2)])
@pytest.mark.parametrize("draft", ["off", "auto", "lookup"])
def test_a_load_takes_what_its_plan_says(tiny_path, kv, sessions, checkpoints, threads, draft):
    with strata.load(
        tiny_path, context=1000, kv=kv, sessions=sessions, checkpoints=checkpoints, threads=threads, draft=draft
    ) as model:
        _matches(model)
        assert isinstance(model.plan, strata.Plan) and (model.context, model.kv) == (1000, kv)
        lines = model.stats()["plan"]["lines"]
        assert ("draft layer" in lines) == ("draft KV cache" in lines) == (draft == "auto")
        assert lines["checkpoints"]["taken_bytes"] == sum(s.ledger.n_bytes for s in model._states)
        assert len(model._states) == sessions


def test_a_load_of_wide_layers_takes_what_its_plan_says(tmp_path):
    """Layers of released widths; the file has no vocabulary, so the load is made by hand."""
    path = make_wide_model(tmp_path)
    with GgufFile(path) as gguf:
        arch, g = loading_parts(gguf)
        made = plan_load(gguf, g, LoadOptions(context=9000, threads=1, sessions=2, checkpoints=0), None)
        backend = loading.make_backend(gguf, arch, g, made, False, None)
        try:
            taken = backend.allocations([backend.new_state() for _ in range(2)])
        finally:
            backend.close()
    assert made.verify(taken) == []


def loading_parts(gguf: GgufFile):
    from strata.arch import architecture_of

    arch = architecture_of(gguf)
    return arch, arch.read_geometry(gguf)


def _subset(folder: Path, n: int) -> None:
    np.arange(0, 3 * n, 3, dtype="<i4").tofile(folder / "draft_vocab.bin")


def _safetensors(tiny: Path, mtp: Path, folder: Path) -> tuple[Path, Path]:
    (folder / "mtp.safetensors").symlink_to(mtp)
    _subset(folder, 700)
    return tiny, folder / "mtp.safetensors"


def _rt(tiny: Path, mtp: Path, folder: Path) -> tuple[Path, Path]:
    convert(mtp, folder / "mtp" / "rt")
    _subset(folder / "mtp" / "rt", 500)
    return tiny, folder / "mtp"


def _rt_bf16(tiny: Path, mtp: Path, folder: Path) -> tuple[Path, Path]:
    convert(mtp, folder / "rt", experts="bf16")
    return tiny, folder / "rt"


def _inside(tiny: Path, mtp: Path, folder: Path) -> tuple[Path, Path]:
    path = with_nextn(tiny, mtp, folder / "inside.gguf")
    return path, path


def _beside(tiny: Path, mtp: Path, folder: Path) -> tuple[Path, Path]:
    return tiny, draft_alone(tiny, mtp, folder / "mtp.gguf")


def _merged(tiny: Path, mtp: Path, folder: Path) -> tuple[Path, Path]:
    return tiny, draft_alone(tiny, mtp, folder / "merged.gguf", merged=True)


@pytest.mark.parametrize("form", [_safetensors, _rt, _rt_bf16, _inside, _beside, _merged])
def test_every_form_of_draft_layer_is_priced_by_its_headers(tiny_path, mtp_path, tmp_path, form):
    path, source = form(tiny_path, mtp_path, tmp_path)
    with GgufFile(path) as gguf:
        _, g = loading_parts(gguf)
        priced = {t.name: t for t in draft_tensors(source, gguf, g)}
        held = read_draft(source, gguf, g).tensors
        head = held.pop("mtp.output.weight")
        assert priced.keys() == held.keys()
        for name, t in held.items():
            p = priced[name]
            assert (p.shape, p.format.name, p.n_bytes) == (t.shape, t.format.name, t.n_bytes), name
            assert (p.place == MEMORY) == (not t.mapped), name
        row_bytes, rows = gguf.info("output.weight").row_bytes, vocabulary_rows(source, g)
        facts = facts_of_tensors(g, list(priced.values()), row_bytes, rows, 0, str(source))
        assert facts.vocabulary == head.shape[0]
        assert facts.head_bytes == (0 if head.mapped else head.n_bytes + 4 * head.shape[0])
    with strata.load(path, context=512, draft=source, threads=1) as model:
        _matches(model)
        assert model.plan.draft == str(source)
        assert model.generate("def f(x):", max_tokens=4).text
    assert strata.plan(path, context=512, draft=source).line("draft KV cache").n_bytes > 0


def test_the_plan_decides_cache_rows_threads_and_checkpoints(tiny_path, monkeypatch):
    with strata.load(tiny_path, context=512, checkpoints=3) as model:
        b, p = model._backend, model.plan
        assert b.threads == p.threads == usable_cores(core_facts()), "the CPU alone uses every physical core"
        assert p.ngram_cache_rows <= b.ngram.cache_rows < p.ngram_cache_rows + 8
        assert model._states[0].ledger.capacity == p.checkpoints == 3
    few = lambda *a, **k: replace(plan_of_load(*a, **k), ngram_cache_rows=64, threads=1)  # noqa: E731
    monkeypatch.setattr(loading, "plan_of_load", few)
    with strata.load(tiny_path, context=512) as model:
        assert model._backend.ngram.cache_rows == 64 and model._backend.threads == 1
        assert [m.line for m in model.mismatches] == ["n-gram cache"]


def test_a_line_that_differs_is_a_warning_with_its_name(tiny_path, monkeypatch, caplog):
    real = CpuBackend.allocations

    def more(self, states):
        return [replace(a, n_bytes=a.n_bytes * 102 // 100) if a.line == "tables" else a for a in real(self, states)]

    monkeypatch.setattr(CpuBackend, "allocations", more)
    with caplog.at_level(logging.WARNING, "strata"), strata.load(tiny_path, context=512) as model:
        (told,) = model.stats()["plan"]["mismatches"]
    assert told.startswith("tables (ram): planned")
    assert any("tables (ram)" in r.getMessage() for r in caplog.records)


def test_prices_of_conversations_hold_what_sessions_keep():
    lookup = SuffixLookup()
    assert needs.LOOKUP_TOKENS == lookup.max_tokens
    for n in (100, 5000, 40_000):
        lookup.extend(np.arange(n, dtype=np.int32) % 977)
        assert lookup.n_bytes <= needs.LOOKUP_TOKEN_BYTES * max(len(lookup) * 2, 2048)


# ---- what does not fit


def test_an_explicit_context_that_does_not_fit_is_refused_with_numbers_and_remedies(tiny_path, monkeypatch):
    _this_machine(monkeypatch, ram_total_bytes=256 * MIB, ram_available_bytes=80 * MIB)
    taken = []
    monkeypatch.setattr(loading, "CpuBackend", lambda *a, **k: taken.append(a))
    with pytest.raises(DoesNotFit) as refused:
        strata.load(tiny_path, context=32768, kv="f16", sessions=2)
    text = str(refused.value)
    assert taken == [], "refused before anything is allocated"
    assert "MiB needed" in text and "MiB free" in text and "MiB short" in text
    assert refused.value.found and refused.value.needed
    for remedy in refused.value.advice.removeprefix("Try: ").split("; "):
        name = remedy.partition("=")[0]
        assert name in LoadOptions.__dataclass_fields__ or "more RAM" in remedy, remedy


def test_a_remedy_of_a_refused_load_works(tiny_path, monkeypatch):
    _this_machine(monkeypatch, ram_total_bytes=256 * MIB, ram_available_bytes=120 * MIB)
    with pytest.raises(DoesNotFit) as refused:
        strata.load(tiny_path, context=32768, kv="f16", sessions=2)
    options = {"context": 32768, "kv": "f16", "sessions": 2}
    first = refused.value.advice.removeprefix("Try: ").split("; ")[0].split(" (")[0]
    name, _, value = first.partition("=")
    options[name] = int(value) if value.isdigit() else value.strip('"')
    with strata.load(tiny_path, **options) as model:
        _matches(model)


def test_an_automatic_context_shrinks_and_says_so(tiny_path, monkeypatch, caplog):
    _this_machine(monkeypatch, ram_total_bytes=256 * MIB, ram_available_bytes=64 * MIB)
    with caplog.at_level(logging.WARNING, "strata"), strata.load(tiny_path, threads=1) as model:
        assert 256 <= model.context < model.plan.trained_context
        _matches(model)
        assert model.generate("def f(x):", max_tokens=3).text
    said = f"context {model.context:,} of the trained {model.plan.trained_context:,}: the largest that fits"
    assert [r.getMessage() for r in caplog.records] == [said]


def test_a_model_beyond_ram_loads_from_disk_and_says_so(tiny_path, monkeypatch, caplog):
    """Experts stay pages of the file, so lacking RAM for them is slow, not impossible."""
    _this_machine(monkeypatch, ram_total_bytes=256 * MIB, ram_available_bytes=46 * MIB)
    with caplog.at_level(logging.WARNING, "strata"), strata.load(tiny_path, threads=1, context=256, checkpoints=1) as m:
        assert m.plan.verdict == NEEDS_DISK == m.stats()["plan"]["verdict"]
    assert any("disk-bound" in r.getMessage() for r in caplog.records)


def test_a_context_beyond_the_trained_one_loads_with_a_warning(tiny_path, caplog):
    with caplog.at_level(logging.WARNING, "strata"), strata.load(tiny_path, context=40_000, kv="int8") as model:
        assert model.context == 40_000
    assert any("40,000 is beyond" in r.getMessage() for r in caplog.records)


@pytest.mark.parametrize(
    "bad", [{"context": 5}, {"context": "4k"}, {"threads": 0}, {"threads": "all"}, {"checkpoints": -1}, {"sessions": 0}]
)
def test_loading_and_planning_refuse_the_same_options(tiny_path, bad):
    for call in (strata.load, strata.plan):
        if call is strata.plan and bad == {"context": 5}:
            continue  # a plan may ask what any context costs
        with pytest.raises(BadArgument):
            call(tiny_path, **bad)


# ---- what it costs


@pytest.mark.parametrize("draft", ["off", "auto"])
def test_planning_a_load_of_the_small_model_takes_little(tiny_path, draft):
    assert _planning_s(tiny_path, draft) < 0.1


def test_planning_a_load_of_60_gb_takes_little(big):
    assert _planning_s(big, "off") < 0.5


@pytest.mark.parametrize("card", ["RTX 4060", "RTX 4090"])
def test_planning_a_load_of_60_gb_on_a_gpu_takes_little(big, monkeypatch, card):
    """Chunks are priced by one branch of every kind."""
    machine = Machine.describe(gpu=card, ram_gib=32)
    _this_machine(monkeypatch, gpus=machine.gpus, ram_total_bytes=32 << 30, ram_available_bytes=30 << 30)
    monkeypatch.setattr(loading, "device_problem", lambda gpu: None)
    assert _planning_s(big, "off") < 1


def _planning_s(path: Path, draft: str) -> float:
    """CPU time that planning adds to a load; compiled code is there already, prices of this geometry are not."""
    with GgufFile(path, headers_only=True) as gguf:
        _, g = loading_parts(gguf)
        times = []
        for _ in range(3):
            for cached in (needs.trunk_programs, needs.priced_programs, needs.program_buffers, needs.cpu_shared_bytes):
                cached.cache_clear()
            began = time.thread_time()
            plan_load(gguf, g, LoadOptions(draft=draft), find_draft_layer(gguf, draft))
            times.append(time.thread_time() - began)
    return min(times)


def test_the_public_names_come_without_the_compiler():
    code = (
        "import sys, strata; from strata import Plan; p = strata.Plan.__module__\n"
        "assert not {'numba', 'strata.planner'} & set(sys.modules), sys.modules.keys()\n"
        "print(p, strata.plan.__module__, 'plan' in dir(strata))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["strata.base.plan", "strata.planning", "True"]


# ---- strata.plan


def test_plan_takes_what_load_takes(tiny_path, mtp_path):
    class Mine:
        def propose(self, tokens, k):
            return []

    shared = {"context": 512, "sessions": 2, "threads": 1, "pin": True, "kv": "f16", "checkpoints": 2}
    for draft in ("off", None, "auto", "lookup", str(mtp_path), mtp_path, Mine()):
        p = strata.plan(tiny_path, draft=draft, device="cpu", **shared)
        with strata.load(tiny_path, draft=draft, **shared) as model:
            assert [(x.line, x.n_bytes) for x in p.lines] == [(x.line, x.n_bytes) for x in model.plan.lines], draft
            assert p.draft == model.plan.draft
    with pytest.raises(BadArgument, match="'context'"):
        strata.plan(tiny_path, contxt=4)
    with pytest.raises(BadArgument, match="path"):
        strata.plan(5)
    with pytest.raises(FileError, match="no draft layer"):
        strata.plan(tiny_path, draft="absent.safetensors")


def test_a_draft_layer_that_is_not_here_is_priced_in_its_usual_form(big):
    facts = read_facts(big, "mtp")
    assert facts.draft.source == STANDARD and read_facts(big, "auto").draft is None
    machine = Machine.describe(ram_gib=64)
    with_file, pure = plan(facts, machine, draft="mtp"), plan(read_facts(big), machine, draft="mtp")
    for ours, bare in zip(with_file.lines, pure.lines, strict=True):  # scratch of its ops is known with the file alone
        assert ours.line == bare.line and ours.n_bytes == pytest.approx(bare.n_bytes, rel=0.005)
    assert with_file.line("draft layer").n_bytes == 707_788_800
    assert with_file.line("draft head").n_bytes == facts.draft.head_bytes > 100 * MIB


# ---- shards that are not here yet


def test_a_missing_shard_with_the_n_gram_table_alone_is_assumed(tmp_path):
    whole = make_release(tmp_path, "Q2_0", vocabulary=False)
    machine = Machine.describe(ram_gib=64)
    complete = strata.plan(whole, machine=machine, context=4096)
    Path(str(whole).replace("00001-of", "00002-of")).unlink()
    p = strata.plan(whole, machine=machine, context=4096)
    for ours, there in zip(p.lines, complete.lines, strict=True):  # the real table has a few rows to spare
        assert ours.line == there.line and ours.n_bytes == pytest.approx(there.n_bytes, rel=1e-6)
    assert p.verdict == complete.verdict
    assert p.missing_bytes == pytest.approx(read_facts(whole).ngram_table_bytes, abs=64)
    (note,) = [n for n in p.notes if "assumed" in n]
    assert "00002-of-00002" in note and "IQ4_NL" in note and "TRUNCATED" in p.table()
    with pytest.raises(FileError, match="shard 2 of 2 is missing"):
        strata.load(whole)


def test_a_missing_shard_with_other_tensors_is_refused_by_name(tmp_path):
    path = make_release(tmp_path, "UD-Q4_K_XL", vocabulary=False)
    last = Path(str(path).replace("00001-of", "00004-of"))
    last.unlink()
    with pytest.raises(FileError, match=last.name) as refused:
        strata.plan(path, machine=Machine.describe(ram_gib=64))
    assert "4 shards" in refused.value.found and "header" in refused.value.needed
