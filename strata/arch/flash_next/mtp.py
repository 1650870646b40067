"""The draft layer (MTP) as programs: one attention layer with its own experts, dense attention, no n-grams.

Cell i pairs the trunk's streams X_i (before the final mixer) with the token at i + 1, uses rotary position i and
predicts the token at i + 2:

    e  = fc_embedding rms(embedding(t_{i+1}); w_e)
    H  = rms over all C*D values of X_i, times w_h
    X'[s] = fc_hidden H[s] + e
    X'' = one QSA layer of X', dense over the last `WINDOW_CELLS` cells from `mtp.first` on
    logits = output HCread(X'')

X'' is the next X when drafts are chained. `append` stops after K and V are stored; `step` runs one row to its logits.
Tensor names carry the prefix `mtp.` whatever file they come from (`strata.pack.mtp_files`).
"""

from __future__ import annotations

from strata.arch.flash_next.program import Builder, hc_add, hc_read, kv_buffers, kv_ports, moe
from strata.base.geometry import DRAFT_RING_ROWS, Geometry
from strata.base.program import Buffer, Program

WINDOW_CELLS = 32_768
"""Cells the draft layer attends."""


def draft_state_buffers(g: Geometry, context: int, kv: str) -> list[Buffer]:
    """The draft layer's own K and V cells, and the streams of rows that wait for it."""
    return [*kv_buffers("mtp", g, context, kv), _waiting(g)]


def _waiting(g: Geometry) -> Buffer:
    """Streams of the last rows, by position modulo its length; backends fill it and take `mtp.x` from it."""
    return Buffer("mtp.waiting", (DRAFT_RING_ROWS, g.CD), "float32", "ring")


def _join(b: Builder) -> None:
    """`mtp.streams` (T, C*D) from `mtp.x` (the trunk's or the last draft's streams) and the next tokens."""
    g, layer = b.g, b.g.L
    b.buffer("mtp.x", (b.T, g.CD), "float32", "io")
    b.state(_waiting(g))
    tokens = b.buffer("mtp.tokens", (b.T,), "int32", "io")
    b.op("embed", layer, {"C": 1, "D": g.D, "V": g.V}, tokens=tokens, w="token_embd.weight", y=b.rows("mtp.e", g.D))
    norm = {"C": 1, "eps": g.rms_eps, "head": 0}
    b.op("hc_norm", layer, norm | {"D": g.D}, x="mtp.e", w="mtp.norm_embedding.weight", y="mtp.e")
    b.op("hc_norm", layer, norm | {"D": g.CD}, x="mtp.x", w="mtp.norm_hidden.weight", y=b.rows("mtp.h", g.CD))
    b.linear(layer, "mtp.e", out=("mtp.fc_embedding.weight", b.rows("mtp.e_out", g.D)))
    b.linear(layer, "mtp.h", rows=g.C, out=("mtp.fc_hidden.weight", b.rows("mtp.streams", g.CD)))
    b.buffer("mtp.one", (b.T, g.C), "float32", "table")
    b.op("hc_add", layer, {"C": g.C, "D": g.D}, x="mtp.streams", y="mtp.e_out", a="mtp.one")


def _kv(b: Builder, state: dict[str, Buffer], outputs: dict[str, tuple[str, str]], q: bool) -> dict[str, str]:
    """Products for K and V (and q), then the append; returns the K and V ports."""
    g, layer = b.g, b.g.L
    hc_read(b, layer, "mtp.hc_attn", streams="mtp.streams")
    b.linear(layer, "u", **outputs)
    kv = kv_ports(b, "mtp", state)
    ports = {"k_in": "qsa.k", "v_in": "qsa.v", "k_norm": "mtp.attn_k_norm.weight", "rope": "rope", **kv}
    if q:
        ports |= {"q": "qsa.q_gate", "q_norm": "mtp.attn_q_norm.weight", "q_out": b.rows("qsa.q", g.H * g.dh)}
    consts = {"H": g.H if q else 0, "Hkv": g.Hkv, "dh": g.dh, "rotary": g.rotary_dims, "eps": g.rms_eps}
    b.op("qsa_append", layer, consts, pos=b.buffer("mtp.pos", (1,), "int64", "io"), **ports)
    return kv


def _kv_outputs(b: Builder) -> dict[str, tuple[str, str]]:
    g = b.g
    return {
        "k": ("mtp.attn_k.weight", b.rows("qsa.k", g.Hkv * g.dh)),
        "v": ("mtp.attn_v.weight", b.rows("qsa.v", g.Hkv * g.dh)),
    }


def _start(name: str, g: Geometry, T: int, context: int, kv: str) -> tuple[Builder, dict[str, Buffer]]:
    b = Builder(name, T, g)
    b.buffer("rope", (context, g.rotary_dims), "float32", "table")
    return b, {s.name: s for s in draft_state_buffers(g, context, kv)}


def append_program(g: Geometry, T: int, context: int, kv: str) -> Program:
    """K and V of T cells from position `mtp.pos` on; nothing else."""
    b, state = _start("mtp_append", g, T, context, kv)
    _join(b)
    _kv(b, state, _kv_outputs(b), q=False)
    return b.done()


def step_program(g: Geometry, context: int, kv: str, V: int) -> Program:
    """One cell to `mtp.logits` (1, V); `mtp.streams` is the next `mtp.x`. V: rows of `mtp.output.weight`."""
    b, state = _start("mtp_step", g, 1, context, kv)
    layer = g.L
    _join(b)
    outputs = {"q": ("mtp.attn_q.weight", b.rows("qsa.q_gate", 2 * g.H * g.dh)), **_kv_outputs(b)}
    kv_names = _kv(b, state, outputs, q=True)
    b.op(
        "qsa_attend",
        layer,
        {"H": g.H, "Hkv": g.Hkv, "dh": g.dh, "block": 0, "budget": WINDOW_CELLS},
        q="qsa.q",
        q_gate="qsa.q_gate",
        y=b.rows("qsa.out", g.H * g.dh),
        pos="mtp.pos",
        first=b.buffer("mtp.first", (1,), "int64", "io"),
        **kv_names,
    )
    b.linear(layer, "qsa.out", out=("mtp.attn_output.weight", b.rows("y", g.D)))
    hc_add(b, layer, streams="mtp.streams")
    hc_read(b, layer, "mtp.hc_ffn", streams="mtp.streams")
    moe(b, layer, "mtp.")
    hc_add(b, layer, streams="mtp.streams")
    hc_read(b, layer, "mtp.output_hc", streams="mtp.streams", inject=False)
    b.linear(layer, "u", logits=("mtp.output.weight", b.rows("mtp.logits", V)))
    return b.done()
