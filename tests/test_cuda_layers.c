/* test_cuda_layers.c - every operation of the GPU backends against its CPU twin, at odd shapes.
 *
 * Inputs are random, shifted off zero mean, and rounded to the backend's type first, so that both compute from the same
 * numbers. Results may differ by the order of fp32 sums, and where they are bf16 by one rounding; what is fp32 on a bf16
 * backend (the residual stream, statistics, gradients) keeps the fp32 bound, or says why not. Outputs that are
 * overwritten are filled with NaN before; those that accumulate start from random values. Guard bands after each buffer are
 * checked. Each operation runs twice, and the second time must give the same bits.
 *
 * The same program runs on a GPU and, built with SIMT=1, under the emulation of tests/simt: there the largest shapes are
 * left out, and the products are tested a second time without the library's epilogues, so that what stands in for them is
 * tested too.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/random.h"
#include "layers/backend.h"
#include "tests/test.h"

/* Allowed error: sum * (largest value of the tensor, or of the terms that its values are summed from) for the order of sums,
 * and of each value round * |value|: half a unit in the last place of bf16 on each side is 2^-8, and fp32 results need none
 * beyond sum. A bf16 product without a fused epilogue (the library has none for widths that are not a multiple of 8) is
 * rounded before its bias is added, which may cancel: twice * (largest value). */
static const struct { double sum, round, twice; } BOUNDS[DTYPE_COUNT] = {
    [DTYPE_FP32] = {4e-6, 0, 0},
    [DTYPE_BF16] = {1e-3, 1.0 / 128, 1.0 / 256},
};

enum { GUARD = 64 }; /* elements behind each buffer */
static const float GUARD_VALUE = 12345.0f;

static const Backend *gpu, *cpu = &backend_cpu_fp32;
static Stream *gpu_stream, *cpu_stream;
static uint64_t seed = 1;

/* One tensor in three places: the host, the CPU backend's memory (fp32), the GPU's (real, or fp32 where it says so). */
typedef struct Tensor {
    int64_t n;
    int fp32;      /* the residual stream, statistics, gradients, parameters of norms and embeddings */
    int coarse;    /* fp32, but computed by bf16 products: keeps the bf16 bound of sums only */
    double terms;  /* size of the numbers it is summed from, where that is more than its own */
    float *start;  /* (n) what both begin with */
    float *cpu;    /* (n) */
    void *gpu;     /* (n + GUARD) */
} Tensor;

static size_t gpu_element(const Tensor *t) { return t->fp32 ? 4 : gpu->element; }

/* Brings start to both sides. */
static void tensor_reset(Tensor *t)
{
    memcpy(t->cpu, t->start, (size_t)t->n * 4);
    float *guarded = malloc((size_t)(t->n + GUARD) * 4);
    void *staging = gpu->alloc((size_t)(t->n + GUARD) * 4, gpu_stream);
    memcpy(guarded, t->start, (size_t)t->n * 4);
    for (int i = 0; i < GUARD; i++) guarded[t->n + i] = GUARD_VALUE;
    gpu->copy_in(staging, guarded, (size_t)(t->n + GUARD) * 4, gpu_stream);
    if (t->fp32) gpu->copy(t->gpu, staging, (size_t)(t->n + GUARD) * 4, gpu_stream);
    else gpu->from_fp32(t->gpu, staging, t->n + GUARD, gpu_stream);
    gpu->synchronize(gpu_stream);
    gpu->free(staging, gpu_stream);
    free(guarded);
}

/* The GPU's values as fp32, guard included. */
static float *tensor_read(const Tensor *t)
{
    float *out = malloc((size_t)(t->n + GUARD) * 4);
    void *staging = gpu->alloc((size_t)(t->n + GUARD) * 4, gpu_stream);
    if (t->fp32) gpu->copy(staging, t->gpu, (size_t)(t->n + GUARD) * 4, gpu_stream);
    else gpu->to_fp32(staging, t->gpu, t->n + GUARD, gpu_stream);
    gpu->copy_out(out, staging, (size_t)(t->n + GUARD) * 4, gpu_stream);
    gpu->free(staging, gpu_stream);
    return out;
}

static float bf16_round(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, 4);
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000u;
    memcpy(&x, &bits, 4);
    return x;
}

typedef enum Fill { RANDOM, NOTHING } Fill; /* NOTHING: NaN */

static Tensor tensor_new(int64_t n, int fp32, Fill fill, double spread)
{
    Tensor t = {.n = n, .fp32 = fp32};
    t.start = malloc((size_t)(n + 1) * 4);
    t.cpu = malloc((size_t)(n + 1) * 4);
    for (int64_t i = 0; i < n; i++) {
        float value = fill == NOTHING ? NAN : (float)(spread * (random_uniform(&seed) + random_uniform(&seed) - 0.9));
        t.start[i] = fp32 || gpu->dtype == DTYPE_FP32 || fill == NOTHING ? value : bf16_round(value);
    }
    t.gpu = gpu->alloc((size_t)(n + GUARD) * gpu_element(&t), gpu_stream);
    tensor_reset(&t);
    return t;
}

static void tensor_free(Tensor *t)
{
    gpu->free(t->gpu, gpu_stream);
    free(t->start);
    free(t->cpu);
}

static int rounded_twice; /* the operation under test is such a product */
static double largest_of(const float *values, int64_t n)
{
    double largest = 0;
    for (int64_t i = 0; i < n; i++) largest = fmax(largest, fabs((double)values[i]));
    return largest;
}

static double worst; /* of the running program: error over what was allowed */

static void tensor_check(const Tensor *t, const char *name, float *first)
{
    float *got = tensor_read(t);
    double largest = t->terms, round = t->fp32 ? 0 : BOUNDS[gpu->dtype].round;
    double sum = BOUNDS[t->fp32 && !t->coarse ? DTYPE_FP32 : gpu->dtype].sum +
                 (rounded_twice ? BOUNDS[gpu->dtype].twice : 0);
    for (int64_t i = 0; i < t->n; i++)
        if (isfinite(t->cpu[i])) largest = fmax(largest, fabs((double)t->cpu[i]));
    for (int64_t i = 0; i < t->n; i++) {
        double allowed = sum * largest + round * fabs((double)t->cpu[i]) + 1e-30;
        double error = fabs((double)got[i] - (double)t->cpu[i]);
        if (isfinite(error)) worst = fmax(worst, error / allowed);
        if (!CHECK(error <= allowed, "%s[%lld] is %.9g, expected %.9g within %.2g", name, (long long)i, (double)got[i],
                   (double)t->cpu[i], allowed))
            break;
    }
    float guard = t->fp32 || gpu->dtype == DTYPE_FP32 ? GUARD_VALUE : bf16_round(GUARD_VALUE);
    for (int i = 0; i < GUARD; i++)
        if (!CHECK(got[t->n + i] == guard, "%s: written %d elements beyond its end", name, i + 1)) break;
    if (first) CHECK(!memcmp(first, got, (size_t)t->n * 4), "%s: the second run gave other bits", name);
    free(got);
}

static void *scratch_new(size_t bytes)
{
    float *nan = malloc(bytes + 16);
    memset(nan, 0xFF, bytes + 16);
    void *scratch = gpu->alloc(bytes + 16, gpu_stream);
    gpu->copy_in(scratch, nan, bytes + 16, gpu_stream);
    free(nan);
    return scratch;
}

/* Runs `gpu_call` twice from the same start and `cpu_call` once, then checks and frees the tensors of the list. */
#define COMPARE(outputs, cpu_call, gpu_call)                                                                                \
    do {                                                                                                                    \
        enum { OUTPUTS = sizeof outputs / sizeof *outputs };                                                                \
        float *first[OUTPUTS];                                                                                              \
        gpu_call;                                                                                                           \
        for (int o = 0; o < OUTPUTS; o++) { first[o] = tensor_read(outputs[o].tensor); tensor_reset(outputs[o].tensor); }   \
        gpu_call;                                                                                                           \
        cpu_call;                                                                                                           \
        for (int o = 0; o < OUTPUTS; o++) { tensor_check(outputs[o].tensor, outputs[o].name, first[o]); free(first[o]); }   \
    } while (0)

typedef struct Output {
    Tensor *tensor;
    const char *name;
} Output;

static void free_all(Tensor **tensors, size_t count)
{
    for (size_t i = 0; i < count; i++) tensor_free(tensors[i]);
}
#define FREE(...) do { Tensor *list[] = {__VA_ARGS__}; free_all(list, sizeof list / sizeof *list); } while (0)

/* Both ways to call layernorm_backward that the model has: dx over dresid with a rounded copy, and dx alone, with neither.
 * The copy is exactly dx rounded. */
static void test_layernorm_backward(Tensor *x, Tensor *w, Tensor *mean, Tensor *rstd, int64_t N, int64_t C)
{
    Tensor dx = tensor_new(N * C, 1, RANDOM, 1), alone = tensor_new(N * C, 1, NOTHING, 0),
           dout = tensor_new(N * C, 0, RANDOM, 1);
    Tensor rounded = tensor_new(N * C, 0, NOTHING, 0);
    Tensor dw = tensor_new(C, 1, RANDOM, 1), db = tensor_new(C, 1, RANDOM, 1);
    void *scratch = scratch_new(gpu->layernorm_scratch(N, C)), *cpu_scratch = malloc(cpu->layernorm_scratch(N, C) + 16);
    /* dx is rstd times a difference: of narrow rows, whose variance may be near 0, it cancels most of what is subtracted;
     * and the normalised x of the terms of dweight is at most sqrt(C). */
    dx.terms = alone.terms = largest_of(rstd->start, N) * largest_of(dout.start, N * C) * largest_of(w->start, C);
    dw.terms = largest_of(rstd->start, N) * largest_of(dout.start, N * C);
    Output with[] = {{&dx, "dx"}, {&dw, "dweight"}, {&db, "dbias"}},
           without[] = {{&alone, "dx without dresid"}, {&dw, "dweight"}};
    void *copy = gpu->dtype == DTYPE_FP32 ? dx.gpu : rounded.gpu;
    COMPARE(with,
            cpu->layernorm_backward(dx.cpu, NULL, dw.cpu, db.cpu, cpu_scratch, dx.cpu, dout.cpu, x->cpu, w->cpu, mean->cpu,
                                    rstd->cpu, N, C, cpu_stream),
            gpu->layernorm_backward(dx.gpu, copy, dw.gpu, db.gpu, scratch, dx.gpu, dout.gpu, x->gpu, w->gpu, mean->gpu,
                                    rstd->gpu, N, C, gpu_stream));
    if (gpu->dtype == DTYPE_BF16) {
        float *exact = tensor_read(&dx), *got = tensor_read(&rounded);
        for (int64_t i = 0; i < N * C; i++)
            if (!CHECK(got[i] == bf16_round(exact[i]), "the copy[%lld] is %.9g of %.9g", (long long)i, (double)got[i],
                       (double)exact[i]))
                break;
        free(exact);
        free(got);
    }
    tensor_reset(&dw);
    tensor_reset(&db);
    COMPARE(without,
            cpu->layernorm_backward(alone.cpu, NULL, dw.cpu, db.cpu, cpu_scratch, NULL, dout.cpu, x->cpu, w->cpu, mean->cpu,
                                    rstd->cpu, N, C, cpu_stream),
            gpu->layernorm_backward(alone.gpu, NULL, dw.gpu, db.gpu, scratch, NULL, dout.gpu, x->gpu, w->gpu, mean->gpu,
                                    rstd->gpu, N, C, gpu_stream));
    gpu->free(scratch, gpu_stream);
    free(cpu_scratch);
    FREE(&dx, &alone, &dout, &rounded, &dw, &db);
}

static void test_layernorm(int64_t N, int64_t C)
{
    TEST("%s layernorm N%lld C%lld", gpu->name, (long long)N, (long long)C);
    Tensor x = tensor_new(N * C, 1, RANDOM, 2), y = tensor_new(N * C, 0, RANDOM, 2);
    Tensor w = tensor_new(C, 1, RANDOM, 1), b = tensor_new(C, 1, RANDOM, 1);
    Tensor sum = tensor_new(N * C, 1, NOTHING, 0), out = tensor_new(N * C, 0, NOTHING, 0);
    Tensor mean = tensor_new(N, 1, NOTHING, 0), rstd = tensor_new(N, 1, NOTHING, 0);
    Output forward[] = {{&out, "out"}, {&mean, "mean"}, {&rstd, "rstd"}};
    Output fused[] = {{&sum, "sum"}, {&out, "out"}, {&mean, "mean"}, {&rstd, "rstd"}};
    COMPARE(forward, cpu->layernorm_forward(out.cpu, mean.cpu, rstd.cpu, x.cpu, w.cpu, b.cpu, N, C, cpu_stream),
            gpu->layernorm_forward(out.gpu, mean.gpu, rstd.gpu, x.gpu, w.gpu, b.gpu, N, C, gpu_stream));
    /* Both backward passes read the same statistics, so that one rounding does not become a difference of many. */
    memcpy(mean.start, mean.cpu, (size_t)N * 4);
    memcpy(rstd.start, rstd.cpu, (size_t)N * 4);
    tensor_reset(&mean);
    tensor_reset(&rstd);
    test_layernorm_backward(&x, &w, &mean, &rstd, N, C);
    COMPARE(
        fused,
        cpu->residual_layernorm_forward(sum.cpu, out.cpu, mean.cpu, rstd.cpu, x.cpu, y.cpu, w.cpu, b.cpu, N, C, cpu_stream),
        gpu->residual_layernorm_forward(sum.gpu, out.gpu, mean.gpu, rstd.gpu, x.gpu, y.gpu, w.gpu, b.gpu, N, C, gpu_stream));
    FREE(&x, &y, &w, &b, &sum, &out, &mean, &rstd);
}

static void test_linear(int64_t N, int64_t C, int64_t OC)
{
    TEST("%s linear N%lld C%lld OC%lld", gpu->name, (long long)N, (long long)C, (long long)OC);
    if (gpu->dtype == DTYPE_BF16 && C % 8 == 0 && OC % 8 == 0 && UNDER_RACECHECK()) {
        SKIP("racecheck takes minutes over it");
        return;
    }
    double spread = 1 / sqrt((double)C);
    rounded_twice = OC % 8 != 0 || C % 8 != 0 || getenv("SIMT_CUBLASLT_REFUSE");
    Tensor x = tensor_new(N * C, 0, RANDOM, 1), w = tensor_new(OC * C, 0, RANDOM, spread), b = tensor_new(OC, 0, RANDOM, 1);
    Tensor out = tensor_new(N * OC, 0, NOTHING, 0), pre = tensor_new(N * OC, 0, NOTHING, 0);
    Tensor hidden = tensor_new(N * C, 0, RANDOM, 2);
    Tensor dout = tensor_new(N * OC, 0, RANDOM, 1), dx = tensor_new(N * C, 0, NOTHING, 0);
    Tensor dw = tensor_new(OC * C, 1, RANDOM, 1), db = tensor_new(OC, 1, RANDOM, 1);
    dw.coarse = db.coarse = 1;
    void *scratch = scratch_new(gpu->linear_scratch(N, C, OC)), *cpu_scratch = malloc(cpu->linear_scratch(N, C, OC) + 16);
    Output forward[] = {{&out, "out"}}, gelu[] = {{&out, "gelu"}, {&pre, "pre"}};
    Output input[] = {{&dx, "dx"}}, weight[] = {{&dw, "dweight"}, {&db, "dbias"}};
    COMPARE(forward, cpu->linear_forward(out.cpu, x.cpu, w.cpu, b.cpu, N, C, OC, cpu_stream),
            gpu->linear_forward(out.gpu, x.gpu, w.gpu, b.gpu, N, C, OC, gpu_stream));
    COMPARE(forward, cpu->linear_forward(out.cpu, x.cpu, w.cpu, NULL, N, C, OC, cpu_stream),
            gpu->linear_forward(out.gpu, x.gpu, w.gpu, NULL, N, C, OC, gpu_stream));
    COMPARE(gelu, cpu->linear_gelu_forward(out.cpu, pre.cpu, x.cpu, w.cpu, b.cpu, N, C, OC, cpu_stream),
            gpu->linear_gelu_forward(out.gpu, pre.gpu, x.gpu, w.gpu, b.gpu, N, C, OC, gpu_stream));
    COMPARE(gelu, cpu->linear_gelu_forward(out.cpu, pre.cpu, x.cpu, w.cpu, NULL, N, C, OC, cpu_stream),
            gpu->linear_gelu_forward(out.gpu, pre.gpu, x.gpu, w.gpu, NULL, N, C, OC, gpu_stream));
    COMPARE(input, cpu->linear_backward_input(dx.cpu, dout.cpu, w.cpu, NULL, N, C, OC, cpu_stream),
            gpu->linear_backward_input(dx.gpu, dout.gpu, w.gpu, NULL, N, C, OC, gpu_stream));
    COMPARE(input, cpu->linear_backward_input(dx.cpu, dout.cpu, w.cpu, hidden.cpu, N, C, OC, cpu_stream),
            gpu->linear_backward_input(dx.gpu, dout.gpu, w.gpu, hidden.gpu, N, C, OC, gpu_stream));
    COMPARE(weight, cpu->linear_backward_weight(dw.cpu, db.cpu, cpu_scratch, dout.cpu, x.cpu, N, C, OC, cpu_stream),
            gpu->linear_backward_weight(dw.gpu, db.gpu, scratch, dout.gpu, x.gpu, N, C, OC, gpu_stream));
    gpu->free(scratch, gpu_stream);
    free(cpu_scratch);
    rounded_twice = 0;
    FREE(&x, &w, &b, &out, &pre, &hidden, &dout, &dx, &dw, &db);
}

/* n integers in GPU memory. */
static int32_t *integers_new(const int32_t *values, int64_t n)
{
    int32_t *memory = gpu->alloc((size_t)n * 4 + 16, gpu_stream);
    gpu->copy_in(memory, values, (size_t)n * 4, gpu_stream);
    return memory;
}

static void test_embedding(int64_t B, int64_t T, int64_t C, int64_t V)
{
    TEST("%s embedding B%lld T%lld C%lld V%lld", gpu->name, (long long)B, (long long)T, (long long)C, (long long)V);
    int64_t N = B * T;
    int32_t *tokens = malloc((size_t)(N + 1) * 4), *plan = malloc((size_t)embedding_plan_size(N) * 4);
    for (int64_t i = 0; i < N; i++) tokens[i] = i % 3 ? (int32_t)(random_u64(&seed) % (uint64_t)V) : (int32_t)V - 1;
    embedding_plan(plan, tokens, N);
    int32_t *gpu_tokens = integers_new(tokens, N), *gpu_plan = integers_new(plan, embedding_plan_size(N));
    Tensor wte = tensor_new(V * C, 1, RANDOM, 1), wpe = tensor_new(T * C, 1, RANDOM, 1);
    Tensor dwte = tensor_new(V * C, 1, RANDOM, 1), dwpe = tensor_new(T * C, 1, RANDOM, 1);
    Tensor out = tensor_new(N * C, 1, NOTHING, 0), dout = tensor_new(N * C, 1, RANDOM, 1);
    void *scratch = scratch_new(gpu->embedding_scratch(N, C));
    Output forward[] = {{&out, "out"}}, backward[] = {{&dwte, "dwte"}, {&dwpe, "dwpe"}};
    COMPARE(forward, cpu->embedding_forward(out.cpu, tokens, wte.cpu, wpe.cpu, B, T, C, cpu_stream),
            gpu->embedding_forward(out.gpu, gpu_tokens, wte.gpu, wpe.gpu, B, T, C, gpu_stream));
    COMPARE(backward, cpu->embedding_backward(dwte.cpu, dwpe.cpu, NULL, dout.cpu, plan, B, T, C, cpu_stream),
            gpu->embedding_backward(dwte.gpu, dwpe.gpu, scratch, dout.gpu, gpu_plan, B, T, C, gpu_stream));
    gpu->free(scratch, gpu_stream);
    gpu->free(gpu_tokens, gpu_stream);
    gpu->free(gpu_plan, gpu_stream);
    free(tokens);
    free(plan);
    FREE(&wte, &wpe, &out, &dout, &dwte, &dwpe);
}

static void test_loss(int64_t N, int64_t V, int64_t Vp, double spread, double offset)
{
    TEST("%s loss N%lld V%lld of %lld, logits %g up to %g", gpu->name, (long long)N, (long long)V, (long long)Vp, offset,
         spread);
    int32_t *targets = malloc((size_t)(N + 1) * 4);
    for (int64_t i = 0; i < N; i++) targets[i] = i % 5 == 3 ? -1 : (int32_t)(random_u64(&seed) % (uint64_t)V);
    int32_t *gpu_targets = integers_new(targets, N);
    Tensor logits = tensor_new(N * Vp, 0, RANDOM, spread), losses = tensor_new(N, 1, NOTHING, 0);
    for (int64_t i = 0; i < N * Vp; i++)
        logits.start[i] = gpu->dtype == DTYPE_BF16 ? bf16_round(logits.start[i] + (float)offset)
                                                   : logits.start[i] + (float)offset;
    tensor_reset(&logits);
    Output loss[] = {{&losses, "losses"}}, both[] = {{&losses, "losses"}, {&logits, "dlogits"}};
    COMPARE(loss, cpu->loss_forward_backward(losses.cpu, logits.cpu, targets, 0, N, V, Vp, cpu_stream),
            gpu->loss_forward_backward(losses.gpu, logits.gpu, gpu_targets, 0, N, V, Vp, gpu_stream));
    COMPARE(both, cpu->loss_forward_backward(losses.cpu, logits.cpu, targets, 0.25f, N, V, Vp, cpu_stream),
            gpu->loss_forward_backward(losses.gpu, logits.gpu, gpu_targets, 0.25f, N, V, Vp, gpu_stream));
    double total = 1.5, expected = 1.5, *gpu_total = gpu->alloc(sizeof total, gpu_stream);
    gpu->copy_in(gpu_total, &total, sizeof total, gpu_stream);
    gpu->losses_sum(gpu_total, losses.gpu, N, gpu_stream);
    gpu->copy_out(&total, gpu_total, sizeof total, gpu_stream);
    for (int64_t i = 0; i < N; i++) expected += (double)losses.cpu[i];
    CHECK(fabs(total - expected) <= 1e-5 * fabs(expected), "the losses sum to %.12g, expected %.12g", total, expected);
    gpu->free(gpu_total, gpu_stream);
    gpu->free(gpu_targets, gpu_stream);
    free(targets);
    FREE(&logits, &losses);
}

/* A NaN or infinity makes its own row's loss NaN or infinite and no other's, wherever it stands. */
static void test_loss_nan(int64_t V)
{
    TEST("%s loss of a row with a NaN or infinity among %lld", gpu->name, (long long)V);
    const int32_t targets[3] = {0, (int32_t)V - 1, (int32_t)V / 2};
    int32_t *gpu_targets = integers_new(targets, 3);
    Tensor logits = tensor_new(3 * V, 0, RANDOM, 3), losses = tensor_new(3, 1, NOTHING, 0);
    for (int64_t at = 0; at < V; at += V / 9 + 1)
        for (int kind = 0; kind < 2; kind++) {
            float kept = logits.start[V + at];
            logits.start[V + at] = kind ? INFINITY : NAN;
            tensor_reset(&logits);
            gpu->loss_forward_backward(losses.gpu, logits.gpu, gpu_targets, 1, 3, V, V, gpu_stream);
            float *got = tensor_read(&losses), *gradient = tensor_read(&logits);
            CHECK(!isfinite(got[1]), "the loss is %g with a fault at %lld", (double)got[1], (long long)at);
            int64_t spoiled = 0;
            for (int64_t v = 0; v < V; v++) spoiled += !isfinite(gradient[v]) || !isfinite(gradient[2 * V + v]);
            CHECK(isfinite(got[0]) && isfinite(got[2]) && !spoiled, "the fault at %lld spread to another row",
                  (long long)at);
            logits.start[V + at] = kept;
            free(got);
            free(gradient);
        }
    gpu->free(gpu_targets, gpu_stream);
    FREE(&logits, &losses);
}

static void test_gelu(int64_t n)
{
    TEST("%s gelu of %lld", gpu->name, (long long)n);
    Tensor pre = tensor_new(n, 0, RANDOM, 8), out = tensor_new(n, 0, NOTHING, 0);
    for (int64_t i = 0; i < n && i < 4; i++) pre.start[i] = (float[]){100, -100, 0, 1e-6f}[i];
    if (gpu->dtype == DTYPE_BF16) for (int64_t i = 0; i < n && i < 4; i++) pre.start[i] = bf16_round(pre.start[i]);
    tensor_reset(&pre);
    Output outputs[] = {{&out, "gelu"}};
    COMPARE(outputs, cpu->gelu_forward(out.cpu, pre.cpu, n, cpu_stream), gpu->gelu_forward(out.gpu, pre.gpu, n, gpu_stream));
    FREE(&pre, &out);
}

static void test_adamw(int64_t n, int64_t n_decay, float clip, float poison)
{
    TEST("%s adamw of %lld, %lld decay, clip %g%s", gpu->name, (long long)n, (long long)n_decay, (double)clip,
         isfinite(poison) ? "" : ", not finite");
    Tensor master = tensor_new(n, 1, RANDOM, 1), grads = tensor_new(n, 1, RANDOM, 1);
    Tensor m = tensor_new(n, 1, RANDOM, 0.1), v = tensor_new(n, 1, RANDOM, 0.1);
    Tensor params = tensor_new(n, 0, RANDOM, 1), norm = tensor_new(1, 1, NOTHING, 0);
    for (int64_t i = 0; i < n; i++) v.start[i] = fabsf(v.start[i]);
    grads.start[n / 2] = isfinite(poison) ? grads.start[n / 2] : poison;
    for (int64_t i = 0; i < n; i++)
        params.start[i] = gpu->dtype == DTYPE_BF16 ? bf16_round(master.start[i]) : master.start[i];
    tensor_reset(&v);
    tensor_reset(&grads);
    tensor_reset(&params);
    AdamwStep step = {.lr = 1e-2f, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-8f, .weight_decay = 0.1f,
                      .bias_correction1 = 0.2f, .bias_correction2 = 0.1f, .clip = clip};
    AdamwStep *gpu_step = gpu->alloc(sizeof step, gpu_stream);
    gpu->copy_in(gpu_step, &step, sizeof step, gpu_stream);
    void *scratch = scratch_new(gpu->norm_scratch(n)), *cpu_scratch = malloc(cpu->norm_scratch(n) + 16);
    Output outputs[] = {{&norm, "norm"}}, updated[] = {{&master, "master"}, {&m, "m"}, {&v, "v"}, {&params, "params"}};
    if (isfinite(poison)) {
        COMPARE(outputs, cpu->global_norm(norm.cpu, cpu_scratch, grads.cpu, n, cpu_stream),
                gpu->global_norm(norm.gpu, scratch, grads.gpu, n, gpu_stream));
    } else {
        gpu->global_norm(norm.gpu, scratch, grads.gpu, n, gpu_stream);
        cpu->global_norm(norm.cpu, cpu_scratch, grads.cpu, n, cpu_stream);
        float *got = tensor_read(&norm);
        CHECK(!isfinite(got[0]), "the norm is %g, expected one that is not finite", (double)got[0]);
        free(got);
    }
    COMPARE(updated,
            cpu->adamw_update(params.cpu, master.cpu, m.cpu, v.cpu, grads.cpu, norm.cpu, &step, n, n_decay, cpu_stream),
            gpu->adamw_update(params.gpu, master.gpu, m.gpu, v.gpu, grads.gpu, norm.gpu, gpu_step, n, n_decay, gpu_stream));
    gpu->free(gpu_step, gpu_stream);
    gpu->free(scratch, gpu_stream);
    free(cpu_scratch);
    FREE(&master, &m, &v, &grads, &params, &norm);
}

static void test_recording(void)
{
    TEST("%s a recording replays what was recorded", gpu->name);
    if (!gpu->record_begin) { CHECK(0, "no recordings on a GPU"); return; }
    Tensor x = tensor_new(1000, 1, RANDOM, 1);
    double total = 0, *sum = gpu->alloc(sizeof total, gpu_stream), expected = 0;
    gpu->zero(sum, sizeof total, gpu_stream);
    gpu->synchronize(gpu_stream);
    gpu->record_begin(gpu_stream);
    gpu->losses_sum(sum, x.gpu, 1000, gpu_stream);
    Recording *recording = gpu->record_end(gpu_stream);
    for (int i = 0; i < 3; i++) gpu->replay(recording, gpu_stream);
    gpu->copy_out(&total, sum, sizeof total, gpu_stream);
    for (int i = 0; i < 1000; i++) expected += (double)x.start[i];
    expected *= 3;
    double error = fabs(total - expected);
    CHECK(error < 1e-9 * fabs(expected) + 1e-9, "three replays gave %.12g, expected %.12g", total, expected);
    gpu->recording_free(recording);
    gpu->free(sum, gpu_stream);
    FREE(&x);
}

/* In a recording, sums on the side beside a sum on the main stream, more than any number of events, joined in part by older
 * tickets and more than once; then everything is joined by the end. Outside of one, all is one stream. */
static void test_side(int records)
{
    enum { SUMS = 11, REPLAYS = 20 };
    TEST("%s work on the side, %s", gpu->name, records ? "recorded" : "not recorded");
    Tensor x = tensor_new(1000, 1, RANDOM, 1);
    double *sums = gpu->alloc((2 * SUMS + 1) * sizeof *sums, gpu_stream), seen[2 * SUMS + 1], sum = 0;
    Recording *recording = NULL;
    for (int i = 0; i < 1000; i++) sum += (double)x.start[i];
    gpu->zero(sums, sizeof seen, gpu_stream);
    gpu->synchronize(gpu_stream);
    if (records) gpu->record_begin(gpu_stream);
    for (int replay = 0; replay < (records ? 1 : REPLAYS); replay++) {
        int64_t tickets[SUMS];
        gpu->zero(sums + SUMS, sizeof *sums, gpu_stream);
        for (int i = 0; i < SUMS; i++) {
            /* Each adds to its own, then what was recorded before has to have come: the total of the main stream. */
            gpu->losses_sum(sums + SUMS, x.gpu, 1000, gpu_stream);
            gpu->side_begin(gpu_stream);
            gpu->losses_sum(sums + i, x.gpu, 1000, gpu_stream);
            tickets[i] = gpu->side_end(gpu_stream);
            CHECK(records ? i == 0 || tickets[i] > tickets[i - 1] : tickets[i] == 0, "ticket %lld", (long long)tickets[i]);
            if (i % 3 == 2) gpu->side_join(gpu_stream, tickets[i - 2]);
            if (i % 3 == 2) gpu->copy(sums + SUMS + 1 + i, sums + i - 2, sizeof *sums, gpu_stream);
        }
        gpu->side_join(gpu_stream, tickets[1]);
        gpu->side_join(gpu_stream, tickets[SUMS - 2]);
        gpu->copy(sums + SUMS + 1, sums + SUMS - 2, sizeof *sums, gpu_stream);
    }
    if (records) {
        recording = gpu->record_end(gpu_stream);
        for (int i = 0; i < REPLAYS; i++) gpu->replay(recording, gpu_stream);
    }
    gpu->copy_out(seen, sums, sizeof seen, gpu_stream);
    for (int i = 0; i < 2 * SUMS + 1; i++) {
        double expected = i < SUMS || (i > SUMS + 1 && (i - SUMS - 1) % 3 == 2) || i == SUMS + 1 ? REPLAYS * sum
                          : i == SUMS                                                           ? SUMS * sum
                                                                                                : 0;
        CHECK(fabs(seen[i] - expected) <= 1e-9 * fabs(expected), "sum %d is %.12g, expected %.12g", i, seen[i], expected);
    }
    if (recording) gpu->recording_free(recording);
    gpu->free(sums, gpu_stream);
    FREE(&x);
}

/* The emulated library's last product took so many milliseconds longer than it needs: see tests/simt/cublasLt.cpp. */
static void check_delay(const char *expected, const char *delays)
{
    const char *delayed = getenv("SIMT_CUBLASLT_DELAYED");
    TEST("%s of products that take %s ms longer, that of %s is taken", gpu->name, delays, expected);
    CHECK(delayed && !strcmp(delayed, expected), "that of %s was", delayed ? delayed : "none");
}

/* Products whose algorithm is found by trying: what they add to is added to once. Under the emulation the library offers
 * several, of which some refuse to run: the first is taken where nothing is tried, and the fastest where it is. */
static void test_measured(int emulated)
{
    static const struct { const char *delays, *before, *after; int deterministic; } cases[] = {
        {"2,0,-1,2", "2", "0", 0}, {"-1,0,2", NULL, "0", 0}, {"2,0", "2", "2", 1},
    };
    char error[512];
    Stream *usual = gpu_stream;
    for (size_t k = 0; k < (emulated ? sizeof cases / sizeof *cases : 1); k++) {
        BackendOptions options = {.deterministic = cases[k].deterministic};
        if (emulated) setenv("SIMT_CUBLASLT_DELAYS", cases[k].delays, 1);
        gpu_stream = gpu->open(0, &options, error, sizeof error);
        if (cases[k].before) test_linear(17, 48, 136); /* known by then, and not tried */
        if (emulated && cases[k].before) check_delay(cases[k].before, cases[k].delays);
        gpu->measure(gpu_stream, 1);
        test_linear(17, 48, 136);
        if (!emulated) test_linear(1000, 64, 257);
        if (!emulated) test_linear(300, 384, 1536);
        if (!emulated) test_linear(24, 64, 2048); /* long sums of few results: parts of them are added up */
        if (!emulated) test_linear(24, 2048, 64);
        gpu->measure(gpu_stream, 0);
        test_linear(17, 48, 136);
        if (emulated) check_delay(cases[k].after, cases[k].delays);
        gpu->close(gpu_stream);
    }
    unsetenv("SIMT_CUBLASLT_DELAYS");
    gpu_stream = usual;
}

/* Bias, GELU and its slope as kernels after the product, as where cublasLt has no epilogue: the emulation is told to have
 * none. */
static void test_without_epilogues(void)
{
    char error[512];
    BackendOptions options = {0};
    Stream *usual = gpu_stream;
    setenv("SIMT_CUBLASLT_REFUSE", "4,160,164,192", 1); /* BIAS, GELU_AUX, GELU_AUX_BIAS, DGELU */
    gpu_stream = gpu->open(0, &options, error, sizeof error);
    test_linear(3, 5, 7);
    test_linear(17, 48, 136);
    test_linear(65, 130, 33);
    gpu->close(gpu_stream);
    unsetenv("SIMT_CUBLASLT_REFUSE");
    gpu_stream = usual;
}

/* Is the GPU the emulation of tests/simt? */
static int is_emulated(void)
{
    char text[256];
    gpu->describe(text, sizeof text, gpu_stream);
    return strstr(text, "SIMT emulation") != NULL;
}

/* Shapes of which there are many like them at a size that the emulation can bear. */
static void test_large(void)
{
    test_layernorm(5000, 96);
    test_linear(256, 768, 3072);
    test_embedding(4, 256, 768, 500);
    test_loss(40, 50257, 50304, 5, 0);
    test_adamw(100000, 65536, 1, 0);
}

static void test_backend(void)
{
    static const int64_t channels[] = {1,   5,    8,    48,   130,  256,  384,  512,  640,
                                       768, 1000, 1280, 1536, 1600, 2048, 2500, 3000, 4100};
    for (size_t i = 0; i < sizeof channels / sizeof *channels; i++) test_layernorm(i % 2 ? 67 : 5, channels[i]);
    test_layernorm(1, 768);
    test_layernorm(300, 48); /* more rows than are under way at once, of one warp each and of teams of 2 and 4 */
    test_layernorm(150, 768);
    test_layernorm(61, 1280);
    test_layernorm(50, 1600);
    test_linear(1, 1, 1);
    test_linear(3, 5, 7);
    test_linear(17, 48, 130);
    test_linear(65, 130, 33);
    test_linear(1000, 64, 257);
    test_embedding(1, 1, 1, 1);
    test_embedding(2, 3, 5, 7);
    test_embedding(3, 17, 48, 2);
    test_embedding(5, 65, 130, 257);
    test_embedding(70, 5, 64, 9);
    test_embedding(2, 40, 1604, 3);
    test_embedding(11, 7, 1000, 40);
    test_embedding(9, 33, 1030, 4);
    test_loss(1, 1, 1, 1, 0);
    test_loss(7, 2, 16, 3, 0);
    test_loss(33, 257, 384, 5, 0);
    test_loss(20, 1000, 1001, 5, 0);
    test_loss(5, 300, 384, 1e5, 0);
    test_loss(5, 257, 384, 3, 1e5);
    test_loss(5, 257, 384, 3, -1e5);
    test_loss(2, 20011, 20096, 5, 0); /* several packs a thread */
    test_loss_nan(9);
    test_loss_nan(1000);
    test_gelu(1);
    test_gelu(1003);
    test_gelu(100000);
    test_adamw(1, 1, 1, 0);
    test_adamw(1003, 500, 0, 0);
    test_adamw(1003, 500, 1, NAN);
    test_adamw(1003, 500, 1, INFINITY);
    test_adamw(4096, 1024, 1, 0);
    test_linear(9, 64, 256);
    test_recording();
    test_side(0);
    test_side(1);
    test_measured(is_emulated());
    if (is_emulated()) test_without_epilogues();
    else test_large();
}

int main(void)
{
    static const Dtype dtypes[] = {DTYPE_FP32, DTYPE_BF16};
    char error[512] = "";
    BackendOptions options = {0};
    cpu_stream = cpu->open(0, &options, error, sizeof error);
    for (int d = 0; d < 2; d++) {
        gpu = backend_find(ATTENTION_CUDA, dtypes[d]);
        gpu_stream = gpu ? gpu->open(0, &options, error, sizeof error) : NULL;
        if (!gpu_stream) {
            TEST("the layers of cuda_%s", d ? "bf16" : "fp32");
            SKIP("no GPU kernel ran: %s", gpu ? error : "this build is for the CPU only");
            continue;
        }
        worst = 0;
        test_backend();
        TEST("%s: worst error", gpu->name);
        printf("worst %s layers: %.3f of what is allowed\n", gpu->name, worst);
        gpu->close(gpu_stream);
    }
    cpu->close(cpu_stream);
    return test_end();
}
