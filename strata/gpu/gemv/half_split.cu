// Dense products of Q4_K with few and long rows and several columns on tensor cores in float16 (half_q4.cuh): the warps of a
// block share out the chunks of 20 rows.
//
// A lane's sum has a fixed order along the row, but its integers and factors have not: every warp leaves those of its half of
// a chunk in shared memory, where threads add up those of a round, chunk by chunk, while the warps begin with the next.
// 20 rows are five row blocks, so that 2,560 rows are 128 blocks, and no processor has two while others have one. The first
// four are 16 rows of a product. The fifth meets four chunks in one: rows 0 .. 3 of the product are the first chunk, rows
// 4 .. 7 the second and so on, and of the products with the columns of each chunk four rows count.
#include "gemv/half_q4.cuh"
#include "gemv/split.cuh"

#if !defined(STRATA_ON_CPU) && !AMPERE
#define HALF_SPLIT_CHUNKS 4  // what Turing has room for
#else
#define HALF_SPLIT_CHUNKS 8
#endif

// Terms of a chunk: 20 rows and four columns. For each h: integers [k][c] of the first 16 rows (as a thread has them, 16
// bytes), those of their minima; the same of the other four rows, 8 bytes a thread. Then factors.
struct HalfSplit {
    enum {
        WARPS = 20, FIFTHS = 16, BLOCKS = 5, ROWS = 4 * BLOCKS,  // warps from FIFTHS on have the fifth row block
        LANES = 512, REST_LANES = 128, REST = 5 * LANES, HALF = REST + 5 * REST_LANES, FACTORS = 2 * HALF,
        CHUNK = FACTORS + 2 * 256 + 2 * 64, OWNERS = HALF / 16
    };
};

// Half a chunk (h) in the first 16 rows, or half of four chunks in the fifth row block, in two parts: in the first, terms of
// the round before may still be read.
template <bool FIFTH>
struct HalfSplitJob {
    typedef HalfSplit S;
    enum { N = FIFTH ? 4 : 1, LANES = FIFTH ? S::REST_LANES : S::LANES };
    Near codes, rest;  // columns: codes; sums of codes. In registers: the compiler would make them again each round
    int most;          // the last column
    u32 packed;        // where integers and factors go, two times 16 bits, multiples of 8, and two bits
    HalfRaw raw;
    u32 low[2], high[2], least[2];
    float front, back, first[2][4];  // which factors the warp has; integers of k = 0

    DEVICE u32 to() const { return packed & 0xfff8; }
    DEVICE u32 factors() const { return packed >> 16; }
    DEVICE bool mine() const { return packed & 1; }  // whether columns g of b are lanes of this thread
    DEVICE bool has() const { return packed & 2; }   // whether they are minima of it

    // Of d with the columns of chunk j: what counts, that is the rows of this chunk.
    DEVICE static void count(int j, const float (&d)[4], float (&v)[4]) {
        bool second = threadIdx.x >> 4 & 1;
#pragma unroll
        for (int i = 0; i < 4; i++)
            v[i] = !FIFTH || j == 2 * (i >> 1) + second ? d[i] : v[i];
    }
    DEVICE void put(u8 *to, const float (&v)[4]) const {
        if constexpr (FIFTH) {
            *(float2 *)to = make_float2(v[0], v[1]);
            *(float2 *)(to + 2 * S::CHUNK) = make_float2(v[2], v[3]);
        } else {
            *(float4 *)to = make_float4(v[0], v[1], v[2], v[3]);
        }
    }
    // Integers of lanes 4k + c and 4k + 2 + c.
    DEVICE void lanes(const HalfHeads &heads, const HalfOperands &b, Near codes, int k, int c, float (&out)[4]) const {
        u32 a[2][4];
#pragma unroll
        for (int odd = 0; odd < 2; odd++) heads.rows(raw, b, k, c, odd, a[odd]);
        // Two chunks at a time: more at once would take more registers than there are.
#pragma unroll 1
        for (int j = 0; j < N; j += 2) {
#pragma unroll
            for (int i = j; i < j + (FIFTH ? 2 : 1); i++) {
                u32 v[4] = {0, 0, 0, 0};
                near_if(mine(), codes + (i * HalfColumns::CHUNK + 512 * k + 256 * c), v);
                float d[4] = {};
#pragma unroll
                for (int odd = 0; odd < 2; odd++) {
                    u32 half[2] = {v[2 * odd], v[2 * odd + 1]};
                    mma_f16(d, a[odd], half);
                }
                count(i, d, out);
            }
        }
    }
    // turn: where the columns of the round lie.
    DEVICE void begin(u32 turn, int h, const HalfOperands &b) {
        Near at = opaque(codes + turn);  // hidden, or the places of all loads would be kept in registers
        HalfHeads heads(raw, h, b);
#pragma unroll
        for (int r = 0; r < 2; r++) low[r] = heads.low[r], high[r] = heads.high[r], least[r] = heads.least[r];
        front = h ? heads.d_min[0] : heads.d[0], back = h ? heads.d_min[1] : heads.d[1];
#pragma unroll
        for (int c = 0; c < 2; c++) lanes(heads, b, at, 0, c, first[c]);
    }
    DEVICE void end(u8 *terms, u32 turn, const HalfOperands &b) {
        Near at = opaque(codes + turn), beside = opaque(rest + turn);
        u8 *place = terms + to();
        float v[4];
        put(place, first[0]), put(place + LANES, first[1]);
        u32 a[4] = {least[0], least[1], least[0], least[1]};
#pragma unroll
        for (int j = 0; j < N; j++) {
            u32 s[2] = {0, 0};
            near_if(has(), beside + j * HalfColumns::CHUNK, s);
            float d[4] = {};
            mma_f16(d, a, s);
            count(j, d, v);
        }
        put(place + 4 * LANES, v);
        HalfHeads heads(low, high);
#pragma unroll
        for (int c = 0; c < 2; c++) {
            lanes(heads, b, at, 1, c, v);
            put(place + (2 + c) * LANES, v);
        }
        if (threadIdx.x & 2) return;
        int lane = opaque(threadIdx.x) & 31, sums = HalfColumns::SUMS + 8 * (4 * (lane & 3) + min(lane >> 2 & 3, most));
        u32 scales = HalfColumns::SCALES + 8 * (lane & 1) + (FIFTH ? (lane >> 4) * HalfColumns::CHUNK : 0) - sums;
        u32 x[2], later[2];
        near_if(true, beside + scales, x);
        if (FIFTH) near_if(true, beside + (scales + 2 * HalfColumns::CHUNK), later);
        u32 (&y)[2] = FIFTH ? later : x;
        float f[4] = {mul32(front, float_of(x[0])), mul32(front, float_of(x[1])), mul32(back, float_of(y[0])),
                      mul32(back, float_of(y[1]))};
        put(terms + factors(), f);
    }
};

// What a thread does beside its products: the first threads have sums, warps 8 .. 15 bring the columns of a chunk each, both
// in the same registers.
struct HalfAside {
    u32 held[8];
    u32 place;  // of owners of sums, each with four of both h: their factors in a chunk. Where others put columns
    u32 from;   // of others: the first value of their chunk
    bool some;  // whether the column is there

    DEVICE void start(const Columns<4> &x, int n) {
        typedef HalfSplit S;
        int i = threadIdx.x, lane = i & 31, chunk = i >> 5 & 7, column = i & 3;
        bool fifth = i >= 160, least = fifth ? i >= 192 : i >= 128;
        u32 factor = fifth ? 512 + 64 * least + 16 * (i >> 1 & 3) : 256 * least + 16 * (2 * (lane >> 2) + (lane & 1));
#pragma unroll
        for (int j = 0; j < 8; j++) held[j] = 0;
        place = opaque(i < S::OWNERS ? S::FACTORS + factor : chunk * HalfColumns::CHUNK);
        from = (column & 2 ? (column & 1 ? x.row[3] : x.row[2]) : column & 1 ? x.row[1] : x.row[0]) + 256 * chunk;
        some = i >= 256 && column < n;
    }
    // Eight neighbours store 128 bytes side by side.
    DEVICE static int part() { return (threadIdx.x & 4) | (threadIdx.x >> 3 & 3); }
    DEVICE static int column() { return threadIdx.x & 3; }
    // Columns of the round that begins `start` values behind the first one, if the chunk is there.
    DEVICE void load_codes(bool there, const Columns<4> &x, u32 start) {
        if (!there || !some) return;
        const i8 *p = x.codes + (from + start + HalfColumns::place_of(part()));
        uint4 a = codes16(p), b = codes16(p + 32);
        held[0] = a.x, held[1] = a.y, held[2] = a.z, held[3] = a.w;
        held[4] = b.x, held[5] = b.y, held[6] = b.z, held[7] = b.w;
    }
    DEVICE void put_codes(bool there, u8 *columns) const {
        if (!there || !some) return;
        HalfColumns::put_codes(columns + place, part(), column(), make_uint4(held[0], held[1], held[2], held[3]),
                               make_uint4(held[4], held[5], held[6], held[7]));
    }
    // Sums and scales of the first round, by the other warps: nothing else is under way.
    DEVICE void bring_first_rest(bool there, const Columns<4> &x, int n, u8 *columns) const {
        if (!there || column() >= n || part() > 4) return;
        HalfColumns::put_rest(columns + (threadIdx.x >> 5 & 7) * HalfColumns::CHUNK, part(), column(),
                              HalfColumns::rest_of(part(), x, from));
    }
    DEVICE void load_rest(bool there, const Columns<4> &x, u32 start) {
        if (!there || !some || part() > 4) return;
        int4 v = HalfColumns::rest_of(part(), x, from + start);
        held[0] = v.x, held[1] = v.y, held[2] = v.z, held[3] = v.w;
    }
    DEVICE void put_rest(bool there, u8 *columns) const {
        if (!there || !some || part() > 4) return;
        HalfColumns::put_rest(columns + place, part(), column(), int4{(int)held[0], (int)held[1], (int)held[2], (int)held[3]});
    }
    template <int CHUNKS>
    DEVICE void add(Near terms, int chunks) {
        typedef HalfSplit S;
        if (threadIdx.x >= S::OWNERS) return;
        Near factors = terms + place, own = terms + 16 * threadIdx.x;
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
            if (c >= chunks) break;
            u32 f[4], d[2][4];
            near_if(true, factors + c * S::CHUNK, f);
#pragma unroll
            for (int h = 0; h < 2; h++) near_if(true, own + (c * S::CHUNK + h * S::HALF), d[h]);
#pragma unroll
            for (int i = 0; i < 8; i++)
                held[i] = bits_of(fma32(float_of(d[i >> 2][i & 3]), float_of(f[i & 3]), float_of(held[i])));
        }
    }
    // To where its terms of the first chunk are.
    DEVICE void put_sums(u8 *terms) const {
        typedef HalfSplit S;
        if (threadIdx.x >= S::OWNERS) return;
#pragma unroll
        for (int h = 0; h < 2; h++)
            *(uint4 *)(terms + (16 * threadIdx.x + h * S::HALF)) =
                make_uint4(held[4 * h], held[4 * h + 1], held[4 * h + 2], held[4 * h + 3]);
    }
};

// The fixed trees of one output. Sums of lanes 8h + 4k + 2u + c lie at [h], [k][c] * space + u * apart, then those of minima.
DEVICE float half_split_output(const float *from, int space, int apart) {
    const int H = HalfSplit::HALF / 4;
    float s[2][2], least[2];
#pragma unroll
    for (int u = 0; u < 2; u++) {
#pragma unroll
        for (int c = 0; c < 2; c++) {
            const float *p = from + c * space + u * apart;
            s[u][c] = add32(add32(p[0], p[H]), add32(p[2 * space], p[2 * space + H]));
        }
        const float *m = from + 4 * space + u * apart;
        least[u] = add32(m[0], m[H]);
    }
    float sum = add32(add32(s[0][0], s[1][0]), add32(s[0][1], s[1][1]));
    return add32(sub32(sum, add32(least[0], least[1])), 0.f);
}

// All rounds of a warp. Every warp meets the same barriers.
template <bool FIFTH, int CHUNKS, class X>
DEVICE void half_split_rounds(u8 *terms, const u8 *weights, X inputs, int n, int rows, int K) {
    typedef HalfSplit S;
    // Hidden from the compiler, which would keep what both kinds of warps have in common.
    u32 thread = opaque(threadIdx.x);
    int lane = thread & 31, warp = thread >> 5, g = lane >> 2, t = lane & 3, second = g >> 2, h = warp & 1;
    int chunks = K >> 8, first = S::BLOCKS * blockIdx.y, last = (rows - 1) >> 2;
    int own = FIFTH ? 4 * (warp - S::FIFTHS >> 1) : warp >> 1;  // the first chunk of a round that the warp has
    u32 bytes = (u32)row_block_bytes<Q4_K>(K);
    u8 *columns = terms + CHUNKS * S::CHUNK, *piece = columns + own * HalfColumns::CHUNK;
    HalfSplitJob<FIFTH> job;
    {
        int column = 16 * (4 * t + min(g & 3, n - 1)), sums = HalfColumns::SUMS + column / 2;
        u32 chunk = (own + (FIFTH ? second : 0)) * S::CHUNK;
        u32 to = chunk + h * S::HALF + (FIFTH ? S::REST + 32 * (g & 3) + 8 * t : 16 * lane);
        u32 factors = chunk + S::FACTORS + (FIFTH ? 512 + 64 * h + 16 * (g & 3) + 8 * t : 256 * h + 32 * g + 16 * t);
        bool mine = t >> 1 == second, has = t == 2 * h + second;
        job.codes = opaque(near_of(piece + (1024 * h + column)));
        job.rest = near_of(piece + sums);
        job.most = n - 1;
        job.packed = opaque(to | factors << 16 | mine | 2 * has);
    }
    // A thread's weights: of rows g and g + 8, for the fifth row block of two chunks.
    auto block_of = [&](int i) { return weights + (u64)min(first + (FIFTH ? 4 : i), last) * bytes; };
    u32 own_codes = 128 * (g & 3) + 64 * h + 8 * t, to_head = opaque(512 + 16 * (g & 3) - own_codes);
    const u8 *from = block_of(second) + ((own + (FIFTH ? second : 0)) * Q4_K::Raw::CHUNK + own_codes);
    u32 to_back = FIFTH ? 2 * Q4_K::Raw::CHUNK : opaque((u32)(block_of(2 + second) - block_of(second)));
    auto there = [&](int start, int r) { return own < CHUNKS && start + own + (FIFTH ? second + 2 * r : 0) < chunks; };
    // Both heads and codes of k = 0 as soon as they have been used; those of k = 1 later.
    auto load_first = [&](int start) {
        if (start) from += CHUNKS * Q4_K::Raw::CHUNK;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const u8 *p = from + r * to_back;
            load_if<16>(there(start, r), p + to_head, job.raw.head[r]);
            load_if<8>(there(start, r), p, job.raw.codes[r][0]);
        }
    };
    auto load_later = [&](int start) {
#pragma unroll
        for (int r = 0; r < 2; r++) load_if<8>(there(start, r), from + (r * to_back + 32), job.raw.codes[r][1]);
    };
    load_first(0);
    load_later(0);
    // The rest is on its way to L2: 128 threads a row block.
    int ahead = thread >> 7, line = CHUNKS * Q4_K::Raw::CHUNK + (thread & 127) * LINE;
    if (first + ahead <= last && line < (int)bytes)
        bring_ahead(weights + (u64)(first + ahead) * bytes + line, bytes - line, 0, 128);
    wait_for_inputs();
    const Columns<4> x = inputs();
    HalfAside aside;
    HalfOperands b(h, thread);
    auto chunk_there = [&](int start) { return (warp & 7) < CHUNKS && start + (warp & 7) < chunks; };
    if (!FIFTH) {
        aside.start(x, n);
        aside.load_codes(chunk_there(0), x, 0);
        if (warp < 8) aside.bring_first_rest(chunk_there(0), x, n, columns);
        aside.put_codes(chunk_there(0), columns);
    }
    __syncthreads();
    u32 turn = 0;
#pragma unroll 1
    for (int start = 0; start < chunks; start += CHUNKS) {
        int next = start + CHUNKS;
        bool brings = chunk_there(next), works = own < CHUNKS && start + own < chunks;
        u8 *next_columns = columns + (CHUNKS * HalfColumns::CHUNK - turn);
        if (!FIFTH) {
            aside.load_codes(brings, x, 256 * next);
            if (start) aside.add<CHUNKS>(near_of(terms), CHUNKS);
        }
        if (works) job.begin(turn, h, b);
        load_first(next);
        if (!FIFTH) aside.put_codes(brings, next_columns);
        __syncthreads();
        if (!FIFTH) aside.load_rest(brings, x, 256 * next);
        if (works) job.end(terms, turn, b);
        load_later(next);
        if (!FIFTH) aside.put_rest(brings, next_columns);
        turn = CHUNKS * HalfColumns::CHUNK - turn;
        __syncthreads();
    }
    if (FIFTH) return;
    aside.add<CHUNKS>(near_of(terms), (chunks - 1) % CHUNKS + 1);
    aside.put_sums(terms);
}

// y (columns, rows) = a Q4_K matrix times x. Grid: (columns / 4, row tiles of 20). Dynamic shared memory: terms of a round of
// MOST chunks, or of as many as the architecture has room for, and columns of two.
template <int MOST>
STARTS_EARLY __global__ void __launch_bounds__(640, 1)
half_split(const u8 *weights, int columns, const i8 *codes, const float *scales, const int *sums, float *y, i64 y_stride,
           int rows, int K) {
    typedef HalfSplit S;
    const int CHUNKS = MOST < HALF_SPLIT_CHUNKS ? MOST : HALF_SPLIT_CHUNKS;
    DYNAMIC_SHARED(space);
    let_next_start();
    int from = blockIdx.x * 4, n = min(columns - from, 4);
    auto inputs = [&]() { return columns_from<4>(from, n, codes, scales, sums, K); };
    if (threadIdx.x >= 32 * S::FIFTHS) half_split_rounds<true, CHUNKS>(space, weights, inputs, n, rows, K);
    else half_split_rounds<false, CHUNKS>(space, weights, inputs, n, rows, K);
    __syncthreads();
    const float *all = (const float *)space;
    int i = threadIdx.x, column, to;
    if (i >= 4 * S::ROWS) return;
    float out;
    if (i < 64) {
        column = i >> 4, to = i & 15;
        out = half_split_output(all + 16 * (to & 7) + 4 * (column >> 1) + 2 * (to >> 3) + (column & 1), 128, 8);
    } else {
        column = (i - 64) >> 2, to = 16 + (i & 3);
        out = half_split_output(all + S::REST / 4 + 8 * (i & 3) + column, 32, 4);
    }
    to += S::ROWS * blockIdx.y;
    if (column < n && to < rows) y[(from + column) * y_stride + to] = out;
}
