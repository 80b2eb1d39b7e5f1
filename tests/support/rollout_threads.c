/* Workers as threads. Nothing is asserted on them: the test's own thread looks at what they saw. */
#include "tests/support/rollout_threads.h"
#include "tests/support/test.h"

#include <stdlib.h>

#include "base/clock.h"
#include "kernels/digest.h"

#define WAIT_MS         50000u
#define ROLLOUT_TENSORS 32u /* of a version, at most */

static uint64_t add_tensor(uint64_t digest, uint32_t index, const refit_tensor *tensor,
                           const void *bytes)
{
    uint64_t sum = rft_digest_part(bytes, tensor->bytes, 0);
    return digest + (index + 1) * rft_digest_finish(sum, tensor->bytes);
}

uint64_t rollouts_digest(const refit_tensor *tensors, uint32_t count, const void *const *bytes)
{
    uint64_t digest = 0;
    for (uint32_t i = 0; i < count; i++)
        digest = add_tensor(digest, i, &tensors[i], bytes[i]);
    return digest;
}

/* Bytes of a device are fetched to where they can be read. */
static uint64_t add_fetched(refit_device *device, uint64_t digest, uint32_t index,
                            const refit_tensor *tensor, const void *bytes)
{
    void *here = malloc(tensor->bytes + 1);
    refit_status status = here == NULL ? REFIT_ERR_HOST_MEMORY
                                       : refit_stream_copy(device, REFIT_STREAM_NONE, here, bytes,
                                                           tensor->bytes, NULL);
    digest = status == REFIT_OK ? add_tensor(digest, index, tensor, here) : 0;
    free(here);
    return digest;
}

/* Where an update's tensors are. */
typedef struct update_view {
    refit_device *device;
    uint32_t count;
    refit_tensor tensors[ROLLOUT_TENSORS];
    const void *bytes[ROLLOUT_TENSORS];
    void *engine; /* memory of the device that a streamed version is copied to */
} update_view;

/* By the pieces, as a loader of the user's own would. */
static refit_status load_pieces(const update_view *view, refit_update *update)
{
    const refit_piece *pieces;
    uint32_t count = 0;
    do {
        RFT_TRY(refit_update_next_pieces(update, WAIT_MS, &pieces, &count, NULL));
        for (uint32_t i = 0; i < count; i++) {
            const unsigned char *base = view->bytes[pieces[i].tensor];
            unsigned char *engine = view->engine;
            RFT_TRY(refit_stream_copy(view->device, REFIT_STREAM_NONE,
                                      engine + (base - (const unsigned char *)engine) +
                                          pieces[i].offset,
                                      pieces[i].memory, pieces[i].bytes, NULL));
        }
    } while (count > 0);
    return REFIT_OK;
}

static refit_status load_targets(const update_view *view, refit_update *update)
{
    refit_target targets[ROLLOUT_TENSORS];
    unsigned char *engine = view->engine;
    for (uint32_t i = 0; i < view->count; i++) {
        const unsigned char *base = view->bytes[i];
        targets[i] = (refit_target){i, engine + (base - (const unsigned char *)engine),
                                    view->tensors[i].bytes, NULL};
    }
    return refit_update_copy(update, targets, view->count, REFIT_STREAM_NONE, NULL);
}

/* Into memory of the worker's own, in both ways by turns. */
static void view_load(update_view *view, refit_update *update)
{
    uint64_t bytes = 0;
    refit_status status = REFIT_OK;
    view->count = refit_update_count(update);
    for (uint32_t i = 0; i < view->count && status == REFIT_OK; i++) {
        view->tensors[i].size = sizeof *view->tensors;
        status = refit_update_tensor(update, i, &view->tensors[i], NULL, NULL);
        bytes += view->tensors[i].bytes + 64;
    }
    if (status == REFIT_OK) status = refit_memory_alloc(view->device, bytes, &view->engine, NULL);
    unsigned char *at = view->engine;
    for (uint32_t i = 0; i < view->count && status == REFIT_OK; i++) {
        uint32_t alias = view->tensors[i].alias_of;
        view->bytes[i] = alias == REFIT_NO_ALIAS ? at : view->bytes[alias];
        at += (view->tensors[i].bytes + 63) / 64 * 64;
    }
    if (status == REFIT_OK)
        status = refit_update_version(update) % 2 == 0 ? load_targets(view, update)
                                                       : load_pieces(view, update);
    if (status != REFIT_OK) view->count = 0;
}

static refit_status view_close(const update_view *view)
{
    if (view->engine == NULL) return REFIT_OK;
    return refit_memory_free(view->device, view->engine, NULL);
}

static void view_open(update_view *view, refit_update *update)
{
    *view = (update_view){.device = refit_update_device(update)};
    if (refit_update_is_streamed(update)) {
        view_load(view, update);
        return;
    }
    uint32_t count = refit_update_count(update);
    for (; count <= ROLLOUT_TENSORS && view->count < count; view->count++) {
        refit_tensor *tensor = &view->tensors[view->count];
        tensor->size = sizeof *tensor;
        if (refit_update_tensor(update, view->count, tensor, &view->bytes[view->count], NULL) !=
            REFIT_OK)
            return;
    }
}

static uint64_t view_digest(const update_view *view)
{
    uint64_t digest = 0;
    for (uint32_t i = 0; i < view->count; i++)
        digest = view->device == NULL
                     ? add_tensor(digest, i, &view->tensors[i], view->bytes[i])
                     : add_fetched(view->device, digest, i, &view->tensors[i], view->bytes[i]);
    return digest;
}

/* Keeps the update open, and looks at the end whether it is still what it was. A worker may not
 * look there on a GPU, but what the publisher has copied stays for as long as the update is open.
 */
static void keep(rollout_thread *member, const update_view *view, uint64_t digest)
{
    while (!member->let_go)
        rft_cond_wait_idle(&member->changed, &member->lock);
    member->torn = member->torn || view_digest(view) != digest;
}

static void handle(rollout_thread *member, refit_update *update)
{
    update_view view;
    view_open(&view, update);
    uint64_t digest = view_digest(&view);
    rft_lock(&member->lock);
    rollout_action action = member->action;
    rft_unlock(&member->lock);
    refit_status status = REFIT_OK;
    if (action == ROLLOUT_ACCEPT || action == ROLLOUT_KEEP)
        status = refit_update_accept(update, NULL);
    if (action == ROLLOUT_REFUSE_KEPT) status = refit_update_refuse(update, "not today", 1, NULL);
    if (action == ROLLOUT_REFUSE_LOST) status = refit_update_refuse(update, "half loaded", 0, NULL);
    rft_lock(&member->lock);
    if (status == REFIT_OK && member->count < ROLLOUT_VERSIONS) {
        member->versions[member->count] = refit_update_version(update);
        member->on_device[member->count] = refit_update_device(update) != NULL;
        member->streamed[member->count] = refit_update_is_streamed(update) != 0;
        member->digests[member->count++] = digest;
    }
    rft_cond_wake_all(&member->changed);
    if (action == ROLLOUT_KEEP) keep(member, &view, digest);
    rft_unlock(&member->lock);
    refit_update_close(update);
    if (view_close(&view) != REFIT_OK) abort();
}

static void *work(void *user)
{
    rollout_thread *member = user;
    refit_status status = REFIT_OK;
    while (status == REFIT_OK || status == REFIT_ERR_TIMEOUT) {
        refit_update *update = NULL;
        status = refit_subscriber_next(member->subscriber, WAIT_MS, &update, NULL);
        if (status == REFIT_OK) handle(member, update);
    }
    rft_lock(&member->lock);
    member->end = status;
    rft_cond_wake_all(&member->changed);
    rft_unlock(&member->lock);
    return NULL;
}

static refit_status open_on(rollout_thread *member, const char *endpoint,
                            const refit_config *config, refit_device *device, rollout_action action,
                            refit_error *error)
{
    refit_status status;
    memset(member, 0, sizeof *member);
    member->action = action;
    RFT_TRY(rft_mutex_open(&member->lock, error));
    RFT_TRY_GOTO(rft_cond_open(&member->changed, error), undo_lock);
    RFT_TRY_GOTO(refit_subscriber_open(endpoint, config, &member->subscriber, error), undo_cond);
    if (device != NULL) {
        RFT_TRY_GOTO(refit_subscriber_use_device(member->subscriber, device, error),
                     undo_subscriber);
    }
    RFT_TRY_GOTO(rft_thread_start(&member->thread, "rollouts", work, member, error),
                 undo_subscriber);
    return REFIT_OK;

undo_subscriber:
    refit_subscriber_close(member->subscriber);
    member->subscriber = NULL;
undo_cond:
    rft_cond_close(&member->changed);
undo_lock:
    rft_mutex_close(&member->lock);
    return status;
}

refit_status rollouts_open(rollout_thread *member, const char *endpoint, const refit_config *config,
                           rollout_action action, refit_error *error)
{
    return open_on(member, endpoint, config, NULL, action, error);
}

void rollouts_start_on(rollout_thread *member, const char *endpoint, const refit_config *config,
                       refit_device *device, rollout_action action)
{
    assert_done(open_on(member, endpoint, config, device, action, error));
}

void rollouts_start(rollout_thread *member, const char *endpoint, const refit_config *config,
                    rollout_action action)
{
    rollouts_start_on(member, endpoint, config, NULL, action);
}

void rollouts_stop(rollout_thread *member)
{
    rollouts_let_go(member);
    refit_subscriber_wake(member->subscriber);
    rft_thread_join(member->thread);
    refit_subscriber_close(member->subscriber);
    rft_cond_close(&member->changed);
    rft_mutex_close(&member->lock);
}

void rollout_set_action(rollout_thread *member, rollout_action action)
{
    rft_lock(&member->lock);
    member->action = action;
    member->let_go = false;
    rft_unlock(&member->lock);
}

void rollouts_let_go(rollout_thread *member)
{
    rft_lock(&member->lock);
    member->let_go = true;
    rft_cond_wake_all(&member->changed);
    rft_unlock(&member->lock);
}

/* The lock is held. */
static uint32_t count_of(const rollout_thread *member, uint64_t version, uint64_t *digest)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < member->count; i++) {
        if (member->versions[i] != version) continue;
        *digest = member->digests[i];
        count++;
    }
    return count;
}

uint64_t rollouts_wait(rollout_thread *member, uint64_t version, uint32_t times)
{
    int64_t deadline = rft_deadline(WAIT_MS);
    uint64_t digest = 0;
    rft_lock(&member->lock);
    bool in_time = true;
    while (in_time && member->end == REFIT_OK && count_of(member, version, &digest) < times)
        in_time = rft_cond_wait(&member->changed, &member->lock, deadline);
    refit_status end = member->end;
    rft_unlock(&member->lock);
    if (!in_time || end != REFIT_OK) {
        fail_msg("a worker did not see version %llu (%s)", (unsigned long long)version,
                 refit_status_name(end));
    }
    return digest;
}

refit_status rollouts_end(rollout_thread *member)
{
    rft_lock(&member->lock);
    refit_status end = member->end;
    rft_unlock(&member->lock);
    return end;
}

/* One flag of the last update of that version. */
static bool flag_of(rollout_thread *member, uint64_t version, const bool *flags)
{
    bool found = false;
    rft_lock(&member->lock);
    for (uint32_t i = 0; i < member->count; i++) {
        if (member->versions[i] == version) found = flags[i];
    }
    rft_unlock(&member->lock);
    return found;
}

bool rollouts_was_on_device(rollout_thread *member, uint64_t version)
{
    return flag_of(member, version, member->on_device);
}

bool rollouts_was_streamed(rollout_thread *member, uint64_t version)
{
    return flag_of(member, version, member->streamed);
}

uint32_t rollouts_count(rollout_thread *member, uint64_t version)
{
    uint64_t digest;
    rft_lock(&member->lock);
    uint32_t count = count_of(member, version, &digest);
    rft_unlock(&member->lock);
    return count;
}
