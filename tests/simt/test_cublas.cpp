/* test_cublas.cpp - attention/cublas.cu on the CPU, with plain loops for the library (tests/simt/cublas_v2.h): against the
 * float64 truth, by the bounds and with the fences of tests/attention_check.h; with numbers that are none; and with threads
 * in other orders, which must not change a bit.
 */
#include "tests/simt/attention_emulated.h"

#include "attention/cublas.cu"

static void test_limits(const Subject &subject)
{
    const AttentionKernel *kernel = subject.kernel;
    AttentionShape good = shape_of(subject, {1, 1, 4, 8}, DTYPE_FP32), bad = good;
    test_refusals(subject, good);
    CHECK(!kernel->refuse(&good, 75), "refuses: %s", kernel->refuse(&good, 75));
    CHECK(kernel->refuse(&good, 70), "takes sm_70");
    AttentionShape bf16 = shape_of(subject, {1, 1, 4, 8}, DTYPE_BF16);
    CHECK(kernel->refuse(&bf16, 75) && !kernel->refuse(&bf16, 80), "bf16: takes sm_75 or refuses sm_80");
    bad.T = (int64_t)1 << 30;
    CHECK(kernel->refuse(&bad, 90), "takes T 2^30, with 2^60 elements");
}

int main(void)
{
    Subject subject = subject_create(&attention_cublas, 80, {DTYPE_FP32, DTYPE_BF16});
    test_limits(subject);
    test_empty(subject);
    /* Every length and every head dimension of the lists; more heads than sequences and fewer. */
    test_shapes(subject, {
        {2, 3, 1, 8},   {1, 3, 1, 64},   {2, 2, 2, 40},  {1, 2, 3, 1},    {1, 1, 3, 256},  {1, 2, 15, 3},  {2, 1, 16, 16},
        {1, 1, 300, 8}, {1, 2, 513, 16}, {1, 1, 1800, 1},                     /* two bands of rows, three, and all eight */
        {1, 3, 17, 32}, {1, 1, 17, 96},  {1, 2, 63, 16}, {1, 1, 63, 72},  {1, 1, 64, 128}, {1, 2, 64, 31}, {1, 1, 65, 64},
        {1, 1, 65, 40}, {1, 1, 65, 104}, {1, 1, 65, 80}, {1, 1, 66, 129}, {1, 2, 100, 8},  {1, 1, 130, 64}, {1, 1, 130, 16},
    });
    test_logits(subject, {{1, 1, 70, 16}});
    test_huge(subject, {1, 1, 40, 64});
    test_scales(subject, {1, 1, 20, 8}, {0, 0.03f, 8, -1.5f});
    test_not_finite(subject, {1, 2, 67, 8}, {0, 21, 66});
    test_orders(subject, {{1, 3, 70, 24}, {1, 1, 129, 72}, {1, 1, 66, 200}});
    return test_end();
}
