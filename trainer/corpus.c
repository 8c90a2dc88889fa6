#include "trainer/corpus.h"

#include <math.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "data/files.h"
#include "data/json.h"
#include "trainer/process.h"

/* Opens one set of shards, that of the glob or, where it is "", that of the data directory. Returns 0 or the exit status. */
static int open_shards(ShardSet *set, const char *pattern, const char *name, const Options *o, Report *report, Error *error)
{
    enum { CHECK_MOST = 500000000 };
    char path[2 * FILES_PATH];
    if (!*pattern) {
        if (shards_find(o->data, name, path, sizeof path, error)) return STATUS_MACHINE;
        pattern = path;
    }
    if (shards_open(set, pattern, error)) return STATUS_MACHINE;
    if (set->tokens <= CHECK_MOST && shards_check_tokens(set, o->vocab, error)) return STATUS_MACHINE;
    int64_t windows = shards_windows(set, o->seq);
    if (!windows) {
        error_set(error, "%s: no shard is long enough for a window of --seq %lld tokens and one to predict; the set has "
                  "%lld tokens", pattern, (long long)o->seq, (long long)set->tokens);
        return STATUS_MACHINE;
    }
    report_say(report, "data", "%-5s %lld tokens in %zu shard%s, %lld windows of %lld", name, (long long)set->tokens,
               set->count, set->count == 1 ? "" : "s", (long long)windows, (long long)o->seq);
    return 0;
}

/* The corpus's entropy rate, where data/prepare.py knew it. */
static double find_entropy(const char *data)
{
    char path[FILES_PATH + 16];
    snprintf(path, sizeof path, "%s/corpus.json", data);
    JsonDocument *document = *data && !access(path, R_OK) ? json_read(path, NULL) : NULL;
    const JsonValue *value = document ? json_member(json_root(document), "entropy_rate") : NULL;
    double rate = value && value->kind == JSON_NUMBER ? value->number : (double)NAN;
    if (document) json_free(document);
    return rate;
}

int corpus_open(Corpus *corpus, const Options *options, Report *report, Error *error)
{
    const Options *o = options;
    memset(corpus, 0, sizeof *corpus);
    corpus->entropy_rate = (double)NAN;
    if (!*o->data && !*o->train) {
        if (!o->steps) return 0; /* only the initial checkpoint is wanted */
        error_set(error, "nothing to train on: give --data DIR or --train GLOB (data/prepare.py makes shards from text)");
        return STATUS_OPTION;
    }
    if (o->eval_every && !*o->data && !*o->val) {
        error_set(error, "no validation data: give --val GLOB, or turn evaluation off with --eval-every 0");
        return STATUS_OPTION;
    }
    int status = open_shards(&corpus->train, o->train, "train", o, report, error);
    if (status) return status;
    if (o->eval_every) {
        status = open_shards(&corpus->val, o->val, "val", o, report, error);
        if (status) return status;
        int64_t wanted = (o->eval_tokens + o->seq - 1) / o->seq;
        int64_t there = shards_windows(&corpus->val, o->seq);
        corpus->eval_windows = wanted < there ? wanted : there;
    }
    if (*o->hellaswag && hellaswag_open(&corpus->questions, o->hellaswag, o->vocab, o->seq, error)) return STATUS_MACHINE;
    corpus->fingerprint = shards_fingerprint(&corpus->train);
    corpus->entropy_rate = find_entropy(o->data);
    report_floor(report, corpus->entropy_rate);
    return 0;
}

void corpus_close(Corpus *corpus)
{
    shards_close(&corpus->train);
    shards_close(&corpus->val);
    hellaswag_close(&corpus->questions);
}
