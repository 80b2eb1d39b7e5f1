/* Threads take no signals, waits end at their deadline, and deadlines count down. */
#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>

#include "base/clock.h"
#include "base/thread.h"
#include "tests/support/test.h"

typedef struct meeting {
    rft_mutex lock;
    rft_cond arrived;
    bool there;  /* guarded by lock */
    int blocked; /* written before the thread arrives */
} meeting;

static void *arrive(void *user)
{
    meeting *it = user;
    sigset_t set;
    pthread_sigmask(SIG_SETMASK, NULL, &set);
    it->blocked =
        sigismember(&set, SIGINT) && sigismember(&set, SIGTERM) && sigismember(&set, SIGUSR1);
    rft_lock(&it->lock);
    it->there = true;
    rft_cond_wake_all(&it->arrived);
    rft_unlock(&it->lock);
    return NULL;
}

TEST(a_wait_ends_when_it_is_woken)
{
    meeting it = {0};
    rft_thread thread;
    assert_ok(rft_mutex_open(&it.lock, NULL));
    assert_ok(rft_cond_open(&it.arrived, NULL));
    assert_ok(rft_thread_start(&thread, "arriving", arrive, &it, NULL));
    int64_t deadline = rft_deadline(20000);
    rft_lock(&it.lock);
    while (!it.there && rft_cond_wait(&it.arrived, &it.lock, deadline)) {
    }
    assert_true(it.there);
    rft_unlock(&it.lock);
    rft_thread_join(thread);
    assert_true(it.blocked);
    rft_cond_close(&it.arrived);
    rft_mutex_close(&it.lock);
}

TEST(a_wait_without_a_wake_ends_at_its_deadline)
{
    meeting it = {0};
    assert_ok(rft_mutex_open(&it.lock, NULL));
    assert_ok(rft_cond_open(&it.arrived, NULL));
    int64_t deadline = rft_deadline(20);
    rft_lock(&it.lock);
    while (rft_cond_wait(&it.arrived, &it.lock, deadline)) {
    }
    rft_unlock(&it.lock);
    assert_true(rft_now() >= deadline);
    rft_cond_close(&it.arrived);
    rft_mutex_close(&it.lock);
}

TEST(looks_end_at_their_deadline)
{
    rft_looks over = rft_looks_until(rft_now());
    assert_false(rft_poll_again(&over));
    int64_t deadline = rft_deadline(5);
    rft_looks looks = rft_looks_until(deadline);
    while (rft_poll_again(&looks)) {
    }
    assert_true(rft_now() >= deadline);
}

TEST(a_passed_deadline_leaves_no_time)
{
    assert_int_equal(rft_ms_until(rft_now() - 1), 0);
    assert_true(rft_ms_until(rft_deadline(60000)) > 0);
    assert_true(rft_ms_until(rft_deadline(60000)) <= 60000);
    assert_int_equal(rft_ms_until(INT64_MAX), INT32_MAX);
}

/* A machine of so many CPUs, of which the process may use all; 0: this machine. */
static size_t cpus;

int __real_sched_getaffinity(pid_t pid, size_t bytes, cpu_set_t *set);
int __wrap_sched_getaffinity(pid_t pid, size_t bytes, cpu_set_t *set);

int __wrap_sched_getaffinity(pid_t pid, size_t bytes, cpu_set_t *set)
{
    if (cpus == 0) return __real_sched_getaffinity(pid, bytes, set);
    if (bytes * 8 < cpus) {
        errno = EINVAL;
        return -1;
    }
    memset(set, 0, bytes);
    for (size_t cpu = 0; cpu < cpus; cpu++)
        CPU_SET_S(cpu, bytes, set);
    return 0;
}

TEST(all_cpus_of_a_large_machine_are_counted)
{
    assert_true(rft_cpu_count() >= 1);
    const size_t machines[] = {1, 1024, 1025, 1536, 8192};
    for (size_t i = 0; i < COUNT_OF(machines); i++) {
        cpus = machines[i];
        assert_int_equal(rft_cpu_count(), machines[i]);
    }
    cpus = 100000; /* more than there can be: the answer is not an error */
    assert_int_equal(rft_cpu_count(), 1);
    cpus = 0;
}

/* ---- Wake descriptors: readable while set, however often; clear after one clear */

static int is_set(int fd)
{
    struct pollfd item = {.fd = fd, .events = POLLIN};
    return poll(&item, 1, 0);
}

TEST(it_is_readable_while_it_is_set)
{
    int fd = -1;
    refit_error error;
    assert_ok(rft_wake_fd_open(&fd, &error));
    assert_int_equal(is_set(fd), 0);
    rft_wake_fd_set(fd);
    rft_wake_fd_set(fd);
    assert_int_equal(is_set(fd), 1);
    assert_int_equal(is_set(fd), 1);
    rft_wake_fd_clear(fd);
    assert_int_equal(is_set(fd), 0);
    rft_wake_fd_clear(fd);
    assert_int_equal(is_set(fd), 0);
    rft_wake_fd_close(fd);
}

TEST(setting_does_not_change_errno)
{
    int fd = -1;
    refit_error error;
    assert_ok(rft_wake_fd_open(&fd, &error));
    errno = 77;
    rft_wake_fd_set(fd);
    assert_int_equal(errno, 77);
    rft_wake_fd_close(fd);
    errno = 77;
    rft_wake_fd_set(-1);
    rft_wake_fd_close(-1);
    assert_int_equal(errno, 77);
}

/* ---- The counter of payloads in flight: it waits for zero, wakes at once, keeps its deadline */

#define ROUNDS 2000

TEST(counts_up_and_down)
{
    rft_pending pending = {0};
    assert_int_equal(rft_pending_count(&pending), 0);
    assert_true(rft_pending_wait(&pending, 0));
    rft_pending_raise(&pending);
    rft_pending_raise(&pending);
    assert_int_equal(rft_pending_count(&pending), 2);
    rft_pending_lower(&pending);
    assert_int_equal(rft_pending_count(&pending), 1);
}

TEST(deadline_ends_the_wait_and_the_count_stays)
{
    rft_pending pending = {0};
    rft_pending_raise(&pending);
    assert_false(rft_pending_wait(&pending, rft_deadline(5)));
    assert_int_equal(rft_pending_count(&pending), 1);
}

static void *lower_all(void *user)
{
    for (int i = 0; i < ROUNDS; i++)
        rft_pending_lower(user);
    return NULL;
}

TEST(last_one_of_another_thread_wakes)
{
    for (int round = 0; round < 50; round++) {
        rft_pending pending = {0};
        rft_thread thread;
        for (int i = 0; i < ROUNDS; i++)
            rft_pending_raise(&pending);
        assert_ok(rft_thread_start(&thread, "lower", lower_all, &pending, NULL));
        bool empty = rft_pending_wait(&pending, rft_deadline(20000));
        rft_thread_join(thread);
        assert_true(empty);
        assert_int_equal(rft_pending_count(&pending), 0);
    }
}

int main(void)
{
    return test_run("thread");
}
