// Router: the K largest logits of a row and the softmax over them. One warp a row.
//
// A lane holds the keys of experts lane, lane + 32, .. and knows its largest; K rounds find the largest of all, equal
// ones at the lowest id. With a logit that is not finite the ids are still valid, so that what follows stays inside its
// memory.
#include "early.cuh"
#include "sums.cuh"

// A number that orders like the floats (-0 equal to +0), above 0 for every float.
DEVICE u32 order(float x) {
    u32 b = bits_of(add32(x, 0.f));
    b = b & 0x80000000u ? ~b : b | 0x80000000u;
    return b ? b : 1;  // a NaN: reported
}

// The float of such a number; -0 comes back as +0, which no weight can tell.
DEVICE float value_of(u32 key) { return float_of(key & 0x80000000u ? key & 0x7fffffffu : ~key); }

DEVICE u32 max_of_warp(u32 v) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    return __reduce_max_sync(ALL_LANES, v);
#else
#pragma unroll
    for (int half = 16; half; half >>= 1) {
        u32 other = __shfl_xor_sync(ALL_LANES, v, half);
        v = other > v ? other : v;
    }
    return v;
#endif
}

// EACH: keys a lane holds, at least E / 32.
template <int EACH>
STARTS_EARLY KERNEL(32) router(const float *logits, int *ids, float *weights, int E, int K, float scale, u64 *error, u64 where) {
    __shared__ float chosen[128];
    let_next_start();
    wait_for_inputs();
    int lane = threadIdx.x, row = blockIdx.x;
    const float *l = logits + (size_t)row * E;
    int *out_ids = ids + (size_t)row * K;
    u32 keys[EACH], best = 0;
    int best_id = 0;
    bool bad = false;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        int e = 32 * i + lane;
        float x = e < E ? l[e] : 0.f;
        bad = bad || !finite32(x);
        keys[i] = e < E ? order(x) : 0;
        if (keys[i] > best) best = keys[i], best_id = e;
    }
    for (int j = 0; j < K; j++) {
        u32 top = max_of_warp(best);
        int e = (int)~max_of_warp(best == top ? ~(u32)best_id : 0);
        if (lane == 0) {
            out_ids[j] = e;
            chosen[j] = value_of(top);
        }
        if (lane == (e & 31)) {
            best = 0;
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                if (32 * i + lane == e) keys[i] = 0;
                if (keys[i] > best) best = keys[i], best_id = 32 * i + lane;
            }
        }
    }
    if (!warp_all(!bad) && lane == 0) report(error, where, NOT_FINITE, row);
    __syncwarp();
    float top = chosen[0], total = 0.f;
    __syncwarp();
    for (int j = lane; j < K; j += 32) chosen[j] = exp32(sub32(chosen[j], top));
    __syncwarp();
    for (int j = 0; j < K; j++) total = add32(total, chosen[j]);
    for (int j = lane; j < K; j += 32) {
        float w = div32(chosen[j], total);
        weights[(size_t)row * K + j] = scale != 1.f ? mul32(w, scale) : w;
    }
}
