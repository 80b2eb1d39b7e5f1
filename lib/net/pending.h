/*
 * pending: how many payloads the transport still holds, as a number that can be waited for. The
 * transport's own threads lower it, so it is one atomic word and nothing else: no lock that they
 * could meet, nothing that could be freed under them.
 */
#ifndef RFT_PENDING_H
#define RFT_PENDING_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

/* {0} is ready to use. It must live until the count is 0. */
typedef struct rft_pending {
    _Atomic uint32_t word; /* the count, and one bit for "a thread waits" */
} rft_pending;

void rft_pending_raise(rft_pending *pending);
void rft_pending_lower(rft_pending *pending);
uint32_t rft_pending_count(rft_pending *pending);

/* Waits until the count is 0; false once `deadline` (of rft_deadline) has passed. One thread at a
 * time. */
bool rft_pending_wait(rft_pending *pending, int64_t deadline);

#endif
