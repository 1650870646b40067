"""The rate at which a device reads the host's pinned memory."""

from __future__ import annotations

from strata.base.errors import StrataError
from strata.gpu.presence import import_cupy

COPY_BYTES = 256 << 20
TURNS = 4


def link_gbps(index: int = 0, n_bytes: int = COPY_BYTES) -> float:
    """GB/s of large copies from pinned host memory to the device: the best of TURNS, after one to warm up.

    Takes n_bytes of either memory while it runs. StrataError where there is no CuPy, no such device or no memory.
    """
    cp = import_cupy()
    runtime = cp.cuda.runtime
    try:
        with cp.cuda.Device(index):
            stream = cp.cuda.Stream(non_blocking=True)
            host = cp.cuda.alloc_pinned_memory(n_bytes)
            device = cp.cuda.Memory(n_bytes)
            began, ended = cp.cuda.Event(), cp.cuda.Event()
            rates = []
            for _ in range(TURNS + 1):
                began.record(stream)
                runtime.memcpyAsync(device.ptr, host.ptr, n_bytes, runtime.memcpyHostToDevice, stream.ptr)
                ended.record(stream)
                ended.synchronize()
                rates.append(n_bytes / (cp.cuda.get_elapsed_time(began, ended) * 1e6))
    except (runtime.CUDARuntimeError, MemoryError) as error:
        raise StrataError(f"the link of CUDA device {index} cannot be measured", found=str(error),
                          needed=f"{n_bytes >> 20} MiB of VRAM and of pinned RAM") from error  # fmt: skip
    return max(rates[1:])
