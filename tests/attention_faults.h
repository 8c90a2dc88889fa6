/* attention_faults.h - attention kernels that are wrong on purpose, each in one way that has happened to somebody.
 *
 * The checker must reject every one of them, and must pass FAULT_NONE, which is the same code without a fault. Row by row,
 * in double, with only the results rounded to the type; only what the fault needs.
 */
#ifndef ATTENTION_FAULTS_H
#define ATTENTION_FAULTS_H

#include <math.h>
#include <stdlib.h>

#include "attention/attention.h"
#include "tests/attention_truth.h"

typedef enum Fault {
    FAULT_NONE,
    FAULT_MASK_LATE,    /* the mask lets a row see the column after it */
    FAULT_MASK_EARLY,   /* the mask hides a row's own column */
    FAULT_DV_ROW,       /* dV takes every row of dO for the last one: right where all rows of dO are equal */
    FAULT_STALE,        /* the last T % 32 rows of O are not written */
    FAULT_ZEROS,        /* the last T % 32 rows of O are zeros */
    FAULT_STRIPE,       /* O of the last rows of the last head is off by a part of itself */
    FAULT_DQ_STRIPE,    /* dQ of the same */
    FAULT_DK_HEAD,      /* dK of the last head lacks the last query */
    FAULT_SCALE,        /* dK lacks the factor of the logits */
    FAULT_LSE,          /* LSE is the log-sum-exp without its maximum */
    FAULT_NAN,          /* masks by weights of zero: 0 * NaN is NaN */
    FAULT_SENTINEL,     /* masks with -1e4 instead of -inf */
    FAULT_NO_MAXIMUM,   /* exponentials without the maximum taken off */
    FAULT_ADDS,         /* adds to dQ instead of writing it */
    FAULT_NEIGHBOUR,    /* writes one element behind the last row of O */
    FAULT_INPUT,        /* writes to Q */
    FAULT_SCRATCH,      /* writes one byte behind scratch */
    FAULT_WANDERS,      /* changes last bits of dV on every other call */
    FAULT_COUNT
} Fault;

static const char *const fault_names[FAULT_COUNT] = {
    "no fault", "mask one late", "mask one early", "dV from the wrong row", "last partial tile stale",
    "last partial tile zero", "O off in the last stripe of one head", "dQ off in the last stripe of one head",
    "dK of one head lacks the last query", "dK without the scale", "LSE without its maximum", "mask by zero weights",
    "mask by -1e4", "softmax without its maximum", "dQ added to", "O one element too long", "Q written to",
    "scratch overrun", "dV different on every run",
};

/* By what part of itself a result is off, in the faults that have a size. */
static const double fault_sizes[PRECISION_COUNT][FAULT_COUNT] = {
    {[FAULT_STRIPE] = 1e-5, [FAULT_DQ_STRIPE] = 1e-4, [FAULT_WANDERS] = 1e-7},  /* fp32 */
    {[FAULT_STRIPE] = 0.02, [FAULT_DQ_STRIPE] = 0.05, [FAULT_WANDERS] = 0.004}, /* bf16 */
    {[FAULT_STRIPE] = 1e-3, [FAULT_DQ_STRIPE] = 4e-3, [FAULT_WANDERS] = 1e-7},  /* TF32 */
};

static double fault_size(Fault fault, const AttentionShape *shape) { return fault_sizes[precision_of(shape)][fault]; }

/* Element d of a row, in the type of the call. */
static float fault_read(AttentionInput view, int64_t b, int64_t h, int64_t t, int64_t d, Dtype dtype)
{
    int64_t at = b * view.batch_stride + t * view.row_stride + h * view.head_stride + d;
    uint32_t bits;
    float x;
    if (dtype == DTYPE_BF16) bits = (uint32_t)((const uint16_t *)view.data)[at] << 16;
    else bits = ((const uint32_t *)view.data)[at];
    memcpy(&x, &bits, 4);
    return x;
}

static void fault_write(AttentionOutput view, int64_t b, int64_t h, int64_t t, int64_t d, double value, Dtype dtype)
{
    int64_t at = b * view.batch_stride + t * view.row_stride + h * view.head_stride + d;
    float x = round_to((float)value, dtype);
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (dtype == DTYPE_BF16) ((uint16_t *)view.data)[at] = (uint16_t)(bits >> 16);
    else ((uint32_t *)view.data)[at] = bits;
}

/* Columns that row i sums over. */
static int64_t fault_columns(Fault fault, int64_t i, int64_t T)
{
    if (fault == FAULT_NAN || fault == FAULT_SENTINEL) return T;
    if (fault == FAULT_MASK_LATE) return i + 2 < T ? i + 2 : T;
    if (fault == FAULT_MASK_EARLY) return i > 0 ? i : 1;
    return i + 1;
}

/* P[0..columns) of row i; returns LSE. */
static double fault_softmax(Fault fault, double *P, AttentionInput Q, AttentionInput K, int64_t b, int64_t h, int64_t i,
                            const AttentionShape *shape)
{
    int64_t columns = fault_columns(fault, i, shape->T);
    double max = -INFINITY, sum = 0;
    for (int64_t j = 0; j < columns; j++) {
        double s = 0;
        for (int64_t d = 0; d < shape->HS; d++)
            s += (double)fault_read(Q, b, h, i, d, shape->dtype) * fault_read(K, b, h, j, d, shape->dtype);
        P[j] = s * shape->scale;
        if (fault == FAULT_NAN && j > i) P[j] = -INFINITY;
        if (fault == FAULT_SENTINEL && j > i) P[j] = -1e4;
        if (P[j] > max) max = P[j];
    }
    if (fault == FAULT_NO_MAXIMUM) max = 0;
    for (int64_t j = 0; j < columns; j++) sum += P[j] = exp(P[j] - max);
    for (int64_t j = 0; j < columns; j++) P[j] /= sum;
    return (fault == FAULT_LSE ? 0 : max) + log(sum);
}

static const char *fault_forward(Fault fault, AttentionOutput O, float *LSE, void *scratch, AttentionInput Q,
                                 AttentionInput K, AttentionInput V, const AttentionShape *shape)
{
    int64_t T = shape->T, HS = shape->HS, B = shape->B, NH = shape->NH;
    Dtype dtype = shape->dtype;
    double *P = malloc((size_t)(T + 1) * sizeof(double));
    if (!P) return "no memory";
    for (int64_t row = 0; row < B * NH * T; row++) {
        int64_t b = row / T / NH, h = row / T % NH, i = row % T, last_head = row / T == B * NH - 1;
        int64_t whole = T / 32 * 32;
        LSE[row] = (float)fault_softmax(fault, P, Q, K, b, h, i, shape);
        if (fault == FAULT_STALE && i >= whole) continue;
        for (int64_t d = 0; d < HS; d++) {
            double sum = 0;
            for (int64_t j = 0; j < fault_columns(fault, i, T); j++) sum += P[j] * fault_read(V, b, h, j, d, dtype);
            if (fault == FAULT_ZEROS && i >= whole) sum = 0;
            if (fault == FAULT_STRIPE && last_head && i >= T - 3) sum *= 1 + fault_size(fault, shape);
            fault_write(O, b, h, i, d, sum, dtype);
        }
    }
    if (fault == FAULT_NEIGHBOUR) fault_write(O, B - 1, NH - 1, T - 1, HS, 0, dtype);
    if (fault == FAULT_INPUT) fault_write((AttentionOutput){(void *)Q.data, 0, 0, 0}, 0, 0, 0, 0, 0.5, dtype);
    if (fault == FAULT_SCRATCH) ((char *)scratch)[16] = 0;
    free(P);
    return NULL;
}

static const char *fault_backward(Fault fault, AttentionOutput dQ, AttentionOutput dK, AttentionOutput dV,
                                  AttentionInput dO, AttentionInput Q, AttentionInput K, AttentionInput V,
                                  const AttentionShape *shape)
{
    static int calls;
    int64_t T = shape->T, HS = shape->HS, NH = shape->NH, heads = shape->B * NH;
    double *P = malloc((size_t)T * sizeof(double)), *dP = malloc((size_t)T * sizeof(double));
    double *sums = malloc((size_t)(2 * T * HS) * sizeof(double)), wander = 0;
    double dK_scale = fault == FAULT_SCALE ? 1 : shape->scale;
    Dtype dtype = shape->dtype;
    if (fault == FAULT_WANDERS) wander = ++calls % 2 * fault_size(fault, shape);
    for (int64_t head = 0; head < heads && P && dP && sums; head++) {
        int64_t b = head / NH, h = head % NH;
        for (int64_t k = 0; k < 2 * T * HS; k++) sums[k] = 0;
        for (int64_t i = 0; i < T; i++) {
            int64_t columns = fault_columns(fault, i, T), out = fault == FAULT_DV_ROW ? T - 1 : i;
            double D = 0, stretch = 1;
            if (fault == FAULT_DQ_STRIPE && head == heads - 1 && i >= T - 3) stretch += fault_size(fault, shape);
            fault_softmax(fault, P, Q, K, b, h, i, shape);
            for (int64_t j = 0; j < columns; j++) {
                dP[j] = 0;
                for (int64_t d = 0; d < HS; d++)
                    dP[j] += (double)fault_read(dO, b, h, i, d, dtype) * fault_read(V, b, h, j, d, dtype);
                D += P[j] * dP[j];
            }
            for (int64_t d = 0; d < HS; d++) {
                double sum = 0;
                for (int64_t j = 0; j < columns; j++) {
                    double dS = P[j] * (dP[j] - D);
                    sum += shape->scale * dS * fault_read(K, b, h, j, d, dtype);
                    if (!(fault == FAULT_DK_HEAD && head == heads - 1 && i == T - 1))
                        sums[j * HS + d] += dK_scale * dS * fault_read(Q, b, h, i, d, dtype);
                    sums[(T + j) * HS + d] += P[j] * fault_read(dO, b, h, out, d, dtype);
                }
                sum *= stretch;
                if (fault == FAULT_ADDS)
                    sum += fault_read((AttentionInput){dQ.data, dQ.batch_stride, dQ.row_stride, dQ.head_stride}, b, h, i, d,
                                      dtype);
                fault_write(dQ, b, h, i, d, sum, dtype);
            }
        }
        for (int64_t j = 0; j < T; j++)
            for (int64_t d = 0; d < HS; d++) {
                fault_write(dK, b, h, j, d, sums[j * HS + d], dtype);
                fault_write(dV, b, h, j, d, sums[(T + j) * HS + d] * (1 + wander), dtype);
            }
    }
    free(P), free(dP), free(sums);
    return NULL;
}

static const char *fault_refuse(const AttentionShape *shape, int sm)
{
    (void)shape, (void)sm;
    return NULL;
}

static size_t fault_saved_bytes(const AttentionShape *shape) { return (void)shape, (size_t)0; }
static size_t fault_scratch_bytes(const AttentionShape *shape) { return (void)shape, (size_t)16; }

/* One pair of entry points a fault: a kernel has nowhere else to keep which one it is. */
#define FAULTS(DO)                                                                                                        \
    DO(FAULT_NONE) DO(FAULT_MASK_LATE) DO(FAULT_MASK_EARLY) DO(FAULT_DV_ROW) DO(FAULT_STALE) DO(FAULT_ZEROS)               \
    DO(FAULT_STRIPE) DO(FAULT_DQ_STRIPE) DO(FAULT_DK_HEAD) DO(FAULT_SCALE) DO(FAULT_LSE) DO(FAULT_NAN) DO(FAULT_SENTINEL)  \
    DO(FAULT_NO_MAXIMUM) DO(FAULT_ADDS) DO(FAULT_NEIGHBOUR) DO(FAULT_INPUT) DO(FAULT_SCRATCH) DO(FAULT_WANDERS)

#define FAULT_ENTRY(fault)                                                                                                \
    static const char *forward_##fault(AttentionOutput O, float *LSE, void *saved, void *scratch, AttentionInput Q,       \
                                       AttentionInput K, AttentionInput V, const AttentionShape *shape, void *stream)     \
    {                                                                                                                     \
        (void)saved, (void)stream;                                                                                        \
        return fault_forward(fault, O, LSE, scratch, Q, K, V, shape);                                                     \
    }                                                                                                                     \
    static const char *backward_##fault(AttentionOutput dQ, AttentionOutput dK, AttentionOutput dV, void *scratch,        \
                                        AttentionInput dO, AttentionInput Q, AttentionInput K, AttentionInput V,          \
                                        AttentionInput O, const float *LSE, const void *saved,                            \
                                        const AttentionShape *shape, void *stream)                                        \
    {                                                                                                                     \
        (void)scratch, (void)O, (void)LSE, (void)saved, (void)stream;                                                     \
        return fault_backward(fault, dQ, dK, dV, dO, Q, K, V, shape);                                                     \
    }

#define FAULT_KERNEL(fault)                                                                                               \
    [fault] = {ATTENTION_ABI, ATTENTION_CPU, "faulty", "wrong on purpose", fault_refuse, fault_saved_bytes,               \
               fault_scratch_bytes, forward_##fault, backward_##fault},

FAULTS(FAULT_ENTRY)

static const AttentionKernel fault_kernels[FAULT_COUNT] = {FAULTS(FAULT_KERNEL)};

#endif
