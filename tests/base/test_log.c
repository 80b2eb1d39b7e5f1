/* The log: one line at a time, to the function that is installed, from its level on; else silence.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include <semaphore.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/log.h"
#include "base/thread.h"

typedef struct heard {
    unsigned lines;
    refit_log_level level;
    char last[1024];
} heard;

static void hear(void *user, refit_log_level level, const char *line)
{
    heard *all = user;
    all->lines++;
    all->level = level;
    assert_true(strlen(line) < sizeof all->last);
    strcpy(all->last, line);
}

static int fall_silent(void **state)
{
    (void)state;
    refit_set_log(NULL, NULL, REFIT_LOG_DEBUG);
    return 0;
}

static void nobody_listens_at_first(void **state)
{
    (void)state;
    rft_log(REFIT_LOG_ERROR, "said to nobody");
}

static void lines_up_to_the_level_are_heard(void **state)
{
    (void)state;
    heard all = {0};
    refit_set_log(hear, &all, REFIT_LOG_WARNING);
    rft_log(REFIT_LOG_INFO, "too quiet");
    rft_log(REFIT_LOG_DEBUG, "too quiet");
    assert_int_equal(all.lines, 0);
    rft_log(REFIT_LOG_WARNING, "%d of %s", 3, "four");
    assert_int_equal(all.lines, 1);
    assert_int_equal(all.level, REFIT_LOG_WARNING);
    assert_string_equal(all.last, "3 of four");
    rft_log(REFIT_LOG_ERROR, "worse");
    assert_int_equal(all.lines, 2);
}

static void the_function_before_hears_no_more(void **state)
{
    (void)state;
    heard before = {0};
    heard now = {0};
    refit_set_log(hear, &before, REFIT_LOG_INFO);
    refit_set_log(hear, &now, REFIT_LOG_INFO);
    rft_log(REFIT_LOG_INFO, "to one");
    refit_set_log(NULL, NULL, REFIT_LOG_DEBUG);
    rft_log(REFIT_LOG_ERROR, "to nobody");
    assert_int_equal(before.lines, 0);
    assert_int_equal(now.lines, 1);
}

static void a_line_is_one_line_of_bounded_length(void **state)
{
    (void)state;
    heard all = {0};
    char longer[1000];
    memset(longer, 'x', sizeof longer - 1);
    longer[sizeof longer - 1] = '\0';
    refit_set_log(hear, &all, REFIT_LOG_INFO);
    rft_log(REFIT_LOG_INFO, "worker %s", "a\nERROR forged\x1b[31m");
    assert_string_equal(all.last, "worker a?ERROR forged?[31m");
    rft_log(REFIT_LOG_INFO, "%s", longer);
    assert_int_equal(strlen(all.last), 399);
}

/* ---- A fork while another thread speaks */

static sem_t speaks, may_end;

static void hold(void *user, refit_log_level level, const char *line)
{
    (void)user, (void)level, (void)line;
    (void)sem_post(&speaks);
    (void)sem_wait(&may_end);
}

static void *speak(void *user)
{
    rft_log(REFIT_LOG_ERROR, "long");
    return user;
}

/* What waits for ever is killed by the alarm. */
static _Noreturn void listen_anew(void)
{
    heard all = {0};
    (void)alarm(20);
    refit_set_log(hear, &all, REFIT_LOG_INFO);
    rft_log(REFIT_LOG_INFO, "heard");
    _exit(all.lines == 1 ? 0 : 1);
}

static void a_child_can_log_whatever_its_parent_was_saying(void **state)
{
    (void)state;
    rft_thread thread;
    int status = -1;
    assert_int_equal(sem_init(&speaks, 0, 0), 0);
    assert_int_equal(sem_init(&may_end, 0, 0), 0);
    refit_set_log(hold, NULL, REFIT_LOG_INFO);
    assert_int_equal(rft_thread_start(&thread, "speaks", speak, NULL, NULL), REFIT_OK);
    assert_int_equal(sem_wait(&speaks), 0);
    pid_t child = fork();
    if (child == 0) listen_anew();
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(sem_post(&may_end), 0);
    rft_thread_join(thread);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(nobody_listens_at_first),
        cmocka_unit_test_teardown(lines_up_to_the_level_are_heard, fall_silent),
        cmocka_unit_test_teardown(the_function_before_hears_no_more, fall_silent),
        cmocka_unit_test_teardown(a_line_is_one_line_of_bounded_length, fall_silent),
        cmocka_unit_test_teardown(a_child_can_log_whatever_its_parent_was_saying, fall_silent),
    };
    return cmocka_run_group_tests_name("log", tests, NULL, NULL);
}
