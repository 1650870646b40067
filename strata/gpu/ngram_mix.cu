// N-gram block: rows from the reader, gates and rows of the convolution, then the convolution into the streams.
#include "early.cuh"
#include "sums.cuh"

#define READS 4  // of 16 bytes that a thread has under way at once: a trip to the host's memory takes over a microsecond
#define NEAR 10  // values of a row of 256 threads each; ngram_mix.py has it too
#define TAPS 4   // of the convolution that are asked for before the inputs are there

// Waits until the reader has filled this window's rows, then copies them here. ticket: (wanted, done) in host memory;
// the reader sets done to wanted, or to its negative on failure. One thread of a block polls. staged and rows: n floats,
// a multiple of 4, 16-byte aligned. Grid: n / (4 * 256 * READS).
KERNEL(256) ngram_wait(const i64 *ticket, const float *staged, float *rows, int n, u64 limit_ns, u64 *error, u64 where) {
    __shared__ int code;
    if (threadIdx.x == 0) {
        i64 wanted = load_volatile(ticket), done = load_acquire(ticket + 1);  // together: one trip
        u64 end = clock_ns() + limit_ns;
        code = 0;
        while (done != wanted && done != -wanted) {
            if (clock_ns() > end) {
                code = NGRAM_TIMEOUT;
                report(error, where, NGRAM_TIMEOUT, (u32)(limit_ns / 1000000));
                break;
            }
            done = load_acquire(ticket + 1);
        }
        if (!code && done != wanted) {
            code = NGRAM_FAILED;
            report(error, where, NGRAM_FAILED, 0);
        }
    }
    __syncthreads();
    let_next_start();  // not before: what waits behind it would take the place of what runs beside it
    // Volatile: the host writes these while earlier kernels run, so no cached copy may be used.
    const uint4 *source = (const uint4 *)staged;
    int first = blockIdx.x * 256 * READS + threadIdx.x;
    uint4 v[READS];
#pragma unroll
    for (int j = 0; j < READS; j++) {
        v[j] = make_uint4(0, 0, 0, 0);
        if (!code && first + 256 * j < n / 4) v[j] = load_volatile(source + first + 256 * j);
    }
#pragma unroll
    for (int j = 0; j < READS; j++)
        if (first + 256 * j < n / 4) ((uint4 *)rows)[first + 256 * j] = v[j];
}

DEVICE float gate_of(float product, int D) {
    float s = div32(product, sqrt32(i32_f32(D))), size = fabsf(s);
    size = sqrt32(size < 1e-6f ? 1e-6f : size);
    return sigmoid32(s < 0.f ? -size : s > 0.f ? size : s);
}

// Trees over the 256 threads of a block for N sums at once, each as block_tree256. Every thread gets all sums.
template <int N>
DEVICE void block_trees(float (&v)[N], float (*lanes)[256], float *sums) {
    int t = threadIdx.x, warp = t >> 5, lane = t & 31;
    __syncthreads();  // the last sums have been read
#pragma unroll
    for (int n = 0; n < N; n++) lanes[n][t] = v[n];
    __syncthreads();
    if (warp < N) {
        float a[8];
#pragma unroll
        for (int j = 0; j < 8; j++) a[j] = lanes[warp][32 * j + lane];
        float s = warp_tree256(a);
        if (lane == 0) sums[warp] = s;
    }
    __syncthreads();
#pragma unroll
    for (int n = 0; n < N; n++) v[n] = sums[n];
}

// As ngram_gate for 256 <= D <= 256 NEAR: all values stay in registers, weights are there before the inputs.
STARTS_EARLY KERNEL(256) ngram_gate_near(const float *x, const float *key, const float *value, const float *norm_key, const float *norm_query,
                            const float *norm_conv, float *rows, float *gates, int C, int D, float eps, u64 *error, u64 where) {
    __shared__ float lanes[2][256], sums[2];
    let_next_start();
    int c = blockIdx.x, row = blockIdx.y, t = threadIdx.x;
    size_t at = ((size_t)row * C + c) * D;
    float wk[NEAR], wq[NEAR], wc[NEAR], k[NEAR], q[NEAR], v[NEAR];
#pragma unroll
    for (int j = 0; j < NEAR; j++) {
        int i = t + 256 * j;
        bool there = i < D;
        wk[j] = there ? load_now(norm_key + (size_t)c * D + i) : 0.f;
        wq[j] = there ? load_now(norm_query + (size_t)c * D + i) : 0.f;
        wc[j] = there ? load_now(norm_conv + (size_t)c * D + i) : 0.f;
    }
    wait_for_inputs();
#pragma unroll
    for (int j = 0; j < NEAR; j++) {
        int i = t + 256 * j;
        bool there = i < D;
        k[j] = there ? key[at + i] : 0.f;
        q[j] = there ? x[at + i] : 0.f;
        v[j] = there ? value[(size_t)row * D + i] : 0.f;
    }
    float squares[2] = {0.f, 0.f}, one[1] = {0.f};
#pragma unroll
    for (int j = 0; j < NEAR; j++)
        if (t + 256 * j < D) {
            squares[0] = fma32(k[j], k[j], squares[0]);
            squares[1] = fma32(q[j], q[j], squares[1]);
        }
    block_trees(squares, lanes, sums);
    float rk = inverse_rms(squares[0], D, eps), rq = inverse_rms(squares[1], D, eps);
#pragma unroll
    for (int j = 0; j < NEAR; j++)
        if (t + 256 * j < D) one[0] = fma32(mul32(mul32(k[j], rk), wk[j]), mul32(mul32(q[j], rq), wq[j]), one[0]);
    block_trees(one, lanes, sums);
    float gate = gate_of(one[0], D);
    one[0] = 0.f;
#pragma unroll
    for (int j = 0; j < NEAR; j++)
        if (t + 256 * j < D) {
            v[j] = mul32(gate, v[j]);
            one[0] = fma32(v[j], v[j], one[0]);
        }
    block_trees(one, lanes, sums);
    float r = inverse_rms(one[0], D, eps);
#pragma unroll
    for (int j = 0; j < NEAR; j++)
        if (t + 256 * j < D) rows[at + t + 256 * j] = mul32(mul32(v[j], r), wc[j]);
    if (t == 0) gates[row * C + c] = gate;
}

// One block a (stream, row): gate = sigmoid of the signed root of key . query / sqrt(D), rows = rms(gate value) w.
STARTS_EARLY KERNEL(256) ngram_gate(const float *x, const float *key, const float *value, const float *norm_key, const float *norm_query,
                       const float *norm_conv, float *rows, float *gates, int C, int D, float eps, u64 *error, u64 where) {
    __shared__ float shared[8];
    let_next_start();
    wait_for_inputs();
    int c = blockIdx.x, t = blockIdx.y, lanes = lanes_of(D, 256), lane = threadIdx.x;
    size_t at = ((size_t)t * C + c) * D;
    const float *k = key + at, *q = x + at, *v = value + (size_t)t * D;
    const float *wk = norm_key + (size_t)c * D, *wq = norm_query + (size_t)c * D, *wc = norm_conv + (size_t)c * D;
    float rk = inverse_rms(block_squares(D, [&](int i) { return k[i]; }, shared), D, eps);
    __syncthreads();
    float rq = inverse_rms(block_squares(D, [&](int i) { return q[i]; }, shared), D, eps);
    __syncthreads();
    float sum = 0.f;
    if (lane < lanes)
        for (int i = lane; i < D; i += lanes)
            sum = fma32(mul32(mul32(k[i], rk), wk[i]), mul32(mul32(q[i], rq), wq[i]), sum);
    float gate = gate_of(block_tree256(sum, shared), D);
    __syncthreads();
    float r = inverse_rms(block_squares(D, [&](int i) { return mul32(gate, v[i]); }, shared), D, eps);
    for (int i = lane; i < D; i += 256) rows[at + i] = mul32(mul32(mul32(gate, v[i]), r), wc[i]);
    if (lane == 0) gates[t * C + c] = gate;
}

// x = (x + gate value) + silu(convolution of rows). conv (taps, C D); history ((taps - 1) dilation, C D).
STARTS_EARLY KERNEL(256) ngram_conv(float *x, const float *value, const float *rows, const float *gates, const float *conv,
                       const float *const *history_slot, int C, int D, int taps, int dilation, u64 *error, u64 where) {
    let_next_start();
    int i = blockIdx.x * 256 + threadIdx.x, t = blockIdx.y, width = C * D, n_history = (taps - 1) * dilation;
    bool there = i < width;
    // Weights and rows of earlier windows do not depend on this one.
    const float *history = load_now(history_slot);
    float w[TAPS], h[TAPS];
#pragma unroll
    for (int j = 0; j < TAPS; j++) {
        int source = t - (taps - 1 - j) * dilation;
        bool wanted = there && j < taps;
        w[j] = wanted ? load_now(conv + (size_t)j * width + i) : 0.f;
        h[j] = wanted && source < 0 ? load_now(history + (size_t)(source + n_history) * width + i) : 0.f;
    }
    int stream = i / D;
    wait_for_inputs();
    if (!there) return;
    float *p = x + (size_t)t * width + i;
    float before = *p, gate = gates[t * C + stream], its_value = value[(size_t)t * D + (i - stream * D)];
#pragma unroll
    for (int j = 0; j < TAPS; j++) {
        int source = t - (taps - 1 - j) * dilation;
        if (j < taps && source >= 0) h[j] = rows[(size_t)source * width + i];
    }
    float sum = 0.f;
#pragma unroll
    for (int j = 0; j < TAPS; j++)
        if (j < taps) sum = fma32(w[j], h[j], sum);
    for (int j = TAPS; j < taps; j++) {
        int source = t - (taps - 1 - j) * dilation;
        float far = source >= 0 ? rows[(size_t)source * width + i] : history[(size_t)(source + n_history) * width + i];
        sum = fma32(conv[(size_t)j * width + i], far, sum);
    }
    float out = add32(add32(before, mul32(gate, its_value)), silu32(sum));
    *p = out;
    if (!finite32(out)) report(error, where, NOT_FINITE, t);
}
