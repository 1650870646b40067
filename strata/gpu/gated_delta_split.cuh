// Convolution and delta rule of a window of up to eight rows, for heads of 128 keys and 128 values and four taps.
//
// Two blocks share a head, 64 columns of its state each, so that twice as many processors work. Four warps hold the state,
// two columns and every fourth key a thread: a value of k or q that was loaded serves both columns, and the output of a row
// is summed beside the delta of the next. Eight warps make q and k of all rows before that, a thread a channel. The norm
// needs whole heads and a group of 256 two of them, so the last of the four blocks of two heads to arrive norms, gates and
// quantises, one warp a row. Until then nothing is written that another block reads.
#pragma once
#include "arrivals.cuh"
#include "divide_all.cuh"
#include "early.cuh"
#include "gated_delta_keys.cuh"
#include "quantise.cuh"

#define SPLIT_HEAD 128    // keys, and values, of a head
#define SPLIT_COLUMNS 64  // of a block
#define SPLIT_TAPS 4
#define SPLIT_WINDOW 8    // most rows
#define SPLIT_LANE (SPLIT_HEAD / 4 + 8)
#define SPLIT_RULE 4      // warps that hold the state
#define SPLIT_INPUTS 8    // warps that make q and k, and each a row of the end
#define SPLIT_THREADS 384

struct SplitRow {
    float qk[2][4 * SPLIT_LANE], v[SPLIT_COLUMNS];
    float gate[2 * SPLIT_HEAD];  // of the outputs of two heads
};

struct SplitGate {
    float decay, beta;
};

struct SplitShared {
    SplitGate gates[2][SPLIT_WINDOW];  // of two heads
    SplitRow rows[SPLIT_WINDOW];       // as many as the window has
};

DEVICE int split_place(int i) { return in_lanes<SPLIT_LANE - 4>(i); }

// Two neighbours of what no kernel of this graph writes.
DEVICE float2 load_two_now(const float *p) {
#if CAN_START_EARLY
    float2 v;
    asm volatile("ld.relaxed.gpu.global.v2.f32 {%0,%1},[%2];" : "=f"(v.x), "=f"(v.y) : "l"(p));
    return v;
#else
    return *(const float2 *)p;
#endif
}

// q (side 0) or k (side 1) of a key head in one channel: what the convolution needs besides the window's rows, then its outputs.
struct SplitChannel {
    float tap[SPLIT_TAPS], past[SPLIT_TAPS - 1];

    DEVICE void load_early(const float *w, const float *history, int c, int channels) {
#pragma unroll
        for (int i = 0; i < SPLIT_TAPS; i++) tap[i] = load_now(w + (u32)(i * channels + c));
#pragma unroll
        for (int i = 0; i < SPLIT_TAPS - 1; i++) past[i] = load_now(history + (u32)(i * channels + c));
    }

    // Into place `at` of side `key` of every row, and into conv if it is to be `kept`.
    DEVICE void convolve(const float *qkv, float *conv, SplitRow *rows, int key, int at, bool kept, int T, int c, int channels,
                         u64 *error, u64 where) const {
        float x[SPLIT_TAPS - 1 + SPLIT_WINDOW];
#pragma unroll
        for (int i = 0; i < SPLIT_TAPS - 1; i++) x[i] = past[i];
#pragma unroll
        for (int row = 0; row < SPLIT_WINDOW; row++) {
            x[SPLIT_TAPS - 1 + row] = 0.f;
            if (row < T) x[SPLIT_TAPS - 1 + row] = qkv[(u32)(row * channels + c)];
        }
        // Two rows at a time: the second may be none of the window.
#pragma unroll 1
        for (int row = 0; row < T; row += 2) {
            bool two = row + 1 < T;
            float sum[2] = {0.f, 0.f}, out[2];
#pragma unroll
            for (int i = 0; i < SPLIT_TAPS; i++) {
                sum[0] = fma32(tap[i], x[i], sum[0]);
                sum[1] = fma32(tap[i], x[i + 1], sum[1]);
            }
            if (!two) sum[1] = sum[0];
            silu_all(sum, out);
            if (!(finite32(out[0]) && finite32(out[1]))) report(error, where, NOT_FINITE, finite32(out[0]) ? row + 1 : row);
            float *to = conv + (u32)(row * channels + c);
            if (kept) to[0] = out[0];
            rows[row].qk[key][at] = out[0];
            if (two) {
                if (kept) to[channels] = out[1];
                rows[row + 1].qk[key][at] = out[1];
            }
#pragma unroll
            for (int i = 0; i < SPLIT_TAPS - 3 + SPLIT_WINDOW; i++) x[i] = x[i + 2];
        }
    }
};

// v of two columns, in rows r, r + 4: into shared memory and conv. c: the channel of the first.
DEVICE void split_values(const float *qkv, const float *w, const float *history, float *conv, SplitRow *rows, int column, int r,
                         int T, int c, int channels, u64 *error, u64 where) {
#pragma unroll 1
    for (int row0 = 0; row0 < T; row0 += 4) {
        int row = row0 + r < T ? row0 + r : T - 1;
        float2 tap[SPLIT_TAPS], x[SPLIT_TAPS];
#pragma unroll
        for (int i = 0; i < SPLIT_TAPS; i++) {
            int source = row - (SPLIT_TAPS - 1) + i;
            const float *from = source >= 0 ? qkv : history;
            tap[i] = *(const float2 *)(w + (u32)(i * channels + c));
            x[i] = *(const float2 *)(from + (u32)((source >= 0 ? source : source + SPLIT_TAPS - 1) * channels + c));
        }
        float sum[2] = {0.f, 0.f}, out[2];
#pragma unroll
        for (int i = 0; i < SPLIT_TAPS; i++) {
            sum[0] = fma32(tap[i].x, x[i].x, sum[0]);
            sum[1] = fma32(tap[i].y, x[i].y, sum[1]);
        }
        silu_all(sum, out);
        if (!(finite32(out[0]) && finite32(out[1]))) report(error, where, NOT_FINITE, row);
        if (row0 + r < T) {
            *(float2 *)(conv + (u32)(row * channels + c)) = make_float2(out[0], out[1]);
            *(float2 *)(rows[row].v + column) = make_float2(out[0], out[1]);
        }
    }
}

// x / sqrt(sum x^2 + 1e-6) * scale in place, by one warp.
DEVICE void split_unit(float *x, float scale) {
    int lane = threadIdx.x & 31;
    float value[4], square[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
        value[j] = x[split_place(lane + 32 * j)];
        square[j] = fma32(value[j], value[j], 0.f);
    }
    float squares = warp_tree(add32(add32(square[0], square[2]), add32(square[1], square[3])));
    float unit = div32(1.f, sqrt32(add32(squares, 1e-6f)));
#pragma unroll
    for (int j = 0; j < 4; j++) x[split_place(lane + 32 * j)] = mul32(mul32(value[j], unit), scale);
}

// Sum of the four lanes of a column, for its four threads: lane r of the sum is in threads 8 r ... of the warp.
DEVICE float split_over_keys(float v) {
    v = add32(v, __shfl_xor_sync(ALL_LANES, v, 16));
    return add32(v, __shfl_xor_sync(ALL_LANES, v, 8));
}

// What a pass over the keys of a thread does: UPDATE takes row `now` into the state and sums for its output, NEXT lets the
// state decay and sums for the delta of row `next`. The two sums do not wait for each other.
template <bool UPDATE, bool NEXT>
DEVICE void split_pass(float2 (&S)[SPLIT_HEAD / 4], const SplitRow *now, const SplitRow *next, int r, float2 delta, float fade,
                       float2 &out, float2 &part) {
    out = part = make_float2(0.f, 0.f);
#pragma unroll
    for (int i = 0; i < SPLIT_HEAD / 16; i++) {
        float k[4], q[4], coming[4];
        if (UPDATE) {
            load_four(now->qk[1] + r * SPLIT_LANE, i, k);
            load_four(now->qk[0] + r * SPLIT_LANE, i, q);
        }
        if (NEXT) load_four(next->qk[1] + r * SPLIT_LANE, i, coming);
#pragma unroll
        for (int e = 0; e < 4; e++) {
            float2 &s = S[4 * i + e];
            if (UPDATE) {
                s = make_float2(fma32(k[e], delta.x, s.x), fma32(k[e], delta.y, s.y));
                out = make_float2(fma32(s.x, q[e], out.x), fma32(s.y, q[e], out.y));
            }
            if (NEXT) {
                s = make_float2(mul32(s.x, fade), mul32(s.y, fade));
                part = make_float2(fma32(s.x, coming[e], part.x), fma32(s.y, coming[e], part.y));
            }
        }
        hold_loads(i);
    }
}

// delta of both columns from their sums over the keys.
DEVICE float2 split_delta(float2 part, const SplitRow *now, int column, float beta) {
    float2 value = *(const float2 *)(now->v + column);
    value = make_float2(sub32(value.x, split_over_keys(part.x)), sub32(value.y, split_over_keys(part.y)));
    return make_float2(mul32(beta, value.x), mul32(beta, value.y));
}

// Outputs of both columns, which their four threads have parts of.
DEVICE void split_store(float *to, float2 o, int r) {
    o = make_float2(split_over_keys(o.x), split_over_keys(o.y));
    if (r == 0) *(float2 *)to = o;
}

// Eight groups of 32, eight neighbouring values a lane, with the operations of quantise_group.
DEVICE void split_quantise32(const float (&x)[8], i8 *codes, float *scales, int *sums) {
    int lane = threadIdx.x & 31, sum = 0;
    u32 m = 0, word[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < 8; i++) {
        u32 b = bits_of(x[i]) & 0x7fffffffu;
        m = b > m ? b : m;
    }
#pragma unroll
    for (int half = 2; half; half >>= 1) {
        u32 other = __shfl_xor_sync(ALL_LANES, m, half);
        m = other > m ? other : m;
    }
    bool live = m < INF_BITS && m >= TINY_BITS;
    float largest = float_of(live ? m : 0x3f800000u), inverse = div32(127.f, largest);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        int code = live ? rint_i32(mul32(x[i], inverse)) : 0;
        sum += code;
        word[i >> 2] |= (u32)(code & 255) << (8 * (i & 3));
    }
    *(uint2 *)(codes + 8 * lane) = make_uint2(word[0], word[1]);
    if ((lane & 3) == 0) scales[lane >> 2] = live ? div32(largest, 127.f) : 0.f;
    sum += __shfl_xor_sync(ALL_LANES, sum, 1);
    if ((lane & 1) == 0) sums[lane >> 1] = sum;
}

// Eight neighbouring floats.
DEVICE void get_eight(const float *p, float (&v)[8]) {
    float4 a = ((const float4 *)p)[0], b = ((const float4 *)p)[1];
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
}
DEVICE void set_eight(float *p, const float (&v)[8]) {
    ((float4 *)p)[0] = make_float4(v[0], v[1], v[2], v[3]);
    ((float4 *)p)[1] = make_float4(v[4], v[5], v[6], v[7]);
}

STARTS_EARLY KERNEL(SPLIT_THREADS) gdn_split(const float *qkv, const float *w, const float *const *history_slot, float *conv,
                       float *decay, float *beta, const float *z, const float *a, const float *dt, const float *norm,
                       float *const *state_slot, float *y, int T, int Hk, int Hv, int channels, float eps, float q_scale,
                       i8 *codes, float *scales, int *sums, i8 *codes256, float *scales256, int *sums256, u32 *arrived,
                       u64 *error, u64 where) {
    DYNAMIC_SHARED(bytes);
    let_next_start();
    SplitShared *own = (SplitShared *)bytes;
    int h = blockIdx.x >> 1, first = (blockIdx.x & 1) * SPLIT_COLUMNS, pair = h >> 1, key_head = h % Hk;
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, input = warp - SPLIT_RULE;
    bool rules = warp < SPLIT_RULE;
    int r = lane >> 3, column = 16 * warp + 2 * (lane & 7);  // of a thread with state
    int key = input >= SPLIT_INPUTS / 2, i = 32 * (input & 3) + lane;  // of a thread with a channel of q or k
    int c = rules ? (2 * Hk + h) * SPLIT_HEAD + first + column : (key * Hk + key_head) * SPLIT_HEAD + i;
    int row = SPLIT_INPUTS - 1 - input, place = 8 * lane;  // the row that a warp ends, values 8 lane .. of both heads
    bool ends = !rules && row < T, fine = true;
    float *out = y + (u32)((row * Hv + 2 * pair) * SPLIT_HEAD);
    const float *history = load_now(history_slot);
    u64 before = where - (1ull << 48);  // the convolution is the op before this one
    float2 S[SPLIT_HEAD / 4];
    float gate[8];
    if (rules) {
        const float *cell = load_now(state_slot) + ((size_t)h * SPLIT_HEAD + r) * SPLIT_HEAD + first + column;
#pragma unroll
        for (int m = 0; m < SPLIT_HEAD / 4; m++) S[m] = load_two_now(cell + 4 * SPLIT_HEAD * m);
        int gate_row = lane & 7, value_head = (h & ~1) + r;
        bool gates = warp == SPLIT_RULE - 1 && r < 2 && gate_row < T;
        float scale = 0.f, shift = 0.f, alpha = 0.f, raw = 0.f;
        if (gates) scale = load_now(a + value_head), shift = load_now(dt + value_head);
        wait_for_inputs();
        if (gates) alpha = decay[(u32)(gate_row * Hv + value_head)], raw = beta[(u32)(gate_row * Hv + value_head)];
        split_values(qkv, w, history, conv, own->rows, column, r, T, c, channels, error, before);
        if (gates) {
            // What a softplus, exp or sigmoid would make a finite number of.
            if (!(finite32(alpha) && finite32(raw))) report(error, where, NOT_FINITE, gate_row);
            own->gates[r][gate_row] = {exp32(mul32(scale, softplus32(add32(alpha, shift)))), sigmoid32(raw)};
        }
    } else {
        SplitChannel channel;
        channel.load_early(w, history, c, channels);
        if (lane < 2 * SPLIT_TAPS - 1 && input < 2) {  // lines of taps and history that v needs
            const float *rows = lane < SPLIT_TAPS ? w : history;
            int at = lane < SPLIT_TAPS ? lane : lane - SPLIT_TAPS;
            bring_early(rows + (u32)(at * channels + (2 * Hk + h) * SPLIT_HEAD + first + 32 * input), 4, 0, 1);
        }
        if (input == 2 && lane < 4) bring_early(norm + 32 * lane, 4, 0, 1);
        wait_for_inputs();
        if (ends) get_eight(z + (out - y) + place, gate);
        bool kept = first == 0 && h < Hk;  // blocks of a key head make the same
        channel.convolve(qkv, conv, own->rows, key, split_place(i), kept, T, c, channels, error, before);
    }
    __syncthreads();
    if (!rules)
#pragma unroll 1
        for (int one = input; one < 2 * T; one += SPLIT_INPUTS)
            split_unit(own->rows[one >> 1].qk[one & 1], one & 1 ? 1.f : q_scale);
    __syncthreads();
    if (rules) {
        float2 part, o;
        const SplitGate *gates = own->gates[h & 1];
        const SplitRow *now = own->rows;
        float *to = y + (u32)(h * SPLIT_HEAD + first + column);
        split_pass<false, true>(S, nullptr, now, r, make_float2(0.f, 0.f), gates->decay, o, part);
#pragma unroll 1
        for (int left = T - 1; left; left--, now++, gates++, to += Hv * SPLIT_HEAD) {
            split_pass<true, true>(S, now, now + 1, r, split_delta(part, now, column, gates->beta), gates[1].decay, o, part);
            split_store(to, o, r);
        }
        split_pass<true, false>(S, now, nullptr, r, split_delta(part, now, column, gates->beta), 0.f, o, part);
        split_store(to, o, r);
    } else if (ends) {
#pragma unroll
        for (int e = 0; e < 8; e++) fine = fine && finite32(gate[e]);
        sigmoid_all(gate, gate);
        set_eight(own->rows[row].gate + place, gate);
    }
    if (!last_of(arrived + pair, 4)) return;
    if (warp == 0 && lane < 16 && (lane & 7) < T) {
        size_t at = (size_t)(lane & 7) * Hv + 2 * pair + (lane >> 3);
        SplitGate made = own->gates[lane >> 3][lane & 7];
        decay[at] = made.decay;
        beta[at] = made.beta;
    }
    if (!ends) return;
    float value[8], gain[8], square[8], squares[2];
    load_eight(out + place, value);
#pragma unroll
    for (int j = 0; j < 8; j++) {
        float o = float_of((u32)load_volatile((const int *)(out + 32 * j + lane)));
        square[j] = fma32(o, o, 0.f);
    }
#pragma unroll
    for (int head = 0; head < 2; head++) {
        const float *four = square + 4 * head;
        squares[head] = warp_tree(add32(add32(four[0], four[2]), add32(four[1], four[3])));
    }
    get_eight(norm + (place & (SPLIT_HEAD - 1)), gain);
    get_eight(own->rows[row].gate + place, gate);
    // inverse_rms, where the quotient by 128 is a product.
    float mean = mul32(lane < 16 ? squares[0] : squares[1], 1.f / SPLIT_HEAD), scale = div32(1.f, sqrt32(add32(mean, eps)));
#pragma unroll
    for (int i = 0; i < 8; i++) {
        value[i] = mul32(mul32(mul32(value[i], scale), gain[i]), gate[i]);
        fine = fine && finite32(value[i]);
    }
    set_eight(out + place, value);
    if (!fine) report(error, where, NOT_FINITE, row);
    size_t group = (size_t)row * (Hv / 2) + pair;
    if (codes) split_quantise32(value, codes + 256 * group, scales + 8 * group, sums + 16 * group);
    if (codes256) quantise_group<8>(value, codes256 + 256 * group, scales256 + group, sums256 + 16 * group);
}
