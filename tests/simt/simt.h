/* simt.h - CUDA kernels on a CPU: an emulation of the execution model that checks every access to shared memory.
 *
 * A file of kernels that includes attention/device.h compiles, unchanged, as C++:
 *
 *     g++ -x c++ -std=c++17 -DSIMT_EMULATION -Itests/simt -I. -fno-strict-aliasing -fsanitize=address,undefined kernels.cu
 *
 * and is linked with simt.cpp, simt_runtime.cpp and simt_streams.cpp (`make test-simt` does both). This header then stands
 * in for cuda_runtime.h, cuda_bf16.h and cuda_fp16.h, and cublasLt.h beside it (with cublasLt.cpp) for cuBLASLt.
 * `make SIMT=1` builds the whole program so: the ordinary tests and the trainer, with the GPU's backends emulated.
 *
 * How it works. A launch runs its blocks one after another, in a random order, on the calling thread, when its stream comes
 * to it (at once on the default stream, else any time before something waits: simt_streams.cpp). A block's threads are
 * fibers: each has a stack of its own and runs until it waits, at a barrier or in a collective of its warp; then the next is
 * drawn at random from those that can run. So between two barriers the threads run one by one in random order, each as far
 * ahead of the others as the barriers let it, and atomics are points where another may step in. simt_seed() sets the order;
 * a result that changes with the seed shows a missing barrier. A barrier opens when all threads of the block stand at it,
 * a warp collective when all lanes of its mask do.
 *
 *     thread 0  ====|barrier              |====
 *     thread 1             ===~atomic  ===|    ====          one line in time, the order drawn anew at each pause
 *     thread 2                  ===|      |        ====
 *
 * Shared memory is reached through Shared<T>, a pointer with bounds, and its elements through a proxy. For every byte the
 * emulation knows who wrote it, who read it, and when: "when" is the number of barriers passed and, within a warp, a vector
 * clock that __syncwarp and the collectives advance; in a block with mbarriers, these carry it to other warps. Global memory
 * is host memory: AddressSanitizer watches it, and fences around each cudaMalloc'ed range are compared after every launch
 * where it is not compiled in.
 *
 * What it finds, each named with kernel, block and thread:
 *   - a barrier that not all threads reach: some have returned, wait at another barrier or in a warp collective. (A GPU
 *     since Volta lets returned threads off; here that is an error, since it is seldom meant.) Two barriers are the same
 *     where they stand at one line of the source;
 *   - a warp collective whose mask lacks the caller, or names a lane that has returned or waits elsewhere, or with another
 *     mask; a shuffle from a lane outside the mask or the block. Lanes that a short last warp never had are let off;
 *   - shared memory: reads of bytes that nobody wrote in this block, indices out of an array, dynamic ranges beyond what
 *     the launch asked for, misaligned vectors, more than 48 KB without leave, more than 227 KB;
 *   - races in shared memory: two threads, one byte, at least one of them writing, not both atomically, with neither a
 *     barrier nor a collective of their warp nor an mbarrier between. CUDA itself promises an order of memory only for
 *     __syncwarp; that a shuffle or vote orders memory too is a leniency of this emulation (products and matrix loads do
 *     not);
 *   - copies into shared memory in the background (simt_tensor.h): an access to bytes whose copy is under way, by whomever,
 *     before the issuing thread has waited for it, or by another thread with no barrier after that wait; a source that
 *     changes meanwhile; copies that nobody waits for;
 *   - mbarriers (simt_tensor.h) that are used before they are there, whose phase does not complete or which are overwritten;
 *   - global accesses outside an allocation and misaligned ones, through the sanitizers, whose report is preceded by a
 *     line with kernel, block and thread (just beside an allocation AddressSanitizer calls it use-after-poison); fresh
 *     memory is NaN, so results computed from it are NaN;
 *   - launches a GPU would refuse: returned as the error that CUDA returns, with a line on stderr. kernel_launch is
 *     [[nodiscard]], so dropping that error is a warning of the compiler.
 *
 *   - work on streams that nothing orders: a result read, or an input overwritten, before a synchronisation or an event says
 *     that it may (as results that change with the seed); calls that may not be made while a stream is captured; copies
 *     whose direction does not fit their addresses, or beyond an allocation.
 *
 * What it cannot find: anything of time or of the memory model (a missing __threadfence, a load the hardware moves); races
 * in global memory, between threads or blocks, except where the order of execution changes the result; blocks that wait for
 * one another (they run in sequence, so such a kernel hangs; where it waits with atomics or __nanosleep that is reported);
 * misaligned copies of whole vectors in global memory where clang compiles (its sanitizer does not look, that of g++ does);
 * reads of global memory that nobody wrote, except by their NaN; races that more than two readers of one byte hide from
 * each other in one run (other seeds show them); instructions written as PTX, but for those that attention/tensor_core.h
 * wraps (simt_tensor.h). Registers, occupancy and launch bounds are not modelled.
 *
 * Faults end the process with status 1, unless a test asks for them by simt_fault_of() or simt_child(), at the end of this
 * file. Not thread-safe: launch from one thread.
 */
#ifndef SIMT_H
#define SIMT_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <functional>
#include <string>
#include <type_traits>

#include "simt_math.h"
#include "simt_runtime.h"
#include "simt_types.h"

/* --- the language -------------------------------------------------------------------------------------------------- */

#define __global__
#define __device__
#define __host__
#define __constant__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) alignas(n)
#ifndef __restrict__
#define __restrict__ __restrict
#endif

extern uint3 threadIdx, blockIdx; /* of the thread that runs now */
extern dim3 blockDim, gridDim;
constexpr int warpSize = 32;

/* Where in the source a call stands, and the last parameters of every function that waits: its caller's place. */
struct SimtSite {
    const char *file;
    int line;
};
#define SIMT_CALLER const char *file = __builtin_FILE(), int line = __builtin_LINE()

/* Ends the launch (or the process): what is wrong, said of the thread that runs now. */
[[noreturn]] __attribute__((format(printf, 1, 2))) void simt_fault(const char *format, ...);
[[noreturn]] static inline void __trap() { simt_fault("the kernel called __trap()"); }

/* --- barriers and warp collectives --------------------------------------------------------------------------------- */

enum SimtVote { SIMT_SYNC, SIMT_SHUFFLE, SIMT_BALLOT, SIMT_MATCH, SIMT_ADD, SIMT_MIN, SIMT_MAX, SIMT_UMIN, SIMT_UMAX,
                SIMT_AND, SIMT_OR, SIMT_XOR };

/* Waits until all threads of the block stand at `site`; returns how many of them gave a predicate that is not 0. */
int simt_barrier(int predicate, SimtSite site);
/* Waits until all lanes of `mask` stand at `site` with the same mask and name. Returns the caller's result: of a shuffle the
 * payload of lane `source`, of a match the lanes with an equal payload, of the others the vote over all payloads. */
uint64_t simt_collective(SimtVote vote, const char *name, unsigned mask, uint64_t payload, int source, SimtSite site);
/* Waits until all 32 lanes of the warp stand at `site`; the last to come calls resolve, with lanes[i] what lane i brought as
 * `mine`. Orders no memory: that all execute an instruction together does not. */
void simt_warp_meet(const char *name, void *mine, void (*resolve)(void *const *lanes), SimtSite site);
/* Lets other threads run now and then, as another warp's instruction may come before an atomic. */
void simt_pause(void);
unsigned __activemask(void); /* all lanes of the warp that have not returned */

static inline void __syncthreads(SIMT_CALLER)
{
    simt_barrier(0, {file, line});
}
static inline int __syncthreads_count(int predicate, SIMT_CALLER)
{
    return simt_barrier(predicate, {file, line});
}
static inline int __syncthreads_or(int predicate, SIMT_CALLER)
{
    return simt_barrier(predicate, {file, line}) != 0;
}
static inline int __syncthreads_and(int predicate, SIMT_CALLER)
{
    return simt_barrier(!predicate, {file, line}) == 0;
}
static inline void __syncwarp(unsigned mask = 0xffffffff, SIMT_CALLER)
{
    simt_collective(SIMT_SYNC, "__syncwarp", mask, 0, 0, {file, line});
}

template <typename T>
static inline T simt_shuffle(const char *name, unsigned mask, T value, int source, SimtSite site)
{
    static_assert(sizeof(T) <= 8 && std::is_trivially_copyable<T>::value, "a shuffle moves at most 8 plain bytes");
    uint64_t payload = 0;
    memcpy(&payload, &value, sizeof value);
    payload = simt_collective(SIMT_SHUFFLE, name, mask, payload, source, site);
    memcpy(&value, &payload, sizeof value);
    return value;
}

/* The lane a shuffle reads, as the PTX manual defines it: segments of `width` lanes, one's own value where it would leave
 * the segment. */
static inline int simt_lane(void)
{
    return (int)((threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) % 32);
}
static inline int simt_lane_direct(int lane, int width) { return (simt_lane() & -width) | (lane & (width - 1)); }
static inline int simt_lane_xor(int with, int width)
{
    int lane = simt_lane() ^ with;
    return lane <= (simt_lane() | (width - 1)) ? lane : simt_lane();
}
static inline int simt_lane_down(unsigned by, int width)
{
    int lane = simt_lane() + (int)by;
    return lane <= (simt_lane() | (width - 1)) ? lane : simt_lane();
}
static inline int simt_lane_up(unsigned by, int width)
{
    int lane = simt_lane() - (int)by;
    return lane >= (simt_lane() & -width) ? lane : simt_lane();
}

#define SIMT_SHUFFLE_FUNCTION(function, Argument, source)                                                       \
    template <typename T>                                                                                       \
    static inline T function(unsigned mask, T value, Argument argument, int width = 32, SIMT_CALLER)            \
    {                                                                                                           \
        return simt_shuffle(#function, mask, value, source(argument, width), {file, line});                     \
    }
SIMT_SHUFFLE_FUNCTION(__shfl_sync, int, simt_lane_direct)
SIMT_SHUFFLE_FUNCTION(__shfl_xor_sync, int, simt_lane_xor)
SIMT_SHUFFLE_FUNCTION(__shfl_down_sync, unsigned, simt_lane_down)
SIMT_SHUFFLE_FUNCTION(__shfl_up_sync, unsigned, simt_lane_up)

static inline unsigned __ballot_sync(unsigned mask, int predicate, SIMT_CALLER)
{
    return (unsigned)simt_collective(SIMT_BALLOT, "__ballot_sync", mask, predicate != 0, 0, {file, line});
}
static inline int __any_sync(unsigned mask, int predicate, SIMT_CALLER)
{
    return simt_collective(SIMT_BALLOT, "__any_sync", mask, predicate != 0, 0, {file, line}) != 0;
}
static inline int __all_sync(unsigned mask, int predicate, SIMT_CALLER)
{
    return simt_collective(SIMT_BALLOT, "__all_sync", mask, predicate == 0, 0, {file, line}) == 0;
}
template <typename T>
static inline unsigned __match_any_sync(unsigned mask, T value, SIMT_CALLER)
{
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "matches compare 4 or 8 bytes");
    uint64_t payload = 0;
    memcpy(&payload, &value, sizeof value);
    return (unsigned)simt_collective(SIMT_MATCH, "__match_any_sync", mask, payload, 0, {file, line});
}

#define SIMT_REDUCE_FUNCTION(function, T, vote)                                                                 \
    static inline T function(unsigned mask, T value, SIMT_CALLER)                                       \
    {                                                                                                           \
        return (T)simt_collective(vote, #function, mask, (uint32_t)value, 0, {file, line});                     \
    }
SIMT_REDUCE_FUNCTION(__reduce_add_sync, unsigned, SIMT_ADD)
SIMT_REDUCE_FUNCTION(__reduce_add_sync, int, SIMT_ADD)
SIMT_REDUCE_FUNCTION(__reduce_min_sync, unsigned, SIMT_UMIN)
SIMT_REDUCE_FUNCTION(__reduce_min_sync, int, SIMT_MIN)
SIMT_REDUCE_FUNCTION(__reduce_max_sync, unsigned, SIMT_UMAX)
SIMT_REDUCE_FUNCTION(__reduce_max_sync, int, SIMT_MAX)
SIMT_REDUCE_FUNCTION(__reduce_and_sync, unsigned, SIMT_AND)
SIMT_REDUCE_FUNCTION(__reduce_or_sync, unsigned, SIMT_OR)
SIMT_REDUCE_FUNCTION(__reduce_xor_sync, unsigned, SIMT_XOR)

static inline void __threadfence(void) {}
static inline void __threadfence_block(void) {}
static inline void __threadfence_system(void) {}
static inline void __nanosleep(unsigned) { simt_pause(); }
long long clock64(void);

/* --- shared memory ------------------------------------------------------------------------------------------------- */

/* A range of the block's shared memory, in bytes from its start. */
struct SimtRange {
    const char *name;
    uint32_t begin, end;
};

/* A declaration of a static array: one a place in the source and instantiation, and so one a block. */
struct SimtArray {
    const char *name;
    size_t bytes;
};

enum SimtAccess { SIMT_READ, SIMT_WRITE, SIMT_ATOMIC };

SimtRange simt_shared_array(const SimtArray *array);
SimtRange simt_shared_range(size_t byte_offset, size_t count, size_t element, size_t alignment);
/* Checks an access for bounds, alignment and copies under way. `at` counts bytes as a range does; it may lie outside. */
void simt_shared_check(const SimtRange &range, ptrdiff_t at, size_t bytes, size_t alignment, SimtAccess access);
/* The same and for races, as an access of the running thread; yields where the bytes are. */
void *simt_shared_access(const SimtRange &range, ptrdiff_t at, size_t bytes, size_t alignment, SimtAccess access);

template <typename T> struct Shared;

/* An element of shared memory: reads on conversion, writes on assignment. Converts as a temporary only, so that
 * `auto x = tile[i]`, which would read later than it says, does not compile where x is used. */
template <typename T>
struct SimtElement {
    typedef typename std::remove_const<T>::type Value;
    Shared<T> place;

    operator Value() const && { return place.read(); }
    template <typename U, typename = typename std::enable_if<std::is_arithmetic<U>::value && std::is_class<Value>::value &&
                                                             std::is_convertible<Value, U>::value>::type>
    explicit operator U() const && { return (U)place.read(); }
    Shared<T> operator&() const { return place; }
    Value operator=(const Value &value) && { place.write(value); return value; }
    Value operator=(SimtElement &&other) && { return std::move(*this) = other.place.read(); }
    template <typename U> Value operator=(SimtElement<U> &&other) && { return std::move(*this) = (Value)other.place.read(); }
#define SIMT_COMPOUND(op)                                                                          \
    template <typename U> Value operator op##=(const U &value) &&                                  \
    {                                                                                              \
        Value result = (Value)(place.read() op value);                                             \
        place.write(result);                                                                       \
        return result;                                                                             \
    }                                                                                              \
    template <typename U> Value operator op##=(SimtElement<U> &&other) &&                          \
    {                                                                                              \
        return std::move(*this) op##= other.place.read();                                          \
    }
    SIMT_COMPOUND(+) SIMT_COMPOUND(-) SIMT_COMPOUND(*) SIMT_COMPOUND(/) SIMT_COMPOUND(%)
    SIMT_COMPOUND(&) SIMT_COMPOUND(|) SIMT_COMPOUND(^) SIMT_COMPOUND(<<) SIMT_COMPOUND(>>)
    Value operator++() && { return std::move(*this) += 1; }
    Value operator--() && { return std::move(*this) -= 1; }
    Value operator++(int) && { Value old = place.read(); place.write(old + 1); return old; }
    Value operator--(int) && { Value old = place.read(); place.write(old - 1); return old; }
};

/* What T * is for shared memory on a GPU. */
template <typename T>
struct Shared {
    typedef typename std::remove_const<T>::type Value;
    static_assert(std::is_trivially_copyable<Value>::value, "shared memory holds plain data");
    SimtRange range = {nullptr, 0, 0};
    ptrdiff_t at = 0; /* in bytes, as range counts them */

    Shared() = default;
    Shared(decltype(nullptr)) {}
    Shared(SimtRange range_, ptrdiff_t at_) : range(range_), at(at_) {}
    operator Shared<const T>() const { return {range, at}; }
    explicit operator bool() const { return range.name != nullptr; }

    SimtElement<T> operator[](ptrdiff_t i) const { return {*this + i}; }
    SimtElement<T> operator*() const { return {*this}; }
    friend Shared operator+(Shared p, ptrdiff_t n) { return {p.range, p.at + n * (ptrdiff_t)sizeof(T)}; }
    friend Shared operator+(ptrdiff_t n, Shared p) { return p + n; }
    friend Shared operator-(Shared p, ptrdiff_t n) { return p + -n; }
    friend ptrdiff_t operator-(Shared a, Shared b) { return (a.at - b.at) / (ptrdiff_t)sizeof(T); }
    Shared &operator+=(ptrdiff_t n) { return *this = *this + n; }
    Shared &operator-=(ptrdiff_t n) { return *this = *this - n; }
    Shared &operator++() { return *this += 1; }
    Shared &operator--() { return *this -= 1; }
    Shared operator++(int) { Shared old = *this; *this += 1; return old; }
    friend bool operator==(Shared a, Shared b) { return a.at == b.at; }
    friend bool operator!=(Shared a, Shared b) { return a.at != b.at; }
    friend bool operator<(Shared a, Shared b) { return a.at < b.at; }

    Value read() const
    {
        Value value;
        memcpy(&value, simt_shared_access(range, at, sizeof value, alignof(Value), SIMT_READ), sizeof value);
        return value;
    }
    void write(const Value &value) const
    {
        static_assert(!std::is_const<T>::value, "this shared memory is const");
        memcpy(simt_shared_access(range, at, sizeof value, alignof(Value), SIMT_WRITE), &value, sizeof value);
    }
};

#define SHARED(type, name, count)                                                                  \
    static constexpr SimtArray simt_array_##name = {#name, sizeof(type) * (count)};                \
    Shared<type> name = simt_shared_declare<type>(&simt_array_##name)

template <typename T>
static inline Shared<T> simt_shared_declare(const SimtArray *array)
{
    SimtRange range = simt_shared_array(array);
    return {range, (ptrdiff_t)range.begin};
}

template <typename T>
static inline Shared<T> shared_dynamic(size_t byte_offset, size_t count)
{
    SimtRange range = simt_shared_range(byte_offset, count, sizeof(T), alignof(T));
    return {range, (ptrdiff_t)range.begin};
}

template <typename Vector, typename T>
static inline Vector shared_load(Shared<T> at) { return Shared<const Vector>(at.range, at.at).read(); }

template <typename Vector, typename T>
static inline void shared_store(Shared<T> at, Vector value) { Shared<Vector>(at.range, at.at).write(value); }

/* --- atomics ------------------------------------------------------------------------------------------------------- */

/* Only one thread runs at a time, so a plain update is atomic; before it, others may get their turn. */
template <typename T> static inline T *simt_atomic_place(T *at) { simt_pause(); return at; }
template <typename T> static inline T *simt_atomic_place(Shared<T> at)
{
    simt_pause();
    return (T *)simt_shared_access(at.range, at.at, sizeof(T), alignof(T), SIMT_ATOMIC);
}

template <typename T> struct SimtSame { typedef T type; };

template <typename T, typename... Allowed> constexpr bool simt_one_of(void)
{
    bool found[] = {std::is_same<T, Allowed>::value...};
    for (bool one : found) if (one) return true;
    return false;
}

/* FUNCTION(place, value) for the types that CUDA has it for; `expression` is the new value from `old` and `value`. */
#define SIMT_ATOMIC_FUNCTION(function, expression, ...)                                                         \
    template <typename T> static inline T simt_##function(T *at, T value)                                       \
    {                                                                                                           \
        static_assert(simt_one_of<T, __VA_ARGS__>(), #function " has no version for this type");                \
        T old = *at;                                                                                            \
        *at = (expression);                                                                                     \
        return old;                                                                                             \
    }                                                                                                           \
    template <typename T> static inline T function(T *at, typename SimtSame<T>::type value)                     \
    {                                                                                                           \
        return simt_##function(simt_atomic_place(at), value);                                                   \
    }                                                                                                           \
    template <typename T> static inline T function(Shared<T> at, typename SimtSame<T>::type value)              \
    {                                                                                                           \
        return simt_##function(simt_atomic_place(at), value);                                                   \
    }

typedef unsigned long long SimtU64;
static inline int simt_sum(int a, int b) { return (int)((unsigned)a + (unsigned)b); } /* wraps, as on a device */
template <typename T> static inline T simt_sum(T a, T b) { return a + b; }

SIMT_ATOMIC_FUNCTION(atomicAdd, simt_sum(old, value), int, unsigned, SimtU64, float, double)
SIMT_ATOMIC_FUNCTION(atomicSub, simt_sum(old, (T)(0 - (unsigned)value)), int, unsigned)
SIMT_ATOMIC_FUNCTION(atomicExch, value, int, unsigned, SimtU64, float)
SIMT_ATOMIC_FUNCTION(atomicMin, value < old ? value : old, int, unsigned, long long, SimtU64)
SIMT_ATOMIC_FUNCTION(atomicMax, value > old ? value : old, int, unsigned, long long, SimtU64)
SIMT_ATOMIC_FUNCTION(atomicAnd, old & value, int, unsigned, SimtU64)
SIMT_ATOMIC_FUNCTION(atomicOr, old | value, int, unsigned, SimtU64)
SIMT_ATOMIC_FUNCTION(atomicXor, old ^ value, int, unsigned, SimtU64)
SIMT_ATOMIC_FUNCTION(atomicInc, old >= value ? 0 : old + 1, unsigned)
SIMT_ATOMIC_FUNCTION(atomicDec, old == 0 || old > value ? value : old - 1, unsigned)

template <typename T>
static inline T simt_compare_and_swap(T *at, T expected, T value)
{
    static_assert(simt_one_of<T, int, unsigned, SimtU64, unsigned short>(), "atomicCAS has no version for this type");
    T old = *at;
    if (old == expected) *at = value;
    return old;
}
template <typename T>
static inline T atomicCAS(T *at, typename SimtSame<T>::type expected, typename SimtSame<T>::type value)
{
    return simt_compare_and_swap(simt_atomic_place(at), expected, value);
}
template <typename T>
static inline T atomicCAS(Shared<T> at, typename SimtSame<T>::type expected, typename SimtSame<T>::type value)
{
    return simt_compare_and_swap(simt_atomic_place(at), expected, value);
}

/* --- global memory with a hint for the caches: plain accesses here ------------------------------------------------- */

#define SIMT_LOAD_HINT(function) template <typename T> static inline T function(const T *at) { return *at; }
SIMT_LOAD_HINT(__ldg) SIMT_LOAD_HINT(__ldca) SIMT_LOAD_HINT(__ldcg) SIMT_LOAD_HINT(__ldcs) SIMT_LOAD_HINT(__ldlu)
SIMT_LOAD_HINT(__ldcv)
#define SIMT_STORE_HINT(function) \
    template <typename T> static inline void function(T *at, typename SimtSame<T>::type value) { *at = value; }
SIMT_STORE_HINT(__stwb) SIMT_STORE_HINT(__stcg) SIMT_STORE_HINT(__stcs) SIMT_STORE_HINT(__stwt)

/* --- launches ------------------------------------------------------------------------------------------------------ */

/* Leaves `work` to a stream: to be done when its turn comes, at once on the default stream, or by a graph where the stream
 * is being captured. */
cudaError_t simt_queue(cudaStream_t stream, std::function<void()> work);
/* Queues a launch, which runs `body` once for every thread. `text` begins with the kernel's name as the source has it. */
cudaError_t simt_launch(const char *text, const void *kernel, dim3 grid, dim3 block, size_t shared_bytes,
                        cudaStream_t stream, std::function<void()> body);

/* As kernel_launch of device.h. A macro, for the kernel's name: in a template that launches, the names of its parameters. */
#define kernel_launch(...) simt_kernel_launch(#__VA_ARGS__, __VA_ARGS__)

template <typename... Parameters, typename... Arguments>
[[nodiscard]] static inline cudaError_t simt_kernel_launch(const char *text, void (*kernel)(Parameters...), dim3 grid,
                                                           dim3 block, size_t shared_bytes, cudaStream_t stream,
                                                           Arguments... arguments)
{
    if (shared_bytes > 48 * 1024) {
        cudaError_t raised = cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                  (int)shared_bytes);
        if (raised != cudaSuccess) return raised;
    }
    return simt_launch(text, (const void *)kernel, grid, block, shared_bytes, stream,
                       [=] { kernel(static_cast<Parameters>(arguments)...); });
}

/* --- for tests ----------------------------------------------------------------------------------------------------- */

/* The order of blocks and threads from the next launch on. The same seed gives the same order. */
void simt_seed(uint64_t seed);
/* The compute capability that the device reports, 90 for 9.0. 80 unless set. */
void simt_set_sm(int sm);
/* The shared memory that a block can ask for, in bytes; 0: what sm_90 gives, as unless set. */
void simt_set_shared(int bytes);
/* Runs `body`, in which a fault ends its launch only (with cudaErrorLaunchFailure, which later launches return too).
 * Returns what the first fault was, "" where there was none. Reports of the sanitizers still end the process. */
std::string simt_fault_of(const std::function<void()> &body);

struct SimtChild {
    int status;       /* the exit status; 128 + signal where one ended it */
    std::string text; /* what it wrote to stderr */
};
/* Runs `body` in a child process: for faults that only a sanitizer finds. */
SimtChild simt_child(const std::function<void()> &body);

#endif
