// The exact sum over the experts of a row: integers in units of 2^-32, the same bits in any order (docs/arithmetic.md).
#pragma once
#include "arrivals.cuh"

// Adds to a sum in memory that nobody reads yet.
#ifdef STRATA_ON_CPU
DEVICE void add_up(u64 *sum, i64 term) { atomicAdd(sum, (u64)term); }
#else
DEVICE void add_up(u64 *sum, i64 term) {
    asm volatile("red.relaxed.gpu.global.add.u64 [%0],%1;" :: "l"(sum), "l"(term) : "memory");
}
#endif

// The term of a routed expert's output. factors by expert, or null.
DEVICE i64 routed_term(const float *factors, int expert, float weight, float out, bool &fine) {
    if (factors) out = mul32(out, factors[expert]);
    return combine_term(weight, out, fine);
}

// What a down product of routed experts does with its outputs for a window of one row where the op's result comes of them:
// terms are added up in memory, and the last block of those with the same rows adds the shared expert's. sums null: outputs
// are stored as they are. With more rows, experts of several make ten times as many sums as a row has values, and that costs
// more than a kernel behind them.
struct Combine {
    u64 *sums;             // (rows,), zeros before the first term and behind the last one
    const float *weights;  // by entry
    const float *factors;  // by expert, or null
    const float *shared, *gate;  // outputs of the shared expert (rows,), and its gate
    float *y;                    // (rows,)
    u64 *error, where;

    // The output of row `row` for an entry.
    DEVICE void add(int entry, int expert, int row, float out) const {
        bool fine = true;
        add_up(sums + row, routed_term(factors, expert, weights[entry], out, fine));
        if (!fine) report(error, where, COMBINE_OVERFLOW, 0);
    }
    // For all threads of a block, behind its last `add`: n blocks have rows first to end, as many as they have threads at
    // most.
    DEVICE void finish(u32 *counter, u32 n, int first, int end) const {
        __shared__ float weight;  // of the shared expert, made while the counter is on its way
        bool last = last_of(counter, n, [&] {
            if (threadIdx.x != blockDim.x - 1) return;
            float s = *gate;
            weight = sigmoid32(s);
            if (!finite32(s)) report(error, where, COMBINE_OVERFLOW, 0);
        });
        int row = first + (int)threadIdx.x;
        if (!last || row >= end) return;
        i64 total = load_volatile((const i64 *)sums + row);
        bool fine = true;
        y[row] = combine_back(total + combine_term(weight, shared[row], fine));
        sums[row] = 0;
        if (!fine) report(error, where, COMBINE_OVERFLOW, 0);
    }
};
