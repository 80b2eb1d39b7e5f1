/*
 * Events of one operation. An index into `recorded` is a place in the order of the stream, so "from
 * its first batch to its own event" is a range of it. Knows nothing of locks, waiters or time.
 */
#include "transfer/completion.h"

#include <inttypes.h>
#include <string.h>

static refit_status open_groups(rft_completion *completion, refit_error *error)
{
    for (uint32_t group = 0; group < REFIT_GROUPS; group++) {
        RFT_TRY(rft_device_event_open(completion->device, &completion->events[group], error));
    }
    return REFIT_OK;
}

refit_status rft_completion_open(rft_completion *completion, refit_device *device,
                                 refit_error *error)
{
    refit_status status;
    memset(completion, 0, sizeof *completion);
    completion->device = device;
    RFT_TRY_GOTO(rft_device_event_open(device, &completion->before, error), close_events);
    RFT_TRY_GOTO(rft_device_event_open(device, &completion->all, error), close_events);
    RFT_TRY_GOTO(open_groups(completion, error), close_events);
    return REFIT_OK;

close_events:
    rft_completion_close(completion);
    return status;
}

void rft_completion_close(rft_completion *completion)
{
    rft_device_event_close(completion->device, completion->before);
    rft_device_event_close(completion->device, completion->all);
    for (uint32_t group = 0; group < REFIT_GROUPS; group++) {
        rft_device_event_close(completion->device, completion->events[group]);
    }
}

static refit_status mark_groups(rft_completion *completion, const rft_plan *plan,
                                refit_error *error)
{
    memset(completion->groups, 0, sizeof completion->groups);
    completion->recorded_count = 0;
    for (uint32_t i = 0; i < plan->batch_count; i++) {
        uint32_t group = plan->batches[i].group;
        RFT_REFUSE_IF(group >= REFIT_GROUPS, error, REFIT_ERR_INVALID,
                      "group %" PRIu32 " is not below %d", group, REFIT_GROUPS);
        completion->groups[group].last_batch = i;
    }
    return REFIT_OK;
}

/* For REFIT_STREAM_NONE there is nothing to follow: all that the caller did is done. */
refit_status rft_completion_begin(rft_completion *completion, const rft_plan *plan,
                                  refit_stream_ref after, refit_stream_ref stream,
                                  refit_error *error)
{
    completion->follows = false;
    RFT_TRY(mark_groups(completion, plan, error));
    if (after.native == NULL) return REFIT_OK;
    RFT_TRY(rft_device_event_record(completion->device, completion->before, after, error));
    completion->follows = true;
    return rft_device_event_join(completion->device, completion->before, stream, error);
}

void rft_completion_enter(rft_completion *completion, const rft_plan *plan, uint32_t batch)
{
    rft_completion_group *group = &completion->groups[plan->batches[batch].group];
    if (!group->used) group->first_event = completion->recorded_count;
    group->used = true;
}

refit_status rft_completion_leave(rft_completion *completion, const rft_plan *plan, uint32_t batch,
                                  refit_stream_ref stream, refit_error *error)
{
    uint32_t number = plan->batches[batch].group;
    rft_completion_group *group = &completion->groups[number];
    if (batch != group->last_batch) return REFIT_OK;
    RFT_TRY(rft_device_event_record(completion->device, completion->events[number], stream, error));
    group->own_event = completion->recorded_count;
    completion->recorded[completion->recorded_count++] = number;
    return REFIT_OK;
}

refit_status rft_completion_end(rft_completion *completion, refit_stream_ref stream,
                                refit_error *error)
{
    return rft_device_event_record(completion->device, completion->all, stream, error);
}

/* The first failure among the caller's stream and the events from place `from` up to `to`, all of
 * which are over. */
static refit_status first_failure(rft_completion *completion, uint32_t from, uint32_t to,
                                  refit_error *error)
{
    refit_status status = REFIT_OK;
    if (completion->follows)
        status = rft_device_event_wait(completion->device, completion->before, 0, error);
    for (uint32_t i = from; i < to && status == REFIT_OK; i++) {
        rft_event *event = completion->events[completion->recorded[i]];
        status = rft_device_event_wait(completion->device, event, 0, error);
    }
    return status;
}

refit_status rft_completion_outcome(rft_completion *completion, refit_status last,
                                    refit_error *error)
{
    refit_error earlier;
    refit_status status = first_failure(completion, 0, completion->recorded_count, &earlier);
    if (status == REFIT_OK) return last;
    if (error != NULL) *error = earlier;
    return status;
}

refit_status rft_completion_group_outcome(rft_completion *completion, uint32_t group,
                                          refit_error *error)
{
    const rft_completion_group *part = &completion->groups[group];
    return first_failure(completion, part->first_event, part->own_event + 1, error);
}
