/* test_tokenizer.c - tokenizer.bin: decoding, encoding of bytes, every way in which a file can be wrong. */
#include "data/tokenizer.h"

#include <stdlib.h>
#include <unistd.h>

#include "tests/test.h"

enum { HEADER_BYTES = 1024 };

static char path[64]; /* the one file of this program, written anew for each case */

static void write_file(const uint8_t *data, size_t bytes)
{
    FILE *file = fopen(path, "wb");
    if (!file || (bytes && fwrite(data, 1, bytes, file) != bytes) || fclose(file)) {
        fprintf(stderr, "cannot write %s\n", path);
        exit(1);
    }
}

/* Fills `data` with the header and the table of the bytes tokenizer (256 bytes, then end of text). Returns its size. */
static size_t make_bytes_tokenizer(uint8_t *data)
{
    int32_t header[4] = {20240328, 2, 257, 256};
    memset(data, 0, HEADER_BYTES);
    memcpy(data, header, sizeof header);
    size_t at = HEADER_BYTES;
    for (int b = 0; b < 256; b++) {
        data[at++] = 1;
        data[at++] = (uint8_t)b;
    }
    data[at++] = 13;
    memcpy(data + at, "<|endoftext|>", 13);
    return at + 13;
}

static void test_bytes(void)
{
    uint8_t data[4096];
    Error error = {""};
    size_t length, count;
    TEST("tokenizer: the bytes tokenizer decodes and encodes every byte");
    write_file(data, make_bytes_tokenizer(data));
    Tokenizer *tokenizer = tokenizer_open(path, &error);
    if (!CHECK(tokenizer, "%s", error.text)) return;
    CHECK(tokenizer_vocab(tokenizer) == 257 && tokenizer_end_of_text(tokenizer) == 256, "vocabulary %lld, end of text %d",
          (long long)tokenizer_vocab(tokenizer), tokenizer_end_of_text(tokenizer));
    char text[256];
    int32_t tokens[256];
    for (int b = 0; b < 256; b++) text[b] = (char)(255 - b);
    CHECK(!tokenizer_encode(tokenizer, text, 256, tokens, 256, &count, &error) && count == 256, "%zu tokens: %s", count,
          error.text);
    for (int b = 0; b < 256; b++) {
        const char *piece = tokenizer_decode(tokenizer, tokens[b], &length);
        CHECK(tokens[b] == 255 - b && length == 1 && piece[0] == text[b], "byte %d became token %d", 255 - b, tokens[b]);
    }
    const char *end = tokenizer_decode(tokenizer, 256, &length);
    CHECK(length == 13 && !memcmp(end, "<|endoftext|>", 13), "end of text decodes to %zu bytes", length);

    TEST("tokenizer: a short buffer gets its share and the whole count; tokens outside decode to nothing");
    tokens[3] = -9;
    CHECK(!tokenizer_encode(tokenizer, "hello", 5, tokens, 3, &count, &error) && count == 5, "count %zu, expected 5", count);
    CHECK(tokens[0] == 'h' && tokens[2] == 'l' && tokens[3] == -9, "tokens %d .. %d, then %d", tokens[0], tokens[2],
          tokens[3]);
    CHECK(!tokenizer_encode(tokenizer, "", 0, NULL, 0, &count, &error) && count == 0, "an empty text has %zu tokens", count);
    static const int32_t outside[] = {-1, 257, INT32_MAX, INT32_MIN};
    for (int i = 0; i < 4; i++) {
        const char *piece = tokenizer_decode(tokenizer, outside[i], &length);
        CHECK(piece && length == 0, "token %d decodes to %zu bytes", outside[i], length);
    }
    tokenizer_close(tokenizer);
    tokenizer_close(NULL);
}

static void test_merged(void)
{
    uint8_t data[4096] = {0};
    Error error = {""};
    size_t length, count;
    int32_t tokens[8];
    TEST("tokenizer: tokens of 0, 1, 2 and 255 bytes; text is not encoded, and the sentence says why");
    int32_t header[4] = {20240328, 2, 5, 0};
    memcpy(data, header, sizeof header);
    size_t at = HEADER_BYTES;
    static const uint8_t lengths[5] = {3, 1, 0, 2, 255};
    for (int t = 0; t < 5; t++) {
        data[at++] = lengths[t];
        memset(data + at, 'a' + t, lengths[t]);
        at += lengths[t];
    }
    write_file(data, at);
    Tokenizer *tokenizer = tokenizer_open(path, &error);
    if (!CHECK(tokenizer, "%s", error.text)) return;
    for (int32_t t = 0; t < 5; t++) {
        const char *piece = tokenizer_decode(tokenizer, t, &length);
        CHECK(length == lengths[t] && (!length || (piece[0] == 'a' + t && piece[length - 1] == 'a' + t)),
              "token %d has %zu bytes, expected %d", t, length, lengths[t]);
    }
    CHECK(tokenizer_encode(tokenizer, "b", 1, tokens, 8, &count, &error) == -1 &&
          strstr(error.text, "token 2 is not a single byte"), "'%s'", error.text);
    tokenizer_close(tokenizer);

    TEST("tokenizer: a byte without a token is named with its position");
    int32_t small[4] = {20240328, 2, 3, 2};
    memcpy(data, small, sizeof small);
    memcpy(data + HEADER_BYTES, "\1a\1b\0", 5);
    write_file(data, HEADER_BYTES + 5);
    tokenizer = tokenizer_open(path, &error);
    if (!CHECK(tokenizer, "%s", error.text)) return;
    CHECK(!tokenizer_encode(tokenizer, "abba", 4, tokens, 8, &count, &error) && count == 4 && tokens[2] == 1, "%s",
          error.text);
    CHECK(tokenizer_encode(tokenizer, "abc", 3, tokens, 8, &count, &error) == -1 && strstr(error.text, "byte 0x63") &&
          strstr(error.text, "position 2"), "'%s'", error.text);
    tokenizer_close(tokenizer);
}

/* A file that is the bytes tokenizer with one int32 of its header replaced, or another size, must be refused. */
static void expect_fault(int field, int32_t value, size_t size, const char *word)
{
    uint8_t data[4096] = {0};
    Error error = {""};
    size_t whole = make_bytes_tokenizer(data);
    if (field >= 0) memcpy(data + 4 * field, &value, sizeof value);
    write_file(data, size ? size : whole);
    Tokenizer *tokenizer = tokenizer_open(path, &error);
    CHECK(!tokenizer && strstr(error.text, word) && strstr(error.text, path), "field %d = %d, size %zu: '%s', expected '%s'",
          field, value, size, tokenizer ? "opened" : error.text, word);
    tokenizer_close(tokenizer);
}

static void test_faults(void)
{
    uint8_t data[4096];
    Error error = {""};
    size_t whole = make_bytes_tokenizer(data);
    TEST("tokenizer: a file that is wrong is refused with a sentence");
    expect_fault(0, 20240520, 0, "magic 20240520 at byte 0, expected 20240328");
    expect_fault(1, 1, 0, "version 1 at byte 4, expected 2");
    expect_fault(2, 0, 0, "0 tokens at byte 8");
    expect_fault(2, -1, 0, "-1 tokens at byte 8");
    expect_fault(2, INT32_MAX, 0, "2147483647 tokens at byte 8");
    expect_fault(2, 258, 0, "truncated in token 257 of 258");
    expect_fault(3, 257, 0, "end-of-text token 257 at byte 12, expected 0 to 256");
    expect_fault(3, -1, 0, "end-of-text token -1");
    expect_fault(2, 256, 0, "end-of-text token 256");
    expect_fault(-1, 0, whole - 1, "truncated in token 256 of 257");
    expect_fault(-1, 0, whole - 13, "truncated in token 256 of 257");
    expect_fault(-1, 0, whole - 14, "truncated in token 256 of 257");
    expect_fault(-1, 0, HEADER_BYTES + 258, "truncated in token 129");
    expect_fault(-1, 0, HEADER_BYTES, "257 tokens at byte 8");
    expect_fault(-1, 0, HEADER_BYTES - 1, "1023 bytes");
    expect_fault(-1, 0, whole + 1, "expected that to be the end");
    write_file(data, 0);
    CHECK(!tokenizer_open(path, &error) && strstr(error.text, "0 bytes"), "an empty file: '%s'", error.text);
    CHECK(!tokenizer_open("/tmp", &error) && strstr(error.text, "directory"), "a directory: '%s'", error.text);
    unlink(path);
    CHECK(!tokenizer_open(path, &error) && strstr(error.text, "cannot open: No such file"), "no file: '%s'", error.text);
}

int main(void)
{
    snprintf(path, sizeof path, "/tmp/flashgpt-tokenizer-XXXXXX");
    int file = mkstemp(path);
    if (file < 0) return perror("/tmp"), 1;
    close(file);
    test_bytes();
    test_merged();
    test_faults();
    unlink(path);
    return test_end();
}
