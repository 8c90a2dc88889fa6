/* inspect.c - a shard, looked at: the trainer reads shards as they are, this shows what it would read.
 *
 * Everything is counted in one pass over the mapped file. Faults are what the trainer would refuse (shards.h has the list,
 * tokens beyond the vocabulary come here) and what it could not know: a file that ends in a long run of one token, as a
 * writer leaves it that had reserved the room and was stopped. */
#include "trainer/inspect.h"

#include <getopt.h>
#include <glob.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "data/files.h"
#include "data/json.h"
#include "data/model.h"
#include "data/shards.h"
#include "data/tokenizer.h"
#include "trainer/display.h"

enum {
    STATUS_MACHINE = 1,
    STATUS_OPTION = 2,
    COUNTS_MOST = 1 << 24, /* different tokens that are counted one by one: more than any vocabulary has */
    TAIL_LEAST = 1024,     /* equal tokens at the end of a file from which on they are a fault */
    BAR = 30,
};

typedef struct Choice {
    int64_t vocab, windows, length, top; /* vocab 0: as the tokenizer says */
    const char *tokenizer;               /* path of one, or NULL: the one beside the shard */
} Choice;

/* What one pass over a shard finds. */
typedef struct Census {
    int64_t *counts;              /* (limit) occurrences of each token below limit */
    int64_t limit, used, largest; /* used: tokens below limit that occur */
    int64_t beyond, first_beyond; /* tokens at or above the vocabulary; where the first of them is */
    int64_t run, run_at, tail;    /* the longest run of one token, where it begins; the run at the end of the file */
} Census;

static void print_help(void)
{
    printf("usage: train_gpt inspect [options] PATH...\n\nShows shards of tokens: their form, counts, a histogram of "
           "tokens, windows of them as text, faults.\nA PATH is a shard, a glob in quotes, or a directory as --data takes.\n\n"
           "  --tokenizer PATH  tokenizer.bin, or a directory with a tokenizer; without it, tokenizer.bin beside the shard\n"
           "  --vocab V         tokens in the vocabulary; without it, as the tokenizer says\n"
           "  --windows N       windows to show, spread over the shard [3]\n"
           "  --length N        tokens of a window [64]\n"
           "  --top N           tokens of the histogram, the most frequent [12]\n"
           "  --help            print this\n\n"
           "Exit status: 0 no faults, 1 faults or a file that cannot be read, 2 a wrong option.\n");
}

/* --- counting --------------------------------------------------------------------------------------------------------- */

/* Counts every token. Returns 0, or -1 where memory is short. */
static int census_take(Census *census, const Shard *shard, int64_t vocab, Error *error)
{
    memset(census, 0, sizeof *census);
    census->limit = shard->width == 2 ? 65536 : COUNTS_MOST;
    census->counts = (int64_t *)calloc((size_t)census->limit, sizeof *census->counts);
    if (!census->counts) return error_set(error, "%s: not enough memory to count its tokens", shard->path);
    madvise(shard->map, shard->map_bytes, MADV_SEQUENTIAL);
    int64_t begin = 0; /* of the present run */
    uint32_t before = 0;
    for (int64_t i = 0; i < shard->count; i++) {
        uint32_t token = shard_token(shard, i);
        if (token < (uint64_t)census->limit) census->counts[token]++;
        if (token > census->largest) census->largest = token;
        if (vocab && token >= (uint64_t)vocab && !census->beyond++) census->first_beyond = i;
        if (i && token != before) begin = i;
        before = token;
        if (i + 1 - begin > census->run) {
            census->run = i + 1 - begin;
            census->run_at = begin;
        }
    }
    census->tail = shard->count - begin;
    for (int64_t token = 0; token < census->limit; token++) census->used += census->counts[token] > 0;
    return 0;
}

/* --- showing ---------------------------------------------------------------------------------------------------------- */

/* Bytes as one line: in quotes, with escapes. */
static void print_quoted(const char *bytes, size_t length)
{
    size_t size = 6 * length + 3;
    char *quoted = (char *)malloc(size);
    if (!quoted) return;
    int written = json_quote(quoted, size, bytes, length);
    if (written > 0) display_text(quoted, (size_t)written);
    free(quoted);
}

static void print_token(const Tokenizer *tokenizer, int64_t token)
{
    size_t length;
    if (!tokenizer || token >= tokenizer_vocab(tokenizer)) return;
    const char *bytes = tokenizer_decode(tokenizer, (int32_t)token, &length);
    print_quoted(bytes, length);
}

typedef struct Frequency {
    int64_t token, count;
} Frequency;

/* Frequent tokens first, of equals the smaller one. */
static int compare_frequencies(const void *a, const void *b)
{
    const Frequency *one = (const Frequency *)a, *other = (const Frequency *)b;
    if (one->count != other->count) return one->count < other->count ? 1 : -1;
    return one->token < other->token ? -1 : 1;
}

/* The most frequent tokens with bars, then what the others are together. Returns 0, or -1 where memory is short. */
static int print_histogram(const Census *census, const Shard *shard, const Tokenizer *tokenizer, int64_t top, Error *error)
{
    Frequency *order = (Frequency *)malloc((size_t)(census->used + 1) * sizeof *order);
    int64_t used = 0, rest = shard->count;
    if (!order) return error_set(error, "%s: not enough memory for a histogram", shard->path);
    for (int64_t token = 0; token < census->limit; token++) {
        if (!census->counts[token]) continue;
        order[used].token = token;
        order[used++].count = census->counts[token];
    }
    qsort(order, (size_t)used, sizeof *order, compare_frequencies);
    for (int64_t i = 0; i < used && i < top; i++) {
        int width = (int)(BAR * ((double)order[i].count / (double)order[0].count) + 0.5);
        printf("  %8" PRId64 "  %6.2f%%  %.*s%*s ", order[i].token, 100 * (double)order[i].count / (double)shard->count,
               width, "##############################", BAR - width, "");
        print_token(tokenizer, order[i].token);
        printf("\n");
        rest -= order[i].count;
    }
    if (used > top)
        printf("  %8s  %6.2f%%  %" PRId64 " others\n", "", 100 * (double)rest / (double)shard->count, used - top);
    free(order);
    return 0;
}

static int print_windows(const Shard *shard, const Tokenizer *tokenizer, const Choice *choice, Error *error)
{
    int64_t length = choice->length < shard->count ? choice->length : shard->count, room = shard->count - length;
    for (int64_t w = 0; w < choice->windows; w++) {
        int64_t first = choice->windows > 1 ? (int64_t)((double)room * (double)w / (double)(choice->windows - 1)) : 0;
        size_t used = 0;
        char *text = (char *)malloc((size_t)length * 255 + 1); /* a token has at most 255 bytes */
        if (!text) return error_set(error, "%s: not enough memory for a window", shard->path);
        printf("  at %-12" PRId64 " ", first);
        for (int64_t i = first; i < first + length; i++) {
            size_t bytes;
            uint32_t token = shard_token(shard, i);
            if (!tokenizer) {
                printf("%s%u", i > first ? " " : "", token);
            } else if (token < (uint64_t)tokenizer_vocab(tokenizer)) {
                const char *piece = tokenizer_decode(tokenizer, (int32_t)token, &bytes);
                memcpy(text + used, piece, bytes);
                used += bytes;
            }
        }
        if (tokenizer) print_quoted(text, used);
        printf("\n");
        free(text);
    }
    return 0;
}

/* Prints the faults, or that there is none. Returns how many. */
static int print_faults(const Census *census, const Shard *shard, int64_t vocab)
{
    int faults = 0;
    if (census->beyond && ++faults)
        printf("  FAULT     %" PRId64 " token%s at or above the vocabulary of %" PRId64 ": the first is %u at position %"
               PRId64 "\n", census->beyond, census->beyond == 1 ? "" : "s", vocab, shard_token(shard, census->first_beyond),
               census->first_beyond);
    if (census->tail >= TAIL_LEAST && ++faults)
        printf("  FAULT     the last %" PRId64 " tokens are all %u: was its writer stopped?\n", census->tail,
               shard_token(shard, shard->count - 1));
    if (!faults) printf("  faults    none\n");
    return faults;
}

static void print_counts(const Census *census, const Shard *shard, const Tokenizer *tokenizer, int64_t vocab)
{
    char size[32];
    display_bytes(size, sizeof size, (double)shard->map_bytes);
    printf("  form      %s, %s\n", shard->tokens == shard->map ? "uint16 tokens alone, no header (nanoGPT)"
                                   : shard->width == 2 ? "header 20240520 version 1, uint16 tokens (llm.c)"
                                                       : "header 20240801 version 7, uint32 tokens (llm.c)", size);
    printf("  tokens    %" PRId64 ", %" PRId64 " different, the largest %" PRId64, shard->count, census->used,
           census->largest);
    if (vocab) printf(", of a vocabulary of %" PRId64, vocab);
    printf("; the longest run of one: %" PRId64 " times %u at position %" PRId64 "\n", census->run,
           shard_token(shard, census->run_at), census->run_at);
    if (!tokenizer) return;
    int64_t end = tokenizer_end_of_text(tokenizer), ends = end < census->limit ? census->counts[end] : 0;
    printf("  documents %" PRId64 " end%s with end-of-text, token %" PRId64, ends, ends == 1 ? "s" : "", end);
    if (ends) printf("; %.1f tokens each", (double)shard->count / (double)ends);
    printf("\n");
}

/* The tokenizer that was named, or that beside a shard. NULL with error->text "" where there is none. */
static Tokenizer *find_tokenizer(const Choice *choice, const char *path, Error *error)
{
    char beside[FILES_PATH];
    error->text[0] = 0;
    if (choice->tokenizer) {
        if (!files_is_directory(choice->tokenizer)) return tokenizer_open(choice->tokenizer, error);
        Tokenizer *tokenizer = model_tokenizer(choice->tokenizer, error);
        if (!tokenizer && !error->text[0])
            error_set(error, "--tokenizer %s: holds no tokenizer that can be read here", choice->tokenizer);
        return tokenizer;
    }
    const char *slash = strrchr(path, '/');
    int length = slash ? (int)(slash - path) + 1 : 0;
    if (snprintf(beside, sizeof beside, "%.*stokenizer.bin", length, path) >= (int)sizeof beside) return NULL;
    return files_is_regular(beside) ? tokenizer_open(beside, error) : NULL;
}

/* Shows one file. Returns how many faults it has, -1 where the machine or the tokenizer failed. */
static int inspect_shard(const char *path, const Choice *choice, Error *error)
{
    ShardSet set;
    Census census;
    Error fault;
    printf("%s\n", path);
    if (shards_open_file(&set, path, &fault)) {
        printf("  FAULT     %s\n", fault.text);
        return 1;
    }
    Tokenizer *tokenizer = find_tokenizer(choice, path, error);
    int64_t vocab = choice->vocab ? choice->vocab : tokenizer ? tokenizer_vocab(tokenizer) : 0;
    const Shard *shard = set.shards;
    int faults = -1;
    if ((tokenizer || !error->text[0]) && !census_take(&census, shard, vocab, error)) {
        print_counts(&census, shard, tokenizer, vocab);
        if (!print_histogram(&census, shard, tokenizer, choice->top, error) &&
            !print_windows(shard, tokenizer, choice, error))
            faults = print_faults(&census, shard, vocab);
        free(census.counts);
    }
    tokenizer_close(tokenizer);
    shards_close(&set);
    return faults;
}

/* --- the command ------------------------------------------------------------------------------------------------------- */

/* Shows what a pattern matches. Adds to *seen and *faulty. */
static int inspect_pattern(const char *pattern, const Choice *choice, int *seen, int *faulty, Error *error)
{
    glob_t found;
    int status = glob(pattern, 0, NULL, &found), failed = 0;
    if (status) return error_set(error, "%s: matches no file, expected shards", pattern);
    for (size_t i = 0; i < found.gl_pathc && !failed; i++) {
        int faults = inspect_shard(found.gl_pathv[i], choice, error);
        failed = faults < 0;
        ++*seen;
        *faulty += faults > 0;
    }
    globfree(&found);
    return failed ? -1 : 0;
}

static int inspect_path(const char *path, const Choice *choice, int *seen, int *faulty, Error *error)
{
    char pattern[2 * FILES_PATH];
    int parts = 0;
    if (files_is_regular(path)) {
        int faults = inspect_shard(path, choice, error);
        ++*seen;
        *faulty += faults > 0;
        return faults < 0 ? -1 : 0;
    }
    if (!files_is_directory(path)) return inspect_pattern(path, choice, seen, faulty, error);
    for (int i = 0; i < 2; i++) {
        if (shards_find(path, i ? "val" : "train", pattern, sizeof pattern, error)) continue;
        parts++;
        if (inspect_pattern(pattern, choice, seen, faulty, error)) return -1;
    }
    return parts ? 0 : -1;
}

/* A whole number from `least` on. Returns 0, or -1 with the sentence. */
static int take_count(const char *name, const char *text, int64_t least, int64_t *out, Error *error)
{
    char *end;
    long long value = strtoll(text, &end, 10);
    if (end == text || *end || value < least || value > 1000000000)
        return error_set(error, "inspect: --%s: got '%s', expected a whole number from %" PRId64 " to 1000000000", name,
                         text, least);
    *out = value;
    return 0;
}

int inspect_run(int argc, char **argv, Error *error)
{
    Choice choice = {.windows = 3, .length = 64, .top = 12};
    static const struct option longs[] = {
        {"tokenizer", required_argument, NULL, 't'}, {"vocab", required_argument, NULL, 'v'},
        {"windows", required_argument, NULL, 'w'},   {"length", required_argument, NULL, 'l'},
        {"top", required_argument, NULL, 'k'},       {"help", no_argument, NULL, 'h'},         {0},
    };
    int code, bad = 0, seen = 0, faulty = 0;
    opterr = 0;
    optind = 0;
    while (!bad && (code = getopt_long(argc, argv, "+:h", longs, NULL)) != -1) {
        switch (code) {
        case 'h': print_help(); return 0;
        case 't': choice.tokenizer = optarg; break;
        case 'v': bad = take_count("vocab", optarg, 1, &choice.vocab, error); break;
        case 'w': bad = take_count("windows", optarg, 0, &choice.windows, error); break;
        case 'l': bad = take_count("length", optarg, 1, &choice.length, error); break;
        case 'k': bad = take_count("top", optarg, 0, &choice.top, error); break;
        case ':': bad = error_set(error, "inspect: %s needs a value", argv[optind - 1]); break;
        default: bad = error_set(error, "inspect: unknown option '%s' (inspect --help lists all)", argv[optind - 1]);
        }
    }
    if (!bad && optind == argc) bad = error_set(error, "inspect: expected a shard, a glob or a directory (inspect --help)");
    if (bad) return STATUS_OPTION;
    for (int i = optind; i < argc; i++)
        if (inspect_path(argv[i], &choice, &seen, &faulty, error)) return STATUS_MACHINE;
    if (!faulty) return 0;
    error_set(error, "%d of %d shard%s faulty: see above", faulty, seen, seen == 1 ? " is" : "s are");
    return STATUS_MACHINE;
}
