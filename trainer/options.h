/* options.h - the command line: one table that parses, prints --help and is written to and read from config.json. */
#ifndef OPTIONS_H
#define OPTIONS_H

#include <stdint.h>

#include "data/error.h"
#include "layers/gpt.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum Schedule { SCHEDULE_COSINE, SCHEDULE_LINEAR, SCHEDULE_CONSTANT, SCHEDULE_WSD } Schedule;

enum { OPTIONS_MOST = 64 };

/* A field for every option, under its long name. Strings are never NULL; "" means not given. */
typedef struct Options {
    const char *data, *train, *val;
    const char *model;
    int64_t layers, heads, dim, context, vocab; /* 0 until options_resolve_model */
    const char *init;
    const char *out;
    int64_t resume;
    int64_t batch, seq, batch_tokens; /* batch_tokens 0 until options_resolve_batch */
    int64_t steps, stop;
    double lr;
    int64_t warmup;
    int64_t schedule;
    double lr_final; /* negative until options_resolve_batch */
    double weight_decay, beta1, beta2, eps, clip;
    int64_t eval_every, eval_tokens;
    const char *hellaswag;
    int64_t hellaswag_every;
    int64_t sample_every, sample_tokens;
    const char *prompt;
    double temperature;
    int64_t top_k;
    double top_p;
    int64_t save_every, keep, print_every;
    const char *device;
    int64_t dtype;
    const char *attention;
    int64_t recompute, deterministic, tf32, no_graph;
    int64_t seed;
    int64_t list_attention, help;

    char *owned[2 * OPTIONS_MOST]; /* strings that are neither literals nor in argv: options_free frees them */
    int owned_count;
} Options;

/* What a command line gave, by index in the table: an option that was given beats one from config.json. */
typedef struct OptionsGiven {
    unsigned char given[OPTIONS_MOST];
} OptionsGiven;

/* Defaults, then the arguments. Returns 0, or -1 with a sentence: unknown option (with the nearest known one), a value that is
 * missing, malformed or out of range, an argument that belongs to no option. Strings point into argv. */
int options_parse(Options *options, OptionsGiven *given, int argc, char **argv, Error *error);

/* Was this option ("batch-tokens") on the command line? */
int options_given(const OptionsGiven *given, const char *name);

/* Fills what a model name and a vocabulary imply into layers, heads, dim, context, vocab; vocab_found is the tokenizer's
 * vocabulary or 0. Where `shape` is not NULL (a checkpoint's), it decides, and an option that was given and differs is an error
 * with both values. Checks the result and seq against the context. Returns 0 or -1. */
int options_resolve_model(Options *options, const OptionsGiven *given, const GptConfig *shape, const char *shape_source,
                          int64_t vocab_found, Error *error);

/* Fills batch_tokens and lr_final where they were not given; checks batch-tokens and warmup against the rest. One that was
 * given and has no effect without another that is missing (prompt without sample-every) is an error. */
int options_resolve_batch(Options *options, const OptionsGiven *given, Error *error);

/* Takes every option that was not given from a run's config.json, which must have it, but for those of a later version. One
 * that was given, differs, and may not change within a run (shape, seq, batch-tokens, seed, ...) is an error with both
 * values; so is a path that was not given and where there is nothing now. */
int options_from_config(Options *options, const OptionsGiven *given, const char *path, Error *error);

/* Frees the strings that options_from_config, options_make_absolute and options_own made. */
void options_free(Options *options);
/* A copy of text that lives as long as the options; NULL where memory is short. */
const char *options_own(Options *options, const char *text);

/* Makes every path among the options absolute, for config.json: a run may be resumed from another directory; but for those
 * that would not be UTF-8 then. Returns 0 or -1. */
int options_make_absolute(Options *options, Error *error);

/* Writes all options as a JSON object to path, atomically: a temporary file, fsync, rename. */
int options_write_config(const Options *options, const char *path, Error *error);

/* --help: every option, what it takes, its default. */
void options_help(void);

/* The learning rate of update t, counted from 1. Formulas in options.c. */
double options_learning_rate(const Options *options, int64_t t);

#ifdef __cplusplus
}
#endif
#endif
