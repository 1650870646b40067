"""The model as ops: trunk (a window or a prefill chunk of T rows), head and commit. Formulas: `docs/architecture.md`.

The list is the same on every backend. Buffers of a layer that commit still needs (`gdn.N.*`, `ngram.conv_rows`) have
their own names; all others are reused from layer to layer.
"""

from __future__ import annotations

from collections.abc import Mapping

from strata.base.geometry import Geometry
from strata.base.program import Buffer, Op, Program


class Builder:
    """Collects ops and declares their buffers on first use."""

    def __init__(self, name: str, T: int, g: Geometry):
        self.name, self.T, self.g = name, T, g
        self.ops: list[Op] = []
        self.buffers: dict[str, Buffer] = {}

    def buffer(self, name: str, shape: tuple[int, ...], dtype: str = "float32", role: str = "scratch") -> str:
        self.buffers[name] = Buffer(name, shape, dtype, role)
        return name

    def rows(self, name: str, width: int, dtype: str = "float32") -> str:
        return self.buffer(name, (self.T, width), dtype)

    def state(self, buffer: Buffer) -> str:
        self.buffers[buffer.name] = buffer
        return buffer.name

    def op(self, kind: str, layer: int, consts: Mapping[str, int | float] | None = None, **buffers: str) -> None:
        self.ops.append(Op(kind, layer, buffers, consts or {}))

    def linear(self, layer: int, x: str, rows: int = 1, **outputs: tuple[str, str]) -> None:
        """Products of one input with several matrices: output port -> (matrix, output buffer).

        rows: each row of x counts as that many rows of its width divided by as much.
        """
        ports = {"x": x}
        for i, (matrix, y) in enumerate(outputs.values()):
            ports[f"w{i}"], ports[f"y{i}"] = matrix, y
        self.op("linear", layer, {"n": len(outputs), "rows": rows}, **ports)

    def done(self) -> Program:
        return Program(self.name, self.T, tuple(self.ops), self.buffers)


def kv_buffers(prefix: str, g: Geometry, context: int, kv: str) -> list[Buffer]:
    """K and V cells of one attention layer."""
    out = []
    for part in ("k", "v"):
        name = f"{prefix}.{part}"
        if kv == "f16":
            out.append(Buffer(name, (context, g.Hkv, g.dh), "float16", "cells"))
        else:
            out.append(Buffer(name, (context, g.Hkv, g.dh), "int8", "cells"))
            out.append(Buffer(name + "_scales", (context, g.Hkv, g.dh // 64), "float16", "cells"))
    return out


def state_buffers(g: Geometry, context: int, kv: str) -> list[Buffer]:
    """Everything a session holds. context in cells (a multiple of 256), kv is "f16" or "int8"."""
    out = []
    for layer in g.gdn_layers:
        out.append(
            Buffer(f"gdn.{layer}.state", (g.gdn_value_heads, g.gdn_key_dim, g.gdn_value_dim), "float32", "recurrent")
        )
        out.append(Buffer(f"gdn.{layer}.conv_history", (g.gdn_conv_taps - 1, g.gdn_channels), "float32", "recurrent"))
    if g.ngram:
        out.append(Buffer("ngram.history", (g.ngram.history_rows, g.CD), "float32", "recurrent"))
    for layer in g.qsa_layers:
        out += kv_buffers(f"qsa.{layer}", g, context, kv)
        if g.block_cells:
            blocks = context // g.block_cells
            out.append(Buffer(f"qsa.{layer}.block_keys", (blocks, g.indexer_dim), "float32", "cells"))
            out.append(Buffer(f"qsa.{layer}.raw_keys", (g.raw_ring_rows, g.indexer_dim), "float32", "recurrent"))
    return out


def hc_read(b: Builder, layer: int, prefix: str, inject: bool = True, streams: str = "streams") -> None:
    """u, a = HCread(streams): the mixed input of a branch and how strongly its output returns to each stream."""
    g = b.g
    b.op(
        "hc_norm",
        layer,
        {"C": g.C, "D": g.D, "eps": g.rms_eps, "head": int(b.name == "head")},
        x=streams,
        w=f"{prefix}_norm.weight",
        y=b.rows("hc.normed", g.CD),
    )
    outputs = {"down": (f"{prefix}_down.weight", b.rows("hc.low", g.hc_rank))}
    if inject:
        outputs["inject"] = (f"{prefix}_inject.weight", b.rows("hc.inject", g.C))
    b.linear(layer, "hc.normed", **outputs)
    b.op("hc_squeeze", layer, {"C": g.C, "n": g.hc_rank}, x="hc.low")
    b.linear(layer, "hc.low", up=(f"{prefix}_up.weight", b.rows("hc.gate", g.CD)))
    ports = {"normed": "hc.normed", "gate": "hc.gate", "u": b.rows("u", g.D)}
    if inject:
        ports |= {"inject": "hc.inject", "a": b.rows("a", g.C)}
    b.op("hc_mix", layer, {"C": g.C, "D": g.D}, **ports)


def hc_add(b: Builder, layer: int, streams: str = "streams") -> None:
    b.op("hc_add", layer, {"C": b.g.C, "D": b.g.D}, x=streams, y="y", a="a")


def _gdn_ports(b: Builder, layer: int, advance: bool) -> dict[str, str]:
    """Rows that commit replays: kept per layer for windows, shared when the state advances in place."""
    g = b.g
    own = "gdn" if advance else f"gdn.{layer}"
    return {
        "qkv": b.rows(f"{own}.qkv", g.gdn_channels),
        "conv": b.rows(f"{own}.conv", g.gdn_channels),
        "decay": b.rows(f"{own}.decay", g.gdn_value_heads),
        "beta": b.rows(f"{own}.beta", g.gdn_value_heads),
    }


def _gdn_consts(g: Geometry) -> dict[str, int]:
    return {
        "Hk": g.gdn_key_heads,
        "Hv": g.gdn_value_heads,
        "dk": g.gdn_key_dim,
        "dv": g.gdn_value_dim,
        "taps": g.gdn_conv_taps,
        "channels": g.gdn_channels,
    }


def _gdn(b: Builder, layer: int, state: dict[str, Buffer], advance: bool) -> None:
    g, w = b.g, f"blk.{layer}."
    rows = _gdn_ports(b, layer, advance)
    b.linear(
        layer,
        "u",
        qkv=(w + "attn_qkv.weight", rows["qkv"]),
        gate=(w + "attn_gate.weight", b.rows("gdn.z", g.gdn_value_width)),
        alpha=(w + "ssm_alpha.weight", rows["decay"]),
        beta=(w + "ssm_beta.weight", rows["beta"]),
    )
    consts = _gdn_consts(g) | {"advance": int(advance)}
    history = b.state(state[f"gdn.{layer}.conv_history"])
    b.op("gdn_conv", layer, consts, qkv=rows["qkv"], conv=rows["conv"], w=w + "ssm_conv1d.weight", history=history)
    b.op(
        "gdn_heads",
        layer,
        consts | {"eps": g.rms_eps},
        conv=rows["conv"],
        decay=rows["decay"],
        beta=rows["beta"],
        z="gdn.z",
        a=w + "ssm_a",
        dt=w + "ssm_dt.bias",
        norm=w + "ssm_norm.weight",
        state=b.state(state[f"gdn.{layer}.state"]),
        y=b.rows("gdn.out", g.gdn_value_width),
    )
    b.linear(layer, "gdn.out", out=(w + "ssm_out.weight", b.rows("y", g.D)))


def kv_ports(b: Builder, prefix: str, state: dict[str, Buffer]) -> dict[str, str]:
    """Ports of the K and V cells called `prefix`.k and so on."""
    names = (f"{prefix}.{part}" for part in ("k", "v", "k_scales", "v_scales"))
    return {n.rsplit(".", 1)[1]: b.state(state[n]) for n in names if n in state}


def _qsa(b: Builder, layer: int, state: dict[str, Buffer]) -> None:
    g, w = b.g, f"blk.{layer}."
    outputs = {
        "q": (w + "attn_q.weight", b.rows("qsa.q_gate", 2 * g.H * g.dh)),
        "k": (w + "attn_k.weight", b.rows("qsa.k", g.Hkv * g.dh)),
        "v": (w + "attn_v.weight", b.rows("qsa.v", g.Hkv * g.dh)),
    }
    if g.block_cells:
        outputs["iq"] = (w + "indexer.q_proj.weight", b.rows("qsa.iq", g.indexer_heads * g.indexer_dim))
        outputs["ik"] = (w + "indexer.k_proj.weight", b.rows("qsa.ik", g.indexer_dim))
    b.linear(layer, "u", **outputs)
    kv = kv_ports(b, f"qsa.{layer}", state)
    heads = {"H": g.H, "Hkv": g.Hkv, "dh": g.dh, "rotary": g.rotary_dims, "eps": g.rms_eps}
    index = {"heads": g.indexer_heads, "dim": g.indexer_dim, "block": g.block_cells, "budget": g.budget_blocks}
    common = {"pos": b.buffer("pos", (1,), "int64", "io"), "rope": "rope"}
    b.op(
        "qsa_append",
        layer,
        heads,
        q="qsa.q_gate",
        k_in="qsa.k",
        v_in="qsa.v",
        q_norm=w + "attn_q_norm.weight",
        k_norm=w + "attn_k_norm.weight",
        q_out=b.rows("qsa.q", g.H * g.dh),
        **common,
        **kv,
    )
    selected = {}
    if g.block_cells:
        keys = b.state(state[f"qsa.{layer}.block_keys"])
        selected = {"blocks": b.rows("qsa.blocks", g.budget_blocks, "int32")}
        b.op(
            "qsa_index",
            layer,
            index | {"rotary": g.rotary_dims, "eps": g.rms_eps, "ring": g.raw_ring_rows},
            iq="qsa.iq",
            ik="qsa.ik",
            q_norm=w + "indexer.q_norm.weight",
            k_norm=w + "indexer.k_norm.weight",
            keys=keys,
            raw=b.state(state[f"qsa.{layer}.raw_keys"]),
            **common,
        )
        b.op("qsa_select", layer, index, iq="qsa.iq", keys=keys, pos="pos", **selected)
    b.op(
        "qsa_attend",
        layer,
        heads | {"block": g.block_cells, "budget": g.budget_blocks},
        q="qsa.q",
        q_gate="qsa.q_gate",
        y=b.rows("qsa.out", g.H * g.dh),
        pos="pos",
        **kv,
        **selected,
    )
    b.linear(layer, "qsa.out", out=(w + "attn_output.weight", b.rows("y", g.D)))


def moe(b: Builder, layer: int, w: str) -> None:
    """Router, routed and shared experts of the tensors called w + name: u -> y."""
    g = b.g
    b.linear(
        layer,
        "u",
        router=(w + "ffn_gate_inp.weight", b.rows("moe.logits", g.E)),
        shared=(w + "ffn_gate_inp_shexp.weight", b.rows("moe.shared_gate", 1)),
    )
    ids, weights = b.rows("moe.ids", g.K, "int32"), b.rows("moe.weights", g.K)
    b.op("router", layer, {"E": g.E, "K": g.K, "scale": g.router_scale}, logits="moe.logits", ids=ids, weights=weights)
    b.op(
        "experts",
        layer,
        {"E": g.E, "K": g.K, "F": g.F, "D": g.D, "shared_width": g.shared_width},
        x="u",
        ids=ids,
        weights=weights,
        shared_gate="moe.shared_gate",
        shared_gate_w=w + "ffn_gate_shexp.weight",
        shared_up_w=w + "ffn_up_shexp.weight",
        shared_down_w=w + "ffn_down_shexp.weight",
        y=b.rows("y", g.D),
    )


def _ngram(b: Builder, layer: int, state: dict[str, Buffer], advance: bool) -> None:
    g, n, w = b.g, b.g.ngram, f"blk.{layer}."
    rows = b.buffer("ngram.rows", (b.T, n.width), "float32", "io")
    b.op("ngram_wait", layer, {}, ticket=b.buffer("ngram.ticket", (2,), "int64", "io"))
    b.linear(
        layer,
        rows,
        key=(w + "ple_key.weight", b.rows("ngram.key", g.CD)),
        value=(w + "ple_value.weight", b.rows("ngram.value", g.D)),
    )
    b.op(
        "ngram_mix",
        layer,
        {"C": g.C, "D": g.D, "eps": g.rms_eps, "taps": n.conv_taps, "dilation": n.dilation, "advance": int(advance)},
        x="streams",
        key="ngram.key",
        value="ngram.value",
        norm_key=w + "ple_norm_key.weight",
        norm_query=w + "ple_norm_query.weight",
        norm_conv=w + "ple_norm_conv.weight",
        conv=w + "ple_conv1d.weight",
        history=b.state(state["ngram.history"]),
        conv_rows=b.rows("ngram.conv_rows", g.CD),
    )


def trunk_program(g: Geometry, T: int, context: int, kv: str, *, advance: bool = False) -> Program:
    """Embedding and all layers over T rows at position `pos`; leaves the pre-mixer streams (T, C, D) in `streams`.

    advance=False: a window; recurrent state is read, commit advances it. advance=True: a prefill chunk; recurrent state
    advances in place and nothing is left for commit.
    """
    b = Builder("prefill" if advance else "trunk", T, g)
    state = {s.name: s for s in state_buffers(g, context, kv)}
    b.buffer("rope", (context, g.rotary_dims), "float32", "table")
    tokens = b.buffer("tokens", (T,), "int32", "io")
    b.op("embed", -1, {"C": g.C, "D": g.D, "V": g.V}, tokens=tokens, w="token_embd.weight", y=b.rows("streams", g.CD))
    for layer, kind in enumerate(g.kinds):
        if g.ngram and g.ngram.layer == layer:
            _ngram(b, layer, state, advance)
        hc_read(b, layer, f"blk.{layer}.hc_attn")
        if kind == "gdn":
            _gdn(b, layer, state, advance)
        else:
            _qsa(b, layer, state)
        hc_add(b, layer)
        hc_read(b, layer, f"blk.{layer}.hc_ffn")
        moe(b, layer, f"blk.{layer}.")
        hc_add(b, layer)
    return b.done()


def head_program(g: Geometry, T: int) -> Program:
    """Logits (T, V) of rows `head_row` .. of the streams that the last trunk left."""
    b = Builder("head", T, g)
    b.rows("streams", g.CD)
    b.buffer("head_row", (1,), "int64", "io")
    hc_read(b, -1, "output_hc", inject=False)
    b.linear(-1, "u", logits=("output.weight", b.rows("logits", g.V)))
    return b.done()


def commit_program(g: Geometry, T: int, context: int, kv: str) -> Program:
    """Advance recurrent state by the first `n_keep` <= T rows of the last window."""
    b = Builder("commit", T, g)
    state = {s.name: s for s in state_buffers(g, context, kv)}
    keep = b.buffer("n_keep", (1,), "int64", "io")
    if g.ngram:
        rows = b.rows("ngram.conv_rows", g.CD)
        consts = {"width": g.CD, "rows": g.ngram.history_rows}
        b.op("history_commit", g.ngram.layer, consts, history=b.state(state["ngram.history"]), rows=rows, n_keep=keep)
    for layer in g.gdn_layers:
        rows = _gdn_ports(b, layer, advance=False)
        consts = _gdn_consts(g)
        b.op(
            "gdn_commit",
            layer,
            consts,
            state=b.state(state[f"gdn.{layer}.state"]),
            conv=rows["conv"],
            decay=rows["decay"],
            beta=rows["beta"],
            n_keep=keep,
        )
        history = b.state(state[f"gdn.{layer}.conv_history"])
        consts = {"width": g.gdn_channels, "rows": g.gdn_conv_taps - 1}
        b.op("history_commit", layer, consts, history=history, rows=rows["qkv"], n_keep=keep)
    return b.done()
