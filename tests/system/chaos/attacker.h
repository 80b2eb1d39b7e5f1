/*
 * attacker: processes that do harm, each when it is told and for as long as it is told. They
 * connect to the trainer itself, past the proxy.
 *
 * A stranger has no key and speaks ZMTP at most; a liar is a worker, with a key where there are
 * any, that sends false messages; an evicted worker joins, is evicted, and goes on.
 */
#ifndef CHAOS_ATTACKER_H
#define CHAOS_ATTACKER_H

#include "actor.h"

/* Their keys, and the names that they go by. */
#define ATTACKER_LIAR    "x0"
#define ATTACKER_EVICTED "x1"

/* `part->number` is the role. Serves its line until it ends. The process's exit status. */
int attacker_run(const actor_part *part);

/* The state that an attack may read. */
typedef struct attack {
    const actor_part *part;
    char endpoint[256];
    uint32_t manner;
    uint32_t worker; /* the number of the worker that has the name that may be claimed */
    uint64_t seed;
    int64_t until;
} attack;

/* Whether it goes on: neither is the time over, nor has another order come. Waits for so many ms at
 * most. */
bool attack_goes_on(const attack *what, int wait_ms);

void stranger_attack(const attack *what);
void liar_attack(const attack *what, bool is_evicted);

#endif
