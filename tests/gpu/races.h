// A race detector for shared memory, in place of the runtime that -fsanitize=thread expects: the compiler calls a hook at every
// load and store, and the hook knows which thread of the block is at work and what it has waited for.
//
// Two accesses to a byte, at least one of them a write, are in order if one thread makes both, if the block met at a barrier
// between them, or if they are of one warp and it met at __syncwarp between them. Shuffles and ballots order no memory.
// Atomics race with plain accesses only. What `copy` brings may be touched behind the copy_wait of its group only, by its own
// thread too; what `bulk_copy` brings only by threads that have waited for its phase. The first race ends the launch with a
// message. Global memory is not watched.
#pragma once
#include <cstdint>
#include <cstdio>
#include <vector>

extern char __bss_start[] __attribute__((visibility("hidden")));
extern char _end[] __attribute__((visibility("hidden")));
extern char __ehdr_start[] __attribute__((visibility("hidden")));

namespace shim {

enum Touch { READ, WRITE, ATOMIC, COPY, BULK };
static const char *const NAMES[] = {"read", "write", "atomic", "copy", "bulk copy"};

// An access: when it was, and by which thread (of a reader also: by others of its warp, of other warps).
struct Access {
    uint32_t epoch = 0, warp_epoch = 0;
    uint16_t thread = 0;
    uint8_t others = 0;
};
enum { ALONE, SAME_WARP, OTHER_WARPS };
struct Byte {
    Access write, read;
    uint32_t group = 0;  // number of the copy's group, of a bulk copy the phase of its barrier; 0: no copy
    const BulkWord *barrier = nullptr;
    Touch how = WRITE;   // the last that was no read
};

struct Phase {
    const BulkWord *barrier;
    uint32_t ended;
};

struct Races {
    uint32_t epoch = 1, block_epoch = 1;  // barriers and blocks so far, and where the block began
    uint32_t warp_epoch[32] = {};         // times that a warp met at __syncwarp
    uint32_t group[1024], landed[1024];   // number of a thread's open group of copies, and of the last one waited for
    Phase waited[1024][64];               // by thread and barrier: how far it has waited
    Byte *fixed = nullptr, *dynamic = nullptr;  // of shared variables, and of memory whose size the launch names
    const char *own = nullptr;                  // where the latter begins
    Fiber *first = nullptr;
    bool inside = false;
};
static Races races;

QUIET static int me() { return (int)(now - races.first); }

QUIET static bool in_order(const Access &a, int thread) {
    if (a.epoch != races.epoch) return true;
    if (a.others == OTHER_WARPS) return false;
    if (a.others == ALONE && a.thread == thread) return true;
    return a.thread / 32 == thread / 32 && a.warp_epoch < races.warp_epoch[thread / 32];
}

// code: where the later access is made; the message has it from the start of the library on.
QUIET static void race(const char *earlier, int thread, const char *later, int me, size_t at, const void *code) {
    failed = true;
    snprintf(message, sizeof message,
             "block (%d, %d, %d): race at byte %zu of shared memory: %s by thread %d, then %s by thread %d; code at %#tx",
             block_index.x, block_index.y, block_index.z, at, earlier, thread, later, me, (const char *)code - 1 - __ehdr_start);
}

// Whether the last write of a byte is a copy that `thread` may not rely on yet.
QUIET static bool under_way(const Byte &b, int thread) {
    if (b.group == 0 || b.write.epoch < races.block_epoch) return false;
    if (b.how != BULK) return b.group > races.landed[b.write.thread];
    const Phase &p = races.waited[thread][(uintptr_t)b.barrier / 8 % 64];
    return p.barrier != b.barrier || p.ended < b.group;
}

QUIET static void touch(const void *p, size_t n, Touch how, const void *code, const BulkWord *barrier = nullptr) {
    if (!races.inside || failed) return;
    const char *c = (const char *)p;
    bool of_launch = c >= races.own && c + n <= races.own + dynamic_bytes;
    if (!of_launch && (c < __bss_start || c + n > _end)) return;
    size_t at = of_launch ? c - races.own : c - __bss_start;
    Byte *bytes = of_launch ? races.dynamic : races.fixed;
    int thread = me();
    uint32_t warp_epoch = races.warp_epoch[thread / 32];
    const Access mine = {races.epoch, warp_epoch, (uint16_t)thread, ALONE};
    for (size_t i = at; i < at + n; i++) {
        Byte &b = bytes[i];
        Access &w = b.write, &r = b.read;
        bool early = under_way(b, thread);
        if (early || (!(how == ATOMIC && b.how == ATOMIC) && !in_order(w, thread)))
            return race(early ? "copy under way" : NAMES[b.how], w.thread, NAMES[how], thread, i, code);
        if (how == READ) {
            if (r.epoch != races.epoch) r = mine;
            else if (r.thread / 32 != thread / 32) r.others = OTHER_WARPS;
            else if (r.others != OTHER_WARPS && r.warp_epoch < warp_epoch) r = mine;
            else if (r.others == ALONE && r.thread != thread) r.others = SAME_WARP;
            continue;
        }
        if (!in_order(r, thread)) return race(NAMES[READ], r.thread, NAMES[how], thread, i, code);
        w = mine;
        b.how = how;
        b.group = how == COPY ? races.group[thread] : how == BULK ? barrier->ended + 1 : 0;
        b.barrier = barrier;
    }
}

QUIET static void watch_launch() {
    static std::vector<Byte> bytes;
    size_t n_fixed = _end - __bss_start;
    bytes.assign(n_fixed + dynamic_bytes, Byte());
    races.fixed = bytes.data(), races.dynamic = bytes.data() + n_fixed;
    races.own = (const char *)dynamic_start(), races.first = fibers.data();
    races.epoch = 1;
    for (uint32_t &e : races.warp_epoch) e = 0;
}

QUIET static void watch_block() {
    races.block_epoch = ++races.epoch;
    for (uint32_t &g : races.group) g = 1;
    for (uint32_t &l : races.landed) l = 0;
    memset(races.waited, 0, sizeof races.waited);
}

// What shim.h does for a kernel.
QUIET static void *copied(void *to, const void *from, size_t n) {
    touch(from, n, READ, __builtin_return_address(0));
    touch(to, n, WRITE, __builtin_return_address(0));
    return memcpy(to, from, n);
}
QUIET static void end_group() { races.group[me()]++; }
QUIET static void wait_for_groups(int later) {
    int open = (int)races.group[me()];
    if (open - 1 - later > (int)races.landed[me()]) races.landed[me()] = open - 1 - later;
}

QUIET static void wait_for_phase(const BulkWord *barrier) {
    races.waited[me()][(uintptr_t)barrier / 8 % 64] = {barrier, barrier->ended};
}

}  // namespace shim

#define HOOK(name, n, how) \
    extern "C" QUIET void name(void *p) { shim::touch(p, n, shim::how, __builtin_return_address(0)); }
HOOK(__tsan_read1, 1, READ) HOOK(__tsan_read2, 2, READ) HOOK(__tsan_read4, 4, READ)
HOOK(__tsan_read8, 8, READ) HOOK(__tsan_read16, 16, READ)
HOOK(__tsan_write1, 1, WRITE) HOOK(__tsan_write2, 2, WRITE) HOOK(__tsan_write4, 4, WRITE)
HOOK(__tsan_write8, 8, WRITE) HOOK(__tsan_write16, 16, WRITE)
#undef HOOK
extern "C" QUIET void __tsan_read_range(void *p, size_t n) { shim::touch(p, n, shim::READ, __builtin_return_address(0)); }
extern "C" QUIET void __tsan_write_range(void *p, size_t n) { shim::touch(p, n, shim::WRITE, __builtin_return_address(0)); }
extern "C" QUIET void __tsan_vptr_update(void *, void *) {}
extern "C" QUIET void __tsan_vptr_read(void *) {}
extern "C" QUIET void __tsan_func_entry(void *) {}
extern "C" QUIET void __tsan_func_exit() {}
extern "C" QUIET void __tsan_init() {}
