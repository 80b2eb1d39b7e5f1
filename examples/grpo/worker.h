/* worker: a rollout worker process: subscribe, load each committed version, roll out, send back. */
#ifndef GRPO_WORKER_H
#define GRPO_WORKER_H

#include "run_options.h"

/* The descriptor on which a worker finds the socket to its trainer. */
enum { WORKER_SOCKET = 3 };

/* Runs until the trainer is gone; returns the exit status. */
int worker_run(const run_options *options);

#endif
