/* Checkpoints: what is saved comes back to the bit; a damaged, foreign or misfitting one is refused whole. */
#include <signal.h>
#include <sys/resource.h>

#include "data/checkpoint.h"
#include "data/json.h"
#include "data/model.h"
#include "data/safetensors.h"
#include "model_files.h"
#include "test.h"

enum { COPIES_MOST = 64 };

static const GptConfig tiny = {.layers = 2, .heads = 2, .channels = 16, .context = 8, .vocab = 37};
static const CheckpointState plain = {.step = 7, .data_position = 9007199254740993, .seed = UINT64_MAX,
                                      .validation_loss = 0.1 + 0.2, .seconds = 1e-300,
                                      .data_fingerprint = 0xFFFFFFFFFFFFFFFEu};

/* A tokenizer of so many bytes, from 'A' on, the last of which ends texts. */
static Tokenizer *tokenizer_of(int64_t vocab, Error *error)
{
    TokenizerParts parts = {.table = malloc((size_t)(2 * vocab)), .table_bytes = (size_t)(2 * vocab), .vocab = vocab,
                            .end_of_text = (int32_t)vocab - 1};
    for (int64_t t = 0; t < vocab; t++) {
        parts.table[2 * t] = 1;
        parts.table[2 * t + 1] = (uint8_t)('A' + t);
    }
    return tokenizer_make("letters", parts, error);
}

/* Saves at a step; the checkpoint's path, or "" after a failed check. */
static const char *save(const char *dir, const Gpt *gpt, int64_t step)
{
    static char path[1024];
    CheckpointState state = plain;
    Error error = {""};
    state.step = step;
    return CHECK(!checkpoint_save(dir, gpt, &state, NULL, 36, path, sizeof path, &error), "%s", error.text) ? path : "";
}

/* How one file of tensors is turned into another. */
typedef struct Change {
    const char *drop_prefix; /* cut from names that begin with it */
    const char *dtype;       /* F16 or BF16: convert all; NULL: as they are */
    const char *omit;        /* a tensor to leave out */
    const char *twice;       /* a tensor to write once more, under the name `as`, its first byte changed by `flip` */
    const char *as;
    int flip;
    const char *spoil;       /* a tensor whose element `at` becomes `value` */
    int64_t at;
    float value;
} Change;

/* Truncates to bfloat16; for values that binary16 has, to that. Both exact for what the test stores. */
static uint16_t narrow(float value, int half)
{
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if (!half || value == 0) return (uint16_t)(bits >> 16);
    return (uint16_t)((bits >> 16 & 0x8000) | ((bits >> 23 & 0xFF) - 112) << 10 | (bits >> 13 & 0x3FF));
}

static void copy_changed(const char *to, const char *from, const Change *change)
{
    SafetensorsTensor tensors[COPIES_MOST];
    const SafetensorsTensor *sources[COPIES_MOST];
    size_t n = 0, cut = change->drop_prefix ? strlen(change->drop_prefix) : 0;
    Error error = {""};
    Safetensors *file = safetensors_open(from, &error);
    SafetensorsWriter *writer;
    if (!CHECK(file, "%s", error.text)) return;
    for (size_t i = 0; i < safetensors_count(file); i++) {
        const SafetensorsTensor *tensor = safetensors_at(file, i);
        if (change->omit && !strcmp(tensor->name, change->omit)) continue;
        sources[n] = tensor;
        tensors[n] = *tensor;
        if (cut && !strncmp(tensor->name, change->drop_prefix, cut)) tensors[n].name += cut;
        if (change->dtype) {
            tensors[n].dtype = change->dtype;
            tensors[n].bytes /= 2;
        }
        n++;
        if (!change->twice || strcmp(tensor->name, change->twice)) continue;
        sources[n] = tensor;
        tensors[n] = tensors[n - 1];
        tensors[n++].name = change->as;
    }
    unlink(to);
    writer = safetensors_create(to, tensors, n, NULL, &error);
    for (size_t i = 0; writer && i < n; i++) {
        int64_t count = (int64_t)(sources[i]->bytes / 4);
        uint16_t *words = malloc((size_t)count * 2);
        float *values = malloc(sources[i]->bytes);
        memcpy(values, sources[i]->data, sources[i]->bytes);
        if (change->spoil && !strcmp(sources[i]->name, change->spoil)) values[change->at] = change->value;
        if (change->as && !strcmp(tensors[i].name, change->as)) *(char *)values ^= (char)change->flip;
        for (int64_t k = 0; k < count; k++) words[k] = narrow(values[k], change->dtype && !strcmp(change->dtype, "F16"));
        CHECK(!safetensors_write(writer, change->dtype ? (void *)words : (void *)values, tensors[i].bytes, &error), "%s",
              error.text);
        free(words);
        free(values);
    }
    CHECK(writer && !safetensors_finish(writer, &error), "%s", error.text);
    safetensors_close(file);
}

/* --- tests ------------------------------------------------------------------------------------------------------------ */

static void test_round_trip(Gpt *gpt, Gpt *other)
{
    const char *dir = fresh("round trip");
    char path[1024], found[1024];
    CheckpointState state = plain, back = {0};
    Error error = {""};
    ModelInfo info;
    Tokenizer *tokenizer = tokenizer_of(37, &error), *copy;
    TEST("parameters, moments and state come back to the bit");
    if (!CHECK(tokenizer, "%s", error.text)) return;
    model_fill(gpt, 1);
    model_fill(other, 2);
    CHECK(model_hash(gpt) != model_hash(other), "the two models are alike");
    CHECK(!checkpoint_save(dir, gpt, &state, tokenizer, 5, path, sizeof path, &error), "%s", error.text);
    CHECK(!strcmp(path, in(dir, "step_00000007")), "path is %s", path);
    CHECK(!strcmp(list(dir), "step_00000007 "), "the directory has %s", list(dir));
    CHECK(!strcmp(list(path), "config.json model.safetensors optimizer.safetensors state.json tokenizer.bin "),
          "the checkpoint has %s", list(path));
    CHECK(checkpoint_newest(dir, found, sizeof found, &error) == 1 && !strcmp(found, path) && !error.text[0],
          "newest is %s (%s)", found, error.text);
    CHECK(!model_inspect(path, &info, &error) && !memcmp(&info.config, &tiny, sizeof tiny) && info.end_of_text == 36,
          "end of text %d: %s", info.end_of_text, error.text);
    CHECK(!model_inspect(in(path, "model.safetensors"), &info, &error) && !memcmp(&info.config, &tiny, sizeof tiny),
          "the shape beside a file: %s", error.text);
    CHECK(!checkpoint_load(path, other, &back, &error), "%s", error.text);
    CHECK(model_hash(gpt) == model_hash(other), "the model that came back is another");
    CHECK(!memcmp(&state, &back, sizeof state), "the state came back as step %lld, position %lld, loss %.17g",
          (long long)back.step, (long long)back.data_position, back.validation_loss);
    copy = model_tokenizer(path, &error);
    CHECK(copy && tokenizer_vocab(copy) == 37 && tokenizer_end_of_text(copy) == 36, "the tokenizer: %s", error.text);
    tokenizer_close(copy);
    tokenizer_close(tokenizer);
    TEST("a loss that was never measured, extreme integers");
    state = (CheckpointState){.step = INT64_MAX, .data_position = INT64_MAX, .validation_loss = NAN, .seconds = 5e-324};
    CHECK(!checkpoint_save(dir, gpt, &state, NULL, -1, path, sizeof path, &error), "%s", error.text);
    CHECK(!checkpoint_load(path, other, &back, &error), "%s", error.text);
    CHECK(isnan(back.validation_loss) && back.data_position == INT64_MAX && back.step == INT64_MAX &&
          back.seconds == 5e-324 &&
          back.seed == 0, "loss %g, position %lld", back.validation_loss, (long long)back.data_position);
    state.step = -1;
    CHECK(checkpoint_save(dir, gpt, &state, NULL, -1, path, sizeof path, &error), "a negative step was saved");
    TEST("parameters alone, from the directory and from the file");
    model_fill(other, 3);
    CHECK(!model_load(path, other, &error), "%s", error.text);
    CHECK(!model_load(in(path, "model.safetensors"), other, &error), "%s", error.text);
    CHECK(model_hash(gpt) != model_hash(other), "the moments were loaded too");
    CHECK(!checkpoint_load(path, other, &back, &error) && model_hash(gpt) == model_hash(other), "%s", error.text);
}

/* Compares every tensor of a file with the model's, element by element through the stated layout. */
static void check_layout(const Gpt *gpt, const char *path, const char *prefix, GptBuffer buffer)
{
    Error error = {""};
    Safetensors *file = safetensors_open(path, &error);
    if (!CHECK(file, "%s", error.text)) return;
    for (size_t i = 0; i < gpt_tensor_count(gpt); i++) {
        const GptTensor *tensor = gpt_tensor(gpt, i);
        int64_t rows = tensor->rows, columns = tensor->columns, faults = 0;
        int vector = strstr(tensor->name, ".bias") || strstr(tensor->name, "ln_") != NULL;
        char name[80];
        const SafetensorsTensor *found;
        const float *in_file;
        float *values = malloc((size_t)(rows * columns) * sizeof *values);
        snprintf(name, sizeof name, "%s%s", prefix, tensor->name);
        found = safetensors_find(file, name);
        if (CHECK(found && !strcmp(found->dtype, "F32"), "%s is missing", name)) {
            int64_t first = tensor->transposed ? columns : rows, last = tensor->transposed ? rows : columns;
            CHECK(vector ? found->rank == 1 && found->shape[0] == columns
                         : found->rank == 2 && found->shape[0] == first && found->shape[1] == last,
                  "%s has rank %d, shape %lld...", name, found->rank, (long long)found->shape[0]);
            gpt_read(gpt, buffer, i, 0, rows, values);
            in_file = (const float *)(const void *)found->data;
            for (int64_t r = 0; r < rows; r++)
                for (int64_t c = 0; c < columns; c++)
                    faults += in_file[tensor->transposed ? c * rows + r : r * columns + c] != values[r * columns + c];
            CHECK(!faults, "%s differs in %lld elements", name, (long long)faults);
        }
        free(values);
    }
    safetensors_close(file);
}

static void test_layout(Gpt *gpt)
{
    const char *path;
    Error error = {""};
    Safetensors *file;
    TEST("files have Hugging Face's names and layout: Conv1D inputs by outputs, no padding");
    model_fill(gpt, 4);
    path = save(fresh("layout"), gpt, 0);
    check_layout(gpt, in(path, "model.safetensors"), "", GPT_PARAMETERS);
    check_layout(gpt, in(path, "optimizer.safetensors"), "m.", GPT_MOMENT1);
    check_layout(gpt, in(path, "optimizer.safetensors"), "v.", GPT_MOMENT2);
    file = safetensors_open(in(path, "model.safetensors"), &error);
    if (!CHECK(file, "%s", error.text)) return;
    CHECK(safetensors_count(file) == 28 && safetensors_metadata(file, "format") &&
          !strcmp(safetensors_metadata(file, "format"), "pt"), "%zu tensors", safetensors_count(file));
    CHECK(safetensors_find(file, "transformer.h.1.attn.c_attn.weight")->shape[0] == 16, "c_attn is not (C, 3 C)");
    CHECK(safetensors_find(file, "transformer.wte.weight")->shape[0] == 37, "wte is padded");
    safetensors_close(file);
}

static long peak_kilobytes(void)
{
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return usage.ru_maxrss;
}

static void test_large(void)
{
    static const GptConfig config = {.layers = 1, .heads = 1, .channels = 736, .context = 3, .vocab = 11000};
    Gpt *gpt = model_open(&config), *other = model_open(&config);
    const char *path;
    CheckpointState state;
    Error error = {""};
    long peak;
    TEST("weights larger than the buffers: the same bits, and memory that does not grow with the model");
    if (!CHECK(gpt && other, "no model")) return;
    model_fill(gpt, 5);
    model_fill(other, 6);
    peak = peak_kilobytes();
    path = save(fresh("large"), gpt, 1);
    CHECK(!checkpoint_load(path, other, &state, &error), "%s", error.text);
    peak = peak_kilobytes() - peak;
    CHECK(peak < 30000, "saving and loading 176 MB took %ld kB more memory", peak);
    CHECK(model_hash(gpt) == model_hash(other), "the model that came back is another");
    check_layout(gpt, in(path, "model.safetensors"), "", GPT_PARAMETERS);
    gpt_free(gpt);
    gpt_free(other);
    remove_all(under_root("large"));
}

static void test_existing(Gpt *gpt, Gpt *other)
{
    const char *dir = fresh("existing"), *path;
    uint64_t first;
    CheckpointState state;
    Error error = {""};
    TEST("a step that is there is left alone; a damaged one is replaced");
    model_fill(gpt, 8);
    first = model_hash(gpt);
    path = save(dir, gpt, 3);
    model_fill(gpt, 9);
    save(dir, gpt, 3);
    CHECK(!checkpoint_load(path, other, &state, &error) && model_hash(other) == first, "it was overwritten: %s",
          error.text);
    CHECK(!truncate(in(path, "optimizer.safetensors"), 1000), "cannot cut the file");
    save(dir, gpt, 3);
    CHECK(!checkpoint_load(path, other, &state, &error) && model_hash(other) == model_hash(gpt),
          "still damaged: %s",
          error.text);
    CHECK(!strcmp(list(dir), "step_00000003 "), "left behind: %s", list(dir));
}

static void test_newest(const Gpt *gpt)
{
    static const char *const files[] = {"config.json", "model.safetensors", "optimizer.safetensors", "state.json"};
    const char *dir = under_root("newest");
    char path[1024] = "";
    Error error = {"old"};
    TEST("the newest of none");
    remove_all(dir);
    CHECK(checkpoint_newest(dir, path, sizeof path, &error) == 0, "in a directory that is not there");
    dir = fresh("newest");
    CHECK(checkpoint_newest(dir, path, sizeof path, &error) == 0 && !error.text[0], "in an empty directory: %s", error.text);
    put_text(in(dir, "file"), "");
    CHECK(checkpoint_newest(in(dir, "file"), path, sizeof path, &error) == -1, "in a file");
    TEST("the newest is the one of the highest step, whatever else is there");
    save(dir, gpt, 99999998);
    save(dir, gpt, 99999999);
    save(dir, gpt, 100000000);
    save(dir, gpt, 20);
    mkdir(in(dir, "step_"), 0777);
    mkdir(in(dir, "step_999999999999999999999999"), 0777);
    mkdir(in(dir, "step_0200000000"), 0777);
    mkdir(in(dir, "step_200000000x"), 0777);
    mkdir(in(dir, "step_-0000001"), 0777);
    mkdir(in(dir, ".tmp.step_200000000.1"), 0777);
    CHECK(checkpoint_newest(dir, path, sizeof path, &error) == 1 && !strcmp(path, in(dir, "step_100000000")) &&
          !error.text[0],
          "got %s (%s)", path, error.text);
    CHECK(checkpoint_newest(dir, path, 4, &error) == -1 && strstr(error.text, "longer than 3"), "'%s'", error.text);
    for (size_t i = 0; i < sizeof files / sizeof files[0]; i++)
        for (int cut = 0; cut < 2; cut++) {
            const char *damaged = save(dir, gpt, 300000000);
            TEST("a checkpoint with %s %s is passed over, and named", files[i], cut ? "cut short" : "missing");
            if (cut) CHECK(!truncate(in(damaged, files[i]), 20), "cannot cut the file");
            else unlink(in(damaged, files[i]));
            CHECK(checkpoint_newest(dir, path, sizeof path, &error) == 1 && !strcmp(path, in(dir, "step_100000000")),
                  "got %s (%s)", path, error.text);
            CHECK(strstr(error.text, "step_300000000") && strstr(error.text, files[i]), "the note is '%s'", error.text);
            remove_all(damaged);
        }
    TEST("a checkpoint under another step's name is passed over; where all are damaged that is an error");
    CHECK(!rename(in(dir, "step_100000000"), in(dir, "step_400000000")), "cannot rename");
    CHECK(checkpoint_newest(dir, path, sizeof path, &error) == 1 && !strcmp(path, in(dir, "step_99999999")) &&
          strstr(error.text, "step 400000000 is expected"), "got %s (%s)", path, error.text);
    unlink(in(dir, "step_99999999/state.json"));
    unlink(in(dir, "step_99999998/config.json"));
    unlink(in(dir, "step_00000020/config.json"));
    CHECK(checkpoint_newest(dir, path, sizeof path, &error) == -1 && strstr(error.text, "none of its 4"), "got %s (%s)",
          path,
          error.text);
}

static void test_prune(const Gpt *gpt)
{
    const char *dir = fresh("prune");
    Error error = {""};
    TEST("pruning keeps the newest complete ones and removes temporaries");
    for (int64_t step = 8; step <= 12; step++) save(dir, gpt, step);
    mkdir(in(dir, ".tmp.step_00000013.77"), 0777);
    put_text(in(dir, ".tmp.step_00000013.77/model.safetensors"), "half");
    put_text(in(dir, "log.jsonl"), "");
    put_text(in(dir, ".tmp.other"), "");
    mkdir(in(dir, "step_8"), 0777);
    CHECK(!checkpoint_prune(dir, 0, &error), "%s", error.text);
    CHECK(!strcmp(list(dir), ".tmp.other log.jsonl step_00000008 step_00000009 step_00000010 step_00000011 step_00000012 "
                             "step_8 "), "keep 0 left %s", list(dir));
    CHECK(!truncate(in(dir, "step_00000012/model.safetensors"), 100), "cannot cut the file");
    mkdir(in(dir, "step_00000008/more"), 0777);
    put_text(in(dir, "step_00000008/more/notes"), "text");
    CHECK(!checkpoint_prune(dir, 2, &error), "%s", error.text);
    CHECK(!strcmp(list(dir), ".tmp.other log.jsonl step_00000010 step_00000011 step_00000012 step_8 "), "keep 2 left %s",
          list(dir));
    CHECK(!checkpoint_prune(dir, 7, &error), "%s", error.text);
    CHECK(checkpoint_prune(in(dir, "nowhere"), 2, &error) && strstr(error.text, "nowhere"), "'%s'", error.text);
}

static void test_failed_save(const Gpt *gpt)
{
    const char *dir = fresh("failed");
    char path[1024], before[256];
    CheckpointState state = plain;
    Error error = {""};
    struct rlimit old, low;
    int root_user = geteuid() == 0;
    TEST("a full disk: an error that names the file, the temporary gone, the last checkpoint whole");
    save(dir, gpt, 1);
    snprintf(before, sizeof before, "%s", list(dir));
    signal(SIGXFSZ, SIG_IGN);
    getrlimit(RLIMIT_FSIZE, &old);
    for (int kilobytes = 0; kilobytes < 60; kilobytes += kilobytes < 2 ? 1 : 13) {
        low = (struct rlimit){(rlim_t)kilobytes * 1024, old.rlim_max};
        setrlimit(RLIMIT_FSIZE, &low);
        error.text[0] = 0;
        CHECK(checkpoint_save(dir, gpt, &state, NULL, -1, path, sizeof path, &error), "%d kB were enough", kilobytes);
        setrlimit(RLIMIT_FSIZE, &old);
        CHECK(strstr(error.text, ".tmp.step_00000007") && strstr(error.text, "write"), "%d kB: '%s'", kilobytes, error.text);
        CHECK(!strcmp(list(dir), before), "%d kB left %s", kilobytes, list(dir));
    }
    CHECK(checkpoint_newest(dir, path, sizeof path, &error) == 1 && !strcmp(path, in(dir, "step_00000001")), "%s",
          error.text);
    TEST("a directory that is not there, a path too long");
    CHECK(checkpoint_save(in(dir, "no"), gpt, &state, NULL, -1, path, sizeof path, &error) && strstr(error.text, "No such"),
          "'%s'", error.text);
    CHECK(checkpoint_save(dir, gpt, &state, NULL, -1, path, 10, &error) && strstr(error.text, "longer than 9"), "'%s'",
          error.text);
    CHECK(!strcmp(list(dir), before), "left behind: %s", list(dir));
    TEST("a directory that may not be written");
    chmod(root, 0755);
    chmod(dir, 0555);
    if (root_user && seteuid(65534)) {
        SKIP("root may write anywhere and cannot become another user");
    } else {
        CHECK(checkpoint_save(dir, gpt, &state, NULL, -1, path, sizeof path, &error) && strstr(error.text, "Permission"),
              "'%s'", error.text);
        CHECK(checkpoint_prune(dir, 1, &error) == 0, "%s", error.text);
    }
    if (root_user) CHECK(!seteuid(0), "cannot become root again");
    chmod(dir, 0755);
}

/* --- loading what others wrote ---------------------------------------------------------------------------------------- */

/* Values that F16 and BF16 hold exactly, in the parameters alone. */
static void model_fill_short(Gpt *gpt)
{
    uint64_t seed = 10;
    for (size_t i = 0; i < gpt_tensor_count(gpt); i++) {
        int64_t n = gpt_tensor(gpt, i)->rows * gpt_tensor(gpt, i)->columns;
        float *values = malloc((size_t)n * sizeof *values);
        for (int64_t k = 0; k < n; k++) values[k] = (float)((int64_t)(random_u64(&seed) % 255) - 127) / 64;
        gpt_write(gpt, GPT_PARAMETERS, i, 0, gpt_tensor(gpt, i)->rows, values);
        free(values);
    }
}

static void test_foreign(Gpt *gpt, Gpt *other)
{
    static const struct { const char *what; Change change; } good[] = {
        {"names without the prefix", {.drop_prefix = "transformer."}},
        {"BF16", {.dtype = "BF16"}},
        {"F16, without the prefix", {.dtype = "F16", .drop_prefix = "transformer."}},
        {"a mask", {.twice = "transformer.ln_f.bias", .as = "transformer.h.0.attn.bias"}},
        {"a mask without the prefix", {.twice = "transformer.wpe.weight", .as = "h.11.attn.masked_bias"}},
        {"a head that equals wte", {.twice = "transformer.wte.weight", .as = "lm_head.weight"}},
    };
    static const struct { Change change; const char *words; } bad[] = {
        {{.twice = "transformer.wte.weight", .as = "lm_head.weight", .flip = 1}, "\"lm_head.weight\" differs"},
        {{.twice = "transformer.wpe.weight", .as = "lm_head.weight"}, "\"lm_head.weight\" differs"},
        {{.twice = "transformer.ln_f.bias", .as = "ln_f.bias"}, "\"ln_f.bias\" is none of the model's 28"},
        {{.twice = "transformer.ln_f.bias", .as = "h.0.attn.bias2"}, "\"h.0.attn.bias2\" is none"},
        {{.twice = "transformer.ln_f.bias", .as = "h.x.attn.bias"}, "\"h.x.attn.bias\" is none"},
        {{.omit = "transformer.h.1.mlp.c_fc.bias"}, "\"transformer.h.1.mlp.c_fc.bias\" is missing"},
        {{.spoil = "transformer.wte.weight", .at = 35, .value = NAN}, "\"transformer.wte.weight\" has nan at [2, 3]"},
        {{.spoil = "transformer.h.0.mlp.c_fc.weight", .at = 1023, .value = -INFINITY}, "has -inf at [15, 63]"},
        {{.spoil = "transformer.ln_f.bias", .at = 15, .value = INFINITY}, "\"transformer.ln_f.bias\" has inf at [15]"},
    };
    const char *dir = fresh("foreign"), *path, *file = under_root("foreign.safetensors");
    Error error = {""};
    TEST("the checkpoint that foreign files are made of");
    model_fill(gpt, 11);
    model_fill_short(gpt);
    path = save(dir, gpt, 0);
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) {
        CheckpointState state;
        TEST("a foreign file is loaded: %s", good[i].what);
        copy_changed(file, in(path, "model.safetensors"), &good[i].change);
        CHECK(!checkpoint_load(path, other, &state, &error), "%s", error.text);
        gpt_init_random(other, 1);
        CHECK(model_hash(other) != model_hash(gpt), "nothing is left to load");
        CHECK(!model_load(file, other, &error), "%s", error.text);
        CHECK(model_hash(other) == model_hash(gpt), "other values were loaded");
    }
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        uint64_t hash = (gpt_init_random(other, 1), model_hash(other));
        TEST("a foreign file is refused, and the model stays what it was: %s", bad[i].words);
        copy_changed(file, in(path, "model.safetensors"), &bad[i].change);
        CHECK(model_load(file, other, &error) && strstr(error.text, bad[i].words) && strstr(error.text,
              file),
              "'%s'", error.text);
        CHECK(model_hash(other) == hash, "the model was changed");
    }
}

static void test_other_shapes(const Gpt *gpt)
{
    static const struct { GptConfig config; const char *words; } cases[] = {
        {{2, 2, 32, 8, 37}, "\"transformer.wte.weight\" has shape [37, 16], the model needs [37, 32]"},
        {{2, 2, 16, 9, 37}, "\"transformer.wpe.weight\" has shape [8, 16], the model needs [9, 16]"},
        {{2, 2, 16, 8, 48}, "has shape [37, 16], the model needs [48, 16]"},
        {{3, 2, 16, 8, 37}, "\"transformer.h.2."}, {{1, 2, 16, 8, 37}, "\"transformer.h.1."}};
    const char *path;
    char kept[1024];
    TEST("a checkpoint of another shape is refused with both shapes, and the model stays what it was");
    path = save(fresh("shapes"), gpt, 0);
    snprintf(kept, sizeof kept, "%s", path);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        Gpt *other = model_open(&cases[i].config);
        CheckpointState state = {.step = 77};
        Error error = {""};
        uint64_t hash;
        if (!CHECK(other, "no model")) continue;
        model_fill(other, 12);
        hash = model_hash(other);
        CHECK(model_load(kept, other, &error) && strstr(error.text, cases[i].words), "case %zu: '%s'", i,
              error.text);
        CHECK(checkpoint_load(kept, other, &state, &error) && strstr(error.text, cases[i].words),
              "case %zu: '%s'", i,
              error.text);
        CHECK(model_hash(other) == hash && state.step == 77, "case %zu: model or state was changed", i);
        gpt_free(other);
    }
}

static void test_bad_optimizer(const Gpt *gpt, Gpt *other)
{
    static const struct { Change change; const char *words; } bad[] = {
        {{.omit = "v.transformer.wpe.weight"}, "\"v.transformer.wpe.weight\" is missing"},
        {{.spoil = "v.transformer.wpe.weight", .at = 17, .value = -1e-30f},
        "has -1e-30 at [1, 1], a finite number of at least 0"},
        {{.spoil = "m.transformer.wpe.weight", .at = 0, .value = NAN}, "has nan at [0, 0]"},
        {{.twice = "m.transformer.wpe.weight", .as = "m.lm_head.weight"}, "\"m.lm_head.weight\" is none"},
    };
    static const struct { const char *text, *words; } states[] = {
        {"", "a value"}, {"[]", "\"step\" is missing"}, {"{\"step\": 1.5}", "\"step\" is 1.5"},
        {"{\"step\": -1}", "at least 0"},
        {"{\"step\": 1, \"data_position\": 9223372036854775808}", "\"data_position\" is 9223372036854775808"},
        {"{\"step\": 1, \"data_position\": 1, \"seed\": 5}", "\"seed\" is no string of digits"},
        {"{\"step\": 1, \"data_position\": 1, \"seed\": \"\"}", "\"seed\""},
        {"{\"step\": 1, \"data_position\": 1, \"seed\": \"-1\"}", "\"seed\""},
        {"{\"step\": 1, \"data_position\": 1, \"seed\": \"18446744073709551616\"}", "\"seed\""},
        {"{\"step\": 1, \"data_position\": 1, \"seed\": \"1\\u00002\"}", "\"seed\""},
        {"{\"step\": 1, \"data_position\": 1, \"seed\": \"1\", \"data_fingerprint\": \"1\"}", "\"validation_loss\""},
        {"{\"step\": 1, \"data_position\": 1, \"seed\": \"1\", \"data_fingerprint\": \"1\", \"validation_loss\": null}",
         "\"seconds\""},
    };
    const char *path = under_root("optimizer/step_00000000"), *file = under_root("optimizer.safetensors");
    CheckpointState state = {.step = 77};
    Error error = {""};
    uint64_t hash;
    TEST("a damaged optimizer or state is refused, and neither model nor state is changed");
    save(fresh("optimizer"), gpt, 0);
    model_fill(other, 13);
    hash = model_hash(other);
    CHECK(!rename(in(path, "optimizer.safetensors"), file), "cannot rename");
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        copy_changed(in(path, "optimizer.safetensors"), file, &bad[i].change);
        CHECK(checkpoint_load(path, other, &state, &error) && strstr(error.text, bad[i].words), "case %zu: '%s'",
              i,
              error.text);
    }
    for (size_t i = 0; i < sizeof states / sizeof states[0]; i++) {
        put_text(in(path, "state.json"), states[i].text);
        CHECK(checkpoint_load(path, other, &state, &error) && strstr(error.text, states[i].words),
              "state %zu: '%s'",
              i, error.text);
    }
    CHECK(model_hash(other) == hash && state.step == 77, "model or state was changed");
}

int main(void)
{
    Gpt *gpt, *other;
    if (directories_open()) return perror(root), 1;
    gpt = model_open(&tiny);
    other = model_open(&tiny);
    if (!gpt || !other) return 1;
    test_round_trip(gpt, other);
    test_layout(gpt);
    test_large();
    test_existing(gpt, other);
    test_newest(gpt);
    test_prune(gpt);
    test_failed_save(gpt);
    test_foreign(gpt, other);
    test_other_shapes(gpt);
    test_bad_optimizer(gpt, other);
    gpt_free(gpt);
    gpt_free(other);
    directories_close();
    return test_end();
}
