/*
 * A hash table with open addressing from address to size. It never shrinks, so that a program that
 * frees and takes the same memory in every cycle asks for bookkeeping memory only in the first.
 *
 * Removal moves later entries of the same run back instead of leaving a mark, so a search ends at
 * the first empty place however long the table has been in use.
 */
#include "device/blocks.h"

#include "base/alloc.h"

#define ROOM_FIRST 64u

/* Multiplied by the golden ratio the high bits are the mixed ones; device memory is aligned to 512
 * bytes, so the low nine say nothing. */
static uint32_t home_of(const rft_blocks *blocks, const void *memory)
{
    uint64_t mixed = ((uintptr_t)memory >> 9) * UINT64_C(0x9E3779B97F4A7C15);
    return (uint32_t)(mixed >> 32) & (blocks->room - 1);
}

/* The place of `memory`, or the empty place where it would go. */
static uint32_t find_place(const rft_blocks *blocks, const void *memory)
{
    uint32_t at = home_of(blocks, memory);
    while (blocks->places[at].memory != NULL && blocks->places[at].memory != memory) {
        at = (at + 1) & (blocks->room - 1);
    }
    return at;
}

static refit_status grow(rft_blocks *blocks, refit_error *error)
{
    rft_blocks larger = {.count = blocks->count,
                         .room = blocks->room == 0 ? ROOM_FIRST : blocks->room * 2};
    larger.places = rft_calloc(larger.room, sizeof *larger.places);
    RFT_REFUSE_IF(larger.places == NULL, error, REFIT_ERR_HOST_MEMORY,
                  "no host memory to keep track of %u device allocations", blocks->count + 1);
    for (uint32_t i = 0; i < blocks->room; i++) {
        if (blocks->places[i].memory == NULL) continue;
        larger.places[find_place(&larger, blocks->places[i].memory)] = blocks->places[i];
    }
    rft_free(blocks->places);
    *blocks = larger;
    return REFIT_OK;
}

void rft_blocks_close(rft_blocks *blocks)
{
    rft_free(blocks->places);
}

refit_status rft_blocks_add(rft_blocks *blocks, void *memory, uint64_t bytes, refit_error *error)
{
    /* At most two thirds full: runs stay short. */
    if (blocks->count >= blocks->room / 3 * 2) RFT_TRY(grow(blocks, error));
    blocks->places[find_place(blocks, memory)] = (rft_block){memory, bytes};
    blocks->count++;
    return REFIT_OK;
}

/* The entries behind the hole `at` that may not be found any more move up. */
static void close_hole(rft_blocks *blocks, uint32_t at)
{
    uint32_t mask = blocks->room - 1;
    uint32_t next = (at + 1) & mask;
    while (blocks->places[next].memory != NULL) {
        uint32_t home = home_of(blocks, blocks->places[next].memory);
        if (((next - home) & mask) >= ((next - at) & mask)) {
            blocks->places[at] = blocks->places[next];
            at = next;
        }
        next = (next + 1) & mask;
    }
    blocks->places[at].memory = NULL;
}

uint64_t rft_blocks_take(rft_blocks *blocks, const void *memory)
{
    if (blocks->count == 0) return 0;
    uint32_t at = find_place(blocks, memory);
    if (blocks->places[at].memory == NULL) return 0;
    uint64_t bytes = blocks->places[at].bytes;
    close_hole(blocks, at);
    blocks->count--;
    return bytes;
}
