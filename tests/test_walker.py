"""Walk lists, decorators and their files on disk."""

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

from strata.base.compiled import CFunction, c_function, cache_folders, cached_njit, chunk, source_stamp, step
from strata.base.errors import BadArgument
from strata.cpu.machine_code import (
    FLUSH_BITS,
    compare_exchange64,
    copy_bytes,
    f32_view,
    f32_view2,
    fetch_add32,
    float_control,
    i64_view,
    ld8,
    ld16,
    ld32,
    ld64,
    ldf32,
    ldf64,
    lds8,
    set_float_control,
    st8,
    st16,
    st32,
    st64,
    stf32,
    stf64,
    zero_bytes,
)
from strata.cpu.walker import WalkList, float_argument

ROOT = Path(__file__).resolve().parent.parent


@step
def append(a):
    """Record: log (int64: count, entries), value."""
    log = ld64(a)
    n = ld64(log)
    st64(log + 8 + 8 * n, ld64(a + 8))
    st64(log, n + 1)


@step
def fail_if(a):
    """Record: error word, address of a flag, code."""
    if ld64(ld64(a + 8)) != 0:
        st64(ld64(a), ld64(a + 16))
        st64(ld64(a) + 16, 7)
        st64(ld64(a) + 24, 8)


@step
def scale(a):
    """Record: x, n, factor (float32 bits)."""
    x = f32_view(ld64(a), ld64(a + 8))
    x *= ldf32(a + 16)


@step
def keep_control(a):
    st64(ld64(a), float_control())


@step
def wait_long(a):
    """Record: address, number of additions."""
    for k in range(ld64(a + 8)):
        st64(ld64(a), ld64(ld64(a)) ^ k)


def entries(log):
    return log[1 : 1 + log[0]].tolist()


def test_steps_run_in_order_with_their_own_records():
    log = np.zeros(64, np.int64)
    walk = WalkList()
    assert [walk.add(append, log, value) for value in (5, -7, 2**62)] == [0, 1, 2]
    assert walk.run() == -1 and entries(log) == [5, -7, 2**62]
    assert walk.run() == -1 and entries(log) == [5, -7, 2**62] * 2
    assert len(walk) == 3 and walk.error == (0, 0, 0, 0)
    assert WalkList().run() == -1


@pytest.mark.parametrize("profiled", [False, True])
def test_stops_at_the_first_error_and_starts_clean(profiled):
    log, flags = np.zeros(64, np.int64), np.zeros(3, np.int64)
    walk = WalkList()
    for k in range(3):
        walk.add(append, log, k)
        walk.add(fail_if, walk.error_address, flags[k:], 40 + k)
    if profiled:
        walk.profile()
    flags[1] = flags[2] = 1
    assert walk.run() == 3
    assert walk.error == (41, 3, 7, 8)  # the first one wins; the walker fills in the index
    assert entries(log) == [0, 1]
    flags[:] = 0
    assert walk.run() == -1 and walk.error == (0, 0, 0, 0)
    assert entries(log) == [0, 1, 0, 1, 2]
    flags[0] = 1
    assert walk.run() == 1 and walk.error[:2] == (40, 1)


def test_error_word_of_the_caller():
    word = np.array([9, 9, 9, 9, -1], np.int64)
    flag = np.ones(1, np.int64)
    walk = WalkList(word.ctypes.data)
    assert walk.error_address == word.ctypes.data
    walk.add(fail_if, word, flag, 3)
    assert walk.run() == 0 and word.tolist() == [3, 0, 7, 8, -1]


def test_timed_walk_gives_the_same_and_times():
    def build():
        x = np.arange(1000, dtype=np.float32)
        spin = np.zeros(1, np.int64)
        walk = WalkList()
        walk.add(scale, x, x.size, float_argument(1.25))
        walk.add(wait_long, spin, 300_000)
        walk.add(scale, x, x.size, float_argument(-3.0))
        return walk, x, spin

    plain, x, spin = build()
    timed, y, spun = build()
    timed.profile()
    assert plain.run() == timed.run() == -1
    assert x.tobytes() == y.tobytes() and spin == spun and x[2] == np.float32(2 * 1.25) * np.float32(-3)
    once = timed.step_ns
    assert (once > 0).all() and once[1] > 10 * once[0]
    timed.run()
    assert (timed.step_ns > once).all()
    timed.profile()
    assert (timed.step_ns == 0).all()
    timed.profile(False)
    with pytest.raises(BadArgument, match="profile"):
        _ = timed.step_ns
    assert timed.names == ["scale", "wait_long", "scale"]


def test_bad_lists():
    walk = WalkList()
    with pytest.raises(BadArgument, match="contiguous"):
        walk.add(append, np.zeros((4, 4))[:, 1], 1)
    with pytest.raises(BadArgument, match="float_argument"):
        walk.add(append, 1.5)
    with pytest.raises(BadArgument, match="int64"):
        walk.add(append, 2**63)
    with pytest.raises(BadArgument, match="no step"):
        walk.add(three)
    assert len(walk) == 0
    walk.add(append, np.zeros(4, np.int64), 1)
    walk.run()
    with pytest.raises(BadArgument, match="cannot grow"):
        walk.add(append, 0, 1)


def test_arguments_live_as_long_as_the_list():
    walk = WalkList()
    logs = [np.zeros(8, np.int64) for _ in range(50)]
    addresses = [log.ctypes.data for log in logs]
    for log in logs:
        walk.add(append, log, 3)
    del logs, log
    junk = [np.full(8, 99, np.int64) for _ in range(50)]
    assert walk.run() == -1
    kept = [arguments[0] for arguments, _ in walk._kept]
    assert [log.ctypes.data for log in kept] == addresses
    assert all(entries(log) == [3] for log in kept) and all((j == 99).all() for j in junk)


@cached_njit
def set_flush(on):
    before = float_control()
    set_float_control(before | FLUSH_BITS if on else before & ~FLUSH_BITS)
    return before


def test_subnormals_count_during_the_walk_only():
    x = np.full(8, 1e-30, np.float32)
    expected = x * np.float32(1e-10)
    assert (expected != 0).all()
    seen = np.zeros(1, np.int64)
    walk = WalkList()
    walk.add(scale, x, 8, float_argument(1e-10))
    walk.add(keep_control, seen)
    walk.freeze()
    before = set_flush(True)
    try:
        walk.run()
    finally:
        after = set_flush(bool(before & FLUSH_BITS))
    assert x.tobytes() == expected.tobytes()
    assert seen[0] & FLUSH_BITS == 0 and after & FLUSH_BITS == FLUSH_BITS


def test_run_costs_less_than_two_microseconds():
    walk = WalkList()
    walk.add(keep_control, np.zeros(1, np.int64))
    walk.run()
    best = np.inf
    for _ in range(20):
        began = time.thread_time_ns()
        for _ in range(500):
            walk.run()
        best = min(best, (time.thread_time_ns() - began) / 500)
    assert best < 2000


@c_function(3)
def three(a, b, out):
    st64(out, a * 1000 + b)


@cached_njit
def twice(x):
    return 2 * x


@chunk
def with_helper(desc, k, n):
    i64_view(desc, n)[k] = twice(k) + n


def test_decorators():
    assert isinstance(three, CFunction) and (three.n_args, append.n_args, with_helper.n_args) == (3, 1, 3)
    out = np.zeros(4, np.int64)
    three(12, 34, out.ctypes.data)
    assert out[0] == 12034
    for k in range(4):
        with_helper(out.ctypes.data, k, 4)
    assert out.tolist() == [4, 6, 8, 10]
    assert three.address == three.address and three.__name__ == "three"
    with pytest.raises(BadArgument):
        three(1, 2)
    with pytest.raises(BadArgument, match="arguments"):
        step(lambda a, b: None)


@step
def touch_all(a):
    """Moves values between widths. Record: source (64 bytes), destination (128 bytes)."""
    s, d = ld64(a), ld64(a + 8)
    zero_bytes(d, 128)
    copy_bytes(d, s, 16)
    st64(d + 16, ld8(s))
    st64(d + 24, lds8(s))
    st64(d + 32, ld16(s))
    st64(d + 40, ld32(s))
    st8(d + 48, 0x1FF)
    st16(d + 50, 0x1FFFE)
    st32(d + 52, -2)
    stf32(d + 56, ldf32(s + 4) * np.float32(2))
    stf64(d + 64, ldf64(s + 8) * 2)
    st64(d + 72, compare_exchange64(d, ld64(d), 77))
    st64(d + 80, compare_exchange64(d, 0, 88))
    st64(d + 88, fetch_add32(d + 52, np.int32(5)))
    f32_view2(d + 96, 2, 2)[1, 0] = np.float32(1.5)


def test_loads_and_stores():
    source = np.zeros(8, np.int64)
    source.view(np.uint8)[:4] = [0xFE, 0xFF, 0xFF, 0xFF]
    source.view(np.float32)[1] = 0.75
    source.view(np.float64)[1] = -2.5
    out = np.full(17, -1, np.int64)
    record = np.array([source.ctypes.data, out.ctypes.data], np.int64)
    touch_all(record.ctypes.data)
    assert out[0] == 77 and out[1] == source[1]
    assert out[2:6].tolist() == [0xFE, -2, 0xFFFE, -2]
    assert out.view(np.uint8)[48:52].tolist() == [0xFF, 0, 0xFE, 0xFF]
    assert out.view(np.int32)[13] == 3 and out.view(np.float32)[14] == 1.5 and out.view(np.float64)[8] == -5.0
    assert (out[9], out[10], out[11]) == (source[0], 77, -2)
    assert out.view(np.float32)[24:28].tolist() == [0, 0, 1.5, 0] and out[16] == -1


def python(script, **environment):
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], cwd=ROOT, capture_output=True, text=True,
                          timeout=60, env={**os.environ, **environment})  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_importing_compiles_nothing(tmp_path):
    python(
        """
        import strata.base.compiled, strata.cpu.machine_code, strata.cpu.pool as pool, strata.cpu.walker as walker
        functions = [walker.walk, walker.walk_timed, pool._worker, pool._run, pool.dispatch]
        assert all(not f.signatures for f in functions)
        """,
        PYTHONPATH=str(ROOT),
        NUMBA_CACHE_DIR=str(tmp_path),
    )
    assert list(tmp_path.rglob("*.nbc")) == []


def test_second_process_loads_from_disk_and_edits_are_seen(tmp_path):
    """A function is compiled anew when a module that it imports through another one was edited, and only then."""
    package = tmp_path / "pk"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "deep.py").write_text("FACTOR = 3\n")
    (package / "helper.py").write_text(
        "from numba import njit\nfrom pk.deep import (\n    FACTOR,\n)\n\n@njit\ndef times(x):\n    return x * FACTOR\n"
    )
    (package / "ops.py").write_text(
        "from pk.helper import times\n"
        "from strata.cpu.machine_code import ld64, st64\nfrom strata.cpu.walker import step\n"
        "@step\ndef op(a):\n    st64(ld64(a), times(7))\n"
        "def make(c):\n    @step\n    def inner(a):\n        st64(ld64(a), c)\n    return inner\n"
        "one, two = make(1), make(2)\n"
    )
    script = """
        import numpy as np
        from strata.base import compiled
        compiled._PACKAGE = "pk"
        from pk.ops import one, op, two
        out = np.zeros(1, np.int64); record = np.array([out.ctypes.data], np.int64)
        for f in (op, one, two):
            f(record.ctypes.data)
            print(out[0], f.from_cache)
    """
    environment = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    assert python(script, **environment) == ["21", "False", "1", "False", "2", "False"]
    assert python(script, **environment) == ["21", "True", "1", "True", "2", "True"]
    (package / "deep.py").write_text("FACTOR = 5\n")
    assert python(script, **environment) == ["35", "False", "1", "False", "2", "False"]


def test_cache_folders(monkeypatch):
    from numba import config

    source = str(ROOT / "strata" / "cpu" / "walker.py")
    monkeypatch.setattr(config, "CACHE_DIR", "")
    monkeypatch.delenv("STRATA_CACHE", raising=False)
    plain = list(cache_folders(source))
    assert plain[0] == ROOT / "strata" / "cpu" / "__pycache__" and len(plain) == 2
    assert plain[1].parts[-4:-1] == (".cache", "strata", "numba")
    monkeypatch.setenv("STRATA_CACHE", "/somewhere")
    assert str(next(cache_folders(source))).startswith("/somewhere/numba/cpu_")
    monkeypatch.setattr(config, "CACHE_DIR", "/elsewhere")
    assert str(next(cache_folders(source))).startswith("/elsewhere/cpu_")


def test_stamp_covers_imports_of_imports():
    stamp = source_stamp(str(ROOT / "strata" / "cpu" / "walker.py"))
    assert stamp != source_stamp(str(ROOT / "strata" / "cpu" / "pool.py"))
    assert stamp == source_stamp(str(ROOT / "strata" / "cpu" / "walker.py"))


def test_without_any_writable_folder_it_still_runs(tmp_path):
    (tmp_path / "file").write_text("")
    blocked = str(tmp_path / "file" / "x")  # a folder below a file cannot be made
    script = f"""
        import warnings
        import numpy as np
        from pathlib import Path
        from strata.base import compiled
        from strata.cpu import walker
        compiled.cache_folders = lambda source: iter([Path({blocked!r})])
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            walk = compiled.cached_njit(walker.walk.py_func)
            walk_timed = compiled.cached_njit(walker.walk_timed.py_func)
            error = np.ones(4, np.int64)
            assert walk(0, 0, error.ctypes.data) == -1 and error.max() == 0
        print(len(seen), "STRATA_CACHE" in str(seen[0].message))
    """
    assert python(script, PYTHONPATH=str(ROOT)) == ["1", "True"]
