"""The `rt` folder of a draft layer: read, refused when damaged, and written by `strata convert-mtp`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from strata.arch.flash_next import read_geometry
from strata.base.errors import BadArgument, DoesNotFit, FileError, ModelError
from strata.cli import app
from strata.pack.gguf_file import GgufFile
from strata.pack.mtp import canonical, convert, rt
from strata.pack.mtp.contents import PARTS
from strata.pack.mtp_files import from_safetensors, read_draft
from strata.pack.safetensors import read_safetensors
from tests.safetensors_maker import write_safetensors

LAYER = "mtp.layers.0."


@pytest.fixture(scope="module")
def gguf(tiny_path):
    with GgufFile(tiny_path) as opened:
        yield opened


@pytest.fixture(scope="module")
def g(gguf):
    return read_geometry(gguf)


@pytest.fixture(scope="module")
def plain(mtp_path):
    """The layer from safetensors."""
    return from_safetensors(mtp_path)


@pytest.fixture(scope="module", params=["q2_0", "q8_0", "bf16"])
def converted(request, mtp_path, tmp_path_factory) -> tuple[str, Path]:
    """Format of the experts and an rt folder; not to be changed."""
    out = tmp_path_factory.mktemp("rt") / request.param
    convert.convert(mtp_path, out, request.param)
    return request.param, out


@pytest.fixture(scope="module")
def rt_q8(mtp_path, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("rt") / "rt"
    convert.convert(mtp_path, out, "q8_0")
    return out


@pytest.fixture()
def folder(rt_q8, tmp_path) -> Path:
    """An rt folder to be damaged."""
    return Path(shutil.copytree(rt_q8, tmp_path / "rt"))


def same(found, wanted) -> None:
    """Bits, types and shapes of all tensors of `wanted`."""
    for name, t in wanted.items():
        other = found[name]
        assert (other.shape, other.format.name) == (t.shape, t.format.name), name
        np.testing.assert_array_equal(other.data, t.data, err_msg=name)


# ---- the rt folder


def test_conversion_and_back(gguf, g, mtp_path, converted):
    experts, folder = converted
    wanted = from_safetensors(mtp_path, experts=convert.EXPERT_FORMATS[experts])
    found = read_draft(folder, gguf, g)
    same(found.tensors, wanted)
    assert found.vocabulary is None and found.head_rows == g.V and found.source == str(folder)
    dense = [t for n, t in found.tensors.items() if "_exps" not in n]
    assert all(t.mapped for t in dense) and len(dense) == len(PARTS) + 1
    # The format's own sizes: experts behind each other, dense tensors at multiples of 256.
    kind = wanted["mtp.ffn_gate_exps.weight"].format
    assert (folder / rt.EXPERTS_BIN).stat().st_size == 32 * (256 * kind.row_bytes(256) + 256 * kind.row_bytes(128))
    marker = folder / rt.EXPERTS_FMT
    assert marker.exists() == (experts != "q2_0")
    if marker.exists():
        assert marker.read_text() == {"q8_0": "q8_0 8 8\n", "bf16": "bf16 30 30\n"}[experts]
    lines = rt.read_table(folder).values()
    assert len(lines) == 29 and all(line.offset % 256 == 0 for line in lines)
    assert {line.kind for line in lines} == {"q8_0", "bf16", "f32"}


def test_the_expert_order_of_a_folder_with_a_marker(rt_q8, plain):
    """One expert: gate rows, up rows, down rows."""
    names = [f"mtp.ffn_{p}_exps.weight" for p in ("gate", "up", "down")]
    blobs = np.fromfile(rt_q8 / rt.EXPERTS_BIN, np.uint8).reshape(32, -1)
    for e in (0, 7, 31):
        parts = [plain[n].data.reshape(32, -1)[e] for n in names]
        np.testing.assert_array_equal(blobs[e], np.concatenate(parts))


def test_experts_of_two_types(gguf, g, folder, mtp_path, plain):
    down = from_safetensors(mtp_path, experts="BF16")["mtp.ffn_down_exps.weight"]
    parts = [plain["mtp.ffn_gate_exps.weight"], plain["mtp.ffn_up_exps.weight"], down]
    np.concatenate([t.data.reshape(32, -1) for t in parts], axis=1).tofile(folder / rt.EXPERTS_BIN)
    (folder / rt.EXPERTS_FMT).write_text("mixed 8 30\n")
    same(read_draft(folder, gguf, g).tensors, plain | {down.name: down})


@given(blocks=st.tuples(st.integers(1, 4), st.integers(1, 3)), E=st.integers(1, 3), seed=st.integers(0, 1 << 30))
def test_the_q2_0_blob_is_a_lossless_order(blocks, E, seed):
    D, F = (64 * n for n in blocks)
    rng = np.random.default_rng(seed)
    gate, up = rng.integers(0, 256, (2, E, F, D // 64 * 18), np.uint8)
    down = rng.integers(0, 256, (E, D, F // 64 * 18), np.uint8)
    blobs = [canonical.pack(np.concatenate([gate[e], up[e]]), down[e], D, F) for e in range(E)]
    assert all(len(b) == canonical.blob_bytes(D, F) for b in blobs)
    for found, wanted in zip(canonical.unpack(np.array(blobs), D, F), (gate, up, down), strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_the_q2_0_blob_has_its_planes_where_they_belong():
    D, F = 2560, 640
    rng = np.random.default_rng(0)
    gate_up = rng.integers(0, 256, (2 * F, D // 64, 18), np.uint8)
    down = rng.integers(0, 256, (D, F // 64, 18), np.uint8)
    blob = canonical.pack(gate_up, down, D, F)
    assert len(blob) == canonical.blob_bytes(D, F) == 1_382_400
    for r in (0, 1, 639):
        for row, source in ((2 * r, gate_up[r]), (2 * r + 1, gate_up[F + r])):
            assert (blob[640 * row : 640 * row + 640] == source[:, 2:].reshape(-1)).all()
            at = 1_228_800 + 80 * row
            assert (blob[at : at + 80] == source[:, :2].reshape(-1)).all()
    for r in (0, 2559):
        assert (blob[819_200 + 160 * r : 819_200 + 160 * r + 160] == down[r, :, 2:].reshape(-1)).all()
        assert (blob[1_331_200 + 20 * r : 1_331_200 + 20 * r + 20] == down[r, :, :2].reshape(-1)).all()


@pytest.mark.parametrize(
    ("name", "left", "message"),
    [
        ("dense.bin", 900_000, r"dense.bin is too short; found 900000 bytes; needed 1010560 by dense.txt"),
        ("dense.bin", 0, r"dense.bin is empty"),
        ("experts.bin", 3_000_000, r"another size; found 3000000 bytes, 28.7\d experts; needed 3342336: 32 experts"),
        ("experts.bin", 3_342_336 // 2, r"found 1671168 bytes, 16 experts; needed 3342336: 32 experts of 104448 bytes"),
        ("experts.bin", 0, "experts.bin is empty"),
    ],
)
def test_a_truncated_folder_is_refused(gguf, g, folder, name, left, message):
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[:left])
    with pytest.raises(FileError, match=message):
        read_draft(folder, gguf, g)


def test_experts_without_their_marker_are_refused(gguf, g, folder):
    (folder / rt.EXPERTS_FMT).unlink()
    with pytest.raises(
        FileError, match=r"needed 884736: 32 experts of 27648 bytes in Q2_0 \(there is no experts\.fmt\)"
    ):
        read_draft(folder, gguf, g)


@pytest.mark.parametrize("name", ["dense.bin", "experts.bin"])
def test_a_missing_file_is_refused(gguf, g, folder, name):
    (folder / name).unlink()
    with pytest.raises(FileError, match=f"{name} cannot be read"):
        read_draft(folder, gguf, g)


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("q8_0 8", FileError, "found 'q8_0 8'; needed label, ggml id, ggml id"),
        ("q8_0 8 x", FileError, "needed label, ggml id, ggml id"),
        ("q8_0 8 999", ModelError, "tensor type 999 is not supported"),
        ("i8 24 24", ModelError, "has no products; found I8"),
        ("iq3 18 18", ModelError, "a row of 128 values cannot be stored as IQ3_XXS"),
        ("bf16 30 30", FileError, "found 3342336 bytes, 17 experts; needed 6291456: 32 experts"),
    ],
)
def test_a_wrong_marker_is_refused(gguf, g, folder, text, error, message):
    (folder / rt.EXPERTS_FMT).write_text(text)
    with pytest.raises(error, match=message):
        read_draft(folder, gguf, g)


@pytest.mark.parametrize(
    ("old", "new", "error", "message"),
    [
        (
            "fc_hidden.weight q8_0",
            "fc_hidden.weight q4_0",
            ModelError,
            "line 2 of .*; found q4_0; needed q8_0, bf16",
        ),
        ("fc_hidden.weight q8_0 256 256", "fc_hidden.weight q8_0 256 250", ModelError, "a row of 250 values"),
        (
            "fc_hidden.weight q8_0 256 256",
            "fc_hidden.weight q8_0 255 256",
            FileError,
            "69632 bytes; needed 69360",
        ),
        ("fc_hidden.weight q8_0 256 256", "fc_hidden.weight q8_0 128 512", ModelError, "does not fit the others"),
        (
            "fc_hidden.weight q8_0",
            "fc_hidden.weight",
            FileError,
            "line 2 .* needed name kind rows columns",
        ),
        ("fc_hidden.weight", "fc_embedding.weight", ModelError, "found twice the same"),
        ("fc_hidden.weight", "fc_other.weight", ModelError, "found an unknown tensor"),
        ("69632 69632", "-9632 69632", FileError, "needed name kind rows columns offset bytes"),
        ("fc_hidden.weight q8_0 256 256 69632", "fc_hidden.weight q8_0 256 256 999999999", FileError, "too short"),
        ("mlp.gate.weight bf16 32 256", "mlp.gate.weight bf16 64 128", ModelError, "does not fit the others"),
        ("fc_hidden.weight q8_0 256 256", "fc_hidden.weight f32 68 256", ModelError, "does not fit the others"),
        ("k_norm.weight f32 1 64", "k_norm.weight bf16 2 64", ModelError, "k_norm.weight in .*; found bf16; needed"),
    ],
)
def test_a_wrong_table_is_refused(gguf, g, folder, old, new, error, message):
    path = folder / rt.DENSE_TXT
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(error, match=message):
        read_draft(folder, gguf, g)


def test_a_missing_line_is_named(gguf, g, folder):
    path = folder / rt.DENSE_TXT
    path.write_text("".join(line for line in path.open() if not line.startswith("mlp.gate.")))
    with pytest.raises(ModelError, match=r"has no tensor mlp\.gate\.weight"):
        read_draft(folder, gguf, g)


def test_columns_may_come_first_for_vectors(gguf, g, folder, plain):
    path = folder / rt.DENSE_TXT
    text = path.read_text().replace("q_norm.weight f32 1 64", "q_norm.weight f32 64 1")
    path.write_text(text.replace("shared_expert_gate.weight bf16 1 256", "shared_expert_gate.weight bf16 256 1"))
    same(read_draft(folder, gguf, g).tensors, plain)


# ---- strata convert-mtp


def run(*arguments):
    return CliRunner().invoke(app, ["convert-mtp", *map(str, arguments)])


def test_the_verb_writes_a_folder_and_says_how_large(mtp_path, tmp_path, gguf, g):
    out = tmp_path / "a" / "rt"
    done = run(mtp_path, out)
    assert done.exit_code == 0, done.output
    assert "experts.bin" in done.stdout and "32 experts, Q2_0" in done.stdout and "29 tensors" in done.stdout
    assert sorted(p.name for p in out.iterdir()) == ["dense.bin", "dense.txt", "experts.bin"]
    assert [p.name for p in out.parent.iterdir()] == ["rt"], "something was left behind"
    read_draft(out, gguf, g)
    done = run(mtp_path, out, "--force", "--experts", "bf16", "--json")
    sizes = {p.name: p.stat().st_size for p in out.iterdir()}
    record = {"folder": str(out), "files": sizes, "tensors": 29, "experts": 32, "format_name": "BF16"}
    assert json.loads(done.stdout) == record


def test_the_verb_replaces_only_when_forced_and_only_an_rt_folder(mtp_path, tmp_path):
    out = tmp_path / "rt"
    assert run(mtp_path, out, "--experts", "q8_0").exit_code == 0
    (out / "draft_vocab.bin").write_bytes(bytes(4))
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    done = run(mtp_path, out)
    assert done.exit_code == 1 and "Use --force" in done.stderr
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before
    assert run(mtp_path, out, "--force").exit_code == 0
    assert sorted(p.name for p in out.iterdir()) == ["dense.bin", "dense.txt", "draft_vocab.bin", "experts.bin"]
    assert (out / "draft_vocab.bin").read_bytes() == bytes(4)
    (out / "mine.txt").write_text("keep me")
    done = run(mtp_path, out, "--force")
    assert done.exit_code == 1 and "mine.txt" in done.stderr and (out / "mine.txt").exists()
    (tmp_path / "file").write_text("x")
    assert run(mtp_path, tmp_path / "file", "--force").exit_code == 1 and (tmp_path / "file").read_text() == "x"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "rt"]


def test_the_vocabulary_beside_the_source_comes_along(mtp_path, tmp_path):
    shutil.copy(mtp_path, tmp_path / "mtp.safetensors")
    (tmp_path / "draft_vocab.bin").write_bytes(bytes(4))
    convert.convert(tmp_path / "mtp.safetensors", tmp_path / "rt")
    assert (tmp_path / "rt" / "draft_vocab.bin").read_bytes() == bytes(4)


@pytest.mark.parametrize("moment", ["experts", "rename"])
def test_a_conversion_that_fails_leaves_everything_as_it_was(mtp_path, tmp_path, monkeypatch, moment):
    out = tmp_path / "rt"
    convert.convert(mtp_path, out, "q8_0")
    before = {p.name: p.read_bytes() for p in out.iterdir()}

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    if moment == "rename":
        rename = Path.rename

        def refuse(self: Path, target: Path):
            if self.name.endswith(".part"):
                raise OSError(5, "Input/output error")
            return rename(self, target)

        monkeypatch.setattr(Path, "rename", refuse)
    expected = KeyboardInterrupt if moment == "experts" else FileError
    with pytest.raises(expected):
        convert.convert(mtp_path, out, force=True, on_progress=stop if moment == "experts" else None)
    monkeypatch.undo()
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before
    assert [p.name for p in tmp_path.iterdir()] == ["rt"]


def test_a_conversion_that_cannot_start_is_refused(mtp_path, tmp_path, monkeypatch, rt_q8):
    with pytest.raises(BadArgument, match="found 'q4_k'; needed q2_0, q8_0, bf16"):
        convert.convert(mtp_path, tmp_path / "rt", "q4_k")
    assert run(mtp_path, tmp_path / "rt", "--experts", "q4_k").exit_code == 2
    with pytest.raises(FileError, match="found no file"):
        convert.convert(tmp_path / "x", tmp_path / "rt")
    with pytest.raises(ModelError, match=r"has no tensor mtp\.fc_embedding\.weight"):
        convert.convert(rt_q8, tmp_path / "rt")
    (tmp_path / "file").write_text("x")
    with pytest.raises(FileError, match="cannot be written"):
        convert.convert(mtp_path, tmp_path / "file" / "rt")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1 << 20))
    with pytest.raises(DoesNotFit, match="is too small; found 1 MiB free; needed about 2 MiB"):
        convert.convert(mtp_path, tmp_path / "rt")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_values_of_float32_are_not_rounded_to_bf16(mtp_path, tmp_path, gguf, g):
    stored = {n: (t.dtype, t.shape, t.data) for n, t in read_safetensors(mtp_path).items()}
    name = "mtp.hyper_connection_mixer.input_mix_weight_down.weight"
    values = np.random.default_rng(0).standard_normal(stored[name][1]).astype(np.float32)
    path = write_safetensors(tmp_path / "x.safetensors", stored | {name: ("F32", values.shape, values)})
    convert.convert(path, tmp_path / "rt")
    t = read_draft(tmp_path / "rt", gguf, g).tensors["mtp.output_hc_down.weight"]
    np.testing.assert_array_equal(t.format.dequantise(t.data), values)
