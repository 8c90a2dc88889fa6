/* attention.h - the contract of every attention version, and the table of those built in.
 *
 * One struct, AttentionKernel, describes a causal multi-head attention:
 *
 *     S = scale * Q K^T            (T x T for every batch entry and head; row i keeps only columns j <= i)
 *     P = softmax(S), row by row,  LSE_i = log sum_j exp(S_ij)
 *     O = P V
 *
 * and its gradient with respect to Q, K and V. The trainer, the tests and the benches loop over the same table, so a
 * version that is added to it (or loaded from a shared object) is at once trained with, checked and timed.
 *
 * Tensors come as views: a pointer and three strides in elements; the head dimension itself is contiguous. The packed
 * QKV activation (B, T, 3, NH, HS) is three views with batch stride T*3*C, row stride 3*C, head stride HS, at offsets
 * 0, C and 2*C; PyTorch's (B, NH, T, HS) is one with batch stride NH*T*HS, row stride HS, head stride T*HS. No version
 * may need a copy to read either. Inputs are never written. Views of one call do not overlap, with one exception: those
 * interleaved in one packed tensor, whose elements are disjoint. Base pointers are aligned to their element only.
 *
 * This header is plain C and C++ and depends on nothing else here, so a kernel outside the tree needs this file alone.
 */
#ifndef ATTENTION_H
#define ATTENTION_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Raised whenever a struct below changes; a shared object built against another number is refused. */
#define ATTENTION_ABI 2

/* Type of the elements of Q, K, V, O and their gradients. LSE is always fp32. */
typedef enum Dtype { DTYPE_FP32, DTYPE_BF16, DTYPE_COUNT } Dtype;

typedef enum AttentionDevice { ATTENTION_CPU, ATTENTION_CUDA } AttentionDevice;

typedef struct AttentionShape {
    int64_t B;         /* sequences */
    int64_t T;         /* tokens in a sequence: queries and keys alike */
    int64_t NH;        /* heads */
    int64_t HS;        /* head dimension */
    float scale;       /* factor of Q K^T; attention_scale(HS) gives the usual 1/sqrt(HS) */
    Dtype dtype;
    int deterministic; /* not 0: the same inputs must give the same bits on every run */
    int tf32;          /* not 0: products of fp32 factors may round them to TF32 */
} AttentionShape;

/* Element (b, t, h, i) stands at data + b*batch_stride + t*row_stride + h*head_stride + i. Strides count elements. */
typedef struct AttentionInput {
    const void *data;
    int64_t batch_stride, row_stride, head_stride;
} AttentionInput;

typedef struct AttentionOutput {
    void *data;
    int64_t batch_stride, row_stride, head_stride;
} AttentionOutput;

typedef struct AttentionKernel {
    int abi;                /* ATTENTION_ABI as the kernel was compiled with */
    AttentionDevice device; /* where the pointers of a call must live */
    const char *name;       /* what --attention takes: letters, digits, '_', at most 63 */
    const char *summary;    /* one line for --list-attention, at most 255 bytes */

    /* NULL where this version computes `shape` correctly on a GPU of compute capability `sm` (90 for 9.0; 0 on the CPU),
     * else the reason as a fragment of a sentence, in one line ("needs sm_80 or later, this GPU is sm_75"). */
    const char *(*refuse)(const AttentionShape *shape, int sm);

    /* Bytes kept from a layer's forward to its backward beside Q, K, V, O and LSE; bytes that all calls share and that need
     * not survive between two of them. Neither buffer is zeroed or meaningful on entry, both are aligned to 16 bytes. Both
     * may be of 0 bytes. */
    size_t (*saved_bytes)(const AttentionShape *shape);
    size_t (*scratch_bytes)(const AttentionShape *shape);

    /* Forward: writes O, LSE (B, NH, T) contiguous fp32, and `saved`. `stream` is a cudaStream_t, or NULL on the CPU; work
     * on it is queued, not waited for. A row that holds NaN or +inf logits gives NaN in that row and in no earlier one.
     * An empty shape (B, T or NH of 0) does nothing. Returns NULL, or what went wrong. */
    const char *(*forward)(AttentionOutput O, float *LSE, void *saved, void *scratch, AttentionInput Q, AttentionInput K,
                           AttentionInput V, const AttentionShape *shape, void *stream);

    /* Backward: writes (does not add to) dQ, dK and dV, given dO and all that forward read and wrote. */
    const char *(*backward)(AttentionOutput dQ, AttentionOutput dK, AttentionOutput dV, void *scratch, AttentionInput dO,
                            AttentionInput Q, AttentionInput K, AttentionInput V, AttentionInput O, const float *LSE,
                            const void *saved, const AttentionShape *shape, void *stream);
} AttentionKernel;

/* --- the table ---------------------------------------------------------------------------------------------------- */

/* The versions built into this binary, ordered within each device from fastest to slowest. *count gets their number. */
const AttentionKernel *const *attention_table(size_t *count);

/* 1/sqrt(HS). Source: Vaswani et al. 2017, equation 1. */
float attention_scale(int64_t HS);

/* Views of the packed QKV activation (B, T, 3, NH, HS); part is 0 for Q, 1 for K, 2 for V. `element` is bytes per element. */
AttentionInput attention_packed_input(const void *qkv, int part, const AttentionShape *shape, size_t element);
AttentionOutput attention_packed_output(void *qkv, int part, const AttentionShape *shape, size_t element);
/* Views of a (B, T, NH, HS) tensor, as the trainer holds O, and of a (B, NH, T, HS) tensor, as PyTorch holds all. */
AttentionInput attention_rows_input(const void *o, const AttentionShape *shape);
AttentionOutput attention_rows_output(void *o, const AttentionShape *shape);
AttentionInput attention_heads_input(const void *o, const AttentionShape *shape);
AttentionOutput attention_heads_output(void *o, const AttentionShape *shape);

/* The kernel that `choice` means for this device, shape and sm:
 *   "auto"            the first of the table that does not refuse;
 *   a name            that one, or NULL where it is unknown, not in this build, for another device, or refuses;
 *   a path with '/'   or ending in ".so": the AttentionKernel that the shared object exports as `attention_kernel`.
 * A loaded object stays loaded until the process ends. On NULL, `error` (of `error_size` bytes) holds one sentence with
 * what was got and what is possible. */
const AttentionKernel *attention_choose(const char *choice, AttentionDevice device, const AttentionShape *shape, int sm,
                                        char *error, size_t error_size);

/* What a kernel says, why it refuses or what went wrong, as a line for a terminal: control characters become '?', more than
 * ATTENTION_WORDS - 1 bytes are cut, of nothing it is said that it is nothing. Returns `text`, which it is written to. */
enum { ATTENTION_WORDS = 256 };
const char *attention_words(const char *words, char text[ATTENTION_WORDS]);

/* Whether a choice is the path of a shared object. */
int attention_is_path(const char *choice);

/* Prints the table, one line a kernel: name, device, "ok" or "no", its summary, and the reason where it refuses `shape` on
 * `sm`; behind it the shared object that `choice` is the path of, if it is one. Returns 0, or -1 where that cannot be
 * loaded or `choice` is a name that no kernel of this build has, with a sentence and nothing printed. */
int attention_list(const char *choice, AttentionDevice device, const AttentionShape *shape, int sm, char *error,
                   size_t error_size);

#ifdef __cplusplus
}
#endif
#endif
