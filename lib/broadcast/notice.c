/* Messages encoded once; what the transport still holds of an older one waits in the attic. */
#include "broadcast/notice.h"

#include <stddef.h>

#include "wire/manifest.h"

bool rft_notice_is_about(const rft_notice *notice, uint64_t version, const rft_digest128 *digest)
{
    return notice->loan != NULL && notice->version == version &&
           rft_digest128_equal(&notice->digest, digest);
}

refit_status rft_notice_write(rft_notice *notice, const rft_message *message, uint64_t version,
                              const rft_digest128 *digest, const rft_limits *limits,
                              rft_attic *attic, refit_error *error)
{
    rft_notice_close(notice, attic);
    rft_loan *loan = rft_loan_open();
    RFT_REFUSE_IF(loan == NULL, error, REFIT_ERR_HOST_MEMORY, "no memory for a message");
    refit_status status = rft_message_encode(message, limits, &loan->gathered, error);
    if (status == REFIT_OK) {
        *notice = (rft_notice){loan, version, *digest};
    } else {
        rft_attic_put(attic, loan);
    }
    return status;
}

void rft_notice_close(rft_notice *notice, rft_attic *attic)
{
    rft_attic_put(attic, notice->loan);
    *notice = (rft_notice){0};
}
