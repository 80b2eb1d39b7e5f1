/*
 * Who needs the pieces of an arena: the one offloader of which it is a region, whose memory comes
 * and goes; holds, whose memory must stay; and owners that have let go of a piece while somebody
 * still needed it, so that it is to go later. The two first exclude each other. Counts only: memory
 * is device_arena.c's.
 */
#include <inttypes.h>

#include "memory/arena_inside.h"

/* ---- Pieces that go later ---------------------------------------------------------------- */

/* One that is doomed and not needed any more, from `from` on; NULL if there is none. */
static void *next_doomed(refit_arena *arena, uint64_t *from)
{
    void *memory = NULL;
    rft_arena_lock(arena);
    for (uint32_t at = 0; at < arena->subs.count && arena->doomed > 0; at++) {
        const rft_suballocation *sub = &arena->subs.list[at];
        bool free = sub->settled && !sub->moved && sub->holds == 0;
        if (sub->offset < *from || !sub->doomed || !free) continue;
        memory = arena->base + sub->offset;
        *from = sub->offset + 1;
        break;
    }
    rft_arena_unlock(arena);
    return memory;
}

void rft_arena_sweep(refit_arena *arena)
{
    uint64_t from = 0;
    refit_status status = REFIT_OK;
    void *memory = next_doomed(arena, &from);
    while (memory != NULL && status != REFIT_ERR_TIMEOUT) {
        status = rft_arena_give(arena, memory, NULL);
        memory = next_doomed(arena, &from);
    }
}

refit_status rft_arena_abandon(refit_arena *arena, void *memory, refit_error *error)
{
    rft_arena_sweep(arena);
    refit_status status = rft_arena_give(arena, memory, error);
    if (status == REFIT_OK || status == REFIT_ERR_INVALID) return status;
    rft_arena_lock(arena);
    rft_suballocation *sub = rft_arena_find(arena, memory);
    if (sub != NULL && !sub->doomed) {
        sub->doomed = true;
        arena->doomed++;
    }
    rft_arena_unlock(arena);
    return status;
}

/* ---- Regions and holds ------------------------------------------------------------------- */

/* NULL: no arena of the device has exactly this piece. Under the lock. */
static rft_suballocation *find_exact(refit_device *device, const void *memory, uint64_t bytes,
                                     refit_arena **out)
{
    for (refit_arena *arena = device->arenas; arena != NULL; arena = arena->next) {
        rft_suballocation *sub = rft_arena_find(arena, memory);
        if (sub == NULL || sub->bytes != bytes) continue;
        *out = arena;
        return sub;
    }
    return NULL;
}

/* Two that moved it would write over each other's bytes, or copy memory that has gone. */
static refit_status check_enter(const rft_suballocation *sub, const void *memory,
                                refit_error *error)
{
    RFT_REFUSE_IF(sub->doomed, error, REFIT_ERR_INVALID,
                  "the piece at %p was given back, and goes as soon as it can", memory);
    RFT_REFUSE_IF(sub->holds > 0, error, REFIT_ERR_BUSY,
                  "the piece at %p is held: NCCL or a network card knows its memory, which must "
                  "stay; set NCCL_GRAPH_REGISTER=0 or keep such buffers outside of arenas",
                  memory);
    RFT_REFUSE_IF(sub->moved, error, REFIT_ERR_BUSY,
                  "another offloader moves the piece at %p: close it or clear its regions first",
                  memory);
    return REFIT_OK;
}

refit_status rft_arena_enter(refit_device *device, const void *memory, uint64_t bytes,
                             refit_arena **out, refit_error *error)
{
    refit_arena *arena = NULL;
    rft_lock(&device->lock);
    rft_suballocation *sub = find_exact(device, memory, bytes, &arena);
    refit_status status = sub == NULL ? REFIT_OK : check_enter(sub, memory, error);
    if (sub != NULL && status == REFIT_OK) sub->moved = true;
    rft_unlock(&device->lock);
    if (status == REFIT_OK) *out = arena;
    return status;
}

void rft_arena_leave(refit_arena *arena, const void *memory)
{
    rft_arena_lock(arena);
    rft_suballocations_find(&arena->subs, rft_arena_offset(arena, memory))->moved = false;
    bool doomed = arena->doomed > 0;
    rft_arena_unlock(arena);
    if (doomed) rft_arena_sweep(arena);
}

static refit_status begin_hold(refit_arena *arena, const void *memory, uint64_t *bytes,
                               refit_error *error)
{
    rft_suballocation *sub = rft_arena_find(arena, memory);
    RFT_REFUSE_IF(sub == NULL, error, REFIT_ERR_INVALID,
                  "%p is no piece that refit_arena_alloc gave", memory);
    RFT_REFUSE_IF(sub->moved, error, REFIT_ERR_BUSY,
                  "an offloader moves the piece at %p, so its memory cannot stay: set "
                  "NCCL_GRAPH_REGISTER=0, or keep buffers that are registered elsewhere",
                  memory);
    sub->holds++;
    *bytes = sub->bytes;
    return REFIT_OK;
}

static refit_status end_hold(refit_arena *arena, const void *memory, refit_error *error)
{
    rft_suballocation *sub = rft_arena_find(arena, memory);
    RFT_REFUSE_IF(sub == NULL || sub->holds == 0, error, REFIT_ERR_INVALID,
                  "%p is no piece that is held", memory);
    sub->holds--;
    return REFIT_OK;
}

refit_status refit_arena_unhold(refit_arena *arena, void *memory, refit_error *error)
{
    RFT_REFUSE_IF(arena == NULL, error, REFIT_ERR_INVALID, "there is no arena");
    rft_arena_lock(arena);
    refit_status status = end_hold(arena, memory, error);
    bool doomed = arena->doomed > 0;
    rft_arena_unlock(arena);
    if (status == REFIT_OK && doomed) rft_arena_sweep(arena);
    return status;
}

/* A piece that an offloader left behind without memory gets it again. */
refit_status refit_arena_hold(refit_arena *arena, void *memory, refit_error *error)
{
    RFT_REFUSE_IF(arena == NULL, error, REFIT_ERR_INVALID, "there is no arena");
    uint64_t bytes = 0;
    rft_arena_lock(arena);
    refit_status status = begin_hold(arena, memory, &bytes, error);
    rft_arena_unlock(arena);
    if (status != REFIT_OK) return status;
    status = rft_device_commit(arena->device, memory, rft_arena_round(arena, bytes), error);
    if (status == REFIT_OK) return REFIT_OK;
    rft_arena_lock(arena);
    (void)end_hold(arena, memory, NULL);
    rft_arena_unlock(arena);
    return status;
}
