// Wide products of expanded matrices (expand.cuh) with quantised rows, on int8 tensor cores.
//
// For every output, groups of G values in ascending order: acc = fma(dot, fl(weight scale * row scale), acc), dot being
// the exact integer; then, with minima, acc = fma(minimum, row sum, acc). No tile, batch or device changes a bit.
#include "gemm/tensor.cuh"
#include "gemv/core.cuh"

// Scales and sums of T rows for groups of G values, from those of the quantiser: float32 (T, groups), groups behind the
// row zero. group: values of a scale of the quantiser. One thread a group.
KERNEL(256) prepare(const float *from_scales, const int *from_sums, float *scales, float *sums, int T, int K, int group,
                    int G, int groups) {
    i64 i = (i64)blockIdx.x * 256 + threadIdx.x;
    if (i >= (i64)T * groups) return;
    i64 row = i / groups;
    int k = (int)(i % groups) * G;
    float scale = 0.f, sum = 0.f;
    if (k < K) {
        const int *s = from_sums + (row * K + k) / 16;
        scale = from_scales[(row * K + k) / group];
        sum = mul32(scale, i32_f32(G == 32 ? s[0] + s[1] : s[0]));
    }
    scales[i] = scale;
    sums[i] = sum;
}

// A block of 256 threads, ACROSS x (8 / ACROSS) warps over weights and rows; a warp has 16 MT weights and 8 NT rows.
// BLOCKS of them
// fit on a processor; 8 SKIP rows that are not there are left out together.
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

// y[row][weight], y_stride values a row. Dense: grid (row tiles, weight tiles). Experts (entries not null): expert
// first + blockIdx.z, its row tiles blockIdx.y, + gridDim.y, ..; row i of it is entry entries[offsets[expert] + i], row
// entry / share of x. Matrix blockIdx.z lies matrix_bytes further.
template <int G, int MIN, class Tile>
__global__ void __launch_bounds__(256, Tile::BLOCKS)
wide(const u8 *matrices, i64 scales_at, i64 minima_at, i64 matrix_bytes, const i8 *x_codes, const float *x_scales,
     const float *x_sums, int K, int T, int rows, float *y, i64 y_stride, const int *entries, const int *offsets, int first,
     int share) {
    enum { MT = Tile::MT, NT = Tile::NT, W = Tile::WEIGHTS, X = Tile::ROWS, S = 64 / G, BYTES = 4 * S };
    enum { SIDES = 64 * (W + X), SUMS = SIDES + BYTES * (W + X), STAGE = SUMS + MIN * BYTES * (W + X) };
    // A step in sections of one or both halves, as many as registers hold, and of one or two groups.
    enum {
        SECTIONS = G == 32 ? MT : MT == 2 || MIN ? 4 : 2,
        HALVES = SECTIONS == 1 ? 2 : 1,
        GROUPS = S / SECTIONS
    };
    static_assert(W == 128 && X <= 128, "threads are shared out for these");
    DYNAMIC_SHARED(space);
    const int tid = threadIdx.x, lane = tid & 31, g = lane >> 2, t = lane & 3, warp = tid >> 5;
    const int weight = 16 * MT * (warp % Tile::ACROSS), column = 8 * NT * (warp / Tile::ACROSS);  // of the warp
    const int groups = (K + 63) / 64 * S, pitch = groups * G, steps = groups / S;

    int tile_w = entries ? blockIdx.x : blockIdx.y, tile_x = entries ? blockIdx.y : blockIdx.x;
    int count = T;
    if (entries) {
        int start = offsets[first + blockIdx.z];
        count = offsets[first + blockIdx.z + 1] - start;
        entries += start;
    }
    const u8 *matrix = matrices + blockIdx.z * matrix_bytes;
    // Codes: a thread copies a quarter of a pair of weights and a quarter of one or two rows of x.
    int pair = min(tile_w * (W / 2) + (tid >> 2), ((rows - 1) >> 2) * 2 + 1);
    const u8 *w_from = matrix + (i64)pair * 2 * pitch + 32 * (tid & 3);
    // Where a thread finds its part of a stage; hidden, so that this is not found anew in every step.
    const u32 w_at = opaque(rows_at(weight / 2)), x_at = opaque(64 * W + columns_at(column));
    const u32 w_side_at = opaque(SIDES + BYTES * (weight + 2 * g)), x_side_at = opaque(SIDES + BYTES * (W + column + 2 * t));
    // And where what it copies goes.
    const u32 w_to = opaque(in_pairs(tid >> 2, tid >> 1) + 32 * (tid & 1));
    const u32 x_to = opaque(64 * W + in_tile(tid >> 2, tid >> 1) + 16 * (tid & 1)), side_to = opaque(SIDES + BYTES * tid);
    const bool copies_sides = tid < W + X;  // of weight or row number tid

#pragma unroll 1
    for (int first_row = tile_x * X; first_row < count; first_row += gridDim.y * X) {
        const int units = X / 64;  // 16-byte units of x that a thread copies in a step
        const u8 *w_next = w_from;
        const i8 *x_next[units];
#pragma unroll
        for (int i = 0; i < units; i++) {
            int r = min(first_row + (tid >> 2) + 64 * i, count - 1);
            x_next[i] = x_codes + (i64)(entries ? entries[r] / share : r) * K + 16 * (tid & 3);
        }
        const float *side_next = (const float *)(matrix + scales_at), *sum_next = (const float *)(matrix + minima_at);
        if (tid < W) {
            i64 at = (i64)min(tile_w * W + tid, rows - 1) * groups;
            side_next += at;
            sum_next += at;
        } else {
            int r = min(first_row + tid - W, count - 1);
            i64 at = (i64)(entries ? entries[r] / share : r) * groups;
            side_next = x_scales + at;
            sum_next = x_sums + at;
        }
        float acc[MT][NT][4];
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int n = 0; n < NT; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) acc[m][n][i] = 0.f;

        auto load = [&](int step) {
            u8 *stage = space + (step & 1) * STAGE;
#pragma unroll
            for (int i = 0; i < 2; i++) copy<16>(stage + w_to + 16 * i, w_next + 16 * i);
            bool some = 64 * step + 16 * (tid & 3) < K;
#pragma unroll
            for (int i = 0; i < units; i++) copy<16>(stage + x_to + 64 * 64 * i, x_next[i], some);
            if (copies_sides) {
                copy<BYTES>(stage + side_to, side_next);
                if (MIN) copy<BYTES>(stage + side_to + SUMS - SIDES, sum_next);
            }
            copy_commit();
            w_next += 128;
            side_next += S;
            sum_next += S;
#pragma unroll
            for (int i = 0; i < units; i++) x_next[i] += 64;
        };

        __syncthreads();  // the tile before has been read
        load(0);
        int left = count - first_row - column;  // rows of the warp
#pragma unroll 1
        for (int step = 0; step < steps; step++) {
            copy_wait<0>();
            __syncthreads();
            if (step + 1 < steps) load(step + 1);
            const u8 *stage = space + (step & 1) * STAGE;
            const u8 *w_tile[2] = {stage + w_at, stage + (w_at ^ 64)}, *x_tile[2] = {stage + x_at, stage + (x_at ^ 32)};
            const float *w_sides = (const float *)(stage + w_side_at), *x_sides = (const float *)(stage + x_side_at);
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
                        const float *at = w_sides + (16 * m + i) * S + first_group;
                        neighbours(at, scale[m][i]);
                        if (MIN) neighbours(at + (SUMS - SIDES) / 4, minimum[m][i]);
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
                        const float *at = x_sides + (8 * n + i) * S + first_group;
                        neighbours(at, x_scale[i]);
                        if (MIN) neighbours(at + (SUMS - SIDES) / 4, x_sum[i]);
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
        const int w = tile_w * W + weight + 2 * g;
        bool twos = ((y_stride | rows | (i64)y >> 2) & 1) == 0;  // two weights are stored at once
#pragma unroll
        for (int n = 0; n < NT; n++) {
            if (n % Tile::SKIP == 0 && 8 * n >= left) break;
#pragma unroll
            for (int j = 0; j < 2; j++) {
                int r = first_row + column + 8 * n + 2 * t + j;
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
        if (!entries) break;
    }
}
