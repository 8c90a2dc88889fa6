/* inspect.h - `train_gpt inspect`: what a shard holds, and what is wrong with it. */
#ifndef INSPECT_H
#define INSPECT_H

#include "data/error.h"

#ifdef __cplusplus
extern "C" {
#endif

/* argv[0] is "inspect", what follows are its options and paths: shards, globs of them, or directories as --data takes.
 * Prints for each shard its form, counts, the histogram of its tokens, windows of it as text, and its faults. Returns the
 * exit status: 0; 2 with a sentence for a wrong option; 1 with one that says how many shards are faulty, or what cannot be
 * read. */
int inspect_run(int argc, char **argv, Error *error);

#ifdef __cplusplus
}
#endif
#endif
