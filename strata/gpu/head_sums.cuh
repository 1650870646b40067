// Sums of eight products of heads at once, where eight threads share each of them.
//
// The fixed tree has 32 lanes; thread c of eight neighbours has lanes 4 c .. 4 c + 3. So it holds values 4 c .. 4 c + 3 of
// every 32 of a head, which it loads together.
#pragma once
#include "sums.cuh"

// v[4 p + i] is lane 4 c + i of product p of this thread's group of eight. Returns the sum of product c. With CROSSED,
// products stand elsewhere in every thread: p ^ c in place p, so that what is kept and what is given need no choice.
template <bool CROSSED = false>
DEVICE float eight_sums(float (&v)[32]) {
    int lane = threadIdx.x & 31;
#pragma unroll
    for (int half = 4; half; half >>= 1) {
        bool upper = !CROSSED && (lane & half);
#pragma unroll
        for (int i = 0; i < 16; i++)
            if (i < 4 * half) {
                float keep = upper ? v[i + 4 * half] : v[i], give = upper ? v[i] : v[i + 4 * half];
                v[i] = add32(keep, __shfl_xor_sync(ALL_LANES, give, half));
            }
    }
    return add32(add32(v[0], v[2]), add32(v[1], v[3]));
}
