/* bare_device: a device with the required slots only, which do nothing but fail. */
#ifndef BARE_DEVICE_H
#define BARE_DEVICE_H

#include "device/device.h"

/* A test copies it and fills the slots that it looks at. */
extern const rft_device_ops bare_device_ops;

#endif
