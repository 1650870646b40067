// Blocks of 32 and 64 values: how their integers meet activations and lanes.
#pragma once
#include "gemv/core.cuh"

// Blocks of 32 values whose 16 code bytes hold values 0..15 and 16..31; four blocks a step, thread q takes bytes
// 8 (q mod 2) .. + 7 of block q / 2. SUM: what turns an integer sum, started at START, into a float.
template <int MINIMUM_>
struct Halves {
    enum { VALUES = 32, MINIMUM = MINIMUM_, ENTRIES = 0, TABLE = 0 };
    struct Step {
        u32 low[2], high[2];
        float d;
        Least<MINIMUM != 0> least;  // the minimum's scale, its bits
    };
    struct X {
        uint2 low, high;
        float d;
        int sum;
    };
    template <int T>
    DEVICE static X read(const Columns<T> &x, int t, u32 first, int q) {
        u32 step = x.row[t] + first, block = step / 32 + (q >> 1);
        const i8 *codes = x.codes + step + 32 * (q >> 1) + 8 * (q & 1);
        X v = {codes8(codes), codes8(codes + 16), x.scales[block], 0};
        if constexpr (MINIMUM != 0) {
            int2 s = *(const int2 *)(x.sums + 2 * block);
            v.sum = s.x + s.y;
        }
        return v;
    }
};

template <int START, int MINIMUM_>
struct HalvesFrom : Halves<MINIMUM_> {
    typedef Halves<MINIMUM_> Base;
    DEVICE static float sum_of(int bits) {
        return START == SIXTEENTHS ? sixteenths(bits) : START == EIGHTHS ? eighths(bits) : whole(bits);
    }
    template <class V>
    DEVICE static void dot(const typename Base::Step &s, const typename Base::X &x, V (&v)[2]) {
        float c = mul32(s.d, x.d);
        v[0] = fma32(sum_of(dot4(s.high[0], x.high.x, dot4(s.low[0], x.low.x, START))), c, v[0]);
        v[1] = fma32(sum_of(dot4(s.high[1], x.high.y, dot4(s.low[1], x.low.y, START))), c, v[1]);
    }
    template <class V>
    DEVICE static void add_minimum(const Least<1> &least, int, const typename Base::X &x, V &m) {
        m = fma32(whole(WHOLE + x.sum), mul32(half_f32((u16)least.words[0]), x.d), m);
    }
};

// Zero, but the assembler does not know: a constant with it stays in a register, others are written anew for every use.
DEVICE u32 unknown_zero() {
#ifdef STRATA_ON_CPU
    return 0;
#else
    u32 n;
    asm("mov.u32 %0,%%dynamic_smem_size;" : "=r"(n));
    return n >> 31;
#endif
}
// The same in a register of each thread, where an operand can be no uniform one.
DEVICE u32 own_zero() {
#ifdef STRATA_ON_CPU
    return 0;
#else
    u32 n;
    asm("mov.u32 %0,%%tid.x;" : "=r"(n));
    return n >> 31;
#endif
}

// A codebook of 16 bytes in four words: the bytes of nibbles 0..3 and 4..7 of w.
DEVICE void look_up(u32 w, u32 c0, u32 c1, u32 c2, u32 c3, u32 &low, u32 &high) {
    u32 zero = unknown_zero(), shift = 0x10000u ^ zero;
    c0 ^= zero, c1 ^= zero, c2 ^= zero, c3 ^= zero;
    u32 index = w & 0x77777777u, side = (w >> 1 & 0x44444444u) | 0x32103210u;
    low = permute(permute(c0, c1, index), permute(c2, c3, index), side);
    index = high_product(index, shift), side = high_product(side, shift);  // shifts by 16 where permutes do not run
    high = permute(permute(c0, c1, index), permute(c2, c3, index), side);
}
// IQ4_NL's values as a sum of two lookups: of negative values, -1 for other codes, and of positive values plus 1, 0 for
// other codes, by the signs that a permute repeats. Fewer permutes, twice the products: good for one column.
DEVICE void look_up_both(u32 w, u32 (&low)[2], u32 (&high)[2]) {
    u32 zero = unknown_zero(), shift = 0x10000u ^ zero, upper = w ^ 0x88888888u;
    u32 own = own_zero();
    u32 n0 = 0xbfad9881u ^ own, n1 = 0xf6eaddcfu ^ zero, p0 = 0x271a0e02u ^ own, p1 = 0x725a4636u ^ zero;
    low[0] = permute(n0, n1, w), low[1] = permute(p0, p1, upper);
    high[0] = permute(n0, n1, high_product(w, shift)), high[1] = permute(p0, p1, upper >> 16);
}
DEVICE void look_up_nl(u32 w, u32 &low, u32 &high) {
    look_up(w, 0xbfad9881u, 0xf6eaddcfu, 0x26190d01u, 0x71594535u, low, high);
}
DEVICE void look_up_e2m1(u32 w, u32 &low, u32 &high) {
    look_up(w, 0x03020100u, 0x0c080604u, 0xfdfeff00u, 0xf4f8fafcu, low, high);
}
