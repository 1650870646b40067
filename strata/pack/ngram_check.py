"""Whether an n-gram table's tensor and its geometry belong together."""

from __future__ import annotations

from strata.base.errors import ModelError
from strata.base.geometry import NgramGeometry
from strata.pack.gguf_file import AGAIN, TensorInfo

ORDERS = (2, 3)


def check_table(tensor: TensorInfo, g: NgramGeometry, file_name: str) -> None:
    """ModelError naming the first thing in which the table's tensor and the geometry do not fit each other."""

    def fits(condition: bool, what: str, found: object, needed: object) -> None:
        if not condition:
            raise ModelError(
                f"{file_name}: tensor '{tensor.name}' and its keys do not fit together: {what}",
                found=found,
                needed=needed,
                advice=AGAIN,
            )

    fits(len(tensor.shape) == 2, "shape", tensor.shape, "(rows, row width)")
    fits(tensor.shape[1] == g.row_width, "row width", tensor.shape[1], g.row_width)
    fits(tensor.format.name != "I8", "row type", "I8", "a floating-point or quantised type")
    fits(g.order in ORDERS, "n-gram order", g.order, " or ".join(map(str, ORDERS)))
    fits(len(g.multipliers) == g.order, "hash multipliers", len(g.multipliers), g.order)
    fits(all(0 < m < 2**63 for m in g.multipliers), "hash multipliers", g.multipliers, "above 0 and below 2^63")
    fits(g.heads > 0, "heads", g.heads, "at least 1")
    fits(len(g.moduli) == g.heads, "hash moduli", len(g.moduli), g.heads)
    fits(len(g.offsets) == g.heads, "hash offsets", len(g.offsets), g.heads)
    fits(min(g.moduli) > 0, "hash moduli", g.moduli, "above 0")
    fits(min(g.offsets) >= 0, "hash offsets", g.offsets, "0 or more")
    end = max(m + o for m, o in zip(g.moduli, g.offsets, strict=True))
    fits(max(end, sum(g.moduli)) <= tensor.shape[0], "rows", tensor.shape[0], f"at least {max(end, sum(g.moduli))}")
    fits(0 <= g.reset_token <= (2**63 - 1) // max(g.multipliers), "reset token", g.reset_token, "one the hash can take")
