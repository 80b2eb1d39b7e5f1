/*
 * Arenas: one reservation of addresses, cut into pieces of whole pages.
 *
 * Pieces (suballocations) are remembered, so that only what refit_arena_alloc gave can be committed
 * and decommitted, never a part that shares a page with a neighbour. The arenas of a device form a
 * list, so that the arena of a region is found by its address; the list and the accounting are
 * guarded by the device's lock. The device itself, which may take its time, is called without it: a
 * piece whose memory is coming for the first time, or going for good, is not ready meanwhile, and
 * no other call finds it.
 *
 * Knows nothing of copies, nor of what the bytes mean.
 */
#include "memory/device_arena.h"

#include <inttypes.h>
#include <stdbool.h>
#include <string.h>

#include "base/alloc.h"
#include "base/checked.h"
#include "base/error.h"

/* ---- Suballocations --------------------------------------------------------------------------
 * The pieces of an arena, by offset, and the place where the next one fits. Arithmetic only; the
 * arena's lock guards it.
 *
 * A sorted array of pieces. The ranges between them are free, so that neighbours which were
 * given back are one hole. As long as no piece was given back the next one goes after the last,
 * without a search.
 */

typedef struct rft_suballocation {
    uint64_t offset;
    uint64_t bytes; /* as asked for; its pages are these rounded up */
    uint32_t holds; /* of refit_arena_pin, whose memory must stay */
    bool moved;     /* by an offloader, of which it is a region */
    bool ready;     /* false: its memory is coming for the first time, or going for good */
    bool doomed;    /* its owner has let go of it: it goes once it has no reference left */
} rft_suballocation;

/* All zero but for the granule is empty. */
typedef struct rft_suballocations {
    uint64_t granule;        /* a power of two */
    rft_suballocation *list; /* owned; by offset; no two share a page */
    uint32_t count;
    uint32_t room;
    uint64_t holes; /* bytes between pieces */
} rft_suballocations;

#define ROOM_FIRST 64u

static void suballocations_close(rft_suballocations *subs)
{
    rft_free(subs->list);
}

/* `bytes` in whole pages; they are no more than there are addresses. */
static uint64_t suballocations_round(const rft_suballocations *subs, uint64_t bytes)
{
    return (bytes + subs->granule - 1) & ~(subs->granule - 1);
}

/* The first byte after the pages of the `count` first pieces. */
static uint64_t end_of(const rft_suballocations *subs, uint32_t count)
{
    if (count == 0) return 0;
    const rft_suballocation *last = &subs->list[count - 1];
    return last->offset + suballocations_round(subs, last->bytes);
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
    uint64_t whole = suballocations_round(subs, sub.bytes);
    if (at < subs->count) subs->holes -= whole;
    memmove(place + 1, place, (subs->count - at) * sizeof *place);
    *place = sub;
    subs->count++;
}

/* Adds a piece, not ready, where it fits best: in the smallest hole that is large enough, or
 * after the last. REFIT_ERR_LIMIT: nowhere below `end`; REFIT_ERR_HOST_MEMORY. */
static refit_status suballocations_add(rft_suballocations *subs, uint64_t bytes, uint64_t end,
                                       uint64_t *offset, refit_error *error)
{
    uint64_t whole, largest;
    RFT_TRY(grow(subs, error));
    if (!rft_align_u64(bytes, subs->granule, &whole)) whole = UINT64_MAX;
    uint32_t at = find_hole(subs, whole, &largest);
    uint64_t after = end - end_of(subs, subs->count);
    RFT_REFUSE_IF(at == subs->count && whole > after, error, REFIT_ERR_LIMIT,
                  "%" PRIu64 " bytes do not fit into the arena: %" PRIu64 " of %" PRIu64
                  " are left in one range, in pages of %" PRIu64
                  "; open it with more, addresses cost nothing",
                  bytes, rft_max_u64(largest, after), end, subs->granule);
    *offset = end_of(subs, at);
    insert(subs, at, (rft_suballocation){.offset = *offset, .bytes = bytes});
    return REFIT_OK;
}

/* The piece that begins at `offset`, or NULL. Good until the next add or remove. */
static rft_suballocation *suballocations_find(const rft_suballocations *subs, uint64_t offset)
{
    uint32_t at = count_before(subs, offset);
    bool found = at < subs->count && subs->list[at].offset == offset;
    return found ? &subs->list[at] : NULL;
}

static void suballocations_remove(rft_suballocations *subs, uint64_t offset)
{
    uint32_t at = count_before(subs, offset);
    uint64_t before = end_of(subs, at);
    uint64_t after = end_of(subs, at + 1);
    bool last = at + 1 == subs->count;
    /* After the last piece nothing is a hole. */
    if (last) {
        subs->holes -= offset - before;
    } else {
        subs->holes += after - offset;
    }
    subs->count--;
    memmove(&subs->list[at], &subs->list[at + 1], (subs->count - at) * sizeof *subs->list);
}

/* Is [offset, offset + bytes), its end rounded up, ready pieces from end to end? `*held`: whether
 * one of them is held. */
static bool suballocations_are_run(const rft_suballocations *subs, uint64_t offset, uint64_t bytes,
                                   bool *held)
{
    uint64_t end;
    *held = false;
    if (!rft_add_u64(offset, bytes, &end) || !rft_align_u64(end, subs->granule, &end)) return false;
    uint32_t at = count_before(subs, offset);
    while (offset < end && at < subs->count) {
        const rft_suballocation *sub = &subs->list[at++];
        if (sub->offset != offset || !sub->ready) return false;
        *held = *held || sub->holds > 0;
        offset = end_of(subs, at);
    }
    return offset == end;
}

/* ---- The arena ---------------------------------------------------------------------------- */

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

/* The ready piece that begins at `memory`, or NULL. Under the lock. */
static inline rft_suballocation *rft_arena_find(const refit_arena *arena, const void *memory)
{
    rft_suballocation *sub = suballocations_find(&arena->subs, rft_arena_offset(arena, memory));
    return sub != NULL && sub->ready ? sub : NULL;
}

/* ---- Open and close ---------------------------------------------------------------------- */

#define FAILURES_MOST 64u /* streams of an arena whose work has failed */

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
                  "then call refit_arena_unpin",
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

/* Work that failed is reported once, and ends the wait for the streams after it: so the wait is
 * repeated.
 */
static refit_status empty(refit_arena *arena, refit_error *error)
{
    refit_status status = REFIT_ERR_DEVICE;
    for (uint32_t i = 0; i < FAILURES_MOST && status != REFIT_OK && !is_in_use(status); i++) {
        status = rft_device_decommit(arena->device, arena->base, arena->bytes, NULL, error);
    }
    return status;
}

/* Where the device fails there is no memory to keep; where work still runs, the arena stays open.
 */
refit_status refit_arena_close(refit_arena *arena, refit_error *error)
{
    if (arena == NULL) return REFIT_OK;
    RFT_TRY(check_unused(arena, error));
    refit_status status = empty(arena, error);
    if (is_in_use(status)) return status;
    unlink_arena(arena);
    rft_device_unreserve(arena->device, arena->base, arena->bytes);
    rft_device_release(arena->device);
    suballocations_close(&arena->subs);
    rft_free(arena);
    return REFIT_OK;
}

uint64_t rft_arena_round(const refit_arena *arena, uint64_t bytes)
{
    return suballocations_round(&arena->subs, bytes);
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

/* Ends the change that made the piece not ready: its memory is there, or the piece is gone. */
static void end_change(refit_arena *arena, uint64_t offset, bool there)
{
    rft_arena_lock(arena);
    if (there) {
        suballocations_find(&arena->subs, offset)->ready = true;
    } else {
        suballocations_remove(&arena->subs, offset);
    }
    rft_arena_unlock(arena);
}

refit_status refit_arena_alloc(refit_arena *arena, uint64_t bytes, void **out, refit_error *error)
{
    RFT_REFUSE_IF(arena == NULL || out == NULL || bytes == 0, error, REFIT_ERR_INVALID,
                  "a piece needs an arena, at least one byte, and a place for the result");
    uint64_t offset = 0;
    rft_arena_lock(arena);
    refit_status status = suballocations_add(&arena->subs, bytes, arena->bytes, &offset, error);
    rft_arena_unlock(arena);
    if (status != REFIT_OK) return status;
    void *memory = arena->base + offset;
    status = rft_device_commit(arena->device, memory, rft_arena_round(arena, bytes), error);
    end_change(arena, offset, status == REFIT_OK);
    if (status == REFIT_OK) *out = memory;
    return status;
}

static refit_status check_free(const rft_suballocation *sub, const void *memory, refit_error *error)
{
    RFT_REFUSE_IF(sub == NULL, error, REFIT_ERR_INVALID,
                  "%p is not a piece that refit_arena_alloc gave, or was given back before",
                  memory);
    RFT_REFUSE_IF(sub->moved, error, REFIT_ERR_BUSY,
                  "an offloader has the piece at %p as a region: clear or close it first", memory);
    RFT_REFUSE_IF(sub->holds > 0, error, REFIT_ERR_BUSY,
                  "the piece at %p is held: end what has registered it, then call "
                  "refit_arena_unpin",
                  memory);
    return REFIT_OK;
}

/* From here on no other call finds the piece. Under the lock. */
static refit_status begin_free(refit_arena *arena, const void *memory, uint64_t *bytes,
                               refit_error *error)
{
    rft_suballocation *sub = rft_arena_find(arena, memory);
    RFT_TRY(check_free(sub, memory, error));
    sub->ready = false;
    *bytes = sub->bytes;
    return REFIT_OK;
}

static void end_free(refit_arena *arena, const void *memory, bool gone)
{
    uint64_t offset = rft_arena_offset(arena, memory);
    if (gone) {
        rft_arena_lock(arena);
        arena->doomed -= suballocations_find(&arena->subs, offset)->doomed;
        rft_arena_unlock(arena);
    }
    end_change(arena, offset, !gone);
}

/* What refit_arena_free does. */
static refit_status arena_give(refit_arena *arena, void *memory, refit_error *error)
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
    return memory == NULL ? REFIT_OK : arena_give(arena, memory, error);
}

refit_status refit_arena_piece(refit_arena *arena, uint32_t index, void **memory, uint64_t *bytes,
                               refit_error *error)
{
    RFT_REFUSE_IF(arena == NULL || memory == NULL || bytes == NULL, error, REFIT_ERR_INVALID,
                  "refit_arena_piece needs an arena and places for address and size");
    const rft_suballocation *found = NULL;
    uint32_t ready = 0;
    rft_arena_lock(arena);
    for (uint32_t at = 0; at < arena->subs.count && found == NULL; at++) {
        const rft_suballocation *sub = &arena->subs.list[at];
        if (sub->ready && !sub->doomed && ready++ == index) found = sub;
    }
    if (found != NULL) {
        *memory = arena->base + found->offset;
        *bytes = found->bytes;
    }
    rft_arena_unlock(arena);
    RFT_REFUSE_IF(found == NULL, error, REFIT_ERR_NOT_FOUND,
                  "there is no piece %" PRIu32 ": the arena has %" PRIu32, index, ready);
    return REFIT_OK;
}

/* ---- Memory comes and goes --------------------------------------------------------------- */

static refit_status check_run(refit_arena *arena, const void *memory, uint64_t bytes, bool goes,
                              refit_error *error)
{
    bool held;
    rft_arena_lock(arena);
    bool run = suballocations_are_run(&arena->subs, rft_arena_offset(arena, memory), bytes, &held);
    rft_arena_unlock(arena);
    RFT_REFUSE_IF(!run, error, REFIT_ERR_INVALID,
                  "%" PRIu64 " bytes at %p are not pieces that refit_arena_alloc gave", bytes,
                  memory);
    RFT_REFUSE_IF(goes && held, error, REFIT_ERR_BUSY,
                  "a piece at %p is held (refit_arena_pin), so its memory stays", memory);
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

refit_status refit_arena_add_stream(refit_arena *arena, refit_stream_ref stream, refit_error *error)
{
    RFT_REFUSE_IF(arena == NULL, error, REFIT_ERR_INVALID, "there is no arena");
    return rft_device_reserve_add_stream(arena->device, arena->base, stream, error);
}

refit_status refit_arena_remove_stream(refit_arena *arena, refit_stream_ref stream,
                                       refit_error *error)
{
    RFT_REFUSE_IF(arena == NULL, error, REFIT_ERR_INVALID, "there is no arena");
    return rft_device_reserve_remove_stream(arena->device, arena->base, stream, error);
}

/* ---- References ------------------------------------------------------------------------------
 * What needs a piece of an arena: the one offloader that has it as a region, while its memory comes
 * and goes; and holds, while its memory must stay. These two exclude each other. A piece that its
 * owner gave up while it was needed is doomed: it goes with its last reference. Counts only.
 */

/* The first piece from `from` on that is doomed and has no reference left; NULL if there is none.
 */
static void *next_doomed(refit_arena *arena, uint64_t *from)
{
    void *memory = NULL;
    rft_arena_lock(arena);
    for (uint32_t at = 0; at < arena->subs.count && arena->doomed > 0; at++) {
        const rft_suballocation *sub = &arena->subs.list[at];
        bool free = sub->ready && !sub->moved && sub->holds == 0;
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
        status = arena_give(arena, memory, NULL);
        memory = next_doomed(arena, &from);
    }
}

refit_status rft_arena_abandon(refit_arena *arena, void *memory, refit_error *error)
{
    rft_arena_sweep(arena);
    refit_status status = arena_give(arena, memory, error);
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

/* Two offloaders that moved it would overwrite each other's bytes, or copy memory that has gone. */
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
    suballocations_find(&arena->subs, rft_arena_offset(arena, memory))->moved = false;
    bool doomed = arena->doomed > 0;
    rft_arena_unlock(arena);
    if (doomed) rft_arena_sweep(arena);
}

static refit_status begin_hold(refit_arena *arena, const void *memory, uint64_t *bytes,
                               refit_error *error)
{
    rft_suballocation *sub = rft_arena_find(arena, memory);
    RFT_REFUSE_IF(sub == NULL, error, REFIT_ERR_INVALID,
                  "%p is not a piece that refit_arena_alloc gave", memory);
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
                  "%p is not a piece that is held", memory);
    sub->holds--;
    return REFIT_OK;
}

refit_status refit_arena_unpin(refit_arena *arena, void *memory, refit_error *error)
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
refit_status refit_arena_pin(refit_arena *arena, void *memory, refit_error *error)
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
