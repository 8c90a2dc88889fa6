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
    test_orders(subject, {{1, 3, 130, 24}, {1, 1, 130, 64}, {1, 1, 200, 96}, {1, 1, 129, 128}, {1, 1, 66, 200}});

    subject.deterministic = 0; /* the backward in one pass, and at HS 256 in two */
    for (int64_t HS : {8, 32, 64, 80, 96, 128})
        test_shapes(subject, {{2, 3, 2, HS}, {1, 2, 17, HS}, {1, 1, 64, HS}, {1, 1, 65, HS}, {1, 1, 129, HS},
                              {1, 1, 257, HS}});
    test_shapes(subject, {{1, 1, 129, 256}});
    for (int64_t HS : {24, 64, 96, 128}) test_not_finite(subject, {1, 1, 130, HS}, {67});
    for (int64_t HS : {32, 64, 96, 128}) test_huge(subject, {1, 1, 200, HS});
    test_scales(subject, {1, 1, 130, 64}, {0, 4, -1.5f});
    return test_end();
}
