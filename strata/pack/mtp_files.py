"""The draft layer's tensors under one set of names (`mtp.*`), whatever they come from.

Sources: HF-named tensors in safetensors (BF16, norms zero-centred), the extracted `rt` folder, the `nextn` block of a
GGUF. Products read Q8_0 blocks; hyper-connections, router and shared gate stay BF16; norms are float32 with +1 applied.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, quants

from strata.base.errors import FileError
from strata.base.geometry import Geometry
from strata.pack.formats import by_name
from strata.pack.gguf_file import GgufFile
from strata.pack.safetensors import StoredTensor, read_safetensors
from strata.pack.tensors import HeldTensor

LAYER = "layers.0."
HC = (("attn_hyper_connection", "hc_attn"), ("mlp_hyper_connection", "hc_ffn"))
HC_PARTS = (
    ("input_mix_weight_down.weight", "down"),
    ("input_mix_weight_up.weight", "up"),
    ("block_inject_weight.weight", "inject"),
)
NORMS = {
    "pre_fc_norm_embedding.weight": "norm_embedding",
    "pre_fc_norm_hidden.weight": "norm_hidden",
    "hyper_connection_mixer.hc_norm.weight": "output_hc_norm",
    LAYER + "attn_hyper_connection.hc_norm.weight": "hc_attn_norm",
    LAYER + "mlp_hyper_connection.hc_norm.weight": "hc_ffn_norm",
    LAYER + "self_attn.q_norm.weight": "attn_q_norm",
    LAYER + "self_attn.k_norm.weight": "attn_k_norm",
}
SMALL = {
    "hyper_connection_mixer.input_mix_weight_down.weight": "output_hc_down",
    "hyper_connection_mixer.input_mix_weight_up.weight": "output_hc_up",
    LAYER + "mlp.gate.weight": "ffn_gate_inp",
    LAYER + "mlp.shared_expert_gate.weight": "ffn_gate_inp_shexp",
    **{f"{LAYER}{hf}.{part}": f"{ours}_{short}" for hf, ours in HC for part, short in HC_PARTS},
}
LARGE = {
    "fc_embedding.weight": "fc_embedding",
    "fc_hidden.weight": "fc_hidden",
    LAYER + "self_attn.q_proj.weight": "attn_q",
    LAYER + "self_attn.k_proj.weight": "attn_k",
    LAYER + "self_attn.v_proj.weight": "attn_v",
    LAYER + "self_attn.o_proj.weight": "attn_output",
    LAYER + "mlp.shared_expert.gate_proj.weight": "ffn_gate_shexp",
    LAYER + "mlp.shared_expert.up_proj.weight": "ffn_up_shexp",
    LAYER + "mlp.shared_expert.down_proj.weight": "ffn_down_shexp",
}


def held(name: str, values: np.ndarray, format_name: str) -> HeldTensor:
    """A float32 array stored in a block format; name without `mtp.` and `.weight`."""
    block = by_name(format_name)
    flat = np.ascontiguousarray(values, np.float32).reshape(-1, values.shape[-1])
    block.row_bytes(values.shape[-1])
    if format_name == "F32":
        data = flat.view(np.uint8)
    else:
        data = quants.quantize(flat, GGMLQuantizationType(block.ggml_id)).view(np.uint8)
    full = f"mtp.{name}.weight"
    return HeldTensor(full, tuple(values.shape), block.ggml_id, data.reshape(len(flat), -1), data)


def _values(t: StoredTensor) -> np.ndarray:
    return by_name(t.dtype).dequantise(t.data).reshape(t.shape)


def from_safetensors(path: str | Path, projections: str = "Q8_0", experts: str = "Q8_0") -> dict[str, HeldTensor]:
    """Held tensors from HF-named `mtp.*` tensors. FileError naming the first tensor that is missing."""
    stored = read_safetensors(path)

    def find(name: str) -> StoredTensor:
        found = stored.get("mtp." + name)
        if found is None:
            raise FileError(f"{Path(path).name} has no tensor mtp.{name}", needed="all 31 tensors of the draft layer")
        return found

    out = [held(ours, _values(find(hf)) + np.float32(1), "F32") for hf, ours in NORMS.items()]
    for hf, ours in SMALL.items():
        t = find(hf)
        shape = t.shape if ours != "ffn_gate_inp_shexp" else (t.shape[-1],)
        out.append(HeldTensor(f"mtp.{ours}.weight", shape, by_name(t.dtype).ggml_id, t.data, t.data))
    out += [held(ours, _values(find(hf)), projections) for hf, ours in LARGE.items()]
    both = _values(find(LAYER + "mlp.experts.gate_up_proj"))
    F = both.shape[1] // 2
    out.append(held("ffn_gate_exps", both[:, :F], experts))
    out.append(held("ffn_up_exps", both[:, F:], experts))
    out.append(held("ffn_down_exps", _values(find(LAYER + "mlp.experts.down_proj")), experts))
    return {t.name: t for t in out}


@dataclass(frozen=True)
class DraftLayer:
    """A draft layer ready to load.

    tensors     by name, `mtp.output.weight` (the rows of the head that drafts are scored on) included
    vocabulary  (head_rows,) int32 token ids of those rows, or None for the whole head
    source      where it came from
    """

    tensors: dict[str, HeldTensor]
    vocabulary: np.ndarray | None
    source: str

    @property
    def head_rows(self) -> int:
        return self.tensors["mtp.output.weight"].shape[0]


def draft_head(gguf: GgufFile, vocabulary: np.ndarray | None) -> HeldTensor:
    """`mtp.output.weight`: the model's head in place, or the vocabulary's rows of it copied as raw blocks."""
    info = gguf.info("output.weight")
    raw = gguf.raw("output.weight")
    if vocabulary is None:
        return HeldTensor("mtp.output.weight", info.shape, info.ggml_type, raw, raw)
    rows = np.ascontiguousarray(raw[vocabulary])
    return HeldTensor("mtp.output.weight", (len(rows), info.shape[1]), info.ggml_type, rows, rows)


def read_vocabulary(path: Path, V: int) -> np.ndarray:
    """`draft_vocab.bin`: little-endian int32 token ids. FileError for a broken file or ids outside the vocabulary."""
    data = path.read_bytes()
    ids = np.frombuffer(data[: len(data) // 4 * 4], "<i4")
    if len(data) % 4 or not len(ids) or ids.min() < 0 or ids.max() >= V or len(np.unique(ids)) != len(ids):
        found = f"{len(data)} bytes" if not len(ids) else f"ids {ids.min()}..{ids.max()}"
        raise FileError(f"draft vocabulary {path.name}", found=found, needed=f"different int32 ids in 0..{V - 1}")
    return ids.astype(np.int32)


def find_draft(gguf: GgufFile) -> Path | None:
    """The draft layer beside a model: its own `nextn` block, `mtp/rt`, or a safetensors file called `mtp*`."""
    if any(name.endswith("nextn.eh_proj.weight") for name in gguf.tensors):
        return gguf.path
    folder = gguf.path.parent
    if (folder / "mtp" / "rt" / "dense.txt").exists():
        return folder / "mtp" / "rt"
    return next(iter(sorted(folder.glob("mtp*.safetensors"))), None)


def read_draft(source: Path, gguf: GgufFile, g: Geometry) -> DraftLayer:
    """Read a draft layer from any of its forms. FileError or ModelError says what is wrong."""
    if not source.exists():
        raise FileError("no draft layer there", found=f"no file '{source}'", needed="mtp.safetensors, mtp/rt or a GGUF")
    if source.is_dir():
        raise FileError("this form of draft layer cannot be read", found=str(source), needed="mtp.safetensors")
    tensors = from_safetensors(source)
    vocabulary = None
    subset = source.parent / "draft_vocab.bin"
    if subset.exists():
        vocabulary = read_vocabulary(subset, g.V)
    head = draft_head(gguf, vocabulary)
    return DraftLayer(tensors | {head.name: head}, vocabulary, str(source))
