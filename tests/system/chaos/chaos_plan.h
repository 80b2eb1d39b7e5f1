/*
 * chaos_plan: everything that is random about a run, drawn from its seed before the run begins.
 */
#ifndef CHAOS_PLAN_H
#define CHAOS_PLAN_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "division.h"
#include "model.h"

#define WORKERS_MOST  16u
#define VERSIONS_MOST 256u
#define ACTIONS_MOST  1024u
#define OTHER_USER    54321u /* of workers that are apart: nothing is known of it on the machine */
#define OF_RANKS      WORKERS_MOST /* numbers of links: first those of workers */

/* ---- Manners of attackers, and of a worker's user */

typedef enum attacker_role {
    ROLE_STRANGER,
    ROLE_EVICTED,
    ROLE_LIAR,
    ROLES,
} attacker_role;

typedef enum stranger_manner {
    STRANGER_SAYS_NOTHING, /* of some bytes; many connections at once, like all of these */
    STRANGER_HALF_OPEN,    /* connects, and is silent */
    STRANGER_HALF_GREETS,
    STRANGER_GREETS_WRONGLY, /* a right greeting, then what is none */
    STRANGER_PLAIN,          /* a whole handshake without keys, then garbage */
    STRANGER_MUTE,           /* a whole handshake, then silence */
    STRANGER_ENDLESS,        /* a whole handshake, then a message without an end */
    STRANGER_CLAIMS_IDS, /* whole handshakes, by routing ids that the trainer may give to others */
    STRANGER_MANNERS,
} stranger_manner;

typedef enum liar_manner {
    LIAR_ANYTHING,      /* any message, at any moment */
    LIAR_NEVER_STAGES,  /* joins and beats */
    LIAR_WRONG_DIGESTS, /* says that it staged, and applied, other bytes */
    LIAR_FUTURE,        /* acknowledges versions that do not exist */
    LIAR_OUT_OF_ORDER,  /* applied before staged, twice, released before applied */
    LIAR_TAKES_BACK,    /* stages at once without having read anything, then fails */
    LIAR_CLAIMS_NAMES,  /* says HELLO in a worker's name */
    LIAR_ABSURD_COUNTS, /* asks for all frames, again and again */
    LIAR_SILENT,        /* joins, and is not heard of any more */
    LIAR_OBSERVES,      /* asks what there is, without end */
    LIAR_SHARES,        /* names images that are not there, or not what it says */
    LIAR_MANNERS,
} liar_manner;

typedef enum worker_manner {
    MANNER_PLAIN,
    MANNER_SLOW, /* the next update only, like all below but the last */
    MANNER_REFUSE_KEPT,
    MANNER_REFUSE_LOST,
    MANNER_HOLD,
    MANNER_DEAF, /* until it is told otherwise */
} worker_manner;

/* ---- Actions */

/* X(name, words, target, weight, least and most amount, least and most ms). The amount is what the
 * words say; the ms are how long it lasts, until it is mended. */
#define CHAOS_ACTIONS(X)                                                                           \
    X(KILL, "is killed, and replaced after ms", WORKER, 6, 0, 1, 0, 150)                           \
    X(LEAVE, "leaves, and is replaced after ms", WORKER, 3, 0, 1, 0, 100)                          \
    X(STOP, "is stopped for ms", WORKER, 6, 0, 0, 5, 500)                                          \
    X(SLOW, "thinks for so many ms before it accepts", WORKER, 4, 1, 80, 0, 0)                     \
    X(DEAF, "neither takes nor decides for ms", WORKER, 3, 0, 0, 100, 700)                         \
    X(REFUSE_KEPT, "refuses, and keeps what it has", WORKER, 2, 0, 0, 0, 0)                        \
    X(REFUSE_LOST, "refuses, and has lost what it had", WORKER, 2, 0, 0, 0, 0)                     \
    X(HOLD, "keeps its update open for so many ms", WORKER, 3, 10, 900, 0, 0)                      \
    X(REVOKE, "has its key taken off the list for ms (if there are keys)", WORKER, 3, 0, 0, 50,    \
      900)                                                                                         \
    X(CLOCK, "finds its wall clock moved by so many minutes", WORKER, 2, 1, 100000, 0, 0)          \
    X(DELAY, "link: everything takes so many ms longer, for ms", LINK, 4, 1, 30, 50, 400)          \
    X(THROTTLE, "link: so many KB a second, for ms", LINK, 4, 200, 5000, 100, 500)                 \
    X(RESET, "link: all connections are reset", LINK, 6, 0, 0, 0, 0)                               \
    X(CLOSE, "link: all connections are closed", LINK, 3, 0, 0, 0, 0)                              \
    X(HALF_DOWN, "link: the way to the worker is shut", LINK, 2, 0, 0, 0, 0)                       \
    X(HALF_UP, "link: the way to the trainer is shut", LINK, 2, 0, 0, 0, 0)                        \
    X(HOLE, "link: nothing passes for ms", LINK, 5, 0, 0, 20, 600)                                 \
    X(FLIP_DOWN, "link: flips a bit so many bytes ahead, to the worker", LINK, 9, 0, 400000, 0, 0) \
    X(FLIP_UP, "link: flips a bit so many bytes ahead, to the trainer", LINK, 2, 0, 600, 0, 0)     \
    X(KILL_TRAINER, "the trainer is killed, and replaced after ms", TRAINER, 2, 0, 0, 0, 300)      \
    X(STOP_TRAINER, "the trainer is stopped for ms", TRAINER, 2, 0, 0, 5, 500)                     \
    X(REOPEN, "the trainer closes and opens again", TRAINER, 1, 0, 0, 0, 0)                        \
    X(DECLARE, "the trainer declares other tensors", TRAINER, 2, 0, 0, 0, 0)                       \
    X(CANCEL, "the trainer is cancelled", TRAINER, 3, 0, 0, 0, 0)                                  \
    X(STRANGER, "a stranger comes, in the manner of this number, for ms", ATTACK, 3, 0,            \
      STRANGER_MANNERS - 1, 50, 600)                                                               \
    X(EVICTED, "a worker is evicted, and goes on, for ms", ATTACK, 2, 0, 1, 100, 600)              \
    X(LIAR, "a worker lies, in the manner of this number, for ms", ATTACK, 4, 0, LIAR_MANNERS - 1, \
      100, 900)                                                                                    \
    X(KILL_ALL, "all workers are killed at once, and replaced after ms", TRAINER, 1, 0, 0, 0, 100) \
    /* drawn apart */                                                                              \
    X(SCARCE, "has no memory for a version that is shared [0], or for any [1], for ms", WORKER, 0, \
      0, 1, 50, 500)                                                                               \
    /* and of a trainer of several ranks */                                                        \
    X(KILL_RANK, "this rank is killed, and replaced after ms", TRAINER, 0, 0, RANKS_MOST - 1, 0,   \
      300)                                                                                         \
    X(STOP_RANK, "this rank is stopped for ms", TRAINER, 0, 0, RANKS_MOST - 1, 5, 600)             \
    X(CANCEL_RANK, "this rank is cancelled", TRAINER, 0, 0, RANKS_MOST - 1, 0, 0)

typedef enum chaos_action_kind {
#define CHAOS_ACTION_ENUM(name, words, target, weight, low, high, short_, long_) ACTION_##name,
    CHAOS_ACTIONS(CHAOS_ACTION_ENUM)
#undef CHAOS_ACTION_ENUM
        ACTION_KINDS,
} chaos_action_kind;

typedef enum chaos_target {
    TARGET_WORKER,
    TARGET_LINK,
    TARGET_TRAINER,
    TARGET_ATTACK
} chaos_target;

/* When harm comes to a rank. */
typedef enum chaos_phase {
    PHASE_TIME,    /* at_ms */
    PHASE_SHARD,   /* while all say once more which shards they have, before the version */
    PHASE_WRITING, /* it has begun the version */
    PHASE_COMMIT,  /* it has written its shard */
    PHASE_DECIDED, /* a worker has been told to take the version, or the rank's commit is over */
    PHASES,
} chaos_phase;

typedef struct chaos_action {
    chaos_action_kind kind;
    chaos_phase phase;
    uint32_t after_ms; /* the phase has begun */
    uint32_t worker;   /* or the link of that worker, or, from OF_RANKS on, of a rank */
    uint32_t rank;     /* to which its link leads */
    uint32_t at_ms;    /* after the version has begun; 0: before */
    uint32_t amount;
    uint32_t ms;
} chaos_action;

typedef enum chaos_fate {
    FATE_COMMIT,
    FATE_ABORT, /* when it is half written */
} chaos_fate;

/* How a trainer that is on the GPU writes a version. */
typedef enum chaos_way {
    WAY_HOST,   /* from host memory */
    WAY_COPIED, /* from the GPU; streamed, where the bucket is small */
    WAY_LENT,
    WAY_PARTS, /* each second tensor is lent, the others are copied */
    WAYS,
} chaos_way;

typedef struct chaos_version_plan {
    model_rate rate;
    chaos_way way;
    uint64_t change; /* seed of what changes */
    chaos_fate fate;
    uint32_t aborts;   /* ranks that abort it, a bit each */
    uint32_t wait_ms;  /* it waits for the workers that are well before it begins, so long */
    uint32_t pause_us; /* between two tensors */
    uint32_t first;    /* of its actions */
    uint32_t actions;
} chaos_version_plan;

typedef struct chaos_worker_plan {
    bool gpu; /* it is on the trainer's GPU, if the trainer is on one */
    bool shm;
    bool polls;           /* its user polls the descriptor; else it waits in next */
    bool parts;           /* it selects parts of the tensors */
    bool apart;           /* it runs as another user */
    int64_t wall_clock_s; /* its wall clock is off by so much */
    int64_t boot_clock_s; /* and its monotonic clock, where the machine allows it */
} chaos_worker_plan;

typedef struct chaos_plan {
    uint64_t seed;
    uint32_t versions;
    uint32_t workers;
    uint32_t slots;
    uint32_t quorum; /* 0: commit: all */
    bool late;       /* broadcast.wait: staged: workers may be older by two versions */
    bool remote;     /* the trainer shares no memory, as if it were on another host than workers */
    uint32_t frame_kib;
    uint32_t window;
    const char *delta; /* broadcast.delta */
    bool zstd;
    uint32_t encoders;
    bool verify_always;
    bool keys;           /* the sockets are encrypted */
    bool numbers_fall;   /* versions of a new trainer are lower than those of the last one */
    uint32_t variant;    /* of the model */
    bool gpu;            /* the trainer is on one */
    bool gpu_stores;     /* and keeps copies of all versions there: broadcast.gpu: store */
    uint32_t bucket_kib; /* broadcast.gpu_bucket_bytes */
    uint32_t ranks;      /* of the trainer, a publisher each; 1: it is one */
    bool linked;         /* the other ranks, too, are reached through the proxy */
    bool users;          /* some workers run as another user */
    int64_t trainer_wall_clock_s;
    uint32_t attacks[ROLES]; /* versions in which one of each role comes, whatever else does */
    uint64_t model;
    chaos_worker_plan each[WORKERS_MOST];
    chaos_version_plan version[VERSIONS_MOST];
    chaos_action actions[ACTIONS_MOST];
    uint32_t action_count;
} chaos_plan;

void plan_draw(chaos_plan *plan, uint64_t seed, uint32_t versions, uint32_t workers);
void plan_print(const chaos_plan *plan, FILE *to);
void plan_print_action(const chaos_action *action, FILE *to);

const char *way_name(chaos_way way);
const char *phase_name(chaos_phase phase);
chaos_target action_target(chaos_action_kind kind);

#endif
