"""GgufFile against files of the gguf package, hand-made files, and damage of every kind."""

from __future__ import annotations

import os
import struct
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strata.base.errors import BadArgument, FileError, ModelError, StrataError
from strata.pack.gguf_file import GgufFile
from strata.pack.gguf_metadata import ARRAY, BOOL, F32, F64, I8, I16, I32, I64, U8, U16, U32, U64
from tests.gguf_maker import Made, MadeTensor, Typed, array, string, text

MODEL = [("general.architecture", string("toy")), ("toy.block_count", Typed(U32, 2))]


def two_tensors(**changes) -> Made:
    tensors = [MadeTensor("a", (3, 8), 0, bytes(range(96))), MadeTensor("b.weight", (2, 64), 42, bytes(range(36)))]
    return Made(**{"keys": MODEL, "tensors": tensors, **changes})


def refused(path: Path, made: Made, *words: str, kind: type[StrataError] = FileError, headers_only: bool = False):
    """Opening must fail with `kind` and a text that has every word."""
    made.write(path)
    with pytest.raises(kind) as caught:
        GgufFile(path, headers_only=headers_only)
    for word in words:
        assert word in str(caught.value)


# -- well-formed files ------------------------------------------------------------------------------------------------


def test_every_value_type(tmp_path):
    keys = [
        ("u8", Typed(U8, 200)), ("i8", Typed(I8, -7)), ("u16", Typed(U16, 60000)), ("i16", Typed(I16, -30000)),
        ("u32", Typed(U32, 4_000_000_000)), ("i32", Typed(I32, -5)), ("u64", Typed(U64, 2**64 - 1)),
        ("i64", Typed(I64, -(2**63))), ("f32", Typed(F32, 0.1)), ("f64", Typed(F64, 0.1)),
        ("yes", Typed(BOOL, True)), ("no", Typed(BOOL, False)), ("text", string("Grüße")), ("empty", string("")),
        ("ints", array(I64, [1, -2, 3])), ("bools", array(BOOL, [True, False])), ("none", array(U8, [])),
        ("words", array(8, ["a", "", "ß"])), ("no words", array(8, [])),
        ("nested", array(9, [(U8, [1, 2]), (8, ["x"]), (9, [(F32, [0.5])])])),
    ]  # fmt: skip
    with GgufFile(Made(keys=keys).write(tmp_path / "m.gguf")) as file:
        m = file.metadata
        assert list(m) == [key for key, _ in keys]
        for key in ("u8", "i8", "u16", "i16", "u32", "i32", "u64", "i64"):
            assert type(m[key]) is int and m[key] == dict(keys)[key].value
        assert type(m["f32"]) is float and m["f32"] == float(np.float32(0.1)) and m["f64"] == 0.1
        assert m["yes"] is True and m["no"] is False
        assert m["text"] == "Grüße" and m["empty"] == ""
        assert m["ints"].dtype == np.int64 and m["ints"].tolist() == [1, -2, 3]
        assert m["bools"].dtype == np.bool_ and m["bools"].tolist() == [True, False]
        assert len(m["none"]) == 0 and len(m["no words"]) == 0
        words = m["words"]
        assert list(words) == words[:] == words.to_list() == ["a", "", "ß"] and words[-1] == "ß" and len(words) == 3
        assert words.raw_list() == [b"a", b"", "ß".encode()] and words.raw(2) == "ß".encode()
        nested = m["nested"]
        assert nested[0].tolist() == [1, 2] and nested[1][0] == "x" and nested[2][0].tolist() == [0.5]
        assert m.type_name("nested") == "array of array" and m.type_name("absent") == "nothing"
        with pytest.raises(IndexError):
            words[3]
        file.close()
        assert m["u16"] == 60000 and words[0] == "a", "metadata outlives the file"


def test_tensors_and_views(tmp_path):
    with GgufFile(two_tensors().write(tmp_path / "m.gguf")) as file:
        a, b = file.info("a", (3, 8)), file.info("b.weight")
        assert (a.shape, a.rows, a.row_bytes, a.n_bytes, a.format.name) == ((3, 8), 3, 32, 96, "F32")
        assert (b.shape, b.row_bytes, b.n_bytes, b.format.name) == ((2, 64), 18, 36, "Q2_0")
        assert file.raw("a").shape == (3, 32) and file.raw("a").tobytes() == bytes(range(96))
        assert file.raw("b.weight").tobytes() == bytes(range(36)) and not file.raw("a").flags.writeable
        assert file.address("a") == file.raw("a").ctypes.data and file.total_bytes == 132
        assert file.values("b.weight").shape == (2, 64)
        assert file.architecture == "toy" and file.missing_bytes == 0 and len(file.shards) == 1
        with pytest.raises(ModelError, match="'c'"):
            file.raw("c")
        with pytest.raises(ModelError, match=r"'a'.*\(3, 8\).*\(8, 3\)"):
            file.info("a", (8, 3))
        with pytest.raises(BadArgument):
            file.advise("a", "clairvoyant")
        for pattern in ("random", "sequential", "willneed", "normal"):
            file.advise("a", pattern)


def test_exactly_fitting_and_longer_files_open(tmp_path):
    path = two_tensors().write(tmp_path / "m.gguf")
    assert GgufFile(path).info("b.weight").offset + 36 == path.stat().st_size
    path.write_bytes(path.read_bytes() + b"padding")
    assert GgufFile(path).raw("b.weight").tobytes() == bytes(range(36))


def test_scalars_vectors_and_metadata_only(tmp_path):
    tensors = [MadeTensor("scalar", ()), MadeTensor("vector", (5,))]
    file = GgufFile(Made(keys=MODEL, tensors=tensors).write(tmp_path / "m.gguf"))
    assert file.raw("scalar").shape == (4,) and file.raw("vector").shape == (20,) and file.info("vector").rows == 1
    assert GgufFile(Made(keys=MODEL).write(tmp_path / "none.gguf")).tensors == {}


def test_alignment_key_moves_the_data(tmp_path):
    keys = [*MODEL, ("general.alignment", Typed(U32, 256))]
    file = GgufFile(two_tensors(keys=keys, alignment=256).write(tmp_path / "m.gguf"))
    assert file.shards[0].data_start % 256 == 0 and file.info("b.weight").offset % 256 == 0
    assert file.raw("b.weight").tobytes() == bytes(range(36))
    for bad in (0, 24):
        wrong = two_tensors(keys=[*MODEL, ("general.alignment", Typed(U32, bad))])
        refused(tmp_path / "m.gguf", wrong, "general.alignment", str(bad), "power of two")


def test_need_helpers(tmp_path):
    keys = [("n", Typed(U16, 3)), ("x", Typed(F32, 0.5)), ("s", string("t")), ("b", Typed(BOOL, True)),
            ("ns", array(U64, [1, 2])), ("ws", array(8, ["p"]))]  # fmt: skip
    m = GgufFile(Made(keys=keys).write(tmp_path / "m.gguf")).metadata
    assert (m.need_int("n"), m.need_float("x"), m.need_float("n"), m.need_str("s")) == (3, 0.5, 3.0, "t")
    assert m.need_bool("b") is True and m.need_ints("ns") == (1, 2) and m.need_strings("ws", 1)[0] == "p"
    assert (m.need_int("q", 9), m.need_float("q", 1.5), m.need_str("q", "d")) == (9, 1.5, "d")
    assert m.need_bool("q", False) is False
    for call, words in (
        (lambda: m.need_int("x"), ("'x'", "f32", "integer")),
        (lambda: m.need_int("b"), ("'b'", "bool")),
        (lambda: m.need_int("q"), ("'q'", "nothing")),
        (lambda: m.need_str("n"), ("'n'", "u16", "string")),
        (lambda: m.need_bool("n"), ("'n'", "bool")),
        (lambda: m.need_float("s"), ("'s'", "string", "float")),
        (lambda: m.need_ints("ws"), ("'ws'", "array of string")),
        (lambda: m.need_ints("ns", 3), ("'ns'", "2 elements", "3 elements")),
        (lambda: m.need_strings("ns"), ("'ns'", "array of u64")),
    ):
        with pytest.raises(ModelError) as caught:
            call()
        assert all(word in str(caught.value) for word in words)


def test_text_that_is_not_utf8_is_named_when_read(tmp_path):
    keys = [("t", string(b"\xff")), ("ws", array(8, ["ok", b"\xfe"]))]
    m = GgufFile(Made(keys=keys).write(tmp_path / "m.gguf")).metadata
    assert m["ws"][0] == "ok" and m["ws"].raw_list() == [b"ok", b"\xfe"]
    for call in (lambda: m["t"], lambda: m["ws"][1], lambda: list(m["ws"])):
        with pytest.raises(FileError, match="not UTF-8"):
            call()


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.sampled_from(["f", "e", "q", "i"]))),
    st.lists(st.text(max_size=20), min_size=1, max_size=20),
    st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=9),
    st.floats(width=32, allow_nan=False),
)
def test_round_trip_with_the_gguf_package(tmp_path, tensors, words, ints, number):
    path = tmp_path / "w.gguf"
    writer = gguf.GGUFWriter(path, "toy")
    writer.add_array("toy.words", words)
    writer.add_array("toy.ints", ints)
    writer.add_float32("toy.number", number)
    writer.add_bool("toy.flag", True)
    wanted = {}
    rng = np.random.default_rng(0)
    for i, (shape, kind) in enumerate(tensors):
        values = rng.standard_normal(shape).astype(np.float32)
        if kind == "f":
            wanted[f"t{i}"] = values
        elif kind == "e":
            wanted[f"t{i}"] = values.astype(np.float16)
        else:
            name = "Q8_0" if kind == "q" else "IQ4_NL"
            raw_type = gguf.GGMLQuantizationType[name]
            row = 34 if kind == "q" else 18
            raw = rng.integers(0, 256, (*shape[:-1], shape[-1] * row)).astype(np.uint8)
            writer.add_tensor(f"t{i}", raw, raw_dtype=raw_type)
            wanted[f"t{i}"] = raw
            continue
        writer.add_tensor(f"t{i}", wanted[f"t{i}"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GgufFile(path) as file:
        m = file.metadata
        assert list(m["toy.words"]) == words and m["toy.ints"].tolist() == ints
        assert m["toy.number"] == number and m["toy.flag"] is True and file.architecture == "toy"
        assert set(file.tensors) == set(wanted)
        for name, array_ in wanted.items():
            assert file.raw(name).tobytes() == array_.tobytes()
            if array_.dtype != np.uint8:
                assert file.info(name).shape == array_.shape
                np.testing.assert_array_equal(file.values(name), array_.astype(np.float32))
            else:
                assert file.raw(name).shape[-1] == array_.shape[-1] or array_.ndim == 1


# -- refusals ---------------------------------------------------------------------------------------------------------


def test_refuses_a_wrong_preamble(tmp_path):
    path = tmp_path / "m.gguf"
    refused(path, two_tensors(magic=b"GGML"), "m.gguf", "GGML", "GGUF")
    for version in (0, 1, 4):
        refused(path, two_tensors(version=version), "version", f"found {version}", "2 or 3")
    refused(path, two_tensors(version=0x03000000), "big-endian", "little-endian")
    path.write_bytes(b"")
    with pytest.raises(FileError, match="empty"):
        GgufFile(path)
    with pytest.raises(FileError, match="no such file"):
        GgufFile(tmp_path / "absent.gguf")
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(FileError, match="cannot open"):
        GgufFile(tmp_path / "pipe.gguf")


def test_refuses_bad_counts_types_and_names(tmp_path):
    path = tmp_path / "m.gguf"
    refused(path, two_tensors(n_keys=2**60), "keys", "bytes")
    refused(path, two_tensors(n_tensors=2**60), "tensors", "bytes")
    refused(path, two_tensors(keys=[*MODEL, *MODEL]), "general.architecture", "twice")
    tensor = MadeTensor("a", (4,))
    refused(path, Made(tensors=[tensor, tensor]), "'a'", "twice")
    refused(path, Made(tensors=[MadeTensor("a", (4,), 99)]), "'a'", "99", kind=ModelError)
    refused(path, Made(tensors=[MadeTensor("a", (1,), ne=[1, 1, 1, 1, 1])]), "'a'", "found 5", "4")
    refused(path, Made(tensors=[MadeTensor("a", (4,), ne=[4, 0])]), "'a'", "empty")
    refused(path, Made(tensors=[MadeTensor("a", (64,), 8, ne=[40])]), "'a'", "Q8_0", "40", "32")
    refused(path, Made(tensors=[MadeTensor(b"\xff", (4,))]), "tensor 0", "UTF-8")
    nested: tuple = (U8, [1])
    for _ in range(12):
        nested = (ARRAY, [nested])
    refused(path, Made(keys=[("deep", Typed(ARRAY, nested))]), "'deep'", "nested")
    for kind, item in ((77, None), (ARRAY, 78)):
        body = text("odd") + struct.pack("<I", kind) + (struct.pack("<IQ", item, 0) if item else b"")
        path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + body)
        with pytest.raises(FileError, match=rf"'odd'.*{item or kind}"):
            GgufFile(path)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("odd") + struct.pack("<IB", BOOL, 2))
    with pytest.raises(FileError, match=r"'odd'.*found 2"):
        GgufFile(path)


@pytest.mark.parametrize("ne", [[2**62, 4], [2**40, 2**40], [2**63, 1, 1, 2], [2**32, 2**31, 1, 1]])
@pytest.mark.parametrize("headers_only", [False, True])
def test_refuses_overflowing_dimensions(tmp_path, ne, headers_only):
    made = Made(tensors=[MadeTensor("big", (4,), ne=ne)])
    refused(tmp_path / "m.gguf", made, "'big'", "overflow", headers_only=headers_only)


def test_refuses_wrong_places(tmp_path):
    path = tmp_path / "m.gguf"
    a = MadeTensor("a", (16,))
    refused(path, Made(tensors=[a, MadeTensor("b", (4,), offset=72)]), "'b'", "misaligned", "72", "32")
    refused(path, Made(tensors=[a, MadeTensor("b", (4,), offset=32)]), "'a'", "'b'", "overlap")
    refused(path, Made(tensors=[a, MadeTensor("b", (4,), offset=0)]), "'a'", "'b'", "overlap")
    out = Made(tensors=[a, MadeTensor("b", (4,), offset=2**40)])
    refused(path, out, "'b'", "a file of", "needed 10995116")
    refused(path, Made(tensors=[MadeTensor("b", (4,), offset=2**64 - 32)]), "'b'", "out of range", headers_only=True)
    # The order of places may differ from the order of names.
    swapped = Made(tensors=[MadeTensor("a", (4,), offset=32), MadeTensor("b", (4,), offset=0)])
    assert GgufFile(swapped.write(path)).info("b").offset < GgufFile(path).info("a").offset


def test_one_byte_short_names_tensor_end_and_size(tmp_path):
    path = two_tensors().write(tmp_path / "m.gguf")
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(FileError) as caught:
        GgufFile(path)
    assert all(word in str(caught.value) for word in ("'b.weight'", f"byte {size}", f"{size - 1} bytes"))
    with GgufFile(path, headers_only=True) as file:
        assert file.missing_bytes == 1 and file.raw("a").tobytes() == bytes(range(96))
        for call in (file.raw, file.address):
            with pytest.raises(FileError, match=r"'b.weight'.*missing"):
                call("b.weight")


def test_huge_counts_do_not_allocate(tmp_path):
    path = tmp_path / "m.gguf"
    for item in (U8, U64, 8, ARRAY):
        body = text("k") + struct.pack("<IIQ", ARRAY, item, 2**62)
        path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + body + bytes(100))
        with pytest.raises(FileError, match="'k'"):
            GgufFile(path)
    # A sparse file of zeros would read as endless empty strings.
    body = text("k") + struct.pack("<IIQ", ARRAY, 8, 2**27)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + body)
    with path.open("r+b") as file:
        file.truncate(1 << 34)
    start = time.thread_time()
    with pytest.raises(FileError, match="'k'"):
        GgufFile(path)
    assert time.thread_time() - start < 0.5
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("k") + struct.pack("<IIQ", ARRAY, U8, 1 << 33))
    with path.open("r+b") as file:
        file.truncate(1 << 34)
    with pytest.raises(FileError, match=r"'k'|longer than"):
        GgufFile(path)


HEAD = two_tensors(keys=[*MODEL, ("ws", array(8, ["a", "bc"])), ("n", array(9, [(U8, [1]), (8, ["q"])]))]).content()


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, len(HEAD) - 1), st.booleans())
def test_truncation_anywhere_is_refused(tmp_path, size, headers_only):
    path = tmp_path / "m.gguf"
    path.write_bytes(HEAD[:size])
    try:
        file = GgufFile(path, headers_only=headers_only)
    except FileError as error:
        assert str(size) in str(error) or size < 8
    else:
        assert headers_only and file.missing_bytes > 0


@settings(deadline=None, max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, len(HEAD) - 1), st.integers(1, 255)), min_size=1, max_size=4), st.booleans())
def test_flipped_bytes_open_or_raise(tmp_path, flips, headers_only):
    data = bytearray(HEAD)
    for at, bits in flips:
        data[at] ^= bits
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    try:
        with GgufFile(path, headers_only=headers_only) as file:
            for key in file.metadata:
                repr(file.metadata[key])
            for name in file.tensors:
                file.raw(name).sum()
    except StrataError:
        pass  # the only exception that may come out


def test_a_name_that_no_file_system_takes():
    with pytest.raises(FileError, match="cannot be looked at"):
        GgufFile("x" * 5000)
