/* flash3_registers.cu - flash2_coalesced with tiles in registers: what is fetched from shared memory is used four times.
 *
 * A block of 16 x 16 threads owns SIDE = 64 queries of one head and walks over tiles of 64 keys. Thread (x, y)
 * computes 4 x 4 elements of S, those of rows y, y+16, .. and keys x, x+16, ..; and 4 rows of O, columns x, x+16, ..
 * up to HS:
 *
 *                  keys x, x+16, ..                    columns x, x+16, ..
 *            +---+---+---+---+                        +---+---+---+---+
 *     rows   | s | s | s | s |   for every d:         | o | o | o | o |   for every key k:
 *     y,     | s | s | s | s |   4 q, 4 k fetched,    | o | o | o | o |   4 p, HS/16 v fetched,
 *     y+16.. | s | s | s | s |   16 products          | o | o | o | o |   HS/4 products
 *            +---+---+---+---+                        +---+---+---+---+
 *
 * A row of S is spread over 16 lanes of one warp, which find its maximum and sum by shuffles; P goes through shared
 * memory, but never from one warp to another. Backward is three kernels as before. The one for dK and dV computes S
 * transposed, keys as rows: then both products have the form of P V, and P^T stays in the warp as well. S rounds the
 * same either way, because its sum over d runs in the same order.
 *
 * Memory: K and V take turns in one tile of shared memory in forward and in dQ. Tiles are read from global memory T /
 * 64 times. Rows of a tile are an odd number of floats apart; those of P 80, so that the two half-warps meet different
 * banks.
 *
 * Limits: HS up to 128 (up to 64 where a block gets 99 KB of shared memory only), fp32 and bf16 (arithmetic in fp32),
 * sm_80 and later.
 *
 * Verdict: against flash2_coalesced, half a load for a multiplication instead of two, and a quarter of the reads from
 * global memory. The price is registers, and diagonal tiles of 64 that are half wasted. What limits it now is the
 * number of load instructions, not bytes: each brings one float a lane, while the same instruction could bring four.
 */
#include "attention/attention.h"
#include "attention/device.h"

#include <math.h>
#include <stddef.h>
#include <stdint.h>

constexpr int SIDE = 64;           /* queries of a tile, keys of a tile */
constexpr int EDGE = 16;           /* the block is EDGE x EDGE threads */
constexpr int EACH = SIDE / EDGE;  /* rows a thread, keys a thread */
constexpr int MAX_HS = 128;
constexpr unsigned ALL_LANES = 0xffffffffu;
static_assert(EDGE == 16, "a row of S is half a warp");

/* A tile of SIDE rows of WIDTH elements (HS and zeros up to a multiple of 32), rows an odd number of floats apart. */
template <int WIDTH> constexpr int STRIDE = WIDTH + 1;
template <int WIDTH> constexpr int TILE = SIDE * STRIDE<WIDTH>;
constexpr int SQUARE_STRIDE = SIDE + EDGE;
constexpr int SQUARE = SIDE * SQUARE_STRIDE; /* P or dS */
template <int WIDTH> constexpr size_t FORWARD_SHARED = (2 * TILE<WIDTH> + SQUARE) * sizeof(float);
template <int WIDTH> constexpr size_t DQ_SHARED = (3 * TILE<WIDTH> + SQUARE) * sizeof(float);
template <int WIDTH> constexpr size_t DKV_SHARED = (4 * TILE<WIDTH> + SQUARE + 2 * SIDE) * sizeof(float);
static_assert(DKV_SHARED<64> <= 99 * 1024, "up to HS 64 it fits every GPU from sm_80 on");
static_assert(DKV_SHARED<MAX_HS> <= 163 * 1024, "beyond, sm_80 and sm_90");

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

/* The n-th tile of the block's shared memory; the square and the floats after `tiles` tiles. */
template <int WIDTH>
__device__ Shared<float> shared_tile(int n)
{
    return shared_dynamic<float>(sizeof(float) * n * TILE<WIDTH>, TILE<WIDTH>);
}
template <int WIDTH>
__device__ Shared<float> shared_square(int tiles)
{
    return shared_dynamic<float>(sizeof(float) * tiles * TILE<WIDTH>, SQUARE);
}

/* Rows first .. first+SIDE-1 of a view into a tile. Zeros beyond T and beyond HS. */
template <typename Real, int WIDTH>
__device__ void tile_load(Shared<float> tile, AttentionInput view, int head, int NH, int first, int T, int HS)
{
    const Real *rows = row_in<Real>(view, head, NH, first);
    for (int e = threadIdx.y * EDGE + threadIdx.x; e < SIDE * WIDTH; e += EDGE * EDGE) {
        int row = e / WIDTH, d = e % WIDTH;
        bool inside = first + row < T && d < HS;
        tile[row * STRIDE<WIDTH> + d] = inside ? to_float(rows[row * view.row_stride + d]) : 0.0f;
    }
}

/* Writes the thread's elements of one row, times a factor. */
template <typename Real, int WIDTH>
__device__ void row_store(AttentionOutput view, int head, int NH, int row, int HS, const float *values, float factor)
{
    Real *out = row_out<Real>(view, head, NH, row);
#pragma unroll
    for (int c = 0; c < WIDTH / EDGE; c++)
        if ((int)threadIdx.x + EDGE * c < HS) store_float(&out[threadIdx.x + EDGE * c], factor * values[c]);
}

/* products[r][c] = row y+16r of `a` times row x+16c of `b`. */
template <int WIDTH>
__device__ void tiles_multiply(float (*products)[EACH], Shared<const float> a, Shared<const float> b)
{
#pragma unroll
    for (int r = 0; r < EACH; r++)
#pragma unroll
        for (int c = 0; c < EACH; c++) products[r][c] = 0.0f;
#pragma unroll 4
    for (int d = 0; d < WIDTH; d++) {
        float left[EACH], right[EACH];
#pragma unroll
        for (int r = 0; r < EACH; r++) left[r] = a[(threadIdx.y + EDGE * r) * STRIDE<WIDTH> + d];
#pragma unroll
        for (int c = 0; c < EACH; c++) right[c] = b[(threadIdx.x + EDGE * c) * STRIDE<WIDTH> + d];
#pragma unroll
        for (int r = 0; r < EACH; r++)
#pragma unroll
            for (int c = 0; c < EACH; c++) products[r][c] = fmaf(left[r], right[c], products[r][c]);
    }
}

/* Which rows k of a tile a row r of weights is summed over: in tiles on the diagonal not all. A weight of 0 does not leave
 * a row out, for what stands there may be NaN. */
enum Part { ALL, UP_TO_ROW, FROM_ROW };

/* sums[r] += sum over k of weights[y+16r][k] * row k of `tile`, the thread's columns of it. */
template <int WIDTH, Part PART>
__device__ void rows_add(float (*sums)[WIDTH / EDGE], Shared<const float> weights, Shared<const float> tile)
{
#pragma unroll 2
    for (int k = 0; k < SIDE; k++) {
        float values[WIDTH / EDGE];
#pragma unroll
        for (int c = 0; c < WIDTH / EDGE; c++) values[c] = tile[k * STRIDE<WIDTH> + threadIdx.x + EDGE * c];
#pragma unroll
        for (int r = 0; r < EACH; r++) {
            int row = threadIdx.y + EDGE * r;
            if (PART == UP_TO_ROW && k > row) continue;
            if (PART == FROM_ROW && k < row) continue;
            float weight = weights[row * SQUARE_STRIDE + k];
#pragma unroll
            for (int c = 0; c < WIDTH / EDGE; c++) sums[r][c] = fmaf(weight, values[c], sums[r][c]);
        }
    }
}

/* The thread's elements of P or dS into the square. Whoever reads them is in the same warp. */
__device__ inline void square_store(Shared<float> square, const float (*values)[EACH])
{
    __syncwarp();
#pragma unroll
    for (int r = 0; r < EACH; r++)
#pragma unroll
        for (int c = 0; c < EACH; c++)
            square[(threadIdx.y + EDGE * r) * SQUARE_STRIDE + threadIdx.x + EDGE * c] = values[r][c];
    __syncwarp();
}

/* Over the 16 lanes of a row. */
__device__ inline float row_max(float x)
{
    for (int step = EDGE / 2; step; step >>= 1) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, step));
    return x;
}

__device__ inline float row_sum(float x)
{
    for (int step = EDGE / 2; step; step >>= 1) x += __shfl_xor_sync(ALL_LANES, x, step);
    return x;
}

/* Forward and backward must round a logit alike: the product may not merge with the subtraction that follows. */
__device__ inline float logit(float product, float scale) { return __fmul_rn(scale, product); }

/* --- kernels ------------------------------------------------------------------------------------------------------ */

/* One row of a tile's logits -> its weights, with the running maximum and sum; returns what O so far shrinks by. */
__device__ inline float softmax_step(float *s, float *max, float *sum, float scale, int keys)
{
    float largest = -INFINITY, total = 0;
#pragma unroll
    for (int c = 0; c < EACH; c++) {
        s[c] = (int)threadIdx.x + EDGE * c < keys ? logit(s[c], scale) : -INFINITY;
        largest = fmaxf(largest, s[c]);
    }
    float max_new = fmaxf(*max, row_max(largest)), base = max_new == -INFINITY ? 0.0f : max_new;
    float shrink = expf(*max - base);
#pragma unroll
    for (int c = 0; c < EACH; c++) total += s[c] = expf(s[c] - base);
    *sum = *sum * shrink + row_sum(total);
    *max = max_new;
    return shrink;
}

/* O, Q, K, V (B, T, NH, HS) as their views say, LSE (heads, T). Grid: heads x tiles, the longest tiles first. */
template <typename Real, int WIDTH>
__global__ void __launch_bounds__(EDGE *EDGE) forward_kernel(AttentionOutput O, float *LSE, AttentionInput Q,
                                                             AttentionInput K, AttentionInput V, int heads, int NH,
                                                             int T, int HS, float scale)
{
    const int head = (int)blockIdx.x % heads, tile = (T - 1) / SIDE - (int)blockIdx.x / heads, y = threadIdx.y;
    Shared<float> q = shared_tile<WIDTH>(0), kv = shared_tile<WIDTH>(1), p = shared_square<WIDTH>(2);
    float o[EACH][WIDTH / EDGE] = {}, s[EACH][EACH], max[EACH], sum[EACH] = {};
    for (int r = 0; r < EACH; r++) max[r] = -INFINITY;
    tile_load<Real, WIDTH>(q, Q, head, NH, tile * SIDE, T, HS);
    for (int j = 0; j <= tile; j++) {
        tile_load<Real, WIDTH>(kv, K, head, NH, j * SIDE, T, HS);
        __syncthreads();
        tiles_multiply<WIDTH>(s, q, kv);
        __syncthreads();
        tile_load<Real, WIDTH>(kv, V, head, NH, j * SIDE, T, HS);
        /* Keys up to the row itself. Rows beyond T compute with zeros and are not stored. */
#pragma unroll
        for (int r = 0; r < EACH; r++) {
            float shrink = softmax_step(s[r], &max[r], &sum[r], scale, j < tile ? SIDE : y + EDGE * r + 1);
#pragma unroll
            for (int c = 0; c < WIDTH / EDGE; c++) o[r][c] *= shrink;
        }
        square_store(p, s);
        __syncthreads();
        if (j < tile) rows_add<WIDTH, ALL>(o, p, kv);
        else rows_add<WIDTH, UP_TO_ROW>(o, p, kv);
        __syncthreads();
    }
#pragma unroll
    for (int r = 0; r < EACH; r++) {
        int row = tile * SIDE + y + EDGE * r;
        if (row >= T) continue;
        row_store<Real, WIDTH>(O, head, NH, row, HS, o[r], 1 / sum[r]);
        if (threadIdx.x == 0) LSE[(int64_t)head * T + row] = max[r] + logf(sum[r]);
    }
}

/* D (heads, T) = rowsum(dO * O); 16 lanes a row, a block takes SIDE rows of one head. */
template <typename Real>
__global__ void __launch_bounds__(EDGE *EDGE) dot_kernel(float *D, AttentionInput dO, AttentionInput O, int heads, int NH,
                                                         int T, int HS)
{
    const int head = (int)blockIdx.x % heads, first = (int)blockIdx.x / heads * SIDE + threadIdx.y;
    for (int r = 0; r < EACH; r++) {
        int row = first + EDGE * r;
        bool inside = row < T;
        const Real *dout = row_in<Real>(dO, head, NH, inside ? row : 0), *out = row_in<Real>(O, head, NH,
                                                                                             inside ? row : 0);
        float sum = 0;
        for (int d = threadIdx.x; d < HS && inside; d += EDGE) sum = fmaf(to_float(dout[d]), to_float(out[d]), sum);
        sum = row_sum(sum);
        if (inside && threadIdx.x == 0) D[(int64_t)head * T + row] = sum;
    }
}

/* dQ (B, T, NH, HS) = scale dS K, dS = P (dO V^T - D). V comes first into the tile that K is then kept in. */
template <typename Real, int WIDTH>
__global__ void __launch_bounds__(EDGE *EDGE) dq_kernel(AttentionOutput dQ, AttentionInput dO, AttentionInput Q,
                                                        AttentionInput K, AttentionInput V, const float *LSE,
                                                        const float *D, int heads, int NH, int T, int HS, float scale)
{
    const int head = (int)blockIdx.x % heads, tile = (T - 1) / SIDE - (int)blockIdx.x / heads;
    const int x = threadIdx.x, y = threadIdx.y;
    Shared<float> q = shared_tile<WIDTH>(0), dout = shared_tile<WIDTH>(1), kv = shared_tile<WIDTH>(2);
    Shared<float> ds = shared_square<WIDTH>(3);
    float dq[EACH][WIDTH / EDGE] = {}, s[EACH][EACH], dp[EACH][EACH], lse[EACH], dot[EACH];
#pragma unroll
    for (int r = 0; r < EACH; r++) {
        int row = tile * SIDE + y + EDGE * r;
        lse[r] = row < T ? LSE[(int64_t)head * T + row] : 0.0f;
        dot[r] = row < T ? D[(int64_t)head * T + row] : 0.0f;
    }
    tile_load<Real, WIDTH>(q, Q, head, NH, tile * SIDE, T, HS);
    tile_load<Real, WIDTH>(dout, dO, head, NH, tile * SIDE, T, HS);
    for (int j = 0; j <= tile; j++) {
        tile_load<Real, WIDTH>(kv, V, head, NH, j * SIDE, T, HS);
        __syncthreads();
        tiles_multiply<WIDTH>(dp, dout, kv);
        __syncthreads();
        tile_load<Real, WIDTH>(kv, K, head, NH, j * SIDE, T, HS);
        __syncthreads();
        tiles_multiply<WIDTH>(s, q, kv);
#pragma unroll
        for (int r = 0; r < EACH; r++)
#pragma unroll
            for (int c = 0; c < EACH; c++) {
                bool seen = j < tile || x + EDGE * c <= y + EDGE * r;
                s[r][c] = seen ? expf(logit(s[r][c], scale) - lse[r]) * (dp[r][c] - dot[r]) : 0.0f;
            }
        square_store(ds, s);
        if (j < tile) rows_add<WIDTH, ALL>(dq, ds, kv);
        else rows_add<WIDTH, UP_TO_ROW>(dq, ds, kv);
        __syncthreads();
    }
#pragma unroll
    for (int r = 0; r < EACH; r++)
        if (tile * SIDE + y + EDGE * r < T)
            row_store<Real, WIDTH>(dQ, head, NH, tile * SIDE + y + EDGE * r, HS, dq[r], scale);
}

/* dK = scale dS^T Q, dV = P^T dO (B, T, NH, HS), from S^T = K Q^T: keys are rows, queries columns. */
template <typename Real, int WIDTH>
__global__ void __launch_bounds__(EDGE *EDGE) dkv_kernel(AttentionOutput dK, AttentionOutput dV, AttentionInput dO,
                                                         AttentionInput Q, AttentionInput K, AttentionInput V,
                                                         const float *LSE, const float *D, int heads, int NH, int T,
                                                         int HS, float scale)
{
    const int head = (int)blockIdx.x % heads, tile = (int)blockIdx.x / heads, x = threadIdx.x, y = threadIdx.y;
    Shared<float> k = shared_tile<WIDTH>(0), v = shared_tile<WIDTH>(1);
    Shared<float> q = shared_tile<WIDTH>(2), dout = shared_tile<WIDTH>(3);
    Shared<float> square = shared_square<WIDTH>(4);
    Shared<float> lse = shared_dynamic<float>(sizeof(float) * (4 * TILE<WIDTH> + SQUARE), 2 * SIDE), dot = lse + SIDE;
    float dk[EACH][WIDTH / EDGE] = {}, dv[EACH][WIDTH / EDGE] = {}, p[EACH][EACH], ds[EACH][EACH];
    tile_load<Real, WIDTH>(k, K, head, NH, tile * SIDE, T, HS);
    tile_load<Real, WIDTH>(v, V, head, NH, tile * SIDE, T, HS);
    for (int i = tile; i * SIDE < T; i++) {
        int queries = T - i * SIDE < SIDE ? T - i * SIDE : SIDE, n = y * EDGE + x;
        tile_load<Real, WIDTH>(q, Q, head, NH, i * SIDE, T, HS);
        tile_load<Real, WIDTH>(dout, dO, head, NH, i * SIDE, T, HS);
        if (n < SIDE) {
            lse[n] = n < queries ? LSE[(int64_t)head * T + i * SIDE + n] : 0.0f;
            dot[n] = n < queries ? D[(int64_t)head * T + i * SIDE + n] : 0.0f;
        }
        __syncthreads();
        tiles_multiply<WIDTH>(p, k, q);
        tiles_multiply<WIDTH>(ds, v, dout);
#pragma unroll
        for (int c = 0; c < EACH; c++) {
            int query = x + EDGE * c;
            float lse_c = lse[query], dot_c = dot[query];
#pragma unroll
            for (int r = 0; r < EACH; r++) {
                bool seen = query < queries && (i > tile || query >= y + EDGE * r);
                p[r][c] = seen ? expf(logit(p[r][c], scale) - lse_c) : 0.0f;
                ds[r][c] = seen ? p[r][c] * (ds[r][c] - dot_c) : 0.0f;
            }
        }
        square_store(square, p);
        if (i > tile) rows_add<WIDTH, ALL>(dv, square, dout);
        else rows_add<WIDTH, FROM_ROW>(dv, square, dout);
        square_store(square, ds);
        if (i > tile) rows_add<WIDTH, ALL>(dk, square, q);
        else rows_add<WIDTH, FROM_ROW>(dk, square, q);
        __syncthreads();
    }
#pragma unroll
    for (int r = 0; r < EACH; r++) {
        int row = tile * SIDE + y + EDGE * r;
        if (row >= T) continue;
        row_store<Real, WIDTH>(dK, head, NH, row, HS, dk[r], scale);
        row_store<Real, WIDTH>(dV, head, NH, row, HS, dv[r], 1);
    }
}

/* --- launchers ---------------------------------------------------------------------------------------------------- */

static int64_t block_count(const AttentionShape *shape)
{
    return shape->B * shape->NH * ((shape->T + SIDE - 1) / SIDE);
}

static const char *words_of(cudaError_t error) { return error == cudaSuccess ? NULL : cudaGetErrorString(error); }

template <typename Real, int WIDTH>
static const char *forward_launch(AttentionOutput O, float *LSE, AttentionInput Q, AttentionInput K, AttentionInput V,
                                  const AttentionShape *shape, cudaStream_t stream)
{
    return words_of(kernel_launch(forward_kernel<Real, WIDTH>, dim3((unsigned)block_count(shape)), dim3(EDGE, EDGE),
                                  FORWARD_SHARED<WIDTH>, stream, O, LSE, Q, K, V, shape->B * shape->NH, shape->NH,
                                  shape->T, shape->HS, shape->scale));
}

template <typename Real, int WIDTH>
static const char *backward_launch(AttentionOutput dQ, AttentionOutput dK, AttentionOutput dV, float *D, AttentionInput dO,
                                   AttentionInput Q, AttentionInput K, AttentionInput V, AttentionInput O,
                                   const float *LSE, const AttentionShape *shape, cudaStream_t stream)
{
    const dim3 grid((unsigned)block_count(shape)), block(EDGE, EDGE);
    const int64_t heads = shape->B * shape->NH, NH = shape->NH, T = shape->T, HS = shape->HS;
    cudaError_t error = kernel_launch(dot_kernel<Real>, grid, block, 0, stream, D, dO, O, heads, NH, T, HS);
    if (error == cudaSuccess)
        error = kernel_launch(dq_kernel<Real, WIDTH>, grid, block, DQ_SHARED<WIDTH>, stream, dQ, dO, Q, K, V, LSE, D,
                              heads, NH, T, HS, shape->scale);
    if (error == cudaSuccess)
        error = kernel_launch(dkv_kernel<Real, WIDTH>, grid, block, DKV_SHARED<WIDTH>, stream, dK, dV, dO, Q, K, V, LSE, D,
                              heads, NH, T, HS, shape->scale);
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
    if (shape->HS > 64 && (sm == 86 || sm == 89 || sm >= 120))
        return "a head dimension above 64 needs 150 KB of shared memory a block, this GPU has 99";
    if (shape->T > 1 << 30 || block_count(shape) > INT32_MAX) return "needs at most 2^31 - 1 tiles of 64 rows";
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
    ATTENTION_ABI, ATTENTION_CUDA, "flash3_registers",
    "4 x 4 elements of S a thread, O in registers; fp32 and bf16, HS up to 128",
    refuse, saved_bytes, scratch_bytes, forward, backward,
};
}
