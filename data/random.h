/* random.h - the one source of randomness: a 64-bit mixer, and a generator whose whole state is one integer.
 *
 * Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014): splitmix64.
 */
#ifndef RANDOM_H
#define RANDOM_H

#include <stdint.h>

/* A bijection of 64-bit words that looks random: one step of splitmix64 from state x. */
static inline uint64_t random_mix(uint64_t x)
{
    x += 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

/* The next 64 random bits; *state is all there is to save and restore. */
static inline uint64_t random_u64(uint64_t *state)
{
    uint64_t bits = random_mix(*state);
    *state += 0x9E3779B97F4A7C15u;
    return bits;
}

/* Uniform in [0, 1), a multiple of 2^-53. */
static inline double random_uniform(uint64_t *state) { return (double)(random_u64(state) >> 11) * 0x1p-53; }

#endif
