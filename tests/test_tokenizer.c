/* test_tokenizer.c - tokenizer.bin: decoding, encoding of bytes and with merges, every way in which a file can be wrong.
 *
 * Merges are drawn at random and held against a plain search through all of them; how text is cut, against cuts written out
 * here. tests/test_tokenizer.py compares both with tiktoken and with Unicode's tables. */
#include "data/tokenizer.h"

#include <stdlib.h>
#include <unistd.h>

#include "data/random.h"
#include "tests/test.h"

enum { HEADER_BYTES = 1024, MERGES = 300, TOKENS = 257 + MERGES };

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

/* llm.c's first version has no word for the end-of-text token. */
static void test_old_version(void)
{
    enum { COUNT = 50257 };
    static uint8_t data[HEADER_BYTES + 2 * COUNT];
    int32_t header[3] = {20240328, 1, COUNT};
    Error error = {""};
    size_t length;
    TEST("tokenizer: version 1 ends texts with token 50256");
    memcpy(data, header, sizeof header);
    for (int t = 0; t < COUNT; t++) {
        data[HEADER_BYTES + 2 * t] = 1;
        data[HEADER_BYTES + 2 * t + 1] = (uint8_t)(t % 251);
    }
    write_file(data, sizeof data);
    Tokenizer *tokenizer = tokenizer_open(path, &error);
    if (!CHECK(tokenizer, "%s", error.text)) return;
    CHECK(tokenizer_end_of_text(tokenizer) == COUNT - 1, "end of text is %d", tokenizer_end_of_text(tokenizer));
    CHECK((uint8_t)*tokenizer_decode(tokenizer, 1000, &length) == 1000 % 251 && length == 1, "token 1000 is another");
    tokenizer_close(tokenizer);
}

/* Text with a bar at every place where a piece must end, but for the end. */
static void test_pieces(void)
{
    static const char *const cases[] = {
        "Hello| world", "a", " ", "  ", "a| b", "a| | b", " a", "\n|a", "\n\n|\n|a", "a|\n \n", "a|  ", "a| |\n|b",
        "don|'t", "we|'ll", "I|'ve|'re|'s|'d|'m", "'|a", "'s|'|x", "'ll", "'ll|l", "it|'|S", "''|s", "x| '|s", "it|'s|x",
        "it|'ll|x", "'", "'|v", "v|'|v", "can|'t|.\"", "abc|123|def", "a|1| 23|b|4", "a| !?|b", "!?'|s", "x|=-|1", "a|_|b",
        "a|\t| b", "a|\t|\t|b", "tab|\t", "\r\n", "a|\r|\n|b",
        "\xc3\xa9t\xc3\xa9| \xc3\xa9", "\xe4\xb8\xad\xe6\x96\x87|\xe3\x80\x82|\xe4\xb8\xad", /* accents; Chinese */
        "a|\xc2\xa0|b", "a|\xc2\xa0| b", "a|\xe2\x80\x83\xe3\x80\x80| b", /* blanks that are not U+0020 */
        "a|\xc2\xbd\xd9\xa3|b", " \xe2\x85\xa7|a", /* one half, Arabic three; Roman eight */
        "e|\xcc\x81|e", " \xf0\x9f\x98\x80\xf0\x9f\x98\x80|a", /* a mark, two faces */
        "\x1c|a", "a|\x7f|b", "a|\xc2\x85|b",
        "a|\xff\xfe|b", "a| \xff|b", "\xc3|a", "\xe4\xb8|a", "\xc0\x80|a", "\xed\xa0\x80|a", "\xf4\x90\x80\x80|a",
        "\xf0\x90\x90\x80|\xf0\x90\x90", "a|\xc3", "a| \xc3", " | \xe2\x80", /* no UTF-8, and the lines before */
    };
    TEST("pieces: blanks, contractions, letters, numbers and the rest, in several scripts and in none");
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char text[64], got[64];
        size_t length = 0, at = 0, out = 0;
        for (const char *c = cases[i]; *c; c++)
            if (*c != '|') text[length++] = *c;
        while (at < length) {
            size_t size = bpe_piece((const uint8_t *)text + at, length - at);
            if (!CHECK(size > 0 && size <= length - at, "a piece of %zu bytes of %zu", size, length - at)) return;
            if (at) got[out++] = '|';
            memcpy(got + out, text + at, size);
            out += size;
            at += size;
        }
        got[out] = 0;
        CHECK(!strcmp(got, cases[i]), "cut as '%s', expected '%s'", got, cases[i]);
    }
}

/* A file in the making, and the merges in it. */
typedef struct Vocabulary {
    uint8_t data[HEADER_BYTES + 1024 + MERGES * (256 + 12)];
    size_t size, tokens_end;
    BpeMerge merges[MERGES];
    int32_t of_byte[256];
} Vocabulary;

/* 256 bytes in a mixed order, end of text among them, and random merges of few letters, whose results have their numbers in
 * an order that is not that of their ranks. Some merges have the result of another. */
static void make_merges(Vocabulary *v, uint64_t seed)
{
    static char bytes[TOKENS][256];
    int lengths[TOKENS] = {0}, count = 257;
    int32_t header[6] = {20240328, 2, TOKENS, 7, MERGES, TOKENIZER_GPT2};
    int32_t order[TOKENS];
    memset(v->data, 0, HEADER_BYTES);
    memcpy(v->data, header, sizeof header);
    for (int t = 0; t < 257; t++) { /* token 7 ends texts */
        int byte = t > 7 ? t - 1 : t;
        lengths[t] = t == 7 ? 3 : 1;
        memcpy(bytes[t], "END", 3);
        if (t == 7) continue;
        bytes[t][0] = (char)(byte * 5 + 3);
        v->of_byte[(byte * 5 + 3) % 256] = t;
    }
    for (int i = 0; i < MERGES; i++) order[i] = 257 + i;
    for (int i = MERGES - 1; i > 0; i--) {
        int other = (int)(random_u64(&seed) % (uint64_t)(i + 1)), held = order[i];
        order[i] = order[other];
        order[other] = held;
    }
    for (int i = 0; i < MERGES; i++) {
        int parts[2], found = -1;
        do
            for (int k = 0; k < 2; k++) {
                int pick = (int)(random_u64(&seed) % (uint64_t)(4 + count - 257));
                parts[k] = pick < 4 ? v->of_byte['a' + pick] : order[pick - 4];
            }
        while (lengths[parts[0]] + lengths[parts[1]] > 200);
        char joined[256];
        int length = lengths[parts[0]] + lengths[parts[1]];
        memcpy(joined, bytes[parts[0]], (size_t)lengths[parts[0]]);
        memcpy(joined + lengths[parts[0]], bytes[parts[1]], (size_t)lengths[parts[1]]);
        for (int t = 257; t < TOKENS; t++)
            if (lengths[t] == length && !memcmp(bytes[t], joined, (size_t)length)) found = t;
        if (found < 0) {
            found = order[count++ - 257];
            memcpy(bytes[found], joined, (size_t)length);
            lengths[found] = length;
        }
        v->merges[i] = (BpeMerge){parts[0], parts[1], found};
    }
    size_t at = HEADER_BYTES;
    for (int t = 0; t < TOKENS; t++) {
        v->data[at++] = (uint8_t)lengths[t];
        memcpy(v->data + at, bytes[t], (size_t)lengths[t]);
        at += (size_t)lengths[t];
    }
    v->tokens_end = at;
    memcpy(v->data + at, v->merges, sizeof v->merges);
    v->size = at + sizeof v->merges;
}

/* What merging gives, by a search through all merges for every pair: the rank of the first that fits. */
static size_t merge_plainly(const Vocabulary *v, const char *piece, size_t length, int32_t *tokens)
{
    size_t n = length;
    for (size_t i = 0; i < n; i++) tokens[i] = v->of_byte[(uint8_t)piece[i]];
    for (;;) {
        size_t best = n, rank = MERGES;
        for (size_t i = 0; i + 1 < n; i++)
            for (size_t r = 0; r < rank; r++)
                if (v->merges[r].left == tokens[i] && v->merges[r].right == tokens[i + 1]) {
                    rank = r;
                    best = i;
                }
        if (best == n) return n;
        tokens[best] = v->merges[rank].result;
        n--;
        memmove(tokens + best + 1, tokens + best + 2, (n - best - 1) * sizeof *tokens);
    }
}

static void test_merging(void)
{
    enum { MOST = 400 };
    static Vocabulary v;
    static int32_t got[MOST], expected[MOST];
    static const size_t lengths[] = {1, 2, 3, 5, 17, 46, 47, 48, 49, 50, 64, 65, 100, MOST};
    char text[MOST];
    uint64_t state = 5;
    int64_t merged = 0;
    Error error = {""};
    size_t count, n;
    TEST("merging: as a plain search through all merges has it, for pieces short and long");
    for (uint64_t seed = 1; seed <= 4; seed++) {
        make_merges(&v, seed);
        write_file(v.data, v.size);
        Tokenizer *tokenizer = tokenizer_open(path, &error);
        if (!CHECK(tokenizer, "%s", error.text)) return;
        for (size_t l = 0; l < sizeof lengths / sizeof lengths[0]; l++)
            for (int repeat = 0; repeat < 8; repeat++) {
                int letters = repeat % 4 + 1; /* one letter alone makes equal pairs that overlap */
                for (size_t i = 0; i < lengths[l]; i++) text[i] = "abcd"[random_u64(&state) % (uint64_t)letters];
                n = merge_plainly(&v, text, lengths[l], expected);
                merged += (int64_t)(lengths[l] - n);
                CHECK(!tokenizer_encode(tokenizer, text, lengths[l], got, MOST, &count, &error), "%s", error.text);
                CHECK(count == n && !memcmp(got, expected, n * sizeof *got), "seed %d, %zu bytes: %zu tokens, expected %zu",
                      (int)seed, lengths[l], count, n);
            }
        TEST("merging: any bytes become tokens that decode to them; a short buffer gets its share (seed %d)", (int)seed);
        for (size_t i = 0; i < MOST; i++) {
            text[i] = (char)random_u64(&state);
            if (random_u64(&state) % 3) text[i] = "abc d'"[random_u64(&state) % 6];
        }
        CHECK(!tokenizer_encode(tokenizer, text, MOST, expected, MOST, &n, &error), "%s", error.text);
        size_t at = 0, length;
        for (size_t i = 0; i < n; i++, at += length) {
            const char *piece = tokenizer_decode(tokenizer, expected[i], &length);
            CHECK(at + length <= MOST && !memcmp(piece, text + at, length), "token %zu does not stand at byte %zu", i, at);
        }
        CHECK(at == MOST && n < MOST, "%zu tokens decode to %zu bytes of %d", n, at, MOST);
        for (size_t capacity = 0; capacity <= n + 1; capacity++) {
            for (size_t i = 0; i < MOST; i++) got[i] = -9;
            CHECK(!tokenizer_encode(tokenizer, text, MOST, got, capacity, &count, &error) && count == n, "count %zu", count);
            size_t same = 0;
            while (same < MOST && got[same] == expected[same]) same++;
            CHECK(same == (capacity < n ? capacity : n) && got[same] == -9, "capacity %zu got %zu tokens", capacity, same);
        }
        CHECK(!tokenizer_encode(tokenizer, text, MOST, NULL, 0, &count, &error) && count == n, "count %zu", count);
        CHECK(!tokenizer_encode(tokenizer, "", 0, NULL, 0, &count, &error) && count == 0, "an empty text has %zu", count);
        tokenizer_close(tokenizer);
    }
    CHECK(merged > 5000, "only %lld merges were made", (long long)merged);
}

static void test_write(void)
{
    static Vocabulary v;
    static uint8_t again[sizeof v.data];
    char copy[80];
    Error error = {""};
    TEST("tokenizer: what is written is what was read, made of its parts or opened");
    make_merges(&v, 9);
    write_file(v.data, v.size);
    snprintf(copy, sizeof copy, "%s.copy", path);
    Tokenizer *tokenizer = tokenizer_open(path, &error), *made = NULL;
    if (!CHECK(tokenizer, "%s", error.text)) return;
    TokenizerParts parts = *tokenizer_parts(tokenizer);
    parts.table = malloc(parts.table_bytes);
    parts.merges = malloc(parts.merge_count * sizeof *parts.merges);
    memcpy(parts.table, tokenizer_parts(tokenizer)->table, parts.table_bytes);
    memcpy(parts.merges, v.merges, sizeof v.merges);
    made = tokenizer_make("parts", parts, &error);
    CHECK(made, "%s", error.text);
    for (int i = 0; i < 2 && made; i++) {
        CHECK(!tokenizer_write(i ? made : tokenizer, copy, &error), "%s", error.text);
        FILE *file = fopen(copy, "rb");
        size_t size = file ? fread(again, 1, sizeof again, file) : 0;
        CHECK(size == v.size && !memcmp(again, v.data, size), "%zu bytes came back, expected %zu", size, v.size);
        if (file) fclose(file);
        CHECK(tokenizer_write(tokenizer, copy, &error) && strstr(error.text, "File exists"), "'%s'", error.text);
        unlink(copy);
    }
    tokenizer_close(tokenizer);
    tokenizer_close(made);
    parts.table = calloc(3, 1);
    parts.merges = NULL;
    parts.merge_count = 0;
    parts.table_bytes = 3;
    CHECK(!tokenizer_make("parts", parts, &error) && strstr(error.text, "parts: truncated in token 3"), "'%s'", error.text);
}

/* One int32 of the merges, or one byte of the table, replaced. */
static void test_bad_merges(void)
{
    static Vocabulary v;
    static const struct { int merge, word; int32_t value; const char *words; } cases[] = {
        {0, 0, -1, "merge 0 has token -1, expected 0 to 556"}, {299, 2, TOKENS, "merge 299 has token 557"},
        {5, 1, INT32_MAX, "merge 5 has token 2147483647"}, {7, 2, 0, "merge 7: the bytes of tokens"},
        {7, 0, 0, "do not join to those of token"},
    };
    Error error = {""};
    TEST("tokenizer: merges that are wrong are refused with a sentence");
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        make_merges(&v, 3);
        memcpy(v.data + v.tokens_end + 12 * cases[i].merge + 4 * cases[i].word, &cases[i].value, 4);
        write_file(v.data, v.size);
        Tokenizer *tokenizer = tokenizer_open(path, &error);
        CHECK(!tokenizer && strstr(error.text, cases[i].words), "case %zu: '%s'", i, tokenizer ? "opened" : error.text);
        tokenizer_close(tokenizer);
    }
    make_merges(&v, 3);
    write_file(v.data, v.size - 1);
    CHECK(!tokenizer_open(path, &error) && strstr(error.text, "truncated in token 556 of 557"), "'%s'", error.text);
    write_file(v.data, v.size + 1);
    CHECK(!tokenizer_open(path, &error) && strstr(error.text, "expected that to be where the merges begin"), "'%s'",
          error.text);
    v.data[HEADER_BYTES + 1] = v.data[HEADER_BYTES + 3]; /* one byte has two tokens, another has none */
    write_file(v.data, v.size);
    CHECK(!tokenizer_open(path, &error) && strstr(error.text, "no token for byte 0x03"), "'%s'", error.text);
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
    expect_fault(1, 3, 0, "version 3 at byte 4, expected 1 or 2");
    expect_fault(1, 0, 0, "version 0 at byte 4, expected 1 or 2");
    expect_fault(1, 1, 0, "end-of-text token 50256 of version 1, expected 0 to 256");
    expect_fault(4, -1, 0, "-1 merges at byte 16");
    expect_fault(4, 1, 0, "rule 0 at byte 20, expected 1 to 1 with merges");
    expect_fault(4, 44, 0, "44 merges at byte 16, expected 0 to 43");
    expect_fault(5, 2, 0, "rule 2 at byte 20, expected 0 to 1");
    expect_fault(5, -1, 0, "rule -1 at byte 20");
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
    test_old_version();
    test_pieces();
    test_merging();
    test_write();
    test_faults();
    test_bad_merges();
    unlink(path);
    return test_end();
}
