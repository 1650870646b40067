"""How ops of a prefill chunk become launches: window kernels where they take many rows, wide ones for the rest."""

from __future__ import annotations

from collections.abc import Callable

from strata.base.program import Op
from strata.gpu import gated_delta, gated_delta_wide, hyper_connection, ngram_mix, ops, qsa_wide
from strata.gpu.activations import squeeze
from strata.gpu.chunk_lower import ChunkLowering
from strata.gpu.chunk_products import lower_experts, lower_linear


def _hc_norm(c: ChunkLowering, op: Op) -> None:
    k, more, added = op.consts, {}, c.added_before
    if added is not None:
        c.added_before, more = None, {"y": c.at(added, "y"), "a": c.at(added, "a")}
    c.add(hyper_connection.hc_norm(c.at(op, "x"), c.vector(op, "w"), c.at(op, "y"), c.T, k["C"], k["D"], k["eps"],
                                   c.error, c.where(op), **more))  # fmt: skip


def _hc_add(c: ChunkLowering, op: Op) -> None:
    k, following = op.consts, c.program.ops[c.index + 1 :][:1]
    if following and following[0].kind == "hc_norm" and following[0].buffers["x"] == op.buffers["x"]:
        c.added_before = op
        return
    c.add(hyper_connection.hc_add(c.at(op, "x"), c.at(op, "y"), c.at(op, "a"), c.T, k["C"], k["D"]))


def _hc_squeeze(c: ChunkLowering, op: Op) -> None:
    c.add(squeeze(c.at(op, "x"), c.T, op.consts["n"], op.consts["C"], c.error, c.where(op)))


def _hc_mix(c: ChunkLowering, op: Op) -> None:
    k = op.consts
    c.add(hyper_connection.hc_mix(c.at(op, "normed"), c.at(op, "gate"), c.at(op, "u"), c.T, k["C"], k["D"], c.error,
                                  c.where(op), inject=c.at(op, "inject"), a=c.at(op, "a")))  # fmt: skip


def _gdn_conv(c: ChunkLowering, op: Op) -> None:
    k, history = op.consts, c.slot(op, "history")
    c.add(gated_delta_wide.gdn_wide_conv(c.at(op, "qkv"), c.at(op, "conv"), c.vector(op, "w", transposed=True), history,
                                         c.T, k["channels"], k["taps"], c.error, c.where(op)))  # fmt: skip
    c.add(gated_delta.history_commit(history, c.at(op, "qkv"), c.memory.address("rows"), k["taps"] - 1, k["channels"]))


def _gdn_heads(c: ChunkLowering, op: Op) -> None:
    k = op.consts
    rows = [c.at(op, port) for port in ("conv", "decay", "beta", "z")]
    weights = [c.vector(op, port) for port in ("a", "dt", "norm")]
    c.add(gated_delta_wide.gdn_wide_heads(*rows, *weights, c.slot(op, "state"), c.at(op, "y"), c.T, k["Hk"], k["Hv"],
                                          k["dk"], k["dv"], k["channels"], k["eps"], c.error, c.where(op)))  # fmt: skip


def _qsa_select(c: ChunkLowering, op: Op) -> None:
    k = op.consts
    scores = c.scratch("qsa.scores", qsa_wide.score_bytes(c.T, c.context, k["block"]))
    c.add(qsa_wide.qsa_wide_select(c.at(op, "iq"), c.slot(op, "keys"), c.at(op, "pos"), c.at(op, "blocks"), scores, c.T,
                                   k["heads"], k["dim"], k["block"], k["budget"], c.context, c.error,
                                   c.where(op)))  # fmt: skip


def _qsa_attend(c: ChunkLowering, op: Op) -> None:
    k = op.consts
    c.add(qsa_wide.qsa_wide_attend(c.at(op, "q"), c.at(op, "q_gate"), c.at(op, "y"), c.at(op, "pos"), c.kv_slots(op),
                                   c.at(op, "blocks"), c.T, k["H"], k["Hkv"], k["dh"], k["block"], k["budget"],
                                   c.error, c.where(op)))  # fmt: skip


def _ngram_wait(c: ChunkLowering, op: Op) -> None:
    """Nothing: the runner uploads the rows before this op."""


def _ngram_mix(c: ChunkLowering, op: Op) -> None:
    k = op.consts
    w = ngram_mix.NgramWeights(*(c.vector(op, n) for n in ("norm_key", "norm_query", "norm_conv")),
                               c.vector(op, "conv", transposed=True))  # fmt: skip
    gates = c.scratch("ngram.gates", 4 * c.T * k["C"])
    c.add(ngram_mix.ngram_mix(c.at(op, "x"), c.at(op, "key"), c.at(op, "value"), w, c.slot(op, "history"),
                              c.at(op, "conv_rows"), gates, c.memory.address("rows"), c.T, k["C"], k["D"], k["taps"],
                              k["dilation"], k["eps"], c.error, c.where(op)))  # fmt: skip


CHUNK_LOWERING: dict[str, Callable[[ChunkLowering, Op], None]] = {
    **{kind: ops.LOWERING[kind] for kind in ("embed", "qsa_append", "qsa_index", "router")},
    "ngram_wait": _ngram_wait,
    "ngram_mix": _ngram_mix,
    "hc_norm": _hc_norm,
    "hc_squeeze": _hc_squeeze,
    "hc_mix": _hc_mix,
    "hc_add": _hc_add,
    "linear": lower_linear,
    "gdn_conv": _gdn_conv,
    "gdn_heads": _gdn_heads,
    "qsa_select": _qsa_select,
    "qsa_attend": _qsa_attend,
    "experts": lower_experts,
}
