/* vocabulary.h - tokenizers in Hugging Face's files, as they lie beside a model.
 *
 *     vocab.json  merges.txt        GPT-2's: tokens by number, and pairs of tokens in the order of their ranks; bytes are
 *     (encoder.json  vocab.bpe)     written as visible characters (under the names that OpenAI gave them)
 *     tokenizer.json                of many kinds; read here where it is byte-level BPE
 *     tokenizer_config.json         for transformers: the class, and which token ends a text
 */
#ifndef VOCABULARY_H
#define VOCABULARY_H

#include "data/error.h"
#include "data/tokenizer.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Opens the tokenizer that lies in a directory: tokenizer.bin, else tokenizer.json, else one of the two pairs. NULL with
 * error->text "" where there is none, or a tokenizer.json of another kind; NULL with a sentence where one is faulty. It
 * encodes text where it cuts and merges as GPT-2 does (see bpe.h). error is not NULL. */
Tokenizer *vocabulary_open(const char *dir, Error *error);

/* Writes vocab.json, merges.txt and tokenizer_config.json, none of which may exist, for transformers' GPT2Tokenizer;
 * context: the model's. Returns 0, 1 where GPT2Tokenizer cannot stand for this tokenizer and nothing was written (it cuts
 * text in another way, or two tokens have the same bytes), or -1. */
int vocabulary_write(const char *dir, const Tokenizer *tokenizer, int64_t context, Error *error);

#ifdef __cplusplus
}
#endif
#endif
