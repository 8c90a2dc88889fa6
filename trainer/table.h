/* table.h - command lines by table: one row an option, from which it is parsed, explained by --help, and written as JSON.
 *
 * The values lie in a struct of the caller's, its fields in the order it likes; a row says where. Of texts const char *, of
 * reals double, of all others int64_t.
 */
#ifndef TABLE_H
#define TABLE_H

#include <stddef.h>
#include <stdint.h>

#include "data/error.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum OptionKind { OPTION_TEXT, OPTION_COUNT, OPTION_REAL, OPTION_CHOICE, OPTION_FLAG } OptionKind;

/* May a resumed run change it? What shapes the model or the order of the data may not: it would no longer be one run. What
 * MAY_LACK came later than config.json: that of an older run has none. */
typedef enum OptionChange { MAY_CHANGE, MAY_LACK, FIXED, NOT_KEPT } OptionChange;

typedef struct OptionRow {
    const char *name;
    OptionKind kind;
    size_t field;           /* offset in the struct of values */
    const char *standard;   /* the default, as it would be typed */
    double least, most;     /* of counts and reals */
    const char *choices;    /* of choices, in enum order, separated by '|'; of others: what the value is called in --help */
    OptionChange change;
    const char *help;
} OptionRow;

#define COUNT_MOST 9007199254740992.0 /* 2^53: exact in a double, so that JSON keeps it */

enum { TABLE_ROWS_MOST = 64 };

/* Where a row's value lies. */
const char **table_text(const void *values, const OptionRow *row);
int64_t *table_count(const void *values, const OptionRow *row);

/* Sets all values to their defaults, then what argv[1..] gives, up to the first argument that is no option; given[i] (rows)
 * becomes 1 for row i where it was given, and is 0 else. -h stands for --help, which must be a row. `command` is "" or a
 * command's name: sentences of errors begin with it. Returns the index of the first argument that is no option, argc where
 * there is none; -1 with a sentence for an unknown option (with the nearest known one), or a value that is missing,
 * malformed or out of range. Texts point into argv. */
int table_parse(void *values, const OptionRow *table, int rows, unsigned char *given, const char *command, int argc,
                char **argv, Error *error);

/* Sets one value from text, strictly: the whole text must be the value. Returns 0, or -1 with a sentence. */
int table_set(void *values, const OptionRow *row, const char *text, Error *error);

/* A value as JSON text, at most `size` bytes with the closing 0. */
void table_json(const void *values, const OptionRow *row, char *out, size_t size);

/* Prints a line or two for each row: the option, what it takes, what it does, its default. */
void table_help(const OptionRow *table, int rows);

#ifdef __cplusplus
}
#endif
#endif
