/* test_minimal.cpp - does the emulation find what has gone wrong in attention kernels? The minimal kernel of fixtures/ runs
 * with each of its planted faults and without: each fault must be reported by the emulation, by a sanitizer, or show against
 * attention/reference.c, and the kernel without one must pass all three at every length. */
#include "tests/simt/fixtures/minimal.cu"

#include <random>
#include <vector>

#include "attention/attention.h"
#include "tests/test.h"

extern "C" const AttentionKernel attention_reference;

/* One problem: inputs, what the reference makes of them, and the same tensors in device memory. */
struct Case {
    enum Tensor { Q, K, V, DOUT, O, DQ, DK, DV, TENSORS };
    int heads, T, HS;
    int run; /* heads that the kernels are launched for, the first ones */
    float scale;
    std::vector<float> truth[TENSORS], truth_lse;
    float *device[TENSORS], *lse;

    Case(int heads_, int T_, int HS_) : heads(heads_), T(T_), HS(HS_), run(heads_), scale(attention_scale(HS_))
    {
        std::mt19937 random(1234);
        std::normal_distribution<float> normal(0.25f, 1);
        for (int i = 0; i < TENSORS; i++) {
            truth[i].resize((size_t)heads * T * HS);
            if (i <= DOUT) for (float &value : truth[i]) value = normal(random);
            cudaMalloc(&device[i], bytes());
            if (i <= DOUT) cudaMemcpy(device[i], truth[i].data(), bytes(), cudaMemcpyHostToDevice);
        }
        truth_lse.resize((size_t)heads * T);
        cudaMalloc(&lse, truth_lse.size() * sizeof(float));
        reference();
    }
    ~Case()
    {
        for (float *tensor : device) cudaFree(tensor);
        cudaFree(lse);
    }
    size_t bytes() const { return (size_t)heads * T * HS * sizeof(float); }

    void reference()
    {
        AttentionShape shape = {1, T, heads, HS, scale, DTYPE_FP32, 0, 0};
        const AttentionKernel *kernel = &attention_reference;
        std::vector<char> saved(kernel->saved_bytes(&shape)), scratch(kernel->scratch_bytes(&shape));
        AttentionInput in[TENSORS];
        AttentionOutput out[TENSORS];
        for (int i = 0; i < TENSORS; i++) {
            in[i] = attention_heads_input(truth[i].data(), &shape);
            out[i] = attention_heads_output(truth[i].data(), &shape);
        }
        kernel->forward(out[O], truth_lse.data(), saved.data(), scratch.data(), in[Q], in[K], in[V], &shape, nullptr);
        kernel->backward(out[DQ], out[DK], out[DV], scratch.data(), in[DOUT], in[Q], in[K], in[V], in[O], truth_lse.data(),
                         saved.data(), &shape, nullptr);
    }

    template <int BR, int BC, Fault FAULT> cudaError_t forward()
    {
        return minimal_forward<BR, BC, FAULT>(device[O], lse, device[Q], device[K], device[V], run, T, HS, scale, nullptr);
    }
    /* From the reference's O and LSE, so that only the backward is judged. */
    template <int BR, int BC, Fault FAULT> cudaError_t backward()
    {
        cudaMemcpy(device[O], truth[O].data(), bytes(), cudaMemcpyHostToDevice);
        cudaMemcpy(lse, truth_lse.data(), truth_lse.size() * sizeof(float), cudaMemcpyHostToDevice);
        return minimal_backward<BR, BC, FAULT>(device[DQ], device[DK], device[DV], device[DOUT], device[Q], device[K],
                                               device[V], device[O], lse, run, T, HS, scale, nullptr);
    }

    /* The largest error against the reference, in units of the largest value (1 where all are smaller); a NaN counts as
     * infinite. Sums of up to some hundred fp32 terms: 1e-5 is far above their rounding and far below any fault. */
    double error(Tensor which) const
    {
        double worst = 0, largest = 0;
        for (size_t i = 0; i < (size_t)run * T * HS; i++) {
            double difference = fabs((double)device[which][i] - (double)truth[which][i]);
            if (!(difference <= worst)) worst = difference != difference ? INFINITY : difference;
            if (fabs(truth[which][i]) > largest) largest = fabs(truth[which][i]);
        }
        return worst / fmax(1, largest);
    }
    bool agrees(Tensor which) const { return error(which) < 1e-5; }
};

static bool contains(const std::string &text, const char *part) { return text.find(part) != std::string::npos; }

/* The kernel without faults, from its own forward to its backward. */
template <int BR, int BC> static void test_sound(int T, int HS)
{
    TEST("minimal kernel, tiles %dx%d, T=%d HS=%d", BR, BC, T, HS);
    for (int seed = 0; seed < 3; seed++) {
        simt_seed(seed);
        Case c(2, T, HS);
        std::string fault = simt_fault_of([&] {
            CHECK((c.forward<BR, BC, FAULT_NONE>()) == cudaSuccess, "forward: %s", cudaGetErrorString(cudaGetLastError()));
            CHECK(c.agrees(Case::O), "O is off by %g", c.error(Case::O));
            CHECK((c.backward<BR, BC, FAULT_NONE>()) == cudaSuccess, "backward: %s", cudaGetErrorString(cudaGetLastError()));
        });
        CHECK(fault.empty(), "fault: %s", fault.c_str());
        for (int i = Case::DQ; i <= Case::DV; i++)
            CHECK(c.agrees((Case::Tensor)i), "gradient %d is off by %g", i - Case::DQ, c.error((Case::Tensor)i));
    }
}

static void test_barriers(void)
{
    TEST("leaving the loop before a barrier is found");
    Case c(1, 65, 8);
    std::string fault = simt_fault_of([&] { (void)c.forward<32, 32, FAULT_BREAK>(); });
    CHECK(contains(fault, "divergent barrier") && contains(fault, "minimal_forward_kernel"), "got '%s'", fault.c_str());
    CHECK(contains(fault, "block (0,0,0), thread ("), "no block and thread in '%s'", fault.c_str());

    TEST("a missing barrier is found as a race or as a read of what is not written yet");
    for (int seed = 0; seed < 10; seed++) {
        simt_seed(seed);
        fault = simt_fault_of([&] { (void)c.forward<32, 32, FAULT_NO_BARRIER>(); });
        CHECK(contains(fault, "race") || contains(fault, "no thread of this block has written"), "seed %d: got '%s'", seed,
              fault.c_str());
    }
}

static void test_unequal_tiles(void)
{
    TEST("code for BR = BC with fewer query rows: keys that nobody loaded are found");
    Case c(1, 65, 8);
    std::string fault = simt_fault_of([&] { (void)c.forward<16, 32, FAULT_UNEQUAL_TILES>(); });
    CHECK(contains(fault, "which no thread of this block has written"), "got '%s'", fault.c_str());

    TEST("code for BR = BC with fewer keys: O differs from the reference");
    fault = simt_fault_of([&] { (void)c.forward<32, 16, FAULT_UNEQUAL_TILES>(); });
    CHECK(fault.empty(), "unexpected: %s", fault.c_str());
    CHECK(!c.agrees(Case::O), "O is off by %g only", c.error(Case::O));
}

static void test_bounds(void)
{
    TEST("a backward without bounds is found at the end of its tensors");
    SimtChild child = simt_child([] {
        Case c(1, 17, 8);
        (void)c.backward<16, 16, FAULT_NO_BOUNDS>();
    });
    CHECK(child.status != 0, "status %d", child.status);
    CHECK(contains(child.text, "AddressSanitizer"), "got '%s'", child.text.c_str());
    CHECK(contains(child.text, "simt: kernel minimal_backward_kernel<BR, BC, FAULT>, block (0,0,0), thread ("), "got '%s'",
          child.text.c_str());

    TEST("a backward without bounds is wrong where other heads follow");
    Case c(6, 17, 8);
    c.run = 3;
    std::string fault = simt_fault_of([&] { (void)c.backward<16, 16, FAULT_NO_BOUNDS>(); });
    CHECK(fault.empty(), "unexpected: %s", fault.c_str());
    CHECK(!c.agrees(Case::DQ), "dQ is off by %g only", c.error(Case::DQ));
}

static void test_gradient(void)
{
    TEST("a dV with the wrong row of dO differs from the reference, dQ and dK do not");
    Case c(2, 33, 8);
    std::string fault = simt_fault_of([&] { (void)c.backward<16, 16, FAULT_DV_ROW>(); });
    CHECK(fault.empty(), "unexpected: %s", fault.c_str());
    CHECK(!c.agrees(Case::DV), "dV is off by %g only", c.error(Case::DV));
    CHECK(c.agrees(Case::DQ) && c.agrees(Case::DK), "dQ is off by %g, dK by %g", c.error(Case::DQ), c.error(Case::DK));
}

static void test_shared_memory(void)
{
    TEST("a launch that needs more than 48 KB and does not ask for it is refused, and O stays NaN");
    Case c(1, 5, 128);
    auto kernel = minimal_forward_kernel<32, 32, FAULT_NONE>;
    size_t bytes = minimal_forward_shared(32, 32, 128);
    cudaError_t error = simt_launch("minimal_forward_kernel", (const void *)kernel, 1, 32, bytes, nullptr, [&] {
        kernel(c.device[Case::O], c.lse, c.device[Case::Q], c.device[Case::K], c.device[Case::V], c.T, c.HS, c.scale);
    });
    CHECK(error == cudaErrorInvalidValue && cudaGetLastError() == error, "got %s", cudaGetErrorString(error));
    CHECK(!c.agrees(Case::O), "O is off by %g only", c.error(Case::O));

    TEST("the same through kernel_launch, which asks");
    CHECK((c.forward<32, 32, FAULT_NONE>()) == cudaSuccess, "got %s", cudaGetErrorString(cudaGetLastError()));
    CHECK(c.agrees(Case::O), "O is off by %g", c.error(Case::O));
}

int main(void)
{
    for (int T : {1, 3, 17, 65}) {
        test_sound<32, 32>(T, 8);
        test_sound<16, 16>(T, 40);
        test_sound<32, 16>(T, 8);
    }
    test_barriers();
    test_unequal_tiles();
    test_bounds();
    test_gradient();
    test_shared_memory();
    return test_end();
}
