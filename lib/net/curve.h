/*
 * curve: ZeroMQ's CURVE, which encrypts a connection and shows each end the other's key. Key files
 * become options of a socket here.
 */
#ifndef RFT_CURVE_H
#define RFT_CURVE_H

#include <refit/config.h>

#include "base/error.h"
#include "trust/key.h"

/* A new pair. REFIT_ERR_UNSUPPORTED: ZeroMQ was built without CURVE. REFIT_ERR_SYSTEM. */
refit_status rft_curve_make_pair(rft_key *public_key, rft_key *secret_key, refit_error *error);

/* Gives a socket that will bind its secret key. A peer that connects then shows a key of its own,
 * and the ZAP handler is asked about that key under this domain; where no handler answers, no peer
 * comes in.
 * REFIT_ERR_UNSUPPORTED, and what rft_key_file_read answers. */
refit_status rft_curve_serve(void *socket, const refit_config *config, const char *domain,
                             refit_error *error);

/* Gives a socket that will connect its own pair and the only key that it talks to. The same errors.
 */
refit_status rft_curve_join(void *socket, const refit_config *config, refit_error *error);

#endif
