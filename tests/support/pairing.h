/* pairing: a real subscriber of this process and the publisher by hand that it talks to. */
#ifndef PAIRING_H
#define PAIRING_H

#include "tests/support/raw_publisher.h"

#define PAIR_EPOCH UINT64_C(41)
#define PAIR_LONG  20000u

typedef struct pairing {
    raw_publisher raw;
    refit_subscriber *subscriber;
    sample_version samples[3]; /* versions 1, 2 and 3 */
} pairing;

/* `change` may be NULL; the configuration is quick_config. */
void pair_open(pairing *pair, bool shm, void (*change)(refit_config *config));
void pair_close(pairing *pair);

/* The next update, or the test fails. */
refit_update *pair_next(pairing *pair);
void assert_update_is(const refit_update *update, const sample_version *sample);
/* Waits until the subscriber reports what it has told the publisher. It reports at the end of each
 * pass, and sends at most one BEAT in a pass without a decision of the user: two of them are of
 * different passes. */
void pair_await_report(pairing *pair);
refit_subscriber_info pair_describe(pairing *pair);
/* The result of poll on the subscriber's descriptor. */
int pair_readable(pairing *pair, int timeout_ms);
/* Version `index` + 1 staged, committed, taken, accepted and closed. */
void pair_apply(pairing *pair, uint32_t index, const sample_version *base);

#endif
