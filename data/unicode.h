/* unicode.h - characters in UTF-8, and the classes by which GPT-2 cuts text into pieces. */
#ifndef UNICODE_H
#define UNICODE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Unicode's general categories L* and N*, and its property White_Space; everything else, unassigned characters too, is
 * other. The version of the tables is named in unicode_classes.c. */
typedef enum UnicodeClass { UNICODE_OTHER, UNICODE_LETTER, UNICODE_NUMBER, UNICODE_SPACE } UnicodeClass;

/* The class of a code point; of numbers above U+10FFFF: other. */
UnicodeClass unicode_class(uint32_t code);

/* Length of the UTF-8 sequence at the start of `text`, 1 to 4, or 0 where there is none: overlong forms, surrogates and
 * numbers above U+10FFFF are none. length is at least 1. */
size_t utf8_length(const unsigned char *text, size_t length);
/* The code point of a sequence of `size` bytes, as utf8_length found it. */
uint32_t utf8_read(const unsigned char *text, size_t size);
/* Writes a code point as UTF-8, returns the bytes written, at most 4. */
size_t utf8_write(char *out, uint32_t code);

/* The table (unicode_classes.c, made by unicode.py): where classes begin, ascending: code point times 4 plus class. */
extern const uint32_t unicode_classes[];
extern const size_t unicode_classes_count;

#ifdef __cplusplus
}
#endif
#endif
