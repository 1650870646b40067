// The cells of one row, in the order in which attention goes through them.
#pragma once
#include "exact.cuh"

struct List {  // ascending
    const int *blocks;
    int n_blocks, block, entries;
    i64 tail;
    DEVICE i64 cell(int e) const {
        if (block == 0) return tail + e;
        if (e < n_blocks * block) return (i64)blocks[e / block] * block + e % block;
        return tail + e - n_blocks * block;
    }
};

// block > 0: chosen blocks, then the incomplete tail. block 0: the last `budget` cells (0: all), from *first on.
DEVICE List list_of(i64 n, const int *blocks, int block, int budget, const i64 *first) {
    List l;
    l.blocks = blocks;
    l.block = block;
    l.n_blocks = 0;
    if (block == 0) {
        l.tail = budget > 0 && n > budget ? n - budget : 0;
        if (first) {
            i64 least = *first < n - 1 ? *first : n - 1;
            l.tail = least > l.tail ? least : l.tail;
        }
        l.entries = (int)(n - l.tail);
    } else {
        int complete = (int)n / block;
        l.n_blocks = complete < budget ? complete : budget;
        l.tail = (i64)complete * block;
        l.entries = l.n_blocks * block + (int)(n - l.tail);
    }
    return l;
}
