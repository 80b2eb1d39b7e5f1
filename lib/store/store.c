/*
 * Slots, digests of versions, and what happens to them when a version begins, is written, is
 * decided, or is undone. A tensor is written by the CPU, or put into its slot by a device.
 *
 *              begin                      commit
 *   decided ───────────► being written ──────────► decided (the new one)
 *                              │ rollback
 *                              └─────────────────► decided (the old one, bit for bit)
 *
 * decided        `committed` lies in committed_slot (or there is none); all its frames are ready;
 *                `same` holds its differences to `base`.
 * being written  writing_slot's seqlock is odd until it is sealed; frames become ready one by one.
 */
#include "store/store.h"

#include <inttypes.h>
#include <string.h>
#include <sys/mman.h>

#include "base/alloc.h"
#include "base/checked.h"
#include "kernels/copy.h"
#include "kernels/digest.h"

/* ---- The undo log
 *
 * The undo log as a sparse second image: a block is saved where it lay, so there is no list to keep
 * and nothing to allocate while a version is written.
 */

static refit_status undo_open(rft_undo *undo, const rft_manifest *manifest, refit_error *error)
{
    *undo = (rft_undo){.manifest = manifest};
    unsigned char *has = rft_calloc((size_t)manifest->block_count + 1, 1);
    RFT_REFUSE_IF(has == NULL, error, REFIT_ERR_HOST_MEMORY, "no memory for the undo log");
    refit_status status = rft_segment_create_sparse(&undo->saved, manifest->store_bytes, error);
    if (status == REFIT_OK) {
        undo->has = has;
    } else {
        rft_free(has);
    }
    return status;
}

static void undo_close(rft_undo *undo)
{
    if (undo->has == NULL) return;
    rft_segment_close(&undo->saved);
    rft_free(undo->has);
    undo->has = NULL;
}

static void undo_save(rft_undo *undo, uint32_t block, const unsigned char *image)
{
    const rft_block *place = &undo->manifest->blocks[block];
    if (undo->has[block]) return;
    rft_copy_bytes(undo->saved.memory + place->offset, image + place->offset, place->bytes);
    undo->has[block] = 1;
}

static void undo_restore(const rft_undo *undo, unsigned char *image)
{
    for (uint32_t i = 0; i < undo->manifest->block_count; i++) {
        const rft_block *place = &undo->manifest->blocks[i];
        if (!undo->has[i]) continue;
        rft_copy_bytes(image + place->offset, undo->saved.memory + place->offset, place->bytes);
    }
}

static void undo_reset(rft_undo *undo)
{
    if (undo->has == NULL) return;
    memset(undo->has, 0, undo->manifest->block_count);
    (void)madvise(undo->saved.memory, undo->saved.bytes, MADV_DONTNEED);
}

/* ---- Where the bytes lie */

unsigned char *rft_slot_image(const rft_slot *slot)
{
    return slot->buffer->segment.memory + RFT_SEQLOCK_BYTES;
}

static rft_seqlock *slot_lock(const rft_slot *slot)
{
    return (rft_seqlock *)(void *)slot->buffer->segment.memory;
}

/* ---- Opening and closing */

static refit_status slot_make(const rft_store *store, rft_buffer **out, refit_error *error)
{
    refit_error why = {0};
    uint64_t bytes = store->layout->store_bytes + RFT_SEQLOCK_BYTES;
    rft_buffer *buffer = rft_buffer_open();
    RFT_REFUSE_IF(buffer == NULL, error, REFIT_ERR_HOST_MEMORY, "no memory for a slot");
    refit_status status = store->shared ? rft_segment_create(&buffer->segment, bytes, &why)
                                        : rft_segment_create_private(&buffer->segment, bytes, &why);
    if (status == REFIT_OK) {
        if (!store->shared) rft_segment_fill(&buffer->segment); /* the next slot is to see it */
        *out = buffer;
    } else {
        const char *other = store->shared || store->slot_count == 1
                                ? ""
                                : ", or halve what is needed with broadcast.slots: 1";
        rft_retire_list_put(store->retired, buffer);
        (void)rft_fail_sub(error, status, why.subsystem, "%s%s", why.text, other);
    }
    return status;
}

static bool digests_open(rft_version_digests *digests, const rft_manifest *manifest)
{
    digests->tensor_sums =
        rft_calloc((size_t)manifest->originals + 1, sizeof digests->tensor_sums[0]);
    digests->block_sums =
        rft_calloc((size_t)manifest->block_count + 1, sizeof digests->block_sums[0]);
    digests->has_block_sum = rft_calloc((size_t)manifest->block_count + 1, 1);
    return digests->tensor_sums != NULL && digests->block_sums != NULL &&
           digests->has_block_sum != NULL;
}

static void digests_close(rft_version_digests *digests)
{
    rft_free(digests->tensor_sums);
    rft_free(digests->block_sums);
    rft_free(digests->has_block_sum);
}

static bool tables_open(rft_store *store)
{
    const rft_manifest *manifest = store->manifest;
    size_t frames = (size_t)manifest->frame_count + 1, tensors = (size_t)manifest->count + 1;
    size_t blocks = (size_t)manifest->block_count + 1;
    store->same = rft_calloc(blocks, 1);
    store->written = rft_calloc(tensors, 1);
    store->originals = rft_calloc(tensors, sizeof(uint32_t));
    store->frames_left = rft_calloc(frames, sizeof(uint32_t));
    store->ready = rft_calloc(frames, sizeof(uint32_t));
    store->frame_of = rft_calloc(blocks, sizeof(uint32_t));
    bool has_digests =
        digests_open(&store->committed, manifest) && digests_open(&store->next, manifest);
    return has_digests && store->same != NULL && store->written != NULL &&
           store->originals != NULL && store->frames_left != NULL && store->ready != NULL &&
           store->frame_of != NULL;
}

static void tables_fill(rft_store *store)
{
    const rft_manifest *manifest = store->manifest;
    uint32_t place = 0;
    for (uint32_t i = 0; i < manifest->count; i++) {
        if (manifest->tensors[i].alias_of == REFIT_NO_ALIAS) store->originals[i] = place++;
    }
    for (uint32_t i = 0; i < manifest->frame_count; i++) {
        const rft_frame_span *span = &manifest->frames[i];
        for (uint32_t block = 0; block < span->blocks; block++) {
            store->frame_of[span->first_block + block] = i;
        }
    }
}

static refit_status open_layout(rft_store *store, rft_want *shard, refit_error *error)
{
    store->layout = store->manifest;
    if (shard == NULL) return REFIT_OK;
    RFT_TRY(rft_shard_layout(store->manifest, shard, &store->shard_layout, error));
    store->shard = rft_want_acquire(shard);
    store->layout = store->shard_layout;
    return REFIT_OK;
}

static refit_status open_store(rft_manifest *manifest, rft_want *shard, uint32_t slots, bool shared,
                               rft_retire_list *retired, rft_store **out, refit_error *error)
{
    rft_store *store = rft_calloc(1, sizeof *store);
    if (store == NULL) rft_manifest_close(manifest);
    RFT_REFUSE_IF(store == NULL, error, REFIT_ERR_HOST_MEMORY, "no memory for the store");
    store->manifest = manifest;
    store->retired = retired;
    store->shared = shared;
    store->slot_count = slots;
    store->committed_slot = RFT_NO_SLOT;
    store->writing_slot = RFT_NO_SLOT;
    refit_status status = open_layout(store, shard, error);
    if (status == REFIT_OK && !tables_open(store))
        status = rft_fail(error, REFIT_ERR_HOST_MEMORY, "no memory for the tables of the store");
    if (status != REFIT_OK) {
        rft_store_close(store);
        return status;
    }
    tables_fill(store);
    *out = store;
    return REFIT_OK;
}

refit_status rft_store_open(rft_manifest *manifest, uint32_t slots, bool shared,
                            rft_retire_list *retired, rft_store **out, refit_error *error)
{
    return open_store(manifest, NULL, slots, shared, retired, out, error);
}

refit_status rft_store_open_shard(rft_manifest *manifest, rft_want *shard, uint32_t slots,
                                  rft_retire_list *retired, rft_store **out, refit_error *error)
{
    return open_store(manifest, shard, slots, false, retired, out, error);
}

void rft_store_close(rft_store *store)
{
    if (store == NULL) return;
    for (uint32_t i = 0; i < store->slot_count; i++) {
        rft_retire_list_put(store->retired, store->slots[i].buffer);
    }
    undo_close(&store->undo);
    digests_close(&store->committed);
    digests_close(&store->next);
    rft_free(store->same);
    rft_free(store->written);
    rft_free(store->originals);
    rft_free(store->frames_left);
    rft_free(store->ready);
    rft_free(store->frame_of);
    rft_bytes_close(&store->words);
    rft_want_release(store->shard);
    rft_manifest_close(store->shard_layout);
    rft_manifest_close(store->manifest);
    rft_free(store);
}

/* ---- Slots */

uint32_t rft_store_target(const rft_store *store)
{
    if (store->slot_count == 1) return 0;
    return store->committed_slot == 0 ? 1 : 0;
}

/* Whether the committed version's bytes are on this host. A version that is written over nothing
 * takes their place in a store with one slot. */
static bool has_committed(const rft_store *store)
{
    if (store->committed_slot == RFT_NO_SLOT) return false;
    const rft_slot *slot = &store->slots[store->committed_slot];
    bool replaced = store->writing_slot == store->committed_slot && store->base == 0;
    return slot->hosted && slot->buffer != NULL && !replaced;
}

void rft_store_empty(rft_store *store, uint32_t slot)
{
    rft_slot *place = &store->slots[slot];
    rft_retire_list_put(store->retired, place->buffer);
    *place = (rft_slot){0};
}

refit_status rft_store_renew(rft_store *store, uint32_t slot, refit_error *error)
{
    rft_slot *place = &store->slots[slot];
    rft_buffer *fresh = NULL;
    bool holds_committed = slot == store->committed_slot && has_committed(store);
    if (!holds_committed && place->buffer != NULL) rft_store_empty(store, slot);
    RFT_TRY(slot_make(store, &fresh, error));
    bool undoes = store->slot_count == 1 && store->undo.has == NULL;
    refit_status status = undoes ? undo_open(&store->undo, store->layout, error) : REFIT_OK;
    if (status != REFIT_OK) {
        rft_retire_list_put(store->retired, fresh);
        return status;
    }
    if (holds_committed) {
        rft_copy_bytes(fresh->segment.memory, place->buffer->segment.memory,
                       store->layout->store_bytes + RFT_SEQLOCK_BYTES);
        rft_retire_list_put(store->retired, place->buffer);
    }
    place->buffer = fresh;
    if (holds_committed) place->tainted = false;
    return REFIT_OK;
}

const rft_slot *rft_store_served_slot(const rft_store *store)
{
    if (store->writing_slot != RFT_NO_SLOT) return &store->slots[store->writing_slot];
    if (store->committed_slot != RFT_NO_SLOT) return &store->slots[store->committed_slot];
    return NULL;
}

const rft_version_digests *rft_store_served(const rft_store *store)
{
    if (store->writing_slot != RFT_NO_SLOT) return &store->next;
    if (store->committed_slot != RFT_NO_SLOT) return &store->committed;
    return NULL;
}

const unsigned char *rft_store_base_image(const rft_store *store)
{
    if (store->base == 0) return NULL;
    bool writes_over = store->writing_slot != RFT_NO_SLOT && store->undo.has != NULL;
    if (writes_over) return store->undo.saved.memory;
    for (uint32_t i = 0; i < store->slot_count; i++) {
        const rft_slot *slot = &store->slots[i];
        if (slot->buffer != NULL && slot->version == store->base) return rft_slot_image(slot);
    }
    return NULL;
}

const rft_version_digests *rft_store_base_digests(const rft_store *store)
{
    return store->writing_slot != RFT_NO_SLOT ? &store->committed : &store->next;
}

/* ---- Versions */

/* Tensors without bytes need no writing. */
static void missing_reset(rft_store *store)
{
    const rft_manifest *layout = store->layout;
    store->missing = 0;
    memset(store->written, 0, layout->count);
    for (uint32_t i = 0; i < layout->count; i++) {
        const rft_manifest_tensor *tensor = &layout->tensors[i];
        if (tensor->alias_of == REFIT_NO_ALIAS && tensor->bytes > 0) store->missing++;
    }
}

static void frames_reset(rft_store *store)
{
    const rft_manifest *layout = store->layout;
    store->ready_count = 0;
    memset(store->frames_left, 0, layout->frame_count * sizeof *store->frames_left);
    for (uint32_t i = 0; i < layout->block_count; i++) {
        bool comes = layout->tensors[layout->blocks[i].tensor].bytes > 0;
        store->frames_left[store->frame_of[i]] += comes;
    }
}

/* `same` says nothing where the committed version or the one that begins has no bytes. */
static bool has_base(const rft_store *store, uint32_t target)
{
    return store->slots[target].buffer != NULL && has_committed(store) &&
           store->slots[store->committed_slot].version == store->committed.version;
}

void rft_store_begin(rft_store *store, uint64_t version)
{
    uint32_t target = rft_store_target(store);
    rft_slot *slot = &store->slots[target];
    store->base = has_base(store, target) ? store->committed.version : 0;
    store->writing_slot = target;
    slot->version = version;
    slot->hosted = slot->buffer != NULL;
    if (slot->hosted) rft_seqlock_begin(slot_lock(slot));
    store->sealed = false;
    store->next.version = version;
    memset(store->next.tensor_sums, 0,
           store->manifest->originals * sizeof store->next.tensor_sums[0]);
    memset(store->next.has_block_sum, 0, store->manifest->block_count);
    store->base_digest = store->committed.digest;
    memset(store->same, 0, store->manifest->block_count);
    store->same_blocks = 0;
    rft_bytes_reset(&store->words);
    store->words_missing = false;
    missing_reset(store);
    frames_reset(store);
}

void rft_store_add_bytes(rft_store *store)
{
    rft_slot *slot = &store->slots[store->writing_slot];
    rft_seqlock_begin(slot_lock(slot));
    if (store->sealed) rft_seqlock_end(slot_lock(slot));
    slot->version = store->next.version;
    slot->hosted = true;
}

void rft_store_drop_bytes(rft_store *store)
{
    rft_store_empty(store, store->writing_slot);
    store->slots[store->writing_slot].version = store->next.version;
}

refit_status rft_store_seal(rft_store *store, refit_error *error)
{
    const rft_manifest *manifest = store->manifest;
    for (uint32_t i = 0; store->missing > 0 && i < manifest->count; i++) {
        const rft_manifest_tensor *tensor = &store->layout->tensors[i];
        bool needed = tensor->alias_of == REFIT_NO_ALIAS && tensor->bytes > 0;
        RFT_REFUSE_IF(needed && !store->written[i], error, REFIT_ERR_STATE,
                      "version %" PRIu64 " lacks %" PRIu32
                      " tensors, \"%s\" among them: write them first",
                      store->next.version, store->missing, tensor->name);
    }
    RFT_REFUSE_IF(store->words_missing, error, REFIT_ERR_HOST_MEMORY,
                  "no memory for the digests of version %" PRIu64 ": abort it",
                  store->next.version);
    for (uint32_t i = 0; store->shard == NULL && i < manifest->count; i++) {
        const rft_manifest_tensor *tensor = &manifest->tensors[i];
        if (tensor->alias_of != REFIT_NO_ALIAS || store->written[i]) continue;
        store->next.tensor_sums[store->originals[i]] = rft_digest_finish(0, 0);
    }
    if (store->shard == NULL)
        store->next.digest = rft_version_digest(manifest, store->next.tensor_sums);
    const rft_slot *slot = &store->slots[store->writing_slot];
    if (slot->buffer != NULL) rft_seqlock_end(slot_lock(slot));
    store->sealed = true;
    return REFIT_OK;
}

void rft_store_conclude(rft_store *store, const uint64_t *digests)
{
    const rft_manifest *manifest = store->manifest;
    memcpy(store->next.tensor_sums, digests, manifest->originals * sizeof *digests);
    store->next.digest = rft_version_digest(manifest, store->next.tensor_sums);
}

void rft_store_commit(rft_store *store)
{
    rft_version_digests before = store->committed;
    store->committed = store->next;
    store->next = before;
    store->committed_slot = store->writing_slot;
    store->writing_slot = RFT_NO_SLOT;
    undo_reset(&store->undo);
    store->ration = (rft_ration){0};
}

/* Whether the version lies over the committed one's bytes. */
static bool writes_over(const rft_store *store)
{
    return store->base != 0 && store->writing_slot == store->committed_slot;
}

static void ready_fill(rft_store *store)
{
    for (uint32_t i = 0; i < store->manifest->frame_count; i++) {
        store->ready[i] = i;
    }
    store->ready_count = store->manifest->frame_count;
}

void rft_store_undo(rft_store *store)
{
    const rft_slot *slot = &store->slots[store->writing_slot];
    if (slot->buffer == NULL) return;
    rft_seqlock_begin(slot_lock(slot));
    if (writes_over(store)) {
        undo_restore(&store->undo, rft_slot_image(slot));
        rft_seqlock_end(slot_lock(slot));
    }
    undo_reset(&store->undo);
    store->ration = (rft_ration){0};
}

void rft_store_rollback(rft_store *store, bool restored)
{
    bool there = writes_over(store) && restored;
    store->slots[store->writing_slot].version = there ? store->committed.version : 0;
    if (store->writing_slot == store->committed_slot && !there) {
        store->committed_slot = RFT_NO_SLOT;
        store->committed.version = 0;
    }
    store->writing_slot = RFT_NO_SLOT;
    store->base = 0; /* `same` was about the version that is gone */
    ready_fill(store);
}

/* ---- Writing a tensor
 *
 * Writing a tensor into the store: for each run of blocks that lies in one frame, compare with the
 * committed version, save what will be overwritten, then copy and digest in one pass.
 *
 * The comparison reads a changed block no further than its first difference, so it costs nothing
 * where most blocks change, and one more read of bytes that the copy needs anyway where they do
 * not. With one slot an unchanged run is digested and not copied.
 */

/* Blocks of one tensor that lie in one frame. */
typedef struct store_run {
    uint32_t first;
    uint32_t count;
    uint32_t frame;
    const unsigned char *from; /* the caller's bytes of the first block */
    uint64_t bytes;
    uint64_t offset; /* in the image */
    uint64_t tensor_offset;
} store_run;

static store_run run_find(const rft_store *store, const rft_manifest_tensor *tensor, uint32_t block,
                          const unsigned char *memory)
{
    const rft_manifest *manifest = store->layout;
    uint32_t end = tensor->first_block + tensor->blocks;
    const rft_frame_span *span = &manifest->frames[store->frame_of[block]];
    if (span->first_block + span->blocks < end) end = span->first_block + span->blocks;
    const rft_block *first = &manifest->blocks[block], *last = &manifest->blocks[end - 1];
    return (store_run){
        .first = block,
        .count = end - block,
        .frame = store->frame_of[block],
        .from = memory + (first->offset - tensor->offset),
        .bytes = last->offset + last->bytes - first->offset,
        .offset = first->offset,
        .tensor_offset = first->tensor_offset,
    };
}

/* Notes which blocks are as they were, and gives their number. */
static uint32_t run_compare(rft_store *store, const store_run *run)
{
    if (store->base == 0) return 0;
    uint32_t same = 0;
    const rft_block *blocks = store->layout->blocks;
    const unsigned char *before = rft_slot_image(&store->slots[store->committed_slot]);
    for (uint32_t i = run->first; i < run->first + run->count; i++) {
        const unsigned char *now = run->from + (blocks[i].offset - run->offset);
        store->same[i] = memcmp(now, before + blocks[i].offset, blocks[i].bytes) == 0;
        same += store->same[i];
        if (!store->same[i] && store->undo.has != NULL) undo_save(&store->undo, i, before);
    }
    store->same_blocks += same;
    return same;
}

/* Whether the store has no more than a part of the tensor. */
static bool is_divided(const rft_store *store, uint32_t tensor)
{
    return store->layout->tensors[tensor].bytes < store->manifest->tensors[tensor].bytes;
}

/* Gives the run's part of the digest; of a divided tensor 0. */
static uint64_t run_take(rft_store *store, const store_run *run)
{
    const rft_block *first = &store->layout->blocks[run->first];
    uint64_t *parts = &store->next.block_sums[run->first];
    bool same = run_compare(store, run) == run->count;
    bool there = store->writing_slot == store->committed_slot;
    if (is_divided(store, first->tensor)) {
        if (same && there) return 0;
        rft_copy_bytes(rft_slot_image(&store->slots[store->writing_slot]) + first->offset,
                       run->from, run->bytes);
        return 0;
    }
    memset(&store->next.has_block_sum[run->first], 1, run->count);
    if (same && there)
        return rft_digest_parts(run->from, run->bytes, run->tensor_offset, first->bytes, parts);
    unsigned char *image = rft_slot_image(&store->slots[store->writing_slot]);
    return rft_digest_copy_parts(image + first->offset, run->from, run->bytes, run->tensor_offset,
                                 first->bytes, parts);
}

refit_status rft_store_check(const rft_store *store, uint32_t tensor, const void *bytes,
                             uint64_t count, refit_error *error)
{
    const rft_manifest *manifest = store->manifest;
    RFT_REFUSE_IF(tensor >= manifest->count, error, REFIT_ERR_INVALID,
                  "there is no tensor %" PRIu32 ": %" PRIu32 " were declared", tensor,
                  manifest->count);
    const rft_manifest_tensor *place = &store->layout->tensors[tensor];
    RFT_REFUSE_IF(place->alias_of != REFIT_NO_ALIAS, error, REFIT_ERR_INVALID,
                  "tensor \"%s\" shares the bytes of \"%s\": write only that one", place->name,
                  manifest->tensors[place->alias_of].name);
    RFT_REFUSE_IF(store->shard != NULL && count != place->bytes, error, REFIT_ERR_INVALID,
                  "the shard of tensor \"%s\" has %" PRIu64 " bytes on this rank, not %" PRIu64,
                  place->name, place->bytes, count);
    RFT_REFUSE_IF(count != place->bytes, error, REFIT_ERR_INVALID,
                  "tensor \"%s\" was declared with %" PRIu64 " bytes, not %" PRIu64, place->name,
                  place->bytes, count);
    RFT_REFUSE_IF(
        count > 0 && (bytes == NULL || !rft_span_exists(bytes, count)), error, REFIT_ERR_INVALID,
        "tensor \"%s\" has no memory: its address is NULL, or ends beyond those that there are",
        place->name);
    RFT_REFUSE_IF(store->written[tensor], error, REFIT_ERR_STATE,
                  "tensor \"%s\" is written already in version %" PRIu64, place->name,
                  store->next.version);
    return REFIT_OK;
}

/* Notes the digest of a tensor; of a shard, what it adds to that. `bytes` are the shard's. */
static refit_status note_sum(rft_store *store, uint32_t tensor, uint64_t sum,
                             const unsigned char *bytes, refit_error *error)
{
    uint64_t *place = &store->next.tensor_sums[store->originals[tensor]];
    size_t words = store->words.count;
    refit_status status = REFIT_OK;
    if (store->shard == NULL)
        *place = rft_digest_finish(sum, store->manifest->tensors[tensor].bytes);
    else if (!is_divided(store, tensor))
        *place = sum;
    else
        status = rft_shard_sum(store->shard, tensor, bytes, place, &store->words, error);
    if (status != REFIT_OK) store->words.count = words;
    return status;
}

/* What can fail comes first: then the tensor can be written once more. */
refit_status rft_store_write(rft_store *store, uint32_t tensor, const void *bytes, uint64_t count,
                             rft_ready_fn ready, void *user, refit_error *error)
{
    RFT_TRY(rft_store_check(store, tensor, bytes, count, error));
    const rft_manifest_tensor *place = &store->layout->tensors[tensor];
    uint64_t sum = 0;
    uint32_t end = place->first_block + place->blocks;
    bool divided = is_divided(store, tensor);
    if (divided) RFT_TRY(note_sum(store, tensor, 0, bytes, error));
    for (uint32_t block = place->first_block; place->bytes > 0 && block < end;) {
        store_run run = run_find(store, place, block, bytes);
        sum += run_take(store, &run);
        store->frames_left[run.frame] -= run.count;
        if (store->frames_left[run.frame] == 0) ready(user, run.frame);
        block += run.count;
    }
    if (!divided) RFT_TRY(note_sum(store, tensor, sum, bytes, error));
    store->written[tensor] = 1;
    if (count > 0) store->missing--;
    return REFIT_OK;
}

void rft_store_add_ready(rft_store *store, uint32_t frame)
{
    store->ready[store->ready_count++] = frame;
}

/* ---- A tensor that a device has put into its slot
 *
 * Nothing has read its bytes on their way, so what writing by the CPU does in one pass is done in
 * steps around the copy: before it, with one slot, all of the tensor's old bytes are saved, because
 * which of them will change is not known; after it, blocks are held against the bytes before, which
 * a changed block ends at its first difference, and the digest is the device's or is taken here.
 */

refit_status rft_store_afford(rft_store *store, uint64_t bytes, refit_error *error)
{
    refit_error why;
    if (!writes_over(store)) return REFIT_OK;
    refit_status status = rft_ration_take(&store->ration, bytes, &why);
    RFT_REFUSE_IF(status != REFIT_OK, error, status,
                  "the bytes that the version writes over could not be kept for a rollback: %s; "
                  "make room, or raise the limit of the container",
                  why.text);
    return REFIT_OK;
}

unsigned char *rft_store_begin_device_write(rft_store *store, uint32_t tensor)
{
    const rft_manifest_tensor *place = &store->layout->tensors[tensor];
    const rft_slot *slot = &store->slots[store->writing_slot];
    if (slot->buffer == NULL) return NULL;
    unsigned char *image = rft_slot_image(slot);
    for (uint32_t i = 0; writes_over(store) && i < place->blocks; i++) {
        undo_save(&store->undo, place->first_block + i, image);
    }
    return image + place->offset;
}

void rft_store_end_device_write(rft_store *store, uint32_t tensor)
{
    store->written[tensor] = 1;
    if (store->layout->tensors[tensor].bytes > 0) store->missing--;
}

static void compare(rft_store *store, uint32_t block)
{
    const rft_block *place = &store->layout->blocks[block];
    const unsigned char *now = rft_slot_image(&store->slots[store->writing_slot]);
    const unsigned char *before = writes_over(store)
                                      ? store->undo.saved.memory
                                      : rft_slot_image(&store->slots[store->committed_slot]);
    store->same[block] = memcmp(now + place->offset, before + place->offset, place->bytes) == 0;
    store->same_blocks += store->same[block];
}

void rft_store_compare(rft_store *store, uint32_t tensor, const uint64_t *sum, rft_ready_fn ready,
                       void *user)
{
    const rft_manifest_tensor *place = &store->layout->tensors[tensor];
    bool divided = is_divided(store, tensor);
    const unsigned char *bytes = NULL;
    uint64_t taken = 0;
    if (place->bytes > 0 && (divided || sum == NULL))
        bytes = rft_slot_image(&store->slots[store->writing_slot]) + place->offset;
    if (divided) {
        taken = 0;
    } else if (sum != NULL) {
        taken = *sum;
    } else if (place->bytes > 0) {
        taken = rft_digest_parts(bytes, place->bytes, 0,
                                 store->layout->blocks[place->first_block].bytes,
                                 &store->next.block_sums[place->first_block]);
        memset(&store->next.has_block_sum[place->first_block], 1, place->blocks);
    }
    if (note_sum(store, tensor, taken, bytes, NULL) != REFIT_OK) store->words_missing = true;
    for (uint32_t i = 0; place->bytes > 0 && i < place->blocks; i++) {
        uint32_t block = place->first_block + i;
        uint32_t frame = store->frame_of[block];
        if (store->base != 0) compare(store, block);
        if (--store->frames_left[frame] == 0) ready(user, frame);
    }
}
