/*
 * mover: submits a plan on a stream of its own and knows when each group is done.
 *
 * One mover, one operation at a time. Starting waits for the caller's stream by event, on the
 * device; the CPU goes on. Completion is an event per group and one for all: it happens exactly
 * once per operation, and every waiter gets the same status. If submitting fails half-way, what was
 * submitted is waited for before the failure is returned: then no copy is under way. What
 * completion promises stands at the top of mover.c.
 */
#ifndef RFT_MOVER_H
#define RFT_MOVER_H

#include "transfer/plan.h"

typedef struct rft_mover rft_mover;

/* Opens its stream and its events, so that starting takes nothing. `rate_limit`: an operation
 * moves at most so many bytes per second; 0: unlimited. Any other value needs a device whose
 * streams call back, else starting answers REFIT_ERR_UNSUPPORTED. */
refit_status rft_mover_open(refit_device *device, uint64_t rate_limit, rft_mover **out,
                            refit_error *error);

/* The most bytes of one batch of a plan at this rate limit: what crosses the link in 50 ms, at
 * least 64 KiB. 0: no bound, for no limit. */
uint64_t rft_mover_step_bytes(uint64_t rate_limit);

/* What is under way is not held back by the rate limit any more. Any thread. */
void rft_mover_hurry(rft_mover *mover);

/* Hurries and waits for what is under way (at most `timeout_ms`: REFIT_ERR_TIMEOUT, nothing
 * closed), then frees it. NULL is allowed. No other thread may use the mover any more. */
refit_status rft_mover_close(rft_mover *mover, uint32_t timeout_ms, refit_error *error);

/* Starts `plan` after what `after` has queued; copies without a source (from == NULL) zero their
 * memory. The plan and its memory must stay as they are until the operation is done. Groups are
 * below REFIT_GROUPS (REFIT_ERR_INVALID). REFIT_ERR_STATE if an operation is under way. On any
 * other failure nothing is under way, and it may be started again, unless the device is lost, or
 * hangs: what cannot be waited for within 30 s. Both break the mover. */
refit_status rft_mover_start(rft_mover *mover, const rft_plan *plan, refit_stream_ref after,
                             rft_copy_order order, refit_error *error);

/* REFIT_OK, or REFIT_ERR_DEVICE: the mover is broken. Then all calls answer the same sentence, and
 * all that is left is to close it. Does not block. Any thread. */
refit_status rft_mover_check(rft_mover *mover, refit_error *error);

/* Is an operation under way? Does not block. Any thread. */
bool rft_mover_is_moving(rft_mover *mover);

/* REFIT_OK once the operation (or the group's part of it) is over, or nothing was started;
 * REFIT_ERR_TIMEOUT; REFIT_ERR_DEVICE: the mover is broken, by the loss of the device as a rule. 0:
 * only look. Any thread. */
refit_status rft_mover_wait(rft_mover *mover, uint32_t timeout_ms, refit_error *error);
refit_status rft_mover_wait_group(rft_mover *mover, uint32_t group, uint32_t timeout_ms,
                                  refit_error *error);

/* Makes `stream` wait, on the device, for all or for one group. REFIT_ERR_INVALID for
 * REFIT_STREAM_NONE, which waits by rft_mover_wait. Any thread. */
refit_status rft_mover_join(rft_mover *mover, refit_stream_ref stream, refit_error *error);
refit_status rft_mover_join_group(rft_mover *mover, uint32_t group, refit_stream_ref stream,
                                  refit_error *error);

/* When the last byte moved (rft_now), once done; 0 before. On a device whose streams cannot call
 * back: when a call first saw that it was done. Any thread. */
int64_t rft_mover_finished_at(const rft_mover *mover);

#endif
