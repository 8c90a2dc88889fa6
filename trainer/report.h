/* report.h - OUT/report.html: a run as one page that stands alone, its curves, figures, options and samples.
 *
 * The page (trainer/report.html) draws itself from data that are put into it here: everything comes from the run's own
 * files, log.jsonl and config.json, and from facts that the trainer adds. Nothing here fails the run: a page that cannot be
 * written is said once and done without, and pages are written so seldom that they take at most a fiftieth of the time. */
#ifndef REPORT_H
#define REPORT_H

#include "trainer/run.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct Report Report;

/* NULL where memory is short; then the calls below do nothing for a page. */
Report *report_create(void);
void report_free(Report *report);

/* Adds a line to the page's table of the run ("device", "AMD EPYC, 2 threads"); to that of an equal label where there is
 * one. */
void report_fact(Report *report, const char *label, const char *text);

/* Prints a line about the run, a printf format behind its label, and adds it to the page's table. Cut at 2 KiB. */
#if defined(__GNUC__)
__attribute__((format(printf, 3, 4)))
#endif
void report_say(Report *report, const char *label, const char *format, ...);

/* The lowest loss that the data allow, nats a token: drawn as a line. */
void report_floor(Report *report, double loss);

/* Takes in what log.jsonl got since the last call and writes the page anew, by rename. state: "step 200 of 1000"; running:
 * whether the run goes on, for then the page loads itself again, and may be left unwritten where the last one was only just
 * written. Does nothing for a run without a directory. */
void report_write(Report *report, const Run *run, const char *state, int running);

#ifdef __cplusplus
}
#endif
#endif
