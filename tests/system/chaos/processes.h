/*
 * processes: the processes of a run, each on a line. They end with their line, and with the
 * process that started them.
 */
#ifndef CHAOS_PROCESSES_H
#define CHAOS_PROCESSES_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "actor.h"

typedef struct process {
    pid_t pid; /* 0: there is none */
    int line;
    bool stopped;
} process;

typedef int (*process_fn)(const actor_part *part);

/* `keep` is a list of descriptors that it inherits besides its line, ended by -1; NULL: none. */
bool process_start(process *one, process_fn run, const actor_part *part, const int *keep);
void process_kill(process *one);
void process_stop(process *one);
void process_continue(process *one);
/* Waits until it has ended by itself, at most so long; whether its status was 0. */
bool process_await_end(process *one, uint32_t timeout_ms);

#endif
