/*
 * The refit cycle: one state machine over the offloaders, one for each device, and the publisher.
 *
 *           offload          publish
 *   TRAINING ─────► CLEARED ─────────► REFITTED
 *      ▲               │ restore           │
 *      │ wait          ▼          restore  │
 *      └────────── RETURNING ◄─────────────┘
 *
 * From TRAINING, restore leads to RETURNING only after an offload that failed with states on their
 * way.
 *
 *   state       the states (each offloader)                the workers
 *   TRAINING    on the device; after a wait of a stream    hold some version
 *               perhaps still arriving ahead of its work
 *   CLEARED     in the image; memory given back, unless    hold the version before
 *               the last offload said otherwise
 *   REFITTED    as in CLEARED                              hold the new version
 *   RETURNING   arriving; after a failure partly away      as before
 *
 * The controller keeps no record of where the states are: it asks the offloader each time. So a
 * verb finds the true state after a phase that failed half-way, and after a caller that used the
 * offloader directly. A verb starts its work on all devices before it waits for one, and goes on
 * with the others where one fails: it returns the first failure, and the same verb called again
 * finds what is left to do. Independent of how states move and of how weights travel.
 */
#include <inttypes.h>
#include <stdbool.h>
#include <string.h>

#include <refit/controller.h>

#include "base/alloc.h"
#include "base/clock.h"
#include "base/error.h"
#include "config/config.h"
#include "offload/offloader.h"

typedef enum phase {
    PHASE_OFFLOAD,
    PHASE_PUBLISH,
    PHASE_RESTORE,
    PHASE_WAIT,
    PHASES,
} phase;

/* The figures of cycles. A cycle begins with an offload in TRAINING and ends with the wait. */
typedef struct cycle {
    bool open;
    bool failed; /* a phase has */
    int64_t began;
    int64_t blocked;        /* nanoseconds in the verbs so far */
    int64_t phases[PHASES]; /* nanoseconds in each phase's verb so far */
    uint64_t completed;
    uint64_t failures;       /* cycles in which a phase failed */
    int64_t last_seconds_ns; /* of the last cycle that completed */
    int64_t last_blocked_ns;
} cycle;

/* One device's part in the cycle. */
typedef struct member {
    refit_offloader *offloader; /* borrowed */
    bool has_stream;            /* `stream` stands for the one that a verb is given */
    refit_stream_ref stream;
    refit_future *returning; /* owned; of the restore, until it is joined */
} member;

/* Used by one thread at a time. */
struct refit_controller {
    member *members; /* none: nothing leaves */
    uint32_t count;
    refit_publisher *publisher; /* borrowed; NULL: nothing is published */
    refit_config config;
    refit_controller_state state;
    cycle cycle;
};

/* What a verb does on one device, before `deadline` (rft_now) if it waits. */
typedef refit_status (*member_verb)(member *on, refit_stream_ref stream, int64_t deadline,
                                    refit_error *error);

/* Does it on all devices, also where it fails on one; returns the first failure. `stream` is for
 * the offloader that has none of its own. */
static refit_status for_members(refit_controller *controller, member_verb verb,
                                refit_stream_ref stream, refit_error *error)
{
    int64_t deadline = rft_deadline(controller->config.offload_timeout_ms);
    refit_status first = REFIT_OK;
    for (uint32_t at = 0; at < controller->count; at++) {
        member *on = &controller->members[at];
        refit_status status = verb(on, on->has_stream ? on->stream : stream, deadline,
                                   first == REFIT_OK ? error : NULL);
        if (first == REFIT_OK) first = status;
    }
    return first;
}

static uint32_t ms_until(int64_t deadline)
{
    return (uint32_t)rft_ms_until(deadline);
}

/* ---- Figures: each verb records its time and its status. Time between the verbs belongs to the
 * cycle but is not blocked: the caller did other work. */

static void begin_cycle(cycle *on, int64_t began)
{
    on->open = true;
    on->failed = false;
    on->began = began;
    on->blocked = 0;
    memset(on->phases, 0, sizeof on->phases);
}

/* A phase that `began` (rft_now) has returned `status`, which is passed on. */
static refit_status count_phase(cycle *on, phase which, int64_t began, refit_status status)
{
    int64_t spent = rft_now() - began;
    /* A verb may be called again, to go on or without effect. */
    on->phases[which] = (on->open ? on->phases[which] : 0) + spent;
    on->blocked += spent;
    if (status != REFIT_OK && on->open && !on->failed) {
        on->failed = true;
        on->failures++;
    }
    return status;
}

/* The states are joined. */
static void end_cycle(cycle *on)
{
    if (!on->open) return;
    on->open = false;
    on->completed++;
    on->last_seconds_ns = rft_now() - on->began;
    on->last_blocked_ns = on->blocked;
}

/* ---- Opening and closing */

static refit_controller_state first_state(refit_offloader *offloader)
{
    switch (refit_offloader_get_state(offloader)) {
    case REFIT_OFFLOADED:
    case REFIT_FAILED: return REFIT_CLEARED;
    case REFIT_RESTORING: return REFIT_RETURNING;
    default: return REFIT_TRAINING;
    }
}

static member *find_member(refit_controller *controller, const refit_offloader *offloader)
{
    for (uint32_t at = 0; at < controller->count; at++) {
        if (controller->members[at].offloader == offloader) return &controller->members[at];
    }
    return NULL;
}

static refit_status append(refit_controller *controller, const member *added, refit_error *error)
{
    uint32_t count = controller->count + 1;
    member *grown = rft_realloc(controller->members, count, sizeof *grown);
    RFT_REFUSE_IF(grown == NULL, error, REFIT_ERR_HOST_MEMORY,
                  "no host memory for one more offloader in a controller");
    grown[controller->count] = *added;
    controller->members = grown;
    controller->count = count;
    return REFIT_OK;
}

refit_status refit_controller_open(refit_offloader *offloader, refit_publisher *publisher,
                                   const refit_config *config, refit_controller **out,
                                   refit_error *error)
{
    RFT_REFUSE_IF(
        out == NULL || (offloader == NULL && publisher == NULL), error, REFIT_ERR_INVALID,
        "a controller needs an offloader, a publisher or both, and a place for the result");
    refit_config own;
    RFT_TRY(rft_config_resolve(config, &own, error));
    if (offloader != NULL) RFT_TRY(refit_offloader_seal(offloader, error));
    refit_controller *controller = rft_calloc(1, sizeof *controller);
    RFT_REFUSE_IF(controller == NULL, error, REFIT_ERR_HOST_MEMORY,
                  "no host memory for a controller");
    controller->publisher = publisher;
    controller->config = own;
    controller->state = REFIT_TRAINING;
    if (offloader != NULL) {
        refit_status status = append(controller, &(member){.offloader = offloader}, error);
        if (status != REFIT_OK) {
            refit_controller_close(controller);
            return status;
        }
        controller->state = first_state(offloader);
    }
    *out = controller;
    return REFIT_OK;
}

refit_status refit_controller_add(refit_controller *controller, refit_offloader *offloader,
                                  refit_stream_ref stream, refit_error *error)
{
    RFT_REFUSE_IF(controller == NULL || offloader == NULL, error, REFIT_ERR_INVALID,
                  "refit_controller_add needs a controller and an offloader");
    member *known = find_member(controller, offloader);
    if (known != NULL) {
        known->has_stream = true;
        known->stream = stream;
        return REFIT_OK;
    }
    RFT_REFUSE_IF(controller->state != REFIT_TRAINING, error, REFIT_ERR_STATE,
                  "states are away (%s): call refit_controller_restore and refit_controller_wait "
                  "before another offloader is added",
                  refit_controller_state_name(controller->state));
    RFT_TRY(refit_offloader_seal(offloader, error));
    refit_offloader_state state = refit_offloader_get_state(offloader);
    RFT_REFUSE_IF(state != REFIT_RESIDENT, error, REFIT_ERR_STATE,
                  "the states of this offloader are away (%s): call refit_offloader_restore and "
                  "refit_offloader_wait before it is added",
                  refit_offloader_state_name(state));
    member added = {.offloader = offloader, .has_stream = true, .stream = stream};
    return append(controller, &added, error);
}

static void forget_future(member *on)
{
    refit_future_close(on->returning);
    on->returning = NULL;
}

void refit_controller_close(refit_controller *controller)
{
    if (controller == NULL) return;
    for (uint32_t at = 0; at < controller->count; at++) {
        forget_future(&controller->members[at]);
    }
    rft_free(controller->members);
    rft_free(controller);
}

refit_controller_state refit_controller_get_state(const refit_controller *controller)
{
    return controller == NULL ? REFIT_TRAINING : controller->state;
}

const char *refit_controller_state_name(refit_controller_state state)
{
    switch (state) {
    case REFIT_TRAINING: return "TRAINING";
    case REFIT_CLEARED: return "CLEARED";
    case REFIT_REFITTED: return "REFITTED";
    case REFIT_RETURNING: return "RETURNING";
    }
    return "UNKNOWN";
}

/* ---- offload */

/* The status of a restore that a stream was only made to wait for, which no call has returned yet.
 */
static refit_status wait_return(member *on, refit_stream_ref stream, int64_t deadline,
                                refit_error *error)
{
    (void)stream;
    if (on->returning == NULL) return REFIT_OK;
    refit_status status = refit_future_wait(on->returning, ms_until(deadline), error);
    if (status != REFIT_ERR_TIMEOUT) forget_future(on);
    return status;
}

static refit_status start_clear(member *on, refit_stream_ref stream, int64_t deadline,
                                refit_error *error)
{
    (void)deadline;
    return refit_offloader_offload(on->offloader, stream, NULL, error);
}

static refit_status finish(member *on, refit_stream_ref stream, int64_t deadline,
                           refit_error *error)
{
    (void)stream;
    return refit_offloader_wait(on->offloader, ms_until(deadline), error);
}

/* Masters that did not fit into their plan leave by the next one: nothing has left by then. One
 * that does not fit again travels whole. */
static refit_status finish_clear(member *on, refit_stream_ref stream, int64_t deadline,
                                 refit_error *error)
{
    refit_status status = finish(on, stream, deadline, error);
    while (status == REFIT_ERR_LIMIT && rft_offloader_misfits(on->offloader)) {
        RFT_TRY(refit_offloader_offload(on->offloader, stream, NULL, error));
        status = finish(on, stream, deadline, error);
    }
    return status;
}

/* Finishes the offloads that started, also where the start failed on another device: so no copy is
 * under way afterwards, unless one took too long. */
static refit_status clear_states(refit_controller *controller, refit_stream_ref after,
                                 refit_error *error)
{
    RFT_TRY(for_members(controller, wait_return, after, error));
    refit_status started = for_members(controller, start_clear, after, error);
    refit_status finished =
        for_members(controller, finish_clear, after, started == REFIT_OK ? error : NULL);
    return started != REFIT_OK ? started : finished;
}

/* Have the states left? They may have, though the offload failed. */
static bool is_cleared(const refit_controller *controller)
{
    for (uint32_t at = 0; at < controller->count; at++) {
        refit_offloader *offloader = controller->members[at].offloader;
        if (refit_offloader_get_state(offloader) != REFIT_OFFLOADED) return false;
    }
    return true;
}

refit_status refit_controller_offload(refit_controller *controller, refit_stream_ref after,
                                      refit_error *error)
{
    RFT_REFUSE_IF(controller == NULL, error, REFIT_ERR_INVALID, "there is no controller");
    RFT_REFUSE_IF(controller->state == REFIT_RETURNING, error, REFIT_ERR_STATE,
                  "states are still returning: call refit_controller_wait before the next offload");
    int64_t began = rft_now();
    if (controller->state == REFIT_TRAINING) begin_cycle(&controller->cycle, began);
    refit_status status = clear_states(controller, after, error);
    if (controller->state == REFIT_TRAINING && is_cleared(controller)) {
        controller->state = REFIT_CLEARED;
    }
    return count_phase(&controller->cycle, PHASE_OFFLOAD, began, status);
}

/* ---- publish: one version, from begin to commit, from the weights of one call. A version that
 * cannot be finished is aborted, so that the next call begins a new one and the workers keep the
 * version that they have. */

static refit_status check_publish(const refit_controller *controller, const refit_weight *weights,
                                  uint32_t count, refit_error *error)
{
    RFT_REFUSE_IF(controller == NULL, error, REFIT_ERR_INVALID, "there is no controller");
    RFT_REFUSE_IF(weights == NULL && count > 0, error, REFIT_ERR_INVALID,
                  "%" PRIu32 " weights were announced, but none given", count);
    RFT_REFUSE_IF(controller->state == REFIT_RETURNING, error, REFIT_ERR_STATE,
                  "states are still returning: call refit_controller_wait before the next publish");
    return REFIT_OK;
}

/* `*renewed`: whether the workers have the version, or may still come to have it. */
static refit_status publish(refit_publisher *publisher, uint64_t version,
                            const refit_weight *weights, uint32_t count, refit_device *device,
                            refit_stream_ref after, bool *renewed, refit_error *error)
{
    *renewed = false;
    refit_status begun = refit_publisher_begin(publisher, version, error);
    /* It may have come to be the current one while begin waited for its end. */
    *renewed = begun == REFIT_ERR_STALE && refit_publisher_version(publisher) == version;
    if (begun != REFIT_OK) return *renewed ? REFIT_OK : begun;
    uint64_t before = refit_publisher_version(publisher);
    refit_status status =
        refit_publisher_write_all(publisher, weights, count, device, after, error);
    if (status == REFIT_OK) status = refit_publisher_commit(publisher, error);
    if (status != REFIT_OK) {
        /* Refused where the commit has ended the version already: then there is none to drop. */
        refit_status dropped = refit_publisher_abort(publisher, NULL);
        (void)dropped;
    }
    *renewed = status == REFIT_OK || refit_publisher_version(publisher) != before;
    return status;
}

refit_status refit_controller_publish(refit_controller *controller, uint64_t version,
                                      const refit_weight *weights, uint32_t count,
                                      refit_device *device, refit_stream_ref after,
                                      refit_error *error)
{
    RFT_TRY(check_publish(controller, weights, count, error));
    refit_publisher *publisher = controller->publisher;
    refit_status status = REFIT_OK;
    bool renewed = true;
    int64_t began = rft_now();
    if (publisher != NULL && (version == 0 || version != refit_publisher_version(publisher))) {
        status = publish(publisher, version, weights, count, device, after, &renewed, error);
    }
    if (renewed && controller->state == REFIT_CLEARED) controller->state = REFIT_REFITTED;
    return count_phase(&controller->cycle, PHASE_PUBLISH, began, status);
}

/* ---- restore */

/* Is there anything to bring back? */
static bool is_away(const member *on)
{
    refit_offloader_state state = refit_offloader_get_state(on->offloader);
    return state == REFIT_OFFLOADING || state == REFIT_OFFLOADED || state == REFIT_FAILED;
}

static bool is_any_away(const refit_controller *controller)
{
    for (uint32_t at = 0; at < controller->count; at++) {
        if (is_away(&controller->members[at])) return true;
    }
    return false;
}

static refit_status start_return(member *on, refit_stream_ref stream, int64_t deadline,
                                 refit_error *error)
{
    if (!is_away(on)) return REFIT_OK;
    if (refit_offloader_get_state(on->offloader) == REFIT_OFFLOADING) {
        /* An offload that fails is not an obstacle: its states have not left. */
        refit_status status = refit_offloader_wait(on->offloader, ms_until(deadline), error);
        if (status == REFIT_ERR_TIMEOUT) return status;
    }
    refit_future *future;
    RFT_TRY(refit_offloader_restore(on->offloader, stream, &future, error));
    forget_future(on);
    on->returning = future;
    return REFIT_OK;
}

refit_status refit_controller_restore(refit_controller *controller, refit_stream_ref after,
                                      refit_error *error)
{
    RFT_REFUSE_IF(controller == NULL, error, REFIT_ERR_INVALID, "there is no controller");
    int64_t began = rft_now();
    if (!is_any_away(controller) && controller->state == REFIT_TRAINING) return REFIT_OK;
    refit_status status = for_members(controller, start_return, after, error);
    if (status == REFIT_OK) controller->state = REFIT_RETURNING;
    return count_phase(&controller->cycle, PHASE_RESTORE, began, status);
}

/* ---- wait */

/* Keeps the future of a joined stream: the next offload reports its end. */
static refit_status wait_for_states(member *on, refit_stream_ref stream, int64_t deadline,
                                    refit_error *error)
{
    if (stream.native != NULL && on->returning != NULL) {
        return refit_future_join(on->returning, stream, error);
    }
    RFT_TRY(refit_offloader_wait(on->offloader, ms_until(deadline), error));
    forget_future(on);
    return REFIT_OK;
}

/* In TRAINING: are states of this offloader away, or leaving, since a phase failed? */
static bool has_left(const member *on)
{
    switch (refit_offloader_get_state(on->offloader)) {
    case REFIT_OFFLOADING:
    case REFIT_OFFLOADED: return true;
    case REFIT_FAILED: return rft_offloader_is_away(on->offloader);
    default: return false;
    }
}

static refit_status check_wait(const refit_controller *controller, refit_error *error)
{
    bool training = controller->state == REFIT_TRAINING;
    RFT_REFUSE_IF(!training && controller->state != REFIT_RETURNING, error, REFIT_ERR_STATE,
                  "states are away (%s): call refit_controller_restore before the wait",
                  refit_controller_state_name(controller->state));
    for (uint32_t at = 0; training && at < controller->count; at++) {
        RFT_REFUSE_IF(has_left(&controller->members[at]), error, REFIT_ERR_STATE,
                      "states are away, or still leaving, since a phase failed: call "
                      "refit_controller_offload or refit_controller_restore first");
    }
    return REFIT_OK;
}

refit_status refit_controller_wait(refit_controller *controller, refit_stream_ref stream,
                                   refit_error *error)
{
    RFT_REFUSE_IF(controller == NULL, error, REFIT_ERR_INVALID, "there is no controller");
    RFT_TRY(check_wait(controller, error));
    if (controller->state == REFIT_TRAINING) return REFIT_OK;
    int64_t began = rft_now();
    refit_status status = for_members(controller, wait_for_states, stream, error);
    (void)count_phase(&controller->cycle, PHASE_WAIT, began, status);
    if (status != REFIT_OK) return status;
    end_cycle(&controller->cycle);
    controller->state = REFIT_TRAINING;
    return REFIT_OK;
}

/* ---- The figures */

static void add_cycle(const cycle *on, refit_stats *stats)
{
    stats->cycles = on->completed;
    stats->cycle_failures = on->failures;
    stats->cycle_seconds_last = rft_seconds(on->last_seconds_ns);
    stats->cycle_blocked_seconds_last = rft_seconds(on->last_blocked_ns);
    stats->cycle_offload_seconds_last = rft_seconds(on->phases[PHASE_OFFLOAD]);
    stats->cycle_publish_seconds_last = rft_seconds(on->phases[PHASE_PUBLISH]);
    stats->cycle_restore_seconds_last = stats->restore_seconds_last;
    stats->cycle_wait_seconds_last = rft_seconds(on->phases[PHASE_WAIT]);
}

refit_status refit_controller_stats(refit_controller *controller, refit_stats *stats,
                                    refit_error *error)
{
    RFT_REFUSE_IF(controller == NULL || stats == NULL, error, REFIT_ERR_INVALID,
                  "refit_controller_stats needs a controller and a place for the figures");
    RFT_REFUSE_IF(stats->size < sizeof stats->size, error, REFIT_ERR_INVALID,
                  "refit_stats.size is %zu: call refit_stats_init first", stats->size);
    refit_stats whole;
    refit_stats_init(&whole, sizeof whole);
    for (uint32_t at = 0; at < controller->count; at++) {
        refit_stats one;
        refit_stats_init(&one, sizeof one);
        RFT_TRY(refit_offloader_stats(controller->members[at].offloader, &one, error));
        refit_stats_merge(&whole, &one);
    }
    if (controller->publisher != NULL) {
        RFT_TRY(refit_publisher_stats(controller->publisher, &whole, error));
    }
    add_cycle(&controller->cycle, &whole);
    size_t known = stats->size < sizeof whole ? stats->size : sizeof whole;
    whole.size = stats->size;
    memcpy(stats, &whole, known);
    return REFIT_OK;
}
