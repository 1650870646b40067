"""The draft layer's files: the three forms give the same tensors, and what is wrong is refused with numbers."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import strata
from strata.arch.flash_next import check_draft, read_geometry
from strata.arch.flash_next.contract import draft_needs
from strata.base.errors import FileError, ModelError
from strata.pack.formats import by_name
from strata.pack.gguf_file import GgufFile
from strata.pack.mtp import convert, nextn
from strata.pack.mtp.contents import HF_DOWN, HF_GATE_UP, INDEXER, PARTS, DraftShape
from strata.pack.mtp_files import find_draft, from_safetensors, read_draft, read_vocabulary
from strata.pack.safetensors import read_safetensors
from strata.pack.tensors import Tensors
from strata.planner.draft import draft_tensors
from tests.block_data import random_rows
from tests.draft_probe import draft_alone, forced_drafts, nextn_tensors, with_nextn
from tests.gguf_maker import Made, MadeTensor, string
from tests.safetensors_maker import Stored, write_safetensors

LAYER = "mtp.layers.0."


@pytest.fixture(scope="module")
def gguf(tiny_path):
    with GgufFile(tiny_path) as opened:
        yield opened


@pytest.fixture(scope="module")
def g(gguf):
    return read_geometry(gguf)


@pytest.fixture(scope="module")
def stored(mtp_path) -> dict[str, Stored]:
    """The bundled layer's tensors, as `write_safetensors` takes them."""
    return {n: (t.dtype, t.shape, t.data) for n, t in read_safetensors(mtp_path).items()}


@pytest.fixture(scope="module")
def plain(mtp_path):
    """The layer from safetensors."""
    return from_safetensors(mtp_path)


@pytest.fixture(scope="module")
def rt_q8(mtp_path, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("rt") / "rt"
    convert.convert(mtp_path, out, "q8_0")
    return out


def same(found, wanted) -> None:
    """Bits, types and shapes of all tensors of `wanted`."""
    for name, t in wanted.items():
        other = found[name]
        assert (other.shape, other.format.name) == (t.shape, t.format.name), name
        np.testing.assert_array_equal(other.data, t.data, err_msg=name)


# ---- names and shapes


def test_shapes_are_the_contract_s(g):
    ours = {f"mtp.{n}.weight": s for n, s in DraftShape.of_model(g).shapes().items()}
    assert ours == {n.name: n.shape for n in draft_needs(g)}
    assert len({p.hf_name for p in (*PARTS, *INDEXER)} | {HF_GATE_UP, HF_DOWN}) == 31


def test_every_form_passes_the_contract(gguf, g, mtp_path, rt_q8, alone):
    for source in (mtp_path, rt_q8, alone):
        check_draft(read_draft(source, gguf, g).tensors, g)


# ---- safetensors


def test_norms_have_one_added_and_small_ones_stay(plain, stored):
    layer = Tensors.__new__(Tensors)
    layer.held = plain
    _, _, raw = stored["mtp.pre_fc_norm_hidden.weight"]
    bf16 = (raw.view("<u2").astype(np.uint32) << 16).view(np.float32).reshape(-1)
    np.testing.assert_array_equal(layer.values("mtp.norm_hidden.weight"), bf16 + np.float32(1))
    router = plain["mtp.ffn_gate_inp.weight"]
    assert router.format.name == "BF16" and router.mapped
    np.testing.assert_array_equal(router.data, stored[LAYER + "mlp.gate.weight"][2])
    assert {t.format.name for t in plain.values()} == {"F32", "BF16", "Q8_0"}
    memory = sum(t.n_bytes for t in plain.values() if t.format.name != "BF16")
    assert layer.held_bytes == memory


def test_shards_are_one_file(stored, plain, tmp_path):
    names = sorted(stored)
    other = {"model.norm.weight": ("I64", (2,), np.arange(2))}
    for i in range(3):
        part = {n: stored[n] for n in names[i::3]} | (other if i == 1 else {})
        write_safetensors(tmp_path / f"model-{i + 1:05d}-of-00003.safetensors", part)
    same(from_safetensors(tmp_path), plain)
    # With an index only the shards that it names for the layer are opened.
    (tmp_path / "model-00009-of-00009.safetensors").write_bytes(b"not one of them")
    with pytest.raises(FileError, match="model-00009"):
        from_safetensors(tmp_path)
    places = {n: f"model-{i % 3 + 1:05d}-of-00003.safetensors" for i, n in enumerate(names)}
    places["model.norm.weight"] = "model-00009-of-00009.safetensors"
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": places}))
    same(from_safetensors(tmp_path), plain)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(FileError, match=r"found no file 'model-00002-of-00003\.safetensors'; needed model-00001"):
        from_safetensors(tmp_path)
    index.write_text('{"weight_map": 3}')
    with pytest.raises(FileError, match=r"index model\.safetensors\.index\.json is damaged"):
        from_safetensors(tmp_path)


def test_a_tensor_in_two_shards_is_refused(stored, tmp_path):
    write_safetensors(tmp_path / "a.safetensors", stored)
    write_safetensors(tmp_path / "b.safetensors", {n: stored[n] for n in list(stored)[:1]})
    with pytest.raises(FileError, match=r"is in two files; found a\.safetensors and b\.safetensors; needed each"):
        from_safetensors(tmp_path)


@pytest.mark.parametrize("dtype", ["F32", "F16"])
def test_other_float_types_are_read(stored, tmp_path, dtype, plain):
    wide = {}
    for name, (_, shape, raw) in stored.items():
        values = (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
        wide[name] = (dtype, shape, values if dtype == "F32" else values.astype(np.float16))
    found = from_safetensors(write_safetensors(tmp_path / "x.safetensors", wide))
    assert found["mtp.ffn_gate_inp.weight"].format.name == dtype
    if dtype == "F32":
        same(found, {n: t for n, t in plain.items() if t.format.name != "BF16"})


@pytest.mark.parametrize("name", ["mtp.fc_hidden.weight", LAYER + "mlp.experts.down_proj", HF_GATE_UP])
def test_a_missing_tensor_is_named(stored, tmp_path, name):
    path = write_safetensors(tmp_path / "x.safetensors", {n: t for n, t in stored.items() if n != name})
    with pytest.raises(ModelError, match=f"has no tensor {name}; found .* tensors; needed every tensor"):
        from_safetensors(path)


def test_the_indexer_may_be_missing(stored, tmp_path, plain):
    path = write_safetensors(tmp_path / "x.safetensors", {n: t for n, t in stored.items() if ".indexer." not in n})
    same(from_safetensors(path), plain)
    done = convert.convert(path, tmp_path / "rt", "q8_0")
    assert done.tensors == len(PARTS)


def test_an_unknown_tensor_is_refused(stored, tmp_path):
    more = stored | {"mtp.layers.1.mlp.gate.weight": stored[LAYER + "mlp.gate.weight"]}
    with pytest.raises(ModelError, match=r"another kind of draft layer; found mtp\.layers\.1\.mlp\.gate\.weight"):
        from_safetensors(write_safetensors(tmp_path / "x.safetensors", more))


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("mtp.fc_embedding.weight", (128, 512), r"does not fit the others; found \(128, 512\); needed \(256, 256\)"),
        (LAYER + "mlp.gate.weight", (16, 512), r"does not fit the others; found \(16, 512\); needed \(16, 256\)"),
        (HF_GATE_UP, (16, 512, 256), r"does not fit the others; found \(16, 256, 256\); needed \(32,"),
        (HF_GATE_UP, (32 * 256, 256), "needed 3 axes"),
        (HF_GATE_UP, (256 * 32, 1, 256), "needed as many gate as up rows"),
        (HF_DOWN, (32, 128, 256), r"found \(32, 128, 256\); needed \(32, 256, 128\)"),
        (LAYER + "mlp.shared_expert_gate.weight", (256, 1), r"found \(256, 1\); needed \(256,\)"),
        (LAYER + "self_attn.q_norm.weight", (2, 32), "needed 1 axes"),
    ],
)
def test_shapes_that_do_not_fit_each_other_are_refused(stored, tmp_path, name, shape, message):
    dtype, _, data = stored[name]
    path = write_safetensors(tmp_path / "x.safetensors", stored | {name: (dtype, shape, data)})
    with pytest.raises(ModelError, match=message):
        from_safetensors(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"D": 128}, "hidden size of the draft layer .*; found 256; needed 128. Does the draft layer belong"),
        ({"E": 64}, "number of experts of the draft layer .*; found 32; needed 64"),
        ({"F": 64}, "expert width of the draft layer .*; found 128; needed 64"),
        ({"H": 8}, "width of all query heads .*; found 256; needed 512"),
        ({"hc_rank": 16}, "rank of the hyper-connections .*; found 32; needed 16"),
        ({"shared_width": 32}, "width of the shared expert .*; found 128; needed 32"),
    ],
)
@pytest.mark.parametrize("form", ["safetensors", "rt", "nextn"])
def test_another_model_s_layer_is_refused(gguf, g, mtp_path, rt_q8, alone, form, change, message):
    source = {"safetensors": mtp_path, "rt": rt_q8, "nextn": alone}[form]
    if form == "rt" and "F" in change:  # only the size of experts.bin tells
        message = r"experts\.bin has .*; found 3342336 bytes, 64 experts; needed 1671168: 32 experts of 52224 bytes"
    with pytest.raises((ModelError, FileError), match=message):
        read_draft(source, gguf, replace(g, **change))


def test_values_that_are_not_finite_are_refused(stored, tmp_path):
    for name in ("mtp.fc_hidden.weight", LAYER + "mlp.gate.weight", LAYER + "self_attn.q_norm.weight", HF_DOWN):
        dtype, shape, data = stored[name]
        bad = data.copy().reshape(-1)
        bad[-2:] = 0x80, 0x7F
        path = write_safetensors(tmp_path / "x.safetensors", stored | {name: (dtype, shape, bad)})
        with pytest.raises(ModelError, match=f"tensor {name} of .* holds a non-finite value"):
            from_safetensors(path)


# ---- the nextn block of a GGUF


@pytest.fixture(scope="module")
def alone(tiny_path, mtp_path, tmp_path_factory) -> Path:
    """A GGUF of nothing but the draft layer."""
    return draft_alone(tiny_path, mtp_path, tmp_path_factory.mktemp("nextn") / "draft.gguf")


def test_the_block_is_used_in_place(gguf, g, alone, plain):
    found = read_draft(alone, gguf, g).tensors
    same(found, plain)
    assert all(t.mapped for t in found.values())
    halves = [found[f"mtp.fc_{n}.weight"] for n in ("embedding", "hidden")]
    assert [t.row_bytes for t in halves] == [544, 544]  # rows of eh_proj, each half of which is one matrix
    assert halves[1].data.ctypes.data - halves[0].data.ctypes.data == 272


def test_merged_experts_are_taken_apart(gguf, g, tiny_path, mtp_path, tmp_path, plain):
    same(read_draft(draft_alone(tiny_path, mtp_path, tmp_path / "d.gguf", merged=True), gguf, g).tensors, plain)


def altered(mtp_path: Path, path: Path, change) -> Path:
    tensors = nextn_tensors(mtp_path, 8)
    made = Made(keys=[("general.architecture", string("qwen4exp"))], tensors=tensors)
    change(made)
    return made.write(path)


def test_a_block_across_the_border_is_split_by_value(tmp_path):
    """A layer 128 wide in blocks of 256: every block holds values of both halves."""
    q4_k, D, name = by_name("Q4_K"), 128, "blk.8.nextn.eh_proj.weight"
    raw = random_rows(q4_k, D, 2 * D)
    keys = [("general.architecture", string("qwen4exp"))]
    made = Made(keys=keys, tensors=[MadeTensor(name, (D, 2 * D), q4_k.ggml_id, raw.tobytes())])
    whole = q4_k.dequantise(raw)
    with GgufFile(made.write(tmp_path / "d.gguf")) as gguf:
        halves = [nextn.half(n, gguf.info(name), gguf.raw(name), D) for n in ("fc_embedding", "fc_hidden")]
    for t, half in zip(halves, (whole[:, :D], whole[:, D:]), strict=True):
        assert t.format.name == "F32" and not t.mapped
        np.testing.assert_array_equal(t.format.dequantise(t.data), half)


def test_a_block_of_another_kind_is_refused(gguf, g, mtp_path, tmp_path):
    def add(made):
        made.tensors.append(replace(made.tensors[0], name="blk.8.nextn.shared_head_norm.weight"))

    with pytest.raises(ModelError, match=r"of another kind; found blk\.8\.nextn\.shared_head_norm\.weight"):
        read_draft(altered(mtp_path, tmp_path / "d.gguf", add), gguf, g)


def test_an_indexer_in_the_block_is_ignored(gguf, g, mtp_path, tmp_path, plain):
    def add(made):
        made.tensors.append(replace(made.tensors[0], name="blk.8.indexer.q_proj.weight"))

    same(read_draft(altered(mtp_path, tmp_path / "d.gguf", add), gguf, g).tensors, plain)


@pytest.mark.parametrize("name", ["nextn.hnorm", "attn_q", "ffn_up_exps", "nextn.hc_head_down"])
def test_a_missing_tensor_of_the_block_is_named(gguf, g, mtp_path, tmp_path, name):
    def drop(made):
        made.tensors = [t for t in made.tensors if t.name != f"blk.8.{name}.weight"]

    with pytest.raises(ModelError, match=rf"has no tensor blk\.8\.{name}\.weight"):
        read_draft(altered(mtp_path, tmp_path / "d.gguf", drop), gguf, g)


def test_a_gguf_without_a_block_and_another_architecture_are_refused(gguf, g, tiny_path, mtp_path, tmp_path):
    for reading in (read_draft, draft_tensors):
        with pytest.raises(ModelError, match=r"holds no draft layer; found .*; needed a tensor blk\.\*\.nextn"):
            reading(tiny_path, gguf, g)

    def rename(made):
        made.keys = [("general.architecture", string("qwen9"))]

    with pytest.raises(ModelError, match=r"has another architecture; found qwen9; needed qwen4exp"):
        read_draft(altered(mtp_path, tmp_path / "d.gguf", rename), gguf, g)


# ---- finding, vocabulary


def test_what_lies_beside_the_model_is_found(tiny_path, tmp_path, mtp_path, rt_q8, alone):
    model = tmp_path / tiny_path.name
    for shard in tiny_path.parent.glob("*.gguf"):
        (tmp_path / shard.name).symlink_to(shard)
    with GgufFile(model) as gguf:
        assert find_draft(gguf) is None
        shutil.copy(alone, tmp_path / "mtp-x.gguf")
        assert find_draft(gguf) == tmp_path / "mtp-x.gguf"
        shutil.copy(mtp_path, tmp_path / "mtp.safetensors")
        assert find_draft(gguf) == tmp_path / "mtp.safetensors"
        shutil.copy(mtp_path, tmp_path / "mtp-2.safetensors")
        with pytest.raises(FileError, match=r"several draft layers .*; found mtp-2\.safetensors, mtp\.safetensors"):
            find_draft(gguf)
        (tmp_path / "mtp").mkdir()
        shutil.copy(mtp_path, tmp_path / "mtp" / "model.safetensors")
        assert find_draft(gguf) == tmp_path / "mtp"
        shutil.copytree(rt_q8, tmp_path / "mtp" / "rt")
        assert find_draft(gguf) == tmp_path / "mtp" / "rt"
        g = read_geometry(gguf)
        assert read_draft(tmp_path / "mtp", gguf, g).source == str(tmp_path / "mtp" / "rt")


def test_sources_that_are_none_are_refused(gguf, g, tmp_path):
    with pytest.raises(FileError, match="no draft layer there; found no file"):
        read_draft(tmp_path / "x", gguf, g)
    with pytest.raises(ModelError, match="is no draft layer; found an empty folder; needed a safetensors file"):
        read_draft(tmp_path, gguf, g)
    (tmp_path / "a.txt").write_text("hello")
    with pytest.raises(ModelError, match=r"is no draft layer; found a\.txt"):
        read_draft(tmp_path, gguf, g)
    with pytest.raises(FileError, match="found 5 bytes; needed at least 8"):
        read_draft(tmp_path / "a.txt", gguf, g)


def test_a_vocabulary_selects_rows_of_the_head(gguf, g, rt_q8, tmp_path):
    folder = Path(shutil.copytree(rt_q8, tmp_path / "rt"))
    ids = np.array([5, 4095, 0, 77], "<i4")
    ids.tofile(folder / "draft_vocab.bin")
    layer = read_draft(folder, gguf, g)
    assert layer.vocabulary.tolist() == ids.tolist() and layer.vocabulary.dtype == np.int32 and layer.head_rows == 4
    head = layer.tensors["mtp.output.weight"]
    np.testing.assert_array_equal(head.data, gguf.raw("output.weight")[ids])
    assert not head.mapped


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "found 0 bytes"),
        (b"12345", "found 5 bytes; needed int32 ids"),
        (np.array([1, 100], "<i4").tobytes(), r"found ids 1..100; needed ids in 0..99"),
        (np.array([-1, 5], "<i4").tobytes(), r"found ids -1..5"),
        (np.array([3, 5, 3], "<i4").tobytes(), "found 1 ids twice"),
    ],
)
def test_a_broken_vocabulary_is_refused(tmp_path, data, message):
    (tmp_path / "v.bin").write_bytes(data)
    with pytest.raises(FileError, match=message):
        read_vocabulary(tmp_path / "v.bin", 100)


# ---- drafts


def test_all_forms_draft(tiny_path, mtp_path, rt_q8, tmp_path, golden):
    """Drafts of safetensors, rt folder and nextn block are equal; Q2_0 experts and a small vocabulary still draft."""
    key, n = "IQ3_XXS.chat_no_think.", 16
    prompt, text, wanted = (golden[key + f] for f in ("tokens", "greedy", "draft"))
    q2 = tmp_path / "q2"
    convert.convert(mtp_path, q2, "q2_0")
    inside = with_nextn(tiny_path, mtp_path, tmp_path / "model.gguf")
    small = Path(shutil.copytree(rt_q8, tmp_path / "small"))
    vocabulary = np.unique(np.concatenate([text, wanted.reshape(-1)])).astype("<i4")[::-1].copy()
    vocabulary.tofile(small / "draft_vocab.bin")

    def drafts(path: Path, draft) -> np.ndarray:
        with strata.load(path, context=512, kv="f16", draft=draft, checkpoints=0) as model:
            assert model.geometry.L == 8
            return forced_drafts(model, prompt, text[:n])

    plain = drafts(tiny_path, mtp_path)
    assert plain.agreement(wanted) == 3 * n
    for path, draft in ((tiny_path, rt_q8), (inside, "auto")):
        made = drafts(path, draft)
        np.testing.assert_array_equal(made.tokens, plain.tokens)
        np.testing.assert_array_equal(made.probabilities, plain.probabilities)
    rough = drafts(tiny_path, q2)
    print(f"Q2_0 experts: {rough.agreement(wanted)} of {3 * n}")
    assert rough.agreement(wanted) >= 0.5 * 3 * n
    made = drafts(tiny_path, small)
    np.testing.assert_array_equal(made.tokens, plain.tokens)
    assert (made.probabilities >= plain.probabilities).all()
