/* weights.c - a model's tensors, from and to safetensors files.
 *
 * Loading is done in two passes. Headers, names, shapes and values are checked before the first element of the model is
 * changed, so that after an error the model is what it was. The second pass then comes from the page cache.
 */
#include "data/weights.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/bf16.h"
#include "data/files.h"
#include "data/json.h"
#include "data/safetensors.h"

enum { SLAB_ELEMENTS = 2 << 20, STAGE_ELEMENTS = 256 << 10, NAME_BYTES = 64, SHARDS_MOST = 1024 };

const WeightsGroups weights_parameters = {1, {GPT_PARAMETERS}, {""}};
const WeightsGroups weights_moments = {2, {GPT_MOMENT1, GPT_MOMENT2}, {"m.", "v."}};

/* Where tensors pass through on their way between model and file. */
typedef struct Buffers {
    float *slab, *stage;
    int64_t slab_elements, stage_elements;
} Buffers;

/* One of the files. */
typedef struct Shard {
    char path[FILES_PATH];
    Safetensors *file;
} Shard;

struct Weights {
    const WeightsGroups *groups;
    Buffers buffers;
    Shard *shards;
    size_t shard_count;
    size_t count;                      /* tensors matched */
    const SafetensorsTensor **tensors; /* (groups, tensors of the model) */
    const Shard **places;              /* (groups, tensors of the model) where each of them is */
};

static int fail_memory(const char *path, Error *error) { return error_set(error, "%s: not enough memory for it", path); }

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

static int is_vector(const GptTensor *tensor) { return tensor->kind >= GPT_LN1_W; }

/* A tensor's shape and size in a file. */
static SafetensorsTensor file_tensor(const GptTensor *tensor, const char *name, const char *dtype)
{
    SafetensorsTensor out = {.name = name, .dtype = dtype};
    out.bytes = (size_t)(tensor->rows * tensor->columns) * (strcmp(dtype, "F32") ? 2 : 4);
    if (!is_vector(tensor)) out.shape[out.rank++] = tensor->transposed ? tensor->columns : tensor->rows;
    out.shape[out.rank++] = tensor->transposed ? tensor->rows : tensor->columns;
    return out;
}

/* Both buffers hold at least one row and one column of every tensor. buffers_close is due also where it fails. */
static int buffers_open(Buffers *buffers, const Gpt *gpt, const char *path, Error *error)
{
    *buffers = (Buffers){NULL, NULL, SLAB_ELEMENTS, STAGE_ELEMENTS};
    for (size_t i = 0; i < gpt_tensor_count(gpt); i++) {
        const GptTensor *tensor = gpt_tensor(gpt, i);
        int64_t side = tensor->transposed && tensor->rows > tensor->columns ? tensor->rows : tensor->columns;
        if (buffers->slab_elements < side) buffers->slab_elements = side;
        if (buffers->stage_elements < side) buffers->stage_elements = side;
    }
    buffers->slab = malloc((size_t)buffers->slab_elements * sizeof(float));
    buffers->stage = malloc((size_t)buffers->stage_elements * sizeof(float));
    if (buffers->slab && buffers->stage) return 0;
    return fail_memory(path, error);
}

static void buffers_close(Buffers *buffers)
{
    free(buffers->slab);
    free(buffers->stage);
}

/* out[c, r] = in[r, c]: in (rows, columns) with row stride in_stride, out with out_stride. In tiles of 16 by 16, so that
 * each cache line of both is used up while it is there. */
static void transpose(float *out, int64_t out_stride, const float *in, int64_t in_stride, int64_t rows, int64_t columns)
{
    enum { TILE = 16 };
    for (int64_t r0 = 0; r0 < rows; r0 += TILE)
        for (int64_t c0 = 0; c0 < columns; c0 += TILE)
            for (int64_t c = c0; c < c0 + TILE && c < columns; c++)
                for (int64_t r = r0; r < r0 + TILE && r < rows; r++) out[c * out_stride + r] = in[r * in_stride + c];
}

/* --------------------------------------------------------------------------------------------------------------- opening */

static void print_shape(char *text, size_t size, const SafetensorsTensor *tensor)
{
    size_t at = (size_t)snprintf(text, size, "[");
    for (int i = 0; i < tensor->rank && at < size; i++)
        at += (size_t)snprintf(text + at, size - at, "%s%" PRId64, i ? ", " : "", tensor->shape[i]);
    if (at < size) snprintf(text + at, size - at, "]");
}

/* A causal mask, which old files carry: [transformer.]h.N.attn.bias or .masked_bias. */
static int is_mask(const char *name)
{
    int end = 0;
    if (!strncmp(name, "transformer.", 12)) name += 12;
    if (sscanf(name, "h.%*[0-9].attn.%n", &end) == EOF || end == 0) return 0;
    return !strcmp(name + end, "bias") || !strcmp(name + end, "masked_bias");
}

/* Whether two tensors have one dtype and the same bytes. */
static int is_equal(const SafetensorsTensor *a, const SafetensorsTensor *b)
{
    const size_t piece = 1 << 20;
    int equal = !strcmp(a->dtype, b->dtype) && a->bytes == b->bytes;
    for (size_t at = 0; equal && at < a->bytes; at += piece) {
        equal = !memcmp(a->data + at, b->data + at, a->bytes - at < piece ? a->bytes - at : piece);
        safetensors_release(a);
        safetensors_release(b);
    }
    return equal;
}

void weights_close(Weights *weights)
{
    if (!weights) return;
    for (size_t i = 0; i < weights->shard_count; i++) safetensors_close(weights->shards[i].file);
    buffers_close(&weights->buffers);
    free(weights->shards);
    free(weights->tensors);
    free(weights->places);
    free(weights);
}

/* Opens DIR/NAME as the next shard, unless it is open. */
static int shard_add(Weights *weights, const char *dir, const char *name, const char *index, Error *error)
{
    char path[FILES_PATH];
    if (!*name || strchr(name, '/'))
        return error_set(error, "%s: weight_map names \"%.200s\", the name of a file beside it is expected", index, name);
    if (files_join(path, dir, name, error)) return -1;
    for (size_t i = 0; i < weights->shard_count; i++)
        if (!strcmp(weights->shards[i].path, path)) return 0;
    if (weights->shard_count == SHARDS_MOST)
        return error_set(error, "%s: weight_map names more than %d files", index, SHARDS_MOST);
    Shard *shard = &weights->shards[weights->shard_count];
    memcpy(shard->path, path, sizeof path);
    shard->file = safetensors_open(path, error);
    if (!shard->file) return -1;
    weights->shard_count++;
    return 0;
}

/* The tensor of this name in any of the files, *place gets which; NULL where there is none. */
static const SafetensorsTensor *find_tensor(const Weights *weights, const char *name, const Shard **place)
{
    const SafetensorsTensor *found = NULL;
    *place = NULL;
    for (size_t i = 0; i < weights->shard_count && !found; i++) {
        found = safetensors_find(weights->shards[i].file, name);
        *place = &weights->shards[i];
    }
    return found;
}

/* Opens the files that an index names, and holds what they have against it. */
static int open_shards(Weights *weights, const char *path, const JsonValue *root, Error *error)
{
    const JsonValue *map = json_member(root, "weight_map");
    char dir[FILES_PATH] = ".";
    const char *slash = strrchr(path, '/');
    const Shard *place;
    if (slash && (size_t)(slash - path) < sizeof dir) snprintf(dir, sizeof dir, "%.*s", (int)(slash - path), path);
    if (!map || map->kind != JSON_OBJECT || !map->length)
        return error_set(error, "%s: \"weight_map\" is no object that names files", path);
    for (const JsonValue *entry = map->child; entry; entry = entry->next) {
        if (entry->kind != JSON_STRING)
            return error_set(error, "%s: weight_map: \"%.200s\" has no name of a file", path, entry->key);
        if (shard_add(weights, dir, entry->text, path, error)) return -1;
    }
    for (size_t i = 0; i < weights->shard_count; i++)
        for (size_t k = 0; k < safetensors_count(weights->shards[i].file); k++) {
            const char *name = safetensors_at(weights->shards[i].file, k)->name;
            find_tensor(weights, name, &place);
            if (place != &weights->shards[i])
                return error_set(error, "%s: the tensor \"%.200s\" is also in %s", weights->shards[i].path, name,
                                 place->path);
        }
    for (const JsonValue *entry = map->child; entry; entry = entry->next) {
        char expected[FILES_PATH];
        if (files_join(expected, dir, entry->text, error)) return -1;
        if (!find_tensor(weights, entry->key, &place) || strcmp(place->path, expected))
            return error_set(error, "%s: the tensor \"%.200s\", which %s places there, is missing", expected, entry->key,
                             path);
    }
    return 0;
}

/* Opens the file, or the files where it is an index. */
static int open_files(Weights *weights, const char *path, Error *error)
{
    static const char ending[] = ".index.json";
    size_t length = strlen(path);
    int is_index = length >= sizeof ending && !strcmp(path + length - sizeof ending + 1, ending), result;
    weights->shards = calloc(is_index ? SHARDS_MOST : 1, sizeof *weights->shards);
    if (!weights->shards) return fail_memory(path, error);
    if (!is_index) {
        if (length >= FILES_PATH)
            return error_set(error, "%.200s...: the path is longer than %d bytes", path, FILES_PATH - 1);
        memcpy(weights->shards[0].path, path, length + 1);
        weights->shards[0].file = safetensors_open(path, error);
        weights->shard_count = weights->shards[0].file != NULL;
        return weights->shard_count ? 0 : -1;
    }
    JsonDocument *document = json_read(path, error);
    if (!document) return -1;
    result = open_shards(weights, path, json_root(document), error);
    json_free(document);
    return result;
}

/* Finds the counterpart of a tensor, called PREFIX + its name, with or without "transformer.", as number k. */
static int match_tensor(Weights *weights, size_t k, const GptTensor *tensor, const char *prefix, const char *path,
                        Error *error)
{
    static const char optional[] = "transformer.";
    char name[NAME_BYTES], got[256], wanted[64];
    const SafetensorsTensor *found;
    SafetensorsTensor expected = file_tensor(tensor, NULL, "F32");
    const Shard *place;
    snprintf(name, sizeof name, "%s%s", prefix, tensor->name);
    found = find_tensor(weights, name, &place);
    if (!found && !strncmp(tensor->name, optional, strlen(optional))) {
        snprintf(name, sizeof name, "%s%s", prefix, tensor->name + strlen(optional));
        found = find_tensor(weights, name, &place);
    }
    if (!found) return error_set(error, "%s: the tensor \"%s%s\" is missing", path, prefix, tensor->name);
    if (strcmp(found->dtype, "F32") && strcmp(found->dtype, "F16") && strcmp(found->dtype, "BF16"))
        return error_set(error, "%s: the tensor \"%s\" has dtype %s; F32, F16 or BF16 is expected", place->path, name,
                         found->dtype);
    if (found->rank != expected.rank || memcmp(found->shape, expected.shape, (size_t)found->rank * sizeof found->shape[0])) {
        print_shape(got, sizeof got, found);
        print_shape(wanted, sizeof wanted, &expected);
        return error_set(error, "%s: the tensor \"%s\" has shape %s, the model needs %s", place->path, name, got, wanted);
    }
    weights->tensors[k] = found;
    weights->places[k] = place;
    return 0;
}

/* Fails on a tensor that the model has no use for: not matched, no mask, no copy of wte. */
static int check_surplus(const Weights *weights, const Shard *shard, Error *error)
{
    for (size_t i = 0; i < safetensors_count(shard->file); i++) {
        const SafetensorsTensor *tensor = safetensors_at(shard->file, i), *wte = weights->tensors[0];
        size_t k = 0;
        while (k < weights->count && weights->tensors[k] != tensor) k++;
        if (k < weights->count || is_mask(tensor->name)) continue;
        if (weights->groups->count > 1 || strcmp(tensor->name, "lm_head.weight"))
            return error_set(error, "%s: the tensor \"%.200s\" is none of the model's %zu", shard->path, tensor->name,
                             weights->count);
        if (!is_equal(tensor, wte))
            return error_set(error, "%s: \"lm_head.weight\" differs from \"%s\": the model uses one tensor for both",
                             shard->path, wte->name);
    }
    return 0;
}

/* Whether an element can be one of a parameter or first moment, or of a second moment, which is a mean of squares. */
static int is_plausible(float x, int square) { return isfinite(x) && (!square || x >= 0); }

static int check_values(const Weights *weights, size_t k, int square, Error *error)
{
    const Buffers *buffers = &weights->buffers;
    const SafetensorsTensor *tensor = weights->tensors[k];
    int64_t total = 1, width = tensor->shape[tensor->rank - 1];
    char where[64];
    for (int i = 0; i < tensor->rank; i++) total *= tensor->shape[i];
    for (int64_t first = 0; first < total; first += buffers->stage_elements) {
        int64_t n = smaller(buffers->stage_elements, total - first);
        int bad = 0;
        safetensors_to_fp32(buffers->stage, tensor, first, n, NULL);
        safetensors_release(tensor);
        for (int64_t i = 0; i < n; i++) bad |= !is_plausible(buffers->stage[i], square);
        for (int64_t i = 0; bad; i++) {
            if (is_plausible(buffers->stage[i], square)) continue;
            if (tensor->rank == 1) snprintf(where, sizeof where, "[%" PRId64 "]", first + i);
            else snprintf(where, sizeof where, "[%" PRId64 ", %" PRId64 "]", (first + i) / width, (first + i) % width);
            return error_set(error, "%s: the tensor \"%s\" has %g at %s, a finite number%s is expected",
                             weights->places[k]->path, tensor->name, (double)buffers->stage[i], where,
                             square ? " of at least 0" : "");
        }
    }
    return 0;
}

/* Matches and checks everything. */
static int check_files(Weights *weights, const char *path, const Gpt *gpt, Error *error)
{
    const WeightsGroups *groups = weights->groups;
    size_t each = gpt_tensor_count(gpt), all = groups->count * each;
    weights->tensors = calloc(all, sizeof *weights->tensors);
    weights->places = calloc(all, sizeof *weights->places);
    if (!weights->tensors || !weights->places) return fail_memory(path, error);
    for (size_t k = 0; k < all; k++, weights->count++)
        if (match_tensor(weights, k, gpt_tensor(gpt, k % each), groups->prefixes[k / each], path, error)) return -1;
    for (size_t i = 0; i < weights->shard_count; i++)
        if (check_surplus(weights, &weights->shards[i], error)) return -1;
    for (size_t k = 0; k < all; k++)
        if (check_values(weights, k, groups->buffers[k / each] == GPT_MOMENT2, error)) return -1;
    return 0;
}

Weights *weights_open(const char *path, const Gpt *gpt, const WeightsGroups *groups, Error *error)
{
    Weights *weights = calloc(1, sizeof *weights);
    if (!weights) {
        fail_memory(path, error);
        return NULL;
    }
    weights->groups = groups;
    if (!buffers_open(&weights->buffers, gpt, path, error) && !open_files(weights, path, error) &&
        !check_files(weights, path, gpt, error))
        return weights;
    weights_close(weights);
    return NULL;
}

/* --------------------------------------------------------------------------------------------------------------- reading */

/* Fills tensor i from its counterpart in a file, whose dtype and shape have been checked: that cannot fail. */
static void read_tensor(Gpt *gpt, GptBuffer to, size_t i, const SafetensorsTensor *source,
                        const Buffers *buffers)
{
    const GptTensor *tensor = gpt_tensor(gpt, i);
    int64_t rows = tensor->rows, columns = tensor->columns;
    int64_t block = smaller(buffers->slab_elements / columns, buffers->stage_elements);
    for (int64_t row = 0; row < rows; row += block) {
        int64_t n = smaller(block, rows - row), batch = buffers->stage_elements / n;
        if (!tensor->transposed) safetensors_to_fp32(buffers->slab, source, row * columns, n * columns, NULL);
        for (int64_t column = 0; tensor->transposed && column < columns; column += batch) {
            int64_t width = smaller(batch, columns - column);
            for (int64_t c = 0; c < width; c++)
                safetensors_to_fp32(buffers->stage + c * n, source, (column + c) * rows + row, n, NULL);
            transpose(buffers->slab + column, columns, buffers->stage, n, width, n);
        }
        gpt_write(gpt, to, i, row, n, buffers->slab);
        safetensors_release(source);
    }
}

void weights_read(const Weights *weights, Gpt *gpt)
{
    size_t each = gpt_tensor_count(gpt);
    for (size_t k = 0; k < weights->count; k++)
        read_tensor(gpt, weights->groups->buffers[k / each], k % each, weights->tensors[k], &weights->buffers);
}

/* ---------------------------------------------------------------------------------------------------------------- saving */

/* A file in the making. */
typedef struct Output {
    SafetensorsWriter *writer;
    Buffers buffers;
    int narrow; /* 1: elements are bf16 */
} Output;

/* Writes the first n elements of the slab, which is not what it was afterwards. */
static int write_slab(Output *output, const GptTensor *tensor, int64_t n, const char *path, Error *error)
{
    int64_t bad = output->narrow ? bf16_narrow(output->buffers.slab, output->buffers.slab, n) : -1;
    if (bad >= 0) return error_set(error, "%s: the tensor \"%s\" has a value that bf16 cannot hold", path, tensor->name);
    return safetensors_write(output->writer, output->buffers.slab, (size_t)n * (output->narrow ? 2 : 4), error);
}

/* Writes tensor i row by row, many at a time. */
static int write_rows(Output *output, const Gpt *gpt, GptBuffer from, size_t i, const char *path, Error *error)
{
    const GptTensor *tensor = gpt_tensor(gpt, i);
    int64_t block = output->buffers.slab_elements / tensor->columns;
    for (int64_t row = 0; row < tensor->rows; row += block) {
        int64_t n = smaller(block, tensor->rows - row);
        gpt_read(gpt, from, i, row, n, output->buffers.slab);
        if (write_slab(output, tensor, n * tensor->columns, path, error)) return -1;
    }
    return 0;
}

/* Writes tensor i column by column: the slab takes as many columns as it holds, which reads the tensor once. */
static int write_columns(Output *output, const Gpt *gpt, GptBuffer from, size_t i, const char *path, Error *error)
{
    const GptTensor *tensor = gpt_tensor(gpt, i);
    const Buffers *buffers = &output->buffers;
    int64_t rows = tensor->rows, columns = tensor->columns;
    int64_t slab = buffers->slab_elements / rows, block = buffers->stage_elements / columns;
    for (int64_t column = 0; column < columns; column += slab) {
        int64_t width = smaller(slab, columns - column);
        for (int64_t row = 0; row < rows; row += block) {
            int64_t n = smaller(block, rows - row);
            gpt_read(gpt, from, i, row, n, buffers->stage);
            transpose(buffers->slab + row, rows, buffers->stage + column, columns, n, width);
        }
        if (write_slab(output, tensor, width * rows, path, error)) return -1;
    }
    return 0;
}

int weights_write(const char *path, const Gpt *gpt, const WeightsGroups *groups, const char *dtype, Error *error)
{
    static const char *const metadata[] = {"format", "pt", NULL};
    size_t each = gpt_tensor_count(gpt), all = groups->count * each;
    SafetensorsTensor *tensors = calloc(all, sizeof *tensors);
    char (*names)[NAME_BYTES] = calloc(all, sizeof *names);
    Output output = {.narrow = strcmp(dtype, "F32") != 0};
    int result = -1;
    if (!tensors || !names) {
        fail_memory(path, error);
    } else if (!buffers_open(&output.buffers, gpt, path, error)) {
        for (size_t k = 0; k < all; k++) {
            const GptTensor *tensor = gpt_tensor(gpt, k % each);
            snprintf(names[k], sizeof names[k], "%s%s", groups->prefixes[k / each], tensor->name);
            tensors[k] = file_tensor(tensor, names[k], dtype);
        }
        output.writer = safetensors_create(path, tensors, all, metadata, error);
        result = output.writer ? 0 : -1;
    }
    for (size_t k = 0; k < all && !result; k++) {
        int transposed = gpt_tensor(gpt, k % each)->transposed;
        result = (transposed ? write_columns : write_rows)(&output, gpt, groups->buffers[k / each], k % each, path, error);
    }
    if (!result) result = safetensors_finish(output.writer, error);
    else safetensors_abandon(output.writer);
    buffers_close(&output.buffers);
    free(tensors);
    free(names);
    return result;
}
