/* What the tests of offloading share: settings, figures, and both ways of the states. */
#ifndef OFFLOAD_OFFLOAD_H
#define OFFLOAD_OFFLOAD_H

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>

#include <cmocka.h>

#include <refit.h>

#include "tests/support/faulty_device.h"
#include "tests/support/seeded.h"
#include "tests/support/test_device.h"

#define PATIENCE_MS 20000u /* a deadline that only a hang reaches */

#define assert_ok(call) assert_int_equal((call), REFIT_OK)

#define LENGTH(array) (sizeof(array) / sizeof *(array))

/* The error's text has these words. */
#define assert_told(error, words) assert_non_null(strstr((error).text, (words)))

/* `settings`: "key=value" strings, ended by NULL; may itself be NULL. */
void set_each(refit_config *config, const char *const *settings);

refit_stats stats_of(refit_offloader *offloader);
refit_region_info region_of(refit_offloader *offloader, refit_region_id region);
uint64_t used_bytes(refit_device *device);

/* Starts it, and waits for its end. */
refit_status offload_all(refit_offloader *offloader, refit_error *error);
refit_status restore_all(refit_offloader *offloader, refit_error *error);

/* A test of a scene that set_up opens as the test's row in the list of them says. */
#define TEST(name, ...)                                                                            \
    {                                                                                              \
#name, name, set_up, tear_down, &(opening)                                                 \
        {                                                                                          \
            __VA_ARGS__                                                                            \
        }                                                                                          \
    }

#endif
