"""Closed and full outputs: one line on stderr, or none, and an exit status; never a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_cli import ROOT, START_S, environment

STRATA = f"{sys.executable} -m strata"
needs_full = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")


def shell(line: str) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of a line of bash."""
    done = subprocess.run(["bash", "-c", line], env=environment(), cwd=ROOT, capture_output=True, text=True,
                          timeout=START_S)  # fmt: skip
    return done.returncode, done.stdout, done.stderr


@needs_full
@pytest.mark.parametrize(
    ("arguments", "who"), [("inspect MODEL", "strata inspect"), ("--version", "strata"), ("--help", "strata")]
)
def test_a_full_disk_is_said(tiny_path: Path, arguments, who):
    line = f"{STRATA} {arguments.replace('MODEL', str(tiny_path))} > /dev/full"
    assert shell(line) == (1, "", f"{who}: No space left on device\n")


def test_nobody_reads(tiny_path: Path):
    for arguments in (f"inspect {tiny_path}", "--help"):
        status = shell(f"{STRATA} {arguments} | true; exit ${{PIPESTATUS[0]}}")
        assert status == (141, "", ""), arguments


def test_closed_streams(tiny_path: Path, tmp_path: Path):
    assert shell(f"{STRATA} inspect {tiny_path} >&-") == (1, "", "strata: the standard output is closed\n")
    assert shell(f"{STRATA} inspect {tmp_path}/none.gguf 2>&-") == (1, "", "")
    status, said, _ = shell(f"{STRATA} inspect {tiny_path} 2>&- <&-")
    assert status == 0 and "geometry" in said


@needs_full
def test_an_error_that_cannot_be_said(tmp_path: Path):
    assert shell(f"{STRATA} inspect {tmp_path}/none.gguf 2> /dev/full") == (1, "", "")


def test_the_package_is_the_command():
    code, said, _ = shell(f"{STRATA} --version")
    assert code == 0 and said.startswith("strata ")
