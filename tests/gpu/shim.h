// CUDA on the CPU, for tests: every thread of a block is a fiber, blocks run one after the other.
//
// Barriers and warp exchanges switch fibers; a warp exchange returns when all lanes of its mask have arrived. Lanes that
// wait for ever (a barrier that others skip, an exchange without a lane) end the launch with a message. Shared memory
// is static: one block runs at a time. The order of warps and lanes can be reversed, which makes most missing barriers
// visible. Bytes of dynamic shared memory are poisoned before each block and guarded at the end.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>
#include <time.h>
#include <unistd.h>

#define STRATA_ON_CPU
#define __device__
#define __global__ static
#define __forceinline__ inline
#define __restrict__
#define __shared__ alignas(16) static
#define __constant__ static const
#define __launch_bounds__(...)
#define __align__(n) alignas(n)

struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static inline int2 make_int2(int x, int y) { return {x, y}; }
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

#include "fibers.h"

// A device faults where a value of several words is not aligned; the compiler calls this at such a place (-fsanitize=alignment).
struct SourcePlace { const char *file; unsigned line, column; };
extern "C" __attribute__((visibility("hidden"))) void __ubsan_handle_type_mismatch_v1(const SourcePlace *at, void *) {
    static char what[200];
    snprintf(what, sizeof what, "a value that is not aligned, %s:%u", at->file, at->line);
    shim::fail(what);
}

namespace shim {

template <class... A, size_t... I>
static void call(void (*f)(A...), void **args, std::index_sequence<I...>) { f(*(A *)args[I]...); }

template <class... A>
struct Job { void (*f)(A...); void **args; };

static int arrived[32];  // lanes of a warp at a tensor-core product
static int peeked;       // what every look at a word that may still change sees

static int peek(const int *p) { return (void)*(const volatile int *)p, peeked; }

template <class... A>
static bool launch(void (*f)(A...), void **args, const int *grid, const int *block, int shared_bytes, bool reverse) {
    memset(arrived, 0, sizeof arrived);
    Job<A...> job{f, args};
    return run_grid(grid, block, shared_bytes, reverse, [](void *p) {
        auto *j = (Job<A...> *)p;
        call(j->f, j->args, std::index_sequence_for<A...>());
    }, &job);
}

template <class... A>
static int sizes(void (*)(A...), int *out) {
    int n = 0;
    ((out[n++] = (int)sizeof(A)), ...);
    return n;
}

template <class T>
static T exchange(unsigned mask, T value, int source, bool orders = false) {
    static_assert(sizeof(T) <= 8, "a warp exchange moves at most 8 bytes");
    now->orders = orders;
    now->give = 0;
    memcpy(&now->give, &value, sizeof(T));
    now->mask = mask;
    now->source = source & 31;
    yield(WARP);
    memcpy(&value, &now->received, sizeof(T));
    return value;
}

}  // namespace shim

#define threadIdx (shim::now->thread)
#define blockIdx (shim::block_index)
#define blockDim (shim::block_size)
#define gridDim (shim::grid_size)
#define DYNAMIC_SHARED(name) unsigned char *name = shim::dynamic_start()

static inline void __syncthreads() { shim::yield(shim::BLOCK); }
QUIET static inline int __syncthreads_count(int p) {
    static int count;
    __syncthreads();
    if (shim::now->thread.x == 0) count = 0;
    __syncthreads();
    count += p != 0;
    __syncthreads();
    return count;
}
static inline void __syncwarp(unsigned mask = 0xffffffffu) { shim::exchange(mask, 0, 0, true); }
static inline void __threadfence() {}
static inline void __threadfence_system() {}
template <class T> static inline T __shfl_xor_sync(unsigned m, T v, int x) { return shim::exchange(m, v, shim::now->lane ^ x); }
template <class T> static inline T __shfl_sync(unsigned m, T v, int l) { return shim::exchange(m, v, l & 31); }
template <class T> static inline T __shfl_down_sync(unsigned m, T v, int d) {
    int l = shim::now->lane + d;
    return shim::exchange(m, v, l < 32 ? l : shim::now->lane);
}
template <class T> static inline T __shfl_up_sync(unsigned m, T v, int d) {
    int l = shim::now->lane - d;
    return shim::exchange(m, v, l >= 0 ? l : shim::now->lane);
}
static inline unsigned __ballot_sync(unsigned mask, int p) {
    shim::exchange(mask, (uint64_t)(p != 0), shim::now->lane);
    return shim::now->ballot;
}
static inline int __all_sync(unsigned mask, int p) { return __ballot_sync(mask, p) == mask; }
static inline int __any_sync(unsigned mask, int p) { return __ballot_sync(mask, p) != 0; }
// Blocks and fibers run one at a time: plain reads and writes are atomic.
#ifdef STRATA_RACES
#define TOUCH(p, n, how) shim::touch(p, n, shim::how, __builtin_return_address(0))
#define TOUCH_BULK(p, n, barrier) shim::touch(p, n, shim::BULK, __builtin_return_address(0), barrier)
#else
#define TOUCH(p, n, how)
#define TOUCH_BULK(p, n, barrier)
#endif
template <class T, class U> QUIET static inline T atomicAdd(T *p, U v) { TOUCH(p, sizeof(T), ATOMIC); T old = *p; *p = (T)(old + (T)v); return old; }
template <class T, class U> QUIET static inline T atomicMax(T *p, U v) { TOUCH(p, sizeof(T), ATOMIC); T old = *p; if ((T)v > old) *p = (T)v; return old; }
template <class T, class U> QUIET static inline T atomicMin(T *p, U v) { TOUCH(p, sizeof(T), ATOMIC); T old = *p; if ((T)v < old) *p = (T)v; return old; }
template <class T, class U> QUIET static inline T atomicOr(T *p, U v) { TOUCH(p, sizeof(T), ATOMIC); T old = *p; *p = old | (T)v; return old; }
template <class T, class U> QUIET static inline T atomicExch(T *p, U v) { TOUCH(p, sizeof(T), ATOMIC); T old = *p; *p = (T)v; return old; }
template <class T, class U, class W> QUIET static inline T atomicCAS(T *p, U c, W v) { TOUCH(p, sizeof(T), ATOMIC); T old = *p; if (old == (T)c) *p = (T)v; return old; }
static inline void atomic_min(unsigned long long *p, unsigned long long v) { atomicMin(p, v); }

template <class T> static inline T __ldg(const T *p) { return *p; }
template <class T> static inline T load_once(const T *p) { return *p; }
QUIET static inline long long load_acquire(const long long *p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
QUIET static inline void store_release(long long *p, long long v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
template <class T> static inline T load_volatile(const T *p) { return *p; }
// Whoever is waited for may need this core.
static inline void between_polls() { usleep(20); }
static inline unsigned long long clock_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ull + t.tv_nsec;
}

static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline unsigned __funnelshift_r(unsigned lo, unsigned hi, int s) { return (unsigned)((((uint64_t)hi << 32) | lo) >> (s & 31)); }
static inline unsigned __byte_perm(unsigned a, unsigned b, unsigned s) {
    uint64_t v = ((uint64_t)b << 32) | a;
    unsigned r = 0;
    for (int i = 0; i < 4; i++) {
        unsigned code = s >> (4 * i) & 15, byte = (unsigned)(v >> (8 * (code & 7))) & 255;
        r |= (code & 8 ? (byte & 128 ? 255u : 0u) : byte) << (8 * i);
    }
    return r;
}
template <class T> static inline T min(T a, T b) { return b < a ? b : a; }
template <class T> static inline T max(T a, T b) { return a < b ? b : a; }

// The primitives of exact.cuh. Compile with -ffp-contract=off.
static inline unsigned bits_of(float f) { unsigned u; memcpy(&u, &f, 4); return u; }
static inline float float_of(unsigned u) { float f; memcpy(&f, &u, 4); return f; }
static inline long long bits_of64(double f) { long long u; memcpy(&u, &f, 8); return u; }
static inline double double_of(long long u) { double f; memcpy(&f, &u, 8); return f; }
static inline unsigned __float_as_uint(float f) { return bits_of(f); }
static inline float __uint_as_float(unsigned u) { return float_of(u); }
static inline int __float_as_int(float f) { return (int)bits_of(f); }
static inline float __int_as_float(int u) { return float_of((unsigned)u); }
static inline float add32(float a, float b) { return a + b; }
static inline float sub32(float a, float b) { return a - b; }
static inline float mul32(float a, float b) { return a * b; }
static inline float div32(float a, float b) { return a / b; }
static inline float sqrt32(float a) { return std::sqrt(a); }
static inline float fma32(float a, float b, float c) { return std::fma(a, b, c); }
static inline float rint32(float a) { return std::rint(a); }
// As the device converts: NaN to 0, out of range to the nearest end.
static inline int rint_i32(float a) {
    if (a != a) return 0;
    float r = std::rint(a);
    return r >= 2147483648.f ? INT32_MAX : r < -2147483648.f ? INT32_MIN : (int)r;
}
static inline long long rint_i64(float a) {
    if (a != a) return 0;
    float r = std::rint(a);
    return r >= 9223372036854775808.f ? INT64_MAX : r < -9223372036854775808.f ? INT64_MIN : (long long)r;
}
static inline float i32_f32(int a) { return (float)a; }
static inline float i64_f32(long long a) { return (float)a; }
static inline float half_f32(unsigned short h) {
    unsigned m = (unsigned)(h & 0x7fff) << 13;
    float v = m >= 0x0f800000u ? float_of(m | 0x7f800000u) : float_of(m) * 5192296858534827628530496329220096.f;
    return h & 0x8000 ? -v : v;
}
static inline unsigned short f32_half(float a) {
    unsigned u = bits_of(a), sign = u >> 16 & 0x8000, m = u & 0x7fffffff;
    if (m > 0x7f800000u) return 0x7fff;
    if (m >= 0x477ff000u) return (unsigned short)(sign | 0x7c00);
    if (m < 0x38800000u) return (unsigned short)(sign | (bits_of(float_of(m) + 0.5f) - 0x3f000000u));
    return (unsigned short)(sign | (m - 0x38000000u + 0xfffu + (m >> 13 & 1)) >> 13);
}
static inline float f64_f32(double a) { return (float)a; }
static inline double add64(double a, double b) { return a + b; }
static inline double mul64(double a, double b) { return a * b; }
static inline double div64(double a, double b) { return a / b; }
static inline double fma64(double a, double b, double c) { return std::fma(a, b, c); }
static inline int dot4(unsigned a, unsigned b, int c) {
    for (int i = 0; i < 4; i++) c += (int)(signed char)(a >> (8 * i)) * (int)(signed char)(b >> (8 * i));
    return c;
}
static inline int dot2_low(unsigned a, unsigned b, int c) {
    for (int i = 0; i < 2; i++) c += (int)(short)(a >> (16 * i)) * (int)(signed char)(b >> (8 * i));
    return c;
}
static inline int dot2_high(unsigned a, unsigned b, int c) { return dot2_low(a, b >> 16, c); }
static inline unsigned high_product(unsigned a, unsigned b) { return (unsigned)((uint64_t)a * b >> 32); }
static inline unsigned permute(unsigned a, unsigned b, unsigned which) { return __byte_perm(a, b, which); }

// Tensor-core products and asynchronous copies of gemm/tensor.cuh. When all lanes of a warp have shown their operands, the
// first of them to go on makes the products of all.
namespace shim {
template <class D>
struct Shown { D *d; unsigned a[4], b[2]; };
// unpack: the N values of a word.
template <class D, int N, class Unpack>
static inline __attribute__((optimize("O3"))) void products(Shown<D> *lanes, Unpack unpack) {
    D rows[16][8 * N], columns[8 * N][8];
    for (int g = 0; g < 8; g++)
        for (int k = 0; k < 4; k++) {
            Shown<D> &lane = lanes[4 * g + k];
            D words[N];
            for (int half = 0; half < 2; half++) {
                int at = N * (2 * k + half);
                for (int upper = 0; upper < 2; upper++) unpack(lane.a[upper + 2 * half], rows[g + 8 * upper] + at);
                unpack(lane.b[half], words);
                for (int i = 0; i < N; i++) columns[at + i][g] = words[i];
            }
        }
    for (int row = 0; row < 16; row++) {
        D sums[8];
        for (int c = 0; c < 8; c++) sums[c] = lanes[4 * (row & 7) + c / 2].d[2 * (row >> 3) + (c & 1)];
        for (int k = 0; k < 8 * N; k++)
            for (int c = 0; c < 8; c++) {
                if constexpr (std::is_same<D, float>::value) sums[c] = __builtin_fmaf(rows[row][k], columns[k][c], sums[c]);
                else sums[c] += rows[row][k] * columns[k][c];
            }
        for (int c = 0; c < 8; c++) lanes[4 * (row & 7) + c / 2].d[2 * (row >> 3) + (c & 1)] = sums[c];
    }
}
template <class D, int N, class Unpack>
QUIET static void mma(D (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], Unpack unpack) {
    static Shown<D> shown[32][32];
    Shown<D> &mine = shown[now->warp][now->lane];
    mine = {d, {a[0], a[1], a[2], a[3]}, {b[0], b[1]}};
    arrived[now->warp]++;
    exchange(0xffffffffu, 0, 0);
    if (arrived[now->warp] != 32) return;
    arrived[now->warp] = 0;
    products<D, N>(shown[now->warp], unpack);
}
}  // namespace shim
static inline void mma_s8(int (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], int c) {
    for (int &x : d) x = c;
    shim::mma<int, 4>(d, a, b, [](unsigned x, int *to) {
        for (int i = 0; i < 4; i++) to[i] = (signed char)(x >> (8 * i));
    });
}
static inline void mma_bf16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    shim::mma<float, 2>(d, a, b, [](unsigned x, float *to) { to[0] = float_of(x << 16), to[1] = float_of(x & 0xffff0000u); });
}
static inline void mma_f16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    shim::mma<float, 2>(d, a, b, [](unsigned x, float *to) { to[0] = half_f32(x & 0xffff), to[1] = half_f32(x >> 16); });
}
template <int BYTES> QUIET static inline void copy(void *to, const void *from, bool some = true) {
    if ((uintptr_t)to % BYTES || (uintptr_t)from % BYTES) shim::fail("a copy is not aligned for its size");
    TOUCH(to, BYTES, COPY);
    if (some) memcpy(to, from, BYTES);
    else memset(to, 0, BYTES);
}
// Bulk copies of gemv/ring.cuh: done when they are asked for, waited for all the same.
typedef unsigned long long BulkBarrier;
namespace shim {
static BulkWord &word(BulkBarrier *barrier) { return *(BulkWord *)barrier; }
QUIET static void end_phase(BulkWord &w) {
    if (w.named && w.bytes == 0) w.named = 0, w.ended++;
}
}  // namespace shim
QUIET static inline void bulk_ready(BulkBarrier *barrier) {
    TOUCH(barrier, 8, WRITE);
    *barrier = 0;
}
QUIET static inline void bulk_expect(BulkBarrier *barrier, unsigned n) {
    TOUCH(barrier, 8, ATOMIC);
    if (shim::word(barrier).named) shim::fail("bytes of a phase are named twice");
    shim::word(barrier).bytes += n;
    shim::word(barrier).named = 1;
    shim::end_phase(shim::word(barrier));
}
QUIET static inline void bulk_copy(unsigned char *to, const unsigned char *from, unsigned n, BulkBarrier *barrier) {
    if ((uintptr_t)to % 16 || (uintptr_t)from % 16 || n % 16) shim::fail("a bulk copy is not aligned for 16 bytes");
    TOUCH(barrier, 8, ATOMIC);
    TOUCH_BULK(to, n, &shim::word(barrier));
    memcpy(to, from, n);
    shim::word(barrier).bytes -= n;
    shim::end_phase(shim::word(barrier));
}
QUIET static inline void bulk_wait(BulkBarrier *barrier, unsigned parity) {
    TOUCH(barrier, 8, ATOMIC);
    if (!shim::word(barrier).over(parity)) {
        shim::now->copies = &shim::word(barrier);
        shim::now->parity = (int)parity;
        shim::yield(shim::COPIES);
    }
#ifdef STRATA_RACES
    shim::wait_for_phase(&shim::word(barrier));
#endif
}
#ifdef STRATA_RACES
static inline void copy_commit() { shim::end_group(); }
template <int LATER> static inline void copy_wait() { shim::wait_for_groups(LATER); }
#define memcpy shim::copied
#else
static inline void copy_commit() {}
template <int LATER> static inline void copy_wait() {}
#endif
