/*
 * A tensor whose bytes a device has put into its slot.
 *
 * Nothing has read them on their way, so what writing by the CPU does in one pass is done in steps
 * around the copy: before it, with one slot, all of the tensor's old bytes are saved, because which
 * of them will change is not known; after it, blocks are held against the bytes before, which a
 * changed block ends at its first difference, and the digest is the device's or is taken here.
 */
#include <string.h>

#include "kernels/digest.h"
#include "store/store.h"

static bool writes_over(const rft_store *store)
{
    return store->writing_slot == store->committed_slot;
}

unsigned char *rft_store_prepare(rft_store *store, uint32_t tensor)
{
    const rft_manifest_tensor *place = &store->manifest->tensors[tensor];
    if (!store->hosted) return NULL;
    unsigned char *image = rft_slot_image(&store->slots[store->writing_slot]);
    for (uint32_t i = 0; writes_over(store) && i < place->blocks; i++) {
        rft_undo_save(&store->undo, place->first_block + i, image);
    }
    return image + place->offset;
}

void rft_store_land(rft_store *store, uint32_t tensor)
{
    store->written[tensor] = 1;
    if (store->manifest->tensors[tensor].bytes > 0) store->missing--;
}

static void compare(rft_store *store, uint32_t block)
{
    const rft_block *place = &store->manifest->blocks[block];
    const unsigned char *now = rft_slot_image(&store->slots[store->writing_slot]);
    const unsigned char *before = writes_over(store)
                                      ? store->undo.saved.memory
                                      : rft_slot_image(&store->slots[store->committed_slot]);
    store->same[block] = memcmp(now + place->offset, before + place->offset, place->bytes) == 0;
    store->same_blocks += store->same[block];
}

void rft_store_settle(rft_store *store, uint32_t tensor, const uint64_t *sum, rft_ready_fn ready,
                      void *user)
{
    const rft_manifest_tensor *place = &store->manifest->tensors[tensor];
    uint64_t taken = 0;
    if (sum != NULL) {
        taken = *sum;
    } else if (place->bytes > 0) {
        const unsigned char *image = rft_slot_image(&store->slots[store->writing_slot]);
        taken = rft_digest_parts(image + place->offset, place->bytes, 0,
                                 store->manifest->blocks[place->first_block].bytes,
                                 &store->next.parts[place->first_block]);
        memset(&store->next.known[place->first_block], 1, place->blocks);
    }
    store->next.sums[store->originals[tensor]] = rft_digest_finish(taken, place->bytes);
    for (uint32_t i = 0; i < place->blocks; i++) {
        uint32_t block = place->first_block + i;
        uint32_t frame = store->frame_of[block];
        if (store->base != 0) compare(store, block);
        if (--store->frames_left[frame] == 0) ready(user, frame);
    }
}
