/*
 * mlock and munlock, and the sentence that helps where the limit is too low.
 *
 * Whole pages are locked, and locks do not nest: two ranges that share a page are both unlocked by
 * the first to go. Those who pin take care to own their pages.
 */
#include "device/host_pin.h"

#include <errno.h>
#include <inttypes.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>

refit_status rft_host_pin(const void *memory, uint64_t bytes, refit_error *error)
{
    if (mlock(memory, bytes) == 0) return REFIT_OK;
    int code = errno;
    struct rlimit limit = {0};
    (void)getrlimit(RLIMIT_MEMLOCK, &limit);
    return rft_fail_sub(error, REFIT_ERR_PIN, code,
                        "%" PRIu64 " bytes could not be page-locked: %s; RLIMIT_MEMLOCK is %" PRIu64
                        " bytes: raise it (ulimit -l, docker --ulimit memlock=-1) or set "
                        "offload.pin: prefer",
                        bytes, strerror(code), (uint64_t)limit.rlim_cur);
}

void rft_host_unpin(const void *memory, uint64_t bytes)
{
    (void)munlock(memory, bytes);
}
