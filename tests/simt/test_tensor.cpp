/* test_tensor.cpp - the emulated tensor-core and asynchronous-copy instructions: does each compute what its definition says,
 * is every fault found that simt_tensor.h claims to find, and are sound kernels left alone? The kernels are in
 * fixtures/tensor.cu. */
#include "tests/simt/fixtures/tensor.cu"

#include <math.h>

#include "data/random.h"
#include "tests/simt/simt_test.h"

/* A whole number from -m to m: sums of products of these are exact in any order. */
static int small_number(uint64_t *state, int m) { return (int)(random_u64(state) % (uint64_t)(2 * m + 1)) - m; }

static uint32_t bits_of(float x) { return simt_bits<uint32_t>(x); }
static uint32_t bf16_pair(float low, float high) { return bits_of(low) >> 16 | (bits_of(high) & 0xffff0000); }

/* --- products ------------------------------------------------------------------------------------------------------ */

/* D (16, 8) = C + A (16, K) B (K, 8), and the fragments of its factors and sums, placed by the header's picture. */
template <bool BF16>
struct Product {
    static const int K = BF16 ? 16 : 8;
    float A[16][16], B[16][8], C[16][8];
    Device<uint32_t> a, b;
    Device<float> d;

    Product() : A(), B(), C(), a(32 * 4), b(32 * 2), d(32 * 4) {}

    static int row(int lane, int i) { return lane / 4 + i / 2 * 8; }
    static int column(int lane, int i) { return lane % 4 * 2 + i % 2; }

    void run()
    {
        for (int lane = 0; lane < 32; lane++) {
            int g = lane / 4, q = lane % 4;
            for (int i = 0; i < 4; i++) {
                const float *from = &A[g + i % 2 * 8][BF16 ? 2 * q + i / 2 * 8 : q + i / 2 * 4];
                a[lane * 4 + i] = BF16 ? bf16_pair(from[0], from[1]) : bits_of(from[0]);
                d[lane * 4 + i] = C[row(lane, i)][column(lane, i)];
            }
            for (int i = 0; i < 2; i++) {
                int k = BF16 ? 2 * q + i * 8 : q + i * 4;
                b[lane * 2 + i] = BF16 ? bf16_pair(B[k][g], B[k + 1][g]) : bits_of(B[k][g]);
            }
        }
        RUN(mma_kernel<BF16>, 1, 32, 0, nullptr, d, a, b);
    }

    float result(int r, int c) const { return d[(r % 8 * 4 + c / 2) * 4 + r / 8 * 2 + c % 2]; }
};

template <bool BF16> static void test_fragments(void)
{
    TEST("%s: a product of whole numbers, fragment by fragment", BF16 ? "mma_bf16" : "mma_tf32");
    for (uint64_t seed = 1; seed <= 5; seed++) {
        Product<BF16> product;
        uint64_t state = seed;
        for (int i = 0; i < 16 * 16; i++) product.A[i / 16][i % 16] = (float)small_number(&state, 99);
        for (int i = 0; i < 16 * 8; i++) product.B[i / 8][i % 8] = (float)small_number(&state, 99);
        for (int i = 0; i < 16 * 8; i++) product.C[i / 8][i % 8] = (float)small_number(&state, 9999);
        simt_seed(seed);
        product.run();
        for (int r = 0; r < 16; r++)
            for (int c = 0; c < 8; c++) {
                float expected = product.C[r][c];
                for (int k = 0; k < product.K; k++) expected += product.A[r][k] * product.B[k][c];
                CHECK(product.result(r, c) == expected, "(%d, %d): %g, expected %g", r, c, product.result(r, c), expected);
            }
    }
}

/* Row 0 times column 0: c + the sum of x (count) * y, the other k 0. */
template <bool BF16> static float sum_of(float c, std::initializer_list<float> x, float y)
{
    Product<BF16> product;
    int k = 0;
    product.C[0][0] = c;
    for (float value : x) {
        product.A[0][k] = value;
        product.B[k++][0] = y;
    }
    product.run();
    return product.result(0, 0);
}

static void test_sums(void)
{
    const float tiny = 0x1p-24f, less = 0x1p-25f, huge = 0x1p127f, max = 0x1.fffffep127f;
    TEST("products: terms are cut below the last place of the largest, and totals towards zero");
    const struct { float got, expected; } cases[] = {
        {sum_of<true>(1, {tiny, tiny}, 1), 1 + 0x1p-23f},
        {sum_of<true>(1, {tiny, tiny, tiny}, 1), 1 + 0x1p-23f},
        {sum_of<true>(-1, {tiny, tiny, tiny}, -1), -1 - 0x1p-23f},
        {sum_of<true>(1, {less, less, less, less, less, less, less, less}, 1), 1},
        {sum_of<true>(1, {less, less, less, less}, -1), 1},
        {sum_of<true>(1, {tiny}, -1), 1 - 0x1p-24f},
        {sum_of<true>(0, {less, less, less, less, 1}, 1), 1},
        {sum_of<true>(0, {1, 0, 0, 0, 0, 0, 0, -1, less}, 1), less},              /* a second group, after the first */
        {sum_of<true>(1, {1, 0, 0, 0, 0, 0, 0, less, -2}, 1), 0},
        {sum_of<false>(1, {tiny, tiny, tiny, -1, tiny}, 1), 0x1p-23f + 0x1p-24f + 0x1p-24f},
        {sum_of<false>(1, {less, less, less, less, less, less, less, less}, 1), 1},
        {sum_of<true>(0x1p-140f, {0x1p-100f}, 0x1p-40f), 0x1p-139f},              /* subnormal numbers stay */
        {sum_of<true>(0, {0x1p-130f}, 1), 0x1p-130f},
        {sum_of<true>(0, {0x1p-75f}, 0x1p-75f), 0},
        {sum_of<true>(0, {huge}, 2), INFINITY},
        {sum_of<true>(max, {0x1p102f}, 1), max},
        {sum_of<true>(0, {huge, huge}, -2), -INFINITY},
        {sum_of<true>(0, {huge, -huge}, 4), 0},                                   /* beyond fp32 on the way only */
        {sum_of<true>(1, {INFINITY}, 1), INFINITY},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        CHECK(cases[i].got == cases[i].expected, "case %d: %a, expected %a", (int)i, cases[i].got, cases[i].expected);
    TEST("products: NaN from infinities, and to the elements of its row and column only");
    CHECK(isnan(sum_of<true>(0, {INFINITY, -INFINITY}, 1)) && isnan(sum_of<true>(0, {INFINITY}, 0)) &&
          isnan(sum_of<false>(-INFINITY, {INFINITY}, 1)), "no NaN");
    Product<true> product;
    product.A[3][5] = NAN;
    product.B[9][6] = INFINITY;
    product.run();
    for (int r = 0; r < 16; r++)
        for (int c = 0; c < 8; c++)
            CHECK(isnan(product.result(r, c)) == (r == 3 || c == 6), "(%d, %d): %g", r, c, product.result(r, c));
    TEST("products: the last 13 bits of a TF32 factor do not count");
    float one = sum_of<false>(0, {0x1.003ffep0f}, 1), next = sum_of<false>(0, {0x1.007ffep0f}, 1);
    CHECK(one == 1 && next == 0x1.004p0f, "in A: %a, %a", one, next);
    CHECK(sum_of<false>(0, {1}, 0x1.003ffep0f) == 1, "in B: %a", sum_of<false>(0, {1}, 0x1.003ffep0f));
}

/* M rows, K deep: exact, for the factors are whole numbers. */
template <bool IN_ROWS> static void test_product(int M, int K, uint64_t seed)
{
    TEST("copies, matrix loads and products: A (%d, %d) times B %s", M, K, IN_ROWS ? "(K, 32)" : "(32, K)");
    Device<__nv_bfloat16> A((size_t)M * K), B((size_t)32 * K);
    Device<float> out((size_t)M * 32, NAN);
    uint64_t state = seed;
    for (int i = 0; i < M * K; i++) A[i] = (float)small_number(&state, 50);
    for (int i = 0; i < 32 * K; i++) B[i] = (float)small_number(&state, 50);
    simt_seed(seed);
    RUN(product_kernel<IN_ROWS>, (M + 31) / 32, PRODUCT_THREADS, 0, nullptr, out, A, B, M, K);
    for (int r = 0; r < M; r++)
        for (int c = 0; c < 32; c++) {
            float expected = 0;
            for (int k = 0; k < K; k++) expected += (float)A[r * K + k] * (float)(IN_ROWS ? B[k * 32 + c] : B[c * K + k]);
            CHECK(out[r * 32 + c] == expected, "(%d, %d): %g, expected %g", r, c, out[r * 32 + c], expected);
        }
}

/* --- matrix loads and words ---------------------------------------------------------------------------------------- */

template <bool TRANSPOSED> static void test_ldmatrix(void)
{
    TEST("%s: every element, rows in any order", TRANSPOSED ? "ldmatrix_x4_trans" : "ldmatrix_x4");
    Device<uint32_t> out(32 * 4);
    Device<uint16_t> in(32 * 8);
    Device<int> order(32);
    for (int i = 0; i < 32 * 8; i++) in[i] = (uint16_t)(1000 + 7 * i);
    for (int lane = 0; lane < 32; lane++) order[lane] = (lane * 11 + 5) % 32;
    RUN(ldmatrix_kernel<TRANSPOSED>, 1, 32, 0, nullptr, out, in, order);
    for (int lane = 0; lane < 32; lane++)
        for (int i = 0; i < 4; i++) {
            uint32_t expected = 0;
            for (int half = 0; half < 2; half++) {
                int row = lane / 4, column = lane % 4 * 2 + half;
                if (TRANSPOSED) std::swap(row, column);
                expected |= (uint32_t)in[order[8 * i + row] * 8 + column] << 16 * half;
            }
            CHECK(out[4 * lane + i] == expected, "lane %d, matrix %d: 0x%08x, expected 0x%08x", lane, i, out[4 * lane + i],
                  expected);
        }
}

static void test_addresses(void)
{
    TEST("addresses: sums of every kind, stores and loads of every width");
    Device<uint32_t> out(ADDRESS_NUMBERS);
    const uint32_t expected[ADDRESS_NUMBERS] = {101, 102, 103, 104, 106, 0xffff0000u + 100, 321, bits_of(0.5f), 3, 7};
    RUN(addresses_kernel, 1, 1, 2048, nullptr, out);
    for (int i = 0; i < ADDRESS_NUMBERS; i++)
        CHECK(out[i] == expected[i], "number %d: %u, expected %u", i, out[i], expected[i]);
}

static void test_reductions(void)
{
    TEST("reductions add each element once a thread");
    Device<float> at(6);
    at[5] = 1000;
    RUN(reduce_kernel, 3, 40, 0, nullptr, at);
    for (int i = 0; i < 6; i++)
        CHECK(at[i] == (float)(120 * (i + 1) + (i == 5 ? 1000 : 0)), "element %d: %g", i, at[i]);
}

/* --- copies -------------------------------------------------------------------------------------------------------- */

static void test_copies(void)
{
    for (uint64_t seed = 0; seed < 5; seed++) {
        TEST("copies: rows through shared memory; zeros where there is no source, seed %d", (int)seed);
        simt_seed(seed);
        for (int rows = 0; rows <= 32; rows += 8) {
            Device<uint32_t> out(32 * 4), in((size_t)(rows ? rows : 1) * 4); /* in ends with its last row */
            for (int i = 0; i < rows * 4; i++) in[i] = 500 + i;
            RUN(copy_kernel, 1, 32, 0, nullptr, out, in, rows);
            for (int i = 0; i < 32 * 4; i++) {
                int at = i % 4 == 0 ? i : (i + 4) % 128;
                uint32_t expected = at < rows * 4 ? 500 + (uint32_t)at : 0;
                CHECK(out[i] == expected, "%d rows, out[%d]: %u, expected %u", rows, i, out[i], expected);
            }
        }
    }
    TEST("copies: groups arrive in order, empty ones count");
    Device<uint32_t> out(4), in(16);
    for (int i = 0; i < 16; i++) in[i] = i;
    RUN(groups_kernel, 2, 1, 0, nullptr, out, in);
    for (int i = 0; i < 4; i++) CHECK(out[i] == 4u * i, "out[%d]: %u", i, out[i]);
}

/* --- mbarriers ----------------------------------------------------------------------------------------------------- */

static float digest_of(const float *row) { return row[0] + 2 * row[1] + 3 * row[2] + 4 * row[3]; }

static Device<float> numbers_create(size_t count)
{
    Device<float> numbers(count);
    for (size_t i = 0; i < count; i++) numbers[i] = (float)(i * 37 % 1009);
    return numbers;
}

template <bool COPIES> static void test_pipe(void)
{
    TEST("mbarriers: a warp brings tiles by %s to three others, two at a time", COPIES ? "copies" : "stores");
    const int tiles = 9, readers = PIPE_WARPS - 1;
    Device<float> in = numbers_create(tiles * 32 * 4);
    for (uint64_t seed = 1; seed <= 40; seed++) {
        Device<float> out(tiles * readers * 32, NAN);
        simt_seed(seed);
        RUN((pipe_kernel<COPIES, SOUND>), 2, PIPE_THREADS, 0, nullptr, out, in, tiles);
        for (int i = 0; i < tiles * readers * 32; i++) {
            int row = i / 32 / readers * 32 + (i % 32 + i / 32 % readers + 1) % 32;
            CHECK(out[i] == digest_of(in + row * 4), "seed %d, out[%d]: %g", (int)seed, i, out[i]);
        }
    }
}

static void test_ring(void)
{
    TEST("mbarriers: all warps bring tiles and read them, with barriers of the block now and then");
    const int tiles = 12;
    Device<float> in = numbers_create(tiles * PIPE_THREADS * 4);
    for (uint64_t seed = 1; seed <= 40; seed++) {
        Device<float> out(tiles * PIPE_THREADS, NAN);
        simt_seed(seed);
        RUN(ring_kernel, 2, PIPE_THREADS, 0, nullptr, out, in, tiles, (int)(seed % 4 + 1));
        for (int i = 0; i < tiles * PIPE_THREADS; i++) {
            int tile = i / PIPE_THREADS, row = tile * PIPE_THREADS + ((i ^ 1) % PIPE_THREADS + 7 * tile) % PIPE_THREADS;
            CHECK(out[i] == digest_of(in + row * 4), "seed %d, out[%d]: %g", (int)seed, i, out[i]);
        }
    }
}

static void test_relay(void)
{
    TEST("mbarriers: what a warp wrote is known along a chain of them");
    Device<float> in = numbers_create(32 * 4);
    for (uint64_t seed = 1; seed <= 20; seed++) {
        Device<float> out(32, NAN);
        simt_seed(seed);
        RUN(relay_kernel, 2, PIPE_THREADS, 0, nullptr, out, in);
        for (int i = 0; i < 32; i++) {
            const float *row = in + 4 * i;
            float expected = row[0] + row[1] + row[2] + row[3] + 100 * digest_of(in + 4 * (i ^ 1)) + 4002;
            CHECK(out[i] == expected, "seed %d, out[%d]: %g, expected %g", (int)seed, i, out[i], expected);
        }
    }
}

/* --- conversions --------------------------------------------------------------------------------------------------- */

static void test_conversions(void)
{
    TEST("pack_bf16: low half first, ties to even, one NaN");
    CHECK(pack_bf16(1, -2) == 0xc0003f80, "0x%08x", pack_bf16(1, -2));
    CHECK(pack_bf16(0x1.01p0f, 0x1.03p0f) == 0x3f823f80, "0x%08x", pack_bf16(0x1.01p0f, 0x1.03p0f));
    CHECK(pack_bf16(NAN, -INFINITY) == 0xff807fff, "0x%08x", pack_bf16(NAN, -INFINITY));

    TEST("round_tf32: 10 bits, ties away from zero");
    const struct { float x, expected; } roundings[] = {
        {1, 1}, {0x1.001p0f, 1}, {0x1.002p0f, 0x1.004p0f},
        {-0x1.002p0f, -0x1.004p0f}, {0x1.001ffep0f, 1}, {0x1.ffffp0f, 2}, {0x1.fffffep127f, INFINITY},
        {-INFINITY, -INFINITY}, {0, 0},
    };
    for (const auto &one : roundings)
        CHECK(round_tf32(one.x) == bits_of(one.expected), "%a becomes 0x%08x", one.x, round_tf32(one.x));
    CHECK(isnan(simt_bits<float>(round_tf32(NAN) & 0xffffe000)), "NaN becomes 0x%08x", round_tf32(NAN));

    TEST("exp2_fast: exact at whole numbers, nothing below -126");
    for (int n = -126; n <= 127; n++) CHECK(exp2_fast((float)n) == ldexpf(1, n), "2^%d: %a", n, exp2_fast((float)n));
    CHECK(exp2_fast(-126.00001f) == 0 && exp2_fast(-140) == 0 && exp2_fast(-INFINITY) == 0, "2^-126.00001 is %a",
          exp2_fast(-126.00001f));
    CHECK(exp2_fast(128) == INFINITY && isnan(exp2_fast(NAN)), "2^128 is %g", exp2_fast(128));

    TEST("gather_nonfinite: NaN in the halves that had none or an infinity, and stays");
    const uint32_t finite = pack_bf16(-3, 0x1p-130f), low = pack_bf16(NAN, 5), high = pack_bf16(5, -INFINITY);
    CHECK(gather_nonfinite(0, finite) == 0, "finite: 0x%08x", gather_nonfinite(0, finite));
    CHECK(gather_nonfinite(0, low) == 0x00007fff, "NaN low: 0x%08x", gather_nonfinite(0, low));
    CHECK(gather_nonfinite(0, high) == 0x7fff0000, "infinity high: 0x%08x", gather_nonfinite(0, high));
    CHECK(gather_nonfinite(gather_nonfinite(0, high), finite) == 0x7fff0000, "gone after a finite one");
    CHECK(gather_nonfinite(finite, pack_bf16(7, 7)) == finite, "acc 0x%08x becomes 0x%08x", finite,
          gather_nonfinite(finite, pack_bf16(7, 7)));
}

/* --- faults -------------------------------------------------------------------------------------------------------- */

template <TensorFault FAULT> static void test_fault(const char *words, const char *instead = nullptr, int threads = 64)
{
    Device<float> out(64), in(32 * 4);
    check_fault("tensor_fault_kernel<FAULT>", {words, instead ? instead : words}, [&] {
        std::fill(out.data, out.data + 64, 0.0f);
        std::fill(in.data, in.data + 32 * 4, 0.0f);
        return kernel_launch(tensor_fault_kernel<FAULT>, 2, threads, 0, nullptr, out, in);
    });
}

template <TensorFault FAULT> static void test_fatal(const char *words)
{
    Device<float> out(64), in(32 * 4);
    check_fatal("tensor_fault_kernel<FAULT>", words,
                [&] { return kernel_launch(tensor_fault_kernel<FAULT>, 2, 64, 0, nullptr, out, in); });
}

static void test_copy_faults(void)
{
    test_fault<READ_BEFORE_WAIT>("read of shared memory whose copy is still under way: byte ");
    test_fault<READ_UNDER_COPY>("copy is still under way: byte 20 of tile, to which thread (1,0,0) copies at ");
    test_fault<WRITE_UNDER_COPY>("write of shared memory whose copy is still under way: byte 20 of tile");
    test_fault<COPY_UNDER_COPY>("write of shared memory whose copy is still under way: byte 16 of tile");
    test_fault<LDMATRIX_UNDER_COPY>("read of shared memory whose copy is still under way: byte ");
    test_fault<WAIT_FOR_TOO_FEW>("read of shared memory whose copy is still under way: byte ");
    test_fault<NOT_COMMITTED>("read of shared memory whose copy is still under way: byte ");
    test_fault<NO_BARRIER_AFTER_WAIT>("byte 48 of tile is read here and was written by thread (3,0,0), with no barrier");
    test_fault<RETURNS_WITH_COPY>("it returns with 1 copies to shared memory still under way, the first from ");
    test_fault<COPY_OVER_READ>("byte 48 of tile is written here and was read by thread (40,0,0), with no barrier");
    test_fault<SOURCE_CHANGED>("changed while it was under way");
    test_fault<COPY_BEYOND>("write out of bounds: bytes 512 to 527 of the 512 of shared memory tile");
    test_fault<COPY_MISALIGNED>("misaligned access: byte 8 of shared memory tile as a type aligned to 16");
    test_fault<SOURCE_MISALIGNED>("misaligned copy_async_16 at ");
    if (__asan_poison_memory_region) test_fatal<SOURCE_BEYOND>("AddressSanitizer");
#ifdef __clang__
    test_fatal<SOURCE_NULL>("SEGV");
#else
    test_fatal<SOURCE_NULL>("null pointer");
#endif
}

static void test_warp_faults(void)
{
    test_fault<LDMATRIX_RETURNED>("with the mask 0xffffffff waits for lane 3, thread (35,0,0), which has returned");
    test_fault<LDMATRIX_ELSEWHERE>("which waits in the ldmatrix_x4 at");
    test_fault<LDMATRIX_MISALIGNED>("misaligned access: byte 88 of shared memory tile as a type aligned to 16");
    test_fault<LDMATRIX_BEYOND>("read out of bounds: bytes 512 to 527 of the 512 of shared memory tile");
    test_fault<LDMATRIX_UNWRITTEN>("of shared memory other, which no thread of this block has written");
    test_fault<LDMATRIX_UNORDERED>("is read here and was written by thread (");
    test_fault<LDMATRIX_OVERWRITTEN>("is read here and was written by thread (", "is written here and was read by thread (");
    test_fault<MMA_RETURNED>("with the mask 0xffffffff waits for lane 3, thread (35,0,0), which has returned");
    test_fault<MMA_ELSEWHERE>("which waits in the mma_tf32 at");
    test_fault<MMA_AND_LDMATRIX>("which waits in the ldmatrix_x4 at", "which waits in the mma_bf16 at");
    test_fault<MMA_AND_BARRIER>("which waits in the barrier at");
    test_fault<MMA_SHORT_WARP>("needs all 32 lanes of a warp, and the block ends after 16 of this one", nullptr, 48);
    test_fault<MMA_ORDERS_NOTHING>("is read here and was written by thread (");
}

static void test_word_faults(void)
{
    test_fault<STORE_MISALIGNED>("misaligned access: byte 2 of shared memory tile as a type aligned to 4");
    test_fault<STORE_BEYOND>("write out of bounds: bytes 512 to 527 of the 512 of shared memory tile");
    test_fault<LOAD_MISALIGNED>("misaligned access: byte 8 of shared memory tile as a type aligned to 16");
    test_fault<LOAD_UNWRITTEN>("of shared memory other, which no thread of this block has written");
    test_fault<FLIP_TOO_HIGH>("flip_bits of 0x400: only the bits below 1024 are the same in every address");
    test_fault<FLIP_STATIC>("flip_bits of an address in tile, which is not dynamic shared memory");
    test_fault<REDUCE_4_MISALIGNED>("misaligned reduce_add_4: ");
    test_fault<REDUCE_2_MISALIGNED>("misaligned reduce_add_2: ");
}

template <bool COPIES, PipeFault FAULT> static void test_pipe_fault(std::initializer_list<const char *> words)
{
    const int tiles = 6;
    Device<float> in = numbers_create(tiles * 32 * 4), out(tiles * (PIPE_WARPS - 1) * 32);
    check_fault("pipe_kernel<COPIES, FAULT>", words, [&] {
        return kernel_launch(pipe_kernel<COPIES, FAULT>, 2, PIPE_THREADS, 0, nullptr, out, in, tiles);
    });
}

template <MbarrierFault FAULT> static void test_mbarrier_fault(const char *words)
{
    Device<float> in = numbers_create(32 * 4), out(PIPE_THREADS + 1);
    check_fault("mbarrier_fault_kernel<FAULT>", {words}, [&] {
        std::fill(out.data, out.data + out.count, 0.0f);
        return kernel_launch(mbarrier_fault_kernel<FAULT>, 2, PIPE_THREADS, 0, nullptr, out, in);
    });
}

static const char *const read_after = "is read here and was written by ";
static const char *const write_after = "is written here and was read by ";
static const char *const under_way = "of shared memory whose copy is still under way: byte ";
static const char *const unwritten = "which no thread of this block has written";
static const char *const deadlock = "arrivals: byte ";

/* Which of two threads comes first is the seed's choice, and so what is seen of a fault. */
static void test_pipe_faults(void)
{
    test_pipe_fault<true, NO_FULL_WAIT>({under_way, read_after, unwritten, write_after});
    test_pipe_fault<false, NO_FULL_WAIT>({read_after, unwritten, write_after});
    test_pipe_fault<true, NO_EMPTY_WAIT>({write_after, under_way, "one arrival too many at the mbarrier at byte "});
    test_pipe_fault<false, NO_EMPTY_WAIT>({write_after, read_after, deadlock});
    test_pipe_fault<true, FULL_PARITY>({under_way, read_after, unwritten, deadlock});
    test_pipe_fault<false, FULL_PARITY>({read_after, unwritten, deadlock});
    test_pipe_fault<true, EMPTY_PARITY>({deadlock});
    test_pipe_fault<true, FULL_TOO_MANY>({deadlock});
    test_pipe_fault<false, EMPTY_TOO_MANY>({deadlock});
    test_pipe_fault<true, FULL_TOO_FEW>({"one arrival too many at the mbarrier at byte ", under_way, unwritten});
    test_pipe_fault<false, EMPTY_TOO_FEW>({write_after, read_after, deadlock});
    test_pipe_fault<true, EARLY_ARRIVAL>({write_after, read_after, under_way});
    test_pipe_fault<false, EARLY_ARRIVAL>({write_after, read_after});
    test_pipe_fault<true, NO_SYNCWARP>({write_after, read_after, under_way});
    test_pipe_fault<true, STORE_AMONG_COPIES>({"of beside is read here and was written by thread ("});
}

static void test_mbarrier_faults(void)
{
    test_mbarrier_fault<MBARRIER_NONE>("there is no mbarrier at byte 8 of barriers, for nobody has initialised it");
    test_mbarrier_fault<MBARRIER_FRESH>("mbarrier at byte 0 of barriers was initialised by thread (0,0,0), with no barrier");
    test_mbarrier_fault<MBARRIER_TWICE>("where there is one already: byte 16 of barriers");
    test_mbarrier_fault<MBARRIER_FOR_NOBODY>("for 0 arrivals, and there may be 1 to 1048575");
    test_mbarrier_fault<MBARRIER_MISALIGNED>("misaligned access: byte 4 of shared memory barriers as a type aligned to 8");
    test_mbarrier_fault<MBARRIER_BEYOND>("out of bounds: bytes 32 to 39 of the 32 of shared memory barriers");
    test_mbarrier_fault<MBARRIER_READ>("read of shared memory that is an mbarrier: byte 20 of barriers");
    test_mbarrier_fault<MBARRIER_WRITTEN>("write of shared memory that is an mbarrier: byte 22 of barriers");
    test_mbarrier_fault<MBARRIER_COPIED_OVER>("write of shared memory that is an mbarrier: byte 16 of barriers");
    test_mbarrier_fault<MBARRIER_PARITY_2>("for parity 2, which is neither 0 nor 1");
    test_mbarrier_fault<MBARRIER_OVERFLOWS>("one arrival too many at the mbarrier at byte 0 of barriers: its phase has all");
    test_mbarrier_fault<MBARRIER_MISSED>("a phase of parity 0, the mbarrier's number 2, which lacks 1 of its 1 arrivals: ");
    test_mbarrier_fault<MBARRIER_AND_BARRIER>("which lacks 1 of its 1 arrivals: byte 0 of barriers, and no thread can run");
    test_mbarrier_fault<MBARRIER_RETURNED>("which lacks 1 of its 1 arrivals: byte 0 of barriers, and no thread can run");
    test_mbarrier_fault<COPY_OF_OTHER_PHASE>("byte 4 of tile is read here and was written by a copy of thread (3,0,0)");
    test_mbarrier_fault<OWN_COPY_UNWAITED>("byte 4 of tile is read here and was written by a copy of thread (3,0,0)");
    test_mbarrier_fault<LATER_COPY>("byte 20 of tile is read here and was written by a copy of thread (3,0,0), with no");
    test_mbarrier_fault<THIRD_READER>("byte 36 of tile is written here and was read by thread (96,0,0), with no barrier");
    test_mbarrier_fault<EARLIER_PHASE>("byte 0 of tile is read here and was written by thread (3,0,0), with no barrier");
    test_mbarrier_fault<READ_AFTER_ARRIVAL>("byte 36 of tile is written here and was read by thread (40,0,0), with no");
    test_mbarrier_fault<WRITE_AFTER_BARRIER>("byte 36 of tile is read here and was written by thread (3,0,0), with no");
}

int main(void)
{
    test_fragments<true>();
    test_fragments<false>();
    test_sums();
    test_ldmatrix<false>();
    test_ldmatrix<true>();
    test_addresses();
    test_reductions();
    test_conversions();
    test_copy_faults();
    test_warp_faults();
    test_word_faults();
    test_pipe_faults();
    test_mbarrier_faults();
    test_pipe<true>();
    test_pipe<false>();
    test_ring();
    test_relay();
    test_copies(); /* after the faults: what they left under way is gone */
    for (uint64_t seed = 1; seed <= 3; seed++) {
        test_product<false>(70, 96, seed);
        test_product<true>(32, 128, seed);
    }
    test_product<true>(1, 32, 4);
    return test_end();
}
