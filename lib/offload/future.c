/*
 * Futures: a caller's hold on one operation. They come from a pool inside the offloader. When an
 * operation ends, how it ended is written into each of its futures; from then on they need neither
 * it nor its mover, so a future outlives the next operation. Does not end operations by itself.
 */
#include "base/clock.h"
#include "offload/offloader.h"

refit_status rft_future_take(refit_offloader *offloader, bool next, refit_future **out,
                             refit_error *error)
{
    for (uint32_t at = 0; at < RFT_FUTURES; at++) {
        refit_future *future = &offloader->futures[at];
        if (future->taken) continue;
        bool settled = !next && !rft_offloader_is_moving(offloader);
        *future = (refit_future){.offloader = offloader,
                                 .operation = offloader->operation.number + (next ? 1 : 0),
                                 .taken = true,
                                 .done = settled,
                                 .good_groups = settled ? RFT_ALL_GROUPS : 0};
        *out = future;
        return REFIT_OK;
    }
    return rft_fail(error, REFIT_ERR_BUSY,
                    "%d futures of this offloader are open: close those that are not needed",
                    RFT_FUTURES);
}

void refit_future_close(refit_future *future)
{
    if (future == NULL) return;
    refit_offloader *offloader = future->offloader;
    rft_lock(&offloader->lock);
    future->taken = false;
    rft_unlock(&offloader->lock);
}

/* A look at a future: how its operation ended, or which mover makes its copies. */
typedef struct glance {
    bool done;
    bool arrived; /* the groups that were asked for */
    refit_error end;
    uint64_t operation;
    rft_mover *mover;
} glance;

/* Lock held. */
static glance look(const refit_future *future, uint64_t groups)
{
    return (glance){.done = future->done,
                    .arrived = (future->good_groups & groups) == groups,
                    .end = future->end,
                    .operation = future->operation,
                    .mover = future->offloader->operation.mover};
}

static glance look_locked(const refit_future *future, uint64_t groups)
{
    rft_lock(&future->offloader->lock);
    glance now = look(future, groups);
    rft_unlock(&future->offloader->lock);
    return now;
}

/* What a wait for `groups` of a done future answers. */
static refit_status answer(const glance *now, refit_error *error)
{
    if (now->arrived || now->end.status == REFIT_OK) return REFIT_OK;
    if (error != NULL) *error = now->end;
    return (refit_status)now->end.status;
}

refit_status refit_future_wait(refit_future *future, uint32_t timeout_ms, refit_error *error)
{
    RFT_REFUSE_IF(future == NULL, error, REFIT_ERR_INVALID, "there is no future to wait for");
    glance now = look_locked(future, RFT_ALL_GROUPS);
    if (!now.done) {
        RFT_TRY(rft_operation_wait(future->offloader, now.operation, timeout_ms, error));
        now = look_locked(future, RFT_ALL_GROUPS);
    }
    return answer(&now, error);
}

static refit_status check_group(const refit_future *future, uint32_t group, refit_error *error)
{
    RFT_REFUSE_IF(future == NULL, error, REFIT_ERR_INVALID, "there is no future to wait for");
    RFT_REFUSE_IF(group >= REFIT_GROUPS, error, REFIT_ERR_INVALID,
                  "there is no group %u: groups are numbered 0 to %d", group, REFIT_GROUPS - 1);
    return REFIT_OK;
}

/* With offload.verify: has the group that just arrived kept its bytes? */
static refit_status verify_group(refit_offloader *offloader, uint64_t number, uint64_t groups,
                                 refit_error *error)
{
    if (!offloader->config.offload_verify) return REFIT_OK;
    rft_lock(&offloader->checking);
    rft_check_groups(offloader, number, groups);
    rft_lock(&offloader->lock);
    bool corrupt =
        offloader->operation.number == number && (offloader->operation.corrupt & groups) != 0;
    refit_error found = offloader->operation.corruption;
    rft_unlock(&offloader->lock);
    rft_unlock(&offloader->checking);
    if (corrupt && error != NULL) *error = found;
    return corrupt ? (refit_status)found.status : REFIT_OK;
}

refit_status refit_future_wait_group(refit_future *future, uint32_t group, uint32_t timeout_ms,
                                     refit_error *error)
{
    RFT_TRY(check_group(future, group, error));
    uint64_t groups = UINT64_C(1) << group;
    glance now = look_locked(future, groups);
    if (now.done) return answer(&now, error);

    int64_t began = rft_now();
    refit_error detail = {0};
    refit_status status = rft_mover_wait_group(now.mover, group, timeout_ms, &detail);
    if (status == REFIT_OK) {
        status = verify_group(future->offloader, now.operation, groups, &detail);
    }
    rft_operation_expose(future->offloader, now.operation, began);

    /* If the operation ended meanwhile, the mover may have begun another. */
    now = look_locked(future, groups);
    if (now.done) return answer(&now, error);
    RFT_REFUSE_IF(status == REFIT_ERR_TIMEOUT, error, REFIT_ERR_TIMEOUT,
                  "the copies of group %u are still under way after %u ms: wait again", group,
                  timeout_ms);
    if (status != REFIT_OK && error != NULL) *error = detail;
    return status;
}

int refit_future_done(refit_future *future)
{
    if (future == NULL) return 0;
    rft_lock(&future->offloader->lock);
    rft_operation_notice(future->offloader);
    bool done = future->done;
    rft_unlock(&future->offloader->lock);
    return done;
}

/* Is joining the same as waiting? With offload.verify nobody goes on before the digests agree. */
static bool joins_by_waiting(const refit_future *future, refit_stream_ref stream)
{
    return stream.native == NULL || future->offloader->config.offload_verify;
}

refit_status refit_future_join(refit_future *future, refit_stream_ref stream, refit_error *error)
{
    RFT_REFUSE_IF(future == NULL, error, REFIT_ERR_INVALID, "there is no future to join");
    refit_offloader *offloader = future->offloader;
    if (joins_by_waiting(future, stream)) {
        return refit_future_wait(future, offloader->config.offload_timeout_ms, error);
    }
    rft_lock(&offloader->lock);
    rft_operation_notice(offloader);
    glance now = look(future, RFT_ALL_GROUPS);
    refit_status status = now.done ? answer(&now, error) : rft_mover_join(now.mover, stream, error);
    rft_unlock(&offloader->lock);
    return status;
}

refit_status refit_future_join_group(refit_future *future, uint32_t group, refit_stream_ref stream,
                                     refit_error *error)
{
    RFT_TRY(check_group(future, group, error));
    refit_offloader *offloader = future->offloader;
    if (joins_by_waiting(future, stream)) {
        return refit_future_wait_group(future, group, offloader->config.offload_timeout_ms, error);
    }
    rft_lock(&offloader->lock);
    rft_operation_notice(offloader);
    glance now = look(future, UINT64_C(1) << group);
    refit_status status =
        now.done ? answer(&now, error) : rft_mover_join_group(now.mover, group, stream, error);
    rft_unlock(&offloader->lock);
    return status;
}
