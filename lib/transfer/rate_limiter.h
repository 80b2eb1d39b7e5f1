/*
 * rate limiter: holds a stream back between batches, so that an operation takes no more of the link
 * than offload.rate_limit, on average over two of its steps.
 *
 * The stream itself stands: a call on it returns once the bytes before it were due. Steps are short
 * (rft_rate_limiter_step bounds a batch), so other calls on the device do not wait long.
 */
#ifndef RFT_RATE_LIMITER_H
#define RFT_RATE_LIMITER_H

#include "transfer/plan.h"

typedef struct rft_rate_limiter rft_rate_limiter;

/* `rate`: bytes a second; 0: no rate limiter (`*out` is NULL). */
refit_status rft_rate_limiter_open(uint64_t rate, rft_rate_limiter **out, refit_error *error);

/* No call of it may be on a stream any more. NULL is allowed. */
void rft_rate_limiter_close(rft_rate_limiter *limiter);

/* The most bytes of one batch at this rate: what crosses the link in 50 ms, at least 64 KiB. 0: no
 * bound, for no rate. */
uint64_t rft_rate_limiter_step(uint64_t rate);

/* A new operation begins; the plan must stay until its last call has run. */
void rft_rate_limiter_begin(rft_rate_limiter *limiter, const rft_plan *plan);

/* Puts the turn of the next batch with a source on the stream. REFIT_ERR_UNSUPPORTED: its streams
 * cannot call. */
refit_status rft_rate_limiter_put(rft_rate_limiter *limiter, refit_device *device,
                                  refit_stream_ref stream, refit_error *error);

/* What is under way goes on as fast as it can, before a close. Any thread. */
void rft_rate_limiter_hurry(rft_rate_limiter *limiter);

#endif
