/* naive.c - causal attention as one reads it in the paper, one row at a time. The start of the lesson.
 *
 * Forward, for every query i: all logits with the keys 0..i, their maximum, their exponentials, the sum; then O_i as the
 * weighted sum of V. Backward builds the same row of P again and passes the gradient through it.
 *
 *     row i:   s_0 s_1 ... s_i | - - -        two sweeps over the keys for the softmax, one over the values;
 *                              ^ diagonal     the row of P lies in memory between them
 *
 * Verdict: right, and short enough to be believed. It keeps one row of P, not the square, so memory is no trouble; time is.
 * A dot product of two rows is a chain of dependent additions that the compiler may not reorder, and every key is fetched
 * from memory again for every query: a few percent of what the cores can do (see tiled in the table). online.c gets rid of
 * the row; the tiles of attention/tiled.c get rid of the rest.
 */
#include "attention/attention.h"

#include <math.h>

static const char *naive_refuse(const AttentionShape *shape, int sm)
{
    (void)sm;
    if (shape->dtype != DTYPE_FP32) return "computes in fp32 only";
    if (shape->HS < 1) return "needs a head dimension of at least 1";
    return NULL;
}

static size_t naive_saved_bytes(const AttentionShape *shape)
{
    (void)shape;
    return 0;
}

/* A row of P and a row of dP for every head. */
static size_t naive_scratch_bytes(const AttentionShape *shape)
{
    return (size_t)shape->B * (size_t)shape->NH * (size_t)shape->T * 2 * sizeof(float);
}

static const float *row_in(AttentionInput view, int64_t b, int64_t h, int64_t t)
{
    return (const float *)view.data + b * view.batch_stride + t * view.row_stride + h * view.head_stride;
}

static float *row_out(AttentionOutput view, int64_t b, int64_t h, int64_t t)
{
    return (float *)view.data + b * view.batch_stride + t * view.row_stride + h * view.head_stride;
}

static float dot(const float *x, const float *y, int64_t n)
{
    float sum = 0;
    for (int64_t i = 0; i < n; i++) sum += x[i] * y[i];
    return sum;
}

static void add_scaled(float *y, float a, const float *x, int64_t n)
{
    for (int64_t i = 0; i < n; i++) y[i] += a * x[i];
}

static void set_zero(float *y, int64_t n)
{
    for (int64_t i = 0; i < n; i++) y[i] = 0;
}

/* P[0..i] = softmax of the logits of query i; returns their log-sum-exp. */
static float softmax_row(float *P, AttentionInput Q, AttentionInput K, int64_t b, int64_t h, int64_t i,
                         const AttentionShape *shape)
{
    float max = -INFINITY, sum = 0;
    for (int64_t j = 0; j <= i; j++) {
        P[j] = shape->scale * dot(row_in(Q, b, h, i), row_in(K, b, h, j), shape->HS);
        if (P[j] > max) max = P[j];
    }
    if (max == -INFINITY) max = 0;
    for (int64_t j = 0; j <= i; j++) {
        P[j] = expf(P[j] - max);
        sum += P[j];
    }
    for (int64_t j = 0; j <= i; j++) P[j] /= sum;
    return max + logf(sum);
}

static const char *naive_forward(AttentionOutput O, float *LSE, void *saved, void *scratch, AttentionInput Q,
                                 AttentionInput K, AttentionInput V, const AttentionShape *shape, void *stream)
{
    (void)saved, (void)stream;
    int64_t T = shape->T, HS = shape->HS, heads = shape->B * shape->NH;
#pragma omp parallel for
    for (int64_t head = 0; head < heads; head++) {
        int64_t b = head / shape->NH, h = head % shape->NH;
        float *P = (float *)scratch + head * 2 * T;
        for (int64_t i = 0; i < T; i++) {
            float *o = row_out(O, b, h, i);
            LSE[head * T + i] = softmax_row(P, Q, K, b, h, i, shape);
            set_zero(o, HS);
            for (int64_t j = 0; j <= i; j++) add_scaled(o, P[j], row_in(V, b, h, j), HS);
        }
    }
    return NULL;
}

static const char *naive_backward(AttentionOutput dQ, AttentionOutput dK, AttentionOutput dV, void *scratch,
                                  AttentionInput dO, AttentionInput Q, AttentionInput K, AttentionInput V,
                                  AttentionInput O, const float *LSE, const void *saved, const AttentionShape *shape,
                                  void *stream)
{
    (void)O, (void)LSE, (void)saved, (void)stream;
    int64_t T = shape->T, HS = shape->HS, heads = shape->B * shape->NH;
#pragma omp parallel for
    for (int64_t head = 0; head < heads; head++) {
        int64_t b = head / shape->NH, h = head % shape->NH;
        float *P = (float *)scratch + head * 2 * T, *dP = P + T;
        for (int64_t j = 0; j < T; j++) {
            set_zero(row_out(dK, b, h, j), HS);
            set_zero(row_out(dV, b, h, j), HS);
        }
        for (int64_t i = 0; i < T; i++) {
            const float *q = row_in(Q, b, h, i), *dout = row_in(dO, b, h, i);
            float *dq = row_out(dQ, b, h, i), D = 0;
            softmax_row(P, Q, K, b, h, i, shape);
            for (int64_t j = 0; j <= i; j++) {
                dP[j] = dot(dout, row_in(V, b, h, j), HS);
                D += P[j] * dP[j];
            }
            set_zero(dq, HS);
            for (int64_t j = 0; j <= i; j++) {
                float dS = shape->scale * P[j] * (dP[j] - D);
                add_scaled(dq, dS, row_in(K, b, h, j), HS);
                add_scaled(row_out(dK, b, h, j), dS, q, HS);
                add_scaled(row_out(dV, b, h, j), P[j], dout, HS);
            }
        }
    }
    return NULL;
}

const AttentionKernel attention_kernel = {
    .abi = ATTENTION_ABI,
    .device = ATTENTION_CPU,
    .name = "naive",
    .summary = "row by row, the softmax in two sweeps",
    .refuse = naive_refuse,
    .saved_bytes = naive_saved_bytes,
    .scratch_bytes = naive_scratch_bytes,
    .forward = naive_forward,
    .backward = naive_backward,
};
