/* bpe.h - byte pair encoding as GPT-2 does it: text is cut into pieces, the bytes of each piece are merged.
 *
 * Pieces, the first of these that fits:
 *     's 't 'd 'm 'll 've 're       the rest of a contraction
 *     letters, numbers or others    as many of one kind as follow, with one blank before them where there is one
 *     blanks                        as many as follow, but for the last one where something else comes after them; that one
 *                                   goes with what follows if it is U+0020, and else is a piece of its own
 * A byte that belongs to no UTF-8 character counts as a character of the kind "others", so every text has its pieces.
 *
 * Merging. A piece begins as one token a byte. Of all neighbours that a merge joins, the pair whose merge has the lowest
 * number (its rank), and of equals the leftmost, becomes one token, until no neighbours can be joined. Source: Sennrich et
 * al. 2016, "Neural machine translation of rare words with subword units"; Radford et al. 2019.
 */
#ifndef BPE_H
#define BPE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct BpeMerge {
    int32_t left, right; /* tokens side by side */
    int32_t result;      /* the one that they become */
} BpeMerge;

typedef struct Bpe Bpe;

/* of_byte: the token of each byte, all of them from 0 on. merges (count): in the order of their ranks; the first of two with
 * one pair counts. Both are copied. NULL where memory is short. */
Bpe *bpe_create(const int32_t of_byte[256], const BpeMerge *merges, size_t count);
void bpe_free(Bpe *bpe);

/* Bytes of the first piece of text (length of them, at least 1). The text must go on to its end or to a place where a piece
 * ends: what follows decides. */
size_t bpe_piece(const uint8_t *text, size_t length);

/* The tokens of one piece to out, which has room for `length` of them; *count gets how many. Takes O(length log length)
 * time. Any number of threads may share a Bpe. Returns 0, or -1 where memory is short or the piece has 2^32 - 1 bytes or
 * more. */
int bpe_merge(const Bpe *bpe, const uint8_t *piece, size_t length, int32_t *out, size_t *count);

#ifdef __cplusplus
}
#endif
#endif
