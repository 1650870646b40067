// Q3_K and IQ4_XS on int8 tensor cores: 16 rows of a matrix times four columns, with the bits of `multiply`.
//
// A code of Q3_K times its scale is -124 .. 128, so the opposite and 128 are an unsigned byte, and a product of the cores that
// starts at -128 times the sum of a lane's activations gives its integer. A codebook value is a byte as well, a lane of IQ4_XS
// two integers, one for each of its sub-blocks, and its scales multiply them in float32, which holds all of that. The floats
// follow as everywhere. What a step costs does not depend on the number of columns.
//
// Two warps share 16 rows, eight lanes each. Thread 4g + t has 16 bytes of codes of rows g and g + 8 (tensor.cuh), all of lanes
// 2t and 2t + 1 of the warp's eight. A product has one of both from every t: columns 0 .. 3 are lane 4k + c of four columns,
// columns 4 .. 7 lane 4k + 2 + c, as in half_q4.cuh, with zeros where other lanes have their values.
#pragma once
#include "gemv/half_block.cuh"
#include "gemv/iq4_xs.cuh"

// d += a b. SIGN: "s8" or "u8", what the bytes of a are.
#ifdef STRATA_ON_CPU
DEVICE void more_s8(int (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    int sum[4];
    u32 b[2] = {b0, b1};
    mma_s8(sum, a, b, 0);
    for (int i = 0; i < 4; i++) d[i] += sum[i];
}
DEVICE void more_u8(int (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    int sum[4];
    u32 b[2] = {b0, b1}, low[4], top[4];
    for (int i = 0; i < 4; i++) low[i] = a[i] & 0x7f7f7f7fu, top[i] = a[i] >> 7 & 0x01010101u;
    more_s8(d, low, b0, b1);
    mma_s8(sum, top, b, 0);
    for (int i = 0; i < 4; i++) d[i] += 128 * sum[i];
}
#else
#if AMPERE
#define MORE(SIGN)                                                                                                \
    asm("mma.sync.aligned.m16n8k32.row.col.s32." SIGN ".s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};" \
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])                                                          \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
#else
#define MORE(SIGN)                                                                                \
    _Pragma("unroll") for (int i = 0; i < 4; i++)                                                 \
        asm("mma.sync.aligned.m8n8k16.row.col.s32." SIGN ".s8.s32 {%0,%1},{%2},{%3},{%0,%1};"     \
            : "+r"(d[2 * (i & 1)]), "+r"(d[2 * (i & 1) + 1])                                      \
            : "r"(a[i]), "r"(i >> 1 ? b1 : b0))
#endif
DEVICE void more_s8(int (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { MORE("s8"); }
DEVICE void more_u8(int (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { MORE("u8"); }
#endif

// Four columns in shared memory, a piece for every 256 values: codes as the threads of a product want them, 16 bytes for
// [h][c][t][column], scales, and where products of unsigned bytes start, [lane][column] (Q3_K). Threads t = 2 and 3 change
// places: so neighbours that store here meet all banks.
struct ByteColumns {
    enum { SCALES = 1024, STARTS = SCALES + 16, CHUNK = STARTS + 256 };
    DEVICE static int place(int h, int c, int t, int column) { return 512 * h + 256 * c + 16 * (4 * (t ^ t >> 1) + column); }
};

// What is a format's own: where words 0 .. 3 of lanes 8h + 4u .. lie in a chunk of activations; STAGE, the bytes of a warp's half
// of 16 rows on their way, codes first; what a thread loads of it; terms.
template <class F>
struct ByteFormat;

template <>
struct ByteFormat<IQ4_XS> {
    enum { PIECES = 1, UNSIGNED = 0, HEADS = 1024, STAGE = HEADS + 128 };
    DEVICE static int value_of(int h, int u, int word) { return 64 * h + 32 * u + 128 * (word >> 1) + 16 * (word & 1); }

    // Behind the codes: heads of 8 bytes.
    const u8 *from;
    u32 to;
    bool some;
    template <class B>
    DEVICE ByteFormat(const B &row_block, int, int lane) : to(HEADS + 16 * (lane & 7)), some(lane < 8) {
        from = row_block(lane >> 1 & 3) + 512 + 16 * (lane & 1);
    }
    DEVICE void ask(u8 *stage, u32 far) const {
        if (some) copy<16>(stage + to, from + far);
    }

    u32 codes[2][4], head[2][2];
    DEVICE void take(const u8 *stage, int, int g, int t) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            fetch<16, true>(stage + (64 * g + 16 * t) + 512 * r, codes[r]);
            fetch<8, true>(stage + 8 * g + (HEADS + 64 * r), head[r]);
        }
    }
    DEVICE float scale(int r, int) const { return half_f32((u16)head[r][0]); }

    // sums(k, c, d): d the integers of lanes 4k + c and 4k + 2 + c. column(c, b): what they meet; starts(k, c, d) where
    // products of unsigned bytes start.
    template <class C, class B, class S>
    DEVICE void terms(int, int h, const C &column, const B &, const S &sums) const {
        float sub[2][2][2], less[2][2];  // of row r, k and sub-block 2h + k + 4s; what a product's start makes of the second
#pragma unroll
        for (int r = 0; r < 2; r++) {
            u32 low = permute(head[r][1], 0, h ? 0x4341 : 0x4240), top = permute(head[r][0], 0, 0x4342);
            u32 scales = ((low | low << 4) & 0x0f0f0f0fu) | ((top << (4 - 4 * h) | top << (10 - 4 * h)) & 0x30303030u);
#pragma unroll
            for (int i = 0; i < 4; i++)
                sub[r][i & 1][i >> 1] = sub32(float_of(permute(scales, 0x4b000000u, 0x7440 + i)), 8388640.f);  // 2^23 + 32
#pragma unroll
            for (int k = 0; k < 2; k++) less[r][k] = mul32(sub[r][k][1], -12582912.f);  // whole: exact
        }
#pragma unroll
        for (int c = 0; c < 2; c++) {
            u32 b[2][4];
            column(c, b);
            int d[2][2][4];
#pragma unroll
            for (int s = 0; s < 2; s++) {
                u32 low[2][2], high[2][2];
#pragma unroll
                for (int r = 0; r < 2; r++) look_up_both(codes[r][2 * s + c], low[r], high[r]);
#pragma unroll
                for (int k = 0; k < 2; k++)
#pragma unroll
                    for (int part = 0; part < 2; part++) {
                        u32 a[4] = {low[0][part], low[1][part], high[0][part], high[1][part]};
                        u32 half[2] = {b[k][2 * s], b[k][2 * s + 1]};
                        if (part) more_s8(d[k][s], a, half[0], half[1]);
                        else mma_s8(d[k][s], a, half, WHOLE);
                    }
            }
#pragma unroll
            for (int k = 0; k < 2; k++) {
                float sum[4];
#pragma unroll
                for (int i = 0; i < 4; i++)
                    sum[i] = fma32(whole(d[k][0][i]), sub[i >> 1][k][0],
                                   fma32(float_of((u32)d[k][1][i]), sub[i >> 1][k][1], less[i >> 1][k]));
                sums(k, c, sum);
            }
        }
    }
};

template <>
struct ByteFormat<Q3_K> {
    enum { PIECES = 2, UNSIGNED = 1, THIRDS = 1024, TAIL = THIRDS + 512, TAIL_BYTES = 112, STAGE = TAIL + 4 * TAIL_BYTES };
    DEVICE static int value_of(int h, int u, int word) { return 128 * h + 16 * u + 32 * word; }

    // Behind the codes: third bits, and scales of whole row blocks.
    const u8 *from[2];
    u32 to, fours;  // the latter kept in a register
    bool some;
    template <class B>
    DEVICE ByteFormat(const B &row_block, int h, int lane) : to(16 * lane), fours(opaque(0x04040404u)), some(lane < 28) {
        from[0] = row_block(lane >> 3) + 512 + 64 * (lane >> 1 & 3) + 32 * h + 16 * (lane & 1);
        from[1] = row_block(min(lane / 7, 3)) + 768 + 16 * (lane % 7);
    }
    DEVICE void ask(u8 *stage, u32 far) const {
        copy<16>(stage + THIRDS + to, from[0] + far);
        if (some) copy<16>(stage + TAIL + to, from[1] + far);
    }

    u32 codes[2][4], third[2][2], low[2], top[2], d[2];
    DEVICE void take(const u8 *stage, int h, int g, int t) {
        int item = 2 * h + (t >> 1), tail = TAIL_BYTES * (g >> 2), in = g & 3;
        const u8 *near = stage + (64 * g + 16 * t), *thirds = stage + (32 * g + 8 * t);
        const u8 *lows = stage + (tail + 16 * in + 4 * item), *tops = stage + (tail + 8 * in + 2 * item);
        const u8 *scales = stage + (tail + 4 * in);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            int far = TAIL + 2 * TAIL_BYTES * r;
            fetch<16, true>(near + 512 * r, codes[r]);
            fetch<8, true>(thirds + THIRDS + 256 * r, third[r]);
            low[r] = *(const u32 *)(lows + far);
            top[r] = *(const u16 *)(tops + 64 + far);
            d[r] = *(const u32 *)(scales + 96 + far);
        }
    }
    // The opposite, as products are.
    DEVICE float scale(int r, int e) const { return half_f32((u16)((d[r] >> 16 * e & 0xffff) ^ 0x8000u)); }

    template <class C, class B, class S>
    DEVICE void terms(int e, int, const C &column, const B &starts, const S &sums) const {
        u32 opposite[2], start[2][4];
        int by[2][4];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            u32 fields = top[r] >> 8 * e & 255;
            fields = (fields | fields << 12) & 0x000f000fu;
            fields = (fields << 4 | fields << 10) & 0x30303030u;
            opposite[r] = (0xa0a0a0a0u - (four_nibbles(low[r] >> 16 * e) | fields)) ^ 0x80808080u;  // 32 - scale
#pragma unroll
            for (int i = 0; i < 4; i++) {
                by[r][i] = (int)permute(opposite[r], 0, 0x8880 + 0x1111 * i);  // its sign in the upper bytes
                start[r][i] = 0x80808080u - 0x04040404u * (u32)by[r][i];
            }
        }
#pragma unroll
        for (int c = 0; c < 2; c++) {
            u32 b[2][4];
            column(c, b);
            int d[2][4];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                u32 a[4];
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    int r = j & 1, i = 2 * half + (j >> 1), bit = 4 * c + i;
                    u32 twos = codes[r][2 * e + c] >> 2 * i;
                    u32 thirds = bit < 2 ? third[r][e] << (2 - bit) : third[r][e] >> (bit - 2);
                    u32 code = ((twos & 0x03030303u) ^ fours) ^ (thirds & fours);
                    // (code - 4) times the opposite of the scale, plus 128, in every byte
                    a[j] = code * (u32)by[r][i] + start[r][i];
                }
#pragma unroll
                for (int k = 0; k < 2; k++) {
                    if (!half) starts(k, c, d[k]);
                    more_u8(d[k], a, b[k][2 * half], b[k][2 * half + 1]);
                }
            }
#pragma unroll
            for (int k = 0; k < 2; k++) {
                float sum[4];
#pragma unroll
                for (int i = 0; i < 4; i++) sum[i] = whole(d[k][i]);
                sums(k, c, sum);
            }
        }
    }
};

// Chunks on their way to a warp by background copies, as in half_ring.cuh.
template <class F>
struct ByteRing {
    typedef ByteFormat<F> Own;
    enum { STAGES = HALF_STAGES, BYTES = STAGES * Own::STAGE };
    u8 *space;  // of the warp
    Own own;
    const u8 *from[2];
    int asked, slot, chunks;

    // row_block(i): row block i of the four of the 16 rows; chunks: of F.
    template <class B>
    DEVICE ByteRing(u8 *space, const B &row_block, int h, int chunks)
        : space(space), own(row_block, h, threadIdx.x & 31), asked(0), slot(0), chunks(chunks) {
        int lane = threadIdx.x & 31;
#pragma unroll
        for (int r = 0; r < 2; r++) from[r] = row_block(2 * r + (lane >> 4)) + 128 * (lane >> 2 & 3) + 64 * h + 16 * (lane & 3);
    }
    DEVICE void ask() {
        if (asked < chunks) {
            u8 *stage = space + asked % STAGES * Own::STAGE;
            u32 far = asked * F::Raw::CHUNK, at = 16 * (threadIdx.x & 31);
            copy<16>(stage + at, from[0] + far);
            copy<16>(stage + at + 512, from[1] + far);
            own.ask(stage, far);
        }
        asked++;
        copy_commit();
    }
    DEVICE void start() {
#pragma unroll
        for (int i = 0; i < STAGES - 1; i++) ask();
    }
    // The next chunk; asks for the one that takes the place of the last.
    DEVICE void take(int h) {
        copy_wait<STAGES - 2>();
        __syncwarp();
        own.take(space + slot * Own::STAGE, h, threadIdx.x >> 2 & 7, threadIdx.x & 3);
        slot = slot + 1 == STAGES ? 0 : slot + 1;
        ask();
    }
};

// As half_block (half_block.cuh), for one tile. space: ByteColumns of K values, and later what warps trade (byte_bytes in
// gemv/mixed.py); behind that a ring for every warp.
template <class F>
DEVICE void byte_block(const u8 *weights, int first, int rows, const Quantised &x, int from, int n, int K, float *y, u8 *space) {
    typedef ByteFormat<F> Own;
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, pair = warp >> 1, h = warp & 1, g = lane >> 2, t = lane & 3;
    int pieces = K >> 8, last = (rows - 1) >> 2, front = (first >> 2) + 4 * pair;
    u32 bytes = (u32)row_block_bytes<F>(K);
    int ring_at = max(pieces * ByteColumns::CHUNK, 8 * HalfSums::TRADED);  // byte_bytes
    ByteRing<F> ring(space + ring_at + warp * ByteRing<F>::BYTES,
                     [&](int i) { return weights + (u64)min(front + i, last) * bytes; }, h, pieces / Own::PIECES);
    ring.start();
    wait_for_inputs();
    auto row_of = [&](int column) { return (u32)(from + min(column, n - 1)) * (u32)K; };
    int thread = threadIdx.x, threads = blockDim.x;
    float scale = thread < 4 * pieces ? x.scales[(row_of(thread & 3) >> 8) + (thread >> 2)] : 0.f;
#pragma unroll 1
    for (int i = thread; i < 16 * pieces; i += threads) {
        int column = i & 3, u = i >> 2 & 1, half = i >> 3 & 1;
        const i8 *codes = x.codes + row_of(column) + 256 * (i >> 4);
        uint4 v[4];
#pragma unroll
        for (int j = 0; j < 4; j++) v[j] = codes16(codes + Own::value_of(half, u, j));
        u8 *piece = space + (i >> 4) * ByteColumns::CHUNK;
        auto put = [&](int c, int t, u32 a, u32 b, u32 c2, u32 d) {
            *(uint4 *)(piece + ByteColumns::place(half, c, 2 * u + t, column)) = make_uint4(a, b, c2, d);
        };
        put(0, 0, v[0].x, v[1].x, v[2].x, v[3].x), put(1, 0, v[0].y, v[1].y, v[2].y, v[3].y);
        put(0, 1, v[0].z, v[1].z, v[2].z, v[3].z), put(1, 1, v[0].w, v[1].w, v[2].w, v[3].w);
        if (Own::UNSIGNED) {
            int sums[4] = {};
#pragma unroll
            for (int j = 0; j < 4; j++) {
                u32 words[4] = {v[j].x, v[j].y, v[j].z, v[j].w};
#pragma unroll
                for (int lane = 0; lane < 4; lane++) sums[lane] = dot4((int)words[lane], 0x01010101, sums[lane]);
            }
#pragma unroll
            for (int lane = 0; lane < 4; lane++)
                ((int *)(piece + ByteColumns::STARTS))[4 * (8 * half + 4 * u + lane) + column] = WHOLE - 128 * sums[lane];
        }
    }
    auto put_scale = [&](int i, float s) {
        *(float *)(space + (i >> 2) * ByteColumns::CHUNK + ByteColumns::SCALES + 4 * (i & 3)) = s;
    };
    if (thread < 4 * pieces) put_scale(thread, scale);
#pragma unroll 1
    for (int i = thread + threads; i < 4 * pieces; i += threads) put_scale(i, x.scales[(row_of(i & 3) >> 8) + (i >> 2)]);
    __syncthreads();

    HalfSums all;
    all.clear();
    const u8 *scales = space + ByteColumns::SCALES + 8 * (t & 1);
    // From a thread's scales to its starts.
    const int apart = ByteColumns::STARTS - ByteColumns::SCALES + 16 * (8 * h + 2 * (t >> 1));
    Near codes = near_of(space + ByteColumns::place(h, 0, t, g & 3));
    bool mine[2] = {t == g >> 2, t == 2 + (g >> 2)};  // whether columns g of a product k are lanes of this thread
    u32 b[2][4] = {};
#pragma unroll 1
    for (int p = 0; p < pieces; p += Own::PIECES) {
        ring.take(h);
#pragma unroll
        for (int e = 0; e < Own::PIECES; e++) {
            float2 near = *(const float2 *)scales;
            float factor[4];
#pragma unroll
            for (int r = 0; r < 2; r++) {
                float d = ring.own.scale(r, e);
                factor[2 * r] = mul32(d, near.x), factor[2 * r + 1] = mul32(d, near.y);
            }
            auto column = [&](int c, u32 (&to)[2][4]) {
#pragma unroll
                for (int k = 0; k < 2; k++) {
                    near_if(mine[k], codes + 256 * c, b[k]);
#pragma unroll
                    for (int i = 0; i < 4; i++) to[k][i] = b[k][i];
                }
            };
            auto starts = [&](int k, int c, int (&d)[4]) {
                int2 both = *(const int2 *)(scales + apart + 16 * (4 * k + c));
                d[0] = d[2] = both.x, d[1] = d[3] = both.y;
            };
            ring.own.terms(e, h, column, starts, [&](int k, int c, const float (&d)[4]) { all.lanes(k, c, d, factor); });
            codes += ByteColumns::CHUNK, scales += ByteColumns::CHUNK;
        }
    }
    __syncthreads();
    all.give(h, space + HalfSums::TRADED * warp);
    __syncthreads();
    float out[2];
    all.rows(h, space + HalfSums::TRADED * (warp ^ 1), out);
    // Of the two threads that have the same outputs, each takes a column.
    int column = 2 * (t & 1) + (t >> 1), row = first + 16 * pair + 8 * h + g;
    if (column < n && row < rows) y[(i64)(from + column) * rows + row] = t >> 1 ? out[1] : out[0];
}
