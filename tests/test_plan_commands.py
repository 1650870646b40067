"""A plan compared with what was taken, its written forms, and the commands that make it."""

import json
import os
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
from typer import Typer
from typer.testing import CliRunner

from strata.base.errors import ModelError
from strata.base.plan import GIB, MIB, Plan
from strata.base.program import Allocation
from strata.cli import locate
from strata.cli import plan as plan_cli
from strata.pack.gguf_file import shard_paths
from strata.planner.machine import Machine
from strata.planner.memory import plan, read_facts
from strata.planner.of_load import plan_file
from tests.header_maker import RELEASES, Shape, make_model, make_release

ROOT = Path(__file__).parents[1]
TINY = ROOT / "examples/models/tiny-flash-next/tiny-flash-next-IQ3_XXS-00001-of-00002.gguf"


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("releases")
    return {name: make_release(folder, name, vocabulary=name == "Q2_0") for name in ("Q2_0", "IQ3_S")}


@pytest.fixture(scope="module")
def facts(files):
    return {name: read_facts(path) for name, path in files.items()}


# ---- verify


def _taken(p: Plan) -> list[Allocation]:
    return [Allocation(x.line, x.device, x.n_bytes, "") for x in p.lines if x.kind in ("allocate", "map")]


def test_verify_compares_line_by_line(facts):
    p = plan(facts["Q2_0"], Machine.describe(vram_gib=12, ram_gib=64), context=4096)
    taken = _taken(p)
    assert p.verify(taken) == []
    kv = next(i for i, a in enumerate(taken) if a.line == "KV cache")
    halves = [replace(taken[kv], n_bytes=taken[kv].n_bytes // 2)] * 2
    assert p.verify([*taken[:kv], *halves, *taken[kv + 1 :]]) == [], "several allocations may share a line"
    off = [replace(a, n_bytes=int(a.n_bytes * 1.02)) if a.line == "KV cache" else a for a in taken]
    (m,) = p.verify(off)
    assert m.line == "KV cache" and m.taken_bytes > m.planned_bytes and "KV cache" in str(m)
    big = [replace(a, n_bytes=a.n_bytes + 17 * MIB) if a.line == "experts (pinned)" else a for a in taken]
    assert [m.line for m in p.verify(big)] == ["experts (pinned)"], "17 MiB are too much even where they are below 1 %"
    assert [m.line for m in p.verify([*taken, Allocation("secret", "vram", 1 << 20, "")])] == ["secret"]
    assert [m.line for m in p.verify(taken[1:])] == [taken[0].line]


# ---- forms


def test_table_and_json_tell_the_same(facts):
    p = plan(facts["Q2_0"], Machine.describe(gpu="RTX 5070", ram_gib=32), context=32768, draft="mtp")
    table, values = p.table(), json.loads(json.dumps(p.to_json()))
    assert values["strata_plan"] == 1 and values["verdict"] == p.verdict and values["n_slots"] == p.n_slots
    assert [x["line"] for x in values["lines"]] == [x.line for x in p.lines]
    for line in p.lines:
        assert line.line in table
    assert f"{p.n_slots:,} slots" in table and p.verdict in table and f"{p.estimate.tokens_per_s:.1f} tokens/s" in table
    assert all(n in table for n in p.notes)


@pytest.mark.parametrize("described", [{}, {"gpu": "RTX 5070"}, {"gpu": "RTX 4090", "ram_gib": 24}])
def test_planning_a_60_gb_file_takes_less_than_two_seconds(files, described):
    start = time.thread_time()
    p = plan_file(files["Q2_0"], machine=Machine.describe(**described) if described else None)
    assert time.thread_time() - start < 2 and p.file_bytes > 60e9
    assert not described or p.device == "cuda:0"


def test_a_truncated_download_still_plans_and_says_so(files, tmp_path):
    first = tmp_path / files["Q2_0"].name
    first.write_bytes(files["Q2_0"].open("rb").read(11 << 20))
    second = Path(str(files["Q2_0"]).replace("00001-of", "00002-of"))
    os.link(second, tmp_path / second.name)
    p = plan_file(first, machine=Machine.describe(vram_gib=12, ram_gib=64), context=4096)
    whole = plan_file(files["Q2_0"], machine=Machine.describe(vram_gib=12, ram_gib=64), context=4096)
    assert p.missing_bytes > 30e9 and "TRUNCATED" in p.table() and any("incomplete" in n for n in p.notes)
    assert [(x.line, x.n_bytes) for x in p.lines] == [(x.line, x.n_bytes) for x in whole.lines]
    assert p.file_bytes == whole.file_bytes
    assert (p.verdict, p.complete) == (whole.verdict, False) and whole.complete and whole.missing_shards == ()
    assert p.missing_shards == ((first.name, p.missing_bytes),)


def test_the_verdict_on_a_truncated_download_says_so(files, app, tmp_path):
    first = tmp_path / files["Q2_0"].name
    first.write_bytes(files["Q2_0"].open("rb").read(11 << 20))
    machine = ["--vram-gib", "12", "--ram-gib", "64"]
    told = CliRunner().invoke(app, [str(first), "--context", "4096", *machine])
    (verdict,) = [line for line in told.output.splitlines() if line.startswith("verdict")]
    second = first.name.replace("00001-of", "00002-of")
    text = "verdict: fits, once the file is complete: N bytes of {} are missing, N bytes of {} are missing"
    assert told.exit_code == 0 and re.sub(r"\b\d[\d,]+ ", "N ", verdict) == text.format(first.name, second), verdict
    values = json.loads(CliRunner().invoke(app, [str(first), "--context", "4096", *machine, "--json"]).output)
    assert (values["verdict"], values["fits"], values["complete"]) == ("fits", True, False)
    assert [name for name, _ in values["missing_shards"]] == [first.name, second]
    assert sum(n_bytes for _, n_bytes in values["missing_shards"]) == values["missing_bytes"]
    refused = CliRunner().invoke(app, [str(first), "--context", "4096", "--vram-gib", "4", "--device", "cuda"])
    assert refused.exit_code == 1 and "verdict: does not fit; besides, the file is incomplete: " in refused.output
    whole = json.loads(CliRunner().invoke(app, [str(files["Q2_0"]), *machine, "--json"]).output)
    assert (whole["complete"], whole["missing_shards"]) == (True, [])


def test_a_file_whose_tensors_break_the_contract_is_refused(tmp_path):
    path = make_model(
        tmp_path, "odd", replace(Shape(), L=4, E=16), RELEASES["Q2_0"].dense, (("Q2_0", "Q2_0"),), vocabulary=False
    )
    with path.open("r+b") as file:
        head = file.read(1 << 16)
        at = head.index(b"blk.0.hc_attn_norm")
        file.seek(at)
        file.write(b"blk.0.hc_attn_nxrm")
    with pytest.raises(ModelError, match="hc_attn_norm"):
        plan_file(path, machine=Machine.describe(ram_gib=64))


# ---- the command


@pytest.fixture(scope="module")
def app():
    typer_app = Typer()
    typer_app.command()(plan_cli.command)
    return typer_app


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["--gpu", "RTX 5070", "--ram-gib", "64", "--context", "32768"], 0, "verdict: fits"),
        (["--vram-gib", "4", "--ram-gib", "64", "--context", "4096", "--device", "cuda"], 1, "MiB needed"),
        (["--vram-gib", "4", "--ram-gib", "64", "--context", "4096"], 0, "computes on the CPU: Flash-Next-Q2_0"),
        (["--vram-gib", "12", "--ram-gib", "16", "--context", "4096"], 0, "needs disk per token"),
        (["--gpu", "RTX 507"], 2, "RTX 5070"),
        (["--kv", "q4"], 2, "q4"),
        (["--no-such-option"], 2, "no-such-option"),
    ],
)
def test_plan_command(files, app, arguments, code, text):
    result = CliRunner().invoke(app, [str(files["Q2_0"]), *arguments])
    assert result.exit_code == code, result.output
    assert text in result.output


def test_plan_command_json_and_missing_file(files, app, tmp_path):
    result = CliRunner().invoke(
        app, [str(files["IQ3_S"]), "--vram-gib", "16", "--ram-gib", "64", "--context", "4096", "--json"]
    )
    values = json.loads(result.output)
    assert result.exit_code == 0 and values["fits"] and values["context"] == 4096
    assert CliRunner().invoke(app, [str(tmp_path / "absent.gguf")]).exit_code == 1


def test_plan_finds_a_model_as_run_does(files, app, tmp_path, monkeypatch):
    folder = tmp_path / "model"
    folder.mkdir()
    for shard in shard_paths(files["IQ3_S"]):
        (folder / shard.name).symlink_to(shard)
    arguments = ["--vram-gib", "16", "--ram-gib", "64", "--context", "4096", "--json"]
    plans = [json.loads(CliRunner().invoke(app, [str(p), *arguments]).output) for p in (files["IQ3_S"], folder)]
    monkeypatch.setenv(locate.VARIABLE, str(folder))
    plans.append(json.loads(CliRunner().invoke(app, arguments).output))
    told = [(p["model"], p["context"], p["lines"]) for p in plans]
    assert told[0] == told[1] == told[2]
    monkeypatch.delenv(locate.VARIABLE)
    monkeypatch.setattr(locate, "checkout", lambda: None)
    assert CliRunner().invoke(app, []).exit_code == 2


def test_plan_command_for_this_machine(app):
    result = CliRunner().invoke(app, [str(TINY), "--device", "cpu"])
    assert result.exit_code == 0 and "this machine" in result.output


def test_how_the_ngram_table_is_read(app, files):
    words = [str(files["Q2_0"]), "--ram-gib", "64", "--json", "--ngram"]
    read = {mode: json.loads(CliRunner().invoke(app, [*words, mode]).output) for mode in ("mapped", "direct")}
    assert all(found["ngram"] == mode for mode, found in read.items())
    refused = CliRunner().invoke(app, [*words, "sideways"])
    assert refused.exit_code == 2
    assert "ngram is unknown; found 'sideways'; needed auto, mapped, direct" in refused.output


def test_all_slots_by_name(app):
    words = [str(TINY), "--gpu", "RTX 5070", "--ram-gib", "32", "--json", "--slots"]
    made = json.loads(CliRunner().invoke(app, [*words, "all"]).output)
    assert made["n_slots"] == 256 and made["fits"]
    refused = CliRunner().invoke(app, [*words, "some"])
    assert refused.exit_code == 2 and "--slots cannot be read; found 'some'; needed a number, or all" in refused.output


def test_gib_is_the_binary_one():
    assert GIB == 1 << 30 and MIB == 1 << 20


def test_the_documented_plans_are_the_plans_of_today():
    """Names of lines and verdicts; amounts move a little when programs do (python -m tests.planning_examples)."""
    from tests.planning_examples import example_plans

    text = (ROOT / "docs/planning.md").read_text(encoding="utf-8")
    blocks = text.split("```")[1::2]
    plans = example_plans()
    assert len(blocks) == len(plans) == 3
    for block, p in zip(blocks, plans, strict=True):
        assert f"verdict: {p.verdict}" in block and p.machine in block
        for line in p.lines:
            assert f"\n  {line.line} " in block, line.line

