/*
 * The cache of encoded frames. An entry is good for one (version, slot memory); nobody has to
 * invalidate it: an entry made for another pair is made again.
 *
 * A frame is gathered in one scratch buffer and then copied to one of its own size, because a frame
 * of which little has changed is a hundredth of what it may be. An entry's buffer is used again for
 * the next version if it is back from the transport and not far too large; else it waits in an
 * attic. Their number in flight is bounded by the windows.
 */
#include "broadcast/frames.h"

#include "base/alloc.h"
#include "base/clock.h"

/* broadcast.delta: auto copies a frame only to save at least this part of it. */
#define WORTH_PART 8u
/* A buffer may be so many times too large, and a little more. */
#define ROOM_MOST  4u
#define ROOM_SPARE 4096u

typedef struct frame_entry {
    uint64_t version;     /* 0: empty */
    const rft_loan *slot; /* whose bytes were encoded */
    rft_bytes message;    /* FRAME without its payload */
    rft_view payload;
    rft_loan *gathered; /* a buffer of its own, kept; NULL: none so far */
    bool whole;         /* the payload is the slot's memory, not the buffer's */
} frame_entry;

struct rft_frames {
    const rft_manifest *manifest;
    rft_limits limits;
    refit_delta delta;
    frame_entry *entries[RFT_CODINGS]; /* per frame */
    rft_attic attic;                   /* buffers that are still in flight */
    rft_bytes modes;
    rft_bytes scratch;
    rft_frames_counts counts;
};

refit_status rft_frames_open(const rft_manifest *manifest, const rft_limits *limits,
                             refit_delta delta, rft_frames **out, refit_error *error)
{
    rft_frames *frames = rft_calloc(1, sizeof *frames);
    RFT_REFUSE_IF(frames == NULL, error, REFIT_ERR_HOST_MEMORY, "no memory for frames");
    frames->manifest = manifest;
    frames->limits = *limits;
    frames->delta = delta;
    bool complete = true;
    for (uint32_t i = 0; i < RFT_CODINGS; i++) {
        frames->entries[i] =
            rft_calloc((size_t)manifest->frame_count + 1, sizeof *frames->entries[i]);
        complete = complete && frames->entries[i] != NULL;
    }
    if (!complete) {
        rft_frames_close(frames, NULL);
        return rft_fail(error, REFIT_ERR_HOST_MEMORY, "no memory for frames");
    }
    *out = frames;
    return REFIT_OK;
}

static void entries_close(rft_frames *frames, frame_entry *entries)
{
    for (uint32_t i = 0; entries != NULL && i < frames->manifest->frame_count; i++) {
        rft_attic_put(&frames->attic, entries[i].gathered);
        rft_bytes_close(&entries[i].message);
    }
    rft_free(entries);
}

void rft_frames_close(rft_frames *frames, rft_attic *attic)
{
    if (frames == NULL) return;
    for (uint32_t i = 0; i < RFT_CODINGS; i++) {
        entries_close(frames, frames->entries[i]);
    }
    if (attic != NULL) rft_attic_move(attic, &frames->attic);
    rft_bytes_close(&frames->modes);
    rft_bytes_close(&frames->scratch);
    rft_free(frames);
}

/* ---- One frame */

static bool is_usable(rft_loan *loan, size_t bytes)
{
    return loan != NULL && rft_pending_count(&loan->pending) == 0 && loan->gathered.room >= bytes &&
           loan->gathered.room <= bytes * ROOM_MOST + ROOM_SPARE;
}

/* The entry's buffer, free to write, with room for so many bytes. */
static refit_status entry_buffer(rft_frames *frames, frame_entry *entry, size_t bytes,
                                 refit_error *error)
{
    if (is_usable(entry->gathered, bytes)) {
        rft_bytes_reset(&entry->gathered->gathered);
        return REFIT_OK;
    }
    rft_attic_put(&frames->attic, entry->gathered);
    entry->gathered = rft_loan_open();
    RFT_REFUSE_IF(entry->gathered == NULL, error, REFIT_ERR_HOST_MEMORY,
                  "no memory to gather a frame");
    return rft_bytes_reserve(&entry->gathered->gathered, bytes == 0 ? 1 : bytes, error);
}

static refit_status entry_keep(rft_frames *frames, frame_entry *entry, const rft_frame *frame,
                               refit_error *error)
{
    entry->whole = frame->counts.same == 0 && frame->counts.sparse == 0;
    entry->payload = frame->payload;
    if (entry->whole) return REFIT_OK;
    RFT_TRY(entry_buffer(frames, entry, frame->payload.count, error));
    RFT_TRY(rft_bytes_append(&entry->gathered->gathered, frame->payload.data, frame->payload.count,
                             error));
    entry->payload = rft_bytes_view(&entry->gathered->gathered);
    return REFIT_OK;
}

static refit_status entry_message(rft_frames *frames, frame_entry *entry, uint64_t version,
                                  uint32_t sequence, uint64_t hash, refit_error *error)
{
    rft_message message = {.kind = RFT_FRAME};
    message.as.frame.version = version;
    message.as.frame.sequence = sequence;
    message.as.frame.hash = hash;
    message.as.frame.modes = rft_bytes_view(&frames->modes);
    rft_bytes_reset(&entry->message);
    return rft_message_encode(&message, &frames->limits, &entry->message, error);
}

static rft_frame_source source_for(const rft_frames *frames, const rft_store *store,
                                   uint32_t sequence, rft_coding coding)
{
    bool always = frames->delta == REFIT_DELTA_ALWAYS;
    return (rft_frame_source){
        .image = rft_slot_image(rft_store_served_slot(store)),
        .same = coding == RFT_CODING_WHOLE ? NULL : store->same,
        .base = coding == RFT_CODING_SPARSE ? rft_store_base_image(store) : NULL,
        .worth = always ? 0 : frames->manifest->frames[sequence].bytes / WORTH_PART,
    };
}

static void count(rft_frames *frames, uint64_t version, const rft_frame *frame, int64_t began)
{
    rft_frames_counts *counts = &frames->counts;
    if (counts->version != version) *counts = (rft_frames_counts){.version = version};
    counts->blocks.same += frame->counts.same;
    counts->blocks.sparse += frame->counts.sparse;
    counts->blocks.dense += frame->counts.dense;
    counts->blocks.changed += frame->counts.changed;
    counts->bytes += frame->payload.count;
    counts->seconds += rft_seconds(rft_now() - began);
}

rft_frames_counts rft_frames_count(const rft_frames *frames)
{
    return frames->counts;
}

static refit_status entry_fill(rft_frames *frames, frame_entry *entry, const rft_store *store,
                               uint32_t sequence, rft_coding coding, refit_error *error)
{
    rft_frame frame;
    int64_t began = rft_now();
    uint64_t version = rft_store_served(store)->version;
    rft_frame_source source = source_for(frames, store, sequence, coding);
    entry->version = 0;
    RFT_TRY(rft_frame_encode(frames->manifest, sequence, &source, &frames->modes, &frames->scratch,
                             &frame, error));
    RFT_TRY(entry_keep(frames, entry, &frame, error));
    RFT_TRY(entry_message(frames, entry, version, sequence, frame.hash, error));
    entry->slot = rft_store_served_slot(store)->loan;
    entry->version = version;
    if (coding != RFT_CODING_WHOLE) count(frames, version, &frame, began);
    return REFIT_OK;
}

refit_status rft_frames_encode(rft_frames *frames, const rft_store *store, uint32_t sequence,
                               rft_coding coding, rft_encoded *out, refit_error *error)
{
    rft_loan *slot = rft_store_served_slot(store)->loan;
    frame_entry *entry = &frames->entries[coding][sequence];
    if (entry->version != rft_store_served(store)->version || entry->slot != slot) {
        RFT_TRY(entry_fill(frames, entry, store, sequence, coding, error));
    }
    rft_loan *loan = entry->whole ? slot : entry->gathered;
    *out = (rft_encoded){
        .message = rft_bytes_view(&entry->message),
        .payload = {entry->payload, &loan->pending},
    };
    return REFIT_OK;
}
