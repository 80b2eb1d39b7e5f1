/*
 * encoders: threads that share the coding of frames. They start with the first work that is worth
 * sharing, and end with the publisher; who asks takes part, so with no helper at all the work is
 * done as well.
 */
#ifndef RFT_ENCODERS_H
#define RFT_ENCODERS_H

#include "base/thread.h"

#define RFT_ENCODERS_MOST 64u

/* Does item number `item`. `worker` is below RFT_ENCODERS_MOST, and two that run at once are never
 * the same. */
typedef void (*rft_encode_fn)(void *user, uint32_t item, uint32_t worker);

typedef struct rft_encoders {
    uint32_t threads; /* that share work, the asking one included; 0: not open */
    rft_mutex lock;
    rft_cond work;        /* next < count, or closing */
    rft_cond finished;    /* the last item is done */
    rft_encode_fn encode; /* guarded by lock, like the rest */
    void *user;
    uint32_t next; /* item to be claimed */
    uint32_t count;
    uint32_t running; /* claimed and not done */
    uint32_t started; /* helpers */
    uint32_t named;   /* of these, those that know which worker they are */
    bool refused;     /* a helper could not be started; said once, not tried again */
    bool closing;
    rft_thread helpers[RFT_ENCODERS_MOST];
} rft_encoders;

/* `threads` 0: one per core, at most 8. */
refit_status rft_encoders_open(rft_encoders *encoders, uint32_t threads, refit_error *error);
/* {0} is allowed. */
void rft_encoders_close(rft_encoders *encoders);

/* Does items 0 to count - 1, in any order, and returns when all are done. One thread at a time. */
void rft_encoders_run(rft_encoders *encoders, uint32_t count, rft_encode_fn encode, void *user);

#endif
