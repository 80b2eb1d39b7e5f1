/* A ring of encoded messages in front of a subscriber's socket. Knows nothing of what they say. */
#include "subscriber/waiting_messages.h"

void rft_backlog_close(rft_backlog *backlog)
{
    for (uint32_t i = 0; i < RFT_BACKLOG_MESSAGES; i++) {
        rft_bytes_close(&backlog->slots[i]);
    }
    rft_backlog_clear(backlog);
}

refit_status rft_backlog_put(rft_backlog *backlog, const rft_message *message,
                             const rft_limits *limits, refit_error *error)
{
    RFT_REFUSE_IF(backlog->count == RFT_BACKLOG_MESSAGES, error, REFIT_ERR_BUSY,
                  "the trainer has taken none of %u messages", RFT_BACKLOG_MESSAGES);
    rft_bytes *slot = &backlog->slots[(backlog->first + backlog->count) % RFT_BACKLOG_MESSAGES];
    rft_bytes_reset(slot);
    RFT_TRY(rft_message_encode(message, limits, slot, error));
    backlog->count++;
    return REFIT_OK;
}

bool rft_backlog_flush(rft_backlog *backlog, rft_channel *channel)
{
    while (backlog->count > 0) {
        rft_view message = rft_bytes_view(&backlog->slots[backlog->first]);
        if (rft_channel_send(channel, NULL, message, NULL, NULL) != REFIT_OK) return false;
        backlog->first = (backlog->first + 1) % RFT_BACKLOG_MESSAGES;
        backlog->count--;
    }
    return true;
}

void rft_backlog_clear(rft_backlog *backlog)
{
    backlog->first = 0;
    backlog->count = 0;
}
