/* test_decode.c - attention over a cache of keys and values: the operations against the float64 truth, and the whole model
 * written on token by token against the same model that reads the text at once.
 *
 * The operations are judged as the attention kernels are, per head and stripe of rows, by tests/bounds.h: every row of a
 * problem is one call of cache_attend. The cache is NaN where nothing was written and fenced behind. Runs for the CPU, and
 * for both types of the GPU where there is one or, built with SIMT=1, its emulation.
 */
#include <math.h>
#include <stdlib.h>

#include "layers/gpt.h"
#include "tests/attention_check.h"
#include "tests/test.h"

static const Backend *device;
static Stream *stream;

enum { GUARD = 4096 };

/* Memory of the backend, `bytes` of it NaN, with a guard of NaN behind. */
static void *poisoned(size_t bytes)
{
    void *memory = device->alloc(bytes + GUARD, stream), *nan = malloc(bytes + GUARD);
    memset(nan, POISON, bytes + GUARD);
    device->copy_in(memory, nan, bytes + GUARD, stream);
    free(nan);
    return memory;
}

static int guard_holds(const char *memory, size_t bytes)
{
    unsigned char guard[GUARD];
    int holds = 1;
    device->copy_out(guard, memory + bytes, GUARD, stream);
    for (int i = 0; i < GUARD; i++) holds = holds && guard[i] == POISON;
    return holds;
}

/* --- the operations ------------------------------------------------------------------------------------------------- */

/* Queries, keys and values of `count` positions from t on of sequences b..b+sequences-1, in the device's memory as a product
 * leaves them: (sequences * count, 3, NH, HS), positions of a sequence behind each other. */
static void qkv_bring(void *qkv, const Problem *problem, int64_t b, int64_t sequences, int64_t t, int64_t count)
{
    const AttentionShape *shape = &problem->shape;
    int64_t NH = shape->NH, HS = shape->HS, C = NH * HS, rows = sequences * count;
    float *host = malloc((size_t)(rows * 3 * C) * 4 + 16);
    for (int64_t row = 0; row < rows; row++)
        for (int part = 0; part < 3; part++)
            for (int64_t h = 0; h < NH; h++) {
                int64_t from = ((b + row / count) * NH + h) * shape->T + t + row % count;
                memcpy(host + (row * 3 + part) * C + h * HS, problem->input[part] + from * HS, (size_t)HS * 4);
            }
    void *staging = device->alloc((size_t)(rows * 3 * C) * 4 + 16, stream);
    device->copy_in(staging, host, (size_t)(rows * 3 * C) * 4, stream);
    device->from_fp32(qkv, staging, rows * 3 * C, stream);
    device->synchronize(stream);
    device->free(staging, stream);
    free(host);
}

/* out (B,NH,HS) of position t into the result. */
static void result_take(Result *result, const Problem *problem, const void *out, int64_t t)
{
    const AttentionShape *shape = &problem->shape;
    int64_t HS = shape->HS, heads = shape->B * shape->NH;
    float *host = malloc((size_t)(heads * HS) * 4);
    void *staging = device->alloc((size_t)(heads * HS) * 4, stream);
    device->to_fp32(staging, out, heads * HS, stream);
    device->copy_out(host, staging, (size_t)(heads * HS) * 4, stream);
    for (int64_t head = 0; head < heads; head++)
        memcpy(result->value[QUANTITY_O] + (head * shape->T + t) * HS, host + head * HS, (size_t)HS * 4);
    device->free(staging, stream);
    free(host);
}

/* Fills `prefix` rows of each sequence, attends from there on to the end, and judges the rows that were attended. room: rows
 * that the cache has. All of it must give the same bits twice. */
static void check_problem(const Problem *problem, int64_t prefix, int64_t room)
{
    const AttentionShape *shape = &problem->shape;
    int64_t B = shape->B, NH = shape->NH, HS = shape->HS, C = NH * HS, T = shape->T;
    size_t element = device->element, out_bytes = (size_t)(B * C) * element, cache_bytes = (size_t)(2 * room) * out_bytes;
    int64_t rows = prefix > B ? prefix : B;
    Result result = result_create(shape), second = result_create(shape);
    void *qkv = device->alloc((size_t)(rows * 3 * C) * element + 16, stream);
    Judgement judgement = {""};
    for (int round = 0; round < 2; round++) {
        char *cache = poisoned(cache_bytes), *out = poisoned(out_bytes);
        for (int64_t b = 0; b < B && prefix; b++) {
            qkv_bring(qkv, problem, b, 1, 0, prefix);
            device->cache_fill(cache, qkv, b, 1, prefix, room, NH, HS, stream);
        }
        for (int64_t t = prefix; t < T; t++) {
            qkv_bring(qkv, problem, 0, B, t, 1);
            device->cache_attend(out, cache, qkv, shape->scale, B, t, room, NH, HS, stream);
            result_take(round ? &second : &result, problem, out, t);
        }
        CHECK(guard_holds(cache, cache_bytes) && guard_holds(out, out_bytes), "written beyond cache or result");
        device->free(cache, stream);
        device->free(out, stream);
    }
    for (int64_t head = 0; head < B * NH && !*judgement.text; head++)
        for (int64_t t = prefix; t < T && !*judgement.text; t++)
            judge_stripe(problem, &result, QUANTITY_O, head * T + t, head * T + t + 1, &judgement);
    CHECK(!*judgement.text, "%s", judgement.text);
    CHECK(!compare_results(shape, &result, &second, &judgement), "not the same twice: %s", judgement.text);
    device->free(qkv, stream);
    result_free(&result);
    result_free(&second);
}

typedef struct Size {
    int64_t B, NH, T, HS, prefix, room;
} Size;

static void test_size(Size size, InputKind kind)
{
    static const char *const kinds[] = {"normal", "+1e5", "-1e5", "-1e5 to 1e5"};
    AttentionShape shape = {size.B, size.T, size.NH, size.HS, attention_scale(size.HS), device->dtype, 1, 0};
    TEST("%s cache B%d NH%d HS%d, %d rows filled, up to %d of %d, logits %s", device->name, (int)size.B, (int)size.NH,
         (int)size.HS, (int)size.prefix, (int)size.T, (int)size.room, kinds[kind]);
    Problem problem = problem_create(shape, kind, (uint64_t)(100 * size.T + size.HS));
    check_problem(&problem, size.prefix, size.room);
    problem_free(&problem);
}

/* A NaN in one sequence's key stays with that sequence, head and later rows. */
static void test_nan(void)
{
    AttentionShape shape = {2, 9, 2, 24, attention_scale(24), device->dtype, 1, 0};
    TEST("%s cache: a key that is NaN spoils its own head from its row on", device->name);
    Problem problem = problem_create(shape, INPUT_NORMAL, 5);
    problem.input[INPUT_K][(1 * 9 + 4) * 24 + 7] = NAN; /* sequence 0, head 1, row 4 */
    problem_solve(&problem);
    check_problem(&problem, 2, 9);
    problem_free(&problem);
}

/* One text for several sequences; others keep what they had. */
static void test_fill_many(void)
{
    enum { S = 4, T = 6, NH = 2, HS = 12, C = NH * HS, N = 3 };
    TEST("%s cache: one text for some sequences, the others untouched", device->name);
    AttentionShape shape = {1, N, NH, HS, 1, device->dtype, 1, 0};
    Problem problem = problem_open(shape, INPUT_NORMAL, 8);
    size_t bytes = (size_t)(S * 2 * T * C) * device->element;
    char *cache = poisoned(bytes);
    void *qkv = device->alloc(N * 3 * C * device->element + 16, stream);
    float *host = malloc(S * 2 * T * C * 4);
    void *staging = device->alloc(S * 2 * T * C * 4, stream);
    qkv_bring(qkv, &problem, 0, 1, 0, N);
    device->cache_fill(cache, qkv, 1, 2, N, T, NH, HS, stream);
    device->to_fp32(staging, cache, S * 2 * T * C, stream);
    device->copy_out(host, staging, S * 2 * T * C * 4, stream);
    for (int at = 0; at < S * 2 * T * C; at++) {
        int d = at % HS, row = at / HS % T, h = at / HS / T % NH, part = at / C / T % 2, s = at / C / T / 2;
        float got = host[at];
        if (s < 1 || s > 2 || row >= N) {
            if (!CHECK(isnan(got), "sequence %d, row %d was written", s, row)) break;
        } else {
            float wanted = problem.input[INPUT_K + part][(h * N + row) * HS + d];
            if (!CHECK(got == wanted, "sequence %d part %d row %d: %g, expected %g", s, part, row, got, wanted)) break;
        }
    }
    CHECK(guard_holds(cache, bytes), "written beyond the cache");
    device->free(cache, stream);
    device->free(qkv, stream);
    device->free(staging, stream);
    free(host);
    problem_free(&problem);
}

/* --- the model ------------------------------------------------------------------------------------------------------ */

static Gpt *model_create(GptConfig config, GptOptions options)
{
    char error[512];
    int64_t HS = config.channels / config.heads;
    AttentionShape shape = {options.batch, options.sequence, config.heads, HS, attention_scale(HS), device->dtype, 1, 0};
    const AttentionKernel *kernel =
        attention_choose("auto", device->device, &shape, device->sm(stream), error, sizeof error);
    Gpt *gpt = kernel ? gpt_create(&config, &options, device, stream, kernel, error, sizeof error) : NULL;
    if (!CHECK(gpt, "gpt_create: %s", error)) exit(1);
    /* Wide, so that the softmax is far from a mean and positions count; norms around 1. */
    uint64_t seed = 21;
    for (size_t i = 0; i < gpt_tensor_count(gpt); i++) {
        const GptTensor *tensor = gpt_tensor(gpt, i);
        int64_t n = tensor->rows * tensor->columns;
        int one = tensor->kind == GPT_LN1_W || tensor->kind == GPT_LN2_W || tensor->kind == GPT_LNF_W;
        float *values = malloc((size_t)n * sizeof *values);
        for (int64_t e = 0; e < n; e++) values[e] = round_to((float)(one + 0.2 * random_bell(&seed)), DTYPE_BF16);
        gpt_write(gpt, GPT_PARAMETERS, i, 0, tensor->rows, values);
        free(values);
    }
    return gpt;
}

/* Logits (V) against those that the same model gives for the whole text (n). */
static void check_logits(Gpt *reader, const float *logits, const int32_t *text, int64_t n, const char *what)
{
    int64_t V = gpt_config(reader)->vocab;
    float *wanted = malloc((size_t)V * sizeof *wanted);
    double worst = 0, largest = 0;
    gpt_logits(reader, wanted, text, n);
    for (int64_t v = 0; v < V; v++) {
        double error = fabs((double)logits[v] - (double)wanted[v]);
        worst = error <= worst ? worst : error; /* a NaN stays */
        largest = fmax(largest, fabs((double)wanted[v]));
    }
    CHECK(worst <= decode_logits[device->dtype] * largest, "%s, %lld tokens: logits are off by %.2e of %.2e, allowed %.0e",
          what, (long long)n, worst, largest, decode_logits[device->dtype] * largest);
    free(wanted);
}

/* S sequences of T tokens: prefixes of their own (shared: of the first) are read at once, the rest one token at a time. The
 * model that writes is told apart from the one that reads, which has no cache. */
static void check_model(GptConfig config, int64_t S, int64_t prefix, int shared, int training)
{
    int64_t T = config.context, V = config.vocab;
    Gpt *writer = model_create(config, (GptOptions){.batch = 1, .sequence = T, .cache = S, .training = training});
    Gpt *reader = model_create(config, (GptOptions){.batch = 1, .sequence = T});
    int32_t *text = malloc((size_t)(S * T) * sizeof *text), *next = malloc((size_t)S * sizeof *next);
    float *logits = malloc((size_t)(S * V) * sizeof *logits);
    uint64_t seed = 3;
    for (int64_t i = 0; i < S * T; i++) text[i] = (int32_t)(random_u64(&seed) % (uint64_t)V);
    for (int64_t s = 1; s < S && shared; s++) memcpy(text + s * T, text, (size_t)prefix * sizeof *text);
    if (shared) gpt_prefill(writer, logits, 0, S, text, prefix);
    for (int64_t s = 0; s < S && !shared; s++) gpt_prefill(writer, logits, s, 1, text + s * T, prefix);
    check_logits(reader, logits, text + (shared ? 0 : S - 1) * T, prefix, "the prefix");
    for (int64_t t = prefix; t < T; t++) {
        for (int64_t s = 0; s < S; s++) next[s] = text[s * T + t];
        if (training) gpt_backward(writer, text, text, 1, T - 1, 1); /* uses every activation but the cache */
        gpt_decode(writer, logits, next, S, t);
        for (int64_t s = 0; s < S; s++) check_logits(reader, logits + s * V, text + s * T, t + 1, "token by token");
    }
    /* Anew, with a shorter text in the place of the last sequence. */
    gpt_prefill(writer, NULL, 0, S, text, 1);
    if (T > 1) {
        for (int64_t s = 0; s < S; s++) next[s] = text[1];
        gpt_decode(writer, logits, next, S, 1);
        check_logits(reader, logits + (S - 1) * V, text, 2, "a second text");
    }
    gpt_free(writer);
    gpt_free(reader);
    free(text);
    free(next);
    free(logits);
}

static void test_model(void)
{
    static const GptConfig odd = {2, 3, 24, 11, 61}, wide = {1, 2, 32, 5, 300}, one = {1, 1, 8, 1, 9};
    if (UNDER_RACECHECK()) {
        TEST("%s model", device->name);
        SKIP("racecheck takes minutes over its products");
        return;
    }
    TEST("%s model: several texts, token by token", device->name);
    check_model(odd, 3, 4, 0, 0);
    TEST("%s model: one text for all, more sequences than the context is long", device->name);
    check_model(wide, 12, 2, 1, 0);
    TEST("%s model: a context of one token", device->name);
    check_model(one, 1, 1, 0, 0);
    TEST("%s model: while it trains", device->name);
    check_model(odd, 2, 3, 0, 1);
}

static void test_plan(void)
{
    GptConfig config = {3, 2, 16, 32, 40};
    GptOptions without = {.batch = 1, .sequence = 20}, with = {.batch = 1, .sequence = 20, .cache = 4};
    TEST("%s plan: the cache is counted", device->name);
    size_t more = gpt_plan(&config, &with, device, NULL).total - gpt_plan(&config, &without, device, NULL).total;
    size_t needed = 3 * 4 * 2 * 20 * 16 * device->element;
    CHECK(more >= needed && more < needed + 4096, "%zu bytes more, expected %zu and some alignment", more, needed);
}

/* A row of a batch of up to 8 gets the bits that it gets alone, whatever the width: then a sample does not depend on how
 * many others are drawn beside it. */
static void test_thin_rows(void)
{
    static const int64_t shapes[][2] = {{64, 33}, {65, 48}, {130, 7}, {768, 50}, {3, 5}};
    TEST("a product's row does not depend on the rows beside it");
    for (size_t k = 0; k < sizeof shapes / sizeof *shapes; k++) {
        int64_t C = shapes[k][0], OC = shapes[k][1];
        float *x = malloc((size_t)(8 * C) * 4), *w = malloc((size_t)(OC * C) * 4), *b = malloc((size_t)OC * 4);
        float *all = malloc((size_t)(8 * OC) * 4), *alone = malloc((size_t)OC * 4);
        uint64_t seed = 9;
        for (int64_t i = 0; i < 8 * C; i++) x[i] = (float)random_bell(&seed);
        for (int64_t i = 0; i < OC * C; i++) w[i] = (float)random_bell(&seed);
        for (int64_t i = 0; i < OC; i++) b[i] = (float)random_bell(&seed);
        for (int64_t N = 1; N <= 8; N++) {
            device->linear_forward(all, x, w, b, N, C, OC, stream);
            for (int64_t n = 0; n < N; n++) {
                device->linear_forward(alone, x + n * C, w, b, 1, C, OC, stream);
                if (!CHECK(!memcmp(alone, all + n * OC, (size_t)OC * 4), "row %lld of %lld, %lld to %lld channels, differs",
                           (long long)n, (long long)N, (long long)C, (long long)OC)) break;
            }
        }
        free(x), free(w), free(b), free(all), free(alone);
    }
}

static void test_backend(void)
{
    static const Size sizes[] = {
        {1, 1, 1, 1, 0, 1},       {1, 2, 3, 8, 1, 3},       {2, 3, 20, 16, 7, 20},   {2, 2, 40, 40, 39, 50},
        {1, 2, 66, 64, 60, 66},   {3, 1, 5, 5, 2, 5},       {2, 1, 9, 72, 0, 16},    {1, 2, 12, 80, 5, 12},
        {1, 1, 70, 96, 67, 70},   {1, 2, 8, 104, 3, 8},     {1, 1, 7, 128, 4, 7},    {1, 1, 6, 256, 2, 6},
        {1, 2, 5, 300, 2, 5},     {1, 1, 4, 514, 1, 4},     {1, 1, 600, 32, 597, 600}, {2, 1, 140, 8, 138, 140},
        {1, 1, 300, 3, 298, 300},
    };
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) test_size(sizes[i], INPUT_NORMAL);
    for (int kind = INPUT_HIGH; kind <= INPUT_SPREAD; kind++) test_size((Size){1, 2, 90, 24, 85, 90}, (InputKind)kind);
    test_nan();
    test_fill_many();
    test_model();
    test_plan();
}

int main(void)
{
    static const struct { AttentionDevice device; Dtype dtype; } backends[] = {
        {ATTENTION_CPU, DTYPE_FP32}, {ATTENTION_CUDA, DTYPE_FP32}, {ATTENTION_CUDA, DTYPE_BF16},
    };
    for (size_t i = 0; i < sizeof backends / sizeof *backends; i++) {
        char error[512] = "this build is for the CPU only";
        BackendOptions options = {.deterministic = 1};
        device = backend_find(backends[i].device, backends[i].dtype);
        stream = device ? device->open(0, &options, error, sizeof error) : NULL;
        if (!stream) {
            TEST("writing on with cuda_%s", backends[i].dtype == DTYPE_BF16 ? "bf16" : "fp32");
            SKIP("no GPU kernel ran: %s", error);
            continue;
        }
        test_backend();
        if (backends[i].device == ATTENTION_CPU) test_thin_rows();
        TEST("%s: worst error", device->name);
        printf("worst %s of what is allowed: %.2f\n", device->name, judge_worst[device->dtype][QUANTITY_O]);
        memset(judge_worst, 0, sizeof judge_worst);
        device->close(stream);
    }
    return test_end();
}
