/*
 * gate: who may come in to one publisher: its allow list under a domain of its own, and the
 * doorkeeper of the process, which answers ZeroMQ's question about each key that connects.
 *
 * A key whose file was taken from the folder comes in no more after 10 ms; who has come in by it is
 * turned out within a quarter of a second, as soon as the folder was looked at. A new file lets in
 * after 50 ms. The time of one look, which grows with the number of files, comes to each of these.
 * A file that cannot be read for now keeps the key that it had, until it is gone (allow_list.h).
 */
#ifndef RFT_ZAP_H
#define RFT_ZAP_H

#include "trust/allow_list.h"

/* The domain of publishers without keys: the doorkeeper, if there is one, lets in all who ask. */
#define RFT_ZAP_OPEN "refit-open"

typedef struct rft_zap rft_zap;

/* Reads the folder, and starts the doorkeeper with the first gate of the process. `context` must
 * outlive the gate. REFIT_ERR_BUSY: another part of the process answers ZeroMQ's questions. What
 * rft_allow_list_open answers. */
refit_status rft_zap_open(void *context, const char *folder, rft_zap **out, refit_error *error);
/* Nobody comes in any more. Waits for the doorkeeper's step that is under way. */
void rft_zap_close(rft_zap *gate);

/* What a socket's questions go by. Borrowed. */
const char *rft_zap_domain(const rft_zap *gate);

/* Borrowed. The doorkeeper refreshes it, several times a second. */
rft_allow_list *rft_zap_list(const rft_zap *gate);

/* This waker (of waker.h; -1: none) is set whenever the list has another edition. */
void rft_zap_set_waker(rft_zap *gate, int wake);

#endif
