/* test_gpt.c - the whole model on the CPU: against PyTorch in float64, against a plain forward in double, against itself.
 *
 * Three independent sources of truth. tests/fixtures/gpt.safetensors holds what PyTorch computed in float64: loss, logits,
 * every gradient, and the parameters after three updates. oracle_loss below is GPT-2's forward once more, straight from the
 * formulas and in double; its central differences check the gradient of every tensor at shapes that the fixture does not
 * have. And the model must agree with itself: whatever is recomputed, however a batch is cut, however large the plan was.
 *
 * Every model here is built on a backend that distrusts it: memory is filled with NaN before use and fenced by guard bytes,
 * and scratch is destroyed before every call. A read of what was never written, or a write beyond a buffer, fails a test.
 */
#include <math.h>
#include <stdlib.h>

#include "data/random.h"
#include "data/safetensors.h"
#include "layers/gpt.h"
#include "tests/test.h"

/* Largest errors allowed. Relative ones are relative to the largest element (logits, gradients) or to the value (loss).
 * fp32 rounds at 6e-8, and some ten operations a layer follow each other; each bound is three to ten times what was seen. */
static const struct {
    double loss;       /* relative, against PyTorch and the oracle */
    double logits;     /* of the largest logit */
    double gradient;   /* of the tensor's largest gradient */
    double norm;       /* relative */
    double update;     /* absolute, after three updates of about 5e-3 each */
    double direction;  /* of |gradient|/sqrt(n), what a random direction of length 1 sees of a tensor of n elements */
    double noise;      /* the same, of the whole model's |gradient|: a tensor whose gradient is 0 has rounding noise */
    double regrouping; /* of the tensor's largest gradient, where the same sums are taken in another order */
} BOUND = {5e-7, 2e-6, 3e-6, 1e-6, 5e-7, 6e-6, 2e-7, 3e-6};

static const char FIXTURE[] = "tests/fixtures/gpt.safetensors";

/* --- a backend that distrusts its user ------------------------------------------------------------------------------ */

enum { GUARD = 256, GUARD_BYTE = 0x5A, MOST_BLOCKS = 64 };

static struct {
    unsigned char *memory[MOST_BLOCKS];
    size_t bytes[MOST_BLOCKS], allocated;
    int64_t available; /* what memory_available says; 0: what the CPU backend says */
    int overruns;
} heap;

static void *fenced_alloc(size_t bytes, Stream *stream)
{
    unsigned char *memory = backend_cpu_fp32.alloc(bytes + GUARD, stream);
    for (int i = 0; memory && i < MOST_BLOCKS; i++)
        if (!heap.memory[i]) {
            memset(memory, 0xFF, bytes); /* NaN in every float, -1 in every integer */
            memset(memory + bytes, GUARD_BYTE, GUARD);
            heap.memory[i] = memory;
            heap.bytes[i] = bytes;
            heap.allocated += bytes;
            return memory;
        }
    return NULL;
}

static void fenced_free(void *memory, Stream *stream)
{
    for (int i = 0; memory && i < MOST_BLOCKS; i++)
        if (heap.memory[i] == memory) {
            for (int g = 0; g < GUARD; g++) heap.overruns += heap.memory[i][heap.bytes[i] + (size_t)g] != GUARD_BYTE;
            heap.allocated -= heap.bytes[i];
            heap.memory[i] = NULL;
            break;
        }
    backend_cpu_fp32.free(memory, stream);
}

static int64_t fenced_available(Stream *stream)
{
    return heap.available ? heap.available : backend_cpu_fp32.memory_available(stream);
}

/* Operations that ask for scratch are given more of it than they need, and it is filled with NaN before each call: where the
 * model hands out scratch that overlaps something still to be read, that is lost. A GPU's operations would destroy it so. */
enum { EXTRA_SCRATCH = 1 << 16 };

static size_t greedy_layernorm_scratch(int64_t N, int64_t C)
{
    return backend_cpu_fp32.layernorm_scratch(N, C) + EXTRA_SCRATCH;
}

static size_t greedy_linear_scratch(int64_t N, int64_t C, int64_t OC)
{
    return backend_cpu_fp32.linear_scratch(N, C, OC) + EXTRA_SCRATCH;
}

static size_t greedy_embedding_scratch(int64_t N, int64_t C)
{
    return backend_cpu_fp32.embedding_scratch(N, C) + EXTRA_SCRATCH;
}

static size_t greedy_norm_scratch(int64_t n) { return backend_cpu_fp32.norm_scratch(n) + EXTRA_SCRATCH; }

static void greedy_layernorm_backward(float *dx, void *rounded, float *dweight, float *dbias, void *scratch,
                                      const float *dresid, const void *dout, const float *x, const float *weight,
                                      const float *mean, const float *rstd, int64_t N, int64_t C, Stream *queue)
{
    memset(scratch, 0xFF, greedy_layernorm_scratch(N, C));
    backend_cpu_fp32.layernorm_backward(dx, rounded, dweight, dbias, scratch, dresid, dout, x, weight, mean, rstd, N, C,
                                        queue);
}

static void greedy_embedding_backward(float *dwte, float *dwpe, void *scratch, const float *dout, const int32_t *plan,
                                      int64_t B, int64_t T, int64_t C, Stream *queue)
{
    memset(scratch, 0xFF, greedy_embedding_scratch(B * T, C));
    backend_cpu_fp32.embedding_backward(dwte, dwpe, scratch, dout, plan, B, T, C, queue);
}

static void greedy_linear_backward_weight(float *dweight, float *dbias, void *scratch, const void *dout, const void *x,
                                          int64_t N, int64_t C, int64_t OC, Stream *queue)
{
    memset(scratch, 0xFF, greedy_linear_scratch(N, C, OC));
    backend_cpu_fp32.linear_backward_weight(dweight, dbias, scratch, dout, x, N, C, OC, queue);
}

static void greedy_global_norm(float *norm, void *scratch, const float *grads, int64_t n, Stream *queue)
{
    memset(scratch, 0xFF, greedy_norm_scratch(n));
    backend_cpu_fp32.global_norm(norm, scratch, grads, n, queue);
}

static Backend fenced; /* backend_cpu_fp32 with the functions above */
static Stream *stream;

static void open_backend(void)
{
    char error[512] = "";
    TEST("the CPU backend opens");
    fenced = backend_cpu_fp32;
    fenced.alloc = fenced_alloc;
    fenced.free = fenced_free;
    fenced.memory_available = fenced_available;
    fenced.embedding_scratch = greedy_embedding_scratch;
    fenced.layernorm_scratch = greedy_layernorm_scratch;
    fenced.linear_scratch = greedy_linear_scratch;
    fenced.norm_scratch = greedy_norm_scratch;
    fenced.embedding_backward = greedy_embedding_backward;
    fenced.layernorm_backward = greedy_layernorm_backward;
    fenced.linear_backward_weight = greedy_linear_backward_weight;
    fenced.global_norm = greedy_global_norm;
    BackendOptions options = {.deterministic = 1};
    stream = fenced.open(0, &options, error, sizeof error);
    CHECK(stream, "%s", error);
}

/* The same for attention: `inner` behind a kernel that asks for more scratch and fills it with NaN. Where a fault is
 * planted, the call that comes after `calls` others writes a NaN. */
static const AttentionKernel *inner;
static struct { enum { PLANT_NOTHING, PLANT_O, PLANT_LSE, PLANT_DQ } what; int calls; } planted;

static void plant(int what, void *where)
{
    if ((int)planted.what == what && planted.calls-- == 0) *(float *)where = NAN;
}

static size_t greedy_attention_scratch(const AttentionShape *shape) { return inner->scratch_bytes(shape) + EXTRA_SCRATCH; }

static const char *greedy_forward(AttentionOutput O, float *LSE, void *saved, void *scratch, AttentionInput Q,
                                  AttentionInput K, AttentionInput V, const AttentionShape *shape, void *queue)
{
    memset(scratch, 0xFF, greedy_attention_scratch(shape));
    const char *fault = inner->forward(O, LSE, saved, scratch, Q, K, V, shape, queue);
    plant(PLANT_O, O.data);
    plant(PLANT_LSE, LSE);
    return fault;
}

static const char *greedy_backward(AttentionOutput dQ, AttentionOutput dK, AttentionOutput dV, void *scratch,
                                   AttentionInput dO, AttentionInput Q, AttentionInput K, AttentionInput V, AttentionInput O,
                                   const float *LSE, const void *saved, const AttentionShape *shape, void *queue)
{
    memset(scratch, 0xFF, greedy_attention_scratch(shape));
    const char *fault = inner->backward(dQ, dK, dV, scratch, dO, Q, K, V, O, LSE, saved, shape, queue);
    plant(PLANT_DQ, dQ.data);
    return fault;
}

/* --- helpers -------------------------------------------------------------------------------------------------------- */

/* A kernel by name, behind the greedy one. A model computes with the kernel that was chosen last, so no test steps a model
 * again after it made one with another kernel. */
static const AttentionKernel *choose_attention(const char *name, int64_t HS)
{
    static AttentionKernel greedy;
    AttentionShape shape = {1, 1, 1, HS, attention_scale(HS), DTYPE_FP32, 1, 0};
    char error[512];
    inner = attention_choose(name, ATTENTION_CPU, &shape, 0, error, sizeof error);
    if (!CHECK(inner, "attention %s: %s", name, error)) return NULL;
    greedy = *inner;
    greedy.scratch_bytes = greedy_attention_scratch;
    greedy.forward = greedy_forward;
    greedy.backward = greedy_backward;
    return &greedy;
}

static Gpt *create(GptConfig config, GptOptions options, const char *attention)
{
    char error[1024];
    const AttentionKernel *kernel = choose_attention(attention, config.channels / config.heads);
    Gpt *gpt = kernel ? gpt_create(&config, &options, &fenced, stream, kernel, error, sizeof error) : NULL;
    CHECK(!kernel || gpt, "gpt_create: %s", error);
    return gpt;
}

static Gpt *create_training(GptConfig config, int64_t B, int64_t T)
{
    return create(config, (GptOptions){.batch = B, .sequence = T, .training = 1, .deterministic = 1}, "reference");
}

static int64_t tensor_size(const Gpt *gpt, size_t i) { return gpt_tensor(gpt, i)->rows * gpt_tensor(gpt, i)->columns; }

/* Tensor i of a buffer, to be freed by the caller. */
static float *read_tensor(const Gpt *gpt, GptBuffer buffer, size_t i)
{
    float *values = malloc((size_t)tensor_size(gpt, i) * sizeof *values);
    gpt_read(gpt, buffer, i, 0, gpt_tensor(gpt, i)->rows, values);
    return values;
}

static double normal(uint64_t *state)
{
    double radius = sqrt(-2 * log(1 - random_uniform(state)));
    return radius * cos(2 * 3.14159265358979323846 * random_uniform(state));
}

static int is_norm_weight(GptKind kind) { return kind == GPT_LN1_W || kind == GPT_LN2_W || kind == GPT_LNF_W; }

/* Parameters wide enough that nothing works in its linear regime: normal(0, 0.15), norms around 1. */
static void init_wide(Gpt *gpt, uint64_t seed)
{
    for (size_t i = 0; i < gpt_tensor_count(gpt); i++) {
        float *values = read_tensor(gpt, GPT_PARAMETERS, i);
        for (int64_t e = 0; e < tensor_size(gpt, i); e++)
            values[e] = (float)(0.15 * normal(&seed) + (is_norm_weight(gpt_tensor(gpt, i)->kind) ? 1 : 0));
        gpt_write(gpt, GPT_PARAMETERS, i, 0, gpt_tensor(gpt, i)->rows, values);
        free(values);
    }
}

/* n tokens below V; every seventh is the one before it again, every `hole`-th is -1 (0: none). */
static int32_t *make_tokens(int64_t n, int64_t V, int64_t hole, uint64_t seed)
{
    int32_t *tokens = malloc((size_t)n * sizeof *tokens);
    for (int64_t i = 0; i < n; i++) {
        tokens[i] = (int32_t)(random_u64(&seed) % (uint64_t)V);
        if (i % 7 == 6) tokens[i] = tokens[i - 1];
        if (hole && i % hole == hole - 1) tokens[i] = -1;
    }
    return tokens;
}

/* The largest |a - b| of n elements, relative to the largest |b|; 0 where both are 0 throughout, infinite with a NaN. */
static double relative_error(const float *a, const float *b, int64_t n)
{
    double error = 0, largest = 0;
    for (int64_t i = 0; i < n; i++) {
        if (!isfinite(a[i]) || !isfinite(b[i])) return INFINITY;
        error = fmax(error, fabs((double)a[i] - (double)b[i]));
        largest = fmax(largest, fabs((double)b[i]));
    }
    return error == 0 ? 0 : error / largest;
}

/* Checks every tensor of `buffer` in a against b: to the last bit where bound is 0. */
static void check_buffers(const Gpt *a, const Gpt *b, GptBuffer buffer, double bound, const char *what)
{
    for (size_t i = 0; i < gpt_tensor_count(a); i++) {
        float *left = read_tensor(a, buffer, i), *right = read_tensor(b, buffer, i);
        double error = relative_error(left, right, tensor_size(a, i));
        CHECK(error <= bound, "%s: %s differs by %.2e of its largest, allowed %.0e", what, gpt_tensor(a, i)->name, error,
              bound);
        free(left);
        free(right);
    }
}

/* --- against PyTorch ------------------------------------------------------------------------------------------------ */

typedef struct Fixture {
    Safetensors *file;
    GptConfig config;
    int64_t B, T, counted;
    int32_t *tokens, *targets; /* (B,T) */
} Fixture;

/* Elements of a tensor of the fixture, to be freed by the caller. */
static void *fixture_bytes(const Fixture *fixture, const char *name)
{
    const SafetensorsTensor *tensor = safetensors_find(fixture->file, name);
    if (!CHECK(tensor, "%s holds no tensor %s", FIXTURE, name)) return NULL;
    void *copy = malloc(tensor->bytes);
    memcpy(copy, tensor->data, tensor->bytes);
    return copy;
}

static int fixture_open(Fixture *fixture)
{
    Error error;
    fixture->file = safetensors_open(FIXTURE, &error);
    if (!CHECK(fixture->file, "%s", error.text)) return -1;
    int32_t *config = fixture_bytes(fixture, "config");
    fixture->tokens = fixture_bytes(fixture, "tokens");
    fixture->targets = fixture_bytes(fixture, "targets");
    if (!config || !fixture->tokens || !fixture->targets) return -1;
    fixture->config = (GptConfig){config[0], config[1], config[2], config[3], config[4]};
    fixture->B = config[5];
    fixture->T = config[6];
    fixture->counted = 0;
    for (int64_t i = 0; i < fixture->B * fixture->T; i++) fixture->counted += fixture->targets[i] >= 0;
    free(config);
    return 0;
}

static void fixture_close(Fixture *fixture)
{
    safetensors_close(fixture->file);
    free(fixture->tokens);
    free(fixture->targets);
}

/* The fixture's PREFIX.NAME for tensor i, brought from the files' layout to the model's; to be freed by the caller. */
static float *fixture_tensor(const Fixture *fixture, const char *prefix, const Gpt *gpt, size_t i)
{
    const GptTensor *tensor = gpt_tensor(gpt, i);
    char name[128];
    snprintf(name, sizeof name, "%s.%s", prefix, tensor->name);
    float *stored = fixture_bytes(fixture, name);
    if (!stored || !tensor->transposed) return stored;
    float *turned = malloc((size_t)(tensor->rows * tensor->columns) * sizeof *turned);
    for (int64_t r = 0; r < tensor->rows; r++)
        for (int64_t c = 0; c < tensor->columns; c++) turned[r * tensor->columns + c] = stored[c * tensor->rows + r];
    free(stored);
    return turned;
}

static void fixture_load(const Fixture *fixture, Gpt *gpt)
{
    for (size_t i = 0; i < gpt_tensor_count(gpt); i++) {
        float *values = fixture_tensor(fixture, "parameter", gpt, i);
        if (values) gpt_write(gpt, GPT_PARAMETERS, i, 0, gpt_tensor(gpt, i)->rows, values);
        free(values);
    }
}

static void check_fixture_gradients(const Fixture *fixture, const Gpt *gpt)
{
    for (size_t i = 0; i < gpt_tensor_count(gpt); i++) {
        float *got = read_tensor(gpt, GPT_GRADIENTS, i), *expected = fixture_tensor(fixture, "gradient", gpt, i);
        double error = expected ? relative_error(got, expected, tensor_size(gpt, i)) : INFINITY;
        CHECK(error <= BOUND.gradient, "gradient of %s is off by %.2e of its largest, allowed %.0e",
              gpt_tensor(gpt, i)->name, error, BOUND.gradient);
        free(got);
        free(expected);
    }
}

/* Three updates with the fixture's hyperparameters; the first one's gradients are there already. */
static void check_fixture_updates(const Fixture *fixture, Gpt *gpt)
{
    float *adamw = fixture_bytes(fixture, "adamw"); /* beta1, beta2, eps, weight_decay, clip, lr of each update */
    double *norm = fixture_bytes(fixture, "norm");
    for (int t = 1; adamw && norm && t <= 3; t++) {
        AdamwStep step = {adamw[4 + t], adamw[0], adamw[1], adamw[2], adamw[3], (float)(1 - pow((double)adamw[0], t)),
                          (float)(1 - pow((double)adamw[1], t)), adamw[4]};
        if (t > 1) {
            gpt_zero_gradients(gpt);
            gpt_backward(gpt, fixture->tokens, fixture->targets, fixture->B, fixture->T, 1 / (float)fixture->counted);
        }
        double got = gpt_update(gpt, &step), error = fabs(got - norm[t - 1]) / norm[t - 1];
        CHECK(error <= BOUND.norm, "norm of update %d is %.9g, expected %.9g", t, got, norm[t - 1]);
    }
    for (size_t i = 0; i < gpt_tensor_count(gpt); i++) {
        float *got = read_tensor(gpt, GPT_PARAMETERS, i), *expected = fixture_tensor(fixture, "updated", gpt, i);
        double error = expected ? 0 : INFINITY;
        for (int64_t e = 0; expected && e < tensor_size(gpt, i); e++)
            error = isfinite(got[e]) ? fmax(error, fabs((double)got[e] - (double)expected[e])) : INFINITY;
        CHECK(error <= BOUND.update, "%s is off by %.2e after three updates, allowed %.0e", gpt_tensor(gpt, i)->name, error,
              BOUND.update);
        free(got);
        free(expected);
    }
    free(adamw);
    free(norm);
}

static void test_fixture(const char *attention)
{
    Fixture fixture = {0};
    TEST("PyTorch's loss, logits, gradients and updates, attention %s", attention);
    if (fixture_open(&fixture)) return;
    int64_t B = fixture.B, T = fixture.T, V = fixture.config.vocab;
    Gpt *gpt = create(fixture.config, (GptOptions){.batch = B, .sequence = T, .training = 1}, attention);
    double *loss = fixture_bytes(&fixture, "loss");
    float *logits = fixture_bytes(&fixture, "logits"), *got = malloc((size_t)V * sizeof *got);
    if (gpt && loss && logits) {
        fixture_load(&fixture, gpt);
        double alone = gpt_loss(gpt, fixture.tokens, fixture.targets, B, T);
        CHECK(fabs(alone - *loss) <= BOUND.loss * *loss, "gpt_loss gives %.9g, expected %.9g", alone, *loss);
        for (int64_t b = 0; b < B; b++) {
            gpt_logits(gpt, got, fixture.tokens + b * T, T);
            double error = relative_error(got, logits + b * V, V);
            CHECK(error <= BOUND.logits, "logits of sequence %d are off by %.2e of their largest", (int)b, error);
        }
        double with = gpt_backward(gpt, fixture.tokens, fixture.targets, B, T, 1 / (float)fixture.counted);
        CHECK(with == alone, "gpt_backward gives loss %.17g, gpt_loss %.17g", with, alone);
        check_fixture_gradients(&fixture, gpt);
        check_fixture_updates(&fixture, gpt);
    }
    gpt_free(gpt);
    free(loss);
    free(logits);
    free(got);
    fixture_close(&fixture);
}

/* --- against a plain forward in double ------------------------------------------------------------------------------ */

/* A model as the oracle sees it: every tensor in double, found by kind and layer. */
typedef struct Oracle {
    GptConfig config;
    size_t count;
    double **tensors;       /* as gpt_tensor numbers them */
    size_t first[GPT_KINDS]; /* number of the first tensor of each kind */
} Oracle;

static Oracle oracle_from(const Gpt *gpt)
{
    Oracle oracle = {*gpt_config(gpt), gpt_tensor_count(gpt), NULL, {0}};
    oracle.tensors = malloc(oracle.count * sizeof *oracle.tensors);
    for (size_t i = oracle.count; i-- > 0;) {
        float *values = read_tensor(gpt, GPT_PARAMETERS, i);
        oracle.tensors[i] = malloc((size_t)tensor_size(gpt, i) * sizeof(double));
        for (int64_t e = 0; e < tensor_size(gpt, i); e++) oracle.tensors[i][e] = (double)values[e];
        oracle.first[gpt_tensor(gpt, i)->kind] = i;
        free(values);
    }
    return oracle;
}

static void oracle_free(Oracle *oracle)
{
    for (size_t i = 0; i < oracle->count; i++) free(oracle->tensors[i]);
    free(oracle->tensors);
}

static const double *oracle_weight(const Oracle *oracle, GptKind kind, int64_t layer)
{
    return oracle->tensors[oracle->first[kind] + (size_t)layer];
}

static void oracle_norm(double *out, const double *x, const double *weight, const double *bias, int64_t C)
{
    double mean = 0, variance = 0;
    for (int64_t c = 0; c < C; c++) mean += x[c] / (double)C;
    for (int64_t c = 0; c < C; c++) variance += (x[c] - mean) * (x[c] - mean) / (double)C;
    for (int64_t c = 0; c < C; c++) out[c] = (x[c] - mean) / sqrt(variance + 1e-5) * weight[c] + bias[c];
}

/* out (OC) = weight (OC,C) x (C) + bias (OC), or without bias where it is NULL. */
static void oracle_linear(double *out, const double *x, const double *weight, const double *bias, int64_t C, int64_t OC)
{
    for (int64_t o = 0; o < OC; o++) {
        out[o] = bias ? bias[o] : 0;
        for (int64_t c = 0; c < C; c++) out[o] += weight[o * C + c] * x[c];
    }
}

/* out (T,C) of packed qkv (T,3C). */
static void oracle_attention(double *out, const double *qkv, int64_t T, int64_t C, int64_t NH)
{
    int64_t HS = C / NH;
    double *p = malloc((size_t)T * sizeof *p);
    for (int64_t h = 0; h < NH; h++)
        for (int64_t t = 0; t < T; t++) {
            double largest = -INFINITY, sum = 0;
            for (int64_t j = 0; j <= t; j++) {
                p[j] = 0;
                for (int64_t i = h * HS; i < (h + 1) * HS; i++) p[j] += qkv[t * 3 * C + i] * qkv[j * 3 * C + C + i];
                p[j] /= sqrt((double)HS);
                largest = fmax(largest, p[j]);
            }
            for (int64_t j = 0; j <= t; j++) sum += p[j] = exp(p[j] - largest);
            for (int64_t i = h * HS; i < (h + 1) * HS; i++) {
                out[t * C + i] = 0;
                for (int64_t j = 0; j <= t; j++) out[t * C + i] += p[j] / sum * qkv[j * 3 * C + 2 * C + i];
            }
        }
    free(p);
}

/* x (T,C) through block l, in place. */
static void oracle_block(const Oracle *o, int64_t l, double *x, int64_t T)
{
    int64_t C = o->config.channels;
    double *norm = malloc((size_t)C * sizeof *norm), *wide = malloc((size_t)(4 * C) * sizeof *wide);
    double *qkv = malloc((size_t)(T * 3 * C) * sizeof *qkv), *att = malloc((size_t)(T * C) * sizeof *att);
    for (int64_t t = 0; t < T; t++) {
        oracle_norm(norm, x + t * C, oracle_weight(o, GPT_LN1_W, l), oracle_weight(o, GPT_LN1_B, l), C);
        oracle_linear(qkv + t * 3 * C, norm, oracle_weight(o, GPT_QKV_W, l), oracle_weight(o, GPT_QKV_B, l), C, 3 * C);
    }
    oracle_attention(att, qkv, T, C, o->config.heads);
    for (int64_t t = 0; t < T; t++) {
        double *row = x + t * C;
        oracle_linear(norm, att + t * C, oracle_weight(o, GPT_PROJ_W, l), oracle_weight(o, GPT_PROJ_B, l), C, C);
        for (int64_t c = 0; c < C; c++) row[c] += norm[c];
        oracle_norm(norm, row, oracle_weight(o, GPT_LN2_W, l), oracle_weight(o, GPT_LN2_B, l), C);
        oracle_linear(wide, norm, oracle_weight(o, GPT_FC_W, l), oracle_weight(o, GPT_FC_B, l), C, 4 * C);
        for (int64_t i = 0; i < 4 * C; i++) {
            double u = wide[i];
            wide[i] = 0.5 * u * (1 + tanh(sqrt(2 / 3.14159265358979323846) * (u + 0.044715 * u * u * u)));
        }
        oracle_linear(norm, wide, oracle_weight(o, GPT_FCPROJ_W, l), oracle_weight(o, GPT_FCPROJ_B, l), 4 * C, C);
        for (int64_t c = 0; c < C; c++) row[c] += norm[c];
    }
    free(norm);
    free(wide);
    free(qkv);
    free(att);
}

/* The sum of losses of (B,T) tokens, as gpt_loss defines it. */
static double oracle_loss(const Oracle *o, const int32_t *tokens, const int32_t *targets, int64_t B, int64_t T)
{
    int64_t C = o->config.channels, V = o->config.vocab;
    const double *wte = oracle_weight(o, GPT_WTE, 0), *wpe = oracle_weight(o, GPT_WPE, 0);
    double *x = malloc((size_t)(T * C) * sizeof *x), *norm = malloc((size_t)C * sizeof *norm);
    double *logits = malloc((size_t)V * sizeof *logits), loss = 0;
    for (int64_t b = 0; b < B; b++) {
        for (int64_t i = 0; i < T * C; i++) x[i] = wte[tokens[b * T + i / C] * C + i % C] + wpe[i];
        for (int64_t l = 0; l < o->config.layers; l++) oracle_block(o, l, x, T);
        for (int64_t t = 0; t < T; t++) {
            int32_t target = targets[b * T + t];
            if (target < 0) continue;
            oracle_norm(norm, x + t * C, oracle_weight(o, GPT_LNF_W, 0), oracle_weight(o, GPT_LNF_B, 0), C);
            oracle_linear(logits, norm, wte, NULL, C, V);
            double largest = -INFINITY, sum = 0;
            for (int64_t v = 0; v < V; v++) largest = fmax(largest, logits[v]);
            for (int64_t v = 0; v < V; v++) sum += exp(logits[v] - largest);
            loss += log(sum) + largest - logits[target];
        }
    }
    free(x);
    free(norm);
    free(logits);
    return loss;
}

/* The derivative of the oracle's loss along `direction` in tensor i, by central differences. In double, with |direction| 1
 * and a step of 1e-4, both the cut-off term (step^2) and rounding (1e-15 / step) stay below 1e-8 of the loss's scale. */
static double oracle_derivative(Oracle *o, size_t i, const double *direction, int64_t n, const int32_t *tokens,
                                const int32_t *targets, int64_t B, int64_t T)
{
    const double step = 1e-4;
    double side[2], *kept = malloc((size_t)n * sizeof *kept);
    memcpy(kept, o->tensors[i], (size_t)n * sizeof *kept);
    for (int s = 0; s < 2; s++) {
        for (int64_t e = 0; e < n; e++) o->tensors[i][e] = kept[e] + (s ? -step : step) * direction[e];
        side[s] = oracle_loss(o, tokens, targets, B, T);
    }
    memcpy(o->tensors[i], kept, (size_t)n * sizeof *kept);
    free(kept);
    return (side[0] - side[1]) / (2 * step);
}

/* Compares tensor i's gradient with a finite difference along a random direction of length 1. */
static void check_direction(const Gpt *gpt, Oracle *oracle, size_t i, double whole, uint64_t *seed, const int32_t *tokens,
                            const int32_t *targets, int64_t B, int64_t T)
{
    int64_t n = tensor_size(gpt, i);
    float *gradient = read_tensor(gpt, GPT_GRADIENTS, i);
    double *direction = malloc((size_t)n * sizeof *direction), length = 0, dot = 0, own = 0;
    for (int64_t e = 0; e < n; e++) {
        direction[e] = normal(seed);
        length += direction[e] * direction[e];
    }
    for (int64_t e = 0; e < n; e++) {
        direction[e] /= sqrt(length);
        dot += direction[e] * (double)gradient[e];
        own += (double)gradient[e] * (double)gradient[e];
    }
    double expected = oracle_derivative(oracle, i, direction, n, tokens, targets, B, T);
    double allowed = (BOUND.direction * sqrt(own) + BOUND.noise * whole) / sqrt((double)n);
    CHECK(fabs(dot - expected) <= allowed, "derivative along a direction in %s is %.9g, finite difference %.9g, off by more "
          "than %.1e", gpt_tensor(gpt, i)->name, dot, expected, allowed);
    free(gradient);
    free(direction);
}

static double gradient_norm(const Gpt *gpt)
{
    double sum = 0;
    for (size_t i = 0; i < gpt_tensor_count(gpt); i++) {
        float *gradient = read_tensor(gpt, GPT_GRADIENTS, i);
        for (int64_t e = 0; e < tensor_size(gpt, i); e++) sum += (double)gradient[e] * (double)gradient[e];
        free(gradient);
    }
    return sqrt(sum);
}

static void test_oracle(GptConfig config, int64_t B, int64_t T, int64_t hole)
{
    TEST("oracle and finite differences: L %d NH %d C %d V %d, B %d T %d", (int)config.layers, (int)config.heads,
         (int)config.channels, (int)config.vocab, (int)B, (int)T);
    Gpt *gpt = create_training(config, B, T);
    if (!gpt) return;
    init_wide(gpt, 7);
    int32_t *tokens = make_tokens(B * T, config.vocab, 0, 8), *targets = make_tokens(B * T, config.vocab, hole, 9);
    Oracle oracle = oracle_from(gpt);
    double loss = gpt_backward(gpt, tokens, targets, B, T, 1), expected = oracle_loss(&oracle, tokens, targets, B, T);
    CHECK(fabs(loss - expected) <= BOUND.loss * expected, "loss is %.9g, the oracle's %.9g", loss, expected);
    double whole = gradient_norm(gpt);
    uint64_t seed = 10;
    for (size_t i = 0; i < gpt_tensor_count(gpt); i++)
        for (int repeat = 0; repeat < 2; repeat++)
            check_direction(gpt, &oracle, i, whole, &seed, tokens, targets, B, T);
    AdamwStep still = {0, 0.9f, 0.95f, 1e-8f, 0, 0.1f, 0.05f, 1};
    double norm = gpt_update(gpt, &still);
    CHECK(fabs(norm - whole) <= BOUND.norm * whole, "gpt_update gives norm %.9g, the gradients have %.9g", norm, whole);
    oracle_free(&oracle);
    gpt_free(gpt);
    free(tokens);
    free(targets);
}

/* --- against itself ------------------------------------------------------------------------------------------------- */

static const GptConfig ODD = {3, 5, 40, 30, 93};

/* A model of the ODD shape after one backward over (B,T) tokens, built with room for more. */
static Gpt *model_after_backward(GptOptions options, const char *attention, const int32_t *tokens, const int32_t *targets,
                                 int64_t B, int64_t T, double *loss)
{
    options.training = 1;
    Gpt *gpt = create(ODD, options, attention);
    if (!gpt) return NULL;
    init_wide(gpt, 11);
    *loss = gpt_backward(gpt, tokens, targets, B, T, 0.1f);
    return gpt;
}

/* Two ways to compute the same: the same loss and gradients, to the last bit where bound is 0. */
static void check_same(GptOptions left, const char *left_attention, GptOptions right, const char *right_attention, int64_t B,
                       int64_t T, double bound)
{
    int32_t *tokens = make_tokens(B * T, ODD.vocab, 0, 12), *targets = make_tokens(B * T, ODD.vocab, 5, 13);
    double a = NAN, b = NAN;
    Gpt *x = model_after_backward(left, left_attention, tokens, targets, B, T, &a);
    Gpt *y = model_after_backward(right, right_attention, tokens, targets, B, T, &b);
    if (x && y) {
        CHECK(bound == 0 ? a == b : fabs(a - b) <= BOUND.loss * b, "losses are %.17g and %.17g", a, b);
        check_buffers(x, y, GPT_GRADIENTS, bound, "gradients");
    }
    gpt_free(x);
    gpt_free(y);
    free(tokens);
    free(targets);
}

static void test_variants(void)
{
    GptOptions plain = {.batch = 3, .sequence = 21, .deterministic = 1}, gelu = plain, block = plain, roomy = plain;
    gelu.recompute = GPT_RECOMPUTE_GELU;
    block.recompute = GPT_RECOMPUTE_BLOCK;
    roomy.batch = 5;
    roomy.sequence = 30;
    TEST("two runs give the same bits");
    check_same(plain, "reference", plain, "reference", 3, 21, 0);
    check_same(plain, "tiled", plain, "tiled", 3, 21, 0);
    TEST("recomputing GELU gives the same bits");
    check_same(gelu, "reference", plain, "reference", 3, 21, 0);
    TEST("recomputing blocks gives the same bits");
    check_same(block, "reference", plain, "reference", 3, 21, 0);
    check_same(block, "tiled", plain, "tiled", 3, 21, 0);
    TEST("a batch and a sequence smaller than planned");
    check_same(roomy, "reference", plain, "reference", 3, 21, BOUND.regrouping);
    check_same(roomy, "tiled", plain, "tiled", 3, 21, BOUND.regrouping);
    TEST("tiled attention against reference");
    check_same(plain, "tiled", plain, "reference", 3, 21, BOUND.gradient);
    TEST("a scale that is given is used");
    GptOptions same = plain;
    same.scale = attention_scale(ODD.channels / ODD.heads);
    check_same(same, "reference", plain, "reference", 3, 21, 0);
}

/* A call must not see what the one before left in the activations: a large batch first, then a small one. */
static void test_stale(GptRecompute recompute)
{
    TEST("a small batch after a large one, recompute %d", (int)recompute);
    int64_t B = 2, T = 9;
    int32_t *large = make_tokens(5 * 30, ODD.vocab, 0, 14), *tokens = make_tokens(B * T, ODD.vocab, 0, 15);
    int32_t *targets = make_tokens(B * T, ODD.vocab, 0, 16);
    GptOptions options = {.batch = 5, .sequence = 30, .recompute = recompute};
    double fresh = NAN, used;
    Gpt *x = model_after_backward(options, "reference", tokens, targets, B, T, &fresh);
    Gpt *y = model_after_backward(options, "reference", large, large, 5, 30, &used);
    if (x && y) {
        gpt_zero_gradients(y);
        used = gpt_backward(y, tokens, targets, B, T, 0.1f);
        CHECK(used == fresh, "losses are %.17g and %.17g", used, fresh);
        check_buffers(y, x, GPT_GRADIENTS, 0, "gradients");
    }
    gpt_free(x);
    gpt_free(y);
    free(large);
    free(tokens);
    free(targets);
}

static void test_accumulation(void)
{
    TEST("two half batches accumulate to one whole");
    int64_t B = 4, T = 13, half = B / 2 * T;
    int32_t *tokens = make_tokens(B * T, ODD.vocab, 0, 17), *targets = make_tokens(B * T, ODD.vocab, 6, 18);
    double whole = NAN, first = NAN;
    Gpt *x = model_after_backward((GptOptions){.batch = B, .sequence = T}, "reference", tokens, targets, B, T, &whole);
    Gpt *y = model_after_backward((GptOptions){.batch = B / 2, .sequence = T}, "reference", tokens, targets, B / 2, T,
                                  &first);
    if (x && y) {
        double sum = first + gpt_backward(y, tokens + half, targets + half, B / 2, T, 0.1f);
        CHECK(fabs(sum - whole) <= BOUND.loss * whole, "losses are %.9g and %.9g", sum, whole);
        check_buffers(y, x, GPT_GRADIENTS, BOUND.regrouping, "gradients");
    }
    gpt_free(x);
    gpt_free(y);
    free(tokens);
    free(targets);
}

/* Updates handed over by gpt_upload, gpt_step_launch and gpt_step_finish, the following one's batches brought while one
 * runs, are those of gpt_backward and gpt_update, bit for bit. */
static void test_steps(void)
{
    enum { B = 2, T = 9, N = B * T, MICRO_STEPS = 2, UPDATES = 3 };
    TEST("an update in three calls is the same as one operation after another");
    GptOptions options = {.batch = B, .sequence = T, .training = 1, .micro_steps = MICRO_STEPS};
    Gpt *plain = create(ODD, options, "tiled"), *queued = create(ODD, options, "tiled");
    if (!plain || !queued) return;
    init_wide(plain, 3);
    init_wide(queued, 3);
    int32_t *tokens = make_tokens(UPDATES * MICRO_STEPS * N + 1, ODD.vocab, 0, 8);
    AdamwStep step = {.lr = 1e-2f, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-8f, .weight_decay = 0.1f, .clip = 1};
    for (int m = 0; m < MICRO_STEPS; m++) gpt_upload(queued, m, tokens + m * N, tokens + m * N + 1);
    for (int u = 0; u < UPDATES; u++) {
        const int32_t *batch = tokens + u * MICRO_STEPS * N;
        double loss = 0, queued_loss;
        float norm, queued_norm;
        step.bias_correction1 = 1 - powf(step.beta1, (float)u + 1);
        step.bias_correction2 = 1 - powf(step.beta2, (float)u + 1);
        gpt_zero_gradients(plain);
        for (int m = 0; m < MICRO_STEPS; m++)
            loss += gpt_backward(plain, batch + m * N, batch + m * N + 1, B, T, 1.0f / (MICRO_STEPS * N));
        norm = gpt_update(plain, &step);
        gpt_step_launch(queued, MICRO_STEPS, 1.0f / (MICRO_STEPS * N), &step);
        for (int m = 0; m < MICRO_STEPS && u + 1 < UPDATES; m++)
            gpt_upload(queued, m, batch + (MICRO_STEPS + m) * N, batch + (MICRO_STEPS + m) * N + 1);
        gpt_step_finish(queued, &queued_loss, &queued_norm);
        CHECK(fabs(loss - queued_loss) <= 1e-12 * fabs(loss), "update %d: loss %.17g, expected %.17g", u, queued_loss, loss);
        CHECK(norm == queued_norm, "update %d: norm %.9g, expected %.9g", u, queued_norm, norm);
    }
    check_buffers(queued, plain, GPT_PARAMETERS, 0, "parameters");
    check_buffers(queued, plain, GPT_MOMENT2, 0, "second moments");
    gpt_free(plain);
    gpt_free(queued);
    free(tokens);
}

/* A vocabulary so wide that the classifier takes the rows in two chunks, against each sequence on its own. */
static void test_chunks(void)
{
    GptConfig config = {1, 2, 8, 130, 262147};
    TEST("the classifier in chunks of rows: V %d", (int)config.vocab);
    int64_t T = 130;
    Gpt *x = create_training(config, 2, T), *y = create_training(config, 1, T);
    if (!x || !y) return;
    init_wide(x, 19);
    init_wide(y, 19);
    int32_t *tokens = make_tokens(2 * T, config.vocab, 0, 20), *targets = make_tokens(2 * T, config.vocab, 8, 21);
    double whole = gpt_backward(x, tokens, targets, 2, T, 1), sum = 0;
    for (int b = 0; b < 2; b++) sum += gpt_backward(y, tokens + b * T, targets + b * T, 1, T, 1);
    CHECK(fabs(sum - whole) <= BOUND.loss * whole, "losses are %.9g and %.9g", sum, whole);
    check_buffers(x, y, GPT_GRADIENTS, BOUND.regrouping, "gradients");
    gpt_free(x);
    gpt_free(y);
    free(tokens);
    free(targets);
}

static void test_inference(void)
{
    TEST("a model without gradients gives the same loss and logits");
    int64_t B = 2, T = 19;
    int32_t *tokens = make_tokens(B * T, ODD.vocab, 0, 22), *targets = make_tokens(B * T, ODD.vocab, 5, 23);
    Gpt *x = create_training(ODD, B, T);
    Gpt *y = create(ODD, (GptOptions){.batch = B, .sequence = T, .deterministic = 1}, "reference");
    if (x && y) {
        float a[93], b[93];
        init_wide(x, 24);
        init_wide(y, 24);
        double with = gpt_loss(x, tokens, targets, B, T), without = gpt_loss(y, tokens, targets, B, T);
        CHECK(with == without, "losses are %.17g and %.17g", with, without);
        for (int64_t length = 1; length <= T; length += 6) {
            gpt_logits(x, a, tokens, length);
            gpt_logits(y, b, tokens, length);
            CHECK(relative_error(a, b, ODD.vocab) == 0, "logits after %d tokens differ", (int)length);
        }
    }
    gpt_free(x);
    gpt_free(y);
    free(tokens);
    free(targets);
}

/* The loss of one token that gpt_loss gives must be what gpt_logits' row means, padding left out of the sum. */
static void test_logits(void)
{
    TEST("logits and loss agree, and the vocabulary's padding has no part");
    int64_t T = 11, V = ODD.vocab;
    int32_t *tokens = make_tokens(T, V, 0, 25), targets[11];
    float logits[93];
    Gpt *gpt = create_training(ODD, 1, T);
    if (gpt) {
        init_wide(gpt, 26);
        AdamwStep step = {1e-2f, 0.9f, 0.95f, 1e-8f, 0.1f, 0.1f, 0.05f, 1};
        gpt_backward(gpt, tokens, tokens, 1, T, 1);
        gpt_update(gpt, &step); /* were padding rows trained, they would show from here on */
        for (int i = 0; i < T; i++) targets[i] = i == T - 1 ? 3 : -1;
        double loss = gpt_loss(gpt, tokens, targets, 1, T), sum = 0;
        gpt_logits(gpt, logits, tokens, T);
        for (int64_t v = 0; v < V; v++) sum += exp((double)logits[v]);
        double expected = log(sum) - (double)logits[3];
        CHECK(fabs(loss - expected) <= BOUND.loss * expected, "loss is %.9g, the logits mean %.9g", loss, expected);
    }
    gpt_free(gpt);
    free(tokens);
}

static void test_no_targets(void)
{
    TEST("a batch in which no target counts has loss 0 and gradients 0");
    int64_t B = 2, T = 8;
    int32_t *tokens = make_tokens(B * T, ODD.vocab, 0, 27), *targets = make_tokens(B * T, ODD.vocab, 1, 28);
    double loss = NAN;
    Gpt *gpt = model_after_backward((GptOptions){.batch = B, .sequence = T}, "reference", tokens, targets, B, T, &loss);
    if (gpt) {
        CHECK(loss == 0, "loss is %g", loss);
        double norm = gradient_norm(gpt);
        CHECK(norm == 0, "the gradient's norm is %g", norm);
    }
    gpt_free(gpt);
    free(tokens);
    free(targets);
}

/* --- memory, faults, initialisation --------------------------------------------------------------------------------- */

static void test_plan(void)
{
    TEST("gpt_plan is what gpt_create allocates");
    const char *names[] = {"reference", "tiled"};
    for (int i = 0; i < 2 * 4; i++) {
        GptOptions options = {.batch = 3, .sequence = 17, .training = i / 2 < 3, .recompute = (GptRecompute)(i / 2 % 3)};
        const AttentionKernel *kernel = choose_attention(names[i % 2], ODD.channels / ODD.heads);
        if (!kernel) return;
        GptPlan plan = gpt_plan(&ODD, &options, &fenced, kernel);
        size_t sum = plan.parameters + plan.gradients + plan.optimizer + plan.activations + plan.scratch;
        size_t before = heap.allocated;
        Gpt *gpt = create(ODD, options, names[i % 2]);
        CHECK(sum == plan.total, "parts add up to %zu, the total is %zu", sum, plan.total);
        CHECK(heap.allocated - before == plan.total, "case %d: allocated %zu, planned %zu", i, heap.allocated - before,
              plan.total);
        gpt_free(gpt);
        CHECK(heap.allocated == before, "case %d: %zu bytes are left after gpt_free", i, heap.allocated - before);
    }
    GptConfig gpt2 = {12, 12, 768, 1024, 50257};
    GptOptions options = {.batch = 4, .sequence = 1024, .training = 1};
    int64_t count = gpt_plan(&gpt2, &options, &fenced, NULL).parameters_count;
    CHECK(count == 124439808, "GPT-2 has %lld parameters, expected 124439808", (long long)count);
}

static void test_no_memory(void)
{
    TEST("too little memory names the batch that fits");
    GptOptions options = {.batch = 64, .sequence = 30, .training = 1}, fits = options, above = options;
    const AttentionKernel *kernel = choose_attention("reference", ODD.channels / ODD.heads);
    if (!kernel) return;
    fits.batch = 10;
    above.batch = 11;
    size_t low = gpt_plan(&ODD, &fits, &fenced, kernel).total, high = gpt_plan(&ODD, &above, &fenced, kernel).total;
    CHECK(low < high, "batch 10 needs %zu bytes, batch 11 %zu", low, high);
    char error[1024] = "";
    heap.available = (int64_t)high - 1;
    Gpt *gpt = gpt_create(&ODD, &options, &fenced, stream, kernel, error, sizeof error);
    CHECK(!gpt && strstr(error, "--batch 10 "), "error is '%s', expected one with '--batch 10 would fit'", error);
    heap.available = 1;
    gpt_free(gpt);
    gpt = gpt_create(&ODD, &options, &fenced, stream, kernel, error, sizeof error);
    CHECK(!gpt && strstr(error, "not even"), "error is '%s', expected one that says that no batch fits", error);
    heap.available = 0;
    gpt_free(gpt);
    CHECK(heap.allocated == 0, "%zu bytes stay allocated", heap.allocated);
}

static void test_config_faults(void)
{
    TEST("a wrong configuration is one sentence with name and value");
    const struct { GptConfig config; const char *first, *second; } cases[] = {
        {{0, 4, 64, 32, 100}, "layers", "0"},         {{2, 0, 64, 32, 100}, "heads", "0"},
        {{2, 4, 0, 32, 100}, "dim", "0"},             {{2, 4, 64, 0, 100}, "context", "0"},
        {{2, 4, 64, 32, -5}, "vocab", "-5"},          {{2, 4, 130, 32, 100}, "130", "4"},
        {{2, 4, 64, 32, INT64_MAX}, "vocab", "9223"}, {{INT64_MAX, 4, 64, 32, 100}, "layers", "9223"},
        {{2, 4, 64, INT64_MAX, 100}, "context", "9223"},
    };
    char text[256];
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const char *fault = gpt_config_fault(&cases[i].config, text, sizeof text);
        CHECK(fault && strstr(fault, cases[i].first) && strstr(fault, cases[i].second),
              "case %d: '%s', expected a sentence with '%s' and '%s'", (int)i, fault ? fault : "(none)", cases[i].first,
              cases[i].second);
    }
    GptConfig good = {1, 1, 1, 1, 1};
    CHECK(!gpt_config_fault(&good, text, sizeof text), "the smallest model is refused: %s", text);
    GptOptions options = {.batch = 1, .sequence = 31, .training = 1};
    Gpt *gpt = gpt_create(&ODD, &options, &fenced, stream, choose_attention("reference", 8), text, sizeof text);
    CHECK(!gpt && strstr(text, "31") && strstr(text, "30"), "a sequence of 31 in a context of 30: '%s'", text);
    gpt_free(gpt);
}

/* Puts one NaN into each tensor in turn. */
static void test_nonfinite(GptBuffer buffer, float poison)
{
    TEST("%g in buffer %d is found by the tensor's name", (double)poison, (int)buffer);
    Gpt *gpt = create_training(ODD, 1, 4);
    if (!gpt) return;
    init_wide(gpt, 29);
    const GptTensor *found = gpt_find_nonfinite(gpt, buffer);
    CHECK(!found, "%s is said to be non-finite", found ? found->name : "");
    for (size_t i = 0; i < gpt_tensor_count(gpt); i++) {
        const GptTensor *tensor = gpt_tensor(gpt, i);
        float *row = malloc((size_t)tensor->columns * sizeof *row), kept;
        gpt_read(gpt, buffer, i, tensor->rows - 1, 1, row);
        kept = row[tensor->columns - 1];
        row[tensor->columns - 1] = poison;
        gpt_write(gpt, buffer, i, tensor->rows - 1, 1, row);
        found = gpt_find_nonfinite(gpt, buffer);
        CHECK(found == tensor, "found %s, expected %s", found ? found->name : "nothing", tensor->name);
        row[tensor->columns - 1] = kept;
        gpt_write(gpt, buffer, i, tensor->rows - 1, 1, row);
        free(row);
    }
    gpt_free(gpt);
}

/* What is said of a NaN that attention writes, and of none, in a model whose buffers were NaN when it was made. */
static void test_planted(GptRecompute recompute)
{
    TEST("a NaN of attention is found where it came from, recompute %d", (int)recompute);
    int blocks = recompute == GPT_RECOMPUTE_BLOCK; /* then nothing within a block is kept */
    const struct { int what, calls; const char *words, *gradient; } cases[] = {
        {PLANT_NOTHING, 0, NULL, NULL},
        {PLANT_O, 0, blocks ? "output of block 0" : "output of attention in block 0", "transformer.ln_f.bias"},
        {PLANT_O, 2, blocks ? "output of block 2" : "output of attention in block 2", "transformer.ln_f.bias"},
        {PLANT_LSE, 1, blocks ? NULL : "log-sum-exp of attention in block 1", NULL}, /* this kernel's backward reads none */
        {PLANT_DQ, 1, NULL, "transformer.h.1.attn.c_attn.bias"},
    };
    enum { B = 3, T = 10 };
    GptConfig config = {3, 2, 16, 12, 31};
    int32_t *tokens = make_tokens(B * T, config.vocab, 0, 31);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char text[64];
        GptOptions options = {.batch = B, .sequence = T, .training = 1, .recompute = recompute};
        Gpt *gpt = create(config, options, "reference");
        if (!gpt) break;
        init_wide(gpt, 32);
        gpt_zero_gradients(gpt);
        gpt_loss(gpt, tokens, tokens, 1, T); /* fewer rows than there is room for */
        const char *words = gpt_find_nonfinite_activation(gpt, text, sizeof text);
        CHECK(!words, "of a right pass it says '%s'", words);
        planted.what = cases[i].what, planted.calls = cases[i].calls;
        gpt_backward(gpt, tokens, tokens, B, T, 1);
        planted.what = PLANT_NOTHING;
        words = gpt_find_nonfinite_activation(gpt, text, sizeof text);
        const GptTensor *tensor = gpt_find_nonfinite(gpt, GPT_GRADIENTS);
        const char *pairs[][2] = {{words, cases[i].words}, {tensor ? tensor->name : NULL, cases[i].gradient}};
        for (int k = 0; k < 2; k++) {
            const char *got = pairs[k][0] ? pairs[k][0] : "nothing", *expected = pairs[k][1] ? pairs[k][1] : "nothing";
            CHECK(!strcmp(got, expected), "case %d: found %s, expected %s", (int)i, got, expected);
        }
        gpt_free(gpt);
    }
    free(tokens);
}

static void test_refused_update(void)
{
    TEST("a gradient that is not finite changes nothing");
    int64_t B = 2, T = 10;
    int32_t *tokens = make_tokens(B * T, ODD.vocab, 0, 30);
    double loss;
    Gpt *gpt = model_after_backward((GptOptions){.batch = B, .sequence = T}, "reference", tokens, tokens, B, T, &loss);
    Gpt *untouched = model_after_backward((GptOptions){.batch = B, .sequence = T}, "reference", tokens, tokens, B, T, &loss);
    if (gpt && untouched) {
        AdamwStep step = {1e-2f, 0.9f, 0.95f, 1e-8f, 0.1f, 0.1f, 0.05f, 1};
        gpt_update(gpt, &step);
        gpt_update(untouched, &step);
        float nan = NAN;
        float *row = malloc((size_t)ODD.channels * sizeof *row);
        gpt_read(gpt, GPT_GRADIENTS, 0, 5, 1, row);
        row[7] = nan;
        gpt_write(gpt, GPT_GRADIENTS, 0, 5, 1, row);
        float norm = gpt_update(gpt, &step);
        CHECK(!isfinite(norm), "the norm is %g", (double)norm);
        check_buffers(gpt, untouched, GPT_PARAMETERS, 0, "parameters");
        check_buffers(gpt, untouched, GPT_MOMENT1, 0, "first moments");
        check_buffers(gpt, untouched, GPT_MOMENT2, 0, "second moments");
        free(row);
    }
    gpt_free(gpt);
    gpt_free(untouched);
    free(tokens);
}

/* Mean and deviation of tensor i against what its kind should have; five standard errors are allowed. */
static void check_statistics(const Gpt *gpt, size_t i)
{
    const GptTensor *tensor = gpt_tensor(gpt, i);
    int64_t n = tensor_size(gpt, i);
    float *values = read_tensor(gpt, GPT_PARAMETERS, i);
    double mean = 0, square = 0, deviation = 0.02, fixed = is_norm_weight(tensor->kind) ? 1 : 0;
    if (tensor->kind == GPT_PROJ_W || tensor->kind == GPT_FCPROJ_W) deviation /= sqrt(2 * (double)gpt_config(gpt)->layers);
    for (int64_t e = 0; e < n; e++) {
        mean += (double)values[e] / (double)n;
        square += (double)values[e] * (double)values[e] / (double)n;
        if (tensor->rows == 1)
            CHECK((double)values[e] == fixed, "%s[%d] is %g, expected %g", tensor->name, (int)e, (double)values[e], fixed);
    }
    if (tensor->rows > 1) {
        double got = sqrt(square - mean * mean);
        CHECK(fabs(mean) <= 5 * deviation / sqrt((double)n), "the mean of %s is %g", tensor->name, mean);
        CHECK(fabs(got - deviation) <= 5 * deviation / sqrt(2.0 * (double)n), "the deviation of %s is %.6g, expected %.6g",
              tensor->name, got, deviation);
    }
    free(values);
}

static void test_init_random(void)
{
    TEST("random initialisation: GPT-2's deviations, the same for the same seed");
    GptConfig config = {3, 4, 64, 50, 301};
    Gpt *x = create_training(config, 1, 4), *y = create_training(config, 2, 8);
    if (!x || !y) return;
    gpt_init_random(x, 1);
    gpt_init_random(y, 1);
    check_buffers(x, y, GPT_PARAMETERS, 0, "same seed");
    for (size_t i = 0; i < gpt_tensor_count(x); i++) check_statistics(x, i);
    gpt_init_random(y, 2);
    for (size_t i = 0; i < gpt_tensor_count(x); i++) {
        float *a = read_tensor(x, GPT_PARAMETERS, i), *b = read_tensor(y, GPT_PARAMETERS, i);
        int64_t equal = 0, n = tensor_size(x, i);
        for (int64_t e = 0; e < n; e++) equal += a[e] == b[e];
        if (gpt_tensor(x, i)->rows > 1)
            CHECK(equal < n / 100 + 1, "seeds 1 and 2 give %d of %d equal values in %s", (int)equal, (int)n,
                  gpt_tensor(x, i)->name);
        free(a);
        free(b);
    }
    gpt_free(x);
    gpt_free(y);
}

int main(void)
{
    open_backend();
    if (!stream) return test_end();

    test_fixture("reference");
    test_fixture("tiled");
    test_oracle((GptConfig){1, 1, 8, 1, 2}, 1, 1, 0);
    test_oracle((GptConfig){1, 1, 1, 3, 1}, 2, 3, 0);
    test_oracle((GptConfig){3, 5, 40, 9, 11}, 3, 7, 4);
    test_oracle((GptConfig){2, 2, 64, 33, 300}, 2, 33, 9);
    test_variants();
    test_stale(GPT_RECOMPUTE_NONE);
    test_stale(GPT_RECOMPUTE_BLOCK);
    test_accumulation();
    test_steps();
    test_chunks();
    test_inference();
    test_logits();
    test_no_targets();
    test_plan();
    test_no_memory();
    test_config_faults();
    test_nonfinite(GPT_PARAMETERS, NAN);
    test_nonfinite(GPT_GRADIENTS, INFINITY);
    for (int recompute = GPT_RECOMPUTE_NONE; recompute <= GPT_RECOMPUTE_BLOCK; recompute++)
        test_planted((GptRecompute)recompute);
    test_refused_update();
    test_init_random();

    TEST("no buffer was written beyond its end");
    CHECK(heap.overruns == 0, "%d guard bytes are changed", heap.overruns);
    fenced.close(stream);
    return test_end();
}
