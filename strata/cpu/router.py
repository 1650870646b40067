"""Router: the K largest logits and the softmax over them.

Ids by descending logit, ties to the lowest id. w_j = exp(l_j - l_0) / sum, the sum ascending over j; then times the
router scale, if it is not 1. Equal to softmax over all experts, top K, renormalised.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from strata.base.compiled import chunk
from strata.base.program import NOT_FINITE
from strata.cpu.error_word import report
from strata.cpu.float_bits import exp32
from strata.cpu.float_sums import all_finite
from strata.cpu.machine_code import f32_view, i32_view, i64_view, ldf32
from strata.cpu.walker import float_argument

if TYPE_CHECKING:
    from strata.base.program import Op
    from strata.cpu.lower import Lowering

F = np.float32


@chunk
def router(a, t, T):
    """One row. Record: logits, ids, weights, E, K, router scale (a float32 argument), error, layer."""
    p = i64_view(a, 8)
    E, K = p[3], p[4]
    scale = ldf32(a + 8 * 5)
    logits = f32_view(p[0] + t * E * 4, E)
    ids, weights = i32_view(p[1] + t * K * 4, K), f32_view(p[2] + t * K * 4, K)
    if not all_finite(logits):
        report(p[6], NOT_FINITE, p[7], t)
        return
    found = 0
    for e in range(E):
        x = logits[e]
        if found == K and not x > weights[K - 1]:
            continue
        at = found if found < K else K - 1
        while at > 0 and x > weights[at - 1]:
            weights[at], ids[at] = weights[at - 1], ids[at - 1]
            at -= 1
        weights[at], ids[at] = x, e
        found = min(found + 1, K)
    top, total = weights[0], F(0)
    for j in range(K):
        weights[j] = exp32(weights[j] - top)
        total = total + weights[j]
    for j in range(K):
        weights[j] = weights[j] / total
        if scale != F(1):
            weights[j] = weights[j] * scale


def lower_router(c: Lowering, op: Op) -> None:
    c.parallel(c.T, router, c.at(op, "logits"), c.at(op, "ids"), c.at(op, "weights"), op.consts["E"], op.consts["K"],
               float_argument(op.consts["scale"]), c.error, op.layer)  # fmt: skip
