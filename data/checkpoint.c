/* checkpoint.c - a model and all that continues its training, as a directory.
 *
 * Saving. Everything is written under DIR/.tmp.step_NNNNNNNN.PID and fsynced, file by file and then the directory; one
 * rename gives it its name, and an fsync of DIR makes the name last. A process killed before the rename leaves a temporary
 * that no reader looks at and the next prune removes; one killed after it leaves a whole checkpoint. Removal goes the same
 * way backwards: rename first, then unlink.
 *
 * Loading. All files are checked before the first element of the model is changed (see weights.h).
 */
#include "data/checkpoint.h"

#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "data/files.h"
#include "data/json.h"
#include "data/model.h"
#include "data/safetensors.h"
#include "data/weights.h"

enum { STEP_BYTES = 32 };

/* Temporaries of saving and of removing both begin with this. */
#define TEMPORARY ".tmp.step_"

/* --------------------------------------------------------------------------------------------------------- directories */

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

/* Takes DIR/NAME its final name, for good, then removes what it held. */
static int remove_checkpoint(const char *dir, const char *name, Error *error)
{
    char path[FILES_PATH], temporary[FILES_PATH], hidden[2 * STEP_BYTES];
    snprintf(hidden, sizeof hidden, ".tmp.%.*s.removed", STEP_BYTES, name);
    if (files_join(path, dir, name, error) || files_join(temporary, dir, hidden, error) || files_remove(temporary, error))
        return -1;
    if (rename(path, temporary)) return error_set(error, "%s: cannot rename it to remove it: %s", path, strerror(errno));
    return files_sync_directory(dir, error) || files_remove(temporary, error) ? -1 : 0;
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

/* ---------------------------------------------------------------------------------------------------------- state.json */

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
    char path[FILES_PATH];
    const JsonValue *root, *loss, *seconds;
    JsonDocument *document;
    int result = -1;
    if (files_join(path, dir, "state.json", error)) return -1;
    document = json_read(path, error);
    if (!document) return -1;
    root = json_root(document);
    loss = json_member(root, "validation_loss");
    seconds = json_member(root, "seconds");
    if (json_find_integer(root, "step", path, 0, &state->step, error) ||
        json_find_integer(root, "data_position", path, 0, &state->data_position, error) ||
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

/* -------------------------------------------------------------------------------------------------------------- loading */

int checkpoint_load(const char *path, Gpt *gpt, CheckpointState *state, Error *error)
{
    char model[FILES_PATH], optimizer[FILES_PATH];
    CheckpointState read;
    Weights *parameters, *moments = NULL;
    if (files_join(model, path, "model.safetensors", error) || files_join(optimizer, path, "optimizer.safetensors", error) ||
        read_state(path, &read, error))
        return -1;
    parameters = weights_open(model, gpt, &weights_parameters, error);
    if (parameters) moments = weights_open(optimizer, gpt, &weights_moments, error);
    if (moments) {
        weights_read(parameters, gpt);
        weights_read(moments, gpt);
        *state = read;
    }
    weights_close(parameters);
    weights_close(moments);
    return moments ? 0 : -1;
}

/* The number of tensors in DIR/NAME, or -1 where it is no whole safetensors file. */
static int64_t count_tensors(const char *dir, const char *name, Error *error)
{
    char path[FILES_PATH];
    Safetensors *file = files_join(path, dir, name, error) ? NULL : safetensors_open(path, error);
    int64_t count = file ? (int64_t)safetensors_count(file) : -1;
    safetensors_close(file);
    return count;
}

/* Fails where the checkpoint `path` lacks something: reads the small files and the headers of the large ones, which
 * account for every byte of data. */
static int check_complete(const char *path, int64_t step, Error *error)
{
    CheckpointState state;
    ModelInfo info;
    int64_t parameters_count, moments_count;
    if (model_inspect(path, &info, error) || read_state(path, &state, error)) return -1;
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
    return files_write(path, text, (size_t)length, error);
}

/* Fills the new directory `path` and fsyncs it. */
static int write_checkpoint(const char *path, const Gpt *gpt, const CheckpointState *state, const Tokenizer *tokenizer,
                            int32_t end_of_text, Error *error)
{
    char file[FILES_PATH];
    if (files_join(file, path, "state.json", error) || write_state(file, state, error) ||
        model_write(path, gpt, tokenizer, end_of_text, "F32", error) ||
        files_join(file, path, "optimizer.safetensors", error) || weights_write(file, gpt, &weights_moments, "F32", error))
        return -1;
    return files_sync_directory(path, error);
}

int checkpoint_save(const char *dir, const Gpt *gpt, const CheckpointState *state, const Tokenizer *tokenizer,
                    int32_t end_of_text, char *path, size_t path_size, Error *error)
{
    char final[FILES_PATH], temporary[FILES_PATH], name[STEP_BYTES], hidden[2 * STEP_BYTES];
    struct stat status;
    int damaged;
    if (state->step < 0)
        return error_set(error, "a checkpoint of step %" PRId64 " was asked for, none is below 0", state->step);
    step_name(name, state->step);
    snprintf(hidden, sizeof hidden, ".tmp.%s.%ld", name, (long)getpid());
    if (files_join(final, dir, name, error) || files_join(temporary, dir, hidden, error)) return -1;
    if ((size_t)snprintf(path, path_size, "%s", final) >= path_size)
        return error_set(error, "%s: the path is longer than %zu bytes", final, path_size - 1);
    damaged = !lstat(final, &status) && check_complete(final, state->step, NULL);
    if (!damaged && !lstat(final, &status)) return 0;
    if (files_remove(temporary, error)) return -1;
    if (mkdir(temporary, 0777)) return error_set(error, "%s: cannot create it: %s", temporary, strerror(errno));
    if (write_checkpoint(temporary, gpt, state, tokenizer, end_of_text, error) ||
        (damaged && remove_checkpoint(dir, name, error))) {
        files_remove(temporary, NULL);
        return -1;
    }
    if (rename(temporary, final)) {
        error_set(error, "%s: cannot rename it to %s: %s", temporary, final, strerror(errno));
        files_remove(temporary, NULL);
        return -1;
    }
    return files_sync_directory(dir, error);
}

/* ---------------------------------------------------------------------------------------------------- finding, removing */

int checkpoint_newest(const char *dir, char *path, size_t path_size, Error *error)
{
    Error fault, newest = {""};
    char found[FILES_PATH];
    Names list;
    int result = 0;
    if (error) error->text[0] = 0;
    if (access(dir, F_OK) && errno == ENOENT) return 0;
    if (names_list(&list, dir, 0, error)) return -1;
    for (size_t i = 0; i < list.count && !result; i++) {
        if (files_join(found, dir, list.names[i], error)) result = -1;
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
    char path[FILES_PATH];
    int64_t complete = 0;
    Names list;
    int result = 0;
    if (names_list(&list, dir, 1, error)) return -1;
    for (size_t i = 0; i < list.count && !result; i++)
        result = files_join(path, dir, list.names[i], error) || files_remove(path, error) ? -1 : 0;
    names_free(&list);
    if (result || keep <= 0) return result;
    if (names_list(&list, dir, 0, error)) return -1;
    for (size_t i = 0; i < list.count && !result; i++) {
        if (complete >= keep) result = remove_checkpoint(dir, list.names[i], error);
        else if (files_join(path, dir, list.names[i], error)) result = -1;
        else complete += !check_complete(path, step_of_name(list.names[i]), NULL);
    }
    names_free(&list);
    return result;
}
