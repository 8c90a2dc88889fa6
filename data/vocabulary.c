/* vocabulary.c - from and to Hugging Face's tokenizer files.
 *
 * A token there is a string in which every byte is one character: the visible ones of Latin-1 stand for themselves, the
 * other 68 bytes for U+0100 onwards. Special tokens are written as they are.
 */
#include "data/vocabulary.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "data/files.h"
#include "data/json.h"
#include "data/unicode.h"

enum { TOKENS_MOST = 1 << 24, TOKEN_BYTES = 255, ALPHABET = 324, LINE_BYTES = 4 * TOKEN_BYTES + 8 };

static const char *const end_names[] = {"<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "[SEP]"};

static int fail_memory(const char *path, Error *error) { return error_set(error, "%s: not enough memory for it", path); }

/* ---------------------------------------------------------------------------------------------------------- the alphabet */

/* Character of each byte. */
static void alphabet_fill(uint32_t characters[256])
{
    uint32_t next = 256;
    for (uint32_t b = 0; b < 256; b++) {
        int visible = (b >= '!' && b <= '~') || (b >= 0xA1 && b <= 0xAC) || b >= 0xAE;
        characters[b] = visible ? b : next++;
    }
}

/* The bytes that `length` bytes of text stand for, to out; *count of them. Returns 0, or -1 where a character stands for no
 * byte or there are more than TOKEN_BYTES. */
static int alphabet_read(const uint32_t characters[256], const char *text, size_t length, uint8_t *out, size_t *count)
{
    int16_t byte_of[ALPHABET];
    memset(byte_of, -1, sizeof byte_of);
    for (int b = 0; b < 256; b++) byte_of[characters[b]] = (int16_t)b;
    *count = 0;
    for (size_t at = 0, size; at < length; at += size) {
        const unsigned char *place = (const unsigned char *)text + at;
        size = utf8_length(place, length - at);
        uint32_t code = size ? utf8_read(place, size) : ALPHABET;
        if (code >= ALPHABET || byte_of[code] < 0 || *count == TOKEN_BYTES) return -1;
        out[(*count)++] = (uint8_t)byte_of[code];
    }
    return 0;
}

/* Bytes as characters, to out with room for 2 a byte and a closing 0. */
static size_t alphabet_write(const uint32_t characters[256], const uint8_t *bytes, size_t count, char *out)
{
    size_t length = 0;
    for (size_t i = 0; i < count; i++) length += utf8_write(out + length, characters[bytes[i]]);
    out[length] = 0;
    return length;
}

/* --------------------------------------------------------------------------------------------------------------- reading */

/* A token by its string. */
typedef struct Named {
    const char *text; /* in a JSON document */
    size_t length;
    int32_t token;
    int literal; /* a special token: its string is what it says */
} Named;

/* A tokenizer in the making. */
typedef struct Reader {
    const char *path; /* of the file that is being read */
    uint32_t characters[256];
    Named *names;     /* (count) by string */
    size_t count, capacity;
    TokenizerParts parts;
    size_t merges_capacity;
} Reader;

static int compare_strings(const char *a, size_t a_length, const char *b, size_t b_length)
{
    int order = memcmp(a, b, a_length < b_length ? a_length : b_length);
    return order ? order : (a_length > b_length) - (a_length < b_length);
}

static int compare_names(const void *a, const void *b)
{
    const Named *x = a, *y = b;
    return compare_strings(x->text, x->length, y->text, y->length);
}

static int32_t find_token(const Reader *r, const char *text, size_t length)
{
    Named key = {.text = text, .length = length};
    const Named *found = bsearch(&key, r->names, r->count, sizeof *r->names, compare_names);
    return found ? found->token : -1;
}

static int add_name(Reader *r, const char *text, size_t length, int64_t token, int literal, Error *error)
{
    if (token < 0 || token >= TOKENS_MOST)
        return error_set(error, "%s: the token \"%.100s\" has number %lld, expected 0 to %d", r->path, text,
                         (long long)token, TOKENS_MOST - 1);
    if (r->count == r->capacity) {
        size_t capacity = r->capacity ? 2 * r->capacity : 1024;
        Named *grown = realloc(r->names, capacity * sizeof *grown);
        if (!grown) return fail_memory(r->path, error);
        r->names = grown;
        r->capacity = capacity;
    }
    r->names[r->count++] = (Named){text, length, (int32_t)token, literal};
    if (token >= r->parts.vocab) r->parts.vocab = token + 1;
    return 0;
}

/* Takes the members of an object of strings with numbers. */
static int add_vocabulary(Reader *r, const JsonValue *object, Error *error)
{
    int64_t token;
    if (!object || object->kind != JSON_OBJECT || !object->length)
        return error_set(error, "%s: expected an object that gives each token its number", r->path);
    for (const JsonValue *entry = object->child; entry; entry = entry->next) {
        if (!json_integer(entry, &token))
            return error_set(error, "%s: the token \"%.100s\" has no whole number", r->path, entry->key);
        if (add_name(r, entry->key, strlen(entry->key), token, 0, error)) return -1;
    }
    return 0;
}

/* Sorts the names and makes the table of bytes; numbers that no token has get none. */
static int build_table(Reader *r, Error *error)
{
    TokenizerParts *parts = &r->parts;
    const Named **by_token = calloc((size_t)parts->vocab, sizeof *by_token);
    uint8_t *table = malloc((size_t)parts->vocab + r->count * TOKEN_BYTES);
    int result = by_token && table ? 0 : fail_memory(r->path, error);
    qsort(r->names, r->count, sizeof *r->names, compare_names);
    for (size_t i = 0; i < r->count && !result; i++) {
        const Named **place = &by_token[r->names[i].token];
        if (*place && compare_names(*place, &r->names[i]))
            result = error_set(error, "%s: the tokens \"%.100s\" and \"%.100s\" both have number %d", r->path,
                               (*place)->text, r->names[i].text, r->names[i].token);
        if (!*place || r->names[i].literal) *place = &r->names[i];
    }
    parts->table = table;
    for (int64_t t = 0; t < parts->vocab && !result; t++) {
        uint8_t *length = &table[parts->table_bytes++];
        size_t count = 0;
        if (by_token[t]) {
            const Named *name = by_token[t];
            /* A special token that stands in the vocabulary alone may hold characters that are no bytes. */
            if (name->literal || alphabet_read(r->characters, name->text, name->length, length + 1, &count)) {
                count = name->length;
                if (count <= TOKEN_BYTES) memcpy(length + 1, name->text, count);
            }
            if (count > TOKEN_BYTES)
                result = error_set(error, "%s: token %lld is longer than %d bytes", r->path, (long long)t, TOKEN_BYTES);
        }
        *length = (uint8_t)count;
        parts->table_bytes += count;
    }
    free(by_token);
    return result;
}

/* Takes the merge of two strings; `where` says which one for errors, counted from 1. */
static int add_merge(Reader *r, const char *left, size_t left_length, const char *right, size_t right_length, size_t where,
                     Error *error)
{
    TokenizerParts *parts = &r->parts;
    char joined[LINE_BYTES];
    BpeMerge merge = {-1, -1, -1};
    if (left_length + right_length < sizeof joined) {
        memcpy(joined, left, left_length);
        memcpy(joined + left_length, right, right_length);
        merge = (BpeMerge){find_token(r, left, left_length), find_token(r, right, right_length),
                           find_token(r, joined, left_length + right_length)};
    }
    if (merge.left < 0 || merge.right < 0 || merge.result < 0)
        return error_set(error, "%s: merge %zu: expected two tokens that join to a third, got \"%.*s\" and \"%.*s\"",
                         r->path, where, (int)(left_length < 100 ? left_length : 100), left,
                         (int)(right_length < 100 ? right_length : 100), right);
    if (parts->merge_count == r->merges_capacity) {
        size_t capacity = r->merges_capacity ? 2 * r->merges_capacity : 1024;
        BpeMerge *grown = realloc(parts->merges, capacity * sizeof *grown);
        if (!grown) return fail_memory(r->path, error);
        parts->merges = grown;
        r->merges_capacity = capacity;
    }
    parts->merges[parts->merge_count++] = merge;
    return 0;
}

/* A merge as one string, "LEFT RIGHT". */
static int add_merge_line(Reader *r, const char *line, size_t length, size_t where, Error *error)
{
    const char *blank = memchr(line, ' ', length);
    size_t left = blank ? (size_t)(blank - line) : length;
    if (!blank) return error_set(error, "%s: merge %zu: expected two tokens, got \"%.100s\"", r->path, where, line);
    return add_merge(r, line, left, blank + 1, length - left - 1, where, error);
}

/* The first of the usual end-of-text tokens that is there, or -1. */
static int32_t find_end(const Reader *r)
{
    int32_t found = -1;
    for (size_t i = 0; i < sizeof end_names / sizeof end_names[0] && found < 0; i++)
        found = find_token(r, end_names[i], strlen(end_names[i]));
    return found;
}

/* The lines of a merges.txt, one a merge, the first one may say its version. */
static int read_merges(Reader *r, const char *path, Error *error)
{
    FILE *file = fopen(path, "re");
    char *line = NULL;
    size_t size = 0, number = 0;
    ssize_t length;
    int result = 0;
    r->path = path;
    if (!file) return error_set(error, "%s: cannot open it", path);
    while (!result && (length = getline(&line, &size, file)) > 0) {
        while (length && (line[length - 1] == '\n' || line[length - 1] == '\r')) line[--length] = 0;
        if (++number == 1 && !strncmp(line, "#version", 8)) continue;
        if (length) result = add_merge_line(r, line, (size_t)length, r->parts.merge_count + 1, error);
    }
    if (!result && ferror(file)) result = error_set(error, "%s: cannot read it", path);
    fclose(file);
    free(line);
    return result;
}

/* vocab.json and merges.txt. The names point into `document`. */
static int read_pair(Reader *r, const JsonDocument *document, const char *merges, Error *error)
{
    if (add_vocabulary(r, json_root(document), error) || build_table(r, error)) return -1;
    r->parts.rule = TOKENIZER_GPT2;
    r->parts.end_of_text = find_end(r);
    if (r->parts.end_of_text < 0)
        return error_set(error, "%s: no token \"%s\", which ends a text", r->path, end_names[0]);
    return read_merges(r, merges, error);
}

static const char *text_of(const JsonValue *object, const char *key)
{
    const JsonValue *value = json_member(object, key);
    return value && value->kind == JSON_STRING ? value->text : "";
}

static int is_true(const JsonValue *value) { return value && value->kind == JSON_TRUE; }

/* Something other than null, false, an empty string, or 0. */
static int is_set(const JsonValue *value)
{
    if (!value || value->kind == JSON_NULL || value->kind == JSON_FALSE) return 0;
    return value->kind == JSON_STRING ? value->length != 0 : value->kind != JSON_NUMBER || value->number != 0;
}

/* Whether a pre-tokenizer or decoder, or one of a sequence of them, is the byte-level one. */
static int is_byte_level(const JsonValue *stage)
{
    static const char *const lists[] = {"pretokenizers", "decoders"};
    if (!strcmp(text_of(stage, "type"), "ByteLevel")) return 1;
    for (size_t i = 0; i < sizeof lists / sizeof lists[0]; i++) {
        const JsonValue *list = json_member(stage, lists[i]);
        for (const JsonValue *part = list ? list->child : NULL; part; part = part->next)
            if (!strcmp(text_of(part, "type"), "ByteLevel")) return 1;
    }
    return 0;
}

/* Whether a tokenizer.json cuts and merges text as GPT-2 does. */
static int follows_gpt2(const JsonValue *root)
{
    static const char *const others[] = {"dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback",
                                         "ignore_merges"};
    const JsonValue *model = json_member(root, "model"), *stage = json_member(root, "pre_tokenizer");
    const JsonValue *added = json_member(root, "added_tokens"), *pattern = json_member(stage, "use_regex");
    if (is_set(json_member(root, "normalizer")) || strcmp(text_of(stage, "type"), "ByteLevel") ||
        is_true(json_member(stage, "add_prefix_space")) || (pattern && pattern->kind == JSON_FALSE))
        return 0;
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++)
        if (is_set(json_member(model, others[i]))) return 0;
    for (const JsonValue *token = added ? added->child : NULL; token; token = token->next)
        if (!is_true(json_member(token, "special"))) return 0;
    return 1;
}

/* The merges of a tokenizer.json: strings, or pairs of strings. */
static int read_merge_list(Reader *r, const JsonValue *list, Error *error)
{
    for (const JsonValue *entry = list ? list->child : NULL; entry; entry = entry->next) {
        const JsonValue *left = entry->child, *right = left ? left->next : NULL;
        size_t where = r->parts.merge_count + 1;
        int result;
        if (entry->kind == JSON_STRING) result = add_merge_line(r, entry->text, entry->length, where, error);
        else if (entry->kind == JSON_ARRAY && entry->length == 2 && left->kind == JSON_STRING && right->kind == JSON_STRING)
            result = add_merge(r, left->text, left->length, right->text, right->length, where, error);
        else result = error_set(error, "%s: merge %zu is no pair of tokens", r->path, where);
        if (result) return -1;
    }
    return 0;
}

/* A tokenizer.json. Returns 0, 1 where it is of a kind that is not read here, or -1. */
static int read_tokenizer_json(Reader *r, const JsonDocument *document, Error *error)
{
    const JsonValue *root = json_root(document), *model = json_member(root, "model");
    const JsonValue *added = json_member(root, "added_tokens"), *type = json_member(model, "type");
    int64_t token;
    if (!model) return error_set(error, "%s: expected a tokenizer.json of Hugging Face, with a model in it", r->path);
    if ((type && strcmp(text_of(model, "type"), "BPE")) ||
        !(is_byte_level(json_member(root, "pre_tokenizer")) || is_byte_level(json_member(root, "decoder"))))
        return 1;
    if (add_vocabulary(r, json_member(model, "vocab"), error)) return -1;
    for (const JsonValue *entry = added ? added->child : NULL; entry; entry = entry->next) {
        const JsonValue *content = json_member(entry, "content");
        if (!content || content->kind != JSON_STRING || !json_integer(json_member(entry, "id"), &token))
            return error_set(error, "%s: an added token lacks its content or its number", r->path);
        if (add_name(r, content->text, content->length, token, 1, error)) return -1;
    }
    if (build_table(r, error)) return -1;
    r->parts.end_of_text = find_end(r);
    if (r->parts.end_of_text < 0) return 1;
    if (!follows_gpt2(root)) return 0;
    r->parts.rule = TOKENIZER_GPT2;
    return read_merge_list(r, json_member(model, "merges"), error);
}

/* Reads tokenizer.json, or a pair where merges is not NULL. */
static Tokenizer *open_files(const char *path, const char *merges, Error *error)
{
    Reader r = {.path = path};
    Tokenizer *tokenizer = NULL;
    JsonDocument *document = json_read(path, error);
    int result = -1;
    if (document) {
        alphabet_fill(r.characters);
        result = merges ? read_pair(&r, document, merges, error) : read_tokenizer_json(&r, document, error);
    }
    if (!result) {
        tokenizer = tokenizer_make(path, r.parts, error);
    } else {
        free(r.parts.table);
        free(r.parts.merges);
    }
    if (result == 1) error->text[0] = 0;
    free(r.names);
    json_free(document);
    return tokenizer;
}

Tokenizer *vocabulary_open(const char *dir, Error *error)
{
    static const char *const pairs[][2] = {{"vocab.json", "merges.txt"}, {"encoder.json", "vocab.bpe"}};
    char path[FILES_PATH], merges[FILES_PATH];
    if (files_join(path, dir, "tokenizer.bin", error)) return NULL;
    if (files_is_regular(path)) return tokenizer_open(path, error);
    if (files_join(path, dir, "tokenizer.json", error)) return NULL;
    if (files_is_regular(path)) return open_files(path, NULL, error);
    for (size_t i = 0; i < sizeof pairs / sizeof pairs[0]; i++) {
        if (files_join(path, dir, pairs[i][0], error) || files_join(merges, dir, pairs[i][1], error)) return NULL;
        if (files_is_regular(path) && files_is_regular(merges)) return open_files(path, merges, error);
    }
    error->text[0] = 0;
    return NULL;
}

/* --------------------------------------------------------------------------------------------------------------- writing */

/* Tokens by their bytes. */
static int compare_tokens(const void *a, const void *b, void *tokenizer)
{
    size_t x_length, y_length;
    const char *x = tokenizer_decode(tokenizer, *(const int32_t *)a, &x_length);
    const char *y = tokenizer_decode(tokenizer, *(const int32_t *)b, &y_length);
    return compare_strings(x, x_length, y, y_length);
}

/* 1 where GPT2Tokenizer can stand for a tokenizer, 0 where not, -1 where memory is short. */
static int suits_gpt2(const Tokenizer *tokenizer, const char *dir, Error *error)
{
    const TokenizerParts *parts = tokenizer_parts(tokenizer);
    int32_t *sorted = malloc((size_t)parts->vocab * sizeof *sorted);
    size_t count = 0, length, next;
    int suits = 1;
    char seen[256] = {0};
    if (!sorted) return fail_memory(dir, error);
    for (int32_t t = 0; t < parts->vocab; t++) {
        const char *bytes = tokenizer_decode(tokenizer, t, &length);
        if (length) sorted[count++] = t;
        if (t == parts->end_of_text) continue;
        if (length == 1) seen[(uint8_t)*bytes] = 1;
        if (length != 1 && parts->rule != TOKENIZER_GPT2) suits = 0;
    }
    for (int b = 0; b < 256; b++) suits &= seen[b];
    qsort_r(sorted, count, sizeof *sorted, compare_tokens, (void *)(uintptr_t)tokenizer);
    for (size_t i = 1; i < count && suits; i++) {
        const char *a = tokenizer_decode(tokenizer, sorted[i - 1], &length);
        const char *b = tokenizer_decode(tokenizer, sorted[i], &next);
        suits = compare_strings(a, length, b, next) != 0;
    }
    free(sorted);
    return suits;
}

/* A text in the making, that becomes a file. Its stream keeps the addresses of the other two: it must not move. */
typedef struct Output {
    FILE *stream;
    char *text;
    size_t length;
} Output;

/* Writes what was printed to DIR/NAME. Returns 0 or -1. */
static int output_save(Output *output, const char *dir, const char *name, Error *error)
{
    char path[FILES_PATH];
    int result = output->stream && !fclose(output->stream) ? 0 : fail_memory(dir, error);
    if (!result) result = files_join(path, dir, name, error);
    if (!result) result = files_write(path, output->text, output->length, error);
    free(output->text);
    return result;
}

static void output_open(Output *output)
{
    *output = (Output){0};
    output->stream = open_memstream(&output->text, &output->length);
}

static void print_quoted(FILE *stream, const char *text, size_t length)
{
    char quoted[6 * LINE_BYTES + 3];
    json_quote(quoted, sizeof quoted, text, length);
    fputs(quoted, stream);
}

/* A token's string: what it says where it ends texts, else in the alphabet. */
static size_t token_string(const Tokenizer *tokenizer, const uint32_t characters[256], int32_t token, char out[LINE_BYTES])
{
    size_t length;
    const char *bytes = tokenizer_decode(tokenizer, token, &length);
    if (token != tokenizer_end_of_text(tokenizer)) return alphabet_write(characters, (const uint8_t *)bytes, length, out);
    memcpy(out, bytes, length);
    out[length] = 0;
    return length;
}

/* vocab.json: every token that has bytes, with its number. */
static int write_tokens(const char *dir, const Tokenizer *tokenizer, const uint32_t characters[256], Error *error)
{
    Output output;
    char text[LINE_BYTES];
    const char *before = "{";
    size_t length;
    output_open(&output);
    for (int32_t t = 0; t < tokenizer_vocab(tokenizer) && output.stream; t++) {
        tokenizer_decode(tokenizer, t, &length);
        if (!length) continue;
        length = token_string(tokenizer, characters, t, text);
        fputs(before, output.stream);
        print_quoted(output.stream, text, length);
        fprintf(output.stream, ": %d", t);
        before = ", ";
    }
    if (output.stream) fputs("}\n", output.stream);
    return output_save(&output, dir, "vocab.json", error);
}

/* merges.txt: one a line. */
static int write_merges(const char *dir, const Tokenizer *tokenizer, const uint32_t characters[256], Error *error)
{
    const TokenizerParts *parts = tokenizer_parts(tokenizer);
    Output output;
    char left[LINE_BYTES], right[LINE_BYTES];
    output_open(&output);
    if (output.stream) fputs("#version: 0.2\n", output.stream);
    for (size_t i = 0; i < parts->merge_count && output.stream; i++) {
        token_string(tokenizer, characters, parts->merges[i].left, left);
        token_string(tokenizer, characters, parts->merges[i].right, right);
        fprintf(output.stream, "%s %s\n", left, right);
    }
    return output_save(&output, dir, "merges.txt", error);
}

/* tokenizer_config.json. */
static int write_config(const char *dir, const Tokenizer *tokenizer, const uint32_t characters[256], int64_t context,
                        Error *error)
{
    static const char *const roles[] = {"bos_token", "eos_token", "unk_token"};
    Output output;
    char end[LINE_BYTES];
    size_t length = token_string(tokenizer, characters, tokenizer_end_of_text(tokenizer), end);
    output_open(&output);
    if (output.stream)
        fprintf(output.stream, "{\"tokenizer_class\": \"GPT2Tokenizer\", \"add_prefix_space\": false, "
                "\"model_max_length\": %lld", (long long)context);
    for (size_t i = 0; i < sizeof roles / sizeof roles[0] && output.stream; i++) {
        fprintf(output.stream, ", \"%s\": ", roles[i]);
        print_quoted(output.stream, end, length);
    }
    if (output.stream) fputs("}\n", output.stream);
    return output_save(&output, dir, "tokenizer_config.json", error);
}

int vocabulary_write(const char *dir, const Tokenizer *tokenizer, int64_t context, Error *error)
{
    uint32_t characters[256];
    int suits = suits_gpt2(tokenizer, dir, error);
    if (suits <= 0) return suits ? -1 : 1;
    alphabet_fill(characters);
    return write_tokens(dir, tokenizer, characters, error) || write_merges(dir, tokenizer, characters, error) ||
           write_config(dir, tokenizer, characters, context, error) ? -1 : 0;
}
