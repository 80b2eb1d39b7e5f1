/*
 * A share as bytes and back. Field by field: the struct's own layout is nobody's business on the
 * wire.
 */
#include "wire/share.h"

#include <string.h>

_Static_assert(RFT_SHARE_BYTES == RFT_UUID_BYTES + sizeof(((rft_share *)NULL)->handle) + 3 * 8,
               "every field of a share travels");

void rft_share_write(const rft_share *share, unsigned char bytes[RFT_SHARE_BYTES])
{
    unsigned char *at = bytes;
    memcpy(at, share->uuid, sizeof share->uuid);
    at += sizeof share->uuid;
    memcpy(at, share->handle, sizeof share->handle);
    at += sizeof share->handle;
    rft_put_u64(at, share->offset);
    rft_put_u64(at + 8, share->bytes);
    rft_put_u64(at + 16, share->address);
}

refit_status rft_share_read(rft_view bytes, rft_share *out, refit_error *error)
{
    RFT_REFUSE_IF(bytes.count != RFT_SHARE_BYTES, error, REFIT_ERR_PROTOCOL,
                  "a share of %zu bytes instead of %u", bytes.count, RFT_SHARE_BYTES);
    const unsigned char *at = bytes.data;
    memcpy(out->uuid, at, sizeof out->uuid);
    at += sizeof out->uuid;
    memcpy(out->handle, at, sizeof out->handle);
    at += sizeof out->handle;
    out->offset = rft_get_u64(at);
    out->bytes = rft_get_u64(at + 8);
    out->address = rft_get_u64(at + 16);
    return REFIT_OK;
}
