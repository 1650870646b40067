"""Gated DeltaNet: convolution, delta rule over T rows, commit. State and history are reached through slots: words on
the device that hold a session's addresses."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from strata.base.errors import need
from strata.gpu.activations import Activations, places_of, quantise
from strata.gpu.launch import Launch, Source, f32, i32, launch, pointer

KEYS_A_THREAD = (16, 32)
"""Instances: keys of the state that one thread holds in registers; four threads share a column."""

ROWS = 8
"""Rows that a block prepares side by side."""

SPLIT_HEAD, SPLIT_TAPS, SPLIT_THREADS = 128, 4, 384
"""Keys and values of a head, taps, and threads of a block of `gdn_split`: two blocks a head."""

SPLIT_WINDOW = 8
"""Rows of windows that `gdn_split` takes; it has room for eight."""

SOURCE = Source(
    "gated_delta.cu",
    (
        "gdn_conv",
        "history_commit",
        *(f"{k}<{n}>" for k in ("gdn_heads", "gdn_commit") for n in KEYS_A_THREAD),
        f"gdn_window<{KEYS_A_THREAD[0]}>",
        "gdn_split",
    ),
)


def gdn_conv(
    qkv: int, conv: int, w: int, history_slot: int, T: int, channels: int, taps: int, advance: bool, error: int,
    where: np.uint64,
) -> list[Launch]:  # fmt: skip
    """conv (T, channels) from qkv (T, channels), w (taps, channels) and the history (taps - 1, channels) in the slot;
    advance: the history moves on by T rows."""
    args = (pointer(qkv), pointer(conv), pointer(w), pointer(history_slot), i32(T), i32(channels), i32(taps),
            i32(advance), pointer(error), where)  # fmt: skip
    return [launch(SOURCE, "gdn_conv", -(-channels // 256), 256, *args)]


def history_commit(history_slot: int, rows: int, n_keep: int, n: int, width: int) -> list[Launch]:
    """The history (n, width) in the slot moves on by the first rows (int64 at n_keep) of rows (.., width)."""
    args = (pointer(history_slot), pointer(rows), pointer(n_keep), i32(n), i32(width))
    return [launch(SOURCE, "history_commit", -(-width // 256), 256, *args)]


def _shape(dk: int, dv: int, columns: int = 0) -> tuple[int, int, int]:
    """(keys a thread, threads, dynamic shared bytes) of blocks of some columns, 0 for all dv."""
    need(dk % 4 == 0 and dk <= 4 * KEYS_A_THREAD[-1], "key size of a gated-delta head", found=dk,
         needed=f"a multiple of 4 up to {4 * KEYS_A_THREAD[-1]}")  # fmt: skip
    need(dv % 8 == 0 and 32 <= dv <= 128, "value size of a gated-delta head", found=dv, needed="32..128, in eights")
    keys = next(n for n in KEYS_A_THREAD if 4 * n >= dk)
    columns = columns or dv
    return keys, 4 * columns, 4 * (2 * ROWS + ROWS * (8 * (keys + 4) + columns))


def _split_bytes(T: int) -> int:
    """Shared memory of `gdn_split`: gates of two heads; a row's q and k in four lanes with gaps, half of its v, and the
    output's gates of two heads."""
    return 4 * (2 * 8 * 2 + T * (2 * (SPLIT_HEAD + 32) + SPLIT_HEAD // 2 + 2 * SPLIT_HEAD))


def gdn_heads(
    conv: int, decay: int, beta: int, z: int, a: int, dt: int, norm: int, state_slot: int, y: int, T: int, Hk: int,
    Hv: int, dk: int, dv: int, channels: int, advance: bool, eps: float, error: int, where: np.uint64,
) -> list[Launch]:  # fmt: skip
    """y (T, Hv, dv). decay and beta (T, Hv) hold alpha and raw beta before, their functions after; the state
    (Hv, dk, dv) is written only with `advance`."""
    keys, threads, shared_bytes = _shape(dk, dv)
    q_scale = np.float32(1) / np.sqrt(np.float32(dk))
    args = (pointer(conv), pointer(decay), pointer(beta), pointer(z), pointer(a), pointer(dt), pointer(norm),
            pointer(state_slot), pointer(y), i32(T), i32(Hk), i32(Hv), i32(dk), i32(dv), i32(channels), i32(advance),
            f32(eps), q_scale, pointer(error), where)  # fmt: skip
    return [launch(SOURCE, f"gdn_heads<{keys}>", Hv, threads, *args, shared_bytes=shared_bytes)]


def quantises(T: int, Hv: int, dv: int) -> tuple[int, ...]:
    """Groups in which `gdn_window` quantises its outputs: of whole heads or parts of one."""
    whole = dv % 32 == 0 and T <= ROWS and 256 % dv == 0 and Hv % (256 // dv) == 0
    return ((32,) if dv % 32 == 0 else ()) + ((256,) if whole else ())


def arrived_bytes(Hv: int, dv: int) -> int:
    """Bytes of the counters of `gdn_window`."""
    return 4 * -(-Hv * dv // 256)


def gdn_window(
    qkv: int,
    w: int,
    history_slot: int,
    taps: int,
    conv: int,
    decay: int,
    beta: int,
    z: int,
    a: int,
    dt: int,
    norm: int,
    state_slot: int,
    y: int,
    T: int,
    Hk: int,
    Hv: int,
    dk: int,
    dv: int,
    channels: int,
    eps: float,
    error: int,
    where: np.uint64,
    quantised: Sequence[Activations] = (),
    arrived: int = 0,
) -> list[Launch]:
    """gdn_conv and gdn_heads of a window; neither history nor state is written. Heads of the sizes of `gdn_split` and
    those of few keys take one kernel.

    quantised: where y goes as activations as well, at most one of each group that `quantises` names. arrived: address
    of `arrived_bytes`, zeros that are zeros again afterwards, for groups of 256; without it there is no `gdn_split`.
    """
    groups = quantises(T, Hv, dv)
    need(all((q.T, q.K) == (T, Hv * dv) and q.group in groups for q in quantised), "activations of a window",
         found=[(q.T, q.K, q.group) for q in quantised], needed=(T, Hv * dv, groups))  # fmt: skip
    need(arrived != 0 or all(q.group == 32 for q in quantised), "groups of 256 need counters")
    keys, threads, shared_bytes = _shape(dk, dv)
    need(Hv >= Hk, "value heads", found=Hv, needed=f"at least the {Hk} key heads")
    inputs = (qkv, w, history_slot)
    rule = (conv, decay, beta, z, a, dt, norm, state_slot, y)
    ends = (*places_of(tuple(quantised)), pointer(arrived), pointer(error), where)
    numbers = (f32(eps), np.float32(1) / np.sqrt(np.float32(dk)))
    pairs = Hv % 2 == 0 and arrived != 0
    if T <= SPLIT_WINDOW and pairs and (dk, dv, taps) == (SPLIT_HEAD, SPLIT_HEAD, SPLIT_TAPS):
        counts = map(i32, (T, Hk, Hv, channels))
        args = (*map(pointer, (*inputs, *rule)), *counts, *numbers, *ends)
        return [launch(SOURCE, "gdn_split", 2 * Hv, SPLIT_THREADS, *args, shared_bytes=_split_bytes(T))]
    if keys == KEYS_A_THREAD[0]:
        counts = map(i32, (T, Hk, Hv, dk, dv, channels))
        args = (*map(pointer, inputs), i32(taps), *map(pointer, rule), *counts, *numbers, *ends)
        return [launch(SOURCE, f"gdn_window<{keys}>", Hv, threads, *args, shared_bytes=shared_bytes)]
    before = np.uint64((int(where) - (1 << 48)) % (1 << 64))  # the convolution is the op before
    apart = gdn_conv(qkv, conv, w, history_slot, T, channels, taps, False, error, before)
    apart += gdn_heads(*rule, T, Hk, Hv, dk, dv, channels, False, eps, error, where)
    return apart + [one for q in quantised for one in quantise(y, q, error, where)]


def gdn_commit(
    conv: int, decay: int, beta: int, state_slot: int, n_keep: int, Hk: int, Hv: int, dk: int, dv: int, channels: int
) -> list[Launch]:
    """The state in the slot moves on by the first rows (int64 at n_keep) of the window that left conv, decay, beta."""
    columns = next(n for n in (32, 24, 16, 8) if dv % n == 0)  # of a block: no sum joins them
    keys, threads, shared_bytes = _shape(dk, dv, columns)
    args = (pointer(conv), pointer(decay), pointer(beta), pointer(state_slot), pointer(n_keep), i32(Hk), i32(Hv),
            i32(dk), i32(dv), i32(channels))  # fmt: skip
    return [launch(SOURCE, f"gdn_commit<{keys}>", (Hv, dv // columns), threads, *args, shared_bytes=shared_bytes)]
