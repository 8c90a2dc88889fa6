/* weights.h - the tensors of a model in safetensors files, as Hugging Face's GPT-2 lays them out.
 *
 * Its linear weights are those of Conv1D, inputs by outputs: the transpose of what a product x W^T wants. Both ways the
 * transpose passes through a slab of some megabytes, so memory does not grow with the model; a weight larger than the slab
 * is read once for each slab it fills. The head is tied and the vocabulary unpadded.
 */
#ifndef WEIGHTS_H
#define WEIGHTS_H

#include "data/error.h"
#include "layers/gpt.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What a file of tensors holds: one tensor of each name of the model for each of `count` buffers, names with a prefix. */
typedef struct WeightsGroups {
    size_t count;
    GptBuffer buffers[2];
    const char *prefixes[2];
} WeightsGroups;

extern const WeightsGroups weights_parameters; /* GPT_PARAMETERS, no prefix */
extern const WeightsGroups weights_moments;    /* GPT_MOMENT1 as m.NAME, GPT_MOMENT2 as v.NAME */

typedef struct Weights Weights;

/* Opens a .safetensors file, or the index of several (NAME.safetensors.index.json, the files beside it), and checks all of
 * it against the model; nothing of the model is changed. Names with or without "transformer.", dtypes F32, F16 or BF16; the
 * causal masks that old files carry are passed over, and so is a head that equals wte. Errors: missing, surplus, misshaped
 * or non-finite tensors, a negative second moment, tensors in two files, an index that disagrees with its files. */
Weights *weights_open(const char *path, const Gpt *gpt, const WeightsGroups *groups, Error *error);
/* Fills the model's buffers; cannot fail. */
void weights_read(const Weights *weights, Gpt *gpt);
void weights_close(Weights *weights);

/* Writes a .safetensors file, which must not exist, and fsyncs it. dtype: "F32", or "BF16", rounded to the nearest even.
 * Errors: the disk; a value that rounds to no finite one. Returns 0 or -1; on an error the file is removed. */
int weights_write(const char *path, const Gpt *gpt, const WeightsGroups *groups, const char *dtype, Error *error);

#ifdef __cplusplus
}
#endif
#endif
