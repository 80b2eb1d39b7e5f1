/*
 * POSIX threads with names and blocked signals, conditions on the monotonic clock; an eventfd as
 * wake descriptor; a counter on a futex.
 */
#include "base/thread.h"

#include <errno.h>
#include <linux/futex.h>
#include <sched.h>
#include <signal.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

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

/* ---- The wake descriptor: level-triggered, both ends non-blocking. A write can fail only when the
 * counter is full, and then it is set; a read only when the counter is zero, and then it is clear.
 */

refit_status rft_wake_fd_open(int *fd, refit_error *error)
{
    int made = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (made < 0) {
        return rft_fail_sub(error, REFIT_ERR_SYSTEM, errno, "an eventfd could not be made: %s",
                            strerror(errno));
    }
    *fd = made;
    return REFIT_OK;
}

void rft_wake_fd_close(int fd)
{
    if (fd >= 0) close(fd);
}

void rft_wake_fd_set(int fd)
{
    int before = errno; /* a signal handler must not change it */
    uint64_t one = 1;
    while (write(fd, &one, sizeof one) < 0 && errno == EINTR) {
    }
    errno = before;
}

void rft_wake_fd_clear(int fd)
{
    uint64_t count;
    while (read(fd, &count, sizeof count) < 0 && errno == EINTR) {
    }
}

/* ---- Pending readers
 *
 * Raising and lowering are one atomic addition. The waiting thread sets the top bit first; the
 * lowering that leaves nothing but that bit wakes it. A wake-up that comes after the owner has
 * freed the word goes to an address without a waiting thread, which the kernel allows: like
 * sem_post, it reads nothing there. Lowering releases what its thread has read and written, and the
 * wait acquires it, so that the owner may free or overwrite that on any CPU. */

#define WAITED     (UINT32_C(1) << 31)
#define COUNT_MASK (WAITED - 1)

void rft_pending_raise(rft_pending *pending)
{
    atomic_fetch_add(&pending->word, 1);
}

void rft_pending_lower(rft_pending *pending)
{
    uint32_t before = atomic_fetch_sub(&pending->word, 1);
    if (before == (WAITED | 1)) {
        (void)syscall(SYS_futex, &pending->word, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
    }
}

uint32_t rft_pending_count(rft_pending *pending)
{
    return atomic_load(&pending->word) & COUNT_MASK;
}

bool rft_pending_wait(rft_pending *pending, int64_t deadline)
{
    uint32_t seen = atomic_fetch_or(&pending->word, WAITED) | WAITED;
    while ((seen & COUNT_MASK) != 0) {
        int64_t left = deadline - rft_now();
        if (left <= 0) break;
        struct timespec timeout = {.tv_sec = (time_t)(left / INT64_C(1000000000)),
                                   .tv_nsec = (long)(left % INT64_C(1000000000))};
        (void)syscall(SYS_futex, &pending->word, FUTEX_WAIT_PRIVATE, seen, &timeout, NULL, 0);
        seen = atomic_load(&pending->word);
    }
    return (atomic_fetch_and(&pending->word, COUNT_MASK) & COUNT_MASK) == 0;
}
