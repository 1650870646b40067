"""Times prefill chunks at full width on a CUDA device: python -m tests.gpu.time_prefill [rows ...]

A made-up model of four full-width layers (three GDN, one attention, 512 experts) stands for twelve times as many. Shown
by rows of a chunk: ms, tokens/s of 48 such layers; then kernels by share, near the start and far into the context.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np

from strata.arch.flash_next.geometry import read_geometry
from strata.arch.flash_next.programs import build_programs
from strata.gpu.backend import GpuBackend
from strata.gpu.device import CupyDevice
from strata.gpu.expert_store import ExpertStore
from strata.gpu.hybrid import Hybrid
from strata.gpu.prefill import NGRAM_ROWS
from strata.gpu.slots import ExpertSlots
from strata.pack.experts import expert_layout
from strata.pack.gguf_file import GgufFile
from strata.pack.tensors import Tensors
from tests.model_maker import make_wide_model
from tests.test_gpu_prefill import NoService

LAYERS, CONTEXT, MOST_ROWS, MODEL_LAYERS = 4, 32768, 8192, 48
NOT_FIRST = (-1, -1)


def make(path: Path, held: int = 512, mode: str = "file") -> GpuBackend:
    """held: experts of a layer that the device holds; mode: where the host's bytes lie."""
    gguf = GgufFile(path)
    g = read_geometry(gguf)
    programs, experts = build_programs(g, CONTEXT, "int8", chunk_rows=MOST_ROWS), expert_layout(gguf, g.L)
    began = time.perf_counter()
    device, slots = CupyDevice(), ExpertSlots(experts, (held,) * g.L)
    hybrid = Hybrid(device, experts, g.K, NoService) if held < experts.E else None
    store = ExpertStore(experts, gguf, device, mode)
    backend = GpuBackend(Tensors(gguf), g, experts, programs, device, slots=slots, hybrid=hybrid, store=store)
    mib = backend._chunks.arena.n_bytes / 2**20
    print(f"loaded in {time.perf_counter() - began:.0f} s; prefill buffers {mib:.0f} MiB")
    return backend


def chunk_ms(backend: GpuBackend, state, tokens: np.ndarray, position: int, rounds: int = 4) -> float:
    """A whole call of prefill, the look-up of n-gram rows included."""
    times = []
    for _ in range(rounds):
        state.rows = position
        began = time.perf_counter()
        backend.prefill(state, tokens, NOT_FIRST)
        times.append(1e3 * (time.perf_counter() - began))
    return float(np.median(times[1:]))


def device_ms(backend: GpuBackend, tokens: np.ndarray, position: int, rounds: int = 4) -> float:
    """A chunk whose n-gram rows were looked up before, as between chunks of a long prompt."""
    times = []
    for _ in range(rounds):
        backend._chunks.ngram_rows.ahead(tokens, NOT_FIRST)
        backend.device.synchronize()
        began = time.perf_counter()
        backend._chunks.run(tokens, NOT_FIRST, position)
        times.append(1e3 * (time.perf_counter() - began))
    return float(np.median(times[1:]))


def kernel_ms(backend: GpuBackend, tokens: np.ndarray, position: int) -> Counter:
    """Milliseconds by kernel, launches one by one."""
    cp, stream, chunks = backend.device._cupy, backend.device.stream, backend._chunks
    chunks.ngram_rows.ahead(tokens, NOT_FIRST)
    queue, total = chunks._feed(tokens, position), Counter()
    for i, launch in enumerate(queue.lowering.launches):
        start, stop = cp.cuda.Event(), cp.cuda.Event()
        if any(index == i and what == NGRAM_ROWS for index, what, _ in queue.marks):
            backend.device.upload(chunks.arena.address("ngram.rows"), chunks.ngram_rows.of(tokens, NOT_FIRST))
        start.record(stream)
        backend.device.run([launch])
        stop.record(stream)
        stop.synchronize()
        total[launch.kernel] += cp.cuda.get_elapsed_time(start, stop)
    return total


def rate(T: int, ms: float) -> str:
    return f"{ms:8.2f} ms, {1e3 * T / (ms * MODEL_LAYERS / LAYERS):,.0f} tokens/s of {MODEL_LAYERS} layers"


def main(rows: list[int]) -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 4000, MOST_ROWS).astype(np.int32)
    with tempfile.TemporaryDirectory() as folder:
        path = make_wide_model(Path(folder), layers=LAYERS, experts=512, period=4)
        backend = make(path)
        state = backend.new_state()
        for position in (0, CONTEXT - MOST_ROWS):
            for T in rows:
                call = chunk_ms(backend, state, tokens[:T], position)
                launches = len(backend._chunks.queue_of(T).lowering.launches)
                ms = device_ms(backend, tokens[:T], position)
                print(f"position {position:>6} rows {T:>5}: {launches} launches, device {rate(T, ms)}; "
                      f"a call {call:.2f} ms", flush=True)  # fmt: skip
            for T in sorted({2048, rows[-1]} & set(rows)):
                total = kernel_ms(backend, tokens[:T], position)
                whole = sum(total.values())
                print(f"  kernels of {T} rows, one by one: {whole:.2f} ms")
                for kernel, ms in total.most_common(26):
                    print(f"    {kernel:<28} {ms:8.3f} ms {100 * ms / whole:5.1f} %")
        state.rows = 0
        began = time.perf_counter()
        for first in range(0, 64, 8):
            backend.window(state, tokens[first : first + 8], NOT_FIRST)
            backend.commit(state, 8)
        print(f"a window of 8 rows: {rate(8, 1e3 * (time.perf_counter() - began) / 8)}")
        backend.close()
        for held, mode in ((256, "file"), (0, "file"), (256, "pinned"), (0, "pinned")):
            backend = make(path, held, mode)
            state, stream = backend.new_state(), backend._chunks.stream
            missing = LAYERS * (512 - held) * backend.slots.slot_bytes(0)
            host = [Timed(stream, name) for name in ("begin", "_send")]
            for T in rows:
                ms = chunk_ms(backend, state, tokens[:T], 0)
                parts = ", ".join(f"{t.name} {t.take():.1f} ms" for t in host)
                print(f"{held} of 512 held, {mode}, rows {T:>5}: {rate(T, ms)}, {missing / ms / 1e6:.1f} GB/s; "
                      f"host a chunk: {parts}", flush=True)  # fmt: skip
            backend.close()


class Timed:
    """Host time of a method, a chunk."""

    def __init__(self, owner: object, name: str):
        self.name, self._inner, self._seconds = name, getattr(owner, name), 0.0
        setattr(owner, name, self)

    def __call__(self, *arguments: object) -> object:
        began = time.perf_counter()
        try:
            return self._inner(*arguments)
        finally:
            self._seconds += time.perf_counter() - began

    def take(self, rounds: int = 4) -> float:
        ms, self._seconds = 1e3 * self._seconds / rounds, 0.0
        return ms


if __name__ == "__main__":
    main([int(a) for a in sys.argv[1:]] or [256, 1024, 2048, 4096, 8192])
