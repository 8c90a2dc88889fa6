/* test_flash_simt.cpp - attention/flash_simt.cu on the CPU: against the float64 truth, by the bounds and with the fences of
 * tests/attention_check.h, at shapes that do not fit its tiles; with numbers that are none; and with threads in other
 * orders, which must not change a bit.
 */
#include "tests/simt/attention_emulated.h"

#include "attention/flash_simt.cu"

/* Sections of heads, their last one short: every block once, the longest tiles of a section first. */
static void test_places(void)
{
    TEST("flash_simt: every tile of every head has one block");
    static const struct { int64_t heads; int tiles, section; } cases[] = {
        {1, 1, 1}, {7, 3, 3}, {6, 4, 3}, {5, 2, 5}, {4, 5, 1},
    };
    for (const auto &one : cases) {
        Sizes sizes = {one.heads, 2, 64 * one.tiles, 8, one.tiles, one.section, 1, 1};
        int seen[64] = {0}, last_tile = 0;
        int64_t last_section = -1;
        for (int64_t block = 0; block < one.heads * one.tiles; block++) {
            Place place = place_of(block, sizes);
            int64_t section = place.head / one.section;
            if (!CHECK(place.head >= 0 && place.head < one.heads && place.tile >= 0 && place.tile < one.tiles,
                       "block %d is at head %d, tile %d", (int)block, (int)place.head, place.tile)) return;
            CHECK(place.b * 2 + place.h == place.head, "head %d is (%d, %d)", (int)place.head, (int)place.b, (int)place.h);
            CHECK(section > last_section || (section == last_section && place.tile >= last_tile), "block %d goes back",
                  (int)block);
            CHECK(seen[place.head * one.tiles + place.tile]++ == 0, "head %d, tile %d comes twice", (int)place.head,
                  place.tile);
            last_section = section;
            last_tile = place.tile;
        }
    }
}

static void test_limits(const Subject &subject)
{
    AttentionShape good = shape_of(subject, {1, 1, 4, 8}, DTYPE_FP32), bad = good;
    test_refusals(subject, good);
    CHECK(subject.kernel->refuse(&good, 70), "takes sm_70");
    bad.HS = 257;
    CHECK(subject.kernel->refuse(&bad, 90), "takes HS 257");
}

int main(void)
{
    Subject subject = subject_create(&attention_flash_simt, 75, {DTYPE_FP32, DTYPE_BF16});
    test_places();
    test_limits(subject);
    test_empty(subject);
    /* Every length and every head dimension of the lists, each padding at one, two and three tiles. */
    test_shapes(subject, {
        {2, 3, 1, 8},   {1, 3, 1, 64},   {2, 2, 2, 40},  {1, 2, 3, 1},    {1, 1, 3, 256},  {1, 2, 15, 3},  {2, 1, 16, 16},
        {1, 3, 17, 32}, {1, 1, 17, 96},  {1, 2, 63, 16}, {1, 1, 63, 72},  {1, 1, 64, 128}, {1, 2, 64, 31}, {1, 1, 65, 64},
        {1, 1, 65, 40}, {1, 1, 65, 104}, {1, 1, 65, 80}, {1, 1, 66, 129}, {1, 2, 100, 8},  {1, 1, 130, 64}, {1, 1, 130, 16},
    });
    test_alignments(subject, {1, 1, 70, 24});
    test_padded(subject, {{1, 2, 20, 3}, {1, 2, 20, 12}, {1, 1, 20, 66}});
    test_logits(subject, {{1, 1, 70, 16}});
    test_huge(subject, {1, 1, 70, 64});
    test_scales(subject, {1, 1, 20, 8}, {0, 0.03f, 8, -1.5f});
    test_not_finite(subject, {1, 2, 67, 8}, {0, 21, 66});
    test_orders(subject, {{1, 3, 70, 24}, {1, 1, 129, 72}, {1, 1, 66, 200}});
    return test_end();
}
