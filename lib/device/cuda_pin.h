/* cuda_pin: host memory registered with the driver, so that copies run at full speed. */
#ifndef RFT_CUDA_PIN_H
#define RFT_CUDA_PIN_H

#include "device/cuda_device.h"

/* Close takes NULL, visits by itself and takes back every registration that is left. */
refit_status rft_cuda_pins_open(rft_cuda_device *cuda, rft_cuda_pins **out, refit_error *error);
void rft_cuda_pins_close(rft_cuda_device *cuda, rft_cuda_pins *pins);

/* Do [memory, memory + bytes) lie inside one registration made here? Cheap: it is asked for every
 * copy. No visit is needed. */
bool rft_cuda_pins_cover(rft_cuda_device *cuda, const void *memory, uint64_t bytes);

/* The slots of device.h: pin inside a visit, unpin visits by itself. One registration a call;
 * REFIT_ERR_PIN says why not. Unpin takes back the registration that begins at `memory`. */
refit_status rft_cuda_pin(rft_cuda_device *cuda, void *memory, uint64_t bytes, refit_error *error);
void rft_cuda_unpin(rft_cuda_device *cuda, void *memory);

#endif
