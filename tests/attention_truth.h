/* attention_truth.h - what attention should give: random inputs, the float64 truth, and a plain same-precision computation.
 *
 * A problem holds dense tensors (B, NH, T, HS) on the host; how a kernel sees them (layout, device, type) is the business of
 * attention_check.h. Both computations here go row by row through columns j <= i and nothing else, so a NaN spreads in them
 * exactly as far as the formulas carry it. tests/bounds.h says what the measures beside the truth are for.
 */
#ifndef ATTENTION_TRUTH_H
#define ATTENTION_TRUTH_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "attention/attention.h"
#include "data/random.h"
#include "tests/bounds.h"

typedef enum InputKind {
    INPUT_NORMAL,   /* bell-shaped numbers off zero mean: errors relative to a zero sum say nothing */
    INPUT_HIGH,     /* all logits near +1e5, a few apart */
    INPUT_LOW,      /* all logits near -1e5, a few apart */
    INPUT_SPREAD,   /* logits from -1e5 to 1e5 */
} InputKind;

enum { INPUT_Q, INPUT_K, INPUT_V, INPUT_DO, INPUT_COUNT };

typedef struct Problem {
    AttentionShape shape;
    float *input[INPUT_COUNT];        /* (B, NH, T, HS), exact as factors of the shape's products */
    double *truth[QUANTITY_COUNT];    /* (B, NH, T, HS), LSE (B, NH, T) */
    float *plain[QUANTITY_COUNT];     /* the same, computed plainly in fp32 */
    double *terms[QUANTITY_COUNT];    /* (B, NH, T): how many u the plain computation's roundings move it at worst */
    double *squares[QUANTITY_COUNT];  /* (B, NH, T): the sum of the squares of the single ones */
    double *logits[QUANTITY_COUNT];   /* (B, NH, T): what an error of 1 in relative terms of the logits does to the row */
} Problem;

static inline int64_t quantity_width(const AttentionShape *shape, int quantity)
{
    return quantity == QUANTITY_LSE ? 1 : shape->HS;
}

/* x rounded to the type, ties to even. */
static inline float round_to(float x, Dtype dtype)
{
    uint32_t bits;
    if (dtype == DTYPE_FP32 || isnan(x)) return x;
    memcpy(&bits, &x, 4);
    bits = (bits + 0x7FFFu + (bits >> 16 & 1)) & 0xFFFF0000u;
    memcpy(&x, &bits, 4);
    return x;
}

/* x as a factor of the shape's products: rounded to its type, or to TF32, ties away from zero. */
static inline float round_factor(float x, const AttentionShape *shape)
{
    uint32_t bits;
    if (precision_of(shape) != PRECISION_TF32 || !isfinite(x)) return round_to(x, shape->dtype);
    memcpy(&bits, &x, 4);
    bits = (bits + 0x1000u) & 0xFFFFE000u;
    memcpy(&x, &bits, 4);
    return x;
}

static inline void *allocate_zeros(int64_t count, size_t size)
{
    void *memory = calloc((size_t)(count > 0 ? count : 1), size);
    if (!memory) {
        fprintf(stderr, "not enough memory for %lld elements of %zu bytes\n", (long long)count, size);
        exit(1);
    }
    return memory;
}

/* Close enough to a normal number for a test, and quick: four 16-bit uniform ones, centred and scaled to variance 1. */
static inline double random_bell(uint64_t *state)
{
    uint64_t bits = random_u64(state);
    int64_t sum = (int64_t)(bits & 0xFFFF) + (int64_t)(bits >> 16 & 0xFFFF) + (int64_t)(bits >> 32 & 0xFFFF) +
                  (int64_t)(bits >> 48);
    return (double)(sum - 2 * 65535) * (1.7320508 / 65536);
}

/* The larger and the smaller of two; `most` where `x` is NaN. */
static inline double larger(double most, double x) { return x > most ? x : most; }
static inline double smaller(double most, double x) { return x < most ? x : most; }

static inline void problem_fill(Problem *problem, InputKind kind, uint64_t seed)
{
    const AttentionShape *shape = &problem->shape;
    static const double mean[INPUT_COUNT] = {0.25, -0.125, 0.5, 0.375};
    double large = sqrt(1e5 / shape->scale), spread = 1e5 / (3 * sqrt((double)shape->HS) * shape->scale);
    int64_t count = shape->B * shape->NH * shape->T * shape->HS;
    uint64_t state = seed;
    for (int part = 0; part < INPUT_COUNT; part++)
        for (int64_t k = 0; k < count; k++) {
            double x = random_bell(&state) + mean[part];
            if (kind == INPUT_SPREAD && part == INPUT_Q) x *= spread;
            if (k % shape->HS == 0 && part <= INPUT_K) {
                if (kind == INPUT_HIGH) x = large;
                if (kind == INPUT_LOW) x = part == INPUT_K ? -large : large;
            }
            problem->input[part][k] = round_factor((float)x, shape);
        }
}

static inline double dot_in_double(const float *x, const float *y, int64_t n, double *absolute)
{
    double sum = 0, all = 0;
    for (int64_t i = 0; i < n; i++) {
        double term = (double)x[i] * y[i];
        sum += term;
        all += fabs(term);
    }
    *absolute = all;
    return sum;
}

static inline double largest_of(const float *x, int64_t n)
{
    double largest = 0;
    for (int64_t i = 0; i < n; i++) largest = larger(largest, fabs((double)x[i]));
    return largest;
}

static inline void add_scaled_double(double *y, double a, const float *x, int64_t n)
{
    for (int64_t i = 0; i < n; i++) y[i] += a * x[i];
}

/* One more rounding that moves a sum by u times this: their sum, which no luck exceeds, and the sum of their squares. */
static inline void add_term(double x, double *terms, double *squares)
{
    *terms += fabs(x);
    *squares += x * x;
}

/* The truth of query row i of one head; `row` (3, T) is room to work. */
static inline void truth_row(Problem *problem, int64_t head, int64_t i, double *row)
{
    int64_t T = problem->shape.T, HS = problem->shape.HS, base = head * T, me = base + i;
    double scale = problem->shape.scale, size = fabs(scale), *p = row, *dp = row + T, *dp_abs = row + 2 * T;
    const float *q = problem->input[INPUT_Q] + me * HS, *dout = problem->input[INPUT_DO] + me * HS;
    double max = -INFINITY, sum = 0, s_abs = 0, D = 0, D_abs = 0, absolute;
    for (int64_t j = 0; j <= i; j++) {
        p[j] = scale * dot_in_double(q, problem->input[INPUT_K] + (base + j) * HS, HS, &absolute);
        s_abs = larger(s_abs, size * absolute);
        if (p[j] > max) max = p[j];
    }
    if (max == -INFINITY) max = 0;
    for (int64_t j = 0; j <= i; j++) sum += p[j] = exp(p[j] - max);
    for (int64_t j = 0; j <= i; j++) {
        p[j] /= sum;
        dp[j] = dot_in_double(dout, problem->input[INPUT_V] + (base + j) * HS, HS, &dp_abs[j]);
        D += p[j] * dp[j];
        D_abs += p[j] * dp_abs[j];
    }
    double lse = problem->truth[QUANTITY_LSE][me] = max + log(sum);
    problem->terms[QUANTITY_LSE][me] = 1 + fabs(lse);
    problem->logits[QUANTITY_LSE][me] = s_abs;
    /* What the roundings of the plain computation do, each to first order: of P to O and so to D, of O to D, of P and of dS
     * to dS, of P to dV. Those of D move all of a row's dS together. */
    double q_max = largest_of(q, HS), do_max = largest_of(dout, HS), *o = problem->truth[QUANTITY_O] + me * HS;
    double D_terms = 0, D_squares = 0, D_reach = 0;
    for (int64_t j = 0; j <= i; j++) {
        add_term(p[j] * dp[j], &D_terms, &D_squares);
        add_scaled_double(o, p[j], problem->input[INPUT_V] + (base + j) * HS, HS);
    }
    if (precision_of(&problem->shape) != PRECISION_TF32)
        for (int64_t d = 0; d < HS; d++) add_term(dout[d] * o[d], &D_terms, &D_squares);
    for (int64_t j = 0; j <= i; j++) {
        const float *k = problem->input[INPUT_K] + (base + j) * HS, *v = problem->input[INPUT_V] + (base + j) * HS;
        int64_t you = base + j;
        double k_max = largest_of(k, HS), v_max = largest_of(v, HS), p_error = p[j] * ((1 - p[j]) * s_abs + fabs(lse));
        double ds = scale * p[j] * (dp[j] - D);
        double ds_error = size * (p_error * (fabs(dp[j]) + fabs(D)) + p[j] * (dp_abs[j] + D_abs));
        add_scaled_double(problem->truth[QUANTITY_DQ] + me * HS, ds, k, HS);
        add_scaled_double(problem->truth[QUANTITY_DK] + you * HS, ds, q, HS);
        add_scaled_double(problem->truth[QUANTITY_DV] + you * HS, p[j], dout, HS);
        add_term(p[j] * v_max, &problem->terms[QUANTITY_O][me], &problem->squares[QUANTITY_O][me]);
        add_term(p[j] * do_max, &problem->terms[QUANTITY_DV][you], &problem->squares[QUANTITY_DV][you]);
        for (int rounding = 0; rounding < 2; rounding++) {
            add_term(ds * k_max, &problem->terms[QUANTITY_DQ][me], &problem->squares[QUANTITY_DQ][me]);
            add_term(ds * q_max, &problem->terms[QUANTITY_DK][you], &problem->squares[QUANTITY_DK][you]);
        }
        D_reach += size * p[j] * k_max;
        problem->terms[QUANTITY_DK][you] += size * p[j] * q_max * D_terms;
        problem->squares[QUANTITY_DK][you] += size * p[j] * q_max * size * p[j] * q_max * D_squares;
        problem->logits[QUANTITY_O][me] += p_error * v_max;
        problem->logits[QUANTITY_DQ][me] += ds_error * k_max;
        problem->logits[QUANTITY_DK][you] += ds_error * q_max;
        problem->logits[QUANTITY_DV][you] += p_error * do_max;
    }
    problem->terms[QUANTITY_DQ][me] += D_reach * D_terms;
    problem->squares[QUANTITY_DQ][me] += D_reach * D_reach * D_squares;
}

/* y += a x, in fp32 */
static inline void add_scaled_float(float *y, float a, const float *x, int64_t n)
{
    for (int64_t i = 0; i < n; i++) y[i] += a * x[i];
}

static inline float dot_in_float(const float *x, const float *y, int64_t n)
{
    float sum = 0;
    for (int64_t i = 0; i < n; i++) sum += x[i] * y[i];
    return sum;
}

/* The plain computation of query row i of one head: its rows of P and dS materialised in `row` (2, T), each sum in fp32 in
 * the order of the formula. */
static inline void plain_row(Problem *problem, int64_t head, int64_t i, float *row)
{
    int64_t T = problem->shape.T, HS = problem->shape.HS, base = head * T * HS;
    Dtype dtype = problem->shape.dtype;
    float scale = problem->shape.scale, *p = row, *ds = row + T, max = -INFINITY, sum = 0, D = 0;
    const float *q = problem->input[INPUT_Q] + base + i * HS, *dout = problem->input[INPUT_DO] + base + i * HS;
    const float *K = problem->input[INPUT_K] + base, *V = problem->input[INPUT_V] + base;
    for (int64_t j = 0; j <= i; j++) {
        p[j] = scale * dot_in_float(q, K + j * HS, HS);
        if (p[j] > max) max = p[j];
    }
    if (max == -INFINITY) max = 0;
    for (int64_t j = 0; j <= i; j++) sum += p[j] = expf(p[j] - max);
    problem->plain[QUANTITY_LSE][head * T + i] = max + logf(sum);
    float *o = problem->plain[QUANTITY_O] + base + i * HS;
    for (int64_t j = 0; j <= i; j++) {
        p[j] = round_factor(p[j] / sum, &problem->shape);
        ds[j] = dot_in_float(dout, V + j * HS, HS);
        add_scaled_float(o, p[j], V + j * HS, HS);
    }
    for (int64_t d = 0; d < HS; d++) D += dout[d] * round_to(o[d], dtype); /* O as backward gets it, which is rounded */
    for (int64_t j = 0; j <= i; j++) ds[j] = round_factor(scale * p[j] * (ds[j] - D), &problem->shape);
    for (int64_t j = 0; j <= i; j++) {
        add_scaled_float(problem->plain[QUANTITY_DQ] + base + i * HS, ds[j], K + j * HS, HS);
        add_scaled_float(problem->plain[QUANTITY_DK] + base + j * HS, ds[j], q, HS);
        add_scaled_float(problem->plain[QUANTITY_DV] + base + j * HS, p[j], dout, HS);
    }
}

/* The plain results of a head as its type holds them. */
static inline void plain_round(Problem *problem, int64_t head)
{
    int64_t count = problem->shape.T * problem->shape.HS;
    for (int quantity = 0; quantity < QUANTITY_COUNT; quantity++) {
        if (quantity == QUANTITY_LSE) continue;
        float *values = problem->plain[quantity] + head * count;
        for (int64_t k = 0; k < count; k++) values[k] = round_to(values[k], problem->shape.dtype);
    }
}

/* Computes truth and plain results from the inputs as they are now. With `rows` (count) not NULL, of these queries of each
 * head only: then dK and dV are whole only where dO is 0 in all others. */
static inline void problem_solve_rows(Problem *problem, const int64_t *rows, int64_t count)
{
    int64_t T = problem->shape.T, heads = problem->shape.B * problem->shape.NH;
    for (int quantity = 0; quantity < QUANTITY_COUNT; quantity++) {
        size_t all = (size_t)(heads * T), elements = all * (size_t)quantity_width(&problem->shape, quantity);
        memset(problem->truth[quantity], 0, elements * sizeof(double));
        memset(problem->plain[quantity], 0, elements * sizeof(float));
        memset(problem->terms[quantity], 0, all * sizeof(double));
        memset(problem->squares[quantity], 0, all * sizeof(double));
        memset(problem->logits[quantity], 0, all * sizeof(double));
    }
#pragma omp parallel
    {
        double *row = (double *)allocate_zeros(3 * T, sizeof(double));
        float *plain = (float *)allocate_zeros(2 * T, sizeof(float));
#pragma omp for schedule(dynamic, 1)
        for (int64_t head = 0; head < heads; head++) {
            for (int64_t n = 0; n < (rows ? count : T); n++) {
                truth_row(problem, head, rows ? rows[n] : n, row);
                plain_row(problem, head, rows ? rows[n] : n, plain);
            }
            plain_round(problem, head);
        }
        free(row);
        free(plain);
    }
}

/* Makes Q and K so large that logits have no places left behind the point: all 133120, of which every logit is the same, or,
 * with a `factor` other than 0, what they are times that, a power of 2. */
static inline void problem_enlarge(Problem *problem, float factor)
{
    int64_t count = problem->shape.B * problem->shape.NH * problem->shape.T * problem->shape.HS;
    for (int part = INPUT_Q; part <= INPUT_K; part++)
        for (int64_t i = 0; i < count; i++)
            problem->input[part][i] = factor == 0 ? 133120 : problem->input[part][i] * factor;
    problem_solve_rows(problem, NULL, 0);
}

static inline void problem_solve(Problem *problem) { problem_solve_rows(problem, NULL, 0); }

/* A problem with random inputs, not yet solved. problem_free() it. */
static inline Problem problem_open(AttentionShape shape, InputKind kind, uint64_t seed)
{
    Problem problem;
    problem.shape = shape;
    int64_t rows = shape.B * shape.NH * shape.T;
    for (int part = 0; part < INPUT_COUNT; part++)
        problem.input[part] = (float *)allocate_zeros(rows * shape.HS, sizeof(float));
    for (int quantity = 0; quantity < QUANTITY_COUNT; quantity++) {
        int64_t count = rows * quantity_width(&shape, quantity);
        problem.truth[quantity] = (double *)allocate_zeros(count, sizeof(double));
        problem.plain[quantity] = (float *)allocate_zeros(count, sizeof(float));
        problem.terms[quantity] = (double *)allocate_zeros(rows, sizeof(double));
        problem.squares[quantity] = (double *)allocate_zeros(rows, sizeof(double));
        problem.logits[quantity] = (double *)allocate_zeros(rows, sizeof(double));
    }
    problem_fill(&problem, kind, seed);
    return problem;
}

/* A problem with random inputs, solved. problem_free() it. */
static inline Problem problem_create(AttentionShape shape, InputKind kind, uint64_t seed)
{
    Problem problem = problem_open(shape, kind, seed);
    problem_solve(&problem);
    return problem;
}

/* Makes the inputs of a solved problem that are exact in TF32 such as round to them: the truth stays. */
static inline void problem_blur(Problem *problem, uint64_t seed)
{
    int64_t count = problem->shape.B * problem->shape.NH * problem->shape.T * problem->shape.HS;
    for (int part = 0; part < INPUT_COUNT; part++)
        for (int64_t k = 0; k < count; k++) {
            uint32_t bits;
            memcpy(&bits, &problem->input[part][k], 4);
            if (problem->input[part][k] != 0) bits += (uint32_t)(random_u64(&seed) >> 51) - 0x1000u; /* -2^12 to 2^12 - 1 */
            memcpy(&problem->input[part][k], &bits, 4);
        }
}

/* Makes two keys, the first and a middle one, alike but for the last column, in which every query is 0 and they are large
 * numbers of opposite sign: what they give to dQ cancels, and with it goes what was added to one before the other. */
static inline void problem_cancel(Problem *problem)
{
    const AttentionShape *shape = &problem->shape;
    int64_t T = shape->T, HS = shape->HS;
    for (int64_t head = 0; head < shape->B * shape->NH; head++) {
        int64_t first = head * T * HS, middle = first + T / 2 * HS;
        for (int64_t t = 0; t < T; t++) problem->input[INPUT_Q][first + t * HS + HS - 1] = 0;
        for (int part = INPUT_K; part <= INPUT_V; part++)
            memcpy(&problem->input[part][middle], &problem->input[part][first], (size_t)HS * sizeof(float));
        problem->input[INPUT_K][first + HS - 1] = 0x1p30f;
        problem->input[INPUT_K][middle + HS - 1] = -0x1p30f;
    }
}

#define SAMPLED_ROWS 24

/* Solves a long problem, whose full truth would take minutes, in some rows: dO becomes 0 in all others, so that these rows
 * alone give all of dK and dV. They lie at the end and on both sides of what tiles there may be. T is at least 1000. */
static inline void problem_solve_sampled(Problem *problem, int64_t rows[SAMPLED_ROWS])
{
    int64_t T = problem->shape.T, HS = problem->shape.HS;
    for (int n = 0; n < SAMPLED_ROWS; n++) rows[n] = n < 8 ? T - 1 - n * n : (n - 7) * T / 18 / 32 * 32 - n % 2;
    for (int64_t at = 0; at < problem->shape.B * problem->shape.NH * T; at++) {
        int kept = 0;
        for (int n = 0; n < SAMPLED_ROWS; n++) kept = kept || rows[n] == at % T;
        if (!kept) memset(problem->input[INPUT_DO] + at * HS, 0, (size_t)HS * sizeof(float));
    }
    problem_solve_rows(problem, rows, SAMPLED_ROWS);
}

static inline void problem_free(Problem *problem)
{
    for (int part = 0; part < INPUT_COUNT; part++) free(problem->input[part]);
    for (int quantity = 0; quantity < QUANTITY_COUNT; quantity++) {
        free(problem->truth[quantity]);
        free(problem->plain[quantity]);
        free(problem->terms[quantity]);
        free(problem->squares[quantity]);
        free(problem->logits[quantity]);
    }
}

#endif
