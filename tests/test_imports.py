"""The map of the house as tests: who may import whom, how long a file may be, what no file says."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "strata"

ROOMS = "base | pack | text cpu gpu | arch | spec planner | runtime | model | cli"
LEVELS = {room: level for level, rooms in enumerate(ROOMS.split(" | ")) for room in rooms.split()}
"""Rooms by height. A room imports itself and lower ones; rooms of one height do not know each other."""

MODEL_FILES = {path.stem for path in PACKAGE.glob("*.py")} - {"__main__"}
"""Files beside the rooms: together they are the room "model", but for `python -m strata`, which is the command line."""

ONLY_FROM = {"text": {"model"}}
"""Rooms that not everyone above may import."""

OPTIONAL = {"cupy": {"gpu"}}
"""Optional dependencies and the rooms whose files may import them at import time."""

MAX_LINES = 450
LONG_FILE = re.compile(r"^(#|//) Long file: \S.{20,}$", re.MULTILINE)
"""A file that is longer says in such a comment why it is not split."""


def module_name(path: Path, root: Path = ROOT) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str:
    """The room of a dotted name below `strata`."""
    parts = module.split(".")
    if len(parts) == 1 or parts[1] in MODEL_FILES:
        return "model"
    if parts[1:] == ["__main__"]:
        return "cli"
    assert parts[1] in LEVELS, f"{module}: no room of that name on the map"
    return parts[1]


def imported(tree: ast.AST, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import, those inside functions and those through import_module included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                up = module.split(".")[: None if is_package and node.level == 1 else -(node.level - is_package)]
                base = ".".join([*up, *filter(None, [base])])
            # "from strata import x" may name a room; deeper down the module named before "import" is enough.
            yield from ((node.lineno, f"{base}.{alias.name}" if base == "strata" else base) for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = getattr(node.func, "attr", getattr(node.func, "id", None))
            if name in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value


def upward(source: str, module: str, is_package: bool = False) -> list[str]:
    """What a module imports although the map forbids it."""
    here, found = room_of(module), []
    for line, name in imported(ast.parse(source), module, is_package):
        if name.split(".")[0] != "strata":
            continue
        parts = name.split(".")
        # A name that is no room and no file was re-exported by strata/__init__.py.
        room = "model" if len(parts) > 1 and parts[1] not in LEVELS else room_of(name)
        if room == here:
            continue
        allowed = LEVELS[room] < LEVELS[here] and here in ONLY_FROM.get(room, LEVELS)
        if here == "text":
            allowed = room in ("pack", "base")
        if not allowed:
            found.append(f"{module}:{line}: {here} imports {name} ({room})")
    return found


def python_files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def test_imports_point_downward():
    found = [
        line
        for path in python_files()
        for line in upward(path.read_text(encoding="utf-8"), module_name(path), path.name == "__init__.py")
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("module", "source", "n"),
    [
        ("strata.cpu.pool", "from strata.base.errors import need", 0),
        ("strata.cpu.pool", "import strata.arch", 1),
        ("strata.cpu.pool", "def f():\n    from strata.gpu import graph", 1),
        ("strata.gpu.graph", "import strata.cpu.pool", 1),
        ("strata.gpu.graph", "import strata.cpu.pool as pool, strata.base.plan", 1),
        ("strata.base.errors", "from strata import Model", 1),
        ("strata.base.errors", "import strata", 1),
        ("strata.pack.formats", "from ..cpu import pool", 1),
        ("strata.pack.formats", "from . import grids\nfrom .lanes import product\nfrom ..base import errors", 0),
        ("strata.pack.formats", "import importlib\nimportlib.import_module('strata.cpu.pool')", 1),
        ("strata.runtime.session", "from strata.text.stop import TextStop", 1),
        ("strata.runtime.session", "from strata.cpu.head_rows import top", 0),
        ("strata.session", "from strata.text.stop import TextStop\nfrom strata.streams import TextStream", 0),
        ("strata.text.stop", "from strata.runtime import sampling", 1),
        ("strata.text.stop", "from strata.pack.gguf_file import GgufFile", 0),
        ("strata.cli.run", "from strata.text.stop import TextStop", 1),
        ("strata.cli.run", "import strata\nfrom strata import load, planner", 0),
        ("strata.planner.memory", "from strata.spec import policy", 1),
        ("strata.model", "from strata.cli import main", 1),
    ],
)
def test_the_rule_sees(module, source, n):
    assert len(upward(source, module)) == n


def test_a_package_imports_relative_to_itself():
    assert not upward("from .pool import Pool\nfrom ..base import errors", "strata.cpu", is_package=True)
    assert len(upward("from .. import arch", "strata.cpu", is_package=True)) == 1


def test_every_file_has_a_room():
    rooms = {room_of(module_name(path)) for path in python_files()}
    assert rooms <= set(LEVELS)
    assert {"base", "pack", "text", "cpu", "arch", "planner", "runtime", "model"} <= rooms


def test_third_party_imports_are_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = {re.match(r"[A-Za-z0-9_-]+", line)[0].lower() for line in project["dependencies"]}
    found = []
    for path in python_files():
        module, is_package = module_name(path), path.name == "__init__.py"
        tree = ast.parse(path.read_text(encoding="utf-8"))
        at_import = {id(node) for node in tree.body}
        for node in ast.walk(tree):
            if not isinstance(node, ast.Import | ast.ImportFrom):
                continue
            for line, name in imported(ast.Module([node], []), module, is_package):
                top = name.split(".")[0]
                if top in sys.stdlib_module_names or top == "strata" or top in declared:
                    continue
                if top in OPTIONAL and (room_of(module) in OPTIONAL[top] or id(node) not in at_import):
                    continue
                found.append(f"{module}:{line}: {name}")
    assert not found, "\n".join(found)


def test_importing_strata_loads_no_optional_package():
    code = "import strata, sys; print(sorted({'cupy', 'torch', 'xllamacpp', 'strata.cli'} & set(sys.modules)))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"


# ---- errors


NEEDS_OF_OUR_OWN = {"gpu", "cpu", "pack", "base"}
"""Rooms where `need` is for what no value of a caller reaches."""


def half_said(source: str, needs_too: bool = True) -> list[str]:
    """Lines that make an error of strata.base.errors, or call its `need`, without found= and needed=. What was closed
    needs no found=."""
    tree, errors, lines = ast.parse(source), {}, []
    free = {"about"} if needs_too else {"about", "need"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "strata.base.errors":
            errors |= {alias.asname or alias.name: alias.name for alias in node.names if alias.name not in free}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in errors:
            given = {keyword.arg for keyword in node.keywords}
            asked = {"needed"} if errors[node.func.id] == "Closed" else {"found", "needed"}
            if None not in given and not asked <= given:
                lines.append(f"{node.lineno}: {ast.unparse(node)}")
    return lines


def test_errors_say_what_was_found_and_needed():
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in python_files()
        for line in half_said(path.read_text(encoding="utf-8"), room_of(module_name(path)) not in NEEDS_OF_OUR_OWN)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("call", "n"),
    [
        ("FileError('x', found=1, needed=2)", 0),
        ("FileError('x', **details)", 0),
        ("FileError('x', found=1, advice='y')", 1),
        ("FileError('x')", 1),
        ("Closed('x', needed=2)", 0),
        ("Closed('x')", 1),
        ("Busy('of another module')", 0),
        ("need(a, 'x', found=1)", 1),
        ("need(a, 'x', found=1, needed=2)", 0),
    ],
)
def test_the_rule_of_errors_sees(call, n):
    source = f"from strata.base.errors import Closed, FileError, need\n{call}"
    assert len(half_said(source)) == n
    assert len(half_said(source, needs_too=False)) == (0 if call.startswith("need") else n)


# ---- files

TEXT_SUFFIXES = {".py", ".cu", ".cuh", ".h", ".cpp", ".md", ".toml", ".json", ".txt", ""}


def text_files() -> list[Path]:
    """Every text file of the repository, build and tool folders left out."""
    files = [ROOT / name for name in ("README.md", "CHANGELOG.md", "pyproject.toml", ".ci/run")]
    for folder in ("strata", "tests", "examples", "docs", "bench"):
        files += [p for p in (ROOT / folder).rglob("*") if p.is_file() and p.suffix in TEXT_SUFFIXES]
    return sorted(p for p in files if "__pycache__" not in p.parts and ".hypothesis" not in p.parts)


def too_long(text: str) -> bool:
    return text.count("\n") > MAX_LINES and not LONG_FILE.search(text)


def test_no_long_file_without_a_reason():
    found = [
        f"{path.relative_to(ROOT)}: {text.count(chr(10))} lines"
        for path in text_files()
        if path.suffix in (".py", ".cu", ".cuh", ".h", ".cpp") and too_long(text := path.read_text(encoding="utf-8"))
    ]
    assert not found, "split them, or say why not in a comment '# Long file: ...':\n" + "\n".join(found)


def test_the_length_rule_sees():
    assert too_long("x\n" * 451) and not too_long("x\n" * 450)
    assert too_long("# Long file: yes\n" + "x\n" * 500)
    assert not too_long("# Long file: one table, each row a block format\n" + "x\n" * 500)


# Written in pieces, so that this file does not contain them.
FORBIDDEN = {
    "unfinished work": re.compile(r"\b(" + "|".join(["TO" + "DO", "FIX" + "ME", "X" + "XX", "HA" + "CK"]) + r")\b"),
    "a stub": re.compile(r"raise Not" + r"Implemented" + r"Error"),
    "a path of one machine": re.compile(r"(?<![\w.])/(" + "|".join(["work", "root", "home"]) + r")/\w"),
    "a merge mark": re.compile(r"^(<{7}|>{7}) ", re.MULTILINE),
    "a swallowed exception": re.compile(r"except( Exception| BaseException)?:\s*\n\s*pass\b"),
}


def test_no_forbidden_words():
    found = []
    for path in text_files():
        text = path.read_text(encoding="utf-8")
        for what, pattern in FORBIDDEN.items():
            for hit in pattern.finditer(text):
                line = text.count("\n", 0, hit.start()) + 1
                found.append(f"{path.relative_to(ROOT)}:{line}: {what}: {hit[0].strip()!r}")
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("unfinished work", "# TO" + "DO later"),
        ("a stub", "    raise Not" + "ImplementedError"),
        ("a path of one machine", "see /ro" + "ot/x"),
        ("a merge mark", "a\n" + "<" * 7 + " HEAD\n"),
        ("a swallowed exception", "except Exception:\n" + "    pass\n"),
    ],
)
def test_the_word_rule_sees(what, text):
    assert FORBIDDEN[what].search(text)


def test_ruff():
    command = [sys.executable, "-m", "ruff", "check", "strata", "tests", "examples"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
