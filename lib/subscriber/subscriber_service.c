/*
 * The loop of a subscriber's service thread: wait for the socket, the caller or the clock; carry
 * out the caller's orders; hear some messages; let the session act on the time; send; report.
 *
 * The session decides everything; this file only runs it. A pass receives a bounded number of
 * messages, so that orders and beats do not wait behind a long stream of frames.
 */
#include "subscriber/subscriber_service.h"

#include <stdio.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/random.h"
#include "base/thread.h"

#define MESSAGES_WAITING  32u /* for a socket that takes none */
#define MESSAGES_PER_PASS 16u
#define WAIT_MOST_MS      60000

/* ---- Services for the session */

static void host_send(void *user, const rft_message *message)
{
    rft_subscriber_service *service = user;
    /* HELLO is repeated anyway: one that waits is enough. */
    if (message->kind == RFT_HELLO) rft_send_queue_reset(&service->send_queue);
    refit_status status =
        rft_send_queue_put(&service->send_queue, NULL, message, &service->session.limits, NULL);
    if (status != REFIT_OK) service->send_queue_failed = true;
    (void)rft_send_queue_flush(&service->send_queue, service->channel);
}

static void host_deliver(void *user, rft_image *image)
{
    rft_subscriber_service *service = user;
    rft_mailbox_deliver(&service->mailbox, image);
}

static bool host_withdraw(void *user)
{
    rft_subscriber_service *service = user;
    return rft_mailbox_withdraw(&service->mailbox);
}

/* ---- One pass */

static void wait_for_something(rft_subscriber_service *service)
{
    int wait_ms = rft_ms_until(rft_session_tick_at(&service->session));
    if (wait_ms > WAIT_MOST_MS) wait_ms = WAIT_MOST_MS;
    rft_channel_poll(service->channel, service->mailbox.wake_fd, wait_ms);
    rft_wake_fd_clear(service->mailbox.wake_fd);
    refit_error why;
    if (rft_channel_take_failure(service->channel, &why) != REFIT_OK) {
        rft_session_shut_out(&service->session, &why, rft_now());
    }
}

static void carry_out_orders(rft_subscriber_service *service)
{
    rft_order order;
    refit_device *device = rft_mailbox_take_device(&service->mailbox);
    if (device != NULL) rft_session_use_device(&service->session, device, rft_now());
    while (rft_mailbox_next_order(&service->mailbox, &order)) {
        int64_t now = rft_now();
        switch (order.kind) {
        case RFT_ORDER_ACCEPT: rft_session_accept(&service->session, now); break;
        case RFT_ORDER_REFUSE:
            rft_session_refuse(&service->session, order.code, order.kept, order.reason, now);
            break;
        case RFT_ORDER_RELEASE: rft_session_release(&service->session, now); break;
        }
    }
}

static void hear_one(rft_subscriber_service *service, refit_status status,
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

static void hear(rft_subscriber_service *service)
{
    rft_envelope envelope;
    refit_error why;
    for (uint32_t i = 0; i < MESSAGES_PER_PASS; i++) {
        refit_status status = rft_channel_receive(service->channel, &envelope, &why);
        if (status == REFIT_ERR_TIMEOUT) return;
        hear_one(service, status, &envelope, &why);
    }
}

static void speak(rft_subscriber_service *service)
{
    if (service->send_queue_failed) {
        service->send_queue_failed = false;
        rft_send_queue_reset(&service->send_queue);
        rft_session_lost(&service->session, "its messages could not be sent", rft_now());
    }
    (void)rft_send_queue_flush(&service->send_queue, service->channel);
}

static void *listen_on(void *user)
{
    rft_subscriber_service *service = user;
    do {
        wait_for_something(service);
        carry_out_orders(service);
        hear(service);
        rft_session_tick(&service->session, rft_now());
        speak(service);
    } while (rft_mailbox_publish(&service->mailbox, &service->session.report));
    rft_session_leave(&service->session);
    speak(service);
    return NULL;
}

/* ---- Start and stop */

static refit_status name_worker(rft_subscriber_service *service, refit_error *error)
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

refit_status rft_subscriber_service_start(rft_subscriber_service *service, const char *endpoint,
                                          const refit_config *config, refit_error *error)
{
    refit_status status;
    rft_session_host host = {service, host_send, host_deliver, host_withdraw};
    service->config = *config;
    service->send_queue.most = MESSAGES_WAITING;
    RFT_TRY(name_worker(service, error));
    RFT_TRY(rft_mailbox_open(&service->mailbox, error));
    RFT_TRY_GOTO(rft_channel_connect(endpoint, config, &service->channel, error), undo_mailbox);
    service->mailbox.endpoint = rft_channel_endpoint(service->channel);
    service->identity.near = rft_channel_is_local(service->channel);
    rft_session_init(&service->session, &service->config, &service->identity, host, rft_now());
    RFT_TRY_GOTO(rft_thread_start(&service->thread, "refit-worker", listen_on, service, error),
                 undo_session);
    return REFIT_OK;

undo_session:
    rft_session_close(&service->session);
    rft_channel_close(service->channel);
undo_mailbox:
    rft_mailbox_close(&service->mailbox);
    return status;
}

void rft_subscriber_service_stop(rft_subscriber_service *service)
{
    rft_mailbox_shut(&service->mailbox);
    rft_thread_join(service->thread);
    rft_session_close(&service->session);
    rft_channel_close(service->channel);
    rft_send_queue_close(&service->send_queue);
    rft_mailbox_close(&service->mailbox);
}
