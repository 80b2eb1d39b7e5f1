/*
 * Streams of the host device: commands are queued by any thread and carried out, one after the
 * other, by the stream's own.
 *
 *              push                     first                  pop
 *     caller ────────► queue (under lock) ────► done without the lock ────► idle, or the next
 *
 * A command that fails leaves its failure with the stream until the next record takes it; what is
 * queued behind it is done all the same, as on a GPU. Knows nothing of who orders the work.
 */
#include "device/host/host_stream.h"

#include <inttypes.h>

#include "base/alloc.h"
#include "base/clock.h"
#include "device/host/host_memory.h"

/* ---- The queue -------------------------------------------------------------------------------
 * A FIFO in chunks. A command never moves, so the stream's thread reads it without a lock while
 * others queue more behind it. Chunks that were read are kept: a queue allocates only when it is
 * deeper than it has ever been.
 */

#define CHUNK_CELLS 2048u
#define CHUNKS_MOST 256u /* half a million commands, 16 MiB */

/* A command, or one of the copies behind it, which lie in a row. */
typedef union cell {
    rft_host_command command;
    rft_copy copy;
} cell;

_Static_assert(sizeof(cell) == sizeof(rft_copy), "copies lie in a row");
_Static_assert(CHUNK_CELLS > RFT_HOST_BATCH_MOST, "a batch fits into a chunk");

struct rft_host_chunk {
    rft_host_chunk *next;
    uint32_t end; /* cells in use, once another chunk follows */
    cell cells[CHUNK_CELLS];
};

static void close_chunks(rft_host_chunk *chunk)
{
    while (chunk != NULL) {
        rft_host_chunk *next = chunk->next;
        rft_free(chunk);
        chunk = next;
    }
}

static void queue_close(rft_host_queue *queue)
{
    close_chunks(queue->first);
    close_chunks(queue->spare);
}

static rft_host_chunk *take_chunk(rft_host_queue *queue)
{
    rft_host_chunk *chunk = queue->spare;
    if (chunk != NULL) {
        queue->spare = chunk->next;
        chunk->next = NULL;
        return chunk;
    }
    chunk = rft_calloc(1, sizeof *chunk);
    if (chunk != NULL) queue->chunks++;
    return chunk;
}

static refit_status append_chunk(rft_host_queue *queue, refit_error *error)
{
    RFT_REFUSE_IF(queue->spare == NULL && queue->chunks == CHUNKS_MOST, error, REFIT_ERR_LIMIT,
                  "%u commands are queued on the stream: wait for some of them",
                  CHUNKS_MOST * CHUNK_CELLS);
    rft_host_chunk *chunk = take_chunk(queue);
    RFT_REFUSE_IF(chunk == NULL, error, REFIT_ERR_HOST_MEMORY,
                  "no host memory to queue more on the stream");
    if (queue->last == NULL) {
        queue->first = chunk;
    } else {
        queue->last->end = queue->tail;
        queue->last->next = chunk;
    }
    queue->last = chunk;
    queue->tail = 0;
    return REFIT_OK;
}

/* Room for one command and `copies` copies behind it. REFIT_ERR_HOST_MEMORY; REFIT_ERR_LIMIT if
 * very much is queued already. */
static refit_status queue_push(rft_host_queue *queue, uint32_t copies, rft_host_command **out,
                               refit_error *error)
{
    if (queue->last == NULL || CHUNK_CELLS - queue->tail < 1 + copies) {
        RFT_TRY(append_chunk(queue, error));
    }
    rft_host_command *command = &queue->last->cells[queue->tail].command;
    command->count = copies;
    queue->tail += 1 + copies;
    *out = command;
    return REFIT_OK;
}

/* Goes on to the next chunk when the first one is read to its end. */
static void drop_read_chunk(rft_host_queue *queue)
{
    rft_host_chunk *read = queue->first;
    if (read->next == NULL || queue->head < read->end) return;
    queue->first = read->next;
    queue->head = 0;
    read->next = queue->spare;
    queue->spare = read;
}

/* The oldest command, or NULL. It stays where it is until it is popped. */
static rft_host_command *queue_first(rft_host_queue *queue)
{
    if (queue->first == NULL) return NULL;
    drop_read_chunk(queue);
    if (queue->first == queue->last && queue->head == queue->tail) {
        queue->head = queue->tail = 0;
        return NULL;
    }
    return &queue->first->cells[queue->head].command;
}

static void queue_pop(rft_host_queue *queue)
{
    queue->head += 1 + queue->first->cells[queue->head].command.count;
}

/* What follows a command of a verb that says so. */
static rft_copy *command_copies(rft_host_command *command)
{
    return &((cell *)command + 1)->copy;
}

/* ---- The stream --------------------------------------------------------------------------- */

struct rft_host_stream {
    rft_host_memory *memory;
    rft_pool *pool;
    rft_host_line *line;
    rft_host_failure failure; /* the thread's own */
    rft_thread thread;
    rft_mutex lock;
    rft_cond work;        /* the queue is not empty, or closing */
    rft_host_queue queue; /* guarded by lock, like the rest */
    uint64_t recorded;    /* records queued: the last place on the line */
    bool closing;
};

refit_status rft_host_copy_now(rft_host_memory *memory, rft_pool *pool, const rft_copy *copies,
                               uint32_t count, refit_error *error)
{
    uint32_t lost = rft_host_memory_find_lost(memory, copies, count);
    RFT_REFUSE_IF(lost != count, error, REFIT_ERR_COPY,
                  "%" PRIu64 " bytes from %p to %p touch memory of an arena that is not there now: "
                  "commit it first",
                  copies[lost].bytes, copies[lost].from, copies[lost].to);
    rft_host_copy(pool, copies, count);
    return REFIT_OK;
}

static void keep_failure(rft_host_stream *stream, refit_status status, const refit_error *error)
{
    if (status == REFIT_OK || stream->failure.status != REFIT_OK) return;
    stream->failure = (rft_host_failure){status, *error};
}

static void do_copies(rft_host_stream *stream, rft_host_command *command)
{
    refit_error error;
    refit_status status = rft_host_copy_now(stream->memory, stream->pool, command_copies(command),
                                            command->count, &error);
    keep_failure(stream, status, &error);
}

static void do_digest(rft_host_stream *stream, rft_host_command *command)
{
    refit_error error;
    const rft_copy *work = command_copies(command);
    refit_status status = rft_host_digest_now(stream->memory, work->from, work->bytes,
                                              command->digest.offset, work->to, &error);
    keep_failure(stream, status, &error);
}

static void do_digest_copy(rft_host_stream *stream, rft_host_command *command)
{
    refit_error error;
    const rft_copy *work = command_copies(command);
    refit_status status =
        rft_host_digest_copy_now(stream->memory, work->to, work->from, work->bytes,
                                 command->digest.offset, command->digest.sum, &error);
    keep_failure(stream, status, &error);
}

static void do_cast(rft_host_stream *stream, rft_host_command *command)
{
    refit_error error;
    const rft_copy *work = command_copies(command);
    refit_status status = rft_host_cast_now(stream->memory, work->to, work->from,
                                            work->bytes / sizeof(float), &error);
    keep_failure(stream, status, &error);
}

static void do_record(rft_host_stream *stream, const rft_host_command *command)
{
    uint64_t place = command->record.place;
    rft_host_line_take_returned(stream->line, &stream->failure);
    rft_host_event_reach(command->record.event, stream->line, place, &stream->failure);
    rft_host_line_pass(stream->line, place);
}

static void do_join(const rft_host_command *command)
{
    rft_host_line_follow(command->join.line, command->join.place);
    rft_host_line_release(command->join.line);
}

static void do_command(rft_host_stream *stream, rft_host_command *command)
{
    switch (command->verb) {
    case RFT_HOST_COPY: do_copies(stream, command); break;
    case RFT_HOST_DIGEST: do_digest(stream, command); break;
    case RFT_HOST_DIGEST_COPY: do_digest_copy(stream, command); break;
    case RFT_HOST_CAST: do_cast(stream, command); break;
    case RFT_HOST_CALL: command->call.function(command->call.user); break;
    case RFT_HOST_RECORD: do_record(stream, command); break;
    case RFT_HOST_JOIN: do_join(command); break;
    }
}

/* Takes the lock off while the command is carried out. */
static void do_next(rft_host_stream *stream, rft_host_command *command)
{
    rft_unlock(&stream->lock);
    do_command(stream, command);
    rft_lock(&stream->lock);
    queue_pop(&stream->queue);
}

static void *run(void *user)
{
    rft_host_stream *stream = user;
    rft_lock(&stream->lock);
    for (;;) {
        rft_host_command *command = queue_first(&stream->queue);
        if (command != NULL) {
            do_next(stream, command);
            continue;
        }
        if (stream->closing) break;
        rft_cond_wait_idle(&stream->work, &stream->lock);
    }
    rft_unlock(&stream->lock);
    return NULL;
}

static refit_status open_locks(rft_host_stream *stream, refit_error *error)
{
    refit_status status = REFIT_OK;
    RFT_TRY(rft_mutex_open(&stream->lock, error));
    RFT_TRY_GOTO(rft_cond_open(&stream->work, error), close_lock);
    return REFIT_OK;

close_lock:
    rft_mutex_close(&stream->lock);
    return status;
}

static void close_locks(rft_host_stream *stream)
{
    rft_cond_close(&stream->work);
    rft_mutex_close(&stream->lock);
}

/* `memory` and `pool` are borrowed and outlive the stream. */
static refit_status stream_open(rft_host_memory *memory, rft_pool *pool, rft_host_stream **out,
                                refit_error *error)
{
    rft_host_stream *stream = rft_calloc(1, sizeof *stream);
    RFT_REFUSE_IF(stream == NULL, error, REFIT_ERR_HOST_MEMORY, "no host memory for a stream");
    stream->memory = memory;
    stream->pool = pool;
    refit_status status = REFIT_OK;
    RFT_TRY_GOTO(rft_host_line_open(&stream->line, error), free_stream);
    RFT_TRY_GOTO(open_locks(stream, error), close_line);
    RFT_TRY_GOTO(rft_thread_start(&stream->thread, "refit-stream", run, stream, error),
                 close_locks);
    *out = stream;
    return REFIT_OK;

close_locks:
    close_locks(stream);
close_line:
    rft_host_line_release(stream->line);
free_stream:
    rft_free(stream);
    return status;
}

/* Is all done that was queued? */
static bool stream_is_idle(rft_host_stream *stream)
{
    rft_lock(&stream->lock);
    bool idle = queue_first(&stream->queue) == NULL;
    rft_unlock(&stream->lock);
    return idle;
}

/* Does what is queued, then ends the thread. */
static void stream_close(rft_host_stream *stream)
{
    rft_lock(&stream->lock);
    stream->closing = true;
    rft_cond_wake_all(&stream->work);
    rft_unlock(&stream->lock);
    rft_thread_join(stream->thread);
    queue_close(&stream->queue);
    close_locks(stream);
    rft_host_line_release(stream->line);
    rft_free(stream);
}

/* Room for a command, the lock taken; if there is none the lock is given back. */
static refit_status begin_command(rft_host_stream *stream, rft_host_verb verb, uint32_t copies,
                                  rft_host_command **out, refit_error *error)
{
    rft_lock(&stream->lock);
    refit_status status = queue_push(&stream->queue, copies, out, error);
    if (status == REFIT_OK) {
        (*out)->verb = verb;
    } else {
        rft_unlock(&stream->lock);
    }
    return status;
}

static void end_command(rft_host_stream *stream)
{
    rft_cond_wake_one(&stream->work);
    rft_unlock(&stream->lock);
}

refit_status rft_host_stream_call(rft_host_stream *stream, refit_stream_fn function, void *user,
                                  refit_error *error)
{
    rft_host_command *command;
    RFT_TRY(begin_command(stream, RFT_HOST_CALL, 0, &command, error));
    command->call.function = function;
    command->call.user = user;
    end_command(stream);
    return REFIT_OK;
}

refit_status rft_host_stream_copy(rft_host_stream *stream, const rft_copy *copies, uint32_t count,
                                  refit_error *error)
{
    rft_host_command *command;
    RFT_TRY(begin_command(stream, RFT_HOST_COPY, count, &command, error));
    rft_copy *queued = command_copies(command);
    for (uint32_t i = 0; i < count; i++) {
        queued[i] = copies[i];
    }
    end_command(stream);
    return REFIT_OK;
}

/* What a command of one copy works on. */
static refit_status begin_work(rft_host_stream *stream, rft_host_verb verb, const rft_copy *work,
                               rft_host_command **out, refit_error *error)
{
    RFT_TRY(begin_command(stream, verb, 1, out, error));
    *command_copies(*out) = *work;
    return REFIT_OK;
}

refit_status rft_host_stream_digest(rft_host_stream *stream, const void *memory, uint64_t bytes,
                                    uint64_t offset, uint64_t *sum, refit_error *error)
{
    rft_host_command *command;
    rft_copy work = {.to = sum, .from = memory, .bytes = bytes};
    RFT_TRY(begin_work(stream, RFT_HOST_DIGEST, &work, &command, error));
    command->digest.offset = offset;
    end_command(stream);
    return REFIT_OK;
}

refit_status rft_host_stream_digest_copy(rft_host_stream *stream, void *to, const void *from,
                                         uint64_t bytes, uint64_t offset, uint64_t *sum,
                                         refit_error *error)
{
    rft_host_command *command;
    rft_copy work = {.to = to, .from = from, .bytes = bytes};
    RFT_TRY(begin_work(stream, RFT_HOST_DIGEST_COPY, &work, &command, error));
    command->digest.offset = offset;
    command->digest.sum = sum;
    end_command(stream);
    return REFIT_OK;
}

refit_status rft_host_stream_cast(rft_host_stream *stream, uint16_t *to, const float *from,
                                  uint64_t count, refit_error *error)
{
    rft_host_command *command;
    rft_copy work = {.to = to, .from = from, .bytes = count * sizeof *from};
    RFT_TRY(begin_work(stream, RFT_HOST_CAST, &work, &command, error));
    end_command(stream);
    return REFIT_OK;
}

refit_status rft_host_stream_record(rft_host_stream *stream, rft_host_event *event,
                                    refit_error *error)
{
    rft_host_command *command;
    RFT_TRY(begin_command(stream, RFT_HOST_RECORD, 0, &command, error));
    uint64_t place = ++stream->recorded;
    rft_host_event_move(event, stream->line, place);
    command->record.event = event;
    command->record.place = place;
    end_command(stream);
    return REFIT_OK;
}

refit_status rft_host_stream_join(rft_host_stream *stream, rft_host_event *event,
                                  refit_error *error)
{
    uint64_t place;
    rft_host_line *line = rft_host_event_where(event, &place);
    /* What was put on this very stream comes first anyway. */
    if (line == NULL || line == stream->line) {
        rft_host_line_release(line);
        return REFIT_OK;
    }
    rft_host_command *command;
    refit_status status = begin_command(stream, RFT_HOST_JOIN, 0, &command, error);
    if (status != REFIT_OK) {
        rft_host_line_release(line);
        return status;
    }
    command->join.line = line;
    command->join.place = place;
    end_command(stream);
    return REFIT_OK;
}

/* ---- The open streams ------------------------------------------------------------------------
 * The list of open streams. It is short and searched from end to end, once for each command.
 *
 * A stream is taken off the list before it ends, so that its address, if it is used again at once,
 * is never listed twice.
 */

#define ROOM_FIRST 8u

refit_status rft_host_streams_open(rft_host_streams *streams, refit_error *error)
{
    return rft_mutex_open(&streams->lock, error);
}

void rft_host_streams_close(rft_host_streams *streams)
{
    rft_free(streams->list);
    rft_mutex_close(&streams->lock);
}

/* The lock is held; `count` if it is not listed. */
static uint32_t find_stream(const rft_host_streams *streams, refit_stream_ref stream)
{
    uint32_t at = 0;
    while (at < streams->count && streams->list[at] != stream.native) {
        at++;
    }
    return at;
}

refit_status rft_host_streams_check(rft_host_streams *streams, refit_stream_ref stream,
                                    refit_error *error)
{
    rft_lock(&streams->lock);
    bool known = find_stream(streams, stream) != streams->count;
    rft_unlock(&streams->lock);
    RFT_REFUSE_IF(!known, error, REFIT_ERR_INVALID, "%p is no open stream of this device",
                  stream.native);
    return REFIT_OK;
}

/* Room for one more, the lock held. */
static refit_status grow(rft_host_streams *streams, refit_error *error)
{
    if (streams->count < streams->room) return REFIT_OK;
    uint32_t room = streams->room == 0 ? ROOM_FIRST : streams->room * 2;
    rft_host_stream **list = rft_realloc(streams->list, room, sizeof(*list));
    RFT_REFUSE_IF(list == NULL, error, REFIT_ERR_HOST_MEMORY, "no host memory for %u streams",
                  room);
    streams->list = list;
    streams->room = room;
    return REFIT_OK;
}

refit_status rft_host_streams_start(rft_host_streams *streams, rft_host_memory *memory,
                                    rft_pool *pool, refit_stream_ref *out, refit_error *error)
{
    rft_host_stream *stream = NULL;
    rft_lock(&streams->lock);
    refit_status status = grow(streams, error);
    if (status == REFIT_OK) status = stream_open(memory, pool, &stream, error);
    if (status == REFIT_OK) streams->list[streams->count++] = stream;
    rft_unlock(&streams->lock);
    if (status == REFIT_OK) out->native = stream;
    return status;
}

refit_status rft_host_streams_end(rft_host_streams *streams, refit_stream_ref stream,
                                  refit_error *error)
{
    RFT_TRY(rft_host_streams_check(streams, stream, error));
    RFT_REFUSE_IF(!stream_is_idle(stream.native), error, REFIT_ERR_TIMEOUT,
                  "the stream still has work");
    rft_lock(&streams->lock);
    streams->list[find_stream(streams, stream)] = streams->list[streams->count - 1];
    streams->count--;
    rft_unlock(&streams->lock);
    stream_close(stream.native);
    return REFIT_OK;
}
