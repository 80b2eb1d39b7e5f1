/*
 * Which regions leave as what their weights lack, how much room their exceptions get, and what is
 * made of the verdicts.
 *
 * How many weights are no rounding of their masters is known only in stream order, behind the last
 * optimizer step. So a plan gives each unit a little room at first; an offload for which that was
 * not enough fails before anything has left, and says how much it would have been, and the next
 * plan goes by that. A region that does not fit twice, or would save less than a quarter, leaves
 * whole. Copies are started by the mover; here are only those of offload.verify and of leases,
 * which wait.
 */
#include "offload/masters.h"

#include <inttypes.h>
#include <string.h>

#include "base/alloc.h"
#include "base/checked.h"
#include "offload/offloader.h"

/* Fewer elements would cost more in launches than they save. */
#define ELEMENTS_LEAST RFT_MASTER_BLOCK

/* The room of a unit: one block of 64 whole, or 2,000 exceptions, in a unit of full length. */
#define ROOM_LEAST      64u
#define ROOM_SHARE      32u
#define MISFITS_MOST    2u
#define SHARE_MOST(all) ((all) / 4 * 3)

/* ---- Places */

uint64_t rft_masters_stretches(const rft_region *region)
{
    return (region->bytes / 4 + region->stretch - 1) / region->stretch;
}

uint64_t rft_masters_at(const rft_region *region, uint64_t first)
{
    return region->host_offset + RFT_MASTERS_HEAD + rft_master_bytes(first, region->room);
}

rft_master_job rft_masters_job(const rft_region *region, char *staging, uint64_t first)
{
    return (rft_master_job){.master = region->memory + 4 * first,
                            .weights = region->weights + first,
                            .coded = staging + RFT_MASTERS_HEAD,
                            .verdict = (rft_master_verdict *)(void *)staging,
                            .elements = rft_min_u64(region->stretch, region->bytes / 4 - first),
                            .room = region->room};
}

/* ---- Which are coded */

static bool can_code(const refit_offloader *offloader, const rft_region *region)
{
    const refit_config *config = &offloader->config;
    return config->offload_masters == REFIT_MASTERS_AUTO && config->use_pinned_optimizer_offload &&
           offloader->caps.masters && region->weights != NULL && region->memory != NULL &&
           rft_region_table_home(&offloader->regions) == REFIT_HOME_DEVICE &&
           region->policy == REFIT_KEEP && region->misfits < MISFITS_MOST &&
           region->bytes / 4 >= ELEMENTS_LEAST;
}

/* Twice what was wanted when it did not fit: it may grow. */
static uint32_t choose_room(const rft_region *region)
{
    uint64_t unit = rft_min_u64(region->bytes / 4, RFT_MASTER_UNIT);
    uint64_t room = ROOM_LEAST + unit / ROOM_SHARE + (uint64_t)2 * region->need;
    return (uint32_t)rft_min_u64((room + 15) / 16 * 16, RFT_MASTER_ROOM);
}

/* As many whole units as the staging holds, and as a rate limit lets through in one step, but one.
 */
static uint64_t choose_stretch(const refit_offloader *offloader, uint32_t room)
{
    uint64_t step = rft_mover_step_bytes(offloader->config.offload_rate_limit);
    uint64_t most = offloader->config.offload_staging_bytes - RFT_MASTERS_HEAD;
    if (step != 0) most = rft_min_u64(most, step);
    uint64_t units = most / rft_master_bytes(RFT_MASTER_UNIT, room);
    return rft_max_u64(units, 1) * RFT_MASTER_UNIT;
}

static void decide(const refit_offloader *offloader, rft_region *region)
{
    region->coded = false;
    region->host_bytes = region->bytes;
    if (!can_code(offloader, region)) return;
    uint32_t room = choose_room(region);
    uint64_t bytes = RFT_MASTERS_HEAD + rft_master_bytes(region->bytes / 4, room);
    if (bytes > SHARE_MOST(region->bytes)) return;
    region->coded = true;
    region->room = room;
    region->stretch = choose_stretch(offloader, room);
    region->host_bytes = bytes;
}

refit_status rft_masters_decide(refit_offloader *offloader, refit_error *error)
{
    rft_region_table *regions = &offloader->regions;
    for (uint32_t id = 0; id < regions->count; id++) {
        rft_region *region = &regions->items[id];
        decide(offloader, region);
        if (!region->coded) continue;
        uint32_t other = rft_span_tree_find(&regions->spans, (uint64_t)(uintptr_t)region->weights,
                                            region->bytes / 2);
        RFT_REFUSE_IF(other != RFT_NO_SPAN, error, REFIT_ERR_INVALID,
                      "the weights of region %s lie in region %s and would leave with it: give it "
                      "no weights",
                      region->name, regions->items[other].name);
    }
    return REFIT_OK;
}

/* ---- The staging */

/* What the longest stretch takes; 0: nothing is coded. */
static uint64_t measure_staging(const refit_offloader *offloader)
{
    uint64_t most = 0;
    for (uint32_t id = 0; id < offloader->regions.count; id++) {
        const rft_region *region = &offloader->regions.items[id];
        if (!region->coded) continue;
        uint64_t elements = rft_min_u64(region->stretch, region->bytes / 4);
        most = rft_max_u64(most, RFT_MASTERS_HEAD + rft_master_bytes(elements, region->room));
    }
    return (most + 511) / 512 * 512;
}

refit_status rft_masters_drop_staging(refit_offloader *offloader, refit_error *error)
{
    if (offloader->staging == NULL) return REFIT_OK;
    RFT_TRY(refit_memory_free(offloader->device, offloader->staging, error));
    offloader->staging = NULL;
    offloader->staging_bytes = 0;
    return REFIT_OK;
}

/* With offload.verify a second one of the same size lies behind it: groups are compared while
 * others are still leaving. */
refit_status rft_masters_take_staging(refit_offloader *offloader, refit_error *error)
{
    uint64_t need = measure_staging(offloader);
    uint64_t bytes = offloader->config.offload_verify ? 2 * need : need;
    void *memory;
    refit_error why;
    if (need != 0 && offloader->staging_bytes >= need) return REFIT_OK;
    RFT_TRY(rft_masters_drop_staging(offloader, error));
    if (need == 0) return REFIT_OK;
    refit_status status = refit_memory_alloc(offloader->device, bytes, &memory, &why);
    RFT_REFUSE_IF(status != REFIT_OK, error, status,
                  "%" PRIu64 " bytes of device memory for masters on their way are not to be had "
                  "(lower offload.staging_bytes, or set offload.masters to whole): %s",
                  bytes, why.text);
    offloader->staging = memory;
    offloader->staging_bytes = need;
    return REFIT_OK;
}

/* ---- Verdicts */

static refit_status judge_offload(refit_offloader *offloader, rft_region *region,
                                  const rft_master_verdict *verdict, refit_error *error)
{
    if (verdict->found == 0) return REFIT_OK;
    if (verdict->need > region->need) region->need = verdict->need;
    region->misfits++;
    offloader->misfits = true;
    return rft_fail(error, REFIT_ERR_LIMIT,
                    "more weights of region %s than expected are no rounding of its masters: what "
                    "they lack needs %" PRIu32 " bytes of a room of %" PRIu32 ", and nothing has "
                    "left; offload again, which makes room",
                    region->name, verdict->need, region->room);
}

static refit_status judge_restore(const rft_region *region, uint32_t found, refit_error *error)
{
    RFT_REFUSE_IF((found & RFT_MASTER_CHANGED) != 0, error, REFIT_ERR_CORRUPT,
                  "the weights of region %s were changed while its masters were away, and the "
                  "masters of those weights have not returned: make the weights what they were, or "
                  "tell where they are (refit_offloader_bind_weights), and restore again",
                  region->name);
    RFT_REFUSE_IF(found != 0, error, REFIT_ERR_CORRUPT,
                  "region %s (%" PRIu64 " bytes) cannot be decoded: host memory or a copy is at "
                  "fault",
                  region->name, region->bytes);
    return REFIT_OK;
}

refit_status rft_masters_judge(refit_offloader *offloader, rft_region *region, bool out,
                               refit_error *error)
{
    rft_master_verdict verdict;
    memcpy(&verdict, rft_image_of(offloader, region), sizeof verdict);
    return out ? judge_offload(offloader, region, &verdict, error)
               : judge_restore(region, verdict.found, error);
}

/* ---- Compared, for offload.verify */

/* Bytes of the image from `at` on to the device; no copy lies across two page-locks. */
static refit_status copy_in(const refit_offloader *offloader, char *to, uint64_t at, uint64_t bytes,
                            refit_error *error)
{
    const char *image = rft_host_arena_base(offloader->image);
    const rft_layout *layout = &offloader->schedule.layout;
    for (uint32_t i = 0; i < layout->slab_count && bytes > 0; i++) {
        uint64_t end = layout->slabs[i].offset + layout->slabs[i].bytes;
        if (at >= end) continue;
        uint64_t part = rft_min_u64(bytes, end - at);
        RFT_TRY(
            refit_stream_copy(offloader->device, REFIT_STREAM_NONE, to, image + at, part, error));
        to += part;
        at += part;
        bytes -= part;
    }
    return REFIT_OK;
}

static refit_status compare_stretch(const refit_offloader *offloader, const rft_region *region,
                                    char *staging, uint64_t first, refit_error *error)
{
    rft_master_job job = rft_masters_job(region, staging, first);
    job.compares = true;
    RFT_TRY(copy_in(offloader, job.coded, rft_masters_at(region, first),
                    rft_master_bytes(job.elements, job.room), error));
    return rft_device_master_decode(offloader->device, REFIT_STREAM_NONE, &job, error);
}

static refit_status compare(const refit_offloader *offloader, const rft_region *region,
                            rft_master_verdict *verdict, refit_error *error)
{
    refit_device *device = offloader->device;
    char *staging = offloader->staging + offloader->staging_bytes;
    RFT_TRY(rft_device_zero(device, REFIT_STREAM_NONE, staging, sizeof *verdict, error));
    for (uint64_t first = 0; first < region->bytes / 4; first += region->stretch) {
        RFT_TRY(compare_stretch(offloader, region, staging, first, error));
    }
    return refit_stream_copy(device, REFIT_STREAM_NONE, verdict, staging, sizeof *verdict, error);
}

refit_status rft_masters_compare(const refit_offloader *offloader, const rft_region *region,
                                 refit_error *error)
{
    rft_master_verdict verdict = {0};
    refit_status status = compare(offloader, region, &verdict, error);
    /* To the caller of finish TIMEOUT means to wait again; this operation is over. */
    RFT_REFUSE_IF(status == REFIT_ERR_TIMEOUT, error, REFIT_ERR_DEVICE,
                  "region %s could not be verified: the device has not read it within "
                  "offload.timeout_ms",
                  region->name);
    RFT_TRY(status);
    RFT_REFUSE_IF(verdict.found != 0, error, REFIT_ERR_CORRUPT,
                  "region %s (%" PRIu64 " bytes) is not in the image as it is on the device: host "
                  "memory or a copy is at fault",
                  region->name, region->bytes);
    return REFIT_OK;
}

/* ---- Read by the CPU, for leases */

/* Weights from element `first` on, where the CPU can read them. */
static refit_status fetch_weights(const refit_offloader *offloader, const rft_region *region,
                                  uint64_t first, uint32_t elements, uint16_t *room,
                                  const uint16_t **out, refit_error *error)
{
    *out = region->weights + first;
    if (offloader->caps.host_addressable) return REFIT_OK;
    *out = room;
    return refit_stream_copy(offloader->device, REFIT_STREAM_NONE, room, region->weights + first,
                             sizeof *room * elements, error);
}

static refit_status read_unit(const refit_offloader *offloader, const rft_region *region,
                              uint64_t first, char *to, uint16_t *room, refit_error *error)
{
    rft_master_verdict verdict = {0};
    char *image = rft_host_arena_base(offloader->image);
    uint32_t elements = (uint32_t)rft_min_u64(RFT_MASTER_UNIT, region->bytes / 4 - first);
    const uint16_t *weights;
    RFT_TRY(fetch_weights(offloader, region, first, elements, room, &weights, error));
    rft_master_join(&(rft_master_job){.master = to + 4 * first,
                                      .weights = weights,
                                      .coded = image + rft_masters_at(region, first),
                                      .verdict = &verdict,
                                      .elements = elements,
                                      .room = region->room});
    return judge_restore(region, verdict.found, error);
}

refit_status rft_masters_read(const refit_offloader *offloader, const rft_region *region, void *to,
                              refit_error *error)
{
    refit_status status = REFIT_OK;
    uint16_t *room = rft_calloc(RFT_MASTER_UNIT, sizeof *room);
    RFT_REFUSE_IF(room == NULL, error, REFIT_ERR_HOST_MEMORY,
                  "no host memory for the weights of region %s", region->name);
    for (uint64_t first = 0; first < region->bytes / 4 && status == REFIT_OK;
         first += RFT_MASTER_UNIT) {
        status = read_unit(offloader, region, first, to, room, error);
    }
    rft_free(room);
    return status;
}
