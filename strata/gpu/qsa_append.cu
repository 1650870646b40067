// Sparse attention, first part: norms and rotation of q and k, append of K and V; indexer queries, pooled keys, raw keys.
// One warp a head. Shared memory: a row of `dh` (or `dim`) floats for every warp.
//
// In windows the scores of complete blocks are made here as well, by blocks that norm the indexer's queries for themselves
// (and pool those keys of theirs that end in this window): that takes less time than to wait for somebody who does it.
#include "early.cuh"
#include "gemm/tensor.cuh"
#include "kv_cells.cuh"
#include "qsa_scores.cuh"

#define WARPS 4
#define AT_ONCE 4  // raw keys of a block that are loaded together, and values of each

// norm_rotate of N values of which 64 are rotated: all of a lane's are loaded at once.
template <int N>
DEVICE bool norm_rotate_64(const float *x, const float *w, float *out, float eps, const float *angles) {
    int lane = threadIdx.x & 31;
    float value[N / 32], weight[N / 32], v[8];
#pragma unroll
    for (int j = 0; j < N / 32; j++) value[j] = x[32 * j + lane], weight[j] = w[32 * j + lane];
    float c = angles[lane], s = angles[32 + lane];
#pragma unroll
    for (int j = 0; j < 8; j++) v[j] = j < N / 32 ? fma32(value[j], value[j], 0.f) : 0.f;
    float r = inverse_rms(warp_tree256(v), N, eps);
    bool fine = true;
#pragma unroll
    for (int j = 0; j < N / 32; j++) value[j] = mul32(mul32(value[j], r), weight[j]);
    float low = value[0], high = value[1];
    value[0] = sub32(mul32(low, c), mul32(high, s)), value[1] = add32(mul32(high, c), mul32(low, s));
#pragma unroll
    for (int j = 0; j < N / 32; j++) {
        out[32 * j + lane] = value[j];
        fine = fine && finite32(value[j]);
    }
    __syncwarp();
    return warp_all(fine);
}

// out = rotate(rms(x) w), by one warp; out may be x, or shared memory. Returns whether all of it is finite, in every lane.
// N > 0: n is N, and 64 values are rotated.
template <int N>
DEVICE bool norm_rotate(const float *x, const float *w, float *out, int n, float eps, const float *angles, int rotary) {
    if (N) return norm_rotate_64<N ? N : 128>(x, w, out, eps, angles);
    if (rotary == 64 && n == 256) return norm_rotate_64<256>(x, w, out, eps, angles);
    if (rotary == 64 && n == 128) return norm_rotate_64<128>(x, w, out, eps, angles);
    auto value = [&](int i) { return x[i]; };
    float r = inverse_rms(warp_dot(n, lanes_of(n, 256), value, value), n, eps);
    int lane = threadIdx.x & 31, half = rotary / 2;
    bool fine = true;
    for (int i = lane; i < half; i += 32) {
        float c = angles[i], s = angles[half + i];
        float low = mul32(mul32(x[i], r), w[i]), high = mul32(mul32(x[half + i], r), w[half + i]);
        float a = sub32(mul32(low, c), mul32(high, s)), b = add32(mul32(high, c), mul32(low, s));
        out[i] = a;
        out[half + i] = b;
        fine = fine && finite32(a) && finite32(b);
    }
    for (int i = 2 * half + lane; i < n; i += 32) {
        float a = mul32(mul32(x[i], r), w[i]);
        out[i] = a;
        fine = fine && finite32(a);
    }
    __syncwarp();
    return warp_all(fine);
}

struct AppendOf {
    const float *q_gate, *k_in, *v_in, *q_norm, *k_norm;
    float *q_out;
    void *const *k_slot;
    u16 *const *k_scales_slot;
    void *const *v_slot;
    u16 *const *v_scales_slot;
    int H, Hkv, dh;
};

// Head `head` of row t, by one warp: H of q, then Hkv of k, then Hkv of v. q_gate (T, H, 2, dh), k and v (T, Hkv, dh), q_out
// (T, H, dh). row: dh floats in shared memory. N: of norm_rotate.
template <int N>
DEVICE void append_head(const AppendOf &a, int head, int t, const i64 *pos, const float *rope, int rotary, float eps,
                        float *row, u64 *error, u64 where) {
    int H = a.H, Hkv = a.Hkv, dh = a.dh;
    if (head >= H + 2 * Hkv) return;
    i64 position = *pos + t;
    const float *angles = rope + position * rotary;
    // Each function has one place in the code for all kinds of heads: small kernels wait for their instructions too.
    bool query = head < H, value = head >= H + Hkv, fine = true;
    int h = query ? head : value ? head - H - Hkv : head - H;
    size_t at = (size_t)t * (query ? H : Hkv) + h;
    const float *x = query ? a.q_gate + at * 2 * dh : (value ? a.v_in : a.k_in) + at * dh;
    if (!value) fine = norm_rotate<N>(x, query ? a.q_norm : a.k_norm, query ? a.q_out + at * dh : row, dh, eps, angles, rotary);
    if (!query) {
        u16 *const *scales_slot = value ? a.v_scales_slot : a.k_scales_slot;
        fine = store_head(value ? *a.v_slot : *a.k_slot, scales_slot ? *scales_slot : nullptr, position * Hkv + h,
                          value ? x : row, dh);
    }
    if (!fine && (threadIdx.x & 31) == 0) report(error, where, NOT_FINITE, t);
}

struct IndexOf {
    float *iq;
    const float *ik, *q_norm, *k_norm;
    float *const *keys_slot, *const *ring_slot;
    int heads, dim, block, ring_rows, keep_raw;
};

// The mean of raw keys start .. position, of a block: those from `first` on are new, the others lie in the ring. By one warp.
DEVICE void mean_key(const IndexOf &a, i64 start, i64 first, i64 position, float *mean) {
    int dim = a.dim, lane = threadIdx.x & 31, n = (int)(position - start) + 1, old = (int)(first - start);
    int entry = (int)start % a.ring_rows;
    const float *ring = *a.ring_slot;
#pragma unroll 1
    for (int base = lane; base < dim; base += 32 * AT_ONCE) {
        float sum[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) sum[j] = 0.f;
#pragma unroll 1
        for (int from = 0; from < n; from += AT_ONCE) {
            float key[AT_ONCE][AT_ONCE];
#pragma unroll
            for (int k = 0; k < AT_ONCE; k++) {
                int cell = from + k < n ? from + k : n - 1, at = entry + cell;
                const float *x = cell >= old ? a.ik + (i64)(cell - old) * dim
                                             : ring + (size_t)(at < a.ring_rows ? at : at - a.ring_rows) * dim;
#pragma unroll
                for (int j = 0; j < AT_ONCE; j++) key[k][j] = base + 32 * j < dim ? x[base + 32 * j] : 0.f;
            }
#pragma unroll
            for (int k = 0; k < AT_ONCE; k++)
#pragma unroll
                for (int j = 0; j < AT_ONCE; j++) sum[j] = from + k < n ? add32(sum[j], key[k][j]) : sum[j];
        }
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++)
            if (base + 32 * j < dim) mean[base + 32 * j] = div32(sum[j], i32_f32(a.block));
    }
    __syncwarp();
}

// Task `task` of row t, by one warp: a head of iq, then the pooled key of a block that ends here, then the raw key, which goes
// into the ring if `keep_raw` (T is then small enough that no row's ring entry is one that another reads). mean: dim floats
// in shared memory. N: of norm_rotate; with N > 0 others read iq, which is then normed only to find out whether it is finite.
template <int N>
DEVICE void index_task(const IndexOf &a, int task, int t, const i64 *pos, const float *rope, int rotary, float eps,
                       float *mean, u64 *error, u64 where) {
    int heads = a.heads, dim = a.dim, block = a.block, ring_rows = a.ring_rows, lane = threadIdx.x & 31;
    if (task >= heads + 2) return;
    float *ring = *a.ring_slot;
    i64 first = *pos, position = first + t;
    bool fine = true;
    if (task <= heads) {
        float *x = a.iq + ((size_t)t * heads + task) * dim, *out = N ? mean : x;
        i64 place = position;
        if (task == heads) {
            if (((int)position + 1) % block) return;
            place = position + 1 - block;
            x = mean, out = *a.keys_slot + (size_t)((int)place / block) * dim;
            mean_key(a, place, first, position, mean);
        }
        const float *norm = task == heads ? a.k_norm : a.q_norm;
        fine = norm_rotate<N>(x, norm, out, dim, eps, rope + place * rotary, rotary);
    } else {
        float *entry = ring + (size_t)((int)position % ring_rows) * dim;
        for (int base = lane; base < dim; base += 32 * AT_ONCE) {
            float x[AT_ONCE];
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++) x[j] = base + 32 * j < dim ? a.ik[(size_t)t * dim + base + 32 * j] : 0.f;
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++) {
                fine = fine && finite32(x[j]);
                if (a.keep_raw && base + 32 * j < dim) entry[base + 32 * j] = x[j];
            }
        }
        fine = warp_all(fine);
    }
    if (!fine && lane == 0) report(error, where, NOT_FINITE, t);
}

#define APPEND                                                                                                          \
    const float *q_gate, const float *k_in, const float *v_in, const float *q_norm, const float *k_norm, float *q_out, \
        void *const *k_slot, u16 *const *k_scales_slot, void *const *v_slot, u16 *const *v_scales_slot, int H, int Hkv, \
        int dh
#define APPEND_OF \
    {q_gate, k_in, v_in, q_norm, k_norm, q_out, k_slot, k_scales_slot, v_slot, v_scales_slot, H, Hkv, dh}
#define INDEX                                                                                                         \
    float *iq, const float *ik, const float *iq_norm, const float *ik_norm, float *const *keys_slot,                  \
        float *const *ring_slot, int heads, int dim, int block, int ring_rows, int keep_raw
#define INDEX_OF {iq, ik, iq_norm, ik_norm, keys_slot, ring_slot, heads, dim, block, ring_rows, keep_raw}

// norm_rotate_64 of the head of this warp in T rows q (T, 4, 128) in shared memory, in two steps. First: 1 / rms of row l in
// lane l, from the sums of four rows side by side; q has room for whole fours of rows.
DEVICE float inverse_of_rows(const float *q, int T, float eps) {
    int lane = threadIdx.x & 31;
    const float *x = q + (threadIdx.x >> 5) * 128 + lane;
    float mine = 0.f;
#pragma unroll 1
    for (int from = 0; from < T; from += 4)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float v[8];
#pragma unroll
            for (int j = 0; j < 8; j++) {
                float value = j < 4 ? x[(from + i) * 512 + 32 * (j & 3)] : 0.f;
                v[j] = j < 4 ? fma32(value, value, 0.f) : 0.f;
            }
            float squares = warp_tree256(v);
            mine = lane == from + i ? squares : mine;
        }
    return inverse_rms(mine, 128, eps);
}
// Then all else, in place. angles (T, 64).
DEVICE void rotate_rows(float *q, float inverse, const float *norm, const float *angles, int T) {
    int lane = threadIdx.x & 31;
    float *x = q + (threadIdx.x >> 5) * 128 + lane;
#pragma unroll 1
    for (int row = 0; row < T; row++) {
        float r = __shfl_sync(ALL_LANES, inverse, row), value[4];
        float c = angles[64 * row + lane], s = angles[64 * row + 32 + lane];
#pragma unroll
        for (int j = 0; j < 4; j++) value[j] = mul32(mul32(x[row * 512 + 32 * j], r), norm[32 * j + lane]);
        x[row * 512] = sub32(mul32(value[0], c), mul32(value[1], s));
        x[row * 512 + 32] = add32(mul32(value[1], c), mul32(value[0], s));
        x[row * 512 + 64] = value[2];
        x[row * 512 + 96] = value[3];
    }
}

struct ScoresOf {
    float *scores;
    int T, budget, most;
    u64 where;
};

// Scores of the 64 blocks of cells from number 64 `number` on, by a thread block; iq as the product left it. Shared: whole
// fours of rows of 4 x 128 floats, 128, then 64 and 128 for every row.
DEVICE void score_blocks(const IndexOf &a, const ScoresOf &to, int number, const i64 *pos, const float *rope, float eps,
                         float *shared, u64 *error) {
    int t = threadIdx.x, lane = t & 31, warp = t >> 5, c = lane & 7, T = to.T, block = a.block;
    int first = 4 * WIDE_KEYS * number, b = first + WIDE_KEYS * warp + 4 * (lane >> 3);
    float *norm = shared + (T + 3 & ~3) * 512, *angles = norm + 128, *new_keys = angles + 64 * T;
    for (int i = t; i < 128 * T; i += WIDE_THREADS) copy<16>((float4 *)shared + i, (const float4 *)a.iq + i);
    if (t < 32) copy<16>((float4 *)norm + t, (const float4 *)a.q_norm + t);
    copy_commit();
    const float *keys = *a.keys_slot;
    int start = (int)*pos, n_last = (start + T) / block, before = start / block;  // blocks from `before` on end here
    if (n_last <= to.budget || first >= n_last) {
        copy_wait<0>();
        return;
    }
    if (t < 16 * T) copy<16>((float4 *)angles + t, (const float4 *)(rope + (size_t)start * 64) + t);
    copy_commit();
    bool some_new = first + 4 * WIDE_KEYS > before;
    if (some_new)
#pragma unroll 1
        for (int i = warp; before + i < n_last; i += WARPS) {
            i64 cell = (i64)(before + i) * block;
            float *mean = new_keys + 128 * i;
            mean_key(a, cell, start, cell + block - 1, mean);
            norm_rotate_64<128>(mean, a.k_norm, mean, eps, rope + cell * 64);
        }
    float4 key[4][4];
    load_keys(keys, b, c, before > 1 ? before : 1, key);
    copy_wait<1>();
    __syncthreads();
    float inverse = inverse_of_rows(shared, T, eps);
    copy_wait<0>();
    __syncthreads();
    rotate_rows(shared, inverse, norm, angles, T);
    __syncthreads();
    if (some_new)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            int own = own_key(b, c, j);
            if (own < before || own >= n_last) continue;
#pragma unroll
            for (int k = 0; k < 4; k++) key[j][k] = ((const float4 *)new_keys)[(own - before) * 32 + 8 * k + c];
        }
    score_keys((const float4 *)shared, key, b, c, start, to.scores, T, block, to.budget, to.most, error, to.where);
}

// All side by side: for each of T rows the indexer's blocks first, whose pooled keys take longest, then those of q, k and v;
// either may be missing (heads < 0, H + 2 Hkv = 0). With SCORES blocks for scores follow, for 4 heads of 128 values, of which
// 64 are rotated, and T <= 8; iq is then left as it is. Grid: T times the sum of both, and `most` / 64.
template <bool SCORES>
STARTS_EARLY __global__ void __launch_bounds__(WARPS * 32, SCORES ? 4 : 1)
    qsa_store(APPEND, INDEX, const i64 *pos, const float *rope, int rotary, int index_rotary, float eps, float index_eps,
              int T, float *scores, int budget, int most, u64 *error, u64 where, u64 index_where, u64 scores_where) {
    DYNAMIC_SHARED(bytes);
    let_next_start();
    int warp = threadIdx.x >> 5, first = (heads + 2 + WARPS - 1) / WARPS, each = first + (H + 2 * Hkv + WARPS - 1) / WARPS;
    int row = blockIdx.x / each, task = blockIdx.x % each * WARPS + warp;
    if (SCORES && row >= T) {
        int number = blockIdx.x - T * each, key = WIDE_KEYS * (WARPS * number + warp);
        int soon = (peek((const int *)pos) + T) / block;
        const float *keys = (const float *)__ldg((const u64 *)keys_slot);
        if (soon > budget && key < soon && key + WIDE_KEYS <= most)
            bring_early(keys + (size_t)key * 128, WIDE_KEYS * 512, threadIdx.x & 31, 32);
        wait_for_inputs();
        score_blocks(INDEX_OF, {scores, T, budget, most, scores_where}, number, pos, rope, index_eps, (float *)bytes, error);
        return;
    }
    bool indexes = task < WARPS * first;
    if (!indexes) task -= WARPS * first;
    const float *norm = indexes ? task < heads ? iq_norm : ik_norm : task < H ? q_norm : k_norm;
    bring_early(norm, 4 * (indexes ? dim : dh), threadIdx.x & 31, 32);
    wait_for_inputs();
    float *own = (float *)bytes + warp * max(dim, dh);
    if (indexes) index_task<SCORES ? 128 : 0>(INDEX_OF, task, row, pos, rope, index_rotary, index_eps, own, error, index_where);
    else append_head<SCORES ? 256 : 0>(APPEND_OF, task, row, pos, rope, rotary, eps, own, error, where);
}

// The last rows of a chunk into the ring, after everything that reads it. One block a row, from row `skip` on.
KERNEL(128) qsa_ring(const float *ik, float *const *ring_slot, const i64 *pos, int skip, int dim, int ring_rows) {
    int t = skip + blockIdx.x;
    float *entry = *ring_slot + (size_t)((*pos + t) % ring_rows) * dim;
    for (int i = threadIdx.x; i < dim; i += 128) entry[i] = ik[(size_t)t * dim + i];
}
