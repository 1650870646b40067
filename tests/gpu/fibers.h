// Threads of a block as fibers: barriers and warp exchanges switch from one to the next, blocks run one after the other.
//
// Lanes that wait for ever end the launch with a message. Bytes of dynamic shared memory are poisoned before each block and
// guarded at the end.
#pragma once
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#ifdef STRATA_RACES
#define QUIET __attribute__((no_sanitize("thread"), noinline))  // its accesses are none of the kernel's
#else
#define QUIET
#endif

namespace shim {

struct dim3_ { int x, y, z; };

enum Wait { RUN, WARP, BLOCK, COPIES, DONE };

struct Fiber {
    void *sp = nullptr;
    Wait wait = RUN;
    bool orders = false;  // waits at __syncwarp, which orders memory
    unsigned mask = 0, ballot = 0;
    int source = 0;
    uint64_t give = 0, received = 0;
    const struct BulkWord *copies = nullptr;  // what it waits for in COPIES, and the phase
    int parity = 0;
    dim3_ thread{};
    int lane = 0, warp = 0;
};

static const int STACK = (128 << 10) + 7 * 64;  // not a power of two: the tops of all stacks would share a cache's sets
static std::vector<Fiber> fibers;
static char *stacks = nullptr;
static size_t stack_count = 0;
static Fiber *now = nullptr, *warp_end = nullptr;  // the fiber that runs, and behind the last one of its warp
static int order = 1;                              // from a fiber to the next one
static void *scheduler_sp = nullptr;
static dim3_ block_index, block_size, grid_size;
static bool reversed = false;
static char message[512];
static bool failed = false;  // the message says how; the block still runs to its end
static bool moved = false;   // a fiber has run since this was cleared

// The barrier of bulk copies: bytes of this phase to come, whether they were named, and how many phases have ended.
struct BulkWord {
    int32_t bytes;
    uint16_t named, ended;
    QUIET bool over(int parity) const { return (ended & 1) != parity; }
};

#if defined(__x86_64__)
// Saves callee-saved registers on the stack, swaps stack pointers, restores.
extern "C" void shim_switch(void **from, void *to);
asm(".text\n.globl shim_switch\n.hidden shim_switch\n.type shim_switch,@function\nshim_switch:\n"
    "push %rbp\npush %rbx\npush %r12\npush %r13\npush %r14\npush %r15\n"
    "mov %rsp,(%rdi)\nmov %rsi,%rsp\n"
    "pop %r15\npop %r14\npop %r13\npop %r12\npop %rbx\npop %rbp\nret\n.size shim_switch,.-shim_switch\n");
static const int SAVED = 6;
#elif defined(__aarch64__)
extern "C" void shim_switch(void **from, void *to);
asm(".text\n.globl shim_switch\n.hidden shim_switch\n.type shim_switch,%function\nshim_switch:\n"
    "sub sp,sp,#176\nstp x19,x20,[sp]\nstp x21,x22,[sp,#16]\nstp x23,x24,[sp,#32]\nstp x25,x26,[sp,#48]\n"
    "stp x27,x28,[sp,#64]\nstp x29,x30,[sp,#80]\nstp d8,d9,[sp,#96]\nstp d10,d11,[sp,#112]\nstp d12,d13,[sp,#128]\n"
    "stp d14,d15,[sp,#144]\nmov x9,sp\nstr x9,[x0]\nmov sp,x1\n"
    "ldp x19,x20,[sp]\nldp x21,x22,[sp,#16]\nldp x23,x24,[sp,#32]\nldp x25,x26,[sp,#48]\nldp x27,x28,[sp,#64]\n"
    "ldp x29,x30,[sp,#80]\nldp d8,d9,[sp,#96]\nldp d10,d11,[sp,#112]\nldp d12,d13,[sp,#128]\nldp d14,d15,[sp,#144]\n"
    "add sp,sp,#176\nret\n.size shim_switch,.-shim_switch\n");
#else
#error "the fibers know x86-64 and aarch64 only"
#endif

static void (*body)(void *) = nullptr;
static void *body_data = nullptr;

// Switches to the warp's next fiber that has something to do, behind the last one to the scheduler.
QUIET static void yield(Wait why) {
    Fiber *me = now;
    me->wait = why;
    void *to = scheduler_sp;
    for (Fiber *f = me + order; f != warp_end; f += order)
        if (f->wait == RUN) {
            now = f;
            to = f->sp;
            break;
        }
    shim_switch(&me->sp, to);
}

static void enter() {
    body(body_data);
    yield(DONE);
    abort();
}

static void prepare(Fiber &f, char *stack) {
    char *top = stack + STACK;
    top -= (uintptr_t)top % 16;
#if defined(__x86_64__)
    void **sp = (void **)top;
    *--sp = nullptr;          // keeps the stack as a call would leave it
    *--sp = (void *)enter;
    for (int i = 0; i < SAVED; i++) *--sp = nullptr;
    f.sp = sp;
#else
    char *sp = top - 176;
    memset(sp, 0, 176);
    ((void **)sp)[11] = (void *)enter;
    f.sp = sp;
#endif
    f.wait = RUN;
}

static const size_t GUARD = 256;
static std::vector<unsigned char> dynamic;
static size_t dynamic_bytes = 0;
static unsigned char *dynamic_start() {
    unsigned char *p = dynamic.data();
    return p + (-(uintptr_t)p & 15);
}

}  // namespace shim

#ifdef STRATA_RACES
#include "races.h"
#endif

namespace shim {

// Ends the launch with a message, once the block has run.
QUIET static void fail(const char *what) {
    if (failed) return;
    failed = true;
    snprintf(message, sizeof message, "block (%d, %d, %d), thread %d: %s", block_index.x, block_index.y, block_index.z,
             (int)(now - fibers.data()), what);
}

static bool stuck(const char *what) {
    int waits[5] = {0, 0, 0, 0, 0};
    for (Fiber &f : fibers) waits[f.wait]++;
    if (!failed)
        snprintf(message, sizeof message,
                 "block (%d, %d, %d): %s; %d threads at a warp exchange, %d at a barrier, %d ended, %d wait for copies",
                 block_index.x, block_index.y, block_index.z, what, waits[WARP], waits[BLOCK], waits[DONE], waits[COPIES]);
    return false;
}

// Gives the values of an exchange that all 32 lanes of a warp take part in; false if they do not.
static bool whole_exchange(int first, int last) {
    Fiber *lanes = fibers.data() + first;
    if (last - first != 32) return false;
    unsigned ballot = 0;
    for (int l = 0; l < 32; l++) {
        if (lanes[l].wait != WARP || lanes[l].mask != 0xffffffffu) return false;
        ballot |= (unsigned)(lanes[l].give & 1) << l;
    }
    for (int l = 0; l < 32; l++) {
        lanes[l].received = lanes[lanes[l].source].give;
        lanes[l].ballot = ballot;
        lanes[l].wait = RUN;
    }
#ifdef STRATA_RACES
    races.warp_epoch[first / 32] += lanes[0].orders;
#endif
    return true;
}

QUIET static void resume(Fiber *f) {
#ifdef STRATA_RACES
    races.inside = true;
#endif
    shim_switch(&scheduler_sp, f->sp);
#ifdef STRATA_RACES
    races.inside = false;
#endif
}

// Runs the lanes of one warp until all of them wait for the block or ended; false if they wait for each other.
static bool run_warp(int first, int last) {
    order = reversed ? -1 : 1;
    warp_end = fibers.data() + (reversed ? first - 1 : last);
    for (;;) {
        bool ran = false;
        for (int i = first; i < last; i++)
            if (fibers[i].wait == COPIES && fibers[i].copies->over(fibers[i].parity)) fibers[i].wait = RUN;
        for (Fiber *f = fibers.data() + (reversed ? last - 1 : first); f != warp_end; f += order) {
            if (f->wait != RUN) continue;
            now = f;
            resume(f);  // it and all behind it
            ran = moved = true;
            break;
        }
        if (whole_exchange(first, last)) continue;
        for (int i = first; i < last; i++) {
            if (fibers[i].wait != WARP) continue;
            unsigned mask = fibers[i].mask;
            bool all = true;
            for (int l = 0; l < 32 && all; l++)
                if (mask >> l & 1) all = first + l < last && fibers[first + l].wait == WARP && fibers[first + l].mask == mask;
            if (!all) continue;
#ifdef STRATA_RACES
            unsigned present = last - first < 32 ? (1u << (last - first)) - 1 : 0xffffffffu;
            races.warp_epoch[first / 32] += fibers[i].orders && (mask & present) == present;
#endif
            unsigned ballot = 0;
            for (int l = 0; l < 32; l++)
                if (mask >> l & 1) ballot |= (unsigned)(fibers[first + l].give & 1) << l;
            for (int l = 0; l < 32; l++) {
                if (!(mask >> l & 1)) continue;
                Fiber &f = fibers[first + l];
                f.received = mask >> f.source & 1 ? fibers[first + f.source].give : f.give;
                f.ballot = ballot;
                f.wait = RUN;
            }
            ran = true;
        }
        if (ran) continue;
        bool copies = false;  // that another warp may ask for
        for (int i = first; i < last; i++) copies |= fibers[i].wait == COPIES;
        for (int i = first; i < last && !copies; i++)
            if (fibers[i].wait == WARP) return stuck("lanes of a warp exchange are missing");
        return true;
    }
}

static bool run_block() {
    int n = (int)fibers.size(), warps = (n + 31) / 32;
    for (;;) {
        moved = false;
        for (int k = 0; k < warps; k++) {
            int w = reversed ? warps - 1 - k : k;
            if (!run_warp(32 * w, 32 * w + 32 < n ? 32 * w + 32 : n)) return false;
        }
        int at_barrier = 0, ended = 0, copies = 0;
        for (Fiber &f : fibers) { at_barrier += f.wait == BLOCK; ended += f.wait == DONE; copies += f.wait == COPIES; }
        if (ended == n) return true;
        if (copies && !moved) return stuck("nobody asks for the copies that threads wait for");
        if (copies) continue;
        if (at_barrier + ended != n) return stuck("threads neither wait nor end");
        for (Fiber &f : fibers)
            if (f.wait == BLOCK) f.wait = RUN;
#ifdef STRATA_RACES
        races.epoch++;
#endif
    }
}

static bool run_grid(const int *grid, const int *block, int shared_bytes, bool reverse, void (*f)(void *), void *data) {
    int n = block[0] * block[1] * block[2];
    if (stack_count < (size_t)n) {
        free(stacks);
        stacks = (char *)aligned_alloc(64, (size_t)n * STACK);
        stack_count = n;
    }
    fibers.assign(n, Fiber());
    dynamic_bytes = shared_bytes;
    dynamic.assign(shared_bytes + GUARD + 16, 0);
    reversed = reverse;
    body = f;
    body_data = data;
    grid_size = {grid[0], grid[1], grid[2]};
    block_size = {block[0], block[1], block[2]};
    message[0] = 0;
    failed = false;
#ifdef STRATA_RACES
    watch_launch();
#endif
    long blocks = (long)grid[0] * grid[1] * grid[2];
    for (long k = 0; k < blocks; k++) {
        long b = reverse ? blocks - 1 - k : k;
        block_index = {(int)(b % grid[0]), (int)(b / grid[0] % grid[1]), (int)(b / grid[0] / grid[1])};
        memset(dynamic.data(), 0xA5, dynamic.size());
        for (int i = 0; i < n; i++) {
            fibers[i].thread = {i % block[0], i / block[0] % block[1], i / block[0] / block[1]};
            fibers[i].lane = i & 31;
            fibers[i].warp = i / 32;
            prepare(fibers[i], stacks + (size_t)i * STACK);
        }
#ifdef STRATA_RACES
        watch_block();
#endif
        if (!run_block() || failed) return false;
        for (size_t i = 0; i < GUARD; i++)
            if (dynamic_start()[dynamic_bytes + i] != 0xA5 && dynamic_start() + dynamic_bytes + i < dynamic.data() + dynamic.size())
                return stuck("written behind the dynamic shared memory");
    }
    return true;
}

}  // namespace shim
