/* Messages encoded once; what the transport still holds of an older one waits in the attic. */
#include "publisher/cached_message.h"

#include <stddef.h>

#include "wire/manifest.h"

bool rft_cached_message_is_about(const rft_cached_message *notice, uint64_t version,
                                 const rft_digest128 *digest)
{
    return notice->buffer != NULL && notice->version == version &&
           rft_digest128_equal(&notice->digest, digest);
}

refit_status rft_cached_message_write(rft_cached_message *notice, const rft_message *message,
                                      uint64_t version, const rft_digest128 *digest,
                                      const rft_limits *limits, rft_retire_list *retired,
                                      refit_error *error)
{
    rft_cached_message_close(notice, retired);
    rft_buffer *buffer = rft_buffer_open();
    RFT_REFUSE_IF(buffer == NULL, error, REFIT_ERR_HOST_MEMORY, "no memory for a message");
    refit_status status = rft_message_encode(message, limits, &buffer->gathered, error);
    if (status == REFIT_OK) {
        *notice = (rft_cached_message){buffer, version, *digest};
    } else {
        rft_retire_list_put(retired, buffer);
    }
    return status;
}

void rft_cached_message_close(rft_cached_message *notice, rft_retire_list *retired)
{
    rft_retire_list_put(retired, notice->buffer);
    *notice = (rft_cached_message){0};
}
