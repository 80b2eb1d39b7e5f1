/*
 * segment: memory that the trainer writes and workers of the same user read, and that no other
 * process can change; and how both ends know what the other does there: the seqlock before a
 * version's bytes, and the share lock of memory that is a GPU's.
 *
 * It is sealed (memfd_create): it keeps its length, so that no access to it can fail with SIGBUS,
 * and it is written through the mapping of its owner alone. A reader believes the kernel for that,
 * not the owner: it refuses what is not sealed, what has pages that were never written, and what
 * another user owns. The segment has no file and goes with the last process that maps it or has
 * its descriptor, however that process ends. A forked child has neither.
 *
 * Its name leads to the owner's descriptor, "/proc/PID/fd/FD:INODE": a reader has to have the
 * user, the /proc and the PID namespace of the owner. A process that may trace the owner can write
 * anything of the owner's, this memory too: that is the limit of what holds.
 */
#ifndef RFT_SEGMENT_H
#define RFT_SEGMENT_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"

#define RFT_SEGMENT_NAME_BYTES 48

/* Where this process can be reached by a segment's name, as text: the machine, the user and the PID
 * namespace, with '/' between them. Processes of one place can attach each other's segments, as far
 * as they show each other their /proc. Empty where the system does not tell. */
#define RFT_SEGMENT_PLACE_BYTES 96
void rft_segment_place(char place[RFT_SEGMENT_PLACE_BYTES]);
/* Whether both are of one machine. */
bool rft_segment_place_is_near(const char *one, const char *other);

/* Mapped memory, for readers of it beyond the segment's close. */
typedef struct rft_kept rft_kept;

typedef struct rft_segment {
    char name[RFT_SEGMENT_NAME_BYTES]; /* empty: private memory, or retired */
    unsigned char *memory;             /* NULL: not open */
    unsigned char *view;               /* what the user of a reader is given; else NULL */
    uint64_t bytes;
    int fd;         /* opened by the owner for writing, or by a reader that keeps it; else -1 */
    rft_kept *kept; /* NULL: unmapped by close */
} rft_segment;

/* Creates and maps one, read-write. REFIT_ERR_SYSTEM: the system has no such memory, or not so much
 * of it, or another process kept the memory open for writing while it was made. */
refit_status rft_segment_create(rft_segment *segment, uint64_t bytes, refit_error *error);

/* The same for an owner that fills it while others have it attached already
 * (rft_segment_attach_growing): its memory is taken page by page, by the owner's writes, of which
 * there are to be so many bytes. With a view, for the owner's user. */
refit_status rft_segment_create_growing(rft_segment *segment, uint64_t bytes, uint64_t written,
                                        refit_error *error);

/* Private memory of this process, for where no worker shares it. It is taken page by page, but
 * refused at once where the machine or the cgroup has not so much: REFIT_ERR_HOST_MEMORY. */
refit_status rft_segment_create_private(rft_segment *segment, uint64_t bytes, refit_error *error);
/* The same where no more than so many of its bytes are written. */
refit_status rft_segment_create_partial(rft_segment *segment, uint64_t bytes, uint64_t written,
                                        refit_error *error);

/* Takes all of private memory at once, so that what is asked for next finds it gone. */
void rft_segment_fill(const rft_segment *segment);

/* Private memory for a worst case, of which little is used as a rule: its memory is taken page by
 * page, and the system is not asked whether there is so much of it: the caller does, as it goes on
 * (memory/ration.h). */
refit_status rft_segment_create_sparse(rft_segment *segment, uint64_t bytes, refit_error *error);

/* Maps another process's twice: `memory`, read-only, and `view`, in which a page that is written
 * becomes this process's own. REFIT_ERR_PROTOCOL: not the name of a segment, or shorter than
 * `bytes`; REFIT_ERR_NOT_FOUND: it is gone, or its owner is in another PID namespace;
 * REFIT_ERR_SECURITY: another user's, not sealed, or not filled; REFIT_ERR_SYSTEM. */
refit_status rft_segment_attach(rft_segment *segment, const char *name, uint64_t bytes,
                                refit_error *error);

/* The same while its owner may still be filling it: only what the owner is known to have written
 * may be read, until rft_segment_is_filled. Keeps the descriptor. */
refit_status rft_segment_attach_growing(rft_segment *segment, const char *name, uint64_t bytes,
                                        refit_error *error);
/* Whether no page is missing any more, of one that was attached so: to read such a page would take
 * memory of the reader, and can fail. */
bool rft_segment_is_filled(const rft_segment *segment);

/* The view has the owner's bytes again, whatever was written there. Nothing reads it. */
void rft_segment_reset_view(rft_segment *segment);

/* As rft_segment_attach, without a view, and keeps the descriptor, for locks. */
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
refit_status rft_segment_retain(rft_segment *segment, size_t room, void **out, refit_error *error);
/* Gives one back. NULL is allowed. Any thread. */
void rft_segment_release(void *out);

/* Unmaps; the owner retires it too. Mappings of other processes stay valid. Harmless on a closed
 * one. */
void rft_segment_close(rft_segment *segment);

/* ---- The seqlock: a number before the bytes of a version, by which a reader knows that they were
 * not written while it read.
 *
 * The publisher raises `generation` before it changes the first byte of the slot (odd: being
 * written) and again when all is written, before it sends SEAL (even). A worker notes the number
 * when it stages, and reads the number again when its user accepts: if it moved, the worker had
 * been evicted meanwhile and what the user read may be torn, so nothing is accepted. */

/* A version in a shared store lies after its seqlock: the RFT_SEQLOCK_BYTES before OFFER's
 * segment_offset. That of a version in a GPU's memory has a segment of its own, the share
 * lock. */
#define RFT_SEQLOCK_BYTES 64u

typedef struct rft_seqlock {
    atomic_uint_fast64_t generation;
} rft_seqlock;

/* Odd from now on, if it was not. */
void rft_seqlock_begin(rft_seqlock *lock);
/* Even again. */
void rft_seqlock_end(rft_seqlock *lock);

/* Notes the number. False while the bytes are being written, or gone. */
bool rft_seqlock_note(const rft_seqlock *lock, uint64_t *generation);
/* Whether the bytes that were read since are those of then. */
bool rft_seqlock_holds(const rft_seqlock *lock, uint64_t generation);
bool rft_seqlock_is_retired(const rft_seqlock *lock);

/* ---- The share lock: which workers still map a piece of the publisher's GPU memory, however they
 * end.
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
 * other. */

typedef struct rft_share_lock {
    rft_segment segment; /* a holder's descriptor has its locks */
} rft_share_lock;

/* Of the owner. */

/* REFIT_ERR_SYSTEM: no shared memory. */
refit_status rft_share_lock_open(rft_share_lock *share_lock, refit_error *error);
/* No worker can take hold from now on. */
void rft_share_lock_retire(rft_share_lock *share_lock);
/* Whether a holder has the lock; where the kernel does not say, it is taken to be so. */
bool rft_share_lock_is_mapped(const rft_share_lock *share_lock);
bool rft_share_lock_is_read(const rft_share_lock *share_lock);

/* Of a holder. */

/* Takes hold, as "mapped". REFIT_ERR_NOT_FOUND: there is none of that name any more, or it was
 * retired; REFIT_ERR_PROTOCOL: not the name of a segment; REFIT_ERR_SECURITY: another user's, or
 * not sealed; REFIT_ERR_SYSTEM. */
refit_status rft_share_lock_hold(rft_share_lock *share_lock, const char *name, refit_error *error);
/* REFIT_ERR_SYSTEM. Look at the seqlock afterwards. */
refit_status rft_share_lock_read(rft_share_lock *share_lock, refit_error *error);
void rft_share_lock_unread(rft_share_lock *share_lock);

/* Of both. */

/* Harmless on one that is not open ({0} is not). */
void rft_share_lock_close(rft_share_lock *share_lock);
rft_seqlock *rft_share_lock_seqlock(const rft_share_lock *share_lock);

#endif
