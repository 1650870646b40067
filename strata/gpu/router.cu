// Router: the K largest logits of a row and the softmax over them. One block of 256 threads a row.
//
// A thread holds the logits of experts t, t + 256, ..; K rounds find the largest left, equal ones at the lowest id. With
// a logit that is not finite the ids are still valid, so that what follows stays inside its memory.
#include "sums.cuh"

// A key that orders like the floats (-0 equal to +0), with the lowest id first among equals.
DEVICE u64 order(float x, int e) {
    u32 b = bits_of(add32(x, 0.f));
    b = b & 0x80000000u ? ~b : b | 0x80000000u;
    return (u64)b << 32 | (u32)~e;
}

KERNEL(256) router(const float *logits, int *ids, float *weights, int E, int K, float scale, u64 *error, u64 where) {
    __shared__ u64 best[8];
    __shared__ float chosen[128];
    __shared__ int bad;
    int t = threadIdx.x, row = blockIdx.x;
    const float *l = logits + (size_t)row * E;
    int *out_ids = ids + (size_t)row * K;
    if (t == 0) bad = 0;
    __syncthreads();
    u64 last = ~0ull;
    for (int j = 0; j < K; j++) {
        u64 mine = 0;
        for (int e = t; e < E; e += 256) {
            float x = l[e];
            if (j == 0 && !finite32(x)) bad = 1;
            u64 key = order(x, e);
            if (key < last && key > mine) mine = key;
        }
#pragma unroll
        for (int half = 16; half; half >>= 1) {
            u64 other = __shfl_xor_sync(ALL_LANES, mine, half);
            mine = other > mine ? other : mine;
        }
        if ((t & 31) == 0) best[t >> 5] = mine;
        __syncthreads();
        last = best[0];
#pragma unroll
        for (int w = 1; w < 8; w++) last = best[w] > last ? best[w] : last;
        int e = (int)~(u32)last;
        if (t == 0) {
            out_ids[j] = e;
            chosen[j] = l[e];
        }
        __syncthreads();
    }
    if (t == 0 && bad) report(error, where, NOT_FINITE, row);
    float e = t < K ? exp32(sub32(chosen[t], chosen[0])) : 0.f;
    __syncthreads();
    if (t < K) chosen[t] = e;
    __syncthreads();
    if (t >= K) return;
    float total = 0.f;
    for (int j = 0; j < K; j++) total = add32(total, chosen[j]);
    float w = div32(e, total);
    weights[(size_t)row * K + t] = scale != 1.f ? mul32(w, scale) : w;
}
