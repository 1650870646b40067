// Wide products of float32 rows with BF16, F16 and F32 matrices: both sides as bfloat16 parts, high and low, so that
// terms have a relative error of at most 2^-16. Sums are float32, in the order of the hardware.
#include "gemm/tensor.cuh"
#include "gemv/core.cuh"

enum { ROWS = 128, WEIGHTS = 64 };  // of a block

// Upper half of a float32, rounded to even.
DEVICE u32 rounded(float x) {
    u32 b = bits_of(x);
    return (b + 0x7fffu + (b >> 16 & 1)) >> 16;
}
// A float32 as two bfloat16: a rounded one and what is left, rounded. Infinities and NaN have no low part.
DEVICE void parts_of(float x, u32 &high, u32 &low) {
    high = rounded(x);
    if (!finite32(bf16_f32((u16)high))) high = bits_of(x) >> 16 | (x != x);
    low = finite32(x) ? rounded(sub32(x, bf16_f32((u16)high))) : 0u;
}

DEVICE void parts_of_two(u32 x0, u32 x1, u32 &high, u32 &low) {
    u32 h0, l0, h1, l1;
    parts_of(float_of(x0), h0, l0);
    parts_of(float_of(x1), h1, l1);
    high = h0 | h1 << 16;
    low = l0 | l1 << 16;
}

// Weights of kind (0: float32, 1: float16) to their parts; a thread takes four.
KERNEL(256) split_weights(const u8 *w, int kind, i64 fours, uint2 *high, uint2 *low) {
    i64 at = (i64)blockIdx.x * 256 + threadIdx.x;
    if (at >= fours) return;
    u32 v[4];
    if (kind == 0) {
        uint4 a = ((const uint4 *)w)[at];
        v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w;
    } else {
        uint2 a = ((const uint2 *)w)[at];
#pragma unroll
        for (int i = 0; i < 4; i++) v[i] = bits_of(half_f32((u16)((i < 2 ? a.x : a.y) >> 16 * (i & 1))));
    }
    uint2 h, l;
    parts_of_two(v[0], v[1], h.x, l.x);
    parts_of_two(v[2], v[3], h.y, l.y);
    high[at] = h;
    low[at] = l;
}

// Float32 rows (T, K) to pairs of rows in parts, whose words alternate; a missing last row is zero. A thread takes four
// values of both rows.
KERNEL(256) split_rows(const float *x, int T, int K, uint4 *high, uint4 *low) {
    i64 at = (i64)blockIdx.x * 256 + threadIdx.x;
    int fours = K / 4, row = (int)(at / fours) * 2, k = (int)(at % fours) * 4;
    if (row >= T) return;
    uint4 a = *(const uint4 *)(x + (i64)row * K + k), b = make_uint4(0, 0, 0, 0), h, l;
    if (row + 1 < T) b = *(const uint4 *)(x + (i64)(row + 1) * K + k);
    parts_of_two(a.x, a.y, h.x, l.x);
    parts_of_two(b.x, b.y, h.y, l.y);
    parts_of_two(a.z, a.w, h.z, l.z);
    parts_of_two(b.z, b.w, h.w, l.w);
    high[at] = h;
    low[at] = l;
}

// y[row][weight] = x times w, y_stride values a row; w are bfloat16 (rows, K), x pairs of rows. PARTS of the weights: 1
// or 2. A warp has 32 rows and 32 weights. Grid: (row tiles, weight tiles).
template <int PARTS>
__global__ void __launch_bounds__(256, 2)
wide_float(const u8 *w_high, const u8 *w_low, const u8 *x_high, const u8 *x_low, int K, int T, int rows, float *y,
           i64 y_stride) {
    enum { X = 64 * ROWS, W = 64 * WEIGHTS, STAGE = 2 * X + PARTS * W, STAGES = 4 - PARTS, MT = 2, NT = 4 };
    DYNAMIC_SHARED(space);
    const int tid = threadIdx.x, lane = tid & 31, g = lane >> 2, t = lane & 3, warp = tid >> 5;
    const int row = 16 * MT * (warp & 3), weight = 8 * NT * (warp >> 2);  // of the warp
    const int steps = (K + 31) / 32;
    // A thread copies in a step, of every part, 8 values of one row of weights and 4 values of two pairs of rows.
    const int w_values = 8 * (tid & 3), x_values = 4 * (tid & 7);
    i64 w_at = 2 * ((i64)min((int)blockIdx.y * WEIGHTS + (tid >> 2), rows - 1) * K + w_values), x_at[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int pair = min((int)blockIdx.x * (ROWS / 2) + (tid >> 3) + 32 * i, (T - 1) >> 1);
        x_at[i] = 4 * ((i64)pair * K + x_values);
    }
    float acc[MT][NT][4];
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) acc[m][n][i] = 0.f;

    u8 *filled = space;  // the stage that the next load fills
    auto load = [&](int step) {
        if (step < steps) {
            bool x_some = 32 * step + x_values < K, w_some = 32 * step + w_values < K;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                i64 from = x_at[i] + (x_some ? 128 * (i64)step : 0);
                copy_pair_unit(filled, (tid >> 3) + 32 * i, tid & 7, x_high + from, x_some);
                copy_pair_unit(filled + X, (tid >> 3) + 32 * i, tid & 7, x_low + from, x_some);
            }
            i64 from = w_at + (w_some ? 64 * (i64)step : 0);
            copy_unit(filled + 2 * X, tid >> 2, tid & 3, w_high + from, w_some);
            if (PARTS == 2) copy_unit(filled + 2 * X + W, tid >> 2, tid & 3, w_low + from, w_some);
        }
        copy_commit();
        filled = filled == space + (STAGES - 1) * STAGE ? space : filled + STAGE;
    };
    for (int i = 0; i < STAGES - 1; i++) load(i);
    // Where a thread finds its part of a stage; hidden, so that this is not found anew in every step.
    const u32 a_at = opaque(rows_at(row / 2)), b_at = opaque(2 * X + columns_at(weight));
    const u8 *stage = space;
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
        copy_wait<STAGES - 2>();
        __syncthreads();
        load(step + STAGES - 1);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            u32 a[2][MT][4];
#pragma unroll
            for (int p = 0; p < 2; p++)
#pragma unroll
                for (int m = 0; m < MT; m++) rows_of(stage + (half ? a_at ^ 64 : a_at) + p * X + 1024 * m, a[p][m]);
#pragma unroll
            for (int n = 0; n < NT; n++) {
                u32 b[PARTS][2];
#pragma unroll
                for (int p = 0; p < PARTS; p++) columns_of(stage + (half ? b_at ^ 32 : b_at) + p * W + 512 * n, b[p]);
                // Small products first.
#pragma unroll
                for (int p = PARTS - 1; p >= 0; p--)
#pragma unroll
                    for (int q = 1; q >= 0; q--)
#pragma unroll
                        for (int m = 0; m < MT; m++) mma_bf16(acc[m][n], a[q][m], b[p]);
            }
        }
        stage = stage == space + (STAGES - 1) * STAGE ? space : stage + STAGE;
    }
    bool twos = ((y_stride | rows | (i64)y >> 2) & 1) == 0;  // two weights are stored at once
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                int r = blockIdx.x * ROWS + row + 16 * m + 2 * g + i, w = blockIdx.y * WEIGHTS + weight + 8 * n + 2 * t;
                float *to = y + r * y_stride + w;
                if (r >= T || w >= rows) continue;
                if (twos) {
                    *(float2 *)to = make_float2(acc[m][n][2 * i], acc[m][n][2 * i + 1]);
                } else {
                    to[0] = acc[m][n][2 * i];
                    if (w + 1 < rows) to[1] = acc[m][n][2 * i + 1];
                }
            }
}
