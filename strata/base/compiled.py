"""C functions written in Python: `step`, `chunk`, `c_function` compile on first use of `.address` and are kept on disk.

    @step
    def add_one(a):                      # void(int64): the address of an argument record
        stf32(ld64(a), ldf32(ld64(a)) + np.float32(1))

    add_one.address                      # compiles, or loads from disk

The functions may call any `@njit(error_model="numpy")` helper; helpers need no cache of their own, since their code is
linked into the function's file. Addresses must never become constants of compiled code (the next process has others):
pass them through argument records.

The files lie in NUMBA_CACHE_DIR, else in STRATA_CACHE/numba, else in `__pycache__` beside the source, else in
~/.cache/strata/numba: the first one that is set and writable (a set one that is not writable is told once). A file is
valid for one CPU, one Numba and one state of the function's source file and of every strata module it imports, directly
or not (Numba alone would look at the function's own file and keep stale code).
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import re
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from functools import cache, cached_property
from pathlib import Path

from numba import config, njit, types
from numba.core.caching import CompileResultCacheImpl, FunctionCache, _CacheLocator, _SourceFileBackedLocatorMixin
from numba.core.ccallback import CFunc

from strata.base.errors import FileError, need
from strata.base.numbers import shown

log = logging.getLogger("strata")

VARIABLE = "STRATA_CACHE"

_PACKAGE = __name__.partition(".")[0]
_IMPORT = re.compile(
    r"^[ \t]*(?:from[ \t]+([\w.]+)[ \t]+import[ \t]+(\([^)]*\)|[^\n]*)|import[ \t]+([\w., \t]+))", re.MULTILINE
)

_FOR_TYPES = re.compile(r"^if TYPE_CHECKING:\n(?:[ \t]+[^\n]*\n|\n)*", re.M)


def _source_of(module: str) -> str | None:
    """Source file of an imported module, without importing anything."""
    found = sys.modules.get(module)
    path = getattr(found, "__file__", None)
    return path if path and path.endswith(".py") else None


@cache
def _read(path: str, mtime_ns: int, n_bytes: int) -> tuple[bytes, tuple[str, ...]]:
    """SHA-256 of a source file, and the names of package modules that its import statements may mean."""
    data = Path(path).read_bytes()
    names = set()
    text = _FOR_TYPES.sub("", data.decode("utf-8", "replace"))  # nothing there reaches compiled code
    for source, listed, plain in _IMPORT.findall(text):
        if source:
            names.add(source)
            names.update(f"{source}.{name}" for name in re.findall(r"\w+", listed))
        names.update(re.findall(r"[\w.]+", plain))
    wanted = tuple(sorted(n for n in names if n == _PACKAGE or n.startswith(_PACKAGE + ".")))
    return hashlib.sha256(data).digest(), wanted


def source_stamp(path: str) -> str:
    """Digest over a source file and all files of this package that it imports, directly or not."""
    seen: dict[str, bytes] = {}
    todo = [path]
    while todo:
        current = todo.pop()
        if current in seen:
            continue
        stat = os.stat(current)
        seen[current], modules = _read(current, stat.st_mtime_ns, stat.st_size)
        todo.extend(file for file in map(_source_of, modules) if file)
    return hashlib.sha256(b"".join(sorted(seen.values()))).hexdigest()


def asked_folders() -> tuple[tuple[str, str], ...]:
    """Variables that name a folder for compiled functions, best first, and what they name ("" for nothing)."""
    return ("NUMBA_CACHE_DIR", config.CACHE_DIR), (VARIABLE, os.environ.get(VARIABLE, ""))


def cache_folders(source: str) -> Iterator[Path]:
    """Where compiled functions of the file `source` may lie, best first."""
    folder = Path(source).resolve().parent
    below = f"{folder.name}_{hashlib.sha1(str(folder).encode()).hexdigest()[:16]}"
    for name, place in asked_folders():
        if place:
            yield Path(place, "numba", below) if name == VARIABLE else Path(place, below)
    yield folder / "__pycache__"
    yield Path.home() / ".cache" / "strata" / "numba" / below


class _Locator(_SourceFileBackedLocatorMixin, _CacheLocator):
    """Tells Numba where a function's files lie and what state of the sources they belong to."""

    def __init__(self, py_func, py_file, folder):
        self._py_file, self._lineno, self._folder = py_file, py_func.__code__.co_firstlineno, str(folder)

    def get_cache_path(self):
        return self._folder

    def get_source_stamp(self):
        return source_stamp(self._py_file)

    @classmethod
    def from_function(cls, py_func, py_file):
        if not os.path.exists(py_file):
            return None
        asked = [(name, place) for name, place in asked_folders() if place]
        for i, folder in enumerate(cache_folders(py_file)):
            locator = cls(py_func, py_file, folder)
            try:
                locator.ensure_cache_path()
            except OSError as error:
                if i < len(asked):
                    _warn_not_used(*asked[i], error.strerror or str(error))
                continue
            return locator
        return None


class _CacheFiles(CompileResultCacheImpl):
    _locator_classes = (_Locator,)


class _Cache(FunctionCache):
    """Numba's disk cache that never stands in the way: what cannot be read is compiled again, what cannot be written
    is left out, with one warning a folder."""

    _impl_class = _CacheFiles

    def load_overload(self, sig, target_context):
        found = self._load(sig, target_context)
        if found is None:
            _note_not_kept()
        return found

    def _load(self, sig, target_context):
        try:
            return super().load_overload(sig, target_context)
        except Exception as error:  # a cut or foreign pickle can raise anything
            log.warning("unreadable kernel cache in %s (%s): compiling again", self.cache_path, type(error).__name__)
            try:
                self.flush()
            except OSError as failure:
                _warn_not_kept(self.cache_path, str(failure))
            return None

    def save_overload(self, sig, data):
        try:
            super().save_overload(sig, data)
        except OSError as error:
            _warn_not_kept(self.cache_path, error.strerror or str(error))


_not_kept = 0


def _note_not_kept() -> None:
    global _not_kept
    _not_kept += 1


def compiled_anew() -> int:
    """How many functions this process had to compile, because no kept form of them was found."""
    return _not_kept


@cache
def _warn_not_used(variable: str, place: str, why: str) -> None:
    advice = f"The usual places are tried instead. Unset {variable}, or name another folder."
    log.warning("%s", FileError(f"{variable} names a place that cannot keep compiled kernels",
                                found=f"{shown(place)}: {why}", needed="a folder that can be written", advice=advice))


@cache
def _warn_not_kept(folder: str, why: str) -> None:
    log.warning("compiled kernels are not kept in %s: %s; set STRATA_CACHE to a folder with room", folder, why)


@cache
def _warn_no_cache(folder: str) -> None:
    warnings.warn(f"no writable cache folder for the functions of {folder}: they are compiled in every process; "
                  "set STRATA_CACHE to a writable folder", stacklevel=2)  # fmt: skip


def _cache_for(function: Callable) -> _Cache | None:
    try:
        return _Cache(function)
    except RuntimeError:  # Numba's way to say that no locator fits: a prompt, or nothing writable
        _warn_no_cache(os.path.dirname(function.__code__.co_filename))
        return None


def is_kept(function: Callable) -> bool | None:
    """Whether a compiled form of a function lies on disk; None where none can."""
    files = _cache_for(function)
    if files is None:
        return None
    try:
        return bool(files._cache_file._load_index())
    except Exception:  # a cut or foreign pickle can raise anything; what reads it next says so
        return False


def cached_njit(function: Callable, nogil: bool = True):
    """`njit(nogil, error_model="numpy")` compiled on first call and kept on disk by the rules of this module."""
    dispatcher = njit(nogil=nogil, error_model="numpy")(function)
    files = _cache_for(function)
    if files is not None:
        dispatcher._cache = files
    return dispatcher


def held_njit(function: Callable):
    """As `cached_njit`, but a call keeps the GIL, see `CFunction.held`: for what takes microseconds."""
    return cached_njit(function, nogil=False)


class CFunction:
    """A void C function of int64 arguments. Calling it from Python runs the compiled code without the GIL."""

    def __init__(self, function: Callable, n_args: int):
        code = function.__code__
        need(code.co_argcount == n_args, f"{function.__qualname__} has the wrong number of arguments",
             found=code.co_argcount, needed=n_args)  # fmt: skip
        self.py_func, self.n_args = function, n_args
        self.__name__, self.__qualname__, self.__doc__ = function.__name__, function.__qualname__, function.__doc__
        self.__module__ = function.__module__
        self.from_cache: bool | None = None
        self.compile_ms = 0.0
        self._compiled: CFunc | None = None
        self._address = 0
        self._call: Callable | None = None
        self._lock = threading.Lock()

    @property
    def address(self) -> int:
        """Address of the compiled function; the first use compiles it or loads it from disk."""
        return self._address or self._compile()

    def _compile(self) -> int:
        with self._lock:
            if not self._address:
                began = time.perf_counter()
                signature = ((types.int64,) * self.n_args, types.void)
                compiled = CFunc(self.py_func, signature, locals={}, options={"error_model": "numpy"})
                files = _cache_for(self.py_func)
                if files is not None:
                    compiled._cache = files
                else:
                    _note_not_kept()
                compiled.compile()
                self.from_cache = compiled.cache_hits > 0
                self.compile_ms = (time.perf_counter() - began) * 1e3
                self._compiled, self._address = compiled, compiled.address
            return self._address

    def __call__(self, *arguments: int) -> None:
        need(len(arguments) == self.n_args, f"{self.__qualname__} takes other arguments",
             found=len(arguments), needed=self.n_args)  # fmt: skip
        if self._call is None:
            self._call = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * self.n_args)(self.address)
        self._call(*arguments)

    @cached_property
    def held(self) -> Callable[..., None]:
        """The same call with the GIL kept, for what takes microseconds: getting the lock back can take milliseconds.
        Arguments are not checked."""
        return ctypes.PYFUNCTYPE(None, *[ctypes.c_int64] * self.n_args)(self.address)

    def __repr__(self) -> str:
        state = "not compiled" if not self._address else "from disk" if self.from_cache else "compiled"
        return f"<{self.__qualname__}: C function of {self.n_args} int64, {state}>"


def c_function(n_args: int) -> Callable[[Callable], CFunction]:
    """Decorator: a Python function of `n_args` int64 becomes a void C function, compiled on first use."""
    return lambda function: CFunction(function, n_args)


def step(function: Callable) -> CFunction:
    """Decorator for one entry of a walk list: void(int64 address of its argument record)."""
    return CFunction(function, 1)


def chunk(function: Callable) -> CFunction:
    """Decorator for a pool job: void(int64 desc, int64 chunk, int64 n_chunks), 0 <= chunk < n_chunks."""
    return CFunction(function, 3)
