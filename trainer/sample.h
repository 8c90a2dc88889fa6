/* sample.h - text from a model: one token at a time, drawn from its logits. */
#ifndef SAMPLE_H
#define SAMPLE_H

#include <stdint.h>

#include "data/tokenizer.h"
#include "layers/gpt.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A token drawn from softmax(logits / temperature) over the top_k largest logits (0: all). logits (V) is overwritten.
 * temperature 0 gives the largest logit, the first of equals. *state is the random state; one draw advances it once, also at
 * temperature 0. */
int32_t sample_token(float *logits, int64_t V, double temperature, int64_t top_k, uint64_t *state);

/* Called with the bytes of each token as it is drawn. */
typedef void SampleSink(void *context, const char *bytes, size_t length);

/* Continues `prompt` (count tokens, at least 1) by n tokens and hands each to sink. A sequence that outgrows `window` tokens is cut
 * at its front. Returns 0, or -1 where memory is short. */
int sample_continue(Gpt *gpt, const Tokenizer *tokenizer, const int32_t *prompt, size_t count, int64_t n, int64_t window,
                    double temperature, int64_t top_k, uint64_t *state, SampleSink *sink, void *context);

#ifdef __cplusplus
}
#endif
#endif
