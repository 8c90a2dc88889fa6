/* attention_check.h - runs an attention kernel on a problem as a hostile caller would, and judges what came out.
 *
 * run_kernel lays the inputs out as asked, fills every output, saved, scratch and every gap between elements with NaN,
 * fences each buffer, calls forward and backward (with scratch spoilt again in between), and then looks at every byte that
 * the kernel had no business to write: the inputs, the gaps, the fences, and after backward also O, LSE and saved.
 * judge_result compares what was written with the truth by the bounds of tests/bounds.h.
 *
 * The tests, the bench and every kernel of the table go through here. Where pointers live is told by a Machine: four
 * functions and a stream, so that a kernel on a GPU is checked by the same code.
 */
#ifndef ATTENTION_CHECK_H
#define ATTENTION_CHECK_H

#include <stdarg.h>
#include <stdio.h>
#include <sys/mman.h>

#include "tests/attention_truth.h"
#include "trainer/crash.h"

/* Where a kernel's pointers live. copy_out waits for the work on the stream. */
typedef struct Machine {
    AttentionDevice device;
    int sm;
    void *stream;
    void *(*alloc)(size_t bytes);
    void (*free)(void *memory);
    void (*copy_in)(void *memory, const void *host, size_t bytes);
    void (*copy_out)(void *host, const void *memory, size_t bytes);
} Machine;

static inline void *host_alloc(size_t bytes) { return aligned_alloc(256, (bytes + 255) / 256 * 256); }
static inline void host_free(void *memory) { free(memory); }
static inline void host_copy(void *to, const void *from, size_t bytes) { memcpy(to, from, bytes); }

static const Machine cpu_machine = {ATTENTION_CPU, 0, NULL, host_alloc, host_free, host_copy, host_copy};

typedef enum Layout {
    LAYOUT_HEADS,  /* (B, NH, T, HS), as PyTorch has it */
    LAYOUT_ROWS,   /* (B, T, NH, HS) */
    LAYOUT_PACKED, /* Q, K, V of one (B, T, 3, NH, HS), so are their gradients; O and dO as LAYOUT_ROWS */
    LAYOUT_GAPS,   /* (B, NH, T, HS) with odd gaps after rows, heads and batch entries */
    LAYOUT_FAR,    /* rows, heads and batch entries more than 2^31 elements apart in the end; on the CPU only */
    LAYOUT_PADDED, /* (B, NH, T, HS) with gaps after rows, strides being multiples of 8 elements whatever HS is */
    LAYOUT_COUNT
} Layout;

static const char *const layout_names[LAYOUT_COUNT] = {"heads", "rows", "packed", "gaps", "far", "padded"};

/* The tensors of a call; the first four are the inputs, in the order of Problem. */
enum { TENSOR_Q, TENSOR_K, TENSOR_V, TENSOR_DO, TENSOR_O, TENSOR_DQ, TENSOR_DK, TENSOR_DV, TENSOR_COUNT };

/* A bit 1 << tensor for every tensor that begins one element late; with UNALIGNED all do, and LSE too. */
enum { ALIGNED = 0, UNALIGNED = (1 << TENSOR_COUNT) - 1 };

static inline const char *unaligned_words(int unaligned)
{
    static const char *const words[TENSOR_COUNT] = {
        ", Q unaligned", ", K unaligned", ", V unaligned", ", dO unaligned", ", O unaligned", ", dQ unaligned",
        ", dK unaligned", ", dV unaligned",
    };
    for (int tensor = 0; tensor < TENSOR_COUNT; tensor++)
        if (unaligned == 1 << tensor) return words[tensor];
    return unaligned == ALIGNED ? "" : unaligned == UNALIGNED ? " unaligned" : ", some tensors unaligned";
}

/* What a kernel gave, dense (B, NH, T, HS), in fp32 whatever the type. */
typedef struct Result {
    float *value[QUANTITY_COUNT];
} Result;

typedef struct Judgement {
    char text[512]; /* what is wrong first, empty where nothing is */
} Judgement;

/* A buffer of a call between two fences, and an image of it on the host as the kernel should leave it. */
typedef struct Fenced {
    const char *name;
    unsigned char *memory; /* on the machine, from the start of the first fence */
    unsigned char *image;  /* on the host */
    size_t start, bytes;   /* where the payload begins; all bytes, fences included */
} Fenced;

typedef struct View {
    Fenced *buffer;
    size_t offset; /* bytes of the first element from `start` */
    int64_t batch_stride, row_stride, head_stride;
} View;

typedef struct Call {
    const Machine *machine;
    const AttentionShape *shape;
    size_t element;
    Layout layout;
    Fenced buffers[TENSOR_COUNT], LSE, saved, scratch;
    View views[TENSOR_COUNT];
} Call;

#define FENCE ((size_t)4096)
#define POISON 0xFF /* bytes of this are a NaN in every type here */

__attribute__((format(printf, 2, 3)))
static inline int judge_fault(Judgement *judgement, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(judgement->text, sizeof judgement->text, format, arguments);
    va_end(arguments);
    return -1;
}

/* --- buffers ------------------------------------------------------------------------------------------------------- */

static inline Fenced fence(const Call *call, const char *name, size_t payload, size_t shift)
{
    Fenced buffer = {name, NULL, NULL, FENCE + shift, payload + shift + 2 * FENCE};
    if (call->layout == LAYOUT_FAR && payload > ((size_t)1 << 32)) {
        void *sparse = mmap(NULL, buffer.bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        buffer.memory = sparse == MAP_FAILED ? NULL : (unsigned char *)sparse;
        return buffer;
    }
    buffer.memory = (unsigned char *)call->machine->alloc(buffer.bytes);
    buffer.image = (unsigned char *)allocate_zeros((int64_t)buffer.bytes, 1);
    memset(buffer.image, POISON, buffer.bytes);
    if (buffer.memory) call->machine->copy_in(buffer.memory, buffer.image, buffer.bytes);
    return buffer;
}

static inline void unfence(const Call *call, Fenced *buffer)
{
    if (!buffer->image && buffer->memory) munmap(buffer->memory, buffer->bytes);
    else if (buffer->memory) call->machine->free(buffer->memory);
    free(buffer->image);
}

/* Whether the buffer is as its image says; a sparse one, without image, is not looked at. */
static inline int fence_holds(const Call *call, const Fenced *buffer, Judgement *judgement, const char *when)
{
    if (!buffer->image) return 1;
    unsigned char *now = (unsigned char *)allocate_zeros((int64_t)buffer->bytes, 1);
    call->machine->copy_out(now, buffer->memory, buffer->bytes);
    size_t at = 0;
    if (memcmp(now, buffer->image, buffer->bytes) != 0)
        while (now[at] == buffer->image[at]) at++;
    else
        at = buffer->bytes;
    free(now);
    if (at == buffer->bytes) return 1;
    judge_fault(judgement, "%s wrote byte %lld of %s (%zu bytes), which is not its to write", when,
                (long long)at - (long long)buffer->start, buffer->name, buffer->bytes - buffer->start - FENCE);
    return 0;
}

/* --- views --------------------------------------------------------------------------------------------------------- */

/* The strides of a tensor, and the elements it spans, in *span. */
static inline View view_strides(Layout layout, int tensor, const AttentionShape *shape, size_t *span)
{
    int64_t T = shape->T, HS = shape->HS, C = shape->NH * HS;
    View view = {NULL, 0, 0, 0, 0};
    if (layout == LAYOUT_PACKED && (tensor == TENSOR_DO || tensor == TENSOR_O)) layout = LAYOUT_ROWS;
    switch (layout) {
    case LAYOUT_HEADS: view.row_stride = HS; view.head_stride = T * HS; view.batch_stride = T * C; break;
    case LAYOUT_ROWS: view.row_stride = C; view.head_stride = HS; view.batch_stride = T * C; break;
    case LAYOUT_PACKED: view.row_stride = 3 * C; view.head_stride = HS; view.batch_stride = T * 3 * C; break;
    case LAYOUT_GAPS:
        view.row_stride = HS + 3;
        view.head_stride = T * view.row_stride + 7;
        view.batch_stride = shape->NH * view.head_stride + 11;
        break;
    case LAYOUT_PADDED:
        view.row_stride = HS / 8 * 8 + 16;
        view.head_stride = T * view.row_stride;
        view.batch_stride = shape->NH * view.head_stride;
        break;
    default:
        view.row_stride = ((int64_t)1 << 27) + 64;
        view.head_stride = T * view.row_stride;
        view.batch_stride = shape->NH * view.head_stride;
    }
    *span = (size_t)(shape->B * view.batch_stride);
    return view;
}

static inline size_t element_offset(const Call *call, int tensor, int64_t head, int64_t t)
{
    const View *view = &call->views[tensor];
    int64_t b = head / call->shape->NH, h = head % call->shape->NH;
    int64_t element = b * view->batch_stride + h * view->head_stride + t * view->row_stride;
    return view->buffer->start + view->offset + (size_t)element * call->element;
}

/* values (B, NH, T, HS) -> the tensor's elements in `memory`, in the call's type. */
static inline void scatter(const Call *call, int tensor, unsigned char *memory, const float *values)
{
    int64_t T = call->shape->T, HS = call->shape->HS, heads = call->shape->B * call->shape->NH;
    for (int64_t row = 0; row < heads * T; row++) {
        unsigned char *to = memory + element_offset(call, tensor, row / T, row % T);
        for (int64_t d = 0; d < HS; d++) {
            uint32_t bits;
            memcpy(&bits, &values[row * HS + d], 4);
            if (call->element == 2) bits >>= 16;
            memcpy(to + (size_t)d * call->element, &bits, call->element); /* little endian, as all machines here are */
        }
    }
}

/* The elements in `memory` -> values; each element in `image`, where it is not NULL, becomes what it is in `memory`. */
static inline void gather(const Call *call, int tensor, const unsigned char *memory, unsigned char *image, float *values)
{
    int64_t T = call->shape->T, HS = call->shape->HS, heads = call->shape->B * call->shape->NH;
    for (int64_t row = 0; row < heads * T; row++) {
        size_t at = element_offset(call, tensor, row / T, row % T);
        for (int64_t d = 0; d < HS; d++) {
            uint32_t bits = 0;
            memcpy(&bits, memory + at + (size_t)d * call->element, call->element);
            if (call->element == 2) bits <<= 16;
            memcpy(&values[row * HS + d], &bits, 4);
        }
        if (image) memcpy(image + at, memory + at, (size_t)HS * call->element);
    }
}

/* Builds all buffers and views of a call and writes the inputs. Returns 0, or -1 where there is no memory. */
static inline int call_open(Call *call, const Problem *problem, const AttentionKernel *kernel, int unaligned)
{
    static const char *const names[TENSOR_COUNT] = {"Q", "K", "V", "dO", "O", "dQ", "dK", "dV"};
    const AttentionShape *shape = call->shape;
    size_t span, C = (size_t)(shape->NH * shape->HS);
    int ready = 1;
    for (int tensor = 0; tensor < TENSOR_COUNT; tensor++) {
        View view = view_strides(call->layout, tensor, shape, &span);
        size_t shift = unaligned >> tensor & 1 ? call->element : 0;
        int first = tensor <= TENSOR_V ? TENSOR_Q : tensor >= TENSOR_DQ ? TENSOR_DQ : tensor;
        if (call->layout != LAYOUT_PACKED) first = tensor;
        if (first == tensor) call->buffers[tensor] = fence(call, names[tensor], span * call->element, shift);
        view.buffer = &call->buffers[first];
        view.offset = (size_t)(tensor - first) * C * call->element;
        call->views[tensor] = view;
        ready = ready && view.buffer->memory;
    }
    size_t rows = (size_t)(shape->B * shape->NH * shape->T);
    call->LSE = fence(call, "LSE", rows * sizeof(float), unaligned == UNALIGNED ? sizeof(float) : 0);
    call->saved = fence(call, "saved", kernel->saved_bytes(shape), 0);
    call->scratch = fence(call, "scratch", kernel->scratch_bytes(shape), 0);
    ready = ready && call->LSE.memory && call->saved.memory && call->scratch.memory;
    for (int tensor = 0; tensor < INPUT_COUNT && ready; tensor++) {
        Fenced *buffer = call->views[tensor].buffer;
        scatter(call, tensor, buffer->image ? buffer->image : buffer->memory, problem->input[tensor]);
        if (buffer->image) call->machine->copy_in(buffer->memory, buffer->image, buffer->bytes);
    }
    return ready ? 0 : -1;
}

static inline void call_close(Call *call)
{
    for (int tensor = 0; tensor < TENSOR_COUNT; tensor++) unfence(call, &call->buffers[tensor]);
    unfence(call, &call->LSE);
    unfence(call, &call->saved);
    unfence(call, &call->scratch);
}

static inline AttentionInput call_input(const Call *call, int tensor)
{
    const View *view = &call->views[tensor];
    return (AttentionInput){view->buffer->memory + view->buffer->start + view->offset, view->batch_stride, view->row_stride,
                            view->head_stride};
}

static inline AttentionOutput call_output(const Call *call, int tensor)
{
    const View *view = &call->views[tensor];
    return (AttentionOutput){view->buffer->memory + view->buffer->start + view->offset, view->batch_stride,
                             view->row_stride, view->head_stride};
}

/* Whether a kernel takes a shape where that allows TF32, and only there. */
static inline int needs_tf32(const AttentionKernel *kernel, const AttentionShape *shape, int sm)
{
    AttentionShape without = *shape, with = *shape;
    without.tf32 = 0;
    with.tf32 = 1;
    return kernel->refuse(&without, sm) && !kernel->refuse(&with, sm);
}

/* --- a call -------------------------------------------------------------------------------------------------------- */

/* Reads a buffer that the kernel has written whole; from here on the image says it stays so. */
static inline void accept_buffer(const Call *call, Fenced *buffer)
{
    call->machine->copy_out(buffer->image + buffer->start, buffer->memory + buffer->start,
                            buffer->bytes - buffer->start - FENCE);
}

/* Reads a tensor that the kernel has written; from here on the image says its elements stay so. */
static inline void accept_tensor(const Call *call, int tensor, float *values)
{
    Fenced *buffer = call->views[tensor].buffer;
    if (!buffer->image) {
        gather(call, tensor, buffer->memory, NULL, values);
        return;
    }
    unsigned char *now = (unsigned char *)allocate_zeros((int64_t)buffer->bytes, 1);
    call->machine->copy_out(now, buffer->memory, buffer->bytes);
    gather(call, tensor, now, buffer->image, values);
    free(now);
}

static inline const char *call_forward(const Call *call, const AttentionKernel *kernel)
{
    crash_words("crashed in attention kernel %s, forward", kernel->name);
    return kernel->forward(call_output(call, TENSOR_O), (float *)(void *)(call->LSE.memory + call->LSE.start),
                           call->saved.memory + call->saved.start, call->scratch.memory + call->scratch.start,
                           call_input(call, TENSOR_Q), call_input(call, TENSOR_K), call_input(call, TENSOR_V), call->shape,
                           call->machine->stream);
}

static inline const char *call_backward(const Call *call, const AttentionKernel *kernel)
{
    crash_words("crashed in attention kernel %s, backward", kernel->name);
    return kernel->backward(call_output(call, TENSOR_DQ), call_output(call, TENSOR_DK), call_output(call, TENSOR_DV),
                            call->scratch.memory + call->scratch.start, call_input(call, TENSOR_DO),
                            call_input(call, TENSOR_Q), call_input(call, TENSOR_K), call_input(call, TENSOR_V),
                            call_input(call, TENSOR_O), (const float *)(void *)(call->LSE.memory + call->LSE.start),
                            call->saved.memory + call->saved.start, call->shape, call->machine->stream);
}

/* Whether no buffer holds anything but what the images say. */
static inline int call_holds(const Call *call, Judgement *judgement, const char *when)
{
    const Fenced *scratch = &call->scratch;
    size_t payload = scratch->bytes - scratch->start - FENCE;
    if (payload) /* scratch may hold anything, between its fences */
        call->machine->copy_out(scratch->image + scratch->start, scratch->memory + scratch->start, payload);
    for (int tensor = 0; tensor < TENSOR_COUNT; tensor++)
        if (call->views[tensor].buffer == &call->buffers[tensor] &&
            !fence_holds(call, &call->buffers[tensor], judgement, when)) return 0;
    return fence_holds(call, &call->LSE, judgement, when) && fence_holds(call, &call->saved, judgement, when) &&
           fence_holds(call, scratch, judgement, when);
}

/* Forward and backward of an open call. */
static inline int call_run(Call *call, const AttentionKernel *kernel, Result *result, Judgement *judgement)
{
    static const int gradients[3] = {QUANTITY_DQ, QUANTITY_DK, QUANTITY_DV};
    char words[ATTENTION_WORDS];
    const char *fault = call_forward(call, kernel);
    if (fault) return judge_fault(judgement, "forward says: %s", attention_words(fault, words));
    size_t rows = (size_t)(call->shape->B * call->shape->NH * call->shape->T);
    accept_tensor(call, TENSOR_O, result->value[QUANTITY_O]);
    accept_buffer(call, &call->LSE);
    accept_buffer(call, &call->saved);
    if (rows) memcpy(result->value[QUANTITY_LSE], call->LSE.image + call->LSE.start, rows * sizeof(float));
    if (!call_holds(call, judgement, "forward")) return -1;
    memset(call->scratch.image, POISON, call->scratch.bytes);
    call->machine->copy_in(call->scratch.memory, call->scratch.image, call->scratch.bytes);
    fault = call_backward(call, kernel);
    if (fault) return judge_fault(judgement, "backward says: %s", attention_words(fault, words));
    for (int part = 0; part < 3; part++) accept_tensor(call, TENSOR_DQ + part, result->value[gradients[part]]);
    return call_holds(call, judgement, "backward") ? 0 : -1;
}

static inline Result result_create(const AttentionShape *shape)
{
    Result result;
    for (int quantity = 0; quantity < QUANTITY_COUNT; quantity++)
        result.value[quantity] = (float *)allocate_zeros(shape->B * shape->NH * shape->T * quantity_width(shape, quantity),
                                                         sizeof(float));
    return result;
}

static inline void result_free(Result *result)
{
    for (int quantity = 0; quantity < QUANTITY_COUNT; quantity++) free(result->value[quantity]);
}

/* Runs forward and backward on a problem. Returns 0 with the result, or -1 with what the kernel did that it may not. */
static inline int run_kernel(const AttentionKernel *kernel, const Problem *problem, Layout layout, int unaligned,
                             const Machine *machine, Result *result, Judgement *judgement)
{
    Call call;
    memset(&call, 0, sizeof call);
    call.machine = machine;
    call.shape = &problem->shape;
    call.layout = layout;
    call.element = problem->shape.dtype == DTYPE_BF16 ? 2 : 4;
    int status = call_open(&call, problem, kernel, unaligned);
    if (status) judge_fault(judgement, "not enough memory for the buffers of the call");
    else status = call_run(&call, kernel, result, judgement);
    call_close(&call);
    return status;
}

/* --- the judgement -------------------------------------------------------------------------------------------------- */

/* The largest error seen since the caller last cleared it, as a share of what was allowed, for tests to print. */
static double judge_worst[DTYPE_COUNT][QUANTITY_COUNT];

/* One quantity of one stripe: rows `first` to `last` - 1 of all rows. */
static inline int judge_stripe(const Problem *problem, const Result *result, int quantity, int64_t first, int64_t last,
                               Judgement *judgement)
{
    static const char *const names[QUANTITY_COUNT] = QUANTITY_NAMES;
    const AttentionShape *shape = &problem->shape;
    int64_t width = quantity_width(shape, quantity), head = first / shape->T, from = first % shape->T;
    int precision = precision_of(shape);
    double worst = 0, plain = 0, terms = 0, squares = 0, logits = 0, size = 0;
    for (int64_t row = first; row < last; row++) {
        int clean = 1;
        /* A row is judged by its numbers where all of them are finite, else by where they are not: infinities and NaN pass
         * into each other with the order of a sum. */
        for (int64_t d = 0; d < width; d++) clean = clean && isfinite(problem->truth[quantity][row * width + d]);
        for (int64_t d = 0; d < width; d++) {
            double truth = problem->truth[quantity][row * width + d], got = result->value[quantity][row * width + d];
            if (clean ? !isfinite(got) : !isfinite(truth) && isfinite(got))
                return judge_fault(judgement, "%s head %lld row %lld column %lld is %g, should be %g", names[quantity],
                                   (long long)head, (long long)(row % shape->T), (long long)d, got, truth);
            if (!clean) continue;
            worst = larger(worst, fabs(got - truth));
            plain = larger(plain, fabs(problem->plain[quantity][row * width + d] - truth));
            if (precision != PRECISION_TF32) size = larger(size, fabs(truth)); /* what the result's own rounding is of */
        }
        if (!clean) continue;
        terms = larger(terms, problem->terms[quantity][row]);
        squares = larger(squares, problem->squares[quantity][row]);
        logits = larger(logits, problem->logits[quantity][row]);
    }
    double u = quantity == QUANTITY_LSE ? unit_roundoff[DTYPE_FP32] : unit_roundoff[precision];
    const Bound *bound = &bounds[precision][quantity];
    double allowed = FACTOR * plain + u * bound->terms * terms;
    if (bound->squares > 0)
        allowed = larger(FACTOR * plain, u * smaller(bound->terms * (terms + size),
                                                     bound->squares * sqrt(squares + size * size)));
    allowed += bound->logits * unit_roundoff[DTYPE_FP32] * logits;
    if (worst > 0) judge_worst[shape->dtype][quantity] = larger(judge_worst[shape->dtype][quantity], worst / allowed);
    if (worst <= allowed) return 0;
    return judge_fault(judgement, "%s head %lld rows %lld to %lld: error %.3g, allowed %.3g (plain computation %.3g)",
                       names[quantity], (long long)head, (long long)from, (long long)(from + last - first - 1), worst,
                       allowed, plain);
}

/* Whether the result is right: 0, or -1 with the first stripe that is not. */
static inline int judge_result(const Problem *problem, const Result *result, Judgement *judgement)
{
    int64_t T = problem->shape.T, heads = problem->shape.B * problem->shape.NH;
    for (int quantity = 0; quantity < QUANTITY_COUNT; quantity++)
        for (int64_t head = 0; head < heads; head++)
            for (int64_t t = 0; t < T; t += STRIPE) {
                int64_t end = t + STRIPE < T ? t + STRIPE : T;
                if (judge_stripe(problem, result, quantity, head * T + t, head * T + end, judgement)) return -1;
            }
    return 0;
}

/* The same where the truth is known of some queries of each head only, and dO is 0 in the others: O, LSE and dQ of these
 * rows, one by one, and all of dK and dV. */
static inline int judge_rows(const Problem *problem, const Result *result, const int64_t *rows, int64_t count,
                             Judgement *judgement)
{
    int64_t T = problem->shape.T, heads = problem->shape.B * problem->shape.NH;
    for (int quantity = 0; quantity < QUANTITY_COUNT; quantity++) {
        int by_key = quantity == QUANTITY_DK || quantity == QUANTITY_DV;
        for (int64_t head = 0; head < heads; head++)
            for (int64_t n = 0; n < (by_key ? (T + STRIPE - 1) / STRIPE : count); n++) {
                int64_t first = by_key ? n * STRIPE : rows[n], last = by_key ? first + STRIPE : first + 1;
                if (judge_stripe(problem, result, quantity, head * T + first, head * T + (last < T ? last : T), judgement))
                    return -1;
            }
    }
    return 0;
}

/* Run and judge: 0 where the kernel is right on this problem, else -1 with what is wrong. */
static inline int check_kernel(const AttentionKernel *kernel, const Problem *problem, Layout layout, int unaligned,
                               const Machine *machine, Judgement *judgement)
{
    Result result = result_create(&problem->shape);
    int status = run_kernel(kernel, problem, layout, unaligned, machine, &result, judgement);
    if (!status) status = judge_result(problem, &result, judgement);
    result_free(&result);
    return status;
}

/* The same for a problem that problem_solve_sampled() has solved. */
static inline int check_sampled(const AttentionKernel *kernel, const Problem *problem, const int64_t rows[SAMPLED_ROWS],
                                const Machine *machine, Judgement *judgement)
{
    Result result = result_create(&problem->shape);
    int status = run_kernel(kernel, problem, LAYOUT_PACKED, 0, machine, &result, judgement);
    if (!status) status = judge_rows(problem, &result, rows, SAMPLED_ROWS, judgement);
    result_free(&result);
    return status;
}

/* Whether two results have the same bits; -1 with the first difference. */
static inline int compare_results(const AttentionShape *shape, const Result *a, const Result *b, Judgement *judgement)
{
    static const char *const names[QUANTITY_COUNT] = QUANTITY_NAMES;
    for (int quantity = 0; quantity < QUANTITY_COUNT; quantity++) {
        int64_t count = shape->B * shape->NH * shape->T * quantity_width(shape, quantity);
        for (int64_t k = 0; k < count; k++)
            if (memcmp(&a->value[quantity][k], &b->value[quantity][k], sizeof(float)) != 0)
                return judge_fault(judgement, "%s element %lld is %.9g once and %.9g once", names[quantity], (long long)k,
                                   a->value[quantity][k], b->value[quantity][k]);
    }
    return 0;
}

#endif
