/* flash_tf32.cu - flash attention for fp32 with factors rounded to TF32: flash_tf32x3.cu, one product for its three.
 *
 * Every factor (Q, K, V, dO, P, dS) is rounded to nearest, ties away from zero, by up to 2^-11 of itself; sums, softmax and
 * what is stored are fp32. So the result is attention of Q, K, V and dO rounded to TF32, as exact as P and dS of 11 bits let
 * it be: D = rowsum(dO * O) takes dO as rounded as dP does, or dP - D would not cancel. That is not what fp32 promises, so
 * this version takes a shape only where its tf32 allows it.
 */
#define TERMS 1
#include "attention/flash_tf32x3.cu"

static const char *flash_tf32_refuse(const AttentionShape *shape, int sm)
{
    const char *reason = flash_tf32x3_refuse(shape, sm);
    return reason || shape->tf32 ? reason : "rounds the factors of fp32 products to TF32, which --tf32 has to allow";
}

extern "C" const AttentionKernel attention_flash_tf32 = {
    ATTENTION_ABI,
    ATTENTION_CUDA,
    "flash_tf32",
    "tensor cores from sm_80, fp32 with factors rounded to TF32: errors of 2^-11, not fp32's",
    flash_tf32_refuse,
    flash_tf32x3_saved_bytes,
    flash_tf32x3_scratch_bytes,
    flash_tf32x3_forward,
    flash_tf32x3_backward,
};
