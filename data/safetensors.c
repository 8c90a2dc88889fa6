/* safetensors.c - reading and writing named tensors.
 *
 * Reading. The file is mapped and its header parsed once; whatever the header claims is compared with what the file has
 * before anything is believed. A tensor's bytes follow from its dtype and shape, and must equal the span that its offsets
 * give; sorted by offset, the spans must follow one another from the first byte of data to the last of the file. After that
 * every tensor lies within the mapping and no two share a byte.
 *
 * Writing. All sizes are known before the first byte of data, so the header is final when it is written, padded with
 * spaces until data starts at a multiple of 8. Data then passes through one small buffer.
 *
 * Numbers in files are little-endian, and so must the machine be.
 * Source: the format's README, huggingface/safetensors.
 */
#include "data/safetensors.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "data/json.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "safetensors files are little-endian and read in place");

enum { HEADER_BYTES_MOST = 100000000, WRITE_BUFFER_BYTES = 1 << 18 };

/* Bits an element takes, for every dtype of the format. */
static const struct { const char *name; int bits; } dtypes[] = {
    {"F32", 32}, {"BF16", 16}, {"F16", 16}, {"F64", 64}, {"I64", 64}, {"I32", 32}, {"I16", 16}, {"I8", 8}, {"U64", 64},
    {"U32", 32}, {"U16", 16}, {"U8", 8}, {"BOOL", 8}, {"C64", 64}, {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8},
    {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"F4", 4},
};

struct Safetensors {
    char *path;
    uint8_t *map;
    size_t map_bytes;
    JsonDocument *header;
    const JsonValue *metadata;   /* of the header, or NULL */
    SafetensorsTensor *tensors;  /* by offset */
    SafetensorsTensor **by_name; /* sorted by name */
    size_t count;
};

struct SafetensorsWriter {
    char *path;
    int file;
    uint64_t declared, written; /* bytes of tensor data; written counts those in the buffer too */
    uint64_t position;          /* bytes of the file that the system has taken */
    size_t buffered;
    uint8_t buffer[WRITE_BUFFER_BYTES];
};

/* Bits of a dtype, 0 for an unknown one. */
static int dtype_bits(const char *name)
{
    for (size_t i = 0; i < sizeof dtypes / sizeof dtypes[0]; i++)
        if (!strcmp(dtypes[i].name, name)) return dtypes[i].bits;
    return 0;
}

/* Bytes that dtype and shape ask for to *bytes. Returns NULL, or what is wrong with them. */
static const char *tensor_bytes(const SafetensorsTensor *tensor, uint64_t *bytes)
{
    uint64_t bits = (uint64_t)dtype_bits(tensor->dtype);
    int empty = 0;
    if (bits == 0) return "has an unknown dtype";
    if (tensor->rank < 0 || tensor->rank > SAFETENSORS_RANK) return "has too many dimensions";
    for (int i = 0; i < tensor->rank; i++) {
        if (tensor->shape[i] < 0) return "has a negative dimension";
        if (tensor->shape[i] == 0) empty = 1;
    }
    for (int i = 0; i < tensor->rank && !empty; i++)
        if (__builtin_mul_overflow(bits, (uint64_t)tensor->shape[i], &bits))
            return "has more elements than 64 bits can count";
    if (empty) bits = 0;
    if (bits % 8) return "does not fill whole bytes";
    *bytes = bits / 8;
    return NULL;
}

static int compare_names(const void *a, const void *b)
{
    return strcmp((*(SafetensorsTensor *const *)a)->name, (*(SafetensorsTensor *const *)b)->name);
}

/* ------------------------------------------------------------------------------------------------------------- reading */

/* Empty tensors before the one that starts where they do. */
static int compare_data(const void *a, const void *b)
{
    const SafetensorsTensor *x = a, *y = b;
    if (x->data != y->data) return x->data < y->data ? -1 : 1;
    return x->bytes < y->bytes ? -1 : x->bytes > y->bytes;
}

/* Fills a tensor from its entry of the header; data starts at `start` and has `length` bytes. */
static int read_entry(SafetensorsTensor *tensor, const JsonValue *entry, const char *path, const uint8_t *start,
                      uint64_t length, Error *error)
{
    const JsonValue *dtype = json_member(entry, "dtype"), *shape = json_member(entry, "shape");
    const JsonValue *offsets = json_member(entry, "data_offsets"), *side;
    const char *fault;
    int64_t begin, end;
    uint64_t bytes = 0;
    if (!dtype || dtype->kind != JSON_STRING || !shape || shape->kind != JSON_ARRAY || !offsets ||
        offsets->kind != JSON_ARRAY || offsets->length != 2)
        return error_set(error, "%s: header: tensor \"%.200s\" needs a dtype, a shape and two data_offsets", path,
                         entry->key);
    if (shape->length > SAFETENSORS_RANK)
        return error_set(error, "%s: header: tensor \"%.200s\" has %zu dimensions, at most %d are expected", path,
                         entry->key, shape->length, SAFETENSORS_RANK);
    tensor->name = entry->key;
    tensor->dtype = dtype->text;
    side = shape->child;
    for (tensor->rank = 0; side; side = side->next)
        if (!json_integer(side, &tensor->shape[tensor->rank++]))
            return error_set(error, "%s: header: tensor \"%.200s\" has a dimension that is no 64-bit integer: %.40s", path,
                             entry->key, side->kind == JSON_NUMBER ? side->text : "not a number");
    fault = tensor_bytes(tensor, &bytes);
    if (fault)
        return error_set(error, "%s: header: tensor \"%.200s\" of dtype \"%.20s\" %s", path, entry->key, dtype->text, fault);
    if (!json_integer(offsets->child, &begin) || !json_integer(offsets->child->next, &end) || begin < 0 || end < begin)
        return error_set(error, "%s: header: tensor \"%.200s\" has data_offsets that are no two ascending integers", path,
                         entry->key);
    if ((uint64_t)end > length)
        return error_set(error, "%s: tensor \"%.200s\" ends at byte %lld of the data, which has only %llu", path, entry->key,
                         (long long)end, (unsigned long long)length);
    if ((uint64_t)(end - begin) != bytes)
        return error_set(error, "%s: tensor \"%.200s\" spans %lld bytes of data, its dtype and shape need %llu", path,
                         entry->key, (long long)(end - begin), (unsigned long long)bytes);
    tensor->data = start + begin;
    tensor->bytes = (size_t)bytes;
    return 0;
}

static int check_metadata(const JsonValue *metadata, const char *path, Error *error)
{
    if (metadata->kind != JSON_OBJECT) return error_set(error, "%s: header: __metadata__ is no object", path);
    for (const JsonValue *child = metadata->child; child; child = child->next)
        if (child->kind != JSON_STRING)
            return error_set(error, "%s: header: __metadata__ \"%.200s\" is no string", path, child->key);
    return 0;
}

/* Sorts the tensors by offset and fails where they leave a gap, overlap, or do not reach the end of the data. */
static int check_cover(Safetensors *file, const uint8_t *start, uint64_t length, Error *error)
{
    const uint8_t *expected = start;
    qsort(file->tensors, file->count, sizeof *file->tensors, compare_data);
    for (size_t i = 0; i < file->count; i++) {
        const SafetensorsTensor *tensor = &file->tensors[i];
        if (tensor->data != expected)
            return error_set(error, "%s: tensor \"%.200s\" starts at byte %lld of the data, %s: byte %lld is expected",
                             file->path, tensor->name, (long long)(tensor->data - start),
                             tensor->data < expected ? "within another tensor" : "after a gap",
                             (long long)(expected - start));
        expected += tensor->bytes;
    }
    if ((uint64_t)(expected - start) != length)
        return error_set(error, "%s: its tensors cover %lld bytes of data, the file has %llu", file->path,
                         (long long)(expected - start), (unsigned long long)length);
    return 0;
}

static int read_header(Safetensors *file, Error *error)
{
    char name[4200];
    uint64_t bytes, length;
    const uint8_t *start;
    const JsonValue *root;
    memcpy(&bytes, file->map, 8);
    if (bytes > HEADER_BYTES_MOST || bytes > file->map_bytes - 8)
        return error_set(error, "%s: its first 8 bytes announce a header of %llu bytes, the file has %zu after them and "
                         "%d is the most a header may have", file->path, (unsigned long long)bytes, file->map_bytes - 8,
                         HEADER_BYTES_MOST);
    if (bytes == 0 || file->map[8] != '{')
        return error_set(error, "%s: offset 8: no header: expected '{'", file->path);
    start = file->map + 8 + bytes;
    length = file->map_bytes - 8 - bytes;
    snprintf(name, sizeof name, "%s: header", file->path);
    file->header = json_parse((const char *)file->map + 8, (size_t)bytes, name, error);
    if (!file->header) return -1;
    root = json_root(file->header);
    file->tensors = calloc(root->length + 1, sizeof *file->tensors);
    file->by_name = calloc(root->length + 1, sizeof *file->by_name);
    if (!file->tensors || !file->by_name) return error_set(error, "%s: not enough memory for its header", file->path);
    for (const JsonValue *entry = root->child; entry; entry = entry->next) {
        if (!strcmp(entry->key, "__metadata__")) {
            file->metadata = entry;
            if (check_metadata(entry, file->path, error)) return -1;
        } else if (read_entry(&file->tensors[file->count++], entry, file->path, start, length, error)) {
            return -1;
        }
    }
    if (check_cover(file, start, length, error)) return -1;
    for (size_t i = 0; i < file->count; i++) file->by_name[i] = &file->tensors[i];
    qsort(file->by_name, file->count, sizeof *file->by_name, compare_names);
    return 0;
}

static int map_file(Safetensors *file, Error *error)
{
    struct stat status;
    int descriptor = open(file->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a FIFO must not make it wait */
    int result = 0;
    if (descriptor < 0) return error_set(error, "%s: cannot open it: %s", file->path, strerror(errno));
    if (fstat(descriptor, &status)) result = error_set(error, "%s: cannot stat it: %s", file->path, strerror(errno));
    else if (!S_ISREG(status.st_mode)) result = error_set(error, "%s is not a regular file", file->path);
    else if (status.st_size < 8)
        result = error_set(error, "%s has %lld bytes, a safetensors file has at least 8", file->path,
                           (long long)status.st_size);
    if (!result) {
        void *map = mmap(NULL, (size_t)status.st_size, PROT_READ, MAP_PRIVATE, descriptor, 0);
        if (map == MAP_FAILED) result = error_set(error, "%s: cannot map it: %s", file->path, strerror(errno));
        else {
            file->map = map;
            file->map_bytes = (size_t)status.st_size;
        }
    }
    close(descriptor);
    return result;
}

Safetensors *safetensors_open(const char *path, Error *error)
{
    Safetensors *file = calloc(1, sizeof *file);
    if (file) file->path = strdup(path);
    if (!file || !file->path) {
        error_set(error, "%s: not enough memory to open it", path);
    } else if (!map_file(file, error) && !read_header(file, error)) {
        return file;
    }
    safetensors_close(file);
    return NULL;
}

void safetensors_close(Safetensors *file)
{
    if (!file) return;
    if (file->map) munmap(file->map, file->map_bytes);
    json_free(file->header);
    free(file->tensors);
    free(file->by_name);
    free(file->path);
    free(file);
}

size_t safetensors_count(const Safetensors *file) { return file->count; }

const SafetensorsTensor *safetensors_at(const Safetensors *file, size_t i) { return &file->tensors[i]; }

const SafetensorsTensor *safetensors_find(const Safetensors *file, const char *name)
{
    SafetensorsTensor wanted = {.name = name}, *key = &wanted, **found;
    found = bsearch(&key, file->by_name, file->count, sizeof *file->by_name, compare_names);
    return found ? *found : NULL;
}

const char *safetensors_metadata(const Safetensors *file, const char *key)
{
    const JsonValue *value = json_member(file->metadata, key);
    return value ? value->text : NULL;
}

void safetensors_release(const SafetensorsTensor *tensor)
{
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    uintptr_t first = (uintptr_t)tensor->data & ~(page - 1); /* a page shared with a neighbour is read again, no more */
    uintptr_t end = (uintptr_t)tensor->data + tensor->bytes;
    if (end > first) madvise((void *)first, end - first, MADV_DONTNEED);
}

/* The fp32 of equal value. Subnormals of fp16 are normal in fp32; a NaN keeps its payload. */
static uint32_t fp16_to_fp32(uint16_t half)
{
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = half >> 10 & 0x1F, mantissa = half & 0x3FF;
    if (exponent == 0x1F) return sign | 0x7F800000 | mantissa << 13;
    if (exponent == 0) {
        if (mantissa == 0) return sign;
        for (exponent = 1; !(mantissa & 0x400); exponent--) mantissa <<= 1; /* may wrap below 0; + 112 brings it back */
        mantissa &= 0x3FF;
    }
    return sign | (exponent + 112) << 23 | mantissa << 13;
}

int safetensors_to_fp32(float *out, const SafetensorsTensor *tensor, int64_t first, int64_t n, Error *error)
{
    int half = !strcmp(tensor->dtype, "F16"), brain = !strcmp(tensor->dtype, "BF16");
    int64_t width = half || brain ? 2 : 4;
    const uint8_t *in;
    if (!half && !brain && strcmp(tensor->dtype, "F32"))
        return error_set(error, "tensor \"%.200s\" has dtype %.20s; F32, F16 and BF16 can be read", tensor->name,
                         tensor->dtype);
    if (first < 0 || n < 0 || (uint64_t)first > tensor->bytes / (uint64_t)width ||
        (uint64_t)n > tensor->bytes / (uint64_t)width - (uint64_t)first)
        return error_set(error, "tensor \"%.200s\": %lld elements from element %lld on were asked for, it has %llu",
                         tensor->name, (long long)n, (long long)first,
                         (unsigned long long)(tensor->bytes / (uint64_t)width));
    in = tensor->data + first * width;
    if (width == 4) {
        if (n) memcpy(out, in, (size_t)n * 4);
        return 0;
    }
    for (int64_t i = 0; i < n; i++) {
        uint16_t bits;
        uint32_t word;
        memcpy(&bits, in + 2 * i, 2);
        word = half ? fp16_to_fp32(bits) : (uint32_t)bits << 16;
        memcpy(out + i, &word, 4);
    }
    return 0;
}

/* ------------------------------------------------------------------------------------------------------------- writing */

/* A text that grows; once memory is short it stays short and `failed`. */
typedef struct Text {
    char *data;
    size_t length, capacity;
    int failed;
} Text;

/* Room for `bytes` more and a closing 0; NULL where there is none. */
static char *text_room(Text *text, size_t bytes)
{
    size_t needed = text->length + bytes + 1;
    if (!text->failed && needed > text->capacity) {
        size_t capacity = needed > 2 * text->capacity ? needed : 2 * text->capacity;
        char *data = realloc(text->data, capacity);
        if (data) {
            text->data = data;
            text->capacity = capacity;
        }
        text->failed = !data;
    }
    return text->failed ? NULL : text->data + text->length;
}

__attribute__((format(printf, 2, 3)))
static void text_print(Text *text, const char *format, ...)
{
    char piece[64]; /* brackets, commas and numbers: never more */
    va_list arguments;
    size_t length;
    char *room;
    va_start(arguments, format);
    length = (size_t)vsnprintf(piece, sizeof piece, format, arguments);
    va_end(arguments);
    room = text_room(text, length);
    if (room) {
        memcpy(room, piece, length + 1);
        text->length += length;
    }
}

static void text_quote(Text *text, const char *string)
{
    int length = json_quote(NULL, 0, string, strlen(string));
    char *room = length < 0 ? NULL : text_room(text, (size_t)length);
    if (!room) { text->failed = 1; return; }
    json_quote(room, (size_t)length + 1, string, strlen(string));
    text->length += (size_t)length;
}

/* Fails on a declaration that no reader would accept. */
static int check_declared(const char *path, const SafetensorsTensor *tensors, size_t count, Error *error)
{
    const SafetensorsTensor **by_name = malloc((count + 1) * sizeof *by_name);
    int result = 0;
    if (!by_name) return error_set(error, "%s: not enough memory for its header", path);
    for (size_t i = 0; i < count && !result; i++) {
        uint64_t bytes = 0;
        const char *fault = tensor_bytes(&tensors[i], &bytes);
        by_name[i] = &tensors[i];
        if (fault)
            result = error_set(error, "%s: tensor \"%.200s\" of dtype \"%.20s\" %s", path, tensors[i].name, tensors[i].dtype,
                               fault);
        else if (bytes != tensors[i].bytes)
            result = error_set(error, "%s: tensor \"%.200s\" is declared with %zu bytes, its dtype and shape need %llu",
                               path, tensors[i].name, tensors[i].bytes, (unsigned long long)bytes);
        else if (!strcmp(tensors[i].name, "__metadata__"))
            result = error_set(error, "%s: \"__metadata__\" is no name for a tensor", path);
    }
    if (!result) qsort(by_name, count, sizeof *by_name, compare_names);
    for (size_t i = 1; i < count && !result; i++)
        if (!strcmp(by_name[i - 1]->name, by_name[i]->name))
            result = error_set(error, "%s: tensor \"%.200s\" is declared twice", path, by_name[i]->name);
    free(by_name);
    return result;
}

/* The header, its length in front. Data offsets are 64-bit and add up to *declared. */
static Text build_header(const SafetensorsTensor *tensors, size_t count, const char *const *metadata, uint64_t *declared)
{
    Text text = {0};
    const char *comma = "";
    uint64_t bytes;
    *declared = 0;
    text_print(&text, "12345678{");
    if (metadata && metadata[0]) {
        text_print(&text, "\"__metadata__\":{");
        for (; metadata[0]; metadata += 2) {
            text_print(&text, "%s", comma);
            text_quote(&text, metadata[0]);
            text_print(&text, ":");
            text_quote(&text, metadata[1]);
            comma = ",";
        }
        text_print(&text, "}");
    }
    for (size_t i = 0; i < count; i++) {
        text_print(&text, "%s", comma);
        text_quote(&text, tensors[i].name);
        text_print(&text, ":{\"dtype\":\"%s\",\"shape\":[", tensors[i].dtype);
        for (int k = 0; k < tensors[i].rank; k++) text_print(&text, "%s%lld", k ? "," : "", (long long)tensors[i].shape[k]);
        text_print(&text, "],\"data_offsets\":[%llu,", (unsigned long long)*declared);
        *declared += tensors[i].bytes;
        text_print(&text, "%llu]}", (unsigned long long)*declared);
        comma = ",";
    }
    text_print(&text, "}");
    while (text.length % 8 && !text.failed) text_print(&text, " ");
    bytes = text.length - 8;
    if (!text.failed) memcpy(text.data, &bytes, 8);
    return text;
}

/* Hands bytes to the system, all of them. */
static int write_through(SafetensorsWriter *writer, const uint8_t *data, size_t bytes, Error *error)
{
    while (bytes) {
        ssize_t done = write(writer->file, data, bytes);
        if (done < 0 && errno == EINTR) continue;
        if (done < 0)
            return error_set(error, "%s: cannot write at byte %llu: %s", writer->path, (unsigned long long)writer->position,
                             strerror(errno));
        data += done;
        bytes -= (size_t)done;
        writer->position += (uint64_t)done;
    }
    return 0;
}

static int flush_buffer(SafetensorsWriter *writer, Error *error)
{
    size_t bytes = writer->buffered;
    writer->buffered = 0;
    return write_through(writer, writer->buffer, bytes, error);
}

static int buffer_bytes(SafetensorsWriter *writer, const void *data, size_t bytes, Error *error)
{
    if (bytes > WRITE_BUFFER_BYTES - writer->buffered && flush_buffer(writer, error)) return -1;
    if (bytes > WRITE_BUFFER_BYTES) return write_through(writer, data, bytes, error);
    if (bytes) memcpy(writer->buffer + writer->buffered, data, bytes);
    writer->buffered += bytes;
    return 0;
}

/* Closes and frees; the file stays. Returns close's result. */
static int writer_free(SafetensorsWriter *writer)
{
    int result = writer->file >= 0 ? close(writer->file) : 0;
    free(writer->path);
    free(writer);
    return result;
}

SafetensorsWriter *safetensors_create(const char *path, const SafetensorsTensor *tensors, size_t count,
                                      const char *const *metadata, Error *error)
{
    SafetensorsWriter *writer;
    Text header;
    if (check_declared(path, tensors, count, error)) return NULL;
    writer = calloc(1, sizeof *writer);
    if (!writer || !(writer->path = strdup(path))) {
        error_set(error, "%s: not enough memory to write it", path);
        free(writer);
        return NULL;
    }
    writer->file = -1;
    header = build_header(tensors, count, metadata, &writer->declared);
    if (header.failed || header.length - 8 > HEADER_BYTES_MOST)
        error_set(error, "%s: its header of %zu tensors is too large", path, count);
    else if ((writer->file = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666)) < 0)
        error_set(error, "%s: cannot create it: %s", path, strerror(errno));
    else if (!buffer_bytes(writer, header.data, header.length, error)) {
        free(header.data);
        return writer;
    }
    free(header.data);
    if (writer->file >= 0) unlink(path);
    writer_free(writer);
    return NULL;
}

int safetensors_write(SafetensorsWriter *writer, const void *data, size_t bytes, Error *error)
{
    if (bytes > writer->declared - writer->written)
        return error_set(error, "%s: %zu bytes were handed over after %llu of the %llu that its tensors have", writer->path,
                         bytes, (unsigned long long)writer->written, (unsigned long long)writer->declared);
    writer->written += bytes;
    return buffer_bytes(writer, data, bytes, error);
}

int safetensors_finish(SafetensorsWriter *writer, Error *error)
{
    char *path;
    int result = 0;
    if (writer->written != writer->declared)
        result = error_set(error, "%s: %llu bytes were handed over, its tensors have %llu", writer->path,
                           (unsigned long long)writer->written, (unsigned long long)writer->declared);
    if (!result) result = flush_buffer(writer, error);
    if (!result && fsync(writer->file)) result = error_set(error, "%s: cannot fsync it: %s", writer->path, strerror(errno));
    path = writer->path;
    writer->path = NULL;
    if (writer_free(writer) && !result) result = error_set(error, "%s: cannot close it: %s", path, strerror(errno));
    free(path);
    return result;
}

void safetensors_abandon(SafetensorsWriter *writer)
{
    if (!writer) return;
    unlink(writer->path);
    writer_free(writer);
}
