/* test_flash_tf32x3.cpp - attention/flash_tf32x3.cu on the CPU: both forms of its backward against the float64 truth, by the
 * bounds and with the fences of tests/attention_check.h, at shapes that do not fit its tiles; with numbers that are none, or
 * nearly; with threads in other orders, which must not change a bit where that is promised; and that forward and backward
 * see the same logits.
 */
#include "tests/attention_check.h"
#include "tests/test.h"

#include "attention/flash_tf32x3.cu"

#include <float.h>

static void *device_alloc(size_t bytes)
{
    void *memory = NULL;
    return cudaMalloc(&memory, bytes) == cudaSuccess ? memory : NULL;
}
static void device_free(void *memory) { cudaFree(memory); }
static void device_copy(void *to, const void *from, size_t bytes) { cudaMemcpy(to, from, bytes, cudaMemcpyDefault); }

static const Machine machine = {ATTENTION_CUDA, 80, NULL, device_alloc, device_free, device_copy, device_copy};

static AttentionShape shape_of(int64_t B, int64_t NH, int64_t T, int64_t HS, int deterministic)
{
    return {B, T, NH, HS, attention_scale(HS), DTYPE_FP32, deterministic, 0};
}

static void check_problem(const Problem *problem, Layout layout, int unaligned)
{
    const AttentionShape *shape = &problem->shape;
    Judgement judgement = {""};
    int status = check_kernel(&attention_flash_tf32x3, problem, layout, unaligned, &machine, &judgement);
    CHECK(status == 0, "B %d NH %d T %d HS %d%s, layout %s%s: %s", (int)shape->B, (int)shape->NH, (int)shape->T,
          (int)shape->HS, shape->deterministic ? " deterministic" : "", layout_names[layout], unaligned_words(unaligned),
          judgement.text);
}

/* Each padded head dimension at one, two and three tiles; layouts and alignments in turn, each with both backwards. */
static void test_shapes(void)
{
    static const struct { int64_t B, NH, T, HS; } shapes[] = {
        {2, 3, 1, 8},   {1, 3, 1, 64},   {2, 2, 2, 40},  {1, 2, 3, 1},     {1, 1, 3, 256},  {1, 2, 15, 3},  {2, 1, 16, 16},
        {1, 3, 17, 32}, {1, 1, 17, 96},  {1, 2, 63, 16}, {1, 1, 63, 72},   {1, 1, 64, 128}, {1, 2, 64, 31}, {1, 1, 65, 64},
        {1, 1, 65, 40}, {1, 1, 66, 104}, {1, 1, 67, 80}, {1, 1, 66, 129},  {1, 2, 100, 8},  {1, 1, 130, 64}, {1, 1, 130, 16},
        {1, 1, 65, 96}, {1, 1, 35, 255}, {1, 1, 97, 36}, {1, 1, 257, 4},
    };
    for (size_t k = 0; k < sizeof shapes / sizeof shapes[0]; k++)
        for (int deterministic = 0; deterministic < 2; deterministic++) {
            AttentionShape shape = shape_of(shapes[k].B, shapes[k].NH, shapes[k].T, shapes[k].HS, deterministic);
            Problem problem = problem_create(shape, INPUT_NORMAL, (uint64_t)(shape.T * 1000 + shape.HS));
            TEST("flash_tf32x3: T %d, HS %d%s", (int)shape.T, (int)shape.HS, deterministic ? ", deterministic" : "");
            size_t turn = k + (size_t)deterministic;
            check_problem(&problem, (Layout)(turn % LAYOUT_FAR), turn / LAYOUT_FAR % 2 ? UNALIGNED : ALIGNED);
            problem_free(&problem);
        }
}

/* Tensors that are aligned beside one that is not: what is true of one must not be taken to be true of another. */
static void test_alignments(void)
{
    for (int deterministic = 0; deterministic < 2; deterministic++) {
        TEST("flash_tf32x3: one tensor unaligned%s", deterministic ? ", deterministic" : "");
        Problem problem = problem_create(shape_of(1, 1, 70, 40, deterministic), INPUT_NORMAL, 31);
        for (int tensor = 0; tensor < TENSOR_COUNT; tensor++) check_problem(&problem, LAYOUT_HEADS, 1 << tensor);
        problem_free(&problem);
    }
}

/* Rows that begin at multiples of 16 bytes and do not end at one. */
static void test_padded(void)
{
    static const int64_t dims[] = {1, 2, 3, 31, 66};
    TEST("flash_tf32x3: head dimensions that are no multiple of 4, in rows padded to one");
    for (int64_t HS : dims)
        for (int deterministic = 0; deterministic < 2; deterministic++) {
            Problem problem = problem_create(shape_of(1, 2, 35, HS, deterministic), INPUT_NORMAL, 37);
            check_problem(&problem, LAYOUT_PADDED, ALIGNED);
            problem_free(&problem);
        }
}

static void test_logits(void)
{
    static const char *const names[] = {"normal", "+1e5", "-1e5", "-1e5 to 1e5"};
    for (int kind = INPUT_HIGH; kind <= INPUT_SPREAD; kind++)
        for (int deterministic = 0; deterministic < 2; deterministic++) {
            TEST("flash_tf32x3: logits of %s%s", names[kind], deterministic ? ", deterministic" : "");
            Problem problem = problem_create(shape_of(1, 1, 130, 64, deterministic), (InputKind)kind, 11);
            check_problem(&problem, LAYOUT_PACKED, 0);
            problem_free(&problem);
        }
}

/* Logits beyond what a maximum can be subtracted from without care: 1e11, all the same; up to 1e10, 1e14 and 1e20. */
static void test_huge(void)
{
    static const float factors[] = {0, 0x1p16f, 0x1p23f, 0x1p33f};
    TEST("flash_tf32x3: logits of 1e10 to 1e20");
    for (float factor : factors)
        for (int deterministic = 0; deterministic < 2; deterministic++) {
            Problem problem = problem_create(shape_of(1, 1, 70, 64, deterministic), INPUT_NORMAL, 37);
            problem_enlarge(&problem, factor);
            check_problem(&problem, LAYOUT_HEADS, 0);
            problem_free(&problem);
        }
}

/* Scales other than the usual: with 0 every row is a mean, with a large one P is nearly a single key, with one below 0 the
 * order of the logits turns around. */
static void test_scales(void)
{
    static const float scales[] = {0, 0.01f, 3, -0.3f};
    for (float scale : scales) {
        TEST("flash_tf32x3: a scale of %g", scale);
        AttentionShape shape = shape_of(1, 1, 40, 8, scale != 3);
        shape.scale = scale;
        Problem problem = problem_create(shape, INPUT_NORMAL, 29);
        check_problem(&problem, LAYOUT_HEADS, 0);
        problem_free(&problem);
    }
}

/* A value that is no number, in each input in turn: the truth says where it may arrive. */
static void test_not_finite(void)
{
    static const char *const parts[] = {"Q", "K", "V", "dO"};
    static const int64_t rows[] = {0, 21, 66};
    for (int part = 0; part < INPUT_COUNT; part++) {
        TEST("flash_tf32x3: NaN, +inf and -inf in one row of %s reach no row they may not", parts[part]);
        for (int k = 0; k < 18; k++) {
            Problem problem = problem_create(shape_of(1, 2, 67, 8, k / 9), INPUT_NORMAL, 13);
            problem.input[part][(67 + rows[k % 3]) * 8 + 3] = k % 9 < 3 ? NAN : k % 9 < 6 ? INFINITY : -INFINITY;
            problem_solve(&problem);
            check_problem(&problem, LAYOUT_HEADS, 0);
            problem_free(&problem);
        }
    }
}

/* The largest numbers round to an infinite high part, and the difference from it is infinite too; but the row is finite. */
static void test_largest(void)
{
    TEST("flash_tf32x3: the largest finite numbers, and the smallest");
    for (int deterministic = 0; deterministic < 2; deterministic++) {
        Problem problem = problem_create(shape_of(1, 1, 40, 8, deterministic), INPUT_NORMAL, 17);
        for (int row = 0; row < 40; row++) problem.input[INPUT_DO][row * 8 + 3] = 0; /* or dP would be too large */
        problem.input[INPUT_V][5 * 8 + 3] = FLT_MAX;
        problem.input[INPUT_V][9 * 8 + 4] = FLT_MIN / 4;
        problem.input[INPUT_K][7 * 8 + 2] = FLT_MIN / 8;
        problem_solve(&problem);
        check_problem(&problem, LAYOUT_HEADS, 0);
        problem_free(&problem);
    }
}

static void test_orders(void)
{
    static const struct { int64_t NH, T, HS; } cases[] = {{3, 70, 24}, {1, 129, 72}, {1, 66, 200}, {1, 300, 8}};
    TEST("flash_tf32x3: the order of threads and blocks changes no bit of the deterministic form");
    for (const auto &one : cases) {
        Problem problem = problem_open(shape_of(1, one.NH, one.T, one.HS, 1), INPUT_NORMAL, 23);
        problem_cancel(&problem);
        Result first = result_create(&problem.shape), again = result_create(&problem.shape);
        Judgement judgement = {""};
        int status = 0;
        for (uint64_t seed = 1; seed <= 3 && !status; seed++) {
            simt_seed(seed);
            status = run_kernel(&attention_flash_tf32x3, &problem, LAYOUT_PACKED, 0, &machine, seed == 1 ? &first : &again,
                                &judgement);
            if (!status && seed > 1) status = compare_results(&problem.shape, &first, &again, &judgement);
        }
        CHECK(status == 0, "T %d HS %d: %s", (int)one.T, (int)one.HS, judgement.text);
        result_free(&first);
        result_free(&again);
        problem_free(&problem);
    }
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

static void test_refusals(void)
{
    const AttentionKernel *kernel = &attention_flash_tf32x3;
    TEST("flash_tf32x3: refuses what it cannot do, and takes empty shapes");
    AttentionShape good = shape_of(1, 1, 4, 8, 1), bad = good;
    for (int sm : {80, 86, 89, 90, 100, 120})
        for (int64_t HS : {1, 64, 96, 128, 256}) {
            good.HS = HS;
            CHECK(!kernel->refuse(&good, sm), "sm_%d, HS %d: %s", sm, (int)HS, kernel->refuse(&good, sm));
        }
    CHECK(kernel->refuse(&good, 75), "takes sm_75");
    bad.HS = 257;
    CHECK(kernel->refuse(&bad, 90), "takes HS 257");
    bad.HS = 0;
    CHECK(kernel->refuse(&bad, 90), "takes HS 0");
    bad = good;
    bad.dtype = DTYPE_BF16;
    CHECK(kernel->refuse(&bad, 90), "takes bf16");
    bad = good;
    bad.B = (int64_t)1 << 40;
    CHECK(kernel->refuse(&bad, 90), "takes 2^40 heads");
    AttentionInput in = {NULL, 0, 0, 0};
    AttentionOutput out = {NULL, 0, 0, 0};
    for (int k = 0; k < 3; k++) {
        AttentionShape shape = shape_of(k != 0, k != 1, k != 2, 16, 0);
        CHECK(!kernel->refuse(&shape, 90), "refuses an empty shape");
        const char *forward = kernel->forward(out, NULL, NULL, NULL, in, in, in, &shape, NULL);
        const char *backward = kernel->backward(out, out, out, NULL, in, in, in, in, in, NULL, NULL, &shape, NULL);
        CHECK(!forward && !backward, "empty: forward: %s, backward: %s", forward, backward);
    }
}

int main(void)
{
    simt_set_sm(80);
    test_places();
    test_refusals();
    test_same_logits();
    test_shapes();
    test_alignments();
    test_padded();
    test_logits();
    test_huge();
    test_scales();
    test_not_finite();
    test_largest();
    test_orders();
    if (getenv("VERBOSE"))
        for (int quantity = 0; quantity < QUANTITY_COUNT; quantity++)
            printf("   largest error of quantity %d: %.2f of what is allowed\n", quantity,
                   judge_worst[DTYPE_FP32][quantity]);
    return test_end();
}
