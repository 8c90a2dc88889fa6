/* linear.cu - matrix products on the GPU, by cublasLt, with what surrounds them fused into their epilogues.
 *
 * cublasLt thinks in column-major matrices. A row-major (rows, columns) matrix is its column-major (columns, rows), so with
 * ld the row length, and out^T computed instead of out:
 *
 *     forward   out (N,OC) = x W^T + b:  out^T = W x^T          m = OC, n = N,  k = C     A = W transposed, B = x
 *     input     dx (N,C) = dout W:       dx^T = W^T dout^T      m = C,  n = N,  k = OC    A = W,            B = dout
 *     weight    dW (OC,C) += dout^T x:   dW^T += x^T dout       m = C,  n = OC, k = N     A = x,            B = dout transposed
 *
 * Epilogues: BIAS, GELU_AUX_BIAS (which keeps the pre-activation), DGELU (which multiplies by the derivative at it). The weight
 * product accumulates in fp32 with beta 1 into the fp32 gradient. The bias gradient is a column sum of its own: as an epilogue
 * of that product (BGRADB) it would replace what is there, and costs as much or more (H200, GPT-2 124M's layer: 0.10 ms more
 * for the four products at N 16384, where the four sums take 0.11; 0.42 ms more at 65536). In fp32 the products are so long,
 * and their GELU epilogues so slow, that a pass of its own over the result is faster (H200, dev/results: dGELU 2.00 ms
 * fused, 1.62 and 0.15 apart); in bf16 the fused ones win (0.58 ms against 0.46 and 0.29).
 *
 * Which algorithm is best for a shape is asked once (cublasLtMatmulAlgoGetHeuristic) and kept in a small table. The first of the
 * library's list is often not the fastest of it; so under Backend.measure all of the list are tried once, and timed. Where
 * the library has none for an epilogue (odd widths, mostly) the epilogue is left out and a kernel does its work afterwards.
 * fp32 products are true fp32 (CUBLAS_COMPUTE_32F) unless the stream was opened with tf32. Algorithms that split k and add
 * the parts up in bf16 are excluded: the library offers them for small products, with twice the error (dev/LOG.md).
 */
#include <cublasLt.h>
#include <string.h>

#include "layers/cuda.h"

/* A product as it is asked for. Compared as bytes, so it is zeroed before it is filled. */
typedef struct ProductKey {
    int64_t m, n, k, lda, ldb, ldc;
    int in_type, out_type, transpose_a, transpose_b, epilogue, beta, alignment, tf32;
} ProductKey;

typedef struct ProductPlan {
    ProductKey key;
    int supported, tried;
    cublasLtMatmulDesc_t operation;
    cublasLtMatrixLayout_t a, b, c;
    cublasLtMatmulAlgo_t algorithm;
} ProductPlan;

enum { WORKSPACE_BYTES = 32 << 20, CANDIDATES = 8 };

struct ProductPlans {
    cublasLtHandle_t handle;
    void *workspace; /* of two products at a time: one on the main stream, one on the side stream */
    cudaEvent_t begun, ended; /* of a trial */
    ProductPlan *plans;
    int count, capacity;
};

static void blas_check(cublasStatus_t status, const char *call, const char *file, int line)
{
    if (status == CUBLAS_STATUS_SUCCESS) return;
    fprintf(stderr, "%s:%d: %s: %s\n", file, line, call, cublasLtGetStatusString(status));
    exit(1);
}
#define BLAS_CHECK(call) blas_check((call), #call, __FILE__, __LINE__)

struct ProductPlans *product_plans_open(char *error, size_t error_size)
{
    struct ProductPlans *plans = (struct ProductPlans *)calloc(1, sizeof *plans);
    if (plans && cublasLtCreate(&plans->handle) == CUBLAS_STATUS_SUCCESS && cudaMalloc(&plans->workspace, 2 * WORKSPACE_BYTES) == cudaSuccess &&
        cudaEventCreate(&plans->begun) == cudaSuccess && cudaEventCreate(&plans->ended) == cudaSuccess)
        return plans;
    snprintf(error, error_size, "cuBLAS cannot start on this GPU (%s)", cudaGetErrorString(cudaGetLastError()));
    free(plans);
    return NULL;
}

static void plan_free(const ProductPlan *plan)
{
    cublasLtMatrixLayoutDestroy(plan->a);
    cublasLtMatrixLayoutDestroy(plan->b);
    cublasLtMatrixLayoutDestroy(plan->c);
    cublasLtMatmulDescDestroy(plan->operation);
}

void product_plans_close(struct ProductPlans *plans)
{
    if (!plans) return;
    for (int i = 0; i < plans->count; i++) plan_free(&plans->plans[i]);
    cudaEventDestroy(plans->begun);
    cudaEventDestroy(plans->ended);
    cublasLtDestroy(plans->handle);
    cudaFree(plans->workspace);
    free(plans->plans);
    free(plans);
}

static void set(cublasLtMatmulDesc_t operation, cublasLtMatmulDescAttributes_t attribute, const void *value, size_t bytes)
{
    BLAS_CHECK(cublasLtMatmulDescSetAttribute(operation, attribute, value, bytes));
}

/* A call of cublasLtMatmul but for the algorithm: see product(). */
typedef struct ProductCall {
    const void *a, *b, *bias;
    void *aux, *out;
} ProductCall;

static cublasStatus_t plan_run(const ProductPlan *plan, const cublasLtMatmulAlgo_t *algorithm, const ProductCall *call, void *out, Stream *stream)
{
    float one = 1, beta = plan->key.beta ? 1.0f : 0.0f;
    char *workspace = (char *)stream->plans->workspace + (stream->stream == stream->side_stream ? WORKSPACE_BYTES : 0);
    if (call->bias) set(plan->operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &call->bias, sizeof call->bias);
    if (call->aux) set(plan->operation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, &call->aux, sizeof call->aux);
    return cublasLtMatmul(stream->plans->handle, plan->operation, &one, call->a, plan->a, call->b, plan->b, &beta, out, plan->c, out, plan->c,
                          algorithm, workspace, WORKSPACE_BYTES, stream->stream);
}

/* Microseconds of one of `repeats` runs one after another; negative where the library refuses. */
static float algorithm_time(const ProductPlan *plan, const cublasLtMatmulAlgo_t *algorithm, const ProductCall *call, void *out, int repeats,
                            Stream *stream)
{
    const struct ProductPlans *all = stream->plans;
    float milliseconds = 0;
    CUDA_CHECK(cudaEventRecord(all->begun, stream->stream));
    for (int i = 0; i < repeats; i++)
        if (plan_run(plan, algorithm, call, out, stream) != CUBLAS_STATUS_SUCCESS) return -1;
    CUDA_CHECK(cudaEventRecord(all->ended, stream->stream));
    CUDA_CHECK(cudaEventSynchronize(all->ended));
    CUDA_CHECK(cudaEventElapsedTime(&milliseconds, all->begun, all->ended));
    return 1e3f * milliseconds / (float)repeats;
}

/* The first of the candidates that is about as fast as the fastest, by the best of some rounds in which each runs for about half a
 * millisecond: so the library's order decides where noise would, and another run chooses alike. What is overwritten may be overwritten
 * often; what would add up is done in memory taken for the trial, and where there is none it is the first. */
static int candidates_measure(const ProductPlan *plan, const cublasLtMatmulHeuristicResult_t *candidates, int count, const ProductCall *call,
                              Stream *stream)
{
    enum { ROUNDS = 3, SHARE = 500 /* microseconds */, MOST = 16 };
    const float ALIKE = 1.03f;
    void *out = call->out;
    float best[CANDIDATES], first, fastest = -1;
    if (plan->key.beta) {
        size_t bytes = (size_t)(plan->key.m * plan->key.n) * (plan->key.out_type == CUDA_R_32F ? 4 : 2);
        if (cudaMalloc(&out, bytes) != cudaSuccess) {
            cudaGetLastError();
            return 0;
        }
        CUDA_CHECK(cudaMemsetAsync(out, 0, bytes, stream->stream));
    }
    first = algorithm_time(plan, &candidates[0].algo, call, out, 2, stream);
    int repeats = first > 0 && first * MOST > SHARE ? (int)(SHARE / first) + 1 : MOST, chosen = 0;
    for (int round = 0; round < ROUNDS; round++)
        for (int i = 0; i < count; i++) {
            if (round && best[i] < 0) continue;
            float time = algorithm_time(plan, &candidates[i].algo, call, out, repeats, stream);
            if (!round || time < best[i]) best[i] = time;
        }
    if (plan->key.beta) CUDA_CHECK(cudaFree(out));
    for (int i = 0; i < count; i++)
        if (best[i] > 0 && (fastest < 0 || best[i] < fastest)) fastest = best[i];
    while (chosen < count - 1 && !(best[chosen] > 0 && best[chosen] <= ALIKE * fastest)) chosen++;
    return fastest > 0 ? chosen : 0;
}

static int is_trial(const Stream *stream) { return stream->measuring && !stream->recording; }

/* Describes the product and finds its algorithm. aux_ld: row length of the pre-activation. */
static void plan_make(ProductPlan *plan, const ProductKey *key, const ProductCall *call, Stream *stream)
{
    cudaDataType_t in = (cudaDataType_t)key->in_type, out = (cudaDataType_t)key->out_type;
    cublasComputeType_t compute = in == CUDA_R_32F && key->tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
    cublasOperation_t yes = CUBLAS_OP_T, no = CUBLAS_OP_N;
    cublasLtEpilogue_t epilogue = (cublasLtEpilogue_t)key->epilogue;
    plan->key = *key;
    plan->tried = is_trial(stream);
    BLAS_CHECK(cublasLtMatmulDescCreate(&plan->operation, compute, CUDA_R_32F));
    set(plan->operation, CUBLASLT_MATMUL_DESC_TRANSA, key->transpose_a ? &yes : &no, sizeof yes);
    set(plan->operation, CUBLASLT_MATMUL_DESC_TRANSB, key->transpose_b ? &yes : &no, sizeof yes);
    set(plan->operation, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof epilogue);
    if (epilogue == CUBLASLT_EPILOGUE_GELU_AUX || epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS || epilogue == CUBLASLT_EPILOGUE_DGELU)
        set(plan->operation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, &key->ldc, sizeof key->ldc);
    BLAS_CHECK(cublasLtMatrixLayoutCreate(&plan->a, in, (uint64_t)(key->transpose_a ? key->k : key->m),
                                          (uint64_t)(key->transpose_a ? key->m : key->k), key->lda));
    BLAS_CHECK(cublasLtMatrixLayoutCreate(&plan->b, in, (uint64_t)(key->transpose_b ? key->n : key->k),
                                          (uint64_t)(key->transpose_b ? key->k : key->n), key->ldb));
    BLAS_CHECK(cublasLtMatrixLayoutCreate(&plan->c, out, (uint64_t)key->m, (uint64_t)key->n, key->ldc));

    cublasLtMatmulPreference_t preference;
    cublasLtMatmulHeuristicResult_t candidates[CANDIDATES];
    size_t workspace = WORKSPACE_BYTES;
    /* Sums of parts of k are added up in fp32, not in the bf16 of the output. */
    uint32_t reductions = out == CUDA_R_16BF ? CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE : CUBLASLT_REDUCTION_SCHEME_MASK;
    uint32_t alignment = (uint32_t)key->alignment;
    int found = 0, wanted = is_trial(stream) ? CANDIDATES : 1;
    BLAS_CHECK(cublasLtMatmulPreferenceCreate(&preference));
    cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof workspace);
    cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &reductions,
                                         sizeof reductions);
    cublasLtMatmulPreferenceAttributes_t alignments[] = {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                                                         CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES};
    for (int i = 0; i < 4; i++) cublasLtMatmulPreferenceSetAttribute(preference, alignments[i], &alignment, sizeof alignment);
    cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(stream->plans->handle, plan->operation, plan->a, plan->b, plan->c, plan->c, preference,
                                                           wanted, candidates, &found);
    cublasLtMatmulPreferenceDestroy(preference);
    plan->supported = status == CUBLAS_STATUS_SUCCESS && found > 0;
    if (plan->supported) plan->algorithm = candidates[found > 1 ? candidates_measure(plan, candidates, found, call, stream) : 0].algo;
}

static ProductPlan *plan_find(const ProductKey *key, const ProductCall *call, Stream *stream)
{
    struct ProductPlans *all = stream->plans;
    for (int i = 0; i < all->count; i++) {
        ProductPlan *known = &all->plans[i];
        if (memcmp(&known->key, key, sizeof *key)) continue;
        if (known->tried || !is_trial(stream)) return known;
        plan_free(known);
        plan_make(known, key, call, stream);
        return known;
    }
    if (all->count == all->capacity) {
        all->capacity = 2 * all->capacity + 32;
        all->plans = (ProductPlan *)realloc(all->plans, (size_t)all->capacity * sizeof *all->plans);
        if (!all->plans) {
            fprintf(stderr, "%s:%d: not enough memory for the table of products\n", __FILE__, __LINE__);
            exit(1);
        }
    }
    ProductPlan *plan = &all->plans[all->count++];
    memset(plan, 0, sizeof *plan);
    plan_make(plan, key, call, stream);
    return plan;
}

/* Largest power of two up to 256 that divides every address. */
static int alignment_of(const void *a, const void *b, const void *c, const void *d)
{
    uintptr_t bits = (uintptr_t)a | (uintptr_t)b | (uintptr_t)c | (uintptr_t)d | 256;
    return (int)(bits & (~bits + 1));
}

template <typename Real> struct RealType { static const cudaDataType_t value = CUDA_R_32F; };
template <> struct RealType<__nv_bfloat16> { static const cudaDataType_t value = CUDA_R_16BF; };

/* out (n,m) = A B (+ out) as in the table at the top, with an epilogue over bias (m) and aux (n,m). Returns 0 where the library has
 * no such product, and nothing was done. */
static int product(void *out, cudaDataType_t out_type, const void *a, const void *b, cudaDataType_t in_type, const void *bias, void *aux,
                   cublasLtEpilogue_t epilogue, int transpose_a, int transpose_b, int64_t m, int64_t n, int64_t k, int accumulate,
                   Stream *stream)
{
    ProductKey key;
    memset(&key, 0, sizeof key);
    key.m = m;
    key.n = n;
    key.k = k;
    key.lda = transpose_a ? k : m;
    key.ldb = transpose_b ? n : k;
    key.ldc = m;
    key.in_type = in_type;
    key.out_type = out_type;
    key.transpose_a = transpose_a;
    key.transpose_b = transpose_b;
    key.epilogue = epilogue;
    key.beta = accumulate;
    key.alignment = alignment_of(a, b, out, aux ? aux : out);
    key.tf32 = stream->tf32;
    const ProductCall call = {a, b, bias, aux, out};
    ProductPlan *plan = plan_find(&key, &call, stream);
    if (!plan->supported) return 0;
    BLAS_CHECK(plan_run(plan, &plan->algorithm, &call, out, stream));
    return 1;
}

/* The product without an epilogue must exist. */
static void product_plain(void *out, cudaDataType_t out_type, const void *a, const void *b, cudaDataType_t in_type, int transpose_a,
                          int transpose_b, int64_t m, int64_t n, int64_t k, int accumulate, Stream *stream)
{
    if (product(out, out_type, a, b, in_type, NULL, NULL, CUBLASLT_EPILOGUE_DEFAULT, transpose_a, transpose_b, m, n, k, accumulate, stream))
        return;
    fprintf(stderr, "%s:%d: cublasLt has no algorithm for a product of %lld x %lld x %lld\n", __FILE__, __LINE__, (long long)m, (long long)n,
            (long long)k);
    exit(1);
}

/* x (N,OC) += bias (OC), and where pre is not NULL: pre = that, x = gelu(pre). For products without their epilogue. */
template <typename Real>
__global__ void bias_kernel(Real *x, const Real *bias, int64_t n, int64_t OC)
{
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x)
        x[i] = from_float<Real>(to_float(x[i]) + to_float(bias[i % OC]));
}

template <typename Real>
static void bias_add(Real *x, const Real *bias, int64_t N, int64_t OC, Stream *stream)
{
    LAUNCH(bias_kernel<Real>, blocks_resident(N * OC, 256, stream, 16), 256, 0, stream, x, bias, N * OC, OC);
}

template <typename Real>
void linear_forward_cuda(void *out, const void *x, const void *weight, const void *bias, int64_t N, int64_t C, int64_t OC,
                         Stream *stream)
{
    const cudaDataType_t real = RealType<Real>::value;
    if (N < 1 || OC < 1) return;
    if (bias && product(out, real, weight, x, real, bias, NULL, CUBLASLT_EPILOGUE_BIAS, 1, 0, OC, N, C, 0, stream)) return;
    product_plain(out, real, weight, x, real, 1, 0, OC, N, C, 0, stream);
    if (bias) bias_add((Real *)out, (const Real *)bias, N, OC, stream);
}

template <typename Real>
void linear_gelu_forward_cuda(void *out, void *pre, const void *x, const void *weight, const void *bias, int64_t N, int64_t C,
                              int64_t OC, Stream *stream)
{
    const cudaDataType_t real = RealType<Real>::value;
    if (N < 1 || OC < 1) return;
    cublasLtEpilogue_t epilogue = bias ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_AUX;
    if (real == CUDA_R_16BF && product(out, real, weight, x, real, bias, pre, epilogue, 1, 0, OC, N, C, 0, stream)) return;
    linear_forward_cuda<Real>(pre, x, weight, bias, N, C, OC, stream);
    gelu_forward_cuda<Real>(out, pre, N * OC, stream);
}

template <typename Real>
void linear_backward_input_cuda(void *dx, const void *dout, const void *weight, const void *pre, int64_t N, int64_t C, int64_t OC,
                                Stream *stream)
{
    const cudaDataType_t real = RealType<Real>::value;
    if (!dx || N < 1) return;
    if (pre && real == CUDA_R_16BF &&
        product(dx, real, weight, dout, real, NULL, (void *)pre, CUBLASLT_EPILOGUE_DGELU, 0, 0, C, N, OC, 0, stream))
        return;
    product_plain(dx, real, weight, dout, real, 0, 0, C, N, OC, 0, stream);
    if (pre) gelu_backward_cuda<Real>(dx, pre, N * C, stream);
}

/* --- bias gradient: column sums ------------------------------------------------------------------------------------------- */

enum { SUM_WARPS = 8, SUM_ROWS = 128 }; /* warps of a block; blocks that share the rows, at most */

/* partial (gridDim.y, OC) = sums of this block's rows of dout (N,OC), for 32 packs of columns. Threads (32, SUM_WARPS). */
template <typename Real, int WIDTH>
__global__ void column_sums_kernel(float *partial, const Real *dout, int64_t N, int64_t OC)
{
    SHARED(float, part, SUM_WARPS * 32 * WIDTH);
    int64_t c = ((int64_t)blockIdx.x * 32 + threadIdx.x) * WIDTH;
    float sum[WIDTH];
#pragma unroll
    for (int i = 0; i < WIDTH; i++) sum[i] = 0;
    if (c < OC)
        for (int64_t n = (int64_t)blockIdx.y * SUM_WARPS + threadIdx.y; n < N; n += (int64_t)gridDim.y * SUM_WARPS) {
            float x[WIDTH];
            pack_load<Real, WIDTH>(x, dout + n * OC + c);
#pragma unroll
            for (int i = 0; i < WIDTH; i++) sum[i] += x[i];
        }
#pragma unroll
    for (int i = 0; i < WIDTH; i++) part[(threadIdx.y * WIDTH + i) * 32 + threadIdx.x] = sum[i];
    __syncthreads();
    if (threadIdx.y || c >= OC) return;
#pragma unroll
    for (int i = 0; i < WIDTH; i++) {
        for (int w = 1; w < SUM_WARPS; w++) sum[i] += part[(w * WIDTH + i) * 32 + threadIdx.x];
        partial[(int64_t)blockIdx.y * OC + c + i] = sum[i];
    }
}

size_t linear_scratch_cuda(int64_t N, int64_t C, int64_t OC)
{
    (void)N;
    (void)C;
    return (size_t)SUM_ROWS * (size_t)OC * sizeof(float);
}

template <typename Real>
void linear_backward_weight_cuda(float *dweight, float *dbias, void *scratch, const void *dout, const void *x, int64_t N, int64_t C,
                                 int64_t OC, Stream *stream)
{
    const cudaDataType_t real = RealType<Real>::value;
    const int WIDTH = PackWidth<Real>::value;
    if (N < 1 || OC < 1) return;
    product_plain(dweight, CUDA_R_32F, x, dout, real, 0, 1, C, OC, N, 1, stream);
    if (!dbias) return;
    float *partial = (float *)scratch;
    unsigned rows = blocks_for(N, 4 * SUM_WARPS), most = SUM_ROWS;
    if (rows > most) rows = most;
    if (packs_fit<Real>(OC, dout))
        LAUNCH(KERNEL(column_sums_kernel<Real, WIDTH>), dim3(blocks_for(OC, 32 * WIDTH), rows), dim3(32, SUM_WARPS), 0, stream, partial,
               (const Real *)dout, N, OC);
    else
        LAUNCH(KERNEL(column_sums_kernel<Real, 1>), dim3(blocks_for(OC, 32), rows), dim3(32, SUM_WARPS), 0, stream, partial,
               (const Real *)dout, N, OC);
    columns_add_cuda(dbias, NULL, partial, rows, OC, OC, stream);
}

#define INSTANTIATE(Real)                                                                                                   \
    template void linear_forward_cuda<Real>(void *, const void *, const void *, const void *, int64_t, int64_t, int64_t, Stream *); \
    template void linear_gelu_forward_cuda<Real>(void *, void *, const void *, const void *, const void *, int64_t, int64_t, int64_t, Stream *); \
    template void linear_backward_input_cuda<Real>(void *, const void *, const void *, const void *, int64_t, int64_t, int64_t, Stream *); \
    template void linear_backward_weight_cuda<Real>(float *, float *, void *, const void *, const void *, int64_t, int64_t, int64_t, Stream *);
INSTANTIATE(float)
INSTANTIATE(__nv_bfloat16)
