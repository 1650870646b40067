"""Expert profiles and routing traces: round trips, files of other models, damage."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.base.errors import BadArgument, Closed, FileError
from strata.pack import profile as profile_module
from strata.pack import trace as tr
from strata.pack.profile import ExpertProfile, read_profile, write_profile
from strata.pack.trace import Commit, Routing, Tag, TraceWriter, read_trace

# -- profile ----------------------------------------------------------------------------------------------------------


def pairs(flat, experts: int) -> np.ndarray:
    return np.array([divmod(f, experts) for f in flat], np.uint16).reshape(-1, 2)


@given(st.integers(1, 6), st.integers(1, 9), st.data())
def test_profile_round_trip(tmp_path, layers, experts, data):
    flat = data.draw(st.lists(st.integers(0, layers * experts - 1), unique=True))
    slots = len(flat) + data.draw(st.integers(0, 100))
    path = tmp_path / "p.bin"
    write_profile(path, ExpertProfile(layers, experts, slots, pairs(flat, experts)))
    got = read_profile(path, layers, experts)
    assert (got.n_layers, got.n_experts, got.slots) == (layers, experts, slots)
    assert got.ranked.dtype == np.uint16 and got.ranked.tolist() == pairs(flat, experts).tolist()
    table = got.slot_table()
    assert [table[f // experts, f % experts] for f in flat] == list(range(len(flat)))
    assert (table >= 0).sum() == len(flat)


def test_profile_bytes(tmp_path):
    """The layout by hand, with a tail of another writer, which readers ignore."""
    path = tmp_path / "p.bin"
    head = b"STRP" + struct.pack("<5I", 1, 2, 3, 4, 2) + struct.pack("<4H", 1, 2, 0, 1)
    path.write_bytes(head + np.full(6, 0.25, "<f4").tobytes())
    got = read_profile(path, 2, 3)
    assert got.ranked.tolist() == [[1, 2], [0, 1]] and got.slots == 4
    write_profile(path, got)
    assert path.read_bytes() == head + struct.pack("<6i", -1, 1, -1, -1, -1, 0)
    assert [p.name for p in tmp_path.iterdir()] == ["p.bin"]


def test_profile_refusals(tmp_path):
    path = tmp_path / "p.bin"
    write_profile(path, ExpertProfile(2, 3, 4, pairs([5, 1], 3)))
    good = path.read_bytes()
    for layers, experts in ((2, 4), (3, 3), (3, 2)):
        with pytest.raises(FileError, match=f"found 2 layers x 3 experts; needed {layers} layers x {experts} experts"):
            read_profile(path, layers, experts)
    for size in range(len(good)):
        path.write_bytes(good[:size])
        with pytest.raises(FileError, match=r"truncated|not an expert profile"):
            read_profile(path, 2, 3)
    for data, word in (
        (good + b"x", f"found {len(good) + 1} bytes; needed {len(good)} bytes"),
        (b"GGUF" + good[4:], "not an expert profile"),
        (good[:4] + struct.pack("<I", 2) + good[8:], "version.*found 2; needed 1"),
        (good[:16] + struct.pack("<I", 1) + good[20:], "slots"),
        (good[:20] + struct.pack("<I", 7) + good[24:], "too many pairs.*found 7; needed at most 6"),
        (good[:24] + struct.pack("<HH", 2, 0) + good[28:], r"ranked pair 0.*\(2, 0\)"),
        (good[:24] + struct.pack("<HH", 1, 3) + good[28:], r"ranked pair 0.*\(1, 3\)"),
        (good[:24] + good[28:32] + good[28:], r"twice.*\(0, 1\)"),
    ):
        path.write_bytes(data)
        with pytest.raises(FileError, match=word):
            read_profile(path, 2, 3)
    with pytest.raises(FileError, match="cannot read"):
        read_profile(tmp_path / "absent", 2, 3)
    for args in ((0, 3, 4, pairs([], 3)), (2, 3, 1, pairs([1, 2], 3)), (2, 3, 4, np.zeros((1, 2), int)),
                 (2, 3, 4, pairs([1, 1], 3)), (2, 3, 4, pairs([6], 3)), (2, 3, 2**32, pairs([1], 3))):  # fmt: skip
        with pytest.raises(BadArgument):
            ExpertProfile(*args)


def test_profile_write_is_atomic(tmp_path, monkeypatch):
    path = tmp_path / "p.bin"
    write_profile(path, ExpertProfile(2, 3, 4, pairs([5, 1], 3)))
    good = path.read_bytes()

    def full_disk(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(profile_module.os, "fsync", full_disk)
    with pytest.raises(FileError, match="No space left"):
        write_profile(path, ExpertProfile(2, 3, 4, pairs([0], 3)))
    assert path.read_bytes() == good and [p.name for p in tmp_path.iterdir()] == ["p.bin"]
    with pytest.raises(FileError, match="cannot write"):
        write_profile(tmp_path / "no folder" / "p.bin", ExpertProfile(2, 3, 4, pairs([0], 3)))


# -- trace ------------------------------------------------------------------------------------------------------------

I32 = st.integers(-(2**31), 2**31 - 1)
WEIGHT = st.floats(width=32, allow_nan=False)
STEP = st.one_of(
    st.tuples(st.just("routing"), st.integers(0, 7), st.lists(st.tuples(st.integers(0, 31), WEIGHT), max_size=10)),
    st.tuples(st.just("request"), I32),
    st.tuples(st.sampled_from(["gpu_experts", "ram_experts"]), st.lists(st.integers(0, 255), max_size=20)),
    st.tuples(st.just("commit"), I32, st.integers(0, 8), st.integers(0, 8), st.integers(0, 1)),
)


@given(st.lists(STEP, max_size=20))
def test_trace_round_trip(tmp_path, steps):
    path = tmp_path / "t.bin"
    wanted: list[tuple] = [("tag", tr.FORMAT, [2])]
    with TraceWriter(path) as writer:
        for name, *args in steps:
            if name == "routing":
                layer, chosen = args
                ids, weights = [i for i, _ in chosen], [w for _, w in chosen]
                writer.routing(layer, ids, weights)
                wanted.append(("routing", layer, ids, np.array(weights, np.float32).tobytes()))
            elif name == "commit":
                window, positions, accepted, phase = args[0], max(args[1:3]), min(args[1:3]), args[3]
                writer.commit(window, positions, accepted, phase)
                wanted.append(("commit", window, positions, accepted, phase))
            else:
                getattr(writer, name)(*args)
                kind = {"request": tr.REQUEST, "gpu_experts": tr.GPU_EXPERTS, "ram_experts": tr.RAM_EXPERTS}[name]
                wanted.append(("tag", kind, args[0] if name != "request" else args))
    assert [plain(record) for record in read_trace(path, 8, 32)] == wanted


def plain(record) -> tuple:
    if isinstance(record, Routing):
        return "routing", record.layer, record.experts.tolist(), record.weights.tobytes()
    if isinstance(record, Commit):
        return "commit", record.window_id, record.n_positions, record.n_accepted, record.phase
    return "tag", record.kind, record.ints.tolist()


def raw_record(layer: int, ints, floats=None) -> bytes:
    floats = [0.0] * len(ints) if floats is None else floats
    return struct.pack(f"<ii{len(ints)}i{len(ints)}f", layer, len(ints), *ints, *floats)


def test_old_files_without_tags(tmp_path):
    path = tmp_path / "t.bin"
    path.write_bytes(raw_record(0, [3, 1], [0.75, 0.25]) + raw_record(5, [2, 0]))
    first, second = read_trace(path)
    assert (first.layer, first.experts.tolist(), first.weights.tolist()) == (0, [3, 1], [0.75, 0.25])
    assert first.has_weights and not second.has_weights and second.experts.dtype == np.int32
    path.write_bytes(b"")
    assert list(read_trace(path)) == []


def test_unknown_tags_are_kept(tmp_path):
    path = tmp_path / "t.bin"
    path.write_bytes(raw_record(-9, [1, 2, 3]))
    (tag,) = read_trace(path)
    assert isinstance(tag, Tag) and tag.kind == -9 and tag.ints.tolist() == [1, 2, 3]


def test_trace_refusals(tmp_path):
    path = tmp_path / "t.bin"
    good = raw_record(-2, [2]) + raw_record(0, [3, 1])
    for size in set(range(len(good))) - {0, 16}:
        path.write_bytes(good[:size])
        with pytest.raises(FileError, match=f"byte {0 if size < 16 else 16}.*truncated"):
            list(read_trace(path))
    for record, words in (
        (raw_record(-2, [3]), r"byte 16 has another format version.*found 3; needed 2"),
        (raw_record(-1, [1, 2]), r"\(commit\).*found 2 ints; needed 4"),
        (raw_record(8, [1]), "another model.*layer 8; needed below 8"),
        (raw_record(0, [32]), "another model.*expert 32.*below 32"),
        (raw_record(0, [0, -1]), "another model.*expert -1"),
        (struct.pack("<ii", 0, -1), "k = -1"),
        (struct.pack("<ii", 0, 2**31 - 1), f"k = {2**31 - 1}, 8 bytes left"),
    ):
        path.write_bytes(raw_record(-2, [2]) + record)
        with pytest.raises(FileError, match=words):
            list(read_trace(path, 8, 32))
    for path in (tmp_path / "absent", tmp_path):
        with pytest.raises(FileError, match="cannot read"):
            read_trace(path)
    with pytest.raises(FileError, match="cannot write"):
        TraceWriter(tmp_path / "no folder" / "t.bin")


def test_writer_refusals(tmp_path):
    writer = TraceWriter(tmp_path / "t.bin")
    for call in (
        lambda: writer.routing(-1, [1]),
        lambda: writer.routing(0, [1, 2], [0.5]),
        lambda: writer.routing(0, [2**31]),
        lambda: writer.commit(0, 1, 2, tr.DECODE),
        lambda: writer.commit(0, 1, 1, 2),
    ):
        with pytest.raises(BadArgument):
            call()
    writer.routing(1, [4])
    writer.close()
    writer.close()
    with pytest.raises(Closed):
        writer.request(1)
    assert [plain(r) for r in read_trace(tmp_path / "t.bin")][1:] == [("routing", 1, [4], bytes(4))]
