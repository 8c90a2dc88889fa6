/* loss.c - softmax cross entropy of rows of logits and its gradient, in place, without a buffer for probabilities.
 *
 * A row is first read for its maximum, then for exp(logit - max), which is summed and, where the gradient is wanted, left in
 * place of the logit; a last pass multiplies by dscale / sum. The row (200 KB at 50257 tokens) stays in the second cache
 * from pass to pass. Sums are taken in fp32 over 1024 logits, and over those in double.
 */
#include <math.h>

#include "layers/cpu.h"
#include "layers/vector.h"

/* The largest of n > 0 logits. A NaN may be passed over: it comes out of the sum. */
static float row_max(const float *logits, int64_t n)
{
    Vector a = vector_set(logits[0]), b = a;
    int64_t i = 0;
    for (; i + 2 * WIDTH <= n; i += 2 * WIDTH) {
        a = vector_max(vector_load(logits + i), a);
        b = vector_max(vector_load(logits + i + WIDTH), b);
    }
    a = vector_max(a, b);
    float max = a[0];
    for (int k = 1; k < WIDTH; k++) max = a[k] > max ? a[k] : max;
    for (; i < n; i++) max = logits[i] > max ? logits[i] : max;
    return max;
}

/* Sum of exp(logits - max); where `keep`, each exp replaces its logit. */
static double row_exp(float *logits, float max, int keep, int64_t n)
{
    enum { BLOCK = 1024 };
    double sum = 0;
    for (int64_t start = 0; start < n; start += BLOCK) {
        int64_t end = cpu_min(start + BLOCK, n), i = start;
        Vector lanes = {0};
        for (; i + WIDTH <= end; i += WIDTH) {
            Vector e = vector_exp_negative(vector_load(logits + i) - max);
            lanes += e;
            if (keep) vector_store(logits + i, e);
        }
        if (i < end) {
            Vector e = vector_exp_negative(vector_load_part(logits + i, end - i, -INFINITY) - max);
            lanes += e;
            if (keep) vector_store_part(logits + i, e, end - i);
        }
        sum += vector_sum(lanes);
    }
    return sum;
}

/* The loss of one row (Vp), and its gradient in place. */
static float row_loss(float *logits, int32_t target, float dscale, int64_t V, int64_t Vp)
{
    int keep = dscale != 0;
    if (target < 0) {
        if (keep) memset(logits, 0, (size_t)Vp * sizeof(float));
        return 0;
    }
    float max = row_max(logits, V), chosen = logits[target];
    double sum = row_exp(logits, max, keep, V);
    if (keep) {
        float factor = (float)(dscale / sum);
        /* At a probability near 1 the difference to 1 is taken in double: in fp32 it would lose its digits. */
        double hit = (double)logits[target] / sum - 1;
        for (int64_t v = 0; v < V; v++) logits[v] *= factor;
        logits[target] = (float)(dscale * hit);
        memset(logits + V, 0, (size_t)(Vp - V) * sizeof(float));
    }
    return (float)((double)max - (double)chosen + log(sum));
}

void loss_forward_backward_cpu(float *losses, void *logits, const int32_t *targets, float dscale, int64_t N, int64_t V,
                               int64_t Vp, Stream *stream)
{
    (void)stream;
#pragma omp parallel for schedule(static) if (N * V >= PARALLEL_MIN)
    for (int64_t n = 0; n < N; n++) losses[n] = row_loss((float *)logits + n * Vp, targets[n], dscale, V, Vp);
}

void losses_sum_cpu(double *total, const float *losses, int64_t N, Stream *stream)
{
    double sum = 0;
    (void)stream;
    for (int64_t n = 0; n < N; n++) sum += (double)losses[n];
    *total += sum;
}
