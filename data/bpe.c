/* bpe.c - cutting text into pieces, and merging their bytes.
 *
 * What merging asks for again and again is the rank of a pair of tokens. Pairs of bytes, which every piece starts with, are
 * looked up in a table of 256 x 256; the others in a hash table with open addressing that is at most half full.
 *
 * Pieces of words are short. In an array of up to SHORT tokens the lowest rank is found by looking at all of them, and
 * closing the gap moves the rest: quadratic, but a few vector instructions. Longer pieces (a page of one letter is one) keep
 * their tokens as a doubly linked list and the pairs that can be joined in a heap ordered by rank and place. A pair whose
 * tokens have changed since it was put there is known by its rank, which is no longer that of its place, and dropped.
 */
#include "data/bpe.h"

#include <stdlib.h>
#include <string.h>

#include "data/unicode.h"

enum { SHORT = 48 };

#define NO_RANK UINT32_MAX
#define NOWHERE UINT32_MAX

typedef struct PairSlot {
    int32_t left, right;
    uint32_t rank; /* NO_RANK: the slot is free */
} PairSlot;

struct Bpe {
    int32_t of_byte[256];
    int32_t *results;    /* (merges) token that each rank gives */
    uint32_t *bytes;     /* (256, 256) ranks of pairs of bytes */
    PairSlot *slots;     /* (mask + 1) */
    size_t mask;
};

/* ------------------------------------------------------------------------------------------------------------ the pairs */

/* Where a pair is looked for first. Source: Knuth, TAOCP 3, 6.4: multiplication by the golden ratio, high bits. */
static size_t pair_hash(const Bpe *bpe, int32_t left, int32_t right)
{
    uint64_t key = (uint64_t)(uint32_t)left << 32 | (uint32_t)right;
    return (size_t)((key * 0x9E3779B97F4A7C15u) >> 32) & bpe->mask;
}

/* The slot of a pair, or the free one where it would be. */
static PairSlot *pair_slot(const Bpe *bpe, int32_t left, int32_t right)
{
    size_t at = pair_hash(bpe, left, right);
    while (bpe->slots[at].rank != NO_RANK && (bpe->slots[at].left != left || bpe->slots[at].right != right))
        at = (at + 1) & bpe->mask;
    return &bpe->slots[at];
}

static uint32_t pair_rank(const Bpe *bpe, int32_t left, int32_t right) { return pair_slot(bpe, left, right)->rank; }

/* Fills the table of pairs of bytes. Returns 0, or -1 where memory is short. */
static int fill_bytes(Bpe *bpe, const BpeMerge *merges, size_t count)
{
    int32_t largest = 0;
    for (int b = 0; b < 256; b++)
        if (bpe->of_byte[b] > largest) largest = bpe->of_byte[b];
    int16_t *byte_of = malloc(((size_t)largest + 1) * sizeof *byte_of); /* -1: of no byte */
    if (!byte_of) return -1;
    memset(byte_of, -1, ((size_t)largest + 1) * sizeof *byte_of);
    for (int b = 0; b < 256; b++) byte_of[bpe->of_byte[b]] = (int16_t)b;
    memset(bpe->bytes, -1, (size_t)256 * 256 * sizeof *bpe->bytes); /* NO_RANK */
    for (size_t i = count; i-- > 0;) { /* of two with one pair the first stays */
        int left = merges[i].left <= largest ? byte_of[merges[i].left] : -1;
        int right = merges[i].right <= largest ? byte_of[merges[i].right] : -1;
        if (left >= 0 && right >= 0) bpe->bytes[256 * left + right] = (uint32_t)i;
    }
    free(byte_of);
    return 0;
}

Bpe *bpe_create(const int32_t of_byte[256], const BpeMerge *merges, size_t count)
{
    Bpe *bpe = calloc(1, sizeof *bpe);
    size_t size = 16;
    if (!bpe || count >= NO_RANK) {
        free(bpe);
        return NULL;
    }
    while (size < 2 * count) size *= 2;
    memcpy(bpe->of_byte, of_byte, sizeof bpe->of_byte);
    bpe->mask = size - 1;
    bpe->slots = malloc(size * sizeof *bpe->slots);
    bpe->results = malloc((count + 1) * sizeof *bpe->results);
    bpe->bytes = malloc((size_t)256 * 256 * sizeof *bpe->bytes);
    if (!bpe->slots || !bpe->results || !bpe->bytes) {
        bpe_free(bpe);
        return NULL;
    }
    for (size_t i = 0; i < size; i++) bpe->slots[i] = (PairSlot){0, 0, NO_RANK};
    for (size_t i = 0; i < count; i++) {
        PairSlot *slot = pair_slot(bpe, merges[i].left, merges[i].right);
        if (slot->rank == NO_RANK) *slot = (PairSlot){merges[i].left, merges[i].right, (uint32_t)i};
        bpe->results[i] = merges[i].result;
    }
    if (fill_bytes(bpe, merges, count)) {
        bpe_free(bpe);
        return NULL;
    }
    return bpe;
}

void bpe_free(Bpe *bpe)
{
    if (!bpe) return;
    free(bpe->slots);
    free(bpe->results);
    free(bpe->bytes);
    free(bpe);
}

/* -------------------------------------------------------------------------------------------------------------- cutting */

/* The class of the character at the start of text, and its bytes. */
static UnicodeClass next_class(const uint8_t *text, size_t length, size_t *size)
{
    uint8_t a = text[0];
    *size = 1;
    if (a < 0x80) {
        if ((uint8_t)((a | 0x20) - 'a') < 26) return UNICODE_LETTER;
        if ((uint8_t)(a - '0') < 10) return UNICODE_NUMBER;
        return a == ' ' || (uint8_t)(a - '\t') < 5 ? UNICODE_SPACE : UNICODE_OTHER;
    }
    size_t n = utf8_length(text, length);
    if (!n) return UNICODE_OTHER;
    *size = n;
    return unicode_class(utf8_read(text, n));
}

/* Where the characters of this class that follow `at` end. *last gets where the last of them begins. */
static size_t class_end(const uint8_t *text, size_t length, size_t at, UnicodeClass class, size_t *last)
{
    size_t size;
    *last = at;
    while (at < length && next_class(text + at, length - at, &size) == class) {
        *last = at;
        at += size;
    }
    return at;
}

/* Bytes of the rest of a contraction after an apostrophe, 0 where there is none. */
static size_t contraction(const uint8_t *text, size_t length)
{
    if (length >= 1 && text[0] && strchr("sdmt", text[0])) return 1;
    if (length < 2) return 0;
    return !memcmp(text, "ll", 2) || !memcmp(text, "ve", 2) || !memcmp(text, "re", 2) ? 2 : 0;
}

size_t bpe_piece(const uint8_t *text, size_t length)
{
    size_t blank = text[0] == ' ' && length > 1, size, last, end;
    UnicodeClass class = next_class(text + blank, length - blank, &size);
    if (text[0] == '\'' && (end = contraction(text + 1, length - 1))) return 1 + end;
    if (class != UNICODE_SPACE) return class_end(text, length, blank + size, class, &last);
    end = class_end(text, length, 0, UNICODE_SPACE, &last);
    return end < length && last ? last : end;
}

/* -------------------------------------------------------------------------------------------------------------- merging */

/* Merges n tokens, at most SHORT; ranks (n) are those of each with its neighbour on the right. Returns how many are left. */
static size_t merge_short(const Bpe *bpe, int32_t *tokens, uint32_t *ranks, size_t n)
{
    for (;;) {
        size_t at = 0;
        for (size_t i = 1; i + 1 < n; i++)
            if (ranks[i] < ranks[at]) at = i;
        if (n < 2 || ranks[at] == NO_RANK) return n;
        tokens[at] = bpe->results[ranks[at]];
        n--;
        for (size_t i = at + 1; i < n; i++) {
            tokens[i] = tokens[i + 1];
            ranks[i] = ranks[i + 1];
        }
        if (at + 1 < n) ranks[at] = pair_rank(bpe, tokens[at], tokens[at + 1]);
        if (at > 0) ranks[at - 1] = pair_rank(bpe, tokens[at - 1], tokens[at]);
    }
}

/* A pair of neighbours in a long piece: what their rank was, times 2^32, plus the left one's place. The lowest is the next
 * to be joined. */
typedef uint64_t Candidate;

/* A long piece in the making. A place whose token was merged into its left neighbour is on nobody's list. */
typedef struct LongPiece {
    const Bpe *bpe;
    int32_t *tokens;         /* (n) */
    uint32_t *ranks;         /* (n) of each with its neighbour on the right */
    uint32_t *next, *before; /* (n) places of the neighbours, NOWHERE at the ends */
    Candidate *heap;         /* (2 n) */
    size_t heap_count;
} LongPiece;

static void heap_push(LongPiece *p, Candidate new)
{
    size_t at = p->heap_count++;
    for (; at && new < p->heap[(at - 1) / 2]; at = (at - 1) / 2) p->heap[at] = p->heap[(at - 1) / 2];
    p->heap[at] = new;
}

static Candidate heap_pop(LongPiece *p)
{
    Candidate top = p->heap[0], moved = p->heap[--p->heap_count];
    size_t at = 0, child;
    while ((child = 2 * at + 1) < p->heap_count) {
        child += child + 1 < p->heap_count && p->heap[child + 1] < p->heap[child];
        if (moved <= p->heap[child]) break;
        p->heap[at] = p->heap[child];
        at = child;
    }
    p->heap[at] = moved;
    return top;
}

/* Looks up the pair at a place anew. */
static void refresh_pair(LongPiece *p, uint32_t at)
{
    uint32_t right = p->next[at];
    p->ranks[at] = right == NOWHERE ? NO_RANK : pair_rank(p->bpe, p->tokens[at], p->tokens[right]);
    if (p->ranks[at] != NO_RANK) heap_push(p, (Candidate)p->ranks[at] << 32 | at);
}

/* Merges the n tokens of a long piece, as merge_short. Every merge takes a candidate and adds at most two, and there are at
 * most n-1 of either at the start, so that 2n is room enough for the heap. */
static size_t merge_long(LongPiece *p, uint32_t n)
{
    size_t left = 0;
    for (uint32_t i = 0; i < n; i++) {
        p->before[i] = i ? i - 1 : NOWHERE;
        p->next[i] = i + 1 < n ? i + 1 : NOWHERE;
        if (p->ranks[i] != NO_RANK) heap_push(p, (Candidate)p->ranks[i] << 32 | i);
    }
    while (p->heap_count) {
        Candidate best = heap_pop(p);
        uint32_t at = (uint32_t)best, rank = (uint32_t)(best >> 32), right;
        if (p->ranks[at] != rank) continue;
        right = p->next[at];
        p->tokens[at] = p->bpe->results[rank];
        p->ranks[right] = NO_RANK;
        p->next[at] = p->next[right];
        if (p->next[at] != NOWHERE) p->before[p->next[at]] = at;
        refresh_pair(p, at);
        if (p->before[at] != NOWHERE) refresh_pair(p, p->before[at]);
    }
    for (uint32_t i = 0; i != NOWHERE; i = p->next[i]) p->tokens[left++] = p->tokens[i];
    return left;
}

int bpe_merge(const Bpe *bpe, const uint8_t *piece, size_t length, int32_t *out, size_t *count)
{
    uint32_t few[SHORT], *ranks = few;
    LongPiece p = {.bpe = bpe, .tokens = out};
    int result = 0;
    *count = 0;
    if (length >= NOWHERE) return -1;
    if (length > SHORT) {
        ranks = p.ranks = malloc(length * sizeof *p.ranks);
        p.next = malloc(length * sizeof *p.next);
        p.before = malloc(length * sizeof *p.before);
        p.heap = malloc(2 * length * sizeof *p.heap);
        if (!p.ranks || !p.next || !p.before || !p.heap) result = -1;
    }
    if (!result) {
        for (size_t i = 0; i < length; i++) {
            out[i] = bpe->of_byte[piece[i]];
            ranks[i] = i + 1 < length ? bpe->bytes[256 * piece[i] + piece[i + 1]] : NO_RANK;
        }
        *count = length > SHORT ? merge_long(&p, (uint32_t)length) : merge_short(bpe, out, ranks, length);
    }
    free(p.ranks);
    free(p.next);
    free(p.before);
    free(p.heap);
    return result;
}
