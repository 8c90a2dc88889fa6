/* tokenizer.h - tokens to bytes, and text to tokens.
 *
 * tokenizer.bin: a header of 256 int32, little-endian; then for each token one length byte and its bytes; then for each
 * merge three int32: left token, right token, the token they become; in the order of their ranks.
 *
 *     header   0 magic 20240328   1 version 2   2 number of tokens   3 end-of-text token   4 number of merges
 *              5 rule by which text is cut before it is merged: 0 none that is known, 1 GPT-2's (see bpe.h)
 *
 * Up to the merges this is llm.c's file, whose readers stop there; its writers leave words 4 and 5 zero. Version 1, which
 * llm.c wrote first, lacks word 3: the token is 50256.
 */
#ifndef TOKENIZER_H
#define TOKENIZER_H

#include <stddef.h>
#include <stdint.h>

#include "data/bpe.h"
#include "data/error.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct Tokenizer Tokenizer;

typedef enum TokenizerRule { TOKENIZER_UNKNOWN, TOKENIZER_GPT2, TOKENIZER_RULES } TokenizerRule;

/* What a tokenizer is made of. */
typedef struct TokenizerParts {
    uint8_t *table;      /* for each token one length byte and its bytes */
    size_t table_bytes;
    int64_t vocab;       /* tokens, at most 2^31 - 1 */
    int32_t end_of_text;
    TokenizerRule rule;
    BpeMerge *merges;    /* (merge_count) in the order of their ranks */
    size_t merge_count;
} TokenizerParts;

/* Opens a tokenizer.bin. Errors: missing, short, unknown magic, version or rule, truncated or overlong table, end-of-text
 * outside the table, a merge whose tokens do not join to its result, bytes without a token where there are merges. */
Tokenizer *tokenizer_open(const char *path, Error *error);
/* Makes one of its parts: at least one token, end_of_text among them. Table and merges were allocated with malloc and
 * belong to it from then on, also where it fails; name opens the sentences of errors: a table of another size, merges as
 * above. */
Tokenizer *tokenizer_make(const char *name, TokenizerParts parts, Error *error);
void tokenizer_close(Tokenizer *tokenizer);

/* Writes a tokenizer.bin, which must not exist, and fsyncs it. Returns 0 or -1. */
int tokenizer_write(const Tokenizer *tokenizer, const char *path, Error *error);

int64_t tokenizer_vocab(const Tokenizer *tokenizer);
int32_t tokenizer_end_of_text(const Tokenizer *tokenizer);
const TokenizerParts *tokenizer_parts(const Tokenizer *tokenizer);

/* The bytes of a token (not 0-terminated), *length of them; "" for a token outside the table. */
const char *tokenizer_decode(const Tokenizer *tokenizer, int32_t token, size_t *length);

/* Tokens of `text` to out (at most `capacity`); *count gets how many the text has, which may exceed capacity and is at most
 * length. Any bytes are text: what is no UTF-8 has tokens too, and text that spells the end-of-text token is text. Works for
 * tokenizers in which every token but end-of-text is a single byte and for those with GPT-2's rule; for others it fails and
 * says what is lacking. Any number of threads may share a tokenizer. Returns 0 or -1. */
int tokenizer_encode(const Tokenizer *tokenizer, const char *text, size_t length, int32_t *out, size_t capacity,
                     size_t *count, Error *error);

#ifdef __cplusplus
}
#endif
#endif
