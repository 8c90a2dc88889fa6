/* test_streams.cpp - the emulation's streams, events, captures and products: they do what CUDA promises in every order, and
 * what it does not promise shows in some.
 */
#include "simt.h"
#include "tests/test.h"

#include "cublasLt.h"

#include <stdlib.h>

#include <cmath>
#include <vector>

enum { N = 8, SEEDS = 64 };

__global__ void add_kernel(float *out, const float *in, float x)
{
    out[threadIdx.x] = in[threadIdx.x] + x;
}

static float *device_new(void)
{
    float *memory = nullptr;
    cudaMalloc(&memory, N * sizeof(float));
    return memory;
}

static float *pinned_new(float value)
{
    float *memory = nullptr;
    cudaMallocHost(&memory, N * sizeof(float));
    for (int i = 0; i < N; i++) memory[i] = value;
    return memory;
}

/* The results that `body` gives over all seeds: how often `expected`, how often anything else. */
struct Outcomes { int expected, other; };
template <typename Body> static Outcomes outcomes_of(float expected, Body body)
{
    Outcomes seen = {0, 0};
    for (int seed = 0; seed < SEEDS; seed++) {
        simt_seed((uint64_t)seed);
        if (body() == expected) seen.expected++;
        else seen.other++;
    }
    return seen;
}
static bool always(Outcomes seen) { return seen.expected == SEEDS; }
static bool at_times(Outcomes seen) { return seen.expected > 0 && seen.other > 0; }
#define CHECK_OUTCOME(what, outcomes)                                                                                 \
    do {                                                                                                              \
        Outcomes seen = (outcomes);                                                                                   \
        CHECK(what(seen), "%d times what was expected, %d times not", seen.expected, seen.other);                     \
    } while (0)

/* --- order ---------------------------------------------------------------------------------------------------------- */

static void test_order(void)
{
    cudaStream_t stream;
    cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    float *memory = device_new(), *pinned = pinned_new(0), *source = pinned_new(0);
    size_t bytes = N * sizeof(float);
    auto queue = [&] {
        for (int i = 0; i < N; i++) source[i] = 1;
        cudaMemcpyAsync(memory, source, bytes, cudaMemcpyHostToDevice, stream);
        (void)kernel_launch(add_kernel, 1, N, 0, stream, memory, memory, 2.0f);
        cudaMemcpyAsync(pinned, memory, bytes, cudaMemcpyDeviceToHost, stream);
    };

    TEST("a stream does its work in order, by the time that it is synchronised");
    CHECK_OUTCOME(always, outcomes_of(3, [&] { queue(); cudaStreamSynchronize(stream); return pinned[3]; }));
    TEST("a result that is not waited for is there at times");
    CHECK_OUTCOME(at_times, outcomes_of(3, [&] {
        pinned[3] = 0;
        queue();
        float seen = pinned[3];
        cudaStreamSynchronize(stream);
        return seen;
    }));
    TEST("pinned memory that is written too soon shows at times, pageable memory never");
    auto overwrite = [&](float *from) {
        for (int i = 0; i < N; i++) from[i] = 5;
        cudaMemcpyAsync(memory, from, bytes, cudaMemcpyHostToDevice, stream);
        for (int i = 0; i < N; i++) from[i] = 6;
        cudaMemcpyAsync(pinned, memory, bytes, cudaMemcpyDeviceToHost, stream);
        cudaStreamSynchronize(stream);
        return pinned[3];
    };
    float pageable[N];
    CHECK_OUTCOME(at_times, outcomes_of(5, [&] { return overwrite(source); }));
    CHECK_OUTCOME(always, outcomes_of(5, [&] { return overwrite(pageable); }));
    TEST("a copy to pageable memory is done on return");
    CHECK_OUTCOME(always, outcomes_of(3, [&] {
        queue();
        cudaMemcpyAsync(pageable, memory, bytes, cudaMemcpyDeviceToHost, stream);
        return pageable[3];
    }));
    TEST("the default stream waits for a stream that is made to be waited for, and for no other");
    cudaStream_t blocking;
    cudaStreamCreate(&blocking);
    for (int kind = 0; kind < 2; kind++) {
        cudaStream_t other = kind ? blocking : stream;
        Outcomes seen = outcomes_of(4, [&] {
            cudaMemset(memory, 0, bytes);
            (void)kernel_launch(add_kernel, 1, N, 0, other, memory, memory, 4.0f);
            cudaMemcpy(pageable, memory, bytes, cudaMemcpyDeviceToHost);
            cudaStreamSynchronize(other);
            return pageable[3];
        });
        CHECK(kind ? always(seen) : at_times(seen), "%d of %d", seen.expected, SEEDS);
    }
    cudaStreamDestroy(blocking);
    cudaStreamDestroy(stream);
    cudaFree(memory);
    cudaFreeHost(pinned);
    cudaFreeHost(source);
}

static void test_events(void)
{
    cudaStream_t first, second;
    cudaEvent_t event;
    cudaStreamCreateWithFlags(&first, cudaStreamNonBlocking);
    cudaStreamCreateWithFlags(&second, cudaStreamNonBlocking);
    cudaEventCreate(&event);
    float *memory = device_new(), *pinned = pinned_new(0);
    size_t bytes = N * sizeof(float);
    auto run = [&](bool wait) {
        cudaMemsetAsync(memory, 0, bytes, first);
        (void)kernel_launch(add_kernel, 1, N, 0, first, memory, memory, 1.0f);
        cudaEventRecord(event, first);
        if (wait) cudaStreamWaitEvent(second, event, 0);
        cudaMemcpyAsync(pinned, memory, bytes, cudaMemcpyDeviceToHost, second);
        cudaStreamSynchronize(second);
        float seen = pinned[3];
        cudaStreamSynchronize(first);
        return seen;
    };
    TEST("an event orders two streams; without it they overtake each other at times");
    CHECK_OUTCOME(always, outcomes_of(1, [&] { return run(true); }));
    CHECK_OUTCOME(at_times, outcomes_of(1, [&] { return run(false); }));
    TEST("an event can be waited for after its stream is gone");
    cudaEventRecord(event, first);
    cudaStreamDestroy(first);
    CHECK(cudaEventSynchronize(event) == cudaSuccess, "it cannot");
    cudaEventDestroy(event);
    cudaStreamDestroy(second);
    cudaFree(memory);
    cudaFreeHost(pinned);
}

/* --- captures ------------------------------------------------------------------------------------------------------- */

static void test_graphs(void)
{
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    cudaStreamCaptureStatus status;
    float *memory = device_new(), result[N];
    size_t bytes = N * sizeof(float);
    cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    cudaMemset(memory, 0, bytes);
    auto read = [&] { cudaMemcpyAsync(result, memory, bytes, cudaMemcpyDeviceToHost, stream); return result[3]; };

    TEST("captured work is done by each launch of its graph and not before, with the arguments of the capture");
    float x = 2;
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess, "it does not begin");
    (void)kernel_launch(add_kernel, 1, N, 0, stream, memory, memory, x);
    x = 100;
    cudaStreamIsCapturing(stream, &status);
    CHECK(status == cudaStreamCaptureStatusActive, "status %d", status);
    CHECK(cudaStreamEndCapture(stream, &graph) == cudaSuccess && graph, "it does not end");
    CHECK(read() == 0, "it was done: %g", (double)result[3]);
    CHECK(cudaGraphInstantiate(&executable, graph, 0) == cudaSuccess && cudaGraphDestroy(graph) == cudaSuccess, "no graph");
    for (int k = 1; k <= 3; k++) {
        cudaGraphLaunch(executable, stream);
        CHECK(read() == 2 * (float)k, "%g after %d launches", (double)result[3], k);
    }
    cudaGraphExecDestroy(executable);

    struct Forbidden { const char *name; std::function<cudaError_t()> call; cudaError_t error; };
    void *other = nullptr;
    cudaEvent_t event;
    cudaEventCreate(&event);
    cudaEventRecord(event, nullptr);
    const Forbidden forbidden[] = {
        {"cudaMalloc", [&] { return cudaMalloc(&other, 8); }, cudaErrorStreamCaptureUnsupported},
        {"cudaFree", [&] { return cudaFree(memory); }, cudaErrorStreamCaptureUnsupported},
        {"cudaStreamSynchronize", [&] { return cudaStreamSynchronize(stream); }, cudaErrorStreamCaptureUnsupported},
        {"cudaDeviceSynchronize", [&] { return cudaDeviceSynchronize(); }, cudaErrorStreamCaptureUnsupported},
        {"cudaMemcpy", [&] { return cudaMemcpy(result, memory, 4, cudaMemcpyDefault); }, cudaErrorStreamCaptureUnsupported},
        {"cudaMemset", [&] { return cudaMemset(memory, 0, 4); }, cudaErrorStreamCaptureUnsupported},
        {"a wait for an event outside", [&] { return cudaStreamWaitEvent(stream, event, 0); },
         cudaErrorStreamCaptureIsolation},
    };
    for (const Forbidden &f : forbidden) {
        TEST("%s spoils a capture", f.name);
        cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal);
        cudaError_t error = f.call();
        CHECK(error == f.error, "it returns %s", cudaGetErrorName(error));
        cudaStreamIsCapturing(stream, &status);
        CHECK(status == cudaStreamCaptureStatusInvalidated, "status %d", status);
        error = cudaStreamEndCapture(stream, &graph);
        CHECK(error == cudaErrorStreamCaptureInvalidated && !graph, "the end returns %s", cudaGetErrorName(error));
        CHECK(cudaStreamSynchronize(stream) == cudaSuccess, "the stream is lost");
    }
    cudaGetLastError();
    cudaEventDestroy(event);
    cudaStreamDestroy(stream);
    cudaFree(memory);
}

/* A capture with a second stream: `side` of it runs beside `beside` after `before`; both come before `after`. */
struct Forked {
    cudaStream_t first, second;
    cudaEvent_t begun, ended;
    float *memory, *other, result[N];

    Forked() : memory(device_new()), other(device_new())
    {
        cudaStreamCreateWithFlags(&first, cudaStreamNonBlocking);
        cudaStreamCreateWithFlags(&second, cudaStreamNonBlocking);
        cudaEventCreate(&begun);
        cudaEventCreate(&ended);
    }
    ~Forked()
    {
        cudaEventDestroy(begun);
        cudaEventDestroy(ended);
        cudaStreamDestroy(first);
        cudaStreamDestroy(second);
        cudaFree(memory);
        cudaFree(other);
    }
    void add(cudaStream_t stream, float *out, const float *in, float x)
    {
        (void)kernel_launch(add_kernel, 1, N, 0, stream, out, in, x);
    }
    /* other = memory + 2 on the side, where memory was 1; memory = other + x behind it, or too soon. */
    float run(bool forks, bool joins)
    {
        cudaGraph_t graph;
        cudaGraphExec_t executable;
        cudaMemset(memory, 0, sizeof result);
        cudaMemset(other, 0, sizeof result);
        cudaStreamBeginCapture(first, cudaStreamCaptureModeThreadLocal);
        if (!forks) cudaEventRecord(begun, first);
        add(first, memory, memory, 1);
        if (forks) cudaEventRecord(begun, first);
        cudaStreamWaitEvent(second, begun, 0);
        add(second, other, memory, 2);
        cudaEventRecord(ended, second);
        if (joins) cudaStreamWaitEvent(first, ended, 0);
        add(first, memory, other, 4);
        if (!joins) cudaStreamWaitEvent(first, ended, 0);
        if (cudaStreamEndCapture(first, &graph) != cudaSuccess) return -1;
        cudaGraphInstantiate(&executable, graph, 0);
        cudaGraphDestroy(graph);
        cudaGraphLaunch(executable, first);
        cudaMemcpyAsync(result, memory, sizeof result, cudaMemcpyDeviceToHost, first);
        cudaGraphExecDestroy(executable);
        return result[3];
    }
};

static void test_forks(void)
{
    Forked f;
    cudaGraph_t graph = nullptr;
    cudaStreamCaptureStatus status;
    TEST("a second stream of a capture is ordered by its events; without one of them it is too early or too late at times");
    CHECK_OUTCOME(always, outcomes_of(7, [&] { return f.run(true, true); }));
    CHECK_OUTCOME(at_times, outcomes_of(7, [&] { return f.run(false, true); }));
    CHECK_OUTCOME(at_times, outcomes_of(7, [&] { return f.run(true, false); }));

    TEST("a capture ends where it began, and only with what it forked waited for");
    auto fork = [&] {
        cudaStreamBeginCapture(f.first, cudaStreamCaptureModeThreadLocal);
        cudaEventRecord(f.begun, f.first);
        cudaStreamWaitEvent(f.second, f.begun, 0);
    };
    fork();
    cudaStreamIsCapturing(f.second, &status);
    CHECK(status == cudaStreamCaptureStatusActive, "status %d", status);
    f.add(f.second, f.memory, f.memory, 1);
    CHECK(cudaStreamEndCapture(f.second, &graph) == cudaErrorStreamCaptureUnmatched, "it ends in the second stream");
    CHECK(cudaStreamEndCapture(f.first, &graph) == cudaErrorStreamCaptureUnjoined && !graph, "it ends unjoined");
    cudaStreamIsCapturing(f.second, &status);
    CHECK(status == cudaStreamCaptureStatusNone, "the second stream has status %d", status);
    fork();
    CHECK(cudaStreamEndCapture(f.first, &graph) == cudaSuccess && graph, "a stream that did nothing has to be joined");
    cudaGraphDestroy(graph);
    fork();
    CHECK(cudaStreamSynchronize(f.second) == cudaErrorStreamCaptureUnsupported, "the second stream may be synchronised");
    CHECK(cudaStreamEndCapture(f.first, &graph) == cudaErrorStreamCaptureInvalidated, "that spoils nothing");
    TEST("an event of a capture is none outside of it");
    CHECK(cudaStreamWaitEvent(f.first, f.begun, 0) == cudaErrorCapturedEvent, "it can be waited for in a stream");
    CHECK(cudaEventSynchronize(f.begun) == cudaErrorCapturedEvent, "it can be waited for");
    CHECK(cudaEventRecord(f.begun, f.first) == cudaSuccess && cudaEventSynchronize(f.begun) == cudaSuccess, "it is lost");
    cudaGetLastError();
}

/* --- memory --------------------------------------------------------------------------------------------------------- */

static void test_copies(void)
{
    TEST("copies refuse addresses on the wrong side, and what leaves an allocation");
    float *memory = device_new(), *pinned = pinned_new(0), host[N + 4] = {0};
    size_t bytes = N * sizeof(float);
    CHECK(cudaMemcpy(host, memory, bytes, cudaMemcpyHostToDevice) == cudaErrorInvalidValue, "the wrong direction");
    CHECK(cudaMemcpy(host, pinned, bytes, cudaMemcpyDeviceToHost) == cudaErrorInvalidValue, "pinned memory is the host's");
    CHECK(cudaMemcpy(memory, host, bytes + 4, cudaMemcpyHostToDevice) == cudaErrorInvalidValue, "beyond the end");
    CHECK(cudaMemcpy(memory - 1, host, 4, cudaMemcpyDefault) == cudaErrorInvalidValue, "before the start");
    CHECK(cudaMemset(host, 0, bytes) == cudaErrorInvalidValue, "a fill of host memory");
    CHECK(cudaMemset(memory + 1, 0, bytes) == cudaErrorInvalidValue, "a fill beyond the end");
    CHECK(cudaMemcpy(memory + 1, host, bytes - 4, cudaMemcpyHostToDevice) == cudaSuccess, "what is right");
    cudaGetLastError();
    TEST("the device's memory is counted, and ends");
    size_t before = 0, after = 0, total = 0;
    void *large = nullptr;
    cudaMemGetInfo(&before, &total);
    CHECK(cudaMalloc(&large, total) == cudaErrorMemoryAllocation && !large, "all of it, with some in use");
    CHECK(cudaMalloc(&large, 4096) == cudaSuccess && cudaMemGetInfo(&after, &total) == cudaSuccess && after == before - 4096,
          "%zu became %zu", before, after);
    cudaGetLastError();
    cudaFree(large);
    cudaFree(memory);
    cudaFreeHost(pinned);
}

/* --- products ------------------------------------------------------------------------------------------------------- */

/* A product of (3,5) and (5,2) with an epilogue, whose arguments the tests spoil. */
struct Lt {
    enum { M = 3, NN = 2, K = 5, LD = 8 };
    cublasLtHandle_t handle;
    cublasLtMatmulDesc_t how;
    cublasLtMatrixLayout_t a, b, d;
    cublasLtMatmulAlgo_t algorithm;
    float *A, *B, *D, *bias, *aux;
    void *workspace;

    static float *matrix(int64_t elements, float step)
    {
        float *memory = nullptr;
        std::vector<float> values((size_t)elements);
        for (int64_t i = 0; i < elements; i++) values[(size_t)i] = step * (float)(i % 11) - 1;
        cudaMalloc(&memory, (size_t)elements * sizeof(float));
        cudaMemcpy(memory, values.data(), (size_t)elements * sizeof(float), cudaMemcpyHostToDevice);
        return memory;
    }

    explicit Lt(cublasLtEpilogue_t epilogue)
    {
        cublasOperation_t yes = CUBLAS_OP_T;
        int64_t ld = LD;
        cublasLtCreate(&handle);
        cublasLtMatmulDescCreate(&how, CUBLAS_COMPUTE_32F, CUDA_R_32F);
        cublasLtMatmulDescSetAttribute(how, CUBLASLT_MATMUL_DESC_TRANSA, &yes, sizeof yes);
        cublasLtMatmulDescSetAttribute(how, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof epilogue);
        cublasLtMatmulDescSetAttribute(how, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, &ld, sizeof ld);
        cublasLtMatrixLayoutCreate(&a, CUDA_R_32F, K, M, LD);
        cublasLtMatrixLayoutCreate(&b, CUDA_R_32F, K, NN, LD);
        cublasLtMatrixLayoutCreate(&d, CUDA_R_32F, M, NN, LD);
        A = matrix(LD * M, 0.25f);
        B = matrix(LD * NN, 0.5f);
        D = matrix(LD * NN, 0.125f);
        bias = matrix(LD, 0.5f);
        aux = matrix(LD * NN, 0.25f);
        cudaMalloc(&workspace, 4096);
        point(CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias);
        point(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, aux);
    }

    ~Lt()
    {
        for (void *memory : {(void *)A, (void *)B, (void *)D, (void *)bias, (void *)aux, workspace}) cudaFree(memory);
        for (cublasLtMatrixLayout_t layout : {a, b, d}) cublasLtMatrixLayoutDestroy(layout);
        cublasLtMatmulDescDestroy(how);
        cublasLtDestroy(handle);
    }

    void point(cublasLtMatmulDescAttributes_t attribute, void *to)
    {
        cublasLtMatmulDescSetAttribute(how, attribute, &to, sizeof to);
    }

    cublasStatus_t plan(uint32_t alignment)
    {
        cublasLtMatmulPreference_t preference;
        cublasLtMatmulHeuristicResult_t result;
        uint64_t bytes = 4096;
        int found;
        cublasLtMatmulPreferenceCreate(&preference);
        cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &bytes, sizeof bytes);
        for (int i = CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES; i <= CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES; i++)
            cublasLtMatmulPreferenceSetAttribute(preference, (cublasLtMatmulPreferenceAttributes_t)i, &alignment, 4);
        cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(handle, how, a, b, d, d, preference, 1, &result, &found);
        cublasLtMatmulPreferenceDestroy(preference);
        if (found) algorithm = result.algo;
        return status;
    }

    cublasStatus_t multiply(const void *from, void *into, cudaStream_t stream = nullptr)
    {
        float one = 1, beta = 0.5f;
        return cublasLtMatmul(handle, how, &one, from, a, B, b, &beta, into, d, into, d, &algorithm, workspace, 4096,
                              stream);
    }
};

static void test_product(cublasLtEpilogue_t epilogue)
{
    TEST("cublasLt: a product with epilogue %d is what its formula says", (int)epilogue);
    Lt lt(epilogue);
    float D[Lt::LD * Lt::NN], aux[Lt::LD * Lt::NN];
    memcpy(D, lt.D, sizeof D); /* device memory is host memory here */
    memcpy(aux, lt.aux, sizeof aux);
    CHECK(lt.plan(16) == CUBLAS_STATUS_SUCCESS && lt.multiply(lt.A, lt.D) == CUBLAS_STATUS_SUCCESS, "it fails");
    for (int j = 0; j < Lt::NN; j++)
        for (int i = 0; i < Lt::LD; i++) {
            int at = j * Lt::LD + i;
            double x = 0.5 * (double)D[at], kept = (double)aux[at];
            if (i >= Lt::M) { /* between the rows nothing changes */
                CHECK(lt.D[at] == D[at] && lt.aux[at] == aux[at], "beside the matrix: %g", (double)lt.D[at]);
                continue;
            }
            for (int l = 0; l < Lt::K; l++) x += (double)lt.A[i * Lt::LD + l] * (double)lt.B[j * Lt::LD + l];
            if (epilogue & CUBLASLT_EPILOGUE_BIAS) x += (double)lt.bias[i];
            auto gelu = [](double v) { return 0.5 * v * (1 + tanh(sqrt(2 / M_PI) * (v + 0.044715 * v * v * v))); };
            if (epilogue & CUBLASLT_EPILOGUE_GELU) {
                kept = x;
                x = gelu(x);
            }
            if (epilogue == CUBLASLT_EPILOGUE_DGELU) x *= (gelu(kept + 1e-4) - gelu(kept - 1e-4)) / 2e-4;
            CHECK(fabs((double)lt.D[at] - x) < 1e-5, "(%d,%d) is %g, expected %g", i, j, (double)lt.D[at], x);
            if (epilogue & 128) CHECK(fabs((double)lt.aux[at] - kept) < 1e-5, "aux is %g", (double)lt.aux[at]);
        }
}

static void test_product_faults(void)
{
    const cublasStatus_t invalid = CUBLAS_STATUS_INVALID_VALUE;
    TEST("cublasLt: wrong arguments are refused");
    Lt lt(CUBLASLT_EPILOGUE_GELU_AUX_BIAS);
    std::vector<float> host(64);
    cublasLtMatrixLayout_t wrong;
    CHECK(cublasLtMatrixLayoutCreate(&wrong, CUDA_R_32F, 9, 2, 8) == invalid, "a leading dimension below the rows");
    CHECK(lt.plan(16) == CUBLAS_STATUS_SUCCESS, "what is right");
    CHECK(lt.multiply(host.data(), lt.D) == invalid, "A in host memory");
    CHECK(lt.multiply(lt.A + 4, lt.D) == invalid, "A beyond its allocation");
    CHECK(lt.multiply(lt.A, lt.A) == invalid, "D over A");
    CHECK(lt.multiply(lt.A + 1, lt.D) == invalid, "A less aligned than promised");
    lt.point(CUBLASLT_MATMUL_DESC_BIAS_POINTER, nullptr);
    CHECK(lt.multiply(lt.A, lt.D) == invalid, "no bias");
    lt.point(CUBLASLT_MATMUL_DESC_BIAS_POINTER, lt.bias);
    lt.point(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, lt.aux + 1);
    CHECK(lt.multiply(lt.A, lt.D) == invalid, "aux not aligned");
    lt.point(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, lt.aux);
    CHECK(lt.multiply(lt.A, lt.D) == CUBLAS_STATUS_SUCCESS, "what is right, again");
    memset(&lt.algorithm, 0, sizeof lt.algorithm);
    CHECK(lt.multiply(lt.A, lt.D) == invalid, "an algorithm from nowhere");
    std::swap(lt.a, lt.d);
    CHECK(lt.plan(16) == invalid, "sizes that do not fit");
    std::swap(lt.a, lt.d);

    TEST("cublasLt: the heuristic has no algorithm where it is told so, and for odd leading dimensions of aux");
    setenv("SIMT_CUBLASLT_REFUSE", "4,164", 1);
    CHECK(lt.plan(16) == CUBLAS_STATUS_NOT_SUPPORTED, "164 is in the list");
    setenv("SIMT_CUBLASLT_REFUSE", "4,16", 1);
    CHECK(lt.plan(16) == CUBLAS_STATUS_SUCCESS, "164 is not in the list");
    unsetenv("SIMT_CUBLASLT_REFUSE");
    int64_t odd = 9;
    cublasLtMatmulDescSetAttribute(lt.how, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, &odd, sizeof odd);
    CHECK(lt.plan(16) == CUBLAS_STATUS_NOT_SUPPORTED, "9 is no multiple of 8");
}

/* Two products at a time, of two streams, with one workspace. */
static void test_product_workspace(void)
{
    TEST("cublasLt: a workspace that two products use at a time shows at times, in one stream never");
    Lt lt(CUBLASLT_EPILOGUE_DEFAULT);
    cudaStream_t first, second;
    cudaStreamCreateWithFlags(&first, cudaStreamNonBlocking);
    cudaStreamCreateWithFlags(&second, cudaStreamNonBlocking);
    float *D = Lt::matrix(Lt::LD * Lt::NN, 0);
    CHECK(lt.plan(16) == CUBLAS_STATUS_SUCCESS, "no algorithm");
    auto run = [&](cudaStream_t other) {
        cudaMemset(D, 0, Lt::LD * Lt::NN * sizeof *D);
        cudaMemset(lt.D, 0, Lt::LD * Lt::NN * sizeof *D);
        lt.multiply(lt.A, lt.D, first);
        lt.multiply(lt.A, D, other);
        cudaDeviceSynchronize();
        return std::isnan(D[0]) || std::isnan(lt.D[0]) ? 0.0f : 1.0f;
    };
    CHECK_OUTCOME(always, outcomes_of(1, [&] { return run(first); }));
    CHECK_OUTCOME(at_times, outcomes_of(1, [&] { return run(second); }));
    cudaStreamDestroy(first);
    cudaStreamDestroy(second);
    cudaFree(D);
}

int main(void)
{
    test_order();
    test_events();
    test_graphs();
    test_forks();
    test_copies();
    for (cublasLtEpilogue_t epilogue : {CUBLASLT_EPILOGUE_DEFAULT, CUBLASLT_EPILOGUE_BIAS, CUBLASLT_EPILOGUE_GELU_AUX,
                                        CUBLASLT_EPILOGUE_GELU_AUX_BIAS, CUBLASLT_EPILOGUE_DGELU})
        test_product(epilogue);
    test_product_faults();
    test_product_workspace();
    return test_end();
}
