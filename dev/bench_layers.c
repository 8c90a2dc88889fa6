/* bench_layers.c - the time of every CPU operation at the sizes of two models: a table, and dev/results/cpu-NAME/layers.csv.
 *
 *     bench_layers [OUT.csv]
 *
 * The matrix products are timed three times: by our own code, by CBLAS on slices (a slice a thread), and by CBLAS with
 * threads of its own; all are verified first, at random elements against float64 sums, and a wrong one is not timed. A line
 * gives the best and the median time, and the best as GFLOP/s (a product has 2*N*C*OC operations) or as GB/s of the bytes
 * that must move. The last line of a model adds up what one training step takes outside attention.
 */
#include <ctype.h>
#include <errno.h>
#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

#include "data/random.h"
#include "layers/product.h"

enum { MOST_RUNS = 200, FEWEST_RUNS = 3 };
static const double SECONDS = 0.12; /* spent on each operation, if FEWEST_RUNS do not take longer */

typedef struct Model {
    const char *name;
    int64_t L, B, T, C, V, Vp;
} Model;

typedef enum Means { OWN, CBLAS_SLICES, CBLAS_THREADS, MEANS } Means;
static const char *const MEANS_NAMES[MEANS] = {"own", "CBLAS on slices", "CBLAS threads"};

/* All buffers of a model's bench, from the backend's memory, and where results go. */
typedef struct Bench {
    const Model *model;
    Stream *stream;
    Stream single;        /* the same with one slice: CBLAS_THREADS divides that itself */
    FILE *csv;
    float *x, *y, *z;     /* (N, 4C): activations */
    float *stats;         /* (2, N) */
    float *logits;        /* (N, Vp) */
    float *weight;        /* (Vp, C) or (4C, C), and its gradient: */
    float *dweight;
    float *vector, *dvector; /* (2, 4C or Vp) */
    float *scratch;
    int32_t *tokens;      /* (N) */
    int32_t *tokens_plan; /* of the embedding's backward */
    int wrong;
} Bench;

static const Backend *const cpu = &backend_cpu_fp32;

/* All but the vectors and the positions, which are too few to matter here. */
static int64_t parameter_count(const Model *m) { return m->Vp * m->C + 12 * m->L * m->C * m->C; }

static double seconds_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* One operation with its sizes, as a call that can be repeated. */
typedef struct Call {
    const char *name;
    void (*run)(const struct Call *call);
    const Bench *bench;
    Stream *stream;
    int64_t N, C, OC;
    double flops, bytes; /* what it does: one of them is 0 */
    int count;           /* calls in a training step */
    const char *means;
} Call;

/* Times a call, prints and writes its line, and returns the best time in seconds. */
static double bench_call(const Call *call)
{
    const char *unit = call->flops > 0 ? "GFLOP/s" : "GB/s";
    double times[MOST_RUNS], total = 0;
    int runs = 0;
    call->run(call);
    while (runs < MOST_RUNS && (runs < FEWEST_RUNS || total < SECONDS)) {
        double start = seconds_now();
        call->run(call);
        times[runs] = seconds_now() - start;
        total += times[runs++];
    }
    qsort(times, (size_t)runs, sizeof *times, compare_doubles);
    double rate = (call->flops > 0 ? call->flops : call->bytes) / times[0] * 1e-9;
    printf("%-26s %6lld %6lld %6lld  %-16s %10.3f %10.3f %8.1f %s\n", call->name, (long long)call->N, (long long)call->C,
           (long long)call->OC, call->means, times[0] * 1e3, times[runs / 2] * 1e3, rate, unit);
    fflush(stdout);
    fprintf(call->bench->csv, "%s,%s,%lld,%lld,%lld,%s,%.6f,%.6f,%s,%.2f\n", call->bench->model->name, call->name,
            (long long)call->N, (long long)call->C, (long long)call->OC, call->means, times[0] * 1e3, times[runs / 2] * 1e3,
            unit, rate);
    return times[0];
}

/* --- matrix products ------------------------------------------------------------------------------------------------ */

static void run_forward(const Call *c)
{
    cpu->linear_forward(c->bench->y, c->bench->x, c->bench->weight, c->bench->vector, c->N, c->C, c->OC, c->stream);
}

static void run_gelu_forward(const Call *c)
{
    cpu->linear_gelu_forward(c->bench->z, c->bench->y, c->bench->x, c->bench->weight, c->bench->vector, c->N, c->C, c->OC,
                             c->stream);
}

static void run_head(const Call *c)
{
    cpu->linear_forward(c->bench->logits, c->bench->x, c->bench->weight, NULL, c->N, c->C, c->OC, c->stream);
}

static void run_backward_input(const Call *c)
{
    const float *dout = c->OC > 4 * c->bench->model->C ? c->bench->logits : c->bench->y;
    cpu->linear_backward_input(c->bench->z, dout, c->bench->weight, NULL, c->N, c->C, c->OC, c->stream);
}

static void run_backward_weight(const Call *c)
{
    const float *dout = c->OC > 4 * c->bench->model->C ? c->bench->logits : c->bench->y;
    cpu->linear_backward_weight(c->bench->dweight, NULL, c->bench->scratch, dout, c->bench->x, c->N, c->C, c->OC, c->stream);
}

/* Whether 200 random elements of what a call gives are float64 sums over K up to rounding. An element (i,j) of the result,
 * of (rows, columns), is sum_k left[i*left_row + k*left_k] * right[k*right_k + j*right_column], plus bias[j]. */
typedef struct Verify {
    const float *result, *left, *right, *bias;
    int64_t rows, columns, K, left_row, left_k, right_k, right_column;
} Verify;

static int verify(const Verify *v, uint64_t *seed)
{
    const double bound = 12; /* as in tests/test_layers.c */
    for (int sample = 0; sample < 200; sample++) {
        int64_t i = (int64_t)(random_u64(seed) % (uint64_t)v->rows), j = (int64_t)(random_u64(seed) % (uint64_t)v->columns);
        double sum = v->bias ? (double)v->bias[j] : 0, size = fabs(sum), got = (double)v->result[i * v->columns + j];
        for (int64_t k = 0; k < v->K; k++) {
            double left = (double)v->left[i * v->left_row + k * v->left_k];
            double term = left * (double)v->right[k * v->right_k + j * v->right_column];
            sum += term;
            size += fabs(term);
        }
        if (!(fabs(got - sum) <= bound * (double)FLT_EPSILON * size)) {
            fprintf(stderr, "element (%lld, %lld) is %.9g, expected %.9g: not timed\n", (long long)i, (long long)j, got,
                    sum);
            return 0;
        }
    }
    return 1;
}

/* Runs a product once and verifies what it gave. */
static int verify_call(const Call *call, uint64_t *seed)
{
    const Bench *b = call->bench;
    int64_t N = call->N, C = call->C, OC = call->OC;
    const float *dout = OC > 4 * b->model->C ? b->logits : b->y;
    cpu->zero(b->dweight, (size_t)(OC * C) * sizeof(float), b->stream); /* a weight gradient is added to */
    call->run(call);
    if (call->run == run_backward_input)
        return verify(&(Verify){b->z, dout, b->weight, NULL, N, C, OC, OC, 1, C, 1}, seed);
    if (call->run == run_backward_weight)
        return verify(&(Verify){b->dweight, dout, b->x, NULL, OC, C, N, 1, OC, C, 1}, seed);
    return verify(&(Verify){dout, b->x, b->weight, OC > 4 * b->model->C ? NULL : b->vector, N, OC, C, C, 1, 1, C}, seed);
}

/* One linear layer, forward and backward, by all means; adds to *step what the one that the backend uses takes. */
static void bench_linear(Bench *b, const char *layer, int64_t C, int64_t OC, int gelu, int count, double *step)
{
    int head = OC > 4 * b->model->C;
    int64_t N = b->model->B * b->model->T;
    int chosen = b->stream->blas ? CBLAS_SLICES : OWN;
    uint64_t seed = 11;
    struct {
        const char *name;
        void (*run)(const Call *);
    } passes[] = {{"forward", head ? run_head : gelu ? run_gelu_forward : run_forward},
                  {"backward input", run_backward_input},
                  {"backward weight", run_backward_weight}};
    for (size_t p = 0; p < sizeof passes / sizeof *passes; p++)
        for (int means = 0; means < (product_has_blas() ? MEANS : 1); means++) {
            char name[64];
            snprintf(name, sizeof name, "%s %s", layer, passes[p].name);
            Call call = {.name = name, .run = passes[p].run, .bench = b, .N = N, .C = C, .OC = OC, .count = count,
                         .stream = means == CBLAS_THREADS ? &b->single : b->stream, .means = MEANS_NAMES[means],
                         .flops = 2 * (double)N * (double)C * (double)OC};
            b->stream->blas = means != OWN;
            product_blas_threads(means == CBLAS_THREADS ? b->stream->threads : 1);
            if (!verify_call(&call, &seed)) {
                b->wrong++;
                continue;
            }
            double time = bench_call(&call);
            if (means == chosen) *step += time * count;
        }
    b->stream->blas = chosen == CBLAS_SLICES;
    product_blas_threads(1);
}

/* --- the other operations ------------------------------------------------------------------------------------------- */

static void run_embedding_forward(const Call *c)
{
    cpu->embedding_forward(c->bench->y, c->bench->tokens, c->bench->weight, c->bench->x, c->bench->model->B,
                           c->bench->model->T, c->C, c->stream);
}

static void run_embedding_backward(const Call *c)
{
    cpu->embedding_backward(c->bench->dweight, c->bench->z, c->bench->scratch, c->bench->y, c->bench->tokens_plan,
                            c->bench->model->B, c->bench->model->T, c->C, c->stream);
}

static void run_layernorm_forward(const Call *c)
{
    cpu->layernorm_forward(c->bench->y, c->bench->stats, c->bench->stats + c->N, c->bench->x, c->bench->vector,
                           c->bench->vector + c->C, c->N, c->C, c->stream);
}

static void run_residual_layernorm(const Call *c)
{
    cpu->residual_layernorm_forward(c->bench->z, c->bench->y, c->bench->stats, c->bench->stats + c->N, c->bench->x,
                                    c->bench->y + c->N * c->C, c->bench->vector, c->bench->vector + c->C, c->N, c->C,
                                    c->stream);
}

static void run_layernorm_backward(const Call *c)
{
    cpu->layernorm_backward(c->bench->z, c->bench->z, c->bench->dvector, c->bench->dvector + c->C, c->bench->scratch,
                            c->bench->z, c->bench->y, c->bench->x, c->bench->vector, c->bench->stats, c->bench->stats + c->N,
                            c->N, c->C, c->stream);
}

static void run_gelu(const Call *c) { cpu->gelu_forward(c->bench->y, c->bench->x, c->N * c->C, c->stream); }

static void run_loss(const Call *c)
{
    cpu->loss_forward_backward(c->bench->stats, c->bench->logits, c->bench->tokens, 1.0f / 256, c->N, c->C, c->OC,
                               c->stream);
}

static void bench_rows(Bench *b, double *step)
{
    const Model *m = b->model;
    int64_t N = m->B * m->T, C = m->C;
    int norms = 2 * (int)m->L + 1;
    double row = (double)N * (double)C * 4;
    const Call calls[] = {
        {.name = "embedding forward", .run = run_embedding_forward, .C = C, .bytes = 3 * row, .count = 1},
        {.name = "embedding backward", .run = run_embedding_backward, .C = C, .bytes = 4 * row, .count = 1},
        {.name = "layernorm forward", .run = run_layernorm_forward, .C = C, .bytes = 2 * row, .count = 1},
        {.name = "residual layernorm forward", .run = run_residual_layernorm, .C = C, .bytes = 4 * row, .count = norms - 1},
        {.name = "layernorm backward", .run = run_layernorm_backward, .C = C, .bytes = 4 * row, .count = norms},
        {.name = "gelu forward", .run = run_gelu, .C = 4 * C, .bytes = 8 * row, .count = 0},
        {.name = "loss forward + backward", .run = run_loss, .C = m->V, .OC = m->Vp,
         .bytes = 2 * (double)N * (double)m->V * 4, .count = 1},
    };
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        Call call = calls[i];
        call.bench = b, call.stream = b->stream, call.N = N, call.means = "";
        *step += bench_call(&call) * call.count;
    }
}

/* The flat buffers of the optimizer, one after another in one allocation. */
typedef struct Update {
    Call call; /* first: a Call is what bench_call knows */
    float *master, *m, *v, *grads;
    float norm;
    AdamwStep step;
} Update;

static void run_norm(const Call *c)
{
    Update *u = (Update *)(uintptr_t)c;
    cpu->global_norm(&u->norm, c->bench->scratch, u->grads, c->N, c->stream);
}

static void run_adamw(const Call *c)
{
    const Update *u = (const Update *)c;
    cpu->adamw_update(u->master, u->master, u->m, u->v, u->grads, &u->norm, &u->step, c->N, c->N, c->stream);
}

static void run_zero(const Call *c)
{
    cpu->zero(((const Update *)c)->grads, (size_t)c->N * sizeof(float), c->stream);
}

static void bench_update(Bench *b, double *step)
{
    const Model *m = b->model;
    int64_t n = parameter_count(m);
    size_t bytes = (size_t)n * sizeof(float);
    float *memory = cpu->alloc(4 * bytes, b->stream);
    if (!memory) {
        printf("global norm, adamw: not timed, they need %.1f GB and %.1f GB are free\n", 4e-9 * (double)bytes,
               1e-9 * (double)cpu->memory_available(b->stream));
        return;
    }
    Update u = {.call = {.bench = b, .stream = b->stream, .N = n, .means = "", .count = 1},
                .master = memory, .m = memory + n, .v = memory + 2 * n, .grads = memory + 3 * n,
                .step = {1e-4f, 0.9f, 0.95f, 1e-8f, 0.1f, 0.1f, 0.05f, 1}};
    cpu->zero(memory, 4 * bytes, b->stream);
    for (int64_t i = 0; i < n; i++) u.grads[i] = 1e-3f * (float)(i % 100 - 50);
    u.call.name = "global norm", u.call.run = run_norm, u.call.bytes = (double)bytes;
    *step += bench_call(&u.call);
    u.call.name = "adamw", u.call.run = run_adamw, u.call.bytes = 7 * (double)bytes;
    *step += bench_call(&u.call);
    u.call.name = "zero gradients", u.call.run = run_zero, u.call.bytes = (double)bytes;
    *step += bench_call(&u.call);
    cpu->free(memory, b->stream);
}

/* --- all of it ------------------------------------------------------------------------------------------------------ */

static float *bench_alloc(const Bench *b, int64_t n, uint64_t *seed)
{
    float *memory = cpu->alloc((size_t)n * sizeof(float), b->stream);
    if (!memory) {
        fprintf(stderr, "not enough memory for %lld numbers\n", (long long)n);
        exit(1);
    }
    for (int64_t i = 0; i < n; i++) memory[i] = (float)(random_uniform(seed) * 2 - 0.7);
    return memory;
}

/* The model's lines; returns how many products were wrong. */
static int bench_model(const Model *m, Stream *stream, FILE *csv)
{
    Bench b = {.model = m, .stream = stream, .single = *stream, .csv = csv};
    int64_t N = m->B * m->T, C = m->C, wide = m->Vp > 4 * C ? m->Vp : 4 * C;
    uint64_t seed = 1;
    double step = 0;
    b.single.threads = 1;
    b.single.blas = 1;
    b.x = bench_alloc(&b, N * 4 * C, &seed);
    b.y = bench_alloc(&b, N * 4 * C, &seed);
    b.z = bench_alloc(&b, N * 4 * C, &seed);
    b.stats = bench_alloc(&b, 2 * N, &seed);
    b.logits = bench_alloc(&b, N * m->Vp, &seed);
    b.weight = bench_alloc(&b, wide * C, &seed);
    b.dweight = bench_alloc(&b, wide * C, &seed);
    b.vector = bench_alloc(&b, 2 * wide, &seed);
    b.dvector = bench_alloc(&b, 2 * wide, &seed);
    size_t scratch = cpu->layernorm_scratch(N, C) + cpu->norm_scratch(parameter_count(m));
    b.scratch = bench_alloc(&b, (int64_t)(scratch / sizeof(float)) + 1, &seed);
    b.tokens = malloc((size_t)N * sizeof *b.tokens);
    b.tokens_plan = malloc((size_t)embedding_plan_size(N) * sizeof *b.tokens_plan);
    if (!b.tokens || !b.tokens_plan) exit(1);
    for (int64_t n = 0; n < N; n++) b.tokens[n] = (int32_t)(random_u64(&seed) % (uint64_t)m->V);
    embedding_plan(b.tokens_plan, b.tokens, N);

    printf("\n%s: %lld layers, C %lld, V %lld, batch %lld, T %lld\n", m->name, (long long)m->L, (long long)C,
           (long long)m->V, (long long)m->B, (long long)m->T);
    printf("%-26s %6s %6s %6s  %-16s %10s %10s\n", "operation", "N", "C", "OC", "by", "best ms", "median ms");
    bench_linear(&b, "qkv", C, 3 * C, 0, (int)m->L, &step);
    bench_linear(&b, "proj", C, C, 0, (int)m->L, &step);
    bench_linear(&b, "fc+gelu", C, 4 * C, 1, (int)m->L, &step);
    bench_linear(&b, "fcproj", 4 * C, C, 0, (int)m->L, &step);
    bench_linear(&b, "head", C, m->Vp, 0, 1, &step);
    bench_rows(&b, &step);
    bench_update(&b, &step);
    printf("a training step outside attention: %.1f ms\n", step * 1e3);
    float *all[] = {b.x, b.y, b.z, b.stats, b.logits, b.weight, b.dweight, b.vector, b.dvector, b.scratch};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) cpu->free(all[i], stream);
    free(b.tokens);
    free(b.tokens_plan);
    return b.wrong;
}

/* Opens `path`, or dev/results/cpu-NAME/layers.csv for this processor; writes machine, commit and columns. */
static FILE *csv_open(const char *path, const char *machine)
{
    char made[512], name[64], commit[64] = "unknown";
    size_t length = 0;
    for (const char *s = machine; *s && *s != ',' && length + 1 < sizeof name; s++)
        if (isalnum((unsigned char)*s)) name[length++] = (char)tolower((unsigned char)*s);
        else if (length && name[length - 1] != '-') name[length++] = '-';
    name[length] = 0;
    if (!path) {
        mkdir("dev", 0777);
        mkdir("dev/results", 0777);
        snprintf(made, sizeof made, "dev/results/cpu-%s", name);
        mkdir(made, 0777);
        snprintf(made, sizeof made, "dev/results/cpu-%s/layers.csv", name);
        path = made;
    }
    FILE *file = fopen(path, "w");
    if (!file) {
        fprintf(stderr, "cannot write %s: %s\n", path, strerror(errno));
        return NULL;
    }
    FILE *git = popen("git rev-parse --short HEAD 2>/dev/null", "r");
    if (git && fgets(commit, sizeof commit, git)) commit[strcspn(commit, "\n")] = 0;
    if (git) pclose(git);
    fprintf(file, "# %s; commit %s; compiler %s\n", machine, commit, __VERSION__);
    fprintf(file, "model,operation,N,C,OC,by,best_ms,median_ms,unit,rate\n");
    fprintf(stderr, "writing %s\n", path);
    return file;
}

int main(int argc, char **argv)
{
    static const Model models[] = {{"gpt2", 12, 4, 64, 768, 50257, 50304}, {"d4", 4, 12, 64, 128, 257, 384}};
    char machine[256], error[256] = "";
    int wrong = 0;
    cpu_settle_threads(argv);
    Stream *stream = cpu->open(0, &(BackendOptions){.deterministic = 1}, error, sizeof error);
    if (!stream) {
        fprintf(stderr, "%s\n", error);
        return 1;
    }
    cpu->describe(machine, sizeof machine, stream);
    FILE *csv = csv_open(argc > 1 ? argv[1] : NULL, machine);
    if (!csv) return 1;
    printf("%s\n", machine);
    for (size_t i = 0; i < sizeof models / sizeof *models; i++) wrong += bench_model(&models[i], stream, csv);
    cpu->close(stream);
    if (fclose(csv)) {
        fprintf(stderr, "cannot write the results: %s\n", strerror(errno));
        return 1;
    }
    return wrong != 0;
}
