/*
 * A test of the CUDA device on the fake driver: before it the driver is as new, after it nothing
 * may be left open there, none of its rules broken, and the thread's context and capture mode as
 * they were.
 */
#ifndef CUDA_CASE_H
#define CUDA_CASE_H

#include "device/device.h"
#include "fake_cuda.h"
#include "tests/support/test.h"

int cuda_case_begin(void **state);
int cuda_case_end(void **state);

#define cuda_case(test) cmocka_unit_test_setup_teardown(test, cuda_case_begin, cuda_case_end)

/* "cuda:0", with a deadline that only a hang reaches. It succeeds. */
refit_device *cuda_open(void);
void cuda_close(refit_device *device);

#endif
