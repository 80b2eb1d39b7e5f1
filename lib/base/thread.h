/*
 * thread: threads, and the means by which they wait for each other: locks, conditions, the wake
 * descriptor of a thread that polls, and the count of pending readers of some memory.
 *
 * Every wait of a caller has a deadline. A thread of refit's has all signals blocked, so that it
 * never takes one that is meant for the host process.
 */
#ifndef RFT_THREAD_H
#define RFT_THREAD_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"

typedef pthread_mutex_t rft_mutex;
typedef pthread_cond_t rft_cond;
typedef pthread_t rft_thread;

/* Start, lock and unlock cannot fail on a mutex that was opened. */
refit_status rft_mutex_open(rft_mutex *mutex, refit_error *error);
void rft_mutex_close(rft_mutex *mutex);
void rft_lock(rft_mutex *mutex);
void rft_unlock(rft_mutex *mutex);

refit_status rft_cond_open(rft_cond *cond, refit_error *error);
void rft_cond_close(rft_cond *cond);
void rft_cond_wake_all(rft_cond *cond);
void rft_cond_wake_one(rft_cond *cond);

/* Waits, `mutex` held; false once `deadline` (of rft_deadline) has passed. Wakes may be spurious.
 */
bool rft_cond_wait(rft_cond *cond, rft_mutex *mutex, int64_t deadline);

/* The same without a deadline: for a service thread that has nothing to do until it is woken, and
 * for which no caller waits. */
void rft_cond_wait_idle(rft_cond *cond, rft_mutex *mutex);

/* Starts a thread with all signals blocked; `name` (at most 15 bytes) is what top and gdb show. */
refit_status rft_thread_start(rft_thread *thread, const char *name, void *(*run)(void *),
                              void *user, refit_error *error);
void rft_thread_join(rft_thread thread);

/* The CPUs that this process may use: at least 1. */
uint32_t rft_cpu_count(void);

/* ---- Wake descriptor: an eventfd that polls readable while it is set. Another thread, or a signal
 * handler, ends a service thread's poll with it, and a caller's event loop learns from it that
 * something is there. */

/* Not set at first. REFIT_ERR_SYSTEM. */
refit_status rft_wake_fd_open(int *fd, refit_error *error);
/* -1 is allowed. */
void rft_wake_fd_close(int fd);

/* Any thread, and safe in a signal handler. To set it twice is to set it once. */
void rft_wake_fd_set(int fd);
void rft_wake_fd_clear(int fd);

/* ---- Pending readers: how many payloads the transport, or copies a device, still reads from some
 * memory. The transport's own threads lower the count, so it is one atomic word: they take no lock,
 * and nothing can be freed under them. */

/* {0} is ready to use. It must live until the count is 0. */
typedef struct rft_pending {
    _Atomic uint32_t word; /* the count, and one bit for "a thread waits" */
} rft_pending;

void rft_pending_raise(rft_pending *pending);
void rft_pending_lower(rft_pending *pending);
uint32_t rft_pending_count(rft_pending *pending);

/* Waits until the count is 0; false once `deadline` (of rft_deadline) has passed. One thread at a
 * time. */
bool rft_pending_wait(rft_pending *pending, int64_t deadline);

#endif
