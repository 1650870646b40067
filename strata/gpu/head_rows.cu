// What the host needs of a window's logits: largest logits in order, log-sum-exp, penalties and bias.
//
// Order: larger first, equal ones by lowest id (-0 equals +0). The largest of every 64 logits are found first; the n-th
// largest of those bounds the n-th largest logit from below, so only about n runs of 64 are looked into again.
#include "exp64.cuh"
#include "sums.cuh"

#define RUN 64
#define TOP_THREADS 1024
#define GROUPS 64
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
KERNEL(256) head_scan(const float *logits, u32 *tops, int V, int runs, int bans) {
    int run = blockIdx.x * 8 + (threadIdx.x >> 5), lane = threadIdx.x & 31, row = blockIdx.y;
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

// ids and values (T, stride): the n largest logits in order. status (T): -1, or the id of the first bad logit, and then
// nothing else is written. One block a row; V >= n.
//
// Logits that reach the n-th largest run are candidates; there are rarely more than a few hundred. If they do not fit
// into the list, the bound is raised to the n-th largest of all, ties by lowest id.
KERNEL(TOP_THREADS) head_top(const float *logits, const u32 *tops, int *ids, float *values, int *status, int V, int runs,
                             int n, int stride, int bans) {
    __shared__ int warps[32], first_bad, found;
    __shared__ u32 maxima[GROUPS], edge_of_runs, largest;
    __shared__ u64 list[CANDIDATES];
    int row = blockIdx.x, t = threadIdx.x, lane = t & 31, warp = t >> 5;
    const float *l = logits + (size_t)row * V;
    const u32 *top = tops + (size_t)row * runs;
    if (t == 0) first_bad = V, found = 0;
    __syncthreads();
    // Groups of 16 threads hold every 64th part of the runs: the n-th largest of their maxima bounds the n-th largest
    // logit from below, since n different runs reach it.
    u32 most = 0;
    for (int b = t; b < runs; b += TOP_THREADS) most = top[b] > most ? top[b] : most;
#pragma unroll
    for (int half = 8; half; half >>= 1) {
        u32 other = __shfl_xor_sync(ALL_LANES, most, half);
        most = other > most ? other : most;
    }
    if ((t & 15) == 0) maxima[t >> 4] = most;
    __syncthreads();
    if (t < GROUPS) {
        int larger = 0;
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
    // Keys that are all different: larger logits first, equal ones by lowest id.
    u64 edge = (u64)bound << 32;
    for (;;) {
        for (int b = warp; b < runs; b += TOP_THREADS / 32) {
            if (top[b] < bound) continue;
            for (int i = b * RUN + lane; i < V && i < (b + 1) * RUN; i += 32) {
                u64 key = (u64)order_key(l[i]) << 32 | (u32)~i;
                if (key >= edge) {
                    int place = atomicAdd(&found, 1);
                    if (place < CANDIDATES) list[place] = key;
                }
            }
        }
        __syncthreads();
        if (found <= CANDIDATES) break;
        u64 exact = 0;
        for (int bit = 63; bit >= 0; bit--) {
            u64 trial = exact | 1ull << bit;
            int mine = 0;
            for (int b = warp; b < runs; b += TOP_THREADS / 32) {
                if (top[b] < bound) continue;
                for (int i = b * RUN + lane; i < V && i < (b + 1) * RUN; i += 32)
                    mine += ((u64)order_key(l[i]) << 32 | (u32)~i) >= trial;
            }
            int all = block_count(mine, warps);
            if (all >= n) exact = trial;
            if (all == n) break;
        }
        edge = exact;
        if (t == 0) found = 0;
        __syncthreads();
    }
    for (int c = t; c < found; c += TOP_THREADS) {
        u64 key = list[c];
        int rank = 0, id = (int)~(u32)key;
        for (int j = 0; j < found; j++) rank += list[j] > key;
        if (rank >= n) continue;
        ids[row * stride + rank] = id;
        values[row * stride + rank] = l[id];
    }
    if (t == 0) status[row] = -1;
}

// terms (T, V) float64 = exp(logit - largest); largest: values[row * stride]. Grid: (V / 256, T).
KERNEL(256) head_terms(const float *logits, const float *values, int stride, double *terms, int V) {
    int i = blockIdx.x * 256 + threadIdx.x, row = blockIdx.y;
    if (i >= V) return;
    terms[(size_t)row * V + i] = exp64(add64((double)logits[(size_t)row * V + i], -(double)values[row * stride]));
}

#define LSE_LANES 32   // lanes of a block
#define LSE_ROWS 64    // ids of each lane that are under way at once

// lanes (T, 256) float64: sums of 256 lanes (id mod 256), ids ascending. A block has 32 lanes: warp 0 adds what the
// others bring into shared memory. Grid: (8, T).
KERNEL(256) head_lanes(const double *terms, double *lanes, int V) {
    __shared__ double tile[2][LSE_ROWS][LSE_LANES];
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, row = blockIdx.y, first = blockIdx.x * LSE_LANES + lane;
    const double *e = terms + (size_t)row * V + first;
    int n = first < V ? (V - first + 255) / 256 : 0, rounds = ((V + 255) / 256 + LSE_ROWS - 1) / LSE_ROWS;
    double ahead[LSE_ROWS / 8], sum = 0.0;
    auto fetch = [&](int round) {
#pragma unroll
        for (int i = 0; i < LSE_ROWS / 8; i++) {
            int k = round * LSE_ROWS + 8 * i + warp;
            ahead[i] = k < n ? e[(size_t)256 * k] : 0.0;
        }
    };
    fetch(0);
    for (int round = 0; round < rounds; round++) {
#pragma unroll
        for (int i = 0; i < LSE_ROWS / 8; i++) tile[round & 1][8 * i + warp][lane] = ahead[i];
        if (round + 1 < rounds) fetch(round + 1);
        __syncthreads();  // the other tile was read before the last one was complete
        if (warp == 0) {
            int left = n - round * LSE_ROWS;
#pragma unroll 8
            for (int k = 0; k < LSE_ROWS; k++)
                if (k < left) sum = add64(sum, tile[round & 1][k][lane]);
        }
    }
    if (warp == 0) lanes[(size_t)row * 256 + first] = sum;
}

// sums (T): log-sum-exp of each row, by a halving tree over its lanes. One block a row.
KERNEL(256) head_sums(const double *lanes_of_rows, const float *values, int stride, double *sums) {
    __shared__ double lanes[256];
    int t = threadIdx.x, row = blockIdx.x;
    lanes[t] = lanes_of_rows[(size_t)row * 256 + t];
    __syncthreads();
    for (int half = 128; half; half >>= 1) {
        if (t < half) lanes[t] = add64(lanes[t], lanes[t + half]);
        __syncthreads();
    }
    if (t == 0) sums[row] = add64((double)values[row * stride], log64(lanes[0]));
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
