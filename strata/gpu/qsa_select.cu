// Sparse attention, second part: scores of complete blocks and the exact best of them.
//
// Scores are not negative, so their bits rank like their values; bits of a score that is not finite are ranked all the
// same, so the chosen blocks are valid whatever came before.
#include "sums.cuh"

#define SCORE_THREADS 256
#define SELECT_THREADS 1024

// scores (T, most): one warp a block of cells, grid-stride over the blocks that row blockIdx.y sees. Shared: its queries.
KERNEL(SCORE_THREADS) qsa_scores(const float *iq, float *const *keys_slot, const i64 *pos, float *scores, int heads,
                                 int dim, int block, int budget, int most, u64 *error, u64 where) {
    DYNAMIC_SHARED(bytes);
    float *q = (float *)bytes;
    int row = blockIdx.y, lane = threadIdx.x & 31, lanes = lanes_of(dim, 32);
    int n = (int)((*pos + row + 1) / block);
    if (n <= budget) return;  // all are taken
    for (int i = threadIdx.x; i < heads * dim; i += SCORE_THREADS) q[i] = iq[(size_t)row * heads * dim + i];
    __syncthreads();
    const float *keys = *keys_slot;
    bool fine = true;
    for (int b = (blockIdx.x * SCORE_THREADS + threadIdx.x) >> 5; b < n; b += gridDim.x * (SCORE_THREADS / 32)) {
        const float *key = keys + (size_t)b * dim;
        float total = 0.f;
        for (int h = 0; h < heads; h++) {
            float s = 0.f;
            if (lane < lanes)
                for (int i = lane; i < dim; i += lanes) s = fma32(q[h * dim + i], key[i], s);
            s = warp_tree(s);
            total = s != s ? s : add32(total, s > 0.f ? s : 0.f);
        }
        if (lane == 0) scores[(size_t)row * most + b] = total;
        fine = fine && finite32(total);
    }
    if (!fine && lane == 0) report(error, where, NOT_FINITE, row);
}

// Exclusive sum over the block's threads, and the total. warps: 33 ints of shared memory.
DEVICE int sum_before(int v, int *warps, int &total) {
    int t = threadIdx.x, lane = t & 31, mine = v;
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) {
        int other = __shfl_up_sync(ALL_LANES, v, d);
        if (lane >= d) v += other;
    }
    __syncthreads();
    if (lane == 31) warps[t >> 5] = v;
    __syncthreads();
    if (t < 32) {
        int w = warps[t], s = w;
#pragma unroll
        for (int d = 1; d < 32; d <<= 1) {
            int other = __shfl_up_sync(ALL_LANES, s, d);
            if (t >= d) s += other;
        }
        warps[t] = s - w;
        if (t == 31) warps[32] = s;
    }
    __syncthreads();
    total = warps[32];
    return warps[t >> 5] + v - mine;
}

// blocks (T, budget) int32, ascending: the `budget` best, of equal ones at the edge the lowest. One block a row.
KERNEL(SELECT_THREADS) qsa_select(const float *scores, const i64 *pos, int *blocks, int block, int budget, int most) {
    __shared__ int counts[256], warps[33], digit, left;
    int row = blockIdx.x, t = threadIdx.x;
    int n = (int)((*pos + row + 1) / block);
    int *out = blocks + (size_t)row * budget;
    if (n <= budget) {
        for (int b = t; b < n; b += SELECT_THREADS) out[b] = b;
        return;
    }
    const float *s = scores + (size_t)row * most;
    u32 prefix = 0, mask = 0;
    if (t == 0) left = budget;
    for (int shift = 24; shift >= 0; shift -= 8) {  // bits of the budget-th largest, byte by byte
        if (t < 256) counts[t] = 0;
        __syncthreads();
        for (int b = t; b < n; b += SELECT_THREADS) {
            u32 u = bits_of(s[b]) & 0x7fffffffu;
            if ((u & mask) == prefix) atomicAdd(&counts[u >> shift & 255], 1);
        }
        __syncthreads();
        if (t == 0) {
            int d = 255, rest = left;
            while (counts[d] < rest) rest -= counts[d--];
            digit = d;
            left = rest;
        }
        __syncthreads();
        prefix |= (u32)digit << shift;
        mask |= 255u << shift;
        __syncthreads();
    }
    int at_edge = left, done = 0, equal_before = 0;
    for (int first = 0; first < n; first += SELECT_THREADS) {
        int b = first + t, all;
        u32 u = b < n ? bits_of(s[b]) & 0x7fffffffu : 0;
        bool equal = b < n && u == prefix, above = b < n && u > prefix;
        int rank = equal_before + sum_before(equal, warps, all);
        equal_before += all;
        bool taken = above || (equal && rank < at_edge);
        int place = done + sum_before(taken, warps, all);
        done += all;
        if (taken) out[place] = b;
    }
}
