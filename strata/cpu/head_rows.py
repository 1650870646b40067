"""What the host needs of a window's logits: argmax, log-sum-exp, largest logits, penalties and bias.

Order of logits everywhere: larger first, equal ones by lowest id (-0 equals +0). The log-sum-exp adds in 256 lanes,
lane = id mod 256, ids ascending, then a halving tree, in float64: one definition, the same bits for any caller.

Penalties, per token that occurs c > 0 times among the counted ones, in float64 with one rounding to float32:
    l <- l / repetition if l > 0 else l * repetition;   l <- l - presence - frequency * c
Then bias is added (float64, one rounding); a bias of -inf bans its token.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from strata.base.compiled import cached_njit
from strata.base.errors import BadArgument, NotFinite, need
from strata.base.heap import sift_down, sift_up
from strata.base.window import CANDIDATES, SUMMARY_TOP, HeadRequest, HeadRows
from strata.cpu.exp64 import exp64, log64

_BLOCK = 64  # ids of which one maximum is kept while the largest logits are looked for
_WIDE_BLOCK = 256
_LANES = 256
_INF_BITS = 0x7F800000
_ALL_KNOWN = -(2**63)
_NO_TOKENS = np.empty(0, np.int32)
_NO_IDS, _NO_VALUES = np.empty(0, np.int64), np.empty(0, np.float64)


@njit(error_model="numpy")
def order_key(value):
    """int32 that orders float32 values as floats do; -0 and +0 give the same key."""
    bits = np.int32(np.float32(value + np.float32(0)).view(np.int32))
    return np.int32(bits ^ np.int32(np.int32(bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@njit(error_model="numpy")
def _magnitude(value):
    """Bits without the sign: at least _INF_BITS for NaN and infinities."""
    return np.int32(np.int32(np.float32(value).view(np.int32)) & np.int32(0x7FFFFFFF))


@njit(error_model="numpy")
def _argmax(row):
    """First id of the largest logit, -1 if a value is NaN or infinite. Integer maxima vectorise, float ones do not."""
    V = row.size
    best, best_start, worst = np.int32(-(2**31)), 0, np.int32(0)
    for start in range(0, V - V % _WIDE_BLOCK, _WIDE_BLOCK):
        top = np.int32(-(2**31))
        for i in range(start, start + _WIDE_BLOCK):
            top = max(top, order_key(row[i]))
            worst = max(worst, _magnitude(row[i]))
        if top > best:
            best, best_start = top, start
    for i in range(V - V % _WIDE_BLOCK, V):
        worst = max(worst, _magnitude(row[i]))
        if order_key(row[i]) > best:
            best, best_start = order_key(row[i]), i
    if worst >= _INF_BITS:
        return -1
    i = best_start
    while order_key(row[i]) != best:
        i += 1
    return i


@njit(error_model="numpy")
def _top(row, block_tops, heap, ids, values):
    """The len(heap) largest logits of a row, in order, into ids and values. False if a value is NaN or +inf.

    The n-th largest block maximum bounds the n-th largest logit from below, so only about n blocks are looked into.
    block_tops  int32, one per started block of 64 ids     heap  (n,) int64 scratch
    """
    V, n = row.size, heap.size
    worst = np.int32(-(2**31))
    least = np.int32(2**31 - 1)
    n_blocks = 0
    for start in range(0, V - V % _BLOCK, _BLOCK):
        top = np.int32(-(2**31))
        for i in range(start, start + _BLOCK):
            key = order_key(row[i])
            top = max(top, key)
            least = min(least, key)
        block_tops[n_blocks] = top
        worst = max(worst, top)
        n_blocks += 1
    if V % _BLOCK:
        top = np.int32(-(2**31))
        for i in range(V - V % _BLOCK, V):
            key = order_key(row[i])
            top = max(top, key)
            least = min(least, key)
        block_tops[n_blocks] = top
        worst = max(worst, top)
        n_blocks += 1
    if worst >= np.int32(_INF_BITS) or least < order_key(np.float32(-np.inf)):
        return False
    bound = np.int64(-(2**31))
    if n_blocks > n:
        for b in range(n):
            heap[b] = block_tops[b]
            sift_up(heap, b)
        for b in range(n, n_blocks):
            if block_tops[b] > heap[0]:
                heap[0] = block_tops[b]
                sift_down(heap, 0, n)
        bound = heap[0]
    size = 0
    for b in range(n_blocks):
        if block_tops[b] < bound:
            continue
        for i in range(b * _BLOCK, min(V, (b + 1) * _BLOCK)):
            key = np.int64(order_key(row[i]))
            if key < bound:
                continue
            packed = (key << np.int64(32)) | (np.int64(0xFFFFFFFF) - i)  # larger = larger logit, then lower id
            if size < n:
                heap[size] = packed
                sift_up(heap, size)
                size += 1
            elif packed > heap[0]:
                heap[0] = packed
                sift_down(heap, 0, n)
    for end in range(n - 1, -1, -1):
        i = np.int64(0xFFFFFFFF) - (heap[0] & np.int64(0xFFFFFFFF))
        ids[end], values[end] = i, row[i]
        heap[0] = heap[end]
        sift_down(heap, 0, end)
    return True


@njit(error_model="numpy")
def _log_sum_exp(row, largest, lanes):
    V = row.size
    lanes[:] = 0.0
    for start in range(0, V - V % _LANES, _LANES):
        for lane in range(_LANES):
            lanes[lane] += exp64(np.float64(row[start + lane]) - largest)
    start = V - V % _LANES
    for lane in range(V - start):
        lanes[lane] += exp64(np.float64(row[start + lane]) - largest)
    half = _LANES // 2
    while half:
        for lane in range(half):
            lanes[lane] += lanes[lane + half]
        half //= 2
    return largest + log64(lanes[0])


@njit(error_model="numpy")
def _modify(row, history, rows, last_n, repetition, presence, frequency, bias_ids, bias, counts):
    """Apply penalties, then bias to `row` in place. counts: (V,) int32 zeros, zero again afterwards.

    Returns a token outside the vocabulary, or _ALL_KNOWN.
    """
    V, n_history = row.size, history.size
    n = n_history + rows.size
    first = max(0, n - last_n) if last_n > 0 else 0
    for i in range(first, n):
        token = history[i] if i < n_history else rows[i - n_history]
        if token < 0 or token >= V:
            return np.int64(token)
        counts[token] += 1
    for i in range(first, n):
        token = history[i] if i < n_history else rows[i - n_history]
        c = counts[token]
        if c > 0:
            counts[token] = 0
            logit = np.float64(row[token])
            logit = logit / repetition if logit > 0 else logit * repetition
            row[token] = np.float32(logit - presence - frequency * c)
    for i in range(bias_ids.size):
        if bias_ids[i] < 0 or bias_ids[i] >= V:
            return bias_ids[i]
        row[bias_ids[i]] = np.float32(np.float64(row[bias_ids[i]]) + bias[i])
    return np.int64(_ALL_KNOWN)


@cached_njit
def _argmax_rows(logits, argmax):
    for j in range(logits.shape[0]):
        argmax[j] = _argmax(logits[j])
        if argmax[j] < 0:
            return j
    return -1


@cached_njit
def _top_rows(logits, ids, values, sums, with_sums):
    """Largest logits (and log-sum-exp if asked) of every row. A row that is not finite is returned, else -1."""
    T, V = logits.shape
    block_tops = np.empty(V // _BLOCK + 1, np.int32)
    heap, lanes = np.empty(ids.shape[1], np.int64), np.empty(_LANES)
    for j in range(T):
        if not _top(logits[j], block_tops, heap, ids[j], values[j]):
            return j
        if with_sums:
            sums[j] = _log_sum_exp(logits[j], np.float64(values[j, 0]), lanes)
    return -1


@cached_njit
def _modified_rows(logits, history, rows, last_n, repetition, presence, frequency, bias_ids, bias, ids, values, sums,
                   with_sums):  # fmt: skip
    """As _top_rows, after penalties and bias. Returns (refused row or -1, token as of _modify)."""
    T, V = logits.shape
    block_tops = np.empty(V // _BLOCK + 1, np.int32)
    heap, lanes = np.empty(ids.shape[1], np.int64), np.empty(_LANES)
    counts, row = np.zeros(V, np.int32), np.empty(V, np.float32)
    for j in range(T):
        row[:] = logits[j]
        bad = _modify(row, history, rows[: j + 1], last_n, repetition, presence, frequency, bias_ids, bias, counts)
        if bad != _ALL_KNOWN:
            return j, bad
        if not _top(row, block_tops, heap, ids[j], values[j]) or values[j, 0] == -np.inf:
            return j, np.int64(_ALL_KNOWN)
        if with_sums:
            sums[j] = _log_sum_exp(row, np.float64(values[j, 0]), lanes)
    return -1, np.int64(_ALL_KNOWN)


@cached_njit
def _modify_row(row, history, rows, last_n, repetition, presence, frequency, bias_ids, bias):
    counts = np.zeros(row.size, np.int32)
    return _modify(row, history, rows, last_n, repetition, presence, frequency, bias_ids, bias, counts)


@cached_njit
def _sum_row(row, largest):
    return _log_sum_exp(row, largest, np.empty(_LANES))


def log_sum_exp(row: np.ndarray) -> float:
    """Log-sum-exp of one contiguous float32 row, bit for bit the one of HeadRows. -inf entries count as nothing."""
    return _sum_row(row, float(row.max()))


def _tokens(tokens: np.ndarray | None) -> np.ndarray:
    return _NO_TOKENS if tokens is None else np.ascontiguousarray(tokens, np.int32)


def _changes(request: HeadRequest, V: int, T: int) -> tuple:
    """Arguments of the kernels that apply penalties and bias, checked."""
    if request.repetition == 1.0 and request.presence == 0.0 and request.frequency == 0.0:
        history = rows = _NO_TOKENS
    else:
        history, rows = _tokens(request.history), _tokens(request.rows)
        need(rows.size == T, "penalties need the window's tokens", found=f"{rows.size} tokens", needed=f"{T} tokens")
    if request.bias:
        ids, values = np.array(list(request.bias), np.int64), np.array(list(request.bias.values()), np.float64)
    else:
        ids, values = _NO_IDS, _NO_VALUES
    return (history, rows, request.last_n, float(request.repetition), float(request.presence),
            float(request.frequency), ids, values)  # fmt: skip


def _refuse_token(bad: int, V: int) -> None:
    need(bad == _ALL_KNOWN, "a penalised or biased token is not in the vocabulary", found=bad, needed=f"0..{V - 1}")


def _refuse_row(logits: np.ndarray, j: int, modified: bool = False) -> None:
    if modified:
        raise NotFinite(f"after penalties and bias row {j} of the window has an infinite logit or no token left",
                        found="none to choose from", needed="finite logits",
                        advice="Use milder penalties or biases.")  # fmt: skip
    bad = np.flatnonzero(~np.isfinite(logits[j]))
    raise NotFinite(f"row {j} of the window has logits that are not finite",
                    found=f"{logits[j, bad[0]]} at id {bad[0]} ({bad.size} of {logits.shape[1]})",
                    needed="finite logits", advice="The weights or the file may be damaged.")  # fmt: skip


def modified_row(logits: np.ndarray, request: HeadRequest, j: int, T: int) -> np.ndarray:
    """Row j's logits after penalties and bias, as a new float32 array.

    logits  (V,) float32, the unmodified logits of row j of a window of T rows
    Raises BadArgument for a token outside the vocabulary.
    """
    row = np.array(logits, np.float32)
    history, rows, *rest = _changes(request, row.size, T)
    _refuse_token(_modify_row(row, history, rows[: j + 1], *rest), row.size)
    return row


def summarise(logits: np.ndarray, request: HeadRequest) -> HeadRows:
    """HeadRows of a window.

    logits  (T, V) float32, C order; V >= 64 unless only the argmax is asked for
    argmax is always filled; logsumexp and the top 20 with `summary`; the mod_ fields unless `greedy` without penalties
    and bias; mod_logsumexp with `summary` or `full` only, as no list of 64 or fewer candidates needs it.
    Raises NotFinite for NaN or infinite logits (naming row and id), BadArgument for wrong shapes and unknown tokens.
    """
    if logits.dtype != np.float32 or logits.ndim != 2 or not logits.flags.c_contiguous:
        found = f"{logits.dtype} {logits.shape}"
        raise BadArgument("logits have the wrong form", found=found, needed="float32 (T, V) in C order")
    T, V = logits.shape
    argmax, full = np.empty(T, np.int32), logits if request.full else None
    bad = _argmax_rows(logits, argmax)
    if bad >= 0:
        _refuse_row(logits, bad)
    modified = request.modified
    if request.greedy and not request.summary and not modified:
        return HeadRows(argmax, full=full)
    need(V >= CANDIDATES, "the vocabulary is smaller than the list of candidates", found=V, needed=CANDIDATES)
    out = HeadRows(argmax, full=full)
    if request.summary or not modified:
        n = SUMMARY_TOP if request.greedy or modified else CANDIDATES
        ids, values, sums = np.empty((T, n), np.int32), np.empty((T, n), np.float32), np.empty(T)
        _top_rows(logits, ids, values, sums, request.summary or request.full)
        if request.summary:
            out.logsumexp, out.top_ids, out.top_logits = sums, ids[:, :SUMMARY_TOP], values[:, :SUMMARY_TOP]
        if n == CANDIDATES:
            out.mod_ids, out.mod_logits = ids, values
            out.mod_logsumexp = sums if request.summary or request.full else None
    if modified:
        ids, values = np.empty((T, CANDIDATES), np.int32), np.empty((T, CANDIDATES), np.float32)
        sums, with_sums = np.empty(T), request.summary or request.full
        bad, token = _modified_rows(logits, *_changes(request, V, T), ids, values, sums, with_sums)
        _refuse_token(token, V)
        if bad >= 0:
            _refuse_row(logits, bad, modified=True)
        out.mod_ids, out.mod_logits, out.mod_logsumexp = ids, values, sums if with_sums else None
    return out


@cached_njit
def _most_likely(row):
    best = _argmax(row)
    if best < 0:
        return best, 0.0
    return best, exp64(np.float64(row[best]) - _log_sum_exp(row, np.float64(row[best]), np.empty(_LANES)))


def most_likely(row: np.ndarray) -> tuple[int, float]:
    """Id of the largest of (V,) float32 logits (ties to the lowest) and its softmax probability; NotFinite for NaN."""
    best, probability = _most_likely(row)
    if best < 0:
        raise NotFinite("draft logits are not finite", found=f"{row.max()}", needed="finite logits",
                        advice="The draft layer's file may be damaged.")  # fmt: skip
    return int(best), float(probability)
