"""Which function lowers which kind of op, and these functions: ports and constants of an op to its launchers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from strata.base.program import Op
from strata.gpu import gated_delta, hc_ops, ngram_mix, qsa_append, qsa_attend, qsa_select
from strata.gpu import router as routers
from strata.gpu.embed import embed, tables
from strata.gpu.error_word import where
from strata.gpu.experts_op import begins_routing, lower_experts, multiply
from strata.gpu.float_gemv import FloatMatrix, float_gemv
from strata.gpu.gemv.mixed import KINDS, MOST_MATRICES, Part, mixed
from strata.gpu.lower import Lowering
from strata.gpu.qsa_append import KvSlots
from strata.gpu.route import ARRIVED_BYTES, Choice, route, routes
from strata.gpu.weights import Matrix

MIXED_ROWS = 8
"""Most rows for which matrices of different formats that share their input are one launch; 0: never."""
NGRAM_AHEAD = True
"""Whether a window waits for its n-gram rows, and multiplies them, beside the layers before the n-gram block."""
NGRAM_LIMIT_NS = 30_000_000_000
"""How long a window waits for its n-gram rows: far above any disk that still works."""


LogitsOf = Callable[[Lowering, Op], int]


def logits_of(c: Lowering, op: Op) -> int:
    """Address of the logits (T, E) of a router op."""
    return c.at(op, "logits")


def _embed(c: Lowering, op: Op) -> None:
    k, w = op.consts, c.weights.rows(op.buffers["w"])
    grid, signs = 0, 0
    parts = tables(w.format)
    if parts is not None:
        grid, signs = (c.weights.array(f"{w.format.name}.{n}", "tables", p) for n, p in zip("gs", parts, strict=True))
    c.add(embed(c.at(op, "tokens"), w.address, w.format, w.row_bytes, grid, signs, c.at(op, "y"), c.T, k["C"], k["D"],
                w.rows, c.error, c.where(op)))  # fmt: skip


def _mixes(c: Lowering, op: Op, matrices: list[Matrix]) -> bool:
    """Whether an op's products go out as one launch."""
    if not c.fuse or c.T * op.consts["rows"] > MIXED_ROWS or not 2 <= len(matrices) <= MOST_MATRICES:
        return False
    following = c.next_op()
    if following is not None and following.kind == "hc_squeeze":
        return False  # a float product does that too
    return all(m.format.name in KINDS for m in matrices) and any(m.format.group for m in matrices)


def linear(c: Lowering, op: Op, logits_of: LogitsOf = logits_of) -> None:
    """logits_of: where the logits lie that the router behind it chooses from, where both are one launch."""
    if c.norm_before is not None:
        hc_ops.norm_with_product(c, op)
        return
    if begins_routing(c, op):
        c.hold()
    T, x = c.T * op.consts["rows"], op.buffers["x"]
    floats: list[FloatMatrix] = []
    matrices = [c.weights.matrix(op.buffers[f"w{i}"]) for i in range(op.consts["n"])]
    columns = matrices[0].columns
    if _routes(c, op, matrices, logits_of):
        return
    for group in sorted({m.format.group for m in matrices} - {0}):
        c.activations(op, x, columns, group, T)
    if _mixes(c, op, matrices):
        parts = [Part(m.format, m.address, m.rows, c.at(op, f"y{i}")) for i, m in enumerate(matrices)]
        parts.sort(key=lambda p: (p.format.group > 0, p.rows))
        groups = {p.format.group for p in parts} - {0}
        made = {group: c.activations(op, x, columns, group, T) for group in groups}
        c.add(mixed(c.memory.address(x), T, columns, made, parts))
        return
    for i, m in enumerate(matrices):
        y = c.at(op, f"y{i}")
        if m.format.group:
            c.branch()
            multiply(c, op, m, x, T, y)
        else:
            following = c.next_op()
            squeezed = (
                following is not None
                and following.kind == "hc_squeeze"
                and following.buffers["x"] == op.buffers[f"y{i}"]
            )
            squeezed = squeezed and not floats and T == c.T
            c.squeezed_before = c.squeezed_before or squeezed
            floats.append(FloatMatrix(m.format.name, m.address, m.rows, y, following.consts["C"] if squeezed else 0))
    if floats:
        c.branch()
        where = c.where_next() if floats[0].squeeze else c.where(op)
        branch, c.branch_before = c.branch_before, None
        c.add(float_gemv(c.memory.address(x), T, columns, floats, c.error, where, branch))
    c.join()


def _routes(c: Lowering, op: Op, matrices: list[Matrix], logits_of: LogitsOf) -> bool:
    """Adds an op's products and what the router behind it does, if they are one launch."""
    following = c.next_op()
    if following is None or following.kind != "router" or following.buffers["logits"] != op.buffers["y0"]:
        return False
    arrived, k = c.scratch("router.arrived", ARRIVED_BYTES), following.consts
    formats, D = [m.format.name for m in matrices], matrices[0].columns
    if op.consts["rows"] != 1 or not routes(c.T, D, formats, k["E"], k["K"]):
        return False
    products = [FloatMatrix(m.format.name, m.address, m.rows, c.at(op, f"y{i}")) for i, m in enumerate(matrices)]
    places = (logits_of(c, following), c.at(following, "ids"), c.at(following, "weights"))
    c.routed_index = c.index + 1
    choice = Choice(*places, k["K"], k["scale"], arrived)
    c.add(route(c.at(op, "x"), D, products, choice, c.error, c.where_next()))
    return True


def _gdn_conv(c: Lowering, op: Op) -> None:
    k, following = op.consts, c.next_op()
    if following is not None and following.kind == "gdn_heads" and not k["advance"] and k["Hv"] >= k["Hk"]:
        c.convolution_before = op
        return
    shape = (c.T, k["channels"], k["taps"], bool(k["advance"]))
    places = (c.at(op, "qkv"), c.at(op, "conv"), c.vector(op, "w", transposed=True), c.slot(op, "history"))
    c.add(gated_delta.gdn_conv(*places, *shape, c.error, c.where(op)))


def _gdn_heads(c: Lowering, op: Op) -> None:
    k = op.consts
    shape = (c.T, k["Hk"], k["Hv"], k["dk"], k["dv"], k["channels"])
    rows = [c.at(op, port) for port in ("conv", "decay", "beta", "z")]
    weights = [c.vector(op, port) for port in ("a", "dt", "norm")]
    places = (*rows, *weights, c.slot(op, "state"), c.at(op, "y"))
    if c.convolution_before is None:
        c.add(gated_delta.gdn_heads(*places, *shape, bool(k["advance"]), k["eps"], c.error, c.where(op)))
        return
    conv, c.convolution_before = c.convolution_before, None
    inputs = (c.at(conv, "qkv"), c.vector(conv, "w", transposed=True), c.slot(conv, "history"), k["taps"])
    y, width = op.buffers["y"], k["Hv"] * k["dv"]
    groups = sorted(c.groups_of(y, width) & set(gated_delta.quantises(c.T, k["Hv"], k["dv"])))
    quantised = tuple(c.place_activations(y, width, group, c.T) for group in groups)
    arrived = c.scratch("gdn.arrived", gated_delta.arrived_bytes(k["Hv"], k["dv"]))
    c.add(gated_delta.gdn_window(*inputs, *places, *shape, k["eps"], c.error, c.where(op), quantised,
                                 arrived))  # fmt: skip


def _gdn_commit(c: Lowering, op: Op) -> None:
    k = op.consts
    c.add(gated_delta.gdn_commit(c.at(op, "conv"), c.at(op, "decay"), c.at(op, "beta"), c.slot(op, "state"),
                                 c.at(op, "n_keep"), k["Hk"], k["Hv"], k["dk"], k["dv"], k["channels"]))  # fmt: skip


def _history_commit(c: Lowering, op: Op) -> None:
    k = op.consts
    c.add(
        gated_delta.history_commit(c.slot(op, "history"), c.at(op, "rows"), c.at(op, "n_keep"), k["rows"], k["width"])
    )


def _cells(c: Lowering, op: Op) -> KvSlots:
    return KvSlots(c.slot(op, "k"), c.slot(op, "v"), c.slot(op, "k_scales"), c.slot(op, "v_scales"))


def _append_of(c: Lowering, op: Op) -> qsa_append.Append:
    k = op.consts
    return qsa_append.Append(c.at(op, "q"), c.at(op, "k_in"), c.at(op, "v_in"), c.vector(op, "q_norm"),
                             c.vector(op, "k_norm"), c.at(op, "q_out"), _cells(c, op), k["H"], k["Hkv"], k["dh"],
                             k["rotary"], k["eps"])  # fmt: skip


def _index_of(c: Lowering, op: Op) -> qsa_append.Index:
    k = op.consts
    return qsa_append.Index(c.at(op, "iq"), c.at(op, "ik"), c.vector(op, "q_norm"), c.vector(op, "k_norm"),
                            c.slot(op, "keys"), c.slot(op, "raw"), k["heads"], k["dim"], k["block"], k["ring"],
                            k["rotary"], k["eps"])  # fmt: skip


def _qsa_append(c: Lowering, op: Op) -> None:
    following, a, at = c.next_op(), _append_of(c, op), (c.at(op, "pos"), c.at(op, "rope"), c.T, c.error, c.where(op))
    index = _index_of(c, following) if following is not None and following.kind == "qsa_index" else None
    if index is not None and index.together(c.T):
        c.stored_index = c.index + 1
        c.add(qsa_append.qsa_store(a, index, *at, c.where_next(), _scores_of(c, following, a, index)))
    else:
        c.add(qsa_append.qsa_append(a, *at))


def _scores_of(
    c: Lowering, index_op: Op, append: qsa_append.Append, index: qsa_append.Index
) -> qsa_append.Scores | None:
    """What the op behind the index asks for, if it is scores that the same kernel makes."""
    at = c.index + 2
    op = c.program.ops[at] if at < len(c.program.ops) else None
    if op is None or op.kind != "qsa_select" or not qsa_append.scores_too(append, index, c.T):
        return None
    if any(op.buffers[port] != index_op.buffers[port] for port in ("iq", "keys")):
        return None
    c.scored_index = at
    k = op.consts
    return qsa_append.Scores(_scores(c, op), k["budget"], c.context // k["block"], where(at, op.layer))


def _scores(c: Lowering, op: Op) -> int:
    return c.scratch("qsa.scores", qsa_select.score_bytes(c.T, c.context, op.consts["block"]))


def _qsa_index(c: Lowering, op: Op) -> None:
    if c.stored_index != c.index:
        c.add(qsa_append.qsa_index(_index_of(c, op), c.at(op, "pos"), c.at(op, "rope"), c.T, c.error, c.where(op)))


def _qsa_select(c: Lowering, op: Op) -> None:
    k, scores = op.consts, _scores(c, op)
    if c.scored_index == c.index:
        most = c.context // k["block"]
        c.add(qsa_select.select(scores, c.at(op, "pos"), c.at(op, "blocks"), c.T, k["block"], k["budget"], most))
        return
    c.add(
        qsa_select.qsa_select(
            c.at(op, "iq"),
            c.slot(op, "keys"),
            c.at(op, "pos"),
            c.at(op, "blocks"),
            scores,
            c.T,
            k["heads"],
            k["dim"],
            k["block"],
            k["budget"],
            c.context,
            c.error,
            c.where(op),
        )
    )


def _qsa_attend(c: Lowering, op: Op) -> None:
    k = op.consts
    c.join()
    size = qsa_attend.part_bytes(c.T, k["H"], k["dh"], c.context, k["block"], k["budget"])
    parts = c.scratch("qsa.tiles", size)
    y, width = op.buffers["y"], k["H"] * k["dh"]
    groups = sorted(g for g in c.groups_of(y, width) - {0} if k["dh"] % g == 0) if c.fuse else []
    quantised = tuple(c.place_activations(y, width, g, c.T) for g in groups)
    c.add(
        qsa_attend.qsa_attend(
            c.at(op, "q"),
            c.at(op, "q_gate"),
            c.at(op, "y"),
            (c.at(op, "pos"),),
            _cells(c, op),
            c.at(op, "blocks"),
            c.at(op, "first"),
            parts,
            c.T,
            k["H"],
            k["Hkv"],
            k["dh"],
            k["block"],
            k["budget"],
            c.context,
            c.error,
            c.where(op),
            quantised=quantised,
        )
    )


def router(c: Lowering, op: Op, logits_of: LogitsOf = logits_of) -> None:
    """logits_of: where the logits lie that it chooses from."""
    k = op.consts
    if c.routed_index != c.index:
        places = (logits_of(c, op), c.at(op, "ids"), c.at(op, "weights"))
        c.add(routers.router(*places, c.T, k["E"], k["K"], k["scale"], c.error, c.where(op)))


def _ngram_wait(c: Lowering, op: Op) -> None:
    ticket, staged = c.memory.address("ngram.ticket"), c.memory.address("ngram.staged")
    n = c.T * int(np.prod(c.memory.buffer("ngram.rows").shape[1:]))
    if NGRAM_AHEAD:
        c.go_ahead()
    c.add(ngram_mix.ngram_wait(ticket, staged, c.memory.address("ngram.rows"), n, NGRAM_LIMIT_NS, c.error, c.where(op)))


def _ngram_mix(c: Lowering, op: Op) -> None:
    k = op.consts
    w = ngram_mix.NgramWeights(*(c.vector(op, n) for n in ("norm_key", "norm_query", "norm_conv")),
                               c.vector(op, "conv", transposed=True))  # fmt: skip
    gates = c.scratch("ngram.gates", 4 * c.T * k["C"])
    c.add(c.meet(ngram_mix.ngram_mix(c.at(op, "x"), c.at(op, "key"), c.at(op, "value"), w, c.slot(op, "history"),
                                     c.at(op, "conv_rows"), gates, 0, c.T, k["C"], k["D"], k["taps"], k["dilation"],
                                     k["eps"], c.error, c.where(op))))  # fmt: skip


LOWERING: dict[str, Callable[[Lowering, Op], None]] = {
    "embed": _embed,
    "ngram_wait": _ngram_wait,
    "ngram_mix": _ngram_mix,
    "hc_norm": hc_ops.hc_norm,
    "hc_squeeze": hc_ops.hc_squeeze,
    "hc_mix": hc_ops.hc_mix,
    "hc_add": hc_ops.hc_add,
    "linear": linear,
    "gdn_conv": _gdn_conv,
    "gdn_heads": _gdn_heads,
    "gdn_commit": _gdn_commit,
    "history_commit": _history_commit,
    "qsa_append": _qsa_append,
    "qsa_index": _qsa_index,
    "qsa_select": _qsa_select,
    "qsa_attend": _qsa_attend,
    "router": router,
    "experts": lower_experts,
}
