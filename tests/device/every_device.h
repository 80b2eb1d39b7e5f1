/*
 * The conformance suite's frame: the same tests on every device there is, and again on the faulty
 * device, which must add nothing as long as nothing is ordered.
 *
 * Which devices, tests/support/test_device.h says. The fake driver must find nothing to complain
 * of.
 *
 * A test gets a device with a capacity of DEVICE_BYTES and one open stream. A test program calls
 * run_on_every_device.
 */
#ifndef EVERY_DEVICE_H
#define EVERY_DEVICE_H

#include "device/device.h"
#include "tests/support/test.h"

#define DEVICE_BYTES (UINT64_C(64) << 20)

typedef struct fixture {
    refit_device *device;
    refit_stream_ref stream;
    refit_error error;
    unsigned depth; /* so much work may be queued after a gate before a call blocks */
    bool strict;    /* like the host device it knows each of its handles, refuses what its queue
                       cannot hold, and keeps a failure of queued work to its stream; a GPU leaves
                       the first undefined, blocks, and is lost */
} fixture;

extern fixture on; /* the device of the test that runs */

int run_on_every_device(const char *name);

/* Work on a stream that stands until the gate is opened. There is one at a time. Skips the test on
 * a device that cannot call back. */
void gate_put(refit_stream_ref stream);
void gate_open(void);

/* Until the work on the device's own stream is over. */
void wait_stream(void);

rft_event *open_event(void);
void *device_alloc(uint64_t bytes);
void device_free(void *memory);

/* Host memory for copies that a gate holds up: a device that needs it gets it page-locked, since it
 * copies other memory while the caller waits. */
void *steady_alloc(uint64_t bytes);
void steady_free(void *memory, uint64_t bytes);

/* Bytes that are different at every place and for every seed, and how far they are right. */
void pattern_fill(void *memory, uint64_t bytes, unsigned seed);
uint64_t pattern_right(const void *memory, uint64_t bytes, unsigned seed);

/* Through the device, so that it need not be addressable: fill device memory, and count the bytes
 * of the pattern that it holds. */
void device_fill(void *memory, uint64_t bytes, unsigned seed);
uint64_t device_right(const void *memory, uint64_t bytes, unsigned seed);

uint64_t device_used(void);

#endif
