/* bf16.h - fp32 to bfloat16 and back, in files. */
#ifndef BF16_H
#define BF16_H

#include <stdint.h>
#include <string.h>

static inline float bf16_widen(uint16_t half)
{
    uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* in (n) fp32, finite, rounded to the nearest, ties to even, as bf16 to out (n), which may begin where `in` does. Returns
 * the place of the first value that rounds to infinity, or -1. */
static inline int64_t bf16_narrow(void *out, const float *in, int64_t n)
{
    int64_t first = -1;
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits;
        uint16_t half;
        memcpy(&bits, in + i, sizeof bits);
        half = (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
        if (first < 0 && (half & 0x7F80) == 0x7F80) first = i;
        memcpy((char *)out + 2 * i, &half, sizeof half);
    }
    return first;
}

#endif
