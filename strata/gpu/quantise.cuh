// Quantised activations: int8 codes, a float32 scale per group of 32 or 256 values, int32 sums of every 16 codes.
// One warp quantises one group; lane l holds V = group / 32 consecutive values, from V l on.
#pragma once
#include "sums.cuh"

#define TINY_BITS 0x08800000u  // 2^-110: a group below it becomes zero
#define INF_BITS 0x7f800000u

DEVICE u32 warp_max(u32 m) {
#pragma unroll
    for (int half = 16; half; half >>= 1) {
        u32 other = __shfl_xor_sync(ALL_LANES, m, half);
        m = other > m ? other : m;
    }
    return m;
}

// codes: this group's first code (4-byte aligned, 8-byte for V = 8); scale: its scale; sums: its first sum.
// Returns false in all lanes if a value is not finite: the group is then zero.
template <int V>
DEVICE bool quantise_group(const float (&x)[V], i8 *codes, float *scale, int *sums) {
    int lane = threadIdx.x & 31;
    u32 m = 0;
#pragma unroll
    for (int i = 0; i < V; i++) {
        u32 b = bits_of(x[i]) & 0x7fffffffu;
        m = b > m ? b : m;
    }
    m = warp_max(m);
    bool bad = m >= INF_BITS, live = !bad && m >= TINY_BITS;
    float largest = float_of(live ? m : 0x3f800000u), inverse = div32(127.f, largest);
    int sum = 0, code[V];
#pragma unroll
    for (int i = 0; i < V; i++) {
        code[i] = live ? rint_i32(mul32(x[i], inverse)) : 0;
        sum += code[i];
    }
    if (lane == 0) *scale = live ? div32(largest, 127.f) : 0.f;
    if (V == 1) {
        codes[lane] = (i8)code[0];
#pragma unroll
        for (int half = 8; half; half >>= 1) sum += __shfl_xor_sync(ALL_LANES, sum, half);
        if ((lane & 15) == 0) sums[lane >> 4] = sum;
    } else {
        u32 word[V / 4 + (V < 4)];
#pragma unroll
        for (int w = 0; w < V / 4; w++) {
            word[w] = 0;
#pragma unroll
            for (int i = 0; i < 4; i++) word[w] |= (u32)(code[4 * w + i] & 255) << (8 * i);
        }
        if (V == 8) *(uint2 *)(codes + 8 * lane) = make_uint2(word[0], word[V / 4 - 1]);
        sum += __shfl_xor_sync(ALL_LANES, sum, 1);
        if ((lane & 1) == 0) sums[lane >> 1] = sum;
    }
    return !bad;
}

// The same with one value a thread, for blocks of 256 threads that all take part: a warp is a group of 32, the block a
// group of 256. i is the value's index in the (T, K) rows; the block's first one is a multiple of GROUP.
template <int GROUP>
DEVICE bool quantise_value(float x, size_t i, i8 *codes, float *scales, int *sums) {
    __shared__ u32 tops[8];
    int t = threadIdx.x, lane = t & 31;
    u32 m = warp_max(bits_of(x) & 0x7fffffffu);
    if (GROUP == 256) {
        __syncthreads();  // the last use of tops is over
        if (lane == 0) tops[t >> 5] = m;
        __syncthreads();
#pragma unroll
        for (int w = 0; w < 8; w++) m = tops[w] > m ? tops[w] : m;
    }
    bool bad = m >= INF_BITS, live = !bad && m >= TINY_BITS;
    float largest = float_of(live ? m : 0x3f800000u);
    int code = live ? rint_i32(mul32(x, div32(127.f, largest))) : 0, sum = code;
#pragma unroll
    for (int half = 8; half; half >>= 1) sum += __shfl_xor_sync(ALL_LANES, sum, half);
    codes[i] = (i8)code;
    if ((t & 15) == 0) sums[i >> 4] = sum;
    if ((GROUP == 256 ? t : lane) == 0) scales[i / GROUP] = live ? div32(largest, 127.f) : 0.f;
    return !bad;
}
