"""Gated DeltaNet over the rows of a prefill chunk; state and history advance in place."""

from __future__ import annotations

import numpy as np

from strata.base.errors import need
from strata.gpu.launch import Launch, Source, f32, i32, launch, pointer

KEY_GROUPS = (1, 2, 4)
"""Instances: key sizes of a head, in groups of 32."""

SOURCE = Source(
    "gated_delta_wide.cu",
    ("gdn_wide_conv", "gdn_wide_inputs", "gdn_wide_pairs", "gdn_wide_gate",
     *(f"gdn_wide_rule<{n}>" for n in KEY_GROUPS)),
)
ROWS_A_THREAD, STAGE_ROWS, BLOCK_ROWS, COLUMNS = 8, 8, 4, 32


def gdn_wide_conv(
    qkv: int, conv: int, w: int, history_slot: int, T: int, channels: int, taps: int, error: int, where: np.uint64
) -> list[Launch]:
    """conv (T, channels) from qkv (T, channels), w (taps, channels) and the history (taps - 1, channels) in the slot.

    The history is only read: it moves on by `gated_delta.history_commit`.
    """
    args = (pointer(qkv), pointer(conv), pointer(w), pointer(history_slot), i32(T), i32(channels), i32(taps),
            pointer(error), where)  # fmt: skip
    return [launch(SOURCE, "gdn_wide_conv", (-(-channels // 256), -(-T // ROWS_A_THREAD)), 256, *args)]


def gdn_wide_heads(
    conv: int, decay: int, beta: int, z: int, a: int, dt: int, norm: int, state_slot: int, y: int, T: int, Hk: int,
    Hv: int, dk: int, dv: int, channels: int, eps: float, error: int, where: np.uint64,
) -> list[Launch]:  # fmt: skip
    """y (T, Hv, dv); the state (Hv, dk, dv) in the slot advances by T rows, a multiple of 8.

    conv (T, channels) holds q, k and v before, unit q and k and v after; decay and beta (T, Hv) alpha and raw beta
    before, their functions after.
    """
    need(dk % 32 == 0 and dk // 32 in KEY_GROUPS, "key size of a gated-delta head", found=dk,
         needed=", ".join(str(32 * n) for n in KEY_GROUPS))  # fmt: skip
    need(dv % COLUMNS == 0, "value size of a gated-delta head", found=dv, needed=f"a multiple of {COLUMNS}")
    need(T % STAGE_ROWS == 0, "rows of a chunk", found=T, needed=f"a multiple of {STAGE_ROWS}")
    q_scale = np.float32(1) / np.sqrt(np.float32(dk))
    inputs = (pointer(conv), pointer(decay), pointer(beta), pointer(a), pointer(dt), i32(Hk), i32(Hv), i32(dk),
              i32(channels), q_scale, pointer(error), where)  # fmt: skip
    pairs = (pointer(conv), pointer(decay), pointer(beta), pointer(y), i32(Hk), i32(Hv), i32(dk), i32(dv),
             i32(channels))  # fmt: skip
    rule = (pointer(conv), pointer(state_slot), pointer(y), i32(T), i32(Hk), i32(Hv), i32(dv), i32(channels))
    gate = (pointer(y), pointer(z), pointer(norm), i32(Hv), i32(dv), f32(eps), pointer(error), where)
    return [
        launch(SOURCE, "gdn_wide_inputs", (-(-2 * Hk // 4) + 1, T), 128, *inputs),
        launch(SOURCE, "gdn_wide_pairs", (T // BLOCK_ROWS, Hk), 128, *pairs),
        launch(SOURCE, f"gdn_wide_rule<{dk // 32}>", (dv // COLUMNS, Hv), 128, *rule),
        launch(SOURCE, "gdn_wide_gate", (-(-Hv // 4), T), 128, *gate),
    ]
