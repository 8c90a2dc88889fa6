/* attention_gpu.h - a GPU as a Machine of attention_check.h, through the backend's own memory and stream.
 *
 * Buffers come from one arena, since a check makes a dozen of them and cudaMalloc is slow; with FLASHGPT_SANITIZE set each
 * is an allocation of its own, so that compute-sanitizer sees where it ends.
 */
#ifndef ATTENTION_GPU_H
#define ATTENTION_GPU_H

#include "layers/backend.h"
#include "tests/attention_check.h"

#define ARENA_BYTES ((size_t)1 << 30)

/* The GPU that tests of this process use. */
static struct {
    const Backend *backend;
    Stream *stream;
    unsigned char *arena; /* NULL: none */
    size_t used;
    int live; /* buffers in the arena; it starts afresh when there are none */
} gpu;

static inline void *gpu_alloc(size_t bytes)
{
    size_t room = (bytes + 255) / 256 * 256;
    if (!gpu.arena || gpu.used + room > ARENA_BYTES) return gpu.backend->alloc(bytes, gpu.stream);
    void *memory = gpu.arena + gpu.used;
    gpu.used += room;
    gpu.live++;
    return memory;
}

static inline void gpu_free(void *memory)
{
    unsigned char *at = (unsigned char *)memory;
    if (!gpu.arena || at < gpu.arena || at >= gpu.arena + ARENA_BYTES) {
        gpu.backend->free(memory, gpu.stream);
        return;
    }
    if (--gpu.live == 0) gpu.used = 0;
}

static inline void gpu_copy_in(void *memory, const void *host, size_t bytes)
{
    if (bytes) gpu.backend->copy_in(memory, host, bytes, gpu.stream);
}

static inline void gpu_copy_out(void *host, const void *memory, size_t bytes)
{
    if (bytes) gpu.backend->copy_out(host, memory, bytes, gpu.stream);
}

/* Opens GPU 0. Returns 0 with the machine, or -1 with the reason why there is none. gpu_close() it. */
static inline int gpu_open(Machine *machine, char *error, size_t error_size)
{
    BackendOptions options;
    memset(&options, 0, sizeof options);
    options.deterministic = 1;
    gpu.backend = backend_find(ATTENTION_CUDA, DTYPE_FP32);
    if (!gpu.backend) {
        snprintf(error, error_size, "built without CUDA");
        return -1;
    }
    gpu.stream = gpu.backend->open(0, &options, error, error_size);
    if (!gpu.stream) return -1;
    gpu.arena = getenv("FLASHGPT_SANITIZE") ? NULL : (unsigned char *)gpu.backend->alloc(ARENA_BYTES, gpu.stream);
    machine->device = ATTENTION_CUDA;
    machine->sm = gpu.backend->sm(gpu.stream);
    machine->stream = gpu.backend->attention_stream(gpu.stream);
    machine->alloc = gpu_alloc;
    machine->free = gpu_free;
    machine->copy_in = gpu_copy_in;
    machine->copy_out = gpu_copy_out;
    return 0;
}

static inline void gpu_close(void)
{
    if (gpu.arena) gpu.backend->free(gpu.arena, gpu.stream);
    gpu.backend->close(gpu.stream);
}

#endif
