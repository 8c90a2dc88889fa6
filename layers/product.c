/* product.c - single-precision matrix products: our own, and CBLAS where there is one, on slices of C, a slice a thread.
 *
 * Our own is the construction of Goto and van de Geijn ("Anatomy of High-Performance Matrix Multiplication", 2008). A tile
 * of ROWS x COLUMNS of C stays in registers while K runs:
 *
 *              COLUMNS = two vectors
 *             +-----------------+       for k:  two loads from B's panel, ROWS broadcasts from A's panel,
 *       ROWS  |  C in registers |               2 * ROWS multiply-adds
 *             +-----------------+
 *
 * Panels are packed so that both are read as one stream, whatever the layout of A and B in memory; a block of A of BLOCK_M
 * x BLOCK_K stays in the second cache while the panels of B (BLOCK_K x BLOCK_N) pass over it. Packing costs one read and
 * one write an element for 2*N (2*M) operations; where K is contiguous it is a transposition, done in registers.
 *
 * A finished tile is added to the bias row, to zeros, or to what C holds, so none of the three needs a pass of its own, and
 * GELU is applied to it while it is in the first cache.
 *
 * Every element of C is summed in the same order wherever the slices and tiles lie, so our own product gives the same bits
 * for any number of threads.
 *
 * A product of a few rows with a weight that lies row by row (what writing one token after another asks for) reads the
 * weight once and uses it a few times: there packing would cost more than the product, and product_thin takes it instead,
 * as dot products along both.
 */
#include "layers/product.h"

#include <stdio.h>

#include "layers/gelu.h"
#include "layers/vector.h"

#ifdef HAVE_CBLAS
#include <cblas.h>
#endif

/* The tile fills the registers: 2*ROWS sums, two vectors of B and one of A, of 32 (AVX-512, ARM) or 16. */
#if WIDTH == 16
#define ROWS 12
#elif WIDTH == 8
#define ROWS 6
#elif defined(__aarch64__)
#define ROWS 8
#else
#define ROWS 4
#endif
#define COLUMNS (2 * WIDTH)

enum { BLOCK_M = 16 * ROWS, BLOCK_N = 16 * COLUMNS, BLOCK_K = 384 };

/* A transposed panel is stored in whole vectors, so its last one may reach past its end: hence the WIDTH. */
enum { BUFFER_A = BLOCK_M * BLOCK_K + WIDTH, BUFFER_B = BLOCK_N * BLOCK_K };

_Static_assert(ROWS <= WIDTH || ROWS % WIDTH == 0, "a transposed panel may run over into its own next row only");

size_t product_buffer(void) { return ((size_t)(BUFFER_A + BUFFER_B) + 1023) / 1024 * 1024; }

/* --- packing ------------------------------------------------------------------------------------------------------- */

/* Lanes of a and b taken in turn, from their lower and from their upper halves. */
#if WIDTH == 16
#define ZIP_LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define ZIP_HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif WIDTH == 8
#define ZIP_LOW 0, 8, 1, 9, 2, 10, 3, 11
#define ZIP_HIGH 4, 12, 5, 13, 6, 14, 7, 15
#else
#define ZIP_LOW 0, 4, 1, 5
#define ZIP_HIGH 2, 6, 3, 7
#endif

#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (VectorInt){__VA_ARGS__})
#endif

/* Transposes a square of WIDTH vectors: log2(WIDTH) times, zip row i with row i + WIDTH/2 into rows 2i and 2i+1. */
static inline void transpose_square(Vector square[WIDTH])
{
    UNROLL for (int round = 1; round < WIDTH; round *= 2) {
        Vector zipped[WIDTH];
        UNROLL for (int i = 0; i < WIDTH / 2; i++) {
            zipped[2 * i] = SHUFFLE(square[i], square[i + WIDTH / 2], ZIP_LOW);
            zipped[2 * i + 1] = SHUFFLE(square[i], square[i + WIDTH / 2], ZIP_HIGH);
        }
        UNROLL for (int i = 0; i < WIDTH; i++) square[i] = zipped[i];
    }
}

/* panel[k*width + i] = source[k*stride + i] for i < lanes, 0 for lanes <= i < width; k < K. */
static void pack_copy(float *panel, const float *source, int64_t stride, int64_t lanes, int64_t width, int64_t K)
{
    if (lanes == width) {
        for (int64_t k = 0; k < K; k++) memcpy(panel + k * width, source + k * stride, (size_t)width * sizeof(float));
        return;
    }
    for (int64_t k = 0; k < K; k++)
        for (int64_t i = 0; i < width; i++) panel[k * width + i] = i < lanes ? source[k * stride + i] : 0;
}

/* panel[k*width + i] = source[i*stride + k] for i < lanes, 0 for lanes <= i < width; k < K. Writes up to WIDTH floats
 * more. */
static void pack_transpose(float *panel, const float *source, int64_t stride, int64_t lanes, int64_t width, int64_t K)
{
    int64_t whole = K - K % WIDTH;
    for (int64_t k = 0; k < whole; k += WIDTH)
        for (int64_t i = 0; i < width; i += WIDTH) {
            Vector square[WIDTH];
            UNROLL for (int r = 0; r < WIDTH; r++)
                square[r] = i + r < lanes ? vector_load(source + (i + r) * stride + k) : (Vector){0};
            transpose_square(square);
            UNROLL for (int r = 0; r < WIDTH; r++) vector_store(panel + (k + r) * width + i, square[r]);
        }
    for (int64_t k = whole; k < K; k++)
        for (int64_t i = 0; i < width; i++) panel[k * width + i] = i < lanes ? source[i * stride + k] : 0;
}

/* Packs rows [row, row+m) and k in [k0, k0+K) of A into panels of ROWS. */
static void pack_a(float *panels, Matrix a, int64_t row, int64_t m, int64_t k0, int64_t K)
{
    for (int64_t i = 0; i < m; i += ROWS) {
        int64_t lanes = cpu_min(ROWS, m - i);
        if (a.transposed) pack_copy(panels + i * K, a.data + k0 * a.stride + row + i, a.stride, lanes, ROWS, K);
        else pack_transpose(panels + i * K, a.data + (row + i) * a.stride + k0, a.stride, lanes, ROWS, K);
    }
}

/* Packs columns [column, column+n) and k in [k0, k0+K) of B into panels of COLUMNS. */
static void pack_b(float *panels, Matrix b, int64_t column, int64_t n, int64_t k0, int64_t K)
{
    for (int64_t j = 0; j < n; j += COLUMNS) {
        int64_t lanes = cpu_min(COLUMNS, n - j);
        if (b.transposed) pack_transpose(panels + j * K, b.data + (column + j) * b.stride + k0, b.stride, lanes, COLUMNS, K);
        else pack_copy(panels + j * K, b.data + k0 * b.stride + column + j, b.stride, lanes, COLUMNS, K);
    }
}

/* --- the tile ------------------------------------------------------------------------------------------------------ */

/* c (rows, COLUMNS) = init (rows, COLUMNS) + a-panel b-panel; with init_stride 0, every row gets the same one. The sum of
 * the block is taken by itself: added to a C that many blocks have made large, its terms would lose their digits. */
static inline __attribute__((always_inline)) void tile_rows(const int rows, float *c, int64_t c_stride, const float *init,
                                                            int64_t init_stride, const float *a, const float *b, int64_t K)
{
    Vector sum[ROWS][2];
    UNROLL for (int i = 0; i < rows; i++) sum[i][0] = sum[i][1] = (Vector){0};
    for (int64_t k = 0; k < K; k++, a += ROWS, b += COLUMNS) {
        Vector b0 = vector_load(b), b1 = vector_load(b + WIDTH);
        UNROLL for (int i = 0; i < rows; i++) {
            sum[i][0] += a[i] * b0;
            sum[i][1] += a[i] * b1;
        }
    }
    UNROLL for (int i = 0; i < rows; i++) {
        const float *row = init + i * init_stride;
        vector_store(c + i * c_stride, vector_load(row) + sum[i][0]);
        vector_store(c + i * c_stride + WIDTH, vector_load(row + WIDTH) + sum[i][1]);
    }
}

#define TILE_CASE(n) \
    case n: tile_rows(n, c, c_stride, init, init_stride, a, b, K); break;

static void tile_compute(int64_t rows, float *c, int64_t c_stride, const float *init, int64_t init_stride, const float *a,
                         const float *b, int64_t K)
{
    switch (rows) {
        TILE_CASE(1) TILE_CASE(2) TILE_CASE(3) TILE_CASE(4)
#if ROWS > 4
        TILE_CASE(5) TILE_CASE(6)
#endif
#if ROWS > 6
        TILE_CASE(7) TILE_CASE(8)
#endif
#if ROWS > 8
        TILE_CASE(9) TILE_CASE(10) TILE_CASE(11) TILE_CASE(12)
#endif
    }
}

/* What a finished part of C goes through: rows [i, i+m), columns [j, j+n). */
static void product_finish(const Product *p, int64_t i, int64_t j, int64_t m, int64_t n)
{
    for (int64_t r = i; r < i + m; r++) {
        int64_t at = r * p->c_stride + j;
        if (p->gelu) gelu_range(p->gelu + at, p->c + at, n);
        if (p->pre) gelu_derivative_range(p->c + at, p->pre + at, n);
    }
}

/* One tile of C at (i,j) for one block of k: from the block's panels, edges included. */
static void tile_run(const Product *p, int64_t i, int64_t j, const float *a, const float *b, int64_t k0, int64_t K)
{
    static const float zeros[COLUMNS] = {0};
    int64_t m = cpu_min(ROWS, p->M - i), n = cpu_min(COLUMNS, p->N - j);
    float *c = p->c + i * p->c_stride + j;
    const float *init = k0 > 0 || p->accumulate ? c : p->bias ? p->bias + j : zeros;
    int64_t init_stride = init == c ? p->c_stride : 0;
    if (n == COLUMNS) {
        tile_compute(m, c, p->c_stride, init, init_stride, a, b, K);
    } else {
        float edge[ROWS * COLUMNS] = {0}; /* a whole tile, of which n columns are C's */
        for (int64_t r = 0; r < m; r++) memcpy(edge + r * COLUMNS, init + r * init_stride, (size_t)n * sizeof(float));
        tile_compute(m, edge, COLUMNS, edge, COLUMNS, a, b, K);
        for (int64_t r = 0; r < m; r++) memcpy(c + r * p->c_stride, edge + r * COLUMNS, (size_t)n * sizeof(float));
    }
    if (k0 + K == p->K && (p->gelu || p->pre)) product_finish(p, i, j, m, n);
}

void product_own(const Product *p, float *buffer)
{
    float *panels_a = buffer + BUFFER_B, *panels_b = buffer;
    for (int64_t j0 = 0; j0 < p->N; j0 += BLOCK_N) {
        int64_t n = cpu_min(BLOCK_N, p->N - j0);
        int64_t k0 = 0;
        do { /* once also where K is 0: C is the bias then, or zeros */
            int64_t K = cpu_min(BLOCK_K, p->K - k0);
            pack_b(panels_b, p->b, j0, n, k0, K);
            for (int64_t i0 = 0; i0 < p->M; i0 += BLOCK_M) {
                int64_t m = cpu_min(BLOCK_M, p->M - i0);
                pack_a(panels_a, p->a, i0, m, k0, K);
                for (int64_t j = 0; j < n; j += COLUMNS)
                    for (int64_t i = 0; i < m; i += ROWS)
                        tile_run(p, i0 + i, j0 + j, panels_a + i * K, panels_b + j * K, k0, K);
            }
            k0 += BLOCK_K;
        } while (k0 < p->K);
    }
}

int product_own_is_fast(void) { return WIDTH == 16; }

/* --- few rows ------------------------------------------------------------------------------------------------------ */

/* Up to how many rows packing loses; of them, how many share a pass over a row of B; chains of sums of each, which hide the
 * latency of the additions. */
enum { THIN_MOST = 8, THIN_ROWS = 4, THIN_CHAINS = 4 };

/* c[i * c_stride] = dot of a's row i and b (K), plus bias, for i < rows. A sum's order depends on K alone, not on how many
 * rows there are: a row of a batch gets the bits that it gets alone. */
static inline __attribute__((always_inline)) void thin_dots(const int rows, float *c, int64_t c_stride, const float *a,
                                                            int64_t a_stride, const float *b, int64_t K, float bias)
{
    Vector sum[THIN_ROWS][THIN_CHAINS];
    int64_t k = 0;
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int u = 0; u < THIN_CHAINS; u++) sum[i][u] = (Vector){0};
    for (; k + THIN_CHAINS * WIDTH <= K; k += THIN_CHAINS * WIDTH)
        UNROLL for (int u = 0; u < THIN_CHAINS; u++) {
            Vector weight = vector_load(b + k + u * WIDTH);
            UNROLL for (int i = 0; i < rows; i++) sum[i][u] += vector_load(a + i * a_stride + k + u * WIDTH) * weight;
        }
    for (; k < K; k += WIDTH) {
        int64_t left = cpu_min(WIDTH, K - k);
        Vector weight = vector_load_part(b + k, left, 0);
        UNROLL for (int i = 0; i < rows; i++) sum[i][0] += vector_load_part(a + i * a_stride + k, left, 0) * weight;
    }
    UNROLL for (int i = 0; i < rows; i++) {
        Vector whole = (sum[i][0] + sum[i][1]) + (sum[i][2] + sum[i][3]);
        c[i * c_stride] = (float)vector_sum(whole) + bias;
    }
}

_Static_assert(THIN_CHAINS == 4 && THIN_ROWS == 4, "thin_dots adds up four chains, product_thin knows up to four rows");

static int product_is_thin(const Product *p)
{
    return p->M <= THIN_MOST && p->b.transposed && !p->a.transposed && !p->accumulate;
}

/* A product that product_is_thin, on this thread. */
static void product_thin(const Product *p)
{
    for (int64_t j = 0; j < p->N; j++) {
        const float *b = p->b.data + j * p->b.stride; /* (K) */
        float bias = p->bias ? p->bias[j] : 0;
        for (int64_t i = 0; i < p->M; i += THIN_ROWS) {
            const float *a = p->a.data + i * p->a.stride; /* (rows, K) */
            float *c = p->c + i * p->c_stride + j;        /* (rows) */
            switch (cpu_min(THIN_ROWS, p->M - i)) {
            case 1: thin_dots(1, c, p->c_stride, a, p->a.stride, b, p->K, bias); break;
            case 2: thin_dots(2, c, p->c_stride, a, p->a.stride, b, p->K, bias); break;
            case 3: thin_dots(3, c, p->c_stride, a, p->a.stride, b, p->K, bias); break;
            default: thin_dots(4, c, p->c_stride, a, p->a.stride, b, p->K, bias);
            }
        }
    }
    if (p->gelu || p->pre) product_finish(p, 0, 0, p->M, p->N);
}

/* --- CBLAS --------------------------------------------------------------------------------------------------------- */

#ifdef HAVE_CBLAS

/* Only OpenBLAS has these; another CBLAS leaves them NULL. */
extern void openblas_set_num_threads(int) __attribute__((weak));
extern char *openblas_get_config(void) __attribute__((weak));
extern char *openblas_get_corename(void) __attribute__((weak));

int product_has_blas(void) { return 1; }

const char *product_blas_name(char *text, size_t size)
{
    char version[64] = "OpenBLAS";
    if (!openblas_get_config || !openblas_get_corename) {
        snprintf(text, size, "CBLAS");
        return text;
    }
    sscanf(openblas_get_config(), "OpenBLAS %50s", version + snprintf(version, sizeof version, "OpenBLAS "));
    snprintf(text, size, "%s (%s)", version, openblas_get_corename());
    return text;
}

void product_blas_threads(int threads)
{
    if (openblas_set_num_threads) openblas_set_num_threads(threads);
}

void product_blas(const Product *p)
{
    if (p->bias)
        for (int64_t i = 0; i < p->M; i++) memcpy(p->c + i * p->c_stride, p->bias, (size_t)p->N * sizeof(float));
    if (p->M > 0 && p->N > 0)
        cblas_sgemm(CblasRowMajor, p->a.transposed ? CblasTrans : CblasNoTrans, p->b.transposed ? CblasTrans : CblasNoTrans,
                    (int)p->M, (int)p->N, (int)p->K, 1, p->a.data, (int)p->a.stride, p->b.data, (int)p->b.stride,
                    p->bias || p->accumulate ? 1 : 0, p->c, (int)p->c_stride);
    if (p->gelu || p->pre) product_finish(p, 0, 0, p->M, p->N);
}

#else

int product_has_blas(void) { return 0; }

const char *product_blas_name(char *text, size_t size)
{
    snprintf(text, size, "no CBLAS");
    return text;
}

void product_blas_threads(int threads) { (void)threads; }

void product_blas(const Product *p) { (void)p; }

#endif

/* --- threads ------------------------------------------------------------------------------------------------------- */

/* Rows [i, i+m) and columns [j, j+n) of a product. */
static Product product_slice(const Product *p, int64_t i, int64_t j, int64_t m, int64_t n)
{
    Product slice = *p;
    int64_t at = i * p->c_stride + j;
    slice.c += at;
    slice.a.data += p->a.transposed ? i : i * p->a.stride;
    slice.b.data += p->b.transposed ? j * p->b.stride : j;
    if (slice.bias) slice.bias += j;
    if (slice.gelu) slice.gelu += at;
    if (slice.pre) slice.pre += at;
    slice.M = m;
    slice.N = n;
    return slice;
}

/* The division of C into down x across = threads slices that costs the slowest thread least: its tiles, and its packing, of
 * which an element takes about eight times a multiply-add's share of a vector. */
static int64_t slices_across(const Product *p, int64_t threads)
{
    int64_t tiles_down = (p->M + ROWS - 1) / ROWS, tiles_across = (p->N + COLUMNS - 1) / COLUMNS, best = 1;
    double least = 0;
    for (int64_t across = 1; across <= threads; across++) {
        if (threads % across) continue;
        int64_t down = threads / across;
        double rows = (double)((tiles_down + down - 1) / down * ROWS);
        double columns = (double)((tiles_across + across - 1) / across * COLUMNS);
        double cost = rows * columns + 8 * (rows + columns);
        if (across == 1 || cost < least) least = cost, best = across;
    }
    return best;
}

void product_run(const Product *p, const Stream *stream)
{
    /* Multiply-adds that take about as long as waking the threads. */
    const double small = 3e5;
    int64_t threads = (double)p->M * (double)p->N * (double)p->K < small ? 1 : stream->threads;
    int64_t across = slices_across(p, threads), down = threads / across;
    int64_t tiles_down = (p->M + ROWS - 1) / ROWS, tiles_across = (p->N + COLUMNS - 1) / COLUMNS;
#pragma omp parallel for schedule(static, 1) num_threads((int)threads) if (threads > 1)
    for (int64_t s = 0; s < threads; s++) {
        int64_t y = s / across, x = s % across;
        int64_t i = tiles_down * y / down * ROWS, j = tiles_across * x / across * COLUMNS;
        int64_t m = cpu_min(tiles_down * (y + 1) / down * ROWS, p->M) - i;
        int64_t n = cpu_min(tiles_across * (x + 1) / across * COLUMNS, p->N) - j;
        if (m <= 0 || n <= 0) continue;
        Product slice = product_slice(p, i, j, m, n);
        if (product_is_thin(p)) product_thin(&slice);
        else if (stream->blas) product_blas(&slice);
        else product_own(&slice, stream->buffers + (size_t)s * product_buffer());
    }
}
