/* cublasLt.cpp - matrix products for the emulation: cublasLt.h's functions, computed plainly, with every argument checked.
 *
 *     D = epilogue(alpha op(A) op(B) + beta C)        all column-major; op(A) (m,k), op(B) (k,n), C and D (m,n)
 *
 * in fp32 and in one order, whatever the types in memory. The epilogue sees the fp32 result; aux and bias have D's type.
 * Only where the preference leaves the library free to add up parts of a sum in D's type, it does: after every PART of k
 * the sum is rounded to that.
 *
 * A mistake in the arguments is the error that the library returns, with a line on stderr that says what is wrong: sizes and
 * leading dimensions that do not fit, addresses outside of device memory or less aligned than the heuristic was promised, an
 * epilogue without its bias or aux, an output over an input.
 *
 * The heuristic refuses an auxiliary matrix whose leading dimension is not a multiple of 8, as the library's documentation
 * has it, and the epilogues that the environment variable SIMT_CUBLASLT_REFUSE lists by number ("4,164,192"), so that what
 * is done in their place is tested too. It knows as many algorithms as SIMT_CUBLASLT_DELAYS lists ("0", one, where it is not
 * set), which take so many milliseconds longer than they need; one that takes -1 is offered, and refuses to run. What the last
 * product that was done took so is left in SIMT_CUBLASLT_DELAYED.
 *
 * A product uses the whole of its workspace from when it begins until it ends: where another product, of a stream that does
 * not wait for it, uses the same in between, its first element is NaN.
 */
#include "cublasLt.h"

#include <stdarg.h>
#include <stdlib.h>
#include <unistd.h>

#include <string>
#include <vector>

#include "simt_machine.h"

struct cublasLtContext { int unused; };

struct cublasLtMatmulDescOpaque {
    int transposed_a, transposed_b;
    cublasLtEpilogue_t epilogue;
    void *bias, *aux;
    int64_t aux_ld;
};

struct cublasLtMatrixLayoutOpaque {
    cudaDataType_t type;
    int64_t rows, columns, ld;
};

struct cublasLtMatmulPreferenceOpaque {
    uint64_t workspace;
    uint32_t alignment[4]; /* A, B, C, D */
    uint32_t reductions;   /* cublasLtReductionScheme_t, those that may be taken */
};

/* What an algorithm may rely on, kept in cublasLtMatmulAlgo_t. */
struct Promise {
    uint64_t magic, workspace;
    uint32_t alignment[4];
    int delay; /* milliseconds */
    int coarse; /* parts of sums are added up in the output's type */
};
static_assert(sizeof(Promise) <= sizeof(cublasLtMatmulAlgo_t), "a promise fits where algorithms are kept");
static const uint64_t PROMISE_MAGIC = 0x73696d742d626c73;

static bool is_transposed(int32_t operation) { return operation == CUBLAS_OP_T; }
static size_t element_size(cudaDataType_t type) { return type == CUDA_R_16BF ? 2 : 4; }

/* Bytes from the first element to the last. */
static size_t layout_bytes(const cublasLtMatrixLayoutOpaque &layout)
{
    return (size_t)((layout.columns - 1) * layout.ld + layout.rows) * element_size(layout.type);
}

__attribute__((format(printf, 1, 2))) static cublasStatus_t wrong(const char *format, ...)
{
    va_list arguments;
    fprintf(stderr, "simt: cublasLt: ");
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fprintf(stderr, "\n");
    return CUBLAS_STATUS_INVALID_VALUE;
}

const char *cublasLtGetStatusString(cublasStatus_t status)
{
    switch (status) {
    case CUBLAS_STATUS_SUCCESS: return "success";
    case CUBLAS_STATUS_INVALID_VALUE: return "invalid value";
    case CUBLAS_STATUS_NOT_SUPPORTED: return "not supported";
    default: return "failed";
    }
}

cublasStatus_t cublasLtCreate(cublasLtHandle_t *handle)
{
    *handle = new cublasLtContext{};
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle)
{
    delete handle;
    return CUBLAS_STATUS_SUCCESS;
}

/* --- descriptions --------------------------------------------------------------------------------------------------- */

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *product, cublasComputeType_t, cudaDataType_t scale)
{
    if (scale != CUDA_R_32F) return wrong("alpha and beta are fp32 here");
    *product = new cublasLtMatmulDescOpaque{0, 0, CUBLASLT_EPILOGUE_DEFAULT, nullptr, nullptr, 0};
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t product)
{
    delete product;
    return CUBLAS_STATUS_SUCCESS;
}

template <typename T>
static cublasStatus_t read_value(T *into, const void *value, size_t bytes)
{
    if (bytes != sizeof *into) return wrong("an attribute of %zu bytes, it has %zu", bytes, sizeof *into);
    memcpy(into, value, bytes);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t product, cublasLtMatmulDescAttributes_t attribute,
                                              const void *value, size_t bytes)
{
    int32_t operation = CUBLAS_OP_N;
    cublasStatus_t status = CUBLAS_STATUS_SUCCESS;
    switch (attribute) {
    case CUBLASLT_MATMUL_DESC_TRANSA:
        status = read_value(&operation, value, bytes);
        product->transposed_a = is_transposed(operation);
        return status;
    case CUBLASLT_MATMUL_DESC_TRANSB:
        status = read_value(&operation, value, bytes);
        product->transposed_b = is_transposed(operation);
        return status;
    case CUBLASLT_MATMUL_DESC_EPILOGUE: return read_value(&product->epilogue, value, bytes);
    case CUBLASLT_MATMUL_DESC_BIAS_POINTER: return read_value(&product->bias, value, bytes);
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER: return read_value(&product->aux, value, bytes);
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD: return read_value(&product->aux_ld, value, bytes);
    }
    return wrong("attribute %d of a product is not emulated", (int)attribute);
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *layout, cudaDataType type, uint64_t rows, uint64_t columns,
                                          int64_t ld)
{
    if (!rows || !columns || ld < (int64_t)rows)
        return wrong("a matrix of %llu x %llu with leading dimension %lld", (unsigned long long)rows,
                     (unsigned long long)columns, (long long)ld);
    *layout = new cublasLtMatrixLayoutOpaque{type, (int64_t)rows, (int64_t)columns, ld};
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout)
{
    delete layout;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *preference)
{
    *preference = new cublasLtMatmulPreferenceOpaque{0, {256, 256, 256, 256}, CUBLASLT_REDUCTION_SCHEME_MASK};
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference)
{
    delete preference;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attribute, const void *value,
                                                    size_t bytes)
{
    if (attribute == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES) return read_value(&preference->workspace, value, bytes);
    if (attribute == CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK) return read_value(&preference->reductions, value, bytes);
    return read_value(&preference->alignment[attribute - CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES], value, bytes);
}

/* --- products ------------------------------------------------------------------------------------------------------- */

/* Do the matrices fit each other? */
static cublasStatus_t shapes_check(const cublasLtMatmulDescOpaque &p, const cublasLtMatrixLayoutOpaque &a,
                                   const cublasLtMatrixLayoutOpaque &b, const cublasLtMatrixLayoutOpaque &c,
                                   const cublasLtMatrixLayoutOpaque &d)
{
    int64_t m = p.transposed_a ? a.columns : a.rows, k = p.transposed_a ? a.rows : a.columns;
    int64_t kb = p.transposed_b ? b.columns : b.rows, n = p.transposed_b ? b.rows : b.columns;
    if (k != kb || d.rows != m || d.columns != n || c.rows != m || c.columns != n || c.type != d.type || c.ld != d.ld)
        return wrong("a product of (%lld,%lld) and (%lld,%lld) into (%lld,%lld)", (long long)m, (long long)k, (long long)kb,
                     (long long)n, (long long)d.rows, (long long)d.columns);
    if (a.type != b.type || (a.type == CUDA_R_32F && d.type != CUDA_R_32F))
        return wrong("factors of types %d and %d into type %d", a.type, b.type, d.type);
    if (p.epilogue & 128 && p.aux_ld < m) return wrong("aux has leading dimension %lld for %lld rows", (long long)p.aux_ld,
                                                       (long long)m);
    return CUBLAS_STATUS_SUCCESS;
}

/* Is this epilogue in the list of SIMT_CUBLASLT_REFUSE? */
static bool epilogue_refused(cublasLtEpilogue_t epilogue)
{
    const char *at = getenv("SIMT_CUBLASLT_REFUSE");
    while (at && *at) {
        char *end;
        if (strtol(at, &end, 10) == epilogue) return true;
        at = *end ? end + 1 : end;
    }
    return false;
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t product, cublasLtMatrixLayout_t a,
                                              cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int wanted,
                                              cublasLtMatmulHeuristicResult_t *results, int *found)
{
    *found = 0;
    cublasStatus_t status = shapes_check(*product, *a, *b, *c, *d);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    if (wanted < 1) return wrong("no algorithm is wanted");
    if (epilogue_refused(product->epilogue)) return CUBLAS_STATUS_NOT_SUPPORTED;
    if (product->epilogue & 128 && product->aux_ld % 8) return CUBLAS_STATUS_NOT_SUPPORTED;
    Promise promise = {PROMISE_MAGIC, preference->workspace, {0, 0, 0, 0}, 0,
                       (preference->reductions & ~(uint32_t)CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE) != 0};
    memcpy(promise.alignment, preference->alignment, sizeof promise.alignment);
    const char *delays = getenv("SIMT_CUBLASLT_DELAYS"), *at = delays ? delays : "0";
    while (*at && *found < wanted) {
        char *end;
        promise.delay = (int)strtol(at, &end, 10);
        at = *end ? end + 1 : end;
        cublasLtMatmulHeuristicResult_t *result = &results[(*found)++];
        *result = cublasLtMatmulHeuristicResult_t{};
        memcpy(&result->algo, &promise, sizeof promise);
        result->workspaceSize = preference->workspace;
    }
    return CUBLAS_STATUS_SUCCESS;
}

/* Everything that a product reads and writes, by value: it is done later. */
struct Product {
    cublasLtMatmulDescOpaque how;
    cublasLtMatrixLayoutOpaque a, b, c, d;
    float alpha, beta;
    const void *A, *B, *C;
    void *D;
    int coarse;
};

static bool overlap(const void *a, size_t a_bytes, const void *b, size_t b_bytes)
{
    return (const char *)a < (const char *)b + b_bytes && (const char *)b < (const char *)a + a_bytes;
}

static cublasStatus_t operand_check(const char *name, const void *at, size_t bytes, uint32_t alignment)
{
    if (simt_memory(at, bytes) != SIMT_DEVICE) return wrong("%s, %zu bytes, is not in one allocation of the device", name,
                                                            bytes);
    if ((uintptr_t)at % alignment) return wrong("%s at %p is not aligned to %u bytes, as was promised", name, at, alignment);
    return CUBLAS_STATUS_SUCCESS;
}

static cublasStatus_t product_check(const Product &p, const Promise &promise)
{
    cublasStatus_t status = shapes_check(p.how, p.a, p.b, p.c, p.d);
    size_t result = layout_bytes(p.d), element = element_size(p.d.type);
    size_t aux = (size_t)((p.d.columns - 1) * p.how.aux_ld + p.d.rows) * element;
    const struct { const char *name; const void *at; size_t bytes; uint32_t alignment; bool used; } operands[] = {
        {"A", p.A, layout_bytes(p.a), promise.alignment[0], true},
        {"B", p.B, layout_bytes(p.b), promise.alignment[1], true},
        {"C", p.C, result, promise.alignment[2], p.beta != 0},
        {"D", p.D, result, promise.alignment[3], true},
        {"the bias", p.how.bias, (size_t)p.d.rows * element, (uint32_t)element,
         (p.how.epilogue & CUBLASLT_EPILOGUE_BIAS) != 0},
        {"aux", p.how.aux, aux, 16, (p.how.epilogue & 128) != 0},
    };
    for (const auto &o : operands) {
        if (status != CUBLAS_STATUS_SUCCESS) return status;
        if (o.used) status = operand_check(o.name, o.at, o.bytes, o.alignment);
    }
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    if (p.beta != 0 && p.C != p.D && overlap(p.C, result, p.D, result)) return wrong("C overlaps D");
    if (overlap(p.A, layout_bytes(p.a), p.D, result) || overlap(p.B, layout_bytes(p.b), p.D, result))
        return wrong("D lies over a factor");
    return CUBLAS_STATUS_SUCCESS;
}

static float element_read(const void *matrix, int64_t at, cudaDataType_t type)
{
    return type == CUDA_R_16BF ? __bfloat162float(((const __nv_bfloat16 *)matrix)[at]) : ((const float *)matrix)[at];
}

static void element_write(void *matrix, int64_t at, cudaDataType_t type, float value)
{
    if (type == CUDA_R_16BF) ((__nv_bfloat16 *)matrix)[at] = __float2bfloat16_rn(value);
    else ((float *)matrix)[at] = value;
}

/* A factor as fp32 (rows, columns) of op(), column after column. */
static std::vector<float> factor(const void *matrix, const cublasLtMatrixLayoutOpaque &layout, int transposed)
{
    int64_t rows = transposed ? layout.columns : layout.rows, columns = transposed ? layout.rows : layout.columns;
    std::vector<float> out((size_t)(rows * columns));
    for (int64_t c = 0; c < columns; c++)
        for (int64_t r = 0; r < rows; r++)
            out[(size_t)(c * rows + r)] = element_read(matrix, transposed ? r * layout.ld + c : c * layout.ld + r,
                                                       layout.type);
    return out;
}

/* GELU in its tanh form, and its slope. Source: Hendrycks & Gimpel 2016. */
static float gelu(float x) { return 0.5f * x * (1 + tanhf(0.79788456f * (x + 0.044715f * x * x * x))); }
static float gelu_slope(float x)
{
    float t = tanhf(0.79788456f * (x + 0.044715f * x * x * x));
    return 0.5f * (1 + t) + 0.5f * x * (1 - t * t) * 0.79788456f * (1 + 3 * 0.044715f * x * x);
}

/* Column j of D from the fp32 result (m). */
static void column_finish(const Product &p, int64_t j, const float *result)
{
    const cublasLtMatmulDescOpaque &how = p.how;
    for (int64_t i = 0; i < p.d.rows; i++) {
        float x = p.alpha * result[i] + (p.beta != 0 ? p.beta * element_read(p.C, j * p.c.ld + i, p.c.type) : 0);
        if (how.epilogue & CUBLASLT_EPILOGUE_BIAS) x += element_read(how.bias, i, p.d.type);
        if (how.epilogue & CUBLASLT_EPILOGUE_GELU) {
            if (how.epilogue & 128) element_write(how.aux, j * how.aux_ld + i, p.d.type, x);
            x = gelu(x);
        }
        if (how.epilogue == CUBLASLT_EPILOGUE_DGELU) x *= gelu_slope(element_read(how.aux, j * how.aux_ld + i, p.d.type));
        element_write(p.D, j * p.d.ld + i, p.d.type, x);
    }
}

static void product_run(const Product &p)
{
    enum { PART = 16 };
    std::vector<float> A = factor(p.A, p.a, p.how.transposed_a), B = factor(p.B, p.b, p.how.transposed_b);
    int64_t m = p.d.rows, n = p.d.columns, k = p.how.transposed_a ? p.a.rows : p.a.columns;
    std::vector<float> result((size_t)m);
    for (int64_t j = 0; j < n; j++) {
        std::fill(result.begin(), result.end(), 0.0f);
        for (int64_t l = 0; l < k; l++) {
            float factor_b = B[(size_t)(j * k + l)], *out = result.data();
            const float *column = A.data() + l * m;
            for (int64_t i = 0; i < m; i++) out[i] += column[i] * factor_b;
            if (p.coarse && p.d.type == CUDA_R_16BF && (l + 1) % PART == 0)
                for (int64_t i = 0; i < m; i++) out[i] = __bfloat162float(__float2bfloat16_rn(out[i]));
        }
        column_finish(p, j, result.data());
    }
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t product, const void *alpha, const void *A,
                              cublasLtMatrixLayout_t a, const void *B, cublasLtMatrixLayout_t b, const void *beta,
                              const void *C, cublasLtMatrixLayout_t c, void *D, cublasLtMatrixLayout_t d,
                              const cublasLtMatmulAlgo_t *algo, void *workspace, size_t workspace_bytes,
                              cudaStream_t stream)
{
    Promise promise;
    memcpy(&promise, algo, sizeof promise);
    if (promise.magic != PROMISE_MAGIC) return wrong("an algorithm that no heuristic gave");
    if (promise.workspace > workspace_bytes || simt_memory(workspace, workspace_bytes) != SIMT_DEVICE)
        return wrong("a workspace of %zu bytes, the algorithm was told of %zu", workspace_bytes, (size_t)promise.workspace);
    if (promise.delay < 0) return CUBLAS_STATUS_NOT_SUPPORTED;
    Product p = {*product, *a, *b, *c, *d, *(const float *)alpha, *(const float *)beta, A, B, C, D, promise.coarse};
    cublasStatus_t status = product_check(p, promise);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    static uint64_t stamps;
    uint64_t stamp = ++stamps, *used = workspace_bytes >= sizeof stamp ? (uint64_t *)workspace : nullptr;
    int delay = promise.delay;
    cudaError_t begun = simt_queue(stream, [=] { if (used) *used = stamp; });
    cudaError_t ended = simt_queue(stream, [=] {
        bool disturbed = used && *used != stamp;
        if (delay) usleep(1000 * (useconds_t)delay);
        setenv("SIMT_CUBLASLT_DELAYED", std::to_string(delay).c_str(), 1);
        product_run(p);
        if (disturbed) element_write(p.D, 0, p.d.type, NAN);
    });
    return begun == cudaSuccess && ended == cudaSuccess ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_INVALID_VALUE;
}
