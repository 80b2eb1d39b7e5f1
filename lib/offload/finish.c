/*
 * The verb finish: waits for the operation under way and, after an offload, gives device memory
 * back. That happens here, on the caller's thread, and nowhere else: hooks run code of the
 * caller's.
 */
#include "base/clock.h"
#include "offload/offloader.h"

static refit_status give_back(refit_offloader *offloader, uint64_t number, refit_error *error)
{
    int64_t began = rft_now();
    refit_status status = rft_regions_give_back(offloader, error);
    rft_operation_expose(offloader, number, began);
    if (status == REFIT_OK) offloader->giving_back = false;
    return status;
}

refit_status refit_offloader_finish(refit_offloader *offloader, uint32_t timeout_ms,
                                    refit_error *error)
{
    RFT_REFUSE_IF(offloader == NULL, error, REFIT_ERR_INVALID, "there is no offloader");
    rft_lock(&offloader->lock);
    uint64_t number = offloader->operation.number;
    rft_unlock(&offloader->lock);
    RFT_TRY(rft_operation_wait(offloader, number, timeout_ms, error));

    rft_lock(&offloader->lock);
    refit_offloader_state state = offloader->state;
    refit_error failure = offloader->operation.failure;
    rft_unlock(&offloader->lock);
    if (state == REFIT_FAILED) {
        if (error != NULL) *error = failure;
        return (refit_status)failure.status;
    }
    if (state != REFIT_OFFLOADED || !offloader->giving_back) return REFIT_OK;
    return give_back(offloader, number, error);
}
