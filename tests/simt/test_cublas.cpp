/* test_cublas.cpp - attention/cublas.cu on the CPU, with plain loops for the library (tests/simt/cublas_v2.h): against the
 * float64 truth, by the bounds and with the fences of tests/attention_check.h; with numbers that are none; and with threads
 * in other orders, which must not change a bit.
 */
#include "tests/attention_check.h"
#include "tests/test.h"

#include "attention/cublas.cu"

static void *device_alloc(size_t bytes)
{
    void *memory = NULL;
    return cudaMalloc(&memory, bytes) == cudaSuccess ? memory : NULL;
}
static void device_free(void *memory) { cudaFree(memory); }
static void device_copy(void *to, const void *from, size_t bytes) { cudaMemcpy(to, from, bytes, cudaMemcpyDefault); }

static const Machine machine = {ATTENTION_CUDA, 80, NULL, device_alloc, device_free, device_copy, device_copy};

static AttentionShape shape_of(int64_t B, int64_t NH, int64_t T, int64_t HS, Dtype dtype)
{
    return {B, T, NH, HS, attention_scale(HS), dtype, 1};
}

static void check_problem(const Problem *problem, Layout layout, int unaligned)
{
    const AttentionShape *shape = &problem->shape;
    Judgement judgement = {""};
    int status = check_kernel(&attention_cublas, problem, layout, unaligned, &machine, &judgement);
    CHECK(status == 0, "%s B %d NH %d T %d HS %d, layout %s%s: %s", shape->dtype == DTYPE_BF16 ? "bf16" : "fp32",
          (int)shape->B, (int)shape->NH, (int)shape->T, (int)shape->HS, layout_names[layout], unaligned ? " unaligned" : "",
          judgement.text);
}

/* Every length and every head dimension of the lists; more heads than sequences and fewer; types, layouts and alignments in
 * turn. */
static void test_shapes(void)
{
    static const struct { int64_t B, NH, T, HS; } shapes[] = {
        {2, 3, 1, 8},   {1, 3, 1, 64},   {2, 2, 2, 40},  {1, 2, 3, 1},    {1, 1, 3, 256},  {1, 2, 15, 3},  {2, 1, 16, 16},
        {1, 1, 300, 8}, {1, 2, 513, 16}, {1, 1, 1800, 1},                     /* two bands of rows, three, and all eight */
        {1, 3, 17, 32}, {1, 1, 17, 96},  {1, 2, 63, 16}, {1, 1, 63, 72},  {1, 1, 64, 128}, {1, 2, 64, 31}, {1, 1, 65, 64},
        {1, 1, 65, 40}, {1, 1, 65, 104}, {1, 1, 65, 80}, {1, 1, 66, 129}, {1, 2, 100, 8},  {1, 1, 130, 64}, {1, 1, 130, 16},
    };
    for (size_t k = 0; k < sizeof shapes / sizeof shapes[0]; k++)
        for (int dtype = 0; dtype < DTYPE_COUNT; dtype++) {
            AttentionShape shape = shape_of(shapes[k].B, shapes[k].NH, shapes[k].T, shapes[k].HS, (Dtype)dtype);
            Problem problem = problem_create(shape, INPUT_NORMAL, (uint64_t)(shape.T * 1000 + shape.HS));
            TEST("cublas: %s, T %d, HS %d", dtype == DTYPE_BF16 ? "bf16" : "fp32", (int)shape.T, (int)shape.HS);
            size_t turn = k + (size_t)dtype;
            check_problem(&problem, (Layout)(turn % LAYOUT_FAR), (int)(turn / LAYOUT_FAR % 2));
            problem_free(&problem);
        }
}

static void test_logits(void)
{
    static const char *const names[] = {"normal", "+1e5", "-1e5", "-1e5 to 1e5"};
    for (int kind = INPUT_HIGH; kind <= INPUT_SPREAD; kind++)
        for (int dtype = 0; dtype < DTYPE_COUNT; dtype++) {
            TEST("cublas: %s, logits of %s", dtype == DTYPE_BF16 ? "bf16" : "fp32", names[kind]);
            Problem problem = problem_create(shape_of(1, 1, 70, 16, (Dtype)dtype), (InputKind)kind, 11);
            check_problem(&problem, LAYOUT_PACKED, 0);
            problem_free(&problem);
        }
}

/* Scales other than the usual: with 0 every row is a mean, with a large one P is nearly a single key. */
static void test_scales(void)
{
    static const float scales[] = {0, 0.01f, 3};
    TEST("cublas: zero, small and large scales");
    for (float scale : scales) {
        AttentionShape shape = shape_of(1, 1, 20, 8, DTYPE_FP32);
        shape.scale = scale;
        Problem problem = problem_create(shape, INPUT_NORMAL, 29);
        check_problem(&problem, LAYOUT_HEADS, 0);
        problem_free(&problem);
    }
}

/* A value that is no number, in each input in turn: the truth says where it may arrive. */
static void test_not_finite(void)
{
    static const char *const parts[] = {"Q", "K", "V", "dO"};
    static const int64_t rows[] = {0, 21, 66};
    for (int part = 0; part < INPUT_COUNT; part++) {
        TEST("cublas: NaN, +inf and -inf in one row of %s reach no row they may not", parts[part]);
        for (int k = 0; k < 9; k++) {
            Problem problem = problem_create(shape_of(1, 2, 67, 8, DTYPE_FP32), INPUT_NORMAL, 13);
            problem.input[part][(67 + rows[k % 3]) * 8 + 3] = k < 3 ? NAN : k < 6 ? INFINITY : -INFINITY;
            problem_solve(&problem);
            check_problem(&problem, LAYOUT_HEADS, 0);
            problem_free(&problem);
        }
    }
}

static void test_orders(void)
{
    static const struct { int64_t NH, T, HS; } cases[] = {{3, 70, 24}, {1, 129, 72}, {1, 66, 200}};
    TEST("cublas: the order of threads and blocks changes no bit");
    for (const auto &one : cases) {
        Problem problem = problem_create(shape_of(1, one.NH, one.T, one.HS, DTYPE_FP32), INPUT_NORMAL, 23);
        Result first = result_create(&problem.shape), again = result_create(&problem.shape);
        Judgement judgement = {""};
        int status = 0;
        for (uint64_t seed = 1; seed <= 3 && !status; seed++) {
            simt_seed(seed);
            status = run_kernel(&attention_cublas, &problem, LAYOUT_PACKED, 0, &machine, seed == 1 ? &first : &again,
                                &judgement);
            if (!status && seed > 1) status = compare_results(&problem.shape, &first, &again, &judgement);
        }
        CHECK(status == 0, "T %d HS %d: %s", (int)one.T, (int)one.HS, judgement.text);
        result_free(&first);
        result_free(&again);
        problem_free(&problem);
    }
}

static void test_refusals(void)
{
    const AttentionKernel *kernel = &attention_cublas;
    TEST("cublas: refuses what it cannot do, and takes empty shapes");
    AttentionShape good = shape_of(1, 1, 4, 8, DTYPE_FP32), bad = good;
    CHECK(!kernel->refuse(&good, 75), "refuses: %s", kernel->refuse(&good, 75));
    AttentionShape bf16 = shape_of(1, 1, 4, 8, DTYPE_BF16);
    CHECK(kernel->refuse(&bf16, 75) && !kernel->refuse(&bf16, 80), "bf16: takes sm_75 or refuses sm_80");
    CHECK(kernel->refuse(&good, 70), "takes sm_70");
    bad.T = (int64_t)1 << 30;
    CHECK(kernel->refuse(&bad, 90), "takes T 2^30, with 2^60 elements");
    bad = good;
    bad.HS = 0;
    CHECK(kernel->refuse(&bad, 90), "takes HS 0");
    bad = good;
    bad.B = (int64_t)1 << 40;
    CHECK(kernel->refuse(&bad, 90), "takes 2^40 heads");
    AttentionInput in = {NULL, 0, 0, 0};
    AttentionOutput out = {NULL, 0, 0, 0};
    for (int k = 0; k < 3; k++) {
        AttentionShape shape = shape_of(k != 0, k != 1, k != 2, 16, DTYPE_FP32);
        CHECK(!kernel->refuse(&shape, 90), "refuses an empty shape: %s", kernel->refuse(&shape, 90));
        const char *forward = kernel->forward(out, NULL, NULL, NULL, in, in, in, &shape, NULL);
        const char *backward = kernel->backward(out, out, out, NULL, in, in, in, in, in, NULL, NULL, &shape, NULL);
        CHECK(!forward && !backward, "empty: forward: %s, backward: %s", forward, backward);
    }
}

int main(void)
{
    simt_set_sm(80);
    test_refusals();
    test_shapes();
    test_logits();
    test_scales();
    test_not_finite();
    test_orders();
    return test_end();
}
