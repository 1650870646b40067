"""The detector of races for shared memory: kernels that lack one barrier are found, the same ones with it are not."""

from __future__ import annotations

import numpy as np
import pytest

from strata.gpu.launch import Source, launch
from tests.gpu.run_on_cpu import ON_DEVICE, needs_compiler, run

pytestmark = [needs_compiler, pytest.mark.skipif(ON_DEVICE, reason="about the harness of the CPU")]

# Every kernel has one place where a barrier belongs; BARRIER 0 leaves it out.
KERNELS = r"""
template <int BARRIER> static inline void meet() {
    if (BARRIER == 1) __syncwarp();
    if (BARRIER == 2) __syncthreads();
    if (BARRIER == 3) __shfl_xor_sync(0xffffffffu, 1, 1);
    if (BARRIER == 4) __all_sync(0xffffffffu, 1);
}
template <int BARRIER> __global__ void write_read(int *out) {
    __shared__ int words[64];
    int t = threadIdx.x;
    words[t] = t;
    meet<BARRIER>();
    out[t] = words[t ^ 1];
}
template <int BARRIER> __global__ void read_write(int *out) {
    __shared__ int words[64];
    int t = threadIdx.x;
    words[t] = t;
    __syncthreads();
    out[t] = words[t ^ 1];
    meet<BARRIER>();
    words[t] = 2;
}
template <int BARRIER> __global__ void all_read_then_one_writes(int *out) {
    __shared__ int word;
    int t = threadIdx.x;
    if (t == 0) word = 7;
    __syncthreads();
    out[t] = word;
    meet<BARRIER>();
    if (t == 63) word = 8;
}
template <int BARRIER> __global__ void write_write(int *out) {
    __shared__ short words[32];
    int t = threadIdx.x;
    if (t < 32) words[t] = 1;
    meet<BARRIER>();
    if (t >= 32) words[t - 32] = 2;
    __syncthreads();
    out[t] = words[t & 31];
}
template <int BARRIER> __global__ void of_launch(int *out) {
    DYNAMIC_SHARED(bytes);
    int t = threadIdx.x;
    bytes[t] = (unsigned char)t;
    meet<BARRIER>();
    out[t] = *(int *)(bytes + (t & ~3));
}
template <int BARRIER> __global__ void next_turn(int *out, int turns) {
    __shared__ int words[64];
    int t = threadIdx.x, sum = 0;
    for (int i = 0; i < turns; i++) {
        words[t] = i;
        __syncthreads();
        sum += words[63 - t];
        meet<BARRIER>();
    }
    out[t] = sum;
}
template <int BARRIER> __global__ void atomics(int *out) {
    __shared__ int sum;
    int t = threadIdx.x;
    if (t == 0) sum = 0;
    __syncthreads();
    atomicAdd(&sum, t);
    meet<BARRIER>();
    out[t] = sum;
}
static inline void start_two(int (&words)[2][64], const int *from) {
    int t = threadIdx.x;
    for (int i = 0; i < 2; i++) {
        copy<4>(&words[i][t], from + 64 * i + t);
        copy_commit();
    }
}
template <int WAIT> __global__ void copies(int *out, const int *from) {
    __shared__ int words[2][64];
    int t = threadIdx.x;
    start_two(words, from);
    if (WAIT == 1) copy_wait<1>();
    if (WAIT == 2) copy_wait<0>();
    out[t] = words[0][t] + (WAIT == 2 ? words[1][t] : 0);
}
template <int WAIT> __global__ void second_copy(int *out, const int *from) {
    __shared__ int words[2][64];
    int t = threadIdx.x;
    start_two(words, from);
    copy_wait<WAIT ? 0 : 1>();
    out[t] = words[1][t];
}
// A run of bytes by one lane. FAULT 0: none, 1: nobody waits, 2: for the phase before, 3: a barrier that may not be
// there yet, 4: an odd address, 5: one lane waits for a phase that nobody asks for.
template <int FAULT> __global__ void bulk(int *out, const int *from) {
    DYNAMIC_SHARED(bytes);
    unsigned long long *barrier = (unsigned long long *)bytes;
    int t = threadIdx.x;
    if (t == 1) bulk_ready(barrier);
    if (FAULT != 3) __syncwarp();
    if (t == 0) {
        bulk_expect(barrier, 32);
        bulk_copy(bytes + 16 + (FAULT == 4), (const unsigned char *)from, 32, barrier);
    }
    if (FAULT != 1) bulk_wait(barrier, FAULT == 2);
    if (FAULT == 5 && t == 3) bulk_wait(barrier, 1);
    __syncwarp();
    out[t] = bytes[16 + t];
}
"""
BLOCK = ("write_read", "read_write", "all_read_then_one_writes", "write_write", "of_launch", "next_turn", "atomics")
COPIES = ("copies<0>", "copies<1>", "copies<2>", "second_copy<0>", "second_copy<1>")
BULK = tuple(f"bulk<{n}>" for n in range(6))


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Source:
    path = tmp_path_factory.mktemp("kernels") / "races.cu"
    path.write_text(KERNELS)
    return Source(str(path), tuple(f"{name}<{n}>" for name in BLOCK for n in range(5)) + COPIES + BULK)


def start(source: Source, kernel: str, reverse: bool, races: bool = True) -> None:
    out, numbers = np.zeros(64, np.int32), np.arange(132, dtype=np.int32)
    at = np.uint64(numbers.ctypes.data + -numbers.ctypes.data % 16)
    given = [np.int32(3)] if kernel.startswith("next") else [at] if kernel in COPIES + BULK else []
    threads = 32 if kernel in BULK else 64
    one = launch(source, kernel, 1, threads, np.uint64(out.ctypes.data), *given, shared_bytes=64)
    run(one, reverse=reverse, races=races)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("name", BLOCK)
def test_a_missing_barrier_is_found(made, name, reverse):
    inside_a_warp = name in ("write_read", "read_write", "of_launch")  # they only touch what their own warp does
    for barrier in range(5):
        if barrier == 2 or (barrier == 1 and inside_a_warp):
            start(made, f"{name}<{barrier}>", reverse)
        else:  # nothing, a barrier of the warp where the block's is needed, or a shuffle or vote, which order no memory
            with pytest.raises(AssertionError, match=r"race at .* shared memory: (read|write|atomic) by thread"):
                start(made, f"{name}<{barrier}>", reverse)
            start(made, f"{name}<{barrier}>", reverse, races=False)


@pytest.mark.parametrize("reverse", [False, True])
def test_a_copy_that_was_not_waited_for_is_found(made, reverse):
    for kernel in ("copies<0>", "second_copy<0>"):
        with pytest.raises(AssertionError, match=r"race .*: copy under way by .*, then read by .*; .*races.cu:"):
            start(made, kernel, reverse)
    for kernel in ("copies<1>", "copies<2>", "second_copy<1>"):
        start(made, kernel, reverse)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (1, "race .*: copy under way by thread 0, then read by thread"),
        (2, "nobody asks for the copies that threads wait for"),
        (3, "race .*: write by thread 1, then atomic|atomic by thread .*, then write|bytes of a phase are named twice"),
        (4, "thread 0: a bulk copy is not aligned for 16 bytes"),
        (5, "nobody asks for the copies that threads wait for; 31 threads at a warp exchange, .* 1 wait for copies"),
    ],
)
def test_faults_of_bulk_copies_are_found(made, fault, told, reverse):
    start(made, "bulk<0>", reverse)
    with pytest.raises(AssertionError, match=told):
        start(made, f"bulk<{fault}>", reverse)
