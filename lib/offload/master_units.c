/*
 * Units of masters, and the host memory of those that do not fit into the image.
 *
 * What an encoding has found is known once its copies are over: the verdict says that a unit has
 * not fitted, the tables in the image say which. Until the unit has been copied whole, its bytes
 * are where they were encoded from, and the window keeps them there.
 *
 * Weights that are no rounding of their masters mostly stay so. A unit that has not fitted twice
 * in a row goes whole at once for 1, 3, 7 … 63 times before it is encoded again.
 *
 * Must not know: windows, plans, copies.
 */
#include "offload/master_units.h"

#include <inttypes.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/checked.h"
#include "base/log.h"
#include "offload/offloader.h"

#define RESTS_MOST 63u

uint64_t rft_unit_count(uint64_t elements)
{
    return (elements + RFT_MASTER_UNIT - 1) / RFT_MASTER_UNIT;
}

static uint64_t count_units(const rft_region *region)
{
    return rft_unit_count(region->bytes / 4);
}

uint32_t rft_unit_elements(const rft_region *region, uint64_t number)
{
    return (uint32_t)rft_min_u64(RFT_MASTER_UNIT, region->bytes / 4 - number * RFT_MASTER_UNIT);
}

rft_unit_place rft_unit_route(const rft_unit *unit, bool out)
{
    if (!out) return unit->place;
    return unit->rest > 0 ? RFT_UNIT_WHOLE : RFT_UNIT_CODED;
}

/* ---- Memory */

static uint64_t page_bytes(void)
{
    return (uint64_t)sysconf(_SC_PAGESIZE);
}

/* Whole pages, which no other page-lock shares. */
static uint64_t pages_of(const rft_region *region, uint64_t number)
{
    uint64_t page = page_bytes(), bytes = (uint64_t)4 * rft_unit_elements(region, number);
    return (bytes + page - 1) / page * page;
}

static void free_whole(refit_offloader *offloader, rft_region *region, uint64_t number)
{
    rft_unit *unit = &region->units[number];
    uint64_t bytes = pages_of(region, number);
    if (unit->block == NULL) return;
    if (unit->pinned) rft_device_host_unpin(offloader->device, unit->whole, bytes);
    offloader->unit_bytes[unit->pinned] -= bytes;
    rft_free(unit->block);
    unit->block = unit->whole = NULL;
    unit->pinned = false;
}

/* Is the image page-locked? Then so is what takes its place. */
static bool wants_pin(const refit_offloader *offloader)
{
    return rft_host_arena_describe(offloader->image).pinned_bytes != 0;
}

static refit_status take_whole(refit_offloader *offloader, rft_region *region, uint64_t number,
                               refit_error *error)
{
    rft_unit *unit = &region->units[number];
    uint64_t page = page_bytes(), bytes = pages_of(region, number);
    refit_error why;
    if (unit->block != NULL) return REFIT_OK;
    refit_status room = rft_ration_take(&offloader->unit_ration, bytes + page, &why);
    if (room == REFIT_OK) unit->block = rft_calloc(bytes + page, 1);
    RFT_REFUSE_IF(
        unit->block == NULL, error, REFIT_ERR_HOST_MEMORY,
        "no host memory for %" PRIu64 " bytes of region %s, whose weights are no rounding "
        "of its masters%s%s: they are safe on the device; free some memory and call "
        "again, or set offload.masters to whole from the start",
        bytes, region->name, room == REFIT_OK ? "" : ", as ", room == REFIT_OK ? "" : why.text);
    unit->whole = (char *)unit->block + (page - (uintptr_t)unit->block % page) % page;
    unit->pinned = wants_pin(offloader) &&
                   rft_device_host_pin(offloader->device, unit->whole, bytes, &why) == REFIT_OK;
    if (!unit->pinned && wants_pin(offloader)) {
        rft_log(REFIT_LOG_WARNING, "masters of region %s that travel whole stay pageable: %s",
                region->name, why.text);
    }
    offloader->unit_bytes[unit->pinned] += bytes;
    return REFIT_OK;
}

/* ---- All units */

static void drop_units(refit_offloader *offloader, rft_region *region)
{
    if (region->units == NULL) return;
    for (uint64_t number = 0; number < count_units(region); number++) {
        free_whole(offloader, region, number);
    }
    rft_free(region->units);
    region->units = NULL;
}

void rft_units_drop(refit_offloader *offloader)
{
    for (uint32_t id = 0; id < offloader->regions.count; id++) {
        drop_units(offloader, &offloader->regions.items[id]);
    }
}

refit_status rft_units_open(refit_offloader *offloader, refit_error *error)
{
    rft_units_drop(offloader);
    if (rft_region_table_home(&offloader->regions) == REFIT_HOME_DEVICE) return REFIT_OK;
    for (uint32_t id = 0; id < offloader->regions.count; id++) {
        rft_region *region = &offloader->regions.items[id];
        if (!region->coded) continue;
        region->units = rft_calloc(count_units(region), sizeof *region->units);
        RFT_REFUSE_IF(region->units == NULL, error, REFIT_ERR_HOST_MEMORY,
                      "no host memory for the units of region %s", region->name);
    }
    return REFIT_OK;
}

void rft_units_trim(refit_offloader *offloader)
{
    for (uint32_t id = 0; id < offloader->regions.count; id++) {
        rft_region *region = &offloader->regions.items[id];
        for (uint64_t number = 0; region->units != NULL && number < count_units(region); number++) {
            rft_unit *unit = &region->units[number];
            if (unit->place == RFT_UNIT_WHOLE) continue;
            free_whole(offloader, region, number);
            unit->rest = 0;
        }
    }
}

void rft_units_reset(refit_offloader *offloader)
{
    for (uint32_t id = 0; id < offloader->regions.count; id++) {
        rft_region *region = &offloader->regions.items[id];
        if (region->units == NULL || region->place != REFIT_ON_DEVICE) continue;
        for (uint64_t number = 0; number < count_units(region); number++) {
            region->units[number].place = RFT_UNIT_CODED;
            region->units[number].rest = 0;
        }
    }
}

/* ---- Copies out are over */

static void note_misfit(rft_unit *unit)
{
    unit->misfit = true;
    unit->rest = unit->rests;
    unit->rests = (uint8_t)rft_min_u64(2 * unit->rests + 1u, RESTS_MOST);
}

/* What the unit needs of its room. */
static uint32_t measure_need(const refit_offloader *offloader, const rft_region *region,
                             uint64_t number)
{
    const char *image = rft_host_arena_base(offloader->image);
    return rft_master_need(image + rft_masters_at(region, number * RFT_MASTER_UNIT),
                           rft_unit_elements(region, number));
}

/* `full`: some unit of those that were copied together has not fitted. */
static refit_status note_left(refit_offloader *offloader, rft_region *region, uint64_t number,
                              bool full, refit_error *error)
{
    rft_unit *unit = &region->units[number];
    if (unit->rest > 0) {
        unit->rest--;
        unit->place = RFT_UNIT_WHOLE;
        return REFIT_OK;
    }
    uint32_t need = full ? measure_need(offloader, region, number) : 0;
    if (need <= region->room) {
        unit->place = RFT_UNIT_CODED;
        unit->rests = 0;
        return REFIT_OK;
    }
    if (need > region->need) region->need = need; /* the next seal makes room for it */
    RFT_TRY(take_whole(offloader, region, number, error));
    note_misfit(unit);
    return REFIT_OK;
}

refit_status rft_units_left(refit_offloader *offloader, rft_region *region, uint64_t first,
                            uint64_t count, uint32_t *misfits, refit_error *error)
{
    uint64_t end = rft_unit_count(first + count);
    bool full = rft_masters_found(offloader, region, first, count) != 0;
    uint32_t before = *misfits;
    for (uint64_t number = first / RFT_MASTER_UNIT; number < end; number++) {
        region->units[number].misfit = false;
        RFT_TRY(note_left(offloader, region, number, full, error));
        *misfits += region->units[number].misfit;
    }
    RFT_REFUSE_IF(full && *misfits == before, error, REFIT_ERR_CORRUPT,
                  "region %s has left, and what the device says of it is not in the image: host "
                  "memory or a copy is at fault",
                  region->name);
    return REFIT_OK;
}

void rft_units_went_whole(rft_region *region, uint64_t first, uint64_t count)
{
    uint64_t end = rft_unit_count(first + count);
    for (uint64_t number = first / RFT_MASTER_UNIT; number < end; number++) {
        rft_unit *unit = &region->units[number];
        if (unit->misfit) unit->place = RFT_UNIT_WHOLE;
        unit->misfit = false;
    }
}
