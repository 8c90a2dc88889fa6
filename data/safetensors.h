/* safetensors.h - named tensors in a file: 8 bytes little-endian header length, a JSON header, raw data.
 *
 * The reader trusts nothing: the header must fit in the file and in 100 MB, dtypes, shapes and offsets must agree with
 * each other without overflow, tensors must cover the data without gap or overlap, names must be unique. The file is
 * memory-mapped; tensor data points into the mapping and may be unaligned.
 * The writer streams: declare all tensors, then hand over their bytes in that order; nothing is held in memory.
 * Source: the format's README, huggingface/safetensors.
 */
#ifndef SAFETENSORS_H
#define SAFETENSORS_H

#include <stddef.h>
#include <stdint.h>

#include "data/error.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { SAFETENSORS_RANK = 8 };

typedef struct SafetensorsTensor {
    const char *name;
    const char *dtype; /* "F32", "BF16", "F16", "I64", ... as in the file */
    int rank;
    int64_t shape[SAFETENSORS_RANK];
    const uint8_t *data; /* reading: in the mapping. writing: not used */
    size_t bytes;
} SafetensorsTensor;

typedef struct Safetensors Safetensors;

Safetensors *safetensors_open(const char *path, Error *error);
void safetensors_close(Safetensors *file);
size_t safetensors_count(const Safetensors *file);
const SafetensorsTensor *safetensors_at(const Safetensors *file, size_t i);
const SafetensorsTensor *safetensors_find(const Safetensors *file, const char *name); /* NULL: not there */
const char *safetensors_metadata(const Safetensors *file, const char *key);          /* NULL: not there */
/* Elements [first, first+n) of an F32, F16 or BF16 tensor as fp32, exactly. Returns 0, or -1 for another dtype. */
int safetensors_to_fp32(float *out, const SafetensorsTensor *tensor, int64_t first, int64_t n, Error *error);
/* Drops the tensor's pages from the process's resident memory; they are read again where they are touched again. */
void safetensors_release(const SafetensorsTensor *tensor);

typedef struct SafetensorsWriter SafetensorsWriter;

/* Creates `path` (which must not exist) and writes the header for `count` tensors. metadata: NULL-terminated list of key,
 * value, key, value, ... or NULL. */
SafetensorsWriter *safetensors_create(const char *path, const SafetensorsTensor *tensors, size_t count,
                                      const char *const *metadata, Error *error);
/* Appends bytes of the tensors' data, in declared order, in pieces of any size. */
int safetensors_write(SafetensorsWriter *writer, const void *data, size_t bytes, Error *error);
/* Checks that all declared bytes came, flushes, fsyncs, closes and frees the writer, also where it fails. */
int safetensors_finish(SafetensorsWriter *writer, Error *error);
/* Closes, removes the file and frees the writer. */
void safetensors_abandon(SafetensorsWriter *writer);

#ifdef __cplusplus
}
#endif
#endif
