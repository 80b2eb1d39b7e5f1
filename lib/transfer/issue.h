/* issue: puts the copies of a plan on a stream, with the events of the trail between them. */
#ifndef RFT_ISSUE_H
#define RFT_ISSUE_H

#include "transfer/trail.h"

/* Takes nothing and does not wait. On failure some of it may be on the stream. */
refit_status rft_issue_plan(rft_trail *trail, const rft_plan *plan, refit_stream_ref stream,
                            rft_copy_order order, refit_error *error);

#endif
