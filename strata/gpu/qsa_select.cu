// Sparse attention, second part: scores of complete blocks and the exact best of them.
//
// Scores are not negative, so their bits rank like their values; bits of a score that is not finite are ranked all the
// same, so the chosen blocks are valid whatever came before.
#include "sums.cuh"

#define SCORE_THREADS 256
#define SELECT_THREADS 1024
#define KEYS 2    // keys that a warp scores at once
#define SLICE 128  // values of a key that a warp holds at once

// scores (T, most): a warp takes KEYS blocks of cells, grid-stride over those that the last row sees. N pairs of row and
// head are summed together, a group of N / heads rows after the other. Shared: the queries of all rows.
template <int N>
KERNEL(SCORE_THREADS) qsa_scores(const float *iq, float *const *keys_slot, const i64 *pos, float *scores, int T,
                                 int heads, int dim, int block, int budget, int most, u64 *error, u64 where) {
    DYNAMIC_SHARED(bytes);
    float *q = (float *)bytes;
    int lane = threadIdx.x & 31, rows = N / heads;
    i64 start = *pos;
    int n_last = (int)((start + T) / block);
    if (n_last <= budget) return;  // all are taken
    for (int i = threadIdx.x; i < T * heads * dim; i += SCORE_THREADS) q[i] = iq[i];
    __syncthreads();
    const float *keys = *keys_slot;
    u32 bad = 0;  // bit of a row
    int warps = gridDim.x * (SCORE_THREADS / 32);
    for (int b = KEYS * ((blockIdx.x * SCORE_THREADS + threadIdx.x) >> 5); b < n_last; b += KEYS * warps) {
        for (int row0 = 0; row0 < T; row0 += rows) {
            float sums[KEYS][N];
#pragma unroll
            for (int k = 0; k < KEYS; k++)
#pragma unroll
                for (int p = 0; p < N; p++) sums[k][p] = 0.f;
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
                        for (int k = 0; k < KEYS; k++) sums[k][p] = fma32(value, key[k][j], sums[k][p]);
                    }
                }
            }
#pragma unroll
            for (int k = 0; k < KEYS; k++) {
                float mine = packed_tree<N>(sums[k]), total = 0.f;
                for (int h = 0; h < heads; h++) {
                    float s = __shfl_sync(ALL_LANES, mine, lane_of_pair<N>((lane * heads + h) & (N - 1)));
                    total = s != s || total != total ? (s != s ? s : total) : add32(total, s > 0.f ? s : 0.f);
                }
                int row = row0 + lane;
                if (lane < rows && row < T && b + k < (int)((start + row + 1) / block)) {
                    scores[(size_t)row * most + b + k] = total;
                    if (!finite32(total)) bad |= 1u << row;
                }
            }
        }
    }
    for (int row = 0; bad; row++, bad >>= 1)
        if ((bad & 1) && (int)((start + row + 1) / block) > budget) report(error, where, NOT_FINITE, row);
}

template <int EACH, class Rest, class Visit>
DEVICE void each_of(const u32 (&kept)[EACH], int rounds, Rest rest, Visit visit) {
#pragma unroll
    for (int i = 0; i < EACH; i++)
        if (i < rounds) visit(i, kept[i]);
#pragma unroll 1
    for (int i = EACH; i < rounds; i++) visit(i, rest(i));
}

// blocks (T, budget) int32, ascending: the `budget` best, of equal ones at the edge the lowest. One block a row; a
// thread keeps EACH scores in registers, those of longer rows are read again for every bit.
//
// The bits of the budget-th largest score are found from the top, one count a bit: counting by votes has no hot
// counters, as digits of similar floats would.
template <int EACH>
KERNEL(SELECT_THREADS) qsa_select(const float *scores, const i64 *pos, int *blocks, int block, int budget, int most) {
    __shared__ int warps[33], sums[2][32];
    int row = blockIdx.x, t = threadIdx.x, lane = t & 31, warp = t >> 5;
    int n = (int)((*pos + row + 1) / block);
    int *out = blocks + (size_t)row * budget;
    if (n <= budget) {
        for (int b = t; b < n; b += SELECT_THREADS) out[b] = b;
        return;
    }
    // A warp owns neighbouring scores, in rounds of 32: their order is that of (warp, round, lane).
    const float *s = scores + (size_t)row * most;
    int rounds = (n + SELECT_THREADS - 1) / SELECT_THREADS, first = warp * rounds * 32 + lane, inside = n - first;
    u32 kept[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        kept[i] = i < rounds && 32 * i < inside ? bits_of(s[first + 32 * i]) & 0x7fffffffu : 0;
    }
    auto rest = [&](int i) { return 32 * i < inside ? bits_of(s[first + 32 * i]) & 0x7fffffffu : 0u; };
    u32 bound = 0;
#pragma unroll 1
    for (int bit = 30; bit >= 0; bit--) {
        u32 trial = bound | 1u << bit;
        int mine = 0;
#pragma unroll
        for (int i = 0; i < EACH; i++) mine += kept[i] >= trial;
#pragma unroll 1
        for (int i = EACH; i < rounds; i++) mine += rest(i) >= trial;
        int all = block_count(mine, warps);
        if (all >= budget) bound = trial;
        if (all == budget) break;
    }
    int above = 0, equal = 0;
    each_of<EACH>(kept, rounds, rest, [&](int i, u32 u) {
        above += u > bound;
        equal += 32 * i < inside && u == bound;
    });
    above = warp_count(above), equal = warp_count(equal);
    if (lane == 0) sums[0][warp] = above, sums[1][warp] = equal;
    __syncthreads();
    int all_above = 0, above_before = 0, equal_before = 0;
#pragma unroll 4
    for (int w = 0; w < SELECT_THREADS / 32; w++) {
        all_above += sums[0][w];
        if (w < warp) above_before += sums[0][w], equal_before += sums[1][w];
    }
    int at_edge = budget - all_above;
    int done = above_before + (equal_before < at_edge ? equal_before : at_edge);
    u32 below = (1u << lane) - 1;
    each_of<EACH>(kept, rounds, rest, [&](int i, u32 u) {
        bool is_equal = 32 * i < inside && u == bound;
        u32 equals = __ballot_sync(ALL_LANES, is_equal);
        bool taken = u > bound || (is_equal && equal_before + __popc(equals & below) < at_edge);
        u32 all = __ballot_sync(ALL_LANES, taken);
        if (taken) out[done + __popc(all & below)] = first + 32 * i;
        done += __popc(all);
        equal_before += __popc(equals);
    });
}
