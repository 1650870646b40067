// What the host needs of a window's logits: largest logits in order, log-sum-exp, penalties and bias.
//
// Order: larger first, equal ones by lowest id (-0 equals +0). The largest of every 64 logits are found first; the n-th
// largest of those bounds the n-th largest logit from below, so only about n runs of 64 are looked into again.
#include "early.cuh"
#include "exp64.cuh"
#include "sums.cuh"

#define RUN 64
#define TOP_THREADS 1024
#define GROUPS 64
#define HELD 4           // largest logits of runs that a thread keeps
#define RUNS 4096        // runs that are looked into by a list
#define LOOKS 4          // of them that a warp loads at once
#define CANDIDATES 2048  // logits that are sorted by counting
#define BAD 0xffffffffu

// Unsigned integers in the order of the floats.
DEVICE u32 order_key(float x) {
    u32 b = bits_of(add32(x, 0.f));
    return b & 0x80000000u ? ~b : b | 0x80000000u;
}
// -inf is a banned token where bans are allowed; every other value that is not finite is bad.
DEVICE bool is_bad(float x, int bans) { return !finite32(x) && !(bans && bits_of(x) == 0xff800000u); }

// tops (T, runs): the largest key of each run of 64 logits, or BAD. One warp a run. Grid: (runs / 8, T).
STARTS_EARLY KERNEL(256) head_scan(const float *logits, u32 *tops, int V, int runs, int bans) {
    int run = blockIdx.x * 8 + (threadIdx.x >> 5), lane = threadIdx.x & 31, row = blockIdx.y;
    let_next_start();
    wait_for_inputs();
    if (run >= runs) return;
    const float *l = logits + (size_t)row * V;
    u32 top = 0;
#pragma unroll
    for (int j = 0; j < 2; j++) {
        int i = run * RUN + 32 * j + lane;
        if (i >= V) continue;
        u32 key = is_bad(l[i], bans) ? BAD : order_key(l[i]);
        top = key > top ? key : top;
    }
#pragma unroll
    for (int half = 16; half; half >>= 1) {
        u32 other = __shfl_xor_sync(ALL_LANES, top, half);
        top = other > top ? other : top;
    }
    if (lane == 0) tops[(size_t)row * runs + run] = top;
}

// Runs whose largest logit reaches a bound: n of a list, or without one n in all.
struct Reaching {
    const float *l;
    const u32 *top;
    const int *list;
    int n, V;
    u32 bound;

    // visit(key, logit) for all their logits, a run a warp. Keys are all different: larger logits first, equal ones by
    // lowest id.
    template <class Visit>
    DEVICE void each(Visit visit) const {
        int lane = threadIdx.x & 31;
        for (int k0 = threadIdx.x >> 5; k0 < n; k0 += LOOKS * TOP_THREADS / 32) {
            float x[LOOKS][RUN / 32];
            int first[LOOKS];  // id, or V for no run
#pragma unroll
            for (int u = 0; u < LOOKS; u++) {
                int k = k0 + u * (TOP_THREADS / 32), b = k < n ? list ? list[k] : k : -1;
                first[u] = b < 0 || (!list && top[b] < bound) ? V : b * RUN + lane;
            }
#pragma unroll
            for (int u = 0; u < LOOKS; u++)
#pragma unroll
                for (int j = 0; j < RUN / 32; j++) x[u][j] = first[u] + 32 * j < V ? l[first[u] + 32 * j] : 0.f;
#pragma unroll
            for (int u = 0; u < LOOKS; u++)
#pragma unroll
                for (int j = 0; j < RUN / 32; j++) {
                    int i = first[u] + 32 * j;
                    if (i < V) visit((u64)order_key(x[u][j]) << 32 | (u32)~i, x[u][j]);
                }
        }
    }
};

// ids and values (T, stride): the n largest logits in order. status (T): -1, or the id of the first bad logit, and then
// nothing else is written. One block a row; V >= n.
//
// Logits that reach the n-th largest run are candidates; there are rarely more than a few hundred. If they do not fit
// into the list, the bound is raised to the n-th largest of all, ties by lowest id.
STARTS_EARLY KERNEL(TOP_THREADS) head_top(const float *logits, const u32 *tops, int *ids, float *values, int *status, int V,
                                          int runs, int n, int stride, int bans) {
    __shared__ int warps[32], first_bad, found, reaching;
    __shared__ u32 maxima[GROUPS], edge_of_runs, largest;
    __shared__ u64 list[CANDIDATES];
    __shared__ float listed[CANDIDATES];
    __shared__ int to_look_into[RUNS];
    int row = blockIdx.x, t = threadIdx.x;
    const float *l = logits + (size_t)row * V;
    const u32 *top = tops + (size_t)row * runs;
    if (t == 0) first_bad = V, found = reaching = 0;
    let_next_start();
    wait_for_inputs();
    // Groups of 16 threads hold every 64th part of the runs: the n-th largest of their maxima bounds the n-th largest
    // logit from below, since n different runs reach it.
    u32 held[HELD], most = 0;
#pragma unroll
    for (int i = 0; i < HELD; i++) held[i] = i * TOP_THREADS + t < runs ? top[i * TOP_THREADS + t] : 0;
#pragma unroll
    for (int i = 0; i < HELD; i++) most = held[i] > most ? held[i] : most;
    for (int b = HELD * TOP_THREADS + t; b < runs; b += TOP_THREADS) most = top[b] > most ? top[b] : most;
#pragma unroll
    for (int half = 8; half; half >>= 1) {
        u32 other = __shfl_xor_sync(ALL_LANES, most, half);
        most = other > most ? other : most;
    }
    if ((t & 15) == 0) maxima[t >> 4] = most;
    __syncthreads();
    if (t < GROUPS) {
        int larger = 0;
#pragma unroll 16
        for (int g = 0; g < GROUPS; g++) larger += maxima[g] > maxima[t] || (maxima[g] == maxima[t] && g < t);
        if (larger == n - 1) edge_of_runs = maxima[t];
        if (larger == 0) largest = maxima[t];
    }
    __syncthreads();
    if (largest == BAD) {
        for (int b = t; b < runs; b += TOP_THREADS)
            if (top[b] == BAD)
                for (int i = b * RUN; i < V && i < (b + 1) * RUN; i++)
                    if (is_bad(l[i], bans)) {
                        atomicMin(&first_bad, i);
                        break;
                    }
        __syncthreads();
        if (t == 0) status[row] = first_bad;
        return;
    }
    u32 bound = edge_of_runs;
    auto look_at = [&](int b) {
        if (b >= runs) return;
        int place = atomicAdd(&reaching, 1);
        if (place < RUNS) to_look_into[place] = b;
    };
#pragma unroll
    for (int i = 0; i < HELD; i++)
        if (held[i] >= bound) look_at(i * TOP_THREADS + t);
    for (int b = HELD * TOP_THREADS + t; b < runs; b += TOP_THREADS)
        if (top[b] >= bound) look_at(b);
    __syncthreads();
    Reaching reached = {l, top, reaching <= RUNS ? to_look_into : nullptr, reaching <= RUNS ? reaching : runs, V, bound};
    u64 edge = (u64)bound << 32;
    for (;;) {
        reached.each([&](u64 key, float logit) {
            if (key < edge) return;
            int place = atomicAdd(&found, 1);
            if (place < CANDIDATES) list[place] = key, listed[place] = logit;
        });
        __syncthreads();
        if (found <= CANDIDATES) break;
        u64 exact = 0;
        for (int bit = 63; bit >= 0; bit--) {
            u64 trial = exact | 1ull << bit;
            int mine = 0;
            reached.each([&](u64 key, float) { mine += key >= trial; });
            int all = block_count(mine, warps);
            if (all >= n) exact = trial;
            if (all == n) break;
        }
        edge = exact;
        if (t == 0) found = 0;
        __syncthreads();
    }
    int candidates = found;
    for (int c = t; c < candidates; c += TOP_THREADS) {
        u64 key = list[c];
        int rank = 0;
#pragma unroll 8
        for (int j = 0; j < candidates; j++) rank += list[j] > key;
        if (rank >= n) continue;
        ids[row * stride + rank] = (int)~(u32)key;
        values[row * stride + rank] = listed[c];
    }
    if (t == 0) status[row] = -1;
}

#define LSE_LANES 8     // lanes of a block
#define LSE_ROWS 128    // ids of each lane that are under way at once
#define LSE_TERMS (LSE_LANES * LSE_ROWS / 256)

// lanes (T, 256) float64: sums of exp(logit - largest) over 256 lanes (id mod 256), ids ascending; largest: values[row *
// stride]. A block has 8 lanes: 256 threads bring terms into shared memory, and a warp of its own adds what they brought
// before. A term behind the last id is +0, which changes no sum. Grid: (32, T).
STARTS_EARLY KERNEL(288) head_lanes(const float *logits, const float *values, int stride, double *lanes, int V) {
    __shared__ double tile[2][LSE_ROWS][LSE_LANES];
    int t = threadIdx.x, row = blockIdx.y, lane = t % LSE_LANES, first = blockIdx.x * LSE_LANES + lane;
    int rounds = ((V + 255) / 256 + LSE_ROWS - 1) / LSE_ROWS;
    const float *l = logits + (size_t)row * V;
    let_next_start();
    wait_for_inputs();
    double largest = (double)values[row * stride], sum = 0.0;
    float ahead[LSE_TERMS];
    auto id_of = [&](int round, int i) { return 256 * (round * LSE_ROWS + 32 * i + t / LSE_LANES) + first; };
    auto fetch = [&](int round) {
#pragma unroll
        for (int i = 0; i < LSE_TERMS; i++) ahead[i] = id_of(round, i) < V ? l[id_of(round, i)] : 0.f;
    };
    if (t < 256) fetch(0);
    for (int round = 0; round <= rounds; round++) {
        if (t < 256 && round < rounds) {
            float now[LSE_TERMS];
#pragma unroll
            for (int i = 0; i < LSE_TERMS; i++) now[i] = ahead[i];
            if (round + 1 < rounds) fetch(round + 1);
#pragma unroll
            for (int i = 0; i < LSE_TERMS; i++) {
                double term = exp64(add64((double)now[i], -largest));
                tile[round & 1][32 * i + t / LSE_LANES][lane] = id_of(round, i) < V ? term : 0.0;
            }
        }
        if (t >= 256 && t < 256 + LSE_LANES && round > 0) {
#pragma unroll 16
            for (int k = 0; k < LSE_ROWS; k++) sum = add64(sum, tile[(round - 1) & 1][k][lane]);
        }
        __syncthreads();
    }
    if (t >= 256 && t < 256 + LSE_LANES) lanes[(size_t)row * 256 + first] = sum;
}

// sums (T): log-sum-exp of each row, by a halving tree over its lanes. One warp a row.
STARTS_EARLY KERNEL(32) head_sums(const double *lanes_of_rows, const float *values, int stride, double *sums) {
    int lane = threadIdx.x, row = blockIdx.x;
    let_next_start();
    wait_for_inputs();
    double v[8], largest = (double)values[row * stride];
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = lanes_of_rows[(size_t)row * 256 + 32 * i + lane];
#pragma unroll
    for (int half = 4; half; half >>= 1)
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (i < half) v[i] = add64(v[i], v[i + half]);
#pragma unroll
    for (int half = 16; half; half >>= 1) v[0] = add64(v[0], __shfl_xor_sync(ALL_LANES, v[0], half));
    if (lane == 0) sums[row] = add64(largest, log64(v[0]));
}

// out (T, V) = logits after penalties, then bias. Row j counts the last `last_n` (0: all) of history and rows[: j + 1].
// counts (T, V): zeros, and zeros again afterwards. One block a row; tokens and bias ids lie inside the vocabulary.
KERNEL(1024) head_modify(const float *logits, float *out, int *counts, const int *history, int n_history, const int *rows,
                         int last_n, double repetition, double presence, double frequency, const int *bias_ids,
                         const double *bias, int n_bias, int V) {
    int row = blockIdx.x, t = threadIdx.x, n = n_history >= 0 ? n_history + row + 1 : 0;
    int first = last_n > 0 && n > last_n ? n - last_n : 0;
    const float *l = logits + (size_t)row * V;
    float *o = out + (size_t)row * V;
    int *c = counts + (size_t)row * V;
    for (int i = t; i < V; i += 1024) o[i] = l[i];
    for (int i = first + t; i < n; i += 1024) atomicAdd(&c[i < n_history ? history[i] : rows[i - n_history]], 1);
    __syncthreads();
    for (int i = first + t; i < n; i += 1024) {
        int token = i < n_history ? history[i] : rows[i - n_history], seen = atomicExch(&c[token], 0);
        if (seen == 0) continue;
        double logit = (double)o[token];
        logit = logit > 0.0 ? div64(logit, repetition) : mul64(logit, repetition);
        o[token] = f64_f32(add64(add64(logit, -presence), -mul64(frequency, (double)seen)));
    }
    __syncthreads();
    for (int i = t; i < n_bias; i += 1024) o[bias_ids[i]] = f64_f32(add64((double)o[bias_ids[i]], bias[i]));
}
