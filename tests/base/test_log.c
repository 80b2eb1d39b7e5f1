/* The log: one line at a time, to the function that is installed and to the rings that are open,
 * from their levels on; else silence. */
#include <semaphore.h>
#include <unistd.h>

#include "base/log.h"
#include "base/text.h"
#include "base/thread.h"
#include "tests/support/failing_alloc.h"
#include "tests/support/test.h"

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
    refit_set_log(NULL, NULL, REFIT_LOG_DEBUG);
    return 0;
}

TEST(a_line_without_a_listener_is_dropped)
{
    rft_log(REFIT_LOG_ERROR, "without a ring");
}

TEST_WITH(lines_up_to_the_level_are_heard, NULL, fall_silent)
{
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

TEST_WITH(the_function_before_hears_no_more, NULL, fall_silent)
{
    heard before = {0};
    heard now = {0};
    refit_set_log(hear, &before, REFIT_LOG_INFO);
    refit_set_log(hear, &now, REFIT_LOG_INFO);
    rft_log(REFIT_LOG_INFO, "to one");
    refit_set_log(NULL, NULL, REFIT_LOG_DEBUG);
    rft_log(REFIT_LOG_ERROR, "to none");
    assert_int_equal(before.lines, 0);
    assert_int_equal(now.lines, 1);
}

TEST_WITH(a_line_is_one_line_of_bounded_length, NULL, fall_silent)
{
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

/* The alarm ends a child that waits without end. */
static _Noreturn void listen_again(void)
{
    heard all = {0};
    (void)alarm(20);
    refit_set_log(hear, &all, REFIT_LOG_INFO);
    rft_log(REFIT_LOG_INFO, "heard");
    _exit(all.lines == 1 ? 0 : 1);
}

TEST_WITH(a_child_can_log_whatever_its_parent_was_saying, NULL, fall_silent)
{
    rft_thread thread;
    assert_int_equal(sem_init(&speaks, 0, 0), 0);
    assert_int_equal(sem_init(&may_end, 0, 0), 0);
    refit_set_log(hold, NULL, REFIT_LOG_INFO);
    assert_ok(rft_thread_start(&thread, "speaks", speak, NULL, NULL));
    assert_int_equal(sem_wait(&speaks), 0);
    pid_t child = fork();
    if (child == 0) listen_again();
    assert_child_succeeds(child);
    assert_int_equal(sem_post(&may_end), 0);
    rft_thread_join(thread);
}

/* ---- Rings */

static refit_log_ring *open_ring(uint32_t lines, refit_log_level most)
{
    refit_log_ring *ring = NULL;
    assert_ok(refit_log_ring_open(lines, most, &ring, NULL));
    return ring;
}

static void assert_next(refit_log_ring *ring, refit_log_level level, const char *text)
{
    char line[400];
    refit_log_level found = REFIT_LOG_DEBUG;
    assert_ok(refit_log_ring_read(ring, &found, line, sizeof line, NULL));
    assert_int_equal(found, level);
    assert_string_equal(line, text);
}

static void assert_empty(refit_log_ring *ring)
{
    char line[400];
    refit_log_level level;
    assert_int_equal(refit_log_ring_read(ring, &level, line, sizeof line, NULL),
                     REFIT_ERR_NOT_FOUND);
}

TEST(a_ring_keeps_lines_until_they_are_read)
{
    refit_log_ring *ring = open_ring(3, REFIT_LOG_INFO);
    const uint64_t *count = refit_log_ring_count(ring);
    for (int turn = 0; turn < 3; turn++) { /* round its end, too */
        uint64_t before = *count;
        rft_log(REFIT_LOG_DEBUG, "too quiet");
        assert_int_equal(*count, before);
        rft_log(REFIT_LOG_INFO, "turn %d", turn);
        rft_log(REFIT_LOG_ERROR, "worse");
        assert_int_equal(*count, before + 2);
        assert_next(ring, REFIT_LOG_INFO, (const char *[]){"turn 0", "turn 1", "turn 2"}[turn]);
        assert_next(ring, REFIT_LOG_ERROR, "worse");
        assert_empty(ring);
        assert_int_equal(refit_log_ring_lost(ring), 0);
    }
    refit_log_ring_close(ring);
}

TEST(a_full_ring_counts_what_it_loses)
{
    refit_log_ring *ring = open_ring(2, REFIT_LOG_INFO);
    for (int i = 0; i < 5; i++)
        rft_log(REFIT_LOG_INFO, "line %d", i);
    assert_int_equal(*refit_log_ring_count(ring), 5);
    assert_next(ring, REFIT_LOG_INFO, "line 0");
    assert_next(ring, REFIT_LOG_INFO, "line 1");
    assert_empty(ring);
    assert_int_equal(refit_log_ring_lost(ring), 3);
    assert_int_equal(refit_log_ring_lost(ring), 0);
    rft_log(REFIT_LOG_INFO, "line 5");
    assert_next(ring, REFIT_LOG_INFO, "line 5");
    refit_log_ring_close(ring);
}

TEST_WITH(a_ring_and_the_function_hear_from_levels_of_their_own, NULL, fall_silent)
{
    heard all = {0};
    refit_log_ring *quiet = open_ring(4, REFIT_LOG_ERROR);
    refit_log_ring *verbose = open_ring(4, REFIT_LOG_DEBUG);
    refit_set_log(hear, &all, REFIT_LOG_WARNING);
    rft_log(REFIT_LOG_INFO, "for one ring");
    assert_int_equal(all.lines, 0);
    rft_log(REFIT_LOG_WARNING, "for two");
    assert_int_equal(all.lines, 1);
    refit_set_log(NULL, NULL, REFIT_LOG_DEBUG);
    rft_log(REFIT_LOG_ERROR, "for both rings");
    assert_next(quiet, REFIT_LOG_ERROR, "for both rings");
    assert_empty(quiet);
    refit_log_ring_set_level(quiet, REFIT_LOG_INFO);
    refit_log_ring_set_level(verbose, REFIT_LOG_ERROR);
    rft_log(REFIT_LOG_INFO, "now for the other");
    assert_next(quiet, REFIT_LOG_INFO, "now for the other");
    refit_log_ring_close(quiet);
    rft_log(REFIT_LOG_INFO, "below the level");
    assert_next(verbose, REFIT_LOG_INFO, "for one ring");
    assert_next(verbose, REFIT_LOG_WARNING, "for two");
    assert_next(verbose, REFIT_LOG_ERROR, "for both rings");
    assert_empty(verbose);
    refit_log_ring_close(verbose);
    rft_log(REFIT_LOG_ERROR, "without a ring");
}

TEST(a_line_is_cut_to_the_reader_s_room)
{
    char line[23] = "xxx";
    refit_log_level level;
    refit_log_ring *ring = open_ring(2, REFIT_LOG_INFO);
    rft_log(REFIT_LOG_INFO, "w\xc3\xa4\xc3\xa4\xc3\xa4\xc3\xa4\xc3\xa4\xc3\xa4\xc3\xa4\xc3\xa4\xc3"
                            "\xa4\xc3\xa4\xc3\xa4\xc3\xa4 ends");
    assert_invalid(refit_log_ring_read(ring, &level, line, 0, NULL));
    assert_ok(refit_log_ring_read(ring, &level, line, sizeof line, NULL));
    assert_true(rft_text_is_clean(line, strlen(line))); /* no half of a character */
    refit_log_ring_close(ring);
}

TEST(a_ring_needs_room_and_memory)
{
    refit_log_ring *ring = NULL;
    assert_invalid(refit_log_ring_open(0, REFIT_LOG_INFO, &ring, NULL));
    failing_alloc_begin(1);
    assert_int_equal(refit_log_ring_open(8, REFIT_LOG_INFO, &ring, NULL), REFIT_ERR_HOST_MEMORY);
    assert_true(failing_alloc_end());
    assert_null(ring);
    refit_log_ring_close(NULL);
}

#define SPEAKERS 4
#define SPOKEN   500

static void *speak_often(void *user)
{
    for (int i = 0; i < SPOKEN; i++)
        rft_log(REFIT_LOG_INFO, "%d", i);
    return user;
}

TEST(every_line_of_many_threads_is_kept_or_counted)
{
    rft_thread threads[SPEAKERS];
    char line[400];
    refit_log_level level;
    uint64_t read = 0, lost = 0;
    refit_log_ring *ring = open_ring(16, REFIT_LOG_INFO);
    const uint64_t *count = refit_log_ring_count(ring);
    for (int i = 0; i < SPEAKERS; i++)
        assert_ok(rft_thread_start(&threads[i], "speaks", speak_often, NULL, NULL));
    while (__atomic_load_n(count, __ATOMIC_ACQUIRE) < SPEAKERS * SPOKEN) {
        while (refit_log_ring_read(ring, &level, line, sizeof line, NULL) == REFIT_OK)
            read++;
        lost += refit_log_ring_lost(ring);
    }
    for (int i = 0; i < SPEAKERS; i++)
        rft_thread_join(threads[i]);
    while (refit_log_ring_read(ring, &level, line, sizeof line, NULL) == REFIT_OK)
        read++;
    assert_int_equal(read + lost + refit_log_ring_lost(ring), SPEAKERS * SPOKEN);
    refit_log_ring_close(ring);
}

TEST(the_ring_of_a_child_is_empty_and_goes_on)
{
    char line[400];
    refit_log_level level;
    refit_log_ring *ring = open_ring(1, REFIT_LOG_INFO);
    rft_log(REFIT_LOG_INFO, "the parent's");
    rft_log(REFIT_LOG_INFO, "lost by the parent");
    pid_t child = fork();
    if (child == 0) {
        bool empty = refit_log_ring_read(ring, &level, line, sizeof line, NULL) != REFIT_OK;
        bool none_lost = refit_log_ring_lost(ring) == 0;
        rft_log(REFIT_LOG_INFO, "the child's");
        bool kept = refit_log_ring_read(ring, &level, line, sizeof line, NULL) == REFIT_OK;
        _exit(empty && none_lost && kept && strcmp(line, "the child's") == 0 ? 0 : 1);
    }
    assert_child_succeeds(child);
    assert_next(ring, REFIT_LOG_INFO, "the parent's");
    assert_int_equal(refit_log_ring_lost(ring), 1);
    refit_log_ring_close(ring);
}

int main(void)
{
    return test_run("log");
}
