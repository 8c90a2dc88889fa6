/* The JSON reader: what RFC 8259 allows and nothing else, limits, exact integers, quoting. */
#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <unistd.h>

#include "data/json.h"
#include "test.h"

/* Parses a copy that ends where an allocation ends, so that a sanitizer sees the first byte read beyond it. */
static JsonDocument *parse(const char *text, size_t length, Error *error)
{
    char *copy = malloc(length ? length : 1);
    JsonDocument *document;
    memcpy(copy, text, length);
    error->text[0] = 0;
    document = json_parse(length ? copy : copy + 1, length, "sample", error);
    free(copy);
    return document;
}

static void check_refused(const char *text, size_t length, const char *words)
{
    Error error;
    JsonDocument *document = parse(text, length, &error);
    CHECK(!document, "accepted '%.60s', expected a refusal with '%s'", text, words);
    CHECK(document || strstr(error.text, words), "'%.60s' was refused with '%s', expected the words '%s'", text, error.text,
          words);
    CHECK(document || !strncmp(error.text, "sample: ", 8), "the sentence '%s' does not open with the name", error.text);
    json_free(document);
}

static void test_kinds(void)
{
    static const char text[] = " {\"a\" : [1, -2.5e1, true, false, null, \"x\", {}, []] ,\t\"\" : {\"b\":\"\"}}\r\n";
    static const JsonKind kinds[] = {JSON_NUMBER, JSON_NUMBER, JSON_TRUE, JSON_FALSE, JSON_NULL, JSON_STRING, JSON_OBJECT,
                                     JSON_ARRAY};
    Error error;
    JsonDocument *document = parse(text, sizeof text - 1, &error);
    const JsonValue *root, *a, *child;
    size_t n = 0;
    TEST("every kind of value, in order, with its parent's count");
    if (!CHECK(document, "%s", error.text)) return;
    root = json_root(document);
    a = json_member(root, "a");
    CHECK(root->kind == JSON_OBJECT && root->length == 2 && !root->key, "kind %d, length %zu", root->kind, root->length);
    CHECK(a && a->length == 8 && !strcmp(a->key, "a"), "\"a\" is not an array of 8");
    for (child = a ? a->child : NULL; child; child = child->next, n++)
        CHECK(n < 8 && child->kind == kinds[n] && !child->key, "child %zu has kind %d", n, child->kind);
    CHECK(n == 8, "%zu children", n);
    CHECK(a && a->child->next->number == -25.0 && !strcmp(a->child->next->text, "-2.5e1"), "the second is no -2.5e1");
    CHECK(json_member(json_member(root, ""), "b") != NULL, "the empty key was not found");
    CHECK(!json_member(root, "c") && !json_member(a, "a") && !json_member(NULL, "a"), "a member that is not there");
    json_free(document);
}

static void test_scalars(void)
{
    static const char *const good[] = {"0", "-0", "1.5", "1e3", "1E+3", "1e-400", "\"\"", "true", "false", "null", " [ ] ",
                                       "[1]", "{}", "\"\\\"\"", "1e308", "0.1e1", "-0.0e-0", "\n\r\t 7 "};
    TEST("documents that are valid");
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) {
        Error error;
        JsonDocument *document = parse(good[i], strlen(good[i]), &error);
        CHECK(document, "'%s': %s", good[i], error.text);
        json_free(document);
    }
}

static void test_refusals(void)
{
    static const struct { const char *text, *words; } bad[] = {
        {"", "a value"}, {"  ", "the end of the text"}, {"tru", "a value"}, {"truex", "nothing after"}, {"nul", "a value"},
        {"True", "a value"}, {"NaN", "a value"}, {"Infinity", "a value"}, {"-", "a digit"}, {"-a", "a digit"},
        {"+1", "a value"},
        {"01", "leading zero"}, {"-01", "leading zero"}, {"1.", "a digit"}, {".5", "a value"}, {"1.e3", "a digit"},
        {"1e", "a digit"}, {"1e+", "a digit"}, {"0x10", "nothing after"}, {"1e999", "largest double"},
        {"-1e999", "largest double"}, {"1 2", "nothing after"}, {"[1,]", "a value"}, {"[,1]", "a value"}, {"[1 2]", "','"},
        {"[1", "','"}, {"[", "a value"}, {"]", "a value"}, {"[1}", "','"}, {"{", "a key"}, {"{\"a\"}", "':'"},
        {"{\"a\":}", "a value"}, {"{\"a\":1,}", "a key"}, {"{a:1}", "a key"}, {"{1:1}", "a key"}, {"{'a':1}", "a key"},
        {"{\"a\":1 \"b\":2}", "',' or '}'"}, {"{\"a\":1]", "',' or '}'"},
        {"{\"a\":1,\"b\":2,\"a\":3}", "\"a\" twice"},
        {"{\"a\":1,\"\\u0061\":2}", "\"a\" twice"}, {"[{\"\":1,\"\":1}]", "twice"}, {"{\"a\\u0000b\":1}", "\\u0000"},
        {"\"", "no closing quote"}, {"\"a", "no closing quote"}, {"\"\\\"", "no closing quote"},
        {"\"\\", "no closing quote"},
        {"\"\\x\"", "after a backslash"}, {"\"\\u12\"", "four hexadecimal"}, {"\"\\u12G4\"", "four hexadecimal"},
        {"\"\\ud800\"", "surrogate"}, {"\"\\udc00\"", "surrogate"}, {"\"\\ud800\\u0041\"", "surrogate"},
        {"\"\\ud800\\ud800\"", "surrogate"}, {"\"\\ud800x\"", "surrogate"}, {"\"a\nb\"", "control"}, {"\"\t\"", "control"},
        {"\"\x1f\"", "control"}, {"\"\x80\"", "UTF-8"}, {"\"\xC0\x80\"", "UTF-8"}, {"\"\xC1\xBF\"", "UTF-8"},
        {"\"\xE0\x9F\xBF\"", "UTF-8"}, {"\"\xED\xA0\x80\"", "UTF-8"}, {"\"\xF0\x8F\xBF\xBF\"", "UTF-8"},
        {"\"\xF4\x90\x80\x80\"", "UTF-8"}, {"\"\xF5\x80\x80\x80\"", "UTF-8"}, {"\"\xFF\"", "UTF-8"},
        {"\"\xE2\x82\"", "UTF-8"},
        {"\xEF\xBB\xBF{}", "a value"}, {"//\n1", "a value"}, {"[1]\f", "nothing after"},
    };
    Error error;
    TEST("documents that are not valid, each refused with its reason");
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) check_refused(bad[i].text, strlen(bad[i].text), bad[i].words);
    check_refused("1\0", 2, "byte 0x00");
    check_refused("\"\0\"", 3, "control");
    check_refused("\0", 1, "byte 0x00");
    TEST("an error gives the offset, and may be dropped");
    CHECK(!parse("{\"a\": 1, ?}", 11, &error), "accepted");
    CHECK(strstr(error.text, "offset 9") && strstr(error.text, "'?'"), "got '%s'", error.text);
    CHECK(!json_parse("[", 1, "x", NULL), "accepted");
}

static void test_strings(void)
{
    static const char text[] = "[\"\\\"\\\\\\/\\b\\f\\n\\r\\t\",\"\\u0041\\u00e9\\u20AC\\uD83D\\uDE00\",\"a\\u0000b\","
                               "\"\x7F\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80\xF4\x8F\xBF\xBF\xED\x9F\xBF\xEE\x80\x80\"]";
    static const struct { const char *bytes; size_t length; } wanted[] = {
        {"\"\\/\b\f\n\r\t", 8}, {"A\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80", 10}, {"a\0b", 3},
        {"\x7F\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80\xF4\x8F\xBF\xBF\xED\x9F\xBF\xEE\x80\x80", 20}};
    Error error;
    JsonDocument *document = parse(text, sizeof text - 1, &error);
    size_t i = 0;
    TEST("strings: escapes, surrogate pairs, zero bytes, the ends of UTF-8's ranges");
    if (!CHECK(document, "%s", error.text)) return;
    for (const JsonValue *value = json_root(document)->child; value; value = value->next, i++)
        CHECK(value->length == wanted[i].length && !memcmp(value->text, wanted[i].bytes, wanted[i].length + 1),
              "string %zu has %zu bytes, '%s'", i, value->length, value->text);
    CHECK(i == 4, "%zu strings", i);
    json_free(document);
}

static void test_integers(void)
{
    static const struct { const char *text; int is; int64_t value; } cases[] = {
        {"0", 1, 0}, {"-0", 1, 0}, {"0.000", 1, 0}, {"0e99999999999999999999", 1, 0}, {"7", 1, 7}, {"-7", 1, -7},
        {"9223372036854775807", 1, INT64_MAX}, {"9223372036854775808", 0, 0}, {"-9223372036854775808", 1, INT64_MIN},
        {"-9223372036854775809", 0, 0}, {"9007199254740993", 1, 9007199254740993}, {"1e3", 1, 1000}, {"1.5e1", 1, 15},
        {"1.50e1", 1, 15}, {"1.55e1", 0, 0}, {"100e-2", 1, 1}, {"101e-2", 0, 0}, {"0.001e3", 1, 1}, {"1.0", 1, 1},
        {"1.5", 0, 0}, {"0.5", 0, 0}, {"1e-1", 0, 0}, {"9.223372036854775807e18", 1, INT64_MAX},
        {"1e18", 1, 1000000000000000000},
        {"1e19", 0, 0}, {"10000000000000000000", 0, 0}, {"18446744073709551616", 0, 0},
        {"92233720368547758070e-1", 1, INT64_MAX},
        {"1e308", 0, 0}, {"1e-99999999999999999999", 0, 0}, {"0.00000000000000000000000001e26", 1, 1},
        {"1000000000000000000000000000000e-30", 1, 1}, {"5e18", 1, 5000000000000000000}, {"\"7\"", 0, 0}, {"null", 0, 0},
        {"true", 0, 0}, {"[7]", 0, 0},
    };
    TEST("integers are read exactly, or not at all");
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        Error error;
        JsonDocument *document = parse(cases[i].text, strlen(cases[i].text), &error);
        int64_t value = 0;
        int is;
        if (!CHECK(document, "'%s': %s", cases[i].text, error.text)) continue;
        is = json_integer(json_root(document), &value);
        CHECK(is == cases[i].is && value == cases[i].value, "%s gave %d, %lld", cases[i].text, is, (long long)value);
        json_free(document);
    }
    CHECK(!json_integer(NULL, &(int64_t){0}), "NULL is no integer");
}

/* `n` opening brackets (of objects, with a key each), then as many closing ones. */
static size_t nest(char *text, int n, int objects)
{
    char *at = text;
    for (int i = 0; i < n; i++) at += sprintf(at, objects ? "{\"k\":" : "[");
    at += sprintf(at, "0");
    for (int i = 0; i < n; i++) *at++ = objects ? '}' : ']';
    return (size_t)(at - text);
}

static void test_limits(void)
{
    static char deep[1 << 20];
    size_t many = (4 << 20) + 2;
    char *text = malloc(2 * many);
    Error error;
    TEST("nesting: %d levels, and not one more", JSON_DEPTH);
    for (int objects = 0; objects < 2; objects++) {
        JsonDocument *document = parse(deep, nest(deep, JSON_DEPTH, objects), &error);
        CHECK(document, "%s", error.text);
        json_free(document);
        check_refused(deep, nest(deep, JSON_DEPTH + 1, objects), "nested deeper");
    }
    memset(deep, '[', sizeof deep);
    check_refused(deep, sizeof deep, "nested deeper");
    TEST("a document of too many values is refused before it eats the memory");
    memset(text, '0', 2 * many);
    text[0] = '[';
    for (size_t i = 2; i < 2 * many; i += 2) text[i] = ',';
    check_refused(text, 2 * many, "more than 4194304 values");
    free(text);
}

static void test_many_keys(void)
{
    enum { KEYS = 200000 };
    char *text = malloc(KEYS * 16 + 32), *at = text;
    Error error;
    JsonDocument *document;
    int64_t value = 0;
    TEST("an object of %d keys; one of them twice", KEYS);
    *at++ = '{';
    for (int i = 0; i < KEYS; i++) at += sprintf(at, "\"%d\":%d,", i, i);
    at[-1] = '}';
    document = parse(text, (size_t)(at - text), &error);
    CHECK(document, "%s", error.text);
    if (document) {
        CHECK(json_root(document)->length == KEYS, "%zu members", json_root(document)->length);
        CHECK(json_integer(json_member(json_root(document), "199999"), &value) && value == 199999, "got %lld",
              (long long)value);
    }
    json_free(document);
    at += sprintf(at - 1, ",\"77777\":0}") - 1;
    check_refused(text, (size_t)(at - text), "\"77777\" twice");
    free(text);
}

static void test_truncations(void)
{
    static const char text[] = "{\"a\":[1.5e+3,-7,true,null],"
                               "\"\\u20ac\xE2\x82\xAC\":\"\\ud83d\\ude00\\n\",\"c\":{\"d\":{}}}";
    Error error;
    TEST("every truncation of a document, and every byte of it changed");
    for (size_t n = 0; n < sizeof text - 1; n++) {
        JsonDocument *document = parse(text, n, &error);
        CHECK(!document, "the first %zu bytes were accepted", n);
        CHECK(document || error.text[0], "no reason was given for %zu bytes", n);
        json_free(document);
    }
    for (size_t n = 0; n < sizeof text - 1; n++)
        for (int byte = 0; byte < 256; byte++) {
            char changed[sizeof text];
            JsonDocument *document;
            memcpy(changed, text, sizeof text);
            changed[n] = (char)byte;
            document = parse(changed, sizeof text - 1, &error);
            CHECK(document || error.text[0], "byte %zu as 0x%02X: refused without a reason", n, byte);
            json_free(document);
        }
}

static void test_files(void)
{
    char path[] = "/tmp/test_json_XXXXXX", big[64];
    int file = mkstemp(path);
    Error error;
    JsonDocument *document;
    TEST("files: read, missing, a directory, empty, too large");
    CHECK(file >= 0 && write(file, "{\"a\":1}", 7) == 7, "cannot write %s", path);
    document = json_read(path, &error);
    CHECK(document && json_member(json_root(document), "a"), "%s", error.text);
    json_free(document);
    CHECK(!ftruncate(file, 0), "cannot empty %s", path);
    CHECK(!json_read(path, &error) && strstr(error.text, path), "empty: '%s'", error.text);
    CHECK(!ftruncate(file, (64 << 20) + 1), "cannot extend %s", path);
    snprintf(big, sizeof big, "%d bytes", (64 << 20) + 1);
    CHECK(!json_read(path, &error) && strstr(error.text, big), "too large: '%s'", error.text);
    close(file);
    unlink(path);
    CHECK(!json_read(path, &error) && strstr(error.text, "No such file"), "missing: '%s'", error.text);
    CHECK(!json_read("/tmp", &error) && strstr(error.text, "regular file"), "a directory: '%s'", error.text);
}

static void test_quote(void)
{
    static const char text[] = "a\"\\/\b\f\n\r\t\x01\x1F\x7F\0\xC3\xA9\xF0\x9F\x98\x80";
    static const struct { const char *in, *out; } bad[] = {
        {"\x80", "\"\xEF\xBF\xBD\""}, {"a\xC3", "\"a\xEF\xBF\xBD\""},
        {"\xED\xA0\x80", "\"\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD\""},
        {"\xFF\xC3\xA9", "\"\xEF\xBF\xBD\xC3\xA9\""}};
    char out[128], small[8];
    Error error;
    JsonDocument *document;
    int need = json_quote(out, sizeof out, text, sizeof text - 1);
    TEST("a quoted string comes back as it was, and is truncated as snprintf would");
    CHECK(need == (int)strlen(out), "needs %d, wrote %zu", need, strlen(out));
    document = parse(out, strlen(out), &error);
    if (CHECK(document, "%s: %s", out, error.text))
        CHECK(json_root(document)->length == sizeof text - 1 && !memcmp(json_root(document)->text, text, sizeof text),
              "%s came back as '%s'", out, json_root(document)->text);
    json_free(document);
    for (size_t size = 0; size <= sizeof small; size++) {
        memset(small, '#', sizeof small);
        CHECK(json_quote(small, size, text, sizeof text - 1) == need, "another length for %zu bytes", size);
        CHECK(size == 0 || (!memcmp(small, out, size - 1) && small[size - 1] == 0), "%zu bytes: not the beginning", size);
        CHECK(size == sizeof small || small[size] == '#', "%zu bytes: wrote beyond them", size);
    }
    CHECK(json_quote(NULL, 0, "ab", 2) == 4, "NULL with size 0 does not measure");
    TEST("bytes that are not UTF-8 are quoted as U+FFFD");
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        json_quote(out, sizeof out, bad[i].in, strlen(bad[i].in));
        CHECK(!strcmp(out, bad[i].out), "case %zu gave %s", i, out);
    }
}

int main(void)
{
    test_kinds();
    test_scalars();
    test_refusals();
    test_strings();
    test_integers();
    test_limits();
    test_many_keys();
    test_truncations();
    test_files();
    test_quote();
    return test_end();
}
