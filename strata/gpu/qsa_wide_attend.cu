// Sparse attention over the rows of a prefill chunk: a block takes up to 16 query heads that share a KV head, of one row,
// through all its cells, 32 at a time, with a running softmax. Products are of float16 (cells are that anyway).
#include "kv_cells.cuh"
#include "qsa_tensor.cuh"

#define CELLS 32
#define HEADS 16
#define THREADS 128

// The cells of a row that sees n, ascending: those of the chosen blocks, then the incomplete tail. block 0: all n cells.
struct Seen {
    const int *blocks;
    int block, in_blocks, entries;
    i64 tail;
    DEVICE Seen(i64 n, const int *chosen, int block_cells, int budget) {
        blocks = chosen;
        block = block_cells;
        in_blocks = block == 0 ? 0 : (n / block < budget ? (int)(n / block) : budget) * block;
        tail = block == 0 ? 0 : n / block * block;
        entries = in_blocks + (int)(n - tail);
    }
    DEVICE i64 cell(int e) const { return e < in_blocks ? (i64)blocks[e / block] * block + e % block : tail + e - in_blocks; }
};

// 16 neighbouring values of a head in a cell as float16, to 16-byte aligned `to`.
DEVICE void load_values(const void *cells, const u16 *scales, size_t head, int dh, int i, u16 *to) {
    uint4 *out = (uint4 *)to;
    if (!scales) {
        const uint4 *from = (const uint4 *)((const u16 *)cells + head * dh + i);
        out[0] = from[0];
        out[1] = from[1];
        return;
    }
    uint4 codes = *(const uint4 *)((const i8 *)cells + head * dh + i);
    u32 step = scales[head * (dh / SCALE_GROUP) + i / SCALE_GROUP] * 0x10001u;
    u32 words[4] = {codes.x, codes.y, codes.z, codes.w}, pairs[8];
#pragma unroll
    for (int j = 0; j < 4; j++) {
        // Behind a byte of 0x64, code + 128 is the float16 1152 + code; the product with a float16 rounds once.
        u32 word = words[j] ^ 0x80808080u;
        pairs[2 * j] = mul_halves(sub_halves(__byte_perm(word, 0x64646464u, 0x4140), 0x64806480u), step);
        pairs[2 * j + 1] = mul_halves(sub_halves(__byte_perm(word, 0x64646464u, 0x4342), 0x64806480u), step);
    }
    out[0] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    out[1] = make_uint4(pairs[4], pairs[5], pairs[6], pairs[7]);
}

// y (T, H, DH) from q (T, H, DH) and the gates in q_gate (T, H, 2, DH). Grid: (KV heads * splits, rows). Warp w scores
// cells 8 w .. of a tile and sums values w DH / 4 .. of the output; thread 8 r + i keeps the softmax of head r.
template <int DH>
KERNEL(THREADS) qsa_wide_attend(const float *q, const float *q_gate, const i64 *pos, const void *const *k_slot,
                                const u16 *const *k_scales_slot, const void *const *v_slot, const u16 *const *v_scales_slot,
                                const int *blocks, float *y, int H, int Hkv, int block, int budget, int splits, float scale,
                                u64 *error, u64 where) {
    // Strides let the threads of a product meet all banks.
    const int K_STRIDE = DH + 16, V_STRIDE = DH + 8, S_STRIDE = CELLS + 4, P_STRIDE = CELLS + 8;
    const int STEPS = DH / 16, COLUMNS = DH / 32, PARTS = DH / 16;
    __shared__ uint4 keys4[CELLS * K_STRIDE / 8], values4[CELLS * V_STRIDE / 8];
    __shared__ float4 s4[HEADS * S_STRIDE / 4];
    __shared__ uint2 p2[HEADS * P_STRIDE / 4];
    __shared__ float fades[HEADS], sums[HEADS];
    __shared__ i64 cells[CELLS];
    u16 *keys = (u16 *)keys4, *values = (u16 *)values4, *p = (u16 *)p2;
    float *s = (float *)s4;
    int row = blockIdx.y, kv = blockIdx.x / splits, split = blockIdx.x % splits, group = H / Hkv;
    int first_head = kv * group + split * HEADS, heads = group - split * HEADS < HEADS ? group - split * HEADS : HEADS;
    int thread = threadIdx.x, warp = thread >> 5, g = (thread & 31) >> 2, t = thread & 3;
    int mine = thread >> 3, part = thread & 7;  // of the softmax
    Seen seen(*pos + row + 1, blocks + (size_t)row * budget, block, budget);
    const void *k = *k_slot, *v = *v_slot;
    const u16 *k_scales = k_scales_slot ? *k_scales_slot : nullptr, *v_scales = v_scales_slot ? *v_scales_slot : nullptr;
    u32 query[STEPS][4];
#pragma unroll
    for (int i = 0; i < STEPS; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int h = g + 8 * half;
            float4 x = {0.f, 0.f, 0.f, 0.f};
            if (h < heads) x = *(const float4 *)(q + ((size_t)row * H + first_head + h) * DH + 16 * i + 4 * t);
            query[i][half] = halves(x.x, x.y);
            query[i][2 + half] = halves(x.z, x.w);
        }
    float out[COLUMNS][4], top = float_of(0xff800000u), sum = 0.f;
#pragma unroll
    for (int j = 0; j < COLUMNS; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) out[j][i] = 0.f;
    bool fine = true;
    for (int base = 0; base < seen.entries; base += CELLS) {
        int width = seen.entries - base < CELLS ? seen.entries - base : CELLS;
        __syncthreads();
        if (thread < CELLS) cells[thread] = thread < width ? seen.cell(base + thread) : -1;
        __syncthreads();
#pragma unroll 4
        for (int at = thread; at < CELLS * PARTS; at += THREADS) {
            int e = at / PARTS, i = at % PARTS * 16;
            i64 cell = cells[e];
            u16 *key = keys + e * K_STRIDE + i, *value = values + e * V_STRIDE + i;
            if (cell >= 0) {
                size_t head = (size_t)cell * Hkv + kv;
                load_values(k, k_scales, head, DH, i, key);
                load_values(v, v_scales, head, DH, i, value);
            } else {
                uint4 zero = make_uint4(0, 0, 0, 0);
                ((uint4 *)key)[0] = zero, ((uint4 *)key)[1] = zero;
                ((uint4 *)value)[0] = zero, ((uint4 *)value)[1] = zero;
            }
        }
        __syncthreads();
        float d[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
            uint2 w = *(const uint2 *)(keys + (8 * warp + g) * K_STRIDE + 16 * i + 4 * t);
            u32 b[2] = {w.x, w.y};
            mma_f16(d, query[i], b);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) s[(g + 8 * (i >> 1)) * S_STRIDE + 8 * warp + 2 * t + (i & 1)] = mul32(d[i], scale);
        __syncthreads();
        float4 x = s4[(mine * S_STRIDE + 4 * part) / 4];
        float scores[4] = {x.x, x.y, x.z, x.w}, most = top, tile_sum = 0.f;
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (4 * part + i < width) {
                fine = fine && (mine >= heads || finite32(scores[i]));
                most = larger(scores[i], most);
            }
#pragma unroll
        for (int half = 1; half < 8; half <<= 1) most = larger(__shfl_xor_sync(ALL_LANES, most, half), most);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            scores[i] = 4 * part + i < width ? exp32(sub32(scores[i], most)) : 0.f;
            tile_sum = add32(tile_sum, scores[i]);
        }
#pragma unroll
        for (int half = 1; half < 8; half <<= 1) tile_sum = add32(tile_sum, __shfl_xor_sync(ALL_LANES, tile_sum, half));
        float fade = exp32(sub32(top, most));
        sum = fma32(sum, fade, tile_sum);
        top = most;
        p2[(mine * P_STRIDE + 4 * part) / 4] = make_uint2(halves(scores[0], scores[1]), halves(scores[2], scores[3]));
        if (part == 0) fades[mine] = fade;
        __syncthreads();
        float low = fades[g], high = fades[g + 8];
#pragma unroll
        for (int j = 0; j < COLUMNS; j++) {
            out[j][0] = mul32(out[j][0], low);
            out[j][1] = mul32(out[j][1], low);
            out[j][2] = mul32(out[j][2], high);
            out[j][3] = mul32(out[j][3], high);
        }
#pragma unroll
        for (int i = 0; i < CELLS / 16; i++) {
            const u16 *at = p + g * P_STRIDE + 16 * i + 2 * t;
            u32 a[4] = {*(const u32 *)at, *(const u32 *)(at + 8 * P_STRIDE), *(const u32 *)(at + 8),
                        *(const u32 *)(at + 8 * P_STRIDE + 8)};
#pragma unroll
            for (int j = 0; j < COLUMNS; j++) {
                u32 b[2];
                cells_down(values + 16 * i * V_STRIDE + warp * (DH / 4) + 8 * j, V_STRIDE, b);
                mma_f16(out[j], a, b);
            }
        }
    }
    if (part == 0) sums[mine] = sum;
    __syncthreads();
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int h = g + 8 * half;
        if (h >= heads) continue;
        size_t head = (size_t)row * H + first_head + h;
#pragma unroll
        for (int j = 0; j < COLUMNS; j++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                int at = warp * (DH / 4) + 8 * j + 2 * t + i;
                float gate = q_gate[(2 * head + 1) * DH + at];
                float value = mul32(div32(out[j][2 * half + i], sums[h]), sigmoid32(gate));
                y[head * DH + at] = value;
                // An infinite gate would end as a finite sigmoid.
                fine = fine && finite32(value) && finite32(gate);
            }
    }
    if (!fine) report(error, where, NOT_FINITE, row);
}
