/* shards.c - token files, memory-mapped.
 *
 * A corpus of any size is opened without reading it: each file is mapped, its header and its size are held against each
 * other, and from then on a token is a load from memory that the kernel pages in. Everything that is wrong with a file is
 * found here, at opening, except the values of its tokens: those are compared with the vocabulary where they are used
 * (shards_window), and, for whoever wants to know before a long run, by one pass over the whole set
 * (shards_check_tokens), which costs as much as reading the files.
 *
 * Windows are read in a random order, so the mapping is advised against reading ahead, but for that one pass.
 */
#include "data/shards.h"

#include "data/random.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "shards hold little-endian integers, which are read as they lie: this host would have to swap them"
#endif

enum {
    HEADER_BYTES = 1024,
    MAGIC_UINT16 = 20240520,
    VERSION_UINT16 = 1,
    MAGIC_UINT32 = 20240801,
    VERSION_UINT32 = 7,
};

/* Tokens that one step of the whole-set check looks at: small enough to share out, large enough to run at full speed. */
static const int64_t CHECK_BLOCK = (int64_t)1 << 20;

uint32_t shard_token(const Shard *shard, int64_t i)
{
    if (shard->width == 2) {
        uint16_t token;
        memcpy(&token, shard->tokens + 2 * i, sizeof token);
        return token;
    }
    uint32_t token;
    memcpy(&token, shard->tokens + 4 * i, sizeof token);
    return token;
}

int64_t shard_windows(const Shard *shard, int64_t T)
{
    return shard->count > T ? (shard->count - 1) / T : 0;
}

int64_t shard_slack(const Shard *shard, int64_t T)
{
    return shard->count - 1 - shard_windows(shard, T) * T;
}

int64_t shards_windows(const ShardSet *set, int64_t T)
{
    int64_t windows = 0;
    for (size_t s = 0; s < set->count; s++) windows += shard_windows(&set->shards[s], T);
    return windows;
}

/* What else a magic of llm.c begins, or NULL. Headerless tokens of GPT-2 never look so: the first would be 55238 or more,
 * beyond its vocabulary. */
static const char *foreign_kind(uint32_t magic)
{
    switch (magic) {
    case 20240326: return "a model of llm.c";
    case 20240327: return "an optimizer's state of llm.c";
    case 20240328: return "a tokenizer";
    case 20240522: return "an evaluation file of llm.c";
    default: return NULL;
    }
}

/* Tells the form of a mapped file by its first bytes and fills width, tokens and count. Returns 0 or -1. */
static int shard_interpret(Shard *shard, Error *error)
{
    const uint8_t *bytes = shard->map;
    int64_t size = (int64_t)shard->map_bytes;
    uint32_t header[3] = {0, 0, 0}; /* magic, version, count */
    memcpy(header, bytes, size < (int64_t)sizeof header ? (size_t)size / 4 * 4 : sizeof header);
    int is_uint16 = header[0] == MAGIC_UINT16, is_uint32 = header[0] == MAGIC_UINT32;

    const char *foreign = foreign_kind(header[0]);
    if (foreign) return error_set(error, "%s: magic %u at byte 0: it is %s, expected a shard of tokens", shard->path,
                                  header[0], foreign);
    if (!is_uint16 && !is_uint32) {
        shard->width = 2;
        shard->tokens = bytes;
        shard->count = size / 2;
        if (size % 2)
            return error_set(error, "%s: %lld bytes, expected an even number: it has no shard header, so it is read as "
                             "uint16 tokens alone", shard->path, (long long)size);
        return 0;
    }
    if (size < HEADER_BYTES)
        return error_set(error, "%s: truncated inside its header: %lld bytes, expected at least %d", shard->path,
                         (long long)size, HEADER_BYTES);
    uint32_t version = is_uint16 ? VERSION_UINT16 : VERSION_UINT32;
    if (header[1] != version)
        return error_set(error, "%s: version %lld after magic %u at byte 4, expected %u", shard->path,
                         (long long)(int32_t)header[1], header[0], version);

    shard->width = is_uint16 ? 2 : 4;
    shard->tokens = bytes + HEADER_BYTES;
    int64_t data = size - HEADER_BYTES;
    shard->count = data / shard->width;
    if (header[2] == UINT32_MAX)
        return error_set(error, "%s: its header gives -1 tokens (a writer that did not finish), its size of %lld bytes "
                         "%lld tokens", shard->path, (long long)size, (long long)shard->count);
    if (data % shard->width || (uint32_t)shard->count != header[2])
        return error_set(error, "%s: %s: its header gives %u tokens of %d bytes, expected %lld bytes in all, got %lld "
                         "(%lld tokens)", shard->path, data < (int64_t)header[2] * shard->width ? "truncated" : "too long",
                         header[2], shard->width, (long long)header[2] * shard->width + HEADER_BYTES, (long long)size,
                         (long long)shard->count);
    if (!shard->count) return error_set(error, "%s: a shard header and no tokens, expected at least one", shard->path);
    return 0;
}

static void shard_close(Shard *shard)
{
    if (shard->map) munmap(shard->map, shard->map_bytes);
    free(shard->path);
    memset(shard, 0, sizeof *shard);
}

/* Maps one open file. Returns 0 or -1; the caller closes both file and shard. */
static int shard_map(Shard *shard, int file, Error *error)
{
    struct stat status;
    if (fstat(file, &status)) return error_set(error, "%s: %s", shard->path, strerror(errno));
    if (!S_ISREG(status.st_mode))
        return error_set(error, "%s: %s, expected a regular file of tokens", shard->path,
                         S_ISDIR(status.st_mode) ? "is a directory" : "is no regular file");
    if (status.st_size == 0) return error_set(error, "%s: empty (0 bytes), expected a shard of tokens", shard->path);
    if ((uintmax_t)status.st_size > SIZE_MAX / 2)
        return error_set(error, "%s: %lld bytes, more than this machine can map", shard->path, (long long)status.st_size);

    void *map = mmap(NULL, (size_t)status.st_size, PROT_READ, MAP_SHARED, file, 0);
    if (map == MAP_FAILED)
        return error_set(error, "%s: cannot map %lld bytes: %s", shard->path, (long long)status.st_size, strerror(errno));
    shard->map = map;
    shard->map_bytes = (size_t)status.st_size;
    madvise(map, shard->map_bytes, MADV_RANDOM);
    return shard_interpret(shard, error);
}

/* Opens one file. On an error the shard is closed. Returns 0 or -1. */
static int shard_open(Shard *shard, const char *path, Error *error)
{
    memset(shard, 0, sizeof *shard);
    shard->path = strdup(path);
    if (!shard->path) return error_set(error, "%s: not enough memory to keep its name", path);
    /* Without O_NONBLOCK, opening a named pipe would wait for a writer instead of being refused. */
    int file = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    int result;
    if (file < 0) {
        result = error_set(error, "%s: cannot open: %s", path, strerror(errno));
    } else {
        result = shard_map(shard, file, error);
        close(file);
    }
    if (result) shard_close(shard);
    return result;
}

static int compare_shards(const void *a, const void *b)
{
    return strcmp(((const Shard *)a)->path, ((const Shard *)b)->path);
}

int shards_open(ShardSet *set, const char *pattern, Error *error)
{
    memset(set, 0, sizeof *set);
    glob_t found;
    int status = glob(pattern, GLOB_NOSORT, NULL, &found);
    if (status) {
        if (status == GLOB_NOMATCH) return error_set(error, "%s: matches no file, expected at least one shard", pattern);
        return error_set(error, "%s: cannot list: %s", pattern,
                         status == GLOB_NOSPACE ? "not enough memory" : "a directory on the way is unreadable");
    }
    int result = 0;
    set->shards = calloc(found.gl_pathc, sizeof *set->shards);
    if (!set->shards) result = error_set(error, "%s: not enough memory for %zu shards", pattern, found.gl_pathc);
    for (size_t i = 0; !result && i < found.gl_pathc; i++) {
        result = shard_open(&set->shards[set->count], found.gl_pathv[i], error);
        if (!result) set->tokens += set->shards[set->count++].count;
    }
    globfree(&found);
    if (result) {
        shards_close(set);
        return -1;
    }
    /* By bytes and not by the locale's rules, which glob would follow: the order is part of what a seed means. */
    qsort(set->shards, set->count, sizeof *set->shards, compare_shards);
    return 0;
}

int shards_open_file(ShardSet *set, const char *path, Error *error)
{
    memset(set, 0, sizeof *set);
    set->shards = calloc(1, sizeof *set->shards);
    if (!set->shards) return error_set(error, "%s: not enough memory", path);
    if (shard_open(set->shards, path, error)) {
        shards_close(set);
        return -1;
    }
    set->count = 1;
    set->tokens = set->shards->count;
    return 0;
}

int shards_find(const char *directory, const char *part, char *out, size_t size, Error *error)
{
    static const char *const names[] = {"%s_*.bin", "%s.bin", "*_%s_*.bin", "*_%s.bin"};
    size_t length = 0, most = strlen(part) + sizeof "/*__*.bin";
    DIR *readable = opendir(directory);
    if (!readable) return error_set(error, "%s: cannot be read: %s", directory, strerror(errno));
    closedir(readable);
    if (2 * strlen(directory) + most > size) return error_set(error, "%.200s...: the path is too long", directory);
    for (const char *at = directory; *at; at++) { /* the directory is a name, not a pattern */
        if (strchr("*?[]\\", *at)) out[length++] = '\\';
        out[length++] = *at;
    }
    out[length++] = '/';
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        glob_t found;
        snprintf(out + length, size - length, names[i], part);
        int status = glob(out, GLOB_NOSORT, NULL, &found);
        globfree(&found);
        if (!status) return 0;
    }
    return error_set(error, "%s: holds no shards: looked for %s_*.bin, %s.bin, *_%s_*.bin and *_%s.bin", directory, part, part,
                     part, part);
}

void shards_close(ShardSet *set)
{
    for (size_t s = 0; s < set->count; s++) shard_close(&set->shards[s]);
    free(set->shards);
    memset(set, 0, sizeof *set);
}

static int token_fault(const Shard *shard, int64_t position, int64_t vocab, Error *error)
{
    return error_set(error, "%s: token %u at position %lld, expected less than the vocabulary of %lld%s", shard->path,
                     shard_token(shard, position), (long long)position, (long long)vocab,
                     shard->tokens == shard->map ? " (it has no shard header and was read as uint16 tokens alone)" : "");
}

/* The largest of tokens [first, last): the loops are written so that a compiler turns them into vector code. */
static uint32_t largest_token(const Shard *shard, int64_t first, int64_t last)
{
    const uint8_t *bytes = shard->tokens + first * shard->width;
    int64_t n = last - first;
    if (shard->width == 2) {
        uint16_t largest = 0;
        for (int64_t i = 0; i < n; i++) {
            uint16_t token;
            memcpy(&token, bytes + 2 * i, sizeof token);
            largest = token > largest ? token : largest;
        }
        return largest;
    }
    uint32_t largest = 0;
    for (int64_t i = 0; i < n; i++) {
        uint32_t token;
        memcpy(&token, bytes + 4 * i, sizeof token);
        largest = token > largest ? token : largest;
    }
    return largest;
}

int shards_check_tokens(const ShardSet *set, int64_t vocab, Error *error)
{
    for (size_t s = 0; s < set->count; s++) {
        const Shard *shard = &set->shards[s];
        int64_t blocks = (shard->count + CHECK_BLOCK - 1) / CHECK_BLOCK;
        int64_t bad = blocks; /* first block that holds a token >= vocab */
        madvise(shard->map, shard->map_bytes, MADV_SEQUENTIAL);
#pragma omp parallel for schedule(dynamic) reduction(min : bad)
        for (int64_t block = 0; block < blocks; block++) {
            int64_t first = block * CHECK_BLOCK;
            int64_t last = shard->count - first < CHECK_BLOCK ? shard->count : first + CHECK_BLOCK;
            if (block < bad && (int64_t)largest_token(shard, first, last) >= vocab) bad = block;
        }
        madvise(shard->map, shard->map_bytes, MADV_RANDOM);
        if (bad < blocks) {
            int64_t position = bad * CHECK_BLOCK;
            while ((int64_t)shard_token(shard, position) < vocab) position++;
            return token_fault(shard, position, vocab, error);
        }
    }
    return 0;
}

int shard_read(const Shard *shard, int64_t first, int64_t count, int64_t vocab, int32_t *out, Error *error)
{
    /* out is int32: a larger vocabulary than that cannot be meant. */
    int64_t limit = vocab < INT32_MAX ? vocab : INT32_MAX;
    for (int64_t i = 0; i < count; i++) {
        uint32_t token = shard_token(shard, first + i);
        if ((int64_t)token >= limit) return token_fault(shard, first + i, vocab, error);
        out[i] = (int32_t)token;
    }
    return 0;
}

int shards_window(const ShardSet *set, int64_t index, int64_t T, const int64_t *shift, int64_t vocab, int32_t *out,
                  Error *error)
{
    size_t s = 0;
    for (int64_t windows; index >= (windows = shard_windows(&set->shards[s], T)); s++) index -= windows;
    return shard_read(&set->shards[s], index * T + (shift ? shift[s] : 0), T + 1, vocab, out, error);
}

uint64_t shards_fingerprint(const ShardSet *set)
{
    enum { SAMPLES = 64 };
    uint64_t hash = random_mix(set->count);
    for (size_t s = 0; s < set->count; s++) {
        const Shard *shard = &set->shards[s];
        hash = random_mix(hash ^ (uint64_t)shard->count);
        for (int64_t k = 0; k < SAMPLES; k++) { /* evenly spread, the first and the last among them */
            int64_t last = shard->count - 1, at = last / (SAMPLES - 1) * k + last % (SAMPLES - 1) * k / (SAMPLES - 1);
            hash = random_mix(hash ^ shard_token(shard, at));
        }
    }
    return hash ? hash : 1; /* 0 stands for none */
}
