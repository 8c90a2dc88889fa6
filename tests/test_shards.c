/* test_shards.c - token files: the three forms, every way in which a file can be wrong, windows and their edges. */
#include "data/shards.h"

#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/test.h"

enum { HEADER_BYTES = 1024 };

static char folder[64]; /* where the files of this program lie */

static const char *in_folder(const char *name)
{
    static char path[4][192];
    static int turn;
    turn = (turn + 1) % 4;
    snprintf(path[turn], sizeof path[turn], "%s/%s", folder, name);
    return path[turn];
}

static void write_file(const char *name, const void *data, size_t bytes)
{
    FILE *file = fopen(in_folder(name), "wb");
    if (!file || fwrite(data, 1, bytes, file) != bytes || fclose(file)) {
        fprintf(stderr, "cannot write %s\n", in_folder(name));
        exit(1);
    }
}

/* Writes a shard with any header and `bytes` of data after it: token i is i % 251 in the given width. */
static void write_shard(const char *name, int32_t magic, int32_t version, int32_t count, int width, size_t bytes)
{
    uint8_t *data = calloc(1, HEADER_BYTES + bytes);
    int32_t header[3] = {magic, version, count};
    memcpy(data, header, sizeof header);
    for (size_t i = 0; (i + 1) * (size_t)width <= bytes; i++) data[HEADER_BYTES + i * (size_t)width] = (uint8_t)(i % 251);
    write_file(name, data, HEADER_BYTES + bytes);
    free(data);
}

static void remove_files(void)
{
    char command[128];
    snprintf(command, sizeof command, "rm -rf '%s'", folder);
    if (system(command)) fprintf(stderr, "cannot remove %s\n", folder);
}

/* Opens a pattern of the folder that must fail with a sentence that holds both words. */
static void expect_fault(const char *pattern, const char *word, const char *second)
{
    ShardSet set;
    Error error = {""};
    int result = shards_open(&set, in_folder(pattern), &error);
    CHECK(result == -1, "%s was opened, expected an error with '%s'", pattern, word);
    CHECK(strstr(error.text, word) && strstr(error.text, second), "%s: '%s', expected it to say '%s' and '%s'", pattern,
          error.text, word, second);
    CHECK(strchr(error.text, '\n') == NULL, "%s: the sentence has a line break", pattern);
    CHECK(set.count == 0 && set.shards == NULL, "%s: the set holds %zu shards after an error", pattern, set.count);
    shards_close(&set);
}

static void test_forms(void)
{
    ShardSet set;
    Error error = {""};
    TEST("shards: uint16 with header, uint32 with header, uint16 without");
    write_shard("form_a.bin", 20240520, 1, 1000, 2, 2000);
    write_shard("form_b.bin", 20240801, 7, 700, 4, 2800);
    uint16_t plain[5] = {7, 50256, 65535, 0, 3};
    write_file("form_c.bin", plain, sizeof plain);
    if (!CHECK(!shards_open(&set, in_folder("form_*.bin"), &error), "%s", error.text)) return;
    CHECK(set.count == 3 && set.tokens == 1705, "%zu shards and %lld tokens, expected 3 and 1705", set.count,
          (long long)set.tokens);
    static const int width[3] = {2, 4, 2};
    static const int64_t count[3] = {1000, 700, 5};
    for (size_t s = 0; s < 3; s++) {
        const Shard *shard = &set.shards[s];
        CHECK(shard->width == width[s] && shard->count == count[s], "shard %zu: width %d count %lld, expected %d and %lld",
              s, shard->width, (long long)shard->count, width[s], (long long)count[s]);
        for (int64_t i = 0; i < shard->count; i++) {
            uint32_t expected = s == 2 ? plain[i] : (uint32_t)(i % 251);
            if (!CHECK(shard_token(shard, i) == expected, "shard %zu token %lld is %u, expected %u", s, (long long)i,
                       shard_token(shard, i), expected))
                break;
        }
    }
    shards_close(&set);

    TEST("shards: uint32 tokens beyond 65535");
    uint32_t file[HEADER_BYTES / 4 + 2] = {20240801, 7, 2};
    file[HEADER_BYTES / 4] = 128255;
    file[HEADER_BYTES / 4 + 1] = 4000000000u;
    write_file("wide.bin", file, sizeof file);
    if (!CHECK(!shards_open(&set, in_folder("wide.bin"), &error), "%s", error.text)) return;
    uint32_t first = shard_token(&set.shards[0], 0), second = shard_token(&set.shards[0], 1);
    CHECK(first == 128255 && second == 4000000000u, "tokens %u and %u, expected 128255 and 4000000000", first, second);
    int32_t window[2];
    CHECK(shards_window(&set, 0, 1, NULL, INT64_MAX, window, &error) == -1 && strstr(error.text, "4000000000"),
          "a token beyond int32 passed: '%s'", error.text);
    shards_close(&set);
}

/* Every way in which shards.h says that a file can be wrong. */
static void test_faults(void)
{
    TEST("shards: a file that is wrong is refused with a sentence");
    write_file("empty.bin", "", 0);
    expect_fault("empty.bin", "empty.bin", "empty (0 bytes)");
    write_file("odd.bin", "abc", 3);
    expect_fault("odd.bin", "odd.bin: 3 bytes", "even number");
    write_file("tiny.bin", "a", 1);
    expect_fault("tiny.bin", "tiny.bin: 1 bytes", "even number");
    int32_t magic = 20240520;
    write_file("magic_only.bin", &magic, 4);
    expect_fault("magic_only.bin", "truncated inside its header: 4 bytes", "1024");
    write_shard("short_header.bin", 20240520, 1, 100, 2, 200);
    if (truncate(in_folder("short_header.bin"), 1023)) CHECK(0, "cannot truncate");
    expect_fault("short_header.bin", "1023 bytes", "1024");
    write_shard("truncated.bin", 20240520, 1, 100, 2, 198);
    expect_fault("truncated.bin", "truncated: its header gives 100 tokens", "expected 1224 bytes in all, got 1222");
    write_shard("half_token.bin", 20240520, 1, 100, 2, 199);
    expect_fault("half_token.bin", "truncated", "got 1223");
    write_shard("too_long.bin", 20240520, 1, 100, 2, 202);
    expect_fault("too_long.bin", "too long: its header gives 100 tokens", "got 1226 (101 tokens)");
    write_shard("too_long_by_1.bin", 20240520, 1, 100, 2, 201);
    expect_fault("too_long_by_1.bin", "too long", "got 1225");
    write_shard("unfinished.bin", 20240520, 1, -1, 2, 200);
    expect_fault("unfinished.bin", "-1 tokens", "100");
    write_shard("no_tokens.bin", 20240520, 1, 0, 2, 0);
    expect_fault("no_tokens.bin", "no tokens", "at least one");
    write_shard("version.bin", 20240520, 2, 100, 2, 200);
    expect_fault("version.bin", "version 2 after magic 20240520 at byte 4", "expected 1");
    write_shard("version_wide.bin", 20240801, 1, 100, 4, 400);
    expect_fault("version_wide.bin", "version 1 after magic 20240801", "expected 7");
    write_shard("wide_truncated.bin", 20240801, 7, 100, 4, 200);
    expect_fault("wide_truncated.bin", "truncated: its header gives 100 tokens of 4 bytes", "1424");

    TEST("shards: a pattern without a match, a directory, a pipe, one bad file among good ones");
    expect_fault("nothing_*.bin", "nothing_*.bin", "matches no file");
    mkdir(in_folder("folder.bin"), 0777);
    expect_fault("folder.bin", "folder.bin: is a directory", "regular file");
    mkfifo(in_folder("pipe.bin"), 0666);
    expect_fault("pipe.bin", "pipe.bin", "regular file");
    write_shard("mixed_a.bin", 20240520, 1, 100, 2, 200);
    write_shard("mixed_b.bin", 20240520, 1, 100, 2, 100);
    write_shard("mixed_c.bin", 20240520, 1, 100, 2, 200);
    expect_fault("mixed_*.bin", "mixed_b.bin", "truncated");
    if (geteuid() != 0) {
        chmod(in_folder("mixed_a.bin"), 0);
        expect_fault("mixed_a.bin", "mixed_a.bin: cannot open", "ermission");
    }
}

/* Counts above 2^31 and the unfinished mark, with sparse files that take no room. */
static void test_large(void)
{
    ShardSet set;
    Error error = {""};
    TEST("shards: counts beyond 2^31 and 2^32 are those of the file's size");
    static const int64_t counts[] = {((int64_t)1 << 31) + 5, ((int64_t)1 << 32) + 3};
    for (int i = 0; i < 2; i++) {
        write_shard("large.bin", 20240520, 1, (int32_t)(uint32_t)counts[i], 2, 0);
        if (truncate(in_folder("large.bin"), HEADER_BYTES + 2 * counts[i])) {
            SKIP("the file system of %s holds no sparse file of %lld bytes", folder, (long long)(2 * counts[i]));
            return;
        }
        FILE *file = fopen(in_folder("large.bin"), "r+b");
        fseeko(file, HEADER_BYTES + 2 * (counts[i] - 1), SEEK_SET);
        fwrite("\x39\x30", 1, 2, file);
        fclose(file);
        if (!CHECK(!shards_open(&set, in_folder("large.bin"), &error), "%s", error.text)) continue;
        CHECK(set.tokens == counts[i], "%lld tokens, expected %lld", (long long)set.tokens, (long long)counts[i]);
        CHECK(shard_token(&set.shards[0], counts[i] - 1) == 12345, "the last token is %u, expected 12345",
              shard_token(&set.shards[0], counts[i] - 1));
        int64_t windows = shards_windows(&set, 4);
        int32_t window[5];
        CHECK(windows == (counts[i] - 1) / 4, "%lld windows of %lld tokens", (long long)windows, (long long)counts[i]);
        CHECK(!shards_window(&set, windows - 1, 4, NULL, 50000, window, &error), "the last window: %s", error.text);
        shards_close(&set);
    }
    unlink(in_folder("large.bin"));
}

static void test_tokens(void)
{
    ShardSet set;
    Error error = {""};
    int32_t window[17];
    TEST("shards: a token beyond the vocabulary is named with file, position and both values");
    enum { COUNT = 2500000, BAD = 2400001 };
    uint16_t *tokens = calloc(COUNT, sizeof *tokens);
    tokens[BAD] = 999;
    tokens[BAD + 7] = 1000;
    write_shard("token_a.bin", 20240520, 1, 100, 2, 200);
    write_file("token_b.bin", tokens, COUNT * sizeof *tokens);
    free(tokens);
    if (!CHECK(!shards_open(&set, in_folder("token_*.bin"), &error), "%s", error.text)) return;
    CHECK(!shards_check_tokens(&set, 1001, &error), "all tokens are below 1001: '%s'", error.text);
    CHECK(shards_check_tokens(&set, 1000, &error) == -1 && strstr(error.text, "token_b.bin: token 1000 at position 2400008"),
          "vocabulary 1000: '%s'", error.text);
    CHECK(strstr(error.text, "vocabulary of 1000"), "the sentence does not give the vocabulary: '%s'", error.text);
    CHECK(shards_check_tokens(&set, 999, &error) == -1 && strstr(error.text, "token_b.bin: token 999 at position 2400001"),
          "vocabulary 999: '%s'", error.text);
    CHECK(shards_check_tokens(&set, 99, &error) == -1 && strstr(error.text, "token_a.bin: token 99 at position 99"),
          "vocabulary 99: '%s'", error.text);
    int64_t index = shard_windows(&set.shards[0], 16) + BAD / 16;
    CHECK(shards_window(&set, index, 16, NULL, 999, window, &error) == -1 &&
          strstr(error.text, "token_b.bin: token 999 at position 2400001"), "a window over it: '%s'", error.text);
    CHECK(!shards_window(&set, index, 16, NULL, 1001, window, &error), "the same with vocabulary 1001: '%s'", error.text);
    shards_close(&set);
}

static void test_windows(void)
{
    ShardSet set;
    Error error = {""};
    TEST("shards: sorted by name; windows, their last tokens, slack and shift");
    write_shard("win_2.bin", 20240520, 1, 33, 2, 66);
    write_shard("win_10.bin", 20240520, 1, 49, 2, 98);
    write_shard("win_1.bin", 20240520, 1, 16, 2, 32);
    write_shard("win_3.bin", 20240520, 1, 1, 2, 2);
    if (!CHECK(!shards_open(&set, in_folder("win_*.bin"), &error), "%s", error.text)) return;
    static const char *const names[4] = {"win_1.bin", "win_10.bin", "win_2.bin", "win_3.bin"};
    static const int64_t windows[4] = {0, 3, 2, 0}, slack[4] = {15, 0, 0, 0};
    static const int64_t windows15[4] = {1, 3, 2, 0}, slack15[4] = {0, 3, 2, 0};
    for (size_t s = 0; s < 4; s++) {
        const Shard *shard = &set.shards[s];
        CHECK(!strcmp(strrchr(shard->path, '/') + 1, names[s]), "shard %zu is %s, expected %s", s, shard->path, names[s]);
        CHECK(shard_windows(shard, 16) == windows[s] && shard_slack(shard, 16) == slack[s],
              "%s: %lld windows of 16, slack %lld", names[s], (long long)shard_windows(shard, 16),
              (long long)shard_slack(shard, 16));
        CHECK(shard_windows(shard, 15) == windows15[s] && shard_slack(shard, 15) == slack15[s],
              "%s: %lld windows of 15, slack %lld", names[s], (long long)shard_windows(shard, 15),
              (long long)shard_slack(shard, 15));
        CHECK(shard_windows(shard, INT64_MAX) == 0, "%s has a window of 2^63-1", names[s]);
    }
    CHECK(shards_windows(&set, 16) == 5, "%lld windows, expected 5", (long long)shards_windows(&set, 16));

    static const int64_t first[6] = {0, 0, 15, 30, 0, 15}, shift[4] = {0, 3, 2, 0};
    for (int64_t index = 0; index < 6; index++)
        for (int shifted = 0; shifted < 2; shifted++) {
            int32_t window[17];
            window[16] = -7;
            int64_t start = first[index] + (shifted ? shift[index < 1 ? 0 : index < 4 ? 1 : 2] : 0);
            if (!CHECK(!shards_window(&set, index, 15, shifted ? shift : NULL, 257, window, &error), "%s", error.text))
                continue;
            for (int64_t i = 0; i <= 15; i++)
                CHECK(window[i] == start + i, "window %lld token %lld is %d, expected %lld", (long long)index, (long long)i,
                      window[i], (long long)(start + i));
            CHECK(window[16] == -7, "window %lld wrote beyond its %d tokens", (long long)index, 16);
        }
    shards_close(&set);
}

int main(void)
{
    snprintf(folder, sizeof folder, "/tmp/flashgpt-shards-XXXXXX");
    if (!mkdtemp(folder)) return perror("/tmp"), 1;
    test_forms();
    test_faults();
    test_large();
    test_tokens();
    test_windows();
    remove_files();
    return test_end();
}
