/* corpus.h - what a run trains and is judged on: its shards, its questions, and what is known of the text behind them. */
#ifndef CORPUS_H
#define CORPUS_H

#include <stdint.h>

#include "data/error.h"
#include "data/hellaswag.h"
#include "data/shards.h"
#include "trainer/options.h"
#include "trainer/report.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct Corpus {
    ShardSet train;       /* none: only the initial checkpoint is wanted */
    ShardSet val;         /* none: nothing is evaluated */
    HellaSwag questions;  /* none: no examples */
    int64_t eval_windows; /* of an evaluation */
    uint64_t fingerprint; /* of the training shards, 0 where there are none */
    double entropy_rate;  /* of the text, nats a token: the lowest loss there is; NaN where it is not known */
} Corpus;

/* Opens what the options name, all of them resolved: the shards of --train and --val, else those of --data's directory, and
 * --hellaswag's file. Says of each set of shards, also in the report, how many tokens it has, and gives the report the
 * entropy rate. Errors: neither --data nor --train, though there are updates to make; no shards to evaluate on; a shard or a
 * file that is missing or faulty; a token >= vocab; no shard long enough for a window. Small sets are read through once, so
 * that a bad token is found now; of large ones every batch is checked as it is read. Returns 0, or the exit status with a
 * sentence; close the corpus in either case. */
int corpus_open(Corpus *corpus, const Options *options, Report *report, Error *error);

/* Closes what is open. One of zeros is closed. */
void corpus_close(Corpus *corpus);

#ifdef __cplusplus
}
#endif
#endif
