/*
 * cycle: what the controller's files share, and the figures of the cycle under way.
 *
 * A cycle begins with a clear in TRAINING and ends with the join. One thread at a time uses all of
 * this.
 */
#ifndef RFT_CYCLE_H
#define RFT_CYCLE_H

#include <stdbool.h>

#include <refit/controller.h>

#include "base/error.h"

typedef enum rft_phase {
    RFT_PHASE_CLEAR,
    RFT_PHASE_PUBLISH,
    RFT_PHASE_RETURN,
    RFT_PHASE_JOIN,
    RFT_PHASES,
} rft_phase;

typedef struct rft_cycle {
    bool open;
    bool failed; /* a phase has */
    int64_t began;
    int64_t exposed;            /* nanoseconds in the verbs so far */
    int64_t phases[RFT_PHASES]; /* nanoseconds in each phase's verb so far */
    uint64_t completed;
    uint64_t failures;       /* cycles in which a phase failed */
    int64_t last_seconds_ns; /* of the last cycle that completed */
    int64_t last_exposed_ns;
} rft_cycle;

struct refit_controller {
    refit_offloader *offloader; /* borrowed; NULL: nothing leaves */
    refit_publisher *publisher; /* borrowed; NULL: nothing is published */
    refit_config config;
    refit_controller_state state;
    refit_future *returning; /* owned; of the way back, until it is joined */
    rft_cycle cycle;
};

/* A clear begins in TRAINING, at `began` (rft_now). */
void rft_cycle_begin(rft_cycle *cycle, int64_t began);

/* A phase that `began` has returned `status`, which is passed on. */
refit_status rft_cycle_count(rft_cycle *cycle, rft_phase phase, int64_t began, refit_status status);

/* The states are joined. */
void rft_cycle_end(rft_cycle *cycle);

#endif
