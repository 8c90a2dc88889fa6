/* embedding.c - rows of two tables added, and their gradients scattered back.
 *
 * The backward pass must add several rows of dout to one row of dwte where a token repeats, always in the same order. So
 * each thread owns a slice of the channels, whole cache lines of them, and walks over all tokens in order: no two threads
 * touch one element, no atomics, no sorting, and the sum is the same for any number of threads.
 */
#include "layers/cpu.h"
#include "layers/vector.h"

void embedding_forward_cpu(void *out, const int32_t *tokens, const void *wte, const void *wpe, int64_t B, int64_t T,
                           int64_t C, Stream *stream)
{
    float *o = out; /* (B,T,C) */
    (void)stream;
#pragma omp parallel for schedule(static) if (B * T * C >= PARALLEL_MIN)
    for (int64_t n = 0; n < B * T; n++) {
        const float *token = (const float *)wte + tokens[n] * C; /* (C) */
        const float *position = (const float *)wpe + n % T * C;  /* (C) */
        float *row = o + n * C;
        for (int64_t c = 0; c < C; c++) row[c] = token[c] + position[c];
    }
}

/* row (n) += add (n) */
static void row_add(float *row, const float *add, int64_t n)
{
    int64_t i = 0;
    for (; i + WIDTH <= n; i += WIDTH) vector_store(row + i, vector_load(row + i) + vector_load(add + i));
    for (; i < n; i++) row[i] += add[i];
}

void embedding_backward_cpu(float *dwte, float *dwpe, void *scratch, const void *dout, const int32_t *tokens, int64_t B,
                            int64_t T, int64_t C, Stream *stream)
{
    const float *d = dout;                                        /* (B,T,C) */
    int64_t lines = (C + 15) / 16;                                /* cache lines in a row */
    int64_t slices = cpu_min(cpu_threads(), cpu_max(lines, 1));   /* of channels, one a thread */
    (void)scratch;
    (void)stream;
#pragma omp parallel if (B * T * C >= PARALLEL_MIN)
    {
#pragma omp for schedule(static) nowait
        for (int64_t s = 0; s < slices; s++) {
            int64_t first = lines * s / slices * 16, last = cpu_min(lines * (s + 1) / slices * 16, C);
            for (int64_t n = 0; n < B * T; n++) row_add(dwte + tokens[n] * C + first, d + n * C + first, last - first);
        }
#pragma omp for schedule(static)
        for (int64_t t = 0; t < T; t++)
            for (int64_t b = 0; b < B; b++) row_add(dwpe + t * C, d + (b * T + t) * C, C);
    }
}

size_t embedding_scratch_cpu(int64_t B, int64_t T, int64_t C)
{
    (void)B;
    (void)T;
    (void)C;
    return 0;
}
