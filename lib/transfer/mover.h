/*
 * mover: issues a plan on a stream of its own and knows when each group is done.
 *
 * One mover, one direction, one operation at a time. Starting waits for the caller's stream by
 * event, on the device; the CPU goes on. Completion is an event per group and one for all: it
 * happens exactly once per operation, and every waiter gets the same status. If issuing fails
 * half-way, what was issued is waited for before the failure is returned: then no copy is under
 * way.
 */
#ifndef RFT_MOVER_H
#define RFT_MOVER_H

#include "transfer/plan.h"

typedef struct rft_mover rft_mover;

refit_status rft_mover_open(refit_device *device, rft_mover **out, refit_error *error);

/* Waits for what is under way (at most `timeout_ms`: REFIT_ERR_TIMEOUT, nothing closed), then frees
 * it. */
refit_status rft_mover_close(rft_mover *mover, uint32_t timeout_ms, refit_error *error);

/* Starts `plan` behind what `after` has queued; with `zero` pieces (from == NULL in the plan's
 * copies) zeroed instead of copied. The plan must stay as it is until the operation is done.
 * REFIT_ERR_STATE if one is under way. */
refit_status rft_mover_start(rft_mover *mover, const rft_plan *plan, refit_stream_ref after,
                             rft_copy_order order, refit_error *error);

/* REFIT_OK, REFIT_ERR_TIMEOUT, or how the operation (or the group's part of it) failed. With
 * nothing started: REFIT_OK. Any thread. */
refit_status rft_mover_wait(rft_mover *mover, uint32_t timeout_ms, refit_error *error);
refit_status rft_mover_wait_group(rft_mover *mover, uint32_t group, uint32_t timeout_ms,
                                  refit_error *error);

/* Makes `stream` wait, on the device, for all or for one group. Any thread. */
refit_status rft_mover_join(rft_mover *mover, refit_stream_ref stream, refit_error *error);
refit_status rft_mover_join_group(rft_mover *mover, uint32_t group, refit_stream_ref stream,
                                  refit_error *error);

/* When the last byte moved (rft_now), once done; 0 before. */
int64_t rft_mover_finished_at(const rft_mover *mover);

#endif
