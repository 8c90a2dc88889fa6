/* sample.h - text from a model: one token at a time, drawn from its logits. */
#ifndef SAMPLE_H
#define SAMPLE_H

#include <signal.h>
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

typedef struct SampleChoice {
    int64_t tokens;     /* how many to draw */
    int64_t window;     /* tokens that the model sees at most: the front of a longer text is cut off */
    double temperature;
    int64_t top_k;
    const volatile sig_atomic_t *stop; /* drawing ends early once it is not 0 */
} SampleChoice;

/* `prompt` and what the model continues it with, in bytes, *length of them; an empty prompt stands for the end-of-text token. The caller
 * frees it. NULL with a sentence where the prompt cannot be encoded or memory is short. */
char *sample_text(Gpt *gpt, const Tokenizer *tokenizer, const char *prompt, const SampleChoice *choice, uint64_t *state, size_t *length,
                  Error *error);

#ifdef __cplusplus
}
#endif
#endif
