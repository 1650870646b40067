// Sparse attention, second part: the exact best of the block scores.
//
// Scores are not negative, so their bits rank like their values; bits of a score that is not finite are ranked all the
// same, so the chosen blocks are valid whatever came before.
#include "early.cuh"
#include "sums.cuh"

#define THREADS 1024
#define CHUNK 1024   // neighbouring scores of a warp: 32 of each lane
#define LISTED 4096  // scores that are looked at closely
#define EACH (LISTED / THREADS)

#if !defined(STRATA_ON_CPU) && __CUDA_ARCH__ >= 800
DEVICE u32 warp_largest(u32 v) { return __reduce_max_sync(ALL_LANES, v); }
DEVICE u32 warp_sum(u32 v) { return __reduce_add_sync(ALL_LANES, v); }
#else
DEVICE u32 warp_largest(u32 v) {
#pragma unroll
    for (int half = 16; half; half >>= 1) {
        u32 other = __shfl_xor_sync(ALL_LANES, v, half);
        v = other > v ? other : v;
    }
    return v;
}
DEVICE u32 warp_sum(u32 v) { return (u32)warp_count((int)v); }
#endif

// Sum of v over the lanes up to this one.
DEVICE u32 sum_to_lane(u32 v) {
    int lane = threadIdx.x & 31;
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) {
        u32 other = __shfl_up_sync(ALL_LANES, v, d);
        if (lane >= d) v += other;
    }
    return v;
}

// Where a warp finds its scores: the first chunk is kept in registers, others are loaded. The key of a score are its bits;
// a key of 0 is no score, or one of 0 that need not be told from none. With COUNTED it has 1 more, and 0 is none.
enum Keys { KEPT, LOADED, COUNTED };

// The scores of a warp: `share` neighbouring ones from `first` on, in chunks. Of a chunk, lane l loads scores 128 i + 4 l ..
// for i < 8; those of the first chunk stay in registers.
struct Scores {
    const float *s;
    int first, end, chunks;
    u32 kept[CHUNK / 32];

    template <Keys KEYS>
    DEVICE void load(int chunk, int i, u32 (&keys)[4]) const {
        int at = first + CHUNK * chunk + 128 * i + 4 * (threadIdx.x & 31);
        float4 v = {0.f, 0.f, 0.f, 0.f};
        if (at < end) v = *(const float4 *)(s + at);
        float x[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int j = 0; j < 4; j++) {
            u32 key = KEYS == COUNTED ? (bits_of(x[j]) & 0x7fffffffu) + 1 : bits_of(x[j]);
            keys[j] = at + j < end ? key : 0;
        }
    }
    DEVICE void keep() {
        int at = first + 4 * (threadIdx.x & 31);
#pragma unroll
        for (int i = 0; i < CHUNK / 128; i++) {
            float4 v = {0.f, 0.f, 0.f, 0.f};
            if (at + 128 * i < end) v = *(const float4 *)(s + at + 128 * i);
            kept[4 * i] = bits_of(v.x), kept[4 * i + 1] = bits_of(v.y);
            kept[4 * i + 2] = bits_of(v.z), kept[4 * i + 3] = bits_of(v.w);
        }
        if ((end & 3) == 0) return;  // for all warps but the last
#pragma unroll
        for (int i = 0; i < CHUNK / 128; i++)
#pragma unroll
            for (int j = 1; j < 4; j++)
                if (at + 128 * i + j >= end) kept[4 * i + j] = 0;
    }
    // visit(bit, key) for the scores that this lane loads of a chunk.
    template <Keys KEYS, class Visit>
    DEVICE void each(int chunk, Visit visit) const {
        if (KEYS == KEPT) {
#pragma unroll
            for (int bit = 0; bit < CHUNK / 32; bit++) visit(bit, kept[bit]);
            return;
        }
#pragma unroll(KEYS == LOADED ? 3 : 1)
        for (int i = 0; i < CHUNK / 128; i++) {
            u32 keys[4];
            load<KEYS>(chunk, i, keys);
#pragma unroll
            for (int j = 0; j < 4; j++) visit(4 * i + j, keys[j]);
        }
    }
    // Which of scores 32 l .. 32 l + 31 of a chunk hold: from bits of those that each lane loads.
    DEVICE static u32 in_order(u32 mine) {
        int lane = threadIdx.x & 31;
        u32 word = 0;
#pragma unroll
        for (int k = 0; k < 8; k++) {
            u32 other = __shfl_sync(ALL_LANES, mine, 8 * (lane & 3) + k);
            word |= (other >> (4 * (lane >> 2)) & 15) << (4 * k);
        }
        return word;
    }
    // Scores that reach the edge, of the 32 of a chunk that are this lane's in order.
    template <Keys KEYS>
    DEVICE u32 reaching(int chunk, u32 edge) const {
        u32 mine = 0;
        each<KEYS>(chunk, [&](int bit, u32 key) { mine |= (u32)(key >= edge) << bit; });
        return in_order(mine);
    }
};

// Sum of v over all threads, and in `before` over those before this one. sums: 32 words that nobody reads any more.
DEVICE u32 sum_before(u32 v, u32 *sums, u32 &before) {
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    u32 to_lane = sum_to_lane(v);
    if (lane == 31) sums[warp] = to_lane;
    __syncthreads();
    u32 other = sums[lane];
    before = warp_sum(lane < warp ? other : 0) + to_lane - v;
    return warp_sum(other);
}

// Counts of two kinds in one word: taken without question, and at the edge.
#define EDGE_BITS 21
#define ABOVE (1u << EDGE_BITS)

// A score takes its place in the output: behind those before it, of which all above the edge were taken and the first
// `want` at the edge. Returns the counts for the next one.
DEVICE u32 take(int id, bool above, int want, u32 before, int *out) {
    int at_edge = (int)(before & (ABOVE - 1)), place = (int)(before >> EDGE_BITS) + (at_edge < want ? at_edge : want);
    if (above || at_edge < want) out[place] = id;
    return before + (above ? ABOVE : 1);
}

// The keys from lo to hi, of which the `want` largest are looked for; there are `count` of them.
struct Range {
    u32 lo, hi;
    int want, count;
};

// Cuts the range into up to 1024 equal parts and keeps the one with the want-th largest of the block's N keys a thread;
// larger ones do not count any more. bins: zeros, and zeros again. At least `want` keys lie in the range.
template <int N>
DEVICE void narrow(Range &r, const u32 (&keys)[N], int *bins, u32 *sums, int *found) {
    int t = threadIdx.x, shift = r.hi - r.lo < 1024 ? 0 : 22 - __clz((int)(r.hi - r.lo));
#pragma unroll
    for (int i = 0; i < N; i++)
        if (keys[i] >= r.lo && keys[i] <= r.hi) atomicAdd(&bins[(keys[i] - r.lo) >> shift], 1);
    __syncthreads();
    int bin = THREADS - 1 - t, mine = bins[bin];
    u32 before;
    bins[bin] = 0;
    sum_before((u32)mine, sums, before);
    if ((int)before < r.want && (int)before + mine >= r.want) found[0] = bin, found[1] = (int)before, found[2] = mine;
    __syncthreads();
    r.lo += (u32)found[0] << shift;
    u32 rest = (1u << shift) - 1;
    r.hi = rest < r.hi - r.lo ? r.lo + rest : r.hi;
    r.want -= found[1];
    r.count = found[2];
}

// The best of all scores, without a list: the edge bit by bit.
DEVICE void take_from_all(const Scores &mine, int budget, u32 *sums, u32 *more_sums, int *out) {
    int lane = threadIdx.x & 31;
    u32 edge = 0, counts = 0, before;
#pragma unroll 1
    for (int bit = 31; bit >= 0; bit--) {
        u32 trial = edge | 1u << bit;
        int some = 0;
#pragma unroll 1
        for (int c = 0; c < mine.chunks; c++) mine.each<COUNTED>(c, [&](int, u32 key) { some += key >= trial; });
        if (block_count(some, (int *)sums) >= budget) edge = trial;
    }
#pragma unroll 1
    for (int c = 0; c < mine.chunks; c++)
        mine.each<COUNTED>(c, [&](int, u32 key) { counts += key > edge ? ABOVE : key == edge; });
    int want = budget - (int)(sum_before(counts, more_sums, before) >> EDGE_BITS);
    u32 base = __shfl_sync(ALL_LANES, before, 0);
#pragma unroll 1
    for (int c = 0; c < mine.chunks; c++) {
        u32 above = 0, equal = 0;
        mine.each<COUNTED>(c, [&](int bit, u32 key) {
            above |= (u32)(key > edge) << bit;
            equal |= (u32)(key == edge) << bit;
        });
        above = Scores::in_order(above), equal = Scores::in_order(equal);
        u32 own = ABOVE * __popc(above) + __popc(equal), to_lane = sum_to_lane(own), at = base + to_lane - own;
        for (u32 word = above | equal; word; word &= word - 1) {
            int bit = __ffs((int)word) - 1;
            at = take(mine.first + CHUNK * c + 32 * lane + bit, above >> bit & 1, want, at, out);
        }
        base += __shfl_sync(ALL_LANES, to_lane, 31);
    }
}

// blocks (T, budget) int32, ascending: the `budget` best, of equal ones at the edge the lowest. One block a row; `most` is
// a multiple of 4.
//
// The budget-th largest of the threads' maxima bounds the budget-th largest score from below; what reaches it is a short
// list in order, from which the exact ones are taken. Where too many scores are equal, or fewer than the budget are above
// 0, the exact edge is found over all scores.
STARTS_EARLY KERNEL(THREADS) qsa_select(const float *scores, const i64 *pos, int *blocks, int block, int budget, int most) {
    __shared__ u32 sums[3][32];
    __shared__ int bins[THREADS], found[3], ids[LISTED];
    int row = blockIdx.x, t = threadIdx.x, lane = t & 31, warp = t >> 5;
    bins[t] = 0;
    let_next_start();
    wait_for_inputs();
    int n = ((int)*pos + row + 1) / block;
    int *out = blocks + (size_t)row * budget;
    if (n <= budget) {
        for (int b = t; b < n; b += THREADS) out[b] = b;
        return;
    }
    Scores mine;
    int share = (n + 127) / 128 * 4;
    mine.s = scores + (size_t)row * most;
    mine.first = warp * share;
    mine.end = mine.first + share < n ? mine.first + share : n;
    mine.chunks = (share + CHUNK - 1) / CHUNK;
    mine.keep();
    u32 top = 0;
    auto see = [&](int, u32 key) { top = key > top ? key : top; };
    mine.each<KEPT>(0, see);
#pragma unroll 1
    for (int c = 1; c < mine.chunks; c++) mine.each<LOADED>(c, see);
    u32 high = warp_largest(top), low = warp_largest(top ? ~top : 0);
    if (lane == 0) sums[0][warp] = high, sums[1][warp] = low;
    Range r;
    int threads = __syncthreads_count(top > 0);
    r.hi = warp_largest(sums[0][lane]), r.lo = ~warp_largest(sums[1][lane]), r.want = budget, r.count = threads;
    u32 edge = 1;
    if (threads >= budget) {
        u32 tops[1] = {top};
        narrow<1>(r, tops, bins, sums[2], found);
        edge = r.lo;
    }
    u32 mask = mine.reaching<KEPT>(0, edge), before;
    int reach = __popc(mask);
#pragma unroll 1
    for (int c = 1; c < mine.chunks; c++) reach += __popc(mine.reaching<LOADED>(c, edge));
    int listed = (int)sum_before((u32)reach, sums[2], before);
    if (listed > LISTED || listed < budget) {
        take_from_all(mine, budget, sums[0], sums[1], out);
        return;
    }
    int base = (int)__shfl_sync(ALL_LANES, before, 0);
#pragma unroll 1
    for (int c = 0; c < mine.chunks; c++) {
        u32 word = c ? mine.reaching<LOADED>(c, edge) : mask;
        int to_lane = (int)sum_to_lane((u32)__popc(word)), place = base + to_lane - __popc(word);
        for (; word; word &= word - 1) ids[place++] = mine.first + CHUNK * c + 32 * lane + __ffs((int)word) - 1;
        base += __shfl_sync(ALL_LANES, to_lane, 31);
    }
    __syncthreads();
    u32 keys[EACH];
    int each = (listed + THREADS - 1) / THREADS;  // neighbours on the list
#pragma unroll
    for (int i = 0; i < EACH; i++) keys[i] = i < each && t * each + i < listed ? bits_of(mine.s[ids[t * each + i]]) : 0;
    r.lo = edge, r.hi = warp_largest(sums[0][lane]), r.want = budget, r.count = listed;
    while (r.count > r.want && r.lo < r.hi) narrow<EACH>(r, keys, bins, sums[2], found);
    u32 taken = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++) taken += keys[i] > r.hi ? ABOVE : keys[i] >= r.lo;
    sum_before(taken, sums[1], before);
#pragma unroll
    for (int i = 0; i < EACH; i++)
        if (keys[i] >= r.lo) before = take(ids[t * each + i], keys[i] > r.hi, r.want, before, out);
}
