/*
 * The committed part of a reservation. Neighbours are joined, so an arena that is resident as a
 * whole is one stretch however many regions it holds.
 */
#include "device/host_extents.h"

#include <string.h>

#include "base/alloc.h"
#include "base/checked.h"

#define ROOM_FIRST 16u

void rft_host_extents_close(rft_host_extents *set)
{
    rft_free(set->list);
}

refit_status rft_host_extents_prepare(rft_host_extents *set, refit_error *error)
{
    if (set->count < set->room) return REFIT_OK;
    uint32_t room = set->room == 0 ? ROOM_FIRST : set->room * 2;
    rft_extent *list = rft_realloc(set->list, room, sizeof *list);
    RFT_REFUSE_IF(list == NULL, error, REFIT_ERR_HOST_MEMORY,
                  "no host memory to keep track of %u stretches of an arena", room);
    set->list = list;
    set->room = room;
    return REFIT_OK;
}

/* The first stretch that ends at or behind `at`. */
static uint32_t first_reaching(const rft_host_extents *set, uintptr_t at)
{
    uint32_t low = 0, high = set->count;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (set->list[middle].to < at) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

/* Puts `added` stretches of `with` in the place of those in [first, last). */
static void replace(rft_host_extents *set, uint32_t first, uint32_t last, const rft_extent *with,
                    uint32_t added)
{
    memmove(set->list + first + added, set->list + last, (set->count - last) * sizeof *set->list);
    memcpy(set->list + first, with, added * sizeof *with);
    set->count = set->count - (last - first) + added;
}

void rft_host_extents_add(rft_host_extents *set, rft_extent added)
{
    uint32_t first = first_reaching(set, added.from);
    uint32_t last = first;
    while (last < set->count && set->list[last].from <= added.to) {
        added.from = set->list[last].from < added.from ? set->list[last].from : added.from;
        added.to = set->list[last].to > added.to ? set->list[last].to : added.to;
        last++;
    }
    replace(set, first, last, &added, 1);
}

void rft_host_extents_remove(rft_host_extents *set, rft_extent removed)
{
    uint32_t first = first_reaching(set, removed.from + 1);
    uint32_t last = first;
    rft_extent left[2];
    uint32_t count = 0;
    while (last < set->count && set->list[last].from < removed.to) {
        rft_extent cut = set->list[last++];
        if (cut.from < removed.from) left[count++] = (rft_extent){cut.from, removed.from};
        if (cut.to > removed.to) left[count++] = (rft_extent){removed.to, cut.to};
    }
    replace(set, first, last, left, count);
}

uint64_t rft_host_extents_covered(const rft_host_extents *set, rft_extent range)
{
    uint64_t covered = 0;
    for (uint32_t i = first_reaching(set, range.from + 1); i < set->count; i++) {
        if (set->list[i].from >= range.to) break;
        covered +=
            rft_min_u64(set->list[i].to, range.to) - rft_max_u64(set->list[i].from, range.from);
    }
    return covered;
}
