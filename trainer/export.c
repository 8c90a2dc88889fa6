#include "trainer/export.h"

#include <getopt.h>
#include <stdio.h>
#include <string.h>

#include "attention/attention.h"
#include "data/files.h"
#include "data/model.h"
#include "layers/cpu.h"
#include "trainer/inference.h"
#include "trainer/process.h"

static const struct { const char *name, *help; ModelFormat format; } formats[] = {
    {"llmc", "one file as llm.c reads it, fp32 (version 3)", MODEL_LLMC},
    {"llmc-bf16", "one file as llm.c reads it, bf16 (version 5)", MODEL_LLMC_BF16},
    {"hf", "a directory that transformers opens, fp32", MODEL_HF},
    {"bf16", "a directory that transformers opens, bf16", MODEL_BF16},
};
enum { FORMATS = sizeof formats / sizeof formats[0] };
_Static_assert((int)FORMATS == (int)MODEL_FORMATS, "every format has a name");

static void print_help(void)
{
    printf("usage: train_gpt export --to FORMAT FROM OUT\n\nWrites the weights of FROM (a checkpoint, a run's directory: "
           "its newest checkpoint, a GPT-2 of Hugging\nFace, or a file of llm.c) to OUT, which must not exist. FORMAT is one "
           "of\n");
    for (int i = 0; i < FORMATS; i++) printf("  %-10s %s\n", formats[i].name, formats[i].help);
    printf("\nOption --help prints this.\n");
}

/* A model without gradients on the CPU: all that files need. */
static Gpt *model_open(const GptConfig *config, Stream *stream, Error *error)
{
    GptOptions options = {.batch = 1, .sequence = 1};
    AttentionShape shape = {.B = 1, .T = 1, .NH = config->heads, .HS = config->channels / config->heads};
    shape.scale = attention_scale(shape.HS);
    const AttentionKernel *kernel = attention_choose("auto", ATTENTION_CPU, &shape, 0, error->text, sizeof error->text);
    if (!kernel) return NULL;
    return gpt_create(config, &options, &backend_cpu_fp32, stream, kernel, error->text, sizeof error->text);
}

static int export_model(const char *source, const char *out, int format, Error *error)
{
    char from[FILES_PATH];
    BackendOptions choice = {0};
    ModelInfo info;
    int status = STATUS_MACHINE;
    if (inference_path(source, from, sizeof from, error) || model_inspect(from, &info, error)) return STATUS_MACHINE;
    error->text[0] = 0;
    Tokenizer *tokenizer = model_tokenizer(from, error);
    if (!tokenizer && error->text[0]) return STATUS_MACHINE;
    Stream *stream = backend_cpu_fp32.open(0, &choice, error->text, sizeof error->text);
    Gpt *gpt = NULL;
    if (tokenizer && tokenizer_vocab(tokenizer) > info.config.vocab)
        error_set(error, "%s: its tokenizer has %lld tokens, its model only %lld", from,
                  (long long)tokenizer_vocab(tokenizer), (long long)info.config.vocab);
    else if (stream && (gpt = model_open(&info.config, stream, error)) && !model_load(from, gpt, error) &&
             !model_export(out, formats[format].format, gpt, tokenizer, info.end_of_text, error))
        status = 0;
    if (!status) printf("%s: %s, from %s\n", out, formats[format].help, from);
    gpt_free(gpt);
    if (stream) backend_cpu_fp32.close(stream);
    tokenizer_close(tokenizer);
    return status;
}

int export_run(int argc, char **argv, Error *error)
{
    static const struct option longs[] = {{"to", required_argument, NULL, 't'}, {"help", no_argument, NULL, 'h'}, {0}};
    const char *to = NULL;
    int code, format = 0;
    opterr = 0;
    optind = 0;
    while ((code = getopt_long(argc, argv, "+:h", longs, NULL)) != -1) {
        if (code == 'h') {
            print_help();
            return 0;
        }
        if (code == 't') {
            to = optarg;
            continue;
        }
        if (code == ':') error_set(error, "export: --to needs a value");
        else error_set(error, "export: unknown option '%s' (export --help lists all)", argv[optind - 1]);
        return STATUS_OPTION;
    }
    while (to && format < FORMATS && strcmp(to, formats[format].name)) format++;
    if (!to) error_set(error, "export: --to is missing: llmc, llmc-bf16, hf or bf16");
    else if (format == FORMATS) error_set(error, "export: --to: got '%s', expected llmc, llmc-bf16, hf or bf16", to);
    else if (argc - optind != 2)
        error_set(error, "export: got %d paths, expected two: the model to read and what to write", argc - optind);
    else if (!*argv[optind] || !*argv[optind + 1]) error_set(error, "export: a path is empty, expected the model and OUT");
    else return export_model(argv[optind], argv[optind + 1], format, error);
    return STATUS_OPTION;
}
