/*
 * A FIFO in chunks. A command never moves, so the stream's thread reads it without a lock while
 * others queue more behind it. Chunks that were read are kept: a queue allocates only when it is
 * deeper than it has ever been.
 */
#include "device/host_queue.h"

#include "base/alloc.h"

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

void rft_host_queue_close(rft_host_queue *queue)
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

refit_status rft_host_queue_push(rft_host_queue *queue, uint32_t copies, rft_host_command **out,
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

rft_host_command *rft_host_queue_first(rft_host_queue *queue)
{
    if (queue->first == NULL) return NULL;
    drop_read_chunk(queue);
    if (queue->first == queue->last && queue->head == queue->tail) {
        queue->head = queue->tail = 0;
        return NULL;
    }
    return &queue->first->cells[queue->head].command;
}

void rft_host_queue_pop(rft_host_queue *queue)
{
    queue->head += 1 + queue->first->cells[queue->head].command.count;
}

rft_copy *rft_host_command_copies(rft_host_command *command)
{
    return &((cell *)command + 1)->copy;
}
