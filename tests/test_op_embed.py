"""Token embedding into the streams, and waiting for n-gram rows."""

import threading
import time

import numpy as np
import pytest

from strata.base.program import NGRAM_FAILED, NGRAM_TIMEOUT, NOT_FINITE
from strata.cpu.embed import embed, ngram_wait
from strata.cpu.rows import row_kernel
from strata.pack.formats import by_name
from tests.canonical.call import ERROR, LAYER, Call, assert_same, plain, room


def table(name: str, V: int, D: int) -> np.ndarray:
    """(V, bytes a row) uint8."""
    rng = np.random.default_rng(V)
    if name == "F32":
        return plain(rng, V, D).view(np.uint8)
    if name == "BF16":
        return (plain(rng, V, D).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    blocks = rng.integers(0, 256, (V, D // 32, 34), dtype=np.uint8)
    blocks[:, :, :2] = rng.uniform(0, 1, (V, D // 32, 1)).astype(np.float16).view(np.uint8)
    return blocks.reshape(V, -1)


def look_up(w: np.ndarray, name: str, tokens: list[int], C: int, D: int) -> tuple[np.ndarray, Call]:
    T = len(tokens)
    y = room(T, C, D)
    call = Call(embed, np.array(tokens, np.int32), w, w.shape[1], row_kernel(by_name(name)), y, C, D, ERROR, LAYER)
    return y, call.run(T, order=reversed(range(T)))


@pytest.mark.parametrize("name", ["F32", "BF16", "Q8_0"])
@pytest.mark.parametrize("C", [1, 4])
@pytest.mark.parametrize("tokens", [[0], [9, 0, 9], [1, 2, 3, 4, 5, 6, 7, 8]])
def test_every_stream_gets_the_row(name, C, tokens):
    D = 96
    w = table(name, 10, D)
    y, call = look_up(w, name, tokens, C, D)
    assert call.reported is None
    wanted = by_name(name).dequantise(w[tokens]).astype(np.float32)
    assert_same(y, np.repeat(wanted[:, None], C, axis=1))


def test_a_row_that_is_not_finite_is_reported():
    w = table("F32", 10, 64).copy()
    w.view(np.float32)[7, 63] = np.inf
    assert look_up(w, "F32", [1, 7, 2], 2, 64)[1].reported == (NOT_FINITE, LAYER, 1)
    assert look_up(w, "F32", [1, 6, 2], 2, 64)[1].reported is None


def wait(wanted: int, done: int, limit_ns: int) -> Call:
    return Call(ngram_wait, np.array([wanted, done], np.int64), limit_ns, ERROR, LAYER)


def test_rows_that_are_there_or_failed():
    assert wait(5, 5, 10**9).run().reported is None
    assert wait(5, -5, 10**9).run().reported == (NGRAM_FAILED, LAYER, 0)


@pytest.mark.parametrize("old", [4, -4, 0])
def test_an_answer_to_an_earlier_window_is_none(old):
    began = time.monotonic()
    assert wait(5, old, 20_000_000).run().reported == (NGRAM_TIMEOUT, LAYER, 20)
    assert 0.02 <= time.monotonic() - began < 5


@pytest.mark.parametrize(("answer", "reported"), [(5, None), (-5, (NGRAM_FAILED, LAYER, 0))])
def test_rows_that_arrive_while_waiting(answer, reported):
    call = wait(5, 4, 20 * 10**9)
    waiting = threading.Thread(target=call.run)
    waiting.start()
    time.sleep(0.02)
    assert waiting.is_alive()
    call.words[0][1] = answer
    waiting.join(timeout=10)
    assert not waiting.is_alive() and call.reported == reported
