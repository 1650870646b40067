// Nodes of a chain, to see what one costs and whether a chain of early starts keeps its order.
#include "early.cuh"

STARTS_EARLY KERNEL(128) empty_node(int *p) {
    let_next_start();
    wait_for_inputs();
}

// p[i] = 3 p[n - 1 - i] + number for all n values, two of them a thread.
STARTS_EARLY KERNEL(256) ordered_node(int *p, int number, int n) {
    let_next_start();
    wait_for_inputs();
    int i = blockIdx.x * blockDim.x + threadIdx.x, from = n - 1 - i;
    if (i >= n / 2) return;
    int a = p[i], b = p[from];
    p[i] = (int)(3u * (unsigned)b + (unsigned)number);
    p[from] = (int)(3u * (unsigned)a + (unsigned)number);
}
