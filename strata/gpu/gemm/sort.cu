// Entries sorted by expert, without atomics: the order is the same in every run.
#include "sums.cuh"

// counts[e] = entries that want expert e = blockIdx.x.
KERNEL(256) count_entries(const int *ids, int n, int *counts) {
    __shared__ int parts[8];
    int found = 0;
    for (int i = threadIdx.x; i < n; i += 256) found += ids[i] == (int)blockIdx.x;
#pragma unroll
    for (int half = 16; half; half >>= 1) found += __shfl_xor_sync(ALL_LANES, found, half);
    if ((threadIdx.x & 31) == 0) parts[threadIdx.x >> 5] = found;
    __syncthreads();
    if (threadIdx.x == 0) {
        found = 0;
        for (int w = 0; w < 8; w++) found += parts[w];
        counts[blockIdx.x] = found;
    }
}

// offsets[e], the sum of the counts before e = blockIdx.x, and from there on the entries of e, ascending.
KERNEL(256) place_entries(const int *ids, int n, int E, const int *counts, int *offsets, int *entries) {
    __shared__ int parts[8];
    int e = blockIdx.x, lane = threadIdx.x & 31, warp = threadIdx.x >> 5, start = 0;
    for (int i = threadIdx.x; i < e; i += 256) start += counts[i];
#pragma unroll
    for (int half = 16; half; half >>= 1) start += __shfl_xor_sync(ALL_LANES, start, half);
    if (lane == 0) parts[warp] = start;
    __syncthreads();
    start = 0;
    for (int w = 0; w < 8; w++) start += parts[w];
    int count = counts[e];
    if (threadIdx.x == 0) {
        offsets[e] = start;
        if (e == E - 1) offsets[E] = start + count;
    }
    if (count == 0) return;
    for (int first = 0; first < n; first += 256) {
        int i = first + threadIdx.x;
        bool mine = i < n && ids[i] == e;
        u32 warp_has = __ballot_sync(ALL_LANES, mine);
        __syncthreads();  // parts have been read
        if (lane == 0) parts[warp] = __popc(warp_has);
        __syncthreads();
        int before = __popc(warp_has & ((1u << lane) - 1));
        for (int w = 0; w < 8; w++) {
            if (w < warp) before += parts[w];
        }
        if (mine) entries[start + before] = i;
        for (int w = 0; w < 8; w++) start += parts[w];
    }
}
