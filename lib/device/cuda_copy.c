/*
 * Copies on a GPU, one call of the driver for each. Both sides are addresses in one space, so the
 * driver finds the direction by itself.
 */
#include "device/cuda_copy.h"

#include "base/alloc.h"

struct rft_cuda_copier {
    rft_cuda_device *cuda;
};

refit_status rft_cuda_copier_open(rft_cuda_device *cuda, rft_cuda_copier **out, refit_error *error)
{
    rft_cuda_copier *copier = rft_calloc(1, sizeof *copier);
    RFT_REFUSE_IF(copier == NULL, error, REFIT_ERR_HOST_MEMORY, "no host memory for a copier");
    copier->cuda = cuda;
    *out = copier;
    return REFIT_OK;
}

void rft_cuda_copier_close(rft_cuda_device *cuda, rft_cuda_copier *copier)
{
    (void)cuda;
    rft_free(copier);
}

refit_status rft_cuda_copy_batch(rft_cuda_device *cuda, rft_cu_stream stream,
                                 const rft_copy *copies, uint32_t count, rft_copy_order order,
                                 refit_error *error)
{
    (void)order; /* the stream's order is always right */
    for (uint32_t i = 0; i < count; i++) {
        if (copies[i].bytes == 0) continue;
        rft_cu_result result = cuda->driver.copy((uintptr_t)copies[i].to, (uintptr_t)copies[i].from,
                                                 copies[i].bytes, stream);
        RFT_TRY(rft_cuda_check(&cuda->driver, result, error, "a copy could not be queued"));
    }
    return REFIT_OK;
}
