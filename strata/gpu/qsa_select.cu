// Sparse attention, second part: scores of complete blocks and the exact best of them.
//
// Scores are not negative, so their bits rank like their values; bits of a score that is not finite are ranked all the
// same, so the chosen blocks are valid whatever came before.
#include "sums.cuh"

#define SCORE_THREADS 256
#define SELECT_THREADS 1024
#define SLICE 128    // values of a key that a warp holds at once
#define LISTED 2048  // scores that are looked at closely

// scores (T, most): a warp takes KEYS blocks of cells, grid-stride over those that the last row sees. For each, N pairs of
// row and head are summed together, a group of N / heads rows after the other. Shared: the queries of all rows.
template <int KEYS, int N>
KERNEL(SCORE_THREADS) qsa_scores(const float *iq, float *const *keys_slot, const i64 *pos, float *scores, int T,
                                 int heads, int dim, int block, int budget, int most, u64 *error, u64 where) {
    DYNAMIC_SHARED(bytes);
    float *q = (float *)bytes;
    int lane = threadIdx.x & 31, rows = N / heads;
    i64 start = *pos;
    const float *keys = *keys_slot;
    int n_last = (int)((start + T) / block);
    if (n_last <= budget) return;  // all are taken
    for (int i = threadIdx.x; i < T * heads * dim; i += SCORE_THREADS) q[i] = iq[i];
    __syncthreads();
    u32 bad = 0;  // bit of a row
    int warps = gridDim.x * (SCORE_THREADS / 32), mine_key = lane / rows, mine_row = lane % rows;
    for (int b = KEYS * ((blockIdx.x * SCORE_THREADS + threadIdx.x) >> 5); b < n_last; b += KEYS * warps) {
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

// Scores that a thread looks at: EACH of them in registers, those of longer rows in memory.
template <int EACH>
struct Scores {
    const float *s;  // a warp owns neighbouring scores, in rounds of 32: their order is that of (warp, round, lane)
    int rounds, first, inside;
    u32 kept[EACH];

    DEVICE u32 bits(int i) const { return 32 * i < inside ? bits_of(s[first + 32 * i]) & 0x7fffffffu : 0u; }
    template <class Visit>
    DEVICE void each(Visit visit) const {
#pragma unroll
        for (int i = 0; i < EACH; i++)
            if (i < rounds) visit(i, kept[i]);
#pragma unroll 1
        for (int i = EACH; i < rounds; i++) visit(i, bits(i));
    }
};

// Number of threads before this one for which `mine` holds, and of all. warps: 32 ints of shared memory.
DEVICE int count_before(bool mine, int *warps, int &all) {
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, before = 0;
    u32 votes = __ballot_sync(ALL_LANES, mine);
    __syncthreads();
    if (lane == 0) warps[warp] = __popc(votes);
    __syncthreads();
    int v = warps[lane];
    all = warp_count(v);
    before = warp_count(lane < warp ? v : 0);
    return before + __popc(votes & ((1u << lane) - 1));
}

// blocks (T, budget) int32, ascending: the `budget` best, of equal ones at the edge the lowest. One block a row.
//
// The budget-th largest of the threads' maxima bounds the budget-th largest score from below; what reaches it is a short
// list in order, from which the exact ones are taken. Where many scores are equal the list is too long: then the bound is
// the exact one, found over all scores.
template <int EACH>
KERNEL(SELECT_THREADS) qsa_select(const float *scores, const i64 *pos, int *blocks, int block, int budget, int most) {
    __shared__ int warps[32];
    __shared__ u32 keys[LISTED];
    __shared__ int ids[LISTED];
    int row = blockIdx.x, t = threadIdx.x, lane = t & 31, warp = t >> 5;
    int n = (int)((*pos + row + 1) / block);
    int *out = blocks + (size_t)row * budget;
    if (n <= budget) {
        for (int b = t; b < n; b += SELECT_THREADS) out[b] = b;
        return;
    }
    Scores<EACH> mine;
    mine.s = scores + (size_t)row * most;
    mine.rounds = (n + SELECT_THREADS - 1) / SELECT_THREADS;
    mine.first = warp * mine.rounds * 32 + lane;
    mine.inside = n - mine.first;
#pragma unroll
    for (int i = 0; i < EACH; i++) mine.kept[i] = i < mine.rounds ? mine.bits(i) : 0;
    u32 top = 0, bound = 0;
    mine.each([&](int, u32 u) { top = u > top ? u : top; });
#pragma unroll 1
    for (int bit = 30; bit >= 0; bit--) {
        u32 trial = bound | 1u << bit;
        int all = __syncthreads_count(top >= trial);
        if (all >= budget) bound = trial;
        if (all == budget) break;
    }
    int reach = 0, listed, unused;
    mine.each([&](int i, u32 u) { reach += 32 * i < mine.inside && u >= bound; });
    listed = block_count(reach, warps);
    if (listed > LISTED) {
        bound = 0;
#pragma unroll 1
        for (int bit = 30; bit >= 0; bit--) {
            u32 trial = bound | 1u << bit;
            int some = 0;
            mine.each([&](int, u32 u) { some += u >= trial; });
            if (block_count(some, warps) >= budget) bound = trial;
        }
    }
    // What lies above the bound, and of what equals it as much as fits: in order, and at least `budget` of them.
    int above = 0, equal = 0;
    mine.each([&](int i, u32 u) {
        above += u > bound;
        equal += 32 * i < mine.inside && u == bound;
    });
    int room = LISTED - block_count(above, warps);
    equal = warp_count(equal), above = warp_count(above);
    __syncthreads();
    if (lane == 0) warps[warp] = equal;
    __syncthreads();
    int equal_before = warp_count(lane < warp ? warps[lane] : 0), left = room - equal_before;
    int taken_equal = left < 0 ? 0 : equal < left ? equal : left;
    __syncthreads();
    if (lane == 0) warps[warp] = above + taken_equal;
    __syncthreads();
    int place = warp_count(lane < warp ? warps[lane] : 0);
    listed = warp_count(warps[lane]);
    u32 below = (1u << lane) - 1;
    mine.each([&](int i, u32 u) {
        bool is_equal = 32 * i < mine.inside && u == bound;
        u32 equals = __ballot_sync(ALL_LANES, is_equal);
        bool taken = u > bound || (is_equal && __popc(equals & below) < left);
        u32 all = __ballot_sync(ALL_LANES, taken);
        if (taken) {
            keys[place + __popc(all & below)] = u;
            ids[place + __popc(all & below)] = mine.first + 32 * i;
        }
        place += __popc(all);
        left -= __popc(equals);
    });
    __syncthreads();
    u32 a = t < listed ? keys[t] : 0, b = t + SELECT_THREADS < listed ? keys[t + SELECT_THREADS] : 0;
    bool has_a = t < listed, has_b = t + SELECT_THREADS < listed, longer = listed > SELECT_THREADS;
    bound = 0;
#pragma unroll 1
    for (int bit = 30; bit >= 0; bit--) {
        u32 trial = bound | 1u << bit;
        int all = __syncthreads_count(a >= trial);
        if (longer) all += __syncthreads_count(b >= trial);
        if (all >= budget) bound = trial;
        if (all == budget) break;
    }
    int edge = budget - __syncthreads_count(has_a && a > bound) - (longer ? __syncthreads_count(has_b && b > bound) : 0);
    int equals, done;
    int rank = count_before(has_a && a == bound, warps, equals);
    bool taken = has_a && (a > bound || (a == bound && rank < edge));
    place = count_before(taken, warps, done);
    if (taken) out[place] = ids[t];
    if (longer) {
        rank = equals + count_before(has_b && b == bound, warps, unused);
        taken = has_b && (b > bound || (b == bound && rank < edge));
        place = done + count_before(taken, warps, unused);
        if (taken) out[place] = ids[t + SELECT_THREADS];
    }
}
