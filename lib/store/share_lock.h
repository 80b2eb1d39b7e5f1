/*
 * share_lock: which workers still map a piece of the publisher's device memory, however they end.
 *
 * Shared host memory stays for all that map it, even when its owner lets go. Memory of a GPU does
 * not: its owner must not free it while another process has it mapped, nor write it while one reads
 * it, and a worker that was killed says nothing. So each piece has a share lock: a segment of one
 * seqlock, and two locks on the segment's file that the kernel takes from a holder that dies.
 *
 *     mapped  held by a worker from before it maps the memory until after it has unmapped it
 *     read    held besides while its user has an update that lies there
 *
 * Both ends first do their part and then look at the other's: the owner changes the seqlock, then
 * looks for locks; a worker takes its lock, then looks at the seqlock. So one of them sees the
 * other.
 */
#ifndef RFT_SHARE_LOCK_H
#define RFT_SHARE_LOCK_H

#include "store/segment.h"

typedef struct rft_share_lock {
    rft_segment segment; /* a holder's descriptor has its locks */
} rft_share_lock;

/* ---- The owner */

/* REFIT_ERR_SYSTEM: no shared memory. */
refit_status rft_share_lock_open(rft_share_lock *share_lock, refit_error *error);
/* No worker can take hold from now on. */
void rft_share_lock_retire(rft_share_lock *share_lock);
/* Whether a holder has the lock; where the kernel does not say, it is taken to be so. */
bool rft_share_lock_is_mapped(const rft_share_lock *share_lock);
bool rft_share_lock_is_read(const rft_share_lock *share_lock);

/* ---- A holder */

/* Takes hold, as "mapped". REFIT_ERR_NOT_FOUND: there is none of that name any more, or it was
 * retired; REFIT_ERR_PROTOCOL: not the name of a segment; REFIT_ERR_SECURITY: another user's, or
 * not sealed; REFIT_ERR_SYSTEM. */
refit_status rft_share_lock_hold(rft_share_lock *share_lock, const char *name, refit_error *error);
/* REFIT_ERR_SYSTEM. Look at the seqlock afterwards. */
refit_status rft_share_lock_read(rft_share_lock *share_lock, refit_error *error);
void rft_share_lock_unread(rft_share_lock *share_lock);

/* ---- Both */

/* Harmless on one that is not open ({0} is not). */
void rft_share_lock_close(rft_share_lock *share_lock);
rft_seqlock *rft_share_lock_seqlock(const rft_share_lock *share_lock);

#endif
