/* export.h - `train_gpt export`: a model from one format to another. */
#ifndef EXPORT_H
#define EXPORT_H

#include "data/error.h"

#ifdef __cplusplus
extern "C" {
#endif

/* argv[0] is "export", what follows are its options: --to FORMAT FROM OUT. FROM is what --init takes, or a run's directory:
 * then its newest checkpoint. Returns the exit status: 0; 2 with a sentence for a wrong option; 1 with one for what cannot
 * be read or written. */
int export_run(int argc, char **argv, Error *error);

#ifdef __cplusplus
}
#endif
#endif
