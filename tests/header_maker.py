"""Writes header-only GGUF models: whole headers of real geometry in front of sparse, empty data.

A file has the size of a real one and takes no room on disk: the data section is a hole. Type maps are drawn from the
sets that each release uses, so that totals match the published sizes.
"""

from __future__ import annotations

import struct
from functools import cache
from pathlib import Path

from strata.pack.formats import by_name
from tests.releases import MODULI, MULTIPLIERS, RELEASES, Shape, expert_types, type_bytes

ALIGNMENT = 32
U32, I32, F32, BOOL, STRING, ARRAY, U64 = 4, 5, 6, 7, 8, 9, 10



def tensor_list(s: Shape, dense: dict[str, tuple[str, ...]], experts: tuple[tuple[str, str], ...], table: str):
    """[(name, GGUF ne, type)] in file order, the n-gram table last."""

    def pick(key: str, l: int = 0) -> str:
        return dense[key][l % len(dense[key])]

    hc = pick("hc")
    out = [
        ("token_embd.weight", (s.D, s.V), pick("embed")),
        ("output.weight", (s.D, s.V), pick("head")),
        ("output_hc_norm.weight", (s.CD,), "F32"),
        ("output_hc_down.weight", (s.CD, s.rank), hc),
        ("output_hc_up.weight", (s.rank, s.CD), hc),
    ]
    inner, channels = s.Hv * s.dk, 2 * s.Hk * s.dk + s.Hv * s.dk
    for l in range(s.L):
        b = f"blk.{l}."
        for x in ("attn", "ffn"):
            out += [
                (f"{b}hc_{x}_norm.weight", (s.CD,), "F32"),
                (f"{b}hc_{x}_down.weight", (s.CD, s.rank), hc),
                (f"{b}hc_{x}_up.weight", (s.rank, s.CD), hc),
                (f"{b}hc_{x}_inject.weight", (s.CD, s.C), "BF16"),
            ]
        if l % s.period != s.period - 1:
            out += [
                (b + "attn_qkv.weight", (s.D, channels), pick("qkv", l)),
                (b + "attn_gate.weight", (s.D, inner), pick("gate", l)),
                (b + "ssm_alpha.weight", (s.D, s.Hv), pick("alpha")),
                (b + "ssm_beta.weight", (s.D, s.Hv), pick("alpha")),
                (b + "ssm_a", (s.Hv,), "F32"),
                (b + "ssm_dt.bias", (s.Hv,), "F32"),
                (b + "ssm_conv1d.weight", (s.taps, channels), "F32"),
                (b + "ssm_norm.weight", (s.dk,), "F32"),
                (b + "ssm_out.weight", (inner, s.D), pick("out", l)),
            ]
        else:
            turn = l // s.period
            out += [
                (b + "attn_q.weight", (s.D, 2 * s.H * s.dh), pick("q", turn)),
                (b + "attn_k.weight", (s.D, s.Hkv * s.dh), pick("k", turn)),
                (b + "attn_v.weight", (s.D, s.Hkv * s.dh), pick("v", turn)),
                (b + "attn_output.weight", (s.H * s.dh, s.D), pick("o", turn)),
                (b + "attn_q_norm.weight", (s.dh,), "F32"),
                (b + "attn_k_norm.weight", (s.dh,), "F32"),
                (b + "indexer.q_proj.weight", (s.D, s.Hi * s.di), pick("indexer")),
                (b + "indexer.k_proj.weight", (s.D, s.di), pick("indexer")),
                (b + "indexer.q_norm.weight", (s.di,), "F32"),
                (b + "indexer.k_norm.weight", (s.di,), "F32"),
            ]
        gate_up, down = experts[l % len(experts)]
        out += [
            (b + "ffn_gate_inp.weight", (s.D, s.E), pick("router")),
            (b + "ffn_gate_inp_shexp.weight", (s.D,), "BF16"),
            (b + "ffn_gate_exps.weight", (s.D, s.F, s.E), gate_up),
            (b + "ffn_up_exps.weight", (s.D, s.F, s.E), gate_up),
            (b + "ffn_down_exps.weight", (s.F, s.D, s.E), down),
            (b + "ffn_gate_shexp.weight", (s.D, s.shared), pick("shared_up", l)),
            (b + "ffn_up_shexp.weight", (s.D, s.shared), pick("shared_up", l)),
            (b + "ffn_down_shexp.weight", (s.shared, s.D), pick("shared_down", l)),
        ]
        if l == 1:
            width = len(MODULI) * s.row_width
            out += [
                (b + "ple_key.weight", (width, s.CD), pick("ple_key")),
                (b + "ple_value.weight", (width, s.D), pick("ple_value")),
                *((b + f"ple_norm_{n}.weight", (s.CD,), "F32") for n in ("key", "query", "conv")),
                (b + "ple_conv1d.weight", (s.taps, s.CD), "F16"),
            ]
    return [*out, ("per_layer_token_embd.weight", (s.row_width, s.table_rows), table)]


def _string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def _value(kind: int, value) -> bytes:
    if kind == STRING:
        return _string(value)
    return struct.pack({U32: "<I", I32: "<i", F32: "<f", BOOL: "<?", U64: "<Q"}[kind], value)


def _key(name: str, kind: int, value) -> bytes:
    return _string(name) + struct.pack("<I", kind) + _value(kind, value)


def _array(name: str, kind: int, values) -> bytes:
    body = b"".join(_value(kind, v) for v in values)
    return _string(name) + struct.pack("<IIQ", ARRAY, kind, len(values)) + body


@cache
def _vocabulary(V: int) -> tuple[bytes, int]:
    """Tokenizer keys of a vocabulary of V made-up tokens, and how many keys they are."""
    tokens = [b"t%06d" % i for i in range(V)]
    merges = [b"t%06d t%06d" % (i, i + 1) for i in range(max(V - 733, 1))]
    keys = [
        _key("tokenizer.ggml.model", STRING, "gpt2"),
        _key("tokenizer.ggml.pre", STRING, "qwen35"),
        _array("tokenizer.ggml.tokens", STRING, tokens),
        _array("tokenizer.ggml.merges", STRING, merges),
        _string("tokenizer.ggml.token_type") + struct.pack("<IIQ", ARRAY, I32, V) + struct.pack("<i", 1) * V,
    ]
    return b"".join(keys), len(keys)


def _metadata(s: Shape, name: str) -> list[bytes]:
    p = "qwen4exp."
    offsets = [sum(MODULI[:i]) for i in range(len(MODULI))]
    numbers = {
        "block_count": s.L,
        "context_length": s.context,
        "embedding_length": s.D,
        "attention.head_count": s.H,
        "attention.head_count_kv": s.Hkv,
        "attention.key_length": s.dh,
        "attention.value_length": s.dh,
        "rope.dimension_count": s.rotary,
        "ssm.conv_kernel": s.taps,
        "ssm.state_size": s.dk,
        "ssm.group_count": s.Hk,
        "ssm.time_step_rank": s.Hv,
        "ssm.inner_size": s.Hv * s.dk,
        "full_attention_interval": s.period,
        "expert_count": s.E,
        "expert_used_count": s.K,
        "expert_feed_forward_length": s.F,
        "expert_shared_feed_forward_length": s.shared,
        "hyper_connection.count": s.C,
        "hyper_connection.low_rank": s.rank,
        "attention.indexer.head_count": s.Hi,
        "attention.indexer.key_length": s.di,
        "attention.indexer.top_k": s.budget,
        "ple.ngram_size": 3,
        "ple.heads_per_ngram": len(MODULI) // 2,
        "embedding_length_per_layer_input": s.row_width,
        "ple.conv_kernel": 4,
        "ple.eos_token_id": 248044,
        "ple.image_token_id": 248056,
    }
    ratios = [s.block if l % s.period == s.period - 1 else 0 for l in range(s.L)]
    return [
        _key("general.architecture", STRING, "qwen4exp"),
        _key("general.name", STRING, name),
        *(_key(p + k, U32, v) for k, v in numbers.items()),
        _key(p + "attention.layer_norm_rms_epsilon", F32, 1e-6),
        _key(p + "rope.freq_base", F32, 1e7),
        _array(p + "rope.dimension_sections", I32, [11, 11, 10, 0]),
        _array(p + "attention.compress_ratios", I32, ratios),
        _array(p + "ple.layers", I32, [1]),
        _array(p + "ple.layer_multipliers", U64, MULTIPLIERS),
        _array(p + "ple.head_vocab_sizes", U64, MODULI),
        _array(p + "ple.head_offsets", U64, offsets),
    ]


def _write_shard(path: Path, keys: list[bytes], n_keys: int, tensors) -> None:
    infos, offset = [], 0
    for name, ne, kind in tensors:
        infos.append(_string(name) + struct.pack(f"<I{len(ne)}QIQ", len(ne), *ne, by_name(kind).ggml_id, offset))
        rows = 1
        for n in ne[1:]:
            rows *= n
        offset += -(-type_bytes(kind, ne[0], rows) // ALIGNMENT) * ALIGNMENT
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), n_keys) + b"".join(keys) + b"".join(infos)
    start = -(-len(head) // ALIGNMENT) * ALIGNMENT
    with path.open("wb") as file:
        file.write(head)
        file.truncate(start + offset)


def make_model(
    folder: Path,
    name: str,
    shape: Shape,
    dense,
    experts,
    table: str = "IQ4_NL",
    shards: int = 2,
    vocabulary: bool = True,
) -> Path:
    """Write a model of `shards` sparse files (2: table alone in the last; 4: metadata alone in the first, layer 11
    cut in two); returns the first one's path."""
    tensors = tensor_list(shape, dense, experts, table)
    trunk, last = tensors[:-1], tensors[-1:]
    if shards == 2:
        parts = [trunk, last]
    elif shards == 4:
        cut = next(i for i, t in enumerate(trunk) if t[0] == "blk.11.ffn_down_exps.weight")
        third = cut + (len(trunk) - cut) // 2
        parts = [[], trunk[:cut], trunk[cut:third], trunk[third:] + last]
    else:
        raise ValueError("2 or 4 shards")
    words, n_words = _vocabulary(shape.V) if vocabulary else (b"", 0)
    for i, part in enumerate(parts):
        keys = [
            _key("split.no", U32, i),
            _key("split.count", U32, shards),
            _key("split.tensors.count", I32, len(tensors)),
        ]
        if i == 0:
            keys += _metadata(shape, name)
        n_keys = len(keys) + (n_words if i == 0 else 0)
        _write_shard(
            folder / f"{name}-{i + 1:05d}-of-{shards:05d}.gguf", [*keys, words] if i == 0 else keys, n_keys, part
        )
    return folder / f"{name}-00001-of-{shards:05d}.gguf"


def make_release(folder: Path, name: str, vocabulary: bool = True) -> Path:
    """Write a released size (a key of RELEASES) as sparse files; returns the first shard's path."""
    r = RELEASES[name]
    return make_model(folder, f"Flash-Next-{name}", r.shape, r.dense, expert_types(name), r.table, r.shards, vocabulary)


class FactsByRelease(dict):
    """Facts by release, with a short text for failing examples."""

    def __repr__(self) -> str:
        return f"facts of {list(self)}"
