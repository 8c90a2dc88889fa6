/* checkpoint.h - a model on disk: a directory that Hugging Face's GPT2LMHeadModel.from_pretrained opens as it is.
 *
 *     DIR/step_00000100/  config.json  model.safetensors          Hugging Face's names and layout, fp32
 *                         optimizer.safetensors                    moments, as m.NAME and v.NAME in the same layout
 *                         state.json                               step, data position, random state, ...
 *                         tokenizer.bin                            a copy, where the run has one
 *
 * A checkpoint is written under a temporary name in DIR, every file and the directory fsynced, then renamed: whatever
 * instant the process dies at, the directories called step_* are complete. Removal renames first, too.
 */
#ifndef CHECKPOINT_H
#define CHECKPOINT_H

#include <stddef.h>
#include <stdint.h>

#include "data/error.h"
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
 * damaged one is replaced). gpt must have been made for training. end_of_text: token for config.json's bos and eos, or -1.
 * tokenizer: path of the file to copy beside it, or NULL. path (of path_size bytes) gets the checkpoint's path. On an error
 * (disk full, ...) nothing under a final name has changed and the temporary is removed. Returns 0 or -1. */
int checkpoint_save(const char *dir, const Gpt *gpt, const CheckpointState *state, int32_t end_of_text,
                    const char *tokenizer, char *path, size_t path_size, Error *error);

/* Path of the complete checkpoint with the highest step in dir; 1 where there is one, 0 where there is none, -1 on an error:
 * also where checkpoints are there and every one is damaged. Where newer ones were damaged and passed over, error->text says
 * which and why, else it is empty. A dir that does not exist has none. */
int checkpoint_newest(const char *dir, char *path, size_t path_size, Error *error);

/* Removes what is older than the `keep` newest complete checkpoints, and temporaries that a killed process left. keep 0
 * keeps all. */
int checkpoint_prune(const char *dir, int64_t keep, Error *error);

/* Reads the shape from PATH/config.json, which must say model_type gpt2 with activation gelu_new (or gelu_pytorch_tanh),
 * layer_norm_epsilon 1e-5, n_inner null or 4*n_embd, attention scaled as GPT-2's; what differs is an error. */
int checkpoint_config(const char *path, GptConfig *config, Error *error);

/* Fills the parameters of gpt from a directory of this layout or from a .safetensors file; names with or without
 * "transformer.", F32, F16 or BF16. Errors: missing, surplus, misshaped or non-finite tensors. */
int checkpoint_load_parameters(const char *path, Gpt *gpt, Error *error);
/* Fills parameters, moments and state: all that --resume needs. After an error gpt and state are what they were. */
int checkpoint_load_optimizer(const char *path, Gpt *gpt, CheckpointState *state, Error *error);

#ifdef __cplusplus
}
#endif
#endif
