// Relaid matrices expanded for wide products: int8 codes (rows, K filled up to a multiple of 64), then float32 scales and
// minima (rows, padded K / G), where value = scale * code + minimum for the G values of a group. Codes come in pairs of
// neighbouring rows, whose words of four bytes alternate (tensor.cuh).
//
// A warp takes one chunk, or one step that is left at the end of a row, of a row block; its threads unpack what they
// unpack for a product (core.cuh). Parts<F> says where the bytes of a thread's step belong:
//   G, MIN          values of a group; whether there are minima
//   put(raw, step, e, q, to)        writes them
#pragma once
#include "gemv/core.cuh"

// Where a step of one row begins; codes: of its pair. All lanes of a warp write together, those without `some` nothing.
struct Spread {
    u8 *codes;
    float *scales, *minima;
    bool some;

    // Eight codes from value `at` on: the lanes of a pair of rows trade words, so that each writes one of both rows.
    DEVICE void eight(int at, u32 low, u32 high) const {
        bool second = threadIdx.x & 8;
        u32 other = __shfl_xor_sync(ALL_LANES, second ? low : high, 8);
        uint2 both = second ? make_uint2(other, high) : make_uint2(low, other);
        if (some) *(uint2 *)(codes + 2 * at + (second ? 8 : 0)) = both;
    }
    // Sixteen codes: each writes eight of both rows, so that no sector of memory is written in parts.
    DEVICE void sixteen(int at, u32 a, u32 b, u32 c, u32 d) const {
        bool second = threadIdx.x & 8;
        u32 low = __shfl_xor_sync(ALL_LANES, second ? a : c, 8), high = __shfl_xor_sync(ALL_LANES, second ? b : d, 8);
        uint4 both = second ? make_uint4(low, c, high, d) : make_uint4(a, low, b, high);
        if (some) *(uint4 *)(codes + 2 * at + (second ? 16 : 0)) = both;
    }
    DEVICE void scale(int group, float value) const {
        if (some) scales[group] = value;
    }
    DEVICE void minimum(int group, float value) const {
        if (some) minima[group] = value;
    }
};

template <class F>
struct Parts;

// Grid: (units / per_block, matrices). Matrix first + blockIdx.y comes from base + number * stride, or from word
// 3 number + part of addresses, and goes to out + blockIdx.y * matrix_bytes. offsets: entries by matrix, or null; one
// without any is left out. pieces: chunks and left steps of a row. Rows are filled up to a multiple of four.
template <class F>
__global__ void __launch_bounds__(256, 2)
expand(const u8 *base, const u64 *addresses, int part, i64 stride, const int *offsets, int first, int rows, int K,
       int pieces, int per_block, u8 *out, i64 scales_at, i64 minima_at, i64 matrix_bytes) {
    typedef typename F::Raw Raw;
    enum { E = Raw::STEPS, P = Raw::BLOCKS, STEP_VALUES = P * F::VALUES, G = Parts<F>::G };
    __shared__ uint4 space[F::TABLE / 4 + !F::TABLE];
    u32 *table = (u32 *)space;
    int number = first + blockIdx.y;
    if (offsets && offsets[number] == offsets[number + 1]) return;
    const u8 *matrix = addresses ? (const u8 *)addresses[3 * number + part] : base + number * stride;
    out += blockIdx.y * matrix_bytes;
    stage<F>(table);

    int lane = threadIdx.x & 31, q = lane & 7;
    int blocks = K / F::VALUES, chunks = blocks / (E * P), groups = (K + 63) / 64 * (64 / G), pitch = groups * G;
    int units = (rows + 3) / 4 * pieces, end = min(units, ((int)blockIdx.x + 1) * per_block);
    size_t block_bytes = row_block_bytes<F>(K);
#pragma unroll 1
    for (int unit = blockIdx.x * per_block + (threadIdx.x >> 5); unit < end; unit += 8) {
        int piece = unit % pieces, row = unit / pieces * 4 + (lane >> 3), pair = row >> 1;
        int at = piece < chunks ? piece * E * STEP_VALUES : (chunks * E + piece - chunks) * STEP_VALUES;
        const u8 *from = matrix + unit / pieces * block_bytes;
        u8 *codes = out + (i64)pair * 2 * pitch;
        float *scales = (float *)(out + scales_at) + (i64)row * groups;
        float *minima = (float *)(out + minima_at) + (i64)row * groups;
        Raw raw;
        if (piece < chunks) {
            raw.load(from + (size_t)piece * Raw::CHUNK, lane >> 3, q);
#pragma unroll
            for (int e = 0; e < E; e++) {
                int begin = at + e * STEP_VALUES;
                Spread to = {codes + 2 * begin, scales + begin / G, minima + begin / G, true};
                Parts<F>::put(raw, F::unpack(raw, e, q, table), e, q, to);
            }
        } else if constexpr (E * P > 1) {
            int n = min(blocks - at / F::VALUES, (int)P);
            Spread to = {codes + 2 * at, scales + at / G, minima + at / G, q * P / 8 < n};
            from += (size_t)chunks * Raw::CHUNK + (size_t)(piece - chunks) * Raw::STEP;
            raw.load_last(from, lane >> 3, to.some ? q : 0, n);
            Parts<F>::put(raw, F::unpack(raw, 0, q, table), 0, q, to);
        }
        // Groups behind the end of a row count nothing.
        if (piece == pieces - 1)
            for (int i = K / G + q; i < groups; i += 8) {
                scales[i] = 0.f;
                if (Parts<F>::MIN) minima[i] = 0.f;
            }
    }
}
