/*
 * delta: what changed in a block of elements, as few bytes, exactly.
 *
 * A block is up to 65,536 elements of 1, 2, 4 or 8 bytes, compared as bits: NaN and −0 are values
 * like any other. Of N elements n changed. The coded bytes are planes, one after the other, each
 * of whole bytes, little-endian whatever the CPU, its unused last bits 0:
 *
 *     LOW      the low l bits of each changed element's position
 *     HIGH     the rest of it: the i-th sets bit (position >> l) + i of ((N-1) >> l) + n; where l
 *              is 0, the i-th sets bit `position` of N
 *     SYMBOLS  2 bits each: u mod 3, or 3 where u moved by more than 1
 *     ESCAPES  4 bits for each symbol 3: u mod 15, or 15 where u moved by more than 7
 *     FAR      a byte for each escape 15: u mod 255, or 255 where u moved by more than 127
 *     VALUES   for each far byte 255 the element as it lies in memory
 *
 * l is floor(log2(N / n)), but 0 instead of 1, and 15 instead of 16. u is a half float's bits as a
 * number that keeps order: negative ones inverted, others with the sign bit set. The receiver takes
 * the number nearest to its own, of those from 0 to 65,535 that leave the remainder. A remainder
 * says where a value lands, not how far it moves: applying a block again, or to one that is half
 * done, gives the same result. Other elements (RAW) have the planes LOW, HIGH and VALUES alone, the
 * last with all that changed. Every element can be decoded on its own.
 *
 * Nothing here allocates. Stack: at most 20 KiB.
 */
#ifndef RFT_KERNEL_DELTA_H
#define RFT_KERNEL_DELTA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define RFT_DELTA_ELEMENTS 65536u /* of a block, at most */

/* What a block costs besides its planes: its entry in a directory, digests before and after. */
#define RFT_DELTA_ENTRY_BYTES 20u

typedef enum rft_delta_kind {
    RFT_DELTA_HALF, /* bf16, fp16: remainders */
    RFT_DELTA_RAW,  /* anything else: the new value itself */
} rft_delta_kind;

typedef struct rft_delta_shape {
    uint32_t elements; /* 1 to RFT_DELTA_ELEMENTS */
    uint32_t width;    /* bytes of an element: 1, 2, 4, 8; 2 for RFT_DELTA_HALF */
    rft_delta_kind kind;
} rft_delta_shape;

typedef enum rft_delta_plane {
    RFT_DELTA_LOW,
    RFT_DELTA_HIGH,
    RFT_DELTA_SYMBOLS,
    RFT_DELTA_ESCAPES,
    RFT_DELTA_FAR,
    RFT_DELTA_VALUES,
    RFT_DELTA_PLANES,
} rft_delta_plane;

/* Coded bytes, measured. All of it follows from the shape, `changed`, `escapes` and the bytes
 * themselves, so that no more than these two need to travel. */
typedef struct rft_delta_entry {
    uint32_t changed;                 /* 1 to elements */
    uint32_t escapes;                 /* 0 to 65,535; 0 for RFT_DELTA_RAW */
    uint32_t far;                     /* of the escapes, those that are 15 */
    uint32_t values;                  /* elements in VALUES */
    uint32_t bytes[RFT_DELTA_PLANES]; /* length of each plane */
    uint32_t total;                   /* of all planes */
} rft_delta_entry;

/* How many elements differ. The cheap question: a block of which none do needs no more. */
uint32_t rft_delta_count(rft_delta_shape shape, const void *before, const void *after);

/* Room that encoding needs, whatever comes of it. */
size_t rft_delta_bound(rft_delta_shape shape);

/* Writes what makes `after` of `before`: entry->total bytes to `out`, which has rft_delta_bound of
 * room, all of which may be written. False: nothing changed (entry->changed is 0), or with
 * RFT_DELTA_ENTRY_BYTES it would not be smaller than the block itself (entry->changed says how many
 * elements differ). */
bool rft_delta_encode(rft_delta_shape shape, const void *before, const void *after,
                      unsigned char *out, rft_delta_entry *entry);

/* Likewise, but false as well where so much changed that it does not pay: where the planes, as
 * short as they can be for so many changed elements, would save less than `price` bytes for each of
 * these. Comparing alone tells, and nothing is coded then. */
bool rft_delta_encode_if(rft_delta_shape shape, uint32_t price, const void *before,
                         const void *after, unsigned char *out, rft_delta_entry *entry);

/* Measures coded bytes that came from elsewhere, of which `room` are there; more than the planes'
 * may be. False: the counts contradict each other or the bytes, or the bytes do not suffice. */
bool rft_delta_measure(rft_delta_shape shape, uint32_t changed, uint32_t escapes,
                       const unsigned char *coded, size_t room, rft_delta_entry *entry);

/* Changes `block`, which is as the encoder's `before` or `after` or partly either, to its `after`.
 * `entry` is as rft_delta_encode or rft_delta_measure made it for these bytes. Onto any other block
 * the same elements are written with values that mean nothing; doing it twice is doing it once.
 * False: the planes contradict each other; then some elements may be changed. Nothing outside the
 * block is written, and nothing outside it and the coded bytes is read. */
bool rft_delta_apply(rft_delta_shape shape, const rft_delta_entry *entry,
                     const unsigned char *coded, void *block);

#endif
