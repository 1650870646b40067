// Sparse attention, second part: scores of complete blocks. Scores are not negative, and a NaN stays one.
#include "early.cuh"
#include "qsa_scores.cuh"

#define THREADS 256
#define SLICE 128  // values of a key that a warp holds at once

// scores (T, most): a warp takes KEYS blocks of cells, grid-stride over those that the last row sees. For each, N pairs of
// row and head are summed together, a group of N / heads rows after the other. Shared: the queries of all rows.
template <int KEYS, int N>
STARTS_EARLY KERNEL(THREADS) qsa_scores(const float *iq, float *const *keys_slot, const i64 *pos, float *scores, int T,
                                        int heads, int dim, int block, int budget, int most, u64 *error, u64 where) {
    DYNAMIC_SHARED(bytes);
    float *q = (float *)bytes;
    int lane = threadIdx.x & 31, rows = N / heads;
    let_next_start();
    wait_for_inputs();
    i64 start = *pos;
    const float *keys = *keys_slot;
    int n_last = (int)((start + T) / block);
    if (n_last <= budget) return;  // all are taken
    for (int i = threadIdx.x; i < T * heads * dim; i += THREADS) q[i] = iq[i];
    __syncthreads();
    u32 bad = 0;  // bit of a row
    int warps = gridDim.x * (THREADS / 32), mine_key = lane / rows, mine_row = lane % rows;
    for (int b = KEYS * ((blockIdx.x * THREADS + threadIdx.x) >> 5); b < n_last; b += KEYS * warps) {
        for (int row0 = 0; row0 < T; row0 += rows) {
            float sums[KEYS * N];
#pragma unroll
            for (int i = 0; i < KEYS * N; i++) sums[i] = 0.f;
            for (int from = 0; from < dim; from += SLICE) {
                float key[KEYS][SLICE / 32];
#pragma unroll
                for (int k = 0; k < KEYS; k++)
#pragma unroll
                    for (int j = 0; j < SLICE / 32; j++) {
                        int i = from + 32 * j + lane;
                        key[k][j] = i < dim && b + k < n_last ? keys[(size_t)(b + k) * dim + i] : 0.f;
                    }
#pragma unroll
                for (int p = 0; p < N; p++) {
                    int pair = row0 * heads + p < T * heads ? row0 * heads + p : 0;
#pragma unroll
                    for (int j = 0; j < SLICE / 32; j++) {
                        int i = from + 32 * j + lane;
                        if (i >= dim) continue;
                        float value = q[pair * dim + i];
#pragma unroll
                        for (int k = 0; k < KEYS; k++) sums[k * N + p] = fma32(value, key[k][j], sums[k * N + p]);
                    }
                }
            }
            float all = packed_tree<KEYS * N>(sums), total = 0.f;
            for (int h = 0; h < heads; h++) {
                int pair = (mine_key * N + mine_row * heads + h) & (KEYS * N - 1);
                float s = __shfl_sync(ALL_LANES, all, lane_of_pair<KEYS * N>(pair));
                total = total != total ? total : s != s ? s : add32(total, s > 0.f ? s : 0.f);
            }
            int row = row0 + mine_row;
            if (mine_key < KEYS && row < T && b + mine_key < (int)((start + row + 1) / block)) {
                scores[(size_t)row * most + b + mine_key] = total;
                if (!finite32(total)) bad |= 1u << row;
            }
        }
    }
    for (int row = 0; bad; row++, bad >>= 1)
        if ((bad & 1) && (int)((start + row + 1) / block) > budget) report(error, where, NOT_FINITE, row);
}

// The same for 4 heads of 128 values, every block of cells by one warp of the grid.
STARTS_EARLY __global__ void __launch_bounds__(WIDE_THREADS, 4)
    qsa_scores_4x128(const float *iq, float *const *keys_slot, const i64 *pos, float *scores, int T, int block, int budget,
                     int most, u64 *error, u64 where) {
    DYNAMIC_SHARED(bytes);
    float4 *q = (float4 *)bytes;
    int t = threadIdx.x, lane = t & 31, c = lane & 7;
    int first = WIDE_KEYS * ((blockIdx.x * WIDE_THREADS + t) >> 5), b = first + 4 * (lane >> 3);
    const float *keys = (const float *)__ldg((const u64 *)keys_slot);
    let_next_start();
    int soon = (peek((const int *)pos) + T) / block;
    if (soon > budget && first < soon && first + WIDE_KEYS <= most)
        bring_early(keys + (size_t)first * 128, WIDE_KEYS * 512, lane, 32);
    wait_for_inputs();
    int start = (int)*pos, n_last = (start + T) / block;
    float4 mine[8];
#pragma unroll
    for (int i = 0; i < 8; i++)
        if (i < T) mine[i] = ((const float4 *)iq)[WIDE_THREADS * i + t];
    if (n_last <= budget || WIDE_KEYS * (WIDE_THREADS / 32) * (int)blockIdx.x >= n_last) return;
    float4 key[4][4];
    load_keys(keys, b, c, n_last, key);
#pragma unroll
    for (int i = 0; i < 8; i++)
        if (i < T) q[WIDE_THREADS * i + t] = mine[i];
    __syncthreads();
    score_keys(q, key, b, c, start, scores, T, block, budget, most, error, where);
}
