/* online.c - the softmax in one sweep (Milakov and Gimelshein 2018), so that nothing of P is kept. The idea behind flash.
 *
 * Forward, for every query i, goes once over the keys 0..i and keeps the maximum m so far, the sum l of exp(s - m) and
 * O in units of that sum; when a larger logit comes, both are scaled down:
 *
 *     m' = max(m, s)     l = l exp(m - m') + exp(s - m')     O = O exp(m - m') + exp(s - m') V_j
 *
 * Backward needs no sweep for the softmax either: P_ij = exp(s_ij - LSE_i), and the sum over keys of P dP is dO_i . O_i.
 * So neither pass needs a byte of scratch.
 *
 * Verdict: right, and the memory of a flash kernel, but not its speed. Rescaling the whole row of O is rare after the first
 * keys and cheap; the dot products are the same dependent chains as in naive.c, and every key and value is still fetched
 * once for every query. It is faster than naive.c in the backward at most, by the sweeps that it saves. What is missing is
 * reuse: a tile of queries against a tile of keys (attention/tiled.c), which is the same arithmetic in another order.
 */
#include "attention/attention.h"

#include <math.h>

static const char *online_refuse(const AttentionShape *shape, int sm)
{
    (void)sm;
    if (shape->dtype != DTYPE_FP32) return "computes in fp32 only";
    if (shape->HS < 1) return "needs a head dimension of at least 1";
    return NULL;
}

static size_t online_no_bytes(const AttentionShape *shape)
{
    (void)shape;
    return 0;
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

static void scale_row(float *y, float a, int64_t n)
{
    for (int64_t i = 0; i < n; i++) y[i] *= a;
}

static void set_zero(float *y, int64_t n)
{
    for (int64_t i = 0; i < n; i++) y[i] = 0;
}

/* The logit of query i and key j. Called by both passes: the compiler may then not round it differently in one of them. */
static __attribute__((noinline)) float logit(AttentionInput Q, AttentionInput K, int64_t b, int64_t h, int64_t i, int64_t j,
                                             const AttentionShape *shape)
{
    return shape->scale * dot(row_in(Q, b, h, i), row_in(K, b, h, j), shape->HS);
}

static const char *online_forward(AttentionOutput O, float *LSE, void *saved, void *scratch, AttentionInput Q,
                                  AttentionInput K, AttentionInput V, const AttentionShape *shape, void *stream)
{
    (void)saved, (void)scratch, (void)stream;
    int64_t T = shape->T, HS = shape->HS, heads = shape->B * shape->NH;
#pragma omp parallel for
    for (int64_t head = 0; head < heads; head++) {
        int64_t b = head / shape->NH, h = head % shape->NH;
        for (int64_t i = 0; i < T; i++) {
            float *o = row_out(O, b, h, i), max = -INFINITY, sum = 0;
            set_zero(o, HS);
            for (int64_t j = 0; j <= i; j++) {
                float s = logit(Q, K, b, h, i, j, shape);
                if (s > max) {
                    float shrink = expf(max - s); /* 0 for the first */
                    sum *= shrink;
                    scale_row(o, shrink, HS);
                    max = s;
                }
                float p = expf(s - (max == -INFINITY ? 0 : max));
                sum += p;
                add_scaled(o, p, row_in(V, b, h, j), HS);
            }
            scale_row(o, 1 / sum, HS);
            LSE[head * T + i] = max + logf(sum);
        }
    }
    return NULL;
}

static const char *online_backward(AttentionOutput dQ, AttentionOutput dK, AttentionOutput dV, void *scratch,
                                   AttentionInput dO, AttentionInput Q, AttentionInput K, AttentionInput V,
                                   AttentionInput O, const float *LSE, const void *saved, const AttentionShape *shape,
                                   void *stream)
{
    (void)scratch, (void)saved, (void)stream;
    int64_t T = shape->T, HS = shape->HS, heads = shape->B * shape->NH;
#pragma omp parallel for
    for (int64_t head = 0; head < heads; head++) {
        int64_t b = head / shape->NH, h = head % shape->NH;
        for (int64_t j = 0; j < T; j++) {
            set_zero(row_out(dK, b, h, j), HS);
            set_zero(row_out(dV, b, h, j), HS);
        }
        for (int64_t i = 0; i < T; i++) {
            const float *q = row_in(Q, b, h, i), *dout = row_in(dO, b, h, i);
            float *dq = row_out(dQ, b, h, i), D = dot(dout, row_in(O, b, h, i), HS);
            set_zero(dq, HS);
            for (int64_t j = 0; j <= i; j++) {
                float P = expf(logit(Q, K, b, h, i, j, shape) - LSE[head * T + i]);
                float dS = shape->scale * P * (dot(dout, row_in(V, b, h, j), HS) - D);
                add_scaled(dq, dS, row_in(K, b, h, j), HS);
                add_scaled(row_out(dK, b, h, j), dS, q, HS);
                add_scaled(row_out(dV, b, h, j), P, dout, HS);
            }
        }
    }
    return NULL;
}

const AttentionKernel attention_kernel = {
    .abi = ATTENTION_ABI,
    .device = ATTENTION_CPU,
    .name = "online",
    .summary = "row by row, the softmax in one sweep, no scratch",
    .refuse = online_refuse,
    .saved_bytes = online_no_bytes,
    .scratch_bytes = online_no_bytes,
    .forward = online_forward,
    .backward = online_backward,
};
