// Formats whose lanes take runs of 16 neighbouring values: 256 values a step, thread q takes values 32q..32q+31.
#pragma once
#include "gemv/core.cuh"

template <int VALUES_, int GROUP, int ENTRIES_, int TABLE_>
struct Runs {
    enum { VALUES = VALUES_, MINIMUM = 0, ENTRIES = ENTRIES_, TABLE = TABLE_ };
    // w[0..3] of lane 2q, w[4..7] of lane 2q + 1.
    struct Step {
        u32 w[8];
        float d[2];
        NoLeast least;
    };
    struct X {
        uint4 w[2];
        float d;
    };
    template <int T>
    DEVICE static X read(const Columns<T> &x, int t, u32 first, int q) {
        u32 at = x.row[t] + first + 32 * q;
        return {{codes16(x.codes + at), codes16(x.codes + at + 16)}, x.scales[at / GROUP]};
    }
    DEVICE static int run(const u32 *w, const uint4 &x, int start) {
        return dot4(w[3], x.w, dot4(w[2], x.z, dot4(w[1], x.y, dot4(w[0], x.x, start))));
    }
    template <class V>
    DEVICE static void dot(const Step &s, const X &x, V (&v)[2]) {
#pragma unroll
        for (int j = 0; j < 2; j++)
            v[j] = fma32(whole(run(s.w + 4 * j, x.w[j], WHOLE)), mul32(s.d[j], x.d), v[j]);
    }
};
