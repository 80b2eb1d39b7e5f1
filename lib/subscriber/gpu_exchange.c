/*
 * Rounds over a table of blocks (kernels/delta_job.h).
 *
 *     table ─► device ─► kernels: compare, note, write ─► table of what was done ─► host, one wait
 *
 * A block whose note finds no room is left as it is. The notes then move to host memory, and the
 * next round has the blocks that are left, so that there are as many rounds as the notes need, and
 * no more: one, as a rule.
 *
 * The device's table says what the last round has done, even if the host never came to know it: its
 * notes are undone from there. Of earlier rounds the host keeps the jobs that were noted (a
 * record), from which undo makes the table anew, the newest round first. All is put on one stream;
 * new bytes from the host come on a second one, which fills one window while the kernels read the
 * other.
 */
#include "subscriber/gpu_exchange.h"

#include <inttypes.h>
#include <string.h>

#include "base/alloc.h"
#include "base/checked.h"
#include "base/clock.h"
#include "store/device_memory.h"
#include "store/segment.h"

/* Holds notes of any block. */
#define JOURNAL_LEAST (UINT64_C(4) << 20)

/* Before the jobs of a table. */
typedef struct table_head {
    uint64_t used; /* of the memory for notes */
    uint64_t reserved;
} table_head;

/* Host memory, page-locked where that can be had. */
typedef struct host_block {
    rft_segment segment;
    rft_pinning pinning;
} host_block;

/* Notes that left the device. */
typedef struct spilled_notes {
    struct spilled_notes *next;
    host_block block;
    uint64_t bytes;
} spilled_notes;

/* The noted jobs of a round. */
typedef struct note_record {
    struct note_record *older;
    const spilled_notes *spilled; /* NULL: its notes are on the device */
    bool undone;
    uint32_t count;
    rft_delta_job jobs[];
} note_record;

struct rft_gpu_exchange {
    refit_device *device;  /* retained by the queue */
    refit_config config;   /* a copy */
    rft_copy_queue *queue; /* of the kernels */
    rft_copy_queue *feed;  /* of new bytes from the host; NULL: not needed so far */

    host_block host;            /* the table as the host has it: a head and `room` jobs */
    rft_device_memory *table;   /* the same on the device */
    const unsigned char **from; /* owned; per job: where its new bytes lie */
    uint32_t room;
    uint32_t count; /* of the list */

    rft_device_memory *journal; /* notes; NULL: none are taken */
    rft_device_memory *windows; /* two; NULL: not needed so far */
    uint64_t used;              /* of the journal, before the round */
    uint32_t live; /* jobs in the device's table whose notes are in the journal, not in a record */
    bool known;    /* the host's table says what became of them */
    bool unsure;   /* an undo was begun, and not seen to end */
    note_record *newest;
    spilled_notes *spilled;
};

/* ---- Host memory */

static void host_block_close(host_block *block)
{
    rft_pinning_close(&block->pinning);
    if (block->segment.memory != NULL) rft_segment_close(&block->segment);
    *block = (host_block){.segment.fd = -1};
}

/* Where it cannot be page-locked, copies are slower. */
static refit_status host_block_open(host_block *block, const rft_gpu_exchange *exchange,
                                    uint64_t bytes, refit_error *error)
{
    *block = (host_block){.segment.fd = -1};
    RFT_TRY(rft_segment_create_private(&block->segment, bytes, error));
    if (rft_device_get_caps(exchange->device).needs_pinned)
        (void)rft_pinning_open(&block->pinning, exchange->device, block->segment.memory, bytes,
                               exchange->config.offload_slab_bytes, false, NULL);
    return REFIT_OK;
}

static table_head *head_of(const rft_gpu_exchange *exchange)
{
    return (table_head *)(void *)exchange->host.segment.memory;
}

static rft_delta_job *jobs_of(const rft_gpu_exchange *exchange)
{
    return (rft_delta_job *)(void *)(head_of(exchange) + 1);
}

static rft_delta_job *jobs_there(const rft_gpu_exchange *exchange)
{
    return (rft_delta_job *)(void *)(exchange->table->memory + sizeof(table_head));
}

static uint64_t table_bytes(uint32_t jobs)
{
    return sizeof(table_head) + (uint64_t)jobs * sizeof(rft_delta_job);
}

static uint64_t bytes_of(const rft_delta_job *job)
{
    return (uint64_t)job->shape.elements * job->shape.width;
}

/* ---- Opening and closing */

refit_status rft_gpu_exchange_open(refit_device *device, const refit_config *config,
                                   rft_gpu_exchange **out, refit_error *error)
{
    rft_gpu_exchange *exchange = rft_calloc(1, sizeof *exchange);
    RFT_REFUSE_IF(exchange == NULL, error, REFIT_ERR_HOST_MEMORY,
                  "no memory to write versions into a GPU's memory");
    exchange->device = device;
    exchange->config = *config;
    exchange->host.segment.fd = -1;
    refit_status status = rft_copy_queue_open(device, config, &exchange->queue, error);
    if (status != REFIT_OK) {
        rft_free(exchange);
        return status;
    }
    *out = exchange;
    return REFIT_OK;
}

/* Of the host and of the device; with nothing under way. */
static void close_table(rft_gpu_exchange *exchange)
{
    host_block_close(&exchange->host);
    rft_device_memory_close(exchange->table, exchange->device);
    rft_free(exchange->from);
    exchange->table = NULL;
    exchange->from = NULL;
    exchange->room = exchange->count = 0;
}

bool rft_gpu_exchange_close(rft_gpu_exchange *exchange, int64_t deadline)
{
    if (exchange == NULL) return true;
    if (!rft_gpu_exchange_await(exchange, (uint32_t)rft_ms_until(deadline))) return false;
    rft_gpu_exchange_reset(exchange);
    close_table(exchange);
    bool fed = rft_copy_queue_close(exchange->feed, deadline);
    bool closed = rft_copy_queue_close(exchange->queue, deadline);
    rft_free(exchange);
    return fed && closed;
}

bool rft_gpu_exchange_await(rft_gpu_exchange *exchange, uint32_t timeout_ms)
{
    if (exchange == NULL) return true;
    rft_copy_queue *both[] = {exchange->queue, exchange->feed};
    for (int i = 0; i < 2; i++) {
        if (!rft_copy_queue_is_busy(both[i])) continue;
        (void)rft_copy_queue_wait(both[i], timeout_ms, NULL);
        if (rft_copy_queue_is_busy(both[i])) return false;
    }
    return true;
}

/* Both have ended, or how the first of them did not. */
static refit_status wait_all(rft_gpu_exchange *exchange, refit_error *error)
{
    uint32_t most = exchange->config.broadcast_stage_timeout_ms;
    RFT_TRY(rft_copy_queue_wait(exchange->queue, most, error));
    if (!rft_copy_queue_is_busy(exchange->feed)) return REFIT_OK;
    return rft_copy_queue_wait(exchange->feed, most, error);
}

/* ---- The list */

static refit_status open_table(rft_gpu_exchange *exchange, uint32_t blocks, refit_error *error)
{
    close_table(exchange);
    exchange->from = rft_calloc(blocks, sizeof *exchange->from);
    refit_status status =
        exchange->from == NULL
            ? rft_fail(error, REFIT_ERR_HOST_MEMORY, "no memory for a list of %u blocks", blocks)
            : host_block_open(&exchange->host, exchange, table_bytes(blocks), error);
    if (status == REFIT_OK)
        status =
            rft_device_memory_open(exchange->device, table_bytes(blocks), &exchange->table, error);
    if (status == REFIT_OK) {
        exchange->room = blocks;
    } else {
        close_table(exchange);
    }
    return status;
}

/* The jobs of the table that were noted become a record: the table is needed again. */
static refit_status keep_record(rft_gpu_exchange *exchange, refit_error *error)
{
    const rft_delta_job *jobs = jobs_of(exchange);
    uint32_t count = 0;
    for (uint32_t i = 0; i < exchange->live; i++)
        count += jobs[i].good && jobs[i].entry.changed > 0;
    note_record *record = rft_calloc(1, sizeof *record + count * sizeof *jobs);
    RFT_REFUSE_IF(record == NULL, error, REFIT_ERR_HOST_MEMORY,
                  "no memory to remember %u changed blocks", count);
    for (uint32_t i = 0; i < exchange->live; i++) {
        if (jobs[i].good && jobs[i].entry.changed > 0) record->jobs[record->count++] = jobs[i];
    }
    record->older = exchange->newest;
    exchange->newest = record;
    exchange->live = 0;
    return REFIT_OK;
}

refit_status rft_gpu_exchange_begin(rft_gpu_exchange *exchange, uint32_t blocks, refit_error *error)
{
    RFT_REFUSE_IF(!rft_gpu_exchange_await(exchange, exchange->config.broadcast_stage_timeout_ms),
                  error, REFIT_ERR_TIMEOUT,
                  "work of an earlier call is still under way on the GPU");
    if (exchange->live > 0 && exchange->known) RFT_TRY(keep_record(exchange, error));
    bool half = exchange->live > 0 || (blocks > exchange->room && exchange->newest != NULL);
    RFT_REFUSE_IF(half, error, REFIT_ERR_STATE,
                  "blocks on the GPU are half written: they are brought back first");
    exchange->count = 0;
    return blocks <= exchange->room ? REFIT_OK : open_table(exchange, blocks, error);
}

void rft_gpu_exchange_add(rft_gpu_exchange *exchange, void *block, const void *after,
                          rft_delta_shape shape)
{
    shape.kind = RFT_DELTA_RAW;
    exchange->from[exchange->count] = after;
    jobs_of(exchange)[exchange->count++] =
        (rft_delta_job){.before = (uintptr_t)after, .after = (uintptr_t)block, .shape = shape};
}

/* ---- Memory for notes */

static uint64_t most_noted(const rft_gpu_exchange *exchange)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < exchange->count; i++)
        bytes += (bytes_of(&jobs_of(exchange)[i]) + 15) & ~UINT64_C(15);
    return bytes;
}

/* As much as the worst case needs and the configuration allows, or less where the device has less.
 */
static refit_status take_journal(rft_gpu_exchange *exchange, refit_error *error)
{
    uint64_t most = rft_max_u64(exchange->config.broadcast_gpu_bucket_bytes, JOURNAL_LEAST);
    uint64_t bytes = rft_min_u64(most_noted(exchange), most);
    refit_status status = REFIT_OK;
    if (exchange->journal != NULL || bytes == 0) return REFIT_OK;
    do {
        status = rft_device_memory_open(exchange->device, bytes, &exchange->journal, error);
        if (status != REFIT_ERR_DEVICE_MEMORY || bytes <= JOURNAL_LEAST) break;
        bytes = rft_max_u64(bytes / 2, JOURNAL_LEAST);
    } while (true);
    return status;
}

/* The bytes count for the device, as its arenas do. */
static refit_status claim(rft_gpu_exchange *exchange, uint64_t bytes, refit_error *error)
{
    uint64_t given = exchange->config.offload_budget_bytes;
    uint64_t others = atomic_fetch_add(&exchange->device->host_bytes, bytes);
    if (given == 0 || bytes <= given - rft_min_u64(others, given)) return REFIT_OK;
    atomic_fetch_sub(&exchange->device->host_bytes, bytes);
    return rft_fail(error, REFIT_ERR_BUDGET,
                    "old bytes cannot be noted: %" PRIu64 " bytes are needed besides %" PRIu64
                    " of the device's host memory, and offload.budget_bytes is %" PRIu64
                    ": raise it or broadcast.gpu_bucket_bytes, or use load_into",
                    bytes, others, given);
}

static refit_status open_spilled(rft_gpu_exchange *exchange, uint64_t bytes, spilled_notes **out,
                                 refit_error *error)
{
    spilled_notes *notes = rft_calloc(1, sizeof *notes);
    RFT_REFUSE_IF(notes == NULL, error, REFIT_ERR_HOST_MEMORY, "no memory to note old bytes in");
    refit_status status = claim(exchange, bytes, error);
    if (status == REFIT_OK) {
        status = host_block_open(&notes->block, exchange, bytes, error);
        if (status != REFIT_OK) atomic_fetch_sub(&exchange->device->host_bytes, bytes);
    }
    if (status != REFIT_OK) {
        rft_free(notes);
        return status;
    }
    notes->bytes = bytes;
    *out = notes;
    return REFIT_OK;
}

/* All notes move to host memory; their records are there. The copy reads what is put on the stream
 * before it. */
static refit_status spill(rft_gpu_exchange *exchange, refit_error *error)
{
    spilled_notes *notes = NULL;
    uint64_t bytes = rft_min_u64(exchange->used, exchange->journal->bytes);
    RFT_TRY(open_spilled(exchange, bytes, &notes, error));
    notes->next = exchange->spilled;
    exchange->spilled = notes;
    RFT_TRY(rft_copy_queue_copy(exchange->queue, notes->block.segment.memory,
                                exchange->journal->memory, bytes, &notes->block.pinning, error));
    for (note_record *record = exchange->newest; record != NULL && record->spilled == NULL;
         record = record->older)
        record->spilled = notes;
    exchange->used = 0;
    return REFIT_OK;
}

/* ---- Windows
 *
 * The list is cut into windows in its order. New bytes that follow each other on the host, but for
 * the padding between tensors, do so in their window, and come by one copy.
 */

#define PADDING 64u

/* One window, as it is filled. */
typedef struct window_plan {
    uint64_t bytes; /* of the window */
    const unsigned char
        *run;        /* bytes of the host that follow each other; NULL: there are none yet */
    uint64_t run_at; /* where they begin in the window */
    uint64_t end;    /* where the last of them end */
} window_plan;

/* Where in the window new bytes lie. False: they do not fit any more. */
static bool place(window_plan *plan, const unsigned char *from, uint64_t bytes, uint64_t *at)
{
    window_plan next = *plan;
    const unsigned char *after = next.run == NULL ? NULL : next.run + (next.end - next.run_at);
    if (after == NULL || from < after || (uint64_t)(from - after) >= PADDING) {
        next.run = from;
        next.run_at = (next.end + PADDING - 1) & ~(uint64_t)(PADDING - 1);
    }
    *at = next.run_at + (uint64_t)(from - next.run);
    next.end = *at + bytes;
    if (next.end > next.bytes) return false;
    *plan = next;
    return true;
}

static uint64_t window_bytes(const rft_gpu_exchange *exchange)
{
    return exchange->windows->bytes / 2;
}

/* Where the host memory is not page-locked its copies are slow, or go through memory that is. */
static refit_status take_windows(rft_gpu_exchange *exchange, const rft_pinning *pinning,
                                 refit_error *error)
{
    uint64_t bytes = exchange->config.offload_staging_bytes;
    if (exchange->feed == NULL)
        RFT_TRY(rft_copy_queue_open(exchange->device, &exchange->config, &exchange->feed, error));
    if (pinning == NULL) rft_copy_queue_open_staging(exchange->feed);
    if (exchange->windows != NULL) return REFIT_OK;
    return rft_device_memory_open(exchange->device, 2 * bytes, &exchange->windows, error);
}

/* Decides where the new bytes of each job will lie. */
static void place_all(rft_gpu_exchange *exchange)
{
    const window_plan empty = {.bytes = window_bytes(exchange)};
    window_plan plan = empty;
    unsigned char *window = exchange->windows->memory;
    uint64_t other = window_bytes(exchange), at = 0;
    for (uint32_t i = 0; i < exchange->count; i++) {
        rft_delta_job *job = &jobs_of(exchange)[i];
        if (!place(&plan, exchange->from[i], bytes_of(job), &at)) {
            window = window == exchange->windows->memory ? window + other : window - other;
            plan = empty;
            (void)place(&plan, exchange->from[i], bytes_of(job), &at);
        }
        job->before = (uintptr_t)(window + at);
    }
}

static bool is_second(const rft_gpu_exchange *exchange, uint32_t job)
{
    uint64_t there = (uintptr_t)exchange->windows->memory;
    return jobs_of(exchange)[job].before >= there + window_bytes(exchange);
}

/* The end of the window that begins with job `first`. */
static uint32_t end_of_window(const rft_gpu_exchange *exchange, uint32_t first)
{
    uint32_t end = first;
    while (end < exchange->count && is_second(exchange, end) == is_second(exchange, first))
        end++;
    return end;
}

/* Copies the new bytes of the jobs to where they were placed. */
static refit_status fill_window(rft_gpu_exchange *exchange, uint32_t first, uint32_t end,
                                const rft_pinning *pinning, refit_error *error)
{
    const rft_delta_job *jobs = jobs_of(exchange);
    for (uint32_t i = first, next; i < end; i = next) {
        const unsigned char *run = exchange->from[i];
        uint64_t bytes = 0;
        for (next = i; next < end; next++) {
            uint64_t at = jobs[next].before - jobs[i].before;
            bool follows = exchange->from[next] >= run && exchange->from[next] == run + at;
            if (!follows) break;
            bytes = at + bytes_of(&jobs[next]);
        }
        RFT_TRY(rft_copy_queue_copy_up(exchange->feed, (void *)(uintptr_t)jobs[i].before, run,
                                       bytes, pinning, error));
    }
    return REFIT_OK;
}

/* ---- Rounds */

static refit_status launch(rft_gpu_exchange *exchange, const rft_exchange_way *way, uint32_t first,
                           uint32_t end, refit_error *error)
{
    rft_delta_notes notes = {.used = &((table_head *)(void *)exchange->table->memory)->used};
    if (way->noted) notes.memory = exchange->journal->memory;
    if (way->noted) notes.room = exchange->journal->bytes;
    return rft_device_delta_exchange(exchange->device, rft_copy_queue_stream(exchange->queue),
                                     jobs_there(exchange) + first, end - first, &notes, error);
}

/* A window is filled after the kernels of the one before last, which read it; then come those of
 * the last one, so that they run meanwhile. */
static refit_status launch_windows(rft_gpu_exchange *exchange, const rft_exchange_way *way,
                                   refit_error *error)
{
    uint32_t last = 0, first = 0;
    while (first < exchange->count) {
        uint32_t end = end_of_window(exchange, first);
        RFT_TRY(
            rft_copy_queue_follow(exchange->feed, rft_copy_queue_stream(exchange->queue), error));
        RFT_TRY(
            rft_copy_queue_follow(exchange->queue, rft_copy_queue_stream(exchange->feed), error));
        RFT_TRY(launch(exchange, way, last, first, error));
        RFT_TRY(fill_window(exchange, first, end, way->pinning, error));
        last = first;
        first = end;
    }
    RFT_TRY(rft_copy_queue_follow(exchange->queue, rft_copy_queue_stream(exchange->feed), error));
    return launch(exchange, way, last, first, error);
}

static refit_status put_round(rft_gpu_exchange *exchange, const rft_exchange_way *way,
                              refit_error *error)
{
    uint64_t bytes = table_bytes(exchange->count);
    exchange->known = false;
    head_of(exchange)->used = exchange->used;
    if (way->from_host) place_all(exchange);
    RFT_TRY(rft_copy_queue_copy(exchange->queue, exchange->table->memory,
                                exchange->host.segment.memory, bytes, &exchange->host.pinning,
                                error));
    if (way->noted) exchange->live = exchange->count;
    if (way->from_host) {
        RFT_TRY(launch_windows(exchange, way, error));
    } else {
        RFT_TRY(launch(exchange, way, 0, exchange->count, error));
    }
    return rft_copy_queue_copy(exchange->queue, exchange->host.segment.memory,
                               exchange->table->memory, bytes, &exchange->host.pinning, error);
}

/* A failed call leaves a part of the round on its way. It is waited for, so that what it reads and
 * writes may be given back; how that ends does not matter. */
static refit_status run_round(rft_gpu_exchange *exchange, const rft_exchange_way *way,
                              refit_error *error)
{
    refit_error later;
    refit_status issued = put_round(exchange, way, error);
    refit_status status = wait_all(exchange, issued == REFIT_OK ? error : &later);
    RFT_TRY(rft_keep_first(issued, status));
    exchange->known = true;
    exchange->used = head_of(exchange)->used;
    return REFIT_OK;
}

/* Adds up what was changed; returns how many blocks are left. */
static uint32_t count_left(const rft_gpu_exchange *exchange, uint64_t *changed)
{
    const rft_delta_job *jobs = jobs_of(exchange);
    uint32_t left = 0;
    for (uint32_t i = 0; i < exchange->count; i++) {
        left += jobs[i].good ? 0 : 1;
        *changed += (uint64_t)jobs[i].entry.changed * jobs[i].shape.width;
    }
    return left;
}

/* The list is what is left. */
static void keep_left(rft_gpu_exchange *exchange)
{
    rft_delta_job *jobs = jobs_of(exchange);
    uint32_t left = 0;
    for (uint32_t i = 0; i < exchange->count; i++) {
        if (jobs[i].good) continue;
        exchange->from[left] = exchange->from[i];
        jobs[left++] = jobs[i];
    }
    exchange->count = left;
}

static refit_status next_round(rft_gpu_exchange *exchange, refit_error *error)
{
    RFT_TRY(keep_record(exchange, error));
    RFT_TRY(spill(exchange, error));
    keep_left(exchange);
    return REFIT_OK;
}

refit_status rft_gpu_exchange_run(rft_gpu_exchange *exchange, const rft_exchange_way *way,
                                  uint64_t *changed, refit_error *error)
{
    if (exchange->count == 0) return REFIT_OK;
    if (way->noted) RFT_TRY(take_journal(exchange, error));
    if (way->from_host) RFT_TRY(take_windows(exchange, way->pinning, error));
    for (;;) {
        bool empty = exchange->used == 0;
        RFT_TRY(run_round(exchange, way, error));
        uint32_t left = count_left(exchange, changed);
        if (left == 0) return REFIT_OK;
        RFT_REFUSE_IF(empty && left == exchange->count, error, REFIT_ERR_DEVICE_MEMORY,
                      "%u blocks are larger than the memory for notes", left);
        RFT_TRY(next_round(exchange, error));
    }
}

/* ---- Bringing back */

bool rft_gpu_exchange_is_empty(const rft_gpu_exchange *exchange)
{
    if (exchange == NULL) return true;
    return exchange->live == 0 && exchange->newest == NULL && !exchange->unsure;
}

static refit_status undo_live(rft_gpu_exchange *exchange, refit_error *error)
{
    return rft_device_delta_apply(exchange->device, rft_copy_queue_stream(exchange->queue),
                                  jobs_there(exchange), exchange->live, error);
}

/* `*loaded`: whose notes are in the journal; NULL: those that never left it. */
static refit_status undo_record(rft_gpu_exchange *exchange, const note_record *record,
                                const spilled_notes **loaded, refit_error *error)
{
    const spilled_notes *notes = record->spilled;
    if (notes != *loaded) {
        RFT_TRY(rft_copy_queue_copy(exchange->queue, exchange->journal->memory,
                                    notes->block.segment.memory, notes->bytes,
                                    &notes->block.pinning, error));
        *loaded = notes;
    }
    RFT_TRY(rft_copy_queue_copy(exchange->queue, jobs_there(exchange), record->jobs,
                                record->count * sizeof *record->jobs, NULL, error));
    return rft_device_delta_apply(exchange->device, rft_copy_queue_stream(exchange->queue),
                                  jobs_there(exchange), record->count, error);
}

static refit_status put_undo(rft_gpu_exchange *exchange, refit_error *error)
{
    const spilled_notes *loaded = NULL;
    if (exchange->live > 0) RFT_TRY(undo_live(exchange, error));
    exchange->live = 0;
    for (note_record *record = exchange->newest; record != NULL; record = record->older) {
        if (record->undone) continue;
        RFT_TRY(undo_record(exchange, record, &loaded, error));
        record->undone = true;
    }
    return REFIT_OK;
}

refit_status rft_gpu_exchange_undo(rft_gpu_exchange *exchange, refit_error *error)
{
    refit_error later;
    bool idle = exchange == NULL || rft_gpu_exchange_await(exchange, 0);
    if (idle && rft_gpu_exchange_is_empty(exchange)) {
        rft_gpu_exchange_reset(exchange);
        return REFIT_OK;
    }
    exchange->unsure = true;
    refit_status issued = put_undo(exchange, error);
    refit_status status = wait_all(exchange, issued == REFIT_OK ? error : &later);
    RFT_TRY(rft_keep_first(issued, status));
    exchange->unsure = false;
    rft_gpu_exchange_reset(exchange);
    return REFIT_OK;
}

void rft_gpu_exchange_reset(rft_gpu_exchange *exchange)
{
    if (exchange == NULL || !rft_gpu_exchange_await(exchange, 0)) return;
    while (exchange->newest != NULL) {
        note_record *record = exchange->newest;
        exchange->newest = record->older;
        rft_free(record);
    }
    while (exchange->spilled != NULL) {
        spilled_notes *notes = exchange->spilled;
        exchange->spilled = notes->next;
        host_block_close(&notes->block);
        atomic_fetch_sub(&exchange->device->host_bytes, notes->bytes);
        rft_free(notes);
    }
    rft_device_memory_close(exchange->journal, exchange->device);
    rft_device_memory_close(exchange->windows, exchange->device);
    exchange->journal = exchange->windows = NULL;
    exchange->live = 0;
    exchange->used = 0;
    exchange->known = exchange->unsure = false;
}
