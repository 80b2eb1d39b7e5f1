/*
 * What a caller does with regions before and between offloads and restores: add, describe, bind and
 * unbind. Changes addresses only; bytes are moved elsewhere.
 */
#include <string.h>

#include "base/checked.h"
#include "offload/offloader.h"

static refit_status find_region(const refit_offloader *offloader, refit_region_id id,
                                refit_error *error)
{
    RFT_REFUSE_IF(id >= offloader->regions.count, error, REFIT_ERR_NOT_FOUND,
                  "there is no region %u: there are %u", id, offloader->regions.count);
    return REFIT_OK;
}

static refit_status refuse_sealed(refit_offloader *offloader, refit_error *error)
{
    RFT_REFUSE_IF(refit_offloader_get_state(offloader) != REFIT_OPEN, error, REFIT_ERR_STATE,
                  "no region can be added once sealed: call refit_offloader_unseal first");
    return REFIT_OK;
}

refit_status refit_offloader_add(refit_offloader *offloader, const refit_region_desc *region,
                                 refit_region_id *out, refit_error *error)
{
    RFT_REFUSE_IF(offloader == NULL || region == NULL || out == NULL, error, REFIT_ERR_INVALID,
                  "refit_offloader_add needs an offloader, a region and a place for its number");
    RFT_TRY(refuse_sealed(offloader, error));
    return rft_region_table_add(&offloader->regions, region, out, error);
}

/* The list of a caller whose struct is shorter or longer is gone through by that one's size. */
refit_status refit_offloader_add_each(refit_offloader *offloader, const refit_region_desc *regions,
                                      uint32_t count, refit_error *error)
{
    RFT_REFUSE_IF(offloader == NULL || (regions == NULL && count > 0), error, REFIT_ERR_INVALID,
                  "refit_offloader_add_each needs an offloader and the regions");
    RFT_TRY(refuse_sealed(offloader, error));
    const refit_region_desc *region = regions;
    for (uint32_t at = 0; at < count; at++) {
        refit_region_id id;
        size_t size = regions->size;
        RFT_REFUSE_IF(region->size != size || size % _Alignof(refit_region_desc) != 0, error,
                      REFIT_ERR_INVALID,
                      "refit_region_desc.size is %zu in region %u of the list and %zu in the "
                      "first: set each to sizeof(refit_region_desc)",
                      region->size, at, size);
        RFT_TRY(rft_region_table_add(&offloader->regions, region, &id, error));
        region = (const void *)((const char *)region + size);
    }
    return REFIT_OK;
}

uint32_t refit_offloader_count(const refit_offloader *offloader)
{
    return offloader == NULL ? 0 : offloader->regions.count;
}

static refit_place place_of(refit_offloader *offloader, refit_region_id id)
{
    rft_lock(&offloader->lock);
    rft_operation_notice(offloader);
    refit_place place = offloader->regions.items[id].place;
    rft_unlock(&offloader->lock);
    return place;
}

refit_status refit_offloader_region(refit_offloader *offloader, refit_region_id region,
                                    refit_region_info *info, refit_error *error)
{
    RFT_REFUSE_IF(offloader == NULL || info == NULL, error, REFIT_ERR_INVALID,
                  "refit_offloader_region needs an offloader and a place for the description");
    RFT_REFUSE_IF(info->size < offsetof(refit_region_info, host_offset), error, REFIT_ERR_INVALID,
                  "refit_region_info.size is %zu: set it to sizeof(refit_region_info)", info->size);
    RFT_TRY(find_region(offloader, region, error));
    const rft_region *from = &offloader->regions.items[region];
    const refit_region_info full = {.size = info->size,
                                    .name = from->name,
                                    .memory = from->bound ? from->memory : NULL,
                                    .bytes = from->bytes,
                                    .host_offset = from->host_offset,
                                    .policy = from->policy,
                                    .group = from->group,
                                    .priority = from->priority,
                                    .place = place_of(offloader, region),
                                    .bound = from->bound,
                                    .in_arena = from->arena != NULL};
    memcpy(info, &full,
           rft_min_u64(full.size, sizeof full)); /* an older caller has room for less */
    return REFIT_OK;
}

refit_status refit_offloader_unbind(refit_offloader *offloader, refit_region_id region,
                                    refit_error *error)
{
    RFT_REFUSE_IF(offloader == NULL, error, REFIT_ERR_INVALID, "there is no offloader");
    RFT_TRY(find_region(offloader, region, error));
    refit_offloader_state state = refit_offloader_get_state(offloader);
    rft_region *item = &offloader->regions.items[region];
    RFT_REFUSE_IF(state != REFIT_OFFLOADED && state != REFIT_FAILED, error, REFIT_ERR_STATE,
                  "region %s cannot lose its memory in %s: offload and finish first", item->name,
                  refit_offloader_state_name(state));
    RFT_REFUSE_IF(item->place != REFIT_ON_HOST, error, REFIT_ERR_STATE,
                  "the bytes of region %s are on the device: offload again first", item->name);
    RFT_REFUSE_IF(item->arena != NULL, error, REFIT_ERR_INVALID,
                  "region %s lies in an arena, which keeps its address: refit_offloader_finish "
                  "gives its memory back",
                  item->name);
    if (!item->bound) return REFIT_OK;
    rft_region_detach(&offloader->regions, region);
    rft_lock(&offloader->lock);
    offloader->figures.reclaimed_last += item->bytes;
    rft_unlock(&offloader->lock);
    return REFIT_OK;
}

refit_status refit_offloader_bind(refit_offloader *offloader, refit_region_id region, void *memory,
                                  refit_error *error)
{
    RFT_REFUSE_IF(offloader == NULL, error, REFIT_ERR_INVALID, "there is no offloader");
    RFT_TRY(find_region(offloader, region, error));
    refit_offloader_state state = refit_offloader_get_state(offloader);
    const rft_region *item = &offloader->regions.items[region];
    RFT_REFUSE_IF(state == REFIT_OFFLOADING || state == REFIT_RESTORING, error, REFIT_ERR_STATE,
                  "region %s cannot move while copies run (%s): finish first", item->name,
                  refit_offloader_state_name(state));
    return rft_region_attach(&offloader->regions, region, memory, error);
}

refit_status refit_offloader_unbind_each(refit_offloader *offloader, const refit_region_id *regions,
                                         uint32_t count, refit_error *error)
{
    RFT_REFUSE_IF(regions == NULL && count > 0, error, REFIT_ERR_INVALID,
                  "refit_offloader_unbind_each needs the regions");
    for (uint32_t at = 0; at < count; at++) {
        RFT_TRY(refit_offloader_unbind(offloader, regions[at], error));
    }
    return REFIT_OK;
}

refit_status refit_offloader_bind_each(refit_offloader *offloader, const refit_region_id *regions,
                                       void *const *memory, uint32_t count, refit_error *error)
{
    RFT_REFUSE_IF((regions == NULL || memory == NULL) && count > 0, error, REFIT_ERR_INVALID,
                  "refit_offloader_bind_each needs the regions, and an address for each");
    for (uint32_t at = 0; at < count; at++) {
        RFT_TRY(refit_offloader_bind(offloader, regions[at], memory[at], error));
    }
    return REFIT_OK;
}
