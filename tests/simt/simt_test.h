/* simt_test.h - what tests of the emulation itself share: device memory that the host reads in place, launches that must
 * have no fault, and launches that must have one. */
#ifndef SIMT_TEST_H
#define SIMT_TEST_H

#include <algorithm>
#include <initializer_list>
#include <memory>
#include <string>
#include <vector>

#include "simt_machine.h"
#include "tests/test.h"

/* n elements of device memory, read and written in place. Copies, as a launch makes them, share the memory. */
template <typename T>
struct Device {
    std::shared_ptr<T> memory;
    T *data;
    size_t count;
    explicit Device(size_t n, T fill = T()) : count(n)
    {
        cudaMalloc(&data, n * sizeof(T));
        memory = std::shared_ptr<T>(data, [](T *freed) { cudaFree(freed); });
        std::fill(data, data + n, fill);
    }
    operator T *() const { return data; }
    std::vector<T> values() const { return std::vector<T>(data, data + count); }
};

static inline bool contains(const std::string &text, const char *part) { return text.find(part) != std::string::npos; }

/* Launches, and checks that neither the launch nor the kernel has a fault. */
#define RUN(...)                                                                                   \
    do {                                                                                           \
        cudaError_t run_error = cudaSuccess;                                                       \
        std::string run_fault = simt_fault_of([&] { run_error = kernel_launch(__VA_ARGS__); });    \
        CHECK(run_error == cudaSuccess && run_fault.empty(), "%s %s", cudaGetErrorString(run_error), run_fault.c_str()); \
    } while (0)

/* launch() runs into a fault with every seed, said with one of `words`, and kernel, block and thread are named. */
template <typename Launch>
static inline void check_fault(const char *kernel, std::initializer_list<const char *> words, Launch launch)
{
    std::string named = std::string("kernel ") + kernel + ", block (";
    TEST("found: %s", *words.begin());
    for (int seed = 0; seed < 5; seed++) {
        simt_seed((uint64_t)seed);
        cudaError_t error = cudaSuccess;
        std::string fault = simt_fault_of([&] { error = launch(); });
        CHECK(std::any_of(words.begin(), words.end(), [&](const char *some) { return contains(fault, some); }),
              "seed %d: got '%s'", seed, fault.c_str());
        CHECK(contains(fault, named.c_str()) && contains(fault, ",0,0), thread ("), "no kernel, block and thread in '%s'",
              fault.c_str());
        CHECK(error == cudaErrorLaunchFailure, "the launch returned %s", cudaGetErrorString(error));
    }
}

/* The same for faults that end the process: those of the sanitizers, and all where no test waits for them. */
template <typename Launch>
static inline void check_fatal(const char *kernel, const char *words, Launch launch)
{
    std::string named = std::string("simt: kernel ") + kernel + ", block (";
    TEST("fatal: %s", words);
    SimtChild child = simt_child([&] { (void)launch(); });
    CHECK(child.status != 0, "status %d", child.status);
    CHECK(contains(child.text, words), "got '%s'", child.text.c_str());
    size_t at = child.text.find(named);
    CHECK(at != std::string::npos && at < child.text.find(words), "not named before: '%s'", child.text.c_str());
}

#endif
