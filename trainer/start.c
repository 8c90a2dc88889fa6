#include "trainer/start.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "data/checkpoint.h"
#include "trainer/inference.h"
#include "trainer/process.h"

/* Returns 0 or the exit status. */
static int take_path(Start *start, const char *path, Error *error)
{
    if (snprintf(start->path, sizeof start->path, "%s", path) < (int)sizeof start->path) return 0;
    error_set(error, "%.200s...: the path is longer than %zu bytes", path, sizeof start->path - 1);
    return STATUS_OPTION;
}

/* The run's newest checkpoint, with the run's options; without one, what it started from. Returns 0 or the exit status. */
static int find_own(Start *start, Options *o, const OptionsGiven *given, Run *run, Error *error)
{
    char path[FILES_PATH];
    if (options_given(given, "init")) {
        error_set(error, "--resume and --init exclude each other: a resumed run starts from its own checkpoint");
        return STATUS_OPTION;
    }
    if (run_open(run, o->out, 1, error)) return STATUS_OPTION;
    if (run_path(run, "config.json", path, sizeof path, error)) return STATUS_OPTION;
    *error->text = 0;
    int found = checkpoint_newest(o->out, start->path, sizeof start->path, error);
    if (found < 0) return STATUS_MACHINE;
    if (*error->text) printf("resume   %s\n", error->text); /* damaged checkpoints that were passed over */
    if ((found || !access(path, F_OK)) && options_from_config(o, given, path, error)) return STATUS_OPTION;
    start->resumed = found;
    if (found) return 0;
    if (strcmp(o->init, "random") && access(o->init, F_OK)) {
        error_set(error, "%.400s: \"init\" is %.400s, which does not exist, and the run has no complete checkpoint: start anew, "
                  "with --init PATH and another --out", path, o->init);
        return STATUS_OPTION;
    }
    printf("resume   %s holds no complete checkpoint: starting at step 0\n", o->out);
    return take_path(start, strcmp(o->init, "random") ? o->init : "", error);
}

/* The model that --init names, whose path becomes absolute. Returns 0 or the exit status. */
static int find_model(Start *start, Options *o, Error *error)
{
    if (access(o->init, R_OK)) {
        error_set(error, "--init: %s: %s", o->init, strerror(errno));
        return STATUS_MACHINE;
    }
    char path[FILES_PATH], absolute[FILES_PATH];
    int status = inference_path(o->init, path, sizeof path, error);
    if (status) return status;
    if (files_absolute(absolute, path, error)) return STATUS_OPTION;
    o->init = options_own(o, absolute);
    if (!o->init) {
        error_set(error, "not enough memory");
        return STATUS_MACHINE;
    }
    return take_path(start, o->init, error);
}

/* Opens the tokenizer, and holds the data's against the model that the run starts from. Returns 0 or the exit status. */
static int find_tokenizer(Start *start, const Options *o, const OptionsGiven *given, Error *error)
{
    char path[FILES_PATH + 16], remedy[64];
    Tokenizer *own = NULL;
    snprintf(path, sizeof path, "%s/tokenizer.bin", o->data);
    if (*o->data && !access(path, F_OK) && !(start->tokenizer = tokenizer_open(path, error))) return STATUS_MACHINE;
    *error->text = 0;
    if (*start->path && !(own = model_tokenizer(start->path, error)) && *error->text) return STATUS_MACHINE;
    if (!start->tokenizer) {
        start->tokenizer = own;
        return 0;
    }
    int64_t vocab = start->info.config.vocab;
    snprintf(remedy, sizeof remedy, "--vocab %lld says that they do", (long long)vocab);
    int differs = *start->path && !start->resumed &&
                  tokenizer_check(start->tokenizer, o->data, own, start->path, vocab,
                                  options_given(given, "vocab") ? NULL : remedy, error);
    tokenizer_close(own);
    return differs ? STATUS_OPTION : 0;
}

int start_find(Start *start, Options *options, const OptionsGiven *given, Run *run, Error *error)
{
    memset(start, 0, sizeof *start);
    start->info.end_of_text = -1;
    int status = options->resume ? find_own(start, options, given, run, error)
                 : strcmp(options->init, "random") ? find_model(start, options, error) : 0;
    if (status) return status;
    if (*start->path && model_inspect(start->path, &start->info, error)) {
        Error inner = *error;
        error_set(error, "%s cannot be read as a model: %.900s", start->path, inner.text);
        return STATUS_MACHINE;
    }
    return find_tokenizer(start, options, given, error);
}

void start_close(Start *start)
{
    tokenizer_close(start->tokenizer);
    memset(start, 0, sizeof *start);
}
