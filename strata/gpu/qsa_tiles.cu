// Sparse attention, third part, for heads of 256 values: tiles of 64 cells with the bits of qsa_attend.cu.
//
// All of a tile's K and V are on their way at once: K in registers, V in shared memory. Eight threads share two cells, and
// take three or four heads at a time; then 64 threads have the 256 outputs of some heads, four each, or 128 those of few heads,
// two each.
#include "early.cuh"
#include "head_sums.cuh"
#include "kv_cells.cuh"
#include "qsa_list.cuh"
#include "qsa_softmax.cuh"
#include "qsa_tensor.cuh"

#define THREADS 256
#define DH 256
#define STEPS (DH / 32)  // groups of 32 values: a thread has four of each

// Four int8 codes times a float16 step (in the lower half): four float16. Behind a byte of 0x64, code + 128 is the float16
// 1152 + code; a product rounds once.
DEVICE uint2 decoded(u32 codes, u32 step) {
    codes ^= 0x80808080u;
    step = (step & 0xffff) * 0x10001u;
    return make_uint2(mul_halves(sub_halves(__byte_perm(codes, 0x64646464u, 0x4140), 0x64806480u), step),
                      mul_halves(sub_halves(__byte_perm(codes, 0x64646464u, 0x4342), 0x64806480u), step));
}
DEVICE void widen(uint4 codes, u16 step, uint4 *to) {
    uint2 a = decoded(codes.x, step), b = decoded(codes.y, step), c = decoded(codes.z, step), d = decoded(codes.w, step);
    to[0] = make_uint4(a.x, a.y, b.x, b.y);
    to[1] = make_uint4(c.x, c.y, d.x, d.y);
}
DEVICE void four_of(uint2 halves, float (&x)[4]) {
    x[0] = half_f32((u16)halves.x), x[1] = half_f32((u16)(halves.x >> 16));
    x[2] = half_f32((u16)halves.y), x[3] = half_f32((u16)(halves.y >> 16));
}

// Four neighbouring values of a cell, as they are stored.
template <bool INT8>
struct Four;
template <>
struct Four<false> {
    uint2 words;
    DEVICE void values(u32, float (&x)[4]) const { four_of(words, x); }
};
template <>
struct Four<true> {
    u32 word;
    DEVICE void values(u32 step, float (&x)[4]) const { four_of(decoded(word, step), x); }
};

// Grid: (KV head * splits, row, tile): tiles behind the end of a list are the last blocks, so that those with work spread over
// all processors. With tiles in front they met on half of them, as the lists of neighbouring blocks end at the same tile.
// A block serves up to G query heads of one KV head. parts: per (row, query head,
// tile) 256 values of o; behind them m and l of each. Shared: V cells as float16 and
// their scales, G queries, G x 64 scores.
template <int G, bool INT8>
STARTS_EARLY __global__ void __launch_bounds__(THREADS, 2)
    qsa_tiles_256(const float *q, const i64 *pos, const void *const *k_slot, const u16 *const *k_scales_slot,
                  const void *const *v_slot, const u16 *const *v_scales_slot, const int *blocks, const i64 *first,
                  float *parts, int H, int Hkv, int block, int budget, int splits, int most_tiles, float scale, u64 *error,
                  u64 where) {
    DYNAMIC_SHARED(bytes);
    __shared__ i64 cells[TILE];
    const int CELL_BYTES = INT8 ? DH : 2 * DH, UNITS = CELL_BYTES / 16, B = G < 4 ? G : G % 4 ? 3 : 4;
    u8 *values = bytes;
    u16 *steps = (u16 *)(bytes + TILE * 2 * DH);
    float *query = (float *)(bytes + TILE * 2 * DH + (INT8 ? TILE * 8 : 0)), *p = query + G * DH;
    const u8 *k = (const u8 *)__ldg((const u64 *)k_slot), *v = (const u8 *)__ldg((const u64 *)v_slot);
    const u16 *k_scales = nullptr, *v_scales = nullptr;
    if (INT8) {
        k_scales = (const u16 *)__ldg((const u64 *)k_scales_slot);
        v_scales = (const u16 *)__ldg((const u64 *)v_scales_slot);
    }
    int row = blockIdx.y, kv = blockIdx.x / splits, split = blockIdx.x % splits, group = H / Hkv, tile = blockIdx.z;
    int low = split * group / splits, heads = (split + 1) * group / splits - low, head0 = kv * group + low;
    int t = threadIdx.x, lane = t & 31, warp = t >> 5, c = t & 7, base = tile * TILE;
    let_next_start();
    wait_for_inputs();
    // Queries and the place on the list of blocks do not depend on the position: all are asked for together.
    const int QUERIES = (G * (DH / 4) + THREADS - 1) / THREADS;
    const int *chosen = blocks + (size_t)row * budget;
    const float4 *q4 = (const float4 *)(q + ((size_t)row * H + head0) * DH);
    i64 seen = *pos + row + 1;
    float4 mine_of_q[QUERIES];
#pragma unroll
    for (int n = 0; n < QUERIES; n++) {
        mine_of_q[n] = float4{0.f, 0.f, 0.f, 0.f};
        if (n * THREADS + t < heads * (DH / 4)) mine_of_q[n] = q4[n * THREADS + t];
    }
    int place = block > 0 ? (base + (t & (TILE - 1))) / block : budget, its_block = place < budget ? chosen[place] : 0;
    List list = list_of(seen, chosen, block, budget, first);
    if (base >= list.entries) return;
    int width = list.entries - base < TILE ? list.entries - base : TILE;
    if (t < width) {
        int e = base + t, in_blocks = list.n_blocks * block;
        i64 cell = e < in_blocks ? (i64)its_block * block + (e - place * block) : list.tail + (e - in_blocks);
        cells[t] = cell * Hkv + kv;
    }
#pragma unroll
    for (int n = 0; n < QUERIES; n++)
        if (n * THREADS + t < G * (DH / 4)) ((float4 *)query)[n * THREADS + t] = mine_of_q[n];
    __syncthreads();
    // V first: what is computed from K would otherwise be put between its copies.
    const int COPIES = TILE * UNITS / THREADS;
    const u8 *from[COPIES];
#pragma unroll
    for (int n = 0; n < COPIES; n++) {
        int unit = n * THREADS + t, entry = unit / UNITS;
        from[n] = v + (size_t)cells[entry < width ? entry : 0] * CELL_BYTES + unit % UNITS * 16;
    }
#pragma unroll
    for (int n = 0; n < COPIES; n++) copy<16>(values + 16 * (n * THREADS + t), from[n], (n * THREADS + t) / UNITS < width);
    if (INT8 && t < width) copy<8>(steps + 4 * t, v_scales + (size_t)cells[t] * (DH / SCALE_GROUP));
    copy_commit();
    // Product p = 2 h + j is of head h and cell j, see eight_sums. float16 cells leave no registers for crossing.
    const bool CROSSED = B == 4 && INT8;
    int e = 2 * (t >> 3), cross = CROSSED ? c : 0;
    Four<INT8> key[2][STEPS];
    uint2 key_steps[2];
#pragma unroll
    for (int j = 0; j < 2; j++) {
        int entry = e + (j ^ cross & 1);
        size_t cell = (size_t)cells[entry < width ? entry : 0];
#pragma unroll
        for (int s = 0; s < STEPS; s++) key[j][s] = ((const Four<INT8> *)(k + cell * CELL_BYTES))[8 * s + c];
        if (INT8) key_steps[j] = *(const uint2 *)(k_scales + cell * (DH / SCALE_GROUP));
    }
    bool fine = true;
#pragma unroll 1
    for (int h0 = 0; h0 < G; h0 += B) {
        float sums[32];
#pragma unroll
        for (int i = 0; i < 32; i++) sums[i] = 0.f;
#pragma unroll
        for (int s = 0; s < STEPS; s++) {
            float x[2][4];
#pragma unroll
            for (int j = 0; j < 2; j++)
                key[j][s].values(INT8 ? (s & 4 ? key_steps[j].y : key_steps[j].x) >> 8 * (s & 2) : 0, x[j]);
#pragma unroll
            for (int h = 0; h < B; h++) {
                float4 y = ((const float4 *)query)[(h0 + (h ^ cross >> 1)) * (DH / 4) + 8 * s + c];
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    int at = 4 * (2 * h + j);
                    sums[at] = fma32(y.x, x[j][0], sums[at]);
                    sums[at + 1] = fma32(y.y, x[j][1], sums[at + 1]);
                    sums[at + 2] = fma32(y.z, x[j][2], sums[at + 2]);
                    sums[at + 3] = fma32(y.w, x[j][3], sums[at + 3]);
                }
            }
        }
        float score = mul32(eight_sums<CROSSED>(sums), scale);
        int h = h0 + (c >> 1), entry = e + (c & 1);
        if ((c >> 1) < B && h < heads && entry < width) {
            fine = fine && finite32(score);
            p[h * TILE + entry] = score;
        }
    }
    if (!fine) report(error, where, NOT_FINITE, row);
    copy_wait<0>();
    uint4 codes[INT8 ? COPIES : 1];
    if (INT8)
#pragma unroll
        for (int n = 0; n < COPIES; n++) codes[n] = ((const uint4 *)values)[n * THREADS + t];
    __syncthreads();
    // Codes become float16 in the same place, which everybody has read.
    if (INT8)
#pragma unroll
        for (int n = 0; n < COPIES; n++) {
            int unit = n * THREADS + t;
            widen(codes[n], steps[unit / (SCALE_GROUP / 16)], (uint4 *)values + 2 * unit);
        }
    float2 *stats = (float2 *)(parts + (size_t)gridDim.y * H * most_tiles * DH);
    softmax_tile<THREADS>(p, heads, width, lane, warp, stats, (size_t)row * H + head0, most_tiles, tile);
    __syncthreads();
    const int OWN = G > 3 ? G / 2 : G, EACH = G > 3 ? 4 : 2;  // heads of a thread, and neighbouring values of each
    int mine0 = t / (DH / EACH) * OWN, d = t % (DH / EACH);
    if (mine0 >= heads) return;
    float o[OWN][EACH];
#pragma unroll
    for (int h = 0; h < OWN; h++)
#pragma unroll
        for (int i = 0; i < EACH; i++) o[h][i] = 0.f;
    auto add = [&](int entry, const float (&weights)[OWN]) {
        float x[4];
        if (EACH == 4) {
            four_of(((const uint2 *)values)[entry * (DH / 4) + d], x);
        } else {
            u32 pair = ((const u32 *)values)[entry * (DH / 2) + d];
            x[0] = half_f32((u16)pair), x[1] = half_f32((u16)(pair >> 16));
        }
#pragma unroll
        for (int h = 0; h < OWN; h++)
#pragma unroll
            for (int i = 0; i < EACH; i++) o[h][i] = fma32(weights[h], x[i], o[h][i]);
    };
    int whole = width & ~3;
#pragma unroll 4
    for (int entry = 0; entry < whole; entry += 4) {
        float weights[4][OWN];
#pragma unroll
        for (int h = 0; h < OWN; h++) {
            float4 w = *(const float4 *)(p + (mine0 + h) * TILE + entry);
            weights[0][h] = w.x, weights[1][h] = w.y, weights[2][h] = w.z, weights[3][h] = w.w;
        }
#pragma unroll
        for (int i = 0; i < 4; i++) add(entry + i, weights[i]);
    }
    for (int entry = whole; entry < width; entry++) {
        float weights[OWN];
#pragma unroll
        for (int h = 0; h < OWN; h++) weights[h] = p[(mine0 + h) * TILE + entry];
        add(entry, weights);
    }
#pragma unroll
    for (int h = 0; h < OWN; h++)
        if (mine0 + h < heads) {
            float *to = parts + (((size_t)row * H + head0 + mine0 + h) * most_tiles + tile) * DH + EACH * d;
            if (EACH == 4) *(float4 *)to = float4{o[h][0], o[h][1], o[h][EACH - 2], o[h][EACH - 1]};
            else *(float2 *)to = make_float2(o[h][0], o[h][1]);
        }
}
