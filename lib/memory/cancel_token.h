/*
 * cancel_token: cancels long work on another thread, and tells that thread's progress.
 */
#ifndef RFT_CANCEL_TOKEN_H
#define RFT_CANCEL_TOKEN_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"
#include "base/thread.h"

typedef struct rft_cancel_token {
    atomic_bool in_line;        /* it waits for other processes, and has nothing yet */
    atomic_uint_fast64_t taken; /* bytes that have memory by now, */
    atomic_uint_fast64_t ready; /* and those of them that are ready for use */
    atomic_uint_fast64_t *left; /* where those that have none yet are shown to others; NULL: not */
    atomic_bool stopped;
    rft_mutex lock;
    rft_cond moved; /* the work has ended, or is to stop */
} rft_cancel_token;

refit_status rft_cancel_token_open(rft_cancel_token *token, refit_error *error);
void rft_cancel_token_close(rft_cancel_token *token);

/* Tells the work to stop where it is. Any thread. */
void rft_cancel_token_stop(rft_cancel_token *token);

/* For the work: REFIT_ERR_CANCELLED once it has been told to stop. */
refit_status rft_cancel_token_check(rft_cancel_token *token, refit_error *error);

/* For the work: lets time pass until `deadline`, or until it is told to stop. */
void rft_cancel_token_pause(rft_cancel_token *token, int64_t deadline);

#endif
