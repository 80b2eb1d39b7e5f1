/*
 * share: memory of a GPU as OFFER names it (rft_share), in bytes.
 *
 * Always RFT_SHARE_BYTES of them: UUID, handle, then offset, bytes and address, 8 bytes each,
 * little-endian. Any bytes of that length can be read; what they promise is checked by whoever maps
 * them.
 */
#ifndef RFT_WIRE_SHARE_H
#define RFT_WIRE_SHARE_H

#include "device/device.h"
#include "wire/bytes.h"

#define RFT_SHARE_BYTES 104u

void rft_share_write(const rft_share *share, unsigned char bytes[RFT_SHARE_BYTES]);

/* REFIT_ERR_PROTOCOL: another length. */
refit_status rft_share_read(rft_view bytes, rft_share *out, refit_error *error);

#endif
