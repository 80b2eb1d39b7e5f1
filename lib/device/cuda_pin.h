/* cuda_pin: host memory registered with the driver, so that copies run at full speed. */
#ifndef RFT_CUDA_PIN_H
#define RFT_CUDA_PIN_H

#include "device/cuda_device.h"

/* Close takes NULL, enters the context by itself and takes back every registration that is left. */
refit_status rft_cuda_pins_open(rft_cuda_device *cuda, rft_cuda_pins **out, refit_error *error);
void rft_cuda_pins_close(rft_cuda_device *cuda, rft_cuda_pins *pins);

/* The addresses of one registration: [start, end). */
typedef struct rft_cuda_pinned {
    uintptr_t start;
    uintptr_t end;
} rft_cuda_pinned;

/* The registration made here that holds `memory`; an empty one if there is none. Cheap: it is asked
 * for every other copy. No context guard is needed. */
rft_cuda_pinned rft_cuda_pins_find(rft_cuda_device *cuda, const void *memory);

/* Do the bytes lie inside it? */
static inline bool rft_cuda_pinned_holds(rft_cuda_pinned pinned, const void *memory, uint64_t bytes)
{
    uintptr_t at = (uintptr_t)memory;
    return at >= pinned.start && at < pinned.end && bytes <= pinned.end - at;
}

/* The slots of device.h: pin inside a context guard, unpin enters the context by itself. One
 * registration a call; REFIT_ERR_PIN says why not. Unpin takes back the registration that begins at
 * `memory`. */
refit_status rft_cuda_pin(rft_cuda_device *cuda, void *memory, uint64_t bytes, refit_error *error);
void rft_cuda_unpin(rft_cuda_device *cuda, void *memory);

#endif
