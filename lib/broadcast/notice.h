/*
 * notice: a message that many workers are told, or one of them again and again: encoded once, and
 * lent to the transport. So what waits in queues for it is a reference, however large it is and
 * however often somebody makes the publisher say it.
 */
#ifndef RFT_NOTICE_H
#define RFT_NOTICE_H

#include "broadcast/loan.h"
#include "wire/message.h"

/* {0} says nothing. */
typedef struct rft_notice {
    rft_loan *loan;
    uint64_t version; /* what it is about; 0: no version */
    rft_digest128 digest;
} rft_notice;

bool rft_notice_is_about(const rft_notice *notice, uint64_t version, const rft_digest128 *digest);

/* Another message in the place of the one before, which goes to the attic. REFIT_ERR_HOST_MEMORY,
 * REFIT_ERR_LIMIT: it says nothing then. */
refit_status rft_notice_write(rft_notice *notice, const rft_message *message, uint64_t version,
                              const rft_digest128 *digest, const rft_limits *limits,
                              rft_attic *attic, refit_error *error);
void rft_notice_close(rft_notice *notice, rft_attic *attic);

#endif
