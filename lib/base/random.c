/* getrandom(2), retried on a signal. */
#include "base/random.h"

#include <errno.h>
#include <string.h>
#include <sys/random.h>

refit_status rft_random_u64(uint64_t *out, refit_error *error)
{
    uint64_t bits = 0;
    while (bits == 0) {
        if (getrandom(&bits, sizeof bits, 0) == (ssize_t)sizeof bits) continue;
        if (errno != EINTR) {
            return rft_fail_sub(error, REFIT_ERR_SYSTEM, errno,
                                "the kernel gave no random bits: %s", strerror(errno));
        }
        bits = 0;
    }
    *out = bits;
    return REFIT_OK;
}
