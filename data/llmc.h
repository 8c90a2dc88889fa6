/* llmc.h - models in llm.c's format: one file.
 *
 *     header of 256 int32, little-endian: 0 magic 20240326   1 version: 3 fp32, 5 bf16   2 context   3 vocabulary V
 *                                         4 layers L   5 heads   6 channels C   7 padded vocabulary Vp
 *     then, fp32 or bf16, each of the L layers after the other:
 *         wte (Vp,C)  wpe (context,C)  ln1 weight (L,C)  bias (L,C)  qkv weight (L,3C,C)  bias (L,3C)
 *         projection weight (L,C,C)  bias (L,C)  ln2 weight (L,C)  bias (L,C)  fc weight (L,4C,C)  bias (L,4C)
 *         fc projection weight (L,C,4C)  bias (L,C)  final norm weight (C)  bias (C)
 *
 * Weights are outputs by inputs, as in memory here. Rows of wte from V on are padding, zero where this program writes them.
 * Source: karpathy/llm.c, train_gpt2.py.
 */
#ifndef LLMC_H
#define LLMC_H

#include "data/error.h"
#include "layers/gpt.h"

#ifdef __cplusplus
extern "C" {
#endif

/* 1 where the file begins with the magic, else 0. */
int llmc_recognize(const char *path);

/* Reads the shape. Errors: no such file, another magic or version, sizes that make no model, a file of another size. */
int llmc_inspect(const char *path, GptConfig *config, Error *error);

/* Fills the parameters, after checking all of the file. Errors: those above, another shape, values that are not finite; the
 * model is then what it was. Returns 0 or -1. */
int llmc_load(const char *path, Gpt *gpt, Error *error);

/* Writes the parameters to a file that must not exist, and fsyncs it; bf16: as version 5, rounded to the nearest even, else
 * as version 3. Vp is V up to a multiple of 128. Errors: the disk; a value that rounds to no finite one. The file is removed
 * where it fails. Returns 0 or -1. */
int llmc_write(const char *path, const Gpt *gpt, int bf16, Error *error);

#ifdef __cplusplus
}
#endif
#endif
