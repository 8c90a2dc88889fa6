/* layernorm.c - layer normalisation of rows, alone or after a residual sum, and its gradients.
 *
 *     norm = (x - mean) * rstd        out = norm * weight + bias
 *     g = dout * weight               dx = dresid + rstd * (g - mean(g) - norm * mean(g * norm))
 *     dweight += sum over rows of dout * norm          dbias += sum over rows of dout
 *
 * A row is read twice for its statistics (mean first, then the variance about it: no cancellation, however far the mean is
 * from zero), both summed in double; it is in the first cache by then, so that costs next to nothing. The sums over rows
 * are taken in chunks of rows, each into its own line of scratch; then the lines are added in order.
 */
#include <math.h>

#include "layers/cpu.h"
#include "layers/vector.h"

#define LAYERNORM_EPS 1e-5

/* Sum over a row (C) in double, in a fixed order. */
static double row_sum(const float *x, int64_t C)
{
    VectorDouble a = {0}, b = {0};
    int64_t i = 0;
    for (; i + WIDTH <= C; i += WIDTH) {
        a += vector_widen(x + i);
        b += vector_widen(x + i + WIDTH / 2);
    }
    double sum = vector_sum_double(a + b);
    for (; i < C; i++) sum += (double)x[i];
    return sum;
}

/* Sum of (x - mean)^2 over a row (C), in double. */
static double row_squares(const float *x, double mean, int64_t C)
{
    VectorDouble a = {0}, b = {0};
    int64_t i = 0;
    for (; i + WIDTH <= C; i += WIDTH) {
        VectorDouble low = vector_widen(x + i) - mean, high = vector_widen(x + i + WIDTH / 2) - mean;
        a += low * low;
        b += high * high;
    }
    double sum = vector_sum_double(a + b);
    for (; i < C; i++) sum += ((double)x[i] - mean) * ((double)x[i] - mean);
    return sum;
}

static void row_normalize(float *restrict out, float *mean, float *rstd, const float *restrict x,
                          const float *restrict weight, const float *restrict bias, int64_t C)
{
    double m = row_sum(x, C) / (double)C;
    double r = 1 / sqrt(row_squares(x, m, C) / (double)C + LAYERNORM_EPS);
    float center = (float)m, factor = (float)r;
    for (int64_t c = 0; c < C; c++) out[c] = (x[c] - center) * factor * weight[c] + bias[c];
    *mean = center;
    *rstd = factor;
}

void layernorm_forward_cpu(void *out, float *mean, float *rstd, const float *x, const float *weight, const float *bias,
                           int64_t N, int64_t C, Stream *stream)
{
    (void)stream;
#pragma omp parallel for schedule(static) if (N * C >= PARALLEL_MIN)
    for (int64_t n = 0; n < N; n++)
        row_normalize((float *)out + n * C, mean + n, rstd + n, x + n * C, weight, bias, C);
}

void residual_layernorm_forward_cpu(float *sum, void *out, float *mean, float *rstd, const float *x, const void *y,
                                    const float *weight, const float *bias, int64_t N, int64_t C, Stream *stream)
{
    (void)stream;
#pragma omp parallel for schedule(static) if (N * C >= PARALLEL_MIN)
    for (int64_t n = 0; n < N; n++) {
        const float *a = x + n * C, *b = (const float *)y + n * C; /* (C) */
        float *s = sum + n * C;                                    /* (C), may be a or b */
        int64_t i = 0;
        for (; i + WIDTH <= C; i += WIDTH) vector_store(s + i, vector_load(a + i) + vector_load(b + i));
        for (; i < C; i++) s[i] = a[i] + b[i];
        row_normalize((float *)out + n * C, mean + n, rstd + n, s, weight, bias, C);
    }
}

/* Rows that share a line of partial sums: few enough that there are chunks for all threads, and never more than 256
 * chunks. */
static int64_t chunk_rows(int64_t N) { return cpu_max(16, (N + 255) / 256); }

static int64_t chunk_count(int64_t N) { return (N + chunk_rows(N) - 1) / chunk_rows(N); }

size_t layernorm_scratch_cpu(int64_t N, int64_t C) { return (size_t)(chunk_count(N) * 2 * C) * sizeof(float); }

/* The gradient of one row: dx (C) = dresid (C), which may be dx or NULL, + ..., dweight (C) +=, dbias (C) +=. */
static void row_backward(float *dx, float *restrict dweight, float *restrict dbias, const float *dresid,
                         const float *restrict dout, const float *restrict x, const float *restrict weight, float mean,
                         float rstd, int64_t C)
{
    Vector lanes_g = {0}, lanes_gn = {0};
    double sum_g = 0, sum_gn = 0;
    int64_t whole = C - C % WIDTH;
    for (int64_t i = 0; i < whole; i += WIDTH) {
        Vector g = vector_load(dout + i) * vector_load(weight + i);
        lanes_g += g;
        lanes_gn += g * ((vector_load(x + i) - mean) * rstd);
    }
    for (int64_t i = whole; i < C; i++) {
        float g = dout[i] * weight[i];
        sum_g += (double)g;
        sum_gn += (double)(g * ((x[i] - mean) * rstd));
    }
    float mean_g = (float)((sum_g + vector_sum(lanes_g)) / (double)C);
    float mean_gn = (float)((sum_gn + vector_sum(lanes_gn)) / (double)C);
    for (int64_t i = 0; i < whole; i += WIDTH) {
        Vector d = vector_load(dout + i), norm = (vector_load(x + i) - mean) * rstd;
        Vector dnorm = d * vector_load(weight + i) - mean_g - norm * mean_gn;
        vector_store(dx + i, dresid ? vector_load(dresid + i) + dnorm * rstd : dnorm * rstd);
        vector_store(dweight + i, vector_load(dweight + i) + d * norm);
        vector_store(dbias + i, vector_load(dbias + i) + d);
    }
    for (int64_t i = whole; i < C; i++) {
        float norm = (x[i] - mean) * rstd;
        dx[i] = (dresid ? dresid[i] : 0) + (dout[i] * weight[i] - mean_g - norm * mean_gn) * rstd;
        dweight[i] += dout[i] * norm;
        dbias[i] += dout[i];
    }
}

void layernorm_backward_cpu(float *dx, void *rounded, float *dweight, float *dbias, void *scratch, const float *dresid,
                            const void *dout, const float *x, const float *weight, const float *mean, const float *rstd,
                            int64_t N, int64_t C, Stream *stream)
{
    enum { COLUMNS = 64 };
    int64_t rows = chunk_rows(N), chunks = chunk_count(N);
    float *partial = scratch; /* (chunks, 2, C): dweight and dbias of each chunk of rows */
    (void)rounded; /* dx itself or NULL: real is fp32 here */
    (void)stream;
#pragma omp parallel if (N * C >= PARALLEL_MIN)
    {
#pragma omp for schedule(static)
        for (int64_t k = 0; k < chunks; k++) {
            float *line = partial + k * 2 * C;
            memset(line, 0, (size_t)(2 * C) * sizeof(float));
            for (int64_t n = k * rows; n < cpu_min((k + 1) * rows, N); n++)
                row_backward(dx + n * C, line, line + C, dresid ? dresid + n * C : NULL, (const float *)dout + n * C,
                             x + n * C, weight, mean[n], rstd[n], C);
        }
#pragma omp for schedule(static)
        for (int64_t start = 0; start < C; start += COLUMNS) {
            int64_t end = cpu_min(start + COLUMNS, C);
            for (int64_t k = 0; k < chunks; k++) {
                const float *line = partial + k * 2 * C;
                for (int64_t c = start; c < end; c++) dweight[c] += line[c];
                for (int64_t c = start; c < end; c++) dbias[c] += line[C + c];
            }
        }
    }
}
