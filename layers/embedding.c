/* embedding.c - rows of two tables added, and their gradients scattered back.
 *
 * The backward pass must add several rows of dout to one row of dwte where a token repeats, always in the same order. The
 * plan that every backend follows decides it: the positions of each token (by a radix sort, stable and O(N)), cut into
 * pieces of a few. Here each thread owns a slice of the channels, whole cache lines of them, and walks over all pieces: no
 * two threads touch one element, no atomics, and the sum is the same for any number of threads.
 */
#include "layers/cpu.h"
#include "layers/vector.h"

void embedding_forward_cpu(float *out, const int32_t *tokens, const float *wte, const float *wpe, int64_t B, int64_t T,
                           int64_t C, Stream *stream)
{
    (void)stream;
#pragma omp parallel for schedule(static) if (B * T * C >= PARALLEL_MIN)
    for (int64_t n = 0; n < B * T; n++) {
        const float *token = wte + tokens[n] * C;  /* (C) */
        const float *position = wpe + n % T * C;   /* (C) */
        float *row = out + n * C;                  /* (C) */
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

size_t embedding_scratch_cpu(int64_t N, int64_t C)
{
    (void)N;
    (void)C;
    return 0;
}

void embedding_backward_cpu(float *dwte, float *dwpe, void *scratch, const float *dout, const int32_t *plan, int64_t B,
                            int64_t T, int64_t C, Stream *stream)
{
    int64_t N = B * T;
    EmbeddingPlan p = embedding_plan_parts(plan, N);
    int64_t lines = (C + 15) / 16;                              /* cache lines in a row */
    int64_t slices = cpu_min(cpu_threads(), cpu_max(lines, 1)); /* of channels, one a thread */
    (void)scratch;
    (void)stream;
#pragma omp parallel if (N * C >= PARALLEL_MIN)
    {
#pragma omp for schedule(static) nowait
        for (int64_t s = 0; s < slices; s++) {
            int64_t first = lines * s / slices * 16, last = cpu_min(lines * (s + 1) / slices * 16, C);
            for (int64_t k = 0; k < *p.pieces; k++)
                for (int32_t i = p.begin[k]; i < p.begin[k + 1]; i++)
                    row_add(dwte + p.token[k] * C + first, dout + p.order[i] * C + first, last - first);
        }
#pragma omp for schedule(static)
        for (int64_t t = 0; t < T; t++)
            for (int64_t b = 0; b < B; b++) row_add(dwpe + t * C, dout + (b * T + t) * C, C);
    }
}

/* --- the plan ---------------------------------------------------------------------------------------------------------- */

EmbeddingPlan embedding_plan_parts(const int32_t *plan, int64_t N)
{
    EmbeddingPlan parts;
    parts.pieces = plan;
    parts.cuts = plan + 1;
    parts.order = plan + 2;
    parts.begin = parts.order + N;
    parts.token = parts.begin + N + 1;
    parts.cut = parts.token + N;
    return parts;
}

/* Two counts, order, begin and token of at most N pieces, cut of at most N / (EMBEDDING_PIECE + 1) tokens. */
int64_t embedding_plan_size(int64_t N) { return 2 + N + (N + 1) + N + N / (EMBEDDING_PIECE + 1) + 1; }

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

/* Where in from (N), which is sorted by token, the run of tokens that begins at i ends. */
static int64_t run_end(const int32_t *from, const int32_t *tokens, int64_t i, int64_t N)
{
    int32_t token = tokens[from[i]];
    while (i < N && tokens[from[i]] == token) i++;
    return i;
}

/* order (N) = the runs of from (N) in the plan's order: those that will be cut, then the others by length, the longest
 * first. */
static void runs_arrange(int32_t *order, const int32_t *from, const int32_t *tokens, int64_t N)
{
    int64_t rows[EMBEDDING_PIECE + 1] = {0}, next[EMBEDDING_PIECE + 1]; /* by length; those that will be cut at 0 */
    for (int64_t i = 0, end; i < N; i = end) {
        end = run_end(from, tokens, i, N);
        rows[end - i > EMBEDDING_PIECE ? 0 : end - i] += end - i;
    }
    int64_t at = rows[0];
    next[0] = 0;
    for (int length = EMBEDDING_PIECE; length > 0; length--) {
        next[length] = at;
        at += rows[length];
    }
    for (int64_t i = 0, end; i < N; i = end) {
        end = run_end(from, tokens, i, N);
        int64_t *to = &next[end - i > EMBEDDING_PIECE ? 0 : end - i];
        memcpy(order + *to, from + i, (size_t)(end - i) * sizeof *order);
        *to += end - i;
    }
}

void embedding_plan(int32_t *plan, const int32_t *tokens, int64_t N)
{
    const EmbeddingPlan parts = embedding_plan_parts(plan, N);
    int32_t *order = plan + (parts.order - plan), *begin = plan + (parts.begin - plan), *token = plan + (parts.token - plan);
    int32_t *cut = plan + (parts.cut - plan), most = 0;
    int32_t *from = begin, *to = token; /* room to sort in first */
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
    runs_arrange(order, from, tokens, N);
    int32_t pieces = 0, cuts = 0;
    for (int64_t i = 0, end; i < N; i = end) {
        end = run_end(order, tokens, i, N);
        int64_t rows = end - i, count = (rows + EMBEDDING_PIECE - 1) / EMBEDDING_PIECE;
        if (count > 1) cut[cuts++] = pieces;
        for (int64_t k = 0; k < count; k++) {
            begin[pieces] = (int32_t)(i + rows * k / count);
            token[pieces++] = tokens[order[i]];
        }
        if (count > 1) cut[cuts] = pieces;
    }
    if (cuts == 0) cut[0] = 0;
    begin[pieces] = (int32_t)N;
    plan[0] = pieces;
    plan[1] = cuts;
}
