/*
 * proxy: the network between the trainer and its workers, in a process of its own: one link for
 * each worker, whose connections it forwards to the trainer's port, and breaks as it is told.
 * Nothing is lost or mixed up that TCP would deliver, but for the bits that it flips.
 */
#ifndef CHAOS_PROXY_H
#define CHAOS_PROXY_H

#include <netinet/in.h>
#include <stdint.h>

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
} proxy_fault;

/* Serves until its line ends. `listeners` are the links' sockets, one for each worker. */
void proxy_run(int line, const int *listeners, uint32_t count);

/* A socket that listens at any free port of `address`. */
int proxy_listen(struct in_addr address, uint16_t *port);

#endif
