"""Geometry of a `qwen4exp` file: from its keys, checked against its tensors. Derived numbers are derived."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from strata.base.errors import ModelError, about
from strata.base.geometry import Geometry, NgramGeometry
from strata.base.numbers import shown
from strata.pack.gguf_file import GgufFile

log = logging.getLogger("strata")
PREFIX = "qwen4exp."
ADVICE = "Is this an unchanged GGUF of Qwen3.8-Flash-Next? Download or convert it again."
"""What to do about a number that no such model has."""


class _Keys:
    """Typed access to the file's keys; the prefix is left out."""

    def __init__(self, gguf: GgufFile):
        self.gguf = gguf

    def raw(self, name: str, default: Any = None) -> Any:
        return self.gguf.metadata.get(PREFIX + name, default)

    def integer(self, *names: str, default: int | None = None, least: int = 1) -> int:
        """The first of `names` that the file has, as an int of at least `least`."""
        for name in names:
            value = self.raw(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ModelError(f"key {PREFIX}{name} is unusable", found=shown(value), needed=f"an integer >= {least}")
            return value
        if default is None:
            raise ModelError(f"key {PREFIX}{names[0]} is missing", found="no such key", needed=f"an integer >= {least}")
        return default

    def real(self, name: str, default: float | None = None) -> float:
        value = self.raw(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0 or value == float("inf"):
            missing = value is None
            raise ModelError(
                f"key {PREFIX}{name} is " + ("missing" if missing else "unusable"),
                found="no such key" if missing else shown(value),
                needed="a positive number",
            )
        return float(value)

    def integers(self, name: str, length: int | None = None) -> tuple[int, ...] | None:
        """An integer array of any width as Python ints, or None when the key is absent."""
        value = self.raw(name)
        if value is None:
            return None
        if isinstance(value, str) or not (isinstance(value, Sequence) or hasattr(value, "tolist")):
            raise ModelError(f"key {PREFIX}{name} is unusable", found=shown(value), needed="an array of integers")
        items = value.tolist() if hasattr(value, "tolist") else list(value)
        whole = all(isinstance(v, int) for v in items)
        if not whole or (length is not None and len(items) != length):
            what = "an array of integers" if length is None else f"{length} integers"
            found = f"{len(items)} integers" if whole else f"an {self.gguf.metadata.type_name(PREFIX + name)}"
            raise ModelError(f"key {PREFIX}{name} is unusable", found=found, needed=what)
        return tuple(int(v) for v in items)


def _shape(gguf: GgufFile, name: str, dims: int) -> tuple[int, ...]:
    info = gguf.tensors.get(name)
    if info is None:
        raise ModelError(
            f"tensor {name} is missing",
            found="no such tensor",
            needed=f"a tensor of {dims} dimensions",
            advice=gguf.missing_advice,
        )
    if len(info.shape) != dims:
        raise ModelError(f"tensor {name} has the wrong rank", found=info.shape, needed=f"{dims} dimensions")
    return info.shape


def _layer_kinds(gguf: GgufFile, keys: _Keys, L: int) -> tuple[str, ...]:
    """ "gdn" or "qsa" per layer: what the tensors are, checked against the keys that also say it."""
    kinds = []
    for layer in range(L):
        gdn, qsa = (f"blk.{layer}.{n}.weight" in gguf.tensors for n in ("attn_qkv", "attn_q"))
        if gdn == qsa:
            found = "both attn_qkv and attn_q" if gdn else "neither attn_qkv nor attn_q"
            raise ModelError(f"layer {layer} is no GDN and no QSA layer", found=found, needed="exactly one of them")
        kinds.append("gdn" if gdn else "qsa")
    recurrent = keys.integers("attention.recurrent_layers")
    if recurrent is not None:
        said = ["gdn" if r else "qsa" for r in recurrent[:L]]
        source = "attention.recurrent_layers"
    else:
        period = keys.integer("full_attention_interval", default=0, least=0)
        said = ["qsa" if period and layer % period == period - 1 else "gdn" for layer in range(L)] if period else kinds
        source = "full_attention_interval"
    for layer, (a, b) in enumerate(zip(kinds, said, strict=False)):
        if a != b:
            raise ModelError(
                f"layer {layer} differs from key {PREFIX}{source}", found=f"{a} tensors", needed=f"{b} tensors"
            )
    return tuple(kinds)


def _block_cells(keys: _Keys, kinds: tuple[str, ...]) -> int:
    """Cells of an indexer block; 0 = dense attention everywhere."""
    ratios = keys.integers("attention.compress_ratios")
    if ratios is None:
        return keys.integer("attention.indexer.block_size", default=0, least=0)
    if len(ratios) < len(kinds):
        raise ModelError(
            f"key {PREFIX}attention.compress_ratios is short",
            found=f"{len(ratios)} integers",
            needed=f"{len(kinds)}, one a layer",
        )
    on_qsa = {ratios[i] for i, kind in enumerate(kinds) if kind == "qsa"}
    if len(on_qsa) > 1 or min(on_qsa, default=0) < 0:
        raise ModelError(
            f"key {PREFIX}attention.compress_ratios has no one block length for the QSA layers",
            found=sorted(on_qsa),
            needed="one length, 0 or more",
        )
    cells = on_qsa.pop() if on_qsa else 0
    if cells == 0 and "qsa" in kinds:
        log.warning("compress_ratios are 0 on every attention layer: the indexer is off, attention is dense")
    return cells


def _ngram(gguf: GgufFile, keys: _Keys) -> NgramGeometry | None:
    layers = keys.integers("ple.layers")
    if not layers:
        return None
    if len(layers) != 1:
        raise ModelError(f"key {PREFIX}ple.layers is unusable", found=f"{len(layers)} layers", needed="one layer")
    order, per_order = keys.integer("ple.ngram_size", least=2), keys.integer("ple.heads_per_ngram")
    heads = (order - 1) * per_order
    if order != 3:
        raise ModelError(f"key {PREFIX}ple.ngram_size is unusable", found=order, needed="3 (bigrams and trigrams)")
    table_rows, width = _shape(gguf, "per_layer_token_embd.weight", 2)
    arrays = {}
    for name, length in (("layer_multipliers", order), ("head_vocab_sizes", heads), ("head_offsets", heads)):
        values = keys.integers(f"ple.{name}", length)
        if values is None:
            raise ModelError(f"key {PREFIX}ple.{name} is missing", found="no such key", needed=f"{length} integers")
        arrays[name] = values
    ends = [o + m for o, m in zip(arrays["head_offsets"], arrays["head_vocab_sizes"], strict=True)]
    if min(arrays["head_vocab_sizes"]) < 1 or min(arrays["head_offsets"]) < 0:
        found = f"{min(arrays['head_vocab_sizes'])} and {min(arrays['head_offsets'])}"
        raise ModelError(
            f"keys {PREFIX}ple.head_vocab_sizes and .head_offsets are unusable",
            found=f"{found} as the smallest",
            needed="at least 1 and 0",
        )
    if max(ends) > table_rows:
        raise ModelError(
            "tensor per_layer_token_embd.weight has fewer rows than its n-gram heads address",
            found=table_rows,
            needed=f"at least {max(ends)} by keys {PREFIX}ple.head_vocab_sizes and .head_offsets",
        )
    stated = keys.integer("embedding_length_per_layer_input", default=width)
    if stated != width:
        raise ModelError(
            "tensor per_layer_token_embd.weight has another row width",
            found=width,
            needed=f"{stated} by key {PREFIX}embedding_length_per_layer_input",
        )
    return NgramGeometry(
        layer=layers[0],
        order=order,
        heads_per_order=per_order,
        row_width=width,
        conv_taps=keys.integer("ple.conv_kernel", default=4),
        reset_token=keys.integer("ple.eos_token_id", least=0),
        image_token=keys.integer("ple.image_token_id", default=0, least=0),
        multipliers=arrays["layer_multipliers"],
        moduli=arrays["head_vocab_sizes"],
        offsets=arrays["head_offsets"],
    )


def _agree(what: str, found: int, needed: int) -> int:
    if found != needed:
        raise ModelError(what, found=found, needed=needed)
    return found


def read_geometry(gguf: GgufFile) -> Geometry:
    """Geometry of an opened `qwen4exp` file.

    Numbers that tensors carry come from tensors (V, E, F, widths); keys that repeat them must agree. Raises ModelError
    naming the file and the key or tensor, what was found and what is needed.
    """
    with about(gguf.path.name, ADVICE):
        return _geometry(gguf)


def _geometry(gguf: GgufFile) -> Geometry:
    keys = _Keys(gguf)
    mtp_layers = keys.integer("nextn_predict_layers", default=0, least=0)
    L = keys.integer("block_count") - mtp_layers
    if L < 1:
        raise ModelError(
            f"key {PREFIX}block_count leaves no decoder layers",
            found=f"{L + mtp_layers} blocks, {mtp_layers} of them draft layers by key {PREFIX}nextn_predict_layers",
            needed="at least 1 decoder layer",
        )
    V, D = _shape(gguf, "token_embd.weight", 2)
    _agree("tensor token_embd.weight differs from key embedding_length", D, keys.integer("embedding_length"))
    kinds = _layer_kinds(gguf, keys, L)
    C = keys.integer("hyper_connection.count")
    hc_rank, cd = _shape(gguf, "blk.0.hc_attn_down.weight", 2)
    _agree("tensor blk.0.hc_attn_down.weight differs from the residual streams in its width", cd, C * D)
    _agree(
        "tensor blk.0.hc_attn_down.weight differs from key hyper_connection.low_rank in its rank",
        hc_rank,
        keys.integer("hyper_connection.low_rank", "hyper_connection.lowrank", default=hc_rank),
    )
    routers = {_shape(gguf, f"blk.{i}.ffn_gate_inp.weight", 2)[0]: i for i in range(L)}
    if len(routers) > 1:
        raise ModelError(
            "layers disagree on the number of experts (rows of ffn_gate_inp.weight)",
            found=", ".join(f"{e} in layer {i}" for e, i in routers.items()),
            needed="one number",
        )
    E = next(iter(routers))
    _agree("key expert_count differs from the router's rows", keys.integer("expert_count", default=E), E)
    merged = gguf.tensors.get("blk.0.ffn_gate_up_exps.weight")
    F = (
        merged.shape[1] // 2
        if merged is not None and len(merged.shape) == 3
        else _shape(gguf, "blk.0.ffn_gate_exps.weight", 3)[1]
    )
    stated = keys.integer("expert_feed_forward_length", default=F)
    _agree("key expert_feed_forward_length differs from the rows of ffn_gate_exps", stated, F)
    K = keys.integer("expert_used_count")
    if K > E:
        raise ModelError(
            "more experts per token than experts", found=f"{K} by key {PREFIX}expert_used_count", needed=f"<= {E}"
        )
    if K > 126:
        raise ModelError(
            "too many experts per token for the exact combine",
            found=f"{K} by key {PREFIX}expert_used_count",
            needed="<= 126",
        )
    H, Hkv, dh = (
        keys.integer("attention.head_count"),
        keys.integer("attention.head_count_kv"),
        keys.integer("attention.key_length"),
    )
    stated = keys.integer("attention.value_length", default=dh)
    _agree("key attention.value_length differs from attention.key_length", stated, dh)
    if H % Hkv:
        raise ModelError(
            "query heads are no multiple of KV heads",
            found=f"{H} and {Hkv} by keys {PREFIX}attention.head_count and .head_count_kv",
            needed="a whole ratio",
        )
    rotary = keys.integer("rope.dimension_count", default=dh)
    block = _block_cells(keys, kinds)
    budget = keys.integer("attention.indexer.top_k", default=0, least=0) if block else 0
    indexer_dim = keys.integer("attention.indexer.key_length", default=0, least=0)
    if block and (budget < block or budget % block or indexer_dim < rotary):
        raise ModelError(
            f"keys {PREFIX}attention.indexer.* do not fit together",
            found=f"budget {budget}, block {block}, key length {indexer_dim}, rotary {rotary}",
            needed="budget a multiple of the block, keys at least as long as the rotated part",
        )
    if rotary % 2 or rotary > dh:
        raise ModelError(f"key {PREFIX}rope.dimension_count is unusable", found=rotary, needed=f"even and <= {dh}")
    if (size := keys.integer("ssm.state_size")) % 4:
        raise ModelError(f"key {PREFIX}ssm.state_size is unusable", found=size, needed="a multiple of 4")
    value_heads = keys.integer("ssm.time_step_rank")
    inner = keys.integer("ssm.inner_size")
    if inner % value_heads or value_heads % keys.integer("ssm.group_count"):
        raise ModelError(
            f"keys {PREFIX}ssm.* of the GDN heads do not fit together",
            found=f"inner size {inner}, {value_heads} value heads, {keys.integer('ssm.group_count')} key heads",
            needed="whole ratios",
        )
    return Geometry(
        architecture="qwen4exp",
        L=L,
        D=D,
        V=V,
        trained_context=keys.integer("context_length"),
        rms_eps=keys.real("attention.layer_norm_rms_epsilon"),
        C=C,
        hc_rank=hc_rank,
        kinds=kinds,
        H=H,
        Hkv=Hkv,
        dh=dh,
        rotary_dims=rotary,
        rope_base=keys.real("rope.freq_base"),
        indexer_heads=keys.integer("attention.indexer.head_count", default=0, least=0),
        indexer_dim=indexer_dim,
        budget_cells=budget,
        block_cells=block,
        gdn_key_heads=keys.integer("ssm.group_count"),
        gdn_value_heads=value_heads,
        gdn_key_dim=keys.integer("ssm.state_size"),
        gdn_value_dim=inner // value_heads,
        gdn_conv_taps=keys.integer("ssm.conv_kernel", least=2),
        E=E,
        K=K,
        F=F,
        shared_width=_shape(gguf, "blk.0.ffn_gate_shexp.weight", 2)[0],
        router_scale=keys.real("expert_weights_scale", default=1.0),
        ngram=_ngram(gguf, keys),
        mtp_layers=mtp_layers,
    )
