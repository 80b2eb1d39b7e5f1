/*
 * The arena as an object: what it is for, who takes its memory, and how that ended.
 *
 * While its thread is at work, `memory` is that thread's alone; others see the progress
 * (cancel_token.h) and whether it has ended. The thread ends with the taking, whichever way that
 * goes; it is joined when the arena closes.
 */
#include "memory/host_arena.h"

#include <inttypes.h>
#include <string.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/checked.h"
#include "base/clock.h"
#include "memory/image_memory.h"

struct rft_host_arena {
    refit_device *device; /* retained */
    refit_config config;
    rft_slab *slabs; /* owned: a registration each */
    uint32_t slab_count;
    uint64_t bytes;
    rft_machine_lock machine_lock;
    rft_cancel_token token;
    rft_image_memory memory;
    bool threaded;
    rft_thread thread;
    bool ended;          /* guarded by token.lock, like how */
    refit_status status; /* once ended */
    refit_error error;
};

static refit_status copy_slabs(rft_host_arena *arena, const rft_layout *layout, refit_error *error)
{
    if (layout->slab_count == 0) return REFIT_OK;
    arena->slabs = rft_calloc(layout->slab_count, sizeof *arena->slabs);
    RFT_REFUSE_IF(arena->slabs == NULL, error, REFIT_ERR_HOST_MEMORY,
                  "no memory to remember %" PRIu32 " slabs", layout->slab_count);
    memcpy(arena->slabs, layout->slabs, layout->slab_count * sizeof *arena->slabs);
    arena->slab_count = layout->slab_count;
    return REFIT_OK;
}

static refit_status open_parts(rft_host_arena *arena, const rft_layout *layout, refit_error *error)
{
    RFT_TRY(rft_cancel_token_open(&arena->token, error));
    refit_status status = copy_slabs(arena, layout, error);
    if (status != REFIT_OK) rft_cancel_token_close(&arena->token);
    return status;
}

refit_status rft_host_arena_open(refit_device *device, const rft_layout *layout,
                                 const refit_config *config, rft_host_arena **out,
                                 refit_error *error)
{
    uint64_t bytes;
    RFT_REFUSE_IF(!rft_align_u64(layout->image_bytes, (uint64_t)sysconf(_SC_PAGESIZE), &bytes),
                  error, REFIT_ERR_LIMIT, "a host image of %" PRIu64 " bytes cannot be",
                  layout->image_bytes);
    rft_host_arena *arena = rft_calloc(1, sizeof *arena);
    RFT_REFUSE_IF(arena == NULL, error, REFIT_ERR_HOST_MEMORY, "no memory for a host arena");
    refit_status status = open_parts(arena, layout, error);
    if (status != REFIT_OK) {
        rft_free(arena);
        return status;
    }
    rft_device_retain(device);
    arena->device = device;
    arena->config = *config;
    arena->bytes = bytes;
    arena->memory.numa_node = REFIT_NUMA_OFF;
    rft_machine_lock_find(&arena->machine_lock, "");
    *out = arena;
    return REFIT_OK;
}

static refit_status take_memory(rft_host_arena *arena, refit_error *error)
{
    if (arena->bytes == 0) return REFIT_OK;
    arena->memory.pins = (rft_slab_pins){.device = arena->device,
                                         .bytes = arena->bytes,
                                         .slabs = arena->slabs,
                                         .count = arena->slab_count};
    return rft_image_memory_take(&arena->memory, &arena->config, &arena->machine_lock,
                                 &arena->token, error);
}

static void *run_take(void *user)
{
    rft_host_arena *arena = user;
    refit_error error = {0};
    refit_status status = take_memory(arena, &error);
    rft_lock(&arena->token.lock);
    arena->status = status;
    arena->error = error;
    arena->ended = true;
    rft_cond_wake_all(&arena->token.moved);
    rft_unlock(&arena->token.lock);
    return NULL;
}

refit_status rft_host_arena_take(rft_host_arena *arena, refit_error *error)
{
    (void)run_take(arena);
    return rft_host_arena_wait(arena, 0, error);
}

refit_status rft_host_arena_begin(rft_host_arena *arena, refit_error *error)
{
    RFT_TRY(rft_thread_start(&arena->thread, "refit-pin", run_take, arena, error));
    arena->threaded = true;
    return REFIT_OK;
}

/* Has it ended by the deadline? */
static bool await_end(rft_host_arena *arena, uint32_t timeout_ms)
{
    int64_t deadline = rft_deadline(timeout_ms);
    rft_lock(&arena->token.lock);
    while (!arena->ended && rft_cond_wait(&arena->token.moved, &arena->token.lock, deadline)) {
    }
    bool ended = arena->ended;
    rft_unlock(&arena->token.lock);
    return ended;
}

static refit_status say_how_far(rft_host_arena *arena, uint32_t timeout_ms, refit_error *error)
{
    RFT_REFUSE_IF(atomic_load(&arena->token.in_line), error, REFIT_ERR_TIMEOUT,
                  "the host memory is not there after %u ms: other processes of this user are "
                  "taking theirs, and none of the %" PRIu64 " bytes is ready; wait again",
                  timeout_ms, arena->bytes);
    uint64_t ready = atomic_load(&arena->token.ready);
    return rft_fail(error, REFIT_ERR_TIMEOUT,
                    "the host memory is not there after %u ms: %" PRIu64 " of %" PRIu64
                    " bytes are ready; wait again, or raise offload.timeout_ms",
                    timeout_ms, ready, arena->bytes);
}

refit_status rft_host_arena_wait(rft_host_arena *arena, uint32_t timeout_ms, refit_error *error)
{
    if (!await_end(arena, timeout_ms)) return say_how_far(arena, timeout_ms, error);
    if (arena->status != REFIT_OK && error != NULL) *error = arena->error;
    return arena->status;
}

bool rft_host_arena_has_failed(rft_host_arena *arena)
{
    return await_end(arena, 0) && arena->status != REFIT_OK;
}

refit_status rft_host_arena_end(rft_host_arena *arena, uint32_t timeout_ms, refit_error *error)
{
    if (!arena->threaded) return REFIT_OK;
    rft_cancel_token_stop(&arena->token);
    RFT_REFUSE_IF(
        !await_end(arena, timeout_ms), error, REFIT_ERR_TIMEOUT,
        "host memory was still being page-locked after %u ms, which cannot be broken off: "
        "try again",
        timeout_ms);
    return REFIT_OK;
}

void rft_host_arena_close(rft_host_arena *arena)
{
    if (arena == NULL) return;
    if (arena->threaded) {
        rft_cancel_token_stop(&arena->token);
        rft_thread_join(arena->thread);
    }
    rft_image_memory_drop(&arena->memory);
    rft_cancel_token_close(&arena->token);
    rft_device_release(arena->device);
    rft_free(arena->slabs);
    rft_free(arena);
}

static bool holds_slab(const rft_host_arena *arena, const rft_slab *slab)
{
    for (uint32_t i = 0; i < arena->slab_count; i++) {
        const rft_slab *own = &arena->slabs[i];
        if (slab->offset >= own->offset && slab->offset - own->offset <= own->bytes &&
            slab->bytes <= own->bytes - (slab->offset - own->offset)) {
            return true;
        }
    }
    return false;
}

bool rft_host_arena_fits(const rft_host_arena *arena, const rft_layout *layout)
{
    for (uint32_t i = 0; i < layout->slab_count; i++) {
        if (!holds_slab(arena, &layout->slabs[i])) return false;
    }
    return true;
}

char *rft_host_arena_base(const rft_host_arena *arena)
{
    return arena->memory.pins.base;
}

rft_host_arena_info rft_host_arena_describe(rft_host_arena *arena)
{
    rft_host_arena_info info = {.bytes = arena->bytes, .numa_node = REFIT_NUMA_OFF};
    info.taken_bytes = atomic_load(&arena->token.taken);
    info.ready_bytes = atomic_load(&arena->token.ready);
    if (!await_end(arena, 0)) return info;
    bool taken = arena->status == REFIT_OK;
    bool pinned = arena->memory.pins.pinned > 0;
    info.bytes = info.taken_bytes = info.ready_bytes = taken ? arena->bytes : 0;
    info.pinned_bytes = pinned ? info.bytes : 0;
    info.pageable_bytes = info.bytes - info.pinned_bytes;
    info.huge_pages = arena->memory.huge_pages;
    info.numa_node = arena->memory.numa_node;
    info.seconds = rft_seconds(arena->memory.spent);
    return info;
}
