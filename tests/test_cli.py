"""The command line: what goes where, exit statuses, and that answers are the library's own."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from typer.testing import CliRunner

import strata
from strata.base.errors import BadArgument, DoesNotFit, FileError
from strata.cli import VERBS, app, flags, locate
from strata.cli.inspect import inspect_file
from strata.loading import LoadOptions

pytestmark = pytest.mark.usefixtures("kernels_kept")
ROOT = Path(__file__).resolve().parent.parent
PROMPT = "def add(a, b):"
RUNNER = CliRunner()
START_S = 300
"""Limit for a subprocess: with an empty cache it compiles every kernel."""


def call(*arguments: str, stdin: str | None = None):
    return RUNNER.invoke(app, list(arguments), input=stdin)


def environment(**extra: str) -> dict[str, str]:
    plain = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "STRATA_MODEL", "FORCE_COLOR")}
    return plain | {"PYTHONPATH": str(ROOT), "TERM": "xterm-256color"} | extra


def start(*arguments: str, **options) -> subprocess.Popen:
    command = [sys.executable, "-m", "strata.cli", *arguments]
    return subprocess.Popen(command, env=options.pop("env", environment()), cwd=ROOT, **options)


@pytest.fixture(scope="module")
def model(tiny_path: Path):
    with strata.load(tiny_path, context=512, threads=1) as loaded:
        yield loaded


@pytest.fixture()
def small(tiny_path: Path) -> tuple[str, ...]:
    """Load options of the fixture `model`."""
    return ("--model", str(tiny_path), "--context", "512", "--threads", "1")


# ---- start


def test_public_names_are_there_and_others_are_not():
    assert all(getattr(strata, name) is not None for name in strata.__all__)
    assert set(strata.__all__) <= set(dir(strata))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = strata.nothing


def test_the_command_line_starts_without_the_compiler():
    code = "import sys, strata.cli; print([m for m in ('numba', 'numpy', 'rich') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(), timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_help_names_every_verb():
    done = call("--help")
    assert done.exit_code == 0
    assert all(re.search(rf"^  {verb} ", done.stdout, re.MULTILINE) for verb in VERBS)
    assert call("--version").stdout == f"strata {strata.__version__}\n"


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_a_verb(verb: str):
    done = call(verb, "--help")
    assert done.exit_code == 0, done.output
    assert "--json" in done.stdout or verb in ("chat", "bench")


@pytest.mark.parametrize("verb", [("run",), ("chat",), ("score",), ("bench", "decode")])
def test_commands_that_load_take_what_load_takes(verb: tuple[str, ...]):
    """Every option of `strata.load` but those that need an object or several sessions."""
    said = call(*verb, "--help").stdout
    wanted = {f.name for f in fields(LoadOptions)} - {"sessions", "checkpoints", "draft"}
    missing = [name for name in wanted if f"--{name.replace('_', '-')}" not in said]
    assert not missing and ("--draft " in said) == (verb != ("score",))


def test_options_of_a_load_reach_it(small, monkeypatch):
    asked = {}

    def load(path, *, on_progress, **options):
        asked.update(options)
        raise FileError("enough")

    monkeypatch.setattr("strata.model.load", load)
    given = ("--ngram", "direct", "--slots", "7", "--experts", "mapped", "--pcie-share", "0.5", "--device", "cpu")
    assert call("run", "x", *small, *given, "--pin").exit_code == 1
    assert asked == {"context": 512, "threads": 1, "pin": True, "kv": "auto", "prefill": "auto", "device": "cpu",
                     "slots": 7, "experts": "mapped", "pcie_share": 0.5, "ngram": "direct"}  # fmt: skip
    done = call("run", "x", *small, "--ngram", "sideways")
    assert done.exit_code == 1 and "enough" in done.stderr
    monkeypatch.undo()
    done = call("run", "x", *small, "--ngram", "sideways")
    assert done.exit_code == 2 and "ngram is unknown; found 'sideways'; needed auto, mapped, direct" in done.stderr


# ---- which model


def test_model_from_option_variable_and_checkout(tiny_path: Path, tmp_path: Path, monkeypatch):
    monkeypatch.delenv(locate.VARIABLE, raising=False)
    assert locate.find_model(None) == tiny_path
    assert locate.find_model(tiny_path.parent) == tiny_path
    other = tmp_path / "other.gguf"
    other.touch()
    monkeypatch.setenv(locate.VARIABLE, str(other))
    assert locate.find_model(None) == other
    assert locate.find_model(tiny_path) == tiny_path


def test_model_that_cannot_be_found(tmp_path: Path, monkeypatch):
    monkeypatch.delenv(locate.VARIABLE, raising=False)
    monkeypatch.setattr(locate, "checkout", lambda: None)
    with pytest.raises(BadArgument, match=r"--model FILE or the variable STRATA_MODEL"):
        locate.find_model(None)
    with pytest.raises(FileError, match="names no file"):
        locate.find_model(tmp_path / "none.gguf")
    with pytest.raises(FileError, match="does not hold one model; found none"):
        locate.find_model(tmp_path)
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(FileError, match=r"found a\.gguf, b\.gguf"):
        locate.find_model(tmp_path)


# ---- exit statuses


@pytest.mark.parametrize(
    "arguments",
    [
        ("nothing",),
        ("run",),
        ("run", "x", "--nothing"),
        ("run", "x", "--top-k", "many"),
        ("run", "x", "--temperature", "1000"),
        ("run", "x", "--temperature", "-1"),
        ("chat", "-t", "-0.5"),
        ("run", "x", "--max-tokens", "0"),
        ("run", "x", "--stop", ""),
        ("run", "x", "--stop", os.fsdecode(b"\xff")),
        ("run", "x", "--logit-bias", "5"),
        ("run", "x", "--kv", "f8"),
        ("run", "x", "--context", "0"),
        ("chat", "--seed", "-1"),
        ("score", __file__, "--window", "1"),
        ("bench", "decode", "--repeat", "0"),
    ],
)
def test_wrong_usage_is_told_without_reading_a_model(arguments: tuple[str, ...], monkeypatch):
    monkeypatch.setattr("strata.model.GgufFile", None)
    done = call(*arguments)
    assert done.exit_code == 2, done.output
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert len(done.stderr) > 20


def test_no_model_is_wrong_usage(monkeypatch):
    monkeypatch.delenv(locate.VARIABLE, raising=False)
    monkeypatch.setattr(locate, "checkout", lambda: None)
    done = call("run", "x")
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("strata run: no model is given; found neither --model nor STRATA_MODEL")


def test_a_damaged_file_is_refused_with_one_line(tmp_path: Path):
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"nothing of the kind")
    for arguments in (("run", "x", "--model", str(bad)), ("inspect", str(bad)), ("plan", str(bad))):
        done = call(*arguments)
        assert (done.exit_code, done.stdout) == (1, ""), done.output
        assert re.fullmatch(rf"strata {arguments[0]}: .*found.*needed.*\n", done.stderr), done.stderr


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (
            DoesNotFit("too large", found=2, needed=1, advice="Less."),
            1,
            "strata run: too large; found 2; needed 1. Less.\n",
        ),
        (BadArgument("odd"), 2, "strata run: odd\n"),
        (MemoryError(), 1, "strata run: out of memory\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_errors_and_their_statuses(error: BaseException, status: int, said: str, monkeypatch):
    def fail(given: object) -> Path:
        raise error

    monkeypatch.setattr(flags, "find_model", fail)
    done = call("run", "x")
    assert (done.exit_code, done.stderr, done.stdout) == (status, said, "")


def test_a_programming_error_is_not_hidden(monkeypatch):
    monkeypatch.setattr(flags, "find_model", lambda given: 1 // 0)
    assert isinstance(call("run", "x").exception, ZeroDivisionError)


# ---- run


def test_run_writes_the_answer_and_nothing_else(model, small):
    expected = model.generate(PROMPT, max_tokens=24)
    done = call("run", PROMPT, "-n", "24", *small)
    assert (done.exit_code, done.stdout, done.stderr) == (0, expected.text, "")
    assert call("run", "-", "-n", "24", *small, stdin=PROMPT).stdout == expected.text


def test_run_json_is_the_result(model, small):
    sampling = {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1,
                "presence_penalty": 0.1, "frequency_penalty": 0.2, "penalty_last_n": 32, "seed": 7}  # fmt: skip
    expected = model.generate(PROMPT, max_tokens=16, stop="zzz", ignore_eos=True, top_logprobs=2,
                              logit_bias={100: -3.0}, **sampling)  # fmt: skip
    arguments = [x for name, value in sampling.items() for x in (f"--{name.replace('_', '-')}", str(value))]
    done = call("run", PROMPT, "-n", "16", "--json", "--stop", "zzz", "--ignore-eos", "--top-logprobs", "2",
                "--logit-bias", "100=-3", *arguments, *small)  # fmt: skip
    found = json.loads(done.stdout)
    assert (done.exit_code, done.stdout.count("\n"), done.stderr) == (0, 1, "")
    assert found["text"] == expected.text
    assert tuple(found["tokens"]) == expected.tokens
    assert (found["seed"], found["finish_reason"], found["stopped_on"]) == (7, "length", None)
    assert found["usage"]["total_tokens"] == expected.usage.total_tokens
    assert found["timings"]["decode_tokens_per_s"] > 0
    assert [e["logprob"] for e in found["logprobs"]] == [e.logprob for e in expected.logprobs]
    assert "".join(e["text"] for e in found["logprobs"]) == expected.text
    assert [[(t["token"], t["logprob"]) for t in e["top"]] for e in found["logprobs"]] == [
        [tuple(pair) for pair in e.top] for e in expected.logprobs
    ]


def test_run_refuses_what_the_context_cannot_hold(small):
    done = call("run", PROMPT, "-n", "5000", *small)
    assert (done.exit_code, done.stdout) == (1, "")
    assert "strata run: prompt and answer exceed the context; found" in done.stderr


# ---- chat


def test_chat_in_a_pipe_keeps_history_and_obeys_commands(model, small):
    options = {"max_tokens": 12}
    first = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Explain lists."}]
    a = model.chat(first, thinking=False, **options)
    b = model.chat([*first, a.message, {"role": "user", "content": "Continue."}], thinking=False, **options)
    again = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Continue."}]
    c = model.chat(again, thinking=False, **options)
    d = model.chat([*again, c.message, {"role": "user", "content": "three"}], thinking=True, **options)
    lines = "Explain lists.\n\nContinue.\n/reset\nContinue.\n/think\nthree\n/exit \nnever\n"
    done = call("chat", "--system", "Be brief.", "--no-think", "-n", "12", *small, stdin=lines)
    assert done.exit_code == 0, done.stderr
    assert done.stdout == "".join(answer.text + "\n" for answer in (a, b, c, d))
    told = ["the conversation is forgotten", "thinking is on"]
    assert done.stderr.splitlines()[:2] == told
    assert ("no answer: reasoning took all tokens" in done.stderr) == (d.text == "" and d.finish_reason == "length")
    assert b.text != c.text, "the history counts"


def test_chat_in_a_pipe_ends_at_an_error_and_at_the_end_of_input(small):
    done = call("chat", *small, "-n", "4", stdin="one " * 600 + "\ntwo\n")
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith("strata chat: ")
    done = call("chat", *small, stdin="/help\n/dance\n/quit\nnever\n")
    assert (done.exit_code, done.stdout) == (0, "")
    assert "no command /dance" in done.stderr and done.stderr.count("/exit, /quit or Ctrl-D leaves") == 2


# ---- score


def test_score_of_windows_is_the_model_s(model, small, tmp_path: Path):
    text = tmp_path / "text.py"
    text.write_text((ROOT / "strata" / "records.py").read_text()[:1500])
    tokens = model.tokenize(text.read_text(), special=False)[:301]
    parts = [model.score(tokens[i : i + 100]) for i in range(0, 300, 100)]
    nats = sum(p.tokens * p.nats for p in parts) / 297
    done = call("score", str(text), "--window", "100", "-n", "301", "--json", *small)
    found = json.loads(done.stdout)
    assert (done.exit_code, done.stderr) == (0, "")
    assert (found["tokens"], found["windows"], found["predicted_tokens"]) == (301, 4, 297)
    assert found["nats_per_token"] == pytest.approx(nats, rel=1e-12)
    assert found["perplexity"] == pytest.approx(math.exp(nats), rel=1e-12)
    said = call("score", "-", "-n", "100", *small, stdin=text.read_text()).stdout
    assert f"perplexity        {math.exp(parts[0].nats):.4f}\n" in said
    assert "100 in 1 window(s) of 100, 99 predicted" in said


def test_score_refuses_what_it_cannot_read(small, tmp_path: Path):
    binary, short = tmp_path / "b", tmp_path / "s"
    binary.write_bytes(b"ab\xff\xfe")
    short.write_text("")
    for file, status, said in (
        (binary, 1, "0xff at offset 2"),
        (tmp_path / "no", 1, "cannot read"),
        (short, 1, "is empty; found 0 tokens; needed >= 2"),
    ):
        done = call("score", str(file), *small)
        assert (done.exit_code, done.stdout) == (status, "")
        assert said in done.stderr
    done = call("score", __file__, "--window", "513", *small)
    assert done.exit_code == 2
    assert "--window exceeds the context; found 513; needed <= 512" in done.stderr


# ---- inspect


def test_inspect_counts_every_byte(tiny_path: Path):
    done = call("inspect", str(tiny_path), "--json")
    found = json.loads(done.stdout)
    assert done.exit_code == 0
    assert sum(c["bytes"] for c in found["classes"]) == found["tensor_bytes"]
    assert sum(c["tensors"] for c in found["classes"]) == sum(s["tensors"] for s in found["shards"])
    assert all(sum(c["types"].values()) == c["bytes"] for c in found["classes"])
    g = found["geometry"]
    layers = [layer["expert_bytes"] for layer in found["experts"]]
    assert len(layers) == g["L"]
    assert all(e["expert_bytes"] == sum(e[p]["bytes"] for p in ("gate", "up", "down")) for e in found["experts"])
    by_name = {c["name"]: c for c in found["classes"]}
    assert by_name["routed experts"]["bytes"] == g["E"] * sum(layers)
    assert found["routed_bytes_per_token"] == g["K"] * sum(layers)
    assert found["missing_bytes"] == 0
    # K and V of two layers: 2 heads of 64 values, two bytes each or one and two bytes of scale for each group of 64.
    assert found["state"]["kv_bytes_per_token"] == {"f16": 2 * 2 * 128 * 2, "int8": 2 * 2 * (128 + 2 * 2)}


def test_inspect_as_text(tiny_path: Path):
    said = call("inspect", str(tiny_path)).stdout
    assert "layers           8 (6 GDN, 2 attention)" in said
    assert re.search(r"^1-3 +43,520  IQ3_XXS 12,544 ", said, re.MULTILINE)
    assert "INCOMPLETE" not in said


def test_inspect_of_a_partly_downloaded_model(tiny_path: Path, tmp_path: Path):
    whole = inspect_file(tiny_path)
    cut = 1_000_000
    data = tiny_path.read_bytes()
    short = tmp_path / tiny_path.name
    short.write_bytes(data[:-cut])
    other = tiny_path.name.replace("00001-of", "00002-of")
    (tmp_path / other).write_bytes((tiny_path.parent / other).read_bytes())
    found = inspect_file(short)
    # The file may end with padding, which nobody misses.
    assert cut - 64 <= found["missing_bytes"] <= cut
    assert found["classes"] == whole["classes"]
    said = call("inspect", str(short)).stdout
    assert "INCOMPLETE: at least" in said
    found_bytes, needed_bytes = (found["shards"][0][key] for key in ("bytes", "needed_bytes"))
    assert found_bytes == len(data) - cut and needed_bytes == found_bytes + found["missing_bytes"]
    assert f"{short.name}: found {found_bytes:,} bytes, needed {needed_bytes:,}" in said


def test_inspect_without_the_shard_of_the_n_gram_table(tiny_path: Path, tmp_path: Path):
    short = tmp_path / tiny_path.name
    short.write_bytes(tiny_path.read_bytes())
    found, whole = inspect_file(short), inspect_file(tiny_path)
    (other,) = found["missing_shards"]
    assert found["geometry"] == whole["geometry"] and found["experts"] == whole["experts"]
    assert found["assumed"].startswith(f"shard {other} is missing: its n-gram table is assumed to be IQ4_NL")
    said = call("inspect", str(short)).stdout
    assert f"(no {other})\n  {found['assumed']}\n" in said and whole["assumed"] is None


def test_inspect_finds_a_model_as_run_does(tiny_path: Path, monkeypatch):
    wanted = json.loads(json.dumps(inspect_file(tiny_path)))
    assert json.loads(call("inspect", str(tiny_path.parent), "--json").stdout) == wanted
    monkeypatch.setenv(locate.VARIABLE, str(tiny_path))
    assert json.loads(call("inspect", "--json").stdout) == wanted


def test_an_empty_path_is_wrong_usage():
    for arguments in (("run", "x", "-m", ""), ("inspect", ""), ("plan", "")):
        done = call(*arguments)
        assert done.exit_code == 2 and "the path is empty" in done.output


def test_bench_ngram_says_what_is_wrong_with_a_folder(tmp_path: Path):
    file = tmp_path / "file"
    file.touch()
    for folder, found in ((tmp_path / "none", "No such file or directory"), (file, "Not a directory")):
        done = call("bench", "ngram", "--folder", str(folder), "--gib", "0.01")
        assert done.exit_code == 1 and done.stdout == ""
        assert f"cannot be kept in '{folder}'; found {found}; needed a folder" in done.stderr
        assert "Give another --folder" in done.stderr
    done = call("bench", "ngram", "--folder", str(tmp_path), "--gib", "1000")
    assert done.exit_code == 1 and "GiB free; needed 1000.00 GiB" in done.stderr
    assert list(tmp_path.iterdir()) == [file]
    done = call("bench", "ngram", "--folder", str(tmp_path), "--rows", "x")
    assert done.exit_code == 2 and "--rows cannot be read" in done.stderr


def test_doctor_of_a_place_that_is_not_there(tmp_path: Path):
    done = call("doctor", str(tmp_path / "none"))
    assert done.exit_code == 1 and re.search(r"found no file or folder '.*none'", done.stderr)
