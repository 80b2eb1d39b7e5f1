/*
 * zap: which keys may connect to one publisher: its allow list under a ZAP domain of its own, and
 * the ZAP handler of the process, which answers ZeroMQ's request about each key that connects.
 *
 * A removed key is refused within 10 ms; its workers are evicted within 250 ms, as soon as the
 * folder was read. A new key is admitted after 50 ms. The time of one look, which grows with the
 * number of files, is added to each of these. A file that cannot be read for now keeps the key that
 * it had, until it is gone (allow_list.h).
 */
#ifndef RFT_ZAP_H
#define RFT_ZAP_H

#include <stdbool.h>
#include <stdint.h>

#include "trust/allow_list.h"
#include "wire/bytes.h"

/* The domain of publishers without keys: the handler, if there is one, admits all of its requests.
 */
#define RFT_ZAP_OPEN "refit-open"

typedef struct rft_zap rft_zap;

/* Reads the folder, and starts the handler with the first domain of the process. `context` must
 * outlive it. REFIT_ERR_BUSY: another part of the process answers ZAP requests. What
 * rft_allow_list_open answers. */
refit_status rft_zap_open(void *context, const char *folder, rft_zap **out, refit_error *error);
/* No key is admitted any more. Waits for the handler's step that is under way. */
void rft_zap_close(rft_zap *zap);

/* The ZAP domain to set at the socket. Borrowed. */
const char *rft_zap_domain(const rft_zap *zap);

/* Borrowed. The handler refreshes it, several times a second. */
rft_allow_list *rft_zap_list(const rft_zap *zap);

/* This wake descriptor (-1: none) is set whenever the list has another edition. */
void rft_zap_set_wake(rft_zap *zap, int wake);

#define RFT_ZAP_DOMAIN_BYTES 32 /* with the end */

/* ZeroMQ's request about a key that connects, frame by frame. ZeroMQ writes the frames, but the key
 * and the routing id in them are what the peer sent. */
typedef struct rft_zap_request {
    unsigned char id[256];
    size_t id_bytes;
    char domain[RFT_ZAP_DOMAIN_BYTES];
    char address[64];
    char mechanism[8];
    rft_key key;
    bool whole; /* seven frames of the right version, and a key in the last: CURVE */
} rft_zap_request;

/* Takes frame `at` of a request that was {0} before its first. A text that is too long counts as
 * empty. */
void rft_zap_request_take(rft_zap_request *asked, uint32_t at, rft_view part);
/* The request had `count` frames. */
void rft_zap_request_end(rft_zap_request *asked, uint32_t count);

#endif
