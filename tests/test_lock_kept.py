"""Beside a busy Python thread a window must not give the interpreter's lock away but to wait for the device.

The device does nothing here, and nobody takes the lock by force: the switch interval is long. So another thread runs
only when a call of the window's own lets it.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest

from strata.base.geometry import WINDOW_ROWS
from strata.gpu.device import CupyDevice
from strata.gpu.head import HEAD_AREA
from strata.runtime.swaps import SwapRules
from tests.gpu.host_device import HostEvent
from tests.gpu.run_on_cpu import ON_DEVICE, needs_compiler
from tests.gpu.shared_model import TYPES, answer, load, nothing_is_left, patch, path, shared
from tests.tiny_models import TinyModel, ngram, small

__all__ = ["nothing_is_left", "patch", "path"]
pytestmark = [needs_compiler, pytest.mark.skipif(ON_DEVICE, reason="stands in for a device")]
HASTY = SwapRules(every=1, least=0.1, margin=0.0, most=2)


@contextmanager
def counting() -> Iterator[list[int]]:
    """Counts how often another thread got the lock."""
    ran, stop, before = [0], threading.Event(), sys.getswitchinterval()

    def run() -> None:
        while not stop.is_set():
            ran[0] += 1
            time.sleep(0)

    thread = threading.Thread(target=run, daemon=True)
    sys.setswitchinterval(20)
    thread.start()
    try:
        yield ran
    finally:
        stop.set()
        sys.setswitchinterval(before)
        thread.join()


def idle(device, backend) -> None:
    """From now on the device does nothing, at once."""
    device.run = device.copy_in = device.after = device.synchronize = lambda *a, **k: None
    device.record = lambda stream=0, timed=False: HostEvent(stream, passed=True)
    device.done, device.wait = lambda event: True, lambda event: None
    for graph in backend._graphs.values():
        graph.launch = lambda: None
    backend._host_out[:8] = 0xFF  # no error


def test_the_count_sees_a_call_without_the_lock():
    with counting() as ran:
        first, until = ran[0], time.monotonic() + 10
        while ran[0] == first and time.monotonic() < until:
            time.sleep(0.001)
        assert ran[0] > first


def test_windows_with_swaps_keep_the_lock(path, patch):
    with load(path, slots=8, experts="pinned", pcie_share=0.5) as model:
        o, backend, tokens = shared(model), model._backend, np.array([3], np.int32)
        answer(model, 2)
        o.tiers.rules, o.tiers.hidden_ms = HASTY, None
        device, rng = patch.opened[-1], np.random.default_rng(2)
        with model.turn():
            state = model._default._state.state
            idle(device, backend)
            before, changed = o.tiers.stats()["copies"], []
            with counting() as ran:
                for _ in range(12):
                    o.tiers.usage.fresh[:] = rng.random(o.tiers.usage.fresh.shape, np.float32) * 9
                    start = ran[0]
                    backend.window(state, tokens, (1, 2))
                    backend.commit(state, 1)
                    changed.append(ran[0] - start)
            assert o.tiers.stats()["copies"] - before >= 12
            assert changed[2:] == [0] * 10, "calls that give the lock away"


def test_tables_of_many_experts_keep_the_lock(tmp_path, patch):
    """numpy's calls give the lock away from 500 values on; a real table has tens of thousands. Copies through the
    ring, as from a file's pages, are as short."""
    geometry = small(L=2, kinds=("gdn", "qsa"), E=512, K=4, ngram=ngram(0))
    path = TinyModel(geometry, types=TYPES).write(tmp_path / "many.gguf")
    for experts in ("pinned", "mapped"):
        with load(path, slots=200, experts=experts, pcie_share=0.0) as model:
            answer(model, 2)
            o, device = shared(model), patch.opened[-1]
            o.tiers.rules, o.tiers.hidden_ms = HASTY, None
            idle(device, model._backend)
            state, tokens = model._default._state.state, np.array([3], np.int32)
            rng, found = np.random.default_rng(3), []
            with model.turn(), counting() as ran:
                before = o.tiers.stats()["copies"]
                for _ in range(12):
                    o.tiers.usage.fresh[:] = rng.random(o.tiers.usage.fresh.shape, np.float32) * 9
                    start = ran[0]
                    model._backend.window(state, tokens, (1, 2))
                    model._backend.commit(state, 1)
                    found.append(ran[0] - start)
                assert o.tiers.stats()["copies"] - before >= 12
            assert found[2:] == [0] * 10, "calls that give the lock away"


def test_an_event_that_has_passed_is_not_waited_for():
    class Event(SimpleNamespace):
        ptr = 7

        def synchronize(self):
            self.waited = True

    for passed in (True, False):
        event = Event(waited=False)
        CupyDevice.wait(SimpleNamespace(_calls=SimpleNamespace(event_passed=lambda ptr, p=passed: p)), event)
        assert event.waited == (not passed)


def test_an_answer_keeps_the_lock(path, patch):
    with load(path, slots=8, experts="pinned", pcie_share=0.5) as model:
        answer(model, 2)
        idle(patch.opened[-1], model._backend)
        status = HEAD_AREA[0] + 4160
        model._backend._host_out[status : status + 4 * WINDOW_ROWS] = 0xFF  # logits are finite
        answer(model, 4)
        windows = shared(model).stats.windows
        with counting() as ran:
            answer(model, 4)
            start = ran[0]
            answer(model, 60)
            found = ran[0] - start
        assert shared(model).stats.windows - windows >= 60
        assert found <= 6, "what a request does once: a seed, the file's size, the session's state"
