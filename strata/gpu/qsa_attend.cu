// Sparse attention, third part: softmax over the listed cells of each row, in tiles of 64 entries; tiles are computed by
// blocks of their own and merged in order, so bits do not depend on the grid.
#include "kv_cells.cuh"
#include "quantise.cuh"

#define TILE 64
#define THREADS 256

struct List {  // the cells of one row, ascending
    const int *blocks;
    int n_blocks, block, entries;
    i64 tail;
    DEVICE i64 cell(int e) const {
        if (block == 0) return tail + e;
        if (e < n_blocks * block) return (i64)blocks[e / block] * block + e % block;
        return tail + e - n_blocks * block;
    }
};

// block > 0: chosen blocks, then the incomplete tail. block 0: the last `budget` cells (0: all), from *first on.
DEVICE List list_of(i64 n, const int *blocks, int block, int budget, const i64 *first) {
    List l;
    l.blocks = blocks;
    l.block = block;
    l.n_blocks = 0;
    if (block == 0) {
        l.tail = budget > 0 && n > budget ? n - budget : 0;
        if (first) {
            i64 least = *first < n - 1 ? *first : n - 1;
            l.tail = least > l.tail ? least : l.tail;
        }
        l.entries = (int)(n - l.tail);
    } else {
        l.n_blocks = n / block < budget ? (int)(n / block) : budget;
        l.tail = n / block * block;
        l.entries = l.n_blocks * block + (int)(n - l.tail);
    }
    return l;
}

// Entries that a warp scores at once beside G heads, and the power of two that holds their sums.
template <int G>
struct Scored {
    static const int ENTRIES = G > 6 ? 2 : 4, PAIRS = ENTRIES * G;
    static const int N = PAIRS <= 4 ? 4 : PAIRS <= 8 ? 8 : PAIRS <= 16 ? 16 : 32;
};

// Grid: (tiles, KV head * splits, row). A block serves up to G query heads of one KV head. parts: per (row, query head,
// tile) dh values of o, then m, then l. Shared: G queries, G x 64 scores. Threads beyond dh idle in the last phase.
template <int G>
KERNEL(THREADS) qsa_tiles(const float *q, const i64 *pos, const void *const *k_slot, const u16 *const *k_scales_slot,
                          const void *const *v_slot, const u16 *const *v_scales_slot, const int *blocks, const i64 *first,
                          float *parts, int H, int Hkv, int dh, int block, int budget, int splits, int most_tiles,
                          float scale, u64 *error, u64 where) {
    DYNAMIC_SHARED(bytes);
    __shared__ i64 cells[TILE];
    const int ENTRIES = Scored<G>::ENTRIES, PAIRS = Scored<G>::PAIRS, N = Scored<G>::N;
    float *query = (float *)bytes, *p = query + G * dh;
    int row = blockIdx.z, kv = blockIdx.y / splits, split = blockIdx.y % splits, group = H / Hkv;
    int low = split * group / splits, heads = (split + 1) * group / splits - low, head0 = kv * group + low;
    List list = list_of(*pos + row + 1, blocks + (size_t)row * budget, block, budget, first);
    int t = threadIdx.x, lane = t & 31, warp = t >> 5, base = blockIdx.x * TILE;
    if (base >= list.entries) return;
    int width = list.entries - base < TILE ? list.entries - base : TILE;
    if (t < TILE) cells[t] = (t < width ? list.cell(base + t) : list.cell(base)) * Hkv + kv;
    for (int i = t; i < G * dh; i += THREADS) query[i] = i < heads * dh ? q[((size_t)row * H + head0) * dh + i] : 0.f;
    __syncthreads();
    const void *k = *k_slot, *v = *v_slot;
    const u16 *k_scales = k_scales_slot ? *k_scales_slot : nullptr, *v_scales = v_scales_slot ? *v_scales_slot : nullptr;
    int lanes = lanes_of(dh, 32);
    bool fine = true;
    for (int e = ENTRIES * warp; e < width; e += ENTRIES * (THREADS / 32)) {
        float sums[N];
#pragma unroll
        for (int i = 0; i < N; i++) sums[i] = 0.f;
        if (lane < lanes)
#pragma unroll 4
            for (int i = lane; i < dh; i += lanes) {
                float key[ENTRIES];
#pragma unroll
                for (int j = 0; j < ENTRIES; j++) key[j] = load_cell(k, k_scales, cells[e + j], dh, i);
#pragma unroll
                for (int h = 0; h < G; h++)
#pragma unroll
                    for (int j = 0; j < ENTRIES; j++)
                        sums[ENTRIES * h + j] = fma32(query[h * dh + i], key[j], sums[ENTRIES * h + j]);
            }
        float mine = packed_tree<N>(sums);
#pragma unroll
        for (int from = 0; from < PAIRS; from += 32) {
            int pair = from + lane, h = pair / ENTRIES, j = pair % ENTRIES;
            float s = mul32(__shfl_sync(ALL_LANES, mine, lane_of_pair<N>(pair & (N - 1))), scale);
            if (pair >= PAIRS || h >= heads || e + j >= width) continue;
            fine = fine && finite32(s);
            p[h * TILE + e + j] = s;
        }
    }
    if (!fine) report(error, where, NOT_FINITE, row);
    __syncthreads();
    size_t stride = dh + 2;
    for (int h = warp; h < heads; h += THREADS / 32) {
        float a = lane < width ? p[h * TILE + lane] : 0.f, b = lane + 32 < width ? p[h * TILE + lane + 32] : 0.f;
        float top = p[h * TILE];
        if (lane < width) top = larger(a, top);
        if (lane + 32 < width) top = larger(b, top);
#pragma unroll
        for (int half = 16; half; half >>= 1) top = larger(__shfl_xor_sync(ALL_LANES, top, half), top);
        a = lane < width ? exp32(sub32(a, top)) : 0.f;
        b = lane + 32 < width ? exp32(sub32(b, top)) : 0.f;
        p[h * TILE + lane] = a;
        p[h * TILE + lane + 32] = b;
        float l = warp_tree(add32(a, b));
        if (lane == 0) {
            float *part = parts + (((size_t)row * H + head0 + h) * most_tiles + blockIdx.x) * stride + dh;
            part[0] = top;
            part[1] = l;
        }
    }
    __syncthreads();
    for (int i = t; i < dh; i += THREADS) {
        float o[G];
#pragma unroll
        for (int h = 0; h < G; h++) o[h] = 0.f;
#pragma unroll 8
        for (int e = 0; e < width; e++) {
            float value = load_cell(v, v_scales, cells[e], dh, i);
#pragma unroll
            for (int h = 0; h < G; h++) o[h] = fma32(p[h * TILE + e], value, o[h]);
        }
#pragma unroll
        for (int h = 0; h < G; h++)
            if (h < heads) parts[(((size_t)row * H + head0 + h) * most_tiles + blockIdx.x) * stride + i] = o[h];
    }
}

// Grid: (query head, row). Merges a row's tiles in order and applies the gate. q_gate (T, H, 2, dh), y (T, H, dh), which
// is quantised too where codes are given: groups of 32 if dh is in whole ones, of 256 likewise.
//
// How a tile changes what was merged before depends on maxima alone: a warp finds those factors for 32 tiles at once,
// and every thread then adds its value up in order.
KERNEL(THREADS) qsa_merge(const float *parts, const float *q_gate, float *y, const i64 *pos, const i64 *first, int H,
                          int dh, int block, int budget, int most_tiles, i8 *codes32, float *scales32, int *sums32,
                          i8 *codes256, float *scales256, int *sums256, u64 *error, u64 where) {
    __shared__ float old[32], fresh[32], sum[32];
    int head = blockIdx.x, row = blockIdx.y, t = threadIdx.x, lane = t & 31;
    List list = list_of(*pos + row + 1, nullptr, block, budget, first);
    int tiles = (list.entries + TILE - 1) / TILE;
    size_t at = (size_t)row * H + head, stride = dh + 2;
    const float *part = parts + at * most_tiles * stride;
    bool fine = true;
    for (int from = 0; from < dh; from += THREADS) {
        int i = from + t;
        float o = i < dh ? part[i] : 0.f, l = part[dh + 1], top = part[dh];
        for (int k0 = 1; k0 < tiles; k0 += 32) {
            int n = tiles - k0 < 32 ? tiles - k0 : 32;
            if (t < 32) {
                float mine = lane < n ? part[(k0 + lane) * stride + dh] : top, m = mine;
#pragma unroll
                for (int d = 1; d < 32; d <<= 1) {
                    float other = __shfl_up_sync(ALL_LANES, m, d);
                    if (lane >= d) m = larger(other, m);
                }
                m = larger(top, m);
                float before = __shfl_up_sync(ALL_LANES, m, 1);
                old[lane] = exp32(sub32(lane ? before : top, m));
                fresh[lane] = exp32(sub32(mine, m));
                sum[lane] = lane < n ? part[(k0 + lane) * stride + dh + 1] : 0.f;
                top = __shfl_sync(ALL_LANES, m, 31);
            }
            __syncthreads();
#pragma unroll 8
            for (int k = 0; k < n; k++) {
                float value = i < dh ? part[(k0 + k) * stride + i] : 0.f;
                l = fma32(sum[k], fresh[k], mul32(l, old[k]));
                o = fma32(value, fresh[k], mul32(o, old[k]));
            }
            __syncthreads();
        }
        float out = 0.f;
        if (i < dh) {
            float gate = q_gate[(at * 2 + 1) * dh + i];
            out = mul32(div32(o, l), sigmoid32(gate));
            y[at * dh + i] = out;
            // An infinite gate would end as a finite sigmoid.
            fine = fine && finite32(out) && finite32(gate);
        }
        if (codes32 && i < dh) quantise_value<32>(out, at * dh + i, codes32, scales32, sums32);
        if (codes256) quantise_value<256>(out, at * dh + i, codes256, scales256, sums256);
    }
    if (!fine) report(error, where, NOT_FINITE, row);
}
