// Wide products of expanded matrices (expand.cuh) with quantised rows, on int8 tensor cores.
#include "gemm/tile.cuh"

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

// y[row][weight], y_stride values a row. Dense: grid (row tiles, weight tiles). Experts (entries not null): expert
// first + blockIdx.z, its row tiles blockIdx.y, + gridDim.y, ..; row i of it is entry entries[offsets[expert] + i], row
// entry / share of x. Matrix blockIdx.z lies matrix_bytes further.
template <int G, int MIN, class Tile>
__global__ void __launch_bounds__(256, Tile::BLOCKS)
wide(const u8 *matrices, i64 scales_at, i64 minima_at, i64 matrix_bytes, const i8 *x_codes, const float *x_scales,
     const float *x_sums, int K, int T, int rows, float *y, i64 y_stride, const int *entries, const int *offsets, int first,
     int share) {
    typedef Wide<G, MIN, Tile> Tiles;
    enum { MT = Tiles::MT, NT = Tiles::NT, W = Tiles::W, X = Tiles::X, S = Tiles::S, BYTES = Tiles::BYTES };
    enum { SIDES = Tiles::SIDES, SUMS = Tiles::SUMS, STAGE = Tiles::STAGE };
    DYNAMIC_SHARED(space);
    const int tid = threadIdx.x;
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
    const typename Tiles::Places places = Tiles::places();
    // Where what a thread copies goes.
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
        int left = count - first_row - Tiles::column();  // rows of the warp
#pragma unroll 1
        for (int step = 0; step < steps; step++) {
            copy_wait<0>();
            __syncthreads();
            if (step + 1 < steps) load(step + 1);
            Tiles::step(space + (step & 1) * STAGE, places, left, acc);
        }
        Tiles::store(acc, y, y_stride, entries, first_row, count, tile_w * W, rows);
        if (!entries) break;
    }
}
