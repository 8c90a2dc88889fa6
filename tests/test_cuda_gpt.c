/* test_cuda_gpt.c - the whole model on the GPU backends against the CPU's, from the same parameters on the same tokens.
 *
 * The CPU model is the oracle: tests/test_gpt.c holds it to PyTorch and to finite differences. Here every tensor's
 * gradient, losses, norms, logits, and what three updates make of parameters and moments are compared, for each attention
 * kernel and way to recompute; batches smaller than planned; a vocabulary whose padding must not show. And the GPU model
 * must agree with itself: recordings change no bit, and neither does a second run.
 *
 * Parameters are drawn wide, so that nothing works in its linear regime, and those that products read are rounded to bf16
 * first, so that both dtypes start from what they can hold. Runs on a GPU and, built with SIMT=1, under the emulation of
 * tests/simt at small shapes.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/random.h"
#include "layers/gpt.h"
#include "tests/test.h"

/* Largest errors allowed. fp32 sums are taken in another order than the CPU's, and exp and tanh differ in their last bits:
 * some ten operations a layer at 6e-8 each. bf16 rounds every activation to 2^-9; a tensor's largest error is the worst of
 * thousands, its mean error is not. Each bound is about three times what was seen of all shapes, the largest included, under
 * the emulation, whose errors were a GPU's within a tenth where both were measured. */
static const struct Bound {
    double loss;     /* relative */
    double logits;   /* of the largest logit */
    double gradient; /* of the tensor's largest gradient */
    double mean;     /* root of the mean square, of that of the tensor's gradients */
    double floor;    /* beside both, of the whole model's: for tensors whose own gradient is nearly all rounding */
    double norm;     /* relative */
    double update;   /* of parameters after three updates: of the learning rate. (Moments: as gradients) */
} BOUNDS[DTYPE_COUNT] = {
    [DTYPE_FP32] = {2e-7, 2e-6, 6e-6, 4e-6, 1e-7, 3e-7, 5e-5},
    [DTYPE_BF16] = {1.5e-3, 2e-2, 5e-2, 3e-2, 1e-3, 6e-3, 2e-1},
};

/* The same of many layers that each add little to the residual stream: gradients in bf16 are off by 8e-3 of the largest and
 * 5e-3 in the mean where the stream is fp32, by 2e-2 and 1.6e-2 where it is rounded to bf16 (seen of several seeds). */
static const struct Bound DEEP_BOUNDS[DTYPE_COUNT] = {
    [DTYPE_FP32] = {2e-7, 2e-6, 6e-6, 4e-6, 1e-7, 3e-7, 5e-5},
    [DTYPE_BF16] = {1.5e-3, 2e-2, 1.2e-2, 8e-3, 1e-3, 6e-3, 2e-1},
};

static const Backend *device;
static Stream *device_stream, *cpu_stream;
static int emulated;
static const struct Bound *bound;

/* How much of its bound each quantity used, for the closing line. */
static struct Bound used;

/* Whether `error` keeps `allowed`; notes how near it came. */
static int keeps(double error, double allowed, double *share)
{
    if (isfinite(error)) *share = fmax(*share, error / allowed);
    return error <= allowed;
}

/* --- models --------------------------------------------------------------------------------------------------------- */

static float bf16_round(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, 4);
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000u;
    memcpy(&x, &bits, 4);
    return x;
}

static const AttentionKernel *attention_find(const char *name, AttentionDevice where, const GptConfig *config, int64_t B,
                                             int64_t T, int sm)
{
    char error[512];
    int64_t HS = config->channels / config->heads;
    AttentionShape shape = {B, T, config->heads, HS, attention_scale(HS),
                            where == ATTENTION_CPU ? DTYPE_FP32 : device->dtype, 1, 0};
    const AttentionKernel *kernel = attention_choose(name, where, &shape, sm, error, sizeof error);
    CHECK(kernel, "attention %s: %s", name, error);
    return kernel;
}

static Gpt *create_cpu(GptConfig config, GptOptions options)
{
    char error[512];
    const AttentionKernel *kernel = attention_find("reference", ATTENTION_CPU, &config, options.batch, options.sequence, 0);
    Gpt *gpt = gpt_create(&config, &options, &backend_cpu_fp32, cpu_stream, kernel, error, sizeof error);
    if (!CHECK(gpt, "gpt_create on the CPU: %s", error)) exit(1);
    return gpt;
}

static Gpt *create_device(GptConfig config, GptOptions options, const char *attention)
{
    char error[512] = "no such attention";
    const AttentionKernel *kernel = attention_find(attention, ATTENTION_CUDA, &config, options.batch, options.sequence,
                                                   device->sm(device_stream));
    options.deterministic = 1;
    Gpt *gpt = kernel ? gpt_create(&config, &options, device, device_stream, kernel, error, sizeof error) : NULL;
    if (!CHECK(gpt, "gpt_create on the GPU: %s", error)) exit(1);
    return gpt;
}

static GptOptions training(int64_t B, int64_t T) { return (GptOptions){.batch = B, .sequence = T, .training = 1}; }

static int64_t tensor_size(const Gpt *gpt, size_t i) { return gpt_tensor(gpt, i)->rows * gpt_tensor(gpt, i)->columns; }

/* Tensor i of a buffer, to be freed by the caller. */
static float *read_tensor(const Gpt *gpt, GptBuffer buffer, size_t i)
{
    float *values = malloc((size_t)tensor_size(gpt, i) * sizeof *values);
    gpt_read(gpt, buffer, i, 0, gpt_tensor(gpt, i)->rows, values);
    return values;
}

/* Is this kind of parameter fp32 in a bf16 model too, and read by no product? (wte has both readers.) */
static int is_exact(GptKind kind)
{
    return kind == GPT_WPE || kind == GPT_LN1_W || kind == GPT_LN1_B || kind == GPT_LN2_W || kind == GPT_LN2_B ||
           kind == GPT_LNF_W || kind == GPT_LNF_B;
}

/* The same parameters for every model of a configuration: around 0, norms around 1; bf16 values where products read them.
 * The deviation is 0.15, and less where rows are wide, lest every product enlarges the errors of the one before; of the
 * projections into the residual stream `branch` times that. */
static void init_branches(Gpt *gpt, double branch)
{
    uint64_t seed = 77;
    double spread = fmin(0.26, 1.47 / sqrt((double)gpt_config(gpt)->channels));
    for (size_t i = 0; i < gpt_tensor_count(gpt); i++) {
        const GptTensor *tensor = gpt_tensor(gpt, i);
        GptKind kind = tensor->kind;
        int one = kind == GPT_LN1_W || kind == GPT_LN2_W || kind == GPT_LNF_W;
        int projection = kind == GPT_PROJ_W || kind == GPT_PROJ_B || kind == GPT_FCPROJ_W || kind == GPT_FCPROJ_B;
        double width = projection ? branch * spread : spread;
        float *values = malloc((size_t)tensor_size(gpt, i) * sizeof *values);
        for (int64_t e = 0; e < tensor_size(gpt, i); e++) {
            double sum = random_uniform(&seed) + random_uniform(&seed) + random_uniform(&seed) + random_uniform(&seed);
            values[e] = (float)(one + width * (sum - 2));
            if (!is_exact(kind)) values[e] = bf16_round(values[e]);
        }
        gpt_write(gpt, GPT_PARAMETERS, i, 0, tensor->rows, values);
        free(values);
    }
}

static void init_wide(Gpt *gpt) { init_branches(gpt, 1); }

/* n tokens below V, in which some follow themselves; every `hole`-th is -1 (0: none). To be freed by the caller. */
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

/* --- comparison ----------------------------------------------------------------------------------------------------- */

/* Of n elements: the largest, and the root of the mean square. */
typedef struct Size { double largest, mean; } Size;

/* Sizes of a - b, or of a where b is NULL; infinite with a NaN. */
static Size size_of(const float *a, const float *b, int64_t n)
{
    Size size = {0, 0};
    for (int64_t i = 0; i < n; i++) {
        double x = (double)a[i] - (b ? (double)b[i] : 0);
        if (!isfinite(x)) return (Size){INFINITY, INFINITY};
        size.largest = fmax(size.largest, fabs(x));
        size.mean += x * x / (double)n;
    }
    size.mean = sqrt(size.mean);
    return size;
}

/* The largest of the sizes of a buffer's tensors. */
static Size buffer_size(const Gpt *gpt, GptBuffer buffer)
{
    Size whole = {0, 0};
    for (size_t i = 0; i < gpt_tensor_count(gpt); i++) {
        float *values = read_tensor(gpt, buffer, i);
        Size size = size_of(values, NULL, tensor_size(gpt, i));
        whole.largest = fmax(whole.largest, size.largest);
        whole.mean = fmax(whole.mean, size.mean);
        free(values);
    }
    return whole;
}

/* Gradients or moments of every tensor on the GPU against the CPU's. Second moments are squares: twice the error. */
static void check_gradients(const Gpt *got, const Gpt *expected, GptBuffer buffer, const char *what)
{
    Size whole = buffer_size(expected, buffer);
    double factor = buffer == GPT_MOMENT2 ? 2 : 1;
    for (size_t i = 0; i < gpt_tensor_count(expected); i++) {
        int64_t n = tensor_size(expected, i);
        float *a = read_tensor(got, buffer, i), *b = read_tensor(expected, buffer, i);
        Size error = size_of(a, b, n), own = size_of(b, NULL, n);
        Size allowed = {factor * (bound->gradient * own.largest + bound->floor * whole.largest),
                        factor * (bound->mean * own.mean + bound->floor * whole.mean)};
        CHECK(keeps(error.largest, allowed.largest, &used.gradient),
              "%s: %s is off by %.2e, allowed %.2e (its largest is %.2e)", what,
              gpt_tensor(expected, i)->name, error.largest, allowed.largest, own.largest);
        CHECK(keeps(error.mean, allowed.mean, &used.mean),
              "%s: %s is off by %.2e in the mean, allowed %.2e (its mean is %.2e)", what,
              gpt_tensor(expected, i)->name, error.mean, allowed.mean, own.mean);
        free(a);
        free(b);
    }
}

static void check_parameters(const Gpt *got, const Gpt *expected, double lr)
{
    for (size_t i = 0; i < gpt_tensor_count(expected); i++) {
        float *a = read_tensor(got, GPT_PARAMETERS, i), *b = read_tensor(expected, GPT_PARAMETERS, i);
        double error = size_of(a, b, tensor_size(expected, i)).largest / lr;
        CHECK(keeps(error, bound->update, &used.update),
              "%s is off by %.2e of the learning rate after three updates, allowed %.0e",
              gpt_tensor(expected, i)->name, error, bound->update);
        free(a);
        free(b);
    }
}

/* All buffers of two GPU models, to the last bit. */
static void check_same_bits(const Gpt *a, const Gpt *b, const char *what)
{
    for (int buffer = GPT_PARAMETERS; buffer <= GPT_MOMENT2; buffer++)
        for (size_t i = 0; i < gpt_tensor_count(a); i++) {
            float *left = read_tensor(a, (GptBuffer)buffer, i), *right = read_tensor(b, (GptBuffer)buffer, i);
            CHECK(!memcmp(left, right, (size_t)tensor_size(a, i) * sizeof *left), "%s: other bits in buffer %d of %s", what,
                  buffer,
                  gpt_tensor(a, i)->name);
            free(left);
            free(right);
        }
}

static int64_t count_targets(const int32_t *targets, int64_t n)
{
    int64_t count = 0;
    for (int64_t i = 0; i < n; i++) count += targets[i] >= 0;
    return count;
}

/* --- one pass ------------------------------------------------------------------------------------------------------- */

/* Loss and gradients of B sequences of T tokens on a model that was planned with `options`; branch: see init_branches. */
static void test_pass_of(GptConfig config, GptOptions options, int64_t B, int64_t T, const char *attention, double branch)
{
    static const char *const recompute_names[] = {"none", "gelu", "block"};
    TEST("%s, %s: loss and gradients, L%lld NH%lld C%lld V%lld, B%lld T%lld of %lld x %lld, recompute %s", device->name,
         attention, (long long)config.layers, (long long)config.heads, (long long)config.channels, (long long)config.vocab,
         (long long)B, (long long)T, (long long)options.batch, (long long)options.sequence,
         recompute_names[options.recompute]);
    Gpt *cpu = create_cpu(config, training(B, T)), *gpt = create_device(config, options, attention);
    int32_t *tokens = make_tokens(B * T, config.vocab, 0, 5), *targets = make_tokens(B * T, config.vocab, 11, 6);
    float dscale = 1 / (float)count_targets(targets, B * T);
    init_branches(cpu, branch);
    init_branches(gpt, branch);
    double expected = gpt_loss(cpu, tokens, targets, B, T), alone = gpt_loss(gpt, tokens, targets, B, T);
    CHECK(keeps(fabs(alone / expected - 1), bound->loss, &used.loss), "gpt_loss gives %.9g, expected %.9g", alone, expected);
    for (int k = 0; k < 2; k++) { /* twice: gradients accumulate */
        gpt_backward(cpu, tokens, targets, B, T, dscale);
        double with = gpt_backward(gpt, tokens, targets, B, T, dscale);
        CHECK(with == alone, "gpt_backward gives loss %.17g, gpt_loss %.17g", with, alone);
    }
    check_gradients(gpt, cpu, GPT_GRADIENTS, "gradients");
    CHECK(!gpt_fault(gpt), "attention failed: %s", gpt_fault(gpt));
    gpt_free(cpu);
    gpt_free(gpt);
    free(tokens);
    free(targets);
}

static void test_pass(GptConfig config, GptOptions options, int64_t B, int64_t T, const char *attention)
{
    test_pass_of(config, options, B, T, attention, 1);
}

/* Many layers that each add little to the residual stream, as GPT-2 begins: what the stream is kept in shows. */
static void test_deep(Dtype dtype)
{
    const struct Bound *usual = bound;
    bound = &DEEP_BOUNDS[dtype];
    test_pass_of((GptConfig){48, 2, 32, 24, 101}, training(3, 24), 3, 24, "auto", 0.03);
    bound = usual;
}

/* Logits after one token, after some and after all; from a model that cannot train, whose loss must be the same. */
static void test_inference(GptConfig config, int64_t T)
{
    TEST("%s: logits and loss without training, V%lld", device->name, (long long)config.vocab);
    GptOptions options = {.batch = 2, .sequence = T};
    Gpt *cpu = create_cpu(config, options), *gpt = create_device(config, options, "auto");
    const int64_t lengths[] = {1, T / 2 + 1, T};
    int32_t *tokens = make_tokens(2 * T, config.vocab, 0, 8);
    float *got = malloc((size_t)config.vocab * sizeof *got), *expected = malloc((size_t)config.vocab * sizeof *expected);
    init_wide(cpu);
    init_wide(gpt);
    for (int k = 0; k < 3; k++) {
        gpt_logits(cpu, expected, tokens, lengths[k]);
        gpt_logits(gpt, got, tokens, lengths[k]);
        double error = size_of(got, expected, config.vocab).largest, largest = size_of(expected, NULL, config.vocab).largest;
        CHECK(keeps(error, bound->logits * largest, &used.logits),
              "logits after %lld tokens are off by %.2e, the largest is %.2e",
              (long long)lengths[k], error, largest);
    }
    double loss = gpt_loss(gpt, tokens, tokens, 2, T), wanted = gpt_loss(cpu, tokens, tokens, 2, T);
    CHECK(keeps(fabs(loss / wanted - 1), bound->loss, &used.loss), "gpt_loss gives %.9g, expected %.9g", loss, wanted);
    gpt_free(cpu);
    gpt_free(gpt);
    free(tokens);
    free(got);
    free(expected);
}

/* Steps that bf16 cannot see, as AdamW makes them, in one tensor at a time: in a bf16 model too they change the loss where
 * norms and embeddings read them, and only there. What was written is read back to the last bit, but from matrices of bf16
 * inference, which are kept in bf16 alone. */
static void test_fine_steps(GptConfig config, int trains)
{
    TEST("%s: steps too small for bf16 in each kind of parameter, %s", device->name, trains ? "training" : "inference");
    int64_t B = 2, T = config.context;
    GptOptions options = {.batch = B, .sequence = T, .training = trains};
    Gpt *gpt = create_device(config, options, "auto");
    int32_t *tokens = make_tokens(B * T, config.vocab, 0, 12);
    init_wide(gpt);
    for (size_t i = 0; i < gpt_tensor_count(gpt); i++) { /* first, all of them are bf16 values */
        float *values = read_tensor(gpt, GPT_PARAMETERS, i);
        for (int64_t e = 0; e < tensor_size(gpt, i); e++) values[e] = bf16_round(values[e]);
        gpt_write(gpt, GPT_PARAMETERS, i, 0, gpt_tensor(gpt, i)->rows, values);
        free(values);
    }
    double before = gpt_loss(gpt, tokens, tokens, B, T);
    for (size_t i = 0; i < gpt_tensor_count(gpt); i++) {
        const GptTensor *tensor = gpt_tensor(gpt, i);
        int64_t n = tensor_size(gpt, i);
        int product_matrix = tensor->rows > 1 && tensor->kind != GPT_WTE && tensor->kind != GPT_WPE;
        int kept = device->dtype == DTYPE_FP32 || trains || !product_matrix;
        int seen = device->dtype == DTYPE_FP32 || tensor->kind == GPT_WTE || is_exact(tensor->kind);
        float *values = read_tensor(gpt, GPT_PARAMETERS, i), *fine = malloc((size_t)n * sizeof *fine);
        for (int64_t e = 0; e < n; e++) fine[e] = values[e] * (1 + 0x1p-10f);
        gpt_write(gpt, GPT_PARAMETERS, i, 0, tensor->rows, fine);
        double after = gpt_loss(gpt, tokens, tokens, B, T);
        CHECK((after != before) == seen, "a step in %s made the loss %.17g of %.17g", tensor->name, after, before);
        float *got = read_tensor(gpt, GPT_PARAMETERS, i);
        CHECK(!memcmp(got, kept ? fine : values, (size_t)n * sizeof *got), "%s is read back otherwise", tensor->name);
        gpt_write(gpt, GPT_PARAMETERS, i, 0, tensor->rows, values);
        free(values);
        free(fine);
        free(got);
    }
    double again = gpt_loss(gpt, tokens, tokens, B, T);
    CHECK(again == before, "with the steps taken back the loss is %.17g, was %.17g", again, before);
    gpt_free(gpt);
    free(tokens);
}

/* --- updates -------------------------------------------------------------------------------------------------------- */

enum { UPDATES = 3, MICRO_STEPS = 2 };

/* A large eps: where the gradient is rounding, so is the update, and not a whole lr in a random direction. */
static AdamwStep adamw_step(int number)
{
    AdamwStep step = {.lr = 1e-2f, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-2f, .weight_decay = 0.1f, .clip = 1};
    step.bias_correction1 = (float)(1 - pow(0.9, number));
    step.bias_correction2 = (float)(1 - pow(0.95, number));
    return step;
}

typedef struct Curve { double loss[UPDATES], norm[UPDATES]; } Curve; /* no padding: compared as bytes */

/* Three updates of two micro-steps each, as the trainer makes them: the next one's tokens are handed over while one runs. */
static Curve run_updates(Gpt *gpt, int64_t B, int64_t T)
{
    Curve curve;
    int64_t V = gpt_config(gpt)->vocab;
    int32_t *tokens[UPDATES * MICRO_STEPS];
    for (int i = 0; i < UPDATES * MICRO_STEPS; i++) tokens[i] = make_tokens(B * T + 1, V, 0, 40 + (uint64_t)i);
    for (int m = 0; m < MICRO_STEPS; m++) gpt_upload(gpt, m, tokens[m], tokens[m] + 1);
    for (int u = 0; u < UPDATES; u++) {
        AdamwStep step = adamw_step(u + 1);
        gpt_step_launch(gpt, MICRO_STEPS, 1 / (float)(MICRO_STEPS * B * T), &step);
        memset(&step, 0xFF, sizeof step); /* it was copied */
        for (int m = 0; m < MICRO_STEPS && u + 1 < UPDATES; m++) {
            int32_t *next = tokens[(u + 1) * MICRO_STEPS + m];
            gpt_upload(gpt, m, next, next + 1);
            memset(next, 0xFF, (size_t)(B * T + 1) * sizeof *next); /* so were they */
        }
        float norm;
        gpt_step_finish(gpt, &curve.loss[u], &norm);
        curve.norm[u] = (double)norm;
    }
    for (int i = 0; i < UPDATES * MICRO_STEPS; i++) free(tokens[i]);
    return curve;
}

static Gpt *create_for_updates(GptConfig config, int64_t B, int64_t T, const char *attention, GptRecompute recompute,
                               int no_recording)
{
    GptOptions options = training(B, T);
    options.micro_steps = MICRO_STEPS;
    options.recompute = recompute;
    options.no_recording = no_recording;
    Gpt *gpt = attention ? create_device(config, options, attention) : create_cpu(config, options);
    init_wide(gpt);
    return gpt;
}

/* Against the CPU; without recordings, and once more with them: the same bits. */
static void test_updates(GptConfig config, int64_t B, int64_t T, const char *attention, GptRecompute recompute)
{
    TEST("%s, %s: three updates of two micro-steps, recompute %d", device->name, attention, recompute);
    Gpt *cpu = create_for_updates(config, B, T, NULL, GPT_RECOMPUTE_NONE, 0);
    Gpt *gpt = create_for_updates(config, B, T, attention, recompute, 0);
    Curve expected = run_updates(cpu, B, T), got = run_updates(gpt, B, T);
    for (int u = 0; u < UPDATES; u++) {
        CHECK(keeps(fabs(got.loss[u] / expected.loss[u] - 1), bound->loss, &used.loss),
              "loss of update %d is %.9g, expected %.9g", u + 1,
              got.loss[u], expected.loss[u]);
        CHECK(keeps(fabs(got.norm[u] / expected.norm[u] - 1), bound->norm, &used.norm),
              "norm of update %d is %.9g, expected %.9g", u + 1,
              got.norm[u], expected.norm[u]);
    }
    check_parameters(gpt, cpu, (double)adamw_step(1).lr);
    check_gradients(gpt, cpu, GPT_MOMENT1, "first moments");
    check_gradients(gpt, cpu, GPT_MOMENT2, "second moments");
    gpt_free(cpu);

    TEST("%s, %s: the same bits in a second run and without recordings, recompute %d", device->name, attention, recompute);
    for (int no_recording = 0; no_recording < 2; no_recording++) {
        const char *what = no_recording ? "without recordings" : "second run";
        Gpt *again = create_for_updates(config, B, T, attention, recompute, no_recording);
        Curve curve = run_updates(again, B, T);
        CHECK(!memcmp(&curve, &got, sizeof got), "%s: losses %.17g %.17g %.17g, were %.17g %.17g %.17g", what,
              curve.loss[0], curve.loss[1],
              curve.loss[2], got.loss[0], got.loss[1], got.loss[2]);
        check_same_bits(again, gpt, what);
        gpt_free(again);
    }
    gpt_free(gpt);
}

/* One batch learned by heart, with recordings. */
static void test_overfit(void)
{
    enum { STEPS = 60 };
    TEST("%s: one batch is learned by heart in %d updates", device->name, STEPS);
    GptConfig config = {1, 2, 32, 8, 19};
    GptOptions options = training(2, 8);
    Gpt *gpt = create_device(config, options, "auto");
    int32_t *tokens = make_tokens(17, config.vocab, 0, 90);
    double loss = 0, first = 0;
    float norm;
    gpt_init_random(gpt, 1);
    for (int s = 1; s <= STEPS; s++) {
        AdamwStep step = {.lr = 2e-2f, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-8f, .clip = 1};
        step.bias_correction1 = (float)(1 - pow(0.9, s));
        step.bias_correction2 = (float)(1 - pow(0.95, s));
        gpt_upload(gpt, 0, tokens, tokens + 1);
        gpt_step_launch(gpt, 1, 1.0f / 16, &step);
        gpt_step_finish(gpt, &loss, &norm);
        if (s == 1) first = loss / 16;
    }
    CHECK(fabs(first - log(19)) < 0.2, "the first loss is %.4f, expected about log(19) = 2.94", first);
    CHECK(loss / 16 < 0.02, "the loss is %.4f after %d updates, expected less than 0.02", loss / 16, STEPS);
    gpt_free(gpt);
    free(tokens);
}

/* A NaN in block 1 is found there, in a step that is replayed and in a pass over fewer rows. */
static void test_nonfinite(void)
{
    TEST("%s: a NaN is found where it came from", device->name);
    GptConfig config = {2, 2, 32, 24, 101};
    Gpt *gpt = create_device(config, training(3, 9), "auto");
    int32_t *tokens = make_tokens(28, config.vocab, 0, 91);
    const AdamwStep step = {.lr = 1e-3f, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-8f, .clip = 1, .bias_correction1 = 0.1f,
                            .bias_correction2 = 0.05f};
    char text[64] = "";
    double loss;
    float norm, bias[96];
    size_t i = 0;
    while (gpt_tensor(gpt, i)->kind != GPT_QKV_B || gpt_tensor(gpt, i)->layer != 1) i++;
    gpt_init_random(gpt, 1);
    gpt_loss(gpt, tokens, tokens + 1, 1, 9);
    CHECK(!gpt_find_nonfinite_activation(gpt, text, sizeof text), "of a right pass it says '%s'", text);
    for (int s = 0; s < 5; s++) { /* from the third on a recording is replayed */
        gpt_read(gpt, GPT_PARAMETERS, i, 0, 1, bias);
        bias[95] = s == 4 ? NAN : bias[95];
        gpt_write(gpt, GPT_PARAMETERS, i, 0, 1, bias);
        gpt_upload(gpt, 0, tokens, tokens + 1);
        gpt_step_launch(gpt, 1, 1.0f / 27, &step);
        gpt_step_finish(gpt, &loss, &norm);
        const char *words = gpt_find_nonfinite_activation(gpt, text, sizeof text);
        if (s < 4) CHECK(!words, "of right step %d it says '%s'", s, text);
        else CHECK(words && !strcmp(words, "queries, keys and values in block 1"), "it says '%s'", words ? words : "none");
    }
    gpt_loss(gpt, tokens, tokens + 1, 1, 3);
    CHECK(gpt_find_nonfinite_activation(gpt, text, sizeof text), "nothing is found in fewer rows");
    gpt_free(gpt);
    free(tokens);
}

/* Where memory is short: the sentence, and nothing kept. */
static void test_memory(void)
{
    TEST("%s: a plan that does not fit is refused with the batch that would", device->name);
    char error[512] = "";
    GptConfig config = {2, 2, 64, 1024, 1000};
    GptOptions options = training((int64_t)1 << 20, 1024);
    int64_t before = device->memory_available(device_stream);
    const AttentionKernel *kernel = attention_find("auto", ATTENTION_CUDA, &config, 1, 1024, device->sm(device_stream));
    Gpt *gpt = gpt_create(&config, &options, device, device_stream, kernel, error, sizeof error);
    CHECK(!gpt && strstr(error, "not enough memory") && strstr(error, "--batch ") && strstr(error, "would fit"), "got '%s'",
          error);
    CHECK(device->memory_available(device_stream) == before, "memory was kept");
}

/* --- all of it ------------------------------------------------------------------------------------------------------ */

static void test_attention_kernel(const AttentionKernel *kernel)
{
    static const GptConfig odd = {2, 2, 32, 24, 101}, full = {1, 3, 48, 24, 128}, narrow = {1, 1, 5, 9, 7};
    static const GptConfig large = {3, 3, 192, 260, 1003};
    AttentionShape shape = {3, 21, 2, 16, attention_scale(16), device->dtype, 1, 0}, small = shape;
    small.HS = narrow.channels / narrow.heads;
    small.scale = attention_scale(small.HS);
    const char *reason = kernel->refuse(&shape, device->sm(device_stream));
    if (reason) {
        TEST("%s, %s", device->name, kernel->name);
        SKIP("it refuses: %s", reason);
        return;
    }
    GptOptions options = training(3, 21);
    for (int recompute = GPT_RECOMPUTE_NONE; recompute <= GPT_RECOMPUTE_BLOCK; recompute++) {
        options.recompute = (GptRecompute)recompute;
        test_pass(odd, options, 3, 21, kernel->name);
        test_updates(odd, 2, 9, kernel->name, (GptRecompute)recompute);
    }
    test_pass(odd, training(3, 24), 2, 5, kernel->name);
    test_pass(full, training(2, 24), 2, 24, kernel->name);
    if (!kernel->refuse(&small, device->sm(device_stream))) test_pass(narrow, training(2, 9), 2, 9, kernel->name);
    if (emulated) return;
    test_pass(large, training(4, 257), 4, 257, kernel->name);
    test_updates(large, 2, 260, kernel->name, GPT_RECOMPUTE_NONE);
}

static void test_backend(void)
{
    static const GptConfig odd = {2, 2, 32, 24, 101}, full = {1, 3, 48, 24, 128};
    size_t count;
    const AttentionKernel *const *table = attention_table(&count);
    for (size_t k = 0; k < count; k++)
        if (table[k]->device == ATTENTION_CUDA) test_attention_kernel(table[k]);
    test_inference(odd, 24);
    test_inference(full, 24);
    test_fine_steps(odd, 1);
    test_fine_steps(odd, 0);
    test_deep(device->dtype);
    test_overfit();
    test_nonfinite();
    test_memory();
}

int main(void)
{
    static const Dtype dtypes[] = {DTYPE_FP32, DTYPE_BF16};
    char text[512] = "";
    BackendOptions options = {.deterministic = 1};
    cpu_stream = backend_cpu_fp32.open(0, &options, text, sizeof text);
    for (int d = 0; d < 2; d++) {
        device = backend_find(ATTENTION_CUDA, dtypes[d]);
        device_stream = device ? device->open(0, &options, text, sizeof text) : NULL;
        if (!device_stream) {
            TEST("the model on cuda_%s", d ? "bf16" : "fp32");
            SKIP("no GPU kernel ran: %s", device ? text : "this build is for the CPU only");
            continue;
        }
        device->describe(text, sizeof text, device_stream);
        emulated = strstr(text, "SIMT emulation") != NULL;
        bound = &BOUNDS[dtypes[d]];
        memset(&used, 0, sizeof used);
        test_backend();
        TEST("%s: worst errors", device->name);
        printf("worst %s model, of what is allowed: loss %.2f, logits %.2f, gradient %.2f (mean %.2f), norm %.2f, "
               "update %.2f\n", device->name, used.loss, used.logits, used.gradient, used.mean, used.norm, used.update);
        device->close(device_stream);
    }
    backend_cpu_fp32.close(cpu_stream);
    return test_end();
}
