/*
 * Where each region lies in the host image.
 *
 * One pass over the regions in the order of return, with a cursor: align it, begin a new slab if
 * the region does not fit into what is left of this one, place, cut off full slabs, go on. Slabs
 * have no fixed size, so nothing is lost at their ends but the bytes up to the next page. Knows
 * nothing of memory or devices.
 */
#include "memory/layout.h"

#include <inttypes.h>
#include <stdlib.h>

#include "base/alloc.h"
#include "base/checked.h"

/* Small regions: bytes over alignment, at least, so that padding is little; but each begins a cache
 * line, for threads that copy neighbours. */
#define PADDING_SHARE 32
#define LINE_BYTES    64

typedef struct layout_cursor {
    uint64_t at;        /* where the image ends so far */
    uint64_t alignment; /* of regions that are not small */
    uint64_t edge;      /* of slabs */
    uint64_t most;      /* bytes of one slab */
} layout_cursor;

/* The order of return. Items are elements of one array: of two equals the lower address came first.
 */
static int compare_items(const void *left, const void *right)
{
    const rft_layout_item *a = *(rft_layout_item *const *)left;
    const rft_layout_item *b = *(rft_layout_item *const *)right;
    if (a->priority != b->priority) return a->priority > b->priority ? -1 : 1;
    if (a->group != b->group) return a->group < b->group ? -1 : 1;
    return a < b ? -1 : a > b;
}

static rft_layout_item **sort_items(rft_layout_item *items, uint32_t count)
{
    rft_layout_item **sorted = rft_calloc(count, sizeof(rft_layout_item *));
    if (sorted == NULL) return NULL;
    for (uint32_t i = 0; i < count; i++) {
        sorted[i] = &items[i];
    }
    qsort(sorted, count, sizeof(rft_layout_item *), compare_items);
    for (uint32_t i = 0; i < count; i++) {
        sorted[i]->order = i;
    }
    return sorted;
}

/* The last slab ends, and the next begins, at `offset`. */
static void add_slab(rft_layout *layout, uint64_t offset)
{
    if (layout->slab_count > 0) {
        rft_slab *last = &layout->slabs[layout->slab_count - 1];
        last->bytes = offset - last->offset;
    }
    layout->slabs[layout->slab_count++].offset = offset;
}

static bool begin_slab(rft_layout *layout, layout_cursor *cursor)
{
    if (!rft_align_u64(cursor->at, cursor->edge, &cursor->at)) return false;
    add_slab(layout, cursor->at);
    return true;
}

/* What was placed last may reach beyond its slab. */
static void cut_slabs(rft_layout *layout, const layout_cursor *cursor)
{
    const rft_slab *last = &layout->slabs[layout->slab_count - 1];
    while (cursor->at - last->offset > cursor->most) {
        add_slab(layout, last->offset + cursor->most);
        last++;
    }
}

static bool fits_slab(const rft_layout *layout, const layout_cursor *cursor, uint64_t begin,
                      uint64_t bytes)
{
    if (layout->slab_count == 0) return false;
    uint64_t used = begin - layout->slabs[layout->slab_count - 1].offset;
    return used <= cursor->most && bytes <= cursor->most - used;
}

/* An alignment above the usual one holds for small regions too: the configuration asks for it
 * because a reader of the image needs it. */
static uint64_t alignment_of(const layout_cursor *cursor, const rft_layout_item *item)
{
    uint64_t alignment = cursor->alignment;
    if (alignment > RFT_USUAL_ALIGNMENT) return alignment;
    while (alignment > LINE_BYTES && alignment > item->bytes / PADDING_SHARE) {
        alignment /= 2;
    }
    return alignment;
}

static bool place_item(rft_layout *layout, layout_cursor *cursor, rft_layout_item *item)
{
    uint64_t begin;
    item->offset = 0;
    if (item->bytes == 0) return true;
    if (!rft_align_u64(cursor->at, alignment_of(cursor, item), &begin)) return false;
    if (!fits_slab(layout, cursor, begin, item->bytes)) {
        if (!begin_slab(layout, cursor)) return false;
        begin = cursor->at;
    }
    item->offset = begin;
    layout->payload_bytes += item->bytes; /* no more than the end of the image: cannot wrap */
    if (!rft_add_u64(begin, item->bytes, &cursor->at)) return false;
    cut_slabs(layout, cursor);
    return true;
}

static refit_status place_items(rft_layout *layout, layout_cursor *cursor, rft_layout_item **sorted,
                                uint32_t count, refit_error *error)
{
    for (uint32_t i = 0; i < count; i++) {
        RFT_REFUSE_IF(!place_item(layout, cursor, sorted[i]), error, REFIT_ERR_LIMIT,
                      "the regions are larger than memory can be: one of %" PRIu64
                      " bytes goes beyond 2^64, check the sizes that were added",
                      sorted[i]->bytes);
    }
    if (layout->slab_count > 0) {
        rft_slab *last = &layout->slabs[layout->slab_count - 1];
        last->bytes = cursor->at - last->offset;
    }
    layout->image_bytes = cursor->at;
    return REFIT_OK;
}

/* The most slabs that any order of the items can need: one begins with each, and more within the
 * large ones. */
static refit_status count_slabs(const rft_layout_item *items, uint32_t count, uint64_t slab_bytes,
                                uint32_t *room, refit_error *error)
{
    uint64_t slabs = count;
    for (uint32_t i = 0; i < count; i++) {
        slabs += items[i].bytes / slab_bytes;
        RFT_REFUSE_IF(slabs > UINT32_MAX, error, REFIT_ERR_LIMIT,
                      "one region of %" PRIu64 " bytes makes too many slabs of %" PRIu64
                      " bytes: check its size, or raise offload.slab_bytes",
                      items[i].bytes, slab_bytes);
    }
    *room = (uint32_t)slabs;
    return REFIT_OK;
}

static refit_status check_sizes(uint64_t alignment, uint64_t slab_bytes, refit_error *error)
{
    bool powers = rft_is_power_of_two(alignment) && rft_is_power_of_two(slab_bytes);
    RFT_REFUSE_IF(!powers || slab_bytes < alignment, error, REFIT_ERR_INVALID,
                  "alignment %" PRIu64 " and slab size %" PRIu64
                  " must be powers of two, the second not below the first",
                  alignment, slab_bytes);
    return REFIT_OK;
}

refit_status rft_layout_open(rft_layout *layout, rft_layout_item *items, uint32_t count,
                             uint64_t alignment, uint64_t slab_bytes, refit_error *error)
{
    uint32_t room = 0;
    RFT_TRY(check_sizes(alignment, slab_bytes, error));
    RFT_TRY(count_slabs(items, count, slab_bytes, &room, error));
    rft_layout made = {0, 0, NULL, 0};
    if (count == 0) {
        *layout = made;
        return REFIT_OK;
    }
    refit_status status = REFIT_ERR_HOST_MEMORY;
    uint64_t edge = rft_max_u64(alignment, rft_min_u64(RFT_SLAB_EDGE, slab_bytes));
    layout_cursor cursor = {0, alignment, edge, slab_bytes};
    rft_layout_item **sorted = sort_items(items, count);
    made.slabs = rft_calloc(room, sizeof *made.slabs);
    if (sorted == NULL || made.slabs == NULL) {
        rft_fail(error, status, "no memory to lay out %" PRIu32 " regions", count);
    } else {
        status = place_items(&made, &cursor, sorted, count, error);
    }
    rft_free(sorted);
    if (status == REFIT_OK) {
        *layout = made;
    } else {
        rft_layout_close(&made);
    }
    return status;
}

void rft_layout_close(rft_layout *layout)
{
    rft_free(layout->slabs);
    *layout = (rft_layout){0, 0, NULL, 0};
}

uint32_t rft_layout_find(const rft_layout *layout, uint64_t at)
{
    uint32_t low = 0, high = layout->slab_count;
    while (high - low > 1) {
        uint32_t middle = low + (high - low) / 2;
        if (layout->slabs[middle].offset <= at) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}
