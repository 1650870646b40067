"""Every example runs on the bundled model, and so does the code of the README."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import random
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np
import pytest

import strata
from strata.cli import VERBS
from strata.pack.formats import FORMATS

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
README = ROOT / "README.md"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def model(tiny_path):
    with strata.load(tiny_path, context=1024) as model:
        yield model


def test_every_example_is_tested():
    here = Path(__file__).read_text(encoding="utf-8")
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    assert names >= {"generate", "stream", "chat", "two_sessions", "embed_in_app", "perplexity"}
    for name in names:
        assert f'example("{name}")' in here, name


def test_generate(capsys, model):
    example("generate").main(["def area(w, h):", "--max-tokens", "8"])
    text = capsys.readouterr().out
    answer = model.generate("def area(w, h):", max_tokens=8)
    assert text.startswith("def area(w, h):" + answer.text)
    assert f"{answer.usage.prompt_tokens} prompt tokens, 8 new" in text and "ended by length" in text


def test_generate_sampled_with_a_seed_repeats(capsys):
    arguments = ["import ", "--max-tokens", "12", "--temperature", "1.0", "--seed", "5"]
    texts = []
    for _ in range(2):
        example("generate").main(arguments)
        texts.append(capsys.readouterr().out.split("\n\n")[0])
    assert texts[0] == texts[1]


def test_stream(capsys, model):
    example("stream").main(["def area(w, h):", "--max-tokens", "40", "--stop", "return"])
    out, err = capsys.readouterr()
    answer = model.generate("def area(w, h):", max_tokens=40, stop="return")
    assert out.startswith("def area(w, h):" + answer.text) and "return" not in answer.text
    assert f"{len(answer.tokens)} tokens" in out and answer.finish_reason in out
    assert re.search(r"read (\d+) of \1 prompt tokens", err)
    assert example("stream").unescaped(r"a\n\tb") == "a\n\tb"


def test_chat(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("What is a list?\nAnd a dict?\n\n"))
    example("chat").main(["--system", "Answer briefly.", "--max-tokens", "16"])
    turns = re.findall(r"\[(\d+) prompt tokens, (\d+) reused, (\w+)\]", capsys.readouterr().out)
    assert len(turns) == 2
    (first, reused_first, _), (second, reused_second, _) = turns
    assert int(second) > int(first) and int(reused_first) == 0
    assert int(reused_second) >= int(first) - 1  # the whole first prompt is still held


def test_two_sessions(capsys, model):
    example("two_sessions").main(["--max-tokens", "12"])
    text = capsys.readouterr().out
    alone = model.generate("def add(a, b):", max_tokens=12)
    assert text.startswith("def add(a, b):" + alone.text)  # the other session leaves no trace
    total, held = map(int, re.search(r"(\d+) prompt tokens, (\d+) of them still held", text).groups())
    assert 0 < held < total


def test_perplexity(capsys, tmp_path, model):
    text = (EXAMPLES / "generate.py").read_text(encoding="utf-8")
    words = text.split(" ")
    random.Random(1).shuffle(words)
    plain, shuffled, empty = tmp_path / "plain.txt", tmp_path / "shuffled.txt", tmp_path / "empty.txt"
    plain.write_text(text)
    shuffled.write_text(" ".join(words))
    empty.write_text("")
    example("perplexity").main([str(plain), str(shuffled), str(empty), "--window", "256", "--max-tokens", "256"])
    lines = capsys.readouterr().out.splitlines()
    found = [float(re.search(r"perplexity ([\d.]+) over", line)[1]) for line in lines[:2]]
    assert found[0] == pytest.approx(model.perplexity(model.tokenize(text, special=False)[:256]), rel=1e-3)
    assert 1 < found[0] < found[1]
    assert "nothing to predict" in lines[2]


def test_own_drafter(capsys, model):
    own = example("own_drafter")
    own.main(["def area(w, h):", "--max-tokens", "40"])
    text = capsys.readouterr().out
    assert text.startswith("def area(w, h):" + model.generate("def area(w, h):", max_tokens=40).text)
    assert "the same as without drafts: True" in text
    windows = int(re.search(r"40 tokens in (\d+) windows", text)[1])
    assert 1 <= windows <= 40
    drafter = own.EarlierAnswers(match=2)
    drafter.add([1, 2, 3, 4, 2, 3, 5])
    assert drafter.propose(np.array([9, 1, 2], np.int32), 3) == [3, 4, 2]
    assert drafter.propose(np.array([2, 3], np.int32), 7) == [5]  # the latest place counts
    assert drafter.propose(np.array([3], np.int32), 7) == drafter.propose(np.array([7, 7], np.int32), 7) == []


def post(address: str, body: bytes) -> tuple[int, str, str | None]:
    """(status, text, Retry-After)"""
    try:
        with urlopen(Request(f"{address}/complete", body)) as answer:
            return answer.status, answer.read().decode(), None
    except HTTPError as error:
        with error:
            return error.code, error.read().decode(), error.headers["Retry-After"]


def test_embed_in_app_asks_itself(capsys, model):
    example("embed_in_app").main([])
    text = capsys.readouterr().out
    for prompt in ("def area(width, height):", "SELECT statements are used to"):
        assert prompt + model.generate(prompt, max_tokens=32).text in text


def test_embed_in_app_refuses_and_recovers(tiny_path):
    app = example("embed_in_app")
    body = json.dumps({"prompt": "import os", "max_tokens": 4}).encode()
    before = set(threading.enumerate())
    with app.service(tiny_path, sessions=1) as (writer, address):
        with writer.session():
            status, text, retry = post(address, body)
            assert (status, retry) == (503, "1") and "every session is answering" in text
        assert post(address, body)[0] == 200
        assert post(address, b"{")[0] == 400
        assert post(address, b'{"prompt": 3}')[0] == 400
        status, text, _ = post(address, json.dumps({"prompt": "x", "max_tokens": 10**6}).encode())
        assert status == 400 and "context" in text
        assert post(address, body)[0] == 200  # nothing was left borrowed
    assert writer.model.closed and set(threading.enumerate()) <= before


def test_embed_in_app_frees_the_session_of_a_client_that_went_away(tiny_path):
    app = example("embed_in_app")
    with app.service(tiny_path, sessions=1, context=24_000) as (writer, address):
        body = json.dumps({"prompt": "import os", "max_tokens": 20_000}).encode()
        with urlopen(Request(f"{address}/complete", body)) as answer:
            assert answer.read(1)
        for _ in range(100):
            try:
                with writer.session() as session:
                    assert len(session.tokens) < 19_000
                    break
            except strata.Busy:
                time.sleep(0.05)
        else:
            pytest.fail("the session is still in use")


def test_embed_in_app_stops_while_answering(tiny_path):
    app = example("embed_in_app")
    with app.service(tiny_path, sessions=1, context=24_000) as (writer, address):
        body = json.dumps({"prompt": "import os", "max_tokens": 20_000}).encode()
        answer = urlopen(Request(f"{address}/complete", body))
        assert answer.read(1)
    assert writer.model.closed
    with answer:
        assert len(answer.read()) < 20_000  # it ended early: a token has about three characters


def test_an_example_as_a_script(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(EXAMPLES / "generate.py"), "--max-tokens", "4"]
    settings = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True, "timeout": 300}
    done = subprocess.run(command, check=True, **settings)
    assert done.stdout.startswith("def fibonacci(n):") and "4 new" in done.stdout


# ---- README


def test_readme_python_runs(capsys, monkeypatch):
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) >= 1 and len(blocks[0].splitlines()) <= 12
    monkeypatch.chdir(ROOT)
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {"__name__": "readme"})
        assert len(capsys.readouterr().out) > 20


def test_readme_commands_are_marked_once_and_used_by_ci():
    text = README.read_text(encoding="utf-8")
    commands = {
        "run-command": '.venv/bin/strata run --max-tokens 64 "def fibonacci(n):"',
        "test-command": ".venv/bin/python -m pytest -q -n 2 --dist loadfile",
    }
    for name, last in commands.items():
        blocks = re.findall(rf"<!-- {name} -->\n```\n(.*)\n```\n<!-- end -->", text)
        assert len(blocks) == 1 and text.count(f"<!-- {name} -->") == 1, name
        assert blocks[0].startswith("python3 -m venv .venv && ") and blocks[0].endswith(last)


def test_ci_prints_the_commands_it_would_run():
    """`.ci/run --print` says what it takes from the README, without doing it."""
    command = ["bash", str(ROOT / ".ci" / "run"), "--print"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    packages, tests, compiling = done.stdout.splitlines()
    text = README.read_text(encoding="utf-8")
    assert tests == re.search(r"<!-- test-command -->\n```\n(.*)\n```\n", text)[1]
    assert compiling == re.search(r"<!-- compile-command -->\n```\n(.*)\n```\n", text)[1]
    assert packages == re.search(r"<!-- system-packages -->\n```\n(.*)\n```\n", text)[1] and packages


def test_readme_names_files_that_exist():
    text = README.read_text(encoding="utf-8")
    targets = [target.split("#")[0] for target in re.findall(r"\]\(([^)]+)\)", text) if "://" not in target]
    assert targets
    for target in filter(None, targets):
        assert (ROOT / target).exists(), target


def test_documents_link_to_files_that_exist():
    folders = (ROOT / "docs", EXAMPLES, ROOT / "tests")
    for page in [ROOT / "CHANGELOG.md", *(page for folder in folders for page in folder.rglob("*.md"))]:
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
            if "://" not in target and target.split("#")[0]:
                assert (page.parent / target.split("#")[0]).exists(), f"{page.relative_to(ROOT)}: {target}"


def test_the_map_names_rooms_and_files_that_exist():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rooms = {path.parent.name for path in (ROOT / "strata").glob("*/__init__.py")}
    assert rooms <= set(re.findall(r"^\*\*(\w+)\*\* ", text, re.MULTILINE))
    for name in re.findall(r"`((?:strata|tests|gemv)/[\w/.]*)`", text):
        assert (ROOT / name).exists() or (ROOT / "strata" / "cpu" / name).exists(), name


def test_readme_lists_the_tensor_types_that_have_products():
    listed = re.search(r"^\| Tensor types \| (.*) \|$", README.read_text(encoding="utf-8"), re.MULTILINE)[1].split(", ")
    assert sorted(listed) == sorted(f.name for f in FORMATS.values() if f.activation != "none")


def test_readme_lists_the_commands_that_exist():
    listed = set(re.findall(r"^\| `strata ([\w-]+)", README.read_text(encoding="utf-8"), re.MULTILINE))
    assert listed == set(VERBS)
