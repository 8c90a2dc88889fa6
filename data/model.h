/* model.h - anyone's GPT-2 on disk, by its path:
 *
 *     DIR                                     Hugging Face's, and our checkpoints: config.json, and model.safetensors or
 *                                             model.safetensors.index.json with the files that it names
 *     NAME.safetensors, NAME.index.json       the same, config.json beside it
 *     any file that begins with llm.c's magic llm.c's (see llmc.h)
 */
#ifndef MODEL_H
#define MODEL_H

#include <stdint.h>

#include "data/error.h"
#include "data/tokenizer.h"
#include "layers/gpt.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ModelInfo {
    GptConfig config;
    int32_t end_of_text; /* -1 where it is not known */
} ModelInfo;

/* Reads shape and end-of-text token. A config.json must say model_type gpt2 with activation gelu_new (or
 * gelu_pytorch_tanh), layer_norm_epsilon 1e-5, n_inner null or 4*n_embd, attention scaled as GPT-2's, a tied head; what
 * differs is an error, and so is what no path of the list above is. */
int model_inspect(const char *path, ModelInfo *info, Error *error);

/* Fills the parameters of gpt (see weights_open and llmc_load); after an error the model is what it was. */
int model_load(const char *path, Gpt *gpt, Error *error);

/* The tokenizer that lies beside the model, in its directory; NULL with error->text "" where there is none that can be read
 * here, NULL with a sentence where it is faulty. error is not NULL. */
Tokenizer *model_tokenizer(const char *path, Error *error);

/* Fills a directory with what transformers opens: config.json, model.safetensors (dtype "F32" or "BF16") and, where
 * tokenizer is not NULL, tokenizer.bin and the files of vocabulary.h. None of them may exist; each is fsynced. */
int model_write(const char *dir, const Gpt *gpt, const Tokenizer *tokenizer, int32_t end_of_text, const char *dtype,
                Error *error);

typedef enum ModelFormat { MODEL_LLMC, MODEL_HF, MODEL_BF16, MODEL_LLMC_BF16, MODEL_FORMATS } ModelFormat;

/* Writes the parameters to OUT, which must not exist: a file of llm.c (fp32 or bf16) or a directory as model_write's (F32 or
 * BF16). OUT appears when it is complete and on the disk, or not at all. Returns 0 or -1. */
int model_export(const char *out, ModelFormat format, const Gpt *gpt, const Tokenizer *tokenizer, int32_t end_of_text,
                 Error *error);

#ifdef __cplusplus
}
#endif
#endif
