/*
 * The host image's memory, from nothing to page-locked.
 *
 *     budget ─► map ─► place (NUMA) ─► huge pages ─► touch ─► page-lock, slab by slab
 *
 * Placement comes before the first touch, which decides where a page lies; the touch comes before
 * the page-lock, which would otherwise touch page by page on one thread. Whatever step fails,
 * rft_host_arena_close takes back those before it. Knows nothing of what the bytes are.
 *
 * The mapping is kept from forked children (MADV_DONTFORK): page locks are not inherited, a fork
 * would have to copy the page tables of the whole image, and a write after it would move the page
 * away from under a device that copies to its old place.
 */
#include "memory/host_arena.h"

#include <errno.h>
#include <inttypes.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/checked.h"
#include "base/clock.h"
#include "base/log.h"
#include "memory/budget.h"
#include "memory/huge_pages.h"
#include "memory/numa.h"
#include "memory/touch.h"

struct rft_host_arena {
    refit_device *device; /* retained */
    char *base;           /* NULL if nothing is mapped */
    rft_slab *slabs;      /* owned: a registration each */
    uint32_t slab_count;
    uint32_t pinned_slabs;
    rft_host_arena_info info;
};

static refit_status check_budget(uint64_t bytes, const refit_config *config, refit_error *error)
{
    rft_budget budget;
    RFT_TRY(rft_budget_read("", config, 0, &budget, error));
    RFT_REFUSE_IF(bytes > budget.bytes, error, REFIT_ERR_BUDGET,
                  "the host image needs %" PRIu64 " bytes, the budget is %" PRIu64 " (%s; %" PRIu64
                  " free): offload less, raise offload.budget_bytes or "
                  "offload.budget_share, or free memory",
                  bytes, budget.bytes, budget.source, budget.free_bytes);
    return REFIT_OK;
}

static refit_status fail_map(uint64_t bytes, refit_error *error)
{
    return rft_fail_sub(error, REFIT_ERR_HOST_MEMORY, errno,
                        "no addresses for a host image of %" PRIu64
                        " bytes: %s; see ulimit -v and vm.overcommit_memory",
                        bytes, strerror(errno));
}

/* Maps `bytes` (whole pages) from a huge page's beginning on, and nothing around them. */
static refit_status map_image(uint64_t bytes, char **out, refit_error *error)
{
    uint64_t room;
    errno = ENOMEM;
    if (!rft_add_u64(bytes, RFT_HUGE_PAGE, &room) || room > SIZE_MAX) return fail_map(bytes, error);
    char *mapped = mmap(NULL, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) return fail_map(bytes, error);
    uint64_t head = -(uintptr_t)mapped & (RFT_HUGE_PAGE - 1);
    if (head > 0) (void)munmap(mapped, head);
    (void)munmap(mapped + head + bytes, RFT_HUGE_PAGE - head);
    (void)madvise(mapped + head, bytes, MADV_DONTFORK);
    (void)madvise(mapped + head, bytes, MADV_DONTDUMP);
    *out = mapped + head;
    return REFIT_OK;
}

static void unpin(rft_host_arena *arena)
{
    while (arena->pinned_slabs > 0) {
        const rft_slab *slab = &arena->slabs[--arena->pinned_slabs];
        rft_device_host_unpin(arena->device, arena->base + slab->offset, slab->bytes);
    }
    arena->info.pinned_bytes = 0;
    arena->info.pageable_bytes = arena->info.bytes;
}

static refit_status pin_slabs(rft_host_arena *arena, refit_error *error)
{
    while (arena->pinned_slabs < arena->slab_count) {
        const rft_slab *slab = &arena->slabs[arena->pinned_slabs];
        refit_status status =
            rft_device_host_pin(arena->device, arena->base + slab->offset, slab->bytes, error);
        if (status != REFIT_OK) {
            unpin(arena);
            return status;
        }
        arena->pinned_slabs++;
    }
    arena->info.pinned_bytes = arena->info.bytes;
    arena->info.pageable_bytes = 0;
    return REFIT_OK;
}

static refit_pin choose_pin(refit_device *device, const refit_config *config)
{
    refit_pin wanted = (refit_pin)config->offload_pin;
    if (wanted != REFIT_PIN_AUTO) return wanted;
    return rft_device_get_caps(device).needs_pinned ? REFIT_PIN_REQUIRE : REFIT_PIN_PREFER;
}

static refit_status pin(rft_host_arena *arena, const refit_config *config, refit_error *error)
{
    refit_pin wanted = choose_pin(arena->device, config);
    if (wanted == REFIT_PIN_OFF) return REFIT_OK;
    refit_error refusal = {0};
    refit_status status = pin_slabs(arena, &refusal);
    if (status == REFIT_OK) return REFIT_OK;
    if (wanted == REFIT_PIN_PREFER) {
        rft_log(REFIT_LOG_WARNING, "the host image stays pageable: %s", refusal.text);
        return REFIT_OK;
    }
    return rft_fail_sub(error, REFIT_ERR_PIN, refusal.subsystem, "%s", refusal.text);
}

static refit_status take_memory(rft_host_arena *arena, uint64_t bytes, const refit_config *config,
                                refit_error *error)
{
    RFT_TRY(check_budget(bytes, config, error));
    RFT_TRY(map_image(bytes, &arena->base, error));
    arena->info.bytes = bytes;
    arena->info.pageable_bytes = bytes;
    int node = rft_numa_choose("", config->offload_numa,
                               rft_device_get_caps(arena->device).numa_node, bytes);
    RFT_TRY(rft_numa_place(arena->base, bytes, node, &arena->info.numa_node, error));
    int64_t start = rft_now();
    arena->info.huge_pages =
        rft_huge_pages_ask(arena->base, bytes, (refit_huge_pages)config->offload_huge_pages);
    RFT_TRY(rft_touch(arena->base, bytes, config->offload_touch_threads, error));
    RFT_TRY(pin(arena, config, error));
    arena->info.seconds = rft_seconds(rft_now() - start);
    return REFIT_OK;
}

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
    rft_device_retain(device);
    arena->device = device;
    arena->info.numa_node = REFIT_NUMA_OFF;
    refit_status status = copy_slabs(arena, layout, error);
    if (status == REFIT_OK && bytes > 0) status = take_memory(arena, bytes, config, error);
    if (status == REFIT_OK) {
        *out = arena;
    } else {
        rft_host_arena_close(arena);
    }
    return status;
}

void rft_host_arena_close(rft_host_arena *arena)
{
    if (arena == NULL) return;
    unpin(arena);
    if (arena->base != NULL) (void)munmap(arena->base, arena->info.bytes);
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
    return arena->base;
}

rft_host_arena_info rft_host_arena_describe(const rft_host_arena *arena)
{
    return arena->info;
}
