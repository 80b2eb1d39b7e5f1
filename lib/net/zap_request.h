/*
 * zap_request: ZeroMQ's request about a key that connects (ZAP, its RFC 27), frame by frame.
 *
 * ZeroMQ writes the frames, but what a stranger sent is in them: his key and his routing id. Knows
 * no sockets and no lists.
 */
#ifndef RFT_ZAP_REQUEST_H
#define RFT_ZAP_REQUEST_H

#include <stdbool.h>
#include <stdint.h>

#include "trust/key.h"
#include "wire/bytes.h"

#define RFT_ZAP_REQUEST_DOMAIN 32 /* room, with its end */

typedef struct rft_zap_request {
    unsigned char id[256];
    size_t id_bytes;
    char domain[RFT_ZAP_REQUEST_DOMAIN];
    char address[64];
    char mechanism[8];
    rft_key key;
    bool whole; /* seven frames of the right version, and a key in the last: CURVE */
} rft_zap_request;

/* Takes frame `at` of a request that was {0} before its first. Too long a text counts as none. */
void rft_zap_request_take(rft_zap_request *asked, uint32_t at, rft_view part);

/* There were so many. */
void rft_zap_request_end(rft_zap_request *asked, uint32_t count);

#endif
