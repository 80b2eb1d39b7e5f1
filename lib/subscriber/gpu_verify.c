/*
 * Digests of tensors, one part after the other, on a stream of the worker's own; the sums are held
 * against SEAL when all are there. A part that is under way when its version is dropped still reads
 * its bytes: until it has ended, the mapping counts as used, and the next version waits.
 */
#include "subscriber/gpu_verify.h"

#include "base/alloc.h"
#include "base/log.h"
#include "wire/seal.h"

#define WAIT_MS 20u

void rft_gpu_verify_begin(rft_gpu_verify *verify, refit_device *device, const refit_config *config,
                          rft_image *image)
{
    verify->device = device;
    verify->config = config;
    verify->image = image;
    verify->started = false;
    verify->done = false;
}

/* Lets go of the mapping if nothing reads there any more. */
static void let_go(rft_gpu_verify *verify, uint32_t timeout_ms)
{
    if (rft_copy_queue_is_busy(verify->copy_queue)) {
        (void)rft_copy_queue_wait(verify->copy_queue, timeout_ms, NULL);
    }
    if (rft_copy_queue_is_busy(verify->copy_queue) || verify->mapping == NULL) return;
    verify->mapping->users--;
    verify->mapping = NULL;
}

static refit_status start(rft_gpu_verify *verify, refit_error *error)
{
    if (verify->copy_queue == NULL) {
        RFT_TRY(rft_copy_queue_open(verify->device, verify->config, &verify->copy_queue, error));
    }
    uint32_t tensors = verify->image->catalog->manifest->count;
    rft_free(verify->sums);
    verify->sums = rft_calloc(tensors, sizeof *verify->sums);
    RFT_REFUSE_IF(verify->sums == NULL, error, REFIT_ERR_HOST_MEMORY,
                  "no memory for the digests of %u tensors", tensors);
    verify->tensor = 0;
    verify->offset = 0;
    verify->asked = 0;
    verify->mapping = verify->image->gpu;
    verify->mapping->users++;
    verify->started = true;
    return REFIT_OK;
}

/* Asks for the next part, unless all are there. */
static refit_status ask(rft_gpu_verify *verify, uint64_t most, refit_error *error)
{
    const rft_manifest *manifest = verify->image->catalog->manifest;
    for (; verify->tensor < manifest->count; verify->tensor++, verify->offset = 0) {
        const rft_manifest_tensor *tensor = &manifest->tensors[verify->tensor];
        if (tensor->alias_of != REFIT_NO_ALIAS || verify->offset == tensor->bytes) continue;
        uint64_t left = tensor->bytes - verify->offset;
        verify->asked = left <= most ? left : most - most % sizeof(uint64_t);
        return rft_copy_queue_digest(verify->copy_queue,
                                     verify->image->bytes + tensor->offset + verify->offset,
                                     verify->asked, verify->offset, error);
    }
    return REFIT_OK;
}

/* What was asked for is there, or not yet. */
static refit_status answer(rft_gpu_verify *verify, refit_error *error)
{
    refit_status status = rft_copy_queue_wait(verify->copy_queue, WAIT_MS, error);
    if (status != REFIT_OK) return status == REFIT_ERR_TIMEOUT ? REFIT_OK : status;
    verify->sums[verify->tensor] += rft_copy_queue_sum(verify->copy_queue);
    verify->offset += verify->asked;
    verify->asked = 0;
    return REFIT_OK;
}

refit_status rft_gpu_verify_part(rft_gpu_verify *verify, const rft_message *seal, uint64_t most,
                                 refit_error *error)
{
    if (!verify->started) {
        let_go(verify, WAIT_MS);
        return verify->mapping == NULL ? start(verify, error) : REFIT_OK;
    }
    if (verify->asked == 0) RFT_TRY(ask(verify, most, error));
    if (verify->asked > 0) return answer(verify, error);
    RFT_TRY(rft_seal_check(verify->image->catalog->manifest, verify->sums, seal, error));
    verify->done = true;
    return REFIT_OK;
}

void rft_gpu_verify_end(rft_gpu_verify *verify)
{
    verify->image = NULL;
    let_go(verify, 0);
}

void rft_gpu_verify_close(rft_gpu_verify *verify, uint32_t timeout_ms)
{
    let_go(verify, timeout_ms);
    if (!rft_copy_queue_close(verify->copy_queue, 0)) {
        rft_log(REFIT_LOG_ERROR, "a GPU does not end its work: it stays open");
    }
    rft_free(verify->sums);
    *verify = (rft_gpu_verify){0};
}
