// Who wants an expert, where several rows of a window may: the Group of a block, with all ids asked for at once.
#pragma once
#include "gemv/kernels.cuh"

// Ids of up to 96 entries from `start` on, three a lane.
struct Ids {
    enum { MOST = 96 };
    int id[3];

    template <class L>
    DEVICE static Ids of(int start, int entries, L load) {
        Ids a;
#pragma unroll
        for (int i = 0; i < 3; i++) {
            int k = start + 32 * i + (int)(threadIdx.x & 31);
            a.id[i] = k < entries ? load(k) : -1;
        }
        return a;
    }
    DEVICE int at(int entry) const {
        int own = entry < 32 ? id[0] : entry < 64 ? id[1] : id[2];
        return __shfl_sync(ALL_LANES, own, entry & 31);
    }
    DEVICE bool same(const Ids &b) const {
        return __all_sync(ALL_LANES, id[0] == b.id[0] && id[1] == b.id[1] && id[2] == b.id[2]);
    }
};

// The entries of an expert, as far as they have been looked through; `entry` leads if it is the first of them.
struct Wanted {
    Group g;
    int entry, found;
    bool leads;

    DEVICE Wanted(int entry, int expert, bool counts) : g{0, entry, expert}, entry(entry), found(0), leads(counts) {}
    // The next ones; counts(i): whether that of id[i] does.
    template <class C>
    DEVICE void look(const Ids &a, int start, C counts) {
        int lane = threadIdx.x & 31;
#pragma unroll
        for (int i = 0; i < 3; i++) {
            u32 same = __ballot_sync(ALL_LANES, a.id[i] == g.expert && counts(i));
            int first = start + 32 * i;
            if (!found && same && first + __ffs((int)same) - 1 != entry) leads = false;
#pragma unroll 1
            for (; same; same &= same - 1, found++)
                if (lane == found) g.mine = first + __ffs((int)same) - 1;
        }
    }
    // Up to four entries behind the first `from`.
    DEVICE Group group(int from) {
        int n = min(found - from, 4);
        if (leads && n > 0) g.have = ((1u << n) - 1) << from;
        return g;
    }
};

// As Group::of_expert<4> for block `block` of `blocks`.
DEVICE Group group_of_expert(u32 block, u32 blocks, const int *ids, const u8 *decisions, u32 take, const int *jobs,
                             int entries) {
    int batches = jobs ? 1 : blocks / entries, entry = block / batches, lane = threadIdx.x & 31;
    int from = block % batches * 4;
    if (jobs) {
        // Asked for together, also what is no job: there are most_jobs words.
        u32 n = load_volatile(jobs), job = load_volatile(jobs + 1 + block);
        if (block >= n) return {0, 0, 0};
        from = job >> 16;
        entry = job & 0xffff;
    }
    Wanted w(entry, ids[entry], Group::taken(decisions, take, entry));
    for (int start = 0; start < entries; start += Ids::MOST) {
        bool counts[3];
        Ids a = Ids::of(start, entries, [&](int k) { return ids[k]; });
#pragma unroll
        for (int i = 0; i < 3; i++) {
            int k = start + 32 * i + lane;
            counts[i] = k < entries && Group::taken(decisions, take, k);
        }
        w.look(a, start, [&](int i) { return counts[i]; });
    }
    return w.group(from);
}
