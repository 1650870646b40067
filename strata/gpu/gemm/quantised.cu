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
typedef Tile<4, 4, 2, 1, 4> Large;   // 128 x 128
typedef Tile<2, 4, 4, 2, 4> Middle;  // 128 x 64
typedef Tile<1, 8, 8, 2, 2> Small;   // 128 x 64: every warp has all rows, and sixteens that are not there cost nothing

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
        SECTIONS = G == 32 ? (MT == 2 ? 2 : 1) : MT == 2 || (MT == 1 && MIN) ? 4 : 2,
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
    // Scales: a thread for every weight and row.
    bool is_weight = tid < W, is_row = !is_weight && tid - W < X;
    const float *side_from = nullptr, *sum_from = nullptr;
    if (is_weight) {
        i64 at = (i64)min(tile_w * W + tid, rows - 1) * groups;
        side_from = (const float *)(matrix + scales_at) + at;
        sum_from = (const float *)(matrix + minima_at) + at;
    }

#pragma unroll 1
    for (int first_row = tile_x * X; first_row < count; first_row += gridDim.y * X) {
        const int units = X / 64;  // 16-byte units of x that a thread copies in a step
        const i8 *x_from[units];
#pragma unroll
        for (int i = 0; i < units; i++) {
            int r = min(first_row + (tid >> 2) + 64 * i, count - 1);
            x_from[i] = x_codes + (i64)(entries ? entries[r] / share : r) * K + 16 * (tid & 3);
        }
        if (is_row) {
            int r = min(first_row + tid - W, count - 1);
            i64 at = (i64)(entries ? entries[r] / share : r) * groups;
            side_from = x_scales + at;
            sum_from = x_sums + at;
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
            for (int i = 0; i < 2; i++) copy_pair_unit(stage, tid >> 2, 2 * (tid & 3) + i, w_from + 128 * step + 16 * i);
#pragma unroll
            for (int i = 0; i < units; i++)
                copy_unit(stage + 64 * W, (tid >> 2) + 64 * i, tid & 3, x_from[i] + 64 * step,
                          64 * step + 16 * (tid & 3) < K);
            if (is_weight || is_row) {
                copy<BYTES>(stage + SIDES + BYTES * tid, side_from + S * step);
                if (MIN) copy<BYTES>(stage + SUMS + BYTES * tid, sum_from + S * step);
            }
            copy_commit();
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
            const float *sides = (const float *)(stage + SIDES), *sums = (const float *)(stage + SUMS);
#pragma unroll
            for (int section = 0; section < SECTIONS; section++) {
                const int first_group = section * GROUPS, first_half = first_group * G / 32;
                u32 a[HALVES][MT][4];
                float scale[MT][2][GROUPS], minimum[MT][2][GROUPS];
#pragma unroll
                for (int m = 0; m < MT; m++) {
#pragma unroll
                    for (int i = 0; i < HALVES; i++) rows_of(stage, weight / 2 + 8 * m, first_half + i, a[i][m]);
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        int at = (weight + 16 * m + 2 * g + i) * S + first_group;
                        neighbours(sides + at, scale[m][i]);
                        if (MIN) neighbours(sums + at, minimum[m][i]);
                    }
                }
#pragma unroll
                for (int n = 0; n < NT; n++) {
                    if (n % Tile::SKIP == 0 && 8 * n >= left) break;
                    u32 b[HALVES][2];
                    float x_scale[2][GROUPS], x_sum[2][GROUPS];
#pragma unroll
                    for (int i = 0; i < HALVES; i++) columns_of(stage + 64 * W, column + 8 * n, first_half + i, b[i]);
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        int at = (W + column + 8 * n + 2 * t + i) * S + first_group;
                        neighbours(sides + at, x_scale[i]);
                        if (MIN) neighbours(sums + at, x_sum[i]);
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
