/*
 * actor: what a trainer and a worker of a run have in common: they count what the library allocates
 * for itself, send its log lines to the conductor, and read their options off the plan.
 */
#ifndef CHAOS_ACTOR_H
#define CHAOS_ACTOR_H

#include <netinet/in.h>

#include <refit.h>

#include "chaos_plan.h"
#include "note.h"
#include "on_gpu.h"
#include "tests/support/key_fixture.h"

/* Timeouts of every run, in ms. */
#define ACTOR_HEARTBEAT         30u
#define ACTOR_HEARTBEAT_TIMEOUT 300u
#define ACTOR_STAGE_TIMEOUT     700u
#define ACTOR_COMMIT_TIMEOUT    600u
#define ACTOR_LINGER            12000u /* what closes is not held up so long by the machine */

/* The arguments of a process. */
typedef struct actor_part {
    const chaos_plan *plan;
    int line;
    char endpoint[256];
    uint32_t number; /* of the worker, or of the trainer: 0, 1, … in the order they came */
    char name[64];   /* of the worker */
    char key[16];    /* of the worker */
    const key_fixture *smith; /* of the run's keys; NULL: none */
    uint32_t rank;            /* of the trainer's process */
    bool boot_clock;          /* whether its monotonic clock is moved, too */
    bool gpu;                 /* whether it is on the GPU */
    struct in_addr address; /* of the worker: that of the run, and its ports for the ranks there */
    uint16_t ports[RANKS_MOST];
    uid_t user; /* that the worker becomes; 0: it stays what it is */
} actor_part;

/* Called first. */
void actor_prepare(const actor_part *part);

/* Fills in the options that both share. */
refit_status actor_configure(const actor_part *part, bool shm, refit_config *config,
                             refit_error *error);

/* Obeys an order that is the same for both: COUNT or PLANT. `is_steady` says whether `who` has what
 * it has between two versions: a trainer all its workers, a worker its trainer. */
void actor_obey(const actor_part *part, const chaos_note *order, bool (*is_steady)(const void *who),
                const void *who);

/* Tells the conductor that nothing is open any more. */
void actor_leave(const actor_part *part);

/* Both serve their line until it ends, then close in good order. The process's exit status. */
int trainer_run(const actor_part *part);
int worker_run(const actor_part *part);

#endif
