/* test_attention.c - every attention kernel of the table, and every standalone one that is built, against the float64 truth;
 * the checker against kernels that are wrong on purpose; the choice of a kernel by name, "auto" and path.
 *
 * Kernels for a GPU take part where one is visible to a binary built for it. With FLASHGPT_SANITIZE set only they run, on a
 * few small shapes: for compute-sanitizer, under which all is slow.
 */
#include "tests/attention_check.h"
#include "tests/attention_faults.h"
#include "tests/attention_gpu.h"
#include "tests/test.h"

#include <glob.h>
#include <sys/stat.h>
#include <unistd.h>

#ifdef _OPENMP
#include <omp.h>
#else
static void omp_set_num_threads(int n) { (void)n; }
static int omp_get_max_threads(void) { return 1; }
#endif

static int allows_tf32; /* what shapes say, while kernels are tested that need it */

static AttentionShape shape_of(int64_t B, int64_t NH, int64_t T, int64_t HS, Dtype dtype)
{
    return (AttentionShape){.B = B, .T = T, .NH = NH, .HS = HS, .scale = attention_scale(HS), .dtype = dtype,
                            .deterministic = 1, .tf32 = allows_tf32};
}

static const char *const dtype_names[DTYPE_COUNT] = {"fp32", "bf16"};

/* --- the checker --------------------------------------------------------------------------------------------------- */

/* Which of the checks rejects a fault: shapes and inputs that real kernels go through too. */
static int rejects(const AttentionKernel *kernel, Dtype dtype, Judgement *judgement)
{
    static const struct { int64_t T, HS; InputKind kind; int64_t nan_row; } cases[] = {
        {45, 8, INPUT_NORMAL, -1}, {45, 8, INPUT_HIGH, -1}, {45, 8, INPUT_LOW, -1}, {45, 8, INPUT_NORMAL, 20},
    };
    for (size_t k = 0; k < sizeof cases / sizeof cases[0]; k++) {
        Problem problem = problem_create(shape_of(1, 2, cases[k].T, cases[k].HS, dtype), cases[k].kind, 7 + k);
        if (cases[k].nan_row >= 0) {
            for (int part = INPUT_K; part <= INPUT_V; part++)
                problem.input[part][cases[k].nan_row * cases[k].HS + 1] = NAN;
            problem_solve(&problem);
        }
        Result first = result_create(&problem.shape), second = result_create(&problem.shape);
        int status = run_kernel(kernel, &problem, LAYOUT_GAPS, 0, &cpu_machine, &first, judgement);
        if (!status) status = judge_result(&problem, &first, judgement);
        if (!status) status = run_kernel(kernel, &problem, LAYOUT_GAPS, 0, &cpu_machine, &second, judgement);
        if (!status) status = compare_results(&problem.shape, &first, &second, judgement);
        result_free(&first);
        result_free(&second);
        problem_free(&problem);
        if (status) return 1;
    }
    return 0;
}

static void test_faults(int precision)
{
    static const char *const names[PRECISION_COUNT] = {"fp32", "bf16", "TF32"};
    Dtype dtype = precision == PRECISION_TF32 ? DTYPE_FP32 : (Dtype)precision;
    allows_tf32 = precision == PRECISION_TF32;
    for (int fault = 0; fault < FAULT_COUNT; fault++) {
        Judgement judgement = {""};
        char size[32] = "";
        if (fault_sizes[precision][fault] > 0) snprintf(size, sizeof size, ", by %g", fault_sizes[precision][fault]);
        TEST("the checker %s: %s, %s%s", fault == FAULT_NONE ? "passes" : "rejects", names[precision], fault_names[fault],
             size);
        int rejected = rejects(&fault_kernels[fault], dtype, &judgement);
        CHECK(rejected == (fault != FAULT_NONE), "rejected: %d (%s)", rejected, judgement.text);
        if (getenv("VERBOSE") && rejected) printf("   as it should: %s\n", judgement.text);
    }
    allows_tf32 = 0;
    memset(judge_worst, 0, sizeof judge_worst);
}

/* What is rounded to the type beside O and the gradients. */
typedef enum Rounding {
    ROUNDING_NONE,   /* nothing: P and dS stay in fp32 */
    ROUNDING_BEFORE, /* for O the exponentials, before they are normalised; for dV P; dS */
    ROUNDING_AFTER,  /* P, and all else comes from that, also D = rowsum(P * dP); dS */
    ROUNDING_COUNT
} Rounding;

static const char *const rounding_names[ROUNDING_COUNT] = {"results", "exponentials, P and dS", "P and dS"};

/* Query row i of one head, in fp32, sums in another order than the plain computation's; `row` (2, T) is room to work. */
static void rounded_row(const Problem *problem, Result *result, int64_t head, int64_t i, Rounding rounding, float *row)
{
    int64_t T = problem->shape.T, HS = problem->shape.HS, base = head * T * HS;
    int after = rounding == ROUNDING_AFTER;
    Dtype dtype = problem->shape.dtype, inner = rounding == ROUNDING_NONE ? DTYPE_FP32 : dtype;
    float scale = problem->shape.scale, *p = row, *dp = row + T, max = -INFINITY, sum = 0, D = 0;
    const float *q = problem->input[INPUT_Q] + base + i * HS, *dout = problem->input[INPUT_DO] + base + i * HS;
    const float *K = problem->input[INPUT_K] + base, *V = problem->input[INPUT_V] + base;
    float *o = result->value[QUANTITY_O] + base + i * HS;
    for (int64_t j = i; j >= 0; j--) {
        p[j] = scale * dot_in_float(q, K + j * HS, HS);
        dp[j] = dot_in_float(dout, V + j * HS, HS);
        if (p[j] > max) max = p[j];
    }
    for (int64_t j = i; j >= 0; j--) sum += p[j] = expf(p[j] - max);
    result->value[QUANTITY_LSE][head * T + i] = max + logf(sum);
    for (int64_t j = i; j >= 0; j--) {
        float weight = round_to(after ? p[j] / sum : p[j], inner);
        add_scaled_float(o, weight, V + j * HS, HS);
        p[j] = after ? weight : p[j] / sum;
        if (after) D += p[j] * dp[j];
    }
    for (int64_t d = HS - 1; d >= 0; d--) {
        o[d] = round_to(after ? o[d] : o[d] / sum, dtype);
        if (!after) D += dout[d] * o[d];
    }
    for (int64_t j = i; j >= 0; j--) {
        float ds = scale * round_to(p[j] * (dp[j] - D), inner);
        add_scaled_float(result->value[QUANTITY_DQ] + base + i * HS, ds, K + j * HS, HS);
        add_scaled_float(result->value[QUANTITY_DK] + base + j * HS, ds, q, HS);
        add_scaled_float(result->value[QUANTITY_DV] + base + j * HS, round_to(p[j], inner), dout, HS);
    }
}

static Result rounded_result(const Problem *problem, Rounding rounding)
{
    const AttentionShape *shape = &problem->shape;
    int64_t heads = shape->B * shape->NH, count = heads * shape->T * shape->HS;
    Result result = result_create(shape);
    float *row = allocate_zeros(2 * shape->T, sizeof(float));
    for (int64_t head = 0; head < heads; head++)
        for (int64_t i = 0; i < shape->T; i++) rounded_row(problem, &result, head, i, rounding, row);
    for (int quantity = QUANTITY_DQ; quantity <= QUANTITY_DV; quantity++)
        for (int64_t k = 0; k < count; k++) result.value[quantity][k] = round_to(result.value[quantity][k], shape->dtype);
    free(row);
    return result;
}

/* Among many short heads the plain computation is lucky in some: there, too, what rounds at its places or at fewer must
 * pass, and what is off by more must not. */
static void test_roundings(void)
{
    static const struct { int64_t heads, T, HS; } cases[] = {{32768, 2, 8}, {32768, 3, 8}, {1, 17, 31}};
    for (size_t k = 0; k < sizeof cases / sizeof cases[0]; k++) {
        int64_t heads = cases[k].heads, T = cases[k].T, HS = cases[k].HS;
        TEST("the checker passes what rounds where the plain computation rounds: %lld head%s of %lld", (long long)heads,
             heads > 1 ? "s" : "", (long long)T);
        Problem problem = problem_create(shape_of(1, heads, T, HS, DTYPE_BF16), INPUT_NORMAL, 53);
        for (int rounding = 0; rounding < ROUNDING_COUNT; rounding++) {
            Judgement judgement = {""};
            Result result = rounded_result(&problem, rounding);
            CHECK(judge_result(&problem, &result, &judgement) == 0, "%s rounded: %s", rounding_names[rounding],
                  judgement.text);
            for (int64_t at = (heads * T - 1) * HS; at < heads * T * HS; at++)
                result.value[QUANTITY_DQ][at] = round_to(1.1f * result.value[QUANTITY_DQ][at], DTYPE_BF16);
            CHECK(judge_result(&problem, &result, &judgement) != 0 && strncmp(judgement.text, "dQ", 2) == 0,
                  "%s rounded, dQ of the last row 10%% off: %s", rounding_names[rounding], judgement.text);
            result_free(&result);
        }
        problem_free(&problem);
    }
    memset(judge_worst, 0, sizeof judge_worst);
}

/* --- kernels ------------------------------------------------------------------------------------------------------- */

/* A kernel under test, and the largest errors that it has shown, as shares of what is allowed. */
typedef struct Subject {
    const AttentionKernel *kernel;
    const Machine *machine;
    int of_table; /* not an object that `make kernels` has built */
    double worst[DTYPE_COUNT][QUANTITY_COUNT];
    int checks[DTYPE_COUNT];
} Subject;

/* Ends what was recorded for a subject since judge_worst was cleared. */
static void record_worst(Subject *subject, Dtype dtype)
{
    for (int quantity = 0; quantity < QUANTITY_COUNT; quantity++)
        subject->worst[dtype][quantity] = larger(subject->worst[dtype][quantity], judge_worst[dtype][quantity]);
    subject->checks[dtype]++;
    memset(judge_worst, 0, sizeof judge_worst);
}

/* Whether the subject takes a shape; a skip with its reason where it does not. */
static int takes(const Subject *subject, const AttentionShape *shape)
{
    char words[ATTENTION_WORDS];
    const char *reason = subject->kernel->refuse(shape, subject->machine->sm);
    if (reason && !test_state.skipped_now) SKIP("%s refuses: %s", subject->kernel->name, attention_words(reason, words));
    return !reason;
}

static void check_one(Subject *subject, const Problem *problem, Layout layout, int unaligned, int deterministic,
                      const char *what)
{
    Problem variant = *problem;
    Judgement judgement = {""};
    variant.shape.deterministic = deterministic;
    int status = check_kernel(subject->kernel, &variant, layout, unaligned, subject->machine, &judgement);
    record_worst(subject, problem->shape.dtype);
    CHECK(status == 0, "%s B %lld NH %lld T %lld HS %lld%s, layout %s%s: %s", what, (long long)problem->shape.B,
          (long long)problem->shape.NH, (long long)problem->shape.T, (long long)problem->shape.HS,
          deterministic ? "" : ", not deterministic", layout_names[layout], unaligned_words(unaligned), judgement.text);
}

/* Runs one problem over layouts and alignments; where that is much work, a slow kernel gets one of them. On a GPU half of
 * the calls leave out the promise of determinism, under which a kernel may take another way. */
static void check_layouts(Subject *subject, const Problem *problem, const char *what)
{
    int on_gpu = subject->machine->device == ATTENTION_CUDA;
    int64_t work = problem->shape.T * problem->shape.T * problem->shape.HS;
    int slow = !on_gpu && strcmp(subject->kernel->name, "tiled") != 0;
    int only = slow && work > 8 << 20 ? (int)(problem->shape.T % LAYOUT_FAR) : -1;
    if (!takes(subject, &problem->shape)) return;
    for (int layout = 0; layout < LAYOUT_FAR; layout++) {
        if (only >= 0 && layout != only) continue;
        check_one(subject, problem, layout, layout % 2 ? UNALIGNED : ALIGNED, !on_gpu || layout < LAYOUT_PACKED, what);
    }
}

/* Every T of the list and every HS of the list at least once; all of both where they are small. */
static void test_shapes(Subject *subjects, size_t count, Dtype dtype)
{
    static const int64_t lengths[] = {1,   2,   3,   15,  16,  17,   63,   64,   65,   100,  127,
                                      128, 129, 250, 300, 704, 1000, 1022, 1023, 1024, 1025, 4224};
    static const int64_t dims[] = {8, 16, 32, 40, 64, 72, 80, 96, 104, 128, 256, 1, 3, 31};
    enum { LENGTHS = sizeof lengths / sizeof lengths[0], DIMS = sizeof dims / sizeof dims[0] };
    for (int t = 0; t < LENGTHS; t++) {
        int64_t T = lengths[t];
        for (int k = 0; k < DIMS; k++) {
            /* Up to 17, all; up to 300, three dims; beyond, one each, and for the longest the smallest. */
            if (T > 17 && T <= 300 && k % 5 != t % 5) continue;
            if (T > 300 && T < 4224 && k != (t * 3 + 2) % DIMS) continue;
            if (T == 4224 && dims[k] != 8) continue;
            Problem problem = problem_create(shape_of(T < 100 ? 2 : 1, T < 300 ? 3 : 1, T, dims[k], dtype), INPUT_NORMAL,
                                             (uint64_t)(T * 1000 + dims[k]));
            for (size_t n = 0; n < count; n++) {
                TEST("%s: %s, T %lld, HS %lld", subjects[n].kernel->name, dtype_names[dtype], (long long)T,
                     (long long)dims[k]);
                check_layouts(&subjects[n], &problem, "normal");
            }
            problem_free(&problem);
        }
    }
}

static void test_logits(Subject *subject, Dtype dtype)
{
    static const char *const names[] = {"normal", "+1e5", "-1e5", "-1e5 to 1e5"};
    for (int kind = INPUT_HIGH; kind <= INPUT_SPREAD; kind++) {
        TEST("%s: %s, logits of %s", subject->kernel->name, dtype_names[dtype], names[kind]);
        for (int64_t T = 1; T <= 201; T += 100) {
            Problem problem = problem_create(shape_of(1, 2, T, 64, dtype), kind, 11);
            check_layouts(subject, &problem, names[kind]);
            problem_free(&problem);
        }
    }
}

/* Logits beyond what a maximum can be subtracted from without care: 1e11, all the same; up to 1e10, 1e14 and 1e20. */
static void test_huge(Subject *subject, Dtype dtype)
{
    static const float factors[] = {0, 0x1p16f, 0x1p23f, 0x1p33f};
    static const int64_t sizes[][2] = {{1, 64}, {300, 64}, {130, 32}, {200, 128}, {70, 256}};
    TEST("%s: %s, logits of 1e10 to 1e20", subject->kernel->name, dtype_names[dtype]);
    for (size_t k = 0; k < sizeof sizes / sizeof sizes[0]; k++)
        for (size_t f = 0; f < sizeof factors / sizeof factors[0]; f++) {
            /* Sums of more terms are off by more than the bound for LSE, but in bf16 where all are the same. */
            if (sizes[k][1] > 64 && (factors[f] != 0 || dtype == DTYPE_FP32)) continue;
            Problem problem = problem_create(shape_of(1, 1, sizes[k][0], sizes[k][1], dtype), INPUT_NORMAL, 37);
            problem_enlarge(&problem, factors[f]);
            check_layouts(subject, &problem, "huge logits");
            problem_free(&problem);
        }
}

/* A scale below 0 turns the order of the logits around, and nothing else. */
static void test_negative_scale(Subject *subject, Dtype dtype)
{
    TEST("%s: %s, a negative scale", subject->kernel->name, dtype_names[dtype]);
    AttentionShape shape = shape_of(1, 2, 130, 64, dtype);
    shape.scale = -shape.scale;
    Problem problem = problem_create(shape, INPUT_NORMAL, 19);
    check_layouts(subject, &problem, "negative scale");
    for (int quantity = 0; quantity < QUANTITY_COUNT; quantity++)
        for (int64_t row = 0; row < shape.NH * shape.T; row++)
            CHECK(problem.terms[quantity][row] >= 0 && problem.logits[quantity][row] >= 0,
                  "quantity %d, row %lld: errors of %g and %g are allowed", quantity, (long long)row,
                  problem.terms[quantity][row], problem.logits[quantity][row]);
    problem_free(&problem);
}

/* A value that is no number, in each input in turn: the truth says where it may arrive. */
static void test_not_finite(Subject *subject, Dtype dtype)
{
    static const struct { const char *name; float value; } values[] = {{"NaN", NAN}, {"+inf", INFINITY}};
    static const char *const parts[] = {"Q", "K", "V", "dO"};
    static const int64_t rows[] = {0, 5, 70, 129};
    for (size_t v = 0; v < 2; v++)
        for (int part = 0; part < INPUT_COUNT; part++) {
            TEST("%s: %s, %s in one row of %s reaches no row it may not", subject->kernel->name, dtype_names[dtype],
                 values[v].name, parts[part]);
            for (size_t r = 0; r < sizeof rows / sizeof rows[0]; r++) {
                Problem problem = problem_create(shape_of(1, 2, 130, 16, dtype), INPUT_NORMAL, 13);
                problem.input[part][(130 + rows[r]) * 16 + 3] = values[v].value;
                problem_solve(&problem);
                check_layouts(subject, &problem, values[v].name);
                problem_free(&problem);
            }
        }
}

/* Tensors that are aligned beside one that is not: what is true of one must not be taken to be true of another. */
static void test_alignments(Subject *subject, Dtype dtype)
{
    static const int64_t dims[] = {64, 96};
    for (size_t k = 0; k < sizeof dims / sizeof dims[0]; k++) {
        TEST("%s: %s, one tensor unaligned, HS %lld", subject->kernel->name, dtype_names[dtype], (long long)dims[k]);
        Problem problem = problem_create(shape_of(1, 1, 200, dims[k], dtype), INPUT_NORMAL, 73);
        for (int turn = 0; turn < 2 * TENSOR_COUNT && takes(subject, &problem.shape); turn++)
            check_one(subject, &problem, LAYOUT_HEADS, 1 << turn / 2, turn % 2, "normal");
        problem_free(&problem);
    }
}

/* Rows that begin at multiples of 16 bytes and do not end at one. */
static void test_padded(Subject *subject, Dtype dtype)
{
    static const int64_t dims[] = {3, 31, 66};
    TEST("%s: %s, padded rows", subject->kernel->name, dtype_names[dtype]);
    for (size_t k = 0; k < sizeof dims / sizeof dims[0]; k++) {
        Problem problem = problem_create(shape_of(1, 2, 70, dims[k], dtype), INPUT_NORMAL, 79);
        for (int deterministic = 0; deterministic < 2 && takes(subject, &problem.shape); deterministic++)
            check_one(subject, &problem, LAYOUT_PADDED, ALIGNED, deterministic, "normal");
        problem_free(&problem);
    }
}

static void test_many_heads(Subject *subject, Dtype dtype)
{
    int on_gpu = subject->machine->device == ATTENTION_CUDA;
    int64_t many = on_gpu ? 131072 : 65537;
    TEST("%s: %s, %lld heads", subject->kernel->name, dtype_names[dtype], (long long)many);
    for (int64_t T = on_gpu ? 2 : 1; T <= 3; T++) {
        AttentionShape shape = T == 2 ? shape_of(1, many, T, 8, dtype) : shape_of(many, 1, T, 8, dtype);
        if (!takes(subject, &shape)) return;
        Problem problem = problem_create(shape, INPUT_NORMAL, 17);
        Judgement judgement = {""};
        CHECK(check_kernel(subject->kernel, &problem, LAYOUT_PACKED, 0, subject->machine, &judgement) == 0, "T %lld: %s",
              (long long)T, judgement.text);
        record_worst(subject, dtype);
        problem_free(&problem);
    }
}

static void test_far(const AttentionKernel *kernel)
{
    TEST("%s: offsets beyond 2^31 elements", kernel->name);
    Problem problem = problem_create(shape_of(2, 2, 17, 16, DTYPE_FP32), INPUT_NORMAL, 19);
    Judgement judgement = {""};
    int status = check_kernel(kernel, &problem, LAYOUT_FAR, UNALIGNED, &cpu_machine, &judgement);
    if (status && strncmp(judgement.text, "not enough memory", 17) == 0)
        SKIP("this system gives no address space of 8 x 36 GB");
    else
        CHECK(status == 0, "%s", judgement.text);
    problem_free(&problem);
}

/* The same bits on every run, with any number of threads: also where tiled takes the other of its two ways through
 * backward, as it does for one head of several tiles when there is more than one thread. */
static void test_repeats(const Subject *subject, Dtype dtype)
{
    static const struct { int64_t B, NH, T, HS; int repeats; } cases[] = {{1, 3, 70, 16, 250}, {1, 1, 300, 24, 40}};
    int threads = omp_get_max_threads(), on_gpu = subject->machine->device == ATTENTION_CUDA;
    TEST("%s: %s, 250 runs give the same bits%s", subject->kernel->name, dtype_names[dtype],
         on_gpu ? "" : ", with 1 to 4 threads");
    for (size_t k = 0; k < sizeof cases / sizeof cases[0]; k++) {
        AttentionShape shape = shape_of(cases[k].B, cases[k].NH, cases[k].T, cases[k].HS, dtype);
        if (!takes(subject, &shape)) return;
        Problem problem = problem_open(shape, INPUT_NORMAL, 23);
        Result first = result_create(&problem.shape), again = result_create(&problem.shape);
        Judgement judgement = {""};
        int status = run_kernel(subject->kernel, &problem, LAYOUT_PACKED, 0, subject->machine, &first, &judgement);
        for (int run = 0; run < cases[k].repeats && !status; run++) {
            if (!on_gpu) omp_set_num_threads(1 + run % 4);
            status = run_kernel(subject->kernel, &problem, LAYOUT_PACKED, 0, subject->machine, &again, &judgement);
            if (!status) status = compare_results(&problem.shape, &first, &again, &judgement);
        }
        omp_set_num_threads(threads);
        CHECK(status == 0, "%s", judgement.text);
        result_free(&first);
        result_free(&again);
        problem_free(&problem);
    }
}

/* B, T or NH of 0: nothing is read, nothing is written, and nothing needs to be there. */
static void test_empty(const Subject *subject)
{
    const AttentionKernel *kernel = subject->kernel;
    TEST("%s: empty shapes", kernel->name);
    for (int k = 0; k < 3; k++) {
        AttentionShape taken = shape_of(1, 1, 1, 16, DTYPE_FP32);
        if (kernel->refuse(&taken, subject->machine->sm)) taken.dtype = DTYPE_BF16;
        AttentionShape shape = shape_of(k != 0, k != 1, k != 2, 16, taken.dtype);
        AttentionInput in = {NULL, 0, 0, 0};
        AttentionOutput out = {NULL, 0, 0, 0};
        void *scratch = subject->machine->alloc(kernel->scratch_bytes(&shape) + 1), *stream = subject->machine->stream;
        const char *reason = kernel->refuse(&shape, subject->machine->sm);
        CHECK(!reason, "refuses: %s", reason);
        const char *forward = kernel->forward(out, NULL, NULL, scratch, in, in, in, &shape, stream);
        const char *backward = kernel->backward(out, out, out, scratch, in, in, in, in, in, NULL, NULL, &shape, stream);
        CHECK(!forward && !backward, "forward: %s, backward: %s", forward, backward);
        subject->machine->free(scratch);
    }
}

static void test_refusals(const Subject *subject)
{
    const AttentionKernel *kernel = subject->kernel;
    int sm = subject->machine->sm;
    TEST("%s: refuses what it cannot do", kernel->name);
    AttentionShape shape = shape_of(1, 1, 4, 8, DTYPE_BF16);
    const char *reason = kernel->refuse(&shape, sm);
    if (subject->machine->device == ATTENTION_CPU)
        CHECK(reason && strstr(reason, "fp32"), "bf16: %s", reason ? reason : "not refused");
    else
        CHECK(kernel->refuse(&shape, 50), "sm_50 is not refused");
    shape.dtype = DTYPE_FP32;
    shape.HS = 0;
    CHECK(kernel->refuse(&shape, sm), "HS 0 is not refused");
}

/* --- the choice ---------------------------------------------------------------------------------------------------- */

static void check_choice(const char *choice, AttentionDevice device, const AttentionShape *shape, const char *name,
                         const char *words)
{
    char error[1024] = "";
    const AttentionKernel *kernel = attention_choose(choice, device, shape, 0, error, sizeof error);
    if (name)
        CHECK(kernel && strcmp(kernel->name, name) == 0, "'%s' gives %s (%s), not %s", choice,
              kernel ? kernel->name : "nothing", error, name);
    else
        CHECK(!kernel && strstr(error, words), "'%s' gives %s, '%s' instead of words on '%s'", choice,
              kernel ? kernel->name : "nothing", error, words);
}

static void test_choice(void)
{
    AttentionShape shape = shape_of(1, 1, 16, 8, DTYPE_FP32), bf16 = shape_of(1, 1, 16, 8, DTYPE_BF16);
    TEST("choice by name");
    check_choice("auto", ATTENTION_CPU, &shape, "tiled", NULL);
    check_choice("tiled", ATTENTION_CPU, &shape, "tiled", NULL);
    check_choice("reference", ATTENTION_CPU, &shape, "reference", NULL);
    check_choice("flash9", ATTENTION_CPU, &shape, NULL, "tiled, reference");
    check_choice("", ATTENTION_CPU, &shape, NULL, "unknown attention kernel ''");
    check_choice("tiled", ATTENTION_CUDA, &shape, NULL, "runs on cpu, this run is on cuda");
    check_choice("tiled", ATTENTION_CPU, &bf16, NULL, "fp32 only");
    check_choice("auto", ATTENTION_CPU, &bf16, NULL, "tiled computes in fp32 only");
    char error[8] = "";
    CHECK(!attention_choose("flash9", ATTENTION_CPU, &shape, 0, error, sizeof error) && strlen(error) == 7,
          "a short error buffer holds '%s'", error);
}

static void test_words(void)
{
    char text[ATTENTION_WORDS], endless[400], cut[ATTENTION_WORDS];
    static const struct { const char *words, *text; } cases[] = {
        {"needs sm_80", "needs sm_80"}, {"", "it gives no reason"}, {"two\nlines\r\n", "two?lines??"},
        {"clears\33[2J\177", "clears?[2J?"}, {"\302\233two", "?two"}, {"sch\303\266n", "sch\303\266n"}, {"\302", "\302"},
    };
    TEST("what a kernel says becomes one line");
    for (size_t k = 0; k < sizeof cases / sizeof cases[0]; k++)
        CHECK(!strcmp(attention_words(cases[k].words, text), cases[k].text), "case %zu gives '%s'", k, text);
    memset(endless, 'a', sizeof endless);
    endless[255] = 0;
    CHECK(!strcmp(attention_words(endless, text), endless), "255 bytes give '%s'", text);
    endless[255] = 'a';
    for (int width = 0; width < 4; width++) { /* U+20AC, three bytes, begins ever closer before the cut at byte 252 */
        memcpy(endless + 252 - width, "\342\202\254", 3);
        endless[399] = 0;
        snprintf(cut, sizeof cut, "%.*s...", width == 3 ? 252 : 252 - width, endless);
        CHECK(!strcmp(attention_words(endless, text), cut), "width %d gives '%s'", width, text);
        memset(endless + 252 - width, 'a', 3);
    }
    memset(endless, 0x80, 399);
    CHECK(!strcmp(attention_words(endless, text), "..."), "bytes amid a character give '%s'", text);
}

/* Compiles `body` as a shared object; 0, or -1 where no compiler is at hand. */
static int build_object(const char *path, const char *body)
{
    char source[256], command[1024];
    const char *compiler = getenv("CC");
    snprintf(source, sizeof source, "%s.c", path);
    FILE *file = fopen(source, "w");
    if (!file) return -1;
    fprintf(file, "%s", body);
    fclose(file);
    snprintf(command, sizeof command, "%s -I. -fPIC -shared %s -o %s 2>&1", compiler && *compiler ? compiler : "cc", source,
             path);
    int status = system(command);
    unlink(source);
    return status ? -1 : 0;
}

#define LONGEST "a_name_as_long_as_a_kernels_may_be_63_letters_digits_or_under__" /* 63 bytes */

static void test_objects(void)
{
    static const char pieces[] =
        "#include \"attention/attention.h\"\n"
        "static const char *refuse(const AttentionShape *s, int sm) { return (void)sm, s->HS == 99 ? \"hates\\n99\" : 0; }\n"
        "static size_t bytes(const AttentionShape *s) { return s->HS == 98 ? (size_t)-1 : 0; }\n"
        "static const char *forward(AttentionOutput O, float *L, void *s, void *w, AttentionInput Q, AttentionInput K,\n"
        "    AttentionInput V, const AttentionShape *p, void *t)\n"
        "{ return (void)O, (void)L, (void)s, (void)w, (void)Q, (void)K, (void)V, (void)p, (void)t, \"no\"; }\n"
        "static const char *backward(AttentionOutput q, AttentionOutput k, AttentionOutput v, void *w, AttentionInput o,\n"
        "    AttentionInput Q, AttentionInput K, AttentionInput V, AttentionInput O, const float *L, const void *s,\n"
        "    const AttentionShape *p, void *t)\n"
        "{ return (void)q, (void)k, (void)v, (void)w, (void)o, (void)Q, (void)K, (void)V, (void)O, (void)L, (void)s,\n"
        "         (void)p, (void)t, \"no\"; }\n"
        "const AttentionKernel %s = {%d, %s, %s, %s, refuse, bytes, bytes, forward, %s};\n";
    /* Fields as C has them; 0 or NULL: as the good one's. words: of the sentence that refuses it, NULL where none does. */
    static const struct { const char *what, *words, *symbol, *device, *name, *summary, *backward; int abi; } cases[] = {
        {.what = "a good one"},
        {"another ABI", "ABI 77, this program has", .abi = 77},
        {"no symbol", "no symbol 'attention_kernel'", .symbol = "something_else"},
        {"another device", "this run is on cpu", .device = "ATTENTION_CUDA"},
        {"a device that is none", "its device is 7, expected 0 (CPU) or 1 (CUDA)", .device = "(AttentionDevice)7"},
        {"no backward", "its field 'backward' is empty", .backward = "0"},
        {"no name", "its field 'name' is empty", .name = "0"},
        {"a name that clears the screen", "its name has the byte 0x1b at position 3, expected", .name = "\"out\\33[2J\""},
        {"a name that breaks a table", "its name has the byte 0x2c at position 1, expected", .name = "\"a,b\""},
        {"a name beyond ASCII", "its name has the byte 0xc3 at position 3, expected", .name = "\"sch\\303\\266n\""},
        {"the longest name", .name = "\"" LONGEST "\""},
        {"a longer name", "its name is longer than 63 bytes", .name = "\"" LONGEST "_\""},
        {"a summary of two lines", "its summary has the byte 0x0a at position 3, expected", .summary = "\"one\\ntwo\""},
        {"a summary that UTF-8's controls are in", "its summary has the byte 0xc2 at position 0, expected",
         .summary = "\"\\302\\233two\""},
        {"a summary beyond ASCII", .summary = "\"sch\\303\\266n\""},
        {"an endless summary", "its summary is longer than 255 bytes",
         .summary = "\"" LONGEST "_" LONGEST "_" LONGEST "_" LONGEST "_\""},
    };
    AttentionShape shape = shape_of(1, 1, 16, 8, DTYPE_FP32), hated = shape_of(1, 1, 16, 99, DTYPE_FP32);
    AttentionShape endless = shape_of(1, 1, 16, 98, DTYPE_FP32);
    char folder[] = "/tmp/attention_test_XXXXXX", path[128], body[4096];
    if (!mkdtemp(folder)) {
        TEST("kernels from shared objects");
        SKIP("cannot make a folder in /tmp");
        return;
    }
    for (size_t k = 0; k < sizeof cases / sizeof cases[0]; k++) {
        TEST("a shared object with %s", cases[k].what);
        snprintf(path, sizeof path, "%s/case%zu.so", folder, k);
        const char *name = cases[k].name, *summary = cases[k].summary;
        snprintf(body, sizeof body, pieces, cases[k].symbol ? cases[k].symbol : "attention_kernel",
                 cases[k].abi ? cases[k].abi : ATTENTION_ABI, cases[k].device ? cases[k].device : "ATTENTION_CPU",
                 name ? name : "\"outside\"", summary ? summary : "\"outside\"",
                 cases[k].backward ? cases[k].backward : "backward");
        if (build_object(path, body)) {
            SKIP("no C compiler that builds a shared object (set CC)");
            continue;
        }
        check_choice(path, ATTENTION_CPU, &shape, cases[k].words ? NULL : name ? LONGEST : "outside", cases[k].words);
        if (k == 0) {
            check_choice(path, ATTENTION_CPU, &hated, NULL, "'outside' cannot run here: hates?99");
            check_choice(path, ATTENTION_CPU, &endless, NULL, "'outside' cannot run here: it asks for "
                         "18446744073709551615 bytes of saved");
        }
        unlink(path);
    }
    TEST("a shared object that was cut short, in its program headers and in what they speak of");
    snprintf(path, sizeof path, "%s/cut.so", folder);
    snprintf(body, sizeof body, pieces, "attention_kernel", ATTENTION_ABI, "ATTENTION_CPU", "\"cut\"", "\"cut\"", "backward");
    if (build_object(path, body)) SKIP("no C compiler that builds a shared object (set CC)");
    else
        for (off_t cut = 4096; cut >= 64; cut /= 4)
            if (truncate(path, cut) == 0) check_choice(path, ATTENTION_CPU, &shape, NULL, "it is cut short: it has ");
    unlink(path);
    TEST("files that are no shared object");
    snprintf(path, sizeof path, "%s/absent.so", folder);
    check_choice(path, ATTENTION_CPU, &shape, NULL, "No such file");
    check_choice("no_such_kernel.so", ATTENTION_CPU, &shape, NULL, "No such file");
    snprintf(path, sizeof path, "%s/text.so", folder);
    FILE *file = fopen(path, "w");
    if (file) fprintf(file, "not an object\n"), fclose(file);
    check_choice(path, ATTENTION_CPU, &shape, NULL, "cannot load attention kernel");
    unlink(path);
    snprintf(path, sizeof path, "%s/fifo.so", folder);
    if (mkfifo(path, 0600) == 0) check_choice(path, ATTENTION_CPU, &shape, NULL, "not a regular file");
    unlink(path);
    check_choice("/tmp/", ATTENTION_CPU, &shape, NULL, "not a regular file");
    rmdir(folder);
}

/* --- on a GPU only ------------------------------------------------------------------------------------------------- */

/* Long sequences, in sampled rows. */
static void test_long(Subject *subjects, size_t count, Dtype dtype)
{
    static const struct { int64_t NH, T, HS; } cases[] = {{2, 4224, 64}, {2, 4224, 128}, {1, 32768, 64}};
    for (size_t k = 0; k < sizeof cases / sizeof cases[0]; k++) {
        int64_t rows[SAMPLED_ROWS];
        Problem problem = problem_open(shape_of(1, cases[k].NH, cases[k].T, cases[k].HS, dtype), INPUT_NORMAL, 31);
        problem_solve_sampled(&problem, rows);
        for (size_t n = 0; n < count; n++) {
            Judgement judgement = {""};
            TEST("%s: %s, T %lld, HS %lld, in sampled rows", subjects[n].kernel->name, dtype_names[dtype],
                 (long long)cases[k].T, (long long)cases[k].HS);
            if (!takes(&subjects[n], &problem.shape)) continue;
            double gigabytes = (double)subjects[n].kernel->scratch_bytes(&problem.shape) / 1e9;
            if (gigabytes > 1) {
                SKIP("its scratch of %.1f GB would be fenced and compared on the host", gigabytes);
                continue;
            }
            int status = check_sampled(subjects[n].kernel, &problem, rows, subjects[n].machine, &judgement);
            record_worst(&subjects[n], dtype);
            CHECK(status == 0, "%s", judgement.text);
        }
        problem_free(&problem);
    }
}

/* The tensors of a call too large for the host: packed QKV and its gradient, O and dO in rows. */
typedef struct LargeCall {
    AttentionShape shape;
    size_t element, sequence; /* bytes of an element; elements of one sequence of (T, 3, NH, HS) */
    unsigned char *qkv, *dqkv, *O, *dO, *LSE, *saved, *scratch;
} LargeCall;

static void large_free(LargeCall *call)
{
    unsigned char *all[] = {call->qkv, call->dqkv, call->O, call->dO, call->LSE, call->saved, call->scratch};
    for (size_t k = 0; k < sizeof all / sizeof all[0]; k++)
        if (all[k]) gpu.backend->free(all[k], gpu.stream);
}

/* Room for all of it, or -1. */
static int large_alloc(LargeCall *call, const AttentionKernel *kernel)
{
    size_t B = (size_t)call->shape.B, part = call->sequence * B * call->element;
    struct { unsigned char **memory; size_t bytes; } all[] = {
        {&call->qkv, part}, {&call->dqkv, part}, {&call->O, part / 3}, {&call->dO, part / 3},
        {&call->LSE, B * (size_t)(call->shape.NH * call->shape.T) * sizeof(float)},
        {&call->saved, kernel->saved_bytes(&call->shape)}, {&call->scratch, kernel->scratch_bytes(&call->shape)},
    };
    for (size_t k = 0; k < sizeof all / sizeof all[0]; k++)
        if (!(*all[k].memory = gpu.backend->alloc(all[k].bytes + 256, gpu.stream))) return -1;
    return 0;
}

/* `values` (1, NH, T, HS) from or to one sequence on the GPU, whose rows are `stride` elements apart, the first at
 * `offset`. */
static void sequence_copy(const LargeCall *call, unsigned char *sequence, int64_t stride, int64_t offset, float *values,
                          int from_gpu)
{
    int64_t T = call->shape.T, NH = call->shape.NH, HS = call->shape.HS;
    size_t bytes = (size_t)(T * stride) * call->element;
    unsigned char *host = allocate_zeros((int64_t)bytes, 1);
    gpu_copy_out(host, sequence, bytes);
    for (int64_t n = 0; n < NH * T * HS; n++) {
        int64_t element = n / HS % T * stride + offset + n / HS / T * HS + n % HS;
        unsigned char *at = host + (size_t)element * call->element;
        uint32_t bits = 0;
        if (from_gpu) {
            memcpy(&bits, at, call->element);
            if (call->element == 2) bits <<= 16;
            memcpy(&values[n], &bits, 4);
        } else {
            memcpy(&bits, &values[n], 4);
            if (call->element == 2) bits >>= 16;
            memcpy(at, &bits, call->element);
        }
    }
    if (!from_gpu) gpu_copy_in(sequence, host, bytes);
    free(host);
}

static void sequence_write(const LargeCall *call, int64_t b, const Problem *problem)
{
    int64_t C = call->shape.NH * call->shape.HS;
    size_t at = (size_t)b * call->sequence * call->element;
    for (int part = INPUT_Q; part <= INPUT_V; part++)
        sequence_copy(call, call->qkv + at, 3 * C, part * C, problem->input[part], 0);
    sequence_copy(call, call->dO + at / 3, C, 0, problem->input[INPUT_DO], 0);
}

static void sequence_read(const LargeCall *call, int64_t b, Result *result)
{
    static const int gradients[3] = {QUANTITY_DQ, QUANTITY_DK, QUANTITY_DV};
    int64_t C = call->shape.NH * call->shape.HS;
    size_t at = (size_t)b * call->sequence * call->element, rows = (size_t)(call->shape.NH * call->shape.T) * sizeof(float);
    for (int part = 0; part < 3; part++)
        sequence_copy(call, call->dqkv + at, 3 * C, part * C, result->value[gradients[part]], 1);
    sequence_copy(call, call->O + at / 3, C, 0, result->value[QUANTITY_O], 1);
    gpu_copy_out(result->value[QUANTITY_LSE], call->LSE + (size_t)b * rows, rows);
}

/* Repeats the first `block` bytes up to `bytes`. */
static void repeat_block(unsigned char *memory, size_t block, size_t bytes)
{
    for (size_t filled = block; filled < bytes; filled *= 2)
        gpu.backend->copy(memory + filled, memory, filled < bytes - filled ? filled : bytes - filled, gpu.stream);
}

static const char *large_run(const LargeCall *call, const AttentionKernel *kernel)
{
    const AttentionShape *shape = &call->shape;
    size_t element = call->element;
    void *stream = gpu.backend->attention_stream(gpu.stream);
    AttentionInput Q = attention_packed_input(call->qkv, 0, shape, element);
    AttentionInput K = attention_packed_input(call->qkv, 1, shape, element);
    AttentionInput V = attention_packed_input(call->qkv, 2, shape, element);
    const char *fault = kernel->forward(attention_rows_output(call->O, shape), (float *)(void *)call->LSE, call->saved,
                                        call->scratch, Q, K, V, shape, stream);
    if (fault) return fault;
    return kernel->backward(attention_packed_output(call->dqkv, 0, shape, element),
                            attention_packed_output(call->dqkv, 1, shape, element),
                            attention_packed_output(call->dqkv, 2, shape, element), call->scratch,
                            attention_rows_input(call->dO, shape), Q, K, V, attention_rows_input(call->O, shape),
                            (const float *)(void *)call->LSE, call->saved, shape, stream);
}

/* Packed tensors of more than 2^31 elements. All sequences are one problem's but the last, which is another's: an offset
 * that wraps reads or writes the wrong one. */
static void test_large(Subject *subject, Dtype dtype)
{
    LargeCall call = {.shape = shape_of(1, 16, 65, 64, dtype), .element = dtype == DTYPE_BF16 ? 2 : 4,
                      .sequence = 65 * 3 * 1024};
    TEST("%s: %s, packed tensors of more than 2^31 elements", subject->kernel->name, dtype_names[dtype]);
    if (!takes(subject, &call.shape)) return;
    Problem problems[2] = {problem_create(call.shape, INPUT_NORMAL, 37), problem_create(call.shape, INPUT_NORMAL, 41)};
    call.shape.B = ((int64_t)1 << 31) / (int64_t)call.sequence + 2;
    if (!takes(subject, &call.shape)) return;
    if (large_alloc(&call, subject->kernel)) {
        SKIP("this GPU has no room for %.1f GB", (double)call.shape.B * (double)(call.sequence * call.element) * 8 / 3e9);
    } else {
        size_t block = call.sequence * call.element, all = block * (size_t)call.shape.B;
        int64_t looked_at[] = {0, call.shape.B / 2, call.shape.B - 1};
        Result result = result_create(&problems[0].shape);
        sequence_write(&call, 0, &problems[0]);
        repeat_block(call.qkv, block, all);
        repeat_block(call.dO, block / 3, all / 3);
        sequence_write(&call, call.shape.B - 1, &problems[1]);
        gpu.backend->zero(call.dqkv, all, gpu.stream); /* memory may hold another kernel's right results */
        gpu.backend->zero(call.O, all / 3, gpu.stream);
        const char *fault = large_run(&call, subject->kernel);
        CHECK(!fault, "%s", fault);
        for (int k = 0; k < 3 && !fault; k++) {
            Judgement judgement = {""};
            sequence_read(&call, looked_at[k], &result);
            int status = judge_result(&problems[k == 2], &result, &judgement);
            CHECK(status == 0, "sequence %lld: %s", (long long)looked_at[k], judgement.text);
        }
        record_worst(subject, dtype);
        result_free(&result);
    }
    large_free(&call);
    problem_free(&problems[0]);
    problem_free(&problems[1]);
}

/* The rows of test_far_rows from or to `dense`, in which they are next to each other: `width` bytes each. */
static void far_move(const LargeCall *call, unsigned char *far, int64_t stride, unsigned char *dense, size_t width,
                     int to_far)
{
    for (int64_t t = 0; t < call->shape.T; t++) {
        unsigned char *row = far + (size_t)(t * stride) * call->element, *other = dense + (size_t)t * width;
        gpu.backend->copy(to_far ? row : other, to_far ? other : row, width, gpu.stream);
    }
}

/* One tensor of test_far_rows: `values` (1, NH, T, HS) from or to its place in `dense`, (T, TENSOR_COUNT, NH, HS). */
static void far_copy(const LargeCall *call, unsigned char *dense, int tensor, float *values, int from_gpu)
{
    int64_t C = call->shape.NH * call->shape.HS;
    sequence_copy(call, dense, TENSOR_COUNT * C, tensor * C, values, from_gpu);
}

static AttentionInput far_input(unsigned char *far, int tensor, const LargeCall *call, int64_t stride)
{
    const AttentionShape *shape = &call->shape;
    return (AttentionInput){far + (size_t)(tensor * shape->NH * shape->HS) * call->element, shape->T * stride, stride,
                            shape->HS};
}

static AttentionOutput far_output(unsigned char *far, int tensor, const LargeCall *call, int64_t stride)
{
    const AttentionShape *shape = &call->shape;
    return (AttentionOutput){far + (size_t)(tensor * shape->NH * shape->HS) * call->element, shape->T * stride, stride,
                             shape->HS};
}

static const char *far_run(const LargeCall *call, const AttentionKernel *kernel, unsigned char *far, int64_t stride)
{
    void *stream = gpu.backend->attention_stream(gpu.stream);
    AttentionInput Q = far_input(far, TENSOR_Q, call, stride), K = far_input(far, TENSOR_K, call, stride);
    AttentionInput V = far_input(far, TENSOR_V, call, stride);
    const char *fault = kernel->forward(far_output(far, TENSOR_O, call, stride), (float *)(void *)call->LSE, call->saved,
                                        call->scratch, Q, K, V, &call->shape, stream);
    if (fault) return fault;
    return kernel->backward(far_output(far, TENSOR_DQ, call, stride), far_output(far, TENSOR_DK, call, stride),
                            far_output(far, TENSOR_DV, call, stride), call->scratch,
                            far_input(far, TENSOR_DO, call, stride), Q, K, V, far_input(far, TENSOR_O, call, stride),
                            (const float *)(void *)call->LSE, call->saved, &call->shape, stream);
}

/* Rows that begin more than 2^31 elements after the first, in the end: all tensors share one buffer, in which the rows of a
 * token, (TENSOR_COUNT, NH, HS), are next to each other and far from the next token's. */
static void test_far_rows(Subject *subject, Dtype dtype)
{
    static const int quantities[TENSOR_COUNT] = {[TENSOR_O] = QUANTITY_O, [TENSOR_DQ] = QUANTITY_DQ,
                                                 [TENSOR_DK] = QUANTITY_DK, [TENSOR_DV] = QUANTITY_DV};
    LargeCall call = {.shape = shape_of(1, 2, 140, 64, dtype), .element = dtype == DTYPE_BF16 ? 2 : 4};
    int64_t T = call.shape.T, C = call.shape.NH * call.shape.HS, stride = ((int64_t)1 << 24) + 64;
    size_t width = (size_t)(TENSOR_COUNT * C) * call.element, far_bytes = (size_t)((T - 1) * stride) * call.element + width;
    size_t scratch = 0;
    TEST("%s: %s, rows more than 2^31 elements apart", subject->kernel->name, dtype_names[dtype]);
    if (strcmp(subject->kernel->name, "cublas") == 0) {
        SKIP("the offsets of its rows are cuBLAS's own");
        return;
    }
    if (!takes(subject, &call.shape)) return;
    call.qkv = gpu.backend->alloc(far_bytes, gpu.stream);
    call.dqkv = gpu.backend->alloc((size_t)T * width, gpu.stream); /* the same rows without what is between */
    call.LSE = gpu.backend->alloc((size_t)(call.shape.NH * T) * sizeof(float), gpu.stream);
    call.saved = gpu.backend->alloc(subject->kernel->saved_bytes(&call.shape) + 256, gpu.stream);
    for (int deterministic = 0; deterministic < 2; deterministic++) { /* on which the size depends */
        call.shape.deterministic = deterministic;
        size_t needed = subject->kernel->scratch_bytes(&call.shape);
        scratch = needed > scratch ? needed : scratch;
    }
    call.scratch = gpu.backend->alloc(scratch + 256, gpu.stream);
    if (!call.qkv || !call.dqkv || !call.LSE || !call.saved || !call.scratch) {
        SKIP("this GPU has no room for %.1f GB", (double)far_bytes / 1e9);
        large_free(&call);
        return;
    }
    Problem problem = problem_create(call.shape, INPUT_NORMAL, 83);
    size_t count = (size_t)(C * T);
    for (int deterministic = 0; deterministic < 2; deterministic++) {
        Judgement judgement = {""};
        Result result = result_create(&problem.shape);
        float *input = allocate_zeros((int64_t)count, sizeof(float));
        call.shape.deterministic = deterministic;
        gpu.backend->zero(call.dqkv, (size_t)T * width, gpu.stream);
        for (int tensor = 0; tensor < INPUT_COUNT; tensor++) far_copy(&call, call.dqkv, tensor, problem.input[tensor], 0);
        far_move(&call, call.qkv, stride, call.dqkv, width, 1);
        const char *fault = far_run(&call, subject->kernel, call.qkv, stride);
        CHECK(!fault, "%s", fault);
        far_move(&call, call.qkv, stride, call.dqkv, width, 0);
        for (int tensor = INPUT_COUNT; tensor < TENSOR_COUNT; tensor++)
            far_copy(&call, call.dqkv, tensor, result.value[quantities[tensor]], 1);
        gpu_copy_out(result.value[QUANTITY_LSE], call.LSE, (size_t)(call.shape.NH * T) * sizeof(float));
        int status = fault ? 0 : judge_result(&problem, &result, &judgement);
        CHECK(status == 0, "deterministic %d: %s", deterministic, judgement.text);
        for (int tensor = 0; tensor < INPUT_COUNT; tensor++) {
            far_copy(&call, call.dqkv, tensor, input, 1);
            CHECK(memcmp(input, problem.input[tensor], count * sizeof(float)) == 0, "wrote input %d", tensor);
        }
        record_worst(subject, dtype);
        result_free(&result);
        free(input);
    }
    large_free(&call);
    problem_free(&problem);
}

/* Runs an open call again and again: the buffers `outputs` hold the same bits each time. */
static void check_same_bits(const Call *call, const AttentionKernel *kernel, const Fenced *const *outputs, size_t count,
                            int runs)
{
    size_t most = 0;
    for (size_t k = 0; k < count; k++) most = outputs[k]->bytes > most ? outputs[k]->bytes : most;
    unsigned char *now = allocate_zeros((int64_t)most, 1);
    for (int run = 0, differs = 0; run < runs && !differs; run++) {
        const char *fault = call_forward(call, kernel);
        if (!fault) fault = call_backward(call, kernel);
        CHECK(!fault, "%s", fault);
        differs = fault != NULL;
        for (size_t k = 0; k < count && !differs; k++) {
            call->machine->copy_out(run ? now : outputs[k]->image, outputs[k]->memory, outputs[k]->bytes);
            differs = run && memcmp(now, outputs[k]->image, outputs[k]->bytes) != 0;
            CHECK(!differs, "T %lld HS %lld%s: %s differs in run %d", (long long)call->shape->T, (long long)call->shape->HS,
                  call->shape->deterministic ? "" : ", not deterministic", outputs[k]->name, run);
        }
    }
    free(now);
}

/* The same for a shape, and all of its outputs; but for dQ where equal bits are not promised. */
static void check_runs(const Subject *subject, const AttentionShape *shape, int runs)
{
    Problem problem = problem_open(*shape, INPUT_NORMAL, 43);
    problem_cancel(&problem);
    Call call;
    memset(&call, 0, sizeof call);
    call.machine = subject->machine;
    call.shape = shape;
    call.layout = LAYOUT_ROWS;
    call.element = shape->dtype == DTYPE_BF16 ? 2 : 4;
    const Fenced *outputs[] = {&call.LSE, &call.buffers[TENSOR_O], &call.buffers[TENSOR_DK], &call.buffers[TENSOR_DV],
                               &call.buffers[TENSOR_DQ]};
    if (CHECK(call_open(&call, &problem, subject->kernel, ALIGNED) == 0, "not enough memory"))
        check_same_bits(&call, subject->kernel, outputs, shape->deterministic ? 5 : 4, runs);
    call_close(&call);
    problem_free(&problem);
}

/* Races that only many heads at once show. */
static void test_races(const Subject *subject, Dtype dtype)
{
    AttentionShape shape = shape_of(300, 1, 129, 64, dtype);
    TEST("%s: %s, 50 runs with 300 heads give the same bits", subject->kernel->name, dtype_names[dtype]);
    if (takes(subject, &shape)) check_runs(subject, &shape, 50);
}

/* Many blocks of keys that would add to the same sums: two do not show in which order, as x + y is y + x. Where equal bits
 * are not promised, only dQ is such a sum in the kernels of the table. */
static void test_key_blocks(const Subject *subject, Dtype dtype)
{
    static const struct { int64_t NH, T, HS; } cases[] = {{2, 1089, 64}, {2, 1001, 96}, {1, 897, 128}, {1, 705, 256}};
    TEST("%s: %s, 250 runs with many blocks of keys give the same bits", subject->kernel->name, dtype_names[dtype]);
    for (size_t k = 0; k < sizeof cases / sizeof cases[0]; k++) {
        AttentionShape shape = shape_of(1, cases[k].NH, cases[k].T, cases[k].HS, dtype);
        for (int deterministic = 0; deterministic < 2 && takes(subject, &shape); deterministic++) {
            shape.deterministic = deterministic;
            check_runs(subject, &shape, 250);
        }
    }
}

/* For compute-sanitizer: each kernel once on one small odd shape for each way through its tiles. */
static void test_sanitized(Subject *subjects, size_t count)
{
    static const struct { int64_t NH, T, HS; } cases[] = {{2, 1, 8}, {2, 70, 40}, {1, 200, 64}, {1, 130, 128}};
    for (int dtype = 0; dtype < DTYPE_COUNT; dtype++)
        for (size_t k = 0; k < sizeof cases / sizeof cases[0]; k++) {
            Problem problem = problem_create(shape_of(1, cases[k].NH, cases[k].T, cases[k].HS, dtype), INPUT_NORMAL, 47);
            for (size_t n = 0; n < count; n++) {
                if (subjects[n].machine->device != ATTENTION_CUDA) continue;
                TEST("%s: %s, T %lld, HS %lld, sanitized", subjects[n].kernel->name, dtype_names[dtype],
                     (long long)cases[k].T, (long long)cases[k].HS);
                check_layouts(&subjects[n], &problem, "normal");
            }
            problem_free(&problem);
        }
}

/* --- main ---------------------------------------------------------------------------------------------------------- */

#define MAX_KERNELS 64

/* The object at `path` as a kernel for the CPU, or for the GPU where there is one. */
static void add_object(Subject *subjects, size_t *count, const char *path, const Machine *gpu_machine)
{
    char error[1024] = "";
    AttentionShape shape = shape_of(1, 1, 16, 8, DTYPE_FP32);
    TEST("loads %s", path);
    const Machine *machine = gpu_machine;
    const AttentionKernel *kernel = NULL;
    for (int dtype = 0; dtype < DTYPE_COUNT && machine && !kernel; dtype++) { /* it may take one type alone */
        shape.dtype = (Dtype)dtype;
        kernel = attention_choose(path, ATTENTION_CUDA, &shape, machine->sm, error, sizeof error);
    }
    shape.dtype = DTYPE_FP32;
    if (!machine || (!kernel && strstr(error, "runs on cpu"))) {
        machine = &cpu_machine;
        kernel = attention_choose(path, ATTENTION_CPU, &shape, 0, error, sizeof error);
    }
    if (!kernel && !gpu_machine && strstr(error, "runs on cuda")) {
        SKIP("it needs a GPU");
        return;
    }
    if (CHECK(kernel, "%s", error) && *count < MAX_KERNELS)
        subjects[(*count)++] = (Subject){.kernel = kernel, .machine = machine};
}

/* The kernels of the table, then the objects that `make kernels` has built; what needs TF32 becomes `rounding` instead. */
static size_t collect_subjects(Subject *subjects, Subject *rounding, const Machine *gpu_machine)
{
    size_t count, used = 0;
    AttentionShape small = shape_of(1, 1, 16, 8, DTYPE_FP32);
    const AttentionKernel *const *table = attention_table(&count);
    for (size_t k = 0; k < count && used < MAX_KERNELS; k++) {
        const Machine *machine = table[k]->device == ATTENTION_CPU ? &cpu_machine : gpu_machine;
        if (!machine) continue;
        Subject *to = needs_tf32(table[k], &small, machine->sm) ? rounding : &subjects[used++];
        *to = (Subject){.kernel = table[k], .machine = machine, .of_table = 1};
    }
    const char *build = getenv("BUILD");
    char pattern[512];
    snprintf(pattern, sizeof pattern, "%s/attention/*.so", build && *build ? build : "build");
    glob_t found = {0};
    if (glob(pattern, 0, NULL, &found) != 0) {
        TEST("standalone kernels");
        SKIP("%s matches nothing, `make kernels` builds them", pattern);
    }
    for (size_t k = 0; k < found.gl_pathc; k++) add_object(subjects, &used, found.gl_pathv[k], gpu_machine);
    globfree(&found);
    return used;
}

/* One subject through every test of single kernels. */
static void test_subject(Subject *subject, Dtype dtype)
{
    int on_gpu = subject->machine->device == ATTENTION_CUDA;
    test_logits(subject, dtype);
    test_huge(subject, dtype);
    test_negative_scale(subject, dtype);
    test_not_finite(subject, dtype);
    test_many_heads(subject, dtype);
    test_alignments(subject, dtype);
    test_padded(subject, dtype);
    test_repeats(subject, dtype);
    if (on_gpu) {
        test_races(subject, dtype);
        if (subject->of_table) test_key_blocks(subject, dtype);
        test_large(subject, dtype);
        test_far_rows(subject, dtype);
    } else {
        test_far(subject->kernel);
    }
    if (dtype != DTYPE_FP32) return;
    test_empty(subject);
    test_refusals(subject);
}

/* Inputs that are not exact in TF32: a kernel rounds them as the truth's are. */
static void test_blurred(Subject *subject)
{
    TEST("%s: rounds factors to nearest", subject->kernel->name);
    Problem problem = problem_create(shape_of(2, 3, 130, 64, DTYPE_FP32), INPUT_NORMAL, 59);
    problem_blur(&problem, 61);
    check_layouts(subject, &problem, "not exact in TF32");
    problem_free(&problem);
}

/* A kernel that needs TF32: some shapes, and what else single kernels are tried with. */
static void test_tf32(Subject *subject)
{
    static const struct { int64_t T, HS; } cases[] = {
        {1, 8}, {1, 64}, {2, 40}, {17, 64}, {17, 256}, {100, 3}, {130, 128}, {130, 40}, {300, 256}, {300, 64}, {1025, 96},
    };
    test_blurred(subject);
    for (size_t k = 0; k < sizeof cases / sizeof cases[0]; k++) {
        TEST("%s: T %lld, HS %lld", subject->kernel->name, (long long)cases[k].T, (long long)cases[k].HS);
        Problem problem = problem_create(shape_of(2, 3, cases[k].T, cases[k].HS, DTYPE_FP32), INPUT_NORMAL, 67 + k);
        check_layouts(subject, &problem, "normal");
        problem_free(&problem);
    }
    test_subject(subject, DTYPE_FP32);
    test_long(subject, 1, DTYPE_FP32);
}

/* How near each kernel came to what is allowed. */
static void print_worst(const Subject *subjects, size_t count)
{
    static const char *const names[QUANTITY_COUNT] = QUANTITY_NAMES;
    for (size_t k = 0; k < count; k++)
        for (int dtype = 0; dtype < DTYPE_COUNT; dtype++) {
            if (!subjects[k].checks[dtype]) continue;
            printf("worst error, 1 is allowed: %-18s %s", subjects[k].kernel->name, dtype_names[dtype]);
            for (int quantity = 0; quantity < QUANTITY_COUNT; quantity++)
                printf("  %s %.3f", names[quantity], subjects[k].worst[dtype][quantity]);
            printf("  (%d checks)\n", subjects[k].checks[dtype]);
        }
}

/* Moves the subjects on a GPU to the front; returns how many there are. */
static size_t gpu_first(Subject *subjects, size_t count)
{
    size_t first = 0;
    for (size_t k = 0; k < count; k++) {
        if (subjects[k].machine->device != ATTENTION_CUDA) continue;
        Subject moved = subjects[k];
        memmove(subjects + first + 1, subjects + first, (k - first) * sizeof *subjects);
        subjects[first++] = moved;
    }
    return first;
}

static void test_kernels(Subject *subjects, size_t count, size_t on_gpu)
{
    if (getenv("FLASHGPT_SANITIZE")) {
        test_sanitized(subjects, on_gpu);
        return;
    }
    test_choice();
    test_words();
    test_objects();
    for (int precision = 0; precision < PRECISION_COUNT; precision++) test_faults(precision);
    test_roundings();
    test_shapes(subjects, count, DTYPE_FP32);
    for (size_t k = 0; k < count; k++) test_subject(&subjects[k], DTYPE_FP32);
    for (int dtype = 0; dtype < DTYPE_COUNT && on_gpu; dtype++) test_long(subjects, on_gpu, dtype);
    if (!on_gpu) return; /* the CPU has no bf16 */
    test_shapes(subjects, on_gpu, DTYPE_BF16);
    for (size_t k = 0; k < on_gpu; k++) test_subject(&subjects[k], DTYPE_BF16);
}

int main(int argc, char **argv)
{
    /* Some tests ask for more threads than there are cores: those that wait should sleep. OpenMP reads this at its start. */
    if (argc == 1 && setenv("OMP_WAIT_POLICY", "passive", 0) == 0) {
        char *again[] = {argv[0], "again", NULL};
        execv("/proc/self/exe", again);
    }
    static Subject subjects[MAX_KERNELS], rounding;
    Machine machine;
    char error[1024];
    int has_gpu = gpu_open(&machine, error, sizeof error) == 0;
    size_t count = collect_subjects(subjects, &rounding, has_gpu ? &machine : NULL), on_gpu = gpu_first(subjects, count);
    if (!on_gpu) {
        TEST("attention kernels on a GPU");
        SKIP("%s", has_gpu ? "there is none, neither in the table nor in build/attention" : error);
    }
    /* Where GPU time is dear, the CPU's kernels are tested elsewhere. */
    if (on_gpu && getenv("FLASHGPT_GPU_ONLY")) count = on_gpu;
    test_kernels(subjects, count, on_gpu);
    print_worst(subjects, count);
    allows_tf32 = 1;
    if (rounding.kernel && getenv("FLASHGPT_SANITIZE")) test_sanitized(&rounding, 1);
    else if (rounding.kernel) test_tf32(&rounding);
    print_worst(&rounding, rounding.kernel != NULL);
    if (has_gpu) gpu_close();
    return test_end();
}
