// Keys and queries of the delta rule in shared memory: a lane of the sums over keys holds every fourth value.
#pragma once
#include "exact.cuh"

// Where value i of a key or query lies: those of a lane side by side, N of them and a gap, so that four at once are loaded
// without two lanes in one bank.
template <int N>
DEVICE int in_lanes(int i) {
    return (i & 3) * (N + 4) + (i >> 2);
}

// Values 4i .. 4i + 3 of a lane.
DEVICE void load_four(const float *lane, int i, float (&v)[4]) {
    float4 four = ((const float4 *)lane)[i];
    v[0] = four.x, v[1] = four.y, v[2] = four.z, v[3] = four.w;
}

// Loads do not move over it: otherwise those of all keys of a thread are held in registers at once.
DEVICE void hold_loads(int i) {
    if (i & 1) asm volatile("" ::: "memory");
}
