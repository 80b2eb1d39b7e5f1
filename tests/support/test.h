/*
 * What a test program includes first of all: cmocka with what it needs, and the words that tests
 * share.
 *
 *     TEST(a_door_that_is_open_can_be_closed)
 *     {
 *         assert_ok(door_close(&door));
 *     }
 *
 *     int main(void)
 *     {
 *         return test_run("door");
 *     }
 *
 * Tests are listed as they stand in the file and run in that order.
 */
#ifndef TEST_H
#define TEST_H

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include <refit/status.h>

#pragma GCC diagnostic ignored "-Wunused-parameter"

#define TEST(name) TEST_WITH(name, NULL, NULL)

/* With a setup and a teardown; `state` is cmocka's. */
#define TEST_WITH(name, setup, teardown)                                                           \
    static void name(void **state);                                                                \
    TEST_LIST(name, #name, name, setup, teardown, NULL)                                            \
    static void name(void **state)

/* The test gets what its setup stored in *state: TEST_ON(door *it, closes, open_door, free_door) */
#define TEST_ON(what, name, setup, teardown)                                                       \
    static void name(what);                                                                        \
    static void run_##name(void **state)                                                           \
    {                                                                                              \
        name(*state);                                                                              \
    }                                                                                              \
    TEST_LIST(name, #name, run_##name, setup, teardown, NULL)                                      \
    static void name(what)

/* Lists the test of these members of CMUnitTest; `as` must be unique in the file. */
#define TEST_LIST(as, ...)                                                                         \
    __attribute__((constructor)) static void list_##as(void)                                       \
    {                                                                                              \
        test_list((struct CMUnitTest){__VA_ARGS__});                                               \
    }

void test_list(struct CMUnitTest test);
/* The process fails if none is listed, or none matches. */
const struct CMUnitTest *test_listed(size_t *count);
void test_filter(const char *pattern);

/* Runs all that are listed; `setup` before the first of them and `teardown` after the last. */
int test_run(const char *group);
int test_run_within(const char *group, CMFixtureFunction setup, CMFixtureFunction teardown);

/* Waits for a child of fork, which must exit with 0. */
void assert_child_succeeds(int child);
/* A child waits to be killed. In case its killer is gone it ends by itself after two minutes: as
 * long as it has the test's output, the test does not end. */
_Noreturn void child_waits(void);

#define KIB (UINT64_C(1) << 10)
#define MIB (UINT64_C(1) << 20)
#define GIB (UINT64_C(1) << 30)

#define TIMEOUT_MS 20000u /* a deadline that only a hang reaches */

#define COUNT_OF(array) (sizeof(array) / sizeof *(array))

/* cmocka's version compares byte by byte, which is slow for equal megabytes. */
#undef assert_memory_equal
#define assert_memory_equal(a, b, size)                                                            \
    ((void)(memcmp((a), (b), (size)) == 0 ||                                                       \
            (_assert_memory_equal((const char *)(a), (const char *)(b), (size), __FILE__,          \
                                  __LINE__),                                                       \
             0)))

#define assert_ok(call)      assert_int_equal((call), REFIT_OK)
#define assert_invalid(call) assert_int_equal((call), REFIT_ERR_INVALID)
#define assert_says(error, words)                                                                  \
    do {                                                                                           \
        if (strstr((error)->text, (words)) == NULL)                                                \
            fail_msg("\"%s\" lacks \"%s\"", (error)->text, (words));                               \
    } while (0)

/* The call, which is given `error`, succeeds; if it does not, the test fails with its sentence. */
#define assert_done(call)                                                                          \
    do {                                                                                           \
        refit_error failure = {0}, *error = &failure;                                              \
        if ((call) != REFIT_OK) fail_msg("%s", error->text);                                       \
    } while (0)

/* The call, which is given `error`, is refused with the status, and the sentence has the words. */
#define assert_refused(call, expected, words)                                                      \
    do {                                                                                           \
        refit_error refused = {0}, *error = &refused;                                              \
        assert_int_equal((call), (expected));                                                      \
        assert_int_equal(refused.status, (expected));                                              \
        assert_says(error, (words));                                                               \
    } while (0)

#endif
