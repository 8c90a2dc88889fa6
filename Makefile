# flashgpt: `make` builds train_gpt, `make help` lists the rest.
#
# Variables: CC=clang  DEBUG=1 (sanitizers, in build/debug)  ARCH=sm_90a (GPU to build for; found out where one is visible)
#            CUDA=0, BLAS=0, OPENMP=0 (build without)  MARCH=x86-64-v3 (CPU to build for; default: this one)

CC ?= cc
ifeq ($(origin CC),default)
CC := cc
endif
NVCC ?= nvcc
ARCH ?=
DEBUG ?= 0
PYTHON ?= python3

BUILD := build
ifneq ($(DEBUG),0)
BUILD := build/debug
endif
ifneq ($(VARIANT),)
BUILD := build/$(VARIANT)
endif
TRAIN := $(if $(filter build,$(BUILD)),train_gpt,$(BUILD)/train_gpt)

# What the machine has, found out once for each set of wishes (dev/detect.sh); `make clean` forgets it.
WISHES := $(subst /,_,$(subst $() $(),_,$(CC)-$(NVCC)-$(ARCH)-$(CUDA)-$(BLAS)-$(OPENMP)))
CONFIG := $(BUILD)/config-$(WISHES).mk
ifeq ($(filter help clean,$(MAKECMDGOALS)),)
ifeq ($(wildcard $(CONFIG)),)
$(shell sh dev/detect.sh $(CONFIG) "$(CC)" "$(NVCC)" "$(ARCH)" "$(CUDA)" "$(BLAS)" "$(OPENMP)")
endif
include $(CONFIG)
endif

ifneq ($(MARCH),)
MARCH_FLAGS := -march=$(MARCH)
endif
WARNINGS := -Wall -Wextra -Wshadow -Wstrict-prototypes -Wvla $(if $(WERROR),-Werror)
OPTIMIZE := -O3 $(MARCH_FLAGS) -fno-math-errno -fno-trapping-math -g
ifneq ($(DEBUG),0)
OPTIMIZE := -O1 $(MARCH_FLAGS) -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all
endif
CPPFLAGS += -I. -D_GNU_SOURCE $(BLAS_FLAGS) $(if $(CUDA_ARCH),-DHAVE_CUDA)
CFLAGS += -std=gnu11 $(OPTIMIZE) $(WARNINGS) $(OPENMP_FLAGS) -fPIC -pthread
LDLIBS += $(BLAS_LIBS) -lm -ldl -lpthread
LDFLAGS += $(OPENMP_FLAGS) $(if $(filter-out 0,$(DEBUG)),-fsanitize=address -fsanitize=undefined) -rdynamic

NVCCFLAGS += -std=c++17 -O3 -lineinfo -arch=$(CUDA_ARCH) -I. -DHAVE_CUDA -D_GNU_SOURCE $(BLAS_FLAGS) \
             -Xcompiler "$(subst $() $(),$(comma),-Wall -Wextra -fPIC $(OPENMP_FLAGS))" -Werror=all-warnings
comma := ,

C_SOURCES := $(wildcard attention/*.c layers/*.c data/*.c trainer/*.c)
OBJECTS := $(C_SOURCES:%=$(BUILD)/%.o)
ifneq ($(CUDA_ARCH),)
OBJECTS += $(patsubst %,$(BUILD)/%.o,$(wildcard attention/*.cu layers/*.cu))
LINK = $(NVCC) -arch=$(CUDA_ARCH) -Xcompiler "$(subst $() $(),$(comma),$(strip $(LDFLAGS)))"
LDLIBS += -lcublas -lcublasLt
else
LINK = $(CC) $(LDFLAGS)
endif

TESTS := $(patsubst tests/%.c,$(BUILD)/tests/%,$(wildcard tests/test_*.c))
BENCHES := $(patsubst dev/%.c,$(BUILD)/dev/%,$(wildcard dev/bench_*.c))
KERNELS := $(patsubst dev/attention/%.c,$(BUILD)/attention/%.so,$(wildcard dev/attention/*.c))

.PHONY: all run test test-c tests fuzz bench kernels clean help
.DELETE_ON_ERROR:
.SECONDARY:

all: $(TRAIN)  ## build train_gpt (the default)

run: all  ## prepare a corpus offline and train on it for about a minute: make run [TEXT=FILE]
	@$(PYTHON) dev/run.py --train ./$(TRAIN) $(if $(TEXT),--text "$(TEXT)")

test: all $(TESTS) $(KERNELS)  ## build and run every test that this machine can run
	@BUILD=$(BUILD) TRAIN=$(TRAIN) CC="$(CC)" $(PYTHON) tests/run.py $(TESTS) $(wildcard tests/test_*.py)

test-c: $(TESTS) $(KERNELS)  ## the test programs in C alone (with DEBUG=1: under sanitizers)
	@BUILD=$(BUILD) TRAIN=$(TRAIN) CC="$(CC)" $(PYTHON) tests/run.py $(TESTS)

tests: $(TESTS) $(KERNELS)

fuzz:  ## feed damaged files to every reader, under sanitizers: make fuzz [SECONDS_TO_FUZZ=60]
	@$(MAKE) --no-print-directory DEBUG=1 build/debug/tests/fuzz_readers
	build/debug/tests/fuzz_readers $(SECONDS_TO_FUZZ)
SECONDS_TO_FUZZ ?= 60

bench: all $(BENCHES) $(KERNELS)  ## measure speed and memory; tables on stdout and in dev/results
	@BUILD=$(BUILD) TRAIN=$(TRAIN) $(PYTHON) dev/bench.py $(BENCHES)

kernels: $(KERNELS)  ## build every standalone attention kernel of dev/attention as a .so in build/attention

clean:  ## remove everything that was built (runs/ stays)
	rm -rf build train_gpt

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' Makefile
	@sed -n '/^# Variables/,/^$$/s/^# //p' Makefile

$(TRAIN): $(BUILD)/train_gpt.o $(OBJECTS)
	$(LINK) $^ -o $@ $(LDLIBS)

# The flags are a prerequisite: an object built with others is built again.
FLAGS := $(CC) $(CPPFLAGS) $(CFLAGS) $(CUDA_ARCH)
$(BUILD)/flags: force
	@mkdir -p $(@D); echo '$(FLAGS)' | cmp -s - $@ || echo '$(FLAGS)' > $@
.PHONY: force

$(BUILD)/%.c.o: %.c $(BUILD)/flags
	@mkdir -p $(@D)
	$(CC) $(CPPFLAGS) $(CFLAGS) -MMD -MP -c $< -o $@

$(BUILD)/%.cu.o: %.cu $(BUILD)/flags
	@mkdir -p $(@D)
	$(NVCC) $(NVCCFLAGS) -MMD -MP -c $< -o $@

# The trainer is plain C: nvcc takes it where the build is for a GPU, the C compiler where it is not.
$(BUILD)/train_gpt.o: train_gpt.cu $(BUILD)/flags
	@mkdir -p $(@D)
	$(if $(CUDA_ARCH),$(NVCC) $(NVCCFLAGS),$(CC) $(CPPFLAGS) $(CFLAGS) -x c) -MMD -MP -c $< -o $@

$(BUILD)/tests/%: tests/%.c $(OBJECTS)
	@mkdir -p $(@D)
	$(CC) $(CPPFLAGS) $(CFLAGS) -MMD -MP -MF $@.d $< $(OBJECTS) $(LDFLAGS) $(LDLIBS) -o $@

$(BUILD)/dev/%: dev/%.c $(OBJECTS)
	@mkdir -p $(@D)
	$(CC) $(CPPFLAGS) $(CFLAGS) -MMD -MP -MF $@.d $< $(OBJECTS) $(LDFLAGS) $(LDLIBS) -o $@

$(BUILD)/attention/%.so: dev/attention/%.c $(BUILD)/flags
	@mkdir -p $(@D)
	$(CC) $(CPPFLAGS) $(CFLAGS) -MMD -MP -MF $@.d -shared $< -o $@ -lm

-include $(shell find $(BUILD) -maxdepth 3 -name '*.d' 2>/dev/null)
