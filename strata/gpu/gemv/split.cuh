// Dense products of matrices with few rows: the warps of a block share out the chunks of eight rows.
//
// A lane's sum has a fixed order along the row, but the factors of its terms have not: every warp computes those of its
// chunks into shared memory, and one thread a lane adds them up in order, chunk by chunk. The bits are those of
// `multiply`; what is gained is the number of warps, which hides latency where eight rows a warp are too few.
#pragma once
#include "gemv/core.cuh"

// One term of a lane: fma32(a, c, sum) is the next sum.
struct Term {
    float a, c;
};
DEVICE Term fma32(float a, float c, Term) { return {a, c}; }

#define SPLIT_ROWS 8
#define SPLIT_KILOBYTES 32  // of terms a round: one chunk of every warp

// Terms of one chunk or one left-over step of the two row blocks. Term of (step, column, row, lane) lies at
// ((step * T + column) * 8 + row) * 16 + lane, minima behind them with 4 lanes.
template <class F, int T>
DEVICE void put_terms(const typename F::Raw (&raw)[2], int e, int step, int lane, u32 first, const Columns<T> &x,
                      const u32 *table, float4 *terms, float2 *minima) {
    int row = lane >> 3, q = lane & 7;
    typename F::Step s[2];
#pragma unroll
    for (int r = 0; r < 2; r++) s[r] = F::unpack(raw[r], e, q, table);
    auto least = either(s[0].least, s[1].least, q & 1);
#pragma unroll
    for (int t = 0; t < T; t++) {
        typename F::X values = F::read(x, t, opaque(first), q);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            Term v[2];
            F::dot(s[r], values, v);
            terms[((step * T + t) * SPLIT_ROWS + 4 * r + row) * 8 + q] = make_float4(v[0].a, v[0].c, v[1].a, v[1].c);
        }
        if constexpr (F::MINIMUM != 0) {
            Term m;
            F::add_minimum(least, q, values, m);
            minima[((step * T + t) * SPLIT_ROWS + 4 * (q & 1) + row) * 4 + (q >> 1)] = make_float2(m.a, m.c);
        }
    }
}

// y (n, rows) = a matrix (rows, K) times n <= T columns.
template <class F, int T>
DEVICE void split_rows(const u8 *weights, const Columns<T> &x, int n_columns, const u32 *table, float *y, i64 y_stride,
                       int rows, int K, float4 *terms, float2 *minima, float *tail) {
    typedef typename F::Raw Raw;
    const int E = Raw::STEPS, P = Raw::BLOCKS, STEP_VALUES = P * F::VALUES;
    const int SUMS = T * SPLIT_ROWS * 16, ALL = SUMS + (F::MINIMUM != 0 ? T * SPLIT_ROWS * 4 : 0), MOST = (ALL + 127) / 128;
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5, q = lane & 7;
    int blocks = K / F::VALUES, chunks = blocks / (E * P), first = 2 * blockIdx.y, last = (rows - 1) >> 2;
    size_t bytes = row_block_bytes<F>(K);
    const u8 *block[2] = {weights + first * bytes, weights + min(first + 1, last) * bytes};
    float sum[MOST];
#pragma unroll
    for (int i = 0; i < MOST; i++) sum[i] = 0.f;
    auto add = [&](int steps) {
        __syncthreads();
#pragma unroll
        for (int i = 0; i < MOST; i++) {
            int item = threadIdx.x + i * blockDim.x;
            if (item < SUMS) {
                const float2 *from = (const float2 *)terms + item;
#pragma unroll 4
                for (int s = 0; s < steps; s++) sum[i] = fma32(from[s * SUMS].x, from[s * SUMS].y, sum[i]);
            } else if (item < ALL) {
                const float2 *from = minima + (item - SUMS);
#pragma unroll 4
                for (int s = 0; s < steps; s++) sum[i] = fma32(from[s * SUMS / 4].x, from[s * SUMS / 4].y, sum[i]);
            }
        }
        __syncthreads();
    };
    Raw ahead[2];
    if (warp < chunks)
#pragma unroll
        for (int r = 0; r < 2; r++) ahead[r].load(block[r] + warp * Raw::CHUNK, lane >> 3, q);
    wait_for_inputs();
#pragma unroll 1
    for (int round = 0; round < chunks; round += warps) {
        int c = round + warp;
        if (c < chunks) {
            Raw now[2] = {ahead[0], ahead[1]};
            if (c + warps < chunks)
#pragma unroll
                for (int r = 0; r < 2; r++) ahead[r].load(block[r] + (size_t)(c + warps) * Raw::CHUNK, lane >> 3, q);
#pragma unroll
            for (int e = 0; e < E; e++)
                put_terms<F, T>(now, e, warp * E + e, lane, (c * E + e) * STEP_VALUES, x, table, terms, minima);
        }
        add((chunks - round < warps ? chunks - round : warps) * E);
    }
    if constexpr (E * P > 1) {
        int left = blocks - chunks * E * P, steps = (left + P - 1) / P;
        if (warp < steps) {  // fewer than E, so one warp each
            int n = left - warp * P < P ? left - warp * P : P;
            if (q * P / 8 < n) {
                Raw now[2];
#pragma unroll
                for (int r = 0; r < 2; r++)
                    now[r].load_last(block[r] + chunks * Raw::CHUNK + warp * Raw::STEP, lane >> 3, q, n);
                put_terms<F, T>(now, 0, warp, lane, (chunks * E + warp) * STEP_VALUES, x, table, terms, minima);
            } else {  // a term of zeros leaves a sum as it is
                int row = lane >> 3;
#pragma unroll
                for (int t = 0; t < T; t++)
#pragma unroll
                    for (int r = 0; r < 2; r++) {
                        terms[((warp * T + t) * SPLIT_ROWS + 4 * r + row) * 8 + q] = make_float4(0.f, 0.f, 0.f, 0.f);
                        if (F::MINIMUM != 0 && (q & 1) == r)
                            minima[((warp * T + t) * SPLIT_ROWS + 4 * r + row) * 4 + (q >> 1)] = make_float2(0.f, 0.f);
                    }
            }
        }
        if (steps) add(steps);
    }
    // The fixed trees: 16 lanes, and 4 of minima, side by side in a warp.
#pragma unroll
    for (int i = 0; i < MOST; i++) {
        int item = threadIdx.x + i * blockDim.x;
        float v = sum[i];
        if (item < SUMS) {
#pragma unroll
            for (int half = 8; half; half >>= 1) v = add32(v, __shfl_xor_sync(ALL_LANES, v, half));
            sum[i] = v;
        } else if (F::MINIMUM != 0 && item < ALL) {
            v = add32(v, __shfl_xor_sync(ALL_LANES, v, 2));
            v = add32(v, __shfl_xor_sync(ALL_LANES, v, 1));
            if ((item & 3) == 0) tail[(item - SUMS) >> 2] = v;
        }
    }
    if constexpr (F::MINIMUM != 0) __syncthreads();
#pragma unroll
    for (int i = 0; i < MOST; i++) {
        int item = threadIdx.x + i * blockDim.x, row = 8 * blockIdx.y + (item >> 4 & 7);
        if (item >= 128 * n_columns || (item & 15) || row >= rows) continue;
        float v = sum[i];
        if constexpr (F::MINIMUM != 0) v = F::MINIMUM > 0 ? add32(v, tail[item >> 4]) : sub32(v, tail[item >> 4]);
        y[(item >> 7) * y_stride + row] = add32(v, 0.f);
    }
}

template <int T>
DEVICE Columns<T> columns_from(int from, int n, const i8 *codes, const float *scales, const int *sums, int K) {
    Columns<T> x = {codes, scales, sums, {}};
#pragma unroll
    for (int t = 0; t < T; t++) x.row[t] = (u32)(from + (t < n ? t : n - 1)) * (u32)K;
    return x;
}

// Grid: (columns / M, row tiles of eight); 4 to 8 warps, whose terms of a round fit into SPLIT_KILOBYTES.
template <class F, int M>
STARTS_EARLY __global__ void __launch_bounds__(256 / F::Raw::STEPS, 1 + F::Raw::STEPS)
split(const u8 *weights, int columns, const i8 *codes, const float *scales, const int *sums, float *y, i64 y_stride,
      int rows, int K) {
    __shared__ float4 terms[SPLIT_KILOBYTES * 64];
    __shared__ float2 minima[F::MINIMUM != 0 ? SPLIT_KILOBYTES * 32 : 1];
    __shared__ float tail[SPLIT_ROWS * M];
    __shared__ uint4 space[F::TABLE / 4 + !F::TABLE];
    let_next_start();
    u32 bytes = row_block_bytes<F>(K), first = 2 * blockIdx.y;
    bring_early(weights + (size_t)first * bytes, 4 * first + 4 < rows ? 2 * bytes : bytes, threadIdx.x, blockDim.x);
    u32 *table = (u32 *)space;
    stage<F>(table);
    int from = blockIdx.x * M, n = columns - from < M ? columns - from : M;
    y += from * y_stride;
    if (M > 2 && n <= 2)
        split_rows<F, 2>(weights, columns_from<2>(from, n, codes, scales, sums, K), n, table, y, y_stride, rows, K, terms,
                         minima, tail);
    else
        split_rows<F, M>(weights, columns_from<M>(from, n, codes, scales, sums, K), n, table, y, y_stride, rows, K, terms,
                         minima, tail);
}
