/*
 * The trainer's end of a weight update: refit_publisher_*, but for writing (publisher_write.c).
 *
 * Each call takes a step of the server under the lock, wakes the service thread
 * (publisher_service.c), and waits until the server has reached the state that the call promises.
 *
 * The bytes of a slot change only when no frame of it is being made (`sending`), none is in flight
 * (the pending references of its buffer), and no worker may be reading it; where that cannot be had
 * in time, the slot gets fresh memory instead, private memory if need be. The calls that wait:
 * begin for readers, until the staging timeout; commit for its two phases, whose deadlines the
 * service thread keeps; close for the linger time, and a moment for the transport to give back the
 * buffers that it holds. The waits of begin, commit and wait_workers look for a cancel after every
 * pass of the service thread, and cancel wakes it.
 */
#include "publisher/publisher.h"

#include <inttypes.h>
#include <string.h>

#include "base/alloc.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/random.h"
#include "base/text.h"
#include "base/thread.h"
#include "config/config.h"
#include "device/device_uuid.h"

#define GOODBYE_MOST_MS 500  /* for the workers' goodbyes: one may be dead, and not missed yet */
#define CLOSE_MORE_MS   2000 /* beyond the linger time, for the transport to let go */
#define WAIT_STEP_MS    1000 /* waits look again at least so often */

/* ---- Opening and closing */

static refit_status probe_open(refit_publisher *publisher, refit_error *error)
{
    refit_error why;
    if (publisher->config.broadcast_shm == REFIT_SHM_OFF) return REFIT_OK;
    RFT_TRY(rft_random_u64(&publisher->server.proof, error));
    if (rft_segment_create(&publisher->probe, sizeof publisher->server.proof, &why) == REFIT_OK) {
        memcpy(publisher->probe.memory, &publisher->server.proof, sizeof publisher->server.proof);
        strcpy(publisher->server.probe, publisher->probe.name);
        return REFIT_OK;
    }
    RFT_REFUSE_IF(publisher->config.broadcast_shm == REFIT_SHM_REQUIRE, error, REFIT_ERR_SYSTEM,
                  "%s", why.text);
    rft_log(REFIT_LOG_WARNING, "weights travel through sockets only: %s", why.text);
    return REFIT_OK;
}

static refit_status lock_open(refit_publisher *publisher, refit_error *error)
{
    RFT_TRY(rft_mutex_open(&publisher->lock, error));
    refit_status status = rft_cond_open(&publisher->changed, error);
    if (status != REFIT_OK) rft_mutex_close(&publisher->lock);
    return status;
}

static void lock_close(refit_publisher *publisher)
{
    rft_cond_close(&publisher->changed);
    rft_mutex_close(&publisher->lock);
}

static refit_status parts_open(refit_publisher *publisher, const char *endpoint, refit_error *error)
{
    uint64_t epoch;
    refit_status status;
    RFT_TRY(rft_random_u64(&epoch, error));
    rft_server_init(&publisher->server, &publisher->config, epoch, rft_now());
    RFT_TRY(rft_wake_fd_open(&publisher->wake, error));
    RFT_TRY_GOTO(probe_open(publisher, error), undo_wake);
    RFT_TRY_GOTO(rft_channel_bind(endpoint, &publisher->config, &publisher->channel, error),
                 undo_probe);
    publisher->server.allow = rft_channel_allow_list(publisher->channel);
    strcpy(publisher->server.key, rft_channel_key(publisher->channel));
    rft_text_say(publisher->server.endpoint, sizeof publisher->server.endpoint, "%s",
                 rft_channel_endpoint(publisher->channel));
    rft_channel_watch_keys(publisher->channel, publisher->wake);
    RFT_TRY_GOTO(lock_open(publisher, error), undo_channel);
    RFT_TRY_GOTO(rft_frames_open_pool(&publisher->encoders,
                                      publisher->config.broadcast_encode_threads, error),
                 undo_lock);
    RFT_TRY_GOTO(rft_thread_start(&publisher->thread, "refit-publish", rft_publisher_serve,
                                  publisher, error),
                 undo_encoders);
    return REFIT_OK;

undo_encoders:
    rft_pool_close(&publisher->encoders);
undo_lock:
    lock_close(publisher);
undo_channel:
    rft_channel_close(publisher->channel);
undo_probe:
    rft_segment_close(&publisher->probe);
undo_wake:
    rft_wake_fd_close(publisher->wake);
    return status;
}

refit_status refit_publisher_open(const char *endpoint, const refit_config *config,
                                  refit_publisher **out, refit_error *error)
{
    RFT_REFUSE_IF(out == NULL, error, REFIT_ERR_INVALID, "no place for the publisher: out is NULL");
    refit_publisher *publisher = rft_calloc(1, sizeof *publisher);
    RFT_REFUSE_IF(publisher == NULL, error, REFIT_ERR_HOST_MEMORY, "no memory for a publisher");
    refit_status status = rft_config_resolve(config, &publisher->config, error);
    if (endpoint == NULL) endpoint = publisher->config.broadcast_endpoint;
    if (status == REFIT_OK) status = parts_open(publisher, endpoint, error);
    if (status == REFIT_OK) {
        *out = publisher;
    } else {
        rft_free(publisher);
    }
    return status;
}

static void say_goodbye(refit_publisher *publisher, bool final, int64_t leave_at)
{
    rft_lock(&publisher->lock);
    rft_transaction_state state = publisher->server.transaction.state;
    if (state == RFT_TRANSACTION_WRITING || state == RFT_TRANSACTION_STAGING) {
        rft_transaction_abort(&publisher->server, REFIT_ERR_CLOSED, "the trainer closes");
    }
    rft_server_leave(&publisher->server, final);
    rft_rank_link_leave(&publisher->server, "the publisher closes");
    publisher->leave_at = leave_at;
    publisher->stopping = true;
    rft_unlock(&publisher->lock);
    rft_wake_fd_set(publisher->wake);
    rft_thread_join(publisher->thread);
}

static bool is_under_way(const refit_publisher *publisher);
static void await_step(refit_publisher *publisher, int64_t deadline);

/* A version whose commit has waited for nothing may still be on its way to workers. */
static void let_end(refit_publisher *publisher, int64_t deadline)
{
    rft_lock(&publisher->lock);
    while (publisher->unsettled && is_under_way(publisher) && rft_ms_until(deadline) > 0) {
        await_step(publisher, deadline);
    }
    rft_unlock(&publisher->lock);
}

static void report_left(uint32_t left)
{
    if (left == 0) return;
    rft_log(REFIT_LOG_ERROR, "the transport did not give back %" PRIu32 " buffers", left);
}

/* Copies first, then their targets. */
static void memory_close(refit_publisher *publisher, int64_t deadline)
{
    bool done = rft_copy_queue_close(publisher->copy_queue, deadline);
    done = rft_copy_queue_close(publisher->gpu_copy_queue, deadline) && done;
    if (!done) rft_log(REFIT_LOG_ERROR, "a device did not finish its copies: it stays open");
    uint32_t left = rft_gpu_store_close(publisher->gpu, deadline);
    if (left > 0) {
        rft_log(REFIT_LOG_ERROR,
                "workers did not let go of %" PRIu32
                " pieces of the GPU's memory: it is freed when the device closes, once they have "
                "unmapped it",
                left);
    }
    rft_publisher_end_streaming(publisher);
    rft_store_close(publisher->store);
    report_left(rft_retire_list_close(&publisher->retired, deadline));
}

static void publisher_close(refit_publisher *publisher, bool final)
{
    uint32_t linger_ms = publisher->config.broadcast_linger_ms;
    int64_t gone_at = rft_deadline(linger_ms);
    let_end(publisher, gone_at);
    say_goodbye(publisher, final,
                rft_deadline(linger_ms < GOODBYE_MOST_MS ? linger_ms : GOODBYE_MOST_MS));
    rft_channel_set_linger(publisher->channel, (uint32_t)rft_ms_until(gone_at));
    rft_channel_close(publisher->channel);
    rft_channel_close(publisher->link);
    rft_pool_close(&publisher->encoders);
    rft_frames_close(publisher->frames, &publisher->retired);
    int64_t deadline = rft_deadline(publisher->config.broadcast_linger_ms + CLOSE_MORE_MS);
    memory_close(publisher, deadline);
    report_left(rft_server_close(&publisher->server, deadline));
    rft_segment_close(&publisher->probe);
    rft_wake_fd_close(publisher->wake);
    lock_close(publisher);
    rft_free(publisher);
}

void refit_publisher_close(refit_publisher *publisher)
{
    if (publisher != NULL) publisher_close(publisher, false);
}

void refit_publisher_end(refit_publisher *publisher)
{
    if (publisher != NULL) publisher_close(publisher, true);
}

/* ---- Between two calls */

static refit_status settle(refit_publisher *publisher, refit_error *error);

refit_status rft_publisher_check_idle(refit_publisher *publisher, refit_error *error)
{
    RFT_TRY(settle(publisher, error));
    rft_lock(&publisher->lock);
    bool idle = publisher->server.transaction.state == RFT_TRANSACTION_IDLE;
    uint64_t version = publisher->server.transaction.version;
    rft_unlock(&publisher->lock);
    RFT_REFUSE_IF(!idle, error, REFIT_ERR_STATE,
                  "version %" PRIu64 " is under way: commit or abort it first", version);
    return REFIT_OK;
}

/* Waits until the service thread uses neither store nor frames. Called with the lock held. */
static void await_sending(refit_publisher *publisher)
{
    while (publisher->sending) {
        (void)rft_cond_wait(&publisher->changed, &publisher->lock, rft_deadline(WAIT_STEP_MS));
    }
}

/*
 * ---- The GPU that versions are shown on
 *
 * Memory of a GPU is scarce where trainers and workers share it, so with broadcast.gpu: auto it is
 * taken only while a worker on that GPU is subscribed, and a version for which there is none goes
 * the other ways; with require there is no other way, and it is an error.
 */

static bool is_required(const refit_publisher *publisher)
{
    return publisher->config.broadcast_gpu == REFIT_GPU_REQUIRE;
}

/* REFIT_ERR_UNSUPPORTED, REFIT_ERR_SYSTEM: why the device's memory cannot be shown. */
static refit_status check_shares(const refit_publisher *publisher, refit_device *device,
                                 refit_error *error)
{
    rft_device_caps caps = rft_device_get_caps(device);
    RFT_REFUSE_IF(!caps.shares || rft_uuid_is_none(caps.uuid), error, REFIT_ERR_UNSUPPORTED,
                  "this device's memory cannot be shown to other processes");
    RFT_REFUSE_IF(publisher->probe.memory == NULL, error, REFIT_ERR_SYSTEM,
                  "there is no shared memory in which workers could mark that they read the GPU's");
    return REFIT_OK;
}

static refit_status use(refit_publisher *publisher, refit_device *device, refit_error *error)
{
    rft_gpu_store *gpu = NULL;
    RFT_TRY(rft_gpu_store_open(device, &gpu, error));
    publisher->gpu = gpu;
    rft_lock(&publisher->lock);
    rft_server_use_gpu(&publisher->server, gpu);
    rft_unlock(&publisher->lock);
    rft_wake_fd_set(publisher->wake);
    return REFIT_OK;
}

refit_status refit_publisher_use_device(refit_publisher *publisher, refit_device *device,
                                        refit_error *error)
{
    refit_error why;
    RFT_REFUSE_IF(publisher == NULL || device == NULL, error, REFIT_ERR_INVALID,
                  "use_device needs a publisher and a device");
    RFT_TRY(rft_publisher_check_idle(publisher, error));
    if (publisher->config.broadcast_gpu == REFIT_GPU_OFF) return REFIT_OK;
    if (publisher->gpu != NULL) {
        RFT_REFUSE_IF(publisher->gpu->device != device, error, REFIT_ERR_STATE,
                      "the publisher has another device already, until it is closed");
        return REFIT_OK;
    }
    refit_status status = check_shares(publisher, device, &why);
    if (status == REFIT_OK) status = use(publisher, device, &why);
    if (status == REFIT_OK) return REFIT_OK;
    RFT_REFUSE_IF(is_required(publisher), error, status, "broadcast.gpu is require, but %s",
                  why.text);
    rft_log(REFIT_LOG_INFO, "no version is shown in a GPU's memory: %s", why.text);
    return REFIT_OK;
}

/* ---- The GPU's slot of a version */

static bool is_wanted(refit_publisher *publisher)
{
    bool wanted = is_required(publisher);
    if (publisher->store->shard != NULL) return false;
    rft_lock(&publisher->lock);
    for (uint32_t i = 0; i < publisher->server.peers.count; i++) {
        const rft_peer *peer = publisher->server.peers.live[i];
        wanted = wanted || (peer->subscribed && peer->gpu);
    }
    rft_unlock(&publisher->lock);
    return wanted;
}

bool rft_publisher_keeps_copies(const refit_publisher *publisher)
{
    return publisher->config.broadcast_gpu == REFIT_GPU_STORE ||
           publisher->config.broadcast_wait != REFIT_WAIT_APPLIED;
}

/* Whether what is too much for the GPU could leave it piece by piece, as far as is known. */
static bool can_stream(refit_publisher *publisher)
{
    bool can =
        publisher->config.broadcast_gpu_bucket_bytes > 0 && !rft_publisher_keeps_copies(publisher);
    rft_lock(&publisher->lock);
    for (uint32_t i = 0; i < publisher->server.peers.count; i++) {
        const rft_peer *peer = publisher->server.peers.live[i];
        can = can && !(peer->subscribed && peer->gpu && !peer->pieces);
    }
    rft_unlock(&publisher->lock);
    return can;
}

/* Workers are told to unmap memory that is no longer needed. */
static void recall(refit_publisher *publisher)
{
    rft_lock(&publisher->lock);
    rft_server_recall_gpu(&publisher->server);
    rft_unlock(&publisher->lock);
    rft_wake_fd_set(publisher->wake);
}

uint64_t rft_publisher_block_room(const refit_publisher *publisher)
{
    uint64_t most = publisher->config.broadcast_gpu_bucket_bytes;
    uint64_t taken = rft_gpu_store_block_bytes(publisher->gpu);
    if (publisher->config.broadcast_gpu != REFIT_GPU_AUTO) return UINT64_MAX;
    return taken < most ? most - taken : 0;
}

/* Memory that is only still mapped may come free in a moment. */
static refit_status gpu_grow(refit_publisher *publisher, uint64_t bytes, refit_error *error)
{
    uint64_t room = rft_publisher_block_room(publisher);
    publisher->outgrown = bytes > room && !rft_gpu_store_lends(publisher->gpu);
    RFT_REFUSE_IF(bytes > room, error, REFIT_ERR_DEVICE_MEMORY,
                  "tensors that cannot be lent need %" PRIu64 " bytes more on the GPU, and "
                  "broadcast.gpu_bucket_bytes leaves %" PRIu64,
                  bytes, room);
    rft_gpu_store *gpu = publisher->gpu;
    rft_looks looks = rft_looks_until(rft_deadline(publisher->config.broadcast_linger_ms));
    refit_status status = rft_gpu_store_grow(gpu, bytes, error);
    uint64_t taken = rft_gpu_store_bytes(gpu);
    while (status == REFIT_ERR_DEVICE_MEMORY && gpu->retired != NULL && rft_poll_again(&looks)) {
        (void)rft_gpu_store_sweep(gpu);
        if (rft_gpu_store_bytes(gpu) == taken) continue;
        status = rft_gpu_store_grow(gpu, bytes, error);
        taken = rft_gpu_store_bytes(gpu);
    }
    return status;
}

static refit_status gpu_slot_clear(refit_publisher *publisher, uint32_t slot, refit_error *error)
{
    refit_status status = rft_gpu_store_clear(publisher->gpu, slot, error);
    if (publisher->gpu->retired != NULL) recall(publisher);
    return status;
}

/* An obstacle on the GPU: with broadcast.gpu: require it is an error. */
static refit_status go_another_way(const refit_publisher *publisher, refit_status status,
                                   const refit_error *why, refit_error *error)
{
    RFT_REFUSE_IF(is_required(publisher), error, status,
                  "broadcast.gpu is require, but there is no room for a version on the GPU: %s",
                  why->text);
    rft_log(REFIT_LOG_WARNING,
            "this version is not shown in the GPU's memory, its workers take it another way: %s",
            why->text);
    return REFIT_OK;
}

static void count_bytes(refit_publisher *publisher)
{
    uint64_t bytes = rft_gpu_store_bytes(publisher->gpu);
    rft_lock(&publisher->lock);
    publisher->gpu_bytes = bytes;
    rft_unlock(&publisher->lock);
}

/* No version lies in the GPU's memory any more. */
static void gpu_empty(refit_publisher *publisher)
{
    if (publisher->gpu == NULL) return;
    rft_lock(&publisher->lock);
    rft_gpu_store_empty(publisher->gpu);
    rft_unlock(&publisher->lock);
    count_bytes(publisher);
}

/* The GPU's part of begin: its slot for the version is cleared, if a worker takes it there. With
 * broadcast.gpu: require every obstacle is an error; with auto the version goes another way. */
static refit_status gpu_clear(refit_publisher *publisher, uint32_t slot, bool *there,
                              refit_error *error)
{
    refit_error why;
    *there = false;
    if (publisher->gpu == NULL) return REFIT_OK;
    bool wanted = is_wanted(publisher) && !(publisher->outgrown && !can_stream(publisher));
    refit_status status = wanted ? gpu_slot_clear(publisher, slot, &why) : REFIT_OK;
    *there = wanted && status == REFIT_OK;
    if (!wanted) gpu_empty(publisher);
    count_bytes(publisher);
    return status == REFIT_OK ? REFIT_OK : go_another_way(publisher, status, &why, error);
}

/* ---- Declaring */

static refit_status manifest_make(refit_publisher *publisher, const refit_tensor *tensors,
                                  uint32_t count, rft_manifest **out, refit_error *error)
{
    return rft_manifest_open(tensors, count, publisher->config.broadcast_frame_bytes,
                             &publisher->server.limits, out, error);
}

void rft_publisher_adopt(refit_publisher *publisher, rft_store *store, rft_frames *frames)
{
    rft_store *old_store = publisher->store;
    rft_frames *old_frames = publisher->frames;
    rft_lock(&publisher->lock);
    await_sending(publisher);
    rft_server_adopt(&publisher->server, store);
    publisher->store = store;
    publisher->frames = frames;
    rft_unlock(&publisher->lock);
    rft_wake_fd_set(publisher->wake);
    publisher->to_compare.count = 0;
    publisher->outgrown = publisher->over_host = false;
    gpu_empty(publisher);
    rft_publisher_count_pinned(publisher);
    rft_frames_close(old_frames, &publisher->retired);
    rft_store_close(old_store);
}

/* Also of a publisher that has a shard of these tensors, until it is told another one. */
static bool is_declared(const refit_publisher *publisher, const rft_manifest *manifest)
{
    return publisher->store != NULL &&
           rft_digest128_equal(&publisher->store->manifest->digest, &manifest->digest);
}

refit_status refit_publisher_declare(refit_publisher *publisher, const refit_tensor *tensors,
                                     uint32_t count, refit_error *error)
{
    rft_manifest *manifest = NULL;
    rft_store *store = NULL;
    rft_frames *frames = NULL;
    RFT_REFUSE_IF(publisher == NULL || tensors == NULL || count == 0, error, REFIT_ERR_INVALID,
                  "declare needs a publisher and at least one tensor");
    RFT_TRY(rft_publisher_check_idle(publisher, error));
    RFT_REFUSE_IF(publisher->config.broadcast_gpu == REFIT_GPU_REQUIRE && publisher->gpu == NULL,
                  error, REFIT_ERR_STATE,
                  "broadcast.gpu is require: say on which GPU with refit_publisher_use_device");
    RFT_TRY(manifest_make(publisher, tensors, count, &manifest, error));
    if (is_declared(publisher, manifest)) {
        rft_manifest_close(manifest);
        return REFIT_OK;
    }
    RFT_TRY(rft_store_open(manifest, publisher->config.broadcast_slots,
                           publisher->probe.memory != NULL, &publisher->retired, &store, error));
    refit_status status =
        rft_frames_open(store->manifest, &publisher->config, &publisher->encoders, &frames, error);
    if (status == REFIT_OK) {
        rft_publisher_adopt(publisher, store, frames);
    } else {
        rft_store_close(store);
    }
    return status;
}

refit_status refit_publisher_set_wait(refit_publisher *publisher, refit_wait wait,
                                      refit_error *error)
{
    RFT_REFUSE_IF(publisher == NULL || wait < REFIT_WAIT_APPLIED || wait > REFIT_WAIT_NONE, error,
                  REFIT_ERR_INVALID,
                  "set_wait needs a publisher and REFIT_WAIT_APPLIED, _STAGED or _NONE");
    RFT_TRY(rft_publisher_check_idle(publisher, error));
    RFT_REFUSE_IF(wait != REFIT_WAIT_APPLIED && publisher->config.broadcast_slots < 2, error,
                  REFIT_ERR_STATE,
                  "broadcast.slots is 1, so each version waits until workers have let go of the "
                  "one before: open the publisher with 2 slots");
    rft_lock(&publisher->lock);
    publisher->config.broadcast_wait = (int32_t)wait;
    rft_unlock(&publisher->lock);
    return REFIT_OK;
}

/* ---- Cancelling */

void refit_publisher_cancel(refit_publisher *publisher)
{
    if (publisher == NULL) return;
    atomic_store(&publisher->cancelled, true);
    rft_wake_fd_set(publisher->wake);
}

bool rft_publisher_take_cancel(refit_publisher *publisher)
{
    return atomic_exchange(&publisher->cancelled, false);
}

/* ---- Beginning */

static refit_status check_begin(refit_publisher *publisher, refit_error *error)
{
    RFT_REFUSE_IF(rft_publisher_take_cancel(publisher), error, REFIT_ERR_CANCELLED,
                  "refit_publisher_cancel came before version %" PRIu64 " had begun",
                  publisher->server.transaction.version);
    return REFIT_OK;
}

refit_status rft_publisher_await_taken(refit_publisher *publisher, uint32_t sequence,
                                       refit_error *error)
{
    rft_server *server = &publisher->server;
    int64_t deadline = rft_deadline(publisher->config.broadcast_stage_timeout_ms);
    rft_lock(&publisher->lock);
    bool cancelled = rft_publisher_take_cancel(publisher);
    bool taken = rft_transaction_pieces_taken(server, sequence);
    while (!cancelled && !taken && rft_ms_until(deadline) > 0) {
        (void)rft_cond_wait(&publisher->changed, &publisher->lock, deadline);
        cancelled = rft_publisher_take_cancel(publisher);
        taken = rft_transaction_pieces_taken(server, sequence);
    }
    if (!cancelled && !taken) rft_transaction_evict_slow(server, sequence, rft_now());
    rft_unlock(&publisher->lock);
    if (!cancelled && !taken) rft_wake_fd_set(publisher->wake);
    RFT_REFUSE_IF(cancelled, error, REFIT_ERR_CANCELLED,
                  "refit_publisher_cancel ended the wait for workers that copy the version");
    return REFIT_OK;
}

/* Waits until no worker reads the slot that comes next, and evicts those that do not let go. Called
 * with the lock held. */
static refit_status await_readers(refit_publisher *publisher, int64_t deadline, refit_error *error)
{
    bool blocked = rft_server_has_readers(&publisher->server);
    refit_status status = check_begin(publisher, error);
    while (status == REFIT_OK && blocked && rft_ms_until(deadline) > 0) {
        (void)rft_cond_wait(&publisher->changed, &publisher->lock, deadline);
        blocked = rft_server_has_readers(&publisher->server);
        status = check_begin(publisher, error);
    }
    if (status == REFIT_OK && blocked) rft_server_evict_readers(&publisher->server, rft_now());
    await_sending(publisher);
    return status;
}

/* Shared memory that is lost to a crashed reader must not end the training where sockets will do:
 * with broadcast.shm: auto the slot gets private memory, and no worker is offered to map the store
 * from now on, until other tensors are declared. */
static refit_status slot_renew(refit_publisher *publisher, uint32_t slot, refit_error *error)
{
    refit_error why = {0};
    rft_store *store = publisher->store;
    refit_status status = rft_store_renew(store, slot, &why);
    if (status == REFIT_OK) return REFIT_OK;
    bool retry = store->shared && status == REFIT_ERR_SYSTEM &&
                 publisher->config.broadcast_shm == REFIT_SHM_AUTO;
    if (!retry) return rft_fail_sub(error, status, why.subsystem, "%s", why.text);
    rft_log(REFIT_LOG_WARNING, "weights travel through sockets only from now on: %s", why.text);
    rft_lock(&publisher->lock);
    store->shared = false;
    rft_unlock(&publisher->lock);
    return rft_store_renew(store, slot, error);
}

/* Makes a slot's memory safe to write: as it is, or fresh. */
static refit_status slot_clear(refit_publisher *publisher, uint32_t slot, refit_error *error)
{
    rft_slot *place = &publisher->store->slots[slot];
    int64_t deadline = rft_deadline(publisher->config.broadcast_linger_ms);
    rft_retire_list_sweep(&publisher->retired);
    bool usable = place->buffer != NULL && !place->tainted;
    if (usable && rft_pending_wait(&place->buffer->pending, deadline)) return REFIT_OK;
    if (place->buffer != NULL)
        rft_log(REFIT_LOG_INFO, "a slot of the store is replaced: a worker may still read it");
    refit_status status = slot_renew(publisher, slot, error);
    rft_publisher_count_pinned(publisher);
    return status;
}

/* Whether some worker reads the next version on the host: one that is subscribed, or, while there
 * is none, one that may come. A worker that comes after a version that all read on their GPU gets
 * the next one. */
static bool is_host_wanted(refit_publisher *publisher)
{
    uint32_t here = 0, elsewhere = 0;
    if (is_required(publisher)) return false;
    if (publisher->over_host || publisher->store->shard != NULL) return true;
    rft_lock(&publisher->lock);
    for (uint32_t i = 0; i < publisher->server.peers.count; i++) {
        const rft_peer *peer = publisher->server.peers.live[i];
        if (peer->subscribed) ++*(peer->gpu ? &here : &elsewhere);
    }
    rft_unlock(&publisher->lock);
    return here == 0 || elsewhere > 0;
}

/* The version's place in every store that is to have it, once no copy goes there any more. */
static refit_status place_clear(refit_publisher *publisher, uint32_t slot, refit_error *error)
{
    bool on_gpu;
    rft_publisher_await_copies(publisher, rft_deadline(publisher->config.broadcast_linger_ms));
    RFT_TRY(gpu_clear(publisher, slot, &on_gpu, error));
    if (!on_gpu || is_host_wanted(publisher)) return slot_clear(publisher, slot, error);
    rft_lock(&publisher->lock);
    rft_store_empty(publisher->store, slot);
    rft_unlock(&publisher->lock);
    rft_publisher_count_pinned(publisher);
    return REFIT_OK;
}

static bool is_fresh(const rft_store *store)
{
    for (uint32_t i = 0; i < store->manifest->count; i++) {
        if (store->written[i]) return false;
    }
    return true;
}

refit_status rft_publisher_take_host(refit_publisher *publisher, refit_error *error)
{
    rft_store *store = publisher->store;
    if (store->slots[store->writing_slot].buffer != NULL) return REFIT_OK;
    RFT_REFUSE_IF(
        publisher->ring.on, error, REFIT_ERR_UNSUPPORTED,
        "the version is sent piece by piece from the GPU's memory, and is not kept there: "
        "it cannot be brought to the host");
    bool fresh = is_fresh(store);
    refit_status status = slot_clear(publisher, store->writing_slot, error);
    if (status == REFIT_OK && !fresh) status = rft_publisher_copy_to_host(publisher, error);
    rft_lock(&publisher->lock);
    if (status != REFIT_OK) {
        rft_store_drop_bytes(store);
    } else if (fresh) {
        rft_store_begin(store, publisher->server.transaction.version);
    } else {
        rft_store_add_bytes(store);
    }
    rft_unlock(&publisher->lock);
    rft_publisher_count_pinned(publisher);
    return status;
}

static refit_status leave_gpu(refit_publisher *publisher, refit_error *error)
{
    RFT_TRY(rft_publisher_take_host(publisher, error));
    rft_lock(&publisher->lock);
    rft_transaction_leave_gpu(&publisher->server, rft_now());
    rft_unlock(&publisher->lock);
    rft_wake_fd_set(publisher->wake);
    return REFIT_OK;
}

/* Where a version has no room on the GPU as a whole, it leaves through what there is. With
 * broadcast.gpu: store it is to be kept. Why not is said with the reason that is there. */
static refit_status stream(refit_publisher *publisher, refit_error *why)
{
    refit_error obstacle;
    refit_status before = (refit_status)why->status;
    if (rft_publisher_keeps_copies(publisher)) return before;
    refit_status status = rft_publisher_stream(publisher, &obstacle);
    if (status == REFIT_OK) publisher->outgrown = false;
    if (status == REFIT_OK || publisher->ring.on) {
        *why = obstacle;
        return status;
    }
    rft_log(REFIT_LOG_INFO, "the version is not sent piece by piece: %s", obstacle.text);
    return before;
}

refit_status rft_publisher_grow_block(refit_publisher *publisher, uint64_t bytes,
                                      refit_error *error)
{
    refit_error why;
    refit_status status = gpu_grow(publisher, bytes, &why);
    if (status == REFIT_ERR_DEVICE_MEMORY) status = stream(publisher, &why);
    count_bytes(publisher);
    if (status == REFIT_OK) return REFIT_OK;
    if (publisher->ring.on) return rft_fail_sub(error, status, why.subsystem, "%s", why.text);
    RFT_TRY(go_another_way(publisher, status, &why, error));
    return leave_gpu(publisher, error);
}

static bool is_aborted(const rft_rank_link *link, uint64_t version)
{
    return version != 0 && link->aborted == version;
}

/* Whether the wait for rank 0 to begin is over: it has, it cannot, or it is not there. */
static bool is_answered(const rft_server *server, uint64_t version, int64_t lost_at)
{
    const rft_rank_link *link = &server->ranks.link;
    if (is_aborted(link, version) || link->state == RFT_LINK_OFF) return true;
    if (!server->ranks.complete) return rft_ms_until(lost_at) == 0; /* it may join again */
    return link->offered > server->transaction.last;
}

/* Another rank than 0 begins a version that rank 0 has begun. Called with the lock held. */
static refit_status await_offer(refit_publisher *publisher, uint64_t *version, int64_t deadline,
                                refit_error *error)
{
    const rft_server *server = &publisher->server;
    const rft_rank_link *link = &server->ranks.link;
    if (!rft_ranks_follows(server)) return REFIT_OK;
    int64_t lost_at = rft_deadline(publisher->config.broadcast_heartbeat_timeout_ms);
    bool cancelled = rft_publisher_take_cancel(publisher);
    while (!cancelled && !is_answered(server, *version, lost_at) && rft_ms_until(deadline) > 0) {
        bool complete = server->ranks.complete;
        int64_t until = complete || deadline < lost_at ? deadline : lost_at;
        (void)rft_cond_wait(&publisher->changed, &publisher->lock, until);
        if (complete) lost_at = rft_deadline(publisher->config.broadcast_heartbeat_timeout_ms);
        cancelled = rft_publisher_take_cancel(publisher);
    }
    RFT_REFUSE_IF(cancelled, error, REFIT_ERR_CANCELLED,
                  "refit_publisher_cancel came before rank 0 had begun a version");
    bool offered = server->ranks.complete && link->offered > server->transaction.last;
    RFT_REFUSE_IF(!offered && is_aborted(link, *version), error, REFIT_ERR_PEER, "%s",
                  link->aborted_why.text);
    RFT_REFUSE_IF(!server->ranks.complete, error, REFIT_ERR_PEER, "the ranks are not all there: %s",
                  link->why.status != REFIT_OK ? link->why.text
                                               : "rank 0 has not said that they are");
    RFT_REFUSE_IF(!offered, error, REFIT_ERR_TIMEOUT,
                  "rank 0 at %s has begun no version in time (broadcast.stage_timeout_ms)",
                  link->endpoint);
    RFT_REFUSE_IF(*version != 0 && *version != link->offered, error, REFIT_ERR_STALE,
                  "rank 0 has begun version %" PRIu64 ", and rank %" PRIu32 " version %" PRIu64,
                  link->offered, server->ranks.rank, *version);
    *version = link->offered;
    return REFIT_OK;
}

refit_status refit_publisher_begin(refit_publisher *publisher, uint64_t version, refit_error *error)
{
    RFT_REFUSE_IF(publisher == NULL, error, REFIT_ERR_INVALID, "begin needs a publisher");
    rft_server *server = &publisher->server;
    RFT_TRY(settle(publisher, error));
    int64_t deadline = rft_deadline(publisher->config.broadcast_stage_timeout_ms);
    rft_lock(&publisher->lock);
    refit_status status = await_offer(publisher, &version, deadline, error);
    if (status == REFIT_OK) status = rft_transaction_prepare(server, &version, error);
    bool prepared = status == REFIT_OK;
    if (prepared) status = await_readers(publisher, deadline, error);
    rft_unlock(&publisher->lock);
    if (!prepared) return status;

    uint32_t slot = rft_store_target(publisher->store);
    rft_publisher_end_streaming(publisher); /* of the version before */
    if (status == REFIT_OK) status = place_clear(publisher, slot, error);
    rft_lock(&publisher->lock);
    if (status == REFIT_OK) status = check_begin(publisher, error);
    if (status == REFIT_OK && publisher->gpu != NULL) {
        status =
            rft_gpu_store_begin(publisher->gpu, slot, version, publisher->store->manifest, error);
    }
    if (status == REFIT_OK) {
        rft_store_begin(publisher->store, version);
        rft_transaction_begin(server, rft_now());
        publisher->write_seconds = 0;
    } else {
        rft_transaction_expire(server, rft_now());
    }
    rft_unlock(&publisher->lock);
    rft_wake_fd_set(publisher->wake);
    return status;
}

/* ---- Ending */

/* Whether the committed version's bytes can be put back where the one that is gone was written.
 * Frames of the latter that are still in flight are useless, but their bytes must not change: the
 * slot gets fresh memory. If there is none the old bytes are put back nevertheless: workers drop
 * frames of an aborted version. But not where a device may still write. */
static bool is_restorable(refit_publisher *publisher)
{
    const rft_store *store = publisher->store;
    const rft_buffer *buffer = store->slots[store->writing_slot].buffer;
    if (buffer == NULL || store->writing_slot != store->committed_slot) return true;
    const rft_pending *pending = &buffer->pending;
    bool written = rft_copy_queue_holds(publisher->copy_queue, pending) ||
                   rft_copy_queue_holds(publisher->gpu_copy_queue, pending);
    return slot_clear(publisher, store->writing_slot, NULL) == REFIT_OK || !written;
}

/* The version is aborted and all workers are told so. */
static void roll_back(refit_publisher *publisher)
{
    rft_store *store = publisher->store;
    rft_wake_fd_set(publisher->wake);
    rft_lock(&publisher->lock);
    await_sending(publisher);
    rft_unlock(&publisher->lock);
    publisher->to_compare.count = 0;
    rft_publisher_await_copies(publisher, rft_deadline(publisher->config.broadcast_linger_ms));
    bool restorable = is_restorable(publisher);
    if (!restorable) {
        rft_log(REFIT_LOG_ERROR, "a copy that does not end takes the committed version's place: "
                                 "nothing is served until the next one");
    }
    rft_store_undo(store);
    rft_lock(&publisher->lock);
    rft_store_rollback(store, restorable);
    if (publisher->gpu != NULL) rft_gpu_store_rollback(publisher->gpu);
    rft_transaction_end_rollback(&publisher->server, rft_now());
    rft_unlock(&publisher->lock);
    rft_wake_fd_set(publisher->wake);
}

/* Brings the version to the host for a member that cannot have it on the GPU any more. Called with
 * the lock held. */
static void serve_host(refit_publisher *publisher)
{
    refit_error why;
    publisher->server.transaction.undecided = true;
    rft_unlock(&publisher->lock);
    refit_status status = rft_publisher_take_host(publisher, &why);
    rft_lock(&publisher->lock);
    rft_transaction_serve_host(&publisher->server, status == REFIT_OK ? NULL : &why, rft_now());
    rft_wake_fd_set(publisher->wake);
}

/* Whether a version that was sealed may still end in two ways, or is awaited. */
static bool is_under_way(const refit_publisher *publisher)
{
    rft_transaction_state state = publisher->server.transaction.state;
    return state == RFT_TRANSACTION_STAGING || state == RFT_TRANSACTION_COMMITTING;
}

/* Waits for a step of it; its deadlines are kept by the service thread. Called with the lock held.
 */
static void await_step(refit_publisher *publisher, int64_t deadline)
{
    if (rft_transaction_wants_host(&publisher->server)) {
        serve_host(publisher);
    } else {
        int64_t at = rft_deadline(WAIT_STEP_MS);
        (void)rft_cond_wait(&publisher->changed, &publisher->lock, at < deadline ? at : deadline);
    }
}

/* What came of a version that is over. True: it was aborted, and is to be rolled back. Called with
 * the lock held. */
static bool conclude(refit_publisher *publisher, refit_error *result)
{
    *result = publisher->server.transaction.result;
    bool aborted = publisher->server.transaction.state == RFT_TRANSACTION_ABORTED;
    if (!aborted) rft_transaction_end_lending(&publisher->server, rft_now());
    return aborted;
}

/* Ends a version whose commit has waited for nothing, if it is over; what came of it is a line in
 * the log. */
static void tidy(refit_publisher *publisher)
{
    refit_error result = {0};
    rft_lock(&publisher->lock);
    bool over = publisher->unsettled && !is_under_way(publisher);
    if (over) publisher->unsettled = false;
    bool aborted = over && conclude(publisher, &result);
    rft_unlock(&publisher->lock);
    if (aborted) roll_back(publisher);
    if (result.status != REFIT_OK) rft_log(REFIT_LOG_WARNING, "%s", result.text);
}

/* Waits for the end of such a version. REFIT_ERR_CANCELLED: it goes on. */
static refit_status settle(refit_publisher *publisher, refit_error *error)
{
    bool cancelled = false;
    rft_lock(&publisher->lock);
    uint64_t version = publisher->server.transaction.version;
    while (publisher->unsettled && is_under_way(publisher) && !cancelled) {
        cancelled = rft_publisher_take_cancel(publisher);
        if (!cancelled) await_step(publisher, INT64_MAX);
    }
    rft_unlock(&publisher->lock);
    RFT_REFUSE_IF(cancelled, error, REFIT_ERR_CANCELLED,
                  "refit_publisher_cancel ended the wait for version %" PRIu64 ", which goes on",
                  version);
    tidy(publisher);
    return REFIT_OK;
}

/* Called with the lock held. */
static refit_status seal(refit_publisher *publisher, refit_error *error)
{
    if (rft_publisher_take_cancel(publisher)) {
        rft_transaction_cancel(&publisher->server, rft_now());
        return REFIT_OK;
    }
    RFT_TRY(rft_store_seal(publisher->store, error));
    if (publisher->gpu != NULL) rft_gpu_store_seal(publisher->gpu);
    rft_transaction_seal(&publisher->server, rft_now());
    rft_wake_fd_set(publisher->wake);
    return REFIT_OK;
}

refit_status refit_publisher_commit(refit_publisher *publisher, refit_error *error)
{
    RFT_REFUSE_IF(publisher == NULL, error, REFIT_ERR_INVALID, "commit needs a publisher");
    RFT_TRY(rft_publisher_check_writing(publisher, "commit", error));
    rft_publisher_compare_written(publisher);
    RFT_TRY(rft_publisher_flush_ring(publisher, error));
    rft_lock(&publisher->lock);
    /* With no worker to wait for, seal commits: no frame may be made while slots change roles. */
    await_sending(publisher);
    refit_error result = {0};
    bool left = false;
    bool waits = publisher->config.broadcast_wait != REFIT_WAIT_NONE;
    refit_status status = seal(publisher, error);
    while (status == REFIT_OK && waits && is_under_way(publisher)) {
        bool cancelled = rft_publisher_take_cancel(publisher);
        if (cancelled && rft_ranks_follows(&publisher->server)) {
            left = true; /* rank 0 decides, which has this rank's part */
            break;
        }
        if (cancelled) {
            rft_transaction_cancel(&publisher->server, rft_now());
        } else {
            await_step(publisher, INT64_MAX);
        }
    }
    publisher->unsettled = status == REFIT_OK && is_under_way(publisher);
    bool over = status == REFIT_OK && !publisher->unsettled;
    bool aborted = over && conclude(publisher, &result);
    rft_unlock(&publisher->lock);
    rft_wake_fd_set(publisher->wake);
    if (status != REFIT_OK) return status;
    RFT_REFUSE_IF(left, error, REFIT_ERR_CANCELLED,
                  "refit_publisher_cancel ended the wait for rank 0, which decides about the "
                  "version; the next call waits for that");
    if (aborted) roll_back(publisher);
    if (result.status == REFIT_OK) return REFIT_OK;
    return rft_fail(error, (refit_status)result.status, "%s", result.text);
}

refit_status refit_publisher_abort(refit_publisher *publisher, refit_error *error)
{
    RFT_REFUSE_IF(publisher == NULL, error, REFIT_ERR_INVALID, "abort needs a publisher");
    RFT_TRY(rft_publisher_check_writing(publisher, "abort", error));
    rft_lock(&publisher->lock);
    rft_transaction_abort(&publisher->server, REFIT_ERR_CANCELLED, "the trainer dropped it");
    rft_unlock(&publisher->lock);
    roll_back(publisher);
    return REFIT_OK;
}

/*
 * ---- Reports
 *
 * Copies taken under the lock; nothing here changes anything.
 */

const char *refit_publisher_endpoint(const refit_publisher *publisher)
{
    return publisher == NULL ? NULL : rft_channel_endpoint(publisher->channel);
}

uint64_t refit_publisher_version(refit_publisher *publisher)
{
    if (publisher == NULL) return 0;
    rft_lock(&publisher->lock);
    uint64_t version = publisher->server.current.version;
    rft_unlock(&publisher->lock);
    return version;
}

refit_status refit_publisher_wait_workers(refit_publisher *publisher, uint32_t count,
                                          uint32_t timeout_ms, refit_error *error)
{
    RFT_REFUSE_IF(publisher == NULL, error, REFIT_ERR_INVALID, "wait_workers needs a publisher");
    int64_t deadline = rft_deadline(timeout_ms);
    tidy(publisher);
    rft_lock(&publisher->lock);
    bool cancelled = rft_publisher_take_cancel(publisher);
    uint32_t there = rft_peers_count_subscribed(&publisher->server.peers);
    while (!cancelled && there < count && rft_ms_until(deadline) > 0) {
        (void)rft_cond_wait(&publisher->changed, &publisher->lock, deadline);
        cancelled = rft_publisher_take_cancel(publisher);
        there = rft_peers_count_subscribed(&publisher->server.peers);
    }
    char gone[sizeof publisher->server.gone];
    memcpy(gone, publisher->server.gone, sizeof gone);
    rft_unlock(&publisher->lock);
    RFT_REFUSE_IF(cancelled, error, REFIT_ERR_CANCELLED,
                  "refit_publisher_cancel ended the wait for workers");
    RFT_REFUSE_IF(there < count, error, REFIT_ERR_TIMEOUT,
                  "%" PRIu32 " of %" PRIu32 " worker%s subscribed to %s in time: %s%s", there,
                  count, count == 1 ? " has" : "s have", refit_publisher_endpoint(publisher),
                  gone[0] == '\0' ? "check that the others run, and read their logs"
                                  : "the last one lost or refused is ",
                  gone);
    return REFIT_OK;
}

/* ---- Workers */

/* Live ones first, then the lost. A worker that joins for the first time is not listed before it
 * has subscribed; one that joins again is, if it is a member of the version under way. */
static const rft_peer *peer_at(const rft_peers *peers, uint32_t index)
{
    for (uint32_t i = 0; i < peers->count; i++) {
        const rft_peer *peer = peers->live[i];
        if ((peer->subscribed || peer->member) && index-- == 0) return peer;
    }
    return index < peers->lost_count ? peers->lost[index] : NULL;
}

refit_status refit_publisher_worker(refit_publisher *publisher, uint32_t index,
                                    refit_worker_info *info, refit_error *error)
{
    RFT_REFUSE_IF(publisher == NULL || info == NULL || info->size < sizeof info->size, error,
                  REFIT_ERR_INVALID,
                  "worker needs a publisher and an info with its size filled in");
    refit_worker_info full = {0};
    rft_lock(&publisher->lock);
    const rft_peer *peer = peer_at(&publisher->server.peers, index);
    if (peer != NULL) rft_peer_describe(peer, &full);
    rft_unlock(&publisher->lock);
    RFT_REFUSE_IF(peer == NULL, error, REFIT_ERR_NOT_FOUND, "there is no worker %" PRIu32, index);
    full.size = info->size;
    memcpy(info, &full, full.size < sizeof full ? full.size : sizeof full);
    return REFIT_OK;
}

/* ---- Figures */

static void stats_fill_coded(const refit_publisher *publisher, refit_stats *stats)
{
    const rft_frames_counts *coded = &publisher->coded;
    if (coded->version != publisher->server.current.version) return;
    stats->publish_sparse_blocks_last = coded->blocks.sparse;
    stats->publish_dense_blocks_last = coded->blocks.dense;
    stats->publish_changed_elements_last = coded->blocks.changed;
    stats->publish_delta_bytes_last = coded->bytes;
    stats->publish_encode_seconds_last = coded->seconds;
}

/* Called with the lock held. */
static void stats_fill(const refit_publisher *publisher, refit_stats *stats)
{
    const rft_server *server = &publisher->server;
    const rft_store *store = publisher->store;
    stats->publish_version = server->current.version;
    stats->publish_count += server->counts.committed;
    stats->publish_aborts += server->counts.aborted;
    stats->publish_sent_bytes_total += publisher->sent_bytes;
    stats->publish_resent_frames += server->counts.resent;
    stats->publish_write_seconds_last = publisher->write_seconds;
    stats->publish_stage_seconds_last = server->counts.stage_seconds;
    stats->publish_commit_seconds_last = server->counts.commit_seconds;
    stats->workers = rft_peers_count_subscribed(&server->peers);
    stats->workers_shm = rft_peers_count_path(&server->peers, REFIT_PATH_SHM);
    stats->workers_gpu = rft_peers_count_path(&server->peers, REFIT_PATH_CUDA_IPC);
    stats->workers_neighbor = rft_peers_count_path(&server->peers, REFIT_PATH_NEIGHBOR);
    stats->publish_shm_bytes_total += server->counts.shm_bytes;
    stats->publish_gpu_bytes_total += server->counts.gpu_bytes;
    stats->publish_pinned_bytes = publisher->pinned_bytes;
    stats->publish_gpu_bytes = publisher->gpu_bytes;
    stats->workers_committed_last = server->counts.applied_last;
    stats->workers_evicted += server->counts.evicted;
    stats->messages_refused += server->counts.refused;
    stats->connections_unclaimed = publisher->connections.unclaimed;
    stats->connections_ended += publisher->connections.ended;
    stats->connections_refused += publisher->connections.refused;
    stats->connections_held_off += publisher->connections.pauses;
    if (store == NULL || store->committed.version == 0) return;
    stats->publish_bytes_last = store->manifest->payload_bytes;
    stats->publish_same_blocks_last = server->counts.same_blocks;
    stats_fill_coded(publisher, stats);
}

refit_status refit_publisher_stats(refit_publisher *publisher, refit_stats *stats,
                                   refit_error *error)
{
    RFT_REFUSE_IF(publisher == NULL || stats == NULL || stats->size < sizeof stats->size, error,
                  REFIT_ERR_INVALID, "stats needs a publisher and a stats with its size filled in");
    refit_stats full = {0};
    size_t size = stats->size < sizeof full ? stats->size : sizeof full;
    memcpy(&full, stats, size);
    rft_lock(&publisher->lock);
    stats_fill(publisher, &full);
    rft_unlock(&publisher->lock);
    memcpy(stats, &full, size);
    return REFIT_OK;
}
