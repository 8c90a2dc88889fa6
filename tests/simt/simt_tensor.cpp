/* simt_tensor.cpp - what whole warps do in simt_tensor.h: matrix loads and products. Compiled without sanitizers, for these
 * are the inner loops of every kernel that uses them. */
#include "simt_tensor.h"

#include <float.h>

/* --- matrix loads -------------------------------------------------------------------------------------------------- */

/* What a lane brings to a matrix load, and what it takes: the rows that hold its elements. */
struct Rows {
    SharedAddress given;
    int count, lane[8];     /* the lanes that give the rows it needs */
    SharedAddress taken[8]; /* and these rows */
};

static void rows_hand_over(void *const *lanes)
{
    for (int lane = 0; lane < 32; lane++) {
        Rows *rows = (Rows *)lanes[lane];
        for (int i = 0; i < rows->count; i++) rows->taken[i] = ((const Rows *)lanes[rows->lane[i]])->given;
    }
}

void simt_ldmatrix(const char *name, uint32_t *r, SharedAddress row, bool transposed, SimtSite site)
{
    int g = simt_lane() / 4, q = simt_lane() % 4;
    Rows rows;
    rows.given = row;
    rows.count = transposed ? 8 : 4;
    for (int i = 0; i < rows.count; i++) rows.lane[i] = transposed ? i / 2 * 8 + 2 * q + i % 2 : 8 * i + g;
    simt_shared_check(row.place.range, row.place.at, 16, 16, SIMT_READ); /* named by the lane that gave the address */
    simt_warp_meet(name, &rows, rows_hand_over, site);
    for (int i = 0; i < 4; i++)
        if (transposed)
            r[i] = shared_load<uint16_t>(rows.taken[2 * i].place + 2 * g) |
                   (uint32_t)shared_load<uint16_t>(rows.taken[2 * i + 1].place + 2 * g) << 16;
        else
            r[i] = load_32(rows.taken[i] + 4 * q);
}

/* --- products ------------------------------------------------------------------------------------------------------ */

/* What a lane brings to a product. */
struct Fragments {
    float *d;
    const uint32_t *a, *b;
};

/* 2^exponent, which a normal double can hold. */
static double power_of_two(int exponent) { return simt_bits<double>((uint64_t)(exponent + 1023) << 52); }

static float cut_to_float(double x)
{
    float nearest = (float)x;
    return fabs(nearest) > fabs(x) && fabs(x) < 0x1p128 ? nextafterf(nearest, 0) : nearest;
}

/* c + the sum of x[i] * y[i], one group, as simt_tensor.h says. The products are exact in double. */
static float group_add(float c, const double *x, const double *y, int count)
{
    double products[8], plain = c, largest = fabs(c);
    for (int i = 0; i < count; i++) {
        products[i] = x[i] * y[i];
        plain += products[i];
        largest = fmax(largest, fabs(products[i]));
    }
    if (isnan(plain)) return simt_bits<float>(0x7fffffff);
    if (isinf(plain) || largest == 0) return (float)plain;
    int exponent = (int)(simt_bits<uint64_t>(largest) >> 52) - 1023;
    double scale = power_of_two(24 - exponent);
    int64_t sum = (int64_t)(c * scale);
    for (int i = 0; i < count; i++) sum += (int64_t)(products[i] * scale);
    return cut_to_float((double)sum * power_of_two(exponent - 24));
}

/* d (16, 8) += a (16, K) b (8, K), where the D of the lanes stands, in groups of K / 2. */
template <int K>
static void product_add(void *const *lanes, const double (&a)[16][K], const double (&b)[8][K])
{
    for (int row = 0; row < 16; row++)
        for (int column = 0; column < 8; column++) {
            float *d = ((Fragments *)lanes[row % 8 * 4 + column / 2])->d + row / 8 * 2 + column % 2;
            for (int k = 0; k < K; k += K / 2) *d = group_add(*d, a[row] + k, b[column] + k, K / 2);
        }
}

static void product_bf16(void *const *lanes)
{
    double a[16][16], b[8][16];
    for (int lane = 0; lane < 32; lane++) {
        const Fragments *given = (const Fragments *)lanes[lane];
        int g = lane / 4, q = lane % 4;
        for (int half = 0; half < 2; half++) {
            for (int i = 0; i < 4; i++)
                a[g + i % 2 * 8][2 * q + i / 2 * 8 + half] = simt_bf16_to_float((uint16_t)(given->a[i] >> 16 * half));
            for (int i = 0; i < 2; i++)
                b[g][2 * q + i * 8 + half] = simt_bf16_to_float((uint16_t)(given->b[i] >> 16 * half));
        }
    }
    product_add<16>(lanes, a, b);
}

static float tf32_to_float(uint32_t bits) { return simt_bits<float>(bits & 0xffffe000); }

static void product_tf32(void *const *lanes)
{
    double a[16][8], b[8][8];
    for (int lane = 0; lane < 32; lane++) {
        const Fragments *given = (const Fragments *)lanes[lane];
        int g = lane / 4, q = lane % 4;
        for (int i = 0; i < 4; i++) a[g + i % 2 * 8][q + i / 2 * 4] = tf32_to_float(given->a[i]);
        for (int i = 0; i < 2; i++) b[g][q + i * 4] = tf32_to_float(given->b[i]);
    }
    product_add<8>(lanes, a, b);
}

void simt_mma_bf16(float *d, const uint32_t *a, const uint32_t *b, SimtSite site)
{
    Fragments mine = {d, a, b};
    simt_warp_meet("mma_bf16", &mine, product_bf16, site);
}

void simt_mma_tf32(float *d, const uint32_t *a, const uint32_t *b, SimtSite site)
{
    Fragments mine = {d, a, b};
    simt_warp_meet("mma_tf32", &mine, product_tf32, site);
}
