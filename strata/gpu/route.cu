// The logits of a router with the choice of its experts, and the product of a second matrix with the same input: windows.
//
// The sums are those of float_gemv.cu. A block takes four rows of the matrices; a thread holds weights of two of them, which
// it asks for before it waits for the rows of activations, and of those each value serves both. The last block to arrive
// chooses (choose.cuh), one warp a row.
#include "arrivals.cuh"
#include "choose.cuh"
#include "early.cuh"
#include "float_rows.cuh"

#define BLOCK_ROWS 4  // route.py has it too, and the most values of a row
#define STEPS 10      // of 256 values of a row
#define MOST_EACH 16  // experts of a lane

// Matrices in BF16: w0 (E, D), the router, and w1 (n1, D), which may be missing. x (n_x, D), y0 (n_x, E), y1 (n_x, n1). D >= 256.
// The choice is made from `logits` (n_x, E), which are y0 but for replays. arrived: 0, and again 0 afterwards.
// T: at least n_x, and a power of two. Grid: rows / 4.
template <int T>
STARTS_EARLY KERNEL(256) route(const float *x, int D, int n_x, const u8 *w0, float *y0, int E, const u8 *w1, float *y1, int n1,
                               const float *logits, int *ids, float *weights, int K, float scale, u32 *arrived, u64 *error, u64 where) {
    const int SPAN = T <= 2 ? STEPS : STEPS / 2;      // steps whose activations are loaded together
    const int SUMS = T <= 2 ? 1 : BLOCK_ROWS * T / 8;  // of a warp
    __shared__ float4 area[BLOCK_ROWS * T * 64];
    static_assert(sizeof(area) >= T * sizeof(ChoiceRoom), "the choice uses the memory of the sums");
    let_next_start();
    int t = 2 * (threadIdx.x & 127), half = threadIdx.x >> 7, first = BLOCK_ROWS * blockIdx.x, rows = E + n1;
    u32 w[2][STEPS];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int row = first + 2 * half + r;
        row = row < rows ? row : rows - 1;
        const u8 *from = (row < E ? w0 + (size_t)row * D * 2 : w1 + (size_t)(row - E) * D * 2) + 2 * t;
#pragma unroll
        for (int s = 0; s < STEPS; s++) w[r][s] = t + 256 * s < D ? load_ahead(from + 512 * s) : 0;
    }
    wait_for_inputs();
    float acc[2][T][2];
#pragma unroll
    for (int c = 0; c < T; c++) acc[0][c][0] = acc[0][c][1] = acc[1][c][0] = acc[1][c][1] = 0.f;
    auto value = [&](int c, int s) { return *(const float2 *)(x + (u32)((c < n_x ? c : n_x - 1) * D + t + 256 * s)); };
    auto add_terms = [&](int c, int s, float2 v) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            acc[r][c][0] = fma32(float_of(w[r][s] << 16), v.x, acc[r][c][0]);
            acc[r][c][1] = fma32(float_of(w[r][s] & 0xffff0000u), v.y, acc[r][c][1]);
        }
    };
#pragma unroll
    for (int from = 0; from < STEPS; from += SPAN) {
        if (256 * (from + SPAN) <= D) {
            float2 v[SPAN][T];
#pragma unroll
            for (int s = 0; s < SPAN; s++)
#pragma unroll
                for (int c = 0; c < T; c++) v[s][c] = value(c, from + s);
#pragma unroll
            for (int s = 0; s < SPAN; s++)
#pragma unroll
                for (int c = 0; c < T; c++) add_terms(c, from + s, v[s][c]);
        } else {
#pragma unroll
            for (int s = from; s < from + SPAN; s++)
                if (t + 256 * s < D)
#pragma unroll
                    for (int c = 0; c < T; c++) add_terms(c, s, value(c, s));
        }
    }
    float *lanes = (float *)area;  // 256 of every row and column
#pragma unroll
    for (int c = 0; c < T; c++)
#pragma unroll
        for (int r = 0; r < 2; r++)
            *(float2 *)&lanes[256 * (BLOCK_ROWS * c + 2 * half + r) + t] = make_float2(acc[r][c][0], acc[r][c][1]);
    __syncthreads();
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    if (warp * SUMS < BLOCK_ROWS * T) {
        float sums[SUMS];
#pragma unroll
        for (int i = 0; i < SUMS; i++) {
            const float *from = lanes + 256 * (warp * SUMS + i) + lane;
            float v[8];
#pragma unroll
            for (int j = 0; j < 8; j++) v[j] = from[32 * j];
#pragma unroll
            for (int distance = 4; distance; distance >>= 1)
#pragma unroll
                for (int j = 0; j < distance; j++) v[j] = add32(v[j], v[j + distance]);
            sums[i] = v[0];
        }
        float sum = add32(packed_tree<SUMS>(sums), 0.f);
#pragma unroll
        for (int i = 0; i < SUMS; i++) {
            int c = (warp * SUMS + i) / BLOCK_ROWS, row = first + (warp * SUMS + i) % BLOCK_ROWS;
            if (lane == lane_of_pair<SUMS>(i) && c < n_x && row < rows)
                *(row < E ? y0 + (size_t)c * E + row : y1 + (size_t)c * n1 + row - E) = sum;
        }
    }
    if (!last_of(arrived, gridDim.x) || warp >= n_x) return;
    choose<MOST_EACH>(logits, ids, weights, E, K, scale, warp, ((ChoiceRoom *)area)[warp], error, where);
}
