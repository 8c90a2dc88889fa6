/* inference.h - a model that is read and not trained: found by its path, then put on a device. For generate and evaluate;
 * the trainer opens its device here too. */
#ifndef INFERENCE_H
#define INFERENCE_H

#include "data/error.h"
#include "data/files.h"
#include "data/model.h"
#include "data/tokenizer.h"
#include "layers/gpt.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct Inference {
    char path[FILES_PATH]; /* of the model: of a run, its newest checkpoint */
    ModelInfo info;
    Tokenizer *tokenizer;  /* NULL where there is none */
    const Backend *backend;
    Stream *stream;
    const AttentionKernel *attention;
    Gpt *gpt;
} Inference;

/* What options say of where to compute: as the trainer's of the same names. */
typedef struct DeviceChoice {
    const char *device, *attention;
    int64_t dtype, tf32, deterministic;
} DeviceChoice;

/* Opens the backend that "auto", "cpu", "cuda" or "cuda:N" means: auto takes the CPU where no GPU can be opened. Returns 0,
 * or the exit status with a sentence. */
int device_open(const DeviceChoice *choice, const Backend **backend, Stream **stream, Error *error);

/* Writes to path, of `size` bytes, where the model lies that `init` means: in a run's newest complete checkpoint, at init
 * itself where that is no run. Where newer checkpoints are damaged and passed over, standard error says so. Fails where all
 * are, and on a path that is too long. Returns 0 or the exit status with a sentence. */
int inference_path(const char *init, char *path, size_t size, Error *error);

/* Fills path, info and tokenizer, the rest with zeros. `init` is what --init takes, or a run's directory; `tokenizer` a
 * tokenizer.bin or a directory with a tokenizer, "" for the one beside the model. A tokenizer of more tokens than the model
 * has is an error, and so is one that was named and has fewer by more than padding: most of what the model writes would have
 * no text. Returns 0 or the exit status; close it in either case. */
int inference_find(Inference *inference, const char *init, const char *tokenizer, Error *error);

/* Opens device and attention kernel for a found model, for batches of options.batch x options.sequence tokens. Returns 0 or
 * the exit status. */
int inference_place(Inference *inference, const DeviceChoice *choice, const GptOptions *options, Error *error);

/* Makes the model there and fills it. Returns 0 or the exit status. */
int inference_load(Inference *inference, const GptOptions *options, Error *error);

/* A model knows the tokens that it was trained with: fails, with a sentence, where those of the data (directory) are others.
 * The tokenizer beside the model (own) says so, or, where there is none (NULL), a vocabulary that is larger by more than
 * padding; `remedy` then ends the sentence with what would let it pass, NULL: it passes. Returns 0 or -1. */
int tokenizer_check(const Tokenizer *data, const char *directory, const Tokenizer *own, const char *model, int64_t vocab,
                    const char *remedy, Error *error);

/* Holds the tokenizer.bin of a data directory, where there is one, against a found model. Returns 0 or -1. */
int inference_check_data(const Inference *inference, const char *directory, Error *error);

void inference_close(Inference *inference);

#ifdef __cplusplus
}
#endif
#endif
