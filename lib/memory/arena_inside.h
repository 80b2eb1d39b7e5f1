/* arena_inside: the arena as device_arena.c and arena_references.c see it, and nobody else. */
#ifndef RFT_ARENA_INSIDE_H
#define RFT_ARENA_INSIDE_H

#include "memory/device_arena.h"
#include "memory/suballocations.h"

struct refit_arena {
    refit_device *device; /* retained */
    char *base;
    uint64_t bytes;          /* reserved, whole granules */
    refit_arena *next;       /* in the device's list; guarded by device->lock, like the rest */
    rft_suballocations subs; /* its granule never changes */
    uint32_t doomed;         /* pieces that are */
    bool attached;
};

static inline void rft_arena_lock(const refit_arena *arena)
{
    rft_lock(&arena->device->lock);
}

static inline void rft_arena_unlock(const refit_arena *arena)
{
    rft_unlock(&arena->device->lock);
}

static inline uint64_t rft_arena_offset(const refit_arena *arena, const void *memory)
{
    return (uintptr_t)memory - (uintptr_t)arena->base;
}

/* The settled piece that begins at `memory`, or NULL. Under the lock. */
static inline rft_suballocation *rft_arena_find(const refit_arena *arena, const void *memory)
{
    rft_suballocation *sub = rft_suballocations_find(&arena->subs, rft_arena_offset(arena, memory));
    return sub != NULL && sub->settled ? sub : NULL;
}

/* What refit_arena_free does. */
refit_status rft_arena_give(refit_arena *arena, void *memory, refit_error *error);

#endif
