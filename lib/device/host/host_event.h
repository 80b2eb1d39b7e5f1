/*
 * host_event: the line of records of one stream, and events as places on it.
 */
#ifndef RFT_HOST_EVENT_H
#define RFT_HOST_EVENT_H

#include "base/thread.h"
#include "device/device.h"

/* The first failure of a stream's work that no event has taken yet; REFIT_OK: none. */
typedef struct rft_host_failure {
    refit_status status;
    refit_error error;
} rft_host_failure;

/* The records of one stream, numbered 1, 2, … Outlives the stream while an event or a join knows
 * it. */
typedef struct rft_host_line {
    atomic_uint_fast32_t holders;
    rft_mutex lock;
    rft_cond moved;
    uint64_t passed;           /* the records up to this one are done; guarded by lock */
    rft_host_failure returned; /* of an event that closed before anybody asked; guarded by lock */
} rft_host_line;

refit_status rft_host_line_open(rft_host_line **out, refit_error *error);
rft_host_line *rft_host_line_retain(rft_host_line *line);
void rft_host_line_release(rft_host_line *line);

/* Record `place` is done; who waits for it goes on. */
void rft_host_line_pass(rft_host_line *line, uint64_t place);

/* If a failure came back to the line, it takes the place of `failure`, which is younger. */
void rft_host_line_take_returned(rft_host_line *line, rft_host_failure *failure);

/* Waits until record `place` is done; false at the deadline. */
bool rft_host_line_wait(rft_host_line *line, uint64_t place, int64_t deadline);

/* Likewise without a deadline: for the thread of a stream, which has no caller. */
void rft_host_line_follow(rft_host_line *line, uint64_t place);

typedef struct rft_host_event rft_host_event;

refit_status rft_host_event_open(rft_host_event **out, refit_error *error);

/* Closed by its owner; queued records still hold it. */
void rft_host_event_close(rft_host_event *event);

/* Moves the event to `place` of `line`, which will be passed; holds the event until
 * rft_host_event_reach. `line` NULL: a place that is passed already, and nothing is held. */
void rft_host_event_move(rft_host_event *event, rft_host_line *line, uint64_t place);

/* The stream has come to the record: takes the failure along, if the event is still there. */
void rft_host_event_reach(rft_host_event *event, const rft_host_line *line, uint64_t place,
                          rft_host_failure *failure);

/* Where the event is now; retains the line. NULL: there is nothing to wait for. */
rft_host_line *rft_host_event_where(rft_host_event *event, uint64_t *place);

refit_status rft_host_event_wait(rft_host_event *event, uint32_t timeout_ms, refit_error *error);

#endif
