// Kernels that only measurements launch: routing from a table instead of from logits, and a copy at full speed.
#include "early.cuh"

// ids and weights (T, K) of a layer: row t of the window takes row (*at + t) modulo n of table (n, L, K); all weights
// are 1 / K. The last layer moves *at on to the next window's row. One block.
STARTS_EARLY KERNEL(256) replay_ids(const int *table, u64 *at, int n, int L, int layer, int T, int K, float weight, int *ids,
                       float *weights) {
    let_next_start();
    wait_for_inputs();
    u64 first = *at;
    for (int i = threadIdx.x; i < T * K; i += 256) {
        u64 row = (first + i / K) % n;
        ids[i] = table[(row * L + layer) * K + i % K];
        weights[i] = weight;
    }
    __syncthreads();
    if (layer == L - 1 && threadIdx.x == 0) *at = (first + T) % n;
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
