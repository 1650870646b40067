// Q8_0: two blocks of 32 values a step, thread q takes eight neighbouring values.
#pragma once
#include "gemv/core.cuh"

struct Q8_0 {
    enum { VALUES = 32, MINIMUM = 0, ENTRIES = 0, TABLE = 0 };
    typedef Layout<2, 2, 8, 8, 2, 2> Raw;
    struct Step {
        u32 w[2];
        float d;
        NoLeast least;
    };
    struct X {
        uint2 w;
        float d;
    };
    DEVICE static Step unpack(const Raw &raw, int e, int, const u32 *) {
        return {{raw.a[2 * e], raw.a[2 * e + 1]}, half_of(raw.b, e), {}};
    }
    template <int T>
    DEVICE static X read(const Columns<T> &x, int t, u32 first, int q) {
        u32 at = x.row[t] + first + 8 * q;
        return {codes8(x.codes + at), x.scales[at >> 5]};
    }
    template <class V>
    DEVICE static void dot(const Step &s, const X &x, V (&v)[2]) {
        float c = mul32(s.d, x.d);
        v[0] = fma32(whole(dot4(s.w[0], x.w.x, WHOLE)), c, v[0]);
        v[1] = fma32(whole(dot4(s.w[1], x.w.y, WHOLE)), c, v[1]);
    }
};

template <>
struct Rotates<Q8_0> {
    static const int DEPTH = 4;
};
