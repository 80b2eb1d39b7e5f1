/*
 * clocks: a process whose clocks are those of another machine. The wall clock is moved inside the
 * process (this program's clock_gettime, gettimeofday and time come before the C library's, also
 * for libzmq); the monotonic clock by a time namespace, where the machine lets us have one.
 */
#ifndef CHAOS_CLOCKS_H
#define CHAOS_CLOCKS_H

#include <stdbool.h>
#include <stdint.h>

void clocks_move_wall(int64_t seconds);

/* This process, which has one thread, gets a monotonic clock that is ahead by so much. False: not
 * allowed here. */
bool clocks_move_boot(int64_t seconds);

#endif
