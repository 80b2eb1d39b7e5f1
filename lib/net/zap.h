/*
 * zap: which keys may connect to one publisher: its allow list under a ZAP domain of its own, and
 * the ZAP handler of the process, which answers ZeroMQ's request about each key that connects.
 *
 * A removed key is refused within 10 ms; its workers are evicted within 250 ms, as soon as the
 * folder was read. A new file lets in after 50 ms. The time of one look, which grows with the
 * number of files, comes to each of these. A file that cannot be read for now keeps the key that it
 * had, until it is gone (allow_list.h).
 */
#ifndef RFT_ZAP_H
#define RFT_ZAP_H

#include "trust/allow_list.h"

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

/* This wake descriptor (wake_fd.h; -1: none) is set whenever the list has another edition. */
void rft_zap_set_wake(rft_zap *zap, int wake);

#endif
