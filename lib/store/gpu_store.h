/*
 * gpu_store: the publisher's versions in the memory of its GPU, where workers on the same GPU read
 * them.
 *
 * Its slots are those of the store beside it: version and number of a slot are the same, and a
 * version may lie in both, in one, or (a slot without a block) in the other only. Each block is one
 * allocation, exported once and kept from version to version, with a share lock that tells which
 * workers map it: it is written only while no worker reads it, and freed only when none maps it,
 * however long that takes.
 *
 * Slots change on the caller's thread while nothing is offered; the service thread reads them under
 * the publisher's lock.
 */
#ifndef RFT_GPU_STORE_H
#define RFT_GPU_STORE_H

#include "base/thread.h"
#include "store/segment.h"
#include "store/store.h"

typedef struct rft_gpu_block {
    rft_deferred_free left; /* first, so that it is the block's address; once its store is closed */
    unsigned char *memory;  /* of the device */
    uint64_t bytes;
    rft_share share;
    rft_share_lock share_lock;
    rft_pending pending; /* copies under way */
    struct rft_gpu_block *next;
} rft_gpu_block;

typedef struct rft_gpu_slot {
    rft_gpu_block *block; /* NULL: none */
    uint64_t version;     /* that is written there, or lies there; 0: none */
} rft_gpu_slot;

typedef struct rft_gpu_store {
    refit_device *device; /* retained */
    unsigned char uuid[RFT_UUID_BYTES];
    rft_gpu_slot slots[RFT_SLOTS_MOST];
    uint32_t writing;       /* slot that a version is being written to, or RFT_NO_SLOT */
    rft_gpu_block *retired; /* blocks that may still be mapped, or copied to */
} rft_gpu_store;

/* The device shares memory. */
refit_status rft_gpu_store_open(refit_device *device, rft_gpu_store **out, refit_error *error);
/* Waits until no worker maps any block, until `deadline`; the others are left to the device, since
 * a worker would read what was freed. Returns how many those are. NULL is allowed. */
uint32_t rft_gpu_store_close(rft_gpu_store *store, int64_t deadline);

/* Makes the slot safe to write, with `bytes` of memory: as it is, or fresh. From now on no reader's
 * update of what lay there can be accepted. REFIT_ERR_DEVICE_MEMORY, REFIT_ERR_SYSTEM (no shared
 * memory for a share lock), REFIT_ERR_HOST_MEMORY, and what export answers: the slot has no block
 * then.
 */
refit_status rft_gpu_store_clear(rft_gpu_store *store, uint32_t slot, uint64_t bytes,
                                 refit_error *error);
/* Takes the slots' blocks away. */
void rft_gpu_store_empty(rft_gpu_store *store);
/* Frees the blocks taken away that no worker maps any more. False: there are others. */
bool rft_gpu_store_sweep(rft_gpu_store *store);

/* A version begins in a cleared slot; it is written whole; it is kept; it is not. */
void rft_gpu_store_begin(rft_gpu_store *store, uint32_t slot, uint64_t version);
void rft_gpu_store_seal(rft_gpu_store *store);
void rft_gpu_store_commit(rft_gpu_store *store);
void rft_gpu_store_rollback(rft_gpu_store *store);

/* The block that is being written; NULL: none. The store may be NULL. */
rft_gpu_block *rft_gpu_store_writing(const rft_gpu_store *store);
/* Where the version lies, or is being written; NULL: nowhere. The store may be NULL. */
const rft_gpu_block *rft_gpu_store_find(const rft_gpu_store *store, uint64_t version);
/* What all blocks take, those taken away among them. */
uint64_t rft_gpu_store_bytes(const rft_gpu_store *store);

#endif
