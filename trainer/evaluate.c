#include "trainer/evaluate.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "trainer/display.h"
#include "trainer/inference.h"
#include "trainer/process.h"
#include "trainer/table.h"

/* A batch on the host. */
typedef struct Batch {
    int32_t *inputs, *targets; /* (B, T) */
    int32_t *window;           /* (T+1) */
} Batch;

static int batch_open(Batch *batch, int64_t B, int64_t T, Error *error)
{
    batch->inputs = (int32_t *)malloc((size_t)(2 * B * T + T + 1) * sizeof(int32_t));
    batch->targets = batch->inputs + B * T;
    batch->window = batch->targets + B * T;
    return batch->inputs ? 0 : error_set(error, "not enough memory for an evaluation batch");
}

/* --- validation shards ------------------------------------------------------------------------------------------------ */

/* Reads what shard s has left behind its windows into row `row` of T, the rest of it not counting. Returns 0 or -1. */
static int read_rest(Batch *batch, int64_t row, const Shard *shard, int64_t T, int64_t vocab, Error *error)
{
    int64_t slack = shard_slack(shard, T);
    int32_t *inputs = batch->inputs + row * T, *targets = batch->targets + row * T;
    if (shard_read(shard, shard->count - 1 - slack, slack + 1, vocab, batch->window, error)) return -1;
    for (int64_t t = 0; t < T; t++) {
        inputs[t] = t < slack ? batch->window[t] : 0;
        targets[t] = t < slack ? batch->window[t + 1] : -1;
    }
    return 0;
}

static int read_window(Batch *batch, int64_t row, const ShardSet *set, int64_t index, int64_t T, int64_t vocab, Error *error)
{
    if (shards_window(set, index, T, NULL, vocab, batch->window, error)) return -1;
    memcpy(batch->inputs + row * T, batch->window, (size_t)T * sizeof(int32_t));
    memcpy(batch->targets + row * T, batch->window + 1, (size_t)T * sizeof(int32_t));
    return 0;
}

int evaluate_shards(Gpt *gpt, const ShardSet *set, int64_t B, int64_t T, int64_t windows, ValidationLoss *loss,
                    Error *error)
{
    const int64_t total = shards_windows(set, T), vocab = gpt_config(gpt)->vocab;
    const int64_t count = windows ? windows : total, rows = windows ? count : count + (int64_t)set->count;
    Progress progress = progress_begin("evaluating");
    Batch batch;
    int status = batch_open(&batch, B, T, error);
    int64_t filled = 0;
    memset(loss, 0, sizeof *loss);
    for (int64_t i = 0; i < rows && !status && !process_stop && isfinite(loss->sum); i++) {
        const Shard *shard = i < count ? NULL : &set->shards[i - count]; /* whose rest it is; NULL: a window */
        if (!shard) {
            int64_t index = i * (total / count) + i * (total % count) / count; /* floor(i*total/count), no overflow */
            status = read_window(&batch, filled++, set, index, T, vocab, error);
            loss->tokens += T;
        } else if (shard_slack(shard, T)) {
            status = read_rest(&batch, filled++, shard, T, vocab, error);
            loss->tokens += shard_slack(shard, T);
        }
        if (status || (filled < B && i + 1 < rows)) continue;
        loss->sum += gpt_loss(gpt, batch.inputs, batch.targets, filled, T);
        filled = 0;
        progress_show(&progress, i + 1, rows);
    }
    progress_end(&progress);
    free(batch.inputs);
    return status;
}

/* --- HellaSwag -------------------------------------------------------------------------------------------------------- */

/* Tokens that the model reads of a row: all but the last. */
static int64_t row_inputs(const HellaSwagRow *row) { return row->context_count + row->ending_count - 1; }

/* Row number i of the batch: the loss counts from where the ending's first token is predicted. */
static void lay_out(Batch *batch, int64_t i, const HellaSwagRow *row, int64_t T)
{
    int32_t *inputs = batch->inputs + i * T, *targets = batch->targets + i * T;
    for (int64_t t = 0; t < T; t++) {
        int64_t ending = t + 1 - row->context_count; /* which of its tokens comes next */
        inputs[t] = t >= row_inputs(row) ? 0 : ending > 0 ? row->ending[ending - 1] : row->context[t];
        targets[t] = ending >= 0 && ending < row->ending_count ? row->ending[ending] : -1;
    }
}

/* sums (rows from first on) = the loss of each row's ending: `count` rows in one batch, no longer than the longest. */
static void batch_sums(Gpt *gpt, double *sums, Batch *batch, float *losses, const HellaSwagRow *rows, int64_t count)
{
    int64_t T = 0;
    for (int64_t i = 0; i < count; i++) T = row_inputs(&rows[i]) > T ? row_inputs(&rows[i]) : T;
    for (int64_t i = 0; i < count; i++) lay_out(batch, i, &rows[i], T);
    gpt_losses(gpt, losses, batch->inputs, batch->targets, count, T);
    for (int64_t i = 0; i < count; i++) {
        sums[i] = 0;
        for (int64_t t = 0; t < T; t++) sums[i] += (double)losses[i * T + t]; /* 0 where it does not count */
    }
}

/* The number of the ending with the lowest loss, or with `by_token` the lowest a token; -1 where one is not finite. */
static int64_t choose(const double *sums, const HellaSwagRow *rows, int64_t count, int by_token)
{
    int64_t best = 0;
    double lowest = INFINITY;
    for (int64_t i = 0; i < count; i++) {
        double value = by_token ? sums[i] / (double)rows[i].ending_count : sums[i];
        if (!isfinite(value)) return -1;
        if (value < lowest) best = i;
        if (value < lowest) lowest = value;
    }
    return best;
}

static int count_choices(const HellaSwag *set, const double *sums, int64_t rows_done, HellaSwagScore *score, Error *error)
{
    memset(score, 0, sizeof *score);
    for (int64_t e = 0; e < set->example_count; e++) {
        const HellaSwagExample *example = &set->examples[e];
        const HellaSwagRow *rows = set->rows + example->first;
        if (example->first + example->count > rows_done) break;
        int64_t by_mean = choose(sums + example->first, rows, example->count, 1);
        int64_t by_sum = choose(sums + example->first, rows, example->count, 0);
        if (by_mean < 0) return error_set(error, "the loss of HellaSwag's example %lld is not finite", (long long)e);
        score->examples++;
        score->by_mean += by_mean == example->label;
        score->by_sum += by_sum == example->label;
    }
    return 0;
}

int evaluate_hellaswag(Gpt *gpt, const HellaSwag *set, int64_t B, HellaSwagScore *score, Error *error)
{
    int64_t T = 0, done = 0;
    Batch batch = {NULL, NULL, NULL};
    for (int64_t i = 0; i < set->row_count; i++) T = row_inputs(&set->rows[i]) > T ? row_inputs(&set->rows[i]) : T;
    double *sums = (double *)malloc((size_t)set->row_count * sizeof *sums);
    float *losses = (float *)malloc((size_t)(B * T) * sizeof *losses);
    int status = sums && losses ? batch_open(&batch, B, T, error) : error_set(error, "not enough memory for HellaSwag");
    Progress progress = progress_begin("HellaSwag");
    while (!status && done < set->row_count && !process_stop) {
        int64_t count = set->row_count - done < B ? set->row_count - done : B;
        batch_sums(gpt, sums + done, &batch, losses, set->rows + done, count);
        done += count;
        progress_show(&progress, done, set->row_count);
    }
    progress_end(&progress);
    if (!status) status = count_choices(set, sums, done, score, error);
    free(sums);
    free(losses);
    free(batch.inputs);
    return status;
}

/* --- the command ------------------------------------------------------------------------------------------------------ */

typedef struct EvaluateOptions {
    const char *init, *data, *val, *hellaswag;
    int64_t batch, seq, help;
    DeviceChoice place;
} EvaluateOptions;

#define FIELD(name) offsetof(EvaluateOptions, name)

static const OptionRow TABLE[] = {
    {"init", OPTION_TEXT, FIELD(init), "", 0, 0, "PATH", 0,
     "the model: a checkpoint, a run's directory (its newest), a GPT-2 of Hugging Face, or llm.c's .bin"},
    {"data", OPTION_TEXT, FIELD(data), "", 0, 0, "DIR", 0, "directory with validation shards, as the trainer's --data"},
    {"val", OPTION_TEXT, FIELD(val), "", 0, 0, "GLOB", 0, "validation shards, instead of DIR's"},
    {"hellaswag", OPTION_TEXT, FIELD(hellaswag), "", 0, 0, "FILE", 0,
     "questions with several endings, in llm.c's evaluation format (dev/hellaswag.py makes such a file)"},
    {"batch", OPTION_COUNT, FIELD(batch), "8", 1, 16777216, "B", 0, "sequences that are computed at a time"},
    {"seq", OPTION_COUNT, FIELD(seq), "0", 0, 67108864, "T", 0, "tokens in a sequence; 0: the model's context"},
    {"device", OPTION_TEXT, FIELD(place.device), "auto", 0, 0, "auto|cpu|cuda[:N]", 0, "where to compute"},
    {"dtype", OPTION_CHOICE, FIELD(place.dtype), "fp32", 0, 0, "fp32|bf16", 0, "type of weights and activations"},
    {"attention", OPTION_TEXT, FIELD(place.attention), "auto", 0, 0, "auto|NAME|FILE.so", 0, "attention kernel"},
    {"tf32", OPTION_FLAG, FIELD(place.tf32), "0", 0, 1, NULL, 0,
     "let fp32 products on a GPU, attention's too, round their factors to TF32"},
    {"help", OPTION_FLAG, FIELD(help), "0", 0, 1, NULL, 0, "print this"},
};
enum { ROWS = sizeof TABLE / sizeof TABLE[0] };
_Static_assert((int)ROWS <= (int)TABLE_ROWS_MOST, "room for every option");

static void print_help(void)
{
    printf("usage: train_gpt evaluate --init PATH [--data DIR] [--hellaswag FILE] [options]\n\n"
           "Says how good a model is: its loss and perplexity over whole validation shards, where every token but each\n"
           "shard's first is predicted once, from up to --seq tokens before it; and how often it finds the right ending\n"
           "likeliest, by the loss a token (acc_norm) and by the loss in all (acc).\n"
           "Example:\n  ./train_gpt evaluate --init runs/book-1 --data runs/book\n"
           "  ./train_gpt evaluate --init ~/gpt2 --hellaswag hellaswag_val.bin\n\n");
    table_help(TABLE, ROWS);
}

/* What is to be evaluated on. */
typedef struct Material {
    ShardSet shards; /* no tokens where none are wanted */
    HellaSwag questions;
} Material;

/* Opens shards and questions. Returns 0 or the exit status. */
static int open_material(Material *material, const EvaluateOptions *o, const Inference *m, int64_t T, Error *error)
{
    char pattern[2 * FILES_PATH];
    const char *glob = o->val;
    if (*o->data && inference_check_data(m, o->data, error)) return STATUS_OPTION;
    if (*o->data && !*glob) {
        if (shards_find(o->data, "val", pattern, sizeof pattern, error)) return STATUS_MACHINE;
        glob = pattern;
    }
    if (*glob && shards_open(&material->shards, glob, error)) return STATUS_MACHINE;
    if (*glob && material->shards.tokens == (int64_t)material->shards.count) {
        error_set(error, "%s: no shard has a token behind its first, so there is nothing to predict", glob);
        return STATUS_MACHINE;
    }
    if (*o->hellaswag && hellaswag_open(&material->questions, o->hellaswag, m->info.config.vocab, T, error))
        return STATUS_MACHINE;
    return 0;
}

static void print_model(const Inference *m)
{
    const GptConfig *c = &m->info.config;
    char text[256];
    m->backend->describe(text, sizeof text, m->stream);
    printf("device   %s, %s\n", text, m->backend->name);
    printf("model    %s: %lld layers, %lld heads, %lld wide, context %lld, vocabulary %lld\n", m->path, (long long)c->layers,
           (long long)c->heads, (long long)c->channels, (long long)c->context, (long long)c->vocab);
    fflush(stdout);
}

/* Returns 0 or the exit status. */
static int print_loss(const Inference *m, const Material *material, int64_t B, int64_t T, Error *error)
{
    ValidationLoss loss;
    double began = display_clock();
    if (evaluate_shards(m->gpt, &material->shards, B, T, 0, &loss, error)) return STATUS_MACHINE;
    if (process_stop) return STATUS_STOPPED;
    if (!isfinite(loss.sum)) {
        error_set(error, "the validation loss is not finite%s%s", gpt_fault(m->gpt) ? ": " : "",
                  gpt_fault(m->gpt) ? gpt_fault(m->gpt) : "");
        return STATUS_MACHINE;
    }
    double mean = loss.sum / (double)loss.tokens, seconds = display_clock() - began;
    printf("val      %lld tokens predicted, in %zu shard%s, from up to %lld before: %.0f tokens/s\n", (long long)loss.tokens,
           material->shards.count, material->shards.count == 1 ? "" : "s", (long long)T, (double)loss.tokens / seconds);
    printf("loss     %.9f nats a token, %.9f bits a token, perplexity %.6f\n", mean, mean / log(2.0), exp(mean));
    fflush(stdout);
    return 0;
}

/* Returns 0 or the exit status. */
static int print_score(const Inference *m, const Material *material, int64_t B, Error *error)
{
    HellaSwagScore score;
    if (evaluate_hellaswag(m->gpt, &material->questions, B, &score, error)) return STATUS_MACHINE;
    if (process_stop) return STATUS_STOPPED;
    double examples = (double)score.examples;
    printf("hellaswag %lld examples: acc_norm %.4f (%lld right by the loss a token), acc %.4f (%lld by the loss in all)\n",
           (long long)score.examples, (double)score.by_mean / examples, (long long)score.by_mean,
           (double)score.by_sum / examples, (long long)score.by_sum);
    return 0;
}

static int evaluate(const EvaluateOptions *o, Inference *m, Material *material, Error *error)
{
    int64_t context = m->info.config.context, T = o->seq ? o->seq : context;
    if (T > context) {
        error_set(error, "--seq %lld is longer than the context of %s, %lld", (long long)T, m->path, (long long)context);
        return STATUS_OPTION;
    }
    GptOptions options = {.batch = o->batch, .sequence = T, .tf32 = (int)o->place.tf32};
    int status = open_material(material, o, m, T, error);
    if (!status) status = inference_place(m, &o->place, &options, error);
    if (!status) print_model(m);
    if (!status) status = inference_load(m, &options, error);
    if (!status && material->shards.tokens) status = print_loss(m, material, o->batch, T, error);
    if (!status && material->questions.example_count) status = print_score(m, material, o->batch, error);
    return status;
}

int evaluate_run(int argc, char **argv, Error *error)
{
    EvaluateOptions options;
    Inference inference;
    Material material;
    unsigned char given[ROWS];
    int used = table_parse(&options, TABLE, ROWS, given, "evaluate", argc, argv, error);
    if (used < 0) return STATUS_OPTION;
    if (options.help) {
        print_help();
        return 0;
    }
    if (used < argc) {
        error_set(error, "evaluate: '%s' belongs to no option (evaluate --help lists all)", argv[used]);
    } else if (!*options.init) {
        error_set(error, "evaluate: --init is missing: the model to evaluate");
    } else if (!*options.data && !*options.val && !*options.hellaswag) {
        error_set(error, "evaluate: nothing to evaluate on: give --data DIR, --val GLOB or --hellaswag FILE");
    } else {
        memset(&material, 0, sizeof material);
        int status = inference_find(&inference, options.init, "", error);
        if (!status) status = evaluate(&options, &inference, &material, error);
        shards_close(&material.shards);
        hellaswag_close(&material.questions);
        inference_close(&inference);
        return status;
    }
    return STATUS_OPTION;
}
