/* json.h - a JSON reader for files that strangers wrote: strict (RFC 8259), bounded in depth and size, no recursion on input
 * deeper than JSON_DEPTH. Values live in one arena owned by the document. */
#ifndef JSON_H
#define JSON_H

#include <stddef.h>
#include <stdint.h>

#include "data/error.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { JSON_DEPTH = 32 };

typedef enum JsonKind { JSON_NULL, JSON_FALSE, JSON_TRUE, JSON_NUMBER, JSON_STRING, JSON_ARRAY, JSON_OBJECT } JsonKind;

typedef struct JsonValue JsonValue;
struct JsonValue {
    JsonKind kind;
    const char *key;     /* in an object: the member's name, UTF-8, 0-terminated; else NULL */
    const char *text;    /* string: its UTF-8 bytes, escapes resolved, 0-terminated; number: as written */
    size_t length;       /* string: bytes in text; array, object: number of children */
    double number;       /* number: its value */
    const JsonValue *child; /* array, object: the first child */
    const JsonValue *next;  /* the next sibling */
};

typedef struct JsonDocument JsonDocument;

/* Parses `length` bytes; `name` (a file name) opens error sentences, which give the byte offset. Duplicate keys in an
 * object are an error, so are a key with a zero byte, a number beyond double and more than 4 Mi values. NULL on an error. */
JsonDocument *json_parse(const char *text, size_t length, const char *name, Error *error);
/* Reads and parses a file of at most 64 MiB. */
JsonDocument *json_read(const char *path, Error *error);
void json_free(JsonDocument *document);
const JsonValue *json_root(const JsonDocument *document);

/* The member `key` of an object, or NULL (also where `object` is NULL or no object). */
const JsonValue *json_member(const JsonValue *object, const char *key);
/* 1 where the value is a number that is an integer in [-2^63, 2^63), exactly; *out gets it. Else 0. */
int json_integer(const JsonValue *value, int64_t *out);
/* The member `key` of an object of the file `path`, which must be an integer of at least `least`. Returns 0, or -1 with a
 * sentence. */
int json_find_integer(const JsonValue *object, const char *key, const char *path, int64_t least, int64_t *out, Error *error);

/* Writes `text` as a JSON string with quotes to `out` as snprintf would: at most `size` bytes; returns what it needs without
 * the closing 0, or -1 where that is more than an int holds. Bytes that are not UTF-8 become U+FFFD. */
int json_quote(char *out, size_t size, const char *text, size_t length);

#ifdef __cplusplus
}
#endif
#endif
