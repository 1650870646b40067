// Super-blocks of 256 values with integer sub-scales: Q2_K to Q6_K. Thread q takes four groups of eight neighbouring
// values, 16 bytes of each being spread over eight threads; group i has one sub-scale.
#pragma once
#include "gemv/core.cuh"

// OFFSETS: where group i begins. DIRECT: sums below 2^22, which `whole` converts.
template <class Offsets, bool DIRECT, int MINIMUM_>
struct Scaled {
    enum { VALUES = 256, MINIMUM = MINIMUM_, ENTRIES = 0, TABLE = 0 };
    // w[2i + j]: group i of lane 2q + j. Minima meet sums of 16 codes one by one, or in pairs.
    struct Step {
        u32 w[8];
        int sub[Offsets::SUBS];
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
        X v;
#pragma unroll
        for (int i = 0; i < 4; i++) v.w[i] = codes8(x.codes + at + Offsets::of(i, q));
        v.d = __ldg(x.scales + (at >> 8));
        Offsets::sums(x.sums + (at >> 4), q, v.sum);
        return v;
    }
    DEVICE static float value(int sum) { return DIRECT ? whole(WHOLE + sum) : i32_f32(sum); }
    template <class V>
    DEVICE static void dot(const Step &s, const X &x, V (&v)[2]) {
        float c = mul32(s.d, x.d);
        int first = 0, second = 0;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int sub = Offsets::scale(s.sub, i);
            first += sub * dot4(s.w[2 * i], x.w[i].x, 0);
            second += sub * dot4(s.w[2 * i + 1], x.w[i].y, 0);
        }
        v[0] = fma32(value(first), c, v[0]);
        v[1] = fma32(value(second), c, v[1]);
    }
    template <class V>
    DEVICE static void add_minimum(const Least<Offsets::WORDS> &least, const X &x, V &m) {
        int sum = 0;
#pragma unroll
        for (int i = 0; i < Offsets::MINIMA; i++) sum += Offsets::minimum(least.min, i) * x.sum[i];
        m = fma32(whole(WHOLE + sum), mul32(least.scale, x.d), m);
    }
};

// Lane 8h + g: values 32s + 4g of the sub-blocks s = 2h, 2h + 1, 2h + 4, 2h + 5.
struct Pairs {
    enum { MINIMA = 2, WORDS = 2, SUBS = 4 };
    DEVICE static int scale(const int *sub, int i) { return sub[i]; }
    DEVICE static int minimum(const u32 *words, int i) { return (int)words[i]; }
    DEVICE static int of(int i, int q) { return 64 * (q >> 2) + 8 * (q & 3) + 32 * (i & 1) + 128 * (i >> 1); }
    DEVICE static void sums(const int *p, int q, int (&sum)[4]) {
        int4 s = __ldg((const int4 *)p + (q >> 1));
        sum[0] = s.x + s.y, sum[1] = s.z + s.w;
    }
};

// Lane 8h + g: values 128h + 32i + 4g. Scales and minima stay packed as nibbles: they would take too many registers.
struct Quarters {
    enum { MINIMA = 4, WORDS = 1, SUBS = 1 };
    DEVICE static int scale(const int *sub, int i) { return sub[0] >> 4 * i & 15; }
    DEVICE static int minimum(const u32 *words, int i) { return words[0] >> 4 * i & 15; }
    DEVICE static int of(int i, int q) { return 128 * (q >> 2) + 8 * (q & 3) + 32 * i; }
    DEVICE static void sums(const int *p, int q, int (&sum)[4]) {
        int2 low = __ldg((const int2 *)p + (q >> 1)), high = __ldg((const int2 *)p + 4 + (q >> 1));
        sum[0] = low.x, sum[1] = low.y, sum[2] = high.x, sum[3] = high.y;
    }
};
struct QuartersOnly : Quarters {
    enum { SUBS = 4 };
    DEVICE static int scale(const int *sub, int i) { return sub[i]; }
    DEVICE static void sums(const int *, int, int (&)[4]) {}
};

// Lane l: values 64i + 4l.
struct Strides {
    enum { MINIMA = 0, WORDS = 1, SUBS = 4 };
    DEVICE static int scale(const int *sub, int i) { return sub[i]; }
    DEVICE static int of(int i, int q) { return 64 * i + 8 * q; }
    DEVICE static void sums(const int *, int, int (&)[4]) {}
};

DEVICE int byte_of(u32 w, int i) { return w >> 8 * i & 255; }

// Q4_K and Q5_K: the 16 bytes d, dmin, eight scales and eight minima of 6 bits, as they are in the file.
template <class Step>
DEVICE void six_bit_scales(const u32 *head, int q, Step &s) {
    int half = 16 * (q >> 2), pair = 16 * (q >> 1 & 1);
    u32 low = (head[1] & 0x3f3f3f3fu) >> half;
    u32 high = ((head[3] & 0x0f0f0f0fu) | (head[1] >> 2 & 0x30303030u)) >> half;
    s.sub[0] = byte_of(low, 0), s.sub[1] = byte_of(low, 1);
    s.sub[2] = byte_of(high, 0), s.sub[3] = byte_of(high, 1);
    u32 min = q < 4 ? head[2] & 0x3f3f3f3fu : (head[3] >> 4 & 0x0f0f0f0fu) | (head[2] >> 2 & 0x30303030u);
    s.least.min[0] = byte_of(min >> pair, 0), s.least.min[1] = byte_of(min >> pair, 1);
    s.d = half_f32((u16)head[0]);
    s.least.scale = half_f32((u16)(head[0] >> 16));
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
        s.sub[0] = (int)raw.b[0];
        s.least.min[0] = raw.b[0] >> 16;
        s.d = half_of(raw.c, 0);
        s.least.scale = half_of(raw.c, 1);
        return s;
    }
};

// Third bits as the fifth ones of Q5_K, stored inverted: a byte is its two low bits, less 4 where that bit is 1.
// Scales: nibbles of 16 bits and two-bit fields of 8 bits.
struct Q3_K : Scaled<QuartersOnly, true, 0> {
    typedef Layout<2, 1, 8, 8, 8, 4, 4, 2, 4, 1, 1, 2> Raw;
    DEVICE static Step unpack(const Raw &raw, int e, int, const u32 *) {
        Step s;
        u32 low = raw.c[0] >> 16 * e, top = raw.d[0] >> 8 * e;
#pragma unroll
        for (int i = 0; i < 4; i++) {
#pragma unroll
            for (int j = 0; j < 2; j++) {
                u32 third = raw.b[e] >> (4 * j + i) & 0x01010101u;
                s.w[2 * i + j] = (raw.a[2 * e + j] >> 2 * i & 0x03030303u) + third * 0xfcu;
            }
            s.sub[i] = (int)((low >> 4 * i & 15) | (top >> 2 * i & 3) << 4) - 32;
        }
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
            s.sub[i] = (int)(i8)(raw.d[e] >> 8 * i);
        }
        s.d = half_of(raw.e, e);
        return s;
    }
};
