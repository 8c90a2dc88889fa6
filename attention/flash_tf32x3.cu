/* flash_tf32x3.cu - flash attention for fp32 on tensor cores: every factor is split into two TF32 numbers, every product is
 * three of theirs, and the results err by as much as fp32 arithmetic's. For GPUs from sm_80 on.
 *
 * The algorithm is that of flash_simt.cu (Dao et al. 2022, Dao 2023). Forward: a block owns a tile of queries and walks the
 * keys up to the diagonal, a step of 32 at a time, with a running maximum, a running sum and O in registers. Backward
 * recomputes P from the maximum and the sum that forward saved: a block owns a tile of keys, walks the queries from the
 * diagonal on with dK and dV in registers, and adds what its keys give to dQ to memory, atomically. Where bits have to
 * repeat it leaves dQ to another kernel that owns queries: seven products instead of five, but no sum shared between
 * blocks.
 *
 *          keys ->
 *      q   D . . .      D  step across the diagonal: the only one with mask code
 *      u   # D . .      #  full step                     forward, dQ alone: a block is a row of this picture
 *      e   # # D .      .  never visited                 dK, dV (and dQ):   a block is a column
 *      r   # # # D
 *
 * Splitting. TF32 is fp32 without the last 13 bits. x = hi + lo, where hi is x rounded to TF32 and lo = x - hi is exact; of
 * lo's 13 bits the tensor core reads 11, so what is lost is at most the last bit of x. a b is then
 *
 *      hi hi        22 bits each, the bulk                                 summed in `big`
 *      hi lo        2^-11 of it                                            summed in `small`
 *      lo hi        2^-11 of it                                            summed in `small`
 *      lo lo        2^-22 of it, of either sign: left out
 *
 * Splitting takes three instructions a number (add half a unit, mask, subtract). Rounding instead of cutting hi off costs
 * one of them: cut off, lo would be of x's sign always, and lo lo add up over a sum. What stays in shared memory, as K and
 * V where keys are owned, is split once when it arrives; what passes is split by each warp that reads it, for reading hi
 * and lo from shared memory would take twice its clocks.
 *
 * Summing. A tensor core cuts its sums off towards zero, which adds up over products of one sign. So an accumulator takes
 * DOT_STEPS or SUM_STEPS k8 steps at the most before it is added to the result in fp32 arithmetic, and the small products
 * do not meet the big ones on the way: they are summed apart, or before them. Measured once, by hand, under the emulation,
 * which cuts as Ampere does: the worst LSE at logits of 1e5, T 300 and HS 64 had 1.25 of the error that tests/bounds.h
 * allows with four steps over d, 0.95 with two, 0.65 with one.
 *
 * Fragments, lane = 4 g + q. S comes out as accumulators and goes into the next product as factor A, but m16n8k8 wants the
 * columns of A elsewhere than it leaves those of D. A sum over keys does not care for their order, so they are renamed:
 *
 *      D of S = Q K^T                A of O += P V                  B of O += P V
 *      row g: keys 2q, 2q+1    ->    row g: slots q, q+4      and   slots q, q+4 are rows 2q, 2q+1 of V, not q, q+4
 *
 * Products that sum over d (S, dP) read both factors by ldmatrix: four fp32 in 16 bytes of a row are what lanes q = 0 .. 3
 * want. Products that sum rows up (O, dQ, dK, dV) read B by 8 bytes: rows 2q and 2q+1, columns 2g and 2g+1, which are the
 * columns g of two products; so a lane ends up with four neighbouring columns of the output. Rows lie PAD floats longer
 * apart than they are: eight rows of ldmatrix then start at banks 0, 4, .. 28, and rows 2q at banks 0, 8, 16, 24, so that
 * no read meets another at a bank. The same tile serves both kinds.
 *
 * Counts at HS 64, of clocks of an SM, by the instructions that nvcc 13.0 makes for sm_90a. Not measured: a product is
 * taken for 1.6 clocks, as bf16's of the same size is reported. An SM issues four instructions, and moves 128 bytes of
 * shared memory, a clock.
 *
 *      a warp's step                          products           instructions      shared memory
 *      forward, 32 queries, 32 keys           384 = 614 clocks   1600 = 400        192 clocks
 *      dK, dV, dQ: 16 keys, 32 queries        480 = 768          2400 = 600        600
 *
 * Were products alone to count, that would be 96 TFLOP/s at 132 SMs and 1.7 GHz, 68 for the deterministic backward. Global
 * memory: a block of the forward, four warps, reads 16 KB a step of 4 * 614 clocks, from the second-level cache: blocks are
 * ordered in sections of heads whose keys and values fit there, and the longest first within one. The keys' block reads as
 * much, and adds 8 KB, in 4 * 768 clocks.
 *
 * Numbers. Logits are t = S * (scale * log2 e), rounded once, and P = 2^(t - m) / l with the saved m and l; S has the same
 * bits in both directions, so P is exact near the maximum for logits of any size. Masked entries become -inf before the
 * exponential, so P is an exact zero.
 *
 * Numbers that are none. Zero times NaN is NaN, so a NaN in V beyond the diagonal, but in the same step, reaches rows that
 * it may not; and an infinity has no low part (inf - inf). But here it is enough that it shows: nothing in these kernels
 * turns a NaN back into a number, so a row that should hold one does, and a row that comes out with one is done again by
 * its warp, in plain fp32, by the definition (forward_again, keys_again, queries_again). That costs the usual case one
 * multiplication an output. A row with a logit of NaN or +inf is NaN altogether, and given up at the first.
 *
 * Plain TF32 is the big products alone. flash_tf32.cu includes this file with TERMS as 1: factors are then rounded instead
 * of split, what stays in shared memory once, and there are no low parts, nor memory for them.
 *
 * Limits: HS up to 256, padded to 32, 64, 96, 128 or 256 in shared memory only; T up to 2^30; any strides. Rows that are
 * not aligned to 16 bytes, and HS that is no multiple of four, are loaded element by element. Above HS 128 the backward is
 * the deterministic one always, and a block owns 128 columns of the gradients.
 */
#include <limits.h>

#include "attention/attention.h"
#include "attention/tensor_core.h"

/* TF32 products that stand for one of two fp32 numbers: 3, or 1 in flash_tf32.cu. */
#ifndef TERMS
#define TERMS 3
#endif

/* Names here are this file's own: other kernels of the program use the same ones. */
namespace {

enum {
    MAX_HS = 256,
    PAD = 4,               /* floats after each row in shared memory: see the essay on banks */
    DOT_STEPS = 2,         /* k8 steps that an accumulator takes before it is added up in fp32: in sums over d */
    SUM_STEPS = 4,         /* and in sums of rows, at the most */
    PREPARE_THREADS = 256, /* of the kernel for D */
    MAX_COLUMNS = 128,     /* of dK and dV that a block owns: more do not fit in registers */
};

#define LOG2_E 1.4426950408889634
#define LN_2 0.6931471805599453f
#define WARP 0xffffffffu

/* How a kernel is cut up. */
struct Tiling {
    int m;      /* 16-row pieces of a warp: every factor B that is read serves m of them */
    int warps;  /* of a block, which owns 16 * m * warps rows */
    int step;   /* rows of the other kind that are taken at a time */
    int stages; /* steps in shared memory: 2 to load one while the other is used */
    int blocks; /* an SM, which bounds the registers */
    int wide;   /* 8-column pieces of an output that are summed up together */
    int part;   /* k8 steps that they are summed over before that is added to the output */
    int split;  /* tiles that stay in shared memory and lie there split: 1 is Q (or K) alone, 2 dO (or V) as well */
};

constexpr Tiling forward_tiling(int HSP)
{
    return HSP == 32    ? Tiling{2, 4, 32, 2, 2, 2, 2, 1}
           : HSP == 64  ? Tiling{2, 4, 32, 2, 2, 2, 4, 0}
           : HSP == 96  ? Tiling{1, 4, 32, 2, 2, 4, 4, 0}
           : HSP == 128 ? Tiling{1, 4, 32, 2, 2, 4, 4, 0}
                        : Tiling{1, 2, 16, 2, 2, 4, 2, 0};
}

constexpr Tiling keys_tiling(int HSP)
{
    return HSP == 32    ? Tiling{1, 4, 32, 2, 2, 4, 4, 1}
           : HSP == 64  ? Tiling{1, 4, 32, 1, 2, 4, 4, 2}
           : HSP == 96  ? Tiling{1, 4, 32, 1, 2, 4, 4, 0}
           : HSP == 128 ? Tiling{1, 2, 16, 1, 4, 4, 2, 0}
                        : Tiling{1, 2, 16, 1, 2, 2, 2, 0};
}

constexpr Tiling queries_tiling(int HSP)
{
    return HSP == 32    ? Tiling{1, 4, 32, 2, 2, 4, 4, 1}
           : HSP == 64  ? Tiling{1, 4, 32, 2, 2, 4, 4, 0}
           : HSP == 96  ? Tiling{1, 2, 32, 2, 2, 4, 4, 0}
           : HSP == 128 ? Tiling{1, 2, 16, 1, 4, 4, 2, 0}
                        : Tiling{1, 2, 16, 1, 2, 2, 2, 0};
}

/* Which tiles lie split, as in Tiling: all of them where that takes no more room. The room, in tiles. */
constexpr int split_of(const Tiling &tiling) { return TERMS == 1 ? 2 : tiling.split; }
constexpr int parts_of(bool split) { return split && TERMS == 3 ? 2 : 1; }

/* Bytes from a row of so many columns to the next in shared memory. */
__host__ __device__ constexpr int pitch_of(int columns) { return 4 * (columns + PAD); }

/* --- the place of a block and a lane --------------------------------------------------------------------------------- */

/* A lane in its warp, as the fragments count them: row g, columns 2q and 2q + 1 of an accumulator. */
struct Lane {
    int warp, index, g, q;
};

__device__ __forceinline__ Lane lane_here(void)
{
    int index = threadIdx.x % 32;
    return {(int)(threadIdx.x / 32), index, index / 4, index % 4};
}

/* What all kernels know of the problem. */
struct Sizes {
    int heads, NH;     /* B * NH */
    int T, HS, tiles;  /* tiles of a head, of as many rows as the kernel's blocks own */
    int section;       /* heads whose keys and values share the second-level cache */
    float scale, scale_log2;
    uint32_t zero;     /* 0, which the compiler cannot know: see after() */
};

struct Place {
    int head, b, h;
    int tile; /* 0 is the longest */
};

__device__ __forceinline__ Place place_at(int head, int tile, const Sizes &sizes)
{
    return {head, head / sizes.NH, head % sizes.NH, tile};
}

/* Blocks go through sections of heads, in a section through the tiles from the longest on, in a tile through the heads. */
__device__ __forceinline__ Place place_of(int block, const Sizes &sizes)
{
    int per_section = sizes.section * sizes.tiles, section = block / per_section, rest = block % per_section;
    int first = section * sizes.section, left = sizes.heads - first, heads = left < sizes.section ? left : sizes.section;
    return place_at(first + rest % heads, rest / heads, sizes);
}

/* x, but the compiler does not see that it is: what is computed from it is computed again where it is needed, instead of
 * being kept in registers that the products need. */
__device__ __forceinline__ int anew(int x)
{
    asm volatile("" : "+r"(x));
    return x;
}
__device__ __forceinline__ Place anew(const Place &place) { return {place.head, anew(place.b), anew(place.h), place.tile}; }

/* `at`, to be read once x is there. Otherwise the compiler begins with the loads that follow before it is done with what
 * leads to x, and keeps both in registers, of which there are too few. */
__device__ __forceinline__ SharedAddress after(float x, SharedAddress at, const Sizes &sizes)
{
    return at + (int)(__float_as_uint(x) & sizes.zero);
}

/* --- matrices in global memory --------------------------------------------------------------------------------------- */

/* A view with what the host found out about it: whether all its rows can be moved by four elements at once. */
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

template <typename Real, typename View>
__device__ __forceinline__ Matrix<Real> matrix_of(const View &at, const Place &place, const Sizes &sizes)
{
    return {(Real *)at.view.data + place.b * at.view.batch_stride + place.h * at.view.head_stride, at.view.row_stride,
            sizes.T, sizes.HS, at.vectors};
}

__device__ __forceinline__ Matrix<const float> matrix_of(const Source &at, const Place &place, const Sizes &sizes)
{
    return matrix_of<const float, Source>(at, place, sizes);
}

__device__ __forceinline__ Matrix<float> matrix_of(const Target &at, const Place &place, const Sizes &sizes)
{
    return matrix_of<float, Target>(at, place, sizes);
}

/* Elements col .. col+3 of a row; nothing outside of the matrix. */
__device__ __forceinline__ void store_four(const Matrix<float> &matrix, int row, int col, float4 v)
{
    if (row >= matrix.rows || col >= matrix.HS) return;
    float *at = matrix.data + row * matrix.stride + col;
    if (matrix.vectors) {
        *(float4 *)at = v;
        return;
    }
    int left = matrix.HS - col;
    at[0] = v.x;
    if (left > 1) at[1] = v.y;
    if (left > 2) at[2] = v.z;
    if (left > 3) at[3] = v.w;
}

/* --- tiles in shared memory ------------------------------------------------------------------------------------------ */

/* Which piece of a tile is a thread's: of every THREADS / 8 rows its own, four columns of every 32. */
__device__ __forceinline__ int piece_row(void) { return threadIdx.x / 8; }
__device__ __forceinline__ int piece_column(void) { return threadIdx.x % 8 * 4; }
template <int HSP>
__device__ __forceinline__ int piece_place(void) { return piece_row() * pitch_of(HSP) + piece_column() * 4; }

/* Starts to bring rows `row` .. of the matrix into tile [ROWS][HSP + PAD], zeros beyond its ends. There for the thread that
 * brought them after copies_wait, for all others after a barrier. */
template <int ROWS, int HSP, int THREADS>
__device__ __forceinline__ void load_tile(SharedAddress tile, const Matrix<const float> &matrix, int row)
{
    const int PASS = THREADS / 8; /* rows */
    static_assert(ROWS % PASS == 0, "all threads bring as many pieces");
    const SharedAddress to = tile + piece_place<HSP>();
    const float *from = matrix.data + (row + piece_row()) * matrix.stride + piece_column();
    int rows = matrix.rows - row - piece_row(), columns = matrix.HS - piece_column(); /* how many there are from here on */
    if (matrix.vectors) {
#pragma unroll
        for (int r = 0; r < ROWS; r += PASS, from += PASS * matrix.stride)
#pragma unroll
            for (int c = 0; c < HSP; c += 32)
                copy_async_16(to + (r * pitch_of(HSP) + c * 4), from + c, r < rows && c < columns);
        return;
    }
#pragma unroll 1
    for (int r = 0; r < ROWS; r += PASS, from += PASS * matrix.stride)
#pragma unroll 1
        for (int c = 0; c < HSP; c += 32) {
            int left = r < rows ? columns - c : 0;
            uint4 v = {0, 0, 0, 0};
            if (left > 0) v.x = __float_as_uint(from[c]);
            if (left > 1) v.y = __float_as_uint(from[c + 1]);
            if (left > 2) v.z = __float_as_uint(from[c + 2]);
            if (left > 3) v.w = __float_as_uint(from[c + 3]);
            store_128(to + (r * pitch_of(HSP) + c * 4), v);
        }
}

/* x = hi + lo but for what is below the last place of x: hi is x rounded to TF32, lo what is left, which the tensor core
 * cuts to TF32 when it reads it. Where x is no finite number, lo is NaN. With one term lo is 0, and nobody reads it. */
__device__ __forceinline__ void split(uint32_t &hi, uint32_t &lo, uint32_t x)
{
    if (TERMS == 1) {
        hi = round_tf32(__uint_as_float(x));
        lo = 0;
        return;
    }
    hi = (x + 0x1000u) & 0xffffe000u;
    lo = __float_as_uint(__fsub_rn(__uint_as_float(x), __uint_as_float(hi)));
}

/* x as products take it, for what is computed without them. */
__device__ __forceinline__ float factor_of(float x) { return TERMS == 1 ? __uint_as_float(round_tf32(x)) : x; }

/* What x holds, split into hi, in its place, and lo. */
__device__ __forceinline__ void split_four(uint32_t (&x)[4], uint32_t (&lo)[4])
{
#pragma unroll
    for (int i = 0; i < 4; i++) split(x[i], lo[i], x[i]);
}

/* Splits the pieces that the thread itself brought: hi in their place, lo `low` bytes on. */
template <int ROWS, int HSP, int THREADS>
__device__ __forceinline__ void split_tile(SharedAddress tile, int low)
{
#pragma unroll 1
    for (int r = 0; r < ROWS; r += THREADS / 8)
#pragma unroll 1
        for (int c = 0; c < HSP; c += 32) {
            SharedAddress at = tile + (piece_place<HSP>() + r * pitch_of(HSP) + c * 4);
            uint4 x = load_128(at), hi, lo;
            split(hi.x, lo.x, x.x);
            split(hi.y, lo.y, x.y);
            split(hi.z, lo.z, x.z);
            split(hi.w, lo.w, x.w);
            store_128(at, hi);
            if (TERMS == 3) store_128(at + low, lo);
        }
}

/* --- products -------------------------------------------------------------------------------------------------------- */

/* The factor A of m16n8k8, split. */
struct Factor {
    uint32_t hi[4], lo[4];
};

template <int M, int N>
__device__ __forceinline__ void set_zero(float (&x)[M][N][4])
{
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) x[m][n][e] = 0;
}

/* Sixteen rows and eight columns of a tile as a factor A; `at`: the address that a_place gives. */
template <bool SPLIT>
__device__ __forceinline__ void load_factor(Factor &a, SharedAddress at, int low)
{
    ldmatrix_x4(a.hi, at);
    if (!SPLIT) split_four(a.hi, a.lo);
    else if (TERMS == 3) ldmatrix_x4(a.lo, at + low);
}

/* Where a lane reads A, rows from `row` on; B as rows that are summed over d; B as rows that are summed up. Bytes. */
__device__ __forceinline__ int a_place(Lane lane, int row, int pitch)
{
    return (row + lane.index % 16) * pitch + lane.index / 16 * 16;
}
__device__ __forceinline__ int b_place(Lane lane, int pitch)
{
    return (lane.index % 8 + lane.index / 16 * 8) * pitch + lane.index / 8 % 2 * 16;
}
template <bool PAIRS>
__device__ __forceinline__ int y_place(Lane lane, int pitch) { return 2 * lane.q * pitch + (PAIRS ? 8 : 4) * lane.g; }

/* Of two neighbouring pieces of eight columns: sum += the products with the low parts, that of Q (or dO) first, so that
 * forward and backward, where Q is A once and B once, give the same bits. */
template <bool A_IS_QUERY, int M, int N>
__device__ __forceinline__ void multiply_small(float (&sum)[M][N][4], int n, const Factor (&a)[M], const uint32_t (&hi)[4],
                                               const uint32_t (&lo)[4])
{
#pragma unroll
    for (int turn = 0; turn < 2; turn++)
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int m = 0; m < M; m++)
                if (A_IS_QUERY == (turn == 0)) mma_tf32(sum[m][n + i], a[m].lo, hi[2 * i], hi[2 * i + 1]);
                else mma_tf32(sum[m][n + i], a[m].hi, lo[2 * i], lo[2 * i + 1]);
}

/* Of the same: sum += the products of the high parts. */
template <int M, int N>
__device__ __forceinline__ void multiply_big(float (&sum)[M][N][4], int n, const Factor (&a)[M], const uint32_t (&hi)[4])
{
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int m = 0; m < M; m++) mma_tf32(sum[m][n + i], a[m].hi, hi[2 * i], hi[2 * i + 1]);
}

template <int M, int N>
__device__ __forceinline__ void add_sums(float (&x)[M][N][4], const float (&more)[M][N][4])
{
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) x[m][n][e] += more[m][n][e];
}

/* S (16 M, 8 N), a warp's part: rows of A times rows of B, summed over d < HS. */
template <int HSP, bool SPLIT, bool A_IS_QUERY, int M, int N>
__device__ __forceinline__ void dot_rows(float (&S)[M][N][4], SharedAddress a_at, int low, SharedAddress b_at, int HS)
{
    const int PITCH = pitch_of(HSP), CHUNK = HSP == 64 && M == 1 ? 64 : 32;
    float small[M][N][4];
    set_zero(S);
    set_zero(small);
#pragma unroll 1
    for (int d = 0; d < HS; d += CHUNK, a_at += 4 * CHUNK, b_at += 4 * CHUNK)
#pragma unroll
        for (int part = 0; part < CHUNK; part += 8 * DOT_STEPS) {
            float big[M][N][4];
            set_zero(big);
#pragma unroll
            for (int k = part; k < part + 8 * DOT_STEPS; k += 8) {
                Factor a[M];
#pragma unroll
                for (int m = 0; m < M; m++) load_factor<SPLIT>(a[m], a_at + (m * 16 * PITCH + k * 4), low);
#pragma unroll
                for (int n = 0; n < N; n += 2) {
                    uint32_t hi[4], lo[4];
                    ldmatrix_x4(hi, b_at + (n * 8 * PITCH + k * 4));
                    split_four(hi, lo);
                    if (TERMS == 3) multiply_small<A_IS_QUERY>(small, n, a, hi, lo);
                    multiply_big(big, n, a, hi);
                }
            }
            add_sums(S, big);
        }
    if (TERMS == 3) add_sums(S, small);
}

/* Two factors B of eight columns from rows 2q and 2q + 1 of eight. PAIRS: they are the even and the odd columns of sixteen,
 * read two by two; else the first eight and the second, which suits rows that are split already, where what is read goes
 * into products as it is, two rows side by side in registers. */
template <bool PAIRS>
__device__ __forceinline__ void load_pair(uint32_t (&b)[4], SharedAddress at, int pitch)
{
    if (PAIRS) {
        float2 even = load_64(at), odd = load_64(at + pitch);
        b[0] = __float_as_uint(even.x), b[1] = __float_as_uint(odd.x);
        b[2] = __float_as_uint(even.y), b[3] = __float_as_uint(odd.y);
    } else {
        b[0] = load_32(at), b[1] = load_32(at + pitch);
        b[2] = load_32(at + 32), b[3] = load_32(at + (pitch + 32));
    }
}

/* A left factor (16 M, 8 K) of a product that sums rows up, piece by piece. Of each eight of its columns those that the
 * instruction calls q and q + 4 are 2q and 2q + 1: as accumulators lie. */
template <int M, int N>
struct LeftRegisters {
    static const int K = N, UNROLL = N;
    const float (&x)[M][N][4];

    __device__ __forceinline__ void load(Factor &a, int m, int k) const
    {
#pragma unroll
        for (int i = 0; i < 4; i++) a.hi[i] = __float_as_uint(x[m][k][i % 2 * 2 + i / 2]);
        split_four(a.hi, a.lo);
    }
};

/* The same in shared memory, columns in that order already. */
template <int COLUMNS>
struct LeftShared {
    static const int K = COLUMNS / 8, UNROLL = 1;
    SharedAddress at; /* as a_place says */

    __device__ __forceinline__ void load(Factor &a, int m, int k) const
    {
        load_factor<false>(a, at + (m * 16 * pitch_of(COLUMNS) + k * 32), 0);
    }
};

/* What rows g and g + 8 of each piece are multiplied by before something is added to them; all of it unless said. */
template <int M>
struct Keep {
    float x[M][2];
    __device__ __forceinline__ Keep(void)
    {
#pragma unroll
        for (int m = 0; m < M; m++) x[m][0] = x[m][1] = 1;
    }
};

/* out (16 M, 8 C), a warp's part, = out * keep + P Y: P (16 M, 8 K) is `left`; rows of Y are summed up, PART times eight of
 * them at a time. Where PAIRS, columns of out are permuted as four_of() says. */
template <int WIDE, int PART, int HSP, bool PAIRS, bool SPLIT, typename Left, int M, int C>
__device__ __forceinline__ void add_rows(float (&out)[M][C][4], Keep<M> keep, const Left &left, SharedAddress y_at, int low)
{
    const int PITCH = pitch_of(HSP);
    static_assert(C % WIDE == 0 && WIDE % 2 == 0 && Left::K % PART == 0 && PART <= SUM_STEPS, "whole parts");
#pragma unroll(Left::UNROLL)
    for (int part = 0; part < Left::K; part += PART) {
        Factor a[PART][M];
#pragma unroll
        for (int k = 0; k < PART; k++)
#pragma unroll
            for (int m = 0; m < M; m++) left.load(a[k][m], m, part + k);
#pragma unroll
        for (int c = 0; c < C; c += WIDE) {
            float sum[M][WIDE][4];
            uint32_t hi[PART][WIDE / 2][4], lo[4];
            set_zero(sum);
#pragma unroll
            for (int k = 0; k < PART; k++)
#pragma unroll
                for (int w = 0; w < WIDE; w += 2) {
                    SharedAddress at = y_at + ((part + k) * 8 * PITCH + (c + w) * 32);
                    load_pair<PAIRS>(hi[k][w / 2], at, PITCH);
                    if (!SPLIT) split_four(hi[k][w / 2], lo);
                    else if (TERMS == 3) load_pair<PAIRS>(lo, at + low, PITCH);
                    if (TERMS == 3) multiply_small<true>(sum, w, a[k], hi[k][w / 2], lo);
                }
#pragma unroll
            for (int k = 0; k < PART; k++)
#pragma unroll
                for (int w = 0; w < WIDE; w += 2) multiply_big(sum, w, a[k], hi[k][w / 2]);
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
                for (int w = 0; w < WIDE; w++)
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        out[m][c + w][e] = fmaf(out[m][c + w][e], part ? 1.0f : keep.x[m][e / 2], sum[m][w][e]);
        }
    }
}

/* What add_rows left, in a piece's row g + 8 half, of columns 16 pair .. 16 pair + 15: columns 4q .. 4q + 3, times
 * factor. */
template <int C>
__device__ __forceinline__ float4 four_of(const float (&x)[C][4], int half, int pair, float factor)
{
    const float *even = x[2 * pair] + 2 * half, *odd = x[2 * pair + 1] + 2 * half;
    return make_float4(even[0] * factor, odd[0] * factor, even[1] * factor, odd[1] * factor);
}

template <int M, int C>
__device__ __forceinline__ void store_rows(const Matrix<float> &out, const float (&x)[M][C][4], Lane lane, int row, int col,
                                           float factor)
{
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int pair = 0; pair < C / 2; pair++)
                store_four(out, row + 16 * m + 8 * half + lane.g, col + 16 * pair + 4 * lane.q,
                           four_of(x[m], half, pair, factor));
}

/* The rows of a warp, as bits, with anything in them that is no finite number. */
template <int M, int C>
__device__ __forceinline__ uint32_t spoilt_rows(const float (&x)[M][C][4], Lane lane)
{
    uint32_t mine = 0;
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float sum = 0;
#pragma unroll
            for (int c = 0; c < C; c++) sum = fmaf(x[m][c][2 * half], 0, fmaf(x[m][c][2 * half + 1], 0, sum));
            if (sum != sum) mine |= 1u << (16 * m + 8 * half + lane.g);
        }
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800 /* where the kernel compiles, but refuses */
    return mine;
#else
    return __reduce_or_sync(WARP, mine);
#endif
}

/* --- softmax --------------------------------------------------------------------------------------------------------- */

/* The logit in units of log2: what both passes take for t. Never contracted into what follows. */
__device__ __forceinline__ float logit_of(float s, float scale_log2) { return __fmul_rn(s, scale_log2); }

/* 2^(t - max), where a row of -inf alone counts from 0. */
__device__ __forceinline__ float base_of(float max) { return max == -INFINITY ? 0.0f : max; }
__device__ __forceinline__ float power_of(float t, float base) { return exp2_fast(__fsub_rn(t, base)); }

/* Reductions over the lanes that share a row of accumulators, and over a warp. */
__device__ __forceinline__ float quad_max(float x)
{
    x = fmaxf(x, __shfl_xor_sync(WARP, x, 1));
    return fmaxf(x, __shfl_xor_sync(WARP, x, 2));
}
__device__ __forceinline__ float quad_sum(float x)
{
    x += __shfl_xor_sync(WARP, x, 1);
    return x + __shfl_xor_sync(WARP, x, 2);
}
__device__ __forceinline__ float warp_max(float x)
{
    x = quad_max(x);
    x = fmaxf(x, __shfl_xor_sync(WARP, x, 4));
    x = fmaxf(x, __shfl_xor_sync(WARP, x, 8));
    return fmaxf(x, __shfl_xor_sync(WARP, x, 16));
}
__device__ __forceinline__ float warp_sum(float x)
{
    x = quad_sum(x);
    x += __shfl_xor_sync(WARP, x, 4);
    x += __shfl_xor_sync(WARP, x, 8);
    return x + __shfl_xor_sync(WARP, x, 16);
}

/* --- rows done again ------------------------------------------------------------------------------------------------- */

/* A warp's row of an output, of as many columns: lane l has columns l, l + 32, ... */
template <int COLUMNS>
struct Row {
    float x[(COLUMNS + 31) / 32];
};

/* The matrix from column `col` on, `columns` of it at the most: as many as a Row has. */
template <typename Real>
__device__ __forceinline__ Matrix<Real> columns_of(Matrix<Real> matrix, int col, int columns)
{
    matrix.data += col;
    matrix.HS = matrix.HS - col < columns ? matrix.HS - col : columns;
    return matrix;
}

template <int COLUMNS>
__device__ __forceinline__ void set_row(Row<COLUMNS> &row, float x)
{
#pragma unroll
    for (int c = 0; c < (COLUMNS + 31) / 32; c++) row.x[c] = x;
}

/* row += sum over n < count of lane n's p times row first + n of Y. */
template <int COLUMNS>
__device__ __forceinline__ void add_row(Row<COLUMNS> &row, float p, const Matrix<const float> &Y, int first, int count,
                                        Lane lane)
{
    for (int n = 0; n < count; n++) {
        float factor = __shfl_sync(WARP, p, n);
#pragma unroll
        for (int c = 0; c < (COLUMNS + 31) / 32; c++) {
            int d = lane.index + 32 * c;
            if (d < Y.HS) row.x[c] = fmaf(factor, factor_of(Y.data[(first + n) * Y.stride + d]), row.x[c]);
        }
    }
}

/* Writes the row, times factor, or adds it atomically. */
template <bool ADD, int COLUMNS>
__device__ __forceinline__ void store_row(const Matrix<float> &out, int at, const Row<COLUMNS> &row, float factor, Lane lane)
{
#pragma unroll
    for (int c = 0; c < (COLUMNS + 31) / 32; c++) {
        int d = lane.index + 32 * c;
        if (d >= out.HS) continue;
        float *to = out.data + at * out.stride + d;
        if (ADD) atomicAdd(to, row.x[c] * factor);
        else *to = row.x[c] * factor;
    }
}

__device__ __forceinline__ float dot_of(const Matrix<const float> &X, int x, const Matrix<const float> &Y, int y)
{
    float sum = 0;
    for (int d = 0; d < X.HS; d++)
        sum = fmaf(factor_of(X.data[x * X.stride + d]), factor_of(Y.data[y * Y.stride + d]), sum);
    return sum;
}

/* --- forward --------------------------------------------------------------------------------------------------------- */

struct Forward {
    Source Q, K, V;
    Target O;
    float *LSE;   /* (B, NH, T) */
    float *saved; /* (B, NH, T, 2): the maximum in log2 units, and 1 / sum */
    Sizes sizes;
};

/* How the forward for one padded head dimension is laid out: Q (whole, and its low part), then K and V of each stage. */
template <int HSP>
struct ForwardShape {
    static const int M = forward_tiling(HSP).m, WARPS = forward_tiling(HSP).warps, STEP = forward_tiling(HSP).step;
    static const int STAGES = forward_tiling(HSP).stages, BLOCKS = forward_tiling(HSP).blocks;
    static const int WIDE = forward_tiling(HSP).wide, PART = forward_tiling(HSP).part;
    static const bool SPLIT = split_of(forward_tiling(HSP));
    static const int THREADS = 32 * WARPS, ROWS = 16 * M * WARPS, N = STEP / 8, C = HSP / 8;
    static const int OWN = ROWS * pitch_of(HSP), OTHER = STEP * pitch_of(HSP); /* bytes of a tile */
    static const int BYTES = parts_of(SPLIT) * OWN + 2 * STAGES * OTHER;
    static_assert(STAGES == 2 && M <= 2, "what the forward is written for");
    /* The first query of a warp. */
    __device__ static int row_of(const Place &place, Lane lane, const Sizes &sizes)
    {
        return (sizes.tiles - 1 - place.tile) * ROWS + lane.warp * 16 * M;
    }
};

/* What stays in a thread's registers. Rows of a thread: 16 m + 8 half + g. */
template <int HSP>
struct ForwardState {
    typedef ForwardShape<HSP> Shape;
    float O[Shape::M][Shape::C][4];
    float max[Shape::M][2], sum[Shape::M][2]; /* sum: over this lane's columns only */
};

/* Puts what a row of softmax leaves behind where it belongs. */
__device__ __forceinline__ void store_sums(const Forward &call, int head, int row, float max, float sum)
{
    int64_t at = (int64_t)head * call.sizes.T + row;
    call.LSE[at] = fmaf(max, LN_2, logf(sum));
    call.saved[2 * at] = max;
    call.saved[2 * at + 1] = 1 / sum;
}

/* S becomes P in units of the new maxima; keep is what the sums so far are worth in them. */
template <int HSP>
__device__ __forceinline__ void softmax_step(float (&S)[ForwardShape<HSP>::M][ForwardShape<HSP>::N][4],
                                             Keep<ForwardShape<HSP>::M> &keep, ForwardState<HSP> &state, int row,
                                             int key, float scale_log2)
{
    typedef ForwardShape<HSP> Shape;
    Lane lane = lane_here();
#pragma unroll
    for (int m = 0; m < Shape::M; m++)
#pragma unroll
        for (int n = 0; n < Shape::N; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) S[m][n][e] = logit_of(S[m][n][e], scale_log2);
    if (key + Shape::STEP - 1 > row) { /* the step reaches beyond the diagonal */
#pragma unroll
        for (int m = 0; m < Shape::M; m++)
#pragma unroll
            for (int n = 0; n < Shape::N; n++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    if (key + 8 * n + 2 * lane.q + e % 2 > row + 16 * m + 8 * (e / 2) + lane.g) S[m][n][e] = -INFINITY;
    }
#pragma unroll
    for (int m = 0; m < Shape::M; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float most = -INFINITY, sum = 0;
#pragma unroll
            for (int n = 0; n < Shape::N; n++) /* passes over a NaN: its power is a NaN */
                most = fmaxf(most, fmaxf(S[m][n][2 * half], S[m][n][2 * half + 1]));
            float max = fmaxf(state.max[m][half], quad_max(most)), base = base_of(max);
#pragma unroll
            for (int n = 0; n < Shape::N; n++)
#pragma unroll
                for (int e = 2 * half; e < 2 * half + 2; e++) {
                    S[m][n][e] = power_of(S[m][n][e], base);
                    sum += S[m][n][e];
                }
            keep.x[m][half] = power_of(state.max[m][half], base);
            state.max[m][half] = max;
            state.sum[m][half] = fmaf(state.sum[m][half], keep.x[m][half], sum);
        }
}

/* Row `row` of O, its LSE and saved numbers by the definition, one warp: for rows that came out as no numbers. */
template <int HSP>
__device__ __forceinline__ void forward_again(const Forward &call, const Place &place, int row, Lane lane)
{
    const Sizes &sizes = call.sizes;
    Matrix<const float> Q = matrix_of(call.Q, place, sizes), K = matrix_of(call.K, place, sizes);
    Matrix<const float> V = matrix_of(call.V, place, sizes);
    Row<HSP> O;
    float max = -INFINITY, sum = 0;
    set_row(O, 0);
    for (int key = 0; key <= row; key += 32) {
        int count = row - key < 31 ? row - key + 1 : 32;
        float t = lane.index < count ? logit_of(dot_of(Q, row, K, key + lane.index), sizes.scale_log2) : -INFINITY;
        if (__any_sync(WARP, !(t < INFINITY))) { /* NaN or inf: NaN for the row, whatever else it holds */
            sum = NAN;
            break;
        }
        float more = fmaxf(max, warp_max(t)), base = base_of(more), keep = power_of(max, base), p = power_of(t, base);
        max = more;
        sum = fmaf(sum, keep, warp_sum(p));
#pragma unroll
        for (int c = 0; c < HSP / 32; c++) O.x[c] *= keep;
        add_row(O, p, V, key, count, lane);
    }
    store_row<false>(matrix_of(call.O, place, sizes), row, O, 1 / sum, lane);
    if (lane.index == 0) store_sums(call, place.head, row, max, sum);
}

/* Ends a warp's rows: O and what is saved. */
template <int HSP>
__device__ __forceinline__ void forward_end(ForwardState<HSP> &state, const Forward &call)
{
    typedef ForwardShape<HSP> Shape;
    const Lane lane = lane_here();
    const Place place = place_of(anew(blockIdx.x), call.sizes);
    const int T = call.sizes.T, row = Shape::row_of(place, lane, call.sizes);
#pragma unroll
    for (int m = 0; m < Shape::M; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float sum = quad_sum(state.sum[m][half]), inverse = 1 / sum;
            int at = row + 16 * m + 8 * half + lane.g;
            if (lane.q == 0 && at < T) store_sums(call, place.head, at, state.max[m][half], sum);
#pragma unroll
            for (int c = 0; c < Shape::C; c++)
#pragma unroll
                for (int e = 2 * half; e < 2 * half + 2; e++) state.O[m][c][e] *= inverse;
        }
    store_rows(matrix_of(call.O, place, call.sizes), state.O, lane, row, 0, 1.0f);
    uint32_t again = spoilt_rows(state.O, lane);
    __syncwarp();
    for (; again; again &= again - 1) {
        int at = row + __ffs((int)again) - 1;
        if (at < T) forward_again<HSP>(call, place, at, lane);
    }
}

template <int HSP>
__global__ void __launch_bounds__(ForwardShape<HSP>::THREADS, ForwardShape<HSP>::BLOCKS) flash_forward_kernel(Forward call)
{
    typedef ForwardShape<HSP> Shape;
    const int THREADS = Shape::THREADS, STEP = Shape::STEP, OTHER = Shape::OTHER, PITCH = pitch_of(HSP);
    const Sizes &sizes = call.sizes;
    const Lane lane = lane_here();
    const Place place = place_of(blockIdx.x, sizes);
    const int row = Shape::row_of(place, lane, sizes), mine = lane.warp * 16 * Shape::M, query = row - mine;
    const int end = query + Shape::ROWS < sizes.T ? query + Shape::ROWS : sizes.T; /* of the keys */
    const SharedAddress own = shared_address(shared_dynamic<float>(0, Shape::BYTES / 4));
    const SharedAddress stages = own + (Shape::BYTES - 4 * OTHER);
    ForwardState<HSP> state;
    set_zero(state.O);
#pragma unroll
    for (int m = 0; m < Shape::M; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            state.max[m][half] = -INFINITY;
            state.sum[m][half] = 0;
        }
    load_tile<Shape::ROWS, HSP, THREADS>(own, matrix_of(call.Q, place, sizes), query);
    load_tile<STEP, HSP, THREADS>(stages, matrix_of(call.K, place, sizes), 0);
    load_tile<STEP, HSP, THREADS>(stages + OTHER, matrix_of(call.V, place, sizes), 0);
    copies_commit();
    int stage = 0;
    for (int key = 0; key < end; key += STEP) {
        copies_wait<0>();
        if (Shape::SPLIT && key == 0) split_tile<Shape::ROWS, HSP, THREADS>(own, Shape::OWN);
        __syncthreads(); /* the step is there, and the one before is no longer read */
        if (key + STEP < end) {
            load_tile<STEP, HSP, THREADS>(stages + (2 * OTHER - stage), matrix_of(call.K, anew(place), sizes), key + STEP);
            load_tile<STEP, HSP, THREADS>(stages + (3 * OTHER - stage), matrix_of(call.V, anew(place), sizes), key + STEP);
            copies_commit();
        }
        if (key < row + 16 * Shape::M) {
            SharedAddress here = stages + stage;
            float S[Shape::M][Shape::N][4];
            Keep<Shape::M> keep;
            dot_rows<HSP, Shape::SPLIT, true>(S, own + a_place(lane, mine, PITCH), Shape::OWN,
                                                                here + b_place(lane, PITCH), sizes.HS);
            softmax_step<HSP>(S, keep, state, row, key, sizes.scale_log2);
#pragma unroll
            for (int m = 0; m < Shape::M; m++)
#pragma unroll
                for (int half = 0; half < 2; half++)
                    here = after(keep.x[m][half], after(state.sum[m][half], here, sizes), sizes);
            add_rows<Shape::WIDE, Shape::PART, HSP, true, false>(state.O, keep, LeftRegisters<Shape::M, Shape::N>{S},
                                                           here + (OTHER + y_place<true>(lane, PITCH)), 0);
        }
        stage = 2 * OTHER - stage;
    }
    forward_end<HSP>(state, call);
}

/* --- backward -------------------------------------------------------------------------------------------------------- */

struct Backward {
    Source Q, K, V, dO, O;
    Target dQ, dK, dV;
    const float *saved; /* (B, NH, T, 2) */
    float4 *queries;    /* (B, NH, T): what a query brings, Query below */
    Sizes sizes;
};

/* What a query brings to the backward: P = 2^(t - base) * inverse, dS = P * (dP - D). Zeros beyond T: P = 0. */
struct Query {
    float base, inverse, D;
};

/* Writes call.queries, a warp for a row; D = rowsum(dO * O). CLEAR: dQ becomes 0, to be added to. */
template <bool CLEAR>
__global__ void __launch_bounds__(PREPARE_THREADS) flash_prepare_kernel(Backward call)
{
    const Sizes &sizes = call.sizes;
    const Lane lane = lane_here();
    const int64_t at = (int64_t)blockIdx.x * (PREPARE_THREADS / 32) + lane.warp;
    if (at >= (int64_t)sizes.heads * sizes.T) return;
    const Place place = place_at((int)(at / sizes.T), 0, sizes);
    const int64_t row = at % sizes.T;
    Matrix<const float> O = matrix_of(call.O, place, sizes), dO = matrix_of(call.dO, place, sizes);
    float sum = 0;
    for (int d = lane.index; d < sizes.HS; d += 32)
        sum = fmaf(O.data[row * O.stride + d], factor_of(dO.data[row * dO.stride + d]), sum);
    sum = warp_sum(sum);
    if (lane.index == 0)
        call.queries[at] = make_float4(base_of(call.saved[2 * at]), call.saved[2 * at + 1], sum, 0);
    if (!CLEAR) return;
    Matrix<float> dQ = matrix_of(call.dQ, place, sizes);
    for (int d = lane.index; d < sizes.HS; d += 32) dQ.data[row * dQ.stride + d] = 0;
}

__device__ __forceinline__ Query query_at(const Backward &call, int head, int row)
{
    float4 x = call.queries[(int64_t)head * call.sizes.T + row];
    return {x.x, x.y, x.z};
}

/* P and dS of one pair of a query and a key, for rows that are done again. */
__device__ __forceinline__ void pair_of(float &P, float &dS, const Backward &call, const Place &place, int query, int key)
{
    const Sizes &sizes = call.sizes;
    Query q = query_at(call, place.head, query);
    float s = dot_of(matrix_of(call.Q, place, sizes), query, matrix_of(call.K, place, sizes), key);
    float dP = dot_of(matrix_of(call.dO, place, sizes), query, matrix_of(call.V, place, sizes), key);
    P = power_of(logit_of(s, sizes.scale_log2), q.base) * q.inverse;
    dS = P * (dP - q.D);
}

/* How the kernel that owns keys is laid out: K (and its low part), V, of each stage Q, dO and what the queries bring, and dS
 * where it makes dQ too. */
template <int HSP, bool WITH_DQ>
struct KeysShape {
    static const int M = keys_tiling(HSP).m, WARPS = keys_tiling(HSP).warps, STEP = keys_tiling(HSP).step;
    static const int STAGES = keys_tiling(HSP).stages, BLOCKS = keys_tiling(HSP).blocks;
    static const int WIDE = keys_tiling(HSP).wide, PART = keys_tiling(HSP).part;
    static const bool SPLIT = split_of(keys_tiling(HSP)), SPLIT_V = split_of(keys_tiling(HSP)) == 2;
    static const int THREADS = 32 * WARPS, KEYS = 16 * M * WARPS, N = STEP / 8;
    static const int COLUMNS = HSP < MAX_COLUMNS ? HSP : MAX_COLUMNS, SLICES = HSP / COLUMNS, C = COLUMNS / 8;
    static const int OWN = KEYS * pitch_of(HSP), OTHER = STEP * pitch_of(HSP), STAGE = 2 * OTHER + STEP * 16;
    static const int V_AT = parts_of(SPLIT) * OWN, STAGES_AT = V_AT + parts_of(SPLIT_V) * OWN;
    static const int DS_AT = STAGES_AT + STAGES * STAGE;
    static const int BYTES = DS_AT + (WITH_DQ ? STEP * pitch_of(KEYS) : 0);
    static_assert(STEP <= THREADS, "a thread brings at most one query's numbers");
    static_assert(!WITH_DQ || SLICES == 1, "dQ is made of whole rows of K");
};

/* Starts to bring a step's queries. Up to HS 64 there are registers for where they lie. */
template <int HSP, bool WITH_DQ>
__device__ __forceinline__ void load_queries(SharedAddress stage, const Backward &call, const Place &place, int query)
{
    typedef KeysShape<HSP, WITH_DQ> Shape;
    const Sizes &sizes = call.sizes;
    const Place here = HSP > 64 ? anew(place) : place;
    load_tile<Shape::STEP, HSP, Shape::THREADS>(stage, matrix_of(call.Q, here, sizes), query);
    load_tile<Shape::STEP, HSP, Shape::THREADS>(stage + Shape::OTHER, matrix_of(call.dO, here, sizes), query);
    if (threadIdx.x < Shape::STEP)
        copy_async_16(stage + (2 * Shape::OTHER + threadIdx.x * 16),
                      call.queries + ((int64_t)anew(place.head) * sizes.T + query + threadIdx.x),
                      query + (int)threadIdx.x < sizes.T);
    copies_commit();
}

/* P and dS (16 M keys, 8 N queries) of a warp from S and dP, which they replace. */
template <int M, int N>
__device__ __forceinline__ void gradient_step(float (&S)[M][N][4], float (&dP)[M][N][4], SharedAddress queries, Lane lane,
                                              int key, int query, float scale_log2)
{
    const bool masked = key + 16 * M - 1 > query;
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int j = 0; j < 2; j++) {
            SharedAddress at = queries + (8 * n + j) * 16 + lane.q * 32;
            float2 power = load_64(at);
            float D = __uint_as_float(load_32(at + 8));
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
                for (int e = j; e < 4; e += 2) {
                    S[m][n][e] = power_of(logit_of(S[m][n][e], scale_log2), power.x) * power.y;
                    dP[m][n][e] = S[m][n][e] * (dP[m][n][e] - D);
                }
        }
    if (!masked) return;
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                if (key + 16 * m + 8 * (e / 2) + lane.g > query + 8 * n + 2 * lane.q + e % 2) S[m][n][e] = dP[m][n][e] = 0;
}

/* dS^T of a warp's keys from `key` of the block on, into dS [STEP][KEYS + PAD]: of each eight keys those in slots q and
 * q + 4 are 2q and 2q + 1, as the rows of K that they multiply are read. */
template <int M, int N>
__device__ __forceinline__ void stage_step(SharedAddress dS, const float (&x)[M][N][4], Lane lane, int key, int pitch)
{
    SharedAddress at = dS + (2 * lane.q * pitch + (key + lane.g / 2 + lane.g % 2 * 4) * 4);
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                store_32(at + ((8 * n + e % 2) * pitch + (16 * m + 8 * (e / 2)) * 4), __float_as_uint(x[m][n][e]));
}

/* What keys `key` .. `end` - 1 give row `row` of dQ, by the definition, one warp; columns `col` .. of it. */
template <int COLUMNS, bool ADD>
__device__ __forceinline__ void queries_again(const Backward &call, const Place &place, int row, int key, int end, int col,
                                              Lane lane)
{
    const Sizes &sizes = call.sizes;
    const Matrix<const float> K = columns_of(matrix_of(call.K, place, sizes), col, COLUMNS);
    Row<COLUMNS> dQ;
    set_row(dQ, 0);
    for (; key < end; key += 32) {
        int count = end - key < 32 ? end - key : 32;
        float P = 0, dS = 0;
        if (lane.index < count) pair_of(P, dS, call, place, row, key + lane.index);
        if (__any_sync(WARP, P != P)) { /* the row has no softmax: NaN, whatever else it holds */
            set_row(dQ, NAN);
            break;
        }
        add_row(dQ, dS, K, key, count, lane);
    }
    store_row<ADD>(columns_of(matrix_of(call.dQ, place, sizes), col, COLUMNS), row, dQ, sizes.scale, lane);
}

/* dK and dV of key `key` by the definition, one warp; columns `col` .. of them. */
template <int COLUMNS>
__device__ __forceinline__ void keys_again(const Backward &call, const Place &place, int key, int col, Lane lane)
{
    const Sizes &sizes = call.sizes;
    const Matrix<const float> Q = columns_of(matrix_of(call.Q, place, sizes), col, COLUMNS);
    const Matrix<const float> dO = columns_of(matrix_of(call.dO, place, sizes), col, COLUMNS);
    Row<COLUMNS> dK, dV;
    set_row(dK, 0);
    set_row(dV, 0);
    for (int query = key; query < sizes.T; query += 32) {
        int count = sizes.T - query < 32 ? sizes.T - query : 32;
        float P = 0, dS = 0;
        if (lane.index < count) pair_of(P, dS, call, place, query + lane.index, key);
        if (__any_sync(WARP, P != P)) {
            set_row(dK, NAN);
            set_row(dV, NAN);
            break;
        }
        add_row(dK, dS, Q, query, count, lane);
        add_row(dV, P, dO, query, count, lane);
    }
    store_row<false>(columns_of(matrix_of(call.dK, place, sizes), col, COLUMNS), key, dK, sizes.scale, lane);
    store_row<false>(columns_of(matrix_of(call.dV, place, sizes), col, COLUMNS), key, dV, 1.0f, lane);
}

/* Adds row g + 8 half of a piece, times factor, to memory: `to` is the place of its column 2q, `left` what there is of
 * columns from there on. */
template <int C>
__device__ __forceinline__ void add_pairs(float *to, int left, int vectors, const float (&x)[C][4], int half, float factor)
{
    if (vectors && 8 * (C - 1) < left) {
#pragma unroll
        for (int c = 0; c < C; c++)
            reduce_add_2(to + 8 * c, make_float2(x[c][2 * half] * factor, x[c][2 * half + 1] * factor));
        return;
    }
#pragma unroll
    for (int c = 0; c < C; c++) {
        if (8 * c < left) atomicAdd(to + 8 * c, x[c][2 * half] * factor);
        if (8 * c + 1 < left) atomicAdd(to + (8 * c + 1), x[c][2 * half + 1] * factor);
    }
}

/* Adds a step's dQ = dS K to memory: dS [STEP][KEYS + PAD], K from `key` on. A warp has 16 queries and a share of the
 * columns. */
template <int HSP>
__device__ __forceinline__ void add_queries(const Backward &call, const Place &place, SharedAddress dS, SharedAddress K,
                                            int key, int query)
{
    typedef KeysShape<HSP, true> Shape;
    const int ROW_WARPS = Shape::STEP / 16, COLUMNS = HSP / (Shape::WARPS / ROW_WARPS), C = COLUMNS / 8;
    static_assert(Shape::WARPS % ROW_WARPS == 0 && C % 2 == 0, "whole warps, and pairs of columns");
    const Lane lane = lane_here();
    const int piece = lane.warp % ROW_WARPS * 16, col = lane.warp / ROW_WARPS * COLUMNS, row = query + piece;
    float dQ[1][C][4];
    set_zero(dQ);
    add_rows<C % 4 ? 2 : 4, Shape::KEYS % 32 ? 2 : 4, HSP, false, Shape::SPLIT>(
        dQ, Keep<1>(), LeftShared<Shape::KEYS>{dS + a_place(lane, piece, pitch_of(Shape::KEYS))},
        K + (y_place<false>(lane, pitch_of(HSP)) + col * 4), Shape::OWN);
    uint32_t again = spoilt_rows(dQ, lane);
    const Matrix<float> out = matrix_of(call.dQ, anew(place), call.sizes);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int at = row + 8 * half + lane.g, left = out.HS - col - 2 * lane.q; /* columns from the lane's first on */
        if (at < out.rows && !(again >> (8 * half + lane.g) & 1))
            add_pairs(out.data + at * out.stride + col + 2 * lane.q, left, out.vectors, dQ[0], half, call.sizes.scale);
    }
    for (; again; again &= again - 1) {
        int at = row + __ffs((int)again) - 1, end = at < key + Shape::KEYS ? at + 1 : key + Shape::KEYS;
        if (at < call.sizes.T) queries_again<COLUMNS, true>(call, place, at, key, end, col, lane);
    }
}

/* dK and dV of a block's keys; and what these keys give to dQ, where WITH_DQ. */
template <int HSP, bool WITH_DQ>
__global__ void __launch_bounds__(KeysShape<HSP, WITH_DQ>::THREADS, KeysShape<HSP, WITH_DQ>::BLOCKS)
flash_keys_kernel(Backward call)
{
    typedef KeysShape<HSP, WITH_DQ> Shape;
    const int THREADS = Shape::THREADS, PITCH = pitch_of(HSP), STEP = Shape::STEP, M = Shape::M, N = Shape::N;
    const Sizes &sizes = call.sizes;
    const Lane lane = lane_here();
    const Place place = place_of(blockIdx.x / Shape::SLICES, sizes);
    const int key = place.tile * Shape::KEYS, mine = lane.warp * 16 * M; /* the block's first key; this warp's from there */
    const int col = (int)(blockIdx.x % Shape::SLICES) * Shape::COLUMNS;
    const SharedAddress K = shared_address(shared_dynamic<float>(0, Shape::BYTES / 4)), V = K + Shape::V_AT;
    const SharedAddress stages = K + Shape::STAGES_AT, dS_at = K + Shape::DS_AT;
    float dK[M][Shape::C][4], dV[M][Shape::C][4];
    set_zero(dK);
    set_zero(dV);
    load_tile<Shape::KEYS, HSP, THREADS>(K, matrix_of(call.K, place, sizes), key);
    load_tile<Shape::KEYS, HSP, THREADS>(V, matrix_of(call.V, place, sizes), key);
    int query = key / STEP * STEP, stage = 0;
    load_queries<HSP, WITH_DQ>(stages, call, place, query);
    bool first = true;
    for (; query < sizes.T; query += STEP) {
        copies_wait<0>();
        if (Shape::SPLIT && first) split_tile<Shape::KEYS, HSP, THREADS>(K, Shape::OWN);
        if (Shape::SPLIT_V && first) split_tile<Shape::KEYS, HSP, THREADS>(V, Shape::OWN);
        first = false;
        __syncthreads(); /* the step is there; dS, and the other stage, are no longer read */
        SharedAddress Q = stages + stage, dO = Q + Shape::OTHER;
        if (Shape::STAGES == 2) {
            stage = Shape::STAGE - stage;
            if (query + STEP < sizes.T) load_queries<HSP, WITH_DQ>(stages + stage, call, place, query + STEP);
        }
        float S[M][N][4], dS[M][N][4];
        dot_rows<HSP, Shape::SPLIT, false>(S, K + a_place(lane, mine, PITCH), Shape::OWN, Q + b_place(lane, PITCH),
                                           sizes.HS);
        if (HSP > 64) dO = after(S[0][N - 1][0], dO, sizes);
        dot_rows<HSP, Shape::SPLIT_V, false>(dS, V + a_place(lane, mine, PITCH), Shape::OWN, dO + b_place(lane, PITCH),
                                             sizes.HS);
        gradient_step(S, dS, Q + 2 * Shape::OTHER, lane, key + mine, query, sizes.scale_log2);
        if (WITH_DQ) stage_step(dS_at, dS, lane, mine, pitch_of(Shape::KEYS));
        add_rows<Shape::WIDE, Shape::PART, HSP, true, false>(dV, Keep<M>(), LeftRegisters<M, N>{S},
                                                       dO + (y_place<true>(lane, PITCH) + col * 4), 0);
        add_rows<Shape::WIDE, Shape::PART, HSP, true, false>(dK, Keep<M>(), LeftRegisters<M, N>{dS},
                                                       Q + (y_place<true>(lane, PITCH) + col * 4), 0);
        if (WITH_DQ || Shape::STAGES == 1) __syncthreads(); /* dS is whole; the step's tiles are no longer read */
        if (Shape::STAGES == 1 && query + STEP < sizes.T) load_queries<HSP, WITH_DQ>(stages, call, place, query + STEP);
        if constexpr (WITH_DQ) add_queries<HSP>(call, place, dS_at, K, key, query);
    }
    const Place there = place_of(anew(blockIdx.x) / Shape::SLICES, sizes);
    const int from = there.tile * Shape::KEYS + mine, part = anew(blockIdx.x) % Shape::SLICES * Shape::COLUMNS;
    store_rows(matrix_of(call.dK, there, sizes), dK, lane, from, part, sizes.scale);
    store_rows(matrix_of(call.dV, there, sizes), dV, lane, from, part, 1.0f);
    uint32_t again = spoilt_rows(dK, lane) | spoilt_rows(dV, lane);
    __syncwarp();
    for (; again; again &= again - 1) {
        int at = from + __ffs((int)again) - 1;
        if (at < sizes.T) keys_again<Shape::COLUMNS>(call, there, at, part, lane);
    }
}

/* How the kernel that owns queries is laid out: Q and dO (and their low parts), then K and V of each stage. */
template <int HSP>
struct QueriesShape {
    static const int M = queries_tiling(HSP).m, WARPS = queries_tiling(HSP).warps, STEP = queries_tiling(HSP).step;
    static const int STAGES = queries_tiling(HSP).stages, BLOCKS = queries_tiling(HSP).blocks;
    static const int WIDE = queries_tiling(HSP).wide, PART = queries_tiling(HSP).part;
    static const bool SPLIT = split_of(queries_tiling(HSP)), SPLIT_DO = split_of(queries_tiling(HSP)) == 2;
    static const int THREADS = 32 * WARPS, ROWS = 16 * M * WARPS, N = STEP / 8;
    static const int COLUMNS = HSP < MAX_COLUMNS ? HSP : MAX_COLUMNS, SLICES = HSP / COLUMNS, C = COLUMNS / 8;
    static const int OWN = ROWS * pitch_of(HSP), OTHER = STEP * pitch_of(HSP);
    static const int DO_AT = parts_of(SPLIT) * OWN, STAGES_AT = DO_AT + parts_of(SPLIT_DO) * OWN;
    static const int BYTES = STAGES_AT + 2 * STAGES * OTHER;
};

/* dS (16 M queries, 8 N keys) of a warp from S and dP, which it replaces. */
template <int M, int N>
__device__ __forceinline__ void gradient_step(float (&S)[M][N][4], float (&dP)[M][N][4], const Query (&queries)[M][2],
                                              Lane lane, int row, int key, float scale_log2)
{
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const Query &q = queries[m][e / 2];
                dP[m][n][e] = power_of(logit_of(S[m][n][e], scale_log2), q.base) * q.inverse * (dP[m][n][e] - q.D);
            }
    if (key + 8 * N - 1 <= row) return;
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                if (key + 8 * n + 2 * lane.q + e % 2 > row + 16 * m + 8 * (e / 2) + lane.g) dP[m][n][e] = 0;
}

/* dQ of a block's queries. */
template <int HSP>
__global__ void __launch_bounds__(QueriesShape<HSP>::THREADS, QueriesShape<HSP>::BLOCKS) flash_queries_kernel(Backward call)
{
    typedef QueriesShape<HSP> Shape;
    const int THREADS = Shape::THREADS, STEP = Shape::STEP, OTHER = Shape::OTHER, PITCH = pitch_of(HSP);
    const int M = Shape::M, N = Shape::N;
    const Sizes &sizes = call.sizes;
    const Lane lane = lane_here();
    const Place place = place_of(blockIdx.x / Shape::SLICES, sizes);
    const int query = (sizes.tiles - 1 - place.tile) * Shape::ROWS, mine = lane.warp * 16 * M, row = query + mine;
    const int end = query + Shape::ROWS < sizes.T ? query + Shape::ROWS : sizes.T; /* of the keys */
    const int col = (int)(blockIdx.x % Shape::SLICES) * Shape::COLUMNS;
    const SharedAddress Q = shared_address(shared_dynamic<float>(0, Shape::BYTES / 4)), dO = Q + Shape::DO_AT;
    const SharedAddress stages = Q + Shape::STAGES_AT;
    Query queries[M][2];
    float dQ[M][Shape::C][4];
    set_zero(dQ);
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int at = row + 16 * m + 8 * half + lane.g;
            queries[m][half] = at < sizes.T ? query_at(call, place.head, at) : Query{0, 0, 0};
        }
    load_tile<Shape::ROWS, HSP, THREADS>(Q, matrix_of(call.Q, place, sizes), query);
    load_tile<Shape::ROWS, HSP, THREADS>(dO, matrix_of(call.dO, place, sizes), query);
    load_tile<STEP, HSP, THREADS>(stages, matrix_of(call.K, place, sizes), 0);
    load_tile<STEP, HSP, THREADS>(stages + OTHER, matrix_of(call.V, place, sizes), 0);
    copies_commit();
    int stage = 0;
    for (int key = 0; key < end; key += STEP) {
        copies_wait<0>();
        if (Shape::SPLIT && key == 0) split_tile<Shape::ROWS, HSP, THREADS>(Q, Shape::OWN);
        if (Shape::SPLIT_DO && key == 0) split_tile<Shape::ROWS, HSP, THREADS>(dO, Shape::OWN);
        __syncthreads(); /* the step is there, and the other stage is no longer read */
        SharedAddress here = stages + stage;
        if (Shape::STAGES == 2) {
            stage = 2 * OTHER - stage;
            if (key + STEP < end) {
                load_tile<STEP, HSP, THREADS>(stages + stage, matrix_of(call.K, anew(place), sizes), key + STEP);
                load_tile<STEP, HSP, THREADS>(stages + (stage + OTHER), matrix_of(call.V, anew(place), sizes), key + STEP);
                copies_commit();
            }
        }
        if (key < row + 16 * M) {
                float S[M][N][4], dS[M][N][4];
            dot_rows<HSP, Shape::SPLIT, true>(S, Q + a_place(lane, mine, PITCH), Shape::OWN,
                                                    here + b_place(lane, PITCH), sizes.HS);
            here = after(S[0][N - 1][0], here, sizes);
            dot_rows<HSP, Shape::SPLIT_DO, true>(dS, dO + a_place(lane, mine, PITCH), Shape::OWN,
                                                    here + (OTHER + b_place(lane, PITCH)), sizes.HS);
            gradient_step(S, dS, queries, lane, row, key, sizes.scale_log2);
                add_rows<Shape::WIDE, Shape::PART, HSP, true, false>(dQ, Keep<M>(), LeftRegisters<M, N>{dS},
                                                           here + (y_place<true>(lane, PITCH) + col * 4), 0);
        }
        if (Shape::STAGES == 1) {
            __syncthreads(); /* the step is no longer read */
            if (key + STEP < end) {
                load_tile<STEP, HSP, THREADS>(stages, matrix_of(call.K, anew(place), sizes), key + STEP);
                load_tile<STEP, HSP, THREADS>(stages + OTHER, matrix_of(call.V, anew(place), sizes), key + STEP);
                copies_commit();
            }
        }
    }
    const Place there = place_of(anew(blockIdx.x) / Shape::SLICES, sizes);
    const int from = (sizes.tiles - 1 - there.tile) * Shape::ROWS + mine;
    store_rows(matrix_of(call.dQ, there, sizes), dQ, lane, from, col, sizes.scale);
    uint32_t again = spoilt_rows(dQ, lane);
    __syncwarp();
    for (; again; again &= again - 1) {
        int at = from + __ffs((int)again) - 1;
        if (at < sizes.T) queries_again<Shape::COLUMNS, false>(call, there, at, 0, at + 1, col, lane);
    }
}

/* --- launchers ------------------------------------------------------------------------------------------------------- */

#define CACHE_BYTES ((int64_t)16 << 20) /* of the second-level cache for a section's keys and values */

int64_t row_count(const AttentionShape *shape) { return shape->B * shape->NH * shape->T; }
int64_t tiles_of(int64_t T, int64_t rows) { return (T + rows - 1) / rows; }

/* Can every row be moved by four elements at once? */
int vectors_fit(const void *data, int64_t batch_stride, int64_t row_stride, int64_t head_stride, const AttentionShape *shape)
{
    int64_t strides = batch_stride | row_stride | head_stride | shape->HS;
    return (uintptr_t)data % 16 == 0 && strides % 4 == 0;
}

Source source_of(AttentionInput view, const AttentionShape *shape)
{
    return {view, vectors_fit(view.data, view.batch_stride, view.row_stride, view.head_stride, shape)};
}

Target target_of(AttentionOutput view, const AttentionShape *shape)
{
    return {view, vectors_fit(view.data, view.batch_stride, view.row_stride, view.head_stride, shape)};
}

Sizes sizes_of(const AttentionShape *shape, int rows)
{
    int64_t heads = shape->B * shape->NH, head_bytes = 2 * shape->T * shape->HS * (int64_t)sizeof(float);
    int64_t section = CACHE_BYTES / head_bytes;
    section = section < 1 ? 1 : section < heads ? section : heads;
    return {(int)heads, (int)shape->NH, (int)shape->T, (int)shape->HS, (int)tiles_of(shape->T, rows), (int)section,
            shape->scale, (float)((double)shape->scale * LOG2_E), 0};
}

template <int HSP>
cudaError_t launch_forward(Forward call, const AttentionShape *shape, cudaStream_t stream)
{
    typedef ForwardShape<HSP> Shape;
    call.sizes = sizes_of(shape, Shape::ROWS);
    return kernel_launch(flash_forward_kernel<HSP>, dim3((unsigned)(call.sizes.heads * call.sizes.tiles)),
                         dim3(Shape::THREADS), Shape::BYTES, stream, call);
}

template <int HSP, bool WITH_DQ>
cudaError_t launch_keys(Backward call, const AttentionShape *shape, cudaStream_t stream)
{
    typedef KeysShape<HSP, WITH_DQ> Shape;
    call.sizes = sizes_of(shape, Shape::KEYS);
    return kernel_launch(flash_keys_kernel<HSP, WITH_DQ>,
                         dim3((unsigned)(call.sizes.heads * call.sizes.tiles * Shape::SLICES)), dim3(Shape::THREADS),
                         Shape::BYTES, stream, call);
}

template <int HSP>
cudaError_t launch_queries(Backward call, const AttentionShape *shape, cudaStream_t stream)
{
    typedef QueriesShape<HSP> Shape;
    call.sizes = sizes_of(shape, Shape::ROWS);
    return kernel_launch(flash_queries_kernel<HSP>, dim3((unsigned)(call.sizes.heads * call.sizes.tiles * Shape::SLICES)),
                         dim3(Shape::THREADS), Shape::BYTES, stream, call);
}

/* Where bits need not repeat one kernel makes all three gradients; its registers hold no head dimension above 128. */
template <int HSP>
cudaError_t launch_backward(Backward call, const AttentionShape *shape, cudaStream_t stream)
{
    call.sizes = sizes_of(shape, 1);
    const bool one_kernel = !shape->deterministic && HSP <= MAX_COLUMNS;
    dim3 rows((unsigned)tiles_of(row_count(shape), PREPARE_THREADS / 32));
    if constexpr (HSP <= MAX_COLUMNS)
        if (one_kernel) {
            cudaError_t error = kernel_launch(flash_prepare_kernel<true>, rows, dim3(PREPARE_THREADS), 0, stream, call);
            return error == cudaSuccess ? launch_keys<HSP, true>(call, shape, stream) : error;
        }
    cudaError_t error = kernel_launch(flash_prepare_kernel<false>, rows, dim3(PREPARE_THREADS), 0, stream, call);
    if (error == cudaSuccess) error = launch_keys<HSP, false>(call, shape, stream);
    return error == cudaSuccess ? launch_queries<HSP>(call, shape, stream) : error;
}

/* Shared memory of the largest block that a head dimension takes. */
template <int HSP>
int shared_bytes(void)
{
    int keys = KeysShape<HSP, HSP <= MAX_COLUMNS>::BYTES, queries = QueriesShape<HSP>::BYTES;
    int backward = keys > queries ? keys : queries, forward = ForwardShape<HSP>::BYTES;
    return forward > backward ? forward : backward;
}

/* function<HSP>(arguments) for the smallest padded head dimension that holds HS. */
#define FOR_HEAD(HS, function, ...)          \
    ((HS) <= 32    ? function<32>(__VA_ARGS__)  \
     : (HS) <= 64  ? function<64>(__VA_ARGS__)  \
     : (HS) <= 96  ? function<96>(__VA_ARGS__)  \
     : (HS) <= 128 ? function<128>(__VA_ARGS__) \
                   : function<256>(__VA_ARGS__))

/* --- the table entry ------------------------------------------------------------------------------------------------- */

/* What a block can have, by the programming guide's table of compute capabilities. */
int shared_limit(int sm)
{
    int kilobytes = sm == 80 || sm == 87 ? 163 : sm == 86 || sm == 89 || sm >= 120 ? 99 : 227;
    return kilobytes << 10;
}

const char *flash_tf32x3_refuse(const AttentionShape *shape, int sm)
{
    if (sm < 80) return "needs sm_80 or later";
    if (shape->dtype != DTYPE_FP32) return "takes fp32 only";
    if (shape->HS < 1 || shape->HS > MAX_HS) return "needs a head dimension from 1 to 256";
    if (FOR_HEAD(shape->HS, shared_bytes) > shared_limit(sm)) return "needs more shared memory than this GPU gives a block";
    if (shape->T > 1 << 30) return "needs T of at most 2^30";
    if (shape->B * shape->NH > 0 && tiles_of(shape->T, 8) > INT_MAX / (shape->B * shape->NH))
        return "needs B*NH*ceil(T/8) below 2^31, the blocks of a grid";
    return NULL;
}

size_t flash_tf32x3_saved_bytes(const AttentionShape *shape) { return (size_t)row_count(shape) * 2 * sizeof(float); }
size_t flash_tf32x3_scratch_bytes(const AttentionShape *shape) { return (size_t)row_count(shape) * sizeof(float4); }

const char *flash_tf32x3_forward(AttentionOutput O, float *LSE, void *saved, void *scratch, AttentionInput Q,
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
    cudaError_t error = FOR_HEAD(shape->HS, launch_forward, call, shape, (cudaStream_t)stream);
    return error == cudaSuccess ? NULL : cudaGetErrorString(error);
}

const char *flash_tf32x3_backward(AttentionOutput dQ, AttentionOutput dK, AttentionOutput dV, void *scratch,
                                  AttentionInput dO, AttentionInput Q, AttentionInput K, AttentionInput V, AttentionInput O,
                                  const float *LSE, const void *saved, const AttentionShape *shape, void *stream)
{
    (void)LSE;
    if (row_count(shape) == 0) return NULL;
    if ((uintptr_t)scratch % 16) return "scratch is not aligned to 16 bytes";
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
    call.queries = (float4 *)scratch;
    cudaError_t error = FOR_HEAD(shape->HS, launch_backward, call, shape, (cudaStream_t)stream);
    return error == cudaSuccess ? NULL : cudaGetErrorString(error);
}

} // namespace

#if TERMS == 3
extern "C" const AttentionKernel attention_flash_tf32x3 = {
    ATTENTION_ABI,
    ATTENTION_CUDA,
    "flash_tf32x3",
    "tensor cores from sm_80, fp32 as sums of two TF32 numbers",
    flash_tf32x3_refuse,
    flash_tf32x3_saved_bytes,
    flash_tf32x3_scratch_bytes,
    flash_tf32x3_forward,
    flash_tf32x3_backward,
};
#endif
