/* tokenizer.h - tokens to bytes, and bytes to tokens where that needs no rules.
 *
 * tokenizer.bin, as llm.c writes it: a header of 256 int32 (magic 20240328, version 2, number of tokens, end-of-text token),
 * then for each token one length byte and its bytes.
 */
#ifndef TOKENIZER_H
#define TOKENIZER_H

#include <stddef.h>
#include <stdint.h>

#include "data/error.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct Tokenizer Tokenizer;

/* Errors: missing, short, unknown magic or version, truncated or overlong table, end-of-text outside the table. */
Tokenizer *tokenizer_open(const char *path, Error *error);
void tokenizer_close(Tokenizer *tokenizer);

int64_t tokenizer_vocab(const Tokenizer *tokenizer);
int32_t tokenizer_end_of_text(const Tokenizer *tokenizer);

/* The bytes of a token (not 0-terminated), *length of them; "" for a token outside the table. */
const char *tokenizer_decode(const Tokenizer *tokenizer, int32_t token, size_t *length);

/* Tokens of `text` to out (at most `capacity`); *count gets how many the text has, which may exceed capacity. Works for
 * tokenizers in which every token but end-of-text is a single byte; for others it fails and says so. Returns 0 or -1. */
int tokenizer_encode(const Tokenizer *tokenizer, const char *text, size_t length, int32_t *out, size_t capacity, size_t *count,
                     Error *error);

#ifdef __cplusplus
}
#endif
#endif
