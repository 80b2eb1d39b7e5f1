/*
 * Fresh memory made fit for copies: touched by several threads, and page-locked slab by slab.
 *
 *     threads   touch ──────────────────────────────►
 *     caller      └ slab 0 touched: lock it ─ slab 1: lock it ─ … (helps to touch while it waits)
 *
 * A lock that fails undoes those before it. Knows nothing of what the bytes are.
 */
#include "memory/slab_pins.h"

#include <errno.h>
#include <inttypes.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/checked.h"
#include "base/log.h"
#include "memory/numa.h"

/* ---- First touch in parallel -----------------------------------------------------------------
 * The range is handed out in chunks from its beginning on, so a thread that is held up holds up no
 * other thread, and what is touched grows from there, up to the first chunk that is still worked
 * on. The first failure stops all.
 */

#define CHUNK   (UINT64_C(16) << 20) /* whole huge pages; some hundred system calls per 10 GiB */
#define THREADS 8                    /* more do not help: the memory is the limit */

#define COLLAPSE_TRIES 3

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

#define NOWHERE UINT64_MAX

/* Reads and writes back a byte of each page, so that the kernel gives the process a page of its
 * own. */
static void write_pages(char *base, uint64_t bytes)
{
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    for (uint64_t at = 0; at < bytes; at += page) {
        volatile char *byte = base + at;
        *byte = *byte;
    }
}

refit_status rft_touch_range(void *base, uint64_t bytes, refit_error *error)
{
    int result;
    do {
        result = madvise(base, bytes, MADV_POPULATE_WRITE);
    } while (result != 0 && (errno == EINTR || errno == EAGAIN));
    if (result == 0) return REFIT_OK;
    if (errno == EINVAL) {
        write_pages(base, bytes);
        return REFIT_OK;
    }
    if (errno == EFAULT) errno = ENOMEM; /* how shared memory says that there is none */
    return rft_fail_sub(error, REFIT_ERR_HOST_MEMORY, errno,
                        "the kernel gave no memory for %" PRIu64
                        " bytes of the host image: %s; lower offload.budget_share or free memory",
                        bytes, strerror(errno));
}

/* A page that is in use elsewhere at this moment is tried again; any other refusal is an answer. */
static bool collapse(void *base, uint64_t bytes)
{
    int result, tries = COLLAPSE_TRIES;
    do {
        result = madvise(base, bytes, MADV_COLLAPSE);
    } while (result != 0 && errno == EAGAIN && --tries > 0);
    return result == 0;
}

/* A huge page is made of one page that is there, and of holes, on the node of that page.
 * Interleaved memory lies on the nodes by the numbers of its pages: if the first page of each huge
 * one were touched, one node would get all of them. So the touched page is another one in each. */
bool rft_touch_huge(void *base, uint64_t bytes, uint64_t huge)
{
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    char *end = (char *)base + bytes / huge * huge;
    for (char *at = base; at < end; at += huge) {
        uint64_t chosen = (uintptr_t)at / huge * 9 % (huge / page);
        if (rft_touch_range(at + chosen * page, page, NULL) != REFIT_OK) return false;
    }
    return collapse(base, (uint64_t)(end - (char *)base));
}

/* The end of the part that is touched from the start on. Lock held. */
static uint64_t touched(const rft_touch *touch)
{
    uint64_t end = touch->next;
    for (uint32_t i = 0; i < touch->seats; i++) {
        end = rft_min_u64(end, touch->at[i]);
    }
    return end;
}

/* Lock held. */
static void show_progress(const rft_touch *touch)
{
    uint64_t taken = touched(touch);
    atomic_store(&touch->token->taken, taken);
    if (touch->token->left != NULL) atomic_store(touch->token->left, touch->bytes - taken);
}

/* Whole huge pages, if it is put into such. */
static uint64_t chunk_bytes(uint64_t huge)
{
    return huge > CHUNK ? huge : CHUNK;
}

static refit_status touch_part(const rft_touch *touch, char *base, uint64_t bytes,
                               refit_error *error)
{
    RFT_TRY(rft_cancel_token_check(touch->token, error));
    if (touch->huge > 0) (void)rft_touch_huge(base, bytes, touch->huge);
    return rft_touch_range(base, bytes, error);
}

/* Lock held, but while a chunk is touched. False: no chunk is left, or a failure stopped the touch.
 */
static bool touch_chunk(rft_touch *touch, uint32_t seat)
{
    if (touch->status != REFIT_OK || touch->next >= touch->bytes) return false;
    uint64_t at = touch->next;
    uint64_t bytes = rft_min_u64(chunk_bytes(touch->huge), touch->bytes - at);
    touch->at[seat] = at;
    touch->next = at + bytes;
    rft_unlock(&touch->lock);
    refit_error error = {0};
    refit_status status = touch_part(touch, touch->base + at, bytes, &error);
    rft_lock(&touch->lock);
    if (status != REFIT_OK && touch->status == REFIT_OK) {
        touch->status = status;
        touch->error = error;
    }
    touch->at[seat] = NOWHERE;
    if (touch->status == REFIT_OK) show_progress(touch);
    rft_cond_wake_all(&touch->moved);
    return true;
}

/* Lock held. */
static uint32_t take_seat(rft_touch *touch)
{
    touch->at[touch->seats] = NOWHERE;
    return touch->seats++;
}

static void *run_helper(void *user)
{
    rft_touch *touch = user;
    if (touch->near >= 0) (void)rft_numa_go("", touch->near);
    rft_lock(&touch->lock);
    uint32_t seat = take_seat(touch);
    while (touch_chunk(touch, seat)) {
    }
    rft_unlock(&touch->lock);
    return NULL;
}

static uint32_t count_threads(uint64_t bytes, uint64_t chunk, uint32_t wanted)
{
    uint64_t chunks = (bytes + chunk - 1) / chunk;
    uint64_t threads = wanted != 0 ? rft_min_u64(wanted, RFT_TOUCH_THREADS)
                                   : rft_min_u64(rft_cpu_count(), THREADS);
    return (uint32_t)rft_min_u64(threads, chunks);
}

static refit_status open_lock(rft_touch *touch, refit_error *error)
{
    RFT_TRY(rft_mutex_open(&touch->lock, error));
    refit_status status = rft_cond_open(&touch->moved, error);
    if (status != REFIT_OK) rft_mutex_close(&touch->lock);
    return status;
}

refit_status rft_touch_open(rft_touch *touch, void *base, uint64_t bytes, uint64_t huge,
                            uint32_t threads, int near, rft_cancel_token *token, refit_error *error)
{
    touch->base = base;
    touch->bytes = bytes;
    touch->huge = huge;
    touch->token = token;
    touch->near = near;
    touch->helper_count = 0;
    touch->next = 0;
    touch->seats = 0;
    touch->status = REFIT_OK;
    RFT_TRY(open_lock(touch, error));
    (void)take_seat(touch); /* the caller's */
    uint32_t most = count_threads(bytes, chunk_bytes(huge), threads);
    uint32_t own = near < 0 ? 1u : 0u;
    while (touch->helper_count + own < most &&
           rft_thread_start(&touch->helpers[touch->helper_count], "refit-touch", run_helper, touch,
                            NULL) == REFIT_OK) {
        touch->helper_count++;
    }
    return REFIT_OK;
}

refit_status rft_touch_reach(rft_touch *touch, uint64_t bytes, refit_error *error)
{
    bool helps = touch->near < 0 || touch->helper_count == 0;
    rft_lock(&touch->lock);
    while (touch->status == REFIT_OK && touched(touch) < bytes) {
        /* A chunk that this thread cannot take is at work elsewhere, and its end wakes us. */
        if (!helps || !touch_chunk(touch, 0)) rft_cond_wait_idle(&touch->moved, &touch->lock);
    }
    refit_status status = touch->status;
    if (status != REFIT_OK && error != NULL) *error = touch->error;
    rft_unlock(&touch->lock);
    return status;
}

void rft_touch_close(rft_touch *touch)
{
    rft_lock(&touch->lock);
    touch->next = touch->bytes;
    rft_unlock(&touch->lock);
    for (uint32_t i = 0; i < touch->helper_count; i++) {
        rft_thread_join(touch->helpers[i]);
    }
    rft_cond_close(&touch->moved);
    rft_mutex_close(&touch->lock);
}

static refit_status touch_shared(void *base, uint64_t bytes, rft_cancel_token *token,
                                 refit_error *error)
{
    rft_touch touch;
    RFT_TRY(rft_touch_open(&touch, base, bytes, 0, 0, -1, token, error));
    refit_status status = rft_touch_reach(&touch, bytes, error);
    rft_touch_close(&touch);
    return status;
}

refit_status rft_touch_all(void *base, uint64_t bytes, refit_error *error)
{
    rft_cancel_token token;
    if (bytes <= CHUNK) return rft_touch_range(base, bytes, error);
    RFT_TRY(rft_cancel_token_open(&token, error));
    refit_status status = touch_shared(base, bytes, &token, error);
    rft_cancel_token_close(&token);
    return status;
}

/* ---- Page locks, slab by slab --------------------------------------------------------------- */

void rft_slab_pins_drop(rft_slab_pins *pins)
{
    while (pins->pinned > 0) {
        const rft_slab *slab = &pins->slabs[--pins->pinned];
        rft_device_host_unpin(pins->device, pins->base + slab->offset, slab->bytes);
    }
}

static refit_status pin_next(rft_slab_pins *pins, refit_error *error)
{
    refit_error why = {0};
    const rft_slab *slab = &pins->slabs[pins->pinned];
    char *memory = pins->base + slab->offset;
    refit_status status = rft_device_host_pin(pins->device, memory, slab->bytes, false, &why);
    if (status == REFIT_OK) {
        pins->pinned++;
        return REFIT_OK;
    }
    uint32_t nth = pins->pinned + 1;
    rft_slab_pins_drop(pins);
    if (status == REFIT_ERR_UNSUPPORTED) status = REFIT_ERR_PIN;
    return rft_fail_sub(error, status, why.subsystem, "slab %" PRIu32 " of %" PRIu32 ": %s", nth,
                        pins->count, why.text);
}

/* Page-locks the slab that was just touched; `*wanted` falls to OFF where that is only preferred.
 */
static refit_status pin_as_wanted(rft_slab_pins *pins, refit_pin *wanted, refit_error *error)
{
    refit_error why = {0};
    if (*wanted == REFIT_PIN_OFF) return REFIT_OK;
    refit_status status = pin_next(pins, &why);
    if (status == REFIT_ERR_PIN && *wanted == REFIT_PIN_PREFER) {
        rft_log(REFIT_LOG_WARNING, "the host image stays pageable: %s", why.text);
        *wanted = REFIT_PIN_OFF;
        return REFIT_OK;
    }
    if (status != REFIT_OK && error != NULL) *error = why;
    return status;
}

static refit_status take_slabs(rft_slab_pins *pins, rft_touch *touch, refit_pin wanted,
                               rft_cancel_token *token, refit_error *error)
{
    for (uint32_t i = 0; i < pins->count; i++) {
        uint64_t end = pins->slabs[i].offset + pins->slabs[i].bytes;
        RFT_TRY(rft_touch_reach(touch, end, error));
        RFT_TRY(pin_as_wanted(pins, &wanted, error));
        RFT_TRY(rft_cancel_token_check(token, error));
        atomic_store(&token->ready, end);
    }
    RFT_TRY(rft_touch_reach(touch, pins->bytes, error));
    atomic_store(&token->ready, pins->bytes);
    return REFIT_OK;
}

refit_status rft_slab_pins_take(rft_slab_pins *pins, refit_pin wanted, rft_cancel_token *token,
                                refit_error *error)
{
    rft_touch touch;
    pins->pinned = 0;
    RFT_TRY(rft_touch_open(&touch, pins->base, pins->bytes, pins->huge, pins->touch_threads,
                           pins->near, token, error));
    refit_status status = take_slabs(pins, &touch, wanted, token, error);
    rft_touch_close(&touch);
    if (status != REFIT_OK) rft_slab_pins_drop(pins);
    return status;
}
