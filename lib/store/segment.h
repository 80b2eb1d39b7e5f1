/*
 * segment: memory that the trainer writes and workers of the same user read, and that no other
 * process can change.
 *
 * It is sealed (memfd_create): it keeps its length, so that no access to it can fail with SIGBUS,
 * and it is written through the mapping of its owner alone. A reader believes the kernel for that,
 * not the owner: it refuses what is not sealed, what has pages that were never written, and what
 * another user owns. The segment has no file and goes with the last process that maps it or has
 * its descriptor, however that process ends: children that the owner forked have the latter.
 *
 * Its name leads to the owner's descriptor, "/proc/PID/fd/FD:INODE": a reader has to have the
 * user, the /proc and the PID namespace of the owner. A process that may trace the owner can write
 * anything of the owner's, this memory too: that is the limit of what holds.
 */
#ifndef RFT_SEGMENT_H
#define RFT_SEGMENT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"
#include "store/seqlock.h"

#define RFT_SEGMENT_NAME_BYTES 48

/* Mapped memory, for readers of it beyond the segment's close. */
typedef struct rft_kept rft_kept;

typedef struct rft_segment {
    char name[RFT_SEGMENT_NAME_BYTES]; /* empty: private memory, or retired */
    unsigned char *memory;             /* NULL: not open */
    uint64_t bytes;
    int fd;         /* opened by the owner for writing, or by rft_segment_attach_open; else -1 */
    rft_kept *kept; /* NULL: unmapped by close */
} rft_segment;

/* Creates and maps one, read-write. REFIT_ERR_SYSTEM: the system has no such memory, or not so much
 * of it, or another process kept the memory open for writing while it was made. */
refit_status rft_segment_create(rft_segment *segment, uint64_t bytes, refit_error *error);

/* Private memory of this process, for where no worker shares it. */
refit_status rft_segment_create_private(rft_segment *segment, uint64_t bytes, refit_error *error);

/* Private memory for a worst case, of which little is used as a rule: its memory is taken page by
 * page, and the system is not asked whether there is so much of it. */
refit_status rft_segment_create_sparse(rft_segment *segment, uint64_t bytes, refit_error *error);

/* Maps another process's, read-only. REFIT_ERR_PROTOCOL: not the name of a segment, or shorter than
 * `bytes`; REFIT_ERR_NOT_FOUND: it is gone, or its owner is in another PID namespace;
 * REFIT_ERR_SECURITY: another user's, not sealed, or not filled; REFIT_ERR_SYSTEM. */
refit_status rft_segment_attach(rft_segment *segment, const char *name, uint64_t bytes,
                                refit_error *error);

/* As rft_segment_attach, and keeps the descriptor, for locks. A child that is forked meanwhile has
 * it too, and with it the memory, for as long as the child lives: so for little memory alone. */
refit_status rft_segment_attach_open(rft_segment *segment, const char *name, uint64_t bytes,
                                     refit_error *error);

/* Whether its owner has retired it, or has ended. Looks at the file system. */
bool rft_segment_is_retired(const rft_segment *segment);

/* The owner closes its descriptor, so that the memory cannot be mapped again; all mappings stay
 * valid. Harmless for others. */
void rft_segment_retire(rft_segment *segment);

/* From now on close leaves the memory mapped until all of `out` are given back. `*out` is `room`
 * bytes for the caller, aligned for anything. Not while another thread closes it.
 * REFIT_ERR_HOST_MEMORY. */
refit_status rft_segment_keep(rft_segment *segment, size_t room, void **out, refit_error *error);
/* Gives one back. NULL is allowed. Any thread. */
void rft_segment_unkeep(void *out);

/* Unmaps; the owner retires it too. Mappings of other processes stay valid. Harmless on a closed
 * one. */
void rft_segment_close(rft_segment *segment);

#endif
