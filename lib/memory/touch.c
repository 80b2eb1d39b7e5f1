/*
 * First touch in parallel.
 *
 * The range is handed out in chunks by one counter, so a thread that is held up holds up nobody
 * else. The first failure stops all. Knows nothing of what the pages are for.
 */
#include "memory/touch.h"

#include <errno.h>
#include <inttypes.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/checked.h"
#include "base/thread.h"

#define CHUNK       (UINT64_C(16) << 20) /* whole huge pages; some hundred system calls per 10 GiB */
#define THREADS     8                    /* more do not help: the memory is the limit */
#define THREADS_TOP 64

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

typedef struct touch_work {
    char *base;
    uint64_t bytes;
    atomic_uint_fast64_t next; /* the first byte that nobody has taken */
    rft_mutex lock;
    refit_status status; /* of the first failure; guarded by lock, like its sentence */
    refit_error error;
} touch_work;

/* Reads and writes back a byte of each page: the kernel must make it the process's own. */
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
    return rft_fail_sub(error, REFIT_ERR_HOST_MEMORY, errno,
                        "the kernel gave no memory for %" PRIu64
                        " bytes of the host image: %s; lower offload.budget_share or free memory",
                        bytes, strerror(errno));
}

static bool take_chunk(touch_work *work, uint64_t *at, uint64_t *bytes)
{
    *at = atomic_fetch_add(&work->next, CHUNK);
    if (*at >= work->bytes) return false;
    *bytes = rft_min_u64(CHUNK, work->bytes - *at);
    return true;
}

static void keep_failure(touch_work *work, refit_status status, const refit_error *error)
{
    rft_lock(&work->lock);
    if (work->status == REFIT_OK) {
        work->status = status;
        work->error = *error;
    }
    rft_unlock(&work->lock);
    atomic_store(&work->next, work->bytes);
}

static void *run_touch(void *user)
{
    touch_work *work = user;
    uint64_t at, bytes;
    while (take_chunk(work, &at, &bytes)) {
        refit_error error;
        refit_status status = rft_touch_range(work->base + at, bytes, &error);
        if (status != REFIT_OK) keep_failure(work, status, &error);
    }
    return NULL;
}

static uint32_t count_threads(uint64_t bytes, uint32_t wanted)
{
    uint64_t chunks = (bytes + CHUNK - 1) / CHUNK;
    uint64_t threads =
        wanted != 0 ? rft_min_u64(wanted, THREADS_TOP) : rft_min_u64(rft_cpu_count(), THREADS);
    return (uint32_t)rft_min_u64(threads, chunks);
}

refit_status rft_touch(void *base, uint64_t bytes, uint32_t threads, refit_error *error)
{
    touch_work work = {.base = base, .bytes = bytes, .status = REFIT_OK};
    rft_thread helpers[THREADS_TOP];
    uint32_t started = 0;
    atomic_init(&work.next, 0);
    RFT_TRY(rft_mutex_open(&work.lock, error));
    uint32_t most = count_threads(bytes, threads);
    while (started + 1 < most &&
           rft_thread_start(&helpers[started], "refit-touch", run_touch, &work, NULL) == REFIT_OK) {
        started++;
    }
    run_touch(&work);
    for (uint32_t i = 0; i < started; i++) {
        rft_thread_join(helpers[i]);
    }
    rft_mutex_close(&work.lock);
    if (work.status != REFIT_OK && error != NULL) *error = work.error;
    return work.status;
}
