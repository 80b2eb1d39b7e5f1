/*
 * A window: parts of the host image visit the device, some at a time, while an optimizer steps.
 *
 * begin divides the list of parts into windows. The window's memory is a ring of slots, and window
 * w uses slot w % slots. Each window goes through the same stations, in order:
 *
 *     waiting ──start_in──► arriving ──► arrived ──next──► in use ──done──► leaving ──► left
 *
 * Five counters say how many windows have passed each station:
 *
 *     left <= stepped <= taken <= arrived <= windows;    taken - stepped is 1 in IN_USE, else 0
 *
 * The copies are those of the offloader's two movers, which are idle while all regions are in the
 * image. Each has one operation at a time: the copies in of window `arrived`, and the copies out of
 * window `left`. Copies in start once their slot is free, which is when window - slots has left. An
 * operation that could not be started, or whose masters are refused, leaves its counter as it was,
 * so the next call starts it again: copies in from the image, which does not change before the
 * copies out, copies out from the slot, which nothing else writes before they have ended.
 *
 * Independent of: what parts mean, which of them belong to one parameter, how they are stepped.
 */
#include <inttypes.h>
#include <string.h>

#include <refit/advanced/window.h>

#include "base/alloc.h"
#include "base/checked.h"
#include "base/clock.h"
#include "offload/masters.h"
#include "offload/offloader.h"

#define SLOT_ALIGNMENT UINT64_C(512) /* what suits copy engines */
#define PART_ALIGNMENT UINT64_C(64)  /* what any type of element takes */

typedef enum window_state {
    WINDOW_IDLE,
    WINDOW_STEPPING,
    WINDOW_IN_USE,
} window_state;

/* A part of the list, and where its bytes are on the device. */
typedef struct window_part {
    refit_region_id region;
    uint32_t flags;
    uint64_t offset; /* in the region */
    uint64_t bytes;
    uint64_t at;            /* in its slot; REFIT_PART_NEW has none */
    const void *allocation; /* the allocation that contains it */
} window_part;

/* Parts [first, first + count) travel together. */
typedef struct window_span {
    uint32_t first;
    uint32_t count;
} window_span;

struct refit_window {
    refit_offloader *offloader;
    window_state state;

    /* The memory: slot_count slots of slot_bytes. */
    char *memory;
    const void *allocation; /* the allocation that contains it */
    bool borrowed;          /* it is the caller's */
    uint64_t slot_bytes;
    uint32_t slot_count;
    rft_plan plans[REFIT_WINDOWS]; /* by slot: of its copies in, then of those out */
    rft_plan_limits room;          /* of each of them */
    rft_piece *pieces;             /* owned; room for those of any window */
    rft_recode *recodes;           /* owned; by slot, as the plans: room for recode_room each */
    uint32_t recode_room;

    /* The list, divided. */
    window_part *parts; /* owned */
    void **addresses;   /* owned; of the parts, on the device */
    window_span *spans; /* owned; the windows, room for one a part */
    uint64_t *reached;  /* owned; by region: where the last part of it ends */
    uint32_t part_count;
    uint32_t part_room;
    uint32_t region_room;
    uint32_t span_count;

    /* The windows of the step. */
    uint32_t arrived;
    uint32_t taken;
    uint32_t stepped;
    uint32_t left;
    bool arriving;          /* copies in of window `arrived` are under way */
    bool leaving;           /* copies out of window `left` are under way */
    bool misfits;           /* all of it has been copied, but units that have to go whole */
    bool joined;            /* the stream of done waits for the copies that are leaving */
    bool followed;          /* copies in have been put after `after` */
    bool reported;          /* the step's figures have been told */
    refit_stream_ref after; /* of begin */
    refit_stream_ref work;  /* of the last done: window `stepped` - 1 */
    uint32_t worked;        /* windows whose arithmetic is known to be over */

    /* Its figures so far. */
    int64_t began; /* first next; 0: not yet */
    int64_t blocked;
    uint64_t in_bytes;
    uint64_t out_bytes;
};

/* ---- Open ---------------------------------------------------------------------------------- */

refit_status refit_window_open(refit_offloader *offloader, refit_window **out, refit_error *error)
{
    RFT_REFUSE_IF(offloader == NULL || out == NULL, error, REFIT_ERR_INVALID,
                  "refit_window_open needs an offloader and a place for the result");
    RFT_REFUSE_IF(offloader->window != NULL, error, REFIT_ERR_BUSY,
                  "the offloader has a window already: close that one first");
    RFT_REFUSE_IF(!offloader->config.use_pinned_optimizer_offload, error, REFIT_ERR_UNSUPPORTED,
                  "a window needs use_pinned_optimizer_offload: true");
    refit_window *window = rft_calloc(1, sizeof *window);
    RFT_REFUSE_IF(window == NULL, error, REFIT_ERR_HOST_MEMORY, "no host memory for a window");
    window->offloader = offloader;
    window->reported = true;
    offloader->window = window;
    *out = window;
    return REFIT_OK;
}

static void close_plans(refit_window *window)
{
    for (uint32_t slot = 0; slot < REFIT_WINDOWS; slot++) {
        rft_plan_close(&window->plans[slot]);
    }
}

/* No copy uses it. */
static refit_status drop_memory(refit_window *window, refit_error *error)
{
    if (!window->borrowed) {
        RFT_TRY(refit_memory_free(window->offloader->device, window->memory, error));
    }
    window->memory = NULL;
    window->borrowed = false;
    window->slot_bytes = 0;
    window->slot_count = 0;
    window->offloader->windows.bytes = 0;
    return REFIT_OK;
}

/* ---- Memory ------------------------------------------------------------------------------- */

static refit_status refuse_stepping(const refit_window *window, refit_error *error)
{
    RFT_REFUSE_IF(window->state != WINDOW_IDLE, error, REFIT_ERR_STATE,
                  "a step is under way: call refit_window_end first");
    return REFIT_OK;
}

static bool is_idle(const refit_window *window)
{
    return window->left == window->stepped && !window->arriving;
}

refit_status refit_window_set_memory(refit_window *window, void *memory, uint64_t window_bytes,
                                     uint32_t windows, refit_error *error)
{
    RFT_REFUSE_IF(window == NULL, error, REFIT_ERR_INVALID, "there is no window");
    RFT_TRY(refuse_stepping(window, error));
    RFT_REFUSE_IF(!is_idle(window), error, REFIT_ERR_BUSY,
                  "copies out of the last step may use the memory: call refit_window_wait first");
    if (memory == NULL) return drop_memory(window, error);
    uint64_t bytes;
    rft_memory_range allocation;
    RFT_REFUSE_IF((uintptr_t)memory % SLOT_ALIGNMENT != 0 || window_bytes == 0 ||
                      window_bytes % SLOT_ALIGNMENT != 0,
                  error, REFIT_ERR_INVALID,
                  "the memory of windows begins at a multiple of 512, and each has a multiple of "
                  "512 bytes, not %p and %" PRIu64,
                  memory, window_bytes);
    RFT_REFUSE_IF(windows == 0 || windows > REFIT_WINDOWS ||
                      !rft_mul_u64(window_bytes, windows, &bytes),
                  error, REFIT_ERR_INVALID, "%" PRIu32 " windows are not between 1 and %d", windows,
                  REFIT_WINDOWS);
    RFT_TRY(rft_device_memory_check(window->offloader->device, memory, bytes, &allocation, error));
    RFT_TRY(drop_memory(window, error));
    window->memory = memory;
    window->allocation = allocation.base;
    window->borrowed = true;
    window->slot_bytes = window_bytes;
    window->slot_count = windows;
    window->offloader->windows.bytes = bytes;
    return REFIT_OK;
}

static refit_status take_memory(refit_window *window, uint64_t bytes, uint32_t count,
                                refit_error *error)
{
    refit_device *device = window->offloader->device;
    void *memory;
    rft_memory_range allocation;
    RFT_TRY(refit_memory_alloc(device, bytes * count, &memory, error));
    refit_status status =
        rft_device_memory_check(device, memory, bytes * count, &allocation, error);
    if (status != REFIT_OK) {
        refit_status freed = refit_memory_free(device, memory, NULL);
        (void)freed; /* the failure above says more */
        return status;
    }
    window->memory = memory;
    window->allocation = allocation.base;
    window->slot_bytes = bytes;
    window->slot_count = count;
    window->offloader->windows.bytes = bytes * count;
    return REFIT_OK;
}

/* ---- The list ----------------------------------------------------------------------------- */

/* A new list: no window of it has gone anywhere. */
static void reset_step(refit_window *window, refit_stream_ref after)
{
    window->arrived = window->taken = window->stepped = window->left = 0;
    window->followed = window->misfits = window->joined = false;
    window->worked = 0;
    window->after = after;
    window->began = 0;
    window->blocked = 0;
    window->in_bytes = window->out_bytes = 0;
}

/* The list as the caller gave it, which may have been compiled with a longer struct. */
static refit_status read_part(const refit_window_part *parts, uint32_t at, refit_window_part *part,
                              refit_error *error)
{
    size_t size = parts->size;
    const refit_window_part *given = (const void *)((const char *)parts + at * size);
    RFT_REFUSE_IF(size < sizeof *part || size % _Alignof(refit_window_part) != 0 ||
                      given->size != size,
                  error, REFIT_ERR_INVALID,
                  "refit_window_part.size is %zu in part %" PRIu32 " of the list and %zu in the "
                  "first: set each to sizeof(refit_window_part)",
                  given->size, at, size);
    *part = *given;
    return REFIT_OK;
}

/* Masters come and go by their weights, in whole units. */
static refit_status check_coded(const rft_region *region, const refit_window_part *part,
                                uint32_t at, refit_error *error)
{
    const uint64_t unit = (uint64_t)4 * RFT_MASTER_UNIT;
    uint64_t end = part->offset + part->bytes;
    RFT_REFUSE_IF(region->units == NULL, error, REFIT_ERR_UNSUPPORTED,
                  "region %s has left as what its weights lack, which windows do not take: set "
                  "offload.masters to whole, or give the region no weights or REFIT_PLACEMENT_HOST",
                  region->name);
    RFT_REFUSE_IF(part->offset % unit != 0 || (end % unit != 0 && end != region->bytes), error,
                  REFIT_ERR_INVALID,
                  "part %" PRIu32 " is of masters that travel as what their weights lack, and has "
                  "bytes %" PRIu64 " to %" PRIu64 " of region %s: give the whole region, or "
                  "multiples of %" PRIu64 " bytes",
                  at, part->offset, end, region->name, unit);
    return REFIT_OK;
}

static refit_status check_part(const refit_window *window, const refit_window_part *part,
                               uint32_t at, refit_error *error)
{
    const rft_region_table *regions = &window->offloader->regions;
    RFT_REFUSE_IF(part->region >= regions->count, error, REFIT_ERR_NOT_FOUND,
                  "part %" PRIu32 " is of region %u, and there are %u regions", at, part->region,
                  regions->count);
    const rft_region *region = &regions->items[part->region];
    RFT_REFUSE_IF(region->policy != REFIT_KEEP, error, REFIT_ERR_NOT_FOUND,
                  "part %" PRIu32 ": region %s is not kept, so the image has no bytes of it", at,
                  region->name);
    RFT_REFUSE_IF(region->on_cpu, error, REFIT_ERR_INVALID,
                  "part %" PRIu32 ": region %s is stepped on the CPU, by a host step", at,
                  region->name);
    RFT_REFUSE_IF(part->bytes == 0 || part->offset > region->bytes ||
                      part->bytes > region->bytes - part->offset,
                  error, REFIT_ERR_INVALID,
                  "part %" PRIu32 ": %" PRIu64 " bytes from byte %" PRIu64 " on are not in region "
                  "%s of %" PRIu64 " bytes",
                  at, part->bytes, part->offset, region->name, region->bytes);
    if (region->coded) RFT_TRY(check_coded(region, part, at, error));
    RFT_REFUSE_IF((part->flags & ~(uint32_t)(REFIT_PART_SAME_WINDOW | REFIT_PART_NEW)) != 0 ||
                      (at == 0 && (part->flags & REFIT_PART_SAME_WINDOW) != 0),
                  error, REFIT_ERR_INVALID,
                  "part %" PRIu32
                  " has flags %u: use REFIT_PART_NEW, and REFIT_PART_SAME_WINDOW from "
                  "the second part on",
                  at, part->flags);
    RFT_REFUSE_IF(part->offset < window->reached[part->region], error, REFIT_ERR_INVALID,
                  "part %" PRIu32 " has bytes of region %s that an earlier part has, or that lie "
                  "before it: give the parts of one region in order, each byte once",
                  at, region->name);
    return REFIT_OK;
}

static refit_status grow_room(refit_window *window, uint32_t count, refit_error *error)
{
    uint32_t regions = window->offloader->regions.count;
    if (count > window->part_room) {
        window_part *parts = rft_realloc(window->parts, count, sizeof *parts);
        if (parts != NULL) window->parts = parts;
        void **addresses = rft_realloc(window->addresses, count, sizeof *addresses);
        if (addresses != NULL) window->addresses = addresses;
        window_span *spans = rft_realloc(window->spans, count, sizeof *spans);
        if (spans != NULL) window->spans = spans;
        RFT_REFUSE_IF(parts == NULL || addresses == NULL || spans == NULL, error,
                      REFIT_ERR_HOST_MEMORY, "no host memory for a step of %" PRIu32 " parts",
                      count);
        window->part_room = count;
    }
    if (regions > window->region_room) {
        uint64_t *reached = rft_realloc(window->reached, regions, sizeof *reached);
        RFT_REFUSE_IF(reached == NULL, error, REFIT_ERR_HOST_MEMORY,
                      "no host memory for a step of %u regions", regions);
        window->reached = reached;
        window->region_room = regions;
    }
    return REFIT_OK;
}

static uint64_t align_up(uint64_t value, uint64_t alignment)
{
    return (value + alignment - 1) / alignment * alignment;
}

static rft_region *region_of(const refit_window *window, const window_part *part)
{
    return &window->offloader->regions.items[part->region];
}

/* Where the bytes of a part lie in the image; of masters that are there as what their weights lack
 * only a number. */
static uint64_t image_offset(const refit_window *window, const window_part *part)
{
    return region_of(window, part)->host_offset + part->offset;
}

/* Copies the list, once it is known to be right. */
static refit_status take_list(refit_window *window, const refit_window_part *parts, uint32_t count,
                              refit_error *error)
{
    RFT_REFUSE_IF(parts == NULL && count > 0, error, REFIT_ERR_INVALID,
                  "a step of %" PRIu32 " parts needs the list of them", count);
    RFT_TRY(grow_room(window, count, error));
    if (window->region_room > 0) {
        memset(window->reached, 0, window->region_room * sizeof *window->reached);
    }
    window->part_count = 0;
    window->span_count = 0;
    for (uint32_t at = 0; at < count; at++) {
        refit_window_part part = {0};
        RFT_TRY(read_part(parts, at, &part, error));
        RFT_TRY(check_part(window, &part, at, error));
        window->reached[part.region] = part.offset + part.bytes;
        window->parts[at] = (window_part){
            .region = part.region, .flags = part.flags, .offset = part.offset, .bytes = part.bytes};
    }
    window->part_count = count;
    return REFIT_OK;
}

/* ---- Where parts lie in a slot: as they lie in the image, so that neighbours are one copy ------
 */

/* The place of part `number` after `end`, which the part before it has reached. */
static uint64_t place_after(const refit_window *window, uint32_t number, uint64_t end)
{
    const window_part *part = &window->parts[number], *before = part - 1;
    if (end == 0) return 0;
    if (((part->flags | before->flags) & REFIT_PART_NEW) == 0) {
        uint64_t from = image_offset(window, before) + before->bytes;
        uint64_t to = image_offset(window, part);
        uint64_t at = end + (to - from);
        if (to >= from && to - from < SLOT_ALIGNMENT && at % PART_ALIGNMENT == 0) return at;
    }
    return align_up(end, SLOT_ALIGNMENT);
}

/* Places part `first` and those that stay together with it after `end`; writes where they end, and
 * returns the part after them. */
static uint32_t place_together(refit_window *window, uint32_t first, uint64_t *end)
{
    uint32_t number = first;
    do {
        window_part *part = &window->parts[number];
        part->at = place_after(window, number, *end);
        *end = part->at + part->bytes;
        number++;
    } while (number < window->part_count &&
             (window->parts[number].flags & REFIT_PART_SAME_WINDOW) != 0);
    return number;
}

/* The bytes of the largest run of parts that stay together, and of all of them in one slot. */
static void measure(refit_window *window, uint64_t *least, uint64_t *all)
{
    *least = *all = 0;
    for (uint32_t first = 0; first < window->part_count;) {
        uint64_t end = 0;
        first = place_together(window, first, &end);
        *least = rft_max_u64(*least, align_up(end, SLOT_ALIGNMENT));
        *all += align_up(end, SLOT_ALIGNMENT);
    }
}

/* Divides the list into windows of at most `most` bytes; a larger run of parts that stay together
 * has one of its own. */
static void divide(refit_window *window, uint64_t most)
{
    uint64_t end = 0;
    window->span_count = 0;
    for (uint32_t first = 0; first < window->part_count;) {
        uint64_t reached = end;
        uint32_t next = place_together(window, first, &reached);
        if (window->span_count == 0 || reached > most) {
            window->spans[window->span_count++] = (window_span){.first = first};
            reached = 0;
            next = place_together(window, first, &reached);
        }
        window->spans[window->span_count - 1].count += next - first;
        end = reached;
        first = next;
    }
}

/* Fewer windows first: two are enough for copies while the optimizer steps. Then smaller ones. */
static refit_status take_what_there_is(refit_window *window, uint64_t most, uint64_t least,
                                       uint32_t count, refit_error *error)
{
    refit_status status = take_memory(window, most, count, error);
    while (status == REFIT_ERR_DEVICE_MEMORY && count > 2) {
        status = take_memory(window, most, --count, error);
    }
    for (uint64_t bytes = most; status == REFIT_ERR_DEVICE_MEMORY && bytes > least;) {
        bytes = rft_max_u64(least, bytes / 2 / SLOT_ALIGNMENT * SLOT_ALIGNMENT);
        status = take_memory(window, bytes, count, error);
    }
    if (status == REFIT_ERR_DEVICE_MEMORY && count > 1) {
        status = take_memory(window, least, 1, error);
    }
    return status;
}

/* Memory for the list: slots of at least `least` bytes. One slot of `all` bytes would hold it. */
static refit_status ensure_memory(refit_window *window, uint64_t least, uint64_t all,
                                  refit_error *error)
{
    const refit_config *config = &window->offloader->config;
    bool *is_short = &window->offloader->windows.is_short;
    RFT_REFUSE_IF(window->borrowed && window->slot_bytes < least, error, REFIT_ERR_LIMIT,
                  "parts that stay together need %" PRIu64 " bytes, and the windows given have "
                  "%" PRIu64 " each: give larger ones (see refit_window_measure)",
                  least, window->slot_bytes);
    if (window->borrowed) return REFIT_OK;
    uint64_t wanted = config->offload_window_bytes / SLOT_ALIGNMENT * SLOT_ALIGNMENT;
    uint64_t most = rft_max_u64(least, rft_min_u64(wanted, all));
    divide(window, most);
    uint32_t count = (uint32_t)rft_min_u64(config->offload_windows, window->span_count);
    bool enough = (window->slot_bytes >= most && window->slot_count >= count) || *is_short;
    if (window->memory != NULL && window->slot_bytes >= least && enough) return REFIT_OK;
    RFT_TRY(drop_memory(window, error));
    RFT_TRY(take_what_there_is(window, most, least, count, error));
    *is_short = window->slot_bytes < most || window->slot_count < count;
    return REFIT_OK;
}

refit_status refit_window_measure(refit_window *window, const refit_window_part *parts,
                                  uint32_t count, uint64_t *window_bytes, refit_error *error)
{
    RFT_REFUSE_IF(window == NULL || window_bytes == NULL, error, REFIT_ERR_INVALID,
                  "refit_window_measure needs a window and a place for the bytes");
    RFT_TRY(refuse_stepping(window, error));
    RFT_REFUSE_IF(!is_idle(window), error, REFIT_ERR_BUSY,
                  "copies out of the last step are under way: call refit_window_wait first");
    RFT_REFUSE_IF(refit_offloader_get_state(window->offloader) == REFIT_OPEN, error,
                  REFIT_ERR_STATE,
                  "the offloader is not sealed, so its regions have no places in the image yet");
    uint64_t all;
    reset_step(window, REFIT_STREAM_NONE);
    RFT_TRY(take_list(window, parts, count, error));
    measure(window, window_bytes, &all);
    window->part_count = 0;
    return REFIT_OK;
}

/* ---- Copies ------------------------------------------------------------------------------- */

static bool is_new(const window_part *part)
{
    return (part->flags & REFIT_PART_NEW) != 0;
}

/* The pieces of one part: one for each slab that holds some of it. */
static void add_pieces(refit_window *window, uint32_t number, bool out, uint32_t *count)
{
    const window_part *part = &window->parts[number];
    const rft_layout *layout = &window->offloader->schedule.layout;
    char *image = rft_host_arena_base(window->offloader->image);
    char *memory = window->addresses[number];
    uint64_t at = image_offset(window, part);
    uint64_t end = at + part->bytes;
    for (uint32_t slab = rft_layout_find(layout, at); at < end; slab++) {
        uint64_t stop = rft_min_u64(end, layout->slabs[slab].offset + layout->slabs[slab].bytes);
        window->pieces[(*count)++] = (rft_piece){.to = out ? image + at : memory,
                                                 .from = out ? memory : image + at,
                                                 .bytes = stop - at,
                                                 .slab = slab,
                                                 .allocation = part->allocation,
                                                 .known_memory = true};
        memory += stop - at;
        at = stop;
    }
}

/* A part of masters, as elements. */
static rft_masters_part masters_of(const refit_window *window, uint32_t number)
{
    const window_part *part = &window->parts[number];
    return (rft_masters_part){.region = region_of(window, part),
                              .first = part->offset / 4,
                              .count = part->bytes / 4,
                              .memory = window->addresses[number],
                              .allocation = part->allocation};
}

static void add_part(refit_window *window, rft_masters_way *way, uint32_t number)
{
    rft_masters_part masters = masters_of(window, number);
    bool misfits = way->out && window->misfits;
    if (!masters.region->coded) {
        if (!misfits) add_pieces(window, number, way->out, &way->count);
    } else if (misfits) {
        rft_masters_add_misfits(way, &masters);
    } else {
        rft_masters_add(way, &masters);
    }
}

static refit_status fill_plan(refit_window *window, uint32_t number, bool out, rft_plan **plan,
                              refit_error *error)
{
    const refit_offloader *offloader = window->offloader;
    const window_span *span = &window->spans[number];
    uint32_t slot = number % window->slot_count;
    rft_masters_way way = {.layout = &offloader->schedule.layout,
                           .image = rft_host_arena_base(offloader->image),
                           .staging = rft_masters_staging(offloader, out),
                           .out = out,
                           .pieces = window->pieces,
                           .recodes = window->recodes};
    if (way.recodes != NULL) way.recodes += (size_t)slot * window->recode_room;
    *plan = &window->plans[slot];
    for (uint32_t part = span->first; part < span->first + span->count; part++) {
        if (out || !is_new(&window->parts[part])) add_part(window, &way, part);
    }
    return rft_plan_fill(*plan, window->pieces, way.count, error);
}

/* What a plan moves over the link: not what it makes zeros of. */
static uint64_t moved_bytes(const rft_plan *plan)
{
    uint64_t bytes = 0;
    for (uint32_t at = 0; at < plan->batch_count; at++) {
        const rft_batch *batch = &plan->batches[at];
        if (plan->copies[batch->first].from != NULL) bytes += batch->bytes;
    }
    return bytes;
}

/* Starts the copies in of window `arrived`. A window of new parts has none. */
static refit_status start_in(refit_window *window, refit_error *error)
{
    rft_plan *plan;
    RFT_TRY(fill_plan(window, window->arrived, false, &plan, error));
    if (plan->copy_count == 0) {
        window->arrived++;
        return REFIT_OK;
    }
    refit_stream_ref after = window->followed ? REFIT_STREAM_NONE : window->after;
    RFT_TRY(
        rft_mover_start(window->offloader->movers[RFT_RESTORE], plan, after, RFT_COPY_ANY, error));
    window->followed = true;
    window->arriving = true;
    window->in_bytes += moved_bytes(plan);
    return REFIT_OK;
}

/* Starts the copies out of window `left`, which is the last that was stepped. */
static refit_status start_out(refit_window *window, refit_error *error)
{
    rft_plan *plan;
    RFT_TRY(fill_plan(window, window->left, true, &plan, error));
    refit_stream_ref work = window->left < window->worked ? REFIT_STREAM_NONE : window->work;
    RFT_TRY(rft_mover_start(window->offloader->movers[RFT_OFFLOAD], plan, work, RFT_COPY_STREAM,
                            error));
    window->leaving = true;
    window->joined = false;
    window->out_bytes += moved_bytes(plan);
    return REFIT_OK;
}

/* Were the weights of masters that have come in those that they left by? */
static refit_status check_in(const refit_window *window, uint32_t number, refit_error *error)
{
    const window_span *span = &window->spans[number];
    for (uint32_t part = span->first; part < span->first + span->count; part++) {
        rft_masters_part masters = masters_of(window, part);
        if (!masters.region->coded || is_new(&window->parts[part])) continue;
        RFT_TRY(rft_masters_arrived(window->offloader, masters.region, masters.first, masters.count,
                                    error));
    }
    return REFIT_OK;
}

/* Copies whose masters are refused are to be made again, and count once. */
static refit_status see_in(refit_window *window, uint32_t timeout_ms, refit_error *error)
{
    if (!window->arriving) return REFIT_OK;
    rft_mover *mover = window->offloader->movers[RFT_RESTORE];
    refit_status status = rft_mover_wait(mover, timeout_ms, error);
    if (status != REFIT_OK && rft_mover_is_moving(mover)) return status;
    window->arriving = false;
    if (status == REFIT_OK) status = check_in(window, window->arrived, error);
    if (status == REFIT_OK) {
        window->arrived++;
    } else {
        window->in_bytes -= moved_bytes(&window->plans[window->arrived % window->slot_count]);
    }
    return status;
}

static void note_stepped(refit_window *window, uint32_t number)
{
    const window_span *span = &window->spans[number];
    for (uint32_t part = span->first; part < span->first + span->count; part++) {
        window->offloader->regions.items[window->parts[part].region].rewritten = true;
    }
}

/* Notes where the masters of window `left` are, whose copies out are over, and takes memory for
 * those that have to go whole: `window->misfits`, if there are any. */
static refit_status check_out(refit_window *window, refit_error *error)
{
    const window_span *span = &window->spans[window->left];
    bool whole = window->misfits; /* those copies were of them */
    uint32_t misfits = 0;
    for (uint32_t part = span->first; part < span->first + span->count; part++) {
        rft_masters_part masters = masters_of(window, part);
        rft_region *region = region_of(window, &window->parts[part]);
        if (!region->coded) continue;
        if (whole) {
            rft_units_went_whole(region, masters.first, masters.count);
        } else {
            RFT_TRY(rft_units_left(window->offloader, region, masters.first, masters.count,
                                   &misfits, error));
        }
    }
    window->misfits = misfits > 0;
    return REFIT_OK;
}

static refit_status end_out(refit_window *window, uint32_t timeout_ms, refit_error *error)
{
    rft_mover *mover = window->offloader->movers[RFT_OFFLOAD];
    refit_status status = rft_mover_wait(mover, timeout_ms, error);
    if (status != REFIT_OK && rft_mover_is_moving(mover)) return status;
    window->leaving = false;
    window->worked = window->left + 1; /* further copies out of it need its stream no more */
    if (status == REFIT_OK) status = check_out(window, error);
    if (status != REFIT_OK) {
        window->out_bytes -= moved_bytes(&window->plans[window->left % window->slot_count]);
    }
    return status;
}

/* Masters that did not fit go whole from the slot, by copies of their own. */
static refit_status see_out(refit_window *window, uint32_t timeout_ms, refit_error *error)
{
    if (!window->leaving) return REFIT_OK;
    int64_t deadline = rft_deadline(timeout_ms);
    RFT_TRY(end_out(window, timeout_ms, error));
    if (window->misfits) {
        RFT_TRY(start_out(window, error));
        RFT_TRY(end_out(window, (uint32_t)rft_ms_until(deadline), error));
    }
    note_stepped(window, window->left++);
    return REFIT_OK;
}

/* A look without a wait: still under way is not a failure. */
static refit_status unless_timeout(refit_status status)
{
    return status == REFIT_ERR_TIMEOUT ? REFIT_OK : status;
}

static uint32_t timeout_of(const refit_window *window)
{
    return window->offloader->config.offload_timeout_ms;
}

/* Starts the copies out of the last window that was stepped, once those of the one before have
 * ended. */
static refit_status leave(refit_window *window, refit_error *error)
{
    if (window->left + 1 < window->stepped) {
        if (!window->leaving) RFT_TRY(start_out(window, error));
        RFT_TRY(see_out(window, timeout_of(window), error));
    }
    RFT_TRY(unless_timeout(see_out(window, 0, error)));
    return window->left < window->stepped && !window->leaving ? start_out(window, error) : REFIT_OK;
}

/* Do the copies out that are under way read weights of masters? Those of misfits do not. */
static bool reads_weights(const refit_window *window)
{
    if (!window->leaving || window->misfits) return false;
    const window_span *span = &window->spans[window->left];
    for (uint32_t part = span->first; part < span->first + span->count; part++) {
        if (region_of(window, &window->parts[part])->coded) return true;
    }
    return false;
}

/* The caller may write the weights once the step has ended. So its stream waits for the copies out
 * of the last window, if they read them; `end` waits for those that no stream waits for. */
static void join_readers(refit_window *window, refit_stream_ref stream)
{
    bool last = window->stepped == window->span_count;
    if (!last || stream.native == NULL || !reads_weights(window)) return;
    window->joined =
        rft_mover_join(window->offloader->movers[RFT_OFFLOAD], stream, NULL) == REFIT_OK;
}

static refit_status await_readers(refit_window *window, refit_error *error)
{
    if (window->joined || !reads_weights(window)) return REFIT_OK;
    refit_status status = see_out(window, timeout_of(window), error);
    return reads_weights(window) ? status : unless_timeout(status);
}

/* Starts copies in whose slot is free. */
static refit_status arrive(refit_window *window, refit_error *error)
{
    RFT_TRY(unless_timeout(see_in(window, 0, error)));
    while (!window->arriving && window->arrived < window->span_count &&
           window->arrived - window->left < window->slot_count) {
        RFT_TRY(start_in(window, error));
    }
    return REFIT_OK;
}

/* Counts a call that made its caller wait since `began`, and that may have failed. */
static refit_status account(refit_window *window, int64_t began, refit_status status)
{
    window->blocked += rft_now() - began;
    if (status != REFIT_OK) window->offloader->windows.figures.failures++;
    return status;
}

/* ---- A step ------------------------------------------------------------------------------- */

/* `claim`: from now on no read lock begins, and no restore. A read lock may be acquired by any
 * thread. */
static refit_status check_offloader(refit_offloader *offloader, bool claim, refit_error *error)
{
    refit_offloader_state state = refit_offloader_get_state(offloader);
    RFT_REFUSE_IF(state != REFIT_OFFLOADED, error, REFIT_ERR_STATE,
                  "the states are not in the host image: the offloader is %s, not OFFLOADED",
                  refit_offloader_state_name(state));
    RFT_REFUSE_IF(offloader->closing, error, REFIT_ERR_STATE,
                  "the offloader is half closed: call refit_offloader_close again");
    return rft_offloader_claim_image(offloader, claim ? &offloader->windows : NULL, error);
}

static rft_masters_need measure_part(const refit_window *window, const window_part *part)
{
    const rft_region *region = region_of(window, part);
    if (region->coded) return rft_masters_most(region, part->bytes / 4);
    return (rft_masters_need){.pieces = 1, .bytes = part->bytes};
}

/* Chunks of masters in any of the windows. */
static uint64_t count_chunks(const refit_window *window)
{
    uint64_t most = 0;
    for (uint32_t number = 0; number < window->span_count; number++) {
        const window_span *span = &window->spans[number];
        uint64_t chunks = 0;
        for (uint32_t part = span->first; part < span->first + span->count; part++) {
            chunks += measure_part(window, &window->parts[part]).chunks;
        }
        most = rft_max_u64(most, chunks);
    }
    return most;
}

static refit_status grow_recodes(refit_window *window, uint64_t room, refit_error *error)
{
    if (room <= window->recode_room) return REFIT_OK;
    rft_recode *recodes = NULL;
    if (room <= UINT32_MAX) {
        recodes = rft_realloc(window->recodes, room, REFIT_WINDOWS * sizeof *recodes);
    }
    RFT_REFUSE_IF(recodes == NULL, error, REFIT_ERR_HOST_MEMORY,
                  "no host memory for windows of %" PRIu64 " chunks of masters", room);
    window->recodes = recodes;
    window->recode_room = (uint32_t)room;
    return REFIT_OK;
}

/* What the copies of the largest window need, now and in the steps before. */
static rft_plan_limits measure_copies(const refit_window *window)
{
    const refit_offloader *offloader = window->offloader;
    rft_plan_limits need = window->room;
    need.piece_bytes = offloader->config.offload_piece_bytes;
    need.batch_most = rft_offloader_batch_most(offloader);
    need.batch_bytes = rft_mover_step_bytes(offloader->config.offload_rate_limit);
    for (uint32_t number = 0; number < window->span_count; number++) {
        const window_span *span = &window->spans[number];
        /* The end of each slab cuts at most one part. */
        uint64_t bytes = 0, pieces = offloader->schedule.layout.slab_count;
        for (uint32_t part = span->first; part < span->first + span->count; part++) {
            rft_masters_need one = measure_part(window, &window->parts[part]);
            bytes += one.bytes;
            pieces += one.pieces;
        }
        if (bytes > need.bytes) need.bytes = bytes;
        if (pieces > need.pieces) need.pieces = (uint32_t)rft_min_u64(pieces, UINT32_MAX);
    }
    return need;
}

/* Room for the copies of any of the windows, in both directions. */
static refit_status open_plans(refit_window *window, refit_error *error)
{
    rft_plan_limits need = measure_copies(window);
    if (need.pieces > window->room.pieces) {
        rft_piece *pieces = rft_realloc(window->pieces, need.pieces, sizeof *pieces);
        RFT_REFUSE_IF(pieces == NULL, error, REFIT_ERR_HOST_MEMORY,
                      "no host memory for the copies of %" PRIu32 " parts", need.pieces);
        window->pieces = pieces;
    }
    RFT_TRY(grow_recodes(window, count_chunks(window), error));
    window->room = need;
    for (uint32_t slot = 0; slot < window->slot_count; slot++) {
        rft_plan *plan = &window->plans[slot];
        if (plan->limits.pieces >= need.pieces && plan->limits.bytes >= need.bytes) continue;
        rft_plan_close(plan);
        RFT_TRY(rft_plan_open(plan, &need, error));
    }
    return REFIT_OK;
}

/* The device addresses of the parts, once the slots have theirs. */
static void set_addresses(refit_window *window)
{
    for (uint32_t number = 0; number < window->span_count; number++) {
        const window_span *span = &window->spans[number];
        char *slot = window->memory == NULL
                         ? NULL
                         : window->memory + number % window->slot_count * window->slot_bytes;
        for (uint32_t part = span->first; part < span->first + span->count; part++) {
            bool placed = !is_new(&window->parts[part]);
            window->addresses[part] = placed ? slot + window->parts[part].at : NULL;
            window->parts[part].allocation = placed ? window->allocation : NULL;
        }
    }
}

/* Does any part need a place in a slot? */
static bool any_comes(const refit_window *window)
{
    for (uint32_t part = 0; part < window->part_count; part++) {
        if (!is_new(&window->parts[part])) return true;
    }
    return false;
}

static refit_status prepare(refit_window *window, const refit_window_part *parts, uint32_t count,
                            refit_error *error)
{
    refit_offloader *offloader = window->offloader;
    const refit_config *config = &offloader->config;
    uint64_t least, all;
    RFT_TRY(rft_image_await(offloader, timeout_of(window), error));
    offloader->image_used = true;
    RFT_TRY(take_list(window, parts, count, error));
    measure(window, &least, &all);
    bool placed = window->borrowed || any_comes(window);
    if (placed) RFT_TRY(ensure_memory(window, least, all, error));
    /* New parts need no memory: then there are slots in number only. */
    if (window->memory == NULL) window->slot_count = config->offload_windows;
    divide(window, placed ? window->slot_bytes : config->offload_window_bytes);
    set_addresses(window);
    return open_plans(window, error);
}

static refit_status begin(refit_window *window, const refit_window_part *parts, uint32_t count,
                          refit_stream_ref after, refit_error *error)
{
    refit_offloader *offloader = window->offloader;
    RFT_TRY(refit_window_wait(window, timeout_of(window), error));
    RFT_TRY(rft_offloader_check_movers(offloader, error));
    RFT_TRY(check_offloader(offloader, true, error));
    reset_step(window, after);
    refit_status status = prepare(window, parts, count, error);
    if (status != REFIT_OK) {
        rft_offloader_release_image(offloader, &offloader->windows);
        window->part_count = window->span_count = 0;
        return status;
    }
    window->reported = false;
    window->state = WINDOW_STEPPING;
    status = arrive(window, error);
    if (status != REFIT_OK) {
        refit_status ended = refit_window_end(window, NULL);
        (void)ended; /* if it has not, the next call says that a step is under way */
    }
    return status;
}

refit_status refit_window_begin(refit_window *window, const refit_window_part *parts,
                                uint32_t count, refit_stream_ref after, refit_error *error)
{
    RFT_REFUSE_IF(window == NULL, error, REFIT_ERR_INVALID, "there is no window");
    RFT_TRY(refuse_stepping(window, error));
    int64_t began = rft_now();
    refit_status status = begin(window, parts, count, after, error);
    return account(window, began, status);
}

static refit_status check_view(const refit_window_view *view, refit_error *error)
{
    RFT_REFUSE_IF(view == NULL || view->size < sizeof *view, error, REFIT_ERR_INVALID,
                  "refit_window_next needs a view whose size is sizeof(refit_window_view)");
    return REFIT_OK;
}

static void show(const refit_window *window, refit_window_view *view)
{
    view->first = window->part_count;
    view->count = 0;
    view->memory = NULL;
    if (window->state != WINDOW_IN_USE) return;
    const window_span *span = &window->spans[window->stepped];
    view->first = span->first;
    view->count = span->count;
    view->memory = window->addresses + span->first;
}

/* Copies in of window `taken` may have to wait for a slot first. */
static refit_status await_arrival(refit_window *window, refit_error *error)
{
    RFT_TRY(leave(window, error));
    RFT_TRY(arrive(window, error));
    while (window->arrived == window->taken) {
        RFT_TRY(window->arriving ? see_in(window, timeout_of(window), error)
                                 : see_out(window, timeout_of(window), error));
        RFT_TRY(arrive(window, error));
    }
    return REFIT_OK;
}

refit_status refit_window_next(refit_window *window, refit_window_view *view, refit_error *error)
{
    RFT_REFUSE_IF(window == NULL, error, REFIT_ERR_INVALID, "there is no window");
    RFT_TRY(check_view(view, error));
    RFT_REFUSE_IF(window->state == WINDOW_IDLE, error, REFIT_ERR_STATE,
                  "no step is under way: call refit_window_begin first");
    int64_t began = rft_now();
    if (window->began == 0) window->began = began;
    if (window->state == WINDOW_STEPPING && window->taken < window->span_count) {
        RFT_TRY(account(window, began, await_arrival(window, error)));
        window->taken++;
        window->state = WINDOW_IN_USE;
    }
    show(window, view);
    return REFIT_OK;
}

static refit_status refuse_unused(const refit_window *window, refit_error *error)
{
    RFT_REFUSE_IF(window->state != WINDOW_IN_USE, error, REFIT_ERR_STATE,
                  "no window is in use: call refit_window_next first");
    return REFIT_OK;
}

refit_status refit_window_place(refit_window *window, uint32_t part, void *memory,
                                refit_error *error)
{
    RFT_REFUSE_IF(window == NULL || memory == NULL, error, REFIT_ERR_INVALID,
                  "refit_window_place needs a window and the memory of a part");
    RFT_TRY(refuse_unused(window, error));
    const window_span *span = &window->spans[window->stepped];
    RFT_REFUSE_IF(part < span->first || part - span->first >= span->count ||
                      !is_new(&window->parts[part]),
                  error, REFIT_ERR_INVALID,
                  "part %" PRIu32 " is not a REFIT_PART_NEW of the window in use, which has parts "
                  "%" PRIu32 " to %" PRIu32,
                  part, span->first, span->first + span->count - 1);
    const rft_region *region = region_of(window, &window->parts[part]);
    RFT_REFUSE_IF(region->coded && (uintptr_t)memory % 4 != 0, error, REFIT_ERR_INVALID,
                  "part %" PRIu32 " is of fp32 masters of region %s, which do not lie at %p: give "
                  "an address that is a multiple of 4",
                  part, region->name, memory);
    rft_memory_range allocation;
    RFT_TRY(rft_device_memory_check(window->offloader->device, memory, window->parts[part].bytes,
                                    &allocation, error));
    window->parts[part].allocation = allocation.base;
    window->addresses[part] = memory;
    return REFIT_OK;
}

static refit_status check_placed(const refit_window *window, refit_error *error)
{
    const window_span *span = &window->spans[window->stepped];
    for (uint32_t part = span->first; part < span->first + span->count; part++) {
        RFT_REFUSE_IF(window->addresses[part] == NULL, error, REFIT_ERR_INVALID,
                      "part %" PRIu32
                      " is a REFIT_PART_NEW without memory: call refit_window_place "
                      "first",
                      part);
    }
    return REFIT_OK;
}

refit_status refit_window_done(refit_window *window, refit_stream_ref stream, refit_error *error)
{
    RFT_REFUSE_IF(window == NULL, error, REFIT_ERR_INVALID, "there is no window");
    /* A call that failed left two windows to leave, or one whose copies are not under way. */
    bool again =
        window->state == WINDOW_STEPPING && (window->left + 1 < window->stepped ||
                                             (window->left < window->stepped && !window->leaving));
    if (!again) RFT_TRY(refuse_unused(window, error));
    int64_t began = rft_now();
    if (!again) {
        RFT_TRY(check_placed(window, error));
        window->stepped++;
        window->work = stream;
        window->state = WINDOW_STEPPING;
    }
    refit_status status = leave(window, error);
    if (status == REFIT_OK) join_readers(window, stream);
    return account(window, began, status);
}

/* Every byte is in the image: the step's figures are known. */
static void settle(refit_window *window)
{
    refit_offloader *offloader = window->offloader;
    if (window->reported) return;
    window->reported = true;
    rft_offloader_release_image(offloader, &offloader->windows);
    if (window->stepped == 0) return;
    int64_t ended = rft_mover_finished_at(offloader->movers[RFT_OFFLOAD]);
    rft_step_figures *figures = &offloader->windows.figures;
    figures->count++;
    figures->in_bytes = window->in_bytes;
    figures->out_bytes = window->out_bytes;
    figures->last = ended > window->began ? ended - window->began : 0;
    figures->blocked = window->blocked;
}

/* The staging is there for windows, if the regions live on the host. */
void rft_window_stats(const refit_offloader *offloader, refit_stats *stats)
{
    const rft_step_figures *figures = &offloader->windows.figures;
    bool visits = rft_region_table_placement(&offloader->regions) == REFIT_PLACEMENT_HOST;
    uint64_t staging = offloader->staging_bytes * offloader->staging_count;
    stats->step_count = figures->count;
    stats->step_failures = figures->failures;
    stats->step_in_bytes_last = figures->in_bytes;
    stats->step_out_bytes_last = figures->out_bytes;
    stats->step_seconds_last = rft_seconds(figures->last);
    stats->step_blocked_seconds_last = rft_seconds(figures->blocked);
    stats->window_bytes = offloader->windows.bytes + (visits ? staging : 0);
}

refit_status refit_window_end(refit_window *window, refit_error *error)
{
    RFT_REFUSE_IF(window == NULL, error, REFIT_ERR_INVALID, "there is no window");
    if (window->state == WINDOW_IDLE) return REFIT_OK;
    int64_t began = rft_now();
    refit_status status = leave(window, error);
    if (status == REFIT_OK) {
        /* A copy in that fails now is of a window that is not stepped. */
        refit_status seen = see_in(window, timeout_of(window), error);
        if (window->arriving) status = seen;
    }
    if (status == REFIT_OK) status = await_readers(window, error);
    if (status == REFIT_OK) status = unless_timeout(see_out(window, 0, error));
    RFT_TRY(account(window, began, status));
    window->taken = window->stepped;
    window->state = WINDOW_IDLE;
    if (window->left == window->stepped) settle(window);
    return REFIT_OK;
}

/* ---- After a step ------------------------------------------------------------------------- */

static refit_status drain(refit_window *window, uint32_t timeout_ms, refit_error *error)
{
    int64_t deadline = rft_deadline(timeout_ms);
    while (window->left < window->stepped) {
        if (!window->leaving) RFT_TRY(start_out(window, error));
        RFT_TRY(see_out(window, (uint32_t)rft_ms_until(deadline), error));
    }
    return REFIT_OK;
}

refit_status refit_window_wait(refit_window *window, uint32_t timeout_ms, refit_error *error)
{
    RFT_REFUSE_IF(window == NULL, error, REFIT_ERR_INVALID, "there is no window");
    if (window->left < window->stepped) {
        int64_t began = rft_now();
        refit_status status = drain(window, timeout_ms, error);
        if (status == REFIT_ERR_TIMEOUT) return status;
        RFT_TRY(account(window, began, status));
    }
    if (window->state == WINDOW_IDLE) settle(window);
    return REFIT_OK;
}

uint32_t refit_window_progress(const refit_window *window)
{
    if (window == NULL || window->stepped == 0) return 0;
    const window_span *span = &window->spans[window->stepped - 1];
    return span->first + span->count;
}

refit_status refit_window_host(refit_window *window, refit_region_id region, void **bytes,
                               uint64_t *count, refit_error *error)
{
    RFT_REFUSE_IF(window == NULL || bytes == NULL || count == NULL, error, REFIT_ERR_INVALID,
                  "refit_window_host needs a window and places for the bytes and their count");
    RFT_TRY(refuse_stepping(window, error));
    refit_offloader *offloader = window->offloader;
    RFT_REFUSE_IF(!is_idle(window), error, REFIT_ERR_BUSY,
                  "copies out of the last step are under way: call refit_window_wait first");
    RFT_TRY(rft_offloader_check_movers(offloader, error));
    RFT_TRY(check_offloader(offloader, false, error));
    RFT_REFUSE_IF(region >= offloader->regions.count, error, REFIT_ERR_NOT_FOUND,
                  "there is no region %u: there are %u", region, offloader->regions.count);
    rft_region *item = &offloader->regions.items[region];
    RFT_REFUSE_IF(item->policy != REFIT_KEEP, error, REFIT_ERR_NOT_FOUND,
                  "region %s is not kept, so the image has no bytes of it", item->name);
    RFT_REFUSE_IF(item->on_cpu, error, REFIT_ERR_INVALID,
                  "region %s is stepped on the CPU, by a host step: use refit_host_step_region",
                  item->name);
    RFT_REFUSE_IF(item->coded, error, REFIT_ERR_UNSUPPORTED,
                  "region %s is in the image as what its weights lack: read it by "
                  "refit_read_lock_read, write it by a step in which it is REFIT_PART_NEW, or set "
                  "offload.masters to whole",
                  item->name);
    RFT_TRY(rft_image_await(offloader, timeout_of(window), error));
    item->rewritten = offloader->image_used = true;
    *bytes = rft_image_of(offloader, item);
    *count = item->bytes;
    return REFIT_OK;
}

refit_status refit_window_trim(refit_window *window, refit_error *error)
{
    RFT_REFUSE_IF(window == NULL, error, REFIT_ERR_INVALID, "there is no window");
    RFT_TRY(refuse_stepping(window, error));
    RFT_TRY(refit_window_wait(window, timeout_of(window), error));
    RFT_TRY(drop_memory(window, error));
    rft_units_trim(window->offloader);
    window->offloader->windows.is_short = false;
    return REFIT_OK;
}

/* ---- Close ----------------------------------------------------------------------------------- */

/* Ends the step and waits for its copies. A lost device has taken the bytes of its memory along;
 * and where the copies of one direction hang for good, only those of the other are waited for. */
static refit_status end_for_good(refit_window *window, refit_error *error)
{
    refit_offloader *offloader = window->offloader;
    refit_status status = refit_window_end(window, error);
    if (status == REFIT_OK) status = refit_window_wait(window, timeout_of(window), error);
    if (status == REFIT_OK) return REFIT_OK;
    if (rft_offloader_check_movers(offloader, NULL) == REFIT_OK) return status;
    status = see_in(window, timeout_of(window), error);
    if (window->arriving) return status;
    status = see_out(window, timeout_of(window), error);
    return window->leaving ? status : REFIT_OK;
}

refit_status refit_window_close(refit_window *window, refit_error *error)
{
    if (window == NULL) return REFIT_OK;
    RFT_TRY(end_for_good(window, error));
    RFT_TRY(drop_memory(window, error));
    close_plans(window);
    /* Of bytes that have not come back, no read lock and no restore may make use. */
    if (window->left == window->stepped)
        rft_offloader_release_image(window->offloader, &window->offloader->windows);
    window->offloader->window = NULL;
    rft_free(window->pieces);
    rft_free(window->recodes);
    rft_free(window->parts);
    rft_free(window->addresses);
    rft_free(window->spans);
    rft_free(window->reached);
    rft_free(window);
    return REFIT_OK;
}
