/* cpu.h - what the CPU twins share: the stream, the thread count, and the operations that cpu.c puts in its table.
 *
 * Operations run to their end before they return. Every one of them divides its work among threads so that no result depends
 * on how many there are, or in which order they run; where a sum crosses that division, its parts are of a fixed size and
 * are added in order. What each computes is said in backend.h.
 */
#ifndef CPU_H
#define CPU_H

#include "layers/backend.h"

#ifdef _OPENMP
#include <omp.h>
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* To be called first in main. OpenMP's threads spin while they wait, for milliseconds where nobody says otherwise: on a
 * machine with other work, that keeps the ones that work from their cores, and each parallel region lasts a time slice
 * (measured on 2 cores beside two compilers: 120 ms for a step that takes 12 alone; 18 to 30 so). The library reads its
 * settings before main runs; so this sets GOMP_SPINCOUNT to some 20 microseconds of spinning, KMP_BLOCKTIME likewise for
 * clang's library, and starts the program anew. Returns where the environment already says how threads are to wait, or where
 * it fails. */
void cpu_settle_threads(char **argv);

/* Below this many elements an elementwise pass is faster on one thread than what it costs to wake the others. */
#define PARALLEL_MIN 8192

struct Stream {
    int threads;     /* as OpenMP had them at open() */
    int blas;        /* linear products go through CBLAS; else through our own */
    float *buffers;  /* packing space of product.c, PRODUCT_BUFFER floats a thread */
};

static inline int cpu_threads(void)
{
#ifdef _OPENMP
    return omp_get_max_threads();
#else
    return 1;
#endif
}

static inline int64_t cpu_min(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t cpu_max(int64_t a, int64_t b) { return a > b ? a : b; }

void embedding_forward_cpu(float *out, const int32_t *tokens, const float *wte, const float *wpe, int64_t B, int64_t T,
                           int64_t C, Stream *stream);
void embedding_backward_cpu(float *dwte, float *dwpe, void *scratch, const float *dout, const int32_t *plan, int64_t B,
                            int64_t T, int64_t C, Stream *stream);
size_t embedding_scratch_cpu(int64_t N, int64_t C);

void layernorm_forward_cpu(void *out, float *mean, float *rstd, const float *x, const float *weight, const float *bias,
                           int64_t N, int64_t C, Stream *stream);
void residual_layernorm_forward_cpu(float *sum, void *out, float *mean, float *rstd, const float *x, const void *y,
                                    const float *weight, const float *bias, int64_t N, int64_t C, Stream *stream);
void layernorm_backward_cpu(float *dx, void *rounded, float *dweight, float *dbias, void *scratch, const float *dresid,
                            const void *dout, const float *x, const float *weight, const float *mean, const float *rstd,
                            int64_t N, int64_t C, Stream *stream);
size_t layernorm_scratch_cpu(int64_t N, int64_t C);

void linear_forward_cpu(void *out, const void *x, const void *weight, const void *bias, int64_t N, int64_t C, int64_t OC,
                        Stream *stream);
void linear_gelu_forward_cpu(void *out, void *pre, const void *x, const void *weight, const void *bias, int64_t N, int64_t C,
                             int64_t OC, Stream *stream);
void linear_backward_input_cpu(void *dx, const void *dout, const void *weight, const void *pre, int64_t N, int64_t C,
                               int64_t OC, Stream *stream);
void linear_backward_weight_cpu(float *dweight, float *dbias, void *scratch, const void *dout, const void *x, int64_t N,
                                int64_t C, int64_t OC, Stream *stream);
size_t linear_scratch_cpu(int64_t N, int64_t C, int64_t OC);

void gelu_forward_cpu(void *out, const void *pre, int64_t n, Stream *stream);

void cache_fill_cpu(void *cache, const void *qkv, int64_t first, int64_t count, int64_t n, int64_t T, int64_t NH,
                    int64_t HS, Stream *stream);
void cache_attend_cpu(void *out, void *cache, const void *qkv, float scale, int64_t B, int64_t t, int64_t T, int64_t NH,
                      int64_t HS, Stream *stream);

void loss_forward_backward_cpu(float *losses, void *logits, const int32_t *targets, float dscale, int64_t N, int64_t V,
                               int64_t Vp, Stream *stream);

void losses_sum_cpu(double *total, const float *losses, int64_t N, Stream *stream);

void global_norm_cpu(float *norm, void *scratch, const float *grads, int64_t n, Stream *stream);
size_t norm_scratch_cpu(int64_t n);
void adamw_update_cpu(void *params, float *master, float *m, float *v, const float *grads, const float *norm,
                      const AdamwStep *step, int64_t n, int64_t n_decay, Stream *stream);

#ifdef __cplusplus
}
#endif
#endif
