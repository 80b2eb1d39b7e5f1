/*
 * What the tests of the controller stand on: a device that can be told to fail, one kept region
 * with hooks, and a publisher of two tensors; either half can be left out.
 */
#ifndef CYCLE_BENCH_H
#define CYCLE_BENCH_H

#include <stdbool.h>

#include <refit.h>

#include "tests/support/faulty_device.h"
#include "tests/support/test.h"
#include "tests/support/test_device.h"

#define BENCH_BYTES 50000

typedef struct cycle_bench {
    refit_device *device;
    refit_config config;
    refit_offloader *offloader;
    refit_publisher *publisher;
    refit_controller *controller;
    unsigned char *memory; /* NULL while it is given back */
    unsigned char expected[BENCH_BYTES];
    unsigned char weights[2][1024];
    int fail_release; /* calls of the hooks that are still to fail */
    int fail_acquire;
    refit_error error;
} cycle_bench;

/* `with_*`: which halves there are. */
void bench_open(cycle_bench *on, bool with_offloader, bool with_publisher);

/* The same with offload.verify, so that copies can be refused. */
void bench_open_verified(cycle_bench *on, bool with_offloader, bool with_publisher);

/* The next copy writes a half, which offload.verify finds. */
void bench_tear(cycle_bench *on);

/* The image holds what was filled in. */
void bench_check_image(cycle_bench *on);
void bench_close(cycle_bench *on);

/* The region holds what was filled in. */
void bench_check(const cycle_bench *on);

/* The verbs, on no stream. Publishes both weights. */
refit_status bench_clear(cycle_bench *on);
refit_status bench_return(cycle_bench *on);
refit_status bench_join(cycle_bench *on);

/* Calls the verb until it does not end at its deadline, which a slow machine may miss. */
refit_status bench_retry(cycle_bench *on, refit_status (*verb)(cycle_bench *on));

refit_status bench_publish(cycle_bench *on, uint64_t version);

refit_controller_state bench_state(const cycle_bench *on);
refit_stats bench_stats(cycle_bench *on);

#endif
