/* device_spec: "kind", or "kind:rest". */
#ifndef RFT_DEVICE_SPEC_H
#define RFT_DEVICE_SPEC_H

#include <stdbool.h>

#include "base/error.h"

typedef enum rft_device_kind {
    RFT_DEVICE_AUTO,
    RFT_DEVICE_HOST,
    RFT_DEVICE_CUDA,
} rft_device_kind;

typedef struct rft_device_spec {
    rft_device_kind kind;
    const char *rest; /* what follows the colon, or ""; points into the text that was parsed */
} rft_device_spec;

refit_status rft_device_spec_parse(const char *text, rft_device_spec *out, refit_error *error);

/* "capacity=2GiB" behind the part that names the device; "" is UINT64_MAX: as much as there is.
 * False for anything else. */
bool rft_device_spec_capacity(const char *text, uint64_t *bytes);

#endif
