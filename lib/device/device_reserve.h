/* device_reserve: what the calls on streams need of the calls on reservations. */
#ifndef RFT_DEVICE_RESERVE_H
#define RFT_DEVICE_RESERVE_H

#include "device/device.h"

/* Closes a stream of the device's own, once its work is done; with it ends its use of all
 * reservations. Waits at most block_ms: REFIT_ERR_TIMEOUT. */
refit_status rft_device_end_stream(refit_device *device, refit_stream_ref stream,
                                   refit_error *error);

#endif
