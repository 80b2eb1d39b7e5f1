/*
 * Digests and casts in stream order. A cast is one launch. A digest has to bring its sum to
 * ordinary host memory, which the GPU cannot write without making somebody wait:
 *
 *     zero a slot ─► kernel adds to it ─► copy to the slot's page-locked twin ─► host function:
 *                                                          *sum = twin, the slot is free again
 *
 * all on the caller's stream. Slots are taken under a lock and number their users, so that a call
 * which gave up (REFIT_STREAM_NONE, the work not done in time) can take its *sum back before the
 * late host function writes there. A slot whose host function could not be queued is never used
 * again, since work that writes to it may still be under way. Knows nothing of kernels' grids.
 */
#include "device/cuda/cuda_compute.h"

#include "base/alloc.h"
#include "base/clock.h"
#include "device/cuda/cuda_kernels.h"
#include "device/cuda/cuda_memory.h"
#include "device/cuda/cuda_stream.h"

/* ---- Digests and casts -------------------------------------------------------------------- */

#define SLOTS 256u

typedef struct sum_slot {
    rft_cuda_compute *compute;
    uint64_t *to;  /* NULL: nobody wants it any more; guarded by the lock, like the rest */
    uint64_t user; /* the number of the digest that has the slot */
    bool taken;
} sum_slot;

/* One digest's hold on its slot. */
typedef struct sum_ticket {
    sum_slot *slot;
    uint64_t user;
} sum_ticket;

struct rft_cuda_compute {
    rft_mutex lock;
    rft_cu_ptr sums; /* SLOTS of them on the GPU, and their twins; 0 and NULL before the first
                        digest. Guarded by lock, like the rest */
    uint64_t *twins;
    uint64_t users;
    uint32_t owed; /* host functions that will still come */
    bool orphan;   /* closed meanwhile: the last of them frees it */
    sum_slot slots[SLOTS];
};

refit_status rft_cuda_compute_open(rft_cuda_device *cuda, rft_cuda_compute **out,
                                   refit_error *error)
{
    (void)cuda;
    rft_cuda_compute *compute = rft_calloc(1, sizeof *compute);
    RFT_REFUSE_IF(compute == NULL, error, REFIT_ERR_HOST_MEMORY, "no host memory for digests");
    refit_status status = rft_mutex_open(&compute->lock, error);
    if (status != REFIT_OK) {
        rft_free(compute);
        return status;
    }
    *out = compute;
    return REFIT_OK;
}

static void free_compute(rft_cuda_compute *compute)
{
    rft_mutex_close(&compute->lock);
    rft_free(compute);
}

/* A lost GPU calls no host function any more. */
static bool is_owed(rft_cuda_device *cuda, rft_cuda_compute *compute)
{
    size_t left, total;
    rft_lock(&compute->lock);
    bool owed = compute->owed > 0;
    rft_unlock(&compute->lock);
    return owed && !rft_cuda_is_lost(cuda->driver.memory_info(&left, &total));
}

/* Inside a context guard. false: digests are still under way, and the last one frees the rest. */
static bool close_sums(rft_cuda_device *cuda, rft_cuda_compute *compute)
{
    rft_looks looks = rft_looks_until(rft_deadline(cuda->config.offload_timeout_ms));
    while (is_owed(cuda, compute) && rft_look_again(&looks)) {
    }
    if (is_owed(cuda, compute)) {
        rft_lock(&compute->lock);
        compute->orphan = compute->owed > 0;
        bool orphan = compute->orphan;
        rft_unlock(&compute->lock);
        if (orphan) return false;
    }
    (void)cuda->driver.memory_free(compute->sums);
    (void)cuda->driver.host_free(compute->twins);
    return true;
}

void rft_cuda_compute_close(rft_cuda_device *cuda, rft_cuda_compute *compute)
{
    if (compute == NULL) return;
    bool closed = true;
    rft_cuda_guard guard;
    if (compute->twins != NULL && rft_cuda_enter(cuda, &guard, NULL) == REFIT_OK) {
        closed = close_sums(cuda, compute);
        rft_cuda_leave(cuda, &guard);
    }
    if (closed) free_compute(compute);
    cuda->stuck = cuda->stuck || !closed;
}

/* Memory for the slots, the lock held. No digest is under way yet, so no host function waits for
 * the lock while the driver takes its time. */
static refit_status prepare(rft_cuda_device *cuda, refit_error *error)
{
    rft_cuda_compute *compute = cuda->compute;
    const rft_cuda_driver *driver = &cuda->driver;
    void *twins;
    rft_cu_ptr sums;
    if (compute->twins != NULL) return REFIT_OK;
    RFT_TRY(rft_cuda_check(
        driver, driver->host_alloc(&twins, SLOTS * sizeof(uint64_t), RFT_CU_HOST_ALLOC_PORTABLE),
        error, "page-locked memory for digests was not to be had"));
    rft_cu_result result = driver->memory_alloc(&sums, SLOTS * sizeof(uint64_t));
    if (result != RFT_CU_SUCCESS) {
        (void)driver->host_free(twins);
        return rft_cuda_memory_full(cuda, result, SLOTS * sizeof(uint64_t), error);
    }
    compute->sums = sums;
    compute->twins = twins;
    return REFIT_OK;
}

/* Lock held; NULL: all are taken. */
static sum_slot *find_free(rft_cuda_compute *compute)
{
    for (uint32_t i = 0; i < SLOTS; i++) {
        if (!compute->slots[i].taken) return &compute->slots[i];
    }
    return NULL;
}

/* Lock held. */
static refit_status take_locked(rft_cuda_device *cuda, uint64_t *sum, sum_ticket *out,
                                refit_error *error)
{
    rft_cuda_compute *compute = cuda->compute;
    RFT_TRY(prepare(cuda, error));
    sum_slot *slot = find_free(compute);
    RFT_REFUSE_IF(slot == NULL, error, REFIT_ERR_LIMIT,
                  "%u digests are under way: wait for some of them", SLOTS);
    *slot = (sum_slot){.compute = compute, .to = sum, .user = ++compute->users, .taken = true};
    *out = (sum_ticket){slot, slot->user};
    return REFIT_OK;
}

static refit_status take(rft_cuda_device *cuda, uint64_t *sum, sum_ticket *out, refit_error *error)
{
    rft_lock(&cuda->compute->lock);
    refit_status status = take_locked(cuda, sum, out, error);
    rft_unlock(&cuda->compute->lock);
    return status;
}

/* The sum is not wanted any more, if the slot is still this digest's. */
static void forget(rft_cuda_compute *compute, sum_ticket ticket)
{
    rft_lock(&compute->lock);
    if (ticket.slot->user == ticket.user) ticket.slot->to = NULL;
    rft_unlock(&compute->lock);
}

/* In stream order, on a thread of the driver's. */
static void deliver(void *user)
{
    sum_slot *slot = user;
    rft_cuda_compute *compute = slot->compute;
    rft_lock(&compute->lock);
    if (slot->to != NULL) *slot->to = compute->twins[slot - compute->slots];
    slot->to = NULL;
    slot->taken = false;
    bool last = --compute->owed == 0 && compute->orphan;
    rft_unlock(&compute->lock);
    if (last) free_compute(compute);
}

typedef struct digest_work {
    rft_cu_ptr data;
    uint64_t bytes;
    uint64_t offset;
} digest_work;

/* The sum, up to the slot's twin. */
static refit_status queue_sum(rft_cuda_device *cuda, rft_cu_stream stream, const sum_slot *slot,
                              const digest_work *work, refit_error *error)
{
    const rft_cuda_driver *driver = &cuda->driver;
    size_t at = (size_t)(slot - cuda->compute->slots);
    rft_cu_ptr sum = cuda->compute->sums + at * sizeof(uint64_t);
    RFT_TRY(rft_cuda_check(driver, driver->fill(sum, 0, sizeof(uint64_t), stream), error,
                           "a digest could not be begun"));
    RFT_TRY(
        rft_cuda_launch_digest(cuda, stream, work->data, work->bytes, work->offset, sum, error));
    return rft_cuda_check(
        driver, driver->copy((uintptr_t)&cuda->compute->twins[at], sum, sizeof(uint64_t), stream),
        error, "a digest could not be brought to the host");
}

/* The host function, which is owed from before the call on: it may come at once. */
static rft_cu_result queue_delivery(rft_cuda_device *cuda, rft_cu_stream stream, sum_slot *slot)
{
    rft_cuda_compute *compute = cuda->compute;
    rft_lock(&compute->lock);
    compute->owed++;
    rft_unlock(&compute->lock);
    rft_cu_result result = cuda->driver.stream_call(stream, deliver, slot);
    if (result == RFT_CU_SUCCESS) return result;
    rft_lock(&compute->lock);
    compute->owed--;
    rft_unlock(&compute->lock);
    return result;
}

static refit_status queue_digest(rft_cuda_device *cuda, rft_cu_stream stream, sum_ticket ticket,
                                 const digest_work *work, refit_error *error)
{
    refit_status status = queue_sum(cuda, stream, ticket.slot, work, error);
    if (status != REFIT_OK) forget(cuda->compute, ticket);
    rft_cu_result result = queue_delivery(cuda, stream, ticket.slot);
    if (status != REFIT_OK) return status;
    return rft_cuda_check(&cuda->driver, result, error,
                          "a digest could not be brought to the host");
}

/* A copy engine refuses what it cannot reach; a kernel breaks on it, and the GPU's context with it.
 */
static refit_status check(rft_cuda_device *cuda, const void *memory, uint64_t bytes,
                          refit_error *error)
{
    RFT_TRY(rft_cuda_kernels_check(cuda, error));
    const void *whole;
    return rft_cuda_pointer_check(cuda, memory, bytes, &whole, error);
}

/* Inside a context guard. REFIT_ERR_UNSUPPORTED without kernels; REFIT_ERR_LIMIT: very many digests
 * are under way. A digest that failed, or was not done in time, writes nothing to *sum later. */
static refit_status rft_cuda_digest(rft_cuda_device *cuda, refit_stream_ref stream,
                                    const void *memory, uint64_t bytes, uint64_t offset,
                                    uint64_t *sum, refit_error *error)
{
    rft_cuda_work on;
    sum_ticket ticket = {0};
    digest_work work = {(uintptr_t)memory, bytes, offset};
    RFT_TRY(check(cuda, memory, bytes, error));
    RFT_TRY(rft_cuda_work_begin(cuda, stream, &on, error));
    refit_status status = take(cuda, sum, &ticket, error);
    if (status != REFIT_OK) return rft_cuda_work_end(cuda, &on, status, error);
    status = queue_digest(cuda, on.stream, ticket, &work, error);
    status = rft_cuda_work_end(cuda, &on, status, error);
    if (status != REFIT_OK) forget(cuda->compute, ticket);
    return status;
}

/* `to` may be NULL. */
static refit_status digest_copy(rft_cuda_device *cuda, refit_stream_ref stream, void *to,
                                const void *from, uint64_t bytes, uint64_t offset, void *sum,
                                refit_error *error)
{
    rft_cuda_work work;
    rft_cu_ptr target = (uintptr_t)to, source = (uintptr_t)from, total = (uintptr_t)sum;
    RFT_TRY(rft_cuda_kernels_check(cuda, error));
    RFT_TRY(rft_cuda_work_begin(cuda, stream, &work, error));
    refit_status status =
        to == NULL ? rft_cuda_launch_digest(cuda, work.stream, source, bytes, offset, total, error)
                   : rft_cuda_launch_digest_copy(cuda, work.stream, target, source, bytes, offset,
                                                 total, error);
    return rft_cuda_work_end(cuda, &work, status, error);
}

static refit_status cast_bf16(rft_cuda_device *cuda, refit_stream_ref stream, uint16_t *to,
                              const float *from, uint64_t count, refit_error *error)
{
    rft_cuda_work work;
    RFT_TRY(check(cuda, to, count * sizeof *to, error));
    RFT_TRY(check(cuda, from, count * sizeof *from, error));
    RFT_TRY(rft_cuda_work_begin(cuda, stream, &work, error));
    refit_status status =
        rft_cuda_launch_cast(cuda, work.stream, (uintptr_t)to, (uintptr_t)from, count, error);
    return rft_cuda_work_end(cuda, &work, status, error);
}

/* ---- Slots -----------------------------------------------------------------------------------
 * Each enters the context; the work is done above. */

static refit_status cuda_digest(void *self, refit_stream_ref stream, const void *memory,
                                uint64_t bytes, uint64_t offset, uint64_t *sum, refit_error *error)
{
    rft_cuda_device *cuda = self;
    RFT_CUDA_GUARDED(cuda, error, rft_cuda_digest(cuda, stream, memory, bytes, offset, sum, error));
}

static refit_status cuda_digest_copy(void *self, refit_stream_ref stream, void *to,
                                     const void *from, uint64_t bytes, uint64_t offset, void *sum,
                                     refit_error *error)
{
    rft_cuda_device *cuda = self;
    RFT_CUDA_GUARDED(cuda, error, digest_copy(cuda, stream, to, from, bytes, offset, sum, error));
}

static refit_status cuda_cast_bf16(void *self, refit_stream_ref stream, uint16_t *to,
                                   const float *from, uint64_t count, refit_error *error)
{
    rft_cuda_device *cuda = self;
    RFT_CUDA_GUARDED(cuda, error, cast_bf16(cuda, stream, to, from, count, error));
}

void rft_cuda_compute_slots(rft_device_ops *ops)
{
    ops->digest = cuda_digest;
    ops->digest_copy = cuda_digest_copy;
    ops->cast_bf16 = cuda_cast_bf16;
}
