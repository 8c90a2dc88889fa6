/* start.h - where a run starts: from random weights, from a model (--init), or from its own newest checkpoint (--resume). */
#ifndef START_H
#define START_H

#include "data/error.h"
#include "data/files.h"
#include "data/model.h"
#include "data/tokenizer.h"
#include "trainer/options.h"
#include "trainer/run.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct Start {
    char path[FILES_PATH]; /* of the checkpoint or model; "" for random weights */
    int resumed;           /* it is a checkpoint of this run, with optimizer and state */
    ModelInfo info;        /* of it; for random weights a shape of zeros and no end-of-text token, -1 */
    Tokenizer *tokenizer;  /* the data's, else the one beside the model; NULL where neither has one */
} Start;

/* Finds it, before anything is written. With --resume it opens and locks the run (run_open), and takes from its config.json
 * every option that was not given; says where damaged checkpoints are passed over, or none is complete: the run then starts
 * as it did. Else it makes --init's path absolute, as a run that is resumed may be resumed elsewhere. Errors: --resume and
 * --init together; no such run or model, or a faulty one; an option that may not change within a run; a tokenizer of the
 * data that is not the model's (see tokenizer_check). Returns 0, or the exit status with a sentence; close it in either
 * case. */
int start_find(Start *start, Options *options, const OptionsGiven *given, Run *run, Error *error);

/* Closes the tokenizer. One of zeros is closed. */
void start_close(Start *start);

#ifdef __cplusplus
}
#endif
#endif
