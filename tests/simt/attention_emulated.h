/* attention_emulated.h - what every CUDA attention kernel is tried with under the emulation: against the float64 truth, by
 * the bounds and with the fences of tests/attention_check.h; with large logits, odd scales and numbers that are none; and
 * with threads in other orders, which must not change a bit. A test of one kernel includes its .cu file after this header,
 * names it in a Subject, and adds what concerns this kernel alone.
 */
#ifndef ATTENTION_EMULATED_H
#define ATTENTION_EMULATED_H

#include <vector>

#include "tests/attention_check.h"
#include "tests/test.h"

#include "attention/device.h"

struct Subject {
    const AttentionKernel *kernel;
    Machine machine;
    std::vector<Dtype> dtypes; /* that it is tried with */
    int deterministic;         /* asked of it in every shape */
    int tf32 = 0;              /* allowed in every shape */
};

struct ShapeSize {
    int64_t B, NH, T, HS;
};

static inline void *device_alloc(size_t bytes)
{
    void *memory = NULL;
    return cudaMalloc(&memory, bytes) == cudaSuccess ? memory : NULL;
}
static inline void device_free(void *memory) { cudaFree(memory); }
static inline void device_copy(void *to, const void *from, size_t bytes) { cudaMemcpy(to, from, bytes, cudaMemcpyDefault); }

/* A kernel to be tried with these types on an emulated GPU of this compute capability, from now on the one that there is. */
static inline Subject subject_create(const AttentionKernel *kernel, int sm, std::vector<Dtype> dtypes, int deterministic = 1)
{
    simt_set_sm(sm);
    return {kernel, {ATTENTION_CUDA, sm, NULL, device_alloc, device_free, device_copy, device_copy}, dtypes, deterministic};
}

static inline const char *dtype_name(Dtype dtype) { return dtype == DTYPE_BF16 ? "bf16" : "fp32"; }

static inline AttentionShape shape_of(const Subject &subject, ShapeSize size, Dtype dtype)
{
    return {size.B, size.T, size.NH, size.HS, attention_scale(size.HS), dtype, subject.deterministic, subject.tf32};
}

static inline void check_problem(const Subject &subject, const Problem *problem, Layout layout, int unaligned)
{
    const AttentionShape *shape = &problem->shape;
    Judgement judgement = {""};
    int status = check_kernel(subject.kernel, problem, layout, unaligned, &subject.machine, &judgement);
    CHECK(status == 0, "%s B %d NH %d T %d HS %d, layout %s%s: %s", dtype_name(shape->dtype), (int)shape->B, (int)shape->NH,
          (int)shape->T, (int)shape->HS, layout_names[layout], unaligned_words(unaligned), judgement.text);
}

/* Layouts and alignments in turn. */
static inline void test_shapes(const Subject &subject, const std::vector<ShapeSize> &sizes)
{
    for (size_t k = 0; k < sizes.size(); k++)
        for (Dtype dtype : subject.dtypes) {
            AttentionShape shape = shape_of(subject, sizes[k], dtype);
            Problem problem = problem_create(shape, INPUT_NORMAL, (uint64_t)(shape.T * 1000 + shape.HS));
            TEST("%s: %s, T %d, HS %d", subject.kernel->name, dtype_name(dtype), (int)shape.T, (int)shape.HS);
            size_t turn = k + (size_t)dtype;
            check_problem(subject, &problem, (Layout)(turn % LAYOUT_FAR), turn / LAYOUT_FAR % 2 ? UNALIGNED : ALIGNED);
            problem_free(&problem);
        }
}

/* Tensors that are aligned beside one that is not: what is true of one must not be taken to be true of another. */
static inline void test_alignments(const Subject &subject, ShapeSize size)
{
    TEST("%s: one tensor unaligned, T %d HS %d%s", subject.kernel->name, (int)size.T, (int)size.HS,
         subject.deterministic ? ", deterministic" : "");
    Problem problem = problem_create(shape_of(subject, size, subject.dtypes[0]), INPUT_NORMAL, 31);
    for (int tensor = 0; tensor < TENSOR_COUNT; tensor++) check_problem(subject, &problem, LAYOUT_HEADS, 1 << tensor);
    problem_free(&problem);
}

/* Rows that begin at multiples of 16 bytes and do not end at one. */
static inline void test_padded(const Subject &subject, const std::vector<ShapeSize> &sizes)
{
    TEST("%s: head dimensions that are no multiple of 16 bytes, in rows padded to one", subject.kernel->name);
    for (ShapeSize size : sizes)
        for (Dtype dtype : subject.dtypes) {
            Problem problem = problem_create(shape_of(subject, size, dtype), INPUT_NORMAL, 41);
            check_problem(subject, &problem, LAYOUT_PADDED, ALIGNED);
            problem_free(&problem);
        }
}

static inline void test_logits(const Subject &subject, const std::vector<ShapeSize> &sizes)
{
    static const char *const names[] = {"normal", "+1e5", "-1e5", "-1e5 to 1e5"};
    for (int kind = INPUT_HIGH; kind <= INPUT_SPREAD; kind++)
        for (Dtype dtype : subject.dtypes) {
            TEST("%s: %s, logits of %s", subject.kernel->name, dtype_name(dtype), names[kind]);
            for (ShapeSize size : sizes) {
                Problem problem = problem_create(shape_of(subject, size, dtype), (InputKind)kind, 11);
                check_problem(subject, &problem, LAYOUT_PACKED, 0);
                problem_free(&problem);
            }
        }
}

/* Logits beyond what a maximum can be subtracted from without care: 1e11, all the same; up to 1e10, 1e14 and 1e20. */
static inline void test_huge(const Subject &subject, ShapeSize size)
{
    static const float factors[] = {0, 0x1p16f, 0x1p23f, 0x1p33f};
    TEST("%s: logits of 1e10 to 1e20, T %d HS %d", subject.kernel->name, (int)size.T, (int)size.HS);
    for (float factor : factors)
        for (Dtype dtype : subject.dtypes) {
            if (size.HS > 64 && factor != 0) continue; /* sums of more terms, in whatever order, are off by more */
            Problem problem = problem_create(shape_of(subject, size, dtype), INPUT_NORMAL, 37);
            problem_enlarge(&problem, factor);
            check_problem(subject, &problem, LAYOUT_HEADS, 0);
            problem_free(&problem);
        }
}

/* One long problem, in sampled rows. */
static inline void test_long(const Subject &subject, ShapeSize size)
{
    TEST("%s: T %d, HS %d, in sampled rows", subject.kernel->name, (int)size.T, (int)size.HS);
    int64_t rows[SAMPLED_ROWS];
    Judgement judgement = {""};
    Problem problem = problem_open(shape_of(subject, size, subject.dtypes[0]), INPUT_NORMAL, 37);
    problem_solve_sampled(&problem, rows);
    CHECK(check_sampled(subject.kernel, &problem, rows, &subject.machine, &judgement) == 0, "%s", judgement.text);
    problem_free(&problem);
}

/* Scales of so many times the usual: with 0 every row is a mean, with a large one P is nearly a single key. */
static inline void test_scales(const Subject &subject, ShapeSize size, const std::vector<float> &factors)
{
    TEST("%s: zero, small, large and negative scales, HS %d", subject.kernel->name, (int)size.HS);
    for (float factor : factors)
        for (Dtype dtype : subject.dtypes) {
            AttentionShape shape = shape_of(subject, size, dtype);
            shape.scale *= factor;
            Problem problem = problem_create(shape, INPUT_NORMAL, 29);
            check_problem(subject, &problem, LAYOUT_HEADS, 0);
            problem_free(&problem);
        }
}

/* A value that is no number, in each input in turn and in each of these rows of the last head: the truth says where it may
 * arrive. */
static inline void test_not_finite(const Subject &subject, ShapeSize size, const std::vector<int64_t> &rows)
{
    static const char *const parts[] = {"Q", "K", "V", "dO"};
    static const float values[] = {NAN, INFINITY, -INFINITY};
    Dtype dtype = subject.dtypes[0];
    for (int part = 0; part < INPUT_COUNT; part++) {
        TEST("%s: NaN, +inf and -inf in one row of %s reach no row they may not, T %d HS %d", subject.kernel->name,
             parts[part], (int)size.T, (int)size.HS);
        for (float value : values)
            for (int64_t row : rows) {
                Problem problem = problem_create(shape_of(subject, size, dtype), INPUT_NORMAL, 13);
                problem.input[part][((size.B * size.NH - 1) * size.T + row) * size.HS + 3] = value;
                problem_solve(&problem);
                check_problem(subject, &problem, LAYOUT_HEADS, 0);
                problem_free(&problem);
            }
    }
}

/* For kernels that promise the same bits every time. A result in bf16 hardly ever shows in which order it was summed up,
 * unless the sum cancels. */
static inline void test_orders(const Subject &subject, const std::vector<ShapeSize> &sizes)
{
    TEST("%s: the order of threads and blocks changes no bit", subject.kernel->name);
    for (ShapeSize size : sizes) {
        Problem problem = problem_open(shape_of(subject, size, subject.dtypes[0]), INPUT_NORMAL, 23);
        problem_cancel(&problem);
        Result first = result_create(&problem.shape), again = result_create(&problem.shape);
        Judgement judgement = {""};
        int status = 0;
        for (uint64_t seed = 1; seed <= 3 && !status; seed++) {
            simt_seed(seed);
            status = run_kernel(subject.kernel, &problem, LAYOUT_PACKED, 0, &subject.machine, seed == 1 ? &first : &again,
                                &judgement);
            if (!status && seed > 1) status = compare_results(&problem.shape, &first, &again, &judgement);
        }
        CHECK(status == 0, "T %d HS %d: %s", (int)size.T, (int)size.HS, judgement.text);
        result_free(&first);
        result_free(&again);
        problem_free(&problem);
    }
}

static inline void test_empty(const Subject &subject)
{
    const AttentionKernel *kernel = subject.kernel;
    TEST("%s: takes empty shapes", kernel->name);
    AttentionInput in = {NULL, 0, 0, 0};
    AttentionOutput out = {NULL, 0, 0, 0};
    for (int k = 0; k < 3; k++) {
        AttentionShape shape = shape_of(subject, {k != 0, k != 1, k != 2, 16}, subject.dtypes[0]);
        CHECK(!kernel->refuse(&shape, 90), "refuses an empty shape: %s", kernel->refuse(&shape, 90));
        const char *forward = kernel->forward(out, NULL, NULL, NULL, in, in, in, &shape, NULL);
        const char *backward = kernel->backward(out, out, out, NULL, in, in, in, in, in, NULL, NULL, &shape, NULL);
        CHECK(!forward && !backward, "empty: forward: %s, backward: %s", forward, backward);
    }
}

/* Opens the test of what a kernel refuses: HS of 0 and 2^40 heads, like every kernel, but not `good`. */
static inline void test_refusals(const Subject &subject, AttentionShape good)
{
    const AttentionKernel *kernel = subject.kernel;
    TEST("%s: refuses what it cannot do", kernel->name);
    CHECK(!kernel->refuse(&good, subject.machine.sm), "refuses: %s", kernel->refuse(&good, subject.machine.sm));
    AttentionShape bad = good;
    bad.HS = 0;
    CHECK(kernel->refuse(&bad, 90), "takes HS 0");
    bad = good;
    bad.B = (int64_t)1 << 40;
    CHECK(kernel->refuse(&bad, 90), "takes 2^40 heads");
}

#endif
