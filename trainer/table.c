#include "trainer/table.h"

#include <ctype.h>
#include <errno.h>
#include <getopt.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/json.h"

/* --- values ----------------------------------------------------------------------------------------------------------- */

static void *field_at(const void *values, const OptionRow *row) { return (char *)values + row->field; }
static double *real_at(const void *values, const OptionRow *row) { return (double *)field_at(values, row); }
int64_t *table_count(const void *values, const OptionRow *row) { return (int64_t *)field_at(values, row); }
const char **table_text(const void *values, const OptionRow *row) { return (const char **)field_at(values, row); }

static int choice_find(const OptionRow *row, const char *text)
{
    const char *at = row->choices;
    for (int i = 0; *at; i++) {
        size_t length = strcspn(at, "|");
        if (strlen(text) == length && !strncmp(at, text, length)) return i;
        at += length + (at[length] == '|');
    }
    return -1;
}

static void choice_name(const OptionRow *row, int64_t index, char *out, size_t size)
{
    const char *at = row->choices;
    for (int64_t i = 0; i < index; i++) at += strcspn(at, "|") + 1;
    snprintf(out, size, "%.*s", (int)strcspn(at, "|"), at);
}

int table_set(void *values, const OptionRow *row, const char *text, Error *error)
{
    char *end;
    errno = 0;
    switch (row->kind) {
    case OPTION_TEXT:
        *table_text(values, row) = text;
        return 0;
    case OPTION_CHOICE: {
        int found = choice_find(row, text);
        if (found < 0) return error_set(error, "--%s: got '%s', expected one of %s", row->name, text, row->choices);
        *table_count(values, row) = found;
        return 0;
    }
    case OPTION_REAL: {
        double value = strtod(text, &end);
        if (end == text || *end || !isfinite(value) || isspace((unsigned char)*text))
            return error_set(error, "--%s: got '%s', expected a number", row->name, text);
        if (value < row->least || value > row->most)
            return error_set(error, "--%s: got %s, expected a number from %g to %.7g", row->name, text, row->least,
                             row->most);
        *real_at(values, row) = value;
        return 0;
    }
    default: {
        long long value = strtoll(text, &end, 10);
        if (end == text || *end || isspace((unsigned char)*text))
            return error_set(error, "--%s: got '%s', expected a whole number", row->name, text);
        if (errno || (double)value < row->least || (double)value > row->most)
            return error_set(error, "--%s: got %s, expected a whole number from %.0f to %.0f", row->name, text, row->least,
                             row->most);
        *table_count(values, row) = value;
        return 0;
    }
    }
}

void table_json(const void *values, const OptionRow *row, char *out, size_t size)
{
    char name[32];
    switch (row->kind) {
    case OPTION_TEXT: {
        const char *text = *table_text(values, row);
        json_quote(out, size, text, strlen(text));
        break;
    }
    case OPTION_CHOICE:
        choice_name(row, *table_count(values, row), name, sizeof name);
        snprintf(out, size, "\"%s\"", name);
        break;
    case OPTION_FLAG: snprintf(out, size, "%s", *table_count(values, row) ? "true" : "false"); break;
    case OPTION_REAL: snprintf(out, size, "%.17g", *real_at(values, row)); break;
    case OPTION_COUNT: snprintf(out, size, "%lld", (long long)*table_count(values, row)); break;
    }
}

/* --- parsing ---------------------------------------------------------------------------------------------------------- */

/* Edits (insert, delete, replace) between two names; long ones are cut. Source: Levenshtein 1966, the two-row form. */
static int name_distance(const char *a, const char *b)
{
    int row[65], rows = (int)strlen(b) < 64 ? (int)strlen(b) : 64;
    for (int j = 0; j <= rows; j++) row[j] = j;
    for (int i = 1; a[i - 1]; i++) {
        int diagonal = row[0];
        row[0] = i;
        for (int j = 1; j <= rows; j++) {
            int change = diagonal + (a[i - 1] != b[j - 1]);
            diagonal = row[j];
            int least = row[j] < row[j - 1] ? row[j] + 1 : row[j - 1] + 1;
            row[j] = least < change ? least : change;
        }
    }
    return row[rows];
}

static int unknown_option(const OptionRow *table, int rows, const char *lister, const char *argument, Error *error)
{
    char name[64];
    const OptionRow *nearest = &table[0];
    const char *start = argument + strspn(argument, "-");
    snprintf(name, sizeof name, "%.*s", (int)strcspn(start, "="), start);
    for (int i = 1; i < rows; i++)
        if (name_distance(name, table[i].name) < name_distance(name, nearest->name)) nearest = &table[i];
    if (name_distance(name, nearest->name) <= 1 + (int)strlen(name) / 4)
        return error_set(error, "unknown option '%s'; did you mean --%s? (%s--help lists all)", argument, nearest->name,
                         lister);
    return error_set(error, "unknown option '%s' (%s--help lists all)", argument, lister);
}

/* table_parse, but for the command's name before a sentence. */
static int parse(void *values, const OptionRow *table, int rows, unsigned char *given, const char *lister, int argc,
                 char **argv, Error *error)
{
    struct option longs[TABLE_ROWS_MOST + 1];
    memset(longs, 0, sizeof longs);
    memset(given, 0, (size_t)rows);
    for (int i = 0; i < rows; i++) {
        longs[i].name = table[i].name;
        longs[i].has_arg = table[i].kind == OPTION_FLAG ? no_argument : required_argument;
        longs[i].val = 256 + i;
        if (table_set(values, &table[i], table[i].standard, error)) return -1;
    }
    opterr = 0;
    optind = 0;
    for (;;) {
        int argument = optind ? optind : 1, code = getopt_long(argc, argv, "+:h", longs, NULL);
        if (code == -1) return optind;
        if (code == ':') return error_set(error, "%s needs a value", argv[argument]);
        if (code == '?') {
            if (optopt >= 256)
                return error_set(error, "--%s takes no value, got '%s'", table[optopt - 256].name, argv[argument]);
            return unknown_option(table, rows, lister, argv[argument], error);
        }
        for (int i = 0; i < rows && code == 'h'; i++)
            if (!strcmp(table[i].name, "help")) code = 256 + i;
        const OptionRow *row = &table[code - 256];
        given[code - 256] = 1;
        if (row->kind == OPTION_FLAG) *table_count(values, row) = 1;
        else if (table_set(values, row, optarg, error)) return -1;
    }
}

int table_parse(void *values, const OptionRow *table, int rows, unsigned char *given, const char *command, int argc,
                char **argv, Error *error)
{
    char lister[64];
    snprintf(lister, sizeof lister, "%s%s", command, *command ? " " : "");
    int used = parse(values, table, rows, given, lister, argc, argv, error);
    if (used >= 0 || !*command) return used;
    Error inner = *error;
    return error_set(error, "%s: %.900s", command, inner.text);
}

void table_help(const OptionRow *table, int rows)
{
    for (int i = 0; i < rows; i++) {
        const OptionRow *row = &table[i];
        char left[80], standard[64] = "";
        snprintf(left, sizeof left, "--%s%s%s", row->name, row->choices ? " " : "", row->choices ? row->choices : "");
        if (row->kind != OPTION_FLAG && *row->standard) snprintf(standard, sizeof standard, " [%s]", row->standard);
        if (strlen(left) > 26) printf("  %s\n  %-26s %s%s\n", left, "", row->help, standard);
        else printf("  %-26s %s%s\n", left, row->help, standard);
    }
}
