// Kernels that only measurements launch: logits of a table's experts instead of a model's, and a copy at full speed.
#include "arrivals.cuh"
#include "early.cuh"

#define MOST_CHOSEN 128  // as router.py has it

// logits (L, T, E) of a window's layers from which a router chooses the ids that row (*at + t) modulo n of table (n, L, K) has,
// in this order and with nearly equal weights; others differ from each other and lie below. moves: the last block moves *at on
// to the next window's row. arrived: 0, and again 0 afterwards. Grid: (rows T, layers L).
STARTS_EARLY KERNEL(256) replay_logits(const int *table, u64 *at, int moves, int n, int K, int E, float *logits, u32 *arrived) {
    __shared__ int ids[MOST_CHOSEN];
    let_next_start();
    wait_for_inputs();
    int t = blockIdx.x, T = gridDim.x, layer = blockIdx.y, L = gridDim.y;
    u64 first = *at;
    const int *row = table + ((first + t) % n * L + layer) * K;
    if (threadIdx.x < K) ids[threadIdx.x] = row[threadIdx.x];
    __syncthreads();
    for (int e = threadIdx.x; e < E; e += 256) {
        u32 spread = (u32)e * 2654435761u >> 8;  // different ones of different experts, scattered
        float logit = mul32(i32_f32((int)spread), -5.9604644775390625e-8f);
        for (int j = 0; j < K; j++)
            if (ids[j] == e) logit = fma32(i32_f32(K - j), 0.0009765625f, 1.f);
        logits[((size_t)layer * T + t) * E + e] = logit;
    }
    if (last_of(arrived, T * L) && moves && threadIdx.x == 0) *at = (first + T) % n;
}

// Copies n blocks of 16 bytes, four loads of a thread on their way at a time.
KERNEL(256) copy_blocks(const uint4 *from, uint4 *to, i64 n) {
    i64 step = (i64)gridDim.x * 256;
    for (i64 i = (i64)blockIdx.x * 256 + threadIdx.x; i < n; i += 4 * step) {
        uint4 v[4];
#pragma unroll
        for (int j = 0; j < 4; j++)
            if (i + j * step < n) v[j] = load_once(from + i + j * step);
#pragma unroll
        for (int j = 0; j < 4; j++)
            if (i + j * step < n) to[i + j * step] = v[j];
    }
}
