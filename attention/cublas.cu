/* cublas.cu - attention as matrix products of cuBLAS around a softmax kernel: the yardstick of the tiled versions.
 *
 * The algorithm. All T x T logits of a group of heads are computed and stored, then turned into P row by row, then
 * multiplied on. P stays in `saved` for the backward, in the type of the inputs; logits and dP, in fp32 whatever the type,
 * live in scratch. Everything is row-major here and column-major in cuBLAS, so it is told of each product's transpose:
 *
 *     forward   S = Q K^T      P = softmax(scale S)       O = P V
 *     backward  dV = P^T dO    dP = dO V^T     dS = P * (dP - D),  D_i = sum_j P_ij dP_ij
 *               dQ = scale dS K                dK = scale dS^T Q
 *
 *        j ->
 *      i # 0 0 0     the products know nothing of the diagonal: they compute all of S and dP, and multiply the zeros
 *      | # # 0 0     that the softmax writes above it. Twice the work of a causal kernel, and T x T numbers moved
 *      v # # # 0     through memory four times forward and seven times backward.
 *        # # # #
 *
 * Views. A strided batch of cuBLAS runs over one stride. Where there are more heads than sequences a batch is the heads of
 * one sequence, else one head of all sequences; the other index is a loop. Strides and alignment may be anything.
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
    REPAIR_BLOCKS = 32,             /* for each head */
    MAX_DEVICES = 64,
    WORKSPACE_BYTES = 32 << 20,     /* what cuBLAS takes on sm_90 where one lets it choose */
    ALIGNMENT = 256,                /* of its parts of scratch */
    ROW_MULTIPLE = 8,               /* rows of T x T matrices are padded to it: 16 bytes of bf16 */
};

/* Above this, byte counts come near the end of size_t. */
#define MAX_ELEMENTS ((double)((int64_t)1 << 56))

#define LOG2_E 1.4426950408889634
#define LN_2 0.6931471805599453f

/* --- a group of heads ------------------------------------------------------------------------------------------------ */

/* `count` matrices, `stride` elements apart, with rows `ld` elements apart. */
typedef struct Batch {
    void *data;
    cudaDataType_t type;
    int64_t ld, stride;
} Batch;

static size_t type_bytes(cudaDataType_t type) { return type == CUDA_R_16BF ? 2 : 4; }

/* Where there are more heads than sequences, or as many, a group is a sequence. */
static int groups_are_sequences(const AttentionShape *shape) { return shape->NH >= shape->B; }
static int64_t group_count(const AttentionShape *shape) { return groups_are_sequences(shape) ? shape->B : shape->NH; }
static int64_t group_size(const AttentionShape *shape) { return groups_are_sequences(shape) ? shape->NH : shape->B; }

static int64_t padded_row(const AttentionShape *shape)
{
    return (shape->T + ROW_MULTIPLE - 1) / ROW_MULTIPLE * ROW_MULTIPLE;
}

static int64_t square_elements(const AttentionShape *shape) { return shape->T * padded_row(shape); }

static cudaDataType_t data_type(const AttentionShape *shape)
{
    return shape->dtype == DTYPE_BF16 ? CUDA_R_16BF : CUDA_R_32F;
}

static Batch batch_of(const void *data, cudaDataType_t type, int64_t batch_stride, int64_t row_stride, int64_t head_stride,
                      int64_t group, const AttentionShape *shape)
{
    int sequences = groups_are_sequences(shape);
    int64_t outer = sequences ? batch_stride : head_stride, inner = sequences ? head_stride : batch_stride;
    /* One row has no next: its stride may be anything, but cuBLAS wants it to span the row. */
    int64_t ld = shape->T == 1 && row_stride < shape->HS ? shape->HS : row_stride;
    return {(char *)data + group * outer * (int64_t)type_bytes(type), type, ld, inner};
}

static Batch batch_in(AttentionInput view, int64_t group, const AttentionShape *shape)
{
    return batch_of(view.data, data_type(shape), view.batch_stride, view.row_stride, view.head_stride, group, shape);
}

static Batch batch_out(AttentionOutput view, int64_t group, const AttentionShape *shape)
{
    return batch_of(view.data, data_type(shape), view.batch_stride, view.row_stride, view.head_stride, group, shape);
}

/* P in `saved` (B, NH, T, padded T). */
static Batch batch_saved(const void *saved, int64_t group, const AttentionShape *shape)
{
    int64_t square = square_elements(shape);
    Batch P = batch_of(saved, data_type(shape), shape->NH * square, 0, square, group, shape);
    P.ld = padded_row(shape);
    return P;
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

/* P (size, T, T) and LSE (T each) from S (size, T, T) fp32; for Real float, P may be S. */
template <typename Real>
__global__ void __launch_bounds__(32 * WARPS) softmax_kernel(Real *P, int64_t P_stride, float *LSE, int64_t LSE_stride,
                                                             const float *S, int64_t S_stride, int64_t size, int64_t T,
                                                             int64_t ld, float scale_log2)
{
    Row row = row_here(T);
    int lane = threadIdx.x % 32;
    if (row.member >= size) return;
    const float *s = S + row.member * S_stride + row.i * ld;
    Real *p = P + row.member * P_stride + row.i * ld;
    float max = -INFINITY, sum = 0;
    for (int64_t j = lane; j <= row.i; j += 32) max = fmaxf(max, __fmul_rn(s[j], scale_log2));
    max = warp_max(max);
    float base = max == -INFINITY ? 0.0f : max; /* a row of -inf alone counts from 0 */
    for (int64_t j = lane; j <= row.i; j += 32) sum += exp2f(__fmul_rn(s[j], scale_log2) - base);
    sum = warp_sum(sum);
    float inverse = 1 / sum;
    for (int64_t j = lane; j < T; j += 32)
        from_float(p + j, j <= row.i ? exp2f(__fmul_rn(s[j], scale_log2) - base) * inverse : 0.0f);
    if (lane == 0) LSE[row.member * LSE_stride + row.i] = fmaf(max, LN_2, logf(sum));
}

/* dS (size, T, T) = P * (dP - D), zeros above the diagonal; for Real float, dS may be dP. */
template <typename Real>
__global__ void __launch_bounds__(32 * WARPS) softmax_backward_kernel(Real *dS, const float *dP, int64_t square,
                                                                      const Real *P, int64_t P_stride, int64_t size,
                                                                      int64_t T, int64_t ld)
{
    Row row = row_here(T);
    int lane = threadIdx.x % 32;
    if (row.member >= size) return;
    const float *dp = dP + row.member * square + row.i * ld;
    const Real *p = P + row.member * P_stride + row.i * ld;
    Real *ds = dS + row.member * square + row.i * ld;
    float D = 0;
    for (int64_t j = lane; j <= row.i; j += 32) D = fmaf(to_float(p[j]), dp[j], D);
    D = warp_sum(D);
    for (int64_t j = lane; j < T; j += 32) from_float(ds + j, j <= row.i ? to_float(p[j]) * (dp[j] - D) : 0.0f);
}

/* found[member] = whether X (size, T, HS) has a number in it that is not finite. A block for each member. */
template <typename Real>
__global__ void __launch_bounds__(32 * WARPS) scan_kernel(int *found, const Real *X, int64_t X_stride, int64_t X_ld,
                                                          int64_t T, int64_t HS)
{
    const Real *x = X + blockIdx.x * X_stride;
    int mine = 0;
    for (int64_t k = threadIdx.x; k < T * HS; k += 32 * WARPS) mine |= !isfinite(to_float(x[k / HS * X_ld + k % HS]));
    int any = __syncthreads_or(mine);
    if (threadIdx.x == 0) found[blockIdx.x] = any;
}

/* Where found[member]: out row i (HS) = alpha * sum over j of W(i, j) * X row j, where W(i, j) is W[i][j] for j <= i, or, if
 * `transposed`, W[j][i] for j >= i. REPAIR_BLOCKS blocks for each member; a warp for a row. */
template <typename Real>
__global__ void __launch_bounds__(32 * WARPS) repair_kernel(const int *found, Real *out, int64_t out_stride, int64_t out_ld,
                                                            const Real *W, int64_t W_stride, int64_t W_ld, const Real *X,
                                                            int64_t X_stride, int64_t X_ld, int64_t T, int64_t HS,
                                                            float alpha, int transposed)
{
    int64_t member = blockIdx.x / REPAIR_BLOCKS, first = blockIdx.x % REPAIR_BLOCKS * WARPS + threadIdx.x / 32;
    if (!found[member]) return;
    const Real *w = W + member * W_stride, *x = X + member * X_stride;
    for (int64_t i = first; i < T; i += REPAIR_BLOCKS * WARPS)
        for (int64_t d = threadIdx.x % 32; d < HS; d += 32) {
            float sum = 0;
            for (int64_t j = transposed ? i : 0; j < (transposed ? T : i + 1); j++)
                sum = fmaf(to_float(transposed ? w[j * W_ld + i] : w[i * W_ld + j]), to_float(x[j * X_ld + d]), sum);
            from_float(out + member * out_stride + i * out_ld + d, sum * alpha);
        }
}

/* --- the library ----------------------------------------------------------------------------------------------------- */

static struct {
    pthread_mutex_t lock;
    cublasHandle_t handles[MAX_DEVICES];
} library = {PTHREAD_MUTEX_INITIALIZER, {NULL}};

/* A call under way: everything its steps share, and what went wrong first. */
typedef struct Work {
    const AttentionShape *shape;
    cublasHandle_t handle;
    cudaStream_t stream;
    int64_t size;       /* members of a group */
    float *squares;     /* scratch (size, T, padded T) fp32: S, dP */
    void *rounded;      /* scratch, of the type: dS. The same memory for fp32. */
    int *found;         /* scratch (size) */
    void *workspace;
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
    size_t elements = (size_t)(work->size * square_elements(work->shape));
    uintptr_t at = base;
    work->workspace = (void *)at;
    at += WORKSPACE_BYTES;
    work->squares = (float *)at;
    work->rounded = work->squares;
    at += align_up(elements * sizeof(float));
    if (work->shape->dtype == DTYPE_BF16) {
        work->rounded = (void *)at;
        at += align_up(elements * 2);
    }
    work->found = (int *)at;
    return at + align_up((size_t)work->size * sizeof(int)) - base;
}

/* Takes the lock; work_close gives it back. */
static void work_open(Work *work, void *scratch, const AttentionShape *shape, void *stream)
{
    work->shape = shape;
    work->stream = (cudaStream_t)stream;
    work->size = group_size(shape);
    work->error = NULL;
    work->handle = NULL;
    work_layout(work, align_up((uintptr_t)scratch));
    pthread_mutex_lock(&library.lock);
    handle_find(work);
}

static const char *work_close(Work *work)
{
    pthread_mutex_unlock(&library.lock);
    return work->error;
}

static Batch batch_squares(const Work *work)
{
    return {work->squares, CUDA_R_32F, padded_row(work->shape), square_elements(work->shape)};
}

static Batch batch_rounded(const Work *work)
{
    return {work->rounded, data_type(work->shape), padded_row(work->shape), square_elements(work->shape)};
}

/* For each member, in column-major terms: C (m, n) = alpha * op(A) (m, k) * op(B) (k, n). */
static void multiply(Work *work, Batch C, Batch A, cublasOperation_t op_a, Batch B, cublasOperation_t op_b, int64_t m,
                     int64_t n, int64_t k, float alpha)
{
    const float zero = 0;
    if (A.ld > INT_MAX || B.ld > INT_MAX || C.ld > INT_MAX)
        work->error = "cublas attention takes row strides below 2^31 elements only";
    if (work->error) return;
    note_blas(work, cublasGemmStridedBatchedEx(work->handle, op_a, op_b, (int)m, (int)n, (int)k, &alpha, A.data, A.type,
                                               (int)A.ld, A.stride, B.data, B.type, (int)B.ld, B.stride, &zero, C.data,
                                               C.type, (int)C.ld, C.stride, (int)work->size, CUBLAS_COMPUTE_32F,
                                               CUBLAS_GEMM_DEFAULT));
}

/* C (T, T) = X Y^T for X, Y (T, HS) */
static void multiply_rows(Work *work, Batch C, Batch X, Batch Y)
{
    int64_t T = work->shape->T, HS = work->shape->HS;
    multiply(work, C, Y, CUBLAS_OP_T, X, CUBLAS_OP_N, T, T, HS, 1);
}

template <typename Real>
static void repair(Work *work, Batch out, Batch W, Batch X, int transposed, float alpha)
{
    int64_t T = work->shape->T, HS = work->shape->HS;
    if (work->error) return;
    note_cuda(work, kernel_launch(scan_kernel<Real>, dim3((unsigned)work->size), dim3(32 * WARPS), 0, work->stream,
                                  work->found, (const Real *)X.data, X.stride, X.ld, T, HS));
    note_cuda(work, kernel_launch(repair_kernel<Real>, dim3((unsigned)work->size * REPAIR_BLOCKS), dim3(32 * WARPS), 0,
                                  work->stream, work->found, (Real *)out.data, out.stride, out.ld, (const Real *)W.data,
                                  W.stride, W.ld, (const Real *)X.data, X.stride, X.ld, T, HS, alpha, transposed));
}

/* out (T, HS) = alpha * W X, or with `transposed` alpha * W^T X, for W (T, T) lower triangular and X (T, HS) */
static void multiply_triangle(Work *work, Batch out, Batch W, Batch X, int transposed, float alpha)
{
    int64_t T = work->shape->T, HS = work->shape->HS;
    multiply(work, out, X, CUBLAS_OP_N, W, transposed ? CUBLAS_OP_T : CUBLAS_OP_N, HS, T, T, alpha);
    if (work->shape->dtype == DTYPE_BF16) repair<__nv_bfloat16>(work, out, W, X, transposed, alpha);
    else repair<float>(work, out, W, X, transposed, alpha);
}

/* --- the softmax ----------------------------------------------------------------------------------------------------- */

static dim3 row_grid(const Work *work) { return dim3((unsigned)((work->size * work->shape->T + WARPS - 1) / WARPS)); }

template <typename Real>
static void softmax(Work *work, Batch P, float *LSE, int64_t LSE_stride, Batch S)
{
    if (work->error) return;
    note_cuda(work, kernel_launch(softmax_kernel<Real>, row_grid(work), dim3(32 * WARPS), 0, work->stream, (Real *)P.data,
                                  P.stride, LSE, LSE_stride, (const float *)S.data, S.stride, work->size, work->shape->T,
                                  P.ld, (float)((double)work->shape->scale * LOG2_E)));
}

template <typename Real>
static void softmax_backward(Work *work, Batch dS, Batch dP, Batch P)
{
    if (work->error) return;
    note_cuda(work, kernel_launch(softmax_backward_kernel<Real>, row_grid(work), dim3(32 * WARPS), 0, work->stream,
                                  (Real *)dS.data, (const float *)dP.data, dP.stride, (const Real *)P.data, P.stride,
                                  work->size, work->shape->T, P.ld));
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
    if (group_size(shape) > INT_MAX / REPAIR_BLOCKS) return "needs B and NH below 2^26";
    if ((double)group_size(shape) * (double)shape->T / WARPS > INT_MAX) return "needs max(B,NH)*T below 2^34";
    return NULL;
}

static int is_empty(const AttentionShape *shape) { return shape->B == 0 || shape->T == 0 || shape->NH == 0; }

static size_t cublas_saved_bytes(const AttentionShape *shape)
{
    return (size_t)(shape->B * shape->NH * square_elements(shape)) * type_bytes(data_type(shape));
}

static size_t cublas_scratch_bytes(const AttentionShape *shape)
{
    Work work;
    if (is_empty(shape)) return 0;
    work.shape = shape;
    work.size = group_size(shape);
    return work_layout(&work, 0) + ALIGNMENT;
}

static const char *cublas_forward(AttentionOutput O, float *LSE, void *saved, void *scratch, AttentionInput Q,
                                  AttentionInput K, AttentionInput V, const AttentionShape *shape, void *stream)
{
    Work work;
    if (is_empty(shape)) return NULL;
    int sequences = groups_are_sequences(shape);
    int64_t outer = sequences ? shape->NH * shape->T : shape->T, inner = sequences ? shape->T : shape->NH * shape->T;
    work_open(&work, scratch, shape, stream);
    for (int64_t group = 0; group < group_count(shape) && !work.error; group++) {
        Batch P = batch_saved(saved, group, shape), S = shape->dtype == DTYPE_BF16 ? batch_squares(&work) : P;
        multiply_rows(&work, S, batch_in(Q, group, shape), batch_in(K, group, shape));
        if (shape->dtype == DTYPE_BF16) softmax<__nv_bfloat16>(&work, P, LSE + group * outer, inner, S);
        else softmax<float>(&work, P, LSE + group * outer, inner, S);
        multiply_triangle(&work, batch_out(O, group, shape), P, batch_in(V, group, shape), 0, 1);
    }
    return work_close(&work);
}

static const char *cublas_backward(AttentionOutput dQ, AttentionOutput dK, AttentionOutput dV, void *scratch,
                                   AttentionInput dO, AttentionInput Q, AttentionInput K, AttentionInput V,
                                   AttentionInput O, const float *LSE, const void *saved, const AttentionShape *shape,
                                   void *stream)
{
    Work work;
    (void)O, (void)LSE;
    if (is_empty(shape)) return NULL;
    work_open(&work, scratch, shape, stream);
    for (int64_t group = 0; group < group_count(shape) && !work.error; group++) {
        Batch P = batch_saved(saved, group, shape), dP = batch_squares(&work), dS = batch_rounded(&work);
        Batch dOut = batch_in(dO, group, shape);
        multiply_triangle(&work, batch_out(dV, group, shape), P, dOut, 1, 1);
        multiply_rows(&work, dP, dOut, batch_in(V, group, shape));
        if (shape->dtype == DTYPE_BF16) softmax_backward<__nv_bfloat16>(&work, dS, dP, P);
        else softmax_backward<float>(&work, dS, dP, P);
        multiply_triangle(&work, batch_out(dQ, group, shape), dS, batch_in(K, group, shape), 0, shape->scale);
        multiply_triangle(&work, batch_out(dK, group, shape), dS, batch_in(Q, group, shape), 1, shape->scale);
    }
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
