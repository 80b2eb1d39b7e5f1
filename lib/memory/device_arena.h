/*
 * device_arena: the inner interface of refit_arena_*: addresses that stay, memory that comes and
 * goes.
 *
 * Modules above find the arena of a region by its address, and decommit or commit the pages of its
 * pieces. Pieces never share a page, so a region that leaves does not touch its neighbour. All
 * functions: any thread.
 */
#ifndef RFT_DEVICE_ARENA_H
#define RFT_DEVICE_ARENA_H

#include <refit/advanced/arena.h>

#include "device/device.h"

/* A region of an offloader begins: `*out` is the arena of [memory, memory + bytes), if that is
 * exactly one piece that refit_arena_alloc gave on this device; else NULL, since what is less than
 * a piece cannot leave without its neighbours. Until rft_arena_leave the piece stays.
 * REFIT_ERR_BUSY: it is held (refit_arena_pin), or another's region; REFIT_ERR_INVALID: it was
 * given back, and is still to go. */
refit_status rft_arena_enter(refit_device *device, const void *memory, uint64_t bytes,
                             refit_arena **out, refit_error *error);
void rft_arena_leave(refit_arena *arena, const void *memory);

/* `bytes` of a piece in whole pages: its neighbour begins after them. */
uint64_t rft_arena_round(const refit_arena *arena, uint64_t bytes);

/* Takes and gives back the memory of one piece, or of several that lie side by side;
 * idempotent. Bytes are lost between the two. A commit that fails has taken nothing. A decommit
 * that fails may have given some back (`*freed`; may be NULL): it can be called again, and so can
 * commit. REFIT_ERR_DEVICE_MEMORY, REFIT_ERR_BUSY (decommit: one is held), REFIT_ERR_INVALID for
 * what is not pieces from end to end, and what rft_device_decommit says of streams. */
refit_status rft_arena_commit(refit_arena *arena, void *memory, uint64_t bytes, refit_error *error);
refit_status rft_arena_decommit(refit_arena *arena, void *memory, uint64_t bytes, uint64_t *freed,
                                refit_error *error);

/* Like refit_arena_free, but a piece that cannot go now is remembered and goes as soon as it can:
 * when the last region or hold ends, or at the next abandon or sweep. The status says why not now.
 * REFIT_ERR_INVALID: no piece. */
refit_status rft_arena_abandon(refit_arena *arena, void *memory, refit_error *error);
void rft_arena_sweep(refit_arena *arena);

/* While an allocator of the process's gives out its pieces (torch_pool.c) the arena cannot close.
 */
void rft_arena_set_attached(refit_arena *arena, bool attached);

refit_device *rft_arena_device(const refit_arena *arena);

#endif
