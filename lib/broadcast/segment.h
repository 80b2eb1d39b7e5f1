/*
 * segment: POSIX shared memory with an owner. Mode 0600, a random name, its memory reserved at once
 * (a full /dev/shm is an error here, not a SIGBUS later). The owner holds a lock on it for as long
 * as it lives; segments of dead owners are swept when the next owner opens one.
 */
#ifndef RFT_SEGMENT_H
#define RFT_SEGMENT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"
#include "broadcast/mark.h"

#define RFT_SEGMENT_NAME_BYTES 48

/* Mapped memory, for who reads it beyond the segment's close. */
typedef struct rft_kept rft_kept;

typedef struct rft_segment {
    char name[RFT_SEGMENT_NAME_BYTES]; /* "/refit-…"; empty for private memory */
    unsigned char *memory;             /* NULL: not open */
    uint64_t bytes;
    int fd;         /* the owner's, with the lock; -1 for a reader */
    rft_kept *kept; /* NULL: unmapped by close */
} rft_segment;

/* Creates and maps one, read-write. REFIT_ERR_SYSTEM says how much /dev/shm has and what is needed.
 */
refit_status rft_segment_create(rft_segment *segment, uint64_t bytes, refit_error *error);

/* Likewise private memory of this process, for where no worker shares it. */
refit_status rft_segment_create_private(rft_segment *segment, uint64_t bytes, refit_error *error);

/* Likewise for a worst case, of which little is used as a rule: its memory is taken page by page,
 * and the system is not asked whether there is so much of it. */
refit_status rft_segment_create_sparse(rft_segment *segment, uint64_t bytes, refit_error *error);

/* Maps somebody's, read-only. At least `bytes` long, or REFIT_ERR_PROTOCOL. REFIT_ERR_NOT_FOUND,
 * _SYSTEM. The name is checked: it can name nothing but a refit segment. */
refit_status rft_segment_attach(rft_segment *segment, const char *name, uint64_t bytes,
                                refit_error *error);

/* Whether its owner has taken the name away: nobody will map it again. Looks at the file system. */
bool rft_segment_is_retired(const rft_segment *segment);

/* The owner takes the name away and gives up the lock; all mappings stay valid. Harmless for
 * others.
 */
void rft_segment_unlink(rft_segment *segment);

/* From now on close leaves the memory mapped until all of `out` are given back. `*out` is `room`
 * bytes for the caller, aligned for anything. Not while another thread closes it.
 * REFIT_ERR_HOST_MEMORY. */
refit_status rft_segment_keep(rft_segment *segment, size_t room, void **out, refit_error *error);
/* Gives one back. NULL is allowed. Any thread. */
void rft_segment_unkeep(void *out);

/* Unmaps; the owner unlinks too. Mappings that others have stay valid. Harmless on a closed one. */
void rft_segment_close(rft_segment *segment);

/* Unlinks the segments whose owner is dead. Returns how many. */
uint32_t rft_segment_sweep(void);

#endif
