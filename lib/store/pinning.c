/* Pieces of one size from the start on, the last one shorter: where one ends follows from where the
 * memory begins. */
#include "store/pinning.h"

#include "base/checked.h"

static void unpin_until(const rft_pinning *pinning, uint64_t end)
{
    for (uint64_t at = 0; at < end; at += pinning->piece_bytes) {
        uint64_t bytes = rft_min_u64(pinning->piece_bytes, pinning->bytes - at);
        rft_device_host_unpin(pinning->device, pinning->memory + at, bytes);
    }
}

refit_status rft_pinning_open(rft_pinning *pinning, refit_device *device, void *memory,
                              uint64_t bytes, uint64_t piece_bytes, refit_error *error)
{
    const rft_pinning wanted = {device, memory, bytes, piece_bytes};
    for (uint64_t at = 0; at < bytes; at += piece_bytes) {
        refit_status status = rft_device_host_pin(device, wanted.memory + at,
                                                  rft_min_u64(piece_bytes, bytes - at), error);
        if (status != REFIT_OK) {
            unpin_until(&wanted, at);
            return status;
        }
    }
    *pinning = wanted;
    rft_device_retain(device);
    return REFIT_OK;
}

void rft_pinning_close(rft_pinning *pinning)
{
    if (pinning->device == NULL) return;
    unpin_until(pinning, pinning->bytes);
    rft_device_release(pinning->device);
    *pinning = (rft_pinning){0};
}

uint64_t rft_pinning_reach(const rft_pinning *pinning, const void *memory, uint64_t bytes)
{
    if (pinning == NULL || pinning->device == NULL) return bytes;
    uint64_t offset = (uintptr_t)memory - (uintptr_t)pinning->memory;
    if (offset >= pinning->bytes) return bytes;
    return rft_min_u64(bytes, pinning->piece_bytes - offset % pinning->piece_bytes);
}
