/*
 * A queue of records in one growing buffer: {peer, length, bytes}, or {peer, reference to a shared
 * message}. The buffer keeps its room, so a steady queue allocates nothing. What was taken is
 * removed when the queue is empty or flushed, which moves the rest to the front.
 *
 * A shared message is held from its put until the take after its own.
 */
#include "net/send_queue.h"

#include <string.h>

typedef struct send_queue_record {
    rft_peer_id to;
    size_t count;        /* bytes of the message, which follow; 0 of a shared one */
    rft_view message;    /* of a shared one */
    rft_pending *shared; /* NULL: the message follows */
} send_queue_record;

static void release_held(rft_send_queue *queue)
{
    if (queue->held != NULL) rft_pending_lower(queue->held);
    queue->held = NULL;
}

void rft_send_queue_close(rft_send_queue *queue)
{
    rft_send_queue_reset(queue);
    rft_bytes_close(&queue->bytes);
    rft_bytes_close(&queue->scratch);
}

static refit_status check_room(const rft_send_queue *queue, refit_error *error)
{
    RFT_REFUSE_IF(queue->most != 0 && queue->count == queue->most, error, REFIT_ERR_BUSY,
                  "the peer has taken none of %u messages", queue->most);
    return REFIT_OK;
}

static rft_peer_id peer_of(const rft_peer_id *to)
{
    return to == NULL ? (rft_peer_id){0} : *to;
}

static refit_status put_encoded(rft_send_queue *queue, const rft_peer_id *to,
                                const rft_message *message, const rft_limits *limits,
                                refit_error *error)
{
    size_t before = queue->bytes.count;
    RFT_TRY(check_room(queue, error));
    rft_bytes_reset(&queue->scratch);
    RFT_TRY(rft_message_encode(message, limits, &queue->scratch, error));
    send_queue_record record = {.to = peer_of(to), .count = queue->scratch.count};
    RFT_TRY(rft_bytes_append(&queue->bytes, &record, sizeof record, error));
    refit_status status =
        rft_bytes_append(&queue->bytes, queue->scratch.data, queue->scratch.count, error);
    if (status == REFIT_OK) {
        queue->count++;
    } else {
        queue->bytes.count = before;
    }
    return status;
}

refit_status rft_send_queue_put(rft_send_queue *queue, const rft_peer_id *to,
                                const rft_message *message, const rft_limits *limits,
                                refit_error *error)
{
    refit_status status = put_encoded(queue, to, message, limits, error);
    if (status != REFIT_OK) queue->failures++;
    return status;
}

static refit_status put_reference(rft_send_queue *queue, const rft_peer_id *to, rft_view message,
                                  rft_pending *shared, refit_error *error)
{
    const send_queue_record record = {.to = peer_of(to), .message = message, .shared = shared};
    RFT_TRY(check_room(queue, error));
    RFT_TRY(rft_bytes_append(&queue->bytes, &record, sizeof record, error));
    rft_pending_raise(shared);
    queue->count++;
    return REFIT_OK;
}

refit_status rft_send_queue_put_shared(rft_send_queue *queue, const rft_peer_id *to,
                                       rft_view message, rft_pending *shared, refit_error *error)
{
    refit_status status = put_reference(queue, to, message, shared, error);
    if (status != REFIT_OK) queue->failures++;
    return status;
}

bool rft_send_queue_is_empty(const rft_send_queue *queue)
{
    return queue->count == 0;
}

/* The message after `record`, which is the oldest. */
static rft_view message_of(const rft_send_queue *queue, send_queue_record *record)
{
    const unsigned char *at = queue->bytes.data + queue->read;
    memcpy(record, at, sizeof *record);
    return record->shared != NULL ? record->message
                                  : (rft_view){at + sizeof *record, record->count};
}

static void step_over(rft_send_queue *queue, const send_queue_record *record)
{
    queue->read += sizeof *record + record->count;
    queue->count--;
}

bool rft_send_queue_take(rft_send_queue *queue, rft_outgoing *out)
{
    send_queue_record record;
    release_held(queue);
    if (queue->count == 0) return false;
    rft_view message = message_of(queue, &record);
    *out = (rft_outgoing){record.to, message, record.shared};
    queue->held = record.shared;
    step_over(queue, &record);
    return true;
}

static void remove_taken(rft_send_queue *queue)
{
    if (queue->read == 0) return;
    queue->bytes.count -= queue->read;
    memmove(queue->bytes.data, queue->bytes.data + queue->read, queue->bytes.count);
    queue->read = 0;
}

bool rft_send_queue_flush(rft_send_queue *queue, rft_channel *channel)
{
    while (queue->count > 0) {
        send_queue_record record;
        rft_view message = message_of(queue, &record);
        if (rft_channel_send(channel, NULL, message, NULL, NULL) != REFIT_OK) break;
        step_over(queue, &record);
    }
    remove_taken(queue);
    return queue->count == 0;
}

void rft_send_queue_reset(rft_send_queue *queue)
{
    rft_outgoing left;
    while (rft_send_queue_take(queue, &left))
        continue;
    rft_bytes_reset(&queue->bytes);
    queue->read = 0;
}
