/* flash1_rows.cu - FlashAttention-2 as a first CUDA kernel has it: one thread a row, tiles in shared memory.
 *
 * A block of ROWS threads owns ROWS queries of one head, thread x the x-th of them. It walks over the tiles of keys up
 * to its own, and in each thread x computes its row of S, moves the running maximum m and sum l, and adds P V to its
 * row of O:
 *
 *                 keys j ->                        m' = max(m, max_j s_j)
 *              [tile][tile][t\ ]                   l  = l exp(m - m') + sum_j exp(s_j - m')
 *     query x  #################                   O  = O exp(m - m') + sum_j exp(s_j - m') V_j
 *
 * Backward is three kernels, so that each result has one owner and no atomics are needed: D = rowsum(dO * O); dQ, a
 * block a tile of queries, as in forward; dK and dV, a block a tile of keys, which walks over the tiles of queries
 * from its own on. P is rebuilt as exp(s - LSE), so the price of the split is two products of seven.
 *
 * Memory: every key and value is read from global memory once a tile of queries: T / ROWS times. Shared memory holds
 * rows of HS + 1 floats, so that threads which walk along their own rows meet different banks.
 *
 * Limits: HS up to 128, fp32 and bf16 (arithmetic in fp32), sm_80 and later.
 *
 * Verdict: this is the minimal kernel that many first meet, and the same speed class, but right: dV sums over the rows
 * that it should, every thread reaches every barrier, rows beyond T are neither read nor written, shared memory is
 * asked for, offsets are 64 bits wide. What made it wrong is mended, and of what made it slow only that a whole head
 * was one block's work. A warp is the whole block, so nothing hides latency; a thread loads its own row, which makes
 * 32 separate transactions of each load; and every product fetches both of its factors from shared memory, two loads
 * for one multiplication.
 */
#include "attention/attention.h"
#include "attention/device.h"

#include <math.h>
#include <stddef.h>
#include <stdint.h>

constexpr int ROWS = 32; /* queries of a tile, keys of a tile, threads of a block */
constexpr int MAX_HS = 128;
constexpr int MAX_SHARED = 99 * 1024; /* what every GPU from sm_80 on gives a block */
static_assert((6 * ROWS * (MAX_HS + 1) + 2 * ROWS) * sizeof(float) <= MAX_SHARED,
              "dK, dV: six tiles and LSE, D in shared memory");

/* --- helpers ------------------------------------------------------------------------------------------------------ */

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline void store_float(float *to, float x) { *to = x; }
__device__ inline void store_float(__nv_bfloat16 *to, float x) { *to = __float2bfloat16_rn(x); }

/* Row `row` (HS) of head number `head` of a view. */
template <typename Real>
__device__ const Real *row_in(AttentionInput view, int head, int NH, int64_t row)
{
    return (const Real *)view.data + head / NH * view.batch_stride + head % NH * view.head_stride + row * view.row_stride;
}
template <typename Real>
__device__ Real *row_out(AttentionOutput view, int head, int NH, int64_t row)
{
    return (Real *)view.data + head / NH * view.batch_stride + head % NH * view.head_stride + row * view.row_stride;
}

/* The n-th tile (ROWS, HS + 1) of the block's shared memory. */
__device__ inline Shared<float> shared_tile(int n, int HS)
{
    return shared_dynamic<float>(sizeof(float) * n * ROWS * (HS + 1), ROWS * (HS + 1));
}

/* Thread x loads row first + x of a view into row x of a tile; zeros beyond T. */
template <typename Real>
__device__ void row_load(Shared<float> tile, AttentionInput view, int head, int NH, int first, int T, int HS)
{
    int x = threadIdx.x;
    bool inside = first + x < T;
    const Real *row = row_in<Real>(view, head, NH, inside ? first + x : 0);
    for (int d = 0; d < HS; d++) tile[x * (HS + 1) + d] = inside ? to_float(row[d]) : 0.0f;
}

__device__ inline float row_dot(Shared<const float> a, Shared<const float> b, int HS)
{
    float sum = 0;
    for (int d = 0; d < HS; d++) sum = fmaf(a[d], b[d], sum);
    return sum;
}

__device__ inline void row_add(Shared<float> y, float a, Shared<const float> x, int HS)
{
    for (int d = 0; d < HS; d++) y[d] = fmaf(a, x[d], y[d]);
}

/* Forward and backward must round a logit alike: the product may not merge with the subtraction that follows. */
__device__ inline float logit(Shared<const float> q, Shared<const float> k, int HS, float scale)
{
    return __fmul_rn(scale, row_dot(q, k, HS));
}

/* --- kernels ------------------------------------------------------------------------------------------------------ */

/* O, Q, K, V (B, T, NH, HS) as their views say, LSE (heads, T). Grid: heads x tiles, the longest tiles first. */
template <typename Real>
__global__ void __launch_bounds__(ROWS) forward_kernel(AttentionOutput O, float *LSE, AttentionInput Q, AttentionInput K,
                                                       AttentionInput V, int heads, int NH, int T, int HS, float scale)
{
    const int head = (int)blockIdx.x % heads;
    const int tile = (T - 1) / ROWS - (int)blockIdx.x / heads, x = threadIdx.x, row = tile * ROWS + x, at = x * (HS + 1);
    Shared<float> q = shared_tile(0, HS), k = shared_tile(1, HS), v = shared_tile(2, HS), o = shared_tile(3, HS);
    Shared<float> s = shared_dynamic<float>(sizeof(float) * 4 * ROWS * (HS + 1), ROWS * (ROWS + 1)) + x * (ROWS + 1);
    float max = -INFINITY, sum = 0;
    row_load<Real>(q, Q, head, NH, tile * ROWS, T, HS);
    for (int d = 0; d < HS; d++) o[at + d] = 0.0f;
    for (int j = 0; j <= tile; j++) {
        row_load<Real>(k, K, head, NH, j * ROWS, T, HS);
        row_load<Real>(v, V, head, NH, j * ROWS, T, HS);
        __syncthreads();
        /* Keys up to the row itself; a thread beyond T has none. */
        int keys = row >= T ? 0 : j < tile ? ROWS : x + 1;
        float max_new = max;
        for (int c = 0; c < keys; c++) {
            float logit_c = logit(q + at, k + c * (HS + 1), HS, scale);
            s[c] = logit_c;
            max_new = fmaxf(max_new, logit_c);
        }
        float base = max_new == -INFINITY ? 0.0f : max_new, shrink = expf(max - base);
        sum *= shrink;
        for (int d = 0; d < HS; d++) o[at + d] *= shrink;
        for (int c = 0; c < keys; c++) {
            float p = expf(s[c] - base);
            sum += p;
            row_add(o + at, p, v + c * (HS + 1), HS);
        }
        max = max_new;
        __syncthreads();
    }
    if (row >= T) return;
    Real *out = row_out<Real>(O, head, NH, row);
    for (int d = 0; d < HS; d++) store_float(&out[d], o[at + d] / sum);
    LSE[(int64_t)head * T + row] = max + logf(sum);
}

/* D (heads, T) = rowsum(dO * O); one thread a row, a block takes ROWS rows of one head. */
template <typename Real>
__global__ void __launch_bounds__(ROWS) dot_kernel(float *D, AttentionInput dO, AttentionInput O, int heads, int NH, int T,
                                                   int HS)
{
    const int head = (int)blockIdx.x % heads;
    const int row = (int)blockIdx.x / heads * ROWS + threadIdx.x;
    if (row >= T) return;
    const Real *dout = row_in<Real>(dO, head, NH, row), *out = row_in<Real>(O, head, NH, row);
    float sum = 0;
    for (int d = 0; d < HS; d++) sum = fmaf(to_float(dout[d]), to_float(out[d]), sum);
    D[(int64_t)head * T + row] = sum;
}

/* dQ (B, T, NH, HS) = scale dS K, dS = P (dO V^T - D); thread x owns row x of the tile. */
template <typename Real>
__global__ void __launch_bounds__(ROWS) dq_kernel(AttentionOutput dQ, AttentionInput dO, AttentionInput Q,
                                                  AttentionInput K, AttentionInput V, const float *LSE, const float *D,
                                                  int heads, int NH, int T, int HS, float scale)
{
    const int head = (int)blockIdx.x % heads;
    const int tile = (T - 1) / ROWS - (int)blockIdx.x / heads, x = threadIdx.x, row = tile * ROWS + x, at = x * (HS + 1);
    Shared<float> q = shared_tile(0, HS), k = shared_tile(1, HS), v = shared_tile(2, HS);
    Shared<float> dout = shared_tile(3, HS), dq = shared_tile(4, HS);
    const float lse = row < T ? LSE[(int64_t)head * T + row] : 0.0f, dot = row < T ? D[(int64_t)head * T + row] : 0.0f;
    row_load<Real>(q, Q, head, NH, tile * ROWS, T, HS);
    row_load<Real>(dout, dO, head, NH, tile * ROWS, T, HS);
    for (int d = 0; d < HS; d++) dq[at + d] = 0.0f;
    for (int j = 0; j <= tile; j++) {
        row_load<Real>(k, K, head, NH, j * ROWS, T, HS);
        row_load<Real>(v, V, head, NH, j * ROWS, T, HS);
        __syncthreads();
        int keys = row >= T ? 0 : j < tile ? ROWS : x + 1;
        for (int c = 0; c < keys; c++) {
            float p = expf(logit(q + at, k + c * (HS + 1), HS, scale) - lse);
            float ds = p * (row_dot(dout + at, v + c * (HS + 1), HS) - dot);
            row_add(dq + at, ds, k + c * (HS + 1), HS);
        }
        __syncthreads();
    }
    if (row >= T) return;
    Real *out = row_out<Real>(dQ, head, NH, row);
    for (int d = 0; d < HS; d++) store_float(&out[d], scale * dq[at + d]);
}

/* dK = scale dS^T Q, dV = P^T dO (B, T, NH, HS); thread x owns key x of the tile and walks over the queries from it on. */
template <typename Real>
__global__ void __launch_bounds__(ROWS) dkv_kernel(AttentionOutput dK, AttentionOutput dV, AttentionInput dO,
                                                   AttentionInput Q, AttentionInput K, AttentionInput V,
                                                   const float *LSE, const float *D, int heads, int NH, int T, int HS,
                                                   float scale)
{
    const int head = (int)blockIdx.x % heads;
    const int tile = (int)blockIdx.x / heads, x = threadIdx.x, key = tile * ROWS + x, at = x * (HS + 1);
    Shared<float> q = shared_tile(0, HS), k = shared_tile(1, HS), v = shared_tile(2, HS), dout = shared_tile(3, HS);
    Shared<float> dk = shared_tile(4, HS), dv = shared_tile(5, HS);
    Shared<float> lse = shared_dynamic<float>(sizeof(float) * 6 * ROWS * (HS + 1), 2 * ROWS), dot = lse + ROWS;
    row_load<Real>(k, K, head, NH, tile * ROWS, T, HS);
    row_load<Real>(v, V, head, NH, tile * ROWS, T, HS);
    for (int d = 0; d < HS; d++) dk[at + d] = dv[at + d] = 0.0f;
    for (int i = tile; i * ROWS < T; i++) {
        int queries = T - i * ROWS < ROWS ? T - i * ROWS : ROWS;
        row_load<Real>(q, Q, head, NH, i * ROWS, T, HS);
        row_load<Real>(dout, dO, head, NH, i * ROWS, T, HS);
        lse[x] = x < queries ? LSE[(int64_t)head * T + i * ROWS + x] : 0.0f;
        dot[x] = x < queries ? D[(int64_t)head * T + i * ROWS + x] : 0.0f;
        __syncthreads();
        for (int y = i == tile ? x : 0; y < queries; y++) {
            float p = expf(logit(q + y * (HS + 1), k + at, HS, scale) - lse[y]);
            float ds = p * (row_dot(dout + y * (HS + 1), v + at, HS) - dot[y]);
            row_add(dv + at, p, dout + y * (HS + 1), HS);
            row_add(dk + at, ds, q + y * (HS + 1), HS);
        }
        __syncthreads();
    }
    if (key >= T) return;
    Real *dk_out = row_out<Real>(dK, head, NH, key), *dv_out = row_out<Real>(dV, head, NH, key);
    for (int d = 0; d < HS; d++) {
        store_float(&dk_out[d], scale * dk[at + d]);
        store_float(&dv_out[d], dv[at + d]);
    }
}

/* --- launchers ---------------------------------------------------------------------------------------------------- */

static int64_t block_count(const AttentionShape *shape)
{
    return shape->B * shape->NH * ((shape->T + ROWS - 1) / ROWS);
}

/* Bytes of `tiles` tiles and `floats` more. */
static size_t shared_bytes(int tiles, int floats, int64_t HS)
{
    return (size_t)(tiles * ROWS * (HS + 1) + floats) * sizeof(float);
}

static const char *words_of(cudaError_t error) { return error == cudaSuccess ? NULL : cudaGetErrorString(error); }

template <typename Real>
static const char *forward_launch(AttentionOutput O, float *LSE, AttentionInput Q, AttentionInput K, AttentionInput V,
                                  const AttentionShape *shape, cudaStream_t stream)
{
    return words_of(kernel_launch(forward_kernel<Real>, dim3((unsigned)block_count(shape)), dim3(ROWS),
                                  shared_bytes(4, ROWS * (ROWS + 1), shape->HS), stream, O, LSE, Q, K, V,
                                  shape->B * shape->NH, shape->NH, shape->T, shape->HS, shape->scale));
}

template <typename Real>
static const char *backward_launch(AttentionOutput dQ, AttentionOutput dK, AttentionOutput dV, float *D, AttentionInput dO,
                                   AttentionInput Q, AttentionInput K, AttentionInput V, AttentionInput O,
                                   const float *LSE, const AttentionShape *shape, cudaStream_t stream)
{
    const dim3 grid((unsigned)block_count(shape)), block(ROWS);
    const int64_t heads = shape->B * shape->NH, NH = shape->NH, T = shape->T, HS = shape->HS;
    cudaError_t error = kernel_launch(dot_kernel<Real>, grid, block, 0, stream, D, dO, O, heads, NH, T, HS);
    if (error == cudaSuccess)
        error = kernel_launch(dq_kernel<Real>, grid, block, shared_bytes(5, 0, HS), stream, dQ, dO, Q, K, V, LSE, D,
                              heads, NH, T, HS, shape->scale);
    if (error == cudaSuccess)
        error = kernel_launch(dkv_kernel<Real>, grid, block, shared_bytes(6, 2 * ROWS, HS), stream, dK, dV, dO, Q, K, V,
                              LSE, D, heads, NH, T, HS, shape->scale);
    return words_of(error);
}

/* --- the kernel of this file -------------------------------------------------------------------------------------- */

static const char *refuse(const AttentionShape *shape, int sm)
{
    if (sm < 80) return "needs sm_80 or later";
    if (shape->HS < 1 || shape->HS > MAX_HS) return "needs a head dimension from 1 to 128";
    if (shape->T > 1 << 30 || block_count(shape) > INT32_MAX) return "needs at most 2^31 - 1 tiles of 32 rows";
    return NULL;
}

static size_t saved_bytes(const AttentionShape *shape)
{
    (void)shape;
    return 0;
}

/* D (heads, T). */
static size_t scratch_bytes(const AttentionShape *shape)
{
    return (size_t)(shape->B * shape->NH * shape->T) * sizeof(float);
}

static const char *forward(AttentionOutput O, float *LSE, void *saved, void *scratch, AttentionInput Q, AttentionInput K,
                           AttentionInput V, const AttentionShape *shape, void *stream)
{
    (void)saved, (void)scratch;
    if (block_count(shape) == 0) return NULL;
    return shape->dtype == DTYPE_BF16 ? forward_launch<__nv_bfloat16>(O, LSE, Q, K, V, shape, (cudaStream_t)stream)
                                      : forward_launch<float>(O, LSE, Q, K, V, shape, (cudaStream_t)stream);
}

static const char *backward(AttentionOutput dQ, AttentionOutput dK, AttentionOutput dV, void *scratch, AttentionInput dO,
                            AttentionInput Q, AttentionInput K, AttentionInput V, AttentionInput O, const float *LSE,
                            const void *saved, const AttentionShape *shape, void *stream)
{
    (void)saved;
    float *D = (float *)scratch;
    if (block_count(shape) == 0) return NULL;
    return shape->dtype == DTYPE_BF16
               ? backward_launch<__nv_bfloat16>(dQ, dK, dV, D, dO, Q, K, V, O, LSE, shape, (cudaStream_t)stream)
               : backward_launch<float>(dQ, dK, dV, D, dO, Q, K, V, O, LSE, shape, (cudaStream_t)stream);
}

extern "C" {
extern const AttentionKernel attention_kernel;
const AttentionKernel attention_kernel = {
    ATTENTION_ABI, ATTENTION_CUDA, "flash1_rows",
    "tiles in shared memory, one thread a row; fp32 and bf16, HS up to 128",
    refuse, saved_bytes, scratch_bytes, forward, backward,
};
}
