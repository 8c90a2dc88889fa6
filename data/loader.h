/* loader.h - batches of windows, in a seeded order, prepared by a thread of its own while the step runs.
 *
 * An epoch visits each of the n windows of the set exactly once. Position p (windows handed out so far, from 0) lies in epoch
 * p / n at place p % n, and place i of an epoch holds window order(seed, epoch, i, n). So the position alone is the
 * loader's state, the order depends on seed and epoch and not on the batch, and a batch may run over the end of an epoch.
 *
 * order(): a Feistel permutation with cycle walking, so that no table is kept for any n. With mix = random_mix:
 *     h = the least integer >= 1 with 4^h >= n;  mask = 2^h - 1;  key_r = mix(mix(seed) + 4*epoch + r), r = 0..3
 *     do  l = i >> h, r = i & mask;  for r4 = 0..3: (l, r) = (r, l ^ (mix(r + key_r4) & mask));  i = l << h | r
 *     while i >= n
 * Epoch 0 reads unshifted windows. In a later epoch shard s (numbered from 0) is shifted by
 *     mix(key_0 ^ (s + 1)) % (slack_s + 1)
 * tokens, so that a shard's tail is seen too and tokens meet other contexts. Source: Luby and Rackoff 1988; Black and Rogaway 2002.
 */
#ifndef LOADER_H
#define LOADER_H

#include "data/shards.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct Loader Loader;

/* Place i of an epoch -> window, both in [0, n), as above. */
int64_t loader_order(uint64_t seed, int64_t epoch, int64_t i, int64_t n);

/* Batches of B windows of T tokens from `set`, which must outlive the loader, from `position` on. Errors: no window at all in
 * the set (names the longest shard and what T needs), no memory, no thread. Returns NULL on an error. */
Loader *loader_open(const ShardSet *set, int64_t B, int64_t T, int64_t vocab, uint64_t seed, int64_t position, Error *error);
void loader_close(Loader *loader);

/* The next batch: *inputs and *targets (B,T), valid until the following call. Returns 0, or -1 on a token >= vocab. */
int loader_next(Loader *loader, const int32_t **inputs, const int32_t **targets, Error *error);

/* Windows handed out by loader_next so far, the start position included: what a checkpoint keeps. */
int64_t loader_position(const Loader *loader);

#ifdef __cplusplus
}
#endif
#endif
