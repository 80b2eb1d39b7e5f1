/*
 * The host image's memory.
 *
 *     machine-wide lock ─► budget ─► map ─► place (NUMA) ─► huge pages ─► touch and page-lock, slab
 * by slab
 *
 * Placement comes before the first touch, which decides where a page lies; the touch comes before
 * the page-lock, which would otherwise touch page by page on one thread. Whatever step fails, the
 * drop takes back those before it. Knows nothing of what the bytes are.
 *
 * The mapping is kept from forked children (MADV_DONTFORK): page locks are not inherited, a fork
 * would have to copy the page tables of the whole image, and a write after it would move the page
 * away from under a device that copies to its old place.
 */
#include "memory/image_memory.h"

#include <errno.h>
#include <inttypes.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>

#include "base/checked.h"
#include "base/clock.h"
#include "memory/budget.h"
#include "memory/huge_pages.h"
#include "memory/numa.h"

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

static refit_pin choose_pin(refit_device *device, const refit_config *config)
{
    refit_pin wanted = (refit_pin)config->offload_pin;
    if (wanted != REFIT_PIN_AUTO) return wanted;
    return rft_device_get_caps(device).needs_pinned ? REFIT_PIN_REQUIRE : REFIT_PIN_PREFER;
}

/* Where the kernel does not place memory on the node that is wanted, the threads that touch it go
 * there. */
static refit_status place(rft_image_memory *memory, const refit_config *config, refit_error *error)
{
    rft_slab_pins *pins = &memory->pins;
    int device_node = rft_device_get_caps(pins->device).numa_node;
    int node = rft_numa_choose("", config->offload_numa, device_node, pins->bytes);
    RFT_TRY(rft_numa_place(pins->base, pins->bytes, node, &memory->numa_node, error));
    pins->near = memory->numa_node == REFIT_NUMA_OFF && node >= 0 ? node : -1;
    return REFIT_OK;
}

static refit_status take_steps(rft_image_memory *memory, const refit_config *config,
                               rft_cancel_token *token, refit_error *error)
{
    rft_slab_pins *pins = &memory->pins;
    RFT_TRY(check_budget(pins->bytes, config, error));
    RFT_TRY(map_image(pins->bytes, &pins->base, error));
    RFT_TRY(place(memory, config, error));
    int64_t start = rft_now();
    memory->huge_pages =
        rft_huge_pages_ask(pins->base, pins->bytes, (refit_huge_pages)config->offload_huge_pages);
    pins->touch_threads = config->offload_touch_threads;
    RFT_TRY(rft_slab_pins_take(pins, choose_pin(pins->device, config), token, error));
    memory->spent = rft_now() - start;
    return REFIT_OK;
}

refit_status rft_image_memory_take(rft_image_memory *memory, const refit_config *config,
                                   rft_machine_lock *machine_lock, rft_cancel_token *token,
                                   refit_error *error)
{
    if (config->offload_take_turns) {
        RFT_TRY(rft_machine_lock_take(machine_lock, config->offload_timeout_ms, token, error));
    }
    refit_status status = take_steps(memory, config, token, error);
    if (status != REFIT_OK) rft_image_memory_drop(memory);
    rft_machine_lock_give(machine_lock);
    return status;
}

void rft_image_memory_drop(rft_image_memory *memory)
{
    rft_slab_pins_drop(&memory->pins);
    if (memory->pins.base != NULL) (void)munmap(memory->pins.base, memory->pins.bytes);
    memory->pins.base = NULL;
    memory->huge_pages = false;
    memory->numa_node = REFIT_NUMA_OFF;
    memory->spent = 0;
}
