// Sparse attention, third part: softmax over the listed cells of each row, in tiles of 64 entries; tiles are computed by
// blocks of their own and merged in order, so bits do not depend on the grid.
#include "early.cuh"
#include "kv_cells.cuh"
#include "qsa_list.cuh"
#include "qsa_softmax.cuh"
#include "quantise.cuh"

#define THREADS 256

// Entries that a warp scores at once beside G heads, and the power of two that holds their sums.
template <int G>
struct Scored {
    static const int ENTRIES = G > 6 ? 2 : 4, PAIRS = ENTRIES * G;
    static const int N = PAIRS <= 4 ? 4 : PAIRS <= 8 ? 8 : PAIRS <= 16 ? 16 : 32;
};

// Grid: (KV head * splits, row, tile). A block serves up to G query heads of one KV head. parts: per (row, query head,
// tile) dh values of o; behind them m and l of each. Shared: G queries, G x 64 scores. Threads beyond dh idle in the last phase.
template <int G>
STARTS_EARLY KERNEL(THREADS) qsa_tiles(const float *q, const i64 *pos, const void *const *k_slot, const u16 *const *k_scales_slot,
                          const void *const *v_slot, const u16 *const *v_scales_slot, const int *blocks, const i64 *first,
                          float *parts, int H, int Hkv, int dh, int block, int budget, int splits, int most_tiles,
                          float scale, u64 *error, u64 where) {
    DYNAMIC_SHARED(bytes);
    __shared__ i64 cells[TILE];
    const int ENTRIES = Scored<G>::ENTRIES, PAIRS = Scored<G>::PAIRS, N = Scored<G>::N;
    float *query = (float *)bytes, *p = query + G * dh;
    int row = blockIdx.y, kv = blockIdx.x / splits, split = blockIdx.x % splits, group = H / Hkv, tile = blockIdx.z;
    int low = split * group / splits, heads = (split + 1) * group / splits - low, head0 = kv * group + low;
    let_next_start();
    wait_for_inputs();
    List list = list_of(*pos + row + 1, blocks + (size_t)row * budget, block, budget, first);
    int t = threadIdx.x, lane = t & 31, warp = t >> 5, base = tile * TILE;
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
    float2 *stats = (float2 *)(parts + (size_t)gridDim.y * H * most_tiles * dh);
    softmax_tile<THREADS>(p, heads, width, lane, warp, stats, (size_t)row * H + head0, most_tiles, tile);
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
            if (h < heads) parts[(((size_t)row * H + head0 + h) * most_tiles + tile) * dh + i] = o[h];
    }
}

// Grid: (query head, row). Merges a row's tiles in order and applies the gate. q_gate (T, H, 2, dh), y (T, H, dh), which
// is quantised too where codes are given: groups of 32 if dh is in whole ones, of 256 likewise.
//
// How a tile changes what was merged before depends on maxima alone: a warp finds those factors for AT_ONCE tiles, whose
// values are on their way meanwhile, and every thread then adds its value up in order. All is asked for before it is
// known how many tiles there are: the scratch holds most_tiles of them. A position that was looked at early says how many are
// likely; others would come from memory, as nobody has touched them for long. If there are more, they are asked for again.
#define AT_ONCE 32

STARTS_EARLY __global__ void __launch_bounds__(THREADS, 2)
qsa_merge(const float *parts, const float *q_gate, float *y, const i64 *pos, const i64 *first,
                                       int H, int dh, int block, int budget, int most_tiles, i8 *codes32, float *scales32,
                                       int *sums32, i8 *codes256, float *scales256, int *sums256, u64 *error, u64 where) {
    __shared__ float4 factors[AT_ONCE];  // of what was merged before, of the tile; the tile's sum
    int head = blockIdx.x, row = blockIdx.y, t = threadIdx.x, lane = t & 31;
    size_t at = (size_t)row * H + head;
    const float *part = parts + at * most_tiles * dh;
    const float2 *stats = (const float2 *)(parts + (size_t)gridDim.y * H * most_tiles * dh) + at * most_tiles;
    bool fine = true;
    let_next_start();
    int likely = most_tiles;
    if (CAN_PEEK && block) {
        int n = peek((const int *)pos) + row + 1;
        likely = max(1, min(most_tiles, (list_of(n > 0 ? n : 1, nullptr, block, budget, nullptr).entries + TILE - 1) / TILE));
    }
    wait_for_inputs();
    i64 seen = *pos + row + 1;
    for (int from = 0; from < dh; from += THREADS) {
        int i = from + t, tiles = 0;
        float2 merged = stats[0];
        float o = 0.f, gate = 0.f;
        for (int k0 = 1; k0 == 1 || k0 < tiles; k0 += AT_ONCE) {
            float2 stat;
            float value[AT_ONCE];
            if (k0 == 1 && i < dh) o = part[i], gate = q_gate[(at * 2 + 1) * dh + i];
#pragma unroll 1
            for (bool enough = false; !enough;) {
                stat = make_float2(0.f, 0.f);
                if (t < 32 && k0 + lane < likely) stat = stats[k0 + lane];
                const float *next = part + (size_t)k0 * dh + i;
                int there = i < dh ? likely - k0 : 0;
#pragma unroll
                for (int k = 0; k < AT_ONCE; k++, next += dh) value[k] = k < there ? *next : 0.f;
                if (k0 == 1) tiles = (list_of(seen, nullptr, block, budget, first).entries + TILE - 1) / TILE;
                enough = tiles <= likely;
                if (!enough) likely = most_tiles;
            }
            int n = tiles - k0 < AT_ONCE ? tiles - k0 : AT_ONCE;
            if (t < 32) {
                float top = merged.x, mine = lane < n ? stat.x : top, m = mine;
#pragma unroll
                for (int d = 1; d < 32; d <<= 1) {
                    float other = __shfl_up_sync(ALL_LANES, m, d);
                    if (lane >= d) m = larger(other, m);
                }
                m = larger(top, m);
                float before = __shfl_up_sync(ALL_LANES, m, 1);
                factors[lane] = float4{exp32(sub32(lane ? before : top, m)), exp32(sub32(mine, m)), stat.y, 0.f};
                merged.x = __shfl_sync(ALL_LANES, m, 31);
            }
            __syncthreads();
            if (n == AT_ONCE) {
#pragma unroll
                for (int k = 0; k < AT_ONCE; k++) {
                    float4 f = factors[k];
                    merged.y = fma32(f.z, f.y, mul32(merged.y, f.x));
                    o = fma32(value[k], f.y, mul32(o, f.x));
                }
            } else {
#pragma unroll
                for (int k = 0; k < AT_ONCE; k++) {
                    float4 f = factors[k];
                    float l_then = fma32(f.z, f.y, mul32(merged.y, f.x)), o_then = fma32(value[k], f.y, mul32(o, f.x));
                    merged.y = k < n ? l_then : merged.y;
                    o = k < n ? o_then : o;
                }
            }
            __syncthreads();
        }
        float out = 0.f;
        if (i < dh) {
            out = mul32(div32(o, merged.y), sigmoid32(gate));
            y[at * dh + i] = out;
            // An infinite gate would end as a finite sigmoid.
            fine = fine && finite32(out) && finite32(gate);
        }
        if (codes32 && i < dh) quantise_value<32>(out, at * dh + i, codes32, scales32, sums32);
        if (codes256) quantise_value<256>(out, at * dh + i, codes256, scales256, sums256);
    }
    if (!fine) report(error, where, NOT_FINITE, row);
}
