/* simt_types.h - the types of CUDA on a host: short vectors, bf16 and half, with the layout, alignment and rounding of the
 * real ones. Part of simt.h, which says what all this is for. */
#ifndef SIMT_TYPES_H
#define SIMT_TYPES_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* The bits of one type read as another of the same size. */
template <typename To, typename From>
static inline To simt_bits(From from)
{
    static_assert(sizeof(To) == sizeof(From), "bits are read as a type of the same size");
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}

/* --- short vectors: aligned as the hardware needs them, so that UBSan finds a misaligned access -------------------- */

#define SIMT_VECTORS(T, prefix, align2, align4)                                                              \
    struct prefix##1 { T x; };                                                                               \
    struct alignas(align2) prefix##2 { T x, y; };                                                            \
    struct prefix##3 { T x, y, z; };                                                                         \
    struct alignas(align4) prefix##4 { T x, y, z, w; };                                                      \
    static inline prefix##1 make_##prefix##1(T x) { return {x}; }                                            \
    static inline prefix##2 make_##prefix##2(T x, T y) { return {x, y}; }                                    \
    static inline prefix##3 make_##prefix##3(T x, T y, T z) { return {x, y, z}; }                            \
    static inline prefix##4 make_##prefix##4(T x, T y, T z, T w) { return {x, y, z, w}; }

SIMT_VECTORS(signed char, char, 2, 4)
SIMT_VECTORS(unsigned char, uchar, 2, 4)
SIMT_VECTORS(short, short, 4, 8)
SIMT_VECTORS(unsigned short, ushort, 4, 8)
SIMT_VECTORS(int, int, 8, 16)
SIMT_VECTORS(unsigned, uint, 8, 16)
SIMT_VECTORS(long long, longlong, 16, 16)
SIMT_VECTORS(unsigned long long, ulonglong, 16, 16)
SIMT_VECTORS(float, float, 8, 16)
SIMT_VECTORS(double, double, 16, 16)

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
    constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
};

/* --- rounding ------------------------------------------------------------------------------------------------------ */

/* The upper half of a float, rounded to nearest even; a NaN becomes 0x7fff, as cvt.rn.bf16.f32 gives it. */
static inline uint16_t simt_float_to_bf16(float value)
{
    uint32_t bits = simt_bits<uint32_t>(value);
    if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fff;
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static inline float simt_bf16_to_float(uint16_t bits) { return simt_bits<float>((uint32_t)bits << 16); }

/* A double as a float whose last bit is set where anything was lost (rounding to odd): rounded once more to a type of fewer
 * bits this gives what rounding the double itself would. */
static inline float simt_double_to_odd_float(double value)
{
    float rounded = (float)value;
    uint32_t bits = simt_bits<uint32_t>(rounded);
    bool finite = (bits & 0x7f800000) != 0x7f800000;
    if (!finite || (double)rounded == value || (bits & 1)) return rounded;
    bool up = (rounded < 0 ? -(double)rounded : (double)rounded) > (value < 0 ? -value : value);
    return simt_bits<float>(up ? bits - 1 : bits + 1);
}

/* IEEE half from float, to nearest even, with subnormals; NaN becomes 0x7fff. */
static inline uint16_t simt_float_to_half(float value)
{
    uint32_t bits = simt_bits<uint32_t>(value), magnitude = bits & 0x7fffffff;
    uint16_t sign = (uint16_t)((bits >> 16) & 0x8000);
    if (magnitude > 0x7f800000) return 0x7fff;
    if (magnitude >= 0x47800000) return sign | 0x7c00;             /* 65536 and more, infinity included */
    if (magnitude < 0x33000000) return sign;                       /* below half of the smallest subnormal */
    uint32_t exponent = magnitude >> 23;
    uint32_t mantissa = (magnitude & 0x7fffff) | 0x800000;
    uint32_t drop = exponent >= 113 ? 13 : 126 - exponent;         /* bits that do not fit; more of them for a subnormal */
    uint32_t kept = mantissa >> drop, rest = mantissa & ((1u << drop) - 1), half = 1u << (drop - 1);
    kept += rest > half || (rest == half && (kept & 1));
    return sign | (uint16_t)(exponent >= 113 ? kept + ((exponent - 113) << 10) : kept);
}

static inline float simt_half_to_float(uint16_t half)
{
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = (half >> 10) & 31, mantissa = half & 0x3ff;
    if (exponent == 31) return simt_bits<float>(sign | 0x7f800000 | (mantissa << 13));
    if (exponent) return simt_bits<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
    float subnormal = (float)mantissa * 0x1p-24f;
    return sign ? -subnormal : subnormal;
}

/* --- bf16 and half ------------------------------------------------------------------------------------------------- */

/* Arithmetic is done in float and rounded once: a float has more than twice the bits of either type, so for + - * / the
 * result is the correctly rounded one. As in the real headers both convert to float and from any number by themselves. */
#define SIMT_SMALL_FLOAT(Type, Raw, Pair, RawPair, encode, decode)                                           \
    struct Raw { unsigned short x; };                                                                        \
    struct alignas(2) Type {                                                                                 \
        unsigned short __x;                                                                                  \
        Type() = default;                                                                                    \
        Type(Raw raw) : __x(raw.x) {}                                                                        \
        Type(float value) : __x(encode(value)) {}                                                            \
        Type(double value) : __x(encode(simt_double_to_odd_float(value))) {}                                 \
        Type(int value) : Type((double)value) {}                                                             \
        Type(unsigned value) : Type((double)value) {}                                                        \
        Type(long value) : Type((double)value) {}                                                            \
        Type(unsigned long value) : Type((double)value) {}                                                   \
        Type(long long value) : Type((double)value) {}                                                       \
        Type(unsigned long long value) : Type((double)value) {}                                              \
        operator Raw() const { return {__x}; }                                                               \
        operator float() const { return decode(__x); }                                                       \
    };                                                                                                       \
    static inline Type operator+(Type a, Type b) { return Type((float)a + (float)b); }                       \
    static inline Type operator-(Type a, Type b) { return Type((float)a - (float)b); }                       \
    static inline Type operator*(Type a, Type b) { return Type((float)a * (float)b); }                       \
    static inline Type operator/(Type a, Type b) { return Type((float)a / (float)b); }                       \
    static inline Type &operator+=(Type &a, Type b) { return a = a + b; }                                    \
    static inline Type &operator-=(Type &a, Type b) { return a = a - b; }                                    \
    static inline Type &operator*=(Type &a, Type b) { return a = a * b; }                                    \
    static inline Type &operator/=(Type &a, Type b) { return a = a / b; }                                    \
    static inline Type operator-(Type a) { return Type(Raw{(unsigned short)(a.__x ^ 0x8000)}); }             \
    static inline bool operator==(Type a, Type b) { return (float)a == (float)b; }                           \
    static inline bool operator!=(Type a, Type b) { return (float)a != (float)b; }                           \
    static inline bool operator<(Type a, Type b) { return (float)a < (float)b; }                             \
    static inline bool operator<=(Type a, Type b) { return (float)a <= (float)b; }                           \
    static inline bool operator>(Type a, Type b) { return (float)a > (float)b; }                             \
    static inline bool operator>=(Type a, Type b) { return (float)a >= (float)b; }                           \
    static inline Type __hadd(Type a, Type b) { return a + b; }                                              \
    static inline Type __hsub(Type a, Type b) { return a - b; }                                              \
    static inline Type __hmul(Type a, Type b) { return a * b; }                                              \
    static inline Type __hdiv(Type a, Type b) { return a / b; }                                              \
    static inline Type __hneg(Type a) { return -a; }                                                         \
    static inline Type __habs(Type a) { return Type(Raw{(unsigned short)(a.__x & 0x7fff)}); }                \
    static inline Type __hfma(Type a, Type b, Type c) { return Type((double)(float)a * (float)b + (float)c); } \
    static inline Type __hmax(Type a, Type b) { return Type(fmaxf((float)a, (float)b)); }                    \
    static inline Type __hmin(Type a, Type b) { return Type(fminf((float)a, (float)b)); }                    \
    static inline bool __hisnan(Type a) { return (float)a != (float)a; }                                     \
    static inline bool __heq(Type a, Type b) { return a == b; }                                              \
    static inline bool __hgt(Type a, Type b) { return a > b; }                                               \
    static inline bool __hlt(Type a, Type b) { return a < b; }                                               \
    struct RawPair { unsigned short x, y; };                                                                 \
    struct alignas(4) Pair {                                                                                 \
        Type x, y;                                                                                           \
        Pair() = default;                                                                                    \
        Pair(Type x_, Type y_) : x(x_), y(y_) {}                                                             \
    };                                                                                                       \
    static inline Pair operator+(Pair a, Pair b) { return {a.x + b.x, a.y + b.y}; }                          \
    static inline Pair operator-(Pair a, Pair b) { return {a.x - b.x, a.y - b.y}; }                          \
    static inline Pair operator*(Pair a, Pair b) { return {a.x * b.x, a.y * b.y}; }                          \
    static inline Pair &operator+=(Pair &a, Pair b) { return a = a + b; }                                    \
    static inline Pair &operator*=(Pair &a, Pair b) { return a = a * b; }                                    \
    static inline Pair __hadd2(Pair a, Pair b) { return a + b; }                                             \
    static inline Pair __hsub2(Pair a, Pair b) { return a - b; }                                             \
    static inline Pair __hmul2(Pair a, Pair b) { return a * b; }                                             \
    static inline Pair __hfma2(Pair a, Pair b, Pair c) { return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)}; } \
    static inline Pair __hmax2(Pair a, Pair b) { return {__hmax(a.x, b.x), __hmax(a.y, b.y)}; }              \
    static inline Pair __hmin2(Pair a, Pair b) { return {__hmin(a.x, b.x), __hmin(a.y, b.y)}; }              \
    static inline float __low2float(Pair a) { return a.x; }                                                  \
    static inline float __high2float(Pair a) { return a.y; }

SIMT_SMALL_FLOAT(__nv_bfloat16, __nv_bfloat16_raw, __nv_bfloat162, __nv_bfloat162_raw, simt_float_to_bf16,
                 simt_bf16_to_float)
SIMT_SMALL_FLOAT(__half, __half_raw, __half2, __half2_raw, simt_float_to_half, simt_half_to_float)

typedef __nv_bfloat16 nv_bfloat16;
typedef __nv_bfloat162 nv_bfloat162;
typedef __half half;
typedef __half2 half2;

static inline __nv_bfloat16 __float2bfloat16(float value) { return __nv_bfloat16(value); }
static inline __nv_bfloat16 __float2bfloat16_rn(float value) { return __nv_bfloat16(value); }
static inline __nv_bfloat16 __float2bfloat16_rz(float value)
{
    return value != value ? __nv_bfloat16(value)
                          : __nv_bfloat16(__nv_bfloat16_raw{(unsigned short)(simt_bits<uint32_t>(value) >> 16)});
}
static inline __nv_bfloat16 __double2bfloat16(double value) { return __nv_bfloat16(value); }
static inline float __bfloat162float(__nv_bfloat16 value) { return value; }
static inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {__nv_bfloat16(x), __nv_bfloat16(y)}; }
static inline __nv_bfloat162 __float22bfloat162_rn(float2 v) { return __floats2bfloat162_rn(v.x, v.y); }
static inline __nv_bfloat162 __float2bfloat162_rn(float value) { return __floats2bfloat162_rn(value, value); }
static inline float2 __bfloat1622float2(__nv_bfloat162 v) { return {v.x, v.y}; }
static inline __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) { return {x, y}; }
static inline __nv_bfloat162 make_bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) { return {x, y}; }
static inline __nv_bfloat162 __bfloat162bfloat162(__nv_bfloat16 value) { return {value, value}; }
static inline __nv_bfloat16 __low2bfloat16(__nv_bfloat162 v) { return v.x; }
static inline __nv_bfloat16 __high2bfloat16(__nv_bfloat162 v) { return v.y; }
static inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 value) { return value.__x; }
static inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) { return __nv_bfloat16(__nv_bfloat16_raw{bits}); }

static inline __half __float2half(float value) { return __half(value); }
static inline __half __float2half_rn(float value) { return __half(value); }
static inline float __half2float(__half value) { return value; }
static inline __half2 __floats2half2_rn(float x, float y) { return {__half(x), __half(y)}; }
static inline __half2 __float22half2_rn(float2 v) { return __floats2half2_rn(v.x, v.y); }
static inline float2 __half22float2(__half2 v) { return {v.x, v.y}; }
static inline __half2 __halves2half2(__half x, __half y) { return {x, y}; }
static inline unsigned short __half_as_ushort(__half value) { return value.__x; }
static inline __half __ushort_as_half(unsigned short bits) { return __half(__half_raw{bits}); }

#endif
