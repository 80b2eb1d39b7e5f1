/* cuda_slots: what the CUDA device does, in the form of device.h. */
#ifndef RFT_CUDA_SLOTS_H
#define RFT_CUDA_SLOTS_H

#include "device/cuda_device.h"

/* All but the device's own: close, describe and caps. `self` is a rft_cuda_device. */
void rft_cuda_slots_fill(rft_device_ops *ops);

#endif
