/* bench_cuda_layers.c - the time of every GPU operation at GPT-2 124M's sizes, beside what the chip allows.
 *
 *     bench_cuda_layers [OUT.csv]          default: dev/results/<gpu>/layers.csv
 *
 * Memory-bound operations are given as GB/s of the bytes that must move (each input read once, each output written once,
 * what is added to read and written; of the embedding's tables the rows that are touched, and its gradient twice: once by
 * token, once by position) and as a share of a large device-to-device copy measured here. Tokens follow Zipf's law, as in
 * text: token k with a probability proportional to 1/(k + 2.7), of all V. Products as TFLOP/s. Every operation is verified
 * by tests/test_cuda_layers, which must pass first; here their buffers hold random data. A call is recorded several times in
 * one CUDA graph, and the median of replays is taken, so that no launch is timed. The tensors of 65536 rows are larger than
 * any L2.
 */
#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "data/random.h"
#include "layers/backend.h"
#include "trainer/display.h"

enum { L = 12, C = 768, V = 50257, VP = 50304, T = 1024, REPEATS = 4, ROUNDS = 9 };
static const int64_t PARAMETERS = 124439808 / 256 * 256;

/* All buffers, shared by the operations. */
typedef struct Bench {
    const Backend *gpu;
    Stream *stream;
    int64_t B, N;
    float *resid, *resid2;          /* (N,C) twice: the residual stream */
    char *x, *y, *wide, *wide2;     /* (N,C) twice, (N,4C) twice: real */
    char *logits;                   /* (chunk, VP) real */
    int64_t chunk;
    char *weight;                   /* (VP, C) real */
    float *master, *m, *v, *grads;  /* (PARAMETERS) */
    float *stats, *stats2, *vector, *vector2, *norm;
    void *scratch;
    int32_t *tokens, *plan;
    int64_t distinct;               /* tokens among the N */
    AdamwStep *step;
    double copy_rate;               /* bytes a second, read and written */
    FILE *csv;
} Bench;

typedef void Operation(Bench *b);

static void run_copy(Bench *b) { b->gpu->copy(b->wide2, b->wide, (size_t)(b->N * 4 * C) * b->gpu->element, b->stream); }
static void run_embedding_forward(Bench *b)
{
    b->gpu->embedding_forward(b->resid, b->tokens, b->master, b->master + VP * C, b->B, T, C, b->stream);
}
static void run_embedding_backward(Bench *b)
{
    b->gpu->embedding_backward(b->grads, b->grads + VP * C, b->scratch, b->resid, b->plan, b->B, T, C, b->stream);
}
static void run_layernorm_forward(Bench *b)
{
    b->gpu->layernorm_forward(b->y, b->stats, b->stats2, b->resid, b->master, b->master + C, b->N, C, b->stream);
}
static void run_residual_layernorm(Bench *b)
{
    b->gpu->residual_layernorm_forward(b->resid2, b->x, b->stats, b->stats2, b->resid, b->y, b->master, b->master + C, b->N,
                                       C, b->stream);
}
static void run_layernorm_backward(Bench *b)
{
    b->gpu->layernorm_backward(b->resid2, b->gpu->dtype == DTYPE_FP32 ? (void *)b->resid2 : b->x, b->vector, b->vector2,
                               b->scratch, b->resid2, b->y, b->resid, b->master, b->stats, b->stats2, b->N, C, b->stream);
}
static void run_gelu_forward(Bench *b) { b->gpu->gelu_forward(b->wide2, b->wide, b->N * 4 * C, b->stream); }
static void run_loss(Bench *b)
{
    b->gpu->loss_forward_backward(b->stats, b->logits, b->tokens, 1e-4f, b->chunk, V, VP, b->stream);
}
static void run_norm(Bench *b) { b->gpu->global_norm(b->norm, b->scratch, b->grads, PARAMETERS, b->stream); }
static void run_adamw(Bench *b)
{
    b->gpu->adamw_update(b->gpu->dtype == DTYPE_FP32 ? (void *)b->master : b->wide, b->master, b->m, b->v, b->grads, b->norm,
                         b->step, PARAMETERS, PARAMETERS / 2, b->stream);
}
static void run_zero(Bench *b) { b->gpu->zero(b->grads, (size_t)PARAMETERS * 4, b->stream); }

static void run_qkv_forward(Bench *b)
{
    b->gpu->linear_forward(b->wide, b->x, b->weight, b->weight, b->N, C, 3 * C, b->stream);
}
static void run_qkv_input(Bench *b)
{
    b->gpu->linear_backward_input(b->x, b->wide, b->weight, NULL, b->N, C, 3 * C, b->stream);
}
static void run_qkv_weight(Bench *b)
{
    b->gpu->linear_backward_weight(b->grads, b->vector, b->scratch, b->wide, b->x, b->N, C, 3 * C, b->stream);
}
static void run_qkv_weight_only(Bench *b)
{
    b->gpu->linear_backward_weight(b->grads, NULL, b->scratch, b->wide, b->x, b->N, C, 3 * C, b->stream);
}
static void run_proj_forward(Bench *b) { b->gpu->linear_forward(b->y, b->x, b->weight, b->weight, b->N, C, C, b->stream); }
static void run_proj_input(Bench *b) { b->gpu->linear_backward_input(b->y, b->x, b->weight, NULL, b->N, C, C, b->stream); }
static void run_proj_weight(Bench *b)
{
    b->gpu->linear_backward_weight(b->grads, b->vector, b->scratch, b->x, b->y, b->N, C, C, b->stream);
}
static void run_fc_forward(Bench *b)
{
    b->gpu->linear_gelu_forward(b->wide, b->wide2, b->x, b->weight, b->weight, b->N, C, 4 * C, b->stream);
}
static void run_fc_forward_plain(Bench *b)
{
    b->gpu->linear_forward(b->wide, b->x, b->weight, b->weight, b->N, C, 4 * C, b->stream);
}
static void run_fc_input(Bench *b)
{
    b->gpu->linear_backward_input(b->x, b->wide, b->weight, NULL, b->N, C, 4 * C, b->stream);
}
static void run_fc_weight(Bench *b)
{
    b->gpu->linear_backward_weight(b->grads, b->vector, b->scratch, b->wide, b->x, b->N, C, 4 * C, b->stream);
}
static void run_fcproj_forward(Bench *b)
{
    b->gpu->linear_forward(b->x, b->wide, b->weight, b->weight, b->N, 4 * C, C, b->stream);
}
static void run_fcproj_input(Bench *b)
{
    b->gpu->linear_backward_input(b->wide, b->x, b->weight, b->wide2, b->N, 4 * C, C, b->stream);
}
static void run_fcproj_input_plain(Bench *b)
{
    b->gpu->linear_backward_input(b->wide, b->x, b->weight, NULL, b->N, 4 * C, C, b->stream);
}
static void run_fcproj_weight(Bench *b)
{
    b->gpu->linear_backward_weight(b->grads, b->vector, b->scratch, b->x, b->wide, b->N, 4 * C, C, b->stream);
}
static void run_head_forward(Bench *b)
{
    b->gpu->linear_forward(b->logits, b->x, b->weight, NULL, b->chunk, C, VP, b->stream);
}
static void run_head_input(Bench *b)
{
    b->gpu->linear_backward_input(b->x, b->logits, b->weight, NULL, b->chunk, C, VP, b->stream);
}
static void run_head_weight(Bench *b)
{
    b->gpu->linear_backward_weight(b->grads, NULL, b->scratch, b->logits, b->x, b->chunk, C, VP, b->stream);
}

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Median seconds of one call. */
static double time_operation(Bench *b, Operation *run)
{
    double times[ROUNDS];
    b->gpu->measure(b->stream, 1); /* the first call sets things up that cannot be recorded, and tries products, as in training */
    run(b);
    b->gpu->measure(b->stream, 0);
    b->gpu->synchronize(b->stream);
    b->gpu->record_begin(b->stream);
    for (int i = 0; i < REPEATS; i++) run(b);
    Recording *recording = b->gpu->record_end(b->stream);
    for (int round = -1; round < ROUNDS; round++) {
        double began = display_clock();
        b->gpu->replay(recording, b->stream);
        b->gpu->synchronize(b->stream);
        if (round >= 0) times[round] = (display_clock() - began) / REPEATS;
    }
    b->gpu->recording_free(recording);
    qsort(times, ROUNDS, sizeof *times, compare_doubles);
    return times[ROUNDS / 2];
}

/* Times one operation and writes its line: bytes moved for the memory-bound, products' operations else. */
static void bench_line(Bench *b, const char *name, Operation *run, double bytes, double operations)
{
    double seconds = time_operation(b, run);
    if (operations > 0) {
        printf("%-10s N%-6lld %-28s %9.4f ms %9.1f TFLOP/s\n", b->gpu->name, (long long)b->N, name, 1e3 * seconds,
               1e-12 * operations / seconds);
        fprintf(b->csv, "%s,%lld,%s,%.6f,%.3f,TFLOP/s,\n", b->gpu->name, (long long)b->N, name, 1e3 * seconds,
                1e-12 * operations / seconds);
        return;
    }
    double rate = bytes / seconds;
    if (!b->copy_rate) b->copy_rate = rate;
    printf("%-10s N%-6lld %-28s %9.4f ms %9.1f GB/s    %5.1f%% of a copy\n", b->gpu->name, (long long)b->N, name,
           1e3 * seconds, 1e-9 * rate, 100 * rate / b->copy_rate);
    fprintf(b->csv, "%s,%lld,%s,%.6f,%.3f,GB/s,%.1f\n", b->gpu->name, (long long)b->N, name, 1e3 * seconds, 1e-9 * rate,
            100 * rate / b->copy_rate);
}

static void *random_new(Bench *b, int64_t n, int fp32, double spread)
{
    enum { BLOCK = 1 << 20 };
    size_t element = fp32 ? 4 : b->gpu->element;
    char *memory = b->gpu->alloc((size_t)n * element, b->stream);
    float *host = malloc(BLOCK * sizeof *host), *staging = b->gpu->alloc(BLOCK * sizeof *host, b->stream);
    if (!memory || !host || !staging) {
        fprintf(stderr, "bench_cuda_layers: not enough memory\n");
        exit(1);
    }
    uint64_t state = (uint64_t)n;
    for (int64_t i = 0; i < BLOCK; i++) host[i] = (float)(spread * (random_uniform(&state) - 0.45));
    b->gpu->copy_in(staging, host, BLOCK * sizeof *host, b->stream);
    for (int64_t done = 0; done < n; done += BLOCK) {
        int64_t count = n - done < BLOCK ? n - done : BLOCK;
        if (fp32) b->gpu->copy(memory + (size_t)done * 4, staging, (size_t)count * 4, b->stream);
        else b->gpu->from_fp32(memory + (size_t)done * element, staging, count, b->stream);
    }
    b->gpu->synchronize(b->stream);
    b->gpu->free(staging, b->stream);
    free(host);
    return memory;
}

static void *integers_new(Bench *b, const int32_t *values, int64_t n)
{
    void *memory = b->gpu->alloc((size_t)n * 4, b->stream);
    b->gpu->copy_in(memory, values, (size_t)n * 4, b->stream);
    return memory;
}

/* tokens (N) by Zipf's law over V; returns how many different ones there are. */
static int64_t tokens_draw(int32_t *tokens, int64_t N)
{
    static double below[V + 1]; /* the sum of the probabilities of tokens before this one, not yet divided by the whole */
    static char seen[V];
    uint64_t state = 7;
    int64_t distinct = 0;
    memset(seen, 0, sizeof seen);
    for (int k = 0; k < V; k++) below[k + 1] = below[k] + 1 / (k + 2.7);
    for (int64_t i = 0; i < N; i++) {
        double u = random_uniform(&state) * below[V];
        int32_t low = 0, high = V - 1; /* the last token with below[token] <= u */
        while (low < high) {
            int32_t middle = (low + high + 1) / 2;
            if (below[middle] <= u) low = middle;
            else high = middle - 1;
        }
        tokens[i] = low;
        distinct += !seen[low];
        seen[low] = 1;
    }
    return distinct;
}

static void bench_open(Bench *b)
{
    int64_t N = b->N;
    const Backend *gpu = b->gpu;
    b->chunk = 4096 < N ? 4096 : N;
    b->x = random_new(b, N * C, 0, 2);
    b->y = random_new(b, N * C, 0, 2);
    b->resid = random_new(b, N * C, 1, 2);
    b->resid2 = random_new(b, N * C, 1, 2);
    int64_t wide = N * 4 * C > PARAMETERS ? N * 4 * C : PARAMETERS; /* adamw's working weights live here too */
    b->wide = random_new(b, wide, 0, 2);
    b->wide2 = random_new(b, wide, 0, 2);
    b->logits = random_new(b, b->chunk * VP, 0, 2);
    b->weight = random_new(b, VP * C, 0, 0.05);
    b->master = random_new(b, PARAMETERS, 1, 0.05);
    b->m = random_new(b, PARAMETERS, 1, 0.01);
    b->v = random_new(b, PARAMETERS, 1, 0.01);
    b->grads = random_new(b, PARAMETERS, 1, 0.01);
    b->stats = random_new(b, N, 1, 1);
    b->stats2 = random_new(b, N, 1, 1);
    b->vector = random_new(b, VP, 1, 1);
    b->vector2 = random_new(b, VP, 1, 1);
    b->norm = random_new(b, 1, 1, 1);
    size_t scratch = gpu->embedding_scratch(N, C) + gpu->layernorm_scratch(N, C) + gpu->linear_scratch(N, 4 * C, 4 * C) +
                     gpu->norm_scratch(PARAMETERS);
    b->scratch = gpu->alloc(scratch, b->stream);
    int32_t *tokens = malloc((size_t)N * 4), *plan = malloc((size_t)embedding_plan_size(N) * 4);
    b->distinct = tokens_draw(tokens, N);
    embedding_plan(plan, tokens, N);
    b->tokens = integers_new(b, tokens, N);
    b->plan = integers_new(b, plan, embedding_plan_size(N));
    AdamwStep step = {1e-4f, 0.9f, 0.95f, 1e-8f, 0.1f, 0.5f, 0.5f, 1};
    b->step = gpu->alloc(sizeof step, b->stream);
    gpu->copy_in(b->step, &step, sizeof step, b->stream);
    free(tokens);
    free(plan);
}

static void bench_close(Bench *b)
{
    void *all[] = {b->x,      b->y,       b->resid, b->resid2,  b->wide,   b->wide2, b->logits,
                   b->weight, b->master,  b->m,     b->v,       b->grads,  b->stats, b->stats2,
                   b->vector, b->vector2, b->norm,  b->scratch, b->tokens, b->plan,  b->step};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) b->gpu->free(all[i], b->stream);
}

static void bench_all(Bench *b)
{
    double e = (double)b->gpu->element, row = (double)b->N * C * e, product = 2.0 * (double)b->N * C * C,
           P = (double)PARAMETERS;
    double head = 2.0 * (double)b->chunk * VP * C, logits = (double)b->chunk * VP * e;
    double full = (double)b->N * C * 4,
           copy = b->gpu->dtype == DTYPE_FP32 ? 0 : row; /* of the residual stream; its rounded copy */
    double touched = (double)(b->distinct + T) * C;      /* elements of wte and wpe */
    b->copy_rate = 0;
    bench_line(b, "copy", run_copy, 8 * row, 0);
    bench_line(b, "embedding forward", run_embedding_forward, full + 4 * touched + 4 * (double)b->N, 0);
    bench_line(b, "embedding backward", run_embedding_backward, 2 * full + 8 * touched, 0);
    bench_line(b, "layernorm forward", run_layernorm_forward, full + row, 0);
    bench_line(b, "residual + layernorm", run_residual_layernorm, 2 * full + 2 * row, 0);
    bench_line(b, "layernorm backward", run_layernorm_backward, 3 * full + row + copy, 0);
    bench_line(b, "gelu forward", run_gelu_forward, 8 * row, 0);
    bench_line(b, "loss forward + backward", run_loss, 2 * logits, 0);
    bench_line(b, "global norm", run_norm, 4 * P, 0);
    bench_line(b, "adamw", run_adamw, P * (28 + (b->gpu->dtype == DTYPE_FP32 ? 0 : 2)), 0);
    bench_line(b, "zero gradients", run_zero, 4 * P, 0);
    bench_line(b, "qkv forward + bias", run_qkv_forward, 0, 3 * product);
    bench_line(b, "qkv backward input", run_qkv_input, 0, 3 * product);
    bench_line(b, "qkv backward weight + bias", run_qkv_weight, 0, 3 * product);
    bench_line(b, "qkv backward weight only", run_qkv_weight_only, 0, 3 * product);
    bench_line(b, "proj forward + bias", run_proj_forward, 0, product);
    bench_line(b, "proj backward input", run_proj_input, 0, product);
    bench_line(b, "proj backward weight + bias", run_proj_weight, 0, product);
    bench_line(b, "fc forward + bias + gelu", run_fc_forward, 0, 4 * product);
    bench_line(b, "fc forward + bias", run_fc_forward_plain, 0, 4 * product);
    bench_line(b, "fc backward input", run_fc_input, 0, 4 * product);
    bench_line(b, "fc backward weight + bias", run_fc_weight, 0, 4 * product);
    bench_line(b, "fcproj forward + bias", run_fcproj_forward, 0, 4 * product);
    bench_line(b, "fcproj backward input + dgelu", run_fcproj_input, 0, 4 * product);
    bench_line(b, "fcproj backward input", run_fcproj_input_plain, 0, 4 * product);
    bench_line(b, "fcproj backward weight + bias", run_fcproj_weight, 0, 4 * product);
    bench_line(b, "head forward", run_head_forward, 0, head);
    bench_line(b, "head backward input", run_head_input, 0, head);
    bench_line(b, "head backward weight", run_head_weight, 0, head);
}

/* dev/results/<name of the GPU, simplified>/layers.csv, or `path`. */
static FILE *csv_open(const char *path, const Backend *gpu, Stream *stream)
{
    char described[256], name[64], made[512];
    gpu->describe(described, sizeof described, stream);
    size_t length = 0;
    const char *at = strchr(described, ' ');
    for (at = at ? at + 1 : described; *at && *at != ',' && length < sizeof name - 1; at++)
        name[length++] = isalnum((unsigned char)*at) ? (char)tolower((unsigned char)*at) : '-';
    name[length] = 0;
    if (!path) {
        mkdir("dev/results", 0777);
        snprintf(made, sizeof made, "dev/results/%s", name);
        mkdir(made, 0777);
        snprintf(made, sizeof made, "dev/results/%s/layers.csv", name);
        path = made;
    }
    FILE *csv = fopen(path, "w");
    if (!csv) {
        fprintf(stderr, "bench_cuda_layers: %s cannot be written\n", path);
        exit(1);
    }
    fprintf(csv, "# %s; GPT-2 124M: C %d, V %d, T %d\nbackend,N,operation,ms,rate,unit,percent_of_copy\n", described, C, V,
            T);
    return csv;
}

int main(int argc, char **argv)
{
    static const struct { Dtype dtype; int64_t B; } runs[] = {{DTYPE_BF16, 64}, {DTYPE_BF16, 4}, {DTYPE_FP32, 16}};
    char error[512] = "this build is for the CPU only";
    Bench b;
    memset(&b, 0, sizeof b);
    for (size_t i = 0; i < sizeof runs / sizeof *runs; i++) {
        BackendOptions options = {0};
        b.gpu = backend_find(ATTENTION_CUDA, runs[i].dtype);
        b.stream = b.gpu ? b.gpu->open(0, &options, error, sizeof error) : NULL;
        if (!b.stream) {
            printf("GPU layers not measured: %s\n", error);
            return 0;
        }
        b.B = runs[i].B;
        b.N = b.B * T;
        if (!b.csv) b.csv = csv_open(argc > 1 ? argv[1] : NULL, b.gpu, b.stream);
        bench_open(&b);
        bench_all(&b);
        bench_close(&b);
        b.gpu->close(b.stream);
    }
    fclose(b.csv);
    return 0;
}
