/*
 * The monotonic clock. Wall-clock time is never asked for: it jumps, and machines disagree on it.
 */
#include "base/clock.h"

#include <limits.h>
#include <sched.h>
#include <time.h>

#define NS_PER_S  INT64_C(1000000000)
#define NS_PER_MS INT64_C(1000000)

/* How long looks follow each other at once: a GPU copies and sums a tensor of tens of MB in this
 * time. Then come naps, of a 32nd of the time waited for, so that the end is seen late by no more.
 * A nap lasts up to 50 us longer than asked for, since Linux wakes threads so late. */
#define LOOKS_AT_ONCE INT64_C(200000)
#define NAP_SHARE     32
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
    return (rft_looks){.deadline = deadline, .began = rft_now()};
}

bool rft_poll_again(rft_looks *looks)
{
    int64_t now = rft_now();
    if (now >= looks->deadline) return false;
    if (now - looks->began < LOOKS_AT_ONCE) {
        sched_yield();
        return true;
    }
    int64_t left = looks->deadline - now;
    int64_t longest = left < NAP_LONGEST ? left : NAP_LONGEST;
    int64_t share = (now - looks->began) / NAP_SHARE;
    struct timespec nap = {.tv_nsec = (long)(share < longest ? share : longest)};
    nanosleep(&nap, NULL);
    return true;
}
