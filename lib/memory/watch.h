/*
 * watch: how far a long piece of work has come, for whoever looks from another thread, and the word
 * to stop it.
 */
#ifndef RFT_WATCH_H
#define RFT_WATCH_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"
#include "base/thread.h"

typedef struct rft_watch {
    atomic_bool in_line;        /* it waits for other processes, and has nothing yet */
    atomic_uint_fast64_t taken; /* bytes that are memory by now, */
    atomic_uint_fast64_t ready; /* and those of them that are as they are to be */
    atomic_bool stopped;
    rft_mutex lock;
    rft_cond moved; /* the work has ended, or is to stop */
} rft_watch;

refit_status rft_watch_open(rft_watch *watch, refit_error *error);
void rft_watch_close(rft_watch *watch);

/* Tells the work to stop where it is. Any thread. */
void rft_watch_stop(rft_watch *watch);

/* For the work: REFIT_ERR_CANCELLED once it has been told to stop. */
refit_status rft_watch_check(rft_watch *watch, refit_error *error);

/* For the work: lets time pass until `deadline`, or until it is told to stop. */
void rft_watch_pause(rft_watch *watch, int64_t deadline);

#endif
