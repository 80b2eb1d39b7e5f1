/*
 * gpu_store: the publisher's versions in the memory of its GPU, where workers on the same GPU read
 * them: in the trainer's own tensors, which are lent, or in memory of the store's.
 *
 * Its slots have the numbers of the host store's. A version may lie in both stores, or in one of
 * them. Each slot's block has a share lock, which tells which workers map or read its version, and
 * memory for the tensors that are not lent. That is allocated when it is first needed, in chunks;
 * each chunk is exported once and kept from version to version. It is written only while no worker
 * reads it, and freed only when none maps it.
 *
 * Of a tensor that is lent, the allocation that it lies in is shared. Each allocation is exported
 * once, and again if the driver's id of it has changed. The trainer may change its tensors as soon
 * as the version has ended: from then on nothing that was read of it can be accepted, and no worker
 * can still get it.
 *
 * Slots change on the caller's thread while nothing is offered, places before the version is
 * sealed; the service thread reads them under the publisher's lock.
 */
#ifndef RFT_GPU_STORE_H
#define RFT_GPU_STORE_H

#include "base/thread.h"
#include "store/segment.h"
#include "store/store.h"
#include "wire/message.h"

/* One allocation of a block. */
typedef struct rft_gpu_chunk {
    unsigned char *memory; /* of the device */
    uint64_t bytes;
    uint64_t used; /* by the version that is written, or lies there */
    bool needed;   /* by the last one that was sealed */
    rft_share share;
} rft_gpu_chunk;

typedef struct rft_gpu_block {
    rft_deferred_free left; /* first, so that it is the block's address; once its store is closed */
    rft_gpu_chunk *chunks;  /* owned */
    uint32_t chunk_count;
    rft_share_lock share_lock;
    rft_pending pending; /* copies under way */
    struct rft_gpu_block *next;
} rft_gpu_block;

typedef enum rft_gpu_place_kind {
    RFT_GPU_NOWHERE, /* not written, or without bytes */
    RFT_GPU_CHUNK,   /* a chunk of the slot's block */
    RFT_GPU_LENT,    /* an area of the trainer's */
} rft_gpu_place_kind;

/* Where a tensor begins. */
typedef struct rft_gpu_place {
    rft_gpu_place_kind kind;
    uint32_t number; /* of the chunk or area */
    uint64_t offset;
} rft_gpu_place;

typedef struct rft_gpu_slot {
    rft_gpu_block *block;  /* NULL: none */
    uint64_t version;      /* that is written there, or lies there; 0: none */
    bool lends;            /* some of its tensors are the trainer's, or it is streamed */
    bool streamed;         /* its bytes were there for a while only */
    rft_gpu_place *places; /* owned; per original tensor of the version */
    uint32_t place_count;
} rft_gpu_slot;

/* An allocation that tensors were lent of. */
typedef struct rft_lent_area {
    rft_memory_range range;
    rft_share share; /* of all of it */
    bool used;       /* by the version that was sealed last */
    uint32_t moved;  /* its number once those that are not used are dropped */
} rft_lent_area;

typedef struct rft_gpu_store {
    refit_device *device; /* retained */
    void *probe;          /* memory that workers map as proof that they can */
    rft_share probe_share;
    rft_gpu_slot slots[RFT_SLOTS_MOST];
    uint32_t writing;       /* slot that a version is being written to, or RFT_NO_SLOT */
    rft_gpu_block *retired; /* blocks that may still be mapped, or copied to */

    rft_lent_area *areas; /* owned */
    uint32_t area_count;
    uint32_t area_room;
    uint32_t area_last; /* where the last one was found */
} rft_gpu_store;

/* The device shares memory. REFIT_ERR_DEVICE_MEMORY, and what export answers. */
refit_status rft_gpu_store_open(refit_device *device, rft_gpu_store **out, refit_error *error);
/* Waits until no worker maps any block, or what is lent, until `deadline`; blocks that are mapped
 * then are left to the device, since a worker would read what was freed. Returns how many those
 * are. NULL is allowed. */
uint32_t rft_gpu_store_close(rft_gpu_store *store, int64_t deadline);

/* Makes the slot safe to write: its block as it is, or a fresh one without memory. From now on no
 * reader's update of what lay there can be accepted. REFIT_ERR_SYSTEM (no shared memory for a share
 * lock), REFIT_ERR_HOST_MEMORY: the slot has no block then. */
refit_status rft_gpu_store_clear(rft_gpu_store *store, uint32_t slot, refit_error *error);
/* Takes the slots' blocks away. */
void rft_gpu_store_empty(rft_gpu_store *store);
/* Frees the blocks taken away that no worker maps any more. False: there are others. */
bool rft_gpu_store_sweep(rft_gpu_store *store);

/* A version begins in a cleared slot, its tensors nowhere; REFIT_ERR_HOST_MEMORY. It is written
 * whole; it is kept; it is not. */
refit_status rft_gpu_store_begin(rft_gpu_store *store, uint32_t slot, uint64_t version,
                                 const rft_manifest *manifest, refit_error *error);
void rft_gpu_store_seal(rft_gpu_store *store);
void rft_gpu_store_commit(rft_gpu_store *store);
void rft_gpu_store_rollback(rft_gpu_store *store);

/* Lends an original tensor of the version being written: it begins at `memory`, which lies in
 * `range`, and stays as it is until the version is over. REFIT_ERR_UNSUPPORTED: memory that cannot
 * be shown to other processes, or an address that is no multiple of RFT_PLACE_ALIGNMENT;
 * REFIT_ERR_HOST_MEMORY, and what export answers. */
refit_status rft_gpu_store_lend(rft_gpu_store *store, uint32_t original, const void *memory,
                                const rft_memory_range *range, refit_error *error);
/* Takes that back, after a write that failed. */
void rft_gpu_store_unlend(rft_gpu_store *store, uint32_t original);
/* A place in the block for so many bytes of an original tensor. False: no chunk has the room. */
bool rft_gpu_store_reserve(rft_gpu_store *store, uint32_t original, uint64_t bytes);
/* One more chunk for the version being written. REFIT_ERR_DEVICE_MEMORY, REFIT_ERR_HOST_MEMORY, and
 * what export answers. */
refit_status rft_gpu_store_grow(rft_gpu_store *store, uint64_t bytes, refit_error *error);
/* Where an original tensor of the version being written is to be copied; NULL: it is lent. */
unsigned char *rft_gpu_store_target(const rft_gpu_store *store, uint32_t original);
/* Where one that is written lies; NULL: nowhere. */
const unsigned char *rft_gpu_store_source(const rft_gpu_store *store, uint32_t original);
/* Whether a version that lends is there. */
bool rft_gpu_store_lends(const rft_gpu_store *store);
/* The committed version is over: what it lent may change. */
void rft_gpu_store_end_lending(rft_gpu_store *store);

/* The version being written leaves piece by piece, and no worker that comes now can have it. */
void rft_gpu_store_stream(rft_gpu_store *store);
bool rft_gpu_store_is_lent(const rft_gpu_store *store, uint32_t original);
bool rft_gpu_store_is_streamed(const rft_gpu_store *store, uint64_t version);
/* Where an original tensor that is written lies, RFT_PLACE_BYTES as LEND says it. */
void rft_gpu_store_describe_place(const rft_gpu_store *store, uint32_t original,
                                  unsigned char place[RFT_PLACE_BYTES]);
/* Appends the shares of the version being written, as rft_gpu_store_describe. */
refit_status rft_gpu_store_describe_areas(const rft_gpu_store *store, rft_bytes *out,
                                          refit_error *error);

/* The block that is being written; NULL: none. The store may be NULL. */
rft_gpu_block *rft_gpu_store_writing(const rft_gpu_store *store);
/* The block of the version, or of the one being written; NULL: none. The store may be NULL. */
const rft_gpu_block *rft_gpu_store_find(const rft_gpu_store *store, uint64_t version);
/* Appends where the sealed version lies, as LEND says it: RFT_SHARE_BYTES for each chunk and area,
 * then RFT_PLACE_BYTES for each original tensor. `*shares` is the number of the former.
 * REFIT_ERR_HOST_MEMORY. */
refit_status rft_gpu_store_describe(const rft_gpu_store *store, uint64_t version, rft_bytes *out,
                                    uint32_t *shares, refit_error *error);
/* What the block that is being written takes; what all blocks take, those taken away among them. */
uint64_t rft_gpu_store_block_bytes(const rft_gpu_store *store);
uint64_t rft_gpu_store_bytes(const rft_gpu_store *store);

#endif
