/* tiled.c - flash attention on the CPU: tiles, an online softmax, no T x T matrix, and lanes that are queries.
 *
 * The algorithm (Dao et al. 2022, Dao 2023). Queries and keys are cut into tiles of TILE rows. Forward walks, for one tile
 * of queries, the tiles of keys from the first to the diagonal, and keeps for every query the running maximum m of its
 * logits, the running sum l of exp(logit - m), and O in units of that sum; when m moves, l and O are scaled by
 * exp(m_old - m_new). Backward rebuilds P tile by tile and never stores it beyond that.
 *
 *          keys ->
 *      q   D . . .      D  diagonal tile: masked, and only its lower triangle is multiplied
 *      u   # D . .      #  full tile: no mask code
 *      e   # # D .      .  never visited
 *      r   # # # D
 *
 * Everything is held transposed: a tile of S is S^T (keys x queries), of O is O^T (HS x queries). Then a vector register
 * holds one key against LANES queries, so that maximum, sum, exponential and rescaling are vertical and need no shuffle;
 * HS is a count of rows, so that every HS works alike; and the matrix products are one routine, tile_product, which
 * broadcasts elements of its left factor and streams rows of its right one:
 *
 *     forward    S^T = K (scale Q)^T          O^T += V^T P^T
 *     backward   S^T, dP^T = V dO^T           dV += P^T dO,  dK += dS^T Q,  dQ^T += K^T dS^T
 *
 * (the scale goes into Q^T once, since a compiler that makes scale * s - m one fused operation in one place and two in
 * another would give two different P)
 *
 * with P^T = exp(S^T - m) / l and dS^T = P^T * (dP^T - D), D_i = dO_i . O_i. m and 1/l are kept in `saved`: S - m is then
 * exact near the maximum at any size of the logits, where S - LSE would carry the rounding of LSE (0.004 at 1e5).
 *
 * Not-a-number. A masked entry is overwritten before the exponential, so P and dS are exact zeros there. A zero times a NaN
 * in the other factor would still be a NaN, in rows that may not see it: diagonal tiles whose other factor is not finite
 * are multiplied by add_triangle, slow and element by element, which touches pairs with key <= query only.
 *
 * Work and order. Forward: a task is one tile of queries of one head. Backward: a task is one head, which shares S and dP
 * between the three gradients (5 products); where heads are too few for the threads, a task is one tile of one head,
 * once for dQ and once for dK and dV (7 products). Either way every sum runs over tiles in the same ascending order within
 * one thread, so that the result has the same bits for any number of threads and any schedule.
 *
 * Memory: scratch holds a few tiles for each thread, and for the backward by heads dK and dV of one head for each thread.
 * It is sized for omp_get_max_threads() at the time of the question: a caller who raises that number asks again.
 */
#include "attention/attention.h"

#include <math.h>
#include <string.h>

#ifdef _OPENMP
#include <omp.h>
#else
static int omp_get_max_threads(void) { return 1; }
static int omp_get_thread_num(void) { return 0; }
#endif

/* LANES floats fill a register. A product keeps ROWS x 2 accumulators, 2 streamed vectors and a broadcast in registers. */
#if defined(__AVX512F__)
#define LANES 16
#define ROWS 8
#elif defined(__AVX__)
#define LANES 8
#define ROWS 4
#elif defined(__aarch64__)
#define LANES 4
#define ROWS 8
#else
#define LANES 4
#define ROWS 4
#endif

#define TILE 64                 /* queries, and keys, of a tile: four tiles of floats stay in a first-level cache */
#define VECTORS (TILE / LANES)  /* registers that hold one key against a tile of queries */

_Static_assert(TILE % LANES == 0 && TILE % ROWS == 0, "a tile is whole vectors and whole blocks of rows");

typedef float Vector __attribute__((vector_size(LANES * 4)));
typedef float VectorAnywhere __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t Mask __attribute__((vector_size(LANES * 4)));
typedef float Quad __attribute__((vector_size(16)));
typedef float QuadAnywhere __attribute__((vector_size(16), aligned(4), may_alias));

#define INLINE static inline __attribute__((always_inline))

static int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

/* --- vectors ------------------------------------------------------------------------------------------------------ */

INLINE Vector load(const float *p) { return *(const VectorAnywhere *)p; }
INLINE void store(float *p, Vector v) { *(VectorAnywhere *)p = v; }
INLINE Vector splat(float x) { return x - (Vector){0}; }
INLINE Vector choose(Mask mask, Vector yes, Vector no) { return (Vector)((mask & (Mask)yes) | (~mask & (Mask)no)); }

/* Lanes first, first + 1, ... as queries of a tile: those that may see key j. */
INLINE Mask lanes_from(int64_t j, int64_t first)
{
    Mask lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    return lane >= (int32_t)(j - first);
}

/* exp(x) for x <= 0, error about one unit in the last place; exactly 0 below the smallest normal number, -inf included; NaN
 * stays NaN. x = n ln2 + r with |r| <= ln2/2, exp(x) = 2^n exp(r), exp(r) = 1 + r + r^2 p(r) with p fitted for the least
 * relative error (3e-9). Adding 1.5 * 2^23 rounds n to an integer, and leaves it in the low bits. */
INLINE Vector exp_nonpositive(Vector x)
{
    const Vector shift = splat(0x1.8p23f);
    Vector shifted = x * 0x1.715476p0f + shift;
    Vector n = shifted - shift;
    Vector r = x - n * 0x1.63p-1f; /* the first 9 bits of ln2: n times this is exact */
    r = r - n * -0x1.bd0106p-13f;  /* the rest of ln2 */
    Vector p = splat(0x1.6a2352p-10f);
    p = p * r + 0x1.123a6cp-7f;
    p = p * r + 0x1.5558f4p-5f;
    p = p * r + 0x1.555490p-3f;
    p = p * r + 0x1.fffffcp-2f;
    p = p * (r * r) + r + 1.0f;
    typedef uint32_t Bits __attribute__((vector_size(LANES * 4)));
    Vector power = (Vector)(((Bits)shifted << 23) + 0x3F800000u);
    return choose(x < -0x1.5d589ep6f, splat(0), p * power);
}

/* --- moving tiles ------------------------------------------------------------------------------------------------- */

INLINE Quad load_quad(const float *p) { return *(const QuadAnywhere *)p; }
INLINE void store_quad(float *p, Quad v) { *(QuadAnywhere *)p = v; }

/* out (cols, rows) = in (rows, cols) transposed; in blocks of 4 x 4 that stay in registers. */
static void transpose(float *out, int64_t out_stride, const float *in, int64_t in_stride, int64_t rows, int64_t cols)
{
    int64_t r = 0;
    for (; r + 4 <= rows; r += 4) {
        const float *from = in + r * in_stride;
        int64_t c = 0;
        for (; c + 4 <= cols; c += 4) {
            float *to = out + c * out_stride + r;
            Quad a = load_quad(from + c), b = load_quad(from + in_stride + c);
            Quad d = load_quad(from + 2 * in_stride + c), e = load_quad(from + 3 * in_stride + c);
            Quad ab = __builtin_shufflevector(a, b, 0, 4, 1, 5), de = __builtin_shufflevector(d, e, 0, 4, 1, 5);
            Quad ab_high = __builtin_shufflevector(a, b, 2, 6, 3, 7), de_high = __builtin_shufflevector(d, e, 2, 6, 3, 7);
            store_quad(to, __builtin_shufflevector(ab, de, 0, 1, 4, 5));
            store_quad(to + out_stride, __builtin_shufflevector(ab, de, 2, 3, 6, 7));
            store_quad(to + 2 * out_stride, __builtin_shufflevector(ab_high, de_high, 0, 1, 4, 5));
            store_quad(to + 3 * out_stride, __builtin_shufflevector(ab_high, de_high, 2, 3, 6, 7));
        }
        for (; c < cols; c++)
            for (int64_t i = 0; i < 4; i++) out[c * out_stride + r + i] = from[i * in_stride + c];
    }
    for (; r < rows; r++)
        for (int64_t c = 0; c < cols; c++) out[c * out_stride + r] = in[r * in_stride + c];
}

/* out (HS, TILE) = rows (n, HS) transposed, zeros for the queries beyond n up to a whole vector; all times `factor`. */
static void load_transposed(float *out, const float *rows, int64_t row_stride, int64_t n, int64_t HS, float factor)
{
    transpose(out, TILE, rows, row_stride, n, HS);
    int64_t end = round_up(n, LANES);
    for (int64_t d = 0; d < HS; d++, out += TILE) {
        memset(out + n, 0, (size_t)(end - n) * sizeof(float));
        if (factor != 1)
            for (int64_t q = 0; q < end; q += LANES) store(out + q, load(out + q) * factor);
    }
}

/* out (n, width) = rows (n, HS), each padded with zeros. Returns whether all of it is finite: x * 0 is a zero, of either
 * sign, for finite x alone. */
static int load_rows(float *out, const float *rows, int64_t row_stride, int64_t n, int64_t HS, int64_t width)
{
    Mask bits = {0};
    for (int64_t i = 0; i < n; i++, out += width, rows += row_stride) {
        int64_t d = 0;
        for (; d + LANES <= HS; d += LANES) {
            Vector x = load(rows + d);
            store(out + d, x);
            bits |= (Mask)(x * 0.0f);
        }
        if (d == width) continue;
        for (; d < HS; d++) out[d] = rows[d];
        for (; d < width; d++) out[d] = 0;
        bits |= (Mask)(load(out + width - LANES) * 0.0f);
    }
    int32_t all = 0;
    for (int i = 0; i < LANES; i++) all |= bits[i];
    return (all & INT32_MAX) == 0;
}

/* --- the product -------------------------------------------------------------------------------------------------- */

/* C (rows, vectors * LANES) = or += sum over `steps` of A(row, step) * B[step]. The two constants make the loops over
 * accumulators vanish: they live in registers. */
INLINE void block_product(float *C, int64_t C_stride, const float *A, int64_t A_row, int64_t A_step, const float *B,
                          int64_t B_stride, int64_t steps, int add, const int rows, const int vectors)
{
    Vector sum[ROWS][2];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) sum[r][v] = add ? load(C + r * C_stride + v * LANES) : splat(0);
    for (int64_t k = 0; k < steps; k++) {
        Vector b[2];
        for (int v = 0; v < vectors; v++) b[v] = load(B + k * B_stride + v * LANES);
        for (int r = 0; r < rows; r++) {
            Vector a = splat(A[r * A_row + k * A_step]);
            for (int v = 0; v < vectors; v++) sum[r][v] += a * b[v];
        }
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) store(C + r * C_stride + v * LANES, sum[r][v]);
}

/* C (M, N) = or += A B, with N whole vectors; element (m, k) of A stands at A + m*A_row + k*A_step, row k of B at
 * B + k*B_stride. Every element of C is one sum over k in ascending order, whatever block it falls into. */
static void tile_product(float *C, int64_t C_stride, const float *A, int64_t A_row, int64_t A_step, const float *B,
                         int64_t B_stride, int64_t M, int64_t N, int64_t steps, int add)
{
#define BLOCK(rows, vectors) \
    block_product(C + m * C_stride + n, C_stride, A + m * A_row, A_row, A_step, B + n, B_stride, steps, add, rows, vectors)
    for (int64_t n = 0; n < N; n += 2 * LANES) {
        int64_t m = 0;
        if (N - n >= 2 * LANES) {
            for (; m + ROWS <= M; m += ROWS) BLOCK(ROWS, 2);
            for (; m + 2 <= M; m += 2) BLOCK(2, 2);
            for (; m < M; m++) BLOCK(1, 2);
        } else {
            for (; m + ROWS <= M; m += ROWS) BLOCK(ROWS, 1);
            for (; m < M; m++) BLOCK(1, 1);
        }
    }
#undef BLOCK
}

/* The careful product of a diagonal tile: for every query i < nq and key j <= i, adds weights[j][i] times row `from` of X
 * to row `to` of C: with to_keys, query i of X to key j of C, else key j of X to query i of C. X and C have HS columns. */
static void add_triangle(float *C, int64_t C_row, int64_t C_col, const float *X, int64_t X_row, const float *weights,
                         int to_keys, int64_t nq, int64_t HS)
{
    for (int64_t j = 0; j < nq; j++)
        for (int64_t i = j; i < nq; i++) {
            float *to = C + (to_keys ? j : i) * C_row;
            const float *from = X + (to_keys ? i : j) * X_row;
            for (int64_t d = 0; d < HS; d++) to[d * C_col] += weights[j * TILE + i] * from[d];
        }
}

/* S^T (nk, TILE) = A (nk, HS) B (HS, TILE), for the vectors of the nq queries; of a diagonal tile those that hold a query
 * >= the key, and perhaps a few more. */
static void key_query_product(float *S, const float *A, int64_t width, const float *B, int64_t nk, int64_t nq, int64_t HS,
                              int diagonal)
{
    int64_t N = round_up(nq, LANES);
    if (!diagonal) {
        tile_product(S, TILE, A, width, 1, B, TILE, nk, N, HS, 0);
        return;
    }
    for (int64_t j = 0; j < nk; j += ROWS) {
        int64_t first = j / LANES * LANES, M = nk - j < ROWS ? nk - j : ROWS;
        tile_product(S + j * TILE + first, TILE, A + j * width, width, 1, B + first, TILE, M, N - first, HS, 0);
    }
}

/* C^T (HS, TILE) += X^T (HS, nk) weights (nk, TILE): how O^T gathers V, and dQ^T gathers K. */
static void add_to_queries(float *C, const float *X, int64_t width, const float *weights, int64_t nk, int64_t nq,
                           int64_t HS, int diagonal, int finite)
{
    int64_t N = round_up(nq, LANES);
    if (!diagonal) {
        tile_product(C, TILE, X, 1, width, weights, TILE, HS, N, nk, 1);
    } else if (!finite) {
        add_triangle(C, 1, TILE, X, width, weights, 0, nq, HS);
    } else {
        for (int64_t n = 0; n < N; n += LANES)
            tile_product(C + n, TILE, X, 1, width, weights + n, TILE, HS, LANES, nk < n + LANES ? nk : n + LANES, 1);
    }
}

/* C (nk, width) += weights (nk, nq) X (nq, width): how dV gathers dO, and dK gathers Q. */
static void add_to_keys(float *C, const float *X, int64_t width, const float *weights, int64_t nk, int64_t nq, int64_t HS,
                        int diagonal, int finite)
{
    if (!diagonal) {
        tile_product(C, width, weights, TILE, 1, X, width, nk, width, nq, 1);
    } else if (!finite) {
        add_triangle(C, width, 1, X, width, weights, 1, nq, HS);
    } else {
        for (int64_t j = 0; j < nk; j += ROWS)
            tile_product(C + j * width, width, weights + j * TILE + j, TILE, 1, X + j * width, width,
                         nk - j < ROWS ? nk - j : ROWS, width, nq - j, 1);
    }
}

/* --- a thread's memory -------------------------------------------------------------------------------------------- */

/* Carved from one thread's part of scratch. width is HS rounded up to whole vectors. */
typedef struct Work {
    int64_t width;
    float *Qt, *dOt;         /* (HS, TILE); Qt holds scale * Q^T */
    float *Ot;               /* (HS, TILE): O^T forward, dQ^T backward */
    float *S, *dS;           /* (TILE, TILE), keys x queries: S^T then P^T; dP^T then dS^T */
    float *K, *V, *Q, *dO;   /* (TILE, width) */
    float *max, *sum, *D;    /* (TILE): backward keeps 1/l in sum */
    float *dK, *dV;          /* (rows, width): a whole head, or one tile */
    int finite_q, finite_do; /* whether the loaded rows of Q and dO are */
} Work;

/* Takes `count` floats from *memory, or only counts them where `base` is NULL. */
static float *take(float *base, size_t *used, int64_t count)
{
    float *part = base ? base + *used : NULL;
    *used += (size_t)round_up(count, 16); /* every part on a cache line */
    return part;
}

/* Lays out one thread's memory from `base`; returns its size in floats. */
static size_t work_layout(Work *work, float *base, int64_t HS, int64_t gradient_rows)
{
    size_t used = 0;
    int64_t width = round_up(HS, LANES);
    work->width = width;
    work->Qt = take(base, &used, HS * TILE);
    work->Ot = take(base, &used, HS * TILE);
    work->S = take(base, &used, TILE * TILE);
    work->K = take(base, &used, TILE * width);
    work->V = take(base, &used, TILE * width);
    work->max = take(base, &used, TILE);
    work->sum = take(base, &used, TILE);
    if (gradient_rows) {
        work->dOt = take(base, &used, HS * TILE);
        work->dS = take(base, &used, TILE * TILE);
        work->Q = take(base, &used, TILE * width);
        work->dO = take(base, &used, TILE * width);
        work->D = take(base, &used, TILE);
        work->dK = take(base, &used, gradient_rows * width);
        work->dV = take(base, &used, gradient_rows * width);
    }
    return used;
}

/* The part of scratch that belongs to the calling thread. */
static void work_open(Work *work, void *scratch, int64_t HS, int64_t gradient_rows)
{
    size_t floats = work_layout(work, NULL, HS, gradient_rows);
    float *start = (float *)(((uintptr_t)scratch + 63) / 64 * 64);
    work_layout(work, start + floats * (size_t)omp_get_thread_num(), HS, gradient_rows);
}

/* Tiles in T rows; rows of tile number i. */
static int64_t tile_count(int64_t T) { return (T + TILE - 1) / TILE; }
static int64_t tile_rows(int64_t T, int64_t i) { return T - i * TILE < TILE ? T - i * TILE : TILE; }

static const float *input_row(AttentionInput view, int64_t b, int64_t h, int64_t t)
{
    return (const float *)view.data + b * view.batch_stride + t * view.row_stride + h * view.head_stride;
}

static float *output_row(AttentionOutput view, int64_t b, int64_t h, int64_t t)
{
    return (float *)view.data + b * view.batch_stride + t * view.row_stride + h * view.head_stride;
}

/* A team no larger than its work: an idle thread still has to be waited for. */
static inline int team_size(int64_t tasks)
{
    int64_t threads = omp_get_max_threads();
    return (int)(tasks < 1 ? 1 : tasks < threads ? tasks : threads);
}

/* Whether backward takes heads as tasks. The other way costs 7/5 of the products, so it wins where more than 5/7 of the
 * threads' time would be idle at the end. */
static int by_heads(const AttentionShape *shape)
{
    int64_t heads = shape->B * shape->NH, threads = omp_get_max_threads();
    int64_t rounds = (heads + threads - 1) / threads;
    return tile_count(shape->T) == 1 || heads * 7 >= rounds * threads * 5;
}

/* --- forward ------------------------------------------------------------------------------------------------------ */

/* Turns S^T (nk keys) into P^T in units of the new running maximum, updates it and the running sum, and rescales O^T. */
static void softmax_tile(Work *work, int64_t nk, int64_t nq, int64_t HS, int diagonal)
{
    for (int64_t first = 0; first < nq; first += LANES) {
        float *S = work->S + first;
        int64_t keys = diagonal && first + LANES < nk ? first + LANES : nk;
        Vector old = load(work->max + first), max = old, sum = splat(0);
        for (int64_t j = 0; j < keys; j++) {
            Vector s = load(S + j * TILE);
            if (diagonal && j > first) {
                s = choose(lanes_from(j, first), s, splat(-INFINITY));
                store(S + j * TILE, s);
            }
            max = choose(s > max, s, max); /* a NaN is passed over here; its exponential is a NaN */
        }
        /* While every logit is -inf, count from 0: -inf - -inf is no number. */
        Vector base = choose(max == -INFINITY, splat(0), max);
        for (int64_t j = 0; j < keys; j++) {
            Vector p = exp_nonpositive(load(S + j * TILE) - base);
            sum += p;
            store(S + j * TILE, p);
        }
        Vector shrink = exp_nonpositive(old - base);
        store(work->max + first, max);
        store(work->sum + first, load(work->sum + first) * shrink + sum);
        for (int64_t d = 0; d < HS; d++) store(work->Ot + d * TILE + first, load(work->Ot + d * TILE + first) * shrink);
    }
}

/* O, LSE and saved of query tile i of head (b, h). */
static void forward_tile(Work *work, AttentionOutput O, float *LSE, float *saved, AttentionInput Q, AttentionInput K,
                         AttentionInput V, int64_t b, int64_t h, int64_t i, const AttentionShape *shape)
{
    int64_t T = shape->T, HS = shape->HS, nq = tile_rows(T, i), width = work->width;
    load_transposed(work->Qt, input_row(Q, b, h, i * TILE), Q.row_stride, nq, HS, shape->scale);
    memset(work->Ot, 0, (size_t)(HS * TILE) * sizeof(float));
    memset(work->sum, 0, TILE * sizeof(float));
    for (int64_t q = 0; q < TILE; q++) work->max[q] = -INFINITY;
    for (int64_t j = 0; j <= i; j++) {
        int64_t nk = tile_rows(T, j);
        int diagonal = j == i;
        load_rows(work->K, input_row(K, b, h, j * TILE), K.row_stride, nk, HS, width);
        int finite = load_rows(work->V, input_row(V, b, h, j * TILE), V.row_stride, nk, HS, width);
        key_query_product(work->S, work->K, width, work->Qt, nk, nq, HS, diagonal);
        softmax_tile(work, nk, nq, HS, diagonal);
        add_to_queries(work->Ot, work->V, width, work->S, nk, nq, HS, diagonal, finite);
    }
    int64_t row = (b * shape->NH + h) * T + i * TILE;
    for (int64_t q = 0; q < nq; q++) {
        LSE[row + q] = work->max[q] + logf(work->sum[q]);
        saved[2 * (row + q)] = work->max[q];
        saved[2 * (row + q) + 1] = work->sum[q] = 1 / work->sum[q];
    }
    for (int64_t d = 0; d < HS; d++)
        for (int64_t q = 0; q < nq; q += LANES)
            store(work->Ot + d * TILE + q, load(work->Ot + d * TILE + q) * load(work->sum + q));
    transpose(output_row(O, b, h, i * TILE), O.row_stride, work->Ot, TILE, HS, nq);
}

static const char *tiled_forward(AttentionOutput O, float *LSE, void *saved, void *scratch, AttentionInput Q,
                                 AttentionInput K, AttentionInput V, const AttentionShape *shape, void *stream)
{
    (void)stream;
    int64_t tiles = tile_count(shape->T), tasks = shape->B * shape->NH * tiles;
#pragma omp parallel num_threads(team_size(tasks))
    {
        Work work;
        work_open(&work, scratch, shape->HS, 0);
        /* The tiles of a head follow one another, while its keys are in the cache; the longest comes first. */
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < tasks; task++) {
            int64_t head = task / tiles, i = tiles - 1 - task % tiles;
            forward_tile(&work, O, LSE, saved, Q, K, V, head / shape->NH, head % shape->NH, i, shape);
        }
    }
    return NULL;
}

/* --- backward ----------------------------------------------------------------------------------------------------- */

typedef struct Gradients {
    AttentionOutput dQ, dK, dV;
    AttentionInput dO, Q, K, V, O;
    const float *saved;
    const AttentionShape *shape;
} Gradients;

/* Loads what backward needs of query tile i: Q and dO both ways, m, 1/l and D. Leaves O^T in work->Ot. */
static void load_queries(Work *work, const Gradients *g, int64_t b, int64_t h, int64_t i)
{
    int64_t T = g->shape->T, HS = g->shape->HS, nq = tile_rows(T, i), row = (b * g->shape->NH + h) * T + i * TILE;
    const float *dout = input_row(g->dO, b, h, i * TILE), *q_rows = input_row(g->Q, b, h, i * TILE);
    load_transposed(work->Qt, q_rows, g->Q.row_stride, nq, HS, g->shape->scale);
    load_transposed(work->dOt, dout, g->dO.row_stride, nq, HS, 1);
    work->finite_q = load_rows(work->Q, q_rows, g->Q.row_stride, nq, HS, work->width);
    work->finite_do = load_rows(work->dO, dout, g->dO.row_stride, nq, HS, work->width);
    load_transposed(work->Ot, input_row(g->O, b, h, i * TILE), g->O.row_stride, nq, HS, 1);
    for (int64_t q = 0; q < nq; q += LANES) {
        Vector D = splat(0);
        for (int64_t d = 0; d < HS; d++) D += load(work->dOt + d * TILE + q) * load(work->Ot + d * TILE + q);
        store(work->D + q, D);
    }
    for (int64_t q = 0; q < TILE; q++) work->max[q] = work->sum[q] = 0;
    for (int64_t q = 0; q < nq; q++) {
        float max = g->saved[2 * (row + q)];
        work->max[q] = max == -INFINITY ? 0 : max;
        work->sum[q] = g->saved[2 * (row + q) + 1];
    }
}

/* S^T becomes P^T, dP^T becomes dS^T, for nk keys. In a diagonal tile both are zero wherever key > query. */
static void softmax_backward_tile(Work *work, int64_t nk, int64_t nq, int diagonal)
{
    for (int64_t first = 0; first < nq; first += LANES) {
        Vector max = load(work->max + first), inverse = load(work->sum + first), D = load(work->D + first);
        for (int64_t j = 0; j < nk; j++) {
            float *S = work->S + j * TILE + first, *dS = work->dS + j * TILE + first;
            if (diagonal && j >= first + LANES) {
                store(S, splat(0));
                store(dS, splat(0));
                continue;
            }
            Vector p = exp_nonpositive(load(S) - max) * inverse, ds = p * (load(dS) - D);
            if (diagonal && j > first) {
                Mask live = lanes_from(j, first);
                p = choose(live, p, splat(0));
                ds = choose(live, ds, splat(0));
            }
            store(S, p);
            store(dS, ds);
        }
    }
}

/* The loaded queries of tile i against key tile j: adds to dQ^T in work->Ot where want_query, to dK and dV (nk, width)
 * where they are not NULL. */
static void backward_pair(Work *work, const Gradients *g, float *dK, float *dV, int want_query, int64_t b, int64_t h,
                          int64_t i, int64_t j)
{
    int64_t T = g->shape->T, HS = g->shape->HS, nq = tile_rows(T, i), nk = tile_rows(T, j), width = work->width;
    int diagonal = i == j;
    int finite = load_rows(work->K, input_row(g->K, b, h, j * TILE), g->K.row_stride, nk, HS, width);
    load_rows(work->V, input_row(g->V, b, h, j * TILE), g->V.row_stride, nk, HS, width);
    key_query_product(work->S, work->K, width, work->Qt, nk, nq, HS, diagonal);
    key_query_product(work->dS, work->V, width, work->dOt, nk, nq, HS, diagonal);
    softmax_backward_tile(work, nk, nq, diagonal);
    if (dK) {
        add_to_keys(dV, work->dO, width, work->S, nk, nq, HS, diagonal, work->finite_do);
        add_to_keys(dK, work->Q, width, work->dS, nk, nq, HS, diagonal, work->finite_q);
    }
    if (want_query) add_to_queries(work->Ot, work->K, width, work->dS, nk, nq, HS, diagonal, finite);
}

/* Writes dQ of query tile i from dQ^T, times the scale of the logits. */
static void write_query_gradient(Work *work, const Gradients *g, int64_t b, int64_t h, int64_t i)
{
    int64_t HS = g->shape->HS;
    float scale = g->shape->scale, *dQt = work->Ot;
    for (int64_t k = 0; k < HS * TILE; k += LANES) store(dQt + k, load(dQt + k) * scale);
    transpose(output_row(g->dQ, b, h, i * TILE), g->dQ.row_stride, work->Ot, TILE, HS, tile_rows(g->shape->T, i));
}

/* Writes dK and dV of `rows` keys from key `first` on. */
static void write_key_gradients(const Work *work, const Gradients *g, int64_t b, int64_t h, int64_t first, int64_t rows)
{
    int64_t HS = g->shape->HS, width = work->width;
    float scale = g->shape->scale;
    for (int64_t j = 0; j < rows; j++) {
        float *dk = output_row(g->dK, b, h, first + j), *dv = output_row(g->dV, b, h, first + j);
        const float *dk_sum = work->dK + j * width, *dv_sum = work->dV + j * width;
        int64_t d = 0;
        for (; d + LANES <= HS; d += LANES) {
            store(dk + d, load(dk_sum + d) * scale);
            store(dv + d, load(dv_sum + d));
        }
        for (; d < HS; d++) {
            dk[d] = dk_sum[d] * scale;
            dv[d] = dv_sum[d];
        }
    }
}

static void clear_key_gradients(Work *work, int64_t rows)
{
    memset(work->dK, 0, (size_t)(rows * work->width) * sizeof(float));
    memset(work->dV, 0, (size_t)(rows * work->width) * sizeof(float));
}

/* All three gradients of one head: the products S and dP of a pair of tiles serve all. */
static void backward_head(Work *work, const Gradients *g, int64_t b, int64_t h)
{
    int64_t T = g->shape->T;
    clear_key_gradients(work, T);
    for (int64_t i = 0; i < tile_count(T); i++) {
        load_queries(work, g, b, h, i);
        memset(work->Ot, 0, (size_t)(g->shape->HS * TILE) * sizeof(float));
        for (int64_t j = 0; j <= i; j++) {
            int64_t offset = j * TILE * work->width;
            backward_pair(work, g, work->dK + offset, work->dV + offset, 1, b, h, i, j);
        }
        write_query_gradient(work, g, b, h, i);
    }
    write_key_gradients(work, g, b, h, 0, T);
}

static void backward_query_tile(Work *work, const Gradients *g, int64_t b, int64_t h, int64_t i)
{
    load_queries(work, g, b, h, i);
    memset(work->Ot, 0, (size_t)(g->shape->HS * TILE) * sizeof(float));
    for (int64_t j = 0; j <= i; j++) backward_pair(work, g, NULL, NULL, 1, b, h, i, j);
    write_query_gradient(work, g, b, h, i);
}

static void backward_key_tile(Work *work, const Gradients *g, int64_t b, int64_t h, int64_t j)
{
    int64_t T = g->shape->T, nk = tile_rows(T, j);
    clear_key_gradients(work, nk);
    for (int64_t i = j; i < tile_count(T); i++) {
        load_queries(work, g, b, h, i);
        backward_pair(work, g, work->dK, work->dV, 0, b, h, i, j);
    }
    write_key_gradients(work, g, b, h, j * TILE, nk);
}

static const char *tiled_backward(AttentionOutput dQ, AttentionOutput dK, AttentionOutput dV, void *scratch,
                                  AttentionInput dO, AttentionInput Q, AttentionInput K, AttentionInput V,
                                  AttentionInput O, const float *LSE, const void *saved, const AttentionShape *shape,
                                  void *stream)
{
    (void)LSE, (void)stream;
    const Gradients g = {dQ, dK, dV, dO, Q, K, V, O, saved, shape};
    int64_t NH = shape->NH, heads = shape->B * NH, tiles = tile_count(shape->T);
    int whole_heads = by_heads(shape);
#pragma omp parallel num_threads(team_size(whole_heads ? heads : heads * tiles * 2))
    {
        Work work;
        work_open(&work, scratch, shape->HS, whole_heads ? shape->T : TILE);
        if (whole_heads) {
#pragma omp for schedule(dynamic)
            for (int64_t head = 0; head < heads; head++) backward_head(&work, &g, head / NH, head % NH);
        } else {
            /* The longest first: the last query tile and the first key tile see the most. */
#pragma omp for schedule(dynamic)
            for (int64_t task = 0; task < heads * tiles * 2; task++) {
                int64_t head = task / (2 * tiles), tile = task / 2 % tiles;
                if (task % 2) backward_key_tile(&work, &g, head / NH, head % NH, tile);
                else backward_query_tile(&work, &g, head / NH, head % NH, tiles - 1 - tile);
            }
        }
    }
    return NULL;
}

/* --- the table entry ---------------------------------------------------------------------------------------------- */

static const char *tiled_refuse(const AttentionShape *shape, int sm)
{
    (void)sm;
    if (shape->dtype != DTYPE_FP32) return "computes in fp32 only; bf16 is for a GPU";
    if (shape->HS < 1) return "needs a head dimension of at least 1";
    return NULL;
}

static size_t tiled_saved_bytes(const AttentionShape *shape)
{
    return (size_t)shape->B * (size_t)shape->NH * (size_t)shape->T * 2 * sizeof(float); /* m and 1/l of every row */
}

static size_t tiled_scratch_bytes(const AttentionShape *shape)
{
    Work work;
    size_t floats = work_layout(&work, NULL, shape->HS, by_heads(shape) && shape->T > TILE ? shape->T : TILE);
    return floats * (size_t)omp_get_max_threads() * sizeof(float) + 64;
}

const AttentionKernel attention_tiled = {
    .abi = ATTENTION_ABI,
    .device = ATTENTION_CPU,
    .name = "tiled",
    .summary = "flash: tiles, online softmax, vectors of queries, all cores",
    .refuse = tiled_refuse,
    .saved_bytes = tiled_saved_bytes,
    .scratch_bytes = tiled_scratch_bytes,
    .forward = tiled_forward,
    .backward = tiled_backward,
};
