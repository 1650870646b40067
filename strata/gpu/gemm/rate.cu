// How fast tensor cores are with operands in registers: what no wide product can beat.
#include "gemm/tensor.cuh"

// Every warp does `rounds` times eight products of 16 x 8 x 32 int8 values that wait for those of the round before; out
// gets a sum of the first thread of each block.
KERNEL(256) tensor_rate(int rounds, int *out) {
    u32 a[4], b[2];
    int d[8][4];
#pragma unroll
    for (int i = 0; i < 4; i++) a[i] = threadIdx.x + i;
    b[0] = threadIdx.x, b[1] = ~threadIdx.x;
#pragma unroll
    for (int n = 0; n < 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) d[n][i] = n;
#pragma unroll 1
    for (int round = 0; round < rounds; round++)
#pragma unroll
        for (int n = 0; n < 8; n++) mma_s8(d[n], a, b, d[n][0]);
    int sum = 0;
#pragma unroll
    for (int n = 0; n < 8; n++) sum += d[n][0] + d[n][1] + d[n][2] + d[n][3];
    if (threadIdx.x == 0) out[blockIdx.x] = sum;
}
