/*
 * A queue of records in one growing buffer: {peer, length, bytes}, or {peer, loan}. It is emptied
 * as a whole, so it keeps its room, and after the first rounds nothing is allocated. A loan is held
 * from its put until the take behind its own.
 */
#include "publisher/send_queue.h"

#include <string.h>

typedef struct send_queue_record {
    rft_peer_id to;
    size_t count;       /* bytes that follow */
    rft_buffer *buffer; /* of a notice, which has none; else NULL */
} send_queue_record;

static void let_go(rft_send_queue *send_queue)
{
    if (send_queue->held != NULL) rft_pending_lower(send_queue->held);
    send_queue->held = NULL;
}

void rft_send_queue_close(rft_send_queue *send_queue)
{
    rft_send_queue_reset(send_queue);
    rft_bytes_close(&send_queue->bytes);
    rft_bytes_close(&send_queue->scratch);
    send_queue->read = 0;
}

refit_status rft_send_queue_put(rft_send_queue *send_queue, const rft_peer_id *to,
                                const rft_message *message, const rft_limits *limits,
                                refit_error *error)
{
    size_t before = send_queue->bytes.count;
    rft_bytes_reset(&send_queue->scratch);
    RFT_TRY(rft_message_encode(message, limits, &send_queue->scratch, error));
    send_queue_record record = {*to, send_queue->scratch.count, NULL};
    RFT_TRY(rft_bytes_append(&send_queue->bytes, &record, sizeof record, error));
    refit_status status = rft_bytes_append(&send_queue->bytes, send_queue->scratch.data,
                                           send_queue->scratch.count, error);
    if (status != REFIT_OK) send_queue->bytes.count = before;
    return status;
}

refit_status rft_send_queue_put_notice(rft_send_queue *send_queue, const rft_peer_id *to,
                                       const rft_cached_message *notice, refit_error *error)
{
    send_queue_record record = {*to, 0, notice->buffer};
    RFT_TRY(rft_bytes_append(&send_queue->bytes, &record, sizeof record, error));
    rft_pending_raise(&notice->buffer->pending);
    return REFIT_OK;
}

bool rft_send_queue_is_empty(const rft_send_queue *send_queue)
{
    return send_queue->read == send_queue->bytes.count;
}

bool rft_send_queue_take(rft_send_queue *send_queue, rft_outgoing *out)
{
    let_go(send_queue);
    if (rft_send_queue_is_empty(send_queue)) return false;
    send_queue_record record;
    const unsigned char *at = send_queue->bytes.data + send_queue->read;
    memcpy(&record, at, sizeof record);
    *out = (rft_outgoing){record.to, {at + sizeof record, record.count}, NULL};
    send_queue->read += sizeof record + record.count;
    if (record.buffer != NULL) {
        send_queue->held = &record.buffer->pending;
        out->message = rft_bytes_view(&record.buffer->gathered);
        out->shared = send_queue->held;
    }
    return true;
}

void rft_send_queue_reset(rft_send_queue *send_queue)
{
    rft_outgoing left;
    while (rft_send_queue_take(send_queue, &left))
        continue;
    rft_bytes_reset(&send_queue->bytes);
    send_queue->read = 0;
}
