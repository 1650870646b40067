// Weights of a later kernel on their way into L2 while this one leaves the memory idle. It changes no bits and needs no
// waiting: what does not arrive in time is loaded as usual.
#pragma once
#include "exact.cuh"

#define LINE 128

// Thread number `thread` of `threads` asks for its lines of n bytes.
DEVICE void bring_ahead(const u8 *p, u32 n, u32 thread, u32 threads) {
#ifndef STRATA_ON_CPU
    for (u32 at = thread * LINE; at < n; at += threads * LINE) asm volatile("prefetch.global.L2 [%0];" :: "l"(p + at));
#endif
}
