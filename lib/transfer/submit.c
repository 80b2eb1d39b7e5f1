/*
 * From batches to calls of the device: a batch of copies in as many submissions as the device
 * takes, a batch of zeroes one by one, and before each batch the rate limiter. Knows nothing of who
 * waits.
 */
#include "transfer/submit.h"

static refit_status submit_zeroes(const rft_submission *submission, const rft_batch *batch,
                                  refit_error *error)
{
    const rft_copy *copies = &submission->plan->copies[batch->first];
    for (uint32_t i = 0; i < batch->count; i++) {
        RFT_TRY(rft_device_zero(submission->completion->device, submission->stream, copies[i].to,
                                copies[i].bytes, error));
    }
    return REFIT_OK;
}

static refit_status submit_copies(const rft_submission *submission, const rft_batch *batch,
                                  refit_error *error)
{
    refit_device *device = submission->completion->device;
    uint32_t most = rft_device_get_caps(device).batch_most;
    const rft_copy *copies = &submission->plan->copies[batch->first];
    for (uint32_t left = batch->count; left > 0;) {
        uint32_t now = left < most ? left : most;
        RFT_TRY(rft_device_copy_batch(device, submission->stream, copies, now, submission->order,
                                      error));
        copies += now;
        left -= now;
    }
    return REFIT_OK;
}

static refit_status submit_batch(const rft_submission *submission, const rft_batch *batch,
                                 refit_error *error)
{
    if (submission->plan->copies[batch->first].from == NULL)
        return submit_zeroes(submission, batch, error);
    if (submission->limiter != NULL) {
        RFT_TRY(rft_rate_limiter_put(submission->limiter, submission->completion->device,
                                     submission->stream, error));
    }
    return submit_copies(submission, batch, error);
}

refit_status rft_submit_plan(const rft_submission *submission, refit_error *error)
{
    for (uint32_t i = 0; i < submission->plan->batch_count; i++) {
        rft_completion_enter(submission->completion, submission->plan, i);
        RFT_TRY(submit_batch(submission, &submission->plan->batches[i], error));
        RFT_TRY(rft_completion_leave(submission->completion, submission->plan, i,
                                     submission->stream, error));
    }
    return REFIT_OK;
}
