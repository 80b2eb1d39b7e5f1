/*
 * The cache of encoded frames. An entry is good for one (version, slot memory); it is never
 * invalidated: an entry made for another pair is made again.
 *
 * A frame is gathered in one scratch buffer and then copied to one of its own size, because a frame
 * of which little has changed is a hundredth of what it may be. An entry's buffer is used again for
 * the next version if it is back from the transport and not far too large; else it waits in a
 * retire list. Their number in flight is bounded by the windows.
 *
 * Coding against the base is the one thing that takes long, so frames that will be wanted next are
 * coded together with the one that is wanted now, each by one thread with working memory of its
 * own: they share nothing that is written but the allocator. Nothing is coded before a worker asks.
 */
#include "store/frames.h"

#include "base/alloc.h"
#include "base/clock.h"

/*
 * The two limits of broadcast.delta: auto. A frame is copied only if that saves at least one part
 * of it in so many, and a block is coded only if that saves so many bytes for each element that
 * changed in it. A thread takes about 8 ns to code one, and a worker's one thread as long to apply
 * it; at 3 Gbit/s, a worker's share of a link, 3 bytes are gone in that time. Of a bf16 block about
 * half the elements may have changed, and a fifth of one whose elements are bytes. Workers on the
 * same host map the whole version: nothing is coded for them.
 */
#define WORTH_PART    8u
#define ELEMENT_PRICE 3u
/* Frames that a thread codes at a time. */
#define BATCH_EACH 2u
/* A buffer may be so many times too large, and a little more. */
#define ROOM_MOST  4u
#define ROOM_SPARE 4096u
/* Frames that are kept of a part. */
#define PART_FRAMES 16u

typedef struct frame_entry {
    uint64_t version; /* 0: empty */
    uint32_t sequence;
    const rft_buffer *slot; /* whose bytes were encoded */
    rft_bytes message;      /* FRAME without its payload */
    rft_view payload;
    rft_buffer *gathered; /* a buffer of its own, kept; NULL: none so far */
    bool whole;           /* the payload is the slot's memory, not the buffer's */
} frame_entry;

/* What one thread needs to code frames. */
typedef struct frame_coder {
    rft_bytes modes;
    rft_bytes scratch;
    rft_frame_codec *codec;  /* NULL: not needed so far */
    rft_retire_list retired; /* buffers that are still in flight */
    rft_frames_counts counts;
} frame_coder;

/* The frames of one want, by coding; made when they are first needed. Those of parts are gathered,
 * whatever their coding, so that few of them are kept: one host takes a part, as a rule, and a
 * frame that it asks for again can be made again. */
typedef struct frame_table {
    rft_want *want;                    /* acquired; NULL: everything */
    uint32_t count;                    /* of entries: frame i is the one at i modulo this */
    frame_entry *entries[RFT_CODINGS]; /* NULL: none was needed */
    struct frame_table *next;
} frame_table;

/* Frames that are coded together. */
typedef struct frame_batch {
    rft_frames *frames;
    const rft_store *store;
    frame_table *table;
    rft_coding coding;
    uint32_t count;
    uint32_t sequences[RFT_POOL_MOST * BATCH_EACH];
} frame_batch;

struct rft_frames {
    const rft_manifest *manifest;
    rft_limits limits;
    refit_delta delta;
    uint32_t level;     /* of compression */
    rft_pool *encoders; /* NULL: there are none */
    frame_table whole;
    frame_table *parts; /* owned list: those of which frames are cut */
    frame_coder coders[RFT_POOL_MOST];
    uint64_t cursor_version; /* whose ready frames were looked through, up to `cursor` */
    rft_coding cursor_coding;
    uint32_t cursor;
    uint64_t counted; /* version of these counts, and of the threads' */
    double seconds;
    frame_batch batch;
};

refit_status rft_frames_open_pool(rft_pool *pool, uint32_t threads, refit_error *error)
{
    static const rft_pool_kind frames = {.thread = "refit-encode", .work = "codings of frames"};
    return rft_pool_open(pool, &frames, threads, error);
}

/* Room for the table's frames in this coding. */
static refit_status table_prepare(frame_table *table, rft_coding coding, refit_error *error)
{
    if (table->entries[coding] != NULL) return REFIT_OK;
    table->entries[coding] = rft_calloc(table->count, sizeof *table->entries[coding]);
    RFT_REFUSE_IF(table->entries[coding] == NULL, error, REFIT_ERR_HOST_MEMORY,
                  "no memory for frames");
    return REFIT_OK;
}

refit_status rft_frames_open(const rft_manifest *manifest, const refit_config *config,
                             rft_pool *encoders, rft_frames **out, refit_error *error)
{
    rft_frames *frames = rft_calloc(1, sizeof *frames);
    RFT_REFUSE_IF(frames == NULL, error, REFIT_ERR_HOST_MEMORY, "no memory for frames");
    frames->manifest = manifest;
    frames->limits = rft_limits_from(config);
    frames->delta = (refit_delta)config->broadcast_delta;
    frames->level = config->broadcast_compress_level;
    frames->encoders = encoders;
    frames->whole.count = manifest->frame_count + 1;
    refit_status status = REFIT_OK;
    for (uint32_t i = 0; status == REFIT_OK && i < RFT_CODINGS; i++)
        status = table_prepare(&frames->whole, (rft_coding)i, error);
    if (status != REFIT_OK) {
        rft_frames_close(frames, NULL);
        return status;
    }
    *out = frames;
    return REFIT_OK;
}

static void entries_close(frame_entry *entries, uint32_t count, rft_retire_list *retired)
{
    for (uint32_t i = 0; entries != NULL && i < count; i++) {
        rft_retire_list_put(retired, entries[i].gathered);
        rft_bytes_close(&entries[i].message);
    }
    rft_free(entries);
}

static void table_close(frame_table *table, rft_retire_list *retired)
{
    for (uint32_t i = 0; i < RFT_CODINGS; i++)
        entries_close(table->entries[i], table->count, retired);
    rft_want_release(table->want);
}

/* A want that no worker has any more is not asked for again. */
static void drop_parts(rft_frames *frames, rft_retire_list *retired, bool all)
{
    frame_table **link = &frames->parts;
    while (*link != NULL) {
        frame_table *table = *link;
        if (!all && !rft_want_is_last(table->want)) {
            link = &table->next;
            continue;
        }
        *link = table->next;
        table_close(table, retired);
        rft_free(table);
    }
}

void rft_frames_close(rft_frames *frames, rft_retire_list *retired)
{
    if (frames == NULL) return;
    table_close(&frames->whole, retired);
    drop_parts(frames, retired, true);
    for (uint32_t i = 0; i < RFT_POOL_MOST; i++) {
        rft_retire_list_move(retired, &frames->coders[i].retired);
        rft_bytes_close(&frames->coders[i].modes);
        rft_bytes_close(&frames->coders[i].scratch);
        rft_frame_codec_close(frames->coders[i].codec);
    }
    rft_free(frames);
}

/* ---- One frame */

static frame_entry *entry_of(const frame_table *table, rft_coding coding, uint32_t sequence)
{
    return &table->entries[coding][sequence % table->count];
}

static bool is_usable(rft_buffer *buffer, size_t bytes)
{
    return buffer != NULL && rft_pending_count(&buffer->pending) == 0 &&
           buffer->gathered.room >= bytes &&
           buffer->gathered.room <= bytes * ROOM_MOST + ROOM_SPARE;
}

/* The entry's buffer, free to write, with room for so many bytes. */
static refit_status entry_buffer(frame_coder *coder, frame_entry *entry, size_t bytes,
                                 refit_error *error)
{
    if (is_usable(entry->gathered, bytes)) {
        rft_bytes_reset(&entry->gathered->gathered);
        return REFIT_OK;
    }
    rft_retire_list_put(&coder->retired, entry->gathered);
    entry->gathered = rft_buffer_open();
    RFT_REFUSE_IF(entry->gathered == NULL, error, REFIT_ERR_HOST_MEMORY,
                  "no memory to gather a frame");
    return rft_bytes_reserve(&entry->gathered->gathered, bytes == 0 ? 1 : bytes, error);
}

static refit_status entry_keep(frame_coder *coder, frame_entry *entry, const rft_frame *frame,
                               refit_error *error)
{
    entry->whole = !frame->gathered;
    entry->payload = frame->payload;
    if (entry->whole) return REFIT_OK;
    RFT_TRY(entry_buffer(coder, entry, frame->payload.count, error));
    RFT_TRY(rft_bytes_append(&entry->gathered->gathered, frame->payload.data, frame->payload.count,
                             error));
    entry->payload = rft_bytes_view(&entry->gathered->gathered);
    return REFIT_OK;
}

static refit_status entry_message(const rft_frames *frames, const frame_coder *coder,
                                  frame_entry *entry, uint64_t version, uint32_t sequence,
                                  const rft_frame *frame, refit_error *error)
{
    rft_message message = {.kind = RFT_FRAME};
    message.as.frame.version = version;
    message.as.frame.sequence = sequence;
    message.as.frame.hash = frame->hash;
    message.as.frame.modes = rft_bytes_view(&coder->modes);
    if (frame->packed) {
        message.as.frame.planes = (rft_view){frame->planes, sizeof frame->planes};
    }
    rft_bytes_reset(&entry->message);
    return rft_message_encode(&message, &frames->limits, &entry->message, error);
}

static bool is_sparse(rft_coding coding)
{
    return coding == RFT_CODING_SPARSE || coding == RFT_CODING_PACKED;
}

static rft_frame_source source_for(const rft_frames *frames, const rft_store *store,
                                   uint32_t sequence, rft_coding coding)
{
    bool always = frames->delta == REFIT_DELTA_ALWAYS;
    const rft_version_digests *now = rft_store_served(store), *base = rft_store_base_digests(store);
    return (rft_frame_source){
        .image = rft_slot_image(rft_store_served_slot(store)),
        .same = coding == RFT_CODING_WHOLE ? NULL : store->same,
        .base = is_sparse(coding) ? rft_store_base_image(store) : NULL,
        .worth = always ? 0 : frames->manifest->frames[sequence].bytes / WORTH_PART,
        .price = always ? 0 : ELEMENT_PRICE,
        .before = {base->block_sums, base->has_block_sum},
        .after = {now->block_sums, now->has_block_sum},
        .shard = store->shard,
        .layout = store->layout,
    };
}

static void count(frame_coder *coder, uint64_t version, const rft_frame *frame)
{
    rft_frames_counts *counts = &coder->counts;
    if (counts->version != version) *counts = (rft_frames_counts){.version = version};
    counts->blocks.same += frame->counts.same;
    counts->blocks.sparse += frame->counts.sparse;
    counts->blocks.dense += frame->counts.dense;
    counts->blocks.changed += frame->counts.changed;
    counts->bytes += frame->payload.count;
}

static refit_status entry_fill(rft_frames *frames, frame_coder *coder, const rft_store *store,
                               const frame_table *table, uint32_t sequence, rft_coding coding,
                               refit_error *error)
{
    rft_frame frame;
    frame_entry *entry = entry_of(table, coding, sequence);
    uint64_t version = rft_store_served(store)->version;
    rft_frame_source source = source_for(frames, store, sequence, coding);
    source.want = table->want;
    entry->version = 0;
    if (coding == RFT_CODING_PACKED) {
        if (coder->codec == NULL)
            RFT_TRY(rft_frame_codec_open(frames->level, &coder->codec, error));
        source.codec = coder->codec;
    }
    RFT_TRY(rft_frame_encode(frames->manifest, sequence, &source, &coder->modes, &coder->scratch,
                             &frame, error));
    RFT_TRY(entry_keep(coder, entry, &frame, error));
    RFT_TRY(entry_message(frames, coder, entry, version, sequence, &frame, error));
    entry->slot = rft_store_served_slot(store)->buffer;
    entry->sequence = sequence;
    entry->version = version;
    if (coding != RFT_CODING_WHOLE) count(coder, version, &frame);
    return REFIT_OK;
}

static bool is_made(const frame_table *table, const rft_store *store, uint32_t sequence,
                    rft_coding coding)
{
    const frame_entry *entry = entry_of(table, coding, sequence);
    return entry->sequence == sequence && entry->version == rft_store_served(store)->version &&
           entry->slot == rft_store_served_slot(store)->buffer;
}

/* ---- Several at once */

/* A frame that fails here is coded again, alone, when a worker asks for it, and fails then. */
static void encode_item(void *user, uint32_t item, uint32_t worker)
{
    frame_batch *batch = user;
    (void)entry_fill(batch->frames, &batch->frames->coders[worker], batch->store, batch->table,
                     batch->sequences[item], batch->coding, NULL);
}

/* The frame that is wanted, and those after the cursor that are not made. */
static void batch_choose(rft_frames *frames, const rft_store *store, uint32_t sequence,
                         rft_coding coding, uint32_t ready)
{
    frame_batch *batch = &frames->batch;
    uint64_t version = rft_store_served(store)->version;
    uint32_t most = frames->encoders->threads * BATCH_EACH;
    bool others = frames->cursor_version != version || frames->cursor_coding != coding;
    if (others) frames->cursor = 0;
    frames->cursor_version = version;
    frames->cursor_coding = coding;
    *batch =
        (frame_batch){.frames = frames, .store = store, .table = &frames->whole, .coding = coding};
    batch->sequences[batch->count++] = sequence;
    while (batch->count < most && frames->cursor < ready) {
        uint32_t next = store->ready[frames->cursor++];
        bool cut = rft_want_frame(store->shard, next) != RFT_WANT_ALL;
        if (next == sequence || cut || is_made(batch->table, store, next, coding)) continue;
        batch->sequences[batch->count++] = next;
    }
}

static void make_ahead(rft_frames *frames, const rft_store *store, uint32_t sequence,
                       rft_coding coding, uint32_t ready)
{
    batch_choose(frames, store, sequence, coding, ready);
    rft_pool_items(frames->encoders, frames->batch.count, encode_item, &frames->batch);
}

static refit_status make(rft_frames *frames, const rft_store *store, frame_table *table,
                         uint32_t sequence, rft_coding coding, uint32_t ready, refit_error *error)
{
    int64_t began = rft_now();
    bool together = is_sparse(coding) && frames->encoders != NULL && table == &frames->whole;
    uint64_t version = rft_store_served(store)->version;
    if (frames->counted != version) frames->seconds = 0;
    frames->counted = version;
    if (together) make_ahead(frames, store, sequence, coding, ready);
    if (!is_made(table, store, sequence, coding)) {
        RFT_TRY(entry_fill(frames, &frames->coders[0], store, table, sequence, coding, error));
    }
    if (coding != RFT_CODING_WHOLE) frames->seconds += rft_seconds(rft_now() - began);
    return REFIT_OK;
}

rft_frames_counts rft_frames_count(const rft_frames *frames)
{
    rft_frames_counts sum = {.version = frames->counted, .seconds = frames->seconds};
    for (uint32_t i = 0; i < RFT_POOL_MOST; i++) {
        const rft_frames_counts *counts = &frames->coders[i].counts;
        if (counts->version != sum.version) continue;
        sum.blocks.same += counts->blocks.same;
        sum.blocks.sparse += counts->blocks.sparse;
        sum.blocks.dense += counts->blocks.dense;
        sum.blocks.changed += counts->blocks.changed;
        sum.bytes += counts->bytes;
    }
    return sum;
}

/* The table that has the frame; a cut one is in that of its want. */
static refit_status find_table(rft_frames *frames, uint32_t sequence, rft_coding coding,
                               rft_want *want, frame_table **out, refit_error *error)
{
    *out = &frames->whole;
    if (rft_want_frame(want, sequence) == RFT_WANT_ALL) return REFIT_OK;
    frame_table *table = frames->parts;
    while (table != NULL && !rft_want_equal(table->want, want))
        table = table->next;
    if (table == NULL) {
        drop_parts(frames, &frames->coders[0].retired, false);
        table = rft_calloc(1, sizeof *table);
        RFT_REFUSE_IF(table == NULL, error, REFIT_ERR_HOST_MEMORY, "no memory for frames");
        uint32_t count = frames->whole.count;
        *table = (frame_table){.want = rft_want_acquire(want),
                               .count = count < PART_FRAMES ? count : PART_FRAMES,
                               .next = frames->parts};
        frames->parts = table;
    }
    *out = table;
    return table_prepare(table, coding, error);
}

refit_status rft_frames_encode(rft_frames *frames, const rft_store *store, uint32_t sequence,
                               rft_coding coding, rft_want *want, uint32_t ready, rft_encoded *out,
                               refit_error *error)
{
    frame_table *table;
    RFT_TRY(find_table(frames, sequence, coding, want, &table, error));
    if (!is_made(table, store, sequence, coding)) {
        RFT_TRY(make(frames, store, table, sequence, coding, ready, error));
    }
    const frame_entry *entry = entry_of(table, coding, sequence);
    rft_buffer *buffer = entry->whole ? rft_store_served_slot(store)->buffer : entry->gathered;
    *out = (rft_encoded){
        .message = rft_bytes_view(&entry->message),
        .payload = {entry->payload, &buffer->pending},
    };
    return REFIT_OK;
}
