/* vector.h - a float vector as wide as the target has, written with the compiler's vector extensions, and exp on it.
 *
 * WIDTH floats are one register: 16 with AVX-512, 8 with AVX2, else 4. Code written with them gives the same bits whatever
 * the optimiser makes of it, which sums that a compiler may or may not vectorise do not. Arithmetic is +, -, *, /; lanes are
 * chosen with masks, since C has no ?: for vectors.
 */
#ifndef VECTOR_H
#define VECTOR_H

#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#define WIDTH 16
#elif defined(__AVX2__)
#define WIDTH 8
#else
#define WIDTH 4
#endif

/* Before a loop of at most 16 constant rounds: unrolls it whole, so that an array indexed by it can live in registers. */
#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

typedef float Vector __attribute__((vector_size(WIDTH * 4)));
typedef int32_t VectorInt __attribute__((vector_size(WIDTH * 4)));
typedef uint32_t VectorBits __attribute__((vector_size(WIDTH * 4)));
/* Half as many doubles fill the same register. */
typedef double VectorDouble __attribute__((vector_size(WIDTH * 4)));
typedef float VectorHalf __attribute__((vector_size(WIDTH * 2)));

static inline Vector vector_load(const float *p)
{
    Vector v;
    memcpy(&v, p, sizeof v);
    return v;
}

static inline void vector_store(float *p, Vector v) { memcpy(p, &v, sizeof v); }

/* The first n < WIDTH lanes from p, the others `fill`. */
static inline Vector vector_load_part(const float *p, int64_t n, float fill)
{
    float lanes[WIDTH];
    for (int i = 0; i < WIDTH; i++) lanes[i] = fill;
    memcpy(lanes, p, (size_t)n * sizeof *p);
    return vector_load(lanes);
}

static inline void vector_store_part(float *p, Vector v, int64_t n) { memcpy(p, &v, (size_t)n * sizeof *p); }

static inline Vector vector_set(float x) { return x - (Vector){0}; }

/* Lane by lane: mask (all ones or all zeros) ? a : b. */
static inline Vector vector_select(VectorInt mask, Vector a, Vector b)
{
    return (Vector)((mask & (VectorInt)a) | (~mask & (VectorInt)b));
}

static inline Vector vector_abs(Vector v) { return (Vector)((VectorInt)v & INT32_MAX); }

static inline Vector vector_max(Vector a, Vector b) { return vector_select(a > b, a, b); }

/* Eight or fewer floats as doubles, exactly. */
static inline VectorDouble vector_widen(const float *p)
{
    VectorHalf half;
    memcpy(&half, p, sizeof half);
    return __builtin_convertvector(half, VectorDouble);
}

/* The sum of all lanes, in lane order. */
static inline double vector_sum(Vector v)
{
    double sum = 0;
    for (int i = 0; i < WIDTH; i++) sum += (double)v[i];
    return sum;
}

static inline double vector_sum_double(VectorDouble v)
{
    double sum = 0;
    for (int i = 0; i < WIDTH / 2; i++) sum += v[i];
    return sum;
}

/* exp(x) for x <= 0, within 2 units in the last place; 0 below -87.3, where the result would be denormal; NaN stays NaN.
 *
 * x = n ln2 + r with |r| <= ln2/2. Adding 1.5 * 2^23 rounds x/ln2 to the integer n and leaves it in the low bits of the sum;
 * 2^n is made by placing n in the exponent field. The polynomial is exp's Taylor series to r^7: its remainder, r^8/8! at
 * r = 0.347, is 5e-9, a twelfth of a unit in the last place. */
static inline Vector vector_exp_negative(Vector x)
{
    const float magic = 12582912.0f;
    Vector shifted = x * 1.44269504088896341f + magic;
    Vector n = shifted - magic;
    /* ln2 in two parts: the first has so few bits that n times it is exact. */
    Vector r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    Vector p = r * (1.0f / 5040) + (1.0f / 720);
    p = p * r + (1.0f / 120);
    p = p * r + (1.0f / 24);
    p = p * r + (1.0f / 6);
    p = p * r + 0.5f;
    p = p * (r * r) + r + 1.0f;
    VectorBits exponent = (VectorBits)shifted << 23; /* the bits of `magic` above n fall off */
    Vector power = (Vector)(exponent + (127u << 23));
    return vector_select(x < -87.3f, (Vector){0}, p * power);
}

#endif
