/* fuzz_readers.c - damaged files for every reader: shards, safetensors, JSON, tokenizers, models of llm.c, HellaSwag.
 *
 *     fuzz_readers [SECONDS [SEED [FILE]]]       default: 2 seconds, seed 1, a file in memory
 *
 * Seeds are small sound files of each format, made here. Each round takes one, damages it (bytes, bits, whole integers with
 * values that have broken readers before, header fields, pieces taken out, doubled or brought in from another file, the end
 * cut off, words that mean something in a JSON header) and hands it to its reader. What the reader accepts is then read to
 * the end, as a program does that trusts it, and now and then becomes a seed itself, so that damage can add up. A fault is a
 * crash, a report of the sanitizers (make fuzz builds with them), an error without its sentence, or a promise of the reader
 * that does not hold. Rounds follow from the seed alone: the same seed and a FILE show a fault again and leave what did it.
 */
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "data/files.h"
#include "data/hellaswag.h"
#include "data/json.h"
#include "data/llmc.h"
#include "data/random.h"
#include "data/safetensors.h"
#include "data/shards.h"
#include "data/tokenizer.h"
#include "data/vocabulary.h"
#include "layers/cpu.h"

enum { LARGEST = 1 << 14, SEEDS = 24 };

typedef struct Sample {
    uint8_t bytes[LARGEST];
    size_t size;
} Sample;

typedef struct Fuzzer Fuzzer;

/* One reader with its seeds. `read` gives 1 where the file was accepted and 0 where it was refused. */
typedef struct Target {
    const char *name;
    int (*read)(Fuzzer *fuzzer, const Sample *sample);
    void (*make)(struct Target *target, Fuzzer *fuzzer);
    Sample seeds[SEEDS];
    int sound, count; /* seeds made here, which stay; all of them */
    long rounds, accepted;
} Target;

struct Fuzzer {
    uint64_t random;
    char path[256]; /* the file that readers open */
    char dir[64];   /* a directory in which it is called tokenizer.json */
    Gpt *gpt;       /* of the shape in the sound files of llm.c */
    Stream *stream;
    int file;       /* the same, open for writing */
    volatile unsigned sink; /* what was read, so that reading is not left out */
};

static uint64_t below(Fuzzer *fuzzer, uint64_t n) { return random_u64(&fuzzer->random) % n; }

/* Says what is wrong and ends; the damaged file stays. */
__attribute__((noreturn, format(printf, 1, 2)))
static void fault(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    printf("FAIL fuzz: ");
    vprintf(format, arguments);
    va_end(arguments);
    printf("\n0 passed, 1 failed\n");
    exit(1);
}

static void touch(Fuzzer *fuzzer, const void *data, size_t bytes)
{
    unsigned sum = 0;
    for (size_t i = 0; i < bytes; i++) sum += ((const uint8_t *)data)[i];
    fuzzer->sink += sum;
}

/* Puts the sample where the readers look for it, and reads it. */
static int read_sample(Fuzzer *fuzzer, const Target *target, const Sample *sample)
{
    if (ftruncate(fuzzer->file, 0) || pwrite(fuzzer->file, sample->bytes, sample->size, 0) != (ssize_t)sample->size)
        fault("cannot write %s", fuzzer->path);
    return target->read(fuzzer, sample);
}

/* --- readers ---------------------------------------------------------------------------------------------------------- */

static int refused(const Error *error, const char *name)
{
    if (!error->text[0] || strchr(error->text, '\n')) fault("%s: no error of one sentence: '%s'", name, error->text);
    return 0;
}

static int read_shards(Fuzzer *fuzzer, const Sample *sample)
{
    (void)sample;
    static const int64_t vocabularies[] = {1, 257, 50257, 65536, (int64_t)1 << 31, (int64_t)1 << 40};
    Error error = {""};
    ShardSet set;
    if (shards_open(&set, fuzzer->path, &error)) return refused(&error, "shards");
    for (size_t v = 0; v < sizeof vocabularies / sizeof *vocabularies; v++) {
        error.text[0] = 0;
        int64_t vocab = vocabularies[v], T = 1 + (int64_t)below(fuzzer, 40);
        int bad = shards_check_tokens(&set, vocab, &error);
        if (bad) refused(&error, "shards_check_tokens");
        int64_t shift = (int64_t)below(fuzzer, (uint64_t)shard_slack(&set.shards[0], T) + 1), n = shards_windows(&set, T);
        for (int64_t i = 0; i < n; i++) {
            int32_t window[41];
            error.text[0] = 0;
            if (shards_window(&set, i, T, &shift, vocab, window, &error)) {
                refused(&error, "shards_window");
                if (!bad && vocab < (int64_t)1 << 31) fault("shards: all tokens were checked, and yet: %s", error.text);
                break;
            }
            touch(fuzzer, window, (size_t)(T + 1) * sizeof *window);
        }
    }
    shards_close(&set);
    return 1;
}

/* Decodes all tokens, encodes the sample; closes the tokenizer. */
static void use_tokenizer(Fuzzer *fuzzer, Tokenizer *tokenizer, const Sample *sample)
{
    Error error = {""};
    int64_t vocab = tokenizer_vocab(tokenizer);
    for (int64_t t = -1; t <= vocab; t++) {
        size_t length;
        const char *bytes = tokenizer_decode(tokenizer, (int32_t)t, &length);
        touch(fuzzer, bytes, length);
    }
    int32_t tokens[64];
    size_t count;
    error.text[0] = 0;
    if (tokenizer_encode(tokenizer, (const char *)sample->bytes, sample->size, tokens, 64, &count, &error)) {
        refused(&error, "tokenizer_encode");
    } else {
        size_t at = 0, length;
        for (size_t i = 0; i < count && i < 64; i++, at += length) {
            if (tokens[i] < 0 || tokens[i] >= vocab)
                fault("tokenizer: token %d of a vocabulary of %lld", tokens[i], (long long)vocab);
            const char *bytes = tokenizer_decode(tokenizer, tokens[i], &length);
            if (length > sample->size - at || memcmp(bytes, sample->bytes + at, length))
                fault("tokenizer: token %zu of a text does not decode to its bytes from %zu on", i, at);
        }
        if (count <= 64 && at != sample->size) fault("tokenizer: %zu bytes decode to %zu", sample->size, at);
    }
    tokenizer_close(tokenizer);
}

static int read_tokenizer(Fuzzer *fuzzer, const Sample *sample)
{
    Error error = {""};
    Tokenizer *tokenizer = tokenizer_open(fuzzer->path, &error);
    if (!tokenizer) return refused(&error, "tokenizer");
    use_tokenizer(fuzzer, tokenizer, sample);
    return 1;
}

/* A tokenizer.json of a kind that is not read has no sentence, and is none. */
static int read_vocabulary(Fuzzer *fuzzer, const Sample *sample)
{
    Error error = {"unset"};
    Tokenizer *tokenizer = vocabulary_open(fuzzer->dir, &error);
    if (!tokenizer) return error.text[0] ? refused(&error, "vocabulary") : 0;
    use_tokenizer(fuzzer, tokenizer, sample);
    return 1;
}

static int read_llmc(Fuzzer *fuzzer, const Sample *sample)
{
    (void)sample;
    Error error = {""};
    GptConfig config;
    if (llmc_inspect(fuzzer->path, &config, &error)) return refused(&error, "llmc");
    if (llmc_load(fuzzer->path, fuzzer->gpt, &error)) return refused(&error, "llmc_load");
    if (gpt_find_nonfinite(fuzzer->gpt, GPT_PARAMETERS)) fault("llmc: a value that is not finite was loaded");
    return 1;
}

static int read_hellaswag(Fuzzer *fuzzer, const Sample *sample)
{
    (void)sample;
    static const int64_t vocabularies[] = {40, 257, 65536}, windows[] = {12, 30, 1 << 20};
    Error error = {""};
    HellaSwag set;
    int64_t vocab = vocabularies[below(fuzzer, 3)], window = windows[below(fuzzer, 3)], rows = 0;
    if (hellaswag_open(&set, fuzzer->path, vocab, window, &error)) return refused(&error, "hellaswag");
    for (int64_t e = 0; e < set.example_count; e++) {
        const HellaSwagExample *example = &set.examples[e];
        if (example->first != rows || example->count < 2 || example->label < 0 || example->label >= example->count)
            fault("hellaswag: example %lld has the rows %lld and %lld more, the label %lld", (long long)e,
                  (long long)example->first, (long long)example->count, (long long)example->label);
        rows += example->count;
    }
    if (rows != set.row_count) fault("hellaswag: %lld rows of %lld", (long long)rows, (long long)set.row_count);
    for (int64_t i = 0; i < rows; i++) {
        const HellaSwagRow *row = &set.rows[i];
        int64_t count = row->context_count + row->ending_count;
        if (row->context_count < 1 || row->ending_count < 1 || count > window + 1)
            fault("hellaswag: a context of %lld and an ending of %lld", (long long)row->context_count,
                  (long long)row->ending_count);
        for (int64_t t = 0; t < count; t++) {
            uint16_t token = t < row->context_count ? row->context[t] : row->ending[t - row->context_count];
            if (token >= vocab) fault("hellaswag: token %d of %lld", token, (long long)vocab);
        }
    }
    hellaswag_close(&set);
    return 1;
}

/* Visits every value; gives the number of them. */
static size_t walk_json(Fuzzer *fuzzer, const JsonValue *value, int depth)
{
    size_t children = 0, total = 1;
    int64_t integer;
    if (value->key) touch(fuzzer, value->key, strlen(value->key));
    if (value->text) touch(fuzzer, value->text, value->kind == JSON_STRING ? value->length + 1 : strlen(value->text) + 1);
    if (json_integer(value, &integer) && (double)integer != value->number)
        fault("json: integer %lld of number %.17g", (long long)integer, value->number);
    for (const JsonValue *child = value->child; child; child = child->next, children++) {
        if (value->kind == JSON_OBJECT && json_member(value, child->key) != child)
            fault("json: a member is not found under its name");
        total += walk_json(fuzzer, child, depth + 1);
    }
    int holds = value->kind == JSON_ARRAY || value->kind == JSON_OBJECT;
    if (depth > JSON_DEPTH || (holds && children != value->length) || (!holds && children))
        fault("json: depth %d, %zu children of %zu", depth, children, value->length);
    return total;
}

static int read_json(Fuzzer *fuzzer, const Sample *sample)
{
    Error error = {""};
    /* A copy of the exact size: a read beyond it is one that the sanitizer sees. */
    char *text = malloc(sample->size ? sample->size : 1);
    memcpy(text, sample->bytes, sample->size);
    JsonDocument *document = json_parse(text, sample->size, "fuzz", &error);
    if (document) {
        char quoted[256];
        walk_json(fuzzer, json_root(document), 0);
        json_quote(quoted, sizeof quoted, text, sample->size < 300 ? sample->size : 300);
        json_free(document);
    }
    free(text);
    return document ? 1 : refused(&error, "json");
}

static int read_safetensors(Fuzzer *fuzzer, const Sample *sample)
{
    (void)sample;
    Error error = {""};
    Safetensors *file = safetensors_open(fuzzer->path, &error);
    if (!file) return refused(&error, "safetensors");
    for (size_t i = 0; i < safetensors_count(file); i++) {
        const SafetensorsTensor *tensor = safetensors_at(file, i);
        int64_t elements = 1;
        for (int r = 0; r < tensor->rank; r++) elements *= tensor->shape[r];
        if (safetensors_find(file, tensor->name) != tensor) fault("safetensors: a tensor is not found under its name");
        touch(fuzzer, tensor->data, tensor->bytes);
        float *values = malloc((size_t)elements * sizeof *values + 1);
        error.text[0] = 0;
        if (safetensors_to_fp32(values, tensor, 0, elements, &error))
            refused(&error, "safetensors_to_fp32");
        else
            touch(fuzzer, values, (size_t)elements * sizeof *values);
        free(values);
    }
    const char *made_by = safetensors_metadata(file, "made_by");
    if (made_by) touch(fuzzer, made_by, strlen(made_by));
    safetensors_close(file);
    return 1;
}

/* --- seeds ------------------------------------------------------------------------------------------------------------ */

static void new_seed(Target *target, const void *bytes, size_t size)
{
    Sample *sample = &target->seeds[target->count++];
    memcpy(sample->bytes, bytes, size);
    sample->size = size;
    target->sound = target->count;
}

static void make_shards(Target *target, Fuzzer *fuzzer)
{
    static const struct { int32_t magic, version, width, count; } forms[] = {{20240520, 1, 2, 200}, {20240801, 7, 4, 100},
                                                                             {20240520, 1, 2, 1}};
    uint8_t data[2048];
    for (size_t f = 0; f < sizeof forms / sizeof *forms; f++) {
        memset(data, 0, sizeof data);
        int32_t header[3] = {forms[f].magic, forms[f].version, forms[f].count};
        memcpy(data, header, sizeof header);
        for (int i = 0; i < forms[f].count; i++) data[1024 + i * forms[f].width] = (uint8_t)below(fuzzer, 256);
        new_seed(target, data, 1024 + (size_t)(forms[f].count * forms[f].width));
    }
    new_seed(target, data + 1000, 600);
}

static void make_hellaswag(Target *target, Fuzzer *fuzzer)
{
    for (int count = 1; count < 6; count += 2) {
        uint8_t data[8192] = {0};
        uint16_t words[3000];
        size_t at = 0, longest = 0;
        for (int e = 0; e < count; e++) {
            size_t start = at;
            uint16_t endings = (uint16_t)(2 + below(fuzzer, 3)), begin[5] = {65535, 0, (uint16_t)e, 0, endings};
            begin[3] = (uint16_t)below(fuzzer, endings);
            memcpy(words + at, begin, sizeof begin);
            at += 5;
            for (int part = 0; part <= endings; part++) {
                words[at] = (uint16_t)(1 + below(fuzzer, 6));
                for (int t = 0; t < words[at]; t++) words[at + 1 + (size_t)t] = (uint16_t)below(fuzzer, 40);
                at += 1 + words[at];
            }
            words[start + 1] = (uint16_t)(2 * (at - start));
            if (at - start > longest) longest = at - start;
        }
        int32_t header[4] = {20240522, 1, count, (int32_t)(2 * longest)};
        memcpy(data, header, sizeof header);
        memcpy(data + 1024, words, 2 * at);
        new_seed(target, data, 1024 + 2 * at);
    }
}

static void make_tokenizer(Target *target, Fuzzer *fuzzer)
{
    for (int merged = 0; merged < 2; merged++) {
        uint8_t data[4096] = {0};
        int32_t header[4] = {20240328, 2, merged ? 40 : 257, merged ? 0 : 256};
        memcpy(data, header, sizeof header);
        size_t at = 1024;
        for (int t = 0; t < header[2]; t++) {
            uint8_t length = merged ? (uint8_t)below(fuzzer, 40) : 1;
            data[at++] = length;
            for (int i = 0; i < length; i++) data[at++] = (uint8_t)(t + i);
        }
        new_seed(target, data, at);
    }
    /* Every byte, and merges: each token from 256 on is one of before it and a byte; 299 ends texts. */
    uint8_t data[4096] = {0};
    int32_t header[6] = {20240328, 2, 300, 299, 43, TOKENIZER_GPT2}, merges[43][3];
    size_t at = 1024, starts[300];
    memcpy(data, header, sizeof header);
    for (int t = 0; t < 300; t++) {
        int left = t - 256 - (int)below(fuzzer, 3) * 2, right = t % 256;
        if (left < 0) left = 'a' + t % 26;
        else left += 256;
        if (left >= t) left = t - 1;
        uint8_t length = t < 256 ? 1 : (uint8_t)(data[starts[left]] + 1);
        starts[t] = at;
        data[at++] = length;
        if (t >= 256) memcpy(data + at, data + starts[left] + 1, (size_t)(length - 1));
        data[at + length - 1] = (uint8_t)right;
        at += length;
        if (t < 256 || t == 299) continue;
        merges[t - 256][0] = left;
        merges[t - 256][1] = right;
        merges[t - 256][2] = t;
    }
    memcpy(data + at, merges, sizeof merges);
    new_seed(target, data, at + sizeof merges);
}

static void make_vocabulary(Target *target, Fuzzer *fuzzer)
{
    static const char *const texts[] = {
        "{\"added_tokens\": [{\"id\": 3, \"content\": \"</s>\", \"special\": false}], "
        "\"decoder\": {\"type\": \"ByteLevel\"}, \"model\": {\"type\": \"BPE\", "
        "\"vocab\": {\"a\": 0, \"\\u0120b\": 1, \"\\u4e2d\": 2}}}",
        "{\"pre_tokenizer\": {\"type\": \"Sequence\", \"pretokenizers\": [{\"type\": \"Split\"}, "
        "{\"type\": \"ByteLevel\"}]}, \"model\": {\"vocab\": {\"a\": 0, \"b\": 1, \"ab\": 2, \"<eos>\": 9}, "
        "\"merges\": [\"a b\"]}}",
    };
    (void)fuzzer;
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) new_seed(target, texts[i], strlen(texts[i]));
    /* All bytes, as the alphabet writes them, and merges of both forms. */
    static char text[LARGEST];
    size_t at = (size_t)sprintf(text, "{\"pre_tokenizer\": {\"type\": \"ByteLevel\", \"add_prefix_space\": false}, "
                                "\"model\": {\"type\": \"BPE\", \"vocab\": {\"<|endoftext|>\": 256, \"ab\": 257, "
                                "\"abc\": 258");
    int next = 256;
    for (int b = 0; b < 256; b++) {
        int visible = (b >= '!' && b <= '~') || (b >= 0xA1 && b <= 0xAC) || b >= 0xAE;
        at += (size_t)sprintf(text + at, ", \"\\u%04x\": %d", (unsigned)(visible ? b : next++), b);
    }
    at += (size_t)sprintf(text + at, "}, \"merges\": [\"a b\", [\"ab\", \"c\"]]}}");
    new_seed(target, text, at);
}

static void make_llmc(Target *target, Fuzzer *fuzzer)
{
    const GptConfig *c = gpt_config(fuzzer->gpt);
    for (int version = 3; version <= 5; version += 2) {
        uint8_t data[4096] = {0};
        int32_t header[8] = {20240326, version, (int32_t)c->context, (int32_t)c->vocab, (int32_t)c->layers,
                             (int32_t)c->heads, (int32_t)c->channels, (int32_t)c->vocab + 1};
        size_t elements = (size_t)((c->vocab + 1 + c->context + 2 + c->layers * (12 * c->channels + 13)) * c->channels);
        memcpy(data, header, sizeof header);
        new_seed(target, data, 1024 + elements * (version == 3 ? 4 : 2));
    }
}

static void make_json(Target *target, Fuzzer *fuzzer)
{
    static const char *const texts[] = {
        "{\"model_type\": \"gpt2\", \"n_layer\": 12, \"eps\": 1e-05, \"bos\": null, \"use\": [true, false, -0.5, "
        "9007199254740993]}",
        "[\"\\u00e9\\ud83d\\ude00\\n\\\\\\\"\", \"\xc3\xa9\xe4\xb8\xad\xf0\x9f\x98\x80\", \"\", {}, [], "
        "{\"\": {\"a\": [[[]]]}}]",
        "[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[0]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]",
        "-12.75E+10", "  \"x\"\t\r\n", "{\"vocab\":50257,\"a\":{\"b\":{\"c\":{\"d\":1}}},\"e\":[1,2,3,4,5,6,7,8,9]}",
    };
    (void)fuzzer;
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) new_seed(target, texts[i], strlen(texts[i]));
}

static void make_safetensors(Target *target, Fuzzer *fuzzer)
{
    static const struct { const char *header; size_t data; } files[] = {
        {"{\"__metadata__\":{\"made_by\":\"fuzz\"},\"wte\":{\"dtype\":\"F32\",\"shape\":[4,3],\"data_offsets\":[0,48]},"
         "\"h.0.w\":{\"dtype\":\"BF16\",\"shape\":[2,2,2],\"data_offsets\":[48,64]},"
         "\"h.0.b\":{\"dtype\":\"F16\",\"shape\":[7],\"data_offsets\":[64,78]}}  ", 78},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[0,4]},\"b\":{\"dtype\":\"I64\",\"shape\":[0,5],"
         "\"data_offsets\":[4,4]},\"c\":{\"dtype\":\"U8\",\"shape\":[3],\"data_offsets\":[4,7]}}", 7},
        {"{}", 0},
    };
    for (size_t f = 0; f < sizeof files / sizeof *files; f++) {
        uint8_t data[1024];
        uint64_t length = strlen(files[f].header);
        memcpy(data, &length, 8);
        memcpy(data + 8, files[f].header, length);
        for (size_t i = 0; i < files[f].data; i++) data[8 + length + i] = (uint8_t)below(fuzzer, 256);
        new_seed(target, data, 8 + (size_t)length + files[f].data);
    }
}

/* --- damage ----------------------------------------------------------------------------------------------------------- */

/* Replaces `old` bytes at `at` by `size` others, as far as the largest sample allows. */
static void replace_bytes(Sample *sample, size_t at, size_t old, const void *bytes, size_t size)
{
    if (at > sample->size) at = sample->size;
    if (old > sample->size - at) old = sample->size - at;
    if (sample->size - old + size > LARGEST) return;
    uint8_t copy[LARGEST];
    memcpy(copy, bytes, size); /* bytes may lie in the sample */
    memmove(sample->bytes + at + size, sample->bytes + at + old, sample->size - at - old);
    memcpy(sample->bytes + at, copy, size);
    sample->size = sample->size - old + size;
}

/* A number as a text header holds it. */
static void damage_digits(Fuzzer *fuzzer, Sample *sample, size_t at)
{
    static const char *const numbers[] = {
        "0", "1", "-1", "48", "2147483648", "4294967295", "4294967296", "9223372036854775807", "9223372036854775808",
        "18446744073709551615", "1e308", "1e999", "0.5", "00", "1.", "-",
    };
    while (at < sample->size && (sample->bytes[at] < '0' || sample->bytes[at] > '9')) at++;
    size_t end = at;
    while (end < sample->size && sample->bytes[end] >= '0' && sample->bytes[end] <= '9') end++;
    const char *number = numbers[below(fuzzer, sizeof numbers / sizeof *numbers)];
    replace_bytes(sample, at, end - at, number, strlen(number));
}

static void damage_once(Fuzzer *fuzzer, Sample *sample, const Sample *other)
{
    static const uint64_t values[] = {0, 1, 2, 0x7f, 0x80, 0xff, 0x7fff, 0x8000, 0xffff, 0x7fffffff, 0x80000000, 0xffffffff,
                                      0x100000000, 0x7fffffffffffffff, 0x8000000000000000, 0xffffffffffffffff};
    static const char *const words[] = {
        "{", "}", "[", "]", ",", ":", "\"", "\\", "\\u", "\\ud800", "null", "\"shape\"", "\"dtype\"",
        "\"data_offsets\":[0,48]", "\"F32\"", "\"F64\"", "\"__metadata__\":{", "\xff", "\xc0\x80", "\xed\xa0\x80", " ", "\n",
        "[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[",
    };
    size_t size = sample->size;
    /* Half of all damage goes to the first bytes, where headers and lengths lie. */
    size_t at = size ? (size_t)below(fuzzer, below(fuzzer, 2) ? size : size < 24 ? size : 24) : 0;
    size_t span = 1 + (size_t)below(fuzzer, below(fuzzer, 4) ? 8 : 200);
    switch (below(fuzzer, 10)) {
    case 0:
        if (size) sample->bytes[at] = (uint8_t)random_u64(&fuzzer->random);
        break;
    case 1:
        if (size) sample->bytes[at] ^= (uint8_t)(1u << below(fuzzer, 8));
        break;
    case 2: {
        uint64_t value = values[below(fuzzer, sizeof values / sizeof *values)] + below(fuzzer, 3) - 1;
        size_t width = (size_t)1 << below(fuzzer, 4);
        at -= at % width;
        if (at + width <= size) memcpy(sample->bytes + at, &value, width);
        break;
    }
    case 3:
        if (at + 4 <= size) { /* an integer of the header, off by a little */
            uint32_t value;
            memcpy(&value, sample->bytes + at / 4 * 4, 4);
            value += (uint32_t)below(fuzzer, 65) - 32;
            memcpy(sample->bytes + at / 4 * 4, &value, 4);
        }
        break;
    case 4: sample->size = (size_t)below(fuzzer, size + 1); break;
    case 5: replace_bytes(sample, at, span, "", 0); break;
    case 6:
        if (at + span <= size) replace_bytes(sample, at, 0, sample->bytes + at, span);
        break;
    case 7:
        if (other->size) {
            size_t from = (size_t)below(fuzzer, other->size), room = other->size - from;
            replace_bytes(sample, at, below(fuzzer, 2) ? span : 0, other->bytes + from, span < room ? span : room);
        }
        break;
    case 8: {
        const char *word = words[below(fuzzer, sizeof words / sizeof *words)];
        replace_bytes(sample, at, below(fuzzer, 2) ? strlen(word) : 0, word, strlen(word));
        break;
    }
    default: damage_digits(fuzzer, sample, size ? (size_t)below(fuzzer, size) : 0); break;
    }
}

/* One round: a seed, damaged one to six times, read; kept as a seed where it was accepted, now and then. */
static void run_round(Target *target, Fuzzer *fuzzer)
{
    static Sample sample;
    const Sample *seed = &target->seeds[below(fuzzer, (uint64_t)target->count)];
    sample.size = seed->size;
    memcpy(sample.bytes, seed->bytes, seed->size);
    for (uint64_t times = 1 + below(fuzzer, 6); times; times--)
        damage_once(fuzzer, &sample, &target->seeds[below(fuzzer, (uint64_t)target->count)]);
    target->rounds++;
    if (!read_sample(fuzzer, target, &sample)) return;
    target->accepted++;
    if (below(fuzzer, 16)) return;
    int place = target->sound + (int)below(fuzzer, (uint64_t)(SEEDS - target->sound));
    if (target->count < SEEDS) place = target->count++;
    target->seeds[place].size = sample.size;
    memcpy(target->seeds[place].bytes, sample.bytes, sample.size);
}

/* Makes the directory and the model that readers need. Returns 0 or -1. */
static int fuzzer_open(Fuzzer *fuzzer)
{
    const GptConfig config = {.layers = 1, .heads = 1, .channels = 2, .context = 2, .vocab = 3};
    GptOptions options = {.batch = 1, .sequence = 1};
    AttentionShape shape = {.B = 1, .T = 1, .NH = 1, .HS = 2};
    BackendOptions choice = {0};
    char link[128], error[256] = "";
    snprintf(fuzzer->dir, sizeof fuzzer->dir, "/tmp/flashgpt_fuzz_XXXXXX");
    if (!mkdtemp(fuzzer->dir)) return -1;
    snprintf(link, sizeof link, "%s/tokenizer.json", fuzzer->dir);
    const AttentionKernel *kernel = attention_choose("reference", ATTENTION_CPU, &shape, 0, error, sizeof error);
    fuzzer->stream = backend_cpu_fp32.open(0, &choice, error, sizeof error);
    if (symlink(fuzzer->path, link) || !fuzzer->stream || !kernel) return -1;
    fuzzer->gpt = gpt_create(&config, &options, &backend_cpu_fp32, fuzzer->stream, kernel, error, sizeof error);
    return fuzzer->gpt ? 0 : -1;
}

static void fuzzer_close(Fuzzer *fuzzer)
{
    gpt_free(fuzzer->gpt);
    backend_cpu_fp32.close(fuzzer->stream);
    files_remove(fuzzer->dir, NULL);
}

int main(int argc, char **argv)
{
    static Target targets[] = {
        {.name = "shards", .read = read_shards, .make = make_shards},
        {.name = "tokenizer", .read = read_tokenizer, .make = make_tokenizer},
        {.name = "tokenizer.json", .read = read_vocabulary, .make = make_vocabulary},
        {.name = "llm.c's model", .read = read_llmc, .make = make_llmc},
        {.name = "hellaswag", .read = read_hellaswag, .make = make_hellaswag},
        {.name = "json", .read = read_json, .make = make_json},
        {.name = "safetensors", .read = read_safetensors, .make = make_safetensors},
    };
    enum { TARGETS = sizeof targets / sizeof *targets };
    Fuzzer fuzzer = {.random = argc > 2 ? strtoull(argv[2], NULL, 10) : 1, .file = -1};
    double seconds = argc > 1 ? strtod(argv[1], NULL) : 2;
    if (argc > 3) {
        fuzzer.file = open(argv[3], O_RDWR | O_CREAT, 0666);
        char *path = realpath(argv[3], NULL); /* a link to it must hold in another directory */
        snprintf(fuzzer.path, sizeof fuzzer.path, "%s", path ? path : argv[3]);
        free(path);
    } else {
        fuzzer.file = memfd_create("fuzz", 0);
        snprintf(fuzzer.path, sizeof fuzzer.path, "/proc/self/fd/%d", fuzzer.file);
    }
    if (fuzzer.file < 0) return perror(fuzzer.path), 1;
    if (fuzzer_open(&fuzzer)) return perror("/tmp"), 1;

    for (int t = 0; t < TARGETS; t++) {
        targets[t].make(&targets[t], &fuzzer);
        for (int s = 0; s < targets[t].count; s++)
            if (!read_sample(&fuzzer, &targets[t], &targets[t].seeds[s]))
                fault("%s: a sound file was refused", targets[t].name);
    }
    struct timespec start, now;
    clock_gettime(CLOCK_MONOTONIC, &start);
    do {
        for (int i = 0; i < 200; i++)
            for (int t = 0; t < TARGETS; t++) run_round(&targets[t], &fuzzer);
        clock_gettime(CLOCK_MONOTONIC, &now);
    } while ((double)(now.tv_sec - start.tv_sec) + 1e-9 * (double)(now.tv_nsec - start.tv_nsec) < seconds);

    for (int t = 0; t < TARGETS; t++)
        printf("ok   fuzz %s: %ld damaged files, %ld of them accepted\n", targets[t].name, targets[t].rounds,
               targets[t].accepted);
    printf("%d passed, 0 failed\n", (int)TARGETS);
    fuzzer_close(&fuzzer);
    close(fuzzer.file);
    return 0;
}
