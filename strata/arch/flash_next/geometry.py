"""Geometry of a `qwen4exp` file: from its keys, checked against its tensors. Derived numbers are derived."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from strata.base.errors import ModelError
from strata.base.geometry import Geometry, NgramGeometry
from strata.pack.gguf_file import GgufFile

log = logging.getLogger("strata")
PREFIX = "qwen4exp."


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
                raise ModelError(f"key {PREFIX}{name} is unusable", found=repr(value), needed=f"an integer >= {least}")
            return value
        if default is None:
            raise ModelError(f"key {PREFIX}{names[0]} is missing", needed="an integer", advice="Is the file complete?")
        return default

    def real(self, name: str, default: float | None = None) -> float:
        value = self.raw(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0 or value == float("inf"):
            raise ModelError(f"key {PREFIX}{name} is unusable", found=repr(value), needed="a positive number")
        return float(value)

    def integers(self, name: str, length: int | None = None) -> tuple[int, ...] | None:
        """An integer array of any width as Python ints, or None when the key is absent."""
        value = self.raw(name)
        if value is None:
            return None
        if isinstance(value, str) or not (isinstance(value, Sequence) or hasattr(value, "tolist")):
            raise ModelError(f"key {PREFIX}{name} is unusable", found=repr(value), needed="an array of integers")
        items = value.tolist() if hasattr(value, "tolist") else list(value)
        if not all(isinstance(v, int) for v in items) or (length is not None and len(items) != length):
            what = "an array of integers" if length is None else f"{length} integers"
            raise ModelError(f"key {PREFIX}{name} is unusable", found=f"{len(items)} values", needed=what)
        return tuple(int(v) for v in items)


def _shape(gguf: GgufFile, name: str, dims: int) -> tuple[int, ...]:
    info = gguf.tensors.get(name)
    if info is None:
        raise ModelError(f"tensor {name} is missing", advice="Is this the first shard, and are all shards beside it?")
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
    recurrent = keys.raw("attention.recurrent_layers")
    if recurrent is not None:
        said = ["gdn" if r else "qsa" for r in list(recurrent)[:L]]
        source = "attention.recurrent_layers"
    else:
        period = keys.integer("full_attention_interval", default=0, least=0)
        said = ["qsa" if period and layer % period == period - 1 else "gdn" for layer in range(L)] if period else kinds
        source = "full_attention_interval"
    for layer, (a, b) in enumerate(zip(kinds, said, strict=False)):
        if a != b:
            raise ModelError(f"layer {layer} differs from key {PREFIX}{source}", found=f"{a} tensors", needed=b)
    return tuple(kinds)


def _block_cells(keys: _Keys, kinds: tuple[str, ...]) -> int:
    """Cells of an indexer block; 0 = dense attention everywhere."""
    ratios = keys.integers("attention.compress_ratios")
    if ratios is None:
        return keys.integer("attention.indexer.block_size", default=0, least=0)
    if len(ratios) < len(kinds):
        raise ModelError(f"key {PREFIX}attention.compress_ratios is short", found=len(ratios), needed=len(kinds))
    on_qsa = {ratios[i] for i, kind in enumerate(kinds) if kind == "qsa"}
    if len(on_qsa) > 1 or min(on_qsa, default=0) < 0:
        raise ModelError("QSA layers differ in their block length", found=sorted(on_qsa), needed="one length for all")
    cells = on_qsa.pop() if on_qsa else 0
    if cells == 0 and "qsa" in kinds:
        log.warning("compress_ratios are 0 on every attention layer: the indexer is off, attention is dense")
    return cells


def _ngram(gguf: GgufFile, keys: _Keys) -> NgramGeometry | None:
    layers = keys.integers("ple.layers")
    if not layers:
        return None
    if len(layers) != 1:
        raise ModelError(f"key {PREFIX}ple.layers", found=f"{len(layers)} layers", needed="one n-gram layer")
    order, per_order = keys.integer("ple.ngram_size", least=2), keys.integer("ple.heads_per_ngram")
    heads = (order - 1) * per_order
    if order != 3:
        raise ModelError("n-gram order", found=order, needed="3 (bigrams and trigrams)")
    table_rows, width = _shape(gguf, "per_layer_token_embd.weight", 2)
    arrays = {}
    for name, length in (("layer_multipliers", order), ("head_vocab_sizes", heads), ("head_offsets", heads)):
        values = keys.integers(f"ple.{name}", length)
        if values is None:
            raise ModelError(f"key {PREFIX}ple.{name} is missing", needed=f"{length} integers")
        arrays[name] = values
    ends = [o + m for o, m in zip(arrays["head_offsets"], arrays["head_vocab_sizes"], strict=True)]
    if min(arrays["head_vocab_sizes"]) < 1 or min(arrays["head_offsets"]) < 0 or max(ends) > table_rows:
        raise ModelError(
            "n-gram heads address rows outside per_layer_token_embd.weight", found=max(ends), needed=table_rows
        )
    stated = keys.integer("embedding_length_per_layer_input", default=width)
    if stated != width:
        raise ModelError("per_layer_token_embd.weight row width", found=width, needed=stated)
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
    naming the key or tensor, what was found and what is needed.
    """
    keys = _Keys(gguf)
    mtp_layers = keys.integer("nextn_predict_layers", default=0, least=0)
    L = keys.integer("block_count") - mtp_layers
    if L < 1:
        raise ModelError("the file has no decoder layers", found=L, needed=">= 1")
    V, D = _shape(gguf, "token_embd.weight", 2)
    _agree("token_embd.weight width against key embedding_length", D, keys.integer("embedding_length"))
    kinds = _layer_kinds(gguf, keys, L)
    C = keys.integer("hyper_connection.count")
    hc_rank, cd = _shape(gguf, "blk.0.hc_attn_down.weight", 2)
    _agree("blk.0.hc_attn_down.weight width", cd, C * D)
    _agree(
        "hyper-connection rank",
        hc_rank,
        keys.integer("hyper_connection.low_rank", "hyper_connection.lowrank", default=hc_rank),
    )
    routers = {_shape(gguf, f"blk.{i}.ffn_gate_inp.weight", 2)[0]: i for i in range(L)}
    if len(routers) > 1:
        raise ModelError(
            "layers disagree on the number of experts",
            found={f"layer {i}": e for e, i in routers.items()},
            needed="one number",
        )
    E = next(iter(routers))
    _agree("expert_count against the router's rows", keys.integer("expert_count", default=E), E)
    merged = gguf.tensors.get("blk.0.ffn_gate_up_exps.weight")
    F = (
        merged.shape[1] // 2
        if merged is not None and len(merged.shape) == 3
        else _shape(gguf, "blk.0.ffn_gate_exps.weight", 3)[1]
    )
    _agree("expert_feed_forward_length against ffn_gate_exps", keys.integer("expert_feed_forward_length", default=F), F)
    K = keys.integer("expert_used_count")
    if K > E:
        raise ModelError("more experts per token than experts", found=K, needed=f"<= {E}")
    if K > 126:
        raise ModelError("too many experts per token for the exact combine", found=K, needed="<= 126")
    H, Hkv, dh = (
        keys.integer("attention.head_count"),
        keys.integer("attention.head_count_kv"),
        keys.integer("attention.key_length"),
    )
    _agree("attention.value_length against key_length", keys.integer("attention.value_length", default=dh), dh)
    if H % Hkv:
        raise ModelError("query heads are no multiple of KV heads", found=f"{H} and {Hkv}", needed="a whole ratio")
    rotary = keys.integer("rope.dimension_count", default=dh)
    block = _block_cells(keys, kinds)
    budget = keys.integer("attention.indexer.top_k", default=0, least=0) if block else 0
    indexer_dim = keys.integer("attention.indexer.key_length", default=0, least=0)
    if block and (budget < block or budget % block or indexer_dim < rotary):
        raise ModelError(
            "the indexer's numbers do not fit together",
            found=f"budget {budget}, block {block}, key length {indexer_dim}, rotary {rotary}",
            needed="budget a multiple of the block, keys at least as long as the rotated part",
        )
    if rotary % 2 or rotary > dh:
        raise ModelError("rope.dimension_count", found=rotary, needed=f"even and <= {dh}")
    if keys.integer("ssm.state_size") % 4:
        raise ModelError("GDN key heads", found=f"{keys.integer('ssm.state_size')} values", needed="a multiple of 4")
    value_heads = keys.integer("ssm.time_step_rank")
    inner = keys.integer("ssm.inner_size")
    if inner % value_heads or value_heads % keys.integer("ssm.group_count"):
        raise ModelError("GDN heads", found=f"inner {inner}, {value_heads} value heads", needed="whole ratios")
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
