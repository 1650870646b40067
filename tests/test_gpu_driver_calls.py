"""Calls of the driver that keep the interpreter's lock, against a driver of the test's own."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest

from strata.base.errors import StrataError
from strata.gpu import driver_calls, early_launch
from strata.gpu.driver_calls import CALLS, NOT_READY, DriverCalls, driver_library


class Driver:
    """Notes calls; `code` is what they return, 0 or an error."""

    def __init__(self):
        self.calls, self.code = [], 0

    def library(self):
        def function(name):
            def call(*arguments):
                if name == "cuCtxGetCurrent":
                    ctypes.c_void_p.from_address(arguments[0]).value = 77
                self.calls.append((name, *arguments))
                return self.code

            return call

        return SimpleNamespace(**{name: function(name) for name in CALLS})


@pytest.fixture
def made():
    driver = Driver()
    calls = DriverCalls(driver.library())
    driver.calls.clear()
    return driver, calls


def test_calls_go_to_the_driver(made):
    driver, calls = made
    launch = calls.graph(7, 9)
    launch()
    calls.use()
    calls.copy(1, 2, 3, 9)
    calls.record(4, 9)
    calls.after(9, 4)
    assert calls.event_passed(4) and calls.stream_done(9)
    assert driver.calls == [("cuGraphLaunch", 7, 9), ("cuCtxSetCurrent", 77), ("cuMemcpyAsync", 1, 2, 3, 9),
                            ("cuEventRecord", 4, 9), ("cuStreamWaitEvent", 9, 4, 0), ("cuEventQuery", 4),
                            ("cuStreamQuery", 9)]  # fmt: skip


def test_what_is_not_ready_is_no_error(made):
    driver, calls = made
    driver.code = NOT_READY
    assert not calls.event_passed(4) and not calls.stream_done(9)
    driver.code = 700
    for call in (calls.graph(7, 9), lambda: calls.copy(1, 2, 3, 9), lambda: calls.event_passed(4),
                 lambda: calls.stream_done(9), calls.use):  # fmt: skip
        with pytest.raises(StrataError, match=r"CUDA error 700 in cu"):
            call()


def test_a_kernel_gets_the_places_of_its_arguments():
    seen = []

    def launch(function, gx, gy, gz, bx, by, bz, shared, stream, places, extra):
        seen.append((function, (gx, gy, gz), (bx, by, bz), shared, stream, extra))
        seen.append(ctypes.c_uint64.from_address(places[0]).value)
        seen.append(ctypes.c_float.from_address(places[1]).value)
        return 0

    library = Driver().library()
    library.cuLaunchKernel = launch
    DriverCalls(library).launch(5, (2, 3, 1), (32, 1, 1), (np.uint64(1 << 40), np.float32(1.5)), 64, 9)
    assert seen == [(5, (2, 3, 1), (32, 1, 1), 64, 9, None), 1 << 40, 1.5]


def test_no_driver_and_one_without_a_call_are_told(monkeypatch):
    monkeypatch.setattr(driver_calls, "LIBRARY", "libnot-here.so")
    with pytest.raises(StrataError, match="cannot be used") as caught:
        DriverCalls()
    assert "libnot-here.so" in caught.value.found and "cuGraphLaunch" in caught.value.needed
    with pytest.raises(early_launch.Refused, match="start early") as refused:
        early_launch.driver.__wrapped__()
    assert "libnot-here.so" in refused.value.found
    monkeypatch.setattr(driver_calls, "LIBRARY", "libc.so.6")
    assert driver_library(ctypes.CDLL, {"getpid": ()}).getpid() > 0
    with pytest.raises(StrataError, match="cannot be used"):
        driver_library(ctypes.CDLL, {"cuLaunchKernelEx": ()})
