/*
 * destinations: memory of the worker's engine that versions are written into, in place.
 *
 * Each has the name of a tensor, and lies in host memory, or in that of a device. The memory is the
 * caller's until close. A device's memory is compared and changed window by window, in memory of
 * the host: fetch brings a window, put takes it back; both are nothing for host memory, whose
 * windows are the memory itself. A rollback notes the bytes that are overwritten there. Independent
 * of which version is written.
 *
 * Belongs to one thread.
 */
#ifndef RFT_DESTINATIONS_H
#define RFT_DESTINATIONS_H

#include <refit/broadcast.h>

#include "kernels/delta.h"
#include "memory/ration.h"
#include "store/copy_queue.h"
#include "store/segment.h"

/* A device, and the windows through which it is written: while one is put back, which may fail, the
 * next is fetched. */
typedef struct rft_port {
    rft_copy_queue *copy_queue;
    unsigned char *windows; /* owned; two of RFT_WINDOW_BYTES */
    bool pinned;
    bool by_kernel; /* of the caller: what is not converted there is written by the GPU itself */
    uint32_t turn;  /* the window that was fetched last */
    unsigned char *unsure;      /* where the last put went, until it is known to be done; or NULL */
    const unsigned char *bytes; /* its bytes, in a window */
    uint64_t unsure_bytes;
} rft_port;

/* As large as the largest block, and several of the usual ones. */
#define RFT_WINDOW_BYTES (UINT64_C(2) << 20)

typedef struct rft_bound_tensor {
    const char *name; /* owned by the list */
    unsigned char *memory;
    uint64_t bytes;
    refit_dtype dtype; /* 0: any */
    bool cast;         /* other types are converted to it */
    rft_port *port;    /* NULL: host memory */
    uint32_t twin; /* the first of those that are this very memory; itself, if there is no other */
} rft_bound_tensor;

typedef struct rft_destinations {
    rft_bound_tensor *list; /* owned; NULL: not open */
    uint32_t count;
    char *names;     /* owned */
    rft_port *ports; /* owned */
    uint32_t port_count;
    unsigned char *source;    /* owned; a window for the new bytes, where they lie on a device */
    unsigned char *converted; /* owned; a window for converted bytes; NULL: none are */
    uint32_t wait_ms;         /* for a window */
    uint32_t linger_ms;       /* at close */
} rft_destinations;

/* Copies the list. REFIT_ERR_INVALID names the mistake in it; a device's errors about its memory;
 * REFIT_ERR_HOST_MEMORY. On failure nothing is open. */
refit_status rft_destinations_open(rft_destinations *all, const refit_destination *list,
                                   uint32_t count, const refit_config *config, refit_error *error);
/* Harmless on {0}. A device that is not done with a window keeps it, and is never closed. */
void rft_destinations_close(rft_destinations *all);

/* At most RFT_WINDOW_BYTES of one destination, where the CPU may read and change them, until the
 * next fetch. Fails as well if an earlier put has failed. */
refit_status rft_destinations_fetch(const rft_destinations *all, const rft_bound_tensor *one,
                                    uint64_t offset, uint64_t bytes, unsigned char **window,
                                    refit_error *error);
/* Writes back bytes of the window that fetch gave last; once. Done when flush says so. */
refit_status rft_destinations_put(const rft_bound_tensor *one, uint64_t offset,
                                  const unsigned char *window, uint64_t bytes, refit_error *error);
/* Waits for all puts. */
refit_status rft_destinations_flush(const rft_destinations *all, refit_error *error);
/* After a failure: the bytes of the last put may lie there in part, or be undefined. Puts them once
 * more. */
refit_status rft_destinations_repair(const rft_destinations *all, refit_error *error);

/* The sum of the digest of all bytes of each destination that is wanted, as they are now; a device
 * that takes digests is waited for once for RFT_DIGEST_BATCH_MOST of them. */
refit_status rft_destinations_digest(const rft_destinations *all, const unsigned char *wanted,
                                     uint64_t *sums, refit_error *error);

/* ---- Rollback
 *
 * The bytes that an update overwrites, so that they can be put back bit for bit. Before a block is
 * changed, its changing elements are noted: positions and old elements (in the form of
 * kernels/delta.h), or the whole block where that is smaller. Notes are put back newest first, so a
 * destination that was written twice is as it was before the first time. The elements themselves
 * are kept, not their differences: putting back does not depend on the present bytes.
 *
 * Memory for the worst case, the old bytes of everything, is reserved when the first note of an
 * update is to be taken, and used page by page; reset gives it back.
 */

/* Where a block lies. */
typedef struct rft_note_place {
    uint32_t destination; /* its number */
    uint64_t offset;      /* into it */
} rft_note_place;

typedef struct rft_rollback {
    rft_segment memory; /* not open: there are no notes */
    uint64_t used;
    uint64_t last; /* where the newest note begins; UINT64_MAX: there is none */
    rft_ration ration;
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
 * overwritten elements. REFIT_ERR_HOST_MEMORY: the notes are full, or the machine or the cgroup
 * has no memory for it; REFIT_ERR_BUDGET. Nothing is changed then. */
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
