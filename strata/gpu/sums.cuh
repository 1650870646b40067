// Sums in the canonical order: lane = index mod lanes, ascending fma per lane from +0, halving tree.
//
// lanes is 256 (32 for heads), or the largest power of two that a shorter axis holds. Unused lanes may count as +0:
// that can only turn -0 into +0, and no caller sees the sign of a zero sum.
#pragma once
#include "exact.cuh"

#define ALL_LANES 0xffffffffu

DEVICE int lanes_of(int n, int most) {
    int lanes = most;
    while (lanes > n) lanes >>= 1;
    return lanes;
}

// Halving tree over the 32 lanes of a warp; every lane gets the sum. Addition commutes, so xor serves both sides.
DEVICE float warp_tree(float v) {
#pragma unroll
    for (int half = 16; half; half >>= 1) v = add32(v, __shfl_xor_sync(ALL_LANES, v, half));
    return v;
}

// The fixed tree over the lanes of N sums at once: each exchange moves half of what is left. Returns the sum of the pair
// that `pair_of_lane` names.
template <int N>
DEVICE float packed_tree(float (&v)[N]) {
    int lane = threadIdx.x & 31, left = N;
#pragma unroll
    for (int half = 16; half; half >>= 1) {
        if (left > 1) {
            left >>= 1;
#pragma unroll
            for (int i = 0; i < N / 2; i++)
                if (i < left) {
                    bool upper = lane & half;
                    float keep = upper ? v[i + left] : v[i], give = upper ? v[i] : v[i + left];
                    v[i] = add32(keep, __shfl_xor_sync(ALL_LANES, give, half));
                }
        } else {
            v[0] = add32(v[0], __shfl_xor_sync(ALL_LANES, v[0], half));
        }
    }
    return v[0];
}
// A lane that holds pair `pair` of N after packed_tree.
template <int N>
DEVICE int lane_of_pair(int pair) {
    int lane = 0;
#pragma unroll
    for (int half = 16, left = N; left > 1; half >>= 1) {
        left >>= 1;
        if (pair & left) lane |= half;
    }
    return lane;
}

// Tree over 256 lanes held by one warp, lane 32 j + t of the sum in v[j] of thread t.
DEVICE float warp_tree256(float (&v)[8]) {
#pragma unroll
    for (int half = 4; half; half >>= 1)
#pragma unroll
        for (int j = 0; j < half; j++) v[j] = add32(v[j], v[j + half]);
    return warp_tree(v[0]);
}

// Sum of x[i] y[i] over n values by one warp, `lanes` a power of two up to 256. load_x and load_y map index to value.
template <class X, class Y>
DEVICE float warp_dot(int n, int lanes, X load_x, Y load_y) {
    int t = threadIdx.x & 31;
    float v[8];
#pragma unroll
    for (int j = 0; j < 8; j++) {
        v[j] = 0.f;
        int lane = 32 * j + t;
        if (lane < lanes)
#pragma unroll 1
            for (int i = lane; i < n; i += lanes) v[j] = fma32(load_x(i), load_y(i), v[j]);
    }
    return warp_tree256(v);
}

// Tree over the 256 threads of a block (or the first warps of one); every thread gets the sum. shared: 8 floats, free
// again after the next barrier.
DEVICE float block_tree256(float v, float *shared) {
    // Distances 128, 64 and 32 join warps; sums of a warp's lane t only ever meet other warps' lane t.
    __shared__ float rows[256];
    int t = threadIdx.x;
    rows[t] = v;
    __syncthreads();
    if (t < 32) {
        float a[8];
#pragma unroll
        for (int j = 0; j < 8; j++) a[j] = rows[32 * j + t];
        float s = warp_tree256(a);
        if (t == 0) shared[0] = s;
    }
    __syncthreads();
    return shared[0];
}

// Sum of squares over n values by a block of 256 threads.
template <class X>
DEVICE float block_squares(int n, X load_x, float *shared) {
    int lanes = lanes_of(n, 256), t = threadIdx.x;
    float v = 0.f;
    if (t < lanes)
        for (int i = t; i < n; i += lanes) {
            float x = load_x(i);
            v = fma32(x, x, v);
        }
    return block_tree256(v, shared);
}

// 1 / sqrt(sum / n + eps), one rounding a step.
DEVICE float inverse_rms(float squares, int n, float eps) {
    return div32(1.f, sqrt32(add32(div32(squares, i32_f32(n)), eps)));
}

// Whether `fine` holds in all threads of the warp.
DEVICE bool warp_all(bool fine) { return __all_sync(ALL_LANES, fine); }

// Sum of v over the lanes of a warp, for all of them.
DEVICE int warp_count(int v) {
#pragma unroll
    for (int half = 16; half; half >>= 1) v += __shfl_xor_sync(ALL_LANES, v, half);
    return v;
}

// Sum of v over the threads of a block of whole warps, for all of them. warps: 32 ints of shared memory.
DEVICE int block_count(int v, int *warps) {
    v = warp_count(v);
    __syncthreads();  // the last count has been read
    if ((threadIdx.x & 31) == 0) warps[threadIdx.x >> 5] = v;
    __syncthreads();
    int lane = threadIdx.x & 31, all = lane < (int)(blockDim.x >> 5) ? warps[lane] : 0;
    return warp_count(all);
}
