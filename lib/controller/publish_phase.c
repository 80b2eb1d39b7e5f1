/*
 * The phase in the middle: one version, from begin to commit, from the weights of one call. A
 * version that cannot be finished is aborted, so that the next call begins afresh and the workers
 * keep what they have.
 */
#include <inttypes.h>

#include "base/clock.h"
#include "controller/cycle.h"

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
    return rft_cycle_count(&controller->cycle, RFT_PHASE_PUBLISH, began, status);
}
