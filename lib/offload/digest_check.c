/*
 * offload.verify: a digest of each region as it leaves, compared when it is back.
 *
 * Where the CPU can read device memory the digest is that of the device's bytes: on the way out the
 * image must match it before it counts, on the way back the device must. Elsewhere it is the
 * image's both times, which still finds host memory that changed meanwhile. Moves nothing.
 */
#include <inttypes.h>

#include "kernels/digest.h"
#include "offload/offloader.h"

static uint64_t digest_of(const void *bytes, uint64_t count)
{
    return rft_digest_finish(rft_digest_part(bytes, count, 0), count);
}

/* Does what arrived equal what left? */
static bool check_region(const refit_offloader *offloader, rft_way way, rft_region *region)
{
    const void *image = rft_image_of(offloader, region);
    const void *device = offloader->caps.host_addressable ? region->memory : image;
    const void *source = way == RFT_WAY_OUT ? device : image;
    const void *target = way == RFT_WAY_OUT ? image : device;
    if (way == RFT_WAY_OUT) region->digest = digest_of(source, region->bytes);
    return digest_of(target, region->bytes) == region->digest;
}

/* Did operation `way` move this region? Places change only when it ends. */
static bool is_moved(const rft_region *region, rft_way way)
{
    refit_place from = way == RFT_WAY_OUT ? REFIT_ON_DEVICE : REFIT_ON_HOST;
    return region->policy == REFIT_KEEP && region->place == from;
}

static void note_corruption(const rft_region *region, rft_operation *found)
{
    if (found->corrupt == 0) {
        (void)rft_fail(&found->corruption, REFIT_ERR_CORRUPT,
                       "region %s (%" PRIu64 " bytes) does not match its digest: host memory or a "
                       "copy is at fault",
                       region->name, region->bytes);
    }
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
        bool wanted = (todo >> region->group & 1) != 0 && is_moved(region, found.way);
        if (wanted && !check_region(offloader, found.way, region)) note_corruption(region, &found);
    }

    rft_lock(&offloader->lock);
    offloader->operation.checked |= groups;
    offloader->operation.corrupt = found.corrupt;
    offloader->operation.corruption = found.corruption;
    rft_unlock(&offloader->lock);
}
