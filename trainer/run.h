/* run.h - the directory of a run: made, locked, its log kept in step with its checkpoints.
 *
 *     OUT/config.json  OUT/log.jsonl  OUT/step_NNNNNNNN (checkpoints, see data/checkpoint.h)  OUT/.lock
 */
#ifndef RUN_H
#define RUN_H

#include <stdint.h>
#include <stdio.h>

#include "data/error.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct Run {
    char *dir; /* NULL: the run writes nothing, and every call below does nothing */
    FILE *log;
    int lock;
} Run;

/* Makes dir (and its parents) unless it is there, and locks it against a second process. dir "" opens a run that writes nothing.
 * Errors: cannot be made or written; in use; without `resume`, it holds a run already; with it, it holds none, and stays as
 * it is. */
int run_open(Run *run, const char *dir, int resume, Error *error);
void run_close(Run *run);

/* "DIR/name" in a static-size buffer; fails where it does not fit. */
int run_path(const Run *run, const char *name, char *out, size_t size, Error *error);

/* Opens log.jsonl for appending after dropping every line of a step beyond `step`, and a last line cut short: what a killed run
 * wrote after the checkpoint that it now goes on from. The old file stays until the new one is complete. */
int run_log_open(Run *run, int64_t step, Error *error);

/* Appends one line to log.jsonl, a printf format of a JSON object, and flushes it. Returns 0 or -1. */
#if defined(__GNUC__)
__attribute__((format(printf, 3, 4)))
#endif
int run_log(Run *run, Error *error, const char *format, ...);

#ifdef __cplusplus
}
#endif
#endif
