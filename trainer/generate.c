/* generate.c - a prompt and a model become text on stdout while it is written.
 *
 * Several texts are written at the same time, and stdout has one place. So the first is shown as it comes, the others wait;
 * when it is complete the next is shown, what there is of it at once. Bytes become UTF-8 only here: a token may end within a
 * character, whose bytes are then held back until the rest has come.
 */
#include "trainer/generate.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "data/unicode.h"
#include "trainer/display.h"
#include "trainer/inference.h"
#include "trainer/process.h"
#include "trainer/sample.h"
#include "trainer/table.h"

enum { SHOW_TEXT, SHOW_TOKENS };

typedef struct GenerateOptions {
    const char *init, *tokenizer, *prompt, *prompt_tokens;
    int64_t tokens, samples, top_k, seed, show, no_prompt, no_stop, no_cache, help;
    double temperature, top_p;
    DeviceChoice place;
} GenerateOptions;

#define FIELD(name) offsetof(GenerateOptions, name)

static const OptionRow TABLE[] = {
    {"init", OPTION_TEXT, FIELD(init), "", 0, 0, "PATH", 0,
     "the model: a checkpoint, a run's directory (its newest), a GPT-2 of Hugging Face, or llm.c's .bin"},
    {"tokenizer", OPTION_TEXT, FIELD(tokenizer), "", 0, 0, "PATH", 0,
     "tokenizer.bin, or a directory with a tokenizer; without it, the one beside the model"},
    {"prompt", OPTION_TEXT, FIELD(prompt), "", 0, 0, "TEXT|-", 0,
     "what is continued; -: standard input, to its last byte; empty: the end-of-text token"},
    {"prompt-tokens", OPTION_TEXT, FIELD(prompt_tokens), "", 0, 0, "LIST", 0,
     "the same as numbers of tokens, separated by commas or blanks"},
    {"tokens", OPTION_COUNT, FIELD(tokens), "256", 1, 1e9, "N", 0, "tokens to write at most"},
    {"samples", OPTION_COUNT, FIELD(samples), "1", 1, 65536, "N", 0, "texts to write, at the same time"},
    {"temperature", OPTION_REAL, FIELD(temperature), "0.8", 0, 1e6, "X", 0,
     "divides the logits; 0: always the likeliest token"},
    {"top-k", OPTION_COUNT, FIELD(top_k), "0", 0, COUNT_MOST, "K", 0, "draw from the K likeliest tokens only; 0: from all"},
    {"top-p", OPTION_REAL, FIELD(top_p), "1", 1e-6, 1, "P", 0,
     "draw from the fewest likeliest tokens that have the probability P together; 1: from all"},
    {"seed", OPTION_COUNT, FIELD(seed), "1337", 0, COUNT_MOST, "N", 0, "of what is drawn; the same seed, the same text"},
    {"no-stop", OPTION_FLAG, FIELD(no_stop), "0", 0, 1, NULL, 0, "write on after the end-of-text token"},
    {"no-prompt", OPTION_FLAG, FIELD(no_prompt), "0", 0, 1, NULL, 0, "print what was written without the prompt before it"},
    {"show", OPTION_CHOICE, FIELD(show), "text", 0, 0, "text|tokens", 0,
     "print text (UTF-8), or the numbers of its tokens, a line a text"},
    {"no-cache", OPTION_FLAG, FIELD(no_cache), "0", 0, 1, NULL, 0,
     "read all of the text anew for every token, to compare: slow, the same tokens"},
    {"device", OPTION_TEXT, FIELD(place.device), "auto", 0, 0, "auto|cpu|cuda[:N]", 0, "where to compute"},
    {"dtype", OPTION_CHOICE, FIELD(place.dtype), "fp32", 0, 0, "fp32|bf16", 0, "type of weights and activations"},
    {"attention", OPTION_TEXT, FIELD(place.attention), "auto", 0, 0, "auto|NAME|FILE.so", 0,
     "attention kernel by which a prompt is read"},
    {"tf32", OPTION_FLAG, FIELD(place.tf32), "0", 0, 1, NULL, 0,
     "let fp32 products on a GPU, attention's too, round their factors to TF32"},
    {"help", OPTION_FLAG, FIELD(help), "0", 0, 1, NULL, 0, "print this"},
};
enum { ROWS = sizeof TABLE / sizeof TABLE[0] };
_Static_assert((int)ROWS <= (int)TABLE_ROWS_MOST, "room for every option");

static void print_help(void)
{
    printf("usage: train_gpt generate --init PATH [--prompt TEXT] [options]\n\n"
           "Writes text with a model, to standard output while it comes. Ends at the end-of-text token, or after --tokens.\n"
           "A text that fills the context goes on: its older half is forgotten, the rest read anew.\n"
           "Examples:\n  ./train_gpt generate --init runs/book-1 --prompt 'Once upon a time'\n"
           "  ./train_gpt generate --init ~/gpt2 --prompt - --samples 4 --top-k 50 < prompt.txt\n\n");
    table_help(TABLE, ROWS);
}

/* --- printing --------------------------------------------------------------------------------------------------------- */

/* One text: its bytes or, shown as tokens, its numbers. */
typedef struct Text {
    TextBuffer buffer;
    size_t shown;
    int64_t count; /* tokens drawn */
    int begun, complete;
} Text;

typedef struct Printer {
    const GenerateOptions *options;
    const Tokenizer *tokenizer;
    int32_t end_of_text;
    Text *texts;     /* (samples) */
    int64_t showing; /* the first that is not shown to its end */
    int to_terminal; /* control bytes are not for it */
    int fault;       /* errno where stdout failed */
    double first;    /* when the first token came, 0 before */
} Printer;

/* Bytes at the start of text that begin a character which they do not complete: 0 where they begin none. */
static size_t utf8_unfinished(const unsigned char *text, size_t length)
{
    for (size_t size = length < 3 ? length : 3; size; size--)
        for (int filler = 0x80; filler <= 0xBF; filler += 0x3F) { /* one of these ends every beginning that can be ended */
            unsigned char tried[4];
            memset(tried, filler, sizeof tried);
            memcpy(tried, text, size);
            if (utf8_length(tried, sizeof tried) > size) return size;
        }
    return 0;
}

/* Prints text as UTF-8 and returns how many bytes were printed: all of them where it is final, else all but a character that
 * is not complete. What is no UTF-8 becomes U+FFFD. */
static size_t print_utf8(const unsigned char *text, size_t length, int final, int to_terminal)
{
    size_t at = 0;
    while (at < length) {
        size_t size = utf8_length(text + at, length - at), unfinished = 0;
        if (!size) {
            unfinished = utf8_unfinished(text + at, length - at);
            if (unfinished == length - at && !final) break;
            fputs("\xEF\xBF\xBD", stdout);
            at += unfinished ? unfinished : 1;
            continue;
        }
        uint32_t code = utf8_read(text + at, size);
        int control = code < 32 ? code != '\n' && code != '\t' : code >= 127 && code < 160;
        if (control && to_terminal) putchar('?');
        else fwrite(text + at, 1, size, stdout);
        at += size;
    }
    return at;
}

/* Shows what there is to show: of the text whose turn it is, and of those after it where it is complete. */
static void printer_show(Printer *printer)
{
    const GenerateOptions *o = printer->options;
    if (printer->fault) return; /* a second write to a pipe without a reader would end the process */
    for (; printer->showing < o->samples; printer->showing++) {
        Text *text = &printer->texts[printer->showing];
        TextBuffer *buffer = &text->buffer;
        if (!text->begun && o->samples > 1 && o->show == SHOW_TEXT)
            printf("--- sample %lld\n", (long long)printer->showing + 1);
        text->begun = 1;
        text->shown += print_utf8((const unsigned char *)buffer->bytes + text->shown, buffer->length - text->shown,
                                  text->complete, printer->to_terminal);
        if (!text->complete) break;
        if (!buffer->length || buffer->bytes[buffer->length - 1] != '\n') putchar('\n');
    }
    if ((fflush(stdout) || ferror(stdout)) && !printer->fault) printer->fault = errno ? errno : EIO;
}

/* A token joins a text. */
static void text_add(const Printer *printer, Text *text, int32_t token)
{
    char number[16];
    if (printer->options->show == SHOW_TOKENS) {
        int digits = snprintf(number, sizeof number, "%s%d", text->buffer.length ? " " : "", (int)token);
        text_append(&text->buffer, number, (size_t)digits);
    } else if (token != printer->end_of_text || printer->options->no_stop) {
        size_t count;
        const char *bytes = tokenizer_decode(printer->tokenizer, token, &count);
        text_append(&text->buffer, bytes, count);
    }
}

/* A token was drawn. */
static void printer_take(void *taker, int64_t sample, int32_t token)
{
    Printer *printer = (Printer *)taker;
    const GenerateOptions *o = printer->options;
    Text *text = &printer->texts[sample];
    if (printer->first == 0) printer->first = display_clock();
    text_add(printer, text, token);
    text->count++;
    text->complete = text->count == o->tokens || (token == printer->end_of_text && !o->no_stop);
    if (sample == printer->showing) printer_show(printer);
    if ((text->buffer.failed || printer->fault) && !process_stop) process_stop = SIGTERM; /* no use in going on */
}

/* --- the prompt ------------------------------------------------------------------------------------------------------- */

/* All of standard input, *length bytes; the caller frees it. NULL with a sentence. */
static char *read_input(size_t *length, Error *error)
{
    enum { MOST = 64 << 20 };
    char *text = NULL;
    size_t capacity = 0, got = 1;
    *length = 0;
    while (got && *length <= MOST) {
        if (*length == capacity) {
            char *grown = (char *)realloc(text, capacity = 2 * capacity + 65536);
            if (!grown) break;
            text = grown;
        }
        got = fread(text + *length, 1, capacity - *length, stdin);
        *length += got;
    }
    if (!got && !ferror(stdin)) return text;
    if (*length > MOST) error_set(error, "--prompt -: standard input has more than %d MiB", MOST >> 20);
    else error_set(error, "--prompt -: standard input cannot be read: %s", strerror(ferror(stdin) ? errno : ENOMEM));
    free(text);
    return NULL;
}

/* Numbers below V from a list; the caller frees them. NULL with a sentence. */
static int32_t *read_numbers(const char *list, int64_t V, int64_t *count, Error *error)
{
    int32_t *tokens = (int32_t *)malloc((strlen(list) / 2 + 1) * sizeof *tokens);
    const char *at = list + strspn(list, ", \t\n");
    *count = 0;
    while (tokens && *at) {
        char *end;
        long long number = strtoll(at, &end, 10);
        size_t gap = strspn(end, ", \t\n");
        if (end == at || (*end && !gap) || number < 0 || number >= V) {
            error_set(error, "--prompt-tokens: number %lld of the list is '%.*s', expected a token from 0 to %lld",
                      (long long)*count + 1, (int)strcspn(at, ", \t\n"), at, (long long)V - 1);
            free(tokens);
            return NULL;
        }
        tokens[(*count)++] = (int32_t)number;
        at = end + gap;
    }
    if (tokens && *count) return tokens;
    error_set(error, tokens ? "--prompt-tokens: the list is empty" : "not enough memory");
    free(tokens);
    return NULL;
}

/* The tokens of --prompt, *count of them; the caller frees them. NULL with a sentence. */
static int32_t *read_prompt(const GenerateOptions *o, const Inference *m, int64_t *count, Error *error)
{
    size_t length = strlen(o->prompt);
    if (!m->tokenizer) {
        error_set(error, "--prompt needs a tokenizer, and there is none beside %s: give --tokenizer or --prompt-tokens",
                  m->path);
        return NULL;
    }
    if (strcmp(o->prompt, "-")) return sample_prompt(m->tokenizer, o->prompt, length, count, error);
    char *text = read_input(&length, error);
    int32_t *tokens = text ? sample_prompt(m->tokenizer, text, length, count, error) : NULL;
    free(text);
    return tokens;
}

/* What is continued, in tokens, *count of them; the caller frees them. NULL with a sentence. */
static int32_t *find_prompt(const GenerateOptions *o, const Inference *m, int32_t end_of_text, int64_t *count, Error *error)
{
    if (*o->prompt && *o->prompt_tokens) {
        error_set(error, "--prompt and --prompt-tokens exclude each other");
        return NULL;
    }
    if (*o->prompt_tokens) return read_numbers(o->prompt_tokens, m->info.config.vocab, count, error);
    if (*o->prompt) return read_prompt(o, m, count, error);
    int32_t *tokens = (int32_t *)malloc(sizeof *tokens);
    if (tokens && end_of_text >= 0) {
        tokens[0] = end_of_text;
        *count = 1;
        return tokens;
    }
    error_set(error, "%s: no end-of-text token is known to begin with: give --prompt or --prompt-tokens", m->path);
    free(tokens);
    return NULL;
}

/* --- the command ------------------------------------------------------------------------------------------------------ */

/* The sentence for texts that do not fit beside each other. */
static int check_memory(const GenerateOptions *o, const Inference *m, const GptOptions *wanted, Error *error)
{
    GptOptions one = *wanted;
    int64_t available = m->backend->memory_available(m->stream);
    double total = (double)gpt_plan(&m->info.config, wanted, m->backend, m->attention).total;
    char needed[32], least[32], there[32];
    if (total <= (double)available) return 0;
    one.cache = 1;
    display_bytes(needed, sizeof needed, total);
    display_bytes(least, sizeof least, (double)gpt_plan(&m->info.config, &one, m->backend, m->attention).total);
    display_bytes(there, sizeof there, (double)available);
    error_set(error, "not enough memory: --samples %lld over %lld tokens need %s, one sample %s, and %s are free",
              (long long)o->samples, (long long)wanted->sequence, needed, least, there);
    return STATUS_MACHINE;
}

/* The line about what was written, to stderr. */
static void print_speed(const Printer *printer, double began, double ended, int64_t prompt_count)
{
    int64_t drawn = 0;
    for (int64_t s = 0; s < printer->options->samples; s++) drawn += printer->texts[s].count;
    fprintf(stderr, "%lld token%s in %.2f s", (long long)drawn, drawn == 1 ? "" : "s", ended - began);
    if (drawn > printer->options->samples) { /* the first of each came of the prompt */
        double speed = (double)(drawn - printer->options->samples) / (ended - printer->first);
        fprintf(stderr, ", %.*f tokens/s after %.0f ms for the prompt's %lld", speed < 10 ? 3 : 1, speed,
                1e3 * (printer->first - began), (long long)prompt_count);
    }
    fprintf(stderr, "\n");
}

/* Draws and shows the texts, into printer->texts (samples). Returns 0 or the exit status. */
static int print_texts(Printer *printer, Gpt *gpt, const int32_t *prompt, int64_t count, int64_t window, Error *error)
{
    const GenerateOptions *o = printer->options;
    SampleChoice choice = {{o->temperature, o->top_p, o->top_k}, o->samples, o->tokens, window,
                           o->no_stop ? -1 : printer->end_of_text, (uint64_t)o->seed, (int)o->no_cache, &process_stop};
    int failed = 0;
    for (int64_t s = 0; s < o->samples && !o->no_prompt; s++)
        for (int64_t i = 0; i < count; i++) text_add(printer, &printer->texts[s], prompt[i]);
    printer_show(printer);
    double began = display_clock();
    int bad = sample_run(gpt, prompt, count, &choice, printer_take, printer, error);
    double ended = display_clock();
    for (int64_t s = 0; s < o->samples; s++) { /* of texts that a signal or a fault ended, what was held back is shown too */
        printer->texts[s].complete = 1;
        failed = failed || printer->texts[s].buffer.failed;
    }
    printer_show(printer);
    if (!bad && failed) bad = error_set(error, "not enough memory for the text");
    if (!bad && printer->fault && process_stop != SIGPIPE)
        bad = error_set(error, "standard output cannot be written: %s", strerror(printer->fault));
    if (bad) return STATUS_MACHINE;
    if (process_stop) return STATUS_STOPPED;
    print_speed(printer, began, ended, count);
    return 0;
}

static int write_texts(const GenerateOptions *o, const Inference *m, const int32_t *prompt, int64_t count,
                       int32_t end_of_text, int64_t window, Error *error)
{
    Printer printer = {o, m->tokenizer, end_of_text, NULL, 0, isatty(STDOUT_FILENO), 0, 0};
    int status = STATUS_MACHINE;
    printer.texts = (Text *)calloc((size_t)o->samples, sizeof *printer.texts);
    if (printer.texts) status = print_texts(&printer, m->gpt, prompt, count, window, error);
    else error_set(error, "not enough memory for %lld samples", (long long)o->samples);
    for (int64_t s = 0; s < o->samples && printer.texts; s++) free(printer.texts[s].buffer.bytes);
    free(printer.texts);
    return status;
}

static int generate(const GenerateOptions *o, Inference *m, Error *error)
{
    int32_t end_of_text = m->tokenizer ? tokenizer_end_of_text(m->tokenizer) : m->info.end_of_text;
    int64_t count, context = m->info.config.context;
    if (o->show == SHOW_TEXT && !m->tokenizer) {
        error_set(error, "there is no tokenizer beside %s to print text with: give --tokenizer or --show tokens", m->path);
        return STATUS_OPTION;
    }
    int32_t *prompt = find_prompt(o, m, end_of_text, &count, error);
    if (prompt && count > context) {
        error_set(error, "the prompt has %lld tokens, the context of %s holds %lld", (long long)count, m->path,
                  (long long)context);
        free(prompt);
        prompt = NULL;
    }
    if (!prompt) return STATUS_OPTION;
    int64_t window = o->tokens < context - count ? count + o->tokens : context;
    GptOptions options = {.batch = 1, .sequence = window, .cache = o->no_cache ? 0 : o->samples,
                          .tf32 = (int)o->place.tf32};
    int status = inference_place(m, &o->place, &options, error);
    if (!status) status = check_memory(o, m, &options, error);
    if (!status) status = inference_load(m, &options, error);
    if (!status) status = write_texts(o, m, prompt, count, end_of_text, window, error);
    free(prompt);
    return status;
}

int generate_run(int argc, char **argv, Error *error)
{
    GenerateOptions options;
    Inference inference;
    unsigned char given[ROWS];
    int used = table_parse(&options, TABLE, ROWS, given, "generate", argc, argv, error);
    if (used < 0) return STATUS_OPTION;
    if (options.help) {
        print_help();
        return 0;
    }
    if (used < argc) error_set(error, "generate: '%s' belongs to no option (generate --help lists all)", argv[used]);
    else if (!*options.init) error_set(error, "generate: --init is missing: the model to write with");
    if (used < argc || !*options.init) return STATUS_OPTION;
    int status = inference_find(&inference, options.init, options.tokenizer, error);
    if (!status) status = generate(&options, &inference, error);
    inference_close(&inference);
    return status;
}
