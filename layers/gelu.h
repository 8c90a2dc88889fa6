/* gelu.h - GELU in its tanh form and its derivative, on vectors, for the passes that fuse them.
 *
 * 0.5 (1 + tanh(u)) is sigmoid(2u), and written so it keeps its relative accuracy on the negative side, where 1 + tanh
 * cancels. With e = exp(-|2u|), which cannot overflow, sigmoid(2u) is (x < 0 ? e : 1) / (1 + e).
 */
#ifndef GELU_H
#define GELU_H

#include "layers/vector.h"

#define GELU_CUBE 0.044715f
#define GELU_TWICE_ROOT 1.5957691216057308f /* 2 sqrt(2/pi) */

/* e of |x|, as above. */
static inline Vector gelu_exp(Vector size)
{
    return vector_exp_negative(size * (size * size * (-GELU_TWICE_ROOT * GELU_CUBE) - GELU_TWICE_ROOT));
}

static inline Vector gelu_vector(Vector x)
{
    Vector e = gelu_exp(vector_abs(x));
    return x * (vector_select(x < 0.0f, e, vector_set(1.0f)) / (1.0f + e));
}

/* s + x s (1-s) d(2u)/dx, with s (1-s) = e / (1+e)^2. Beyond |x| = 32, e is 0; the argument stops there, so that no square
 * becomes infinite and meets that 0. NaN stays NaN. */
static inline Vector gelu_derivative_vector(Vector x)
{
    Vector size = vector_abs(x);
    size = vector_select(size > 32.0f, vector_set(32.0f), size);
    Vector e = gelu_exp(size);
    Vector inverse = 1.0f / (1.0f + e);
    Vector slope = size * (size * size * (3 * GELU_TWICE_ROOT * GELU_CUBE) + GELU_TWICE_ROOT);
    /* The second term has the sign of x. */
    Vector change = (Vector)((VectorInt)(slope * (e * inverse * inverse)) ^ ((VectorInt)x & INT32_MIN));
    return vector_select(x < 0.0f, e, vector_set(1.0f)) * inverse + change;
}

/* out (n) = gelu(pre (n)), on this thread. */
static inline void gelu_range(float *out, const float *pre, int64_t n)
{
    int64_t i = 0;
    for (; i + WIDTH <= n; i += WIDTH) vector_store(out + i, gelu_vector(vector_load(pre + i)));
    if (i < n) vector_store_part(out + i, gelu_vector(vector_load_part(pre + i, n - i, 0)), n - i);
}

/* dx (n) *= gelu'(pre (n)), on this thread. */
static inline void gelu_derivative_range(float *dx, const float *pre, int64_t n)
{
    int64_t i = 0;
    for (; i + WIDTH <= n; i += WIDTH)
        vector_store(dx + i, vector_load(dx + i) * gelu_derivative_vector(vector_load(pre + i)));
    if (i < n) {
        Vector product = vector_load_part(dx + i, n - i, 0) * gelu_derivative_vector(vector_load_part(pre + i, n - i, 0));
        vector_store_part(dx + i, product, n - i);
    }
}

#endif
