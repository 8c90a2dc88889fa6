/* reference.c - attention as the formulas have it, on the CPU: the oracle that every other version is checked against.
 *
 * The algorithm. For each batch entry and head, P (T x T, lower triangle) is built row by row in double and stored; O is
 * P V. Backward builds P again by the same code, then dP = dO V^T and dS = P * (dP - D) with D_i = sum_j P_ij dP_ij, and
 * takes dQ = dS K, dK = dS^T Q and dV = P^T dO from them, all accumulated in double and rounded once at the end.
 *
 *        j ->            Row i reads columns 0..i and no others, so that whatever stands above the diagonal (NaN too)
 *      i # . . .         cannot reach it. Nothing is taken from the forward's O or LSE: the backward is exact on its own.
 *      | # # . .
 *      v # # # .
 *        # # # #
 *
 * Memory: two T x T matrices of doubles for each head in flight. Heads run in parallel, as many as keep that within
 * MEMORY_LIMIT, one at the least.
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

#define MEMORY_LIMIT ((size_t)256 << 20)

/* Beyond this, T x T doubles are petabytes and byte counts near the end of size_t. */
#define MAX_T ((int64_t)1 << 24)

/* One head in flight: its matrices and accumulators, laid out one after another in scratch. */
typedef struct Workspace {
    double *P;      /* (T, T) */
    double *dS;     /* (T, T) */
    double *dK, *dV; /* (T, HS) */
    double *row;    /* (HS) */
} Workspace;

static size_t workspace_doubles(const AttentionShape *shape)
{
    size_t T = (size_t)shape->T, HS = (size_t)shape->HS;
    return 2 * T * T + 2 * T * HS + HS;
}

static Workspace workspace_at(double *memory, const AttentionShape *shape)
{
    int64_t T = shape->T, HS = shape->HS;
    Workspace work;
    work.P = memory;
    work.dS = work.P + T * T;
    work.dK = work.dS + T * T;
    work.dV = work.dK + T * HS;
    work.row = work.dV + T * HS;
    return work;
}

/* Where the workspaces start: the contract aligns scratch to nothing. */
static double *scratch_start(void *scratch)
{
    return (double *)(((uintptr_t)scratch + sizeof(double) - 1) / sizeof(double) * sizeof(double));
}

static int heads_at_once(const AttentionShape *shape)
{
    size_t heads = MEMORY_LIMIT / (workspace_doubles(shape) * sizeof(double));
    size_t most = (size_t)(shape->B * shape->NH), threads = (size_t)omp_get_max_threads();
    if (heads > threads) heads = threads;
    if (heads > most) heads = most;
    return heads ? (int)heads : 1;
}

static const char *reference_refuse(const AttentionShape *shape, int sm)
{
    (void)sm;
    if (shape->dtype != DTYPE_FP32) return "computes in fp32 only; bf16 is for a GPU";
    if (shape->HS < 1) return "needs a head dimension of at least 1";
    if (shape->T > MAX_T) return "keeps T x T matrices and stops at T = 16777216";
    return NULL;
}

static size_t reference_saved_bytes(const AttentionShape *shape)
{
    (void)shape;
    return 0;
}

static size_t reference_scratch_bytes(const AttentionShape *shape)
{
    return (size_t)heads_at_once(shape) * workspace_doubles(shape) * sizeof(double) + sizeof(double);
}

static const float *input_row(AttentionInput view, int64_t b, int64_t h, int64_t t)
{
    return (const float *)view.data + b * view.batch_stride + t * view.row_stride + h * view.head_stride;
}

static float *output_row(AttentionOutput view, int64_t b, int64_t h, int64_t t)
{
    return (float *)view.data + b * view.batch_stride + t * view.row_stride + h * view.head_stride;
}

static double dot(const float *x, const float *y, int64_t n)
{
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += (double)x[i] * y[i];
    return sum;
}

/* y += a x */
static void add_scaled(double *y, double a, const float *x, int64_t n)
{
    for (int64_t i = 0; i < n; i++) y[i] += a * x[i];
}

static void round_row(float *out, const double *row, int64_t n)
{
    for (int64_t i = 0; i < n; i++) out[i] = (float)row[i];
}

/* P[0..i] = row i of the softmax; returns its log-sum-exp. */
static double softmax_row(double *P, AttentionInput Q, AttentionInput K, int64_t b, int64_t h, int64_t i,
                          const AttentionShape *shape)
{
    const float *q = input_row(Q, b, h, i);
    double max = -INFINITY, sum = 0;
    for (int64_t j = 0; j <= i; j++) {
        P[j] = shape->scale * dot(q, input_row(K, b, h, j), shape->HS);
        if (P[j] > max) max = P[j];
    }
    /* With every logit at -inf the sum is a true 0, its log -inf, and P 0/0: not a number. */
    double base = max == -INFINITY ? 0 : max;
    for (int64_t j = 0; j <= i; j++) {
        P[j] = exp(P[j] - base);
        sum += P[j];
    }
    for (int64_t j = 0; j <= i; j++) P[j] /= sum;
    return base + log(sum);
}

static const char *reference_forward(AttentionOutput O, float *LSE, void *saved, void *scratch, AttentionInput Q,
                                     AttentionInput K, AttentionInput V, const AttentionShape *shape, void *stream)
{
    (void)saved, (void)stream;
    int64_t T = shape->T, HS = shape->HS, heads = shape->B * shape->NH;
    double *memory = scratch_start(scratch);
#pragma omp parallel for num_threads(heads_at_once(shape)) schedule(dynamic)
    for (int64_t head = 0; head < heads; head++) {
        int64_t b = head / shape->NH, h = head % shape->NH;
        Workspace work = workspace_at(memory + (size_t)omp_get_thread_num() * workspace_doubles(shape), shape);
        for (int64_t i = 0; i < T; i++) LSE[head * T + i] = (float)softmax_row(work.P + i * T, Q, K, b, h, i, shape);
        for (int64_t i = 0; i < T; i++) {
            memset(work.row, 0, (size_t)HS * sizeof(double));
            for (int64_t j = 0; j <= i; j++) add_scaled(work.row, work.P[i * T + j], input_row(V, b, h, j), HS);
            round_row(output_row(O, b, h, i), work.row, HS);
        }
    }
    return NULL;
}

/* dS[0..i] = row i of the gradient of the logits Q K^T, scale included. */
static void logit_gradient_row(double *dS, const double *P, AttentionInput dO, AttentionInput V, int64_t b, int64_t h,
                               int64_t i, const AttentionShape *shape)
{
    const float *dout = input_row(dO, b, h, i);
    double D = 0;
    for (int64_t j = 0; j <= i; j++) {
        dS[j] = dot(dout, input_row(V, b, h, j), shape->HS);
        D += P[j] * dS[j];
    }
    for (int64_t j = 0; j <= i; j++) dS[j] = shape->scale * P[j] * (dS[j] - D);
}

static const char *reference_backward(AttentionOutput dQ, AttentionOutput dK, AttentionOutput dV, void *scratch,
                                      AttentionInput dO, AttentionInput Q, AttentionInput K, AttentionInput V,
                                      AttentionInput O, const float *LSE, const void *saved, const AttentionShape *shape,
                                      void *stream)
{
    (void)O, (void)LSE, (void)saved, (void)stream;
    int64_t T = shape->T, HS = shape->HS, heads = shape->B * shape->NH;
    double *memory = scratch_start(scratch);
#pragma omp parallel for num_threads(heads_at_once(shape)) schedule(dynamic)
    for (int64_t head = 0; head < heads; head++) {
        int64_t b = head / shape->NH, h = head % shape->NH;
        Workspace work = workspace_at(memory + (size_t)omp_get_thread_num() * workspace_doubles(shape), shape);
        for (int64_t i = 0; i < T; i++) {
            softmax_row(work.P + i * T, Q, K, b, h, i, shape);
            logit_gradient_row(work.dS + i * T, work.P + i * T, dO, V, b, h, i, shape);
        }
        memset(work.dK, 0, (size_t)(T * HS) * sizeof(double));
        memset(work.dV, 0, (size_t)(T * HS) * sizeof(double));
        for (int64_t i = 0; i < T; i++) {
            memset(work.row, 0, (size_t)HS * sizeof(double));
            for (int64_t j = 0; j <= i; j++) {
                add_scaled(work.row, work.dS[i * T + j], input_row(K, b, h, j), HS);
                add_scaled(work.dK + j * HS, work.dS[i * T + j], input_row(Q, b, h, i), HS);
                add_scaled(work.dV + j * HS, work.P[i * T + j], input_row(dO, b, h, i), HS);
            }
            round_row(output_row(dQ, b, h, i), work.row, HS);
        }
        for (int64_t j = 0; j < T; j++) {
            round_row(output_row(dK, b, h, j), work.dK + j * HS, HS);
            round_row(output_row(dV, b, h, j), work.dV + j * HS, HS);
        }
    }
    return NULL;
}

const AttentionKernel attention_reference = {
    .abi = ATTENTION_ABI,
    .device = ATTENTION_CPU,
    .name = "reference",
    .summary = "T x T matrices in double: the oracle, slow",
    .refuse = reference_refuse,
    .saved_bytes = reference_saved_bytes,
    .scratch_bytes = reference_scratch_bytes,
    .forward = reference_forward,
    .backward = reference_backward,
};
