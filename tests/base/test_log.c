/* The log hook: silent without a function, levels are obeyed, long lines are cut. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "base/log.h"

typedef struct heard {
    int lines;
    refit_log_level level;
    char last[1024];
} heard;

static void hear(void *user, refit_log_level level, const char *line)
{
    heard *it = user;
    it->lines++;
    it->level = level;
    strncpy(it->last, line, sizeof it->last - 1);
}

static void only_wanted_levels_are_heard(void **state)
{
    (void)state;
    heard it = {0};
    refit_set_log(hear, &it, REFIT_LOG_WARNING);
    rft_log(REFIT_LOG_INFO, "not this");
    assert_int_equal(it.lines, 0);
    rft_log(REFIT_LOG_WARNING, "worker %d is slow", 3);
    assert_int_equal(it.lines, 1);
    assert_int_equal(it.level, REFIT_LOG_WARNING);
    assert_string_equal(it.last, "worker 3 is slow");
    refit_set_log(NULL, NULL, REFIT_LOG_DEBUG);
}

static void nobody_hears_after_the_function_is_taken_away(void **state)
{
    (void)state;
    heard it = {0};
    refit_set_log(hear, &it, REFIT_LOG_DEBUG);
    refit_set_log(NULL, NULL, REFIT_LOG_DEBUG);
    rft_log(REFIT_LOG_ERROR, "into the void");
    assert_int_equal(it.lines, 0);
}

static void a_long_line_is_cut(void **state)
{
    (void)state;
    heard it = {0};
    char longer[1000];
    memset(longer, 'y', sizeof longer - 1);
    longer[sizeof longer - 1] = '\0';
    refit_set_log(hear, &it, REFIT_LOG_DEBUG);
    rft_log(REFIT_LOG_ERROR, "%s", longer);
    refit_set_log(NULL, NULL, REFIT_LOG_DEBUG);
    assert_int_equal(strlen(it.last), 399);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(only_wanted_levels_are_heard),
        cmocka_unit_test(nobody_hears_after_the_function_is_taken_away),
        cmocka_unit_test(a_long_line_is_cut),
    };
    return cmocka_run_group_tests_name("log", tests, NULL, NULL);
}
