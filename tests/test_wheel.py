"""The built wheel: what it holds, and that it installs and runs away from the checkout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import strata

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel of this checkout, built with the hatchling that is installed."""
    pytest.importorskip("hatchling", reason="hatchling is not installed")
    pytest.importorskip("build", reason="build is not installed")
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(command, cwd=out, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """The bin folder of a fresh environment with the wheel, which borrows its dependencies from this one."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=60)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    command = [*pip, "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(command, check=True, timeout=60)
    # Paths of a .pth file come after the environment's own packages, and .pth files found there are not read, so an
    # editable install of the checkout stays out of sight.
    paths = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "borrowed.pth").write_text("\n".join(sorted(paths)) + "\n")
    return folder / "bin"


def call(command: list[str | Path], cwd: Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run away from the checkout, without variables that could lead back to it."""
    away = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "STRATA_"))}
    words = [str(word) for word in command]
    return subprocess.run(words, cwd=cwd, env=away, capture_output=True, text=True, timeout=300, check=check)


def test_it_holds_the_package_and_nothing_else(wheel):
    wanted = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "strata").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        assert archive.testzip() is None
    found = {name for name in names if ".dist-info/" not in name}
    assert found == wanted
    assert "strata/planner/cards.json" in found and "strata/cpu/gemv/table.py" in found
    licences = [name for name in names if name.endswith("/licenses/LICENSE")]
    assert len(licences) == 1


def test_metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode())
        (entry,) = (n for n in archive.namelist() if n.endswith(".dist-info/entry_points.txt"))
        assert "strata = strata.cli:main" in archive.read(entry).decode()
        (licence,) = (n for n in archive.namelist() if n.endswith("/licenses/LICENSE"))
        assert archive.read(licence) == (ROOT / "LICENSE").read_bytes()
    assert (metadata["Name"], metadata["Version"]) == ("strata", strata.__version__)
    assert metadata["License-Expression"] == "Apache-2.0" and metadata["Requires-Python"] == ">=3.11"
    assert {"cuda12", "cuda13", "test", "bench"} <= set(metadata.get_all("Provides-Extra"))
    assert metadata.get_payload() == (ROOT / "README.md").read_text(encoding="utf-8")
    wheel_tags = wheel.stem.split("-", 2)[2]
    assert wheel_tags == "py3-none-any"


def test_it_installs_and_imports(installed, tmp_path):
    code = (
        "import importlib, json, pkgutil, strata\n"
        "from importlib.resources import files\n"
        "names = [m.name for m in pkgutil.walk_packages(strata.__path__, 'strata.')]\n"
        "optional = {'cupy'}\n"
        "for name in names:\n"
        "    if name.endswith('__main__'): continue\n"
        "    try: importlib.import_module(name)\n"
        "    except ModuleNotFoundError as e:\n"
        "        if e.name not in optional: raise\n"
        "cards = json.loads((files('strata.planner') / 'cards.json').read_text())\n"
        "print(json.dumps([strata.__file__, strata.__version__, len(names), bool(cards)]))\n"
    )
    path, version, modules, cards = json.loads(call([installed / "python", "-c", code], tmp_path).stdout)
    assert Path(path).is_relative_to(installed.parent) and not Path(path).is_relative_to(ROOT)
    assert version == strata.__version__ and cards
    assert modules >= 60


def test_its_command(installed, tmp_path):
    assert call([installed / "strata", "--version"], tmp_path).stdout.strip() == f"strata {strata.__version__}"
    text = call([installed / "strata", "--help"], tmp_path).stdout
    for verb in ("run", "chat", "plan", "inspect", "score", "bench", "doctor"):
        assert f"  {verb} " in text, verb


def test_its_command_asks_for_a_model_where_none_is_bundled(installed, tmp_path):
    done = call([installed / "strata", "run", "x"], tmp_path, check=False)
    assert done.returncode == 2 and done.stdout == ""
    assert "no model is given" in done.stderr and "--model" in done.stderr
    assert "Traceback" not in done.stderr


def test_its_command_reads_a_model(installed, tiny_path, tmp_path):
    text = call([installed / "strata", "inspect", tiny_path], tmp_path).stdout
    assert "qwen4exp" in text and "IQ3_XXS" in text
