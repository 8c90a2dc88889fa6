/* flash2_coalesced.cu - flash1_rows with a square block of threads: one element of S a thread, one row of the tile a warp.
 *
 * A block of 32 x 32 threads owns SIDE queries of one head and walks over tiles of SIDE keys. Warp y is query row y of the
 * tile, lane x is key x of it:
 *
 *                keys: lane x ->
 *              [tile][tile][t\ ]        S_yx = scale q_y . k_x                  one dot product a thread
 *     query y  #################        max and sum over keys: shuffles         of the 32 lanes of the warp
 *     (warp)                            O_y,x+32c += sum_k P_yk V_k,x+32c        columns x, x+32, ... in registers
 *
 * The softmax of a row never leaves its warp; P passes through a row of shared memory that only this warp uses.
 * Backward is three kernels as before: D, then dQ by tiles of queries, then dK and dV by tiles of keys, where P and dS
 * are computed with warps as queries and read back with warps as keys.
 *
 * Memory: a tile is loaded by all threads at once, 32 neighbouring elements a warp and load, rows beyond T as zeros.
 * Rows in shared memory are an odd number of floats apart, so that 32 lanes reading a column of K meet 32 banks.
 *
 * Limits: HS up to 128, fp32 and bf16 (arithmetic in fp32), sm_80 and later.
 *
 * Verdict: against flash1_rows, 32 times the threads to a block, whole transactions from global memory, O and the
 * gradients in registers. The price is shuffles and barriers. What limits it is shared memory: still two loads for
 * every multiplication, since a thread uses each value that it fetches once. Reuse in registers is the next step.
 */
#include "attention/attention.h"
#include "attention/device.h"

#include <math.h>
#include <stddef.h>
#include <stdint.h>

constexpr int SIDE = 32; /* queries of a tile, keys of a tile; a warp is a row, so nothing else would do */
constexpr int MAX_HS = 128;
constexpr int MAX_SHARED = 99 * 1024; /* what every GPU from sm_80 on gives a block */
constexpr unsigned ALL_LANES = 0xffffffffu;

/* A tile of SIDE rows of WIDTH elements (HS and zeros up to a multiple of 32), rows an odd number of floats apart. */
template <int WIDTH> constexpr int STRIDE = WIDTH + 1;
template <int WIDTH> constexpr int TILE = SIDE * STRIDE<WIDTH>;
constexpr int SQUARE = SIDE * (SIDE + 1); /* P or dS */
static_assert((4 * TILE<MAX_HS> + 2 * SQUARE) * sizeof(float) <= MAX_SHARED,
              "dK, dV: four tiles, P and dS in shared memory");

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

/* The n-th tile of the block's shared memory; after `tiles` tiles, the n-th square. */
template <int WIDTH>
__device__ Shared<float> shared_tile(int n)
{
    return shared_dynamic<float>(sizeof(float) * n * TILE<WIDTH>, TILE<WIDTH>);
}
template <int WIDTH>
__device__ Shared<float> shared_square(int tiles, int n)
{
    return shared_dynamic<float>(sizeof(float) * (tiles * TILE<WIDTH> + n * SQUARE), SQUARE);
}

/* Rows first .. first+SIDE-1 of a view into a tile: warp y takes row y. Zeros beyond T and beyond HS. */
template <typename Real, int WIDTH>
__device__ void tile_load(Shared<float> tile, AttentionInput view, int head, int NH, int first, int T, int HS)
{
    int x = threadIdx.x, y = threadIdx.y;
    bool inside = first + y < T;
    const Real *row = row_in<Real>(view, head, NH, inside ? first + y : 0);
#pragma unroll
    for (int d = x; d < WIDTH; d += SIDE) tile[y * STRIDE<WIDTH> + d] = inside && d < HS ? to_float(row[d]) : 0.0f;
}

/* Writes the thread's columns of a row, times a factor. */
template <typename Real, int WIDTH>
__device__ void row_store(AttentionOutput view, int head, int NH, int row, int HS, const float *values, float factor)
{
    Real *out = row_out<Real>(view, head, NH, row);
#pragma unroll
    for (int c = 0; c < WIDTH / SIDE; c++)
        if ((int)threadIdx.x + SIDE * c < HS) store_float(&out[threadIdx.x + SIDE * c], factor * values[c]);
}

template <int WIDTH>
__device__ float row_dot(Shared<const float> a, Shared<const float> b)
{
    float sum = 0;
#pragma unroll 8
    for (int d = 0; d < WIDTH; d++) sum = fmaf(a[d], b[d], sum);
    return sum;
}

/* values += sum over rows k from `first` to `last` - 1 of weights[k * step] * tile[k], the thread's columns of it. */
template <int WIDTH>
__device__ void rows_add(float *values, Shared<const float> weights, int step, Shared<const float> tile, int first,
                         int last)
{
    for (int k = first; k < last; k++) {
        float weight = weights[k * step];
#pragma unroll
        for (int c = 0; c < WIDTH / SIDE; c++)
            values[c] = fmaf(weight, tile[k * STRIDE<WIDTH> + threadIdx.x + SIDE * c], values[c]);
    }
}

__device__ inline float warp_max(float x)
{
    for (int step = 16; step; step >>= 1) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, step));
    return x;
}

__device__ inline float warp_sum(float x)
{
    for (int step = 16; step; step >>= 1) x += __shfl_xor_sync(ALL_LANES, x, step);
    return x;
}

/* Forward and backward must round a logit alike: the product may not merge with the subtraction that follows. */
template <int WIDTH>
__device__ float logit(Shared<const float> q, Shared<const float> k, float scale)
{
    return __fmul_rn(scale, row_dot<WIDTH>(q, k));
}

/* --- kernels ------------------------------------------------------------------------------------------------------ */

/* O, Q, K, V (B, T, NH, HS) as their views say, LSE (heads, T). Grid: heads x tiles, the longest tiles first. */
template <typename Real, int WIDTH>
__global__ void __launch_bounds__(SIDE *SIDE) forward_kernel(AttentionOutput O, float *LSE, AttentionInput Q,
                                                             AttentionInput K, AttentionInput V, int heads, int NH,
                                                             int T, int HS, float scale)
{
    const int head = (int)blockIdx.x % heads;
    const int tile = (T - 1) / SIDE - (int)blockIdx.x / heads, x = threadIdx.x, y = threadIdx.y, row = tile * SIDE + y;
    Shared<float> q = shared_tile<WIDTH>(0), k = shared_tile<WIDTH>(1);
    Shared<float> v = shared_tile<WIDTH>(2);
    Shared<float> p = shared_square<WIDTH>(3, 0) + y * (SIDE + 1);
    float o[WIDTH / SIDE] = {}, max = -INFINITY, sum = 0;
    tile_load<Real, WIDTH>(q, Q, head, NH, tile * SIDE, T, HS);
    for (int j = 0; j <= tile; j++) {
        tile_load<Real, WIDTH>(k, K, head, NH, j * SIDE, T, HS);
        tile_load<Real, WIDTH>(v, V, head, NH, j * SIDE, T, HS);
        __syncthreads();
        /* Keys up to the row itself. Rows beyond T compute with zeros and are not stored. */
        int keys = j < tile ? SIDE : y + 1;
        float s = x < keys ? logit<WIDTH>(q + y * STRIDE<WIDTH>, k + x * STRIDE<WIDTH>, scale) : -INFINITY;
        float max_new = fmaxf(max, warp_max(s)), base = max_new == -INFINITY ? 0.0f : max_new, shrink = expf(max - base);
        float weight = expf(s - base);
        sum = sum * shrink + warp_sum(weight);
        max = max_new;
        p[x] = weight;
        __syncwarp();
#pragma unroll
        for (int c = 0; c < WIDTH / SIDE; c++) o[c] *= shrink;
        rows_add<WIDTH>(o, p, 1, v, 0, keys);
        __syncthreads();
    }
    if (row >= T) return;
    row_store<Real, WIDTH>(O, head, NH, row, HS, o, 1 / sum);
    if (x == 0) LSE[(int64_t)head * T + row] = max + logf(sum);
}

/* D (heads, T) = rowsum(dO * O), a warp a row. */
template <typename Real>
__global__ void __launch_bounds__(SIDE *SIDE) dot_kernel(float *D, AttentionInput dO, AttentionInput O, int heads, int NH,
                                                         int T, int HS)
{
    const int head = (int)blockIdx.x % heads;
    const int row = (int)blockIdx.x / heads * SIDE + threadIdx.y;
    if (row >= T) return; /* the whole warp */
    const Real *dout = row_in<Real>(dO, head, NH, row), *out = row_in<Real>(O, head, NH, row);
    float sum = 0;
    for (int d = threadIdx.x; d < HS; d += SIDE) sum = fmaf(to_float(dout[d]), to_float(out[d]), sum);
    sum = warp_sum(sum);
    if (threadIdx.x == 0) D[(int64_t)head * T + row] = sum;
}

/* dQ (B, T, NH, HS) = scale dS K, dS = P (dO V^T - D); warp y owns row y of the tile. */
template <typename Real, int WIDTH>
__global__ void __launch_bounds__(SIDE *SIDE) dq_kernel(AttentionOutput dQ, AttentionInput dO, AttentionInput Q,
                                                        AttentionInput K, AttentionInput V, const float *LSE,
                                                        const float *D, int heads, int NH, int T, int HS, float scale)
{
    const int head = (int)blockIdx.x % heads;
    const int tile = (T - 1) / SIDE - (int)blockIdx.x / heads, x = threadIdx.x, y = threadIdx.y, row = tile * SIDE + y;
    Shared<float> q = shared_tile<WIDTH>(0), k = shared_tile<WIDTH>(1);
    Shared<float> v = shared_tile<WIDTH>(2);
    Shared<float> dout = shared_tile<WIDTH>(3), ds = shared_square<WIDTH>(4, 0) + y * (SIDE + 1);
    const float lse = row < T ? LSE[(int64_t)head * T + row] : 0.0f, dot = row < T ? D[(int64_t)head * T + row] : 0.0f;
    float dq[WIDTH / SIDE] = {};
    tile_load<Real, WIDTH>(q, Q, head, NH, tile * SIDE, T, HS);
    tile_load<Real, WIDTH>(dout, dO, head, NH, tile * SIDE, T, HS);
    for (int j = 0; j <= tile; j++) {
        tile_load<Real, WIDTH>(k, K, head, NH, j * SIDE, T, HS);
        tile_load<Real, WIDTH>(v, V, head, NH, j * SIDE, T, HS);
        __syncthreads();
        int keys = j < tile ? SIDE : y + 1;
        if (x < keys) {
            float p = expf(logit<WIDTH>(q + y * STRIDE<WIDTH>, k + x * STRIDE<WIDTH>, scale) - lse);
            ds[x] = p * (row_dot<WIDTH>(dout + y * STRIDE<WIDTH>, v + x * STRIDE<WIDTH>) - dot);
        }
        __syncwarp();
        rows_add<WIDTH>(dq, ds, 1, k, 0, keys);
        __syncthreads();
    }
    if (row < T) row_store<Real, WIDTH>(dQ, head, NH, row, HS, dq, scale);
}

/* dK = scale dS^T Q, dV = P^T dO (B, T, NH, HS). P and dS: warp y is query y, lane x key x. The sums: warp y is key y. */
template <typename Real, int WIDTH>
__global__ void __launch_bounds__(SIDE *SIDE) dkv_kernel(AttentionOutput dK, AttentionOutput dV, AttentionInput dO,
                                                         AttentionInput Q, AttentionInput K, AttentionInput V,
                                                         const float *LSE, const float *D, int heads, int NH, int T,
                                                         int HS, float scale)
{
    const int head = (int)blockIdx.x % heads;
    const int tile = (int)blockIdx.x / heads, x = threadIdx.x, y = threadIdx.y;
    Shared<float> q = shared_tile<WIDTH>(0), k = shared_tile<WIDTH>(1);
    Shared<float> v = shared_tile<WIDTH>(2), dout = shared_tile<WIDTH>(3);
    Shared<float> p = shared_square<WIDTH>(4, 0), ds = shared_square<WIDTH>(4, 1);
    float dk[WIDTH / SIDE] = {}, dv[WIDTH / SIDE] = {};
    tile_load<Real, WIDTH>(k, K, head, NH, tile * SIDE, T, HS);
    tile_load<Real, WIDTH>(v, V, head, NH, tile * SIDE, T, HS);
    for (int i = tile; i * SIDE < T; i++) {
        int queries = T - i * SIDE < SIDE ? T - i * SIDE : SIDE;
        tile_load<Real, WIDTH>(q, Q, head, NH, i * SIDE, T, HS);
        tile_load<Real, WIDTH>(dout, dO, head, NH, i * SIDE, T, HS);
        __syncthreads();
        if (y < queries && (i > tile || x <= y)) {
            int64_t at = (int64_t)head * T + i * SIDE + y;
            float weight = expf(logit<WIDTH>(q + y * STRIDE<WIDTH>, k + x * STRIDE<WIDTH>, scale) - LSE[at]);
            float dp = row_dot<WIDTH>(dout + y * STRIDE<WIDTH>, v + x * STRIDE<WIDTH>);
            p[y * (SIDE + 1) + x] = weight;
            ds[y * (SIDE + 1) + x] = weight * (dp - D[at]);
        }
        __syncthreads();
        int first = i > tile ? 0 : y; /* queries before the key do not see it */
        rows_add<WIDTH>(dv, p + y, SIDE + 1, dout, first, queries);
        rows_add<WIDTH>(dk, ds + y, SIDE + 1, q, first, queries);
        __syncthreads();
    }
    if (tile * SIDE + y >= T) return;
    row_store<Real, WIDTH>(dK, head, NH, tile * SIDE + y, HS, dk, scale);
    row_store<Real, WIDTH>(dV, head, NH, tile * SIDE + y, HS, dv, 1);
}

/* --- launchers ---------------------------------------------------------------------------------------------------- */

static int64_t block_count(const AttentionShape *shape)
{
    return shape->B * shape->NH * ((shape->T + SIDE - 1) / SIDE);
}

template <int WIDTH>
static size_t shared_bytes(int tiles, int squares)
{
    return (size_t)(tiles * TILE<WIDTH> + squares * SQUARE) * sizeof(float);
}

static const char *words_of(cudaError_t error) { return error == cudaSuccess ? NULL : cudaGetErrorString(error); }

template <typename Real, int WIDTH>
static const char *forward_launch(AttentionOutput O, float *LSE, AttentionInput Q, AttentionInput K, AttentionInput V,
                                  const AttentionShape *shape, cudaStream_t stream)
{
    return words_of(kernel_launch(forward_kernel<Real, WIDTH>, dim3((unsigned)block_count(shape)), dim3(SIDE, SIDE),
                                  shared_bytes<WIDTH>(3, 1), stream, O, LSE, Q, K, V, shape->B * shape->NH, shape->NH,
                                  shape->T, shape->HS, shape->scale));
}

template <typename Real, int WIDTH>
static const char *backward_launch(AttentionOutput dQ, AttentionOutput dK, AttentionOutput dV, float *D, AttentionInput dO,
                                   AttentionInput Q, AttentionInput K, AttentionInput V, AttentionInput O,
                                   const float *LSE, const AttentionShape *shape, cudaStream_t stream)
{
    const dim3 grid((unsigned)block_count(shape)), block(SIDE, SIDE);
    const int64_t heads = shape->B * shape->NH, NH = shape->NH, T = shape->T, HS = shape->HS;
    cudaError_t error = kernel_launch(dot_kernel<Real>, grid, block, 0, stream, D, dO, O, heads, NH, T, HS);
    if (error == cudaSuccess)
        error = kernel_launch(dq_kernel<Real, WIDTH>, grid, block, shared_bytes<WIDTH>(4, 1), stream, dQ, dO, Q, K, V,
                              LSE, D, heads, NH, T, HS, shape->scale);
    if (error == cudaSuccess)
        error = kernel_launch(dkv_kernel<Real, WIDTH>, grid, block, shared_bytes<WIDTH>(4, 2), stream, dK, dV, dO, Q, K,
                              V, LSE, D, heads, NH, T, HS, shape->scale);
    return words_of(error);
}

/* HS rounded up to what the kernels are compiled for. */
#define WITH_WIDTH(FUNCTION, Real, ...)                                             \
    (shape->HS <= 32   ? FUNCTION<Real, 32>(__VA_ARGS__)                            \
     : shape->HS <= 64 ? FUNCTION<Real, 64>(__VA_ARGS__)                            \
     : shape->HS <= 96 ? FUNCTION<Real, 96>(__VA_ARGS__)                            \
                       : FUNCTION<Real, 128>(__VA_ARGS__))

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
                           AttentionInput V, const AttentionShape *shape, void *queue)
{
    (void)saved, (void)scratch;
    cudaStream_t stream = (cudaStream_t)queue;
    if (block_count(shape) == 0) return NULL;
    return shape->dtype == DTYPE_BF16 ? WITH_WIDTH(forward_launch, __nv_bfloat16, O, LSE, Q, K, V, shape, stream)
                                      : WITH_WIDTH(forward_launch, float, O, LSE, Q, K, V, shape, stream);
}

static const char *backward(AttentionOutput dQ, AttentionOutput dK, AttentionOutput dV, void *scratch, AttentionInput dO,
                            AttentionInput Q, AttentionInput K, AttentionInput V, AttentionInput O, const float *LSE,
                            const void *saved, const AttentionShape *shape, void *queue)
{
    (void)saved;
    float *D = (float *)scratch;
    cudaStream_t stream = (cudaStream_t)queue;
    if (block_count(shape) == 0) return NULL;
    return shape->dtype == DTYPE_BF16
               ? WITH_WIDTH(backward_launch, __nv_bfloat16, dQ, dK, dV, D, dO, Q, K, V, O, LSE, shape, stream)
               : WITH_WIDTH(backward_launch, float, dQ, dK, dV, D, dO, Q, K, V, O, LSE, shape, stream);
}

extern "C" {
extern const AttentionKernel attention_kernel;
const AttentionKernel attention_kernel = {
    ATTENTION_ABI, ATTENTION_CUDA, "flash2_coalesced",
    "coalesced loads, one element of S a thread, a row a warp; fp32 and bf16, HS up to 128",
    refuse, saved_bytes, scratch_bytes, forward, backward,
};
}
