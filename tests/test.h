/* test.h - what every test program shares: checks that name what failed, one line a test, one closing count.
 *
 *     int main(void) {
 *         TEST("sum of an empty list");
 *         CHECK(sum(NULL, 0) == 0, "sum is %d", sum(NULL, 0));
 *         return test_end();
 *     }
 *
 * A test passes when all its checks did. `make test` adds up the closing lines of the programs.
 */
#ifndef TEST_H
#define TEST_H

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct {
    char name[256];
    int open, faults, skipped_now, passed, failed, skipped;
} test_state;

static void test_close(void)
{
    if (!test_state.open) return;
    test_state.open = 0;
    if (test_state.skipped_now) { test_state.skipped++; return; }
    if (test_state.faults) test_state.failed++; else test_state.passed++;
    printf("%s %s\n", test_state.faults ? "FAIL" : "ok  ", test_state.name);
    fflush(stdout);
}

__attribute__((format(printf, 1, 2)))
static void test_begin(const char *format, ...)
{
    va_list arguments;
    test_close();
    va_start(arguments, format);
    vsnprintf(test_state.name, sizeof test_state.name, format, arguments);
    va_end(arguments);
    test_state.open = 1;
    test_state.faults = 0;
    test_state.skipped_now = 0;
}

__attribute__((format(printf, 4, 5)))
static int test_check(int good, const char *file, int line, const char *format, ...)
{
    if (!good && test_state.faults++ < 10) {
        va_list arguments;
        printf("  %s:%d: %s: ", file, line, test_state.name);
        va_start(arguments, format);
        vprintf(format, arguments);
        va_end(arguments);
        printf("\n");
    }
    return good;
}

/* Opens a test; a printf format. Closes the one before. */
#define TEST(...) test_begin(__VA_ARGS__)
/* CHECK(condition, format, ...): the format says what was got and what was expected. Yields whether it held. */
#define CHECK(condition, ...) test_check(!!(condition), __FILE__, __LINE__, __VA_ARGS__)
/* The open test cannot run here; says why. */
#define SKIP(...) (test_state.skipped_now = 1, printf("skip %s: ", test_state.name), printf(__VA_ARGS__), printf("\n"))

/* Whether racecheck watches (dev/gpu_test.sh). It takes minutes over cuBLAS's sm_90 products in bf16, of rows of a multiple
 * of 8 elements: tests that need them leave them out then. */
#define UNDER_RACECHECK() (getenv("FLASHGPT_SANITIZE") && !strcmp(getenv("FLASHGPT_SANITIZE"), "racecheck"))

/* Closes the last test, prints "N passed, N failed, N skipped", returns main's exit status. */
static int test_end(void)
{
    test_close();
    printf("%d passed, %d failed, %d skipped\n", test_state.passed, test_state.failed, test_state.skipped);
    return test_state.failed != 0;
}

#endif
