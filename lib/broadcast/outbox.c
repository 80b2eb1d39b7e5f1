/*
 * A queue of records in one growing buffer: {peer, length, bytes}, or {peer, loan}. It is emptied
 * as a whole, so it keeps its room, and after the first rounds nothing is allocated. A loan is held
 * from its put until the take behind its own.
 */
#include "broadcast/outbox.h"

#include <string.h>

typedef struct outbox_record {
    rft_peer_id to;
    size_t count;   /* bytes that follow */
    rft_loan *loan; /* of a notice, which has none; else NULL */
} outbox_record;

static void let_go(rft_outbox *outbox)
{
    if (outbox->held != NULL) rft_pending_lower(outbox->held);
    outbox->held = NULL;
}

void rft_outbox_close(rft_outbox *outbox)
{
    rft_outbox_reset(outbox);
    rft_bytes_close(&outbox->bytes);
    rft_bytes_close(&outbox->scratch);
    outbox->read = 0;
}

refit_status rft_outbox_put(rft_outbox *outbox, const rft_peer_id *to, const rft_message *message,
                            const rft_limits *limits, refit_error *error)
{
    size_t before = outbox->bytes.count;
    rft_bytes_reset(&outbox->scratch);
    RFT_TRY(rft_message_encode(message, limits, &outbox->scratch, error));
    outbox_record record = {*to, outbox->scratch.count, NULL};
    RFT_TRY(rft_bytes_append(&outbox->bytes, &record, sizeof record, error));
    refit_status status =
        rft_bytes_append(&outbox->bytes, outbox->scratch.data, outbox->scratch.count, error);
    if (status != REFIT_OK) outbox->bytes.count = before;
    return status;
}

refit_status rft_outbox_put_notice(rft_outbox *outbox, const rft_peer_id *to,
                                   const rft_notice *notice, refit_error *error)
{
    outbox_record record = {*to, 0, notice->loan};
    RFT_TRY(rft_bytes_append(&outbox->bytes, &record, sizeof record, error));
    rft_pending_raise(&notice->loan->pending);
    return REFIT_OK;
}

bool rft_outbox_is_empty(const rft_outbox *outbox)
{
    return outbox->read == outbox->bytes.count;
}

bool rft_outbox_take(rft_outbox *outbox, rft_outgoing *out)
{
    let_go(outbox);
    if (rft_outbox_is_empty(outbox)) return false;
    outbox_record record;
    const unsigned char *at = outbox->bytes.data + outbox->read;
    memcpy(&record, at, sizeof record);
    *out = (rft_outgoing){record.to, {at + sizeof record, record.count}, NULL};
    outbox->read += sizeof record + record.count;
    if (record.loan != NULL) {
        outbox->held = &record.loan->pending;
        out->message = rft_bytes_view(&record.loan->gathered);
        out->shared = outbox->held;
    }
    return true;
}

void rft_outbox_reset(rft_outbox *outbox)
{
    rft_outgoing left;
    while (rft_outbox_take(outbox, &left))
        continue;
    rft_bytes_reset(&outbox->bytes);
    outbox->read = 0;
}
