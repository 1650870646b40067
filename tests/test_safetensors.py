"""Safetensors files: what is read, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.base.errors import FileError
from strata.pack.safetensors import ITEM_BYTES, read_safetensors
from tests.safetensors_maker import write_raw, write_safetensors


def test_tensors_of_every_type_as_stored(tmp_path):
    rng = np.random.default_rng(0)
    f32, f16 = rng.standard_normal((3, 4)).astype(np.float32), rng.standard_normal((2, 3, 5)).astype(np.float16)
    bf16 = rng.integers(0, 1 << 15, 7).astype(np.uint16)
    path = tmp_path / "x.safetensors"
    tensors = {"a": ("F32", (3, 4), f32), "b": ("F16", (2, 3, 5), f16), "c": ("BF16", (7,), bf16)}
    write_safetensors(path, tensors, metadata={"format": "pt"})
    found = read_safetensors(path)
    assert list(found) == ["a", "b", "c"]
    for name, (dtype, shape, data) in tensors.items():
        t = found[name]
        assert (t.name, t.dtype, t.shape) == (name, dtype, shape)
        assert t.data.shape == (data.size // shape[-1], shape[-1] * ITEM_BYTES[dtype])
        assert t.data.tobytes() == data.tobytes() and not t.data.flags.writeable


def test_a_scalar_is_one_row(tmp_path):
    write_safetensors(tmp_path / "x.safetensors", {"s": ("F32", (), np.float32(3))})
    t = read_safetensors(tmp_path / "x.safetensors")["s"]
    assert t.shape == () and t.data.view("<f4")[0, 0] == 3


def test_a_prefix_chooses(tmp_path):
    ids = np.arange(3)
    tensors = {"mtp.a": ("F32", (3,), np.zeros(3, np.float32)), "position_ids": ("I64", (3,), ids)}
    path = tmp_path / "x.safetensors"
    write_safetensors(path, tensors)
    assert list(read_safetensors(path, "mtp.")) == ["mtp.a"]
    with pytest.raises(FileError, match=r"position_ids of x\.safetensors .*; found type I64; needed BF16, F16, F32"):
        read_safetensors(path)


def test_the_mapping_outlives_the_file(tmp_path):
    path = tmp_path / "x.safetensors"
    write_safetensors(path, {"a": ("F32", (2, 2), np.eye(2, dtype=np.float32))})
    t = read_safetensors(path)["a"]
    path.unlink()
    assert t.data.view("<f4").sum() == 2


def test_the_bundled_file(mtp_path):
    found = read_safetensors(mtp_path, "mtp.")
    assert len(found) == 31 and {t.dtype for t in found.values()} == {"BF16"}


ONE = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data_offsets": [0, 20]}, "found bytes 0..20 of 16; needed 16 bytes"),
        ({"data_offsets": [4, 20]}, "outside the file"),
        ({"data_offsets": [-4, 12]}, "outside the file"),
        ({"data_offsets": [16, 0]}, "outside the file"),
        ({"shape": [2, 3]}, "needed 24 bytes"),
        ({"shape": [0, 2]}, "positive integers"),
        ({"shape": [2, -2]}, "positive integers"),
        ({"shape": [True, 4]}, "positive integers"),
        ({"shape": [2.0, 2]}, "positive integers"),
        ({"data_offsets": ["0", "16"]}, "positive integers"),
        ({"data_offsets": [0]}, "damaged at tensor a"),
        ({"shape": 4}, "damaged at tensor a"),
        ({"dtype": "F8_E4M3"}, "found type F8_E4M3"),
    ],
)
def test_a_wrong_entry_is_refused(tmp_path, change, message):
    path = tmp_path / "x.safetensors"
    write_raw(path, json.dumps({"a": ONE | change}).encode(), bytes(16))
    with pytest.raises(FileError, match=message):
        read_safetensors(path)


@pytest.mark.parametrize("missing", ["dtype", "shape", "data_offsets"])
def test_an_entry_without_a_field_is_refused(tmp_path, missing):
    path = tmp_path / "x.safetensors"
    write_raw(path, json.dumps({"a": {k: v for k, v in ONE.items() if k != missing}}).encode(), bytes(16))
    with pytest.raises(FileError, match=f"damaged at tensor a; found .*{missing}"):
        read_safetensors(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "found 0 bytes; needed at least 8"),
        (b"1234567", "found 7 bytes"),
        ((1 << 40).to_bytes(8, "little") + b"{}", "announced"),
        ((3).to_bytes(8, "little") + b"{}", "found 3 bytes announced; needed <= 2"),
        ((2).to_bytes(8, "little") + b"[]", "is damaged"),
        ((2).to_bytes(8, "little") + b"{x", "is damaged"),
        ((2).to_bytes(8, "little") + b"\xff\xff", "is damaged"),
        ((7).to_bytes(8, "little") + b'{"a":1}', "damaged at tensor a"),
    ],
)
def test_a_broken_file_is_refused(tmp_path, content, message):
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(FileError, match=message):
        read_safetensors(path)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(FileError, match="cannot be read"):
        read_safetensors(tmp_path / "x.safetensors")
    with pytest.raises(FileError, match="cannot be read"):
        read_safetensors(tmp_path)


@given(cut=st.floats(0, 1, exclude_max=True))
def test_every_truncation_is_refused(mtp_path, tmp_path_factory, cut):
    whole = mtp_path.read_bytes()
    path: Path = tmp_path_factory.mktemp("cut") / "x.safetensors"
    path.write_bytes(whole[: int(cut * len(whole))])
    with pytest.raises(FileError):
        read_safetensors(path)
    path.unlink()
