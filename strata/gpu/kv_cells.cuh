// One K or V head in its cell: float16, or int8 codes with a float16 scale per 64 values (scales null: float16).
#pragma once
#include "sums.cuh"

#define SCALE_GROUP 64

DEVICE float load_cell(const void *cells, const u16 *scales, size_t head, int n, int i) {
    if (!scales) return half_f32(((const u16 *)cells)[head * n + i]);
    float step = half_f32(scales[head * (n / SCALE_GROUP) + i / SCALE_GROUP]);
    return half_f32(f32_half(mul32(i32_f32(((const i8 *)cells)[head * n + i]), step)));
}

// One warp writes x[0 .. n) as head number `head`; x may be in shared memory. False if a value does not fit or is not
// finite; what is stored then has no meaning, and no window survives it.
DEVICE bool store_head(void *cells, u16 *scales, size_t head, const float *x, int n) {
    int lane = threadIdx.x & 31;
    bool fine = true;
    if (!scales) {
        u16 *out = (u16 *)cells + head * n;
        for (int i = lane; i < n; i += 32) {
            u16 h = f32_half(x[i]);
            out[i] = h;
            fine = fine && (h & 0x7c00) != 0x7c00;
        }
        return warp_all(fine);
    }
    i8 *codes = (i8 *)cells + head * n;
    u16 *steps = scales + head * (n / SCALE_GROUP);
    for (int g = 0; g < n / SCALE_GROUP; g++) {
        float a = x[g * SCALE_GROUP + lane], b = x[g * SCALE_GROUP + 32 + lane];
        u32 top = bits_of(a) & 0x7fffffffu, other = bits_of(b) & 0x7fffffffu;
        top = other > top ? other : top;
#pragma unroll
        for (int half = 16; half; half >>= 1) {
            other = __shfl_xor_sync(ALL_LANES, top, half);
            top = other > top ? other : top;
        }
        u16 step = f32_half(div32(float_of(top), 127.f));
        float scale = half_f32(step);
        bool fits = top < 0x7f800000u && (f32_half(mul32(127.f, scale)) & 0x7c00) != 0x7c00;
        fine = fine && fits;
        bool live = fits && scale > 0.f;
        // Clamped: dividing by the rounded scale may give a little more than 127.
        int code_a = live ? rint_i32(div32(a, scale)) : 0, code_b = live ? rint_i32(div32(b, scale)) : 0;
        codes[g * SCALE_GROUP + lane] = (i8)(code_a > 127 ? 127 : code_a < -127 ? -127 : code_a);
        codes[g * SCALE_GROUP + 32 + lane] = (i8)(code_b > 127 ? 127 : code_b < -127 ? -127 : code_b);
        if (lane == 0) steps[g] = step;
    }
    return fine;
}
