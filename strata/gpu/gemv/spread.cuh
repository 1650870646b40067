// Products of one column with dense matrices of few rows: the warps of a block share out the chunks of one row block.
//
// A lane's sum has a fixed order along the row, but the integers and factors of its terms have not: every warp computes
// those of its chunks into shared memory, where all of a round stay until one thread a lane adds them up in order. The
// bits are those of `multiply`. Blocks are small and many, so that processors get equal shares, and a warp has most of
// its chunks on their way from the start.
#pragma once
#include "gemv/split.cuh"

#define SPREAD_WARPS 4

template <class F>
struct Spread {
    enum {
        FITS = 160 / (int)F::Raw::LOADED,
        DEPTH = FITS < 2 ? 2 : FITS > 6 ? 6 : FITS,  // chunks of a warp under way
        STEP_BYTES = 384 + (F::MINIMUM != 0 ? 128 : 0)
    };
};

// Terms of one step: integers of lane pairs, their common factors, then integers and factors of minima.
template <class F>
DEVICE void keep_terms(const typename F::Raw &raw, int e, bool there, u32 first, const Columns<1> &x, u8 *to) {
    int lane = threadIdx.x & 31, q = lane & 7;
    Term v[2] = {{0.f, 0.f}, {0.f, 0.f}}, m = {0.f, 0.f};  // a term of zeros leaves a sum as it is
    if (there) {
        typename F::Step s = F::unpack(raw, e, q, nullptr);
        typename F::X values = F::read(x, 0, first, q);
        F::dot(s, values, v);
        if constexpr (F::MINIMUM != 0) F::add_minimum(s.least, q, values, m);
    }
    ((float2 *)to)[lane] = make_float2(v[0].a, v[1].a);
    ((float *)(to + 256))[lane] = v[0].c;
    if constexpr (F::MINIMUM != 0)
        if ((q & 1) == 0) ((float2 *)(to + 384))[lane >> 1] = make_float2(m.a, m.c);
}

// y (rows) = a matrix (rows, K) times one column. Grid: row blocks. Dynamic shared memory: the column in column_bytes if
// it comes there, then `round` steps of terms, a multiple of those that SPREAD_WARPS warps have under way, and one chunk more.
template <class FORMAT>
STARTS_EARLY __global__ void __launch_bounds__(32 * SPREAD_WARPS, 5)
spread(const u8 *weights, const i8 *codes, const float *scales, const int *sums, float *y, int rows, int K, int column_bytes,
       int round) {
    typedef typename ForColumns<FORMAT, 1>::Type F;
    typedef typename F::Raw Raw;
    const int E = Raw::STEPS, P = Raw::BLOCKS, STEP_VALUES = P * F::VALUES, W = SPREAD_WARPS, DEPTH = Spread<F>::DEPTH;
    DYNAMIC_SHARED(area);
    u8 *terms = area + column_bytes;
    let_next_start();
    int lane = threadIdx.x & 31, row = lane >> 3, q = lane & 7, warp = threadIdx.x >> 5;
    int blocks = K / F::VALUES, chunks = blocks / (E * P), mine = (chunks - warp + W - 1) / W;
    size_t bytes = row_block_bytes<F>(K);
    const u8 *block = weights + blockIdx.x * bytes, *at = block + warp * Raw::CHUNK;
    Raw ring[DEPTH];
#pragma unroll
    for (int i = 0; i < DEPTH; i++) ring[i].load_if(i < mine, at + i * W * Raw::CHUNK, row, q);
    int asked = DEPTH * W * Raw::CHUNK;
    if (asked < (int)bytes) bring_early(block + asked, (u32)bytes - asked, threadIdx.x, 32 * W);
    wait_for_inputs();
    Columns<1> x = {codes, scales, sums, {0}};
    if constexpr (F::VALUES == 256) {  // a loss with smaller blocks, which have eight times the scales
        x = bring_column<F>(x, K, area, threadIdx.x, 32 * W);
        __syncthreads();
    }
    u32 first = warp * E * STEP_VALUES;
    // Thread t of the first 64 adds up lane t mod 16 of row t / 16, and a lane of its minimum.
    int own = threadIdx.x, own_row = own >> 4, l = own & 15;
    float sum = 0.f, least = 0.f;
    auto add = [&](int steps) {
        __syncthreads();
        if (own < 64) {
            const u8 *from = terms;
#pragma unroll 4
            for (int s = 0; s < steps; s++, from += Spread<F>::STEP_BYTES) {
                sum = fma32(((const float *)from)[own], ((const float *)(from + 256))[own >> 1], sum);
                if constexpr (F::MINIMUM != 0) {
                    float2 m = ((const float2 *)(from + 384))[4 * own_row + (l & 3)];
                    least = fma32(m.x, m.y, least);
                }
            }
        }
    };
    int left = blocks - chunks * E * P, rest = (left + P - 1) / P, k = 0;
    for (int done = 0;; done += round) {
        int end = min((done + round) / (E * W), mine);
#pragma unroll 1
        while (k < end) {
#pragma unroll
            for (int i = 0; i < DEPTH; i++) {
                if (k >= end) break;
                u8 *to = terms + ((k * W + warp) * E - done) * Spread<F>::STEP_BYTES;
#pragma unroll
                for (int e = 0; e < E; e++)
                    keep_terms<F>(ring[i], e, true, first + e * STEP_VALUES, x, to + e * Spread<F>::STEP_BYTES);
                k++;
                at += W * Raw::CHUNK;
                first += W * E * STEP_VALUES;
                ring[i].load_if(k + DEPTH <= mine, at + (DEPTH - 1) * W * Raw::CHUNK, row, q);
            }
        }
        int steps = chunks * E - done;
        if (steps > round) {
            add(round);
            __syncthreads();
            continue;
        }
        if constexpr (E * P > 1) {
            if (warp < rest) {  // at most E, so one warp each
                int n = min(left - warp * P, (int)P);
                Raw now;
                bool there = q * P / 8 < n;
                if (there) now.load_last(block + chunks * Raw::CHUNK + warp * Raw::STEP, row, q, n);
                keep_terms<F>(now, 0, there, (chunks * E + warp) * STEP_VALUES, x,
                              terms + (steps + warp) * Spread<F>::STEP_BYTES);
            }
        }
        add(steps + rest);
        break;
    }
    if (own >= 64) return;
#pragma unroll
    for (int half = 8; half; half >>= 1) sum = add32(sum, __shfl_xor_sync(ALL_LANES, sum, half));
    if constexpr (F::MINIMUM != 0) {
        least = add32(least, __shfl_xor_sync(ALL_LANES, least, 2));
        least = add32(least, __shfl_xor_sync(ALL_LANES, least, 1));
        sum = F::MINIMUM > 0 ? add32(sum, least) : sub32(sum, least);
    }
    int at_row = 4 * blockIdx.x + own_row;
    if (l == 0 && at_row < rows) y[at_row] = add32(sum, 0.f);
}
