/*
 * A sorted array of pieces. What is free is what lies between them, so that neighbours which are
 * given back are one hole without further ado. As long as nothing was given back the next piece
 * goes behind the last, and nothing is searched.
 */
#include "memory/suballocations.h"

#include <inttypes.h>
#include <string.h>

#include "base/alloc.h"
#include "base/checked.h"

#define ROOM_FIRST 64u

void rft_suballocations_close(rft_suballocations *subs)
{
    rft_free(subs->list);
}

uint64_t rft_suballocations_round(const rft_suballocations *subs, uint64_t bytes)
{
    return (bytes + subs->granule - 1) & ~(subs->granule - 1);
}

/* The first byte behind the pages of the `count` first pieces. */
static uint64_t end_of(const rft_suballocations *subs, uint32_t count)
{
    if (count == 0) return 0;
    const rft_suballocation *last = &subs->list[count - 1];
    return last->offset + rft_suballocations_round(subs, last->bytes);
}

/* How many pieces begin before `offset`. */
static uint32_t count_before(const rft_suballocations *subs, uint64_t offset)
{
    uint32_t low = 0, high = subs->count;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (subs->list[middle].offset < offset) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

static refit_status grow(rft_suballocations *subs, refit_error *error)
{
    if (subs->count < subs->room) return REFIT_OK;
    uint32_t room = subs->room == 0 ? ROOM_FIRST : subs->room * 2;
    rft_suballocation *list =
        room < subs->room ? NULL : rft_realloc(subs->list, room, sizeof *list);
    RFT_REFUSE_IF(list == NULL, error, REFIT_ERR_HOST_MEMORY,
                  "no host memory to remember %" PRIu32 " pieces of an arena", room);
    subs->list = list;
    subs->room = room;
    return REFIT_OK;
}

/* The place in front of which the smallest hole of at least `whole` bytes lies; `count` if there is
 * none. `*largest`: the largest of all. */
static uint32_t find_hole(const rft_suballocations *subs, uint64_t whole, uint64_t *largest)
{
    uint32_t best = subs->count;
    uint64_t smallest = UINT64_MAX;
    *largest = 0;
    if (subs->holes == 0) return best;
    for (uint32_t at = 0; at < subs->count; at++) {
        uint64_t hole = subs->list[at].offset - end_of(subs, at);
        *largest = rft_max_u64(*largest, hole);
        if (hole < whole || hole >= smallest) continue;
        smallest = hole;
        best = at;
    }
    return best;
}

static void insert(rft_suballocations *subs, uint32_t at, rft_suballocation sub)
{
    rft_suballocation *place = &subs->list[at];
    uint64_t whole = rft_suballocations_round(subs, sub.bytes);
    if (at < subs->count) subs->holes -= whole;
    memmove(place + 1, place, (subs->count - at) * sizeof *place);
    *place = sub;
    subs->count++;
}

refit_status rft_suballocations_add(rft_suballocations *subs, uint64_t bytes, uint64_t end,
                                    uint64_t *offset, refit_error *error)
{
    uint64_t whole, largest;
    RFT_TRY(grow(subs, error));
    if (!rft_align_u64(bytes, subs->granule, &whole)) whole = UINT64_MAX;
    uint32_t at = find_hole(subs, whole, &largest);
    uint64_t behind = end - end_of(subs, subs->count);
    RFT_REFUSE_IF(at == subs->count && whole > behind, error, REFIT_ERR_LIMIT,
                  "%" PRIu64 " bytes do not fit into the arena: %" PRIu64 " of %" PRIu64
                  " are left in one stretch, in pages of %" PRIu64
                  "; open it with more, addresses cost nothing",
                  bytes, rft_max_u64(largest, behind), end, subs->granule);
    *offset = end_of(subs, at);
    insert(subs, at, (rft_suballocation){.offset = *offset, .bytes = bytes});
    return REFIT_OK;
}

rft_suballocation *rft_suballocations_find(const rft_suballocations *subs, uint64_t offset)
{
    uint32_t at = count_before(subs, offset);
    bool found = at < subs->count && subs->list[at].offset == offset;
    return found ? &subs->list[at] : NULL;
}

void rft_suballocations_remove(rft_suballocations *subs, uint64_t offset)
{
    uint32_t at = count_before(subs, offset);
    uint64_t before = end_of(subs, at);
    uint64_t behind = end_of(subs, at + 1);
    bool last = at + 1 == subs->count;
    /* Behind the last piece nothing is a hole. */
    if (last) {
        subs->holes -= offset - before;
    } else {
        subs->holes += behind - offset;
    }
    subs->count--;
    memmove(&subs->list[at], &subs->list[at + 1], (subs->count - at) * sizeof *subs->list);
}

bool rft_suballocations_are_run(const rft_suballocations *subs, uint64_t offset, uint64_t bytes,
                                bool *held)
{
    uint64_t end;
    *held = false;
    if (!rft_add_u64(offset, bytes, &end) || !rft_align_u64(end, subs->granule, &end)) return false;
    uint32_t at = count_before(subs, offset);
    while (offset < end && at < subs->count) {
        const rft_suballocation *sub = &subs->list[at++];
        if (sub->offset != offset || !sub->settled) return false;
        *held = *held || sub->holds > 0;
        offset = end_of(subs, at);
    }
    return offset == end;
}
