/*
 * One operation, an offload or a restore, from its start to its end. The copies end by themselves;
 * the first call that notices moves the places, the state, the figures and the futures under one
 * lock.
 *
 *   begin ──► under way ──notice (never waits), wait──► [digests] ──► end
 *
 * With offload.verify only a call that waits ends an operation, because digests take time: so no
 * call learns of the end before the digests are compared. Does not know how copies are made.
 */
#include <inttypes.h>

#include "base/clock.h"
#include "kernels/digest.h"
#include "offload/masters.h"
#include "offload/offloader.h"

/* ---- Digests (offload.verify) ----------------------------------------------------------------
 * A digest of each region is taken as it leaves, and compared when it is back.
 *
 * The digest is that of the device's bytes, taken by the CPU where it can read them and by the
 * device elsewhere: during an offload the image must match it before it counts, during a restore
 * the device must. On a device that can do neither (a GPU whose kernels could not be loaded) it is
 * the image's both times, which still finds host memory that changed meanwhile. Moves nothing.
 */

static uint64_t digest_of(const void *bytes, uint64_t count)
{
    return rft_digest_finish(rft_digest_part(bytes, count, 0), count);
}

/* The digest of the device's bytes, or of the image's where the device's cannot be read. */
static refit_status digest_device(const refit_offloader *offloader, const rft_region *region,
                                  uint64_t *digest, refit_error *error)
{
    uint64_t sum = 0;
    bool readable = offloader->caps.host_addressable;
    if (readable || !offloader->caps.digests) {
        *digest =
            digest_of(readable ? region->memory : rft_image_of(offloader, region), region->bytes);
        return REFIT_OK;
    }
    refit_status status = rft_device_digest(offloader->device, REFIT_STREAM_NONE, region->memory,
                                            region->bytes, 0, &sum, error);
    /* To the caller of wait TIMEOUT means to wait again; this operation is over. */
    RFT_REFUSE_IF(status == REFIT_ERR_TIMEOUT, error, REFIT_ERR_DEVICE,
                  "region %s could not be verified: the device has not read it within "
                  "offload.timeout_ms",
                  region->name);
    *digest = rft_digest_finish(sum, region->bytes);
    return status;
}

/* Are the bytes that arrived those that left? REFIT_ERR_CORRUPT, or the failure of a digest. */
static refit_status check_region(const refit_offloader *offloader, rft_direction direction,
                                 rft_region *region, refit_error *error)
{
    uint64_t device = 0;
    if (direction == RFT_RESTORE && region->rewritten && region->coded) {
        return rft_masters_compare(offloader, region, error);
    }
    RFT_TRY(digest_device(offloader, region, &device, error));
    if (direction == RFT_OFFLOAD) region->digest = device;
    if (direction == RFT_RESTORE &&
        region->rewritten) { /* what left is not in the image any more */
        region->digest = digest_of(rft_image_of(offloader, region), region->bytes);
    }
    if (direction == RFT_OFFLOAD && region->coded) {
        return rft_masters_compare(offloader, region, error);
    }
    uint64_t arrived = direction == RFT_OFFLOAD
                           ? digest_of(rft_image_of(offloader, region), region->bytes)
                           : device;
    RFT_REFUSE_IF(arrived != region->digest, error, REFIT_ERR_CORRUPT,
                  "region %s (%" PRIu64 " bytes) does not match its digest: host memory or a copy "
                  "is at fault",
                  region->name, region->bytes);
    return REFIT_OK;
}

/* Did the operation move this region? Places change only when it ends. */
static bool is_moved(const rft_region *region, rft_direction direction)
{
    refit_place from = direction == RFT_OFFLOAD ? REFIT_ON_DEVICE : REFIT_ON_HOST;
    return region->policy == REFIT_KEEP && region->place == from;
}

static void note(const rft_region *region, const refit_error *why, rft_operation *found)
{
    if (found->corrupt == 0) found->corruption = *why;
    found->corrupt |= UINT64_C(1) << region->group;
}

/* Takes or compares the digests of what operation `number` moves in `groups`. Nothing if it has
 * ended. `verify_lock` held. */
static void check_groups(refit_offloader *offloader, uint64_t number, uint64_t groups)
{
    rft_lock(&offloader->lock);
    bool moving = rft_offloader_is_moving(offloader) && offloader->operation.number == number;
    rft_operation found = offloader->operation;
    rft_unlock(&offloader->lock);
    if (!moving) return;

    uint64_t todo = groups & ~found.verified_groups & ~found.corrupt;
    for (uint32_t id = 0; id < offloader->regions.count; id++) {
        rft_region *region = &offloader->regions.items[id];
        if ((todo >> region->group & 1) == 0 || !is_moved(region, found.direction)) continue;
        refit_error why;
        refit_status status = check_region(offloader, found.direction, region, &why);
        if (status != REFIT_OK) note(region, &why, &found);
    }

    rft_lock(&offloader->lock);
    offloader->operation.verified_groups |= groups;
    offloader->operation.corrupt = found.corrupt;
    offloader->operation.corruption = found.corruption;
    rft_unlock(&offloader->lock);
}

/* Reads the results on masters that the operation under way moved in `groups`, whose copies are
 * over. Lock held. */
static void check_masters(refit_offloader *offloader, uint64_t groups)
{
    rft_operation *operation = &offloader->operation;
    uint64_t todo = groups & ~operation->checked_groups;
    if (offloader->schedule.chunks == 0) return;
    operation->checked_groups |= groups;
    for (uint32_t id = 0; id < offloader->regions.count; id++) {
        rft_region *region = &offloader->regions.items[id];
        if ((todo >> region->group & 1) == 0 || !region->coded) continue;
        if (!is_moved(region, operation->direction)) continue;
        refit_error why;
        bool out = operation->direction == RFT_OFFLOAD;
        refit_status status = rft_masters_check(offloader, region, out, &why);
        if (status != REFIT_OK) note(region, &why, operation);
    }
}

/* Does the same without the lock; nothing if operation `number` has ended. */
static void check_masters_of_group(refit_offloader *offloader, uint64_t number, uint64_t groups)
{
    rft_lock(&offloader->lock);
    if (rft_offloader_is_moving(offloader) && offloader->operation.number == number) {
        check_masters(offloader, groups);
    }
    rft_unlock(&offloader->lock);
}

/* ---- What the state says ------------------------------------------------------------------ */

bool rft_offloader_is_moving(const refit_offloader *offloader)
{
    return offloader->state == REFIT_OFFLOADING || offloader->state == REFIT_RESTORING;
}

bool rft_offloader_is_away(const refit_offloader *offloader)
{
    for (uint32_t id = 0; id < offloader->regions.count; id++) {
        if (offloader->regions.items[id].place == REFIT_ON_HOST) return true;
    }
    return false;
}

refit_status rft_offloader_check_movers(refit_offloader *offloader, refit_error *error)
{
    for (int direction = RFT_OFFLOAD; direction <= RFT_RESTORE; direction++) {
        rft_mover *mover = offloader->movers[direction];
        if (mover != NULL) RFT_TRY(rft_mover_check(mover, error));
    }
    return REFIT_OK;
}

/* ---- Start and end ------------------------------------------------------------------------ */

static void lock_checking(refit_offloader *offloader)
{
    if (offloader->config.offload_verify) rft_lock(&offloader->verify_lock);
}

static void unlock_checking(refit_offloader *offloader)
{
    if (offloader->config.offload_verify) rft_unlock(&offloader->verify_lock);
}

static void move_places(refit_offloader *offloader, uint64_t groups)
{
    rft_direction direction = offloader->operation.direction;
    refit_place there = direction == RFT_OFFLOAD ? REFIT_ON_HOST : REFIT_ON_DEVICE;
    for (uint32_t id = 0; id < offloader->regions.count; id++) {
        rft_region *region = &offloader->regions.items[id];
        if ((groups >> region->group & 1) == 0 || region->place == there) continue;
        region->place = there;
        region->rewritten = false;
        region->imaged = region->reuse && (direction == RFT_OFFLOAD || region->imaged);
        region->unchanged = false;
    }
}

static void count_end(refit_offloader *offloader, refit_status status)
{
    const rft_operation *operation = &offloader->operation;
    rft_offload_figures *figures = &offloader->figures;
    if (status != REFIT_OK) {
        figures->failures++;
        return;
    }
    int64_t ended = operation->mover == NULL ? 0 : rft_mover_finished_at(operation->mover);
    if (ended == 0) ended = rft_now();
    figures->count[operation->direction]++;
    figures->bytes_total[operation->direction] += operation->bytes;
    figures->bytes_last[operation->direction] = operation->bytes;
    figures->last[operation->direction] = ended - operation->began;
    if (operation->direction == RFT_OFFLOAD) figures->copies_last = operation->copies;
}

static void end_futures(refit_offloader *offloader, uint64_t groups)
{
    for (uint32_t at = 0; at < RFT_FUTURES; at++) {
        refit_future *future = &offloader->futures[at];
        if (!future->taken || future->operation != offloader->operation.number) continue;
        future->done = true;
        future->good_groups = groups;
        future->end = offloader->operation.failure;
    }
}

/* The copies ended with `status`. Lock held, and `verify_lock` with offload.verify. */
static void end_operation(refit_offloader *offloader, refit_status status,
                          const refit_error *detail)
{
    rft_operation *operation = &offloader->operation;
    bool out = operation->direction == RFT_OFFLOAD;
    if (status == REFIT_OK) check_masters(offloader, RFT_ALL_GROUPS);
    uint64_t groups = status == REFIT_OK ? ~operation->corrupt : 0;
    if (status == REFIT_OK && operation->corrupt != 0) {
        status = (refit_status)operation->corruption.status;
        detail = &operation->corruption;
    }
    if (status != REFIT_OK) {
        operation->failure = *detail;
        operation->failure.status = (int32_t)status;
        if (out) groups = 0;
    }
    move_places(offloader, groups);
    if (groups == RFT_ALL_GROUPS) rft_schedule_moved(&offloader->schedule);
    count_end(offloader, status);
    end_futures(offloader, groups);
    rft_pageable_trim(offloader);
    if (status != REFIT_OK) {
        offloader->state = REFIT_FAILED;
    } else {
        offloader->state = out ? REFIT_OFFLOADED : REFIT_RESIDENT;
    }
}

/* The copies of `number` ended with `status`: ends it, unless another thread has. */
static void conclude(refit_offloader *offloader, uint64_t number, refit_status status,
                     const refit_error *detail)
{
    lock_checking(offloader);
    if (offloader->config.offload_verify && status == REFIT_OK) {
        check_masters_of_group(offloader, number, RFT_ALL_GROUPS);
        check_groups(offloader, number, RFT_ALL_GROUPS);
    }
    rft_lock(&offloader->lock);
    if (rft_offloader_is_moving(offloader) && offloader->operation.number == number) {
        end_operation(offloader, status, detail);
    }
    rft_unlock(&offloader->lock);
    unlock_checking(offloader);
}

void rft_operation_begin(refit_offloader *offloader, const rft_operation *operation,
                         refit_future *future)
{
    rft_lock(&offloader->lock);
    uint64_t number = offloader->operation.number + 1;
    offloader->operation = *operation;
    offloader->operation.number = number;
    offloader->state = operation->direction == RFT_OFFLOAD ? REFIT_OFFLOADING : REFIT_RESTORING;
    offloader->figures.blocked[operation->direction] = rft_now() - operation->began;
    if (operation->direction == RFT_OFFLOAD) offloader->figures.reclaimed_last = 0;
    if (future != NULL) future->operation = number;
    rft_unlock(&offloader->lock);
    if (operation->mover == NULL) conclude(offloader, number, REFIT_OK, NULL);
}

refit_status rft_operation_not_begun(refit_offloader *offloader, refit_future *future,
                                     refit_status status)
{
    refit_future_close(future);
    rft_lock(&offloader->lock);
    offloader->figures.failures++;
    rft_unlock(&offloader->lock);
    return status;
}

/* Did a wait for the mover find that the copies have ended? */
static bool is_over(refit_status status)
{
    return status == REFIT_OK || status == REFIT_ERR_DEVICE;
}

void rft_operation_notice(refit_offloader *offloader)
{
    rft_mover *mover = offloader->operation.mover;
    bool moving = rft_offloader_is_moving(offloader) && mover != NULL;
    if (!moving || offloader->config.offload_verify) return;
    refit_error detail = {0};
    refit_status status = rft_mover_wait(mover, 0, &detail);
    if (is_over(status)) end_operation(offloader, status, &detail);
}

/* Is `number` under way, and by which mover? */
static rft_mover *mover_of(refit_offloader *offloader, uint64_t number)
{
    rft_lock(&offloader->lock);
    bool moving = rft_offloader_is_moving(offloader) && offloader->operation.number == number;
    rft_mover *mover = moving ? offloader->operation.mover : NULL;
    rft_unlock(&offloader->lock);
    return mover;
}

refit_status rft_operation_wait(refit_offloader *offloader, uint64_t number, uint32_t timeout_ms,
                                refit_error *error)
{
    rft_mover *mover = mover_of(offloader, number);
    if (mover == NULL) return REFIT_OK;
    int64_t began = rft_now();
    refit_error detail = {0};
    refit_status status = rft_mover_wait(mover, timeout_ms, &detail);
    bool over = is_over(status);
    if (over) conclude(offloader, number, status, &detail);
    rft_operation_count_blocked(offloader, number, began);
    if (over || mover_of(offloader, number) == NULL) return REFIT_OK;
    RFT_REFUSE_IF(status == REFIT_ERR_TIMEOUT, error, REFIT_ERR_TIMEOUT,
                  "copies are still under way after %u ms: wait again", timeout_ms);
    if (error != NULL) *error = detail;
    return status;
}

void rft_operation_count_blocked(refit_offloader *offloader, uint64_t number, int64_t began)
{
    int64_t spent = rft_now() - began;
    rft_lock(&offloader->lock);
    if (offloader->operation.number == number) {
        offloader->figures.blocked[offloader->operation.direction] += spent;
    }
    rft_unlock(&offloader->lock);
}

/* ---- Futures ---------------------------------------------------------------------------------
 * A caller's hold on one operation. They come from a pool inside the offloader. When an operation
 * ends, its status is written into each of its futures. From then on they need neither it nor its
 * mover, so a future outlives the next operation. Does not end operations by itself.
 */

refit_status rft_future_take(refit_offloader *offloader, bool next, refit_future **out,
                             refit_error *error)
{
    for (uint32_t at = 0; at < RFT_FUTURES; at++) {
        refit_future *future = &offloader->futures[at];
        if (future->taken) continue;
        bool over = !next && !rft_offloader_is_moving(offloader);
        *future = (refit_future){.offloader = offloader,
                                 .operation = offloader->operation.number + (next ? 1 : 0),
                                 .taken = true,
                                 .done = over,
                                 .good_groups = over ? RFT_ALL_GROUPS : 0};
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
typedef struct future_view {
    bool done;
    bool arrived; /* the groups that were asked for */
    refit_error end;
    uint64_t operation;
    rft_mover *mover;
} future_view;

/* Lock held. */
static future_view look(const refit_future *future, uint64_t groups)
{
    return (future_view){.done = future->done,
                         .arrived = (future->good_groups & groups) == groups,
                         .end = future->end,
                         .operation = future->operation,
                         .mover = future->offloader->operation.mover};
}

static future_view look_locked(const refit_future *future, uint64_t groups)
{
    rft_lock(&future->offloader->lock);
    future_view now = look(future, groups);
    rft_unlock(&future->offloader->lock);
    return now;
}

/* What a wait for `groups` of a done future answers. */
static refit_status answer(const future_view *now, refit_error *error)
{
    if (now->arrived || now->end.status == REFIT_OK) return REFIT_OK;
    if (error != NULL) *error = now->end;
    return (refit_status)now->end.status;
}

refit_status refit_future_wait(refit_future *future, uint32_t timeout_ms, refit_error *error)
{
    RFT_REFUSE_IF(future == NULL, error, REFIT_ERR_INVALID, "there is no future to wait for");
    future_view now = look_locked(future, RFT_ALL_GROUPS);
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

/* Has the group that just arrived kept its bytes, as far as is looked for? */
static refit_status verify_group(refit_offloader *offloader, uint64_t number, uint64_t groups,
                                 refit_error *error)
{
    lock_checking(offloader);
    check_masters_of_group(offloader, number, groups);
    if (offloader->config.offload_verify) check_groups(offloader, number, groups);
    rft_lock(&offloader->lock);
    bool corrupt =
        offloader->operation.number == number && (offloader->operation.corrupt & groups) != 0;
    refit_error found = offloader->operation.corruption;
    rft_unlock(&offloader->lock);
    unlock_checking(offloader);
    if (corrupt && error != NULL) *error = found;
    return corrupt ? (refit_status)found.status : REFIT_OK;
}

refit_status refit_future_wait_group(refit_future *future, uint32_t group, uint32_t timeout_ms,
                                     refit_error *error)
{
    RFT_TRY(check_group(future, group, error));
    uint64_t groups = UINT64_C(1) << group;
    future_view now = look_locked(future, groups);
    if (now.done) return answer(&now, error);

    int64_t began = rft_now();
    refit_error detail = {0};
    refit_status status = rft_mover_wait_group(now.mover, group, timeout_ms, &detail);
    if (status == REFIT_OK) {
        status = verify_group(future->offloader, now.operation, groups, &detail);
    }
    rft_operation_count_blocked(future->offloader, now.operation, began);

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

/* Is joining the same as waiting? With offload.verify no caller goes on before the digests agree,
 * nor before masters were found to be decoded. */
static bool joins_by_waiting(const refit_future *future, refit_stream_ref stream)
{
    refit_offloader *offloader = future->offloader;
    if (stream.native == NULL || offloader->config.offload_verify) return true;
    rft_lock(&offloader->lock);
    bool decodes = !future->done && offloader->operation.decodes;
    rft_unlock(&offloader->lock);
    return decodes;
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
    future_view now = look(future, RFT_ALL_GROUPS);
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
    future_view now = look(future, UINT64_C(1) << group);
    refit_status status =
        now.done ? answer(&now, error) : rft_mover_join_group(now.mover, group, stream, error);
    rft_unlock(&offloader->lock);
    return status;
}
