/* flash4_vectors.cu - flash3_registers with vectors: shared memory is read 16 bytes a lane, larger tiles a thread.
 *
 * A warp owns 16 queries: lane (x, y), x < 8, y < 4, computes rows y, y+4, .. and of each tile of SIDE = 64 keys the keys
 * x, x+8, ..: 4 x 8 elements of S, from vectors of four d. Then P V, from vectors of four keys of P and four columns of V:
 *
 *                    8 keys: x, x+8, ..                      columns 4x .. 4x+3, 32 + 4x .. , ..
 *               +---+---+---+- -+---+                       +------+------+
 *     4 rows:   | s | s | s |   | s |   for four d:         | oooo | oooo |   for four keys:
 *     y,        | s | s | s |   | s |   4 + 8 vectors,      | oooo | oooo |   4 vectors of P, HS/8 of V,
 *     y+4, ..   | s | s | s |   | s |   128 products        | oooo | oooo |   2 HS products
 *               +---+---+---+- -+---+                       +------+------+
 *
 * Forward has 8 warps, 128 queries; a warp skips tiles that none of its rows sees, and masks only those on the
 * diagonal. The kernels of backward have 4 warps: D, dQ, and dK with dV from S transposed, as before. The softmax and
 * P stay in a warp.
 *
 * Memory: tiles are read from global memory T / 128 times in forward, T / 64 times in each kernel of backward. In
 * shared memory rows of a tile are 4 floats apart from a multiple of 32, those of P 8, so the 8 lanes that are served
 * at once meet all 32 banks, whether they read vectors of 8 rows or of one, or write single elements.
 *
 * Limits: HS up to 128 (up to 64 where a block gets 99 KB of shared memory only), fp32 and bf16 (arithmetic in fp32),
 * sm_80 and later.
 *
 * Verdict: against flash3_registers, a third of the load instructions for a product of tiles and less work on the
 * diagonal. The price is more registers and shared memory a warp, hence fewer warps to hide latency. What is left:
 * loads from global memory wait where they could overlap with products (two buffers, cp.async), dQ computes S and dP a
 * second time, and all is done by FMA units while the tensor cores idle. attention/ goes on from here.
 */
#include "attention/attention.h"
#include "attention/device.h"

#include <math.h>
#include <stddef.h>
#include <stdint.h>

constexpr int SIDE = 64;        /* keys of a tile; in backward also its queries */
constexpr int WARP_ROWS = 16;   /* rows of a warp */
constexpr int LANES_X = 8;      /* lanes that share a row */
constexpr int LANES_Y = 4;
constexpr int ROWS_EACH = WARP_ROWS / LANES_Y;
constexpr int KEYS_EACH = SIDE / LANES_X;
constexpr int FORWARD_ROWS = 128;
constexpr int BACKWARD_ROWS = SIDE;
constexpr int MAX_HS = 128;
constexpr unsigned ALL_LANES = 0xffffffffu;
static_assert(LANES_X * LANES_Y == 32, "lanes of a warp");

/* A tile of rows of WIDTH elements (HS and zeros up to a multiple of 32). */
template <int WIDTH> constexpr int STRIDE = WIDTH + 4;
constexpr int SQUARE_STRIDE = SIDE + 8; /* P or dS */
static_assert(STRIDE<32> % 4 == 0 && SQUARE_STRIDE % 4 == 0, "rows begin at multiples of 16 bytes");
template <int WIDTH> constexpr int TILE = SIDE * STRIDE<WIDTH>;
template <int WIDTH> constexpr int COLUMNS_EACH = WIDTH / LANES_X;
template <int WIDTH> constexpr size_t FORWARD_SHARED = (3 * TILE<WIDTH> + FORWARD_ROWS * SQUARE_STRIDE) * sizeof(float);
template <int WIDTH> constexpr size_t DQ_SHARED = (3 * TILE<WIDTH> + BACKWARD_ROWS * SQUARE_STRIDE) * sizeof(float);
template <int WIDTH>
constexpr size_t DKV_SHARED = (4 * TILE<WIDTH> + BACKWARD_ROWS * SQUARE_STRIDE + 2 * SIDE) * sizeof(float);
static_assert(FORWARD_ROWS == 2 * SIDE, "the queries of forward take the room of two tiles");
static_assert(DKV_SHARED<64> <= 99 * 1024 && FORWARD_SHARED<64> <= 99 * 1024,
              "up to HS 64 it fits every GPU from sm_80 on");
static_assert(DKV_SHARED<MAX_HS> <= 163 * 1024 && FORWARD_SHARED<MAX_HS> <= 163 * 1024, "beyond, sm_80 and sm_90");

/* --- helpers ------------------------------------------------------------------------------------------------------ */

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline void store_float(float *to, float x) { *to = x; }
__device__ inline void store_float(__nv_bfloat16 *to, float x) { *to = __float2bfloat16_rn(x); }

__device__ inline int lane_x(void) { return threadIdx.x % LANES_X; }
/* The thread's first row of the block's; the others are LANES_Y apart. */
__device__ inline int row_first(void) { return threadIdx.x / 32 * WARP_ROWS + threadIdx.x % 32 / LANES_X; }

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

/* `count` floats of the block's shared memory after `tiles` tiles. */
template <int WIDTH>
__device__ Shared<float> shared_after(int tiles, int count)
{
    return shared_dynamic<float>(sizeof(float) * tiles * TILE<WIDTH>, count);
}

/* Rows first .. first+ROWS-1 of a view into shared memory, by all threads. Zeros beyond T and beyond HS. */
template <typename Real, int WIDTH, int ROWS>
__device__ void tile_load(Shared<float> tile, AttentionInput view, int head, int NH, int first, int T, int HS)
{
    const Real *rows = row_in<Real>(view, head, NH, first);
#pragma unroll 4
    for (int e = threadIdx.x; e < ROWS * WIDTH; e += blockDim.x) {
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
    for (int c = 0; c < COLUMNS_EACH<WIDTH>; c++) {
        int d = c / 4 * 32 + 4 * lane_x() + c % 4;
        if (d < HS) store_float(&out[d], factor * values[c]);
    }
}

/* products[r][c] = row y+4r of the warp's in `a` times row x+8c of `b`; the sum runs over d in order. */
template <int WIDTH>
__device__ void tiles_multiply(float (*products)[KEYS_EACH], Shared<const float> a, Shared<const float> b)
{
#pragma unroll
    for (int r = 0; r < ROWS_EACH; r++)
#pragma unroll
        for (int c = 0; c < KEYS_EACH; c++) products[r][c] = 0.0f;
    Shared<const float> left = a + row_first() * STRIDE<WIDTH>, right = b + lane_x() * STRIDE<WIDTH>;
#pragma unroll 1
    for (int d = 0; d < WIDTH; d += 4) {
        float4 l[ROWS_EACH];
#pragma unroll
        for (int r = 0; r < ROWS_EACH; r++) l[r] = shared_load<float4>(left + LANES_Y * r * STRIDE<WIDTH> + d);
#pragma unroll
        for (int c = 0; c < KEYS_EACH; c++) {
            float4 m = shared_load<float4>(right + LANES_X * c * STRIDE<WIDTH> + d);
#pragma unroll
            for (int r = 0; r < ROWS_EACH; r++) {
                float sum = fmaf(l[r].y, m.y, fmaf(l[r].x, m.x, products[r][c]));
                products[r][c] = fmaf(l[r].w, m.w, fmaf(l[r].z, m.z, sum));
            }
        }
    }
}

/* Which rows k of a tile a row r of weights is summed over: in tiles on the diagonal not all. A weight of 0 does not leave
 * a row out, for what stands there may be NaN. */
enum Part { ALL, UP_TO_ROW, FROM_ROW };

/* sums[r] += weights[r] times row k of a tile, the thread's columns of it; `row` is the thread's first, as k is counted. */
template <int WIDTH, Part PART>
__device__ void row_add(float (*sums)[COLUMNS_EACH<WIDTH>], const float *weights, Shared<const float> tile_row, int row,
                        int k)
{
    float4 values[WIDTH / 32];
#pragma unroll
    for (int c = 0; c < WIDTH / 32; c++) values[c] = shared_load<float4>(tile_row + 32 * c);
#pragma unroll
    for (int r = 0; r < ROWS_EACH; r++) {
        if (PART == UP_TO_ROW && k > row + LANES_Y * r) continue;
        if (PART == FROM_ROW && k < row + LANES_Y * r) continue;
#pragma unroll
        for (int c = 0; c < WIDTH / 32; c++) {
            sums[r][4 * c] = fmaf(weights[r], values[c].x, sums[r][4 * c]);
            sums[r][4 * c + 1] = fmaf(weights[r], values[c].y, sums[r][4 * c + 1]);
            sums[r][4 * c + 2] = fmaf(weights[r], values[c].z, sums[r][4 * c + 2]);
            sums[r][4 * c + 3] = fmaf(weights[r], values[c].w, sums[r][4 * c + 3]);
        }
    }
}

/* sums[r] += sum over k of the warp's weights[y+4r][k] * row k of `tile`. `shift`: how far rows of the block are ahead
 * of k. */
template <int WIDTH, Part PART>
__device__ void rows_add(float (*sums)[COLUMNS_EACH<WIDTH>], Shared<const float> weights, Shared<const float> tile,
                         int shift)
{
    Shared<const float> mine = weights + row_first() * SQUARE_STRIDE, column = tile + 4 * lane_x();
    const int row = row_first() + shift;
#pragma unroll 1
    for (int k = 0; k < SIDE; k += 4) {
        float4 w[ROWS_EACH];
#pragma unroll
        for (int r = 0; r < ROWS_EACH; r++) w[r] = shared_load<float4>(mine + LANES_Y * r * SQUARE_STRIDE + k);
        const float w0[ROWS_EACH] = {w[0].x, w[1].x, w[2].x, w[3].x}, w1[ROWS_EACH] = {w[0].y, w[1].y, w[2].y, w[3].y};
        const float w2[ROWS_EACH] = {w[0].z, w[1].z, w[2].z, w[3].z}, w3[ROWS_EACH] = {w[0].w, w[1].w, w[2].w, w[3].w};
        row_add<WIDTH, PART>(sums, w0, column + k * STRIDE<WIDTH>, row, k);
        row_add<WIDTH, PART>(sums, w1, column + (k + 1) * STRIDE<WIDTH>, row, k + 1);
        row_add<WIDTH, PART>(sums, w2, column + (k + 2) * STRIDE<WIDTH>, row, k + 2);
        row_add<WIDTH, PART>(sums, w3, column + (k + 3) * STRIDE<WIDTH>, row, k + 3);
    }
}
static_assert(ROWS_EACH == 4, "rows_add spells out four rows");

/* The thread's elements of P or dS into the square. Whoever reads them is in the same warp. */
__device__ inline void square_store(Shared<float> square, const float (*values)[KEYS_EACH])
{
    __syncwarp();
#pragma unroll
    for (int r = 0; r < ROWS_EACH; r++)
#pragma unroll
        for (int c = 0; c < KEYS_EACH; c++)
            square[(row_first() + LANES_Y * r) * SQUARE_STRIDE + lane_x() + LANES_X * c] = values[r][c];
    __syncwarp();
}

/* Over the 8 lanes of a row. */
__device__ inline float row_max(float x)
{
    for (int step = LANES_X / 2; step; step >>= 1) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, step));
    return x;
}

__device__ inline float row_sum(float x)
{
    for (int step = LANES_X / 2; step; step >>= 1) x += __shfl_xor_sync(ALL_LANES, x, step);
    return x;
}

/* Forward and backward must round a logit alike: the product may not merge with the subtraction that follows. */
__device__ inline float logit(float product, float scale) { return __fmul_rn(scale, product); }

/* --- kernels ------------------------------------------------------------------------------------------------------ */

/* One row of a tile's logits, `keys` of them seen -> its weights, with the running maximum and sum; returns what O so far
 * shrinks by. */
__device__ inline float softmax_step(float *s, float *max, float *sum, float scale, int keys)
{
    float largest = -INFINITY, total = 0;
#pragma unroll
    for (int c = 0; c < KEYS_EACH; c++) {
        s[c] = lane_x() + LANES_X * c < keys ? logit(s[c], scale) : -INFINITY;
        largest = fmaxf(largest, s[c]);
    }
    float max_new = fmaxf(*max, row_max(largest)), base = max_new == -INFINITY ? 0.0f : max_new;
    float shrink = expf(*max - base);
#pragma unroll
    for (int c = 0; c < KEYS_EACH; c++) total += s[c] = expf(s[c] - base);
    *sum = *sum * shrink + row_sum(total);
    *max = max_new;
    return shrink;
}

/* O, Q, K, V (B, T, NH, HS) as their views say, LSE (heads, T). Grid: heads x tiles, the longest tiles first. */
template <typename Real, int WIDTH>
__global__ void __launch_bounds__(2 * FORWARD_ROWS, WIDTH <= 64 ? 2 : 1)
    forward_kernel(AttentionOutput O, float *LSE, AttentionInput Q, AttentionInput K, AttentionInput V, int heads,
                   int NH, int T, int HS, float scale)
{
    const int head = (int)blockIdx.x % heads, tile = (T - 1) / FORWARD_ROWS - (int)blockIdx.x / heads;
    const int first = tile * FORWARD_ROWS, last = first + FORWARD_ROWS < T ? first + FORWARD_ROWS : T;
    const int warp_row = threadIdx.x / 32 * WARP_ROWS;
    Shared<float> q = shared_after<WIDTH>(0, 2 * TILE<WIDTH>), kv = shared_after<WIDTH>(2, TILE<WIDTH>);
    Shared<float> p = shared_after<WIDTH>(3, FORWARD_ROWS * SQUARE_STRIDE);
    float o[ROWS_EACH][COLUMNS_EACH<WIDTH>] = {}, s[ROWS_EACH][KEYS_EACH], max[ROWS_EACH], sum[ROWS_EACH] = {};
    for (int r = 0; r < ROWS_EACH; r++) max[r] = -INFINITY;
    tile_load<Real, WIDTH, FORWARD_ROWS>(q, Q, head, NH, first, T, HS);
    for (int j = 0; j * SIDE < last; j++) {
        /* Of this tile, row n of the block sees the keys up to n + shift. */
        const int shift = first - j * SIDE;
        const bool sees = warp_row + WARP_ROWS + shift > 0, sees_all = warp_row + shift >= SIDE - 1;
        tile_load<Real, WIDTH, SIDE>(kv, K, head, NH, j * SIDE, T, HS);
        __syncthreads();
        if (sees) tiles_multiply<WIDTH>(s, q, kv);
        __syncthreads();
        tile_load<Real, WIDTH, SIDE>(kv, V, head, NH, j * SIDE, T, HS);
        if (sees) {
#pragma unroll
            for (int r = 0; r < ROWS_EACH; r++) {
                float shrink = softmax_step(s[r], &max[r], &sum[r], scale, row_first() + LANES_Y * r + shift + 1);
#pragma unroll
                for (int c = 0; c < COLUMNS_EACH<WIDTH>; c++) o[r][c] *= shrink;
            }
            square_store(p, s);
        }
        __syncthreads();
        if (sees_all) rows_add<WIDTH, ALL>(o, p, kv, shift);
        else if (sees) rows_add<WIDTH, UP_TO_ROW>(o, p, kv, shift);
        __syncthreads();
    }
#pragma unroll
    for (int r = 0; r < ROWS_EACH; r++) {
        int row = first + row_first() + LANES_Y * r;
        if (row >= T) continue;
        row_store<Real, WIDTH>(O, head, NH, row, HS, o[r], 1 / sum[r]);
        if (lane_x() == 0) LSE[(int64_t)head * T + row] = max[r] + logf(sum[r]);
    }
}

/* D (heads, T) = rowsum(dO * O); 8 lanes a row, a block takes BACKWARD_ROWS rows of one head. */
template <typename Real>
__global__ void __launch_bounds__(2 * BACKWARD_ROWS) dot_kernel(float *D, AttentionInput dO, AttentionInput O, int heads,
                                                                int NH, int T, int HS)
{
    const int head = (int)blockIdx.x % heads, first = (int)blockIdx.x / heads * BACKWARD_ROWS + row_first();
    for (int r = 0; r < ROWS_EACH; r++) {
        int row = first + LANES_Y * r;
        bool inside = row < T;
        const Real *dout = row_in<Real>(dO, head, NH, inside ? row : 0), *out = row_in<Real>(O, head, NH,
                                                                                             inside ? row : 0);
        float sum = 0;
        for (int d = lane_x(); d < HS && inside; d += LANES_X) sum = fmaf(to_float(dout[d]), to_float(out[d]), sum);
        sum = row_sum(sum);
        if (inside && lane_x() == 0) D[(int64_t)head * T + row] = sum;
    }
}

/* dQ (B, T, NH, HS) = scale dS K, dS = P (dO V^T - D). V comes first into the tile that K is then kept in. */
template <typename Real, int WIDTH>
__global__ void __launch_bounds__(2 * BACKWARD_ROWS) dq_kernel(AttentionOutput dQ, AttentionInput dO, AttentionInput Q,
                                                               AttentionInput K, AttentionInput V, const float *LSE,
                                                               const float *D, int heads, int NH, int T, int HS,
                                                               float scale)
{
    const int head = (int)blockIdx.x % heads, tile = (T - 1) / BACKWARD_ROWS - (int)blockIdx.x / heads;
    const int first = tile * BACKWARD_ROWS;
    Shared<float> q = shared_after<WIDTH>(0, TILE<WIDTH>), dout = shared_after<WIDTH>(1, TILE<WIDTH>);
    Shared<float> kv = shared_after<WIDTH>(2, TILE<WIDTH>), square = shared_after<WIDTH>(3, BACKWARD_ROWS * SQUARE_STRIDE);
    float dq[ROWS_EACH][COLUMNS_EACH<WIDTH>] = {}, s[ROWS_EACH][KEYS_EACH], dp[ROWS_EACH][KEYS_EACH];
    float lse[ROWS_EACH], dot[ROWS_EACH];
#pragma unroll
    for (int r = 0; r < ROWS_EACH; r++) {
        int row = first + row_first() + LANES_Y * r;
        lse[r] = row < T ? LSE[(int64_t)head * T + row] : 0.0f;
        dot[r] = row < T ? D[(int64_t)head * T + row] : 0.0f;
    }
    tile_load<Real, WIDTH, BACKWARD_ROWS>(q, Q, head, NH, first, T, HS);
    tile_load<Real, WIDTH, BACKWARD_ROWS>(dout, dO, head, NH, first, T, HS);
    for (int j = 0; j <= tile; j++) {
        tile_load<Real, WIDTH, SIDE>(kv, V, head, NH, j * SIDE, T, HS);
        __syncthreads();
        tiles_multiply<WIDTH>(dp, dout, kv);
        __syncthreads();
        tile_load<Real, WIDTH, SIDE>(kv, K, head, NH, j * SIDE, T, HS);
        __syncthreads();
        tiles_multiply<WIDTH>(s, q, kv);
#pragma unroll
        for (int r = 0; r < ROWS_EACH; r++)
#pragma unroll
            for (int c = 0; c < KEYS_EACH; c++) {
                bool seen = j < tile || lane_x() + LANES_X * c <= row_first() + LANES_Y * r;
                s[r][c] = seen ? expf(logit(s[r][c], scale) - lse[r]) * (dp[r][c] - dot[r]) : 0.0f;
            }
        square_store(square, s);
        if (j < tile) rows_add<WIDTH, ALL>(dq, square, kv, 0);
        else rows_add<WIDTH, UP_TO_ROW>(dq, square, kv, 0);
        __syncthreads();
    }
#pragma unroll
    for (int r = 0; r < ROWS_EACH; r++) {
        int row = first + row_first() + LANES_Y * r;
        if (row < T) row_store<Real, WIDTH>(dQ, head, NH, row, HS, dq[r], scale);
    }
}

/* dK = scale dS^T Q, dV = P^T dO (B, T, NH, HS), from S^T = K Q^T: keys are rows, queries columns. */
template <typename Real, int WIDTH>
__global__ void __launch_bounds__(2 * BACKWARD_ROWS)
    dkv_kernel(AttentionOutput dK, AttentionOutput dV, AttentionInput dO, AttentionInput Q, AttentionInput K,
               AttentionInput V, const float *LSE, const float *D, int heads, int NH, int T, int HS, float scale)
{
    const int head = (int)blockIdx.x % heads, tile = (int)blockIdx.x / heads, first = tile * BACKWARD_ROWS,
    n = threadIdx.x;
    Shared<float> k = shared_after<WIDTH>(0, TILE<WIDTH>), v = shared_after<WIDTH>(1, TILE<WIDTH>);
    Shared<float> q = shared_after<WIDTH>(2, TILE<WIDTH>), dout = shared_after<WIDTH>(3, TILE<WIDTH>);
    Shared<float> square = shared_after<WIDTH>(4, BACKWARD_ROWS * SQUARE_STRIDE + 2 * SIDE);
    Shared<float> lse = square + BACKWARD_ROWS * SQUARE_STRIDE, dot = lse + SIDE;
    float dk[ROWS_EACH][COLUMNS_EACH<WIDTH>] = {}, dv[ROWS_EACH][COLUMNS_EACH<WIDTH>] = {};
    float s[ROWS_EACH][KEYS_EACH];
    tile_load<Real, WIDTH, BACKWARD_ROWS>(k, K, head, NH, first, T, HS);
    tile_load<Real, WIDTH, BACKWARD_ROWS>(v, V, head, NH, first, T, HS);
    for (int i = tile; i * SIDE < T; i++) {
        int queries = T - i * SIDE < SIDE ? T - i * SIDE : SIDE;
        tile_load<Real, WIDTH, SIDE>(q, Q, head, NH, i * SIDE, T, HS);
        tile_load<Real, WIDTH, SIDE>(dout, dO, head, NH, i * SIDE, T, HS);
        if (n < SIDE) {
            lse[n] = n < queries ? LSE[(int64_t)head * T + i * SIDE + n] : 0.0f;
            dot[n] = n < queries ? D[(int64_t)head * T + i * SIDE + n] : 0.0f;
        }
        __syncthreads();
        tiles_multiply<WIDTH>(s, k, q);
#pragma unroll
        for (int c = 0; c < KEYS_EACH; c++) {
            int query = lane_x() + LANES_X * c;
            float lse_c = lse[query];
#pragma unroll
            for (int r = 0; r < ROWS_EACH; r++) {
                bool seen = query < queries && (i > tile || query >= row_first() + LANES_Y * r);
                s[r][c] = seen ? expf(logit(s[r][c], scale) - lse_c) : 0.0f;
            }
        }
        square_store(square, s);
        if (i > tile) rows_add<WIDTH, ALL>(dv, square, dout, 0);
        else rows_add<WIDTH, FROM_ROW>(dv, square, dout, 0);
        /* dS = P (dP - D), with the thread's own elements of P back from the square: registers are short here. */
        tiles_multiply<WIDTH>(s, v, dout);
#pragma unroll
        for (int c = 0; c < KEYS_EACH; c++) {
            int query = lane_x() + LANES_X * c;
            float dot_c = dot[query];
#pragma unroll
            for (int r = 0; r < ROWS_EACH; r++) {
                bool seen = query < queries && (i > tile || query >= row_first() + LANES_Y * r);
                float p = square[(row_first() + LANES_Y * r) * SQUARE_STRIDE + query];
                s[r][c] = seen ? p * (s[r][c] - dot_c) : 0.0f;
            }
        }
        square_store(square, s);
        if (i > tile) rows_add<WIDTH, ALL>(dk, square, q, 0);
        else rows_add<WIDTH, FROM_ROW>(dk, square, q, 0);
        __syncthreads();
    }
#pragma unroll
    for (int r = 0; r < ROWS_EACH; r++) {
        int row = first + row_first() + LANES_Y * r;
        if (row >= T) continue;
        row_store<Real, WIDTH>(dK, head, NH, row, HS, dk[r], scale);
        row_store<Real, WIDTH>(dV, head, NH, row, HS, dv[r], 1);
    }
}

/* --- launchers ---------------------------------------------------------------------------------------------------- */

static int64_t block_count(const AttentionShape *shape, int rows = BACKWARD_ROWS)
{
    return shape->B * shape->NH * ((shape->T + rows - 1) / rows);
}

static const char *words_of(cudaError_t error) { return error == cudaSuccess ? NULL : cudaGetErrorString(error); }

template <typename Real, int WIDTH>
static const char *forward_launch(AttentionOutput O, float *LSE, AttentionInput Q, AttentionInput K, AttentionInput V,
                                  const AttentionShape *shape, cudaStream_t stream)
{
    const dim3 grid((unsigned)block_count(shape, FORWARD_ROWS)), block(2 * FORWARD_ROWS);
    return words_of(kernel_launch(forward_kernel<Real, WIDTH>, grid, block, FORWARD_SHARED<WIDTH>, stream, O, LSE, Q, K, V,
                                  shape->B * shape->NH, shape->NH, shape->T, shape->HS, shape->scale));
}

template <typename Real, int WIDTH>
static const char *backward_launch(AttentionOutput dQ, AttentionOutput dK, AttentionOutput dV, float *D, AttentionInput dO,
                                   AttentionInput Q, AttentionInput K, AttentionInput V, AttentionInput O,
                                   const float *LSE, const AttentionShape *shape, cudaStream_t stream)
{
    const dim3 grid((unsigned)block_count(shape)), block(2 * BACKWARD_ROWS);
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
        return "a head dimension above 64 needs 151 KB of shared memory a block, this GPU has 99";
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
    ATTENTION_ABI, ATTENTION_CUDA, "flash4_vectors",
    "float4 from shared memory, 4 x 8 elements of S a thread; fp32 and bf16, HS up to 128",
    refuse, saved_bytes, scratch_bytes, forward, backward,
};
}
