// The logits of a router with the choice of its experts, and the product of a second matrix with the same input: windows of
// one row.
//
// The sums are those of float_gemv.cu. A block takes four rows of the matrices; a thread holds weights of two of them, which
// it asks for before it waits for the activations, and of those each value serves both. The last block to arrive chooses
// (choose.cuh).
#include "arrivals.cuh"
#include "choose.cuh"
#include "early.cuh"
#include "float_rows.cuh"

#define BLOCK_ROWS 4  // route.py has it too, and the most values of a row
#define STEPS 10      // of 256 values of a row
#define MOST_EACH 16  // experts of a lane

// Matrices in BF16: w0 (E, D), the router, and w1 (n1, D), which may be missing. x (D), y0 (E), y1 (n1). D >= 256.
// The choice is made from `logits` (E), which are y0 but for replays. arrived: 0, and again 0 afterwards. Grid: rows / 4.
STARTS_EARLY KERNEL(256) route(const float *x, int D, const u8 *w0, float *y0, int E, const u8 *w1, float *y1, int n1,
                               const float *logits, int *ids, float *weights, int K, float scale, u32 *arrived, u64 *error, u64 where) {
    __shared__ float4 area[BLOCK_ROWS * 64];
    static_assert(sizeof(area) >= sizeof(ChoiceRoom), "the choice uses the memory of the sums");
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
    float acc[2][2] = {{0.f, 0.f}, {0.f, 0.f}};
    auto value = [&](int s) { return *(const float2 *)(x + t + 256 * s); };
    auto add_terms = [&](int s, float2 v) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            acc[r][0] = fma32(float_of(w[r][s] << 16), v.x, acc[r][0]);
            acc[r][1] = fma32(float_of(w[r][s] & 0xffff0000u), v.y, acc[r][1]);
        }
    };
    if (256 * STEPS <= D) {
        float2 v[STEPS];
#pragma unroll
        for (int s = 0; s < STEPS; s++) v[s] = value(s);
#pragma unroll
        for (int s = 0; s < STEPS; s++) add_terms(s, v[s]);
    } else {
#pragma unroll
        for (int s = 0; s < STEPS; s++)
            if (t + 256 * s < D) add_terms(s, value(s));
    }
    float *lanes = (float *)area;  // 256 of every row
#pragma unroll
    for (int r = 0; r < 2; r++) *(float2 *)&lanes[256 * (2 * half + r) + t] = make_float2(acc[r][0], acc[r][1]);
    __syncthreads();
    int warp = threadIdx.x >> 5;
    if (warp < BLOCK_ROWS) {
        float sum = trees_of_256<1>(lanes + 256 * warp);
        int row = first + warp;
        if ((threadIdx.x & 31) == 0 && row < rows) *(row < E ? y0 + row : y1 + row - E) = sum;
    }
    if (!last_of(arrived, gridDim.x) || warp > 0) return;
    choose<MOST_EACH>(logits, ids, weights, E, K, scale, 0, *(ChoiceRoom *)area, error, where);
}
