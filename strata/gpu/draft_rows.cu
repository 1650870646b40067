// Streams of rows that wait for the draft layer, in a ring by position, and what a draft step takes and leaves.
#include "exp64.cuh"

// What a step leaves for the next one and for the host: at most 8 records of a chain.
struct Chain {
    struct { i64 id; double probability; } records[8];  // id -1: logits that are not finite
    int best;
    float logit;
    int status, last;
    double sum;
    int made, unused;
};

// Rows 0 .. n - 1 of streams (8, values) go to the ring's rows from `position` on. words: position, n, in host memory.
// Grid: (values / 1024, 8).
KERNEL(256) draft_keep(const i64 *host, const float *streams, float *const *ring, int ring_rows, int values) {
    const volatile i64 *words = host;  // the host writes between launches: no cached copy may be used
    i64 position = words[0], row = blockIdx.y;
    if (row >= words[1]) return;
    float *to = *ring + (position + row) % ring_rows * values;
    for (int i = blockIdx.x * 256 + threadIdx.x; i < values; i += gridDim.x * 256) to[i] = streams[row * values + i];
}

// x (T, values): the ring's rows from pos on. Grid: (values / 1024, T).
KERNEL(256) draft_rows(float *const *ring, int ring_rows, const i64 *pos, float *x, int values) {
    size_t row = blockIdx.y;
    const float *from = *ring + (*pos + (i64)row) % ring_rows * values;
    for (int i = blockIdx.x * 256 + threadIdx.x; i < values; i += gridDim.x * 256) x[row * values + i] = from[i];
}

// Inputs of a step. The first of a chain takes words: token, position, first cell, in host memory, and a row of the
// ring; every other one what the step before left. Grid: values / 1024.
KERNEL(256) draft_start(const i64 *host, float *const *ring, int ring_rows, const float *streams, Chain *chain, float *x,
                        int *token, i64 *pos, i64 *first, int values, int goes_on) {
    const volatile i64 *words = host;
    const float *from = goes_on ? streams : *ring + words[1] % ring_rows * values;
    for (int i = blockIdx.x * 256 + threadIdx.x; i < values; i += gridDim.x * 256) x[i] = from[i];
    if (blockIdx.x || threadIdx.x) return;
    if (goes_on) {
        *token = chain->last;
        *pos += 1;
        return;
    }
    *token = (int)words[0];
    *pos = words[1];
    *first = words[2];
    chain->made = 0;
}

// The step's draft, from the best logit and the log-sum-exp that the chain holds. ids: tokens of the head's rows, or null
// where they are the vocabulary.
KERNEL(32) draft_choice(Chain *chain, const int *ids) {
    if (threadIdx.x) return;
    bool good = chain->status < 0;
    int token = !good ? 0 : ids ? ids[chain->best] : chain->best, made = chain->made < 8 ? chain->made : 7;
    chain->records[made].id = good ? token : -1;
    chain->records[made].probability = good ? exp64(add64((double)chain->logit, -chain->sum)) : 0.0;
    chain->last = token;
    chain->made = made + 1;
}
