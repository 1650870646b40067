// Gated DeltaNet: causal convolution, the delta rule over T rows, commit of the first rows, shift of a history.
//
// Sums over the key axis have 4 lanes (key index mod 4). A block is one value head, or in a commit some of its columns,
// with four neighbouring threads a column: thread 4j + r holds column j of the keys r, r + 4, .. in registers for all rows,
// so the state is read once and, in a window, never written. Rows of the rule follow each other without a barrier. Windows of
// heads of the usual sizes have a kernel of their own (gated_delta_split.cuh).
#include "arrivals.cuh"
#include "early.cuh"
#include "gated_delta_keys.cuh"
#include "gated_delta_split.cuh"
#include "quantise.cuh"

#define ROWS 8  // rows that are prepared side by side

// The convolution of row t in channel c. w (taps, channels), history (taps - 1, channels).
DEVICE float convolved(const float *qkv, const float *w, const float *history, int t, int c, int channels, int taps) {
    float sum = 0.f;
    for (int i = 0; i < taps; i++) {
        int source = t - (taps - 1) + i;
        float x = source >= 0 ? qkv[(size_t)source * channels + c] : history[(size_t)(source + taps - 1) * channels + c];
        sum = fma32(w[(size_t)i * channels + c], x, sum);
    }
    return silu32(sum);
}

// One thread a channel, all rows.
KERNEL(256) gdn_conv(const float *qkv, float *conv, const float *w, float *const *history_slot, int T, int channels,
                     int taps, int advance, u64 *error, u64 where) {
    int c = blockIdx.x * 256 + threadIdx.x;
    if (c >= channels) return;
    float *history = *history_slot;
    for (int t = 0; t < T; t++) {
        float sum = convolved(qkv, w, history, t, c, channels, taps);
        conv[(size_t)t * channels + c] = sum;
        if (!finite32(sum)) report(error, where, NOT_FINITE, t);
    }
    history += c;
    if (advance)
        for (int j = 0; j < taps - 1; j++) {
            int source = T - (taps - 1) + j;
            history[(size_t)j * channels] = source >= 0 ? qkv[(size_t)source * channels + c] : history[(size_t)(j + T) * channels];
        }
}

// History (n, width) becomes the last n rows of (history, rows[: *n_keep]). One thread a column.
KERNEL(256) history_commit(float *const *history_slot, const float *rows, const i64 *n_keep, int n, int width) {
    int c = blockIdx.x * 256 + threadIdx.x;
    if (c >= width) return;
    float *history = *history_slot + c;
    int keep = (int)*n_keep;
    if (keep <= 0) return;
    for (int j = 0; j < n; j++) {
        int source = keep - n + j;  // ascending: what is read was not written yet
        history[(size_t)j * width] = source >= 0 ? rows[(size_t)source * width + c] : history[(size_t)(j + keep) * width];
    }
}

// x / sqrt(sum x^2 + 1e-6) * scale in place, by one warp.
template <int N>
DEVICE void unit(float *x, int n, float scale) {
    auto value = [&](int i) { return x[in_lanes<N>(i)]; };
    float squares = warp_dot(n, lanes_of(n, 256), value, value);
    float r = div32(1.f, sqrt32(add32(squares, 1e-6f)));
    for (int i = threadIdx.x & 31; i < n; i += 32) x[in_lanes<N>(i)] = mul32(mul32(x[in_lanes<N>(i)], r), scale);
}

// Sum of the four lanes of a column, for its four threads.
DEVICE float over_keys(float v) {
    v = add32(v, __shfl_xor_sync(ALL_LANES, v, 2));
    return add32(v, __shfl_xor_sync(ALL_LANES, v, 1));
}

struct Rows32 {  // outputs as activations in groups of 32, which heads must hold whole ones of; codes null: not wanted
    i8 *codes;
    float *scales;
    int *sums;
};

struct Rows256 {  // the same in groups of 256, which neighbouring heads share; arrived: a counter for each group of a row
    i8 *codes;
    float *scales;
    int *sums;
    u32 *arrived;
};

struct Convolution {  // inputs of the convolution; qkv null: its outputs are there already
    const float *qkv, *w, *history;
    int taps;
};

// The keys r, r + 4, .. of a column, zero behind the last one.
template <int N>
DEVICE void load_column(const float *cell, int keys, int dv, float (&S)[N]) {
#pragma unroll
    for (int m = 0; m < N; m++, cell += 4 * dv) S[m] = m < keys ? *cell : 0.f;
}

// The same before the inputs are there, of a state that no kernel of this graph writes.
template <int N>
DEVICE void load_column_early(const float *cell, int keys, int dv, float (&S)[N]) {
#pragma unroll
    for (int m = 0; m < N; m++, cell += 4 * dv) S[m] = m < keys ? load_now(cell) : 0.f;
}

// What a block's channels need of the convolution besides this window's rows: weights and history, which only commits
// write.
DEVICE void bring_channels(const Convolution &source, int h, int key_head, int Hk, int dk, int dv, int channels) {
    int starts[3] = {key_head * dk, (Hk + key_head) * dk, 2 * Hk * dk + h * dv};
#pragma unroll
    for (int i = 0; i < 3; i++) {
        int t = threadIdx.x - 32 * i, bytes = 4 * (i < 2 ? dk : dv);
        if (t >= 0 && t < source.taps) bring_early(source.w + (size_t)t * channels + starts[i], bytes, 0, 1);
        t -= 16;
        if (t >= 0 && t < source.taps - 1) bring_early(source.history + (size_t)t * channels + starts[i], bytes, 0, 1);
    }
}

// N: keys a thread holds, at least dk / 4. OUTPUT false: only the state is advanced, by the first *n_keep rows.
// CONV: the block makes its own channels of conv first; those of a key head that several blocks share are stored by one.
template <int N, bool OUTPUT, bool CONV>
DEVICE void delta_rule(const Convolution &source, float *conv, float *decay, float *beta, const float *z, const float *a, const float *dt,
                       const float *norm, float *const *state_slot, float *y, int T, int Hk, int Hv, int dk, int dv,
                       int channels, int advance, float eps, float q_scale, const Rows32 &quantised, const Rows256 &wide_groups,
                       u64 *error, u64 where) {
    DYNAMIC_SHARED(bytes);
    let_next_start();
    int columns = blockDim.x / 4, first = blockIdx.y * columns;
    const int LANE = N + 4, SIDE = 4 * LANE;
    float *gates = (float *)bytes, *own = gates + 2 * ROWS;  // own: q, k, v of each row
    int h = blockIdx.x, t = threadIdx.x, r = t & 3, j = t >> 2, key_head = h % Hk, keys = dk / 4;
    int width = 2 * dk + columns, wide = 2 * SIDE + columns;
    float *cell = load_now(state_slot) + ((size_t)h * dk + r) * dv + first + j;
    float S[N];
    if (CONV) {  // the state before everything else where the registers allow it
        load_column_early<N>(cell, keys, dv, S);
        bring_channels(source, h, key_head, Hk, dk, dv, channels);
    }
    wait_for_inputs();
    // Keys, queries, values and gates of up to ROWS rows first, side by side: only the rule itself is one row after the
    // other, and the norm of the outputs comes after it, again for all rows.
#pragma unroll 1
    for (int row0 = 0; row0 < T; row0 += ROWS) {
        int rows = T - row0 < ROWS ? T - row0 : ROWS, warp = t >> 5, warps = blockDim.x >> 5;
        __syncthreads();
#pragma unroll 1
        for (int at = t; at < rows * width; at += blockDim.x) {
            int row = at / width, i = at % width;
            int c = i < dk ? key_head * dk + i : i < 2 * dk ? (Hk - 1 + key_head) * dk + i : 2 * Hk * dk + h * dv + first + i - 2 * dk;
            float *mixed = conv + (size_t)(row0 + row) * channels + c, x;
            if (CONV) {
                x = convolved(source.qkv, source.w, source.history, row0 + row, c, channels, source.taps);
                if (i >= 2 * dk || h < Hk) *mixed = x;
                if (!finite32(x)) report(error, where - (1ull << 48), NOT_FINITE, row0 + row);  // the op before this one
            } else {
                x = *mixed;
            }
            int place = i < dk ? in_lanes<N>(i) : i < 2 * dk ? SIDE + in_lanes<N>(i - dk) : 2 * SIDE + i - 2 * dk;
            own[row * wide + place] = x;
        }
        if (t < rows) {
            size_t at = (size_t)(row0 + t) * Hv + h;
            float alpha = decay[at], raw = beta[at];
            if (OUTPUT) {
                // What a softplus, exp or sigmoid would make a finite number of.
                if (!(finite32(alpha) && finite32(raw))) report(error, where, NOT_FINITE, row0 + t);
                alpha = exp32(mul32(a[h], softplus32(add32(alpha, dt[h]))));
                raw = sigmoid32(raw);
                decay[at] = alpha;
                beta[at] = raw;
            }
            gates[2 * t] = alpha;
            gates[2 * t + 1] = raw;
        }
        __syncthreads();
#pragma unroll 1
        for (int one = warp; one < (OUTPUT ? 2 : 1) * rows; one += warps) {
            int row = one % rows;
            if (one < rows) unit<N>(own + row * wide + SIDE, dk, 1.f);
            else unit<N>(own + row * wide, dk, q_scale);
        }
        __syncthreads();
        if (!CONV && row0 == 0) load_column<N>(cell, keys, dv, S);
#pragma unroll 1
        for (int row = 0; row < rows; row++) {
            float *value = own + row * wide + 2 * SIDE + j;
            const float *q = own + row * wide + r * LANE, *k = q + SIDE;
            float fade = gates[2 * row], part = 0.f, four[4];
#pragma unroll
            for (int i = 0; i < N / 4; i++)
                if (4 * i < keys) {
                    load_four(k, i, four);
#pragma unroll
                    for (int m = 4 * i; m < 4 * i + 4; m++)
                        if (m < keys) {
                            S[m] = mul32(S[m], fade);
                            part = fma32(S[m], four[m & 3], part);
                        }
                    hold_loads(i);
                }
            float delta = mul32(gates[2 * row + 1], sub32(*value, over_keys(part)));
            part = 0.f;
#pragma unroll
            for (int i = 0; i < N / 4; i++)
                if (4 * i < keys) {
                    float also[4];
                    load_four(k, i, four);
                    if (OUTPUT) load_four(q, i, also);
#pragma unroll
                    for (int m = 4 * i; m < 4 * i + 4; m++)
                        if (m < keys) {
                            S[m] = fma32(four[m & 3], delta, S[m]);
                            if (OUTPUT) part = fma32(S[m], also[m & 3], part);
                        }
                    hold_loads(i);
                }
            if (!OUTPUT) continue;
            float o = over_keys(part);
            __syncwarp();  // the other threads of the column have read the value
            if (r == 0) *value = o;
        }
        if (!OUTPUT) continue;
        __syncthreads();
#pragma unroll 1
        for (int row = warp; row < rows; row += warps) {
            const float *o = own + row * wide + 2 * SIDE;
            auto value = [&](int i) { return o[i]; };
            float scale = inverse_rms(warp_dot(dv, lanes_of(dv, 256), value, value), dv, eps);
            bool fine = true;
            for (int i = t & 31; i < dv; i += 32) {
                size_t place = ((size_t)(row0 + row) * Hv + h) * dv + i;
                float gate = z[place], out = mul32(mul32(mul32(o[i], scale), norm[i]), sigmoid32(gate));
                y[place] = out;
                fine = fine && finite32(out) && finite32(gate);
                if (CONV && quantised.codes) {
                    float value[1] = {out};
                    size_t group = place >> 5;
                    quantise_group<1>(value, quantised.codes + 32 * group, quantised.scales + group, quantised.sums + 2 * group);
                }
            }
            if (!fine) report(error, where, NOT_FINITE, row0 + row);
        }
    }
    if (CONV && wide_groups.codes) {
        int heads = 256 / dv, group = h / heads, groups = Hv / heads;
        if (last_of(wide_groups.arrived + group, heads))
#pragma unroll 1
            for (int row = t >> 5; row < T; row += blockDim.x >> 5) {
                float value[8];
                size_t g = (size_t)row * groups + group;
                load_eight(y + 256 * g + 8 * (t & 31), value);
                quantise_group<8>(value, wide_groups.codes + 256 * g, wide_groups.scales + g, wide_groups.sums + 16 * g);
            }
    }
    if (!advance) return;
#pragma unroll
    for (int m = 0; m < N; m++, cell += 4 * dv)
        if (m < keys) *cell = S[m];
}

template <int N>
STARTS_EARLY KERNEL(512) gdn_heads(float *conv, float *decay, float *beta, const float *z, const float *a, const float *dt,
                      const float *norm, float *const *state_slot, float *y, int T, int Hk, int Hv, int dk, int dv,
                      int channels, int advance, float eps, float q_scale, u64 *error, u64 where) {
    delta_rule<N, true, false>(Convolution(), conv, decay, beta, z, a, dt, norm, state_slot, y, T, Hk, Hv, dk, dv, channels,
                               advance, eps, q_scale, Rows32(), Rows256(), error, where);
}

// Convolution and delta rule of a window in one; conv is left for the commit.
template <int N>
STARTS_EARLY KERNEL(512) gdn_window(const float *qkv, const float *w, const float *const *history_slot, int taps, float *conv,
                       float *decay, float *beta, const float *z, const float *a, const float *dt, const float *norm,
                       float *const *state_slot, float *y, int T, int Hk, int Hv, int dk, int dv, int channels, float eps,
                       float q_scale, i8 *codes, float *scales, int *sums, i8 *codes256, float *scales256, int *sums256, u32 *arrived,
                       u64 *error, u64 where) {
    delta_rule<N, true, true>(Convolution{qkv, w, load_now(history_slot), taps}, conv, decay, beta, z, a, dt, norm, state_slot, y, T,
                              Hk, Hv, dk, dv, channels, 0, eps, q_scale, Rows32{codes, scales, sums}, Rows256{codes256, scales256, sums256, arrived}, error, where);
}

template <int N>
KERNEL(256) gdn_commit(float *conv, float *decay, float *beta, float *const *state_slot, const i64 *n_keep, int Hk,
                       int Hv, int dk, int dv, int channels) {
    int keep = (int)*n_keep;
    if (keep > 0)
        delta_rule<N, false, false>(Convolution(), conv, decay, beta, nullptr, nullptr, nullptr, nullptr, state_slot, nullptr,
                                    keep, Hk, Hv, dk, dv, channels, 1, 0.f, 1.f, Rows32(), Rows256(), nullptr, 0);
}
