/*
 * Sixteen bytes that say which device it is. Ordinals differ from process to process
 * (CUDA_VISIBLE_DEVICES), so nothing that leaves a process names a device in another way.
 */
#include "device/device_uuid.h"

#include <stdio.h>
#include <string.h>

#include "device/device.h"

void rft_uuid_print(const unsigned char *uuid, char text[RFT_UUID_TEXT_BYTES])
{
    int at = snprintf(text, RFT_UUID_TEXT_BYTES, "GPU-");
    for (unsigned i = 0; i < RFT_UUID_BYTES; i++) {
        bool dash = i == 4 || i == 6 || i == 8 || i == 10;
        at += snprintf(text + at, RFT_UUID_TEXT_BYTES - (unsigned)at, dash ? "-%02x" : "%02x",
                       uuid[i]);
    }
}

bool rft_uuid_equal(const unsigned char *a, const unsigned char *b)
{
    return memcmp(a, b, RFT_UUID_BYTES) == 0;
}

bool rft_uuid_is_none(const unsigned char *uuid)
{
    static const unsigned char none[RFT_UUID_BYTES];
    return rft_uuid_equal(uuid, none);
}
