/*
 * Mappings of a GPU's memory, one a block of the publisher, known by the names of their leashes.
 *
 * The order is that of leash.h: the leash is taken before the memory is mapped and given back after
 * it is unmapped, so that the publisher never frees what is mapped here; and a reader says so first
 * and then looks at the mark. A publisher's offer is believed only as far as the device confirms
 * it.
 */
#include "broadcast/gpu_stage.h"

#include <string.h>

static void mapping_close(rft_staging *staging, rft_gpu_mapping *mapping)
{
    if (mapping->memory == NULL) return;
    rft_device_share_unmap(staging->device, mapping->memory);
    rft_leash_close(&mapping->leash);
    *mapping = (rft_gpu_mapping){0};
}

static bool is_retired(const rft_gpu_mapping *mapping)
{
    return rft_mark_is_retired(rft_leash_mark(&mapping->leash));
}

static void trim(rft_staging *staging, bool retired_only)
{
    for (uint32_t i = 0; i < RFT_STAGING_IMAGES; i++) {
        rft_gpu_mapping *mapping = &staging->gpu_mappings[i];
        if (mapping->memory == NULL || mapping->users > 0) continue;
        if (!retired_only || is_retired(mapping)) mapping_close(staging, mapping);
    }
}

void rft_staging_trim_gpu(rft_staging *staging)
{
    trim(staging, false);
}

void rft_staging_trim_retired(rft_staging *staging)
{
    trim(staging, true);
}

static rft_gpu_mapping *find_mapping(rft_staging *staging, const char *mark)
{
    for (uint32_t i = 0; i < RFT_STAGING_IMAGES; i++) {
        rft_gpu_mapping *mapping = &staging->gpu_mappings[i];
        if (mapping->memory != NULL && strcmp(mapping->leash.segment.name, mark) == 0) {
            return mapping;
        }
    }
    return NULL;
}

/* An empty place, or one that nothing uses. NULL: there is none, though an image is free: the GPU
 * still reads for one that was dropped. */
static rft_gpu_mapping *make_place(rft_staging *staging)
{
    rft_gpu_mapping *unused = NULL;
    rft_staging_trim_retired(staging);
    for (uint32_t i = 0; i < RFT_STAGING_IMAGES; i++) {
        rft_gpu_mapping *mapping = &staging->gpu_mappings[i];
        if (mapping->memory == NULL) return mapping;
        if (mapping->users == 0) unused = mapping;
    }
    if (unused != NULL) mapping_close(staging, unused);
    return unused;
}

static refit_status mapping_fill(rft_staging *staging, rft_gpu_mapping *mapping,
                                 const rft_share *share, refit_error *error)
{
    void *memory = NULL;
    RFT_TRY(rft_device_share_map(staging->device, share, &memory, error));
    if ((uintptr_t)memory % RFT_TENSOR_ALIGNMENT != 0) {
        rft_device_share_unmap(staging->device, memory);
        return rft_fail(error, REFIT_ERR_PROTOCOL,
                        "no version can lie where the publisher says in the GPU's memory");
    }
    mapping->memory = memory;
    mapping->share = *share;
    return REFIT_OK;
}

static refit_status mapping_open(rft_staging *staging, const rft_share *share, const char *mark,
                                 rft_gpu_mapping **out, refit_error *error)
{
    rft_gpu_mapping *mapping = make_place(staging);
    RFT_REFUSE_IF(mapping == NULL, error, REFIT_ERR_BUSY,
                  "the GPU still reads all of the publisher's memory that is mapped");
    RFT_TRY(rft_leash_hold(&mapping->leash, mark, error));
    refit_status status = mapping_fill(staging, mapping, share, error);
    if (status == REFIT_OK) {
        *out = mapping;
    } else {
        rft_leash_close(&mapping->leash);
    }
    return status;
}

static bool is_same(const rft_share *a, const rft_share *b)
{
    return memcmp(a->handle, b->handle, sizeof a->handle) == 0 && a->offset == b->offset &&
           a->bytes == b->bytes;
}

refit_status rft_staging_take_gpu(rft_staging *staging, rft_catalog *catalog,
                                  const rft_share *share, const char *mark, rft_image **out,
                                  refit_error *error)
{
    rft_image *image = rft_image_find_free(staging->shared, error);
    if (image == NULL) return REFIT_ERR_BUSY;
    rft_gpu_mapping *mapping = find_mapping(staging, mark);
    RFT_REFUSE_IF(share->bytes < catalog->manifest->store_bytes ||
                      (mapping != NULL && !is_same(&mapping->share, share)),
                  error, REFIT_ERR_PROTOCOL,
                  "the publisher offers another piece of the GPU's memory than the version needs");
    if (mapping == NULL) RFT_TRY(mapping_open(staging, share, mark, &mapping, error));
    mapping->users++;
    image->gpu = mapping;
    image->mark = rft_leash_mark(&mapping->leash);
    rft_image_begin_use(image, catalog, mapping->memory);
    *out = image;
    return REFIT_OK;
}

refit_status rft_gpu_mapping_read(rft_gpu_mapping *mapping, uint64_t generation, refit_error *error)
{
    RFT_TRY(rft_leash_read(&mapping->leash, error));
    mapping->readers++;
    if (rft_mark_holds(rft_leash_mark(&mapping->leash), generation)) return REFIT_OK;
    rft_gpu_mapping_unread(mapping);
    return rft_fail(error, REFIT_ERR_STALE,
                    "the publisher has turned this worker out and writes over the version");
}

void rft_gpu_mapping_unread(rft_gpu_mapping *mapping)
{
    if (--mapping->readers == 0) rft_leash_unread(&mapping->leash);
}
