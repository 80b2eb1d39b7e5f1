#include "tests/support/test.h"

#include <sys/wait.h>

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
    *count = listed;
    return tests;
}

int test_run_within(const char *group, CMFixtureFunction begin, CMFixtureFunction end)
{
    return _cmocka_run_group_tests(group, tests, listed, begin, end);
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
