/* Safetensors: what is written comes back, conversions are exact, and no header is believed. */
#include <errno.h>
#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "data/random.h"
#include "data/safetensors.h"
#include "test.h"

static char path[] = "/tmp/test_safetensors_XXXXXX/file.safetensors"; /* main fills in the directory */

/* Writes a file of a header, its length in front, and `data` bytes of zeros. */
static void put_file(const char *header, uint64_t length, size_t data)
{
    FILE *file = fopen(path, "wb");
    fwrite(&length, 8, 1, file);
    fputs(header, file);
    while (data--) fputc(0, file);
    fclose(file);
}

static void check_refused(const char *words)
{
    Error error = {""};
    Safetensors *file = safetensors_open(path, &error);
    CHECK(!file, "accepted, expected a refusal with '%s'", words);
    CHECK(file || (strstr(error.text, words) && !strncmp(error.text, path, strlen(path))),
          "refused with '%s', expected the path and '%s'", error.text, words);
    safetensors_close(file);
}

static SafetensorsTensor declare(const char *name, const char *dtype, size_t bytes, int rank, const int64_t *shape)
{
    SafetensorsTensor tensor = {.name = name, .dtype = dtype, .rank = rank, .bytes = bytes};
    for (int i = 0; i < rank; i++) tensor.shape[i] = shape[i];
    return tensor;
}

#define SHAPE(...) (int)(sizeof((int64_t[]){__VA_ARGS__}) / 8), (int64_t[]){__VA_ARGS__}

static void test_round_trip(void)
{
    const SafetensorsTensor tensors[] = {
        declare("zeta", "F32", 24, SHAPE(2, 3)), declare("scalar", "I64", 8, 0, NULL),
        declare("empty", "F32", 0, SHAPE(3, 0)),
        declare("a \"b\"\n\xC3\xA9", "U8", 5, SHAPE(5)), declare("big", "BF16", 700000, SHAPE(70, 5, 1000)),
        declare("", "F4", 3, SHAPE(6)), declare("last", "C64", 8, SHAPE(1, 1, 1, 1, 1, 1, 1, 1))};
    static const char *const metadata[] = {"format", "pt", "a \"key\"", "\xE2\x82\xAC", NULL};
    enum { COUNT = sizeof tensors / sizeof tensors[0], BYTES = 24 + 8 + 5 + 700000 + 3 + 8 };
    uint8_t *data = malloc(BYTES);
    Error error = {""};
    uint64_t state = 1;
    for (size_t i = 0; i < BYTES; i++) data[i] = (uint8_t)random_u64(&state);
    for (size_t piece = 1; piece <= 1 << 20; piece = piece * 7 + 3) {
        SafetensorsWriter *writer = safetensors_create(path, tensors, COUNT, metadata, &error);
        Safetensors *file;
        size_t at = 0;
        TEST("round trip, handed over in pieces of %zu bytes", piece);
        if (!CHECK(writer, "%s", error.text)) break;
        for (size_t n = 0; n < BYTES; n += piece)
            CHECK(!safetensors_write(writer, data + n, n + piece < BYTES ? piece : BYTES - n, &error), "%s", error.text);
        CHECK(!safetensors_finish(writer, &error), "%s", error.text);
        file = safetensors_open(path, &error);
        if (!CHECK(file, "%s", error.text)) break;
        CHECK(safetensors_count(file) == COUNT, "%zu tensors", safetensors_count(file));
        for (size_t i = 0; i < COUNT; i++) {
            const SafetensorsTensor *got = safetensors_at(file, i), *found = safetensors_find(file, tensors[i].name);
            CHECK(got == found && !strcmp(got->name, tensors[i].name), "tensor %zu is %s", i, got->name);
            CHECK(!strcmp(got->dtype, tensors[i].dtype) && got->rank == tensors[i].rank && got->bytes == tensors[i].bytes &&
                  !memcmp(got->shape, tensors[i].shape, sizeof got->shape), "%s has another dtype or shape", got->name);
            CHECK(!memcmp(got->data, data + at, got->bytes), "%s has other data", got->name);
            at += got->bytes;
        }
        CHECK(((uintptr_t)safetensors_at(file, 0)->data & 7) == 0, "data starts unaligned");
        CHECK(!safetensors_find(file, "zet") && !safetensors_find(file, "__metadata__"), "found what is not there");
        CHECK(!strcmp(safetensors_metadata(file, "format"), "pt"), "format is %s", safetensors_metadata(file, "format"));
        CHECK(!strcmp(safetensors_metadata(file, "a \"key\""), "\xE2\x82\xAC"), "the quoted key was lost");
        CHECK(!safetensors_metadata(file, "b"), "found metadata that is not there");
        safetensors_release(safetensors_find(file, "big"));
        CHECK(!memcmp(safetensors_find(file, "big")->data, data + 37, 700000), "released pages came back changed");
        safetensors_close(file);
        unlink(path);
    }
    TEST("a file of no tensors, without metadata");
    SafetensorsWriter *writer = safetensors_create(path, NULL, 0, NULL, &error);
    CHECK(writer && !safetensors_finish(writer, &error), "%s", error.text);
    Safetensors *file = safetensors_open(path, &error);
    CHECK(file && safetensors_count(file) == 0 && !safetensors_metadata(file, "format"), "%s", error.text);
    safetensors_close(file);
    unlink(path);
    free(data);
}

static void test_writer_refusals(void)
{
    static const struct { const char *dtype; size_t bytes; int64_t side; const char *words; } bad[] = {
        {"F33", 4, 1, "unknown dtype"}, {"F32", 5, 1, "need 4"}, {"F32", 4, -1, "negative"}, {"F4", 1, 3, "whole bytes"},
        {"F64", 8, INT64_MAX, "64 bits"}};
    SafetensorsTensor pair[2] = {declare("a", "F32", 8, SHAPE(2)), declare("a", "F32", 4, SHAPE(1))};
    Error error = {""};
    SafetensorsWriter *writer;
    TEST("declarations that no reader would take are refused, and no file is made");
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        SafetensorsTensor tensor = declare("a", bad[i].dtype, bad[i].bytes, 1, &bad[i].side);
        CHECK(!safetensors_create(path, &tensor, 1, NULL, &error) && strstr(error.text, bad[i].words), "case %zu: '%s'", i,
              error.text);
    }
    CHECK(!safetensors_create(path, pair, 2, NULL, &error) && strstr(error.text, "twice"), "'%s'", error.text);
    pair[0].name = "__metadata__";
    CHECK(!safetensors_create(path, pair, 2, NULL, &error) && strstr(error.text, "no name"), "'%s'", error.text);
    pair[0].rank = 9;
    CHECK(!safetensors_create(path, pair, 2, NULL, &error) && strstr(error.text, "dimensions"), "'%s'", error.text);
    CHECK(access(path, F_OK), "a file was made");
    TEST("too many bytes, too few, a file that exists, a directory that does not, abandoning");
    pair[0] = declare("b", "F32", 8, SHAPE(2));
    writer = safetensors_create(path, pair, 2, NULL, &error);
    if (!CHECK(writer, "%s", error.text)) return;
    CHECK(!safetensors_create(path, pair, 2, NULL, &error) && strstr(error.text, "exists"), "'%s'", error.text);
    CHECK(!safetensors_write(writer, "12345678", 8, &error), "%s", error.text);
    CHECK(safetensors_write(writer, "12345", 5, &error) && strstr(error.text, "after 8 of the 12"), "'%s'", error.text);
    CHECK(safetensors_finish(writer, &error) && strstr(error.text, "8 bytes were handed over"), "'%s'", error.text);
    unlink(path);
    writer = safetensors_create(path, pair, 2, NULL, &error);
    CHECK(writer && !access(path, F_OK), "%s", error.text);
    safetensors_abandon(writer);
    safetensors_abandon(NULL);
    CHECK(access(path, F_OK), "the abandoned file is still there");
    CHECK(!safetensors_create("/nowhere/at/all", pair, 2, NULL, &error) && strstr(error.text, "No such file"), "'%s'",
          error.text);
}

static void test_full_disk(void)
{
    struct rlimit old, low;
    SafetensorsTensor tensor = declare("a", "U8", 4 << 20, SHAPE(4 << 20));
    char *data = calloc(1, 4 << 20);
    Error error = {""};
    SafetensorsWriter *writer;
    int result = 0;
    TEST("a write that the system refuses is an error with the position");
    getrlimit(RLIMIT_FSIZE, &old);
    low = (struct rlimit){1 << 20, old.rlim_max};
    signal(SIGXFSZ, SIG_IGN);
    setrlimit(RLIMIT_FSIZE, &low);
    writer = safetensors_create(path, &tensor, 1, NULL, &error);
    for (int i = 0; writer && i < 40 && !result; i++) result = safetensors_write(writer, data, 100000, &error);
    CHECK(writer && result && strstr(error.text, "cannot write at byte 1048576: "), "'%s'", error.text);
    safetensors_abandon(writer);
    setrlimit(RLIMIT_FSIZE, &old);
    free(data);
    CHECK(access(path, F_OK), "the file is still there");
}

/* A header written out, data of the given size, and the words of the refusal (NULL: accepted). */
typedef struct HeaderCase {
    const char *header;
    size_t data;
    const char *words;
} HeaderCase;

static void test_hostile_headers(void)
{
#define ENTRY(dtype, shape, offsets) "{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":" offsets "}"
#define ONE(dtype, shape, offsets) "{\"a\":" ENTRY(dtype, shape, offsets) "}"
#define TWO(one, two) "{\"a\":" ENTRY("U8", "[4]", one) ",\"b\":" ENTRY("U8", "[4]", two) "}"
    static const HeaderCase cases[] = {
        {ONE("F32", "[2]", "[0,8]"), 8, NULL}, {TWO("[0,4]", "[4,8]"), 8, NULL}, {TWO("[4,8]", "[0,4]"), 8, NULL},
        {"{}", 0, NULL}, {"{}        ", 0, NULL}, {"{\"__metadata__\":{}}", 0, NULL},
        {ONE("F32", "[0,9]", "[0,0]"), 0, NULL},
        {ONE("F32", "[9223372036854775807,9223372036854775807,0]", "[0,0]"), 0, NULL},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1],\"new\":[]}}", 1, NULL},
        {" {}", 0, "expected '{'"}, {"[]", 0, "expected '{'"}, {"{", 0, "a key"}, {"{}x", 0, "nothing after"},
        {"{\"a\":1}", 0, "needs a dtype"}, {"{\"a\":{}}", 0, "needs a dtype"}, {"{\"a\":[]}", 0, "needs a dtype"},
        {"{\"a\":{\"dtype\":7,\"shape\":[],\"data_offsets\":[0,4]}}", 4, "needs a dtype"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":7,\"data_offsets\":[0,4]}}", 4, "needs a dtype"},
        {ONE("F32", "[1]", "[0]"), 4, "two data_offsets"}, {ONE("F32", "[1]", "[0,4,8]"), 4, "two data_offsets"},
        {ONE("F32", "[1]", "{}"), 4, "two data_offsets"}, {ONE("F33", "[1]", "[0,4]"), 4, "unknown dtype"},
        {ONE("f32", "[1]", "[0,4]"), 4, "unknown dtype"}, {ONE("F32", "[1.5]", "[0,4]"), 4, "no 64-bit integer: 1.5"},
        {ONE("F32", "[\"1\"]", "[0,4]"), 4, "no 64-bit integer"}, {ONE("F32", "[-1]", "[0,4]"), 4, "negative"},
        {ONE("F32", "[9223372036854775808]", "[0,4]"), 4, "no 64-bit integer"},
        {ONE("F32", "[9223372036854775807]", "[0,4]"), 4, "64 bits can count"},
        {ONE("F32", "[4294967296,4294967296]", "[0,0]"), 0, "64 bits can count"},
        {ONE("F32", "[2305843009213693952,8]", "[0,0]"), 0, "64 bits can count"},
        {ONE("U8", "[1,1,1,1,1,1,1,1,1]", "[0,1]"), 1, "9 dimensions"}, {ONE("F4", "[3]", "[0,2]"), 2, "whole bytes"},
        {ONE("F32", "[1]", "[-4,0]"), 4, "ascending"}, {ONE("F32", "[1]", "[4,0]"), 4, "ascending"},
        {ONE("F32", "[1]", "[0,4.5]"), 4, "ascending"}, {ONE("F32", "[1]", "[0,1e30]"), 4, "ascending"},
        {ONE("F32", "[1]", "[0,8]"), 4, "ends at byte 8 of the data, which has only 4"},
        {ONE("F32", "[1]", "[9223372036854775803,9223372036854775807]"), 4, "ends at byte 9223372036854775807"},
        {ONE("F32", "[1]", "[0,8]"), 8, "spans 8 bytes of data, its dtype and shape need 4"},
        {ONE("F32", "[]", "[0,0]"), 0, "spans 0 bytes of data, its dtype and shape need 4"},
        {ONE("F32", "[1]", "[4,8]"), 8, "after a gap: byte 0"}, {ONE("F32", "[1]", "[0,4]"), 5, "cover 4 bytes of data"},
        {ONE("F32", "[1]", "[0,4]"), 3, "which has only 3"}, {TWO("[0,4]", "[2,6]"), 6, "within another tensor"},
        {TWO("[0,4]", "[0,4]"), 4, "within another tensor"}, {TWO("[0,4]", "[5,9]"), 9, "after a gap"},
        {"{\"a\":" ENTRY("U8", "[4]", "[0,4]") ",\"b\":" ENTRY("U8", "[0]", "[2,2]") "}", 4, "within another tensor"},
        {"{\"a\":" ENTRY("U8", "[1]", "[0,1]") ",\"a\":" ENTRY("U8", "[1]", "[1,2]") "}", 2, "\"a\" twice"},
        {"{\"__metadata__\":1}", 0, "is no object"}, {"{\"__metadata__\":{\"a\":1}}", 0, "is no string"},
        {"{\"\xFF\":" ENTRY("U8", "[1]", "[0,1]") "}", 1, "UTF-8"},
        {"{\"a\":[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[0]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]}", 0, "nested deeper"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        Error error = {""};
        TEST("header %.90s with %zu bytes of data", cases[i].header, cases[i].data);
        put_file(cases[i].header, strlen(cases[i].header), cases[i].data);
        if (cases[i].words) {
            check_refused(cases[i].words);
        } else {
            Safetensors *file = safetensors_open(path, &error);
            CHECK(file, "%s", error.text);
            safetensors_close(file);
        }
    }
    unlink(path);
}

static void test_hostile_lengths(void)
{
    static const struct { uint64_t length; const char *words; } cases[] = {
        {0, "no header"}, {1, "a key"}, {3, "nothing after"}, {4, "announce a header of 4"}, {100000001, "announce"},
        {(uint64_t)1 << 32, "announce"}, {(uint64_t)1 << 63, "announce"}, {UINT64_MAX, "announce"},
        {UINT64_MAX - 7, "announce"}};
    TEST("header lengths that the file does not have");
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        put_file("{}\x01", cases[i].length, 0);
        check_refused(cases[i].words);
    }
    TEST("a header of more than 100 MB in a file that has it");
    put_file("{}", 100000001, 0);
    CHECK(!truncate(path, 200000000), "cannot extend the file");
    check_refused("the most a header may have");
    TEST("files of fewer than 8 bytes, a directory, a missing file");
    for (int bytes = 0; bytes < 8; bytes++) {
        CHECK(!truncate(path, bytes), "cannot cut the file");
        check_refused("at least 8");
    }
    unlink(path);
    check_refused("No such file");
    mkdir(path, 0777);
    check_refused("regular file");
    rmdir(path);
}

/* Every truncation of a good file fails, and whatever bytes are changed in it, reading stays within the file. */
static void test_damage(void)
{
    static const char header[] = "{\"__metadata__\":{\"format\":\"pt\"},\"x\":" ENTRY("F32", "[2,3]", "[0,24]") ",\"y\":"
                                 ENTRY("F16", "[4]", "[24,32]") "}";
    enum { LENGTH = sizeof header - 1, ALL = 8 + LENGTH + 32 };
    static const char swap[] = "0123456789{}[]\",:-.eEFx \\\0\xFF";
    uint8_t good[ALL];
    uint64_t state = 3, accepted = 0, sum = 0;
    Error error;
    FILE *in;
    TEST("every truncation of a file");
    put_file(header, LENGTH, 32);
    in = fopen(path, "rb");
    CHECK(in && fread(good, 1, ALL, in) == ALL, "cannot read back %s", path);
    fclose(in);
    for (int bytes = ALL - 1; bytes >= 0; bytes--) {
        CHECK(!truncate(path, bytes), "cannot cut the file");
        CHECK(!safetensors_open(path, &error), "the first %d bytes were accepted", bytes);
    }
    TEST("3000 files with 1 to 4 bytes changed: refused with a reason, or read within bounds");
    for (int round = 0; round < 3000; round++) {
        uint8_t bad[ALL];
        Safetensors *file;
        FILE *out = fopen(path, "wb");
        memcpy(bad, good, ALL);
        for (uint64_t n = 1 + random_u64(&state) % 4; n; n--)
            bad[random_u64(&state) % (8 + LENGTH)] = (uint8_t)swap[random_u64(&state) % (sizeof swap - 1)];
        fwrite(bad, 1, ALL, out);
        fclose(out);
        error.text[0] = 0;
        file = safetensors_open(path, &error);
        CHECK(file || error.text[0], "round %d: refused without a reason", round);
        for (size_t i = 0; file && i < safetensors_count(file); i++) {
            const SafetensorsTensor *tensor = safetensors_at(file, i);
            for (size_t k = 0; k < tensor->bytes; k++) sum += tensor->data[k];
        }
        accepted += file != NULL;
        safetensors_close(file);
    }
    CHECK(accepted > 30 && accepted < 2000 && sum < 3000 * 255 * ALL, "%llu of 3000 were accepted: the changes do not test",
          (unsigned long long)accepted);
    unlink(path);
}

/* The value of a 16-bit float by the definition, and whether it is a NaN. */
static double half_value(uint16_t bits, int exponent_bits, int *nan)
{
    int mantissa_bits = 15 - exponent_bits, bias = (1 << (exponent_bits - 1)) - 1;
    int exponent = bits >> mantissa_bits & ((1 << exponent_bits) - 1), mantissa = bits & ((1 << mantissa_bits) - 1);
    double sign = bits & 0x8000 ? -1 : 1;
    *nan = exponent == (1 << exponent_bits) - 1 && mantissa;
    if (exponent == (1 << exponent_bits) - 1) return sign * INFINITY;
    if (exponent == 0) return sign * ldexp(mantissa, 1 - bias - mantissa_bits);
    return sign * ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
}

static void test_conversions(void)
{
    static uint16_t words[65536];
    static float out[65536];
    SafetensorsTensor tensor = {.name = "w", .dtype = "F16", .rank = 1, .shape = {65536}, .data = (uint8_t *)words,
                                .bytes = sizeof words};
    static const float values[] = {1.5f, -0.0f, 1e-45f, INFINITY};
    uint8_t unaligned[sizeof values + 1];
    Error error = {""};
    for (int i = 0; i < 65536; i++) words[i] = (uint16_t)i;
    for (int brain = 0; brain < 2; brain++) {
        TEST("all 65536 words of %s", brain ? "BF16" : "F16");
        tensor.dtype = brain ? "BF16" : "F16";
        CHECK(!safetensors_to_fp32(out, &tensor, 0, 65536, &error), "%s", error.text);
        for (int i = 0; i < 65536; i++) {
            int nan;
            double value = half_value((uint16_t)i, brain ? 8 : 5, &nan);
            if (nan) CHECK(isnan(out[i]), "0x%04X gave %g, a NaN is expected", i, (double)out[i]);
            else CHECK((double)out[i] == value && !signbit(out[i]) == !(i & 0x8000), "0x%04X gave %.9g, %.9g is expected", i,
                       (double)out[i], value);
        }
    }
    TEST("F32 is copied, from an unaligned address and from the middle");
    memcpy(unaligned + 1, values, sizeof values);
    tensor = (SafetensorsTensor){.name = "w", .dtype = "F32", .rank = 1, .shape = {4}, .data = unaligned + 1, .bytes = 16};
    CHECK(!safetensors_to_fp32(out, &tensor, 1, 3, &error) && !memcmp(out, values + 1, 12), "%s", error.text);
    CHECK(!safetensors_to_fp32(out, &tensor, 4, 0, &error), "%s", error.text);
    TEST("ranges outside the tensor and other dtypes are errors");
    CHECK(safetensors_to_fp32(out, &tensor, 3, 2, &error) && strstr(error.text, "it has 4"), "'%s'", error.text);
    CHECK(safetensors_to_fp32(out, &tensor, -1, 2, &error), "element -1 was read");
    CHECK(safetensors_to_fp32(out, &tensor, 5, 0, &error), "element 5 was reached");
    CHECK(safetensors_to_fp32(out, &tensor, 1, INT64_MAX, &error), "2^63 elements were read");
    tensor.dtype = "F64";
    CHECK(safetensors_to_fp32(out, &tensor, 0, 1, &error) && strstr(error.text, "dtype F64"), "'%s'", error.text);
}

int main(void)
{
    char *slash = strrchr(path, '/');
    *slash = 0;
    if (!mkdtemp(path)) { printf("cannot make %s: %s\n", path, strerror(errno)); return 1; }
    *slash = '/';
    test_round_trip();
    test_writer_refusals();
    test_full_disk();
    test_hostile_headers();
    test_hostile_lengths();
    test_damage();
    test_conversions();
    *slash = 0;
    rmdir(path);
    return test_end();
}
