/*
 * A stream, an event in the caller's stream and one in the own.
 *
 * A copy from or to the host is cut where a page-lock registration ends and at offload.piece_bytes,
 * so that copies of other streams are not held up behind it on the link. What has been put on the
 * stream counts as under way until an event behind it says otherwise; an event that could not be
 * recorded says nothing.
 */
#include "broadcast/carrier.h"

#include "base/alloc.h"
#include "base/checked.h"
#include "base/clock.h"
#include "kernels/digest.h"

#define HELD_MOST    2u
#define BATCH_MOST   16u
#define WINDOW_BYTES (UINT64_C(4) << 20) /* a whole number of words */

struct rft_carrier {
    refit_device *device; /* retained */
    rft_device_caps caps;
    uint64_t piece_bytes;
    refit_stream_ref stream;
    rft_event *before; /* in the caller's stream */
    rft_event *behind; /* in ours */
    rft_pending *held[HELD_MOST];
    uint32_t held_count;
    bool busy;
    uint64_t sum;
    unsigned char *window; /* of the host, to digest through; NULL: not needed so far */
    uint32_t timeout_ms;   /* for a window */
    rft_tally tally;
};

static refit_status parts_open(rft_carrier *carrier, refit_error *error)
{
    refit_status status;
    RFT_TRY(rft_device_event_open(carrier->device, &carrier->before, error));
    RFT_TRY_GOTO(rft_device_event_open(carrier->device, &carrier->behind, error), undo_before);
    RFT_TRY_GOTO(refit_stream_open(carrier->device, &carrier->stream, error), undo_behind);
    return REFIT_OK;

undo_behind:
    rft_device_event_close(carrier->device, carrier->behind);
undo_before:
    rft_device_event_close(carrier->device, carrier->before);
    return status;
}

refit_status rft_carrier_open(refit_device *device, const refit_config *config, rft_carrier **out,
                              refit_error *error)
{
    rft_carrier *carrier = rft_calloc(1, sizeof *carrier);
    RFT_REFUSE_IF(carrier == NULL, error, REFIT_ERR_HOST_MEMORY, "no memory to copy from a device");
    carrier->device = device;
    carrier->caps = rft_device_get_caps(device);
    carrier->piece_bytes = config->offload_piece_bytes;
    carrier->timeout_ms = config->broadcast_stage_timeout_ms;
    refit_status status = parts_open(carrier, error);
    if (status == REFIT_OK) {
        rft_device_retain(device);
        *out = carrier;
    } else {
        rft_free(carrier);
    }
    return status;
}

static void finish(rft_carrier *carrier)
{
    while (carrier->held_count > 0) {
        rft_pending_lower(carrier->held[--carrier->held_count]);
    }
    carrier->busy = false;
}

/* It is idle; and who closes a publisher cannot ask again, so a refusal is not taken at once. */
static bool stream_close(rft_carrier *carrier)
{
    refit_status status = refit_stream_close(carrier->device, carrier->stream, NULL);
    if (status != REFIT_OK) status = refit_stream_close(carrier->device, carrier->stream, NULL);
    return status == REFIT_OK;
}

bool rft_carrier_close(rft_carrier *carrier, int64_t deadline)
{
    if (carrier == NULL) return true;
    if (carrier->busy) (void)rft_carrier_wait(carrier, (uint32_t)rft_ms_until(deadline), NULL);
    if (carrier->busy) return false;
    refit_device *device = carrier->device;
    rft_device_event_close(device, carrier->before);
    rft_device_event_close(device, carrier->behind);
    rft_tally_close(&carrier->tally, device);
    bool closed = stream_close(carrier);
    rft_device_release(device);
    rft_free(carrier->window);
    rft_free(carrier);
    return closed;
}

refit_device *rft_carrier_device(const rft_carrier *carrier)
{
    return carrier->device;
}

refit_status rft_carrier_follow(rft_carrier *carrier, refit_stream_ref after, refit_error *error)
{
    if (after.native == NULL) return REFIT_OK;
    RFT_TRY(rft_device_event_record(carrier->device, carrier->before, after, error));
    return rft_device_event_join(carrier->device, carrier->before, carrier->stream, error);
}

void rft_carrier_hold(rft_carrier *carrier, rft_pending *pending)
{
    rft_pending_raise(pending);
    carrier->held[carrier->held_count++] = pending;
    carrier->busy = true;
}

/* How many bytes may be one copy. */
static uint64_t reach(const rft_carrier *carrier, const void *to, const void *from, uint64_t bytes,
                      const rft_pinning *pinning)
{
    bytes = rft_pinning_reach(pinning, to, bytes);
    bytes = rft_pinning_reach(pinning, from, bytes);
    return rft_min_u64(bytes, carrier->piece_bytes);
}

refit_status rft_carrier_copy(rft_carrier *carrier, void *to, const void *from, uint64_t bytes,
                              const rft_pinning *pinning, refit_error *error)
{
    uint32_t most = carrier->caps.batch_most < BATCH_MOST ? carrier->caps.batch_most : BATCH_MOST;
    unsigned char *target = to;
    const unsigned char *source = from;
    carrier->busy = true;
    while (bytes > 0) {
        rft_copy copies[BATCH_MOST];
        uint32_t count = 0;
        for (; bytes > 0 && count < most; count++) {
            uint64_t step = reach(carrier, target, source, bytes, pinning);
            copies[count] =
                (rft_copy){.to = target, .from = source, .bytes = step, .checked = true};
            target += step;
            source += step;
            bytes -= step;
        }
        RFT_TRY(rft_device_copy_batch(carrier->device, carrier->stream, copies, count,
                                      RFT_COPY_STREAM, error));
    }
    return REFIT_OK;
}

refit_status rft_carrier_copy_within(rft_carrier *carrier, void *to, const void *from,
                                     uint64_t bytes, refit_error *error)
{
    carrier->busy = true;
    return refit_stream_copy(carrier->device, carrier->stream, to, from, bytes, error);
}

bool rft_carrier_digests(const rft_carrier *carrier)
{
    return carrier->caps.digests;
}

/* By the CPU, from a copy of each piece. */
static refit_status digest_here(rft_carrier *carrier, const unsigned char *memory, uint64_t bytes,
                                uint64_t offset, refit_error *error)
{
    uint64_t sum = 0;
    if (carrier->window == NULL) carrier->window = rft_calloc(1, WINDOW_BYTES);
    RFT_REFUSE_IF(carrier->window == NULL, error, REFIT_ERR_HOST_MEMORY,
                  "no memory to digest what lies on a device");
    for (uint64_t at = 0; at < bytes; at += WINDOW_BYTES) {
        uint64_t step = rft_min_u64(bytes - at, WINDOW_BYTES);
        RFT_TRY(rft_carrier_copy(carrier, carrier->window, memory + at, step, NULL, error));
        RFT_TRY(rft_carrier_wait(carrier, carrier->timeout_ms, error));
        sum += rft_digest_part(carrier->window, step, offset + at);
    }
    carrier->sum = sum;
    return REFIT_OK;
}

refit_status rft_carrier_digest(rft_carrier *carrier, const void *memory, uint64_t bytes,
                                uint64_t offset, refit_error *error)
{
    if (!carrier->caps.digests) return digest_here(carrier, memory, bytes, offset, error);
    carrier->busy = true;
    return rft_device_digest(carrier->device, carrier->stream, memory, bytes, offset, &carrier->sum,
                             error);
}

uint64_t rft_carrier_sum(const rft_carrier *carrier)
{
    return carrier->sum;
}

/* ---- Many digests */

refit_status rft_carrier_tally_open(rft_carrier *carrier, refit_error *error)
{
    if (carrier->tally.sums != NULL) return REFIT_OK;
    return rft_tally_open(&carrier->tally, carrier->device, error);
}

refit_status rft_carrier_tally_begin(rft_carrier *carrier, refit_error *error)
{
    carrier->busy = true;
    return rft_device_zero(carrier->device, carrier->stream, carrier->tally.sums,
                           RFT_TALLY_MOST * sizeof(uint64_t), error);
}

refit_status rft_carrier_tally_add(rft_carrier *carrier, uint32_t index, void *to, const void *from,
                                   uint64_t bytes, refit_error *error)
{
    return rft_device_digest_copy(carrier->device, carrier->stream, to, from, bytes, 0,
                                  rft_tally_sum(&carrier->tally, index), error);
}

refit_status rft_carrier_tally_end(rft_carrier *carrier, uint32_t count, refit_error *error)
{
    rft_tally *tally = &carrier->tally;
    return rft_carrier_copy(carrier, tally->twins, tally->sums, count * sizeof(uint64_t),
                            &tally->pinning, error);
}

const uint64_t *rft_carrier_tally_sums(const rft_carrier *carrier)
{
    return carrier->tally.twins;
}

/* ---- The end of work */

refit_status rft_carrier_wait(rft_carrier *carrier, uint32_t timeout_ms, refit_error *error)
{
    refit_device *device = carrier->device;
    refit_status status = rft_device_event_record(device, carrier->behind, carrier->stream, error);
    if (status != REFIT_OK) {
        /* A lost device fails this, too, and does nothing any more. */
        refit_status last = rft_device_event_wait(device, carrier->behind, 0, NULL);
        if (last != REFIT_OK && last != REFIT_ERR_TIMEOUT) finish(carrier);
        return status;
    }
    status = rft_device_event_wait(device, carrier->behind, timeout_ms, error);
    if (status != REFIT_ERR_TIMEOUT) finish(carrier);
    return status;
}

bool rft_carrier_is_busy(const rft_carrier *carrier)
{
    return carrier != NULL && carrier->busy;
}

bool rft_carrier_holds(const rft_carrier *carrier, const rft_pending *pending)
{
    for (uint32_t i = 0; carrier != NULL && i < carrier->held_count; i++) {
        if (carrier->held[i] == pending) return true;
    }
    return false;
}
