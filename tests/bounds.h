/* bounds.h - how large an error may be: the one table, by type and quantity, for every attention kernel on every device.
 *
 * In each head and each stripe of STRIPE rows, the largest error against the float64 truth may be at most
 *
 *     FACTOR * (largest error of a plain computation in the same precision)  +  terms * u * (sum of |terms|)
 *                                                                            +  logits * 2^-24 * (error through the logits)
 *
 * The plain computation is a materialised softmax attention, every sum in fp32 in the order of the formula, P, dS and the
 * results rounded to the kernel's type, D = rowsum(dO * O) from the rounded O that backward is handed, as PyTorch's flash
 * takes it: what a framework does. The other two are a floor, for stripes in
 * which the plain one happens to be lucky (at T = 1 it is exact). Both of their measures come with the truth: the sum of
 * the absolute values that are added up to an element, times the unit roundoff u of the type; and what errors in the
 * logits and in LSE, which are fp32 in every kernel, do to it: P_ij = exp(S_ij - LSE_i) moves by P_ij (1 - P_ij) of the
 * one and P_ij of the other.
 */
#ifndef BOUNDS_H
#define BOUNDS_H

#include "attention/attention.h"

typedef enum Quantity { QUANTITY_O, QUANTITY_LSE, QUANTITY_DQ, QUANTITY_DK, QUANTITY_DV, QUANTITY_COUNT } Quantity;

#define QUANTITY_NAMES {"O", "LSE", "dQ", "dK", "dV"}

typedef struct Bound {
    double terms, logits;
} Bound;

/* Rows judged together. A whole-tensor norm would hide one wrong stripe of one head. */
#define STRIPE 16
#define FACTOR 2.0

/* LSE is fp32 whatever the type. */
static const double unit_roundoff[DTYPE_COUNT] = {0x1p-24 /* fp32 */, 0x1p-9 /* bf16 */};

/* In the order of the enums: a line a dtype; O, LSE, dQ, dK, dV. C++ programs read this too, which know no array designators. */
static const Bound bounds[DTYPE_COUNT][QUANTITY_COUNT] = {
    {{4, 2}, {4, 2}, {4, 2}, {4, 2}, {4, 2}}, /* fp32 */
    {{1, 1}, {4, 2}, {1, 1}, {1, 1}, {1, 1}}, /* bf16 */
};

/* Logits of a whole model beside those of another program, by the largest of them: fp32 in another order of sums. */
#define MODEL_LOGITS 1e-5

/* Logits of a text that was read one token after another beside those of the same text read at once, by the largest of them:
 * sums in another order, and in bf16 activations that are rounded to another neighbour here and there. */
static const double decode_logits[DTYPE_COUNT] = {2e-6 /* fp32 */, 2e-2 /* bf16 */};

#endif
