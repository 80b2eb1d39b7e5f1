/*
 * Mappings of a GPU's memory, one a block of the publisher, known by the names of their leashes.
 *
 * The order is that of leash.h: the leash is taken before the memory is mapped and given back after
 * it is unmapped, so that the publisher never frees what is mapped here; and a reader says so first
 * and then looks at the mark. A publisher's offer is believed only as far as the device confirms
 * it.
 */
#include "subscriber/gpu_stage.h"

#include <string.h>

static void mapping_close(rft_images *images, rft_gpu_mapping *mapping)
{
    if (mapping->memory == NULL) return;
    rft_device_share_unmap(images->device, mapping->memory);
    rft_share_lock_close(&mapping->share_lock);
    *mapping = (rft_gpu_mapping){0};
}

static bool is_retired(const rft_gpu_mapping *mapping)
{
    return rft_seqlock_is_retired(rft_share_lock_seqlock(&mapping->share_lock));
}

static void trim(rft_images *images, bool retired_only)
{
    for (uint32_t i = 0; i < RFT_IMAGES_MOST; i++) {
        rft_gpu_mapping *mapping = &images->gpu_mappings[i];
        if (mapping->memory == NULL || mapping->users > 0) continue;
        if (!retired_only || is_retired(mapping)) mapping_close(images, mapping);
    }
}

void rft_images_trim_gpu(rft_images *images)
{
    trim(images, false);
}

void rft_images_trim_retired(rft_images *images)
{
    trim(images, true);
}

static rft_gpu_mapping *find_mapping(rft_images *images, const char *mark)
{
    for (uint32_t i = 0; i < RFT_IMAGES_MOST; i++) {
        rft_gpu_mapping *mapping = &images->gpu_mappings[i];
        if (mapping->memory != NULL && strcmp(mapping->share_lock.segment.name, mark) == 0) {
            return mapping;
        }
    }
    return NULL;
}

/* An empty place, or one that nothing uses. NULL: there is none, though an image is free: the GPU
 * still reads for one that was dropped. */
static rft_gpu_mapping *make_place(rft_images *images)
{
    rft_gpu_mapping *unused = NULL;
    rft_images_trim_retired(images);
    for (uint32_t i = 0; i < RFT_IMAGES_MOST; i++) {
        rft_gpu_mapping *mapping = &images->gpu_mappings[i];
        if (mapping->memory == NULL) return mapping;
        if (mapping->users == 0) unused = mapping;
    }
    if (unused != NULL) mapping_close(images, unused);
    return unused;
}

static refit_status mapping_fill(rft_images *images, rft_gpu_mapping *mapping,
                                 const rft_share *share, refit_error *error)
{
    void *memory = NULL;
    RFT_TRY(rft_device_share_map(images->device, share, &memory, error));
    if ((uintptr_t)memory % RFT_TENSOR_ALIGNMENT != 0) {
        rft_device_share_unmap(images->device, memory);
        return rft_fail(error, REFIT_ERR_PROTOCOL,
                        "no version can lie where the publisher says in the GPU's memory");
    }
    mapping->memory = memory;
    mapping->share = *share;
    return REFIT_OK;
}

static refit_status mapping_open(rft_images *images, const rft_share *share, const char *mark,
                                 rft_gpu_mapping **out, refit_error *error)
{
    rft_gpu_mapping *mapping = make_place(images);
    RFT_REFUSE_IF(mapping == NULL, error, REFIT_ERR_BUSY,
                  "the GPU still reads all of the publisher's memory that is mapped");
    RFT_TRY(rft_share_lock_hold(&mapping->share_lock, mark, error));
    refit_status status = mapping_fill(images, mapping, share, error);
    if (status == REFIT_OK) {
        *out = mapping;
    } else {
        rft_share_lock_close(&mapping->share_lock);
    }
    return status;
}

static bool is_same(const rft_share *a, const rft_share *b)
{
    return memcmp(a->handle, b->handle, sizeof a->handle) == 0 && a->offset == b->offset &&
           a->bytes == b->bytes;
}

refit_status rft_images_take_gpu(rft_images *images, rft_catalog *catalog, const rft_share *share,
                                 const char *mark, rft_image **out, refit_error *error)
{
    rft_image *image = rft_image_find_free(images->shared, error);
    if (image == NULL) return REFIT_ERR_BUSY;
    rft_gpu_mapping *mapping = find_mapping(images, mark);
    RFT_REFUSE_IF(share->bytes < catalog->manifest->store_bytes ||
                      (mapping != NULL && !is_same(&mapping->share, share)),
                  error, REFIT_ERR_PROTOCOL,
                  "the publisher offers another piece of the GPU's memory than the version needs");
    if (mapping == NULL) RFT_TRY(mapping_open(images, share, mark, &mapping, error));
    mapping->users++;
    image->gpu = mapping;
    image->mark = rft_share_lock_seqlock(&mapping->share_lock);
    rft_image_begin_use(image, catalog, mapping->memory);
    *out = image;
    return REFIT_OK;
}

refit_status rft_gpu_mapping_read(rft_gpu_mapping *mapping, uint64_t generation, refit_error *error)
{
    RFT_TRY(rft_share_lock_read(&mapping->share_lock, error));
    mapping->readers++;
    if (rft_seqlock_holds(rft_share_lock_seqlock(&mapping->share_lock), generation))
        return REFIT_OK;
    rft_gpu_mapping_unread(mapping);
    return rft_fail(error, REFIT_ERR_STALE,
                    "the publisher has turned this worker out and writes over the version");
}

void rft_gpu_mapping_unread(rft_gpu_mapping *mapping)
{
    if (--mapping->readers == 0) rft_share_lock_unread(&mapping->share_lock);
}
