// exp and log in float64, written out as on the host: *, +, -, / and fma, each rounded once, and exponent shifts.
#pragma once
#include "exact.cuh"

// e^x for x <= 709; 0 below -708, also for -inf; exact 1 at 0.
DEVICE double exp64(double x) {
    const double shifter = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to an integer in the low bits
    double bounded = x > -708.0 ? x : -708.0;
    double shifted = fma64(bounded, 1.4426950408889634, shifter), n = add64(shifted, -shifter);
    double r = fma64(n, -1.90821492927058770002e-10, fma64(n, -6.93147180369123816490e-01, bounded));
    double p = fma64(1.0 / 6227020800.0, r, 1.0 / 479001600.0);
    p = fma64(p, r, 1.0 / 39916800.0);
    p = fma64(p, r, 1.0 / 3628800.0);
    p = fma64(p, r, 1.0 / 362880.0);
    p = fma64(p, r, 1.0 / 40320.0);
    p = fma64(p, r, 1.0 / 5040.0);
    p = fma64(p, r, 1.0 / 720.0);
    p = fma64(p, r, 1.0 / 120.0);
    p = fma64(p, r, 1.0 / 24.0);
    p = fma64(p, r, 1.0 / 6.0);
    p = fma64(p, r, 0.5);
    p = fma64(p, r, 1.0);
    p = fma64(p, r, 1.0);
    double y = mul64(p, double_of((i64)((u64)(bits_of64(shifted) + 1023) << 52)));
    return x >= -708.0 ? y : 0.0;
}

// Natural logarithm of a finite x >= 2^-1022; -inf below.
DEVICE double log64(double x) {
    if (x < 2.2250738585072014e-308) return double_of((i64)0xfff0000000000000ull);
    i64 bits = bits_of64(x);
    i64 n = ((bits & 0x7ff0000000000000ll) >> 52) - 1022;
    double f = double_of((bits & 0x000fffffffffffffll) | 0x3fe0000000000000ll);
    if (f < 0.7071067811865476) {
        f = add64(f, f);
        n -= 1;
    }
    double z = div64(add64(f, -1.0), add64(f, 1.0)), s = mul64(z, z);  // log f = 2 atanh z
    double p = 1.0 / 21.0;
    p = fma64(p, s, 1.0 / 19.0);
    p = fma64(p, s, 1.0 / 17.0);
    p = fma64(p, s, 1.0 / 15.0);
    p = fma64(p, s, 1.0 / 13.0);
    p = fma64(p, s, 1.0 / 11.0);
    p = fma64(p, s, 1.0 / 9.0);
    p = fma64(p, s, 1.0 / 7.0);
    p = fma64(p, s, 1.0 / 5.0);
    p = fma64(p, s, 1.0 / 3.0);
    double tail = mul64(mul64(mul64(2.0, z), s), p), whole = (double)(int)n;
    return fma64(whole, 6.93147180369123816490e-01,
                 add64(fma64(whole, 1.90821492927058770002e-10, tail), mul64(2.0, z)));
}
