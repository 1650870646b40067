"""Bytes of session state, from the geometry alone. The same shapes that a backend allocates."""

from __future__ import annotations

from strata.base.errors import need
from strata.base.geometry import CELL_ROWS, Geometry
from strata.base.numbers import one_of, shown

KV_FORMATS = ("f16", "int8")

KV_GROUP = 64
"""Values of the int8 format that share one f16 scale."""

F16_CONTEXT = 8192
"""Largest context that the automatic choice keeps in f16."""


def round_context(context: int) -> int:
    """Cells allocated for a context: whole cells of the prefill grid."""
    need(context > 0, "context must be positive", found=context, needed="> 0")
    return -(-context // CELL_ROWS) * CELL_ROWS


def kv_format(kv: str, context: int, head_size: int = KV_GROUP) -> str:
    """The format that `kv` ("auto", "f16", "int8") means at this context and size of attention heads."""
    need(one_of(kv, ("auto", *KV_FORMATS)), "kv is unknown", found=shown(kv), needed="auto, f16 or int8")
    whole = head_size % KV_GROUP == 0
    need(kv != "int8" or whole, "the int8 KV format needs whole groups of 64 values", found=f"heads of {head_size}",
         needed="a multiple of 64", advice='Use kv="f16" or "auto".')  # fmt: skip
    return kv if kv != "auto" else "f16" if context <= F16_CONTEXT or not whole else "int8"


def kv_cell_bytes(g: Geometry, kv: str) -> int:
    """Bytes of one token in one attention layer: K and V of every KV head."""
    values = g.Hkv * g.dh
    if kv == "f16":
        return 2 * values * 2
    return 2 * (values + values // KV_GROUP * 2)


def kv_bytes(g: Geometry, context: int, kv: str) -> int:
    """KV cache of one session over all attention layers; `context` in cells."""
    return len(g.qsa_layers) * context * kv_cell_bytes(g, kv)


def pooled_key_bytes(g: Geometry, context: int) -> int:
    """Pooled indexer keys of one session: one float32 key of indexer_dim per block of cells, one key head.

    The queries have several indexer heads; the keys have one. Pricing keys by query heads would be four times too much.
    """
    if not g.block_cells:
        return 0
    return len(g.qsa_layers) * (context // g.block_cells) * g.indexer_dim * 4


def gdn_state_bytes(g: Geometry) -> int:
    """Recurrence and convolution history of all GDN layers, float32."""
    state = g.gdn_value_heads * g.gdn_key_dim * g.gdn_value_dim
    return len(g.gdn_layers) * (state + (g.gdn_conv_taps - 1) * g.gdn_channels) * 4


def raw_ring_bytes(g: Geometry) -> int:
    """Rings of raw indexer keys, float32."""
    return len(g.qsa_layers) * g.raw_ring_rows * g.indexer_dim * 4 if g.block_cells else 0


def ngram_history_bytes(g: Geometry) -> int:
    """Convolution history of the n-gram block, float32. The token ids it looks back on stay with the host's tokens."""
    return g.ngram.history_rows * g.CD * 4 if g.ngram is not None else 0


def recurrent_bytes(g: Geometry) -> int:
    """State of one session that only a commit advances: it does not grow with the context."""
    return gdn_state_bytes(g) + raw_ring_bytes(g) + ngram_history_bytes(g)


def checkpoint_bytes(g: Geometry, checkpoints: int) -> int:
    """Host memory of `checkpoints` copies of the recurrent state."""
    return checkpoints * recurrent_bytes(g)


def rope_table_bytes(g: Geometry, context: int) -> int:
    """Table of every position's cosines and sines, float32: one pair for each rotated pair of values."""
    return context * g.rotary_dims * 4
