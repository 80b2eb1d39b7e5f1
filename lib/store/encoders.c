/*
 * Coding threads. There is one piece of work at a time: a number of items, of which owner and
 * helpers claim the next one under the lock and do it outside. An item is a frame, a fraction of a
 * millisecond, so nobody waits long for the last one, and nothing is allocated.
 */
#include "store/encoders.h"

#include "base/checked.h"
#include "base/log.h"

#define THREADS_AUTO 8u

refit_status rft_encoders_open(rft_encoders *encoders, uint32_t threads, refit_error *error)
{
    refit_status status;
    if (threads == 0) threads = (uint32_t)rft_min_u64(rft_cpu_count(), THREADS_AUTO);
    *encoders = (rft_encoders){0};
    RFT_TRY(rft_mutex_open(&encoders->lock, error));
    RFT_TRY_GOTO(rft_cond_open(&encoders->work, error), close_lock);
    RFT_TRY_GOTO(rft_cond_open(&encoders->finished, error), close_work);
    encoders->threads = (uint32_t)rft_min_u64(threads, RFT_ENCODERS_MOST);
    return REFIT_OK;

close_work:
    rft_cond_close(&encoders->work);
close_lock:
    rft_mutex_close(&encoders->lock);
    return status;
}

void rft_encoders_close(rft_encoders *encoders)
{
    if (encoders->threads == 0) return;
    rft_lock(&encoders->lock);
    encoders->closing = true;
    rft_cond_wake_all(&encoders->work);
    rft_unlock(&encoders->lock);
    for (uint32_t i = 0; i < encoders->started; i++) {
        rft_thread_join(encoders->helpers[i]);
    }
    rft_cond_close(&encoders->finished);
    rft_cond_close(&encoders->work);
    rft_mutex_close(&encoders->lock);
    encoders->threads = 0;
}

/* Claims items while there are any. The lock is held before and after, not meanwhile. */
static void do_items(rft_encoders *encoders, uint32_t worker)
{
    while (encoders->next < encoders->count) {
        uint32_t item = encoders->next++;
        encoders->running++;
        rft_unlock(&encoders->lock);
        encoders->encode(encoders->user, item, worker);
        rft_lock(&encoders->lock);
        encoders->running--;
    }
    if (encoders->running == 0) rft_cond_wake_all(&encoders->finished);
}

/* The owner is worker 0. */
static void *help(void *user)
{
    rft_encoders *encoders = user;
    rft_lock(&encoders->lock);
    uint32_t worker = ++encoders->named;
    while (!encoders->closing) {
        if (encoders->next < encoders->count) {
            do_items(encoders, worker);
        } else {
            rft_cond_wait_idle(&encoders->work, &encoders->lock);
        }
    }
    rft_unlock(&encoders->lock);
    return NULL;
}

/* Frames are right without helpers, only later: that is worth a line in the log, no failure. */
static void start_helpers(rft_encoders *encoders)
{
    while (encoders->started + 1 < encoders->threads && !encoders->refused) {
        refit_error error;
        if (rft_thread_start(&encoders->helpers[encoders->started], "refit-encode", help, encoders,
                             &error) == REFIT_OK) {
            encoders->started++;
            continue;
        }
        encoders->refused = true;
        rft_log(REFIT_LOG_WARNING, "frames are coded by %u threads, not %u: %s",
                encoders->started + 1, encoders->threads, error.text);
    }
}

/* The last wait is for items that are under way: it ends as they do. */
static void share(rft_encoders *encoders, uint32_t count, rft_encode_fn encode, void *user)
{
    rft_lock(&encoders->lock);
    start_helpers(encoders);
    encoders->encode = encode;
    encoders->user = user;
    encoders->next = 0;
    encoders->count = count;
    rft_cond_wake_all(&encoders->work);
    do_items(encoders, 0);
    while (encoders->running > 0) {
        rft_cond_wait_idle(&encoders->finished, &encoders->lock);
    }
    rft_unlock(&encoders->lock);
}

void rft_encoders_run(rft_encoders *encoders, uint32_t count, rft_encode_fn encode, void *user)
{
    if (count > 1 && encoders->threads > 1) {
        share(encoders, count, encode, user);
        return;
    }
    for (uint32_t i = 0; i < count; i++) {
        encode(user, i, 0);
    }
}
