// Wide products of experts with relaid matrices as they are: packed codes become int8 on their way into shared memory.
// Nothing is expanded in between, and the bits are those of `wide` with an expanded matrix.
//
// Packed<F> says how: a step has 64 values of a row, two groups of 32.
//   MIN                                 whether there are minima
//   load(block, row, step, K, t, w)     thread t of four: its two words of a row, 0 .. 3, of a row block
//   unpack(w, t, to)                    words of two rows, into the step's 128 bytes of the pair (tensor.cuh)
//   Head, head(..), sides(..)           scales and minima of both groups of a row
#include "gemm/tile.cuh"
#include "gemv/k.cuh"
#include "gemv/small4.cuh"

template <class F>
struct Packed;

// Four words, of two rows in turn, to 16 bytes of a pair.
DEVICE void put_pair(u8 *to, u32 a0, u32 b0, u32 a1, u32 b1) { *(uint4 *)to = make_uint4(a0, b0, a1, b1); }

template <>
struct Packed<Q4_K> {
    enum { MIN = 1, CHUNK = Q4_K::Raw::CHUNK };
    // Step p of a super-block: low nibbles of 32 bytes, then their high ones.
    DEVICE static void load(const u8 *block, int row, int step, int, int t, u32 (&w)[2]) {
        int p = step & 3;
        uint2 v = __ldg((const uint2 *)(block + (step >> 2) * CHUNK + 128 * row + 16 * (4 * (p & 1) + t) + 8 * (p >> 1)));
        w[0] = v.x, w[1] = v.y;
    }
    DEVICE static void unpack(const u32 (&w)[2][2], int t, u8 *pairs, int pair) {
        const u32 m = 0x0f0f0f0fu;
        put_pair(pairs + in_pairs(pair, 0) + 16 * t, w[0][0] & m, w[1][0] & m, w[0][1] & m, w[1][1] & m);
        put_pair(pairs + in_pairs(pair, 1) + 16 * t, w[0][0] >> 4 & m, w[1][0] >> 4 & m, w[0][1] >> 4 & m,
                 w[1][1] >> 4 & m);
    }
    typedef uint4 Head;
    DEVICE static Head head(const u8 *block, int row, int step, int) {
        return __ldg((const uint4 *)(block + (step >> 2) * CHUNK + 512 + 16 * row));
    }
    DEVICE static void sides(const Head &h, int step, float (&scale)[2], float (&minimum)[2]) {
        bool upper = step & 2;
        u32 scales = upper ? (h.w & 0x0f0f0f0fu) | (h.y >> 2 & 0x30303030u) : h.y & 0x3f3f3f3fu;
        u32 minima = upper ? (h.w >> 4 & 0x0f0f0f0fu) | (h.z >> 2 & 0x30303030u) : h.z & 0x3f3f3f3fu;
        float d = half_f32((u16)h.x), least = half_f32((u16)(h.x >> 16));
#pragma unroll
        for (int i = 0; i < 2; i++) {
            scale[i] = mul32(d, i32_f32(byte_of(scales, 2 * (step & 1) + i)));
            minimum[i] = -mul32(least, i32_f32(byte_of(minima, 2 * (step & 1) + i)));
        }
    }
};

template <>
struct Packed<IQ4_NL> {
    enum { MIN = 0, CHUNK = IQ4_NL::Raw::CHUNK, STEP = IQ4_NL::Raw::STEP };
    // Where the codes or, ITEM bytes a block and four times as many items, the scales of 64 values lie.
    struct Place {
        const u8 *at;
        int blocks, pitch;  // of the layout's step; from its item to the next one
    };
    DEVICE static Place place(const u8 *block, int step, int K) {
        int chunks = K >> 8, chunk = step >> 2;
        if (chunk < chunks) return {block + chunk * CHUNK, 0, 2};
        int left = (step >> 1 & 1) + 2 * (chunk - chunks), blocks = (K >> 5) - 8 * chunks - 4 * left;
        return {block + chunks * CHUNK + left * STEP, min(blocks, 4), 1};
    }
    DEVICE static void load(const u8 *block, int row, int step, int K, int t, u32 (&w)[2]) {
        Place p = place(block, step, K);
        int item = 4 * (step & 1) + t;
        const u8 *from = p.blocks ? p.at + 8 * (2 * p.blocks * row + item)
                                  : p.at + 128 * row + 16 * item + 8 * (step >> 1 & 1);
        uint2 v = __ldg((const uint2 *)from);
        w[0] = v.x, w[1] = v.y;
    }
    DEVICE static void unpack(const u32 (&w)[2][2], int t, u8 *pairs, int pair) {
        u32 low[2][2], high[2][2];
#pragma unroll
        for (int r = 0; r < 2; r++)
#pragma unroll
            for (int j = 0; j < 2; j++) look_up_nl(w[r][j], low[r][j], high[r][j]);
        u8 *to = pairs + in_pairs(pair, t >> 1) + 16 * (t & 1);
        put_pair(to, low[0][0], low[1][0], low[0][1], low[1][1]);
        put_pair(to + 32, high[0][0], high[1][0], high[0][1], high[1][1]);
    }
    struct Head {
        u16 d[2];
    };
    DEVICE static Head head(const u8 *block, int row, int step, int K) {
        Place p = place(block, step, K);
        int item = 2 * (step & 1);
        const u8 *from = p.blocks ? p.at + 64 * p.blocks + 2 * (p.blocks * row + item)
                                  : p.at + 512 + 16 * row + 4 * item + 2 * (step >> 1 & 1);
        return {__ldg((const u16 *)from), __ldg((const u16 *)(from + 2 * p.pitch))};
    }
    DEVICE static void sides(const Head &h, int, float (&scale)[2], float (&)[2]) {
        scale[0] = half_f32(h.d[0]), scale[1] = half_f32(h.d[1]);
    }
};

// y[entry][weight] of the entries of expert first + blockIdx.z: grid (weight tiles, row tiles at once, experts); x, y and
// entries as for `wide`, matrices as for `expand`. K is a multiple of 64.
template <class F>
__global__ void __launch_bounds__(256, Experts::BLOCKS)
packed(const u8 *base, const u64 *addresses, int part, i64 stride, i64 row_block_bytes, const i8 *x_codes,
       const float *x_scales, const float *x_sums, int K, int rows, float *y, const int *entries, const int *offsets,
       int first, int share) {
    typedef Packed<F> P;
    typedef Wide<32, P::MIN, Experts> Tiles;
    enum { W = Tiles::W, X = Tiles::X, S = 2, BYTES = 8, SIDES = Tiles::SIDES, SUMS = Tiles::SUMS };
    static_assert(X == 64, "a thread copies a quarter of one row of x");
    DYNAMIC_SHARED(space);
    const int tid = threadIdx.x, t = tid & 3, number = first + blockIdx.z, steps = K / 64, groups = steps * S;
    int start = offsets[number], count = offsets[number + 1] - start;
    entries += start;
    if (!count) return;
    const u8 *matrix = addresses ? (const u8 *)addresses[3 * number + part] : base + number * stride;
    // Of a pair of weights a thread unpacks a quarter; the first W threads have the sides of a weight each.
    const int last_block = (rows - 1) >> 2, of_pair = min(blockIdx.x * (W / 2) + (tid >> 2), 2 * last_block + 1);
    const u8 *block = matrix + (of_pair >> 1) * row_block_bytes;
    const int of_side = min(blockIdx.x * W + tid, rows - 1);
    const u8 *side_block = matrix + (of_side >> 2) * row_block_bytes;
    const typename Tiles::Places places = Tiles::places();
    const u32 x_to = opaque(64 * W + in_tile(tid >> 2, tid >> 1) + 16 * (tid & 1)), side_to = opaque(SIDES + BYTES * tid);

#pragma unroll 1
    for (int first_row = blockIdx.y * X; first_row < count; first_row += gridDim.y * X) {
        int r = min(first_row + (tid >> 2), count - 1), side_row = min(first_row + max(tid - W, 0), count - 1);
        const i8 *x_next = x_codes + (i64)(entries[r] / share) * K + 16 * t;
        const float *scale_next = x_scales + (i64)(entries[side_row] / share) * groups;
        const float *sum_next = x_sums + (i64)(entries[side_row] / share) * groups;
        float acc[Tiles::MT][Tiles::NT][4];
#pragma unroll
        for (int m = 0; m < Tiles::MT; m++)
#pragma unroll
            for (int n = 0; n < Tiles::NT; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) acc[m][n][i] = 0.f;

        u32 w[2][2];
        typename P::Head head;
        auto load = [&](int step) {
            u8 *stage = space + (step & 1) * Tiles::STAGE;
#pragma unroll
            for (int i = 0; i < 2; i++) P::load(block, 2 * (of_pair & 1) + i, step, K, t, w[i]);
            if (tid < W) {
                head = P::head(side_block, of_side & 3, step, K);
            } else if (tid < W + X) {
                copy<BYTES>(stage + side_to, scale_next);
                if (P::MIN) copy<BYTES>(stage + side_to + SUMS - SIDES, sum_next);
            }
            copy<16>(stage + x_to, x_next);
            copy_commit();
            x_next += 64;
            scale_next += S;
            sum_next += S;
        };
        auto unpack = [&](int step) {
            u8 *stage = space + (step & 1) * Tiles::STAGE;
            P::unpack(w, t, stage, tid >> 2);
            if (tid < W) {
                float scale[2], minimum[2];
                P::sides(head, step, scale, minimum);
                *(float2 *)(stage + side_to) = make_float2(scale[0], scale[1]);
                if constexpr (P::MIN) *(float2 *)(stage + side_to + SUMS - SIDES) = make_float2(minimum[0], minimum[1]);
            }
        };

        __syncthreads();  // the tile before has been read
        load(0);
        unpack(0);
        int left = count - first_row - Tiles::column();
#pragma unroll 1
        for (int step = 0; step < steps; step++) {
            copy_wait<0>();
            __syncthreads();
            if (step + 1 < steps) load(step + 1);
            Tiles::step(space + (step & 1) * Tiles::STAGE, places, left, acc);
            if (step + 1 < steps) unpack(step + 1);
        }
        Tiles::store(acc, y, rows, entries, first_row, count, blockIdx.x * W, rows);
    }
}
