/* bench_attention.c - verifies and times every attention kernel: those of the table, and shared objects.
 *
 *     build/dev/bench_attention [--device cpu|cuda] [--dtype fp32|bf16] [--shape B,NH,T,HS]... [--kernel NAME]...
 *                               [KERNEL.so ...]
 *
 * A kernel is verified on each T and HS (one sequence, two heads at the most; a long one in sampled rows) by the checker
 * of the tests before it is timed there; a wrong one is not timed, and the exit status is 1; where no kernel takes any of
 * the shapes nothing is done, and it is 2, as for wrong arguments. Times are medians over runs on random data in the
 * packed layout of the trainer, the caches flushed before each; on a GPU events on the stream take them. Operations are
 * counted as the papers do: forward 4*B*NH*T*T*HS/2 for the causal half, backward 2.5 times that. The table goes to
 * stdout; that of all kernels on all default shapes also, with what it was measured on, to
 * dev/results/<machine>/attention.csv. A selection is written only where --out says. Where two kernels have the same
 * name, the file of one from outside stands behind it.
 */
#include "tests/attention_gpu.h"

#include <ctype.h>
#include <errno.h>
#include <getopt.h>
#include <glob.h>
#include <sys/stat.h>
#include <time.h>

#ifdef HAVE_CUDA
#include <cuda_runtime_api.h>
#endif

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
#define MAX_NAMES 16
#define LABEL_BYTES 4352 /* a name and a path */
#define FLUSH_BYTES_CPU ((size_t)96 << 20)
#define FLUSH_BYTES_GPU ((size_t)256 << 20) /* more than the second-level cache of any GPU so far */
#define RANDOM_BLOCK ((int64_t)1 << 22)     /* elements after which random data repeats */

typedef struct Options {
    int64_t shapes[MAX_SHAPES][5]; /* B, NH, T, HS, dtype */
    int shape_count, repeats;
    double limit; /* seconds that forward and backward together may take; below 0: by device */
    const char *names[MAX_NAMES]; /* the kernels to measure, name_count of them; 0: all */
    int name_count, objects;      /* objects: files of kernels that were given */
    int selective;                /* not all kernels, shapes and types */
    const char *out, *device, *dtype;
} Options;

typedef struct Timing {
    double forward, backward; /* seconds, medians */
    int runs;
} Timing;

typedef struct Entry {
    const AttentionKernel *kernel;
    const char *path;        /* of the shared object that it came from, NULL for one of the table */
    char label[LABEL_BYTES]; /* its name; of one that shares it with another also its file */
    double rate;             /* operations a second of forward and backward on the last shape; 0 before the first */
} Entry;

typedef struct Bench {
    Entry entries[MAX_KERNELS];
    int entry_count, label_width, faults;
    Machine machine;
    unsigned char *flush;
    FILE *csv;
    char name[256], built_with[256], runs_with[128], commit[64], date[32];
} Bench;

/* What a timed call works on, in the machine's memory. */
typedef struct Tensors {
    unsigned char *qkv, *dqkv, *O, *dO, *LSE;
    unsigned char *saved, *scratch; /* of one kernel */
} Tensors;

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
static void flush_caches(const Bench *bench)
{
    if (bench->machine.device == ATTENTION_CUDA) {
        gpu.backend->zero(bench->flush, FLUSH_BYTES_GPU, gpu.stream);
        return;
    }
#pragma omp parallel for
    for (size_t i = 0; i < FLUSH_BYTES_CPU; i += 64) bench->flush[i]++;
}

/* `count` random elements of a type in the machine's memory, or NULL. */
static unsigned char *random_tensor(const Bench *bench, Dtype dtype, int64_t count, uint64_t seed)
{
    size_t element = dtype == DTYPE_BF16 ? 2 : 4;
    int64_t block = count < RANDOM_BLOCK ? count : RANDOM_BLOCK;
    unsigned char *tensor = bench->machine.alloc((size_t)count * element + 1);
    unsigned char *host = allocate_zeros(block, element);
    for (int64_t i = 0; i < block; i++) {
        float value = round_to((float)random_bell(&seed), dtype);
        uint32_t bits;
        memcpy(&bits, &value, 4);
        if (element == 2) bits >>= 16;
        memcpy(host + (size_t)i * element, &bits, element);
    }
    for (int64_t at = 0; at < count && tensor; at += block) {
        int64_t length = count - at < block ? count - at : block;
        bench->machine.copy_in(tensor + (size_t)at * element, host, (size_t)length * element);
    }
    free(host);
    return tensor;
}

static void tensors_free(const Bench *bench, Tensors *tensors)
{
    unsigned char *all[] = {tensors->qkv, tensors->dqkv, tensors->O, tensors->dO, tensors->LSE};
    for (size_t k = 0; k < sizeof all / sizeof all[0]; k++)
        if (all[k]) bench->machine.free(all[k]);
}

/* What all kernels work on in turn; 0, or -1 where there is no memory. */
static int tensors_create(const Bench *bench, const AttentionShape *shape, Tensors *tensors)
{
    int64_t N = shape->B * shape->T, C = shape->NH * shape->HS;
    tensors->qkv = random_tensor(bench, shape->dtype, N * 3 * C, 1);
    tensors->dqkv = random_tensor(bench, shape->dtype, N * 3 * C, 2);
    tensors->O = random_tensor(bench, shape->dtype, N * C, 3);
    tensors->dO = random_tensor(bench, shape->dtype, N * C, 4);
    tensors->LSE = random_tensor(bench, DTYPE_FP32, N * shape->NH, 5);
    return tensors->qkv && tensors->dqkv && tensors->O && tensors->dO && tensors->LSE ? 0 : -1;
}

static const char *call_kernel(const Bench *bench, const AttentionKernel *kernel, const AttentionShape *shape,
                               const Tensors *tensors, int backward)
{
    size_t element = shape->dtype == DTYPE_BF16 ? 2 : 4;
    float *LSE = (float *)(void *)tensors->LSE;
    AttentionInput Q = attention_packed_input(tensors->qkv, 0, shape, element);
    AttentionInput K = attention_packed_input(tensors->qkv, 1, shape, element);
    AttentionInput V = attention_packed_input(tensors->qkv, 2, shape, element);
    if (!backward)
        return kernel->forward(attention_rows_output(tensors->O, shape), LSE, tensors->saved, tensors->scratch, Q, K, V,
                               shape, bench->machine.stream);
    return kernel->backward(attention_packed_output(tensors->dqkv, 0, shape, element),
                            attention_packed_output(tensors->dqkv, 1, shape, element),
                            attention_packed_output(tensors->dqkv, 2, shape, element), tensors->scratch,
                            attention_rows_input(tensors->dO, shape), Q, K, V, attention_rows_input(tensors->O, shape), LSE,
                            tensors->saved, shape, bench->machine.stream);
}

/* One call with cold caches, in *seconds. */
static const char *time_call(const Bench *bench, const AttentionKernel *kernel, const AttentionShape *shape,
                             const Tensors *tensors, int backward, double *seconds)
{
    flush_caches(bench);
#ifdef HAVE_CUDA
    if (bench->machine.device == ATTENTION_CUDA) {
        cudaStream_t stream = (cudaStream_t)bench->machine.stream;
        cudaEvent_t start, end;
        float milliseconds = 0;
        cudaError_t error = cudaEventCreate(&start);
        if (error == cudaSuccess) error = cudaEventCreate(&end);
        if (error == cudaSuccess) error = cudaEventRecord(start, stream);
        if (error != cudaSuccess) return cudaGetErrorString(error);
        const char *fault = call_kernel(bench, kernel, shape, tensors, backward);
        if (fault) return fault;
        error = cudaEventRecord(end, stream);
        if (error == cudaSuccess) error = cudaEventSynchronize(end);
        if (error == cudaSuccess) error = cudaEventElapsedTime(&milliseconds, start, end);
        cudaEventDestroy(start);
        cudaEventDestroy(end);
        *seconds = milliseconds * 1e-3;
        return error == cudaSuccess ? NULL : cudaGetErrorString(error);
    }
#endif
    double start = now();
    const char *fault = call_kernel(bench, kernel, shape, tensors, backward);
    *seconds = now() - start;
    return fault;
}

static const char no_memory[] = "not enough memory for saved and scratch";

/* Times a kernel in the trainer's layout; at most `repeats` runs, fewer where they take long. Returns NULL or what the
 * kernel says. */
static const char *time_kernel(const Bench *bench, const AttentionKernel *kernel, const AttentionShape *shape,
                               Tensors *tensors, int repeats, Timing *timing)
{
    double *forward = allocate_zeros(repeats, sizeof(double)), *backward = allocate_zeros(repeats, sizeof(double));
    double spent = 0;
    tensors->saved = bench->machine.alloc(kernel->saved_bytes(shape) + 1);
    tensors->scratch = bench->machine.alloc(kernel->scratch_bytes(shape) + 1);
    const char *fault = tensors->saved && tensors->scratch ? NULL : no_memory;
    /* Run -1 warms up: pages are mapped, threads exist. It counts only where it alone takes long. */
    for (int run = -1; run < repeats && !fault && spent < 1; run++) {
        int at = run < 0 ? 0 : run;
        fault = time_call(bench, kernel, shape, tensors, 0, &forward[at]);
        if (!fault) fault = time_call(bench, kernel, shape, tensors, 1, &backward[at]);
        spent += forward[at] + backward[at];
        timing->runs = at + 1;
    }
    if (!fault) {
        timing->forward = median(forward, timing->runs);
        timing->backward = median(backward, timing->runs);
    }
    if (tensors->saved) bench->machine.free(tensors->saved);
    if (tensors->scratch) bench->machine.free(tensors->scratch);
    free(forward), free(backward);
    return fault;
}

/* --- one shape ----------------------------------------------------------------------------------------------------- */

static const char *const dtype_names[DTYPE_COUNT] = {"fp32", "bf16"};

/* A label as a field of a CSV. */
static void put_label(FILE *csv, const char *label)
{
    int quoted = strpbrk(label, ",\"\n\r") != NULL;
    if (quoted) fputc('"', csv);
    for (; *label; label++) {
        if (*label == '"') fputc('"', csv);
        fputc(*label, csv);
    }
    if (quoted) fputc('"', csv);
}

static void report(const Bench *bench, const Entry *entry, const AttentionShape *shape, const Timing *timing)
{
    const AttentionKernel *kernel = entry->kernel;
    double operations = forward_operations(shape), unit = bench->machine.device == ATTENTION_CUDA ? 1e12 : 1e9;
    double forward = operations / timing->forward / unit, backward = 2.5 * operations / timing->backward / unit;
    double megabytes = (double)(kernel->scratch_bytes(shape) + kernel->saved_bytes(shape)) / 1e6;
    printf("  %-*s %10.3f %10.3f %10.1f %10.1f %10.2f %6d\n", bench->label_width, entry->label, timing->forward * 1e3,
           timing->backward * 1e3, forward, backward, megabytes, timing->runs);
    if (!bench->csv) return;
    put_label(bench->csv, entry->label);
    fprintf(bench->csv, ",%lld,%lld,%lld,%lld,%s,%.6g,%.6g,%.5g,%.5g,%.5g,%d,\"%s\",\"%s\",\"%s\",%s,%s\n",
            (long long)shape->B, (long long)shape->NH, (long long)shape->T, (long long)shape->HS, dtype_names[shape->dtype],
            timing->forward * 1e3, timing->backward * 1e3, forward, backward, megabytes, timing->runs, bench->name,
            bench->built_with, bench->runs_with, bench->commit, bench->date);
}

/* A problem of a shape, solved; in sampled rows where `rows` is not NULL. */
static Problem make_problem(AttentionShape shape, int64_t *rows)
{
    Problem problem = problem_open(shape, INPUT_NORMAL, 29);
    if (rows) problem_solve_sampled(&problem, rows);
    else problem_solve(&problem);
    return problem;
}

/* Whether a kernel is right on a problem; where it needs TF32, on the one that allows it. */
static int verify(const Bench *bench, const AttentionKernel *kernel, const Problem *problem, int64_t *rows,
                  Judgement *judgement)
{
    AttentionShape shape = problem->shape;
    if (!shape.tf32 && needs_tf32(kernel, &shape, bench->machine.sm)) {
        shape.tf32 = 1;
        Problem rounded = make_problem(shape, rows);
        int status = verify(bench, kernel, &rounded, rows, judgement);
        problem_free(&rounded);
        return status;
    }
    if (rows) return check_sampled(kernel, problem, rows, &bench->machine, judgement);
    return check_kernel(kernel, problem, LAYOUT_PACKED, 0, &bench->machine, judgement);
}

static AttentionShape shape_at(const Bench *bench, const Options *options, int k)
{
    const int64_t *s = options->shapes[k];
    return (AttentionShape){.B = s[0], .NH = s[1], .T = s[2], .HS = s[3], .scale = attention_scale(s[3]),
                            .dtype = (Dtype)s[4], .deterministic = bench->machine.device == ATTENTION_CPU};
}

/* Why a kernel does not take a shape, NULL where it does, be it with TF32. */
static const char *refusal(const Bench *bench, const AttentionKernel *kernel, const AttentionShape *shape)
{
    return needs_tf32(kernel, shape, bench->machine.sm) ? NULL : kernel->refuse(shape, bench->machine.sm);
}

/* Ends the program where every kernel refuses every shape, with what the first says of the first. */
static void check_any_taken(const Bench *bench, const Options *options)
{
    char first[ATTENTION_WORDS] = "", words[ATTENTION_WORDS];
    for (int k = 0; k < options->shape_count; k++)
        for (int e = 0; e < bench->entry_count; e++) {
            AttentionShape shape = shape_at(bench, options, k);
            crash_words("crashed in attention kernel %s", bench->entries[e].label);
            const char *reason = refusal(bench, bench->entries[e].kernel, &shape);
            if (!reason) return;
            if (!*first) memcpy(first, attention_words(reason, words), sizeof first);
        }
    const int64_t *s = options->shapes[0];
    const char *others = options->shape_count > 1 ? ", or another of the shapes" : "";
    fprintf(stderr, "no kernel here takes B %lld, NH %lld, T %lld, HS %lld, %s%s: %s %s\n", (long long)s[0], (long long)s[1],
            (long long)s[2], (long long)s[3], dtype_names[s[4]], others, bench->entries[0].label, first);
    exit(2);
}

/* Verifies and times all kernels on one shape. */
static void bench_shape(Bench *bench, const AttentionShape *shape, const Options *options)
{
    AttentionShape small = *shape;
    small.B = 1;
    int64_t sampled[SAMPLED_ROWS], *rows = shape->T > 2048 ? sampled : NULL;
    int64_t most = rows ? 1 : 2;
    small.NH = shape->NH > most ? most : shape->NH;
    const char *unit = bench->machine.device == ATTENTION_CUDA ? "TFLOP/s" : "GFLOP/s";
    Problem problem = make_problem(small, rows);
    printf("B %lld, NH %lld, T %lld, HS %lld, %s\n", (long long)shape->B, (long long)shape->NH, (long long)shape->T,
           (long long)shape->HS, dtype_names[shape->dtype]);
    printf("  %-*s %10s %10s %10s %10s %10s %6s\n", bench->label_width, "kernel", "forward ms", "backward", unit, "backward",
           "memory MB", "runs");
    Tensors tensors;
    int has_memory = tensors_create(bench, shape, &tensors) == 0;
    for (int k = 0; k < bench->entry_count; k++) {
        Entry *entry = &bench->entries[k];
        const AttentionKernel *kernel = entry->kernel;
        int width = bench->label_width;
        crash_words("crashed in attention kernel %s", entry->label);
        Judgement judgement = {""};
        Timing timing = {0};
        char words[ATTENTION_WORDS];
        const char *reason = refusal(bench, kernel, shape);
        double operations = 3.5 * forward_operations(shape), guess = entry->rate ? operations / entry->rate : 0;
        if (reason) {
            printf("  %-*s refuses: %s\n", width, entry->label, attention_words(reason, words));
        } else if (!has_memory) {
            printf("  %-*s left out: not enough memory for the tensors\n", width, entry->label);
        } else if (guess > options->limit) {
            printf("  %-*s left out: about %.1f s a run, the limit is %.1f s\n", width, entry->label, guess, options->limit);
        } else if (verify(bench, kernel, &problem, rows, &judgement)) {
            printf("  %-*s WRONG, not timed: %s\n", width, entry->label, judgement.text);
            bench->faults++;
        } else if ((reason = time_kernel(bench, kernel, shape, &tensors, options->repeats, &timing)) != NULL) {
            printf("  %-*s %s: %s\n", width, entry->label, reason == no_memory ? "left out" : "failed",
                   attention_words(reason, words));
            bench->faults += reason != no_memory;
        } else {
            entry->rate = operations / (timing.forward + timing.backward);
            report(bench, entry, shape, &timing);
        }
        fflush(stdout);
    }
    tensors_free(bench, &tensors);
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

/* A name for this machine's processor: what it is sold as. */
static void name_machine(Bench *bench)
{
    char line[256] = "", *model = NULL;
#ifdef HAVE_CUDA
    struct cudaDeviceProp properties;
    if (bench->machine.device == ATTENTION_CUDA && cudaGetDeviceProperties(&properties, 0) == cudaSuccess) {
        snprintf(bench->name, sizeof bench->name, "%s", properties.name);
        snprintf(bench->built_with, sizeof bench->built_with, "CUDA %d.%d", CUDART_VERSION / 1000,
                 CUDART_VERSION % 1000 / 10);
        first_line(line, sizeof line, "nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null");
        snprintf(bench->runs_with, sizeof bench->runs_with, "driver %.64s", line[0] ? line : "unknown");
        return;
    }
#endif
    FILE *info = fopen("/proc/cpuinfo", "r");
    while (info && !model && fgets(line, sizeof line, info))
        if (strncmp(line, "model name", 10) == 0) model = strchr(line, ':');
    if (info) fclose(info);
    line[strcspn(line, "\n")] = 0;
    snprintf(bench->name, sizeof bench->name, "CPU %s", model ? model + 1 + strspn(model + 1, " ") : "unknown");
    snprintf(bench->built_with, sizeof bench->built_with, "%s", COMPILER);
    snprintf(bench->runs_with, sizeof bench->runs_with, "%d threads", omp_get_max_threads());
}

/* A name as a folder's: "cpu-amd-epyc", "nvidia-h200". */
static void name_folder(char *folder, size_t size, const char *name)
{
    size_t used = 0;
    int gap = 0;
    for (const char *c = name; *c && used + 2 < size; c++) {
        if (!isalnum((unsigned char)*c)) {
            gap = used > 0;
            continue;
        }
        if (gap) folder[used++] = '-';
        gap = 0;
        folder[used++] = (char)tolower((unsigned char)*c);
    }
    folder[used] = 0;
}

/* Opens the CSV: the file asked for, or the one of this machine, which a selection would spoil. Without a dev/results to
 * write to there is none. */
static void open_csv(Bench *bench, const Options *options)
{
    char path[512], folder[400], name[256];
    time_t seconds = time(NULL);
    const char *commit = getenv("FLASHGPT_COMMIT"), *unit = bench->machine.device == ATTENTION_CUDA ? "tflops" : "gflops";
    name_folder(name, sizeof name, bench->name);
    if (commit) snprintf(bench->commit, sizeof bench->commit, "%s", commit);
    else first_line(bench->commit, sizeof bench->commit, "git rev-parse --short HEAD 2>/dev/null");
    strftime(bench->date, sizeof bench->date, "%Y-%m-%d", gmtime(&seconds));
    snprintf(folder, sizeof folder, "dev/results/%s", name);
    snprintf(path, sizeof path, "%s/attention.csv", folder);
    if (!options->out && options->selective) return;
    if (!options->out && ((mkdir("dev/results", 0777) && errno != EEXIST) || (mkdir(folder, 0777) && errno != EEXIST))) {
        fprintf(stderr, "no CSV: cannot make %s here: %s (run it from the repository's root)\n", folder, strerror(errno));
        return;
    }
    bench->csv = fopen(options->out ? options->out : path, "w");
    if (!bench->csv) {
        fprintf(stderr, "cannot write %s: %s\n", options->out ? options->out : path, strerror(errno));
        exit(1);
    }
    fprintf(bench->csv, "kernel,B,NH,T,HS,dtype,forward_ms,backward_ms,forward_%s,backward_%s,memory_mb,runs,"
                        "machine,built_with,runs_with,commit,date\n", unit, unit);
}

/* Opens the device asked for; "auto" is a GPU where there is one. */
static void open_machine(Bench *bench, const char *device)
{
    char error[1024];
    int wants_gpu = strcmp(device, "cpu") != 0;
    if (wants_gpu && gpu_open(&bench->machine, error, sizeof error) == 0) {
        bench->flush = gpu.backend->alloc(FLUSH_BYTES_GPU, gpu.stream);
    } else if (strcmp(device, "cuda") == 0) {
        fprintf(stderr, "--device cuda: %s\n", error);
        exit(1);
    } else {
        bench->machine = cpu_machine;
        bench->flush = allocate_zeros((int64_t)FLUSH_BYTES_CPU, 1);
    }
    if (bench->flush) return;
    fprintf(stderr, "not enough memory to flush the caches with\n");
    exit(1);
}

static void add_kernel(Bench *bench, const AttentionKernel *kernel, const char *path)
{
    if (bench->entry_count < MAX_KERNELS) bench->entries[bench->entry_count++] = (Entry){.kernel = kernel, .path = path};
}

/* Adds the shared object at `path`. A wrong one is an error; one for another device is passed over unless it was named. */
static void add_object(Bench *bench, const char *path, int named)
{
    char error[1024];
    AttentionShape shape = {.B = 1, .T = 16, .NH = 1, .HS = 64, .scale = attention_scale(64), .deterministic = 1};
    const AttentionKernel *kernel = NULL;
    for (int dtype = 0; dtype < DTYPE_COUNT && !kernel; dtype++) { /* it may take one type alone */
        shape.dtype = (Dtype)dtype;
        kernel = attention_choose(path, bench->machine.device, &shape, bench->machine.sm, error, sizeof error);
    }
    if (!kernel && !named && strstr(error, "this run is on")) return;
    if (!kernel) {
        fprintf(stderr, "%s%s\n", error, named ? "" : " (left out)");
        if (named) exit(2);
        return;
    }
    for (int k = 0; k < bench->entry_count; k++) {
        if (bench->entries[k].kernel != kernel) continue; /* the loader gives what it has where it is the same file */
        if (!named) return;
        fprintf(stderr, "%s is given twice, also as %s\n", path, bench->entries[k].path);
        exit(2);
    }
    add_kernel(bench, kernel, path);
}

/* Gives every kernel a label of its own: its name, behind it its file where another has the same name. */
static void label_kernels(Bench *bench)
{
    bench->label_width = 16;
    for (int k = 0; k < bench->entry_count; k++) {
        Entry *entry = &bench->entries[k];
        const char *name = entry->kernel->name;
        int shared = 0;
        for (int other = 0; other < bench->entry_count; other++)
            shared |= other != k && strcmp(bench->entries[other].kernel->name, name) == 0;
        if (shared && entry->path) snprintf(entry->label, LABEL_BYTES, "%s (%s)", name, entry->path);
        else snprintf(entry->label, LABEL_BYTES, "%s", name);
        int width = (int)strlen(entry->label);
        if (width > bench->label_width) bench->label_width = width;
    }
}

/* The table, then the objects named, or those that `make kernels` has built. */
static void collect_kernels(Bench *bench, int count, char **paths)
{
    size_t table_count;
    const AttentionKernel *const *table = attention_table(&table_count);
    for (size_t k = 0; k < table_count; k++)
        if (table[k]->device == bench->machine.device) add_kernel(bench, table[k], NULL);
    for (int k = 0; k < count; k++) add_object(bench, paths[k], 1);
    if (count) return;
    char pattern[512];
    const char *build = getenv("BUILD");
    glob_t found = {0};
    snprintf(pattern, sizeof pattern, "%s/attention/*.so", build && *build ? build : "build");
    glob(pattern, 0, NULL, &found);
    for (size_t k = 0; k < found.gl_pathc; k++) add_object(bench, strdup(found.gl_pathv[k]), 0);
    globfree(&found);
}

/* Drops the kernels that --kernel does not name. */
static void keep_named(Bench *bench, const Options *options)
{
    int kept = 0, found[MAX_NAMES] = {0};
    for (int k = 0; k < bench->entry_count; k++) {
        int named = 0;
        for (int n = 0; n < options->name_count; n++)
            if (strcmp(bench->entries[k].kernel->name, options->names[n]) == 0) named = found[n] = 1;
        if (named) bench->entries[kept++] = bench->entries[k];
    }
    bench->entry_count = kept;
    for (int n = 0; n < options->name_count; n++) {
        if (found[n]) continue;
        fprintf(stderr, "--kernel %s: no such kernel here%s\n", options->names[n],
                options->objects ? "; those of build/attention stand back where files are given, give its file too" : "");
        exit(2);
    }
}

/* --- options ------------------------------------------------------------------------------------------------------- */

static void print_help(void)
{
    printf("Verifies and times attention kernels.\n\n"
           "  bench_attention [options] [KERNEL.so ...]\n\n"
           "  --device NAME       cpu or cuda (default: cuda where a GPU is visible)\n"
           "  --dtype NAME        fp32 or bf16 (default: what the device has, of the default shapes)\n"
           "  --shape B,NH,T,HS   a shape to measure; may be repeated (default: the trainer's; on a GPU the papers')\n"
           "  --kernel NAME       only this kernel; may be repeated (default: all of the table and of build/attention)\n"
           "  --repeats N         runs behind a median (default 15; fewer where they take more than 1 s together)\n"
           "  --limit SECONDS     leave out kernels that would take longer for one run (default 3, on a GPU 0.6)\n"
           "  --out FILE          the CSV (default dev/results/<machine>/attention.csv; of a selection: none)\n"
           "  --help              this text\n");
}

__attribute__((noreturn)) static void reject(const char *option, const char *got, const char *expected)
{
    fprintf(stderr, "--%s %s: expected %s\n", option, got, expected);
    exit(2);
}

static void add_shape(Options *options, const int64_t *shape, Dtype dtype)
{
    int64_t *to = options->shapes[options->shape_count++];
    memcpy(to, shape, 4 * sizeof *shape);
    to[4] = dtype;
}

static void parse_shape(Options *options, const char *text)
{
    long long B, NH, T, HS;
    int end = 0;
    if (sscanf(text, "%lld,%lld,%lld,%lld%n", &B, &NH, &T, &HS, &end) != 4 || text[end] || B < 1 || NH < 1 || T < 1 ||
        HS < 1)
        reject("shape", text, "four positive integers B,NH,T,HS");
    /* Nothing measures so much, and sizes below it do not overflow. */
    if ((double)B * (double)T * (double)NH * (double)HS > (double)((int64_t)1 << 40) || T > (int64_t)1 << 30)
        reject("shape", text, "at most 2^40 elements of Q, and T at most 2^30");
    if (options->shape_count == MAX_SHAPES / DTYPE_COUNT) reject("shape", text, "at most 32 shapes");
    add_shape(options, (int64_t[]){B, NH, T, HS}, DTYPE_FP32);
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

static const char *parse_name(const char *option, const char *text, const char *one, const char *other)
{
    char expected[64];
    snprintf(expected, sizeof expected, "%s or %s", one, other);
    if (strcmp(text, one) != 0 && strcmp(text, other) != 0) reject(option, text, expected);
    return text;
}

static Options parse_options(int argc, char **argv)
{
    static const struct option table[] = {
        {"device", required_argument, NULL, 'd'}, {"dtype", required_argument, NULL, 't'},
        {"shape", required_argument, NULL, 's'}, {"kernel", required_argument, NULL, 'k'},
        {"repeats", required_argument, NULL, 'r'}, {"limit", required_argument, NULL, 'l'},
        {"out", required_argument, NULL, 'o'}, {"help", no_argument, NULL, 'h'}, {0},
    };
    Options options = {.repeats = 15, .limit = -1, .device = "auto"};
    for (int option; (option = getopt_long(argc, argv, "", table, NULL)) != -1;) switch (option) {
        case 'd': options.device = parse_name("device", optarg, "cpu", "cuda"); break;
        case 't': options.dtype = parse_name("dtype", optarg, "fp32", "bf16"); break;
        case 's': parse_shape(&options, optarg); break;
        case 'k':
            if (options.name_count == MAX_NAMES) reject("kernel", optarg, "at most 16 names");
            options.names[options.name_count++] = optarg;
            break;
        case 'r': options.repeats = (int)parse_number("repeats", optarg, 1, 10000); break;
        case 'l': options.limit = parse_number("limit", optarg, 0, 1e6); break;
        case 'o': options.out = optarg; break;
        case 'h': print_help(); exit(0);
        default: exit(2);
        }
    options.objects = argc - optind;
    options.selective = options.shape_count || options.name_count || options.dtype || optind < argc;
    return options;
}

/* What depends on the device: the shapes measured where none was asked for, the types, the limit. */
static void complete_options(Options *options, AttentionDevice device)
{
    static const int64_t on_cpu[][4] = {{12, 4, 64, 32}, {4, 12, 64, 64}, {8, 6, 256, 64}, {4, 12, 1024, 64},
                                        {1, 8, 2048, 128}};
    static const int64_t on_gpu[][4] = {{64, 12, 1024, 64}, {16, 12, 1024, 64}, {8, 32, 2048, 64}, {4, 32, 4096, 64},
                                        {1, 32, 16384, 64}, {16, 16, 1024, 128}, {4, 16, 4096, 128}, {1, 16, 16384, 128}};
    int has_gpu = device == ATTENTION_CUDA, given = options->shape_count;
    size_t count = has_gpu ? sizeof on_gpu / sizeof on_gpu[0] : sizeof on_cpu / sizeof on_cpu[0];
    for (size_t k = 0; !given && k < count; k++) add_shape(options, has_gpu ? on_gpu[k] : on_cpu[k], DTYPE_FP32);
    int fp32_only = options->dtype ? strcmp(options->dtype, "fp32") == 0 : !has_gpu;
    int shapes = options->shape_count;
    for (int k = 0; k < shapes && !fp32_only; k++) {
        if (options->dtype) options->shapes[k][4] = DTYPE_BF16;
        else add_shape(options, options->shapes[k], DTYPE_BF16);
    }
    if (options->limit < 0) options->limit = has_gpu ? 0.6 : 3;
}

int main(int argc, char **argv)
{
    Options options = parse_options(argc, argv);
    static Bench bench;
    open_machine(&bench, options.device);
    complete_options(&options, bench.machine.device);
    collect_kernels(&bench, argc - optind, argv + optind);
    if (options.name_count) keep_named(&bench, &options);
    label_kernels(&bench);
    check_any_taken(&bench, &options);
    name_machine(&bench);
    open_csv(&bench, &options);
    printf("%s, %s, %s\n", bench.name, bench.runs_with, bench.built_with);
    for (int k = 0; k < options.shape_count; k++) {
        AttentionShape shape = shape_at(&bench, &options, k);
        bench_shape(&bench, &shape, &options);
    }
    if (bench.machine.device == ATTENTION_CUDA) {
        gpu.backend->free(bench.flush, gpu.stream);
        gpu_close();
    } else {
        free(bench.flush);
    }
    if (bench.csv && fclose(bench.csv) != 0) {
        fprintf(stderr, "cannot write the CSV: %s\n", strerror(errno));
        return 1;
    }
    return bench.faults ? 1 : 0;
}
