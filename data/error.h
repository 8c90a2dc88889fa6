/* error.h - how a function says what went wrong: one sentence, written by the one who knows, printed by main. */
#ifndef ERROR_H
#define ERROR_H

#ifdef __cplusplus
extern "C" {
#endif

/* One sentence without a final newline: what was read or tried (file, position), what was got, what was expected. */
typedef struct Error {
    char text[1024];
} Error;

/* Formats the sentence into *error (NULL is allowed: it is dropped) and returns -1, so that `return error_set(...)` reads
 * well in a function that returns 0 for success. */
#if defined(__GNUC__)
__attribute__((format(printf, 2, 3)))
#endif
int error_set(Error *error, const char *format, ...);

#ifdef __cplusplus
}
#endif
#endif
