/* bench_attention.c - verifies and times every attention kernel: those of the table, and shared objects.
 *
 *     build/dev/bench_attention [--shape B,NH,T,HS]... [options] [KERNEL.so ...]
 *
 * A kernel is verified on each T and HS (one sequence, two heads at the most) by the checker of the tests before it is
 * timed there; a wrong one is not timed, and the exit status is 1. Times are medians over runs on random data in the
 * trainer's packed layout, the caches flushed before each. Operations are counted as the papers do: forward
 * 4*B*NH*T*T*HS/2 for the causal half, backward 2.5 times that. The table goes to stdout and, with what it was measured on,
 * to dev/results/<machine>/attention.csv.
 */
#include "tests/attention_check.h"

#include <ctype.h>
#include <errno.h>
#include <getopt.h>
#include <glob.h>
#include <sys/stat.h>
#include <time.h>

#ifdef _OPENMP
#include <omp.h>
#else
static int omp_get_max_threads(void) { return 1; }
#endif

#ifdef __clang__
#define COMPILER __VERSION__ /* names itself */
#else
#define COMPILER "gcc " __VERSION__
#endif

#define MAX_SHAPES 64
#define MAX_KERNELS 64
#define FLUSH_BYTES ((size_t)96 << 20)

typedef struct Options {
    int64_t shapes[MAX_SHAPES][4]; /* B, NH, T, HS */
    int shape_count, repeats;
    double limit; /* seconds that forward and backward together may take */
    const char *only, *out;
} Options;

typedef struct Timing {
    double forward, backward; /* seconds, medians */
    int runs;
} Timing;

typedef struct Bench {
    const AttentionKernel *kernels[MAX_KERNELS];
    double rate[MAX_KERNELS]; /* operations a second of forward and backward on the last shape; 0 before the first */
    int kernel_count, faults;
    unsigned char *flush;
    FILE *csv;
    char machine[128], commit[64], date[32];
} Bench;

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static double forward_operations(const AttentionShape *shape)
{
    return 2.0 * (double)shape->B * (double)shape->NH * (double)shape->T * (double)shape->T * (double)shape->HS;
}

/* --- timing -------------------------------------------------------------------------------------------------------- */

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *values, int count)
{
    qsort(values, (size_t)count, sizeof values[0], compare_doubles);
    return count % 2 ? values[count / 2] : (values[count / 2 - 1] + values[count / 2]) / 2;
}

/* Reads and writes more than the caches hold, on every core: each has its own, and threads that just worked are awake. */
static void flush_caches(unsigned char *memory)
{
#pragma omp parallel for
    for (size_t i = 0; i < FLUSH_BYTES; i += 64) memory[i]++;
}

static float *random_floats(int64_t count, uint64_t seed)
{
    float *values = host_alloc((size_t)count * sizeof(float) + 1);
    if (!values) {
        fprintf(stderr, "not enough memory for %lld floats\n", (long long)count);
        exit(1);
    }
    for (int64_t i = 0; i < count; i++) values[i] = (float)random_bell(&seed);
    return values;
}

/* Times a kernel on the CPU in the trainer's layout; at most `repeats` runs, fewer where they take long. Returns NULL or
 * what the kernel says. */
static const char *time_kernel(const AttentionKernel *kernel, const AttentionShape *shape, int repeats, Bench *bench,
                               Timing *timing)
{
    int64_t N = shape->B * shape->T, C = shape->NH * shape->HS;
    float *qkv = random_floats(N * 3 * C, 1), *dqkv = random_floats(N * 3 * C, 2), *O = random_floats(N * C, 3);
    float *dO = random_floats(N * C, 4), *LSE = random_floats(N * shape->NH, 5);
    void *saved = host_alloc(kernel->saved_bytes(shape) + 1), *scratch = host_alloc(kernel->scratch_bytes(shape) + 1);
    AttentionInput Q = attention_packed_input(qkv, 0, shape, sizeof(float));
    AttentionInput K = attention_packed_input(qkv, 1, shape, sizeof(float));
    AttentionInput V = attention_packed_input(qkv, 2, shape, sizeof(float));
    double *forward = allocate_zeros(repeats, sizeof(double)), *backward = allocate_zeros(repeats, sizeof(double));
    double spent = 0;
    const char *fault = saved && scratch ? NULL : "not enough memory for saved and scratch";
    /* Run -1 warms up: pages are mapped, threads exist. It counts only where it alone takes long. */
    for (int run = -1; run < repeats && !fault && spent < 1; run++) {
        int at = run < 0 ? 0 : run;
        flush_caches(bench->flush);
        double start = now();
        fault = kernel->forward(attention_rows_output(O, shape), LSE, saved, scratch, Q, K, V, shape, NULL);
        forward[at] = now() - start;
        if (fault) break;
        flush_caches(bench->flush);
        start = now();
        fault = kernel->backward(attention_packed_output(dqkv, 0, shape, sizeof(float)),
                                 attention_packed_output(dqkv, 1, shape, sizeof(float)),
                                 attention_packed_output(dqkv, 2, shape, sizeof(float)), scratch,
                                 attention_rows_input(dO, shape), Q, K, V, attention_rows_input(O, shape), LSE, saved, shape,
                                 NULL);
        backward[at] = now() - start;
        spent += forward[at] + backward[at];
        timing->runs = at + 1;
    }
    if (!fault) {
        timing->forward = median(forward, timing->runs);
        timing->backward = median(backward, timing->runs);
    }
    free(qkv), free(dqkv), free(O), free(dO), free(LSE), free(saved), free(scratch), free(forward), free(backward);
    return fault;
}

/* --- one shape ----------------------------------------------------------------------------------------------------- */

static void report(Bench *bench, const AttentionKernel *kernel, const AttentionShape *shape, const Timing *timing)
{
    double operations = forward_operations(shape);
    double forward = operations / timing->forward / 1e9, backward = 2.5 * operations / timing->backward / 1e9;
    double megabytes = (double)(kernel->scratch_bytes(shape) + kernel->saved_bytes(shape)) / 1e6;
    printf("  %-12s %10.3f %10.3f %10.1f %10.1f %10.2f %6d\n", kernel->name, timing->forward * 1e3, timing->backward * 1e3,
           forward, backward, megabytes, timing->runs);
    if (bench->csv)
        fprintf(bench->csv, "%s,%lld,%lld,%lld,%lld,fp32,%.6g,%.6g,%.5g,%.5g,%.5g,%d,%s,\"%s\",%d,%s,%s\n", kernel->name,
                (long long)shape->B, (long long)shape->NH, (long long)shape->T, (long long)shape->HS, timing->forward * 1e3,
                timing->backward * 1e3, forward, backward, megabytes, timing->runs, bench->machine, COMPILER,
                omp_get_max_threads(), bench->commit, bench->date);
}

/* Verifies and times all kernels on one shape. */
static void bench_shape(Bench *bench, const AttentionShape *shape, const Options *options)
{
    AttentionShape small = *shape;
    small.B = 1;
    small.NH = shape->NH > 2 ? 2 : shape->NH;
    Problem problem = problem_create(small, INPUT_NORMAL, 29);
    printf("B %lld, NH %lld, T %lld, HS %lld, fp32\n", (long long)shape->B, (long long)shape->NH, (long long)shape->T,
           (long long)shape->HS);
    printf("  %-12s %10s %10s %10s %10s %10s %6s\n", "kernel", "forward ms", "backward", "GFLOP/s", "backward", "memory MB",
           "runs");
    for (int k = 0; k < bench->kernel_count; k++) {
        const AttentionKernel *kernel = bench->kernels[k];
        Judgement judgement = {""};
        Timing timing = {0};
        const char *reason = kernel->refuse(shape, 0);
        double operations = 3.5 * forward_operations(shape), guess = bench->rate[k] ? operations / bench->rate[k] : 0;
        if (reason) {
            printf("  %-12s refuses: %s\n", kernel->name, reason);
        } else if (guess > options->limit) {
            printf("  %-12s left out: about %.1f s a run, the limit is %.1f s\n", kernel->name, guess, options->limit);
        } else if (check_kernel(kernel, &problem, LAYOUT_PACKED, 0, &cpu_machine, &judgement)) {
            printf("  %-12s WRONG, not timed: %s\n", kernel->name, judgement.text);
            bench->faults++;
        } else if ((reason = time_kernel(kernel, shape, options->repeats, bench, &timing)) != NULL) {
            printf("  %-12s failed: %s\n", kernel->name, reason);
            bench->faults++;
        } else {
            bench->rate[k] = operations / (timing.forward + timing.backward);
            report(bench, kernel, shape, &timing);
        }
        fflush(stdout);
    }
    problem_free(&problem);
}

/* --- where, and with what ------------------------------------------------------------------------------------------- */

/* First line of a command's output, empty where it fails. */
static void first_line(char *text, size_t size, const char *command)
{
    FILE *pipe = popen(command, "r");
    text[0] = 0;
    if (!pipe) return;
    if (fgets(text, (int)size, pipe)) text[strcspn(text, "\n")] = 0;
    pclose(pipe);
}

/* A folder name for this CPU: "cpu-amd-epyc". */
static void name_machine(char *name, size_t size)
{
    char line[256] = "", *model = NULL;
    FILE *info = fopen("/proc/cpuinfo", "r");
    while (info && !model && fgets(line, sizeof line, info))
        if (strncmp(line, "model name", 10) == 0) model = strchr(line, ':');
    if (info) fclose(info);
    size_t used = (size_t)snprintf(name, size, "cpu");
    int gap = 1;
    for (const char *c = model ? model + 1 : "unknown"; *c && used + 2 < size; c++) {
        if (!isalnum((unsigned char)*c)) {
            gap = 1;
            continue;
        }
        if (gap) name[used++] = '-';
        gap = 0;
        name[used++] = (char)tolower((unsigned char)*c);
    }
    name[used] = 0;
}

/* Opens the CSV: the file asked for, or the one of this machine. Without a dev/results to write to there is none. */
static void open_csv(Bench *bench, const Options *options)
{
    char path[512], folder[256];
    time_t seconds = time(NULL);
    name_machine(bench->machine, sizeof bench->machine);
    first_line(bench->commit, sizeof bench->commit, "git rev-parse --short HEAD 2>/dev/null");
    strftime(bench->date, sizeof bench->date, "%Y-%m-%d", gmtime(&seconds));
    snprintf(folder, sizeof folder, "dev/results/%s", bench->machine);
    snprintf(path, sizeof path, "%s/attention.csv", folder);
    if (!options->out && ((mkdir("dev/results", 0777) && errno != EEXIST) || (mkdir(folder, 0777) && errno != EEXIST))) {
        fprintf(stderr, "no CSV: cannot make %s here: %s (run it from the repository's root)\n", folder, strerror(errno));
        return;
    }
    bench->csv = fopen(options->out ? options->out : path, "w");
    if (!bench->csv) {
        fprintf(stderr, "cannot write %s: %s\n", options->out ? options->out : path, strerror(errno));
        exit(1);
    }
    fprintf(bench->csv, "kernel,B,NH,T,HS,dtype,forward_ms,backward_ms,forward_gflops,backward_gflops,memory_mb,runs,"
                        "machine,compiler,threads,commit,date\n");
}

/* Adds the shared object at `path`; a wrong one is an error. */
static void add_object(Bench *bench, const char *path)
{
    char error[1024];
    AttentionShape shape = {.B = 1, .T = 16, .NH = 1, .HS = 64, .scale = attention_scale(64), .deterministic = 1};
    const AttentionKernel *kernel = attention_choose(path, ATTENTION_CPU, &shape, 0, error, sizeof error);
    if (!kernel) {
        fprintf(stderr, "%s\n", error);
        exit(2);
    }
    if (bench->kernel_count < MAX_KERNELS) bench->kernels[bench->kernel_count++] = kernel;
}

/* The table, then the objects named, or those that `make kernels` has built. */
static void collect_kernels(Bench *bench, int count, char **paths)
{
    size_t table_count;
    const AttentionKernel *const *table = attention_table(&table_count);
    for (size_t k = 0; k < table_count; k++)
        if (table[k]->device == ATTENTION_CPU) bench->kernels[bench->kernel_count++] = table[k];
    for (int k = 0; k < count; k++) add_object(bench, paths[k]);
    if (count) return;
    char pattern[512];
    const char *build = getenv("BUILD");
    glob_t found = {0};
    snprintf(pattern, sizeof pattern, "%s/attention/*.so", build && *build ? build : "build");
    glob(pattern, 0, NULL, &found);
    for (size_t k = 0; k < found.gl_pathc; k++) add_object(bench, found.gl_pathv[k]);
    globfree(&found);
}

static void keep_only(Bench *bench, const char *name)
{
    int kept = 0;
    for (int k = 0; k < bench->kernel_count; k++)
        if (strcmp(bench->kernels[k]->name, name) == 0) bench->kernels[kept++] = bench->kernels[k];
    bench->kernel_count = kept;
    if (kept) return;
    fprintf(stderr, "--kernel %s: no such kernel here\n", name);
    exit(2);
}

/* --- options ------------------------------------------------------------------------------------------------------- */

static void print_help(void)
{
    printf("Verifies and times attention kernels on the CPU.\n\n"
           "  bench_attention [options] [KERNEL.so ...]\n\n"
           "  --shape B,NH,T,HS   a shape to measure; may be repeated (default: five of the trainer's)\n"
           "  --kernel NAME       this kernel only (default: all of the table and of build/attention)\n"
           "  --repeats N         runs behind a median (default 15; fewer where they take more than 1 s together)\n"
           "  --limit SECONDS     leave out kernels that would take longer for one run (default 3)\n"
           "  --out FILE          the CSV (default dev/results/<machine>/attention.csv)\n"
           "  --help              this text\n");
}

__attribute__((noreturn)) static void reject(const char *option, const char *got, const char *expected)
{
    fprintf(stderr, "--%s %s: expected %s\n", option, got, expected);
    exit(2);
}

static void parse_shape(Options *options, const char *text)
{
    long long B, NH, T, HS;
    int end = 0;
    if (sscanf(text, "%lld,%lld,%lld,%lld%n", &B, &NH, &T, &HS, &end) != 4 || text[end] || B < 1 || NH < 1 || T < 1 ||
        HS < 1)
        reject("shape", text, "four positive integers B,NH,T,HS");
    if (options->shape_count == MAX_SHAPES) reject("shape", text, "at most 64 shapes");
    int64_t *shape = options->shapes[options->shape_count++];
    shape[0] = B, shape[1] = NH, shape[2] = T, shape[3] = HS;
}

static double parse_number(const char *option, const char *text, double least, double most)
{
    char *end;
    double value = strtod(text, &end);
    char expected[64];
    snprintf(expected, sizeof expected, "a number from %g to %g", least, most);
    if (end == text || *end || !(value >= least && value <= most)) reject(option, text, expected);
    return value;
}

static Options parse_options(int argc, char **argv)
{
    static const int64_t defaults[][4] = {{12, 4, 64, 32}, {4, 12, 64, 64}, {8, 6, 256, 64}, {4, 12, 1024, 64},
                                          {1, 8, 2048, 128}};
    static const struct option table[] = {
        {"shape", required_argument, NULL, 's'}, {"kernel", required_argument, NULL, 'k'},
        {"repeats", required_argument, NULL, 'r'}, {"limit", required_argument, NULL, 'l'},
        {"out", required_argument, NULL, 'o'}, {"help", no_argument, NULL, 'h'}, {0},
    };
    Options options = {.repeats = 15, .limit = 3};
    for (int option; (option = getopt_long(argc, argv, "", table, NULL)) != -1;) switch (option) {
        case 's': parse_shape(&options, optarg); break;
        case 'k': options.only = optarg; break;
        case 'r': options.repeats = (int)parse_number("repeats", optarg, 1, 10000); break;
        case 'l': options.limit = parse_number("limit", optarg, 0, 1e6); break;
        case 'o': options.out = optarg; break;
        case 'h': print_help(); exit(0);
        default: exit(2);
        }
    int given = options.shape_count;
    for (size_t k = 0; !given && k < sizeof defaults / sizeof defaults[0]; k++)
        memcpy(options.shapes[options.shape_count++], defaults[k], sizeof defaults[k]);
    return options;
}

int main(int argc, char **argv)
{
    Options options = parse_options(argc, argv);
    Bench bench = {0};
    collect_kernels(&bench, argc - optind, argv + optind);
    if (options.only) keep_only(&bench, options.only);
    bench.flush = allocate_zeros((int64_t)FLUSH_BYTES, 1);
    open_csv(&bench, &options);
    printf("%s, %d threads, %s\n", bench.machine, omp_get_max_threads(), COMPILER);
    for (int k = 0; k < options.shape_count; k++) {
        const int64_t *s = options.shapes[k];
        AttentionShape shape = {.B = s[0], .NH = s[1], .T = s[2], .HS = s[3], .scale = attention_scale(s[3]),
                                .dtype = DTYPE_FP32, .deterministic = 1};
        bench_shape(&bench, &shape, &options);
    }
    free(bench.flush);
    if (bench.csv && fclose(bench.csv) != 0) {
        fprintf(stderr, "cannot write the CSV: %s\n", strerror(errno));
        return 1;
    }
    return bench.faults ? 1 : 0;
}
