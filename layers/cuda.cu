/* cuda.cu - the GPU as a Backend: its stream, its memory and its two tables. The operations stand beside it, one file a
 * layer. */
#include "layers/cuda.h"

#include <string.h>

/* --- the machine ------------------------------------------------------------------------------------------------------- */

__global__ void probe_kernel(void) {}

/* The architecture this binary's kernels were compiled for, as the Makefile named it. */
#ifndef CUDA_ARCH_NAME
#define CUDA_ARCH_NAME "another architecture"
#endif

static void describe_failure(cudaError_t status, int index, char *error, size_t size)
{
    int count = 0, driver = 0, runtime = 0;
    if (status == cudaErrorInsufficientDriver) {
        cudaDriverGetVersion(&driver);
        cudaRuntimeGetVersion(&runtime);
        if (!driver)
            snprintf(error, size,
                     "no NVIDIA driver found: --device cuda needs a GPU and its driver; --device cpu works without");
        else
            snprintf(
                error, size,
                "the GPU driver supports CUDA %d.%d, but this binary needs %d.%d: update the driver, or use --device cpu",
                driver / 1000, driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10);
        return;
    }
    if (status == cudaErrorNoDevice) {
        snprintf(error, size, "no GPU is visible (CUDA_VISIBLE_DEVICES?): --device cpu works without");
        return;
    }
    if (cudaGetDeviceCount(&count) == cudaSuccess && index >= count) {
        snprintf(error, size, "--device cuda:%d: this machine has %d GPU%s, numbered from 0", index, count,
                 count == 1 ? "" : "s");
        return;
    }
    snprintf(error, size, "GPU %d cannot be used: %s", index, cudaGetErrorString(status));
}

/* Can this binary's kernels run on the current device? The runtime tells when one is looked up. */
static int binary_fits(int sm, char *error, size_t size)
{
    cudaFuncAttributes attributes;
    if (cudaFuncGetAttributes(&attributes, (const void *)probe_kernel) == cudaSuccess) return 1;
    cudaGetLastError();
    snprintf(error, size, "this GPU is sm_%d, but the binary was built for %s: build it with make ARCH=sm_%d%s", sm,
             CUDA_ARCH_NAME, sm, sm == 90 ? "a" : "");
    return 0;
}

static Stream *open_cuda(int index, const BackendOptions *options, int least_sm, char *error, size_t size)
{
    int count = 0, major = 0, minor = 0;
    cudaError_t status = cudaGetDeviceCount(&count);
    if (status == cudaSuccess) status = index < 0 || index >= count ? cudaErrorInvalidDevice : cudaSetDevice(index);
    if (status != cudaSuccess) {
        describe_failure(status, index, error, size);
        return NULL;
    }
    CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index));
    CUDA_CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, index));
    int sm = 10 * major + minor;
    if (!binary_fits(sm, error, size)) return NULL;
    if (sm < least_sm) {
        snprintf(error, size, "--dtype bf16 needs a GPU of sm_%d or later, this one is sm_%d: use --dtype fp32", least_sm,
                 sm);
        return NULL;
    }
    Stream *stream = (Stream *)calloc(1, sizeof *stream);
    if (!stream) {
        snprintf(error, size, "not enough memory");
        return NULL;
    }
    stream->device = index;
    stream->sm = sm;
    stream->deterministic = options->deterministic;
    stream->tf32 = options->tf32;
    CUDA_CHECK(cudaDeviceGetAttribute(&stream->processors, cudaDevAttrMultiProcessorCount, index));
    CUDA_CHECK(cudaStreamCreateWithFlags(&stream->main_stream, cudaStreamNonBlocking));
    CUDA_CHECK(cudaStreamCreateWithFlags(&stream->side_stream, cudaStreamNonBlocking));
    CUDA_CHECK(cudaStreamCreateWithFlags(&stream->upload_stream, cudaStreamNonBlocking));
    CUDA_CHECK(cudaEventCreateWithFlags(&stream->uploaded, cudaEventDisableTiming));
    CUDA_CHECK(cudaEventCreateWithFlags(&stream->begun, cudaEventDisableTiming));
    for (int i = 0; i < SIDE_EVENTS; i++)
        CUDA_CHECK(cudaEventCreateWithFlags(&stream->side_done[i], cudaEventDisableTiming));
    stream->stream = stream->main_stream;
    stream->plans = product_plans_open(error, size);
    if (!stream->plans) {
        free(stream);
        return NULL;
    }
    return stream;
}

static Stream *open_fp32(int index, const BackendOptions *options, char *error, size_t size)
{
    return open_cuda(index, options, 0, error, size);
}

static Stream *open_bf16(int index, const BackendOptions *options, char *error, size_t size)
{
    return open_cuda(index, options, 80, error, size);
}

static void close_cuda(Stream *stream)
{
    product_plans_close(stream->plans);
    for (int i = 0; i < SIDE_EVENTS; i++) cudaEventDestroy(stream->side_done[i]);
    cudaEventDestroy(stream->begun);
    cudaEventDestroy(stream->uploaded);
    cudaStreamDestroy(stream->upload_stream);
    cudaStreamDestroy(stream->side_stream);
    cudaStreamDestroy(stream->main_stream);
    free(stream);
}

static void describe_cuda(char *text, size_t size, Stream *stream)
{
    cudaDeviceProp properties;
    int driver = 0;
    CUDA_CHECK(cudaGetDeviceProperties(&properties, stream->device));
    cudaDriverGetVersion(&driver);
    snprintf(text, size, "cuda:%d %s, %d SMs, sm_%d, %.0f GiB, driver for CUDA %d.%d%s", stream->device, properties.name,
             stream->processors, stream->sm, (double)properties.totalGlobalMem / (1 << 30), driver / 1000,
             driver % 1000 / 10, stream->tf32 ? ", TF32 products" : "");
}

static int sm_cuda(Stream *stream) { return stream->sm; }
static void measure_cuda(Stream *stream, int on) { stream->measuring = on && !stream->deterministic; }
static void *attention_stream_cuda(Stream *stream) { return stream->stream; }

/* Peak of dense products with fp32 accumulation, TFLOP/s, of GPUs whose datasheet says so; 0 for others. */
static double peak_tflops(Stream *stream, Dtype dtype)
{
    static const struct { const char *name; double bf16, tf32, fp32; } known[] = {
        {"H200", 989, 494, 67}, {"H100 PCIe", 756, 378, 51}, {"H100", 989, 494, 67}, {"A100", 312, 156, 19.5},
        {"L40S", 362, 183, 91.6}, {"RTX 4090", 165, 82.6, 82.6}, {"RTX 3090", 71, 35.6, 35.6},
    };
    cudaDeviceProp properties;
    CUDA_CHECK(cudaGetDeviceProperties(&properties, stream->device));
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++)
        if (strstr(properties.name, known[i].name))
            return dtype == DTYPE_BF16 ? known[i].bf16 : stream->tf32 ? known[i].tf32 : known[i].fp32;
    return 0;
}

static double peak_fp32(Stream *stream) { return peak_tflops(stream, DTYPE_FP32); }
static double peak_bf16(Stream *stream) { return peak_tflops(stream, DTYPE_BF16); }

/* --- memory ------------------------------------------------------------------------------------------------------------ */

static int64_t memory_available_cuda(Stream *stream)
{
    size_t available = 0, total = 0;
    (void)stream;
    CUDA_CHECK(cudaMemGetInfo(&available, &total));
    return (int64_t)available;
}

static void *alloc_cuda(size_t bytes, Stream *stream)
{
    void *memory = NULL;
    (void)stream;
    if (cudaMalloc(&memory, bytes ? bytes : 1) == cudaSuccess) return memory;
    cudaGetLastError();
    return NULL;
}

static void free_cuda(void *memory, Stream *stream)
{
    (void)stream;
    CUDA_CHECK(cudaFree(memory));
}

static void *alloc_host_cuda(size_t bytes, Stream *stream)
{
    void *memory = NULL;
    (void)stream;
    if (cudaMallocHost(&memory, bytes ? bytes : 1) == cudaSuccess) return memory;
    cudaGetLastError();
    return NULL;
}

static void free_host_cuda(void *memory, Stream *stream)
{
    (void)stream;
    CUDA_CHECK(cudaFreeHost(memory));
}

static void zero_cuda(void *memory, size_t bytes, Stream *stream)
{
    CUDA_CHECK(cudaMemsetAsync(memory, 0, bytes, stream->stream));
}

static void synchronize_cuda(Stream *stream) { CUDA_CHECK(cudaStreamSynchronize(stream->stream)); }

static void copy_in_cuda(void *memory, const void *host, size_t bytes, Stream *stream)
{
    CUDA_CHECK(cudaMemcpyAsync(memory, host, bytes, cudaMemcpyHostToDevice, stream->stream));
    synchronize_cuda(stream);
}

static void copy_out_cuda(void *host, const void *memory, size_t bytes, Stream *stream)
{
    CUDA_CHECK(cudaMemcpyAsync(host, memory, bytes, cudaMemcpyDeviceToHost, stream->stream));
    synchronize_cuda(stream);
}

static void copy_cuda(void *to, const void *from, size_t bytes, Stream *stream)
{
    CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream->stream));
}

static void upload_cuda(void *memory, const void *host, size_t bytes, Stream *stream)
{
    CUDA_CHECK(cudaMemcpyAsync(memory, host, bytes, cudaMemcpyHostToDevice, stream->upload_stream));
    CUDA_CHECK(cudaEventRecord(stream->uploaded, stream->upload_stream));
}

static void upload_join_cuda(Stream *stream) { CUDA_CHECK(cudaStreamWaitEvent(stream->stream, stream->uploaded, 0)); }

static void download_cuda(void *host, const void *memory, size_t bytes, Stream *stream)
{
    CUDA_CHECK(cudaMemcpyAsync(host, memory, bytes, cudaMemcpyDeviceToHost, stream->stream));
}

/* --- recordings -------------------------------------------------------------------------------------------------------- */

struct Recording {
    cudaGraphExec_t graph;
};

static void record_begin_cuda(Stream *stream)
{
    CUDA_CHECK(cudaStreamBeginCapture(stream->stream, cudaStreamCaptureModeThreadLocal));
    stream->recording = 1;
}

/* The side is a second stream that is captured along with the first. Only in a recording, where its events cost nothing:
 * without one they would be two more calls for each piece of work, and operations are then done one after another. */
static void side_begin_cuda(Stream *stream)
{
    if (!stream->recording) return;
    CUDA_CHECK(cudaEventRecord(stream->begun, stream->main_stream));
    CUDA_CHECK(cudaStreamWaitEvent(stream->side_stream, stream->begun, 0));
    stream->stream = stream->side_stream;
}

static int64_t side_end_cuda(Stream *stream)
{
    if (!stream->recording) return 0;
    stream->stream = stream->main_stream;
    stream->side_last++;
    CUDA_CHECK(cudaEventRecord(stream->side_done[stream->side_last % SIDE_EVENTS], stream->side_stream));
    return stream->side_last;
}

static void side_join_cuda(Stream *stream, int64_t ticket)
{
    if (ticket <= stream->side_joined) return;
    /* The event has been recorded anew since, perhaps. */
    stream->side_joined = stream->side_last - (stream->side_last - ticket) % SIDE_EVENTS;
    CUDA_CHECK(cudaStreamWaitEvent(stream->main_stream, stream->side_done[ticket % SIDE_EVENTS], 0));
}

static Recording *record_end_cuda(Stream *stream)
{
    cudaGraph_t graph;
    Recording *recording = (Recording *)calloc(1, sizeof *recording);
    side_join_cuda(stream, stream->side_last);
    stream->recording = 0;
    CUDA_CHECK(cudaStreamEndCapture(stream->stream, &graph));
    if (!recording) {
        fprintf(stderr, "%s:%d: not enough memory for a recording\n", __FILE__, __LINE__);
        exit(1);
    }
    CUDA_CHECK(cudaGraphInstantiate(&recording->graph, graph, 0));
    CUDA_CHECK(cudaGraphDestroy(graph));
    return recording;
}

static void replay_cuda(Recording *recording, Stream *stream)
{
    CUDA_CHECK(cudaGraphLaunch(recording->graph, stream->stream));
}

static void recording_free_cuda(Recording *recording)
{
    if (recording) cudaGraphExecDestroy(recording->graph);
    free(recording);
}

/* --- the tables -------------------------------------------------------------------------------------------------------- */

#define TABLE(NAME, DTYPE, REAL, OPEN, PEAK)                                                                                \
    {                                                                                                                       \
        NAME, ATTENTION_CUDA, DTYPE, sizeof(REAL), OPEN, close_cuda, describe_cuda, sm_cuda, PEAK, attention_stream_cuda,   \
            memory_available_cuda, alloc_cuda, free_cuda, zero_cuda, copy_in_cuda, copy_out_cuda, copy_cuda,                \
            synchronize_cuda, alloc_host_cuda, free_host_cuda, upload_cuda, upload_join_cuda, download_cuda, measure_cuda,  \
            record_begin_cuda, record_end_cuda, replay_cuda, recording_free_cuda, side_begin_cuda, side_end_cuda,           \
            side_join_cuda, from_fp32_cuda<REAL>, to_fp32_cuda<REAL>, embedding_forward_cuda, embedding_backward_cuda,      \
            embedding_scratch_cuda,                                                                                         \
            layernorm_forward_cuda<REAL>, residual_layernorm_forward_cuda<REAL>, layernorm_backward_cuda<REAL>,             \
            layernorm_scratch_cuda, linear_forward_cuda<REAL>, linear_gelu_forward_cuda<REAL>,                              \
            linear_backward_input_cuda<REAL>, linear_backward_weight_cuda<REAL>, linear_scratch_cuda,                       \
            gelu_forward_cuda<REAL>, cache_fill_cuda<REAL>, cache_attend_cuda<REAL>, loss_forward_backward_cuda<REAL>,      \
            losses_sum_cuda, global_norm_cuda, norm_scratch_cuda, adamw_update_cuda<REAL>                                   \
    }

extern const Backend backend_cuda_fp32 = TABLE("cuda_fp32", DTYPE_FP32, float, open_fp32, peak_fp32);
extern const Backend backend_cuda_bf16 = TABLE("cuda_bf16", DTYPE_BF16, __nv_bfloat16, open_bf16, peak_bf16);
