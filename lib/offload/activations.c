/*
 * Activations: groups of tensors leave for an arena of host memory and return from it.
 *
 * A group has a transfer out and a transfer in. A transfer is made of copies on one stream, which
 * wait for the caller's stream, and an event after them. There is one stream for each direction.
 * What a group is doing follows from three facts:
 *
 *     OPEN       open
 *     LEAVING    out.moving, and not in.moving
 *     RETURNING  in.moving; out.moving too where a fetch came before the copies out were over
 *     AWAY, RETURNED   none of them: the bytes are in the arena
 *
 * Copies are seen to be over when a call looks at the event after them (poll). The copies in wait
 * on the device for those out, so the event after a transfer in is after both transfers.
 *
 * Order on the device, without a wait of the CPU:
 * - A transfer in joins the transfer out of its group.
 * - Room in the arena is given back while copies in may still read it: then the stream out joins
 *   these, before the room can be written again. Copies out that still write it are before all
 *   others on their stream.
 *
 * A call that fails after it has put copies on a stream waits for them. If it cannot, the stream
 * is stuck (stream_wait), and the calls after it try again before they do anything.
 *
 * Records of groups and tensors come from two pools that only grow. One mutex is held in all calls,
 * also while they wait; the figures are atomic, so that reading them does not wait.
 *
 * Independent of: what a tensor is, which layer saves it, which tensors are worth their copies.
 */
#include <inttypes.h>
#include <stdatomic.h>
#include <string.h>

#include <refit/advanced/activations.h>

#include "base/alloc.h"
#include "base/checked.h"
#include "base/clock.h"
#include "config/config.h"
#include "memory/host_arena.h"
#include "offload/activation_stack.h"
#include "transfer/plan.h"

/* Records that a pool gets at once: as many as it has, between these. */
#define GROUPS_LEAST  16u
#define GROUPS_MOST   1024u
#define TENSORS_LEAST 256u
#define TENSORS_MOST  65536u

typedef struct saved_tensor {
    struct saved_tensor *next; /* of its group, or of the pool */
    const void *memory;        /* borrowed, on the device */
    const void *allocation;    /* the allocation that contains it */
    uint64_t bytes;
    uint64_t at; /* in the arena */
} saved_tensor;

/* Copies in one direction. */
typedef struct transfer {
    rft_event *end; /* after the copies */
    bool moving;    /* it was not seen to be over */
} transfer;

typedef struct saved_group {
    struct saved_group *next; /* of the pool */
    saved_tensor *first;
    saved_tensor *last;
    uint64_t bytes;
    uint32_t count; /* of tensors */
    bool open;
    bool joined; /* the transfer in was, by a stream of the caller's */
    transfer out;
    transfer in;
} saved_group;

typedef struct group_chunk {
    struct group_chunk *next;
    uint32_t count;
    saved_group items[];
} group_chunk;

typedef struct tensor_chunk {
    struct tensor_chunk *next;
    saved_tensor items[];
} tensor_chunk;

/* A group that was begun and not released. */
typedef struct group_entry {
    refit_activation_group number;
    saved_group *group;
} group_entry;

typedef struct copy_stream {
    refit_stream_ref stream; /* none after a failure: the next transfer opens it */
    rft_event *end;          /* after copies that could not be waited for */
    bool stuck;              /* there are such copies */
    bool marked;             /* `end` is after them */
} copy_stream;

typedef struct activation_figures {
    atomic_uint_fast64_t groups, host_bytes, used_bytes, used_bytes_peak, out_bytes, in_bytes,
        refused_bytes, out_of_order, reused, failures, blocked;
} activation_figures;

struct refit_activations {
    refit_device *device; /* retained */
    refit_config config;
    rft_layout layout;
    rft_mutex lock;
    activation_figures figures;

    /* All below is guarded by lock. */
    rft_host_arena *arena; /* NULL: it could not be taken */
    bool ready;            /* its memory is there */
    bool closing;
    rft_stack stack;
    copy_stream out;
    copy_stream in;
    rft_event *before; /* on the caller's stream, for the transfer that is being started */
    rft_plan plan;     /* of that transfer */
    rft_piece *pieces; /* owned; as many as plan.limits has */

    group_entry *table; /* owned; by number */
    uint32_t table_count;
    uint32_t table_room;
    refit_activation_group last_number;

    saved_group *spare_groups;
    saved_tensor *spare_tensors;
    group_chunk *group_chunks;   /* owned */
    tensor_chunk *tensor_chunks; /* owned */
    uint32_t groups_made;
    uint32_t tensors_made;
};

/* ---- Small things ---------------------------------------------------------------------------- */

static uint32_t timeout_of(const refit_activations *activations)
{
    return activations->config.offload_timeout_ms;
}

static void count_up(atomic_uint_fast64_t *figure, uint64_t by)
{
    atomic_fetch_add(figure, by);
}

static refit_status await_event(refit_activations *activations, rft_event *event,
                                uint32_t timeout_ms, refit_error *error)
{
    int64_t began = rft_now();
    refit_status status = rft_device_event_wait(activations->device, event, timeout_ms, error);
    if (timeout_ms > 0) count_up(&activations->figures.blocked, (uint64_t)(rft_now() - began));
    return status;
}

/* ---- The arena ------------------------------------------------------------------------------- */

static refit_status open_arena(refit_activations *activations, refit_error *error)
{
    const refit_config *config = &activations->config;
    rft_host_arena *arena;
    RFT_TRY(rft_host_arena_open(activations->device, &activations->layout, config, &arena, error));
    rft_host_arena_hide(arena); /* what autograd saves is not the business of a child's */
    refit_status status = config->offload_background ? rft_host_arena_begin(arena, error)
                                                     : rft_host_arena_take(arena, error);
    if (status != REFIT_OK) {
        rft_host_arena_close(arena);
        return status;
    }
    activations->arena = arena;
    activations->ready = !config->offload_background;
    atomic_store(&activations->figures.host_bytes, rft_host_arena_describe(arena).bytes);
    return REFIT_OK;
}

static void drop_arena(refit_activations *activations)
{
    rft_host_arena_close(activations->arena);
    activations->arena = NULL;
    activations->ready = false;
    atomic_store(&activations->figures.host_bytes, 0);
}

/* Its memory is there. If it could not be taken, this says why, and the next call tries again. */
static refit_status await_arena(refit_activations *activations, refit_error *error)
{
    if (activations->ready) return REFIT_OK;
    if (activations->arena == NULL) RFT_TRY(open_arena(activations, error));
    int64_t began = rft_now();
    refit_status status = rft_host_arena_wait(activations->arena, timeout_of(activations), error);
    count_up(&activations->figures.blocked, (uint64_t)(rft_now() - began));
    if (rft_host_arena_has_failed(activations->arena)) {
        /* It may have failed just after a wait that was too short: then this caller is told. */
        status = rft_host_arena_wait(activations->arena, 0, error);
        drop_arena(activations);
    }
    activations->ready = status == REFIT_OK;
    return status;
}

/* ---- Records: the pools, and the table of groups --------------------------------------------- */

static uint32_t limit_count(uint32_t wanted, uint32_t least, uint32_t most)
{
    return wanted < least ? least : wanted > most ? most : wanted;
}

static void close_group_chunk(const refit_activations *activations, group_chunk *chunk)
{
    for (uint32_t i = 0; i < chunk->count; i++) {
        rft_device_event_close(activations->device, chunk->items[i].out.end);
        rft_device_event_close(activations->device, chunk->items[i].in.end);
    }
    rft_free(chunk);
}

static refit_status fill_group_chunk(const refit_activations *activations, group_chunk *chunk,
                                     refit_error *error)
{
    for (uint32_t i = 0; i < chunk->count; i++) {
        saved_group *group = &chunk->items[i];
        RFT_TRY(rft_device_event_open(activations->device, &group->out.end, error));
        RFT_TRY(rft_device_event_open(activations->device, &group->in.end, error));
    }
    return REFIT_OK;
}

static refit_status add_groups(refit_activations *activations, refit_error *error)
{
    uint32_t made = limit_count(activations->groups_made, GROUPS_LEAST, GROUPS_MOST);
    group_chunk *chunk = rft_calloc(1, sizeof *chunk + made * sizeof *chunk->items);
    RFT_REFUSE_IF(chunk == NULL, error, REFIT_ERR_HOST_MEMORY,
                  "no host memory for %" PRIu32 " more groups of activations", made);
    chunk->count = made;
    refit_status status = fill_group_chunk(activations, chunk, error);
    if (status != REFIT_OK) {
        close_group_chunk(activations, chunk);
        return status;
    }
    chunk->next = activations->group_chunks;
    activations->group_chunks = chunk;
    activations->groups_made += made;
    for (uint32_t i = made; i > 0; i--) {
        chunk->items[i - 1].next = activations->spare_groups;
        activations->spare_groups = &chunk->items[i - 1];
    }
    return REFIT_OK;
}

static refit_status add_tensors(refit_activations *activations, refit_error *error)
{
    uint32_t made = limit_count(activations->tensors_made, TENSORS_LEAST, TENSORS_MOST);
    tensor_chunk *chunk = rft_calloc(1, sizeof *chunk + made * sizeof *chunk->items);
    RFT_REFUSE_IF(chunk == NULL, error, REFIT_ERR_HOST_MEMORY,
                  "no host memory for %" PRIu32 " more tensors of activations", made);
    chunk->next = activations->tensor_chunks;
    activations->tensor_chunks = chunk;
    activations->tensors_made += made;
    for (uint32_t i = made; i > 0; i--) {
        chunk->items[i - 1].next = activations->spare_tensors;
        activations->spare_tensors = &chunk->items[i - 1];
    }
    return REFIT_OK;
}

static refit_status grow_table(refit_activations *activations, refit_error *error)
{
    if (activations->table_count < activations->table_room) return REFIT_OK;
    uint32_t room = activations->table_room == 0 ? GROUPS_LEAST : 2 * activations->table_room;
    group_entry *table = NULL;
    if (room > activations->table_room)
        table = rft_realloc(activations->table, room, sizeof *table);
    RFT_REFUSE_IF(table == NULL, error, REFIT_ERR_HOST_MEMORY,
                  "no host memory for a table of %" PRIu32 " groups of activations", room);
    activations->table = table;
    activations->table_room = room;
    return REFIT_OK;
}

/* The place of `number` in the table, or of the first above it. */
static uint32_t place_of(const refit_activations *activations, refit_activation_group number)
{
    uint32_t low = 0, high = activations->table_count;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (activations->table[middle].number < number) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

static refit_status find(const refit_activations *activations, refit_activation_group number,
                         saved_group **out, refit_error *error)
{
    uint32_t place = place_of(activations, number);
    bool found = place < activations->table_count && activations->table[place].number == number;
    RFT_REFUSE_IF(!found, error, REFIT_ERR_NOT_FOUND,
                  "there is no group %" PRIu64 " of activations: it was released, or never begun",
                  number);
    *out = activations->table[place].group;
    return REFIT_OK;
}

static void forget(refit_activations *activations, refit_activation_group number)
{
    group_entry *entry = &activations->table[place_of(activations, number)];
    activations->table_count--;
    const group_entry *end = &activations->table[activations->table_count];
    memmove(entry, entry + 1, (size_t)(end - entry) * sizeof *entry);
    atomic_store(&activations->figures.groups, activations->table_count);
}

/* ---- Streams ----------------------------------------------------------------------------------
 */

/* Waits for the copies of a call that failed, if there are any. A stream that takes no event is
 * closed, which waits too and needs no event. */
static refit_status stream_wait(refit_activations *activations, copy_stream *on,
                                uint32_t timeout_ms, refit_error *error)
{
    refit_device *device = activations->device;
    if (!on->stuck) return REFIT_OK;
    if (!on->marked) on->marked = rft_device_event_record(device, on->end, on->stream, NULL) == 0;
    if (on->marked) {
        refit_status status = await_event(activations, on->end, timeout_ms, error);
        if (status == REFIT_ERR_TIMEOUT) return status;
        on->stuck = status != REFIT_OK;
    }
    if (on->stuck) {
        RFT_TRY(refit_stream_close(device, on->stream, error));
        on->stream = REFIT_STREAM_NONE;
        on->stuck = false;
    }
    return REFIT_OK;
}

static refit_status streams_wait(refit_activations *activations, uint32_t timeout_ms,
                                 refit_error *error)
{
    RFT_TRY(stream_wait(activations, &activations->out, timeout_ms, error));
    return stream_wait(activations, &activations->in, timeout_ms, error);
}

static refit_status stream_ready(refit_activations *activations, copy_stream *on,
                                 refit_error *error)
{
    if (on->stream.native != NULL) return REFIT_OK;
    return refit_stream_open(activations->device, &on->stream, error);
}

/* ---- Transfers --------------------------------------------------------------------------------
 */

/* Looks whether the group's copies are over, or waits for them. REFIT_ERR_TIMEOUT: not yet.
 * REFIT_ERR_DEVICE: the device is lost, and they are over, too. */
static refit_status poll(refit_activations *activations, saved_group *group, uint32_t timeout_ms,
                         refit_error *error)
{
    const transfer *last = group->in.moving ? &group->in : &group->out;
    if (!last->moving) return REFIT_OK;
    refit_status status = await_event(activations, last->end, timeout_ms, error);
    if (status == REFIT_ERR_DEVICE) count_up(&activations->figures.failures, 1);
    if (status == REFIT_OK || status == REFIT_ERR_DEVICE) {
        group->joined = group->in.moving = group->out.moving = false;
    }
    return status;
}

static refit_status submit(refit_activations *activations, const transfer *of,
                           const copy_stream *on, const transfer *before, refit_stream_ref after,
                           refit_error *error)
{
    refit_device *device = activations->device;
    const rft_plan *plan = &activations->plan;
    if (after.native != NULL) {
        RFT_TRY(rft_device_event_record(device, activations->before, after, error));
        RFT_TRY(rft_device_event_join(device, activations->before, on->stream, error));
    }
    /* Host bytes that copies out still write are not to be read early. */
    bool changes = before == NULL || before->moving;
    if (before != NULL && before->moving) {
        RFT_TRY(rft_device_event_join(device, before->end, on->stream, error));
    }
    for (uint32_t i = 0; i < plan->batch_count; i++) {
        const rft_batch *batch = &plan->batches[i];
        RFT_TRY(rft_device_copy_batch(device, on->stream, &plan->copies[batch->first], batch->count,
                                      changes ? RFT_COPY_STREAM : RFT_COPY_ANY, error));
    }
    return rft_device_event_record(device, of->end, on->stream, error);
}

/* A start has failed: waits for the copies that it has put on the stream. If it cannot, that is
 * what the caller has to know. */
static refit_status undo(refit_activations *activations, copy_stream *on, refit_status status,
                         refit_error *error)
{
    refit_error earlier;
    count_up(&activations->figures.failures, 1);
    on->stuck = true;
    on->marked = false;
    refit_status settled = stream_wait(activations, on, timeout_of(activations), &earlier);
    if (settled == REFIT_OK) return status;
    if (error != NULL) *error = earlier;
    return settled;
}

/* Starts the copies of the plan on a stream, after what `after` has queued and after the transfer
 * `before` (may be NULL). On failure none is under way, unless the stream hangs. */
static refit_status start(refit_activations *activations, transfer *of, copy_stream *on,
                          const transfer *before, refit_stream_ref after, refit_error *error)
{
    RFT_TRY(stream_ready(activations, on, error));
    refit_status status = submit(activations, of, on, before, after, error);
    if (status != REFIT_OK) return undo(activations, on, status, error);
    of->moving = true;
    return REFIT_OK;
}

/* ---- Pieces ---------------------------------------------------------------------------------- */

/* Room for the copies of a group, in either direction. The old plan stays if there is no memory. */
static refit_status grow_plan(refit_activations *activations, const saved_group *group,
                              refit_error *error)
{
    rft_plan *plan = &activations->plan;
    /* The end of each slab cuts at most one tensor. */
    uint64_t count = (uint64_t)group->count + activations->layout.slab_count;
    if (count <= plan->limits.pieces && group->bytes <= plan->limits.bytes) return REFIT_OK;
    rft_plan_limits need = plan->limits;
    need.pieces = (uint32_t)rft_min_u64(rft_max_u64(count, 2 * (uint64_t)need.pieces), UINT32_MAX);
    need.bytes = rft_max_u64(group->bytes, rft_min_u64(2 * need.bytes, activations->stack.room));
    rft_piece *pieces = rft_realloc(activations->pieces, need.pieces, sizeof *pieces);
    RFT_REFUSE_IF(pieces == NULL, error, REFIT_ERR_HOST_MEMORY,
                  "no host memory for the copies of %" PRIu32 " tensors", group->count);
    activations->pieces = pieces;
    rft_plan grown;
    RFT_TRY(rft_plan_open(&grown, &need, error));
    rft_plan_close(plan);
    *plan = grown;
    return REFIT_OK;
}

/* The pieces of one tensor: one for each slab that holds some of it. They go to `memory`, of which
 * `allocation` is the one; NULL: they come from where the tensor is on the device. */
static void add_pieces(const refit_activations *activations, const saved_tensor *tensor,
                       void *memory, const void *allocation, uint32_t *count)
{
    const rft_layout *layout = &activations->layout;
    char *arena = rft_host_arena_base(activations->arena);
    uint64_t end = tensor->at + tensor->bytes;
    uint64_t padding = -tensor->bytes & (RFT_STACK_ALIGNMENT - 1);
    uint32_t slab = rft_layout_find(layout, tensor->at);
    for (uint64_t at = tensor->at, stop; at < end; at = stop, slab++) {
        stop = rft_min_u64(end, layout->slabs[slab].offset + layout->slabs[slab].bytes);
        rft_piece *piece = &activations->pieces[(*count)++];
        *piece = (rft_piece){.bytes = stop - at,
                             .slab = slab,
                             .allocation = allocation,
                             .slack = stop == end ? (uint32_t)padding : 0,
                             .known_memory = true};
        if (memory == NULL) {
            piece->to = arena + at;
            piece->from = (const char *)tensor->memory + (at - tensor->at);
        } else {
            piece->to = (char *)memory + (at - tensor->at);
            piece->from = arena + at;
        }
    }
}

/* ---- Open and close -------------------------------------------------------------------------- */

static refit_status check_config(const refit_config *config, refit_error *error)
{
    RFT_REFUSE_IF(config->activations_host_bytes == 0, error, REFIT_ERR_CONFIG,
                  "activations.host_bytes is 0: set it to the host memory that activations may "
                  "take");
    RFT_REFUSE_IF(!config->use_pinned_optimizer_offload, error, REFIT_ERR_UNSUPPORTED,
                  "activations leave for page-locked memory, which needs "
                  "use_pinned_optimizer_offload: true");
    return REFIT_OK;
}

static refit_status open_layout(refit_activations *activations, refit_error *error)
{
    const refit_config *config = &activations->config;
    uint64_t bytes = config->activations_host_bytes;
    rft_layout_item all = {.bytes = bytes};
    activations->stack.room = bytes & ~(RFT_STACK_ALIGNMENT - 1);
    return rft_layout_open(&activations->layout, &all, 1, RFT_STACK_ALIGNMENT,
                           config->offload_slab_bytes, error);
}

static void close_records(refit_activations *activations)
{
    while (activations->group_chunks != NULL) {
        group_chunk *chunk = activations->group_chunks;
        activations->group_chunks = chunk->next;
        close_group_chunk(activations, chunk);
    }
    while (activations->tensor_chunks != NULL) {
        tensor_chunk *chunk = activations->tensor_chunks;
        activations->tensor_chunks = chunk->next;
        rft_free(chunk);
    }
    rft_free(activations->table);
    rft_free(activations->pieces);
    rft_plan_close(&activations->plan);
    rft_stack_close(&activations->stack);
}

/* Closes all that is open; no copy is under way. REFIT_ERR_TIMEOUT and others: a stream does not
 * close, and all else is as it was. */
static refit_status close_parts(refit_activations *activations, refit_error *error)
{
    refit_device *device = activations->device;
    copy_stream *streams[] = {&activations->out, &activations->in};
    for (int i = 0; i < 2; i++) {
        if (streams[i]->stream.native == NULL) continue;
        RFT_TRY(refit_stream_close(device, streams[i]->stream, error));
        streams[i]->stream = REFIT_STREAM_NONE;
    }
    rft_device_event_close(device, activations->before);
    rft_device_event_close(device, activations->out.end);
    rft_device_event_close(device, activations->in.end);
    close_records(activations);
    drop_arena(activations);
    rft_layout_close(&activations->layout);
    rft_mutex_close(&activations->lock);
    rft_device_release(device);
    rft_free(activations);
    return REFIT_OK;
}

static refit_status open_parts(refit_activations *activations, refit_error *error)
{
    const refit_config *config = &activations->config;
    refit_device *device = activations->device;
    uint32_t most = rft_device_get_caps(device).batch_most;
    rft_plan_limits none = {.piece_bytes = config->offload_piece_bytes,
                            .batch_most = limit_count(config->offload_batch, 1, most)};
    RFT_TRY(rft_plan_open(&activations->plan, &none, error));
    RFT_TRY(open_layout(activations, error));
    RFT_TRY(rft_device_event_open(device, &activations->before, error));
    RFT_TRY(rft_device_event_open(device, &activations->out.end, error));
    RFT_TRY(rft_device_event_open(device, &activations->in.end, error));
    RFT_TRY(refit_stream_open(device, &activations->out.stream, error));
    RFT_TRY(refit_stream_open(device, &activations->in.stream, error));
    return open_arena(activations, error);
}

refit_status refit_activations_open(refit_device *device, const refit_config *config,
                                    refit_activations **out, refit_error *error)
{
    RFT_REFUSE_IF(device == NULL || out == NULL, error, REFIT_ERR_INVALID,
                  "refit_activations_open needs a device and a place for the result");
    refit_config own;
    RFT_TRY(rft_config_resolve(config, &own, error));
    RFT_TRY(check_config(&own, error));
    refit_activations *activations = rft_calloc(1, sizeof *activations);
    RFT_REFUSE_IF(activations == NULL, error, REFIT_ERR_HOST_MEMORY,
                  "no host memory for activations");
    activations->config = own;
    activations->device = device;
    refit_status status = rft_mutex_open(&activations->lock, error);
    if (status != REFIT_OK) {
        rft_free(activations);
        return status;
    }
    rft_device_retain(device);
    status = open_parts(activations, error);
    if (status != REFIT_OK) {
        refit_status closed = close_parts(activations, NULL);
        /* A stream that stays open keeps its device open for good. */
        if (closed != REFIT_OK) closed = close_parts(activations, NULL);
        (void)closed;
        return status;
    }
    *out = activations;
    return REFIT_OK;
}

/* All copies are over by then, also those of groups that were released. */
static refit_status await_all(refit_activations *activations, refit_error *error)
{
    activations->out.stuck = activations->out.stream.native != NULL;
    activations->in.stuck = activations->in.stream.native != NULL;
    activations->out.marked = activations->in.marked = false;
    return streams_wait(activations, timeout_of(activations), error);
}

refit_status refit_activations_close(refit_activations *activations, refit_error *error)
{
    if (activations == NULL) return REFIT_OK;
    rft_lock(&activations->lock);
    activations->closing = true;
    refit_status status = await_all(activations, error);
    if (status == REFIT_OK && activations->arena != NULL) {
        status = rft_host_arena_end(activations->arena, timeout_of(activations), error);
    }
    rft_unlock(&activations->lock);
    RFT_TRY(status);
    return close_parts(activations, error);
}

/* Takes the lock, unless the object cannot be used. */
static refit_status enter(refit_activations *activations, refit_error *error)
{
    RFT_REFUSE_IF(activations == NULL, error, REFIT_ERR_INVALID, "there are no activations");
    rft_lock(&activations->lock);
    if (!activations->closing) return REFIT_OK;
    rft_unlock(&activations->lock);
    return rft_fail(error, REFIT_ERR_STATE,
                    "the activations are half closed: call refit_activations_close again");
}

/* ---- Forward --------------------------------------------------------------------------------- */

static refit_status begin(refit_activations *activations, refit_activation_group *number,
                          refit_error *error)
{
    RFT_TRY(await_arena(activations, error));
    RFT_TRY(grow_table(activations, error));
    if (activations->spare_groups == NULL) RFT_TRY(add_groups(activations, error));
    saved_group *group = activations->spare_groups;
    activations->spare_groups = group->next;
    *group = (saved_group){.open = true, .out.end = group->out.end, .in.end = group->in.end};
    *number = ++activations->last_number;
    activations->table[activations->table_count++] = (group_entry){*number, group};
    atomic_store(&activations->figures.groups, activations->table_count);
    return REFIT_OK;
}

refit_status refit_activations_begin(refit_activations *activations, refit_activation_group *group,
                                     refit_error *error)
{
    RFT_REFUSE_IF(group == NULL, error, REFIT_ERR_INVALID,
                  "refit_activations_begin needs a place for the group's number");
    RFT_TRY(enter(activations, error));
    refit_status status = begin(activations, group, error);
    rft_unlock(&activations->lock);
    return status;
}

static refit_status check_open(const saved_group *group, refit_activation_group number,
                               refit_error *error)
{
    RFT_REFUSE_IF(!group->open, error, REFIT_ERR_STATE,
                  "group %" PRIu64 " of activations was committed: begin another", number);
    return REFIT_OK;
}

static void count_used(refit_activations *activations)
{
    activation_figures *figures = &activations->figures;
    uint64_t used = activations->stack.used;
    atomic_store(&figures->used_bytes, used);
    if (used > atomic_load(&figures->used_bytes_peak))
        atomic_store(&figures->used_bytes_peak, used);
}

/* Appends a tensor that has found room. */
static void append(refit_activations *activations, saved_group *group, const saved_tensor *made)
{
    saved_tensor *tensor = activations->spare_tensors;
    activations->spare_tensors = tensor->next;
    *tensor = *made;
    tensor->next = NULL;
    if (group->last == NULL) {
        group->first = tensor;
    } else {
        group->last->next = tensor;
    }
    group->last = tensor;
    group->bytes += tensor->bytes;
    group->count++;
}

static refit_status add(refit_activations *activations, refit_activation_group number,
                        const void *memory, uint64_t bytes, uint32_t *place, refit_error *error)
{
    saved_group *group;
    saved_tensor tensor = {.memory = memory, .bytes = bytes};
    rft_memory_range allocation;
    bool placed;
    bool below;
    RFT_TRY(find(activations, number, &group, error));
    RFT_TRY(check_open(group, number, error));
    RFT_TRY(rft_device_memory_check(activations->device, memory, bytes, &allocation, error));
    tensor.allocation = allocation.base;
    if (activations->spare_tensors == NULL) RFT_TRY(add_tensors(activations, error));
    RFT_TRY(rft_stack_take(&activations->stack, bytes, &tensor.at, &placed, &below, error));
    if (!placed) {
        *place = REFIT_ACTIVATION_STAYS;
        count_up(&activations->figures.refused_bytes, bytes);
        return REFIT_OK;
    }
    *place = group->count;
    append(activations, group, &tensor);
    if (below) count_up(&activations->figures.reused, 1);
    count_used(activations);
    return REFIT_OK;
}

refit_status refit_activations_add(refit_activations *activations, refit_activation_group group,
                                   void *const *memories, const uint64_t *bytes, uint32_t count,
                                   uint32_t *tensors, refit_error *error)
{
    refit_status status = REFIT_OK;
    RFT_REFUSE_IF(count > 0 && (memories == NULL || bytes == NULL || tensors == NULL), error,
                  REFIT_ERR_INVALID,
                  "refit_activations_add needs the tensors, and places for their numbers");
    RFT_TRY(enter(activations, error));
    for (uint32_t i = 0; i < count && status == REFIT_OK; i++) {
        status = add(activations, group, memories[i], bytes[i], &tensors[i], error);
    }
    rft_unlock(&activations->lock);
    return status;
}

static refit_status commit(refit_activations *activations, refit_activation_group number,
                           refit_stream_ref stream, refit_error *error)
{
    saved_group *group;
    uint32_t pieces = 0;
    RFT_TRY(find(activations, number, &group, error));
    RFT_TRY(check_open(group, number, error));
    RFT_TRY(streams_wait(activations, timeout_of(activations), error));
    if (group->count > 0) {
        RFT_TRY(grow_plan(activations, group, error));
        for (const saved_tensor *it = group->first; it != NULL; it = it->next) {
            add_pieces(activations, it, NULL, it->allocation, &pieces);
        }
        RFT_TRY(rft_plan_fill(&activations->plan, activations->pieces, pieces, error));
        RFT_TRY(start(activations, &group->out, &activations->out, NULL, stream, error));
        count_up(&activations->figures.out_bytes, group->bytes);
    }
    group->open = false;
    return REFIT_OK;
}

refit_status refit_activations_commit(refit_activations *activations, refit_activation_group group,
                                      refit_stream_ref stream, refit_error *error)
{
    RFT_TRY(enter(activations, error));
    refit_status status = commit(activations, group, stream, error);
    rft_unlock(&activations->lock);
    return status;
}

/* ---- Waiting --------------------------------------------------------------------------------- */

/* Makes `stream` wait for the group's copies, which are under way. */
static refit_status follow(refit_activations *activations, const saved_group *group,
                           refit_stream_ref stream, refit_error *error)
{
    rft_event *end = group->in.moving ? group->in.end : group->out.end;
    return rft_device_event_join(activations->device, end, stream, error);
}

static refit_status join(refit_activations *activations, refit_activation_group number,
                         refit_stream_ref stream, refit_error *error)
{
    saved_group *group;
    RFT_TRY(find(activations, number, &group, error));
    RFT_REFUSE_IF(group->open, error, REFIT_ERR_STATE,
                  "group %" PRIu64 " of activations is open: commit it first", number);
    RFT_TRY(streams_wait(activations, timeout_of(activations), error));
    if (stream.native == NULL) return poll(activations, group, timeout_of(activations), error);
    refit_status status = poll(activations, group, 0, error);
    if (status != REFIT_ERR_TIMEOUT) return status;
    RFT_TRY(follow(activations, group, stream, error));
    group->joined = true;
    return REFIT_OK;
}

refit_status refit_activations_join(refit_activations *activations, refit_activation_group group,
                                    refit_stream_ref stream, refit_error *error)
{
    RFT_TRY(enter(activations, error));
    refit_status status = join(activations, group, stream, error);
    rft_unlock(&activations->lock);
    return status;
}

static refit_status wait_for(refit_activations *activations, refit_activation_group number,
                             uint32_t timeout_ms, refit_error *error)
{
    saved_group *group;
    RFT_TRY(find(activations, number, &group, error));
    RFT_TRY(streams_wait(activations, timeout_ms, error));
    return poll(activations, group, timeout_ms, error);
}

refit_status refit_activations_wait(refit_activations *activations, refit_activation_group group,
                                    uint32_t timeout_ms, refit_error *error)
{
    RFT_TRY(enter(activations, error));
    refit_status status = wait_for(activations, group, timeout_ms, error);
    rft_unlock(&activations->lock);
    return status;
}

/* ---- Backward -------------------------------------------------------------------------------- */

/* No transfer in is under way, and none out that has failed. */
static refit_status check_away(refit_activations *activations, saved_group *group,
                               refit_activation_group number, refit_error *error)
{
    RFT_REFUSE_IF(group->open, error, REFIT_ERR_STATE,
                  "group %" PRIu64 " of activations is open, its tensors are on the device: commit "
                  "it first",
                  number);
    bool waits = group->in.moving && group->joined;
    refit_status status = poll(activations, group, waits ? timeout_of(activations) : 0, error);
    if (status != REFIT_ERR_TIMEOUT) return status;
    RFT_REFUSE_IF(group->in.moving && !waits, error, REFIT_ERR_STATE,
                  "group %" PRIu64 " of activations is on its way in: join it, or wait for it, "
                  "first",
                  number);
    return group->in.moving ? status : REFIT_OK;
}

/* The pieces of all tensors that are wanted. */
static refit_status take_memories(refit_activations *activations, const saved_group *group,
                                  void *const *memories, uint32_t count, uint32_t *pieces,
                                  uint64_t *bytes, refit_error *error)
{
    const saved_tensor *tensor = group->first;
    for (uint32_t i = 0; i < count; i++, tensor = tensor->next) {
        rft_memory_range allocation;
        if (memories[i] == NULL) continue;
        RFT_TRY(rft_device_memory_check(activations->device, memories[i], tensor->bytes,
                                        &allocation, error));
        add_pieces(activations, tensor, memories[i], allocation.base, pieces);
        *bytes += tensor->bytes;
    }
    return REFIT_OK;
}

static refit_status fetch(refit_activations *activations, refit_activation_group number,
                          void *const *memories, uint32_t wanted, refit_stream_ref stream,
                          refit_error *error)
{
    saved_group *group;
    uint32_t pieces = 0;
    uint64_t bytes = 0;
    RFT_TRY(find(activations, number, &group, error));
    RFT_TRY(streams_wait(activations, timeout_of(activations), error));
    RFT_TRY(check_away(activations, group, number, error));
    RFT_REFUSE_IF(wanted > group->count, error, REFIT_ERR_INVALID,
                  "group %" PRIu64 " of activations has %" PRIu32 " tensors, not %" PRIu32, number,
                  group->count, wanted);
    RFT_TRY(take_memories(activations, group, memories, wanted, &pieces, &bytes, error));
    if (pieces == 0) return REFIT_OK;
    RFT_TRY(rft_plan_fill(&activations->plan, activations->pieces, pieces, error));
    RFT_TRY(start(activations, &group->in, &activations->in, &group->out, stream, error));
    group->joined = false;
    count_up(&activations->figures.in_bytes, bytes);
    return REFIT_OK;
}

refit_status refit_activations_fetch(refit_activations *activations, refit_activation_group group,
                                     void *const *memories, uint32_t count, refit_stream_ref stream,
                                     refit_error *error)
{
    RFT_REFUSE_IF(memories == NULL && count > 0, error, REFIT_ERR_INVALID,
                  "refit_activations_fetch needs %" PRIu32 " addresses", count);
    RFT_TRY(enter(activations, error));
    refit_status status = fetch(activations, group, memories, count, stream, error);
    rft_unlock(&activations->lock);
    return status;
}

/* ---- Release --------------------------------------------------------------------------------- */

/* Copies that use the memory are over, or `stream` and what may write to the room in the arena wait
 * for them. */
static refit_status leave_after(refit_activations *activations, saved_group *group,
                                refit_stream_ref stream, refit_error *error)
{
    RFT_TRY(streams_wait(activations, timeout_of(activations), error));
    (void)poll(activations, group, 0, NULL);
    if (!group->in.moving && !group->out.moving) return REFIT_OK;
    bool ordered = stream.native != NULL && activations->out.stream.native != NULL &&
                   follow(activations, group, stream, NULL) == REFIT_OK;
    if (ordered && group->in.moving) {
        ordered = follow(activations, group, activations->out.stream, NULL) == REFIT_OK;
    }
    if (ordered) return REFIT_OK;
    refit_status status = poll(activations, group, timeout_of(activations), error);
    return group->in.moving || group->out.moving ? status : REFIT_OK;
}

static void give_room(refit_activations *activations, saved_group *group)
{
    uint64_t lowest = UINT64_MAX;
    for (saved_tensor *tensor = group->first, *next; tensor != NULL; tensor = next) {
        next = tensor->next;
        lowest = rft_min_u64(lowest, tensor->at);
        rft_stack_give(&activations->stack, tensor->at, tensor->bytes);
        tensor->next = activations->spare_tensors;
        activations->spare_tensors = tensor;
    }
    if (group->count > 0 && lowest < activations->stack.top) {
        count_up(&activations->figures.out_of_order, 1);
    }
    group->first = group->last = NULL;
    group->count = 0;
    count_used(activations);
}

static refit_status release(refit_activations *activations, refit_activation_group number,
                            refit_stream_ref stream, refit_error *error)
{
    saved_group *group;
    RFT_TRY(find(activations, number, &group, error));
    RFT_TRY(leave_after(activations, group, stream, error));
    give_room(activations, group);
    forget(activations, number);
    group->next = activations->spare_groups;
    activations->spare_groups = group;
    return REFIT_OK;
}

refit_status refit_activations_release(refit_activations *activations, refit_activation_group group,
                                       refit_stream_ref stream, refit_error *error)
{
    RFT_TRY(enter(activations, error));
    refit_status status = release(activations, group, stream, error);
    rft_unlock(&activations->lock);
    return status;
}

/* ---- Figures --------------------------------------------------------------------------------- */

refit_status refit_activations_stats(refit_activations *activations, refit_stats *stats,
                                     refit_error *error)
{
    RFT_REFUSE_IF(activations == NULL || stats == NULL, error, REFIT_ERR_INVALID,
                  "refit_activations_stats needs activations and a place for the figures");
    RFT_REFUSE_IF(stats->size < sizeof stats->size, error, REFIT_ERR_INVALID,
                  "refit_stats.size is %zu: call refit_stats_init first", stats->size);
    activation_figures *figures = &activations->figures;
    refit_stats whole = {0};
    size_t known = stats->size < sizeof whole ? stats->size : sizeof whole;
    memcpy(&whole, stats, known);
    whole.activation_groups = atomic_load(&figures->groups);
    whole.activation_host_bytes = atomic_load(&figures->host_bytes);
    whole.activation_used_bytes = atomic_load(&figures->used_bytes);
    whole.activation_used_bytes_peak = atomic_load(&figures->used_bytes_peak);
    whole.activation_out_bytes_total = atomic_load(&figures->out_bytes);
    whole.activation_in_bytes_total = atomic_load(&figures->in_bytes);
    whole.activation_refused_bytes_total = atomic_load(&figures->refused_bytes);
    whole.activation_out_of_order = atomic_load(&figures->out_of_order);
    whole.activation_reused = atomic_load(&figures->reused);
    whole.activation_failures = atomic_load(&figures->failures);
    whole.activation_blocked_seconds_total = rft_seconds((int64_t)atomic_load(&figures->blocked));
    memcpy(stats, &whole, known);
    return REFIT_OK;
}
