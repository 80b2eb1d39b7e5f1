/*
 * Progress in atomics, so that looking never waits for the work; the word to stop in one too, and a
 * condition besides, for work that pauses. Knows nothing of what the work is.
 */
#include "memory/watch.h"

refit_status rft_watch_open(rft_watch *watch, refit_error *error)
{
    atomic_init(&watch->in_line, false);
    atomic_init(&watch->taken, 0);
    atomic_init(&watch->ready, 0);
    atomic_init(&watch->stopped, false);
    RFT_TRY(rft_mutex_open(&watch->lock, error));
    refit_status status = rft_cond_open(&watch->moved, error);
    if (status != REFIT_OK) rft_mutex_close(&watch->lock);
    return status;
}

void rft_watch_close(rft_watch *watch)
{
    rft_cond_close(&watch->moved);
    rft_mutex_close(&watch->lock);
}

void rft_watch_stop(rft_watch *watch)
{
    rft_lock(&watch->lock);
    atomic_store(&watch->stopped, true);
    rft_cond_wake_all(&watch->moved);
    rft_unlock(&watch->lock);
}

refit_status rft_watch_check(rft_watch *watch, refit_error *error)
{
    RFT_REFUSE_IF(atomic_load(&watch->stopped), error, REFIT_ERR_CANCELLED,
                  "the host image was given up while it was being taken");
    return REFIT_OK;
}

void rft_watch_pause(rft_watch *watch, int64_t deadline)
{
    rft_lock(&watch->lock);
    while (!atomic_load(&watch->stopped) && rft_cond_wait(&watch->moved, &watch->lock, deadline)) {
    }
    rft_unlock(&watch->lock);
}
