/*
 * The monotonic clock. Wall-clock time is never asked for: it jumps, and machines disagree on it.
 */
#include "base/clock.h"

#include <limits.h>
#include <time.h>

#define NS_PER_S  INT64_C(1000000000)
#define NS_PER_MS INT64_C(1000000)

int64_t rft_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * NS_PER_S + now.tv_nsec;
}

int64_t rft_deadline(uint32_t timeout_ms)
{
    return rft_now() + (int64_t)timeout_ms * NS_PER_MS;
}

int rft_ms_until(int64_t deadline)
{
    int64_t left = deadline - rft_now();
    if (left <= 0) return 0;
    int64_t ms = (left + NS_PER_MS - 1) / NS_PER_MS;
    return ms > INT_MAX ? INT_MAX : (int)ms;
}
