/* flash_mma.cu - flash attention on tensor cores by mma.sync, bf16, forward and backward, for GPUs from sm_80 on.
 *
 * The algorithm (Dao et al. 2022, Dao 2023), on tiles of queries and keys:
 *
 *     forward         a block owns 128 queries, a warp 32 of them (above HS 128: 64 and 16); walks the tiles of keys from
 *                     the diagonal down to key 0 with a running maximum, a running sum and O in registers
 *     backward        one pass over the keys: a block owns 128 keys and walks the tiles of queries from the diagonal
 *                     on; dK and dV stay in registers, its part of dQ is added in global memory (fp32 sums, in the
 *                     order of the fragments, rounded by a kernel of their own at the end): five products, sums in no
 *                     fixed order
 *     deterministic   two passes: dQ by blocks that own queries, dK and dV by blocks that own keys: seven products,
 *                     every bit repeats
 *
 *          keys ->
 *      q   m . . .      m  tiles that cross the diagonal: mask code, and a warp leaves out what none of its queries sees
 *      u   # m . .      #  full tiles: no mask code                forward, dQ: a block is a row of this picture
 *      e   # # m .      .  never visited                           dK, dV: a block is a column
 *      r   # # # m
 *
 * A warp multiplies 16 x 16 by 16 x 8 pieces (m16n8k16). The sums of two neighbouring pieces, rounded to bf16, are the
 * left factor of the next product as they lie: P never leaves the registers on its way from S = Q K^T to O += P V, nor
 * P^T and dS^T on theirs from S^T = K Q^T and dP^T = V dO^T to dV += P^T dO and dK += dS^T Q. Only dS goes through
 * shared memory, for dQ += dS K, whose sum over keys crosses warps; and above HS 64, where the registers hold half of
 * dK and dV a warp, P does too: then two warps share 32 keys, each scores half of the queries and sums up half of the
 * columns. There a block of 8 warps is all an SM has room for, and at a barrier nobody else works; so warps meet at
 * mbarriers, which split a barrier into arriving and waiting, and find work of their own in between:
 *
 *     S, P, dP, dS | wait: all done with the tile before | store P, dS | arrive | dV, dK of what it scored itself
 *     | wait: all have stored | queue the next tile's loads | dV, dK of the other warp's half | dQ | arrive
 *
 * What limits it, in clocks of an SM: mma.sync does a piece of 4096 operations in about 1.6, and its right factor, 256
 * bytes, takes 2 of shared memory unless it serves two left factors: so a warp owns 32 rows where its registers hold them.
 * exp2 is 16 a clock: by this count 1/16 of a clock for an element of P, whose 256 operations of the forward's products at
 * HS 64 take 1/10. What it reaches of the 600 TFLOP/s or so that mma.sync could do on an H200 is in
 * dev/results/nvidia-h200/attention_torch.csv; by the counters beside it (attention_counters.csv) no unit is at its limit,
 * and what is lost is latency: registers allow 8 to 12 warps an SM (dev/LOG.md). So products are unrolled as far as
 * registers go, without a branch inside: matrix loads of one step run under the products of the one before. Loads of the
 * next tile run behind the work on this one (cp.async, two stages).
 *
 * Shared memory: a tile is rows of HSP elements in chunks of 16 bytes, chunk c of row r at place c ^ r % 8, so that
 * ldmatrix reads eight rows from eight groups of banks. Forward up to 97 KB a block, backward up to 162 KB (163 KB are
 * sm_80's most; where a chip has less, the two passes are taken, with up to 97 KB).
 *
 * Global memory: forward reads Q once, K and V once a block that sees them, mostly from the second-level cache: blocks
 * are ordered in sections of heads whose K and V fit there, the longest first within one. Backward in one pass adds
 * (T / 128 + 1) / 2 times HSP * T floats a head to dQ: each block of 128 keys, to the queries from its first key on.
 *
 * Numbers. P = 2^(S c - m) with c = scale log2(e), one fused multiply-add and one ex2. Forward keeps m until a row
 * outgrows it by 2^8 (LAZY_LOG2), so O is rescaled a few times a row, and the lanes of a row need not agree on a
 * maximum until then. Backward takes LSE in log2 units as saved by forward: rounded, and beside it what the rounding
 * has cut off, which matters from LARGE_LSE on; from HUGE_LSE on logits are rounded before m is taken off. Masked logits
 * are -inf before the exponential. Zero times NaN is NaN: so in tiles that cross the diagonal, where P has zeros that
 * are none of the sum's business, each thread looks at the pieces it loaded itself; if any is not finite (rare, and told
 * to all by the barrier that is there anyway), it is replaced by 0 and the rows that see it get NaN. Rows beyond T are
 * zeros.
 *
 * Limits: bf16; HS a multiple of 8 up to 256, padded to 32, 64, 96, 128 or 256 in shared memory only; T up to 2^30; any
 * strides. Rows that are not aligned to 16 bytes are loaded element by element.
 */
#include <float.h>
#include <limits.h>

#include "attention/attention.h"
#include "attention/tensor_core.h"

namespace { /* other kernels use the same names */

enum { MAX_HS = 256 };

#define LOG2_E 1.4426950408889634
#define LN_2 0.6931471805599453f
#define FULL_WARP 0xffffffffu

/* Forward rescales O only when a row's maximum has grown by more than this, in powers of two: P stays below 2^8, where
 * fp32 sums and bf16 factors are as exact as below 1. */
#define LAZY_LOG2 8.0f

/* Where LSE (log2 units) is larger than this, what its rounding to fp32 has cut off matters: 2^-14 of P and more. Then
 * backward takes it in. */
#define LARGE_LSE 1024.0f

/* Where a maximum or an LSE (log2 units) is larger than this, logits are rounded before it is subtracted, in one expression
 * in both directions: then the largest less the maximum is 0. Of the exact product less the rounded maximum as much is left
 * as the rounding has cut off, up to 2^7 of 2^31: P would overflow, or all be 0. Up to here it is 1 at the most. */
#define HUGE_LSE 16777216.0f

/* --- the place of a block -------------------------------------------------------------------------------------------- */

/* What all kernels know of the problem. */
struct Sizes {
    uint32_t heads, NH; /* B * NH */
    int T, Tp, HS;      /* Tp: T rounded up to whole groups of four statistics */
    uint32_t tiles;     /* of a head, of as many rows as the kernel's blocks own */
    uint32_t section;   /* heads whose keys and values share the second-level cache */
    float scale, scale_log2;
};

struct Place {
    uint32_t head, b, h;
    int tile; /* 0 is the longest */
};

/* Blocks go through sections of heads, in a section through the tiles from the longest on, in a tile through the heads. */
__device__ __forceinline__ Place place_of(uint32_t block, const Sizes &sizes)
{
    uint32_t per_section = sizes.section * sizes.tiles, section = block / per_section;
    uint32_t first = section * sizes.section, left = sizes.heads - first, rest = block - section * per_section;
    uint32_t heads = left < sizes.section ? left : sizes.section;
    Place place;
    place.tile = (int)(rest / heads);
    place.head = first + rest % heads;
    place.b = place.head / sizes.NH;
    place.h = place.head % sizes.NH;
    return place;
}

/* The block's number, hidden from the compiler: a kernel finds its place anew for its last stores, which costs less
 * than registers that hold it all along. */
__device__ __forceinline__ uint32_t block_again(void)
{
    uint32_t block = blockIdx.x;
    asm volatile("" : "+r"(block));
    return block;
}

/* --- matrices in global memory --------------------------------------------------------------------------------------- */

/* A view with what the host found out about it: whether all its rows can be read by 16 bytes. */
struct Source {
    AttentionInput view;
    int vectors;
};

struct Target {
    AttentionOutput view;
    int vectors;
};

/* One head of a view: (rows, HS) bf16. */
struct Matrix {
    const __nv_bfloat16 *data;
    int64_t stride;
    int rows, HS, vectors;
};

struct OutMatrix {
    __nv_bfloat16 *data;
    int64_t stride;
    int rows, HS, vectors;
};

__device__ __forceinline__ Matrix matrix_of(const Source &source, const Place &place, const Sizes &sizes)
{
    const AttentionInput &view = source.view;
    return {(const __nv_bfloat16 *)view.data + place.b * view.batch_stride + place.h * view.head_stride,
            view.row_stride, sizes.T, sizes.HS, source.vectors};
}

__device__ __forceinline__ OutMatrix matrix_of(const Target &target, const Place &place, const Sizes &sizes)
{
    const AttentionOutput &view = target.view;
    return {(__nv_bfloat16 *)view.data + place.b * view.batch_stride + place.h * view.head_stride, view.row_stride,
            sizes.T, sizes.HS, target.vectors};
}

/* Eight neighbouring elements of a row that may lie at any address. */
__device__ __forceinline__ uint4 gather_eight(const __nv_bfloat16 *at)
{
    uint32_t word[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
        word[i] = __bfloat16_as_ushort(at[2 * i]) | (uint32_t)__bfloat16_as_ushort(at[2 * i + 1]) << 16;
    return make_uint4(word[0], word[1], word[2], word[3]);
}

__device__ __forceinline__ void scatter_eight(__nv_bfloat16 *at, uint4 x)
{
    uint32_t word[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        at[2 * i] = __ushort_as_bfloat16((unsigned short)(word[i] & 0xffff));
        at[2 * i + 1] = __ushort_as_bfloat16((unsigned short)(word[i] >> 16));
    }
}

/* --- tiles in shared memory ------------------------------------------------------------------------------------------ */

/* A tile of rows of HSP bf16, in chunks of 16 bytes. Chunk c of row r stands at place c ^ swizzle(r): then the eight
 * rows that one 8 x 8 matrix of ldmatrix needs lie in eight different groups of banks. Rows of an odd number of 64
 * bytes change sides by themselves. */
template <int COLUMNS>
__device__ __forceinline__ int tile_offset(int row, int chunk)
{
    const int CHUNKS = COLUMNS / 8;
    static_assert(CHUNKS % 4 == 0, "the swizzle permutes groups of four or eight chunks");
    return row * COLUMNS * 2 + ((chunk ^ (CHUNKS % 8 == 0 ? row & 7 : row >> 1 & 3)) << 4);
}

/* Which chunks of a tile a thread moves: in each pass PER threads take a row, of whose chunks they take every PER-th,
 * JUMPS of them. So a warp touches whole lines of memory, and a thread's places in the swizzled tile differ by
 * constants. */
template <int HSP, int ROWS_, int THREADS>
struct Passes {
    static const int CHUNKS = HSP / 8, PER = CHUNKS % 8 == 0 ? 8 : 4, STEP = THREADS / PER, JUMPS = CHUNKS / PER;
    static const int COUNT = (ROWS_ + STEP - 1) / STEP; /* passes */
    static_assert(STEP % 8 == 0, "the swizzle of a row is that of the thread's next");
    static_assert(ROWS_ % STEP == 0 || ROWS_ < STEP, "whole passes of the block");
    int row, chunk, offset;

    __device__ __forceinline__ Passes(void)
    {
        int thread = (int)threadIdx.x;
        asm volatile("" : "+r"(thread)); /* else the addresses that follow from it stay in registers from tile to tile */
        row = thread / PER;
        chunk = thread % PER;
        offset = tile_offset<HSP>(row, chunk);
    }
    /* Does the thread take part? */
    __device__ __forceinline__ bool here(void) const { return ROWS_ >= STEP || row < ROWS_; }
    /* Of its chunk in pass i and jump j: the place in the tile. */
    __device__ __forceinline__ int place(int i, int j) const { return offset + i * STEP * HSP * 2 + j * PER * 16; }
};

template <int HSP, int ROWS, int THREADS, bool VECTORS>
__device__ __forceinline__ void load_tile_by(SharedAddress tile, const Matrix &matrix, int row)
{
    typedef Passes<HSP, ROWS, THREADS> Mine;
    const Mine mine;
    row += mine.row;
    const __nv_bfloat16 *at = matrix.data + row * matrix.stride + mine.chunk * 8;
    if (!mine.here()) return;
#pragma unroll
    for (int i = 0; i < Mine::COUNT; i++) {
#pragma unroll
        for (int j = 0; j < Mine::JUMPS; j++) {
            bool valid = row + i * Mine::STEP < matrix.rows && (mine.chunk + j * Mine::PER) * 8 < matrix.HS;
            SharedAddress to = tile + mine.place(i, j);
            if (VECTORS) copy_async_16(to, valid ? at + j * Mine::PER * 8 : matrix.data, valid);
            else store_128(to, valid ? gather_eight(at + j * Mine::PER * 8) : make_uint4(0, 0, 0, 0));
        }
        at += Mine::STEP * matrix.stride;
        /* Without this the compiler keeps the addresses of all passes in registers from tile to tile. */
        asm volatile("" : "+l"(at));
    }
}

/* Rows row .. row + ROWS - 1 of the matrix into a tile, zeros beyond its edges: the copies are queued, not waited for. */
template <int HSP, int ROWS, int THREADS>
__device__ __forceinline__ void load_tile(SharedAddress tile, const Matrix &matrix, int row)
{
    if (matrix.vectors) load_tile_by<HSP, ROWS, THREADS, true>(tile, matrix, row);
    else load_tile_by<HSP, ROWS, THREADS, false>(tile, matrix, row);
}

/* Has the part of the tile that this thread loaded a number that is none? After copies_wait, before the barrier. */
template <int HSP, int ROWS, int THREADS>
__device__ __forceinline__ bool scan_tile(SharedAddress tile)
{
    typedef Passes<HSP, ROWS, THREADS> Mine;
    const Mine mine;
    uint32_t acc = 0;
    if (!mine.here()) return false;
#pragma unroll
    for (int i = 0; i < Mine::COUNT; i++)
#pragma unroll
        for (int j = 0; j < Mine::JUMPS; j++) {
            uint4 x = load_128(tile + mine.place(i, j));
            acc = gather_nonfinite(gather_nonfinite(gather_nonfinite(gather_nonfinite(acc, x.x), x.y), x.z), x.w);
        }
    return (acc & 0x7fff7fff) != 0;
}

/* x with what is not finite replaced by 0; *found says whether there was any. */
__device__ __forceinline__ uint32_t finite_pair(uint32_t x, bool *found)
{
    uint32_t bad = ((x & 0x7f80u) == 0x7f80u ? 0xffffu : 0u) | ((x & 0x7f800000u) == 0x7f800000u ? 0xffff0000u : 0u);
    *found = *found || bad;
    return x & ~bad;
}

/* Replaces what is not finite in the thread's part of the tile by 0, and lets *first and *last take in the rows where
 * that was. */
template <int HSP, int ROWS, int THREADS, bool REPLACE = true>
__device__ __forceinline__ void purge_tile(SharedAddress tile, Shared<int> first, Shared<int> last)
{
    typedef Passes<HSP, ROWS, THREADS> Mine;
    const Mine mine;
    if (!mine.here()) return;
#pragma unroll 1
    for (int i = 0; i < Mine::COUNT; i++)
#pragma unroll 1
        for (int j = 0; j < Mine::JUMPS; j++) {
            uint4 x = load_128(tile + mine.place(i, j));
            bool found = false;
            x.x = finite_pair(x.x, &found);
            x.y = finite_pair(x.y, &found);
            x.z = finite_pair(x.z, &found);
            x.w = finite_pair(x.w, &found);
            if (!found) continue;
            if (REPLACE) store_128(tile + mine.place(i, j), x);
            atomicMin(first, mine.row + i * Mine::STEP);
            atomicMax(last, mine.row + i * Mine::STEP);
        }
}

/* Changes the sign of the thread's part of a tile. */
template <int HSP, int ROWS, int THREADS>
__device__ __forceinline__ void negate_tile(SharedAddress tile)
{
    typedef Passes<HSP, ROWS, THREADS> Mine;
    const Mine mine;
    if (!mine.here()) return;
#pragma unroll 1
    for (int i = 0; i < Mine::COUNT; i++)
#pragma unroll 1
        for (int j = 0; j < Mine::JUMPS; j++) {
            uint4 x = load_128(tile + mine.place(i, j));
            store_128(tile + mine.place(i, j),
                      make_uint4(x.x ^ 0x80008000u, x.y ^ 0x80008000u, x.z ^ 0x80008000u, x.w ^ 0x80008000u));
        }
}

/* --- fragments ------------------------------------------------------------------------------------------------------- */

/* A lane of a warp: g and q as tensor_core.h has them. ldmatrix takes from lane 8i + r the address of row r of its
 * matrix i; `down` and `right` are where that row lies when matrices 0 and 1 stand one below the other, or side by
 * side: chunk and row within 16 x 16. */
struct Lane {
    int warp, g, q;
    int down_row, down_chunk, right_row, right_chunk;
};

__device__ __forceinline__ Lane lane_of(int thread)
{
    int lane = thread % 32, i = lane / 8, r = lane % 8;
    return {thread / 32, lane / 4, lane % 4, r + (i & 1) * 8, i >> 1, r + (i >> 1) * 8, i & 1};
}

__device__ __forceinline__ Lane lane_here(void) { return lane_of((int)threadIdx.x); }

/* The same found anew, as block_again(). */
__device__ __forceinline__ Lane lane_again(void)
{
    int thread = (int)threadIdx.x;
    asm volatile("" : "+r"(thread));
    return lane_of(thread);
}

/* A way through the 16 x 16 blocks of a tile: the address that a lane gives for the first, and what leads from it to
 * the others. Where rows are a power of two long, step k flips bits of the first address; else each second step goes 32
 * bytes forth or back. The address is hidden from the compiler, which would keep those of all steps in registers
 * throughout the kernel. Tiles begin at multiples of 16 rows. */
template <int COLUMNS>
struct Walk {
    static const bool FLIPS = (COLUMNS & (COLUMNS - 1)) == 0;
    SharedAddress first;
    int odd;

    __device__ __forceinline__ Walk(SharedAddress tile, int row, int chunk)
    {
        first = tile + tile_offset<COLUMNS>(row, chunk);
        hide_address(first);
        odd = FLIPS ? 0 : tile_offset<COLUMNS>(row, chunk + 2) - tile_offset<COLUMNS>(row, chunk);
    }
    /* Of the block of rows `row` .. row + 15 and columns 16k .. */
    __device__ __forceinline__ SharedAddress at(int row, int k) const
    {
        if (FLIPS) return flip_bits(first, (uint32_t)k * 32) + row * COLUMNS * 2;
        return first + ((k & 1 ? odd : 0) + k / 2 * 64 + row * COLUMNS * 2);
    }
};

/* Matrices 0 and 1 of a block one below the other: for A by ldmatrix_x4 and, transposed, for two B whose k are the
 * tile's rows. */
template <int COLUMNS>
__device__ __forceinline__ Walk<COLUMNS> walk_down(SharedAddress tile, Lane lane)
{
    return Walk<COLUMNS>(tile, lane.down_row, lane.down_chunk);
}

/* Side by side: for two B whose n are the tile's rows and, transposed, for A from a tile that holds its transpose. */
template <int COLUMNS>
__device__ __forceinline__ Walk<COLUMNS> walk_right(SharedAddress tile, Lane lane)
{
    return Walk<COLUMNS>(tile, lane.right_row, lane.right_chunk);
}

/* The A of step k (16 columns) from the sums of 16 x 8 products. */
template <int N>
__device__ __forceinline__ void pack_a(uint32_t (&a)[4], const float (&sums)[N][4], int k)
{
    a[0] = pack_bf16(sums[2 * k][0], sums[2 * k][1]);
    a[1] = pack_bf16(sums[2 * k][2], sums[2 * k][3]);
    a[2] = pack_bf16(sums[2 * k + 1][0], sums[2 * k + 1][1]);
    a[3] = pack_bf16(sums[2 * k + 1][2], sums[2 * k + 1][3]);
}

template <int MT, int N>
__device__ __forceinline__ void set_zero(float (&x)[MT][N][4])
{
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) x[m][n][e] = 0;
}

/* Is a maximum, or an LSE, one from which HUGE_LSE says so? Minus infinity is none: no key has been seen yet. */
__device__ __forceinline__ bool is_huge(float log2_units)
{
    return fabsf(log2_units) > HUGE_LSE && log2_units != -INFINITY;
}

/* Rounds what products of Q and K have left to logits; what the scale is from then on. */
template <int MT, int N>
__device__ __forceinline__ float round_logits(float (&S)[MT][N][4], float scale_log2)
{
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) S[m][n][e] = __fmul_rn(S[m][n][e], scale_log2);
    return 1;
}

/* The warp's 16 MT rows of sums, times `factor`, rounded, to rows `row` .. of `out`, columns col .., by way of `tile`,
 * as many rows of shared memory that no other warp uses. */
template <int COLUMNS, int MT, int N>
__device__ __forceinline__ void store_rows(const OutMatrix &out, SharedAddress tile, const float (&sums)[MT][N][4],
                                           const float (&factor)[MT][2], Lane lane, int row, int col)
{
    static_assert(N * 8 <= COLUMNS, "the rows of the tile hold the sums");
    const int CHUNKS = N;
    __syncwarp();
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                store_32(tile + (tile_offset<COLUMNS>(m * 16 + half * 8 + lane.g, n) + 4 * lane.q),
                         pack_bf16(sums[m][n][2 * half] * factor[m][half], sums[m][n][2 * half + 1] * factor[m][half]));
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 16 * MT * CHUNKS / 32; i++) {
        int index = (int)threadIdx.x % 32 + 32 * i, r = index / CHUNKS, chunk = index % CHUNKS;
        if (row + r >= out.rows || col + chunk * 8 >= out.HS) continue;
        uint4 x = load_128(tile + tile_offset<COLUMNS>(r, chunk));
        __nv_bfloat16 *at = out.data + (row + r) * out.stride + col + chunk * 8;
        if (out.vectors) *(uint4 *)at = x;
        else scatter_eight(at, x);
    }
}

/* --- forward --------------------------------------------------------------------------------------------------------- */

struct Forward {
    Source Q, K, V;
    Target O;
    float *LSE, *saved; /* (heads, T); (2, heads, Tp): LSE in log2 units, and what its rounding has cut off */
    Sizes sizes;
};

template <int HSP, int FROM> struct ForwardShape;
#ifndef FORWARD_SHAPES
/* HSP, from T on, m16 tiles a warp, warps, keys a tile, of them at a time, steps of Q K^T at a time, Q held, blocks
 * an SM */
#define FORWARD_SHAPES(X)                 \
    X(32, 0, 2, 4, 64, 64, 2, true, 2)    \
    X(64, 0, 2, 4, 64, 32, 4, false, 3)   \
    X(64, 2048, 2, 4, 64, 64, 4, true, 2) \
    X(96, 0, 2, 4, 64, 64, 6, false, 2)   \
    X(128, 0, 2, 4, 64, 64, 2, false, 2)  \
    X(256, 0, 1, 4, 32, 32, 16, false, 2)
#endif
#define FORWARD_SHAPE(HSP, FROM, MT_, WARPS_, BN_, PART_, STEPS_, Q_HELD_, BLOCKS_)                  \
    template <> struct ForwardShape<HSP, FROM> {                                                     \
        static const int MT = MT_, WARPS = WARPS_, BN = BN_, PART = PART_, STEPS = STEPS_;           \
        static const int BLOCKS = BLOCKS_, THREADS = 32 * WARPS;                                     \
        static const int ROWS = 16 * MT * WARPS, BAD = (ROWS + 4 * BN_) * HSP * 2, BYTES = BAD + 16; \
        static const bool Q_HELD = Q_HELD_;                                                          \
    };
FORWARD_SHAPES(FORWARD_SHAPE)

template <int HSP, int FROM>
struct ForwardState {
    typedef ForwardShape<HSP, FROM> Shape;
    float O[Shape::MT][HSP / 8][4];
    /* Of rows g and g + 8: the row's maximum in log2 units, the lane's share of its sum. */
    float max[Shape::MT][2], sum[Shape::MT][2];
    bool huge; /* one of the warp's maxima is beyond HUGE_LSE */
    uint32_t Q[Shape::Q_HELD ? HSP / 16 : 1][Shape::MT][4];
};

/* PART keys for one warp. MASKED: the tile has keys beyond the block's first query; `last` is the warp's last query,
 * counted from the first of these keys. */
template <int HSP, int FROM, bool MASKED>
__device__ __forceinline__ void forward_part(ForwardState<HSP, FROM> &state, SharedAddress Q, SharedAddress K,
                                             SharedAddress V, Lane lane, int last, float scale_log2)
{
    typedef ForwardShape<HSP, FROM> Shape;
    const int MT = Shape::MT, PART = Shape::PART;
    float S[MT][PART / 8][4];
    if (MASKED && last < 0) return;
    set_zero(S);
    const Walk<HSP> walk_Q = walk_down<HSP>(Q, lane), walk_K = walk_right<HSP>(K, lane);
#pragma unroll(Shape::STEPS)
    for (int k = 0; k < HSP / 16; k++) {
        uint32_t a[MT][4];
#pragma unroll
        for (int m = 0; m < MT; m++) {
            if (Shape::Q_HELD) {
#pragma unroll
                for (int e = 0; e < 4; e++) a[m][e] = state.Q[k][m][e];
            } else ldmatrix_x4(a[m], walk_Q.at(m * 16, k));
        }
#pragma unroll
        for (int n = 0; n < PART / 16; n++) {
            uint32_t b[4];
            if (MASKED && n * 16 > last) continue;
            ldmatrix_x4(b, walk_K.at(n * 16, k));
#pragma unroll
            for (int m = 0; m < MT; m++) {
                mma_bf16(S[m][2 * n], a[m], b[0], b[1]);
                mma_bf16(S[m][2 * n + 1], a[m], b[2], b[3]);
            }
        }
    }
    if (MASKED) {
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int n = 0; n < PART / 8; n++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    if (n * 8 + 2 * lane.q + e % 2 > last - 16 * MT + 1 + m * 16 + lane.g + e / 2 * 8)
                        S[m][n][e] = -INFINITY;
    }

    float largest[MT][2];
    bool grown = false;
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float x = fmaxf(S[m][0][2 * half], S[m][0][2 * half + 1]);
#pragma unroll
            for (int n = 1; n < PART / 8; n++) x = fmaxf(x, fmaxf(S[m][n][2 * half], S[m][n][2 * half + 1]));
            largest[m][half] = x * scale_log2;
            grown = grown || largest[m][half] > state.max[m][half] + LAZY_LOG2;
        }
    if (__any_sync(FULL_WARP, grown)) { /* only now the lanes of a row tell each other their maximum */
        bool huge = false;
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float old = state.max[m][half], now = fmaxf(old, largest[m][half]);
                now = fmaxf(now, __shfl_xor_sync(FULL_WARP, now, 1));
                now = fmaxf(now, __shfl_xor_sync(FULL_WARP, now, 2));
                float alpha = exp2_fast(old - (now == -INFINITY ? 0.0f : now));
                state.max[m][half] = now;
                huge = huge || is_huge(now);
                state.sum[m][half] *= alpha;
#pragma unroll
                for (int n = 0; n < HSP / 8; n++) {
                    state.O[m][n][2 * half] *= alpha;
                    state.O[m][n][2 * half + 1] *= alpha;
                }
            }
        state.huge = __any_sync(FULL_WARP, huge);
    }

    if (state.huge) scale_log2 = round_logits(S, scale_log2);
    float base[MT][2];
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) base[m][half] = state.max[m][half] == -INFINITY ? 0.0f : -state.max[m][half];
    const Walk<HSP> walk_V = walk_down<HSP>(V, lane);
#pragma unroll
    for (int k = 0; k < PART / 16; k++) {
        uint32_t P[MT][4];
        if (MASKED && k * 16 > last) continue;
#pragma unroll
        for (int m = 0; m < MT; m++) {
#pragma unroll
            for (int n = 2 * k; n < 2 * k + 2; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    S[m][n][e] = exp2_fast(fmaf(S[m][n][e], scale_log2, base[m][e / 2]));
                    state.sum[m][e / 2] += S[m][n][e];
                }
            pack_a(P[m], S[m], k);
        }
#pragma unroll
        for (int n = 0; n < HSP / 16; n++) {
            uint32_t b[4];
            ldmatrix_x4_trans(b, walk_V.at(k * 16, n));
#pragma unroll
            for (int m = 0; m < MT; m++) {
                mma_bf16(state.O[m][2 * n], P[m], b[0], b[1]);
                mma_bf16(state.O[m][2 * n + 1], P[m], b[2], b[3]);
            }
        }
    }
}

/* One tile of keys, the last first. */
template <int HSP, int FROM, bool MASKED>
__device__ __forceinline__ void forward_tile(ForwardState<HSP, FROM> &state, SharedAddress Q, SharedAddress K,
                                             SharedAddress V, Lane lane, int last, float scale_log2)
{
    typedef ForwardShape<HSP, FROM> Shape;
#pragma unroll 1
    for (int part = Shape::BN - Shape::PART; part >= 0; part -= Shape::PART)
        forward_part<HSP, FROM, MASKED>(state, Q, K + part * HSP * 2, V + part * HSP * 2, lane, last - part, scale_log2);
}

template <int HSP, int FROM>
__global__ void __launch_bounds__(ForwardShape<HSP, FROM>::THREADS, ForwardShape<HSP, FROM>::BLOCKS)
    flash_mma_forward_kernel(Forward call)
{
    typedef ForwardShape<HSP, FROM> Shape;
    const int MT = Shape::MT, BN = Shape::BN, ROWS = Shape::ROWS, THREADS = Shape::THREADS, STAGE = BN * HSP * 2;
    const Sizes &sizes = call.sizes;
    const Place place = place_of(blockIdx.x, sizes);
    const Lane lane = lane_here();
    /* The first and the last row of a tile that are not finite. */
    const Shared<int> bad = shared_dynamic<int>(Shape::BAD, 2);
    const SharedAddress Q = shared_address(shared_dynamic<unsigned char>(0, Shape::BYTES));
    const SharedAddress K = Q + ROWS * HSP * 2, V = K + 2 * STAGE;
    const int query = ((int)sizes.tiles - 1 - place.tile) * ROWS; /* of the block */
    const int mine = query + lane.warp * MT * 16;                 /* of the warp */
    const SharedAddress my_Q = Q + lane.warp * MT * 16 * HSP * 2; /* its rows of the tile */
    const Matrix keys = matrix_of(call.K, place, sizes), values = matrix_of(call.V, place, sizes);
    ForwardState<HSP, FROM> state;
    state.huge = false;
    set_zero(state.O);
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            state.max[m][half] = -INFINITY;
            state.sum[m][half] = 0;
        }

    int tile = (min(query + ROWS, sizes.T) - 1) / BN, stage = 0;
    load_tile<HSP, ROWS, THREADS>(Q, matrix_of(call.Q, place, sizes), query);
    load_tile<HSP, BN, THREADS>(K, keys, tile * BN);
    load_tile<HSP, BN, THREADS>(V, values, tile * BN);
    copies_commit();
    if (threadIdx.x == 0) {
        bad[0] = INT_MAX;
        bad[1] = -1;
    }
    float scale_log2 = sizes.scale_log2;
    if (scale_log2 < 0) { /* the maximum is that of S, so S gets the sign */
        copies_wait<0>();
        negate_tile<HSP, ROWS, THREADS>(Q);
        scale_log2 = -scale_log2;
    }
    if (Shape::Q_HELD) {
        copies_wait<0>();
        __syncthreads();
        const Walk<HSP> walk = walk_down<HSP>(my_Q, lane);
#pragma unroll
        for (int k = 0; k < (Shape::Q_HELD ? HSP / 16 : 0); k++)
#pragma unroll
            for (int m = 0; m < MT; m++) ldmatrix_x4(state.Q[k][m], walk.at(m * 16, k));
    }

    /* Tiles that some query of the block sees in part. */
    for (; tile >= 0 && tile * BN + BN - 1 > query; tile--, stage ^= 1) {
        copies_wait<0>();
        int found = __syncthreads_or(scan_tile<HSP, BN, THREADS>(V + stage * STAGE));
        if (found) {
            purge_tile<HSP, BN, THREADS>(V + stage * STAGE, bad, bad + 1);
            __syncthreads();
        }
        if (tile > 0) {
            load_tile<HSP, BN, THREADS>(K + (stage ^ 1) * STAGE, keys, (tile - 1) * BN);
            load_tile<HSP, BN, THREADS>(V + (stage ^ 1) * STAGE, values, (tile - 1) * BN);
            copies_commit();
        }
        forward_tile<HSP, FROM, true>(state, my_Q, K + stage * STAGE, V + stage * STAGE, lane,
                                      mine + 16 * MT - 1 - tile * BN, scale_log2);
        if (found) { /* what was not finite reaches the queries that see its key, and no others */
            int first = tile * BN + bad[0];
#pragma unroll
            for (int m = 0; m < MT; m++)
#pragma unroll
                for (int n = 0; n < HSP / 8; n++)
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        if (mine + m * 16 + lane.g + e / 2 * 8 >= first) state.O[m][n][e] = NAN;
            __syncthreads();
            if (threadIdx.x == 0) {
                bad[0] = INT_MAX;
                bad[1] = -1;
            }
        }
    }
    for (; tile >= 0; tile--, stage ^= 1) {
        copies_wait<0>();
        __syncthreads();
        if (tile > 0) {
            load_tile<HSP, BN, THREADS>(K + (stage ^ 1) * STAGE, keys, (tile - 1) * BN);
            load_tile<HSP, BN, THREADS>(V + (stage ^ 1) * STAGE, values, (tile - 1) * BN);
            copies_commit();
        }
        forward_tile<HSP, FROM, false>(state, my_Q, K + stage * STAGE, V + stage * STAGE, lane, 0, scale_log2);
    }

    const Place again = place_of(block_again(), sizes);
    float inverse[MT][2];
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float sum = state.sum[m][half];
            sum += __shfl_xor_sync(FULL_WARP, sum, 1);
            sum += __shfl_xor_sync(FULL_WARP, sum, 2);
            inverse[m][half] = 1.0f / sum;
            int row = mine + m * 16 + half * 8 + lane.g;
            float lse = state.max[m][half] + log2f(sum);
            if (lane.q == 0 && row < sizes.T) call.LSE[(int64_t)again.head * sizes.T + row] = lse * LN_2;
            if (lane.q == 0 && row < sizes.Tp) {
                float *saved = call.saved + (int64_t)again.head * sizes.Tp + row;
                saved[0] = row < sizes.T ? lse : 0.0f;
                saved[(int64_t)sizes.heads * sizes.Tp] = row < sizes.T ? state.max[m][half] - lse + log2f(sum) : 0.0f;
            }
        }
    store_rows<HSP>(matrix_of(call.O, again, sizes), my_Q, state.O, inverse, lane, mine, 0);
}

/* --- backward -------------------------------------------------------------------------------------------------------- */

struct Backward {
    Source Q, K, V, dO, O;
    Target dQ, dK, dV;
    const float *saved; /* (2, heads, Tp) */
    float *D;           /* (heads, Tp): rowsum(dO * O) */
    float *sums;        /* dQ before it is scaled and rounded, in the order of dq_place(); NULL where
                           flash_mma_queries_kernel makes it */
    Sizes sizes;
};

/* The dot product of row `row` of a and of b, 0 beyond their end, by four neighbouring lanes q = 0 .. 3, which all get
 * it. */
template <int HSP>
__device__ __forceinline__ float dot_of_rows(const Matrix &a, const Matrix &b, int row, int q)
{
    const int COUNT = HSP / 32;
    uint4 x[COUNT], y[COUNT];
    float sum = 0;
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        int col = q * 8 + i * 32;
        const __nv_bfloat16 *at_a = a.data + row * a.stride + col, *at_b = b.data + row * b.stride + col;
        x[i] = y[i] = make_uint4(0, 0, 0, 0);
        if (row >= a.rows || col >= a.HS) continue;
        x[i] = a.vectors ? *(const uint4 *)at_a : gather_eight(at_a);
        y[i] = b.vectors ? *(const uint4 *)at_b : gather_eight(at_b);
    }
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        uint32_t xs[4] = {x[i].x, x[i].y, x[i].z, x[i].w}, ys[4] = {y[i].x, y[i].y, y[i].z, y[i].w};
#pragma unroll
        for (int j = 0; j < 4; j++) {
            sum = fmaf(__uint_as_float(xs[j] << 16), __uint_as_float(ys[j] << 16), sum);
            sum = fmaf(__uint_as_float(xs[j] & 0xffff0000u), __uint_as_float(ys[j] & 0xffff0000u), sum);
        }
    }
    sum += __shfl_xor_sync(FULL_WARP, sum, 1);
    return sum + __shfl_xor_sync(FULL_WARP, sum, 2);
}

/* --- dQ by its own kernel: a block owns queries ---------------------------------------------------------------------- */

template <int HSP> struct QueriesShape;
#ifndef QUERIES_SHAPES
/* HSP, m16 tiles a warp, warps, keys a tile, Q and dO in registers, blocks an SM */
#define QUERIES_SHAPES(X)      \
    X(32, 2, 4, 32, false, 3)  \
    X(64, 2, 4, 32, false, 2)  \
    X(96, 2, 4, 16, false, 2)  \
    X(128, 2, 4, 16, false, 2) \
    X(256, 1, 4, 16, false, 2)
#endif
#define QUERIES_SHAPE(HSP, MT_, WARPS_, BN_, HELD_, BLOCKS_)                                             \
    template <> struct QueriesShape<HSP> {                                                               \
        static const int MT = MT_, WARPS = WARPS_, BN = BN_, BLOCKS = BLOCKS_, THREADS = 32 * WARPS;     \
        static const int ROWS = 16 * MT * WARPS, BAD = (2 * ROWS + 4 * BN_) * HSP * 2, BYTES = BAD + 16; \
        static const bool HELD = HELD_;                                                                  \
    };
QUERIES_SHAPES(QUERIES_SHAPE)

template <int HSP>
struct QueriesState {
    typedef QueriesShape<HSP> Shape;
    float dQ[Shape::MT][HSP / 8][4];
    float base[Shape::MT][2], low[Shape::MT][2], D[Shape::MT][2]; /* of rows g and g + 8: -LSE, what it lacks, D */
    bool huge;                                                    /* one of the LSE is beyond HUGE_LSE */
    uint32_t Q[Shape::HELD ? HSP / 16 : 1][Shape::MT][4], dO[Shape::HELD ? HSP / 16 : 1][Shape::MT][4];
};

/* out (MT x 16 rows, BN) = rows of A (the warp's part of a tile, or held) times rows of B; blocks of 16 columns beyond
 * `last` are left 0. */
template <int HSP, int MT, int BN, bool MASKED, bool HELD>
__device__ __forceinline__ void multiply_rows(float (&out)[MT][BN / 8][4],
                                              const uint32_t (&held)[HELD ? HSP / 16 : 1][MT][4], SharedAddress A,
                                              SharedAddress B, Lane lane, int last)
{
    set_zero(out);
    const Walk<HSP> walk_A = walk_down<HSP>(A, lane), walk_B = walk_right<HSP>(B, lane);
#pragma unroll
    for (int k = 0; k < HSP / 16; k++) {
        uint32_t a[MT][4];
#pragma unroll
        for (int m = 0; m < MT; m++) {
            if (HELD) {
#pragma unroll
                for (int e = 0; e < 4; e++) a[m][e] = held[HELD ? k : 0][m][e];
            } else ldmatrix_x4(a[m], walk_A.at(m * 16, k));
        }
#pragma unroll
        for (int n = 0; n < BN / 16; n++) {
            uint32_t b[4];
            if (MASKED && n * 16 > last) continue;
            ldmatrix_x4(b, walk_B.at(n * 16, k));
#pragma unroll
            for (int m = 0; m < MT; m++) {
                mma_bf16(out[m][2 * n], a[m], b[0], b[1]);
                mma_bf16(out[m][2 * n + 1], a[m], b[2], b[3]);
            }
        }
    }
}

template <int HSP, bool MASKED>
__device__ __forceinline__ void queries_tile(QueriesState<HSP> &state, SharedAddress Q, SharedAddress dO,
                                             SharedAddress K, SharedAddress V, Lane lane, int last, float scale_log2)
{
    typedef QueriesShape<HSP> Shape;
    const int MT = Shape::MT, BN = Shape::BN;
    float P[MT][BN / 8][4], dS[MT][BN / 8][4];
    if (MASKED && last < 0) return;
    multiply_rows<HSP, MT, BN, MASKED, Shape::HELD>(P, state.Q, Q, K, lane, last);
    if (MASKED && state.huge) scale_log2 = round_logits(P, scale_log2);
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int n = 0; n < BN / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                P[m][n][e] = fmaf(P[m][n][e], scale_log2, state.base[m][e / 2]);
                P[m][n][e] = exp2_fast(MASKED ? P[m][n][e] - state.low[m][e / 2] : P[m][n][e]);
            }
    multiply_rows<HSP, MT, BN, MASKED, Shape::HELD>(dS, state.dO, dO, V, lane, last);
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int n = 0; n < BN / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                dS[m][n][e] = P[m][n][e] * (dS[m][n][e] - state.D[m][e / 2]);
                if (MASKED && n * 8 + 2 * lane.q + e % 2 > last - 16 * MT + 1 + m * 16 + lane.g + e / 2 * 8) dS[m][n][e] = 0;
            }
    const Walk<HSP> walk_K = walk_down<HSP>(K, lane);
#pragma unroll
    for (int k = 0; k < BN / 16; k++) {
        uint32_t a[MT][4];
        if (MASKED && k * 16 > last) continue;
#pragma unroll
        for (int m = 0; m < MT; m++) pack_a(a[m], dS[m], k);
#pragma unroll
        for (int n = 0; n < HSP / 16; n++) {
            uint32_t b[4];
            ldmatrix_x4_trans(b, walk_K.at(k * 16, n));
#pragma unroll
            for (int m = 0; m < MT; m++) {
                mma_bf16(state.dQ[m][2 * n], a[m], b[0], b[1]);
                mma_bf16(state.dQ[m][2 * n + 1], a[m], b[2], b[3]);
            }
        }
    }
}

template <int HSP>
__global__ void __launch_bounds__(QueriesShape<HSP>::THREADS, QueriesShape<HSP>::BLOCKS)
    flash_mma_queries_kernel(Backward call)
{
    typedef QueriesShape<HSP> Shape;
    const int MT = Shape::MT, BN = Shape::BN, ROWS = Shape::ROWS, THREADS = Shape::THREADS, STAGE = BN * HSP * 2;
    const Sizes &sizes = call.sizes;
    const Place place = place_of(blockIdx.x, sizes);
    const Lane lane = lane_here();
    /* The first and the last row of a tile that are not finite. */
    const Shared<int> bad = shared_dynamic<int>(Shape::BAD, 2);
    const SharedAddress Q = shared_address(shared_dynamic<unsigned char>(0, Shape::BYTES)), dO = Q + ROWS * HSP * 2;
    const SharedAddress K = dO + ROWS * HSP * 2, V = K + 2 * STAGE;
    const int query = ((int)sizes.tiles - 1 - place.tile) * ROWS, mine = query + lane.warp * MT * 16;
    const SharedAddress my_Q = Q + lane.warp * MT * 16 * HSP * 2, my_dO = my_Q + ROWS * HSP * 2;
    const Matrix keys = matrix_of(call.K, place, sizes), values = matrix_of(call.V, place, sizes),
                 grads = matrix_of(call.dO, place, sizes);
    QueriesState<HSP> state;
    set_zero(state.dQ);

    int tile = (min(query + ROWS, sizes.T) - 1) / BN, stage = 0;
    load_tile<HSP, ROWS, THREADS>(Q, matrix_of(call.Q, place, sizes), query);
    load_tile<HSP, ROWS, THREADS>(dO, grads, query);
    load_tile<HSP, BN, THREADS>(K, keys, tile * BN);
    load_tile<HSP, BN, THREADS>(V, values, tile * BN);
    copies_commit();
    if (threadIdx.x == 0) {
        bad[0] = INT_MAX;
        bad[1] = -1;
    }
    const Matrix out = matrix_of(call.O, place, sizes);
    bool large = false;
    state.huge = false;
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int row = mine + m * 16 + half * 8 + lane.g;
            float D = dot_of_rows<HSP>(grads, out, row, lane.q);
            if (lane.q == 0 && row < sizes.Tp) call.D[(int64_t)place.head * sizes.Tp + row] = D;
            state.D[m][half] = D;
            const float *saved = call.saved + (int64_t)place.head * sizes.Tp + row;
            state.base[m][half] = row < sizes.T ? -saved[0] : 0.0f;
            state.low[m][half] = row < sizes.T ? saved[(int64_t)sizes.heads * sizes.Tp] : 0.0f;
            large = large || fabsf(state.base[m][half]) > LARGE_LSE;
            state.huge = state.huge || is_huge(state.base[m][half]);
        }
    if (Shape::HELD) {
        copies_wait<0>();
        __syncthreads();
        const Walk<HSP> walk_Q = walk_down<HSP>(my_Q, lane), walk_dO = walk_down<HSP>(my_dO, lane);
#pragma unroll
        for (int k = 0; k < (Shape::HELD ? HSP / 16 : 0); k++)
#pragma unroll
            for (int m = 0; m < MT; m++) {
                ldmatrix_x4(state.Q[k][m], walk_Q.at(m * 16, k));
                ldmatrix_x4(state.dO[k][m], walk_dO.at(m * 16, k));
            }
    }

    for (; tile >= 0 && tile * BN + BN - 1 > query; tile--, stage ^= 1) {
        copies_wait<0>();
        int found = __syncthreads_or(scan_tile<HSP, BN, THREADS>(K + stage * STAGE));
        if (found) {
            purge_tile<HSP, BN, THREADS>(K + stage * STAGE, bad, bad + 1);
            __syncthreads();
        }
        if (tile > 0) {
            load_tile<HSP, BN, THREADS>(K + (stage ^ 1) * STAGE, keys, (tile - 1) * BN);
            load_tile<HSP, BN, THREADS>(V + (stage ^ 1) * STAGE, values, (tile - 1) * BN);
            copies_commit();
        }
        queries_tile<HSP, true>(state, my_Q, my_dO, K + stage * STAGE, V + stage * STAGE, lane,
                                mine + 16 * MT - 1 - tile * BN, sizes.scale_log2);
        if (found) {
            int first = tile * BN + bad[0];
#pragma unroll
            for (int m = 0; m < MT; m++)
#pragma unroll
                for (int n = 0; n < HSP / 8; n++)
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        if (mine + m * 16 + lane.g + e / 2 * 8 >= first) state.dQ[m][n][e] = NAN;
            __syncthreads();
            if (threadIdx.x == 0) {
                bad[0] = INT_MAX;
                bad[1] = -1;
            }
        }
    }
    for (; tile >= 0; tile--, stage ^= 1) {
        copies_wait<0>();
        __syncthreads();
        if (tile > 0) {
            load_tile<HSP, BN, THREADS>(K + (stage ^ 1) * STAGE, keys, (tile - 1) * BN);
            load_tile<HSP, BN, THREADS>(V + (stage ^ 1) * STAGE, values, (tile - 1) * BN);
            copies_commit();
        }
        if (__any_sync(FULL_WARP, large)) /* the masking kind also takes in what LSE lacks */
            queries_tile<HSP, true>(state, my_Q, my_dO, K + stage * STAGE, V + stage * STAGE, lane,
                                    mine + 16 * MT - 1 - tile * BN, sizes.scale_log2);
        else queries_tile<HSP, false>(state, my_Q, my_dO, K + stage * STAGE, V + stage * STAGE, lane, 0, sizes.scale_log2);
    }

    const Place again = place_of(block_again(), sizes);
    float factor[MT][2];
#pragma unroll
    for (int m = 0; m < MT; m++) factor[m][0] = factor[m][1] = sizes.scale;
    store_rows<HSP>(matrix_of(call.dQ, again, sizes), my_Q, state.dQ, factor, lane, mine, 0);
}

/* --- dK and dV: a block owns keys ------------------------------------------------------------------------------------ */

template <int HSP> struct KeysShape;
#ifndef KEYS_SHAPES
/* HSP, m16 tiles a warp, warps, queries a tile, of them at a time, columns of dK and dV a block, blocks an SM */
#define KEYS_SHAPES(X)           \
    X(32, 2, 4, 64, 32, 32, 2)   \
    X(64, 2, 4, 64, 32, 64, 2)   \
    X(96, 1, 4, 64, 64, 96, 2)   \
    X(128, 1, 4, 64, 32, 128, 2) \
    X(256, 1, 4, 16, 16, 128, 2)
#endif
#define KEYS_SHAPE(HSP, MT_, WARPS_, BM_, PART_, SLICE_, BLOCKS_)                                                  \
    template <> struct KeysShape<HSP> {                                                                            \
        static const int MT = MT_, WARPS = WARPS_, BM = BM_, PART = PART_, BLOCKS = BLOCKS_, THREADS = 32 * WARPS; \
        static const int ROWS = 16 * MT * WARPS, SLICE = SLICE_, SLICES = HSP / SLICE_;                            \
        static const int STAGE = BM_ * HSP * 2, STATS = (2 * ROWS + 4 * BM_) * HSP * 2;                            \
        static const int BAD = STATS + 6 * BM_ * 4;                                                                \
        /* Of a product at a time: all, but where registers would spill. */                                        \
        static const int STEPS = HSP >= 96 ? HSP / 16 : 2;                                                         \
        static const int BYTES = BAD + 16;                                                                         \
    };
KEYS_SHAPES(KEYS_SHAPE)

template <int HSP>
struct KeysState {
    typedef KeysShape<HSP> Shape;
    float dK[Shape::MT][Shape::SLICE / 8][4], dV[Shape::MT][Shape::SLICE / 8][4];
};

/* The statistics of the BM queries from `query` on, BM floats each: LSE in log2 units, D, and what LSE lacks. Rows from
 * T to Tp hold anything. */
template <int BM>
__device__ __forceinline__ void load_stats(SharedAddress stats, const Backward &call, const Place &place, int query)
{
    static_assert(BM % 4 == 0 && 3 * BM / 4 <= 128, "whole copies, one a thread");
    int index = (int)threadIdx.x, kind = index / (BM / 4), row = query + index % (BM / 4) * 4;
    if (kind > 2) return;
    const float *from =
        (kind == 1 ? call.D : call.saved) + (int64_t)(place.head + (kind == 2 ? call.sizes.heads : 0)) * call.sizes.Tp;
    bool valid = row < call.sizes.T;
    copy_async_16(stats + index * 16, valid ? from + row : from, valid);
}

/* Is the LSE of any of the BM queries so large that what it lacks matters? The same answer for all warps. */
template <int BM>
__device__ __forceinline__ bool stats_large(SharedAddress stats)
{
    bool large = false;
#pragma unroll
    for (int i = 0; i < BM; i += 32)
        if (i + 32 <= BM || i + (int)threadIdx.x % 32 < BM)
            large = large || fabsf(__uint_as_float(load_32(stats + (i + (int)threadIdx.x % 32) * 4))) > LARGE_LSE;
    return __any_sync(FULL_WARP, large);
}

/* For the keys of a warp and PART queries, rows part .. of a tile of BM, of which none before `first` sees any of the keys:
 * sums (keys, PART) += X (keys, HSP) Y^T. All STEPS at once, but where masks need registers: matrix loads of one step run
 * under the products of the one before. */
template <int HSP, bool MASKED, int STEPS, int MT, int PART8>
__device__ __forceinline__ void scores_product(float (&sums)[MT][PART8][4], SharedAddress X, SharedAddress Y, Lane lane,
                                               int part, int first)
{
    const Walk<HSP> walk_X = walk_down<HSP>(X, lane), walk_Y = walk_right<HSP>(Y, lane);
#pragma unroll(MASKED ? 2 : STEPS)
    for (int k = 0; k < HSP / 16; k++) {
        uint32_t a[MT][4];
#pragma unroll
        for (int m = 0; m < MT; m++) ldmatrix_x4(a[m], walk_X.at(m * 16, k));
#pragma unroll
        for (int n = 0; n < PART8 / 2; n++) {
            uint32_t b[4];
            if (MASKED && PART8 > 2 && n * 16 + 15 < first) continue;
            ldmatrix_x4(b, walk_Y.at(part + n * 16, k));
#pragma unroll
            for (int m = 0; m < MT; m++) {
                mma_bf16(sums[m][2 * n], a[m], b[0], b[1]);
                mma_bf16(sums[m][2 * n + 1], a[m], b[2], b[3]);
            }
        }
    }
}

/* P from the logits, 0 where a query does not see the key and from row `left` on, where there are no queries. */
template <int BM, bool MASKED, int MT, int PART8>
__device__ __forceinline__ void scores_exponentials(float (&P)[MT][PART8][4], SharedAddress stats, Lane lane, int part,
                                                    int first, int left, float scale_log2)
{
#pragma unroll
    for (int n = 0; n < PART8; n++) {
        float2 lse = load_64(stats + (part + n * 8 + 2 * lane.q) * 4);
        float2 low = MASKED ? load_64(stats + (2 * BM + part + n * 8 + 2 * lane.q) * 4) : make_float2(0, 0);
        float scale = scale_log2;
        if (MASKED && (is_huge(lse.x) || is_huge(lse.y))) {
            scale = 1;
#pragma unroll
            for (int m = 0; m < MT; m++)
#pragma unroll
                for (int e = 0; e < 4; e++) P[m][n][e] = __fmul_rn(P[m][n][e], scale_log2);
        }
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                P[m][n][e] = fmaf(P[m][n][e], scale, e % 2 ? -lse.y : -lse.x);
                P[m][n][e] = exp2_fast(MASKED ? P[m][n][e] - (e % 2 ? low.y : low.x) : P[m][n][e]);
                int row = n * 8 + 2 * lane.q + e % 2;
                if (MASKED && (row < first + m * 16 + lane.g + e / 2 * 8 || row >= left)) P[m][n][e] = 0;
            }
    }
}

/* dS = P (dP - D), where dS holds dP. */
template <int BM, bool MASKED, int MT, int PART8>
__device__ __forceinline__ void scores_gradients(float (&dS)[MT][PART8][4], const float (&P)[MT][PART8][4],
                                                 SharedAddress stats, Lane lane, int part, int first, int left)
{
#pragma unroll
    for (int n = 0; n < PART8; n++) {
        float2 D = load_64(stats + (BM + part + n * 8 + 2 * lane.q) * 4);
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                dS[m][n][e] = P[m][n][e] * (dS[m][n][e] - (e % 2 ? D.y : D.x));
                int row = n * 8 + 2 * lane.q + e % 2;
                if (MASKED && (row < first + m * 16 + lane.g + e / 2 * 8 || row >= left)) dS[m][n][e] = 0;
            }
    }
}

/* sums (keys of the warp, slice of the columns) += X (keys, PART queries) Y, rows part .. of the tile. */
template <int HSP, bool MASKED, int MT, int PART8, int SLICE8>
__device__ __forceinline__ void add_product(float (&sums)[MT][SLICE8][4], const float (&X)[MT][PART8][4],
                                            SharedAddress Y, Lane lane, int part, int first, int slice)
{
    const Walk<HSP> walk = walk_down<HSP>(Y, lane);
#pragma unroll
    for (int k = 0; k < PART8 / 2; k++) {
        uint32_t a[MT][4];
        if (MASKED && PART8 > 2 && k * 16 + 15 < first) continue;
#pragma unroll
        for (int m = 0; m < MT; m++) pack_a(a[m], X[m], k);
#pragma unroll
        for (int n = 0; n < SLICE8 / 2; n++) {
            uint32_t b[4];
            ldmatrix_x4_trans(b, walk.at(part + k * 16, slice * (SLICE8 / 2) + n));
#pragma unroll
            for (int m = 0; m < MT; m++) {
                mma_bf16(sums[m][2 * n], a[m], b[0], b[1]);
                mma_bf16(sums[m][2 * n + 1], a[m], b[2], b[3]);
            }
        }
    }
}

/* One tile of queries for one warp, which owns MT x 16 keys from its key `mine` on; `query` is the tile's first.
 * MASKED: some pair of key and query does not count. */
template <int HSP, bool MASKED>
__device__ __forceinline__ void keys_tile(KeysState<HSP> &state, SharedAddress K, SharedAddress V, SharedAddress Q,
                                          SharedAddress dO, SharedAddress stats, Lane lane, int mine, int query, int T,
                                          int slice, float scale_log2)
{
    typedef KeysShape<HSP> Shape;
    const int MT = Shape::MT, BM = Shape::BM, PART = Shape::PART;
#pragma unroll 1
    for (int part = 0; part < BM; part += PART) {
        float P[MT][PART / 8][4], dS[MT][PART / 8][4];
        set_zero(P);
        set_zero(dS);
        int first = mine - query - part; /* queries of the part before this see no key of the warp */
        if (!MASKED || first < PART) {
            scores_product<HSP, MASKED, Shape::STEPS>(P, K, Q, lane, part, first);
            scores_exponentials<BM, MASKED>(P, stats, lane, part, first, T - query - part, scale_log2);
            add_product<HSP, MASKED>(state.dV, P, dO, lane, part, first, slice);
            scores_product<HSP, MASKED, Shape::STEPS>(dS, V, dO, lane, part, first);
            scores_gradients<BM, MASKED>(dS, P, stats, lane, part, first, T - query - part);
            add_product<HSP, MASKED>(state.dK, dS, Q, lane, part, first, slice);
        }
    }
}

template <int HSP>
__global__ void __launch_bounds__(KeysShape<HSP>::THREADS, KeysShape<HSP>::BLOCKS) flash_mma_keys_kernel(Backward call)
{
    typedef KeysShape<HSP> Shape;
    const int MT = Shape::MT, BM = Shape::BM, ROWS = Shape::ROWS, THREADS = Shape::THREADS, STAGE = Shape::STAGE;
    const Sizes &sizes = call.sizes;
    const Place place = place_of(blockIdx.x / Shape::SLICES, sizes);
    const Lane lane = lane_here();
    const int slice = Shape::SLICES == 1 ? 0 : (int)(blockIdx.x % Shape::SLICES);
    /* The first and the last query of a tile that are not finite. */
    const Shared<int> bad = shared_dynamic<int>(Shape::BAD, 2);
    const SharedAddress K = shared_address(shared_dynamic<unsigned char>(0, Shape::BYTES));
    const SharedAddress V = K + ROWS * HSP * 2, Q = V + ROWS * HSP * 2, dO = Q + 2 * STAGE, stats = K + Shape::STATS;
    const int key = place.tile * ROWS, mine = key + lane.warp * MT * 16;
    const SharedAddress my_K = K + lane.warp * MT * 16 * HSP * 2, my_V = my_K + ROWS * HSP * 2;
    const Matrix queries = matrix_of(call.Q, place, sizes), grads = matrix_of(call.dO, place, sizes);
    KeysState<HSP> state;
    set_zero(state.dK);
    set_zero(state.dV);

    int tile = key / BM, stage = 0;
    const int tiles = (sizes.T + BM - 1) / BM;
    load_tile<HSP, ROWS, THREADS>(K, matrix_of(call.K, place, sizes), key);
    load_tile<HSP, ROWS, THREADS>(V, matrix_of(call.V, place, sizes), key);
    load_tile<HSP, BM, THREADS>(Q, queries, tile * BM);
    load_tile<HSP, BM, THREADS>(dO, grads, tile * BM);
    load_stats<BM>(stats, call, place, tile * BM);
    copies_commit();
    if (threadIdx.x == 0) {
        bad[0] = INT_MAX;
        bad[1] = -1;
    }

    for (; tile < tiles; tile++, stage ^= 1) {
        const bool masked = tile * BM < key + ROWS - 1 || (tile + 1) * BM > sizes.T;
        int found = 0;
        copies_wait<0>();
        if (masked)
            found = __syncthreads_or((int)scan_tile<HSP, BM, THREADS>(Q + stage * STAGE) |
                                     (int)scan_tile<HSP, BM, THREADS>(dO + stage * STAGE));
        else __syncthreads();
        if (found) {
            purge_tile<HSP, BM, THREADS>(Q + stage * STAGE, bad, bad + 1);
            purge_tile<HSP, BM, THREADS>(dO + stage * STAGE, bad, bad + 1);
            __syncthreads();
        }
        if (tile + 1 < tiles) {
            load_tile<HSP, BM, THREADS>(Q + (stage ^ 1) * STAGE, queries, (tile + 1) * BM);
            load_tile<HSP, BM, THREADS>(dO + (stage ^ 1) * STAGE, grads, (tile + 1) * BM);
            load_stats<BM>(stats + (stage ^ 1) * BM * 12, call, place, (tile + 1) * BM);
            copies_commit();
        }
        if (masked || stats_large<BM>(stats + stage * BM * 12)) /* the masking kind also takes in what LSE lacks */
            keys_tile<HSP, true>(state, my_K, my_V, Q + stage * STAGE, dO + stage * STAGE, stats + stage * BM * 12,
                                 lane, mine, tile * BM, sizes.T, slice, sizes.scale_log2);
        else
            keys_tile<HSP, false>(state, my_K, my_V, Q + stage * STAGE, dO + stage * STAGE, stats + stage * BM * 12,
                                  lane, mine, tile * BM, sizes.T, slice, sizes.scale_log2);
        if (found) { /* what was not finite reaches the keys that its query sees, and no others */
            int last = tile * BM + bad[1];
#pragma unroll
            for (int m = 0; m < MT; m++)
#pragma unroll
                for (int n = 0; n < Shape::SLICE / 8; n++)
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        if (mine + m * 16 + lane.g + e / 2 * 8 <= last) state.dK[m][n][e] = state.dV[m][n][e] = NAN;
            __syncthreads();
            if (threadIdx.x == 0) {
                bad[0] = INT_MAX;
                bad[1] = -1;
            }
        }
    }

    const Place again = place_of(block_again() / Shape::SLICES, sizes);
    float factor[MT][2];
#pragma unroll
    for (int m = 0; m < MT; m++) factor[m][0] = factor[m][1] = sizes.scale;
    store_rows<HSP>(matrix_of(call.dK, again, sizes), my_K, state.dK, factor, lane, mine, slice * Shape::SLICE);
#pragma unroll
    for (int m = 0; m < MT; m++) factor[m][0] = factor[m][1] = 1;
    store_rows<HSP>(matrix_of(call.dV, again, sizes), my_V, state.dV, factor, lane, mine, slice * Shape::SLICE);
}

/* --- all three gradients at once: a block owns keys, and adds its part of dQ in global memory ------------------------ */

template <int HSP> struct FusedShape;

/* Adding to global memory by single floats, as chips before sm_90 do, takes the registers that 32 queries at a time
 * would need. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define FUSED_PART_64 16
#define FUSED_STEPS_128 4
#else
#define FUSED_PART_64 32
#define FUSED_STEPS_128 8
#endif

#ifndef FUSED_SHAPES
/* HSP, key groups of 32, warps a group, queries a tile, of them at a time, steps of a product at a time, m16 tiles of
 * dQ a warp, blocks an SM */
#define FUSED_SHAPES(X)                       \
    X(32, 4, 1, 64, 32, 2, 2, 2)              \
    X(64, 4, 1, 64, FUSED_PART_64, 4, 2, 2)   \
    X(96, 4, 2, 64, 32, 6, 1, 1)              \
    X(128, 4, 2, 64, 32, FUSED_STEPS_128, 2, 1)
#endif
#define FUSED_SHAPE(HSP, GROUPS_, SPLIT_, BM_, PART_, STEPS_, MTQ_, BLOCKS_)                                     \
    template <> struct FusedShape<HSP> {                                                                         \
        static const int SPLIT = SPLIT_, WARPS = GROUPS_ * SPLIT_, BM = BM_, PART = PART_, MTQ = MTQ_;           \
        static const int BLOCKS = BLOCKS_, THREADS = 32 * WARPS, ROWS = 32 * GROUPS_;                            \
        static const int STAGE = BM_ * HSP * 2, SLICE = HSP / SPLIT_;                                            \
        static const int ROOM = SLICE <= 32 ? 32 : SLICE <= 64 ? 64 : 128; /* columns of the results' way out */ \
        static const int Q_GROUPS = BM_ / (16 * MTQ_), Q_COLUMNS = HSP / (WARPS / Q_GROUPS);                     \
        static const int FRAGMENTS = MTQ_ * Q_COLUMNS / 8;                                                       \
        static const int STATS = (2 * ROWS + 4 * BM_) * HSP * 2, BAD = STATS + 6 * BM_ * 4;                      \
        static const int PHASES = BAD + 16, DS = (PHASES + 32 + 1023) / 1024 * 1024;                             \
        static const int P = DS + ROWS * BM_ * 2, BYTES = SPLIT_ > 1 ? P + ROWS * BM_ * 2 : P, STEPS = STEPS_;   \
        static const bool OVERLAPS = SPLIT_ > 1; /* barriers are mbarriers */                                    \
        static_assert(WARPS % Q_GROUPS == 0 && Q_COLUMNS % 16 == 0, "the warps share dQ evenly");                \
        static_assert(PART_ * SPLIT_ <= BM_, "each warp of a group has queries of its own");                     \
        static_assert(SPLIT_ == 1 || PART_ * SPLIT_ == BM_, "where P is shared, a warp scores its part at once");\
        static_assert(32 * GROUPS_ / BM_ % 2 == 0, "stages are told by the number of the tile");                 \
    };
FUSED_SHAPES(FUSED_SHAPE)

/* D of BM rows of a head, and zeros for their sums of dQ. Four lanes a row. */
template <int HSP>
__global__ void __launch_bounds__(256) flash_mma_prepare_kernel(Backward call)
{
    typedef FusedShape<HSP> Shape;
    const Sizes &sizes = call.sizes;
    const int tile = (int)(blockIdx.x % sizes.tiles);
    Place place;
    place.head = blockIdx.x / sizes.tiles;
    place.b = place.head / sizes.NH;
    place.h = place.head % sizes.NH;
    float *sums = call.sums + (int64_t)blockIdx.x * Shape::BM * HSP;
#pragma unroll
    for (int i = 0; i < Shape::BM * HSP / 1024; i++)
        *(float4 *)(sums + 4 * (threadIdx.x + 256 * i)) = make_float4(0, 0, 0, 0);
    int row = tile * Shape::BM + (int)threadIdx.x / 4;
    float D = dot_of_rows<HSP>(matrix_of(call.dO, place, sizes), matrix_of(call.O, place, sizes), row, threadIdx.x % 4);
    if (row < sizes.Tp && threadIdx.x % 4 == 0) call.D[(int64_t)place.head * sizes.Tp + row] = D;
}

/* Where a warp's sums of dQ for tile `tile` of BM queries of a head lie: fragment by fragment, 4 floats a lane. */
template <int HSP>
__device__ __forceinline__ float *sums_at(float *sums, uint32_t head, int tiles, int tile, int warp)
{
    typedef FusedShape<HSP> Shape;
    return sums + ((((int64_t)head * tiles + tile) * Shape::WARPS + warp) * Shape::FRAGMENTS * 32 + threadIdx.x % 32) * 4;
}

/* P and dS of PART queries, from `part` on, for the warp's 32 keys. Where registers allow, the exponentials come before the
 * second product, under whose matrix loads they can run. */
template <int HSP, bool MASKED, int PART>
__device__ __forceinline__ void fused_scores(float (&P)[2][PART / 8][4], float (&dS)[2][PART / 8][4], SharedAddress K,
                                             SharedAddress V, SharedAddress Q, SharedAddress dO, SharedAddress stats,
                                             Lane lane, int first, int left, int part, float scale_log2)
{
    typedef FusedShape<HSP> Shape;
    const bool EARLY = Shape::OVERLAPS;
    scores_product<HSP, MASKED, Shape::STEPS>(P, K, Q, lane, part, first);
    if (EARLY) scores_exponentials<Shape::BM, MASKED>(P, stats, lane, part, first, left, scale_log2);
    scores_product<HSP, MASKED, Shape::STEPS>(dS, V, dO, lane, part, first);
    if (!EARLY) scores_exponentials<Shape::BM, MASKED>(P, stats, lane, part, first, left, scale_log2);
    scores_gradients<Shape::BM, MASKED>(dS, P, stats, lane, part, first, left);
}

/* As add_product for the half of the tile's queries that the warp has not scored, the first half for slice 1: there X^T
 * lies in shared memory, the warp's 32 rows of it (keys, BM queries). */
template <int HSP, bool MASKED, int SLICE8>
__device__ __forceinline__ void add_product_shared(float (&sums)[2][SLICE8][4], SharedAddress X, SharedAddress Y,
                                                   Lane lane, int first, int slice)
{
    const int BM = FusedShape<HSP>::BM, query = (slice ^ 1) * (BM / 2);
    Walk<BM> walk_X = walk_down<BM>(X, lane);
    walk_X.first = flip_bits(walk_X.first, (uint32_t)query * 2);
    const Walk<HSP> walk_Y = walk_down<HSP>(Y + query * HSP * 2, lane);
#pragma unroll
    for (int k = 0; k < BM / 32; k++) {
        uint32_t a[2][4];
        if (MASKED && query + k * 16 + 15 < first) continue;
#pragma unroll
        for (int m = 0; m < 2; m++) ldmatrix_x4(a[m], walk_X.at(m * 16, k));
#pragma unroll
        for (int n = 0; n < SLICE8 / 2; n++) {
            uint32_t b[4];
            ldmatrix_x4_trans(b, walk_Y.at(k * 16, slice * (SLICE8 / 2) + n));
#pragma unroll
            for (int m = 0; m < 2; m++) {
                mma_bf16(sums[m][2 * n], a[m], b[0], b[1]);
                mma_bf16(sums[m][2 * n + 1], a[m], b[2], b[3]);
            }
        }
    }
}

/* The block's part of dQ of one tile of queries, the warp's share of it, added in global memory. keys: how many of the
 * block's, from the first on, any query of the tile sees. Unless all are FINITE, bad[2] is the first key that is not, whose
 * queries get NaN. */
template <int HSP, bool FINITE>
__device__ __forceinline__ void fused_queries(float *sums, SharedAddress dS, SharedAddress K, Shared<int> bad,
                                              Lane lane, int keys, int key, int query)
{
    typedef FusedShape<HSP> Shape;
    const int MTQ = Shape::MTQ, N = Shape::Q_COLUMNS / 8, BM = Shape::BM;
    const int group = lane.warp % Shape::Q_GROUPS, columns = lane.warp / Shape::Q_GROUPS;
    const int bad_key = FINITE ? INT_MAX : bad[2];
    float dQ[MTQ][N][4];
    set_zero(dQ);
    const Walk<BM> walk_dS = walk_right<BM>(dS, lane);
    const Walk<HSP> walk_K = walk_down<HSP>(K, lane);
#pragma unroll(FINITE ? 4 : 1)
    for (int k = 0; k < Shape::ROWS / 16; k++) {
        uint32_t a[MTQ][4];
        if (k * 16 >= keys) break;
#pragma unroll
        for (int m = 0; m < MTQ; m++) ldmatrix_x4_trans(a[m], walk_dS.at(k * 16, group * MTQ + m));
#pragma unroll
        for (int n = 0; n < N / 2; n++) {
            uint32_t b[4];
            ldmatrix_x4_trans(b, walk_K.at(k * 16, columns * (N / 2) + n));
            if (!FINITE) {
                bool found = false;
#pragma unroll
                for (int e = 0; e < 4; e++) b[e] = finite_pair(b[e], &found);
            }
#pragma unroll
            for (int m = 0; m < MTQ; m++) {
                mma_bf16(dQ[m][2 * n], a[m], b[0], b[1]);
                mma_bf16(dQ[m][2 * n + 1], a[m], b[2], b[3]);
            }
        }
    }
#pragma unroll
    for (int m = 0; m < MTQ; m++) {
        int row = query - key + (group * MTQ + m) * 16 + lane.g;
#pragma unroll
        for (int n = 0; n < N; n++) {
            if (!FINITE && row >= bad_key) dQ[m][n][0] = dQ[m][n][1] = NAN;
            if (!FINITE && row + 8 >= bad_key) dQ[m][n][2] = dQ[m][n][3] = NAN;
            reduce_add_4(sums + (m * N + n) * 128, make_float4(dQ[m][n][0], dQ[m][n][1], dQ[m][n][2], dQ[m][n][3]));
        }
    }
}

template <int HSP>
struct FusedState {
    float dK[2][FusedShape<HSP>::SLICE / 8][4], dV[2][FusedShape<HSP>::SLICE / 8][4];
};

/* Where the parts of a block's shared memory are. */
struct FusedPlaces {
    SharedAddress K, V, dS, P;
    SharedAddress phases; /* four mbarriers, used where warps may run ahead: */
};

/* of a stage: its tile has arrived; of the block: all warps are done with a tile; have stored its P and dS. Every thread
 * arrives for itself: lane 0 alone, behind a __syncwarp, is as right, but 2 to 3% slower (H200), and compute-sanitizer does
 * not see what the other lanes did before it. */
__device__ __forceinline__ SharedAddress phase_loaded(SharedAddress phases, int stage) { return phases + 8 * stage; }
__device__ __forceinline__ SharedAddress phase_done(SharedAddress phases) { return phases + 16; }
__device__ __forceinline__ SharedAddress phase_stored(SharedAddress phases) { return phases + 24; }

/* One tile of queries. load_next() queues the loads of the tile after it. */
template <int HSP, bool MASKED, typename LoadNext>
__device__ __forceinline__ void fused_tile(FusedState<HSP> &state, const FusedPlaces &at, SharedAddress Q,
                                           SharedAddress dO, SharedAddress stats, float *sums, Shared<int> bad, int key,
                                           int query, int T, float scale_log2, const LoadNext &load_next)
{
    typedef FusedShape<HSP> Shape;
    const int PART = Shape::PART, BM = Shape::BM, SPLIT = Shape::SPLIT, stage = query / BM & 1;
    const Lane lane = lane_again();
    const int group = lane.warp / SPLIT, half = lane.warp % SPLIT;
#pragma unroll 1
    for (int part = half * (BM / SPLIT); part < (half + 1) * (BM / SPLIT); part += PART) {
        float P[2][PART / 8][4], dS[2][PART / 8][4];
        set_zero(P);
        set_zero(dS);
        const int first = key + group * 32 - query - part;
        const bool seen = !MASKED || first < PART;
        if (seen) {
            fused_scores<HSP, MASKED, PART>(P, dS, at.K + group * 32 * HSP * 2, at.V + group * 32 * HSP * 2, Q, dO, stats,
                                            lane_again(), first, T - query - part, part, scale_log2);
            if (!Shape::OVERLAPS) {
                add_product<HSP, MASKED>(state.dV, P, dO, lane_again(), part, first, 0);
                add_product<HSP, MASKED>(state.dK, dS, Q, lane_again(), part, first, 0);
            }
        }
        if (Shape::OVERLAPS && query != key) mbarrier_wait(phase_done(at.phases), stage ^ 1);
#pragma unroll
        for (int m = 0; m < 2; m++)
#pragma unroll
            for (int n = 0; n < PART / 8; n++)
#pragma unroll
                for (int e = 0; e < 4; e += 2) {
                    int offset = tile_offset<BM>(group * 32 + m * 16 + e * 4 + lane.g, part / 8 + n) + 4 * lane.q;
                    store_32(at.dS + offset, pack_bf16(dS[m][n][e], dS[m][n][e + 1]));
                    if (Shape::OVERLAPS) store_32(at.P + offset, pack_bf16(P[m][n][e], P[m][n][e + 1]));
                }
        if (Shape::OVERLAPS) {
            mbarrier_arrive(phase_stored(at.phases));
            if (seen) {
                add_product<HSP, MASKED>(state.dV, P, dO, lane_again(), part, first, half);
                add_product<HSP, MASKED>(state.dK, dS, Q, lane_again(), part, first, half);
            }
        }
    }
    if (Shape::OVERLAPS) {
        mbarrier_wait(phase_stored(at.phases), stage);
        load_next(); /* all warps have stored, so all are done with the tile before, whose place this takes */
        const Lane lane_now = lane_again();
        const int rows = lane_now.warp / SPLIT * 32, slice = lane_now.warp % SPLIT;
        add_product_shared<HSP, MASKED>(state.dV, at.P + rows * BM * 2, dO, lane_now, key + rows - query, slice);
        add_product_shared<HSP, MASKED>(state.dK, at.dS + rows * BM * 2, Q, lane_now, key + rows - query, slice);
    } else __syncthreads();
    const int keys = MASKED ? query + BM - key : Shape::ROWS;
    if (bad[2] == INT_MAX) fused_queries<HSP, true>(sums, at.dS, at.K, bad, lane_again(), keys, key, query);
    else fused_queries<HSP, false>(sums, at.dS, at.K, bad, lane_again(), keys, key, query);
    if (Shape::OVERLAPS) mbarrier_arrive(phase_done(at.phases));
}

template <int HSP>
__global__ void __launch_bounds__(FusedShape<HSP>::THREADS, FusedShape<HSP>::BLOCKS) flash_mma_fused_kernel(Backward call)
{
    typedef FusedShape<HSP> Shape;
    const int BM = Shape::BM, ROWS = Shape::ROWS, THREADS = Shape::THREADS, STAGE = Shape::STAGE;
    const Sizes &sizes = call.sizes;
    const Place place = place_of(blockIdx.x, sizes);
    const Lane lane = lane_here();
    /* First and last query of a tile, and of the keys, that are not finite. */
    const Shared<int> bad = shared_dynamic<int>(Shape::BAD, 4);
    const SharedAddress K = shared_address(shared_dynamic<unsigned char>(0, Shape::BYTES));
    const SharedAddress V = K + ROWS * HSP * 2, Q = V + ROWS * HSP * 2, dO = Q + 2 * STAGE, stats = K + Shape::STATS;
    const int key = place.tile * ROWS;
    const Matrix queries = matrix_of(call.Q, place, sizes), grads = matrix_of(call.dO, place, sizes);
    const FusedPlaces at = {K, V, K + Shape::DS, K + Shape::P, K + Shape::PHASES};
    FusedState<HSP> state;
    set_zero(state.dK);
    set_zero(state.dV);

    int tile = key / BM;
    const int tiles = (sizes.T + BM - 1) / BM;
    float *sums = sums_at<HSP>(call.sums, place.head, tiles, tile, lane.warp);
    load_tile<HSP, ROWS, THREADS>(K, matrix_of(call.K, place, sizes), key);
    load_tile<HSP, ROWS, THREADS>(V, matrix_of(call.V, place, sizes), key);
    load_tile<HSP, BM, THREADS>(Q, queries, tile * BM);
    load_tile<HSP, BM, THREADS>(dO, grads, tile * BM);
    load_stats<BM>(stats, call, place, tile * BM);
    copies_commit();
    if (threadIdx.x < 4) bad[threadIdx.x] = threadIdx.x % 2 ? -1 : INT_MAX;
    if (Shape::OVERLAPS && threadIdx.x == 0) {
        mbarrier_init(phase_loaded(at.phases, 0), THREADS);
        mbarrier_init(phase_loaded(at.phases, 1), THREADS);
        mbarrier_init(phase_done(at.phases), THREADS);
        mbarrier_init(phase_stored(at.phases), THREADS);
    }
    copies_wait<0>();
    if (__syncthreads_or(scan_tile<HSP, ROWS, THREADS>(K))) purge_tile<HSP, ROWS, THREADS, false>(K, bad + 2, bad + 3);

    for (; tile < tiles; tile++, sums += Shape::WARPS * Shape::FRAGMENTS * 128) {
        const bool masked = tile * BM < key + ROWS - 1 || (tile + 1) * BM > sizes.T;
        const int stage = tile & 1; /* the first tile's number is even */
        int found = 0;
        const auto load_next = [&]() {
            if (tile + 1 >= tiles) return;
            load_tile<HSP, BM, THREADS>(Q + (stage ^ 1) * STAGE, queries, (tile + 1) * BM);
            load_tile<HSP, BM, THREADS>(dO + (stage ^ 1) * STAGE, grads, (tile + 1) * BM);
            load_stats<BM>(stats + (stage ^ 1) * BM * 12, call, place, (tile + 1) * BM);
            if (Shape::OVERLAPS && queries.vectors && grads.vectors) {
                mbarrier_arrive_copies(phase_loaded(at.phases, stage ^ 1));
                return;
            }
            copies_commit();
            if (Shape::OVERLAPS) { /* only an arrival of the thread's own makes what it stored itself known */
                copies_wait<0>();
                mbarrier_arrive(phase_loaded(at.phases, stage ^ 1));
            }
        };
        /* Of a stage's mbarrier, the block's tiles 1 and 2 are the first phase, 3 and 4 the second. */
        if (!Shape::OVERLAPS) copies_wait<0>();
        else if (tile * BM != key) mbarrier_wait(phase_loaded(at.phases, stage), ((tile - 1) / 2 ^ key / ROWS) & 1);
        if (masked)
            found = __syncthreads_or((int)scan_tile<HSP, BM, THREADS>(Q + stage * STAGE) |
                                     (int)scan_tile<HSP, BM, THREADS>(dO + stage * STAGE));
        else if (!Shape::OVERLAPS) __syncthreads();
        if (found) {
            purge_tile<HSP, BM, THREADS>(Q + stage * STAGE, bad, bad + 1);
            purge_tile<HSP, BM, THREADS>(dO + stage * STAGE, bad, bad + 1);
            __syncthreads();
        }
        if (!Shape::OVERLAPS) load_next();
        if (masked || stats_large<BM>(stats + stage * BM * 12)) /* the masking kind also takes in what LSE lacks */
            fused_tile<HSP, true>(state, at, Q + stage * STAGE, dO + stage * STAGE, stats + stage * BM * 12, sums, bad,
                                  key, tile * BM, sizes.T, sizes.scale_log2, load_next);
        else
            fused_tile<HSP, false>(state, at, Q + stage * STAGE, dO + stage * STAGE, stats + stage * BM * 12, sums, bad,
                                   key, tile * BM, sizes.T, sizes.scale_log2, load_next);
        if (found) { /* what was not finite reaches the keys that its query sees, and no others */
            const Lane lane_now = lane_again();
            int last = tile * BM + bad[1], mine = key + lane_now.warp / Shape::SPLIT * 32;
#pragma unroll
            for (int m = 0; m < 2; m++)
#pragma unroll
                for (int n = 0; n < Shape::SLICE / 8; n++)
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        if (mine + m * 16 + lane_now.g + e / 2 * 8 <= last) state.dK[m][n][e] = state.dV[m][n][e] = NAN;
            __syncthreads();
            if (threadIdx.x < 2) bad[threadIdx.x] = threadIdx.x ? -1 : INT_MAX;
        }
    }

    const Place again = place_of(block_again(), sizes);
    const Lane lane_now = lane_again();
    const int first = again.tile * ROWS + lane_now.warp / Shape::SPLIT * 32;
    const int column = lane_now.warp % Shape::SPLIT * Shape::SLICE;
    float factor[2][2] = {{sizes.scale, sizes.scale}, {sizes.scale, sizes.scale}};
    __syncthreads(); /* K is read by all warps to the last; now the results go by way of its place and that of V */
    const SharedAddress room =
        shared_address(shared_dynamic<unsigned char>(0, Shape::BYTES)) + lane_now.warp * 32 * Shape::ROOM * 2;
    store_rows<Shape::ROOM>(matrix_of(call.dK, again, sizes), room, state.dK, factor, lane_now, first, column);
    factor[0][0] = factor[0][1] = factor[1][0] = factor[1][1] = 1;
    store_rows<Shape::ROOM>(matrix_of(call.dV, again, sizes), room, state.dV, factor, lane_now, first, column);
}

/* dQ = scale times the sums, rounded: a block a tile of BM queries. */
template <int HSP>
__global__ void __launch_bounds__(FusedShape<HSP>::THREADS) flash_mma_finish_kernel(Backward call)
{
    typedef FusedShape<HSP> Shape;
    const int MTQ = Shape::MTQ, N = Shape::Q_COLUMNS / 8, ROOM = Shape::Q_COLUMNS <= 32 ? 32 : 64;
    const Sizes &sizes = call.sizes;
    const Lane lane = lane_here();
    const SharedAddress room = shared_address(shared_dynamic<unsigned char>(0, Shape::WARPS * MTQ * 16 * ROOM * 2));
    const int tiles = (int)sizes.tiles, tile = (int)(blockIdx.x % sizes.tiles);
    const int group = lane.warp % Shape::Q_GROUPS, columns = lane.warp / Shape::Q_GROUPS;
    Place place;
    place.head = blockIdx.x / sizes.tiles;
    place.b = place.head / sizes.NH;
    place.h = place.head % sizes.NH;
    const float *sums = sums_at<HSP>(call.sums, place.head, tiles, tile, lane.warp);
    float dQ[MTQ][N][4], factor[MTQ][2];
#pragma unroll
    for (int m = 0; m < MTQ; m++) {
        factor[m][0] = factor[m][1] = sizes.scale;
#pragma unroll
        for (int n = 0; n < N; n++) {
            float4 x = *(const float4 *)(sums + (m * N + n) * 128);
            dQ[m][n][0] = x.x;
            dQ[m][n][1] = x.y;
            dQ[m][n][2] = x.z;
            dQ[m][n][3] = x.w;
        }
    }
    store_rows<ROOM>(matrix_of(call.dQ, place, sizes), room + lane.warp * MTQ * 16 * ROOM * 2, dQ, factor, lane,
                     tile * Shape::BM + group * MTQ * 16, columns * Shape::Q_COLUMNS);
}

/* --- launchers ------------------------------------------------------------------------------------------------------- */

#define CACHE_BYTES ((int64_t)16 << 20) /* of the second-level cache for a section's keys and values */

static int64_t tiles_of(int64_t T, int64_t rows) { return (T + rows - 1) / rows; }

/* Can every row be moved by 16 bytes at once? */
static int vectors_fit(const void *data, int64_t batch_stride, int64_t row_stride, int64_t head_stride)
{
    return (uintptr_t)data % 16 == 0 && (batch_stride | row_stride | head_stride) % 8 == 0;
}

static Source source_of(AttentionInput view)
{
    return {view, vectors_fit(view.data, view.batch_stride, view.row_stride, view.head_stride)};
}

static Target target_of(AttentionOutput view)
{
    return {view, vectors_fit(view.data, view.batch_stride, view.row_stride, view.head_stride)};
}

static int64_t padded_length(int64_t T) { return (T + 3) / 4 * 4; }

static Sizes sizes_of(const AttentionShape *shape, int rows)
{
    int64_t heads = shape->B * shape->NH, section = CACHE_BYTES / (4 * shape->T * shape->HS);
    section = section < 1 ? 1 : section < heads ? section : heads;
    /* Masked logits are -inf and must stay so when they are scaled: by next to nothing where that should be 0. */
    float scale_log2 = shape->scale == 0 ? FLT_TRUE_MIN : (float)((double)shape->scale * LOG2_E);
    return {(uint32_t)heads, (uint32_t)shape->NH, (int)shape->T, (int)padded_length(shape->T), (int)shape->HS,
            (uint32_t)tiles_of(shape->T, rows), (uint32_t)section, shape->scale, scale_log2};
}

template <int HSP, int FROM>
static cudaError_t launch_forward_from(Forward call, const AttentionShape *shape, cudaStream_t stream)
{
    typedef ForwardShape<HSP, FROM> Shape;
    static_assert(Shape::BYTES <= 99 << 10, "the shared memory of sm_86");
    call.sizes = sizes_of(shape, Shape::ROWS);
    return kernel_launch(flash_mma_forward_kernel<HSP, FROM>, dim3(call.sizes.heads * call.sizes.tiles),
                         dim3(Shape::THREADS), Shape::BYTES, stream, call);
}

template <int HSP>
static cudaError_t launch_forward(Forward call, const AttentionShape *shape, cudaStream_t stream)
{
    if constexpr (HSP == 64)
        if (shape->T >= 2048) return launch_forward_from<HSP, 2048>(call, shape, stream);
    return launch_forward_from<HSP, 0>(call, shape, stream);
}

/* Is dQ added up by the blocks that own keys, in any order, or made by a kernel of its own? */
#ifndef FUSED_FROM
#define FUSED_FROM(HS) 1
#endif
static int fused_wanted(const AttentionShape *shape)
{
    return !shape->deterministic && shape->HS <= 128 && shape->T >= FUSED_FROM(shape->HS);
}

/* Floats of the sums of dQ. */
static int64_t sums_count(const AttentionShape *shape)
{
    int64_t HSP = shape->HS <= 32 ? 32 : shape->HS <= 64 ? 64 : shape->HS <= 96 ? 96 : 128;
    return fused_wanted(shape) ? shape->B * shape->NH * tiles_of(shape->T, 64) * 64 * HSP : 0;
}

template <int HSP>
static cudaError_t launch_separate(Backward call, const AttentionShape *shape, cudaStream_t stream)
{
    typedef QueriesShape<HSP> Queries;
    typedef KeysShape<HSP> Keys;
    static_assert(Queries::BYTES <= 99 << 10 && Keys::BYTES <= 99 << 10, "the shared memory of sm_86");
    call.sizes = sizes_of(shape, Queries::ROWS);
    cudaError_t error = kernel_launch(flash_mma_queries_kernel<HSP>, dim3(call.sizes.heads * call.sizes.tiles),
                                      dim3(Queries::THREADS), Queries::BYTES, stream, call);
    if (error != cudaSuccess) return error;
    call.sizes = sizes_of(shape, Keys::ROWS);
    return kernel_launch(flash_mma_keys_kernel<HSP>, dim3(call.sizes.heads * call.sizes.tiles * Keys::SLICES),
                         dim3(Keys::THREADS), Keys::BYTES, stream, call);
}

template <int HSP>
static cudaError_t launch_fused(Backward call, const AttentionShape *shape, cudaStream_t stream)
{
    typedef FusedShape<HSP> Fused;
    const int ROOM = Fused::Q_COLUMNS <= 32 ? 32 : 64;
    static_assert(Fused::BYTES <= 163 << 10, "the shared memory of sm_80");
    static_assert(Fused::BM == 64 && Fused::BM * HSP % 1024 == 0,
                  "four lanes a row of 256, which clear whole groups of four");
    call.sizes = sizes_of(shape, Fused::BM);
    dim3 tiles(call.sizes.heads * call.sizes.tiles);
    cudaError_t error = kernel_launch(flash_mma_prepare_kernel<HSP>, tiles, dim3(256), 0, stream, call);
    if (error != cudaSuccess) return error;
    call.sizes = sizes_of(shape, Fused::ROWS);
    error = kernel_launch(flash_mma_fused_kernel<HSP>, dim3(call.sizes.heads * call.sizes.tiles), dim3(Fused::THREADS),
                          Fused::BYTES, stream, call);
    if (error != cudaSuccess) return error;
    call.sizes = sizes_of(shape, Fused::BM);
    return kernel_launch(flash_mma_finish_kernel<HSP>, tiles, dim3(Fused::THREADS),
                         Fused::WARPS * Fused::MTQ * 16 * ROOM * 2, stream, call);
}

template <int HSP, bool FUSED>
static cudaError_t launch_backward(Backward call, const AttentionShape *shape, cudaStream_t stream)
{
    int device = 0, shared = 0;
    if (!FUSED || !fused_wanted(shape)) return launch_separate<HSP>(call, shape, stream);
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    if (error != cudaSuccess) return error;
    if constexpr (FUSED)
        if (FusedShape<HSP>::BYTES <= shared) return launch_fused<HSP>(call, shape, stream);
    return launch_separate<HSP>(call, shape, stream);
}

/* launch(HSP)(call, shape, stream) for the smallest padded head dimension that holds the shape's own. */
#define LAUNCH(launch)                                                   \
    (shape->HS <= 32   ? launch(32)(call, shape, (cudaStream_t)stream)   \
     : shape->HS <= 64  ? launch(64)(call, shape, (cudaStream_t)stream)  \
     : shape->HS <= 96  ? launch(96)(call, shape, (cudaStream_t)stream)  \
     : shape->HS <= 128 ? launch(128)(call, shape, (cudaStream_t)stream) \
                        : launch(256)(call, shape, (cudaStream_t)stream))
#define LAUNCH_FORWARD(HSP) launch_forward<HSP>
#define LAUNCH_BACKWARD(HSP) launch_backward<HSP, (HSP <= 128)>

/* --- the table entry ------------------------------------------------------------------------------------------------- */

static const char *flash_mma_refuse(const AttentionShape *shape, int sm)
{
    if (sm < 80) return "needs sm_80 or later";
    if (shape->dtype != DTYPE_BF16) return "takes bf16 only";
    if (shape->HS < 8 || shape->HS > MAX_HS || shape->HS % 8)
        return "needs a head dimension that is a multiple of 8, from 8 to 256";
    if (shape->T > 1 << 30) return "needs T of at most 2^30";
    if (shape->B * shape->NH > 0 && 4 * tiles_of(shape->T, 64) > INT_MAX / (shape->B * shape->NH))
        return "needs B*NH*ceil(T/64) below 2^29, for the blocks of a grid";
    return NULL;
}

static int64_t stats_count(const AttentionShape *shape) { return shape->B * shape->NH * padded_length(shape->T); }

static size_t flash_mma_saved_bytes(const AttentionShape *shape) { return 2 * (size_t)stats_count(shape) * sizeof(float); }

static size_t flash_mma_scratch_bytes(const AttentionShape *shape)
{
    return (size_t)(stats_count(shape) + sums_count(shape)) * sizeof(float);
}

static const char *flash_mma_forward(AttentionOutput O, float *LSE, void *saved, void *scratch, AttentionInput Q,
                                     AttentionInput K, AttentionInput V, const AttentionShape *shape, void *stream)
{
    (void)scratch;
    if (stats_count(shape) == 0) return NULL;
    Forward call;
    call.Q = source_of(Q);
    call.K = source_of(K);
    call.V = source_of(V);
    call.O = target_of(O);
    call.LSE = LSE;
    call.saved = (float *)saved;
    cudaError_t error = LAUNCH(LAUNCH_FORWARD);
    return error == cudaSuccess ? NULL : cudaGetErrorString(error);
}

static const char *flash_mma_backward(AttentionOutput dQ, AttentionOutput dK, AttentionOutput dV, void *scratch,
                                      AttentionInput dO, AttentionInput Q, AttentionInput K, AttentionInput V,
                                      AttentionInput O, const float *LSE, const void *saved,
                                      const AttentionShape *shape, void *stream)
{
    (void)LSE;
    if (stats_count(shape) == 0) return NULL;
    if ((uintptr_t)scratch % 16 || (uintptr_t)saved % 16) return "scratch or saved is not aligned to 16 bytes";
    Backward call;
    call.Q = source_of(Q);
    call.K = source_of(K);
    call.V = source_of(V);
    call.dO = source_of(dO);
    call.O = source_of(O);
    call.dQ = target_of(dQ);
    call.dK = target_of(dK);
    call.dV = target_of(dV);
    call.saved = (const float *)saved;
    call.D = (float *)scratch;
    call.sums = call.D + stats_count(shape);
    cudaError_t error = LAUNCH(LAUNCH_BACKWARD);
    return error == cudaSuccess ? NULL : cudaGetErrorString(error);
}

} /* namespace */

extern "C" const AttentionKernel attention_flash_mma = {
    ATTENTION_ABI,
    ATTENTION_CUDA,
    "flash_mma",
    "tensor cores by mma.sync, bf16, sm_80 and later",
    flash_mma_refuse,
    flash_mma_saved_bytes,
    flash_mma_scratch_bytes,
    flash_mma_forward,
    flash_mma_backward,
};
