/*
 * A counter on a futex.
 *
 * Raising and lowering are one atomic addition. The waiter sets the top bit first; the lowering
 * that leaves nothing but that bit wakes it. A wake-up that comes after the owner has freed the
 * word goes to an address without a waiter, which the kernel allows: like sem_post, it reads
 * nothing there.
 */
#include "net/pending.h"

#include <errno.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"

#define WAITED     (UINT32_C(1) << 31)
#define COUNT_MASK (WAITED - 1)

void rft_pending_raise(rft_pending *pending)
{
    atomic_fetch_add(&pending->word, 1);
}

void rft_pending_lower(rft_pending *pending)
{
    uint32_t before = atomic_fetch_sub(&pending->word, 1);
    if (before == (WAITED | 1)) {
        (void)syscall(SYS_futex, &pending->word, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
    }
}

uint32_t rft_pending_count(rft_pending *pending)
{
    return atomic_load(&pending->word) & COUNT_MASK;
}

bool rft_pending_wait(rft_pending *pending, int64_t deadline)
{
    uint32_t seen = atomic_fetch_or(&pending->word, WAITED) | WAITED;
    while ((seen & COUNT_MASK) != 0) {
        int64_t left = deadline - rft_now();
        if (left <= 0) break;
        struct timespec timeout = {.tv_sec = (time_t)(left / INT64_C(1000000000)),
                                   .tv_nsec = (long)(left % INT64_C(1000000000))};
        (void)syscall(SYS_futex, &pending->word, FUTEX_WAIT_PRIVATE, seen, &timeout, NULL, 0);
        seen = atomic_load(&pending->word);
    }
    return (atomic_fetch_and(&pending->word, COUNT_MASK) & COUNT_MASK) == 0;
}
