"""Compiling kernels without a GPU: NVRTC, the disk cache, the ptxas report, and what kernels may not contain."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import numpy as np
import pytest

from strata.base.errors import BadArgument, StrataError
from strata.gpu import compile as compiler
from strata.gpu import launch as launches
from strata.gpu.compile import Binary, Usage, compile_source, headers_of, nvrtc_version
from strata.gpu.error_word import NO_ERROR, decode, where
from strata.gpu.launch import FOLDER, Source, all_sources, i32, launch, pointer


def nvrtc_missing() -> str | None:
    try:
        nvrtc_version()
    except StrataError as error:
        return str(error)
    return None


needs_nvrtc = pytest.mark.skipif(nvrtc_missing() is not None, reason=f"no NVRTC: {nvrtc_missing()}")
KERNELS = sorted([*FOLDER.rglob("*.cu"), *FOLDER.rglob("*.cuh")])


@pytest.fixture
def own_source(tmp_path, monkeypatch):
    """A source in a folder of its own, and an empty cache."""
    monkeypatch.setenv("STRATA_CACHE", str(tmp_path / "cache"))
    for module in (compiler, launches):
        monkeypatch.setattr(module, "FOLDER", tmp_path)
    (tmp_path / "twice.cuh").write_text("__device__ inline float twice(float x) { return x + x; }\n")

    def write(text: str, *instances: str) -> Source:
        (tmp_path / "k.cu").write_text(text)
        return Source("k.cu", instances)

    return write


TEXT = """#include "twice.cuh"
template <int N> __global__ void k(float *p) { p[threadIdx.x] = twice(p[threadIdx.x]) + N; }
"""


@needs_nvrtc
def test_cubin_names_and_report(own_source):
    binary = compile_source(own_source(TEXT, "k<1>", "k<2>"), 75)
    assert binary.cubin[:4] == b"\x7fELF"
    assert set(binary.lowered) == {"k<1>", "k<2>"} and len(set(binary.lowered.values())) == 2
    assert all(0 < u.registers < 64 and u.spill_bytes == u.stack_bytes == 0 for u in binary.usage.values())


@needs_nvrtc
def test_the_cache_sees_every_change(own_source, tmp_path, monkeypatch):
    compiled = []
    real = compiler._compile
    monkeypatch.setattr(compiler, "_compile", lambda *a: compiled.append(a[3]) or real(*a))
    source = own_source(TEXT, "k<1>")
    first = compile_source(source, 75)
    assert compile_source(source, 75) == first and compiled == [75]
    compile_source(source, 80)
    compile_source(own_source(TEXT + "\n", "k<1>"), 75)
    compile_source(own_source(TEXT, "k<1>", "k<3>"), 75)
    (tmp_path / "twice.cuh").write_text("__device__ inline float twice(float x) { return 2 * x; }\n")
    compile_source(source, 75)
    assert compiled == [75, 80, 75, 75, 75]


@needs_nvrtc
def test_a_damaged_cubin_is_made_again(own_source, tmp_path):
    source = own_source(TEXT, "k<1>")
    first = compile_source(source, 75)
    for path in (tmp_path / "cache").rglob("*.cubin"):
        path.write_bytes(path.read_bytes()[:-1])
    again = compile_source(source, 75)
    assert (again.cubin, again.lowered) == (first.cubin, first.lowered)


@needs_nvrtc
def test_an_error_shows_the_log(own_source):
    with pytest.raises(StrataError, match=r"k.cu does not compile for sm_75.*undefined"):
        compile_source(own_source("__global__ void k() { undefined(); }", "k"), 75)


@needs_nvrtc
def test_spills_are_found(own_source):
    body = "".join(f"float a{i} = p[{i} + threadIdx.x];" for i in range(200))
    body += "__syncthreads();" + "".join(f"p[{i} * threadIdx.x] = a{i} * a{199 - i};" for i in range(200))
    binary = compile_source(
        own_source(f"__global__ void __launch_bounds__(1024) k(volatile float *p) {{ {body} }}", "k"), 75
    )
    assert binary.usage["k"].spill_bytes > 0 and binary.usage["k"].stack_bytes > 0


@needs_nvrtc
def test_the_check_of_all_kernels(own_source, tmp_path, monkeypatch, capsys):
    """Longest first, every architecture; spills and too much CPU time make it fail."""
    short, long = own_source(TEXT, "k<1>"), Source("long.cu", ("k<1>", "k<2>"))
    (tmp_path / "long.cu").write_text(TEXT)
    monkeypatch.setattr(compiler, "all_sources", lambda: (short, long))
    assert compiler.main(["--arch", "75", "--arch", "90", "--processes", "1"]) == 0
    *lines, total = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [[a, f] for f in ("long.cu", "k.cu") for a in ("sm_75", "sm_90")]
    assert total.startswith("6 kernels of 4 cubins in ") and total.endswith(" 0 spill")
    monkeypatch.setattr(compiler, "CPU_LIMIT_S", 0.001)
    assert compiler.main(["--arch", "75", "--processes", "1"]) == 1
    assert "more than 0.001 s of CPU time" in capsys.readouterr().out


def _fake_check(job: tuple[Source, int, bool]) -> tuple[str, int, float, dict[str, Usage]]:
    """A job without a compiler. On `dies.cu` its process dies, always for sm_90, else the first time; `busy.cu` uses
    CPU time."""
    source, arch, _ = job
    if source.file == "dies.cu":
        died = Path(os.environ["STRATA_TEST_DIED"])
        if arch == 90 or not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
    if source.file == "busy.cu":
        began = time.process_time()
        while time.process_time() - began < 0.05:
            pass
    return source.file, arch, 0.1, {name: Usage(10, 0, 0, 0) for name in source.instances}


@pytest.fixture
def fake_jobs(monkeypatch, tmp_path):
    """The check with fake jobs of three sources, in the given order."""
    monkeypatch.setenv("STRATA_TEST_DIED", str(tmp_path / "died"))
    sources = tuple(Source(name, ("k",)) for name in ("busy.cu", "dies.cu", "last.cu"))
    monkeypatch.setattr(compiler, "_check", _fake_check)
    monkeypatch.setattr(compiler, "_work", lambda source: 0)
    monkeypatch.setattr(compiler, "all_sources", lambda: sources)
    return sources


@pytest.mark.parametrize("processes", [1, 2])
def test_a_compiler_that_dies_is_named(fake_jobs, capsys, processes):
    with pytest.raises(StrataError, match=r"the compiler died on dies\.cu for sm_90") as died:
        compiler.check_all((75, 90), processes, verbose=False)
    assert died.value.found and died.value.needed and died.value.advice
    said = capsys.readouterr().out.splitlines()
    assert said.count("a process died: what has no result yet is compiled again, one at a time") == 1
    rest = [line.split()[:2] for line in said if line.startswith("sm_")]
    assert rest == [["sm_75", "busy.cu"], ["sm_90", "busy.cu"], ["sm_75", "dies.cu"]]
    assert compiler.main(["--arch", "90", "--processes", str(processes)]) == 1
    assert "the compiler died on dies.cu for sm_90" in capsys.readouterr().err


@pytest.mark.parametrize("processes", [1, 3])
def test_a_process_that_dies_once_is_told_and_loses_nothing(fake_jobs, capsys, monkeypatch, processes):
    """As where the system took its memory: everything is checked, in the same order, and all CPU time counts."""
    assert compiler.check_all((75, 80), processes, verbose=False) == 0
    *lines, total = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines if line.startswith("sm_")] == [
        [f"sm_{arch}", source.file] for source in fake_jobs for arch in (75, 80)
    ]
    assert sum("a process died" in line for line in lines) == 1 and total.startswith("6 kernels of 6 cubins in ")
    monkeypatch.setattr(compiler, "CPU_LIMIT_S", 0.09)
    assert compiler.check_all((75, 80), processes, verbose=False) == 1, "two busy jobs of 0.05 s"


def test_the_test_install_of_the_readme_can_compile():
    root = FOLDER.parents[1]
    extras = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert {p.split(">")[0] for p in extras["nvrtc"]} == {"cupy-cuda12x", "nvidia-cuda-nvrtc-cu12"}
    readme = (root / "README.md").read_text(encoding="utf-8")
    assert re.search(r"<!-- test-command -->\n```\n.*'\.\[test,nvrtc\]'.*\n```", readme)
    assert re.search(r"<!-- compile-command -->\n```\n\.venv/bin/python -m strata\.gpu\.compile --all ", readme)


@pytest.mark.parametrize(("first", "second", "code"), [(0, 0, 0), (3, 0, 3), (0, 4, 4), (3, 4, 3)])
def test_ci_compiles_as_a_step_of_its_own(tmp_path, first, second, code):
    """Both commands of the README run, whatever the first one says; the first failure counts."""
    blocks = {"system-packages": "bash", "test-command": f"echo tests; exit {first}",
              "compile-command": f"echo kernels; exit {second}"}  # fmt: skip
    text = "".join(f"<!-- {name} -->\n```\n{line}\n```\n<!-- end -->\n" for name, line in blocks.items())
    (tmp_path / "README.md").write_text(text)
    (tmp_path / ".ci").mkdir()
    script = tmp_path / ".ci" / "run"
    script.write_text((FOLDER.parents[1] / ".ci" / "run").read_text(encoding="utf-8"))
    done = subprocess.run(["bash", str(script)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code, done.stderr
    assert done.stdout.splitlines()[-4:] == [f"+ echo tests; exit {first}", "tests",
                                             f"+ echo kernels; exit {second}", "kernels"]  # fmt: skip


def test_report_of_ptxas():
    log = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z1kILi1EEvPf' for 'sm_75'
ptxas info    : Function properties for _Z1kILi1EEvPf
    8 bytes stack frame, 16 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 32 registers, 8 bytes cumulative stack size, 64 bytes smem, 360 bytes cmem[0]
ptxas info    : Compiling entry function '_Z1kILi2EEvPf' for 'sm_75'
ptxas info    : Function properties for _Z1kILi2EEvPf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 10 registers, 360 bytes cmem[0]
"""
    usage = Binary(b"", {"a": "_Z1kILi1EEvPf", "b": "_Z1kILi2EEvPf"}, log).usage
    assert (usage["a"].registers, usage["a"].spill_bytes, usage["a"].stack_bytes, usage["a"].shared_bytes) == (
        32,
        28,
        8,
        64,
    )
    assert (usage["b"].registers, usage["b"].spill_bytes, usage["b"].stack_bytes) == (10, 0, 0)


def test_every_kernel_file_has_a_list_of_instances():
    sources = {s.path for s in all_sources()}
    assert sources == {p for p in KERNELS if p.suffix == ".cu"}


@pytest.mark.parametrize("path", KERNELS, ids=lambda p: p.name)
def test_headers_are_found_and_no_fast_math_is_used(path):
    headers_of(path)
    text = re.sub(r"//.*", "", path.read_text(encoding="utf-8"))
    if path.name == "divide_all.cuh":  # the estimate that every division begins with; what follows rounds as div32 does
        assert text.count("rcp.approx.ftz.f32 ") == 1
        text = text.replace("rcp.approx.ftz.f32 ", "")
    assert not re.search(
        r"\.ftz|\.approx|__f(add|mul|ma|div|sqrt|rcp)_|__expf|__logf|\bexpf?\(|\bsqrtf?\(|\bfma(f)?\(", text
    )


# ---- launches and the error word


def test_launches_are_checked():
    source = Source("router.cu", ("router",))
    made = launch(source, "router", 3, 64, pointer(256), i32(4))
    assert (made.grid, made.block, made.shared_bytes) == ((3, 1, 1), (64, 1, 1), 0)
    for kernel, grid, threads, args in (("other", 1, 32, ()), ("router", 0, 32, ()), ("router", 1, 2048, ()),
                                        ("router", 1, 32, (3,)), ("router", 1, 32, (np.int16(3),))):  # fmt: skip
        with pytest.raises(BadArgument):
            launch(source, kernel, grid, threads, *args)


def test_error_word():
    word = int(where(700, 47)) | 2 << 24 | 511
    found = decode(word)
    assert (found.op, found.layer, found.code, found.detail) == (700, 47, 2, 511)
    assert decode(int(where(0, -1)) | 1 << 24).layer == -1
    assert decode(NO_ERROR) is None
    assert int(where(3, 9)) | 0xFFFFFFFF < int(where(4, -1))
    with pytest.raises(BadArgument):
        where(1 << 16, 0)


def test_the_backend_imports_without_cupy():
    code = (
        "import sys; sys.modules['cupy'] = None\n"
        "import strata.gpu.backend, strata.gpu.compile\n"
        "from strata.gpu.presence import import_cupy\n"
        "try: import_cupy()\n"
        "except Exception as error: print(type(error).__name__, 'cuda12' in str(error))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=FOLDER.parents[1]
    )
    assert done.stdout.strip() == "NoDevice True"
