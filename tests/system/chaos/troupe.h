/*
 * troupe: the processes of a run, each on a line. They end with their line, and with the
 * process that started them.
 */
#ifndef CHAOS_TROUPE_H
#define CHAOS_TROUPE_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "actor.h"

typedef struct player {
    pid_t pid; /* 0: there is none */
    int line;
    bool stopped;
} player;

typedef int (*player_fn)(const actor_part *part);

/* `keep` is a list of descriptors that it inherits besides its line, ended by -1; NULL: none. */
bool player_start(player *one, player_fn run, const actor_part *part, const int *keep);
void player_kill(player *one);
void player_stop(player *one);
void player_continue(player *one);
/* Waits until it has ended by itself, at most so long; whether its status was 0. */
bool player_await_end(player *one, uint32_t timeout_ms);

#endif
