#include "data/hellaswag.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "data/files.h"

enum { HEADER_BYTES = 1024, MAGIC = 20240522, VERSION = 1, START = 65535, EXAMPLES_MOST = 65536 };

/* What reading goes through: the words of the file, example by example. */
typedef struct Reader {
    HellaSwag *set;
    const char *path;
    int64_t vocab, window;
    int64_t count, longest; /* words of the file; of an example at most, as the header says */
    int64_t example;        /* number of the present one */
    int64_t at, end;        /* the word to be read; the one behind the example's last */
    int64_t row_capacity;
    Error *error;
} Reader;

/* The sentence of a fault in the present example. Returns -1. */
__attribute__((format(printf, 2, 3)))
static int fault(const Reader *r, const char *format, ...)
{
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    return error_set(r->error, "%s: example %lld, at byte %lld: %s", r->path, (long long)r->example,
                     (long long)(HEADER_BYTES + 2 * r->at), text);
}

/* --- the file --------------------------------------------------------------------------------------------------------- */

static uint32_t header_word(const unsigned char *header, int i)
{
    const unsigned char *at = header + 4 * i;
    return (uint32_t)at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
}

static int check_header(Reader *r, const unsigned char *header)
{
    uint32_t magic = header_word(header, 0), version = header_word(header, 1), count = header_word(header, 2);
    uint32_t longest = header_word(header, 3);
    if (magic != MAGIC)
        return error_set(r->error, "%s: begins with the number %u, expected %d: it is no evaluation file of llm.c", r->path,
                         magic, MAGIC);
    if (version != VERSION)
        return error_set(r->error, "%s: has version %u, expected %d", r->path, version, VERSION);
    if (count < 1 || count > EXAMPLES_MOST)
        return error_set(r->error, "%s: its header counts %u examples, expected 1 to %d", r->path, count, EXAMPLES_MOST);
    r->set->example_count = count;
    r->longest = longest / 2;
    return 0;
}

/* Reads header and words. */
static int read_file(Reader *r, FILE *file)
{
    unsigned char header[HEADER_BYTES];
    struct stat status;
    if (fstat(fileno(file), &status)) return error_set(r->error, "%s: %s", r->path, strerror(errno));
    if (!S_ISREG(status.st_mode)) return error_set(r->error, "%s: is no regular file", r->path);
    size_t bytes = (size_t)status.st_size;
    if (bytes < HEADER_BYTES || fread(header, 1, HEADER_BYTES, file) != HEADER_BYTES)
        return error_set(r->error, "%s: has %zu bytes, expected a header of %d", r->path, bytes, HEADER_BYTES);
    if (check_header(r, header)) return -1;
    if (bytes % 2)
        return error_set(r->error, "%s: has %zu bytes, expected an even number: it is cut short", r->path, bytes);
    bytes -= HEADER_BYTES;
    r->count = (int64_t)(bytes / 2);
    r->set->words = (uint16_t *)malloc(bytes ? bytes : 1);
    r->set->examples = (HellaSwagExample *)calloc((size_t)r->set->example_count, sizeof *r->set->examples);
    if (!r->set->words || !r->set->examples) return error_set(r->error, "%s: not enough memory to read it", r->path);
    if (fread(r->set->words, 1, bytes, file) != bytes)
        return error_set(r->error, "%s: cannot be read: %s", r->path, ferror(file) ? strerror(errno) : "it became shorter");
    for (int64_t i = 0; i < r->count; i++) { /* to this machine's order of bytes */
        const unsigned char *at = (const unsigned char *)&r->set->words[i];
        r->set->words[i] = (uint16_t)(at[0] | at[1] << 8);
    }
    return 0;
}

/* --- an example ------------------------------------------------------------------------------------------------------- */

/* Tokens behind their number: *tokens gets where they are, in the file's words, *count how many. */
static int read_tokens(Reader *r, const char *what, const uint16_t **tokens, int64_t *count)
{
    const uint16_t *words = r->set->words;
    if (r->at == r->end) return fault(r, "the example ends before its %s", what);
    *count = words[r->at];
    *tokens = words + r->at + 1;
    if (!*count) return fault(r, "its %s is empty", what);
    if (*count > r->end - r->at - 1)
        return fault(r, "its %s has %lld tokens, %lld fit in its bytes", what, (long long)*count,
                     (long long)(r->end - r->at - 1));
    for (int64_t i = 0; i < *count; i++)
        if ((*tokens)[i] >= r->vocab) {
            r->at += 1 + i;
            return fault(r, "its %s holds the token %d, the vocabulary has %lld", what, (*tokens)[i], (long long)r->vocab);
        }
    r->at += 1 + *count;
    return 0;
}

static int add_row(Reader *r, HellaSwagRow row)
{
    HellaSwag *set = r->set;
    if (set->row_count == r->row_capacity) {
        int64_t larger = 2 * r->row_capacity + 256;
        HellaSwagRow *grown = (HellaSwagRow *)realloc(set->rows, (size_t)larger * sizeof *grown);
        if (!grown) return error_set(r->error, "%s: not enough memory to read it", r->path);
        set->rows = grown;
        r->row_capacity = larger;
    }
    set->rows[set->row_count++] = row;
    return 0;
}

/* Its first five words: bytes, number, label and endings. */
static int read_start(Reader *r, HellaSwagExample *example)
{
    const uint16_t *words = r->set->words + r->at;
    int64_t left = r->count - r->at;
    if (left < 5) return fault(r, "the file ends %lld bytes into it: it is cut short", (long long)(2 * left));
    if (words[0] != START) return fault(r, "it begins with %d, expected %d", words[0], START);
    if (words[1] % 2 || words[1] < 10) return fault(r, "it has %d bytes, expected an even number from 10 on", words[1]);
    if (words[1] / 2 > left)
        return fault(r, "it has %d bytes, the file ends %lld bytes into it: it is cut short", words[1],
                     (long long)(2 * left));
    if (words[1] / 2 > r->longest)
        return fault(r, "it has %d bytes, the header says the longest has %lld", words[1], (long long)(2 * r->longest));
    if (words[2] != r->example) return fault(r, "it has the number %d", words[2]);
    if (words[4] < 2) return fault(r, "it has %d endings, expected at least 2", words[4]);
    if (words[3] >= words[4]) return fault(r, "its right ending is number %d of %d, counted from 0", words[3], words[4]);
    example->label = words[3];
    example->count = words[4];
    example->first = r->set->row_count;
    r->end = r->at + words[1] / 2;
    r->at += 5;
    return 0;
}

static int read_example(Reader *r, HellaSwagExample *example)
{
    HellaSwagRow row = {NULL, NULL, 0, 0};
    if (read_start(r, example) || read_tokens(r, "context", &row.context, &row.context_count)) return -1;
    for (int64_t i = 0; i < example->count; i++) {
        if (read_tokens(r, "ending", &row.ending, &row.ending_count)) return -1;
        int64_t tokens = row.context_count + row.ending_count;
        if (tokens > r->window + 1)
            return fault(r, "context and ending %lld have %lld tokens, the model sees %lld at a time", (long long)i,
                         (long long)tokens, (long long)r->window);
        if (add_row(r, row)) return -1;
    }
    if (r->at != r->end)
        return fault(r, "%lld of its bytes lie behind its endings", (long long)(2 * (r->end - r->at)));
    return 0;
}

int hellaswag_open(HellaSwag *set, const char *path, int64_t vocab, int64_t window, Error *error)
{
    Reader reader = {.set = set, .path = path, .vocab = vocab, .window = window, .error = error};
    memset(set, 0, sizeof *set);
    FILE *file = files_open(path);
    if (!file) return error_set(error, "%s: %s", path, strerror(errno));
    int bad = read_file(&reader, file);
    fclose(file);
    for (; !bad && reader.example < set->example_count; reader.example++)
        bad = read_example(&reader, &set->examples[reader.example]);
    if (!bad && reader.at < reader.count)
        bad = error_set(error, "%s: %lld bytes lie behind its %lld examples", path,
                        (long long)(2 * (reader.count - reader.at)), (long long)set->example_count);
    if (bad) hellaswag_close(set);
    return bad;
}

void hellaswag_close(HellaSwag *set)
{
    free(set->words);
    free(set->examples);
    free(set->rows);
    memset(set, 0, sizeof *set);
}
