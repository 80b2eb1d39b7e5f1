/*
 * gpu_memory: the publisher's memory of the GPU that both ends are on, as it is mapped here.
 *
 * LEND names the allocations in which a version lies, and where in them each tensor begins. An
 * allocation is mapped once and kept from version to version, until the publisher retires the share
 * lock under which it was named last, or a LEND under that lock does not name it. The order is that
 * of store/segment.h: the lock is taken before memory is mapped and given back after it is
 * unmapped, so that the publisher never frees memory of its own that is mapped here; and a reader
 * marks itself first and then looks at the seqlock. What a publisher says is believed only as far
 * as the device confirms it.
 *
 * Belongs to the subscriber's service thread; the user reads the places of a version that is lent
 * to it, and the device reads there until the version is released.
 */
#ifndef RFT_GPU_MEMORY_H
#define RFT_GPU_MEMORY_H

#include "device/device.h"
#include "store/segment.h"
#include "wire/manifest.h"

/* A share lock of the publisher, held once for all versions under it. */
typedef struct rft_gpu_lock {
    rft_share_lock share_lock;
    bool open;
    uint32_t versions; /* under it */
    uint32_t readers;  /* of these, with the user */
} rft_gpu_lock;

/* An allocation of the publisher, mapped. */
typedef struct rft_gpu_area {
    struct rft_gpu_area *next;
    rft_share share;
    unsigned char *memory;
    uint32_t versions; /* that lie in it */
    bool named;        /* by the last LEND */
    rft_gpu_lock *lock;
} rft_gpu_area;

#define RFT_GPU_LOCKS_MOST 2u

/* {0} is empty. */
typedef struct rft_gpu_memory {
    refit_device *device; /* borrowed; NULL: there is no GPU to share */
    rft_gpu_lock locks[RFT_GPU_LOCKS_MOST];
    rft_gpu_area *areas;
} rft_gpu_memory;

/* Where a version's bytes are. */
typedef struct rft_gpu_version {
    uint32_t users;
    rft_gpu_lock *lock;
    rft_gpu_area **areas; /* owned, as the next one */
    uint32_t area_count;
    const unsigned char **tensors; /* per tensor: its first byte */
    uint64_t *digests;             /* owned; per tensor: of SEAL */
    bool reading;                  /* the user has it: the lock is marked */
} rft_gpu_version;

/* Maps what LEND names; the caller is the first user of `*out`. REFIT_ERR_NOT_FOUND: the publisher
 * has given it up, another offer follows. REFIT_ERR_PROTOCOL: it cannot hold the version.
 * REFIT_ERR_BUSY: the GPU still reads a version that was dropped, try again. REFIT_ERR_HOST_MEMORY.
 * Else it could not be mapped, and the status says why. */
refit_status rft_gpu_memory_map(rft_gpu_memory *memory, const rft_manifest *manifest,
                                const char *lock, rft_view areas, rft_view places,
                                rft_gpu_version **out, refit_error *error);

/* The same for PIECES: `tensors` of `*out` has the first byte of each piece of `list`. */
refit_status rft_gpu_memory_map_pieces(rft_gpu_memory *memory, const char *lock, rft_view areas,
                                       rft_view list, rft_gpu_version **out, refit_error *error);

/* Notes the digests of SEAL, 8 bytes for each original tensor. */
void rft_gpu_version_seal(rft_gpu_version *version, const rft_manifest *manifest, rft_view digests);

rft_gpu_version *rft_gpu_version_acquire(rft_gpu_version *version);
/* What the version lies in stays mapped. NULL is allowed. */
void rft_gpu_version_release(rft_gpu_version *version);

/* Marks that the user reads it. REFIT_ERR_STALE: the publisher has evicted this worker, and the
 * bytes are no longer those of `generation`; REFIT_ERR_SYSTEM. */
refit_status rft_gpu_version_read(rft_gpu_version *version, uint64_t generation,
                                  refit_error *error);
void rft_gpu_version_unread(rft_gpu_version *version);
const rft_seqlock *rft_gpu_version_seqlock(const rft_gpu_version *version);

/* Unmaps what no version lies in; `retired`: only what the publisher has given up. */
void rft_gpu_memory_trim(rft_gpu_memory *memory, bool retired);

/* Whether the memory that the share names can be mapped: the proof that WELCOME asks for. */
refit_status rft_gpu_memory_probe(rft_gpu_memory *memory, const rft_share *share,
                                  refit_error *error);

#endif
