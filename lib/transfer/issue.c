/*
 * From batches to calls of the device: a batch of copies in as many submissions as the device
 * takes, a batch of zeroes one by one. Knows nothing of who waits.
 */
#include "transfer/issue.h"

static refit_status issue_zeroes(refit_device *device, refit_stream_ref stream,
                                 const rft_copy *copies, uint32_t count, refit_error *error)
{
    for (uint32_t i = 0; i < count; i++) {
        RFT_TRY(rft_device_zero(device, stream, copies[i].to, copies[i].bytes, error));
    }
    return REFIT_OK;
}

static refit_status issue_copies(refit_device *device, refit_stream_ref stream,
                                 const rft_copy *copies, uint32_t count, rft_copy_order order,
                                 refit_error *error)
{
    uint32_t most = rft_device_get_caps(device).batch_most;
    while (count > 0) {
        uint32_t now = count < most ? count : most;
        RFT_TRY(rft_device_copy_batch(device, stream, copies, now, order, error));
        copies += now;
        count -= now;
    }
    return REFIT_OK;
}

refit_status rft_issue_plan(rft_trail *trail, const rft_plan *plan, refit_stream_ref stream,
                            rft_copy_order order, refit_error *error)
{
    for (uint32_t i = 0; i < plan->batch_count; i++) {
        const rft_batch *batch = &plan->batches[i];
        const rft_copy *copies = &plan->copies[batch->first];
        rft_trail_enter(trail, plan, i);
        RFT_TRY(copies->from == NULL
                    ? issue_zeroes(trail->device, stream, copies, batch->count, error)
                    : issue_copies(trail->device, stream, copies, batch->count, order, error));
        RFT_TRY(rft_trail_leave(trail, plan, i, stream, error));
    }
    return REFIT_OK;
}
