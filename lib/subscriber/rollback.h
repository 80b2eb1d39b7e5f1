/*
 * rollback: the bytes that an update overwrites in the worker's destinations, so that they can be
 * put back, bit for bit.
 *
 * Before a block is changed, its changing elements are noted: positions and old elements (in the
 * form of kernels/delta.h), or the whole block where that is smaller. Notes are put back newest
 * first, so a destination that was written twice is as it was before the first time. The elements
 * themselves are kept, not their differences: putting back does not depend on the present bytes.
 *
 * Memory for the worst case, the old bytes of everything, is reserved when the first note of an
 * update is to be taken, and used page by page; reset gives it back.
 */
#ifndef RFT_ROLLBACK_H
#define RFT_ROLLBACK_H

#include "kernels/delta.h"
#include "store/segment.h"

/* Where a block lies. */
typedef struct rft_note_place {
    uint32_t destination; /* its number */
    uint64_t offset;      /* into it */
} rft_note_place;

typedef struct rft_rollback {
    rft_segment memory; /* not open: there are no notes */
    uint64_t used;
    uint64_t last; /* where the newest note begins; UINT64_MAX: there is none */
} rft_rollback;

/* Room for notes about `blocks` blocks of `bytes` bytes in all. Notes that are there stay; their
 * number is limited by the room of the first call. REFIT_ERR_HOST_MEMORY. */
refit_status rft_rollback_prepare(rft_rollback *rollback, uint64_t blocks, uint64_t bytes,
                                  refit_error *error);
bool rft_rollback_is_empty(const rft_rollback *rollback);
/* Forgets all notes, and gives the memory back. Harmless on one that is not open. */
void rft_rollback_reset(rft_rollback *rollback);

/* Makes `block`, which lies at that place, as `after`, and notes its old elements; tells how many
 * elements differed, and takes no note if that is 0. `after` may change meanwhile: the note has the
 * overwritten elements. REFIT_ERR_HOST_MEMORY: there is no room, and nothing is changed. */
refit_status rft_rollback_change(rft_rollback *rollback, rft_note_place place,
                                 rft_delta_shape shape, void *block, const void *after,
                                 uint32_t *changed, refit_error *error);

/* A walk from the newest note: {.next = rollback->last} begins. */
typedef struct rft_note {
    rft_note_place place;
    rft_delta_shape shape;
    uint64_t next; /* the one before it in time; UINT64_MAX: it is the oldest */
    const unsigned char *coded;
    rft_delta_entry entry; /* changed is 0: `coded` is the block */
} rft_note;

void rft_rollback_read(const rft_rollback *rollback, uint64_t at, rft_note *note);
uint64_t rft_note_bytes(const rft_note *note);
/* Puts the old elements into the block. */
void rft_note_undo(const rft_note *note, unsigned char *block);

#endif
