// Blocks that share a result: the last of them to arrive makes what needs all of their parts, so that no kernel of its own
// has to.
#pragma once
#include "exact.cuh"

// Counts up, from n - 1 to 0, and returns what was there before. What threads of the block wrote before a barrier in front of
// this, whoever sees the count and then calls `see_what_arrived` sees too.
#ifdef STRATA_ON_CPU
DEVICE u32 count_in(u32 *counter, u32 n) {
    u32 before = *counter;
    *counter = before >= n - 1 ? 0 : before + 1;
    return before;
}
DEVICE void see_what_arrived() {}
#else
DEVICE u32 count_in(u32 *counter, u32 n) {
    u32 before;
    asm volatile("atom.release.gpu.global.inc.u32 %0,[%1],%2;" : "=r"(before) : "l"(counter), "r"(n - 1) : "memory");
    return before;
}
DEVICE void see_what_arrived() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
#endif

// Whether this block is the last of n that come here, for all its threads. What the others wrote before they came may then
// be read past L1 (load_volatile). The counter is 0 before the first block comes and again behind the last one. All threads
// call `meanwhile` while the first of them waits for the counter.
template <class W>
DEVICE bool last_of(u32 *counter, u32 n, W meanwhile) {
    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0) {
        last = count_in(counter, n) == n - 1;
        if (last) see_what_arrived();
    }
    meanwhile();
    __syncthreads();
    return last;
}
DEVICE bool last_of(u32 *counter, u32 n) {
    return last_of(counter, n, [] {});
}

DEVICE void load_eight(const float *p, float (&v)[8]) {
    uint4 a = load_volatile((const uint4 *)p), b = load_volatile((const uint4 *)p + 1);
    v[0] = float_of(a.x), v[1] = float_of(a.y), v[2] = float_of(a.z), v[3] = float_of(a.w);
    v[4] = float_of(b.x), v[5] = float_of(b.y), v[6] = float_of(b.z), v[7] = float_of(b.w);
}
