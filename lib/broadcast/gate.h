/*
 * gate: who may come in to one publisher: its allow list under a domain of its own, and the
 * doorkeeper of the process, which answers ZeroMQ's question about each key that connects.
 *
 * A key whose file was taken from the folder comes in no more after 10 ms; who has come in by it is
 * turned out within a quarter of a second, as soon as the folder was looked at. A new file lets in
 * after 50 ms. The time of one look, which grows with the number of files, comes to each of these.
 * A file that cannot be read for now keeps the key that it had, until it is gone (allow_list.h).
 */
#ifndef RFT_GATE_H
#define RFT_GATE_H

#include "trust/allow_list.h"

/* The domain of publishers without keys: the doorkeeper, if there is one, lets in all who ask. */
#define RFT_GATE_OPEN "refit-open"

typedef struct rft_gate rft_gate;

/* Reads the folder, and starts the doorkeeper with the first gate of the process. `context` must
 * outlive the gate. REFIT_ERR_BUSY: another part of the process answers ZeroMQ's questions. What
 * rft_allow_list_open answers. */
refit_status rft_gate_open(void *context, const char *folder, rft_gate **out, refit_error *error);
/* Nobody comes in any more. Waits for the doorkeeper's step that is under way. */
void rft_gate_close(rft_gate *gate);

/* What a socket's questions go by. Borrowed. */
const char *rft_gate_domain(const rft_gate *gate);

/* Borrowed. The doorkeeper refreshes it, several times a second. */
rft_allow_list *rft_gate_list(const rft_gate *gate);

/* This waker (of waker.h; -1: none) is set whenever the list has another edition. */
void rft_gate_set_waker(rft_gate *gate, int waker);

#endif
