/* cpu.c - the CPU as a Backend: its stream, its memory and its table. The operations stand beside it, one file a layer.
 *
 * Memory is given only where the machine can keep the promise. Linux hands out addresses freely and kills the process later,
 * when it writes to them; so alloc() compares with what is free now, under every limit that applies, and touches each
 * page before it returns, which also makes the next comparison true.
 */
#include "layers/cpu.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include "layers/product.h"
#include "layers/vector.h"

/* --- how much memory there is -------------------------------------------------------------------------------------- */

/* The number after `key` in the file at `path`, or -1 where there is none. "" is the file's first word. */
static int64_t file_number(const char *path, const char *key)
{
    char line[256];
    long long number = -1;
    FILE *file = fopen(path, "r");
    if (!file) return -1;
    while (fgets(line, sizeof line, file))
        if (!strncmp(line, key, strlen(key)) && sscanf(line + strlen(key), " %lld", &number) == 1) break;
    fclose(file);
    return number;
}

/* Where one version of control groups keeps its limit, its use, and what of that use the kernel would give back. */
typedef struct CgroupFiles {
    const char *root, *limit, *usage, *cache;
} CgroupFiles;

/* What the control group at `group` and those above it leave to use, or INT64_MAX where none sets a limit. */
static int64_t cgroup_available(const CgroupFiles *files, const char *group)
{
    int64_t least = INT64_MAX;
    char above[4096], path[8192];
    snprintf(above, sizeof above, "%s", group);
    for (;;) {
        char *slash = strrchr(above, '/');
        int top = !slash || !slash[1];
        if (top) above[0] = 0;
        snprintf(path, sizeof path, "%s%s/%s", files->root, above, files->limit);
        int64_t limit = file_number(path, "");
        snprintf(path, sizeof path, "%s%s/%s", files->root, above, files->usage);
        int64_t usage = file_number(path, "");
        snprintf(path, sizeof path, "%s%s/memory.stat", files->root, above);
        int64_t cache = cpu_max(file_number(path, files->cache), 0);
        if (limit >= 0 && usage >= 0) least = cpu_min(least, cpu_max(limit - usage + cpu_min(cache, usage), 0));
        if (top) return least;
        *slash = 0;
    }
}

/* The least that this process's control groups leave, version 1 or 2. */
static int64_t cgroups_available(void)
{
    static const CgroupFiles v1 = {"/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes",
                                   "total_inactive_file "};
    static const CgroupFiles v2 = {"/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file "};
    int64_t least = INT64_MAX;
    char line[4096];
    FILE *file = fopen("/proc/self/cgroup", "r");
    if (!file) return least;
    while (fgets(line, sizeof line, file)) {
        line[strcspn(line, "\n")] = 0;
        char *controllers = strchr(line, ':'), *group = controllers ? strchr(controllers + 1, ':') : NULL;
        if (!group) continue;
        *group++ = 0;
        if (!controllers[1]) least = cpu_min(least, cgroup_available(&v2, group));
        else if (strstr(controllers, "memory")) least = cpu_min(least, cgroup_available(&v1, group));
    }
    fclose(file);
    return least;
}

/* What a resource limit leaves above the pages of kind `field` of /proc/self/statm that are in use. */
static int64_t rlimit_available(int resource, int field)
{
    struct rlimit limit;
    long long pages[6] = {0};
    if (getrlimit(resource, &limit) || limit.rlim_cur == RLIM_INFINITY || limit.rlim_cur > INT64_MAX) return INT64_MAX;
    FILE *file = fopen("/proc/self/statm", "r");
    if (file) {
        for (int i = 0; i < 6; i++)
            if (fscanf(file, "%lld", &pages[i]) != 1) break;
        fclose(file);
    }
    return cpu_max((int64_t)limit.rlim_cur - pages[field] * sysconf(_SC_PAGESIZE), 0);
}

static int64_t memory_available_cpu(Stream *stream)
{
    enum { STATM_SIZE = 0, STATM_DATA = 5 };
    int64_t kilobytes = file_number("/proc/meminfo", "MemAvailable:");
    int64_t least = kilobytes >= 0 ? kilobytes * 1024 : (int64_t)sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE);
    (void)stream;
    least = cpu_min(least, cgroups_available());
    least = cpu_min(least, rlimit_available(RLIMIT_AS, STATM_SIZE));
    return cpu_min(least, rlimit_available(RLIMIT_DATA, STATM_DATA));
}

/* --- memory -------------------------------------------------------------------------------------------------------- */

static void *alloc_cpu(size_t bytes, Stream *stream)
{
    enum { ALIGNMENT = 256, HUGE_PAGE = 1 << 21, PAGE = 4096 };
    void *memory = NULL;
    int large = bytes >= HUGE_PAGE;
    if (bytes > INT64_MAX || (large && (int64_t)bytes > memory_available_cpu(stream))) return NULL;
    if (posix_memalign(&memory, large ? HUGE_PAGE : ALIGNMENT, bytes ? bytes : 1)) return NULL;
    if (!large) return memory;
    /* Fewer page faults and address translations; merely advice, so its result does not matter. */
    madvise(memory, bytes, MADV_HUGEPAGE);
    volatile char *touch = memory;
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < (int64_t)bytes; i += PAGE) touch[i] = 0;
    return memory;
}

static void free_cpu(void *memory, Stream *stream)
{
    (void)stream;
    free(memory);
}

static void zero_cpu(void *memory, size_t bytes, Stream *stream)
{
    enum { CHUNK = 1 << 20 };
    (void)stream;
#pragma omp parallel for schedule(static) if (bytes > CHUNK)
    for (int64_t i = 0; i < (int64_t)bytes; i += CHUNK)
        memset((char *)memory + i, 0, (size_t)cpu_min(CHUNK, (int64_t)bytes - i));
}

static void copy_in_cpu(void *memory, const void *host, size_t bytes, Stream *stream)
{
    (void)stream;
    if (bytes) memcpy(memory, host, bytes);
}

static void from_fp32_cpu(void *out, const float *in, int64_t n, Stream *stream)
{
    copy_in_cpu(out, in, (size_t)n * sizeof(float), stream);
}

static void to_fp32_cpu(float *out, const void *in, int64_t n, Stream *stream)
{
    copy_in_cpu(out, in, (size_t)n * sizeof(float), stream);
}

/* --- threads ------------------------------------------------------------------------------------------------------- */

void cpu_settle_threads(char **argv)
{
#ifdef _OPENMP
    static const char *const settings[] = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"};
    char program[4096];
    ssize_t length = readlink("/proc/self/exe", program, sizeof program - 1);
    for (size_t i = 0; i < sizeof settings / sizeof *settings; i++)
        if (getenv(settings[i])) return;
    if (length <= 0 || cpu_threads() == 1) return;
    program[length] = 0;
    if (!setenv("GOMP_SPINCOUNT", "1000", 1) && !setenv("KMP_BLOCKTIME", "0", 1)) execv(program, argv);
#else
    (void)argv;
#endif
}

/* --- the machine --------------------------------------------------------------------------------------------------- */

static void close_cpu(Stream *stream)
{
    if (!stream) return;
    free(stream->buffers);
    free(stream);
}

static Stream *open_cpu(int index, const BackendOptions *options, char *error, size_t error_size)
{
    Stream *stream = calloc(1, sizeof *stream);
    void *buffers = NULL;
    int threads = cpu_threads();
    size_t bytes = (size_t)threads * product_buffer() * sizeof(float);
    (void)index;
    (void)options; /* deterministic it is, always; TF32 it has not */
    if (!stream || posix_memalign(&buffers, 4096, bytes)) {
        free(stream);
        snprintf(error, error_size, "the CPU backend needs %zu bytes for %d threads, and there is not that much memory",
                 bytes, threads);
        return NULL;
    }
    stream->threads = threads;
    stream->buffers = buffers;
    stream->blas = product_has_blas() && !product_own_is_fast();
    product_blas_threads(1);
    return stream;
}

/* The processor's name as Linux has it. */
static void processor_name(char *text, size_t size)
{
    char line[256];
    FILE *file = fopen("/proc/cpuinfo", "r");
    snprintf(text, size, "CPU");
    while (file && fgets(line, sizeof line, file)) {
        char *value = strstr(line, ": ");
        if (strncmp(line, "model name", 10) || !value) continue;
        line[strcspn(line, "\n")] = 0;
        snprintf(text, size, "%s", value + 2);
        break;
    }
    if (file) fclose(file);
}

static void describe_cpu(char *text, size_t size, Stream *stream)
{
    const char *vectors = WIDTH == 16 ? ", AVX-512" : WIDTH == 8 ? ", AVX2" : "";
    char processor[128], products[128];
    processor_name(processor, sizeof processor);
    product_blas_name(products, sizeof products);
    snprintf(text, size, "%s, %d thread%s%s, %s", processor, stream->threads, stream->threads == 1 ? "" : "s", vectors,
             stream->blas ? products : "own matrix products");
}

static int sm_cpu(Stream *stream)
{
    (void)stream;
    return 0;
}

static double peak_tflops_cpu(Stream *stream)
{
    (void)stream;
    return 0;
}

static void *attention_stream_cpu(Stream *stream)
{
    (void)stream;
    return NULL;
}

static void synchronize_cpu(Stream *stream) { (void)stream; }
static void upload_join_cpu(Stream *stream) { (void)stream; }

const Backend backend_cpu_fp32 = {
    .name = "cpu_fp32",
    .device = ATTENTION_CPU,
    .dtype = DTYPE_FP32,
    .element = sizeof(float),
    .open = open_cpu,
    .close = close_cpu,
    .describe = describe_cpu,
    .sm = sm_cpu,
    .peak_tflops = peak_tflops_cpu,
    .attention_stream = attention_stream_cpu,
    .memory_available = memory_available_cpu,
    .alloc = alloc_cpu,
    .free = free_cpu,
    .zero = zero_cpu,
    .copy_in = copy_in_cpu,
    .copy_out = copy_in_cpu,
    .copy = copy_in_cpu,
    .synchronize = synchronize_cpu,
    .alloc_host = alloc_cpu,
    .free_host = free_cpu,
    .upload = copy_in_cpu,
    .upload_join = upload_join_cpu,
    .download = copy_in_cpu,
    .from_fp32 = from_fp32_cpu,
    .to_fp32 = to_fp32_cpu,
    .embedding_forward = embedding_forward_cpu,
    .embedding_backward = embedding_backward_cpu,
    .embedding_scratch = embedding_scratch_cpu,
    .layernorm_forward = layernorm_forward_cpu,
    .residual_layernorm_forward = residual_layernorm_forward_cpu,
    .layernorm_backward = layernorm_backward_cpu,
    .layernorm_scratch = layernorm_scratch_cpu,
    .linear_forward = linear_forward_cpu,
    .linear_gelu_forward = linear_gelu_forward_cpu,
    .linear_backward_input = linear_backward_input_cpu,
    .linear_backward_weight = linear_backward_weight_cpu,
    .linear_scratch = linear_scratch_cpu,
    .gelu_forward = gelu_forward_cpu,
    .cache_fill = cache_fill_cpu,
    .cache_attend = cache_attend_cpu,
    .loss_forward_backward = loss_forward_backward_cpu,
    .losses_sum = losses_sum_cpu,
    .global_norm = global_norm_cpu,
    .norm_scratch = norm_scratch_cpu,
    .adamw_update = adamw_update_cpu,
};

const Backend *backend_find(AttentionDevice device, Dtype dtype)
{
    static const Backend *const backends[] = {
        &backend_cpu_fp32,
#ifdef HAVE_CUDA
        &backend_cuda_fp32,
        &backend_cuda_bf16,
#endif
    };
    for (size_t i = 0; i < sizeof backends / sizeof *backends; i++)
        if (backends[i]->device == device && backends[i]->dtype == dtype) return backends[i];
    return NULL;
}
