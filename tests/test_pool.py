"""Worker pool: every chunk exactly once, sleeping and waking, closing in every state, float control, thread counts."""

import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.base.compiled import cached_njit, chunk
from strata.base.errors import BadArgument, Closed
from strata.cpu.cores import CoreFacts, cgroup_limit, core_facts, default_threads, one_cpu_per_core
from strata.cpu.machine_code import (
    FLUSH_BITS,
    clock_ns,
    fetch_add64,
    float_control,
    ld64,
    ld_acquire64,
    ldf32,
    pause,
    set_float_control,
    st64,
    stf32,
)
from strata.cpu.pool import OWNER, SLEEPERS, Pool, dispatch

SLOTS = 64
ROOT = Path(__file__).resolve().parent.parent


@chunk
def mark(desc, k, n):
    """Count a visit of chunk k and leave n beside it."""
    fetch_add64(desc + 16 * k, 1)
    st64(desc + 16 * k + 8, n)


@chunk
def meet(desc, k, n):
    """Return when all n chunks have begun, hence on n different threads. Record: begun, timeouts, limit in ns."""
    fetch_add64(desc, 1)
    end = clock_ns() + ld64(desc + 16)
    while ld_acquire64(desc) < n:
        if clock_ns() > end:
            fetch_add64(desc + 8, 1)
            return
        pause()


@chunk
def last_ns(desc, k, n):
    """Busy for the given time. Record: ns, finished chunks."""
    end = clock_ns() + ld64(desc)
    while clock_ns() < end:
        pause()
    fetch_add64(desc + 8, 1)


@cached_njit
def run_many(pool, function, slots, n_jobs, seed, longest_gap_ns):
    """Jobs of 1..SLOTS chunks over two alternating records; returns how many slots were wrong."""
    wrong = 0
    state = np.uint64(seed)
    for job in range(n_jobs):
        state = state * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)
        random = np.int64(state >> np.uint64(33))
        n = 1 + random % (8 if job & 7 else SLOTS)
        desc = slots + (job & 1) * 16 * SLOTS
        dispatch(pool, n, function, desc)
        for k in range(SLOTS):
            count = ld64(desc + 16 * k)
            if k < n:
                wrong += count != 1 or ld64(desc + 16 * k + 8) != n
            else:
                wrong += count != 0
            st64(desc + 16 * k, 0)
        if longest_gap_ns > 0:
            end = clock_ns() + random % longest_gap_ns
            while clock_ns() < end:
                pass
    return wrong


@cached_njit
def meet_many(pool, function, desc, plain, slots, n, n_jobs, longest_gap_ns, seed):
    """Jobs that all n threads must join, each after a gap and a few jobs that the caller finishes alone."""
    state = np.uint64(seed)
    for _ in range(n_jobs):
        state = state * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)
        random = np.int64(state >> np.uint64(33))
        end = clock_ns() + random % longest_gap_ns
        while clock_ns() < end:
            pass
        for _ in range(random & 3):
            dispatch(pool, n, plain, slots)
        st64(desc, 0)
        dispatch(pool, n, function, desc)
        if ld64(desc + 8) != 0:
            return


@cached_njit
def set_flush(on):
    before = float_control()
    set_float_control(before | FLUSH_BITS if on else before & ~FLUSH_BITS)
    return before


def marks(pool, n_jobs, longest_gap_ns=0, seed=1):
    slots = np.zeros(2 * 2 * SLOTS, np.int64)
    return run_many(pool.address, mark.address, slots.ctypes.data, n_jobs, seed, longest_gap_ns)


@pytest.mark.parametrize("threads", [1, 2, 4, 8])
def test_every_chunk_once(threads):
    with Pool(threads) as pool:
        assert marks(pool, 100_000) == 0
        until = time.monotonic() + 30  # a busy machine may run no worker while all the jobs go by
        while threads > 1 and pool.stats()["worker_chunks"] == 0:
            assert time.monotonic() < until, "no worker took a chunk"
            assert marks(pool, 10_000) == 0


@pytest.mark.parametrize("threads", [2, 4])
def test_every_chunk_once_around_sleep(threads):
    with Pool(threads, spin_us=20) as pool:
        assert marks(pool, 8_000, longest_gap_ns=80_000) == 0
        assert pool.stats()["wakes"] > 0


@pytest.mark.soak
@pytest.mark.parametrize("threads", [2, 4, 8])
def test_every_chunk_once_soak(threads):
    with Pool(threads, spin_us=20) as pool:
        assert marks(pool, 1_000_000) == 0
        assert marks(pool, 500_000, longest_gap_ns=60_000, seed=2) == 0


@pytest.mark.parametrize("threads", [2, 3])
def test_no_wake_up_is_lost(threads):
    """Jobs that need every thread, at gaps around the spin budget: a worker that slept on would be missed."""
    record, slots = np.array([0, 0, 10_000_000_000], np.int64), np.zeros(2 * SLOTS, np.int64)
    n_jobs = 2000 if threads == 2 else 100
    for spin_us, longest_gap_ns in ((50, 150_000), (0, 5_000)):
        with Pool(threads, spin_us=spin_us) as pool:
            meet_many(pool.address, meet.address, record.ctypes.data, mark.address, slots.ctypes.data, threads, n_jobs,
                      longest_gap_ns, 5)  # fmt: skip
            assert record[1] == 0
            assert pool.stats()["wakes"] > 0 and pool.stats()["worker_chunks"] >= (threads - 1) * n_jobs


def test_wake_ahead_of_work():
    with Pool(2, spin_us=10_000_000) as pool:
        pool.spin_us, until = 0, time.monotonic() + 60
        while pool._words[SLEEPERS // 8] == 0:  # until it is about to sleep
            assert time.monotonic() < until, "the worker does not go to sleep"
            time.sleep(0.001)
        time.sleep(0.05)
        pool.spin_us = 10_000_000
        pool.wake()
        time.sleep(0.05)  # polling now
        record = np.array([0, 0, 10_000_000_000], np.int64)
        pool.run(meet, record.ctypes.data, 2)
        assert record[1] == 0 and pool.stats()["wakes"] == 0


def test_idle_workers_use_no_cpu():
    with Pool(4) as pool:
        assert marks(pool, 100) == 0
        clocks = [time.pthread_getcpuclockid(worker.ident) for worker in pool._workers]
        time.sleep(0.3)
        began = sum(map(time.clock_gettime, clocks))
        time.sleep(1.0)
        assert began > 0 and sum(map(time.clock_gettime, clocks)) - began < 0.01


def test_run_from_python_and_stats():
    slots = np.zeros(2 * SLOTS, np.int64)
    with Pool(2) as pool:
        assert pool.threads == 2
        pool.run(mark.address, slots.ctypes.data, 5)
        pool.run(mark.address, slots.ctypes.data, 1)  # one chunk: no sharing
        pool.run(mark.address, slots.ctypes.data, 0)
        assert slots[::2][:6].tolist() == [2, 1, 1, 1, 1, 0]
        stats = pool.stats()
        assert (stats["jobs"], stats["chunks"], stats["serial_jobs"]) == (1, 5, 0)
        with pytest.raises(BadArgument):
            pool.run(mark.address, slots.ctypes.data, -1)


@chunk
def nested(desc, k, n):
    """Record: pool, inner function, inner record of chunk 0, bytes between inner records."""
    dispatch(ld64(desc), 4, ld64(desc + 8), ld64(desc + 16) + k * ld64(desc + 24))


def test_dispatch_inside_a_job_runs_on_its_thread():
    slots = np.zeros((3, 8), np.int64)
    with Pool(2) as pool:
        record = np.array([pool.address, mark.address, slots.ctypes.data, 64], np.int64)
        pool.run(nested, record.ctypes.data, 3)
        assert (slots[:, ::2] == 1).all() and pool.stats()["serial_jobs"] == 3


def test_two_callers_at_once():
    wrong = []
    with Pool(2) as pool:
        callers = [threading.Thread(target=lambda s=s: wrong.append(marks(pool, 20_000, seed=s))) for s in (3, 4)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
    assert wrong == [0, 0]


def test_close_waits_for_the_running_job():
    pool = Pool(2)
    record = np.array([20_000_000, 0], np.int64)
    pool.run(last_ns, record.ctypes.data, 2)
    record[:] = [100_000_000, 0]
    caller = threading.Thread(target=pool.run, args=(last_ns.address, record.ctypes.data, 4))
    caller.start()
    while pool.stats()["jobs"] == 1 and pool._words[OWNER // 8] == 0:  # until the job owns the pool
        time.sleep(0.001)
    pool.close()
    assert record[1] == 4 and pool.closed
    caller.join()


def test_close_is_idempotent_and_final():
    pool = Pool(3)
    workers = list(pool._workers)
    assert all(worker.is_alive() for worker in workers)
    pool.close()
    pool.close()
    assert not any(worker.is_alive() for worker in workers)
    with pytest.raises(Closed):
        pool.run(mark.address, 0, 1)
    with pytest.raises(Closed):
        pool.wake()
    assert marks(pool, 100) == 0  # compiled code that still holds the address: on the caller alone
    assert pool.stats()["serial_jobs"] > 0


def test_collected_pool_stops_its_workers():
    pool = Pool(2)
    worker = pool._workers[0]
    del pool
    worker.join(10)
    assert not worker.is_alive()


def test_python_exception_between_jobs():
    with pytest.raises(ZeroDivisionError), Pool(2) as pool:
        assert marks(pool, 100) == 0
        raise ZeroDivisionError
    assert pool.closed
    with Pool(2) as pool:
        assert marks(pool, 100) == 0
        with pytest.raises(BadArgument):
            pool.run(mark.address, 0, -5)
        assert marks(pool, 100) == 0


@chunk
def subnormal(desc, k, n):
    """Needs n threads. Record: begun, timeouts, limit; then per chunk a product and the float control word."""
    fetch_add64(desc, 1)
    end = clock_ns() + ld64(desc + 16)
    while ld_acquire64(desc) < n:
        if clock_ns() > end:
            fetch_add64(desc + 8, 1)
            return
        pause()
    out = desc + 24 + 16 * k
    stf32(out, ldf32(out) * ldf32(out + 4))
    st64(out + 8, float_control())


def test_subnormals_count_in_every_thread():
    before = set_flush(True)
    try:
        with Pool(2) as pool:  # the new threads inherit flush-to-zero
            record = np.array([0, 0, 20_000_000_000, 0, 0, 0, 0], np.int64)
            factors = record.view(np.float32)
            factors[[6, 10]], factors[[7, 11]] = 1e-30, 1e-10
            pool.run(subnormal, record.ctypes.data, 2)
            kept = set_flush(True)
    finally:
        set_flush(bool(before & FLUSH_BITS))
    assert kept & FLUSH_BITS == FLUSH_BITS  # the caller's own setting is back
    assert record[1] == 0
    expected = np.float32(1e-30) * np.float32(1e-10)
    assert expected != 0
    assert (factors[[6, 10]] == expected).all()
    assert (record[[4, 6]] & FLUSH_BITS == 0).all()


SCRIPT = """
    import sys, threading, time, os
    import numpy as np
    sys.path.insert(0, {tests!r})
    from strata.base.errors import StrataError
    from strata.cpu import pool as module
    from test_pool import OWNER, Pool, last_ns, marks
    def busy(seconds):
        pool = Pool(2)
        pool.record = np.array([int(seconds * 1e9), 0], np.int64)
        thread = threading.Thread(target=pool.run, args=(last_ns.address, pool.record.ctypes.data, 2), daemon=True)
        thread.start()
        while pool._words[OWNER // 8] == 0:
            time.sleep(0.001)
        return pool
"""


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("pool = Pool(3); assert marks(pool, 100) == 0", 0),
        ("pool = Pool(3); assert marks(pool, 100) == 0; raise SystemExit(7)", 7),
        ("pool = Pool(3); assert marks(pool, 100) == 0; raise KeyError('x')", 1),
        ("pool = busy(0.3)", 0),
        ("module.CLOSE_AT_EXIT_S = 0.1; pool = busy(60)", 0),
        (
            "pool = Pool(2); assert marks(pool, 100) == 0; child = os.fork(); assert marks(pool, 1000) == 0\n"
            "if child:\n    assert os.waitpid(child, 0)[1] == 0\n"
            "else:\n    for call in (lambda: pool.run(0, 0, 1), pool.wake):\n        try:\n            call()\n"
            "        except StrataError as error:\n            assert 'worker pool was made in another' in str(error)\n"
            "        else:\n            os._exit(3)\n    pool.close()",
            0,
        ),
    ],
    ids=["open", "exit", "exception", "busy", "endless", "fork"],
)
def test_interpreter_exit(body, code):
    script = textwrap.dedent(SCRIPT).format(tests=str(ROOT / "tests")) + body
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60,
                          env={**os.environ, "PYTHONPATH": str(ROOT)})  # fmt: skip
    assert done.returncode == code, done.stderr
    assert code == 1 or done.stderr == ""


def test_pinned_workers():
    cpus = one_cpu_per_core(core_facts())
    if len(cpus) < 2:
        pytest.skip("one core is allowed: no worker to pin")
    with Pool(2, pin=True) as pool:
        assert os.sched_getaffinity(pool._workers[0].native_id) == {cpus[1]}
        assert marks(pool, 1000) == 0
    with pytest.raises(BadArgument, match="physical core"):
        Pool(len(cpus) + 1, pin=True)


@pytest.mark.parametrize("options", [{"threads": 0}, {"threads": 1.5}, {"threads": 2, "spin_us": -1},
                                     {"reserve_cores": 2}])  # fmt: skip
def test_bad_options(options):
    with pytest.raises(BadArgument):
        Pool(**options)


def cores_of(n_cores, smt=1):
    return {cpu: (0, cpu % n_cores) for cpu in range(n_cores * smt)}


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (CoreFacts(tuple(range(32)), cores_of(16, 2), 16, None), (16, 15)),
        (CoreFacts((0, 1), cores_of(2), 2, None), (2, 1)),
        (CoreFacts((0, 1), cores_of(1, 2), 1, None), (1, 1)),  # two vCPUs that are siblings
        (CoreFacts((0, 1), {}, 1, None), (1, 1)),
        (CoreFacts((0, 1), {}, None, None), (2, 1)),  # nobody knows: every CPU is a core
        (CoreFacts((0, 16), cores_of(16, 2), 16, None), (1, 1)),  # mask of two siblings
        (CoreFacts((70, 71, 130, 200), {c: (1, c) for c in (70, 71, 130, 200)}, 128, None), (4, 3)),
        (CoreFacts((70, 71, 130, 200), {}, 128, None), (4, 3)),
        (CoreFacts(tuple(range(8)), cores_of(8), 8, 3.9), (3, 2)),
        (CoreFacts(tuple(range(8)), cores_of(8), 8, 0.5), (1, 1)),
        (CoreFacts((5,), cores_of(8), 8, None), (1, 1)),
    ],
)
def test_default_threads(facts, expected):
    assert (default_threads(facts, reserve_cores=0), default_threads(facts, reserve_cores=1)) == expected


@given(
    st.sets(st.integers(0, 300), min_size=1, max_size=40),
    st.integers(1, 4),
    st.one_of(st.none(), st.integers(1, 64)),
    st.one_of(st.none(), st.floats(0.1, 64)),
    st.booleans(),
)
@settings(deadline=None, max_examples=100)
def test_default_threads_bounds(cpus, smt, physical, limit, known):
    allowed = tuple(sorted(cpus))
    facts = CoreFacts(allowed, {c: (0, c // smt) for c in allowed} if known else {}, physical, limit)
    all_cores, reserved = default_threads(facts, 0), default_threads(facts, 1)
    assert 1 <= reserved <= all_cores <= len(allowed)
    assert reserved == max(all_cores - 1, 1)
    assert limit is None or all_cores <= max(limit, 1)


def test_cgroup_limits(tmp_path):
    def write(name, text):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")

    assert cgroup_limit(tmp_path, "0::/a/b\n") is None
    write("a/b/cpu.max", "max 100000")
    assert cgroup_limit(tmp_path, "0::/a/b\n") is None
    write("a/cpu.max", "250000 100000")
    assert cgroup_limit(tmp_path, "0::/a/b\n") == 2.5  # the parent's limit holds too
    write("cpu.max", "150000 100000")
    assert cgroup_limit(tmp_path, "0::/not/mounted/here\n") == 1.5  # a container sees its own group as the mount
    old = "4:memory:/x\n3:cpuset:/x\n2:cpu,cpuacct:/x\n"
    write("cpu,cpuacct/x/cpu.cfs_quota_us", "-1")
    write("cpu,cpuacct/x/cpu.cfs_period_us", "100000")
    assert cgroup_limit(tmp_path, old) is None
    write("cpu,cpuacct/x/cpu.cfs_quota_us", "600000")
    assert cgroup_limit(tmp_path, old) == 6.0
    assert cgroup_limit(tmp_path, "") is None


def test_this_machine_has_a_default():
    facts = core_facts()
    assert 1 <= default_threads(facts) <= len(facts.allowed_cpus)
