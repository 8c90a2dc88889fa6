/* loader.c - batches of windows, in a seeded order, prepared by a thread of its own.
 *
 * Two buffers go round between the thread and the caller. Batch k lies in buffer k % 2. The thread may fill it once the
 * caller has let go of batch k-2, which a call of loader_next says by asking for batch k-1: so while a step computes on one
 * buffer the thread fills the other, and a call waits only where the step was faster than the disk. Three counters under one
 * lock say all there is to say: filled (by the thread), taken (by the caller) and released (by the caller).
 *
 * What is in batch k follows from the start position and k alone, never from the timing of the two threads.
 */
#include "data/loader.h"

#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "data/random.h"

enum { ROUNDS = 4 };

struct Loader {
    const ShardSet *set;
    int64_t B, T, vocab;
    int64_t windows; /* of the set */
    int64_t start;   /* position at opening */
    uint64_t seed;

    /* Of the thread alone. */
    int32_t *window;     /* (T+1) */
    int64_t *shift;      /* (shards) of the epoch below */
    int64_t shift_epoch; /* -1 before the first window */

    int32_t *inputs[2];  /* (B,T) */
    int32_t *targets[2]; /* (B,T) */

    pthread_t thread;
    int running; /* the thread was started */
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int64_t filled, taken, released; /* batches */
    int stop, failed;
    Error error; /* why batch number `filled` could not be made */
};

/* Key of round r in an epoch. */
static uint64_t epoch_key(uint64_t seed, int64_t epoch, uint64_t r)
{
    return random_mix(random_mix(seed) + 4 * (uint64_t)epoch + r);
}

int64_t loader_order(uint64_t seed, int64_t epoch, int64_t i, int64_t n)
{
    int half = 1;
    while (half < 31 && (n - 1) >> (2 * half)) half++; /* 31 holds 2^62 windows */
    uint64_t mask = ((uint64_t)1 << half) - 1;
    uint64_t key[ROUNDS];
    for (int r = 0; r < ROUNDS; r++) key[r] = epoch_key(seed, epoch, (uint64_t)r);

    uint64_t place = (uint64_t)i;
    do {
        uint64_t left = place >> half, right = place & mask;
        for (int r = 0; r < ROUNDS; r++) {
            uint64_t next = left ^ (random_mix(right + key[r]) & mask);
            left = right;
            right = next;
        }
        place = left << half | right;
    } while (place >= (uint64_t)n);
    return (int64_t)place;
}

/* Sets the shifts of every shard for an epoch: none in the first. */
static void set_shift(Loader *loader, int64_t epoch)
{
    uint64_t key = epoch_key(loader->seed, epoch, 0);
    for (size_t s = 0; s < loader->set->count; s++) {
        uint64_t room = (uint64_t)shard_slack(&loader->set->shards[s], loader->T) + 1;
        loader->shift[s] = epoch ? (int64_t)(random_mix(key ^ (s + 1)) % room) : 0;
    }
    loader->shift_epoch = epoch;
}

/* Fills the buffers of batch k. Returns 0 or -1. */
static int fill_batch(Loader *loader, int64_t k, Error *error)
{
    int64_t B = loader->B, T = loader->T;
    int32_t *inputs = loader->inputs[k % 2], *targets = loader->targets[k % 2];
    for (int64_t b = 0; b < B; b++) {
        int64_t position = loader->start + k * B + b;
        int64_t epoch = position / loader->windows, place = position % loader->windows;
        if (epoch != loader->shift_epoch) set_shift(loader, epoch);
        int64_t index = loader_order(loader->seed, epoch, place, loader->windows);
        if (shards_window(loader->set, index, T, loader->shift, loader->vocab, loader->window, error)) return -1;
        memcpy(inputs + b * T, loader->window, (size_t)T * sizeof *inputs);
        memcpy(targets + b * T, loader->window + 1, (size_t)T * sizeof *targets);
    }
    return 0;
}

static void *loader_run(void *argument)
{
    Loader *loader = argument;
    pthread_mutex_lock(&loader->lock);
    while (!loader->stop && !loader->failed) {
        if (loader->filled >= loader->released + 2) {
            pthread_cond_wait(&loader->changed, &loader->lock);
            continue;
        }
        int64_t k = loader->filled;
        Error error;
        pthread_mutex_unlock(&loader->lock);
        int failed = fill_batch(loader, k, &error);
        pthread_mutex_lock(&loader->lock);
        if (failed) {
            loader->failed = 1;
            loader->error = error;
        } else {
            loader->filled++;
        }
        pthread_cond_broadcast(&loader->changed);
    }
    pthread_mutex_unlock(&loader->lock);
    return NULL;
}

/* Starts the thread with every signal blocked, so that Ctrl-C and its like interrupt the caller's thread; but those that its
 * own faults raise, a shard cut short for one, reach the process's handlers. */
static int start_thread(Loader *loader, Error *error)
{
    sigset_t all, before;
    sigfillset(&all);
    sigdelset(&all, SIGBUS), sigdelset(&all, SIGSEGV), sigdelset(&all, SIGFPE), sigdelset(&all, SIGILL);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int status = pthread_create(&loader->thread, NULL, loader_run, loader);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (status) return error_set(error, "the loader cannot start its thread: %s", strerror(status));
    loader->running = 1;
    return 0;
}

/* Refuses what no batch can be made of. Returns 0 or -1. */
static int check_request(const ShardSet *set, int64_t B, int64_t T, int64_t vocab, int64_t position, Error *error)
{
    if (B < 1 || T < 1 || vocab < 1)
        return error_set(error, "the loader got batch %lld, sequence %lld and vocabulary %lld, expected at least 1 of each",
                         (long long)B, (long long)T, (long long)vocab);
    if (position < 0 || position > INT64_MAX / 2)
        return error_set(error, "the loader got data position %lld, expected 0 to %lld", (long long)position,
                         (long long)(INT64_MAX / 2));
    if (!set->count) return error_set(error, "the loader got no shard, expected at least one");
    const Shard *longest = &set->shards[0];
    for (size_t s = 1; s < set->count; s++)
        if (set->shards[s].count > longest->count) longest = &set->shards[s];
    if (longest->count <= T)
        return error_set(error, "%s: the longest of %zu shard%s has %lld token%s, expected at least %llu for one window of "
                         "%lld and its target", longest->path, set->count, set->count == 1 ? "" : "s",
                         (long long)longest->count, longest->count == 1 ? "" : "s", (unsigned long long)T + 1, (long long)T);
    return 0;
}

Loader *loader_open(const ShardSet *set, int64_t B, int64_t T, int64_t vocab, uint64_t seed, int64_t position, Error *error)
{
    if (check_request(set, B, T, vocab, position, error)) return NULL;
    Loader *loader = calloc(1, sizeof *loader);
    if (!loader) {
        error_set(error, "the loader has not enough memory");
        return NULL;
    }
    loader->set = set;
    loader->B = B;
    loader->T = T;
    loader->vocab = vocab;
    loader->seed = seed;
    loader->start = position;
    loader->windows = shards_windows(set, T);
    loader->shift_epoch = -1;
    pthread_mutex_init(&loader->lock, NULL);
    pthread_cond_init(&loader->changed, NULL);

    int fits = B <= INT64_MAX / 4 / T;
    size_t bytes = fits ? (size_t)B * (size_t)T * sizeof(int32_t) : 0;
    int enough = fits;
    for (int k = 0; k < 2 && fits; k++) {
        loader->inputs[k] = malloc(bytes);
        loader->targets[k] = malloc(bytes);
        enough = enough && loader->inputs[k] && loader->targets[k];
    }
    loader->window = fits ? malloc(((size_t)T + 1) * sizeof *loader->window) : NULL;
    loader->shift = calloc(set->count, sizeof *loader->shift);
    if (!enough || !loader->window || !loader->shift) {
        error_set(error, "the loader has not enough memory for two batches of %lld x %lld tokens", (long long)B,
                  (long long)T);
        loader_close(loader);
        return NULL;
    }
    if (start_thread(loader, error)) {
        loader_close(loader);
        return NULL;
    }
    return loader;
}

void loader_close(Loader *loader)
{
    if (!loader) return;
    if (loader->running) {
        pthread_mutex_lock(&loader->lock);
        loader->stop = 1;
        pthread_cond_broadcast(&loader->changed);
        pthread_mutex_unlock(&loader->lock);
        pthread_join(loader->thread, NULL);
    }
    pthread_cond_destroy(&loader->changed);
    pthread_mutex_destroy(&loader->lock);
    for (int k = 0; k < 2; k++) {
        free(loader->inputs[k]);
        free(loader->targets[k]);
    }
    free(loader->window);
    free(loader->shift);
    free(loader);
}

int loader_next(Loader *loader, const int32_t **inputs, const int32_t **targets, Error *error)
{
    pthread_mutex_lock(&loader->lock);
    loader->released = loader->taken;
    pthread_cond_broadcast(&loader->changed);
    while (loader->filled == loader->taken && !loader->failed) pthread_cond_wait(&loader->changed, &loader->lock);
    int ready = loader->filled > loader->taken;
    if (ready) {
        *inputs = loader->inputs[loader->taken % 2];
        *targets = loader->targets[loader->taken % 2];
        loader->taken++;
    } else {
        error_set(error, "%s", loader->error.text);
    }
    pthread_mutex_unlock(&loader->lock);
    return ready ? 0 : -1;
}

int64_t loader_position(const Loader *loader)
{
    return loader->start + loader->taken * loader->B;
}
