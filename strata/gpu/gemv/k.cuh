// Super-blocks of 256 values with integer sub-scales: Q2_K to Q6_K. Thread q takes four groups of eight neighbouring
// values, 16 bytes of each being spread over eight threads; group i has one sub-scale.
#pragma once
#include "gemv/core.cuh"

// The sum of a group's four products fits into 16 bits: two of them side by side meet two scales at once.
//
// OFFSETS: where group i begins. DIRECT: sums below 2^22, which `whole` converts.
template <class Offsets, bool DIRECT, int MINIMUM_>
struct Scaled {
    enum { VALUES = 256, MINIMUM = MINIMUM_, ENTRIES = 0, TABLE = 0 };
    // w[2i + j]: group i of lane 2q + j. scales: signed bytes, byte i of group i.
    struct Step {
        u32 w[8], scales;
        float d;
        Least<Offsets::WORDS> least;
    };
    struct X {
        uint2 w[4];
        int sum[4];
        float d;
    };
    template <int T>
    DEVICE static X read(const Columns<T> &x, int t, u32 first, int q) {
        u32 at = x.row[t] + first;
        const i8 *codes = x.codes + (at + Offsets::of(q));
        X v;
#pragma unroll
        for (int i = 0; i < 4; i++) v.w[i] = codes8(codes + Offsets::group(i));
        v.d = x.scales[at >> 8];
        Offsets::sums(x.sums + (at >> 4), q, v.sum);
        return v;
    }
    DEVICE static int scale(const Step &s, int i) { return (i8)(s.scales >> 8 * i); }
    DEVICE static float value(int sum) { return DIRECT ? whole(sum) : i32_f32(sum); }
    DEVICE static int lane(const Step &s, const X &x, int j) {
        int dots[4];
#pragma unroll
        for (int i = 0; i < 4; i++) dots[i] = dot4(s.w[2 * i + j], j ? x.w[i].y : x.w[i].x, 0);
        int sum = dot2_low(permute(dots[0], dots[1], 0x5410), s.scales, DIRECT ? WHOLE : 0);
        return dot2_high(permute(dots[2], dots[3], 0x5410), s.scales, sum);
    }
    template <class V>
    DEVICE static void dot(const Step &s, const X &x, V (&v)[2]) {
        float c = mul32(s.d, x.d);
        v[0] = fma32(value(lane(s, x, 0)), c, v[0]);
        v[1] = fma32(value(lane(s, x, 1)), c, v[1]);
    }
    template <class V>
    DEVICE static void add_minimum(const Least<Offsets::WORDS> &least, int q, const X &x, V &m) {
        u32 bytes = Offsets::minima(least.words, q);
        int sum = dot2_low(permute(x.sum[0], x.sum[1], 0x5410), bytes, WHOLE);
        if (Offsets::MINIMA == 4) sum = dot2_high(permute(x.sum[2], x.sum[3], 0x5410), bytes, sum);
        m = fma32(whole(sum), mul32(half_f32((u16)(least.words[0] >> 16)), x.d), m);
    }
};

// The four low nibbles of a word, each as the low half of a byte.
DEVICE u32 four_nibbles(u32 w) {
    u32 pairs = permute(w, 0, 0x4140);
    return (pairs | pairs << 4) & 0x0f0f0f0fu;
}

// Lane 8h + g: values 32s + 4g of the sub-blocks s = 2h, 2h + 1, 2h + 4, 2h + 5. For the minima, words of the block's head:
// d and dmin, low bits, high bits.
struct Pairs {
    enum { MINIMA = 2, WORDS = 3 };
    DEVICE static int of(int q) { return 64 * (q >> 2) + 8 * (q & 3); }
    DEVICE static int group(int i) { return 32 * (i & 1) + 128 * (i >> 1); }
    DEVICE static u32 minima(const u32 *words, int q) {
        u32 both = permute(words[1], words[2], q >> 1 & 1 ? 0x7632 : 0x5410);
        return ((q < 4 ? both : both >> 20) & (q < 4 ? 0x3f3fu : 0x0f0fu)) | (q < 4 ? 0u : both >> 2 & 0x3030u);
    }
    DEVICE static void sums(const int *p, int q, int (&sum)[4]) {
        int4 s = ((const int4 *)p)[q >> 1];
        sum[0] = s.x + s.y, sum[1] = s.z + s.w;
    }
};

// Lane 8h + g: values 128h + 32i + 4g. For the minima, words of two halves: nibbles and dmin.
struct Quarters {
    enum { MINIMA = 4, WORDS = 2 };
    DEVICE static int of(int q) { return 128 * (q >> 2) + 8 * (q & 3); }
    DEVICE static int group(int i) { return 32 * i; }
    DEVICE static u32 minima(const u32 *words, int) { return four_nibbles(words[1] >> 16); }
    DEVICE static void sums(const int *p, int q, int (&sum)[4]) {
        int2 low = ((const int2 *)p)[q >> 1], high = ((const int2 *)p)[4 + (q >> 1)];
        sum[0] = low.x, sum[1] = low.y, sum[2] = high.x, sum[3] = high.y;
    }
};
struct QuartersOnly : Quarters {
    enum { WORDS = 0 };
    DEVICE static void sums(const int *, int, int (&)[4]) {}
};

// Lane l: values 64i + 4l.
struct Strides {
    enum { MINIMA = 0, WORDS = 0 };
    DEVICE static int of(int q) { return 8 * q; }
    DEVICE static int group(int i) { return 64 * i; }
    DEVICE static void sums(const int *, int, int (&)[4]) {}
};

DEVICE int byte_of(u32 w, int i) { return w >> 8 * i & 255; }

// Q4_K and Q5_K: the 16 bytes d, dmin, eight scales and eight minima of 6 bits, as they are in the file.
template <class Step>
DEVICE void six_bit_scales(const u32 *head, int q, Step &s) {
    u32 both = permute(head[1], head[3], q & 4 ? 0x7632 : 0x5410);  // bytes 0 and 1 have the top bits of bytes 2 and 3
    s.scales = (both & 0x0f0f3f3fu) | (both << 14 & 0x30300000u);
    s.d = half_f32((u16)head[0]);
    s.least = {{head[0], head[2], head[3]}};
}

struct Q4_K : Scaled<Pairs, true, -1> {
    typedef Layout<1, 1, 8, 16, 1, 16> Raw;
    DEVICE static Step unpack(const Raw &raw, int, int q, const u32 *) {
        Step s;
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int j = 0; j < 2; j++) s.w[2 * i + j] = raw.a[2 * (i >> 1) + j] >> 4 * (i & 1) & 0x0f0f0f0fu;
        six_bit_scales(raw.b, q, s);
        return s;
    }
};

template <>
struct Rotates<Q4_K> {
    static const int DEPTH = 3;
};

// Fifth bits: byte k of a thread's word belongs to byte k of its codes, bit 4j + i to lane 2q + j and group i.
struct Q5_K : Scaled<Pairs, true, -1> {
    typedef Layout<1, 1, 8, 16, 8, 4, 1, 16> Raw;
    DEVICE static Step unpack(const Raw &raw, int, int q, const u32 *) {
        Step s;
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                int bit = 4 * j + i;
                u32 fifth = bit < 4 ? raw.b[0] << (4 - bit) : raw.b[0] >> (bit - 4);
                s.w[2 * i + j] = (raw.a[2 * (i >> 1) + j] >> 4 * (i & 1) & 0x0f0f0f0fu) | (fifth & 0x10101010u);
            }
        six_bit_scales(raw.c, q, s);
        return s;
    }
};

template <>
struct Rotates<Q5_K> {
    static const int DEPTH = 2;
};

// Scales and minima are nibbles of 16 bits each, in the order of the groups and of the sums they meet. One super-block
// a chunk: two take more registers than four columns leave.
struct Q2_K : Scaled<Quarters, true, -1> {
    typedef Layout<1, 1, 8, 8, 4, 4, 1, 4> Raw;
    DEVICE static Step unpack(const Raw &raw, int, int, const u32 *) {
        Step s;
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int j = 0; j < 2; j++) s.w[2 * i + j] = raw.a[j] >> 2 * i & 0x03030303u;
        s.scales = four_nibbles(raw.b[0]);
        s.d = half_of(raw.c, 0);
        s.least = {{raw.c[0], raw.b[0]}};
        return s;
    }
};

// Third bits as the fifth ones of Q5_K, stored inverted: a byte is its two low bits, less 4 where that bit is 1.
// Scales: nibbles of 16 bits and two-bit fields of 8 bits.
struct Q3_K : Scaled<QuartersOnly, true, 0> {
    typedef Layout<2, 1, 8, 8, 8, 4, 4, 2, 4, 1, 1, 2> Raw;
    DEVICE static Step unpack(const Raw &raw, int e, int, const u32 *) {
        Step s;
        u32 low = raw.c[0] >> 16 * e, top = raw.d[0] >> 8 * e & 255;
#pragma unroll
        for (int i = 0; i < 4; i++) {
#pragma unroll
            for (int j = 0; j < 2; j++) {
                u32 third = raw.b[e] >> (4 * j + i) & 0x01010101u;
                s.w[2 * i + j] = (raw.a[2 * e + j] >> 2 * i & 0x03030303u) + third * 0xfcu;
            }
        }
        // Fields of two bits, each to bits 4 and 5 of a byte.
        top = (top | top << 12) & 0x000f000fu;
        top = (top << 4 | top << 10) & 0x30303030u;
        s.scales = less(four_nibbles(low) | top, 32);
        s.d = half_of(raw.e, e);
        return s;
    }
};

// Two words of low nibbles per lane (groups 0 and 1, 2 and 3), one word of two-bit fields, field i of group i.
struct Q6_K : Scaled<Strides, false, 0> {
    typedef Layout<2, 1, 8, 8, 8, 8, 8, 8, 4, 4, 1, 2> Raw;
    DEVICE static Step unpack(const Raw &raw, int e, int, const u32 *) {
        Step s;
#pragma unroll
        for (int i = 0; i < 4; i++) {
#pragma unroll
            for (int j = 0; j < 2; j++) {
                u32 low = (i < 2 ? raw.a[2 * e + j] : raw.b[2 * e + j]) >> 4 * (i & 1) & 0x0f0f0f0fu;
                u32 top = raw.c[2 * e + j];
                top = (i < 2 ? top << (4 - 2 * i) : top >> (2 * i - 4)) & 0x30303030u;
                s.w[2 * i + j] = less(low | top, 32);
            }
        }
        s.scales = raw.d[e];
        s.d = half_of(raw.e, e);
        return s;
    }
};

template <>
struct Rotates<Q6_K> {
    static const int DEPTH = 1;
};

template <>
struct Rotates<Q2_K> {
    static const int DEPTH = 2;
};
