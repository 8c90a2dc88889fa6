#include "data/llmc.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "data/bf16.h"

enum { HEADER_WORDS = 256, HEADER_BYTES = 1024, MAGIC = 20240326, FP32 = 3, BF16 = 5, PAD = 128, BLOCK_ELEMENTS = 1 << 20 };

/* The order of the tensors in a file. */
static const GptKind order[GPT_KINDS] = {
    GPT_WTE, GPT_WPE, GPT_LN1_W, GPT_LN1_B, GPT_QKV_W, GPT_QKV_B, GPT_PROJ_W, GPT_PROJ_B,
    GPT_LN2_W, GPT_LN2_B, GPT_FC_W, GPT_FC_B, GPT_FCPROJ_W, GPT_FCPROJ_B, GPT_LNF_W, GPT_LNF_B,
};

/* A file that is open for reading. */
typedef struct Source {
    const char *path;
    const uint8_t *map;
    size_t bytes;
    GptConfig config;
    int64_t Vp;
    int element; /* bytes of an element */
} Source;

int llmc_recognize(const char *path)
{
    int32_t magic = 0;
    int file = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    int found = file >= 0 && read(file, &magic, sizeof magic) == sizeof magic && magic == MAGIC;
    if (file >= 0) close(file);
    return found;
}

/* Elements of a model; a double, as sizes that are no model's may be beyond 64 bits. */
static double count_elements(const GptConfig *config, int64_t Vp)
{
    double C = (double)config->channels, L = (double)config->layers;
    return ((double)Vp + (double)config->context + 2) * C + L * C * (12 * C + 13);
}

/* Reads the header and holds the file's size against it. */
static int read_header(Source *source, Error *error)
{
    int32_t words[HEADER_WORDS];
    char fault[256];
    double expected;
    memcpy(words, source->map, sizeof words);
    if (words[0] != MAGIC)
        return error_set(error, "%s: magic %d at byte 0, expected %d for a model of llm.c", source->path, words[0], MAGIC);
    if (words[1] != FP32 && words[1] != BF16)
        return error_set(error, "%s: version %d at byte 4, expected %d (fp32) or %d (bf16)", source->path, words[1], FP32,
                         BF16);
    source->config = (GptConfig){.context = words[2], .vocab = words[3], .layers = words[4], .heads = words[5],
                                 .channels = words[6]};
    source->Vp = words[7];
    source->element = words[1] == FP32 ? 4 : 2;
    if (gpt_config_fault(&source->config, fault, sizeof fault)) return error_set(error, "%s: %s", source->path, fault);
    if (source->Vp < source->config.vocab)
        return error_set(error, "%s: padded vocabulary %" PRId64 " at byte 28, expected at least the vocabulary, %" PRId64,
                         source->path, source->Vp, source->config.vocab);
    expected = HEADER_BYTES + source->element * count_elements(&source->config, source->Vp);
    if ((double)source->bytes != expected)
        return error_set(error, "%s: %zu bytes, expected %.0f for the sizes in its header", source->path, source->bytes,
                         expected);
    return 0;
}

static void source_close(Source *source) { munmap((void *)(uintptr_t)source->map, source->bytes); }

static int source_open(Source *source, const char *path, Error *error)
{
    struct stat status;
    int file = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK), result = 0;
    *source = (Source){.path = path};
    if (file < 0) return error_set(error, "%s: cannot open it: %s", path, strerror(errno));
    if (fstat(file, &status)) result = error_set(error, "%s: cannot stat it: %s", path, strerror(errno));
    else if (!S_ISREG(status.st_mode)) result = error_set(error, "%s is not a regular file", path);
    else if (status.st_size < HEADER_BYTES)
        result = error_set(error, "%s: %lld bytes, a model of llm.c has a header of %d", path, (long long)status.st_size,
                           HEADER_BYTES);
    if (!result) {
        void *map = mmap(NULL, (size_t)status.st_size, PROT_READ, MAP_PRIVATE, file, 0);
        source->map = map;
        source->bytes = (size_t)status.st_size;
        if (map == MAP_FAILED) result = error_set(error, "%s: cannot map it: %s", path, strerror(errno));
        else if (read_header(source, error)) {
            source_close(source);
            result = -1;
        }
    }
    close(file);
    return result;
}

int llmc_inspect(const char *path, GptConfig *config, Error *error)
{
    Source source;
    if (source_open(&source, path, error)) return -1;
    *config = source.config;
    source_close(&source);
    return 0;
}

/* Elements [first, first+n) of the file as fp32. Pages that lie behind are dropped: the file may be larger than memory. */
static void read_elements(const Source *source, float *out, int64_t first, int64_t n)
{
    const uint8_t *in = source->map + HEADER_BYTES + first * source->element;
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), from = (uintptr_t)in & ~(page - 1);
    if (source->element == 4) memcpy(out, in, (size_t)n * 4);
    for (int64_t i = 0; source->element == 2 && i < n; i++) {
        uint16_t half;
        memcpy(&half, in + 2 * i, sizeof half);
        out[i] = bf16_widen(half);
    }
    madvise((void *)from, (uintptr_t)in + (size_t)(n * source->element) - from, MADV_DONTNEED);
}

/* Goes through the tensors in the file's order, block by block of whole rows: checks their values where gpt is only to be
 * compared (write 0), hands them to gpt where it is not. */
static int visit_tensors(const Source *source, Gpt *gpt, int write, float *block, Error *error)
{
    int64_t at = 0, vocab = source->config.vocab;
    for (int k = 0; k < GPT_KINDS; k++)
        for (size_t i = 0; i < gpt_tensor_count(gpt); i++) {
            const GptTensor *tensor = gpt_tensor(gpt, i);
            int64_t columns = tensor->columns, step = BLOCK_ELEMENTS / columns > 0 ? BLOCK_ELEMENTS / columns : 1;
            if (tensor->kind != order[k]) continue;
            for (int64_t row = 0; row < tensor->rows; row += step) {
                int64_t n = tensor->rows - row < step ? tensor->rows - row : step, bad = 0;
                read_elements(source, block, at + row * columns, n * columns);
                if (write) gpt_write(gpt, GPT_PARAMETERS, i, row, n, block);
                else
                    while (bad < n * columns && isfinite(block[bad])) bad++;
                if (!write && bad < n * columns)
                    return error_set(error, "%s: the tensor \"%s\" has %g in row %" PRId64 ", column %" PRId64 ", a finite "
                                     "number is expected", source->path, tensor->name, (double)block[bad],
                                     row + bad / columns, bad % columns);
            }
            at += (order[k] == GPT_WTE ? tensor->rows + source->Vp - vocab : tensor->rows) * columns;
        }
    return 0;
}

/* Room for BLOCK_ELEMENTS, or one row of any tensor where that is more. */
static float *block_open(const Gpt *gpt, const char *path, Error *error)
{
    int64_t most = BLOCK_ELEMENTS;
    for (size_t i = 0; i < gpt_tensor_count(gpt); i++)
        if (gpt_tensor(gpt, i)->columns > most) most = gpt_tensor(gpt, i)->columns;
    float *block = malloc((size_t)most * sizeof *block);
    if (!block) error_set(error, "%s: not enough memory for it", path);
    return block;
}

/* Fails where two shapes differ. */
static int check_shape(const char *path, const GptConfig *got, const GptConfig *model, Error *error)
{
    const struct { const char *name; int64_t got, expected; } sizes[] = {
        {"layers", got->layers, model->layers}, {"heads", got->heads, model->heads},
        {"channels", got->channels, model->channels}, {"context", got->context, model->context},
        {"vocabulary", got->vocab, model->vocab},
    };
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++)
        if (sizes[i].got != sizes[i].expected)
            return error_set(error, "%s: %s %" PRId64 " in its header, the model has %" PRId64, path, sizes[i].name,
                             sizes[i].got, sizes[i].expected);
    return 0;
}

int llmc_load(const char *path, Gpt *gpt, Error *error)
{
    Source source;
    float *block;
    int result = -1;
    if (source_open(&source, path, error)) return -1;
    if (!check_shape(path, &source.config, gpt_config(gpt), error) && (block = block_open(gpt, path, error))) {
        result = visit_tensors(&source, gpt, 0, block, error);
        if (!result) visit_tensors(&source, gpt, 1, block, NULL);
        free(block);
    }
    source_close(&source);
    return result;
}

/* Writes n elements of the block, which is not what it was afterwards. */
static int write_block(FILE *file, float *block, int64_t n, int bf16, const GptTensor *tensor, const char *path,
                       Error *error)
{
    if (bf16 && bf16_narrow(block, block, n) >= 0)
        return error_set(error, "%s: the tensor \"%s\" has a value that bf16 cannot hold", path, tensor->name);
    if (fwrite(block, bf16 ? 2 : 4, (size_t)n, file) == (size_t)n) return 0;
    return error_set(error, "%s: cannot write it: %s", path, strerror(errno));
}

/* Writes one tensor, and the padding where it is wte. */
static int write_tensor(FILE *file, const Gpt *gpt, size_t i, int64_t Vp, int bf16, float *block, const char *path,
                        Error *error)
{
    const GptTensor *tensor = gpt_tensor(gpt, i);
    int64_t columns = tensor->columns, step = BLOCK_ELEMENTS / columns > 0 ? BLOCK_ELEMENTS / columns : 1;
    int64_t rows = tensor->kind == GPT_WTE ? Vp : tensor->rows;
    for (int64_t row = 0, n; row < rows; row += n) {
        int64_t end = row < tensor->rows ? tensor->rows : rows;
        n = end - row < step ? end - row : step;
        if (row < tensor->rows) gpt_read(gpt, GPT_PARAMETERS, i, row, n, block);
        else memset(block, 0, (size_t)(n * columns) * sizeof *block);
        if (write_block(file, block, n * columns, bf16, tensor, path, error)) return -1;
    }
    return 0;
}

int llmc_write(const char *path, const Gpt *gpt, int bf16, Error *error)
{
    const GptConfig *c = gpt_config(gpt);
    int64_t Vp = (c->vocab + PAD - 1) / PAD * PAD;
    int32_t words[HEADER_WORDS] = {MAGIC, bf16 ? BF16 : FP32, (int32_t)c->context, (int32_t)c->vocab, (int32_t)c->layers,
                                   (int32_t)c->heads, (int32_t)c->channels, (int32_t)Vp};
    float *block = block_open(gpt, path, error);
    FILE *file = block ? fopen(path, "wbxe") : NULL;
    int result = 0;
    if (block && !file) error_set(error, "%s: cannot create it: %s", path, strerror(errno));
    if (!file) {
        free(block);
        return -1;
    }
    if (fwrite(words, sizeof words, 1, file) != 1)
        result = error_set(error, "%s: cannot write it: %s", path, strerror(errno));
    for (int k = 0; k < GPT_KINDS && !result; k++)
        for (size_t i = 0; i < gpt_tensor_count(gpt) && !result; i++)
            if (gpt_tensor(gpt, i)->kind == order[k])
                result = write_tensor(file, gpt, i, Vp, bf16, block, path, error);
    if (!result && (fflush(file) || fsync(fileno(file))))
        result = error_set(error, "%s: cannot write it: %s", path, strerror(errno));
    if (fclose(file) && !result) result = error_set(error, "%s: cannot close it: %s", path, strerror(errno));
    if (result) unlink(path);
    free(block);
    return result;
}
