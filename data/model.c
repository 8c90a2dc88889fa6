/* model.c - models of any origin: what a path is, its shape, its weights, its tokenizer; and out again. */
#include "data/model.h"

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
#include "data/llmc.h"
#include "data/vocabulary.h"
#include "data/weights.h"

/* GPT-2's vocabulary and its end-of-text token: llm.c's files do not name theirs, its programs have it built in. */
enum { GPT2_VOCAB = 50257, GPT2_END_OF_TEXT = 50256 };

/* ----------------------------------------------------------------------------------------------------------- config.json */

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
        if (json_find_integer(root, sizes[i].key, path, 1, sizes[i].to, error)) return -1;
        if (*sizes[i].to > INT32_MAX)
            return error_set(error, "%s: \"%s\" is %" PRId64 ", at most %d is expected", path, sizes[i].key, *sizes[i].to,
                             INT32_MAX);
    }
    return 0;
}

/* config.json of a directory, or beside a file. */
static int config_path(char out[FILES_PATH], const char *path, Error *error)
{
    const char *slash = strrchr(path, '/');
    struct stat status;
    if (stat(path, &status)) return error_set(error, "%s: cannot open it: %s", path, strerror(errno));
    if (S_ISDIR(status.st_mode)) return files_join(out, path, "config.json", error);
    if (snprintf(out, FILES_PATH, "%.*sconfig.json", slash ? (int)(slash - path + 1) : 0, path) >= FILES_PATH)
        return error_set(error, "%.200s...: the path is longer than %d bytes", path, FILES_PATH - 1);
    if (!files_is_regular(out))
        return error_set(error, "%s: no config.json beside it, which says what tensors do not, such as the number of heads",
                         path);
    return 0;
}

/* PyTorch's own files are programs for its unpickler. */
static int is_pickle(const char *path)
{
    unsigned char start[4] = {0};
    FILE *file = fopen(path, "re");
    size_t got = file ? fread(start, 1, sizeof start, file) : 0;
    if (file) fclose(file);
    return got == sizeof start && (!memcmp(start, "PK\3\4", 4) || (start[0] == 0x80 && start[1] < 6));
}

static int fail_pickle(const char *path, Error *error)
{
    return error_set(error, "%s: is a pickle of PyTorch, expected safetensors, as save_pretrained(DIR, "
                     "safe_serialization=True) writes them", path);
}

int model_inspect(const char *path, ModelInfo *info, Error *error)
{
    char file[FILES_PATH], fault[512];
    const char *sentence;
    ModelInfo read = {{0}, -1};
    int64_t token;
    if (llmc_recognize(path)) {
        if (llmc_inspect(path, &read.config, error)) return -1;
        if (read.config.vocab == GPT2_VOCAB) read.end_of_text = GPT2_END_OF_TEXT;
        *info = read;
        return 0;
    }
    if (files_is_regular(path) && is_pickle(path)) return fail_pickle(path, error);
    if (config_path(file, path, error)) return -1;
    JsonDocument *document = json_read(file, error);
    if (!document) return -1;
    const JsonValue *root = json_root(document), *end = json_member(root, "eos_token_id");
    int result = root->kind == JSON_OBJECT ? 0 : error_set(error, "%s holds no JSON object", file);
    if (!result) result = read_shape(root, file, &read.config, error);
    if (!result) result = check_architecture(root, file, &read.config, error);
    if (end && json_integer(end, &token) && token >= 0 && token < read.config.vocab) read.end_of_text = (int32_t)token;
    json_free(document);
    if (result) return -1;
    sentence = gpt_config_fault(&read.config, fault, sizeof fault);
    if (sentence) return error_set(error, "%s: %s", file, sentence);
    *info = read;
    return 0;
}

/* --------------------------------------------------------------------------------------------------------------- loading */

/* The file of tensors, or the index of several, that a path means. */
static int tensors_path(char out[FILES_PATH], const char *path, Error *error)
{
    char pickle[FILES_PATH];
    if (!files_is_directory(path)) {
        if (is_pickle(path)) return fail_pickle(path, error);
        if (snprintf(out, FILES_PATH, "%s", path) < FILES_PATH) return 0;
        return error_set(error, "%.200s...: the path is longer than %d bytes", path, FILES_PATH - 1);
    }
    if (files_join(out, path, "model.safetensors", error)) return -1;
    if (files_is_regular(out)) return 0;
    if (files_join(out, path, "model.safetensors.index.json", error)) return -1;
    if (files_is_regular(out)) return 0;
    if (files_join(pickle, path, "pytorch_model.bin", error)) return -1;
    if (files_is_regular(pickle)) return fail_pickle(pickle, error);
    return error_set(error, "%s: holds neither model.safetensors nor model.safetensors.index.json", path);
}

int model_load(const char *path, Gpt *gpt, Error *error)
{
    char tensors[FILES_PATH];
    if (llmc_recognize(path)) return llmc_load(path, gpt, error);
    if (tensors_path(tensors, path, error)) return -1;
    Weights *weights = weights_open(tensors, gpt, &weights_parameters, error);
    if (!weights) return -1;
    weights_read(weights, gpt);
    weights_close(weights);
    return 0;
}

Tokenizer *model_tokenizer(const char *path, Error *error)
{
    char dir[FILES_PATH] = ".";
    const char *slash = strrchr(path, '/');
    if (files_is_directory(path)) return vocabulary_open(path, error);
    error->text[0] = 0;
    if (llmc_recognize(path)) return NULL; /* a file among others */
    if (slash) snprintf(dir, sizeof dir, "%.*s", slash == path ? 1 : (int)(slash - path), path);
    return vocabulary_open(dir, error);
}

/* ---------------------------------------------------------------------------------------------------------------- saving */

/* What transformers' GPT2Config reads. */
static int write_config(const char *path, const GptConfig *config, int32_t end_of_text, const char *dtype, Error *error)
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
        "  \"torch_dtype\": \"%s\",\n"
        "  \"use_cache\": true\n"
        "}\n",
        config->vocab, config->context, config->context, config->channels, config->layers, config->heads,
        end_of_text < 0 ? "null" : token, end_of_text < 0 ? "null" : token,
        strcmp(dtype, "F32") ? "bfloat16" : "float32");
    return files_write(path, text, (size_t)length, error);
}

int model_write(const char *dir, const Gpt *gpt, const Tokenizer *tokenizer, int32_t end_of_text, const char *dtype,
                Error *error)
{
    char file[FILES_PATH];
    const GptConfig *config = gpt_config(gpt);
    if (tokenizer) {
        if (files_join(file, dir, "tokenizer.bin", error) || tokenizer_write(tokenizer, file, error) ||
            vocabulary_write(dir, tokenizer, config->context, error) < 0)
            return -1;
        end_of_text = tokenizer_end_of_text(tokenizer);
    }
    if (files_join(file, dir, "config.json", error) || write_config(file, config, end_of_text, dtype, error)) return -1;
    return files_join(file, dir, "model.safetensors", error) || weights_write(file, gpt, &weights_parameters, dtype, error)
               ? -1 : 0;
}

int model_export(const char *out, ModelFormat format, const Gpt *gpt, const Tokenizer *tokenizer, int32_t end_of_text,
                 Error *error)
{
    char final[FILES_PATH], temporary[FILES_PATH], parent[FILES_PATH] = ".";
    size_t length = strlen(out);
    struct stat status;
    int result;
    while (length > 1 && out[length - 1] == '/') length--;
    if (snprintf(temporary, sizeof temporary, "%.*s.tmp.%ld", (int)length, out, (long)getpid()) >= (int)sizeof temporary)
        return error_set(error, "%.200s...: the path is longer than %d bytes", out, FILES_PATH - 1);
    snprintf(final, sizeof final, "%.*s", (int)length, out);
    const char *slash = strrchr(final, '/');
    if (!lstat(final, &status)) return error_set(error, "%s: exists already", final);
    if (slash) snprintf(parent, sizeof parent, "%.*s", slash == final ? 1 : (int)(slash - final), final);
    if (format == MODEL_LLMC || format == MODEL_LLMC_BF16) {
        result = llmc_write(temporary, gpt, format == MODEL_LLMC_BF16, error);
    } else {
        result = mkdir(temporary, 0777) ? error_set(error, "%s: cannot create it: %s", temporary, strerror(errno)) : 0;
        if (!result)
            result = model_write(temporary, gpt, tokenizer, end_of_text, format == MODEL_BF16 ? "BF16" : "F32", error);
        if (!result) result = files_sync_directory(temporary, error);
    }
    if (!result && rename(temporary, final))
        result = error_set(error, "%s: cannot rename it to %s: %s", temporary, final, strerror(errno));
    if (!result) return files_sync_directory(parent, error);
    files_remove(temporary, NULL);
    return -1;
}
