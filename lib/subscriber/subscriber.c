/*
 * The worker's end: refit_subscriber_*, and refit_update_* for the version in the caller's hands.
 *
 * The protocol runs on the service thread, which runs the session; a call of the caller exchanges
 * data with it in the mailbox and never waits for it, but for close, which joins it. A subscriber
 * of an archive has a follower in the place of session and socket (follower.c).
 *
 * The image and its manifest stay as they are while the update is open (the session's rule), so
 * they are read here without a lock. Decisions go to the mailbox as orders. Bytes in the trainer's
 * shared memory are checked once more at accept: the seqlock before them tells whether the trainer
 * has evicted this worker and begun to overwrite them. Bytes that were written into bound memory
 * (in_place.h) are final with accept, and taken back by every other end.
 */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/random.h"
#include "config/config.h"
#include "device/device_uuid.h"
#include "subscriber/follower.h"
#include "subscriber/gpu_copy.h"
#include "subscriber/in_place.h"
#include "subscriber/link_channels.h"
#include "subscriber/session.h"

/* ---- The service thread
 *
 * It owns the channel and the session, and exchanges data with the caller in the mailbox. A pass of
 * its loop waits for the sockets, the caller or the clock; carries out the caller's orders; hears
 * some messages; lets the session act on the time; sends; reports. There is a further socket for
 * each rank of a trainer of which each publishes a part.
 *
 * The session decides everything. A pass receives a bounded number of messages, so that orders and
 * beats do not wait for a long stream of frames.
 */

typedef struct subscriber_service {
    refit_config config;
    rft_session_identity identity;
    rft_mailbox mailbox;
    rft_thread thread;
    /* From start to stop these belong to the service thread alone. */
    rft_channel *channel; /* NULL: it follows an archive, and has no session */
    rft_session session;
    rft_selection *selection; /* owned; what the session selects; NULL: everything */
    rft_link_channels links;
    rft_follower follower;
} subscriber_service;

#define MESSAGES_PER_PASS 16u
#define WAIT_MOST_MS      60000

/* ---- One pass */

/* After every event, so that a message does not wait for the end of the pass. */
static void flush(subscriber_service *service)
{
    (void)rft_send_queue_flush(&service->session.send_queue, service->channel);
}

static void wait_for_something(subscriber_service *service)
{
    int wait_ms = rft_ms_until(rft_session_tick_at(&service->session));
    if (wait_ms > WAIT_MOST_MS) wait_ms = WAIT_MOST_MS;
    rft_link_channels_poll(&service->links, service->mailbox.wake_fd, wait_ms);
    rft_wake_fd_clear(service->mailbox.wake_fd);
    refit_error why;
    if (rft_channel_take_failure(service->channel, &why) != REFIT_OK) {
        rft_session_reject(&service->session, &why, rft_now());
    }
}

/* After the orders: those that wait were given before it. */
static void select_parts(subscriber_service *service)
{
    rft_selection *selection = rft_mailbox_take_selection(&service->mailbox);
    if (selection == NULL) return;
    rft_session_select(&service->session, selection->count > 0 ? selection : NULL, rft_now());
    rft_selection_close(service->selection);
    service->selection = selection;
}

static void run_commands(subscriber_service *service)
{
    rft_order order;
    refit_device *device = rft_mailbox_take_device(&service->mailbox);
    if (device != NULL) rft_session_use_device(&service->session, device, rft_now());
    rft_session_take_whole(&service->session, rft_mailbox_is_whole(&service->mailbox), rft_now());
    rft_session_collect(&service->session); /* before a decision about them */
    while (rft_mailbox_next_order(&service->mailbox, &order)) {
        int64_t now = rft_now();
        switch (order.kind) {
        case RFT_ORDER_ACCEPT:
        case RFT_ORDER_STAGE: rft_session_accept(&service->session, now); break;
        case RFT_ORDER_REFUSE:
            rft_session_refuse(&service->session, order.code, order.kept, order.reason, now);
            break;
        case RFT_ORDER_RELEASE: rft_session_release(&service->session, now); break;
        }
        flush(service);
    }
    select_parts(service);
}

static void receive_one(subscriber_service *service, refit_status status,
                        const rft_envelope *envelope, refit_error *why)
{
    rft_message message;
    if (status == REFIT_OK) {
        status = rft_message_decode(envelope->message, &service->session.limits, &message, why);
    }
    if (status == REFIT_OK) {
        rft_session_message(&service->session, &message, envelope->payload, rft_now());
    } else {
        rft_session_garbage(&service->session, why, rft_now());
    }
}

static void receive(subscriber_service *service)
{
    rft_envelope envelope;
    refit_error why;
    for (uint32_t i = 0; i < MESSAGES_PER_PASS; i++) {
        refit_status status = rft_channel_receive(service->channel, &envelope, &why);
        if (status == REFIT_ERR_TIMEOUT) return;
        receive_one(service, status, &envelope, &why);
        flush(service);
    }
}

static void *listen_on(void *user)
{
    subscriber_service *service = user;
    do {
        wait_for_something(service);
        run_commands(service);
        receive(service);
        rft_link_channels_receive(&service->links, &service->session);
        rft_session_tick(&service->session, rft_now());
        flush(service);
        rft_link_channels_tend(&service->links, &service->session);
        flush(service);
    } while (rft_mailbox_publish(&service->mailbox, &service->session.report));
    rft_session_leave(&service->session);
    flush(service);
    return NULL;
}

/* ---- Start and stop */

static refit_status name_worker(subscriber_service *service, refit_error *error)
{
    rft_session_identity *identity = &service->identity;
    char host[sizeof identity->host] = "?";
    char name[sizeof identity->worker];
    RFT_TRY(rft_random_u64(&identity->instance, error));
    (void)gethostname(host, sizeof host - 1);
    snprintf(name, sizeof name, "%.32s:%ld:%08x", host, (long)getpid(),
             (unsigned)(identity->instance & 0xffffffffu));
    bool named = service->config.broadcast_worker[0] != '\0';
    const char *chosen = named ? service->config.broadcast_worker : name;
    rft_view_print(rft_view_text(host), identity->host, sizeof identity->host);
    rft_view_print(rft_view_text(chosen), identity->worker, sizeof identity->worker);
    return REFIT_OK;
}

/* The session and its channel, or the follower. */
static void close_source(subscriber_service *service)
{
    if (service->channel == NULL) {
        rft_follower_close(&service->follower);
        return;
    }
    rft_link_channels_close(&service->links);
    rft_session_close(&service->session);
    rft_selection_close(service->selection);
    rft_channel_close(service->channel);
}

static refit_status connect_to(subscriber_service *service, const char *endpoint,
                               refit_error *error)
{
    RFT_TRY(rft_channel_connect(endpoint, &service->config, &service->channel, error));
    service->mailbox.endpoint = rft_channel_endpoint(service->channel);
    service->identity.near = rft_channel_is_local(service->channel);
    rft_session_init(&service->session, &service->config, &service->identity, &service->mailbox,
                     rft_now());
    rft_link_channels_init(&service->links, &service->config, endpoint, service->channel);
    return REFIT_OK;
}

/* Connects, or finds out which archive to follow, and starts the thread; config is copied. */
static refit_status start_service(subscriber_service *service, const char *endpoint,
                                  const refit_config *config, refit_error *error)
{
    const char *folder = rft_follower_folder(endpoint);
    service->config = *config;
    RFT_TRY(name_worker(service, error));
    RFT_TRY(rft_mailbox_open(&service->mailbox, error));
    refit_status status =
        folder == NULL
            ? connect_to(service, endpoint, error)
            : rft_follower_open(&service->follower, folder, &service->config,
                                service->identity.worker, &service->mailbox, rft_now(), error);
    if (status == REFIT_OK) {
        status = folder == NULL
                     ? rft_thread_start(&service->thread, "refit-worker", listen_on, service, error)
                     : rft_thread_start(&service->thread, "refit-follower", rft_follower_run,
                                        &service->follower, error);
        if (status != REFIT_OK) close_source(service);
    }
    if (status != REFIT_OK) rft_mailbox_close(&service->mailbox);
    return status;
}

/* Says BYE, joins the thread and frees all, but for an image that a device still reads. */
static void stop_service(subscriber_service *service, rft_image *still_read)
{
    rft_mailbox_shut(&service->mailbox);
    rft_thread_join(service->thread);
    if (still_read != NULL) rft_image_abandon(still_read);
    close_source(service);
    rft_mailbox_close(&service->mailbox);
}

static void end_update(struct refit_update *update, uint32_t timeout_ms);

/* ---- Opening, devices and destinations */

/* One received version in the caller's hands. There is one in each subscriber, so that receiving
 * versions allocates nothing. It belongs to the caller's thread. */
struct refit_update {
    refit_subscriber *subscriber;
    rft_image *image; /* lent by the session; NULL: no update is open */
    bool decided;
    bool torn; /* a copy to the engine has failed, or not ended in time */
};

struct refit_subscriber {
    subscriber_service service;
    refit_device *device; /* retained; NULL: none was given, or the host */
    rft_in_place engine;  /* memory that updates are applied into, if any was bound */
    rft_gpu_copy copy;
    refit_update update;
    rft_image *still_read; /* of an update that is closed, by copies that have not ended; NULL */
    uint64_t still_version;
};

refit_status refit_subscriber_open(const char *endpoint, const refit_config *config,
                                   refit_subscriber **out, refit_error *error)
{
    RFT_REFUSE_IF(out == NULL, error, REFIT_ERR_INVALID, "refit_subscriber_open needs `out`");
    refit_config own;
    RFT_TRY(rft_config_resolve(config, &own, error));
    refit_subscriber *subscriber = rft_calloc(1, sizeof *subscriber);
    RFT_REFUSE_IF(subscriber == NULL, error, REFIT_ERR_HOST_MEMORY, "no memory for a subscriber");
    refit_status status = start_service(
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
    uint32_t linger_ms = subscriber->service.config.broadcast_linger_ms;
    end_update(&subscriber->update, linger_ms);
    bool ended = rft_gpu_copy_close(&subscriber->copy, rft_deadline(linger_ms));
    ended = rft_in_place_await(&subscriber->engine, linger_ms) && ended;
    if (!ended) rft_log(REFIT_LOG_ERROR, "a GPU does not end its copies: it stays open");
    stop_service(&subscriber->service, ended ? NULL : subscriber->still_read);
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
    RFT_REFUSE_IF(
        config->broadcast_shm == REFIT_SHM_OFF, error, REFIT_ERR_UNSUPPORTED,
        "broadcast.shm is off, by which the trainer knows which workers read its GPU's memory");
    return REFIT_OK;
}

refit_status refit_subscriber_use_device(refit_subscriber *subscriber, refit_device *device,
                                         refit_error *error)
{
    refit_error why;
    RFT_REFUSE_IF(subscriber == NULL || device == NULL, error, REFIT_ERR_INVALID,
                  "refit_subscriber_use_device needs a subscriber and a device");
    const refit_config *config = &subscriber->service.config;
    if (subscriber->device == device) return REFIT_OK;
    RFT_REFUSE_IF(subscriber->device != NULL, error, REFIT_ERR_STATE,
                  "the subscriber has another device already, until it is closed");
    bool off = config->broadcast_gpu == REFIT_GPU_OFF || subscriber->service.channel == NULL;
    refit_status status = off ? REFIT_OK : check_shares(config, device, &why);
    RFT_REFUSE_IF(status != REFIT_OK && config->broadcast_gpu == REFIT_GPU_REQUIRE, error, status,
                  "broadcast.gpu is require, but %s", why.text);
    if (status != REFIT_OK)
        rft_log(REFIT_LOG_INFO, "versions are not taken from a GPU's memory: %s", why.text);
    if (rft_device_get_caps(device).host_addressable) return REFIT_OK;
    subscriber->device = device;
    rft_device_retain(device);
    if (status == REFIT_OK && !off) rft_mailbox_bring(&subscriber->service.mailbox, device);
    return REFIT_OK;
}

refit_status refit_subscriber_select(refit_subscriber *subscriber, const refit_selection *list,
                                     uint32_t count, const unsigned char *manifest,
                                     refit_error *error)
{
    rft_selection *selection;
    RFT_REFUSE_IF(subscriber == NULL || (list == NULL && count > 0), error, REFIT_ERR_INVALID,
                  "refit_subscriber_select needs a subscriber and a list");
    RFT_REFUSE_IF(subscriber->service.channel == NULL, error, REFIT_ERR_UNSUPPORTED,
                  "an archive has whole versions, and parts of them are not taken");
    RFT_TRY(rft_selection_open(list, count, &selection, error));
    if (manifest != NULL) {
        selection->bound = true;
        memcpy(selection->manifest.bytes, manifest, sizeof selection->manifest.bytes);
    }
    rft_mailbox_select(&subscriber->service.mailbox, selection);
    return REFIT_OK;
}

refit_status refit_subscriber_bind(refit_subscriber *subscriber, const refit_destination *list,
                                   uint32_t count, refit_error *error)
{
    RFT_REFUSE_IF(subscriber == NULL || list == NULL || count == 0, error, REFIT_ERR_INVALID,
                  "refit_subscriber_bind needs a subscriber and at least one destination");
    RFT_REFUSE_IF(rft_in_place_is_bound(&subscriber->engine), error, REFIT_ERR_STATE,
                  "destinations are bound already: call refit_subscriber_unbind first");
    RFT_TRY(
        rft_in_place_bind(&subscriber->engine, list, count, &subscriber->service.config, error));
    rft_mailbox_take_whole(&subscriber->service.mailbox, true);
    return REFIT_OK;
}

refit_status refit_subscriber_unbind(refit_subscriber *subscriber, refit_error *error)
{
    RFT_REFUSE_IF(subscriber == NULL, error, REFIT_ERR_INVALID,
                  "refit_subscriber_unbind needs a subscriber");
    RFT_REFUSE_IF(subscriber->engine.applied, error, REFIT_ERR_STATE,
                  "version %llu is applied and undecided: accept or refuse it first",
                  (unsigned long long)refit_update_version(&subscriber->update));
    RFT_TRY(rft_in_place_unbind(&subscriber->engine, error));
    rft_mailbox_take_whole(&subscriber->service.mailbox, false);
    return REFIT_OK;
}

/* ---- Receiving */

/* Gives back the image of an update that is closed, once no copy reads it. */
static bool release(refit_subscriber *subscriber, uint32_t timeout_ms)
{
    rft_order order = {.kind = RFT_ORDER_RELEASE};
    if (subscriber->still_read == NULL) return true;
    if (!rft_gpu_copy_await(&subscriber->copy, timeout_ms)) return false;
    if (!rft_in_place_await(&subscriber->engine, timeout_ms)) return false;
    rft_mailbox_order(&subscriber->service.mailbox, &order, subscriber->still_version);
    subscriber->still_read = NULL;
    return true;
}

refit_status refit_subscriber_next(refit_subscriber *subscriber, uint32_t timeout_ms,
                                   refit_update **out, refit_error *error)
{
    RFT_REFUSE_IF(subscriber == NULL || out == NULL, error, REFIT_ERR_INVALID,
                  "refit_subscriber_next needs a subscriber and `out`");
    refit_update *update = &subscriber->update;
    RFT_REFUSE_IF(update->image != NULL, error, REFIT_ERR_STATE,
                  "version %llu is still open: close it before the next",
                  (unsigned long long)update->image->id.version);
    RFT_REFUSE_IF(subscriber->device == NULL &&
                      subscriber->service.config.broadcast_gpu == REFIT_GPU_REQUIRE,
                  error, REFIT_ERR_STATE,
                  "broadcast.gpu is require: say on which GPU with refit_subscriber_use_device");
    RFT_REFUSE_IF(!release(subscriber, timeout_ms), error, REFIT_ERR_TIMEOUT,
                  "a GPU does not end its copies of version %llu",
                  (unsigned long long)subscriber->still_version);
    RFT_TRY(rft_mailbox_take(&subscriber->service.mailbox, timeout_ms, &update->image, error));
    update->decided = false;
    update->torn = false;
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

/* ---- Reports */

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

/* ---- An update: reading */

static const rft_manifest *manifest_of(const refit_update *update)
{
    return update->image->catalog->manifest;
}

uint64_t refit_update_version(const refit_update *update)
{
    return update == NULL || update->image == NULL ? 0 : update->image->id.version;
}

uint64_t refit_update_epoch(const refit_update *update)
{
    return update == NULL || update->image == NULL ? 0 : update->image->id.epoch;
}

uint32_t refit_update_count(const refit_update *update)
{
    return update == NULL || update->image == NULL ? 0 : manifest_of(update)->count;
}

static refit_status check_open(const refit_update *update, refit_error *error)
{
    RFT_REFUSE_IF(update == NULL, error, REFIT_ERR_INVALID, "there is no update: it is NULL");
    RFT_REFUSE_IF(update->image == NULL, error, REFIT_ERR_STATE, "the update is closed");
    return REFIT_OK;
}

static rft_piece_queue *pieces_of(const refit_update *update)
{
    return update->image->pieces;
}

int refit_update_is_streamed(const refit_update *update)
{
    return update != NULL && update->image != NULL && pieces_of(update) != NULL;
}

/* The trainer may change what it has lent as soon as this worker has decided. */
static refit_status check_readable(const refit_update *update, refit_error *error)
{
    RFT_TRY(check_open(update, error));
    RFT_REFUSE_IF(
        pieces_of(update) != NULL, error, REFIT_ERR_STATE,
        "version %llu comes piece by piece (refit_update_is_streamed): it lies nowhere as "
        "a whole; copy it with refit_update_copy or refit_update_next_pieces",
        (unsigned long long)update->image->id.version);
    RFT_REFUSE_IF(update->decided && update->image->gpu != NULL, error, REFIT_ERR_STATE,
                  "version %llu was accepted or refused, and its memory on the GPU is the "
                  "trainer's again",
                  (unsigned long long)update->image->id.version);
    return REFIT_OK;
}

refit_status refit_update_digest(const refit_update *update, unsigned char digest[16],
                                 refit_error *error)
{
    RFT_TRY(check_open(update, error));
    RFT_REFUSE_IF(digest == NULL, error, REFIT_ERR_INVALID, "refit_update_digest needs `digest`");
    RFT_REFUSE_IF(pieces_of(update) != NULL && !update->decided, error, REFIT_ERR_STATE,
                  "the digest of a version that comes piece by piece is known once it is accepted");
    memcpy(digest, update->image->id.digest.bytes, 16);
    return REFIT_OK;
}

refit_status refit_update_manifest(const refit_update *update, unsigned char digest[16],
                                   refit_error *error)
{
    RFT_TRY(check_open(update, error));
    RFT_REFUSE_IF(digest == NULL, error, REFIT_ERR_INVALID, "refit_update_manifest needs `digest`");
    memcpy(digest, manifest_of(update)->digest.bytes, 16);
    return REFIT_OK;
}

/* How much of a tensor the caller takes. */
static rft_want_part selected(const refit_update *update, uint32_t index)
{
    return rft_want_tensor(update->image->catalog->want, index);
}

/* Its bytes as the caller may see them. */
static const unsigned char *place_of(const rft_image *image, uint32_t index)
{
    return image->gpu != NULL ? rft_image_tensor(image, index)
                              : image->view + image->catalog->manifest->tensors[index].offset;
}

refit_status refit_update_tensor(const refit_update *update, uint32_t index, refit_tensor *tensor,
                                 const void **bytes, refit_error *error)
{
    RFT_TRY(bytes == NULL ? check_open(update, error) : check_readable(update, error));
    const rft_manifest *manifest = manifest_of(update);
    RFT_REFUSE_IF(index >= manifest->count, error, REFIT_ERR_NOT_FOUND,
                  "there is no tensor %u: the version has %u", index, manifest->count);
    RFT_REFUSE_IF(selected(update, index) == RFT_WANT_NONE, error, REFIT_ERR_NOT_FOUND,
                  "'%.160s' was not selected", manifest->tensors[index].name);
    RFT_REFUSE_IF(tensor != NULL && tensor->size < sizeof *tensor, error, REFIT_ERR_INVALID,
                  "tensor.size is %zu: set it to sizeof(refit_tensor), %zu", tensor->size,
                  sizeof *tensor);
    if (tensor != NULL) rft_manifest_describe(manifest, index, tensor);
    if (bytes != NULL) *bytes = place_of(update->image, index);
    return REFIT_OK;
}

refit_status refit_update_places(const refit_update *update, const void **places, uint32_t count,
                                 refit_error *error)
{
    RFT_TRY(check_readable(update, error));
    RFT_REFUSE_IF(places == NULL, error, REFIT_ERR_INVALID, "refit_update_places needs `places`");
    RFT_REFUSE_IF(count != manifest_of(update)->count, error, REFIT_ERR_INVALID,
                  "there is room for %u places: the version has %u tensors", count,
                  manifest_of(update)->count);
    for (uint32_t i = 0; i < count; i++)
        places[i] = selected(update, i) == RFT_WANT_NONE ? NULL : place_of(update->image, i);
    return REFIT_OK;
}

refit_device *refit_update_device(const refit_update *update)
{
    bool gpu = update != NULL && update->image != NULL &&
               (update->image->gpu != NULL || pieces_of(update) != NULL);
    return gpu ? update->subscriber->device : NULL;
}

refit_status refit_update_find(const refit_update *update, const char *name, uint32_t *index,
                               refit_error *error)
{
    RFT_TRY(check_open(update, error));
    RFT_REFUSE_IF(name == NULL || index == NULL, error, REFIT_ERR_INVALID,
                  "refit_update_find needs a name and `index`");
    uint32_t found = rft_manifest_find(manifest_of(update), name);
    RFT_REFUSE_IF(found == UINT32_MAX, error, REFIT_ERR_NOT_FOUND, "there is no tensor '%.160s'",
                  name);
    *index = found;
    return REFIT_OK;
}

refit_status refit_update_retain(refit_update *update, size_t room, void **out, refit_error *error)
{
    RFT_TRY(check_open(update, error));
    RFT_REFUSE_IF(out == NULL, error, REFIT_ERR_INVALID, "refit_update_retain needs `out`");
    rft_image *image = update->image;
    RFT_REFUSE_IF(refit_update_device(update) != NULL, error, REFIT_ERR_UNSUPPORTED,
                  "a GPU's memory cannot be kept beyond the update");
    rft_segment *memory = image->mapping != NULL ? &image->mapping->segment : &image->memory;
    return rft_segment_retain(memory, room, out, error);
}

void refit_update_release(void *kept)
{
    rft_segment_release(kept);
}

/* ---- An update: deciding */

static void decide(refit_update *update, const rft_order *order)
{
    update->decided = true;
    rft_mailbox_order(&update->subscriber->service.mailbox, order, update->image->id.version);
}

static void decide_refuse(refit_update *update, refit_status code, const char *reason, int kept)
{
    rft_order order = {.kind = RFT_ORDER_REFUSE, .code = code, .kept = kept != 0};
    rft_view_print(rft_view_text(reason), order.reason, sizeof order.reason);
    decide(update, &order);
}

static refit_status check_undecided(const refit_update *update, refit_error *error)
{
    RFT_TRY(check_open(update, error));
    RFT_REFUSE_IF(update->decided, error, REFIT_ERR_STATE,
                  "version %llu was accepted or refused before",
                  (unsigned long long)update->image->id.version);
    return REFIT_OK;
}

/* ---- An update that comes piece by piece */

/* The next pieces; `*out` NULL: that was all. */
static refit_status take_pieces(refit_update *update, uint32_t timeout_ms, const rft_pieces **out,
                                refit_error *error)
{
    RFT_REFUSE_IF(update->decided, error, REFIT_ERR_STATE,
                  "version %llu was accepted or refused, and its pieces are gone",
                  (unsigned long long)update->image->id.version);
    return rft_piece_queue_next(pieces_of(update), rft_deadline(timeout_ms), out, error);
}

refit_status refit_update_next_pieces(refit_update *update, uint32_t timeout_ms,
                                      const refit_piece **pieces, uint32_t *count,
                                      refit_error *error)
{
    const rft_pieces *found;
    RFT_TRY(check_open(update, error));
    RFT_REFUSE_IF(pieces == NULL || count == NULL, error, REFIT_ERR_INVALID,
                  "refit_update_next_pieces needs `pieces` and `count`");
    RFT_REFUSE_IF(pieces_of(update) == NULL, error, REFIT_ERR_STATE,
                  "version %llu lies in memory as a whole: read its tensors",
                  (unsigned long long)update->image->id.version);
    RFT_REFUSE_IF(update->torn, error, REFIT_ERR_STATE,
                  "pieces of version %llu could not be digested or were changed: refuse it",
                  (unsigned long long)update->image->id.version);
    refit_subscriber *subscriber = update->subscriber;
    RFT_TRY(take_pieces(update, timeout_ms, &found, error));
    refit_status status =
        rft_gpu_copy_verify(&subscriber->copy, subscriber->device, &subscriber->service.config,
                            update->image, found, error);
    if (status != REFIT_OK) update->torn = true;
    RFT_REFUSE_IF(status == REFIT_ERR_TIMEOUT, error, REFIT_ERR_DEVICE,
                  "the GPU has not digested the pieces of version %llu in time: refuse it",
                  (unsigned long long)update->image->id.version);
    RFT_TRY(status);
    *pieces = found == NULL ? NULL : found->list;
    *count = found == NULL ? 0 : found->count;
    return REFIT_OK;
}

refit_status refit_update_copy(refit_update *update, const refit_target *list, uint32_t count,
                               refit_stream_ref after, refit_error *error)
{
    bool streamed = refit_update_is_streamed(update);
    RFT_TRY(streamed ? check_undecided(update, error) : check_readable(update, error));
    RFT_REFUSE_IF(list == NULL && count > 0, error, REFIT_ERR_INVALID,
                  "refit_update_copy needs a list of targets");
    refit_subscriber *subscriber = update->subscriber;
    RFT_REFUSE_IF(subscriber->device == NULL, error, REFIT_ERR_STATE,
                  "no GPU to copy to: say which with refit_subscriber_use_device");
    bool begun = false;
    refit_status status = (streamed ? rft_gpu_copy_pieces : rft_gpu_copy_run)(
        &subscriber->copy, subscriber->device, &subscriber->service.config, update->image, list,
        count, after, &begun, error);
    if (begun && status != REFIT_OK) update->torn = true;
    return status;
}

/* Whether kernels of the engine's GPU write into bound memory there. */
static bool writes_on_gpu(const refit_subscriber *subscriber)
{
    refit_device *device = subscriber->device;
    return device != NULL && rft_device_get_caps(device).deltas &&
           rft_in_place_is_on(&subscriber->engine, device);
}

refit_status refit_update_apply(refit_update *update, uint32_t *left, refit_error *error)
{
    RFT_TRY(check_undecided(update, error));
    refit_subscriber *subscriber = update->subscriber;
    RFT_TRY(check_readable(update, error)); /* bound since it began to come, perhaps */
    RFT_REFUSE_IF(!rft_in_place_is_bound(&subscriber->engine), error, REFIT_ERR_STATE,
                  "nothing is bound that version %llu could be applied into: call "
                  "refit_subscriber_bind first",
                  (unsigned long long)update->image->id.version);
    const refit_config *config = &subscriber->service.config;
    rft_in_place_source source = {
        .image = update->image,
        .device = refit_update_device(update),
        .verify = config->broadcast_verify == REFIT_VERIFY_ALWAYS,
    };
    if (writes_on_gpu(subscriber)) source.gpu = subscriber->device;
    if (source.gpu != NULL && source.device == NULL)
        source.pinning = rft_gpu_copy_pin(&subscriber->copy, source.gpu, config, update->image);
    return rft_in_place_apply(&subscriber->engine, &source, left, error);
}

/* Destinations that this update was applied into are as they were before. */
static refit_status take_back(refit_update *update, refit_error *error)
{
    refit_error why;
    refit_status status = rft_in_place_undo(&update->subscriber->engine, &why);
    if (status == REFIT_OK) return REFIT_OK;
    rft_log(REFIT_LOG_ERROR, "version %llu could not be taken back: %s",
            (unsigned long long)update->image->id.version, why.text);
    return rft_fail(
        error, status,
        "version %llu could not be taken back, and the destinations hold neither it nor "
        "the one before: %s",
        (unsigned long long)update->image->id.version, why.text);
}

/* The trainer's decision is waited for: it comes within its deadlines, or it is lost. */
static refit_status accept_pieces(refit_update *update, refit_error *error)
{
    refit_error why;
    rft_mailbox *mailbox = &update->subscriber->service.mailbox;
    uint64_t version = update->image->id.version;
    RFT_REFUSE_IF(!rft_piece_queue_is_whole(pieces_of(update)), error, REFIT_ERR_STATE,
                  "version %llu comes piece by piece, and not all of it was copied",
                  (unsigned long long)version);
    rft_mailbox_order(mailbox, &(rft_order){.kind = RFT_ORDER_STAGE}, version);
    if (rft_piece_queue_await_commit(pieces_of(update), INT64_MAX, &why) == REFIT_OK) {
        update->decided = true;
        rft_mailbox_note_version(mailbox, version);
        return REFIT_OK;
    }
    decide_refuse(update, (refit_status)why.status, why.text, 0);
    return rft_fail(error, (refit_status)why.status,
                    "%s: the engine holds no version whole, load the next one", why.text);
}

refit_status refit_update_accept(refit_update *update, refit_error *error)
{
    RFT_TRY(check_undecided(update, error));
    RFT_REFUSE_IF(rft_in_place_is_torn(&update->subscriber->engine), error, REFIT_ERR_STATE,
                  "the destinations hold no version whole: apply version %llu, or refuse it",
                  (unsigned long long)update->image->id.version);
    RFT_REFUSE_IF(rft_in_place_has_failed(&update->subscriber->engine), error, REFIT_ERR_STATE,
                  "version %llu could not be applied: apply it again, or refuse it; if it was "
                  "loaded in another way, call refit_subscriber_unbind first",
                  (unsigned long long)update->image->id.version);
    RFT_REFUSE_IF(update->torn, error, REFIT_ERR_STATE,
                  "a copy of version %llu to the engine failed, and the engine holds no version "
                  "whole: refuse it",
                  (unsigned long long)update->image->id.version);
    if (pieces_of(update) != NULL) return accept_pieces(update, error);
    if (!rft_image_is_intact(update->image)) {
        (void)take_back(update, NULL);
        decide_refuse(update, REFIT_ERR_STALE, "overwritten by the trainer before it was accepted",
                      0);
        return rft_fail(error, REFIT_ERR_STALE,
                        "the trainer has evicted this worker and overwrites version %llu: bytes "
                        "read from it may be torn, wait for the next",
                        (unsigned long long)update->image->id.version);
    }
    rft_in_place_keep(&update->subscriber->engine);
    decide(update, &(rft_order){.kind = RFT_ORDER_ACCEPT});
    return REFIT_OK;
}

refit_status refit_update_refuse(refit_update *update, const char *reason, int kept,
                                 refit_error *error)
{
    RFT_TRY(check_undecided(update, error));
    refit_status status = take_back(update, error);
    bool torn = update->torn || rft_in_place_is_torn(&update->subscriber->engine);
    bool written = pieces_of(update) != NULL && rft_piece_queue_was_read(pieces_of(update));
    decide_refuse(update, REFIT_ERR_PEER, reason == NULL ? "" : reason,
                  kept && status == REFIT_OK && !torn && !written);
    return status;
}

/* Waits so long for copies that have not ended. */
static void end_update(refit_update *update, uint32_t timeout_ms)
{
    if (update == NULL || update->image == NULL) return;
    if (!update->decided) {
        (void)take_back(update, NULL);
        decide_refuse(update, REFIT_ERR_CANCELLED, "closed without a decision", 0);
    }
    refit_subscriber *subscriber = update->subscriber;
    subscriber->still_read = update->image;
    subscriber->still_version = update->image->id.version;
    if (!release(subscriber, timeout_ms)) {
        rft_log(REFIT_LOG_ERROR, "a GPU does not end its copies of version %llu: its memory stays",
                (unsigned long long)update->image->id.version);
    }
    rft_in_place_forget(&subscriber->engine);
    update->image = NULL;
}

void refit_update_close(refit_update *update)
{
    if (update == NULL) return;
    end_update(update, update->subscriber->service.config.broadcast_stage_timeout_ms);
}
