/*
 * From batches to calls of the device: a batch of copies in as many submissions as the device
 * takes, a batch of zeroes one by one, and before each batch the pacer's turn. Knows nothing of who
 * waits.
 */
#include "transfer/issue.h"

static refit_status issue_zeroes(const rft_issue *issue, const rft_batch *batch, refit_error *error)
{
    const rft_copy *copies = &issue->plan->copies[batch->first];
    for (uint32_t i = 0; i < batch->count; i++) {
        RFT_TRY(rft_device_zero(issue->trail->device, issue->stream, copies[i].to, copies[i].bytes,
                                error));
    }
    return REFIT_OK;
}

static refit_status issue_copies(const rft_issue *issue, const rft_batch *batch, refit_error *error)
{
    refit_device *device = issue->trail->device;
    uint32_t most = rft_device_get_caps(device).batch_most;
    const rft_copy *copies = &issue->plan->copies[batch->first];
    for (uint32_t left = batch->count; left > 0;) {
        uint32_t now = left < most ? left : most;
        RFT_TRY(rft_device_copy_batch(device, issue->stream, copies, now, issue->order, error));
        copies += now;
        left -= now;
    }
    return REFIT_OK;
}

static refit_status issue_batch(const rft_issue *issue, const rft_batch *batch, refit_error *error)
{
    if (issue->plan->copies[batch->first].from == NULL) return issue_zeroes(issue, batch, error);
    if (issue->pacer != NULL) {
        RFT_TRY(rft_pacer_put(issue->pacer, issue->trail->device, issue->stream, error));
    }
    return issue_copies(issue, batch, error);
}

refit_status rft_issue_plan(const rft_issue *issue, refit_error *error)
{
    for (uint32_t i = 0; i < issue->plan->batch_count; i++) {
        rft_trail_enter(issue->trail, issue->plan, i);
        RFT_TRY(issue_batch(issue, &issue->plan->batches[i], error));
        RFT_TRY(rft_trail_leave(issue->trail, issue->plan, i, issue->stream, error));
    }
    return REFIT_OK;
}
