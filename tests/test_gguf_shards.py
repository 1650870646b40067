"""Models over several shards, the life of mappings, and the speed of opening."""

from __future__ import annotations

import gc
import time
from pathlib import Path

import numpy as np
import pytest

from strata.base.errors import Closed, FileError, ModelError
from strata.pack.gguf_file import GgufFile
from strata.pack.gguf_metadata import I32, U8, U16, U32
from tests.gguf_maker import Made, MadeTensor, Typed, array, string

TINY = sorted((Path(__file__).parent.parent / "examples/models/tiny-flash-next").glob("*.gguf"))
MODEL = [("general.architecture", string("toy")), ("toy.block_count", Typed(U32, 2))]


def shard(i: int, n: int, total: int, tensors: list[MadeTensor], keys=()) -> Made:
    split = [("split.no", Typed(U16, i)), ("split.count", Typed(U16, n)), ("split.tensors.count", Typed(I32, total))]
    return Made(keys=[*(MODEL if i == 0 else []), *keys, *split], tensors=tensors)


def three_shards(folder: Path, changes: dict[int, Made] | None = None) -> list[Path]:
    c = MadeTensor("c", (2, 4))
    made = {0: shard(0, 3, 3, []), 1: shard(1, 3, 3, [MadeTensor("a", (4,), data=b"A" * 16)]),
            2: shard(2, 3, 3, [MadeTensor("b", (4,), data=b"B" * 16), c])} | (changes or {})  # fmt: skip
    return [made[i].write(folder / f"m-{i + 1:05d}-of-00003.gguf") for i in range(3)]


def test_shards_are_found_from_any_one(tmp_path):
    for path in three_shards(tmp_path):
        with GgufFile(path) as file:
            assert [s.path.name[:7] for s in file.shards] == ["m-00001", "m-00002", "m-00003"]
            assert file.raw("a").tobytes() == b"A" * 16 and file.raw("b").tobytes() == b"B" * 16
            assert (file.info("a").shard, file.info("c").shard) == (1, 2) and file.architecture == "toy"


def test_a_folder_stands_for_its_one_model(tmp_path):
    paths = three_shards(tmp_path)
    with GgufFile(tmp_path) as file:
        assert file.path == paths[0] and len(file.shards) == 3
    shard(0, 1, 0, []).write(tmp_path / "other.gguf")
    with pytest.raises(FileError, match=r"does not hold one model; found m-00001-of-00003.gguf, other.gguf"):
        GgufFile(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileError, match="does not hold one model; found none"):
        GgufFile(tmp_path / "empty")


def test_missing_shards(tmp_path):
    first, second, third = three_shards(tmp_path)
    third.unlink()
    with pytest.raises(FileError, match=r"shard 3 of 3 is missing.*m-00003-of-00003"):
        GgufFile(first)
    with GgufFile(first, headers_only=True) as file:
        assert file.missing_bytes > 0 and file.missing_shards == [third] and set(file.tensors) == {"a"}
        with pytest.raises(ModelError, match=r"'b'.*m-00003-of-00003"):
            file.info("b")
    first.unlink()
    for headers_only in (False, True):
        with pytest.raises(FileError, match="shard 1 of 3 is missing"):
            GgufFile(second, headers_only=headers_only)


def test_shards_of_different_models(tmp_path):
    other = [("general.architecture", string("other"))]
    tensors = [MadeTensor("a", (4,))]
    for changed, words in (
        (shard(1, 3, 3, tensors, other), ("general.architecture", "different models")),
        (shard(1, 3, 3, tensors, [("toy.block_count", Typed(U32, 3))]), ("toy.block_count", "3", "2")),
        (shard(1, 3, 9, tensors), ("split.tensors.count", "different models")),
        (shard(2, 3, 3, tensors), ("split.no", "found 2", "needed 1")),
        (shard(1, 4, 3, tensors), ("split.count", "found 4", "needed 3")),
        (shard(1, 3, 3, [MadeTensor("b", (4,))]), ("'b'", "two shards")),
        (shard(1, 3, 3, [*tensors, MadeTensor("d", (4,))]), ("found 4", "needed 3", "split.tensors.count")),
    ):
        paths = three_shards(tmp_path, {1: changed})
        with pytest.raises(FileError) as caught:
            GgufFile(paths[2])
        assert all(word in str(caught.value) for word in words), str(caught.value)
    # The same keys again are fine.
    keys = [("toy.block_count", Typed(U32, 2)), ("own", Typed(U8, 1))]
    paths = three_shards(tmp_path, {1: shard(1, 3, 3, tensors, keys)})
    assert GgufFile(paths[0]).metadata["own"] == 1


def test_shard_names(tmp_path):
    path = shard(0, 2, 1, [MadeTensor("a", (4,))]).write(tmp_path / "renamed.gguf")
    with pytest.raises(FileError, match=r"split.count.*found 2.*needed 1"):
        GgufFile(path)
    for name in ("m-00003-of-00002.gguf", "m-00000-of-00002.gguf"):
        with pytest.raises(FileError, match="shard number"):
            GgufFile(shard(0, 2, 1, []).write(tmp_path / name))
    single = shard(0, 1, 1, [MadeTensor("a", (4,))]).write(tmp_path / "m-00001-of-00001.gguf")
    assert set(GgufFile(single).tensors) == {"a"}


@pytest.mark.parametrize("path", TINY, ids=lambda p: p.name[-13:-5])
def test_bundled_model_opens_from_either_shard(path):
    with GgufFile(path) as file:
        assert len(TINY) == 2 and len(file.tensors) == 214 and file.architecture == "qwen4exp"
        assert file.info("per_layer_token_embd.weight", (80384, 32)).offset == 192
        assert file.metadata.need_ints("qwen4exp.attention.compress_ratios", 8)[3] == 4
        assert len(file.metadata["tokenizer.ggml.tokens"].to_list()) == 4096
        assert np.isfinite(file.values("output_hc_norm.weight")).all()


# -- life and speed ---------------------------------------------------------------------------------------------------


def test_close_with_views_out(tmp_path):
    file = GgufFile(
        Made(keys=MODEL, tensors=[MadeTensor("a", (3, 8), data=bytes(range(96)))]).write(tmp_path / "m.gguf")
    )
    view, keeper, address = file.raw("a")[1:], file.keeper(), file.address("a")
    file.close()
    file.close()
    gc.collect()
    assert view.tobytes() == bytes(range(32, 96)), "the mapping lives as long as its views"
    assert keeper[0].ctypes.data + file.info("a").offset == address
    for call in (lambda: file.raw("a"), lambda: file.address("a"), file.keeper, lambda: file.advise("a", "random")):
        with pytest.raises(Closed):
            call()
    del view, keeper
    gc.collect()
    assert str(tmp_path / "m.gguf") not in Path("/proc/self/maps").read_text()


def test_failed_open_leaves_no_mapping(tmp_path):
    paths = three_shards(tmp_path, {2: Made(magic=b"NOPE")})
    with pytest.raises(FileError):
        GgufFile(paths[0])
    gc.collect()
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_a_large_header_opens_fast_and_reads_no_data(tmp_path):
    """1,224 tensors and a vocabulary of 248,320 tokens and as many merges, over a sparse 40 GB file."""
    words = [f"token {i}" for i in range(248_320)]
    names = [f"blk.{i // 25}.some_tensor_{i % 25}.weight" for i in range(1224)]
    keys = [*MODEL, ("tokens", array(8, words)), ("merges", array(8, words)), ("types", array(I32, [1] * len(words)))]
    made = Made(keys=keys, tensors=[MadeTensor(name, (2560, 3328)) for name in names])
    path = tmp_path / "m.gguf"
    header = made.header()
    path.write_bytes(header)
    with path.open("r+b") as handle:
        handle.truncate(len(header) + 32 + 1224 * 2560 * 3328 * 4)
    wall, cpu = time.perf_counter(), time.thread_time()
    file = GgufFile(path)
    wall, cpu = time.perf_counter() - wall, time.thread_time() - cpu
    assert cpu < 1.5, f"{cpu:.2f} s of CPU, {wall:.2f} s in all"
    assert len(file.tensors) == 1224 and file.metadata["tokens"][248_319] == "token 248319"
    assert file.metadata["merges"].raw_list() == [w.encode() for w in words]
    assert resident_bytes(path) < len(header) + (4 << 20), "tensor data was read"
    print(f"opened in {wall:.3f} s wall, {cpu:.3f} s CPU; {resident_bytes(path)} bytes resident of {len(header)}")


def resident_bytes(path: Path) -> int:
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        if line.endswith(str(path)):
            return next(int(text.split()[1]) << 10 for text in lines if text.startswith("Rss:"))
    raise AssertionError(f"{path} is not mapped")
