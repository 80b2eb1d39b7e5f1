/*
 * Bounce buffers, opened when a batch first wants one and kept until the device closes.
 *
 * A stream keeps its bounce buffer while its work is on it. Another stream gets an idle one, or a
 * new one, or none: nobody waits for the work of another stream, which may be held up for as long
 * as its owner likes. Two bounce buffers serve states that leave while others come back.
 *
 * What goes wrong here is never a failure of the copies: the copy engines do them. It is said once,
 * and tried again after a number of batches that doubles each time. Knows nothing of copies.
 */
#include "device/cuda_staging.h"

#include <inttypes.h>

#include "base/alloc.h"
#include "base/checked.h"
#include "base/log.h"
#include "device/cuda_cutoff.h"

#define BOUNCES    2u
#define REST_FIRST 16u
#define REST_MOST  4096u

struct rft_cuda_staging {
    rft_mutex lock;
    rft_cuda_bounce *bounces[BOUNCES]; /* guarded by lock, like the rest */
    uint32_t count;
    uint32_t rest;      /* batches that go without before the next try */
    uint32_t rest_next; /* what that will be after the next failure */
    bool told;          /* that something failed */
    bool finding;       /* a thread finds out `small` */
    uint64_t small;     /* 0: not known */
};

uint64_t rft_cuda_staging_bound(const rft_cuda_device *cuda)
{
    if (cuda->kernels == NULL) return 0;
    uint64_t small = cuda->config.offload_small_bytes;
    uint64_t most = cuda->config.offload_staging_bytes / 4;
    return rft_min_u64(small == 0 ? RFT_CUDA_CUTOFF_MOST : small, most);
}

refit_status rft_cuda_staging_open(rft_cuda_device *cuda, rft_cuda_staging **out,
                                   refit_error *error)
{
    rft_cuda_staging *staging = rft_calloc(1, sizeof *staging);
    RFT_REFUSE_IF(staging == NULL, error, REFIT_ERR_HOST_MEMORY, "no host memory for small copies");
    staging->rest_next = REST_FIRST;
    if (cuda->config.offload_small_bytes != 0) staging->small = rft_cuda_staging_bound(cuda);
    refit_status status = rft_mutex_open(&staging->lock, error);
    if (status == REFIT_OK) {
        *out = staging;
    } else {
        rft_free(staging);
    }
    return status;
}

void rft_cuda_staging_close(rft_cuda_device *cuda, rft_cuda_staging *staging)
{
    if (staging == NULL) return;
    rft_cuda_guard guard;
    bool inside = staging->count > 0 && rft_cuda_enter(cuda, &guard, NULL) == REFIT_OK;
    for (uint32_t i = 0; i < staging->count; i++) {
        if (inside) {
            rft_cuda_bounce_close(cuda, staging->bounces[i]);
        } else {
            rft_cuda_bounce_forget(staging->bounces[i]);
        }
    }
    if (inside) rft_cuda_leave(cuda, &guard);
    rft_mutex_close(&staging->lock);
    rft_free(staging);
}

/* ---- With the lock held ------------------------------------------------------------------ */

static bool may_try(rft_cuda_staging *staging)
{
    if (staging->rest == 0) return true;
    staging->rest--;
    return false;
}

static void failed(rft_cuda_staging *staging, const refit_error *why)
{
    if (!staging->told) {
        rft_log(REFIT_LOG_WARNING, "small copies go through the copy engines for now: %s",
                why->text);
    }
    staging->told = true;
    staging->rest = staging->rest_next;
    staging->rest_next = staging->rest_next < REST_MOST ? staging->rest_next * 2 : REST_MOST;
}

static rft_cuda_bounce *find_callers(rft_cuda_staging *staging, rft_cu_stream stream)
{
    for (uint32_t i = 0; i < staging->count; i++) {
        rft_cuda_bounce *bounce = staging->bounces[i];
        if (bounce->caller == stream && !bounce->broken) return bounce;
    }
    return NULL;
}

static rft_cuda_bounce *find_idle(rft_cuda_device *cuda, rft_cuda_staging *staging)
{
    for (uint32_t i = 0; i < staging->count; i++) {
        rft_cuda_bounce *bounce = staging->bounces[i];
        if (!bounce->taken && !bounce->broken && rft_cuda_bounce_is_idle(cuda, bounce))
            return bounce;
    }
    return NULL;
}

static rft_cuda_bounce *open_next(rft_cuda_device *cuda, rft_cuda_staging *staging)
{
    refit_error why = {0};
    rft_cuda_bounce *bounce = NULL;
    if (staging->count == BOUNCES || !may_try(staging)) return NULL;
    if (rft_cuda_bounce_open(cuda, cuda->config.offload_staging_bytes, &bounce, &why) != REFIT_OK) {
        failed(staging, &why);
        return NULL;
    }
    staging->bounces[staging->count++] = bounce;
    return bounce;
}

static rft_cuda_bounce *choose(rft_cuda_device *cuda, rft_cuda_staging *staging,
                               rft_cu_stream stream)
{
    rft_cuda_bounce *bounce = find_callers(staging, stream);
    if (bounce == NULL) bounce = find_idle(cuda, staging);
    if (bounce == NULL) bounce = open_next(cuda, staging);
    if (bounce == NULL || bounce->taken) return NULL;
    bounce->taken = true;
    bounce->caller = stream;
    return bounce;
}

/* ---- The calls --------------------------------------------------------------------------- */

void rft_cuda_staging_give(rft_cuda_staging *staging, rft_cuda_bounce *bounce)
{
    rft_lock(&staging->lock);
    bounce->taken = false;
    rft_unlock(&staging->lock);
}

/* After a failure its caller is nobody: some of it may be under way. */
static bool find_small(rft_cuda_device *cuda, rft_cuda_staging *staging, rft_cuda_bounce *bounce,
                       uint64_t *small)
{
    refit_error why = {0};
    refit_status status = rft_cuda_cutoff_find(cuda, bounce, small, &why);
    rft_lock(&staging->lock);
    staging->finding = false;
    if (status == REFIT_OK) {
        *small = rft_min_u64(*small, rft_cuda_staging_bound(cuda));
        staging->small = *small;
        rft_log(REFIT_LOG_INFO, "cuda:%d: copies below %" PRIu64 " bytes are gathered by a kernel",
                cuda->ordinal, *small);
    } else {
        failed(staging, &why);
        bounce->caller = NULL;
        bounce->taken = false;
    }
    rft_unlock(&staging->lock);
    return status == REFIT_OK;
}

rft_cuda_bounce *rft_cuda_staging_take(rft_cuda_device *cuda, rft_cuda_staging *staging,
                                       rft_cu_stream stream, uint64_t *small)
{
    rft_cuda_bounce *bounce = NULL;
    rft_lock(&staging->lock);
    bool known = staging->small != 0;
    bool tries = known || (!staging->finding && may_try(staging));
    if (tries) bounce = choose(cuda, staging, stream);
    if (bounce != NULL && !known) staging->finding = true;
    *small = staging->small;
    rft_unlock(&staging->lock);
    if (bounce == NULL || known) return bounce;
    return find_small(cuda, staging, bounce, small) ? bounce : NULL;
}

uint64_t rft_cuda_staging_small_bytes(rft_cuda_staging *staging)
{
    rft_lock(&staging->lock);
    uint64_t small = staging->small;
    rft_unlock(&staging->lock);
    return small;
}
