/* mma3_pipeline.cu - mma2_swizzle with two buffers: the next tiles come from global memory while this one is computed with.
 *
 * The work is divided as in mma1_plain, tiles are swizzled and fragments come by ldmatrix as in mma2_swizzle. What differs
 * is that loads are not waited for where they are issued. cp.async copies 16 bytes from global to shared memory behind the
 * thread's back, by way of no register. Two pairs of tiles take turns:
 *
 *        pair 0    | copy 0 |  compute 0       |  copy 2          |  compute 2       |
 *        pair 1    |        |  copy 1          |  compute 1       |  copy 3          |
 *                           ^                  ^                  ^
 *                   wait for own copies, barrier, issue the next copies: once a tile
 *
 * The one barrier does for two: what all threads have copied is there, and all warps are done with the other pair, which the
 * copies issued right behind it overwrite. Copies have the whole time of a tile's products to arrive: in forward two
 * products of 64 x 64 x WIDTH and a softmax for 2 x 64 rows of WIDTH.
 *
 * In the kernel for dK and dV, LSE and D of the next queries have to come early too. They need not begin at multiples of 16
 * bytes, so 64 threads fetch a number each into a register before the products and store it behind them.
 *
 * Backward, the diagonal, what is not finite: as mma1_plain explains them. A thread looks for NaN in the chunks that it has
 * copied itself, for which its own wait is enough.
 *
 * Memory: global memory is read as before, each tile T / 64 times. Shared memory is twice that of the walking tiles: 96 KB a
 * block for dQ at HS 128, of the 99 that every GPU from sm_80 on has.
 *
 * Limits: bf16, HS a multiple of 8 up to 128, sm_80 and later. Views of any strides; rows that do not begin at multiples of
 * 16 bytes are moved by elements, and waited for.
 *
 * Verdict: against mma2_swizzle the time for loads and that for products no longer add up, the longer of them counts. The
 * price is shared memory, so fewer blocks on a multiprocessor, which are needed less. Expect more where few blocks fit
 * anyhow, at HS 128 and in backward, than where other blocks filled the gaps before. What is left: a warp owns 16 rows, so
 * each fragment of K and V is read for a single step of 16 rows where it could serve two; Q is read again for every tile;
 * softmax and products take turns within a warp; S and dP are computed twice in backward. attention/flash_mma.cu goes on
 * from here.
 */
#include "attention/attention.h"
#include "attention/tensor_core.h"

#include <limits.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>

constexpr int WARPS = 4;
constexpr int THREADS = 32 * WARPS;
constexpr int STEP = 16;           /* rows of a warp, and the depth of one product */
constexpr int SIDE = STEP * WARPS; /* rows that a block owns; keys of a tile */
constexpr int PART = 32;           /* queries of a tile where the block owns keys */
constexpr int CHUNK = 8;           /* bf16 in 16 bytes */
constexpr int MAX_HS = 128;
constexpr float LOG2_E = 1.4426950408889634f;
constexpr unsigned ALL_LANES = 0xffffffffu;
static_assert(SIDE % PART == 0 && PART % STEP == 0, "tiles of queries begin where tiles of keys do");

/* Bytes of a tile of ROWS rows of WIDTH elements (HS and zeros up to 64 or 128), and of the kernels' shared memory, which
 * ends with the first and the last row of a tile on the diagonal that is not finite. */
template <int WIDTH, int ROWS> constexpr int TILE = ROWS * WIDTH * 2;
template <int WIDTH> constexpr int FORWARD_TILES = 5 * TILE<WIDTH, SIDE>;
template <int WIDTH> constexpr int DQ_TILES = 6 * TILE<WIDTH, SIDE>;
template <int WIDTH> constexpr int DKV_TILES = 2 * TILE<WIDTH, SIDE> + 4 * TILE<WIDTH, PART>;
constexpr int BAD_BYTES = 2 * sizeof(int);
constexpr int STATS = 2 * PART; /* LSE and D of a tile of queries */
constexpr int STATS_BYTES = 2 * STATS * sizeof(float);
static_assert(STATS <= THREADS, "a thread fetches one");
static_assert(DQ_TILES<MAX_HS> + BAD_BYTES <= 99 * 1024, "it fits every GPU from sm_80 on");

struct Sizes {
    int heads, NH, T, HS; /* heads = B * NH */
    int aligned;          /* every row of every view begins at a multiple of 16 bytes */
    float scale;
};

/* --- helpers ------------------------------------------------------------------------------------------------------ */

/* The lane's place in fragments, and its warp's rows within those of the block. */
struct Lane {
    int g, q, first;
};

__device__ inline Lane lane_here(void)
{
    int thread = (int)threadIdx.x;
    return {thread % 32 / 4, thread % 4, thread / 32 * STEP};
}

/* Row `row` (HS) of head number `head` of a view. */
__device__ inline const __nv_bfloat16 *row_in(AttentionInput view, int head, int NH, int64_t row)
{
    return (const __nv_bfloat16 *)view.data + head / NH * view.batch_stride + head % NH * view.head_stride +
           row * view.row_stride;
}
__device__ inline __nv_bfloat16 *row_out(AttentionOutput view, int head, int NH, int64_t row)
{
    return (__nv_bfloat16 *)view.data + head / NH * view.batch_stride + head % NH * view.head_stride + row * view.row_stride;
}

/* Eight neighbouring elements of a row. */
__device__ inline uint4 chunk_read(const __nv_bfloat16 *at, int aligned)
{
    if (aligned) return *(const uint4 *)at;
    uint32_t word[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
        word[i] = __bfloat16_as_ushort(at[2 * i]) | (uint32_t)__bfloat16_as_ushort(at[2 * i + 1]) << 16;
    return make_uint4(word[0], word[1], word[2], word[3]);
}

/* Where a tile has chunk `chunk` of row `row`, in bytes. */
template <int WIDTH>
__device__ inline int chunk_place(int row, int chunk) { return row * WIDTH * 2 + (chunk ^ (row & 7)) * CHUNK * 2; }

/* Rows first .. first+ROWS-1 of a view into a tile, zeros beyond T and beyond HS: the copies are begun, not waited for. */
template <int WIDTH, int ROWS>
__device__ inline void tile_load(Shared<unsigned char> tile, AttentionInput view, int head, int first, const Sizes &sizes)
{
    const __nv_bfloat16 *rows = row_in(view, head, sizes.NH, first);
#pragma unroll 1 /* there is nothing to wait for, and addresses of several rows at once cost registers */
    for (int e = threadIdx.x; e < ROWS * WIDTH / CHUNK; e += THREADS) {
        int row = e / (WIDTH / CHUNK), chunk = e % (WIDTH / CHUNK);
        bool inside = first + row < sizes.T && chunk * CHUNK < sizes.HS;
        const __nv_bfloat16 *from = inside ? rows + row * view.row_stride + chunk * CHUNK : (const __nv_bfloat16 *)view.data;
        Shared<unsigned char> to = tile + chunk_place<WIDTH>(row, chunk);
        if (sizes.aligned) copy_async_16(shared_address(to), from, inside);
        else shared_store(to, inside ? chunk_read(from, false) : make_uint4(0, 0, 0, 0));
    }
}

/* The same rows of two views into the tiles of pair 0 or 1 of the two that begin at `pairs`. Closes the group of copies. */
template <int WIDTH, int ROWS>
__device__ inline void pair_load(Shared<unsigned char> pairs, int pair, AttentionInput view, AttentionInput other, int head,
                                 int first, const Sizes &sizes)
{
    Shared<unsigned char> tile = pairs + pair * 2 * TILE<WIDTH, ROWS>;
    tile_load<WIDTH, ROWS>(tile, view, head, first, sizes);
    tile_load<WIDTH, ROWS>(tile + TILE<WIDTH, ROWS>, other, head, first, sizes);
    copies_commit();
}

/* A pair of bf16 with 0 for what is not finite. */
__device__ inline uint32_t finite_pair(uint32_t x)
{
    uint32_t low = (x & 0x7f80u) == 0x7f80u ? 0 : x & 0xffffu;
    uint32_t high = (x & 0x7f800000u) == 0x7f800000u ? 0 : x & 0xffff0000u;
    return low | high;
}

/* Puts 0 for what is not finite in the chunks that this thread itself has copied and waited for, and lets bad[0] and bad[1]
 * take in the rows where that was, of which the tile's first counts as `first`. */
template <int WIDTH, int ROWS>
__device__ inline void tile_purge(Shared<unsigned char> tile, Shared<int> bad, int first)
{
#pragma unroll 1
    for (int e = threadIdx.x; e < ROWS * WIDTH / CHUNK; e += THREADS) {
        int row = e / (WIDTH / CHUNK), place = chunk_place<WIDTH>(row, e % (WIDTH / CHUNK));
        uint4 x = shared_load<uint4>(tile + place);
        uint4 y = make_uint4(finite_pair(x.x), finite_pair(x.y), finite_pair(x.z), finite_pair(x.w));
        if (x.x == y.x && x.y == y.y && x.z == y.z && x.w == y.w) continue;
        shared_store(tile + place, y);
        atomicMin(bad, first + row);
        atomicMax(bad + 1, first + row);
    }
}

/* The address of a row of one of the four matrices that make 16 x 16 elements, rows row .. row+15, columns 16 k .. of a
 * tile: the one that ldmatrix takes from this lane, where the second matrix stands below the first, or right of it. */
template <int WIDTH>
__device__ inline SharedAddress row_down(Shared<unsigned char> tile, int row, int k)
{
    int lane = (int)threadIdx.x % 32;
    return shared_address(tile) + chunk_place<WIDTH>(row + lane % 16, 2 * k ^ lane / 16);
}
template <int WIDTH>
__device__ inline SharedAddress row_right(Shared<unsigned char> tile, int row, int k)
{
    int lane = (int)threadIdx.x % 32;
    return shared_address(tile) + chunk_place<WIDTH>(row + lane % 8 + lane / 16 * 8, 2 * k ^ lane / 8 % 2);
}

template <int N>
__device__ inline void set_zero(float (&x)[N][4])
{
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) x[n][e] = 0;
}

/* Which blocks of 16 columns of S count, from .. to-1. */
struct Span {
    int from, to;
};

/* products (16, 8 N) = the warp's rows of `a` times all rows of `b`; with MASKED only blocks in the span, 0 elsewhere. */
template <int WIDTH, bool MASKED, int N>
__device__ inline void tiles_multiply(float (&products)[N][4], Shared<unsigned char> a, Shared<unsigned char> b, Span span,
                                      Lane lane)
{
    set_zero(products);
#pragma unroll
    for (int k = 0; k < WIDTH / STEP; k++) {
        uint32_t left[4];
        ldmatrix_x4(left, row_down<WIDTH>(a, lane.first, k)); /* A */
#pragma unroll
        for (int n = 0; n < N / 2; n++) {
            uint32_t right[4];
            if (MASKED && (n < span.from || n >= span.to)) continue;
            ldmatrix_x4(right, row_right<WIDTH>(b, n * STEP, k)); /* two B, whose columns are rows */
            mma_bf16(products[2 * n], left, right[0], right[1]);
            mma_bf16(products[2 * n + 1], left, right[2], right[3]);
        }
    }
}

/* sums (16, WIDTH) += weights (16, 8 N), rounded, times the rows of `tile`; with MASKED only those in the span. */
template <int WIDTH, bool MASKED, int N>
__device__ inline void rows_add(float (&sums)[WIDTH / 8][4], const float (&weights)[N][4], Shared<unsigned char> tile,
                                Span span)
{
#pragma unroll
    for (int k = 0; k < N / 2; k++) {
        const float(&x)[4] = weights[2 * k], (&y)[4] = weights[2 * k + 1];
        const uint32_t left[4] = {pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(y[0], y[1]),
                                  pack_bf16(y[2], y[3])};
        if (MASKED && (k < span.from || k >= span.to)) continue;
#pragma unroll
        for (int n = 0; n < WIDTH / STEP; n++) {
            uint32_t right[4];
            ldmatrix_x4_trans(right, row_down<WIDTH>(tile, k * STEP, n)); /* two B, whose columns are columns */
            mma_bf16(sums[2 * n], left, right[0], right[1]);
            mma_bf16(sums[2 * n + 1], left, right[2], right[3]);
        }
    }
}

/* The lane's elements of rows row and row+8 of `view`, each row times its factor, rounded. */
template <int WIDTH>
__device__ inline void rows_store(AttentionOutput view, int head, int row, const float (&sums)[WIDTH / 8][4], float factor,
                                  float factor_below, Lane lane, const Sizes &sizes)
{
#pragma unroll
    for (int half = 0; half < 2; half++) {
        if (row + 8 * half >= sizes.T) continue;
        __nv_bfloat16 *out = row_out(view, head, sizes.NH, row + 8 * half) + 2 * lane.q;
#pragma unroll
        for (int n = 0; n < WIDTH / 8; n++) {
            if (n * 8 >= sizes.HS) continue;
            float times = half ? factor_below : factor;
            uint32_t pair = pack_bf16(sums[n][2 * half] * times, sums[n][2 * half + 1] * times);
            if (sizes.aligned) *(uint32_t *)(out + n * 8) = pair;
            else {
                out[n * 8] = __ushort_as_bfloat16((unsigned short)(pair & 0xffff));
                out[n * 8 + 1] = __ushort_as_bfloat16((unsigned short)(pair >> 16));
            }
        }
    }
}

/* Over the 4 lanes of a row. */
__device__ inline float row_max(float x)
{
    x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 1));
    return fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 2));
}

__device__ inline float row_sum(float x)
{
    x += __shfl_xor_sync(ALL_LANES, x, 1);
    return x + __shfl_xor_sync(ALL_LANES, x, 2);
}

/* The dot product of row `row` of a and of b, 0 beyond T, for all 4 lanes of the row. */
template <int WIDTH>
__device__ inline float row_dot(AttentionInput a, AttentionInput b, int head, int row, Lane lane, const Sizes &sizes)
{
    float sum = 0;
    if (row < sizes.T) {
        const __nv_bfloat16 *left = row_in(a, head, sizes.NH, row), *right = row_in(b, head, sizes.NH, row);
#pragma unroll
        for (int d = lane.q * CHUNK; d < WIDTH; d += 4 * CHUNK) {
            if (d >= sizes.HS) continue;
            uint4 x = chunk_read(left + d, sizes.aligned), y = chunk_read(right + d, sizes.aligned);
            const uint32_t xs[4] = {x.x, x.y, x.z, x.w}, ys[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
            for (int i = 0; i < 4; i++) {
                sum = fmaf(__uint_as_float(xs[i] << 16), __uint_as_float(ys[i] << 16), sum);
                sum = fmaf(__uint_as_float(xs[i] & 0xffff0000u), __uint_as_float(ys[i] & 0xffff0000u), sum);
            }
        }
    }
    return row_sum(sum);
}

/* Forward and backward must round a logit alike: the product may not merge with the subtraction that follows. */
__device__ inline float logit(float product, float scale) { return __fmul_rn(scale, product); }

/* exp(x - base). The difference is rounded before it is turned into powers of two, so that large logits lose nothing. */
__device__ inline float exp_above(float x, float base) { return exp2_fast((x - base) * LOG2_E); }

/* --- forward ------------------------------------------------------------------------------------------------------ */

/* Of the warp's 16 rows; the arrays of two are for rows g and g+8. A sum is the lane's own share of it. */
template <int WIDTH>
struct ForwardState {
    float o[WIDTH / 8][4], max[2], sum[2];
};

/* One tile of keys. DIAGONAL: its keys are the block's own rows. */
template <int WIDTH, bool DIAGONAL>
__device__ inline void forward_tile(ForwardState<WIDTH> &state, Shared<unsigned char> q, Shared<unsigned char> k,
                                    Shared<unsigned char> v, Lane lane, float scale)
{
    const Span span = {0, lane.first / STEP + 1};
    float s[SIDE / 8][4];
    tiles_multiply<WIDTH, DIAGONAL>(s, q, k, span, lane);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float largest = -INFINITY;
#pragma unroll
        for (int n = 0; n < SIDE / 8; n++)
#pragma unroll
            for (int e = 2 * half; e < 2 * half + 2; e++) {
                bool seen = !DIAGONAL || n * 8 + 2 * lane.q + e % 2 <= lane.first + lane.g + 8 * half;
                s[n][e] = seen ? logit(s[n][e], scale) : -INFINITY;
                largest = fmaxf(largest, s[n][e]);
            }
        float max = fmaxf(state.max[half], row_max(largest)), base = max == -INFINITY ? 0.0f : max;
        float shrink = exp_above(state.max[half], base);
        state.max[half] = max;
        state.sum[half] *= shrink;
#pragma unroll
        for (int n = 0; n < WIDTH / 8; n++)
#pragma unroll
            for (int e = 2 * half; e < 2 * half + 2; e++) state.o[n][e] *= shrink;
#pragma unroll
        for (int n = 0; n < SIDE / 8; n++)
#pragma unroll
            for (int e = 2 * half; e < 2 * half + 2; e++) state.sum[half] += s[n][e] = exp_above(s[n][e], base);
    }
    rows_add<WIDTH, DIAGONAL>(state.o, s, v, span);
}

/* O, Q, K, V (B, T, NH, HS) as their views say, LSE (heads, T). Grid: heads x tiles, the longest tiles first. */
template <int WIDTH>
__global__ void __launch_bounds__(THREADS) forward_kernel(AttentionOutput O, float *LSE, AttentionInput Q, AttentionInput K,
                                                          AttentionInput V, Sizes sizes)
{
    const int head = (int)blockIdx.x % sizes.heads, tile = (sizes.T - 1) / SIDE - (int)blockIdx.x / sizes.heads;
    const Lane lane = lane_here();
    Shared<unsigned char> q = shared_dynamic<unsigned char>(0, FORWARD_TILES<WIDTH>), pairs = q + TILE<WIDTH, SIDE>;
    Shared<int> bad = shared_dynamic<int>(FORWARD_TILES<WIDTH>, 2);
    ForwardState<WIDTH> state;
    set_zero(state.o);
    state.max[0] = state.max[1] = -INFINITY;
    state.sum[0] = state.sum[1] = 0;
    if (threadIdx.x < 2) bad[threadIdx.x] = threadIdx.x ? -1 : INT_MAX;
    tile_load<WIDTH, SIDE>(q, Q, head, tile * SIDE, sizes);
    pair_load<WIDTH, SIDE>(pairs, 0, K, V, head, 0, sizes);
    __syncthreads(); /* `bad` is set */
    for (int j = 0; j <= tile; j++) {
        Shared<unsigned char> k = pairs + j % 2 * 2 * TILE<WIDTH, SIDE>, v = k + TILE<WIDTH, SIDE>;
        copies_wait<0>();
        if (j == tile) tile_purge<WIDTH, SIDE>(v, bad, 0);
        __syncthreads();
        if (j < tile) pair_load<WIDTH, SIDE>(pairs, (j + 1) % 2, K, V, head, (j + 1) * SIDE, sizes);
        if (j < tile) forward_tile<WIDTH, false>(state, q, k, v, lane, sizes.scale);
        else forward_tile<WIDTH, true>(state, q, k, v, lane, sizes.scale);
    }
    const int row = lane.first + lane.g, first_bad = bad[0];
    float factor[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float sum = row_sum(state.sum[half]);
        factor[half] = row + 8 * half >= first_bad ? NAN : 1 / sum;
        if (lane.q == 0 && tile * SIDE + row + 8 * half < sizes.T)
            LSE[(int64_t)head * sizes.T + tile * SIDE + row + 8 * half] = state.max[half] + logf(sum);
    }
    rows_store<WIDTH>(O, head, tile * SIDE + row, state.o, factor[0], factor[1], lane, sizes);
}

/* --- backward ----------------------------------------------------------------------------------------------------- */

/* dq (16, WIDTH) += dS K of one tile of keys; lse and dot are LSE and D of rows g and g+8. */
template <int WIDTH, bool DIAGONAL>
__device__ inline void dq_tile(float (&dq)[WIDTH / 8][4], Shared<unsigned char> q, Shared<unsigned char> dout,
                               Shared<unsigned char> k, Shared<unsigned char> v, const float (&lse)[2],
                               const float (&dot)[2], Lane lane, float scale)
{
    const Span span = {0, lane.first / STEP + 1};
    float p[SIDE / 8][4], ds[SIDE / 8][4];
    tiles_multiply<WIDTH, DIAGONAL>(p, q, k, span, lane);
#pragma unroll
    for (int n = 0; n < SIDE / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) p[n][e] = exp_above(logit(p[n][e], scale), lse[e / 2]);
    tiles_multiply<WIDTH, DIAGONAL>(ds, dout, v, span, lane);
#pragma unroll
    for (int n = 0; n < SIDE / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            bool seen = !DIAGONAL || n * 8 + 2 * lane.q + e % 2 <= lane.first + lane.g + e / 2 * 8;
            ds[n][e] = seen ? p[n][e] * (ds[n][e] - dot[e / 2]) : 0.0f;
        }
    rows_add<WIDTH, DIAGONAL>(dq, ds, k, span);
}

/* dQ (B, T, NH, HS) = scale dS K, dS = P (dO V^T - D); D (heads, T) = rowsum(dO * O). Grid as in forward. */
template <int WIDTH>
__global__ void __launch_bounds__(THREADS) dq_kernel(AttentionOutput dQ, float *D, AttentionInput dO, AttentionInput Q,
                                                     AttentionInput K, AttentionInput V, AttentionInput O, const float *LSE,
                                                     Sizes sizes)
{
    const int head = (int)blockIdx.x % sizes.heads, tile = (sizes.T - 1) / SIDE - (int)blockIdx.x / sizes.heads;
    const Lane lane = lane_here();
    Shared<unsigned char> q = shared_dynamic<unsigned char>(0, DQ_TILES<WIDTH>), dout = q + TILE<WIDTH, SIDE>;
    Shared<unsigned char> pairs = dout + TILE<WIDTH, SIDE>;
    Shared<int> bad = shared_dynamic<int>(DQ_TILES<WIDTH>, 2);
    float dq[WIDTH / 8][4], lse[2], dot[2];
    set_zero(dq);
    if (threadIdx.x < 2) bad[threadIdx.x] = threadIdx.x ? -1 : INT_MAX;
    tile_load<WIDTH, SIDE>(q, Q, head, tile * SIDE, sizes);
    tile_load<WIDTH, SIDE>(dout, dO, head, tile * SIDE, sizes);
    pair_load<WIDTH, SIDE>(pairs, 0, K, V, head, 0, sizes);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int row = tile * SIDE + lane.first + lane.g + 8 * half;
        dot[half] = row_dot<WIDTH>(dO, O, head, row, lane, sizes);
        lse[half] = row < sizes.T ? LSE[(int64_t)head * sizes.T + row] : 0.0f;
        if (lane.q == 0 && row < sizes.T) D[(int64_t)head * sizes.T + row] = dot[half];
    }
    __syncthreads(); /* `bad` is set */
    for (int j = 0; j <= tile; j++) {
        Shared<unsigned char> k = pairs + j % 2 * 2 * TILE<WIDTH, SIDE>, v = k + TILE<WIDTH, SIDE>;
        copies_wait<0>();
        if (j == tile) tile_purge<WIDTH, SIDE>(k, bad, 0);
        __syncthreads();
        if (j < tile) pair_load<WIDTH, SIDE>(pairs, (j + 1) % 2, K, V, head, (j + 1) * SIDE, sizes);
        if (j < tile) dq_tile<WIDTH, false>(dq, q, dout, k, v, lse, dot, lane, sizes.scale);
        else dq_tile<WIDTH, true>(dq, q, dout, k, v, lse, dot, lane, sizes.scale);
    }
    const int row = lane.first + lane.g, first_bad = bad[0];
    rows_store<WIDTH>(dQ, head, tile * SIDE + row, dq, row >= first_bad ? NAN : sizes.scale,
                      row + 8 >= first_bad ? NAN : sizes.scale, lane, sizes);
}

/* dv (16, WIDTH) += P^T dO, dk += dS^T Q of the tile of queries query .. query+PART-1; the warp's keys are key .. key+15.
 * MASKED: some pair of them does not count. lse, dot (PART): LSE and D of the queries. */
template <int WIDTH, bool MASKED>
__device__ inline void dkv_tile(float (&dk)[WIDTH / 8][4], float (&dv)[WIDTH / 8][4], Shared<unsigned char> k,
                                Shared<unsigned char> v, Shared<unsigned char> q, Shared<unsigned char> dout,
                                Shared<float> lse, Shared<float> dot, int key, int query, Lane lane, const Sizes &sizes)
{
    const Span span = {(key - query) / STEP, PART / STEP};
    float p[PART / 8][4], ds[PART / 8][4];
    tiles_multiply<WIDTH, MASKED>(p, k, q, span, lane);
#pragma unroll
    for (int n = 0; n < PART / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            int column = n * 8 + 2 * lane.q + e % 2;
            bool seen = !MASKED || (query + column < sizes.T && query + column >= key + lane.g + e / 2 * 8);
            p[n][e] = seen ? exp_above(logit(p[n][e], sizes.scale), lse[column]) : 0.0f;
        }
    rows_add<WIDTH, MASKED>(dv, p, dout, span);
    tiles_multiply<WIDTH, MASKED>(ds, v, dout, span, lane);
#pragma unroll
    for (int n = 0; n < PART / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            int column = n * 8 + 2 * lane.q + e % 2;
            bool seen = !MASKED || (query + column < sizes.T && query + column >= key + lane.g + e / 2 * 8);
            ds[n][e] = seen ? p[n][e] * (ds[n][e] - dot[column]) : 0.0f;
        }
    rows_add<WIDTH, MASKED>(dk, ds, q, span);
}

/* What this thread fetches of the statistics of a tile of queries: LSE of one of them, or D, 0 beyond T. */
__device__ inline float stat_read(const float *LSE, const float *D, int head, int query, const Sizes &sizes)
{
    int n = (int)threadIdx.x, row = query + n % PART;
    return n < STATS && row < sizes.T ? (n < PART ? LSE : D)[(int64_t)head * sizes.T + row] : 0.0f;
}

/* dK = scale dS^T Q, dV = P^T dO (B, T, NH, HS), from S^T = K Q^T: keys are rows, queries columns. LSE, D (heads, T). */
template <int WIDTH>
__global__ void __launch_bounds__(THREADS) dkv_kernel(AttentionOutput dK, AttentionOutput dV, AttentionInput dO,
                                                      AttentionInput Q, AttentionInput K, AttentionInput V,
                                                      const float *LSE, const float *D, Sizes sizes)
{
    const int head = (int)blockIdx.x % sizes.heads, first = (int)blockIdx.x / sizes.heads * SIDE, n = threadIdx.x;
    const Lane lane = lane_here();
    Shared<unsigned char> k = shared_dynamic<unsigned char>(0, DKV_TILES<WIDTH>), v = k + TILE<WIDTH, SIDE>;
    Shared<unsigned char> pairs = v + TILE<WIDTH, SIDE>;
    Shared<float> stats = shared_dynamic<float>(DKV_TILES<WIDTH>, 2 * STATS);
    Shared<int> bad = shared_dynamic<int>(DKV_TILES<WIDTH> + STATS_BYTES, 2);
    float dk[WIDTH / 8][4], dv[WIDTH / 8][4];
    set_zero(dk);
    set_zero(dv);
    if (n < 2) bad[n] = n ? -1 : INT_MAX;
    tile_load<WIDTH, SIDE>(k, K, head, first, sizes);
    tile_load<WIDTH, SIDE>(v, V, head, first, sizes);
    pair_load<WIDTH, PART>(pairs, 0, Q, dO, head, first, sizes);
    if (n < STATS) stats[n] = stat_read(LSE, D, head, first, sizes);
    __syncthreads(); /* `bad` is set */
    for (int query = first, pair = 0; query < sizes.T; query += PART, pair ^= 1) {
        const bool diagonal = query < first + SIDE, more = query + PART < sizes.T;
        Shared<unsigned char> q = pairs + pair * 2 * TILE<WIDTH, PART>, dout = q + TILE<WIDTH, PART>;
        Shared<float> lse = stats + pair * STATS, dot = lse + PART;
        float stat = 0;
        copies_wait<0>();
        if (diagonal) {
            tile_purge<WIDTH, PART>(q, bad, query);
            tile_purge<WIDTH, PART>(dout, bad, query);
        }
        __syncthreads();
        if (more) {
            pair_load<WIDTH, PART>(pairs, pair ^ 1, Q, dO, head, query + PART, sizes);
            stat = stat_read(LSE, D, head, query + PART, sizes);
        }
        if (diagonal || query + PART > sizes.T)
            dkv_tile<WIDTH, true>(dk, dv, k, v, q, dout, lse, dot, first + lane.first, query, lane, sizes);
        else dkv_tile<WIDTH, false>(dk, dv, k, v, q, dout, lse, dot, first + lane.first, query, lane, sizes);
        if (more && n < STATS) stats[(pair ^ 1) * STATS + n] = stat;
    }
    const int row = first + lane.first + lane.g, last_bad = bad[1];
    const float above = row <= last_bad ? NAN : 1.0f, below = row + 8 <= last_bad ? NAN : 1.0f;
    rows_store<WIDTH>(dK, head, row, dk, above * sizes.scale, below * sizes.scale, lane, sizes);
    rows_store<WIDTH>(dV, head, row, dv, above, below, lane, sizes);
}

/* --- launchers ---------------------------------------------------------------------------------------------------- */

static int64_t block_count(const AttentionShape *shape)
{
    return shape->B * shape->NH * ((shape->T + SIDE - 1) / SIDE);
}

static const char *words_of(cudaError_t error) { return error == cudaSuccess ? NULL : cudaGetErrorString(error); }

/* Does every row of a view begin at a multiple of 16 bytes? */
template <typename View>
static bool view_aligned(View view)
{
    return (uintptr_t)view.data % 16 == 0 && (view.batch_stride | view.row_stride | view.head_stride) % CHUNK == 0;
}

static Sizes sizes_of(const AttentionShape *shape, bool aligned)
{
    return {(int)(shape->B * shape->NH), (int)shape->NH, (int)shape->T, (int)shape->HS, aligned, shape->scale};
}

template <int WIDTH>
static const char *forward_launch(AttentionOutput O, float *LSE, AttentionInput Q, AttentionInput K, AttentionInput V,
                                  const AttentionShape *shape, cudaStream_t stream)
{
    const bool aligned = view_aligned(O) && view_aligned(Q) && view_aligned(K) && view_aligned(V);
    return words_of(kernel_launch(forward_kernel<WIDTH>, dim3((unsigned)block_count(shape)), dim3(THREADS),
                                  FORWARD_TILES<WIDTH> + BAD_BYTES, stream, O, LSE, Q, K, V, sizes_of(shape, aligned)));
}

template <int WIDTH>
static const char *backward_launch(AttentionOutput dQ, AttentionOutput dK, AttentionOutput dV, float *D, AttentionInput dO,
                                   AttentionInput Q, AttentionInput K, AttentionInput V, AttentionInput O,
                                   const float *LSE, const AttentionShape *shape, cudaStream_t stream)
{
    const dim3 grid((unsigned)block_count(shape)), block(THREADS);
    const Sizes sizes = sizes_of(shape, view_aligned(dQ) && view_aligned(dK) && view_aligned(dV) && view_aligned(dO) &&
                                            view_aligned(Q) && view_aligned(K) && view_aligned(V) && view_aligned(O));
    cudaError_t error = kernel_launch(dq_kernel<WIDTH>, grid, block, DQ_TILES<WIDTH> + BAD_BYTES, stream, dQ, D, dO, Q, K, V,
                                      O, LSE, sizes);
    if (error == cudaSuccess)
        error = kernel_launch(dkv_kernel<WIDTH>, grid, block, DKV_TILES<WIDTH> + STATS_BYTES + BAD_BYTES, stream, dK, dV, dO,
                              Q, K, V, LSE, D, sizes);
    return words_of(error);
}

/* --- the kernel of this file -------------------------------------------------------------------------------------- */

static const char *refuse(const AttentionShape *shape, int sm)
{
    if (sm < 80) return "needs sm_80 or later";
    if (shape->dtype != DTYPE_BF16) return "takes bf16 only";
    if (shape->HS < 8 || shape->HS > MAX_HS || shape->HS % 8)
        return "needs a head dimension that is a multiple of 8, from 8 to 128";
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
    return shape->HS <= 64 ? forward_launch<64>(O, LSE, Q, K, V, shape, stream)
                           : forward_launch<128>(O, LSE, Q, K, V, shape, stream);
}

static const char *backward(AttentionOutput dQ, AttentionOutput dK, AttentionOutput dV, void *scratch, AttentionInput dO,
                            AttentionInput Q, AttentionInput K, AttentionInput V, AttentionInput O, const float *LSE,
                            const void *saved, const AttentionShape *shape, void *queue)
{
    (void)saved;
    float *D = (float *)scratch;
    cudaStream_t stream = (cudaStream_t)queue;
    if (block_count(shape) == 0) return NULL;
    return shape->HS <= 64 ? backward_launch<64>(dQ, dK, dV, D, dO, Q, K, V, O, LSE, shape, stream)
                           : backward_launch<128>(dQ, dK, dV, D, dO, Q, K, V, O, LSE, shape, stream);
}

extern "C" {
extern const AttentionKernel attention_kernel;
const AttentionKernel attention_kernel = {
    ATTENTION_ABI, ATTENTION_CUDA, "mma3_pipeline",
    "mma.sync, ldmatrix, tiles by cp.async into two buffers; bf16, HS up to 128",
    refuse, saved_bytes, scratch_bytes, forward, backward,
};
}
