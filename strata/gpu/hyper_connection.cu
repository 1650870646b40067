// Hyper-connections: norm of every stream (after adding the last branch's output, where there is one), mixing, add.
#include "early.cuh"
#include "quantise.cuh"

#define STREAMS 4  // streams whose values are loaded at once
#define HELD 12    // values of a stream that a thread keeps in registers: up to 3,072 values a stream

// One block of 256 threads a (stream, row). ADD: X[c] = fma(a[c], y, X[c]) first, and kept.
// x (rows, C, D), w (C, D), out (T, C, D); first: address of the index of x's first row, or null.
template <bool ADD>
STARTS_EARLY KERNEL(256) hc_norm(float *x, const float *y, const float *a, const float *w, float *out, int C, int D, float eps,
                    const i64 *first, u64 *error, u64 where) {
    __shared__ float shared[8];
    let_next_start();
    int c = blockIdx.x, row = blockIdx.y, t = threadIdx.x;
    float *target = out + ((size_t)row * C + c) * D;
    const float *weight = w + (size_t)c * D;
    bool held = D >= 256 && D <= 256 * HELD;  // then a thread's values are its lane of the sum
    float mine[HELD], scale[HELD], squares;
    if (held)  // on their way during the sum
#pragma unroll
        for (int j = 0; j < HELD; j++) scale[j] = t + 256 * j < D ? __ldg(weight + t + 256 * j) : 0.f;
    wait_for_inputs();
    float *stream = x + ((size_t)((first ? *first : 0) + row) * C + c) * D;
    if (ADD || held) {
        float strength = ADD ? a[row * C + c] : 0.f;
        const float *branch = ADD ? y + (size_t)row * D : nullptr;
        if (held) {
#pragma unroll
            for (int j = 0; j < HELD; j++) {
                int i = t + 256 * j;
                mine[j] = i < D ? stream[i] : 0.f;
                if (ADD && i < D) mine[j] = fma32(strength, branch[i], mine[j]);
            }
            float sum = 0.f;
#pragma unroll
            for (int j = 0; j < HELD; j++)
                if (t + 256 * j < D) {
                    sum = fma32(mine[j], mine[j], sum);
                    if (ADD) stream[t + 256 * j] = mine[j];
                }
            squares = block_tree256(sum, shared);
        } else {
            for (int i = t; i < D; i += 256) stream[i] = fma32(strength, branch[i], stream[i]);
            __syncthreads();
        }
    }
    if (!held) squares = block_squares(D, [&](int i) { return stream[i]; }, shared);
    float r = inverse_rms(squares, D, eps);
    if (held) {
#pragma unroll
        for (int j = 0; j < HELD; j++) {
            int i = t + 256 * j;
            if (i < D) target[i] = mul32(mul32(mine[j], r), scale[j]);
        }
    } else {
        for (int i = t; i < D; i += 256) target[i] = mul32(mul32(stream[i], r), weight[i]);
    }
    if (t == 0 && !(finite32(squares) && finite32(r))) report(error, where, NOT_FINITE, row);
}

STARTS_EARLY KERNEL(256) hc_add(float *x, const float *y, const float *a, int C, int D) {
    let_next_start();
    wait_for_inputs();
    int i = blockIdx.x * 256 + threadIdx.x, row = blockIdx.y;
    if (i >= C * D) return;
    float *p = x + (size_t)row * C * D + i;
    *p = fma32(a[row * C + i / D], y[(size_t)row * D + i % D], *p);
}

// u = mean over streams of sigmoid(gate) normed, a = 2 sigmoid(inject / C); u is quantised too where codes are given.
// One block of 256 columns of one row. inject, codes32 and codes256 may be null.
STARTS_EARLY KERNEL(256) hc_mix(const float *normed, const float *gate, float *u, int C, int D, const float *inject, float *a,
                   i8 *codes32, float *scales32, int *sums32, i8 *codes256, float *scales256, int *sums256,
                   u64 *error, u64 where) {
    let_next_start();
    wait_for_inputs();
    int t = threadIdx.x, i = blockIdx.x * 256 + t, row = blockIdx.y;
    float count = i32_f32(C), value = 0.f;
    bool fine = true;  // an infinite gate would end as a finite sigmoid
    if (i < D) {
        for (int from = 0; from < C; from += STREAMS) {
            float g[STREAMS], x[STREAMS];
#pragma unroll
            for (int j = 0; j < STREAMS; j++) {
                size_t at = ((size_t)row * C + from + j) * D + i;
                bool there = from + j < C;
                g[j] = there ? gate[at] : 0.f;
                x[j] = there ? normed[at] : 0.f;
            }
#pragma unroll
            for (int j = 0; j < STREAMS; j++)
                if (from + j < C) {
                    float part = mul32(sigmoid32(g[j]), x[j]);
                    fine = fine && finite32(g[j]);
                    value = from + j == 0 ? part : add32(value, part);
                }
        }
        value = div32(value, count);
        u[(size_t)row * D + i] = value;
        fine = fine && finite32(value);
    }
    if (inject && blockIdx.x == 0 && t < C) {
        float s = inject[row * C + t];
        a[row * C + t] = mul32(2.f, sigmoid32(div32(s, count)));
        fine = fine && finite32(s);
    }
    size_t at = (size_t)row * D + i;
    // D is a multiple of the group, so a group lies inside the row or outside.
    if (codes32 && (i & ~31) < D) quantise_value<32>(value, at, codes32, scales32, sums32);
    if (codes256) quantise_value<256>(value, at, codes256, scales256, sums256);
    if (!fine) report(error, where, NOT_FINITE, row);
}

// 1 / a, correctly rounded as by div32, in fewer steps.
#ifdef STRATA_ON_CPU
DEVICE float reciprocal32(float a) { return div32(1.f, a); }
#else
DEVICE float reciprocal32(float a) { float r; asm("rcp.rn.f32 %0,%1;" : "=f"(r) : "f"(a)); return r; }
#endif

// The same for STREAMS streams, with fewer steps behind each other: reciprocals, no divisions by a variable number, and
// strengths have a block of their own, the last of a row. Grid: (D / 256, and one more where there is inject; rows).
STARTS_EARLY KERNEL(256) hc_mix_four(const float *normed, const float *gate, float *u, int D, const float *inject, float *a,
                                     i8 *codes32, float *scales32, int *sums32, i8 *codes256, float *scales256,
                                     int *sums256, u64 *error, u64 where) {
    let_next_start();
    int t = threadIdx.x, i = blockIdx.x * 256 + t, row = blockIdx.y;
    wait_for_inputs();
    if (blockIdx.x * 256 >= D) {
        if (t < STREAMS) {
            float s = inject[row * STREAMS + t];
            a[row * STREAMS + t] = mul32(2.f, sigmoid32(mul32(s, 0.25f)));
            if (!finite32(s)) report(error, where, NOT_FINITE, row);
        }
        return;
    }
    float value = 0.f;
    bool fine = true;
    if (i < D) {
        float g[STREAMS], x[STREAMS], below[STREAMS];
        size_t at = (size_t)row * STREAMS * D + i;
#pragma unroll
        for (int c = 0; c < STREAMS; c++) g[c] = gate[at + c * D];
#pragma unroll
        for (int c = 0; c < STREAMS; c++) x[c] = normed[at + c * D];
#pragma unroll
        for (int c = 0; c < STREAMS; c++) below[c] = add32(1.f, exp32(-g[c]));
#pragma unroll
        for (int c = 0; c < STREAMS; c++) {
            float part = mul32(g[c] == g[c] ? reciprocal32(below[c]) : g[c], x[c]);  // of sigmoid32
            fine = fine && finite32(g[c]);
            value = c == 0 ? part : add32(value, part);
        }
        value = mul32(value, 0.25f);  // of a power of two: what the division gives
        u[(size_t)row * D + i] = value;
        fine = fine && finite32(value);
    }
    size_t at = (size_t)row * D + i;
    if (codes32 && (i & ~31) < D) quantise_value<32>(value, at, codes32, scales32, sums32);
    if (codes256) quantise_value<256>(value, at, codes256, scales256, sums256);
    if (!fine) report(error, where, NOT_FINITE, row);
}
