/*
 * The refit cycle: one state machine over the offloader and the publisher.
 *
 *            clear           publish
 *   TRAINING ─────► CLEARED ─────────► REFITTED
 *      ▲               │ return            │
 *      │ join          ▼          return   │
 *      └────────── RETURNING ◄─────────────┘
 *
 * From TRAINING, return leads to RETURNING only after a clear that failed with states on their way.
 *
 *   state       the states (offloader)                     the workers
 *   TRAINING    on the device; after a join of a stream    hold some version
 *               perhaps still arriving ahead of its work
 *   CLEARED     in the image; memory given back, unless    hold the version before
 *               the last clear said otherwise
 *   REFITTED    likewise                                   hold the new version
 *   RETURNING   arriving; after a failure partly away      as before
 *
 * The controller decides nothing that the offloader knows: where the states are is asked, never
 * remembered, so that a phase that failed half-way, or a caller who used the offloader directly, is
 * met where it stands. Must not know how states move or how weights travel.
 */
#include <inttypes.h>
#include <stdbool.h>
#include <string.h>

#include <refit/controller.h>

#include "base/alloc.h"
#include "base/clock.h"
#include "base/error.h"
#include "config/resolve.h"

typedef enum phase {
    PHASE_CLEAR,
    PHASE_PUBLISH,
    PHASE_RETURN,
    PHASE_JOIN,
    PHASES,
} phase;

/* The figures of cycles. A cycle begins with a clear in TRAINING and ends with the join. */
typedef struct cycle {
    bool open;
    bool failed; /* a phase has */
    int64_t began;
    int64_t exposed;        /* nanoseconds in the verbs so far */
    int64_t phases[PHASES]; /* nanoseconds in each phase's verb so far */
    uint64_t completed;
    uint64_t failures;       /* cycles in which a phase failed */
    int64_t last_seconds_ns; /* of the last cycle that completed */
    int64_t last_exposed_ns;
} cycle;

/* Used by one thread at a time. */
struct refit_controller {
    refit_offloader *offloader; /* borrowed; NULL: nothing leaves */
    refit_publisher *publisher; /* borrowed; NULL: nothing is published */
    refit_config config;
    refit_controller_state state;
    refit_future *returning; /* owned; of the way back, until it is joined */
    cycle cycle;
};

/* ---- Figures: each verb hands in how long it took and how it ended. Time between the verbs
 * belongs to the cycle but is not exposed: the caller was busy with something else. */

static void begin_cycle(cycle *on, int64_t began)
{
    on->open = true;
    on->failed = false;
    on->began = began;
    on->exposed = 0;
    memset(on->phases, 0, sizeof on->phases);
}

/* A phase that `began` (rft_now) has returned `status`, which is passed on. */
static refit_status count_phase(cycle *on, phase which, int64_t began, refit_status status)
{
    int64_t spent = rft_now() - began;
    /* A verb may be called again: to go on, or for nothing. */
    on->phases[which] = (on->open ? on->phases[which] : 0) + spent;
    on->exposed += spent;
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
    on->last_exposed_ns = on->exposed;
}

/* ---- Opening and closing */

static refit_controller_state first_state(refit_offloader *offloader)
{
    if (offloader == NULL) return REFIT_TRAINING;
    switch (refit_offloader_get_state(offloader)) {
    case REFIT_OFFLOADED:
    case REFIT_FAILED: return REFIT_CLEARED;
    case REFIT_RESTORING: return REFIT_RETURNING;
    default: return REFIT_TRAINING;
    }
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
    controller->offloader = offloader;
    controller->publisher = publisher;
    controller->config = own;
    controller->state = first_state(offloader);
    *out = controller;
    return REFIT_OK;
}

static void forget_future(refit_controller *controller)
{
    refit_future_close(controller->returning);
    controller->returning = NULL;
}

void refit_controller_close(refit_controller *controller)
{
    if (controller == NULL) return;
    forget_future(controller);
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

/* ---- clear */

/* How did the way back end that a stream was joined to? Nobody has been told yet. */
static refit_status settle_return(refit_controller *controller, refit_error *error)
{
    if (controller->returning == NULL) return REFIT_OK;
    refit_status status =
        refit_future_wait(controller->returning, controller->config.offload_timeout_ms, error);
    if (status != REFIT_ERR_TIMEOUT) forget_future(controller);
    return status;
}

static refit_status clear_states(refit_controller *controller, refit_stream_ref after,
                                 refit_error *error)
{
    refit_offloader *offloader = controller->offloader;
    uint32_t timeout_ms = controller->config.offload_timeout_ms;
    if (offloader == NULL) return REFIT_OK;
    RFT_TRY(settle_return(controller, error));
    RFT_TRY(refit_offloader_offload(offloader, after, NULL, error));
    return refit_offloader_finish(offloader, timeout_ms, error);
}

/* Have the states left, however the clear ended? */
static bool is_cleared(const refit_controller *controller)
{
    return controller->offloader == NULL ||
           refit_offloader_get_state(controller->offloader) == REFIT_OFFLOADED;
}

refit_status refit_controller_clear(refit_controller *controller, refit_stream_ref after,
                                    refit_error *error)
{
    RFT_REFUSE_IF(controller == NULL, error, REFIT_ERR_INVALID, "there is no controller");
    RFT_REFUSE_IF(controller->state == REFIT_RETURNING, error, REFIT_ERR_STATE,
                  "states are on their way back: call refit_controller_join before the next clear");
    int64_t began = rft_now();
    if (controller->state == REFIT_TRAINING) begin_cycle(&controller->cycle, began);
    refit_status status = clear_states(controller, after, error);
    if (controller->state == REFIT_TRAINING && is_cleared(controller)) {
        controller->state = REFIT_CLEARED;
    }
    return count_phase(&controller->cycle, PHASE_CLEAR, began, status);
}

/* ---- publish: one version, from begin to commit, from the weights of one call. A version that
 * cannot be finished is aborted, so that the next call begins afresh and the workers keep what they
 * have. */

static refit_status check_publish(const refit_controller *controller, const refit_weight *weights,
                                  uint32_t count, refit_error *error)
{
    RFT_REFUSE_IF(controller == NULL, error, REFIT_ERR_INVALID, "there is no controller");
    RFT_REFUSE_IF(weights == NULL && count > 0, error, REFIT_ERR_INVALID,
                  "%" PRIu32 " weights were announced, but none given", count);
    RFT_REFUSE_IF(
        controller->state == REFIT_RETURNING, error, REFIT_ERR_STATE,
        "states are on their way back: call refit_controller_join before the next publish");
    return REFIT_OK;
}

static refit_status publish(refit_publisher *publisher, uint64_t version,
                            const refit_weight *weights, uint32_t count, refit_device *device,
                            refit_stream_ref after, refit_error *error)
{
    RFT_TRY(refit_publisher_begin(publisher, version, error));
    refit_status status =
        refit_publisher_write_all(publisher, weights, count, device, after, error);
    if (status == REFIT_OK) status = refit_publisher_commit(publisher, error);
    if (status != REFIT_OK) {
        /* Refused where the commit has ended the version already: then there is none to drop. */
        refit_status dropped = refit_publisher_abort(publisher, NULL);
        (void)dropped;
    }
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
    if (publisher != NULL) {
        uint64_t before = refit_publisher_version(publisher);
        bool done = version != 0 && version == before;
        if (!done) status = publish(publisher, version, weights, count, device, after, error);
        renewed = done || refit_publisher_version(publisher) != before;
    }
    if (renewed && controller->state == REFIT_CLEARED) controller->state = REFIT_REFITTED;
    return count_phase(&controller->cycle, PHASE_PUBLISH, began, status);
}

/* ---- return */

/* Is there anything to bring back? */
static bool is_away(const refit_controller *controller)
{
    if (controller->offloader == NULL) return false;
    refit_offloader_state state = refit_offloader_get_state(controller->offloader);
    return state == REFIT_OFFLOADING || state == REFIT_OFFLOADED || state == REFIT_FAILED;
}

static refit_status start_return(refit_controller *controller, refit_stream_ref after,
                                 refit_error *error)
{
    refit_offloader *offloader = controller->offloader;
    if (refit_offloader_get_state(offloader) == REFIT_OFFLOADING) {
        /* A way out that fails is no obstacle: its states have not left. */
        uint32_t timeout_ms = controller->config.offload_timeout_ms;
        refit_status status = refit_offloader_finish(offloader, timeout_ms, error);
        if (status == REFIT_ERR_TIMEOUT) return status;
    }
    refit_future *future;
    RFT_TRY(refit_offloader_restore(offloader, after, &future, error));
    forget_future(controller);
    controller->returning = future;
    return REFIT_OK;
}

refit_status refit_controller_return(refit_controller *controller, refit_stream_ref after,
                                     refit_error *error)
{
    RFT_REFUSE_IF(controller == NULL, error, REFIT_ERR_INVALID, "there is no controller");
    int64_t began = rft_now();
    bool away = is_away(controller);
    if (!away && controller->state == REFIT_TRAINING) return REFIT_OK;
    refit_status status = away ? start_return(controller, after, error) : REFIT_OK;
    if (status == REFIT_OK) controller->state = REFIT_RETURNING;
    return count_phase(&controller->cycle, PHASE_RETURN, began, status);
}

/* ---- join */

/* Keeps the future of a joined stream: its end is told by the next clear. */
static refit_status join_states(refit_controller *controller, refit_stream_ref stream,
                                refit_error *error)
{
    if (controller->offloader == NULL) return REFIT_OK;
    if (stream.native != NULL && controller->returning != NULL) {
        return refit_future_join(controller->returning, stream, error);
    }
    uint32_t timeout_ms = controller->config.offload_timeout_ms;
    RFT_TRY(refit_offloader_finish(controller->offloader, timeout_ms, error));
    forget_future(controller);
    return REFIT_OK;
}

static refit_status check_join(const refit_controller *controller, refit_error *error)
{
    bool training = controller->state == REFIT_TRAINING;
    RFT_REFUSE_IF(!training && controller->state != REFIT_RETURNING, error, REFIT_ERR_STATE,
                  "states are away (%s): call refit_controller_return before the join",
                  refit_controller_state_name(controller->state));
    RFT_REFUSE_IF(training && controller->offloader != NULL &&
                      refit_offloader_get_state(controller->offloader) == REFIT_OFFLOADING,
                  error, REFIT_ERR_STATE,
                  "states are still leaving: call refit_controller_clear or _return first");
    return REFIT_OK;
}

refit_status refit_controller_join(refit_controller *controller, refit_stream_ref stream,
                                   refit_error *error)
{
    RFT_REFUSE_IF(controller == NULL, error, REFIT_ERR_INVALID, "there is no controller");
    RFT_TRY(check_join(controller, error));
    if (controller->state == REFIT_TRAINING) return REFIT_OK;
    int64_t began = rft_now();
    refit_status status = join_states(controller, stream, error);
    (void)count_phase(&controller->cycle, PHASE_JOIN, began, status);
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
    stats->cycle_exposed_seconds_last = rft_seconds(on->last_exposed_ns);
    stats->clear_seconds_last = rft_seconds(on->phases[PHASE_CLEAR]);
    stats->refit_seconds_last = rft_seconds(on->phases[PHASE_PUBLISH]);
    stats->return_seconds_last = stats->restore_seconds_last;
    stats->join_seconds_last = rft_seconds(on->phases[PHASE_JOIN]);
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
    if (controller->offloader != NULL) {
        RFT_TRY(refit_offloader_stats(controller->offloader, &whole, error));
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

/* ---- The verbs under the names that NeMo-RL's training loops call */

refit_status refit_offload_before_refit(refit_controller *controller, refit_stream_ref after,
                                        refit_error *error)
{
    return refit_controller_clear(controller, after, error);
}

refit_status refit_offload_after_refit(refit_controller *controller, refit_stream_ref after,
                                       refit_error *error)
{
    refit_controller_state state = refit_controller_get_state(controller);
    if (state == REFIT_CLEARED || state == REFIT_REFITTED) return REFIT_OK;
    return refit_controller_clear(controller, after, error);
}

refit_status refit_prepare_for_training(refit_controller *controller, refit_stream_ref stream,
                                        refit_error *error)
{
    RFT_TRY(refit_controller_return(controller, stream, error));
    return refit_controller_join(controller, stream, error);
}
