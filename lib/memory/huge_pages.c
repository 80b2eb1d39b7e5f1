/*
 * Transparent huge pages, by madvise, and the probe.
 *
 * The probe touches the beginning of the range itself, so its work is not lost, and it ends early
 * when it is slow. A slow rate alone proves nothing (in a virtual machine the host may be fetching
 * the memory, whatever the page size): then small pages are tried on the next stretch, and huge
 * ones are given up if they cost many times as much. What a busy machine takes away is left
 * out of the time: it would decide by chance.
 */
#include "memory/huge_pages.h"

#include <string.h>
#include <sys/mman.h>

#include "base/checked.h"
#include "base/clock.h"
#include "memory/procfile.h"
#include "memory/touch.h"

#define PROBE_BYTES  (UINT64_C(64) << 20)
#define SECOND_BYTES (UINT64_C(16) << 20)
#define CHEAP_RATE   1e9 /* bytes per second */
#define MUCH_FASTER  4   /* small pages, for them to win: they cost again at the lock */
#define PROBE_TIME   INT64_C(64000000) /* what PROBE_BYTES take at CHEAP_RATE, about */

/* How long this thread has stood in line for a CPU, in ns: the second number; 0 where the kernel
 * does not count it. */
static int64_t queued_time(void)
{
    char text[128];
    uint64_t waited;
    if (!rft_procfile_read("/proc/thread-self/schedstat", text, sizeof text)) return 0;
    const char *second = strchr(text, ' ');
    if (second == NULL || !rft_procfile_number(second, &waited)) return 0;
    return waited > INT64_MAX ? 0 : (int64_t)waited;
}

/* Bytes per second of touching from `*at` on, which it moves; up to `bytes`, or until PROBE_TIME is
 * up. 0 if nothing could be touched: the touch of the whole will say why. */
static double probe_rate(char **at, uint64_t bytes)
{
    int64_t start = rft_now() - queued_time();
    int64_t taken = 0;
    uint64_t done = 0;
    while (done < bytes && taken < PROBE_TIME) {
        if (rft_touch_range(*at, RFT_HUGE_PAGE, NULL) != REFIT_OK) break;
        *at += RFT_HUGE_PAGE;
        done += RFT_HUGE_PAGE;
        taken = rft_now() - queued_time() - start;
    }
    return taken <= 0 ? 0 : (double)done / rft_seconds(taken);
}

static bool are_cheap(char *base, uint64_t bytes)
{
    char *at = base;
    double huge = probe_rate(&at, rft_min_u64(bytes, PROBE_BYTES) & ~(RFT_HUGE_PAGE - 1));
    uint64_t left = bytes - (uint64_t)(at - base);
    if (huge >= CHEAP_RATE || left < SECOND_BYTES) return true;
    if (madvise(at, SECOND_BYTES, MADV_NOHUGEPAGE) != 0) return true;
    return huge * MUCH_FASTER >= probe_rate(&at, SECOND_BYTES);
}

bool rft_huge_pages_ask(void *base, uint64_t bytes, refit_huge_pages wanted)
{
    bool asked = wanted != REFIT_HUGE_PAGES_NEVER && bytes >= RFT_HUGE_PAGE &&
                 madvise(base, bytes, MADV_HUGEPAGE) == 0;
    if (asked && wanted == REFIT_HUGE_PAGES_AUTO) asked = are_cheap(base, bytes);
    (void)madvise(base, bytes, asked ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
    return asked;
}
