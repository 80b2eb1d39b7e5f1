/*
 * device_arena: what refit_arena_* is inside: addresses that stay, memory that comes and goes.
 *
 * Rooms above find the arena of a region by its address and decommit or commit the pages of that
 * region; pieces never share a page, so one region's leaving does not touch its neighbour.
 */
#ifndef RFT_DEVICE_ARENA_H
#define RFT_DEVICE_ARENA_H

#include <refit/arena.h>

#include "device/device.h"

/* The arena of [memory, memory + bytes), if that is exactly one piece that refit_arena_alloc gave
 * on this device; else NULL: what is less than a piece cannot leave without its neighbours. Any
 * thread. */
refit_arena *rft_arena_find(refit_device *device, const void *memory, uint64_t bytes);

/* A region of an offloader begins and ends in the arena: close refuses while there are any. */
void rft_arena_retain(refit_arena *arena);
void rft_arena_release(refit_arena *arena);

/* Takes and gives back the memory behind one piece; idempotent. Bytes are lost between the two. Any
 * thread. REFIT_ERR_DEVICE_MEMORY, REFIT_ERR_INVALID for what is no piece. */
refit_status rft_arena_commit(refit_arena *arena, void *memory, uint64_t bytes, refit_error *error);
refit_status rft_arena_decommit(refit_arena *arena, void *memory, uint64_t bytes,
                                refit_error *error);

#endif
