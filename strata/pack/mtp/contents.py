"""What a draft layer consists of: names (the HF checkpoint's and ours), shapes, and how each tensor is kept.

Every form is brought to the same tensors: products read Q8_0 blocks or what the file has; hyper-connections, router and
shared gate stay BF16; norms are float32 with the 1 added that the HF checkpoint leaves out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

import numpy as np

from strata.base.errors import ModelError
from strata.base.geometry import Geometry
from strata.pack.formats import by_name
from strata.pack.tensors import HeldTensor

NORM, SMALL, PROJECTION = "norm", "small", "projection"

EXPERTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
"""Our names of the routed experts: (E, F, D), (E, F, D), (E, D, F)."""

HF_GATE_UP, HF_DOWN = "mtp.layers.0.mlp.experts.gate_up_proj", "mtp.layers.0.mlp.experts.down_proj"

OTHER_MODEL = "Does the draft layer belong to this model?"
ITS_OWN = "Take the draft layer that came with the model."


@dataclass(frozen=True)
class Part:
    """One tensor besides the routed experts.

    name   ours, without `mtp.` and `.weight`
    hf     the checkpoint's, without `mtp.` and `layers.0.`
    use    norm (a vector, float32 with 1 added), small (kept as it is) or projection (a block format)
    """

    name: str
    hf: str
    use: str

    @property
    def hf_name(self) -> str:
        in_layer = self.hf.startswith(("self_attn.", "mlp.", "attn_hyper_connection.", "mlp_hyper_connection."))
        return f"mtp.layers.0.{self.hf}" if in_layer else f"mtp.{self.hf}"


def _hyper_connection(name: str, hf: str, inject: bool = True) -> tuple[Part, ...]:
    parts = (
        Part(f"{name}_norm", f"{hf}.hc_norm.weight", NORM),
        Part(f"{name}_down", f"{hf}.input_mix_weight_down.weight", SMALL),
        Part(f"{name}_up", f"{hf}.input_mix_weight_up.weight", SMALL),
    )
    return (*parts, Part(f"{name}_inject", f"{hf}.block_inject_weight.weight", SMALL)) if inject else parts


PARTS = (
    Part("fc_embedding", "fc_embedding.weight", PROJECTION),
    Part("fc_hidden", "fc_hidden.weight", PROJECTION),
    Part("norm_embedding", "pre_fc_norm_embedding.weight", NORM),
    Part("norm_hidden", "pre_fc_norm_hidden.weight", NORM),
    *_hyper_connection("output_hc", "hyper_connection_mixer", inject=False),
    *_hyper_connection("hc_attn", "attn_hyper_connection"),
    *_hyper_connection("hc_ffn", "mlp_hyper_connection"),
    Part("attn_q", "self_attn.q_proj.weight", PROJECTION),
    Part("attn_k", "self_attn.k_proj.weight", PROJECTION),
    Part("attn_v", "self_attn.v_proj.weight", PROJECTION),
    Part("attn_output", "self_attn.o_proj.weight", PROJECTION),
    Part("attn_q_norm", "self_attn.q_norm.weight", NORM),
    Part("attn_k_norm", "self_attn.k_norm.weight", NORM),
    Part("ffn_gate_inp", "mlp.gate.weight", SMALL),
    Part("ffn_gate_inp_shexp", "mlp.shared_expert_gate.weight", SMALL),
    Part("ffn_gate_shexp", "mlp.shared_expert.gate_proj.weight", PROJECTION),
    Part("ffn_up_shexp", "mlp.shared_expert.up_proj.weight", PROJECTION),
    Part("ffn_down_shexp", "mlp.shared_expert.down_proj.weight", PROJECTION),
)
"""Every tensor besides the routed experts that a draft layer is run with."""

INDEXER = (
    Part("indexer.qk_proj", "self_attn.indexer.index_qk_proj.weight", PROJECTION),
    Part("indexer.q_norm", "self_attn.indexer.q_layernorm.weight", NORM),
    Part("indexer.k_norm", "self_attn.indexer.k_layernorm.weight", NORM),
)
"""Tensors that files may have and nothing reads: the draft layer attends densely."""

VECTORS = frozenset(p.name for p in PARTS if p.use == NORM) | {"ffn_gate_inp_shexp"}


@dataclass(frozen=True)
class DraftShape:
    """The numbers that all shapes of a draft layer follow from.

    attention, kv  values of all query heads, of all KV heads        shared  width of the shared expert
    """

    D: int
    C: int
    hc_rank: int
    attention: int
    kv: int
    dh: int
    E: int
    F: int
    shared: int

    @staticmethod
    def of_model(g: Geometry) -> DraftShape:
        """What the model `g` needs."""
        return DraftShape(g.D, g.C, g.hc_rank, g.H * g.dh, g.Hkv * g.dh, g.dh, g.E, g.F, g.shared_width)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Our names -> shapes, routed experts included."""
        D, CD = self.D, self.C * self.D
        out: dict[str, tuple[int, ...]] = {
            "fc_embedding": (D, D),
            "fc_hidden": (D, D),
            "norm_embedding": (D,),
            "norm_hidden": (CD,),
            "attn_q": (2 * self.attention, D),
            "attn_k": (self.kv, D),
            "attn_v": (self.kv, D),
            "attn_output": (D, self.attention),
            "attn_q_norm": (self.dh,),
            "attn_k_norm": (self.dh,),
            "ffn_gate_inp": (self.E, D),
            "ffn_gate_inp_shexp": (D,),
            "ffn_gate_shexp": (self.shared, D),
            "ffn_up_shexp": (self.shared, D),
            "ffn_down_shexp": (D, self.shared),
            "ffn_gate_exps": (self.E, self.F, D),
            "ffn_up_exps": (self.E, self.F, D),
            "ffn_down_exps": (self.E, D, self.F),
        }
        for name in ("output_hc", "hc_attn", "hc_ffn"):
            out |= {f"{name}_norm": (CD,), f"{name}_down": (self.hc_rank, CD), f"{name}_up": (CD, self.hc_rank)}
        return out | {f"{name}_inject": (self.C, CD) for name in ("hc_attn", "hc_ffn")}


WORDS = {
    "D": "hidden size",
    "C": "number of residual streams",
    "hc_rank": "rank of the hyper-connections",
    "attention": "width of all query heads",
    "kv": "width of all KV heads",
    "dh": "head size",
    "E": "number of experts",
    "F": "expert width",
    "shared": "width of the shared expert",
}


def shape_found(shapes: Mapping[str, tuple[int, ...]], file_name: Callable[[str], str], source: str) -> DraftShape:
    """The numbers that these shapes (our names) follow from, with every shape checked against the others.

    file_name  our name -> what the file calls it. ModelError for a tensor that is missing or does not fit the others.
    """

    def axis(name: str, i: int, axes: int) -> int:
        shape = shapes[name]
        if len(shape) != axes:
            raise ModelError(
                f"tensor {file_name(name)} of {source} has another shape",
                found=shape,
                needed=f"{axes} axes",
                advice=ITS_OWN,
            )
        return shape[i]

    names = [p.name for p in PARTS] + list(EXPERTS)
    for name in names:
        if name not in shapes:
            raise ModelError(
                f"{source} has no tensor {file_name(name)}",
                found=f"{len(shapes)} of {len(names)} tensors",
                needed="every tensor of the draft layer",
                advice="Is the file complete, or one of several?",
            )
    D = axis("fc_hidden", 0, 2)
    found = DraftShape(
        D=D,
        C=axis("norm_hidden", 0, 1) // D,
        hc_rank=axis("output_hc_down", 0, 2),
        attention=axis("attn_output", 1, 2),
        kv=axis("attn_k", 0, 2),
        dh=axis("attn_q_norm", 0, 1),
        E=axis("ffn_gate_inp", 0, 2),
        F=axis("ffn_gate_exps", 1, 3),
        shared=axis("ffn_gate_shexp", 0, 2),
    )
    for name, needed in found.shapes().items():
        if shapes[name] != needed:
            raise ModelError(
                f"tensor {file_name(name)} of {source} does not fit the others",
                found=shapes[name],
                needed=needed,
                advice="The file is damaged, or its tensors come from different models.",
            )
    return found


def need_model(found: DraftShape, needed: DraftShape, source: str) -> None:
    """ModelError for the first number in which a draft layer differs from its model."""
    for key, value in asdict(needed).items():
        if (other := getattr(found, key)) != value:
            raise ModelError(
                f"{WORDS[key]} of the draft layer {source} differs", found=other, needed=value, advice=OTHER_MODEL
            )


def held(name: str, shape: tuple[int, ...], format_name: str, data: np.ndarray, mapped: bool = False) -> HeldTensor:
    """A tensor of the draft layer. name without `mtp.` and `.weight`; data uint8, any shape of whole rows."""
    block = by_name(format_name)
    rows = data if data.ndim == 2 else data.reshape(-1, block.row_bytes(shape[-1]))
    return HeldTensor(f"mtp.{name}.weight", shape, block.ggml_id, rows, data, mapped)
