/* backend.h - the contract between the model and a device: one table of operations.
 *
 * gpt.c computes a GPT with the functions of a Backend and knows nothing else of where it runs. cpu_fp32 is the table of
 * plain C twins and the oracle of the others; cuda_fp32 and cuda_bf16 join it in binaries built with nvcc. Operations are
 * fused where a fast device wants them fused, and every one of them says below exactly what it computes.
 *
 * Types: "real" is the backend's dtype (fp32 or bf16) and travels as void *. Statistics, losses and parameter gradients are
 * fp32 always, and so is the residual stream, forward and backward: it is a sum over all layers, whose small terms a bf16
 * total would round away. So are the parameters that embeddings and norms read: a norm's weight is near 1, where bf16 moves
 * in steps of 2^-8 or more, a dozen updates of the usual size. What is real is what products read and write. All pointers
 * lie in memory from alloc() unless said to be host. Sizes are int64_t and may be 0. Letters: B sequences, T tokens each,
 * N = B*T rows, C channels, OC output channels, V tokens in the vocabulary, Vp = V padded up with rows that exist only in
 * memory.
 * Arguments come in this order: outputs, saved, inputs, sizes, stream. "=" below overwrites, "+=" accumulates.
 *
 * Operations are queued on the stream and do not fail on valid sizes; a device fault ends the process with file, line and
 * the failing call. Only open() and alloc() have errors a caller can meet.
 */
#ifndef BACKEND_H
#define BACKEND_H

#include <stddef.h>
#include <stdint.h>

#include "attention/attention.h"

#ifdef __cplusplus
extern "C" {
#endif

/* One ordered queue of work on one device, with what the backend's libraries need. Opaque; each backend has its own. */
typedef struct Stream Stream;

/* What AdamW reads in an update. Lives in backend memory, so that a captured step can be replayed with other values. */
typedef struct AdamwStep {
    float lr, beta1, beta2, eps, weight_decay;
    float bias_correction1, bias_correction2; /* 1 - beta1^t, 1 - beta2^t, t counted from 1 */
    float clip;                               /* largest allowed global norm of the gradient; 0 means no limit */
} AdamwStep;

/* Work on a stream that was recorded once and can be queued again as a whole. Opaque. */
typedef struct Recording Recording;

typedef struct BackendOptions {
    int deterministic; /* the same bits on every run */
    int tf32;          /* fp32 products may round their factors to TF32 where the hardware has it */
} BackendOptions;

/* The order in which embedding_backward adds up the rows of equal tokens, made on the host in O(N) of N tokens in host
 * memory, as embedding_plan_size(N) int32. The positions of a token are cut into pieces of at most EMBEDDING_PIECE, as even
 * as can be, so that work can be shared out evenly however often a token occurs. Pieces of tokens that were cut come first,
 * a token's one after another; behind them the tokens of one piece, from those of most positions to those of one. */
enum { EMBEDDING_PIECE = 8 };
void embedding_plan(int32_t *plan, const int32_t *tokens, int64_t N);
int64_t embedding_plan_size(int64_t N);

/* A plan of N tokens, by its parts. */
typedef struct EmbeddingPlan {
    const int32_t *pieces, *cuts; /* (1) each: how many pieces; how many tokens of several pieces */
    const int32_t *order;         /* (N): positions, piece after piece; rising within a token */
    const int32_t *begin;         /* (pieces + 1): where in order a piece begins, and the end of the last */
    const int32_t *token;         /* (pieces): whose it is */
    const int32_t *cut;           /* (cuts + 1): first piece of each cut token, and the end of the last */
} EmbeddingPlan;
EmbeddingPlan embedding_plan_parts(const int32_t *plan, int64_t N);

/* Pieces of cut tokens, at most: EMBEDDING_PIECE + 1 positions make 2, and more of them fewer for each. */
static inline int64_t embedding_cut_pieces(int64_t N) { return 2 * N / (EMBEDDING_PIECE + 1); }

typedef struct Backend {
    const char *name; /* "cpu_fp32" */
    AttentionDevice device;
    Dtype dtype;
    size_t element; /* bytes of a real */

    /* --- the machine ---------------------------------------------------------------------------------------------- */

    /* Opens device number `index` (ignored on the CPU). Returns NULL with one sentence in `error` where that cannot be. */
    Stream *(*open)(int index, const BackendOptions *options, char *error, size_t error_size);
    void (*close)(Stream *stream);
    /* What it runs on, for people: "AMD EPYC, 2 threads, OpenBLAS". Writes at most `size` bytes. */
    void (*describe)(char *text, size_t size, Stream *stream);
    int (*sm)(Stream *stream);                       /* compute capability, 90 for 9.0; 0 on the CPU */
    double (*peak_tflops)(Stream *stream);           /* of matrix products in this dtype, by the datasheet; 0: not known */
    void *(*attention_stream)(Stream *stream);       /* what AttentionKernel calls take as `stream` */
    int64_t (*memory_available)(Stream *stream);     /* bytes that alloc() can be expected to give now */
    /* Aligned to 256 bytes, contents undefined. NULL where there is not enough. */
    void *(*alloc)(size_t bytes, Stream *stream);
    void (*free)(void *memory, Stream *stream);
    void (*zero)(void *memory, size_t bytes, Stream *stream);
    void (*copy_in)(void *memory, const void *host, size_t bytes, Stream *stream);  /* host may be reused on return */
    void (*copy_out)(void *host, const void *memory, size_t bytes, Stream *stream); /* complete on return */
    void (*copy)(void *to, const void *from, size_t bytes, Stream *stream); /* both in backend memory */
    void (*synchronize)(Stream *stream);             /* waits for all queued work but uploads */

    /* Host memory that upload and download may use. NULL where there is not enough. */
    void *(*alloc_host)(size_t bytes, Stream *stream);
    void (*free_host)(void *host, Stream *stream);
    /* Copies to backend memory beside the queued work; host and memory must not be touched until work queued after the next
     * upload_join() has begun. upload_join() makes later work wait for all uploads so far. */
    void (*upload)(void *memory, const void *host, size_t bytes, Stream *stream);
    void (*upload_join)(Stream *stream);
    /* Queues a copy to host memory from alloc_host; there after synchronize(). */
    void (*download)(void *host, const void *memory, size_t bytes, Stream *stream);

    /* Between measure(1) and measure(0), outside of recordings, an operation of sizes that it has not been tried with may be
     * done many times over, to find the fastest way, which is kept; the result is that of once. For sizes that come again and
     * again. Nothing happens on a deterministic stream. NULL where there is nothing to gain. */
    void (*measure)(Stream *stream, int on);

    /* Between record_begin and record_end operations are recorded, not done; none may allocate, copy_in, copy_out or wait.
     * replay() queues them all. All four are NULL where there is nothing to gain, as on the CPU. */
    void (*record_begin)(Stream *stream);
    Recording *(*record_end)(Stream *stream);
    void (*replay)(Recording *recording, Stream *stream);
    void (*recording_free)(Recording *recording);

    /* What is queued between side_begin and side_end may be done beside what is queued after side_end: after what was queued
     * before side_begin, in its order, and, where it matters to later work, before side_join with the ticket that side_end
     * returned, or a later one; 0 is a ticket for nothing. Nothing that either reads may be written by the other, until they
     * are joined. A recording joins what it begins. All three are NULL where there is nothing to gain. */
    void (*side_begin)(Stream *stream);
    int64_t (*side_end)(Stream *stream);
    void (*side_join)(Stream *stream, int64_t ticket);

    /* --- conversions ---------------------------------------------------------------------------------------------- */

    /* out (n) real = in (n) fp32, rounded to nearest even. */
    void (*from_fp32)(void *out, const float *in, int64_t n, Stream *stream);
    void (*to_fp32)(float *out, const void *in, int64_t n, Stream *stream);

    /* --- embedding: out[b,t] = wte[tokens[b,t]] + wpe[t] ------------------------------------------------------------ */

    /* out (B,T,C) fp32 = ...; tokens (B,T), each in [0, V); wte (Vp,C) fp32; wpe (at least T rows, C) fp32. */
    void (*embedding_forward)(float *out, const int32_t *tokens, const float *wte, const float *wpe, int64_t B, int64_t T,
                              int64_t C, Stream *stream);
    /* dwte (Vp,C) fp32 +=, dwpe (T,C) fp32 +=; dout (B,T,C) fp32; plan: what embedding_plan made of the B*T tokens. Rows of
     * one token are added in an order that the plan alone decides, so the result is the same on every run. `scratch`:
     * embedding_scratch(B * T, C) bytes. */
    void (*embedding_backward)(float *dwte, float *dwpe, void *scratch, const float *dout, const int32_t *plan, int64_t B,
                               int64_t T, int64_t C, Stream *stream);
    size_t (*embedding_scratch)(int64_t N, int64_t C);

    /* --- layer normalisation (Ba et al. 2016), eps 1e-5, biased variance -------------------------------------------- */

    /* out (N,C) real = (x - mean) * rstd * weight + bias; mean, rstd (N) fp32 are saved; x (N,C) fp32; weight, bias (C)
     * fp32. */
    void (*layernorm_forward)(void *out, float *mean, float *rstd, const float *x, const float *weight, const float *bias,
                              int64_t N, int64_t C, Stream *stream);
    /* sum (N,C) fp32 = x + y, then out (N,C) real = layernorm(sum), in one pass; x (N,C) fp32, y (N,C) real. sum may be x
     * itself. */
    void (*residual_layernorm_forward)(float *sum, void *out, float *mean, float *rstd, const float *x, const void *y,
                                       const float *weight, const float *bias, int64_t N, int64_t C, Stream *stream);
    /* dx (N,C) fp32 = dresid + gradient of x, dweight (C), dbias (C) fp32 +=. dresid (N,C) fp32 is what flows along the
     * residual branch: dx itself, or NULL where nothing does. dout (N,C) real; x (N,C), weight (C) fp32 as in forward (x the
     * sum in the residual form). rounded (N,C) real = dx, for the products that read it next; NULL where it is not wanted,
     * and it may be dx itself where real is fp32, which costs nothing. `scratch`: layernorm_scratch(N, C) bytes. */
    void (*layernorm_backward)(float *dx, void *rounded, float *dweight, float *dbias, void *scratch, const float *dresid,
                               const void *dout, const float *x, const float *weight, const float *mean,
                               const float *rstd, int64_t N, int64_t C, Stream *stream);
    size_t (*layernorm_scratch)(int64_t N, int64_t C);

    /* --- linear: y = x W^T + b, W (OC,C) row-major ------------------------------------------------------------------- */

    /* out (N,OC) real = x (N,C) weight^T + bias; bias (OC) may be NULL. */
    void (*linear_forward)(void *out, const void *x, const void *weight, const void *bias, int64_t N, int64_t C, int64_t OC,
                           Stream *stream);
    /* The same followed by GELU: pre (N,OC) = x weight^T + bias is saved, out (N,OC) = gelu(pre). */
    void (*linear_gelu_forward)(void *out, void *pre, const void *x, const void *weight, const void *bias, int64_t N,
                                int64_t C, int64_t OC, Stream *stream);
    /* dx (N,C) real = dout weight, and where pre (N,C) is not NULL multiplied by gelu'(pre): then x was gelu(pre) and dx is
     * the gradient of pre. dx may be NULL: not wanted. dx may not overlap dout. dout (N,OC), weight (OC,C). */
    void (*linear_backward_input)(void *dx, const void *dout, const void *weight, const void *pre, int64_t N, int64_t C,
                                  int64_t OC, Stream *stream);
    /* dweight (OC,C) fp32 += dout^T x, dbias (OC) fp32 += column sums of dout (dbias may be NULL). `scratch`:
     * linear_scratch(N, C, OC) bytes. */
    void (*linear_backward_weight)(float *dweight, float *dbias, void *scratch, const void *dout, const void *x, int64_t N,
                                   int64_t C, int64_t OC, Stream *stream);
    size_t (*linear_scratch)(int64_t N, int64_t C, int64_t OC);

    /* --- GELU, tanh form (Hendrycks & Gimpel 2016): 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) ------------------ */

    /* out (n) = gelu(pre (n)): recomputes what linear_gelu_forward gave. */
    void (*gelu_forward)(void *out, const void *pre, int64_t n, Stream *stream);

    /* --- attention of new tokens over a cache of keys and values: writing one token after another ---------------------- */

    /* A cache of S sequences is (S,2,NH,T,HS) real: of each its keys, then its values, up to T rows. */

    /* Rows 0..n-1 of sequences first..first+count-1 = keys and values of qkv (n,3,NH,HS): one text, for all of them. */
    void (*cache_fill)(void *cache, const void *qkv, int64_t first, int64_t count, int64_t n, int64_t T, int64_t NH,
                       int64_t HS, Stream *stream);
    /* One more token of each of the sequences 0..B-1, at position t < T: rows t = keys and values of qkv (B,3,NH,HS), then
     * out (B,NH,HS) real = softmax(scale * query . keys 0..t) of its values. A sequence's result does not depend on B. */
    void (*cache_attend)(void *out, void *cache, const void *qkv, float scale, int64_t B, int64_t t, int64_t T, int64_t NH,
                         int64_t HS, Stream *stream);

    /* --- classifier: softmax cross entropy over rows of logits -------------------------------------------------------- */

    /* losses (N) fp32 = log(sum_v exp(logits[n,v])) - logits[n,targets[n]] over v < V, 0 where targets[n] is -1 (a row that
     * does not count). Where dscale is not 0, logits (N,Vp) real is overwritten by its gradient times dscale:
     * dscale * (softmax - onehot) for v < V, 0 for the padding columns and for rows that do not count. */
    void (*loss_forward_backward)(float *losses, void *logits, const int32_t *targets, float dscale, int64_t N, int64_t V,
                                  int64_t Vp, Stream *stream);

    /* *total += sum of losses (N), in double and in one order. */
    void (*losses_sum)(double *total, const float *losses, int64_t N, Stream *stream);

    /* --- optimizer ---------------------------------------------------------------------------------------------------- */

    /* norm (1) fp32 = sqrt(sum grads^2), summed in a fixed order in double or better than fp32; a non-finite gradient gives
     * a non-finite norm. `scratch`: norm_scratch(n) bytes. */
    void (*global_norm)(float *norm, void *scratch, const float *grads, int64_t n, Stream *stream);
    size_t (*norm_scratch)(int64_t n);
    /* AdamW (Loshchilov & Hutter 2019, algorithm 2) over one flat buffer of n parameters, the first n_decay of which decay:
     *   g = grads * min(1, clip / norm);  m = beta1 m + (1-beta1) g;  v = beta2 v + (1-beta2) g^2
     *   master -= lr * (m/bias_correction1 / (sqrt(v/bias_correction2) + eps) + weight_decay * master)
     *   params = master rounded to real.
     * Does nothing at all where *norm is not finite. params and master (fp32) may be the same buffer where real is fp32. */
    void (*adamw_update)(void *params, float *master, float *m, float *v, const float *grads, const float *norm,
                         const AdamwStep *step, int64_t n, int64_t n_decay, Stream *stream);
} Backend;

/* The backend for a device and dtype, or NULL where this binary has none. */
const Backend *backend_find(AttentionDevice device, Dtype dtype);

extern const Backend backend_cpu_fp32;
#ifdef HAVE_CUDA
extern const Backend backend_cuda_fp32, backend_cuda_bf16;
#endif

#ifdef __cplusplus
}
#endif
#endif
