// Dot products of four rows of weights with four columns of activations by 16 threads, 256 <= K <= 320, in 16 bits: a value
// of activations that a thread loads serves four rows, a weight that it unpacks four columns.
//
// Thread p holds lanes 32 i + 2 p and 32 i + 2 p + 1, so that the distances 128, 64 and 32 of the tree stay inside it. Then
// threads trade: each keeps half of its outputs and gives half away, until one is left. What a thread keeps always comes
// first in its registers: thread p has column q ^ (p >> 2) at place q, and row r ^ (p & 3) at place r.
#pragma once
#include "short_row.cuh"

#define TILE_ROWS 4
#define TILE_COLUMNS 4
#define TILE_PAIRS 10  // i of a row's values: 8 of the lanes, and 2 behind the first 256
#define TILE_FLOATS (TILE_PAIRS * 16 * TILE_COLUMNS * 2)

// Columns in shared memory as the threads want them: [i][half of the places][p][place][value], zero behind K and behind the
// last column.
// By 128 threads.
struct StagedColumns {
    float2 v[TILE_PAIRS / 2];

    DEVICE void load(const float *x, int n_x, int K) {
        u32 t = threadIdx.x, p = t >> 1 & 15, column = ((t & 1) + (t >> 4 & 2)) ^ p >> 2, value = 32 * (t >> 6) + 2 * p;
        const float *at = x + column * K + value;
        bool there = column < (u32)n_x;
#pragma unroll
        for (int k = 0; k < TILE_PAIRS / 2; k++) {
            if (k >= 4) there = there && value + 64 * k < (u32)K;
            v[k] = there ? *(const float2 *)(at + 64 * k) : make_float2(0.f, 0.f);
        }
    }
    DEVICE void store(float *xs) const {
#pragma unroll
        for (int k = 0; k < TILE_PAIRS / 2; k++) *(float2 *)(xs + 2 * (threadIdx.x + 128 * k)) = v[k];
    }
};

template <int KIND>
struct ShortTile {
    u32 w[TILE_ROWS][TILE_PAIRS];

    // rows: of the matrix that begins at `matrix`; behind the last one it is repeated.
    DEVICE void load(const u8 *matrix, int first, int rows, int p, int K) {
#pragma unroll
        for (int r = 0; r < TILE_ROWS; r++) {
            int row = first + (r ^ (p & 3));
            const u8 *at = matrix + (size_t)(row < rows ? row : rows - 1) * K * 2 + 4 * p;
#pragma unroll
            for (int i = 0; i < TILE_PAIRS; i++) w[r][i] = i < 8 || 32 * i + 2 * p < K ? load_ahead(at + 64 * i) : 0;
        }
    }

    DEVICE static float value(u32 pair, int j) {
        if (KIND == F16_VALUES) return half_f32((u16)(j ? pair >> 16 : pair));
        return float_of(j ? pair & 0xffff0000u : pair << 16);
    }

    // Nothing that is computed of the weights moves in front of this.
    DEVICE void stay() {
#ifndef STRATA_ON_CPU
#pragma unroll
        for (int r = 0; r < TILE_ROWS; r++)
#pragma unroll
            for (int i = 0; i < TILE_PAIRS; i++) asm volatile("" : "+r"(w[r][i]));
#endif
    }

    typedef float Sums[TILE_ROWS][2][2];  // of two columns

    // v = the sums of lanes 32 i + 2 p + j for one half of the places, or v += them.
    template <bool ADD>
    DEVICE void leaf(const float *xs, int i, int half, int p, Sums &v) const {
        float4 a = *(const float4 *)(xs + (2 * i + half) * 64 + 4 * p), b;
        if (i < TILE_PAIRS - 8) b = *(const float4 *)(xs + (2 * i + 16 + half) * 64 + 4 * p);
        float first[4] = {a.x, a.y, a.z, a.w}, second[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
        for (int r = 0; r < TILE_ROWS; r++)
#pragma unroll
            for (int k = 0; k < 4; k++) {
                float s = fma32(value(w[r][i], k & 1), first[k], 0.f);
                if (i < TILE_PAIRS - 8) s = fma32(value(w[r][i + 8 < TILE_PAIRS ? i + 8 : i], k & 1), second[k], s);
                float &sum = v[r][k >> 1][k & 1];
                sum = ADD ? add32(sum, s) : s;
            }
    }
    DEVICE static void join(Sums &v, const Sums &other) {
#pragma unroll
        for (int r = 0; r < TILE_ROWS; r++)
#pragma unroll
            for (int k = 0; k < 4; k++) v[r][k >> 1][k & 1] = add32(v[r][k >> 1][k & 1], other[r][k >> 1][k & 1]);
    }

    // The output of row p & 3 of the tile and column p >> 2.
    DEVICE float times(const float *xs, int p) const {
        Sums halves[2], one, other;
        leaf<false>(xs, 0, 0, p, halves[0]), leaf<false>(xs, 0, 1, p, halves[1]);
        leaf<true>(xs, 4, 0, p, halves[0]), leaf<true>(xs, 4, 1, p, halves[1]);
        leaf<false>(xs, 2, 0, p, one), leaf<false>(xs, 2, 1, p, other);
        leaf<true>(xs, 6, 0, p, one), leaf<true>(xs, 6, 1, p, other);
        join(halves[0], one), join(halves[1], other);
#pragma unroll
        for (int half = 0; half < 2; half++) {  // apart, as registers are short
            leaf<false>(xs, 1, half, p, one), leaf<true>(xs, 5, half, p, one);
            leaf<false>(xs, 3, half, p, other), leaf<true>(xs, 7, half, p, other);
            join(one, other), join(halves[half], one);
        }
        float sums[TILE_ROWS][2][2];
#pragma unroll
        for (int r = 0; r < TILE_ROWS; r++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
#pragma unroll
                for (int c = 0; c < 2; c++)  // distance 16
                    sums[r][c][j] = add32(halves[0][r][c][j], __shfl_xor_sync(ALL_LANES, halves[1][r][c][j], 8));
                sums[r][0][j] = add32(sums[r][0][j], __shfl_xor_sync(ALL_LANES, sums[r][1][j], 4));  // 8
            }
#pragma unroll
        for (int j = 0; j < 2; j++) {
#pragma unroll
            for (int r = 0; r < 2; r++)  // 4
                sums[r][0][j] = add32(sums[r][0][j], __shfl_xor_sync(ALL_LANES, sums[r + 2][0][j], 2));
            sums[0][0][j] = add32(sums[0][0][j], __shfl_xor_sync(ALL_LANES, sums[1][0][j], 1));  // 2
        }
        return add32(add32(sums[0][0][0], sums[0][0][1]), 0.f);
    }
};
