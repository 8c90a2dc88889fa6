/* gpt.c - the model: where every tensor lies, and the order of operations, for every backend.
 *
 * One block, with the names used below (N = B*T rows; "resid" is the residual stream):
 *
 *     resid_in ──┬─ ln1 ─ qkv ─ attention ─ proj ──(+)── resid_mid ──┬─ ln2 ─ fc ─ gelu ─ fcproj ──(+)── resid_out
 *                └──────────────────────────────────┘                └─────────────────────────────────┘
 *
 * Each (+) is fused with the layer norm that follows it: the sum before ln2 here, the sum before the next block's ln1 (or
 * the last ln_f) at the end. So a block's forward starts with ln1 already done, and block_finish does the norm of the next.
 *
 * The residual stream is fp32 in every mode, forward and backward: each block adds little to much, and in bf16 a total would
 * lose what is under 1/256 of it, layer after layer. The branches, between a norm's output and the (+), are real.
 *
 * Parameters are kept in fp32; products read real copies of them, norms and embeddings the fp32 ones. Inference in bf16 keeps
 * no more in fp32 than it reads, wte, wpe and the vectors: 158 MB beside the 249 of GPT-2 124M, 333 beside the 3115 of GPT-2
 * XL. All in fp32 would be twice the bf16 again.
 *
 * Backward walks the same chain the other way with one gradient of the residual stream, dresid, that every branch adds to;
 * the norms, which do the adding, leave a rounded copy beside it for the products. Where real is fp32 it is its own copy.
 * Gradients of weights and biases lead nowhere: where the backend has a side for them they are computed there, beside the
 * chain, which waits for them only before it overwrites what they read (weight_backward, wait_for_readers).
 * The classifier goes over the rows in chunks and does forward and backward of a chunk at once: its logits, by far the
 * widest activation, exist for one chunk only and become their own gradient in place.
 *
 * Memory: five areas of one allocation each. Offsets into an area are handed out by area_take, and the same functions run
 * with a NULL base to plan and with a real one to use, so that the plan that is printed cannot differ from what is
 * allocated.
 */
#include "layers/gpt.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/random.h"
#include "layers/ranges.h"

enum {
    ALIGNMENT = 256,             /* bytes: what vector loads and cuBLAS like */
    ALIGNMENT_ELEMENTS = 64,     /* the same for the flat parameter buffers, in fp32 elements */
    STAGING_ELEMENTS = 1 << 20,  /* host rows moved at a time when a buffer is filled or searched */
    CLASSIFIER_BYTES = 256 << 20 /* most that the logits of one chunk may take */
};

/* Activations. A slot is what one layer (or the model) needs; training keeps a slot per layer. */
typedef enum Activation {
    ACT_BATCH, ACT_LOSSES, ACT_RESULT, ACT_STEP,                         /* of the model */
    ACT_UPLOADS,                                                         /* micro-batches of this update and of the next */
    ACT_LNF, ACT_LNF_MEAN, ACT_LNF_RSTD,
    ACT_RESID,                                                           /* block inputs; one more than layers in training */
    ACT_LN1, ACT_LN1_MEAN, ACT_LN1_RSTD, ACT_QKV, ACT_ATT, ACT_LSE, ACT_SAVED,
    ACT_RESID_MID, ACT_LN2, ACT_LN2_MEAN, ACT_LN2_RSTD, ACT_PRE, ACT_GELU,
    ACT_CACHE,                                                           /* keys and values, of every layer always */
    ACT_COUNT
} Activation;

/* Scratch: alive within one call. The union part holds the classifier's logits first and the block gradients afterwards. */
typedef struct ScratchLayout {
    size_t dresid;           /* (N,C) fp32 */
    size_t dresid_real[2];   /* (N,C) real: dresid rounded, by turns; the same place where real is fp32 */
    size_t dnorm;            /* (N,C) real */
    size_t logits;           /* (chunk,Vp) real: shares its place with the next two */
    size_t dpre, dqkv;       /* (N,4C), (N,3C) real */
    size_t branch;           /* (N,C) real: what a block's projection gives, before it is added to the stream */
    size_t work, side_work;  /* scratch of the operations, of those beside them */
    size_t attention;        /* scratch of the attention kernel */
    size_t bytes;
} ScratchLayout;

typedef struct ActivationLayout {
    size_t offset[ACT_COUNT], stride[ACT_COUNT];
    int64_t slots[ACT_COUNT];
    size_t bytes;
} ActivationLayout;

/* What a step leaves for the host. */
typedef struct StepResult {
    double loss; /* sum over the tokens of all micro-batches */
    float norm;
} StepResult;

/* Elements of a flat buffer of parameters. From its start: wte and wpe, the other matrices, the vectors. */
typedef struct FlatLayout {
    int64_t embeddings, matrices, size; /* where each of the three ends */
} FlatLayout;

struct Gpt {
    GptConfig config;
    GptOptions options;
    const Backend *backend;
    Stream *stream;
    const AttentionKernel *attention;
    const char *fault;
    char fault_text[ATTENTION_WORDS];
    int64_t Vp, chunk; /* padded vocabulary; rows of the classifier that are done at once */
    GptPlan plan;

    GptTensor *tensors;
    size_t tensor_count, kind_first[GPT_KINDS];
    FlatLayout flat;

    void *parameters;  /* (flat) real */
    float *master;     /* (flat) fp32; the same buffer as parameters where real is fp32; NULL in bf16 inference */
    float *exact;      /* bf16 inference alone: wte, wpe and, behind them, the vectors in fp32; in parameters' allocation */
    float *gradients;  /* (flat) fp32 */
    float *moments;    /* m (flat), v (flat) fp32 */
    char *activations, *scratch;
    ActivationLayout act;
    ScratchLayout layout;
    /* The host's side of a step: batches on their way, and what came back. */
    int32_t *batch_host;  /* one batch, laid out as ACT_BATCH */
    int32_t *upload_host; /* (2, micro_steps) batches */
    AdamwStep *step_host;
    StepResult *result_host;
    int64_t rows;         /* of the last forward pass: those of the activations that mean something */
    int next;             /* which half of the uploads the next update reads */
    Recording *micro_recording, *update_recording;
    float recorded_dscale;
    /* Backward: which dresid_real holds the gradient now, and the tickets of the last products of weights, done beside the
     * rest, that read each of the gradients. */
    int dresid_turn;
    int64_t dresid_reader[2], dpre_reader, dqkv_reader;
};

/* --- configuration and parameter table --------------------------------------------------------------------------------- */

typedef struct KindFacts {
    const char *name;      /* within the block, or of the model */
    int in_block, matrix, transposed;
} KindFacts;

static const KindFacts KINDS[GPT_KINDS] = {
    [GPT_WTE] = {"wte.weight", 0, 1, 0},           [GPT_WPE] = {"wpe.weight", 0, 1, 0},
    [GPT_QKV_W] = {"attn.c_attn.weight", 1, 1, 1}, [GPT_PROJ_W] = {"attn.c_proj.weight", 1, 1, 1},
    [GPT_FC_W] = {"mlp.c_fc.weight", 1, 1, 1},     [GPT_FCPROJ_W] = {"mlp.c_proj.weight", 1, 1, 1},
    [GPT_LN1_W] = {"ln_1.weight", 1, 0, 0},        [GPT_LN1_B] = {"ln_1.bias", 1, 0, 0},
    [GPT_QKV_B] = {"attn.c_attn.bias", 1, 0, 0},   [GPT_PROJ_B] = {"attn.c_proj.bias", 1, 0, 0},
    [GPT_LN2_W] = {"ln_2.weight", 1, 0, 0},        [GPT_LN2_B] = {"ln_2.bias", 1, 0, 0},
    [GPT_FC_B] = {"mlp.c_fc.bias", 1, 0, 0},       [GPT_FCPROJ_B] = {"mlp.c_proj.bias", 1, 0, 0},
    [GPT_LNF_W] = {"ln_f.weight", 0, 0, 0},        [GPT_LNF_B] = {"ln_f.bias", 0, 0, 0},
};

static void kind_shape(GptKind kind, const GptConfig *config, int64_t *rows, int64_t *columns)
{
    int64_t C = config->channels;
    *rows = 1;
    *columns = C;
    switch (kind) {
    case GPT_WTE: *rows = config->vocab; break;
    case GPT_WPE: *rows = config->context; break;
    case GPT_QKV_W: *rows = 3 * C; break;
    case GPT_PROJ_W: *rows = C; break;
    case GPT_FC_W: *rows = 4 * C; break;
    case GPT_FCPROJ_W: *rows = C; *columns = 4 * C; break;
    case GPT_QKV_B: *columns = 3 * C; break;
    case GPT_FC_B: *columns = 4 * C; break;
    default: break;
    }
}

const char *gpt_config_fault(const GptConfig *config, char *text, size_t size)
{
    /* Each limit keeps every product of sizes below far from 2^63. */
    const struct { const char *name; int64_t got, most; } limits[] = {
        {"layers", config->layers, 4096},     {"heads", config->heads, 1 << 16},    {"dim", config->channels, 1 << 20},
        {"context", config->context, 1 << 26}, {"vocab", config->vocab, 1 << 28},
    };
    for (size_t i = 0; i < sizeof limits / sizeof limits[0]; i++)
        if (limits[i].got < 1 || limits[i].got > limits[i].most) {
            snprintf(text, size, "%s is %lld, but must be from 1 to %lld", limits[i].name, (long long)limits[i].got,
                     (long long)limits[i].most);
            return text;
        }
    if (config->channels % config->heads) {
        snprintf(text, size, "dim %lld is not divisible by heads %lld: every head takes dim/heads channels",
                 (long long)config->channels, (long long)config->heads);
        return text;
    }
    return NULL;
}

static int64_t padded_vocab(const GptConfig *config, const Backend *backend)
{
    int64_t multiple = backend->device == ATTENTION_CPU ? 16 : 128; /* a vector's width; a tensor-core tile's */
    return (config->vocab + multiple - 1) / multiple * multiple;
}

/* Fills table (may be NULL), kind_first (may be NULL) and flat; returns the number of tensors. */
static size_t tensors_layout(GptTensor *table, size_t *kind_first, FlatLayout *flat, const GptConfig *config, int64_t Vp)
{
    size_t count = 0;
    int64_t offset = 0;
    for (int kind = 0; kind < GPT_KINDS; kind++) {
        if (kind == GPT_QKV_W) flat->embeddings = offset;
        if (kind == GPT_LN1_W) flat->matrices = offset; /* the first vector */
        if (kind_first) kind_first[kind] = count;
        int64_t rows, columns, copies = KINDS[kind].in_block ? config->layers : 1;
        kind_shape((GptKind)kind, config, &rows, &columns);
        for (int64_t l = 0; l < copies; l++, count++) {
            if (table) {
                GptTensor *tensor = &table[count];
                tensor->kind = (GptKind)kind;
                tensor->layer = KINDS[kind].in_block ? l : -1;
                tensor->rows = rows;
                tensor->columns = columns;
                tensor->transposed = KINDS[kind].transposed;
                tensor->offset = offset;
                if (KINDS[kind].in_block)
                    snprintf(tensor->name, sizeof tensor->name, "transformer.h.%d.%s", (int)l, KINDS[kind].name);
                else
                    snprintf(tensor->name, sizeof tensor->name, "transformer.%s", KINDS[kind].name);
            }
            offset += (kind == GPT_WTE ? Vp : rows) * columns;
            offset = (offset + ALIGNMENT_ELEMENTS - 1) / ALIGNMENT_ELEMENTS * ALIGNMENT_ELEMENTS;
        }
    }
    flat->size = offset;
    return count;
}

static int64_t parameters_counted(const GptConfig *config)
{
    int64_t sum = 0;
    for (int kind = 0; kind < GPT_KINDS; kind++) {
        int64_t rows, columns;
        kind_shape((GptKind)kind, config, &rows, &columns);
        sum += rows * columns * (KINDS[kind].in_block ? config->layers : 1);
    }
    return sum;
}

/* --- memory plan ------------------------------------------------------------------------------------------------------- */

/* Hands out `bytes` of an area that has *used so far: the offset of the piece. */
static size_t area_take(size_t *used, size_t bytes)
{
    size_t offset = *used;
    *used += (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    return offset;
}

static size_t larger(size_t a, size_t b) { return a > b ? a : b; }

static AttentionShape attention_shape(const GptConfig *config, const GptOptions *options, const Backend *backend, int64_t B,
                                      int64_t T)
{
    AttentionShape shape;
    shape.B = B;
    shape.T = T;
    shape.NH = config->heads;
    shape.HS = config->channels / config->heads;
    shape.scale = options->scale != 0 ? options->scale : attention_scale(shape.HS);
    shape.dtype = backend->dtype;
    shape.deterministic = options->deterministic;
    shape.tf32 = options->tf32;
    return shape;
}

/* Rows of the classifier that are done at once: all N, or about equal parts of them, so that no small rest wastes a pass, in
 * whole tiles of a product. */
static int64_t classifier_chunk(int64_t N, int64_t Vp, size_t element)
{
    enum { FEWEST = 256, TILE = 128 }; /* narrower products waste the machine */
    int64_t most = CLASSIFIER_BYTES / ((int64_t)element * Vp) / TILE * TILE;
    if (most < FEWEST) most = FEWEST;
    if (N <= most) return N;
    int64_t chunks = (N + most - 1) / most, rows = (N + chunks - 1) / chunks;
    return (rows + TILE - 1) / TILE * TILE;
}

/* A batch of N tokens in one piece: tokens (N), targets (N), and the plan of the embedding's backward. */
static size_t batch_bytes(int64_t N)
{
    size_t bytes = (size_t)(2 * N + embedding_plan_size(N)) * sizeof(int32_t);
    return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

/* Rows of activations: tokens of the largest batch, or of one token for each sequence of the cache. */
static int64_t rows_most(const GptOptions *options)
{
    int64_t rows = options->batch * options->sequence;
    return rows > options->cache ? rows : options->cache;
}

static int64_t micro_steps_most(const GptOptions *options) { return options->micro_steps > 0 ? options->micro_steps : 1; }

static ActivationLayout activation_layout(const GptConfig *config, const GptOptions *options, const Backend *backend,
                                          const AttentionKernel *attention)
{
    int64_t N = rows_most(options), C = config->channels, L = config->layers;
    size_t real = backend->element, rows = (size_t)N, wide = (size_t)(N * C);
    AttentionShape shape = attention_shape(config, options, backend, options->batch, options->sequence);
    int keep = options->training && options->recompute != GPT_RECOMPUTE_BLOCK;
    int keep_gelu = options->training && options->recompute == GPT_RECOMPUTE_NONE;

    ActivationLayout layout;
    memset(&layout, 0, sizeof layout);
    size_t bytes[ACT_COUNT] = {
        [ACT_BATCH] = batch_bytes(N), [ACT_LOSSES] = rows * 4, [ACT_RESULT] = sizeof(StepResult),
        [ACT_STEP] = sizeof(AdamwStep),
        [ACT_UPLOADS] = options->training ? 2 * (size_t)micro_steps_most(options) * batch_bytes(N) : 0,
        [ACT_LNF] = wide * real, [ACT_LNF_MEAN] = rows * 4, [ACT_LNF_RSTD] = rows * 4,
        [ACT_RESID] = wide * 4, [ACT_LN1] = wide * real, [ACT_LN1_MEAN] = rows * 4, [ACT_LN1_RSTD] = rows * 4,
        [ACT_QKV] = 3 * wide * real, [ACT_ATT] = wide * real, [ACT_LSE] = rows * (size_t)config->heads * 4,
        [ACT_SAVED] = attention ? attention->saved_bytes(&shape) : 0, [ACT_RESID_MID] = wide * 4,
        [ACT_LN2] = wide * real, [ACT_LN2_MEAN] = rows * 4, [ACT_LN2_RSTD] = rows * 4, [ACT_PRE] = 4 * wide * real,
        [ACT_GELU] = 4 * wide * real,
        [ACT_CACHE] = (size_t)(options->cache * 2 * options->sequence * C) * real,
    };
    for (int a = 0; a < ACT_COUNT; a++) {
        int64_t slots = 1;
        if (a == ACT_RESID) slots = options->training ? L + 1 : 1;
        else if (a == ACT_GELU) slots = keep_gelu ? L : 1;
        else if (a == ACT_CACHE) slots = L;
        else if (a > ACT_RESID) slots = keep ? L : 1;
        layout.slots[a] = slots;
        layout.offset[a] = layout.bytes;
        layout.stride[a] = (bytes[a] + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
        layout.bytes += layout.stride[a] * (size_t)slots;
    }
    return layout;
}

static ScratchLayout scratch_layout(const GptConfig *config, const GptOptions *options, const Backend *backend,
                                    const AttentionKernel *attention, int64_t Vp)
{
    int64_t N = rows_most(options), C = config->channels, T = options->sequence;
    size_t real = backend->element, wide = (size_t)(N * C) * real;
    int64_t chunk = classifier_chunk(N, Vp, real);
    AttentionShape shape = attention_shape(config, options, backend, options->batch, T);

    ScratchLayout s;
    memset(&s, 0, sizeof s);
    s.branch = area_take(&s.bytes, wide);
    if (options->training) {
        s.dresid = area_take(&s.bytes, (size_t)(N * C) * 4);
        for (int turn = 0; turn < 2; turn++)
            s.dresid_real[turn] = backend->dtype == DTYPE_FP32 ? s.dresid : area_take(&s.bytes, wide);
        s.dnorm = area_take(&s.bytes, wide);
    }
    size_t shared = s.bytes;
    s.logits = area_take(&s.bytes, (size_t)chunk * (size_t)Vp * real);
    if (options->training) {
        size_t block = shared;
        s.dpre = area_take(&block, 4 * wide);
        s.dqkv = area_take(&block, 3 * wide);
        s.bytes = larger(s.bytes, block);
    }
    size_t work = STAGING_ELEMENTS * 4, side = 0; /* gpt_read and gpt_write convert in work */
    if (options->training) {
        FlatLayout flat;
        tensors_layout(NULL, NULL, &flat, config, Vp);
        work = larger(work, backend->embedding_scratch(N, C));
        work = larger(work, backend->layernorm_scratch(N, C));
        side = larger(side, backend->linear_scratch(N, C, 3 * C));
        side = larger(side, backend->linear_scratch(N, C, C));
        side = larger(side, backend->linear_scratch(N, C, 4 * C));
        side = larger(side, backend->linear_scratch(N, 4 * C, C));
        work = larger(work, backend->linear_scratch(chunk, C, Vp));
        work = larger(work, backend->norm_scratch(flat.size));
    }
    s.work = area_take(&s.bytes, work);
    s.side_work = area_take(&s.bytes, side);
    s.attention = area_take(&s.bytes, attention ? attention->scratch_bytes(&shape) : 0);
    return s;
}

/* Parameters: all in the working type, and what bf16 inference keeps in fp32 beside them. */
typedef struct ParameterLayout {
    size_t exact; /* where that begins */
    size_t bytes;
} ParameterLayout;

static ParameterLayout parameter_layout(const FlatLayout *flat, const GptOptions *options, const Backend *backend)
{
    ParameterLayout layout = {0, 0};
    area_take(&layout.bytes, (size_t)flat->size * backend->element);
    layout.exact = layout.bytes;
    if (!options->training && backend->dtype != DTYPE_FP32)
        area_take(&layout.bytes, (size_t)(flat->embeddings + flat->size - flat->matrices) * 4);
    return layout;
}

GptPlan gpt_plan(const GptConfig *config, const GptOptions *options, const Backend *backend,
                 const AttentionKernel *attention)
{
    GptPlan plan;
    FlatLayout flat;
    int64_t Vp = padded_vocab(config, backend);
    memset(&plan, 0, sizeof plan);
    tensors_layout(NULL, NULL, &flat, config, Vp);
    plan.parameters_count = parameters_counted(config);
    plan.parameters = parameter_layout(&flat, options, backend).bytes;
    if (options->training) {
        plan.gradients = (size_t)flat.size * 4;
        plan.optimizer = (size_t)flat.size * (backend->dtype == DTYPE_FP32 ? 8 : 12);
    }
    plan.activations = activation_layout(config, options, backend, attention).bytes;
    plan.scratch = scratch_layout(config, options, backend, attention, Vp).bytes;
    plan.total = plan.parameters + plan.gradients + plan.optimizer + plan.activations + plan.scratch;
    return plan;
}

/* The sentence for a plan that does not fit into `available` bytes, with the largest batch that would. */
static void plan_fault(const GptConfig *config, const GptOptions *options, const Backend *backend,
                       const AttentionKernel *attention, int64_t available, char *error, size_t error_size)
{
    GptOptions tried = *options;
    int64_t fits = 0, low = 1, high = options->batch;
    while (low <= high) {
        tried.batch = low + (high - low) / 2;
        if ((int64_t)gpt_plan(config, &tried, backend, attention).total <= available) {
            fits = tried.batch;
            low = tried.batch + 1;
        } else {
            high = tried.batch - 1;
        }
    }
    size_t total = gpt_plan(config, options, backend, attention).total;
    int large = total >= (size_t)1 << 30;
    double unit = large ? 1024.0 * 1024.0 * 1024.0 : 1024.0 * 1024.0, free_bytes = (double)available;
    const char *name = large ? "GiB" : "MiB";
    int length = snprintf(error, error_size,
                          "not enough memory: the plan needs %.2f %s and %.2f %s are free, %.2f %s too few; ",
                          (double)total / unit, name, free_bytes / unit, name, ((double)total - free_bytes) / unit, name);
    if (length < 0 || (size_t)length >= error_size) return;
    if (fits) snprintf(error + length, error_size - (size_t)length, "--batch %lld would fit", (long long)fits);
    else
        snprintf(error + length, error_size - (size_t)length,
                 "not even --batch 1 would fit: choose a smaller model or --seq");
}

/* --- life -------------------------------------------------------------------------------------------------------------- */

Gpt *gpt_create(const GptConfig *config, const GptOptions *options, const Backend *backend, Stream *stream,
                const AttentionKernel *attention, char *error, size_t error_size)
{
    if (gpt_config_fault(config, error, error_size)) return NULL;
    if (options->batch < 1 || options->sequence < 1 || options->sequence > config->context) {
        snprintf(error, error_size,
                 "batch %lld and sequence %lld must be at least 1 and the sequence at most the context, %lld",
                 (long long)options->batch, (long long)options->sequence, (long long)config->context);
        return NULL;
    }
    GptPlan plan = gpt_plan(config, options, backend, attention);
    int64_t available = backend->memory_available(stream);
    if ((int64_t)plan.total > available) {
        plan_fault(config, options, backend, attention, available, error, error_size);
        return NULL;
    }

    Gpt *gpt = (Gpt *)calloc(1, sizeof *gpt);
    if (!gpt) { snprintf(error, error_size, "not enough memory for the model's tables"); return NULL; }
    gpt->config = *config;
    gpt->options = *options;
    gpt->backend = backend;
    gpt->stream = stream;
    gpt->attention = attention;
    gpt->plan = plan;
    gpt->Vp = padded_vocab(config, backend);
    gpt->chunk = classifier_chunk(rows_most(options), gpt->Vp, backend->element);
    gpt->tensor_count = tensors_layout(NULL, gpt->kind_first, &gpt->flat, config, gpt->Vp);
    gpt->tensors = (GptTensor *)calloc(gpt->tensor_count, sizeof *gpt->tensors);
    size_t batch = batch_bytes(rows_most(options));
    gpt->batch_host = (int32_t *)backend->alloc_host(batch, stream);
    gpt->upload_host = options->training
                           ? (int32_t *)backend->alloc_host(2 * (size_t)micro_steps_most(options) * batch, stream)
                           : NULL;
    gpt->step_host = (AdamwStep *)backend->alloc_host(sizeof(AdamwStep), stream);
    gpt->result_host = (StepResult *)backend->alloc_host(sizeof(StepResult), stream);
    gpt->act = activation_layout(config, options, backend, attention);
    gpt->layout = scratch_layout(config, options, backend, attention, gpt->Vp);

    gpt->parameters = backend->alloc(plan.parameters, stream);
    gpt->gradients = plan.gradients ? (float *)backend->alloc(plan.gradients, stream) : NULL;
    gpt->moments = plan.optimizer ? (float *)backend->alloc(plan.optimizer, stream) : NULL;
    gpt->activations = (char *)backend->alloc(plan.activations, stream);
    gpt->scratch = (char *)backend->alloc(plan.scratch, stream);
    if (!gpt->tensors || !gpt->batch_host || (options->training && !gpt->upload_host) || !gpt->step_host ||
        !gpt->result_host || !gpt->parameters || (plan.gradients && !gpt->gradients) || (plan.optimizer && !gpt->moments) ||
        !gpt->activations || !gpt->scratch) {
        available = backend->memory_available(stream);
        plan_fault(config, options, backend, attention,
                   available < (int64_t)plan.total ? available : (int64_t)plan.total - 1, error, error_size);
        gpt_free(gpt);
        return NULL;
    }
    tensors_layout(gpt->tensors, NULL, &gpt->flat, config, gpt->Vp);
    if (backend->dtype == DTYPE_FP32) gpt->master = (float *)gpt->parameters;
    else if (gpt->moments) gpt->master = gpt->moments + 2 * gpt->flat.size;
    else gpt->exact = (float *)((char *)gpt->parameters + parameter_layout(&gpt->flat, options, backend).exact);
    backend->zero(gpt->parameters, plan.parameters, stream);
    if (gpt->gradients) backend->zero(gpt->gradients, plan.gradients, stream);
    if (gpt->moments) backend->zero(gpt->moments, plan.optimizer, stream);
    return gpt;
}

void gpt_free(Gpt *gpt)
{
    if (!gpt) return;
    gpt->backend->free(gpt->parameters, gpt->stream);
    gpt->backend->free(gpt->gradients, gpt->stream);
    gpt->backend->free(gpt->moments, gpt->stream);
    gpt->backend->free(gpt->activations, gpt->stream);
    gpt->backend->free(gpt->scratch, gpt->stream);
    gpt->backend->free_host(gpt->batch_host, gpt->stream);
    gpt->backend->free_host(gpt->upload_host, gpt->stream);
    gpt->backend->free_host(gpt->step_host, gpt->stream);
    gpt->backend->free_host(gpt->result_host, gpt->stream);
    if (gpt->micro_recording) gpt->backend->recording_free(gpt->micro_recording);
    if (gpt->update_recording) gpt->backend->recording_free(gpt->update_recording);
    free(gpt->tensors);
    free(gpt);
}

const GptConfig *gpt_config(const Gpt *gpt) { return &gpt->config; }
size_t gpt_tensor_count(const Gpt *gpt) { return gpt->tensor_count; }
const GptTensor *gpt_tensor(const Gpt *gpt, size_t i) { return &gpt->tensors[i]; }
const char *gpt_fault(const Gpt *gpt) { return gpt->fault; }

/* --- parameters from and to the host ----------------------------------------------------------------------------------- */

/* A parameter in fp32, or NULL where there is none: in bf16 inference, of matrices that only products read. */
static float *exact_at(const Gpt *gpt, int64_t offset)
{
    const FlatLayout *flat = &gpt->flat;
    if (gpt->master) return gpt->master + offset;
    if (offset < flat->embeddings) return gpt->exact + offset;
    return offset < flat->matrices ? NULL : gpt->exact + flat->embeddings + (offset - flat->matrices);
}

/* The element at an offset of a flat buffer, in fp32, or NULL as above. */
static float *flat_at(const Gpt *gpt, GptBuffer buffer, int64_t offset)
{
    switch (buffer) {
    case GPT_PARAMETERS: return exact_at(gpt, offset);
    case GPT_GRADIENTS: return gpt->gradients + offset;
    case GPT_MOMENT1: return gpt->moments + offset;
    default: return gpt->moments + gpt->flat.size + offset;
    }
}

/* A parameter in the working type. */
static char *parameter_at(const Gpt *gpt, int64_t offset)
{
    return (char *)gpt->parameters + (size_t)offset * gpt->backend->element;
}

void gpt_read(const Gpt *gpt, GptBuffer buffer, size_t i, int64_t first, int64_t count, float *host)
{
    const Backend *be = gpt->backend;
    const GptTensor *tensor = &gpt->tensors[i];
    int64_t start = tensor->offset + first * tensor->columns, n = count * tensor->columns;
    const float *flat = flat_at(gpt, buffer, start);
    if (flat) {
        be->copy_out(host, flat, (size_t)n * 4, gpt->stream);
        return;
    }
    float *staging = (float *)(gpt->scratch + gpt->layout.work);
    for (int64_t done = 0; done < n; done += STAGING_ELEMENTS) {
        int64_t piece = n - done < STAGING_ELEMENTS ? n - done : STAGING_ELEMENTS;
        be->to_fp32(staging, parameter_at(gpt, start + done), piece, gpt->stream);
        be->copy_out(host + done, staging, (size_t)piece * 4, gpt->stream);
    }
}

void gpt_write(Gpt *gpt, GptBuffer buffer, size_t i, int64_t first, int64_t count, const float *host)
{
    const Backend *be = gpt->backend;
    const GptTensor *tensor = &gpt->tensors[i];
    int64_t start = tensor->offset + first * tensor->columns, n = count * tensor->columns;
    float *flat = flat_at(gpt, buffer, start);
    if (flat) be->copy_in(flat, host, (size_t)n * 4, gpt->stream);
    if (buffer != GPT_PARAMETERS || be->dtype == DTYPE_FP32) return;
    if (flat) {
        be->from_fp32(parameter_at(gpt, start), flat, n, gpt->stream);
        return;
    }
    float *staging = (float *)(gpt->scratch + gpt->layout.work);
    for (int64_t done = 0; done < n; done += STAGING_ELEMENTS) {
        int64_t piece = n - done < STAGING_ELEMENTS ? n - done : STAGING_ELEMENTS;
        be->copy_in(staging, host + done, (size_t)piece * 4, gpt->stream);
        be->from_fp32(parameter_at(gpt, start + done), staging, piece, gpt->stream);
    }
}

/* Rows of a tensor that fit the host staging buffer of gpt_init_random and gpt_find_nonfinite: at least one. */
static int64_t staging_rows(const GptTensor *tensor)
{
    int64_t rows = STAGING_ELEMENTS / tensor->columns;
    return rows < 1 ? 1 : rows < tensor->rows ? rows : tensor->rows;
}

/* row (n) = normal(0, deviation), from the seed of this row alone. Source: Box and Muller 1958. */
static void normal_row(float *row, int64_t n, uint64_t seed, double deviation)
{
    uint64_t state = seed;
    for (int64_t i = 0; i < n; i += 2) {
        double radius = deviation * sqrt(-2 * log(1 - random_uniform(&state)));
        double angle = 2 * 3.14159265358979323846 * random_uniform(&state);
        row[i] = (float)(radius * cos(angle));
        if (i + 1 < n) row[i + 1] = (float)(radius * sin(angle));
    }
}

void gpt_init_random(Gpt *gpt, uint64_t seed)
{
    float *staging = NULL;
    for (size_t i = 0; i < gpt->tensor_count; i++) {
        const GptTensor *tensor = &gpt->tensors[i];
        int64_t step = staging_rows(tensor);
        double deviation = 0.02;
        if (tensor->kind == GPT_PROJ_W || tensor->kind == GPT_FCPROJ_W) deviation /= sqrt(2.0 * (double)gpt->config.layers);
        int ones = tensor->kind == GPT_LN1_W || tensor->kind == GPT_LN2_W || tensor->kind == GPT_LNF_W;
        uint64_t tensor_seed = random_mix(random_mix(seed) + i);
        staging = (float *)realloc(staging, (size_t)(step * tensor->columns) * sizeof(float));
        if (!staging) { gpt->fault = "not enough memory to initialise the parameters"; return; }
        for (int64_t first = 0; first < tensor->rows; first += step) {
            int64_t count = tensor->rows - first < step ? tensor->rows - first : step;
            #pragma omp parallel for schedule(static)
            for (int64_t r = 0; r < count; r++) {
                float *row = staging + r * tensor->columns;
                if (KINDS[tensor->kind].matrix)
                    normal_row(row, tensor->columns, random_mix(tensor_seed + (uint64_t)(first + r)), deviation);
                else
                    for (int64_t c = 0; c < tensor->columns; c++) row[c] = ones ? 1.0f : 0.0f;
            }
            gpt_write(gpt, GPT_PARAMETERS, i, first, count, staging);
        }
    }
    free(staging);
}

/* Does a tensor of n elements on the device, real or fp32, hold a NaN or infinity? */
static int holds_nonfinite(const Gpt *gpt, const void *tensor, int64_t n, int real, float *staging)
{
    const Backend *be = gpt->backend;
    int converts = real && be->dtype != DTYPE_FP32;
    float *work = (float *)(gpt->scratch + gpt->layout.work);
    for (int64_t done = 0; done < n; done += STAGING_ELEMENTS) {
        int64_t piece = n - done < STAGING_ELEMENTS ? n - done : STAGING_ELEMENTS;
        const char *from = (const char *)tensor + (size_t)done * (converts ? be->element : 4);
        if (converts) be->to_fp32(work, from, piece, gpt->stream);
        be->copy_out(staging, converts ? (const void *)work : from, (size_t)piece * 4, gpt->stream);
        for (int64_t e = 0; e < piece; e++)
            if (!isfinite(staging[e])) return 1;
    }
    return 0;
}

/* Number of the tensor that is n-th to be searched: of gradients, in the order in which backward comes to the tensors. */
static size_t search_order(const Gpt *gpt, GptBuffer buffer, size_t n)
{
    static const GptKind block[] = {GPT_FCPROJ_B, GPT_FCPROJ_W, GPT_FC_B, GPT_FC_W, GPT_LN2_B, GPT_LN2_W,
                                    GPT_PROJ_B, GPT_PROJ_W, GPT_QKV_B, GPT_QKV_W, GPT_LN1_B, GPT_LN1_W};
    enum { IN_BLOCK = sizeof block / sizeof block[0] };
    size_t L = (size_t)gpt->config.layers;
    if (buffer != GPT_GRADIENTS) return n;
    if (n < 2) return gpt->kind_first[n ? GPT_LNF_W : GPT_LNF_B];
    n -= 2;
    if (n < IN_BLOCK * L) return gpt->kind_first[block[n % IN_BLOCK]] + (L - 1 - n / IN_BLOCK);
    return gpt->kind_first[n == IN_BLOCK * L ? GPT_WPE : GPT_WTE];
}

const GptTensor *gpt_find_nonfinite(const Gpt *gpt, GptBuffer buffer)
{
    float *staging = NULL;
    const GptTensor *found = NULL;
    for (size_t n = 0; n < gpt->tensor_count && !found; n++) {
        size_t i = search_order(gpt, buffer, n);
        const GptTensor *tensor = &gpt->tensors[i];
        int64_t step = staging_rows(tensor);
        float *grown = (float *)realloc(staging, (size_t)(step * tensor->columns) * sizeof(float));
        if (!grown) break;
        staging = grown;
        for (int64_t first = 0; first < tensor->rows && !found; first += step) {
            int64_t count = tensor->rows - first < step ? tensor->rows - first : step;
            gpt_read(gpt, buffer, i, first, count, staging);
            for (int64_t e = 0; e < count * tensor->columns && !found; e++)
                if (!isfinite(staging[e])) found = tensor;
        }
    }
    free(staging);
    return found;
}

/* --- forward ----------------------------------------------------------------------------------------------------------- */

/* Activation of layer l (any l for those of the model). */
static void *act_at(const Gpt *gpt, Activation a, int64_t l)
{
    return gpt->activations + gpt->act.offset[a] + gpt->act.stride[a] * (size_t)(gpt->act.slots[a] > 1 ? l : 0);
}

/* The same of the residual stream (N,C), which is fp32. */
static float *resid_at(const Gpt *gpt, Activation a, int64_t l) { return (float *)act_at(gpt, a, l); }

static StepResult *result_at(const Gpt *gpt) { return (StepResult *)act_at(gpt, ACT_RESULT, 0); }

/* Where in the flat buffers a parameter of layer l (any l for those of the model) begins. */
static int64_t offset_of(const Gpt *gpt, GptKind kind, int64_t l)
{
    return gpt->tensors[gpt->kind_first[kind] + (size_t)(KINDS[kind].in_block ? l : 0)].offset;
}

/* A parameter for a product; for a norm or the embedding, in fp32; its gradient. */
static const void *weight_at(const Gpt *gpt, GptKind kind, int64_t l) { return parameter_at(gpt, offset_of(gpt, kind, l)); }
static const float *exact_weight_at(const Gpt *gpt, GptKind kind, int64_t l)
{
    return exact_at(gpt, offset_of(gpt, kind, l));
}
static float *gradient_at(const Gpt *gpt, GptKind kind, int64_t l) { return gpt->gradients + offset_of(gpt, kind, l); }

const char *gpt_find_nonfinite_activation(const Gpt *gpt, char *text, size_t size)
{
    static const struct { Activation activation; const char *name; int real; } parts[] = {
        {ACT_LN1, "output of the norm before attention", 1}, {ACT_QKV, "queries, keys and values", 1},
        {ACT_ATT, "output of attention", 1},                 {ACT_LSE, "log-sum-exp of attention", 0},
        {ACT_RESID_MID, "sum behind attention", 0},          {ACT_LN2, "output of the norm before the MLP", 1},
        {ACT_PRE, "hidden layer of the MLP", 1},
    };
    int64_t L = gpt->config.layers, N = gpt->rows, C = gpt->config.channels;
    int64_t widths[ACT_COUNT] = {[ACT_QKV] = 3 * C, [ACT_LSE] = gpt->config.heads, [ACT_PRE] = 4 * C};
    float *staging = gpt->act.slots[ACT_RESID] > L ? (float *)malloc(STAGING_ELEMENTS * sizeof(float)) : NULL;
    int kept = gpt->act.slots[ACT_QKV] >= L, found = 0;
    if (!staging) return NULL;
    if (holds_nonfinite(gpt, resid_at(gpt, ACT_RESID, 0), N * C, 0, staging))
        found = snprintf(text, size, "sum of the embeddings");
    for (int64_t l = 0; l < L && !found; l++) {
        int spread = holds_nonfinite(gpt, resid_at(gpt, ACT_RESID, l + 1), N * C, 0, staging);
        for (size_t p = 0; p < sizeof parts / sizeof parts[0] && kept && !found; p++) {
            Activation a = parts[p].activation;
            if (!spread && a != ACT_LSE) continue; /* all else in a block reaches its output */
            if (holds_nonfinite(gpt, act_at(gpt, a, l), N * (widths[a] ? widths[a] : C), parts[p].real, staging))
                found = snprintf(text, size, "%s in block %d", parts[p].name, (int)l);
        }
        if (spread && !found) found = snprintf(text, size, "output of block %d", (int)l);
    }
    if (!found && holds_nonfinite(gpt, act_at(gpt, ACT_LNF, 0), N * C, 1, staging))
        found = snprintf(text, size, "output of the last norm");
    free(staging);
    return found ? text : NULL;
}

/* Keeps what attention says went wrong, NULL where nothing did, of more than one the first. */
static void keep_fault(Gpt *gpt, const char *fault)
{
    if (fault && !gpt->fault) gpt->fault = attention_words(fault, gpt->fault_text);
}

static void attention_forward(Gpt *gpt, int64_t l, int64_t B, int64_t T)
{
    AttentionShape shape = attention_shape(&gpt->config, &gpt->options, gpt->backend, B, T);
    const void *qkv = act_at(gpt, ACT_QKV, l);
    size_t element = gpt->backend->element;
    const char *fault = gpt->attention->forward(
        attention_rows_output(act_at(gpt, ACT_ATT, l), &shape), (float *)act_at(gpt, ACT_LSE, l), act_at(gpt, ACT_SAVED, l),
        gpt->scratch + gpt->layout.attention, attention_packed_input(qkv, 0, &shape, element),
        attention_packed_input(qkv, 1, &shape, element), attention_packed_input(qkv, 2, &shape, element), &shape,
        gpt->backend->attention_stream(gpt->stream));
    keep_fault(gpt, fault);
}

/* What a pass has to do with the cache: nothing; its rows are a whole text, to be kept for sequences first..first+count-1;
 * or they are one token, at `position`, of each sequence. */
typedef struct CacheUse {
    enum { CACHE_UNUSED, CACHE_FILLED, CACHE_EXTENDED } kind;
    int64_t first, count, position;
} CacheUse;

static const CacheUse no_cache = {CACHE_UNUSED, 0, 0, 0};

/* Attention of layer l, its queries, keys and values being in ACT_QKV. */
static void attend(Gpt *gpt, int64_t l, int64_t B, int64_t T, CacheUse use)
{
    const Backend *be = gpt->backend;
    int64_t room = gpt->options.sequence, NH = gpt->config.heads, HS = gpt->config.channels / NH;
    void *qkv = act_at(gpt, ACT_QKV, l), *cache = act_at(gpt, ACT_CACHE, l);
    float scale = attention_shape(&gpt->config, &gpt->options, be, B, T).scale;
    if (use.kind == CACHE_EXTENDED) {
        be->cache_attend(act_at(gpt, ACT_ATT, l), cache, qkv, scale, B, use.position, room, NH, HS, gpt->stream);
        return;
    }
    if (use.kind == CACHE_FILLED) be->cache_fill(cache, qkv, use.first, use.count, T, room, NH, HS, gpt->stream);
    attention_forward(gpt, l, B, T);
}

/* Block l from its ln1 on up to gelu(fc): all that its backward reads. resid: the block's input (N,C). */
static void block_forward(Gpt *gpt, int64_t l, int64_t B, int64_t T, const float *resid, CacheUse use)
{
    const Backend *be = gpt->backend;
    int64_t N = B * T, C = gpt->config.channels;
    void *branch = gpt->scratch + gpt->layout.branch;
    range_begin("qkv forward");
    be->linear_forward(act_at(gpt, ACT_QKV, l), act_at(gpt, ACT_LN1, l), weight_at(gpt, GPT_QKV_W, l),
                       weight_at(gpt, GPT_QKV_B, l), N, C, 3 * C, gpt->stream);
    range_end();
    range_begin("attention forward");
    attend(gpt, l, B, T, use);
    range_end();
    range_begin("proj forward");
    be->linear_forward(branch, act_at(gpt, ACT_ATT, l), weight_at(gpt, GPT_PROJ_W, l), weight_at(gpt, GPT_PROJ_B, l), N, C,
                       C, gpt->stream);
    range_end();
    be->residual_layernorm_forward(resid_at(gpt, ACT_RESID_MID, l), act_at(gpt, ACT_LN2, l),
                                   (float *)act_at(gpt, ACT_LN2_MEAN, l), (float *)act_at(gpt, ACT_LN2_RSTD, l), resid,
                                   branch, exact_weight_at(gpt, GPT_LN2_W, l), exact_weight_at(gpt, GPT_LN2_B, l), N, C,
                                   gpt->stream);
    range_begin("fc forward");
    be->linear_gelu_forward(act_at(gpt, ACT_GELU, l), act_at(gpt, ACT_PRE, l), act_at(gpt, ACT_LN2, l),
                            weight_at(gpt, GPT_FC_W, l), weight_at(gpt, GPT_FC_B, l), N, C, 4 * C, gpt->stream);
    range_end();
}

/* The block's last projection, its sum into the next block's input, and that block's ln1 (after the last block: ln_f). */
static void block_finish(Gpt *gpt, int64_t l, int64_t N)
{
    const Backend *be = gpt->backend;
    int64_t C = gpt->config.channels;
    void *branch = gpt->scratch + gpt->layout.branch;
    range_begin("fcproj forward");
    be->linear_forward(branch, act_at(gpt, ACT_GELU, l), weight_at(gpt, GPT_FCPROJ_W, l), weight_at(gpt, GPT_FCPROJ_B, l), N,
                       4 * C, C, gpt->stream);
    range_end();
    int last = l + 1 == gpt->config.layers;
    Activation out = last ? ACT_LNF : ACT_LN1, mean = last ? ACT_LNF_MEAN : ACT_LN1_MEAN,
               rstd = last ? ACT_LNF_RSTD : ACT_LN1_RSTD;
    be->residual_layernorm_forward(resid_at(gpt, ACT_RESID, l + 1), act_at(gpt, out, l + 1),
                                   (float *)act_at(gpt, mean, l + 1), (float *)act_at(gpt, rstd, l + 1),
                                   resid_at(gpt, ACT_RESID_MID, l), branch,
                                   exact_weight_at(gpt, last ? GPT_LNF_W : GPT_LN1_W, l + 1),
                                   exact_weight_at(gpt, last ? GPT_LNF_B : GPT_LN1_B, l + 1), N, C, gpt->stream);
}

/* ln1 of block l alone: of the first block, and when a block is computed again. */
static void block_start(Gpt *gpt, int64_t l, int64_t N)
{
    gpt->backend->layernorm_forward(act_at(gpt, ACT_LN1, l), (float *)act_at(gpt, ACT_LN1_MEAN, l),
                                    (float *)act_at(gpt, ACT_LN1_RSTD, l), resid_at(gpt, ACT_RESID, l),
                                    exact_weight_at(gpt, GPT_LN1_W, l), exact_weight_at(gpt, GPT_LN1_B, l), N,
                                    gpt->config.channels, gpt->stream);
}

/* Lays a batch of N tokens out as ACT_BATCH: tokens, targets (NULL: none) and, where it will be wanted, the embedding's
 * plan. */
static void batch_lay_out(int32_t *batch, const int32_t *tokens, const int32_t *targets, int64_t N, int with_plan)
{
    memcpy(batch, tokens, (size_t)N * sizeof *tokens);
    if (targets) memcpy(batch + N, targets, (size_t)N * sizeof *targets);
    if (with_plan) embedding_plan(batch + 2 * N, tokens, N);
}

/* Brings a batch to the device now. */
static void batch_copy_in(Gpt *gpt, const int32_t *tokens, const int32_t *targets, int64_t N, int with_plan)
{
    batch_lay_out(gpt->batch_host, tokens, targets, N, with_plan);
    gpt->backend->copy_in(act_at(gpt, ACT_BATCH, 0), gpt->batch_host, batch_bytes(N), gpt->stream);
}

/* Parts of the batch of N tokens that is on the device. */
static const int32_t *batch_tokens(const Gpt *gpt) { return (const int32_t *)act_at(gpt, ACT_BATCH, 0); }
static const int32_t *batch_targets(const Gpt *gpt, int64_t N) { return batch_tokens(gpt) + N; }
static const int32_t *batch_plan(const Gpt *gpt, int64_t N) { return batch_tokens(gpt) + 2 * N; }

/* The batch on the device, B sequences of T, to ln_f's output. */
static void model_forward(Gpt *gpt, int64_t B, int64_t T, CacheUse use)
{
    const Backend *be = gpt->backend;
    int64_t N = B * T;
    gpt->rows = N;
    const float *wpe = exact_weight_at(gpt, GPT_WPE, 0) + use.position * gpt->config.channels; /* (at least T rows, C) */
    be->embedding_forward(resid_at(gpt, ACT_RESID, 0), batch_tokens(gpt), exact_weight_at(gpt, GPT_WTE, 0), wpe, B, T,
                          gpt->config.channels, gpt->stream);
    block_start(gpt, 0, N);
    for (int64_t l = 0; l < gpt->config.layers; l++) {
        block_forward(gpt, l, B, T, resid_at(gpt, ACT_RESID, l), use);
        block_finish(gpt, l, N);
    }
}

/* Adds the losses of all rows to the result, chunk by chunk; where dscale is not 0 also dnorm = the gradient of ln_f's
 * output, and wte's gradient. */
static void classify(Gpt *gpt, int64_t N, float dscale)
{
    const Backend *be = gpt->backend;
    int64_t C = gpt->config.channels;
    size_t row = (size_t)C * be->element;
    float *losses = (float *)act_at(gpt, ACT_LOSSES, 0);
    char *logits = gpt->scratch + gpt->layout.logits, *hidden = (char *)act_at(gpt, ACT_LNF, 0);
    const void *wte = weight_at(gpt, GPT_WTE, 0);
    for (int64_t first = 0; first < N; first += gpt->chunk) {
        int64_t n = N - first < gpt->chunk ? N - first : gpt->chunk;
        char *rows = hidden + (size_t)first * row;
        range_begin("head forward");
        be->linear_forward(logits, rows, wte, NULL, n, C, gpt->Vp, gpt->stream);
        range_end();
        be->loss_forward_backward(losses + first, logits, batch_targets(gpt, N) + first, dscale, n, gpt->config.vocab,
                                  gpt->Vp, gpt->stream);
        if (dscale == 0) continue;
        range_begin("head backward input");
        be->linear_backward_input(gpt->scratch + gpt->layout.dnorm + (size_t)first * row, logits, wte, NULL, n, C, gpt->Vp,
                                  gpt->stream);
        range_end();
        range_begin("head backward weight");
        be->linear_backward_weight(gradient_at(gpt, GPT_WTE, 0), NULL, gpt->scratch + gpt->layout.work, logits, rows, n, C,
                                   gpt->Vp, gpt->stream);
        range_end();
    }
    be->losses_sum(&result_at(gpt)->loss, losses, N, gpt->stream);
}

/* The sum of losses that the device has counted since the result was zeroed. */
static double loss_result(Gpt *gpt)
{
    StepResult result;
    gpt->backend->copy_out(&result, result_at(gpt), sizeof result, gpt->stream);
    return gpt->fault ? (double)NAN : result.loss;
}

double gpt_loss(Gpt *gpt, const int32_t *tokens, const int32_t *targets, int64_t B, int64_t T)
{
    if (B < 1 || T < 1) return 0;
    batch_copy_in(gpt, tokens, targets, B * T, 0);
    gpt->backend->zero(result_at(gpt), sizeof(StepResult), gpt->stream);
    model_forward(gpt, B, T, no_cache);
    classify(gpt, B * T, 0);
    return loss_result(gpt);
}

double gpt_losses(Gpt *gpt, float *losses, const int32_t *tokens, const int32_t *targets, int64_t B, int64_t T)
{
    double sum = gpt_loss(gpt, tokens, targets, B, T);
    if (B > 0 && T > 0) gpt->backend->copy_out(losses, act_at(gpt, ACT_LOSSES, 0), (size_t)(B * T) * 4, gpt->stream);
    return sum;
}

/* Logits (count,V) of rows row, row+1, ... of ln_f's output, to host memory. */
static void logits_copy_out(Gpt *gpt, float *logits, int64_t row, int64_t count)
{
    const Backend *be = gpt->backend;
    int64_t C = gpt->config.channels, V = gpt->config.vocab;
    float *staging = (float *)(gpt->scratch + gpt->layout.work);
    char *out = gpt->scratch + gpt->layout.logits;
    for (int64_t i = 0; i < count; i++) {
        int64_t at = i % gpt->chunk;
        const char *logits_row = out + (size_t)(at * gpt->Vp) * be->element; /* (Vp) */
        if (at == 0) { /* the next rows that the scratch can hold */
            const char *hidden = (const char *)act_at(gpt, ACT_LNF, 0) + (size_t)((row + i) * C) * be->element;
            int64_t rows = count - i < gpt->chunk ? count - i : gpt->chunk;
            range_begin("head forward");
            be->linear_forward(out, hidden, weight_at(gpt, GPT_WTE, 0), NULL, rows, C, gpt->Vp, gpt->stream);
            range_end();
        }
        if (be->dtype == DTYPE_FP32) {
            be->copy_out(logits + i * V, logits_row, (size_t)V * 4, gpt->stream);
            continue;
        }
        for (int64_t done = 0; done < V; done += STAGING_ELEMENTS) {
            int64_t n = V - done < STAGING_ELEMENTS ? V - done : STAGING_ELEMENTS;
            be->to_fp32(staging, logits_row + (size_t)done * be->element, n, gpt->stream);
            be->copy_out(logits + i * V + done, staging, (size_t)n * 4, gpt->stream);
        }
    }
}

void gpt_logits(Gpt *gpt, float *logits, const int32_t *tokens, int64_t T)
{
    batch_copy_in(gpt, tokens, NULL, T, 0);
    model_forward(gpt, 1, T, no_cache);
    logits_copy_out(gpt, logits, T - 1, 1);
}

void gpt_prefill(Gpt *gpt, float *logits, int64_t first, int64_t count, const int32_t *tokens, int64_t n)
{
    batch_copy_in(gpt, tokens, NULL, n, 0);
    model_forward(gpt, 1, n, (CacheUse){CACHE_FILLED, first, count, 0});
    if (logits) logits_copy_out(gpt, logits, n - 1, 1);
}

void gpt_decode(Gpt *gpt, float *logits, const int32_t *tokens, int64_t B, int64_t t)
{
    batch_copy_in(gpt, tokens, NULL, B, 0);
    model_forward(gpt, B, 1, (CacheUse){CACHE_EXTENDED, 0, B, t});
    logits_copy_out(gpt, logits, 0, B);
}

/* --- backward and update ----------------------------------------------------------------------------------------------- */

static void attention_backward(Gpt *gpt, int64_t l, int64_t B, int64_t T)
{
    AttentionShape shape = attention_shape(&gpt->config, &gpt->options, gpt->backend, B, T);
    const void *qkv = act_at(gpt, ACT_QKV, l);
    void *dqkv = gpt->scratch + gpt->layout.dqkv;
    size_t element = gpt->backend->element;
    const char *fault = gpt->attention->backward(
        attention_packed_output(dqkv, 0, &shape, element), attention_packed_output(dqkv, 1, &shape, element),
        attention_packed_output(dqkv, 2, &shape, element), gpt->scratch + gpt->layout.attention,
        attention_rows_input(gpt->scratch + gpt->layout.dnorm, &shape), attention_packed_input(qkv, 0, &shape, element),
        attention_packed_input(qkv, 1, &shape, element), attention_packed_input(qkv, 2, &shape, element),
        attention_rows_input(act_at(gpt, ACT_ATT, l), &shape), (const float *)act_at(gpt, ACT_LSE, l),
        act_at(gpt, ACT_SAVED, l), &shape, gpt->backend->attention_stream(gpt->stream));
    keep_fault(gpt, fault);
}

/* The gradient of the residual stream (N,C), and its rounded copy. */
static float *dresid_at(const Gpt *gpt) { return (float *)(gpt->scratch + gpt->layout.dresid); }
static void *dresid_real_at(const Gpt *gpt) { return gpt->scratch + gpt->layout.dresid_real[gpt->dresid_turn]; }

/* What is queued from here on waits for products of weights up to this ticket: it writes what they read. */
static void wait_for_readers(Gpt *gpt, int64_t ticket)
{
    if (gpt->backend->side_join) gpt->backend->side_join(gpt->stream, ticket);
}

/* Gradients of a weight (OC,C) of layer l and its bias, from dout (N,OC) and the input (N,C). Nothing but the update reads
 * them, so they may be computed beside the gradients that the layers below wait for. Returns the ticket: until it is waited
 * for, dout and the input stay as they are. */
static int64_t weight_backward(Gpt *gpt, GptKind weight, GptKind bias, int64_t l, const void *dout, Activation input, int64_t N,
                               int64_t C, int64_t OC)
{
    static const char *const names[] = {[GPT_QKV_W] = "qkv backward weight", [GPT_PROJ_W] = "proj backward weight",
                                        [GPT_FC_W] = "fc backward weight", [GPT_FCPROJ_W] = "fcproj backward weight"};
    const Backend *be = gpt->backend;
    range_begin(names[weight]);
    if (be->side_begin) be->side_begin(gpt->stream);
    be->linear_backward_weight(gradient_at(gpt, weight, l), gradient_at(gpt, bias, l), gpt->scratch + gpt->layout.side_work,
                               dout, act_at(gpt, input, l), N, C, OC, gpt->stream);
    int64_t ticket = be->side_end ? be->side_end(gpt->stream) : 0;
    range_end();
    return ticket;
}

/* Through the norm of layer l whose input is resid: dresid becomes the gradient of that. `flow` is what flows along beside the
 * norm (NULL: nothing), dresid or nothing; `rounds`: products read the result. */
static void norm_backward(Gpt *gpt, int64_t l, int64_t N, const float *resid, const float *flow, int rounds, GptKind weight,
                          GptKind bias, Activation mean, Activation rstd)
{
    const Backend *be = gpt->backend;
    int turn = !gpt->dresid_turn;
    /* In fp32 both turns are one place, and the sum is formed in it. */
    wait_for_readers(gpt, gpt->dresid_reader[turn]);
    if (be->dtype == DTYPE_FP32) wait_for_readers(gpt, gpt->dresid_reader[!turn]);
    gpt->dresid_turn = turn;
    be->layernorm_backward(dresid_at(gpt), rounds ? dresid_real_at(gpt) : NULL, gradient_at(gpt, weight, l),
                           gradient_at(gpt, bias, l), gpt->scratch + gpt->layout.work, flow,
                           gpt->scratch + gpt->layout.dnorm, resid, exact_weight_at(gpt, weight, l),
                           (float *)act_at(gpt, mean, l), (float *)act_at(gpt, rstd, l), N, gpt->config.channels, gpt->stream);
}

/* The feed-forward half: dresid is the gradient of the block's output on entry, of resid_mid on return. */
static void mlp_backward(Gpt *gpt, int64_t l, int64_t N)
{
    const Backend *be = gpt->backend;
    int64_t C = gpt->config.channels;
    void *dresid = dresid_real_at(gpt), *dnorm = gpt->scratch + gpt->layout.dnorm, *dpre = gpt->scratch + gpt->layout.dpre;
    gpt->dresid_reader[gpt->dresid_turn] =
        weight_backward(gpt, GPT_FCPROJ_W, GPT_FCPROJ_B, l, dresid, ACT_GELU, N, 4 * C, C);
    wait_for_readers(gpt, gpt->dpre_reader);
    range_begin("fcproj backward input");
    be->linear_backward_input(dpre, dresid, weight_at(gpt, GPT_FCPROJ_W, l), act_at(gpt, ACT_PRE, l), N, 4 * C, C,
                              gpt->stream);
    range_end();
    gpt->dpre_reader = weight_backward(gpt, GPT_FC_W, GPT_FC_B, l, dpre, ACT_LN2, N, C, 4 * C);
    range_begin("fc backward input");
    be->linear_backward_input(dnorm, dpre, weight_at(gpt, GPT_FC_W, l), NULL, N, C, 4 * C, gpt->stream);
    range_end();
    norm_backward(gpt, l, N, resid_at(gpt, ACT_RESID_MID, l), dresid_at(gpt), 1, GPT_LN2_W, GPT_LN2_B, ACT_LN2_MEAN,
                  ACT_LN2_RSTD);
}

/* The attention half: dresid is the gradient of resid_mid on entry, of the block's input on return. */
static void attention_half_backward(Gpt *gpt, int64_t l, int64_t B, int64_t T)
{
    const Backend *be = gpt->backend;
    int64_t N = B * T, C = gpt->config.channels;
    void *dresid = dresid_real_at(gpt), *dnorm = gpt->scratch + gpt->layout.dnorm, *dqkv = gpt->scratch + gpt->layout.dqkv;
    gpt->dresid_reader[gpt->dresid_turn] = weight_backward(gpt, GPT_PROJ_W, GPT_PROJ_B, l, dresid, ACT_ATT, N, C, C);
    range_begin("proj backward input");
    be->linear_backward_input(dnorm, dresid, weight_at(gpt, GPT_PROJ_W, l), NULL, N, C, C, gpt->stream);
    range_end();
    wait_for_readers(gpt, gpt->dqkv_reader);
    range_begin("attention backward");
    attention_backward(gpt, l, B, T);
    range_end();
    gpt->dqkv_reader = weight_backward(gpt, GPT_QKV_W, GPT_QKV_B, l, dqkv, ACT_LN1, N, C, 3 * C);
    range_begin("qkv backward input");
    be->linear_backward_input(dnorm, dqkv, weight_at(gpt, GPT_QKV_W, l), NULL, N, C, 3 * C, gpt->stream);
    range_end();
    /* Below the first block no product reads dresid, only the embedding, in fp32. */
    norm_backward(gpt, l, N, resid_at(gpt, ACT_RESID, l), dresid_at(gpt), l > 0, GPT_LN1_W, GPT_LN1_B, ACT_LN1_MEAN,
                  ACT_LN1_RSTD);
}

/* Forward and backward of the batch on the device. */
static void model_backward(Gpt *gpt, int64_t B, int64_t T, float dscale)
{
    const Backend *be = gpt->backend;
    int64_t N = B * T, C = gpt->config.channels;
    model_forward(gpt, B, T, no_cache);
    classify(gpt, N, dscale);
    if (dscale == 0) return;

    gpt->dresid_reader[0] = gpt->dresid_reader[1] = gpt->dpre_reader = gpt->dqkv_reader = 0;
    /* The stream ends in ln_f: nothing flows along beside it. */
    norm_backward(gpt, gpt->config.layers, N, resid_at(gpt, ACT_RESID, gpt->config.layers), NULL, 1, GPT_LNF_W, GPT_LNF_B,
                  ACT_LNF_MEAN, ACT_LNF_RSTD);
    for (int64_t l = gpt->config.layers - 1; l >= 0; l--) {
        if (gpt->options.recompute != GPT_RECOMPUTE_NONE) wait_for_readers(gpt, gpt->dqkv_reader); /* the newest ticket */
        if (gpt->options.recompute == GPT_RECOMPUTE_BLOCK) {
            block_start(gpt, l, N);
            block_forward(gpt, l, B, T, resid_at(gpt, ACT_RESID, l), no_cache);
        } else if (gpt->options.recompute == GPT_RECOMPUTE_GELU) {
            be->gelu_forward(act_at(gpt, ACT_GELU, l), act_at(gpt, ACT_PRE, l), 4 * N * C, gpt->stream);
        }
        mlp_backward(gpt, l, N);
        attention_half_backward(gpt, l, B, T);
    }
    be->embedding_backward(gradient_at(gpt, GPT_WTE, 0), gradient_at(gpt, GPT_WPE, 0), gpt->scratch + gpt->layout.work,
                           dresid_at(gpt), batch_plan(gpt, N), B, T, C, gpt->stream);
}

double gpt_backward(Gpt *gpt, const int32_t *tokens, const int32_t *targets, int64_t B, int64_t T, float dscale)
{
    if (B < 1 || T < 1) return 0;
    batch_copy_in(gpt, tokens, targets, B * T, 1);
    gpt->backend->zero(result_at(gpt), sizeof(StepResult), gpt->stream);
    model_backward(gpt, B, T, dscale);
    return loss_result(gpt);
}

void gpt_zero_gradients(Gpt *gpt) { gpt->backend->zero(gpt->gradients, gpt->plan.gradients, gpt->stream); }

/* Norm and AdamW with the step that is on the device. */
static void model_update(Gpt *gpt)
{
    const Backend *be = gpt->backend;
    float *norm = &result_at(gpt)->norm;
    be->global_norm(norm, gpt->scratch + gpt->layout.work, gpt->gradients, gpt->flat.size, gpt->stream);
    be->adamw_update(gpt->parameters, gpt->master, gpt->moments, gpt->moments + gpt->flat.size, gpt->gradients, norm,
                     (const AdamwStep *)act_at(gpt, ACT_STEP, 0), gpt->flat.size, gpt->flat.matrices, gpt->stream);
}

float gpt_update(Gpt *gpt, const AdamwStep *step)
{
    float norm;
    gpt->backend->copy_in(act_at(gpt, ACT_STEP, 0), step, sizeof *step, gpt->stream);
    model_update(gpt);
    gpt->backend->copy_out(&norm, &result_at(gpt)->norm, sizeof norm, gpt->stream);
    return norm;
}

/* --- a whole update, queued -------------------------------------------------------------------------------------------- */

/* Where micro-batch m of an update lies, in host memory and on the device; half alternates between updates. */
static size_t upload_offset(const Gpt *gpt, int half, int64_t m)
{
    size_t bytes = batch_bytes(gpt->options.batch * gpt->options.sequence);
    return ((size_t)half * (size_t)micro_steps_most(&gpt->options) + (size_t)m) * bytes;
}

void gpt_upload(Gpt *gpt, int64_t m, const int32_t *tokens, const int32_t *targets)
{
    int64_t N = gpt->options.batch * gpt->options.sequence;
    size_t offset = upload_offset(gpt, gpt->next, m);
    int32_t *host = (int32_t *)((char *)gpt->upload_host + offset);
    batch_lay_out(host, tokens, targets, N, 1);
    gpt->backend->upload((char *)act_at(gpt, ACT_UPLOADS, 0) + offset, host, batch_bytes(N), gpt->stream);
}

/* Queues forward and backward of the batch on the device, from a recording where the backend can make one. The first time
 * nothing is recorded: libraries set themselves up then, and the fastest ways are found. */
static void micro_step_queue(Gpt *gpt, float dscale)
{
    const Backend *be = gpt->backend;
    int64_t B = gpt->options.batch, T = gpt->options.sequence;
    if (!be->record_begin || gpt->options.no_recording || gpt->recorded_dscale != dscale) {
        gpt->recorded_dscale = dscale;
        if (gpt->micro_recording) be->recording_free(gpt->micro_recording);
        gpt->micro_recording = NULL;
        if (be->measure) be->measure(gpt->stream, 1);
        model_backward(gpt, B, T, dscale);
        if (be->measure) be->measure(gpt->stream, 0);
        return;
    }
    if (!gpt->micro_recording) {
        be->record_begin(gpt->stream);
        model_backward(gpt, B, T, dscale);
        gpt->micro_recording = be->record_end(gpt->stream);
    }
    be->replay(gpt->micro_recording, gpt->stream);
}

static void update_queue(Gpt *gpt)
{
    const Backend *be = gpt->backend;
    if (!be->record_begin || gpt->options.no_recording) {
        model_update(gpt);
        return;
    }
    if (!gpt->update_recording) {
        be->record_begin(gpt->stream);
        model_update(gpt);
        gpt->update_recording = be->record_end(gpt->stream);
    }
    be->replay(gpt->update_recording, gpt->stream);
}

void gpt_step_launch(Gpt *gpt, int64_t micro_steps, float dscale, const AdamwStep *step)
{
    const Backend *be = gpt->backend;
    size_t bytes = batch_bytes(gpt->options.batch * gpt->options.sequence);
    gpt->rows = gpt->options.batch * gpt->options.sequence; /* a recording that is replayed does not say it */
    *gpt->step_host = *step;
    be->upload(act_at(gpt, ACT_STEP, 0), gpt->step_host, sizeof *step, gpt->stream);
    be->upload_join(gpt->stream);
    be->zero(result_at(gpt), sizeof(StepResult), gpt->stream);
    gpt_zero_gradients(gpt);
    for (int64_t m = 0; m < micro_steps; m++) {
        be->copy(act_at(gpt, ACT_BATCH, 0), (char *)act_at(gpt, ACT_UPLOADS, 0) + upload_offset(gpt, gpt->next, m), bytes,
                 gpt->stream);
        micro_step_queue(gpt, dscale);
    }
    update_queue(gpt);
    be->download(gpt->result_host, result_at(gpt), sizeof(StepResult), gpt->stream);
    gpt->next = !gpt->next;
}

void gpt_step_finish(Gpt *gpt, double *loss, float *norm)
{
    gpt->backend->synchronize(gpt->stream);
    *loss = gpt->fault ? (double)NAN : gpt->result_host->loss;
    *norm = gpt->result_host->norm;
}
