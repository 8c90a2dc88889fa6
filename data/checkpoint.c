/* checkpoint.c - a model and all that continues its training, as a directory.
 *
 * Saving. Everything is written under DIR/.tmp.step_NNNNNNNN.PID and fsynced, file by file and then the directory; one
 * rename gives it its name, and an fsync of DIR makes the name last. A process killed before the rename leaves a temporary
 * that no reader looks at and the next prune removes; one killed after it leaves a whole checkpoint. Removal goes the same
 * way backwards: rename first, then unlink.
 *
 * Layout. Hugging Face's GPT-2 keeps its linear weights as Conv1D does, inputs by outputs: the transpose of what a product
 * x W^T wants. Both ways the transpose passes through a slab of some megabytes, so memory does not grow with the model; a
 * weight larger than the slab is read once for each slab it fills.
 *
 * Loading. Headers, names, shapes and values of every file are checked before the first element of the model is changed:
 * after an error the model is what it was. The second reading then comes from the page cache.
 */
#include "data/checkpoint.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "data/json.h"
#include "data/safetensors.h"

enum { PATH_BYTES = 4096, STEP_BYTES = 32, SLAB_ELEMENTS = 2 << 20, STAGE_ELEMENTS = 256 << 10 };

/* Temporaries of saving and of removing both begin with this. */
#define TEMPORARY ".tmp.step_"

/* Where tensors pass through on their way between model and file. */
typedef struct Buffers {
    float *slab, *stage;
    int64_t slab_elements, stage_elements;
} Buffers;

/* A file of tensors, matched with those of a model. */
typedef struct Source {
    const char *path;
    Safetensors *file;
    size_t count;                      /* tensors matched */
    const SafetensorsTensor **tensors; /* (groups, tensors of the model) */
} Source;

static int fail_memory(const char *path, Error *error) { return error_set(error, "%s: not enough memory for it", path); }

/* ------------------------------------------------------------------------------------------------ paths and directories */

/* out = DIR/NAME. */
static int join_path(char out[PATH_BYTES], const char *dir, const char *name, Error *error)
{
    if (snprintf(out, PATH_BYTES, "%s/%s", dir, name) < PATH_BYTES) return 0;
    return error_set(error, "%.200s.../%s: the path is longer than %d bytes", dir, name, PATH_BYTES - 1);
}

static void step_name(char name[STEP_BYTES], int64_t step) { snprintf(name, STEP_BYTES, "step_%08" PRId64, step); }

/* The step in a directory's name, or -1 where step_name would not have written it so. */
static int64_t step_of_name(const char *name)
{
    char again[STEP_BYTES];
    int64_t step;
    if (strncmp(name, "step_", 5)) return -1;
    step = strtoll(name + 5, NULL, 10);
    step_name(again, step);
    return step >= 0 && !strcmp(again, name) ? step : -1;
}

static int is_directory(const char *path)
{
    struct stat status;
    return !stat(path, &status) && S_ISDIR(status.st_mode);
}

static int sync_directory(const char *path, Error *error)
{
    int directory = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC), fault;
    if (directory < 0) return error_set(error, "%s: cannot open it: %s", path, strerror(errno));
    fault = fsync(directory) ? errno : 0;
    close(directory);
    return fault ? error_set(error, "%s: cannot fsync it: %s", path, strerror(fault)) : 0;
}

static int remove_entry(const char *path, const struct stat *status, int type, struct FTW *position)
{
    (void)status;
    (void)type;
    (void)position;
    return remove(path);
}

static int remove_tree(const char *path, Error *error)
{
    if (!nftw(path, remove_entry, 16, FTW_DEPTH | FTW_PHYS) || errno == ENOENT) return 0;
    return error_set(error, "%s: cannot remove it: %s", path, strerror(errno));
}

/* Takes DIR/NAME its final name, for good, then removes what it held. */
static int remove_checkpoint(const char *dir, const char *name, Error *error)
{
    char path[PATH_BYTES], temporary[PATH_BYTES], hidden[2 * STEP_BYTES];
    snprintf(hidden, sizeof hidden, ".tmp.%.*s.removed", STEP_BYTES, name);
    if (join_path(path, dir, name, error) || join_path(temporary, dir, hidden, error) || remove_tree(temporary, error))
        return -1;
    if (rename(path, temporary)) return error_set(error, "%s: cannot rename it to remove it: %s", path, strerror(errno));
    return sync_directory(dir, error) || remove_tree(temporary, error) ? -1 : 0;
}

/* Names in a directory. */
typedef struct Names {
    char **names;
    size_t count;
} Names;

static void names_free(Names *list)
{
    for (size_t i = 0; i < list->count; i++) free(list->names[i]);
    free(list->names);
    *list = (Names){0};
}

/* Higher steps first; what is no step comes last. */
static int compare_steps(const void *a, const void *b)
{
    int64_t x = step_of_name(*(char *const *)a), y = step_of_name(*(char *const *)b);
    return x < y ? 1 : x > y ? -1 : 0;
}

/* Lists the checkpoints of DIR, newest first, or (temporaries != 0) what was left of unfinished ones. */
static int names_list(Names *list, const char *dir, int temporaries, Error *error)
{
    DIR *directory = opendir(dir);
    struct dirent *entry;
    *list = (Names){0};
    if (!directory) return error_set(error, "%s: cannot list it: %s", dir, strerror(errno));
    while (errno = 0, (entry = readdir(directory))) {
        const char *name = entry->d_name;
        char **grown;
        if (temporaries ? strncmp(name, TEMPORARY, strlen(TEMPORARY)) != 0 : step_of_name(name) < 0) continue;
        grown = realloc(list->names, (list->count + 1) * sizeof *grown);
        if (grown) list->names = grown;
        if (!grown || !(grown[list->count] = strdup(name))) { errno = ENOMEM; break; }
        list->count++;
    }
    if (errno) {
        error_set(error, "%s: cannot list it: %s", dir, strerror(errno));
        closedir(directory);
        names_free(list);
        return -1;
    }
    closedir(directory);
    if (list->count) qsort(list->names, list->count, sizeof *list->names, compare_steps);
    return 0;
}

/* ----------------------------------------------------------------------------------------------------- JSON of the files */

/* An integer member of at least `least`. */
static int read_integer(const JsonValue *object, const char *key, const char *path, int64_t least, int64_t *out,
                        Error *error)
{
    const JsonValue *value = json_member(object, key);
    if (!value) return error_set(error, "%s: \"%s\" is missing", path, key);
    if (!json_integer(value, out) || *out < least)
        return error_set(error, "%s: \"%s\" is %.40s, an integer of at least %" PRId64 " is expected", path, key,
                         value->kind == JSON_NUMBER ? value->text : "no number", least);
    return 0;
}

/* A member that is a string of decimal digits below 2^64. */
static int read_word(const JsonValue *object, const char *key, const char *path, uint64_t *out, Error *error)
{
    const JsonValue *value = json_member(object, key);
    const char *c = value && value->kind == JSON_STRING ? value->text : "";
    int good = *c != 0 && strlen(c) == value->length;
    for (*out = 0; good && *c; c++)
        good = *c >= '0' && *c <= '9' && !__builtin_mul_overflow(*out, (uint64_t)10, out) &&
               !__builtin_add_overflow(*out, (uint64_t)(*c - '0'), out);
    return good ? 0 : error_set(error, "%s: \"%s\" is no string of digits below 2^64", path, key);
}

static int read_state(const char *dir, CheckpointState *state, Error *error)
{
    char path[PATH_BYTES];
    const JsonValue *root, *loss, *seconds;
    JsonDocument *document;
    int result = -1;
    if (join_path(path, dir, "state.json", error)) return -1;
    document = json_read(path, error);
    if (!document) return -1;
    root = json_root(document);
    loss = json_member(root, "validation_loss");
    seconds = json_member(root, "seconds");
    if (read_integer(root, "step", path, 0, &state->step, error) ||
        read_integer(root, "data_position", path, 0, &state->data_position, error) ||
        read_word(root, "seed", path, &state->seed, error) ||
        read_word(root, "data_fingerprint", path, &state->data_fingerprint, error)) {
        result = -1;
    } else if (!loss || (loss->kind != JSON_NUMBER && loss->kind != JSON_NULL)) {
        error_set(error, "%s: \"validation_loss\" is neither a number nor null", path);
    } else if (!seconds || seconds->kind != JSON_NUMBER || seconds->number < 0) {
        error_set(error, "%s: \"seconds\" is no number from 0 on", path);
    } else {
        state->validation_loss = loss->kind == JSON_NUMBER ? loss->number : NAN;
        state->seconds = seconds->number;
        result = 0;
    }
    json_free(document);
    return result;
}

/* Fails unless the boolean `key` is `wanted` or absent. */
static int require_boolean(const JsonValue *root, const char *key, const char *path, int wanted, Error *error)
{
    const JsonValue *value = json_member(root, key);
    if (!value || value->kind == (wanted ? JSON_TRUE : JSON_FALSE)) return 0;
    return error_set(error, "%s: \"%s\" must be %s: this trainer computes GPT-2 as published", path, key,
                     wanted ? "true" : "false");
}

/* Fails where config.json describes a model that is not GPT-2 as published. */
static int check_architecture(const JsonValue *root, const char *path, const GptConfig *config, Error *error)
{
    const JsonValue *type = json_member(root, "model_type"), *activation = json_member(root, "activation_function");
    const JsonValue *epsilon = json_member(root, "layer_norm_epsilon"), *inner = json_member(root, "n_inner");
    int64_t width;
    if (!type || type->kind != JSON_STRING || strcmp(type->text, "gpt2"))
        return error_set(error, "%s: \"model_type\" is \"%.40s\", \"gpt2\" is expected", path,
                         type && type->kind == JSON_STRING ? type->text : "(no string)");
    if (activation && (activation->kind != JSON_STRING ||
                       (strcmp(activation->text, "gelu_new") && strcmp(activation->text, "gelu_pytorch_tanh"))))
        return error_set(error, "%s: \"activation_function\" is \"%.40s\", \"gelu_new\" or \"gelu_pytorch_tanh\" is "
                         "expected", path, activation->kind == JSON_STRING ? activation->text : "(no string)");
    if (epsilon && (epsilon->kind != JSON_NUMBER || fabs(epsilon->number - 1e-5) > 1e-12))
        return error_set(error, "%s: \"layer_norm_epsilon\" is %.40s, 1e-05 is expected", path,
                         epsilon->kind == JSON_NUMBER ? epsilon->text : "no number");
    if (inner && inner->kind != JSON_NULL && (!json_integer(inner, &width) || width != 4 * config->channels))
        return error_set(error, "%s: \"n_inner\" is %.40s, null or %" PRId64 " (4 times n_embd) is expected", path,
                         inner->kind == JSON_NUMBER ? inner->text : "no number", 4 * config->channels);
    return require_boolean(root, "scale_attn_weights", path, 1, error) ||
           require_boolean(root, "scale_attn_by_inverse_layer_idx", path, 0, error) ||
           require_boolean(root, "tie_word_embeddings", path, 1, error) ||
           require_boolean(root, "add_cross_attention", path, 0, error) ? -1 : 0;
}

/* Reads the five sizes, each below 2^31. */
static int read_shape(const JsonValue *root, const char *path, GptConfig *config, Error *error)
{
    const struct { const char *key; int64_t *to; } sizes[] = {
        {"n_layer", &config->layers}, {"n_head", &config->heads}, {"n_embd", &config->channels},
        {"n_positions", &config->context}, {"vocab_size", &config->vocab},
    };
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        if (read_integer(root, sizes[i].key, path, 1, sizes[i].to, error)) return -1;
        if (*sizes[i].to > INT32_MAX)
            return error_set(error, "%s: \"%s\" is %" PRId64 ", at most %d is expected", path, sizes[i].key, *sizes[i].to,
                             INT32_MAX);
    }
    return 0;
}

int checkpoint_config(const char *path, GptConfig *config, Error *error)
{
    char file[PATH_BYTES], fault[512];
    const char *slash = strrchr(path, '/'), *sentence;
    JsonDocument *document;
    GptConfig read = {0};
    int result;
    if (is_directory(path)) {
        if (join_path(file, path, "config.json", error)) return -1;
    } else if (snprintf(file, sizeof file, "%.*sconfig.json", slash ? (int)(slash - path + 1) : 0, path) >= PATH_BYTES) {
        return error_set(error, "%.200s...: the path is longer than %d bytes", path, PATH_BYTES - 1);
    }
    document = json_read(file, error);
    if (!document) return -1;
    result = json_root(document)->kind == JSON_OBJECT ? 0 : error_set(error, "%s holds no JSON object", file);
    if (!result) result = read_shape(json_root(document), file, &read, error);
    if (!result) result = check_architecture(json_root(document), file, &read, error);
    json_free(document);
    if (result) return -1;
    sentence = gpt_config_fault(&read, fault, sizeof fault);
    if (sentence) return error_set(error, "%s: %s", file, sentence);
    *config = read;
    return 0;
}

/* -------------------------------------------------------------------------------------------------------------- tensors */

/* What model.safetensors and optimizer.safetensors hold, and how names there begin. */
static const GptBuffer parameters[] = {GPT_PARAMETERS}, moments[] = {GPT_MOMENT1, GPT_MOMENT2};
static const char *const parameter_prefix[] = {""}, *const moment_prefixes[] = {"m.", "v."};

static int is_vector(const GptTensor *tensor) { return tensor->kind >= GPT_LN1_W; }

/* A tensor's dtype, shape and size in a file. */
static SafetensorsTensor file_tensor(const GptTensor *tensor, const char *name)
{
    SafetensorsTensor out = {.name = name, .dtype = "F32", .bytes = (size_t)(tensor->rows * tensor->columns) * 4};
    if (!is_vector(tensor)) out.shape[out.rank++] = tensor->transposed ? tensor->columns : tensor->rows;
    out.shape[out.rank++] = tensor->transposed ? tensor->rows : tensor->columns;
    return out;
}

/* Both buffers hold at least one row and one column of every tensor. */
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
    free(buffers->slab);
    free(buffers->stage);
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

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* -------------------------------------------------------------------------------------------------------------- loading */

/* Fills tensor i from its counterpart in a file, whose dtype and shape have been checked: that cannot fail. */
static void read_tensor(Gpt *gpt, GptBuffer to, size_t i, const SafetensorsTensor *source, Buffers *buffers)
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

static void source_close(Source *source)
{
    safetensors_close(source->file);
    free(source->tensors);
    *source = (Source){0};
}

static void print_shape(char *text, size_t size, const SafetensorsTensor *tensor)
{
    size_t at = (size_t)snprintf(text, size, "[");
    for (int i = 0; i < tensor->rank && at < size; i++)
        at += (size_t)snprintf(text + at, size - at, "%s%" PRId64, i ? ", " : "", tensor->shape[i]);
    if (at < size) snprintf(text + at, size - at, "]");
}

/* Finds the counterpart of a tensor, called PREFIX + its name, with or without "transformer.". */
static const SafetensorsTensor *match_tensor(const Source *source, const GptTensor *tensor, const char *prefix, Error *error)
{
    static const char optional[] = "transformer.";
    char name[64], got[256], wanted[64];
    const SafetensorsTensor *found;
    SafetensorsTensor expected = file_tensor(tensor, NULL);
    snprintf(name, sizeof name, "%s%s", prefix, tensor->name);
    found = safetensors_find(source->file, name);
    if (!found && !strncmp(tensor->name, optional, strlen(optional))) {
        snprintf(name, sizeof name, "%s%s", prefix, tensor->name + strlen(optional));
        found = safetensors_find(source->file, name);
    }
    if (!found) {
        error_set(error, "%s: the tensor \"%s%s\" is missing", source->path, prefix, tensor->name);
        return NULL;
    }
    if (strcmp(found->dtype, "F32") && strcmp(found->dtype, "F16") && strcmp(found->dtype, "BF16")) {
        error_set(error, "%s: the tensor \"%s\" has dtype %s; F32, F16 or BF16 is expected", source->path, name,
                  found->dtype);
        return NULL;
    }
    if (found->rank != expected.rank || memcmp(found->shape, expected.shape, (size_t)found->rank * sizeof found->shape[0])) {
        print_shape(got, sizeof got, found);
        print_shape(wanted, sizeof wanted, &expected);
        error_set(error, "%s: the tensor \"%s\" has shape %s, the model needs %s", source->path, name, got, wanted);
        return NULL;
    }
    return found;
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

/* Fails on a tensor that the model has no use for: not matched, no mask, no copy of wte. */
static int check_surplus(const Source *source, const SafetensorsTensor *wte, Error *error)
{
    if (safetensors_count(source->file) == source->count) return 0;
    for (size_t i = 0; i < safetensors_count(source->file); i++) {
        const SafetensorsTensor *tensor = safetensors_at(source->file, i);
        size_t k = 0;
        while (k < source->count && source->tensors[k] != tensor) k++;
        if (k < source->count || is_mask(tensor->name)) continue;
        if (strcmp(tensor->name, "lm_head.weight"))
            return error_set(error, "%s: the tensor \"%.200s\" is none of the model's %zu", source->path, tensor->name,
                             source->count);
        if (!is_equal(tensor, wte))
            return error_set(error, "%s: \"lm_head.weight\" differs from \"%s\": the model uses one tensor for both",
                             source->path, wte->name);
    }
    return 0;
}

/* Whether an element can be one of a parameter or first moment, or of a second moment, which is a mean of squares. */
static int is_plausible(float x, int square) { return isfinite(x) && (!square || x >= 0); }

static int check_values(const Source *source, const SafetensorsTensor *tensor, int square, Buffers *buffers, Error *error)
{
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
            return error_set(error, "%s: the tensor \"%s\" has %g at %s, a finite number%s is expected", source->path,
                             tensor->name, (double)buffers->stage[i], where, square ? " of at least 0" : "");
        }
    }
    return 0;
}

/* Opens a file and checks all of it against the model: names (with `groups` prefixes), shapes, values. */
static int source_open(Source *source, const char *path, const Gpt *gpt, const char *const *prefixes, size_t groups,
                       Buffers *buffers, Error *error)
{
    size_t count = gpt_tensor_count(gpt);
    *source = (Source){.path = path, .tensors = calloc(groups * count, sizeof *source->tensors)};
    if (!source->tensors) return fail_memory(path, error);
    source->file = safetensors_open(path, error);
    if (!source->file) { source_close(source); return -1; }
    for (; source->count < groups * count; source->count++) {
        size_t k = source->count;
        source->tensors[k] = match_tensor(source, gpt_tensor(gpt, k % count), prefixes[k / count], error);
        if (!source->tensors[k]) { source_close(source); return -1; }
    }
    if (check_surplus(source, groups == 1 ? source->tensors[0] : NULL, error)) { source_close(source); return -1; }
    for (size_t k = 0; k < source->count; k++)
        if (check_values(source, source->tensors[k], !strcmp(prefixes[k / count], "v."), buffers, error)) {
            source_close(source);
            return -1;
        }
    return 0;
}

static void source_read(const Source *source, Gpt *gpt, const GptBuffer *to, Buffers *buffers)
{
    size_t count = gpt_tensor_count(gpt);
    for (size_t k = 0; k < source->count; k++) read_tensor(gpt, to[k / count], k % count, source->tensors[k], buffers);
}

int checkpoint_load_parameters(const char *path, Gpt *gpt, Error *error)
{
    char file[PATH_BYTES];
    Buffers buffers;
    Source source;
    int result;
    if (is_directory(path) ? join_path(file, path, "model.safetensors", error) : 0) return -1;
    if (buffers_open(&buffers, gpt, path, error)) return -1;
    result = source_open(&source, is_directory(path) ? file : path, gpt, parameter_prefix, 1, &buffers, error);
    if (!result) {
        source_read(&source, gpt, parameters, &buffers);
        source_close(&source);
    }
    buffers_close(&buffers);
    return result;
}

int checkpoint_load_optimizer(const char *path, Gpt *gpt, CheckpointState *state, Error *error)
{
    char model[PATH_BYTES], optimizer[PATH_BYTES];
    CheckpointState read;
    Buffers buffers;
    Source from[2];
    int result;
    if (join_path(model, path, "model.safetensors", error) || join_path(optimizer, path, "optimizer.safetensors", error) ||
        read_state(path, &read, error) || buffers_open(&buffers, gpt, path, error))
        return -1;
    result = source_open(&from[0], model, gpt, parameter_prefix, 1, &buffers, error);
    if (!result) {
        result = source_open(&from[1], optimizer, gpt, moment_prefixes, 2, &buffers, error);
        if (!result) {
            source_read(&from[0], gpt, parameters, &buffers);
            source_read(&from[1], gpt, moments, &buffers);
            *state = read;
            source_close(&from[1]);
        }
        source_close(&from[0]);
    }
    buffers_close(&buffers);
    return result;
}

/* The number of tensors in DIR/NAME, or -1 where it is no whole safetensors file. */
static int64_t count_tensors(const char *dir, const char *name, Error *error)
{
    char path[PATH_BYTES];
    Safetensors *file = join_path(path, dir, name, error) ? NULL : safetensors_open(path, error);
    int64_t count = file ? (int64_t)safetensors_count(file) : -1;
    safetensors_close(file);
    return count;
}

/* Fails where the checkpoint `path` lacks something: reads the small files and the headers of the large ones, which
 * account for every byte of data. */
static int check_complete(const char *path, int64_t step, Error *error)
{
    CheckpointState state;
    GptConfig config;
    int64_t parameters_count, moments_count;
    if (checkpoint_config(path, &config, error) || read_state(path, &state, error)) return -1;
    if (state.step != step)
        return error_set(error, "%s: its state.json is of step %" PRId64 ", step %" PRId64 " is expected", path, state.step,
                         step);
    parameters_count = count_tensors(path, "model.safetensors", error);
    if (parameters_count < 0) return -1;
    moments_count = count_tensors(path, "optimizer.safetensors", error);
    if (moments_count < 0) return -1;
    if (moments_count != 2 * parameters_count)
        return error_set(error, "%s: optimizer.safetensors has %" PRId64 " tensors, two for each of the %" PRId64
                         " in model.safetensors are expected", path, moments_count, parameters_count);
    return 0;
}

/* --------------------------------------------------------------------------------------------------------------- saving */

/* Writes tensor i row by row, many at a time. */
static int write_rows(SafetensorsWriter *writer, const Gpt *gpt, GptBuffer from, size_t i, Buffers *buffers, Error *error)
{
    const GptTensor *tensor = gpt_tensor(gpt, i);
    int64_t block = buffers->slab_elements / tensor->columns;
    for (int64_t row = 0; row < tensor->rows; row += block) {
        int64_t n = smaller(block, tensor->rows - row);
        gpt_read(gpt, from, i, row, n, buffers->slab);
        if (safetensors_write(writer, buffers->slab, (size_t)(n * tensor->columns) * sizeof(float), error)) return -1;
    }
    return 0;
}

/* Writes tensor i column by column: the slab takes as many columns as it holds, which reads the tensor once. */
static int write_columns(SafetensorsWriter *writer, const Gpt *gpt, GptBuffer from, size_t i, Buffers *buffers, Error *error)
{
    const GptTensor *tensor = gpt_tensor(gpt, i);
    int64_t rows = tensor->rows, columns = tensor->columns;
    int64_t slab = buffers->slab_elements / rows, block = buffers->stage_elements / columns;
    for (int64_t column = 0; column < columns; column += slab) {
        int64_t width = smaller(slab, columns - column);
        for (int64_t row = 0; row < rows; row += block) {
            int64_t n = smaller(block, rows - row);
            gpt_read(gpt, from, i, row, n, buffers->stage);
            transpose(buffers->slab + row, rows, buffers->stage + column, columns, n, width);
        }
        if (safetensors_write(writer, buffers->slab, (size_t)(width * rows) * sizeof(float), error)) return -1;
    }
    return 0;
}

/* Writes a file that must not exist, and fsyncs it. */
static int write_file(const char *path, const char *data, size_t bytes, Error *error)
{
    int file = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666), fault = 0;
    if (file < 0) return error_set(error, "%s: cannot create it: %s", path, strerror(errno));
    for (size_t at = 0; at < bytes && !fault;) {
        ssize_t done = write(file, data + at, bytes - at);
        if (done >= 0) at += (size_t)done;
        else if (errno != EINTR) fault = errno;
    }
    if (!fault && fsync(file)) fault = errno;
    if (close(file) && !fault) fault = errno;
    return fault ? error_set(error, "%s: cannot write it: %s", path, strerror(fault)) : 0;
}

/* Copies a small file. */
static int copy_file(const char *to, const char *from, Error *error)
{
    FILE *file = fopen(from, "rbe");
    char *data = NULL;
    size_t bytes = 0, capacity = 0;
    int result = 0;
    if (!file) return error_set(error, "%s: cannot open it: %s", from, strerror(errno));
    while (!result && !feof(file)) {
        if (bytes == capacity) {
            char *grown = realloc(data, capacity += capacity ? capacity : 1 << 16);
            if (!grown) { result = fail_memory(from, error); break; }
            data = grown;
        }
        bytes += fread(data + bytes, 1, capacity - bytes, file);
        if (ferror(file)) result = error_set(error, "%s: cannot read it: %s", from, strerror(errno));
    }
    fclose(file);
    if (!result) result = write_file(to, data, bytes, error);
    free(data);
    return result;
}

/* What transformers' GPT2Config reads. */
static int write_config(const char *path, const GptConfig *config, int32_t end_of_text, Error *error)
{
    char text[2048], token[16];
    int length;
    snprintf(token, sizeof token, "%" PRId32, end_of_text);
    length = snprintf(text, sizeof text,
        "{\n"
        "  \"architectures\": [\"GPT2LMHeadModel\"],\n"
        "  \"model_type\": \"gpt2\",\n"
        "  \"vocab_size\": %" PRId64 ",\n"
        "  \"n_positions\": %" PRId64 ",\n"
        "  \"n_ctx\": %" PRId64 ",\n"
        "  \"n_embd\": %" PRId64 ",\n"
        "  \"n_layer\": %" PRId64 ",\n"
        "  \"n_head\": %" PRId64 ",\n"
        "  \"n_inner\": null,\n"
        "  \"activation_function\": \"gelu_new\",\n"
        "  \"layer_norm_epsilon\": 1e-05,\n"
        "  \"initializer_range\": 0.02,\n"
        "  \"attn_pdrop\": 0.0,\n"
        "  \"embd_pdrop\": 0.0,\n"
        "  \"resid_pdrop\": 0.0,\n"
        "  \"scale_attn_weights\": true,\n"
        "  \"scale_attn_by_inverse_layer_idx\": false,\n"
        "  \"reorder_and_upcast_attn\": false,\n"
        "  \"tie_word_embeddings\": true,\n"
        "  \"bos_token_id\": %s,\n"
        "  \"eos_token_id\": %s,\n"
        "  \"torch_dtype\": \"float32\",\n"
        "  \"use_cache\": true\n"
        "}\n",
        config->vocab, config->context, config->context, config->channels, config->layers, config->heads,
        end_of_text < 0 ? "null" : token, end_of_text < 0 ? "null" : token);
    return write_file(path, text, (size_t)length, error);
}

/* Doubles with 17 digits come back to the bit. Unsigned words are strings: JSON readers elsewhere stop at 2^53. */
static int write_state(const char *path, const CheckpointState *state, Error *error)
{
    char text[512], loss[32];
    int length;
    snprintf(loss, sizeof loss, "%.17g", state->validation_loss);
    length = snprintf(text, sizeof text,
        "{\n"
        "  \"step\": %" PRId64 ",\n"
        "  \"data_position\": %" PRId64 ",\n"
        "  \"seed\": \"%" PRIu64 "\",\n"
        "  \"data_fingerprint\": \"%" PRIu64 "\",\n"
        "  \"validation_loss\": %s,\n"
        "  \"seconds\": %.17g\n"
        "}\n",
        state->step, state->data_position, state->seed, state->data_fingerprint,
        isfinite(state->validation_loss) ? loss : "null", isfinite(state->seconds) ? state->seconds : 0.0);
    return write_file(path, text, (size_t)length, error);
}

/* Writes the buffers `from` (groups of them) to one file, tensor names with the prefixes. */
static int write_tensors(const char *path, const Gpt *gpt, const GptBuffer *from, const char *const *prefixes, size_t groups,
                         Buffers *buffers, Error *error)
{
    static const char *const metadata[] = {"format", "pt", NULL};
    size_t count = gpt_tensor_count(gpt), all = groups * count;
    SafetensorsTensor *tensors = calloc(all, sizeof *tensors);
    char (*names)[64] = calloc(all, sizeof *names);
    SafetensorsWriter *writer = NULL;
    int result = -1;
    if (!tensors || !names) {
        fail_memory(path, error);
    } else {
        for (size_t k = 0; k < all; k++) {
            const GptTensor *tensor = gpt_tensor(gpt, k % count);
            snprintf(names[k], sizeof names[k], "%s%s", prefixes[k / count], tensor->name);
            tensors[k] = file_tensor(tensor, names[k]);
        }
        writer = safetensors_create(path, tensors, all, metadata, error);
        if (writer) result = 0;
    }
    for (size_t k = 0; k < all && !result; k++) {
        int transposed = gpt_tensor(gpt, k % count)->transposed;
        result = (transposed ? write_columns : write_rows)(writer, gpt, from[k / count], k % count, buffers, error);
    }
    if (!result) result = safetensors_finish(writer, error);
    else safetensors_abandon(writer);
    free(tensors);
    free(names);
    return result;
}

/* Fills the new directory `path` and fsyncs it. */
static int write_checkpoint(const char *path, const Gpt *gpt, const CheckpointState *state, int32_t end_of_text,
                            const char *tokenizer, Error *error)
{
    char file[PATH_BYTES];
    Buffers buffers;
    int result;
    if (join_path(file, path, "config.json", error) || write_config(file, gpt_config(gpt), end_of_text, error)) return -1;
    if (join_path(file, path, "state.json", error) || write_state(file, state, error)) return -1;
    if (tokenizer && (join_path(file, path, "tokenizer.bin", error) || copy_file(file, tokenizer, error))) return -1;
    if (buffers_open(&buffers, gpt, path, error)) return -1;
    result = join_path(file, path, "model.safetensors", error);
    if (!result) result = write_tensors(file, gpt, parameters, parameter_prefix, 1, &buffers, error);
    if (!result) result = join_path(file, path, "optimizer.safetensors", error);
    if (!result) result = write_tensors(file, gpt, moments, moment_prefixes, 2, &buffers, error);
    buffers_close(&buffers);
    return result ? -1 : sync_directory(path, error);
}

int checkpoint_save(const char *dir, const Gpt *gpt, const CheckpointState *state, int32_t end_of_text,
                    const char *tokenizer, char *path, size_t path_size, Error *error)
{
    char final[PATH_BYTES], temporary[PATH_BYTES], name[STEP_BYTES], hidden[2 * STEP_BYTES];
    struct stat status;
    int damaged;
    if (state->step < 0)
        return error_set(error, "a checkpoint of step %" PRId64 " was asked for, none is below 0", state->step);
    step_name(name, state->step);
    snprintf(hidden, sizeof hidden, ".tmp.%s.%ld", name, (long)getpid());
    if (join_path(final, dir, name, error) || join_path(temporary, dir, hidden, error)) return -1;
    if ((size_t)snprintf(path, path_size, "%s", final) >= path_size)
        return error_set(error, "%s: the path is longer than %zu bytes", final, path_size - 1);
    damaged = !lstat(final, &status) && check_complete(final, state->step, NULL);
    if (!damaged && !lstat(final, &status)) return 0;
    if (remove_tree(temporary, error)) return -1;
    if (mkdir(temporary, 0777)) return error_set(error, "%s: cannot create it: %s", temporary, strerror(errno));
    if (write_checkpoint(temporary, gpt, state, end_of_text, tokenizer, error) ||
        (damaged && remove_checkpoint(dir, name, error))) {
        remove_tree(temporary, NULL);
        return -1;
    }
    if (rename(temporary, final)) {
        error_set(error, "%s: cannot rename it to %s: %s", temporary, final, strerror(errno));
        remove_tree(temporary, NULL);
        return -1;
    }
    return sync_directory(dir, error);
}

/* ---------------------------------------------------------------------------------------------------- finding, removing */

int checkpoint_newest(const char *dir, char *path, size_t path_size, Error *error)
{
    Error fault, newest = {""};
    char found[PATH_BYTES];
    Names list;
    int result = 0;
    if (error) error->text[0] = 0;
    if (access(dir, F_OK) && errno == ENOENT) return 0;
    if (names_list(&list, dir, 0, error)) return -1;
    for (size_t i = 0; i < list.count && !result; i++) {
        if (join_path(found, dir, list.names[i], error)) result = -1;
        else if (!check_complete(found, step_of_name(list.names[i]), &fault)) result = 1;
        else if (i == 0) newest = fault;
    }
    if (result == 1 && (size_t)snprintf(path, path_size, "%s", found) >= path_size)
        result = error_set(error, "%s: the path is longer than %zu bytes", found, path_size - 1);
    else if (result == 1 && newest.text[0])
        error_set(error, "passed over the damaged %s/%s: %s", dir, list.names[0], newest.text);
    else if (result == 0 && list.count)
        result = error_set(error, "%s: none of its %zu checkpoints is complete; the newest: %s", dir, list.count,
                           newest.text);
    names_free(&list);
    return result;
}

int checkpoint_prune(const char *dir, int64_t keep, Error *error)
{
    char path[PATH_BYTES];
    int64_t complete = 0;
    Names list;
    int result = 0;
    if (names_list(&list, dir, 1, error)) return -1;
    for (size_t i = 0; i < list.count && !result; i++)
        result = join_path(path, dir, list.names[i], error) || remove_tree(path, error) ? -1 : 0;
    names_free(&list);
    if (result || keep <= 0) return result;
    if (names_list(&list, dir, 0, error)) return -1;
    for (size_t i = 0; i < list.count && !result; i++) {
        if (complete >= keep) result = remove_checkpoint(dir, list.names[i], error);
        else if (join_path(path, dir, list.names[i], error)) result = -1;
        else complete += !check_complete(path, step_of_name(list.names[i]), NULL);
    }
    names_free(&list);
    return result;
}
