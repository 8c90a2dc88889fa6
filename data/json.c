/* json.c - the JSON reader.
 *
 * One pass over the text, descending into itself once for each level of nesting and at most JSON_DEPTH deep. Every value,
 * key and string is carved from an arena, a chain of growing blocks that json_free drops at once, so no value is freed on
 * its own and pointers stay good for the life of the document.
 *
 * Two limits stand beside JSON_DEPTH, because two bytes of text ("0,") cost a whole JsonValue: at most JSON_VALUES values a
 * document, and at most 64 MiB a file. Duplicate keys are found by sorting an object's keys, so that no choice of keys
 * makes it quadratic. Since a key is handed out 0-terminated, one that contains \u0000 could not be told from a shorter one
 * and is refused; a string may contain it, and carries its length.
 *
 * Source: RFC 8259 (JSON).
 */
#include "data/json.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "data/unicode.h"

enum { JSON_VALUES = 4 << 20, JSON_FILE_BYTES = 64 << 20, BLOCK_BYTES = 4096, BLOCK_BYTES_MOST = 4 << 20 };

/* A piece of the arena; what is handed out follows it in memory. */
typedef struct Block {
    struct Block *before;
    size_t used, size;
} Block;

struct JsonDocument {
    Block *block; /* the newest */
    const JsonValue *root;
};

typedef struct Parser {
    const unsigned char *text;
    size_t length, at;
    const char *name;
    Error *error;
    JsonDocument *document;
    int64_t values;
} Parser;

/* ---------------------------------------------------------------------------------------------------------------- arena */

/* `size` bytes aligned to 16, or NULL. */
static void *arena_take(JsonDocument *document, size_t size)
{
    size_t header = (sizeof(Block) + 15) & ~(size_t)15;
    Block *block = document->block;
    void *memory;
    size = (size + 15) & ~(size_t)15;
    if (!block || block->size - block->used < size) {
        size_t next = !block ? BLOCK_BYTES : 2 * block->size < BLOCK_BYTES_MOST ? 2 * block->size : BLOCK_BYTES_MOST;
        if (next < size) next = size;
        block = malloc(header + next);
        if (!block) return NULL;
        block->before = document->block;
        block->used = 0;
        block->size = next;
        document->block = block;
    }
    memory = (char *)block + header + block->used;
    block->used += size;
    return memory;
}

void json_free(JsonDocument *document)
{
    if (!document) return;
    for (Block *block = document->block; block;) {
        Block *before = block->before;
        free(block);
        block = before;
    }
    free(document);
}

/* --------------------------------------------------------------------------------------------------------------- errors */

/* How the byte at `at` is called in a sentence. */
static const char *byte_words(const Parser *p, size_t at, char *words, size_t size)
{
    unsigned char byte;
    if (at >= p->length) return "the end of the text";
    byte = p->text[at];
    if (byte > 0x20 && byte < 0x7F) snprintf(words, size, "'%c'", byte);
    else snprintf(words, size, "byte 0x%02X", byte);
    return words;
}

/* "NAME: offset N: expected WHAT, got ...". */
static int fail_expected(const Parser *p, const char *what)
{
    char words[32];
    return error_set(p->error, "%s: offset %zu: not JSON: expected %s, got %s", p->name, p->at, what,
                     byte_words(p, p->at, words, sizeof words));
}

static int fail_memory(const Parser *p) { return error_set(p->error, "%s: not enough memory to parse it", p->name); }

/* -------------------------------------------------------------------------------------------------------------- strings */

/* The four hexadecimal digits of a \u escape; p->at stands on the first. */
static int parse_hex4(Parser *p, uint32_t *code)
{
    *code = 0;
    for (int i = 0; i < 4; i++, p->at++) {
        unsigned char c = p->at < p->length ? p->text[p->at] : 0;
        uint32_t digit;
        if (c >= '0' && c <= '9') digit = (uint32_t)(c - '0');
        else if (c >= 'a' && c <= 'f') digit = (uint32_t)(c - 'a' + 10);
        else if (c >= 'A' && c <= 'F') digit = (uint32_t)(c - 'A' + 10);
        else return fail_expected(p, "four hexadecimal digits after \\u");
        *code = *code << 4 | digit;
    }
    return 0;
}

/* An escape; p->at stands after the backslash. Appends its bytes to out + *n. */
static int parse_escape(Parser *p, char *out, size_t *n)
{
    static const char names[] = "\"\\/bfnrt", values[] = "\"\\/\b\f\n\r\t";
    size_t start = p->at - 1;
    unsigned char c = p->at < p->length ? p->text[p->at] : 0;
    const char *found = c ? strchr(names, c) : NULL;
    uint32_t code, low;
    if (found) {
        out[(*n)++] = values[found - names];
        p->at++;
        return 0;
    }
    if (c != 'u') return fail_expected(p, "one of \"\\/bfnrtu after a backslash");
    p->at++;
    if (parse_hex4(p, &code)) return -1;
    if (code >= 0xD800 && code <= 0xDBFF && p->length - p->at >= 2 && p->text[p->at] == '\\' && p->text[p->at + 1] == 'u') {
        p->at += 2;
        if (parse_hex4(p, &low)) return -1;
        if (low >= 0xDC00 && low <= 0xDFFF) code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
    }
    if (code >= 0xD800 && code <= 0xDFFF)
        return error_set(p->error, "%s: offset %zu: not JSON: half a surrogate pair \\u%04X without its other half", p->name,
                         start, (unsigned)code);
    *n += utf8_write(out + *n, code);
    return 0;
}

/* A string; p->at stands on its opening quote. No escape is shorter than the UTF-8 of its value. */
static int parse_string(Parser *p, const char **text, size_t *length)
{
    size_t start = ++p->at, end = start, n = 0;
    char *out;
    while (end < p->length && p->text[end] != '"') end += p->text[end] == '\\' ? 2 : 1;
    if (end >= p->length)
        return error_set(p->error, "%s: offset %zu: not JSON: the string that starts here has no closing quote", p->name,
                         start - 1);
    out = arena_take(p->document, end - start + 1);
    if (!out) return fail_memory(p);
    while (p->at < end) {
        unsigned char c = p->text[p->at];
        if (c == '\\') {
            p->at++;
            if (parse_escape(p, out, &n)) return -1;
        } else if (c < 0x20) {
            return fail_expected(p, "control characters in a string to be escaped");
        } else {
            size_t bytes = utf8_length(p->text + p->at, p->length - p->at);
            if (!bytes) return fail_expected(p, "a string in UTF-8");
            memcpy(out + n, p->text + p->at, bytes);
            n += bytes;
            p->at += bytes;
        }
    }
    p->at = end + 1;
    out[n] = 0;
    *text = out;
    *length = n;
    return 0;
}

/* -------------------------------------------------------------------------------------------------------------- numbers */

static int at_digit(const Parser *p) { return p->at < p->length && p->text[p->at] >= '0' && p->text[p->at] <= '9'; }

static int skip_digits(Parser *p)
{
    if (!at_digit(p)) return fail_expected(p, "a digit");
    while (at_digit(p)) p->at++;
    return 0;
}

static int parse_number(Parser *p, JsonValue *value)
{
    size_t start = p->at;
    char *copy;
    if (p->text[p->at] == '-') p->at++;
    if (p->at < p->length && p->text[p->at] == '0') {
        p->at++;
        if (at_digit(p)) return fail_expected(p, "no digit after a leading zero");
    } else if (skip_digits(p)) {
        return -1;
    }
    if (p->at < p->length && p->text[p->at] == '.') {
        p->at++;
        if (skip_digits(p)) return -1;
    }
    if (p->at < p->length && (p->text[p->at] == 'e' || p->text[p->at] == 'E')) {
        p->at++;
        if (p->at < p->length && (p->text[p->at] == '+' || p->text[p->at] == '-')) p->at++;
        if (skip_digits(p)) return -1;
    }
    copy = arena_take(p->document, p->at - start + 1);
    if (!copy) return fail_memory(p);
    memcpy(copy, p->text + start, p->at - start);
    copy[p->at - start] = 0;
    value->kind = JSON_NUMBER;
    value->text = copy;
    value->number = strtod(copy, NULL);
    if (!isfinite(value->number))
        return error_set(p->error, "%s: offset %zu: the number %.40s is beyond the largest double, 1.8e308", p->name, start,
                         copy);
    return 0;
}

int json_integer(const JsonValue *value, int64_t *out)
{
    /* value = 0.DIGITS * 10^scale, read off the text, since a double holds only 53 bits of an integer. */
    const char *c;
    int negative, seen_dot = 0, exponent_sign = 1;
    int64_t scale = 0, digits = 0, exponent = 0, zeros = 0;
    uint64_t magnitude = 0, limit;
    if (!value || value->kind != JSON_NUMBER) return 0;
    c = value->text;
    negative = *c == '-';
    limit = negative ? (uint64_t)1 << 63 : ((uint64_t)1 << 63) - 1;
    for (c += negative; *c && *c != 'e' && *c != 'E'; c++) {
        if (*c == '.') { seen_dot = 1; continue; }
        if (!seen_dot) scale++;
        if (digits == 0 && *c == '0') { scale--; continue; } /* a leading zero: of no weight, or moves the dot */
        if (*c == '0') { zeros++; continue; }                /* of weight only where another digit follows */
        for (; zeros > 0; zeros--, digits++)
            if (digits < 19) magnitude *= 10;
        if (digits < 19) magnitude = magnitude * 10 + (uint64_t)(*c - '0');
        digits++;
    }
    if (digits == 0) { *out = 0; return 1; }
    if (*c) {
        c++;
        if (*c == '-') exponent_sign = -1;
        if (*c == '-' || *c == '+') c++;
        for (; *c; c++)
            if (exponent < (int64_t)1 << 40) exponent = exponent * 10 + (*c - '0');
    }
    scale += exponent_sign * exponent;
    if (scale > 19 || digits > scale || digits > 19) return 0;
    for (; digits < scale; digits++) {
        if (magnitude > UINT64_MAX / 10) return 0;
        magnitude *= 10;
    }
    if (magnitude > limit) return 0;
    *out = negative ? (int64_t)(0 - magnitude) : (int64_t)magnitude;
    return 1;
}

/* --------------------------------------------------------------------------------------------------------------- values */

static int parse_value(Parser *p, JsonValue *value, int depth);

static void skip_space(Parser *p)
{
    while (p->at < p->length && p->text[p->at] && strchr(" \t\n\r", p->text[p->at])) p->at++;
}

static int parse_word(Parser *p, JsonValue *value, const char *word, JsonKind kind)
{
    size_t length = strlen(word);
    if (p->length - p->at < length || memcmp(p->text + p->at, word, length)) return fail_expected(p, "a value");
    p->at += length;
    value->kind = kind;
    return 0;
}

static int compare_keys(const void *a, const void *b) { return strcmp(*(const char *const *)a, *(const char *const *)b); }

/* Fails where two members of the object that ends before p->at have one key. */
static int check_keys(const Parser *p, const JsonValue *object)
{
    const char **keys;
    size_t n = 0;
    int result = 0;
    if (object->length < 2) return 0;
    keys = malloc(object->length * sizeof *keys);
    if (!keys) return fail_memory(p);
    for (const JsonValue *child = object->child; child; child = child->next) keys[n++] = child->key;
    qsort(keys, n, sizeof *keys, compare_keys);
    for (size_t i = 1; i < n && !result; i++)
        if (!strcmp(keys[i - 1], keys[i]))
            result = error_set(p->error, "%s: the object that ends at offset %zu has the key \"%.200s\" twice", p->name,
                               p->at - 1, keys[i]);
    free(keys);
    return result;
}

static int parse_key(Parser *p, const char **key)
{
    size_t start = p->at, length;
    if (p->at >= p->length || p->text[p->at] != '"') return fail_expected(p, "a key in quotes");
    if (parse_string(p, key, &length)) return -1;
    if (strlen(*key) != length)
        return error_set(p->error, "%s: offset %zu: a key contains \\u0000, which this reader does not take", p->name,
                         start);
    skip_space(p);
    if (p->at >= p->length || p->text[p->at] != ':') return fail_expected(p, "':' after a key");
    p->at++;
    skip_space(p);
    return 0;
}

/* An array or object; p->at stands on its opening bracket. */
static int parse_children(Parser *p, JsonValue *value, int depth)
{
    int object = p->text[p->at] == '{';
    unsigned char closing = object ? '}' : ']';
    const JsonValue **tail = &value->child;
    if (depth >= JSON_DEPTH)
        return error_set(p->error, "%s: offset %zu: nested deeper than %d levels", p->name, p->at, JSON_DEPTH);
    value->kind = object ? JSON_OBJECT : JSON_ARRAY;
    p->at++;
    skip_space(p);
    if (p->at < p->length && p->text[p->at] == closing) { p->at++; return 0; }
    for (;;) {
        JsonValue *child = arena_take(p->document, sizeof *child);
        if (!child) return fail_memory(p);
        memset(child, 0, sizeof *child);
        if (object && parse_key(p, &child->key)) return -1;
        if (parse_value(p, child, depth + 1)) return -1;
        *tail = child;
        tail = &child->next;
        value->length++;
        skip_space(p);
        if (p->at < p->length && p->text[p->at] == closing) break;
        if (p->at >= p->length || p->text[p->at] != ',') return fail_expected(p, object ? "',' or '}'" : "',' or ']'");
        p->at++;
        skip_space(p);
    }
    p->at++;
    return object ? check_keys(p, value) : 0;
}

static int parse_value(Parser *p, JsonValue *value, int depth)
{
    unsigned char c = p->at < p->length ? p->text[p->at] : 0;
    if (++p->values > JSON_VALUES)
        return error_set(p->error, "%s: offset %zu: more than %d values", p->name, p->at, JSON_VALUES);
    switch (c) {
    case '{':
    case '[': return parse_children(p, value, depth);
    case '"': value->kind = JSON_STRING; return parse_string(p, &value->text, &value->length);
    case 't': return parse_word(p, value, "true", JSON_TRUE);
    case 'f': return parse_word(p, value, "false", JSON_FALSE);
    case 'n': return parse_word(p, value, "null", JSON_NULL);
    default: return c == '-' || at_digit(p) ? parse_number(p, value) : fail_expected(p, "a value");
    }
}

/* ------------------------------------------------------------------------------------------------------------ documents */

JsonDocument *json_parse(const char *text, size_t length, const char *name, Error *error)
{
    JsonDocument *document = calloc(1, sizeof *document);
    Parser p = {(const unsigned char *)text, length, 0, name, error, document, 0};
    JsonValue *root = document ? arena_take(document, sizeof *root) : NULL;
    if (!root) {
        fail_memory(&p);
        json_free(document);
        return NULL;
    }
    memset(root, 0, sizeof *root);
    document->root = root;
    skip_space(&p);
    if (parse_value(&p, root, 0)) { json_free(document); return NULL; }
    skip_space(&p);
    if (p.at < length) {
        fail_expected(&p, "nothing after the value");
        json_free(document);
        return NULL;
    }
    return document;
}

/* Reads what is in `file`, at most JSON_FILE_BYTES, to a new buffer. */
static char *read_text(int file, const char *path, size_t *length, Error *error)
{
    struct stat status;
    char *text;
    if (fstat(file, &status)) { error_set(error, "%s: cannot stat it: %s", path, strerror(errno)); return NULL; }
    if (!S_ISREG(status.st_mode)) { error_set(error, "%s is not a regular file", path); return NULL; }
    if (status.st_size > JSON_FILE_BYTES) {
        error_set(error, "%s has %lld bytes, more than the %d that a JSON file may have here", path,
                  (long long)status.st_size, JSON_FILE_BYTES);
        return NULL;
    }
    text = malloc((size_t)status.st_size + 1);
    if (!text) { error_set(error, "%s: not enough memory to read it", path); return NULL; }
    for (*length = 0; *length < (size_t)status.st_size;) {
        ssize_t got = read(file, text + *length, (size_t)status.st_size - *length);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) {
            error_set(error, "%s: cannot read at byte %zu: %s", path, *length, strerror(errno));
            free(text);
            return NULL;
        }
        if (got == 0) break;
        *length += (size_t)got;
    }
    return text;
}

JsonDocument *json_read(const char *path, Error *error)
{
    JsonDocument *document = NULL;
    size_t length;
    char *text;
    int file = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a FIFO must not make it wait */
    if (file < 0) { error_set(error, "%s: cannot open it: %s", path, strerror(errno)); return NULL; }
    text = read_text(file, path, &length, error);
    close(file);
    if (text) document = json_parse(text, length, path, error);
    free(text);
    return document;
}

const JsonValue *json_root(const JsonDocument *document) { return document->root; }

const JsonValue *json_member(const JsonValue *object, const char *key)
{
    if (!object || object->kind != JSON_OBJECT) return NULL;
    for (const JsonValue *child = object->child; child; child = child->next)
        if (!strcmp(child->key, key)) return child;
    return NULL;
}

/* -------------------------------------------------------------------------------------------------------------- writing */

int json_find_integer(const JsonValue *object, const char *key, const char *path, int64_t least, int64_t *out,
                      Error *error)
{
    const JsonValue *value = json_member(object, key);
    if (!value) return error_set(error, "%s: \"%s\" is missing", path, key);
    if (!json_integer(value, out) || *out < least)
        return error_set(error, "%s: \"%s\" is %.40s, an integer of at least %" PRId64 " is expected", path, key,
                         value->kind == JSON_NUMBER ? value->text : "no number", least);
    return 0;
}

int json_quote(char *out, size_t size, const char *text, size_t length)
{
    static const char names[] = "\"\\bfnrt", values[] = "\"\\\b\f\n\r\t";
    size_t n = 0; /* bytes needed so far, the last 0 not counted */
#define PUT(c) do { if (n + 1 < size) out[n] = (char)(c); n++; } while (0)
    PUT('"');
    for (size_t i = 0; i < length;) {
        const unsigned char *at = (const unsigned char *)text + i;
        size_t bytes = utf8_length(at, length - i);
        const char *found = *at ? strchr(values, *at) : NULL;
        char escape[8];
        if (found) snprintf(escape, sizeof escape, "\\%c", names[found - values]);
        else if (*at < 0x20) snprintf(escape, sizeof escape, "\\u%04X", *at);
        else if (!bytes) snprintf(escape, sizeof escape, "\xEF\xBF\xBD");
        else snprintf(escape, sizeof escape, "%.*s", (int)bytes, (const char *)at);
        for (const char *c = escape; *c; c++) PUT(*c);
        i += bytes ? bytes : 1;
    }
    PUT('"');
#undef PUT
    if (size) out[n < size ? n : size - 1] = 0;
    return n > INT_MAX ? -1 : (int)n;
}
