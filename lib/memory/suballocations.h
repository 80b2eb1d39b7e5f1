/*
 * suballocations: the books of an arena: which pieces it has, by offset, and where the next one
 * fits. Arithmetic only; its owner's lock guards it.
 */
#ifndef RFT_SUBALLOCATIONS_H
#define RFT_SUBALLOCATIONS_H

#include <stdbool.h>

#include "base/error.h"

typedef struct rft_suballocation {
    uint64_t offset;
    uint64_t bytes; /* as asked for; its pages are these rounded up */
    uint32_t holds; /* of refit_arena_hold, whose memory must stay */
    bool moved;     /* by an offloader, of which it is a region */
    bool settled;   /* false: its memory is coming for the first time, or going for good */
    bool doomed;    /* its owner has let go of it: it goes once nobody needs it */
} rft_suballocation;

/* All zero but for the granule is empty. */
typedef struct rft_suballocations {
    uint64_t granule;        /* a power of two */
    rft_suballocation *list; /* owned; by offset; no two share a page */
    uint32_t count;
    uint32_t room;
    uint64_t holes; /* bytes between pieces */
} rft_suballocations;

void rft_suballocations_close(rft_suballocations *subs);

/* `bytes` in whole pages; they are no more than there are addresses. */
uint64_t rft_suballocations_round(const rft_suballocations *subs, uint64_t bytes);

/* Adds a piece, not settled, where it fits best: in the smallest hole that is large enough, or
 * behind the last. REFIT_ERR_LIMIT: nowhere below `end`; REFIT_ERR_HOST_MEMORY. */
refit_status rft_suballocations_add(rft_suballocations *subs, uint64_t bytes, uint64_t end,
                                    uint64_t *offset, refit_error *error);

/* The piece that begins at `offset`, or NULL. Good until the next add or remove. */
rft_suballocation *rft_suballocations_find(const rft_suballocations *subs, uint64_t offset);
void rft_suballocations_remove(rft_suballocations *subs, uint64_t offset);

/* Is [offset, offset + bytes), its end rounded up, settled pieces from end to end? `*held`: whether
 * one of them is held. */
bool rft_suballocations_are_run(const rft_suballocations *subs, uint64_t offset, uint64_t bytes,
                                bool *held);

#endif
