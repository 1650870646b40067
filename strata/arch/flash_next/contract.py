"""The contract: every tensor a `qwen4exp` model must have, with its shape and what its type may be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from strata.arch.flash_next.geometry import ADVICE, PREFIX
from strata.base.errors import ModelError, about
from strata.base.geometry import Geometry
from strata.cpu.float_vectors import LANES
from strata.pack.gguf_file import GgufFile, TensorInfo
from strata.pack.ngram_check import check_table
from strata.pack.tensors import HeldTensor

TABLE = "per_layer_token_embd.weight"
MATRIX = "matrix"
VECTOR = "vector"
ROWS = "rows"


@dataclass(frozen=True)
class Need:
    """One tensor of the contract. shape in numpy order; use: matrix (products), vector (floats), rows (lookup)."""

    name: str
    shape: tuple[int, ...]
    use: str


def _hyper_connection(prefix: str, g: Geometry, inject: bool = True) -> Iterator[Need]:
    yield Need(f"{prefix}_norm.weight", (g.CD,), VECTOR)
    yield Need(f"{prefix}_down.weight", (g.hc_rank, g.CD), MATRIX)
    yield Need(f"{prefix}_up.weight", (g.CD, g.hc_rank), MATRIX)
    if inject:
        yield Need(f"{prefix}_inject.weight", (g.C, g.CD), MATRIX)


def _gdn(b: str, g: Geometry) -> Iterator[Need]:
    yield Need(b + "attn_qkv.weight", (g.gdn_channels, g.D), MATRIX)
    yield Need(b + "attn_gate.weight", (g.gdn_value_width, g.D), MATRIX)
    yield Need(b + "ssm_alpha.weight", (g.gdn_value_heads, g.D), MATRIX)
    yield Need(b + "ssm_beta.weight", (g.gdn_value_heads, g.D), MATRIX)
    yield Need(b + "ssm_a", (g.gdn_value_heads,), VECTOR)
    yield Need(b + "ssm_dt.bias", (g.gdn_value_heads,), VECTOR)
    yield Need(b + "ssm_conv1d.weight", (g.gdn_channels, g.gdn_conv_taps), VECTOR)
    yield Need(b + "ssm_norm.weight", (g.gdn_value_dim,), VECTOR)
    yield Need(b + "ssm_out.weight", (g.D, g.gdn_value_width), MATRIX)


def _qsa(b: str, g: Geometry) -> Iterator[Need]:
    yield Need(b + "attn_q.weight", (2 * g.H * g.dh, g.D), MATRIX)
    yield Need(b + "attn_k.weight", (g.Hkv * g.dh, g.D), MATRIX)
    yield Need(b + "attn_v.weight", (g.Hkv * g.dh, g.D), MATRIX)
    yield Need(b + "attn_output.weight", (g.D, g.H * g.dh), MATRIX)
    yield Need(b + "attn_q_norm.weight", (g.dh,), VECTOR)
    yield Need(b + "attn_k_norm.weight", (g.dh,), VECTOR)
    if g.block_cells:
        yield Need(b + "indexer.q_proj.weight", (g.indexer_heads * g.indexer_dim, g.D), MATRIX)
        yield Need(b + "indexer.k_proj.weight", (g.indexer_dim, g.D), MATRIX)
        yield Need(b + "indexer.q_norm.weight", (g.indexer_dim,), VECTOR)
        yield Need(b + "indexer.k_norm.weight", (g.indexer_dim,), VECTOR)


def _experts(b: str, g: Geometry, merged: bool) -> Iterator[Need]:
    yield Need(b + "ffn_gate_inp.weight", (g.E, g.D), MATRIX)
    yield Need(b + "ffn_gate_inp_shexp.weight", (g.D,), VECTOR)
    if merged:
        yield Need(b + "ffn_gate_up_exps.weight", (g.E, 2 * g.F, g.D), MATRIX)
    else:
        yield Need(b + "ffn_gate_exps.weight", (g.E, g.F, g.D), MATRIX)
        yield Need(b + "ffn_up_exps.weight", (g.E, g.F, g.D), MATRIX)
    yield Need(b + "ffn_down_exps.weight", (g.E, g.D, g.F), MATRIX)
    yield Need(b + "ffn_gate_shexp.weight", (g.shared_width, g.D), MATRIX)
    yield Need(b + "ffn_up_shexp.weight", (g.shared_width, g.D), MATRIX)
    yield Need(b + "ffn_down_shexp.weight", (g.D, g.shared_width), MATRIX)


def _ngram(b: str, g: Geometry) -> Iterator[Need]:
    n = g.ngram
    yield Need(b + "ple_key.weight", (g.CD, n.width), MATRIX)
    yield Need(b + "ple_value.weight", (g.D, n.width), MATRIX)
    for part in ("key", "query", "conv"):
        yield Need(b + f"ple_norm_{part}.weight", (g.CD,), VECTOR)
    yield Need(b + "ple_conv1d.weight", (g.CD, n.conv_taps), VECTOR)


def required_tensors(g: Geometry, merged_layers: frozenset[int] = frozenset()) -> list[Need]:
    """Every tensor the trunk reads. merged_layers: layers whose gate and up experts are one tensor."""
    needs = [
        Need("token_embd.weight", (g.V, g.D), ROWS),
        Need("output.weight", (g.V, g.D), MATRIX),
        *_hyper_connection("output_hc", g, inject=False),
    ]
    if g.ngram:
        rows = max(o + m for o, m in zip(g.ngram.offsets, g.ngram.moduli, strict=True))
        needs.append(Need(TABLE, (rows, g.ngram.row_width), ROWS))
    for layer, kind in enumerate(g.kinds):
        b = f"blk.{layer}."
        needs += _hyper_connection(b + "hc_attn", g)
        needs += _hyper_connection(b + "hc_ffn", g)
        needs += _gdn(b, g) if kind == "gdn" else _qsa(b, g)
        needs += _experts(b, g, layer in merged_layers)
        if g.ngram and g.ngram.layer == layer:
            needs += _ngram(b, g)
    return needs


def draft_needs(g: Geometry) -> list[Need]:
    """Every tensor of the draft layer."""
    return [
        Need("mtp.fc_embedding.weight", (g.D, g.D), MATRIX),
        Need("mtp.fc_hidden.weight", (g.D, g.D), MATRIX),
        Need("mtp.norm_embedding.weight", (g.D,), VECTOR),
        Need("mtp.norm_hidden.weight", (g.CD,), VECTOR),
        *_hyper_connection("mtp.output_hc", g, inject=False),
        *_hyper_connection("mtp.hc_attn", g),
        *_hyper_connection("mtp.hc_ffn", g),
        Need("mtp.attn_q.weight", (2 * g.H * g.dh, g.D), MATRIX),
        Need("mtp.attn_k.weight", (g.Hkv * g.dh, g.D), MATRIX),
        Need("mtp.attn_v.weight", (g.Hkv * g.dh, g.D), MATRIX),
        Need("mtp.attn_output.weight", (g.D, g.H * g.dh), MATRIX),
        Need("mtp.attn_q_norm.weight", (g.dh,), VECTOR),
        Need("mtp.attn_k_norm.weight", (g.dh,), VECTOR),
        *_experts("mtp.", g, merged=False),
    ]


def merged_layers(gguf: GgufFile, g: Geometry) -> frozenset[int]:
    return frozenset(i for i in range(g.L) if f"blk.{i}.ffn_gate_up_exps.weight" in gguf.tensors)


def check_contract(gguf: GgufFile, g: Geometry) -> None:
    """Raise ModelError for the first tensor that is missing, has another shape, or a type its use does not allow."""
    with about(gguf.path.name, ADVICE):
        if g.ngram and not 0 <= g.ngram.layer < g.L:
            raise ModelError(
                f"key {PREFIX}ple.layers names a layer that is not there",
                found=g.ngram.layer,
                needed=f"0..{g.L - 1}",
            )
        _check_heads(g)
        for n in required_tensors(g, merged_layers(gguf, g)):
            _check(n, gguf.tensors.get(n.name), gguf.missing_advice)
        if g.ngram:
            check_table(gguf.info(TABLE), g.ngram, gguf.path.name)


def _check_heads(g: Geometry) -> None:
    """Heads that kernels compute are whole vectors."""
    for used, key, size in (
        ("qsa" in g.kinds, "attention.key_length", g.dh),
        ("qsa" in g.kinds and g.block_cells > 0, "attention.indexer.key_length", g.indexer_dim),
        ("gdn" in g.kinds, "ssm.inner_size / ssm.time_step_rank", g.gdn_value_dim),
    ):
        if used and size % LANES:
            raise ModelError(
                f"heads of key {PREFIX}{key} have an odd size", found=size, needed=f"a multiple of {LANES}"
            )


def check_draft(held: Mapping[str, HeldTensor], g: Geometry) -> None:
    """As check_contract for the tensors of a draft layer."""
    with about("draft layer", "Does the draft layer belong to this model?"):
        for n in draft_needs(g):
            _check(n, held.get(n.name))


def _check(n: Need, info: TensorInfo | HeldTensor | None, if_missing: str | None = None) -> None:
    if info is None:
        raise ModelError(
            f"tensor {n.name} is missing", found="no such tensor", needed=f"shape {n.shape}", advice=if_missing
        )
    table = n.name == TABLE and info.shape[0] >= n.shape[0] and info.shape[1:] == n.shape[1:]
    one_row = n.use == VECTOR and info.shape in ((1, *n.shape), (n.shape[0], 1, *n.shape[1:]))
    if info.shape != n.shape and not table and not one_row:
        raise ModelError(f"tensor {n.name} has another shape", found=info.shape, needed=n.shape)
    name = info.format.name
    if n.use == VECTOR and name not in ("F32", "F16", "BF16"):
        raise ModelError(f"type of tensor {n.name} does not suit its use", found=name, needed="F32, F16 or BF16")
    if n.use != VECTOR and name == "I8":
        raise ModelError(f"type of tensor {n.name} has no products", found=name, needed="a float or block format")
