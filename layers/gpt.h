/* gpt.h - the model, once for every backend: GPT-2 as published (pre-norm, learned positions, tanh GELU, tied head).
 *
 * A Gpt owns its parameters, gradients, optimizer state, activations and one scratch area, each one allocation. It reads no
 * files and prints nothing. gpt_plan() tells what it will allocate before anything is.
 */
#ifndef GPT_H
#define GPT_H

#include <stddef.h>
#include <stdint.h>

#include "attention/attention.h"
#include "layers/backend.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct GptConfig {
    int64_t layers;   /* L */
    int64_t heads;    /* NH */
    int64_t channels; /* C, divisible by NH */
    int64_t context;  /* positions that wpe has: the longest T */
    int64_t vocab;    /* V */
} GptConfig;

/* What a step keeps of the forward pass; the rest is computed again in the backward pass. */
typedef enum GptRecompute { GPT_RECOMPUTE_NONE, GPT_RECOMPUTE_GELU, GPT_RECOMPUTE_BLOCK } GptRecompute;

typedef struct GptOptions {
    int64_t batch;          /* B: most sequences a call may bring */
    int64_t sequence;       /* T: most tokens a sequence may have, <= context */
    int training;           /* 0: no gradients, no optimizer state, activations of one layer only */
    GptRecompute recompute;
    int deterministic;
    int tf32;               /* 1: attention may round the factors of fp32 products to TF32, as the stream's products may */
    float scale;            /* attention's factor; 0 means 1/sqrt(HS) */
    int64_t micro_steps;    /* batches that an update may gather through gpt_upload; 0 means 1 */
    int64_t cache;          /* sequences whose keys and values are kept for gpt_prefill and gpt_decode; 0: none */
    int no_recording;       /* 1: queue every operation of a step anew instead of replaying a recording of it */
} GptOptions;

/* The kinds of parameter tensor. In the flat buffer all matrices come first (they decay), then all vectors. */
typedef enum GptKind {
    GPT_WTE, GPT_WPE, GPT_QKV_W, GPT_PROJ_W, GPT_FC_W, GPT_FCPROJ_W,
    GPT_LN1_W, GPT_LN1_B, GPT_QKV_B, GPT_PROJ_B, GPT_LN2_W, GPT_LN2_B, GPT_FC_B, GPT_FCPROJ_B, GPT_LNF_W, GPT_LNF_B,
    GPT_KINDS
} GptKind;

/* One parameter tensor in the flat buffer. */
typedef struct GptTensor {
    char name[48];      /* Hugging Face's, "transformer.h.0.attn.c_attn.weight" */
    GptKind kind;
    int64_t layer;      /* -1 for those outside the blocks */
    int64_t rows, columns; /* row-major in memory; a vector has rows 1. wte has V rows here: its padding is not shown */
    int transposed;     /* 1: files in Hugging Face's layout hold (columns, rows): Conv1D */
    int64_t offset;     /* elements from the start of the flat buffer */
} GptTensor;

/* Flat fp32 buffers that gpt_read and gpt_write reach. */
typedef enum GptBuffer { GPT_PARAMETERS, GPT_GRADIENTS, GPT_MOMENT1, GPT_MOMENT2 } GptBuffer;

/* Bytes by category, as gpt_create will allocate them. In bf16, parameters are those of the products, with the fp32 ones
 * under optimizer in training; without it, fp32 embeddings and vectors count as parameters too. */
typedef struct GptPlan {
    int64_t parameters_count; /* as the field counts: no padding, head tied */
    size_t parameters, gradients, optimizer, activations, scratch, total; /* the cache counts as activations */
} GptPlan;

typedef struct Gpt Gpt;

/* NULL, or the sentence that says what is wrong with a configuration (and what would be right). */
const char *gpt_config_fault(const GptConfig *config, char *text, size_t size);

/* The plan for these choices; allocates nothing. attention may be NULL: its buffers are then not counted. */
GptPlan gpt_plan(const GptConfig *config, const GptOptions *options, const Backend *backend,
                 const AttentionKernel *attention);

/* Allocates what gpt_plan says. Parameters are undefined until gpt_init_random or gpt_write; moments are zero. Returns NULL
 * with a sentence where memory is short (by how much, and which batch would fit). */
Gpt *gpt_create(const GptConfig *config, const GptOptions *options, const Backend *backend, Stream *stream,
                const AttentionKernel *attention, char *error, size_t error_size);
void gpt_free(Gpt *gpt);

const GptConfig *gpt_config(const Gpt *gpt);
/* NULL, or what the attention kernel said when a call of it failed; losses are NaN from then on. */
const char *gpt_fault(const Gpt *gpt);
size_t gpt_tensor_count(const Gpt *gpt);
const GptTensor *gpt_tensor(const Gpt *gpt, size_t i);

/* Copies rows [first, first+count) of tensor i between a flat buffer and host memory (count, columns) fp32, in the model's
 * own row-major layout. Writing GPT_PARAMETERS sets both the fp32 values and the working copy; reading gives the fp32 ones,
 * but for matrices (wte and wpe apart) in bf16 inference, which are there in bf16 alone. */
void gpt_read(const Gpt *gpt, GptBuffer buffer, size_t i, int64_t first, int64_t count, float *host);
void gpt_write(Gpt *gpt, GptBuffer buffer, size_t i, int64_t first, int64_t count, const float *host);

/* GPT-2's initialisation from a seed, the same on every backend: weights and embeddings normal(0, 0.02), the two projections
 * into the residual stream 0.02/sqrt(2 L), biases 0, layernorm weights 1. Source: Radford et al. 2019; openai/gpt-2. */
void gpt_init_random(Gpt *gpt, uint64_t seed);

/* Loss of tokens (B,T) against targets (B,T), both in host memory, -1 in targets for one that does not count:
 * the sum over counted tokens, in double. Forward only. B and T up to those of the options. A call of gpt_loss, gpt_logits
 * or gpt_backward overwrites the activations of the last. */
double gpt_loss(Gpt *gpt, const int32_t *tokens, const int32_t *targets, int64_t B, int64_t T);

/* The same, with the loss of each token in losses (B,T), host memory, fp32: 0 for one that does not count. */
double gpt_losses(Gpt *gpt, float *losses, const int32_t *tokens, const int32_t *targets, int64_t B, int64_t T);

/* Forward and backward; gradients += dscale * d(sum of losses)/d(parameters). Returns the sum of losses, as gpt_loss. */
double gpt_backward(Gpt *gpt, const int32_t *tokens, const int32_t *targets, int64_t B, int64_t T, float dscale);

/* Logits (V) of position T-1 of one sequence of T tokens in host memory, to host memory, fp32. */
void gpt_logits(Gpt *gpt, float *logits, const int32_t *tokens, int64_t T);

/* Writing on, without reading again what was read: needs options.cache, which bounds the sequences.
 *     gpt_prefill  reads a text of n tokens, 1 <= n <= options.sequence, and keeps its keys and values as those of each of
 *                  the sequences first..first+count-1, in place of what these had; logits (V) of its last position, or NULL
 *     gpt_decode   one more token (B) for each of the sequences 0..B-1, which all hold t tokens, t < options.sequence:
 *                  logits (B,V) of the new position
 * Tokens and logits lie in host memory. Training between two calls is allowed, and makes what is kept that of older
 * weights. */
void gpt_prefill(Gpt *gpt, float *logits, int64_t first, int64_t count, const int32_t *tokens, int64_t n);
void gpt_decode(Gpt *gpt, float *logits, const int32_t *tokens, int64_t B, int64_t t);

void gpt_zero_gradients(Gpt *gpt);

/* Global norm of the gradients, then AdamW with them. Returns the norm before clipping. Where it is not finite, nothing
 * is changed. */
float gpt_update(Gpt *gpt, const AdamwStep *step);

/* A whole update in three calls, so that host and device work at the same time:
 *     gpt_upload         hands over micro-batch m of the next update: options.batch sequences of options.sequence tokens
 *     gpt_step_launch    queues it: gradients zeroed, forward and backward of micro-batches 0..micro_steps-1, update
 *     gpt_step_finish    waits, gives the sum of losses and the norm
 * gpt_upload may be called for the following update between the other two, and copies what it is given. */
void gpt_upload(Gpt *gpt, int64_t m, const int32_t *tokens, const int32_t *targets);
void gpt_step_launch(Gpt *gpt, int64_t micro_steps, float dscale, const AdamwStep *step);
void gpt_step_finish(Gpt *gpt, double *loss, float *norm);

/* The first tensor of `buffer` that holds a NaN or infinity, or NULL; of gradients the first that backward comes to. */
const GptTensor *gpt_find_nonfinite(const Gpt *gpt, GptBuffer buffer);

/* What the last forward pass of a model in training computed first of all that holds a NaN or infinity, in words written to
 * text: "output of attention in block 3"; NULL where nothing that is kept does. Where blocks are computed again, only the
 * sums between them are kept: "output of block 3". */
const char *gpt_find_nonfinite_activation(const Gpt *gpt, char *text, size_t size);

#ifdef __cplusplus
}
#endif
#endif
