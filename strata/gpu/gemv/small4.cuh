// 4-bit codes in blocks of 32 values (Q4_0, Q4_1, IQ4_NL, MXFP4) and of 64 (NVFP4).
#pragma once
#include "gemv/small.cuh"

struct Q4_0 : HalvesFrom<SIXTEENTHS, 0> {
    typedef Layout<2, 4, 8, 8, 4, 2> Raw;
    DEVICE static Step unpack(const Raw &raw, int e, int, const u32 *) {
        Step s;
#pragma unroll
        for (int j = 0; j < 2; j++) {
            u32 w = raw.a[2 * e + j];
            s.low[j] = (w << 4 & 0xf0f0f0f0u) ^ 0x80808080u;  // 16 (code - 8)
            s.high[j] = (w & 0xf0f0f0f0u) ^ 0x80808080u;
        }
        s.d = half_of(raw.b, e);
        return s;
    }
};

struct Q4_1 : HalvesFrom<WHOLE, 1> {
    typedef Layout<2, 4, 8, 8, 4, 4> Raw;
    DEVICE static Step unpack(const Raw &raw, int e, int, const u32 *) {
        Step s;
#pragma unroll
        for (int j = 0; j < 2; j++) {
            u32 w = raw.a[2 * e + j];
            s.low[j] = w & 0x0f0f0f0fu;
            s.high[j] = w >> 4 & 0x0f0f0f0fu;
        }
        s.d = half_of(raw.b, 2 * e);
        s.least.words[0] = raw.b[e] >> 16;
        return s;
    }
};

template <>
struct LoneNear<Q4_1> {  // four columns spill on sm_120 beside it
    static const bool VALUE = false;
};

// Relaid words hold the codes of values 4j..4j+3 in their low half and of 16+4j.. in their high half.
struct IQ4_NL : HalvesFrom<WHOLE, 0> {
    typedef Layout<2, 4, 8, 8, 4, 2> Raw;
    DEVICE static Step unpack(const Raw &raw, int e, int, const u32 *) {
        Step s;
#pragma unroll
        for (int j = 0; j < 2; j++) look_up_nl(raw.a[2 * e + j], s.low[j], s.high[j]);
        s.d = half_of(raw.b, e);
        return s;
    }
};


// The same for one column.
struct IQ4_NL_ALONE : Halves<0> {
    typedef IQ4_NL::Raw Raw;
    struct Step {
        u32 low[2][2], high[2][2];
        float d;
        NoLeast least;
    };
    DEVICE static Step unpack(const Raw &raw, int e, int, const u32 *) {
        Step s;
#pragma unroll
        for (int j = 0; j < 2; j++) look_up_both(raw.a[2 * e + j], s.low[j], s.high[j]);
        s.d = half_of(raw.b, e);
        return s;
    }
    DEVICE static int lane(const u32 (&low)[2], const u32 (&high)[2], u32 x_low, u32 x_high) {
        return dot4(high[1], x_high, dot4(high[0], x_high, dot4(low[1], x_low, dot4(low[0], x_low, WHOLE))));
    }
    template <class V>
    DEVICE static void dot(const Step &s, const X &x, V (&v)[2]) {
        float c = mul32(s.d, x.d);
        v[0] = fma32(whole(lane(s.low[0], s.high[0], x.low.x, x.high.x)), c, v[0]);
        v[1] = fma32(whole(lane(s.low[1], s.high[1], x.low.y, x.high.y)), c, v[1]);
    }
};
template <>
struct ForColumns<IQ4_NL, 1> {
    typedef IQ4_NL_ALONE Type;
};

struct MXFP4 : HalvesFrom<WHOLE, 0> {
    typedef Layout<2, 4, 8, 8, 4, 1> Raw;
    DEVICE static Step unpack(const Raw &raw, int e, int, const u32 *) {
        Step s;
#pragma unroll
        for (int j = 0; j < 2; j++) look_up_e2m1(raw.a[2 * e + j], s.low[j], s.high[j]);
        u32 exponent = raw.b[0] >> 8 * e & 255;
        s.d = float_of(exponent < 2 ? 0x00200000u << exponent : (exponent - 1) << 23);  // 2^(exponent - 128)
        return s;
    }
};

// Two blocks of 64 values a step; thread q takes sub-block q mod 4, values 0..7 and 8..15 of it, and its scale.
struct NVFP4 {
    enum { VALUES = 64, MINIMUM = 0, ENTRIES = 0, TABLE = 0 };
    typedef Layout<2, 2, 8, 8, 8, 1> Raw;
    struct Step {
        u32 low[2], high[2];
        float d;
        NoLeast least;
    };
    struct X {
        uint4 w;
        float d;
    };
    DEVICE static Step unpack(const Raw &raw, int e, int, const u32 *) {
        Step s;
#pragma unroll
        for (int j = 0; j < 2; j++) look_up_e2m1(raw.a[2 * e + j], s.low[j], s.high[j]);
        u32 byte = raw.b[0] >> 8 * e & 255, code = byte & 127;
        // Half of an E4M3: 2^(exponent - 8) (1 + mantissa / 8), or mantissa 2^-10 with exponent 0; the byte 0x7f is 0.
        float tiny = sub32(float_of(0x3c000000u + (code << 20)), 0.0078125f);
        s.d = byte == 127 ? 0.f : code < 8 ? tiny : float_of((119u << 23) + (code << 20));
        return s;
    }
    template <int T>
    DEVICE static X read(const Columns<T> &x, int t, u32 first, int q) {
        u32 at = x.row[t] + first + 16 * q;
        return {codes16(x.codes + at), x.scales[at >> 5]};
    }
    template <class V>
    DEVICE static void dot(const Step &s, const X &x, V (&v)[2]) {
        float c = mul32(s.d, x.d);
        v[0] = fma32(whole(dot4(s.high[0], x.w.z, dot4(s.low[0], x.w.x, WHOLE))), c, v[0]);
        v[1] = fma32(whole(dot4(s.high[1], x.w.w, dot4(s.low[1], x.w.y, WHOLE))), c, v[1]);
    }
};
