/* gelu.h - GELU in its tanh form and its derivative, on vectors, for the passes that fuse them.
 *
 * 0.5 (1 + tanh(u)) is sigmoid(2u), and written so it keeps its relative accuracy on the negative side, where 1 + tanh
 * cancels. sigmoid(z) = (z < 0 ? e : 1) / (1 + e) with e = exp(-|z|), which cannot overflow. Beyond |x| = 32 the sigmoid
 * is 0 or 1 to the last bit; the argument stops there, so that x^3 never becomes infinite.
 */
#ifndef GELU_H
#define GELU_H

#include "layers/vector.h"

#define GELU_CUBE 0.044715f
#define GELU_TWICE_ROOT 1.5957691216057308f /* 2 sqrt(2/pi) */

/* x within [-32, 32]; NaN stays NaN. */
static inline Vector gelu_clamp(Vector x)
{
    x = vector_select(x > 32.0f, vector_set(32.0f), x);
    return vector_select(x < -32.0f, vector_set(-32.0f), x);
}

static inline Vector gelu_vector(Vector x)
{
    Vector y = gelu_clamp(x);
    Vector z = GELU_TWICE_ROOT * y * (1.0f + GELU_CUBE * y * y);
    Vector e = vector_exp_negative(-vector_abs(z));
    return x * (vector_select(z < 0.0f, e, vector_set(1.0f)) / (1.0f + e));
}

/* s + x s (1-s) dz/dx, with s (1-s) = e / (1+e)^2. */
static inline Vector gelu_derivative_vector(Vector x)
{
    Vector y = gelu_clamp(x);
    Vector z = GELU_TWICE_ROOT * y * (1.0f + GELU_CUBE * y * y);
    Vector dz = GELU_TWICE_ROOT * (1.0f + 3.0f * GELU_CUBE * y * y);
    Vector e = vector_exp_negative(-vector_abs(z));
    Vector inverse = 1.0f / (1.0f + e);
    Vector s = vector_select(z < 0.0f, e, vector_set(1.0f)) * inverse;
    return s + y * dz * (e * inverse * inverse);
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
