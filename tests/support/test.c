#include "tests/support/test.h"

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

int test_run(const char *group)
{
    return _cmocka_run_group_tests(group, tests, listed, NULL, NULL);
}
