/* test_simt.cpp - the emulation itself: does it compute what CUDA defines, find every fault it claims to find, and keep
 * quiet about sound kernels? The kernels are in fixtures/features.cu. */
#include "tests/simt/fixtures/features.cu"

#include <set>

#include "tests/simt/simt_test.h"

/* --- order --------------------------------------------------------------------------------------------------------- */

static std::vector<int> order_of(int seed)
{
    Device<int> order(6 * 50), counter(1);
    simt_seed(seed);
    RUN(order_kernel, 6, 50, 0, nullptr, order, counter);
    return order.values();
}

template <bool BARRIER> static size_t neighbour_outcomes(void)
{
    std::set<std::vector<int>> outcomes;
    for (int seed = 0; seed < 10; seed++) {
        Device<int> to(64, -1), between(64, -1);
        simt_seed(seed);
        RUN(neighbour_kernel<BARRIER>, 1, 64, 0, nullptr, to, between);
        outcomes.insert(to.values());
    }
    return outcomes.size();
}

static void test_order(void)
{
    TEST("a seed fixes the order of blocks and threads, another changes it");
    std::vector<int> first = order_of(1), sorted = first;
    CHECK(first == order_of(1), "seed 1 gave two orders");
    CHECK(first != order_of(2), "seeds 1 and 2 gave one order");
    std::sort(sorted.begin(), sorted.end());
    for (int i = 0; i < 300; i++) CHECK(sorted[i] == i, "thread %d ran as %d", i, sorted[i]);
    std::vector<int> blocks;
    for (int thread : first) if (blocks.empty() || blocks.back() != thread / 50) blocks.push_back(thread / 50);
    CHECK(blocks.size() == 6, "blocks are mixed: %zu runs of threads", blocks.size());
    CHECK(!std::is_sorted(first.begin(), first.begin() + 50), "threads of a block ran in order");

    TEST("a missing barrier changes what comes through global memory, a barrier keeps it");
    CHECK(neighbour_outcomes<false>() > 1, "all seeds agree");
    CHECK(neighbour_outcomes<true>() == 1, "seeds disagree");

    TEST("threads and blocks in three dimensions");
    Device<int> out(24 * 30);
    RUN(indices_kernel, dim3(2, 3, 4), dim3(5, 3, 2), 0, nullptr, out);
    for (int i = 0; i < 24 * 30; i++) CHECK(out[i] == i / 30 * 1000 + i % 30, "out[%d] is %d", i, out[i]);
}

/* --- collectives --------------------------------------------------------------------------------------------------- */

static void test_shuffles(void)
{
    TEST("shuffles: all kinds, types and widths");
    Device<long long> out(32 * SHUFFLES);
    RUN(shuffles_kernel, 1, 32, 0, nullptr, out);
    for (int lane = 0; lane < 32; lane++) {
        long long expected[SHUFFLES] = {
            30, lane ^ 5, lane + 4 < 32 ? lane + 4 : lane, lane ? lane - 1 : 0,
            lane / 8 * 8 + 2, lane % 8 + 3 < 8 ? lane + 3 : lane, (1LL << 40) + (lane % 8 >= 3 ? lane - 3 : lane),
            lane < 16 ? lane : lane ^ 16, /* segments of 16: a lower segment cannot read a higher one */
        };
        for (int i = 0; i < SHUFFLES; i++)
            CHECK(out[lane * SHUFFLES + i] == expected[i], "lane %d, shuffle %d: %lld, expected %lld", lane, i,
                  out[lane * SHUFFLES + i], expected[i]);
    }
}

static void test_votes(void)
{
    TEST("votes, matches and reductions of a warp");
    Device<unsigned> out(32 * VOTES);
    RUN(votes_kernel, 1, 32, 0, nullptr, out);
    for (int lane = 0; lane < 32; lane++) {
        unsigned expected[VOTES] = {0x49249249, 1, 0, 0xffu << lane / 8 * 8, 31 * 16, (unsigned)-7, (unsigned)-1, 0xffffffff,
                                    0xfffffff0, 0, 0xffffffff, lane < 16 ? 0xffffu : 32u};
        for (int i = 0; i < VOTES; i++)
            CHECK(out[lane * VOTES + i] == expected[i], "lane %d, vote %d: 0x%x, expected 0x%x", lane, i,
                  out[lane * VOTES + i], expected[i]);
    }
    TEST("barriers that count, or and and");
    Device<int> count(45);
    RUN(barrier_votes_kernel, 1, 45, 0, nullptr, count);
    for (int i = 0; i < 45; i++) CHECK(count[i] == 2310, "thread %d: %d", i, count[i]);
    RUN(barrier_votes_kernel, 1, 6, 0, nullptr, count);
    for (int i = 0; i < 6; i++) CHECK(count[i] == 311, "thread %d of 6: %d", i, count[i]);
    RUN(barrier_votes_kernel, 1, 5, 0, nullptr, count);
    for (int i = 0; i < 5; i++) CHECK(count[i] == 301, "thread %d of 5: %d", i, count[i]);
}

/* --- sound kernels ------------------------------------------------------------------------------------------------- */

static void test_sound(int seed)
{
    TEST("sound uses of shared memory are no faults, seed %d", seed);
    simt_seed(seed);
    const int blocks = 3, threads = 256;
    Device<float> in(blocks * threads), sums(blocks), warp_sums(blocks);
    for (int i = 0; i < blocks * threads; i++) in[i] = i % 7;
    RUN(tree_kernel, blocks, threads, threads * sizeof(float), nullptr, sums, in);
    RUN(warp_sums_kernel, blocks, threads, 0, nullptr, warp_sums, in);
    for (int b = 0; b < blocks; b++) {
        float expected = 0;
        for (int i = 0; i < threads; i++) expected += (b * threads + i) % 7;
        CHECK(sums[b] == expected && warp_sums[b] == expected, "sums %g and %g, expected %g", sums[b], warp_sums[b],
              expected);
    }
    Device<int> tiles(5 * 64), reversed(5 * 64), halves(32), bins(8);
    for (int i = 0; i < 5 * 64; i++) tiles[i] = i;
    RUN(double_buffer_kernel, 1, 64, 0, nullptr, reversed, tiles, 5);
    for (int i = 0; i < 5 * 64; i++) CHECK(reversed[i] == i / 64 * 64 + 63 - i % 64, "reversed[%d] is %d", i, reversed[i]);
    RUN(half_warp_kernel, 1, 32, 0, nullptr, halves);
    for (int i = 0; i < 32; i++) CHECK(halves[i] == 400 + ((i & 16) | ((i + 1) & 15)), "halves[%d] is %d", i, halves[i]);
    Device<float> total(1);
    RUN(histogram_kernel, 2, 100, 0, nullptr, bins, total);
    for (int i = 0; i < 8; i++) CHECK(bins[i] == (i < 4 ? 26 : 24), "bins[%d] is %d", i, bins[i]);
    CHECK(total[0] == 100, "total %g", total[0]);
}

static void test_elements(void)
{
    TEST("elements of shared memory behave as variables, Shared<T> as a pointer");
    Device<float> out(8);
    const float expected[8] = {12, 0, 7, 15, 47, 3, 9, 11};
    RUN(elements_kernel, 1, 1, 0, nullptr, out);
    for (int i = 0; i < 8; i++) CHECK(out[i] == expected[i], "line %d: %g, expected %g", i, out[i], expected[i]);
}

static void test_atomics(void)
{
    TEST("atomics that are not additions");
    Device<unsigned> u(7, 1);
    Device<int> i(4, 1);
    Device<unsigned long long> l(1, 1);
    Device<float> f(2, 1);
    RUN(atomics_kernel, 1, 1, 0, nullptr, u, i, l, f);
    CHECK((u.values() == std::vector<unsigned>{7, 0, 7, 0, 0, 1, 8}), "unsigned: %u %u %u %u %u %u %u", u[0], u[1], u[2],
          u[3], u[4], u[5], u[6]);
    CHECK((i.values() == std::vector<int>{1, -3, INT32_MIN, -3}), "int: %d %d %d %d", i[0], i[1], i[2], i[3]);
    CHECK(l[0] == (1ull << 40) + 1, "unsigned long long: %llu", l[0]);
    CHECK(f[0] == 2.5f && f[1] == 1, "float: %g %g", f[0], f[1]);
}

/* --- faults -------------------------------------------------------------------------------------------------------- */

template <FeatureFault FAULT> static void test_fault(const char *words, const char *instead = nullptr, int threads = 64)
{
    Device<float> out(65);
    check_fault("fault_kernel<FAULT>", {words, instead ? instead : words}, [&] {
        std::fill(out.data, out.data + 65, 0.0f);
        return kernel_launch(fault_kernel<FAULT>, 2, threads, 256, nullptr, out);
    });
}

template <FeatureFault FAULT> static void test_fatal(const char *words)
{
    Device<float> out(64);
    check_fatal("fault_kernel<FAULT>", words,
                [&] { return kernel_launch(fault_kernel<FAULT>, 2, 64, 256, nullptr, out); });
}

static void test_faults(void)
{
    test_fault<READ_BEYOND>("read out of bounds: bytes 256 to 259 of the 256 of shared memory tile");
    test_fault<WRITE_BEFORE>("write out of bounds: bytes -4 to -1 of the 256 of shared memory tile", "a race");
    test_fault<VECTOR_BEYOND>("read out of bounds: bytes 248 to 263");
    test_fault<RANGE_BEYOND>("shared_dynamic of 64 elements of 4 bytes from byte 4 on, but the launch asked for 256 bytes");
    test_fault<UNWRITTEN>("of shared memory dynamic, which no thread of this block has written");
    test_fault<UNWRITTEN_BYTE>("read of byte 63 of shared memory bytes, which no thread of this block has written");
    test_fault<MISALIGNED>("misaligned access: byte 12 of shared memory tile as a type aligned to 8");
    test_fault<STATIC_TOO_LARGE>("the array huge brings shared memory to");
    test_fault<TWO_WRITERS>("is written here and was written by thread (");
    test_fault<READ_THEN_WRITTEN>("is written here and was read by thread (", "is read here and was written");
    test_fault<ATOMIC_AND_PLAIN>("is written here and was written atomically by thread (", "was written by thread (40,0,0)");
    test_fault<WARP_UNORDERED>("is written here and was read by thread (", "is read here and was written");
    test_fault<OTHER_HALF>("is read here and was written by thread (", "is written here and was read");
    test_fault<RETURNED_BEFORE_BARRIER>("divergent barrier: it waits at");
    test_fault<TWO_BARRIERS>("divergent barrier: it waits at");
    test_fault<BARRIER_AND_COLLECTIVE>("which waits in the barrier at");
    test_fault<LANE_RETURNED>("waits for lane 3, thread (35,0,0), which has returned");
    test_fault<LANE_ELSEWHERE>("which waits in the __shfl_sync at");
    test_fault<TWO_MASKS>("which waits in the __ballot_sync at");
    test_fault<MASK_WITHOUT_CALLER>("the mask 0x0000ffff lacks the caller, lane ");
    test_fault<SOURCE_OUTSIDE_MASK>("which is not in its mask 0x0000ffff");
    test_fault<SOURCE_BEYOND_BLOCK>("or not in the block", nullptr, 48);
    test_fault<TRAP>("__trap()");
    test_fault<SPIN>("no thread of the block gets on");
    test_fatal<READ_BEYOND>("read out of bounds");
    test_fatal<RETURNED_BEFORE_BARRIER>("divergent barrier");
    if (__asan_poison_memory_region) {
        test_fatal<GLOBAL_BEYOND>("AddressSanitizer");
        test_fatal<GLOBAL_BEFORE>("AddressSanitizer");
#ifdef __clang__
        test_fatal<NULL_POINTER>("SEGV");
        TEST("fatal: misaligned vectors");
        SKIP("clang's sanitizer does not check where a whole struct is copied from or to; g++'s does");
#else
        test_fatal<NULL_POINTER>("null pointer");
        test_fatal<GLOBAL_MISALIGNED>("runtime error: store to misaligned address");
#endif
    } else { /* only where this file is compiled by hand: the fences do their work */
        test_fatal<GLOBAL_BEYOND>("out of bounds: byte 256 of an allocation of 256");
        test_fatal<GLOBAL_BEFORE>("out of bounds: byte -4 of an allocation of 256");
    }
}

/* --- launches and the host ----------------------------------------------------------------------------------------- */

static void test_launches(void)
{
    TEST("launches that a GPU refuses are refused with its error");
    Device<int> out(1);
    const struct { dim3 grid, block; size_t shared; cudaError_t error; } cases[] = {
        {0, 32, 0, cudaErrorInvalidConfiguration},
        {dim3(1, 65536), 32, 0, cudaErrorInvalidConfiguration},
        {dim3(1, 1, 65536), 32, 0, cudaErrorInvalidConfiguration},
        {0x80000000u, 32, 0, cudaErrorInvalidConfiguration},
        {1, 0, 0, cudaErrorInvalidConfiguration},
        {1, 1025, 0, cudaErrorInvalidConfiguration},
        {1, dim3(32, 33), 0, cudaErrorInvalidConfiguration},
        {1, dim3(1, 1, 65), 0, cudaErrorInvalidConfiguration},
        {1, 1, 228 * 1024, cudaErrorInvalidValue},
    };
    for (const auto &c : cases) {
        cudaError_t error = kernel_launch(indices_kernel, c.grid, c.block, c.shared, nullptr, out);
        CHECK(error == c.error && cudaGetLastError() == error, "grid (%u,%u,%u) block (%u,%u,%u) shared %zu: %s", c.grid.x,
              c.grid.y, c.grid.z, c.block.x, c.block.y, c.block.z, c.shared, cudaGetErrorString(error));
        CHECK(cudaGetLastError() == cudaSuccess, "the error stays");
    }
    CHECK(out[0] == 0, "a refused kernel ran");
    RUN(indices_kernel, 1, 1, 200 * 1024, nullptr, out);

    TEST("after a fault every launch and synchronisation fails, until the test ends it");
    Device<float> tile(65);
    std::string fault = simt_fault_of([&] {
        (void)kernel_launch(fault_kernel<TRAP>, 1, 64, 256, nullptr, tile);
        CHECK(kernel_launch(indices_kernel, 1, 1, 0, nullptr, out) == cudaErrorLaunchFailure, "a later launch works");
        CHECK(cudaDeviceSynchronize() == cudaErrorLaunchFailure, "a later synchronisation works");
    });
    CHECK(contains(fault, "__trap"), "got '%s'", fault.c_str());
    CHECK(cudaDeviceSynchronize() == cudaSuccess && cudaGetLastError() == cudaSuccess, "the fault stays");

    TEST("a hundred thousand blocks, a block of 1024 threads");
    Device<int> many(100000), large(1024);
    RUN(indices_kernel, 100000, 1, 0, nullptr, many);
    RUN(indices_kernel, 1, 1024, 0, nullptr, large);
    CHECK(many[99999] == 99999000 && large[1023] == 1023, "%d and %d", many[99999], large[1023]);
}

static void test_host(void)
{
    TEST("device memory is aligned and NaN, frees and copies work");
    float *memory = nullptr;
    CHECK(cudaMalloc(&memory, 13 * sizeof(float)) == cudaSuccess, "no memory");
    CHECK((uintptr_t)memory % 256 == 0, "at %p", (void *)memory);
    for (int i = 0; i < 13; i++) CHECK(isnan(memory[i]), "memory[%d] is %g", i, memory[i]);
    float host[6] = {1, 2, 3, 4, 5, 6}, back[4] = {};
    cudaMemcpyAsync(memory, host, sizeof host, cudaMemcpyHostToDevice, nullptr);
    cudaMemcpy2DAsync(back, 2 * sizeof(float), memory, 3 * sizeof(float), 2 * sizeof(float), 2, cudaMemcpyDeviceToHost,
                      nullptr);
    CHECK(back[0] == 1 && back[1] == 2 && back[2] == 4 && back[3] == 5, "%g %g %g %g", back[0], back[1], back[2], back[3]);
    cudaMemset(memory, 0, 4);
    CHECK(memory[0] == 0 && memory[1] == 2, "%g %g", memory[0], memory[1]);
    CHECK(cudaFree(memory) == cudaSuccess, "free");
    CHECK(cudaFree(memory) == cudaErrorInvalidValue && cudaGetLastError() == cudaErrorInvalidValue, "a second free passes");
    CHECK(cudaFree(nullptr) == cudaSuccess, "free of NULL");

    TEST("the device describes itself");
    int sms = 0, bytes = 0, major = 0;
    cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0);
    cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0);
    simt_set_sm(90);
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0);
    simt_set_sm(80);
    CHECK(sms == 4 && bytes == 227 * 1024 && major == 9, "%d SMs, %d bytes, sm_%d0", sms, bytes, major);
    simt_set_shared(99 * 1024);
    cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0);
    cudaError_t more = cudaFuncSetAttribute((const void *)&sms, cudaFuncAttributeMaxDynamicSharedMemorySize, 100 * 1024);
    simt_set_shared(0);
    CHECK(bytes == 99 * 1024 && more == cudaErrorInvalidValue && cudaGetLastError() == more, "%d bytes, %s", bytes,
          cudaGetErrorString(more));
    CHECK(cudaSetDevice(1) == cudaErrorInvalidDevice && cudaGetLastError() == cudaErrorInvalidDevice, "there is a device 1");
    cudaStream_t stream;
    cudaEvent_t start, end;
    float milliseconds = -1;
    cudaStreamCreate(&stream);
    cudaEventCreate(&start);
    cudaEventCreate(&end);
    cudaEventRecord(start, stream);
    cudaEventRecord(end, stream);
    cudaEventElapsedTime(&milliseconds, start, end);
    CHECK(milliseconds >= 0 && cudaStreamSynchronize(stream) == cudaSuccess, "%g ms", milliseconds);
    cudaEventDestroy(start);
    cudaEventDestroy(end);
    cudaStreamDestroy(stream);
}

/* --- numbers ------------------------------------------------------------------------------------------------------- */

/* Of two neighbouring values of a small float type, with bits b and b+1: all below the middle goes down, all above up, the
 * middle itself to the even one. How often that does not hold. */
template <typename Small>
static int misrounded(uint16_t b, Small (*from_bits)(unsigned short), unsigned short (*to_bits)(Small))
{
    uint16_t next = b + 1, even = b & 1 ? next : b;
    float low = from_bits(b), high = from_bits(next);
    float middle = (float)(((double)low + high) / 2); /* exact: one bit more than the type has */
    const struct { Small rounded; uint16_t expected; } cases[] = {
        {low, b},
        {middle, even},
        {(double)middle, even},
        {nextafterf(middle, low), b},
        {nextafterf(middle, high), next},
        {nextafter((double)middle, (double)low), b},
        {nextafter((double)middle, (double)high), next},
    };
    int wrong = 0;
    for (const auto &c : cases) wrong += to_bits(c.rounded) != c.expected;
    return wrong;
}

static void test_rounding(void)
{
    TEST("bf16 rounds to nearest even from float and double, at every boundary");
    int wrong = 0;
    for (unsigned sign = 0; sign <= 0x8000; sign += 0x8000)
        for (unsigned b = 0; b < 0x7f7f; b++)
            wrong += misrounded<__nv_bfloat16>((uint16_t)(sign | b), __ushort_as_bfloat16, __bfloat16_as_ushort);
    CHECK(wrong == 0, "%d wrong", wrong);
    CHECK(__bfloat16_as_ushort(__float2bfloat16(NAN)) == 0x7fff && __bfloat16_as_ushort(__float2bfloat16(-NAN)) == 0x7fff,
          "NaN became 0x%04x", __bfloat16_as_ushort(__float2bfloat16(NAN)));
    CHECK(__bfloat16_as_ushort(__float2bfloat16(INFINITY)) == 0x7f80, "infinity");
    CHECK(__bfloat16_as_ushort(__float2bfloat16(3.4e38f)) == 0x7f80, "3.4e38 is beyond the largest bf16");
    CHECK(__bfloat16_as_ushort(__float2bfloat16_rz(3.4e38f)) == 0x7f7f, "3.4e38 towards zero");

    TEST("half rounds to nearest even from float and double, at every boundary");
    for (unsigned sign = 0; sign <= 0x8000; sign += 0x8000)
        for (unsigned b = 0; b < 0x7bff; b++)
            wrong += misrounded<__half>((uint16_t)(sign | b), __ushort_as_half, __half_as_ushort);
    CHECK(wrong == 0, "%d wrong", wrong);
    CHECK(__half2float(__ushort_as_half(0x0001)) == 0x1p-24f && __half2float(__ushort_as_half(0x7bff)) == 65504, "values");
    CHECK(__half_as_ushort(__float2half(65520)) == 0x7c00 && __half_as_ushort(__float2half(65519)) == 0x7bff, "overflow");
    CHECK(__half_as_ushort(__float2half(NAN)) == 0x7fff, "NaN");

    TEST("bf16 pairs and operators");
    __nv_bfloat162 pair = __floats2bfloat162_rn(1.5f, -2);
    float2 both = __bfloat1622float2(pair * pair + __float2bfloat162_rn(1));
    CHECK(both.x == 3.25f && both.y == 5, "%g %g", both.x, both.y);
    CHECK(sizeof pair == 4 && __low2float(pair) == 1.5f && __high2float(pair) == -2, "layout");
    __nv_bfloat16 one = 1.0f, tiny = 0x1.8p-9f;
    CHECK((float)(one + tiny) == 1 && (float)(one - tiny) == 0x1.fep-1f, "%g %g", (float)(one + tiny), (float)(one - tiny));
    CHECK((float)__hfma(pair.x, pair.x, one) == 3.25f && pair.y < one && -pair.y > one, "fma and order");
}

static void test_arithmetic(void)
{
    TEST("bits and integers");
    CHECK(__clz(1) == 31 && __clz(0) == 32 && __ffs(8) == 4 && __ffs(0) == 0 && __popc(0xf0f0) == 8, "counts");
    CHECK(__brev(1) == 0x80000000 && __byte_perm(0x33221100, 0x77665544, 0x7410) == 0x77441100, "permutations");
    CHECK(__umulhi(1u << 31, 6) == 3 && __mulhi(-1, 5) == -1 && __umul64hi(1ull << 63, 6) == 3, "high products");
    CHECK(__funnelshift_l(0x80000000, 1, 1) == 3 && __funnelshift_r(2, 1, 1) == 0x80000001, "funnels");
    CHECK(__float_as_uint(1.0f) == 0x3f800000 && __int_as_float(0x40000000) == 2, "bits of floats");
    CHECK(__float2int_rn(2.5f) == 2 && __float2int_rd(-0.5f) == -1 && __float2int_ru(0.5f) == 1, "rounding");

    TEST("minimum, maximum and elementary functions");
    CHECK(min(-1, 1) == -1 && max(-1, 1u) == 0xffffffff && max((size_t)3, (size_t)2) == 3, "integers");
    CHECK(max(NAN, 1.0f) == 1 && min(1.0, 2.0f) == 1, "floats");
    CHECK(fabsf(__expf(1) - 2.7182817f) < 1e-6f && fabsf(rsqrtf(4) - 0.5f) < 1e-7f && __frcp_rn(8) == 0.125f, "functions");
    CHECK(__saturatef(2) == 1 && __saturatef(NAN) == 0 && fabsf(__logf(__expf(2)) - 2) < 1e-6f, "functions");

    TEST("vectors have CUDA's sizes and alignments");
    CHECK(alignof(float4) == 16 && alignof(float2) == 8 && alignof(float3) == 4 && sizeof(float3) == 12, "float");
    CHECK(alignof(double2) == 16 && alignof(uint2) == 8 && alignof(uchar4) == 4 && alignof(ushort4) == 8, "others");
    CHECK(make_int4(1, 2, 3, 4).w == 4 && make_longlong2(1, 2).y == 2 && dim3(7).y == 1, "values");
}

int main(void)
{
    test_order();
    test_shuffles();
    test_votes();
    for (int seed = 0; seed < 5; seed++) test_sound(seed);
    test_elements();
    test_atomics();
    test_faults();
    test_launches();
    test_host();
    test_rounding();
    test_arithmetic();
    return test_end();
}
