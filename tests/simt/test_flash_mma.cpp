/* test_flash_mma.cpp - attention/flash_mma.cu on the CPU, its tensor-core instructions and asynchronous copies emulated: the
 * tests of attention_emulated.h at every padding and every number of tiles of its templates, with and without the promise of
 * equal bits.
 */
#include "tests/simt/attention_emulated.h"

/* The backward in one pass, which is for long sequences, at every length. */
#define FUSED_FROM(HS) 1
#include "attention/flash_mma.cu"

/* Sections of heads, their last one short: every block once, the longest tiles of a section first. */
static void test_places(void)
{
    TEST("flash_mma: every tile of every head has one block");
    static const struct { uint32_t heads, tiles, section; } cases[] = {
        {1, 1, 1}, {7, 3, 3}, {6, 4, 3}, {5, 2, 5}, {4, 5, 1},
    };
    for (const auto &one : cases) {
        Sizes sizes = {one.heads, 2, 0, 0, 8, one.tiles, one.section, 1, 1};
        int seen[64] = {0}, last_tile = 0;
        int64_t last_section = -1;
        for (uint32_t block = 0; block < one.heads * one.tiles; block++) {
            Place place = place_of(block, sizes);
            int64_t section = place.head / one.section;
            if (!CHECK(place.head < one.heads && place.tile >= 0 && (uint32_t)place.tile < one.tiles,
                       "block %u is at head %u, tile %d", block, place.head, place.tile)) return;
            CHECK(place.b * 2 + place.h == place.head, "head %u is (%u, %u)", place.head, place.b, place.h);
            CHECK(section > last_section || (section == last_section && place.tile >= last_tile), "block %u goes back",
                  block);
            CHECK(seen[place.head * one.tiles + (uint32_t)place.tile]++ == 0, "head %u, tile %d comes twice", place.head,
                  place.tile);
            last_section = section;
            last_tile = place.tile;
        }
    }
}

static void test_limits(const Subject &subject)
{
    const AttentionKernel *kernel = subject.kernel;
    AttentionShape good = shape_of(subject, {1, 1, 4, 8}, DTYPE_BF16), bad = good;
    test_refusals(subject, good);
    CHECK(kernel->refuse(&good, 75), "takes sm_75");
    for (int64_t HS : {-8, 4, 12, 257, 264}) {
        bad.HS = HS;
        CHECK(kernel->refuse(&bad, 90), "takes HS %d", (int)HS);
    }
    bad = good;
    bad.dtype = DTYPE_FP32;
    CHECK(kernel->refuse(&bad, 90), "takes fp32");
    bad = good;
    bad.T = ((int64_t)1 << 30) + 1;
    CHECK(kernel->refuse(&bad, 90), "takes T 2^30 + 1");
}

/* Equal logits of 2^21: LSE in fp32 is off by up to an eighth, and by as much would P be, were what LSE lacks not taken
 * in; the bounds would allow it, as the logits' own last place is as large. In every 24th row dO has a single 1. V and a
 * column of K that meets zeros in Q are +1 and -1 in turn, so dQ = scale (1 - mean^2) in that column. */
static void test_large_lse(const Subject &subject, int64_t HS)
{
    const int64_t T = 201;
    TEST("flash_mma: P takes in what LSE lacks, HS %d%s", (int)HS, subject.deterministic ? ", deterministic" : "");
    Problem problem = problem_open(shape_of(subject, {1, 1, T, HS}, DTYPE_BF16), INPUT_NORMAL, 43);
    problem.shape.scale = 0.125f;
    for (int64_t k = 0; k < T * HS; k++) {
        int64_t row = k / HS, d = k % HS;
        float sign = row % 2 ? -1.0f : 1.0f;
        problem.input[INPUT_Q][k] = d == 0 ? 4096.0f : 0.0f;
        problem.input[INPUT_K][k] = d == 0 ? 4096.0f : d == 1 ? sign : 0.0f;
        problem.input[INPUT_V][k] = sign;
        problem.input[INPUT_DO][k] = row == 24 * d + 31 ? 1.0f : 0.0f;
    }
    Result result = result_create(&problem.shape);
    Judgement judgement = {""};
    int status = run_kernel(subject.kernel, &problem, LAYOUT_HEADS, ALIGNED, &subject.machine, &result, &judgement);
    CHECK(status == 0, "%s", judgement.text);
    for (int64_t d = 0; d < HS && 24 * d + 31 < T && !status; d++) {
        int64_t i = 24 * d + 31;
        double count = (double)(i + 1), mean = (double)((i + 1) % 2) / count, dQ = result.value[QUANTITY_DQ][i * HS + 1];
        CHECK(fabs(dQ / (0.125 * (1 - mean * mean)) - 1) < 1.0 / 64, "dQ of row %d is %g", (int)i, dQ);
        for (int64_t j = 0; j < T; j++) {
            double P = result.value[QUANTITY_DV][j * HS + d];
            if (!CHECK(fabs(P * count - (j <= i)) < 1.0 / 64, "P of row %d, column %d is %g", (int)i, (int)j, P)) break;
        }
    }
    result_free(&result);
    problem_free(&problem);
}

/* Where a block gets less shared memory than the backward in one pass needs, that in two takes its place. */
static void test_small_shared(const Subject &subject)
{
    TEST("flash_mma: a GPU that gives a block 99 KB of shared memory");
    simt_set_shared(99 << 10);
    for (int64_t HS : {32, 64, 96, 128}) {
        Problem problem = problem_create(shape_of(subject, {1, 1, 70, HS}, DTYPE_BF16), INPUT_NORMAL, 41);
        check_problem(subject, &problem, LAYOUT_ROWS, ALIGNED);
        problem_free(&problem);
    }
    simt_set_shared(0);
}

/* Every length around tiles and parts of tiles, with every head dimension that a template or a padding of its own has. */
static std::vector<ShapeSize> all_sizes(void)
{
    std::vector<ShapeSize> sizes;
    for (int64_t HS : {8, 16, 32, 40, 64, 72, 80, 96, 104, 128, 136, 256})
        for (int64_t T : {1, 2, 15, 16, 17, 63, 64, 65, 100, 127, 128, 129, 200, 257})
            sizes.push_back({1 + (T < 16), 1 + (T % 2 && T < 128), T, HS});
    return sizes;
}

int main(void)
{
    Subject subject = subject_create(&attention_flash_mma, 80, {DTYPE_BF16});
    test_places();
    test_limits(subject);
    test_empty(subject);
    test_shapes(subject, all_sizes());
    /* Not above HS 64: over longer products a tensor core's sums, cut off and not rounded, are off by more than the bound
     * for LSE, which is made from rounded ones. */
    test_logits(subject, {{1, 2, 1, 64}, {1, 2, 101, 64}, {1, 2, 201, 64}, {1, 2, 129, 32}, {1, 1, 70, 16}});
    for (int64_t HS : {24, 64, 96, 128, 256}) {
        test_huge(subject, {1, 1, 130, HS});
        test_scales(subject, {1, 1, 130, HS}, {0, 0.03f, 4, -1.5f});
        test_not_finite(subject, {1, HS < 64 ? 2 : 1, 130, HS}, {HS < 64 ? 0 : 67, 129});
    }
    /* At T 600 many blocks of keys would add to a sum of dQ; with two, the order would change nothing. */
    test_orders(subject, {{1, 3, 130, 24}, {1, 1, 130, 64}, {1, 1, 200, 96}, {1, 1, 129, 128}, {1, 1, 66, 200},
                          {1, 1, 600, 8}});
    for (int64_t HS : {8, 64, 128}) test_large_lse(subject, HS);
    test_alignments(subject, {1, 1, 130, 24});

    subject.deterministic = 0; /* the backward in one pass, and at HS 256 in two */
    for (int64_t HS : {8, 32, 64, 80, 96, 128})
        test_shapes(subject, {{2, 3, 2, HS}, {1, 2, 17, HS}, {1, 1, 64, HS}, {1, 1, 65, HS}, {1, 1, 129, HS},
                              {1, 1, 257, HS}});
    test_shapes(subject, {{1, 1, 129, 256}});
    for (int64_t HS : {24, 64, 96, 128}) test_not_finite(subject, {1, 1, 130, HS}, {67});
    for (int64_t HS : {32, 64, 96, 128}) test_huge(subject, {1, 1, 200, HS});
    test_scales(subject, {1, 1, 130, 64}, {0, 4, -1.5f});
    test_alignments(subject, {1, 1, 200, 72}); /* at T 200 there is a tile that needs no mask */
    test_logits(subject, {{1, 1, 201, 64}, {1, 1, 201, 24}});
    for (int64_t HS : {8, 64, 96, 128}) test_large_lse(subject, HS);
    test_long(subject, {1, 1, 2049, 40});                      /* the forward that is for long sequences */
    test_small_shared(subject);
    return test_end();
}
