// What the host needs of a window's logits: largest logits in order, log-sum-exp, penalties and bias.
//
// Order: larger first, equal ones by lowest id (-0 equals +0). The largest of every 64 logits are found first; the n-th
// largest of those bounds the n-th largest logit from below, so only about n runs of 64 are looked into again.
#include "exp64.cuh"
#include "sums.cuh"

#define RUN 64
#define TOP_THREADS 1024
#define MOST 64
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

// One step of a radix search: the digit in which the `left`-th largest lies; left becomes its rank inside.
DEVICE void pick(const int *counts, int &digit, int &left) {
    int d = 255, rest = left;
    while (d > 0 && counts[d] < rest) rest -= counts[d--];
    digit = d;
    left = rest;
}

// ids and values (T, stride): the n largest logits in order. status (T): -1, or the id of the first bad logit, and then
// nothing else is written. One block a row; V >= n.
KERNEL(TOP_THREADS) head_top(const float *logits, const u32 *tops, int *ids, float *values, int *status, int V, int runs,
                             int n, int stride, int bans) {
    __shared__ int counts[256], digit, left, first_bad, found;
    __shared__ u64 list[MOST];
    int row = blockIdx.x, t = threadIdx.x, lane = t & 31, warp = t >> 5;
    const float *l = logits + (size_t)row * V;
    const u32 *top = tops + (size_t)row * runs;
    if (t == 0) first_bad = V;
    __syncthreads();
    for (int b = t; b < runs; b += TOP_THREADS)
        if (top[b] == BAD)
            for (int i = b * RUN; i < V && i < (b + 1) * RUN; i++)
                if (is_bad(l[i], bans)) {
                    atomicMin(&first_bad, i);
                    break;
                }
    __syncthreads();
    if (first_bad < V) {
        if (t == 0) status[row] = first_bad;
        return;
    }
    u32 bound = 0;
    if (runs > n) {
        u32 mask = 0;
        if (t == 0) left = n;
        for (int shift = 24; shift >= 0; shift -= 8) {
            if (t < 256) counts[t] = 0;
            __syncthreads();
            for (int b = t; b < runs; b += TOP_THREADS)
                if ((top[b] & mask) == bound) atomicAdd(&counts[top[b] >> shift & 255], 1);
            __syncthreads();
            if (t == 0) pick(counts, digit, left);
            __syncthreads();
            bound |= (u32)digit << shift;
            mask |= 255u << shift;
            __syncthreads();
        }
    }
    // The n-th largest among the runs that reach the bound, by key and then by lowest id: these keys are all different.
    u64 edge = 0, mask = 0;
    if (t == 0) left = n, found = 0;
    for (int shift = 56; shift >= 0; shift -= 8) {
        if (t < 256) counts[t] = 0;
        __syncthreads();
        for (int b = warp; b < runs; b += TOP_THREADS / 32) {
            if (top[b] < bound) continue;
            for (int i = b * RUN + lane; i < V && i < (b + 1) * RUN; i += 32) {
                u64 key = (u64)order_key(l[i]) << 32 | (u32)~i;
                if ((key & mask) == edge) atomicAdd(&counts[key >> shift & 255], 1);
            }
        }
        __syncthreads();
        if (t == 0) pick(counts, digit, left);
        __syncthreads();
        edge |= (u64)digit << shift;
        mask |= 255ull << shift;
        __syncthreads();
    }
    for (int b = warp; b < runs; b += TOP_THREADS / 32) {
        if (top[b] < bound) continue;
        for (int i = b * RUN + lane; i < V && i < (b + 1) * RUN; i += 32) {
            u64 key = (u64)order_key(l[i]) << 32 | (u32)~i;
            if (key >= edge) {
                int place = atomicAdd(&found, 1);
                if (place < MOST) list[place] = key;
            }
        }
    }
    __syncthreads();
    if (t < n) {
        int rank = 0, id = (int)~(u32)list[t];
        for (int j = 0; j < n; j++) rank += list[j] > list[t];
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

// sums (T): log-sum-exp of each row; 256 lanes (id mod 256), ids ascending, halving tree. One block a row.
KERNEL(256) head_sums(const double *terms, const float *values, int stride, double *sums, int V) {
    __shared__ double lanes[256];
    int t = threadIdx.x, row = blockIdx.x;
    const double *e = terms + (size_t)row * V;
    double sum = 0.0;
#pragma unroll 8
    for (int i = t; i < V; i += 256) sum = add64(sum, e[i]);
    lanes[t] = sum;
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
