/*
 * offload.verify: a digest of each region as it leaves, compared when it is back.
 *
 * The digest is that of the device's bytes, taken by the CPU where it can read them and by the
 * device elsewhere: during an offload the image must match it before it counts, during a restore
 * the device must. On a device that can do neither (a GPU whose kernels could not be loaded) it is
 * the image's both times, which still finds host memory that changed meanwhile. Moves nothing.
 */
#include <inttypes.h>

#include "kernels/digest.h"
#include "offload/offloader.h"

static uint64_t digest_of(const void *bytes, uint64_t count)
{
    return rft_digest_finish(rft_digest_part(bytes, count, 0), count);
}

/* Of what the device holds, as far as it can be known. */
static refit_status digest_device(const refit_offloader *offloader, const rft_region *region,
                                  uint64_t *digest, refit_error *error)
{
    uint64_t sum = 0;
    bool readable = offloader->caps.host_addressable;
    if (readable || !offloader->caps.digests) {
        *digest =
            digest_of(readable ? region->memory : rft_image_of(offloader, region), region->bytes);
        return REFIT_OK;
    }
    refit_status status = rft_device_digest(offloader->device, REFIT_STREAM_NONE, region->memory,
                                            region->bytes, 0, &sum, error);
    /* To the caller of finish TIMEOUT means to wait again; this operation is over. */
    RFT_REFUSE_IF(status == REFIT_ERR_TIMEOUT, error, REFIT_ERR_DEVICE,
                  "region %s could not be verified: the device has not read it within "
                  "offload.timeout_ms",
                  region->name);
    *digest = rft_digest_finish(sum, region->bytes);
    return status;
}

/* Does what arrived equal what left? REFIT_ERR_CORRUPT, or why it cannot be said. */
static refit_status check_region(const refit_offloader *offloader, rft_direction direction,
                                 rft_region *region, refit_error *error)
{
    uint64_t device = 0;
    RFT_TRY(digest_device(offloader, region, &device, error));
    if (direction == RFT_OFFLOAD) region->digest = device;
    uint64_t arrived = direction == RFT_OFFLOAD
                           ? digest_of(rft_image_of(offloader, region), region->bytes)
                           : device;
    RFT_REFUSE_IF(arrived != region->digest, error, REFIT_ERR_CORRUPT,
                  "region %s (%" PRIu64 " bytes) does not match its digest: host memory or a copy "
                  "is at fault",
                  region->name, region->bytes);
    return REFIT_OK;
}

/* Did the operation move this region? Places change only when it ends. */
static bool is_moved(const rft_region *region, rft_direction direction)
{
    refit_place from = direction == RFT_OFFLOAD ? REFIT_ON_DEVICE : REFIT_ON_HOST;
    return region->policy == REFIT_KEEP && region->place == from;
}

static void note(const rft_region *region, const refit_error *why, rft_operation *found)
{
    if (found->corrupt == 0) found->corruption = *why;
    found->corrupt |= UINT64_C(1) << region->group;
}

void rft_check_groups(refit_offloader *offloader, uint64_t number, uint64_t groups)
{
    rft_lock(&offloader->lock);
    bool moving = rft_offloader_is_moving(offloader) && offloader->operation.number == number;
    rft_operation found = offloader->operation;
    rft_unlock(&offloader->lock);
    if (!moving) return;

    uint64_t todo = groups & ~found.checked;
    for (uint32_t id = 0; id < offloader->regions.count; id++) {
        rft_region *region = &offloader->regions.items[id];
        if ((todo >> region->group & 1) == 0 || !is_moved(region, found.direction)) continue;
        refit_error why;
        refit_status status = check_region(offloader, found.direction, region, &why);
        if (status != REFIT_OK) note(region, &why, &found);
    }

    rft_lock(&offloader->lock);
    offloader->operation.checked |= groups;
    offloader->operation.corrupt = found.corrupt;
    offloader->operation.corruption = found.corruption;
    rft_unlock(&offloader->lock);
}
