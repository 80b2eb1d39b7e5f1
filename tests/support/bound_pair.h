/* bound_pair: a subscriber of this process whose engine is bound, and the publisher by hand that it
 * talks to. What fails fails the test. */
#ifndef BOUND_PAIR_H
#define BOUND_PAIR_H

#include "tests/support/bound_engine.h"
#include "tests/support/pairing.h"

/* On a device, or on the host with NULL. */
typedef struct bound_pair {
    pairing pair;
    refit_device *device; /* a faulty one */
    engine engine;
} bound_pair;

/* Closes what is open first. `device`: the engine is on one. `change` may be NULL; the
 * configuration is quick_config. */
void bound_begin_with(bound_pair *it, bool device, void (*change)(refit_config *config));
void bound_begin(bound_pair *it, bool device);
void bound_end(bound_pair *it);

/* A test begins with the pair that is its state; it is ended afterwards. */
int bound_setup(void **state);
int bound_teardown(void **state);
#define BOUND_TEST(name) TEST_ON(bound_pair *it, name, bound_setup, bound_teardown)

/* Version `index` + 1, complete, committed, and taken; built on version `base`, 0 for none. */
refit_update *bound_take(bound_pair *it, uint32_t index, uint32_t base);
void bound_apply(bound_pair *it, refit_update *update);
/* Closes it as well. */
void bound_accept(bound_pair *it, refit_update *update);
/* Version 1 is in the engine, accepted and saved. */
void bound_run_first(bound_pair *it);
/* All that from the beginning, and version 2 taken. */
refit_update *bound_take_second(bound_pair *it, bool device);

#endif
