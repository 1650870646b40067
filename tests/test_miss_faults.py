"""Life and death of the service of the CPU's experts: faults, closing, exit, forks, idle peace."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from strata.base.doorbell import REPLY, STOP, Mailbox
from strata.base.errors import BadArgument, Closed
from strata.cpu.miss_server import MissServer
from strata.cpu.pool import Pool
from tests.doorbell_device import Device
from tests.miss_serving import LIMIT_S, assert_exact, serving, tiny, tiny_requests, wait_for, window

ROOT = Path(__file__).resolve().parent.parent

# ---- faults


@pytest.mark.parametrize("fault", ["silence", "status", "delay"])
def test_faults_leave_the_service_usable(fault):
    with serving(tiny()) as (server, device):
        device.prepare(tiny_requests())
        for i in range(100):
            with window(server):
                server.inject(fault, {"status": 5 | 7 << 8, "delay": 300}.get(fault, 0), after=i % 3)
                assert_exact(device, i % 3, seed=i)
                told = device.ask(1, limit_s=0.002 if fault == "silence" else LIMIT_S)
                if fault == "silence":
                    assert told.timeouts == 1 and device.reply == device.number - 1
                    wait_for(lambda: server.stats()["requests"] == device.number)
                elif fault == "status":
                    assert told.statuses == 1 and device.status == 5 | 7 << 8
                else:
                    assert told.wrong == told.statuses == 0 and told.mean_us > 300
                assert_exact(device, 2, seed=i)
        assert server.stats()["requests"] == device.number


@pytest.mark.parametrize("times", [40, pytest.param(400, marks=pytest.mark.soak)])
def test_closing_in_the_middle_of_a_window(times):
    before, images = set(threading.enumerate()), None
    for i in range(times):
        device = Device(Mailbox(8, tiny().K, tiny().D))
        images = device.prepare(tiny_requests(8), images)
        with Pool(2) as pool:
            server = MissServer(tiny().weights, device.mailbox, device.address, pool)
            server.begin_window()
            asking = threading.Thread(target=device.ask, args=(1 << 40, 0.05))
            asking.start()
            time.sleep(0.0005 * (i % 4))
            server.close()
            assert server.closed and device.words[STOP // 8] == 1
            server.close()
            with pytest.raises(Closed):
                server.begin_window()
            server.end_window()
            replied = device.reply
        asking.join()
        assert device.reply == replied <= device.number
    assert set(threading.enumerate()) <= before


def test_without_its_pool_the_service_computes_alone():
    device = Device(Mailbox(8, tiny().K, tiny().D))
    device.prepare(tiny_requests())
    pool = Pool(2)
    with MissServer(tiny().weights, device.mailbox, device.address, pool) as server, window(server):
        pool.close()
        assert_exact(device, 50)


def test_stop_word_ends_the_service():
    with serving(tiny()) as (server, device):
        with window(server):
            device.words[STOP // 8] = 1
            server._service[0].join(10)
            assert not server._service[0].is_alive()
        assert server.closed
        with pytest.raises(Closed):
            server.begin_window()


def test_a_service_goes_on_where_the_last_one_ended():
    device = Device(Mailbox(8, tiny().K, tiny().D))
    device.prepare(tiny_requests())
    with Pool(2) as pool:
        for _ in range(3):
            with MissServer(tiny().weights, device.mailbox, device.address, pool) as server, window(server):
                assert_exact(device, 20)
            device.words[STOP // 8] = 0
    assert device.words[REPLY // 8] == 60


def test_a_collected_server_ends_its_thread():
    device = Device(Mailbox(8, tiny().K, tiny().D))
    with Pool(2) as pool:
        server = MissServer(tiny().weights, device.mailbox, device.address, pool)
        thread = server._service[0]
        del server
        gc.collect()
        thread.join(10)
        assert not thread.is_alive()


def test_what_does_not_fit_is_refused():
    model = tiny()
    device = Device(Mailbox(8, 4, 256))
    with Pool(1) as pool:
        for mailbox, address in ((Mailbox(8, 4, 128), 0), (Mailbox(0, 4, 256), 0), (Mailbox(8, 33, 256), 0),
                                 (device.mailbox, 8)):  # fmt: skip
            with pytest.raises(BadArgument):
                MissServer(model.weights, mailbox, device.address + address, pool)
        with MissServer(model.weights, device.mailbox, device.address, pool) as server:
            for fault in (("none",), ("delay", -1), ("delay", 1, -1)):
                with pytest.raises(BadArgument):
                    server.inject(*fault)


# ---- idle peace, other threads, exit


def test_between_windows_it_uses_no_cpu():
    with serving(tiny(), 4) as (server, device):
        device.prepare(tiny_requests())
        with window(server):
            assert_exact(device, 100)
        threads = [*server._service, *threading.enumerate()]
        clocks = [time.pthread_getcpuclockid(t.ident) for t in threads if t.name.startswith("strata-")]
        assert len(clocks) >= 5
        time.sleep(1.0)
        began = sum(map(time.clock_gettime, clocks))
        time.sleep(1.0)
        assert sum(map(time.clock_gettime, clocks)) - began < 0.01


def test_begin_and_end_keep_the_interpreter_s_lock():
    """Beside a thread that never leaves the interpreter each would take a switch interval to get the lock back."""
    done = threading.Event()

    def compute() -> None:
        while not done.is_set():
            sum(range(100))

    with serving(tiny()) as (server, _):
        busy = threading.Thread(target=compute)
        busy.start()
        try:
            began = time.monotonic()
            for _ in range(1000):
                server.begin_window()
                server.end_window()
            took_s = time.monotonic() - began
        finally:
            done.set()
            busy.join()
    assert took_s < 0.4 * 2000 * sys.getswitchinterval()


SCRIPT = """
    import os, sys, time, threading
    sys.path.insert(0, {root!r})
    from strata.base.doorbell import Mailbox
    from strata.base.errors import Closed
    from strata.cpu.miss_server import SLEEPING, MissServer
    from strata.cpu.pool import Pool
    from tests.doorbell_device import Device
    from tests.miss_serving import tiny, tiny_requests, window
    device = Device(Mailbox(8, 4, 256))
    device.prepare(tiny_requests(8))
    pool = Pool(2)
    server = MissServer(tiny().weights, device.mailbox, device.address, pool)
    with window(server):
        assert device.ask(10).replied == 10
"""


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("pass", 0),
        ("raise SystemExit(7)", 7),
        ("server.begin_window(); threading.Thread(target=device.ask, args=(1 << 40, 1), daemon=True).start()", 0),
        ("server.begin_window(); server.inject('delay', 300000); device.ask(1, 0.01)", 0),
        (
            """child = os.fork()
if child == 0:
    assert server.closed
    try:
        server.begin_window()
    except Closed:
        server.end_window()
        server.close()
        os._exit(0)
    os._exit(3)
assert os.waitpid(child, 0)[1] == 0
with window(server):
    assert device.ask(10).replied == 10""",
            0,
        ),
    ],
    ids=["open", "exit", "window", "busy", "fork"],
)
def test_interpreter_exit(body, code):
    script = textwrap.dedent(SCRIPT).format(root=str(ROOT)) + body
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60,
                          env={**os.environ, "PYTHONPATH": str(ROOT)})  # fmt: skip
    assert done.returncode == code, done.stderr
    assert done.stderr == ""
