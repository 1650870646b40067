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

    // Threads of a block bring n <= 4 columns of K values; they are there after a barrier. Eight neighbouring threads write 128
    // bytes side by side, and a warp takes a chunk: otherwise four of them would meet in the same banks.
    DEVICE void bring(const Columns<4> &x, int n, int K, int thread, int threads) const {
        int column = thread & 3, part = (thread & 4) | (thread >> 3 & 3), chunks = K >> 8;
        if (column >= n) return;
        u32 row = column & 2 ? (column & 1 ? x.row[3] : x.row[2]) : column & 1 ? x.row[1] : x.row[0];
        // Sums and scales: five items of a chunk.
        auto rest_at = [&](int i) {
            int chunk = i / 5;
            return rest_of(i - 5 * chunk, x, row + 256 * chunk);
        };
        auto put_rest_at = [&](int i, const int4 &s) {
            int chunk = i / 5;
            put_rest(space + chunk * CHUNK, i - 5 * chunk, column, s);
        };
        // The first of both, and codes of two chunks at once, are on their way together.
        int first = thread >> 2, step = threads >> 2, across = threads >> 5;
        int4 rest = rest_at(min(first, 5 * chunks - 1));
#pragma unroll 1
        for (int c = thread >> 5; c < chunks; c += 2 * across) {
            const i8 *one = x.codes + (row + 256 * c + place_of(part)), *other = one + 256 * (c + across < chunks ? across : 0);
            uint4 low = codes16(one), high = codes16(one + 32), later = codes16(other), late = codes16(other + 32);
            put_codes(space + c * CHUNK, part, column, low, high);
            if (c + across < chunks) put_codes(space + (c + across) * CHUNK, part, column, later, late);
        }
        if (first < 5 * chunks) put_rest_at(first, rest);
#pragma unroll 1
        for (int i = first + step; i < 5 * chunks; i += step) put_rest_at(i, rest_at(i));
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

// What is there in shared memory, behind what was asked for before.
DEVICE void near_get(Near p, u32 (&to)[4]) {
#ifdef STRATA_ON_CPU
    near_if(true, p, to);
#else
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3},[%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(p) : "memory");
#endif
}
DEVICE void near_get(Near p, u32 (&to)[2]) {
#ifdef STRATA_ON_CPU
    near_if(true, p, to);
#else
    asm volatile("ld.shared.v2.u32 {%0,%1},[%2];" : "=r"(to[0]), "=r"(to[1]) : "r"(p) : "memory");
#endif
}
DEVICE u32 near_word(Near p) {
#ifdef STRATA_ON_CPU
    return *(const u32 *)p;
#else
    u32 v; asm volatile("ld.shared.u32 %0,[%1];" : "=r"(v) : "r"(p) : "memory"); return v;
#endif
}

// `copy` of 16 bytes (gemm/tensor.cuh) if `on`, without a branch.
DEVICE void copy16_if(bool on, Near to, const u8 *from) {
#if defined(STRATA_ON_CPU)
    if (on) copy<16>((void *)to, from);
#elif AMPERE
    asm volatile("{.reg .pred p;\nsetp.ne.u32 p,%2,0;\n@p cp.async.cg.shared.global [%0],[%1],16;}"
                 :: "r"(to), "l"(from), "r"((u32)on) : "memory");
#else
    if (!on) return;
    uint4 v = *(const uint4 *)from;
    asm volatile("st.shared.v4.u32 [%0],{%1,%2,%3,%4};" :: "r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
#endif
}

// Where a thread finds its own of the columns.
// Warps come in pairs: warp h of a pair has lanes 8h .. 8h + 7, and of minima lanes 2h and 2h + 1.
struct HalfPlace {
    Near codes, sums;
    const u8 *scales;
    u32 mine, least;  // whether columns g of b are lanes of this thread, or minima of it

    // column: the one of four that stands in columns g of b.
    DEVICE HalfPlace(const u8 *piece, int h, int column) {
        int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
        codes = near_of(piece + 1024 * h + 16 * (4 * t + column));
        sums = near_of(piece + (HalfColumns::SUMS + 8 * (4 * t + column)));
        scales = piece + (HalfColumns::SCALES + 8 * (t & 1));
        mine = opaque((u32)(t >> 1 == g >> 2));  // else they are found again for every chunk
        least = opaque((u32)(t == 2 * h + (g >> 2)));
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
    enum { TRADED = 10 * 32 * 4 };  // bytes that a warp gives away
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
    // Each warp of a pair ends eight rows: warp h those of d's rows g + 8h. The other's sums go to it.
    DEVICE void give(int h, u8 *space) const {
        float *to = (float *)space + (threadIdx.x & 31);
#pragma unroll
        for (int j = 0; j < 2; j++) {
#pragma unroll
            for (int i = 0; i < 4; i++) to[32 * (4 * j + i)] = h ? v[i >> 1][i & 1][j] : v[i >> 1][i & 1][2 + j];
            to[32 * (8 + j)] = h ? m[j] : m[2 + j];
        }
    }
    // The fixed trees, with what the other warp gave: y of row g + 8h, columns 2 (t mod 2) and the next one.
    DEVICE void rows(int h, const u8 *space, float (&y)[2]) const {
        const float *other = (const float *)space + (threadIdx.x & 31);
#pragma unroll
        for (int j = 0; j < 2; j++) {
            float s[2];
#pragma unroll
            for (int c = 0; c < 2; c++) {
                float low = add32(h ? v[0][c][2 + j] : v[0][c][j], other[32 * (4 * j + c)]);
                float high = add32(h ? v[1][c][2 + j] : v[1][c][j], other[32 * (4 * j + 2 + c)]);
                s[c] = add32(low, high);
                s[c] = add32(s[c], __shfl_xor_sync(ALL_LANES, s[c], 2));
            }
            float least = add32(h ? m[2 + j] : m[j], other[32 * (8 + j)]);
            least = add32(least, __shfl_xor_sync(ALL_LANES, least, 2));
            y[j] = add32(sub32(add32(s[0], s[1]), least), 0.f);
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
