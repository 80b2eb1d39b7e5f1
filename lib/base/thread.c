/*
 * A thin layer over POSIX threads: monotonic conditions, signals blocked, names set.
 */
#include "base/thread.h"

#include <sched.h>
#include <signal.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"

#define CPUS_MOST 65536 /* eight times what Linux can be built for */

refit_status rft_mutex_open(rft_mutex *mutex, refit_error *error)
{
    int code = pthread_mutex_init(mutex, NULL);
    if (code == 0) return REFIT_OK;
    return rft_fail_sub(error, REFIT_ERR_SYSTEM, code, "a mutex could not be made: %s",
                        strerror(code));
}

void rft_mutex_close(rft_mutex *mutex)
{
    pthread_mutex_destroy(mutex);
}

void rft_lock(rft_mutex *mutex)
{
    pthread_mutex_lock(mutex);
}

void rft_unlock(rft_mutex *mutex)
{
    pthread_mutex_unlock(mutex);
}

refit_status rft_cond_open(rft_cond *cond, refit_error *error)
{
    pthread_condattr_t attributes;
    int code = pthread_condattr_init(&attributes);
    if (code == 0) {
        pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
        code = pthread_cond_init(cond, &attributes);
        pthread_condattr_destroy(&attributes);
    }
    if (code == 0) return REFIT_OK;
    return rft_fail_sub(error, REFIT_ERR_SYSTEM, code, "a condition could not be made: %s",
                        strerror(code));
}

void rft_cond_close(rft_cond *cond)
{
    pthread_cond_destroy(cond);
}

void rft_cond_wake_all(rft_cond *cond)
{
    pthread_cond_broadcast(cond);
}

void rft_cond_wake_one(rft_cond *cond)
{
    pthread_cond_signal(cond);
}

bool rft_cond_wait(rft_cond *cond, rft_mutex *mutex, int64_t deadline)
{
    struct timespec until = {.tv_sec = (time_t)(deadline / INT64_C(1000000000)),
                             .tv_nsec = (long)(deadline % INT64_C(1000000000))};
    return pthread_cond_timedwait(cond, mutex, &until) == 0;
}

void rft_cond_wait_idle(rft_cond *cond, rft_mutex *mutex)
{
    pthread_cond_wait(cond, mutex);
}

refit_status rft_thread_start(rft_thread *thread, const char *name, void *(*run)(void *),
                              void *user, refit_error *error)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int code = pthread_create(thread, NULL, run, user);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (code != 0) {
        return rft_fail_sub(error, REFIT_ERR_SYSTEM, code, "thread %s could not be started: %s",
                            name, strerror(code));
    }
    pthread_setname_np(*thread, name);
    return REFIT_OK;
}

void rft_thread_join(rft_thread thread)
{
    pthread_join(thread, NULL);
}

uint32_t rft_cpu_count(void)
{
    /* A cpu_set_t ends at 1,024, and the kernel refuses a set that is too small for the machine. */
    cpu_set_t sets[CPUS_MOST / CPU_SETSIZE];
    if (sched_getaffinity(0, sizeof sets, sets) != 0) return 1;
    int count = CPU_COUNT_S(sizeof sets, sets);
    return count < 1 ? 1 : (uint32_t)count;
}
