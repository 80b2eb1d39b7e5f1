/*
 * Events of one operation. An index into `recorded` is a place in the order of the stream, so "from
 * its first batch to its own event" is a range of it. Knows nothing of locks, waiters or time.
 */
#include "transfer/trail.h"

#include <inttypes.h>
#include <string.h>

static refit_status open_groups(rft_trail *trail, refit_error *error)
{
    for (uint32_t group = 0; group < REFIT_GROUPS; group++) {
        RFT_TRY(rft_device_event_open(trail->device, &trail->events[group], error));
    }
    return REFIT_OK;
}

refit_status rft_trail_open(rft_trail *trail, refit_device *device, refit_error *error)
{
    refit_status status;
    memset(trail, 0, sizeof *trail);
    trail->device = device;
    RFT_TRY_GOTO(rft_device_event_open(device, &trail->before, error), close_events);
    RFT_TRY_GOTO(rft_device_event_open(device, &trail->all, error), close_events);
    RFT_TRY_GOTO(open_groups(trail, error), close_events);
    return REFIT_OK;

close_events:
    rft_trail_close(trail);
    return status;
}

void rft_trail_close(rft_trail *trail)
{
    rft_device_event_close(trail->device, trail->before);
    rft_device_event_close(trail->device, trail->all);
    for (uint32_t group = 0; group < REFIT_GROUPS; group++) {
        rft_device_event_close(trail->device, trail->events[group]);
    }
}

static refit_status mark_groups(rft_trail *trail, const rft_plan *plan, refit_error *error)
{
    memset(trail->groups, 0, sizeof trail->groups);
    trail->recorded_count = 0;
    for (uint32_t i = 0; i < plan->batch_count; i++) {
        uint32_t group = plan->batches[i].group;
        RFT_REFUSE_IF(group >= REFIT_GROUPS, error, REFIT_ERR_INVALID,
                      "group %" PRIu32 " is not below %d", group, REFIT_GROUPS);
        trail->groups[group].last_batch = i;
    }
    return REFIT_OK;
}

/* For REFIT_STREAM_NONE there is nothing to follow: all that the caller did is done. */
refit_status rft_trail_begin(rft_trail *trail, const rft_plan *plan, refit_stream_ref after,
                             refit_stream_ref stream, refit_error *error)
{
    trail->follows = false;
    RFT_TRY(mark_groups(trail, plan, error));
    if (after.native == NULL) return REFIT_OK;
    RFT_TRY(rft_device_event_record(trail->device, trail->before, after, error));
    trail->follows = true;
    return rft_device_event_join(trail->device, trail->before, stream, error);
}

void rft_trail_enter(rft_trail *trail, const rft_plan *plan, uint32_t batch)
{
    rft_trail_group *group = &trail->groups[plan->batches[batch].group];
    if (!group->used) group->first_event = trail->recorded_count;
    group->used = true;
}

refit_status rft_trail_leave(rft_trail *trail, const rft_plan *plan, uint32_t batch,
                             refit_stream_ref stream, refit_error *error)
{
    uint32_t number = plan->batches[batch].group;
    rft_trail_group *group = &trail->groups[number];
    if (batch != group->last_batch) return REFIT_OK;
    RFT_TRY(rft_device_event_record(trail->device, trail->events[number], stream, error));
    group->own_event = trail->recorded_count;
    trail->recorded[trail->recorded_count++] = number;
    return REFIT_OK;
}

refit_status rft_trail_end(rft_trail *trail, refit_stream_ref stream, refit_error *error)
{
    return rft_device_event_record(trail->device, trail->all, stream, error);
}

/* The first failure among the caller's stream and the events from place `from` up to `to`, all of
 * which are over. */
static refit_status first_failure(rft_trail *trail, uint32_t from, uint32_t to, refit_error *error)
{
    refit_status status = REFIT_OK;
    if (trail->follows) status = rft_device_event_wait(trail->device, trail->before, 0, error);
    for (uint32_t i = from; i < to && status == REFIT_OK; i++) {
        rft_event *event = trail->events[trail->recorded[i]];
        status = rft_device_event_wait(trail->device, event, 0, error);
    }
    return status;
}

refit_status rft_trail_outcome(rft_trail *trail, refit_status last, refit_error *error)
{
    refit_error earlier;
    refit_status status = first_failure(trail, 0, trail->recorded_count, &earlier);
    if (status == REFIT_OK) return last;
    if (error != NULL) *error = earlier;
    return status;
}

refit_status rft_trail_group_outcome(rft_trail *trail, uint32_t group, refit_error *error)
{
    const rft_trail_group *part = &trail->groups[group];
    return first_failure(trail, part->first_event, part->own_event + 1, error);
}
