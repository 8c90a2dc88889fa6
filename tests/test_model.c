/* Models of other programs: those of Hugging Face compute what transformers computes, llm.c's files come back to the byte,
 * tokenizers go out and in; what is damaged or of another kind is refused whole, with a sentence.
 *
 * The fixtures are made by tests/fixtures/make_huggingface.py. */
#include "data/model.h"

#include <signal.h>
#include <sys/resource.h>

#include "data/llmc.h"
#include "data/safetensors.h"
#include "data/vocabulary.h"
#include "data/weights.h"
#include "tests/bounds.h"
#include "tests/model_files.h"
#include "tests/test.h"

enum { HEADER_BYTES = 1024, MOST = 1 << 18 };

#define FIXTURES "tests/fixtures/huggingface/"

static const GptConfig tiny = {.layers = 2, .heads = 2, .channels = 16, .context = 8, .vocab = 37};

/* --- helpers ---------------------------------------------------------------------------------------------------------- */

/* Bytes of a file to a static buffer; their count, 0 where there is none. */
static size_t get_bytes(const char *path, uint8_t **bytes)
{
    static uint8_t kept[2][MOST + 1];
    static int turn;
    FILE *file = fopen(path, "rb");
    *bytes = kept[turn = !turn];
    size_t count = file ? fread(*bytes, 1, MOST, file) : 0;
    if (file) fclose(file);
    return count;
}

static void put_bytes(const char *path, const void *bytes, size_t count)
{
    FILE *file = fopen(path, "wb");
    if (count) fwrite(bytes, 1, count, file);
    fclose(file);
}

static void copy_bytes(const char *to, const char *from)
{
    uint8_t *bytes;
    size_t count = get_bytes(from, &bytes);
    put_bytes(to, bytes, count);
}

/* 1 where two files hold the same bytes, at least one. */
static int same_bytes(const char *a, const char *b)
{
    uint8_t *x, *y;
    size_t count = get_bytes(a, &x);
    return count && count == get_bytes(b, &y) && !memcmp(x, y, count);
}

/* Replaces a word of a file by another, everywhere. */
static void replace_words(const char *path, const char *old, const char *new)
{
    static char out[MOST];
    uint8_t *bytes;
    size_t count = get_bytes(path, &bytes), at = 0, n = 0, changes = 0;
    while (at < count) {
        if (count - at >= strlen(old) && !memcmp(bytes + at, old, strlen(old))) {
            memcpy(out + n, new, strlen(new));
            n += strlen(new);
            at += strlen(old);
            changes++;
        } else out[n++] = (char)bytes[at++];
    }
    CHECK(changes, "%s has no %s", path, old);
    put_bytes(path, out, n);
}

/* --- Hugging Face ----------------------------------------------------------------------------------------------------- */

/* The model in a fixture and what transformers computed, compared at every length. */
static void check_logits(const char *name)
{
    char dir[256];
    Error error = {""};
    ModelInfo info;
    snprintf(dir, sizeof dir, FIXTURES "%s", name);
    TEST("a model that transformers saved computes its logits: %s", name);
    if (!CHECK(!model_inspect(dir, &info, &error), "%s", error.text)) return;
    CHECK(info.end_of_text == info.config.vocab - 1, "end of text is %d", info.end_of_text);
    Gpt *gpt = model_open(&info.config);
    Safetensors *file = safetensors_open(in(dir, "expected.safetensors"), &error);
    if (CHECK(gpt && file, "%s", error.text) && CHECK(!model_load(dir, gpt, &error), "%s", error.text)) {
        const SafetensorsTensor *tokens = safetensors_find(file, "tokens"), *logits = safetensors_find(file, "logits");
        int64_t T = tokens->shape[0], V = info.config.vocab;
        int32_t *sequence = malloc(tokens->bytes);
        float *expected = malloc(logits->bytes), *got = malloc((size_t)V * sizeof *got);
        double largest = 0, worst = 0;
        memcpy(sequence, tokens->data, tokens->bytes);
        memcpy(expected, logits->data, logits->bytes);
        for (int64_t i = 0; i < T * V; i++) largest = fmax(largest, fabs((double)expected[i]));
        for (int64_t t = 1; t <= T; t++) {
            gpt_logits(gpt, got, sequence, t);
            for (int64_t v = 0; v < V; v++) worst = fmax(worst, fabs((double)got[v] - (double)expected[(t - 1) * V + v]));
        }
        CHECK(T == info.config.context && largest > 1 && worst <= MODEL_LOGITS * largest, "error %g of %g, allowed %g",
              worst, largest, MODEL_LOGITS * largest);
        free(sequence);
        free(expected);
        free(got);
    }
    safetensors_close(file);
    gpt_free(gpt);
}

/* A copy of the sharded fixture. */
static const char *copy_sharded(const char *name)
{
    static const char *const files[] = {"config.json", "model.safetensors.index.json", "model-00001-of-00003.safetensors",
                                        "model-00002-of-00003.safetensors", "model-00003-of-00003.safetensors"};
    const char *dir = fresh(name);
    for (size_t i = 0; i < sizeof files / sizeof files[0]; i++)
        copy_bytes(in(dir, files[i]), in(FIXTURES "sharded", files[i]));
    return dir;
}

static void test_shards(void)
{
    static const struct { const char *old, *new, *words; } cases[] = {
        {"\"transformer.ln_f.bias\": \"model-00003", "\"transformer.ln_f.bias\": \"model-00001",
         "00001-of-00003.safetensors: the tensor \"transformer.ln_f.bias\", which"},
        {"\"model-00002-of-00003.safetensors\"", "\"../x.safetensors\"", "weight_map names \"../x.safetensors\""},
        {"\"model-00002-of-00003.safetensors\"", "\"\"", "weight_map names \"\""},
        {"\"model-00002-of-00003.safetensors\"", "\"model-9.safetensors\"", "model-9.safetensors: cannot open it"},
        {"\"model-00002-of-00003.safetensors\"", "2", "has no name of a file"},
        {"\"weight_map\"", "\"weights\"", "\"weight_map\" is no object"},
        {"\"transformer.ln_f.bias\"", "\"ln_f\"", "the tensor \"ln_f\", which"},
        {"{", "[", "not JSON"},
    };
    Error error = {""};
    ModelInfo info;
    const char *dir;
    if (model_inspect(FIXTURES "sharded", &info, &error)) return;
    Gpt *gpt = model_open(&info.config), *other = model_open(&info.config);
    TEST("an index by its own path is the directory that it lies in");
    CHECK(!model_load(FIXTURES "sharded", gpt, &error), "%s", error.text);
    CHECK(!model_load(FIXTURES "sharded/model.safetensors.index.json", other, &error), "%s", error.text);
    CHECK(model_hash(gpt) == model_hash(other), "another model");
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        TEST("an index that disagrees with its files is refused, and the model stays what it was: %s", cases[i].words);
        dir = copy_sharded("shards");
        replace_words(in(dir, "model.safetensors.index.json"), cases[i].old, cases[i].new);
        uint64_t hash = (gpt_init_random(other, 3), model_hash(other));
        CHECK(model_load(dir, other, &error) && strstr(error.text, cases[i].words), "'%s'", error.text);
        CHECK(model_hash(other) == hash, "the model was changed");
    }
    TEST("a tensor in two files, one that no file has, a file cut short");
    dir = copy_sharded("shards");
    copy_bytes(in(dir, "model-00002-of-00003.safetensors"), in(dir, "model-00001-of-00003.safetensors"));
    CHECK(model_load(dir, other, &error) && strstr(error.text, "00001-of-00003"), "'%s'", error.text);
    put_text(in(dir, "model.safetensors.index.json"), "{\"weight_map\": {\"transformer.wte.weight\": \"model-00001-of-00003."
             "safetensors\", \"transformer.wpe.weight\": \"model-00002-of-00003.safetensors\"}}");
    CHECK(model_load(dir, other, &error) && strstr(error.text, "is also in"), "'%s'", error.text);
    put_text(in(dir, "model.safetensors.index.json"),
             "{\"weight_map\": {\"transformer.wte.weight\": \"model-00001-of-00003.safetensors\"}}");
    CHECK(model_load(dir, other, &error) && strstr(error.text, "is missing") && strstr(error.text, "index.json"), "'%s'",
          error.text);
    dir = copy_sharded("shards");
    CHECK(!truncate(in(dir, "model-00002-of-00003.safetensors"), 9000), "cannot cut it");
    CHECK(model_load(dir, other, &error) && strstr(error.text, "00002-of-00003"), "'%s'", error.text);
    gpt_free(gpt);
    gpt_free(other);
}

static void test_paths(void)
{
    const char *dir = fresh("paths");
    Error error = {""};
    ModelInfo info;
    Gpt *gpt = model_open(&tiny);
    TEST("what is no model is refused with a sentence that says what is expected");
    CHECK(model_inspect(in(dir, "none"), &info, &error) && strstr(error.text, "none: cannot open it: No such file"), "'%s'",
          error.text);
    put_bytes(in(dir, "pytorch_model.bin"), "PK\3\4 and so on", 12);
    CHECK(model_inspect(in(dir, "pytorch_model.bin"), &info, &error) && strstr(error.text, "pickle"), "'%s'", error.text);
    CHECK(model_load(in(dir, "pytorch_model.bin"), gpt, &error) && strstr(error.text, "pickle"), "'%s'", error.text);
    CHECK(model_load(dir, gpt, &error) && strstr(error.text, "pytorch_model.bin: is a pickle"), "'%s'", error.text);
    put_bytes(in(dir, "old.pt"), "\x80\x02}q", 4);
    CHECK(model_inspect(in(dir, "old.pt"), &info, &error) && strstr(error.text, "pickle"), "'%s'", error.text);
    unlink(in(dir, "pytorch_model.bin"));
    CHECK(model_load(dir, gpt, &error) && strstr(error.text, "holds neither model.safetensors nor"), "'%s'", error.text);
    put_text(in(dir, "model.safetensors"), "text");
    CHECK(model_inspect(in(dir, "model.safetensors"), &info, &error) && strstr(error.text, "no config.json beside it"),
          "'%s'", error.text);
    CHECK(model_load(dir, gpt, &error) && strstr(error.text, "model.safetensors has 4 bytes"), "'%s'", error.text);
    gpt_free(gpt);
}

static void test_config(void)
{
#define SIZES "\"n_layer\":2,\"n_head\":2,\"n_embd\":16,\"n_positions\":8,\"vocab_size\":37"
#define GPT2 "\"model_type\":\"gpt2\"," SIZES
    static const struct { const char *text, *words; } cases[] = {
        {"{" GPT2 "}", NULL}, {"{" GPT2 ",\"n_inner\":null,\"activation_function\":\"gelu_pytorch_tanh\"}", NULL},
        {"{" GPT2 ",\"n_inner\":64,\"layer_norm_epsilon\":0.00001,\"scale_attn_weights\":true,\"task\":{\"a\":[]}}", NULL},
        {"", "a value"}, {"[]", "no JSON object"}, {"{}", "\"n_layer\" is missing"}, {"{" SIZES "}", "\"model_type\""},
        {"{\"model_type\":\"llama\"," SIZES "}", "\"llama\""}, {"{\"model_type\":7," SIZES "}", "\"model_type\""},
        {"{" GPT2 ",\"activation_function\":\"gelu\"}", "\"gelu\", \"gelu_new\""},
        {"{" GPT2 ",\"activation_function\":null}", "\"activation_function\""},
        {"{" GPT2 ",\"layer_norm_epsilon\":1e-6}", "1e-6, 1e-05 is expected"},
        {"{" GPT2 ",\"n_inner\":32}", "is 32, null or 64"},
        {"{" GPT2 ",\"n_inner\":\"64\"}", "\"n_inner\""}, {"{" GPT2 ",\"scale_attn_weights\":false}", "must be true"},
        {"{" GPT2 ",\"scale_attn_by_inverse_layer_idx\":true}", "must be false"},
        {"{" GPT2 ",\"tie_word_embeddings\":false}", "must be true"},
        {"{" GPT2 ",\"add_cross_attention\":true}", "must be false"},
        {"{\"n_layer\":0}", "\"n_layer\" is 0"}, {"{\"n_layer\":2.5}", "2.5"}, {"{\"n_layer\":\"2\"}", "no number"},
        {"{\"n_layer\":9223372036854775807}", "at most 2147483647"}, {"{\"n_layer\":1e30}", "\"n_layer\" is 1e30"},
        {"{\"model_type\":\"gpt2\",\"n_layer\":2,\"n_head\":3,\"n_embd\":16,\"n_positions\":8,\"vocab_size\":37}",
         "divisible"},
    };
    const char *dir = fresh("config");
    Error error = {""};
    TEST("config.json: GPT-2 as published is read, everything else is refused and changes nothing");
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        ModelInfo info = {.config.layers = 99};
        put_text(in(dir, "config.json"), cases[i].text);
        if (!cases[i].words)
            CHECK(!model_inspect(dir, &info, &error) && !memcmp(&info.config, &tiny, sizeof tiny), "%s: %s",
                  cases[i].text, error.text);
        else
            CHECK(model_inspect(dir, &info, &error) && strstr(error.text, cases[i].words) &&
                  strstr(error.text, "/config.json") && info.config.layers == 99, "%s: '%s'", cases[i].text, error.text);
    }
    unlink(in(dir, "config.json"));
    CHECK(model_inspect(dir, &(ModelInfo){0}, &error) && strstr(error.text, "No such file"), "'%s'", error.text);
}

/* --- llm.c ------------------------------------------------------------------------------------------------------------ */

/* fp32 to bf16 by the rule: to the nearest, ties to even. */
static uint16_t to_bf16(float value)
{
    uint32_t bits, low;
    memcpy(&bits, &value, 4);
    low = bits & 0xFFFF;
    bits >>= 16;
    if (low > 0x8000 || (low == 0x8000 && bits & 1)) bits++;
    return (uint16_t)bits;
}

/* Appends a tensor of the model to `out`, and `padding` rows of `fill`. */
static uint8_t *append_tensor(uint8_t *out, const Gpt *gpt, const char *name, int64_t padding, float fill, int bf16)
{
    for (size_t i = 0; i < gpt_tensor_count(gpt); i++) {
        const GptTensor *tensor = gpt_tensor(gpt, i);
        if (strcmp(tensor->name, name)) continue;
        int64_t n = tensor->rows * tensor->columns, all = n + padding * tensor->columns;
        float *values = malloc((size_t)all * sizeof *values);
        gpt_read(gpt, GPT_PARAMETERS, i, 0, tensor->rows, values);
        for (int64_t k = n; k < all; k++) values[k] = fill;
        for (int64_t k = 0; k < all; k++) {
            uint16_t half = to_bf16(values[k]);
            if (bf16) memcpy(out, &half, 2);
            else memcpy(out, &values[k], 4);
            out += bf16 ? 2 : 4;
        }
        free(values);
        return out;
    }
    CHECK(0, "no tensor %s", name);
    return out;
}

/* llm.c's file of a model, by the words of llmc.h. Returns its size. */
static size_t llmc_by_hand(uint8_t *bytes, const Gpt *gpt, int64_t Vp, float fill, int bf16)
{
    static const char *const in_blocks[] = {"ln_1.weight", "ln_1.bias", "attn.c_attn.weight", "attn.c_attn.bias",
                                            "attn.c_proj.weight", "attn.c_proj.bias", "ln_2.weight", "ln_2.bias",
                                            "mlp.c_fc.weight", "mlp.c_fc.bias", "mlp.c_proj.weight", "mlp.c_proj.bias"};
    const GptConfig *c = gpt_config(gpt);
    int32_t header[8] = {20240326, bf16 ? 5 : 3, (int32_t)c->context, (int32_t)c->vocab, (int32_t)c->layers,
                         (int32_t)c->heads, (int32_t)c->channels, (int32_t)Vp};
    uint8_t *out = bytes + HEADER_BYTES;
    char name[64];
    memset(bytes, 0, HEADER_BYTES);
    memcpy(bytes, header, sizeof header);
    out = append_tensor(out, gpt, "transformer.wte.weight", Vp - c->vocab, fill, bf16);
    out = append_tensor(out, gpt, "transformer.wpe.weight", 0, 0, bf16);
    for (size_t k = 0; k < sizeof in_blocks / sizeof in_blocks[0]; k++)
        for (int64_t l = 0; l < c->layers; l++) {
            snprintf(name, sizeof name, "transformer.h.%d.%s", (int)l, in_blocks[k]);
            out = append_tensor(out, gpt, name, 0, 0, bf16);
        }
    out = append_tensor(out, gpt, "transformer.ln_f.weight", 0, 0, bf16);
    out = append_tensor(out, gpt, "transformer.ln_f.bias", 0, 0, bf16);
    return (size_t)(out - bytes);
}

static void test_llmc(void)
{
    static uint8_t bytes[MOST];
    const char *dir = fresh("llmc");
    Gpt *gpt = model_open(&tiny), *other = model_open(&tiny);
    Error error = {""};
    ModelInfo info;
    for (int bf16 = 0; bf16 < 2; bf16++) {
        const char *path = under_root("llmc/by_hand.bin"), *written = under_root("llmc/written.bin");
        TEST("llm.c's file, version %d: written to the byte, read to the bit, padding passed over", bf16 ? 5 : 3);
        unlink(written);
        model_fill(gpt, 21);
        size_t size = llmc_by_hand(bytes, gpt, 128, 0, bf16);
        put_bytes(path, bytes, size);
        CHECK(!llmc_write(written, gpt, bf16, &error), "%s", error.text);
        CHECK(same_bytes(path, written), "other bytes than by hand");
        CHECK(!model_inspect(path, &info, &error) && !memcmp(&info.config, &tiny, sizeof tiny) && info.end_of_text == -1,
              "end of text %d: %s", info.end_of_text, error.text);
        size = llmc_by_hand(bytes, gpt, 40, NAN, bf16); /* what padding holds does not matter */
        put_bytes(path, bytes, size);
        model_fill(other, 22);
        CHECK(!model_load(path, other, &error), "%s", error.text);
        unlink(path);
        CHECK(!llmc_write(path, other, bf16, &error) && same_bytes(path, written), "came back otherwise: %s", error.text);
        CHECK(llmc_write(path, other, bf16, &error) && strstr(error.text, "File exists"), "'%s'", error.text);
        float values[64];
        for (size_t i = 0; bf16 && i < gpt_tensor_count(gpt); i++) { /* what was rounded stays as it is */
            gpt_read(other, GPT_PARAMETERS, i, 0, 1, values);
            uint32_t word;
            memcpy(&word, &values[3], 4);
            CHECK(!(word & 0xFFFF), "an element has more than bf16's bits");
        }
    }
    TEST("a value that bf16 cannot hold is named, and no file is left");
    float huge = 3.4e38f;
    gpt_write(gpt, GPT_PARAMETERS, gpt_tensor_count(gpt) - 1, 0, 1, (float[16]){huge, huge});
    CHECK(llmc_write(in(dir, "huge.bin"), gpt, 1, &error) && strstr(error.text, "transformer.ln_f.bias"), "'%s'",
          error.text);
    CHECK(access(in(dir, "huge.bin"), F_OK), "huge.bin is left");
    CHECK(weights_write(in(dir, "huge"), gpt, &weights_parameters, "BF16", &error) && strstr(error.text, "ln_f.bias"),
          "'%s'", error.text);
    CHECK(access(in(dir, "huge"), F_OK), "huge is left");
    CHECK(!llmc_write(in(dir, "huge.bin"), gpt, 0, &error), "%s", error.text);
    gpt_free(gpt);
    gpt_free(other);
}

static void test_llmc_faults(void)
{
    static uint8_t bytes[MOST];
    static const struct { int word; int32_t value; const char *words; } headers[] = {
        {1, 1, "version 1 at byte 4, expected 3 (fp32) or 5 (bf16)"}, {1, 5, "bytes, expected"}, {2, 9, "bytes, expected"},
        {2, 0, "context is 0"}, {3, 200, "padded vocabulary 128 at byte 28, expected at least the vocabulary, 200"},
        {4, -1, "layers is -1"}, {4, 3, "bytes, expected"}, {5, 3, "not divisible by heads 3"}, {6, 18, "bytes, expected"},
        {6, INT32_MAX, "dim is 2147483647"}, {7, 256, "bytes, expected"}, {7, -128, "padded vocabulary -128"},
    };
    const char *path = under_root("llmc/fault.bin");
    Gpt *gpt = model_open(&tiny), *other;
    GptConfig shape = tiny;
    Error error = {""};
    ModelInfo info;
    TEST("a file of llm.c with a wrong header or size is refused with a sentence");
    size_t size = llmc_by_hand(bytes, gpt, 128, 0, 0);
    for (size_t i = 0; i < sizeof headers / sizeof headers[0]; i++) {
        int32_t kept;
        memcpy(&kept, bytes + 4 * headers[i].word, 4);
        memcpy(bytes + 4 * headers[i].word, &headers[i].value, 4);
        put_bytes(path, bytes, size);
        memcpy(bytes + 4 * headers[i].word, &kept, 4);
        CHECK(model_inspect(path, &info, &error) && strstr(error.text, headers[i].words) && strstr(error.text, path),
              "word %d = %d: '%s'", headers[i].word, headers[i].value, error.text);
        CHECK(model_load(path, gpt, &error), "word %d = %d: was loaded", headers[i].word, headers[i].value);
    }
    for (size_t cut = 1; cut < size - 4; cut += size / 7) {
        put_bytes(path, bytes, size - cut);
        CHECK(model_inspect(path, &info, &error) && strstr(error.text, "bytes"), "cut by %zu: '%s'", cut, error.text);
    }
    put_bytes(path, bytes, size + 1);
    CHECK(model_inspect(path, &info, &error) && strstr(error.text, "bytes, expected"), "'%s'", error.text);
    put_bytes(path, bytes, 100);
    CHECK(llmc_inspect(path, &info.config, &error) && strstr(error.text, "has a header of 1024"), "'%s'", error.text);

    TEST("values that are not finite and other shapes are refused, and the model stays what it was");
    uint64_t hash = (model_fill(gpt, 23), model_hash(gpt));
    float value = NAN;
    size = llmc_by_hand(bytes, gpt, 128, 0, 0);
    memcpy(bytes + HEADER_BYTES + 4 * (128 * 16 + 3 * 16 + 5), &value, 4);
    put_bytes(path, bytes, size);
    CHECK(model_load(path, gpt, &error) && strstr(error.text, "\"transformer.wpe.weight\" has nan in row 3, column 5"),
          "'%s'", error.text);
    CHECK(model_hash(gpt) == hash, "the model was changed");
    size = llmc_by_hand(bytes, gpt, 128, 0, 0);
    value = -INFINITY;
    memcpy(bytes + size - 4, &value, 4);
    put_bytes(path, bytes, size);
    CHECK(model_load(path, gpt, &error) && strstr(error.text, "ln_f.bias\" has -inf in row 0, column 15"), "'%s'",
          error.text);
    CHECK(model_hash(gpt) == hash, "the model was changed");
    shape.heads = 4;
    other = model_open(&shape);
    put_bytes(path, bytes, llmc_by_hand(bytes, gpt, 128, 0, 0));
    CHECK(model_load(path, other, &error) && strstr(error.text, "heads 2 in its header, the model has 4"), "'%s'",
          error.text);
    gpt_free(gpt);
    gpt_free(other);
}

/* --- tokenizers ------------------------------------------------------------------------------------------------------- */

/* 256 bytes in a mixed order, four merges among other tokens, end of text in the middle; with GPT-2's rule or none. */
static Tokenizer *make_tokenizer(TokenizerRule rule, Error *error)
{
    static const char *const longer[] = {"ab", "\xc3\xa9", "<|end|>", "abc", " \n", "abc \n"};
    static const BpeMerge merges[] = {{'a' ^ 1, 'b' ^ 1, 256}, {0xC3 ^ 1, 0xA9 ^ 1, 257}, {' ' ^ 1, '\n' ^ 1, 260},
                                      {256, 'c' ^ 1, 259}, {259, 260, 261}};
    TokenizerParts parts = {.table = malloc(1024), .vocab = 262, .end_of_text = 258, .rule = rule,
                            .merges = malloc(sizeof merges)};
    for (int b = 0; b < 256; b++) {
        parts.table[parts.table_bytes++] = 1;
        parts.table[parts.table_bytes++] = (uint8_t)(b ^ 1);
    }
    for (int i = 0; i < 6; i++) {
        parts.table[parts.table_bytes++] = (uint8_t)strlen(longer[i]);
        memcpy(parts.table + parts.table_bytes, longer[i], strlen(longer[i]));
        parts.table_bytes += strlen(longer[i]);
    }
    memcpy(parts.merges, merges, sizeof merges);
    parts.merge_count = rule ? sizeof merges / sizeof merges[0] : 0;
    return tokenizer_make("made", parts, error);
}

/* Two tokenizers have the same table, merges and end. */
static int same_tokenizer(const Tokenizer *a, const Tokenizer *b)
{
    const TokenizerParts *x = tokenizer_parts(a), *y = tokenizer_parts(b);
    return x->vocab == y->vocab && x->end_of_text == y->end_of_text && x->rule == y->rule &&
           x->table_bytes == y->table_bytes && !memcmp(x->table, y->table, x->table_bytes) &&
           x->merge_count == y->merge_count && !memcmp(x->merges, y->merges, x->merge_count * sizeof *x->merges);
}

static void test_vocabulary(void)
{
    const char *dir = fresh("vocabulary");
    uint8_t *bytes;
    size_t count;
    Error error = {""};
    Tokenizer *tokenizer = make_tokenizer(TOKENIZER_GPT2, &error), *back;
    TEST("vocab.json and merges.txt: a tokenizer goes out and comes back");
    if (!CHECK(tokenizer, "%s", error.text)) return;
    CHECK(!vocabulary_write(dir, tokenizer, 99, &error), "%s", error.text);
    CHECK(!strcmp(list(dir), "merges.txt tokenizer_config.json vocab.json "), "written: %s", list(dir));
    count = get_bytes(in(dir, "merges.txt"), &bytes);
    bytes[count] = 0;
    CHECK(!strcmp((char *)bytes, "#version: 0.2\na b\n\xc3\x83 \xc2\xa9\n\xc4\xa0 \xc4\x8a\nab c\nabc \xc4\xa0\xc4\x8a\n"),
          "merges are '%s'", bytes);
    count = get_bytes(in(dir, "tokenizer_config.json"), &bytes);
    bytes[count] = 0;
    CHECK(strstr((char *)bytes, "\"model_max_length\": 99") && strstr((char *)bytes, "\"eos_token\": \"<|end|>\""), "'%s'",
          bytes);
    error.text[0] = 0;
    back = vocabulary_open(dir, &error);
    CHECK(!back && strstr(error.text, "no token \"<|endoftext|>\""), "another end of text was found: '%s'", error.text);
    replace_words(in(dir, "vocab.json"), "<|end|>", "<|endoftext|>");
    back = vocabulary_open(dir, &error);
    if (CHECK(back, "%s", error.text)) {
        const TokenizerParts *parts = tokenizer_parts(back), *made = tokenizer_parts(tokenizer);
        CHECK(parts->vocab == 262 && parts->rule == TOKENIZER_GPT2 && parts->end_of_text == 258 && parts->merge_count == 5 &&
              !memcmp(parts->merges, made->merges, 5 * sizeof *made->merges) && !memcmp(parts->table, made->table, 516),
              "it came back with %zu merges", parts->merge_count);
    }
    tokenizer_close(back);
    CHECK(vocabulary_write(dir, tokenizer, 99, &error) == -1 && strstr(error.text, "File exists"), "'%s'", error.text);
    CHECK(!rename(in(dir, "vocab.json"), in(dir, "encoder.json")) && !rename(in(dir, "merges.txt"), in(dir, "vocab.bpe")),
          "cannot rename");
    back = vocabulary_open(dir, &error);
    CHECK(back && tokenizer_vocab(back) == 262, "OpenAI's names: %s", error.text);
    tokenizer_close(back);
    CHECK(!tokenizer_write(tokenizer, in(dir, "tokenizer.bin"), &error), "%s", error.text);
    back = vocabulary_open(dir, &error);
    CHECK(back && same_tokenizer(back, tokenizer), "tokenizer.bin beside them: %s", error.text);
    tokenizer_close(back);
    tokenizer_close(tokenizer);

    TEST("vocab.json: not for a tokenizer that cuts in another way; none where there is none");
    dir = fresh("vocabulary");
    tokenizer = make_tokenizer(TOKENIZER_UNKNOWN, &error);
    CHECK(vocabulary_write(dir, tokenizer, 99, &error) == 1 && !*list(dir), "written: %s", list(dir));
    tokenizer_close(tokenizer);
    error.text[0] = 'x';
    CHECK(!vocabulary_open(dir, &error) && !error.text[0], "'%s'", error.text);
    CHECK(!vocabulary_open(in(dir, "none"), &error) && !error.text[0], "'%s'", error.text);
}

static void test_vocabulary_faults(void)
{
#define BYTE_LEVEL "\"pre_tokenizer\": {\"type\": \"ByteLevel\"}"
    static const struct { const char *vocab, *merges, *words; } cases[] = {
        {"[]", "", "expected an object"}, {"{}", "", "expected an object"},
        {"{\"a\": 1.5}", "", "\"a\" has no whole number"},
        {"{\"a\": -1}", "", "has number -1, expected 0 to"}, {"{\"a\": 16777216}", "", "has number 16777216"},
        {"{\"a\": 0}", "", "no token \"<|endoftext|>\""}, {"{\"a\": 0, \"b\": 0}", "", "\"a\" and \"b\" both have number 0"},
        {"{\"<|endoftext|>\": 0, \"a\": 1}", "", "no token for byte 0x00"}, {"{\"a\": ", "", "not JSON"},
        {"{\"<|endoftext|>\": 0, \"a\": 1}", "#version: 0.2\na b\n", "merge 1: expected two tokens that join to a third"},
        {"{\"<|endoftext|>\": 0, \"a\": 1}", "ab\n", "merge 1: expected two tokens, got \"ab\""},
    };
    static const struct { const char *text, *words; } others[] = {
        {"{}", "with a model in it"}, {"[1]", "with a model in it"},
        {"{\"model\": {\"type\": \"WordPiece\", \"vocab\": {\"a\": 0}}}", ""},
        {"{\"model\": {\"type\": \"BPE\", \"vocab\": {\"a\": 0}}}", ""},
        {"{" BYTE_LEVEL ", \"model\": {\"type\": \"BPE\", \"vocab\": {\"a\": 0}}}", ""}, /* no end of text */
        {"{" BYTE_LEVEL ", \"model\": {\"type\": \"BPE\", \"vocab\": 7}}", "expected an object"},
        {"{" BYTE_LEVEL ", \"added_tokens\": [{\"id\": 1}], \"model\": {\"vocab\": {\"a\": 0}}}",
         "an added token lacks its content"},
        {"{" BYTE_LEVEL ", \"added_tokens\": [{\"id\": 1, \"content\": \"</s>\", \"special\": true}],"
         "\"model\": {\"vocab\": {\"a\": 0}, \"merges\": [3]}}", "merge 1 is no pair"},
    };
    const char *dir = fresh("faults");
    Error error = {""};
    TEST("vocab.json and merges.txt that are wrong are refused with a sentence");
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        put_text(in(dir, "vocab.json"), cases[i].vocab);
        put_text(in(dir, "merges.txt"), cases[i].merges);
        CHECK(!vocabulary_open(dir, &error) && strstr(error.text, cases[i].words), "%s: '%s'", cases[i].vocab, error.text);
    }
    TEST("tokenizer.json: faults have a sentence, kinds that are not read here have none");
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++) {
        put_text(in(dir, "tokenizer.json"), others[i].text);
        CHECK(!vocabulary_open(dir, &error) && (*others[i].words ? strstr(error.text, others[i].words) != NULL
                                                                 : !error.text[0]), "%s: '%s'", others[i].text, error.text);
    }
}

/* --- going out -------------------------------------------------------------------------------------------------------- */

static void test_export(void)
{
    static const struct { ModelFormat format; const char *name; } formats[] = {
        {MODEL_LLMC, "llmc.bin"}, {MODEL_LLMC_BF16, "llmc5.bin"}, {MODEL_HF, "hf"}, {MODEL_BF16, "bf16"}};
    const GptConfig config = {.layers = 2, .heads = 2, .channels = 16, .context = 8, .vocab = 262};
    const char *dir = fresh("export");
    char out[128], before[256];
    Gpt *gpt = model_open(&config), *other = model_open(&config);
    Error error = {""};
    ModelInfo info;
    struct rlimit old, low;
    Tokenizer *tokenizer = make_tokenizer(TOKENIZER_GPT2, &error), *back;
    model_fill(gpt, 31);
    for (size_t i = 0; i < sizeof formats / sizeof formats[0]; i++) {
        TEST("export: %s is read as what it was, and what is there already stays", formats[i].name);
        snprintf(out, sizeof out, "%s/%s/", dir, formats[i].name); /* the slash at its end does not matter */
        CHECK(!model_export(out, formats[i].format, gpt, tokenizer, 5, &error), "%s", error.text);
        out[strlen(out) - 1] = 0;
        CHECK(!model_inspect(out, &info, &error) && !memcmp(&info.config, &config, sizeof config), "%s", error.text);
        CHECK(!model_load(out, other, &error), "%s", error.text);
        float ours[64], theirs[64];
        for (size_t k = 0; k < gpt_tensor_count(gpt); k++) {
            gpt_read(gpt, GPT_PARAMETERS, k, 0, 1, ours);
            gpt_read(other, GPT_PARAMETERS, k, 0, 1, theirs);
            for (int c = 0; c < 16; c++) {
                uint32_t bits = (uint32_t)to_bf16(ours[c]) << 16;
                float rounded;
                memcpy(&rounded, &bits, 4);
                CHECK(theirs[c] == (i % 2 ? rounded : ours[c]), "%s: %g came back as %g", gpt_tensor(gpt, k)->name,
                      (double)ours[c], (double)theirs[c]);
            }
        }
        snprintf(before, sizeof before, "%s", list(dir));
        CHECK(model_export(out, formats[i].format, gpt, tokenizer, 5, &error) && strstr(error.text, "exists already"),
              "'%s'", error.text);
        CHECK(!strcmp(before, list(dir)), "left behind: %s", list(dir));
    }
    TEST("export: the tokenizer lies beside, its end of text in config.json; without one the token that was given");
    back = model_tokenizer(in(dir, "bf16"), &error);
    CHECK(back && same_tokenizer(back, tokenizer), "%s", error.text);
    tokenizer_close(back);
    CHECK(!model_inspect(in(dir, "hf"), &info, &error) && info.end_of_text == 258, "end of text %d", info.end_of_text);
    CHECK(!strcmp(list(in(dir, "hf")), "config.json merges.txt model.safetensors tokenizer.bin tokenizer_config.json "
                                       "vocab.json "), "%s", list(in(dir, "hf")));
    CHECK(!model_export(in(dir, "bare"), MODEL_HF, gpt, NULL, 5, &error) && !strcmp(list(in(dir, "bare")),
          "config.json model.safetensors "), "%s", list(in(dir, "bare")));
    CHECK(!model_inspect(in(dir, "bare"), &info, &error) && info.end_of_text == 5, "end of text %d", info.end_of_text);
    CHECK(!model_tokenizer(in(dir, "bare"), &error) && !error.text[0], "'%s'", error.text);

    TEST("export: a full disk leaves nothing, and so does a directory that is not there");
    snprintf(before, sizeof before, "%s", list(dir));
    signal(SIGXFSZ, SIG_IGN);
    getrlimit(RLIMIT_FSIZE, &old);
    for (size_t i = 0; i < sizeof formats / sizeof formats[0]; i++) {
        low = (struct rlimit){4000, old.rlim_max};
        setrlimit(RLIMIT_FSIZE, &low);
        error.text[0] = 0;
        int result = model_export(in(dir, "full"), formats[i].format, gpt, tokenizer, 5, &error);
        setrlimit(RLIMIT_FSIZE, &old);
        CHECK(result && strstr(error.text, "write"), "%s: '%s'", formats[i].name, error.text);
        CHECK(!strcmp(before, list(dir)), "%s left behind: %s", formats[i].name, list(dir));
        CHECK(model_export(in(dir, "none/full"), formats[i].format, gpt, tokenizer, 5, &error) &&
              strstr(error.text, "No such file"), "'%s'", error.text);
    }
    tokenizer_close(tokenizer);
    gpt_free(gpt);
    gpt_free(other);
}

int main(void)
{
    if (directories_open()) return perror(root), 1;
    check_logits("plain");
    check_logits("sharded");
    check_logits("half");
    test_shards();
    test_paths();
    test_config();
    test_llmc();
    test_llmc_faults();
    test_vocabulary();
    test_vocabulary_faults();
    test_export();
    directories_close();
    return test_end();
}
