/* test_attention.c - every attention kernel of the table, and every standalone one that is built, against the float64 truth;
 * the checker against kernels that are wrong on purpose; the choice of a kernel by name, "auto" and path.
 */
#include "tests/attention_check.h"
#include "tests/attention_faults.h"
#include "tests/test.h"

#include <glob.h>
#include <unistd.h>

#ifdef _OPENMP
#include <omp.h>
#else
static void omp_set_num_threads(int n) { (void)n; }
static int omp_get_max_threads(void) { return 1; }
#endif

static AttentionShape shape_of(int64_t B, int64_t NH, int64_t T, int64_t HS)
{
    return (AttentionShape){.B = B, .T = T, .NH = NH, .HS = HS, .scale = attention_scale(HS), .dtype = DTYPE_FP32,
                            .deterministic = 1};
}

/* --- the checker --------------------------------------------------------------------------------------------------- */

/* Which of the checks rejects a fault: shapes and inputs that real kernels go through too. */
static int rejects(const AttentionKernel *kernel, Judgement *judgement)
{
    static const struct { int64_t T, HS; InputKind kind; int64_t nan_row; } cases[] = {
        {45, 8, INPUT_NORMAL, -1}, {45, 8, INPUT_HIGH, -1}, {45, 8, INPUT_LOW, -1}, {45, 8, INPUT_NORMAL, 20},
    };
    for (size_t k = 0; k < sizeof cases / sizeof cases[0]; k++) {
        Problem problem = problem_create(shape_of(1, 2, cases[k].T, cases[k].HS), cases[k].kind, 7 + k);
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

static void test_faults(void)
{
    for (int fault = 0; fault < FAULT_COUNT; fault++) {
        Judgement judgement = {""};
        TEST("the checker %s: %s", fault == FAULT_NONE ? "passes" : "rejects", fault_names[fault]);
        int rejected = rejects(&fault_kernels[fault], &judgement);
        CHECK(rejected == (fault != FAULT_NONE), "rejected: %d (%s)", rejected, judgement.text);
        if (getenv("VERBOSE") && rejected) printf("   as it should: %s\n", judgement.text);
    }
}

/* --- kernels ------------------------------------------------------------------------------------------------------- */

/* Runs one problem over layouts and alignments; where that is much work, a slow kernel gets one of them. */
static void check_layouts(const AttentionKernel *kernel, const Problem *problem, const char *what)
{
    int64_t work = problem->shape.T * problem->shape.T * problem->shape.HS;
    int only = strcmp(kernel->name, "tiled") != 0 && work > 8 << 20 ? (int)(problem->shape.T % LAYOUT_FAR) : -1;
    for (int layout = 0; layout < LAYOUT_FAR; layout++) {
        if (only >= 0 && layout != only) continue;
        Judgement judgement = {""};
        int unaligned = layout % 2;
        int status = check_kernel(kernel, problem, layout, unaligned, &cpu_machine, &judgement);
        CHECK(status == 0, "%s B %lld NH %lld T %lld HS %lld, layout %s%s: %s", what, (long long)problem->shape.B,
              (long long)problem->shape.NH, (long long)problem->shape.T, (long long)problem->shape.HS, layout_names[layout],
              unaligned ? " unaligned" : "", judgement.text);
    }
}

/* Every T of the list and every HS of the list at least once; all of both where they are small. */
static void test_shapes(const AttentionKernel *const *kernels, size_t count)
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
            Problem problem = problem_create(shape_of(T < 100 ? 2 : 1, T < 300 ? 3 : 1, T, dims[k]), INPUT_NORMAL,
                                             (uint64_t)(T * 1000 + dims[k]));
            for (size_t n = 0; n < count; n++) {
                TEST("%s: T %lld, HS %lld", kernels[n]->name, (long long)T, (long long)dims[k]);
                check_layouts(kernels[n], &problem, "normal");
            }
            problem_free(&problem);
        }
    }
}

static void test_logits(const AttentionKernel *kernel)
{
    static const char *const names[] = {"normal", "+1e5", "-1e5", "-1e5 to 1e5"};
    for (int kind = INPUT_HIGH; kind <= INPUT_SPREAD; kind++) {
        TEST("%s: logits of %s", kernel->name, names[kind]);
        for (int64_t T = 1; T <= 201; T += 100) {
            Problem problem = problem_create(shape_of(1, 2, T, 64), kind, 11);
            check_layouts(kernel, &problem, names[kind]);
            problem_free(&problem);
        }
    }
}

/* A value that is no number, in each input in turn: the truth says where it may arrive. */
static void test_not_finite(const AttentionKernel *kernel)
{
    static const struct { const char *name; float value; } values[] = {{"NaN", NAN}, {"+inf", INFINITY}};
    static const char *const parts[] = {"Q", "K", "V", "dO"};
    static const int64_t rows[] = {0, 5, 70, 129};
    for (size_t v = 0; v < 2; v++)
        for (int part = 0; part < INPUT_COUNT; part++) {
            TEST("%s: %s in one row of %s reaches no row it may not", kernel->name, values[v].name, parts[part]);
            for (size_t r = 0; r < sizeof rows / sizeof rows[0]; r++) {
                Problem problem = problem_create(shape_of(1, 2, 130, 16), INPUT_NORMAL, 13);
                problem.input[part][(130 + rows[r]) * 16 + 3] = values[v].value;
                problem_solve(&problem);
                check_layouts(kernel, &problem, values[v].name);
                problem_free(&problem);
            }
        }
}

static void test_many_heads(const AttentionKernel *kernel)
{
    TEST("%s: more than 65535 heads", kernel->name);
    for (int64_t T = 1; T <= 3; T++) {
        Problem problem = problem_create(T == 2 ? shape_of(1, 65537, T, 8) : shape_of(65537, 1, T, 8), INPUT_NORMAL, 17);
        Judgement judgement = {""};
        CHECK(check_kernel(kernel, &problem, LAYOUT_PACKED, 0, &cpu_machine, &judgement) == 0, "T %lld: %s", (long long)T,
              judgement.text);
        problem_free(&problem);
    }
}

static void test_far(const AttentionKernel *kernel)
{
    TEST("%s: offsets beyond 2^31 elements", kernel->name);
    Problem problem = problem_create(shape_of(2, 2, 17, 16), INPUT_NORMAL, 19);
    Judgement judgement = {""};
    int status = check_kernel(kernel, &problem, LAYOUT_FAR, 1, &cpu_machine, &judgement);
    if (status && strncmp(judgement.text, "not enough memory", 17) == 0)
        SKIP("this system gives no address space of 8 x 36 GB");
    else
        CHECK(status == 0, "%s", judgement.text);
    problem_free(&problem);
}

/* The same bits on every run, with any number of threads: also where tiled takes the other of its two ways through
 * backward, as it does for one head of several tiles when there is more than one thread. */
static void test_repeats(const AttentionKernel *kernel)
{
    static const struct { int64_t B, NH, T, HS; int repeats; } cases[] = {{1, 3, 70, 16, 250}, {1, 1, 300, 24, 40}};
    int threads = omp_get_max_threads();
    TEST("%s: 250 runs give the same bits, with 1 to 4 threads", kernel->name);
    for (size_t k = 0; k < sizeof cases / sizeof cases[0]; k++) {
        Problem problem = problem_create(shape_of(cases[k].B, cases[k].NH, cases[k].T, cases[k].HS), INPUT_NORMAL, 23);
        Result first = result_create(&problem.shape), again = result_create(&problem.shape);
        Judgement judgement = {""};
        int status = run_kernel(kernel, &problem, LAYOUT_PACKED, 0, &cpu_machine, &first, &judgement);
        for (int run = 0; run < cases[k].repeats && !status; run++) {
            omp_set_num_threads(1 + run % 4);
            status = run_kernel(kernel, &problem, LAYOUT_PACKED, 0, &cpu_machine, &again, &judgement);
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
static void test_empty(const AttentionKernel *kernel)
{
    TEST("%s: empty shapes", kernel->name);
    for (int k = 0; k < 3; k++) {
        AttentionShape shape = shape_of(k != 0, k != 1, k != 2, 16);
        AttentionInput in = {NULL, 0, 0, 0};
        AttentionOutput out = {NULL, 0, 0, 0};
        char *scratch = malloc(kernel->scratch_bytes(&shape) + 1);
        const char *reason = kernel->refuse(&shape, 0);
        CHECK(!reason, "refuses: %s", reason);
        const char *forward = kernel->forward(out, NULL, NULL, scratch, in, in, in, &shape, NULL);
        const char *backward = kernel->backward(out, out, out, scratch, in, in, in, in, in, NULL, NULL, &shape, NULL);
        CHECK(!forward && !backward, "forward: %s, backward: %s", forward, backward);
        free(scratch);
    }
}

static void test_refusals(const AttentionKernel *kernel)
{
    TEST("%s: refuses what it cannot do", kernel->name);
    AttentionShape shape = shape_of(1, 1, 4, 8);
    shape.dtype = DTYPE_BF16;
    const char *reason = kernel->refuse(&shape, 0);
    CHECK(reason && strstr(reason, "fp32"), "bf16: %s", reason ? reason : "not refused");
    shape.dtype = DTYPE_FP32;
    shape.HS = 0;
    CHECK(kernel->refuse(&shape, 0), "HS 0 is not refused");
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
    AttentionShape shape = shape_of(1, 1, 16, 8), bf16 = shape;
    bf16.dtype = DTYPE_BF16;
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

static void test_objects(void)
{
    static const char pieces[] =
        "#include \"attention/attention.h\"\n"
        "static const char *refuse(const AttentionShape *s, int sm) { return (void)sm, s->HS == 99 ? \"hates 99\" : 0; }\n"
        "static size_t bytes(const AttentionShape *s) { return (void)s, (size_t)0; }\n"
        "static const char *forward(AttentionOutput O, float *L, void *s, void *w, AttentionInput Q, AttentionInput K,\n"
        "    AttentionInput V, const AttentionShape *p, void *t)\n"
        "{ return (void)O, (void)L, (void)s, (void)w, (void)Q, (void)K, (void)V, (void)p, (void)t, \"no\"; }\n"
        "static const char *backward(AttentionOutput q, AttentionOutput k, AttentionOutput v, void *w, AttentionInput o,\n"
        "    AttentionInput Q, AttentionInput K, AttentionInput V, AttentionInput O, const float *L, const void *s,\n"
        "    const AttentionShape *p, void *t)\n"
        "{ return (void)q, (void)k, (void)v, (void)w, (void)o, (void)Q, (void)K, (void)V, (void)O, (void)L, (void)s,\n"
        "         (void)p, (void)t, \"no\"; }\n"
        "const AttentionKernel %s = {%d, %s, %s, \"outside\", refuse, bytes, bytes, forward, %s};\n";
    static const struct { const char *what, *symbol, *device, *name, *backward, *words; int abi; } cases[] = {
        {"a good one", "attention_kernel", "ATTENTION_CPU", "\"outside\"", "backward", NULL, ATTENTION_ABI},
        {"another ABI", "attention_kernel", "ATTENTION_CPU", "\"outside\"", "backward", "ABI 77, this program has", 77},
        {"no symbol", "something_else", "ATTENTION_CPU", "\"outside\"", "backward", "no symbol 'attention_kernel'",
         ATTENTION_ABI},
        {"another device", "attention_kernel", "ATTENTION_CUDA", "\"outside\"", "backward", "this run is on cpu",
         ATTENTION_ABI},
        {"no backward", "attention_kernel", "ATTENTION_CPU", "\"outside\"", "0", "its field 'backward' is empty",
         ATTENTION_ABI},
        {"no name", "attention_kernel", "ATTENTION_CPU", "0", "backward", "its field 'name' is empty", ATTENTION_ABI},
    };
    AttentionShape shape = shape_of(1, 1, 16, 8), hated = shape_of(1, 1, 16, 99);
    char folder[] = "/tmp/attention_test_XXXXXX", path[128], body[4096];
    if (!mkdtemp(folder)) {
        TEST("kernels from shared objects");
        SKIP("cannot make a folder in /tmp");
        return;
    }
    for (size_t k = 0; k < sizeof cases / sizeof cases[0]; k++) {
        TEST("a shared object with %s", cases[k].what);
        snprintf(path, sizeof path, "%s/case%zu.so", folder, k);
        snprintf(body, sizeof body, pieces, cases[k].symbol, cases[k].abi, cases[k].device, cases[k].name,
                 cases[k].backward);
        if (build_object(path, body)) {
            SKIP("no C compiler that builds a shared object (set CC)");
            continue;
        }
        check_choice(path, ATTENTION_CPU, &shape, cases[k].words ? NULL : "outside", cases[k].words);
        if (!cases[k].words) check_choice(path, ATTENTION_CPU, &hated, NULL, "'outside' cannot run here: hates 99");
        unlink(path);
    }
    TEST("files that are no shared object");
    snprintf(path, sizeof path, "%s/absent.so", folder);
    check_choice(path, ATTENTION_CPU, &shape, NULL, "No such file");
    check_choice("no_such_kernel.so", ATTENTION_CPU, &shape, NULL, "No such file");
    snprintf(path, sizeof path, "%s/text.so", folder);
    FILE *file = fopen(path, "w");
    if (file) fprintf(file, "not an object\n"), fclose(file);
    check_choice(path, ATTENTION_CPU, &shape, NULL, "cannot load attention kernel");
    unlink(path);
    rmdir(folder);
}

/* --- main ---------------------------------------------------------------------------------------------------------- */

#define MAX_KERNELS 64

/* The CPU kernels of the table, then the objects that `make kernels` has built. */
static size_t collect_kernels(const AttentionKernel **kernels)
{
    size_t count, used = 0;
    const AttentionKernel *const *table = attention_table(&count);
    for (size_t k = 0; k < count && used < MAX_KERNELS; k++)
        if (table[k]->device == ATTENTION_CPU) kernels[used++] = table[k];
    const char *build = getenv("BUILD");
    char pattern[512], error[1024];
    snprintf(pattern, sizeof pattern, "%s/attention/*.so", build && *build ? build : "build");
    AttentionShape shape = shape_of(1, 1, 16, 8);
    glob_t found = {0};
    if (glob(pattern, 0, NULL, &found) != 0) {
        TEST("standalone kernels");
        SKIP("%s matches nothing, `make kernels` builds them", pattern);
    }
    for (size_t k = 0; k < found.gl_pathc && used < MAX_KERNELS; k++) {
        TEST("loads %s", found.gl_pathv[k]);
        kernels[used] = attention_choose(found.gl_pathv[k], ATTENTION_CPU, &shape, 0, error, sizeof error);
        if (CHECK(kernels[used], "%s", error)) used++;
    }
    globfree(&found);
    return used;
}

int main(int argc, char **argv)
{
    /* Some tests ask for more threads than there are cores: those that wait should sleep. OpenMP reads this at its start. */
    if (argc == 1 && setenv("OMP_WAIT_POLICY", "passive", 0) == 0) {
        char *again[] = {argv[0], "again", NULL};
        execv("/proc/self/exe", again);
    }
    const AttentionKernel *kernels[MAX_KERNELS];
    size_t count = collect_kernels(kernels);
    test_choice();
    test_objects();
    test_faults();
    test_shapes(kernels, count);
    for (size_t k = 0; k < count; k++) {
        test_logits(kernels[k]);
        test_not_finite(kernels[k]);
        test_many_heads(kernels[k]);
        test_far(kernels[k]);
        test_repeats(kernels[k]);
        test_empty(kernels[k]);
        test_refusals(kernels[k]);
    }
    return test_end();
}
