/*
 * A sorted array of pieces. What is free is what lies between them, so that neighbours which are
 * given back are one hole without further ado. As long as nothing was given back the next piece
 * goes behind the last, and nothing is searched.
 */
#include "memory/arena_pieces.h"

#include <inttypes.h>
#include <string.h>

#include "base/alloc.h"
#include "base/checked.h"

#define ROOM_FIRST 64u

void rft_arena_pieces_close(rft_arena_pieces *pieces)
{
    rft_free(pieces->list);
}

uint64_t rft_arena_pieces_round(const rft_arena_pieces *pieces, uint64_t bytes)
{
    return (bytes + pieces->granule - 1) & ~(pieces->granule - 1);
}

/* The first byte behind the pages of the `count` first pieces. */
static uint64_t end_of(const rft_arena_pieces *pieces, uint32_t count)
{
    if (count == 0) return 0;
    const rft_arena_piece *last = &pieces->list[count - 1];
    return last->offset + rft_arena_pieces_round(pieces, last->bytes);
}

/* How many pieces begin before `offset`. */
static uint32_t count_before(const rft_arena_pieces *pieces, uint64_t offset)
{
    uint32_t low = 0, high = pieces->count;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (pieces->list[middle].offset < offset) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

static refit_status grow(rft_arena_pieces *pieces, refit_error *error)
{
    if (pieces->count < pieces->room) return REFIT_OK;
    uint32_t room = pieces->room == 0 ? ROOM_FIRST : pieces->room * 2;
    rft_arena_piece *list =
        room < pieces->room ? NULL : rft_realloc(pieces->list, room, sizeof *list);
    RFT_REFUSE_IF(list == NULL, error, REFIT_ERR_HOST_MEMORY,
                  "no host memory to remember %" PRIu32 " pieces of an arena", room);
    pieces->list = list;
    pieces->room = room;
    return REFIT_OK;
}

/* The place in front of which the smallest hole of at least `whole` bytes lies; `count` if there is
 * none. `*largest`: the largest of all. */
static uint32_t find_hole(const rft_arena_pieces *pieces, uint64_t whole, uint64_t *largest)
{
    uint32_t best = pieces->count;
    uint64_t smallest = UINT64_MAX;
    *largest = 0;
    if (pieces->holes == 0) return best;
    for (uint32_t at = 0; at < pieces->count; at++) {
        uint64_t hole = pieces->list[at].offset - end_of(pieces, at);
        *largest = rft_max_u64(*largest, hole);
        if (hole < whole || hole >= smallest) continue;
        smallest = hole;
        best = at;
    }
    return best;
}

static void insert(rft_arena_pieces *pieces, uint32_t at, rft_arena_piece piece)
{
    rft_arena_piece *place = &pieces->list[at];
    uint64_t whole = rft_arena_pieces_round(pieces, piece.bytes);
    if (at < pieces->count) pieces->holes -= whole;
    memmove(place + 1, place, (pieces->count - at) * sizeof *place);
    *place = piece;
    pieces->count++;
}

refit_status rft_arena_pieces_add(rft_arena_pieces *pieces, uint64_t bytes, uint64_t end,
                                  uint64_t *offset, refit_error *error)
{
    uint64_t whole, largest;
    RFT_TRY(grow(pieces, error));
    if (!rft_align_u64(bytes, pieces->granule, &whole)) whole = UINT64_MAX;
    uint32_t at = find_hole(pieces, whole, &largest);
    uint64_t behind = end - end_of(pieces, pieces->count);
    RFT_REFUSE_IF(at == pieces->count && whole > behind, error, REFIT_ERR_LIMIT,
                  "%" PRIu64 " bytes do not fit into the arena: %" PRIu64 " of %" PRIu64
                  " are left in one stretch, in pages of %" PRIu64
                  "; open it with more, addresses cost nothing",
                  bytes, rft_max_u64(largest, behind), end, pieces->granule);
    *offset = end_of(pieces, at);
    insert(pieces, at, (rft_arena_piece){.offset = *offset, .bytes = bytes});
    return REFIT_OK;
}

rft_arena_piece *rft_arena_pieces_find(const rft_arena_pieces *pieces, uint64_t offset)
{
    uint32_t at = count_before(pieces, offset);
    bool found = at < pieces->count && pieces->list[at].offset == offset;
    return found ? &pieces->list[at] : NULL;
}

void rft_arena_pieces_remove(rft_arena_pieces *pieces, uint64_t offset)
{
    uint32_t at = count_before(pieces, offset);
    uint64_t before = end_of(pieces, at);
    uint64_t behind = end_of(pieces, at + 1);
    bool last = at + 1 == pieces->count;
    /* Behind the last piece nothing is a hole. */
    if (last) {
        pieces->holes -= offset - before;
    } else {
        pieces->holes += behind - offset;
    }
    pieces->count--;
    memmove(&pieces->list[at], &pieces->list[at + 1], (pieces->count - at) * sizeof *pieces->list);
}

bool rft_arena_pieces_are_run(const rft_arena_pieces *pieces, uint64_t offset, uint64_t bytes,
                              bool *held)
{
    uint64_t end;
    *held = false;
    if (!rft_add_u64(offset, bytes, &end) || !rft_align_u64(end, pieces->granule, &end))
        return false;
    uint32_t at = count_before(pieces, offset);
    while (offset < end && at < pieces->count) {
        const rft_arena_piece *piece = &pieces->list[at++];
        if (piece->offset != offset || !piece->settled) return false;
        *held = *held || piece->holds > 0;
        offset = end_of(pieces, at);
    }
    return offset == end;
}
