// Rows of F32, F16 and BF16 matrices times float32 rows by one warp: 256 lanes (index mod 256), ascending fma, halving tree.
#pragma once
#include "early.cuh"
#include "sums.cuh"

enum Kind { F32_VALUES, F16_VALUES, BF16_VALUES };

// N consecutive weights from index i on (i a multiple of N), widened exactly.
template <int KIND, int N>
DEVICE void weights_at(const u8 *row, int i, float (&w)[N]) {
    if (KIND == F32_VALUES) {
#pragma unroll
        for (int j = 0; j < N; j += 2) {
            uint2 v = load_once((const uint2 *)(row + 4 * (size_t)(i + j)));
            w[j] = float_of(v.x);
            w[j + 1] = float_of(v.y);
        }
    } else {
        u32 v[N / 2];
        if (N == 8) {
            uint4 q = load_once((const uint4 *)(row + 2 * (size_t)i));
            v[0] = q.x, v[N / 2 - 3] = q.y, v[N / 2 - 2] = q.z, v[N / 2 - 1] = q.w;
        } else {
            v[0] = load_once((const u32 *)(row + 2 * (size_t)i));
        }
#pragma unroll
        for (int j = 0; j < N / 2; j++) {
            w[2 * j] = KIND == F16_VALUES ? half_f32((u16)v[j]) : float_of(v[j] << 16);
            w[2 * j + 1] = KIND == F16_VALUES ? half_f32((u16)(v[j] >> 16)) : float_of(v[j] & 0xffff0000u);
        }
    }
}

// acc[c][j] += chain of lane `first + j` for columns c: values first, first + lanes, ..
template <int KIND, int N, int T>
DEVICE void chains(const u8 *row, const float *x, int n_x, int K, int first, int lanes, float (&acc)[T][N]) {
    const int loads = N == 2 ? (T <= 4 ? 8 : 4) : T <= 2 ? 4 : T <= 4 ? 2 : 1;  // in flight, within the registers there are
#pragma unroll loads
    for (int i = first; i < K; i += lanes) {
        float w[N];
        weights_at<KIND, N>(row, i, w);
#pragma unroll
        for (int c = 0; c < T; c++) {
            int column = c < n_x ? c : n_x - 1;
            if (N == 8) {
                const float *p = x + (u32)(column * K + i);  // 32 bits: registers are short
                float4 a = *(const float4 *)p, b = *(const float4 *)(p + 4);
                float v[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
                for (int j = 0; j < N; j++) acc[c][j] = fma32(w[j], v[j], acc[c][j]);
            } else {
                float2 a = *(const float2 *)(x + (size_t)column * K + i);
                acc[c][0] = fma32(w[0], a.x, acc[c][0]);
                acc[c][1] = fma32(w[1], a.y, acc[c][1]);
            }
        }
    }
}

// The same for row number `row` of a matrix of rows of K values.
template <int N, int T>
DEVICE void chains_of(int kind, const u8 *w, int row, const float *x, int n_x, int K, int first, int lanes,
                      float (&acc)[T][N]) {
    if (kind == BF16_VALUES) chains<BF16_VALUES, N, T>(w + (size_t)row * K * 2, x, n_x, K, first, lanes, acc);
    else if (kind == F16_VALUES) chains<F16_VALUES, N, T>(w + (size_t)row * K * 2, x, n_x, K, first, lanes, acc);
    else chains<F32_VALUES, N, T>(w + (size_t)row * K * 4, x, n_x, K, first, lanes, acc);
}

// Brings rows of such a matrix from number `row` on, shared out to threads.
DEVICE void bring_rows(int kind, const u8 *w, int row, int rows, int K, u32 thread, u32 threads) {
    u32 bytes = K * (kind == F32_VALUES ? 4 : 2);
    bring_early(w + (size_t)row * bytes, rows * bytes, thread, threads);
}

// Halving tree over 256 lanes of one warp, lane 8 t + j in v[j] of thread t: threads trade the halves they do not keep.
DEVICE float tree_of_eights(float (&v)[8]) {
    int t = threadIdx.x & 31;
    float a[4], b[2], s;
#pragma unroll
    for (int j = 0; j < 4; j++) {  // distance 128
        bool upper = t & 16;
        float other = __shfl_xor_sync(ALL_LANES, upper ? v[j] : v[j + 4], 16);
        a[j] = add32(upper ? v[j + 4] : v[j], other);
    }
#pragma unroll
    for (int j = 0; j < 2; j++) {  // distance 64
        bool upper = t & 8;
        float other = __shfl_xor_sync(ALL_LANES, upper ? a[j] : a[j + 2], 8);
        b[j] = add32(upper ? a[j + 2] : a[j], other);
    }
    bool upper = t & 4;  // distance 32
    s = add32(upper ? b[1] : b[0], __shfl_xor_sync(ALL_LANES, upper ? b[0] : b[1], 4));
    s = add32(s, __shfl_xor_sync(ALL_LANES, s, 2));   // 16
    s = add32(s, __shfl_xor_sync(ALL_LANES, s, 1));   // 8
    s = add32(s, __shfl_xor_sync(ALL_LANES, s, 16));  // 4
    s = add32(s, __shfl_xor_sync(ALL_LANES, s, 8));   // 2
    return add32(s, __shfl_xor_sync(ALL_LANES, s, 4));
}

// Sums of N times 256 lanes that lie one behind the other, by one warp: lane lane_of_pair<N>(i) gets sum number i.
template <int N>
DEVICE float trees_of_256(const float *lanes) {
    float sums[N];
#pragma unroll
    for (int i = 0; i < N; i++) {
        float v[8];
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] = lanes[256 * i + 32 * j + (threadIdx.x & 31)];
#pragma unroll
        for (int distance = 4; distance; distance >>= 1)
#pragma unroll
            for (int j = 0; j < distance; j++) v[j] = add32(v[j], v[j + distance]);
        sums[i] = v[0];
    }
    return add32(packed_tree<N>(sums), 0.f);
}
