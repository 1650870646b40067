"""Geometry: every number of a model that a kernel or a price depends on.

Letters as in the documentation: T rows of a window, D hidden size, F expert width, E experts a layer, K routed per
token, L layers, V vocabulary, C residual streams, H / Hkv / dh attention heads, KV heads and head size.
"""

from __future__ import annotations

from dataclasses import dataclass, field

WINDOW_ROWS = 8
"""Widest window; wider inputs go through prefill chunks."""

CELL_ROWS = 256
"""Prefill chunks are whole cells of this many rows on an absolute grid from position 0."""

DRAFT_QUEUE_ROWS = 64
"""Complete cells of the draft layer that may wait to be stored."""

DRAFT_RING_ROWS = DRAFT_QUEUE_ROWS + 1
"""Those and the row that waits for its token."""

CONTEXT_RESERVE = 8
"""Cells kept free behind prompt and answer, so that a whole window always fits."""

LEAST_CONTEXT = CONTEXT_RESERVE + 2
"""A token to read, one to answer with, and the reserve."""


@dataclass(frozen=True)
class NgramGeometry:
    """The n-gram embedding block (PLE): `layer` is 0-based."""

    layer: int
    order: int
    heads_per_order: int
    row_width: int
    conv_taps: int
    reset_token: int
    image_token: int
    multipliers: tuple[int, ...]
    moduli: tuple[int, ...]
    offsets: tuple[int, ...]

    @property
    def heads(self) -> int:
        """Rows looked up per token."""
        return (self.order - 1) * self.heads_per_order

    @property
    def width(self) -> int:
        """Values of one token's concatenated rows."""
        return self.heads * self.row_width

    @property
    def dilation(self) -> int:
        return self.order

    @property
    def history_rows(self) -> int:
        """Rows of conv input a token looks back on: (taps - 1) x dilation."""
        return (self.conv_taps - 1) * self.dilation


@dataclass(frozen=True)
class Geometry:
    """One model, as found in its file; derived values are properties."""

    architecture: str
    L: int
    D: int
    V: int
    trained_context: int
    rms_eps: float
    C: int
    hc_rank: int
    # layer kinds: "gdn" or "qsa" per layer
    kinds: tuple[str, ...]
    # attention
    H: int
    Hkv: int
    dh: int
    rotary_dims: int
    rope_base: float
    # sparse selection; block_cells 0 = dense attention on every layer
    indexer_heads: int
    indexer_dim: int
    budget_cells: int
    block_cells: int
    # gated delta rule
    gdn_key_heads: int
    gdn_value_heads: int
    gdn_key_dim: int
    gdn_value_dim: int
    gdn_conv_taps: int
    # experts
    E: int
    K: int
    F: int
    shared_width: int
    router_scale: float
    ngram: NgramGeometry | None
    mtp_layers: int = 0
    layer_names: tuple[str, ...] = field(default=(), compare=False)

    @property
    def CD(self) -> int:
        """Values of one token's residual streams."""
        return self.C * self.D

    @property
    def gdn_key_width(self) -> int:
        return self.gdn_key_heads * self.gdn_key_dim

    @property
    def gdn_value_width(self) -> int:
        return self.gdn_value_heads * self.gdn_value_dim

    @property
    def gdn_channels(self) -> int:
        """Channels of the GDN convolution: q, k and v side by side."""
        return 2 * self.gdn_key_width + self.gdn_value_width

    @property
    def budget_blocks(self) -> int:
        """Blocks a query attends besides its incomplete tail."""
        return self.budget_cells // self.block_cells if self.block_cells else 0

    @property
    def gdn_layers(self) -> tuple[int, ...]:
        return tuple(i for i, k in enumerate(self.kinds) if k == "gdn")

    @property
    def qsa_layers(self) -> tuple[int, ...]:
        return tuple(i for i, k in enumerate(self.kinds) if k == "qsa")

    @property
    def raw_ring_rows(self) -> int:
        """Ring of raw indexer keys: an open block's cells plus a whole window, a power of two."""
        rows = max(self.block_cells, 1) - 1 + WINDOW_ROWS
        return 1 << (rows - 1).bit_length()
