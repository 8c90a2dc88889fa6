#include "trainer/inference.h"

#include <stdio.h>
#include <string.h>

#include "data/checkpoint.h"
#include "data/vocabulary.h"
#include "trainer/process.h"

int device_open(const DeviceChoice *choice, const Backend **backend, Stream **stream, Error *error)
{
    Dtype dtype = choice->dtype ? DTYPE_BF16 : DTYPE_FP32;
    const Backend *gpu = backend_find(ATTENTION_CUDA, dtype);
    BackendOptions options = {.deterministic = (int)choice->deterministic, .tf32 = (int)choice->tf32};
    const char *device = choice->device;
    int index = 0, automatic = !strcmp(device, "auto"), used = 0;
    int cuda = !strcmp(device, "cuda") || (sscanf(device, "cuda:%d%n", &index, &used) == 1 && !device[used]);
    *stream = NULL;
    if (!automatic && !cuda && strcmp(device, "cpu")) {
        error_set(error, "--device: got '%s', expected auto, cpu, cuda or cuda:N", device);
        return STATUS_OPTION;
    }
    if (cuda && !gpu) {
        error_set(error, "--device %s: this binary was built for the CPU only; build it with nvcc: make ARCH=sm_90a",
                  device);
        return STATUS_OPTION;
    }
    if (gpu && (cuda || automatic)) {
        *backend = gpu;
        *stream = gpu->open(index, &options, error->text, sizeof error->text);
        if (!*stream && cuda) return STATUS_MACHINE;
    }
    if (!*stream) {
        *backend = backend_find(ATTENTION_CPU, dtype);
        if (!*backend) {
            error_set(error, "--dtype bf16 needs a GPU: the CPU computes in fp32");
            return STATUS_OPTION;
        }
        *stream = (*backend)->open(0, &options, error->text, sizeof error->text);
    }
    return *stream ? 0 : STATUS_MACHINE;
}

int inference_path(const char *init, char *path, size_t size, Error *error)
{
    error->text[0] = 0;
    int found = files_is_directory(init) ? checkpoint_newest(init, path, size, error) : 0;
    if (found < 0) return STATUS_MACHINE;
    if (found && error->text[0]) fprintf(stderr, "train_gpt: %s is read: %s\n", path, error->text);
    error->text[0] = 0;
    if (found || (size_t)snprintf(path, size, "%s", init) < size) return 0;
    error_set(error, "%.200s...: the path is longer than %zu bytes", init, size - 1);
    return STATUS_OPTION;
}

/* A vocabulary may exceed its tokenizer's by less than this: models are padded to multiples of 64 or 128. */
enum { PADDING = 128 };

int inference_find(Inference *inference, const char *init, const char *tokenizer, Error *error)
{
    Inference *m = inference;
    memset(m, 0, sizeof *m);
    int status = inference_path(init, m->path, sizeof m->path, error);
    if (status) return status;
    if (model_inspect(m->path, &m->info, error)) return STATUS_MACHINE;
    error->text[0] = 0;
    if (!*tokenizer) m->tokenizer = model_tokenizer(m->path, error);
    else if (files_is_directory(tokenizer)) m->tokenizer = vocabulary_open(tokenizer, error);
    else m->tokenizer = tokenizer_open(tokenizer, error);
    if (!m->tokenizer && *tokenizer && !error->text[0]) error_set(error, "--tokenizer %s holds no tokenizer", tokenizer);
    if (m->tokenizer && tokenizer_vocab(m->tokenizer) > m->info.config.vocab)
        error_set(error, "%s: its tokenizer has %lld tokens, its model only %lld", *tokenizer ? tokenizer : m->path,
                  (long long)tokenizer_vocab(m->tokenizer), (long long)m->info.config.vocab);
    else if (m->tokenizer && *tokenizer && m->info.config.vocab >= tokenizer_vocab(m->tokenizer) + PADDING)
        error_set(error, "--tokenizer %s: has %lld tokens, the model of %s %lld: they do not belong together", tokenizer,
                  (long long)tokenizer_vocab(m->tokenizer), m->path, (long long)m->info.config.vocab);
    return error->text[0] ? STATUS_MACHINE : 0;
}

int inference_place(Inference *inference, const DeviceChoice *choice, const GptOptions *options, Error *error)
{
    Inference *m = inference;
    const GptConfig *config = &m->info.config;
    AttentionShape shape = {.B = options->batch, .T = options->sequence, .NH = config->heads,
                            .HS = config->channels / config->heads, .tf32 = options->tf32};
    int status = device_open(choice, &m->backend, &m->stream, error);
    if (status) return status;
    shape.scale = attention_scale(shape.HS);
    shape.dtype = m->backend->dtype;
    if (attention_is_path(choice->attention)) process_blame(choice->attention);
    m->attention = attention_choose(choice->attention, m->backend->device, &shape, m->backend->sm(m->stream), error->text,
                                    sizeof error->text);
    return m->attention ? 0 : STATUS_OPTION;
}

int inference_load(Inference *inference, const GptOptions *options, Error *error)
{
    Inference *m = inference;
    m->gpt = gpt_create(&m->info.config, options, m->backend, m->stream, m->attention, error->text,
                        sizeof error->text);
    if (!m->gpt || model_load(m->path, m->gpt, error)) return STATUS_MACHINE;
    return 0;
}

int tokenizer_check(const Tokenizer *data, const char *directory, const Tokenizer *own, const char *model, int64_t vocab,
                    const char *remedy, Error *error)
{
    int64_t found = tokenizer_vocab(data);
    if (!own) {
        if (vocab < found + PADDING || !remedy) return 0;
        return error_set(error, "--data %s: its tokenizer has %lld tokens, the model of %s %lld: they do not belong "
                         "together (%s)", directory, (long long)found, model, (long long)vocab, remedy);
    }
    for (int64_t token = 0; token < found; token++) {
        size_t length, own_length;
        const char *bytes = tokenizer_decode(data, (int32_t)token, &length);
        const char *own_bytes = tokenizer_decode(own, (int32_t)token, &own_length);
        if (token >= tokenizer_vocab(own) || length != own_length || memcmp(bytes, own_bytes, length))
            return error_set(error, "--data %s: its tokenizer of %lld tokens is not that of %s, which has %lld: they differ "
                             "in token %lld", directory, (long long)found, model, (long long)tokenizer_vocab(own),
                             (long long)token);
    }
    return 0;
}

int inference_check_data(const Inference *inference, const char *directory, Error *error)
{
    char path[FILES_PATH];
    if (files_join(path, directory, "tokenizer.bin", error)) return -1;
    if (!files_is_regular(path)) return 0;
    Tokenizer *data = tokenizer_open(path, error);
    if (!data) return -1;
    int differs = tokenizer_check(data, directory, inference->tokenizer, inference->path, inference->info.config.vocab,
                                  "--val GLOB takes the shards alone", error);
    tokenizer_close(data);
    return differs;
}

void inference_close(Inference *inference)
{
    gpt_free(inference->gpt);
    if (inference->stream) inference->backend->close(inference->stream);
    tokenizer_close(inference->tokenizer);
    memset(inference, 0, sizeof *inference);
}
