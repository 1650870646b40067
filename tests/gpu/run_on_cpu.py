"""Launches .cu kernels on numpy memory: on the CPU, where g++ compiles them with shim.h, or on a GPU.

With STRATA_TEST_DEVICE=cuda the same tests run on the device: `address` then mirrors an array there, guards included,
and `run_all` copies everything back. So a test says only which arrays a kernel gets.
"""

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

from strata.gpu.activations import Activations
from strata.gpu.compile import headers_of
from strata.gpu.launch import FOLDER, Launch, Source, made_for, pointer
from tests.canonical.call import Slot

HERE = Path(__file__).resolve().parent
FLAGS = ("-std=c++17", "-ffp-contract=off", "-fno-strict-aliasing", "-fwrapv", "-w", "-fPIC", "-fsanitize=alignment")
ARCH, PROCESSORS, SHARED_BYTES = 90, 1, 228 << 10
"""What the CPU stands for; one processor, so that blocks that stay have several tiles of small matrices."""
HEADERS = ("shim.h", "fibers.h", "races.h")
RACES = ("-fsanitize=thread", "-fno-gnu-unique", "-DSTRATA_RACES", "-g1")
WATCH_RACES = os.environ.get("STRATA_TEST_RACES") == "1"
"""Whether threads that touch the same shared memory with nothing between fail a launch (races.h). Twice as slow."""
# std::fma is a slow library call unless the target has the instruction; both round once.
FMA = {"x86_64": ("-mfma", "-mavx2")}

ON_DEVICE = os.environ.get("STRATA_TEST_DEVICE") == "cuda"
needs_compiler = pytest.mark.skipif(not ON_DEVICE and shutil.which("g++") is None, reason="g++ is not installed")


def _folder() -> Path:
    base = os.environ.get("STRATA_CACHE")
    return (Path(base) if base else Path(tempfile.gettempdir()) / f"strata-shim-{os.getuid()}") / "shim"


def _target_flags() -> tuple[str, ...]:
    info = Path("/proc/cpuinfo")
    has_fma = info.exists() and " fma " in info.read_text(encoding="utf-8")
    return FMA.get(os.uname().machine, ()) if has_fma else ()


def _level(source: Source) -> str:
    """Optimisation: kernels of many formats take longer to compile than to run."""
    return "-O1" if source.file.startswith("gemv/") else "-O2"


def _run_compiler(*arguments: str | Path) -> None:
    done = subprocess.run(["g++", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, f"g++ does not compile {arguments[-1]}:\n{done.stderr[:6000]}"


@cache
def _compiled_header(flags: tuple[str, ...]) -> Path:
    """A folder with shim.h as g++ read it, for these flags: most of a small kernel's compile time."""
    parts = [*((HERE / name).read_text("utf-8") for name in HEADERS), *flags]
    folder = _folder() / hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
    place = folder / "shim.h.gch"
    if not place.exists():
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / f"{os.getpid()}.gch"
        _run_compiler(*flags, "-x", "c++-header", "-o", part, HERE / "shim.h")
        os.replace(part, place)
    return folder


@cache
def library(source: Source, races: bool = WATCH_RACES) -> ctypes.CDLL:
    """All instances of a source as `launch_i` and `sizes_i`, i their index. Kept on disk by content."""
    entries = []
    for i, name in enumerate(source.instances):
        entries.append(
            f'extern "C" bool launch_{i}(void **a, const int *g, const int *b, int s, bool r) '
            f"{{ return shim::launch({name}, a, g, b, s, r); }}\n"
            f'extern "C" int sizes_{i}(int *out) {{ return shim::sizes({name}, out); }}\n'
        )
    text = f'#include "shim.h"\n#include "{source.path}"\n' + "".join(entries)
    text += 'extern "C" const char *message() { return shim::message; }\n'
    text += 'extern "C" void let_peeks_see(int word) { shim::peeked = word; }\n'
    flags = (*FLAGS, *_target_flags(), _level(source), *(RACES if races else ()))
    shim = "".join((HERE / name).read_text("utf-8") for name in HEADERS)
    parts = [text, source.path.read_text("utf-8"), str(headers_of(source.path)), shim]
    key = hashlib.sha256("\0".join([*parts, *flags]).encode()).hexdigest()[:24]
    place = _folder() / f"{key}.so"
    if not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        code, compiled, part = (place.with_suffix(f".{os.getpid()}.{kind}") for kind in ("cpp", "o", "so"))
        code.write_text(text, encoding="utf-8")
        folders = (f"-I{_compiled_header(flags)}", f"-I{HERE}", f"-I{FOLDER}")
        try:
            # Two steps: to link with -fsanitize would bring its own runtime.
            _run_compiler(*flags, "-c", *folders, "-o", compiled, code)
            _run_compiler("-shared", "-o", part, compiled)
        finally:
            code.unlink()
            compiled.unlink(missing_ok=True)
        os.replace(part, place)
    lib = ctypes.CDLL(str(place))
    lib.message.restype = ctypes.c_char_p
    return lib


def _with_line(message: str, library: str) -> str:
    """The message of a race with file and line, where a tool can tell them."""
    told, _, at = message.partition("; code at ")
    if not at or shutil.which("addr2line") is None:
        return message
    done = subprocess.run(["addr2line", "-e", library, at], capture_output=True, text=True, check=True)
    return f"{told}; {done.stdout.strip()}"


def run(launch: Launch, *, reverse: bool = False, races: bool = WATCH_RACES, peeked: int = 0) -> None:
    """Run one launch. reverse: blocks, warps and lanes in the opposite order. peeked: see run_all.

    AssertionError if lanes wait for ever, an argument has the wrong size, dynamic shared memory is exceeded, a copy is
    not aligned, or with `races` if threads race for shared memory.
    """
    launch = made_for(launch, ARCH, PROCESSORS, SHARED_BYTES)
    lib = library(launch.source, races)
    i = launch.source.instances.index(launch.kernel)
    sizes = (ctypes.c_int * 64)()
    n = getattr(lib, f"sizes_{i}")(sizes)
    given = [a.itemsize for a in launch.args]
    assert list(sizes[:n]) == given, f"{launch.kernel} takes arguments of {list(sizes[:n])} bytes, got {given}"
    values = [np.array([a]) for a in launch.args]
    args = (ctypes.c_void_p * n)(*[v.ctypes.data for v in values])
    cluster = launch.cluster  # one block here, with the threads and the shared memory of all
    assert launch.grid[0] % cluster == 0, f"{launch.kernel}: {launch.grid[0]} blocks are no whole clusters"
    grid = (ctypes.c_int * 3)(launch.grid[0] // cluster, *launch.grid[1:])
    block = (ctypes.c_int * 3)(launch.block[0] * cluster, *launch.block[1:])
    function = getattr(lib, f"launch_{i}")
    function.restype = ctypes.c_bool
    lib.let_peeks_see(peeked)
    fine = function(args, grid, block, launch.shared_bytes * cluster, reverse)
    assert fine, f"{launch.kernel}: {_with_line(lib.message().decode(), lib._name)}"


def run_all(launches: list[Launch], *, reverse: bool = False, peeked: int = 0) -> None:
    """Run launches in order, here or on the device; afterwards the arrays hold what the kernels wrote.

    peeked: what kernels see here where they look at a word that may not be written yet (early.cuh).
    """
    if ON_DEVICE:
        mirrors().run(launches)
        return
    for launch in launches:
        run(launch, reverse=reverse, peeked=peeked)


class Mirrors:
    """Copies of arrays on the device, from the first `address` of a test until `run` brings them back."""

    def __init__(self) -> None:
        from strata.gpu.device import CupyDevice

        self.device = CupyDevice()
        self._areas: dict[int, tuple[np.ndarray, int, object]] = {}

    def address(self, array: np.ndarray) -> int:
        """Where an array lies on the device: its whole allocation is mirrored, at the same place modulo 256."""
        root = array
        while isinstance(root.base, np.ndarray):
            root = root.base
        start = root.ctypes.data
        if start not in self._areas:
            memory = self.device._cupy.cuda.Memory(root.nbytes + 512)
            at = int(memory.ptr) + 256 + start % 256
            self._areas[start] = (root, at, memory)
            self.device.upload(at, np.ascontiguousarray(root).reshape(-1).view(np.uint8))
        return self._areas[start][1] + array.ctypes.data - start

    def slot(self, slot: Slot) -> int:
        """A word on the device that holds the address of the slot's array there."""
        word = np.array([self.address(slot.array)], np.uint64)
        slot.device_word = word  # the word must live until the run
        return self.address(word)

    def run(self, launches: list[Launch]) -> None:
        self.device.run(launches)
        self.device.synchronize()
        for root, at, _ in self._areas.values():
            back = np.empty(root.nbytes, np.uint8)
            self.device.download(at, back)
            if root.flags.writeable and root.nbytes:
                root.reshape(-1).view(np.uint8)[:] = back
        self._areas.clear()


@cache
def mirrors() -> Mirrors:
    return Mirrors()


def needs_clusters() -> None:
    """Skips a test on a device that has no clusters of blocks."""
    if ON_DEVICE and not mirrors().device.clusters:
        pytest.skip("the device has no clusters of blocks")


def address(array: np.ndarray | Slot | None) -> int:
    """Address of an array, or of a slot's word, for a launcher; 0 for None. The caller keeps the array alive."""
    if array is None:
        return 0
    if isinstance(array, Slot):
        return mirrors().slot(array) if ON_DEVICE else array.word.ctypes.data
    assert array.flags.c_contiguous
    return mirrors().address(array) if ON_DEVICE else array.ctypes.data


class ErrorWord:
    """The error word of a launch, as the backend reads it."""

    def __init__(self) -> None:
        self.word = np.array([2**64 - 1], np.uint64)

    @property
    def address(self) -> int:
        return address(self.word)

    @property
    def reported(self) -> tuple[int, int, int] | None:
        """(code, layer, detail), or None."""
        from strata.gpu.error_word import decode

        found = decode(int(self.word[0]))
        return None if found is None else (found.code, found.layer, found.detail)


class ActivationArea:
    """Room for activations of T rows of K values: `places` for launchers, and what kernels wrote there."""

    def __init__(self, T: int, K: int, group: int):
        self.T, self.K, self.group = T, K, group
        n_bytes = Activations.n_bytes(T, K, group)
        raw = np.full(n_bytes + 768, 0x5A, np.uint8)
        start = 256 + -(raw.ctypes.data + 256) % 256
        self._area = raw[start : start + n_bytes]

    @property
    def places(self) -> Activations:
        return Activations.at(address(self._area), self.T, self.K, self.group)

    def _part(self, which: str, n: int, dtype: str) -> np.ndarray:
        zero = Activations.at(0, self.T, self.K, self.group)
        at = getattr(zero, which)
        return self._area[at : at + n * np.dtype(dtype).itemsize].view(dtype).reshape(self.T, -1)

    @property
    def codes(self) -> np.ndarray:
        return self._part("codes", self.T * self.K, "int8")

    @property
    def scales(self) -> np.ndarray:
        return self._part("scales", self.T * self.K // self.group, "float32")

    @property
    def sums(self) -> np.ndarray:
        return self._part("sums", self.T * self.K // 16, "int32")


__all__ = ["ActivationArea", "ErrorWord", "address", "library", "needs_compiler", "pointer", "run", "run_all"]
