/* flash_simt.cu - flash attention in plain fp32 arithmetic for any GPU from sm_75 on: the classic tiled kernel, done as a
 * matrix product is done.
 *
 * The algorithm (Dao et al. 2022, Dao 2023). Queries and keys are cut into tiles of 64. Forward: a block owns a tile of
 * queries and walks the tiles of keys up to the diagonal with a running maximum, a running sum and O, all in registers.
 * Backward recomputes P from the maximum and the sum that forward saved. One kernel owns a tile of keys and walks the tiles
 * of queries from the diagonal on (dK, dV), another owns a tile of queries and walks the keys (dQ): seven products instead
 * of the five that are needed, but no sum is shared between blocks, so nothing is atomic and all bits repeat.
 *
 *          keys ->
 *      q   D . . .      D  diagonal tile: the only one with mask code        forward, dQ: a block is a row of this picture
 *      u   # D . .      #  full tile                                         dK, dV: a block is a column
 *      e   # # D .      .  never visited
 *      r   # # # D
 *
 * Every product is the same routine, multiply(): out (rows, cols) += sum over k of A[k][row] * B[k][col], both factors in
 * shared memory with k as the slow index. A thread holds RM x RN sums and reads RM + RN numbers as float4 for RM * RN
 * multiplications. A warp owns whole rows; its lanes stand 4 x 8:
 *
 *              c=0      c=1   ...   c=7    c=0 ...     a lane (r, c) has the columns 4c .. 4c+3 of every 32 and
 *      r=0   [ 4 x 4 ][ 4 x 4 ]  [ 4 x 4 ][ ...        the rows 4r .. 4r+3 of every 16 that the warp owns
 *      r=1   [       ][       ]                        RM = 4 or 8,  RN = cols / 8
 *      r=2        ...
 *      r=3
 *
 *      forward      S = Q K^T   (k is d)      O += P V        (k is the key)
 *      dQ           S, dP = dO V^T            dQ += dS K
 *      dK, dV       S^T = K Q^T, dP^T = V dO^T                dV += P^T dO, dK += dS^T Q   (k is the query)
 *
 * What is summed over d lies transposed, [d][row]; what is summed over rows lies as in memory, [row][d]; P and dS go from
 * registers through shared memory, [k][row], and stay within their warp. Groups of four rows are permuted by
 * swizzle(k), so that transposing stores hit 32 different banks, float4 stores of P 8 different quarters, and reads too.
 * Lane bits are dealt out (r: 1 and 4; c: 0, 2 and 3) so that neighbours at distance 1 share their A and those at
 * distance 2 their B: then a warp's float4 read of either moves 2 x 128 bytes, not 4 x 128.
 *
 * Counts for one warp and one k, in clocks of the SM (128 multiply-adds, or 128 bytes of shared memory, a clock):
 *      8 x 8 sums: 16 clocks of arithmetic,  4 reads,  8 clocks of shared memory     forward up to HS 64
 *      4 x 8 sums:  8 clocks of arithmetic,  3 reads,  6 clocks of shared memory     backward up to HS 64, forward above
 *      4 x 16:     16 clocks of arithmetic,  5 reads, 10 clocks of shared memory
 * Global memory: a tile of 64 x 64 is 16 KB; forward reads two for 2 * 64^3 multiply-adds, 8 bytes a clock of the SM at
 * full speed, from the second-level cache: blocks are ordered in sections of heads whose keys and values fit there, and
 * the longest first within one. Backward reads six for four products. Shared memory is at most 64 KB a block, 48 KB at
 * HS 64, so that four blocks of the forward (2 warps each) or three of the backward (4 warps) share an SM of an H200 and
 * hide each other's loads and softmax; head dimensions above 64 go
 * through it in chunks of 32 or 64. Registers hold O (dQ, dK and dV), S, and the next keys while O is summed up.
 *
 * Numbers. Logits are t = S * (scale * log2 e), rounded once, by the same expression in both directions, and P = 2^(t - m)
 * / l with the saved m and l: exact near the maximum for logits of any size. Masked entries become -inf before the
 * exponential, so P is an exact zero; and since zero times NaN is NaN, products over a diagonal tile leave out the pairs
 * above the diagonal instead of multiplying them. Rows beyond T are loaded as zeros.
 *
 * Limits: HS up to 256, padded to 32, 64, 96, 128 or 256 in shared memory only; T up to 2^30; any strides. Rows that are
 * not aligned to four elements, and HS that is no multiple of four, are loaded element by element.
 */
#include <limits.h>

#include "attention/attention.h"
#include "attention/device.h"

namespace { /* other kernels use the same names */

enum {
    TILE = 64,          /* keys of a tile, and queries but for HS 256 in the forward */
    ROW_LANES = 4,      /* a warp's lanes over rows */
    COLUMN_LANES = 8,   /* and over columns */
    S_COLUMNS = TILE / COLUMN_LANES,
    PART = 32,          /* columns of a tile that are on their way from memory together, unless fetched ahead */
    BACKWARD_ROWS = 4,  /* rows of a thread in the backward */
    BACKWARD_WARPS = TILE / (ROW_LANES * BACKWARD_ROWS),
    BACKWARD_THREADS = 32 * BACKWARD_WARPS,
    MAX_HS = 256,
    MAX_SLICE = 128,    /* columns of dQ, dK and dV that a block owns: more do not fit in registers */
    DOT_THREADS = 256,  /* of the kernel for D */
};

static_assert(ROW_LANES * COLUMN_LANES == 32, "the lanes of a warp");
static_assert(BACKWARD_WARPS * ROW_LANES * BACKWARD_ROWS == TILE, "the warps of the backward own a tile's rows");
static_assert(S_COLUMNS % 4 == 0, "a lane's columns are whole float4");

/* Blocks of the backward that should fit an SM together, which bounds their registers: 3 up to HS 64 on chips with the
 * shared memory for them. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define BACKWARD_BLOCKS(HSP) 2
#else
#define BACKWARD_BLOCKS(HSP) ((HSP) <= 64 ? 3 : 2)
#endif

#define LOG2_E 1.4426950408889634
#define LN_2 0.6931471805599453f

/* What of the head dimension is in shared memory at a time. */
constexpr int chunk_of(int HSP) { return HSP % 64 == 0 ? 64 : 32; }

/* --- the place of a block and a lane --------------------------------------------------------------------------------- */

/* Where a lane stands among those of its warp. */
struct Lane {
    int warp, r, c;
};

__device__ __forceinline__ Lane lane_here(void)
{
    int lane = threadIdx.x % 32;
    return {(int)(threadIdx.x / 32), (lane >> 1 & 1) | (lane >> 4 & 1) << 1, (lane & 1) | (lane >> 2 & 3) << 1};
}

/* Row number m of a thread, in a tile whose warps own ROW_LANES * RM rows each. */
template <int RM>
__device__ __forceinline__ int row_of(Lane lane, int m)
{
    return lane.warp * ROW_LANES * RM + lane.r * 4 + (m / 4) * 16 + m % 4;
}

__device__ __forceinline__ int column_of(Lane lane, int n) { return n / 4 * 32 + lane.c * 4 + n % 4; }

/* A reduction over the lanes that share a row. */
__device__ __forceinline__ float row_max(float x)
{
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 4));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 8));
}

__device__ __forceinline__ float row_sum(float x)
{
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    x += __shfl_xor_sync(0xffffffffu, x, 4);
    return x + __shfl_xor_sync(0xffffffffu, x, 8);
}

/* What all kernels know of the problem. */
struct Sizes {
    int64_t heads, NH;  /* B * NH */
    int T, HS, tiles;   /* tiles of a head, of as many rows as the kernel's blocks own */
    int section;        /* heads whose keys and values share the second-level cache */
    float scale, scale_log2;
};

struct Place {
    int64_t head, b, h;
    int tile; /* 0 is the longest */
};

/* Blocks go through sections of heads, in a section through the tiles from the longest on, in a tile through the heads. */
__device__ __forceinline__ Place place_of(int64_t block, const Sizes &sizes)
{
    int64_t per_section = (int64_t)sizes.section * sizes.tiles, section = block / per_section;
    int64_t first = section * sizes.section, left = sizes.heads - first, rest = block - section * per_section;
    int64_t heads = left < sizes.section ? left : sizes.section;
    Place place;
    place.tile = (int)(rest / heads);
    place.head = first + rest % heads;
    place.b = place.head / sizes.NH;
    place.h = place.head % sizes.NH;
    return place;
}

/* --- matrices in global memory --------------------------------------------------------------------------------------- */

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ void from_float(float *to, float x) { *to = x; }
__device__ __forceinline__ void from_float(__nv_bfloat16 *to, float x) { *to = __float2bfloat16_rn(x); }

__device__ __forceinline__ float4 load_vector(const float *at) { return *(const float4 *)at; }

__device__ __forceinline__ float4 load_vector(const __nv_bfloat16 *at)
{
    uint2 raw = *(const uint2 *)at;
    return make_float4(__uint_as_float(raw.x << 16), __uint_as_float(raw.x & 0xffff0000u), __uint_as_float(raw.y << 16),
                       __uint_as_float(raw.y & 0xffff0000u));
}

__device__ __forceinline__ void store_vector(float *at, float4 v) { *(float4 *)at = v; }

__device__ __forceinline__ void store_vector(__nv_bfloat16 *at, float4 v)
{
    uint2 raw;
    raw.x = __bfloat16_as_ushort(__float2bfloat16_rn(v.x)) | (unsigned)__bfloat16_as_ushort(__float2bfloat16_rn(v.y)) << 16;
    raw.y = __bfloat16_as_ushort(__float2bfloat16_rn(v.z)) | (unsigned)__bfloat16_as_ushort(__float2bfloat16_rn(v.w)) << 16;
    *(uint2 *)at = raw;
}

/* A view with what the host found out about it: whether all its rows can be read by four elements at once. */
struct Source {
    AttentionInput view;
    int vectors;
};

struct Target {
    AttentionOutput view;
    int vectors;
};

/* One head of a view: (rows, HS). */
template <typename Real>
struct Matrix {
    Real *data;
    int64_t stride;
    int rows, HS, vectors;
};

template <typename Real>
__device__ __forceinline__ Matrix<const Real> matrix_of(const Source &source, const Place &place, const Sizes &sizes)
{
    const AttentionInput &view = source.view;
    return {(const Real *)view.data + place.b * view.batch_stride + place.h * view.head_stride, view.row_stride, sizes.T,
            sizes.HS, source.vectors};
}

template <typename Real>
__device__ __forceinline__ Matrix<Real> matrix_of(const Target &target, const Place &place, const Sizes &sizes)
{
    const AttentionOutput &view = target.view;
    return {(Real *)view.data + place.b * view.batch_stride + place.h * view.head_stride, view.row_stride, sizes.T,
            sizes.HS, target.vectors};
}

/* Elements col .. col+3 of a row, zeros outside of the matrix. */
template <bool VECTORS, typename Real>
__device__ __forceinline__ float4 load_four(const Matrix<const Real> &matrix, int row, int col)
{
    float4 v = make_float4(0, 0, 0, 0);
    if (row >= matrix.rows || col >= matrix.HS) return v;
    const Real *at = matrix.data + row * matrix.stride + col;
    if (VECTORS) return load_vector(at);
    int left = matrix.HS - col;
    v.x = to_float(at[0]);
    if (left > 1) v.y = to_float(at[1]);
    if (left > 2) v.z = to_float(at[2]);
    if (left > 3) v.w = to_float(at[3]);
    return v;
}

template <typename Real>
__device__ __forceinline__ void store_four(const Matrix<Real> &matrix, int row, int col, float4 v)
{
    if (row >= matrix.rows || col >= matrix.HS) return;
    Real *at = matrix.data + row * matrix.stride + col;
    if (matrix.vectors) {
        store_vector(at, v);
        return;
    }
    int left = matrix.HS - col;
    from_float(at, v.x);
    if (left > 1) from_float(at + 1, v.y);
    if (left > 2) from_float(at + 2, v.z);
    if (left > 3) from_float(at + 3, v.w);
}

/* --- tiles in shared memory ------------------------------------------------------------------------------------------ */

/* In a tile [k][row], group g of four rows stands at place g ^ swizzle(k) of its row k. */
__device__ __forceinline__ int swizzle(int k) { return (k >> 2 & 3) << 1; }

/* A tile on its way to shared memory, in the registers of the block: fetch_* reads it, put_* writes it. The same thread does
 * both for an element, so the two agree on which is whose. */
template <int ROWS, int COLS, int WARPS>
struct Fetched {
    static_assert(ROWS % 32 == 0 && COLS % 16 == 0 && ROWS * COLS % (WARPS * 128) == 0, "whole passes of all warps");
    static const int COUNT = ROWS * COLS / (WARPS * 128);
    float4 v[COUNT];
};

/* A warp takes 8 rows x 16 columns at a time: 64 bytes of fp32 of each row, which is whole sectors of memory. The row and
 * column of a thread's i-th vector; how they depend on i is written so that the compiler sees it. */
template <int ROWS, int WARPS>
__device__ __forceinline__ int transposed_row(int i)
{
    static_assert(ROWS % (8 * WARPS) == 0, "whole passes over the rows");
    return threadIdx.x / 4 + i % (ROWS / (8 * WARPS)) * (8 * WARPS);
}

template <int ROWS, int WARPS>
__device__ __forceinline__ int transposed_column(int i) { return threadIdx.x % 4 * 4 + i / (ROWS / (8 * WARPS)) * 16; }

/* One way to load or the other for all of a tile, so that its loads are in flight together. */
template <bool VECTORS, typename Real, int ROWS, int COLS, int WARPS>
__device__ __forceinline__ void fetch_transposed_by(Fetched<ROWS, COLS, WARPS> &tile, const Matrix<const Real> &matrix,
                                                    int row, int col)
{
#pragma unroll
    for (int i = 0; i < tile.COUNT; i++)
        tile.v[i] = load_four<VECTORS>(matrix, row + transposed_row<ROWS, WARPS>(i),
                                       col + transposed_column<ROWS, WARPS>(i));
}

template <typename Real, int ROWS, int COLS, int WARPS>
__device__ __forceinline__ void fetch_transposed(Fetched<ROWS, COLS, WARPS> &tile, const Matrix<const Real> &matrix, int row,
                                                 int col)
{
    if (matrix.vectors) fetch_transposed_by<true>(tile, matrix, row, col);
    else fetch_transposed_by<false>(tile, matrix, row, col);
}

/* out [COLS][ROWS] */
template <int ROWS, int COLS, int WARPS>
__device__ __forceinline__ void put_transposed(Shared<float> out, const Fetched<ROWS, COLS, WARPS> &tile)
{
#pragma unroll
    for (int i = 0; i < tile.COUNT; i++) {
        int row = transposed_row<ROWS, WARPS>(i), col = transposed_column<ROWS, WARPS>(i);
        Shared<float> to = out + col * ROWS + ((row / 4 ^ swizzle(threadIdx.x % 4 * 4)) * 4 + row % 4);
        to[0] = tile.v[i].x;
        to[ROWS] = tile.v[i].y;
        to[2 * ROWS] = tile.v[i].z;
        to[3 * ROWS] = tile.v[i].w;
    }
}

/* out [COLS][ROWS] = rows `row` .. of the matrix, columns `col` ..; by parts, to spare registers. */
template <typename Real, int ROWS, int COLS, int WARPS>
__device__ __forceinline__ void load_transposed(Shared<float> out, const Matrix<const Real> &matrix, int row, int col)
{
#pragma unroll 1
    for (int part = 0; part < COLS; part += PART) {
        Fetched<ROWS, PART, WARPS> tile;
        fetch_transposed(tile, matrix, row, col + part);
        put_transposed(out + part * ROWS, tile);
    }
}

template <bool VECTORS, typename Real, int COLS, int WARPS>
__device__ __forceinline__ void fetch_rows_by(Fetched<TILE, COLS, WARPS> &tile, const Matrix<const Real> &matrix, int row,
                                              int col)
{
#pragma unroll
    for (int i = 0; i < tile.COUNT; i++)
        tile.v[i] = load_four<VECTORS>(matrix, row + threadIdx.x / (COLS / 4) + i * (WARPS * 128 / COLS),
                                       col + threadIdx.x % (COLS / 4) * 4);
}

/* out [TILE][COLS] = rows `row` .. of the matrix, columns `col` .. */
template <typename Real, int COLS, int WARPS>
__device__ __forceinline__ void load_rows(Shared<float> out, const Matrix<const Real> &matrix, int row, int col)
{
    Fetched<TILE, COLS, WARPS> tile;
    if (matrix.vectors) fetch_rows_by<true>(tile, matrix, row, col);
    else fetch_rows_by<false>(tile, matrix, row, col);
#pragma unroll
    for (int i = 0; i < tile.COUNT; i++) shared_store<float4>(out + (i * WARPS * 32 + threadIdx.x) * 4, tile.v[i]);
}

/* --- the product ----------------------------------------------------------------------------------------------------- */

/* Which k count for a row: all, those up to the row, those from the row on. */
enum Triangle { ALL, UP_TO_ROW, FROM_ROW };

/* out (a warp's rows, 8 * RN) += sum over k < K of A [k][ROWS] * B [k][cols]. A is swizzled; B is [k][TILE] and swizzled
 * where K runs over d, else [k][8 * RN] as loaded. With a triangle, row + `shift` is the k on the diagonal. */
template <int RM, int RN, int K, int ROWS, bool B_SWIZZLED, Triangle TRIANGLE>
__device__ __forceinline__ void multiply(float (&out)[RM][RN], Shared<const float> A, Shared<const float> B, Lane lane,
                                         int shift = 0)
{
    const int group = lane.warp * RM + lane.r, B_STRIDE = COLUMN_LANES * RN;
#pragma unroll(TRIANGLE == ALL ? 2 : 1)
    for (int k4 = 0; k4 < K; k4 += 4) {
        Shared<const float> a_at = A + k4 * ROWS, b_at = B + k4 * B_STRIDE;
        const int s = swizzle(k4), b_group = B_SWIZZLED ? lane.c ^ s : lane.c;
#pragma unroll
        for (int k = 0; k < 4; k++) {
            float a[RM], b[RN];
#pragma unroll
            for (int m = 0; m < RM; m += 4) {
                float4 v = shared_load<float4>(a_at + (k * ROWS + ((group + m) ^ s) * 4));
                a[m] = v.x, a[m + 1] = v.y, a[m + 2] = v.z, a[m + 3] = v.w;
            }
#pragma unroll
            for (int n = 0; n < RN; n += 4) {
                float4 v = shared_load<float4>(b_at + (k * B_STRIDE + n * COLUMN_LANES + b_group * 4));
                b[n] = v.x, b[n + 1] = v.y, b[n + 2] = v.z, b[n + 3] = v.w;
            }
#pragma unroll
            for (int m = 0; m < RM; m++) {
                int beyond = k4 + k - row_of<RM>(lane, m) - shift;
                if (TRIANGLE == UP_TO_ROW && beyond > 0) continue;
                if (TRIANGLE == FROM_ROW && beyond < 0) continue;
#pragma unroll
                for (int n = 0; n < RN; n++) out[m][n] = fmaf(a[m], b[n], out[m][n]);
            }
        }
    }
}

template <int M, int N>
__device__ __forceinline__ void set_zero(float (&x)[M][N])
{
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N; n++) x[m][n] = 0;
}

/* Where four rows m .. m+3 of column n of a thread stand in a tile P [column][ROWS]. */
template <int RM, int ROWS>
__device__ __forceinline__ Shared<float> staged(Shared<float> P, Lane lane, int m, int n)
{
    int k = column_of(lane, n);
    return P + (k * ROWS + ((row_of<RM>(lane, m) / 4) ^ swizzle(k)) * 4);
}

/* P [column][row] = the thread's part x. Only the thread's own warp reads it. */
template <int RM, int ROWS>
__device__ __forceinline__ void stage(Shared<float> P, const float (&x)[RM][S_COLUMNS], Lane lane)
{
#pragma unroll
    for (int n = 0; n < S_COLUMNS; n++)
#pragma unroll
        for (int m = 0; m < RM; m += 4)
            shared_store<float4>(staged<RM, ROWS>(P, lane, m, n),
                                 make_float4(x[m][n], x[m + 1][n], x[m + 2][n], x[m + 3][n]));
}

/* The logit in units of log2: what both passes take for t. Never contracted into what follows. */
__device__ __forceinline__ float logit_of(float s, float scale_log2) { return __fmul_rn(s, scale_log2); }

/* 2^(t - max), where a row of -inf alone counts from 0. */
__device__ __forceinline__ float base_of(float max) { return max == -INFINITY ? 0.0f : max; }
__device__ __forceinline__ float power_of(float t, float base) { return exp2f(__fsub_rn(t, base)); }

/* --- forward --------------------------------------------------------------------------------------------------------- */

struct Forward {
    Source Q, K, V;
    Target O;
    float *LSE;   /* (B, NH, T) */
    float *saved; /* (B, NH, T, 2): the maximum in log2 units, and 1 / sum */
    Sizes sizes;
};

/* How the forward for one padded head dimension is laid out. */
template <int HSP>
struct ForwardShape {
    static const int WARPS = HSP == 96 || HSP == 128 ? 4 : 2;
    static const int RM = HSP <= 64 ? 8 : 4; /* rows of a thread */
    static const int ROWS = WARPS * ROW_LANES * RM, CHUNK = chunk_of(HSP), CHUNKS = HSP / CHUNK;
    static const int KEYS_FLOATS = (CHUNK > ROWS ? CHUNK : ROWS) * TILE; /* K^T [CHUNK][TILE], then P [TILE][ROWS] */
    static const int FLOATS = HSP * ROWS + KEYS_FLOATS + TILE * CHUNK;
    static const int BLOCKS = HSP <= 64 ? 4 : HSP == 96 ? 3 : 2; /* an SM, which bounds the registers */
    static const bool AHEAD = HSP <= 128; /* is there room in them to fetch the next keys early? */
};

/* A block's shared memory, and what stays in a thread's registers. */
template <int HSP>
struct ForwardState {
    typedef ForwardShape<HSP> Shape;
    Shared<float> Qt;   /* [HSP][ROWS] */
    Shared<float> keys; /* K^T [CHUNK][TILE], then P [TILE][ROWS] */
    Shared<float> V;    /* [TILE][CHUNK] */
    Lane lane;
    float O[Shape::CHUNKS][Shape::RM][Shape::CHUNK / COLUMN_LANES];
    float max[Shape::RM], sum[Shape::RM]; /* sum: over this lane's columns only */
    Fetched<TILE, Shape::CHUNK, Shape::WARPS> next; /* the first chunk of the next keys, where that is fetched ahead */
};

/* S becomes P in units of the new maxima; sums and O follow. `ahead`: row 0 of the block minus key 0 of the tile. */
template <int HSP, bool DIAGONAL>
__device__ __forceinline__ void softmax_tile(float (&S)[ForwardShape<HSP>::RM][S_COLUMNS], ForwardState<HSP> &state,
                                             int ahead, float scale_log2)
{
    typedef ForwardShape<HSP> Shape;
#pragma unroll
    for (int m = 0; m < Shape::RM; m++) {
        int last = row_of<Shape::RM>(state.lane, m) + ahead;
        float most = -INFINITY, sum = 0;
#pragma unroll
        for (int n = 0; n < S_COLUMNS; n++) {
            S[m][n] = logit_of(S[m][n], scale_log2);
            if (DIAGONAL && column_of(state.lane, n) > last) S[m][n] = -INFINITY;
            most = fmaxf(most, S[m][n]); /* passes over a NaN: its power is a NaN */
        }
        float max = fmaxf(state.max[m], row_max(most)), base = base_of(max), shrink = power_of(state.max[m], base);
#pragma unroll
        for (int n = 0; n < S_COLUMNS; n++) {
            S[m][n] = power_of(S[m][n], base);
            sum += S[m][n];
        }
        state.max[m] = max;
        state.sum[m] = fmaf(state.sum[m], shrink, sum);
#pragma unroll
        for (int chunk = 0; chunk < Shape::CHUNKS; chunk++)
#pragma unroll
            for (int n = 0; n < Shape::CHUNK / COLUMN_LANES; n++) state.O[chunk][m][n] *= shrink;
    }
}

/* One tile of keys, from key `key` on; its first chunk is in state.next, where that of the following tile goes, if AHEAD. */
template <typename Real, int HSP, bool DIAGONAL>
__device__ __forceinline__ void forward_tile(ForwardState<HSP> &state, const Matrix<const Real> &K,
                                             const Matrix<const Real> &V, int query, int key, float scale_log2)
{
    typedef ForwardShape<HSP> Shape;
    const int RM = Shape::RM, ROWS = Shape::ROWS, CHUNK = Shape::CHUNK, CHUNKS = Shape::CHUNKS, WARPS = Shape::WARPS;
    float S[RM][S_COLUMNS];
    __syncthreads(); /* the tile before is no longer read */
    if (Shape::AHEAD) put_transposed(state.keys, state.next);
    else load_transposed<Real, TILE, CHUNK, WARPS>(state.keys, K, key, 0);
    load_rows<Real, CHUNK, WARPS>(state.V, V, key, 0);
    __syncthreads();
    set_zero(S);
#pragma unroll 1
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
        if (chunk) {
            if (chunk * CHUNK >= K.HS) break;
            __syncthreads();
            load_transposed<Real, TILE, CHUNK, WARPS>(state.keys, K, key, chunk * CHUNK);
            __syncthreads();
        }
        multiply<RM, S_COLUMNS, CHUNK, ROWS, true, ALL>(S, state.Qt + chunk * CHUNK * ROWS, state.keys, state.lane);
    }
    softmax_tile<HSP, DIAGONAL>(S, state, query - key, scale_log2);
    __syncthreads(); /* K is no longer read: P takes its place */
    stage<RM, ROWS>(state.keys, S, state.lane);
    __syncwarp();
    if (Shape::AHEAD && !DIAGONAL) fetch_transposed(state.next, K, key + TILE, 0);
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
        if (chunk && chunk * CHUNK < V.HS) {
            __syncthreads();
            load_rows<Real, CHUNK, WARPS>(state.V, V, key, chunk * CHUNK);
            __syncthreads();
        }
        if (chunk * CHUNK < V.HS)
            multiply<RM, CHUNK / COLUMN_LANES, TILE, ROWS, false, DIAGONAL ? UP_TO_ROW : ALL>(
                state.O[chunk], state.keys, state.V, state.lane, query - key);
    }
}

template <typename Real, int HSP>
__global__ void __launch_bounds__(32 * ForwardShape<HSP>::WARPS, ForwardShape<HSP>::BLOCKS)
flash_forward_kernel(Forward call)
{
    typedef ForwardShape<HSP> Shape;
    const int RM = Shape::RM, ROWS = Shape::ROWS, CHUNK = Shape::CHUNK;
    const Sizes &sizes = call.sizes;
    Place place = place_of(blockIdx.x, sizes);
    int query = (sizes.tiles - 1 - place.tile) * ROWS, diagonal = query / TILE * TILE;
    Matrix<const Real> Q = matrix_of<Real>(call.Q, place, sizes), K = matrix_of<Real>(call.K, place, sizes);
    Matrix<const Real> V = matrix_of<Real>(call.V, place, sizes);
    ForwardState<HSP> state;
    state.Qt = shared_dynamic<float>(0, HSP * ROWS);
    state.keys = shared_dynamic<float>(HSP * ROWS * sizeof(float), Shape::KEYS_FLOATS);
    state.V = shared_dynamic<float>((HSP * ROWS + Shape::KEYS_FLOATS) * sizeof(float), TILE * CHUNK);
    state.lane = lane_here();
#pragma unroll
    for (int m = 0; m < RM; m++) {
        state.max[m] = -INFINITY;
        state.sum[m] = 0;
    }
#pragma unroll
    for (int chunk = 0; chunk < Shape::CHUNKS; chunk++) {
        set_zero(state.O[chunk]);
        load_transposed<Real, ROWS, CHUNK, Shape::WARPS>(state.Qt + chunk * CHUNK * ROWS, Q, query, chunk * CHUNK);
    }
    if (Shape::AHEAD) fetch_transposed(state.next, K, 0, 0);
    for (int key = 0; key < diagonal; key += TILE)
        forward_tile<Real, HSP, false>(state, K, V, query, key, sizes.scale_log2);
    forward_tile<Real, HSP, true>(state, K, V, query, diagonal, sizes.scale_log2);

    Matrix<Real> O = matrix_of<Real>(call.O, place, sizes);
#pragma unroll
    for (int m = 0; m < RM; m++) {
        int row = query + row_of<RM>(state.lane, m);
        float sum = row_sum(state.sum[m]), inverse = 1 / sum;
        if (state.lane.c == 0 && row < sizes.T) {
            int64_t at = place.head * sizes.T + row;
            call.LSE[at] = fmaf(state.max[m], LN_2, logf(sum));
            call.saved[2 * at] = state.max[m];
            call.saved[2 * at + 1] = inverse;
        }
#pragma unroll
        for (int chunk = 0; chunk < Shape::CHUNKS; chunk++)
#pragma unroll
            for (int n = 0; n < CHUNK / COLUMN_LANES; n += 4) {
                const float *o = state.O[chunk][m] + n;
                store_four(O, row, chunk * CHUNK + column_of(state.lane, n),
                           make_float4(o[0] * inverse, o[1] * inverse, o[2] * inverse, o[3] * inverse));
            }
    }
}

/* --- backward -------------------------------------------------------------------------------------------------------- */

struct Backward {
    Source Q, K, V, dO, O;
    Target dQ, dK, dV;
    const float *saved; /* (B, NH, T, 2) */
    float *D;           /* (B, NH, T): rowsum(dO * O) */
    Sizes sizes;
};

/* D, a warp for a row. */
template <typename Real>
__global__ void __launch_bounds__(DOT_THREADS) flash_dot_kernel(Backward call)
{
    const Sizes &sizes = call.sizes;
    int64_t at = ((int64_t)blockIdx.x * DOT_THREADS + threadIdx.x) / 32;
    int lane = threadIdx.x % 32;
    if (at >= sizes.heads * sizes.T) return;
    Place place;
    place.head = at / sizes.T;
    place.b = place.head / sizes.NH;
    place.h = place.head % sizes.NH;
    place.tile = 0;
    int64_t row = at % sizes.T;
    Matrix<const Real> O = matrix_of<Real>(call.O, place, sizes), dO = matrix_of<Real>(call.dO, place, sizes);
    float sum = 0;
    for (int d = lane; d < sizes.HS; d += 32)
        sum = fmaf(to_float(O.data[row * O.stride + d]), to_float(dO.data[row * dO.stride + d]), sum);
#pragma unroll
    for (int step = 16; step; step >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    if (lane == 0) call.D[at] = sum;
}

/* How the backward for one padded head dimension is laid out. */
template <int HSP>
struct BackwardShape {
    static const int CHUNK = chunk_of(HSP), CHUNKS = HSP / CHUNK;
    static const int SLICE = HSP < MAX_SLICE ? HSP : MAX_SLICE, SLICES = HSP / SLICE; /* columns of a block's gradients */
    static const int SLICE_CHUNKS = SLICE / CHUNK;
    static const int FLOATS = (2 * CHUNK + TILE) * TILE;
};

/* A block's shared memory: the factors of a product, and P or dS [k][TILE]. */
template <int HSP>
struct Factors {
    Shared<float> A, B, P;
    Lane lane;
};

template <int HSP>
__device__ __forceinline__ Factors<HSP> factors_here(void)
{
    const int CHUNK = BackwardShape<HSP>::CHUNK;
    Factors<HSP> factors;
    factors.A = shared_dynamic<float>(0, CHUNK * TILE);
    factors.B = shared_dynamic<float>(CHUNK * TILE * sizeof(float), CHUNK * TILE);
    factors.P = shared_dynamic<float>(2 * CHUNK * TILE * sizeof(float), TILE * TILE);
    factors.lane = lane_here();
    return factors;
}

/* S (TILE, TILE) = rows `x_row` .. of X times rows `y_row` .. of Y, summed over d. */
template <typename Real, int HSP>
__device__ __forceinline__ void dot_rows(float (&S)[BACKWARD_ROWS][S_COLUMNS], const Factors<HSP> &factors,
                                         const Matrix<const Real> &X, int x_row, const Matrix<const Real> &Y, int y_row)
{
    const int CHUNK = BackwardShape<HSP>::CHUNK;
    set_zero(S);
#pragma unroll 1
    for (int chunk = 0; chunk < BackwardShape<HSP>::CHUNKS; chunk++) {
        const int col = chunk * CHUNK;
        if (chunk && col >= X.HS) break;
        __syncthreads();
        load_transposed<Real, TILE, CHUNK, BACKWARD_WARPS>(factors.A, X, x_row, col);
        load_transposed<Real, TILE, CHUNK, BACKWARD_WARPS>(factors.B, Y, y_row, col);
        __syncthreads();
        multiply<BACKWARD_ROWS, S_COLUMNS, CHUNK, TILE, true, ALL>(S, factors.A, factors.B, factors.lane);
    }
}

template <int HSP>
struct Gradient {
    float x[BackwardShape<HSP>::SLICE_CHUNKS][BACKWARD_ROWS][BackwardShape<HSP>::CHUNK / COLUMN_LANES];
};

/* gradient (TILE, SLICE) += the staged P [k][row], transposed, times rows `y_row` .. of Y, columns `col` .. */
template <typename Real, int HSP, Triangle TRIANGLE>
__device__ __forceinline__ void add_rows(Gradient<HSP> &gradient, const Factors<HSP> &factors, const Matrix<const Real> &Y,
                                         int y_row, int col)
{
    typedef BackwardShape<HSP> Shape;
    const int CHUNK = Shape::CHUNK;
#pragma unroll
    for (int chunk = 0; chunk < Shape::SLICE_CHUNKS; chunk++) {
        if (col + chunk * CHUNK >= Y.HS) continue;
        __syncthreads();
        load_rows<Real, CHUNK, BACKWARD_WARPS>(factors.B, Y, y_row, col + chunk * CHUNK);
        __syncthreads();
        multiply<BACKWARD_ROWS, CHUNK / COLUMN_LANES, TILE, TILE, false, TRIANGLE>(gradient.x[chunk], factors.P, factors.B,
                                                                                 factors.lane);
    }
}

template <int HSP>
__device__ __forceinline__ void clear_gradient(Gradient<HSP> &gradient)
{
#pragma unroll
    for (int chunk = 0; chunk < BackwardShape<HSP>::SLICE_CHUNKS; chunk++) set_zero(gradient.x[chunk]);
}

template <typename Real, int HSP>
__device__ __forceinline__ void store_gradient(const Matrix<Real> &out, const Gradient<HSP> &gradient, Lane lane, int row,
                                               int col, float factor)
{
    typedef BackwardShape<HSP> Shape;
#pragma unroll
    for (int chunk = 0; chunk < Shape::SLICE_CHUNKS; chunk++)
#pragma unroll
        for (int m = 0; m < BACKWARD_ROWS; m++)
#pragma unroll
            for (int n = 0; n < Shape::CHUNK / COLUMN_LANES; n += 4) {
                const float *x = gradient.x[chunk][m] + n;
                store_four(out, row + row_of<BACKWARD_ROWS>(lane, m), col + chunk * Shape::CHUNK + column_of(lane, n),
                           make_float4(x[0] * factor, x[1] * factor, x[2] * factor, x[3] * factor));
            }
}

/* What a query brings to the backward. Beyond T: P = 0. */
struct Query {
    float base, inverse, D;
};

__device__ __forceinline__ Query query_at(const Backward &call, int64_t head, int row)
{
    if (row >= call.sizes.T) return {0, 0, 0};
    int64_t at = head * call.sizes.T + row;
    return {base_of(call.saved[2 * at]), call.saved[2 * at + 1], call.D[at]};
}

/* dK and dV of a tile of keys against one tile of queries. MASKED: the diagonal tile, or one that ends beyond T. */
template <typename Real, int HSP, bool MASKED, Triangle TRIANGLE>
__device__ __forceinline__ void keys_tile(Gradient<HSP> &dK, Gradient<HSP> &dV, const Factors<HSP> &factors,
                                          const Backward &call, const Place &place, int key, int query, int col)
{
    const Sizes &sizes = call.sizes;
    const Matrix<const Real> Q = matrix_of<Real>(call.Q, place, sizes), K = matrix_of<Real>(call.K, place, sizes);
    const Matrix<const Real> V = matrix_of<Real>(call.V, place, sizes), dO = matrix_of<Real>(call.dO, place, sizes);
    const Lane lane = factors.lane;
    float S[BACKWARD_ROWS][S_COLUMNS];
    /* The compiler must not see that `key` and `query` are what they were: it would keep the addresses of all their rows in
     * registers from one use to the next, at the price of spills. */
    asm volatile("" : "+r"(key));
    dot_rows<Real, HSP>(S, factors, K, key, Q, query);
#pragma unroll
    for (int n = 0; n < S_COLUMNS; n++) {
        int row = query + column_of(lane, n);
        Query q = query_at(call, place.head, row);
#pragma unroll
        for (int m = 0; m < BACKWARD_ROWS; m++) {
            S[m][n] = power_of(logit_of(S[m][n], sizes.scale_log2), q.base) * q.inverse;
            if (MASKED && (row >= sizes.T || key + row_of<BACKWARD_ROWS>(lane, m) > row)) S[m][n] = 0;
        }
    }
    stage<BACKWARD_ROWS, TILE>(factors.P, S, lane);
    add_rows<Real, HSP, TRIANGLE>(dV, factors, dO, query, col);

    if (HSP > 64) asm volatile("" : "+r"(key), "+r"(query)); /* up to 64 that costs more than it spares */
    dot_rows<Real, HSP>(S, factors, V, key, dO, query);
#pragma unroll
    for (int n = 0; n < S_COLUMNS; n++) {
        int row = query + column_of(lane, n);
        float D = query_at(call, place.head, row).D;
        float4 P = shared_load<float4>(staged<BACKWARD_ROWS, TILE>(factors.P, lane, 0, n));
        float p[4] = {P.x, P.y, P.z, P.w};
#pragma unroll
        for (int m = 0; m < BACKWARD_ROWS; m++) {
            S[m][n] = p[m] * (S[m][n] - D);
            if (MASKED && (row >= sizes.T || key + row_of<BACKWARD_ROWS>(lane, m) > row)) S[m][n] = 0;
        }
    }
    stage<BACKWARD_ROWS, TILE>(factors.P, S, lane);
    add_rows<Real, HSP, TRIANGLE>(dK, factors, Q, query, col);
}

template <typename Real, int HSP>
__global__ void __launch_bounds__(BACKWARD_THREADS, BACKWARD_BLOCKS(HSP)) flash_keys_kernel(Backward call)
{
    typedef BackwardShape<HSP> Shape;
    const Sizes &sizes = call.sizes;
    Place place = place_of(blockIdx.x / Shape::SLICES, sizes);
    const int key = place.tile * TILE, col = (int)(blockIdx.x % Shape::SLICES) * Shape::SLICE, last = sizes.T / TILE * TILE;
    const Factors<HSP> factors = factors_here<HSP>();
    Gradient<HSP> dK, dV;
    clear_gradient(dK);
    clear_gradient(dV);
    keys_tile<Real, HSP, true, FROM_ROW>(dK, dV, factors, call, place, key, key, col);
    for (int query = key + TILE; query < last; query += TILE)
        keys_tile<Real, HSP, false, ALL>(dK, dV, factors, call, place, key, query, col);
    if (last < sizes.T && key < last)
        keys_tile<Real, HSP, true, ALL>(dK, dV, factors, call, place, key, last, col);
    store_gradient(matrix_of<Real>(call.dK, place, sizes), dK, factors.lane, key, col, sizes.scale);
    store_gradient(matrix_of<Real>(call.dV, place, sizes), dV, factors.lane, key, col, 1.0f);
}

/* dQ of a tile of queries against one tile of keys. */
template <typename Real, int HSP, bool DIAGONAL>
__device__ __forceinline__ void queries_tile(Gradient<HSP> &dQ, const Query (&queries)[BACKWARD_ROWS],
                                             const Factors<HSP> &factors, const Backward &call, const Place &place, int key,
                                             int query, int col)
{
    const Sizes &sizes = call.sizes;
    const Matrix<const Real> Q = matrix_of<Real>(call.Q, place, sizes), K = matrix_of<Real>(call.K, place, sizes);
    const Matrix<const Real> V = matrix_of<Real>(call.V, place, sizes), dO = matrix_of<Real>(call.dO, place, sizes);
    const Lane lane = factors.lane;
    float S[BACKWARD_ROWS][S_COLUMNS], dS[BACKWARD_ROWS][S_COLUMNS];
    dot_rows<Real, HSP>(S, factors, Q, query, K, key);
    dot_rows<Real, HSP>(dS, factors, dO, query, V, key);
#pragma unroll
    for (int m = 0; m < BACKWARD_ROWS; m++)
#pragma unroll
        for (int n = 0; n < S_COLUMNS; n++) {
            float p = power_of(logit_of(S[m][n], sizes.scale_log2), queries[m].base) * queries[m].inverse;
            dS[m][n] = p * (dS[m][n] - queries[m].D);
            if (DIAGONAL && key + column_of(lane, n) > query + row_of<BACKWARD_ROWS>(lane, m)) dS[m][n] = 0;
        }
    stage<BACKWARD_ROWS, TILE>(factors.P, dS, lane);
    add_rows<Real, HSP, DIAGONAL ? UP_TO_ROW : ALL>(dQ, factors, K, key, col);
}

template <typename Real, int HSP>
__global__ void __launch_bounds__(BACKWARD_THREADS, BACKWARD_BLOCKS(HSP)) flash_queries_kernel(Backward call)
{
    typedef BackwardShape<HSP> Shape;
    const Sizes &sizes = call.sizes;
    Place place = place_of(blockIdx.x / Shape::SLICES, sizes);
    const int query = (sizes.tiles - 1 - place.tile) * TILE, col = (int)(blockIdx.x % Shape::SLICES) * Shape::SLICE;
    const Factors<HSP> factors = factors_here<HSP>();
    Query queries[BACKWARD_ROWS];
    Gradient<HSP> dQ;
#pragma unroll
    for (int m = 0; m < BACKWARD_ROWS; m++)
        queries[m] = query_at(call, place.head, query + row_of<BACKWARD_ROWS>(factors.lane, m));
    clear_gradient(dQ);
    for (int key = 0; key < query; key += TILE)
        queries_tile<Real, HSP, false>(dQ, queries, factors, call, place, key, query, col);
    queries_tile<Real, HSP, true>(dQ, queries, factors, call, place, query, query, col);
    store_gradient(matrix_of<Real>(call.dQ, place, sizes), dQ, factors.lane, query, col, sizes.scale);
}

/* --- launchers ------------------------------------------------------------------------------------------------------- */

#define CACHE_BYTES ((int64_t)16 << 20) /* of the second-level cache for a section's keys and values */

static size_t element_bytes(Dtype dtype) { return dtype == DTYPE_BF16 ? 2 : 4; }

static int64_t tiles_of(int64_t T, int64_t rows) { return (T + rows - 1) / rows; }

/* Can every row be moved by four elements at once? */
static int vectors_fit(const void *data, int64_t batch_stride, int64_t row_stride, int64_t head_stride,
                       const AttentionShape *shape)
{
    int64_t strides = batch_stride | row_stride | head_stride | shape->HS;
    return (uintptr_t)data % (4 * element_bytes(shape->dtype)) == 0 && strides % 4 == 0;
}

static Source source_of(AttentionInput view, const AttentionShape *shape)
{
    return {view, vectors_fit(view.data, view.batch_stride, view.row_stride, view.head_stride, shape)};
}

static Target target_of(AttentionOutput view, const AttentionShape *shape)
{
    return {view, vectors_fit(view.data, view.batch_stride, view.row_stride, view.head_stride, shape)};
}

static Sizes sizes_of(const AttentionShape *shape, int rows)
{
    int64_t heads = shape->B * shape->NH, head_bytes = 2 * shape->T * shape->HS * (int64_t)element_bytes(shape->dtype);
    int64_t section = CACHE_BYTES / head_bytes;
    section = section < 1 ? 1 : section < heads ? section : heads;
    return {heads, shape->NH, (int)shape->T, (int)shape->HS, (int)tiles_of(shape->T, rows), (int)section, shape->scale,
            (float)((double)shape->scale * LOG2_E)};
}

template <typename Real, int HSP>
static cudaError_t launch_forward(Forward call, const AttentionShape *shape, cudaStream_t stream)
{
    typedef ForwardShape<HSP> Shape;
    static_assert(Shape::FLOATS * sizeof(float) <= 64 << 10, "the shared memory of sm_75");
    call.sizes = sizes_of(shape, Shape::ROWS);
    return kernel_launch(flash_forward_kernel<Real, HSP>, dim3((unsigned)(call.sizes.heads * call.sizes.tiles)),
                         dim3(32 * Shape::WARPS), Shape::FLOATS * sizeof(float), stream, call);
}

template <typename Real, int HSP>
static cudaError_t launch_backward(Backward call, const AttentionShape *shape, cudaStream_t stream)
{
    typedef BackwardShape<HSP> Shape;
    static_assert(Shape::FLOATS * sizeof(float) <= 64 << 10, "the shared memory of sm_75");
    call.sizes = sizes_of(shape, TILE);
    dim3 dots((unsigned)tiles_of(call.sizes.heads * call.sizes.T, DOT_THREADS / 32));
    dim3 grid((unsigned)(call.sizes.heads * call.sizes.tiles * Shape::SLICES)), block(BACKWARD_THREADS);
    size_t bytes = Shape::FLOATS * sizeof(float);
    cudaError_t error = kernel_launch(flash_dot_kernel<Real>, dots, dim3(DOT_THREADS), 0, stream, call);
    if (error == cudaSuccess) error = kernel_launch(flash_keys_kernel<Real, HSP>, grid, block, bytes, stream, call);
    if (error == cudaSuccess) error = kernel_launch(flash_queries_kernel<Real, HSP>, grid, block, bytes, stream, call);
    return error;
}

/* launch<Real, HSP>(call, shape, stream) for the shape's type and the smallest padded head dimension that holds its own. */
#define LAUNCH_FOR(launch, Real)                                                                 \
    (shape->HS <= 32   ? launch<Real, 32>(call, shape, (cudaStream_t)stream)                     \
     : shape->HS <= 64  ? launch<Real, 64>(call, shape, (cudaStream_t)stream)                    \
     : shape->HS <= 96  ? launch<Real, 96>(call, shape, (cudaStream_t)stream)                    \
     : shape->HS <= 128 ? launch<Real, 128>(call, shape, (cudaStream_t)stream)                   \
                        : launch<Real, 256>(call, shape, (cudaStream_t)stream))
#define LAUNCH(launch) (shape->dtype == DTYPE_BF16 ? LAUNCH_FOR(launch, __nv_bfloat16) : LAUNCH_FOR(launch, float))

/* --- the table entry ------------------------------------------------------------------------------------------------- */

static const char *flash_simt_refuse(const AttentionShape *shape, int sm)
{
    if (sm < 75) return "needs sm_75 or later";
    if (shape->dtype != DTYPE_FP32 && shape->dtype != DTYPE_BF16) return "takes fp32 and bf16 only";
    if (shape->HS < 1 || shape->HS > MAX_HS) return "needs a head dimension from 1 to 256";
    if (shape->T > 1 << 30) return "needs T of at most 2^30";
    if (shape->B * shape->NH > 0 && tiles_of(shape->T, 8) > INT_MAX / (shape->B * shape->NH))
        return "needs B*NH*ceil(T/8) below 2^31, the blocks of a grid";
    return NULL;
}

static int64_t row_count(const AttentionShape *shape) { return shape->B * shape->NH * shape->T; }

static size_t flash_simt_saved_bytes(const AttentionShape *shape) { return (size_t)row_count(shape) * 2 * sizeof(float); }
static size_t flash_simt_scratch_bytes(const AttentionShape *shape) { return (size_t)row_count(shape) * sizeof(float); }

static const char *flash_simt_forward(AttentionOutput O, float *LSE, void *saved, void *scratch, AttentionInput Q,
                                      AttentionInput K, AttentionInput V, const AttentionShape *shape, void *stream)
{
    (void)scratch;
    if (row_count(shape) == 0) return NULL;
    Forward call;
    call.Q = source_of(Q, shape);
    call.K = source_of(K, shape);
    call.V = source_of(V, shape);
    call.O = target_of(O, shape);
    call.LSE = LSE;
    call.saved = (float *)saved;
    cudaError_t error = LAUNCH(launch_forward);
    return error == cudaSuccess ? NULL : cudaGetErrorString(error);
}

static const char *flash_simt_backward(AttentionOutput dQ, AttentionOutput dK, AttentionOutput dV, void *scratch,
                                       AttentionInput dO, AttentionInput Q, AttentionInput K, AttentionInput V,
                                       AttentionInput O, const float *LSE, const void *saved, const AttentionShape *shape,
                                       void *stream)
{
    (void)LSE;
    if (row_count(shape) == 0) return NULL;
    Backward call;
    call.Q = source_of(Q, shape);
    call.K = source_of(K, shape);
    call.V = source_of(V, shape);
    call.dO = source_of(dO, shape);
    call.O = source_of(O, shape);
    call.dQ = target_of(dQ, shape);
    call.dK = target_of(dK, shape);
    call.dV = target_of(dV, shape);
    call.saved = (const float *)saved;
    call.D = (float *)scratch;
    cudaError_t error = LAUNCH(launch_backward);
    return error == cudaSuccess ? NULL : cudaGetErrorString(error);
}

} /* namespace */

extern "C" const AttentionKernel attention_flash_simt = {
    ATTENTION_ABI,
    ATTENTION_CUDA,
    "flash_simt",
    "tiled, fp32 arithmetic on any GPU from sm_75, deterministic",
    flash_simt_refuse,
    flash_simt_saved_bytes,
    flash_simt_scratch_bytes,
    flash_simt_forward,
    flash_simt_backward,
};
