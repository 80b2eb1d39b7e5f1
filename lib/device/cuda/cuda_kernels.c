/*
 * The kernels' image in the driver, their launches, and the digests, casts and coding of masters
 * that are made of launches.
 *
 * The fatbin is tried first; then, for drivers older than the machine code in it, the PTX alone,
 * which they compile for their GPU. Each kernel is loaded onto the GPU when the device is opened
 * (asking for its function does that, and drivers from 12.4 on can be told to): left to itself the
 * driver does so at the first launch, which may then wait for the whole device.
 *
 * A grid is as large as fills the GPU, or smaller for little work; any grid gives the same result.
 * Knows nothing of what the bytes are.
 */
#include "device/cuda/cuda_kernels.h"

#include "base/alloc.h"
#include "base/checked.h"
#include "base/clock.h"
#include "base/log.h"
#include "device/cuda/cuda_memory.h"
#include "device/cuda/cuda_stream.h"
#include "kernels/cuda_image.h"
#include "kernels/gpu.h"

/* Blocks in a row of the grid, which share a run of entries. */
#define PACK_ROW 4u

typedef enum kernel_name {
    PACK,
    CAST,
    DIGEST,
    DIGEST_LIST,
    MASTER_SPLIT,
    MASTER_LIST,
    MASTER_JOIN,
    DELTA_EXCHANGE,
    DELTA_APPLY,
    KERNELS,
} kernel_name;

static const char *const names[KERNELS] = {[PACK] = "rft_pack_kernel",
                                           [CAST] = "rft_cast_kernel",
                                           [DIGEST] = "rft_digest_kernel",
                                           [DIGEST_LIST] = "rft_digest_list_kernel",
                                           [MASTER_SPLIT] = "rft_master_split_kernel",
                                           [MASTER_LIST] = "rft_master_list_kernel",
                                           [MASTER_JOIN] = "rft_master_join_kernel",
                                           [DELTA_EXCHANGE] = "rft_delta_exchange_kernel",
                                           [DELTA_APPLY] = "rft_delta_apply_kernel"};

struct rft_cuda_kernels {
    rft_cu_library library;
    rft_cu_kernel all[KERNELS];
};

static rft_cu_result load_kernels(const rft_cuda_driver *driver, rft_cuda_kernels *kernels)
{
    rft_cu_result result = RFT_CU_SUCCESS;
    for (int name = 0; name < KERNELS && result == RFT_CU_SUCCESS; name++) {
        rft_cu_kernel kernel = NULL;
        result = driver->library_kernel(&kernel, kernels->library, names[name]);
        if (result != RFT_CU_SUCCESS) break;
        result = driver->kernel_function(&kernels->all[name], kernel);
        if (result != RFT_CU_SUCCESS || driver->function_load == NULL) continue;
        result = driver->function_load(kernels->all[name]);
    }
    return result;
}

/* On failure nothing is loaded. */
static rft_cu_result load_image(const rft_cuda_driver *driver, const unsigned char *image,
                                rft_cuda_kernels *kernels)
{
    rft_cu_result result =
        driver->library_load(&kernels->library, image, NULL, NULL, 0, NULL, NULL, 0);
    if (result != RFT_CU_SUCCESS) return result;
    result = load_kernels(driver, kernels);
    if (result != RFT_CU_SUCCESS) (void)driver->library_unload(kernels->library);
    return result;
}

static bool takes_libraries(const rft_cuda_driver *driver)
{
    return driver->library_load != NULL && driver->library_unload != NULL &&
           driver->library_kernel != NULL && driver->kernel_function != NULL;
}

#define INSTEAD "small copies go through the copy engines, and digests are taken on the host"

/* REFIT_ERR_UNSUPPORTED: this driver and GPU cannot have the kernels; the sentence says why. */
static refit_status load(const rft_cuda_driver *driver, rft_cuda_kernels *kernels,
                         refit_error *error)
{
    RFT_REFUSE_IF(!takes_libraries(driver), error, REFIT_ERR_UNSUPPORTED,
                  "the driver cannot load the GPU's kernels; " INSTEAD);
    rft_cu_result binary = load_image(driver, rft_cuda_image, kernels);
    if (binary == RFT_CU_SUCCESS) return REFIT_OK;
    rft_cu_result ptx = load_image(driver, rft_cuda_ptx, kernels);
    if (ptx == RFT_CU_SUCCESS) return REFIT_OK;
    if (rft_cuda_is_lost(ptx)) {
        return rft_cuda_check(driver, ptx, error, "the GPU's kernels could not be loaded");
    }
    return rft_fail_sub(
        error, REFIT_ERR_UNSUPPORTED, ptx,
        "the GPU's kernels could not be loaded (machine code: %s, PTX: %s); " INSTEAD,
        rft_cuda_name(driver, binary), rft_cuda_name(driver, ptx));
}

refit_status rft_cuda_kernels_open(rft_cuda_device *cuda, rft_cuda_kernels **out,
                                   refit_error *error)
{
    refit_error why;
    rft_cuda_kernels *kernels = rft_calloc(1, sizeof *kernels);
    RFT_REFUSE_IF(kernels == NULL, error, REFIT_ERR_HOST_MEMORY, "no host memory for kernels");
    refit_status status = load(&cuda->driver, kernels, &why);
    if (status == REFIT_OK) {
        *out = kernels;
        return REFIT_OK;
    }
    rft_free(kernels);
    if (status != REFIT_ERR_UNSUPPORTED) {
        if (error != NULL) *error = why;
        return status;
    }
    cuda->kernels_missing = why;
    rft_log(REFIT_LOG_WARNING, "cuda:%d: %s", cuda->ordinal, why.text);
    return REFIT_OK;
}

void rft_cuda_kernels_close(rft_cuda_device *cuda, rft_cuda_kernels *kernels)
{
    if (kernels == NULL) return;
    rft_cuda_guard guard;
    if (!cuda->stuck && rft_cuda_enter(cuda, &guard, NULL) == REFIT_OK) {
        (void)cuda->driver.library_unload(kernels->library);
        rft_cuda_leave(cuda, &guard);
    }
    rft_free(kernels);
}

/* REFIT_ERR_UNSUPPORTED, with the sentence of kernels_missing, where there are none. */
static refit_status check_kernels(const rft_cuda_device *cuda, refit_error *error)
{
    if (cuda->kernels != NULL) return REFIT_OK;
    if (error != NULL) *error = cuda->kernels_missing;
    return REFIT_ERR_UNSUPPORTED;
}

typedef struct grid {
    unsigned x;
    unsigned y;
} grid;

static refit_status launch(rft_cuda_device *cuda, rft_cu_stream stream, rft_cu_kernel kernel,
                           grid blocks, void **arguments, refit_error *error)
{
    rft_cu_result result = cuda->driver.launch(kernel, blocks.x, blocks.y, 1, RFT_GPU_THREADS, 1, 1,
                                               0, stream, arguments, NULL);
    return rft_cuda_check(&cuda->driver, result, error, "a kernel could not be put on a stream");
}

/* How many blocks `shares` of work are worth: all that the GPU runs at once, or fewer. */
static unsigned count_blocks(const rft_cuda_device *cuda, uint64_t shares)
{
    uint64_t most = (uint64_t)cuda->facts.multiprocessors * RFT_GPU_BLOCKS;
    return (unsigned)rft_max_u64(rft_min_u64(shares, most), 1);
}

/* Every entry is at least one chunk, and every warp takes one. */
refit_status rft_cuda_launch_pack(rft_cuda_device *cuda, rft_cu_stream stream, rft_cu_ptr entries,
                                  uint32_t count, uint64_t bytes, refit_error *error)
{
    RFT_TRY(check_kernels(cuda, error));
    if (count == 0) return REFIT_OK;
    uint64_t chunks = bytes / RFT_GPU_CHUNK + count;
    unsigned blocks = count_blocks(cuda, chunks / (RFT_GPU_THREADS / RFT_GPU_WARP) + 1);
    grid shape;
    shape.x = (unsigned)rft_min_u64((blocks + PACK_ROW - 1) / PACK_ROW, count);
    shape.y = (blocks + shape.x - 1) / shape.x;
    void *arguments[] = {&entries, &count};
    return launch(cuda, stream, cuda->kernels->all[PACK], shape, arguments, error);
}

refit_status rft_cuda_launch_cast(rft_cuda_device *cuda, rft_cu_stream stream, rft_cu_ptr to,
                                  rft_cu_ptr from, uint64_t count, refit_error *error)
{
    RFT_TRY(check_kernels(cuda, error));
    if (count == 0) return REFIT_OK;
    grid shape = {count_blocks(cuda, count / (RFT_GPU_SHARE / sizeof(float)) + 1), 1};
    void *arguments[] = {&to, &from, &count};
    return launch(cuda, stream, cuda->kernels->all[CAST], shape, arguments, error);
}

refit_status rft_cuda_launch_digest(rft_cuda_device *cuda, rft_cu_stream stream, rft_cu_ptr data,
                                    uint64_t bytes, uint64_t offset, rft_cu_ptr sum,
                                    refit_error *error)
{
    RFT_TRY(check_kernels(cuda, error));
    if (bytes == 0) return REFIT_OK;
    grid shape = {count_blocks(cuda, RFT_DIGEST_CHUNKS(bytes)), 1};
    void *arguments[] = {&data, &bytes, &offset, &sum};
    return launch(cuda, stream, cuda->kernels->all[DIGEST], shape, arguments, error);
}

/* What the jobs have to do is known on the device alone. */
refit_status rft_cuda_launch_digest_list(rft_cuda_device *cuda, rft_cu_stream stream,
                                         rft_cu_ptr jobs, uint32_t count, refit_error *error)
{
    RFT_TRY(check_kernels(cuda, error));
    if (count == 0) return REFIT_OK;
    grid shape = {count_blocks(cuda, UINT64_MAX), 1};
    void *arguments[] = {&jobs, &count};
    return launch(cuda, stream, cuda->kernels->all[DIGEST_LIST], shape, arguments, error);
}

/* A block of threads for each block of elements, or for each unit. */
refit_status rft_cuda_launch_master_encode(rft_cuda_device *cuda, rft_cu_stream stream,
                                           const rft_master_job *job, refit_error *error)
{
    rft_master_job on = *job;
    RFT_TRY(check_kernels(cuda, error));
    grid split = {count_blocks(cuda, on.elements / RFT_MASTER_BLOCK + 1), 1};
    grid list = {count_blocks(cuda, on.elements / RFT_MASTER_UNIT + 1), 1};
    void *arguments[] = {&on.master, &on.weights, &on.coded, &on.elements, &on.room, &on.result};
    RFT_TRY(launch(cuda, stream, cuda->kernels->all[MASTER_SPLIT], split, arguments, error));
    return launch(cuda, stream, cuda->kernels->all[MASTER_LIST], list, arguments, error);
}

refit_status rft_cuda_launch_master_decode(rft_cuda_device *cuda, rft_cu_stream stream,
                                           const rft_master_job *job, refit_error *error)
{
    rft_master_job on = *job;
    uint32_t compares = on.compares;
    RFT_TRY(check_kernels(cuda, error));
    grid shape = {count_blocks(cuda, on.elements / RFT_MASTER_BLOCK + 1), 1};
    void *arguments[] = {&on.master, &on.weights, &on.coded, &on.elements,
                         &on.room,   &on.result,  &compares};
    return launch(cuda, stream, cuda->kernels->all[MASTER_JOIN], shape, arguments, error);
}

/* A block takes a job at a time. */
refit_status rft_cuda_launch_delta_exchange(rft_cuda_device *cuda, rft_cu_stream stream,
                                            rft_cu_ptr jobs, uint32_t count, rft_cu_ptr memory,
                                            uint64_t room, rft_cu_ptr used, refit_error *error)
{
    RFT_TRY(check_kernels(cuda, error));
    if (count == 0) return REFIT_OK;
    grid shape = {count_blocks(cuda, count), 1};
    void *arguments[] = {&jobs, &count, &memory, &room, &used};
    return launch(cuda, stream, cuda->kernels->all[DELTA_EXCHANGE], shape, arguments, error);
}

refit_status rft_cuda_launch_delta_apply(rft_cuda_device *cuda, rft_cu_stream stream,
                                         rft_cu_ptr jobs, uint32_t count, refit_error *error)
{
    RFT_TRY(check_kernels(cuda, error));
    if (count == 0) return REFIT_OK;
    grid shape = {count_blocks(cuda, count), 1};
    void *arguments[] = {&jobs, &count};
    return launch(cuda, stream, cuda->kernels->all[DELTA_APPLY], shape, arguments, error);
}

/* ---- Digests and casts -----------------------------------------------------------------------
 * Digests and casts in stream order: slots of device.h. A cast is one launch. A digest has to bring
 * its sum to ordinary host memory, which the GPU cannot write without a wait on the CPU:
 *
 *     zero a slot ─► kernel adds to it ─► copy to the slot's page-locked twin ─► host function:
 *                                                          *sum = twin, the slot is free again
 *
 * all on the caller's stream. Slots are taken under a lock and number their users, so that a call
 * which gave up (REFIT_STREAM_NONE, the work not done in time) can take its *sum back before the
 * late host function writes there. A slot whose host function could not be queued is never used
 * again, since work that writes to it may still be under way.
 */

#define SLOTS 256u

typedef struct sum_slot {
    rft_cuda_compute *compute;
    uint64_t *to;  /* NULL: the caller gave up; guarded by the lock, like the rest */
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
    rft_lock(&compute->lock);
    bool owed = compute->owed > 0;
    rft_unlock(&compute->lock);
    return owed && !rft_cuda_context_is_lost(cuda);
}

/* Inside a context guard. false: digests are still under way, and the last one frees the rest. */
static bool close_sums(rft_cuda_device *cuda, rft_cuda_compute *compute)
{
    rft_looks looks = rft_looks_until(rft_deadline(cuda->config.offload_timeout_ms));
    while (is_owed(cuda, compute) && rft_poll_again(&looks)) {
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
        error, "page-locked memory for digests could not be allocated"));
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

/* A copy engine refuses memory that it cannot reach; a kernel that touches it loses the GPU's
 * context.
 */
static refit_status check_reach(rft_cuda_device *cuda, const void *memory, uint64_t bytes,
                                refit_error *error)
{
    RFT_TRY(check_kernels(cuda, error));
    rft_memory_range ignored;
    return rft_cuda_pointer_check(cuda, memory, bytes, &ignored, error);
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
    RFT_TRY(check_reach(cuda, memory, bytes, error));
    RFT_TRY(rft_cuda_work_begin(cuda, stream, &on, error));
    refit_status status = take(cuda, sum, &ticket, error);
    if (status != REFIT_OK) return rft_cuda_work_end(cuda, &on, status, error);
    status = queue_digest(cuda, on.stream, ticket, &work, error);
    status = rft_cuda_work_end(cuda, &on, status, error);
    if (status != REFIT_OK) forget(cuda->compute, ticket);
    return status;
}

static refit_status digest_list(rft_cuda_device *cuda, refit_stream_ref stream,
                                rft_digest_job *jobs, uint32_t count, refit_error *error)
{
    rft_cuda_work work;
    RFT_TRY(check_kernels(cuda, error));
    RFT_TRY(rft_cuda_work_begin(cuda, stream, &work, error));
    refit_status status =
        rft_cuda_launch_digest_list(cuda, work.stream, (uintptr_t)jobs, count, error);
    return rft_cuda_work_end(cuda, &work, status, error);
}

static refit_status cast_bf16(rft_cuda_device *cuda, refit_stream_ref stream, uint16_t *to,
                              const float *from, uint64_t count, refit_error *error)
{
    rft_cuda_work work;
    RFT_TRY(check_reach(cuda, to, count * sizeof *to, error));
    RFT_TRY(check_reach(cuda, from, count * sizeof *from, error));
    RFT_TRY(rft_cuda_work_begin(cuda, stream, &work, error));
    refit_status status =
        rft_cuda_launch_cast(cuda, work.stream, (uintptr_t)to, (uintptr_t)from, count, error);
    return rft_cuda_work_end(cuda, &work, status, error);
}

typedef refit_status (*master_launch)(rft_cuda_device *cuda, rft_cu_stream stream,
                                      const rft_master_job *job, refit_error *error);

static refit_status code_masters(rft_cuda_device *cuda, refit_stream_ref stream,
                                 const rft_master_job *job, master_launch launches,
                                 refit_error *error)
{
    rft_cuda_work work;
    uint64_t coded = rft_master_bytes(job->elements, job->room);
    RFT_TRY(check_reach(cuda, job->master, 4 * job->elements, error));
    RFT_TRY(check_reach(cuda, job->weights, 2 * job->elements, error));
    RFT_TRY(check_reach(cuda, job->coded, coded, error));
    RFT_TRY(check_reach(cuda, job->result, sizeof *job->result, error));
    RFT_TRY(rft_cuda_work_begin(cuda, stream, &work, error));
    return rft_cuda_work_end(cuda, &work, launches(cuda, work.stream, job, error), error);
}

static refit_status exchange_blocks(rft_cuda_device *cuda, refit_stream_ref stream,
                                    rft_delta_job *jobs, uint32_t count,
                                    const rft_delta_notes *notes, refit_error *error)
{
    rft_cuda_work work;
    RFT_TRY(rft_cuda_work_begin(cuda, stream, &work, error));
    refit_status status = rft_cuda_launch_delta_exchange(cuda, work.stream, (uintptr_t)jobs, count,
                                                         (uintptr_t)notes->memory, notes->room,
                                                         (uintptr_t)notes->used, error);
    return rft_cuda_work_end(cuda, &work, status, error);
}

static refit_status apply_blocks(rft_cuda_device *cuda, refit_stream_ref stream,
                                 rft_delta_job *jobs, uint32_t count, refit_error *error)
{
    rft_cuda_work work;
    RFT_TRY(rft_cuda_work_begin(cuda, stream, &work, error));
    refit_status status =
        rft_cuda_launch_delta_apply(cuda, work.stream, (uintptr_t)jobs, count, error);
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

static refit_status cuda_digest_list(void *self, refit_stream_ref stream, rft_digest_job *jobs,
                                     uint32_t count, refit_error *error)
{
    rft_cuda_device *cuda = self;
    RFT_CUDA_GUARDED(cuda, error, digest_list(cuda, stream, jobs, count, error));
}

static refit_status cuda_cast_bf16(void *self, refit_stream_ref stream, uint16_t *to,
                                   const float *from, uint64_t count, refit_error *error)
{
    rft_cuda_device *cuda = self;
    RFT_CUDA_GUARDED(cuda, error, cast_bf16(cuda, stream, to, from, count, error));
}

static refit_status cuda_master_encode(void *self, refit_stream_ref stream,
                                       const rft_master_job *job, refit_error *error)
{
    rft_cuda_device *cuda = self;
    RFT_CUDA_GUARDED(cuda, error,
                     code_masters(cuda, stream, job, rft_cuda_launch_master_encode, error));
}

static refit_status cuda_master_decode(void *self, refit_stream_ref stream,
                                       const rft_master_job *job, refit_error *error)
{
    rft_cuda_device *cuda = self;
    RFT_CUDA_GUARDED(cuda, error,
                     code_masters(cuda, stream, job, rft_cuda_launch_master_decode, error));
}

static refit_status cuda_delta_exchange(void *self, refit_stream_ref stream, rft_delta_job *jobs,
                                        uint32_t count, const rft_delta_notes *notes,
                                        refit_error *error)
{
    rft_cuda_device *cuda = self;
    RFT_CUDA_GUARDED(cuda, error, exchange_blocks(cuda, stream, jobs, count, notes, error));
}

static refit_status cuda_delta_apply(void *self, refit_stream_ref stream, rft_delta_job *jobs,
                                     uint32_t count, refit_error *error)
{
    rft_cuda_device *cuda = self;
    RFT_CUDA_GUARDED(cuda, error, apply_blocks(cuda, stream, jobs, count, error));
}

void rft_cuda_compute_slots(rft_device_ops *ops)
{
    ops->digest = cuda_digest;
    ops->digest_list = cuda_digest_list;
    ops->cast_bf16 = cuda_cast_bf16;
    ops->master_encode = cuda_master_encode;
    ops->master_decode = cuda_master_decode;
    ops->delta_exchange = cuda_delta_exchange;
    ops->delta_apply = cuda_delta_apply;
}
