"""Times uploads on a CUDA device: python -m tests.gpu.time_upload [MiB]

GB/s of raw bytes: plain copies, copy and relayout from anonymous and from registered memory, the kernel alone, swaps of
experts through slots, and seconds of registering host memory in its variants. Some matrices are compared with numpy.
"""

from __future__ import annotations

import mmap
import sys
import tempfile
import time
from collections.abc import Callable

import numpy as np

from strata.gpu.device import CupyDevice
from strata.gpu.link_fetch import field_map
from strata.gpu.relayout import relayout, relayout_bytes
from strata.gpu.relayout_stack import relayout_stack
from strata.gpu.slots import ExpertSlots
from strata.gpu.upload import RING_BYTES, Uploader
from strata.pack.experts import ExpertLayout, LayerExperts, Projection
from strata.pack.formats import by_name
from strata.pack.gguf_header import TensorInfo

FORMATS = ("Q4_K", "IQ4_NL", "Q2_0", "IQ3_XXS", "Q8_0")
ROWS, K = 640, 2560


def seconds(work: Callable[[], object], n: int = 3) -> float:
    """Median of n runs, after one to warm up."""
    work()
    times = []
    for _ in range(n):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return sorted(times)[n // 2]


def anonymous(n_bytes: int, touched: bool = True) -> np.ndarray:
    out = np.frombuffer(mmap.mmap(-1, n_bytes), np.uint8)
    if touched:
        block = np.random.default_rng(0).integers(0, 256, 1 << 20, dtype=np.uint8)
        for at in range(0, n_bytes, block.size):
            out[at : at + block.size] = block[: n_bytes - at]
    return out


def times_of_copies(device: CupyDevice, source: np.ndarray, target: int) -> None:
    def direct() -> None:
        device.copy_in(target, source.ctypes.data, source.size, 1)
        device.wait(device.record(1))

    print(f"plain copy, pageable     {source.size / seconds(direct, 1) / 1e9:7.1f} GB/s")
    for threads in (1, 2, 4, 8, 16):
        up = Uploader(device, threads=threads)
        took = seconds(lambda up=up: whole(up, target, source))
        print(f"bounced, {threads:2d} threads      {source.size / took / 1e9:7.1f} GB/s")
        up.close()
    device.register(source.ctypes.data, source.size)
    print(f"plain copy, registered   {source.size / seconds(direct) / 1e9:7.1f} GB/s")
    device.unregister(source.ctypes.data)


def whole(up: Uploader, target: int, source: np.ndarray) -> None:
    up.raw(target, source)
    up.finish()


def times_of_matrices(device: CupyDevice, source: np.ndarray, target: int, room: int) -> None:
    for name in FORMATS:
        format = by_name(name)
        one, stride = ROWS * format.row_bytes(K), -(-relayout_bytes(format, ROWS, K) // 256) * 256
        n = min(source.size // one, room // stride)
        raws = source[: n * one].reshape(n, ROWS, -1)
        out = [f"{name:8s}"]
        for kind, ring in (("bounced", RING_BYTES), ("registered", RING_BYTES), ("registered", RING_BYTES // 2)):
            if kind == "registered":
                device.register(source.ctypes.data, source.size)
            up = Uploader(device, ring_bytes=ring)

            def load(up=up, raws=raws, format=format, stride=stride) -> None:
                for i, raw in enumerate(raws):
                    up.matrix(format, target + i * stride, raw)
                up.finish()

            out.append(f"{kind} ring {ring >> 20} MiB {raws.nbytes / seconds(load) / 1e9:6.1f}")
            for i in (0, n // 2, n - 1):
                found = np.empty(relayout_bytes(format, ROWS, K), np.uint8)
                device.download(target + i * stride, found)
                assert (found == relayout(format, raws[i])).all(), f"{name} {i} differs from numpy"
            up.close()
            if kind == "registered":
                device.unregister(source.ctypes.data)
        # The kernel alone, on garbage: 16 matrices a launch.
        bits, targets = device.alloc(1 << 16), device.alloc(16 * 16)
        field, table = field_map(format, K)
        device.upload(bits, table)
        raw = device.alloc(16 * one)
        device.upload(targets, np.array([(raw + i * one, target + i * stride) for i in range(16)], np.uint64))

        def kernel(format=format, targets=targets, bits=bits, field=field) -> None:
            for _ in range(50):
                device.run(relayout_stack(format, targets, 16, ROWS, K, bits, field))
            device.synchronize()

        out.append(f"kernel alone {50 * 16 * one / seconds(kernel) / 1e9:6.1f} GB/s")
        print("  ".join(out))


def a_layer(names: tuple[str, str, str], E: int) -> ExpertLayout:
    """One layer of experts that no file has."""
    parts = []
    for part, name, (rows, columns) in zip(
        ("gate", "up", "down"), names, ((ROWS, K), (ROWS, K), (K, ROWS)), strict=True
    ):
        format = by_name(name)
        one = rows * format.row_bytes(columns)
        tensor = TensorInfo(f"blk.0.ffn_{part}_exps.weight", (E, rows, columns), format.ggml_id, 0, 0, E * one)
        parts.append(Projection(tensor, rows, columns, 0, one, one, None))
    return ExpertLayout(None, (LayerExperts(*parts),), E, ROWS, K)


class Memory:
    """Experts side by side in an array."""

    def __init__(self, experts: ExpertLayout, data: np.ndarray):
        self.experts, self.data, self.starts = experts, data, []
        at = 0
        for p in experts.layers[0].projections:
            self.starts.append(at)
            at += experts.E * p.n_bytes

    def pinned(self, layer: int, e: int) -> None:
        return None

    def raw(self, layer: int, e: int, part: int) -> np.ndarray:
        p = self.experts.layers[layer].projections[part]
        at = self.starts[part] + e * p.n_bytes
        return self.data[at : at + p.n_bytes].reshape(p.rows, -1)


def times_of_swaps(device: CupyDevice, source: np.ndarray) -> None:
    for names in (("IQ3_XXS", "IQ3_XXS", "IQ4_NL"), ("Q2_0", "Q2_0", "Q2_0")):
        E = min(256, source.size // a_layer(names, 1).blob_bytes(0))
        experts, n = a_layer(names, E), 3 * E // 8
        for registered in (False, True):
            if registered:
                device.register(source.ctypes.data, source.size)
            up = Uploader(device)
            slots = ExpertSlots(experts, [E // 2])
            slots.allocate(device, up, Memory(experts, source))
            start = time.perf_counter()
            slots.fill()
            filled = time.perf_counter() - start
            queued, landed = [], []
            for _ in range(7):
                victims = np.flatnonzero(slots.resident(0))[:n].tolist()
                incoming = np.flatnonzero(~slots.resident(0))[:n].tolist()
                start = time.perf_counter()
                places = [slots.evict(0, e) for e in victims]
                slots.publish()
                for e, slot in zip(incoming, places, strict=True):
                    slots.place(0, e, slot)
                queued.append(time.perf_counter() - start)
                slots.wait_landed()
                slots.publish()
                device.synchronize()
                landed.append(time.perf_counter() - start)
                slots._check(0)
            blob, q, t = experts.blob_bytes(0), float(np.median(queued)), float(np.median(landed))
            how = "registered" if registered else "bounced"
            rate = slots.area_bytes(0) / filled / 1e9
            print(f"{names[0]} {names[2]} blob {blob / 1e6:.2f} MB {how:10s} fill {rate:5.1f} "
                  f"GB/s, {n} swaps: queued {1e3 * q:6.2f} ms, landed {1e3 * t:6.2f} ms, {n / t:7.0f} swaps/s, "
                  f"{n * blob / t / 1e9:5.1f} GB/s")  # fmt: skip
            up.close()
            if registered:
                device.unregister(source.ctypes.data)


def times_of_registering(device: CupyDevice, n_bytes: int) -> None:
    print(f"can_read_host {device.can_read_host}, registers_read_only {device.registers_read_only}")
    for touched in (False, True):
        memory = anonymous(n_bytes, touched)
        start = time.perf_counter()
        device.register(memory.ctypes.data, n_bytes)
        middle = time.perf_counter()
        device.unregister(memory.ctypes.data)
        end = time.perf_counter()
        print(f"anonymous, touched={touched}: register {middle - start:.2f} s, unregister {end - middle:.2f} s")
    if not device.registers_read_only:
        return
    with tempfile.NamedTemporaryFile() as file:
        anonymous(n_bytes).tofile(file)
        file.flush()
        shared = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
        int(shared[:: mmap.PAGESIZE].max())
        start = time.perf_counter()
        device.register(shared.ctypes.data, n_bytes, read_only=True)
        print(f"shared read-only file, pages in memory: register {time.perf_counter() - start:.2f} s")
        target = device.alloc(n_bytes)
        up = Uploader(device)
        print(f"  copied from there at {n_bytes / seconds(lambda: whole(up, target, shared)) / 1e9:.1f} GB/s")
        up.close()
        device.unregister(shared.ctypes.data)


def main() -> None:
    n_bytes = int(sys.argv[1] if len(sys.argv) > 1 else 1024) << 20
    device = CupyDevice()
    print(f"{device.name}, {n_bytes >> 20} MiB")
    source, target = anonymous(n_bytes), device.alloc(n_bytes + (64 << 20))
    times_of_copies(device, source, target)
    times_of_matrices(device, source, target, n_bytes + (64 << 20))
    times_of_swaps(device, source)
    times_of_registering(device, n_bytes)
    device.close()


if __name__ == "__main__":
    main()
