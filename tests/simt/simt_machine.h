/* simt_machine.h - what the parts of the emulation share: simt.cpp (execution), simt_runtime.cpp (memory, device, errors),
 * simt_streams.cpp (order of work), cublasLt.cpp (products). */
#ifndef SIMT_MACHINE_H
#define SIMT_MACHINE_H

#include <memory>

#include "simt.h"

enum {
    SIMT_MAX_THREADS = 1024,
    SIMT_SHARED_DEFAULT = 48 * 1024, /* what a block gets without asking */
    SIMT_SHARED_LIMIT = 227 * 1024,  /* what it gets at all: sm_90; sm_80 has 163 KB, which kernels check themselves */
};

/* The sanitizers' runtime, where the program has it: the emulation itself is compiled without. */
#define WEAK __attribute__((weak))
extern "C" {
WEAK void __sanitizer_start_switch_fiber(void **fake_stack, const void *bottom, size_t size);
WEAK void __sanitizer_finish_switch_fiber(void *fake_stack, const void **bottom_old, size_t *size_old);
WEAK void __asan_poison_memory_region(const volatile void *memory, size_t size);
WEAK void __asan_unpoison_memory_region(const volatile void *memory, size_t size);
}

/* Whether a fault has ended a launch since simt_fault_of() began: the context is lost, every call fails. */
bool simt_faulted(void);
void simt_dynamic_limit_set(const void *kernel, size_t bytes);
uint64_t simt_random_below(uint64_t n);
/* Makes `error` the last one, unless it is none; returns it. */
cudaError_t simt_error_set(cudaError_t error);
/* Where there is no AddressSanitizer: has a byte beside an allocation changed? Which, and of how large an allocation; mends
 * it, so that it is reported once. */
bool simt_fence_broken(ptrdiff_t *at, size_t *bytes);

enum SimtMemory { SIMT_PAGEABLE, SIMT_PINNED, SIMT_DEVICE, SIMT_OUTSIDE };
/* What `bytes` at this address are: OUTSIDE where they begin in an allocation or its fences, and are not all in it. */
SimtMemory simt_memory(const void *memory, size_t bytes);

/* Whether a capture is under way that forbids a call that waits or allocates; says so on stderr and spoils the capture. */
bool simt_capture_forbids(const char *call);
bool simt_capturing(cudaStream_t stream);
/* Does all that streams hold. */
void simt_streams_finish(void);

#endif
