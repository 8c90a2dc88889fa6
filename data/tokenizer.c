/* tokenizer.c - a table of byte strings and, where they are known, the merges that make them.
 *
 * Decoding is a look-up: token t is a length byte and its bytes in one block. Encoding is a look-up too where every token
 * but end of text is one byte; with merges it is done by bpe.c; and a tokenizer whose rules are not known, such as one that
 * cuts text in another way than GPT-2, encodes in prepare.py only, whose libraries know them.
 */
#include "data/tokenizer.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "data/files.h"

enum { HEADER_BYTES = 1024, MAGIC = 20240328, VERSION = 2, END_OF_VERSION_1 = 50256, MERGE_BYTES = 12 };

/* No tokenizer is near this size; a file beyond it is something else. */
static const int64_t LARGEST_FILE = (int64_t)1 << 30;

struct Tokenizer {
    char *path;
    TokenizerParts parts;
    size_t *start;        /* (vocab) where token t's bytes begin in the table; its length is the byte before */
    int32_t of_byte[256]; /* token that is this one byte, -1 where there is none */
    int64_t longer;       /* first token but end of text that is not one byte, -1 where every one is */
    Bpe *bpe;             /* NULL where the rule is not known */
};

static int32_t read_int32(const uint8_t *bytes)
{
    return (int32_t)((uint32_t)bytes[0] | (uint32_t)bytes[1] << 8 | (uint32_t)bytes[2] << 16 | (uint32_t)bytes[3] << 24);
}

static void write_int32(uint8_t *bytes, int32_t value)
{
    for (int i = 0; i < 4; i++) bytes[i] = (uint8_t)((uint32_t)value >> (8 * i));
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

/* Fills the numbers of parts from the header of a file of `size` bytes. Returns 0 or -1. */
static int parse_header(TokenizerParts *parts, const uint8_t *bytes, size_t size, const char *path, Error *error)
{
    int32_t words[6];
    for (int i = 0; i < 6; i++) words[i] = read_int32(bytes + 4 * i);
    int32_t version = words[1], count = words[2], merges = words[4];
    if (words[0] != MAGIC)
        return error_set(error, "%s: magic %d at byte 0, expected %d for a tokenizer file", path, words[0], MAGIC);
    if (version != VERSION && version != 1)
        return error_set(error, "%s: version %d at byte 4, expected 1 or %d", path, version, VERSION);
    if (count < 1 || (size_t)count > size - HEADER_BYTES)
        return error_set(error, "%s: %d tokens at byte 8, expected 1 to %zu in a file of %zu bytes", path, count,
                         size - HEADER_BYTES, size);
    if (merges < 0 || (size_t)merges > (size - HEADER_BYTES) / MERGE_BYTES)
        return error_set(error, "%s: %d merges at byte 16, expected 0 to %zu in a file of %zu bytes", path, merges,
                         (size - HEADER_BYTES) / MERGE_BYTES, size);
    if (words[5] < 0 || words[5] >= TOKENIZER_RULES || (merges && !words[5]))
        return error_set(error, "%s: rule %d at byte 20, expected %d to %d%s", path, words[5], merges != 0,
                         TOKENIZER_RULES - 1, merges ? " with merges" : "");
    parts->vocab = count;
    parts->end_of_text = version == 1 ? END_OF_VERSION_1 : words[3];
    parts->merge_count = (size_t)merges;
    parts->rule = (TokenizerRule)words[5];
    if (parts->end_of_text < 0 || parts->end_of_text >= count)
        return error_set(error, "%s: end-of-text token %d %s, expected 0 to %d", path, parts->end_of_text,
                         version == 1 ? "of version 1" : "at byte 12", count - 1);
    return 0;
}

/* Finds where each token's bytes begin. `base` is where the table lies in its file. Returns 0 or -1. */
static int index_table(Tokenizer *tokenizer, size_t base, Error *error)
{
    const TokenizerParts *parts = &tokenizer->parts;
    const char *path = tokenizer->path;
    size_t at = 0, size = parts->table_bytes;
    for (int64_t t = 0; t < parts->vocab; t++) {
        size_t next = at < size ? at + 1 + parts->table[at] : at + 1;
        if (next > size)
            return error_set(error, "%s: truncated in token %lld of %lld at byte %zu: %zu bytes, expected at least %zu",
                             path, (long long)t, (long long)parts->vocab, base + at, base + size, base + next);
        tokenizer->start[t] = at + 1;
        at = next;
    }
    if (at != size)
        return error_set(error, "%s: its %lld tokens end at byte %zu, expected that to be %s, got %zu bytes more", path,
                         (long long)parts->vocab, base + at, parts->merge_count ? "where the merges begin" : "the end",
                         size - at);
    return 0;
}

/* Finds out which token each single byte is, and whether there are longer ones. */
static void index_bytes(Tokenizer *tokenizer)
{
    for (int b = 0; b < 256; b++) tokenizer->of_byte[b] = -1;
    tokenizer->longer = -1;
    for (int32_t t = 0; t < tokenizer->parts.vocab; t++) {
        size_t length;
        const uint8_t *bytes = (const uint8_t *)tokenizer_decode(tokenizer, t, &length);
        if (t == tokenizer->parts.end_of_text) continue;
        if (length == 1 && tokenizer->of_byte[bytes[0]] < 0) tokenizer->of_byte[bytes[0]] = t;
        if (length != 1 && tokenizer->longer < 0) tokenizer->longer = t;
    }
}

/* Fails unless the bytes of a merge's tokens are those of its result. */
static int check_merge(const Tokenizer *tokenizer, size_t i, Error *error)
{
    const BpeMerge merge = tokenizer->parts.merges[i];
    const int32_t tokens[3] = {merge.left, merge.right, merge.result};
    const char *bytes[3];
    size_t lengths[3];
    for (int k = 0; k < 3; k++) {
        if (tokens[k] < 0 || tokens[k] >= tokenizer->parts.vocab)
            return error_set(error, "%s: merge %zu has token %d, expected 0 to %lld", tokenizer->path, i, tokens[k],
                             (long long)tokenizer->parts.vocab - 1);
        bytes[k] = tokenizer_decode(tokenizer, tokens[k], &lengths[k]);
    }
    if (!lengths[0] || !lengths[1] || lengths[0] + lengths[1] != lengths[2] || memcmp(bytes[2], bytes[0], lengths[0]) ||
        memcmp(bytes[2] + lengths[0], bytes[1], lengths[1]))
        return error_set(error, "%s: merge %zu: the bytes of tokens %d and %d do not join to those of token %d",
                         tokenizer->path, i, merge.left, merge.right, merge.result);
    return 0;
}

/* Makes ready for merging. Returns 0 or -1. */
static int index_merges(Tokenizer *tokenizer, Error *error)
{
    const TokenizerParts *parts = &tokenizer->parts;
    if (parts->rule == TOKENIZER_UNKNOWN) return 0;
    for (int b = 0; b < 256; b++)
        if (tokenizer->of_byte[b] < 0)
            return error_set(error, "%s: no token for byte 0x%02x, expected one for every byte where there are merges",
                             tokenizer->path, b);
    for (size_t i = 0; i < parts->merge_count; i++)
        if (check_merge(tokenizer, i, error)) return -1;
    tokenizer->bpe = bpe_create(tokenizer->of_byte, parts->merges, parts->merge_count);
    if (tokenizer->bpe) return 0;
    return error_set(error, "%s: not enough memory for %zu merges", tokenizer->path, parts->merge_count);
}

static Tokenizer *make(const char *name, TokenizerParts parts, size_t base, Error *error)
{
    Tokenizer *tokenizer = calloc(1, sizeof *tokenizer);
    if (!tokenizer) {
        free(parts.table);
        free(parts.merges);
        error_set(error, "%s: not enough memory to open it", name);
        return NULL;
    }
    tokenizer->parts = parts;
    tokenizer->path = strdup(name);
    tokenizer->start = malloc((size_t)parts.vocab * sizeof *tokenizer->start);
    int result = 0;
    if (!tokenizer->path || !tokenizer->start)
        result = error_set(error, "%s: not enough memory for %lld tokens", name, (long long)parts.vocab);
    if (!result) result = index_table(tokenizer, base, error);
    if (!result) {
        index_bytes(tokenizer);
        result = index_merges(tokenizer, error);
    }
    if (!result) return tokenizer;
    tokenizer_close(tokenizer);
    return NULL;
}

Tokenizer *tokenizer_make(const char *name, TokenizerParts parts, Error *error) { return make(name, parts, 0, error); }

Tokenizer *tokenizer_open(const char *path, Error *error)
{
    TokenizerParts parts = {0};
    size_t size = 0;
    uint8_t *bytes = read_file(path, &size, error);
    if (!bytes || parse_header(&parts, bytes, size, path, error)) {
        free(bytes);
        return NULL;
    }
    const uint8_t *from = bytes + size - MERGE_BYTES * parts.merge_count;
    parts.merges = malloc((parts.merge_count + 1) * sizeof *parts.merges);
    if (!parts.merges) {
        error_set(error, "%s: not enough memory for %zu merges", path, parts.merge_count);
        free(bytes);
        return NULL;
    }
    for (size_t i = 0; i < parts.merge_count; i++, from += MERGE_BYTES)
        parts.merges[i] = (BpeMerge){read_int32(from), read_int32(from + 4), read_int32(from + 8)};
    parts.table_bytes = size - HEADER_BYTES - MERGE_BYTES * parts.merge_count;
    memmove(bytes, bytes + HEADER_BYTES, parts.table_bytes);
    parts.table = bytes;
    return make(path, parts, HEADER_BYTES, error);
}

void tokenizer_close(Tokenizer *tokenizer)
{
    if (!tokenizer) return;
    bpe_free(tokenizer->bpe);
    free(tokenizer->path);
    free(tokenizer->parts.table);
    free(tokenizer->parts.merges);
    free(tokenizer->start);
    free(tokenizer);
}

int tokenizer_write(const Tokenizer *tokenizer, const char *path, Error *error)
{
    const TokenizerParts *parts = &tokenizer->parts;
    size_t size = HEADER_BYTES + parts->table_bytes + MERGE_BYTES * parts->merge_count;
    int32_t words[6] = {MAGIC, VERSION, (int32_t)parts->vocab, parts->end_of_text, (int32_t)parts->merge_count,
                        (int32_t)parts->rule};
    uint8_t *bytes = calloc(size, 1), *to;
    if (!bytes) return error_set(error, "%s: not enough memory to write it", path);
    for (int i = 0; i < 6; i++) write_int32(bytes + 4 * i, words[i]);
    memcpy(bytes + HEADER_BYTES, parts->table, parts->table_bytes);
    to = bytes + HEADER_BYTES + parts->table_bytes;
    for (size_t i = 0; i < parts->merge_count; i++, to += MERGE_BYTES) {
        write_int32(to, parts->merges[i].left);
        write_int32(to + 4, parts->merges[i].right);
        write_int32(to + 8, parts->merges[i].result);
    }
    int result = files_write(path, bytes, size, error);
    free(bytes);
    return result;
}

int64_t tokenizer_vocab(const Tokenizer *tokenizer) { return tokenizer->parts.vocab; }

int32_t tokenizer_end_of_text(const Tokenizer *tokenizer) { return tokenizer->parts.end_of_text; }

const TokenizerParts *tokenizer_parts(const Tokenizer *tokenizer) { return &tokenizer->parts; }

const char *tokenizer_decode(const Tokenizer *tokenizer, int32_t token, size_t *length)
{
    if (token < 0 || token >= tokenizer->parts.vocab) {
        *length = 0;
        return "";
    }
    const uint8_t *bytes = tokenizer->parts.table + tokenizer->start[token];
    *length = bytes[-1];
    return (const char *)bytes;
}

static int encode_bytes(const Tokenizer *tokenizer, const char *text, size_t length, int32_t *out, size_t capacity,
                        size_t *count, Error *error)
{
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

/* Piece after piece: straight to out while it has room for all of a piece's bytes, else by way of a buffer. */
static int encode_merged(const Tokenizer *tokenizer, const char *text, size_t length, int32_t *out, size_t capacity,
                         size_t *count, Error *error)
{
    int32_t few[64], *many = NULL;
    size_t room = sizeof few / sizeof few[0], total = 0, got, size;
    for (size_t at = 0; at < length; at += size, total += got) {
        const uint8_t *piece = (const uint8_t *)text + at;
        size = bpe_piece(piece, length - at);
        int direct = total <= capacity && size <= capacity - total;
        if (!direct && size > room) {
            int32_t *grown = realloc(many, size * sizeof *grown);
            if (grown) many = grown;
            room = grown ? size : 0;
        }
        int32_t *to = direct ? out + total : many ? many : few;
        if ((!direct && size > room) || bpe_merge(tokenizer->bpe, piece, size, to, &got)) {
            free(many);
            return error_set(error, "%s: not enough memory to encode a piece of %zu bytes", tokenizer->path, size);
        }
        for (size_t i = 0; !direct && i < got && total + i < capacity; i++) out[total + i] = to[i];
    }
    free(many);
    *count = total;
    return 0;
}

int tokenizer_encode(const Tokenizer *tokenizer, const char *text, size_t length, int32_t *out, size_t capacity,
                     size_t *count, Error *error)
{
    *count = 0;
    if (tokenizer->bpe) return encode_merged(tokenizer, text, length, out, capacity, count, error);
    if (tokenizer->longer < 0) return encode_bytes(tokenizer, text, length, out, capacity, count, error);
    return error_set(error, "%s: token %lld is not a single byte: the file lacks the merges that encoding text needs "
                     "(data/prepare.py writes them), or its text is cut in another way than GPT-2's", tokenizer->path,
                     (long long)tokenizer->longer);
}
