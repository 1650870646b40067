// Grid formats: super-blocks of 256 values, indices into a table of four or eight values and sign bits. Thread q takes
// the 32 values of sub-block q; its table lies in shared memory.
#pragma once
#include "gemv/grid_data.cuh"
#include "gemv/runs.cuh"

// Four fields of a packed entry, of two or three bits, as the bytes of `levels` that they number.
template <int BITS>
DEVICE u32 four_of(u32 fields, u64 levels) {
    u32 pairs, each;  // two fields to a byte, one to a nibble
    if (BITS == 2) {
        pairs = (fields & 0xf) | (fields & 0xf0) << 4;
        each = (pairs & 0x0303) | (pairs & 0x0c0c) << 2;
    } else {
        pairs = (fields & 0x3f) | (fields & 0xfc0) << 2;
        each = (pairs & 0x0707) | (pairs & 0x3838) << 1;
    }
    return __byte_perm((u32)levels, (u32)(levels >> 32), each);
}
DEVICE void widen8(u32 *table, int i, u32 fields, u64 levels) {
    table[2 * i] = four_of<2>(fields, levels);
    table[2 * i + 1] = four_of<2>(fields >> 8, levels);
}
#define IQ2_LEVELS 0x2b1908ull
#define IQ3_XXS_LEVELS 0x3e342c241c140c04ull
#define IQ3_S_LEVELS 0x0f0d0b0907050301ull
#define IQ1_LEVELS 0x100800ull  // 8 grid + 8

// Bytes, none of them 0, negated where a bit of the four is set.
DEVICE u32 negate(u32 bytes, u32 bits) {
    u32 ones = (bits & 15) * 0x00204081u & 0x01010101u;
    return (bytes ^ ones * 255u) + ones;
}
// Seven sign bits and the eighth that makes their number even.
DEVICE u32 even_signs(u32 bits) { return (bits & 127) | (__popc(bits & 127) & 1) << 7; }

// Eight values of entry `index`, signs in a byte.
template <class Step>
DEVICE void put8(Step &s, int k, const u32 *table, u32 index, u32 signs) {
    uint2 entry = ((const uint2 *)table)[index];
    s.w[2 * k] = negate(entry.x, signs);
    s.w[2 * k + 1] = negate(entry.y, signs >> 4);
}
template <class Step>
DEVICE void put4(Step &s, int k, const u32 *table, u32 low, u32 high, u32 signs) {
    s.w[2 * k] = negate(table[low], signs);
    s.w[2 * k + 1] = negate(table[high], signs >> 4);
}
// The table of IQ1 holds 8 grid + 8; values are 8 grid + 1, or - 1 where `minus`.
template <class Step>
DEVICE void put_one(Step &s, int k, const u32 *table, u32 index, u32 minus) {
    uint2 entry = ((const uint2 *)table)[index];
    u32 bias = 7 + 2 * minus;
    s.w[2 * k] = less(entry.x, bias);
    s.w[2 * k + 1] = less(entry.y, bias);
}
// (s + 1/2) unit and (2s + 1) unit, exact.
DEVICE float half_steps(u32 s, float unit) { return mul32(add32(i32_f32((int)s), 0.5f), unit); }
DEVICE float odd_steps(u32 s, float unit) { return mul32(i32_f32((int)(2 * s + 1)), unit); }

struct IQ2_XXS : Runs<256, 256, 256, 512> {
    typedef Layout<2, 1, 8, 8, 1, 2> Raw;
    DEVICE static void widen(int i, u32 *table) { widen8(table, i, IQ2_XXS_GRID[i], IQ2_LEVELS); }
    DEVICE static Step unpack(const Raw &raw, int e, int, const u32 *table) {
        Step s;
        u32 aux = raw.a[2 * e + 1];
#pragma unroll
        for (int k = 0; k < 4; k++) put8(s, k, table, raw.a[2 * e] >> 8 * k & 255, even_signs(aux >> 7 * k));
        s.d[0] = s.d[1] = half_steps(aux >> 28, mul32(half_of(raw.b, e), 0.25f));
        return s;
    }
};

struct IQ2_XS : Runs<256, 256, 512, 1024> {
    typedef Layout<2, 1, 8, 8, 8, 1, 1, 2> Raw;
    DEVICE static void widen(int i, u32 *table) { widen8(table, i, IQ2_XS_GRID[i], IQ2_LEVELS); }
    DEVICE static Step unpack(const Raw &raw, int e, int, const u32 *table) {
        Step s;
#pragma unroll
        for (int k = 0; k < 4; k++) {
            u32 code = raw.a[2 * e + (k >> 1)] >> 16 * (k & 1) & 0xffff;
            put8(s, k, table, code & 511, even_signs(code >> 9));
        }
        float unit = mul32(half_of(raw.c, e), 0.25f);
        s.d[0] = half_steps(raw.b[0] >> 8 * e & 15, unit);
        s.d[1] = half_steps(raw.b[0] >> (8 * e + 4) & 15, unit);
        return s;
    }
};

// Four indices and four sign bytes; then the high bits of the indices and two scales.
struct IQ2_S : Runs<256, 256, 1024, 2048> {
    typedef Layout<2, 1, 8, 8, 8, 2, 1, 2> Raw;
    DEVICE static void widen(int i, u32 *table) { widen8(table, i, IQ2_S_GRID[i], IQ2_LEVELS); }
    DEVICE static Step unpack(const Raw &raw, int e, int, const u32 *table) {
        Step s;
        u32 both = raw.b[0] >> 16 * e;
#pragma unroll
        for (int k = 0; k < 4; k++) {
            u32 index = (raw.a[2 * e] >> 8 * k & 255) | (both >> 2 * k & 3) << 8;
            put8(s, k, table, index, raw.a[2 * e + 1] >> 8 * k & 255);
        }
        float unit = mul32(half_of(raw.c, e), 0.25f);
        s.d[0] = half_steps(both >> 8 & 15, unit);
        s.d[1] = half_steps(both >> 12 & 15, unit);
        return s;
    }
};

struct IQ3_XXS : Runs<256, 256, 256, 256> {
    typedef Layout<2, 1, 8, 8, 8, 4, 1, 2> Raw;
    DEVICE static void widen(int i, u32 *table) { table[i] = four_of<3>(IQ3_XXS_GRID[i], IQ3_XXS_LEVELS); }
    DEVICE static Step unpack(const Raw &raw, int e, int, const u32 *table) {
        Step s;
        u32 aux = raw.b[e];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            u32 pair = raw.a[2 * e + (k >> 1)] >> 16 * (k & 1);
            put4(s, k, table, pair & 255, pair >> 8 & 255, even_signs(aux >> 7 * k));
        }
        s.d[0] = s.d[1] = half_steps(aux >> 28, mul32(half_of(raw.c, e), 0.5f));
        return s;
    }
};

// Eight indices; four sign bytes; their ninth bits; the eight scales of 4 bits of the super-block. One super-block a
// chunk: two take more registers than four columns leave.
struct IQ3_S : Runs<256, 256, 512, 512> {
    typedef Layout<1, 1, 8, 8, 8, 4, 8, 1, 1, 4, 1, 2> Raw;
    DEVICE static void widen(int i, u32 *table) { table[i] = four_of<3>(IQ3_S_GRID[i], IQ3_S_LEVELS); }
    DEVICE static Step unpack(const Raw &raw, int, int q, const u32 *table) {
        Step s;
        u32 ninth = raw.c[0];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            u32 pair = raw.a[k >> 1] >> 16 * (k & 1);
            u32 low = (pair & 255) | (ninth >> 2 * k & 1) << 8;
            u32 high = (pair >> 8 & 255) | (ninth >> (2 * k + 1) & 1) << 8;
            put4(s, k, table, low, high, raw.b[0] >> 8 * k & 255);
        }
        s.d[0] = s.d[1] = odd_steps(raw.d[0] >> 4 * q & 15, half_of(raw.e, 0));
        return s;
    }
};

// Four indices; 16 bits with their high bits, a scale and the sign of the offset.
struct IQ1_S : Runs<256, 256, 2048, 4096> {
    typedef Layout<2, 1, 8, 4, 8, 2, 1, 2> Raw;
    DEVICE static void widen(int i, u32 *table) { widen8(table, i, IQ1_S_GRID[i], IQ1_LEVELS); }
    DEVICE static Step unpack(const Raw &raw, int e, int, const u32 *table) {
        Step s;
        u32 h = raw.b[0] >> 16 * e & 0xffff;
#pragma unroll
        for (int k = 0; k < 4; k++)
            put_one(s, k, table, (raw.a[e] >> 8 * k & 255) | (h >> 3 * k & 7) << 8, h >> 15);
        s.d[0] = s.d[1] = odd_steps(h >> 12 & 7, mul32(half_of(raw.c, e), 0.125f));
        return s;
    }
};

// Four indices; a nibble for each with its high bits and the sign of its offset; the 16 scales and d in eight bytes.
// One super-block a chunk, as IQ3_S.
struct IQ1_M : Runs<256, 256, 2048, 4096> {
    typedef Layout<1, 1, 8, 4, 8, 2, 1, 8> Raw;
    DEVICE static void widen(int i, u32 *table) { widen8(table, i, IQ1_S_GRID[i], IQ1_LEVELS); }
    DEVICE static Step unpack(const Raw &raw, int, int q, const u32 *table) {
        Step s;
        u32 h = raw.b[0];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            u32 nibble = h >> 4 * k & 15;
            put_one(s, k, table, (raw.a[0] >> 8 * k & 255) | (nibble & 7) << 8, nibble >> 3);
        }
        u32 low = raw.c[0], high = raw.c[1];
        u32 d = (low >> 12 & 0xf) | (low >> 24 & 0xf0) | (high >> 4 & 0xf00) | (high >> 16 & 0xf000);
        float unit = mul32(half_f32((u16)d), 0.125f);
        u32 scales = (q < 4 ? low : high) >> (16 * (q >> 1 & 1) + 6 * (q & 1));
        s.d[0] = odd_steps(scales & 7, unit);
        s.d[1] = odd_steps(scales >> 3 & 7, unit);
        return s;
    }
};
