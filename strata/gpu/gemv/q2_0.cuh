// Q2_0: 2-bit codes less 1 in blocks of 64 values. Relaid, field f of byte k of a lane's word is value 4f + k.
#pragma once
#include "gemv/runs.cuh"

struct Q2_0 : Runs<64, 32, 0, 0> {
    typedef Layout<2, 4, 8, 8, 4, 2> Raw;
    struct Step {
        u32 w[8];
        float d;
        NoLeast least;
    };
    struct X {
        uint4 w[2];
        float d;
        int sum[2];
    };
    DEVICE static Step unpack(const Raw &raw, int e, int, const u32 *) {
        Step s;
#pragma unroll
        for (int i = 0; i < 8; i++) s.w[i] = raw.a[2 * e + (i >> 2)] >> 2 * (i & 3) & 0x03030303u;
        s.d = half_of(raw.b, e);
        return s;
    }
    template <int T>
    DEVICE static X read(const Columns<T> &x, int t, u32 first, int q) {
        u32 at = x.row[t] + first + 32 * q;
        int2 sum = *(const int2 *)(x.sums + (at >> 4));
        return {{codes16(x.codes + at), codes16(x.codes + at + 16)}, x.scales[at >> 5], {sum.x, sum.y}};
    }
    template <class V>
    DEVICE static void dot(const Step &s, const X &x, V (&v)[2]) {
        float c = mul32(s.d, x.d);
#pragma unroll
        for (int j = 0; j < 2; j++) v[j] = fma32(whole(run(s.w + 4 * j, x.w[j], WHOLE - x.sum[j])), c, v[j]);
    }
};

template <>
struct Rotates<Q2_0> {
    static const int DEPTH = 2;
};
