#include "tests/support/test.h"

#include <fnmatch.h>
#include <sys/wait.h>
#include <unistd.h>

#define MOST 100u

static struct CMUnitTest tests[MOST];
static size_t listed;

void test_list(struct CMUnitTest test)
{
    assert_true(listed < MOST);
    tests[listed++] = test;
}

const struct CMUnitTest *test_listed(size_t *count)
{
    assert_true(listed > 0);
    *count = listed;
    return tests;
}

void test_filter(const char *pattern)
{
    size_t matching = 0;
    for (size_t at = 0; at < listed; at++)
        matching += fnmatch(pattern, tests[at].name, 0) == 0;
    assert_true(matching > 0);
    cmocka_set_test_filter(pattern);
}

int test_run_within(const char *group, CMFixtureFunction setup, CMFixtureFunction teardown)
{
    assert_true(listed > 0);
    return _cmocka_run_group_tests(group, tests, listed, setup, teardown);
}

int test_run(const char *group)
{
    return test_run_within(group, NULL, NULL);
}

void assert_child_succeeds(int child)
{
    int status = -1;
    assert_true(child > 0);
    assert_int_equal(waitpid(child, &status, 0), child);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) fail_msg("the child: 0x%x", status);
}

_Noreturn void child_waits(void)
{
    (void)alarm(120);
    for (;;)
        (void)pause();
}
