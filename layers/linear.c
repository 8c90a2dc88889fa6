/* linear.c - y = x W^T + b, followed by GELU or not, and its gradients: three matrix products with what belongs to them.
 *
 *     forward     out (N,OC)      = x (N,C)        W^T (C,OC)  + bias, GELU on each finished tile
 *     backward    dx (N,C)        = dout (N,OC)    W (OC,C)      times gelu'(pre) on each finished tile
 *                 dW (OC,C)      += dout^T (OC,N)  x (N,C)
 *                 dbias (OC)     += the column sums of dout
 */
#include "layers/product.h"
#include "layers/vector.h"

void linear_gelu_forward_cpu(void *out, void *pre, const void *x, const void *weight, const void *bias, int64_t N, int64_t C,
                             int64_t OC, Stream *stream)
{
    Product product = {.c = pre, .c_stride = OC, .a = {x, C, 0}, .b = {weight, C, 1}, .M = N, .N = OC, .K = C,
                       .bias = bias, .gelu = out};
    product_run(&product, stream);
}

void linear_forward_cpu(void *out, const void *x, const void *weight, const void *bias, int64_t N, int64_t C, int64_t OC,
                        Stream *stream)
{
    linear_gelu_forward_cpu(NULL, out, x, weight, bias, N, C, OC, stream);
}

void linear_backward_input_cpu(void *dx, const void *dout, const void *weight, const void *pre, int64_t N, int64_t C,
                               int64_t OC, Stream *stream)
{
    if (!dx) return;
    Product product = {.c = dx, .c_stride = C, .a = {dout, OC, 0}, .b = {weight, C, 0}, .M = N, .N = C, .K = OC, .pre = pre};
    product_run(&product, stream);
}

/* dbias (columns) += column sums of dout (N, columns; rows `stride` apart). Rows are summed 64 at a time in fp32 and those
 * sums in order, which keeps the rounding error of many rows small. */
static void column_sums(float *dbias, const float *dout, int64_t stride, int64_t columns, int64_t N)
{
    enum { ROWS_AT_ONCE = 64 };
    for (int64_t start = 0; start < N; start += ROWS_AT_ONCE) {
        int64_t end = cpu_min(start + ROWS_AT_ONCE, N), c = 0;
        for (; c + WIDTH <= columns; c += WIDTH) {
            Vector sum = {0};
            for (int64_t n = start; n < end; n++) sum += vector_load(dout + n * stride + c);
            vector_store(dbias + c, vector_load(dbias + c) + sum);
        }
        for (; c < columns; c++) {
            float sum = 0;
            for (int64_t n = start; n < end; n++) sum += dout[n * stride + c];
            dbias[c] += sum;
        }
    }
}

void linear_backward_weight_cpu(float *dweight, float *dbias, void *scratch, const void *dout, const void *x, int64_t N,
                                int64_t C, int64_t OC, Stream *stream)
{
    enum { COLUMNS_AT_ONCE = 64 };
    Product product = {.c = dweight, .c_stride = C, .a = {dout, OC, 1}, .b = {x, C, 0}, .M = OC, .N = C, .K = N,
                       .accumulate = 1};
    (void)scratch;
    product_run(&product, stream);
    if (!dbias) return;
#pragma omp parallel for schedule(static) if (N * OC >= PARALLEL_MIN)
    for (int64_t c = 0; c < OC; c += COLUMNS_AT_ONCE)
        column_sums(dbias + c, (const float *)dout + c, OC, cpu_min(COLUMNS_AT_ONCE, OC - c), N);
}

size_t linear_scratch_cpu(int64_t N, int64_t C, int64_t OC)
{
    (void)N;
    (void)C;
    (void)OC;
    return 0;
}
