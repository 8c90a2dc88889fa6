/* process.h - the trainer as a process: signals that end a run in good order, descriptors that somebody closed. */
#ifndef PROCESS_H
#define PROCESS_H

#include <signal.h>

#include "data/error.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Exit statuses beside 0: a fault of machine or data; a wrong option; stopped by a signal, in good order. */
enum { STATUS_MACHINE = 1, STATUS_OPTION = 2, STATUS_STOPPED = 130 };

/* The signal that asks the run to end, 0 until one came: Ctrl-C, SIGTERM, a terminal that closes, a reader of stdout that goes away. */
extern volatile sig_atomic_t process_stop;

/* To be called first. Opens /dev/null on standard descriptors that are closed: files opened later would get their numbers, and what is
 * printed would land in them. Lets the first of the signals above set process_stop and a second one end the process at once. A failed
 * write under a file-size limit becomes an error of that write. A mapped file that is cut short under the process ends it with a
 * sentence. */
void process_prepare(void);
/* Where the process is brought down by SIGSEGV and the like from here on, one sentence names the attention kernel of this path,
 * which comes from outside and runs inside of the process; then it dies of the signal. Under a sanitizer, which says more,
 * nothing is changed. */
void process_blame(const char *path);

/* To be called last where standard output is all that was asked for: what did not arrive there is no success. Returns 0,
 * STATUS_STOPPED where its reader went away, or STATUS_MACHINE with the sentence. */
int process_flush(Error *error);

#ifdef __cplusplus
}
#endif
#endif
