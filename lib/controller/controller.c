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
#include "base/alloc.h"
#include "base/clock.h"
#include "config/resolve.h"
#include "controller/cycle.h"

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
    if (controller->state == REFIT_TRAINING) rft_cycle_begin(&controller->cycle, began);
    refit_status status = clear_states(controller, after, error);
    if (controller->state == REFIT_TRAINING && is_cleared(controller)) {
        controller->state = REFIT_CLEARED;
    }
    return rft_cycle_count(&controller->cycle, RFT_PHASE_CLEAR, began, status);
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
    return rft_cycle_count(&controller->cycle, RFT_PHASE_RETURN, began, status);
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
    (void)rft_cycle_count(&controller->cycle, RFT_PHASE_JOIN, began, status);
    if (status != REFIT_OK) return status;
    rft_cycle_end(&controller->cycle);
    controller->state = REFIT_TRAINING;
    return REFIT_OK;
}
