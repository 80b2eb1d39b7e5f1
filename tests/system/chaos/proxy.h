/*
 * proxy: the network between the trainer and its workers, in a process of its own: links, whose
 * connections it forwards to a port of the trainer's, and breaks as it is told. Each worker has a
 * link to each rank of the trainer, and each other rank one to rank 0; for that it is the worker.
 * Nothing is lost or mixed up that TCP would deliver, but for the bits that it flips.
 */
#ifndef CHAOS_PROXY_H
#define CHAOS_PROXY_H

#include <netinet/in.h>
#include <stdint.h>

#include "chaos_plan.h"

typedef enum proxy_fault {
    FAULT_DELAY,     /* amount: ms; 0: none */
    FAULT_RATE,      /* amount: bytes a second, each way; 0: all */
    FAULT_HOLE,      /* amount: 1: nothing passes, no connection is taken; 0: what waited passes */
    FAULT_RESET,     /* all connections */
    FAULT_CLOSE,     /* all connections, in good order */
    FAULT_HALF_DOWN, /* the worker is told that nothing more comes */
    FAULT_HALF_UP,   /* the trainer is */
    FAULT_FLIP_DOWN, /* amount: bytes that pass before, on the way to the worker */
    FAULT_FLIP_UP,
    FAULT_FLIP_NONE, /* none of those that are to come */
} proxy_fault;

#define LINKS_MOST ((WORKERS_MOST + 1) * RANKS_MOST)

/* Serves until its line ends. `listeners` are the links' sockets, `ranks` the ranks that they lead
 * to. */
void proxy_run(int line, const int *listeners, const uint32_t *ranks, uint32_t count);

/* A socket that listens at any free port of `address`. */
int proxy_listen(struct in_addr address, uint16_t *port);

#endif
