/*
 * One version through the door: begin, write, commit, abort.
 *
 * The bytes of a slot change only when no frame of it is being made (`sending`), none is in flight
 * (its loan's pending), and nobody may be reading it; where that cannot be had in time, the slot
 * gets fresh memory instead, private memory if need be. What may wait, and how long: begin for
 * readers, until the staging timeout; commit for its two phases, whose deadlines the service thread
 * keeps. Each of these waits looks for a cancel whenever the service thread has had a turn, and
 * cancel gives it one.
 */
#include <inttypes.h>

#include "base/clock.h"
#include "base/log.h"
#include "net/wake_fd.h"
#include "publisher/publisher.h"

#define WAIT_STEP_MS 1000 /* waits look again at least so often */

void rft_publisher_await_sending(refit_publisher *publisher)
{
    while (publisher->sending) {
        (void)rft_cond_wait(&publisher->changed, &publisher->lock, rft_deadline(WAIT_STEP_MS));
    }
}

/* ---- Cancelling */

void refit_publisher_cancel(refit_publisher *publisher)
{
    if (publisher == NULL) return;
    atomic_store(&publisher->cancelled, true);
    rft_wake_fd_set(publisher->wake);
}

bool rft_publisher_take_cancel(refit_publisher *publisher)
{
    return atomic_exchange(&publisher->cancelled, false);
}

/* ---- Beginning */

static refit_status check_begin(refit_publisher *publisher, refit_error *error)
{
    RFT_REFUSE_IF(rft_publisher_take_cancel(publisher), error, REFIT_ERR_CANCELLED,
                  "refit_publisher_cancel came before version %" PRIu64 " had begun",
                  publisher->server.transaction.version);
    return REFIT_OK;
}

/* Waits until nobody reads the slot that comes next, and turns out who does not let go. Called with
 * the lock held. */
static refit_status await_readers(refit_publisher *publisher, int64_t deadline, refit_error *error)
{
    bool blocked = rft_server_has_readers(&publisher->server);
    refit_status status = check_begin(publisher, error);
    while (status == REFIT_OK && blocked && rft_ms_until(deadline) > 0) {
        (void)rft_cond_wait(&publisher->changed, &publisher->lock, deadline);
        blocked = rft_server_has_readers(&publisher->server);
        status = check_begin(publisher, error);
    }
    if (status == REFIT_OK && blocked) rft_server_evict_readers(&publisher->server, rft_now());
    rft_publisher_await_sending(publisher);
    return status;
}

/* Shared memory that is lost to a crashed reader must not end the training where sockets will do:
 * with broadcast.shm: auto the slot gets private memory, and nobody is offered to map the store
 * from now on, until other tensors are declared. */
static refit_status slot_renew(refit_publisher *publisher, uint32_t slot, refit_error *error)
{
    refit_error why = {0};
    rft_store *store = publisher->store;
    refit_status status = rft_store_renew(store, slot, &why);
    if (status == REFIT_OK) return REFIT_OK;
    bool retry = store->shared && status == REFIT_ERR_SYSTEM &&
                 publisher->config.broadcast_shm == REFIT_SHM_AUTO;
    if (!retry) return rft_fail_sub(error, status, why.subsystem, "%s", why.text);
    rft_log(REFIT_LOG_WARNING, "weights travel through sockets only from now on: %s", why.text);
    rft_lock(&publisher->lock);
    store->shared = false;
    rft_unlock(&publisher->lock);
    return rft_store_renew(store, slot, error);
}

/* Makes a slot's memory safe to write: as it is, or fresh. */
static refit_status slot_clear(refit_publisher *publisher, uint32_t slot, refit_error *error)
{
    rft_slot *place = &publisher->store->slots[slot];
    int64_t deadline = rft_deadline(publisher->config.broadcast_linger_ms);
    if (!publisher->store->hosted) return REFIT_OK;
    rft_retire_list_sweep(&publisher->retired);
    bool usable = place->buffer != NULL && !place->tainted;
    if (usable && rft_pending_wait(&place->buffer->pending, deadline)) return REFIT_OK;
    rft_log(REFIT_LOG_INFO, "a slot of the store is replaced: somebody may still read it");
    refit_status status = slot_renew(publisher, slot, error);
    rft_publisher_count_pinned(publisher);
    return status;
}

/* Likewise the version's place wherever it is kept, once no copy goes there any more. */
static refit_status place_clear(refit_publisher *publisher, uint32_t slot, refit_error *error)
{
    rft_publisher_await_copies(publisher, rft_deadline(publisher->config.broadcast_linger_ms));
    RFT_TRY(slot_clear(publisher, slot, error));
    return rft_publisher_clear_gpu(publisher, slot, error);
}

refit_status refit_publisher_begin(refit_publisher *publisher, uint64_t version, refit_error *error)
{
    RFT_REFUSE_IF(publisher == NULL, error, REFIT_ERR_INVALID, "begin needs a publisher");
    rft_server *server = &publisher->server;
    int64_t deadline = rft_deadline(publisher->config.broadcast_stage_timeout_ms);
    rft_lock(&publisher->lock);
    refit_status status = rft_transaction_prepare(server, &version, error);
    bool prepared = status == REFIT_OK;
    if (prepared) status = await_readers(publisher, deadline, error);
    rft_unlock(&publisher->lock);
    if (!prepared) return status;

    uint32_t slot = rft_store_target(publisher->store);
    if (status == REFIT_OK) status = place_clear(publisher, slot, error);
    rft_lock(&publisher->lock);
    if (status == REFIT_OK) status = check_begin(publisher, error);
    if (status == REFIT_OK) {
        rft_store_begin(publisher->store, version);
        if (publisher->gpu != NULL) rft_gpu_store_begin(publisher->gpu, slot, version);
        rft_transaction_begin(server, rft_now());
        publisher->write_seconds = 0;
    } else {
        rft_transaction_give_up(server, rft_now());
    }
    rft_unlock(&publisher->lock);
    rft_wake_fd_set(publisher->wake);
    return status;
}

/* ---- Ending */

/* Whether the committed version's bytes can be put back where the one that is gone was written.
 * Frames of that which are still in flight are of no interest to anybody, but their bytes are not
 * to change: the slot gets fresh memory. If there is none the old bytes are put back all the same:
 * workers drop frames of an aborted version. But not where a device may still write. */
static bool is_restorable(refit_publisher *publisher)
{
    const rft_store *store = publisher->store;
    if (!store->hosted || store->writing_slot != store->committed_slot) return true;
    const rft_pending *pending = &store->slots[store->writing_slot].buffer->pending;
    bool written = rft_copy_queue_holds(publisher->copy_queue, pending) ||
                   rft_copy_queue_holds(publisher->gpu_copy_queue, pending);
    return slot_clear(publisher, store->writing_slot, NULL) == REFIT_OK || !written;
}

/* The version is aborted and everybody told so. */
static void roll_back(refit_publisher *publisher)
{
    rft_store *store = publisher->store;
    rft_wake_fd_set(publisher->wake);
    rft_lock(&publisher->lock);
    rft_publisher_await_sending(publisher);
    rft_unlock(&publisher->lock);
    publisher->unsettled.count = 0;
    rft_publisher_await_copies(publisher, rft_deadline(publisher->config.broadcast_linger_ms));
    bool restorable = is_restorable(publisher);
    if (!restorable) {
        rft_log(REFIT_LOG_ERROR, "a copy that does not end takes the committed version's place: "
                                 "nothing is served until the next one");
    }
    rft_store_undo(store);
    rft_lock(&publisher->lock);
    rft_store_rollback(store, restorable);
    if (publisher->gpu != NULL) rft_gpu_store_rollback(publisher->gpu);
    rft_transaction_settle(&publisher->server, rft_now());
    rft_unlock(&publisher->lock);
    rft_wake_fd_set(publisher->wake);
}

/* Both deadlines are kept by the service thread. Called with the lock held. */
static void await_outcome(refit_publisher *publisher)
{
    const rft_transaction *transaction = &publisher->server.transaction;
    while (transaction->state == RFT_TRANSACTION_STAGING ||
           transaction->state == RFT_TRANSACTION_COMMITTING) {
        if (rft_publisher_take_cancel(publisher)) {
            rft_transaction_cancel(&publisher->server, rft_now());
        } else {
            (void)rft_cond_wait(&publisher->changed, &publisher->lock, rft_deadline(WAIT_STEP_MS));
        }
    }
}

/* Called with the lock held. */
static refit_status seal(refit_publisher *publisher, refit_error *error)
{
    if (rft_publisher_take_cancel(publisher)) {
        rft_transaction_cancel(&publisher->server, rft_now());
        return REFIT_OK;
    }
    RFT_TRY(rft_store_seal(publisher->store, error));
    if (publisher->gpu != NULL) rft_gpu_store_seal(publisher->gpu);
    rft_transaction_seal(&publisher->server, rft_now());
    rft_wake_fd_set(publisher->wake);
    return REFIT_OK;
}

refit_status refit_publisher_commit(refit_publisher *publisher, refit_error *error)
{
    RFT_REFUSE_IF(publisher == NULL, error, REFIT_ERR_INVALID, "commit needs a publisher");
    RFT_TRY(rft_publisher_check_writing(publisher, "commit", error));
    rft_publisher_settle(publisher);
    rft_lock(&publisher->lock);
    /* With nobody to wait for, seal commits: no frame may be made while slots change roles. */
    rft_publisher_await_sending(publisher);
    refit_status status = seal(publisher, error);
    if (status == REFIT_OK) await_outcome(publisher);
    refit_error result = publisher->server.transaction.result;
    bool aborted = publisher->server.transaction.state == RFT_TRANSACTION_ABORTED;
    rft_unlock(&publisher->lock);
    if (status != REFIT_OK) return status;
    if (aborted) roll_back(publisher);
    if (result.status == REFIT_OK) return REFIT_OK;
    return rft_fail(error, (refit_status)result.status, "%s", result.text);
}

refit_status refit_publisher_abort(refit_publisher *publisher, refit_error *error)
{
    RFT_REFUSE_IF(publisher == NULL, error, REFIT_ERR_INVALID, "abort needs a publisher");
    RFT_TRY(rft_publisher_check_writing(publisher, "abort", error));
    rft_lock(&publisher->lock);
    rft_transaction_abort(&publisher->server, REFIT_ERR_CANCELLED, "the trainer dropped it");
    rft_unlock(&publisher->lock);
    roll_back(publisher);
    return REFIT_OK;
}
