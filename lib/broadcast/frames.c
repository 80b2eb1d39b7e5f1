/*
 * The cache of encoded frames. An entry is good for one (version, slot memory); nobody has to
 * invalidate it: an entry made for another pair is made again. Gather buffers are a ring of loans
 * that grows only while all of them are in flight, so their number is bounded by the windows.
 */
#include "broadcast/frames.h"

#include "base/alloc.h"

typedef enum frame_kind { FRAME_FULL, FRAME_DELTA, FRAME_KINDS } frame_kind;

typedef struct frame_entry {
    uint64_t version;     /* 0: empty */
    const rft_loan *slot; /* whose bytes were encoded */
    rft_bytes message;    /* FRAME without its payload */
    rft_view payload;
    uint32_t gather; /* buffer of the payload; UINT32_MAX: none */
} frame_entry;

typedef struct frame_gather {
    rft_loan *loan;
    frame_entry *owner; /* entry whose payload it holds; NULL: none */
} frame_gather;

struct rft_frames {
    const rft_manifest *manifest;
    rft_limits limits;
    frame_entry *entries[FRAME_KINDS]; /* per frame */
    frame_gather *gathers;
    uint32_t gather_count;
    uint32_t gather_next; /* where the search for a free one starts */
    rft_bytes modes;
};

#define NO_GATHER UINT32_MAX

refit_status rft_frames_open(const rft_manifest *manifest, const rft_limits *limits,
                             rft_frames **out, refit_error *error)
{
    rft_frames *frames = rft_calloc(1, sizeof *frames);
    RFT_REFUSE_IF(frames == NULL, error, REFIT_ERR_HOST_MEMORY, "no memory for frames");
    frames->manifest = manifest;
    frames->limits = *limits;
    bool complete = true;
    for (uint32_t i = 0; i < FRAME_KINDS; i++) {
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

void rft_frames_close(rft_frames *frames, rft_attic *attic)
{
    if (frames == NULL) return;
    for (uint32_t i = 0; i < frames->gather_count; i++) {
        rft_attic_put(attic, frames->gathers[i].loan);
    }
    for (uint32_t kind = 0; kind < FRAME_KINDS; kind++) {
        for (uint32_t i = 0; frames->entries[kind] && i < frames->manifest->frame_count; i++) {
            rft_bytes_close(&frames->entries[kind][i].message);
        }
        rft_free(frames->entries[kind]);
    }
    rft_free(frames->gathers);
    rft_bytes_close(&frames->modes);
    rft_free(frames);
}

static refit_status gather_add(rft_frames *frames, uint32_t *out, refit_error *error)
{
    frame_gather *more =
        rft_realloc(frames->gathers, (size_t)frames->gather_count + 1, sizeof *more);
    RFT_REFUSE_IF(more == NULL, error, REFIT_ERR_HOST_MEMORY, "no memory to gather a frame");
    frames->gathers = more;
    rft_loan *loan = rft_loan_open();
    RFT_REFUSE_IF(loan == NULL, error, REFIT_ERR_HOST_MEMORY, "no memory to gather a frame");
    more[frames->gather_count] = (frame_gather){.loan = loan};
    *out = frames->gather_count++;
    return REFIT_OK;
}

/* A buffer that is not in flight; the entry that it served is forgotten. */
static refit_status gather_take(rft_frames *frames, uint32_t *out, refit_error *error)
{
    for (uint32_t i = 0; i < frames->gather_count; i++) {
        uint32_t at = (frames->gather_next + i) % frames->gather_count;
        frame_gather *gather = &frames->gathers[at];
        if (rft_pending_count(&gather->loan->pending) > 0) continue;
        if (gather->owner != NULL) gather->owner->version = 0;
        gather->owner = NULL;
        rft_bytes_reset(&gather->loan->gathered);
        frames->gather_next = (at + 1) % frames->gather_count;
        *out = at;
        return REFIT_OK;
    }
    return gather_add(frames, out, error);
}

static void entry_forget(rft_frames *frames, frame_entry *entry)
{
    if (entry->version != 0 && entry->gather != NO_GATHER) {
        frames->gathers[entry->gather].owner = NULL;
    }
    entry->version = 0;
}

static refit_status entry_message(rft_frames *frames, frame_entry *entry, uint64_t version,
                                  uint32_t sequence, uint64_t hash, refit_error *error)
{
    rft_message message = {.kind = RFT_FRAME};
    message.as.frame.version = version;
    message.as.frame.sequence = sequence;
    message.as.frame.hash = hash;
    message.as.frame.modes = (rft_view){frames->modes.data, frames->modes.count};
    rft_bytes_reset(&entry->message);
    return rft_message_encode(&message, &frames->limits, &entry->message, error);
}

static refit_status entry_fill(rft_frames *frames, frame_entry *entry, const rft_store *store,
                               uint32_t sequence, bool delta, refit_error *error)
{
    const rft_slot *slot = rft_store_served_slot(store);
    uint64_t version = rft_store_served(store)->version, hash;
    uint32_t gather = 0;
    entry_forget(frames, entry);
    RFT_TRY(gather_take(frames, &gather, error));
    rft_loan *loan = frames->gathers[gather].loan;
    rft_bytes_reset(&frames->modes);
    RFT_TRY(rft_frame_encode(frames->manifest, sequence, rft_slot_image(slot),
                             delta ? store->same : NULL, &frames->modes, &loan->gathered,
                             &entry->payload, &hash, error));
    RFT_TRY(entry_message(frames, entry, version, sequence, hash, error));
    bool gathered = loan->gathered.count > 0;
    entry->gather = gathered ? gather : NO_GATHER;
    if (gathered) frames->gathers[gather].owner = entry;
    entry->slot = slot->loan;
    entry->version = version;
    return REFIT_OK;
}

refit_status rft_frames_encode(rft_frames *frames, const rft_store *store, uint32_t sequence,
                               bool delta, rft_encoded *out, refit_error *error)
{
    rft_loan *slot = rft_store_served_slot(store)->loan;
    frame_entry *entry = &frames->entries[delta ? FRAME_DELTA : FRAME_FULL][sequence];
    if (entry->version != rft_store_served(store)->version || entry->slot != slot) {
        RFT_TRY(entry_fill(frames, entry, store, sequence, delta, error));
    }
    rft_loan *loan = entry->gather == NO_GATHER ? slot : frames->gathers[entry->gather].loan;
    *out = (rft_encoded){
        .message = {entry->message.data, entry->message.count},
        .payload = {entry->payload, &loan->pending},
    };
    return REFIT_OK;
}
