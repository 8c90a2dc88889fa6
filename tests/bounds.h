/* bounds.h - how large an error may be: the one table, by precision and quantity, for every attention kernel.
 *
 * In each head and each stripe of STRIPE rows, the largest error against the float64 truth may be at most
 *
 *     in fp32    FACTOR * (largest error of a plain computation in the same precision)  +  u * terms * sum |r|
 *     in bf16    the larger of  FACTOR * (the same)
 *                          and  u * the smaller of  terms * sum |r|  and  squares * sqrt(sum r^2)
 *     in both    +  logits * 2^-24 * (error through the logits)
 *
 * The plain computation is a materialised softmax attention, every sum in fp32 in the order of the formula, P, dS and the
 * results rounded to the kernel's type, D = rowsum(dO * O) from the rounded O that backward is handed, as PyTorch's flash
 * takes it: what a framework does. A kernel rounds at the same places, here and there to the other neighbour. In a stripe
 * where the plain one is lucky (of two rows, or of one: at T = 1 it is exact) twice its error says nothing. There the floor
 * holds, what these roundings can do at all: each moves the result by at most u r, u the unit roundoff of the type (to
 * first order; Higham, Accuracy and Stability of Numerical Algorithms, chapters 2 and 3). r is:
 *
 *     P_ij          V_j and through O -> D: dO_i . V_j     in bf16 the result itself, once more
 *     O_i           D_i = dO_i . O_i, which moves all dS_ij = P_ij (dP_ij - D_i) of its row
 *     P_ij, dS_ij   dS_ij, each once: K_j of dQ, Q_i of dK
 *
 * In bf16 nothing else matters, and nothing can exceed their sum; it is reached only where all have the same sign and size,
 * so where there are many, `squares` standard deviations hold instead. In fp32 the order of the sums errs as well, which
 * the plain computation measures: so there the two are added up, with half the weight for dQ and dK, whose sums |r| hold
 * each rounding; and LSE, fp32 whatever the type, is judged as fp32 is.
 *
 * Where a shape allows TF32, it is judged as bf16 is, with the unit of TF32: P and dS are rounded to that as factors. But O
 * and the gradients are fp32, so what r says of their own rounding is left out. The truth is that of Q, K, V and dO that are
 * exact in TF32: a kernel that is given others rounds them first, to nearest, and is judged as if it had been given what
 * they round to.
 *
 * The last line is what errors in the logits and in LSE, which are fp32 in every kernel, do: P_ij = exp(S_ij - LSE_i) moves
 * by P_ij (1 - P_ij) of the one and P_ij of the other.
 */
#ifndef BOUNDS_H
#define BOUNDS_H

#include "attention/attention.h"

typedef enum Quantity { QUANTITY_O, QUANTITY_LSE, QUANTITY_DQ, QUANTITY_DK, QUANTITY_DV, QUANTITY_COUNT } Quantity;

#define QUANTITY_NAMES {"O", "LSE", "dQ", "dK", "dV"}

typedef struct Bound {
    double terms, squares, logits; /* as above; squares 0: judged as fp32 */
} Bound;

/* Rows judged together. A whole-tensor norm would hide one wrong stripe of one head. */
#define STRIPE 16
#define FACTOR 2.0

/* What a shape is judged by: its dtype, or this where it is fp32 and allows TF32. */
enum { PRECISION_TF32 = DTYPE_COUNT, PRECISION_COUNT };

static inline int precision_of(const AttentionShape *shape)
{
    return shape->tf32 && shape->dtype == DTYPE_FP32 ? (int)PRECISION_TF32 : (int)shape->dtype;
}

/* 24, 8 and 11 significant bits, to nearest. LSE is fp32 whatever the type. */
static const double unit_roundoff[PRECISION_COUNT] = {0x1p-24 /* fp32 */, 0x1p-8 /* bf16 */, 0x1p-11 /* TF32 */};

/* In the order of the enums: a line a precision; O, LSE, dQ, dK, dV. Read by C++ too, which has no array designators. */
static const Bound bounds[PRECISION_COUNT][QUANTITY_COUNT] = {
    {{4, 0, 2}, {4, 0, 2}, {2, 0, 2}, {2, 0, 2}, {4, 0, 2}}, /* fp32 */
    {{1, 2, 1}, {4, 0, 2}, {1, 2, 1}, {1, 2, 1}, {1, 2, 1}}, /* bf16 */
    {{1, 2, 2}, {4, 0, 2}, {1, 2, 2}, {1, 2, 2}, {1, 2, 2}}, /* TF32 */
};

/* Logits of a whole model beside those of another program, by the largest of them: fp32 in another order of sums. */
#define MODEL_LOGITS 1e-5

/* Logits of a text that was read one token after another beside those of the same text read at once, by the largest of them:
 * sums in another order, and in bf16 activations that are rounded to another neighbour here and there. */
static const double decode_logits[DTYPE_COUNT] = {2e-6 /* fp32 */, 2e-2 /* bf16 */};

#endif
