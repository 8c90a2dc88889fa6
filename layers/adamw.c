/* adamw.c - the global norm of the gradient, and AdamW over one flat buffer.
 *
 * Both are bound by memory: the norm reads 4 bytes a parameter, the update reads 16 and writes 12. So each is one pass.
 * The norm is summed in chunks of a fixed size, in double, and the chunks are added in order: the same bits for any number
 * of threads. A double holds the square of any fp32 number, so no finite gradient overflows before the root is taken.
 */
#include <math.h>
#include <string.h>

#include "layers/cpu.h"
#include "layers/vector.h"

enum { NORM_CHUNK = 32768, UPDATE_CHUNK = 2048 };

static int64_t norm_chunks(int64_t n) { return (n + NORM_CHUNK - 1) / NORM_CHUNK; }

size_t norm_scratch_cpu(int64_t n) { return (size_t)norm_chunks(n) * sizeof(double); }

static double sum_squares(const float *x, int64_t n)
{
    VectorDouble sums[4] = {{0}};
    int64_t i = 0;
    for (; i + 2 * WIDTH <= n; i += 2 * WIDTH)
        for (int k = 0; k < 4; k++) {
            VectorDouble v = vector_widen(x + i + k * (WIDTH / 2));
            sums[k] += v * v;
        }
    double sum = vector_sum_double((sums[0] + sums[1]) + (sums[2] + sums[3]));
    for (; i < n; i++) sum += (double)x[i] * (double)x[i];
    return sum;
}

void global_norm_cpu(float *norm, void *scratch, const float *grads, int64_t n, Stream *stream)
{
    double *partial = scratch, sum = 0;
    int64_t chunks = norm_chunks(n);
    (void)stream;
#pragma omp parallel for schedule(static) if (n >= PARALLEL_MIN)
    for (int64_t k = 0; k < chunks; k++)
        partial[k] = sum_squares(grads + k * NORM_CHUNK, cpu_min(NORM_CHUNK, n - k * NORM_CHUNK));
    for (int64_t k = 0; k < chunks; k++) sum += partial[k];
    *norm = (float)sqrt(sum);
}

/* n parameters with one decay. `scale` is the clipping factor of the gradient. */
static void update_range(float *restrict master, float *restrict m, float *restrict v, const float *restrict grads,
                         float scale, float decay, const AdamwStep *step, int64_t n)
{
    float beta1 = step->beta1, beta2 = step->beta2, rest1 = 1 - beta1, rest2 = 1 - beta2;
    float correction1 = 1 / step->bias_correction1, correction2 = 1 / step->bias_correction2;
    float lr = step->lr, eps = step->eps;
    for (int64_t i = 0; i < n; i++) {
        float g = grads[i] * scale;
        m[i] = beta1 * m[i] + rest1 * g;
        v[i] = beta2 * v[i] + rest2 * (g * g);
        master[i] -= lr * (m[i] * correction1 / (sqrtf(v[i] * correction2) + eps) + decay * master[i]);
    }
}

void adamw_update_cpu(void *params, float *master, float *m, float *v, const float *grads, const float *norm,
                      const AdamwStep *step, int64_t n, int64_t n_decay, Stream *stream)
{
    float *p = params;
    (void)stream;
    if (!isfinite(*norm)) return;
    float scale = step->clip > 0 && *norm > step->clip ? step->clip / *norm : 1;
#pragma omp parallel for schedule(static) if (n >= PARALLEL_MIN)
    for (int64_t start = 0; start < n; start += UPDATE_CHUNK) {
        int64_t end = cpu_min(start + UPDATE_CHUNK, n), edge = cpu_max(start, cpu_min(end, n_decay));
        update_range(master + start, m + start, v + start, grads + start, scale, step->weight_decay, step, edge - start);
        update_range(master + edge, m + edge, v + edge, grads + edge, scale, 0, step, end - edge);
        /* Still in the first cache. */
        if (p != master) memcpy(p + start, master + start, (size_t)(end - start) * sizeof(float));
    }
}
