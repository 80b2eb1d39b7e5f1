/* pairing: a real subscriber of this process and the publisher by hand that it talks to. */
#ifndef PAIRING_H
#define PAIRING_H

#include "tests/support/raw_publisher.h"

#define PAIR_EPOCH UINT64_C(41)
#define PAIR_LONG  50000u

typedef struct pairing {
    raw_publisher raw;
    refit_subscriber *subscriber;
    sample_version samples[3]; /* versions 1, 2 and 3 */
} pairing;

/* `change` may be NULL; the configuration is quick_config. */
void pair_open(pairing *pair, bool shm, void (*change)(refit_config *config));
void pair_close(pairing *pair); /* nothing, where none is open */
/* A change of the configuration, for pair_open. */
void with_verify_always(refit_config *config);
/* Closes what is open, and opens it anew. */
void pair_renew(pairing *pair, bool shm, void (*change)(refit_config *config));

/* A test opens the pairing that is its state; it is closed afterwards. */
int pair_setup(void **state);
int pair_teardown(void **state);
#define PAIR_TEST(name) TEST_ON(pairing *pair, name, pair_setup, pair_teardown)

/* The next update, or the test fails. */
refit_update *pair_next(pairing *pair);
/* Version `index` + 1 staged, committed and taken; built on `base`, which may be NULL. */
refit_update *pair_take(pairing *pair, uint32_t index, const sample_version *base);
/* The same in a slot of shared memory, which is opened for it. */
refit_update *pair_take_slot(pairing *pair, uint32_t index, rft_segment *slot);
/* Its manifest and the offer of a slot. */
void pair_offer_slot(pairing *pair, uint32_t index, const char *name, uint64_t offset);
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
