/*
 * The whole library at once, in one process: a device that can be told to fail, states in an arena
 * and of hooks, a trainer with its controller, and a worker on a thread of its own. Faults are
 * ordered elsewhere; this is what they meet, and what says afterwards whether anything was lost.
 *
 *     whole on;
 *     status = whole_open(&on, WHOLE_FRAMES, NULL);       on failure nothing is open
 *     status = whole_cycle(&on);                          goes on after a failure, tells the first
 *     whole_prove(&on);                                   all is well again, and a cycle succeeds
 *     whole_close(&on);                                   nothing torn was ever shown
 *
 * whole_open and whole_cycle assert nothing about how a call ends but that a failure is told.
 */
#ifndef WHOLE_H
#define WHOLE_H

#include <stdbool.h>

#include <refit.h>

#include "tests/support/faulty_device.h"
#include "tests/support/file_tree.h"
#include "tests/support/rollout_threads.h"
#include "tests/support/sample_version.h"
#include "tests/support/test.h"
#include "tests/support/test_device.h"

#define WHOLE_REGIONS  6
#define WHOLE_VERSIONS 64u
#define LONG_MS        60000u /* a deadline that only a hang reaches */

/* How weights reach the worker. */
typedef enum whole_path {
    WHOLE_FRAMES, /* over TCP */
    WHOLE_SHM,    /* in shared memory, messages over a socket file */
} whole_path;

typedef struct whole_region {
    void *memory; /* NULL while the hooks have given it back */
    unsigned char *expected;
} whole_region;

typedef struct whole {
    refit_config config;
    refit_device *device;
    refit_stream_ref stream;
    refit_arena *arena;
    refit_offloader *offloader;
    refit_publisher *publisher;
    refit_controller *controller;
    rollout_thread worker; /* `worker.subscriber` NULL: not open */
    whole_region regions[WHOLE_REGIONS];
    unsigned char *weights; /* on the device */
    unsigned char *expected_weights;
    uint64_t digests[WHOLE_VERSIONS + 1]; /* of what was published as this version */
    uint64_t version;                     /* the last one that was tried */
    uint64_t random;
    file_tree folder;          /* of the socket */
    const faulty_order *order; /* of the device, the first time it is opened; NULL: none */
    bool order_met;            /* known once the device is closed */
    uint32_t fail_release;     /* calls of the hooks until one fails; 0: none does */
    uint32_t fail_acquire;
    refit_error error; /* of the call that failed last */
} whole;

/* Settings for whole_open: deadlines that only a hang reaches, where nothing is to be lost; so are
 * those of a device with an order. Without them they are short, for faults that cost a message:
 * such a cycle may fail as well because the machine held the process up, and is tried again. */
extern const char *const whole_patient[];

/* Of each region. */
extern const uint64_t whole_region_bytes[WHOLE_REGIONS];
extern const refit_policy whole_policies[WHOLE_REGIONS];

/* Where a tensor lies in the device's memory of weights; for SAMPLE_TENSORS, its size. */
uint64_t whole_weight_offset(uint32_t tensor);

/* Opens all. `settings`: "key", "value", … ended by NULL; may itself be NULL. */
refit_status whole_open(whole *on, whole_path path, const char *const *settings);

/* Opens all on a device with an order, which must stay. */
refit_status whole_open_ordered(whole *on, whole_path path, const char *const *settings,
                                const faulty_order *order);

/* Whether the device has met its order. */
bool whole_order_met(const whole *on);

/* Closes whatever is open; a close that fails is told why, and succeeds when it is asked again.
 * Fails the test where the worker was shown other bytes than were published. */
void whole_close(whole *on);

/* New bytes for states and weights, on the device. */
refit_status whole_step(whole *on);

/* Publishes the weights as the next version. */
refit_status whole_publish(whole *on);

/* One whole refit: step, clear, read the image under a read lock, publish, return, join. A phase
 * that fails does not keep the next ones from being tried; gives the first failure. */
refit_status whole_cycle(whole *on);

/* Brings the states home, whatever failed before, and checks them; then a cycle succeeds, as soon
 * as the worker is back, and the worker is shown it. */
void whole_prove(whole *on);

/* A failure has a name and a sentence. */
void whole_check_told(refit_status status, const refit_error *error);

/* Keeps in mind what the test is doing, so that its teardown, whole_tell, can print it where the
 * test fails; NULL: nothing any more. */
void whole_say(const char *what, uint64_t nth);
int whole_tell(void **state);

#define whole_test(function) TEST_WITH(function, NULL, whole_tell)

#endif
