/* test_flash_tf32x3.cpp - attention/flash_tf32x3.cu on the CPU: the tests of attention_emulated.h at shapes that do not fit its
 * tiles, with both forms of its backward; with the largest and the smallest numbers; and that forward and backward see the
 * same logits.
 */
#include <float.h>

#include "tests/simt/attention_emulated.h"

#include "attention/flash_tf32x3.cu"

/* The largest numbers round to an infinite high part, and the difference from it is infinite too; but the row is finite. */
static void test_largest(const Subject &subject)
{
    TEST("flash_tf32x3: the largest finite numbers, and the smallest");
    Problem problem = problem_create(shape_of(subject, {1, 1, 40, 8}, DTYPE_FP32), INPUT_NORMAL, 17);
    for (int row = 0; row < 40; row++) problem.input[INPUT_DO][row * 8 + 3] = 0; /* or dP would be too large */
    problem.input[INPUT_V][5 * 8 + 3] = FLT_MAX;
    problem.input[INPUT_V][9 * 8 + 4] = FLT_MIN / 4;
    problem.input[INPUT_K][7 * 8 + 2] = FLT_MIN / 8;
    problem_solve(&problem);
    check_problem(subject, &problem, LAYOUT_HEADS, ALIGNED);
    problem_free(&problem);
}

/* S and S^T of 16 queries and 16 keys, as forward and as the kernel that owns keys compute them. */
template <int HSP>
__global__ void logits_kernel(float *S, float *St, const float *Q, const float *K)
{
    const Lane lane = lane_here();
    const int PITCH = pitch_of(HSP);
    const SharedAddress q_at = shared_address(shared_dynamic<float>(0, 32 * PITCH / 4)), k_at = q_at + 16 * PITCH;
    load_tile<16, HSP, 32>(q_at, Matrix<const float>{Q, HSP, 16, HSP, 1}, 0);
    load_tile<16, HSP, 32>(k_at, Matrix<const float>{K, HSP, 16, HSP, 1}, 0);
    copies_commit();
    copies_wait<0>();
    __syncthreads();
    float s[1][2][4], st[1][2][4];
    dot_rows<HSP, false, true>(s, q_at + a_place(lane, 0, PITCH), 0, k_at + b_place(lane, PITCH), HSP);
    dot_rows<HSP, false, false>(st, k_at + a_place(lane, 0, PITCH), 0, q_at + b_place(lane, PITCH), HSP);
    for (int n = 0; n < 2; n++)
        for (int e = 0; e < 4; e++) {
            int row = lane.g + 8 * (e / 2), column = 8 * n + 2 * lane.q + e % 2;
            S[row * 16 + column] = s[0][n][e];
            St[column * 16 + row] = st[0][n][e];
        }
}

template <int HSP>
static void check_logits(void)
{
    float *S = (float *)device_alloc(256 * 4), *St = (float *)device_alloc(256 * 4);
    float *Q = (float *)device_alloc(16 * HSP * 4), *K = (float *)device_alloc(16 * HSP * 4);
    uint64_t state = 5;
    for (int i = 0; i < 16 * HSP; i++) {
        Q[i] = (float)random_bell(&state);
        K[i] = (float)random_bell(&state);
    }
    cudaError_t error = kernel_launch(logits_kernel<HSP>, dim3(1), dim3(32), 32 * pitch_of(HSP), 0, S, St, Q, K);
    CHECK(error == cudaSuccess, "%s", cudaGetErrorString(error));
    int differ = 0;
    double worst = 0;
    for (int i = 0; i < 256; i++) {
        double truth = 0, terms;
        truth = dot_in_double(Q + i / 16 * HSP, K + i % 16 * HSP, HSP, &terms);
        worst = larger(worst, fabs(S[i] - truth) / terms);
        differ += S[i] != St[i];
    }
    CHECK(differ == 0, "HS %d: %d of 256 logits differ", HSP, differ);
    CHECK(worst < 4 * unit_roundoff[DTYPE_FP32], "HS %d: an error of %g of the terms", HSP, worst);
    for (float *memory : {S, St, Q, K}) device_free(memory);
}

static void test_same_logits(void)
{
    TEST("flash_tf32x3: forward and backward see the same logits, bit for bit");
    check_logits<32>();
    check_logits<64>();
    check_logits<96>();
    check_logits<256>();
}

/* Sections of heads, their last one short: every block once, the longest tiles of a section first. */
static void test_places(void)
{
    TEST("flash_tf32x3: every tile of every head has one block");
    static const struct { int heads, tiles, section; } cases[] = {{1, 1, 1}, {7, 3, 3}, {6, 4, 3}, {5, 2, 5}, {4, 5, 1}};
    for (const auto &one : cases) {
        Sizes sizes = {one.heads, 2, 64 * one.tiles, 8, one.tiles, one.section, 1, 1, 0};
        int seen[64] = {0}, last_tile = 0, last_section = -1;
        for (int block = 0; block < one.heads * one.tiles; block++) {
            Place place = place_of(block, sizes);
            int section = place.head / one.section;
            if (!CHECK(place.head >= 0 && place.head < one.heads && place.tile >= 0 && place.tile < one.tiles,
                       "block %d is at head %d, tile %d", block, place.head, place.tile)) return;
            CHECK(place.b * 2 + place.h == place.head, "head %d is (%d, %d)", place.head, place.b, place.h);
            CHECK(section > last_section || (section == last_section && place.tile >= last_tile), "block %d goes back",
                  block);
            CHECK(seen[place.head * one.tiles + place.tile]++ == 0, "head %d, tile %d comes twice", place.head, place.tile);
            last_section = section;
            last_tile = place.tile;
        }
    }
}

static void test_limits(const Subject &subject)
{
    const AttentionKernel *kernel = subject.kernel;
    AttentionShape good = shape_of(subject, {1, 1, 4, 8}, DTYPE_FP32), bad = good;
    test_refusals(subject, good);
    for (int sm : {80, 86, 89, 90, 100, 120})
        for (int64_t HS : {1, 64, 96, 128, 256}) {
            good.HS = HS;
            CHECK(!kernel->refuse(&good, sm), "sm_%d, HS %d: %s", sm, (int)HS, kernel->refuse(&good, sm));
        }
    CHECK(kernel->refuse(&good, 75), "takes sm_75");
    bad.HS = 257;
    CHECK(kernel->refuse(&bad, 90), "takes HS 257");
    bad = shape_of(subject, {1, 1, 4, 8}, DTYPE_BF16);
    CHECK(kernel->refuse(&bad, 90), "takes bf16");
}

int main(void)
{
    test_places();
    test_same_logits();
    for (int deterministic = 0; deterministic < 2; deterministic++) {
        Subject subject = subject_create(&attention_flash_tf32x3, 80, {DTYPE_FP32}, deterministic);
        test_limits(subject);
        test_empty(subject);
        /* Each padded head dimension at one, two and three tiles. */
        test_shapes(subject, {
            {2, 3, 1, 8},   {1, 3, 1, 64},   {2, 2, 2, 40},  {1, 2, 3, 1},     {1, 1, 3, 256},  {1, 2, 15, 3},  {2, 1, 16, 16},
            {1, 3, 17, 32}, {1, 1, 17, 96},  {1, 2, 63, 16}, {1, 1, 63, 72},   {1, 1, 64, 128}, {1, 2, 64, 31}, {1, 1, 65, 64},
            {1, 1, 65, 40}, {1, 1, 66, 104}, {1, 1, 67, 80}, {1, 1, 66, 129},  {1, 2, 100, 8},  {1, 1, 130, 64}, {1, 1, 130, 16},
            {1, 1, 65, 96}, {1, 1, 35, 255}, {1, 1, 97, 36}, {1, 1, 257, 4},
        });
        test_alignments(subject, {1, 1, 70, 40});
        test_padded(subject, {{1, 2, 35, 1}, {1, 2, 35, 2}, {1, 2, 35, 3}, {1, 2, 35, 31}, {1, 2, 35, 66}});
        test_logits(subject, {{1, 1, 130, 64}});
        test_huge(subject, {1, 1, 70, 64});
        test_scales(subject, {1, 1, 40, 8}, {0, 0.03f, 8, -1});
        test_not_finite(subject, {1, 2, 67, 8}, {0, 21, 66});
        test_largest(subject);
        if (deterministic) test_orders(subject, {{1, 3, 70, 24}, {1, 1, 129, 72}, {1, 1, 66, 200}, {1, 1, 300, 8}});
    }
    if (getenv("VERBOSE"))
        for (int quantity = 0; quantity < QUANTITY_COUNT; quantity++)
            printf("   largest error of quantity %d: %.2f of what is allowed\n", quantity,
                   judge_worst[DTYPE_FP32][quantity]);
    return test_end();
}
