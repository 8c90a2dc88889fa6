/* test_loader.c - the order of windows and the loader: each window once an epoch whatever the batch, exact resume from any
 * position, errors of its thread, and the fixed numbers that every implementation of the order must give. */
#include "data/loader.h"

#include <pthread.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "data/random.h"
#include "tests/test.h"

enum { SHARDS = 3, SHARD_STRIDE = 10000 };

/* Token i of shard s is s * SHARD_STRIDE + i, so that a window tells where it comes from. */
static const int64_t counts[SHARDS] = {641, 321, 449};
static const int64_t VOCAB = (int64_t)SHARDS * SHARD_STRIDE;

static char folder[64];

static const char *in_folder(const char *name)
{
    static char path[2][192];
    static int turn;
    turn = !turn;
    snprintf(path[turn], sizeof path[turn], "%s/%s", folder, name);
    return path[turn];
}

/* Writes `count` uint16 tokens first, first+1, ... under a header. */
static void write_shard(const char *name, int64_t first, int64_t count)
{
    uint8_t *data = calloc(1, 1024 + 2 * (size_t)count);
    int32_t header[3] = {20240520, 1, (int32_t)count};
    memcpy(data, header, sizeof header);
    for (int64_t i = 0; i < count; i++) {
        uint16_t token = (uint16_t)(first + i);
        memcpy(data + 1024 + 2 * i, &token, sizeof token);
    }
    FILE *file = fopen(in_folder(name), "wb");
    if (!file || fwrite(data, 1, 1024 + 2 * (size_t)count, file) != 1024 + 2 * (size_t)count || fclose(file)) {
        fprintf(stderr, "cannot write %s\n", in_folder(name));
        exit(1);
    }
    free(data);
}

static void remove_files(void)
{
    char command[128];
    snprintf(command, sizeof command, "rm -rf '%s'", folder);
    if (system(command)) fprintf(stderr, "cannot remove %s\n", folder);
}

static void test_order(void)
{
    /* As computed by an implementation with Python's integers from the words of loader.h alone. */
    static const struct { uint64_t seed; int64_t epoch, n; int64_t first[4]; } vectors[] = {
        {1337, 0, 10, {8, 1, 3, 5}},
        {1337, 1, 10, {2, 4, 9, 3}},
        {42, 0, 87, {31, 74, 26, 77}},
        {1337, 3, 100000, {56209, 81310, 9185, 53454}},
        {7, 2, 4, {1, 3, 0, 2}},
        {7, 2, 5, {1, 2, 0, 3}},
        {9223372036854775813u, 7, 2147483659, {585064972, 1870915461, 1015782395, 499170268}},
    };
    TEST("loader_order: the published vectors");
    CHECK(random_mix(0) == 16294208416658607535u, "mix(0) is not splitmix64's");
    for (size_t v = 0; v < sizeof vectors / sizeof *vectors; v++)
        for (int64_t i = 0; i < 4; i++) {
            int64_t got = loader_order(vectors[v].seed, vectors[v].epoch, i, vectors[v].n);
            CHECK(got == vectors[v].first[i], "seed %llu epoch %lld n %lld: place %lld holds %lld, expected %lld",
                  (unsigned long long)vectors[v].seed, (long long)vectors[v].epoch, (long long)vectors[v].n, (long long)i,
                  (long long)got, (long long)vectors[v].first[i]);
        }
    int64_t huge = loader_order(1, 0, (int64_t)1 << 40, ((int64_t)1 << 61) + 1);
    CHECK(huge == 1227891617840786175, "n = 2^61+1: %lld", (long long)huge);

    TEST("loader_order: a permutation of every n up to 300 and of 100000, another one each epoch and seed");
    clock_t start = clock();
    for (int64_t n = 1; n <= 301; n++) {
        int64_t size = n == 301 ? 100000 : n, fixed = 0;
        uint8_t *seen = calloc(1, (size_t)size);
        for (int64_t i = 0; i < size; i++) {
            int64_t window = loader_order(5, n % 3, i, size);
            if (!CHECK(window >= 0 && window < size && !seen[window], "n %lld: place %lld gives %lld, out of range or twice",
                       (long long)size, (long long)i, (long long)window))
                break;
            seen[window] = 1;
            fixed += window == i;
        }
        free(seen);
        CHECK(size < 100 || fixed < 12, "n %lld: %lld windows stay in place: that is no shuffle", (long long)size,
              (long long)fixed);
    }
    double seconds = (double)(clock() - start) / CLOCKS_PER_SEC;
    CHECK(seconds < 3, "145150 places took %.1f s", seconds);
    int64_t same_epoch = 0, same_seed = 0;
    for (int64_t i = 0; i < 1000; i++) {
        same_epoch += loader_order(5, 0, i, 1000) == loader_order(5, 1, i, 1000);
        same_seed += loader_order(5, 0, i, 1000) == loader_order(6, 0, i, 1000);
    }
    CHECK(same_epoch < 12 && same_seed < 12, "of 1000 places, %lld agree between epochs and %lld between seeds",
          (long long)same_epoch, (long long)same_seed);
}

/* The window that position p must give, by the words of loader.h: its shard and first token. */
static void expect_window(const ShardSet *set, uint64_t seed, int64_t T, int64_t position, int64_t *shard, int64_t *first)
{
    int64_t n = shards_windows(set, T), epoch = position / n;
    int64_t index = loader_order(seed, epoch, position % n, n);
    for (*shard = 0; index >= shard_windows(&set->shards[*shard], T); ++*shard)
        index -= shard_windows(&set->shards[*shard], T);
    uint64_t key = random_mix(random_mix(seed) + 4 * (uint64_t)epoch);
    uint64_t slack = (uint64_t)shard_slack(&set->shards[*shard], T);
    *first = index * T + (epoch ? (int64_t)(random_mix(key ^ (uint64_t)(*shard + 1)) % (slack + 1)) : 0);
}

/* Reads `batches` batches from `position` on and compares every token with what the words of loader.h give. */
static void check_run(const ShardSet *set, int64_t B, int64_t T, uint64_t seed, int64_t position, int64_t batches)
{
    Error error = {""};
    Loader *loader = loader_open(set, B, T, VOCAB, seed, position, &error);
    if (!CHECK(loader, "B %lld T %lld: %s", (long long)B, (long long)T, error.text)) return;
    for (int64_t k = 0; k < batches; k++) {
        const int32_t *inputs, *targets;
        CHECK(loader_position(loader) == position + k * B, "position %lld, expected %lld",
              (long long)loader_position(loader), (long long)(position + k * B));
        if (!CHECK(!loader_next(loader, &inputs, &targets, &error), "%s", error.text)) break;
        int good = 1;
        for (int64_t b = 0; b < B && good; b++) {
            int64_t shard, first;
            expect_window(set, seed, T, position + k * B + b, &shard, &first);
            for (int64_t t = 0; t < T && good; t++) {
                int64_t token = shard * SHARD_STRIDE + first + t;
                good = CHECK(inputs[b * T + t] == token && targets[b * T + t] == token + 1,
                             "B %lld T %lld from %lld: batch %lld row %lld place %lld is %d -> %d, expected %lld -> %lld",
                             (long long)B, (long long)T, (long long)position, (long long)k, (long long)b, (long long)t,
                             inputs[b * T + t], targets[b * T + t], (long long)token, (long long)(token + 1));
            }
        }
        if (!good) break;
    }
    loader_close(loader);
}

static void test_coverage(const ShardSet *set)
{
    enum { T = 16, B = 4 };
    int64_t n = shards_windows(set, T);
    Error error = {""};
    TEST("loader: shards of 641, 321 and 449 tokens, T 16, batch 4: every window once an epoch, shifted after the first");
    CHECK(n == 40 + 20 + 28, "%lld windows, expected 88", (long long)n);
    Loader *loader = loader_open(set, B, T, VOCAB, 1337, 0, &error);
    if (!CHECK(loader, "%s", error.text)) return;
    for (int64_t epoch = 0; epoch < 4; epoch++) {
        int seen[SHARDS][64] = {{0}};
        int64_t shift[SHARDS] = {-1, -1, -1};
        for (int64_t k = 0; k < n / B; k++) {
            const int32_t *inputs, *targets;
            if (!CHECK(!loader_next(loader, &inputs, &targets, &error), "%s", error.text)) break;
            for (int64_t b = 0; b < B; b++) {
                int64_t shard = inputs[b * T] / SHARD_STRIDE, first = inputs[b * T] % SHARD_STRIDE;
                if (shift[shard] < 0) shift[shard] = first % T;
                CHECK(first % T == shift[shard], "epoch %lld: windows of shard %lld are shifted by %lld and by %lld",
                      (long long)epoch, (long long)shard, (long long)shift[shard], (long long)(first % T));
                CHECK(first + T < counts[shard], "epoch %lld: a window of shard %lld ends at %lld", (long long)epoch,
                      (long long)shard, (long long)(first + T));
                seen[shard][first / T]++;
            }
        }
        for (int64_t s = 0; s < SHARDS; s++) {
            CHECK(epoch || shift[s] == 0, "the first epoch shifts shard %lld by %lld", (long long)s, (long long)shift[s]);
            for (int64_t w = 0; w < shard_windows(&set->shards[s], T); w++)
                CHECK(seen[s][w] == 1, "epoch %lld: window %lld of shard %lld came %d times", (long long)epoch, (long long)w,
                      (long long)s, seen[s][w]);
        }
    }
    loader_close(loader);

    TEST("loader: with slack, later epochs shift and each by its own amount");
    int64_t different = 0, last = -1;
    for (int64_t epoch = 1; epoch < 9; epoch++) {
        int64_t windows = shards_windows(set, 100), first = 0, shard = 1;
        for (int64_t i = 0; i < windows && (i == 0 || shard != 0); i++)
            expect_window(set, 1337, 100, epoch * windows + i, &shard, &first);
        different += first % 100 != last;
        last = first % 100;
    }
    CHECK(different >= 5, "8 epochs gave %lld changes of shift", (long long)different);
    check_run(set, 3, 100, 1337, 0, 30);
}

static void test_resume(const ShardSet *set)
{
    TEST("loader: batches of 1 to 9 and of 200 follow the same order over the ends of epochs");
    for (int64_t B = 1; B <= 9; B++) check_run(set, B, 16, 1337, 0, 200 / B + 1);
    check_run(set, 200, 16, 1337, 0, 3);

    TEST("loader: from any position of three epochs it goes on as if it had never stopped");
    for (int64_t position = 0; position < 3 * 88; position++) check_run(set, 5, 16, 99, position, 2);
    check_run(set, 4, 31, 3, (int64_t)1 << 50, 3);

    TEST("loader: closed at any moment, also before the first batch");
    for (int64_t batches = 0; batches < 60; batches++) check_run(set, 2, 64, 5, 0, batches % 4);
}

static void test_faults(const ShardSet *set)
{
    static const struct { int64_t B, T, vocab, position; const char *word; } wrong[] = {
        {0, 16, 257, 0, "batch 0"}, {4, 0, 257, 0, "sequence 0"}, {4, 16, 0, 0, "vocabulary 0"},
        {4, 16, 257, -1, "position -1"}, {4, 641, 257, 0, "641 tokens, expected at least 642"},
        {4, INT64_MAX, 257, 0, "9223372036854775808"},
        {INT64_MAX / 8, 16, 257, 0, "not enough memory for two batches of 1152921504606846975 x 16"},
    };
    Error error = {""};
    const int32_t *inputs = NULL, *targets = NULL;
    TEST("loader: what it cannot do is said in a sentence");
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        error.text[0] = 0;
        Loader *loader = loader_open(set, wrong[i].B, wrong[i].T, wrong[i].vocab, 1, wrong[i].position, &error);
        CHECK(!loader && strstr(error.text, wrong[i].word), "B %lld T %lld: '%s', expected it to say '%s'",
              (long long)wrong[i].B, (long long)wrong[i].T, error.text, wrong[i].word);
        loader_close(loader);
    }
    ShardSet none = {0};
    CHECK(!loader_open(&none, 1, 1, 257, 1, 0, &error) && strstr(error.text, "no shard"), "an empty set: '%s'", error.text);
    loader_close(NULL);

    TEST("loader: a shard of exactly T+1 tokens is one window, handed out again and again");
    ShardSet one;
    write_shard("one.bin", 0, 17);
    if (!CHECK(!shards_open(&one, in_folder("one.bin"), &error), "%s", error.text)) return;
    check_run(&one, 3, 16, 7, 0, 5);
    shards_close(&one);

    TEST("loader: a token beyond the vocabulary stops at its batch, with file and position, and again when asked again");
    ShardSet bad;
    write_shard("bad.bin", 0, 161); /* token i is i: windows of 16, the last starts at 144 */
    if (!CHECK(!shards_open(&bad, in_folder("bad.bin"), &error), "%s", error.text)) return;
    int64_t place = 0;
    while (loader_order(11, 0, place, 10) != 9) place++;
    Loader *loader = loader_open(&bad, 1, 16, 150, 11, 0, &error);
    if (!CHECK(loader, "%s", error.text)) return;
    for (int64_t k = 0; k < place; k++)
        CHECK(!loader_next(loader, &inputs, &targets, &error), "batch %lld: %s", (long long)k, error.text);
    for (int again = 0; again < 2; again++) {
        error.text[0] = 0;
        CHECK(loader_next(loader, &inputs, &targets, &error) == -1 &&
              strstr(error.text, "bad.bin: token 150 at position 150, expected less than the vocabulary of 150"), "'%s'",
              error.text);
        CHECK(loader_position(loader) == place, "position %lld after %lld batches", (long long)loader_position(loader),
              (long long)place);
    }
    loader_close(loader);
    shards_close(&bad);
}

/* Batches stay whole while the thread prepares the next one: reads each one late and slowly. */
static void test_buffers(const ShardSet *set)
{
    enum { T = 16, B = 8 };
    Error error = {""};
    TEST("loader: a batch does not change before the following call");
    Loader *loader = loader_open(set, B, T, VOCAB, 21, 0, &error);
    if (!CHECK(loader, "%s", error.text)) return;
    for (int64_t k = 0; k < 40; k++) {
        const int32_t *inputs, *targets;
        int32_t copy[B * T], late[B * T];
        if (!CHECK(!loader_next(loader, &inputs, &targets, &error), "%s", error.text)) break;
        memcpy(copy, inputs, sizeof copy);
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
        memcpy(late, inputs, sizeof late);
        CHECK(!memcmp(copy, late, sizeof copy), "batch %lld changed while it was held", (long long)k);
    }
    loader_close(loader);
}

int main(void)
{
    ShardSet set;
    Error error = {""};
    snprintf(folder, sizeof folder, "/tmp/flashgpt-loader-XXXXXX");
    if (!mkdtemp(folder)) return perror("/tmp"), 1;
    for (int64_t s = 0; s < SHARDS; s++) {
        char name[32];
        snprintf(name, sizeof name, "train_%lld.bin", (long long)s);
        write_shard(name, s * SHARD_STRIDE, counts[s]);
    }
    test_order();
    TEST("loader: the shards of this test");
    if (CHECK(!shards_open(&set, in_folder("train_*.bin"), &error), "%s", error.text)) {
        test_coverage(&set);
        test_resume(&set);
        test_faults(&set);
        test_buffers(&set);
        shards_close(&set);
    }
    remove_files();
    return test_end();
}
