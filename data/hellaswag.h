/* hellaswag.h - questions with several endings, in llm.c's evaluation format: HellaSwag, and others made like it.
 *
 * A file is little-endian: a header of 256 int32, then the examples, one behind the other, each of uint16:
 *
 *     header    0 magic 20240522   1 version 1   2 number of examples   3 bytes of the longest example
 *     example   65535   bytes of the example   its number, from 0 on   number of the right ending   number of endings
 *               tokens of the context, and their number before them; the same for each ending
 *
 * So an example has at most 65534 bytes, a file 65536 examples, and tokens fit 16 bits. Source: karpathy/llm.c,
 * dev/data/data_common.py. dev/hellaswag.py writes such files.
 */
#ifndef HELLASWAG_H
#define HELLASWAG_H

#include <stdint.h>

#include "data/error.h"

#ifdef __cplusplus
extern "C" {
#endif

/* One ending behind its context. */
typedef struct HellaSwagRow {
    const uint16_t *context, *ending; /* (context_count), (ending_count): in the file's words */
    int64_t context_count, ending_count;
} HellaSwagRow;

typedef struct HellaSwagExample {
    int64_t first, count; /* its rows */
    int64_t label;        /* which of them is right, from 0 on */
} HellaSwagExample;

typedef struct HellaSwag {
    HellaSwagExample *examples; /* (example_count) */
    HellaSwagRow *rows;         /* (row_count) */
    int64_t example_count, row_count;
    uint16_t *words; /* the file behind its header */
} HellaSwag;

/* Reads a file for a model of `vocab` tokens that sees `window` of them at a time. Errors, with file, example and position:
 * no such file, another magic or version, no examples; an example that is cut short, begins, counts or ends otherwise than
 * as above, has fewer than two endings, an empty context or ending, a label beyond its endings, a token >= vocab, or more
 * tokens than window + 1 (the last one is only predicted); bytes behind the last example. Returns 0, or -1 with nothing to
 * close. */
int hellaswag_open(HellaSwag *set, const char *path, int64_t vocab, int64_t window, Error *error);
void hellaswag_close(HellaSwag *set);

#ifdef __cplusplus
}
#endif
#endif
