// Expansion of blocks of 32 and 64 values, of super-blocks with integer scales, and of IQ4_XS.
#include "gemm/expand.cuh"
#include "gemv/iq4_xs.cuh"
#include "gemv/k.cuh"
#include "gemv/q2_0.cuh"
#include "gemv/q8_0.cuh"
#include "gemv/small4.cuh"
#include "gemv/small5.cuh"

// Blocks of 32 values in two halves. UNITS: bytes are that many times the integer.
template <class F, int UNITS, int SIGN>
struct OfHalves {
    enum { G = 32, MIN = SIGN != 0 };
    DEVICE static void put(const typename F::Raw &, const typename F::Step &s, int, int q, const Spread &to) {
        int at = 32 * (q >> 1) + 8 * (q & 1);
        to.eight(at, s.low[0], s.low[1]);
        to.eight(at + 16, s.high[0], s.high[1]);
        if (q & 1) return;
        to.scale(q >> 1, mul32(s.d, 1.f / UNITS));
        if constexpr (MIN) to.minimum(q >> 1, half_f32((u16)s.least.words[0]));
    }
};
template <> struct Parts<Q4_0> : OfHalves<Q4_0, 16, 0> {};
template <> struct Parts<Q4_1> : OfHalves<Q4_1, 1, 1> {};
template <> struct Parts<IQ4_NL> : OfHalves<IQ4_NL, 1, 0> {};
template <> struct Parts<MXFP4> : OfHalves<MXFP4, 1, 0> {};
template <> struct Parts<Q5_0> : OfHalves<Q5_0, 8, 0> {};
template <> struct Parts<Q5_1> : OfHalves<Q5_1, 1, 1> {};

template <>
struct Parts<NVFP4> {
    enum { G = 16, MIN = 0 };
    DEVICE static void put(const NVFP4::Raw &, const NVFP4::Step &s, int, int q, const Spread &to) {
        to.sixteen(16 * q, s.low[0], s.low[1], s.high[0], s.high[1]);
        to.scale(q, s.d);
    }
};

template <>
struct Parts<Q8_0> {
    enum { G = 32, MIN = 0 };
    DEVICE static void put(const Q8_0::Raw &, const Q8_0::Step &s, int, int q, const Spread &to) {
        to.eight(8 * q, s.w[0], s.w[1]);
        if ((q & 3) == 0) to.scale(q >> 2, s.d);
    }
};

template <>
struct Parts<Q2_0> {
    enum { G = 32, MIN = 0 };
    DEVICE static void put(const Q2_0::Raw &, const Q2_0::Step &s, int, int q, const Spread &to) {
#pragma unroll
        for (int i = 0; i < 8; i += 4)
            to.sixteen(32 * q + 4 * i, less(s.w[i], 1), less(s.w[i + 1], 1), less(s.w[i + 2], 1), less(s.w[i + 3], 1));
        to.scale(q, s.d);
    }
};

template <>
struct Parts<IQ4_XS> {
    enum { G = 32, MIN = 0 };
    DEVICE static void put(const IQ4_XS::Raw &, const IQ4_XS::Step &s, int, int q, const Spread &to) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int at = 128 * i + 32 * (q >> 1) + 8 * (q & 1);
            to.eight(at, s.low[i][0], s.low[i][1]);
            to.eight(at + 16, s.high[i][0], s.high[i][1]);
            if ((q & 1) == 0) to.scale(4 * i + (q >> 1), mul32(s.d, i32_f32(s.sub[i])));
        }
    }
};

// Super-blocks: codes and scales of a thread's four groups of eight values.
template <class F, class Offsets, int G_>
struct OfScaled {
    enum { G = G_, MIN = 0 };
    DEVICE static void codes_and_scales(const typename F::Step &s, int q, const Spread &to) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int at = Offsets::of(q) + Offsets::group(i);
            to.eight(at, s.w[2 * i], s.w[2 * i + 1]);
            if (at % G == 0) to.scale(at / G, mul32(s.d, i32_f32(F::scale(s, i))));
        }
    }
    DEVICE static void put(const typename F::Raw &, const typename F::Step &s, int, int q, const Spread &to) {
        codes_and_scales(s, q, to);
    }
};
template <> struct Parts<Q3_K> : OfScaled<Q3_K, QuartersOnly, 16> {};
template <> struct Parts<Q6_K> : OfScaled<Q6_K, Strides, 16> {};

// Minima of sub-blocks of 32: thread q writes that of sub-block q. head: d, dmin, scales and minima of 6 bits.
DEVICE void six_bit_minimum(const u32 *head, int q, const Spread &to) {
    u32 low = head[2] & 0x3f3f3f3fu, high = (head[3] >> 4 & 0x0f0f0f0fu) | (head[2] >> 2 & 0x30303030u);
    int minimum = byte_of(q < 4 ? low : high, q & 3);
    to.minimum(q, -mul32(half_f32((u16)(head[0] >> 16)), i32_f32(minimum)));
}
template <>
struct Parts<Q4_K> : OfScaled<Q4_K, Pairs, 32> {
    enum { MIN = 1 };
    DEVICE static void put(const Q4_K::Raw &raw, const Q4_K::Step &s, int, int q, const Spread &to) {
        codes_and_scales(s, q, to);
        six_bit_minimum(raw.b, q, to);
    }
};
template <>
struct Parts<Q5_K> : OfScaled<Q5_K, Pairs, 32> {
    enum { MIN = 1 };
    DEVICE static void put(const Q5_K::Raw &raw, const Q5_K::Step &s, int, int q, const Spread &to) {
        codes_and_scales(s, q, to);
        six_bit_minimum(raw.c, q, to);
    }
};
// Minima of sub-blocks of 16: threads 2i and 2i + 1 have those of sub-blocks 8h + 2i + u as nibbles 2h + u.
template <>
struct Parts<Q2_K> : OfScaled<Q2_K, Quarters, 16> {
    enum { MIN = 1 };
    DEVICE static void put(const Q2_K::Raw &raw, const Q2_K::Step &s, int, int q, const Spread &to) {
        codes_and_scales(s, q, to);
        float scale = half_f32((u16)(raw.c[0] >> 16));
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int minimum = raw.b[0] >> (16 + 4 * (2 * h + (q & 1))) & 15;
            to.minimum(8 * h + q, -mul32(scale, i32_f32(minimum)));
        }
    }
};
