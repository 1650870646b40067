// First and last node of every graph: small inputs from host memory and a clean error word; results back to the host.
#include "early.cuh"

// Copies n words from mapped host memory, and clears the error word. One block.
KERNEL(256) inbox(const u64 *host, u64 *words, int n, u64 *error) {
    let_next_start();
    const volatile u64 *source = host;  // the host writes between launches: no cached copy may be used
    for (int i = threadIdx.x; i < n; i += 256) words[i] = source[i];
    if (threadIdx.x == 0) *error = ~0ull;
}

// Copies n words to mapped host memory. One block.
STARTS_EARLY KERNEL(256) outbox(const u64 *words, u64 *host, int n) {
    let_next_start();
    wait_for_inputs();
    for (int i = threadIdx.x; i < n; i += 256) host[i] = words[i];
}

// Copies n values on the device.
STARTS_EARLY KERNEL(256) copy_values(const float *from, float *to, i64 n) {
    let_next_start();
    wait_for_inputs();
    for (i64 i = (i64)blockIdx.x * 256 + threadIdx.x; i < n; i += (i64)gridDim.x * 256) to[i] = from[i];
}
