/*
 * Blocks of device memory, each with a share lock.
 *
 * A slot is cleared in this order: its seqlock is made odd, so that a reader that begins from now
 * on sees it; then the share lock says whether a reader had begun before. If so, the bytes stay as
 * they are for that reader, which has been evicted, and the slot gets another block: a version read
 * in place never changes, but it can no longer be accepted. In the same way a block is first marked
 * as gone, then looked at, then freed.
 */
#include "store/gpu_store.h"

#include <string.h>

#include "base/alloc.h"
#include "base/clock.h"
#include "base/log.h"

refit_status rft_gpu_store_open(refit_device *device, rft_gpu_store **out, refit_error *error)
{
    rft_gpu_store *store = rft_calloc(1, sizeof *store);
    RFT_REFUSE_IF(store == NULL, error, REFIT_ERR_HOST_MEMORY, "no memory to share a GPU's");
    store->device = device;
    memcpy(store->uuid, rft_device_get_caps(device).uuid, sizeof store->uuid);
    store->writing = RFT_NO_SLOT;
    (void)rft_device_sweep(device); /* of a store before, perhaps */
    rft_device_retain(device);
    *out = store;
    return REFIT_OK;
}

/* ---- Blocks */

static bool give_back(refit_device *device, void *memory)
{
    refit_error why;
    if (refit_memory_free(device, memory, &why) == REFIT_OK) return true;
    rft_log(REFIT_LOG_ERROR, "the GPU does not take its memory back: %s", why.text);
    return false;
}

static refit_status block_fill(rft_gpu_store *store, rft_gpu_block *block, uint64_t bytes,
                               refit_error *error)
{
    refit_status status;
    void *memory = NULL;
    RFT_TRY(refit_memory_alloc(store->device, bytes, &memory, error));
    RFT_TRY_GOTO(rft_device_share_export(store->device, memory, bytes, &block->share, error),
                 undo_memory);
    RFT_TRY_GOTO(rft_share_lock_open(&block->share_lock, error), undo_memory);
    block->memory = memory;
    block->bytes = bytes;
    return REFIT_OK;

undo_memory:
    give_back(store->device, memory);
    return status;
}

static refit_status block_open(rft_gpu_store *store, uint64_t bytes, rft_gpu_block **out,
                               refit_error *error)
{
    rft_gpu_block *block = rft_calloc(1, sizeof *block);
    RFT_REFUSE_IF(block == NULL, error, REFIT_ERR_HOST_MEMORY, "no memory to share a GPU's");
    refit_status status = block_fill(store, block, bytes, error);
    if (status == REFIT_OK) {
        *out = block;
    } else {
        rft_free(block);
    }
    return status;
}

/* False: a worker has it mapped, or the device would not take its memory back, and the block stays.
 */
static bool block_close(refit_device *device, rft_gpu_block *block)
{
    if (rft_pending_count(&block->pending) > 0 || rft_share_lock_is_mapped(&block->share_lock))
        return false;
    if (!give_back(device, block->memory)) return false;
    rft_share_lock_close(&block->share_lock);
    rft_free(block);
    return true;
}

static void retire(rft_gpu_store *store, rft_gpu_slot *slot)
{
    rft_gpu_block *block = slot->block;
    *slot = (rft_gpu_slot){0};
    if (block == NULL) return;
    rft_share_lock_retire(&block->share_lock);
    block->next = store->retired;
    store->retired = block;
}

bool rft_gpu_store_sweep(rft_gpu_store *store)
{
    for (rft_gpu_block **at = &store->retired; *at != NULL;) {
        rft_gpu_block *block = *at, *next = block->next;
        if (block_close(store->device, block)) {
            *at = next;
        } else {
            at = &block->next;
        }
    }
    return store->retired == NULL;
}

void rft_gpu_store_empty(rft_gpu_store *store)
{
    for (uint32_t i = 0; i < RFT_SLOTS_MOST; i++) {
        retire(store, &store->slots[i]);
    }
    (void)rft_gpu_store_sweep(store);
}

static bool close_left(rft_deferred_free *left, refit_device *device)
{
    return block_close(device, (rft_gpu_block *)left);
}

uint32_t rft_gpu_store_close(rft_gpu_store *store, int64_t deadline)
{
    uint32_t left = 0;
    if (store == NULL) return 0;
    rft_gpu_store_empty(store);
    rft_looks looks = rft_looks_until(deadline);
    while (!rft_gpu_store_sweep(store) && rft_poll_again(&looks)) {
    }
    for (rft_gpu_block *block = store->retired, *next; block != NULL; block = next) {
        next = block->next;
        block->left.give_back = close_left;
        rft_device_defer_free(store->device, &block->left);
        left++;
    }
    rft_device_release(store->device);
    rft_free(store);
    return left;
}

/* ---- Slots */

/* The seqlock is odd from here on. */
static bool is_usable(rft_gpu_block *block, uint64_t bytes)
{
    rft_seqlock_begin(rft_share_lock_seqlock(&block->share_lock));
    return block->bytes == bytes && rft_pending_count(&block->pending) == 0 &&
           !rft_share_lock_is_read(&block->share_lock);
}

refit_status rft_gpu_store_clear(rft_gpu_store *store, uint32_t slot, uint64_t bytes,
                                 refit_error *error)
{
    rft_gpu_slot *place = &store->slots[slot];
    (void)rft_gpu_store_sweep(store);
    place->version = 0;
    if (place->block != NULL && is_usable(place->block, bytes)) return REFIT_OK;
    retire(store, place);
    (void)rft_gpu_store_sweep(store);
    RFT_TRY(block_open(store, bytes, &place->block, error));
    rft_seqlock_begin(rft_share_lock_seqlock(&place->block->share_lock));
    return REFIT_OK;
}

void rft_gpu_store_begin(rft_gpu_store *store, uint32_t slot, uint64_t version)
{
    store->slots[slot].version = version;
    store->writing = slot;
}

void rft_gpu_store_seal(rft_gpu_store *store)
{
    rft_gpu_block *block = rft_gpu_store_writing(store);
    if (block != NULL) rft_seqlock_end(rft_share_lock_seqlock(&block->share_lock));
}

void rft_gpu_store_commit(rft_gpu_store *store)
{
    store->writing = RFT_NO_SLOT;
}

void rft_gpu_store_rollback(rft_gpu_store *store)
{
    store->slots[store->writing].version = 0;
    store->writing = RFT_NO_SLOT;
}

rft_gpu_block *rft_gpu_store_writing(const rft_gpu_store *store)
{
    if (store == NULL || store->writing == RFT_NO_SLOT) return NULL;
    return store->slots[store->writing].block;
}

const rft_gpu_block *rft_gpu_store_find(const rft_gpu_store *store, uint64_t version)
{
    for (uint32_t i = 0; store != NULL && version != 0 && i < RFT_SLOTS_MOST; i++) {
        const rft_gpu_slot *slot = &store->slots[i];
        if (slot->version == version) return slot->block;
    }
    return NULL;
}

uint64_t rft_gpu_store_bytes(const rft_gpu_store *store)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < RFT_SLOTS_MOST; i++) {
        if (store->slots[i].block != NULL) bytes += store->slots[i].block->bytes;
    }
    for (const rft_gpu_block *block = store->retired; block != NULL; block = block->next) {
        bytes += block->bytes;
    }
    return bytes;
}
