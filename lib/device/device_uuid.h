/* device_uuid: a device's identity, the same in every process and container, as text. */
#ifndef RFT_DEVICE_UUID_H
#define RFT_DEVICE_UUID_H

#include <stdbool.h>

#define RFT_UUID_TEXT_BYTES 41u /* "GPU-", 32 digits, 4 dashes, a NUL */

/* As nvidia-smi shows it: "GPU-8f2b…". `uuid` has RFT_UUID_BYTES. */
void rft_uuid_print(const unsigned char *uuid, char text[RFT_UUID_TEXT_BYTES]);

bool rft_uuid_equal(const unsigned char *a, const unsigned char *b);
/* All zero: the device has none. */
bool rft_uuid_is_none(const unsigned char *uuid);

#endif
