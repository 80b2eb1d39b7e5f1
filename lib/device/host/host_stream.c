/*
 * Streams and events of the host device: commands are queued by any thread and carried out, one
 * after the other, by the stream's own.
 *
 *              push                     first                  pop
 *     caller ────────► queue (under lock) ────► done without the lock ────► idle, or the next
 *
 * A command that fails loses the device: what is queued, on any stream, is passed over from then
 * on, but for records and joins, so that waits end. Knows nothing of the callers of a device.
 */
#include "device/host/host_stream.h"

#include <inttypes.h>

#include "base/alloc.h"
#include "base/clock.h"
#include "device/host/host_memory.h"

/* ---- Events ----------------------------------------------------------------------------------
 * Every stream has a line: it numbers the records that are queued on it and says how many are
 * passed. An event is a place on a line. So an event may be recorded again, on another stream,
 * while a thread still waits for its old place, and a stream may be closed while its events live:
 * the line stays until its last holder lets go.
 *
 *     never recorded ──move──► under way ──the line passes it──► done
 *                                  ▲                             │
 *                                  └────────────move─────────────┘
 */

/* The records of one stream, numbered 1, 2, … Outlives the stream while an event or a join knows
 * it. */
typedef struct host_line {
    atomic_uint_fast32_t holders;
    rft_mutex lock;
    rft_cond moved;
    uint64_t passed; /* the records up to this one are done; guarded by lock */
} host_line;

struct rft_host_event {
    rft_mutex lock;
    host_line *line; /* retained; NULL: nothing to wait for. Guarded by lock */
    uint64_t place;  /* on it; guarded by lock */
};

static refit_status line_open(host_line **out, refit_error *error)
{
    host_line *line = rft_calloc(1, sizeof *line);
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

static host_line *line_retain(host_line *line)
{
    atomic_fetch_add(&line->holders, 1);
    return line;
}

/* Each count down releases, the last one acquires: what others did with it is over when it is
 * freed.
 */
static void line_release(host_line *line)
{
    if (line == NULL || atomic_fetch_sub(&line->holders, 1) != 1) return;
    rft_cond_close(&line->moved);
    rft_mutex_close(&line->lock);
    rft_free(line);
}

/* Record `place` is done; the threads that wait for it go on. */
static void line_pass(host_line *line, uint64_t place)
{
    rft_lock(&line->lock);
    line->passed = place;
    rft_cond_wake_all(&line->moved);
    rft_unlock(&line->lock);
}

/* Waits until record `place` is done; false at the deadline. */
static bool line_wait(host_line *line, uint64_t place, int64_t deadline)
{
    rft_lock(&line->lock);
    while (line->passed < place && rft_cond_wait(&line->moved, &line->lock, deadline)) {
    }
    bool passed = line->passed >= place;
    rft_unlock(&line->lock);
    return passed;
}

/* Waits until record `place` is done, without a deadline: for the thread of a stream, which has no
 * caller. */
static void line_follow(host_line *line, uint64_t place)
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
    *out = event;
    return REFIT_OK;
}

void rft_host_event_close(rft_host_event *event)
{
    line_release(event->line);
    rft_mutex_close(&event->lock);
    rft_free(event);
}

/* Moves the event to `place` of `line`, which will be passed. `line` NULL: a place that is passed
 * already. */
static void event_move(rft_host_event *event, host_line *line, uint64_t place)
{
    if (line != NULL) line_retain(line);
    rft_lock(&event->lock);
    host_line *before = event->line;
    event->line = line;
    event->place = place;
    rft_unlock(&event->lock);
    line_release(before);
}

/* Where the event is now; retains the line. NULL: there is nothing to wait for. */
static host_line *event_where(rft_host_event *event, uint64_t *place)
{
    rft_lock(&event->lock);
    *place = event->place;
    host_line *line = event->line == NULL ? NULL : line_retain(event->line);
    rft_unlock(&event->lock);
    return line;
}

void rft_host_event_pass(rft_host_event *event)
{
    event_move(event, NULL, 0);
}

refit_status rft_host_event_wait(rft_host_event *event, uint32_t timeout_ms, refit_error *error)
{
    uint64_t place;
    host_line *line = event_where(event, &place);
    bool passed = line == NULL || line_wait(line, place, rft_deadline(timeout_ms));
    line_release(line);
    RFT_REFUSE_IF(!passed, error, REFIT_ERR_TIMEOUT, "the stream's work was not done within %u ms",
                  timeout_ms);
    return REFIT_OK;
}

/* ---- The queue -------------------------------------------------------------------------------
 * A FIFO in chunks. A command never moves, so the stream's thread reads it without a lock while
 * others queue more after it. Chunks that were read are kept: a queue allocates only when it is
 * deeper than it has ever been.
 */

#define CHUNK_CELLS 2048u
#define CHUNKS_MOST 256u /* half a million commands, 16 MiB */

typedef enum host_verb {
    HOST_COPY,        /* `count` copies follow; one without a source is zeroed */
    HOST_DIGEST,      /* one copy follows: the sum, the memory, its bytes */
    HOST_DIGEST_LIST, /* one copy follows: the jobs, and in place of bytes how many */
    HOST_CAST,        /* one copy follows: the results, the numbers, the numbers' bytes */
    HOST_ENCODE,      /* two copies follow, which hold the job */
    HOST_DECODE,      /* the same */
    HOST_CALL,
    HOST_RECORD,
    HOST_JOIN,
} host_verb;

typedef struct host_command {
    host_verb verb;
    uint32_t count; /* of copies */
    union {
        struct {
            refit_stream_fn function;
            void *user;
        } call;
        uint64_t offset; /* of DIGEST */
        uint64_t record; /* its place on the stream's line */
        struct {
            host_line *line; /* retained */
            uint64_t place;
        } join;
    };
} host_command;

typedef struct host_chunk host_chunk;

/* All zero is an empty queue. */
typedef struct host_queue {
    host_chunk *first; /* where commands are taken */
    host_chunk *last;  /* where they are put */
    host_chunk *spare;
    uint32_t head; /* in first */
    uint32_t tail; /* in last */
    uint32_t chunks;
} host_queue;

/* A command, or one of the copies after it, which lie in a row. */
typedef union cell {
    host_command command;
    rft_copy copy;
} cell;

_Static_assert(sizeof(cell) == sizeof(rft_copy), "copies lie in a row");
_Static_assert(CHUNK_CELLS > RFT_HOST_BATCH_MOST, "a batch fits into a chunk");

struct host_chunk {
    host_chunk *next;
    uint32_t end; /* cells in use, once another chunk follows */
    cell cells[CHUNK_CELLS];
};

static void close_chunks(host_chunk *chunk)
{
    while (chunk != NULL) {
        host_chunk *next = chunk->next;
        rft_free(chunk);
        chunk = next;
    }
}

static void queue_close(host_queue *queue)
{
    close_chunks(queue->first);
    close_chunks(queue->spare);
}

static host_chunk *take_chunk(host_queue *queue)
{
    host_chunk *chunk = queue->spare;
    if (chunk != NULL) {
        queue->spare = chunk->next;
        chunk->next = NULL;
        return chunk;
    }
    chunk = rft_calloc(1, sizeof *chunk);
    if (chunk != NULL) queue->chunks++;
    return chunk;
}

static refit_status append_chunk(host_queue *queue, refit_error *error)
{
    RFT_REFUSE_IF(queue->spare == NULL && queue->chunks == CHUNKS_MOST, error, REFIT_ERR_LIMIT,
                  "%u commands are queued on the stream: wait for some of them",
                  CHUNKS_MOST * CHUNK_CELLS);
    host_chunk *chunk = take_chunk(queue);
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

/* Room for one command and `copies` copies after it. REFIT_ERR_HOST_MEMORY; REFIT_ERR_LIMIT if
 * very much is queued already. */
static refit_status queue_push(host_queue *queue, uint32_t copies, host_command **out,
                               refit_error *error)
{
    if (queue->last == NULL || CHUNK_CELLS - queue->tail < 1 + copies) {
        RFT_TRY(append_chunk(queue, error));
    }
    host_command *command = &queue->last->cells[queue->tail].command;
    command->count = copies;
    queue->tail += 1 + copies;
    *out = command;
    return REFIT_OK;
}

/* Goes on to the next chunk when the first one is read to its end. */
static void drop_read_chunk(host_queue *queue)
{
    host_chunk *read = queue->first;
    if (read->next == NULL || queue->head < read->end) return;
    queue->first = read->next;
    queue->head = 0;
    read->next = queue->spare;
    queue->spare = read;
}

/* The oldest command, or NULL. It stays where it is until it is popped. */
static host_command *queue_first(host_queue *queue)
{
    if (queue->first == NULL) return NULL;
    drop_read_chunk(queue);
    if (queue->first == queue->last && queue->head == queue->tail) {
        queue->head = queue->tail = 0;
        return NULL;
    }
    return &queue->first->cells[queue->head].command;
}

static void queue_pop(host_queue *queue)
{
    queue->head += 1 + queue->first->cells[queue->head].command.count;
}

/* What follows a command of a verb that says so. */
static rft_copy *command_copies(host_command *command)
{
    return &((cell *)command + 1)->copy;
}

/* ---- The stream --------------------------------------------------------------------------- */

struct rft_host_stream {
    rft_host_memory *memory;
    rft_pool *pool;
    host_line *line;
    rft_thread thread;
    rft_mutex lock;
    rft_cond work;     /* the queue is not empty, or closing */
    host_queue queue;  /* guarded by lock, like the rest */
    uint64_t recorded; /* records queued: the last place on the line */
    bool closing;
};

/* A job on its way through the queue. */
static void put_job(rft_copy *to, const rft_master_job *job)
{
    to[0] = (rft_copy){.to = job->master,
                       .from = job->weights,
                       .bytes = job->elements,
                       .slack = job->room,
                       .known_memory = job->compares};
    to[1] = (rft_copy){.to = job->coded, .from = job->result};
}

static rft_master_job get_job(const rft_copy *from)
{
    return (rft_master_job){.master = from[0].to,
                            .weights = from[0].from,
                            .coded = from[1].to,
                            .result = (rft_master_result *)from[1].from,
                            .elements = from[0].bytes,
                            .room = from[0].slack,
                            .compares = from[0].known_memory};
}

/* The work of a command on memory. */
static refit_status do_work(rft_host_stream *stream, host_command *command, refit_error *error)
{
    rft_host_memory *memory = stream->memory;
    const rft_copy *work = command_copies(command);
    rft_master_job job;
    switch (command->verb) {
    case HOST_COPY: return rft_host_copy_now(memory, stream->pool, work, command->count, error);
    case HOST_DIGEST:
        return rft_host_digest_now(memory, work->from, work->bytes, command->offset, work->to,
                                   error);
    case HOST_DIGEST_LIST:
        return rft_host_digest_list_now(memory, work->to, (uint32_t)work->bytes, error);
    case HOST_CAST:
        return rft_host_cast_now(memory, work->to, work->from, work->bytes / sizeof(float), error);
    case HOST_ENCODE:
        job = get_job(work);
        return rft_host_encode_now(memory, stream->pool, &job, error);
    case HOST_DECODE:
        job = get_job(work);
        return rft_host_decode_now(memory, stream->pool, &job, error);
    default: return REFIT_OK;
    }
}

static void do_join(const host_command *command)
{
    line_follow(command->join.line, command->join.place);
    line_release(command->join.line);
}

static void do_command(rft_host_stream *stream, host_command *command)
{
    refit_error why;
    bool lost = rft_host_check_lost(stream->memory, NULL) != REFIT_OK;
    switch (command->verb) {
    case HOST_RECORD: line_pass(stream->line, command->record); break;
    case HOST_JOIN: do_join(command); break;
    case HOST_CALL:
        if (!lost) command->call.function(command->call.user);
        break;
    default:
        if (!lost && do_work(stream, command, &why) != REFIT_OK) {
            rft_host_lose(stream->memory, &why);
        }
    }
}

/* Takes the lock off while the command is carried out. */
static void do_next(rft_host_stream *stream, host_command *command)
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
        host_command *command = queue_first(&stream->queue);
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
    RFT_TRY_GOTO(line_open(&stream->line, error), free_stream);
    RFT_TRY_GOTO(open_locks(stream, error), close_line);
    RFT_TRY_GOTO(rft_thread_start(&stream->thread, "refit-stream", run, stream, error),
                 close_locks);
    *out = stream;
    return REFIT_OK;

close_locks:
    close_locks(stream);
close_line:
    line_release(stream->line);
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
    line_release(stream->line);
    rft_free(stream);
}

/* Room for a command, the lock taken; if there is none the lock is given back. */
static refit_status begin_command(rft_host_stream *stream, host_verb verb, uint32_t copies,
                                  host_command **out, refit_error *error)
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
    host_command *command;
    RFT_TRY(begin_command(stream, HOST_CALL, 0, &command, error));
    command->call.function = function;
    command->call.user = user;
    end_command(stream);
    return REFIT_OK;
}

refit_status rft_host_stream_copy(rft_host_stream *stream, const rft_copy *copies, uint32_t count,
                                  refit_error *error)
{
    host_command *command;
    RFT_TRY(begin_command(stream, HOST_COPY, count, &command, error));
    rft_copy *queued = command_copies(command);
    for (uint32_t i = 0; i < count; i++) {
        queued[i] = copies[i];
    }
    end_command(stream);
    return REFIT_OK;
}

/* What a command of one copy works on. */
static refit_status begin_work(rft_host_stream *stream, host_verb verb, const rft_copy *work,
                               host_command **out, refit_error *error)
{
    RFT_TRY(begin_command(stream, verb, 1, out, error));
    *command_copies(*out) = *work;
    return REFIT_OK;
}

refit_status rft_host_stream_digest(rft_host_stream *stream, const void *memory, uint64_t bytes,
                                    uint64_t offset, uint64_t *sum, refit_error *error)
{
    host_command *command;
    rft_copy work = {.to = sum, .from = memory, .bytes = bytes};
    RFT_TRY(begin_work(stream, HOST_DIGEST, &work, &command, error));
    command->offset = offset;
    end_command(stream);
    return REFIT_OK;
}

refit_status rft_host_stream_digest_list(rft_host_stream *stream, rft_digest_job *jobs,
                                         uint32_t count, refit_error *error)
{
    host_command *command;
    rft_copy work = {.to = jobs, .bytes = count};
    RFT_TRY(begin_work(stream, HOST_DIGEST_LIST, &work, &command, error));
    end_command(stream);
    return REFIT_OK;
}

refit_status rft_host_stream_cast(rft_host_stream *stream, uint16_t *to, const float *from,
                                  uint64_t count, refit_error *error)
{
    host_command *command;
    rft_copy work = {.to = to, .from = from, .bytes = count * sizeof *from};
    RFT_TRY(begin_work(stream, HOST_CAST, &work, &command, error));
    end_command(stream);
    return REFIT_OK;
}

static refit_status queue_master(rft_host_stream *stream, host_verb verb, const rft_master_job *job,
                                 refit_error *error)
{
    host_command *command;
    RFT_TRY(begin_command(stream, verb, 2, &command, error));
    put_job(command_copies(command), job);
    end_command(stream);
    return REFIT_OK;
}

refit_status rft_host_stream_encode(rft_host_stream *stream, const rft_master_job *job,
                                    refit_error *error)
{
    return queue_master(stream, HOST_ENCODE, job, error);
}

refit_status rft_host_stream_decode(rft_host_stream *stream, const rft_master_job *job,
                                    refit_error *error)
{
    return queue_master(stream, HOST_DECODE, job, error);
}

refit_status rft_host_stream_record(rft_host_stream *stream, rft_host_event *event,
                                    refit_error *error)
{
    host_command *command;
    RFT_TRY(begin_command(stream, HOST_RECORD, 0, &command, error));
    command->record = ++stream->recorded;
    event_move(event, stream->line, command->record);
    end_command(stream);
    return REFIT_OK;
}

refit_status rft_host_stream_join(rft_host_stream *stream, rft_host_event *event,
                                  refit_error *error)
{
    uint64_t place;
    host_line *line = event_where(event, &place);
    /* What was put on this very stream comes first anyway. */
    if (line == NULL || line == stream->line) {
        line_release(line);
        return REFIT_OK;
    }
    host_command *command;
    refit_status status = begin_command(stream, HOST_JOIN, 0, &command, error);
    if (status != REFIT_OK) {
        line_release(line);
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
    RFT_REFUSE_IF(!known, error, REFIT_ERR_INVALID, "%p is not an open stream of this device",
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
