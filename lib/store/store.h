/*
 * store: the publisher's host copy of the last committed version, and the one being written.
 *
 * Each slot is one image in memory of its own, after its seqlock. With two slots a version is
 * written into the one that does not hold the committed version; with one it is written over it,
 * and an undo log gives the old bytes back. Every block is held against the committed version while
 * it is written, so that frames can leave out what did not change.
 *
 * A store may have a shard of the tensors alone (wire/shard.h). Then a tensor is written with the
 * shard's bytes of it, images have these alone, and the digests are those of all ranks together:
 * rft_store_seal leaves them open, and rft_store_conclude takes them.
 *
 * A slot has memory only for a version that some worker reads on the host. One that all workers
 * read in a GPU's memory has names and digests here, but no bytes.
 *
 * The readers of a slot are not known here: the caller of begin or rollback makes sure that there
 * are none, or calls renew first. One thread writes. Other threads read only `ready` and
 * `ready_count` meanwhile, under the publisher's lock.
 */
#ifndef RFT_STORE_H
#define RFT_STORE_H

#include "memory/ration.h"
#include "store/buffer.h"
#include "store/segment.h"
#include "wire/shard.h"

#define RFT_SLOTS_MOST 2u
#define RFT_NO_SLOT    UINT32_MAX

/* What is known of one version, apart from its bytes. */
typedef struct rft_version_digests {
    uint64_t version; /* 0: none */
    rft_digest128 digest;
    uint64_t *tensor_sums; /* per original tensor: sum of its blocks while it is written, then its
                              digest */
    uint64_t *block_sums;  /* per block: its part of that sum, where has_block_sum */
    unsigned char *has_block_sum; /* per block: 1 or 0; a device gives a tensor's sum alone */
} rft_version_digests;

typedef struct rft_slot {
    rft_buffer *buffer; /* NULL: no memory yet (rft_store_renew), or a store without bytes */
    uint64_t version;   /* of the bytes that lie there; 0: none */
    bool tainted;       /* a worker out of reach may still read it: renew, do not rewrite */
    bool hosted;        /* the version has bytes here; guarded by the publisher's lock */
} rft_slot;

/* The old bytes of what a version overwrites, for a store with one slot. Its memory is reserved at
 * once and taken page by page as blocks are saved, and given back when the version is decided:
 * between versions one copy of the weights is all there is. */
typedef struct rft_undo {
    const rft_manifest *manifest; /* borrowed */
    rft_segment saved;            /* an image: each block at its own offset */
    unsigned char *has;           /* per block: 1 if it is saved; NULL: not open */
} rft_undo;

typedef struct rft_store {
    rft_manifest *manifest;     /* owned */
    rft_want *shard;            /* acquired; NULL: all of the tensors */
    rft_manifest *shard_layout; /* owned; NULL: all of the tensors */
    const rft_manifest *layout; /* how images lie in memory: one of the two manifests */
    rft_bytes words;            /* of the newest version: of a shard, parts of words */
    bool words_missing;         /* there was no memory for some of them */
    rft_retire_list *retired;   /* borrowed */
    bool shared; /* fresh slots are in shared memory, and workers may be offered to map them */
    uint32_t slot_count;
    rft_slot slots[RFT_SLOTS_MOST];
    rft_undo undo;     /* open with one slot */
    rft_ration ration; /* of what it saves */

    uint32_t committed_slot; /* or RFT_NO_SLOT */
    uint32_t writing_slot;   /* or RFT_NO_SLOT */
    rft_version_digests committed;
    rft_version_digests next; /* being written, or a spare */
    uint64_t base;            /* version that `same` refers to; 0: it says nothing */
    rft_digest128 base_digest;
    unsigned char *same;    /* per block of the newest version: 1 if it is as in the base */
    unsigned char *written; /* per tensor */
    uint32_t *originals;    /* per tensor: its place among the originals */
    uint32_t *frames_left;  /* per frame: blocks not yet written */
    uint32_t *ready;        /* frames that are complete, in the order they became so */
    uint32_t ready_count;
    bool sealed;          /* the newest version is */
    uint32_t missing;     /* tensors not yet written */
    uint32_t same_blocks; /* of the newest version */
    uint32_t *frame_of;   /* per block */
} rft_store;

/* Takes the manifest, on failure too. Slots get their memory from renew. `shared`: shared memory.
 */
refit_status rft_store_open(rft_manifest *manifest, uint32_t slots, bool shared,
                            rft_retire_list *retired, rft_store **out, refit_error *error);
/* The same of a shard, which is acquired; in memory of this process. */
refit_status rft_store_open_shard(rft_manifest *manifest, rft_want *shard, uint32_t slots,
                                  rft_retire_list *retired, rft_store **out, refit_error *error);
/* Its slots are retired. NULL is allowed. */
void rft_store_close(rft_store *store);

/* The slot that the next version goes to. */
uint32_t rft_store_target(const rft_store *store);
/* Gives a slot's memory back: a version in it has no bytes on this host. */
void rft_store_empty(rft_store *store, uint32_t slot);
/* Puts fresh memory in the place of a slot's, with the committed version's bytes if it had them; a
 * slot without them gives its memory back first. REFIT_ERR_SYSTEM: no shared memory;
 * REFIT_ERR_HOST_MEMORY. The slot with the committed version then stays as it was, the other has no
 * memory until a renew succeeds. */
refit_status rft_store_renew(rft_store *store, uint32_t slot, refit_error *error);

/* A version begins in the target slot. */
void rft_store_begin(rft_store *store, uint64_t version);

typedef void (*rft_ready_fn)(void *user, uint32_t frame);

/* Whether this may be written. REFIT_ERR_INVALID, REFIT_ERR_STATE (written already). */
refit_status rft_store_check(const rft_store *store, uint32_t tensor, const void *bytes,
                             uint64_t count, refit_error *error);

/* Copies and digests one tensor; `ready` is told each frame that became complete, so that the
 * holder of the lock can append it. As rft_store_check. */
refit_status rft_store_write(rft_store *store, uint32_t tensor, const void *bytes, uint64_t count,
                             rft_ready_fn ready, void *user, refit_error *error);
/* Before tensors of `bytes` in all are written: with one slot the bytes below them may be saved,
 * and there has to be memory for that. REFIT_ERR_HOST_MEMORY. */
refit_status rft_store_afford(rft_store *store, uint64_t bytes, refit_error *error);
/* A tensor that a device brings: begin_device_write saves what it overwrites and says where it
 * goes; end_device_write notes that its bytes are there; compare, at once or later, compares it
 * with the base and reports to `ready`. `sum` is the sum of its blocks; NULL: compare takes it from
 * the bytes. Without memory for the bytes begin_device_write gives NULL, and compare needs the sum.
 */
unsigned char *rft_store_begin_device_write(rft_store *store, uint32_t tensor);
void rft_store_end_device_write(rft_store *store, uint32_t tensor);
void rft_store_compare(rft_store *store, uint32_t tensor, const uint64_t *sum, rft_ready_fn ready,
                       void *user);
/* Bytes on this host for a version that had none, some of which is written: after a renew of its
 * slot, begin_device_write says where each written tensor goes. add_bytes, once all of them are
 * there, makes the slot one that workers may be offered; drop_bytes leaves it without. With the
 * publisher's lock held. */
void rft_store_add_bytes(rft_store *store);
void rft_store_drop_bytes(rft_store *store);
/* Appends a frame to `ready`. */
void rft_store_add_ready(rft_store *store, uint32_t frame);

/* REFIT_ERR_STATE names a tensor that was not written. Makes the digests, and the seqlock even. Of
 * a shard it leaves in next.tensor_sums and `words` what the shard adds to them. */
refit_status rft_store_seal(rft_store *store, refit_error *error);
/* The digests of a sealed version that several ranks have, one for each original. */
void rft_store_conclude(rft_store *store, const uint64_t *digests);
/* The sealed version is the committed one. */
void rft_store_commit(rft_store *store);
/* The version being written is gone: undo puts the committed one's bytes back where they were
 * written over, and rollback makes it the served one again. `restored` is false if a copy may still
 * write to the slot. Then, and without memory, a store with one slot serves no version until the
 * next commit. */
void rft_store_undo(rft_store *store);
void rft_store_rollback(rft_store *store, bool restored);

/* The version that workers are served: the one being written, else the committed one. NULL: none.
 */
const rft_version_digests *rft_store_served(const rft_store *store);
const rft_slot *rft_store_served_slot(const rft_store *store);
unsigned char *rft_slot_image(const rft_slot *slot);
/* The bytes that `same` is about, as an image in which at least the blocks that are not the same
 * lie, those of ready frames: the slot of the version before, or the undo log. NULL: they are gone,
 * with two slots since the next version began, with one since this one was committed. */
const unsigned char *rft_store_base_image(const rft_store *store);
/* What is known of the version that those are of. */
const rft_version_digests *rft_store_base_digests(const rft_store *store);

#endif
