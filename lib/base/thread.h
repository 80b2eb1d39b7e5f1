/*
 * Threads, locks and conditions, with the two habits of this house built in: a wait has a deadline,
 * and a thread of refit's never takes a signal meant for its host process.
 */
#ifndef RFT_THREAD_H
#define RFT_THREAD_H

#include <pthread.h>
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

/* For a service thread that has nothing to do until it is told: it has no caller who waits. */
void rft_cond_wait_idle(rft_cond *cond, rft_mutex *mutex);

/* Starts a thread with all signals blocked; `name` (at most 15 bytes) is what top and gdb show. */
refit_status rft_thread_start(rft_thread *thread, const char *name, void *(*run)(void *),
                              void *user, refit_error *error);
void rft_thread_join(rft_thread thread);

/* The CPUs that this process may use: at least 1. */
uint32_t rft_cpu_count(void);

#endif
