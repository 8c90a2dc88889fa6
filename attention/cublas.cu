/* cublas.cu - attention as matrix products of cuBLAS around a softmax kernel: the yardstick of the tiled versions.
 *
 * The algorithm. All T x T logits of every head are computed and stored, then turned into P row by row, then multiplied on. P stays
 * in `saved` for the backward, in the type of the inputs; logits and dP, in fp32 whatever the type, live in scratch. Everything is
 * row-major here and column-major in cuBLAS, so it is told of each product's transpose:
 *
 *     forward   S = Q K^T      P = softmax(scale S)       O = P V
 *     backward  dV = P^T dO    dP = dO V^T     dS = P * (dP - D),  D_i = sum_j P_ij dP_ij
 *               dQ = scale dS K                dK = scale dS^T Q
 *
 *            keys ->
 *      q   D . . .      cuBLAS knows nothing of the diagonal, so the rows are cut into bands of at least 256, at most 8 of them:
 *      u   # D . .      a band's product takes the keys up to its last row (S, dP, O, dQ), a band of keys the queries from its
 *      e   # # D .      first row on (dK, dV). With 4 bands 10 of 16 squares are computed, and moved through memory.
 *      r   # # # D      D: half of it zeros, which the softmax writes
 *
 * Views. A product is asked for all heads of all sequences at once, through arrays of pointers that one small kernel lays out at
 * the start of a call. Strides and alignment may be anything; bf16 views that are not aligned to 16 bytes go head by head.
 *
 * Not-a-number. A zero above the diagonal times a NaN is a NaN, in rows that may not see it. So each input that a triangular
 * matrix multiplies is scanned for numbers that are not finite; where a head has one, repair_kernel computes the product of
 * that head again, by the pairs on and below the diagonal only. It decides on the device, so nothing waits.
 *
 * Handles. A cuBLAS handle costs milliseconds and device memory, and the contract of a kernel has no place to keep one. So
 * there is one for each device in a table, made at the first use and kept until the process ends: a cache, with a lock that
 * is held while a call queues its work. Its workspace is part of `scratch`, so that a call can be captured into a CUDA
 * graph (other than the first on a device, which makes the handle).
 *
 * Limits: memory, B * NH * T * T elements for each layer; a row stride below 2^31 elements.
 */
#include <cublas_v2.h>
#include <limits.h>
#include <pthread.h>

#include "attention/attention.h"
#include "attention/device.h"

enum {
    WARPS = 8,                      /* of a block; a warp works on a row at a time */
    MAX_DEVICES = 64,
    WORKSPACE_BYTES = 32 << 20,     /* what cuBLAS takes on sm_90 where one lets it choose */
    ALIGNMENT = 256,                /* of its parts of scratch */
    ROW_MULTIPLE = 8,               /* rows of T x T matrices are padded to it: 16 bytes of bf16 */
    BANDS_MOST = 8, BAND_LEAST = 256,
    SCAN_BLOCKS = 16,               /* for each head */
    BATCH_MOST = 32768,             /* heads in one call of cuBLAS */
    POINTERS_MOST = 2 * (1 + 2 * BANDS_MOST) + 2 * 3 * BANDS_MOST, /* arrays of pointers in a call: those of a backward */
};

/* Above this, byte counts come near the end of size_t. */
#define MAX_ELEMENTS ((double)((int64_t)1 << 56))

#define LOG2_E 1.4426950408889634
#define LN_2 0.6931471805599453f

/* --- sizes ------------------------------------------------------------------------------------------------------------- */

static size_t type_bytes(cudaDataType_t type) { return type == CUDA_R_16BF ? 2 : 4; }
static int64_t head_count(const AttentionShape *shape) { return shape->B * shape->NH; }

static int64_t padded_row(const AttentionShape *shape)
{
    return (shape->T + ROW_MULTIPLE - 1) / ROW_MULTIPLE * ROW_MULTIPLE;
}

static int64_t square_elements(const AttentionShape *shape) { return shape->T * padded_row(shape); }

/* Rows of a band, a multiple of 64 unless there is one band only. */
static int64_t band_rows(const AttentionShape *shape)
{
    int64_t rows = (shape->T + BANDS_MOST - 1) / BANDS_MOST, least = BAND_LEAST;
    rows = (rows + 63) / 64 * 64;
    return rows < least ? least : rows;
}

static cudaDataType_t data_type(const AttentionShape *shape)
{
    return shape->dtype == DTYPE_BF16 ? CUDA_R_16BF : CUDA_R_32F;
}

/* --- kernels --------------------------------------------------------------------------------------------------------- */

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ void from_float(float *to, float x) { *to = x; }
__device__ __forceinline__ void from_float(__nv_bfloat16 *to, float x) { *to = __float2bfloat16_rn(x); }

__device__ __forceinline__ float warp_max(float x)
{
#pragma unroll
    for (int step = 16; step; step >>= 1) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
    return x;
}

__device__ __forceinline__ float warp_sum(float x)
{
#pragma unroll
    for (int step = 16; step; step >>= 1) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}

/* The row of a warp: row `i` of member `member` of the group; member >= size where there is none left. */
struct Row {
    int64_t member, i;
};

__device__ __forceinline__ Row row_here(int64_t T)
{
    int64_t row = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    return {row / T, row % T};
}

/* One past the last key that row i's band computes. */
__device__ __forceinline__ int64_t band_end(int64_t i, int64_t band, int64_t T)
{
    int64_t end = (i / band + 1) * band;
    return end < T ? end : T;
}

/* Four neighbours of a row whose length is padded to ROW_MULTIPLE. */
__device__ __forceinline__ void load4(float *out, const float *in)
{
    float4 v = *(const float4 *)in;
    out[0] = v.x, out[1] = v.y, out[2] = v.z, out[3] = v.w;
}

__device__ __forceinline__ void load4(float *out, const __nv_bfloat16 *in)
{
    uint2 v = *(const uint2 *)in;
    out[0] = __uint_as_float(v.x << 16), out[1] = __uint_as_float(v.x & 0xffff0000u);
    out[2] = __uint_as_float(v.y << 16), out[3] = __uint_as_float(v.y & 0xffff0000u);
}

__device__ __forceinline__ void store4(float *out, const float *in) { *(float4 *)out = make_float4(in[0], in[1], in[2], in[3]); }

struct alignas(8) Four {
    __nv_bfloat16 v[4];
};

__device__ __forceinline__ void store4(__nv_bfloat16 *out, const float *in)
{
    Four four;
    for (int k = 0; k < 4; k++) four.v[k] = __float2bfloat16_rn(in[k]);
    *(Four *)out = four;
}

/* P and LSE (T each) from S, for size heads of `square` elements; for Real float, P may be S. A warp a row: once over it for a running
 * maximum and sum a lane, joined over the warp, and once more, from the caches, to write. */
template <typename Real>
__global__ void __launch_bounds__(32 * WARPS) softmax_kernel(Real *P, float *LSE, const float *S, int64_t square, int64_t size,
                                                             int64_t T, int64_t ld, int64_t band, float scale_log2)
{
    Row row = row_here(T);
    int lane = threadIdx.x % 32;
    if (row.member >= size) return;
    const float *s = S + row.member * square + row.i * ld;
    Real *p = P + row.member * square + row.i * ld;
    float max = -INFINITY, sum = 0;
    for (int64_t j = 4 * lane; j <= row.i; j += 128) {
        float x[4], most = max;
        load4(x, s + j);
        for (int k = 0; k < 4; k++) {
            x[k] = j + k <= row.i ? __fmul_rn(x[k], scale_log2) : -INFINITY;
            most = fmaxf(most, x[k]);
        }
        float base = most == -INFINITY ? 0.0f : most;
        sum *= exp2f(max - base);
        for (int k = 0; k < 4; k++) sum += exp2f(x[k] - base);
        max = most;
    }
    float row_max = warp_max(max), base = row_max == -INFINITY ? 0.0f : row_max; /* a row of -inf alone counts from 0 */
    float row_sum = warp_sum(sum * exp2f(max - base)), inverse = 1 / row_sum;
    int64_t end = band_end(row.i, band, T);
    for (int64_t j = 4 * lane; j < end; j += 128) {
        float x[4] = {0, 0, 0, 0};
        if (j <= row.i) load4(x, s + j);
        for (int k = 0; k < 4; k++) x[k] = j + k <= row.i ? exp2f(__fmul_rn(x[k], scale_log2) - base) * inverse : 0.0f;
        store4(p + j, x);
    }
    if (lane == 0) LSE[row.member * T + row.i] = fmaf(row_max, LN_2, logf(row_sum));
}

/* dS = P * (dP - D), zeros above the diagonal; for Real float, dS may be dP. */
template <typename Real>
__global__ void __launch_bounds__(32 * WARPS) softmax_backward_kernel(Real *dS, const float *dP, const Real *P, int64_t square,
                                                                      int64_t size, int64_t T, int64_t ld, int64_t band)
{
    Row row = row_here(T);
    int lane = threadIdx.x % 32;
    if (row.member >= size) return;
    const float *dp = dP + row.member * square + row.i * ld;
    const Real *p = P + row.member * square + row.i * ld;
    Real *ds = dS + row.member * square + row.i * ld;
    float D = 0;
    for (int64_t j = 4 * lane; j <= row.i; j += 128) {
        float x[4], y[4];
        load4(x, p + j);
        load4(y, dp + j);
        for (int k = 0; k < 4; k++)
            if (j + k <= row.i) D = fmaf(x[k], y[k], D);
    }
    D = warp_sum(D);
    int64_t end = band_end(row.i, band, T);
    for (int64_t j = 4 * lane; j < end; j += 128) {
        float x[4] = {0, 0, 0, 0}, y[4] = {0, 0, 0, 0};
        if (j <= row.i) {
            load4(x, p + j);
            load4(y, dp + j);
        }
        for (int k = 0; k < 4; k++) x[k] = j + k <= row.i ? x[k] * (y[k] - D) : 0.0f;
        store4(ds + j, x);
    }
}

/* Where a head's matrix starts, for every head of a call, in array after array. Passed to its kernel by value. */
struct PointerList {
    char *base[POINTERS_MOST];
    int64_t batch_bytes[POINTERS_MOST], head_bytes[POINTERS_MOST];
};

static_assert(sizeof(PointerList) <= 3072, "the list must fit into a kernel's 4 KB of parameters beside the other ones");

/* out[a][b*NH + h] = base[a] + b*batch_bytes[a] + h*head_bytes[a]; blockIdx.y is a. */
__global__ void pointers_kernel(char **out, PointerList list, int64_t heads, int64_t NH)
{
    int64_t z = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, a = blockIdx.y;
    if (z < heads) out[a * heads + z] = list.base[a] + z / NH * list.batch_bytes[a] + z % NH * list.head_bytes[a];
}

/* A tensor that may hold numbers that are not finite. */
template <typename Real>
struct Strided {
    const Real *data;
    int64_t batch, row, head; /* strides */
};

/* found[z] = 1 where head z of X (B, NH, T, HS) has a number in it that is not finite; else left alone. SCAN_BLOCKS blocks a head, a
 * warp a row; several may write the same 1. */
template <typename Real>
__global__ void __launch_bounds__(32 * WARPS) scan_kernel(int *found, Strided<Real> X, int64_t NH, int64_t T, int64_t HS)
{
    int64_t z = blockIdx.x / SCAN_BLOCKS;
    const Real *x = X.data + z / NH * X.batch + z % NH * X.head;
    int mine = 0;
    for (int64_t t = blockIdx.x % SCAN_BLOCKS * WARPS + threadIdx.x / 32; t < T; t += SCAN_BLOCKS * WARPS)
        for (int64_t d = threadIdx.x % 32; d < HS; d += 32) mine |= !isfinite(to_float(x[t * X.row + d]));
    if (__syncthreads_or(mine) && threadIdx.x == 0) found[z] = 1;
}

/* Where found[z]: out row i (HS) = alpha * sum over j of W(i, j) * X row j, where W(i, j) is W[i][j] for j <= i, or, if
 * `transposed`, W[j][i] for j >= i. A block a head, a warp a row. */
template <typename Real>
__global__ void __launch_bounds__(32 * WARPS) repair_kernel(const int *found, Real *out, Strided<Real> view, const Real *W, int64_t square,
                                                            int64_t ld, Strided<Real> X, int64_t NH, int64_t T, int64_t HS, float alpha,
                                                            int transposed)
{
    int64_t z = blockIdx.x;
    if (!found[z]) return;
    const Real *w = W + z * square, *x = X.data + z / NH * X.batch + z % NH * X.head;
    Real *o = out + z / NH * view.batch + z % NH * view.head;
    for (int64_t i = threadIdx.x / 32; i < T; i += WARPS)
        for (int64_t d = threadIdx.x % 32; d < HS; d += 32) {
            float sum = 0;
            for (int64_t j = transposed ? i : 0; j < (transposed ? T : i + 1); j++)
                sum = fmaf(to_float(transposed ? w[j * ld + i] : w[i * ld + j]), to_float(x[j * X.row + d]), sum);
            from_float(o + i * view.row + d, sum * alpha);
        }
}

/* --- the library ----------------------------------------------------------------------------------------------------- */

static struct {
    pthread_mutex_t lock;
    cublasHandle_t handles[MAX_DEVICES];
} library = {PTHREAD_MUTEX_INITIALIZER, {NULL}};

/* A matrix of every head: where head 0 of sequence 0 has it, and the strides in elements. */
typedef struct Matrices {
    void *data;
    cudaDataType_t type;
    int64_t batch, row, head;
    int slot; /* its array of pointers, once it has one */
} Matrices;

/* A call under way: everything its steps share, and what went wrong first. */
typedef struct Work {
    const AttentionShape *shape;
    cublasHandle_t handle;
    cudaStream_t stream;
    float *squares;     /* scratch (B, NH, T, padded T) fp32: S, dP */
    void *rounded;      /* scratch, of the type: dS. The same memory for fp32. */
    char **pointers;    /* scratch (POINTERS_MOST, B * NH) */
    int *found;         /* scratch (B * NH) */
    void *workspace;
    PointerList list;
    int slots;          /* arrays of the list in use */
    const char *error;
} Work;

static void note_cuda(Work *work, cudaError_t error)
{
    if (error != cudaSuccess && !work->error) work->error = cudaGetErrorString(error);
}

static void note_blas(Work *work, cublasStatus_t status)
{
    if (status != CUBLAS_STATUS_SUCCESS && !work->error) work->error = cublasGetStatusString(status);
}

/* The handle of the current device, made if this is its first use. Called with the lock held. */
static void handle_find(Work *work)
{
    int device = 0;
    note_cuda(work, cudaGetDevice(&device));
    if (!work->error && device >= MAX_DEVICES) work->error = "cublas attention knows the first 64 GPUs only";
    if (work->error) return;
    if (!library.handles[device]) {
        cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
        note_cuda(work, cudaStreamIsCapturing(work->stream, &capture));
        if (!work->error && capture != cudaStreamCaptureStatusNone)
            work->error = "the first call of cublas attention on a GPU cannot be captured into a graph";
        if (!work->error) note_blas(work, cublasCreate(&library.handles[device]));
    }
    work->handle = library.handles[device];
    if (work->error) return;
    note_blas(work, cublasSetStream(work->handle, work->stream));
    note_blas(work, cublasSetWorkspace(work->handle, work->workspace, WORKSPACE_BYTES));
    /* CUBLAS_COMPUTE_32F then is fp32 throughout: no TF32, and no bf16 sums of partial products. */
    note_blas(work, cublasSetMathMode(work->handle, (cublasMath_t)(CUBLAS_DEFAULT_MATH |
                                                                   CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION)));
}

static size_t align_up(size_t bytes) { return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT; }

/* Lays out scratch from `base` on; returns its bytes. */
static size_t work_layout(Work *work, uintptr_t base)
{
    const AttentionShape *shape = work->shape;
    size_t heads = (size_t)head_count(shape), elements = heads * (size_t)square_elements(shape);
    uintptr_t at = base;
    work->workspace = (void *)at;
    at += WORKSPACE_BYTES;
    work->squares = (float *)at;
    work->rounded = work->squares;
    at += align_up(elements * sizeof(float));
    if (shape->dtype == DTYPE_BF16) {
        work->rounded = (void *)at;
        at += align_up(elements * 2);
    }
    work->pointers = (char **)at;
    at += align_up(heads * POINTERS_MOST * sizeof(char *));
    work->found = (int *)at;
    return at + align_up(heads * sizeof(int)) - base;
}

/* Takes the lock; work_close gives it back. */
static void work_open(Work *work, void *scratch, const AttentionShape *shape, void *stream)
{
    work->shape = shape;
    work->stream = (cudaStream_t)stream;
    work->error = NULL;
    work->handle = NULL;
    work->slots = 0;
    work_layout(work, align_up((uintptr_t)scratch));
    pthread_mutex_lock(&library.lock);
    handle_find(work);
}

static const char *work_close(Work *work)
{
    pthread_mutex_unlock(&library.lock);
    return work->error;
}

/* --- matrices of all heads ------------------------------------------------------------------------------------------------ */

static Matrices matrices(const void *data, cudaDataType_t type, int64_t batch, int64_t row, int64_t head)
{
    return {(void *)data, type, batch, row, head, -1};
}

static Matrices matrices_in(AttentionInput view, const AttentionShape *shape)
{
    /* One row has no next: its stride may be anything, but cuBLAS wants it to span the row. */
    int64_t row = shape->T == 1 && view.row_stride < shape->HS ? shape->HS : view.row_stride;
    return matrices(view.data, data_type(shape), view.batch_stride, row, view.head_stride);
}

static Matrices matrices_out(AttentionOutput view, const AttentionShape *shape)
{
    return matrices_in({view.data, view.batch_stride, view.row_stride, view.head_stride}, shape);
}

/* (B, NH, T, padded T) */
static Matrices matrices_square(const void *data, cudaDataType_t type, const AttentionShape *shape)
{
    int64_t square = square_elements(shape);
    return matrices(data, type, shape->NH * square, padded_row(shape), square);
}

/* The same matrices from a row and a column on, with an array of pointers of their own, which pointers_write fills. */
static Matrices matrices_from(Work *work, Matrices m, int64_t row, int64_t column)
{
    int64_t bytes = (int64_t)type_bytes(m.type);
    if (work->slots == POINTERS_MOST) work->error = "cublas attention has more products than it has room for";
    if (work->error) return m;
    m.data = (char *)m.data + (row * m.row + column) * bytes;
    m.slot = work->slots++;
    work->list.base[m.slot] = (char *)m.data;
    work->list.batch_bytes[m.slot] = m.batch * bytes;
    work->list.head_bytes[m.slot] = m.head * bytes;
    return m;
}

/* Fills the arrays of all matrices_from so far. */
static void pointers_write(Work *work)
{
    int64_t heads = head_count(work->shape);
    if (work->error) return;
    note_cuda(work, kernel_launch(pointers_kernel, dim3((unsigned)((heads + 255) / 256), (unsigned)work->slots), dim3(256), 0, work->stream,
                                  work->pointers, work->list, heads, work->shape->NH));
}

/* Is every head's matrix aligned as the tensor cores want it? The library cannot look at pointers that lie on the device, and takes them
 * for aligned. */
static int is_aligned(Matrices m)
{
    int64_t bytes = (int64_t)type_bytes(m.type), bits = (int64_t)(uintptr_t)m.data | m.row * bytes | m.batch * bytes | m.head * bytes;
    return m.type != CUDA_R_16BF || bits % 16 == 0;
}

/* Head z's matrix. */
static char *head_at(Matrices m, int64_t z, int64_t NH)
{
    return (char *)m.data + (z / NH * m.batch + z % NH * m.head) * (int64_t)type_bytes(m.type);
}

/* The product below, head by head: slow, but the library sees each pointer. For bf16 views that are not aligned. */
static void multiply_heads(Work *work, Matrices C, Matrices A, cublasOperation_t op_a, Matrices B, cublasOperation_t op_b, int64_t m,
                           int64_t n, int64_t k, float alpha)
{
    const float zero = 0;
    int64_t heads = head_count(work->shape), NH = work->shape->NH;
    for (int64_t z = 0; z < heads && !work->error; z++)
        note_blas(work, cublasGemmEx(work->handle, op_a, op_b, (int)m, (int)n, (int)k, &alpha, head_at(A, z, NH), A.type, (int)A.row,
                                     head_at(B, z, NH), B.type, (int)B.row, &zero, head_at(C, z, NH), C.type, (int)C.row,
                                     CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
}

/* For each head, in column-major terms: C (m, n) = alpha * op(A) (m, k) * op(B) (k, n). */
static void multiply(Work *work, Matrices C, Matrices A, cublasOperation_t op_a, Matrices B, cublasOperation_t op_b, int64_t m, int64_t n,
                     int64_t k, float alpha)
{
    const float zero = 0;
    int64_t heads = head_count(work->shape), most = BATCH_MOST;
    if (A.row > INT_MAX || B.row > INT_MAX || C.row > INT_MAX) work->error = "cublas attention takes row strides below 2^31 elements only";
    if (!work->error && !(is_aligned(A) && is_aligned(B) && is_aligned(C))) {
        multiply_heads(work, C, A, op_a, B, op_b, m, n, k, alpha);
        return;
    }
    for (int64_t first = 0; first < heads && !work->error; first += most) {
        int count = (int)(heads - first < most ? heads - first : most);
        const void *const *a = (const void *const *)(work->pointers + A.slot * heads + first);
        const void *const *b = (const void *const *)(work->pointers + B.slot * heads + first);
        void *const *c = (void *const *)(work->pointers + C.slot * heads + first);
        note_blas(work, cublasGemmBatchedEx(work->handle, op_a, op_b, (int)m, (int)n, (int)k, &alpha, a, A.type, (int)A.row, b, B.type,
                                            (int)B.row, &zero, c, C.type, (int)C.row, count, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
    }
}

/* What a band's products take. */
typedef struct Bands {
    int count;
    int64_t first[BANDS_MOST], end[BANDS_MOST];
} Bands;

static Bands bands_of(const AttentionShape *shape)
{
    Bands bands;
    int64_t rows = band_rows(shape);
    bands.count = 0;
    for (int64_t first = 0; first < shape->T; first += rows) {
        bands.first[bands.count] = first;
        bands.end[bands.count++] = first + rows < shape->T ? first + rows : shape->T;
    }
    return bands;
}

/* A product of all bands: its matrices, made by the *_plan functions before pointers_write, multiplied by the *_run functions after it. */
typedef struct Product {
    Matrices C[BANDS_MOST], A[BANDS_MOST], B[BANDS_MOST];
} Product;

/* C (T, T) = X Y^T on and below the diagonal, for X, Y (T, HS). */
static void plan_rows(Work *work, Product *product, const Bands *bands, Matrices C, Matrices X, Matrices Y)
{
    Matrices keys = matrices_from(work, Y, 0, 0);
    for (int r = 0; r < bands->count; r++) {
        product->A[r] = keys;
        product->B[r] = matrices_from(work, X, bands->first[r], 0);
        product->C[r] = matrices_from(work, C, bands->first[r], 0);
    }
}

static void run_rows(Work *work, const Product *product, const Bands *bands)
{
    for (int r = 0; r < bands->count; r++)
        multiply(work, product->C[r], product->A[r], CUBLAS_OP_T, product->B[r], CUBLAS_OP_N, bands->end[r],
                 bands->end[r] - bands->first[r], work->shape->HS, 1);
}

/* out (T, HS) = W X for W (T, T) lower triangular and X (T, HS). */
static void plan_triangle(Work *work, Product *product, const Bands *bands, Matrices out, Matrices W, Matrices X)
{
    Matrices whole = matrices_from(work, X, 0, 0);
    for (int r = 0; r < bands->count; r++) {
        product->A[r] = whole;
        product->B[r] = matrices_from(work, W, bands->first[r], 0);
        product->C[r] = matrices_from(work, out, bands->first[r], 0);
    }
}

static void run_triangle(Work *work, const Product *product, const Bands *bands, float alpha)
{
    for (int r = 0; r < bands->count; r++)
        multiply(work, product->C[r], product->A[r], CUBLAS_OP_N, product->B[r], CUBLAS_OP_N, work->shape->HS,
                 bands->end[r] - bands->first[r], bands->end[r], alpha);
}

/* out (T, HS) = W^T X, likewise. */
static void plan_transposed(Work *work, Product *product, const Bands *bands, Matrices out, Matrices W, Matrices X)
{
    for (int r = 0; r < bands->count; r++) {
        product->A[r] = matrices_from(work, X, bands->first[r], 0);
        product->B[r] = matrices_from(work, W, bands->first[r], bands->first[r]);
        product->C[r] = matrices_from(work, out, bands->first[r], 0);
    }
}

static void run_transposed(Work *work, const Product *product, const Bands *bands, float alpha)
{
    for (int r = 0; r < bands->count; r++)
        multiply(work, product->C[r], product->A[r], CUBLAS_OP_N, product->B[r], CUBLAS_OP_T, work->shape->HS,
                 bands->end[r] - bands->first[r], work->shape->T - bands->first[r], alpha);
}

/* --- kernels over all heads -------------------------------------------------------------------------------------------------- */

template <typename Real>
static Strided<Real> strided(Matrices m) { return {(const Real *)m.data, m.batch, m.row, m.head}; }

/* Computes out anew in heads where X is not finite throughout. */
template <typename Real>
static void repair_as(Work *work, Matrices out, Matrices W, Matrices X, int transposed, float alpha)
{
    const AttentionShape *s = work->shape;
    dim3 grid((unsigned)head_count(s)), scan_grid((unsigned)head_count(s) * SCAN_BLOCKS), block(32 * WARPS);
    note_cuda(work, cudaMemsetAsync(work->found, 0, (size_t)head_count(s) * sizeof(int), work->stream));
    note_cuda(work, kernel_launch(scan_kernel<Real>, scan_grid, block, 0, work->stream, work->found, strided<Real>(X), s->NH, s->T, s->HS));
    note_cuda(work, kernel_launch(repair_kernel<Real>, grid, block, 0, work->stream, (const int *)work->found, (Real *)out.data,
                                  strided<Real>(out), (const Real *)W.data, square_elements(s), W.row, strided<Real>(X), s->NH, s->T, s->HS,
                                  alpha, transposed));
}

static void repair(Work *work, Matrices out, Matrices W, Matrices X, int transposed, float alpha)
{
    if (work->error) return;
    if (work->shape->dtype == DTYPE_BF16) repair_as<__nv_bfloat16>(work, out, W, X, transposed, alpha);
    else repair_as<float>(work, out, W, X, transposed, alpha);
}

static dim3 row_grid(const AttentionShape *shape) { return dim3((unsigned)((head_count(shape) * shape->T + WARPS - 1) / WARPS)); }

template <typename Real>
static void softmax(Work *work, void *P, float *LSE, const void *S)
{
    const AttentionShape *s = work->shape;
    if (work->error) return;
    note_cuda(work, kernel_launch(softmax_kernel<Real>, row_grid(s), dim3(32 * WARPS), 0, work->stream, (Real *)P, LSE, (const float *)S,
                                  square_elements(s), head_count(s), s->T, padded_row(s), band_rows(s),
                                  (float)((double)s->scale * LOG2_E)));
}

template <typename Real>
static void softmax_backward(Work *work, const void *P)
{
    const AttentionShape *s = work->shape;
    if (work->error) return;
    note_cuda(work, kernel_launch(softmax_backward_kernel<Real>, row_grid(s), dim3(32 * WARPS), 0, work->stream, (Real *)work->rounded,
                                  (const float *)work->squares, (const Real *)P, square_elements(s), head_count(s), s->T, padded_row(s),
                                  band_rows(s)));
}

/* --- the table entry ------------------------------------------------------------------------------------------------- */

static const char *cublas_refuse(const AttentionShape *shape, int sm)
{
    if (sm < 75) return "needs sm_75 or later";
    if (shape->dtype != DTYPE_FP32 && shape->dtype != DTYPE_BF16) return "takes fp32 and bf16 only";
    if (shape->dtype == DTYPE_BF16 && sm < 80) return "needs sm_80 or later for bf16";
    if (shape->HS < 1 || shape->HS > INT_MAX) return "needs a head dimension of at least 1";
    if ((double)shape->B * (double)shape->NH * (double)shape->T * ((double)shape->T + ROW_MULTIPLE) > MAX_ELEMENTS)
        return "keeps B*NH*T*T elements: more than 2^56";
    if ((double)shape->B * (double)shape->NH * (double)shape->T / WARPS > INT_MAX) return "needs B*NH*T below 2^34";
    return NULL;
}

static int is_empty(const AttentionShape *shape) { return shape->B == 0 || shape->T == 0 || shape->NH == 0; }

static size_t cublas_saved_bytes(const AttentionShape *shape)
{
    return (size_t)(head_count(shape) * square_elements(shape)) * type_bytes(data_type(shape)) + ALIGNMENT;
}

static size_t cublas_scratch_bytes(const AttentionShape *shape)
{
    Work work;
    if (is_empty(shape)) return 0;
    work.shape = shape;
    return work_layout(&work, 0) + ALIGNMENT;
}

/* P in `saved`, whose packs of four must be aligned. */
static void *saved_probabilities(const void *saved) { return (void *)align_up((uintptr_t)saved); }

static const char *cublas_forward(AttentionOutput O, float *LSE, void *saved, void *scratch, AttentionInput Q,
                                  AttentionInput K, AttentionInput V, const AttentionShape *shape, void *stream)
{
    Work work;
    Product logits, output;
    if (is_empty(shape)) return NULL;
    work_open(&work, scratch, shape, stream);
    Bands bands = bands_of(shape);
    int bf16 = shape->dtype == DTYPE_BF16;
    void *p = saved_probabilities(saved), *s = bf16 ? work.squares : p;
    Matrices P = matrices_square(p, data_type(shape), shape), values = matrices_in(V, shape), out = matrices_out(O, shape);
    plan_rows(&work, &logits, &bands, matrices_square(s, CUDA_R_32F, shape), matrices_in(Q, shape), matrices_in(K, shape));
    plan_triangle(&work, &output, &bands, out, P, values);
    pointers_write(&work);
    run_rows(&work, &logits, &bands);
    if (bf16) softmax<__nv_bfloat16>(&work, p, LSE, s);
    else softmax<float>(&work, p, LSE, s);
    run_triangle(&work, &output, &bands, 1);
    repair(&work, out, P, values, 0, 1);
    return work_close(&work);
}

static const char *cublas_backward(AttentionOutput dQ, AttentionOutput dK, AttentionOutput dV, void *scratch,
                                   AttentionInput dO, AttentionInput Q, AttentionInput K, AttentionInput V,
                                   AttentionInput O, const float *LSE, const void *saved, const AttentionShape *shape,
                                   void *stream)
{
    Work work;
    Product gradient, queries, keys, values;
    (void)O, (void)LSE;
    if (is_empty(shape)) return NULL;
    work_open(&work, scratch, shape, stream);
    Bands bands = bands_of(shape);
    void *p = saved_probabilities(saved);
    Matrices P = matrices_square(p, data_type(shape), shape), dP = matrices_square(work.squares, CUDA_R_32F, shape);
    Matrices dS = matrices_square(work.rounded, data_type(shape), shape), dout = matrices_in(dO, shape);
    Matrices q = matrices_in(Q, shape), k = matrices_in(K, shape);
    Matrices dq = matrices_out(dQ, shape), dk = matrices_out(dK, shape), dv = matrices_out(dV, shape);
    plan_rows(&work, &gradient, &bands, dP, dout, matrices_in(V, shape));
    plan_triangle(&work, &queries, &bands, dq, dS, k);
    plan_transposed(&work, &keys, &bands, dk, dS, q);
    plan_transposed(&work, &values, &bands, dv, P, dout);
    pointers_write(&work);
    run_transposed(&work, &values, &bands, 1);
    repair(&work, dv, P, dout, 1, 1);
    run_rows(&work, &gradient, &bands);
    if (shape->dtype == DTYPE_BF16) softmax_backward<__nv_bfloat16>(&work, p);
    else softmax_backward<float>(&work, p);
    run_triangle(&work, &queries, &bands, shape->scale);
    repair(&work, dq, dS, k, 0, shape->scale);
    run_transposed(&work, &keys, &bands, shape->scale);
    repair(&work, dk, dS, q, 1, shape->scale);
    return work_close(&work);
}

extern "C" const AttentionKernel attention_cublas = {
    ATTENTION_ABI,
    ATTENTION_CUDA,
    "cublas",
    "products by cuBLAS around a softmax, T x T matrices in memory: the yardstick",
    cublas_refuse,
    cublas_saved_bytes,
    cublas_scratch_bytes,
    cublas_forward,
    cublas_backward,
};
