"""Lowering of hyper-connections: norm and addition, squeeze, mix, and what a narrow window does in fewer kernels."""

from __future__ import annotations

from typing import Any

from strata.base.geometry import WINDOW_ROWS
from strata.base.program import Op
from strata.gpu import hyper_connection
from strata.gpu.activations import quantise, squeeze
from strata.gpu.float_gemv import Branch, FloatMatrix, takes_branch
from strata.gpu.lower import Lowering
from strata.gpu.norm_down import MOST_STREAMS, fits, norm_down, norm_down_cluster
from strata.gpu.weights import Matrix

NORM_DOWN_ROWS = 2
"""Most rows of a window in which the norm is done by the product behind it; 0: never. Its blocks all norm every row, so
what that costs grows with the rows, while the kernel that it saves costs the same for all."""

NEAR_ROWS = 1
"""Most rows of a window, 0 or 1, in which that product has its weights in registers before its inputs are there, on
devices whose kernels start early, which are those with clusters."""

CLUSTERED_ROWS = tuple(range(3, WINDOW_ROWS + 1))
"""Rows of windows in which clusters of blocks do the same, each block for a quarter of the lanes, where the device has
clusters and the matrices are BF16."""


def _clustered(c: Lowering, streams: int, matrices: list[Matrix]) -> bool:
    fit = streams == MOST_STREAMS and all(m.format.name == "BF16" for m in matrices)
    return fit and c.T in CLUSTERED_ROWS and c.memory.clusters


def _reads_normed(c: Lowering, norm: Op) -> bool:
    """Whether norm, product, squeeze and the next product follow each other in the shape that `norm_down` takes."""
    k, at, ops = norm.consts, c.index, c.program.ops
    if not c.fuse or k["head"] or c.T > WINDOW_ROWS or at + 3 >= len(ops):
        return False
    down, squeezed, up = ops[at + 1 : at + 4]
    if (down.kind, squeezed.kind, up.kind) != ("linear", "hc_squeeze", "linear"):
        return False
    names = (down.buffers["x"], down.buffers["y0"], squeezed.buffers["x"], up.buffers["x"])
    low = down.buffers["y0"]
    if names != (norm.buffers["y"], low, low, low) or down.consts["rows"] != 1 or up.consts["n"] != 1:
        return False
    if not fits(k["C"], k["D"], down.consts["n"]):
        return False
    read = [c.weights.matrix(down.buffers[f"w{i}"]) for i in range(down.consts["n"])]
    if c.T > NORM_DOWN_ROWS and not _clustered(c, k["C"], read):
        return False
    following = c.weights.matrix(up.buffers["w0"])
    return not any(m.format.group for m in read) and takes_branch(following.format.name, following.columns)


def hc_norm(c: Lowering, op: Op) -> None:
    k = op.consts
    if _reads_normed(c, op):
        c.norm_before = op, c.where(op)
        return
    more = {"first": c.memory.address("head_row")} if k["head"] else {}
    if c.added_before is not None:
        added, c.added_before = c.added_before, None
        more = {"y": c.at(added, "y"), "a": c.at(added, "a")}
    c.add(hyper_connection.hc_norm(c.at(op, "x"), c.vector(op, "w"), c.at(op, "y"), c.T, k["C"], k["D"], k["eps"],
                                   c.error, c.where(op), **more))  # fmt: skip


def norm_with_product(c: Lowering, op: Op) -> None:
    """The product op together with the norm before it; an addition before that is stored by the next product."""
    assert c.norm_before is not None
    (norm, where), c.norm_before = c.norm_before, None
    k, x, more = norm.consts, c.at(norm, "x"), dict[str, Any]()
    if c.added_before is not None:
        added, c.added_before = c.added_before, None
        more = {"y": c.at(added, "y"), "a": c.at(added, "a")}
        c.branch_before = Branch(x, more["y"], more["a"], k["D"])
    matrices = [c.weights.matrix(op.buffers[f"w{i}"]) for i in range(op.consts["n"])]
    floats = [
        FloatMatrix(m.format.name, m.address, m.rows, c.at(op, f"y{i}"), k["C"] if i == 0 else 0)
        for i, m in enumerate(matrices)
    ]
    c.squeezed_before = True
    launcher = norm_down_cluster if _clustered(c, k["C"], matrices) else norm_down
    if launcher is norm_down:  # what is in registers before the wait is a gain where kernels start early
        more["near"] = c.T <= NEAR_ROWS and c.memory.clusters
    c.add(launcher(x, c.vector(norm, "w"), c.at(norm, "y"), c.T, k["C"], k["D"], k["eps"], floats, c.error, where,
                   c.where_next(), **more))  # fmt: skip


def hc_add(c: Lowering, op: Op) -> None:
    k, following = op.consts, c.next_op()
    fits_norm = following is not None and following.kind == "hc_norm" and following.buffers["x"] == op.buffers["x"]
    if fits_norm and not following.consts["head"] and all(following.consts[n] == k[n] for n in "CD"):
        c.added_before = op
        return
    c.add(hyper_connection.hc_add(c.at(op, "x"), c.at(op, "y"), c.at(op, "a"), c.T, k["C"], k["D"]))


def hc_squeeze(c: Lowering, op: Op) -> None:
    x, C, n = op.buffers["x"], op.consts["C"], op.consts["n"]
    groups = c.groups_of(x, n) if c.fuse else {0}
    if c.squeezed_before:
        c.squeezed_before = False  # whoever needs it quantised does that himself
    elif len(groups) == 1 and 0 not in groups:
        made = c.place_activations(x, n, groups.pop(), c.T)
        c.add(quantise(c.memory.address(x), made, c.error, c.where(op), squeeze_by=C))
    else:
        c.add(squeeze(c.memory.address(x), c.T, n, C, c.error, c.where(op)))


def hc_mix(c: Lowering, op: Op) -> None:
    k, u = op.consts, op.buffers["u"]
    groups = c.groups_of(u, k["D"]) - {0} if c.fuse else set()
    quantised = tuple(c.place_activations(u, k["D"], g, c.T) for g in sorted(groups))
    c.add(
        hyper_connection.hc_mix(
            c.at(op, "normed"),
            c.at(op, "gate"),
            c.at(op, "u"),
            c.T,
            k["C"],
            k["D"],
            c.error,
            c.where(op),
            inject=c.at(op, "inject"),
            a=c.at(op, "a"),
            quantised=quantised,
        )
    )
