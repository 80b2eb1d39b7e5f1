/*
 * The loop of a subscriber's service thread: wait for the socket, the caller or the clock; carry
 * out the caller's orders; hear some messages; let the session act on the time; send; report.
 *
 * The session decides everything; this file only runs it. A round hears a bounded number of
 * messages, so that orders and beats do not wait behind a long stream of frames.
 */
#include "broadcast/listener.h"

#include <stdio.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/random.h"
#include "broadcast/waker.h"

#define MESSAGES_A_ROUND 16u
#define WAIT_MOST_MS     60000

/* ---- What the session asks for */

static void host_send(void *user, const rft_message *message)
{
    rft_listener *listener = user;
    /* HELLO is repeated anyway: one that waits is enough. */
    if (message->kind == RFT_HELLO) rft_backlog_clear(&listener->backlog);
    refit_status status =
        rft_backlog_put(&listener->backlog, message, &listener->session.limits, NULL);
    if (status != REFIT_OK) listener->backlog_failed = true;
    (void)rft_backlog_flush(&listener->backlog, listener->channel);
}

static void host_deliver(void *user, rft_image *image)
{
    rft_listener *listener = user;
    rft_desk_deliver(&listener->desk, image);
}

static bool host_withdraw(void *user)
{
    rft_listener *listener = user;
    return rft_desk_withdraw(&listener->desk);
}

/* ---- One round */

static void wait_for_something(rft_listener *listener)
{
    int wait_ms = rft_ms_until(rft_session_tick_at(&listener->session));
    if (wait_ms > WAIT_MOST_MS) wait_ms = WAIT_MOST_MS;
    rft_channel_poll(listener->channel, listener->desk.wake_fd, wait_ms);
    rft_waker_clear(listener->desk.wake_fd);
    refit_error why;
    if (rft_channel_take_failure(listener->channel, &why) != REFIT_OK) {
        rft_session_shut_out(&listener->session, &why, rft_now());
    }
}

static void carry_out_orders(rft_listener *listener)
{
    rft_order order;
    refit_device *device = rft_desk_take_device(&listener->desk);
    if (device != NULL) rft_session_use_device(&listener->session, device, rft_now());
    while (rft_desk_next_order(&listener->desk, &order)) {
        int64_t now = rft_now();
        switch (order.kind) {
        case RFT_ORDER_ACCEPT: rft_session_accept(&listener->session, now); break;
        case RFT_ORDER_REFUSE:
            rft_session_refuse(&listener->session, order.code, order.kept, order.reason, now);
            break;
        case RFT_ORDER_RELEASE: rft_session_release(&listener->session, now); break;
        }
    }
}

static void hear_one(rft_listener *listener, refit_status status, const rft_envelope *envelope,
                     refit_error *why)
{
    rft_message message;
    if (status == REFIT_OK) {
        status = rft_message_decode(envelope->message, &listener->session.limits, &message, why);
    }
    if (status == REFIT_OK) {
        rft_session_message(&listener->session, &message, envelope->payload, rft_now());
    } else {
        rft_session_garbage(&listener->session, why, rft_now());
    }
}

static void hear(rft_listener *listener)
{
    rft_envelope envelope;
    refit_error why;
    for (uint32_t i = 0; i < MESSAGES_A_ROUND; i++) {
        refit_status status = rft_channel_receive(listener->channel, &envelope, &why);
        if (status == REFIT_ERR_TIMEOUT) return;
        hear_one(listener, status, &envelope, &why);
    }
}

static void speak(rft_listener *listener)
{
    if (listener->backlog_failed) {
        listener->backlog_failed = false;
        rft_backlog_clear(&listener->backlog);
        rft_session_lost(&listener->session, "its messages could not be sent", rft_now());
    }
    (void)rft_backlog_flush(&listener->backlog, listener->channel);
}

static void *listen_on(void *user)
{
    rft_listener *listener = user;
    do {
        wait_for_something(listener);
        carry_out_orders(listener);
        hear(listener);
        rft_session_tick(&listener->session, rft_now());
        speak(listener);
    } while (rft_desk_publish(&listener->desk, &listener->session.report));
    rft_session_leave(&listener->session);
    speak(listener);
    return NULL;
}

/* ---- Start and stop */

static refit_status name_worker(rft_listener *listener, refit_error *error)
{
    rft_session_identity *identity = &listener->identity;
    char host[sizeof identity->host] = "?";
    char name[sizeof identity->worker];
    RFT_TRY(rft_random_u64(&identity->instance, error));
    (void)gethostname(host, sizeof host - 1);
    snprintf(name, sizeof name, "%.32s:%ld:%08x", host, (long)getpid(),
             (unsigned)(identity->instance & 0xffffffffu));
    bool named = listener->config.broadcast_worker[0] != '\0';
    const char *chosen = named ? listener->config.broadcast_worker : name;
    rft_view_print(rft_view_text(host), identity->host, sizeof identity->host);
    rft_view_print(rft_view_text(chosen), identity->worker, sizeof identity->worker);
    return REFIT_OK;
}

refit_status rft_listener_start(rft_listener *listener, const char *endpoint,
                                const refit_config *config, refit_error *error)
{
    refit_status status;
    rft_session_host host = {listener, host_send, host_deliver, host_withdraw};
    listener->config = *config;
    RFT_TRY(name_worker(listener, error));
    RFT_TRY(rft_desk_open(&listener->desk, error));
    RFT_TRY_GOTO(rft_channel_connect(endpoint, config, &listener->channel, error), undo_desk);
    listener->desk.endpoint = rft_channel_endpoint(listener->channel);
    listener->identity.near = rft_channel_is_local(listener->channel);
    rft_session_init(&listener->session, &listener->config, &listener->identity, host, rft_now());
    RFT_TRY_GOTO(rft_thread_start(&listener->thread, "refit-worker", listen_on, listener, error),
                 undo_session);
    return REFIT_OK;

undo_session:
    rft_session_close(&listener->session);
    rft_channel_close(listener->channel);
undo_desk:
    rft_desk_close(&listener->desk);
    return status;
}

void rft_listener_stop(rft_listener *listener)
{
    rft_desk_shut(&listener->desk);
    rft_thread_join(listener->thread);
    rft_session_close(&listener->session);
    rft_channel_close(listener->channel);
    rft_backlog_close(&listener->backlog);
    rft_desk_close(&listener->desk);
}
