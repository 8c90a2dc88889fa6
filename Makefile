# flashgpt: `make` builds train_gpt, `make help` lists the rest.
#
# Variables: CC=clang  DEBUG=1 (sanitizers, in build/debug)  ARCH=sm_90a (GPU to build for; found out where one is visible)
#            CUDA=0, BLAS=0, OPENMP=0 (build without)  MARCH=x86-64-v3 (CPU to build for; default: this one)
#            SIMT=1 (the GPU code for the CPU, under the emulation of tests/simt, in build/simt)
#            CPPFLAGS, CFLAGS, NVCCFLAGS, LDFLAGS, LDLIBS (come after those found here, and so win)

CC ?= cc
ifeq ($(origin CC),default)
CC := cc
endif
ifeq ($(origin CXX),default)
CXX := $(if $(findstring clang,$(CC)),clang++,g++)
endif
NVCC ?= nvcc
ARCH ?=
DEBUG ?= 0
SIMT ?= 0
PYTHON ?= python3

BUILD := build
ifneq ($(DEBUG),0)
BUILD := build/debug
endif
ifneq ($(SIMT),0)
BUILD := build/simt$(if $(filter-out 0,$(DEBUG)),-debug)
override CUDA := emulated
endif
ifneq ($(VARIANT),)
BUILD := build/$(VARIANT)
endif
TRAIN := $(if $(filter build,$(BUILD)),train_gpt,$(BUILD)/train_gpt)

# What the machine has, found out once for each set of wishes (dev/detect.sh); `make clean` forgets it.
WISHES := $(subst /,_,$(subst $() $(),_,$(CC)-$(CXX)-$(NVCC)-$(ARCH)-$(CUDA)-$(BLAS)-$(OPENMP)))
CONFIG := $(BUILD)/config-$(WISHES).mk
ifeq ($(filter help clean,$(MAKECMDGOALS)),)
ifeq ($(wildcard $(CONFIG)),)
CANNOT := $(shell sh dev/detect.sh $(CONFIG) "$(CC)" "$(NVCC)" "$(ARCH)" "$(CUDA)" "$(BLAS)" "$(OPENMP)" "$(CXX)")
$(if $(CANNOT),$(error $(CANNOT)))
endif
include $(CONFIG)
endif

ifneq ($(MARCH),)
MARCH_FLAGS := -march=$(MARCH)
endif
WARNINGS := -Wall -Wextra -Wshadow -Wstrict-prototypes -Wvla $(if $(WERROR),-Werror) $(if $(OPENMP_FLAGS),,-Wno-unknown-pragmas)
OPTIMIZE := -O3 $(MARCH_FLAGS) -fno-math-errno -fno-trapping-math -g
ifneq ($(DEBUG),0)
OPTIMIZE := -O1 $(MARCH_FLAGS) -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all
endif
# The benches are C and take the CUDA runtime's C interface from where nvcc has it.
CUDA_HOME := $(if $(CUDA_ARCH),$(patsubst %/bin/,%,$(dir $(realpath $(shell command -v $(NVCC))))))
override CPPFLAGS := -I. -D_GNU_SOURCE $(BLAS_FLAGS) $(if $(CUDA_ARCH),-DHAVE_CUDA -isystem $(CUDA_HOME)/include) \
                     $(if $(filter-out 0,$(SIMT)),-DHAVE_CUDA -DSIMT_EMULATION) $(CPPFLAGS)
override CFLAGS := -std=gnu11 $(OPTIMIZE) $(WARNINGS) $(OPENMP_FLAGS) -fPIC -pthread $(CFLAGS)
override LDFLAGS := $(OPENMP_FLAGS) $(if $(filter-out 0,$(DEBUG)),-fsanitize=address -fsanitize=undefined) -rdynamic \
                    $(LDFLAGS)
override LDLIBS := $(BLAS_LIBS) $(if $(CUDA_ARCH),-lcublas -lcublasLt) -lm -ldl -lpthread $(LDLIBS)

# Machine code for one architecture: sm_90a is not sm_90, and code made for another would be compiled at every start.
GENCODE := -gencode arch=$(CUDA_ARCH:sm_%=compute_%),code=$(CUDA_ARCH)
comma := ,
override NVCCFLAGS := -std=c++17 -O3 -lineinfo $(GENCODE) -I. -DHAVE_CUDA -DCUDA_ARCH_NAME='"$(CUDA_ARCH)"' -D_GNU_SOURCE \
                      $(BLAS_FLAGS) -Xcompiler "$(subst $() $(),$(comma),$(strip -Wall -Wextra -fPIC $(OPENMP_FLAGS)))" \
                      -Werror=all-warnings $(NVCCFLAGS)

C_SOURCES := $(wildcard attention/*.c layers/*.c data/*.c trainer/*.c)
C_OBJECTS := $(C_SOURCES:%=$(BUILD)/%.o)
SIMT_OBJECTS := $(patsubst %.cpp,$(BUILD)/%.o,$(filter-out $(wildcard tests/simt/test_*),$(wildcard tests/simt/*.cpp)))
OBJECTS := $(C_OBJECTS)
ifneq ($(CUDA_ARCH),)
OBJECTS += $(patsubst %,$(BUILD)/%.o,$(wildcard attention/*.cu layers/*.cu))
LINK = $(NVCC) $(GENCODE) -Xcompiler "$(subst $() $(),$(comma),$(strip $(LDFLAGS)))"
else ifneq ($(SIMT),0)
OBJECTS += $(patsubst %,$(BUILD)/%.o,$(wildcard attention/*.cu layers/*.cu)) $(SIMT_OBJECTS)
LINK = $(or $(SIMT_CXX),$(error SIMT=1 needs a C++17 compiler with sanitizers, and '$(CXX)' is none)) $(LDFLAGS)
else
LINK = $(CC) $(LDFLAGS)
endif

TESTS := $(patsubst tests/%.c,$(BUILD)/tests/%,$(wildcard tests/test_*.c))
SIMT_TESTS := $(patsubst %.cpp,$(BUILD)/%,$(wildcard tests/simt/test_*.cpp))
BENCHES := $(patsubst dev/%.c,$(BUILD)/dev/%,$(wildcard dev/bench_*.c))
KERNELS := $(patsubst dev/attention/%.c,$(BUILD)/attention/%.so,$(wildcard dev/attention/*.c))
ifneq ($(CUDA_ARCH)$(filter-out 0,$(SIMT)),)
KERNELS += $(patsubst dev/attention/%.cu,$(BUILD)/attention/%.so,$(wildcard dev/attention/*.cu))
endif
LIBATTENTION := $(BUILD)/libattention.so

# Kernels that were built from a source that is gone since, or has another name now: they would be tested and timed on. Make
# knows its own by their .so.d; a .so that somebody put there stays.
gone = $(if $(wildcard $(firstword $(filter %.c %.cu,$(shell cat $1)))),,$1)
STALE := $(foreach file,$(wildcard $(BUILD)/attention/*.so.d),$(call gone,$(file)))
STALE_KERNELS := $(filter-out $(KERNELS),$(STALE:.d=))

.PHONY: all run test test-c test-simt test-emulated emulated tests fuzz bench bench-torch profile trace kernels stale \
        libattention clean help
.DELETE_ON_ERROR:
.SECONDARY:

all: $(TRAIN)  ## build train_gpt (the default)

run: all  ## prepare a corpus offline and train on it for about a minute: make run [TEXT=FILE]
	@$(PYTHON) dev/run.py --train ./$(TRAIN) $(if $(TEXT),--text "$(TEXT)")

test: all $(TESTS) $(SIMT_TESTS) kernels $(LIBATTENTION)  ## build and run every test that this machine can run; on a GPU, tests/gpu_report.txt
	@BUILD=$(BUILD) TRAIN=$(TRAIN) CC="$(CC)" $(PYTHON) tests/run.py $(if $(CUDA_ARCH),--gpu-report tests/gpu_report.txt) \
	    $(TESTS) $(SIMT_TESTS) $(wildcard tests/test_*.py)

test-c: $(TESTS) $(KERNELS) stale  ## the test programs in C alone (with DEBUG=1: under sanitizers)
	@BUILD=$(BUILD) TRAIN=$(TRAIN) CC="$(CC)" $(PYTHON) tests/run.py $(TESTS)

# Kernels file by file, then all of the GPU's backend: the ordinary tests and the trainer, built with SIMT=1.
EMULATED := $(BUILD)/emulated
EMULATED_TESTS := $(if $(SIMT_CXX),tests/test_cuda_layers tests/test_cuda_gpt tests/test_attention tests/test_decode)
emulated: $(TRAIN) $(KERNELS) stale $(EMULATED_TESTS:%=$(BUILD)/%)
test-simt: $(SIMT_TESTS) test-emulated  ## the GPU code on the CPU, under the emulation of tests/simt and sanitizers
	@BUILD=$(BUILD) CC="$(CC)" FLASHGPT_SANITIZE=1 $(PYTHON) tests/run.py $(SIMT_TESTS)

test-emulated:  ## of these what `make test` leaves out: the GPU's own test programs, and the trainer
	$(if $(EMULATED_TESTS),@$(MAKE) --no-print-directory SIMT=1 DEBUG=1 VARIANT=$(EMULATED:build/%=%) emulated)
	$(if $(EMULATED_TESTS),@BUILD=$(EMULATED) TRAIN=$(EMULATED)/train_gpt CC="$(CC)" FLASHGPT_SANITIZE=1 \
	    $(PYTHON) tests/run.py $(EMULATED_TESTS:%=$(EMULATED)/%) tests/test_cuda_train.py)

tests: $(TESTS) $(SIMT_TESTS) kernels $(LIBATTENTION)

fuzz:  ## feed damaged files to every reader, under sanitizers: make fuzz [SECONDS_TO_FUZZ=60]
	@$(MAKE) --no-print-directory DEBUG=1 build/debug/tests/fuzz_readers
	build/debug/tests/fuzz_readers $(SECONDS_TO_FUZZ)
SECONDS_TO_FUZZ ?= 60

bench: all $(BENCHES) $(KERNELS) stale  ## measure speed and memory; tables on stdout and in dev/results
	@BUILD=$(BUILD) TRAIN=$(TRAIN) $(PYTHON) dev/bench.py $(BENCHES)

bench-torch: $(LIBATTENTION)  ## the attention kernels beside PyTorch's, verified and timed on the same tensors
	@LIBATTENTION=$(LIBATTENTION) $(PYTHON) dev/bench_attention.py

profile: all  ## where a training step's time goes on a GPU, kernel by kernel (needs ncu)
	@TRAIN=$(TRAIN) $(PYTHON) dev/profile_step.py

KERNEL_TOOLS := $(BUILD)/tests/test_attention $(BUILD)/dev/bench_attention
trace: all  ## the timeline of a short run with its ranges by name, for Nsight Systems: build/trace.nsys-rep (needs nsys)
	@sh dev/trace.sh ./$(TRAIN) build/trace

kernels: $(KERNELS) stale $(KERNEL_TOOLS)  ## build dev/attention as build/attention/*.so, with checker and bench

stale:
	$(if $(STALE_KERNELS),rm -f $(STALE_KERNELS) $(STALE_KERNELS:=.d))

libattention: $(LIBATTENTION)  ## build the attention kernels as a library for PyTorch (dev/torch_attention.py)

clean:  ## remove everything that was built (runs/ stays)
	rm -rf build train_gpt

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile
	@sed -n '/^# Variables/,/^$$/s/^# //p' Makefile

$(TRAIN): $(BUILD)/train_gpt.o $(OBJECTS)
	$(LINK) $(filter %.o,$^) -o $@ $(LDLIBS)

# The flags are a prerequisite: an object built with others is built again.
FLAGS := $(CC) $(CPPFLAGS) $(CFLAGS) $(CUDA_ARCH)
$(BUILD)/flags: force
	@mkdir -p $(@D); echo '$(FLAGS)' | cmp -s - $@ || echo '$(FLAGS)' > $@
.PHONY: force

$(BUILD)/%.c.o: %.c $(BUILD)/flags
	@mkdir -p $(@D)
	$(CC) $(CPPFLAGS) $(CFLAGS) -MMD -MP -c $< -o $@

$(BUILD)/trainer/report.c.o: trainer/report.html

# NVTX's header comes with the CUDA Toolkit and is all of NVTX: a build for the CPU names its ranges too where it is found.
$(BUILD)/train_gpt.o $(BUILD)/layers/gpt.c.o: override CPPFLAGS += $(patsubst %/bin/nvcc,-isystem %/include,$(realpath $(shell command -v $(NVCC))))

$(BUILD)/%.cu.o: %.cu $(BUILD)/flags
	@mkdir -p $(@D)
	$(if $(filter 0,$(SIMT)),$(NVCC) $(NVCCFLAGS),$(SIMT_CXX) -x c++ $(SIMT_BACKEND_FLAGS)) -MMD -MP -c $< -o $@

# A register that spills in an attention kernel is a fault of the kernel.
$(BUILD)/attention/%.cu.o: NVCCFLAGS += -Xptxas --warn-on-spills,--warning-as-error

# The trainer is plain C: nvcc takes it where the build is for a GPU, the C compiler where it is not.
$(BUILD)/train_gpt.o: train_gpt.cu $(BUILD)/flags
	@mkdir -p $(@D)
	$(if $(CUDA_ARCH),$(NVCC) $(NVCCFLAGS),$(CC) $(CPPFLAGS) $(CFLAGS) -x c) -MMD -MP -c $< -o $@

$(BUILD)/tests/%: $(BUILD)/tests/%.c.o $(OBJECTS)
	$(LINK) $(filter %.o,$^) -o $@ $(LDLIBS)

# CUDA kernels on the CPU: tests/simt/test_*.cpp include the .cu files they test, and use what they need of the C twins.
# Always under sanitizers; the emulation itself without. With no C++ compiler, a script says that the test is skipped.
# -Wno-pass-failed: that a host compiler does not unroll a loop says nothing of the kernel.
SIMT_FLAGS := -std=c++17 -g -fno-omit-frame-pointer -fno-strict-aliasing -DSIMT_EMULATION -D_GNU_SOURCE -Itests/simt -I. \
              -Wall -Wextra -Wno-unknown-pragmas -Wno-pass-failed $(if $(WERROR),-Werror)
SANITIZE := -fsanitize=address,undefined -fno-sanitize-recover=all
# The same files as a backend of the whole program, with SIMT=1: sanitizers as for the rest of it.
SIMT_BACKEND_FLAGS = $(SIMT_FLAGS) -DHAVE_CUDA $(if $(filter 0,$(DEBUG)),-O2,-O1 $(SANITIZE)) -fPIC
ifneq ($(SIMT_CXX),)
$(SIMT_OBJECTS): $(BUILD)/%.o: %.cpp
	@mkdir -p $(@D)
	$(SIMT_CXX) $(SIMT_FLAGS) -O2 -fPIC -MMD -MP -c $< -o $@

$(BUILD)/twins.a: $(C_OBJECTS)
	@rm -f $@
	ar rcs $@ $^

$(BUILD)/tests/simt/%: tests/simt/%.cpp $(SIMT_OBJECTS) $(BUILD)/twins.a
	$(SIMT_CXX) $(SIMT_FLAGS) -O1 $(SANITIZE) -MMD -MP -MF $@.d $< $(SIMT_OBJECTS) $(BUILD)/twins.a \
	    $(OPENMP_FLAGS) $(BLAS_LIBS) -lm -ldl -lpthread -o $@
else
$(BUILD)/tests/simt/%: tests/simt/%.cpp
	@mkdir -p $(@D)
	@printf '%s\n' '#!/bin/sh' 'echo "skip $*: $(CXX) cannot build C++17 with sanitizers"' \
	    'echo "0 passed, 0 failed, 1 skipped"' > $@
	@chmod +x $@
endif

$(BUILD)/dev/%: $(BUILD)/dev/%.c.o $(OBJECTS)
	$(LINK) $(filter %.o,$^) -o $@ $(LDLIBS)

EXPORTS := attention/exports.map
$(BUILD)/attention/%.so: dev/attention/%.c $(EXPORTS) $(BUILD)/flags
	@mkdir -p $(@D)
	$(CC) $(CPPFLAGS) $(CFLAGS) -MMD -MP -MF $@.d -shared $< -o $@ -Wl,--version-script=$(EXPORTS) -lm

$(BUILD)/attention/%.so: dev/attention/%.cu $(EXPORTS) $(BUILD)/flags
	@mkdir -p $(@D)
	$(if $(CUDA_ARCH)$(filter-out 0,$(SIMT)),,$(error $@ needs nvcc and a GPU to build for: say make ARCH=sm_90a))
	$(if $(filter 0,$(SIMT)),$(NVCC) $(NVCCFLAGS) -Xlinker ,$(SIMT_CXX) -x c++ $(SIMT_BACKEND_FLAGS) \
	    -Wl,)--version-script=$(EXPORTS) -MMD -MP -MF $@.d -shared $< -o $@

# From .c to .cu or back: the old .so may be newer than the new source.
$(filter $(KERNELS),$(STALE:.d=)): force

$(LIBATTENTION): $(filter $(BUILD)/attention/%,$(OBJECTS)) $(EXPORTS)
	$(LINK) -shared $(filter %.o,$^) -o $@ $(if $(CUDA_ARCH),-Xlinker ,-Wl,)--version-script=$(EXPORTS) \
	    $(if $(CUDA_ARCH),-lcublas -lcublasLt) -lm -ldl -lpthread

-include $(filter-out $(STALE),$(shell find $(BUILD) -maxdepth 3 -name '*.d' 2>/dev/null))
