/*
 * Digests and casts by the C twins of the GPU's kernels. Memory is looked up first, so that an
 * arena's that is not there now is a failure and not a crash. Knows nothing of streams.
 */
#include "device/host_compute.h"

#include <inttypes.h>

#include "kernels/cast.h"
#include "kernels/digest.h"

static refit_status check(rft_host_memory *memory, const void *at, uint64_t bytes,
                          refit_error *error)
{
    rft_copy touched = {.from = at, .bytes = bytes};
    RFT_REFUSE_IF(rft_host_memory_find_lost(memory, &touched, 1) == 0, error, REFIT_ERR_COPY,
                  "%" PRIu64 " bytes at %p are memory of an arena that is not there now: commit it "
                  "first",
                  bytes, at);
    return REFIT_OK;
}

refit_status rft_host_digest_now(rft_host_memory *memory, const void *from, uint64_t bytes,
                                 uint64_t offset, uint64_t *sum, refit_error *error)
{
    RFT_TRY(check(memory, from, bytes, error));
    *sum = rft_digest_part(from, bytes, offset);
    return REFIT_OK;
}

refit_status rft_host_digest_copy_now(rft_host_memory *memory, void *to, const void *from,
                                      uint64_t bytes, uint64_t offset, uint64_t *sum,
                                      refit_error *error)
{
    RFT_TRY(check(memory, from, bytes, error));
    RFT_TRY(check(memory, sum, sizeof *sum, error));
    if (to != NULL) RFT_TRY(check(memory, to, bytes, error));
    *sum += to == NULL ? rft_digest_part(from, bytes, offset)
                       : rft_digest_copy_part(to, from, bytes, offset);
    return REFIT_OK;
}

refit_status rft_host_cast_now(rft_host_memory *memory, uint16_t *to, const float *from,
                               uint64_t count, refit_error *error)
{
    RFT_TRY(check(memory, to, count * sizeof *to, error));
    RFT_TRY(check(memory, from, count * sizeof *from, error));
    rft_cast_bf16(to, from, count);
    return REFIT_OK;
}
