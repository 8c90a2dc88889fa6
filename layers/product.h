/* product.h - the matrix product behind the linear layers, with what follows it fused in.
 *
 *     C (M,N) = A (M,K) B (K,N), plus a bias row, or added to what C held; then through GELU or times its derivative.
 *
 * product_run divides C among the threads and computes each part with CBLAS or with our own product.
 */
#ifndef PRODUCT_H
#define PRODUCT_H

#include "layers/cpu.h"

/* A matrix to read: element (i,j) is data[i*stride + j], or, transposed, data[j*stride + i]. */
typedef struct Matrix {
    const float *data;
    int64_t stride;
    int transposed;
} Matrix;

typedef struct Product {
    float *c;          /* (M,N), rows c_stride apart */
    int64_t c_stride;
    Matrix a, b;       /* (M,K), (K,N) */
    int64_t M, N, K;
    int accumulate;    /* C += A B */
    const float *bias; /* (N), added to each row, or NULL; not with accumulate */
    float *gelu;       /* (M,N) like C: gelu(C) goes here, or NULL */
    const float *pre;  /* (M,N) like C: C is multiplied by gelu'(pre), or NULL */
} Product;

/* Floats of packing space that product_own needs on each thread; a multiple of a page. */
size_t product_buffer(void);

/* The whole product on this thread, by our own code; `buffer` holds product_buffer() floats, aligned to 64 bytes. */
void product_own(const Product *product, float *buffer);
/* Whether product_own is at least as fast as any CBLAS measured here: with vectors of 512 bits (dev/bench_layers.c). */
int product_own_is_fast(void);
/* The same through CBLAS. Only where product_has_blas(). */
void product_blas(const Product *product);
int product_has_blas(void);
/* "OpenBLAS 0.3.21 (Haswell)", or "CBLAS", or "no CBLAS", written to text. */
const char *product_blas_name(char *text, size_t size);
/* How many threads of its own CBLAS may use, where it lets itself be told: 1, since product_run has its slices. */
void product_blas_threads(int threads);

/* The whole product on the threads of `stream`, by the means the stream says. */
void product_run(const Product *product, const Stream *stream);

#endif
