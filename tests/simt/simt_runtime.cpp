/* simt_runtime.cpp - the host side of the runtime that simt_runtime.h declares: fenced memory, errors, one device. */
#include "simt.h"

#include <stdlib.h>
#include <time.h>

#include <map>

#include "simt_machine.h"

enum { FENCE = 4096, FENCE_BYTE = 0xa5 };

static struct {
    std::map<char *, size_t> allocations; /* user pointer and bytes, of device and pinned memory */
    cudaError_t last_error;
    int sm; /* 0: as unset */
} host = {};

/* --- global memory ------------------------------------------------------------------------------------------------- */

bool simt_fence_broken(ptrdiff_t *at, size_t *bytes)
{
    if (__asan_poison_memory_region) return false;
    for (const auto &allocation : host.allocations)
        for (ptrdiff_t i = -FENCE; i < FENCE; i++) {
            *bytes = allocation.second;
            *at = i < 0 ? i : (ptrdiff_t)*bytes + i;
            if ((unsigned char)allocation.first[*at] == FENCE_BYTE) continue;
            allocation.first[*at] = (char)FENCE_BYTE;
            return true;
        }
    return false;
}

static cudaError_t memory_allocate(void **memory, size_t bytes, int fill)
{
    *memory = nullptr;
    if (bytes == 0) return cudaSuccess;
    if (bytes > SIZE_MAX / 2) return simt_error_set(cudaErrorMemoryAllocation);
    char *base = (char *)aligned_alloc(256, (bytes + 2 * FENCE + 255) / 256 * 256);
    if (!base) return simt_error_set(cudaErrorMemoryAllocation);
    char *user = base + FENCE;
    memset(base, FENCE_BYTE, FENCE);
    memset(user, fill, bytes);
    memset(user + bytes, FENCE_BYTE, FENCE);
    if (__asan_poison_memory_region) {
        __asan_poison_memory_region(base, FENCE);
        __asan_poison_memory_region(user + bytes, FENCE);
    }
    host.allocations[user] = bytes;
    *memory = user;
    return cudaSuccess;
}

cudaError_t cudaMalloc(void **memory, size_t bytes) { return memory_allocate(memory, bytes, 0xff); }
cudaError_t cudaMallocHost(void **memory, size_t bytes) { return memory_allocate(memory, bytes, 0xff); }
cudaError_t cudaFreeHost(void *memory) { return cudaFree(memory); }

cudaError_t cudaFree(void *memory)
{
    if (!memory) return cudaSuccess;
    auto allocation = host.allocations.find((char *)memory);
    if (allocation == host.allocations.end()) return simt_error_set(cudaErrorInvalidValue);
    char *base = allocation->first - FENCE;
    if (__asan_unpoison_memory_region) __asan_unpoison_memory_region(base, allocation->second + 2 * FENCE);
    host.allocations.erase(allocation);
    free(base);
    return cudaSuccess;
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind)
{
    if (bytes) memmove(to, from, bytes);
    return cudaSuccess;
}

cudaError_t cudaMemcpy2D(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
                         cudaMemcpyKind)
{
    if (width > to_pitch || width > from_pitch) return simt_error_set(cudaErrorInvalidValue);
    for (size_t row = 0; row < height; row++)
        memmove((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width);
    return cudaSuccess;
}

cudaError_t cudaMemset(void *memory, int value, size_t bytes)
{
    if (bytes) memset(memory, value, bytes);
    return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes)
{
    *free_bytes = *total_bytes = (size_t)16 << 30;
    return cudaSuccess;
}

/* --- the rest of the host runtime ---------------------------------------------------------------------------------- */

cudaError_t simt_error_set(cudaError_t error)
{
    if (error != cudaSuccess) host.last_error = error;
    return error;
}

cudaError_t cudaPeekAtLastError(void) { return simt_faulted() ? cudaErrorLaunchFailure : host.last_error; }

cudaError_t cudaGetLastError(void)
{
    cudaError_t error = cudaPeekAtLastError();
    host.last_error = cudaSuccess;
    return error;
}

static const struct { cudaError_t error; const char *name, *text; } error_texts[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration", "invalid configuration argument"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorLaunchFailure, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
};

const char *cudaGetErrorString(cudaError_t error)
{
    for (const auto &entry : error_texts) if (entry.error == error) return entry.text;
    return "unrecognized error code";
}

const char *cudaGetErrorName(cudaError_t error)
{
    for (const auto &entry : error_texts) if (entry.error == error) return entry.name;
    return "unrecognized error code";
}

/* A stream and an event are something to point at. */
struct CUstream_st { unsigned flags; };
struct CUevent_st { timespec time; };

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags)
{
    *stream = new CUstream_st{flags};
    return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    delete stream;
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t) { return simt_faulted() ? cudaErrorLaunchFailure : cudaSuccess; }
cudaError_t cudaDeviceSynchronize(void) { return cudaStreamSynchronize(nullptr); }

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned)
{
    *event = new CUevent_st{};
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t)
{
    clock_gettime(CLOCK_MONOTONIC, &event->time);
    return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end)
{
    *milliseconds = (float)((double)(end->time.tv_sec - start->time.tv_sec) * 1e3 +
                            (double)(end->time.tv_nsec - start->time.tv_nsec) * 1e-6);
    return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event)
{
    delete event;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int *count)
{
    *count = 1;
    return cudaSuccess;
}

cudaError_t cudaGetDevice(int *device)
{
    *device = 0;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) { return simt_error_set(device == 0 ? cudaSuccess : cudaErrorInvalidDevice); }

static int device_sm(void) { return host.sm ? host.sm : 80; }
void simt_set_sm(int sm) { host.sm = sm; }

cudaError_t cudaGetDeviceProperties(cudaDeviceProp *properties, int device)
{
    if (device != 0) return simt_error_set(cudaErrorInvalidDevice);
    *properties = cudaDeviceProp{};
    snprintf(properties->name, sizeof properties->name, "SIMT emulation");
    properties->totalGlobalMem = (size_t)16 << 30;
    properties->sharedMemPerBlock = SIMT_SHARED_DEFAULT;
    properties->sharedMemPerBlockOptin = SIMT_SHARED_LIMIT;
    properties->sharedMemPerMultiprocessor = SIMT_SHARED_LIMIT + 1024;
    properties->major = device_sm() / 10;
    properties->minor = device_sm() % 10;
    properties->multiProcessorCount = 4;
    properties->warpSize = warpSize;
    properties->maxThreadsPerBlock = SIMT_MAX_THREADS;
    properties->maxThreadsPerMultiProcessor = 2 * SIMT_MAX_THREADS;
    properties->regsPerBlock = 65536;
    properties->l2CacheSize = 1 << 20;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int device)
{
    cudaDeviceProp all;
    cudaError_t error = cudaGetDeviceProperties(&all, device);
    if (error != cudaSuccess) return error;
    switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock: *value = all.maxThreadsPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = (int)all.sharedMemPerBlock; break;
    case cudaDevAttrWarpSize: *value = all.warpSize; break;
    case cudaDevAttrMultiProcessorCount: *value = all.multiProcessorCount; break;
    case cudaDevAttrL2CacheSize: *value = all.l2CacheSize; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = all.maxThreadsPerMultiProcessor; break;
    case cudaDevAttrComputeCapabilityMajor: *value = all.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = all.minor; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = (int)all.sharedMemPerMultiprocessor; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = (int)all.sharedMemPerBlockOptin; break;
    default: return simt_error_set(cudaErrorInvalidValue);
    }
    return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void *kernel, cudaFuncAttribute attribute, int value)
{
    if (attribute == cudaFuncAttributePreferredSharedMemoryCarveout) return cudaSuccess;
    if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize || value < 0 || value > SIMT_SHARED_LIMIT)
        return simt_error_set(cudaErrorInvalidValue);
    simt_dynamic_limit_set(kernel, (size_t)value);
    return cudaSuccess;
}
