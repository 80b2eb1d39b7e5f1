/* submit: puts the copies of a plan on a stream, with the events of the completion between them. */
#ifndef RFT_SUBMIT_H
#define RFT_SUBMIT_H

#include "transfer/completion.h"
#include "transfer/rate_limiter.h"

/* What goes where, and how. */
typedef struct rft_submission {
    const rft_plan *plan;
    refit_stream_ref stream;
    rft_copy_order order;
    rft_completion *completion;
    rft_rate_limiter *limiter; /* NULL: as fast as the link goes */
} rft_submission;

/* Takes nothing and does not wait. On failure some of it may be on the stream.
 * REFIT_ERR_UNSUPPORTED: there is a rate limiter, and streams of the device cannot call it. */
refit_status rft_submit_plan(const rft_submission *submission, refit_error *error);

#endif
