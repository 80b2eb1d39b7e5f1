/*
 * seqlock: a number before the bytes of a version, by which a reader knows that they were not
 * written while it read.
 *
 * The publisher raises `generation` before it changes the first byte of the slot (odd: being
 * written) and again when all is written, before it sends SEAL (even). A worker notes the number
 * when it stages and looks again when its user accepts: if it moved, the worker had been evicted
 * meanwhile and what the user read may be torn, so nothing is accepted.
 */
#ifndef RFT_SEQLOCK_H
#define RFT_SEQLOCK_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

/* A version in a shared store lies behind its seqlock: the RFT_SEQLOCK_BYTES before OFFER's
 * segment_offset. That of a version in a GPU's memory has a segment of its own (share_lock.h). */
#define RFT_SEQLOCK_BYTES 64u

typedef struct rft_seqlock {
    atomic_uint_fast64_t generation;
} rft_seqlock;

/* Odd from now on, if it was not. */
void rft_seqlock_begin(rft_seqlock *lock);
/* Even again. */
void rft_seqlock_end(rft_seqlock *lock);
/* The bytes are gone, for ever. */
void rft_seqlock_retire(rft_seqlock *lock);

/* What this thread did to a seqlock, or beside it, comes before what it looks at from here on. */
void rft_seqlock_fence(void);

/* Notes the number. False while the bytes are being written, or gone. */
bool rft_seqlock_note(const rft_seqlock *lock, uint64_t *generation);
/* Whether the bytes that were read since are those of then. */
bool rft_seqlock_holds(const rft_seqlock *lock, uint64_t generation);
bool rft_seqlock_is_retired(const rft_seqlock *lock);

#endif
