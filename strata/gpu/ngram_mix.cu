// N-gram block: rows from the reader, gates and rows of the convolution, then the convolution into the streams.
#include "early.cuh"
#include "sums.cuh"

// Waits until the reader has filled this window's rows, then copies them here. ticket: (wanted, done) in host memory;
// the reader sets done to wanted, or to its negative on failure. One block; one thread polls.
KERNEL(1024) ngram_wait(const i64 *ticket, const float *staged, float *rows, int n, u64 limit_ns, u64 *error, u64 where) {
    __shared__ int code;
    if (threadIdx.x == 0) {
        i64 wanted = load_acquire(ticket), done = load_acquire(ticket + 1);
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
    // Volatile: the host writes these while earlier kernels run, so no cached copy may be used.
    const volatile float *source = staged;
    for (int i = threadIdx.x; i < n; i += 1024) rows[i] = code ? 0.f : source[i];
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
    float s = div32(block_tree256(sum, shared), sqrt32(i32_f32(D)));
    float size = fabsf(s);
    size = sqrt32(size < 1e-6f ? 1e-6f : size);
    float gate = sigmoid32(s < 0.f ? -size : s > 0.f ? size : s);
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
    if (i < width && !(threadIdx.x & 31))
        for (int j = 0; j < taps; j++) bring_early(conv + (size_t)j * width + i, 128, 0, 1);
    wait_for_inputs();
    if (i >= width) return;
    const float *history = *history_slot;
    float sum = 0.f;
    for (int j = 0; j < taps; j++) {
        int source = t - (taps - 1 - j) * dilation;
        float h = source >= 0 ? rows[(size_t)source * width + i] : history[(size_t)(source + n_history) * width + i];
        sum = fma32(conv[(size_t)j * width + i], h, sum);
    }
    float *p = x + (size_t)t * width + i;
    float out = add32(add32(*p, mul32(gates[t * C + i / D], value[(size_t)t * D + i % D])), silu32(sum));
    *p = out;
    if (!finite32(out)) report(error, where, NOT_FINITE, t);
}
