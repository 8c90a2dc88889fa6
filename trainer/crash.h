/* crash.h - a program that foreign code brings down says what it was doing.
 *
 * crash_words("crashed in kernel x") before a call: where the process dies of SIGSEGV and the like, one line on stderr has
 * the last of these words. The process then dies of the signal, as it would without. Signals that have handlers are left to
 * them: under a sanitizer, whose report says more, nothing is changed.
 */
#ifndef CRASH_H
#define CRASH_H

#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static char crash_text[4608]; /* a path and words around it */

static void crash_handler(int number)
{
    static const struct { int number; const char *name; } names[] = {
        {SIGSEGV, "SIGSEGV"}, {SIGBUS, "SIGBUS"}, {SIGFPE, "SIGFPE"}, {SIGILL, "SIGILL"},
    };
    const char *name = "a signal";
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        if (names[i].number == number) name = names[i].name;
    const char *parts[] = {crash_text, ": ", name, "\n"};
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++)
        if (write(STDERR_FILENO, parts[i], strlen(parts[i])) < 0) break;
    raise(number); /* by default now */
}

__attribute__((format(printf, 1, 2)))
static void crash_words(const char *format, ...)
{
    static const int numbers[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
    static int ready;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(crash_text, sizeof crash_text, format, arguments);
    va_end(arguments);
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0] && !ready; i++) {
        struct sigaction before, action;
        memset(&action, 0, sizeof action);
        action.sa_handler = crash_handler;
        action.sa_flags = (int)(SA_RESETHAND | SA_NODEFER);
        if (!sigaction(numbers[i], NULL, &before) && before.sa_handler == SIG_DFL) sigaction(numbers[i], &action, NULL);
    }
    ready = 1;
}

#endif
