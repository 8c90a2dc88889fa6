/* simt_runtime.cpp - memory with fences, copies, errors and the device, of the runtime that simt_runtime.h declares. */
#include "simt.h"

#include <stdlib.h>

#include <map>
#include <vector>

#include "simt_machine.h"

enum { FENCE = 4096, FENCE_BYTE = 0xa5, CUDA_VERSION = 13000 };
#define DEVICE_BYTES ((size_t)16 << 30)

struct Allocation {
    size_t bytes;
    SimtMemory kind;
};

static struct {
    std::map<char *, Allocation> allocations; /* by the user's pointer: device and pinned memory */
    size_t device_bytes;
    cudaError_t last_error;
    int sm, shared; /* 0: as unset */
} host = {};

/* --- global memory ------------------------------------------------------------------------------------------------- */

bool simt_fence_broken(ptrdiff_t *at, size_t *bytes)
{
    if (__asan_poison_memory_region) return false;
    for (const auto &allocation : host.allocations)
        for (ptrdiff_t i = -FENCE; i < FENCE; i++) {
            *bytes = allocation.second.bytes;
            *at = i < 0 ? i : (ptrdiff_t)*bytes + i;
            if ((unsigned char)allocation.first[*at] == FENCE_BYTE) continue;
            allocation.first[*at] = (char)FENCE_BYTE;
            return true;
        }
    return false;
}

static cudaError_t memory_allocate(void **memory, size_t bytes, SimtMemory kind)
{
    *memory = nullptr;
    if (simt_capture_forbids("an allocation")) return cudaErrorStreamCaptureUnsupported;
    if (bytes == 0) return cudaSuccess;
    if (bytes > DEVICE_BYTES - host.device_bytes) return simt_error_set(cudaErrorMemoryAllocation);
    char *base = (char *)aligned_alloc(256, (bytes + 2 * FENCE + 255) / 256 * 256);
    if (!base) return simt_error_set(cudaErrorMemoryAllocation);
    char *user = base + FENCE;
    memset(base, FENCE_BYTE, FENCE);
    memset(user, 0xff, bytes);
    memset(user + bytes, FENCE_BYTE, FENCE);
    if (__asan_poison_memory_region) {
        __asan_poison_memory_region(base, FENCE);
        __asan_poison_memory_region(user + bytes, FENCE);
    }
    host.allocations[user] = {bytes, kind};
    if (kind == SIMT_DEVICE) host.device_bytes += bytes;
    *memory = user;
    return cudaSuccess;
}

cudaError_t cudaMalloc(void **memory, size_t bytes) { return memory_allocate(memory, bytes, SIMT_DEVICE); }
cudaError_t cudaMallocHost(void **memory, size_t bytes) { return memory_allocate(memory, bytes, SIMT_PINNED); }

static cudaError_t memory_free(void *memory)
{
    auto allocation = host.allocations.find((char *)memory);
    if (allocation == host.allocations.end()) return simt_error_set(cudaErrorInvalidValue);
    char *base = allocation->first - FENCE;
    if (__asan_unpoison_memory_region) __asan_unpoison_memory_region(base, allocation->second.bytes + 2 * FENCE);
    if (allocation->second.kind == SIMT_DEVICE) host.device_bytes -= allocation->second.bytes;
    host.allocations.erase(allocation);
    free(base);
    return cudaSuccess;
}

cudaError_t cudaFree(void *memory)
{
    if (!memory) return cudaSuccess;
    if (simt_capture_forbids("cudaFree")) return cudaErrorStreamCaptureUnsupported;
    simt_streams_finish();
    return memory_free(memory);
}

cudaError_t cudaFreeHost(void *memory) { return cudaFree(memory); }

cudaError_t cudaFreeAsync(void *memory, cudaStream_t stream)
{
    if (!memory) return cudaSuccess;
    return simt_queue(stream, [memory] { memory_free(memory); });
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes)
{
    *total_bytes = DEVICE_BYTES;
    *free_bytes = DEVICE_BYTES - host.device_bytes;
    return cudaSuccess;
}

/* --- copies -------------------------------------------------------------------------------------------------------- */

SimtMemory simt_memory(const void *memory, size_t bytes)
{
    const char *from = (const char *)memory;
    auto next = host.allocations.upper_bound((char *)from);
    if (next != host.allocations.end() && from + bytes > next->first - FENCE) return SIMT_OUTSIDE;
    if (next == host.allocations.begin()) return SIMT_PAGEABLE;
    const auto &found = *--next;
    ptrdiff_t at = from - found.first;
    if (at + (ptrdiff_t)bytes <= (ptrdiff_t)found.second.bytes) return found.second.kind;
    return at < (ptrdiff_t)found.second.bytes + FENCE ? SIMT_OUTSIDE : SIMT_PAGEABLE;
}

static cudaError_t copy_refuse(const char *why)
{
    fprintf(stderr, "simt: a copy or fill refused: %s\n", why);
    return simt_error_set(cudaErrorInvalidValue);
}

cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
                              cudaMemcpyKind kind, cudaStream_t stream)
{
    if (!stream && simt_capture_forbids("cudaMemcpy")) return cudaErrorStreamCaptureUnsupported;
    if (width > to_pitch || width > from_pitch) return simt_error_set(cudaErrorInvalidValue);
    if (width == 0 || height == 0) return cudaSuccess;
    SimtMemory target = simt_memory(to, (height - 1) * to_pitch + width);
    SimtMemory source = simt_memory(from, (height - 1) * from_pitch + width);
    if (target == SIMT_OUTSIDE || source == SIMT_OUTSIDE) return copy_refuse("it leaves an allocation");
    bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
    bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
    if (kind != cudaMemcpyDefault && (to_device != (target == SIMT_DEVICE) || from_device != (source == SIMT_DEVICE)))
        return copy_refuse("an address is not on the side that the direction says");

    /* Pageable memory may be changed as soon as the call returns, and holds the result then; not so in a graph. */
    std::shared_ptr<std::vector<char>> kept;
    if (stream && source == SIMT_PAGEABLE && !simt_capturing(stream)) {
        const char *first = (const char *)from;
        kept = std::make_shared<std::vector<char>>(first, first + (height - 1) * from_pitch + width);
        from = kept->data();
    }
    cudaError_t error = simt_queue(stream, [=] {
        (void)kept; /* lives as long as this */
        for (size_t row = 0; row < height; row++)
            memmove((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width);
    });
    return stream && target == SIMT_PAGEABLE && !simt_capturing(stream) ? cudaStreamSynchronize(stream) : error;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream)
{
    return cudaMemcpy2DAsync(to, bytes, from, bytes, bytes, 1, kind, stream);
}

cudaError_t cudaMemsetAsync(void *memory, int value, size_t bytes, cudaStream_t stream)
{
    if (!stream && simt_capture_forbids("cudaMemset")) return cudaErrorStreamCaptureUnsupported;
    if (bytes == 0) return cudaSuccess;
    SimtMemory target = simt_memory(memory, bytes);
    if (target != SIMT_DEVICE && target != SIMT_PINNED) return copy_refuse("it fills what is not of one allocation");
    return simt_queue(stream, [=] { memset(memory, value, bytes); });
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
    {cudaErrorInsufficientDriver, "cudaErrorInsufficientDriver", "CUDA driver version is insufficient"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorNoKernelImageForDevice, "cudaErrorNoKernelImageForDevice", "no kernel image is available for the device"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorLaunchFailure, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
    {cudaErrorStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported", "not permitted when a stream is capturing"},
    {cudaErrorStreamCaptureInvalidated, "cudaErrorStreamCaptureInvalidated", "a call before spoiled the capture"},
    {cudaErrorStreamCaptureUnmatched, "cudaErrorStreamCaptureUnmatched", "the capture did not begin in this stream"},
    {cudaErrorStreamCaptureUnjoined, "cudaErrorStreamCaptureUnjoined", "work of another stream is not waited for"},
    {cudaErrorCapturedEvent, "cudaErrorCapturedEvent", "the event was last recorded in a capturing stream"},
    {cudaErrorStreamCaptureIsolation, "cudaErrorStreamCaptureIsolation", "a dependency on work outside of the capture"},
    {cudaErrorStreamCaptureImplicit, "cudaErrorStreamCaptureImplicit", "the default stream would wait for a capturing one"},
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

static bool device_is(const char *what)
{
    const char *wanted = getenv("SIMT_DEVICE");
    return wanted && !strcmp(wanted, what);
}

cudaError_t cudaDriverGetVersion(int *version)
{
    *version = device_is("old-driver") ? CUDA_VERSION - 1000 : CUDA_VERSION;
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version)
{
    *version = CUDA_VERSION;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int *count)
{
    *count = 0;
    if (device_is("none")) return simt_error_set(cudaErrorNoDevice);
    if (device_is("old-driver")) return simt_error_set(cudaErrorInsufficientDriver);
    *count = 1;
    return cudaSuccess;
}

cudaError_t cudaGetDevice(int *device)
{
    *device = 0;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) { return simt_error_set(device == 0 ? cudaSuccess : cudaErrorInvalidDevice); }

static int device_sm(void)
{
    const char *wanted = getenv("SIMT_DEVICE");
    int sm = 80;
    if (host.sm) return host.sm;
    if (wanted) sscanf(wanted, "sm_%d", &sm);
    return sm;
}
void simt_set_sm(int sm) { host.sm = sm; }

static int device_shared(void) { return host.shared ? host.shared : SIMT_SHARED_LIMIT; }
void simt_set_shared(int bytes) { host.shared = bytes; }

cudaError_t cudaGetDeviceProperties(cudaDeviceProp *properties, int device)
{
    if (device != 0) return simt_error_set(cudaErrorInvalidDevice);
    *properties = cudaDeviceProp{};
    snprintf(properties->name, sizeof properties->name, "SIMT emulation");
    properties->totalGlobalMem = DEVICE_BYTES;
    properties->sharedMemPerBlock = SIMT_SHARED_DEFAULT;
    properties->sharedMemPerBlockOptin = (size_t)device_shared();
    properties->sharedMemPerMultiprocessor = (size_t)device_shared() + 1024;
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
    if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize || value < 0 || value > device_shared())
        return simt_error_set(cudaErrorInvalidValue);
    simt_dynamic_limit_set(kernel, (size_t)value);
    return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *attributes, const void *)
{
    *attributes = cudaFuncAttributes{};
    if (device_is("other-arch")) return simt_error_set(cudaErrorNoKernelImageForDevice);
    attributes->maxThreadsPerBlock = SIMT_MAX_THREADS;
    attributes->binaryVersion = attributes->ptxVersion = device_sm();
    return cudaSuccess;
}
