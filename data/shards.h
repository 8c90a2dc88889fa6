/* shards.h - token files, memory-mapped: opened, checked and read by index.
 *
 * Three forms are read, told apart by their first four bytes (little-endian int32):
 *   magic 20240520, version 1, count : 1024-byte header of 256 int32, then `count` uint16 tokens (llm.c, GPT-2);
 *   magic 20240801, version 7, count : the same header, then uint32 tokens (llm.c, Llama 3);
 *   anything else                    : no header, uint16 tokens to the end of the file (nanoGPT); but the magics of llm.c's
 *                                      models, tokenizers and evaluation files are errors.
 * A count of -1 or one that disagrees with the file's size is an error that names both. Counts above 2^31 are carried by
 * the file's size: the header field then holds the low 32 bits, and must agree with them.
 *
 * A window of T is T+1 consecutive tokens of one shard: T inputs and, one further on, T targets. Windows start at multiples of
 * T (plus a shift below), so neighbours share one token and every token but a shard's first is a target at most once.
 */
#ifndef SHARDS_H
#define SHARDS_H

#include <stddef.h>
#include <stdint.h>

#include "data/error.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct Shard {
    char *path;
    const uint8_t *tokens; /* first token, in the mapping; may be unaligned */
    int width;             /* bytes a token: 2 or 4, little-endian */
    int64_t count;         /* tokens */
    void *map;
    size_t map_bytes;
} Shard;

typedef struct ShardSet {
    Shard *shards; /* sorted by path */
    size_t count;
    int64_t tokens; /* of all shards together */
} ShardSet;

/* Opens every file that the glob `pattern` matches. Errors: no match, unreadable, empty, short, truncated, too long, unknown
 * version, not a regular file. On an error nothing stays open. Returns 0 or -1. */
int shards_open(ShardSet *set, const char *pattern, Error *error);
/* The same with one file, by its name. */
int shards_open_file(ShardSet *set, const char *path, Error *error);
void shards_close(ShardSet *set);

/* Writes to out, of `size` bytes, the pattern by which shards_open finds a part ("train", "val") in a directory: the first
 * of PART_*.bin (data/prepare.py), PART.bin (nanoGPT), *_PART_*.bin (llm.c, modded-nanogpt) and *_PART.bin (llm.c's small
 * sets) that matches a file. Fails, with the names that were looked for, where none does. Returns 0 or -1. */
int shards_find(const char *directory, const char *part, char *out, size_t size, Error *error);

/* Token i of a shard, 0 <= i < count, not checked. */
uint32_t shard_token(const Shard *shard, int64_t i);

/* Copies tokens first..first+count-1 of a shard, which must be there, to out (count). Fails on a token >= vocab with file,
 * position, token and vocab. Returns 0 or -1. */
int shard_read(const Shard *shard, int64_t first, int64_t count, int64_t vocab, int32_t *out, Error *error);

/* Reads the whole set on all cores and fails on the first token >= vocab (file, position, token, vocab). */
int shards_check_tokens(const ShardSet *set, int64_t vocab, Error *error);

/* Windows of T in one shard, (count-1)/T, and in the set. */
int64_t shard_windows(const Shard *shard, int64_t T);
int64_t shards_windows(const ShardSet *set, int64_t T);

/* Copies window `index` of the set, 0 <= index < shards_windows(set, T), to out (T+1). Windows are numbered shard by shard.
 * shift (count of shards) moves the windows of each shard by that many tokens, at most shard_slack(); NULL means no shift.
 * Fails on a token >= vocab with file, position, token and vocab. Returns 0 or -1. */
int shards_window(const ShardSet *set, int64_t index, int64_t T, const int64_t *shift, int64_t vocab, int32_t *out,
                  Error *error);

/* A number that tells one set of shards from another: from their token counts and a sample of 64 tokens of each, not from their paths. */
uint64_t shards_fingerprint(const ShardSet *set);

/* Tokens of a shard that its unshifted windows leave over at the end: (count-1) - windows*T. */
int64_t shard_slack(const Shard *shard, int64_t T);

#ifdef __cplusplus
}
#endif
#endif
