/* device_missing: what stands in for the slots that a device leaves empty. */
#ifndef RFT_DEVICE_MISSING_H
#define RFT_DEVICE_MISSING_H

#include "device/device.h"

/* Fills every NULL slot: calls answer REFIT_ERR_UNSUPPORTED, the rest does nothing. */
void rft_device_fill_missing(rft_device_ops *ops);

#endif
