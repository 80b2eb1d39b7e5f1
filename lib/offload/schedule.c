/*
 * From regions to a layout and to the plan of one direction. A plan has only the regions that are
 * not yet where they should be, so that both verbs can be called again after a failure. A region
 * makes one piece for each slab that holds a part of it; one that is coded, for each chunk of it.
 * A plan that has moved all regions is reversed for the way back, without a look at them, if no
 * address has changed; but not where regions may leave without a copy. Reads the table, starts
 * nothing.
 */
#include "offload/schedule.h"

#include <stdlib.h>

#include "base/alloc.h"
#include "base/checked.h"
#include "offload/masters.h"
#include "transfer/mover.h"

/* calloc of nothing is not memory; an offloader without regions is allowed. */
static uint32_t at_least_one(uint32_t count)
{
    return count == 0 ? 1 : count;
}

static refit_status lay_out(const rft_region_table *regions, const refit_config *config,
                            rft_layout *layout, rft_layout_item **out, refit_error *error)
{
    rft_layout_item *items = rft_calloc(at_least_one(regions->count), sizeof *items);
    RFT_REFUSE_IF(items == NULL, error, REFIT_ERR_HOST_MEMORY, "no host memory to plan %u regions",
                  regions->count);
    for (uint32_t id = 0; id < regions->count; id++) {
        const rft_region *region = &regions->items[id];
        items[id].bytes = region->policy == REFIT_KEEP ? region->host_bytes : 0;
        items[id].group = region->group;
        items[id].priority = region->priority;
    }
    refit_status status =
        rft_layout_open(layout, items, regions->count, config->offload_alignment_bytes,
                        config->offload_slab_bytes, error);
    if (status != REFIT_OK) {
        rft_free(items);
        return status;
    }
    *out = items;
    return REFIT_OK;
}

/* The most that one direction may have to move: discarded regions are not copied. */
static refit_status sum_moved(const rft_region_table *regions, uint64_t *bytes, refit_error *error)
{
    *bytes = 0;
    for (uint32_t id = 0; id < regions->count; id++) {
        const rft_region *region = &regions->items[id];
        if (region->policy == REFIT_DISCARD) continue;
        uint64_t most =
            region->coded ? rft_masters_most(region, region->bytes / 4).bytes : region->bytes;
        RFT_REFUSE_IF(!rft_add_u64(*bytes, most, bytes), error, REFIT_ERR_LIMIT,
                      "the regions are larger together than 2^64 bytes");
    }
    return REFIT_OK;
}

typedef struct place {
    uintptr_t address;
    uint32_t id;
} place;

static int compare_places(const void *one, const void *other)
{
    uintptr_t a = ((const place *)one)->address, b = ((const place *)other)->address;
    return a < b ? -1 : a > b;
}

static refit_status sort_by_address(rft_schedule *schedule, const rft_region_table *regions,
                                    refit_error *error)
{
    place *places = rft_calloc(at_least_one(regions->count), sizeof *places);
    schedule->by_address = rft_calloc(at_least_one(regions->count), sizeof *schedule->by_address);
    if (places == NULL || schedule->by_address == NULL) {
        rft_free(places);
        return rft_fail(error, REFIT_ERR_HOST_MEMORY,
                        "no host memory for the addresses of %u regions", regions->count);
    }
    for (uint32_t id = 0; id < regions->count; id++) {
        places[id] = (place){(uintptr_t)regions->items[id].memory, id};
    }
    qsort(places, regions->count, sizeof *places, compare_places);
    for (uint32_t at = 0; at < regions->count; at++) {
        schedule->by_address[at] = places[at].id;
    }
    rft_free(places);
    return REFIT_OK;
}

static uint64_t count_chunks(const rft_region_table *regions)
{
    uint64_t count = 0;
    for (uint32_t id = 0; id < regions->count; id++) {
        const rft_region *region = &regions->items[id];
        if (region->coded) count += rft_masters_most(region, region->bytes / 4).chunks;
    }
    return count;
}

/* Each slab's end cuts at most one region, or one chunk. */
static refit_status open_room(rft_schedule *schedule, const rft_region_table *regions,
                              const refit_config *config, uint32_t batch_most, refit_error *error)
{
    rft_plan_limits limits = {.piece_bytes = config->offload_piece_bytes,
                              .batch_most = batch_most,
                              .batch_bytes = rft_mover_step_bytes(config->offload_rate_limit)};
    uint64_t chunks = count_chunks(regions);
    uint64_t pieces = (uint64_t)at_least_one(regions->count) + schedule->layout.slab_count + chunks;
    RFT_REFUSE_IF(pieces > UINT32_MAX, error, REFIT_ERR_LIMIT,
                  "%u regions in %u slabs are too many: raise offload.slab_bytes", regions->count,
                  schedule->layout.slab_count);
    limits.pieces = (uint32_t)pieces;
    RFT_TRY(sum_moved(regions, &limits.bytes, error));
    schedule->count = regions->count;
    schedule->order = rft_calloc(at_least_one(regions->count), sizeof *schedule->order);
    schedule->pieces = rft_calloc(pieces, sizeof *schedule->pieces);
    schedule->chunks = (uint32_t)chunks;
    schedule->recodes = rft_calloc(at_least_one(schedule->chunks), sizeof *schedule->recodes);
    RFT_REFUSE_IF(schedule->order == NULL || schedule->pieces == NULL || schedule->recodes == NULL,
                  error, REFIT_ERR_HOST_MEMORY, "no host memory for the plan of %u regions",
                  regions->count);
    RFT_TRY(sort_by_address(schedule, regions, error));
    return rft_plan_open(&schedule->plan, &limits, error);
}

refit_status rft_schedule_open(rft_schedule *schedule, rft_region_table *regions,
                               const refit_config *config, uint32_t batch_most, refit_error *error)
{
    rft_layout_item *items;
    *schedule = (rft_schedule){0};
    RFT_TRY(lay_out(regions, config, &schedule->layout, &items, error));
    refit_status status = open_room(schedule, regions, config, batch_most, error);
    if (status == REFIT_OK) {
        for (uint32_t id = 0; id < regions->count; id++) {
            regions->items[id].host_offset = items[id].offset;
            regions->items[id].imaged = false;
            schedule->order[items[id].order] = id;
        }
    } else {
        rft_schedule_close(schedule);
    }
    rft_free(items);
    return status;
}

void rft_schedule_close(rft_schedule *schedule)
{
    rft_plan_close(&schedule->plan);
    rft_layout_close(&schedule->layout);
    rft_free(schedule->order);
    rft_free(schedule->by_address);
    rft_free(schedule->pieces);
    rft_free(schedule->recodes);
    *schedule = (rft_schedule){0};
}

refit_status rft_schedule_measure(const rft_region_table *regions, const refit_config *config,
                                  uint64_t *image_bytes, uint64_t *payload_bytes,
                                  refit_error *error)
{
    rft_layout layout;
    rft_layout_item *items;
    RFT_TRY(lay_out(regions, config, &layout, &items, error));
    *image_bytes = layout.image_bytes;
    *payload_bytes = layout.payload_bytes;
    rft_layout_close(&layout);
    rft_free(items);
    return REFIT_OK;
}

/* Where a filling has come to: regions come in the order of the image, and so do slabs. */
typedef struct schedule_walk {
    rft_schedule *schedule;
    const rft_region_table *regions;
    uint32_t slab;
    uint32_t count;   /* pieces so far */
    uint32_t recodes; /* chunks so far */
} schedule_walk;

static void add_piece(schedule_walk *walk, rft_piece piece, const rft_region *region)
{
    piece.group = region->group;
    piece.allocation = region->allocation;
    piece.known_memory = true; /* when the region got its address */
    walk->schedule->pieces[walk->count++] = piece;
}

/* The end of the slab that holds offset `at` of the image. */
static uint64_t slab_end(schedule_walk *walk, uint64_t at)
{
    const rft_slab *slabs = walk->schedule->layout.slabs;
    while (at - slabs[walk->slab].offset >= slabs[walk->slab].bytes) {
        walk->slab++;
    }
    return slabs[walk->slab].offset + slabs[walk->slab].bytes;
}

/* Where the next region in the image begins, whether it moves or not; the end of the image if
 * region number `at` of the order is the last. */
static uint64_t next_begin(const schedule_walk *walk, uint32_t at)
{
    const rft_schedule *schedule = walk->schedule;
    for (uint32_t next = at + 1; next < schedule->count; next++) {
        const rft_region *region = &walk->regions->items[schedule->order[next]];
        if (region->policy == REFIT_KEEP) return region->host_offset;
    }
    return schedule->layout.image_bytes;
}

/* What lies before the next region, and in the same slab, is of no region. */
static uint32_t padding_after(const schedule_walk *walk, uint32_t at, uint64_t end, uint64_t edge)
{
    uint64_t padding = rft_min_u64(next_begin(walk, at), edge) - end;
    return (uint32_t)rft_min_u64(padding, UINT32_MAX);
}

static void add_coded(schedule_walk *walk, const rft_region *region, char *image, bool out)
{
    rft_schedule *schedule = walk->schedule;
    rft_masters_way way = {.layout = &schedule->layout,
                           .image = image,
                           .staging = schedule->staging,
                           .out = out,
                           .pieces = schedule->pieces,
                           .count = walk->count,
                           .recodes = schedule->recodes,
                           .recode_count = walk->recodes};
    rft_masters_part part = {.region = region,
                             .count = region->bytes / 4,
                             .memory = region->memory,
                             .allocation = region->allocation,
                             .group = region->group};
    rft_masters_add(&way, &part);
    walk->count = way.count;
    walk->recodes = way.recode_count;
}

/* `number`: of the region in the order. */
static void add_kept(schedule_walk *walk, uint32_t number, char *image, bool out)
{
    const rft_region *region = &walk->regions->items[walk->schedule->order[number]];
    if (region->coded) {
        add_coded(walk, region, image, out);
        return;
    }
    uint64_t end = region->host_offset + region->bytes;
    char *memory = region->memory;
    for (uint64_t at = region->host_offset; at < end;) {
        uint64_t edge = slab_end(walk, at);
        uint64_t stop = rft_min_u64(end, edge);
        rft_piece piece = {.to = out ? image + at : memory,
                           .from = out ? memory : image + at,
                           .bytes = stop - at,
                           .slab = walk->slab,
                           .slack = stop == end ? padding_after(walk, number, end, edge) : 0};
        add_piece(walk, piece, region);
        memory += piece.bytes;
        at = stop;
    }
}

/* Reverses the plan by which the regions came here, if it serves for the way back. */
static bool reverse(rft_schedule *schedule, const rft_region_table *regions, const char *image,
                    bool out)
{
    bool serves = schedule->covers_all && schedule->moved && schedule->out != out &&
                  schedule->address_changes == regions->address_changes && schedule->image == image;
    schedule->moved = false;
    if (!serves) return false;
    rft_plan_reverse(&schedule->plan);
    schedule->out = out;
    return true;
}

/* `covers_all`: the pieces are all that is ever copied or zeroed, and none is zeroed. */
static refit_status fill(const schedule_walk *walk, bool covers_all, const char *image, bool out,
                         refit_error *error)
{
    rft_schedule *schedule = walk->schedule;
    schedule->out = out;
    schedule->covers_all = covers_all && schedule->chunks == 0;
    schedule->address_changes = walk->regions->address_changes;
    schedule->image = image;
    return rft_plan_fill(&schedule->plan, schedule->pieces, walk->count, error);
}

refit_status rft_schedule_offload(rft_schedule *schedule, const rft_region_table *regions,
                                  char *image, refit_error *error)
{
    bool covers_all = true;
    if (reverse(schedule, regions, image, true)) return REFIT_OK;
    schedule_walk walk = {.schedule = schedule, .regions = regions};
    for (uint32_t at = 0; at < schedule->count; at++) {
        const rft_region *region = &regions->items[schedule->order[at]];
        bool moves =
            region->place == REFIT_ON_DEVICE && region->policy == REFIT_KEEP && !region->unchanged;
        covers_all = covers_all && (moves || region->policy == REFIT_DISCARD) && !region->reuse;
        if (moves) add_kept(&walk, at, image, true);
    }
    return fill(&walk, covers_all, image, true, error);
}

refit_status rft_schedule_restore(rft_schedule *schedule, const rft_region_table *regions,
                                  char *image, refit_error *error)
{
    bool covers_all = true;
    if (reverse(schedule, regions, image, false)) return REFIT_OK;
    schedule_walk walk = {.schedule = schedule, .regions = regions};
    for (uint32_t at = 0; at < schedule->count; at++) {
        const rft_region *region = &regions->items[schedule->order[at]];
        bool moves = region->place == REFIT_ON_HOST && region->policy != REFIT_DISCARD;
        bool kept = region->policy == REFIT_KEEP;
        covers_all =
            covers_all && (moves ? kept : region->policy == REFIT_DISCARD) && !region->reuse;
        if (!moves) continue;
        if (kept) {
            add_kept(&walk, at, image, false);
        } else {
            add_piece(&walk, (rft_piece){.to = region->memory, .bytes = region->bytes}, region);
        }
    }
    return fill(&walk, covers_all, image, false, error);
}

void rft_schedule_moved(rft_schedule *schedule)
{
    schedule->moved = true;
}
