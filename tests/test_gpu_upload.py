"""Uploads through staging: the bytes of the numpy layout whatever is cut, wrapped, pinned or late."""

import mmap

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.base.errors import BadArgument, DoesNotFit
from strata.gpu import upload
from strata.gpu.device import take_rest
from strata.gpu.relayout import relayout, relayout_bytes
from strata.gpu.upload import UPLOAD_HOST_BYTES, UPLOAD_STAGING_BYTES, Uploader
from strata.pack.formats import FORMATS, by_name
from tests.gpu.host_device import HostDevice
from tests.gpu.run_on_cpu import ON_DEVICE, needs_compiler

pytestmark = needs_compiler
QUANTISED = [f for f in FORMATS.values() if f.group]
RING = 40 << 10


def new_device(reverse: bool = False):
    if ON_DEVICE:
        from strata.gpu.device import CupyDevice

        return CupyDevice()
    return HostDevice(reverse)


def rows_of(format, rows: int, blocks: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (rows, blocks * format.block_bytes), dtype=np.uint8)


def download(device, address: int, n_bytes: int) -> np.ndarray:
    out = np.empty(n_bytes, np.uint8)
    device.download(address, out)
    return out


class Registered:
    """Arrays in one piece of anonymous memory, pinned."""

    def __init__(self, device, n_bytes: int):
        self.device, self.memory = device, mmap.mmap(-1, n_bytes)
        self.bytes = np.frombuffer(self.memory, np.uint8)
        device.register(self.bytes.ctypes.data, n_bytes)
        self.end = 0

    def keep(self, array: np.ndarray) -> np.ndarray:
        out = self.bytes[self.end : self.end + array.size]
        out[:] = array.reshape(-1)
        self.end += array.size
        return out.reshape(array.shape)

    def close(self) -> None:
        self.device.unregister(self.bytes.ctypes.data)


@pytest.mark.parametrize("format", QUANTISED, ids=lambda f: f.name)
def test_matrices_get_the_device_layout(format):
    """More rows than a piece, ends of rows that are no whole chunk, rows that are no whole row block."""
    device = new_device(reverse=format.ggml_id % 2 == 0)
    up = Uploader(device, ring_bytes=RING, threads=2)
    jobs = []
    for rows, blocks in ((45, 3), (7, 11), (64, 1)):
        raw = rows_of(format, rows, blocks)
        target = device.alloc(relayout_bytes(format, rows, blocks * format.block_values) + 64)
        up.matrix(format, target, raw)
        jobs.append((raw, target))
    up.finish()
    for raw, target in jobs:
        wanted = relayout(format, raw)
        found = download(device, target, wanted.size + 64)
        np.testing.assert_array_equal(found[: wanted.size], wanted)
        assert not found[wanted.size :].any(), "written behind the matrix"
    up.close()
    device.close()


job = st.tuples(st.sampled_from(["Q4_K", "Q2_0", "IQ3_XXS", "raw"]), st.integers(1, 40), st.integers(1, 9),
                st.booleans(), st.booleans())  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(st.lists(job, min_size=1, max_size=14), st.integers(0, 99), st.integers(0, 13))
def test_any_mix_of_uploads(jobs, seed, until):
    device = new_device()
    up = Uploader(device, ring_bytes=24 << 10, threads=1)
    pinned = Registered(device, 1 << 20)
    placed, marks = [], []
    for i, (name, rows, blocks, is_pinned, sends) in enumerate(jobs):
        format = by_name("Q8_0" if name == "raw" else name)
        raw = rows_of(format, rows, blocks, seed + i)
        source = pinned.keep(raw) if is_pinned else raw.copy()
        if name == "raw":
            target, wanted = device.alloc(raw.size), raw.reshape(-1)
            up.raw(target, source)
        else:
            wanted = relayout(format, raw)
            target = device.alloc(wanted.size)
            up.matrix(format, target, source)
        placed.append((target, wanted))
        marks.append(up.mark())
        if sends:
            up.send()
            if not is_pinned:
                source[:] = 0xEE
    up.wait(marks[until % len(marks)])
    for (target, wanted), mark in zip(placed, marks, strict=True):
        if mark > marks[until % len(marks)]:
            break
        assert up.arrived(mark)
        np.testing.assert_array_equal(download(device, target, wanted.size), wanted)
    up.finish()
    for target, wanted in placed:
        np.testing.assert_array_equal(download(device, target, wanted.size), wanted)
    up.close()
    pinned.close()
    device.close()


def test_nothing_arrives_before_its_ticket():
    device = HostDevice()
    up = Uploader(device, ring_bytes=RING)
    format, raw = by_name("Q4_0"), rows_of(by_name("Q4_0"), 8, 4)
    target = device.alloc(relayout_bytes(format, 8, 128))
    device.hold = True
    up.matrix(format, target, raw)
    first = up.mark()
    assert not up.arrived(first) and not download(device, target, raw.size).any()
    device.land(1)
    assert not up.arrived(first)
    up.raw(device.alloc(16), np.ones(16, np.uint8))
    device.land()
    assert up.arrived(first) and not up.arrived(up.mark())
    np.testing.assert_array_equal(download(device, target, raw.size), relayout(format, raw))
    device.land()
    assert up.arrived(up.mark())
    up.close()


def test_pinned_sources_are_not_bounced_and_others_are():
    """A registered source is read when the copy runs, others when they are sent."""
    device = HostDevice()
    up = Uploader(device, ring_bytes=RING)
    pinned = Registered(device, 4096)
    first, second = pinned.keep(np.full(100, 1, np.uint8)), np.full(100, 1, np.uint8)
    targets = device.alloc(100), device.alloc(100)
    for target, source in zip(targets, (first, second), strict=True):
        up.raw(target, source)
    up.send()
    first[:], second[:] = 2, 2
    up.finish()
    assert download(device, targets[0], 100).tolist() == [2] * 100
    assert download(device, targets[1], 100).tolist() == [1] * 100
    up.close()


@pytest.mark.parametrize("point", ["laid out", "filling", "filled", "copied", "recorded"])
def test_an_interrupted_piece_is_sent_again(monkeypatch, point):
    """Ctrl-C while a piece is closed, filled or queued: whoever waits for it later gets all of its bytes."""
    device = new_device()
    up = Uploader(device, ring_bytes=RING, threads=1)
    data = np.random.default_rng(3).integers(1, 256, (2, RING // 8), dtype=np.uint8)
    targets, calls = [device.alloc(RING // 8) for _ in data], []

    def interrupt() -> None:
        calls.append(point)
        if len(calls) == 1:
            raise KeyboardInterrupt

    def before(call):
        return lambda *arguments: (interrupt(), call(*arguments))[1]

    class Filled:
        result = staticmethod(interrupt)

    if point == "filled":
        monkeypatch.setattr(up, "_fill", lambda bounced, fill=up._fill: [*fill(bounced), Filled()])
    else:
        name = {"laid out": "_relayouts", "filling": "_copy", "copied": "copy_in", "recorded": "record"}[point]
        of = up if name[0] == "_" else device
        monkeypatch.setattr(of, name, before(getattr(of, name)))
    up.raw(targets[0], data[0])
    first = up.mark()
    with pytest.raises(KeyboardInterrupt):
        up.send()
    up.raw(targets[1], data[1])
    up.wait(first)
    np.testing.assert_array_equal(download(device, targets[0], data[0].size), data[0])
    up.finish()
    np.testing.assert_array_equal(download(device, targets[1], data[1].size), data[1])
    up.close()


def test_copies_do_not_reach_from_one_registration_into_the_next():
    device = HostDevice()
    up = Uploader(device, ring_bytes=RING)
    memory = np.frombuffer(mmap.mmap(-1, 8192), np.uint8)
    memory[:] = np.arange(8192, dtype=np.uint8)
    for half in (memory[:4096], memory[4096:]):
        device.register(half.ctypes.data, 4096)
    target = device.alloc(200)
    up.raw(target, memory[3996:4096])
    up.raw(target + 100, memory[4096:4196])
    up.finish()
    np.testing.assert_array_equal(download(device, target, 200), memory[3996:4196])
    up.close()


def test_a_mapped_file_is_a_source(tmp_path):
    format = by_name("IQ4_NL")
    raw = rows_of(format, 24, 20)
    path = tmp_path / "matrix"
    path.write_bytes(raw.tobytes())
    device = new_device()
    up = Uploader(device, ring_bytes=RING)
    target = device.alloc(relayout_bytes(format, 24, 640))
    up.matrix(format, target, np.memmap(path, np.uint8, "r", shape=raw.shape))
    up.finish()
    np.testing.assert_array_equal(download(device, target, raw.size), relayout(format, raw))
    up.close()
    device.close()


def test_what_it_takes_is_what_it_says():
    assert UPLOAD_STAGING_BYTES <= 64 << 20
    device = HostDevice()
    Uploader(device).close()
    assert device.taken_bytes == UPLOAD_STAGING_BYTES
    with pytest.raises(DoesNotFit, match="too little"):
        Uploader(HostDevice(limit_bytes=UPLOAD_STAGING_BYTES - 1))
    assert UPLOAD_HOST_BYTES < UPLOAD_STAGING_BYTES


def test_tables_of_all_formats_fit(monkeypatch):
    """Every format with two lengths of rows; one table too many is refused."""
    device = HostDevice()
    up = Uploader(device, ring_bytes=RING)
    for format in QUANTISED:
        for blocks in (8, 5):
            up.matrix(format, device.alloc(1 << 14), rows_of(format, 4, blocks))
    up.close()
    monkeypatch.setattr(upload, "TABLE_BYTES", 1 << 10)
    small = Uploader(device, ring_bytes=RING)
    with pytest.raises(DoesNotFit, match="tables of matrix layouts"):
        small.matrix(by_name("Q4_K"), device.alloc(1 << 14), rows_of(by_name("Q4_K"), 4, 8))
    small.close()


def test_refusals():
    device = HostDevice()
    up = Uploader(device, ring_bytes=RING)
    with pytest.raises(BadArgument, match="four rows"):
        up.matrix(by_name("Q8_0"), device.alloc(1 << 16), rows_of(by_name("Q8_0"), 4, 76))
    with pytest.raises(BadArgument, match="uint8"):
        up.matrix(by_name("Q8_0"), device.alloc(1 << 16), np.zeros((4, 34), np.int8))
    with pytest.raises(BadArgument, match="ring"):
        Uploader(device, ring_bytes=1000)
    up.close()


def test_rests_of_pages_are_given_once():
    rests = [(1000, 512), (5000, 256), (9000, 0)]
    assert take_rest(rests, 256) == 5000 and take_rest(rests, 768) == 0
    assert take_rest(rests, 256) == 1000 and take_rest(rests, 256) == 1256
    assert take_rest(rests, 256) == 0 and rests == [(9000, 0)]
