/* display.h - what a person sees: a progress bar on stderr for long waits, and a loss curve in characters. */
#ifndef DISPLAY_H
#define DISPLAY_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Seconds of a clock that only goes forward. */
double display_clock(void);

/* A wait that may be long. Nothing is drawn unless stderr is a terminal and half a second has passed. */
typedef struct Progress {
    const char *label;
    double began, drawn;
    int visible;
} Progress;

Progress progress_begin(const char *label);
void progress_show(Progress *progress, int64_t done, int64_t total);
void progress_end(Progress *progress); /* clears the line */

/* "1h 02m", "3m 07s", "12 s": for people. */
void display_duration(char *out, size_t size, double seconds);
/* "812.4 MiB", "1.93 GiB". */
void display_bytes(char *out, size_t size, double bytes);

/* Text that a model wrote, to stdout: control bytes but newline and tab become '?', so that none reaches the terminal. */
void display_text(const char *text, size_t length);
/* A line to stdout: the label and a command, whose words, up to a NULL, are quoted where a shell needs that. */
void display_command(const char *label, const char *const *words);
/* Bytes of memory that this process holds now: code, libraries, what was read so far. */
double display_resident(void);

/* Loss over steps, kept in bounded memory however long the run: when full, neighbours are merged. */
enum { CURVE_POINTS = 1024 };
typedef struct Curve {
    int64_t per_point, filled; /* values merged into a point; values in the point being filled */
    int64_t count;
    double sum;
    double first_step[CURVE_POINTS], value[CURVE_POINTS];
} Curve;

void curve_add(Curve *curve, int64_t step, double value);

/* Prints training loss (dots) and validation loss (circles) over steps to stdout, `columns` x `rows` characters. floor_value, where
 * not NaN, is drawn as a line: the best possible loss. Nothing is printed for fewer than two points. */
void curve_print(const Curve *train, const Curve *validation, double floor_value, int columns, int rows);

#ifdef __cplusplus
}
#endif
#endif
