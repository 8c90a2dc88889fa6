/* simt.cpp - the machine behind simt.h: fibers, the scheduler of a block, the memory of who touched what, the asynchronous
 * copies on their way into it, the mbarriers.
 *
 * Compiled without sanitizers (they are found at run time, through weak symbols), so that the bookkeeping of every access
 * costs little and switching stacks is not instrumented.
 */
#include "simt.h"

#include <stdarg.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <unordered_map>
#include <vector>

#include "simt_machine.h"
#include "simt_tensor.h"

#ifndef __x86_64__
#include <ucontext.h>
#endif

extern "C" {
const char *__asan_default_options(void);
void __asan_on_error(void);
void __ubsan_on_report(void);
}

/* A fake stack for each of a thousand fibers would cost more than all kernels. */
const char *__asan_default_options(void) { return "detect_stack_use_after_return=0"; }

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

enum {
    WARP = 32,
    FIBER_STACK = 256 * 1024,
    GUARD_PAGE = 4096,
    PAUSES_WITHOUT_PROGRESS = 5 * 1000 * 1000,
};

/* --- fibers -------------------------------------------------------------------------------------------------------- */

/* A stack and where execution stands on it. */
struct Fiber {
#ifdef __x86_64__
    void *stack_pointer;
#else
    ucontext_t context;
#endif
    void *fake_stack; /* AddressSanitizer's */
    const void *bottom;
    size_t size;
};

#ifdef __x86_64__
/* Saves what the calling convention preserves on this stack, leaves its address at *from, goes on where `to` was saved. */
extern "C" void simt_switch_stack(void **from, void *to);
asm(".text\n"
    ".globl simt_switch_stack\n"
    ".type simt_switch_stack, @function\n"
    "simt_switch_stack:\n"
    "    pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15\n"
    "    movq %rsp, (%rdi)\n"
    "    movq %rsi, %rsp\n"
    "    popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp\n"
    "    ret\n"
    ".size simt_switch_stack, . - simt_switch_stack\n");

static void fiber_set(Fiber *fiber, void (*entry)(void))
{
    void **top = (void **)((char *)fiber->bottom + fiber->size);
    *--top = nullptr; /* the return address of entry, which never returns: ends a debugger's walk */
    *--top = (void *)entry;
    for (int i = 0; i < 6; i++) *--top = nullptr;
    fiber->stack_pointer = top;
}

static void fiber_swap(Fiber *from, Fiber *to) { simt_switch_stack(&from->stack_pointer, to->stack_pointer); }
#else
static void fiber_set(Fiber *fiber, void (*entry)(void))
{
    getcontext(&fiber->context);
    fiber->context.uc_stack.ss_sp = (void *)fiber->bottom;
    fiber->context.uc_stack.ss_size = fiber->size;
    fiber->context.uc_link = nullptr;
    makecontext(&fiber->context, entry, 0);
}

static void fiber_swap(Fiber *from, Fiber *to) { swapcontext(&from->context, &to->context); }
#endif

/* Goes from one fiber to another; `ends` where the first is never entered again. */
static void fiber_switch(Fiber *from, Fiber *to, bool ends)
{
    if (__sanitizer_start_switch_fiber)
        __sanitizer_start_switch_fiber(ends ? nullptr : &from->fake_stack, to->bottom, to->size);
    fiber_swap(from, to);
    if (__sanitizer_finish_switch_fiber) __sanitizer_finish_switch_fiber(from->fake_stack, nullptr, nullptr);
}

/* --- the state of a launch and of its block ------------------------------------------------------------------------ */

enum ThreadState { READY, AT_BARRIER, AT_MBARRIER, IN_COLLECTIVE, RETURNED };

/* An asynchronous copy under way: where it goes, and what stood at its source when it was issued. */
struct Copy {
    SimtRange range;
    ptrdiff_t at;
    const void *from; /* NULL: zeros */
    unsigned char bytes[SIMT_COPY];
    uint32_t number; /* among the thread's copies in this block, from 1 on */
    SimtSite site;
};

/* An arrival at an mbarrier that comes once all copies of a thread up to this number are there. */
struct CopyArrival {
    unsigned mbarrier;
    uint32_t number;
};

struct Mbarrier {
    SimtRange range;
    ptrdiff_t at;
    int arrivals, arrived; /* that a phase takes; that have come in this one */
    int held_up;           /* arrivals of this phase that wait for copies */
    uint32_t phase;        /* how many have completed */
    unsigned waiters;
    std::vector<uint32_t> clock; /* what the arrivals of this phase have known: see "knowledge of other warps" */
    uint32_t completed;          /* what those of the phase before have, as the number of a clock */
};

struct Thread {
    Fiber fiber;
    uint3 index;
    ThreadState state;
    SimtSite site; /* of the barrier or collective it waits in */
    const char *call;
    unsigned mask;
    uint64_t payload, result;
    int source;
    uint32_t known[WARP]; /* vector clock: up to when each lane of the warp is known to this thread; [own lane]: now */
    uint32_t far;         /* the same of all threads of the block, as the number of a clock; 0 where nothing is known */
    unsigned mbarrier;    /* that it waits at */
    std::vector<Copy> copies;          /* under way, in the order of issue */
    uint32_t copies_issued;            /* in this block */
    std::vector<uint32_t> groups;      /* of copies that are closed: how many copies were issued by then */
    std::vector<CopyArrival> arrivals; /* that wait for copies, in the order of issue */
};

/* An access as one number, so that the next one compares quickly: epoch, clock, actor, whether atomic. An epoch is the time
 * between two barriers of a block; they are numbered through the whole process, so nothing is cleared between blocks. Actors
 * are the threads, and in blocks with mbarriers each thread's copies, whose clock is the number of the copy: by their phase
 * a thread may know of the copies that another has issued, and of nothing else that it did. */
typedef uint64_t Stamp;
enum { CLOCK_BITS = 20, CLOCK_MAX = (1 << CLOCK_BITS) - 1, COPIES_OF = SIMT_MAX_THREADS, ACTORS = 2 * SIMT_MAX_THREADS };

static Stamp stamp_make(uint32_t epoch, uint32_t clock, unsigned actor, bool atomic)
{
    return ((uint64_t)epoch << 32) | ((uint64_t)clock << 12) | (actor << 1) | atomic;
}
static uint32_t stamp_epoch(Stamp stamp) { return (uint32_t)(stamp >> 32); }
static uint32_t stamp_clock(Stamp stamp) { return (uint32_t)(stamp >> 12) & CLOCK_MAX; }
static unsigned stamp_actor(Stamp stamp) { return (unsigned)(stamp >> 1) & (ACTORS - 1); }
static unsigned stamp_thread(Stamp stamp) { return stamp_actor(stamp) % COPIES_OF; }
static bool stamp_atomic(Stamp stamp) { return stamp & 1; }

/* What is known of a byte: its last writer and two of the threads that have read it since, of different warps if any are. */
struct Byte {
    Stamp writer, reader, other_reader;
};

struct PlacedArray {
    const SimtArray *array;
    SimtRange range;
};

static struct {
    /* the launch */
    bool running;
    const char *text;
    const void *kernel;
    size_t shared_bytes;
    const std::function<void()> *body;
    /* the block */
    unsigned threads, returned;
    Thread *current; /* NULL while the scheduler runs */
    std::vector<uint16_t> ready;
    std::vector<PlacedArray> arrays;
    size_t shared_used;
    uint32_t epoch, first_epoch;
    uint64_t pauses;
    bool has_mbarriers;
    std::vector<Mbarrier> mbarriers;
    /* the process */
    uint64_t random;
    bool catching, faulted;
    std::string fault;
    Fiber scheduler;
    char *stacks;
    std::unordered_map<const void *, size_t> dynamic_limits;
} machine = {};

static Thread threads[SIMT_MAX_THREADS];
static Byte shared_bytes_known[SIMT_SHARED_LIMIT];
/* In blocks with mbarriers: of each byte and warp the last reader since the last write. */
static Stamp warp_readers[SIMT_SHARED_LIMIT * (SIMT_MAX_THREADS / WARP)];
/* Whose copy is on its way there: thread + 1; 0 nobody's. Or that a part of it is an mbarrier. */
static uint16_t copy_owner[SIMT_SHARED_LIMIT / SIMT_COPY];
enum { MBARRIER_THERE = 0xffff };
alignas(1024) static unsigned char shared_memory[SIMT_SHARED_LIMIT];

bool simt_faulted(void) { return machine.faulted; }
void simt_dynamic_limit_set(const void *kernel, size_t bytes) { machine.dynamic_limits[kernel] = bytes; }

static uint64_t random_next(void)
{
    uint64_t z = machine.random += 0x9e3779b97f4a7c15; /* splitmix64 */
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
}

uint64_t simt_random_below(uint64_t n) { return (uint64_t)(((unsigned __int128)random_next() * n) >> 64); }

void simt_seed(uint64_t seed) { machine.random = seed * 0xd1342543de82ef95 + 1; }

static unsigned thread_number(const Thread *thread) { return (unsigned)(thread - threads); }

/* --- faults -------------------------------------------------------------------------------------------------------- */

/* The kernel's name: the launch's text up to the first comma outside of <> and (). */
static std::string kernel_name(const char *text)
{
    int depth = 0;
    const char *end = text;
    for (; *end && !(*end == ',' && depth == 0); end++) depth += (*end == '<' || *end == '(') - (*end == '>' || *end == ')');
    return std::string(text, end);
}

__attribute__((format(printf, 1, 2))) static std::string format(const char *pattern, ...)
{
    char text[1024];
    va_list arguments;
    va_start(arguments, pattern);
    vsnprintf(text, sizeof text, pattern, arguments);
    va_end(arguments);
    return text;
}

/* In an array: a string would be leaked on the stack of a fiber that a fault abandons. */
struct ThreadName { char text[48]; };

static ThreadName thread_name(const Thread *thread)
{
    ThreadName name;
    snprintf(name.text, sizeof name.text, "thread (%u,%u,%u)", thread->index.x, thread->index.y, thread->index.z);
    return name;
}

static std::string place(const Thread *thread)
{
    std::string text = "kernel " + kernel_name(machine.text) +
                       format(", block (%u,%u,%u)", blockIdx.x, blockIdx.y, blockIdx.z);
    return thread ? text + ", " + thread_name(thread).text : text;
}

/* Keeps the first fault where a test waits for one; ends the process elsewhere. */
static void fault_record(const Thread *thread, const std::string &what)
{
    std::string text = place(thread) + ": " + what;
    if (!machine.catching) {
        fflush(stdout);
        fprintf(stderr, "simt: %s\n", text.c_str());
        _exit(1);
    }
    if (!machine.faulted) machine.fault = text;
    machine.faulted = true;
}

/* The fiber is left where it stands, and the scheduler ends the launch. */
void simt_fault(const char *pattern, ...)
{
    char text[1024];
    va_list arguments;
    va_start(arguments, pattern);
    vsnprintf(text, sizeof text, pattern, arguments);
    va_end(arguments);
    if (!machine.current) {
        fprintf(stderr, "simt: outside of a kernel: %s\n", text);
        _exit(1);
    }
    fault_record(machine.current, text);
    fiber_switch(&machine.current->fiber, &machine.scheduler, true);
    abort(); /* the scheduler does not come back */
}

/* Called by the sanitizers' runtimes before they report. */
static void sanitizer_reports(void)
{
    if (machine.running && machine.current)
        fprintf(stderr, "simt: %s: the report that follows\n", place(machine.current).c_str());
}
void __asan_on_error(void) { sanitizer_reports(); }
void __ubsan_on_report(void) { sanitizer_reports(); }

/* --- knowledge of other warps -------------------------------------------------------------------------------------- */

/* In a block with mbarriers each thread knows up to when it has heard of every actor of the block. Most lanes of a warp know
 * the same, so these clocks are kept once and named by a number: `entries` each, first the threads, then their copies. A
 * clock that a thread, an mbarrier or the memo names does not change. Its entries of the own warp may lag behind `known`. */
enum { CLOCKS_KEPT = 4096, MEMOS = 256 };
static struct {
    size_t entries;
    std::vector<uint32_t> values;
    std::vector<bool> held;
    std::vector<uint32_t> unused;
    struct { uint32_t a, b, joined; } memo[MEMOS]; /* what was joined lately */
} clocks;

static uint32_t *clock_values(uint32_t clock) { return clocks.values.data() + clock * clocks.entries; }

static uint32_t actor_entry(unsigned actor) { return actor < COPIES_OF ? actor : machine.threads + actor - COPIES_OF; }

/* Up to when `self` has heard of an actor of another warp, or of any thread's copies. */
static uint32_t far_known(const Thread *self, unsigned actor)
{
    return machine.has_mbarriers && self->far ? clock_values(self->far)[actor_entry(actor)] : 0;
}

/* Nobody knows anything of anybody any more. */
static void clocks_clear(void)
{
    clocks.entries = 2 * machine.threads;
    clocks.values.assign(clocks.entries, 0); /* clock 0, which is never written */
    clocks.unused.clear();
    memset(clocks.memo, 0, sizeof clocks.memo);
    for (unsigned i = 0; i < machine.threads; i++) threads[i].far = 0;
    for (Mbarrier &mbarrier : machine.mbarriers) {
        mbarrier.clock.assign(clocks.entries, 0);
        mbarrier.completed = 0;
    }
}

static uint32_t clock_create(void)
{
    if (clocks.unused.empty()) {
        clocks.values.resize(clocks.values.size() + clocks.entries);
        return (uint32_t)(clocks.values.size() / clocks.entries - 1);
    }
    uint32_t clock = clocks.unused.back();
    clocks.unused.pop_back();
    return clock;
}

/* Where there are many clocks, takes back those that nothing names. Not while a clock is held in a variable. */
static void clocks_collect(void)
{
    if (clocks.values.size() / clocks.entries < CLOCKS_KEPT || !clocks.unused.empty()) return;
    memset(clocks.memo, 0, sizeof clocks.memo);
    clocks.held.assign(clocks.values.size() / clocks.entries, false);
    clocks.held[0] = true;
    for (unsigned i = 0; i < machine.threads; i++) clocks.held[threads[i].far] = true;
    for (const Mbarrier &mbarrier : machine.mbarriers) clocks.held[mbarrier.completed] = true;
    for (size_t clock = 0; clock < clocks.held.size(); clock++)
        if (!clocks.held[clock]) clocks.unused.push_back((uint32_t)clock);
}

/* The clock of who knows what either knows. */
static uint32_t clock_join(uint32_t a, uint32_t b)
{
    if (a == b || !b) return a;
    if (!a) return b;
    auto &memo = clocks.memo[(a * 31 + b) % MEMOS];
    if (memo.a == a && memo.b == b) return memo.joined;
    bool a_knows_more = false, b_knows_more = false;
    for (size_t i = 0; i < clocks.entries; i++) {
        a_knows_more |= clock_values(a)[i] > clock_values(b)[i];
        b_knows_more |= clock_values(b)[i] > clock_values(a)[i];
    }
    uint32_t joined = b_knows_more ? b : a;
    if (a_knows_more && b_knows_more) {
        joined = clock_create();
        const uint32_t *values_a = clock_values(a), *values_b = clock_values(b);
        uint32_t *values = clock_values(joined);
        for (size_t i = 0; i < clocks.entries; i++) values[i] = std::max(values_a[i], values_b[i]);
    }
    memo = {a, b, joined};
    return joined;
}

/* `self` hears of an actor up to `until`. */
static void far_raise(Thread *self, unsigned actor, uint32_t until)
{
    if (far_known(self, actor) >= until) return;
    clocks_collect();
    uint32_t raised = clock_create();
    std::copy_n(clock_values(self->far), clocks.entries, clock_values(raised));
    clock_values(raised)[actor_entry(actor)] = until;
    self->far = raised;
}

static void far_join(Thread *warp, unsigned mask)
{
    clocks_collect();
    uint32_t joined = 0;
    for (unsigned rest = mask; rest; rest &= rest - 1) joined = clock_join(joined, warp[__builtin_ctz(rest)].far);
    for (unsigned rest = mask; rest; rest &= rest - 1) warp[__builtin_ctz(rest)].far = joined;
}

/* --- waiting ------------------------------------------------------------------------------------------------------- */

/* Leaves the running thread in `state` and lets the scheduler choose. */
static void wait_in(ThreadState state)
{
    Thread *self = machine.current;
    self->state = state;
    fiber_switch(&self->fiber, &machine.scheduler, false);
}

static void thread_ready(Thread *thread)
{
    thread->state = READY;
    machine.ready.push_back((uint16_t)thread_number(thread));
}

void simt_pause(void)
{
    if (!machine.current || random_next() & 3) return;
    if (machine.pauses++ > PAUSES_WITHOUT_PROGRESS)
        simt_fault("no thread of the block gets on: it waits for what no thread here does (another block, perhaps)");
    thread_ready(machine.current);
    fiber_switch(&machine.current->fiber, &machine.scheduler, false);
}

int simt_barrier(int predicate, SimtSite site)
{
    Thread *self = machine.current;
    if (!self) simt_fault("a barrier");
    self->site = site;
    self->call = "barrier";
    self->payload = predicate != 0;
    wait_in(AT_BARRIER);
    return (int)self->result;
}

/* The vector clocks of the lanes in `mask` meet: each knows what any of them knew. */
static void clocks_join(Thread *warp, unsigned mask)
{
    uint32_t joined[WARP];
    for (int lane = 0; lane < WARP; lane++) joined[lane] = warp[lane].known[lane]; /* nobody knows more of it than itself */
    for (unsigned absent = ~mask; absent; absent &= absent - 1) {
        int lane = __builtin_ctz(absent);
        joined[lane] = 0;
        for (unsigned rest = mask; rest; rest &= rest - 1) {
            uint32_t known = warp[__builtin_ctz(rest)].known[lane];
            if (known > joined[lane]) joined[lane] = known;
        }
    }
    for (unsigned rest = mask; rest; rest &= rest - 1) {
        int lane = __builtin_ctz(rest);
        memcpy(warp[lane].known, joined, sizeof joined);
        if (warp[lane].known[lane] < CLOCK_MAX) warp[lane].known[lane]++;
    }
    if (machine.has_mbarriers) far_join(warp, mask);
}

/* The vote of all lanes in `mask`, for all votes whose result is the same for everyone. */
static uint64_t vote_result(SimtVote vote, const Thread *warp, unsigned mask)
{
    uint32_t result = vote == SIMT_AND || vote == SIMT_UMIN ? ~0u : vote == SIMT_MIN ? INT32_MAX : 0;
    if (vote == SIMT_MAX) result = (uint32_t)INT32_MIN;
    for (unsigned rest = mask; rest; rest &= rest - 1) {
        int lane = __builtin_ctz(rest);
        uint32_t value = (uint32_t)warp[lane].payload;
        switch (vote) {
        case SIMT_BALLOT: result |= value << lane; break;
        case SIMT_ADD: result += value; break;
        case SIMT_MIN: result = (int32_t)value < (int32_t)result ? value : result; break;
        case SIMT_MAX: result = (int32_t)value > (int32_t)result ? value : result; break;
        case SIMT_UMIN: result = value < result ? value : result; break;
        case SIMT_UMAX: result = value > result ? value : result; break;
        case SIMT_AND: result &= value; break;
        case SIMT_OR: result |= value; break;
        case SIMT_XOR: result ^= value; break;
        default: break;
        }
    }
    return result;
}

/* All lanes of `mask` have come: computes what each gets. */
static void collective_resolve(Thread *warp, unsigned mask, SimtVote vote)
{
    uint64_t common = vote_result(vote, warp, mask);
    for (unsigned rest = mask; rest; rest &= rest - 1) {
        Thread *lane = warp + __builtin_ctz(rest);
        lane->result = vote == SIMT_SHUFFLE ? warp[lane->source].payload : common;
        if (vote == SIMT_MATCH) {
            lane->result = 0;
            for (unsigned all = mask; all; all &= all - 1)
                if (warp[__builtin_ctz(all)].payload == lane->payload) lane->result |= all & -all;
        }
    }
    clocks_join(warp, mask);
}

static Thread *warp_of(const Thread *thread) { return threads + thread_number(thread) / WARP * WARP; }

/* The lanes of a warp that the block has: a block of 48 threads has 16 in its second. */
static unsigned warp_lanes(const Thread *warp)
{
    unsigned count = machine.threads - thread_number(warp);
    return count >= WARP ? 0xffffffff : (1u << count) - 1;
}

static bool same_site(SimtSite a, SimtSite b) { return a.line == b.line && (a.file == b.file || !strcmp(a.file, b.file)); }

static bool same_collective(const Thread *a, const Thread *b)
{
    return b->state == IN_COLLECTIVE && b->mask == a->mask && b->call == a->call && same_site(a->site, b->site);
}

/* The running thread comes to a collective. True where it is the last of `mask`, while all others still stand there; else it
 * has waited, and the last has seen to everything. */
static bool collective_enter(const char *name, unsigned mask, uint64_t payload, SimtSite site)
{
    Thread *self = machine.current, *warp = warp_of(self);
    self->site = site;
    self->call = name;
    self->mask = mask;
    self->payload = payload;
    self->state = IN_COLLECTIVE;
    for (unsigned rest = mask; rest; rest &= rest - 1)
        if (!same_collective(self, warp + __builtin_ctz(rest))) {
            wait_in(IN_COLLECTIVE);
            return false;
        }
    return true;
}

/* The last of `mask` lets the others go on, as it does. */
static void collective_leave(unsigned mask)
{
    Thread *self = machine.current, *warp = warp_of(self);
    for (unsigned rest = mask & ~(1u << (self - warp)); rest; rest &= rest - 1) thread_ready(warp + __builtin_ctz(rest));
    self->state = READY;
    machine.pauses = 0;
}

uint64_t simt_collective(SimtVote vote, const char *name, unsigned mask, uint64_t payload, int source, SimtSite site)
{
    Thread *self = machine.current;
    if (!self) simt_fault("%s", name);
    Thread *warp = warp_of(self);
    unsigned lane = (unsigned)(self - warp);
    if (!(mask >> lane & 1))
        simt_fault("%s at %s:%d: the mask 0x%08x lacks the caller, lane %u", name, site.file, site.line, mask, lane);
    mask &= warp_lanes(warp);
    if (vote == SIMT_SHUFFLE && !(mask >> source & 1))
        simt_fault("%s at %s:%d reads lane %d, which is not in its mask 0x%08x or not in the block", name, site.file,
                   site.line, source, mask);
    self->source = source;
    if (collective_enter(name, mask, payload, site)) {
        collective_resolve(warp, mask, vote);
        collective_leave(mask);
    }
    return self->result;
}

void simt_warp_meet(const char *name, void *mine, void (*resolve)(void *const *lanes), SimtSite site)
{
    if (!machine.current) simt_fault("%s", name);
    const Thread *warp = warp_of(machine.current);
    unsigned mask = warp_lanes(warp);
    if (mask != 0xffffffff)
        simt_fault("%s at %s:%d needs all 32 lanes of a warp, and the block ends after %d of this one", name, site.file,
                   site.line, __builtin_popcount(mask));
    if (!collective_enter(name, mask, (uint64_t)(uintptr_t)mine, site)) return;
    void *lanes[WARP];
    for (int lane = 0; lane < WARP; lane++) lanes[lane] = (void *)(uintptr_t)warp[lane].payload;
    resolve(lanes);
    collective_leave(mask);
}

unsigned __activemask(void)
{
    const Thread *warp = warp_of(machine.current);
    unsigned active = 0;
    for (unsigned rest = warp_lanes(warp); rest; rest &= rest - 1)
        if (warp[__builtin_ctz(rest)].state != RETURNED) active |= rest & -rest;
    return active;
}

long long clock64(void)
{
    static long long ticks;
    return ticks += 16;
}

/* --- shared memory ------------------------------------------------------------------------------------------------- */

SimtRange simt_shared_array(const SimtArray *array)
{
    if (!machine.current) simt_fault("shared memory");
    for (const PlacedArray &placed : machine.arrays)
        if (placed.array == array) return placed.range;
    size_t begin = (machine.shared_used + 15) / 16 * 16, end = begin + array->bytes;
    size_t limit = machine.shared_bytes > SIMT_SHARED_DEFAULT ? SIMT_SHARED_LIMIT : SIMT_SHARED_DEFAULT;
    if (machine.dynamic_limits.count(machine.kernel)) limit = SIMT_SHARED_LIMIT;
    if (end - machine.shared_bytes > SIMT_SHARED_DEFAULT || end > limit)
        simt_fault("the array %s brings shared memory to %zu bytes, %zu of them dynamic; without "
                   "cudaFuncAttributeMaxDynamicSharedMemorySize %d are allowed, of static arrays never more, and %d at all",
                   array->name, end, machine.shared_bytes, SIMT_SHARED_DEFAULT, SIMT_SHARED_LIMIT);
    machine.shared_used = end;
    machine.arrays.push_back({array, {array->name, (uint32_t)begin, (uint32_t)end}});
    return machine.arrays.back().range;
}

SimtRange simt_shared_range(size_t byte_offset, size_t count, size_t element, size_t alignment)
{
    if (!machine.current) simt_fault("shared memory");
    size_t end;
    if (__builtin_mul_overflow(count, element, &end) || __builtin_add_overflow(end, byte_offset, &end) ||
        end > machine.shared_bytes)
        simt_fault("shared_dynamic of %zu elements of %zu bytes from byte %zu on, but the launch asked for %zu bytes", count,
                   element, byte_offset, machine.shared_bytes);
    if (byte_offset % alignment)
        simt_fault("shared_dynamic from byte %zu on, but its type is aligned to %zu", byte_offset, alignment);
    return {"dynamic", (uint32_t)byte_offset, (uint32_t)end};
}

/* Whether the running thread's access at `now` may come before or after that of `earlier`, with nothing to decide it. */
static inline bool stamps_unordered(const Thread *self, Stamp earlier, Stamp now)
{
    if (stamp_epoch(earlier) != stamp_epoch(now) || stamp_actor(earlier) == stamp_actor(now)) return false;
    if (stamp_atomic(earlier) && stamp_atomic(now)) return false;
    unsigned other = stamp_actor(earlier);
    if (other / WARP == thread_number(self) / WARP) return self->known[other % WARP] < stamp_clock(earlier);
    return far_known(self, other) < stamp_clock(earlier);
}

[[noreturn]] static void race_raise(const SimtRange &range, uint32_t byte, bool writes, Stamp earlier, bool earlier_wrote)
{
    simt_fault("a race in shared memory: byte %u of %s is %s here and was %s%s by %s%s, with no barrier between",
               byte - range.begin, range.name, writes ? "written" : "read", earlier_wrote ? "written" : "read",
               stamp_atomic(earlier) ? " atomically" : "", stamp_actor(earlier) >= COPIES_OF ? "a copy of " : "",
               thread_name(threads + stamp_thread(earlier)).text);
}

/* Keeps a reader of another warp where there is one: two warps reading make any writer a race, whatever lanes they were. */
static inline void readers_add(Byte *byte, Stamp now)
{
    Stamp last = byte->reader;
    bool last_counts = stamp_epoch(last) == stamp_epoch(now) && stamp_thread(last) != stamp_thread(now);
    bool same_warp = stamp_thread(last) / WARP == stamp_thread(now) / WARP;
    bool other_counts = stamp_epoch(byte->other_reader) == stamp_epoch(now) &&
                        stamp_thread(byte->other_reader) / WARP != stamp_thread(now) / WARP;
    if (last_counts && !(same_warp && other_counts)) byte->other_reader = last;
    byte->reader = now;
}

/* Where mbarriers order some warps and not others, it takes a reader of each. */
static inline Stamp *readers_of_warps(uint32_t byte) { return warp_readers + byte * ((machine.threads + WARP - 1) / WARP); }

/* Before a write of a byte that has been read in this epoch. */
static void warp_readers_check(const SimtRange &range, uint32_t byte, Stamp now)
{
    Stamp *readers = readers_of_warps(byte);
    for (unsigned warp = 0; warp < (machine.threads + WARP - 1) / WARP; warp++) {
        if (stamps_unordered(machine.current, readers[warp], now)) race_raise(range, byte, true, readers[warp], false);
        readers[warp] = 0;
    }
}

[[noreturn]] static void copy_raise(const SimtRange &range, ptrdiff_t at, bool writes)
{
    const Thread *owner = threads + copy_owner[at / SIMT_COPY] - 1;
    const Copy *copy = owner->copies.data();
    while (copy->at / SIMT_COPY != at / SIMT_COPY) copy++;
    simt_fault("%s of shared memory whose copy is still under way: byte %td of %s, to which %s copies at %s:%d",
               writes ? "write" : "read", at - (ptrdiff_t)range.begin, range.name, thread_name(owner).text,
               copy->site.file, copy->site.line);
}

/* An access to 16 bytes, some of which are a copy under way or an mbarrier. */
static void slot_check(const SimtRange &range, ptrdiff_t slot, ptrdiff_t at, size_t bytes, bool writes)
{
    if (copy_owner[slot] != MBARRIER_THERE) copy_raise(range, at > slot * SIMT_COPY ? at : slot * SIMT_COPY, writes);
    for (const Mbarrier &mbarrier : machine.mbarriers)
        if (mbarrier.at < at + (ptrdiff_t)bytes && at < mbarrier.at + SIMT_MBARRIER)
            simt_fault("%s of shared memory that is an mbarrier: byte %td of %s", writes ? "write" : "read",
                       std::max(at, mbarrier.at) - (ptrdiff_t)range.begin, range.name);
}

static inline void bounds_check(const SimtRange &range, ptrdiff_t at, size_t bytes, size_t alignment, SimtAccess access)
{
    if (!machine.current) simt_fault("an access to shared memory");
    ptrdiff_t first = at - (ptrdiff_t)range.begin;
    if (first < 0 || at + (ptrdiff_t)bytes > (ptrdiff_t)range.end)
        simt_fault("%s out of bounds: bytes %td to %td of the %u of shared memory %s",
                   access == SIMT_READ ? "read" : "write", first, first + (ptrdiff_t)bytes - 1, range.end - range.begin,
                   range.name ? range.name : "(a null pointer)");
    if ((size_t)at % alignment)
        simt_fault("misaligned access: byte %td of shared memory %s as a type aligned to %zu", first, range.name, alignment);
}

void simt_shared_check(const SimtRange &range, ptrdiff_t at, size_t bytes, size_t alignment, SimtAccess access)
{
    bounds_check(range, at, bytes, alignment, access);
    for (ptrdiff_t slot = at / SIMT_COPY; slot <= (at + (ptrdiff_t)bytes - 1) / SIMT_COPY; slot++)
        if (copy_owner[slot]) slot_check(range, slot, at, bytes, access != SIMT_READ);
}

void *simt_shared_access(const SimtRange &range, ptrdiff_t at, size_t bytes, size_t alignment, SimtAccess access)
{
    simt_shared_check(range, at, bytes, alignment, access);
    Thread *self = machine.current;
    bool writes = access != SIMT_READ;
    unsigned number = thread_number(self);
    Stamp now = stamp_make(machine.epoch, self->known[number % WARP], number, access == SIMT_ATOMIC);
    bool has_mbarriers = machine.has_mbarriers;
    for (uint32_t i = (uint32_t)at; i < (uint32_t)at + bytes; i++) {
        Byte *byte = shared_bytes_known + i;
        if (access != SIMT_WRITE && stamp_epoch(byte->writer) < machine.first_epoch)
            simt_fault("read of byte %u of shared memory %s, which no thread of this block has written", i - range.begin,
                       range.name);
        if (stamps_unordered(self, byte->writer, now)) race_raise(range, i, writes, byte->writer, true);
        if (writes) {
            if (stamps_unordered(self, byte->reader, now)) race_raise(range, i, true, byte->reader, false);
            if (stamps_unordered(self, byte->other_reader, now)) race_raise(range, i, true, byte->other_reader, false);
            if (has_mbarriers && stamp_epoch(byte->reader) == machine.epoch) warp_readers_check(range, i, now);
            byte->writer = now;
            byte->reader = byte->other_reader = 0;
        } else if (byte->reader != now) {
            readers_add(byte, now);
            if (has_mbarriers) readers_of_warps(i)[number / WARP] = now;
        }
    }
    return shared_memory + at;
}

/* --- asynchronous copies and mbarriers ----------------------------------------------------------------------------- */

void simt_copy_issue(const SimtRange &range, ptrdiff_t at, const void *from, const void *bytes, SimtSite site)
{
    simt_shared_access(range, at, SIMT_COPY, SIMT_COPY, SIMT_WRITE); /* it might land at once */
    Thread *self = machine.current;
    Copy copy = {range, at, from, {0}, ++self->copies_issued, site};
    memcpy(copy.bytes, bytes, SIMT_COPY);
    self->copies.push_back(copy);
    copy_owner[at / SIMT_COPY] = (uint16_t)(thread_number(self) + 1);
}

void simt_copies_commit(void)
{
    if (!machine.current) simt_fault("copies_commit");
    machine.current->groups.push_back(machine.current->copies_issued);
}

static uint32_t copy_clock(uint32_t number) { return std::min<uint32_t>(number, CLOCK_MAX); }

/* A copy is a write of its thread; where there are mbarriers, one that is known apart from whatever else the thread did. */
static void copy_land(const Thread *owner, const Copy &copy)
{
    if (copy.from && memcmp(copy.from, copy.bytes, SIMT_COPY) != 0)
        simt_fault("the source of the copy at %s:%d, %p, changed while it was under way", copy.site.file, copy.site.line,
                   copy.from);
    copy_owner[copy.at / SIMT_COPY] = 0;
    if (machine.has_mbarriers) { /* it was checked when it was issued, and nobody has touched the bytes since */
        Stamp stamp = stamp_make(machine.epoch, copy_clock(copy.number), COPIES_OF + thread_number(owner), false);
        for (int i = 0; i < SIMT_COPY; i++) shared_bytes_known[copy.at + i] = {stamp, 0, 0};
    } else {
        simt_shared_access(copy.range, copy.at, SIMT_COPY, SIMT_COPY, SIMT_WRITE);
    }
    memcpy(shared_memory + copy.at, copy.bytes, SIMT_COPY);
}

/* One more arrival has come: those who wait go on if it was the last of its phase. */
static void arrival_count(unsigned index)
{
    Mbarrier *mbarrier = &machine.mbarriers[index];
    machine.pauses = 0;
    if (++mbarrier->arrived < mbarrier->arrivals) return;
    mbarrier->completed = clock_create();
    std::copy(mbarrier->clock.begin(), mbarrier->clock.end(), clock_values(mbarrier->completed));
    std::fill(mbarrier->clock.begin(), mbarrier->clock.end(), 0);
    mbarrier->arrived = 0;
    mbarrier->phase++;
    for (unsigned i = 0; mbarrier->waiters && i < machine.threads; i++) {
        if (threads[i].state != AT_MBARRIER || threads[i].mbarrier != index) continue;
        thread_ready(threads + i);
        mbarrier->waiters--;
    }
}

/* All copies of `owner` up to this number are there now, and with them the arrivals that waited for nothing else. */
static void copies_land(Thread *owner, uint32_t number)
{
    size_t landed = 0, arrived = 0;
    for (; landed < owner->copies.size() && owner->copies[landed].number <= number; landed++)
        copy_land(owner, owner->copies[landed]);
    owner->copies.erase(owner->copies.begin(), owner->copies.begin() + (ptrdiff_t)landed);
    for (; arrived < owner->arrivals.size() && owner->arrivals[arrived].number <= number; arrived++) {
        const CopyArrival &arrival = owner->arrivals[arrived];
        Mbarrier *mbarrier = &machine.mbarriers[arrival.mbarrier];
        uint32_t *known = &mbarrier->clock[actor_entry(COPIES_OF + thread_number(owner))];
        *known = std::max(*known, copy_clock(arrival.number));
        mbarrier->held_up--;
        arrival_count(arrival.mbarrier);
    }
    owner->arrivals.erase(owner->arrivals.begin(), owner->arrivals.begin() + (ptrdiff_t)arrived);
}

void simt_copies_wait(uint64_t pending)
{
    Thread *self = machine.current;
    if (!self) simt_fault("copies_wait");
    if (self->groups.size() <= pending) return;
    uint32_t number = self->groups[self->groups.size() - pending - 1];
    copies_land(self, number);
    if (machine.has_mbarriers) far_raise(self, COPIES_OF + thread_number(self), copy_clock(number));
}

void simt_mbarrier_init(const SimtRange &range, ptrdiff_t at, int arrivals, SimtSite site)
{
    bounds_check(range, at, SIMT_MBARRIER, SIMT_MBARRIER, SIMT_WRITE);
    ptrdiff_t byte = at - (ptrdiff_t)range.begin;
    for (const Mbarrier &mbarrier : machine.mbarriers)
        if (mbarrier.at == at)
            simt_fault("mbarrier_init at %s:%d where there is one already: byte %td of %s", site.file, site.line, byte,
                       range.name);
    if (arrivals < 1 || arrivals > SIMT_MBARRIER_ARRIVALS)
        simt_fault("mbarrier_init at %s:%d for %d arrivals, and there may be 1 to %d", site.file, site.line, arrivals,
                   SIMT_MBARRIER_ARRIVALS);
    simt_shared_access(range, at, SIMT_MBARRIER, SIMT_MBARRIER, SIMT_WRITE);
    copy_owner[at / SIMT_COPY] = MBARRIER_THERE;
    if (!machine.has_mbarriers) clocks_clear();
    machine.has_mbarriers = true;
    machine.mbarriers.push_back({range, at, arrivals, 0, 0, 0, 0, std::vector<uint32_t>(clocks.entries), 0});
}

/* The mbarrier there, for the running thread to use. */
static unsigned mbarrier_find(const char *call, const SimtRange &range, ptrdiff_t at, SimtSite site)
{
    bounds_check(range, at, SIMT_MBARRIER, SIMT_MBARRIER, SIMT_WRITE);
    const Thread *self = machine.current;
    ptrdiff_t byte = at - (ptrdiff_t)range.begin;
    for (unsigned i = 0; i < machine.mbarriers.size(); i++) {
        if (machine.mbarriers[i].at != at) continue;
        unsigned number = thread_number(self);
        Stamp now = stamp_make(machine.epoch, self->known[number % WARP], number, false);
        Stamp init = shared_bytes_known[at].writer;
        if (stamps_unordered(self, init, now))
            simt_fault("%s at %s:%d: the mbarrier at byte %td of %s was initialised by %s, with no barrier between", call,
                       site.file, site.line, byte, range.name, thread_name(threads + stamp_thread(init)).text);
        return i;
    }
    simt_fault("%s at %s:%d: there is no mbarrier at byte %td of %s, for nobody has initialised it", call, site.file,
               site.line, byte, range.name);
}

/* Where a phase lacks nothing but copies and somebody waits for it, they arrive. */
static void mbarrier_advance(unsigned index)
{
    const Mbarrier *mbarrier = &machine.mbarriers[index];
    if (!mbarrier->waiters || mbarrier->arrived + mbarrier->held_up < mbarrier->arrivals) return;
    for (unsigned i = 0; i < machine.threads; i++) {
        uint32_t number = 0;
        for (const CopyArrival &arrival : threads[i].arrivals)
            if (arrival.mbarrier == index) number = arrival.number;
        if (number) copies_land(threads + i, number);
    }
}

void simt_mbarrier_arrive(const SimtRange &range, ptrdiff_t at, bool copies, SimtSite site)
{
    const char *call = copies ? "mbarrier_arrive_copies" : "mbarrier_arrive";
    unsigned index = mbarrier_find(call, range, at, site);
    simt_pause();
    Thread *self = machine.current;
    Mbarrier *mbarrier = &machine.mbarriers[index];
    if (mbarrier->arrived + mbarrier->held_up == mbarrier->arrivals)
        simt_fault("%s at %s:%d: one arrival too many at the mbarrier at byte %td of %s: its phase has all of its %d, some "
                   "of which wait for copies", call, site.file, site.line, at - (ptrdiff_t)range.begin, range.name,
                   mbarrier->arrivals);
    unsigned number = thread_number(self), first = number / WARP * WARP;
    if (copies) {
        mbarrier->held_up++;
        self->arrivals.push_back({index, self->copies_issued});
        if (self->copies.empty()) copies_land(self, self->copies_issued);
    } else {
        const uint32_t *far = clock_values(self->far);
        for (size_t i = 0; i < clocks.entries; i++) mbarrier->clock[i] = std::max(mbarrier->clock[i], far[i]);
        for (unsigned i = first; i < first + WARP && i < machine.threads; i++)
            mbarrier->clock[i] = std::max(mbarrier->clock[i], self->known[i - first]);
        if (self->known[number - first] < CLOCK_MAX) self->known[number - first]++;
        arrival_count(index);
    }
    mbarrier_advance(index);
}

void simt_mbarrier_wait(const SimtRange &range, ptrdiff_t at, int parity, SimtSite site)
{
    unsigned index = mbarrier_find("mbarrier_wait", range, at, site);
    if (parity != 0 && parity != 1)
        simt_fault("mbarrier_wait at %s:%d for parity %d, which is neither 0 nor 1", site.file, site.line, parity);
    simt_pause();
    Thread *self = machine.current;
    self->site = site;
    self->call = "mbarrier_wait";
    self->mbarrier = index;
    while ((int)(machine.mbarriers[index].phase & 1) == parity) { /* once let go it looks again: it may come too late */
        machine.mbarriers[index].waiters++;
        self->state = AT_MBARRIER;
        mbarrier_advance(index);
        fiber_switch(&self->fiber, &machine.scheduler, false);
    }
    machine.pauses = 0;
    clocks_collect();
    uint32_t completed = machine.mbarriers[index].completed;
    self->far = clock_join(self->far, completed);
    unsigned first = thread_number(self) / WARP * WARP;
    for (unsigned i = first; i < first + WARP && i < machine.threads; i++)
        self->known[i - first] = std::max(self->known[i - first], clock_values(completed)[i]);
}

/* Those of the block before. */
static void mbarriers_end(void)
{
    for (const Mbarrier &mbarrier : machine.mbarriers) copy_owner[mbarrier.at / SIMT_COPY] = 0;
    machine.mbarriers.clear();
    machine.has_mbarriers = false;
}

/* A launch that a fault ended leaves its copies behind. */
static void copies_abandon(void)
{
    memset(copy_owner, 0, sizeof copy_owner);
    for (unsigned i = 0; i < machine.threads; i++) {
        threads[i].copies.clear();
        threads[i].arrivals.clear();
    }
}

/* --- the scheduler ------------------------------------------------------------------------------------------------- */

/* Where every fiber begins, and ends by going back to the scheduler for good. */
static void fiber_main(void)
{
    if (__sanitizer_finish_switch_fiber)
        __sanitizer_finish_switch_fiber(nullptr, &machine.scheduler.bottom, &machine.scheduler.size);
    (*machine.body)();
    const std::vector<Copy> &copies = machine.current->copies;
    if (!copies.empty())
        simt_fault("it returns with %zu copies to shared memory still under way, the first from %s:%d", copies.size(),
                   copies[0].site.file, copies[0].site.line);
    machine.current->state = RETURNED;
    machine.returned++;
    machine.pauses = 0;
    fiber_switch(&machine.current->fiber, &machine.scheduler, true);
    abort(); /* a fiber that has returned is not entered again */
}

static void stacks_make(void)
{
    size_t slot = FIBER_STACK + GUARD_PAGE;
    machine.stacks = (char *)mmap(nullptr, slot * SIMT_MAX_THREADS, PROT_READ | PROT_WRITE,
                                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (machine.stacks == MAP_FAILED) { perror("simt: stacks of the fibers"); _exit(1); }
    for (int i = 0; i < SIMT_MAX_THREADS; i++) {
        mprotect(machine.stacks + slot * i, GUARD_PAGE, PROT_NONE);
        threads[i].fiber.bottom = machine.stacks + slot * i + GUARD_PAGE;
        threads[i].fiber.size = FIBER_STACK;
    }
}

/* All threads stand on the near side of a barrier, or at the start: nothing that happened before is a race any more. */
static void epoch_begin(void)
{
    if (++machine.epoch == 0) { fprintf(stderr, "simt: out of epochs: 2^32 barriers in one process\n"); _exit(1); }
    for (unsigned i = 0; i < machine.threads; i++) {
        memset(threads[i].known, 0, sizeof threads[i].known);
        threads[i].known[i % WARP] = 1;
    }
    if (machine.has_mbarriers) clocks_clear();
}

static void block_begin(void)
{
    machine.returned = 0;
    machine.pauses = 0;
    machine.arrays.clear();
    machine.shared_used = machine.shared_bytes;
    machine.ready.clear();
    mbarriers_end();
    epoch_begin();
    machine.first_epoch = machine.epoch;
    for (unsigned i = 0; i < machine.threads; i++) {
        threads[i].copies_issued = 0;
        threads[i].groups.clear();
        threads[i].index = {i % blockDim.x, i / blockDim.x % blockDim.y, i / blockDim.x / blockDim.y};
        fiber_set(&threads[i].fiber, fiber_main);
        thread_ready(threads + i);
    }
}

/* Where a thread is, said of one that keeps another waiting. */
static std::string whereabouts(const Thread *thread)
{
    if (thread->state == RETURNED) return "has returned";
    std::string text = format("waits in the %s at %s:%d", thread->call, thread->site.file, thread->site.line);
    return thread->state == IN_COLLECTIVE ? text + format(" with the mask 0x%08x", thread->mask) : text;
}

/* No thread can run, and not all wait at one barrier: says which waits for which. */
static void deadlock_record(void)
{
    for (unsigned i = 0; i < machine.threads; i++) {
        if (threads[i].state != AT_MBARRIER) continue;
        const Mbarrier *mbarrier = &machine.mbarriers[threads[i].mbarrier];
        fault_record(threads + i,
                     format("mbarrier_wait at %s:%d waits for a phase of parity %u, the mbarrier's number %u, which lacks "
                            "%d of its %d arrivals: byte %td of %s, and no thread can run", threads[i].site.file,
                            threads[i].site.line, mbarrier->phase & 1, mbarrier->phase,
                            mbarrier->arrivals - mbarrier->arrived - mbarrier->held_up, mbarrier->arrivals,
                            mbarrier->at - (ptrdiff_t)mbarrier->range.begin, mbarrier->range.name));
        return;
    }
    for (unsigned i = 0; i < machine.threads; i++) {
        const Thread *self = threads + i, *warp = warp_of(self);
        if (self->state != IN_COLLECTIVE) continue;
        for (unsigned rest = self->mask; rest; rest &= rest - 1) {
            const Thread *other = warp + __builtin_ctz(rest);
            if (same_collective(self, other)) continue;
            fault_record(self, format("%s at %s:%d with the mask 0x%08x waits for lane %d, %s, which ", self->call,
                                      self->site.file, self->site.line, self->mask, __builtin_ctz(rest),
                                      thread_name(other).text) + whereabouts(other));
            return;
        }
    }
    const Thread *self = threads;
    while (self->state != AT_BARRIER) self++;
    for (unsigned i = 0; i < machine.threads; i++) {
        const Thread *other = threads + i;
        if (other->state == AT_BARRIER && same_site(self->site, other->site)) continue;
        fault_record(self, format("divergent barrier: it waits at %s:%d for %s, which ", self->site.file, self->site.line,
                                  thread_name(other).text) + whereabouts(other));
        return;
    }
}

/* Opens the barrier at which all threads stand. False where they do not. */
static bool barrier_open(void)
{
    uint64_t count = 0;
    for (unsigned i = 0; i < machine.threads; i++) {
        if (threads[i].state != AT_BARRIER || !same_site(threads[i].site, threads[0].site)) return false;
        count += threads[i].payload;
    }
    epoch_begin();
    machine.pauses = 0;
    for (unsigned i = 0; i < machine.threads; i++) {
        threads[i].result = count;
        thread_ready(threads + i);
    }
    return true;
}

/* Runs the block blockIdx to its end; false where a fault ended it. */
static bool block_run(void)
{
    block_begin();
    while (machine.returned < machine.threads) {
        if (machine.ready.empty()) {
            if (barrier_open()) continue;
            deadlock_record();
            return false;
        }
        size_t pick = simt_random_below(machine.ready.size());
        Thread *next = threads + machine.ready[pick];
        machine.ready[pick] = machine.ready.back();
        machine.ready.pop_back();
        machine.current = next;
        threadIdx = next->index;
        fiber_switch(&machine.scheduler, &next->fiber, false);
        machine.current = nullptr;
        if (machine.faulted) return false;
    }
    return true;
}

/* Frames left on abandoned stacks would look like poisoned memory to the next fibers there. */
static void stacks_abandon(void)
{
    if (!__asan_unpoison_memory_region) return;
    for (unsigned i = 0; i < machine.threads; i++) __asan_unpoison_memory_region(threads[i].fiber.bottom, FIBER_STACK);
}

static bool grid_run(void)
{
    uint64_t blocks = (uint64_t)gridDim.x * gridDim.y * gridDim.z;
    std::vector<uint64_t> order(blocks);
    for (uint64_t i = 0; i < blocks; i++) {
        uint64_t j = simt_random_below(i + 1);
        order[i] = order[j];
        order[j] = i;
    }
    for (uint64_t block : order) {
        blockIdx = {(unsigned)(block % gridDim.x), (unsigned)(block / gridDim.x % gridDim.y),
                    (unsigned)(block / gridDim.x / gridDim.y)};
        if (!block_run()) return false;
    }
    return true;
}

static cudaError_t launch_refuse(const char *text, cudaError_t error, const std::string &why)
{
    fprintf(stderr, "simt: launch of kernel %s refused: %s\n", kernel_name(text).c_str(), why.c_str());
    return simt_error_set(error);
}

/* A launch as it waits in its stream. */
struct Launch {
    const char *text;
    const void *kernel;
    dim3 grid, block;
    size_t shared_bytes;
    std::function<void()> body;
};

static void launch_run(const Launch &launch)
{
    if (machine.faulted) return;
    if (!machine.stacks) stacks_make();
    machine.running = true;
    machine.text = launch.text;
    machine.kernel = launch.kernel;
    machine.shared_bytes = launch.shared_bytes;
    machine.body = &launch.body;
    machine.threads = launch.block.x * launch.block.y * launch.block.z;
    gridDim = launch.grid;
    blockDim = launch.block;
    if (!grid_run()) {
        stacks_abandon();
        copies_abandon();
    }
    ptrdiff_t at;
    size_t bytes;
    if (simt_fence_broken(&at, &bytes))
        fault_record(nullptr, format("global memory was written out of bounds: byte %td of an allocation of %zu", at,
                                     bytes));
    machine.running = false;
    if (machine.faulted) simt_error_set(cudaErrorLaunchFailure);
}

cudaError_t simt_launch(const char *text, const void *kernel, dim3 grid, dim3 block, size_t shared_bytes,
                        cudaStream_t stream, std::function<void()> body)
{
    if (machine.running) simt_fault("it launches the kernel %s", kernel_name(text).c_str());
    if (machine.faulted) return cudaErrorLaunchFailure;
    if (!grid.x || !grid.y || !grid.z || grid.x > 0x7fffffff || grid.y > 65535 || grid.z > 65535)
        return launch_refuse(text, cudaErrorInvalidConfiguration, format("a grid of (%u,%u,%u)", grid.x, grid.y, grid.z));
    if (!block.x || !block.y || !block.z || block.x > 1024 || block.y > 1024 || block.z > 64 ||
        (uint64_t)block.x * block.y * block.z > SIMT_MAX_THREADS)
        return launch_refuse(text, cudaErrorInvalidConfiguration,
                             format("a block of (%u,%u,%u)", block.x, block.y, block.z));
    auto raised = machine.dynamic_limits.find(kernel);
    size_t limit = raised == machine.dynamic_limits.end() ? (size_t)SIMT_SHARED_DEFAULT : raised->second;
    if (shared_bytes > limit)
        return launch_refuse(text, cudaErrorInvalidValue, format("%zu bytes of dynamic shared memory, %zu are allowed",
                                                                 shared_bytes, limit));
    Launch launch = {text, kernel, grid, block, shared_bytes, std::move(body)};
    cudaError_t error = simt_queue(stream, [launch] { launch_run(launch); });
    return machine.faulted ? simt_error_set(cudaErrorLaunchFailure) : error;
}

/* --- for tests ----------------------------------------------------------------------------------------------------- */

std::string simt_fault_of(const std::function<void()> &body)
{
    machine.catching = true;
    machine.faulted = false;
    machine.fault.clear();
    body();
    simt_streams_finish();
    machine.catching = machine.faulted = false;
    cudaGetLastError();
    return std::move(machine.fault);
}

SimtChild simt_child(const std::function<void()> &body)
{
    fflush(stdout);
    fflush(stderr);
    FILE *file = tmpfile();
    if (!file) { perror("simt: tmpfile"); exit(1); }
    pid_t child = fork();
    if (child < 0) { perror("simt: fork"); exit(1); }
    if (child == 0) {
        dup2(fileno(file), 2);
        body();
        _exit(0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    SimtChild result = {WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status), ""};
    char buffer[4096];
    rewind(file);
    for (size_t got; (got = fread(buffer, 1, sizeof buffer, file)) > 0;) result.text.append(buffer, got);
    fclose(file);
    return result;
}
