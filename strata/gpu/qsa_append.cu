// Sparse attention, first part: norms and rotation of q and k, append of K and V; indexer queries, pooled keys, raw keys.
// One warp a head. Shared memory: a row of `dh` (or `dim`) floats for every warp.
#include "early.cuh"
#include "kv_cells.cuh"

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
DEVICE bool norm_rotate(const float *x, const float *w, float *out, int n, float eps, const float *angles, int rotary) {
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
// (T, H, dh). row: dh floats in shared memory.
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
    if (!value) fine = norm_rotate(x, query ? a.q_norm : a.k_norm, query ? a.q_out + at * dh : row, dh, eps, angles, rotary);
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

// The mean of raw keys start .. position: those from `first` on are new, the others lie in the ring. By one warp.
DEVICE void mean_key(const IndexOf &a, i64 start, i64 first, i64 position, float *mean) {
    int dim = a.dim, lane = threadIdx.x & 31;
    const float *ring = *a.ring_slot;
    for (int base = lane; base < dim; base += 32 * AT_ONCE) {
        float sum[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) sum[j] = 0.f;
        for (i64 from = start; from <= position; from += AT_ONCE) {
            float key[AT_ONCE][AT_ONCE];
#pragma unroll
            for (int k = 0; k < AT_ONCE; k++) {
                i64 cell = from + k <= position ? from + k : position;
                const float *x = ring + (size_t)((int)cell % a.ring_rows) * dim;
                if (cell >= first) x = a.ik + (size_t)(cell - first) * dim;
#pragma unroll
                for (int j = 0; j < AT_ONCE; j++) key[k][j] = base + 32 * j < dim ? x[base + 32 * j] : 0.f;
            }
#pragma unroll
            for (int k = 0; k < AT_ONCE; k++)
#pragma unroll
                for (int j = 0; j < AT_ONCE; j++) sum[j] = from + k <= position ? add32(sum[j], key[k][j]) : sum[j];
        }
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++)
            if (base + 32 * j < dim) mean[base + 32 * j] = div32(sum[j], i32_f32(a.block));
    }
    __syncwarp();
}

// Task `task` of row t, by one warp: a head of iq (in place), then the pooled key of a block that ends here, then the raw key,
// which goes into the ring if `keep_raw` (T is then small enough that no row's ring entry is one that another reads). mean:
// dim floats in shared memory.
DEVICE void index_task(const IndexOf &a, int task, int t, const i64 *pos, const float *rope, int rotary, float eps,
                       float *mean, u64 *error, u64 where) {
    int heads = a.heads, dim = a.dim, block = a.block, ring_rows = a.ring_rows, lane = threadIdx.x & 31;
    if (task >= heads + 2) return;
    float *ring = *a.ring_slot;
    i64 first = *pos, position = first + t;
    bool fine = true;
    if (task <= heads) {
        float *x = a.iq + ((size_t)t * heads + task) * dim, *out = x;
        i64 place = position;
        if (task == heads) {
            if (((int)position + 1) % block) return;
            place = position + 1 - block;
            x = mean, out = *a.keys_slot + (size_t)((int)place / block) * dim;
            mean_key(a, place, first, position, mean);
        }
        const float *norm = task == heads ? a.k_norm : a.q_norm;
        fine = norm_rotate(x, norm, out, dim, eps, rope + place * rotary, rotary);
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

// Grid: (heads of q, k and v / WARPS, T).
STARTS_EARLY KERNEL(128) qsa_append(APPEND, const i64 *pos, const float *rope, int rotary, float eps, u64 *error, u64 where) {
    DYNAMIC_SHARED(bytes);
    let_next_start();
    int warp = threadIdx.x >> 5, head = blockIdx.x * WARPS + warp;
    bring_early(head < H ? q_norm : k_norm, 4 * dh, threadIdx.x & 31, 32);
    wait_for_inputs();
    append_head(APPEND_OF, head, blockIdx.y, pos, rope, rotary, eps, (float *)bytes + warp * dh, error, where);
}

// Grid: (heads of iq and 2 / WARPS, T).
STARTS_EARLY KERNEL(128) qsa_index(INDEX, const i64 *pos, const float *rope, int rotary, float eps, u64 *error, u64 where) {
    DYNAMIC_SHARED(bytes);
    let_next_start();
    int warp = threadIdx.x >> 5, task = blockIdx.x * WARPS + warp;
    bring_early(task < heads ? iq_norm : ik_norm, 4 * dim, threadIdx.x & 31, 32);
    wait_for_inputs();
    index_task(INDEX_OF, task, blockIdx.y, pos, rope, rotary, eps, (float *)bytes + warp * dim, error, where);
}

// Both side by side: the indexer's blocks first, whose pooled keys take longest. Grid: (the sum of both, T).
STARTS_EARLY KERNEL(128) qsa_store(APPEND, INDEX, const i64 *pos, const float *rope, int rotary, int index_rotary, float eps,
                      float index_eps, u64 *error, u64 where, u64 index_where) {
    DYNAMIC_SHARED(bytes);
    let_next_start();
    int warp = threadIdx.x >> 5, task = blockIdx.x * WARPS + warp, first = (heads + 2 + WARPS - 1) / WARPS * WARPS;
    bool indexes = task < first;
    const float *norm = indexes ? task < heads ? iq_norm : ik_norm : task - first < H ? q_norm : k_norm;
    bring_early(norm, 4 * (indexes ? dim : dh), threadIdx.x & 31, 32);
    wait_for_inputs();
    float *own = (float *)bytes + warp * max(dim, dh);
    if (indexes) index_task(INDEX_OF, task, blockIdx.y, pos, rope, index_rotary, index_eps, own, error, index_where);
    else append_head(APPEND_OF, task - first, blockIdx.y, pos, rope, rotary, eps, own, error, where);
}

// The last rows of a chunk into the ring, after everything that reads it. One block a row, from row `skip` on.
KERNEL(128) qsa_ring(const float *ik, float *const *ring_slot, const i64 *pos, int skip, int dim, int ring_rows) {
    int t = skip + blockIdx.x;
    float *entry = *ring_slot + (size_t)((*pos + t) % ring_rows) * dim;
    for (int i = threadIdx.x; i < dim; i += 128) entry[i] = ik[(size_t)t * dim + i];
}
