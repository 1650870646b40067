// Sparse attention, first part: norms and rotation of q and k, append of K and V; indexer queries, pooled keys, raw keys.
// One warp a head. Shared memory: a row of `dh` (or `dim`) floats for every warp.
#include "kv_cells.cuh"

#define WARPS 4

// out = rotate(rms(x) w), by one warp; out may be x, or shared memory. Returns whether all of it is finite, in every lane.
DEVICE bool norm_rotate(const float *x, const float *w, float *out, int n, float eps, const float *angles, int rotary) {
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

// Heads of a row: H of q, then Hkv of k, then Hkv of v. q_gate (T, H, 2, dh), k and v (T, Hkv, dh), q_out (T, H, dh).
KERNEL(128) qsa_append(const float *q_gate, const float *k_in, const float *v_in, const float *q_norm, const float *k_norm,
                       float *q_out, const i64 *pos, const float *rope, void *const *k_slot, u16 *const *k_scales_slot,
                       void *const *v_slot, u16 *const *v_scales_slot, int H, int Hkv, int dh, int rotary, float eps,
                       u64 *error, u64 where) {
    DYNAMIC_SHARED(bytes);
    int warp = threadIdx.x >> 5, head = blockIdx.x * WARPS + warp, t = blockIdx.y;
    if (head >= H + 2 * Hkv) return;
    float *row = (float *)bytes + warp * dh;
    i64 position = *pos + t;
    const float *angles = rope + position * rotary;
    bool fine;
    if (head < H) {
        fine = norm_rotate(q_gate + ((size_t)t * H + head) * 2 * dh, q_norm, q_out + ((size_t)t * H + head) * dh, dh, eps,
                           angles, rotary);
    } else if (head < H + Hkv) {
        int h = head - H;
        norm_rotate(k_in + ((size_t)t * Hkv + h) * dh, k_norm, row, dh, eps, angles, rotary);
        fine = store_head(*k_slot, k_scales_slot ? *k_scales_slot : nullptr, position * Hkv + h, row, dh);
    } else {
        int h = head - H - Hkv;
        fine = store_head(*v_slot, v_scales_slot ? *v_scales_slot : nullptr, position * Hkv + h,
                          v_in + ((size_t)t * Hkv + h) * dh, dh);
    }
    if (!fine && (threadIdx.x & 31) == 0) report(error, where, NOT_FINITE, t);
}

// Warps of a row: one a head of iq (in place), one for the pooled key of a block that ends here, one for the raw key,
// which goes into the ring if `keep_raw` (T is then small enough that no row's ring entry is one that another reads).
KERNEL(128) qsa_index(float *iq, const float *ik, const float *q_norm, const float *k_norm, float *const *keys_slot,
                      float *const *ring_slot, const i64 *pos, const float *rope, int heads, int dim, int block,
                      int ring_rows, int rotary, float eps, int keep_raw, u64 *error, u64 where) {
    DYNAMIC_SHARED(bytes);
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, task = blockIdx.x * WARPS + warp, t = blockIdx.y;
    if (task >= heads + 2) return;
    float *mean = (float *)bytes + warp * dim, *ring = *ring_slot;
    i64 first = *pos, position = first + t;
    bool fine = true;
    if (task < heads) {
        float *q = iq + ((size_t)t * heads + task) * dim;
        fine = norm_rotate(q, q_norm, q, dim, eps, rope + position * rotary, rotary);
    } else if (task == heads) {
        if ((position + 1) % block) return;
        i64 start = position + 1 - block;
        for (int i = lane; i < dim; i += 32) {
            float sum = 0.f;
            for (i64 cell = start; cell <= position; cell++)
                sum = add32(sum, cell >= first ? ik[(size_t)(cell - first) * dim + i] : ring[(size_t)(cell % ring_rows) * dim + i]);
            mean[i] = div32(sum, i32_f32(block));
        }
        __syncwarp();
        fine = norm_rotate(mean, k_norm, *keys_slot + (size_t)(start / block) * dim, dim, eps, rope + start * rotary, rotary);
    } else {
        for (int i = lane; i < dim; i += 32) {
            float x = ik[(size_t)t * dim + i];
            fine = fine && finite32(x);
            if (keep_raw) ring[(size_t)(position % ring_rows) * dim + i] = x;
        }
        fine = warp_all(fine);
    }
    if (!fine && lane == 0) report(error, where, NOT_FINITE, t);
}

// The last rows of a chunk into the ring, after everything that reads it. One block a row, from row `skip` on.
KERNEL(128) qsa_ring(const float *ik, float *const *ring_slot, const i64 *pos, int skip, int dim, int ring_rows) {
    int t = skip + blockIdx.x;
    float *entry = *ring_slot + (size_t)((*pos + t) % ring_rows) * dim;
    for (int i = threadIdx.x; i < dim; i += 128) entry[i] = ik[(size_t)t * dim + i];
}
