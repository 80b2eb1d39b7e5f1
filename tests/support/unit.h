/* What a test includes: cmocka, with the headers that it needs before it, and shorthands. */
#ifndef UNIT_H
#define UNIT_H

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <refit/status.h>

/* cmocka gives each test its state, which most do not need. */
#pragma GCC diagnostic ignored "-Wunused-parameter"

#define assert_ok(call) assert_int_equal((call), REFIT_OK)
#define COUNT_OF(array) (sizeof(array) / sizeof(array)[0])

#endif
