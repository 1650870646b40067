// IQ4_XS: super-blocks of 256 codebook values. Thread q takes half of the sub-blocks q / 2 and q / 2 + 4.
#pragma once
#include "gemv/small.cuh"

struct IQ4_XS {
    enum { VALUES = 256, MINIMUM = 0, ENTRIES = 0, TABLE = 0 };
    typedef Layout<1, 1, 8, 16, 1, 8> Raw;
    // low[s], high[s] of lanes 2q, 2q + 1 in sub-block q / 2 + 4s.
    struct Step {
        u32 low[2][2], high[2][2];
        int sub[2];
        float d;
        NoLeast least;
    };
    struct X {
        uint2 low[2], high[2];
        float d;
    };
    DEVICE static Step unpack(const Raw &raw, int, int q, const u32 *) {
        Step s;
#pragma unroll
        for (int i = 0; i < 2; i++) {
#pragma unroll
            for (int j = 0; j < 2; j++) look_up_nl(raw.a[2 * i + j], s.low[i][j], s.high[i][j]);
            int sub = (q >> 1) + 4 * i;
            s.sub[i] = (int)((raw.b[1] >> 4 * sub & 15) | (raw.b[0] >> (16 + 2 * sub) & 3) << 4) - 32;
        }
        s.d = half_f32((u16)raw.b[0]);
        return s;
    }
    template <int T>
    DEVICE static X read(const Columns<T> &x, int t, u32 first, int q) {
        u32 at = x.row[t] + first;
        const i8 *codes = x.codes + at + 32 * (q >> 1) + 8 * (q & 1);
        return {{codes8(codes), codes8(codes + 128)}, {codes8(codes + 16), codes8(codes + 144)},
                x.scales[at >> 8]};
    }
    template <class V>
    DEVICE static void dot(const Step &s, const X &x, V (&v)[2]) {
        float c = mul32(s.d, x.d);
        int first = 0, second = 0;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            first += s.sub[i] * dot4(s.high[i][0], x.high[i].x, dot4(s.low[i][0], x.low[i].x, 0));
            second += s.sub[i] * dot4(s.high[i][1], x.high[i].y, dot4(s.low[i][1], x.low[i].y, 0));
        }
        v[0] = fma32(i32_f32(first), c, v[0]);  // up to 8.3 million: too large for `whole`
        v[1] = fma32(i32_f32(second), c, v[1]);
    }
};

template <>
struct Rotates<IQ4_XS> {
    static const int DEPTH = 2;
};
