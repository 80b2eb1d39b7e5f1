/*
 * notice: a message that many workers are told, or one of them again and again: encoded once, and
 * lent to the transport. So what waits in queues for it is a reference, however large it is and
 * however often somebody makes the publisher say it.
 */
#ifndef RFT_CACHED_MESSAGE_H
#define RFT_CACHED_MESSAGE_H

#include "store/buffer.h"
#include "wire/message.h"

/* {0} says nothing. */
typedef struct rft_cached_message {
    rft_buffer *buffer;
    uint64_t version; /* what it is about; 0: no version */
    rft_digest128 digest;
} rft_cached_message;

bool rft_cached_message_is_about(const rft_cached_message *notice, uint64_t version,
                                 const rft_digest128 *digest);

/* Another message in the place of the one before, which goes to the attic. REFIT_ERR_HOST_MEMORY,
 * REFIT_ERR_LIMIT: it says nothing then. */
refit_status rft_cached_message_write(rft_cached_message *notice, const rft_message *message,
                                      uint64_t version, const rft_digest128 *digest,
                                      const rft_limits *limits, rft_retire_list *retired,
                                      refit_error *error);
void rft_cached_message_close(rft_cached_message *notice, rft_retire_list *retired);

#endif
