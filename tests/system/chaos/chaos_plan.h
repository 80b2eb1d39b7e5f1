/*
 * chaos_plan: everything that is random about a run, drawn from its seed before the run begins.
 */
#ifndef CHAOS_PLAN_H
#define CHAOS_PLAN_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "attack_manners.h"
#include "model.h"

#define WORKERS_MOST  16u
#define VERSIONS_MOST 256u
#define DEEDS_MOST    1024u

/* X(name, words, target, weight, least and most amount, least and most ms). The amount is what the
 * words say; the ms are how long it lasts, until it is mended. */
#define CHAOS_DEEDS(X)                                                                             \
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
    X(KILL_ALL, "all workers are killed at once, and replaced after ms", TRAINER, 1, 0, 0, 0, 100)

typedef enum chaos_deed_kind {
#define CHAOS_DEED_ENUM(name, words, target, weight, low, high, short_, long_) DEED_##name,
    CHAOS_DEEDS(CHAOS_DEED_ENUM)
#undef CHAOS_DEED_ENUM
        DEED_KINDS,
} chaos_deed_kind;

typedef enum chaos_target {
    TARGET_WORKER,
    TARGET_LINK,
    TARGET_TRAINER,
    TARGET_ATTACK
} chaos_target;

typedef struct chaos_deed {
    chaos_deed_kind kind;
    uint32_t worker; /* or the link of that worker */
    uint32_t at_ms;  /* after the version has begun; 0: before */
    uint32_t amount;
    uint32_t ms;
} chaos_deed;

typedef enum chaos_fate {
    FATE_COMMIT,
    FATE_ABORT, /* when it is half written */
} chaos_fate;

typedef struct chaos_version_plan {
    model_rate rate;
    uint64_t change; /* seed of what changes */
    chaos_fate fate;
    uint32_t wait_ms;  /* it waits for the workers that are well before it begins, so long */
    uint32_t pause_us; /* between two tensors */
    uint32_t first;    /* of its deeds */
    uint32_t deeds;
} chaos_version_plan;

typedef struct chaos_worker_plan {
    bool shm;
    bool polls;           /* its user polls the descriptor; else it waits in next */
    int64_t wall_clock_s; /* its wall clock is off by so much */
    int64_t boot_clock_s; /* and its monotonic clock, where the machine allows it */

} chaos_worker_plan;

typedef struct chaos_plan {
    uint64_t seed;
    uint32_t versions;
    uint32_t workers;
    uint32_t slots;
    uint32_t quorum; /* 0: commit: all */
    uint32_t frame_kib;
    uint32_t window;
    const char *delta; /* broadcast.delta */
    bool zstd;
    uint32_t encoders;
    bool verify_always;
    bool keys;         /* the sockets are encrypted */
    bool numbers_fall; /* versions of a new trainer are lower than those of the last one */
    uint32_t variant;  /* of the model */
    int64_t trainer_wall_clock_s;
    uint32_t attacks[ROLES]; /* versions in which one of each role comes, whatever else does */
    uint64_t model;
    chaos_worker_plan each[WORKERS_MOST];
    chaos_version_plan version[VERSIONS_MOST];
    chaos_deed deeds[DEEDS_MOST];
    uint32_t deed_count;
} chaos_plan;

void plan_draw(chaos_plan *plan, uint64_t seed, uint32_t versions, uint32_t workers);
void plan_print(const chaos_plan *plan, FILE *to);
void plan_print_deed(const chaos_deed *deed, FILE *to);

chaos_target deed_target(chaos_deed_kind kind);

#endif
