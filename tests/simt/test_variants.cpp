/* test_variants.cpp - the standalone CUDA attention kernels of dev/attention, on the CPU: each against the float64 truth, by
 * the bounds and with the fences of tests/attention_check.h, at shapes that do not fit its tiles; and with threads in other
 * orders, which must not change a bit.
 */
#include "tests/attention_check.h"
#include "tests/test.h"

#include "attention/device.h"

#include <math.h>

/* Each file is whole, so each gets a namespace, and its kernel a name of its own. What they include is included above. */
#define attention_kernel flash1_rows
namespace Flash1 {
#include "dev/attention/flash1_rows.cu"
}
#undef attention_kernel

#define attention_kernel flash2_coalesced
namespace Flash2 {
#include "dev/attention/flash2_coalesced.cu"
}
#undef attention_kernel

#define attention_kernel flash3_registers
namespace Flash3 {
#include "dev/attention/flash3_registers.cu"
}
#undef attention_kernel

#define attention_kernel flash4_vectors
namespace Flash4 {
#include "dev/attention/flash4_vectors.cu"
}
#undef attention_kernel

static const AttentionKernel *const variants[] = {&Flash1::flash1_rows, &Flash2::flash2_coalesced, &Flash3::flash3_registers,
                                                  &Flash4::flash4_vectors};

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

static void check_shape(const AttentionKernel *kernel, const AttentionShape *shape, InputKind kind, Layout layout)
{
    Problem problem = problem_create(*shape, kind, (uint64_t)(shape->T * 1000 + shape->HS));
    Judgement judgement = {""};
    int status = check_kernel(kernel, &problem, layout, layout % 2, &machine, &judgement);
    CHECK(status == 0, "B %d NH %d T %d HS %d, layout %s: %s", (int)shape->B, (int)shape->NH, (int)shape->T, (int)shape->HS,
          layout_names[layout], judgement.text);
    problem_free(&problem);
}

/* Lengths around one and two tiles, head sizes around the paddings; a layout each in turn. */
static void test_shapes(const AttentionKernel *kernel)
{
    static const struct { int64_t B, NH, T, HS; } shapes[] = {
        {2, 2, 1, 8},   {1, 3, 3, 1},   {1, 2, 17, 40}, {1, 1, 31, 128}, {1, 2, 33, 3},  {2, 1, 64, 32},
        {1, 2, 65, 31}, {1, 1, 66, 72}, {1, 1, 97, 64}, {1, 1, 129, 33}, {1, 1, 130, 96}, {1, 1, 201, 12},
    };
    for (int dtype = 0; dtype < DTYPE_COUNT; dtype++)
        for (size_t k = 0; k < sizeof shapes / sizeof shapes[0]; k++) {
            AttentionShape shape = shape_of(shapes[k].B, shapes[k].NH, shapes[k].T, shapes[k].HS, (Dtype)dtype);
            TEST("%s: %s T %d, HS %d", kernel->name, dtype == DTYPE_BF16 ? "bf16" : "fp32", (int)shape.T, (int)shape.HS);
            check_shape(kernel, &shape, INPUT_NORMAL, (Layout)((k + (size_t)dtype) % LAYOUT_FAR));
        }
}

static void test_logits(const AttentionKernel *kernel)
{
    static const char *const names[] = {"normal", "+1e5", "-1e5", "-1e5 to 1e5"};
    for (int kind = INPUT_HIGH; kind <= INPUT_SPREAD; kind++) {
        AttentionShape shape = shape_of(1, 1, 67, 16, DTYPE_FP32);
        TEST("%s: logits of %s", kernel->name, names[kind]);
        check_shape(kernel, &shape, (InputKind)kind, LAYOUT_PACKED);
    }
}

/* A value that is no number, in each input in turn: the truth says where it may arrive. */
static void test_not_finite(const AttentionKernel *kernel)
{
    static const char *const parts[] = {"Q", "K", "V", "dO"};
    static const int64_t rows[] = {0, 21, 66};
    for (int part = 0; part < INPUT_COUNT; part++) {
        TEST("%s: NaN and +inf in one row of %s reach no row they may not", kernel->name, parts[part]);
        for (int k = 0; k < 6; k++) {
            Problem problem = problem_create(shape_of(1, 2, 67, 8, DTYPE_FP32), INPUT_NORMAL, 13);
            Judgement judgement = {""};
            problem.input[part][(67 + rows[k % 3]) * 8 + 3] = k < 3 ? NAN : INFINITY;
            problem_solve(&problem);
            CHECK(check_kernel(kernel, &problem, LAYOUT_HEADS, 0, &machine, &judgement) == 0, "row %d: %s",
                  (int)rows[k % 3], judgement.text);
            problem_free(&problem);
        }
    }
}

static void test_orders(const AttentionKernel *kernel)
{
    TEST("%s: the order of threads and blocks changes no bit", kernel->name);
    Problem problem = problem_create(shape_of(1, 2, 70, 24, DTYPE_FP32), INPUT_NORMAL, 23);
    Result first = result_create(&problem.shape), again = result_create(&problem.shape);
    Judgement judgement = {""};
    int status = 0;
    for (uint64_t seed = 1; seed <= 4 && !status; seed++) {
        simt_seed(seed);
        status = run_kernel(kernel, &problem, LAYOUT_PACKED, 0, &machine, seed == 1 ? &first : &again, &judgement);
        if (!status && seed > 1) status = compare_results(&problem.shape, &first, &again, &judgement);
    }
    CHECK(status == 0, "%s", judgement.text);
    result_free(&first);
    result_free(&again);
    problem_free(&problem);
}

static void test_refusals(const AttentionKernel *kernel)
{
    TEST("%s: refuses what it cannot do, and takes empty shapes", kernel->name);
    AttentionShape good = shape_of(1, 1, 4, 8, DTYPE_FP32), bad = good;
    CHECK(!kernel->refuse(&good, 80), "refuses: %s", kernel->refuse(&good, 80));
    CHECK(kernel->refuse(&good, 75), "takes sm_75");
    bad.HS = 129;
    CHECK(kernel->refuse(&bad, 90), "takes HS 129");
    bad.HS = 0;
    CHECK(kernel->refuse(&bad, 90), "takes HS 0");
    bad = good;
    bad.B = (int64_t)1 << 40;
    CHECK(kernel->refuse(&bad, 90), "takes 2^40 heads");
    AttentionInput in = {NULL, 0, 0, 0};
    AttentionOutput out = {NULL, 0, 0, 0};
    for (int k = 0; k < 3; k++) {
        AttentionShape shape = shape_of(k != 0, k != 1, k != 2, 16, DTYPE_FP32);
        const char *forward = kernel->forward(out, NULL, NULL, NULL, in, in, in, &shape, NULL);
        const char *backward = kernel->backward(out, out, out, NULL, in, in, in, in, in, NULL, NULL, &shape, NULL);
        CHECK(!forward && !backward, "empty: forward: %s, backward: %s", forward, backward);
    }
}

int main(void)
{
    simt_set_sm(80);
    for (const AttentionKernel *kernel : variants) {
        test_shapes(kernel);
        test_logits(kernel);
        test_not_finite(kernel);
        test_orders(kernel);
        test_refusals(kernel);
    }
    return test_end();
}
