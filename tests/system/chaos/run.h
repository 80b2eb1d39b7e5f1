/*
 * run: one run of a plan. run.c hears the processes and keeps the time, actions.c does them harm
 * and mends it, conduct.c goes through the versions and looks whether all is well.
 */
#ifndef CHAOS_RUN_H
#define CHAOS_RUN_H

#include <stdio.h>

#include "attacker.h"
#include "chaos_ledger.h"
#include "chaos_plan.h"
#include "processes.h"
#include "proxy.h"
#include "tests/support/key_fixture.h"

typedef struct chaos_options {
    uint32_t versions;
    uint32_t workers;
    bool verbose;
    chaos_plant plant; /* what the last worker does with memory between the two counts */
} chaos_options;

typedef struct run_worker {
    process process;
    char name[64];
    uint32_t times;             /* how often it was started */
    uint16_t ports[RANKS_MOST]; /* of its links */
    uint32_t open_faults;       /* faults that are to be mended yet */
    bool flipped;               /* bits of its messages were */
    bool revoked;               /* its key is off the list, or was */
    bool shut;                  /* it is */
    bool removed;               /* it ended for that, and is to come back with its key */
    uint32_t missed; /* versions, one after the other, for which a flipped bit may be to blame */
    bool ready;
    bool leaving;     /* it was told to leave */
    uint64_t version; /* it has accepted; 0: none */
    uint64_t taken;   /* the update that is open */
    uint64_t digest;  /* of that */
    uint64_t kept;    /* the version that it refused and need not have */
    uint64_t lost;    /* the newest version when a streamed one left it with none */
    chaos_note count; /* NOTE_COUNTED, since it was last asked */
    resources before;
    bool scarce;     /* its memory is */
    bool was_scarce; /* once, its own or that of the one before it */
} run_worker;

/* One rank of the trainer; that of rank 0 is the trainer's process. */
typedef struct run_rank {
    process process;
    char endpoint[256];
    bool ready;
    bool sharded;  /* it has said which shard it has, since it was started */
    bool open;     /* it has been ordered a version, and has not ended it */
    bool harmed;   /* it was stopped meanwhile, or its link to rank 0 was harmed */
    uint16_t port; /* of that link */
    uint32_t open_faults;
    bool garbled;      /* a bit that passed there was flipped, or is to be */
    chaos_phase phase; /* of the version */
    int64_t death;     /* when another rank died meanwhile; 0: none did */
    int64_t written;   /* when it had written its shard; 0: it has not */
    chaos_note done;   /* its last word on the version */
    chaos_note answer; /* NOTE_SHARD: it was told to say its shard; NOTE_SHARDED: it has */
    chaos_note count;
    resources before;
} run_rank;

typedef struct run_mend {
    int64_t due;
    chaos_action_kind kind;
    uint32_t worker; /* as of the action; or the rank */
    uint32_t rank;
} run_mend;

/* The trainer's report of the version under way. */
typedef struct run_round {
    bool open;
    bool hosted;     /* a worker that it counts on is not on the GPU */
    bool passes;     /* see chaos_run */
    chaos_note done; /* its last word, not yet checked */
    ledger_result result;
    uint32_t claimed;    /* as in the run, at any moment since it began */
    uint32_t stopped_ms; /* that the trainer spent stopped */
    uint32_t begin_ms;
    bool decided; /* a worker was told to take it */
    bool told;    /* all ranks know what became of it */
} run_round;

typedef struct run_totals {
    uint32_t committed;
    uint32_t aborted;
    uint32_t actions;
    uint64_t blocks[3]; /* same, sent as changes, whole: to workers with the version before */
    uint32_t missed;    /* versions that a worker lacked after a flipped bit */
    uint64_t damaged;   /* frames */
    uint64_t resent;
    uint64_t evicted;
    uint64_t sent_bytes;
    uint32_t on_gpu;   /* versions that workers took there */
    uint32_t streamed; /* of them, piece by piece */
    uint32_t mapped;   /* versions that workers took from a neighbor's memory */
    uint32_t lost;     /* updates that could not be loaded */
    uint32_t survived; /* commits that another rank's death ended, and the longest of them */
    uint32_t survived_ms;
    uint32_t untold;      /* committed versions of which a rank did not hear */
    uint32_t unexplained; /* of them, those in which nothing was done to a rank */
    uint32_t links;       /* faults of links to, and of, other ranks than 0 */
    uint32_t parts;       /* updates of which a worker takes parts */
    uint32_t scarce;      /* faults of memory, and what came of them: */
    uint32_t unshared;    /* versions that a worker could not share */
    uint32_t refused;     /* or not receive */
    uint32_t owners;      /* segments of shared memory whose owners were looked at */
} run_totals;

typedef struct chaos_run {
    chaos_plan plan;
    const chaos_options *options;
    FILE *log;
    int64_t began;
    key_fixture smith;
    bool keys; /* they are in use */
    process proxy;
    process trainer;
    process attackers[ROLES];
    uint32_t claimed; /* workers in whose names a liar may speak, a bit each: without keys only */
    bool trainer_ready;
    chaos_note trainer_count; /* as that of a worker */
    uint32_t trainers;        /* how many there were */
    uint64_t next;            /* number of the next version */
    uint64_t committed;       /* of the present trainer; 0: none */
    uint32_t wait_ms;         /* how long the version under way may wait for workers */
    uint64_t served;    /* the committed one, if it can still be had: not after other tensors were
                           declared */
    bool hosted;        /* it has a copy in host memory */
    bool passes;        /* it has none on the GPU: it was lent, or streamed */
    uint32_t has;       /* the workers that have applied it, and still have it, a bit each */
    bool gpu;           /* the trainer is on a GPU */
    char endpoint[256]; /* the trainer's */
    resources trainer_before;
    run_rank rank[RANKS_MOST];
    bool sharded;     /* all ranks have said which shard they have */
    bool garbled;     /* a bit of what one of them says to rank 0, or hears, was flipped once */
    uint32_t edition; /* of the shards */
    uint32_t variant; /* of the model that they declare */
    chaos_note order; /* of the version under way */
    uint32_t aborts;  /* ranks that are to abort it, a bit each */
    bool ordered;     /* the other ranks have the order, too */
    run_worker worker[WORKERS_MOST];
    struct in_addr address; /* of everything */
    bool boot_clocks;       /* the machine lets monotonic clocks be moved */
    bool users;             /* some workers run as another user */
    run_mend mends[64];
    uint32_t mend_count;
    ledger ledger;
    run_round round;
    run_totals totals;
} chaos_run;

/* ---- conduct.c */

/* Plays the seed's run in this process. Ends it with status 1, and all it knows printed, if
 * something is wrong. */
void run_play(chaos_run *run, uint64_t seed, const chaos_options *options);

/* ---- run.c */

void run_say(chaos_run *run, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Prints everything, and ends the process. */
_Noreturn void run_fail(chaos_run *run, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
/* Waits at most so long until a process says something, hears all of them, and mends what is due.
 */
void run_pump(chaos_run *run, int timeout_ms);
/* Hears all that the processes have said so far, and neither waits nor mends. */
void run_hear(chaos_run *run);

void run_start_trainer(chaos_run *run);
/* Those of the present trainer, none of which another has. */
void run_number_versions(chaos_run *run);
void run_start_worker(chaos_run *run, uint32_t worker);
/* The number of the link of a worker, or from OF_RANKS on of a rank, to a rank. */
uint32_t run_link_number(const chaos_run *run, uint32_t of, uint32_t to);
void run_link(chaos_run *run, uint32_t number, proxy_fault fault, uint64_t amount);
/* The rank has another port from now on. */
void run_tell_proxy(chaos_run *run, uint32_t rank);

/* Ends all attacks, and waits for nothing. */
void run_end_attacks(chaos_run *run);

void run_key_name(uint32_t worker, char name[16]);

/* The time that an action may take beyond the deadlines of the library. */
uint32_t run_timeout_ms(void);

/* ---- run_ranks.c: nothing of this does anything where the trainer is one */

process *ranks_process(chaos_run *run, uint32_t rank);
void ranks_start(chaos_run *run, uint32_t rank);
/* They have to say once more which shards they have, and serve nothing until the next version. */
void ranks_unshard(chaos_run *run);
bool ranks_are_ready(const chaos_run *run);
void ranks_order_shards(chaos_run *run);
bool ranks_have_answered(const chaos_run *run);
void ranks_conclude_shards(chaos_run *run);
/* A version: the order of all of them, of each, and to all but rank 0. */
void ranks_begin(chaos_run *run, const chaos_note *order, uint32_t aborts);
chaos_note ranks_order_of(const chaos_run *run, uint32_t rank);
void ranks_order_version(chaos_run *run);
bool ranks_are_done(const chaos_run *run);
bool ranks_reached(const chaos_run *run, const chaos_action *action);
void ranks_judge(chaos_run *run);
void ranks_note_death(chaos_run *run, uint32_t dead);
/* What they say to each other may have been garbled: they say once more which shards they have. */
void ranks_ungarble(chaos_run *run);
void ranks_hear(chaos_run *run, uint32_t rank, const chaos_note *note);
void ranks_hear_all(chaos_run *run);

/* ---- users.c */

/* As which user the worker runs; 0: as the run does. */
uid_t users_of(const chaos_run *run, uint32_t worker);
/* Looks for workers that have another user's memory. */
void users_judge(chaos_run *run, uint32_t worker);
/* The trainer says how the worker takes versions. */
void users_judge_path(chaos_run *run, uint32_t worker, refit_path path);

/* ---- scarcity.c */

/* The worker can have no new shared memory, or none at all. False: it has begun before, or is not
 * there. */
bool scarcity_begin(chaos_run *run, uint32_t worker, bool all);
void scarcity_end(chaos_run *run, uint32_t worker);

/* ---- actions.c */

void action_do(chaos_run *run, const chaos_action *action);
/* Mends what is due, or everything. */
void action_mend(chaos_run *run, bool all);
int64_t action_next_mend(const chaos_run *run);

#endif
