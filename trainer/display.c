#include "trainer/display.h"

#include <math.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

double display_clock(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

Progress progress_begin(const char *label)
{
    Progress progress = {label, display_clock(), 0, 0};
    return progress;
}

void progress_show(Progress *progress, int64_t done, int64_t total)
{
    double now = display_clock();
    if (now - progress->began < 0.5 || now - progress->drawn < 0.1 || !isatty(STDERR_FILENO)) return;
    char bar[31];
    int filled = total > 0 ? (int)(30 * ((double)done / (double)total)) : 0;
    for (int i = 0; i < 30; i++) bar[i] = i < filled ? '#' : '.';
    bar[30] = 0;
    fprintf(stderr, "\r%s [%s] %3d%%", progress->label, bar, total > 0 ? (int)(100 * ((double)done / (double)total)) : 0);
    fflush(stderr);
    progress->drawn = now;
    progress->visible = 1;
}

void progress_end(Progress *progress)
{
    if (progress->visible) fprintf(stderr, "\r\033[K");
    progress->visible = 0;
}

void display_duration(char *out, size_t size, double seconds)
{
    long whole = (long)(seconds + 0.5);
    if (whole >= 3600) snprintf(out, size, "%ldh %02ldm", whole / 3600, whole / 60 % 60);
    else if (whole >= 60) snprintf(out, size, "%ldm %02lds", whole / 60, whole % 60);
    else snprintf(out, size, "%ld s", whole);
}

void display_bytes(char *out, size_t size, double bytes)
{
    if (bytes >= 1024.0 * 1024 * 1024) snprintf(out, size, "%.2f GiB", bytes / (1024.0 * 1024 * 1024));
    else snprintf(out, size, "%.1f MiB", bytes / (1024.0 * 1024));
}

void display_text(const char *text, size_t length)
{
    for (size_t i = 0; i < length; i++) {
        unsigned char byte = (unsigned char)text[i];
        putchar((byte >= 32 && byte != 127) || byte == '\n' || byte == '\t' ? byte : '?');
    }
}

void display_command(const char *label, const char *const *words)
{
    static const char plain[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_./+-,:@";
    printf("%s", label);
    for (; *words; words++) {
        const char *quote = **words && !(*words)[strspn(*words, plain)] ? "" : "'";
        printf(" %s", quote);
        for (const char *at = *words; *at; at++) {
            if (*at == '\'') printf("'\\''");
            else putchar(*at);
        }
        printf("%s", quote);
    }
    printf("\n");
}

double display_resident(void)
{
    long long size = 0, resident = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    if (file && fscanf(file, "%lld %lld", &size, &resident) != 2) resident = 0;
    if (file) fclose(file);
    return (double)resident * (double)sysconf(_SC_PAGESIZE);
}

void curve_add(Curve *curve, int64_t step, double value)
{
    if (!curve->per_point) curve->per_point = 1;
    if (curve->filled == 0) {
        if (curve->count == CURVE_POINTS) { /* full: merge pairs, and from now on twice as many values a point */
            for (int i = 0; i < CURVE_POINTS / 2; i++) {
                curve->first_step[i] = curve->first_step[2 * i];
                curve->value[i] = 0.5 * (curve->value[2 * i] + curve->value[2 * i + 1]);
            }
            curve->count = CURVE_POINTS / 2;
            curve->per_point *= 2;
        }
        curve->first_step[curve->count++] = (double)step;
        curve->sum = 0;
    }
    curve->sum += value;
    curve->filled++;
    curve->value[curve->count - 1] = curve->sum / (double)curve->filled;
    if (curve->filled == curve->per_point) curve->filled = 0;
}

enum { COLUMNS_MOST = 160, ROWS_MOST = 40 };

/* Range of both curves and the floor. The first twentieth of the steps does not count for the highest value: a fresh model's loss towers
 * over all that follows, and what follows is what one wants to see. */
static void curve_range(const Curve *train, const Curve *validation, double floor_value, double *low, double *high, double *last)
{
    const Curve *curves[2] = {train, validation};
    *low = INFINITY;
    *high = -INFINITY;
    *last = 0;
    for (int c = 0; c < 2; c++)
        for (int64_t i = 0; i < curves[c]->count; i++) *last = fmax(*last, curves[c]->first_step[i]);
    for (int c = 0; c < 2; c++)
        for (int64_t i = 0; i < curves[c]->count; i++) {
            *low = fmin(*low, curves[c]->value[i]);
            if (curves[c]->first_step[i] >= *last / 20) *high = fmax(*high, curves[c]->value[i]);
        }
    if (isfinite(floor_value)) *low = fmin(*low, floor_value);
}

/* The row of a value: the top one for what lies above the range. */
static int curve_row(double value, double high, double scale)
{
    return value >= high ? 0 : (int)((high - value) * scale + 0.5);
}

void curve_print(const Curve *train, const Curve *validation, double floor_value, int columns, int rows)
{
    char grid[ROWS_MOST][COLUMNS_MOST + 1];
    double low, high, last, sums[COLUMNS_MOST] = {0};
    int counts[COLUMNS_MOST] = {0};
    if (columns > COLUMNS_MOST) columns = COLUMNS_MOST;
    if (rows > ROWS_MOST) rows = ROWS_MOST;
    curve_range(train, validation, floor_value, &low, &high, &last);
    if (train->count < 2 || !(high > low) || !isfinite(high - low)) return;
    for (int r = 0; r < rows; r++) {
        memset(grid[r], ' ', (size_t)columns);
        grid[r][columns] = 0;
    }
    double scale = (double)(rows - 1) / (high - low), stretch = (double)(columns - 1) / (last > 0 ? last : 1);
    if (isfinite(floor_value)) memset(grid[curve_row(floor_value, high, scale)], '-', (size_t)columns);
    for (int64_t i = 0; i < train->count; i++) { /* one dot a column: the mean of the points that fall in it */
        int column = (int)(train->first_step[i] * stretch + 0.5);
        sums[column] += train->value[i];
        counts[column]++;
    }
    for (int c = 0; c < columns; c++)
        if (counts[c]) grid[curve_row(sums[c] / counts[c], high, scale)][c] = '.';
    for (int64_t i = 0; i < validation->count; i++)
        grid[curve_row(validation->value[i], high, scale)][(int)(validation->first_step[i] * stretch + 0.5)] = 'o';
    printf("\nloss over steps   . training   o validation%s\n", isfinite(floor_value) ? "   - best possible" : "");
    for (int r = 0; r < rows; r++) {
        if (r % 3 == 0 || r == rows - 1) printf("%8.3f |%s\n", high - r / scale, grid[r]);
        else printf("%8s |%s\n", "", grid[r]);
    }
    printf("%8s +", "");
    for (int c = 0; c < columns; c++) putchar('-');
    printf("\n%10s0%*.0f\n", "", columns - 1, last);
}
