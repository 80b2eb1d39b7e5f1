/*
 * Arenas: one reservation of addresses, cut from the front into pieces of whole pages.
 *
 * Pieces are remembered, so that only what refit_arena_alloc gave can be committed and decommitted,
 * never a part that shares a page with a neighbour. The arenas of a device form a list, so that the
 * arena of a region is found by its address; the list and the pieces are guarded by the device's
 * lock, because one thread may look for a region while another takes the next piece. Knows nothing
 * of regions or copies.
 */
#include "memory/device_arena.h"

#include <inttypes.h>
#include <string.h>

#include "base/alloc.h"
#include "base/checked.h"

typedef struct arena_piece {
    uint64_t offset;
    uint64_t bytes; /* as asked for; its pages are these rounded up */
} arena_piece;

struct refit_arena {
    refit_device *device; /* retained */
    char *base;
    uint64_t bytes; /* reserved, whole granules */
    uint64_t granule;
    atomic_uint_fast32_t regions; /* of offloaders */
    refit_arena *next;            /* in the device's list; guarded by device->lock, like the rest */
    arena_piece *pieces;          /* owned; by offset */
    uint32_t piece_count;
    uint32_t piece_room;
};

/* The end of the last piece, a multiple of the granule. */
static uint64_t used_bytes(const refit_arena *arena)
{
    if (arena->piece_count == 0) return 0;
    const arena_piece *last = &arena->pieces[arena->piece_count - 1];
    uint64_t end = last->offset + last->bytes;
    return (end + arena->granule - 1) & ~(arena->granule - 1);
}

static void link_arena(refit_arena *arena)
{
    refit_device *device = arena->device;
    rft_lock(&device->lock);
    arena->next = device->arenas;
    device->arenas = arena;
    rft_unlock(&device->lock);
}

static void unlink_arena(refit_arena *arena)
{
    refit_device *device = arena->device;
    rft_lock(&device->lock);
    refit_arena **link = &device->arenas;
    while (*link != arena) {
        link = &(*link)->next;
    }
    *link = arena->next;
    rft_unlock(&device->lock);
}

static refit_status reserve(refit_arena *arena, uint64_t bytes, refit_error *error)
{
    void *base;
    RFT_TRY(rft_device_reserve(arena->device, bytes, &base, &arena->granule, error));
    arena->base = base;
    arena->bytes = (bytes + arena->granule - 1) & ~(arena->granule - 1);
    return REFIT_OK;
}

refit_status refit_arena_open(refit_device *device, uint64_t bytes, refit_arena **out,
                              refit_error *error)
{
    RFT_REFUSE_IF(device == NULL || out == NULL || bytes == 0, error, REFIT_ERR_INVALID,
                  "an arena needs a device, at least one byte, and a place for the result");
    RFT_REFUSE_IF(!rft_device_get_caps(device).stable_arena, error, REFIT_ERR_UNSUPPORTED,
                  "this device has no addresses that stay: let regions live in ordinary memory and "
                  "bind them again");
    refit_arena *arena = rft_calloc(1, sizeof *arena);
    RFT_REFUSE_IF(arena == NULL, error, REFIT_ERR_HOST_MEMORY, "no memory for an arena");
    arena->device = device;
    atomic_init(&arena->regions, 0);
    refit_status status = reserve(arena, bytes, error);
    if (status != REFIT_OK) {
        rft_free(arena);
        return status;
    }
    rft_device_retain(device);
    link_arena(arena);
    *out = arena;
    return REFIT_OK;
}

refit_status refit_arena_close(refit_arena *arena, refit_error *error)
{
    if (arena == NULL) return REFIT_OK;
    uint32_t regions = (uint32_t)atomic_load(&arena->regions);
    RFT_REFUSE_IF(regions > 0, error, REFIT_ERR_BUSY,
                  "%" PRIu32 " regions of offloaders lie in the arena: close the offloaders first",
                  regions);
    unlink_arena(arena);
    rft_device_unreserve(arena->device, arena->base, arena->bytes);
    rft_device_release(arena->device);
    rft_free(arena->pieces);
    rft_free(arena);
    return REFIT_OK;
}

/* Room for one more piece; under the device's lock. */
static refit_status grow_pieces(refit_arena *arena, refit_error *error)
{
    if (arena->piece_count < arena->piece_room) return REFIT_OK;
    uint32_t room = arena->piece_room == 0 ? 64 : arena->piece_room * 2;
    arena_piece *pieces = rft_realloc(arena->pieces, room, sizeof *pieces);
    RFT_REFUSE_IF(room < arena->piece_room || pieces == NULL, error, REFIT_ERR_HOST_MEMORY,
                  "no memory to remember %" PRIu32 " pieces of an arena", room);
    arena->pieces = pieces;
    arena->piece_room = room;
    return REFIT_OK;
}

static refit_status add_piece(refit_arena *arena, uint64_t bytes, refit_error *error)
{
    rft_lock(&arena->device->lock);
    refit_status status = grow_pieces(arena, error);
    if (status == REFIT_OK) {
        uint64_t offset = used_bytes(arena);
        arena->pieces[arena->piece_count++] = (arena_piece){offset, bytes};
    }
    rft_unlock(&arena->device->lock);
    return status;
}

refit_status refit_arena_alloc(refit_arena *arena, uint64_t bytes, void **out, refit_error *error)
{
    RFT_REFUSE_IF(arena == NULL || out == NULL || bytes == 0, error, REFIT_ERR_INVALID,
                  "a piece needs an arena, at least one byte, and a place for the result");
    /* One thread at a time takes pieces, so what is used does not change meanwhile. */
    uint64_t used = used_bytes(arena);
    uint64_t whole;
    RFT_REFUSE_IF(!rft_align_u64(bytes, arena->granule, &whole) || whole > arena->bytes - used,
                  error, REFIT_ERR_LIMIT,
                  "%" PRIu64 " bytes do not fit into the arena: %" PRIu64 " of %" PRIu64
                  " are left, in pages of %" PRIu64 "; open it with more, addresses cost nothing",
                  bytes, arena->bytes - used, arena->bytes, arena->granule);
    RFT_TRY(rft_device_commit(arena->device, arena->base + used, whole, error));
    refit_status status = add_piece(arena, bytes, error);
    if (status != REFIT_OK) {
        (void)rft_device_decommit(arena->device, arena->base + used, whole, NULL, NULL);
        return status;
    }
    *out = arena->base + used;
    return REFIT_OK;
}

/* Does the arena hold exactly this piece? Under the device's lock. */
static bool has_piece(const refit_arena *arena, const void *memory, uint64_t bytes)
{
    uintptr_t offset = (uintptr_t)memory - (uintptr_t)arena->base;
    uint32_t from = 0;
    uint32_t to = arena->piece_count;
    while (from < to) {
        uint32_t middle = from + (to - from) / 2;
        const arena_piece *piece = &arena->pieces[middle];
        if (piece->offset == offset) return piece->bytes == bytes;
        if (piece->offset < offset) {
            from = middle + 1;
        } else {
            to = middle;
        }
    }
    return false;
}

refit_arena *rft_arena_find(refit_device *device, const void *memory, uint64_t bytes)
{
    rft_lock(&device->lock);
    refit_arena *arena = device->arenas;
    while (arena != NULL && !has_piece(arena, memory, bytes)) {
        arena = arena->next;
    }
    rft_unlock(&device->lock);
    return arena;
}

void rft_arena_retain(refit_arena *arena)
{
    atomic_fetch_add(&arena->regions, 1);
}

void rft_arena_release(refit_arena *arena)
{
    atomic_fetch_sub(&arena->regions, 1);
}

static refit_status check_piece(refit_arena *arena, const void *memory, uint64_t bytes,
                                uint64_t *whole, refit_error *error)
{
    rft_lock(&arena->device->lock);
    bool known = has_piece(arena, memory, bytes);
    rft_unlock(&arena->device->lock);
    RFT_REFUSE_IF(!known, error, REFIT_ERR_INVALID,
                  "%" PRIu64 " bytes at %p are not a piece that refit_arena_alloc gave", bytes,
                  memory);
    *whole = (bytes + arena->granule - 1) & ~(arena->granule - 1);
    return REFIT_OK;
}

refit_status rft_arena_commit(refit_arena *arena, void *memory, uint64_t bytes, refit_error *error)
{
    uint64_t whole;
    RFT_TRY(check_piece(arena, memory, bytes, &whole, error));
    return rft_device_commit(arena->device, memory, whole, error);
}

refit_status rft_arena_decommit(refit_arena *arena, void *memory, uint64_t bytes,
                                refit_error *error)
{
    uint64_t whole;
    RFT_TRY(check_piece(arena, memory, bytes, &whole, error));
    return rft_device_decommit(arena->device, memory, whole, NULL, error);
}
