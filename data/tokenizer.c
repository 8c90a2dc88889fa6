/* tokenizer.c - a table of byte strings, read from tokenizer.bin.
 *
 * Decoding is a look-up: token t is bytes [start[t], start[t+1]) of one block. Encoding is done only where it needs no merge
 * rules, that is where every token but end of text is one byte; then it is a look-up in a table of 256 as well. A tokenizer
 * with merges encodes in prepare.py, whose libraries know its rules; a prompt for such a model is refused.
 */
#include "data/tokenizer.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { HEADER_BYTES = 1024, MAGIC = 20240328, VERSION = 2 };

/* No tokenizer is near this size; a file beyond it is something else. */
static const int64_t LARGEST_FILE = (int64_t)1 << 30;

struct Tokenizer {
    char *path;
    uint8_t *bytes; /* the file; tokens lie in it with their length bytes between them */
    size_t *start;  /* (vocab) where token t's bytes begin; its length is the byte before */
    int64_t vocab;
    int32_t end_of_text;
    int32_t of_byte[256]; /* token that is this one byte, -1 where there is none */
    int64_t longer;       /* first token but end of text that is not one byte, -1 where every one is */
};

static int32_t read_int32(const uint8_t *bytes)
{
    return (int32_t)((uint32_t)bytes[0] | (uint32_t)bytes[1] << 8 | (uint32_t)bytes[2] << 16 | (uint32_t)bytes[3] << 24);
}

/* Reads a whole file of *size bytes. Returns it, or NULL. */
static uint8_t *read_file(const char *path, size_t *size, Error *error)
{
    int file = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    struct stat status;
    uint8_t *bytes = NULL;
    size_t done = 0;
    if (file < 0 || fstat(file, &status)) {
        error_set(error, "%s: cannot open: %s", path, strerror(errno));
    } else if (!S_ISREG(status.st_mode)) {
        error_set(error, "%s: is %s, expected a tokenizer file", path,
                  S_ISDIR(status.st_mode) ? "a directory" : "no regular file");
    } else if (status.st_size < HEADER_BYTES || status.st_size > LARGEST_FILE) {
        error_set(error, "%s: %lld bytes, expected a tokenizer file of at least %d and at most %lld", path,
                  (long long)status.st_size, HEADER_BYTES, (long long)LARGEST_FILE);
    } else if (!(bytes = malloc((size_t)status.st_size))) {
        error_set(error, "%s: not enough memory to read %lld bytes", path, (long long)status.st_size);
    } else {
        *size = (size_t)status.st_size;
        while (done < *size) {
            ssize_t got = read(file, bytes + done, *size - done);
            if (got < 0 && errno == EINTR) continue;
            if (got <= 0) {
                error_set(error, "%s: read %zu of %zu bytes: %s", path, done, *size,
                          got ? strerror(errno) : "it became shorter");
                free(bytes);
                bytes = NULL;
                break;
            }
            done += (size_t)got;
        }
    }
    if (file >= 0) close(file);
    return bytes;
}

/* Checks the header and walks the table of a file of `size` bytes. Returns 0 or -1. */
static int parse_table(Tokenizer *tokenizer, size_t size, Error *error)
{
    const uint8_t *bytes = tokenizer->bytes;
    const char *path = tokenizer->path;
    int32_t magic = read_int32(bytes), version = read_int32(bytes + 4), count = read_int32(bytes + 8);
    if (magic != MAGIC)
        return error_set(error, "%s: magic %d at byte 0, expected %d for a tokenizer file", path, magic, MAGIC);
    if (version != VERSION) return error_set(error, "%s: version %d at byte 4, expected %d", path, version, VERSION);
    if (count < 1 || (size_t)count > size - HEADER_BYTES)
        return error_set(error, "%s: %d tokens at byte 8, expected 1 to %zu in a file of %zu bytes", path, count,
                         size - HEADER_BYTES, size);
    tokenizer->vocab = count;
    tokenizer->end_of_text = read_int32(bytes + 12);
    if (tokenizer->end_of_text < 0 || tokenizer->end_of_text >= count)
        return error_set(error, "%s: end-of-text token %d at byte 12, expected 0 to %d", path, tokenizer->end_of_text,
                         count - 1);
    tokenizer->start = malloc((size_t)count * sizeof *tokenizer->start);
    if (!tokenizer->start) return error_set(error, "%s: not enough memory for %d tokens", path, count);

    size_t at = HEADER_BYTES;
    for (int32_t t = 0; t < count; t++) {
        if (at >= size || size - at - 1 < bytes[at])
            return error_set(error, "%s: truncated in token %d of %d at byte %zu: %zu bytes, expected at least %zu", path, t,
                             count, at, size, at < size ? at + 1 + bytes[at] : at + 1);
        tokenizer->start[t] = at + 1;
        at += (size_t)1 + bytes[at];
    }
    if (at != size)
        return error_set(error, "%s: its %d tokens end at byte %zu, expected that to be the end, got %zu bytes", path, count,
                         at, size);
    return 0;
}

/* Finds out which token each single byte is, and whether there are longer ones. */
static void index_bytes(Tokenizer *tokenizer)
{
    for (int b = 0; b < 256; b++) tokenizer->of_byte[b] = -1;
    tokenizer->longer = -1;
    for (int32_t t = 0; t < tokenizer->vocab; t++) {
        size_t length;
        const uint8_t *bytes = (const uint8_t *)tokenizer_decode(tokenizer, t, &length);
        if (t == tokenizer->end_of_text) continue;
        if (length == 1 && tokenizer->of_byte[bytes[0]] < 0) tokenizer->of_byte[bytes[0]] = t;
        if (length != 1 && tokenizer->longer < 0) tokenizer->longer = t;
    }
}

Tokenizer *tokenizer_open(const char *path, Error *error)
{
    Tokenizer *tokenizer = calloc(1, sizeof *tokenizer);
    if (!tokenizer || !(tokenizer->path = strdup(path))) {
        error_set(error, "%s: not enough memory to open it", path);
        free(tokenizer);
        return NULL;
    }
    size_t size = 0;
    tokenizer->bytes = read_file(path, &size, error);
    if (!tokenizer->bytes || parse_table(tokenizer, size, error)) {
        tokenizer_close(tokenizer);
        return NULL;
    }
    index_bytes(tokenizer);
    return tokenizer;
}

void tokenizer_close(Tokenizer *tokenizer)
{
    if (!tokenizer) return;
    free(tokenizer->path);
    free(tokenizer->bytes);
    free(tokenizer->start);
    free(tokenizer);
}

int64_t tokenizer_vocab(const Tokenizer *tokenizer) { return tokenizer->vocab; }

int32_t tokenizer_end_of_text(const Tokenizer *tokenizer) { return tokenizer->end_of_text; }

const char *tokenizer_decode(const Tokenizer *tokenizer, int32_t token, size_t *length)
{
    if (token < 0 || token >= tokenizer->vocab) {
        *length = 0;
        return "";
    }
    const uint8_t *bytes = tokenizer->bytes + tokenizer->start[token];
    *length = bytes[-1];
    return (const char *)bytes;
}

int tokenizer_encode(const Tokenizer *tokenizer, const char *text, size_t length, int32_t *out, size_t capacity,
                     size_t *count, Error *error)
{
    *count = 0;
    if (tokenizer->longer >= 0)
        return error_set(error, "%s: token %lld is not a single byte: encoding text with this tokenizer needs its merge "
                         "rules, which the file does not hold", tokenizer->path, (long long)tokenizer->longer);
    for (size_t i = 0; i < length; i++) {
        int byte = (unsigned char)text[i];
        int32_t token = tokenizer->of_byte[byte];
        if (token < 0)
            return error_set(error, "%s: no token for byte 0x%02x, which is at position %zu of the text", tokenizer->path,
                             byte, i);
        if (i < capacity) out[i] = token;
    }
    *count = length;
    return 0;
}
