/*
 * Frames of one publisher.
 *
 * The window of credits is kept full, and frames go into the reassembly, which copies and digests
 * them. The reassembly belongs to a manifest; versions of one manifest share it.
 */
#include "subscriber/fetch.h"

#include <string.h>

#include "base/alloc.h"
#include "base/clock.h"
#include "wire/frame.h"

/* Missing frames named in one RESEND; others follow at the next beat. */
#define RESEND_MOST 64u

/* ---- Opening, and one version */

void rft_fetch_init(rft_fetch *fetch, const refit_config *config, const rft_limits *limits,
                    rft_send_queue *send_queue, rft_fetch_counts *counts)
{
    *fetch = (rft_fetch){
        .config = config,
        .limits = limits,
        .send_queue = send_queue,
        .counts = counts,
    };
}

static void close_reassembly(rft_fetch *fetch)
{
    rft_reassembly_close(fetch->reassembly);
    fetch->reassembly = NULL;
    rft_free(fetch->resends);
    fetch->resends = NULL;
    rft_catalog_release(fetch->catalog);
    fetch->catalog = NULL;
}

void rft_fetch_close(rft_fetch *fetch)
{
    rft_fetch_end(fetch);
    close_reassembly(fetch);
}

void rft_fetch_end(rft_fetch *fetch)
{
    fetch->version = 0;
}

static refit_status open_reassembly(rft_fetch *fetch, const rft_fetch_plan *plan,
                                    refit_error *error)
{
    const rft_manifest *manifest = plan->catalog->manifest;
    close_reassembly(fetch);
    fetch->resends = rft_calloc((size_t)manifest->frame_count + 1, sizeof *fetch->resends);
    RFT_REFUSE_IF(fetch->resends == NULL, error, REFIT_ERR_HOST_MEMORY,
                  "no memory to follow %u frames", manifest->frame_count);
    RFT_TRY(rft_reassembly_open(manifest, plan->memory, plan->base, &fetch->reassembly, error));
    fetch->catalog = rft_catalog_acquire(plan->catalog);
    return REFIT_OK;
}

refit_status rft_fetch_begin(rft_fetch *fetch, const rft_fetch_plan *plan, refit_error *error)
{
    if (fetch->catalog == plan->catalog) {
        rft_reassembly_reset(fetch->reassembly, plan->memory, plan->base);
        memset(fetch->resends, 0, plan->catalog->manifest->frame_count * sizeof *fetch->resends);
    } else {
        RFT_TRY(open_reassembly(fetch, plan, error));
    }
    rft_reassembly_narrow(fetch->reassembly, plan->want);
    fetch->version = plan->version;
    fetch->window = plan->window;
    fetch->in_flight = 0;
    fetch->quiet_since = 0;
    return REFIT_OK;
}

/* ---- Asking */

static void fetch_send(rft_fetch *fetch, const rft_message *message)
{
    (void)rft_send_queue_put(fetch->send_queue, NULL, message, fetch->limits, NULL);
}

static uint32_t count_left(const rft_fetch *fetch)
{
    return fetch->catalog->manifest->frame_count - rft_reassembly_taken(fetch->reassembly);
}

void rft_fetch_announce(rft_fetch *fetch, const rft_message *pull)
{
    uint32_t left = count_left(fetch);
    uint32_t credits = left < fetch->window ? left : fetch->window;
    rft_message message = *pull;
    message.as.pull.version = fetch->version;
    message.as.pull.credits = credits == 0 ? 1 : credits;
    fetch->in_flight += (int32_t)credits * RFT_CREDIT;
    fetch_send(fetch, &message);
}

/* Once half of the window is used, so that credits do not cost a message a frame; and grants none
 * that no frame is left for. */
void rft_fetch_pull(rft_fetch *fetch)
{
    uint32_t left = count_left(fetch);
    bool last = left <= fetch->window;
    int32_t room = (int32_t)(last ? left : fetch->window) * RFT_CREDIT - fetch->in_flight;
    bool waits = !last && fetch->in_flight > (int32_t)fetch->window * RFT_CREDIT / 2;
    if (room < RFT_CREDIT || waits) return;
    rft_message message = {.kind = RFT_PULL};
    message.as.pull.version = fetch->version;
    message.as.pull.credits = (uint32_t)(room / RFT_CREDIT);
    fetch->in_flight += room / RFT_CREDIT * RFT_CREDIT;
    fetch_send(fetch, &message);
}

/* Returns a received frame's credit. A duplicate is credited twice, so at most one extra frame is
 * in flight. */
static void use_credit(rft_fetch *fetch, uint32_t sequence, uint64_t payload)
{
    const rft_manifest *manifest = fetch->catalog->manifest;
    if (sequence >= manifest->frame_count || fetch->in_flight <= 0) return;
    fetch->in_flight -= rft_credit_cost(payload, manifest->frames[sequence].bytes);
}

static refit_status ask_again(rft_fetch *fetch, const uint32_t *sequences, uint32_t count,
                              refit_error *error)
{
    unsigned char wire[RESEND_MOST * 4];
    for (uint32_t i = 0; i < count; i++) {
        uint16_t *tries = &fetch->resends[sequences[i]];
        RFT_REFUSE_IF(
            *tries >= fetch->config->broadcast_resend_limit, error, REFIT_ERR_CORRUPT,
            "frame %u of version %llu was damaged or lost %u times; broadcast.resend_limit "
            "allows no more",
            sequences[i], (unsigned long long)fetch->version, *tries + 1u);
        ++*tries;
        rft_put_u32(wire + (size_t)i * 4, sequences[i]);
    }
    rft_message message = {.kind = RFT_RESEND};
    message.as.resend.version = fetch->version;
    message.as.resend.sequences = (rft_view){wire, (size_t)count * 4};
    fetch_send(fetch, &message);
    return REFIT_OK;
}

/* ---- What comes */

refit_status rft_fetch_frame(rft_fetch *fetch, const rft_message *frame, rft_view payload,
                             refit_error *error)
{
    fetch->quiet_since = 0;
    fetch->counts->bytes_received += payload.count;
    refit_status status = rft_reassembly_take(fetch->reassembly, frame, payload, error);
    if (status == REFIT_ERR_CORRUPT) {
        fetch->counts->bad_frames++;
        status = ask_again(fetch, &frame->as.frame.sequence, 1, error);
    } else {
        use_credit(fetch, frame->as.frame.sequence, payload.count);
    }
    RFT_TRY(status);
    rft_fetch_pull(fetch);
    return REFIT_OK;
}

/* Whether beats have come for a heartbeat and a half with no frame and no request among them: two
 * of them were sent after the first, so late that frames requested before would have been sent. The
 * clock is this worker's own, because beats that queued up while it did not run are read at once.
 */
static bool is_quiet(rft_fetch *fetch, uint32_t heartbeat_ms, int64_t now)
{
    if (fetch->quiet_since == 0) fetch->quiet_since = now;
    return now >= rft_after_ms(fetch->quiet_since, heartbeat_ms + heartbeat_ms / 2);
}

refit_status rft_fetch_beat(rft_fetch *fetch, uint32_t heartbeat_ms, int64_t now,
                            refit_error *error)
{
    if (!is_quiet(fetch, heartbeat_ms, now)) return REFIT_OK;
    fetch->quiet_since = now;
    uint32_t frames = fetch->catalog->manifest->frame_count;
    /* Which of the missing frames were sent and lost cannot be known. While some are not sent yet,
     * it is the window that lost ones have used up. */
    uint32_t lost = fetch->window;
    uint32_t missing[RESEND_MOST];
    uint32_t count = 0;
    uint32_t next = rft_reassembly_missing(fetch->reassembly, 0, frames);
    while (next != UINT32_MAX && count < lost && count < RESEND_MOST) {
        missing[count++] = next;
        next = rft_reassembly_missing(fetch->reassembly, next + 1, frames);
    }
    return count == 0 ? REFIT_OK : ask_again(fetch, missing, count, error);
}
