/*
 * A test of the CUDA device on the fake driver: before it the driver is as new, after it nothing
 * may be left open there, none of its rules broken, and the thread's context and capture mode as
 * they were.
 */
#ifndef CUDA_CASE_H
#define CUDA_CASE_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "device/device.h"
#include "fake_cuda.h"

#define MIB         (UINT64_C(1) << 20)
#define PATIENCE_MS 20000u

#define assert_ok(call)           assert_int_equal((call), REFIT_OK)
#define assert_says(error, words) assert_non_null(strstr((error)->text, (words)))

int cuda_case_begin(void **state);
int cuda_case_end(void **state);

#define cuda_case(test) cmocka_unit_test_setup_teardown(test, cuda_case_begin, cuda_case_end)

/* "cuda:0", with a deadline that only a hang reaches. It succeeds. */
refit_device *cuda_open(void);
void cuda_close(refit_device *device);

/* The call is refused with the status, and the sentence has the words. */
#define assert_refused(call, expected, words)                                                      \
    do {                                                                                           \
        refit_error refused = {0};                                                                 \
        refit_error *error = &refused;                                                             \
        assert_int_equal((call), (expected));                                                      \
        assert_int_equal(refused.status, (expected));                                              \
        assert_says(&refused, (words));                                                            \
    } while (0)

#endif
