// Several quotients at once. A division has a branch for quotients that a few fused products cannot round, so one waits for
// the other; here all take the products side by side, and the branch is taken once, where any of them needs it.
#pragma once
#include "exact.cuh"

// An estimate of 1 / b, where a division begins: the products behind it round the quotient. Nothing that it flushes to zero
// comes here (`within`).
#ifdef STRATA_ON_CPU
DEVICE float near_reciprocal(float b) { return div32(1.f, b); }
#else
DEVICE float near_reciprocal(float b) { float r; asm("rcp.approx.ftz.f32 %0,%1;" : "=f"(r) : "f"(b)); return r; }
#endif

// fl(a / b) of `within` numbers: the very instructions of div32 where nothing can overflow or underflow, so the same bits. With
// another start quotients by 2^n (2 - 2^-23) could be off.
DEVICE float usual_quotient(float a, float b) {
    float r = near_reciprocal(b);
    r = fma32(r, fma32(-b, r, 1.f), r);
    float q = mul32(a, r);
    return fma32(r, fma32(-b, q, a), q);
}

// Whether |a| lies in [2^-60, 2^60), with 1 <= b < 2^60.
DEVICE bool within(float a, float b) {
    return (bits_of(a) & 0x7fffffffu) - 0x21800000u < 0x3c000000u && bits_of(b) - 0x3f800000u < 0x1e000000u;
}

// silu32 of each.
template <int N>
DEVICE void silu_all(const float (&x)[N], float (&out)[N]) {
    float below[N];
    bool usual = true;
#pragma unroll
    for (int i = 0; i < N; i++) {
        below[i] = add32(1.f, exp32(-x[i]));
        usual = usual && within(x[i], below[i]);
        out[i] = usual_quotient(x[i], below[i]);
    }
    if (!usual)
#pragma unroll
        for (int i = 0; i < N; i++) out[i] = div32(x[i], below[i]);
}

// sigmoid32 of each.
template <int N>
DEVICE void sigmoid_all(const float (&x)[N], float (&out)[N]) {
    float below[N];
    bool usual = true;
#pragma unroll
    for (int i = 0; i < N; i++) {
        below[i] = add32(1.f, exp32(-x[i]));
        usual = usual && within(1.f, below[i]) && x[i] == x[i];
    }
    if (usual)
#pragma unroll
        for (int i = 0; i < N; i++) out[i] = usual_quotient(1.f, below[i]);
    else
#pragma unroll
        for (int i = 0; i < N; i++) out[i] = x[i] == x[i] ? div32(1.f, below[i]) : x[i];
}
