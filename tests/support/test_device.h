/*
 * The device that a test program runs on, and its memory, which only copies may touch.
 *
 * REFIT_TEST_CUDA says which device: unset, the host device; "fake", the CUDA device on the fake
 * driver, which must be the libcuda.so.1 that is found first, and must find nothing to complain of;
 * "real", the CUDA device on GPU 0.
 */
#ifndef TEST_DEVICE_H
#define TEST_DEVICE_H

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>

#include <cmocka.h>

#include "device/device.h"

/* Is it a GPU, or what looks like one? */
bool test_on_cuda(void);
bool test_on_real_gpu(void);

/* The spec of the device that stands for `host`, such as "host" or "host:capacity=64MiB"; valid
 * until the next call. */
const char *test_device_spec(const char *host);

/* Opens it. */
refit_status test_device_open(const char *host, refit_device **out, refit_error *error);

/* Whether the fake driver, if it is the one in use, has seen no rule broken since it was asked
 * last, and is not in use where the real one is meant. Prints what is wrong. */
bool test_device_quiet(void);

/* How many objects of this process the fake driver still has; 0 with another driver. */
unsigned test_device_left(void);

/* Device memory, which no queued work may use meanwhile. */
void test_write(refit_device *device, void *memory, const void *bytes, uint64_t count);
void test_read(refit_device *device, void *bytes, const void *memory, uint64_t count);
void test_fill(refit_device *device, void *memory, int value, uint64_t count);

/* Host memory for copies that queued work holds up: a device that needs it gets it page-locked,
 * since it copies other memory while the caller waits. */
void *test_host_alloc(refit_device *device, uint64_t count);
void test_host_free(refit_device *device, void *memory, uint64_t count);

/* The number of leading bytes that equal those of `bytes`. */
uint64_t test_alike(refit_device *device, const void *memory, const void *bytes, uint64_t count);

#define assert_device_equal(device, memory, bytes, count)                                          \
    assert_int_equal(test_alike((device), (memory), (bytes), (count)), (count))

#endif
