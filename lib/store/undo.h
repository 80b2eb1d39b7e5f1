/*
 * undo: the old bytes of what a version overwrites, for a store with one slot. Its memory is
 * reserved at once and taken page by page as blocks are saved, and given back when the version is
 * decided: between versions one copy of the weights is all there is.
 */
#ifndef RFT_UNDO_H
#define RFT_UNDO_H

#include "store/segment.h"
#include "wire/manifest.h"

typedef struct rft_undo {
    const rft_manifest *manifest; /* borrowed */
    rft_segment saved;            /* an image: each block at its own offset */
    unsigned char *has;           /* per block: 1 if it is saved; NULL: not open */
} rft_undo;

refit_status rft_undo_open(rft_undo *undo, const rft_manifest *manifest, refit_error *error);
void rft_undo_close(rft_undo *undo);

/* Before the block is overwritten in `image`; only the first time counts. */
void rft_undo_save(rft_undo *undo, uint32_t block, const unsigned char *image);
/* Puts all saved blocks back. */
void rft_undo_restore(const rft_undo *undo, unsigned char *image);
/* Forgets them. */
void rft_undo_reset(rft_undo *undo);

#endif
