// Kernels of a graph that start before the one in front of them has ended (sm_90 and later; early_launch.py).
//
// A kernel marked STARTS_EARLY may be given processors as soon as every block of the kernel in front of it has called
// `let_next_start` or ended. Before `wait_for_inputs` it may compute, prefetch, load weights and tables through the
// read-only path (load_once, __ldg), and with `load_now` what only the host and other graphs write: slots, recurrent state.
// It must not read what an earlier kernel of the graph writes, except by `peek`, and it must not write at all. Every thread
// waits before it ends, so when a kernel has ended all kernels in front of it have. What other kernels write is never
// loaded through the read-only path, also after the wait. Elsewhere all this does nothing: there the launch waits.
#pragma once
#include "exact.cuh"

#define STARTS_EARLY  // in front of a kernel; early_launch.py looks for it

#if !defined(STRATA_ON_CPU) && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define CAN_START_EARLY 1
DEVICE void wait_for_inputs() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DEVICE void let_next_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
// A word that an earlier kernel may still write: old, new or never written, so that it may be out of range. Good for nothing
// but what to bring ahead, or to load and to give up where the word turns out to be another one behind the wait.
DEVICE int peek(const int *p) { int v; asm volatile("ld.relaxed.gpu.global.s32 %0,[%1];" : "=r"(v) : "l"(p)); return v; }
// Past L1, which may hold what was there before.
DEVICE float load_now(const float *p) {
    float v; asm volatile("ld.relaxed.gpu.global.f32 %0,[%1];" : "=f"(v) : "l"(p)); return v;
}
template <class T>
DEVICE T *load_now(T *const *p) {
    T *v; asm volatile("ld.relaxed.gpu.global.u64 %0,[%1];" : "=l"(v) : "l"(p)); return v;
}
#else
#define CAN_START_EARLY 0
DEVICE void wait_for_inputs() {}
DEVICE void let_next_start() {}
#ifdef STRATA_ON_CPU
DEVICE int peek(const int *p) { return shim::peek(p); }  // what a test says, so that kernels guess wrong
#else
DEVICE int peek(const int *) { return 0; }
#endif
template <class T>
DEVICE T load_now(const T *p) { return *p; }
#endif

#ifdef STRATA_ON_CPU
#define CAN_PEEK 1
#else
#define CAN_PEEK CAN_START_EARLY
#endif

// A word of the weights in front of the wait: a load through the read-only path would sink below it.
DEVICE u32 load_ahead(const u8 *p) {
#if CAN_START_EARLY
    u32 v;
    asm volatile("ld.relaxed.gpu.global.u32 %0,[%1];" : "=r"(v) : "l"(p));
    return v;
#else
    return load_once((const u32 *)p);
#endif
}

// The same with 16 bytes.
DEVICE uint4 load_ahead16(const u8 *p) {
#if CAN_START_EARLY
    uint4 v;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
#else
    return load_once((const uint4 *)p);
#endif
}

#define LINE 128

// Into L2 what a block is going to read: thread number `thread` of `threads` asks for its lines of n bytes. It changes no
// bits: what does not arrive in time is loaded as usual.
DEVICE void bring_ahead(const void *p, u32 n, u32 thread, u32 threads) {
#ifndef STRATA_ON_CPU
    for (u32 at = thread * LINE; at < n; at += threads * LINE)
        asm volatile("prefetch.global.L2 [%0];" :: "l"((const u8 *)p + at));
#endif
}

// The same where there is time for it, before the inputs are there.
DEVICE void bring_early(const void *p, u32 n, u32 thread, u32 threads) {
    if (CAN_START_EARLY) bring_ahead(p, n, thread, threads);
}
