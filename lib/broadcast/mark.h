/*
 * mark: a number before the bytes of a version, by which a reader knows that nobody wrote them
 * while it read.
 *
 * The publisher raises `generation` before it changes the first byte of the slot (odd: being
 * written) and again when all is written, before it sends SEAL (even). A worker notes the number
 * when it stages and looks again when its user accepts: if it moved, the worker had been evicted
 * meanwhile and what the user read may be torn, so nothing is accepted.
 */
#ifndef RFT_MARK_H
#define RFT_MARK_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

/* A version in a shared store lies behind its mark: the RFT_MARK_BYTES before OFFER's
 * segment_offset. That of a version in a GPU's memory has a segment of its own (leash.h). */
#define RFT_MARK_BYTES 64u

typedef struct rft_mark {
    atomic_uint_fast64_t generation;
} rft_mark;

/* Odd from now on, if it was not. */
void rft_mark_begin(rft_mark *mark);
/* Even again. */
void rft_mark_end(rft_mark *mark);
/* The bytes are gone, for ever. */
void rft_mark_retire(rft_mark *mark);

/* What this thread did to a mark, or beside it, comes before what it looks at from here on. */
void rft_mark_fence(void);

/* Notes the number. False while the bytes are being written, or gone. */
bool rft_mark_note(const rft_mark *mark, uint64_t *generation);
/* Whether the bytes that were read since are those of then. */
bool rft_mark_holds(const rft_mark *mark, uint64_t generation);
bool rft_mark_is_retired(const rft_mark *mark);

#endif
