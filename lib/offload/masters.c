/*
 * Which regions leave as what their weights lack, how much room their exceptions get, and what is
 * made of the results.
 *
 * How many weights are not roundings of their masters is known only in stream order, after the
 * last optimizer step. So a plan gives each unit a little room at first; an offload for which that
 * was not enough fails before anything has left, and says how much it would have been, and the next
 * plan goes by that. A region that does not fit twice, or would save less than a quarter, leaves
 * whole. Copies are started by the mover; here are only those of offload.verify and of read locks,
 * which wait. Independent of windows and plans.
 */
#include "offload/masters.h"

#include <inttypes.h>
#include <string.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/checked.h"
#include "base/log.h"
#include "kernels/digest.h"
#include "offload/offloader.h"

/* Fewer elements would cost more in launches than they save. */
#define ELEMENTS_LEAST RFT_MASTER_BLOCK

/* The room of a unit: one block of 64 whole, or 2,000 exceptions, in a unit of full length. */
#define ROOM_LEAST      64u
#define ROOM_SHARE      32u
#define MISFITS_MOST    2u
#define SHARE_MOST(all) ((all) / 4 * 3)
#define RESTS_MOST      63u

/* ---- Units of regions that live on the host ---------------------------------------------------
 *
 *     ZEROS ──copied out──► CODED ◄──fits───── copied out ─────does not──► WHOLE
 *
 * What an encoding has found is known once its copies are over: the result says that a unit has
 * not fitted, the tables in the image say which. Until the unit has been copied whole, its bytes
 * are where they were encoded from, and the window keeps them there.
 *
 * Weights that are not roundings of their masters mostly stay so. A unit that has not fitted twice
 * in a row goes whole at once for 1, 3, 7 … 63 times before it is encoded again.
 */

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
        "no host memory for %" PRIu64 " bytes of region %s, whose weights are not roundings "
        "of its masters%s%s: they are safe on the device; free some memory and call "
        "again, or set offload.masters to whole from the start",
        bytes, region->name, room == REFIT_OK ? "" : ", as ", room == REFIT_OK ? "" : why.text);
    unit->whole = (char *)unit->block + (page - (uintptr_t)unit->block % page) % page;
    unit->pinned = wants_pin(offloader) && rft_device_host_pin(offloader->device, unit->whole,
                                                               bytes, false, &why) == REFIT_OK;
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
    if (rft_region_table_placement(&offloader->regions) == REFIT_PLACEMENT_DEVICE) return REFIT_OK;
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
    if (offloader->schedule.chunks == 0) return;
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

/* ---- Their way between the image and the device */

uint64_t rft_masters_at(const rft_region *region, uint64_t first)
{
    return region->host_offset + region->head + rft_master_bytes(first, region->room);
}

/* Of elements that move together from `first` on. */
static rft_master_result *result_of(char *image, const rft_region *region, uint64_t first)
{
    rft_master_result *results = (void *)(image + region->host_offset);
    return region->units == NULL ? results : &results[first / RFT_MASTER_UNIT];
}

/* A unit may travel by itself. A short one takes more of the image than it has bytes. */
rft_masters_need rft_masters_most(const rft_region *region, uint64_t elements)
{
    rft_masters_need need = {.chunks = (elements + region->chunk - 1) / region->chunk,
                             .bytes = rft_master_bytes(elements, region->room)};
    if (region->units != NULL) {
        need.chunks = rft_unit_count(elements);
        need.bytes += 4 * elements;
    }
    need.pieces = need.chunks;
    return need;
}

/* Elements [first, end) that move in one way. */
typedef struct masters_run {
    uint64_t first;
    uint64_t end;
    rft_unit_place place; /* of each of their units; WHOLE: of one unit */
    char *whole;          /* of that unit: its own memory */
} masters_run;

/* The run that begins with element `first`, of those before `end`. */
static masters_run find_run(const rft_region *region, uint64_t first, uint64_t end, bool out)
{
    masters_run run = {.first = first, .end = end, .place = RFT_UNIT_CODED};
    if (region->units == NULL) return run;
    uint64_t number = first / RFT_MASTER_UNIT, last = rft_unit_count(end);
    run.place = rft_unit_route(&region->units[number], out);
    run.whole = region->units[number].whole;
    do {
        number++;
    } while (number < last && run.place != RFT_UNIT_WHOLE &&
             rft_unit_route(&region->units[number], out) == run.place);
    run.end = rft_min_u64(end, number * RFT_MASTER_UNIT);
    return run;
}

static void add_piece(rft_masters_way *way, const rft_masters_part *part, rft_piece piece)
{
    piece.group = part->group;
    piece.allocation = part->allocation;
    piece.known_memory = true; /* when the region, or the window, got its address */
    way->pieces[way->count++] = piece;
}

/* The host's side of one chunk, which begins at `at` of the image. */
static void add_chunk(rft_masters_way *way, const rft_masters_part *part, const rft_recode *recode,
                      uint64_t at)
{
    const rft_master_job *job = &recode->job;
    uint64_t end = at + rft_master_bytes(job->elements, job->room);
    char *coded = job->coded;
    for (uint32_t number = rft_layout_find(way->layout, at); at < end; number++) {
        const rft_slab *slab = &way->layout->slabs[number];
        uint64_t stop = rft_min_u64(end, slab->offset + slab->bytes);
        rft_piece piece = {.to = recode->out ? way->image + at : coded,
                           .from = recode->out ? coded : way->image + at,
                           .bytes = stop - at,
                           .slab = number,
                           .recode = recode};
        add_piece(way, part, piece);
        coded += piece.bytes;
        at = stop;
    }
}

static rft_master_job job_of(const rft_region *region, char *memory, char *staging, uint64_t first,
                             uint64_t end)
{
    return (rft_master_job){.master = memory,
                            .weights = region->weights + first,
                            .coded = staging + RFT_MASTERS_HEAD,
                            .result = (rft_master_result *)(void *)staging,
                            .elements = rft_min_u64(region->chunk, end - first),
                            .room = region->room};
}

static void add_coded(rft_masters_way *way, const rft_masters_part *part, const masters_run *run)
{
    const rft_region *region = part->region;
    for (uint64_t first = run->first; first < run->end; first += region->chunk) {
        rft_recode *recode = &way->recodes[way->recode_count++];
        bool last = run->end - first <= region->chunk;
        char *memory = part->memory + 4 * (first - part->first);
        *recode = (rft_recode){
            .job = job_of(region, memory, way->staging, first, run->end),
            .out = way->out,
            .begins = first == run->first,
            .result = last ? result_of(way->image, region, run->first) : NULL,
        };
        add_chunk(way, part, recode, rft_masters_at(region, first));
    }
}

/* Between the device and the unit's own memory. Its number as that of a slab is no other's, so that
 * no copy lies across two of these. */
static void add_whole(rft_masters_way *way, const rft_masters_part *part, uint64_t number,
                      char *whole)
{
    char *memory = part->memory + 4 * (number * RFT_MASTER_UNIT - part->first);
    add_piece(way, part,
              (rft_piece){.to = way->out ? whole : memory,
                          .from = way->out ? memory : whole,
                          .bytes = (uint64_t)4 * rft_unit_elements(part->region, number),
                          .slab = way->layout->slab_count + way->count});
}

static void add_zeros(rft_masters_way *way, const rft_masters_part *part, const masters_run *run)
{
    char *memory = part->memory + 4 * (run->first - part->first);
    add_piece(way, part, (rft_piece){.to = memory, .bytes = 4 * (run->end - run->first)});
}

void rft_masters_add(rft_masters_way *way, const rft_masters_part *part)
{
    const rft_region *region = part->region;
    uint64_t end = part->first + part->count;
    for (uint64_t first = part->first; region->units != NULL && first < end;
         first += RFT_MASTER_UNIT) {
        *result_of(way->image, region, first) = (rft_master_result){0};
    }
    for (uint64_t first = part->first; first < end;) {
        masters_run run = find_run(region, first, end, way->out);
        switch (run.place) {
        case RFT_UNIT_CODED: add_coded(way, part, &run); break;
        case RFT_UNIT_WHOLE: add_whole(way, part, first / RFT_MASTER_UNIT, run.whole); break;
        case RFT_UNIT_ZEROS: add_zeros(way, part, &run); break;
        }
        first = run.end;
    }
}

void rft_masters_add_misfits(rft_masters_way *way, const rft_masters_part *part)
{
    uint64_t end = rft_unit_count(part->first + part->count);
    for (uint64_t number = part->first / RFT_MASTER_UNIT; number < end; number++) {
        const rft_unit *unit = &part->region->units[number];
        if (unit->misfit) add_whole(way, part, number, unit->whole);
    }
}

/* ---- Which are coded */

static bool lives_on_host(const refit_offloader *offloader)
{
    return rft_region_table_placement(&offloader->regions) == REFIT_PLACEMENT_HOST;
}

static bool can_code(const refit_offloader *offloader, const rft_region *region)
{
    const refit_config *config = &offloader->config;
    return config->offload_masters == REFIT_MASTERS_AUTO && config->use_pinned_optimizer_offload &&
           offloader->caps.masters && region->weights != NULL &&
           (region->memory != NULL || lives_on_host(offloader)) && region->policy == REFIT_KEEP &&
           region->misfits < MISFITS_MOST && region->bytes / 4 >= ELEMENTS_LEAST;
}

/* Twice what was wanted when it did not fit: it may grow. */
static uint32_t choose_room(const rft_region *region)
{
    uint64_t unit = rft_min_u64(region->bytes / 4, RFT_MASTER_UNIT);
    uint64_t room = ROOM_LEAST + unit / ROOM_SHARE + (uint64_t)2 * region->need;
    return (uint32_t)rft_min_u64((room + 15) / 16 * 16, RFT_MASTER_ROOM);
}

/* As many whole units as a staging holds, and as a rate limit lets through in one step, at least
 * one. Windows share offload.staging_bytes between the directions. */
static uint64_t choose_chunk(const refit_offloader *offloader, uint32_t room)
{
    uint64_t step = rft_mover_step_bytes(offloader->config.offload_rate_limit);
    uint64_t bytes = offloader->config.offload_staging_bytes;
    uint64_t most = (lives_on_host(offloader) ? bytes / 2 : bytes) - RFT_MASTERS_HEAD;
    if (step != 0) most = rft_min_u64(most, step);
    uint64_t units = most / rft_master_bytes(RFT_MASTER_UNIT, room);
    return rft_max_u64(units, 1) * RFT_MASTER_UNIT;
}

static uint64_t align_head(uint64_t bytes)
{
    return (bytes + RFT_MASTERS_HEAD - 1) / RFT_MASTERS_HEAD * RFT_MASTERS_HEAD;
}

static void decide(const refit_offloader *offloader, rft_region *region)
{
    region->coded = false;
    region->host_bytes = region->bytes;
    if (!can_code(offloader, region)) return;
    uint32_t room = choose_room(region);
    uint64_t head = RFT_MASTERS_HEAD;
    if (lives_on_host(offloader)) {
        head = align_head(rft_unit_count(region->bytes / 4) * sizeof(rft_master_result));
    }
    uint64_t bytes = head + rft_master_bytes(region->bytes / 4, room);
    if (bytes > SHARE_MOST(region->bytes)) return;
    region->coded = true;
    region->head = head;
    region->room = room;
    region->chunk = choose_chunk(offloader, room);
    region->host_bytes = bytes;
}

/* A step changes the weights of its masters: others by the same weights could not come in again. */
static refit_status check_shared(const rft_region_table *regions, refit_error *error)
{
    rft_span_tree weights = {0};
    rft_span_tree_reset(&weights);
    refit_status status = rft_span_tree_reserve(&weights, regions->count, error);
    for (uint32_t id = 0; id < regions->count && status == REFIT_OK; id++) {
        const rft_region *region = &regions->items[id];
        uint64_t begin = (uint64_t)(uintptr_t)region->weights;
        if (!region->coded) continue;
        uint32_t other = rft_span_tree_find(&weights, begin, region->bytes / 2);
        if (other != RFT_NO_SPAN) {
            status = rft_fail(error, REFIT_ERR_INVALID,
                              "regions %s and %s have weights in common, so a step of one would "
                              "lose masters of the other: give one of them no weights",
                              regions->items[other].name, region->name);
        } else {
            rft_span_tree_insert(&weights, id, begin, region->bytes / 2);
        }
    }
    rft_span_tree_close(&weights);
    return status;
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
    return lives_on_host(offloader) ? check_shared(regions, error) : REFIT_OK;
}

/* ---- The staging */

/* What the longest chunk takes; 0: nothing is coded. */
static uint64_t measure_staging(const refit_offloader *offloader)
{
    uint64_t most = 0;
    for (uint32_t id = 0; id < offloader->regions.count; id++) {
        const rft_region *region = &offloader->regions.items[id];
        if (!region->coded) continue;
        uint64_t elements = rft_min_u64(region->chunk, region->bytes / 4);
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
    offloader->staging_count = 0;
    return REFIT_OK;
}

/* Windows have both directions under way. With offload.verify groups are compared while others are
 * still leaving. */
refit_status rft_masters_take_staging(refit_offloader *offloader, refit_error *error)
{
    uint64_t need = measure_staging(offloader);
    uint32_t count = offloader->config.offload_verify || lives_on_host(offloader) ? 2 : 1;
    uint64_t bytes = count * need;
    void *memory;
    refit_error why;
    bool enough = offloader->staging_bytes >= need && offloader->staging_count >= count;
    if (need != 0 && enough) return REFIT_OK;
    RFT_TRY(rft_masters_drop_staging(offloader, error));
    if (need == 0) return REFIT_OK;
    refit_status status = refit_memory_alloc(offloader->device, bytes, &memory, &why);
    RFT_REFUSE_IF(status != REFIT_OK, error, status,
                  "%" PRIu64 " bytes of device memory for masters on their way are not to be had "
                  "(lower offload.staging_bytes, or set offload.masters to whole): %s",
                  bytes, why.text);
    offloader->staging = memory;
    offloader->staging_bytes = need;
    offloader->staging_count = count;
    return REFIT_OK;
}

char *rft_masters_staging(const refit_offloader *offloader, bool out)
{
    if (out || offloader->staging == NULL) return offloader->staging;
    return offloader->staging + offloader->staging_bytes;
}

/* ---- Results */

static refit_status check_offload(refit_offloader *offloader, rft_region *region,
                                  const rft_master_result *result, refit_error *error)
{
    if (result->found == 0) return REFIT_OK;
    if (result->need > region->need) region->need = result->need;
    region->misfits++;
    offloader->misfits = true;
    return rft_fail(
        error, REFIT_ERR_LIMIT,
        "more weights of region %s than expected are not roundings of its masters: what "
        "they lack needs %" PRIu32 " bytes of a room of %" PRIu32 ", and nothing has "
        "left; offload again, which makes room",
        region->name, result->need, region->room);
}

static refit_status check_restore(const rft_region *region, uint32_t found, refit_error *error)
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

/* `count` elements from `first` on. */
static rft_master_result sum_results(const refit_offloader *offloader, const rft_region *region,
                                     uint64_t first, uint64_t count)
{
    char *image = rft_host_arena_base(offloader->image);
    if (region->units == NULL) return *result_of(image, region, 0);
    rft_master_result sum = {0};
    for (uint64_t at = first; at < first + count; at += RFT_MASTER_UNIT) {
        const rft_master_result *result = result_of(image, region, at);
        sum.found |= result->found;
        if (result->need > sum.need) sum.need = result->need;
    }
    return sum;
}

uint32_t rft_masters_found(const refit_offloader *offloader, const rft_region *region,
                           uint64_t first, uint64_t count)
{
    return sum_results(offloader, region, first, count).found;
}

refit_status rft_masters_check(refit_offloader *offloader, rft_region *region, bool out,
                               refit_error *error)
{
    rft_master_result result = sum_results(offloader, region, 0, region->bytes / 4);
    return out ? check_offload(offloader, region, &result, error)
               : check_restore(region, result.found, error);
}

refit_status rft_masters_arrived(const refit_offloader *offloader, const rft_region *region,
                                 uint64_t first, uint64_t count, refit_error *error)
{
    return check_restore(region, rft_masters_found(offloader, region, first, count), error);
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

static refit_status compare_coded(const refit_offloader *offloader, const rft_region *region,
                                  const masters_run *run, char *staging, refit_error *error)
{
    for (uint64_t first = run->first; first < run->end; first += region->chunk) {
        rft_master_job job = job_of(region, region->memory + 4 * first, staging, first, run->end);
        job.compares = true;
        RFT_TRY(copy_in(offloader, job.coded, rft_masters_at(region, first),
                        rft_master_bytes(job.elements, job.room), error));
        RFT_TRY(rft_device_master_decode(offloader->device, REFIT_STREAM_NONE, &job, error));
    }
    return REFIT_OK;
}

static uint64_t digest_of(const void *bytes, uint64_t count)
{
    return rft_digest_finish(rft_digest_part(bytes, count, 0), count);
}

static refit_status compare_whole(const refit_offloader *offloader, const rft_region *region,
                                  uint64_t number, rft_master_result *result, refit_error *error)
{
    const char *whole = region->units[number].whole;
    const char *memory = region->memory + 4 * number * RFT_MASTER_UNIT;
    uint64_t bytes = (uint64_t)4 * rft_unit_elements(region, number), sum = 0;
    if (offloader->caps.host_addressable) {
        sum = digest_of(memory, bytes);
    } else {
        RFT_TRY(
            rft_device_digest(offloader->device, REFIT_STREAM_NONE, memory, bytes, 0, &sum, error));
        sum = rft_digest_finish(sum, bytes);
    }
    if (sum != digest_of(whole, bytes)) result->found |= RFT_MASTER_DIFFERS;
    return REFIT_OK;
}

/* Zeros are made on the device: there is nothing to compare them with. */
static refit_status compare(const refit_offloader *offloader, const rft_region *region,
                            rft_master_result *result, refit_error *error)
{
    refit_device *device = offloader->device;
    char *staging = offloader->staging + offloader->staging_bytes;
    rft_master_result whole = {0};
    RFT_TRY(rft_device_zero(device, REFIT_STREAM_NONE, staging, sizeof *result, error));
    for (uint64_t first = 0; first < region->bytes / 4;) {
        masters_run run = find_run(region, first, region->bytes / 4, false);
        if (run.place == RFT_UNIT_CODED) {
            RFT_TRY(compare_coded(offloader, region, &run, staging, error));
        } else if (run.place == RFT_UNIT_WHOLE) {
            RFT_TRY(compare_whole(offloader, region, first / RFT_MASTER_UNIT, &whole, error));
        }
        first = run.end;
    }
    RFT_TRY(refit_stream_copy(device, REFIT_STREAM_NONE, result, staging, sizeof *result, error));
    result->found |= whole.found;
    return REFIT_OK;
}

refit_status rft_masters_compare(const refit_offloader *offloader, const rft_region *region,
                                 refit_error *error)
{
    rft_master_result result = {0};
    refit_status status = compare(offloader, region, &result, error);
    /* To the caller of wait TIMEOUT means to wait again; this operation is over. */
    RFT_REFUSE_IF(status == REFIT_ERR_TIMEOUT, error, REFIT_ERR_DEVICE,
                  "region %s could not be verified: the device has not read it within "
                  "offload.timeout_ms",
                  region->name);
    RFT_TRY(status);
    RFT_REFUSE_IF(result.found != 0, error, REFIT_ERR_CORRUPT,
                  "region %s (%" PRIu64 " bytes) is not in the image as it is on the device: host "
                  "memory or a copy is at fault",
                  region->name, region->bytes);
    return REFIT_OK;
}

/* ---- Read by the CPU, for read locks */

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

static refit_status read_coded(const refit_offloader *offloader, const rft_region *region,
                               uint64_t first, uint32_t elements, char *to, uint16_t *room,
                               refit_error *error)
{
    rft_master_result result = {0};
    char *image = rft_host_arena_base(offloader->image);
    const uint16_t *weights;
    RFT_TRY(fetch_weights(offloader, region, first, elements, room, &weights, error));
    rft_master_join(&(rft_master_job){.master = to,
                                      .weights = weights,
                                      .coded = image + rft_masters_at(region, first),
                                      .result = &result,
                                      .elements = elements,
                                      .room = region->room});
    return check_restore(region, result.found, error);
}

static refit_status read_unit(const refit_offloader *offloader, const rft_region *region,
                              uint64_t number, char *to, uint16_t *room, refit_error *error)
{
    uint32_t elements = rft_unit_elements(region, number);
    const rft_unit *unit = region->units == NULL ? NULL : &region->units[number];
    switch (unit == NULL ? RFT_UNIT_CODED : unit->place) {
    case RFT_UNIT_CODED:
        return read_coded(offloader, region, number * RFT_MASTER_UNIT, elements, to, room, error);
    case RFT_UNIT_WHOLE: memcpy(to, unit->whole, (size_t)4 * elements); break;
    case RFT_UNIT_ZEROS: memset(to, 0, (size_t)4 * elements); break;
    }
    return REFIT_OK;
}

refit_status rft_masters_read(const refit_offloader *offloader, const rft_region *region, void *to,
                              refit_error *error)
{
    refit_status status = REFIT_OK;
    uint16_t *room = rft_calloc(RFT_MASTER_UNIT, sizeof *room);
    RFT_REFUSE_IF(room == NULL, error, REFIT_ERR_HOST_MEMORY,
                  "no host memory for the weights of region %s", region->name);
    uint64_t units = rft_unit_count(region->bytes / 4);
    for (uint64_t number = 0; number < units && status == REFIT_OK; number++) {
        char *at = (char *)to + 4 * number * RFT_MASTER_UNIT;
        status = read_unit(offloader, region, number, at, room, error);
    }
    rft_free(room);
    return status;
}
