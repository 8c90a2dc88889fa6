/* sample.h - text from a model: one token at a time, drawn from its logits.
 *
 * What was read is not read again: keys and values are kept (gpt.h). The model sees at most a window of tokens. When a text
 * fills it, the older half is forgotten: what remains is read anew as the beginning of a text, since positions are learned,
 * and the writing goes on behind it.
 */
#ifndef SAMPLE_H
#define SAMPLE_H

#include <signal.h>
#include <stdint.h>

#include "data/tokenizer.h"
#include "layers/gpt.h"

#ifdef __cplusplus
extern "C" {
#endif

/* How a token is drawn from logits (V): softmax(logits / temperature) over the top_k largest (0: all), and of these over the
 * fewest that hold top_p of the probability (1: all; Holtzman et al. 2020); of equals at either edge, all. temperature 0
 * takes the largest logit, the first of equals. */
typedef struct SampleRule {
    double temperature, top_p;
    int64_t top_k;
} SampleRule;

/* Draws a token. logits (V) are overwritten, room (V) is to work in. *state is the random state: one draw advances it once,
 * whatever the rule. */
int32_t sample_token(float *logits, float *room, int64_t V, const SampleRule *rule, uint64_t *state);

typedef struct SampleChoice {
    SampleRule rule;
    int64_t samples;     /* texts that are written at the same time, from one prompt: at most the model's options.cache */
    int64_t tokens;      /* how many to draw for each */
    int64_t window;      /* tokens that the model sees at most: at most its options.sequence */
    int32_t end_of_text; /* the token after which a text ends, drawn too; -1: none */
    uint64_t seed;       /* a text depends on it and on its number alone */
    int recompute;       /* read all of a text anew for every token: the same tokens, slowly; needs no cache */
    const volatile sig_atomic_t *stop; /* drawing ends early once it is not 0 */
} SampleChoice;

/* Is told of every token as it is drawn: of text number `sample`, counted from 0. */
typedef void SampleTaker(void *taker, int64_t sample, int32_t token);

/* Continues the prompt (count tokens, at least one; of one longer than the window, its end). Returns 0, or -1 with a
 * sentence: memory, or logits that are not finite. */
int sample_run(Gpt *gpt, const int32_t *prompt, int64_t count, const SampleChoice *choice, SampleTaker *take, void *taker,
               Error *error);

/* The tokens of `prompt` (length bytes), or the end-of-text token for an empty one; *count gets how many. The caller frees
 * them. NULL with a sentence where the prompt cannot be encoded or memory is short. */
int32_t *sample_prompt(const Tokenizer *tokenizer, const char *prompt, size_t length, int64_t *count, Error *error);

/* Bytes that grow. Begins as zeros; the caller frees .bytes. */
typedef struct TextBuffer {
    char *bytes;
    size_t length, capacity;
    int failed; /* memory was short, and something is missing */
} TextBuffer;

void text_append(TextBuffer *text, const char *bytes, size_t count);

/* `prompt` and what the model continues it with, in bytes, *length of them. The caller frees it. NULL with a sentence as
 * above. */
char *sample_text(Gpt *gpt, const Tokenizer *tokenizer, const char *prompt, const SampleChoice *choice, size_t *length,
                  Error *error);

#ifdef __cplusplus
}
#endif
#endif
