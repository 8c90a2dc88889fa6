/* gelu.c - GELU by itself: recomputes in the backward pass what linear_gelu_forward gave and was not kept. */
#include "layers/gelu.h"

#include "layers/cpu.h"

void gelu_forward_cpu(void *out, const void *pre, int64_t n, Stream *stream)
{
    enum { CHUNK = 4096 };
    float *o = out;
    const float *p = pre;
    (void)stream;
#pragma omp parallel for schedule(static) if (n >= PARALLEL_MIN)
    for (int64_t start = 0; start < n; start += CHUNK) gelu_range(o + start, p + start, cpu_min(CHUNK, n - start));
}
