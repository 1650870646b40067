// A tile of a wide product: weights times rows of x, a step of 64 values at a time, out of a stage in shared memory.
//
// For every output, groups of G values in ascending order: acc = fma(dot, fl(weight scale * row scale), acc), dot being
// the exact integer; then, with minima, acc = fma(minimum, row sum, acc). No tile, batch or device changes a bit.
#pragma once
#include "gemm/tensor.cuh"
#include "gemv/core.cuh"

// A block of 256 threads, ACROSS x (8 / ACROSS) warps over weights and rows; a warp has 16 MT weights and 8 NT rows.
// BLOCKS of them fit on a processor; 8 SKIP rows that are not there are left out together.
template <int MT_, int NT_, int ACROSS_, int BLOCKS_, int SKIP_>
struct Tile {
    enum { MT = MT_, NT = NT_, ACROSS = ACROSS_, WEIGHTS = 16 * MT * ACROSS, ROWS = 8 * NT * (8 / ACROSS) };
    enum { BLOCKS = BLOCKS_, SKIP = SKIP_ };
};
typedef Tile<2, 4, 4, 2, 4> Dense;    // 128 x 64
typedef Tile<1, 8, 8, 2, 2> Experts;  // 128 x 64: a warp has all rows, and sixteens that are not there cost nothing

// One or two neighbouring floats of shared memory.
template <int N>
DEVICE void neighbours(const float *from, float (&to)[N]) {
    if constexpr (N == 1) {
        to[0] = *from;
    } else {
        float2 v = *(const float2 *)from;
        to[0] = v.x, to[1] = v.y;
    }
}

// A stage: codes of W weights and X rows, then scales of all of them, then with minima those and the rows' sums.
template <int G, int MIN, class Tile>
struct Wide {
    enum { MT = Tile::MT, NT = Tile::NT, W = Tile::WEIGHTS, X = Tile::ROWS, S = 64 / G, BYTES = 4 * S };
    enum { SIDES = 64 * (W + X), SUMS = SIDES + BYTES * (W + X), STAGE = SUMS + MIN * BYTES * (W + X) };
    // A step in sections of one or both halves, as many as registers hold, and of one or two groups.
    enum {
        SECTIONS = G == 32 ? MT : MT == 2 || MIN ? 4 : 2,
        HALVES = SECTIONS == 1 ? 2 : 1,
        GROUPS = S / SECTIONS
    };
    static_assert(W == 128 && X <= 128, "threads are shared out for these");

    // Of this thread's warp: its first weight and its first row in the tile.
    DEVICE static int weight() { return 16 * MT * ((threadIdx.x >> 5) % Tile::ACROSS); }
    DEVICE static int column() { return 8 * NT * ((threadIdx.x >> 5) / Tile::ACROSS); }

    // Where a thread finds its part of a stage; hidden, so that this is not found anew in every step.
    struct Places {
        u32 w, x, w_side, x_side;
    };
    DEVICE static Places places() {
        const int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
        return {opaque(rows_at(weight() / 2)), opaque(64 * W + columns_at(column())),
                opaque(SIDES + BYTES * (weight() + 2 * g)), opaque(SIDES + BYTES * (W + column() + 2 * t))};
    }

    // acc += a stage. left: rows that are there, from the warp's first one on.
    DEVICE static void step(const u8 *stage, const Places &at, int left, float (&acc)[MT][NT][4]) {
        const int t = threadIdx.x & 3;
        const u8 *w_tile[2] = {stage + at.w, stage + (at.w ^ 64)}, *x_tile[2] = {stage + at.x, stage + (at.x ^ 32)};
        const float *w_sides = (const float *)(stage + at.w_side), *x_sides = (const float *)(stage + at.x_side);
#pragma unroll
        for (int section = 0; section < SECTIONS; section++) {
            const int first_group = section * GROUPS, first_half = first_group * G / 32;
            u32 a[HALVES][MT][4];
            float scale[MT][2][GROUPS], minimum[MT][2][GROUPS];
#pragma unroll
            for (int m = 0; m < MT; m++) {
#pragma unroll
                for (int i = 0; i < HALVES; i++) rows_of(w_tile[first_half + i] + 1024 * m, a[i][m]);
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const float *from = w_sides + (16 * m + i) * S + first_group;
                    neighbours(from, scale[m][i]);
                    if (MIN) neighbours(from + (SUMS - SIDES) / 4, minimum[m][i]);
                }
            }
#pragma unroll
            for (int n = 0; n < NT; n++) {
                if (n % Tile::SKIP == 0 && 8 * n >= left) break;
                u32 b[HALVES][2];
                float x_scale[2][GROUPS], x_sum[2][GROUPS];
#pragma unroll
                for (int i = 0; i < HALVES; i++) columns_of(x_tile[first_half + i] + 512 * n, b[i]);
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const float *from = x_sides + (8 * n + i) * S + first_group;
                    neighbours(from, x_scale[i]);
                    if (MIN) neighbours(from + (SUMS - SIDES) / 4, x_sum[i]);
                }
#pragma unroll
                for (int group = 0; group < GROUPS; group++) {
                    const int half = (first_group + group) * G / 32 - first_half;
                    // Of a half, threads 0 and 1 of four hold the first group of 16, 2 and 3 the second one.
                    u32 mask = G == 32 || t >> 1 == (first_group + group & 1) ? ALL_LANES : 0u;
                    u32 part[2] = {b[half][0] & mask, b[half][1] & mask};
#pragma unroll
                    for (int m = 0; m < MT; m++) {
                        int d[4];
                        mma_s8(d, a[half][m], part, WHOLE);
#pragma unroll
                        for (int i = 0; i < 4; i++) {
                            float c = mul32(scale[m][i >> 1][group], x_scale[i & 1][group]);
                            acc[m][n][i] = fma32(whole(d[i]), c, acc[m][n][i]);
                            if (MIN) {
                                float least = minimum[m][i >> 1][group];
                                acc[m][n][i] = fma32(least, x_sum[i & 1][group], acc[m][n][i]);
                            }
                        }
                    }
                }
            }
        }
    }

    // The tile's outputs: weights from first_weight on, rows of y from first_row on, or entries[first_row], ..
    DEVICE static void store(const float (&acc)[MT][NT][4], float *y, i64 y_stride, const int *entries, int first_row,
                             int count, int first_weight, int rows) {
        const int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3, left = count - first_row - column();
        const int w = first_weight + weight() + 2 * g;
        bool twos = ((y_stride | rows | (i64)y >> 2) & 1) == 0;  // two weights are stored at once
#pragma unroll
        for (int n = 0; n < NT; n++) {
            if (n % Tile::SKIP == 0 && 8 * n >= left) break;
#pragma unroll
            for (int j = 0; j < 2; j++) {
                int r = first_row + column() + 8 * n + 2 * t + j;
                if (r >= count) continue;
                float *to = y + (entries ? entries[r] : r) * y_stride + w;
#pragma unroll
                for (int m = 0; m < MT; m++) {
                    float low = add32(acc[m][n][j], 0.f), high = add32(acc[m][n][2 + j], 0.f);
                    if (w + 16 * m >= rows) continue;
                    if (twos) {
                        *(float2 *)(to + 16 * m) = make_float2(low, high);
                    } else {
                        to[16 * m] = low;
                        if (w + 16 * m + 1 < rows) to[16 * m + 1] = high;
                    }
                }
            }
        }
    }
};
