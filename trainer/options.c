/* options.c - the table of options and everything that is derived from it. To add one: a field in Options, a row here, which
 * runs of before MAY_LACK. */
#include "trainer/options.h"

#include <ctype.h>
#include <errno.h>
#include <glob.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "data/files.h"
#include "data/json.h"
#include "data/unicode.h"
#include "trainer/table.h"

#define FIELD(name) offsetof(Options, name)

static const OptionRow TABLE[] = {
    {"data", OPTION_TEXT, FIELD(data), "", 0, 0, "DIR", MAY_CHANGE,
     "directory with train_*.bin, val_*.bin, tokenizer.bin (data/prepare.py makes it), or shards as llm.c, nanoGPT name"
     " them"},
    {"train", OPTION_TEXT, FIELD(train), "", 0, 0, "GLOB", MAY_CHANGE, "training shards, instead of DIR's"},
    {"val", OPTION_TEXT, FIELD(val), "", 0, 0, "GLOB", MAY_CHANGE, "validation shards, instead of DIR's"},
    {"model", OPTION_TEXT, FIELD(model), "", 0, 0, "NAME", FIXED,
     "gpt2, gpt2-medium, gpt2-large, gpt2-xl, or dN: N layers, N heads, 64*N wide (gpt2 where nothing says otherwise)"},
    {"layers", OPTION_COUNT, FIELD(layers), "0", 0, 4096, "L", FIXED, "number of blocks; 0: as the model says"},
    {"heads", OPTION_COUNT, FIELD(heads), "0", 0, 65536, "NH", FIXED, "attention heads a block; 0: as the model says"},
    {"dim", OPTION_COUNT, FIELD(dim), "0", 0, 1048576, "C", FIXED, "channels, divisible by heads; 0: as the model says"},
    {"context", OPTION_COUNT, FIELD(context), "0", 0, 67108864, "N", FIXED,
     "positions the model can see; 0: 1024 for a named model, else --seq"},
    {"vocab", OPTION_COUNT, FIELD(vocab), "0", 0, 268435456, "V", FIXED,
     "tokens in the vocabulary; 0: as tokenizer.bin says, else 50257"},
    {"init", OPTION_TEXT, FIELD(init), "random", 0, 0, "random|PATH", NOT_KEPT,
     "start from random weights, a checkpoint, a run (its newest), a GPT-2 of Hugging Face (directory or .safetensors), or "
     "llm.c's .bin"},
    {"out", OPTION_TEXT, FIELD(out), "", 0, 0, "DIR", NOT_KEPT,
     "run directory for logs and checkpoints; without it nothing is written"},
    {"resume", OPTION_FLAG, FIELD(resume), "0", 0, 1, NULL, NOT_KEPT,
     "go on from the newest complete checkpoint of --out, with that run's options"},
    {"batch", OPTION_COUNT, FIELD(batch), "4", 1, 16777216, "B", MAY_CHANGE, "sequences in a micro-step"},
    {"seq", OPTION_COUNT, FIELD(seq), "1024", 1, 67108864, "T", FIXED, "tokens in a sequence, at most the context"},
    {"batch-tokens", OPTION_COUNT, FIELD(batch_tokens), "0", 0, COUNT_MOST, "N", FIXED,
     "tokens in an update, a multiple of batch*seq: gradients accumulate; 0: batch*seq"},
    {"steps", OPTION_COUNT, FIELD(steps), "1000", 0, COUNT_MOST, "N", MAY_CHANGE, "updates in the whole run"},
    {"stop", OPTION_COUNT, FIELD(stop), "0", 0, COUNT_MOST, "N", NOT_KEPT,
     "stop after update N as Ctrl-C would, the schedule still made for --steps; 0: no"},
    {"lr", OPTION_REAL, FIELD(lr), "6e-4", 0, 1e30, "X", MAY_CHANGE, "peak learning rate"},
    {"warmup", OPTION_COUNT, FIELD(warmup), "100", 0, COUNT_MOST, "N", MAY_CHANGE,
     "updates over which the learning rate rises linearly"},
    {"schedule", OPTION_CHOICE, FIELD(schedule), "cosine", 0, 0, "cosine|linear|constant|wsd", MAY_CHANGE,
     "course of the learning rate after warmup (wsd: constant, then linear over the last fifth)"},
    {"lr-final", OPTION_REAL, FIELD(lr_final), "-1", -1, 1e30, "X", MAY_CHANGE,
     "learning rate at the last update; -1: a tenth of --lr"},
    {"weight-decay", OPTION_REAL, FIELD(weight_decay), "0.1", 0, 1e30, "X", MAY_CHANGE,
     "decoupled weight decay, on matrices only"},
    {"beta1", OPTION_REAL, FIELD(beta1), "0.9", 0, 0.9999999, "X", MAY_CHANGE, "AdamW's decay of the first moment"},
    {"beta2", OPTION_REAL, FIELD(beta2), "0.95", 0, 0.9999999, "X", MAY_CHANGE, "AdamW's decay of the second moment"},
    {"eps", OPTION_REAL, FIELD(eps), "1e-8", 1e-30, 1, "X", MAY_CHANGE, "AdamW's epsilon"},
    {"clip", OPTION_REAL, FIELD(clip), "1", 0, 1e30, "X", MAY_CHANGE, "largest global norm of the gradient; 0: no clipping"},
    {"eval-every", OPTION_COUNT, FIELD(eval_every), "100", 0, COUNT_MOST, "N", MAY_CHANGE,
     "validation loss every N updates, and at both ends; 0: never"},
    {"eval-tokens", OPTION_COUNT, FIELD(eval_tokens), "65536", 1, COUNT_MOST, "N", MAY_CHANGE,
     "tokens of an evaluation, spread over the validation shards; the same whatever the batch"},
    {"hellaswag", OPTION_TEXT, FIELD(hellaswag), "", 0, 0, "FILE", MAY_LACK,
     "questions with several endings, in llm.c's evaluation format (dev/hellaswag.py): how often is the right one likeliest?"},
    {"hellaswag-every", OPTION_COUNT, FIELD(hellaswag_every), "1000", 0, COUNT_MOST, "N", MAY_LACK,
     "ask these questions every N updates, and at the end; 0: never"},
    {"sample-every", OPTION_COUNT, FIELD(sample_every), "0", 0, COUNT_MOST, "N", MAY_CHANGE,
     "print a sample every N updates, and at the end; 0: never"},
    {"sample-tokens", OPTION_COUNT, FIELD(sample_tokens), "128", 1, 1e9, "N", MAY_CHANGE, "tokens of a sample"},
    {"prompt", OPTION_TEXT, FIELD(prompt), "", 0, 0, "TEXT", MAY_CHANGE,
     "what a sample continues; empty: the end-of-text token"},
    {"temperature", OPTION_REAL, FIELD(temperature), "0.8", 0, 1e6, "X", MAY_CHANGE,
     "divides the logits before sampling; 0: always the likeliest token"},
    {"top-k", OPTION_COUNT, FIELD(top_k), "0", 0, COUNT_MOST, "K", MAY_CHANGE,
     "sample from the K likeliest tokens only; 0: from all"},
    {"top-p", OPTION_REAL, FIELD(top_p), "1", 1e-6, 1, "P", MAY_LACK,
     "sample from the fewest likeliest tokens that have the probability P together; 1: from all"},
    {"save-every", OPTION_COUNT, FIELD(save_every), "1000", 0, COUNT_MOST, "N", MAY_CHANGE,
     "checkpoint every N updates, and at the end; 0: never"},
    {"keep", OPTION_COUNT, FIELD(keep), "2", 0, COUNT_MOST, "N", MAY_CHANGE, "checkpoints that stay, the newest; 0: all"},
    {"print-every", OPTION_COUNT, FIELD(print_every), "10", 0, COUNT_MOST, "N", MAY_CHANGE,
     "print a line every N updates (log.jsonl gets every one); 0: never"},
    {"device", OPTION_TEXT, FIELD(device), "auto", 0, 0, "auto|cpu|cuda[:N]", MAY_CHANGE, "where to compute"},
    {"dtype", OPTION_CHOICE, FIELD(dtype), "fp32", 0, 0, "fp32|bf16", MAY_CHANGE,
     "type of activations and working weights (master weights are fp32)"},
    {"attention", OPTION_TEXT, FIELD(attention), "auto", 0, 0, "auto|NAME|FILE.so", MAY_CHANGE,
     "attention kernel: the fastest that can run, one by name, or one from a shared object"},
    {"list-attention", OPTION_FLAG, FIELD(list_attention), "0", 0, 1, NULL, NOT_KEPT,
     "print the attention kernels, that of --attention FILE.so too, and whether each can run this model here"},
    {"recompute", OPTION_CHOICE, FIELD(recompute), "none", 0, 0, "none|gelu|block", MAY_CHANGE,
     "what the backward pass computes again to save memory"},
    {"deterministic", OPTION_FLAG, FIELD(deterministic), "0", 0, 1, NULL, MAY_CHANGE,
     "same bits on every run also on a GPU (the CPU always is)"},
    {"tf32", OPTION_FLAG, FIELD(tf32), "0", 0, 1, NULL, MAY_CHANGE,
     "let fp32 products on a GPU, attention's too, round their factors to TF32: faster, less exact"},
    {"no-graph", OPTION_FLAG, FIELD(no_graph), "0", 0, 1, NULL, MAY_CHANGE,
     "on a GPU queue every operation of a step anew instead of replaying a CUDA graph"},
    {"seed", OPTION_COUNT, FIELD(seed), "1337", 0, COUNT_MOST, "N", FIXED,
     "of initial weights, order of the data, and samples"},
    {"help", OPTION_FLAG, FIELD(help), "0", 0, 1, NULL, NOT_KEPT, "print this"},
};
enum { ROWS = sizeof TABLE / sizeof TABLE[0] };
_Static_assert((int)ROWS <= (int)OPTIONS_MOST && (int)OPTIONS_MOST <= (int)TABLE_ROWS_MOST, "room for every option");

static const OptionRow *row_find(const char *name)
{
    for (int i = 0; i < ROWS; i++)
        if (!strcmp(TABLE[i].name, name)) return &TABLE[i];
    return NULL;
}

int options_parse(Options *options, OptionsGiven *given, int argc, char **argv, Error *error)
{
    memset(options, 0, sizeof *options);
    memset(given, 0, sizeof *given);
    int used = table_parse(options, TABLE, ROWS, given->given, "", argc, argv, error);
    if (used < 0) return -1;
    if (used < argc) return error_set(error, "'%s' belongs to no option (--help lists all)", argv[used]);
    return 0;
}

int options_given(const OptionsGiven *given, const char *name)
{
    const OptionRow *row = row_find(name);
    return row && given->given[row - TABLE];
}

void options_help(void)
{
    printf("usage: train_gpt --data DIR [options]\n"
           "       train_gpt evaluate --init PATH --data DIR   (evaluate --help)\n"
           "       train_gpt export --to FORMAT FROM OUT   (export --help)\n"
           "       train_gpt generate --init PATH --prompt TEXT   (generate --help)\n"
           "       train_gpt inspect SHARD...   (inspect --help)\n\n"
           "Trains a GPT on token shards and writes logs and checkpoints that Hugging Face's transformers opens.\n"
           "Example:\n  python3 data/prepare.py --text book.txt --tokenizer bytes --out runs/book\n"
           "  ./train_gpt --data runs/book --layers 4 --heads 4 --dim 128 --seq 64 --batch 12 --steps 2000 --out "
           "runs/book-1\n\n");
    table_help(TABLE, ROWS);
    printf("\nExit status: 0 done, 1 a fault of machine or data, 2 a wrong option, 130 stopped by Ctrl-C after saving.\n");
}

/* --- what options imply ----------------------------------------------------------------------------------------------- */

/* Shapes of the published models. Source: Radford et al. 2019, table 2. */
static int model_shape(const char *name, int64_t *layers, int64_t *heads, int64_t *dim)
{
    static const struct { const char *name; int64_t layers, heads, dim; } published[] = {
        {"gpt2", 12, 12, 768}, {"gpt2-medium", 24, 16, 1024}, {"gpt2-large", 36, 20, 1280}, {"gpt2-xl", 48, 25, 1600},
    };
    for (size_t i = 0; i < sizeof published / sizeof published[0]; i++)
        if (!strcmp(name, published[i].name)) {
            *layers = published[i].layers;
            *heads = published[i].heads;
            *dim = published[i].dim;
            return 0;
        }
    char *end;
    long depth = *name == 'd' && isdigit((unsigned char)name[1]) ? strtol(name + 1, &end, 10) : 0;
    if (depth < 1 || depth > 4096 || *end) return -1;
    *layers = depth;
    *heads = depth;
    *dim = 64 * depth;
    return 0;
}

/* Takes a checkpoint's shape; an option that was given must agree with it. */
static int take_shape(Options *options, const OptionsGiven *given, const GptConfig *shape, const char *source, Error *error)
{
    const struct { const char *name; int64_t *field, value; } facts[] = {
        {"layers", &options->layers, shape->layers},    {"heads", &options->heads, shape->heads},
        {"dim", &options->dim, shape->channels},        {"context", &options->context, shape->context},
        {"vocab", &options->vocab, shape->vocab},
    };
    for (size_t i = 0; i < sizeof facts / sizeof facts[0]; i++) {
        if (*facts[i].field && *facts[i].field != facts[i].value)
            return error_set(error, "%s%s %lld disagrees with %s, whose model has %lld",
                             options_given(given, facts[i].name) ? "--" : "config.json's ", facts[i].name,
                             (long long)*facts[i].field, source, (long long)facts[i].value);
        *facts[i].field = facts[i].value;
    }
    return 0;
}

int options_resolve_model(Options *options, const OptionsGiven *given, const GptConfig *shape, const char *shape_source,
                          int64_t vocab_found, Error *error)
{
    int64_t layers, heads, dim;
    const char *name = *options->model ? options->model : "gpt2";
    if (model_shape(name, &layers, &heads, &dim))
        return error_set(error, "--model: got '%s', expected gpt2, gpt2-medium, gpt2-large, gpt2-xl or dN with N from 1 to "
                         "4096", name);
    if (shape && *options->model && !options_given(given, "resume") &&
        (layers != shape->layers || heads != shape->heads || dim != shape->channels))
        return error_set(error, "--model %s disagrees with %s: %lld layers, %lld heads, %lld wide there", name, shape_source,
                         (long long)shape->layers, (long long)shape->heads, (long long)shape->channels);
    if (shape && take_shape(options, given, shape, shape_source, error)) return -1;
    if (!options->layers) options->layers = layers;
    if (!options->heads) options->heads = heads;
    if (!options->dim) options->dim = dim;
    if (!options->vocab) options->vocab = vocab_found ? vocab_found : 50257;
    if (vocab_found && options->vocab < vocab_found)
        return error_set(error, "--vocab %lld is smaller than the tokenizer's vocabulary of %lld", (long long)options->vocab,
                         (long long)vocab_found);
    if (!options->context) options->context = *options->model ? 1024 : options->seq;
    if (!options_given(given, "seq") && !options_given(given, "resume") && options->seq > options->context)
        options->seq = options->context;
    if (options->seq > options->context)
        return error_set(error, "--seq %lld is longer than the context of the model, %lld (--context)",
                         (long long)options->seq, (long long)options->context);
    GptConfig config = {options->layers, options->heads, options->dim, options->context, options->vocab};
    char fault[256];
    if (gpt_config_fault(&config, fault, sizeof fault)) return error_set(error, "%s", fault);
    return 0;
}

/* Refuses what was given in vain, as an option that would make use of it is missing: it was most likely forgotten, and the
 * run would do less than was meant. What is turned off by a 0 of its own was not forgotten; that nothing is saved without
 * --out is said when the run begins. */
static int check_used(const Options *options, const OptionsGiven *given, Error *error)
{
    static const struct { const char *name, *every; size_t field; } parts[] = {
        {"eval-tokens", "eval-every", FIELD(eval_every)},       {"sample-tokens", "sample-every", FIELD(sample_every)},
        {"prompt", "sample-every", FIELD(sample_every)},        {"temperature", "sample-every", FIELD(sample_every)},
        {"top-k", "sample-every", FIELD(sample_every)},         {"top-p", "sample-every", FIELD(sample_every)},
    };
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++)
        if (options_given(given, parts[i].name) && !options_given(given, parts[i].every) &&
            !*(const int64_t *)((const char *)options + parts[i].field))
            return error_set(error, "--%s has no effect without --%s N", parts[i].name, parts[i].every);
    if (options_given(given, "hellaswag-every") && options->hellaswag_every && !*options->hellaswag)
        return error_set(error, "--hellaswag-every %lld has no questions to ask: give --hellaswag FILE, which "
                         "dev/hellaswag.py makes", (long long)options->hellaswag_every);
    return 0;
}

int options_resolve_batch(Options *options, const OptionsGiven *given, Error *error)
{
    if (options->seq > (int64_t)COUNT_MOST / options->batch)
        return error_set(error, "--batch %lld times --seq %lld is beyond any machine", (long long)options->batch,
                         (long long)options->seq);
    int64_t micro = options->batch * options->seq;
    if (!options->batch_tokens) options->batch_tokens = micro;
    int64_t nearest = options->batch_tokens < micro ? micro : options->batch_tokens / micro * micro;
    if (options->batch_tokens % micro)
        return error_set(error, "--batch-tokens %lld is not a multiple of batch %lld times seq %lld, which is %lld; the "
                         "nearest is %lld", (long long)options->batch_tokens, (long long)options->batch,
                         (long long)options->seq, (long long)micro, (long long)nearest);
    if (options->lr_final < 0) {
        if (options->lr_final != -1)
            return error_set(error, "--lr-final: got %g, expected -1 or a number from 0 to 1e+30", options->lr_final);
        options->lr_final = options->lr / 10;
    }
    if (options->warmup > options->steps && options->steps && options_given(given, "warmup"))
        return error_set(error, "--warmup %lld is longer than the run of --steps %lld", (long long)options->warmup,
                         (long long)options->steps);
    if (options->warmup > options->steps) options->warmup = options->steps / 10;
    return check_used(options, given, error);
}

/* Update t counts from 1 to S. While t <= warmup: lr * t/warmup. Then, with p = (t - warmup)/(S - warmup):
 *   cosine    final + (1 + cos(pi p))/2 * (lr - final)      Loshchilov and Hutter 2017
 *   linear    lr + (final - lr) * p
 *   constant  lr
 *   wsd       lr while t <= 0.8 S, then lr + (final - lr) * (t - 0.8 S)/(0.2 S)      Hu et al. 2024 */
double options_learning_rate(const Options *options, int64_t t)
{
    double lr = options->lr, final = options->lr_final, S = (double)options->steps, now = (double)t;
    if (t <= options->warmup) return lr * now / (double)options->warmup;
    double p = (now - (double)options->warmup) / (S - (double)options->warmup);
    if (p > 1) p = 1; /* a run that goes on beyond --steps stays at the end of its schedule */
    switch ((Schedule)options->schedule) {
    case SCHEDULE_COSINE: return final + 0.5 * (1 + cos(3.14159265358979323846 * p)) * (lr - final);
    case SCHEDULE_LINEAR: return lr + (final - lr) * p;
    case SCHEDULE_WSD: return now <= 0.8 * S ? lr : lr + (final - lr) * fmin(1, (now - 0.8 * S) / (0.2 * S));
    default: return lr;
    }
}

/* --- config.json ------------------------------------------------------------------------------------------------------ */

/* "batch-tokens" -> "batch_tokens". */
static void json_name(const OptionRow *row, char *out, size_t size)
{
    snprintf(out, size, "%s", row->name);
    for (char *at = out; *at; at++)
        if (*at == '-') *at = '_';
}

/* out = a relative pattern behind the working directory, which is a name and no pattern. */
static int absolute_pattern(char out[FILES_PATH], const char *pattern, Error *error)
{
    char here[FILES_PATH], whole[5 * FILES_PATH];
    size_t length = 0;
    if (files_absolute(here, "", error)) return -1;
    for (const char *at = here; *at; at++) { /* [*] is a *, also for dev/reference.py, whose patterns do without \ */
        const char *form = *at == '\\' ? "[\\%c]" : strchr("*?[", *at) ? "[%c]" : "%c";
        length += (size_t)snprintf(whole + length, sizeof whole - length, form, *at);
    }
    snprintf(whole + length, sizeof whole - length, "%s", pattern);
    return files_absolute(out, whole, error);
}

static int is_utf8(const char *text)
{
    size_t length = strlen(text), bytes = 1;
    for (size_t at = 0; at < length && bytes; at += bytes) bytes = utf8_length((const unsigned char *)text + at, length - at);
    return bytes != 0;
}

int options_make_absolute(Options *options, Error *error)
{
    const struct { const char **text; int is_pattern, is_path; } paths[] = {
        {&options->data, 0, 1}, {&options->train, 1, 1}, {&options->val, 1, 1}, {&options->hellaswag, 0, 1},
        {&options->attention, 0, attention_is_path(options->attention)},
    };
    char absolute[FILES_PATH];
    for (size_t i = 0; i < sizeof paths / sizeof paths[0]; i++) {
        const char *text = *paths[i].text;
        if (!paths[i].is_path || !*text || *text == '/') continue;
        if (paths[i].is_pattern ? absolute_pattern(absolute, text, error) : files_absolute(absolute, text, error)) return -1;
        if (!is_utf8(absolute)) continue; /* JSON could not hold it; what was typed it may */
        if (!(*paths[i].text = options_own(options, absolute))) {
            *paths[i].text = text;
            return error_set(error, "not enough memory");
        }
    }
    return 0;
}

int options_write_config(const Options *options, const char *path, Error *error)
{
    char temporary[4200], name[64];
    snprintf(temporary, sizeof temporary, "%s.tmp", path);
    FILE *file = fopen(temporary, "w");
    if (!file) return error_set(error, "%s: cannot be written: %s", temporary, strerror(errno));
    fprintf(file, "{");
    for (int i = 0, first = 1; i < ROWS; i++) {
        if (TABLE[i].change == NOT_KEPT && strcmp(TABLE[i].name, "init")) continue;
        size_t size = 64 + (TABLE[i].kind == OPTION_TEXT ? 6 * strlen(*table_text(options, &TABLE[i])) : 0);
        char *value = (char *)malloc(size);
        if (!value) { fclose(file); remove(temporary); return error_set(error, "not enough memory to write %s", path); }
        json_name(&TABLE[i], name, sizeof name);
        table_json(options, &TABLE[i], value, size);
        fprintf(file, "%s\n  \"%s\": %s", first ? "" : ",", name, value);
        free(value);
        first = 0;
    }
    fprintf(file, "\n}\n");
    int bad = fflush(file) || fsync(fileno(file)), cause = errno;
    if (fclose(file) && !bad) { bad = 1; cause = errno; }
    if (!bad && rename(temporary, path)) { bad = 1; cause = errno; }
    if (!bad) return 0;
    remove(temporary);
    return error_set(error, "%s: cannot be written: %s", path, strerror(cause));
}

const char *options_own(Options *options, const char *text)
{
    char *copy = options->owned_count < 2 * OPTIONS_MOST ? strdup(text) : NULL;
    if (copy) options->owned[options->owned_count++] = copy;
    return copy;
}

void options_free(Options *options)
{
    for (int i = 0; i < options->owned_count; i++) free(options->owned[i]);
    options->owned_count = 0;
}

/* One option from config.json into `kept`, as the command line would set it. */
static int config_take(Options *kept, const OptionRow *row, const JsonValue *value, const char *path, Error *error)
{
    Error inner;
    const char *text = value->text;
    if (row->kind == OPTION_FLAG) {
        if (value->kind != JSON_TRUE && value->kind != JSON_FALSE)
            return error_set(error, "%s: \"%s\" is not true or false", path, value->key);
        *table_count(kept, row) = value->kind == JSON_TRUE;
        return 0;
    }
    JsonKind expected = row->kind == OPTION_TEXT || row->kind == OPTION_CHOICE ? JSON_STRING : JSON_NUMBER;
    if (value->kind != expected)
        return error_set(error, "%s: \"%s\" is not a %s", path, value->key, expected == JSON_STRING ? "string" : "number");
    if (row->kind == OPTION_TEXT && !(text = options_own(kept, text)))
        return error_set(error, "not enough memory to read %s", path);
    if (table_set(kept, row, text, &inner)) return error_set(error, "%s: %.900s", path, inner.text);
    return 0;
}

/* Refuses a path that config.json has and the run needs where nothing is: project or data were moved since. */
static int check_kept_paths(const Options *o, const OptionsGiven *given, const char *path, Error *error)
{
    int needs_data = !*o->train || (o->eval_every && !*o->val);
    const struct { const char *name, *text; int is_pattern; } paths[] = {
        {"data", needs_data ? o->data : "", 0}, {"train", o->train, 1},        {"val", o->eval_every ? o->val : "", 1},
        {"hellaswag", o->hellaswag, 0},         {"attention", attention_is_path(o->attention) ? o->attention : "", 0},
    };
    for (size_t i = 0; i < sizeof paths / sizeof paths[0]; i++) {
        const char *name = paths[i].name, *text = paths[i].text;
        glob_t found;
        int missing = 0;
        if (!*text || options_given(given, name)) continue;
        if (paths[i].is_pattern) {
            missing = glob(text, GLOB_NOSORT, NULL, &found) == GLOB_NOMATCH;
            globfree(&found);
        } else {
            missing = access(text, F_OK) && (errno == ENOENT || errno == ENOTDIR);
        }
        if (missing)
            return error_set(error, "%.400s: \"%s\" is %.400s, which %s: give --%s %s", path, name, text,
                             paths[i].is_pattern ? "matches no file" : "does not exist", name, row_find(name)->choices);
    }
    return 0;
}

int options_from_config(Options *options, const OptionsGiven *given, const char *path, Error *error)
{
    JsonDocument *document = json_read(path, error);
    if (!document) return -1;
    int status = 0;
    double kept_lr = -1, kept_final = -1;
    if (json_root(document)->kind != JSON_OBJECT)
        status = error_set(error, "%s holds no JSON object, expected the options of a run", path);
    for (int i = 0; i < ROWS && !status; i++) {
        const OptionRow *row = &TABLE[i];
        char name[64], mine[512], theirs[512];
        if (row->change == NOT_KEPT && strcmp(row->name, "init")) continue;
        json_name(row, name, sizeof name);
        const JsonValue *value = json_member(json_root(document), name);
        if (!value && (row->change == MAY_LACK || (row->change == MAY_CHANGE && given->given[i]))) continue;
        if (!value) {
            status = error_set(error, "%s: got no \"%s\", expected all options of the run", path, name);
            break;
        }
        Options kept = *options;
        status = config_take(&kept, row, value, path, error);
        memcpy(options->owned, kept.owned, sizeof kept.owned);
        options->owned_count = kept.owned_count;
        if (status) break;
        if (!strcmp(row->name, "lr")) kept_lr = kept.lr;
        if (!strcmp(row->name, "lr-final")) kept_final = kept.lr_final;
        if (!given->given[i]) {
            *options = kept;
            continue;
        }
        table_json(options, row, mine, sizeof mine);
        table_json(&kept, row, theirs, sizeof theirs);
        if (row->change == FIXED && strcmp(mine, theirs))
            status = error_set(error, "--%s %s cannot change within a run: %s has %s", row->name, mine, path, theirs);
    }
    json_free(document);
    /* A final rate that was a tenth of the old --lr, by default, follows the new one. */
    if (!status && options_given(given, "lr") && !options_given(given, "lr-final") && kept_final == kept_lr / 10)
        options->lr_final = -1;
    return status ? status : check_kept_paths(options, given, path, error);
}
