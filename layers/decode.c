/* decode.c - attention when text is written one token after another: of one new query a sequence, over a cache of the keys
 * and values of all tokens before it.
 *
 * A cache holds, for each of S sequences, its keys and then its values, each (NH,T,HS): the rows of a head lie one behind
 * the other, so that a query reads two streams. One query has nothing to share with others, and each key is used once: the
 * work is memory traffic, (t+1)*HS*2 numbers a head, and there is nothing to tile. The softmax is the online one (Milakov
 * and Gimelshein 2018), over a few keys at a time: for each such piece the logits, the new maximum, what was summed so far
 * scaled down to it, and the piece's values added on.
 */
#include <math.h>

#include "layers/cpu.h"
#include "layers/vector.h"

enum { PIECE = 64 }; /* keys whose logits are known together: whole vectors */

_Static_assert(PIECE % WIDTH == 0, "a piece's logits are whole vectors");

void cache_fill_cpu(void *cache, const void *qkv, int64_t first, int64_t count, int64_t n, int64_t T, int64_t NH,
                    int64_t HS, Stream *stream)
{
    int64_t C = NH * HS;
    (void)stream;
#pragma omp parallel for collapse(2) schedule(static) if (count * n * C >= PARALLEL_MIN)
    for (int64_t s = first; s < first + count; s++)
        for (int64_t part = 0; part < 2; part++) {
            float *to = (float *)cache + (2 * s + part) * NH * T * HS;     /* (NH,T,HS) */
            const float *from = (const float *)qkv + (1 + part) * C;        /* (n,NH,HS), rows 3*C apart */
            for (int64_t row = 0; row < n; row++)
                for (int64_t h = 0; h < NH; h++)
                    memcpy(to + (h * T + row) * HS, from + row * 3 * C + h * HS, (size_t)HS * sizeof(float));
        }
}

/* The product of a (n) and b (n). */
static inline float dot(const float *a, const float *b, int64_t n)
{
    Vector sum[2] = {{0}, {0}};
    int64_t i = 0;
    for (; i + 2 * WIDTH <= n; i += 2 * WIDTH) {
        sum[0] += vector_load(a + i) * vector_load(b + i);
        sum[1] += vector_load(a + i + WIDTH) * vector_load(b + i + WIDTH);
    }
    for (; i < n; i += WIDTH) {
        int64_t left = cpu_min(WIDTH, n - i);
        sum[0] += vector_load_part(a + i, left, 0) * vector_load_part(b + i, left, 0);
    }
    return (float)vector_sum(sum[0] + sum[1]);
}

/* out (n) = out * scale + weight * row (n) */
static inline void row_blend(float *out, float scale, float weight, const float *row, int64_t n)
{
    int64_t i = 0;
    for (; i + WIDTH <= n; i += WIDTH) vector_store(out + i, vector_load(out + i) * scale + vector_load(row + i) * weight);
    for (; i < n; i++) out[i] = out[i] * scale + row[i] * weight;
}

/* out (HS) = attention of query (HS) over keys and values (rows, HS). */
static void head_attend(float *out, const float *query, const float *keys, const float *values, float scale, int64_t rows,
                        int64_t HS)
{
    float largest = -INFINITY;
    double sum = 0;
    for (int64_t d = 0; d < HS; d++) out[d] = 0;
    for (int64_t first = 0; first < rows; first += PIECE) {
        int64_t count = cpu_min(PIECE, rows - first);
        float weight[PIECE], before = largest;
        for (int64_t j = 0; j < PIECE; j++) {
            weight[j] = j < count ? scale * dot(query, keys + (first + j) * HS, HS) : -INFINITY;
            if (weight[j] > largest) largest = weight[j];
        }
        float fade = first ? expf(before - largest) : 0;
        sum *= (double)fade;
        for (int64_t j = 0; j < PIECE; j += WIDTH) {
            Vector p = vector_exp_negative(vector_load(weight + j) - largest);
            vector_store(weight + j, p);
            sum += vector_sum(p);
        }
        for (int64_t j = 0; j < count; j++) row_blend(out, j ? 1 : fade, weight[j], values + (first + j) * HS, HS);
    }
    for (int64_t d = 0; d < HS; d++) out[d] *= (float)(1 / sum);
}

void cache_attend_cpu(void *out, void *cache, const void *qkv, float scale, int64_t B, int64_t t, int64_t T, int64_t NH,
                      int64_t HS, Stream *stream)
{
    int64_t C = NH * HS;
    (void)stream;
#pragma omp parallel for collapse(2) schedule(static) if (B * C * (t + 1) >= PARALLEL_MIN)
    for (int64_t b = 0; b < B; b++)
        for (int64_t h = 0; h < NH; h++) {
            const float *query = (const float *)qkv + b * 3 * C + h * HS; /* (HS); its key is C further on, its value 2*C */
            float *keys = (float *)cache + (2 * b * NH + h) * T * HS;     /* (T,HS) */
            float *values = keys + NH * T * HS;                           /* (T,HS) */
            memcpy(keys + t * HS, query + C, (size_t)HS * sizeof(float));
            memcpy(values + t * HS, query + 2 * C, (size_t)HS * sizeof(float));
            head_attend((float *)out + b * C + h * HS, query, keys, values, scale, t + 1, HS);
        }
}
