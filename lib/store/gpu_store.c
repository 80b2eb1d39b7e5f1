/*
 * Slots with their blocks, and the list of allocations that are lent.
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
#include "base/checked.h"
#include "base/clock.h"
#include "base/log.h"

#define PROBE_BYTES 512u

/* ---- Blocks */

static bool give_back(refit_device *device, void *memory)
{
    refit_error why;
    if (memory == NULL) return true;
    if (refit_memory_free(device, memory, &why) == REFIT_OK) return true;
    rft_log(REFIT_LOG_ERROR, "the GPU does not take its memory back: %s", why.text);
    return false;
}

/* Memory, and its share. */
static refit_status share_open(refit_device *device, uint64_t bytes, void **out, rft_share *share,
                               refit_error *error)
{
    void *memory = NULL;
    RFT_TRY(refit_memory_alloc(device, bytes, &memory, error));
    refit_status status = rft_device_share_export(device, memory, bytes, share, error);
    if (status == REFIT_OK) {
        *out = memory;
    } else {
        (void)give_back(device, memory);
    }
    return status;
}

static uint64_t block_bytes(const rft_gpu_block *block)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < block->chunk_count; i++)
        bytes += block->chunks[i].bytes;
    return bytes;
}

static refit_status block_open(rft_gpu_block **out, refit_error *error)
{
    rft_gpu_block *block = rft_calloc(1, sizeof *block);
    RFT_REFUSE_IF(block == NULL, error, REFIT_ERR_HOST_MEMORY, "no memory to share a GPU's");
    refit_status status = rft_share_lock_open(&block->share_lock, error);
    if (status == REFIT_OK) {
        *out = block;
    } else {
        rft_free(block);
    }
    return status;
}

static void block_free(rft_gpu_block *block)
{
    rft_share_lock_close(&block->share_lock);
    rft_free(block->chunks);
    rft_free(block);
}

/* False: a worker has it mapped, or the device would not take its memory back, and the block stays.
 */
static bool block_close(refit_device *device, rft_gpu_block *block)
{
    if (rft_pending_count(&block->pending) > 0) return false;
    if (rft_share_lock_is_mapped(&block->share_lock)) return false;
    for (; block->chunk_count > 0; block->chunk_count--) {
        if (!give_back(device, block->chunks[block->chunk_count - 1].memory)) return false;
    }
    block_free(block);
    return true;
}

static void retire(rft_gpu_store *store, rft_gpu_slot *slot)
{
    rft_gpu_block *block = slot->block;
    rft_free(slot->places);
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

/* ---- Opening and closing */

refit_status rft_gpu_store_open(refit_device *device, rft_gpu_store **out, refit_error *error)
{
    rft_gpu_store *store = rft_calloc(1, sizeof *store);
    RFT_REFUSE_IF(store == NULL, error, REFIT_ERR_HOST_MEMORY, "no memory to share a GPU's");
    (void)rft_device_sweep(device); /* of a store before, perhaps */
    refit_status status =
        share_open(device, PROBE_BYTES, &store->probe, &store->probe_share, error);
    if (status != REFIT_OK) {
        rft_free(store);
        return status;
    }
    store->device = device;
    store->writing = RFT_NO_SLOT;
    rft_device_retain(device);
    *out = store;
    return REFIT_OK;
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
        if (block->chunk_count == 0 && rft_pending_count(&block->pending) == 0) {
            rft_log(REFIT_LOG_WARNING,
                    "a worker still maps memory that the trainer has lent: the driver may keep it "
                    "until the worker has unmapped it");
            block_free(block);
            continue;
        }
        block->left.give_back = close_left;
        rft_device_defer_free(store->device, &block->left);
        left++;
    }
    (void)give_back(store->device, store->probe);
    rft_device_release(store->device);
    rft_free(store->areas);
    rft_free(store);
    return left;
}

/* ---- Slots */

/* What a version before needed, and the last one that was sealed did not, is not kept. */
static bool has_unused(const rft_gpu_block *block)
{
    for (uint32_t i = 0; i < block->chunk_count; i++) {
        if (!block->chunks[i].needed) return true;
    }
    return false;
}

/* The seqlock is odd from here on. */
static bool is_usable(rft_gpu_block *block)
{
    rft_seqlock_begin(rft_share_lock_seqlock(&block->share_lock));
    return rft_pending_count(&block->pending) == 0 && !rft_share_lock_is_read(&block->share_lock) &&
           !has_unused(block);
}

/* The block of another slot whose version is over, as one that was streamed is. */
static void take_idle_block(rft_gpu_store *store, uint32_t slot)
{
    for (uint32_t i = 0; i < RFT_SLOTS_MOST; i++) {
        rft_gpu_slot *other = &store->slots[i];
        bool idle = i != slot && other->block != NULL && other->version == 0;
        if (!idle || !is_usable(other->block)) continue;
        store->slots[slot].block = other->block;
        other->block = NULL;
        return;
    }
}

refit_status rft_gpu_store_clear(rft_gpu_store *store, uint32_t slot, refit_error *error)
{
    rft_gpu_slot *place = &store->slots[slot];
    (void)rft_gpu_store_sweep(store);
    place->version = 0;
    if (place->block == NULL) take_idle_block(store, slot);
    if (place->block == NULL || !is_usable(place->block)) {
        retire(store, place);
        (void)rft_gpu_store_sweep(store);
        RFT_TRY(block_open(&place->block, error));
        rft_seqlock_begin(rft_share_lock_seqlock(&place->block->share_lock));
    }
    for (uint32_t i = 0; i < place->block->chunk_count; i++)
        place->block->chunks[i].used = 0;
    return REFIT_OK;
}

static const rft_gpu_slot *slot_of(const rft_gpu_store *store, uint64_t version)
{
    for (uint32_t i = 0; store != NULL && version != 0 && i < RFT_SLOTS_MOST; i++) {
        if (store->slots[i].version == version) return &store->slots[i];
    }
    return NULL;
}

/* ---- A version */

static refit_status places_reset(rft_gpu_slot *slot, uint32_t count, refit_error *error)
{
    if (slot->place_count != count || slot->places == NULL) {
        rft_gpu_place *places = rft_realloc(slot->places, (size_t)count + 1, sizeof *places);
        RFT_REFUSE_IF(places == NULL, error, REFIT_ERR_HOST_MEMORY,
                      "no memory for the places of %u tensors", count);
        slot->places = places;
        slot->place_count = count;
    }
    memset(slot->places, 0, count * sizeof *slot->places);
    return REFIT_OK;
}

refit_status rft_gpu_store_begin(rft_gpu_store *store, uint32_t slot, uint64_t version,
                                 const rft_manifest *manifest, refit_error *error)
{
    rft_gpu_slot *place = &store->slots[slot];
    if (place->block == NULL) return REFIT_OK; /* the version goes another way */
    RFT_TRY(places_reset(place, manifest->originals, error));
    place->version = version;
    place->lends = false;
    place->streamed = false;
    store->writing = slot;
    return REFIT_OK;
}

bool rft_gpu_store_reserve(rft_gpu_store *store, uint32_t original, uint64_t bytes)
{
    rft_gpu_slot *slot = &store->slots[store->writing];
    rft_gpu_place *place = &slot->places[original];
    if (place->kind == RFT_GPU_CHUNK) return true; /* by a write that failed */
    for (uint32_t i = 0; i < slot->block->chunk_count; i++) {
        rft_gpu_chunk *chunk = &slot->block->chunks[i];
        if (chunk->bytes - chunk->used < bytes) continue;
        *place = (rft_gpu_place){RFT_GPU_CHUNK, i, chunk->used};
        (void)rft_align_u64(chunk->used + bytes, RFT_TENSOR_ALIGNMENT, &chunk->used);
        chunk->used = rft_min_u64(chunk->used, chunk->bytes);
        return true;
    }
    return false;
}

refit_status rft_gpu_store_grow(rft_gpu_store *store, uint64_t bytes, refit_error *error)
{
    rft_gpu_block *block = store->slots[store->writing].block;
    rft_gpu_chunk chunk = {.bytes = bytes, .needed = true};
    void *memory = NULL;
    rft_gpu_chunk *chunks =
        rft_realloc(block->chunks, (size_t)block->chunk_count + 1, sizeof *chunks);
    RFT_REFUSE_IF(chunks == NULL, error, REFIT_ERR_HOST_MEMORY, "no memory to share a GPU's");
    block->chunks = chunks;
    RFT_TRY(share_open(store->device, bytes, &memory, &chunk.share, error));
    chunk.memory = memory;
    block->chunks[block->chunk_count++] = chunk;
    return REFIT_OK;
}

/* Also after calls that failed, and whose tensors came in another way. */
static void note_used(rft_gpu_store *store)
{
    rft_gpu_slot *slot = &store->slots[store->writing];
    slot->lends = slot->streamed;
    for (uint32_t i = 0; i < store->area_count; i++)
        store->areas[i].used = false;
    for (uint32_t i = 0; i < slot->place_count; i++) {
        if (slot->places[i].kind != RFT_GPU_LENT) continue;
        store->areas[slot->places[i].number].used = true;
        slot->lends = true;
    }
    for (uint32_t i = 0; i < slot->block->chunk_count; i++)
        slot->block->chunks[i].needed = slot->block->chunks[i].used > 0;
}

/* A trainer that frees memory must not have it offered to workers. */
static void drop_unused(rft_gpu_store *store)
{
    uint32_t kept = 0;
    const rft_gpu_slot *slot = &store->slots[store->writing];
    for (uint32_t i = 0; i < store->area_count; i++) {
        if (store->areas[i].used) store->areas[i].moved = kept++;
    }
    for (uint32_t i = 0; i < slot->place_count; i++) {
        rft_gpu_place *place = &slot->places[i];
        if (place->kind == RFT_GPU_LENT) place->number = store->areas[place->number].moved;
    }
    for (uint32_t i = 0; i < store->area_count; i++) {
        if (store->areas[i].used) store->areas[store->areas[i].moved] = store->areas[i];
    }
    store->area_count = kept;
    store->area_last = 0;
}

void rft_gpu_store_stream(rft_gpu_store *store)
{
    rft_gpu_slot *slot = &store->slots[store->writing];
    slot->streamed = true;
    note_used(store);
    drop_unused(store); /* what a version before had lent may be gone */
    for (uint32_t i = 0; i < slot->block->chunk_count; i++)
        slot->block->chunks[i].used = slot->block->chunks[i].bytes;
}

void rft_gpu_store_seal(rft_gpu_store *store)
{
    rft_gpu_block *block = rft_gpu_store_writing(store);
    if (block == NULL) return;
    note_used(store);
    drop_unused(store);
    rft_seqlock_end(rft_share_lock_seqlock(&block->share_lock));
}

void rft_gpu_store_commit(rft_gpu_store *store)
{
    store->writing = RFT_NO_SLOT;
}

bool rft_gpu_store_is_lent(const rft_gpu_store *store, uint32_t original)
{
    return store->slots[store->writing].places[original].kind == RFT_GPU_LENT;
}

bool rft_gpu_store_is_streamed(const rft_gpu_store *store, uint64_t version)
{
    const rft_gpu_slot *slot = slot_of(store, version);
    return slot != NULL && slot->streamed;
}

/* What the version lent may change: no reader can accept it. */
static void end_lending(rft_gpu_slot *slot)
{
    if (slot->block != NULL) rft_seqlock_begin(rft_share_lock_seqlock(&slot->block->share_lock));
    slot->version = 0;
    slot->lends = false;
    slot->streamed = false;
}

void rft_gpu_store_rollback(rft_gpu_store *store)
{
    if (store->writing == RFT_NO_SLOT) return; /* the version has left the GPU */
    end_lending(&store->slots[store->writing]);
    store->writing = RFT_NO_SLOT;
}

bool rft_gpu_store_lends(const rft_gpu_store *store)
{
    bool lends = false;
    for (uint32_t i = 0; i < RFT_SLOTS_MOST; i++)
        lends = lends || store->slots[i].lends;
    return lends;
}

void rft_gpu_store_end_lending(rft_gpu_store *store)
{
    for (uint32_t i = 0; i < RFT_SLOTS_MOST; i++) {
        if (store->slots[i].lends) end_lending(&store->slots[i]);
    }
}

/* ---- Lending */

/* NULL: there is none yet. */
static rft_lent_area *area_find(rft_gpu_store *store, const void *base)
{
    for (uint32_t i = 0; i < store->area_count; i++) {
        uint32_t at = (store->area_last + i) % store->area_count;
        if (store->areas[at].range.base != base) continue;
        store->area_last = at;
        return &store->areas[at];
    }
    return NULL;
}

static rft_lent_area *area_add(rft_gpu_store *store)
{
    if (store->area_count == store->area_room) {
        uint32_t room = store->area_room == 0 ? 16 : 2 * store->area_room;
        rft_lent_area *areas = rft_realloc(store->areas, room, sizeof *areas);
        if (areas == NULL) return NULL;
        store->areas = areas;
        store->area_room = room;
    }
    store->area_last = store->area_count++;
    store->areas[store->area_last] = (rft_lent_area){0};
    return &store->areas[store->area_last];
}

/* The area of the allocation, exported. */
static refit_status area_get(rft_gpu_store *store, const rft_memory_range *range,
                             rft_lent_area **out, refit_error *error)
{
    rft_share share;
    rft_lent_area *area = area_find(store, range->base);
    *out = area;
    if (area != NULL && area->range.id == range->id && area->range.bytes == range->bytes &&
        range->id != 0) {
        return REFIT_OK;
    }
    RFT_TRY(rft_device_share_export(store->device, range->base, range->bytes, &share, error));
    share.id = range->id;
    if (area == NULL) area = area_add(store);
    RFT_REFUSE_IF(area == NULL, error, REFIT_ERR_HOST_MEMORY,
                  "no memory for the list of allocations that are lent");
    *area = (rft_lent_area){.range = *range, .share = share};
    *out = area;
    return REFIT_OK;
}

refit_status rft_gpu_store_lend(rft_gpu_store *store, uint32_t original, const void *memory,
                                const rft_memory_range *range, refit_error *error)
{
    rft_lent_area *area;
    RFT_REFUSE_IF((uintptr_t)memory % RFT_PLACE_ALIGNMENT != 0, error, REFIT_ERR_UNSUPPORTED,
                  "a tensor at %p is not aligned to %u bytes", memory, RFT_PLACE_ALIGNMENT);
    RFT_TRY(area_get(store, range, &area, error));
    rft_gpu_slot *slot = &store->slots[store->writing];
    slot->lends = true;
    slot->places[original] =
        (rft_gpu_place){RFT_GPU_LENT, (uint32_t)(area - store->areas),
                        (uint64_t)((uintptr_t)memory - (uintptr_t)range->base)};
    return REFIT_OK;
}

void rft_gpu_store_unlend(rft_gpu_store *store, uint32_t original)
{
    rft_gpu_place *place = &store->slots[store->writing].places[original];
    if (place->kind == RFT_GPU_LENT) *place = (rft_gpu_place){0};
}

/* ---- What there is */

rft_gpu_block *rft_gpu_store_writing(const rft_gpu_store *store)
{
    if (store == NULL || store->writing == RFT_NO_SLOT) return NULL;
    return store->slots[store->writing].block;
}

const rft_gpu_block *rft_gpu_store_find(const rft_gpu_store *store, uint64_t version)
{
    const rft_gpu_slot *slot = slot_of(store, version);
    return slot == NULL ? NULL : slot->block;
}

unsigned char *rft_gpu_store_target(const rft_gpu_store *store, uint32_t original)
{
    const rft_gpu_slot *slot = &store->slots[store->writing];
    const rft_gpu_place *place = &slot->places[original];
    if (place->kind != RFT_GPU_CHUNK) return NULL;
    return slot->block->chunks[place->number].memory + place->offset;
}

const unsigned char *rft_gpu_store_source(const rft_gpu_store *store, uint32_t original)
{
    const rft_gpu_place *place = &store->slots[store->writing].places[original];
    if (place->kind != RFT_GPU_LENT) return rft_gpu_store_target(store, original);
    return (const unsigned char *)store->areas[place->number].range.base + place->offset;
}

static refit_status put_share(const rft_share *share, rft_bytes *out, refit_error *error)
{
    unsigned char bytes[RFT_SHARE_BYTES];
    rft_share_write(share, bytes);
    return rft_bytes_append(out, bytes, sizeof bytes, error);
}

/* Of the slot's block, and of what the version lent. */
static refit_status put_shares(const rft_gpu_store *store, const rft_gpu_slot *slot, rft_bytes *out,
                               uint32_t *count, refit_error *error)
{
    uint32_t lent = slot->lends ? store->area_count : 0;
    for (uint32_t i = 0; i < slot->block->chunk_count; i++)
        RFT_TRY(put_share(&slot->block->chunks[i].share, out, error));
    for (uint32_t i = 0; i < lent; i++)
        RFT_TRY(put_share(&store->areas[i].share, out, error));
    *count = slot->block->chunk_count + lent;
    return REFIT_OK;
}

static void put_place(const rft_gpu_slot *slot, uint32_t original,
                      unsigned char bytes[RFT_PLACE_BYTES])
{
    const rft_gpu_place *place = &slot->places[original];
    uint32_t before = place->kind == RFT_GPU_LENT ? slot->block->chunk_count : 0;
    rft_put_u32(bytes, before + place->number);
    rft_put_u64(bytes + 4, place->offset);
}

refit_status rft_gpu_store_describe(const rft_gpu_store *store, uint64_t version, rft_bytes *out,
                                    uint32_t *shares, refit_error *error)
{
    const rft_gpu_slot *slot = slot_of(store, version);
    RFT_TRY(put_shares(store, slot, out, shares, error));
    for (uint32_t i = 0; i < slot->place_count; i++) {
        unsigned char bytes[RFT_PLACE_BYTES];
        put_place(slot, i, bytes);
        RFT_TRY(rft_bytes_append(out, bytes, sizeof bytes, error));
    }
    return REFIT_OK;
}

void rft_gpu_store_describe_place(const rft_gpu_store *store, uint32_t original,
                                  unsigned char place[RFT_PLACE_BYTES])
{
    put_place(&store->slots[store->writing], original, place);
}

refit_status rft_gpu_store_describe_areas(const rft_gpu_store *store, rft_bytes *out,
                                          refit_error *error)
{
    uint32_t count;
    return put_shares(store, &store->slots[store->writing], out, &count, error);
}

uint64_t rft_gpu_store_block_bytes(const rft_gpu_store *store)
{
    return block_bytes(store->slots[store->writing].block);
}

uint64_t rft_gpu_store_bytes(const rft_gpu_store *store)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < RFT_SLOTS_MOST; i++) {
        if (store->slots[i].block != NULL) bytes += block_bytes(store->slots[i].block);
    }
    for (const rft_gpu_block *block = store->retired; block != NULL; block = block->next) {
        bytes += block_bytes(block);
    }
    return bytes;
}
