/*
 * The desk between a subscriber's two threads.
 *
 * A caller who waits polls ready_fd and looks again, so the same descriptor serves refit's own wait
 * and the caller's event loop, and a signal handler can end either. After every change the
 * descriptor is made to tell the truth: cleared first, then set if there is something, so that a
 * cancel that comes in between is not lost.
 */
#include "broadcast/desk.h"

#include <poll.h>
#include <string.h>

#include "base/clock.h"
#include "broadcast/waker.h"

refit_status rft_desk_open(rft_desk *desk, refit_error *error)
{
    refit_status status;
    *desk = (rft_desk){.ready_fd = -1, .wake_fd = -1};
    RFT_TRY_GOTO(rft_waker_open(&desk->ready_fd, error), undo_fds);
    RFT_TRY_GOTO(rft_waker_open(&desk->wake_fd, error), undo_fds);
    RFT_TRY_GOTO(rft_mutex_open(&desk->lock, error), undo_fds);
    return REFIT_OK;

undo_fds:
    rft_waker_close(desk->ready_fd);
    rft_waker_close(desk->wake_fd);
    return status;
}

void rft_desk_close(rft_desk *desk)
{
    rft_mutex_close(&desk->lock);
    rft_waker_close(desk->ready_fd);
    rft_waker_close(desk->wake_fd);
}

/* Makes ready_fd say whether a take would return at once. The lock is held. */
static void show_ready(rft_desk *desk)
{
    rft_waker_clear(desk->ready_fd);
    if (desk->ready != NULL || desk->report.final.status != REFIT_OK ||
        atomic_load(&desk->cancelled)) {
        rft_waker_set(desk->ready_fd);
    }
}

/* ---- The caller's side */

static refit_status try_take(rft_desk *desk, rft_image **out, refit_error *error)
{
    if (atomic_exchange(&desk->cancelled, false)) {
        return rft_fail(error, REFIT_ERR_CANCELLED, "refit_subscriber_wake ended the wait");
    }
    if (desk->ready != NULL) {
        *out = desk->ready;
        desk->ready = NULL;
        return REFIT_OK;
    }
    const refit_error *final = &desk->report.final;
    if (final->status != REFIT_OK) {
        return rft_fail(error, (refit_status) final->status, "%s", final->text);
    }
    bool joined = desk->report.state >= RFT_SESSION_CURRENT;
    const char *refusal = desk->report.refusal;
    if (refusal[0] != '\0' && !joined) {
        return rft_fail(error, REFIT_ERR_TIMEOUT,
                        "no new version in time; the trainer does not take this worker for now: %s",
                        refusal);
    }
    RFT_REFUSE_IF(joined, error, REFIT_ERR_TIMEOUT, "no new version in time; the trainer is there");
    return rft_fail(error, REFIT_ERR_TIMEOUT,
                    "no new version in time; no trainer has answered at %.120s", desk->endpoint);
}

refit_status rft_desk_take(rft_desk *desk, uint32_t timeout_ms, rft_image **out, refit_error *error)
{
    int64_t deadline = rft_deadline(timeout_ms);
    for (;;) {
        rft_lock(&desk->lock);
        refit_status status = try_take(desk, out, error);
        show_ready(desk);
        rft_unlock(&desk->lock);
        int left_ms = rft_ms_until(deadline);
        if (status != REFIT_ERR_TIMEOUT || left_ms == 0) return status;
        struct pollfd item = {.fd = desk->ready_fd, .events = POLLIN};
        (void)poll(&item, 1, left_ms);
    }
}

void rft_desk_cancel(rft_desk *desk)
{
    atomic_store(&desk->cancelled, true);
    rft_waker_set(desk->ready_fd);
}

/* What the caller decided is true at once for whoever asks, before the service thread knows. */
static void report_order(rft_desk *desk, const rft_order *order, uint64_t version)
{
    if (order->kind == RFT_ORDER_ACCEPT) desk->report.version = version;
    if (order->kind == RFT_ORDER_REFUSE && !order->kept) desk->report.version = 0;
}

void rft_desk_order(rft_desk *desk, const rft_order *order, uint64_t version)
{
    rft_lock(&desk->lock);
    desk->orders[desk->order_count++] = *order;
    report_order(desk, order, version);
    rft_unlock(&desk->lock);
    rft_waker_set(desk->wake_fd);
}

void rft_desk_bring(rft_desk *desk, refit_device *device)
{
    rft_lock(&desk->lock);
    desk->device = device;
    rft_unlock(&desk->lock);
    rft_waker_set(desk->wake_fd);
}

void rft_desk_shut(rft_desk *desk)
{
    rft_lock(&desk->lock);
    desk->closing = true;
    rft_unlock(&desk->lock);
    rft_waker_set(desk->wake_fd);
}

void rft_desk_read(rft_desk *desk, rft_session_report *out)
{
    rft_lock(&desk->lock);
    *out = desk->report;
    rft_unlock(&desk->lock);
}

/* ---- The service thread's side */

void rft_desk_deliver(rft_desk *desk, rft_image *image)
{
    rft_lock(&desk->lock);
    desk->ready = image;
    show_ready(desk);
    rft_unlock(&desk->lock);
}

bool rft_desk_withdraw(rft_desk *desk)
{
    rft_lock(&desk->lock);
    bool there = desk->ready != NULL;
    desk->ready = NULL;
    show_ready(desk);
    rft_unlock(&desk->lock);
    return there;
}

bool rft_desk_next_order(rft_desk *desk, rft_order *out)
{
    rft_lock(&desk->lock);
    bool there = desk->order_count > 0;
    if (there) {
        *out = desk->orders[0];
        desk->order_count--;
        memmove(desk->orders, desk->orders + 1, desk->order_count * sizeof *desk->orders);
    }
    rft_unlock(&desk->lock);
    return there;
}

refit_device *rft_desk_take_device(rft_desk *desk)
{
    rft_lock(&desk->lock);
    refit_device *device = desk->device;
    desk->device = NULL;
    rft_unlock(&desk->lock);
    return device;
}

bool rft_desk_publish(rft_desk *desk, const rft_session_report *report)
{
    rft_lock(&desk->lock);
    bool ended = report->final.status != desk->report.final.status;
    uint64_t decided = desk->report.version;
    desk->report = *report;
    if (desk->order_count > 0) desk->report.version = decided;
    if (ended) show_ready(desk);
    bool on = !desk->closing || desk->order_count > 0;
    rft_unlock(&desk->lock);
    return on;
}
