/* embedding.c - rows of two tables added, and their gradients scattered back.
 *
 * The backward pass must add several rows of dout to one row of dwte where a token repeats, always in the same order. The plan
 * that every backend follows says that order: the positions sorted by token (a radix sort, stable and O(N)), and where each
 * token's run begins. Here each thread owns a slice of the channels, whole cache lines of them, and walks over all runs: no
 * two threads touch one element, no atomics, and the sum is the same for any number of threads.
 */
#include "layers/cpu.h"
#include "layers/vector.h"

void embedding_forward_cpu(float *out, const int32_t *tokens, const void *wte, const void *wpe, int64_t B, int64_t T,
                           int64_t C, Stream *stream)
{
    (void)stream;
#pragma omp parallel for schedule(static) if (B * T * C >= PARALLEL_MIN)
    for (int64_t n = 0; n < B * T; n++) {
        const float *token = (const float *)wte + tokens[n] * C; /* (C) */
        const float *position = (const float *)wpe + n % T * C;  /* (C) */
        float *row = out + n * C;                                 /* (C) */
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

void embedding_backward_cpu(float *dwte, float *dwpe, const float *dout, const int32_t *plan, int64_t B, int64_t T, int64_t C,
                            Stream *stream)
{
    int64_t N = B * T;
    const int32_t *order = plan, *begin = plan + N, *token = begin + N + 1; /* see embedding_plan */
    int64_t runs = N ? token[N] : 0;
    int64_t lines = (C + 15) / 16;                                /* cache lines in a row */
    int64_t slices = cpu_min(cpu_threads(), cpu_max(lines, 1));   /* of channels, one a thread */
    (void)stream;
#pragma omp parallel if (N * C >= PARALLEL_MIN)
    {
#pragma omp for schedule(static) nowait
        for (int64_t s = 0; s < slices; s++) {
            int64_t first = lines * s / slices * 16, last = cpu_min(lines * (s + 1) / slices * 16, C);
            for (int64_t r = 0; r < runs; r++)
                for (int32_t i = begin[r]; i < begin[r + 1]; i++)
                    row_add(dwte + token[r] * C + first, dout + order[i] * C + first, last - first);
        }
#pragma omp for schedule(static)
        for (int64_t t = 0; t < T; t++)
            for (int64_t b = 0; b < B; b++) row_add(dwpe + t * C, dout + (b * T + t) * C, C);
    }
}

int64_t embedding_plan_size(int64_t N) { return 3 * N + 2; }

/* to (N) = from (N) sorted by 11 bits of its tokens, stably. */
static void sort_pass(int32_t *to, const int32_t *from, const int32_t *tokens, int64_t N, int shift)
{
    enum { BITS = 11, DIGITS = 1 << BITS };
    int32_t next[DIGITS] = {0};
    for (int64_t i = 0; i < N; i++) next[tokens[from[i]] >> shift & (DIGITS - 1)]++;
    for (int32_t digit = 0, sum = 0; digit < DIGITS; digit++) {
        int32_t count = next[digit];
        next[digit] = sum;
        sum += count;
    }
    for (int64_t i = 0; i < N; i++) to[next[tokens[from[i]] >> shift & (DIGITS - 1)]++] = from[i];
}

void embedding_plan(int32_t *plan, const int32_t *tokens, int64_t N)
{
    int32_t *order = plan, *begin = plan + N, *token = begin + N + 1; /* begin and token serve as room to sort in first */
    int32_t *from = begin, *to = token, most = 0;
    for (int64_t i = 0; i < N; i++) {
        from[i] = (int32_t)i;
        if (tokens[i] > most) most = tokens[i];
    }
    for (int shift = 0; shift < 31 && most >> shift; shift += 11) {
        sort_pass(to, from, tokens, N, shift);
        int32_t *swap = from;
        from = to;
        to = swap;
    }
    for (int64_t i = 0; i < N; i++) order[i] = from[i];
    int32_t runs = 0;
    for (int64_t i = 0; i < N; i++)
        if (i == 0 || tokens[order[i]] != tokens[order[i - 1]]) {
            begin[runs] = (int32_t)i;
            token[runs++] = tokens[order[i]];
        }
    begin[runs] = (int32_t)N;
    token[N] = runs;
}
