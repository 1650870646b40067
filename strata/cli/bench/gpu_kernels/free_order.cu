// 4-bit products in the order that suits the hardware, to compare speeds with: what the fixed order of lanes costs.
//
// Blocks of 32 values: 16 bytes of codes (value i in the low nibble of byte i, 16 + i in the high one, zero at 8), float16
// scales apart. Activations: int8 codes, and for every block its scale and 8 * scale * sum of codes. A lane takes whole
// blocks of R rows, so there is one sum a row and column, in any order.
#include "sums.cuh"

template <int R, int C>
__global__ void free_order(const uint4 *codes, const u16 *scales, const int *ids, const uint4 *x, const float2 *x_scales,
                           float *y, int rows, int blocks) {
    int lane = threadIdx.x & 31, row = (blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5)) * R;
    if (row >= rows) return;
    size_t start = ((size_t)(ids ? ids[blockIdx.y] : 0) * rows + row) * blocks;
    float sum[R][C];
#pragma unroll
    for (int r = 0; r < R; r++)
#pragma unroll
        for (int c = 0; c < C; c++) sum[r][c] = 0.f;
#pragma unroll 4
    for (int b = lane; b < blocks; b += 32) {
        uint4 w[R];
        float d[R];
#pragma unroll
        for (int r = 0; r < R; r++) w[r] = load_once(codes + start + (size_t)r * blocks + b);
#pragma unroll
        for (int r = 0; r < R; r++) d[r] = half_f32(scales[start + (size_t)r * blocks + b]);
#pragma unroll
        for (int c = 0; c < C; c++) {
            size_t at = (size_t)c * blocks + b;
            uint4 low = x[2 * at], high = x[2 * at + 1];
            float2 s = x_scales[at];
            u32 l[4] = {low.x, low.y, low.z, low.w}, h[4] = {high.x, high.y, high.z, high.w};
#pragma unroll
            for (int r = 0; r < R; r++) {
                u32 words[4] = {w[r].x, w[r].y, w[r].z, w[r].w};
                int dot = 0;
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    dot = dot4(words[i] & 0x0f0f0f0fu, l[i], dot);
                    dot = dot4(words[i] >> 4 & 0x0f0f0f0fu, h[i], dot);
                }
                sum[r][c] = fma32(d[r], fma32(s.x, i32_f32(dot), -s.y), sum[r][c]);
            }
        }
    }
#pragma unroll
    for (int r = 0; r < R; r++)
#pragma unroll
        for (int c = 0; c < C; c++) {
            float v = warp_tree(sum[r][c]);
            if (lane == 0) y[((size_t)blockIdx.y * C + c) * rows + row + r] = v;
        }
}
