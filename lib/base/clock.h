/* Time: one monotonic clock, and deadlines made from it. No wait in refit is without one. */
#ifndef RFT_CLOCK_H
#define RFT_CLOCK_H

#include <stdbool.h>
#include <stdint.h>

/* Nanoseconds since some fixed moment; never goes back. */
int64_t rft_now(void);

/* The moment `timeout_ms` from now. */
int64_t rft_deadline(uint32_t timeout_ms);

/* The moment `ms` after `now`, for code that is handed the time instead of asking for it. */
static inline int64_t rft_after_ms(int64_t now, uint32_t ms)
{
    return now + (int64_t)ms * INT64_C(1000000);
}

/* Whole milliseconds until `deadline`, rounded up, 0 once it has passed: what poll() takes. */
int rft_ms_until(int64_t deadline);

/* For what can only be looked at, never waited for (an event of a GPU): the first looks follow each
 * other at once, later ones after naps that grow with the time waited for, to 500 microseconds.
 *
 *     rft_looks looks = rft_looks_until(deadline);
 *     while (!done() && rft_poll_again(&looks)) {
 *     }
 */
typedef struct rft_looks {
    int64_t deadline;
    int64_t began;
} rft_looks;

rft_looks rft_looks_until(int64_t deadline);

/* Waits for the moment of the next look; false once the deadline has passed. */
bool rft_poll_again(rft_looks *looks);

static inline double rft_seconds(int64_t nanoseconds)
{
    return (double)nanoseconds * 1e-9;
}

#endif
