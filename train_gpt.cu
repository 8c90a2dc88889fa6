/* train_gpt.cu - the trainer: from options to a trained model. Plain C that nvcc and `cc -x c` both compile; no kernel in it.
 *
 *     main        options -> setup -> train -> report, or a command (COMMANDS)
 *     setup       what was asked for and what is there become a model, a loader and a run directory; all faults of the user
 *                 surface here, before anything long is begun and before anything is written
 *     train       update after update: micro-steps, norm, AdamW; evaluation, sample, checkpoint when they are due
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/checkpoint.h"
#include "data/files.h"
#include "data/json.h"
#include "data/loader.h"
#include "data/model.h"
#include "data/random.h"
#include "data/tokenizer.h"
#include "layers/cpu.h"
#include "layers/gpt.h"
#include "layers/ranges.h"
#include "trainer/corpus.h"
#include "trainer/display.h"
#include "trainer/evaluate.h"
#include "trainer/export.h"
#include "trainer/generate.h"
#include "trainer/inference.h"
#include "trainer/inspect.h"
#include "trainer/options.h"
#include "trainer/process.h"
#include "trainer/report.h"
#include "trainer/run.h"
#include "trainer/sample.h"
#include "trainer/start.h"

/* All that a run holds. */
typedef struct Trainer {
    const char *program;                /* as it was started */
    Options options;
    OptionsGiven given;
    Error error;

    const Backend *backend;
    Stream *stream;
    double peak;                        /* TFLOP/s of the device, 0 where it is not known */
    const AttentionKernel *attention;
    GptConfig config;
    GptOptions gpt_options;
    Gpt *gpt;

    Start start;
    Corpus corpus;
    Loader *loader;
    int prefetched, prefetch_failed;    /* the next update's batches are on the device; or could not be had */
    int64_t prefetch_position;          /* of the loader behind them */

    Run run;
    Report *report;
    char saved_path[FILES_PATH];        /* newest complete checkpoint of this run; "" where there is none */
    CheckpointState state;
    int64_t last;                       /* update after which this process stops */
    Curve train_curve, val_curve;
} Trainer;

/* --- setup ------------------------------------------------------------------------------------------------------------------ */

static int setup_start(Trainer *t)
{
    int status = start_find(&t->start, &t->options, &t->given, &t->run, &t->error);
    if (t->start.resumed) snprintf(t->saved_path, sizeof t->saved_path, "%s", t->start.path);
    return status;
}

static int setup_model(Trainer *t)
{
    Options *o = &t->options;
    if (options_resolve_model(o, &t->given, *t->start.path ? &t->start.info.config : NULL, t->start.path,
                              t->start.tokenizer ? tokenizer_vocab(t->start.tokenizer) : 0, &t->error) ||
        options_resolve_batch(o, &t->given, &t->error))
        return STATUS_OPTION;
    if (o->sample_every && !t->start.tokenizer) {
        error_set(&t->error, "--sample-every needs a tokenizer.bin in --data DIR or a tokenizer beside --init's model, got %s",
                  *o->data ? o->data : "no --data");
        return STATUS_OPTION;
    }
    if (o->sample_every && *o->prompt) { /* a prompt that cannot be encoded is better refused now than at the first sample */
        size_t count;
        if (tokenizer_encode(t->start.tokenizer, o->prompt, strlen(o->prompt), NULL, 0, &count, &t->error)) {
            Error inner = t->error;
            error_set(&t->error, "--prompt cannot be used with this data: %.900s", inner.text);
            return STATUS_OPTION;
        }
    }
    t->config.layers = o->layers;
    t->config.heads = o->heads;
    t->config.channels = o->dim;
    t->config.context = o->context;
    t->config.vocab = o->vocab;
    t->gpt_options.batch = o->batch;
    t->gpt_options.sequence = o->seq;
    t->gpt_options.training = 1;
    t->gpt_options.recompute = (GptRecompute)o->recompute;
    t->gpt_options.micro_steps = o->batch_tokens / (o->batch * o->seq);
    t->gpt_options.cache = o->sample_every ? 1 : 0;
    t->gpt_options.no_recording = (int)o->no_graph;
    t->gpt_options.deterministic = (int)o->deterministic;
    t->gpt_options.tf32 = (int)o->tf32;
    return 0;
}

static int setup_device(Trainer *t)
{
    const Options *o = &t->options;
    DeviceChoice choice = {o->device, o->attention, o->dtype, o->tf32, o->deterministic};
    return device_open(&choice, &t->backend, &t->stream, &t->error);
}

static int setup_attention(Trainer *t)
{
    AttentionShape shape;
    shape.B = t->options.batch;
    shape.T = t->options.seq;
    shape.NH = t->config.heads;
    shape.HS = t->config.channels / t->config.heads;
    shape.scale = attention_scale(shape.HS);
    shape.dtype = t->backend->dtype;
    shape.deterministic = t->gpt_options.deterministic;
    shape.tf32 = t->gpt_options.tf32;
    int sm = t->backend->sm(t->stream);
    t->peak = t->backend->peak_tflops(t->stream);
    if (attention_is_path(t->options.attention)) process_blame(t->options.attention);
    if (t->options.list_attention)
        return attention_list(t->options.attention, t->backend->device, &shape, sm, t->error.text, sizeof t->error.text)
                   ? STATUS_OPTION : 0;
    t->attention = attention_choose(t->options.attention, t->backend->device, &shape, sm, t->error.text, sizeof t->error.text);
    return t->attention ? 0 : STATUS_OPTION;
}

static int setup_data(Trainer *t)
{
    return corpus_open(&t->corpus, &t->options, t->report, &t->error);
}

/* Says what the model is, on what it is computed, and what memory that takes. */
static void print_plan(Trainer *t)
{
    const GptConfig *c = &t->config;
    GptPlan plan = gpt_plan(c, &t->gpt_options, t->backend, t->attention);
    char text[256], parts[7][32];
    double program = t->backend->device == ATTENTION_CPU ? display_resident() : 0; /* it shares the memory on a CPU only */
    double bytes[7] = {(double)plan.parameters, (double)plan.gradients, (double)plan.optimizer, (double)plan.activations,
                       (double)plan.scratch, program, (double)plan.total + program};
    t->backend->describe(text, sizeof text, t->stream);
    for (int i = 0; i < 7; i++) display_bytes(parts[i], sizeof parts[i], bytes[i]);
    report_say(t->report, "device", "%s, %s", text, t->backend->name);
    report_say(t->report, "model", "%lld layers, %lld heads, %lld wide, context %lld, vocabulary %lld: %.2fM parameters",
               (long long)c->layers, (long long)c->heads, (long long)c->channels, (long long)c->context, (long long)c->vocab,
               (double)plan.parameters_count * 1e-6);
    report_say(t->report, "kernel", "attention %s: %s", t->attention->name, t->attention->summary);
    report_say(t->report, "memory", "parameters %s + gradients %s + optimizer %s + activations %s + scratch %s%s%s = %s",
               parts[0], parts[1], parts[2], parts[3], parts[4], program > 0 ? " + program " : "",
               program > 0 ? parts[5] : "", parts[6]);
}

/* Does what the checkpoint was trained with agree with what is there now? */
static int check_resumed(Trainer *t)
{
    const Options *o = &t->options;
    if (t->state.seed != (uint64_t)o->seed) {
        error_set(&t->error, "%s was trained with seed %llu, but config.json says %lld", t->start.path,
                  (unsigned long long)t->state.seed, (long long)o->seed);
        return STATUS_MACHINE;
    }
    if (o->steps < t->state.step) {
        error_set(&t->error, "--steps %lld lies before step %lld, which the run has reached", (long long)o->steps, (long long)t->state.step);
        return STATUS_OPTION;
    }
    if (t->corpus.train.count && t->state.data_fingerprint && t->state.data_fingerprint != t->corpus.fingerprint) {
        error_set(&t->error, "the training shards are not those that %s was trained on (%lld tokens in %zu now): its place in "
                  "the data means nothing there; to train its weights on other data, use --init", t->start.path,
                  (long long)t->corpus.train.tokens, t->corpus.train.count);
        return STATUS_MACHINE;
    }
    return 0;
}

/* Makes the model and fills it: from a checkpoint, with moments and state where the run resumes, or from the seed. */
static int setup_weights(Trainer *t)
{
    t->gpt = gpt_create(&t->config, &t->gpt_options, t->backend, t->stream, t->attention, t->error.text, sizeof t->error.text);
    if (!t->gpt) return STATUS_MACHINE;
    t->state.seed = (uint64_t)t->options.seed;
    t->state.validation_loss = (double)NAN;
    if (!*t->start.path) {
        gpt_init_random(t->gpt, (uint64_t)t->options.seed);
        return 0;
    }
    if (t->start.resumed ? checkpoint_load(t->start.path, t->gpt, &t->state, &t->error)
                         : model_load(t->start.path, t->gpt, &t->error))
        return STATUS_MACHINE;
    report_say(t->report, "start", "%s%s, step %lld", t->start.resumed ? "resuming from " : "", t->start.path,
               (long long)t->state.step);
    return t->start.resumed ? check_resumed(t) : 0;
}

static int setup_run(Trainer *t)
{
    const Options *o = &t->options;
    char path[FILES_PATH];
    if (!o->resume && run_open(&t->run, o->out, 0, &t->error)) return STATUS_OPTION;
    int status = setup_weights(t);
    if (status) return status;
    t->last = o->stop && o->stop < o->steps ? o->stop : o->steps;
    t->state.data_fingerprint = t->corpus.fingerprint;
    if (t->corpus.train.count) {
        t->loader = loader_open(&t->corpus.train, o->batch, o->seq, o->vocab, (uint64_t)o->seed, t->state.data_position,
                                &t->error);
        if (!t->loader) return STATUS_MACHINE;
    }
    /* From here on the run's files change: whatever can be refused has been. */
    if (t->run.dir && (options_make_absolute(&t->options, &t->error) ||
                       run_path(&t->run, "config.json", path, sizeof path, &t->error) ||
                       options_write_config(o, path, &t->error) ||
                       run_log_open(&t->run, t->start.resumed || !o->resume ? t->state.step : -1, &t->error) ||
                       checkpoint_prune(o->out, 0, &t->error))) /* 0: removes what a killed process left half done, nothing else */
        return STATUS_MACHINE;
    if (!t->loader) return 0;
    report_say(t->report, "run", "%lld updates of %lld tokens (%lld micro-steps of %lld x %lld): %.2f epochs%s%s",
               (long long)o->steps, (long long)o->batch_tokens, (long long)(o->batch_tokens / (o->batch * o->seq)),
               (long long)o->batch, (long long)o->seq,
               (double)o->steps * (double)o->batch_tokens / (double)(shards_windows(&t->corpus.train, o->seq) * o->seq),
               t->run.dir ? ", into " : "; no --out: nothing is saved", t->run.dir ? t->run.dir : "");
    return 0;
}

/* Everything up to the first step. Returns 0 or an exit status with the sentence in t->error. */
static int setup(Trainer *t)
{
    int (*const stages[])(Trainer *) = {setup_start, setup_model, setup_device, setup_attention, setup_data};
    for (size_t i = 0; i < sizeof stages / sizeof stages[0]; i++) {
        int status = stages[i](t);
        if (status) return status;
        if (t->options.list_attention && stages[i] == setup_attention) return 0;
    }
    print_plan(t);
    return setup_run(t);
}

/* --- the run ---------------------------------------------------------------------------------------------------------------- */

/* What is not finite, in words: a parameter; else what the last forward pass computed with them; else what came of it. */
static void name_nonfinite(const Trainer *t, char *text, size_t size)
{
    static const struct { GptBuffer buffer; const char *name; } places[] = {
        {GPT_GRADIENTS, "gradient of"}, {GPT_MOMENT1, "first moment of"}, {GPT_MOMENT2, "second moment of"},
    };
    char activation[64];
    const GptTensor *tensor = gpt_find_nonfinite(t->gpt, GPT_PARAMETERS);
    if (tensor) {
        snprintf(text, size, "parameter %s", tensor->name);
        return;
    }
    const char *where = gpt_find_nonfinite_activation(t->gpt, activation, sizeof activation), *name = "";
    for (size_t i = 0; i < sizeof places / sizeof places[0] && !where; i++) {
        tensor = gpt_find_nonfinite(t->gpt, places[i].buffer);
        if (tensor) where = places[i].name, name = tensor->name;
    }
    if (where) snprintf(text, size, "%s%s%s; parameters are finite", where, *name ? " " : "", name);
    else snprintf(text, size, "none, only the logits or the loss");
}

/* The sentence for a model whose update `step` gave something that is not finite. Returns -1. */
static int diverged(Trainer *t, int64_t step, const char *what)
{
    const char *fault = gpt_fault(t->gpt), *kept = *t->saved_path ? t->saved_path : "none", *kernel = t->options.attention;
    char found[256], check[640] = "";
    if (fault)
        return error_set(&t->error, "step %lld: attention %s failed: %s; last good checkpoint: %s", (long long)step,
                         t->attention->name, fault, kept);
    name_nonfinite(t, found, sizeof found);
    if (attention_is_path(kernel) && strncmp(found, "parameter ", 10))
        snprintf(check, sizeof check, " (the attention kernel is from outside: build/dev/bench_attention --device %s "
                 "--shape %lld,%lld,%lld,%lld %.300s checks it)", t->backend->device == ATTENTION_CPU ? "cpu" : "cuda",
                 (long long)t->options.batch, (long long)t->config.heads, (long long)t->options.seq,
                 (long long)(t->config.channels / t->config.heads), kernel);
    return error_set(&t->error, "step %lld: %s; first tensor that is not finite: %s%s; stopped without saving; last good "
                     "checkpoint: %s", (long long)step, what, found, check, kept);
}

/* Mean loss over eval_windows windows spread evenly over the validation set, whatever the batch. */
static int evaluate(Trainer *t)
{
    ValidationLoss loss;
    if (evaluate_shards(t->gpt, &t->corpus.val, t->options.batch, t->options.seq, t->corpus.eval_windows, &loss, &t->error))
        return -1;
    if (process_stop) return 0; /* nobody waits for the rest of it */
    if (!isfinite(loss.sum)) return diverged(t, t->state.step, "the validation loss is not finite");
    t->state.validation_loss = loss.sum / (double)loss.tokens;
    curve_add(&t->val_curve, t->state.step, t->state.validation_loss);
    printf("step %6lld/%lld  validation loss %.4f", (long long)t->state.step, (long long)t->options.steps, t->state.validation_loss);
    if (isfinite(t->corpus.entropy_rate))
        printf("  best possible %.4f (%+.1f%%)", t->corpus.entropy_rate,
               100 * (t->state.validation_loss / t->corpus.entropy_rate - 1));
    printf("\n");
    fflush(stdout);
    return run_log(&t->run, &t->error, "{\"step\": %lld, \"val_loss\": %.17g}", (long long)t->state.step, t->state.validation_loss);
}

/* How many examples of HellaSwag the model finds the right ending of. */
static int score(Trainer *t)
{
    HellaSwagScore found;
    if (evaluate_hellaswag(t->gpt, &t->corpus.questions, t->options.batch, &found, &t->error)) return -1;
    if (process_stop) return 0;
    double accuracy = (double)found.by_mean / (double)found.examples;
    printf("step %6lld/%lld  hellaswag %.4f: %lld of %lld\n", (long long)t->state.step, (long long)t->options.steps, accuracy,
           (long long)found.by_mean, (long long)found.examples);
    fflush(stdout);
    return run_log(&t->run, &t->error, "{\"step\": %lld, \"hellaswag\": %.17g, \"hellaswag_examples\": %lld}",
                   (long long)t->state.step, accuracy, (long long)found.examples);
}

/* Draws a sample, which depends on the seed, the step and the weights alone, and prints and logs it. */
static int sample(Trainer *t)
{
    const Options *o = &t->options;
    SampleChoice choice = {{o->temperature, o->top_p, o->top_k}, 1, o->sample_tokens, o->seq, -1,
                           random_mix((uint64_t)o->seed) ^ (uint64_t)t->state.step, 0, &process_stop};
    size_t length;
    char *text = sample_text(t->gpt, t->start.tokenizer, o->prompt, &choice, &length, &t->error);
    if (!text) return -1;
    size_t size = 6 * length + 3;
    char *quoted = (char *)malloc(size);
    int status = quoted ? 0 : error_set(&t->error, "not enough memory for a sample");
    if (quoted) {
        json_quote(quoted, size, text, length);
        printf("--- sample at step %lld\n", (long long)t->state.step);
        display_text(text, length);
        printf("\n---\n");
        fflush(stdout);
        status = run_log(&t->run, &t->error, "{\"step\": %lld, \"sample\": %s}", (long long)t->state.step, quoted);
    }
    free(quoted);
    free(text);
    return status;
}

/* Writes a checkpoint, unless the model is no longer worth one. */
static int save(Trainer *t)
{
    if (!t->run.dir) return 0;
    char path[FILES_PATH];
    for (int buffer = GPT_PARAMETERS; buffer <= GPT_MOMENT2; buffer++)
        if (buffer != GPT_GRADIENTS && gpt_find_nonfinite(t->gpt, (GptBuffer)buffer))
            return diverged(t, t->state.step, "the model or its moments are not finite");
    if (checkpoint_save(t->run.dir, t->gpt, &t->state, t->start.tokenizer, t->start.info.end_of_text, path, sizeof path,
                        &t->error)) {
        Error inner = t->error;
        return error_set(&t->error, "%.800s; last good checkpoint: %.200s", inner.text, *t->saved_path ? t->saved_path : "none");
    }
    snprintf(t->saved_path, sizeof t->saved_path, "%s", path);
    return checkpoint_prune(t->run.dir, t->options.keep, &t->error);
}

/* Takes the next update's batches from the loader to the device. A fault of the data is kept for the update that needs them. */
static void prefetch(Trainer *t)
{
    const int32_t *inputs, *targets;
    range_begin("prefetch");
    for (int64_t m = 0; m < t->gpt_options.micro_steps && !t->prefetch_failed; m++) {
        t->prefetch_failed = loader_next(t->loader, &inputs, &targets, &t->error);
        if (!t->prefetch_failed) gpt_upload(t->gpt, m, inputs, targets);
    }
    t->prefetched = 1;
    t->prefetch_position = loader_position(t->loader);
    range_end();
}

/* One update: micro-steps, clipping, AdamW; while the device is at it, the batches of the next. */
static int update(Trainer *t, double *loss, double *norm, double *lr)
{
    const Options *o = &t->options;
    int64_t number = t->state.step + 1, position;
    float norm_found;
    if (!t->prefetched) prefetch(t);
    if (t->prefetch_failed) return -1;
    position = t->prefetch_position;
    *lr = options_learning_rate(o, number);
    AdamwStep step;
    step.lr = (float)*lr;
    step.beta1 = (float)o->beta1;
    step.beta2 = (float)o->beta2;
    step.eps = (float)o->eps;
    step.weight_decay = (float)o->weight_decay;
    step.bias_correction1 = (float)(1 - pow(o->beta1, (double)number));
    step.bias_correction2 = (float)(1 - pow(o->beta2, (double)number));
    step.clip = (float)o->clip;
    range_begin("launch");
    gpt_step_launch(t->gpt, t->gpt_options.micro_steps, (float)(1.0 / (double)o->batch_tokens), &step);
    range_end();
    t->prefetched = 0;
    if (number < t->last) prefetch(t);
    range_begin("wait");
    gpt_step_finish(t->gpt, loss, &norm_found);
    range_end();
    *loss /= (double)o->batch_tokens;
    *norm = (double)norm_found;
    if (!isfinite(*loss)) return diverged(t, number, "the loss is not finite");
    if (!isfinite(*norm)) return diverged(t, number, "the gradient is not finite");
    t->state.step = number;
    t->state.data_position = position;
    return 0;
}

/* Is something due that comes every `every` updates and after the last? */
static int is_due(const Trainer *t, int64_t every)
{
    return every && (t->state.step % every == 0 || t->state.step == t->options.steps);
}

/* TFLOP/s of updates that take `seconds` each: 6 N + 12 L C T operations a token, N the parameters but for wpe. Source: Chowdhery et al.
 * 2022 (PaLM), appendix B; causal attention is counted whole, as there. */
static double model_tflops(const Trainer *t, double seconds)
{
    const GptConfig *c = &t->config;
    double N = (double)gpt_plan(c, &t->gpt_options, t->backend, t->attention).parameters_count - (double)(c->context * c->channels);
    double each = 6 * N + 12.0 * (double)c->layers * (double)c->channels * (double)t->options.seq;
    return 1e-12 * each * (double)t->options.batch_tokens / seconds;
}

/* Prints a line for the updates since the last one. */
static void print_step(const Trainer *t, double loss, double norm, double lr, double seconds, int64_t updates)
{
    char left[32], speed[64] = "";
    double each = seconds / (double)updates, tflops = model_tflops(t, each);
    display_duration(left, sizeof left, each * (double)(t->last - t->state.step));
    if (t->peak > 0) snprintf(speed, sizeof speed, "  MFU %.1f%%", 100 * tflops / t->peak);
    else if (t->backend->device == ATTENTION_CUDA) snprintf(speed, sizeof speed, "  %.1f TFLOP/s, MFU n/a", tflops);
    printf("step %6lld/%lld  loss %.4f  norm %.3f  lr %.2e  %.1f ms  %.0f tokens/s%s  %s left\n", (long long)t->state.step,
           (long long)t->options.steps, loss, norm, lr, 1e3 * each, (double)t->options.batch_tokens / each, speed, left);
    fflush(stdout);
}

/* Writes an update's line to log.jsonl. */
static int log_step(Trainer *t, double loss, double norm, double lr, double seconds)
{
    char mfu[32] = "null";
    if (t->peak > 0) snprintf(mfu, sizeof mfu, "%.6g", model_tflops(t, seconds) / t->peak);
    return run_log(&t->run, &t->error, "{\"step\": %lld, \"loss\": %.17g, \"lr\": %.9g, \"grad_norm\": %.9g, \"ms\": %.6g, "
                   "\"tokens_per_second\": %.6g, \"mfu\": %s}", (long long)t->state.step, loss, lr, norm, 1e3 * seconds,
                   (double)t->options.batch_tokens / seconds, mfu);
}

/* The data failed, the model did not: keeps what was trained. Returns -1 with the sentence of the data. */
static int save_after_fault(Trainer *t)
{
    Error fault = t->error;
    if (save(t)) return error_set(&t->error, "%.500s; nor could a checkpoint be written: %.400s", fault.text, "see above");
    return error_set(&t->error, "%.800s; checkpoint: %.200s", fault.text, t->run.dir ? t->saved_path : "none, as there is no --out");
}

/* Writes the run's page: where it stands, "done", "stopped", or what failed. */
static void write_report(Trainer *t, const char *how)
{
    char state[1280], duration[32];
    display_duration(duration, sizeof duration, t->state.seconds);
    snprintf(state, sizeof state, "step %lld of %lld, %s of training%s%.1000s", (long long)t->state.step,
             (long long)t->options.steps, duration, *how ? ": " : "", how);
    range_begin("report");
    report_write(t->report, &t->run, state, !*how);
    range_end();
}

/* A part of the run under its name in a profiler. */
static int ranged(const char *name, int (*part)(Trainer *), Trainer *t)
{
    range_begin(name);
    int status = part(t);
    range_end();
    return status;
}

/* Runs up to t->last or a signal. Returns 0, or -1 with the sentence in t->error. */
static int train(Trainer *t)
{
    const Options *o = &t->options;
    double loss, norm, lr, unprinted = 0;
    int64_t updates = 0;
    if (t->state.step == 0 && !t->start.resumed && o->eval_every && t->loader && ranged("evaluate", evaluate, t)) return -1;
    if (!o->steps && ranged("save", save, t)) return -1;
    write_report(t, "");
    while (t->state.step < t->last && !process_stop) {
        double began = display_clock();
        range_begin(t->train_curve.count ? "update" : "first update"); /* the first finds out and tries what is needed */
        int failed = update(t, &loss, &norm, &lr);
        range_end();
        if (failed) return t->prefetch_failed ? save_after_fault(t) : -1;
        double seconds = display_clock() - began;
        unprinted += seconds;
        t->state.seconds += seconds;
        curve_add(&t->train_curve, t->state.step, loss);
        if (log_step(t, loss, norm, lr, seconds)) return -1;
        updates++;
        if (o->print_every && (t->state.step % o->print_every == 0 || t->state.step == t->last)) {
            print_step(t, loss, norm, lr, unprinted, updates);
            unprinted = 0;
            updates = 0;
        }
        if (is_due(t, o->eval_every) && ranged("evaluate", evaluate, t)) return -1;
        if (t->corpus.questions.example_count && is_due(t, o->hellaswag_every) && ranged("hellaswag", score, t)) return -1;
        if (is_due(t, o->save_every) && ranged("save", save, t)) return -1;
        if (o->sample_every && t->state.step % o->sample_every == 0 && t->state.step < o->steps && ranged("sample", sample, t))
            return -1;
        if (is_due(t, o->eval_every) || is_due(t, o->save_every)) write_report(t, "");
    }
    return 0;
}

/* How the run ended: curve, figures, a last sample; or, where it was stopped early, how to go on. Returns the exit status. */
static int report(Trainer *t)
{
    const Options *o = &t->options;
    int early = t->state.step < o->steps;
    char duration[32];
    if (early && ranged("save", save, t)) return -1;
    curve_print(&t->train_curve, &t->val_curve, t->corpus.entropy_rate, 72, 16);
    display_duration(duration, sizeof duration, t->state.seconds);
    printf("%s at step %lld of %lld, %s of training", early ? "stopped" : "done", (long long)t->state.step, (long long)o->steps, duration);
    if (isfinite(t->state.validation_loss)) printf(", validation loss %.4f", t->state.validation_loss);
    if (isfinite(t->state.validation_loss) && isfinite(t->corpus.entropy_rate))
        printf(", best possible %.4f: %+.1f%%", t->corpus.entropy_rate,
               100 * (t->state.validation_loss / t->corpus.entropy_rate - 1));
    printf("\n");
    if (*t->saved_path) printf("checkpoint %s\n", t->saved_path);
    if (early && t->run.dir) {
        const char *const words[] = {t->program, "--out", t->run.dir, "--resume", NULL};
        display_command("go on with:", words);
    }
    if (!early && o->sample_every && t->train_curve.count && ranged("sample", sample, t)) return -1;
    write_report(t, early ? "stopped" : "done");
    return process_stop ? STATUS_STOPPED : 0;
}

static void trainer_free(Trainer *t)
{
    loader_close(t->loader);
    corpus_close(&t->corpus);
    start_close(&t->start);
    gpt_free(t->gpt);
    if (t->stream) t->backend->close(t->stream);
    run_close(&t->run);
    report_free(t->report);
    options_free(&t->options);
    free(t);
}

/* What train_gpt does besides training, by its first argument; each takes what follows and returns the exit status. */
static const struct { const char *name; int (*run)(int argc, char **argv, Error *error); } COMMANDS[] = {
    {"evaluate", evaluate_run},
    {"export", export_run},
    {"generate", generate_run},
    {"inspect", inspect_run},
};
enum { COMMAND_COUNT = sizeof COMMANDS / sizeof COMMANDS[0] };

int main(int argc, char **argv)
{
    process_prepare();
    cpu_settle_threads(argv);
    Trainer *t = (Trainer *)calloc(1, sizeof *t);
    if (!t) {
        fprintf(stderr, "train_gpt: not enough memory\n");
        return STATUS_MACHINE;
    }
    t->program = argv[0];
    t->run.lock = -1;
    t->report = report_create();
    size_t command = 0;
    while (command < COMMAND_COUNT && (argc < 2 || strcmp(argv[1], COMMANDS[command].name))) command++;
    int status = command < COMMAND_COUNT ? COMMANDS[command].run(argc - 1, argv + 1, &t->error)
                 : options_parse(&t->options, &t->given, argc, argv, &t->error) ? STATUS_OPTION : 0;
    if (command == COMMAND_COUNT && !status && t->options.help) {
        options_help();
    } else if (command == COMMAND_COUNT && !status) {
        status = setup(t);
        if (!status && !t->options.list_attention) {
            status = train(t) ? -1 : report(t);
            if (status < 0) write_report(t, t->error.text);
        }
        if (status < 0) status = STATUS_MACHINE;
    }
    if (!status) status = process_flush(&t->error);
    if (status && status != STATUS_STOPPED) {
        fflush(stdout);
        fprintf(stderr, "train_gpt: %s\n", t->error.text);
    }
    trainer_free(t);
    return status;
}
