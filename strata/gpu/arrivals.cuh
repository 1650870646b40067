// Blocks that share a result: the last of them to arrive makes what needs all of their parts, so that no kernel of its own
// has to.
#pragma once
#include "exact.cuh"

// Whether this block is the last of n that come here, for all its threads. What the others wrote before they came may then
// be read past L1 (load_volatile). The counter is 0 before the first block comes and again behind the last one.
DEVICE bool last_of(u32 *counter, u32 n) {
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        last = atomicAdd(counter, 1u) == n - 1;
        if (last) *counter = 0;
    }
    __syncthreads();
    if (last) __threadfence();
    return last;
}

DEVICE void load_eight(const float *p, float (&v)[8]) {
    uint4 a = load_volatile((const uint4 *)p), b = load_volatile((const uint4 *)p + 1);
    v[0] = float_of(a.x), v[1] = float_of(a.y), v[2] = float_of(a.z), v[3] = float_of(a.w);
    v[4] = float_of(b.x), v[5] = float_of(b.y), v[6] = float_of(b.z), v[7] = float_of(b.w);
}
