/*
 * The monotonic clock. Wall-clock time is never asked for: it jumps, and machines disagree on it.
 */
#include "base/clock.h"

#include <limits.h>
#include <time.h>

#define NS_PER_S  INT64_C(1000000000)
#define NS_PER_MS INT64_C(1000000)

/* How long looks follow each other at once, and the naps after that. A nap is short beside the
 * copies that are waited for, and long beside a look. */
#define LOOKS_AT_ONCE INT64_C(20000)
#define NAP_FIRST     INT64_C(20000)
#define NAP_LONGEST   INT64_C(500000)

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

rft_looks rft_looks_until(int64_t deadline)
{
    return (rft_looks){.deadline = deadline, .began = rft_now(), .nap = NAP_FIRST};
}

bool rft_look_again(rft_looks *looks)
{
    int64_t now = rft_now();
    if (now >= looks->deadline) return false;
    if (now - looks->began < LOOKS_AT_ONCE) return true;
    int64_t left = looks->deadline - now;
    struct timespec nap = {.tv_nsec = (long)(looks->nap < left ? looks->nap : left)};
    nanosleep(&nap, NULL);
    looks->nap = looks->nap * 2 < NAP_LONGEST ? looks->nap * 2 : NAP_LONGEST;
    return true;
}
