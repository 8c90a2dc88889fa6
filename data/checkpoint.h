/* checkpoint.h - a model on disk: a directory that Hugging Face's GPT2LMHeadModel.from_pretrained opens as it is.
 *
 *     DIR/step_00000100/  config.json  model.safetensors          Hugging Face's names and layout, fp32
 *                         optimizer.safetensors                    moments, as m.NAME and v.NAME in the same layout
 *                         state.json                               step, data position, random state, ...
 *                         tokenizer.bin                            where the run has a tokenizer
 *                         vocab.json  merges.txt  tokenizer_config.json     where transformers has one like it
 *
 * A checkpoint is written under a temporary name in DIR, every file and the directory fsynced, then renamed: whatever
 * instant the process dies at, the directories called step_* are complete. Removal renames first, too.
 */
#ifndef CHECKPOINT_H
#define CHECKPOINT_H

#include <stddef.h>
#include <stdint.h>

#include "data/error.h"
#include "data/tokenizer.h"
#include "layers/gpt.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What continues a run beside parameters and moments. */
typedef struct CheckpointState {
    int64_t step;          /* updates done */
    int64_t data_position; /* loader_position at that moment */
    uint64_t seed;         /* of the run */
    uint64_t data_fingerprint; /* shards_fingerprint of the training data, 0 where there was none */
    double validation_loss; /* last one measured, NaN where none */
    double seconds;        /* of training, all sessions together */
} CheckpointState;

/* Writes DIR/step_NNNNNNNN for state->step (if it exists already and is complete, it is left alone and 0 is returned; a
 * damaged one is replaced). gpt must have been made for training. tokenizer: the one to put beside it, whose end-of-text
 * token config.json names, or NULL: then end_of_text is named, or none where it is -1. path (of path_size bytes) gets the
 * checkpoint's path. On an error (disk full, ...) nothing under a final name has changed and the temporary is removed.
 * Returns 0 or -1. */
int checkpoint_save(const char *dir, const Gpt *gpt, const CheckpointState *state, const Tokenizer *tokenizer,
                    int32_t end_of_text, char *path, size_t path_size, Error *error);

/* Path of the complete checkpoint with the highest step in dir; 1 where there is one, 0 where there is none, -1 on an error:
 * also where checkpoints are there and every one is damaged. Where newer ones were damaged and passed over, error->text says
 * which and why, else it is empty. A dir that does not exist has none. */
int checkpoint_newest(const char *dir, char *path, size_t path_size, Error *error);

/* Removes what is older than the `keep` newest complete checkpoints, and temporaries that a killed process left. keep 0
 * keeps all. */
int checkpoint_prune(const char *dir, int64_t keep, Error *error);

/* Fills parameters, moments and state: all that --resume needs (model.h reads parameters alone). After an error gpt and
 * state are what they were. */
int checkpoint_load(const char *path, Gpt *gpt, CheckpointState *state, Error *error);

#ifdef __cplusplus
}
#endif
#endif
