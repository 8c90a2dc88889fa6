/* attention.c - the table of attention versions, the views, and the choice of one by name, path or "auto".
 *
 * A version takes part by one line below, of `kernels` or, for a GPU, of GPU_KERNELS, whose names a build without CUDA
 * knows too; nothing else in the tree names it. Versions from outside come in as shared objects that export
 * `attention_kernel`. Such an object was compiled elsewhere and perhaps long ago, so everything that can be checked
 * without calling it is checked first: that it opens, has the symbol, was built against this ABI number, has every
 * field filled in, and names that a terminal and a table can take.
 */
#include "attention/attention.h"

#include <dlfcn.h>
#include <elf.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* By name; the struct of one is attention_NAME. From the fastest to the slowest. */
#define GPU_KERNELS(X) \
    X(flash_mma)       \
    X(flash_tf32)      \
    X(flash_tf32x3)    \
    X(flash_simt)      \
    X(cublas)

extern const AttentionKernel attention_tiled, attention_reference;
#ifdef HAVE_CUDA
#define DECLARE_KERNEL(name) extern const AttentionKernel attention_##name;
GPU_KERNELS(DECLARE_KERNEL)
#endif

/* That a kernel may ask for: sums of more could wrap. */
#define MOST_BYTES ((size_t)1 << 60)
/* Bytes of a kernel's texts, as attention.h has them. */
enum { NAME_MOST = 63, SUMMARY_MOST = 255 };

static const AttentionKernel *const kernels[] = {
#ifdef HAVE_CUDA
#define KERNEL_ADDRESS(name) &attention_##name,
    GPU_KERNELS(KERNEL_ADDRESS)
#endif
    &attention_tiled,
    &attention_reference,
};

/* Names that only a build with CUDA has a kernel for, up to a NULL. */
static const char *const missing_names[] = {
#ifndef HAVE_CUDA
#define KERNEL_NAME(name) #name,
    GPU_KERNELS(KERNEL_NAME)
#endif
    NULL,
};

static const size_t kernel_count = sizeof kernels / sizeof kernels[0];

const AttentionKernel *const *attention_table(size_t *count)
{
    *count = kernel_count;
    return kernels;
}

/* --- views -------------------------------------------------------------------------------------------------------- */

float attention_scale(int64_t HS)
{
    return (float)(1.0 / sqrt((double)HS));
}

static AttentionInput input_of(AttentionOutput view)
{
    return (AttentionInput){view.data, view.batch_stride, view.row_stride, view.head_stride};
}

AttentionOutput attention_packed_output(void *qkv, int part, const AttentionShape *shape, size_t element)
{
    int64_t C = shape->NH * shape->HS;
    return (AttentionOutput){(char *)qkv + (size_t)(part * C) * element, shape->T * 3 * C, 3 * C, shape->HS};
}

AttentionOutput attention_rows_output(void *o, const AttentionShape *shape)
{
    int64_t C = shape->NH * shape->HS;
    return (AttentionOutput){o, shape->T * C, C, shape->HS};
}

AttentionOutput attention_heads_output(void *o, const AttentionShape *shape)
{
    int64_t head = shape->T * shape->HS;
    return (AttentionOutput){o, shape->NH * head, shape->HS, head};
}

/* The input forms only read what they point at: the const that is cast away here comes back in input_of. */
AttentionInput attention_packed_input(const void *qkv, int part, const AttentionShape *shape, size_t element)
{
    return input_of(attention_packed_output((void *)qkv, part, shape, element));
}

AttentionInput attention_rows_input(const void *o, const AttentionShape *shape)
{
    return input_of(attention_rows_output((void *)o, shape));
}

AttentionInput attention_heads_input(const void *o, const AttentionShape *shape)
{
    return input_of(attention_heads_output((void *)o, shape));
}

/* --- choice ------------------------------------------------------------------------------------------------------- */

static const char *device_name(AttentionDevice device)
{
    return device == ATTENTION_CPU ? "cpu" : "cuda";
}

/* Writes "a, b, c": the names for `device`, or "none". */
static void join_names(char *text, size_t size, AttentionDevice device)
{
    size_t used = 0;
    snprintf(text, size, "none");
    for (size_t k = 0; k < kernel_count; k++) {
        if (kernels[k]->device != device || used >= size) continue;
        used += (size_t)snprintf(text + used, size - used, "%s%s", used ? ", " : "", kernels[k]->name);
    }
}

/* The first field of `kernel` that is missing, or NULL where all are there. */
static const char *missing_field(const AttentionKernel *kernel)
{
    if (!kernel->name || !kernel->name[0]) return "name";
    if (!kernel->summary) return "summary";
    if (!kernel->refuse) return "refuse";
    if (!kernel->saved_bytes) return "saved_bytes";
    if (!kernel->scratch_bytes) return "scratch_bytes";
    if (!kernel->forward) return "forward";
    if (!kernel->backward) return "backward";
    return NULL;
}

static int is_name_byte(unsigned char c)
{
    return (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || c == '_';
}

/* A control character, also one of those beyond ASCII in UTF-8, U+0080 to U+009F. */
static int is_control(const unsigned char *c)
{
    return *c < 0x20 || *c == 0x7f || (*c == 0xc2 && c[1] >= 0x80 && c[1] < 0xa0);
}

/* A device that is none, or what keeps a kernel's name and summary from being printed, written to `text` as a fragment; NULL
 * where nothing does. */
static const char *value_fault(const AttentionKernel *kernel, char *text, size_t size)
{
    const unsigned char *name = (const unsigned char *)kernel->name, *summary = (const unsigned char *)kernel->summary;
    int at = 0;
    if (kernel->device != ATTENTION_CPU && kernel->device != ATTENTION_CUDA) {
        snprintf(text, size, "its device is %d, expected %d (CPU) or %d (CUDA)", (int)kernel->device, ATTENTION_CPU,
                 ATTENTION_CUDA);
        return text;
    }
    while (at <= NAME_MOST && is_name_byte(name[at])) at++;
    if (at > NAME_MOST) {
        snprintf(text, size, "its name is longer than %d bytes", (int)NAME_MOST);
        return text;
    }
    if (name[at]) {
        snprintf(text, size, "its name has the byte 0x%02x at position %d, expected letters, digits and '_' only", name[at],
                 at);
        return text;
    }
    for (at = 0; at <= SUMMARY_MOST && summary[at] && !is_control(summary + at);) at++;
    if (at > SUMMARY_MOST) {
        snprintf(text, size, "its summary is longer than %d bytes", (int)SUMMARY_MOST);
        return text;
    }
    if (!summary[at]) return NULL;
    snprintf(text, size, "its summary has the byte 0x%02x at position %d, expected one line of text", summary[at], at);
    return text;
}

/* What is wrong with the file at `place` of `size` bytes as a shared object, written to `text` as a fragment; NULL where nothing
 * is seen. The loader would map a file that was cut short, and die where it reads behind its end. */
static const char *object_fault(const char *place, int64_t size, char *text, size_t text_size)
{
    Elf64_Ehdr head;
    int64_t needed = 0;
    int file = open(place, O_RDONLY | O_CLOEXEC);
    ssize_t got = file < 0 ? -1 : pread(file, &head, sizeof head, 0);
    int is_object = got == (ssize_t)sizeof head && !memcmp(head.e_ident, ELFMAG, SELFMAG) &&
                    head.e_ident[EI_CLASS] == ELFCLASS64 && head.e_phentsize == sizeof(Elf64_Phdr);
    for (int i = 0; is_object && i < head.e_phnum; i++) {
        Elf64_Phdr part;
        int64_t at = (int64_t)head.e_phoff + i * (int64_t)sizeof part;
        if (pread(file, &part, sizeof part, at) != (ssize_t)sizeof part) needed = at + (int64_t)sizeof part;
        else if (part.p_type == PT_LOAD && part.p_offset + part.p_filesz > (uint64_t)needed)
            needed = (int64_t)(part.p_offset + part.p_filesz);
    }
    if (file >= 0) close(file);
    if (needed <= size) return NULL; /* what else may be wrong the loader says */
    snprintf(text, text_size, "it is cut short: it has %lld bytes and says that it has %lld", (long long)size, (long long)needed);
    return text;
}

/* Opens the shared object at `path` and checks what it exports, save for device and shape. */
static const AttentionKernel *load_kernel(const char *path, char *error, size_t error_size)
{
    char place[4096];
    /* The loader looks for a bare name in the system's library folders, not here. */
    int length = snprintf(place, sizeof place, "%s%s", strchr(path, '/') ? "" : "./", path);
    if (length >= (int)sizeof place) {
        snprintf(error, error_size, "attention kernel path of %d bytes is too long, at most %zu", length, sizeof place - 1);
        return NULL;
    }
    struct stat file;
    if (stat(place, &file) != 0 || access(place, R_OK) != 0) {
        snprintf(error, error_size, "cannot read attention kernel %s: %s", path, strerror(errno));
        return NULL;
    }
    if (!S_ISREG(file.st_mode)) { /* opening a FIFO would wait for somebody who writes to it */
        snprintf(error, error_size, "cannot load attention kernel %s: it is not a regular file", path);
        return NULL;
    }
    const char *missing = NULL, *fault = NULL;
    char text[128];
    if ((fault = object_fault(place, (int64_t)file.st_size, text, sizeof text)) != NULL) {
        snprintf(error, error_size, "cannot load attention kernel %s: %s", path, fault);
        return NULL;
    }
    void *object = dlopen(place, RTLD_NOW | RTLD_LOCAL);
    if (!object) {
        snprintf(error, error_size, "cannot load attention kernel %s: %s", path, dlerror());
        return NULL;
    }
    const AttentionKernel *kernel = dlsym(object, "attention_kernel");
    if (!kernel)
        snprintf(error, error_size, "%s exports no symbol 'attention_kernel'", path);
    else if (kernel->abi != ATTENTION_ABI)
        snprintf(error, error_size, "%s was built for attention ABI %d, this program has ABI %d: build it again", path,
                 kernel->abi, ATTENTION_ABI);
    else if ((missing = missing_field(kernel)) != NULL)
        snprintf(error, error_size, "%s exports an incomplete attention_kernel: its field '%s' is empty", path, missing);
    else if ((fault = value_fault(kernel, text, sizeof text)) != NULL)
        snprintf(error, error_size, "%s exports a faulty attention_kernel: %s", path, fault);
    else
        return kernel;
    dlclose(object);
    return NULL;
}

/* The first of the table for `device` that takes the shape. */
static const AttentionKernel *choose_best(AttentionDevice device, const AttentionShape *shape, int sm, char *error,
                                          size_t error_size)
{
    size_t used = (size_t)snprintf(error, error_size, "no attention kernel on %s takes this shape", device_name(device));
    const char *separator = ": ";
    for (size_t k = 0; k < kernel_count; k++) {
        if (kernels[k]->device != device) continue;
        const char *reason = kernels[k]->refuse(shape, sm);
        if (!reason) return kernels[k];
        if (used < error_size)
            used += (size_t)snprintf(error + used, error_size - used, "%s%s %s", separator, kernels[k]->name, reason);
        separator = "; ";
    }
    return NULL;
}

int attention_is_path(const char *choice)
{
    size_t length = strlen(choice);
    return strchr(choice, '/') || (length > 3 && strcmp(choice + length - 3, ".so") == 0);
}

/* The kernel that a path or a name means, whatever its device. */
static const AttentionKernel *find_kernel(const char *choice, AttentionDevice device, char *error, size_t error_size)
{
    char names[1024];
    if (attention_is_path(choice)) return load_kernel(choice, error, error_size);
    for (size_t k = 0; k < kernel_count; k++)
        if (strcmp(kernels[k]->name, choice) == 0) return kernels[k];
    join_names(names, sizeof names, device);
    for (const char *const *name = missing_names; *name; name++) {
        if (strcmp(*name, choice) != 0) continue;
        snprintf(error, error_size, "attention kernel '%s' is for GPUs, and this was built for the CPU only: build it with "
                 "nvcc (make ARCH=sm_90a), or take one of the kernels for %s: auto, %s, or the path of a .so", choice,
                 device_name(device), names);
        return NULL;
    }
    snprintf(error, error_size, "unknown attention kernel '%s'; kernels for %s: auto, %s, or the path of a .so", choice,
             device_name(device), names);
    return NULL;
}

const char *attention_words(const char *words, char text[ATTENTION_WORDS])
{
    const unsigned char *c = (const unsigned char *)words;
    size_t used = 0;
    while (*c && used < ATTENTION_WORDS - 1) {
        int control = is_control(c);
        text[used++] = control ? '?' : (char)*c;
        c += control && *c == 0xc2 ? 2 : 1;
    }
    text[used] = 0;
    if (*c) {
        for (used -= 3; used && ((unsigned char)text[used] & 0xc0) == 0x80;) used--; /* not amid a character */
        memcpy(text + used, "...", 4);
    }
    return *text ? text : strcpy(text, "it gives no reason");
}

/* Why a kernel for the right device cannot compute the shape, NULL where it can; `text` is room for the sentence. */
static const char *reason_against(const AttentionKernel *kernel, const AttentionShape *shape, int sm,
                                  char text[ATTENTION_WORDS])
{
    const char *reason = kernel->refuse(shape, sm);
    if (reason) return attention_words(reason, text);
    size_t saved = kernel->saved_bytes(shape), scratch = kernel->scratch_bytes(shape);
    if (saved <= MOST_BYTES && scratch <= MOST_BYTES) return NULL;
    snprintf(text, ATTENTION_WORDS, "it asks for %zu bytes of saved and %zu of scratch, expected at most %zu", saved,
             scratch, MOST_BYTES);
    return text;
}

const AttentionKernel *attention_choose(const char *choice, AttentionDevice device, const AttentionShape *shape, int sm,
                                        char *error, size_t error_size)
{
    char text[ATTENTION_WORDS], names[1024];
    if (strcmp(choice, "auto") == 0) return choose_best(device, shape, sm, error, error_size);
    const AttentionKernel *kernel = find_kernel(choice, device, error, error_size);
    if (!kernel) return NULL;
    if (kernel->device != device) {
        int is_path = attention_is_path(choice);
        join_names(names, sizeof names, device);
        snprintf(error, error_size, "attention kernel '%s'%s%s runs on %s, this run is on %s; kernels for %s: %s",
                 kernel->name, is_path ? " of " : "", is_path ? choice : "", device_name(kernel->device), device_name(device),
                 device_name(device), names);
        return NULL;
    }
    const char *reason = reason_against(kernel, shape, sm, text);
    if (!reason) return kernel;
    snprintf(error, error_size, "attention kernel '%s' cannot run here: %s", kernel->name, reason);
    return NULL;
}

/* A line of the list; `path` is where the kernel came from, NULL for one of the table. */
static void list_kernel(const AttentionKernel *kernel, const char *path, AttentionDevice device, const AttentionShape *shape,
                        int sm)
{
    char text[ATTENTION_WORDS];
    const char *reason = kernel->device == device ? reason_against(kernel, shape, sm, text)
                                                  : "for another device than this run's";
    printf("%-12s %-5s %-3s %s%s%s%s%s%s\n", kernel->name, device_name(kernel->device), reason ? "no" : "ok",
           kernel->summary, path ? "; from " : "", path ? path : "", reason ? " (" : "", reason ? reason : "",
           reason ? ")" : "");
}

int attention_list(const char *choice, AttentionDevice device, const AttentionShape *shape, int sm, char *error,
                   size_t error_size)
{
    int is_auto = strcmp(choice, "auto") == 0;
    const AttentionKernel *chosen = is_auto ? NULL : find_kernel(choice, device, error, error_size);
    if (!is_auto && !chosen) return -1;
    for (size_t k = 0; k < kernel_count; k++) list_kernel(kernels[k], NULL, device, shape, sm);
    if (attention_is_path(choice)) list_kernel(chosen, choice, device, shape, sm);
    return 0;
}
