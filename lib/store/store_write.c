/*
 * Writing a tensor into the store: for each run of blocks that lies in one frame, compare with the
 * committed version, save what will be overwritten, then copy and digest in one pass.
 *
 * The comparison reads a changed block no further than its first difference, so it costs nothing
 * where most blocks change, and one more read of bytes that the copy needs anyway where they do
 * not. With one slot an unchanged run is digested and not copied.
 */
#include <inttypes.h>
#include <string.h>

#include "base/checked.h"
#include "kernels/digest.h"
#include "store/store.h"

/* Blocks of one tensor that lie in one frame. */
typedef struct store_run {
    uint32_t first;
    uint32_t count;
    uint32_t frame;
    const unsigned char *from; /* the caller's bytes of the first block */
    uint64_t bytes;
    uint64_t tensor_offset;
} store_run;

static store_run run_find(const rft_store *store, const rft_manifest_tensor *tensor, uint32_t block,
                          const unsigned char *memory)
{
    const rft_manifest *manifest = store->manifest;
    uint32_t end = tensor->first_block + tensor->blocks;
    const rft_frame_span *span = &manifest->frames[store->frame_of[block]];
    if (span->first_block + span->blocks < end) end = span->first_block + span->blocks;
    const rft_block *first = &manifest->blocks[block], *last = &manifest->blocks[end - 1];
    return (store_run){
        .first = block,
        .count = end - block,
        .frame = store->frame_of[block],
        .from = memory + first->tensor_offset,
        .bytes = last->offset + last->bytes - first->offset,
        .tensor_offset = first->tensor_offset,
    };
}

/* Notes which blocks are as they were, and gives their number. */
static uint32_t run_compare(rft_store *store, const store_run *run)
{
    if (store->base == 0) return 0;
    uint32_t same = 0;
    const rft_block *blocks = store->manifest->blocks;
    const unsigned char *before = rft_slot_image(&store->slots[store->committed_slot]);
    for (uint32_t i = run->first; i < run->first + run->count; i++) {
        const unsigned char *now = run->from + (blocks[i].tensor_offset - run->tensor_offset);
        store->same[i] = memcmp(now, before + blocks[i].offset, blocks[i].bytes) == 0;
        same += store->same[i];
        if (!store->same[i] && store->undo.has != NULL) rft_undo_save(&store->undo, i, before);
    }
    store->same_blocks += same;
    return same;
}

/* Gives the run's part of the digest. */
static uint64_t run_take(rft_store *store, const store_run *run)
{
    const rft_block *first = &store->manifest->blocks[run->first];
    uint64_t *parts = &store->next.parts[run->first];
    bool same = run_compare(store, run) == run->count;
    bool there = store->writing_slot == store->committed_slot;
    memset(&store->next.known[run->first], 1, run->count);
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
    const rft_manifest_tensor *place = &manifest->tensors[tensor];
    RFT_REFUSE_IF(place->alias_of != REFIT_NO_ALIAS, error, REFIT_ERR_INVALID,
                  "tensor \"%s\" shares the bytes of \"%s\": write only that one", place->name,
                  manifest->tensors[place->alias_of].name);
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

refit_status rft_store_write(rft_store *store, uint32_t tensor, const void *bytes, uint64_t count,
                             rft_ready_fn ready, void *user, refit_error *error)
{
    RFT_TRY(rft_store_check(store, tensor, bytes, count, error));
    const rft_manifest_tensor *place = &store->manifest->tensors[tensor];
    uint64_t sum = 0;
    uint32_t end = place->first_block + place->blocks;
    for (uint32_t block = place->first_block; place->blocks > 0 && block < end;) {
        store_run run = run_find(store, place, block, bytes);
        sum += run_take(store, &run);
        store->frames_left[run.frame] -= run.count;
        if (store->frames_left[run.frame] == 0) ready(user, run.frame);
        block += run.count;
    }
    store->next.sums[store->originals[tensor]] = rft_digest_finish(sum, count);
    store->written[tensor] = 1;
    if (count > 0) store->missing--;
    return REFIT_OK;
}

void rft_store_add_ready(rft_store *store, uint32_t frame)
{
    store->ready[store->ready_count++] = frame;
}
