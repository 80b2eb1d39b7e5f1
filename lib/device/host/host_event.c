/*
 * Events of the host device.
 *
 * Every stream has a line: it numbers the records that are queued on it and says how many are
 * passed. An event is a place on a line. So an event may be recorded again, on another stream,
 * while somebody still waits for its old place, and a stream may be closed while its events live:
 * the line stays until its last holder lets go.
 *
 *     never recorded ──move──► under way ──reach──► done (REFIT_OK, or the failure it took)
 *                                  ▲                  │
 *                                  └──────move────────┘
 *
 * A failure goes to the event whose record the stream reaches next. An event that was moved or
 * closed meanwhile takes nothing, and one that is closed before anybody asked gives it back to the
 * line: the failure waits for the next record, so that none is lost.
 */
#include "device/host/host_event.h"

#include "base/alloc.h"
#include "base/clock.h"

struct rft_host_event {
    atomic_uint_fast32_t holders; /* the owner, and each queued record */
    rft_mutex lock;
    bool open;                /* guarded by lock, like the rest */
    rft_host_line *line;      /* retained; NULL: nothing to wait for */
    uint64_t place;           /* on it */
    rft_host_failure failure; /* of the work before the place */
    bool untold;              /* there is one, and nobody has asked */
};

refit_status rft_host_line_open(rft_host_line **out, refit_error *error)
{
    rft_host_line *line = rft_calloc(1, sizeof *line);
    RFT_REFUSE_IF(line == NULL, error, REFIT_ERR_HOST_MEMORY, "no host memory for a stream");
    refit_status status = REFIT_OK;
    RFT_TRY_GOTO(rft_mutex_open(&line->lock, error), free_line);
    RFT_TRY_GOTO(rft_cond_open(&line->moved, error), close_lock);
    atomic_init(&line->holders, 1);
    *out = line;
    return REFIT_OK;

close_lock:
    rft_mutex_close(&line->lock);
free_line:
    rft_free(line);
    return status;
}

rft_host_line *rft_host_line_retain(rft_host_line *line)
{
    atomic_fetch_add(&line->holders, 1);
    return line;
}

void rft_host_line_release(rft_host_line *line)
{
    if (line == NULL || atomic_fetch_sub(&line->holders, 1) != 1) return;
    rft_cond_close(&line->moved);
    rft_mutex_close(&line->lock);
    rft_free(line);
}

void rft_host_line_pass(rft_host_line *line, uint64_t place)
{
    rft_lock(&line->lock);
    line->passed = place;
    rft_cond_wake_all(&line->moved);
    rft_unlock(&line->lock);
}

static void return_failure(rft_host_line *line, const rft_host_failure *failure)
{
    rft_lock(&line->lock);
    if (line->returned.status == REFIT_OK) line->returned = *failure;
    rft_unlock(&line->lock);
}

void rft_host_line_take_returned(rft_host_line *line, rft_host_failure *failure)
{
    rft_lock(&line->lock);
    if (line->returned.status != REFIT_OK) *failure = line->returned;
    line->returned.status = REFIT_OK;
    rft_unlock(&line->lock);
}

bool rft_host_line_wait(rft_host_line *line, uint64_t place, int64_t deadline)
{
    rft_lock(&line->lock);
    while (line->passed < place && rft_cond_wait(&line->moved, &line->lock, deadline)) {
    }
    bool passed = line->passed >= place;
    rft_unlock(&line->lock);
    return passed;
}

void rft_host_line_follow(rft_host_line *line, uint64_t place)
{
    rft_lock(&line->lock);
    while (line->passed < place) {
        rft_cond_wait_idle(&line->moved, &line->lock);
    }
    rft_unlock(&line->lock);
}

refit_status rft_host_event_open(rft_host_event **out, refit_error *error)
{
    rft_host_event *event = rft_calloc(1, sizeof *event);
    RFT_REFUSE_IF(event == NULL, error, REFIT_ERR_HOST_MEMORY, "no host memory for an event");
    refit_status status = rft_mutex_open(&event->lock, error);
    if (status != REFIT_OK) {
        rft_free(event);
        return status;
    }
    atomic_init(&event->holders, 1);
    event->open = true;
    *out = event;
    return REFIT_OK;
}

static void let_go(rft_host_event *event)
{
    if (atomic_fetch_sub(&event->holders, 1) != 1) return;
    rft_host_line_release(event->line);
    rft_mutex_close(&event->lock);
    rft_free(event);
}

void rft_host_event_close(rft_host_event *event)
{
    rft_lock(&event->lock);
    event->open = false;
    if (event->untold) return_failure(event->line, &event->failure);
    rft_unlock(&event->lock);
    let_go(event);
}

void rft_host_event_move(rft_host_event *event, rft_host_line *line, uint64_t place)
{
    if (line != NULL) {
        rft_host_line_retain(line);
        atomic_fetch_add(&event->holders, 1);
    }
    rft_lock(&event->lock);
    rft_host_line *before = event->line;
    event->line = line;
    event->place = place;
    event->failure.status = REFIT_OK;
    event->untold = false;
    rft_unlock(&event->lock);
    rft_host_line_release(before);
}

void rft_host_event_reach(rft_host_event *event, const rft_host_line *line, uint64_t place,
                          rft_host_failure *failure)
{
    rft_lock(&event->lock);
    if (event->open && event->line == line && event->place == place) {
        event->failure = *failure;
        event->untold = failure->status != REFIT_OK;
        failure->status = REFIT_OK;
    }
    rft_unlock(&event->lock);
    let_go(event);
}

rft_host_line *rft_host_event_where(rft_host_event *event, uint64_t *place)
{
    rft_lock(&event->lock);
    *place = event->place;
    rft_host_line *line = event->line == NULL ? NULL : rft_host_line_retain(event->line);
    rft_unlock(&event->lock);
    return line;
}

static refit_status outcome(rft_host_event *event, refit_error *error)
{
    rft_lock(&event->lock);
    refit_status status = event->failure.status;
    if (status != REFIT_OK && error != NULL) *error = event->failure.error;
    event->untold = false;
    rft_unlock(&event->lock);
    return status;
}

refit_status rft_host_event_wait(rft_host_event *event, uint32_t timeout_ms, refit_error *error)
{
    uint64_t place;
    rft_host_line *line = rft_host_event_where(event, &place);
    bool passed = line == NULL || rft_host_line_wait(line, place, rft_deadline(timeout_ms));
    rft_host_line_release(line);
    RFT_REFUSE_IF(!passed, error, REFIT_ERR_TIMEOUT, "the stream's work was not done within %u ms",
                  timeout_ms);
    return outcome(event, error);
}
