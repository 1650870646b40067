"""Launches .cu kernels on the CPU: g++ compiles them with shim.h, ctypes runs them on numpy memory."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from strata.gpu.compile import headers_of
from strata.gpu.launch import FOLDER, Launch, Source, pointer

HERE = Path(__file__).resolve().parent
FLAGS = ("-std=c++17", "-O2", "-ffp-contract=off", "-fno-strict-aliasing", "-fwrapv", "-w", "-shared", "-fPIC")
# std::fma is a slow library call unless the target has the instruction; both round once.
FMA = {"x86_64": ("-mfma", "-mavx2")}

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")


def _folder() -> Path:
    base = os.environ.get("STRATA_CACHE")
    return (Path(base) if base else Path(tempfile.gettempdir()) / f"strata-shim-{os.getuid()}") / "shim"


def _target_flags() -> tuple[str, ...]:
    info = Path("/proc/cpuinfo")
    has_fma = info.exists() and " fma " in info.read_text(encoding="utf-8")
    return FMA.get(os.uname().machine, ()) if has_fma else ()


@cache
def library(source: Source) -> ctypes.CDLL:
    """All instances of a source as `launch_i` and `sizes_i`, i their index. Kept on disk by content."""
    entries = []
    for i, name in enumerate(source.instances):
        entries.append(
            f'extern "C" bool launch_{i}(void **a, const int *g, const int *b, int s, bool r) '
            f"{{ return shim::launch({name}, a, g, b, s, r); }}\n"
            f'extern "C" int sizes_{i}(int *out) {{ return shim::sizes({name}, out); }}\n'
        )
    text = f'#include "{HERE / "shim.h"}"\n#include "{source.path}"\n' + "".join(entries)
    text += 'extern "C" const char *message() { return shim::message; }\n'
    flags = FLAGS + _target_flags()
    parts = [text, source.path.read_text("utf-8"), str(headers_of(source.path)), (HERE / "shim.h").read_text("utf-8")]
    key = hashlib.sha256("\0".join([*parts, *flags]).encode()).hexdigest()[:24]
    place = _folder() / f"{key}.so"
    if not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        code, part = place.with_suffix(f".{os.getpid()}.cpp"), place.with_suffix(f".{os.getpid()}.so")
        code.write_text(text, encoding="utf-8")
        done = subprocess.run(["g++", *flags, f"-I{FOLDER}", "-o", part, code], capture_output=True, text=True)
        code.unlink()
        assert done.returncode == 0, f"{source.file} does not compile with g++:\n{done.stderr[:6000]}"
        os.replace(part, place)
    lib = ctypes.CDLL(str(place))
    lib.message.restype = ctypes.c_char_p
    return lib


def run(launch: Launch, *, reverse: bool = False) -> None:
    """Run one launch. reverse: blocks, warps and lanes in the opposite order. AssertionError if lanes wait for ever, an
    argument has the wrong size, or dynamic shared memory is exceeded."""
    lib = library(launch.source)
    i = launch.source.instances.index(launch.kernel)
    sizes = (ctypes.c_int * 64)()
    n = getattr(lib, f"sizes_{i}")(sizes)
    given = [a.itemsize for a in launch.args]
    assert list(sizes[:n]) == given, f"{launch.kernel} takes arguments of {list(sizes[:n])} bytes, got {given}"
    values = [np.array([a]) for a in launch.args]
    args = (ctypes.c_void_p * n)(*[v.ctypes.data for v in values])
    grid, block = (ctypes.c_int * 3)(*launch.grid), (ctypes.c_int * 3)(*launch.block)
    function = getattr(lib, f"launch_{i}")
    function.restype = ctypes.c_bool
    fine = function(args, grid, block, launch.shared_bytes, reverse)
    assert fine, f"{launch.kernel}: {lib.message().decode()}"


def run_all(launches: list[Launch], *, reverse: bool = False) -> None:
    for launch in launches:
        run(launch, reverse=reverse)


def address(array: np.ndarray | None) -> int:
    """Address of an array for a launcher; 0 for None. The caller keeps the array alive."""
    if array is None:
        return 0
    assert array.flags.c_contiguous
    return array.ctypes.data


def slot(array: np.ndarray) -> np.ndarray:
    """(1,) uint64 holding the address of a state buffer: what a kernel's slot argument points at."""
    word = np.array([array.ctypes.data], np.uint64)
    word.setflags(write=False)
    return word


class ErrorWord:
    """The error word of a launch, as the backend reads it."""

    def __init__(self) -> None:
        self.word = np.array([2**64 - 1], np.uint64)

    @property
    def address(self) -> int:
        return self.word.ctypes.data

    @property
    def reported(self) -> tuple[int, int, int] | None:
        """(code, layer, detail), or None."""
        from strata.gpu.error_word import decode

        found = decode(int(self.word[0]))
        return None if found is None else (found.code, found.layer, found.detail)


__all__ = ["ErrorWord", "address", "library", "needs_compiler", "pointer", "run", "run_all", "slot"]
