"""Load-time self-test: every compiled product kernel against the numpy arithmetic, before a file's weights meet it.

A compiler or processor that does not keep to the arithmetic would change answers silently. Two rows of random blocks,
with scales that reach into subnormal products, cost about a millisecond a format.
"""

from __future__ import annotations

import numpy as np

from strata.base import arithmetic
from strata.base.compiled import CFunction, c_function
from strata.base.errors import SelfTestFailed
from strata.cpu.gemv.table import MOST_ROWS, kernel, layout_of, wide_kernel
from strata.cpu.machine_code import call6, call7, call8, exact_floats, i64_view, set_float_control
from strata.pack import lanes
from strata.pack.formats import BlockFormat

ROWS, VALUES, SHORT_VALUES = 2, 512, 320
F16_OFFSETS = {
    "Q4_1": (0, 2), "Q5_1": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
    "MXFP4": (), "NVFP4": (), "IQ1_M": (),
}  # fmt: skip
"""Where a block holds its float16 scales; other block formats have one at 0."""


@c_function(1)
def _call7(a):
    """Call a kernel with subnormals on. Record: function and its seven arguments."""
    p = i64_view(a, 8)
    before = exact_floats()
    call7(p[0], p[1], p[2], p[3], p[4], p[5], p[6], p[7])
    set_float_control(before)


@c_function(1)
def _call8(a):
    p = i64_view(a, 9)
    before = exact_floats()
    call8(p[0], p[1], p[2], p[3], p[4], p[5], p[6], p[7], p[8])
    set_float_control(before)


@c_function(1)
def _call6(a):
    p = i64_view(a, 7)
    before = exact_floats()
    call6(p[0], p[1], p[2], p[3], p[4], p[5], p[6])
    set_float_control(before)


def _call(caller: CFunction, *words: int) -> None:
    record = np.array(words, np.int64)
    caller(record.ctypes.data)


def random_blocks(format: BlockFormat, rng: np.random.Generator) -> np.ndarray:
    """(ROWS, row_bytes) uint8: random blocks; row 0 with usual scales, row 1 with the smallest subnormal ones."""
    if format.activation == "float":
        values = rng.standard_normal((ROWS, VALUES)).astype(np.float32)
        values[1] *= np.float32(2.0**-126) if format.name != "F16" else np.float32(2.0**-20)
        if format.name == "F32":
            return values.view(np.uint8)
        if format.name == "F16":
            return values.astype(np.float16).view(np.uint8)
        return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    blocks = VALUES // format.block_values
    raw = rng.integers(0, 256, (ROWS, blocks, format.block_bytes), dtype=np.uint8)
    scales = (rng.random((ROWS, blocks)) * 0.01 + 0.001).astype(np.float16)
    scales[1] = np.float16(6e-8)
    for at in F16_OFFSETS.get(format.name, (0,)):
        raw[..., at : at + 2] = scales[..., None].view(np.uint8)
    if format.name == "MXFP4":
        raw[0, :, 0], raw[1, :, 0] = 120, rng.integers(0, 2, blocks)
    if format.name == "NVFP4":
        raw[..., :4] &= 0x7F
        raw[1, :, :4] = 1
    if format.name == "IQ1_M":  # the scale's four nibbles are the top ones of bytes 49, 51, 53 and 55, lowest first
        raw[0, :, 55] &= 0x3F
        raw[1, :, 49:56:2] &= 0x0F
        raw[1, :, 49] |= 0x10
    return raw.reshape(ROWS, -1)


def check_format(format: BlockFormat, tier: int | None = None) -> None:
    """Raise SelfTestFailed, naming format, rows and tier, unless its kernels for 1..4 rows give the canonical bits."""
    rng = np.random.default_rng(format.ggml_id)
    raw = random_blocks(format, rng)
    x = rng.standard_normal((MOST_ROWS, VALUES)).astype(np.float32)
    x[1] *= np.float32(2.0**-108)  # just above what quantises to zero
    x[2, ::7] = 0
    layout = layout_of(format, tier)
    if layout.group:
        wanted = np.stack([_product(format, raw, row, layout.group) for row in x])
    else:
        wanted = np.stack([_float(format, raw, row) for row in x])
    for R in range(1, MOST_ROWS + 1):
        _compare(_run(format, raw, x[:R], tier), wanted[:R], f"the {format.name} kernel for {R} rows (tier {tier})")
    _check_wide(format, raw, x, wanted, tier)


def _check_wide(format: BlockFormat, raw: np.ndarray, x: np.ndarray, wanted: np.ndarray, tier: int | None) -> None:
    """The same of the kernel for any number of rows, if the format has one: it takes four, then two rows at a time.
    Some of the values are for the code for short rows of float formats, and for the steps of records that end early."""
    if wide_kernel(format, tier) is None:
        return
    name = f"the {format.name} kernel for any number of rows (tier {tier})"
    more = [*range(MOST_ROWS), 0, 1]
    _compare(_run(format, raw, x[more], tier, wide=True), wanted[more], name)
    if SHORT_VALUES % format.block_values == 0:
        x, some = x[:, :SHORT_VALUES], np.ascontiguousarray(raw[:, : format.row_bytes(SHORT_VALUES)])
        group = layout_of(format, tier).group
        wanted = np.stack([_product(format, some, row, group) if group else _float(format, some, row) for row in x])
        _compare(_run(format, raw, x, tier, wide=True), wanted, name)


def _compare(found: np.ndarray, wanted: np.ndarray, what: str) -> None:
    same = (found.view(np.uint32) == wanted.view(np.uint32)) | (np.isnan(found) & np.isnan(wanted))
    if not same.all():
        row, column = (int(i) for i in np.argwhere(~same)[0])
        raise SelfTestFailed(
            f"{what} does not compute the canonical arithmetic",
            found=f"{found[row, column]!r} at activation row {row}, weight row {column}",
            needed=repr(wanted[row, column]),
            advice="Set STRATA_CPU_TIER to a lower tier and report this machine.",
        )


def _product(format: BlockFormat, raw: np.ndarray, x: np.ndarray, group: int) -> np.ndarray:
    codes, scales, _ = arithmetic.quantise(x, group)
    return lanes.gemv(format, raw, codes, scales)


def _float(format: BlockFormat, raw: np.ndarray, x: np.ndarray) -> np.ndarray:
    return arithmetic.dot_float(format.dequantise(raw), x)


def _run(format: BlockFormat, raw: np.ndarray, x: np.ndarray, tier: int | None, wide: bool = False) -> np.ndarray:
    layout, (R, K) = layout_of(format, tier), x.shape
    x = np.ascontiguousarray(x)
    records = x
    if layout.group:
        n = layout.record_bytes(K)
        area = np.zeros(R * n + 64, np.uint8)
        records = area[-area.ctypes.data % 64 :]
        bad = np.zeros(1, np.int64)
        words = (x.ctypes.data, K, R, 4 * K, records.ctypes.data, bad.ctypes.data)
        _call(_call6, layout.quantise_address, *words)
    out = np.zeros((R, ROWS), np.float32)
    words = [raw.ctypes.data, raw.shape[1], ROWS, records.ctypes.data, K, out.ctypes.data, 4 * ROWS]
    if wide:
        _call(_call8, wide_kernel(format, tier).function.address, *words[:5], R, *words[5:])
    else:
        _call(_call7, kernel(format, R, tier), *words)
    return out
