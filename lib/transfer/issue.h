/* issue: puts the copies of a plan on a stream, with the events of the trail between them. */
#ifndef RFT_ISSUE_H
#define RFT_ISSUE_H

#include "transfer/pacer.h"
#include "transfer/trail.h"

/* What goes where, and how. */
typedef struct rft_issue {
    const rft_plan *plan;
    refit_stream_ref stream;
    rft_copy_order order;
    rft_trail *trail;
    rft_pacer *pacer; /* NULL: as fast as the link goes */
} rft_issue;

/* Takes nothing and does not wait. On failure some of it may be on the stream.
 * REFIT_ERR_UNSUPPORTED: there is a pacer, and streams of the device cannot call it. */
refit_status rft_issue_plan(const rft_issue *issue, refit_error *error);

#endif
