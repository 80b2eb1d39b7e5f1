/*
 * The trainer's end of a weight update: opening, declaring and closing it. What happens to one
 * version is in publisher_version.c.
 *
 * Each call takes a step of the hub under the lock, wakes the service thread, and waits until the
 * hub has come where the call promises. Close waits for the linger time, and a moment for the
 * transport to give back what it holds.
 */
#include "publisher/publisher.h"

#include <inttypes.h>
#include <string.h>

#include "base/alloc.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/random.h"
#include "config/resolve.h"
#include "net/wake_fd.h"

#define CLOSE_MORE_MS 2000 /* beyond the linger time, for the transport to let go */

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
    rft_channel_watch_keys(publisher->channel, publisher->wake);
    RFT_TRY_GOTO(lock_open(publisher, error), undo_channel);
    RFT_TRY_GOTO(
        rft_encoders_open(&publisher->encoders, publisher->config.broadcast_encode_threads, error),
        undo_lock);
    RFT_TRY_GOTO(rft_thread_start(&publisher->thread, "refit-publish", rft_publisher_serve,
                                  publisher, error),
                 undo_encoders);
    return REFIT_OK;

undo_encoders:
    rft_encoders_close(&publisher->encoders);
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

static void say_goodbye(refit_publisher *publisher)
{
    rft_lock(&publisher->lock);
    rft_transaction_state state = publisher->server.transaction.state;
    if (state == RFT_TRANSACTION_WRITING || state == RFT_TRANSACTION_STAGING) {
        rft_transaction_abort(&publisher->server, REFIT_ERR_CLOSED, "the trainer closes");
    }
    rft_server_leave(&publisher->server);
    publisher->stopping = true;
    rft_unlock(&publisher->lock);
    rft_wake_fd_set(publisher->wake);
    rft_thread_join(publisher->thread);
}

static void report_left(uint32_t left)
{
    if (left == 0) return;
    rft_log(REFIT_LOG_ERROR, "the transport did not give back %" PRIu32 " buffers", left);
}

/* Copies first, then what they go to. */
static void memory_close(refit_publisher *publisher, int64_t deadline)
{
    bool done = rft_copy_queue_close(publisher->copy_queue, deadline);
    done = rft_copy_queue_close(publisher->gpu_copy_queue, deadline) && done;
    if (!done) rft_log(REFIT_LOG_ERROR, "a device did not finish its copies: it stays open");
    uint32_t left = rft_gpu_store_close(publisher->gpu, deadline);
    if (left > 0) {
        rft_log(REFIT_LOG_ERROR,
                "workers did not let go of %" PRIu32
                " pieces of the GPU's memory: they stay taken until the device is closed after "
                "they have",
                left);
    }
    rft_store_close(publisher->store);
    report_left(rft_retire_list_close(&publisher->retired, deadline));
}

void refit_publisher_close(refit_publisher *publisher)
{
    if (publisher == NULL) return;
    say_goodbye(publisher);
    rft_channel_close(publisher->channel);
    rft_encoders_close(&publisher->encoders);
    rft_frames_close(publisher->frames, &publisher->retired);
    int64_t deadline = rft_deadline(publisher->config.broadcast_linger_ms + CLOSE_MORE_MS);
    memory_close(publisher, deadline);
    report_left(rft_server_close(&publisher->server, deadline));
    rft_segment_close(&publisher->probe);
    rft_wake_fd_close(publisher->wake);
    lock_close(publisher);
    rft_free(publisher);
}

/* ---- Declaring */

refit_status rft_publisher_check_idle(refit_publisher *publisher, refit_error *error)
{
    rft_lock(&publisher->lock);
    bool idle = publisher->server.transaction.state == RFT_TRANSACTION_IDLE;
    uint64_t version = publisher->server.transaction.version;
    rft_unlock(&publisher->lock);
    RFT_REFUSE_IF(!idle, error, REFIT_ERR_STATE,
                  "version %" PRIu64 " is under way: commit or abort it first", version);
    return REFIT_OK;
}

static refit_status manifest_make(refit_publisher *publisher, const refit_tensor *tensors,
                                  uint32_t count, rft_manifest **out, refit_error *error)
{
    return rft_manifest_open(tensors, count, publisher->config.broadcast_frame_bytes,
                             &publisher->server.limits, out, error);
}

static refit_status store_open(refit_publisher *publisher, rft_manifest *manifest, bool shared,
                               rft_store **out, refit_error *error)
{
    if (publisher->config.broadcast_gpu == REFIT_GPU_REQUIRE) {
        return rft_store_open_unhosted(manifest, publisher->config.broadcast_slots,
                                       &publisher->retired, out, error);
    }
    return rft_store_open(manifest, publisher->config.broadcast_slots, shared, &publisher->retired,
                          out, error);
}

/* Takes the manifest, and makes another if the store has to be tried a second time, without shared
 * memory. */
static refit_status store_make(refit_publisher *publisher, const refit_tensor *tensors,
                               uint32_t count, rft_manifest *manifest, rft_store **out,
                               refit_error *error)
{
    refit_error why = {0};
    bool shared = publisher->probe.memory != NULL;
    refit_status status = store_open(publisher, manifest, shared, out, &why);
    if (status == REFIT_OK) return REFIT_OK;
    bool retry =
        shared && status == REFIT_ERR_SYSTEM && publisher->config.broadcast_shm == REFIT_SHM_AUTO;
    if (!retry) return rft_fail_sub(error, status, why.subsystem, "%s", why.text);
    rft_log(REFIT_LOG_WARNING, "weights travel through sockets only: %s", why.text);
    RFT_TRY(manifest_make(publisher, tensors, count, &manifest, error));
    return store_open(publisher, manifest, false, out, error);
}

static void store_adopt(refit_publisher *publisher, rft_store *store, rft_frames *frames)
{
    rft_store *old_store = publisher->store;
    rft_frames *old_frames = publisher->frames;
    rft_lock(&publisher->lock);
    rft_publisher_await_sending(publisher);
    rft_server_adopt(&publisher->server, store);
    publisher->store = store;
    publisher->frames = frames;
    rft_unlock(&publisher->lock);
    rft_wake_fd_set(publisher->wake);
    publisher->unsettled.count = 0;
    rft_publisher_empty_gpu(publisher);
    rft_publisher_count_pinned(publisher);
    rft_frames_close(old_frames, &publisher->retired);
    rft_store_close(old_store);
}

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
    RFT_TRY(store_make(publisher, tensors, count, manifest, &store, error));
    refit_status status =
        rft_frames_open(store->manifest, &publisher->config, &publisher->encoders, &frames, error);
    if (status == REFIT_OK) {
        store_adopt(publisher, store, frames);
    } else {
        rft_store_close(store);
    }
    return status;
}
