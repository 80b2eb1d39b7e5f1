/* A ring of encoded messages in front of a subscriber's socket. Knows nothing of what they say. */
#include "broadcast/outbox.h"

void rft_outbox_close(rft_outbox *outbox)
{
    for (uint32_t i = 0; i < RFT_OUTBOX_MESSAGES; i++) {
        rft_bytes_close(&outbox->slots[i]);
    }
    rft_outbox_clear(outbox);
}

refit_status rft_outbox_put(rft_outbox *outbox, const rft_message *message,
                            const rft_limits *limits, refit_error *error)
{
    RFT_REFUSE_IF(outbox->count == RFT_OUTBOX_MESSAGES, error, REFIT_ERR_BUSY,
                  "the trainer has taken none of %u messages", RFT_OUTBOX_MESSAGES);
    rft_bytes *slot = &outbox->slots[(outbox->first + outbox->count) % RFT_OUTBOX_MESSAGES];
    rft_bytes_reset(slot);
    RFT_TRY(rft_message_encode(message, limits, slot, error));
    outbox->count++;
    return REFIT_OK;
}

bool rft_outbox_flush(rft_outbox *outbox, rft_channel *channel)
{
    while (outbox->count > 0) {
        rft_view message = rft_bytes_view(&outbox->slots[outbox->first]);
        if (rft_channel_send(channel, NULL, message, NULL, NULL) != REFIT_OK) return false;
        outbox->first = (outbox->first + 1) % RFT_OUTBOX_MESSAGES;
        outbox->count--;
    }
    return true;
}

void rft_outbox_clear(rft_outbox *outbox)
{
    outbox->first = 0;
    outbox->count = 0;
}
