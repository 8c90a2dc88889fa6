/* device.h - what a file of CUDA kernels uses beside the language itself: one way to launch, one way to name shared memory.
 *
 * The same source is compiled twice: by nvcc for a GPU, and by a host C++ compiler with -DSIMT_EMULATION for tests without
 * one, where tests/simt/simt.h stands in for the CUDA runtime and checks every access. So kernels are launched by
 * kernel_launch instead of <<<>>>, and shared memory is declared by the macros below. On a GPU all of this costs nothing.
 *
 *     SHARED(float, tile, 32 * 33);                        tile[0 .. 32*33-1], of the block, static
 *     Shared<float> row = shared_dynamic<float>(0, n);     n floats of the launch's dynamic shared memory, from byte 0 on
 *     float4 v = shared_load<float4>(row + 4 * i);         a vector at once; shared_store(row + 4 * i, v) the other way
 *     error = kernel_launch(my_kernel, grid, block, shared_bytes, stream, arguments...);
 *
 * Shared<T> is a T * on a GPU: index it, add to it, take no other kind of pointer to it. Read an element into a variable
 * of its own type (no `auto`: under the emulation that would name the place, not the value), and a struct as a whole.
 * Atomics take &tile[i] or tile + i.
 */
#ifndef DEVICE_H
#define DEVICE_H

#ifdef SIMT_EMULATION
#include "simt.h"
#else

#include <cuda_bf16.h>
#include <cuda_runtime.h>

template <typename T>
using Shared = T *;

#define SHARED(type, name, count) __shared__ __align__(16) type name[count]

/* `count` is what the emulation checks accesses against. */
template <typename T>
__device__ __forceinline__ Shared<T> shared_dynamic(size_t byte_offset, size_t count)
{
    extern __shared__ __align__(1024) unsigned char device_shared[];
    (void)count;
    return (T *)(device_shared + byte_offset);
}

template <typename Vector, typename T>
__device__ __forceinline__ Vector shared_load(const T *at) { return *(const Vector *)at; }

template <typename Vector, typename T>
__device__ __forceinline__ void shared_store(T *at, Vector value) { *(Vector *)at = value; }

/* Queues a kernel on `stream`. shared_bytes is dynamic shared memory; above 48 KB the kernel's limit is raised first.
 * (Static arrays count too: a kernel with both kinds asks for more than 48 KB of dynamic memory or needs less in sum.)
 * Returns what the launch itself reports; faults of the running kernel show at the next synchronisation. */
template <typename... Parameters, typename... Arguments>
[[nodiscard]] static inline cudaError_t kernel_launch(void (*kernel)(Parameters...), dim3 grid, dim3 block,
                                                      size_t shared_bytes, cudaStream_t stream, Arguments... arguments)
{
    if (shared_bytes > 48 * 1024) {
        cudaError_t raised = cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                  (int)shared_bytes);
        if (raised != cudaSuccess) return raised;
    }
    kernel<<<grid, block, shared_bytes, stream>>>(static_cast<Parameters>(arguments)...);
    return cudaGetLastError();
}

#endif
#endif
