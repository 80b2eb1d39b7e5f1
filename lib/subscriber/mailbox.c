/*
 * The mailbox between a subscriber's two threads.
 *
 * A waiting caller polls ready_fd and looks again, so the same descriptor serves refit's own wait
 * and the caller's event loop, and a signal handler can end either. After every change the
 * descriptor is updated: cleared first, then set if a take would return at once, so that a cancel
 * that comes in between is not lost.
 */
#include "subscriber/mailbox.h"

#include <inttypes.h>
#include <poll.h>
#include <string.h>

#include "base/clock.h"
#include "base/thread.h"

refit_status rft_mailbox_open(rft_mailbox *mailbox, refit_error *error)
{
    refit_status status;
    *mailbox = (rft_mailbox){.ready_fd = -1, .wake_fd = -1};
    RFT_TRY_GOTO(rft_wake_fd_open(&mailbox->ready_fd, error), undo_fds);
    RFT_TRY_GOTO(rft_wake_fd_open(&mailbox->wake_fd, error), undo_fds);
    RFT_TRY_GOTO(rft_mutex_open(&mailbox->lock, error), undo_fds);
    return REFIT_OK;

undo_fds:
    rft_wake_fd_close(mailbox->ready_fd);
    rft_wake_fd_close(mailbox->wake_fd);
    return status;
}

void rft_mailbox_close(rft_mailbox *mailbox)
{
    rft_selection_close(mailbox->selection);
    rft_mutex_close(&mailbox->lock);
    rft_wake_fd_close(mailbox->ready_fd);
    rft_wake_fd_close(mailbox->wake_fd);
}

/* Whether there is a version, of what is selected. The lock is held. */
static bool can_take(const rft_mailbox *mailbox)
{
    return mailbox->ready != NULL && mailbox->selection == NULL;
}

/* Makes ready_fd say whether a take would return at once. The lock is held. */
static void show_ready(rft_mailbox *mailbox)
{
    rft_wake_fd_clear(mailbox->ready_fd);
    if (can_take(mailbox) || mailbox->report.final.status != REFIT_OK ||
        atomic_load(&mailbox->cancelled)) {
        rft_wake_fd_set(mailbox->ready_fd);
    }
}

/* ---- The caller's side */

/* REFIT_ERR_TIMEOUT of a follower. */
static refit_status say_archive(const rft_mailbox *mailbox, refit_error *error)
{
    const rft_session_report *report = &mailbox->report;
    const char *folder = mailbox->endpoint;
    RFT_REFUSE_IF(report->refusal[0] != '\0', error, REFIT_ERR_TIMEOUT,
                  "no new version in time: %s", report->refusal);
    RFT_REFUSE_IF(report->state == RFT_SESSION_STAGING, error, REFIT_ERR_TIMEOUT,
                  "no new version in time; one is being read from the archive %.120s", folder);
    RFT_REFUSE_IF(report->version > 0, error, REFIT_ERR_TIMEOUT,
                  "no new version in time; the archive %.120s has none that this worker has not "
                  "had, and it holds version %" PRIu64,
                  folder, report->version);
    return rft_fail(error, REFIT_ERR_TIMEOUT,
                    "no new version in time; the archive %.120s has none that this worker has not "
                    "had",
                    folder);
}

static refit_status try_take(rft_mailbox *mailbox, rft_image **out, refit_error *error)
{
    if (atomic_exchange(&mailbox->cancelled, false)) {
        return rft_fail(error, REFIT_ERR_CANCELLED, "refit_subscriber_wake ended the wait");
    }
    if (can_take(mailbox)) {
        *out = mailbox->ready;
        mailbox->ready = NULL;
        return REFIT_OK;
    }
    const refit_error *final = &mailbox->report.final;
    if (final->status != REFIT_OK) {
        return rft_fail(error, (refit_status) final->status, "%s", final->text);
    }
    if (mailbox->archive) return say_archive(mailbox, error);
    bool joined = mailbox->report.state >= RFT_SESSION_CURRENT;
    const char *refusal = mailbox->report.refusal;
    if (refusal[0] != '\0' && !joined) {
        return rft_fail(error, REFIT_ERR_TIMEOUT,
                        "no new version in time; the trainer does not take this worker for now: %s",
                        refusal);
    }
    uint64_t version = mailbox->report.version;
    RFT_REFUSE_IF(
        joined, error, REFIT_ERR_TIMEOUT,
        "no new version in time; the trainer is there, and this worker holds version %" PRIu64,
        version);
    RFT_REFUSE_IF(version > 0, error, REFIT_ERR_TIMEOUT,
                  "no new version in time; the trainer at %.120s is gone, and this worker holds "
                  "version %" PRIu64,
                  mailbox->endpoint, version);
    return rft_fail(error, REFIT_ERR_TIMEOUT,
                    "no new version in time; no trainer has answered at %.120s", mailbox->endpoint);
}

refit_status rft_mailbox_take(rft_mailbox *mailbox, uint32_t timeout_ms, rft_image **out,
                              refit_error *error)
{
    int64_t deadline = rft_deadline(timeout_ms);
    for (;;) {
        rft_lock(&mailbox->lock);
        refit_status status = try_take(mailbox, out, error);
        show_ready(mailbox);
        rft_unlock(&mailbox->lock);
        int left_ms = rft_ms_until(deadline);
        if (status != REFIT_ERR_TIMEOUT || left_ms == 0) return status;
        struct pollfd item = {.fd = mailbox->ready_fd, .events = POLLIN};
        (void)poll(&item, 1, left_ms);
    }
}

/* Without the lock, which the thread that the signal has interrupted may hold. show_ready clears
 * the descriptor before it looks at the flag; here the flag is set first. Whichever of clearing and
 * setting the descriptor comes second in the kernel sees what stood before the first: either the
 * descriptor stays set, or show_ready sees the flag. All else is under the lock. */
void rft_mailbox_cancel(rft_mailbox *mailbox)
{
    atomic_store(&mailbox->cancelled, true);
    rft_wake_fd_set(mailbox->ready_fd);
}

/* The caller's decision shows in reports at once, before the service thread knows. */
static void report_order(rft_mailbox *mailbox, const rft_order *order, uint64_t version)
{
    if (order->kind == RFT_ORDER_ACCEPT) mailbox->report.version = version;
    if (order->kind == RFT_ORDER_REFUSE && !order->kept) mailbox->report.version = 0;
}

void rft_mailbox_order(rft_mailbox *mailbox, const rft_order *order, uint64_t version)
{
    rft_lock(&mailbox->lock);
    mailbox->orders[mailbox->order_count++] = *order;
    report_order(mailbox, order, version);
    rft_unlock(&mailbox->lock);
    rft_wake_fd_set(mailbox->wake_fd);
}

void rft_mailbox_bring(rft_mailbox *mailbox, refit_device *device)
{
    rft_lock(&mailbox->lock);
    mailbox->device = device;
    rft_unlock(&mailbox->lock);
    rft_wake_fd_set(mailbox->wake_fd);
}

void rft_mailbox_select(rft_mailbox *mailbox, rft_selection *selection)
{
    rft_lock(&mailbox->lock);
    rft_selection *before = mailbox->selection;
    mailbox->selection = selection;
    show_ready(mailbox);
    rft_unlock(&mailbox->lock);
    rft_selection_close(before);
    rft_wake_fd_set(mailbox->wake_fd);
}

void rft_mailbox_take_whole(rft_mailbox *mailbox, bool whole)
{
    rft_lock(&mailbox->lock);
    mailbox->whole = whole;
    rft_unlock(&mailbox->lock);
    rft_wake_fd_set(mailbox->wake_fd);
}

void rft_mailbox_note_version(rft_mailbox *mailbox, uint64_t version)
{
    rft_lock(&mailbox->lock);
    mailbox->report.version = version;
    rft_unlock(&mailbox->lock);
}

void rft_mailbox_shut(rft_mailbox *mailbox)
{
    rft_lock(&mailbox->lock);
    mailbox->closing = true;
    rft_unlock(&mailbox->lock);
    rft_wake_fd_set(mailbox->wake_fd);
}

void rft_mailbox_read(rft_mailbox *mailbox, rft_session_report *out)
{
    rft_lock(&mailbox->lock);
    *out = mailbox->report;
    rft_unlock(&mailbox->lock);
}

/* ---- The service thread's side */

/* The lock is held. While an order waits, the version stays what the caller has decided. */
static void put_report(rft_mailbox *mailbox, const rft_session_report *report)
{
    uint64_t decided = mailbox->report.version;
    mailbox->report = *report;
    if (mailbox->order_count > 0) mailbox->report.version = decided;
}

void rft_mailbox_deliver(rft_mailbox *mailbox, rft_image *image, const rft_session_report *report)
{
    rft_lock(&mailbox->lock);
    put_report(mailbox, report);
    mailbox->ready = image;
    show_ready(mailbox);
    rft_unlock(&mailbox->lock);
}

bool rft_mailbox_replace(rft_mailbox *mailbox, rft_image *image, const rft_session_report *report)
{
    rft_lock(&mailbox->lock);
    bool there = mailbox->ready != NULL;
    if (there) {
        put_report(mailbox, report);
        mailbox->ready = image;
        show_ready(mailbox);
    }
    rft_unlock(&mailbox->lock);
    return there;
}

bool rft_mailbox_withdraw(rft_mailbox *mailbox)
{
    rft_lock(&mailbox->lock);
    bool there = mailbox->ready != NULL || mailbox->passed;
    mailbox->ready = NULL;
    mailbox->passed = false;
    show_ready(mailbox);
    rft_unlock(&mailbox->lock);
    return there;
}

bool rft_mailbox_next_order(rft_mailbox *mailbox, rft_order *out)
{
    rft_lock(&mailbox->lock);
    bool there = mailbox->order_count > 0;
    if (there) {
        *out = mailbox->orders[0];
        mailbox->order_count--;
        memmove(mailbox->orders, mailbox->orders + 1,
                mailbox->order_count * sizeof *mailbox->orders);
    }
    rft_unlock(&mailbox->lock);
    return there;
}

refit_device *rft_mailbox_take_device(rft_mailbox *mailbox)
{
    rft_lock(&mailbox->lock);
    refit_device *device = mailbox->device;
    mailbox->device = NULL;
    rft_unlock(&mailbox->lock);
    return device;
}

rft_selection *rft_mailbox_take_selection(rft_mailbox *mailbox)
{
    rft_lock(&mailbox->lock);
    rft_selection *selection = mailbox->selection;
    mailbox->selection = NULL;
    if (selection != NULL && mailbox->ready != NULL) {
        mailbox->ready = NULL;
        mailbox->passed = true;
    }
    rft_unlock(&mailbox->lock);
    return selection;
}

bool rft_mailbox_is_whole(rft_mailbox *mailbox)
{
    rft_lock(&mailbox->lock);
    bool whole = mailbox->whole;
    rft_unlock(&mailbox->lock);
    return whole;
}

bool rft_mailbox_publish(rft_mailbox *mailbox, const rft_session_report *report)
{
    rft_lock(&mailbox->lock);
    bool ended = report->final.status != mailbox->report.final.status;
    put_report(mailbox, report);
    if (ended) show_ready(mailbox);
    bool on = !mailbox->closing || mailbox->order_count > 0;
    rft_unlock(&mailbox->lock);
    return on;
}
