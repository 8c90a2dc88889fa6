/* unicode.c - UTF-8 and character classes. Source: RFC 3629 (UTF-8); the Unicode Character Database. */
#include "data/unicode.h"

UnicodeClass unicode_class(uint32_t code)
{
    size_t low = 0, high = unicode_classes_count; /* entry `low` begins at or before the code, entry `high` after it */
    if (code > 0x10FFFF) return UNICODE_OTHER;
    while (high - low > 1) {
        size_t middle = low + (high - low) / 2;
        if (unicode_classes[middle] >> 2 <= code) low = middle;
        else high = middle;
    }
    return (UnicodeClass)(unicode_classes[low] & 3);
}

size_t utf8_length(const unsigned char *text, size_t length)
{
    unsigned char a = text[0], low = 0x80, high = 0xBF;
    size_t n = a < 0x80 ? 1 : a >= 0xC2 && a <= 0xDF ? 2 : a >= 0xE0 && a <= 0xEF ? 3 : a >= 0xF0 && a <= 0xF4 ? 4 : 0;
    if (n == 0 || n > length) return 0;
    if (a == 0xE0) low = 0xA0;
    if (a == 0xED) high = 0x9F;
    if (a == 0xF0) low = 0x90;
    if (a == 0xF4) high = 0x8F;
    if (n > 1 && (text[1] < low || text[1] > high)) return 0;
    for (size_t i = 2; i < n; i++)
        if (text[i] < 0x80 || text[i] > 0xBF) return 0;
    return n;
}

uint32_t utf8_read(const unsigned char *text, size_t size)
{
    static const unsigned char first[5] = {0, 0x7F, 0x1F, 0x0F, 0x07}; /* bits of the first byte that belong to the code */
    uint32_t code = text[0] & first[size];
    for (size_t i = 1; i < size; i++) code = code << 6 | (text[i] & 0x3F);
    return code;
}

size_t utf8_write(char *out, uint32_t code)
{
    if (code < 0x80) { out[0] = (char)code; return 1; }
    if (code < 0x800) {
        out[0] = (char)(0xC0 | code >> 6);
        out[1] = (char)(0x80 | (code & 0x3F));
        return 2;
    }
    if (code < 0x10000) {
        out[0] = (char)(0xE0 | code >> 12);
        out[1] = (char)(0x80 | (code >> 6 & 0x3F));
        out[2] = (char)(0x80 | (code & 0x3F));
        return 3;
    }
    out[0] = (char)(0xF0 | code >> 18);
    out[1] = (char)(0x80 | (code >> 12 & 0x3F));
    out[2] = (char)(0x80 | (code >> 6 & 0x3F));
    out[3] = (char)(0x80 | (code & 0x3F));
    return 4;
}
