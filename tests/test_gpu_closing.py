"""Closing gives everything back at once: whoever keeps the closed model, and without the garbage collector."""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import strata
from strata import loading
from strata.base.errors import Closed, DoesNotFit, NoDevice, StrataError
from strata.gpu import device as device_module
from strata.gpu import doorbell
from strata.gpu.device import CupyDevice
from strata.gpu.driver_calls import CALLS, DriverCalls
from strata.runtime.share_probe import ShareProbe
from tests.gpu.run_on_cpu import needs_compiler
from tests.gpu.shared_model import answer, load, names, nothing_is_left, patch, path

__all__ = ["nothing_is_left", "patch", "path"]


@pytest.fixture
def collector_off():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


# ---- loads


@pytest.fixture
def given(patch, monkeypatch):
    """(bytes, weak reference) of all host memory that devices give. Views of an array refer to its owner."""
    found: list[tuple[int, weakref.ref]] = []
    before = loading.open_device

    def open_device(index, limit_bytes):
        device = before(index, limit_bytes)
        host = device.host

        def noted(n_bytes):
            owner = array = host(n_bytes)
            while isinstance(owner.base, np.ndarray):
                owner = owner.base
            found.append((n_bytes, weakref.ref(owner)))
            return array

        device.host = noted
        return device

    monkeypatch.setattr(loading, "open_device", open_device)
    return found


def alive(given):
    return [n_bytes for n_bytes, owner in given if owner() is not None]


FORMS = [{}, {"slots": 4}, {"slots": 4, "pcie_share": 0.5}, {"slots": 3, "experts": "resident", "pcie_share": 0.5}]


@needs_compiler
@pytest.mark.parametrize("options", FORMS)
def test_a_closed_model_holds_no_memory_of_its_device(path, given, collector_off, options):
    model = load(path, **options)
    answer(model, 2)
    gc.collect()  # compiling leaves errors, which hold frames
    assert len(alive(given)) == len(given) >= 4 and sum(alive(given)) > 1 << 25, "an uploader's ring is among it"
    model.close()
    assert alive(given) == []
    model.close()


@needs_compiler
@pytest.mark.parametrize("options", FORMS[::2])
@pytest.mark.parametrize("call", ["synchronize", "current"])
def test_a_model_of_a_failed_device_ends_its_threads_and_closes_its_file(path, given, monkeypatch, call, options):
    before = names()  # of models that other files hold
    model = load(path, **options)

    def fail():
        raise StrataError("the device does not do what it was asked")

    monkeypatch.setattr(model._backend.device, call, fail)
    with pytest.raises(StrataError, match="does not do what it was asked"):
        answer(model)
    with pytest.raises(StrataError, match="does not do what it was asked"):
        model.close()
    assert model.closed and names() <= before
    with pytest.raises(Closed):
        model._gguf.check_sizes()
    model.close()


@needs_compiler
def test_the_first_error_is_told_where_closing_fails_as_well(path, given, monkeypatch):
    before = names()
    model = load(path)

    def fail():
        raise StrataError("closing failed")

    monkeypatch.setattr(model._backend.device, "synchronize", fail)
    with pytest.raises(ZeroDivisionError), model:
        raise ZeroDivisionError
    assert model.closed and names() <= before


@needs_compiler
@pytest.mark.parametrize("options", FORMS)
def test_a_closed_model_is_in_no_cycle(path, patch, collector_off, options):
    """So the file's mapping goes with the last reference."""
    model = load(path, **options)
    answer(model, 1)
    gc.collect()
    parts = {name: weakref.ref(part) for name, part in (("backend", model._backend), ("file", model._gguf))}
    model.close()
    del model
    assert [name for name, part in parts.items() if part() is not None] == []


@needs_compiler
def test_what_timed_the_share_is_in_no_cycle(path, patch, collector_off, monkeypatch):
    """It refers to the whole backend."""
    probes, before = [], ShareProbe.measure

    def noted(probe):
        probes.append(weakref.ref(probe))
        return before(probe)

    monkeypatch.setattr(ShareProbe, "measure", noted)
    with load(path, slots=4):
        assert [probe() for probe in probes] == [None]


@needs_compiler
def test_nor_does_one_with_chunks_and_drafts(tiny_path, given, collector_off):
    with strata.load(tiny_path, context=512, device="cuda", draft="auto", ngram="direct", slots=60) as model:
        assert model.plan.prefill_rows and model.draft_layer is not None
        gc.collect()
        assert len(alive(given)) == len(given) >= 10
        file = weakref.ref(model._gguf)
    assert alive(given) == []
    del model
    assert file() is None


@needs_compiler
def test_a_refused_load_leaves_nothing(path, given, collector_off, monkeypatch):
    def refuse(*_):
        raise DoesNotFit("no table")

    monkeypatch.setattr("strata.gpu.backend.Head", refuse)
    for options in ({}, {"slots": 4}):
        with pytest.raises(DoesNotFit, match="no table"):
            load(path, **options)
        assert len(given) >= 4
    gc.collect()  # the error holds the frames of the load
    assert alive(given) == []


# ---- the device against a CuPy of the test's own


class FakeCuda:
    """What CupyDevice uses of CuPy. `live` counts what was made and has not been destroyed, by kind."""

    def __init__(self):
        self.live = live = Counter()
        self.queued: list[str] = []

        class Counted:
            ptr = 1 << 20

            def __init__(self, *_, **__):
                live[type(self).__name__] += 1

            def __del__(self):
                live[type(self).__name__] -= 1

        class Stream(Counted):
            def __enter__(self):
                return self

            def __exit__(self, *_):
                pass

            def synchronize(self):
                pass

            def wait_event(self, event):
                pass

            def begin_capture(self):
                live["captures"] += 1

            def end_capture(self):
                live["captures"] -= 1
                return Graph()

        class Event(Counted):
            def record(self, stream):
                pass

        class Graph(Counted):
            graphExec = 7

            def upload(self, stream):
                pass

        class Memory(Counted):
            pass

        class PinnedMemory(Counted):
            def __init__(self, n_bytes, flags):
                super().__init__()
                assert flags == 1

        class Module(Counted):
            def load(self, cubin):
                pass

            def get_function(self, name):
                return Function(self)

        class Function(Counted):
            def __init__(self, module):
                super().__init__()
                self.module = module

            def __call__(self, *_):
                pass

        def pointer(memory, offset):
            shown = type("Shown", (ctypes.c_uint8 * 64,), {})()
            shown.memory = memory
            return shown

        def register(address, n_bytes, flags):
            live["registered"] += 1

        def unregister(address):
            live["registered"] -= 1

        runtime = SimpleNamespace(
            CUDARuntimeError=RuntimeError, hostAllocPortable=1,
            getDeviceProperties=lambda index: {"name": b"fake", "multiProcessorCount": 4,
                                               "sharedMemPerMultiprocessor": 164 << 10},
            driverGetVersion=lambda: 12040, deviceGetAttribute=lambda *_: 1, memGetInfo=lambda: (1 << 30, 1 << 30),
            memsetAsync=lambda *_: None, hostRegister=register, hostUnregister=unregister,
            cudaDevAttrHostRegisterSupported=1, cudaDevAttrCanUseHostPointerForRegisteredMem=2,
            cudaDevAttrHostRegisterReadOnlySupported=3,
        )  # fmt: skip
        device = SimpleNamespace(id=0, compute_capability="80", use=lambda: None)
        self.cuda = SimpleNamespace(
            runtime=runtime, Device=lambda index: device, Stream=Stream, Event=Event, Memory=Memory,
            PinnedMemory=PinnedMemory, PinnedMemoryPointer=pointer, function=SimpleNamespace(Module=Module),
        )  # fmt: skip


@pytest.fixture
def cuda(monkeypatch):
    fake = FakeCuda()
    library = SimpleNamespace(**{name: lambda *_: 0 for name in CALLS})
    monkeypatch.setattr(device_module, "import_cupy", lambda: fake)
    monkeypatch.setattr(device_module, "DriverCalls", lambda: DriverCalls(library))
    binary = SimpleNamespace(cubin=b"", lowered={name: name for name in doorbell.SOURCE.instances})
    monkeypatch.setattr(device_module, "compile_source", lambda source, arch: binary)
    return fake


def test_a_device_without_memory_for_its_context_cannot_be_used(cuda):
    def fail(**_):
        raise RuntimeError("cudaErrorMemoryAllocation: out of memory")

    cuda.cuda.Stream = fail
    with pytest.raises(NoDevice, match="CUDA device 0 cannot be used; found cudaErrorMemoryAllocation"):
        CupyDevice()


def test_what_cupy_says_of_a_failed_device_is_an_error_of_strata(cuda):
    device = CupyDevice()
    address = device.alloc(256)

    def fail(*_):
        raise RuntimeError("cudaErrorIllegalAddress: an illegal memory access was encountered")

    cuda.cuda.runtime.memcpyAsync = cuda.cuda.runtime.memsetAsync = cuda.cuda.PinnedMemory = fail
    device.stream.synchronize = fail
    data = np.zeros(256, np.uint8)
    for call in (lambda: device.upload(address, data), lambda: device.download(address, data),
                 lambda: device.clear(address, 256), lambda: device.alloc(256)):  # fmt: skip
        with pytest.raises(StrataError, match="the device does not do what it was asked") as caught:
            call()
        assert "IllegalAddress" in caught.value.found and "Load the model again" in caught.value.advice
    with pytest.raises(DoesNotFit, match=r"does not pin this memory .* needed 4,096 bytes"):
        device.host(4096)
    with pytest.raises(StrataError, match="does not do what it was asked"):
        device.close()
    assert not cuda.live["Memory"], "what it held goes all the same"


def test_a_device_that_failed_cannot_be_made_current(cuda):
    class Failing:
        broken: tuple[str, ...] = ()

        def __enter__(self):
            if "enter" in self.broken:
                raise RuntimeError("cudaErrorIllegalAddress: at the beginning")

        def __exit__(self, *_):
            if "exit" in self.broken:
                raise RuntimeError("cudaErrorIllegalAddress: at the end")

    device = CupyDevice()
    device._device, device._calls = Failing(), SimpleNamespace(use=lambda: None)
    with device.current():
        pass
    for broken, found in (("enter", "at the beginning"), ("exit", "at the end")):
        Failing.broken = (broken,)
        with pytest.raises(StrataError, match=f"does not do what it was asked; found .*{found}"), device.current():
            pass
    with pytest.raises(ZeroDivisionError), device.current():
        raise ZeroDivisionError  # what went wrong first is told


def test_what_a_device_makes_is_destroyed(cuda, collector_off):
    device = CupyDevice()
    (one,) = doorbell.stamp(64)
    side = [replace(one, fork=1), replace(one, fork=1, branch=1), replace(one, fork=1, branch=1, aside=True),
            replace(one, gathers=True)]  # fmt: skip
    shown = device.host(64)
    part = shown[16:32].view(np.int64)
    for n_bytes in (1, 3 << 20):
        device.alloc(n_bytes)
    device.register(4096, 4096)
    device.register(8192, 4096)
    device.unregister(8192)
    launches = [device.graph([one] * 3), device.graph([one, *side]), device.graph(side)]
    for launch in launches:
        launch()
    device.run([one])
    events = [device.record(), device.record(1, timed=True)]
    assert all(device.done(event) for event in events)
    del events
    # Streams: its own, two for copies, a side branch, what is aside there. Events: four of a fork with one aside, and
    # there are two.
    assert +cuda.live == Counter(Stream=5, Event=8, Graph=3, Memory=2, PinnedMemory=1, Module=1, registered=1,
                                 Function=len(doorbell.SOURCE.instances))  # fmt: skip
    device.close()
    del shown
    assert +cuda.live == Counter(Stream=3, PinnedMemory=1), "its own streams, and what an array still shows"
    assert part.size == 2
    del part
    assert +cuda.live == Counter(Stream=3)
    device.close()
    del device
    assert +cuda.live == Counter(), launches


def test_a_capture_that_fails_leaves_nothing(cuda, collector_off, monkeypatch):
    device = CupyDevice()
    (one,) = doorbell.stamp(64)
    monkeypatch.setattr(device._capture, "queue", lambda prepared: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        device.graph([one])
    device.close()
    assert +cuda.live == Counter(Stream=3)


def test_pinned_memory_does_not_come_from_a_pool(cuda, collector_off):
    """A pool keeps the most that was ever taken at one time, until the process ends."""
    for _ in range(3):
        device = CupyDevice()
        kept = [device.host(64) for _ in range(4)]
        assert cuda.live["PinnedMemory"] == 4
        device.close()
        del kept
        assert cuda.live["PinnedMemory"] == 0
