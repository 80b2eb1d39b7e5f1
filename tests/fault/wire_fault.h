/*
 * wire_fault: what can go wrong between a trainer and a worker, at the n-th message.
 *
 * The linker puts it between the library and ZeroMQ's calls (--wrap, in CMakeLists.txt). It counts
 * messages, not their parts, of both ends together, since both are in this process.
 */
#ifndef WIRE_FAULT_H
#define WIRE_FAULT_H

#include <stdbool.h>
#include <stdint.h>

typedef enum wire_fault {
    WIRE_NONE,
    WIRE_FULL,      /* a send answers EAGAIN */
    WIRE_GONE,      /* a send answers EHOSTUNREACH */
    WIRE_NO_MEMORY, /* a part of a message to be sent gets no memory; counts parts */
    WIRE_LOST,      /* a send succeeds, and nothing arrives */
    WIRE_UNHEARD,   /* a message arrives, and is dropped before it is received */
    WIRE_DAMAGED,   /* a payload arrives with one bit turned; counts payloads */
    WIRE_FAULTS,
} wire_fault;

const char *wire_fault_name(wire_fault fault);

/* The n-th from now on meets the fault, the first being 1. */
void wire_fail(wire_fault fault, uint64_t nth);

/* Nothing fails from now on. True if the n-th was met before. */
bool wire_stop(void);

#endif
