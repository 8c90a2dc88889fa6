/* evaluate.h - how good a model is: its loss on validation shards, its choices among endings. For the trainer, and as the
 * command `train_gpt evaluate`. */
#ifndef EVALUATE_H
#define EVALUATE_H

#include <stdint.h>

#include "data/error.h"
#include "data/hellaswag.h"
#include "data/shards.h"
#include "layers/gpt.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ValidationLoss {
    double sum;     /* of the losses, nats */
    int64_t tokens; /* that were predicted */
} ValidationLoss;

/* The loss of windows of T tokens, B at a time, both at most those of the model: of `windows` windows spread evenly over the
 * set, whatever B; or, where that is 0, of everything: then the windows of each shard and what it has left behind them, so
 * that every token but each shard's first is predicted once. Ends early once process_stop is set, or behind a batch whose
 * loss is not finite, which makes sum so. Returns 0, or -1 with a sentence. */
int evaluate_shards(Gpt *gpt, const ShardSet *set, int64_t B, int64_t T, int64_t windows, ValidationLoss *loss,
                    Error *error);

typedef struct HellaSwagScore {
    int64_t examples; /* that were looked at: all, or up to a signal */
    int64_t by_mean;  /* of which the right ending has the lowest loss a token: the length-normalised accuracy */
    int64_t by_sum;   /* of which it has the lowest loss in all */
} HellaSwagScore;

/* Which ending of each example the model finds likeliest; of equals, the first. B rows at a time. Ends early once
 * process_stop is set. Returns 0, or -1 with a sentence: memory, or a loss that is not finite. */
int evaluate_hellaswag(Gpt *gpt, const HellaSwag *set, int64_t B, HellaSwagScore *score, Error *error);

/* argv[0] is "evaluate", what follows are its options (evaluate --help). Returns the exit status: 0; 1 or 2 with a sentence;
 * 130 where a signal ended it. */
int evaluate_run(int argc, char **argv, Error *error);

#ifdef __cplusplus
}
#endif
#endif
