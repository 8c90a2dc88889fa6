/* test_flash_tf32.cpp - attention/flash_tf32.cu on the CPU: that it does what flash_tf32x3.cu does with factors rounded to
 * TF32, no more exactly and no less, and only where a shape allows it. What both have in common is tested there.
 */
#include "attention_emulated.h"

#include "attention/flash_tf32.cu"

static void test_allowed(const Subject &subject)
{
    AttentionShape good = shape_of(subject, {1, 1, 4, 8}, DTYPE_FP32), bad = good;
    test_refusals(subject, good);
    bad.tf32 = 0;
    const char *reason = subject.kernel->refuse(&bad, 90);
    CHECK(reason && strstr(reason, "--tf32"), "without being allowed: %s", reason ? reason : "not refused");
    CHECK(subject.kernel->refuse(&good, 75), "takes sm_75");
    bad = good;
    bad.dtype = DTYPE_BF16;
    CHECK(subject.kernel->refuse(&bad, 90), "takes bf16");
}

/* Inputs that are not exact in TF32 are rounded as the truth's are, everywhere: also where rows are done again. */
static void test_rounded(const Subject &subject)
{
    static const ShapeSize sizes[] = {{1, 2, 1, 8}, {1, 1, 70, 40}, {1, 1, 130, 64}, {1, 1, 66, 200}};
    for (const ShapeSize &size : sizes)
        for (int nan = 0; nan <= (size.T == 70); nan++) {
            TEST("%s: factors are rounded to nearest, T %d, HS %d%s", subject.kernel->name, (int)size.T, (int)size.HS,
                 nan ? ", a NaN in V" : "");
            Problem problem = problem_create(shape_of(subject, size, DTYPE_FP32), INPUT_NORMAL, 31);
            if (nan) {
                problem.input[INPUT_V][40 * size.HS] = NAN;
                problem_solve(&problem);
            }
            problem_blur(&problem, 37);
            check_problem(subject, &problem, LAYOUT_PACKED, 0);
            problem_free(&problem);
        }
}

/* D takes dO as dP does: of a single key, both are the same sum, and dS is what they differ by. */
static void test_cancels(const Subject &subject)
{
    TEST("%s: dP and D of a single key cancel", subject.kernel->name);
    Problem problem = problem_create(shape_of(subject, {1, 4, 1, 64}, DTYPE_FP32), INPUT_NORMAL, 41);
    problem_blur(&problem, 43);
    Result result = result_create(&problem.shape);
    Judgement judgement = {""};
    int status = run_kernel(subject.kernel, &problem, LAYOUT_HEADS, 0, &subject.machine, &result, &judgement);
    double most = status ? NAN : largest_of(result.value[QUANTITY_DQ], 4 * 64);
    CHECK(most < 1e-5, "%s, dQ is %g", judgement.text, most);
    result_free(&result);
    problem_free(&problem);
}

int main(void)
{
    for (int deterministic = 0; deterministic < 2; deterministic++) {
        Subject subject = subject_create(&attention_flash_tf32, 80, {DTYPE_FP32}, deterministic);
        subject.tf32 = 1;
        test_allowed(subject);
        test_empty(subject);
        test_shapes(subject, {{2, 3, 1, 8}, {2, 2, 2, 40}, {1, 2, 17, 64}, {1, 1, 130, 128}, {1, 1, 66, 256}, {1, 1, 67, 80},
                              {1, 2, 65, 31}, {1, 1, 300, 8}, {1, 1, 130, 64}});
        test_rounded(subject);
        test_cancels(subject);
        test_logits(subject, {{1, 1, 130, 64}});
        test_huge(subject, {1, 1, 70, 64});
        test_scales(subject, {1, 1, 40, 8}, {0, 0.03f, 8, -1});
        test_not_finite(subject, {1, 2, 67, 8}, {0, 21, 66});
        if (deterministic) test_orders(subject, {{1, 3, 70, 24}, {1, 1, 66, 200}});
    }
    if (getenv("VERBOSE"))
        for (int quantity = 0; quantity < QUANTITY_COUNT; quantity++)
            printf("   largest error of quantity %d: %.2f of what is allowed\n", quantity,
                   judge_worst[DTYPE_FP32][quantity]);
    return test_end();
}
