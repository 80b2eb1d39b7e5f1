/*
 * The worker's end of the door: refit_subscriber_*.
 *
 * Everything happens on the service thread (listener.c, session.c); a call here meets it at the
 * desk and never waits for it, but for close, which joins it. What an open update can do is in
 * update.c.
 */
#include "subscriber/subscriber.h"

#include <string.h>

#include "base/alloc.h"
#include "base/log.h"
#include "config/resolve.h"
#include "device/device_uuid.h"

refit_status refit_subscriber_open(const char *endpoint, const refit_config *config,
                                   refit_subscriber **out, refit_error *error)
{
    RFT_REFUSE_IF(out == NULL, error, REFIT_ERR_INVALID, "refit_subscriber_open needs `out`");
    refit_config own;
    RFT_TRY(rft_config_resolve(config, &own, error));
    refit_subscriber *subscriber = rft_calloc(1, sizeof *subscriber);
    RFT_REFUSE_IF(subscriber == NULL, error, REFIT_ERR_HOST_MEMORY, "no memory for a subscriber");
    refit_status status = rft_subscriber_service_start(
        &subscriber->service, endpoint == NULL ? own.broadcast_endpoint : endpoint, &own, error);
    if (status != REFIT_OK) {
        rft_free(subscriber);
        return status;
    }
    subscriber->update.subscriber = subscriber;
    *out = subscriber;
    return REFIT_OK;
}

void refit_subscriber_close(refit_subscriber *subscriber)
{
    if (subscriber == NULL) return;
    refit_update_close(subscriber->update.image == NULL ? NULL : &subscriber->update);
    rft_subscriber_service_stop(&subscriber->service);
    rft_in_place_close(&subscriber->engine);
    if (subscriber->device != NULL) rft_device_release(subscriber->device);
    rft_free(subscriber);
}

/* REFIT_ERR_UNSUPPORTED: why the device cannot be shared with a trainer. */
static refit_status check_shares(const refit_config *config, refit_device *device,
                                 refit_error *error)
{
    rft_device_caps caps = rft_device_get_caps(device);
    RFT_REFUSE_IF(!caps.shares || rft_uuid_is_none(caps.uuid), error, REFIT_ERR_UNSUPPORTED,
                  "this device cannot map memory of other processes");
    RFT_REFUSE_IF(config->broadcast_shm == REFIT_SHM_OFF, error, REFIT_ERR_UNSUPPORTED,
                  "broadcast.shm is off, by which the trainer knows who reads its GPU's memory");
    return REFIT_OK;
}

refit_status refit_subscriber_use_device(refit_subscriber *subscriber, refit_device *device,
                                         refit_error *error)
{
    refit_error why;
    RFT_REFUSE_IF(subscriber == NULL || device == NULL, error, REFIT_ERR_INVALID,
                  "refit_subscriber_use_device needs a subscriber and a device");
    const refit_config *config = &subscriber->service.config;
    if (config->broadcast_gpu == REFIT_GPU_OFF || subscriber->device == device) return REFIT_OK;
    RFT_REFUSE_IF(subscriber->device != NULL, error, REFIT_ERR_STATE,
                  "the subscriber has another device already, until it is closed");
    refit_status status = check_shares(config, device, &why);
    if (status == REFIT_OK) {
        subscriber->device = device;
        rft_device_retain(device);
        rft_mailbox_bring(&subscriber->service.mailbox, device);
        return REFIT_OK;
    }
    RFT_REFUSE_IF(config->broadcast_gpu == REFIT_GPU_REQUIRE, error, status,
                  "broadcast.gpu is require, but %s", why.text);
    rft_log(REFIT_LOG_INFO, "versions are not taken from a GPU's memory: %s", why.text);
    return REFIT_OK;
}

refit_status refit_subscriber_bind(refit_subscriber *subscriber, const refit_destination *list,
                                   uint32_t count, refit_error *error)
{
    RFT_REFUSE_IF(subscriber == NULL || list == NULL || count == 0, error, REFIT_ERR_INVALID,
                  "refit_subscriber_bind needs a subscriber and at least one destination");
    RFT_REFUSE_IF(rft_in_place_is_bound(&subscriber->engine), error, REFIT_ERR_STATE,
                  "destinations are bound already: call refit_subscriber_unbind first");
    return rft_in_place_bind(&subscriber->engine, list, count, &subscriber->service.config, error);
}

refit_status refit_subscriber_unbind(refit_subscriber *subscriber, refit_error *error)
{
    RFT_REFUSE_IF(subscriber == NULL, error, REFIT_ERR_INVALID,
                  "refit_subscriber_unbind needs a subscriber");
    RFT_REFUSE_IF(subscriber->engine.applied, error, REFIT_ERR_STATE,
                  "version %llu is applied and undecided: accept or refuse it first",
                  (unsigned long long)refit_update_version(&subscriber->update));
    return rft_in_place_unbind(&subscriber->engine, error);
}

refit_status refit_subscriber_next(refit_subscriber *subscriber, uint32_t timeout_ms,
                                   refit_update **out, refit_error *error)
{
    RFT_REFUSE_IF(subscriber == NULL || out == NULL, error, REFIT_ERR_INVALID,
                  "refit_subscriber_next needs a subscriber and `out`");
    refit_update *update = &subscriber->update;
    RFT_REFUSE_IF(update->image != NULL, error, REFIT_ERR_STATE,
                  "version %llu is still open: close it before the next",
                  (unsigned long long)update->image->held.version);
    RFT_REFUSE_IF(subscriber->device == NULL &&
                      subscriber->service.config.broadcast_gpu == REFIT_GPU_REQUIRE,
                  error, REFIT_ERR_STATE,
                  "broadcast.gpu is require: say on which GPU with refit_subscriber_use_device");
    RFT_TRY(rft_mailbox_take(&subscriber->service.mailbox, timeout_ms, &update->image, error));
    update->decided = false;
    *out = update;
    return REFIT_OK;
}

void refit_subscriber_wake(refit_subscriber *subscriber)
{
    if (subscriber != NULL) rft_mailbox_cancel(&subscriber->service.mailbox);
}

int refit_subscriber_fd(const refit_subscriber *subscriber)
{
    return subscriber == NULL ? -1 : subscriber->service.mailbox.ready_fd;
}

refit_status refit_subscriber_describe(refit_subscriber *subscriber, refit_subscriber_info *info,
                                       refit_error *error)
{
    RFT_REFUSE_IF(subscriber == NULL || info == NULL || info->size < sizeof info->size, error,
                  REFIT_ERR_INVALID,
                  "refit_subscriber_describe needs a subscriber and an info with its size set");
    rft_session_report report;
    rft_mailbox_read(&subscriber->service.mailbox, &report);
    refit_subscriber_info full = {
        .size = info->size,
        .connected = report.state >= RFT_SESSION_CURRENT,
        .path = report.path,
        .epoch = report.epoch,
        .version = report.version,
    };
    memcpy(full.worker, subscriber->service.identity.worker, sizeof full.worker);
    strcpy(full.state, rft_session_state_name(report.state));
    memcpy(info, &full, full.size < sizeof full ? full.size : sizeof full);
    return REFIT_OK;
}

static void add_report(const rft_session_report *report, refit_stats *stats)
{
    stats->messages_refused += report->refused;
    stats->receive_version = report->version;
    stats->receive_count += report->applied;
    stats->receive_aborts += report->aborted;
    stats->receive_bytes_total += report->bytes_received;
    stats->receive_bad_frames += report->bad_frames;
    stats->receive_stage_seconds_last = report->stage_seconds;
}

refit_status refit_subscriber_stats(refit_subscriber *subscriber, refit_stats *stats,
                                    refit_error *error)
{
    RFT_REFUSE_IF(subscriber == NULL || stats == NULL || stats->size < sizeof stats->size, error,
                  REFIT_ERR_INVALID,
                  "refit_subscriber_stats needs a subscriber and stats from refit_stats_init");
    rft_session_report report;
    rft_mailbox_read(&subscriber->service.mailbox, &report);
    /* A caller of another release may know fewer figures, or more. */
    refit_stats full = {0};
    size_t known = stats->size < sizeof full ? stats->size : sizeof full;
    memcpy(&full, stats, known);
    add_report(&report, &full);
    rft_in_place_report(&subscriber->engine, &full);
    memcpy(stats, &full, known);
    return REFIT_OK;
}
