// Q4_K on tensor cores in float16: 16 rows of a matrix times up to four columns, with the bits of `multiply`.
//
// A code times the scale of its sub-block is a whole number up to 945 and a code of an activation one up to 127, both of
// which float16 holds; the 16 products of a lane sum to less than 2^21, which float32 holds in any order. So a product of the
// cores over 16 values gives the integer of a lane, as a float, and the floats follow as everywhere. What a step costs
// does not depend on the number of columns.
//
// Two warps share 16 rows, eight lanes each. Rows g and g + 8 (tensor.cuh) are rows g of row blocks 0, 1 and 2, 3. Of 32 bytes
// with the codes of four lanes (4k .. 4k + 3) thread t has eight: half of the values of lanes 4k + 2 (t / 2) + c, c = 0, 1.
// Columns 0 .. 3 of a product are lane 4k + c of four columns, columns 4 .. 7 lane 4k + 2 + c, with zeros where the other lane
// has its values.
#pragma once
#include "gemv/kernels.cuh"
#include "gemv/k.cuh"
#include "halves.cuh"

#define THOUSAND 0x64006400u   // 1024 in float16, twice: the low bits are ones
#define SIXTY_FOUR 0x54005400u  // 64: bits 4 to 7 are ones

// Codes of activations, two for each word: bytes 0, 2 and 1, 3 of a word of signed bytes.
DEVICE u32 even_codes(u32 w) { return sub_halves(permute(w ^ 0x80808080u, THOUSAND, 0x5250), 0x64806480u); }
DEVICE u32 odd_codes(u32 w) { return sub_halves(permute(w ^ 0x80808080u, THOUSAND, 0x5351), 0x64806480u); }

// Four columns in shared memory, a piece of 2,192 bytes for every chunk of 256 values: codes as the threads of a product want
// them, [k][c][t][column] 16 bytes; sums of the codes of halves of sub-blocks 2t and 2t + 1, [t][column] 8 bytes; scales.
struct HalfColumns {
    enum { SUMS = 2048, SCALES = SUMS + 128, CHUNK = SCALES + 16 };
    u8 *space;

    // Part 0 .. 7 of a chunk (pair, h, half): 16 bytes of a sub-block at place_of, and 16 of the next one, 32 bytes behind.
    DEVICE static int place_of(int part) { return 64 * (part >> 1) + 16 * (part & 1); }
    DEVICE static int code_place(int part, int column) { return 512 * (part & 3) + 16 * (4 * (part >> 2) + column); }
    DEVICE static void put_codes(u8 *piece, int part, int column, const uint4 &low, const uint4 &high) {
        // Lane 8h + 4 half + j, where the sub-blocks are 2h + 4 pair and the next one.
        u8 *to = piece + code_place(part, column);
        auto word = [&](int j, u32 a, u32 b) {
            *(uint4 *)(to + 256 * (j & 1) + 128 * (j >> 1)) =
                make_uint4(even_codes(a), even_codes(b), odd_codes(a), odd_codes(b));
        };
        word(0, low.x, high.x), word(1, low.y, high.y), word(2, low.z, high.z), word(3, low.w, high.w);
    }
    // Of a chunk whose values begin at `first`: sums of the codes of two sub-blocks (t = 0 .. 3), scale (4).
    template <class X>
    DEVICE static int4 rest_of(int t, const X &x, u32 first) {
        if (t == 4) return {(int)bits_of(x.scales[first >> 8])};
        return ((const int4 *)(x.sums + (first >> 4)))[t];
    }
    DEVICE static void put_rest(u8 *piece, int t, int column, const int4 &s) {
        if (t == 4) ((float *)(piece + SCALES))[column] = float_of((u32)s.x);
        else *(uint2 *)(piece + SUMS + 8 * (4 * t + column)) =
            make_uint2(halves(i32_f32(s.x), i32_f32(s.z)), halves(i32_f32(s.y), i32_f32(s.w)));
    }

    // Threads of a block bring n columns of K values. They are there after a barrier. TOGETHER: the first sums and scales are
    // on their way with the codes, which takes a few registers more.
    template <int T, bool TOGETHER = false>
    DEVICE void bring(const Columns<T> &x, int n, int K, int thread, int threads) const {
        int chunks = K >> 8;
        auto column_of = [&](int i, int items, int &at) {
            int column = (i >= items) + (i >= 2 * items) + (i >= 3 * items);
            at = i - column * items;
            return column;
        };
        auto row_of = [&](int column) {
            u32 row = x.row[0];
#pragma unroll
            for (int t = 1; t < T; t++) row = column == t ? x.row[t] : row;
            return row;
        };
        // Items of four words of both sub-blocks of a pair: groups 4 half .. of lanes 8h ..; two at once.
        auto codes_of = [&](int i) {
            int at, column = column_of(i, 8 * chunks, at);
            return x.codes + (row_of(column) + 256 * (at >> 3) + place_of(at & 7));
        };
        auto put = [&](int i, const uint4 &low, const uint4 &high) {
            int at, column = column_of(i, 8 * chunks, at);
            put_codes(space + (at >> 3) * CHUNK, at & 7, column, low, high);
        };
        // Items of sums and scales.
        auto rest_at = [&](int i) {
            int at, column = column_of(i, 5 * chunks, at), chunk = at / 5;
            return rest_of(at - 5 * chunk, x, row_of(column) + 256 * chunk);
        };
        auto put_rest_at = [&](int i, const int4 &s) {
            int at, column = column_of(i, 5 * chunks, at), chunk = at / 5;
            put_rest(space + chunk * CHUNK, at - 5 * chunk, column, s);
        };
        int items = 8 * chunks * n, rests = 5 * chunks * n;
        int4 rest = {};
        if (TOGETHER) rest = rest_at(min(thread, rests - 1));
#pragma unroll 1
        for (int i = thread; i < items; i += 2 * threads) {
            const i8 *one = codes_of(i), *other = codes_of(min(i + threads, items - 1));
            uint4 a = codes16(one), b = codes16(one + 32), c = codes16(other), d = codes16(other + 32);
            put(i, a, b);
            if (i + threads < items) put(i + threads, c, d);
        }
        if (TOGETHER && thread < rests) put_rest_at(thread, rest);
#pragma unroll 1
        for (int i = thread + (TOGETHER ? threads : 0); i < rests; i += threads) put_rest_at(i, rest_at(i));
    }
};

// Bits of w under `mask` and those of `ones`. A number that the compiler knows would take two instructions.
DEVICE u32 with_ones(u32 w, u32 mask, u32 ones) {
#ifdef STRATA_ON_CPU
    return (w & mask) | ones;
#else
    u32 r; asm("lop3.b32 %0,%1,%2,%3,0xea;" : "=r"(r) : "r"(w), "r"(mask), "r"(ones)); return r;
#endif
}

// A place in shared memory in one register.
#ifdef STRATA_ON_CPU
typedef const u8 *Near;
static inline Near near_of(const u8 *p) { return p; }
#else
typedef u32 Near;
DEVICE Near near_of(const u8 *p) { return (u32)__cvta_generic_to_shared(p); }
#endif

// 16 bytes of shared memory if `on`; otherwise the words stay.
DEVICE void near_if(bool on, Near p, u32 (&to)[4]) {
#ifdef STRATA_ON_CPU
    if (!on) return;
    uint4 v = *(const uint4 *)p;
    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
#else
    asm volatile("{.reg .pred p;\nsetp.ne.u32 p,%5,0;\n@p ld.shared.v4.u32 {%0,%1,%2,%3},[%4];}"
                 : "+r"(to[0]), "+r"(to[1]), "+r"(to[2]), "+r"(to[3]) : "r"(p), "r"((u32)on) : "memory");
#endif
}

DEVICE void near_if(bool on, Near p, u32 (&to)[2]) {
#ifdef STRATA_ON_CPU
    if (!on) return;
    uint2 v = *(const uint2 *)p;
    to[0] = v.x, to[1] = v.y;
#else
    asm volatile("{.reg .pred p;\nsetp.ne.u32 p,%3,0;\n@p ld.shared.v2.u32 {%0,%1},[%2];}"
                 : "+r"(to[0]), "+r"(to[1]) : "r"(p), "r"((u32)on) : "memory");
#endif
}

// Where a thread finds its own of the columns.
// Warps come in pairs: warp h of a pair has lanes 8h .. 8h + 7, and of minima lanes 2h and 2h + 1.
struct HalfPlace {
    Near codes, sums;
    const u8 *scales;
    bool mine, least;  // whether columns g of b are lanes of this thread, or minima of it

    // column: the one of four that stands in columns g of b.
    DEVICE HalfPlace(const u8 *piece, int h, int column) {
        int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
        codes = near_of(piece + 1024 * h + 16 * (4 * t + column));
        sums = near_of(piece + (HalfColumns::SUMS + 8 * (4 * t + column)));
        scales = piece + (HalfColumns::SCALES + 8 * (t & 1));
        mine = t >> 1 == g >> 2;
        least = t == 2 * h + (g >> 2);
    }
    DEVICE void next() {
        codes += HalfColumns::CHUNK, sums += HalfColumns::CHUNK, scales += HalfColumns::CHUNK;
    }
};

// What a thread has of a chunk: codes of both rows, eight bytes of each 32, and the heads.
struct HalfHeads;
struct HalfRaw {
    typedef HalfHeads Heads;
    u32 codes[2][2][2], head[2][4];
};

// d as tensor cores leave it: rows g and g + 8, columns 2t and 2t + 1.
struct HalfSums {
    enum { FLOATS = 20 };
    float v[2][2][4], m[4];
    DEVICE void clear() {
#pragma unroll
        for (int i = 0; i < 16; i++) (&v[0][0][0])[i] = 0.f;
#pragma unroll
        for (int i = 0; i < 4; i++) m[i] = 0.f;
    }
    // A term of lanes 4k + c and 4k + 2 + c of the warp's eight; one of minima.
    DEVICE void lanes(int k, int c, const float (&d)[4], const float (&scale)[4]) {
#pragma unroll
        for (int i = 0; i < 4; i++) v[k][c][i] = fma32(d[i], scale[i], v[k][c][i]);
    }
    DEVICE void minima(const float (&d)[4], const float (&scale)[4]) {
#pragma unroll
        for (int i = 0; i < 4; i++) m[i] = fma32(d[i], scale[i], m[i]);
    }
    // Those of the other warp of a pair, by way of FLOATS * 32 floats of shared memory.
    DEVICE void give(float *to) const {
        to += threadIdx.x & 31;
#pragma unroll
        for (int i = 0; i < 16; i++) to[32 * i] = (&v[0][0][0])[i];
#pragma unroll
        for (int i = 0; i < 4; i++) to[32 * (16 + i)] = m[i];
    }
    // The fixed trees: y of rows g (0, 1) and g + 8 (2, 3), columns 2 (t mod 2) and the next one.
    DEVICE void rows(const float *other, float (&y)[4]) const {
        other += threadIdx.x & 31;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float s[2];
#pragma unroll
            for (int c = 0; c < 2; c++) {
                s[c] = add32(add32(v[0][c][i], other[32 * (4 * c + i)]), add32(v[1][c][i], other[32 * (8 + 4 * c + i)]));
                s[c] = add32(s[c], __shfl_xor_sync(ALL_LANES, s[c], 2));
            }
            float least = add32(m[i], other[32 * (16 + i)]);
            least = add32(least, __shfl_xor_sync(ALL_LANES, least, 2));
            y[i] = add32(sub32(add32(s[0], s[1]), least), 0.f);
        }
    }
};

// Operands that are zero where a thread has nothing to do with a column, and what the compiler must not make again.
struct HalfOperands {
    u32 codes[2][4], sums[2], thousand, sixty_four;
    u32 half, low, high, least;  // which bytes of the heads have the scales of lanes 8h .., of a thread's sub-blocks, its minima
    DEVICE HalfOperands(int h, u32 thread = threadIdx.x) : thousand(opaque(THOUSAND)), sixty_four(opaque(SIXTY_FOUR)) {
        int odd = thread & 1;
        half = opaque(h ? 0x7632u : 0x5410u);
        low = opaque(odd ? 0x5252u : 0x5050u);
        high = opaque(odd ? 0x5353u : 0x5151u);
        least = opaque(odd ? 0x5352u : 0x5150u);
#pragma unroll
        for (int i = 0; i < 8; i++) codes[i >> 2][i & 3] = 0;
        sums[0] = sums[1] = 0;
    }
};

// Scales and minima of both rows, as operands and as floats.
struct HalfHeads {
    u32 low[2], high[2], low_less[2], high_less[2], least[4];
    float d[2], d_min[2];

    DEVICE HalfHeads(const HalfRaw &raw, int h, const HalfOperands &b) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const u32 (&head)[4] = raw.head[r];
            d[r] = half_f32((u16)head[0]), d_min[r] = half_f32((u16)(head[0] >> 16));
            u32 both = permute(head[1], head[3], b.half);  // bytes 0 and 1 have the top bits of bytes 2 and 3
            u32 scales = (both & 0x0f0f3f3fu) | (both << 14 & 0x30300000u);
            // Threads with no minima among those of the warp meet zeros.
            u32 minima = h ? (head[3] >> 4 & 0x0f0f0f0fu) | (head[2] >> 2 & 0x30303030u) : head[2] & 0x3f3f3f3fu;
            least[r] = least[r + 2] = sub_halves(permute(minima, b.thousand, b.least), THOUSAND);
            low[r] = sub_halves(permute(scales, b.thousand, b.low), THOUSAND);
            high[r] = sub_halves(permute(scales, b.thousand, b.high), THOUSAND);
            with_less(r);
        }
    }
    // From low and high alone.
    DEVICE HalfHeads(const u32 (&l)[2], const u32 (&h)[2]) {
#pragma unroll
        for (int r = 0; r < 2; r++) low[r] = l[r], high[r] = h[r], with_less(r);
    }
    DEVICE void with_less(int r) {
        low_less[r] = mul_halves(low[r], 0xe400e400u);    // -1024
        high_less[r] = mul_halves(high[r], 0xd400d400u);  // -64
    }
    // Rows of one of two products over the values of lanes 4k + c and 4k + 2 + c.
    DEVICE void rows(const HalfRaw &raw, const HalfOperands &b, int k, int c, int odd, u32 (&a)[4]) const {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            u32 w = raw.codes[r][k][c] >> 8 * odd;
            a[r] = fma_halves(with_ones(w, 0x000f000fu, b.thousand), low[r], low_less[r]);
            a[2 + r] = fma_halves(with_ones(w, 0x00f000f0u, b.sixty_four), high[r], high_less[r]);
        }
    }
};

// The terms of the chunk at `at`. Columns that are not there get outputs that nobody wants.
template <class Raw, class To>
DEVICE void half_terms(const Raw &raw, const HalfPlace &at, int h, HalfOperands &b, To &sums) {
    float2 x = *(const float2 *)at.scales;
    typename Raw::Heads heads(raw, h, b);
    float scale[4], scale_min[4];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        scale[2 * r] = mul32(heads.d[r], x.x), scale[2 * r + 1] = mul32(heads.d[r], x.y);
        scale_min[2 * r] = mul32(heads.d_min[r], x.x), scale_min[2 * r + 1] = mul32(heads.d_min[r], x.y);
    }
    near_if(at.least, at.sums, b.sums);
    float sum[4] = {0.f, 0.f, 0.f, 0.f};
    mma_f16(sum, heads.least, b.sums);
    sums.minima(sum, scale_min);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int k = i >> 1, c = i & 1;
        u32 (&v)[4] = b.codes[c];
        near_if(at.mine, at.codes + (512 * k + 256 * c), v);
        float sum[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
        for (int odd = 0; odd < 2; odd++) {
            u32 a[4];
            heads.rows(raw, b, k, c, odd, a);
            u32 half[2] = {v[2 * odd], v[2 * odd + 1]};
            mma_f16(sum, a, half);
        }
        sums.lanes(k, c, sum, scale);
    }
}
