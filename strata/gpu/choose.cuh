// The choice of a router: the K largest logits of a row and the softmax over them, by one warp.
//
// A lane holds the keys of four neighbouring experts in every 128 and knows its largest. The K-th of these largest bounds
// the K-th largest key from below, so what reaches it is a short list that holds the chosen: each finds its place by
// counting those in front of it. Where more reach it than there are lanes, K rounds over all logits find one each. With a
// logit that is not finite the ids are still valid, so that what follows stays inside its memory.
#pragma once
#include "sums.cuh"

// A number that orders like the floats (-0 equal to +0), above 0 for every float.
DEVICE u32 order(float x) {
    u32 b = bits_of(add32(x, 0.f)), key = b ^ ((u32)((int)b >> 31) | 0x80000000u);
    return key > 1 ? key : 1;  // 0: a NaN, which is reported
}
#define FIRST_FINITE 0x00800000u  // numbers of finite floats
#define LAST_FINITE 0xff7fffffu

// The float of such a number; -0 comes back as +0, which no weight can tell.
DEVICE float value_of(u32 key) { return float_of(key & 0x80000000u ? key & 0x7fffffffu : ~key); }

DEVICE u32 max_of_warp(u32 v) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    return __reduce_max_sync(ALL_LANES, v);
#else
#pragma unroll
    for (int half = 16; half; half >>= 1) {
        u32 other = __shfl_xor_sync(ALL_LANES, v, half);
        v = other > v ? other : v;
    }
    return v;
#endif
}

#define LANES 32
#define MOST_CHOSEN 128  // as router.py has it
#define AT_ONCE 16       // entries of the list, and terms of the sum, that are loaded together

// An expert's place in the order of choice as one number, larger ones first: by logit, of equal ones the lowest id.
DEVICE u64 place_of(u32 key, int id) { return (u64)key << 32 | (u32)~id; }

// Experts of a lane: four neighbours in every 128.
DEVICE int id_of(int i) { return 128 * (i >> 2) + 4 * ((int)threadIdx.x & 31) + (i & 3); }

DEVICE float past_l1(const float *p) { return *(const volatile float *)p; }

// Shared memory of a row's warp.
struct ChoiceRoom {
    uint4 words[LANES / 2];  // the lanes' largest, then the list
    float4 chosen[MOST_CHOSEN / 4];
};

// The K best of a list that is no longer than the warp, for K <= 32: ids, and logits in `chosen`. best: the lane's largest
// key. False if the list would be longer; nothing is written then.
template <int EACH>
DEVICE bool choose_listed(const u32 (&keys)[EACH], u32 best, int K, int *ids, float *chosen, uint4 *words) {
    int lane = threadIdx.x & 31, above[4] = {0, 0, 0, 0}, listed = 0, place = 0;
    ((u32 *)words)[lane] = best;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < LANES / 4; i++) {
        uint4 v = words[i];
        above[0] += v.x > best, above[1] += v.y > best, above[2] += v.z > best, above[3] += v.w > best;
    }
    u32 bound = ~max_of_warp(above[0] + above[1] + above[2] + above[3] < K ? ~best : 0);
    u64 *list = (u64 *)words;
    __syncwarp();
    list[lane] = 0;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        bool reaches = keys[i] >= bound;
        u32 who = __ballot_sync(ALL_LANES, reaches);
        int at = listed + __popc(who & ((1u << lane) - 1));
        if (reaches && at < LANES) list[at] = place_of(keys[i], id_of(i));
        listed += __popc(who);
    }
    if (listed > LANES) return false;
    __syncwarp();
    u64 own = list[lane];
#pragma unroll 1
    for (int from = 0; from < listed; from += AT_ONCE)
#pragma unroll
        for (int i = 0; i < AT_ONCE / 2; i++) {
            uint4 two = words[from / 2 + i];
            place += (((u64)two.y << 32 | two.x) > own) + (((u64)two.w << 32 | two.z) > own);
        }
    if (lane < listed && place < K) {
        ids[place] = (int)~(u32)own;
        chosen[place] = value_of((u32)(own >> 32));
    }
    return true;
}

// The same for any logits and K: every round finds the best of those behind the one before.
DEVICE void choose_in_rounds(const float *logits, int E, int K, int *ids, float *chosen) {
    u64 last = ~0ull;
#pragma unroll 1
    for (int j = 0; j < K; j++) {
        u64 best = 0;
#pragma unroll 4
        for (int e = threadIdx.x & 31; e < E; e += LANES) {
            u64 place = place_of(order(past_l1(logits + e)), e);
            if (place < last && place > best) best = place;
        }
        u32 key = (u32)(best >> 32), top = max_of_warp(key), low = max_of_warp(key == top ? (u32)best : 0);
        last = (u64)top << 32 | low;
        if ((threadIdx.x & 31) == 0) {
            ids[j] = (int)~low;
            chosen[j] = value_of(top);
        }
    }
}

// Row number `row` of logits (T, E), ids (T, K) and weights (T, K), by one warp. EACH: keys a lane holds, a multiple of 4 and
// at least E / 32. logits are 16-byte aligned if E is a multiple of 4; they are read past L1, for other blocks of the kernel
// may have written them.
template <int EACH>
DEVICE void choose(const float *logits, int *ids, float *weights, int E, int K, float scale, int row, ChoiceRoom &room,
                   u64 *error, u64 where) {
    float4 *chosen4 = room.chosen;
    float *chosen = (float *)chosen4;
    int lane = threadIdx.x & 31;
    const float *l = logits + (size_t)row * E;
    int *out_ids = ids + (size_t)row * K;
    float4 x[EACH / 4];
    if (E & 3) {
#pragma unroll
        for (int i = 0; i < EACH / 4; i++) {
            float v[4];
#pragma unroll
            for (int j = 0; j < 4; j++) v[j] = id_of(4 * i + j) < E ? past_l1(l + id_of(4 * i + j)) : 0.f;
            x[i] = float4{v[0], v[1], v[2], v[3]};
        }
    } else {
#pragma unroll
        for (int i = 0; i < EACH / 4; i++) {
            x[i] = float4{0.f, 0.f, 0.f, 0.f};
            if (id_of(4 * i) < E) {
                uint4 v = load_volatile((const uint4 *)(l + id_of(4 * i)));
                x[i] = float4{float_of(v.x), float_of(v.y), float_of(v.z), float_of(v.w)};
            }
        }
    }
    u32 keys[EACH], best = 0, least = LAST_FINITE;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        float v = i & 2 ? i & 1 ? x[i / 4].w : x[i / 4].z : i & 1 ? x[i / 4].y : x[i / 4].x;
        keys[i] = order(v);
        least = keys[i] < least ? keys[i] : least;
        keys[i] = id_of(i) < E ? keys[i] : 0;
        best = keys[i] > best ? keys[i] : best;
    }
    if (K > LANES || !choose_listed<EACH>(keys, best, K, out_ids, chosen, room.words)) choose_in_rounds(l, E, K, out_ids, chosen);
    if (!warp_all(best <= LAST_FINITE && least >= FIRST_FINITE) && lane == 0) report(error, where, NOT_FINITE, row);
    __syncwarp();
    float top = chosen[0], total = 0.f;
    __syncwarp();
#pragma unroll 1
    for (int j = lane; j < (K + AT_ONCE - 1) / AT_ONCE * AT_ONCE; j += LANES)
        chosen[j] = j < K ? exp32(sub32(chosen[j], top)) : 0.f;
    __syncwarp();
#pragma unroll 1
    for (int from = 0; from < K; from += AT_ONCE)
#pragma unroll
        for (int i = 0; i < AT_ONCE / 4; i++) {  // zeros behind the last one change nothing
            float4 v = chosen4[from / 4 + i];
            total = add32(add32(add32(add32(total, v.x), v.y), v.z), v.w);
        }
#pragma unroll 1
    for (int j = lane; j < K; j += LANES) {
        float w = div32(chosen[j], total);
        weights[(size_t)row * K + j] = scale != 1.f ? mul32(w, scale) : w;
    }
}
