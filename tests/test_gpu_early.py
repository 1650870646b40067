"""Kernels that start before the one in front has ended: what they do before they wait, which launches they are, and the
call of the driver."""

from __future__ import annotations

import ctypes
import logging
import re
from dataclasses import replace

import numpy as np
import pytest

from strata.base.errors import StrataError
from strata.gpu import early_launch as early
from strata.gpu import mailbox
from strata.gpu.compile import headers_of, nvrtc_version
from strata.gpu.early_launch import CHAINS, FORKS, JOINS, MAIN_CHAIN, OFF, EarlyLaunches, early_kernels, early_places
from strata.gpu.launch import FOLDER, Launch, Source, all_sources
from tests.gpu.ptx_order import lets_next_start, ptx_of, too_early, waits
from tests.gpu.run_on_cpu import ON_DEVICE


def _nvrtc_missing() -> bool:
    try:
        nvrtc_version()
    except StrataError:
        return True
    return False


needs_nvrtc = pytest.mark.skipif(_nvrtc_missing(), reason="no NVRTC")


def _base(kernel: str) -> str:
    return kernel.partition("<")[0]


def _marked(source: Source) -> list[str]:
    return [name for name in source.instances if _base(name) in early_kernels(source)]


EARLY_SOURCES = [s for s in all_sources() if _marked(s)]
SLOW = {"gemv/k.cu", "gemv/grids.cu", "gemv/small4.cu", "gemv/small5.cu", "gemv/q2_0.cu", "gemv/q8_0.cu",
        "gemv/huge_k.cu", "gemv/huge_small.cu"}  # fmt: skip
"""Sources whose formats share their kernels: one format of each stands for all."""


# ---- kernels


@needs_nvrtc
@pytest.mark.parametrize("source", EARLY_SOURCES, ids=lambda s: s.file)
def test_marked_kernels_wait_before_they_touch_what_others_write(source):
    """On every path: no store, no atomic, no load but of constants, and no end before the wait."""
    marked = _marked(source)
    if source.file in SLOW:
        first = marked[0].partition("<")[2].partition(",")[0]
        marked = [name for name in marked if f"<{first}," in name]
    bodies = ptx_of(replace(source, instances=tuple(marked)), 90)
    assert set(bodies) == set(marked)
    for name, body in bodies.items():
        assert waits(body) and lets_next_start(body), f"{name} is marked and does not wait, or lets nobody start"
        assert too_early(body) == [], f"{name} does this before it waits"


@needs_nvrtc
def test_older_devices_have_none_of_it():
    source = next(s for s in EARLY_SOURCES if s.file == "quantise.cu")
    for body in ptx_of(source, 86).values():
        assert not waits(body) and not lets_next_start(body)


def test_the_check_of_ptx_sees_what_is_too_early():
    wait = "griddepcontrol.wait;\n"
    fine = "ld.global.nc.u32 %r1, [%rd1];\n" + wait + "st.global.u32 [%rd2], %r1;\nret;\n"
    assert too_early(fine) == []
    assert too_early("ret;\n" + fine) == ["ret"]
    assert too_early("ld.global.u32 %r1, [%rd1];\n" + fine) == ["ld.global.u32 %r1, [%rd1]"]
    assert too_early("red.global.min.u64 [%rd1], %rd2;\n" + fine) == ["red.global.min.u64 [%rd1], %rd2"]
    branch = (
        "@%p1 bra $L__BB0_2;\n"
        + wait
        + "bra.uni $L__BB0_3;\n$L__BB0_2:\n{}$L__BB0_3:\nst.global.u32 [%rd2], 1;\nret;\n"
    )
    assert too_early(branch.format("")) == ["st.global.u32 [%rd2], 1", "ret"]
    assert too_early(branch.format(wait)) == []


def test_activations_are_not_loaded_through_the_read_only_path():
    """Another kernel writes them while this one may be there already."""
    for path in sorted((FOLDER / "gemv").glob("*.cu*")):
        found = re.findall(
            r"(?:__ldg|load_once)\([^;]*\b(?:x|columns)\.(?:codes|scales|sums)[^;]*;", path.read_text("utf-8")
        )
        assert not found, path.name


def test_every_kernel_of_the_marked_headers_is_in_its_source():
    for source in EARLY_SOURCES:
        assert "early.cuh" in headers_of(source.path), source.file
    names = {_base(i) for s in EARLY_SOURCES for i in _marked(s)}
    window = {"norm_down", "norm_down_cluster", "float_gemv", "float_gemv_short", "float_gemv_long", "float_gemv_tile",
              "float_gemv_held", "ahead",
              "hc_mix", "hc_mix_four", "hc_norm", "hc_add", "mixed",
              "gdn_window", "gdn_split", "quantise", "split", "spread", "huge", "route", "router", "product",
              "short_rows", "gate_up", "half_rows", "half_split", "combine", "qsa_store", "qsa_scores", "qsa_select",
              "qsa_tiles", "qsa_merge", "embed", "outbox",
              "ngram_gate", "ngram_gate_near", "ngram_conv"}  # fmt: skip
    assert window <= names
    assert "inbox" not in names  # first in its graph: nothing may be in front of it when it reads what the host wrote


# ---- which launches

PLAIN = mailbox.inbox(8, 8, 8, 8)[0]
EARLY = mailbox.copy_values(8, 8, 1)[0]


def in_branches(*branches: int) -> list[Launch]:
    return [replace(EARLY, fork=1, branch=b) for b in branches]


def test_kernels_of_the_list_say_whether_they_may():
    assert early.can_start_early(EARLY) and not early.can_start_early(PLAIN)
    odd = Source("odd.cu", ("nothing",))
    with pytest.raises(FileNotFoundError):
        early_kernels(odd)


def test_the_first_launch_and_unmarked_ones_are_plain():
    assert early_places([EARLY, EARLY, PLAIN, EARLY], JOINS) == [False, True, False, True]
    assert early_places([EARLY, EARLY], OFF) == [False, False]
    assert early_places([], JOINS) == []


@pytest.mark.parametrize(
    "level, wanted",
    [
        (OFF, "0000 0000 00"),
        (MAIN_CHAIN, "0100 1000 01"),
        (CHAINS, "0100 1010 01"),
        (FORKS, "0101 1010 01"),
        (JOINS, "0101 1010 11"),
    ],
)
def test_forks_and_joins(level, wanted):
    """Two launches, a fork of two branches (0 0 and 1 1, in two orders), two launches behind the join."""
    front, behind = [PLAIN, EARLY], [EARLY, EARLY]
    # As the list goes: PLAIN EARLY | 1 0 0 1 | EARLY EARLY, where the first of branch 1 never starts early.
    places = early_places([*front, *in_branches(1, 0, 0, 1), *behind], level)
    bits = wanted.replace(" ", "")
    assert places == [c == "1" for c in (bits[0], bits[1], bits[2], bits[3], bits[4], bits[6], bits[8], bits[9])]


def test_a_fork_with_one_branch_is_a_chain():
    assert early_places([PLAIN, *in_branches(0, 0), EARLY], MAIN_CHAIN) == [False, True, True, True]


def test_two_forks_in_a_row_join_first():
    second = [replace(one, fork=2) for one in in_branches(0, 1)]
    launches = [PLAIN, *in_branches(0, 1), *second]
    assert early_places(launches, FORKS) == [False, True, False, False, False]
    assert early_places(launches, JOINS) == [False, True, False, True, False]


def test_launches_aside_never_start_early_and_mix_what_is_behind_them():
    aside = replace(EARLY, fork=1, branch=0, aside=True)
    rest = [*in_branches(0), aside, *in_branches(0), replace(EARLY, gathers=True)]
    assert early_places([PLAIN, *rest], MAIN_CHAIN) == [False, True, False, False, False]
    assert early_places([PLAIN, *rest], FORKS) == [False, True, False, True, False]
    assert early_places([PLAIN, *rest], JOINS) == [False, True, False, True, True]


def test_launches_ahead_are_a_chain_beside_the_main_one():
    """The first of them never starts early; the main launch behind the same one does as behind a fork."""
    ahead, meets = replace(EARLY, ahead=True), replace(EARLY, meets=True)
    launches = [PLAIN, ahead, ahead, EARLY, *in_branches(0, 1), meets, EARLY]
    assert early_places(launches, MAIN_CHAIN) == [False, False, False, False, False, False, False, True]
    assert early_places(launches, CHAINS) == [False, False, True, False, False, False, False, True]
    assert early_places(launches, FORKS) == [False, False, True, True, True, False, False, True]
    assert early_places(launches, JOINS) == [False, False, True, True, True, False, True, True]
    assert early_places([PLAIN, ahead, meets], FORKS) == [False, False, False]


# ---- the driver


def test_structures_are_as_the_driver_has_them():
    """cuda.h: CUlaunchConfig and CUlaunchAttribute on 64-bit systems."""
    config, attribute = early.LaunchConfig, early.LaunchAttribute
    assert ctypes.sizeof(config) == 56 and ctypes.sizeof(attribute) == 72
    places = {name: getattr(config, name).offset for name, _ in config._fields_}
    wanted = {"grid": 0, "block": 12, "shared_bytes": 24, "stream": 32, "attributes": 40, "n_attributes": 48}
    assert places == wanted
    assert (attribute.id.offset, attribute.value.offset) == (0, 8) and early.STREAM_SERIALIZATION == 6


class FakeDriver:
    """Reads what a launch passes, as the driver would."""

    def __init__(self, code: int = 0):
        self.code, self.seen = code, []

    def cuLaunchKernelEx(self, config, function, places, extra):
        c = config._obj
        sizes = (8, 8, 8)
        args = [ctypes.string_at(places[i], n) for i, n in enumerate(sizes)]
        attribute = c.attributes[0]
        self.seen.append((tuple(c.grid), tuple(c.block), c.shared_bytes, c.stream, c.n_attributes, attribute.id,
                          attribute.value, function, args, extra))  # fmt: skip
        return self.code

    def cuGetErrorName(self, code, out):
        out._obj.value = b"CUDA_ERROR_NAME"
        return 0

    def cuGetErrorString(self, code, out):
        out._obj.value = b"what it means"
        return 0


class Function:
    ptr = 77

    def __call__(self, *args):
        pass


class Stream:
    ptr = 99


def test_a_launch_passes_its_arguments_and_the_attribute(monkeypatch):
    fake = FakeDriver()
    monkeypatch.setattr(early, "driver", lambda: fake)
    one = EARLY
    early.EarlyFunction(Function())(one.grid, one.block, one.args, 640, Stream())
    expected = [np.array([a]).tobytes() for a in one.args]
    assert fake.seen == [((1, 1, 1), (256, 1, 1), 640, 99, 1, 6, 1, 77, expected, None)]
    fake.code = 400
    with pytest.raises(early.Refused, match="CUDA_ERROR_NAME: what it means"):
        early.EarlyFunction(Function())(one.grid, one.block, one.args, 0, Stream())


class CaptureFailed(Exception):
    pass


def captured_by(launches: list[Launch], refuse: bool, monkeypatch, **facts):
    """(functions of the captured graph, the EarlyLaunches): a capture that refuses early functions, or takes all."""
    monkeypatch.setattr(early, "driver", FakeDriver)
    starts = EarlyLaunches(**({"arch": 90, "driver_version": 13000} | facts))
    tried = []

    def capture(prepared):
        tried.append([type(f) for f, _ in prepared])
        if refuse and early.EarlyFunction in tried[-1]:
            raise CaptureFailed("operation not permitted")
        return tried[-1]

    prepared = [(Function(), one) for one in launches]
    return [starts.captured(capture, prepared, CaptureFailed) for _ in range(2)], starts


def test_graphs_are_captured_with_early_functions(monkeypatch):
    graphs, starts = captured_by([PLAIN, EARLY, EARLY], False, monkeypatch)
    assert graphs == [[Function, early.EarlyFunction, early.EarlyFunction]] * 2
    assert starts.refusal == "" and starts.count == 2


@pytest.mark.parametrize("facts, level", [({"arch": 89}, logging.INFO), ({"driver_version": 12020}, logging.WARNING),
                                          ({}, logging.WARNING)])  # fmt: skip
def test_what_is_refused_is_plain_and_said_once(monkeypatch, caplog, facts, level):
    with caplog.at_level(logging.INFO, logger="strata"):
        graphs, starts = captured_by([PLAIN, EARLY], True, monkeypatch, **facts)
    assert graphs == [[Function, Function]] * 2 and starts.count == 0
    said = [r for r in caplog.records if "start early" in r.message]
    assert [r.levelno for r in said] == [level]
    assert starts.refusal and starts.refusal in said[0].message


def test_a_refusal_is_an_error_where_asked(monkeypatch):
    monkeypatch.setattr(early, "REFUSAL_IS_ERROR", True)
    with pytest.raises(early.Refused, match="operation not permitted"):
        captured_by([PLAIN, EARLY], True, monkeypatch)
    with pytest.raises(early.Refused, match="sm_80"):
        captured_by([PLAIN, EARLY], True, monkeypatch, arch=80)


def test_nothing_is_said_where_nothing_would_start_early(monkeypatch, caplog):
    monkeypatch.setattr(early, "START_EARLY", OFF)
    with caplog.at_level(logging.INFO, logger="strata"):
        graphs, _ = captured_by([PLAIN, EARLY], True, monkeypatch, arch=80)
    assert graphs == [[Function, Function]] * 2 and not caplog.records


# ---- on a device


@pytest.mark.gpu
@pytest.mark.skipif(not ON_DEVICE, reason="needs a GPU: STRATA_TEST_DEVICE=cuda")
def test_a_chain_of_early_launches_keeps_its_order(monkeypatch):
    """Copies in a ring of places: every one reads what the one in front wrote."""
    from strata.gpu.device import CupyDevice

    device = CupyDevice()
    if early.problem(device.arch, 13000):
        pytest.skip(f"{device.name} starts no kernel early")
    monkeypatch.setattr(early, "REFUSAL_IS_ERROR", True)
    n, steps = 1 << 20, 200
    places = [device.alloc(4 * n) for _ in range(3)]
    values = np.random.default_rng(1).standard_normal(n).astype(np.float32)
    device.upload(places[0], values)
    launches = [mailbox.copy_values(places[i % 3], places[(i + 1) % 3], n)[0] for i in range(steps)]
    graph = device.graph(launches)
    assert device.early.count == steps - 1
    for _ in range(5):
        device.clear(places[1], 4 * n)
        device.clear(places[2], 4 * n)
        device.upload(places[0], values)
        graph()
        out = np.empty(n, np.float32)
        device.download(places[steps % 3], out)
        assert np.array_equal(out, values)
    device.close()
