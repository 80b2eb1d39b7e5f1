/*
 * completion: the events that one operation leaves on its stream, and how it went, read off them.
 *
 * One event stands on the caller's stream, one behind the last batch of each group, one behind
 * everything. The device gives a failure to the event behind it, once; a group's batches may lie
 * between events of other groups. So the status of a group is the first failure of any event from
 * its first batch to its own event, and the status of all that of any event. The caller's stream
 * counts first in both: what is moved was to be what it had made.
 *
 * No lock: one thread records, then any thread reads; the mover keeps the two apart.
 */
#ifndef RFT_COMPLETION_H
#define RFT_COMPLETION_H

#include <refit/offload.h>

#include "transfer/plan.h"

typedef struct rft_completion_group {
    bool used;
    uint32_t last_batch;
    uint32_t first_event; /* in `recorded`: the first behind its first batch */
    uint32_t own_event;   /* behind its last batch */
} rft_completion_group;

typedef struct rft_completion {
    refit_device *device; /* borrowed */
    bool follows;         /* `before` belongs to this operation */
    rft_event *before;
    rft_event *all;
    rft_event *events[REFIT_GROUPS]; /* by group */
    rft_completion_group groups[REFIT_GROUPS];
    uint32_t recorded[REFIT_GROUPS]; /* groups in the order of their events */
    uint32_t recorded_count;
} rft_completion;

/* Opens all events, so that recording takes nothing. On failure nothing is owned. */
refit_status rft_completion_open(rft_completion *completion, refit_device *device,
                                 refit_error *error);
void rft_completion_close(rft_completion *completion);

/* A new operation that submits `plan` on `stream` behind what `after` has queued.
 * REFIT_ERR_INVALID for a group that is not below REFIT_GROUPS. */
refit_status rft_completion_begin(rft_completion *completion, const rft_plan *plan,
                                  refit_stream_ref after, refit_stream_ref stream,
                                  refit_error *error);

/* Around each batch, in order. */
void rft_completion_enter(rft_completion *completion, const rft_plan *plan, uint32_t batch);
refit_status rft_completion_leave(rft_completion *completion, const rft_plan *plan, uint32_t batch,
                                  refit_stream_ref stream, refit_error *error);

/* Behind everything. */
refit_status rft_completion_end(rft_completion *completion, refit_stream_ref stream,
                                refit_error *error);

/* Once the last event is done, `last` being what it was done with: how the operation went. */
refit_status rft_completion_outcome(rft_completion *completion, refit_status last,
                                    refit_error *error);

/* Once the group's event is done: how its part went. */
refit_status rft_completion_group_outcome(rft_completion *completion, uint32_t group,
                                          refit_error *error);

#endif
