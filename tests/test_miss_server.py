"""The service of the CPU's experts: exact sums for every request, bad numbers, bad requests, windows, counts."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

from strata.base import arithmetic
from strata.base.doorbell import CPU, HEADER, LAYER, REQUEST, ROWS
from strata.base.errors import BadArgument
from strata.base.program import COMBINE_OVERFLOW, EXPERTS_FAILED, NOT_FINITE
from strata.cpu import miss_jobs
from strata.cpu.miss_server import SLEEPING, MissServer
from strata.pack.lanes import gemv as exact_product
from tests.canonical import experts as reference
from tests.doorbell_device import Model
from tests.gguf_maker import MadeTensor
from tests.miss_serving import assert_exact, serving, tiny, tiny_requests, wait_for, window
from tests.tiny_models import TinyModel, small

# ---- sums


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
def test_exact_sums(threads):
    """1e4 requests over all layers, 1 to 8 rows, on more threads than there are CPUs; windows of 1 to 40 requests."""
    with serving(tiny(), threads, spin_us=50) as (server, device):
        device.prepare(tiny_requests())
        left, size = 2500, 1
        while left:
            n = min(left, size)
            with window(server):
                assert_exact(device, n, seed=left)
            left, size = left - n, size % 40 + 1
        assert device.reply == device.number == 2500
        assert server.stats()["replies"] == server.stats()["requests"] == 2500


@pytest.mark.soak
@pytest.mark.parametrize("threads", [2, 4])
def test_exact_sums_soak(threads):
    with serving(tiny(), threads, spin_us=50) as (server, device):
        device.prepare(tiny_requests(200))
        for seed in range(500):
            with window(server):
                assert_exact(device, 1000, seed)


def test_sums_by_the_definition():
    """Entries of two rows against the arithmetic's own words, without any code of the op."""
    model, layer = tiny(), 2
    request = model.request(np.random.default_rng(8), T=2, layer=layer, misses=0.6)
    layout = model.weights.experts
    formats = [p.format for p in layout.layers[layer].projections]

    def product(part):
        def run(w, x):
            codes, scales, _ = arithmetic.quantise(x, formats[part].group)
            return exact_product(formats[part], w, codes, scales)

        return run

    wanted = np.zeros((2, model.D), np.int64)
    for t, j in np.argwhere(request.decisions == CPU):
        e = int(request.ids[t, j])
        matrices = [layout.raw(layer, e, part) for part in ("gate", "up", "down")]
        y = reference.expert(request.x[t], matrices, [product(part) for part in range(3)])
        wanted[t] += arithmetic.combine_terms(request.weights[t, j], y)[0]
    assert (wanted == request.sums).all() and wanted.any()
    with serving(model) as (server, device), window(server):
        device.prepare([request])
        assert_exact(device, 1)


def scales(made) -> None:
    rng = np.random.default_rng(6)
    for layer in range(4):
        for part in ("gate", "up", "down"):
            factors = rng.uniform(0.5, 2, 8).astype(np.float32)
            made.tensors.append(MadeTensor(f"blk.{layer}.ffn_{part}_exps.scale", (8,), 0, factors.tobytes()))


MADE = {
    "floats": TinyModel(small(ngram=None)),
    "mixed": TinyModel(small(ngram=None), {"*ffn_gate_exps*": "Q8_0", "*ffn_down_exps*": "Q4_0"}, edit=scales),
    "wide": TinyModel(small(ngram=None, D=2560, F=64, E=12, K=10), {"*_exps*": "Q8_0"}),
    "merged": TinyModel(small(ngram=None), {"*_exps*": "Q8_0"}, merged=True),
}


@pytest.mark.parametrize("name", MADE)
def test_other_formats(name, tmp_path):
    """Rows without records (floats), two layouts and factors of experts (mixed), and rows that are quantised and
    copied by the pool (wide)."""
    made = MADE[name]
    model = Model(made.write(tmp_path / "model.gguf"), 4, made.geometry.K)
    rng = np.random.default_rng(2)
    with serving(model, 3) as (server, device), window(server):
        device.prepare([model.request(rng, T=1 + i % 8) for i in range(24)])
        assert_exact(device, 200)


def test_no_entries_and_all_entries():
    rng = np.random.default_rng(4)
    with serving(tiny()) as (server, device), window(server):
        for misses in (0.0, 1.0):
            device.prepare([tiny().request(rng, T=T, misses=misses) for T in range(1, 9)])
            assert_exact(device, 40)


# ---- bad numbers, bad requests


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_row_that_is_not_finite(bad):
    request = tiny().request(np.random.default_rng(4), T=5, misses=1.0)
    request.x = request.x.copy()
    request.x[3, 17] = bad
    with serving(tiny()) as (server, device), window(server):
        device.prepare([request])
        assert device.ask(1).statuses == 1
        assert device.status == NOT_FINITE | 3 << 8
        request.decisions = request.decisions.copy()
        request.decisions[3] = 1  # nobody here asks for that row now
        here = request.decisions == CPU
        request.x[3, 17] = bad
        request.sums = np.where(here.any(axis=1)[:, None], request.sums, 0)
        device.prepare([request])
        assert_exact(device, 1)


def test_a_term_beyond_the_limit():
    request = tiny().request(np.random.default_rng(4), T=3, misses=1.0)
    request.weights = request.weights.copy()
    request.weights[2, 1] = 1e30
    with serving(tiny()) as (server, device), window(server):
        device.prepare([request])
        assert device.ask(1).statuses == 1
        assert device.status == COMBINE_OVERFLOW | 2 << 8
        device.prepare(tiny_requests())
        assert_exact(device, 50)


MALFORMED = {
    "layer": (miss_jobs.BAD_LAYER, lambda h, r: h.__setitem__(LAYER, 8)),
    "negative layer": (miss_jobs.BAD_LAYER, lambda h, r: h.__setitem__(LAYER, -1)),
    "huge layer": (miss_jobs.BAD_LAYER, lambda h, r: h.__setitem__(LAYER, 1 << 62)),
    "no rows": (miss_jobs.BAD_ROWS, lambda h, r: h.__setitem__(ROWS, 0)),
    "rows": (miss_jobs.BAD_ROWS, lambda h, r: h.__setitem__(ROWS, 9)),
    "fewer rows": (miss_jobs.BAD_COUNT, lambda h, r: h.__setitem__(ROWS, 2)),
    "decision": (miss_jobs.BAD_DECISION, lambda h, r: r.decisions.__setitem__((1, 1), 3)),
    "expert": (miss_jobs.BAD_EXPERT, lambda h, r: r.ids.__setitem__((2, 0), 32)),
    "negative expert": (miss_jobs.BAD_EXPERT, lambda h, r: r.ids.__setitem__((0, 3), -1)),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_requests(name):
    detail, spoil = MALFORMED[name]
    request = tiny().request(np.random.default_rng(4), T=3, misses=1.0)
    good = replace(request, ids=request.ids.copy(), decisions=request.decisions.copy())
    with serving(tiny()) as (server, device), window(server):
        header = request.header()
        spoil(header, request)
        request.header = lambda: header
        device.prepare([request])
        assert device.ask(1).statuses == 1
        assert device.status == EXPERTS_FAILED | detail << 8
        assert detail in miss_jobs.DETAIL_TEXT
        device.prepare([good])
        assert_exact(device, 2)
        assert server.stats()["failures"] == 1 and server.stats()["last_status"] == 0


def test_random_bytes_are_survived():
    """Whatever the mailbox holds: a reply, and the service lives on."""
    rng = np.random.default_rng(9)
    with serving(tiny()) as (server, device), window(server):
        for _ in range(300):
            device.area[HEADER : device.mailbox.sums] = rng.integers(0, 256, device.mailbox.sums - HEADER, np.uint8)
            header = device.words[HEADER // 8 :]
            header[LAYER], header[ROWS] = rng.integers(-1, 9), rng.integers(-1, 10)
            device.number += 1
            device.words[REQUEST // 8] = device.number
            wait_for(lambda: device.reply >= device.number)
            assert device.status & 255 == EXPERTS_FAILED
        device.prepare(tiny_requests())
        assert_exact(device, 50)


# ---- windows


def test_requests_outside_a_window_wait_for_the_next_one():
    with serving(tiny()) as (server, device):
        device.prepare(tiny_requests())
        with window(server):
            assert_exact(device, 5)
        wait_for(lambda: server.stats()["sleeps"] >= 1)
        assert device.ask(1, limit_s=0.05).timeouts == 1
        with window(server):
            wait_for(lambda: device.reply == device.number == 6)
            assert_exact(device, 5)
        server.end_window()  # nothing is in flight: nothing happens
        with pytest.raises(BadArgument, match="in flight"), window(server):
            server.begin_window()


def test_end_of_a_window_waits_for_the_request_under_way():
    with serving(tiny()) as (server, device):
        device.prepare(tiny_requests())
        server.begin_window()
        server.inject("delay", 100_000)
        assert device.ask(1, limit_s=0.02).timeouts == 1
        server.end_window()
        assert device.reply == 1


def test_no_wake_up_is_lost():
    """Windows of one request, at gaps around the time the service needs to fall asleep."""
    rng = np.random.default_rng(1)
    with serving(tiny(), spin_us=0) as (server, device):
        device.prepare(tiny_requests())
        for i in range(1600):
            with window(server):
                assert_exact(device, 1, seed=int(rng.integers(1 << 30)))
            if i % 8 == 0:
                wait_for(lambda: server._words[SLEEPING // 8] == 1)
            for _ in range(int(rng.integers(0, 2000))):
                pass
        assert server.stats()["sleeps"] > 150


def test_telemetry_and_counts():
    model = tiny()
    requests = [model.request(np.random.default_rng(i), T=4, layer=i, misses=0.5) for i in (1, 3)]
    with serving(model) as (server, device):
        for request in requests:
            before = time.monotonic_ns()
            with window(server):
                device.prepare([request])
                assert_exact(device, 1)
            table = server.telemetry()
            here = request.decisions == CPU
            experts = len(set(request.ids[here].tolist()))
            row = table[request.layer]
            assert before < row["start_ns"] < row["end_ns"] < time.monotonic_ns()
            assert (row["experts"], row["entries"], row["requests"]) == (experts, here.sum(), 1)
            assert row["n_bytes"] == experts * model.weights.experts.blob_bytes(request.layer)
            assert not np.delete(table, request.layer).view(np.int64).any()
        stats = server.stats()
        assert stats["windows"] == stats["requests"] == stats["replies"] == 2 and stats["failures"] == 0
        assert stats["entries"] == sum(int((r.decisions == CPU).sum()) for r in requests)
        assert 0 < stats["busy_ns"] < time.monotonic_ns() - before


def test_memory_is_as_priced():
    with serving(tiny()) as (server, device):
        assert server.n_bytes == MissServer.scratch_bytes(tiny().weights, device.mailbox) > 0
