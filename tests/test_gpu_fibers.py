"""The harness that runs kernels on the CPU: order of lanes, exchanges of a part of a warp, lanes that wait for ever."""

from __future__ import annotations

import numpy as np
import pytest

from strata.gpu.launch import Launch, Source, launch
from tests.gpu.run_on_cpu import ON_DEVICE, needs_compiler, run

pytestmark = [needs_compiler, pytest.mark.skipif(ON_DEVICE, reason="about the harness of the CPU")]

KERNELS = r"""
__global__ void who(int *out, int *next) { out[threadIdx.x] = (*next)++; }
__global__ void rounds(int *out, int n) {
    int t = threadIdx.x, v = t;
    for (int i = 0; i < n; i++) v = __shfl_xor_sync(0xffffffffu, v, 1) + 2;
    __syncthreads();
    out[t] = v;
}
__global__ void halves(int *out) {
    int t = threadIdx.x, lane = t & 31;
    unsigned mask = lane < 16 ? 0xffffu : 0xffff0000u;
    int v = __shfl_xor_sync(mask, t, lane < 16 ? 8 : 4);
    if (lane < 16) v = 100 * v + __shfl_sync(mask, t, 3);
    out[t] = v + (int)(__ballot_sync(mask, lane % 5 == 0) << 16);
}
__global__ void exchange_without(int *out) {
    if (threadIdx.x != 5) out[threadIdx.x] = __shfl_xor_sync(0xffffffffu, 1, 1);
}
__global__ void exchange_or_barrier(int *out) {
    if (threadIdx.x == 33) __syncwarp();
    __syncthreads();
}
__global__ void store_pair(int *out, int at) { *(uint2 *)(out + at) = make_uint2(1, 2); }
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Source:
    path = tmp_path_factory.mktemp("kernels") / "harness.cu"
    path.write_text(KERNELS)
    return Source(str(path), ("who", "rounds", "halves", "exchange_without", "exchange_or_barrier", "store_pair"))


def of(source: Source, kernel: str, threads: int, *arguments: object) -> Launch:
    places = [np.uint64(a.ctypes.data) if isinstance(a, np.ndarray) else a for a in arguments]
    return launch(source, kernel, 1, threads, *places)


@pytest.mark.parametrize("reverse", [False, True])
def test_lanes_run_in_order_or_in_the_opposite_one(made, reverse):
    out, following = np.zeros(70, np.int32), np.zeros(1, np.int32)
    run(of(made, "who", 70, out, following), reverse=reverse)
    np.testing.assert_array_equal(out, np.arange(70)[::-1] if reverse else np.arange(70))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("n", [1, 2, 7])
def test_exchanges_of_whole_warps(made, n, reverse):
    out, wanted = np.zeros(96, np.int32), np.arange(96)
    run(of(made, "rounds", 96, out, np.int32(n)), reverse=reverse)
    for _ in range(n):
        wanted = wanted[np.arange(96) ^ 1] + 2
    np.testing.assert_array_equal(out, wanted)


@pytest.mark.parametrize("reverse", [False, True])
def test_exchanges_of_parts_of_a_warp(made, reverse):
    out = np.zeros(64, np.int32)
    run(of(made, "halves", 64, out), reverse=reverse)
    for t in range(64):
        lane, first = t % 32, t - t % 32
        lanes = range(16) if lane < 16 else range(16, 32)
        ballot = sum(1 << l for l in lanes if l % 5 == 0)
        wanted = 100 * (first + (lane ^ 8)) + first + 3 if lane < 16 else first + (lane ^ 4)
        assert out[t] == np.int64(wanted + (ballot << 16)).astype(np.int32), t


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("kernel", "told"), [
    ("exchange_without", "exchange are missing; 31 threads at a warp exchange, 0 at a barrier, 1 ended"),
    ("exchange_or_barrier", "exchange are missing; 1 threads at a warp exchange"),
])  # fmt: skip
def test_lanes_that_wait_for_ever_are_told(made, kernel, told, reverse):
    out = np.zeros(64, np.int32)
    with pytest.raises(AssertionError, match=told):
        run(of(made, kernel, 32 if kernel == "exchange_without" else 64, out), reverse=reverse)


def test_values_that_are_not_aligned_are_told(made):
    """A device faults there; the CPU would not."""
    out = np.zeros(8, np.int64).view(np.int32)
    run(of(made, "store_pair", 1, out, np.int32(2)))
    assert out[2:5].tolist() == [1, 2, 0]
    with pytest.raises(AssertionError, match=r"a value that is not aligned, .*harness\.cu:\d+"):
        run(of(made, "store_pair", 1, out, np.int32(1)))
