/* test_variants.cpp - the standalone CUDA attention kernels of dev/attention, on the CPU: each against the float64 truth, by
 * the bounds and with the fences of tests/attention_check.h, at shapes that do not fit its tiles; and with threads in other
 * orders, which must not change a bit.
 */
#include "attention/tensor_core.h"
#include "tests/simt/attention_emulated.h"

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

#define attention_kernel mma1_plain
namespace Mma1 {
#include "dev/attention/mma1_plain.cu"
}
#undef attention_kernel

#define attention_kernel mma2_swizzle
namespace Mma2 {
#include "dev/attention/mma2_swizzle.cu"
}
#undef attention_kernel

#define attention_kernel mma3_pipeline
namespace Mma3 {
#include "dev/attention/mma3_pipeline.cu"
}
#undef attention_kernel

static const AttentionKernel *const variants[] = {&Flash1::flash1_rows, &Flash2::flash2_coalesced, &Flash3::flash3_registers,
                                                  &Flash4::flash4_vectors};

static const AttentionKernel *const tensor_variants[] = {&Mma1::mma1_plain, &Mma2::mma2_swizzle, &Mma3::mma3_pipeline};

static void test_limits(const Subject &subject)
{
    AttentionShape good = shape_of(subject, {1, 1, 4, 8}, subject.dtypes[0]), bad = good;
    test_refusals(subject, good);
    CHECK(subject.kernel->refuse(&good, 75), "takes sm_75");
    bad.HS = 129;
    CHECK(subject.kernel->refuse(&bad, 90), "takes HS 129");
}

static void test_tensor_limits(const Subject &subject)
{
    AttentionShape bad = shape_of(subject, {1, 1, 4, 8}, DTYPE_BF16);
    test_limits(subject);
    for (int64_t HS : {4, 12, 136}) {
        bad.HS = HS;
        CHECK(subject.kernel->refuse(&bad, 90), "takes HS %d", (int)HS);
    }
    bad = shape_of(subject, {1, 1, 4, 8}, DTYPE_FP32);
    CHECK(subject.kernel->refuse(&bad, 90), "takes fp32");
}

/* What all are tried with beside the shapes of their own. */
static void test_variant(const Subject &subject)
{
    test_empty(subject);
    test_logits(subject, {{1, 1, 67, 16}});
    test_huge(subject, {1, 1, 67, 16});
    test_scales(subject, {1, 1, 20, 8}, {0, 0.03f, 8, -1.5f});
    test_not_finite(subject, {1, 2, 67, 8}, {0, 21, 66});
    test_orders(subject, {{1, 2, 70, 24}});
}

int main(void)
{
    for (const AttentionKernel *kernel : variants) {
        Subject subject = subject_create(kernel, 80, {DTYPE_FP32, DTYPE_BF16});
        test_limits(subject);
        /* Lengths around one and two tiles, head sizes around the paddings. */
        test_shapes(subject, {
            {2, 2, 1, 8},   {1, 3, 3, 1},   {1, 2, 17, 40}, {1, 1, 31, 128}, {1, 2, 33, 3},   {2, 1, 64, 32},
            {1, 2, 65, 31}, {1, 1, 66, 72}, {1, 1, 97, 64}, {1, 1, 129, 33}, {1, 1, 130, 96}, {1, 1, 201, 12},
        });
        test_variant(subject);
    }
    for (const AttentionKernel *kernel : tensor_variants) {
        Subject subject = subject_create(kernel, 80, {DTYPE_BF16});
        test_tensor_limits(subject);
        /* Lengths around tiles of keys, of queries and a warp's rows, in every layout and alignment; both templates. */
        test_shapes(subject, {
            {2, 2, 1, 8},    {1, 3, 3, 16},   {1, 2, 17, 40},  {1, 1, 31, 128}, {1, 2, 33, 64},  {2, 1, 64, 32},
            {1, 2, 65, 128}, {1, 1, 66, 72},  {1, 1, 97, 64},  {1, 1, 129, 24}, {1, 1, 130, 96}, {1, 1, 201, 64},
            {1, 1, 63, 64},  {1, 1, 127, 64}, {1, 1, 200, 128},
        });
        test_variant(subject);
        test_not_finite(subject, {1, 1, 130, 72}, {15, 100}); /* in a tile that is wholly seen, and on the diagonal */
        test_orders(subject, {{1, 1, 130, 128}});
    }
    return test_end();
}
