/* model_files.h - what tests of files with models share: a directory of their own, small models, and a word that tells two
 * models apart. */
#ifndef MODEL_FILES_H
#define MODEL_FILES_H

#include <dirent.h>
#include <ftw.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "data/random.h"
#include "layers/cpu.h"
#include "layers/gpt.h"

#define HELPER __attribute__((unused)) static /* not every test uses each of them */

enum { BUFFERS = 3 };

static const GptBuffer buffers[BUFFERS] = {GPT_PARAMETERS, GPT_MOMENT1, GPT_MOMENT2};

static char root[] = "/tmp/flashgpt_test_XXXXXX"; /* directories_open makes it */
static Stream *stream;

/* DIR/NAME in one of a few static buffers, for use at once. */
HELPER const char *in(const char *dir, const char *name)
{
    static char paths[8][2048];
    static int turn;
    turn = (turn + 1) % 8;
    snprintf(paths[turn], sizeof paths[turn], "%s/%s", dir, name);
    return paths[turn];
}

/* root/NAME, good until the end. */
HELPER const char *under_root(const char *name)
{
    static char paths[32][128];
    static int count;
    int i = 0;
    while (i < count && strcmp(paths[i] + strlen(root) + 1, name)) i++;
    if (i < count) return paths[i];
    snprintf(paths[count], sizeof paths[count], "%s/%s", root, name);
    return paths[count++];
}

HELPER int remove_one(const char *path, const struct stat *status, int type, struct FTW *where)
{
    (void)status;
    (void)type;
    (void)where;
    return remove(path);
}

HELPER void remove_all(const char *path) { nftw(path, remove_one, 16, FTW_DEPTH | FTW_PHYS); }

/* An empty directory under root. */
HELPER const char *fresh(const char *name)
{
    const char *path = under_root(name);
    remove_all(path);
    mkdir(path, 0777);
    return path;
}

/* Names in a directory, sorted and each followed by a space. */
HELPER const char *list(const char *dir)
{
    static char text[1024];
    struct dirent **entries;
    int n = scandir(dir, &entries, NULL, alphasort);
    text[0] = 0;
    for (int i = 0; i < n; i++) {
        if (strcmp(entries[i]->d_name, ".") && strcmp(entries[i]->d_name, ".."))
            snprintf(text + strlen(text), sizeof text - strlen(text), "%s ", entries[i]->d_name);
        free(entries[i]);
    }
    if (n >= 0) free(entries);
    return text;
}

HELPER void put_text(const char *path, const char *text)
{
    FILE *file = fopen(path, "wb");
    fputs(text, file);
    fclose(file);
}

HELPER Gpt *model_open(const GptConfig *config)
{
    GptOptions options = {.batch = 1, .sequence = config->context, .training = 1};
    AttentionShape shape = {.B = 1, .T = config->context, .NH = config->heads, .HS = config->channels / config->heads};
    char error[1024] = "";
    const AttentionKernel *kernel = attention_choose("reference", ATTENTION_CPU, &shape, 0, error, sizeof error);
    Gpt *gpt = kernel ? gpt_create(config, &options, &backend_cpu_fp32, stream, kernel, error, sizeof error) : NULL;
    if (!gpt) printf("cannot make a model: %s\n", error);
    return gpt;
}

/* Fills parameters and moments with noise of every magnitude. */
HELPER void model_fill(Gpt *gpt, uint64_t seed)
{
    for (int b = 0; b < BUFFERS; b++)
        for (size_t i = 0; i < gpt_tensor_count(gpt); i++) {
            int64_t n = gpt_tensor(gpt, i)->rows * gpt_tensor(gpt, i)->columns;
            float *values = malloc((size_t)n * sizeof *values);
            for (int64_t k = 0; k < n; k++) {
                uint64_t bits = random_u64(&seed);
                values[k] = ldexpf((float)((int64_t)(bits >> 40) - (1 << 23)), (int)(bits % 200) - 150);
                if (b == 2) values[k] = fabsf(values[k]);
            }
            gpt_write(gpt, buffers[b], i, 0, gpt_tensor(gpt, i)->rows, values);
            free(values);
        }
}

/* A word that depends on every bit of parameters and moments. */
HELPER uint64_t model_hash(const Gpt *gpt)
{
    uint64_t hash = 0;
    for (int b = 0; b < BUFFERS; b++)
        for (size_t i = 0; i < gpt_tensor_count(gpt); i++) {
            int64_t n = gpt_tensor(gpt, i)->rows * gpt_tensor(gpt, i)->columns;
            uint32_t *words = malloc((size_t)n * sizeof *words);
            gpt_read(gpt, buffers[b], i, 0, gpt_tensor(gpt, i)->rows, (float *)words);
            for (int64_t k = 0; k < n; k++) hash = random_mix(hash ^ words[k]);
            free(words);
        }
    return hash;
}

/* Makes root and opens the CPU. Returns 0, or -1 where that is not possible. */
HELPER int directories_open(void)
{
    char error[1024] = "";
    BackendOptions choice = {0};
    if (!mkdtemp(root)) return -1;
    stream = backend_cpu_fp32.open(0, &choice, error, sizeof error);
    return stream ? 0 : -1;
}

HELPER void directories_close(void)
{
    backend_cpu_fp32.close(stream);
    remove_all(root);
}

#endif
