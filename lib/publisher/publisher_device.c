/*
 * The GPU that a publisher shows its versions on: told once, and its part of every begin.
 *
 * Memory of a GPU is scarce where trainers and workers share it, so with broadcast.gpu: auto it is
 * taken only while somebody on that GPU is subscribed, and a version for which there is none goes
 * the other ways; with require there is no other way, and it is an error.
 */
#include <inttypes.h>

#include "base/clock.h"
#include "base/log.h"
#include "device/device_uuid.h"
#include "net/wake_fd.h"
#include "publisher/publisher.h"

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
                  "there is no shared memory to tell by who reads the GPU's");
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
    if (status == REFIT_OK) return use(publisher, device, error);
    RFT_REFUSE_IF(is_required(publisher), error, status, "broadcast.gpu is require, but %s",
                  why.text);
    rft_log(REFIT_LOG_INFO, "no version is shown in a GPU's memory: %s", why.text);
    return REFIT_OK;
}

/* ---- A version's slot */

static bool is_wanted(refit_publisher *publisher)
{
    bool wanted = is_required(publisher);
    rft_lock(&publisher->lock);
    for (uint32_t i = 0; i < publisher->server.peers.count; i++) {
        const rft_peer *peer = publisher->server.peers.live[i];
        wanted = wanted || (peer->subscribed && peer->gpu);
    }
    rft_unlock(&publisher->lock);
    return wanted;
}

/* Workers that map what is not needed any more are told so. */
static void recall(refit_publisher *publisher)
{
    rft_lock(&publisher->lock);
    rft_server_recall_gpu(&publisher->server);
    rft_unlock(&publisher->lock);
    rft_wake_fd_set(publisher->wake);
}

/* Memory that is only still mapped may come free in a moment. */
static refit_status clear_slot(refit_publisher *publisher, uint32_t slot, refit_error *error)
{
    rft_gpu_store *gpu = publisher->gpu;
    uint64_t bytes = publisher->store->manifest->store_bytes;
    rft_looks looks = rft_looks_until(rft_deadline(publisher->config.broadcast_linger_ms));
    refit_status status = rft_gpu_store_clear(gpu, slot, bytes, error);
    if (gpu->retired != NULL) recall(publisher);
    uint64_t taken = rft_gpu_store_bytes(gpu);
    while (status == REFIT_ERR_DEVICE_MEMORY && gpu->retired != NULL && rft_look_again(&looks)) {
        (void)rft_gpu_store_sweep(gpu);
        if (rft_gpu_store_bytes(gpu) == taken) continue;
        status = rft_gpu_store_clear(gpu, slot, bytes, error);
        taken = rft_gpu_store_bytes(gpu);
    }
    return status;
}

static void count_bytes(refit_publisher *publisher)
{
    uint64_t bytes = rft_gpu_store_bytes(publisher->gpu);
    rft_lock(&publisher->lock);
    publisher->gpu_bytes = bytes;
    rft_unlock(&publisher->lock);
}

void rft_publisher_empty_gpu(refit_publisher *publisher)
{
    if (publisher->gpu == NULL) return;
    rft_gpu_store_empty(publisher->gpu);
    count_bytes(publisher);
}

refit_status rft_publisher_clear_gpu(refit_publisher *publisher, uint32_t slot, refit_error *error)
{
    refit_error why;
    if (publisher->gpu == NULL) return REFIT_OK;
    bool wanted = is_wanted(publisher);
    refit_status status = wanted ? clear_slot(publisher, slot, &why) : REFIT_OK;
    if (!wanted) rft_gpu_store_empty(publisher->gpu);
    count_bytes(publisher);
    if (status == REFIT_OK) return REFIT_OK;
    RFT_REFUSE_IF(is_required(publisher), error, status,
                  "broadcast.gpu is require, but there is no room for a version on the GPU: %s",
                  why.text);
    rft_log(REFIT_LOG_WARNING,
            "this version is not shown in the GPU's memory, its workers take it another way: %s",
            why.text);
    return REFIT_OK;
}
