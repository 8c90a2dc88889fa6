/* tensor_core.h - the instructions behind the tensor-core kernels, one small wrapper each: products of fragments, matrix loads
 * from shared memory, asynchronous copies into it, mbarriers, and a few conversions.
 *
 * Fragments as the PTX manual lays them out; lane = 4 * g + q, so g = lane / 4 is 0 .. 7 and q = lane % 4 is 0 .. 3:
 *
 *     m16n8k16, bf16   A (16 x 16)  a[0] (g, 2q..2q+1)   a[1] (g+8, 2q..)   a[2] (g, 2q+8..)   a[3] (g+8, 2q+8..)
 *                      B (16 x 8)   b0   (2q..2q+1, g)   b1   (2q+8.., g)              first of a pair in the low half
 *     m16n8k8, tf32    A (16 x 8)   a[0] (g, q)   a[1] (g+8, q)   a[2] (g, q+4)   a[3] (g+8, q+4);  B (8 x 8)  b0 (q, g)  b1 (q+4, g)
 *     both             D (16 x 8)   d[0..1] (g, 2q..2q+1)   d[2..3] (g+8, 2q..2q+1)
 *
 * So the D of two neighbouring products (n8 and the next n8), packed by pairs, is the A of a k16 step without a shuffle.
 *
 * ldmatrix reads 8 x 8 matrices of 16-bit elements: lane 8i + r gives the address of row r of matrix i, 16 bytes, 16-byte
 * aligned; register i of every lane then holds the pair (row g, columns 2q..2q+1) of matrix i, or with _trans the pair
 * (rows 2q..2q+1, column g).
 *
 * An mbarrier lets warps of a block wait for one another without all of them standing still: 8 bytes of shared memory,
 * 8-byte aligned, whose phases complete one after another, each when as many arrivals have come as it was made for. Who
 * arrives goes on at once; who needs what came before the arrivals of a phase waits for that phase, which it names by its
 * parity: nobody may fall behind by more than one. A wait for parity 1 at the start goes through, as if there had been a
 * phase before the first one: so a buffer that is still empty needs no arrival.
 *
 *     producer  wait(empty, 1)  copy  arrive(full)  |  wait(empty, 0)  copy  arrive(full)  |  ..
 *     consumer  wait(full, 0)  read  arrive(empty)  |  wait(full, 1)  read  arrive(empty)  |  ..
 *
 * Under the emulation (attention/device.h) each is done lane by lane by tests/simt/simt_tensor.h, with copies that arrive no
 * sooner than the wait that they need, and with every use of shared memory checked against what mbarriers order.
 */
#ifndef TENSOR_CORE_H
#define TENSOR_CORE_H

#include "attention/device.h"

#ifdef SIMT_EMULATION
#include "simt_tensor.h"
#else

#include <stdint.h>

/* Binaries for chips before sm_80 hold these kernels too, which refuse there; what such chips do not have is a trap. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#define NEEDS_SM_80(...) __trap()
#else
#define NEEDS_SM_80(...) __VA_ARGS__
#endif

/* A place in shared memory, in bytes: add to it, and give it to the functions below. */
typedef uint32_t SharedAddress;

template <typename T>
__device__ __forceinline__ SharedAddress shared_address(Shared<T> at) { return (uint32_t)__cvta_generic_to_shared(at); }

__device__ __forceinline__ void store_32(SharedAddress at, uint32_t x)
{
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(x) : "memory");
}

__device__ __forceinline__ void store_16(SharedAddress at, uint16_t x)
{
    asm volatile("st.shared.b16 [%0], %1;" ::"r"(at), "h"(x) : "memory");
}

/* `at` with some bits of its distance from the start of dynamic shared memory flipped, all of them below 1024. */
__device__ __forceinline__ SharedAddress flip_bits(SharedAddress at, uint32_t bits) { return at ^ bits; }

/* Lets the compiler forget how `at` was computed. */
__device__ __forceinline__ void hide_address(SharedAddress &at) { asm volatile("" : "+r"(at)); }

/* 16 bytes, 16-byte aligned. */
__device__ __forceinline__ void store_128(SharedAddress at, uint4 x)
{
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}

__device__ __forceinline__ uint32_t load_32(SharedAddress at)
{
    uint32_t x;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(at) : "memory");
    return x;
}

/* Two floats, 8-byte aligned. */
__device__ __forceinline__ float2 load_64(SharedAddress at)
{
    float2 x;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(at) : "memory");
    return x;
}

__device__ __forceinline__ uint4 load_128(SharedAddress at)
{
    uint4 x;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(at) : "memory");
    return x;
}

__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], SharedAddress row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(row) : "memory");
}

__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], SharedAddress row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(row) : "memory");
}

/* d (16 x 8) += a (16 x 16) b (16 x 8), bf16 factors, fp32 sums. */
__device__ __forceinline__ void mma_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    NEEDS_SM_80(asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1)));
}

/* d (16 x 8) += a (16 x 8) b (8 x 8), TF32 factors (fp32 whose last 13 bits do not count), fp32 sums. */
__device__ __forceinline__ void mma_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    NEEDS_SM_80(asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1)));
}

/* Copies 16 bytes of global memory to shared memory in the background, both 16-byte aligned; zeros where not `valid`, and
 * then `from` is not read. Belongs to the group that the thread's next copies_commit() closes. */
__device__ __forceinline__ void copy_async_16(SharedAddress to, const void *from, bool valid)
{
    NEEDS_SM_80(asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0) : "memory"));
}

__device__ __forceinline__ void copies_commit(void) { NEEDS_SM_80(asm volatile("cp.async.commit_group;" ::: "memory")); }

/* Waits until at most PENDING of the thread's latest groups are still on their way. Other threads' copies are there after
 * their own wait and a barrier. */
template <int PENDING>
__device__ __forceinline__ void copies_wait(void) { NEEDS_SM_80(asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory")); }

/* Makes an mbarrier whose phases take `arrivals` each: by one thread, once in a block, before a __syncthreads that lets the
 * others use it. */
__device__ __forceinline__ void mbarrier_init(SharedAddress at, int arrivals)
{
    NEEDS_SM_80(asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(at), "r"(arrivals) : "memory"));
}

/* One arrival. What this thread wrote and read before comes before what threads do after a wait for this phase; of other
 * threads' doings, what it knows of by then: lane 0 may arrive for its warp after a __syncwarp, though compute-sanitizer's
 * racecheck then calls a race what the other lanes did. */
__device__ __forceinline__ void mbarrier_arrive(SharedAddress at)
{
    NEEDS_SM_80(asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(at) : "memory"));
}

/* One arrival, of those that the mbarrier was made for, which comes once all copies that this thread has issued so far are
 * there, whatever their group. It says so of the copies alone: for what else the thread wrote or read, mbarrier_arrive. */
__device__ __forceinline__ void mbarrier_arrive_copies(SharedAddress at)
{
    NEEDS_SM_80(asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(at) : "memory"));
}

/* Waits until the phase of this parity, 0 or 1, has completed; 0 is the first one's. */
__device__ __forceinline__ void mbarrier_wait(SharedAddress at, int parity)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define MBARRIER_TEST "mbarrier.try_wait.parity.shared.b64" /* sleeps for a while where the other returns at once */
#else
#define MBARRIER_TEST "mbarrier.test_wait.parity.shared.b64"
#endif
    uint32_t done = 0;
    do
        NEEDS_SM_80(asm volatile("{ .reg .pred p; " MBARRIER_TEST " p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                     : "=r"(done) : "r"(at), "r"(parity) : "memory"));
    while (!done);
#undef MBARRIER_TEST
}

/* Two numbers rounded to bf16, `low` in the low half. */
__device__ __forceinline__ uint32_t pack_bf16(float low, float high)
{
    uint32_t x = 0;
    NEEDS_SM_80(asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low)));
    return x;
}

/* x rounded to TF32, to nearest, ties away from zero. */
__device__ __forceinline__ uint32_t round_tf32(float x)
{
    uint32_t y = 0;
    NEEDS_SM_80(asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x)));
    return y;
}

/* 2^x within 2 units in the last place; 0 at -inf, and below -126 flushed to 0. */
__device__ __forceinline__ float exp2_fast(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* acc + 0 * x, by halves: NaN in a half once any x had a NaN or an infinity there. */
__device__ __forceinline__ uint32_t gather_nonfinite(uint32_t acc, uint32_t x)
{
    uint32_t y = 0;
    NEEDS_SM_80(asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(x), "r"(0u), "r"(acc)));
    return y;
}

/* at[0..3] += x, each atomically, in global memory; 16-byte aligned. */
__device__ __forceinline__ void reduce_add_4(float *at, float4 x)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(at), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w) : "memory");
#else
    atomicAdd(at, x.x);
    atomicAdd(at + 1, x.y);
    atomicAdd(at + 2, x.z);
    atomicAdd(at + 3, x.w);
#endif
}

/* The same for two, 8-byte aligned. */
__device__ __forceinline__ void reduce_add_2(float *at, float2 x)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("red.global.add.v2.f32 [%0], {%1, %2};" ::"l"(at), "f"(x.x), "f"(x.y) : "memory");
#else
    atomicAdd(at, x.x);
    atomicAdd(at + 1, x.y);
#endif
}

#endif
#endif
