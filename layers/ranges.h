/* ranges.h - named stretches of time, which a profiler shows above the GPU's work: make trace, dev/profile_step.py.
 *
 * By NVTX where the compiler finds its header (the CUDA Toolkit has it, and it needs no library), else by nothing at all.
 * Without a profiler a range costs a load and a branch. Ranges nest: each end closes the youngest that is open. */
#ifndef RANGES_H
#define RANGES_H

#if defined(__has_include)
#if __has_include(<nvtx3/nvToolsExt.h>)
#define HAVE_NVTX
#include <nvtx3/nvToolsExt.h>
#endif
#endif

/* name: of static storage, "update". */
static inline void range_begin(const char *name)
{
#ifdef HAVE_NVTX
    nvtxRangePushA(name);
#else
    (void)name;
#endif
}

static inline void range_end(void)
{
#ifdef HAVE_NVTX
    nvtxRangePop();
#endif
}

#endif
