/*
 * Arenas: one reservation of addresses, cut into pieces of whole pages.
 *
 * Pieces are remembered (suballocations.c), so that only what refit_arena_alloc gave can be
 * committed and decommitted, never a part that shares a page with a neighbour. The arenas of a
 * device form a list, so that the arena of a region is found by its address; the list and the books
 * are guarded by the device's lock. The device itself, which may take its time, is called without
 * it: a piece whose memory is coming or going for good is not settled meanwhile, and nobody else
 * finds it.
 *
 * Who needs a piece is in arena_references.c. Knows nothing of copies, nor of what the bytes mean.
 */
#include <inttypes.h>

#include "base/alloc.h"
#include "memory/arena_inside.h"

#define FAILURES_MOST 64u /* streams of an arena whose work has failed */

/* ---- Open and close ---------------------------------------------------------------------- */

static void link_arena(refit_arena *arena)
{
    rft_arena_lock(arena);
    arena->next = arena->device->arenas;
    arena->device->arenas = arena;
    rft_arena_unlock(arena);
}

static void unlink_arena(refit_arena *arena)
{
    rft_arena_lock(arena);
    refit_arena **link = &arena->device->arenas;
    while (*link != arena) {
        link = &(*link)->next;
    }
    *link = arena->next;
    rft_arena_unlock(arena);
}

static refit_status reserve(refit_arena *arena, uint64_t bytes, refit_error *error)
{
    void *base;
    RFT_TRY(rft_device_reserve(arena->device, bytes, &base, &arena->subs.granule, error));
    arena->base = base;
    arena->bytes = rft_arena_round(arena, bytes);
    return REFIT_OK;
}

refit_status refit_arena_open(refit_device *device, uint64_t bytes, refit_arena **out,
                              refit_error *error)
{
    RFT_REFUSE_IF(device == NULL || out == NULL || bytes == 0, error, REFIT_ERR_INVALID,
                  "an arena needs a device, at least one byte, and a place for the result");
    refit_arena *arena = rft_calloc(1, sizeof *arena);
    RFT_REFUSE_IF(arena == NULL, error, REFIT_ERR_HOST_MEMORY, "no memory for an arena");
    arena->device = device;
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

static refit_status check_unused(refit_arena *arena, refit_error *error)
{
    uint64_t regions = 0, holds = 0;
    rft_arena_lock(arena);
    bool attached = arena->attached;
    for (uint32_t at = 0; at < arena->subs.count; at++) {
        regions += arena->subs.list[at].moved;
        holds += arena->subs.list[at].holds;
    }
    rft_arena_unlock(arena);
    RFT_REFUSE_IF(regions > 0, error, REFIT_ERR_BUSY,
                  "%" PRIu64 " regions of offloaders lie in the arena: close the offloaders first",
                  regions);
    RFT_REFUSE_IF(holds > 0, error, REFIT_ERR_BUSY,
                  "pieces of the arena are held %" PRIu64 " times: end what has registered them, "
                  "then call refit_arena_unhold",
                  holds);
    RFT_REFUSE_IF(attached, error, REFIT_ERR_BUSY,
                  "torch allocates from the arena: call refit_torch_detach first");
    return REFIT_OK;
}

/* Does work still run that uses the arena? */
static bool is_in_use(refit_status status)
{
    return status == REFIT_ERR_TIMEOUT || status == REFIT_ERR_STATE;
}

/* Work that failed is told once, and ends the wait for the streams behind it: so it is asked again.
 */
static refit_status empty(refit_arena *arena, refit_error *error)
{
    refit_status status = REFIT_ERR_DEVICE;
    for (uint32_t i = 0; i < FAILURES_MOST && status != REFIT_OK && !is_in_use(status); i++) {
        status = rft_device_decommit(arena->device, arena->base, arena->bytes, NULL, error);
    }
    return status;
}

/* A device that fails here has nothing that could be kept; work that still runs has. */
refit_status refit_arena_close(refit_arena *arena, refit_error *error)
{
    if (arena == NULL) return REFIT_OK;
    RFT_TRY(check_unused(arena, error));
    refit_status status = empty(arena, error);
    if (is_in_use(status)) return status;
    unlink_arena(arena);
    rft_device_unreserve(arena->device, arena->base, arena->bytes);
    rft_device_release(arena->device);
    rft_suballocations_close(&arena->subs);
    rft_free(arena);
    return REFIT_OK;
}

uint64_t rft_arena_round(const refit_arena *arena, uint64_t bytes)
{
    return rft_suballocations_round(&arena->subs, bytes);
}

refit_device *rft_arena_device(const refit_arena *arena)
{
    return arena->device;
}

void rft_arena_set_attached(refit_arena *arena, bool attached)
{
    rft_arena_lock(arena);
    arena->attached = attached;
    rft_arena_unlock(arena);
}

/* ---- Pieces ------------------------------------------------------------------------------ */

/* Its memory has come, or it is gone. */
static void settle(refit_arena *arena, uint64_t offset, bool there)
{
    rft_arena_lock(arena);
    if (there) {
        rft_suballocations_find(&arena->subs, offset)->settled = true;
    } else {
        rft_suballocations_remove(&arena->subs, offset);
    }
    rft_arena_unlock(arena);
}

refit_status refit_arena_alloc(refit_arena *arena, uint64_t bytes, void **out, refit_error *error)
{
    RFT_REFUSE_IF(arena == NULL || out == NULL || bytes == 0, error, REFIT_ERR_INVALID,
                  "a piece needs an arena, at least one byte, and a place for the result");
    uint64_t offset = 0;
    rft_arena_lock(arena);
    refit_status status = rft_suballocations_add(&arena->subs, bytes, arena->bytes, &offset, error);
    rft_arena_unlock(arena);
    if (status != REFIT_OK) return status;
    void *memory = arena->base + offset;
    status = rft_device_commit(arena->device, memory, rft_arena_round(arena, bytes), error);
    settle(arena, offset, status == REFIT_OK);
    if (status == REFIT_OK) *out = memory;
    return status;
}

static refit_status check_free(const rft_suballocation *sub, const void *memory, refit_error *error)
{
    RFT_REFUSE_IF(sub == NULL, error, REFIT_ERR_INVALID,
                  "%p is no piece that refit_arena_alloc gave, or was given back before", memory);
    RFT_REFUSE_IF(sub->moved, error, REFIT_ERR_BUSY,
                  "an offloader has the piece at %p as a region: clear or close it first", memory);
    RFT_REFUSE_IF(sub->holds > 0, error, REFIT_ERR_BUSY,
                  "the piece at %p is held: end what has registered it, then call "
                  "refit_arena_unhold",
                  memory);
    return REFIT_OK;
}

/* From here on nobody else finds it. Under the lock. */
static refit_status begin_free(refit_arena *arena, const void *memory, uint64_t *bytes,
                               refit_error *error)
{
    rft_suballocation *sub = rft_arena_find(arena, memory);
    RFT_TRY(check_free(sub, memory, error));
    sub->settled = false;
    *bytes = sub->bytes;
    return REFIT_OK;
}

static void end_free(refit_arena *arena, const void *memory, bool gone)
{
    uint64_t offset = rft_arena_offset(arena, memory);
    if (gone) {
        rft_arena_lock(arena);
        arena->doomed -= rft_suballocations_find(&arena->subs, offset)->doomed;
        rft_arena_unlock(arena);
    }
    settle(arena, offset, !gone);
}

refit_status rft_arena_give(refit_arena *arena, void *memory, refit_error *error)
{
    uint64_t bytes = 0;
    rft_arena_lock(arena);
    refit_status status = begin_free(arena, memory, &bytes, error);
    rft_arena_unlock(arena);
    if (status != REFIT_OK) return status;
    status = rft_device_decommit(arena->device, memory, rft_arena_round(arena, bytes), NULL, error);
    end_free(arena, memory, status == REFIT_OK);
    return status;
}

refit_status refit_arena_free(refit_arena *arena, void *memory, refit_error *error)
{
    RFT_REFUSE_IF(arena == NULL, error, REFIT_ERR_INVALID, "there is no arena");
    return memory == NULL ? REFIT_OK : rft_arena_give(arena, memory, error);
}

refit_status refit_arena_piece(refit_arena *arena, uint32_t index, void **memory, uint64_t *bytes,
                               refit_error *error)
{
    RFT_REFUSE_IF(arena == NULL || memory == NULL || bytes == NULL, error, REFIT_ERR_INVALID,
                  "refit_arena_piece needs an arena and places for address and size");
    const rft_suballocation *found = NULL;
    uint32_t settled = 0;
    rft_arena_lock(arena);
    for (uint32_t at = 0; at < arena->subs.count && found == NULL; at++) {
        const rft_suballocation *sub = &arena->subs.list[at];
        if (sub->settled && !sub->doomed && settled++ == index) found = sub;
    }
    if (found != NULL) {
        *memory = arena->base + found->offset;
        *bytes = found->bytes;
    }
    rft_arena_unlock(arena);
    RFT_REFUSE_IF(found == NULL, error, REFIT_ERR_NOT_FOUND,
                  "there is no piece %" PRIu32 ": the arena has %" PRIu32, index, settled);
    return REFIT_OK;
}

/* ---- Memory comes and goes --------------------------------------------------------------- */

static refit_status check_run(refit_arena *arena, const void *memory, uint64_t bytes, bool goes,
                              refit_error *error)
{
    bool held;
    rft_arena_lock(arena);
    bool run =
        rft_suballocations_are_run(&arena->subs, rft_arena_offset(arena, memory), bytes, &held);
    rft_arena_unlock(arena);
    RFT_REFUSE_IF(!run, error, REFIT_ERR_INVALID,
                  "%" PRIu64 " bytes at %p are not pieces that refit_arena_alloc gave", bytes,
                  memory);
    RFT_REFUSE_IF(goes && held, error, REFIT_ERR_BUSY,
                  "a piece at %p is held (refit_arena_hold), so its memory stays", memory);
    return REFIT_OK;
}

refit_status rft_arena_commit(refit_arena *arena, void *memory, uint64_t bytes, refit_error *error)
{
    RFT_TRY(check_run(arena, memory, bytes, false, error));
    return rft_device_commit(arena->device, memory, rft_arena_round(arena, bytes), error);
}

refit_status rft_arena_decommit(refit_arena *arena, void *memory, uint64_t bytes, uint64_t *freed,
                                refit_error *error)
{
    if (freed != NULL) *freed = 0;
    RFT_TRY(check_run(arena, memory, bytes, true, error));
    return rft_device_decommit(arena->device, memory, rft_arena_round(arena, bytes), freed, error);
}

/* ---- Streams ----------------------------------------------------------------------------- */

refit_status refit_arena_use(refit_arena *arena, refit_stream_ref stream, refit_error *error)
{
    RFT_REFUSE_IF(arena == NULL, error, REFIT_ERR_INVALID, "there is no arena");
    return rft_device_reserve_use(arena->device, arena->base, stream, error);
}

refit_status refit_arena_unuse(refit_arena *arena, refit_stream_ref stream, refit_error *error)
{
    RFT_REFUSE_IF(arena == NULL, error, REFIT_ERR_INVALID, "there is no arena");
    return rft_device_reserve_unuse(arena->device, arena->base, stream, error);
}
