/* simt_tensor.h - the wrappers of attention/tensor_core.h for the emulation: the same names and arguments, done on the CPU.
 * That header says what each does; here stands what is checked, and how products are rounded.
 *
 * Products and matrix loads are done by whole warps: all 32 lanes have to come to the same place of the source, and where
 * one does not, that is reported as for the other collectives of simt.h. They order no memory: what a lane has written is
 * seen by another one's ldmatrix after a __syncwarp or a barrier, and what ldmatrix has read may be overwritten by another
 * lane after one. Each lane counts as the reader of the elements it gets, whoever gave the address of their row.
 *
 * Sums are as coarse as a tensor core's. By published measurements of Ampere's (Fasi et al. 2021, "Numerical behavior of
 * NVIDIA tensor cores", and its successors) it adds up groups of products, exact ones, with the sum so far: all are aligned
 * to the largest and cut off there, and the total is cut off to fp32. Here: k ascending in groups of 8 (bf16) or 4 (TF32);
 * each term cut one bit below the last place that an fp32 of the largest term's size has; total towards zero to fp32. So
 * results agree with a GPU's within a few units of the last place of the largest term, not bit for bit.
 *
 * Asynchronous copies arrive as late as they may: when the issuing thread waits for their group. From issue to arrival
 * nobody may touch the bytes, and the source has to stay as it was; the arrival is a write of the issuing thread, so other
 * threads read after a barrier. A group that nobody closes is waited for by nothing. A copy that holds up an arrival at an
 * mbarrier arrives, at the latest, when a thread waits for the phase and it lacks nothing else.
 *
 * Mbarriers order memory as the PTX manual promises and no further: a wait brings what was known to the arrivals of the
 * phase that completed last, and those by copies just the copies themselves. Copies count as done by somebody else: their
 * own thread, too, has to wait for the phase or the group. Besides the races that an mbarrier was to prevent, these are
 * found: use of one that nobody has initialised, or with no barrier since; a second one at its place, other accesses to its
 * 8 bytes; arrivals beyond those of a phase that waits for copies; and a wait whose phase never comes, or comes and goes
 * unseen, once nothing else can run. A thread may not return before its copies are there, whoever waits for them.
 */
#ifndef SIMT_TENSOR_H
#define SIMT_TENSOR_H

#include "simt.h"

/* --- what the machine does ----------------------------------------------------------------------------------------- */

enum { SIMT_COPY = 16 }; /* bytes of an asynchronous copy */

/* Begins a copy of `bytes` (SIMT_COPY), read at `from`, to shared memory; from = NULL where they were read nowhere. */
void simt_copy_issue(const SimtRange &range, ptrdiff_t at, const void *from, const void *bytes, SimtSite site);
/* Closes the group of the running thread's latest copies. */
void simt_copies_commit(void);
/* Completes all of the running thread's closed groups but the latest `pending`. */
void simt_copies_wait(uint64_t pending);

enum { SIMT_MBARRIER = 8, SIMT_MBARRIER_ARRIVALS = (1 << 20) - 1 }; /* bytes of an mbarrier; what a phase may take */

void simt_mbarrier_init(const SimtRange &range, ptrdiff_t at, int arrivals, SimtSite site);
/* An arrival now, or with `copies` one that comes when those are there that the running thread has issued. */
void simt_mbarrier_arrive(const SimtRange &range, ptrdiff_t at, bool copies, SimtSite site);
/* Waits until the latest phase to complete is of this parity; before the first one counts as 1. */
void simt_mbarrier_wait(const SimtRange &range, ptrdiff_t at, int parity, SimtSite site);

/* --- addresses ----------------------------------------------------------------------------------------------------- */

/* A place in shared memory with the array that it belongs to. As with the GPU's 32-bit number, sums wrap at 2^32. */
struct SharedAddress {
    Shared<unsigned char> place;

    friend SharedAddress operator+(SharedAddress address, int64_t bytes) { return {address.place + (int32_t)bytes}; }
    friend SharedAddress operator+(int64_t bytes, SharedAddress address) { return address + bytes; }
    SharedAddress &operator+=(int64_t bytes) { return *this = *this + bytes; }
};

template <typename T>
static inline SharedAddress shared_address(Shared<T> at) { return {Shared<unsigned char>(at.range, at.at)}; }

/* Dynamic shared memory begins at 0 here, and at a multiple of 1024 on a GPU; other arrays begin anywhere. */
static inline SharedAddress flip_bits(SharedAddress at, uint32_t bits)
{
    const SimtRange &range = at.place.range;
    if (bits >= 1024) simt_fault("flip_bits of 0x%x: only the bits below 1024 are the same in every address", bits);
    if (!range.name || strcmp(range.name, "dynamic") != 0)
        simt_fault("flip_bits of an address in %s, which is not dynamic shared memory: its start may be anywhere",
                   range.name ? range.name : "(a null pointer)");
    return {Shared<unsigned char>(range, (ptrdiff_t)((uint64_t)at.place.at ^ bits))};
}

static inline void hide_address(SharedAddress &) {}

static inline void store_32(SharedAddress at, uint32_t x) { shared_store(at.place, x); }
static inline void store_16(SharedAddress at, uint16_t x) { shared_store(at.place, x); }
static inline void store_128(SharedAddress at, uint4 x) { shared_store(at.place, x); }
static inline uint32_t load_32(SharedAddress at) { return shared_load<uint32_t>(at.place); }
static inline float2 load_64(SharedAddress at) { return shared_load<float2>(at.place); }
static inline uint4 load_128(SharedAddress at) { return shared_load<uint4>(at.place); }

/* --- matrices ------------------------------------------------------------------------------------------------------ */

/* r (4) gets the lane's elements of four matrices, whose rows all lanes give. */
void simt_ldmatrix(const char *name, uint32_t *r, SharedAddress row, bool transposed, SimtSite site);
/* d (4) += the lane's part of a product; a (4), b (2) as the header's picture of fragments says. */
void simt_mma_bf16(float *d, const uint32_t *a, const uint32_t *b, SimtSite site);
void simt_mma_tf32(float *d, const uint32_t *a, const uint32_t *b, SimtSite site);

static inline void ldmatrix_x4(uint32_t (&r)[4], SharedAddress row, SIMT_CALLER)
{
    simt_ldmatrix("ldmatrix_x4", r, row, false, {file, line});
}

static inline void ldmatrix_x4_trans(uint32_t (&r)[4], SharedAddress row, SIMT_CALLER)
{
    simt_ldmatrix("ldmatrix_x4_trans", r, row, true, {file, line});
}

static inline void mma_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, SIMT_CALLER)
{
    uint32_t b[2] = {b0, b1};
    simt_mma_bf16(d, a, b, {file, line});
}

static inline void mma_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, SIMT_CALLER)
{
    uint32_t b[2] = {b0, b1};
    simt_mma_tf32(d, a, b, {file, line});
}

/* --- asynchronous copies ------------------------------------------------------------------------------------------- */

/* Reads the source here, where the sanitizers look at it; the machine compares it again on arrival. */
static inline void copy_async_16(SharedAddress to, const void *from, bool valid, SIMT_CALLER)
{
    if ((uintptr_t)from % SIMT_COPY)
        simt_fault("misaligned copy_async_16 at %s:%d: its source %p is not aligned to 16", file, line, from);
    uint4 x = {0, 0, 0, 0};
    if (valid) x = *(const uint4 *)from;
    simt_copy_issue(to.place.range, to.place.at, valid ? from : nullptr, &x, {file, line});
}

static inline void copies_commit(void) { simt_copies_commit(); }

template <int PENDING>
static inline void copies_wait(void)
{
    static_assert(PENDING >= 0, "a number of groups");
    simt_copies_wait(PENDING);
}

/* --- mbarriers ----------------------------------------------------------------------------------------------------- */

static inline void mbarrier_init(SharedAddress at, int arrivals, SIMT_CALLER)
{
    simt_mbarrier_init(at.place.range, at.place.at, arrivals, {file, line});
}

static inline void mbarrier_arrive(SharedAddress at, SIMT_CALLER)
{
    simt_mbarrier_arrive(at.place.range, at.place.at, false, {file, line});
}

static inline void mbarrier_arrive_copies(SharedAddress at, SIMT_CALLER)
{
    simt_mbarrier_arrive(at.place.range, at.place.at, true, {file, line});
}

static inline void mbarrier_wait(SharedAddress at, int parity, SIMT_CALLER)
{
    simt_mbarrier_wait(at.place.range, at.place.at, parity, {file, line});
}

/* --- conversions --------------------------------------------------------------------------------------------------- */

static inline uint32_t pack_bf16(float low, float high)
{
    return simt_float_to_bf16(low) | (uint32_t)simt_float_to_bf16(high) << 16;
}

static inline uint32_t round_tf32(float x)
{
    return x != x ? 0x7fffffff : (simt_bits<uint32_t>(x) + (isinf(x) ? 0 : 0x1000)) & 0xffffe000;
}

static inline float exp2_fast(float x) { return x < -126 ? 0 : exp2f(x); }

static inline uint32_t gather_nonfinite(uint32_t acc, uint32_t x)
{
    float low = simt_bf16_to_float((uint16_t)acc) + 0 * simt_bf16_to_float((uint16_t)x);
    float high = simt_bf16_to_float((uint16_t)(acc >> 16)) + 0 * simt_bf16_to_float((uint16_t)(x >> 16));
    return pack_bf16(low, high);
}

/* --- reductions in global memory ----------------------------------------------------------------------------------- */

static inline void reduce_add_4(float *at, float4 x)
{
    if ((uintptr_t)at % 16) simt_fault("misaligned reduce_add_4: %p is not aligned to 16", (void *)at);
    atomicAdd(at, x.x);
    atomicAdd(at + 1, x.y);
    atomicAdd(at + 2, x.z);
    atomicAdd(at + 3, x.w);
}

static inline void reduce_add_2(float *at, float2 x)
{
    if ((uintptr_t)at % 8) simt_fault("misaligned reduce_add_2: %p is not aligned to 8", (void *)at);
    atomicAdd(at, x.x);
    atomicAdd(at + 1, x.y);
}

#endif
