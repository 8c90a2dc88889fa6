/* report.c - the page of a run.
 *
 * A log may be longer than anyone wants in a page: of each of its numbers at most POINTS points are kept. A point begins as
 * one value; when they are full, neighbours are merged and from then on stand for twice as many, with mean, least and
 * greatest. So a page has some hundred kilobytes whatever the run, and each line of the log is read once. */
#include "trainer/report.h"

#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "data/json.h"
#include "trainer/display.h"

enum { SERIES_MOST = 16, POINTS = 800, FACTS_MOST = 16, SAMPLES_MOST = 12 };
#define PAGE_SHARE 50 /* a page that took a second is not written again for so many */

/* The page as it lies in the tree, with @DATA@ where the data go. */
__asm__(".pushsection .rodata\n"
        "report_page:\n"
        "    .incbin \"trainer/report.html\"\n"
        "    .byte 0\n"
        ".popsection\n");
extern const char report_page[] __attribute__((visibility("hidden")));

/* Values that stand side by side, as one. */
typedef struct Point {
    double steps, seconds, sum, least, greatest; /* steps, seconds: sums too */
    int64_t count;
} Point;

typedef struct Series {
    char name[32];
    int64_t count, per_point;
    Point points[POINTS];
} Series;

typedef struct Fact {
    char *label, *text;
} Fact;

typedef struct Sample {
    int64_t step;
    char *text; /* as a JSON string, quotes included */
} Sample;

struct Report {
    Series *series[SERIES_MOST];
    Fact facts[FACTS_MOST];
    Sample samples[SAMPLES_MOST]; /* the newest, oldest first */
    int series_count, fact_count, sample_count;
    double floor;          /* NaN where it is not known */
    long offset;           /* in log.jsonl: what was taken in */
    double seconds;        /* of training, up to there */
    double written, cost;  /* when the last page was ready, how long it took */
    int failed;            /* and it was said */
};

Report *report_create(void)
{
    Report *report = (Report *)calloc(1, sizeof *report);
    if (report) report->floor = (double)NAN;
    return report;
}

void report_free(Report *report)
{
    if (!report) return;
    for (int i = 0; i < report->series_count; i++) free(report->series[i]);
    for (int i = 0; i < report->sample_count; i++) free(report->samples[i].text);
    for (int i = 0; i < report->fact_count; i++) {
        free(report->facts[i].label);
        free(report->facts[i].text);
    }
    free(report);
}

void report_fact(Report *report, const char *label, const char *text)
{
    if (!report) return;
    for (int i = 0; i < report->fact_count; i++) {
        Fact *fact = &report->facts[i];
        if (!fact->label || !fact->text || strcmp(fact->label, label)) continue;
        char *longer = (char *)realloc(fact->text, strlen(fact->text) + strlen(text) + sizeof "; ");
        if (longer) fact->text = strcat(strcat(longer, "; "), text);
        return;
    }
    if (report->fact_count == FACTS_MOST) return;
    Fact fact = {strdup(label), strdup(text)};
    report->facts[report->fact_count++] = fact;
}

void report_say(Report *report, const char *label, const char *format, ...)
{
    char text[2048];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    printf("%-8s %s\n", label, text);
    report_fact(report, label, text);
}

void report_floor(Report *report, double loss)
{
    if (report) report->floor = loss;
}

/* --- taking in -------------------------------------------------------------------------------------------------------- */

static void point_add(Point *point, const Point *more)
{
    if (!point->count) {
        *point = *more;
        return;
    }
    point->steps += more->steps;
    point->seconds += more->seconds;
    point->sum += more->sum;
    point->least = fmin(point->least, more->least);
    point->greatest = fmax(point->greatest, more->greatest);
    point->count += more->count;
}

static void series_add(Series *series, double step, double seconds, double value)
{
    Point one = {step, seconds, value, value, value, 1};
    Point *last = series->count ? &series->points[series->count - 1] : NULL;
    if (last && last->count < series->per_point) {
        point_add(last, &one);
        return;
    }
    if (series->count == POINTS) {
        for (int i = 0; i < POINTS / 2; i++) {
            Point pair = series->points[2 * i];
            point_add(&pair, &series->points[2 * i + 1]);
            series->points[i] = pair;
        }
        series->count = POINTS / 2;
        series->per_point *= 2;
    }
    series->points[series->count++] = one;
}

/* The series of a name, made where it is new; NULL where there are too many. */
static Series *series_find(Report *report, const char *name)
{
    for (int i = 0; i < report->series_count; i++)
        if (!strcmp(report->series[i]->name, name)) return report->series[i];
    if (report->series_count == SERIES_MOST || strlen(name) >= sizeof report->series[0]->name) return NULL;
    Series *series = (Series *)calloc(1, sizeof *series);
    if (!series) return NULL;
    strcpy(series->name, name);
    series->per_point = 1;
    report->series[report->series_count++] = series;
    return series;
}

static void sample_add(Report *report, int64_t step, const JsonValue *value)
{
    size_t size = 6 * value->length + 3;
    char *text = (char *)malloc(size);
    if (!text) return;
    json_quote(text, size, value->text, value->length);
    if (report->sample_count == SAMPLES_MOST) {
        free(report->samples[0].text);
        memmove(report->samples, report->samples + 1, (SAMPLES_MOST - 1) * sizeof report->samples[0]);
        report->sample_count--;
    }
    report->samples[report->sample_count].step = step;
    report->samples[report->sample_count++].text = text;
}

/* One line of the log. One that is none of ours is passed over. */
static void take_line(Report *report, const char *line, size_t length)
{
    JsonDocument *document = json_parse(line, length, "log.jsonl", NULL);
    const JsonValue *root = document ? json_root(document) : NULL, *ms = json_member(root, "ms");
    int64_t step;
    if (json_integer(json_member(root, "step"), &step)) {
        if (ms && ms->kind == JSON_NUMBER) report->seconds += 1e-3 * ms->number;
        for (const JsonValue *value = root->child; value; value = value->next) {
            Series *series = NULL;
            if (value->kind == JSON_STRING && !strcmp(value->key, "sample")) sample_add(report, step, value);
            if (value->kind == JSON_NUMBER && strcmp(value->key, "step")) series = series_find(report, value->key);
            if (series) series_add(series, (double)step, report->seconds, value->number);
        }
    }
    if (document) json_free(document);
}

/* What the log got since the last time: its complete lines. Returns 0 or -1. */
static int take_log(Report *report, const Run *run, Error *error)
{
    char path[4200], *line = NULL;
    size_t size = 0;
    ssize_t length;
    if (run_path(run, "log.jsonl", path, sizeof path, error)) return -1;
    FILE *log = fopen(path, "r");
    if (!log) return error_set(error, "%s: %s", path, strerror(errno));
    if (fseek(log, report->offset, SEEK_SET)) report->offset = 0;
    while ((length = getline(&line, &size, log)) > 0 && line[length - 1] == '\n') {
        take_line(report, line, (size_t)length - 1);
        report->offset += length;
    }
    free(line);
    fclose(log);
    return 0;
}

/* --- writing ---------------------------------------------------------------------------------------------------------- */

/* JSON into an element of HTML: a '<' stands in strings only, where it may be written so that no tag begins. */
static void put_json(FILE *page, const char *json)
{
    for (; *json; json++) {
        if (*json == '<') fputs("\\u003c", page);
        else fputc(*json, page);
    }
}

static void put_string(FILE *page, const char *text)
{
    size_t size = 6 * strlen(text) + 3;
    char *quoted = (char *)malloc(size);
    if (quoted) json_quote(quoted, size, text, strlen(text));
    put_json(page, quoted ? quoted : "\"\"");
    free(quoted);
}

static void put_series(FILE *page, const Series *series)
{
    put_string(page, series->name);
    fputs(": [", page);
    for (int64_t i = 0; i < series->count; i++) {
        const Point *point = &series->points[i];
        double n = (double)point->count;
        fprintf(page, "%s[%.10g,%.6g,%.7g,%.7g,%.7g]", i ? "," : "", point->steps / n, point->seconds / n, point->sum / n,
                point->least, point->greatest);
    }
    fputc(']', page);
}

/* The options of the run, as config.json has them. */
static void put_config(FILE *page, const Run *run)
{
    char path[4200], line[4096];
    FILE *config = run_path(run, "config.json", path, sizeof path, NULL) ? NULL : fopen(path, "r");
    if (!config) {
        fputs("{}", page);
        return;
    }
    while (fgets(line, sizeof line, config)) put_json(page, line);
    fclose(config);
}

static void put_data(FILE *page, const Report *report, const Run *run, const char *state, int running)
{
    char now[32];
    time_t clock = time(NULL);
    struct tm parts;
    strftime(now, sizeof now, "%Y-%m-%d %H:%M UTC", gmtime_r(&clock, &parts));
    fprintf(page, "{\"written\": \"%s\", \"running\": %s, \"runs\": [{\"name\": ", now, running ? "true" : "false");
    put_string(page, run->dir);
    fputs(", \"state\": ", page);
    put_string(page, state);
    fputs(", \"floor\": ", page);
    if (isfinite(report->floor)) fprintf(page, "%.7g", report->floor);
    else fputs("null", page);
    fputs(",\n\"facts\": [", page);
    for (int i = 0; i < report->fact_count; i++) {
        const Fact *fact = &report->facts[i];
        fputs(i ? ", [" : "[", page);
        put_string(page, fact->label ? fact->label : "");
        fputs(", ", page);
        put_string(page, fact->text ? fact->text : "");
        fputc(']', page);
    }
    fputs("],\n\"config\": ", page);
    put_config(page, run);
    fputs(",\n\"samples\": [", page);
    for (int i = 0; i < report->sample_count; i++) {
        fprintf(page, "%s[%lld, ", i ? ",\n" : "", (long long)report->samples[i].step);
        put_json(page, report->samples[i].text);
        fputc(']', page);
    }
    fputs("],\n\"series\": {", page);
    for (int i = 0; i < report->series_count; i++) {
        if (i) fputs(",\n", page);
        put_series(page, report->series[i]);
    }
    fputs("}}]}", page);
}

static int write_page(Report *report, const Run *run, const char *state, int running, Error *error)
{
    char path[4200], temporary[4200];
    const char *mark = strstr(report_page, "@DATA@");
    if (run_path(run, "report.html", path, sizeof path, error) ||
        run_path(run, ".report.html.tmp", temporary, sizeof temporary, error) || take_log(report, run, error))
        return -1;
    FILE *page = fopen(temporary, "w");
    if (!page) return error_set(error, "%s: %s", temporary, strerror(errno));
    fwrite(report_page, 1, (size_t)(mark - report_page), page);
    put_data(page, report, run, state, running);
    fputs(mark + strlen("@DATA@"), page);
    int bad = ferror(page) || fflush(page), cause = errno;
    if (fclose(page) && !bad) {
        bad = 1;
        cause = errno;
    }
    if (!bad && rename(temporary, path)) {
        bad = 1;
        cause = errno;
    }
    if (!bad) return 0;
    remove(temporary);
    return error_set(error, "%s: %s", path, strerror(cause));
}

void report_write(Report *report, const Run *run, const char *state, int running)
{
    Error error;
    double began = display_clock();
    if (!report || !run->dir) return;
    if (running && report->written > 0 && began - report->written < PAGE_SHARE * report->cost) return;
    if (write_page(report, run, state, running, &error) && !report->failed) {
        report->failed = 1;
        printf("report   not written: %s\n", error.text);
        fflush(stdout);
    }
    report->written = display_clock();
    report->cost = report->written - began;
}
