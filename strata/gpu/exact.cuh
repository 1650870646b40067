// Float operations with one defined rounding each, and the functions built on them (docs/arithmetic.md).
//
// Every operation is PTX with explicit rounding and without .ftz, so neither compiler flags nor ptxas can contract or
// flush it. Plain + - * / on floats is not used in kernels. Comparisons, negation and fabsf are exact as they are.
// With STRATA_ON_CPU the primitives come from the header of the CPU tests instead; the rest is shared.
#pragma once

typedef unsigned char u8;
typedef signed char i8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define DEVICE __device__ __forceinline__
#define KERNEL(threads) __global__ void __launch_bounds__(threads, 1)

#ifndef STRATA_ON_CPU

// Dynamic shared memory, 16-byte aligned bytes.
#define DYNAMIC_SHARED(name) extern __shared__ __align__(16) unsigned char name[]

DEVICE float add32(float a, float b) { float r; asm("add.rn.f32 %0,%1,%2;" : "=f"(r) : "f"(a), "f"(b)); return r; }
DEVICE float sub32(float a, float b) { float r; asm("sub.rn.f32 %0,%1,%2;" : "=f"(r) : "f"(a), "f"(b)); return r; }
DEVICE float mul32(float a, float b) { float r; asm("mul.rn.f32 %0,%1,%2;" : "=f"(r) : "f"(a), "f"(b)); return r; }
DEVICE float div32(float a, float b) { float r; asm("div.rn.f32 %0,%1,%2;" : "=f"(r) : "f"(a), "f"(b)); return r; }
DEVICE float sqrt32(float a) { float r; asm("sqrt.rn.f32 %0,%1;" : "=f"(r) : "f"(a)); return r; }
DEVICE float fma32(float a, float b, float c) {
    float r; asm("fma.rn.f32 %0,%1,%2,%3;" : "=f"(r) : "f"(a), "f"(b), "f"(c)); return r;
}
// To the nearest integer, ties to even: as a float, as int32, as int64.
DEVICE float rint32(float a) { float r; asm("cvt.rni.f32.f32 %0,%1;" : "=f"(r) : "f"(a)); return r; }
DEVICE int rint_i32(float a) { int r; asm("cvt.rni.s32.f32 %0,%1;" : "=r"(r) : "f"(a)); return r; }
DEVICE i64 rint_i64(float a) { i64 r; asm("cvt.rni.s64.f32 %0,%1;" : "=l"(r) : "f"(a)); return r; }
// Integers to float32 in one rounding.
DEVICE float i32_f32(int a) { float r; asm("cvt.rn.f32.s32 %0,%1;" : "=f"(r) : "r"(a)); return r; }
DEVICE float i64_f32(i64 a) { float r; asm("cvt.rn.f32.s64 %0,%1;" : "=f"(r) : "l"(a)); return r; }
// float16 bits: exact to float32, ties to even back.
DEVICE float half_f32(u16 h) { float r; asm("cvt.f32.f16 %0,%1;" : "=f"(r) : "h"(h)); return r; }
DEVICE u16 f32_half(float a) { u16 r; asm("cvt.rn.f16.f32 %0,%1;" : "=h"(r) : "f"(a)); return r; }

DEVICE double add64(double a, double b) { double r; asm("add.rn.f64 %0,%1,%2;" : "=d"(r) : "d"(a), "d"(b)); return r; }
DEVICE double mul64(double a, double b) { double r; asm("mul.rn.f64 %0,%1,%2;" : "=d"(r) : "d"(a), "d"(b)); return r; }
DEVICE double div64(double a, double b) { double r; asm("div.rn.f64 %0,%1,%2;" : "=d"(r) : "d"(a), "d"(b)); return r; }
DEVICE double fma64(double a, double b, double c) {
    double r; asm("fma.rn.f64 %0,%1,%2,%3;" : "=d"(r) : "d"(a), "d"(b), "d"(c)); return r;
}

DEVICE float f64_f32(double a) { float r; asm("cvt.rn.f32.f64 %0,%1;" : "=f"(r) : "d"(a)); return r; }

DEVICE u32 bits_of(float a) { return __float_as_uint(a); }
DEVICE float float_of(u32 bits) { return __uint_as_float(bits); }
DEVICE i64 bits_of64(double a) { return __double_as_longlong(a); }
DEVICE double double_of(i64 bits) { return __longlong_as_double(bits); }

// c + the four products of signed bytes.
DEVICE int dot4(u32 a, u32 b, int c) {
    int r; asm("dp4a.s32.s32 %0,%1,%2,%3;" : "=r"(r) : "r"(a), "r"(b), "r"(c)); return r;
}

// c + the products of two 16-bit numbers with bytes 0 and 1 (low) or 2 and 3 (high), all signed.
DEVICE int dot2_low(u32 a, u32 b, int c) {
    int r; asm("dp2a.lo.s32.s32 %0,%1,%2,%3;" : "=r"(r) : "r"(a), "r"(b), "r"(c)); return r;
}
DEVICE int dot2_high(u32 a, u32 b, int c) {
    int r; asm("dp2a.hi.s32.s32 %0,%1,%2,%3;" : "=r"(r) : "r"(a), "r"(b), "r"(c)); return r;
}
// Bytes of b and a by the low four nibbles of `which`; a nibble of 8 or more repeats a byte's sign.
DEVICE u32 permute(u32 a, u32 b, u32 which) {
    u32 r; asm("prmt.b32 %0,%1,%2,%3;" : "=r"(r) : "r"(a), "r"(b), "r"(which)); return r;
}

// The upper half of a product.
DEVICE u32 high_product(u32 a, u32 b) {
    u32 r; asm("mul.hi.u32 %0,%1,%2;" : "=r"(r) : "r"(a), "r"(b)); return r;
}

// Loads of weights that are read once: past L1, through the read-only path.
DEVICE uint4 load_once(const uint4 *p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3},[%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}
DEVICE uint2 load_once(const uint2 *p) {
    uint2 v;
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0,%1},[%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
    return v;
}
DEVICE u32 load_once(const u32 *p) {
    u32 v; asm volatile("ld.global.nc.L1::no_allocate.u32 %0,[%1];" : "=r"(v) : "l"(p)); return v;
}
DEVICE u16 load_once(const u16 *p) {
    u16 v; asm volatile("ld.global.nc.L1::no_allocate.u16 %0,[%1];" : "=h"(v) : "l"(p)); return v;
}

// Words that the host or another processor writes while a kernel runs.
DEVICE i64 load_acquire(const i64 *p) {
    i64 v; asm volatile("ld.acquire.sys.global.s64 %0,[%1];" : "=l"(v) : "l"(p) : "memory"); return v;
}
DEVICE void store_release(i64 *p, i64 v) {
    asm volatile("st.release.sys.global.s64 [%0],%1;" :: "l"(p), "l"(v) : "memory");
}
DEVICE int load_volatile(const int *p) {
    int v; asm volatile("ld.volatile.global.s32 %0,[%1];" : "=r"(v) : "l"(p) : "memory"); return v;
}
DEVICE i64 load_volatile(const i64 *p) {
    i64 v; asm volatile("ld.volatile.global.s64 %0,[%1];" : "=l"(v) : "l"(p) : "memory"); return v;
}
DEVICE uint4 load_volatile(const uint4 *p) {
    uint4 v;
    asm volatile("ld.volatile.global.v4.u32 {%0,%1,%2,%3},[%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
    return v;
}
DEVICE void between_polls() {}
DEVICE u64 clock_ns() { u64 t; asm volatile("mov.u64 %0,%%globaltimer;" : "=l"(t)); return t; }

DEVICE void atomic_min(u64 *p, u64 v) { atomicMin(p, v); }

#endif  // STRATA_ON_CPU

DEVICE float bf16_f32(u16 h) { return float_of((u32)h << 16); }
DEVICE bool finite32(float a) { return (bits_of(a) & 0x7fffffffu) < 0x7f800000u; }
DEVICE float larger(float a, float b) { return a > b ? a : b; }  // for numbers; a NaN must be found elsewhere

// e^t for t clamped to [-87, 88]; NaN counts as 88.
DEVICE float exp32(float t) {
    t = t <= 88.f ? t : 88.f;
    t = t >= -87.f ? t : -87.f;
    float n = rint32(mul32(t, float_of(0x3fb8aa3bu)));
    float r = fma32(n, float_of(0xbf317200u), t);
    r = fma32(n, float_of(0xb5bfbe8eu), r);
    float p = fma32(float_of(0x39506967u), r, float_of(0x3ab743ceu));
    p = fma32(p, r, float_of(0x3c088908u));
    p = fma32(p, r, float_of(0x3d2aa9c1u));
    p = fma32(p, r, float_of(0x3e2aaaaau));
    p = fma32(p, r, float_of(0x3f000001u));
    float y = add32(fma32(p, mul32(r, r), r), 1.f);
    return float_of(bits_of(y) + ((u32)rint_i32(n) << 23));
}

// log(1 + e) for e in [0, 1].
DEVICE float log1p32(float e) {
    float s = div32(e, add32(2.f, e)), z = mul32(s, s);
    float p = fma32(float_of(0x3e8f6bdfu), z, float_of(0x3e8f5e87u));
    p = fma32(p, z, float_of(0x3ecce904u));
    p = fma32(p, z, float_of(0x3f2aaa81u));
    return fma32(-s, sub32(e, mul32(z, p)), e);
}

// A NaN stays NaN.
DEVICE float sigmoid32(float x) {
    float s = div32(1.f, add32(1.f, exp32(-x)));
    return x == x ? s : x;
}
DEVICE float softplus32(float x) {
    float s = add32(x > 0.f ? x : 0.f, log1p32(exp32(-fabsf(x))));
    return x == x ? s : x;
}
DEVICE float silu32(float x) { return div32(x, add32(1.f, exp32(-x))); }
DEVICE float swiglu32(float g, float u) { return mul32(silu32(g), u); }

// One term of the exact sum over experts, in units of 2^-32; 0 and fine = false unless |t| < 2^24.
DEVICE i64 combine_term(float w, float y, bool &fine) {
    float t = mul32(w, y);
    bool ok = fabsf(t) < 16777216.f;  // false for NaN
    fine = fine && ok;
    return rint_i64(mul32(ok ? t : 0.f, 4294967296.f));
}
DEVICE float combine_back(i64 total) { return mul32(i64_f32(total), 2.3283064365386963e-10f); }

// The error word is one u64, ~0 without an error: op index (16 bits), layer + 1 (16), code (8), detail (24). The least
// value stays, so the first op of the list wins, whatever runs at the same time. `where` holds the upper 32 bits.
DEVICE void report(u64 *error, u64 where, u32 code, u32 detail) {
    atomic_min(error, where | (u64)code << 24 | (detail & 0xffffffu));
}
#define NOT_FINITE 1u
#define COMBINE_OVERFLOW 2u
#define NGRAM_TIMEOUT 3u
#define NGRAM_FAILED 4u
#define EXPERTS_TIMEOUT 5u
