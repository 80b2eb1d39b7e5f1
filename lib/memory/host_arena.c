/*
 * The arena of host memory: the layout that it serves, the thread that takes its memory, and how
 * that ended; and the memory itself, from the mapping to the page locks, and back.
 *
 * While its thread is at work, `memory` is that thread's alone; others see the progress
 * (cancel_token.h) and whether it has ended. The thread ends with the taking, whichever way that
 * goes; it is joined when the arena closes.
 */
#include "memory/host_arena.h"

#include <errno.h>
#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <refit/config.h>

#include "base/alloc.h"
#include "base/checked.h"
#include "base/clock.h"
#include "base/log.h"
#include "memory/budget.h"
#include "memory/fork_map.h"
#include "memory/machine_lock.h"
#include "memory/numa.h"
#include "memory/procfile.h"
#include "memory/slab_pins.h"

/* ---- Huge pages ------------------------------------------------------------------------------
 * Transparent huge pages, by madvise, and the probe.
 *
 * The probe touches the beginning of the range itself, so its work is not lost, and it ends early
 * when it is slow. A slow rate alone proves nothing (in a virtual machine the host may be fetching
 * the memory, whatever the page size): then small pages are tried on the next range, and huge
 * ones are given up if they cost many times as much. Time in which other processes have the CPU is
 * not counted: it would decide by chance.
 *
 * With pages of 4 KiB a huge one has 2 MiB. With those of 16 and 64 KiB, which ARM's kernels may
 * have, it has 32 and 512 MiB, and is cleared at its first touch: such steps the probe takes, or
 * none where one is larger than all of it. Then huge pages are left alone unless they are wanted.
 */

#define PROBE_BYTES  (UINT64_C(64) << 20)
#define SECOND_BYTES (UINT64_C(16) << 20)
#define CHEAP_RATE   1e9 /* bytes per second */
#define MUCH_FASTER  4   /* small pages, for them to win: they cost again at the lock */
#define PROBE_TIME   INT64_C(64000000) /* what PROBE_BYTES take at CHEAP_RATE, about */

/* How long this thread has stood in line for a CPU, in ns: the second number; 0 where the kernel
 * does not count it. */
static int64_t queued_time(void)
{
    char text[128];
    uint64_t waited;
    if (!rft_procfile_read("/proc/thread-self/schedstat", text, sizeof text)) return 0;
    const char *second = strchr(text, ' ');
    if (second == NULL || !rft_procfile_number(second, &waited)) return 0;
    return waited > INT64_MAX ? 0 : (int64_t)waited;
}

/* Of this kernel. */
static uint64_t huge_page_bytes(void)
{
    char text[32];
    uint64_t bytes;
    if (!rft_procfile_read("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size", text, sizeof text))
        return RFT_HUGE_PAGE;
    bool known = rft_procfile_number(text, &bytes) && (bytes & (bytes - 1)) == 0;
    return known && bytes > RFT_HUGE_PAGE ? bytes : RFT_HUGE_PAGE;
}

/* Bytes per second of touching from `*at` on, which it moves, `step` at a time, with `collapse` by
 * putting each into a huge page; up to `bytes`, or until PROBE_TIME is up. 0 if nothing could be
 * touched: the touch of the whole range then reports the error. */
static double probe_rate(char **at, uint64_t bytes, uint64_t step, bool collapse)
{
    int64_t start = rft_now() - queued_time();
    int64_t taken = 0;
    uint64_t done = 0;
    while (done < bytes && taken < PROBE_TIME) {
        if (collapse) (void)rft_touch_huge(*at, step, step);
        if (rft_touch_range(*at, step, NULL) != REFIT_OK) break;
        *at += step;
        done += step;
        taken = rft_now() - queued_time() - start;
    }
    return taken <= 0 ? 0 : (double)done / rft_seconds(taken);
}

/* Does the file, of a choice that the kernel shows as "never [advise] always", have one that lets
 * shared memory ask for huge pages? */
static bool lets_ask(const char *text)
{
    return strstr(text, "[advise]") != NULL || strstr(text, "[within_size]") != NULL ||
           strstr(text, "[always]") != NULL || strstr(text, "[force]") != NULL;
}

bool rft_huge_pages_can_be_shared(void)
{
    static const char whole[] = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";
    char file[128], text[128];
    (void)snprintf(file, sizeof file,
                   "/sys/kernel/mm/transparent_hugepage/hugepages-%" PRIu64 "kB/shmem_enabled",
                   huge_page_bytes() >> 10);
    if (rft_procfile_read(file, text, sizeof text) && strstr(text, "[inherit]") == NULL)
        return lets_ask(text);
    return rft_procfile_read(whole, text, sizeof text) && lets_ask(text);
}

static bool are_cheap(char *base, uint64_t bytes, uint64_t page, bool collapse)
{
    char *at = base;
    if (page > PROBE_BYTES) return false;
    uint64_t most = rft_min_u64(bytes, PROBE_BYTES) & ~(page - 1);
    double huge = probe_rate(&at, most, page, collapse);
    uint64_t left = bytes - (uint64_t)(at - base);
    if (huge >= CHEAP_RATE || left < SECOND_BYTES) return true;
    if (madvise(at, SECOND_BYTES, MADV_NOHUGEPAGE) != 0) return true;
    return huge * MUCH_FASTER >= probe_rate(&at, SECOND_BYTES, RFT_HUGE_PAGE, false);
}

bool rft_huge_pages_ask(void *base, uint64_t bytes, refit_huge_pages wanted, bool collapse)
{
    uint64_t page = huge_page_bytes();
    bool asked = wanted != REFIT_HUGE_PAGES_NEVER && bytes >= page &&
                 madvise(base, bytes, MADV_HUGEPAGE) == 0;
    if (asked && wanted == REFIT_HUGE_PAGES_AUTO) asked = are_cheap(base, bytes, page, collapse);
    (void)madvise(base, bytes, asked ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
    return asked;
}

/* ---- The memory of the image -----------------------------------------------------------------
 * One mapping of exactly the image's size (rounded up to a page), placed on the wanted NUMA node,
 * with huge pages where a probe shows that they come cheap, touched by several threads and page-
 * locked slab by slab.
 *
 *     machine-wide lock ─► budget ─► claim ─► the lock is given
 *         ─► map ─► place (NUMA) ─► huge pages ─► touch and page-lock, slab by slab
 *
 * What costs time is the last line, and all processes do it at the same time: the budget of each is
 * what the claims of the others leave. One to which they leave too little waits, and looks again
 * until it fits or all claims have ended.
 *
 * Placement comes before the first touch, which decides where a page lies; the touch comes before
 * the page-lock, which would otherwise touch page by page on one thread. If a step fails, the drop
 * undoes the steps before it. Knows nothing of what the bytes are.
 *
 * A fork must not turn it into memory that is copied on a write: the write would move the page away
 * from under a device that copies to its old place. What states live in is read by children that
 * write checkpoints: it is shared memory (fork_map.h). What no one else reads is private, and kept
 * from children (MADV_DONTFORK).
 *
 * Most kernels give huge pages at a touch to private memory alone. Shared memory is put into them
 * chunk by chunk as it is touched (rft_touch_huge), which kernels before 6.1 do not do. Where the
 * user insists on them there (offload.huge_pages: always), the memory is private, and children
 * cannot read it.
 */

typedef struct rft_image_memory {
    rft_slab_pins pins;     /* pins.base NULL: nothing is mapped */
    bool huge_pages;        /* asked for, after the probe */
    int numa_node;          /* the node it is placed on, or a REFIT_NUMA_* */
    int64_t spent;          /* ns of touch and page-lock */
    bool counted;           /* the device counts its bytes */
    bool hidden;            /* from forked children; the caller's wish */
    rft_fork_map *fork_map; /* NULL: it is private */
} rft_image_memory;

/* Does it fit into what is free, of which other processes claim so much? */
static refit_status check_budget(uint64_t bytes, uint64_t claimed, const refit_config *config,
                                 refit_error *error)
{
    rft_budget budget;
    RFT_TRY(rft_budget_read("", config, 0, claimed, &budget, error));
    RFT_REFUSE_IF(bytes > budget.bytes, error, REFIT_ERR_BUDGET,
                  "the host image needs %" PRIu64 " bytes, the budget is %" PRIu64 " (%s; %" PRIu64
                  " free): offload less, raise offload.budget_bytes or "
                  "offload.budget_share, or free memory",
                  bytes, budget.bytes, budget.source, budget.free_bytes);
    return REFIT_OK;
}

/* Counts the bytes for the device before they are taken, so that of two that are taken at once one
 * is refused. What others have does not count as free: only a number that the user gave has to
 * be shared. */
static refit_status count_bytes(rft_image_memory *memory, const refit_config *config,
                                refit_error *error)
{
    refit_device *device = memory->pins.device;
    uint64_t bytes = memory->pins.bytes;
    uint64_t given = config->offload_budget_bytes;
    uint64_t others = atomic_fetch_add(&device->host_bytes, bytes);
    memory->counted = true;
    RFT_REFUSE_IF(given != 0 && bytes > given - rft_min_u64(others, given), error, REFIT_ERR_BUDGET,
                  "the host image needs %" PRIu64 " bytes beside the %" PRIu64
                  " that other host memory of the device has, and offload.budget_bytes is %" PRIu64
                  ": raise it, or offload less",
                  bytes, others, given);
    return REFIT_OK;
}

/* Takes the machine's lock, once what the claims of others leave is enough or there are none. On
 * failure it may be held. */
static refit_status await_room(uint64_t bytes, const refit_config *config,
                               rft_machine_lock *machine_lock, rft_cancel_token *token,
                               refit_error *error)
{
    uint32_t timeout_ms = config->offload_timeout_ms;
    uint64_t given = config->offload_budget_bytes;
    bool fits_never = given != 0 && bytes > given;
    RFT_TRY(rft_machine_lock_take(machine_lock, timeout_ms, token, error));
    for (;;) {
        uint64_t claimed;
        bool others = rft_machine_lock_claimed(machine_lock, &claimed);
        refit_status status = check_budget(bytes, claimed, config, error);
        if (status != REFIT_ERR_BUDGET || !others || fits_never) return status;
        RFT_TRY(rft_machine_lock_retry(machine_lock, timeout_ms, token, error));
    }
}

/* The bytes are counted, and claimed from other processes. */
static refit_status reserve(rft_image_memory *memory, const refit_config *config,
                            rft_machine_lock *machine_lock, rft_cancel_token *token,
                            refit_error *error)
{
    uint64_t bytes = memory->pins.bytes;
    atomic_store(&token->in_line, config->offload_take_turns != 0);
    refit_status status = config->offload_take_turns
                              ? await_room(bytes, config, machine_lock, token, error)
                              : check_budget(bytes, 0, config, error);
    atomic_store(&token->in_line, false);
    RFT_TRY(status);
    RFT_TRY(count_bytes(memory, config, error));
    rft_machine_lock_claim(machine_lock, bytes);
    token->left = machine_lock->claim;
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
    uint64_t room, page = huge_page_bytes();
    errno = ENOMEM;
    if (bytes < page) page = RFT_HUGE_PAGE;
    if (!rft_add_u64(bytes, page, &room) || room > SIZE_MAX) return fail_map(bytes, error);
    char *mapped = mmap(NULL, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) return fail_map(bytes, error);
    uint64_t head = -(uintptr_t)mapped & (page - 1);
    if (head > 0) (void)munmap(mapped, head);
    (void)munmap(mapped + head + bytes, page - head);
    (void)madvise(mapped + head, bytes, MADV_DONTFORK);
    (void)madvise(mapped + head, bytes, MADV_DONTDUMP);
    *out = mapped + head;
    return REFIT_OK;
}

/* Does the kernel put shared memory into huge pages of so many bytes? It says so nowhere: one is
 * tried. */
static bool can_collapse(uint64_t page)
{
    char *base;
    if (page > PROBE_BYTES || map_image(page, &base, NULL) != REFIT_OK) return false;
    int shared = MAP_SHARED | MAP_FIXED;
    int fd = rft_memory_file(page);
    bool can = fd >= 0 && mmap(base, page, PROT_READ | PROT_WRITE, shared, fd, 0) != MAP_FAILED &&
               rft_touch_huge(base, page, page);
    if (fd >= 0) (void)close(fd);
    (void)munmap(base, page);
    return can;
}

/* The bytes of the huge pages that shared memory is to be put into; 0: not needed, or none are to
 * be had. */
static uint64_t huge_to_collapse(uint64_t bytes, const refit_config *config)
{
    uint64_t page = huge_page_bytes();
    if (config->offload_huge_pages == REFIT_HUGE_PAGES_NEVER || bytes < page) return 0;
    return !rft_huge_pages_can_be_shared() && can_collapse(page) ? page : 0;
}

/* Lets children read the memory, unless that costs what the user insists on. Where the kernel has
 * no such memory, all else works. */
static refit_status show_children(rft_image_memory *memory, const refit_config *config,
                                  refit_error *error)
{
    refit_error why;
    if (memory->hidden) return REFIT_OK;
    uint64_t huge = huge_to_collapse(memory->pins.bytes, config);
    if (config->offload_huge_pages == REFIT_HUGE_PAGES_ALWAYS && huge == 0 &&
        !rft_huge_pages_can_be_shared())
        return REFIT_OK;
    refit_status status =
        rft_fork_map_open(memory->pins.base, memory->pins.bytes, &memory->fork_map, &why);
    if (status == REFIT_ERR_SYSTEM) {
        rft_log(REFIT_LOG_WARNING,
                "%s: a process that is forked must not read states that are "
                "on the host",
                why.text);
        return REFIT_OK;
    }
    if (status == REFIT_OK) memory->pins.huge = huge;
    if (status != REFIT_OK && error != NULL) *error = why;
    return status;
}

/* What the kernel has for no shared memory is not asked for. */
static bool ask_huge_pages(rft_image_memory *memory, const refit_config *config)
{
    rft_slab_pins *pins = &memory->pins;
    refit_huge_pages wanted = (refit_huge_pages)config->offload_huge_pages;
    if (memory->fork_map != NULL && pins->huge == 0 && !rft_huge_pages_can_be_shared())
        wanted = REFIT_HUGE_PAGES_NEVER;
    bool asked = rft_huge_pages_ask(pins->base, pins->bytes, wanted, pins->huge != 0);
    if (!asked) pins->huge = 0;
    return asked;
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
    RFT_TRY(map_image(pins->bytes, &pins->base, error));
    RFT_TRY(show_children(memory, config, error));
    RFT_TRY(place(memory, config, error));
    int64_t start = rft_now();
    memory->huge_pages = ask_huge_pages(memory, config);
    pins->touch_threads = config->offload_touch_threads;
    RFT_TRY(rft_slab_pins_take(pins, choose_pin(pins->device, config), token, error));
    memory->spent = rft_now() - start;
    return REFIT_OK;
}

/* Gives back what there is. No copy may use it any more. */
static void image_memory_drop(rft_image_memory *memory)
{
    rft_slab_pins_drop(&memory->pins);
    rft_fork_map_close(memory->fork_map);
    memory->fork_map = NULL;
    if (memory->pins.base != NULL) (void)munmap(memory->pins.base, memory->pins.bytes);
    if (memory->counted) atomic_fetch_sub(&memory->pins.device->host_bytes, memory->pins.bytes);
    memory->counted = false;
    memory->pins.base = NULL;
    memory->huge_pages = false;
    memory->numa_node = REFIT_NUMA_OFF;
    memory->spent = 0;
}

/* Takes pins.bytes, cut into pins.slabs, for pins.device; the caller has filled in these. With
 * offload.take_turns the bytes are claimed with `machine_lock` until they are touched. Blocks. On
 * failure nothing is held. REFIT_ERR_BUDGET names need, budget and where the budget comes from;
 * REFIT_ERR_PIN the slab, the limit and how to raise it; REFIT_ERR_HOST_MEMORY, REFIT_ERR_CONFIG (a
 * NUMA node that is not there), REFIT_ERR_SYSTEM, REFIT_ERR_TIMEOUT (others that take their
 * memory), REFIT_ERR_CANCELLED (`token`). */
static refit_status image_memory_take(rft_image_memory *memory, const refit_config *config,
                                      rft_machine_lock *machine_lock, rft_cancel_token *token,
                                      refit_error *error)
{
    refit_status status = reserve(memory, config, machine_lock, token, error);
    if (status == REFIT_OK) status = take_steps(memory, config, token, error);
    if (status != REFIT_OK) image_memory_drop(memory);
    token->left = NULL;
    rft_machine_lock_give(machine_lock);
    return status;
}

/* ---- The arena ---------------------------------------------------------------------------- */

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

void rft_host_arena_hide(rft_host_arena *arena)
{
    arena->memory.hidden = true;
}

static refit_status take_memory(rft_host_arena *arena, refit_error *error)
{
    if (arena->bytes == 0) return REFIT_OK;
    arena->memory.pins = (rft_slab_pins){.device = arena->device,
                                         .bytes = arena->bytes,
                                         .slabs = arena->slabs,
                                         .count = arena->slab_count};
    return image_memory_take(&arena->memory, &arena->config, &arena->machine_lock, &arena->token,
                             error);
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
        "host memory was still being page-locked after %u ms, which cannot be interrupted: "
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
    image_memory_drop(&arena->memory);
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
