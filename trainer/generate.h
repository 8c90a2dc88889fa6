/* generate.h - `train_gpt generate`: text from a model, as it is written. */
#ifndef GENERATE_H
#define GENERATE_H

#include "data/error.h"

#ifdef __cplusplus
extern "C" {
#endif

/* argv[0] is "generate", what follows are its options (generate --help). Prints text, or tokens, to stdout and its speed to
 * stderr. Returns the exit status: 0; 1 or 2 with a sentence; 130 where a signal ended it. */
int generate_run(int argc, char **argv, Error *error);

#ifdef __cplusplus
}
#endif
#endif
