/*
 * A hash table with open addressing from address to size. It never shrinks, so that a program that
 * frees and takes the same memory in every cycle asks for bookkeeping memory only in the first.
 *
 * Removal moves later entries of the same run back instead of leaving a mark, so a search ends at
 * the first empty place however long the table has been in use.
 */
#include "device/allocations.h"

#include "base/alloc.h"

#define ROOM_FIRST 64u

/* Multiplied by the golden ratio the high bits are the mixed ones; device memory is aligned to 512
 * bytes, so the low nine say nothing. */
static uint32_t home_of(const rft_allocations *allocations, const void *memory)
{
    uint64_t mixed = ((uintptr_t)memory >> 9) * UINT64_C(0x9E3779B97F4A7C15);
    return (uint32_t)(mixed >> 32) & (allocations->room - 1);
}

/* The place of `memory`, or the empty place where it would go. */
static uint32_t find_place(const rft_allocations *allocations, const void *memory)
{
    uint32_t at = home_of(allocations, memory);
    while (allocations->places[at].memory != NULL && allocations->places[at].memory != memory) {
        at = (at + 1) & (allocations->room - 1);
    }
    return at;
}

static refit_status grow(rft_allocations *allocations, refit_error *error)
{
    rft_allocations larger = {.count = allocations->count,
                              .room = allocations->room == 0 ? ROOM_FIRST : allocations->room * 2};
    larger.places = rft_calloc(larger.room, sizeof *larger.places);
    RFT_REFUSE_IF(larger.places == NULL, error, REFIT_ERR_HOST_MEMORY,
                  "no host memory to keep track of %u device allocations", allocations->count + 1);
    for (uint32_t i = 0; i < allocations->room; i++) {
        if (allocations->places[i].memory == NULL) continue;
        larger.places[find_place(&larger, allocations->places[i].memory)] = allocations->places[i];
    }
    rft_free(allocations->places);
    *allocations = larger;
    return REFIT_OK;
}

void rft_allocations_close(rft_allocations *allocations)
{
    rft_free(allocations->places);
}

refit_status rft_allocations_add(rft_allocations *allocations, void *memory, uint64_t bytes,
                                 refit_error *error)
{
    /* At most two thirds full: runs stay short. */
    if (allocations->count >= allocations->room / 3 * 2) RFT_TRY(grow(allocations, error));
    allocations->places[find_place(allocations, memory)] = (rft_allocation){memory, bytes};
    allocations->count++;
    return REFIT_OK;
}

/* The entries after the hole `at` that may not be found any more move up. */
static void close_hole(rft_allocations *allocations, uint32_t at)
{
    uint32_t mask = allocations->room - 1;
    uint32_t next = (at + 1) & mask;
    while (allocations->places[next].memory != NULL) {
        uint32_t home = home_of(allocations, allocations->places[next].memory);
        if (((next - home) & mask) >= ((next - at) & mask)) {
            allocations->places[at] = allocations->places[next];
            at = next;
        }
        next = (next + 1) & mask;
    }
    allocations->places[at].memory = NULL;
}

uint64_t rft_allocations_take(rft_allocations *allocations, const void *memory)
{
    if (allocations->count == 0) return 0;
    uint32_t at = find_place(allocations, memory);
    if (allocations->places[at].memory == NULL) return 0;
    uint64_t bytes = allocations->places[at].bytes;
    close_hole(allocations, at);
    allocations->count--;
    return bytes;
}
